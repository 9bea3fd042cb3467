"""The server of a graph run on the in-process engine: limit cases, counted bytes, trips, modes, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy import FedMedian
from graph_federation import (
    ENOUGH,
    LR,
    PARTS,
    SEED,
    averaging,
    bits,
    client,
    gradients_on_one_machine,
    graph,
    grid,
    initial,
    made,
    record,
    reports,
    run,
    strategy,
    total,
)

from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.asks import data_in
from fedcomp.flower.payload import FRAME
from fedcomp.graphs.base import GraphPart
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.systems.graphs.words import EVALUATE_TYPE, TRAIN_TYPE

NAMES = (
    *("remote_inputs", "rows_fetched", "feature_bytes_logical", "feature_bytes_link", "id_bytes", "setup_bytes"),
    *("structure_bytes", "local_mass", "scale", "lost_mass", "absent", "replans", "trips", "clients"),
)
"""Figures of a round."""

QUERY = "query"


def feature_bytes(content: RecordDict) -> int:
    """Return how many bytes of feature rows a message holds."""
    return sum(len(data) for name, data in data_in(content, FRAME).items() if name.startswith("rows/"))


class Tape:
    """An app that notes the feature bytes of the messages it is given and of its replies."""

    def __init__(self, parts: list[GraphPart]) -> None:
        self.app = client(parts)
        self.down: list[tuple[str, int]] = []
        self.up: list[tuple[str, int]] = []

    def __call__(self, message: Any, context: Any) -> Any:
        kind = message.metadata.message_type
        self.down.append((kind, feature_bytes(message.content)))
        reply = self.app(message, context)
        self.up.append((kind, feature_bytes(reply.content)))
        return reply


# 6: the limit case.


def one_machine(rounds: int, batch_size: int) -> dict[str, Any]:
    """Train on the union of the clients' batches, with all neighbours, as one machine would."""
    model = initial()
    for number in range(1, rounds + 1):
        for name, gradient in gradients_on_one_machine(model, number, batch_size).items():
            model[name] = model[name] - LR * gradient
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "batch_size", "rounds"), [(1.0, 0, 1), (7.0, 6, 5)])
def test_7_06_with_room_for_all_neighbours_k_clients_train_as_one_machine(
    scale: float, batch_size: int, rounds: int
) -> None:
    of = strategy(n=ENOUGH, mode="fixed", scale=scale, batch_size=batch_size)
    found = run(of, grid(graph()), rounds)
    for name, value in one_machine(rounds, batch_size).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10)
        assert np.abs(value - initial()[name]).max() > 1e-3
    assert of.method == "synchronous data-parallel SGD" == of.reports[1].gcn.method
    assert strategy(local_steps=3).method == "local SGD, 3 steps a round"


@pytest.mark.slow
def test_7_06_a_sampled_run_is_another_one() -> None:
    """Else the limit case would hold for a client that ignores its plan."""
    sampled, whole = run(strategy(), grid(graph()), 2), run(strategy(n=ENOUGH), grid(graph()), 2)
    assert np.abs(sampled["layers.0.weight"] - whole["layers.0.weight"]).max() > 1e-4


# 7: nothing to fetch, no trip.


def test_7_07_one_client_fetches_nothing_and_the_trips_are_saved() -> None:
    parts = graph(parts=1)
    of, over = strategy(), grid(parts)
    run(of, over, 3)
    assert [r.train.trips for r in reports(of)] == [3, 2, 2]  # who are you, plan, train
    assert all(total(of, name) == 0 for name in ("rows_fetched", "feature_bytes_link", "id_bytes", "remote_inputs"))


