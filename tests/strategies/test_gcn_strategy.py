"""The server of a graph run on the in-process engine: limit cases, counted bytes, trips, modes, resuming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAdam, FedMedian
from graph_federation import (
    ENOUGH,
    LR,
    PARTS,
    SEED,
    Meddler,
    averaging,
    bits,
    client,
    gradients_on_one_machine,
    graph,
    grid,
    initial,
    learner,
    made,
    record,
    reports,
    run,
    strategy,
    total,
)
from toy import with_halves

from fedcomp.asks import Said
from fedcomp.clients.compressed import compression
from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.asks import data_in, find_ask
from fedcomp.flower.faults import Delivery
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, round_of
from fedcomp.graphs.base import GraphPart
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.guard import Norms
from fedcomp.systems.graphs.words import EVALUATE_TYPE, TRAIN_TYPE, Fetch, Plan

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
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    def resumable() -> SkewedGCN:
        pair = Compressed(averaging(), TopK(density=0.25), TopK(density=0.5), seed=SEED)
        return strategy(pair, mode="measured", cache="lru", cache_bytes=600, local_steps=2)

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
    assert again.ledger.total("payload") == over.ledger.total("payload")
    with pytest.raises(StateError, match="resume with the same settings"):
        held.apply(strategy(before.inner, mode="measured"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "alll"}, "cache='alll' is not valid: .*; did you mean 'all'"),
        ({"structure": "some"}, "structure='some' is not valid: .*'full', 'halo'"),
        ({"codec": "dense-f31"}, "codec='dense-f31' is not valid: .*; did you mean 'dense-f16' or 'dense-f32'"),
        ({"seed": 0.5}, "seed=0.5 is not valid"),
        ({"sampler": "fastgcn", "structure": "halo"}, "use structure='full'"),
        ({"inner": "fedavg"}, "inner must be a Flower Strategy instance"),
        ({"inner": strategy()}, "its own exchanges"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**{"inner": averaging(), **options})


# Owners that are away, die or break: a round goes on and says what it missed; and what may stand around a run.

TIMEOUT = 5.0


def dead(partition: int, *rounds: int) -> Callable[[Delivery], str]:
    """Return the plan by which a node answers nothing in some rounds, but is still listed as online."""
    return lambda d: "silent" if d.partition == partition and d.round in rounds else "none"


def everything(**options: Any) -> SkewedGCN:
    """Return a strategy whose clients use all their neighbours, so that everybody wants something of everybody."""
    return strategy(**{"n": ENOUGH, "batch_size": 0, "timeout": TIMEOUT, **options})


def seconds(over: MeteredGrid, of: SkewedGCN, rounds: int) -> list[float]:
    """Run, and return how many simulated seconds each round took; clients that answer take none."""
    clock = [0.0]
    run(of, over, rounds, on_round=lambda *_: clock.append(over.clock))
    return [after - before for before, after in pairwise(clock)]


@pytest.mark.slow
def test_7_14_an_owner_that_leaves_is_done_without_and_is_used_again_at_once() -> None:
    over, of = grid(graph()), everything()

    def fate(number: int, *_: Any) -> None:
        if number == 1:
            over.remove_node(2)
        elif number == 3:
            over.add_node(2)

    run(of, over, 4, on_round=fate)
    for number in (2, 3):
        report = of.reports[number].gcn
        assert report.absent == {2: "no node of this part is there"}
        assert report.train.absent == 1
        assert report.train.clients == PARTS - 1
        assert report.train.replans == 0  # known beforehand
        assert report.train.trips == 3
        assert 0 < report.train.lost_mass < 1
        assert 2 not in report.train.rows_sent
    back = of.reports[4].gcn
    assert (back.absent, back.lost, back.train.lost_mass) == ({}, {}, 0.0)
    assert back.train.rows_sent == of.reports[1].gcn.train.rows_sent
    assert back.train.trips == 4  # who are you


def test_an_owner_that_falls_silent_before_evaluation_is_one_client_less() -> None:
    trained = set()

    def plan(d: Delivery) -> str:
        if d.message_type == TRAIN_TYPE:
            trained.add(d.partition)
            return "none"
        return "silent" if d.partition == 2 and 2 in trained else "none"

    of = everything(inner=averaging(evaluate=True))
    run(of, grid(graph(), fault=plan), 1)
    found = of.reports[1].gcn
    assert (found.train.clients, found.evaluate.clients) == (PARTS, PARTS - 1)
    assert found.lost == {2: "its plan did not come"}


def test_7_14_what_is_lost_is_the_share_of_the_weight_of_the_absent_owner() -> None:
    """By hand: of the last client's rows of P, the absolute values in the columns of the absent owner."""
    parts = graph()
    over, of = grid(parts), everything(structure="full")
    over.remove_node(1)
    run(of, over, 1)
    shares = []
    for part in parts[:1] + parts[2:]:
        inputs = np.unique(part.structure.rows(part.train).columns)
        rows = part.structure.rows(inputs)
        gone = part.structure.owner_of(rows.columns) == 1
        shares.append(rows.values[gone].sum() / rows.values.sum())
    assert of.reports[1].gcn.train.lost_mass == pytest.approx(np.mean(shares), rel=1e-12)


