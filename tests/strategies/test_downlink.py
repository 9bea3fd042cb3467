"""The compressed downlink: versions, chains, evaluation without model bytes, nodes that were away."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import EDEN, QSGD, Identity, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_arrays
from fedcomp.strategies.compressed import Compressed

DENSE = 4 * 1212


def start(strategy, app=None, *, nodes=4, rounds=4, counter=False, **options):
    ledger = TrafficLedger()
    grid = InProcessGrid(app or client_app([compression()]), nodes, seed=3, **options)
    result = strategy.start(MeteredGrid(grid, ledger), model(counter=counter), num_rounds=rounds, timeout=9)
    return result, ledger, grid


@pytest.mark.slow
def test_differences_after_the_first_model_and_nothing_for_evaluation() -> None:
    """Round 1 sends full models; later rounds send steps; a node that holds the version gets no model bytes."""
    strategy = Compressed(fedavg(), TopK(density=0.02), downlink=TopK(density=0.02))
    _, ledger, _ = start(strategy)

    def down(round_: int, kind: str) -> int:
        return ledger.total(round=round_, direction="down", message_type=kind, value="payload")

    assert down(1, "train") >= 4 * DENSE
    assert 0 < down(1, "evaluate") < DENSE, "evaluation carries the step to the new version"
    for round_ in (2, 3, 4):
        assert down(round_, "train") == 0, "the version was delivered with the evaluation before"
        assert 0 < down(round_, "evaluate") < DENSE


@pytest.mark.slow
def test_error_feedback_of_the_downlink_catches_up() -> None:
    """When the model stops moving, the replicas converge to it exactly: nothing that was dropped is forgotten."""
    strategy = Compressed(Still(), TopK(density=1.0), downlink=TopK(density=0.1))
    _, _, _ = start(strategy, rounds=40)
    target = strategy.layout.flatten(to_arrays(strategy.inner.kept))
    target[strategy.layout.by_name["bias"].slice.start] = 39  # what the last round trained from
    assert np.abs(target).max() > 100
    np.testing.assert_array_equal(strategy.down.broadcast.reference, target)


class Still(FedAvg):
    """Averages in round 1, then nudges one coordinate, so that a new version is published every round."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        self.kept = model()

    def aggregate_train(self, server_round, replies):
        if server_round == 1:
            self.kept, metrics = super().aggregate_train(server_round, replies)
            return self.kept, metrics
        nudged = {k: v.numpy() for k, v in self.kept.items()}
        nudged["bias"][0] = server_round
        from flwr.app import Array

        return ArrayRecord({k: Array(v) for k, v in nudged.items()}), None


@pytest.mark.slow
def test_identity_downlink_changes_nothing_but_saves_evaluation_bytes() -> None:
    plain, plain_ledger, _ = start(fedavg(), client_app())
    both, ledger, _ = start(Compressed(fedavg(), Identity(), downlink=Identity()))
    assert all(plain.arrays[k].numpy().tobytes() == both.arrays[k].numpy().tobytes() for k in plain.arrays)
    assert ledger.total(direction="down", value="payload") < 0.7 * plain_ledger.total(direction="down", value="payload")


@pytest.mark.slow
def test_identity_uplink_over_a_lossy_downlink_keeps_what_the_downlink_dropped() -> None:
    """Clients grow whole models from the reference; the server must add what the reference lacks of the true model."""
    lossy, _, _ = start(Compressed(fedavg(), Identity(), downlink=TopK(density=0.05)), rounds=5)
    dense, _, _ = start(fedavg(), client_app(), rounds=5)
    # The toy update does not depend on the model, so the true model must follow the dense run.
    np.testing.assert_allclose(stack(lossy.arrays), stack(dense.arrays), rtol=1e-5, atol=1e-2)


@pytest.mark.slow
def test_a_node_that_was_away_gets_the_steps_it_missed() -> None:
    def plan(delivery):
        return "offline" if delivery.partition == 2 and 2 <= delivery.round <= 3 else None

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.01), downlink=TopK(density=0.01))
    _, ledger, grid = start(strategy, rounds=5, fault=plan)
    assert [len(r.refused) for r in strategy.reports.values()] == [0, 1, 1, 0, 0]
    down = ledger.total(round=4, direction="down", value="payload")
    assert down < DENSE, "two missed steps are shorter than a model"
    versions = {int(grid.context(n).state.config_records["fedcomp.replica"]["version"]) for n in grid.get_node_ids()}
    assert versions == {5}


@pytest.mark.slow
def test_a_node_that_was_away_too_long_gets_the_model() -> None:
    def plan(delivery):
        return "offline" if delivery.partition == 2 and 2 <= delivery.round <= 11 else None

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1), downlink=TopK(density=0.2))
    _, ledger, _ = start(strategy, rounds=12, fault=plan)
    assert strategy.reports[12].compressed == 4
    assert ledger.total(round=12, direction="down", value="payload") > DENSE


@pytest.mark.slow
def test_clients_without_the_mod_always_get_the_full_reference() -> None:
    plain, modded = client_app(), client_app([compression()])

    def either(msg: Message, context: Context) -> Message:
        return (plain if int(context.node_config["partition-id"]) == 0 else modded)(msg, context)

    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=TopK(density=0.02))
    _, ledger, _ = start(strategy, either)
    assert [r.plain for r in strategy.reports.values()] == [1] * 4
    assert DENSE < ledger.total(round=3, direction="down", message_type="train", value="payload") < 2 * DENSE


@pytest.mark.slow
def test_integer_buffers_reach_the_clients_exactly() -> None:
    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=TopK(density=0.02))
    result, _, grid = start(strategy, counter=True)
    held = grid.context(next(iter(grid.get_node_ids()))).state.array_records["fedcomp.replica.model"]
    assert held["num_batches_tracked"].numpy() == result.arrays["num_batches_tracked"].numpy()
    assert held["num_batches_tracked"].numpy().dtype == np.int64


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        (ErrorFeedback(TopK(density=0.1)), "memory"),
        (RandomK(density=0.01, unbiased=True), "diverge"),
        (QSGD(levels=1), "diverge"),
        (EDEN(bits=1), r'Use EDEN\(scale="least"\)'),
    ],
    ids=repr,
)
def test_codecs_that_would_diverge_are_refused(codec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Compressed(fedavg(), TopK(density=0.1), downlink=codec)