# 10: what is reported is what was sent.


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dense-f64", "auto"])
def test_7_10_bytes_are_those_of_the_payloads_and_a_link_costs_twice_what_travels(codec: str) -> None:
    tape = Tape(parts := graph())
    of = strategy(averaging(evaluate=True), codec=codec, local_steps=2)
    over = grid(parts, tape)
    run(of, over, 2)
    ledger = over.ledger

    def payload(*kinds: str, **where: Any) -> int:
        return ledger.total("payload", message_type=kinds, **where)

    train, evaluate = (
        {name: total(of, name, purpose) for name in ("id_bytes", "feature_bytes_logical", "feature_bytes_link")}
        for purpose in ("train", "evaluate")
    )
    assert train["feature_bytes_logical"] > 0 < evaluate["feature_bytes_logical"]
    for found in (train, evaluate):
        assert found["feature_bytes_link"] == 2 * found["feature_bytes_logical"]
    # Both directions of the queries hold lists of ids and rows, and nothing else.
    logical = train["feature_bytes_logical"] + evaluate["feature_bytes_logical"]
    assert payload(QUERY) == train["id_bytes"] + evaluate["id_bytes"] + logical
    assert logical == sum(size for kind, size in tape.up if kind == QUERY)
    assert total(of, "setup_bytes") == total(of, "structure_bytes") == 0
    for kind, figures in ((TRAIN_TYPE, train), (EVALUATE_TYPE, evaluate)):
        rows = sum(size for seen, size in tape.down if seen == kind)
        assert rows == figures["feature_bytes_link"] - figures["feature_bytes_logical"]
        messages = ledger.total("messages", message_type=kind, direction="down")
        model = sum(len(array.data) for array in record(initial()).values())
        assert payload(kind, direction="down") == messages * model + rows
    assert set(ledger.by("message_type")) == {QUERY, TRAIN_TYPE, EVALUATE_TYPE}


@pytest.mark.slow
def test_7_10_the_metrics_have_the_agreed_names_and_those_of_the_inner_strategy() -> None:
    of = strategy(averaging(evaluate=True))
    seen: dict[int, Any] = {}
    run(of, grid(graph()), 2, on_round=lambda number, arrays, outcome: seen.update({number: outcome}))
    trained, evaluated = dict(seen[2].train), dict(seen[2].evaluate)
    assert {f"gcn.{name}" for name in NAMES} | {"train_loss"} == set(trained)
    assert {f"gcn.evaluate_{name}" for name in NAMES} | {"loss", "accuracy"} == set(evaluated)
    found = of.reports[2].gcn
    assert {**trained, **evaluated}.items() >= found.train.metrics("gcn.").items()
    assert {**trained, **evaluated}.items() >= found.evaluate.metrics("gcn.evaluate_").items()
    assert trained["gcn.clients"] == evaluated["gcn.evaluate_clients"] == PARTS
    assert 0 < trained["gcn.local_mass"] < 1 < trained["gcn.scale"]
    assert evaluated["gcn.evaluate_scale"] == 1.0
    assert evaluated["gcn.evaluate_lost_mass"] == 0.0
    # Evaluation without sampling needs every remote neighbour within two hops.
    assert evaluated["gcn.evaluate_remote_inputs"] > trained["gcn.remote_inputs"]


# What owners know of the edges.


@pytest.mark.slow
def test_the_adaptive_scale_follows_the_bytes() -> None:
    of = strategy(mode="adaptive", n=16, local_steps=3)
    run(of, grid(graph()), 4)
    assert [report.train.scale for report in reports(of)][:2] == [1.0, 2.0]
    assert all(scale >= 4.0 for scale in of.scales.values())
    assert reports(of)[3].train.rows_fetched < reports(of)[0].train.rows_fetched
    # One that fetches nothing has no reason to favour what it owns.
    alone = strategy(mode="adaptive")
    run(alone, grid(graph(parts=1)), 3)
    assert alone.scales == {0: 1.0}