def test_7_14_one_that_all_others_have_left_learns_alone() -> None:
    over, of = grid(graph()), everything()
    run(of, over, 1)
    before = record(initial())
    for part in (0, 1, 3):
        over.remove_node(part)
    found = run(of, over, 2, first=2, start=before)
    report = of.reports[2].gcn
    assert sorted(report.absent) == [0, 1, 3]
    assert (report.train.clients, report.train.trips, report.train.rows_fetched) == (1, 2, 0)
    assert report.train.lost_mass > 0
    assert bits(found) != bits(initial())
    over.remove_node(2)
    # Nobody is there at all: nothing is asked, nothing is learnt, nothing breaks. Flower itself would wait for nodes.
    of.inner.configure_train = lambda *_: []  # type: ignore[method-assign]
    assert bits(run(of, over, 3, first=3, start=before)) == bits(initial())
    assert of.reports[3].gcn.train.trips == 0


@pytest.mark.slow
def test_7_14_a_dead_node_that_is_listed_costs_one_deadline_a_round_and_its_successor_none() -> None:
    parts = graph()
    over, of = grid(parts, fault=dead(1, 2, 3)), everything()
    took = seconds(over, of, 4)
    # In its first round it is missed with its plan; later it is asked for a sign before anybody counts on it.
    assert took == [0.0, TIMEOUT, TIMEOUT, 0.0]
    assert [r.train.replans for r in reports(of)] == [0, PARTS - 1, 0, 0]
    assert [sorted(r.absent) for r in reports(of)] == [[], [1], [1], []]
    assert of.reports[3].gcn.absent == {1: "its node does not answer"}
    assert of.reports[4].gcn.train.rows_sent == of.reports[1].gcn.train.rows_sent


FEW = 3
"""Owners of the runs below."""


def test_an_owner_that_breaks_over_its_rows_or_its_plan_is_there_all_the_same() -> None:
    """It trains without its rows, or hands out rows without training."""
    for kind, absent, lost in ((Fetch, [1], []), (Plan, [], [1])):
        app = Meddler(client(graph()))

        def breaks(message: Message, context: Any, kind: type[Said] = kind) -> None:
            head = find_ask(message.content)
            if head is not None and head.say == kind.__name__:
                raise RuntimeError("broken")

        app.before[1, 1, "query"] = breaks
        of = strategy(n=ENOUGH)
        run(of, grid(graph(), app), 1)
        assert (list(of.reports[1].gcn.absent), list(of.reports[1].gcn.lost)) == (absent, lost)
        assert of.reports[1].gcn.train.clients == PARTS - len(lost)


@pytest.mark.slow
def test_a_run_after_another_on_the_same_nodes_finds_their_caches_and_nothing_else() -> None:
    """Resumed runs, too, meet nodes that have a state and others that are new."""
    parts = graph(parts=FEW, nodes=24)
    options = {"n": ENOUGH, "batch_size": 0, "cache": "all"}
    over = grid(parts, nodes=FEW)
    model = run(strategy(**options), over, 2)
    second = strategy(**options)
    assert bits(run(second, over, 1)) == bits(run(strategy(**options), grid(parts), 1))
    assert total(second, "rows_fetched") == 0 < total(second, "remote_inputs")
    # The nodes of an interrupted run have been replaced when it goes on: they are asked again who they are.
    before = strategy(**options, mode="measured")
    begun = run(before, over, 1)
    after = strategy(**options, mode="measured")
    after.load_state_dict(before.state_dict())
    for part in range(FEW):
        over.remove_node(part)
        over.add_node(part)
    assert bits(run(after, over, 2, first=2, start=begun)) == bits(model)
    assert after.reports[2].gcn.train.clients == FEW
    assert after.reports[2].gcn.train.setup_bytes == before.reports[1].gcn.train.setup_bytes > 0


