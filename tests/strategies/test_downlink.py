"""The compressed downlink: versions, chains, evaluation without model bytes, nodes that were away."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from toy import by_partition, client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import EDEN, QSGD, Auto, Identity, LowRank, RandomK, TopK
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


def away(partition: int, *rounds: int):
    """Return the plan by which a node is not there in some rounds."""
    return lambda delivery: "offline" if delivery.partition == partition and delivery.round in rounds else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "downlink"),
    [
        (TopK(density=0.01), TopK(density=0.01)),
        (Auto(1.0), Auto(1.0, feedback=True)),
        (LowRank(3), LowRank(2)),
    ],
    ids=["top-k", "levels", "low rank"],
)
def test_a_node_that_was_away_gets_the_steps_it_missed_and_all_have_the_same_copy(codec, downlink) -> None:
    """The server refuses a node whose copy differs from its own in one bit."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, downlink=downlink)
    result, ledger, grid = start(strategy, rounds=5, fault=away(2, 2, 3))
    assert [len(r.refused) for r in strategy.reports.values()] == [0, 1, 1, 0, 0]
    down = ledger.total(round=4, direction="down", value="payload")
    assert down < DENSE, "two missed steps are shorter than a model"
    states = [grid.context(n).state for n in grid.get_node_ids()]
    copies = [state.array_records["fedcomp.replica.model"] for state in states]
    assert {int(state.config_records["fedcomp.replica"]["version"]) for state in states} == {5}
    assert len({stack(copy).tobytes() for copy in copies}) == 1
    assert np.isfinite(stack(result.arrays)).all()
    assert np.abs(stack(result.arrays)).max() > 100


@pytest.mark.slow
def test_a_node_that_was_away_too_long_gets_the_model() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1), downlink=TopK(density=0.2))
    _, ledger, _ = start(strategy, rounds=12, fault=away(2, *range(2, 12)))
    assert strategy.reports[12].compressed == 4
    assert ledger.total(round=12, direction="down", value="payload") > DENSE


@pytest.mark.slow
def test_clients_without_the_mod_always_get_the_full_reference() -> None:
    plain, modded = client_app(), client_app([compression()])
    either = by_partition(lambda partition: plain if partition == 0 else modded)
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


# A first model that the nodes make themselves: named by its digest, sent only to those that made another one.


def first(msg: Message, context: Context) -> ArrayRecord:
    return model(0.5, counter=True)


def begin(make, *, rounds=3, at_nodes=True, downlink=None, fault=None, state=None, seed=3):
    """Train with four nodes that have ``make`` for a first model, by partition where it is a dictionary."""
    makes = {i: make.get(i, first) if isinstance(make, dict) else make for i in range(4)}
    apps = {i: client_app([compression(first_model=each)]) for i, each in makes.items()}
    strategy = Compressed(
        fedavg(fraction_evaluate=0.0),
        TopK(density=0.02),
        downlink=downlink or TopK(density=0.02),
        first_model_at_nodes=at_nodes,
    )
    if state is not None:
        strategy.load_state_dict(state)
        # As whoever resumes from a file does: nodes may have got later versions since.
        strategy.renumber()
    ledger = TrafficLedger()
    grid = InProcessGrid(by_partition(apps.__getitem__), 4, seed=seed, fault=fault)
    result = strategy.start(MeteredGrid(grid, ledger), first(None, None), num_rounds=rounds, timeout=9)
    down = [ledger.total(round=r, direction="down", value="payload") for r in range(1, rounds + 1)]
    versions = [int(grid.context(n).state.config_records["fedcomp.replica"]["version"]) for n in grid.get_node_ids()]
    return strategy, result.arrays, down, versions