# Inner strategies.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "downlink"),
    [(averaging, TopK(density=0.5)), (lambda: FedMedian(fraction_evaluate=0.0, min_available_nodes=1), None)],
)
def test_the_drop_in_pair_compresses_a_graph_run(inner: Any, downlink: Any) -> None:
    of = strategy(Compressed(inner(), TopK(density=0.25), downlink, seed=SEED), n=ENOUGH)
    over = grid(graph())
    found = run(of, over, 2)
    assert [r.compressed for r in of.reports.values()] == [PARTS] * 2
    assert all(not r.refused and not r.rolled_back for r in of.reports.values())
    assert [len(r.fresh) for r in of.reports.values()] == [PARTS, 0]
    plain = 2 * PARTS * sum(len(array.data) for array in record(initial()).values())
    assert over.ledger.total("payload", message_type=TRAIN_TYPE, direction="up") < plain / 2
    assert of.reports[2].gcn.train.feature_bytes_link > 0
    assert np.isfinite(found["layers.0.weight"]).all()
    assert bits(found) != bits(initial())


@pytest.mark.slow
def test_rows_too_large_for_a_config_record_pass_the_mods() -> None:
    """A large frame is an ArrayRecord, and the drop-in pair looks for the model among these."""
    parts = graph(nodes=4000, degree=8.0)
    of = strategy(Compressed(averaging(), TopK(density=0.5), TopK(density=0.5)), n=4000, batch_size=0)
    run(of, over := grid(parts), 2)
    assert total(of, "clients") == 2 * PARTS
    assert not of.reports[2].gcn.lost
    assert total(of, "feature_bytes_logical") > 2 * PARTS * 64 * 1024
    assert over.ledger.total("payload", message_type=QUERY, direction="up") > total(of, "feature_bytes_logical")


def test_nodes_outside_the_cohort_still_answer_with_rows() -> None:
    class First(type(averaging())):  # type: ignore[misc]
        """Asks the first node only."""

        def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
            return list(super().configure_train(server_round, arrays, config, grid))[:1]

    of = strategy(First(fraction_evaluate=0.0, min_available_nodes=1), n=ENOUGH)
    over = grid(graph())
    run(of, over, 1)
    report = of.reports[1].gcn.train
    assert report.clients == 1
    assert list(report.rows_received) == [next(iter(report.rows_received))]
    assert len(report.rows_sent) == PARTS - 1
    assert not of.reports[1].gcn.absent


# Resuming, and what is refused.


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["measured", "adaptive"])
def test_resumed_equals_uninterrupted(tmp_path: Path, mode: str) -> None:
    def resumable() -> SkewedGCN:
        pair = Compressed(averaging(), TopK(density=0.25), TopK(density=0.5), seed=SEED)
        return strategy(pair, mode=mode, cache="lru", cache_bytes=600, local_steps=2)

    whole, over = resumable(), grid(graph())
    model = run(whole, over, 2)
    path, before = tmp_path / "run.ckpt", resumable()
    interrupted = grid(graph())

    def keep(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        checkpoint.save(path, server_round=number, arrays=arrays, strategy=before, grid=interrupted)

    run(before, interrupted, 1, on_round=keep)
    after, again = resumable(), grid(graph())
    held = checkpoint.load(path)
    held.apply(after, again)
    assert bits(run(after, again, 2, first=2, start=held.arrays)) == bits(model)
    assert after.reports == whole.reports
    assert after.scales == whole.scales
    assert again.ledger.total("payload") == over.ledger.total("payload")
    with pytest.raises(StateError, match="resume with the same settings"):
        held.apply(strategy(before.inner, mode=mode))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "alll"}, "cache='alll' is not valid: .*; did you mean 'all'"),
        ({"structure": "some"}, "structure='some' is not valid: .*'full', 'halo'"),
        ({"codec": "dense-f31"}, "codec='dense-f31' is not valid: .*; did you mean 'dense-f32'"),
        ({"seed": 0.5}, "seed=0.5 is not valid"),
        ({"sampler": "fastgcn", "structure": "halo"}, "use structure='full'"),
        ({"inner": "fedavg"}, "inner must be a Flower Strategy instance"),
        ({"inner": strategy()}, "exchanges of its own"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**{"inner": averaging(), **options})