# What stands inside and outside.


@pytest.mark.slow
def test_7_06_a_server_adam_steps_as_on_one_machine() -> None:
    """Its pseudo-gradient is the learning rate times the gradient on the union of the batches."""
    rates = {"eta": 0.05, "eta_l": LR, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
    least = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    found = run(strategy(FedAdam(fraction_evaluate=0.0, **rates, **least), n=ENOUGH), grid(graph()), 3)
    model = initial()
    first, second = ({name: np.zeros_like(value) for name, value in model.items()} for _ in range(2))
    for number in (1, 2, 3):
        for name, gradient in gradients_on_one_machine(model, number, 6).items():
            delta = -LR * gradient
            first[name] = 0.9 * first[name] + 0.1 * delta
            second[name] = 0.99 * second[name] + 0.01 * delta**2
            bias = np.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
            model[name] = model[name] + 0.05 * bias * first[name] / (np.sqrt(second[name]) + 1e-3)
    for name, value in model.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_labels_travel_nowhere_and_rows_only_from_their_owner_to_those_who_use_them() -> None:
    parts = graph(parts=FEW, nodes=24)
    seen: list[tuple[str, int, RecordDict]] = []

    class Tap:
        def __call__(self, message: Message, context: Any) -> Message:
            # As it came: halves take what is theirs out of it.
            came, kind = RecordDict(dict(message.content)), message.metadata.message_type
            reply = app(message, context)
            for content in (came, reply.content):
                seen.append((kind, int(context.node_config["partition-id"]), content))
            return reply

    app = client(parts)
    of = strategy(averaging(evaluate=True), mode="measured", n=6)
    run(of, grid(parts, Tap()), 2)
    owner_of = {row.tobytes(): part.index for part in parts for row in part.features}
    labels = [part.labels.tobytes()[: 8 * 4] for part in parts]
    places: Counter[str] = Counter()
    for kind, node, content in seen:
        named = data_in(content, FRAME)
        blob = b"".join(named.values()) + repr(content).encode()
        assert not any(some in blob for some in labels)
        for name, data in named.items():
            for row, owner in owner_of.items():
                if row in data:
                    places[kind] += 1
                    at = int(name.rsplit("/", 1)[1])
                    assert name.startswith("rows/")
                    assert (owner == node != at) if kind == "query" else (owner == at != node)
    assert set(places) == {"query", TRAIN_TYPE, EVALUATE_TYPE}


@pytest.mark.slow
def test_a_guard_refuses_and_names_an_absurd_model_around_flowers_own_strategy() -> None:
    """Without one its norm is in the report, as in every system."""
    parts = [replace(part, features=part.features.astype(np.float32)) for part in graph()]
    start = {name: value.astype(np.float32) for name, value in initial().items()}

    def steep(message: Message, context: Any) -> Learner:
        far = (round_of(message), context.node_config["partition-id"]) == (2, 1)
        return replace(learner(message, context), rates={"lr": 1e20 if far else LR})

    app = with_halves([graph_owner(lambda message, c: parts[c.node_config["partition-id"]], steep), compression()])
    for guard in (Norms(), None):
        of = strategy(n=ENOUGH, guard=guard, codec="dense-f32")
        run(of, grid(parts, app), 2, start=start)
        report = of.reports[2]
        node = max(report.norms, key=lambda node: report.norms[node])
        assert report.norms[node] > 1e6
        assert ("times the usual" in report.refused.get(node, "")) == (guard is not None)
        assert report.used == PARTS - (guard is not None)
    with pytest.raises(ConfigError, match="give it the guard, not SkewedGCN"):
        strategy(Compressed(averaging(), TopK(density=0.5), feedback=False), guard=Norms())