@pytest.mark.parametrize("downlink", [TopK(density=0.02), Auto(bits=1.0, feedback=True), Identity()], ids=repr)
def test_the_training_is_the_same_without_the_first_models_bytes(downlink) -> None:
    sent, with_model, paid, _ = begin(None, at_nodes=False, downlink=downlink)
    strategy, without, down, versions = begin(first, downlink=downlink)
    assert stack(with_model).tobytes() == stack(without).tobytes()
    assert paid[0] >= 4 * DENSE
    assert down[0] == 0
    assert down[1:] == paid[1:]
    assert versions == [3] * 4
    assert [report.used for report in strategy.reports.values()] == [report.used for report in sent.reports.values()]


def one_bit_off(msg: Message, context: Context) -> ArrayRecord:
    arrays = {name: array.numpy().copy() for name, array in first(msg, context).items()}
    arrays["bias"].view(np.uint32)[3] ^= 1
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def shorter(msg: Message, context: Context) -> ArrayRecord:
    return ArrayRecord({"weight": first(msg, context)["weight"]})


def other_buffer(msg: Message, context: Context) -> ArrayRecord:
    arrays = dict(first(msg, context).items())
    return ArrayRecord({**arrays, "num_batches_tracked": Array(np.array(7, np.int64))})


@pytest.mark.parametrize("make", [one_bit_off, shorter, other_buffer, None], ids=["bit", "tensor", "buffer", "none"])
def test_a_node_that_makes_another_model_is_refused_once_and_sent_the_servers(make) -> None:
    strategy, _, down, versions = begin({2: make})
    refused = [report.refused for report in strategy.reports.values()]
    assert [len(each) for each in refused] == [1, 0, 0]
    (reason,) = refused[0].values()
    assert "fedcomp.resync" in reason
    assert ("fc.compression(first_model=...)" in reason) == (make is None)
    assert down[0] == 0
    assert DENSE <= down[1] < 2 * DENSE, "the whole model to this node, steps to the others"
    assert down[2] < DENSE
    assert versions == [3] * 4


def test_a_node_that_comes_later_is_sent_the_steps_since_the_first_model() -> None:
    strategy, _, down, versions = begin(first, rounds=4, fault=away(1, 1, 2))
    assert [report.used for report in strategy.reports.values()] == [3, 3, 4, 4]
    assert max(down) < DENSE
    assert versions == [4] * 4


def test_nodes_make_no_model_where_it_is_sent_or_held() -> None:
    made = []

    def counted(msg: Message, context: Context) -> ArrayRecord:
        made.append(int(context.node_config["partition-id"]))
        return first(msg, context)

    begin(counted, at_nodes=False)
    assert made == []
    begin(counted)
    assert sorted(made) == [0, 1, 2, 3]


def test_the_first_model_of_a_run_is_not_taken_for_that_of_the_next() -> None:
    """A run of one round leaves every node with version 1, by which the next run names another model."""

    def counted(msg: Message, context: Context) -> ArrayRecord:
        made.append(int(context.node_config["partition-id"]))
        return model(float(msg.content.config_records["config"]["start"]))

    made: list[int] = []
    grid = InProcessGrid(client_app([compression(first_model=counted)]), 4, seed=3)
    for start in (0.0, 1.0):
        strategy = Compressed(
            fedavg(fraction_evaluate=0.0), TopK(density=0.1), downlink=TopK(density=0.1), first_model_at_nodes=True
        )
        config = ConfigRecord({"start": start})
        strategy.start(grid, model(start), num_rounds=1, timeout=9, train_config=config)
        assert strategy.reports[1].used == 4
    assert sorted(made) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", [3, 4], ids=["the same nodes", "nodes it has not met"])
def test_a_resumed_server_sends_its_model_and_not_the_first_ones_name(seed: int) -> None:
    """No steps lead from the first model to that of the checkpoint."""
    before, _, _, _ = begin(first, rounds=2)
    strategy, _, down, _ = begin(first, rounds=1, state=before.state_dict(), seed=seed)
    assert down[0] >= 4 * DENSE
    assert not strategy.reports[1].refused


def test_without_a_downlink_there_is_no_first_model_to_leave_out() -> None:
    with pytest.raises(ConfigError, match="Identity"):
        Compressed(fedavg(), TopK(density=0.1), first_model_at_nodes=True)
