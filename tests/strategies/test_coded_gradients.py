"""Gradient coding in Flower: whoever is lost, the model is the one of gradient descent on all data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import toy
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, Result
from gradient_toy import FEATURES, MASK, app_of, client_app, data, float32_step, full_batch, model

from fedcomp.coding.checked import CHECK, checked_bytes
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower import asks
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.rounds import fit
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.systems.coded.gradients import Form

FORM = asks.SAY + "form"
PARTITIONS = asks.SAY + "partitions"

Client = Callable[[Message, Context], Message]


def strategy(losses: int, inner=None, **options) -> CodedFedAvg:
    plain = toy.fedavg(fraction_evaluate=0.0) if inner is None else inner
    return CodedFedAvg(plain, construction="gradcode", losses=losses, **options)


def losing(partitions, kind: str = "silent") -> Callable[[Delivery], str]:
    """Return the fault plan under which the training messages of some partitions come to nothing."""
    lost = set(partitions)
    return lambda d: kind if d.message_type.startswith("train") and d.partition in lost else "none"


def run(nodes: int, coded: CodedFedAvg, rounds: int = 1, client: Client | None = None, **options) -> Result:
    with InProcessGrid(client or client_app(), nodes, seed=2, **options) as grid:
        return fit(coded, MeteredGrid(grid), model(), rounds)


def timed(coded: CodedFedAvg, times: list[float], seconds: float) -> Result:
    """Run one round in which the answers come after these times, and see that it lasts so long."""
    spent = lambda d: times[d.partition] if d.message_type.startswith("train") else 0.0  # noqa: E731
    with InProcessGrid(client_app(), len(times), compute_seconds=spent) as grid:
        try:
            return fit(coded, MeteredGrid(grid), model(), 1)
        finally:
            assert grid.clock == pytest.approx(seconds)


def weights(result: Result) -> np.ndarray:
    return result.arrays["weight"].numpy()


Change = Callable[[Message], object]


def altering(change: Change, partitions) -> Client:
    """Return an app whose trained replies ``change(reply)`` alters on the nodes of some partitions."""
    app, chosen = client_app(), set(partitions)

    def client(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        trained = msg.metadata.message_type == "train" and not reply.has_error()
        if trained and int(context.node_config["partition-id"]) in chosen:
            change(reply)
        return reply

    return client


CODES = [
    (4, 1, {}),
    (4, 3, {}),
    (5, 1, {}),
    (5, 2, {}),
    (6, 2, {}),
    (6, 2, {"scheme": "cyclic"}),
    (6, 3, {}),
    (5, 2, {"arithmetic": "gf31"}),
    (4, 1, {"arithmetic": "gf31"}),
    (5, 1, {"arithmetic": "gf65521"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "s", "options"), CODES)
def test_whichever_s_clients_are_lost_the_mean_is_that_of_all(n: int, s: int, options) -> None:
    whole = weights(run(n, strategy(s, **options)))
    exact = options.get("arithmetic", "float64") != "float64" or (n % (s + 1) == 0 and "scheme" not in options)
    for lost in itertools.combinations(range(n), s):
        coded = strategy(s, **options)
        found = weights(run(n, coded, fault=losing(lost)))
        if exact:
            assert found.tobytes() == whole.tobytes()
        assert np.max(np.abs(found - whole)) <= 1e-9 * np.max(np.abs(whole))
        assert coded.reports[1].coded.received == n - s
        assert len(coded.reports[1].coded.included) == n
    (wanted,) = full_batch(1, range(n))
    bound = {"gf65521": 1e-2, "gf31": 1e-6}.get(options.get("arithmetic", ""), 1e-12)
    assert np.max(np.abs(whole - wanted)) < bound


def test_counters_and_masks_beside_the_weights_come_out_as_they_should() -> None:
    for options in ({}, {"arithmetic": "gf31"}, {"scheme": "cyclic"}):
        arrays = run(4, strategy(1, **options), fault=losing([0])).arrays
        assert list(arrays) == ["weight", "num_batches_tracked", "mask"]
        assert arrays["num_batches_tracked"].numpy() == 8
        assert arrays["num_batches_tracked"].numpy().dtype == np.int64
        assert arrays["mask"].numpy().tobytes() == MASK.tobytes()


def test_metrics_are_weighted_like_updates() -> None:
    sizes = np.array([len(data(p)[1]) for p in range(5)], np.float64)
    losses = np.array([float(np.mean(data(p)[1] ** 2)) for p in range(5)])
    for options in ({}, {"arithmetic": "gf31"}):
        metrics = run(5, strategy(2, **options), fault=losing([1, 4])).train_metrics_clientapp[1]
        assert metrics["loss"] == pytest.approx(sizes @ losses / sizes.sum(), rel=1e-4)
        assert metrics["twice"] == pytest.approx([1.0, sizes @ np.arange(5) / sizes.sum()])


def test_an_adaptive_inner_strategy_steps_as_without_coding() -> None:
    def adam() -> FedAdam:
        return FedAdam(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0, eta=0.1)

    start = ArrayRecord({"weight": Array(np.zeros(FEATURES, np.float32))})
    results = []
    for chosen, fault in ((adam(), None), (strategy(1, adam()), losing([2]))):
        with InProcessGrid(app_of(float32_step), 4, fault=fault) as grid:
            results.append(weights(fit(chosen, MeteredGrid(grid), start, 4)))
    assert np.max(np.abs(results[0])) > 0.1
    assert np.allclose(results[0], results[1], rtol=1e-4, atol=1e-6)


# Time.


@pytest.mark.slow
@pytest.mark.parametrize(("s", "seconds"), [(1, 3.0), (2, 2.0), (0, 50.0)])
def test_a_round_lasts_as_long_as_the_n_minus_s_th_answer(s: int, seconds: float) -> None:
    coded = strategy(s, scheme="cyclic")
    found = weights(timed(coded, [1.0, 3.0, 2.0, 50.0, 0.5], seconds))
    assert coded.reports[1].coded.received == 5 - s
    assert np.allclose(found, full_batch(1, range(5))[0], rtol=0, atol=1e-12)


def test_fractional_repetition_may_end_before_n_minus_s_answers() -> None:
    coded = strategy(1)
    timed(coded, [1.0, 90.0, 90.0, 2.0], 2.0)
    assert coded.reports[1].coded.received == 2


def test_what_comes_after_the_deadline_is_a_loss() -> None:
    coded = strategy(1, collect_timeout=10.0)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        timed(coded, [1.0, 30.0, 30.0, 1.0, 1.0], 10.0)
    assert coded.reports[1].coded.received == 3


# Too many losses.


def test_one_loss_too_many_skips_the_round_and_leaves_the_model() -> None:
    coded = strategy(1)
    lost = losing([1, 2])
    first = run(5, strategy(1))
    found = run(5, coded, rounds=2, fault=lambda d: lost(d) if d.round == 1 else "none")
    assert np.allclose(weights(found), weights(first), rtol=0, atol=1e-12)
    assert found.arrays["num_batches_tracked"].numpy() == first.arrays["num_batches_tracked"].numpy()
    report = coded.reports[1].coded
    assert "2 of 5 devices did not answer (1, 2)" in coded.reports[1].notes[0]
    assert not report.included
    assert len(report.excluded) == 5


def test_an_approximation_is_labelled_with_its_residual() -> None:
    coded = strategy(1, approximate=True)
    found = weights(run(6, coded, fault=losing([2, 3])))
    assert np.allclose(found, full_batch(1, [0, 1, 4, 5])[0], rtol=0, atol=1e-12)
    report = coded.reports[1].coded
    assert report.residual == pytest.approx(np.sqrt(2.0))
    assert "an approximation" in coded.reports[1].notes[0]
    assert len(report.included) == 4
    assert set(report.excluded.values()) == {"no client that holds its partition answered"}
    exact = strategy(1, approximate=True)
    run(6, exact, fault=losing([2]))
    assert exact.reports[1].coded.residual == 0.0
    assert not exact.reports[1].notes


def test_a_quorum_ends_the_round_with_what_is_there() -> None:
    """Without losses and with a quorum the slowest are ignored, and with them their data."""
    coded = strategy(0, approximate=True, quorum=3)
    found = weights(timed(coded, [1.0, 90.0, 3.0, 90.0, 2.0], 3.0))
    assert np.allclose(found, full_batch(1, [0, 2, 4])[0], rtol=0, atol=1e-12)
    assert coded.reports[1].coded.residual == pytest.approx(np.sqrt(2.0))


def test_nothing_answered_is_no_approximation() -> None:
    coded = strategy(1, approximate=True)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(4, coded, fault=losing(range(4)))
    assert "unchanged" in coded.reports[1].notes[0]


# Who takes part.


@pytest.mark.slow
def test_a_client_that_left_stays_in_the_code_and_its_data_in_the_sum() -> None:
    coded = strategy(2)
    with InProcessGrid(client_app(), 6) as grid:
        metered = MeteredGrid(grid)
        first = fit(coded, metered, model(), 1).arrays
        grid.remove_node(4)
        second = fit(coded, metered, first, 2, start_round=2).arrays
        assert np.allclose(second["weight"].numpy(), full_batch(2, range(6))[-1], rtol=0, atol=1e-12)
        assert coded.reports[2].coded.planned == 6
        grid.add_node(4)
        fit(coded, metered, second, 3, start_round=3)
        assert coded.reports[3].coded.planned == coded.reports[3].coded.received == 6


def test_when_more_left_than_may_be_lost_the_code_is_made_for_the_others() -> None:
    coded = strategy(1)
    with InProcessGrid(client_app(), 6) as grid:
        metered = MeteredGrid(grid)
        first = fit(coded, metered, model(), 1).arrays
        grid.remove_node(4)
        grid.remove_node(5)
        second = fit(coded, metered, first, 2, start_round=2).arrays
    assert coded.reports[2].coded.planned == 4
    assert "[4, 5] are offline" in coded.reports[2].notes[0]
    assert not np.allclose(second["weight"].numpy(), full_batch(2, range(6))[-1], atol=1e-6)


@pytest.mark.slow
def test_clients_outside_of_a_sample_have_not_left() -> None:
    class Sampled(MeteredGrid):
        """Shows a strategy the clients of the round's sample and no others, as the experiments' server does."""

        def get_node_ids(self):
            sample = {(self.round + k) % 7 for k in range(4)} if self.round else set()
            return [node for node in super().get_node_ids() if self.partition_of(node) in sample]

    coded = strategy(1)
    with InProcessGrid(client_app(), 7) as grid:
        fit(coded, Sampled(grid), model(), 5)
    assert [coded.reports[r].coded.planned for r in range(1, 6)] == [4] * 5
    by_fraction = strategy(1, toy.fedavg(fraction_evaluate=0.0, fraction_train=0.6))
    run(7, by_fraction, 5)
    assert [by_fraction.reports[r].coded.planned for r in range(1, 6)] == [4] * 5


def test_a_node_without_the_mod_is_left_out_with_the_reason() -> None:
    app, plain = client_app(), ClientApp()
    coded = strategy(1)
    found = weights(run(5, coded, client=toy.by_partition(lambda partition: plain if partition == 2 else app)))
    assert np.allclose(found, full_batch(1, [0, 1, 3, 4])[0], rtol=0, atol=1e-12)
    (reason,) = coded.reports[1].coded.excluded.values()
    assert "not in the code" in reason
    assert "write app = fc.client(app)" in reason


@pytest.mark.parametrize("nodes", [1, 2])
def test_fewer_clients_than_the_code_needs_is_no_round(nodes: int) -> None:
    coded = strategy(2)
    with pytest.raises(NoUsableReply, match=f"{nodes} clients take part, a code for 2 losses needs 3: lower losses"):
        run(nodes, coded)


def test_devices_are_told_their_partitions_and_get_their_own_back() -> None:
    seen: dict[int, list[int]] = {}
    app = client_app()

    def client(msg: Message, context: Context) -> Message:
        own = int(context.node_config["partition-id"])
        if msg.metadata.message_type == "train":
            (config,) = (each for each in msg.content.config_records.values() if PARTITIONS in each)
            seen[own] = list(config[PARTITIONS])
        return app(msg, context)

    with InProcessGrid(client, 5) as grid:
        fit(strategy(2), MeteredGrid(grid), model(), 1)
        for partition in range(5):
            assert grid.context(partition).node_config["partition-id"] == partition
    assert seen == {i: [(i + k) % 5 for k in range(3)] for i in range(5)}


# What apps and peers may do.


def test_an_app_that_crashes_on_one_partition_of_one_device_is_one_loss() -> None:
    coded = strategy(1)
    with InProcessGrid(_crashing(lambda own, trained: own == 1 and trained == 2), 5, error_state="keep") as grid:
        found = weights(fit(coded, MeteredGrid(grid), model(), 2))
        for partition in range(5):
            assert grid.context(partition).node_config["partition-id"] == partition
            assert "scratch" not in grid.context(partition).state
    assert np.allclose(found, full_batch(2, range(5))[-1], rtol=0, atol=1e-12)
    assert "partition 2 is broken" in next(iter(coded.reports[1].refused.values()))


def _crashing(when: Callable[[int, int], bool]) -> Client:
    inner = client_app(mods=[])
    holder: list[int] = [0]

    def train(msg: Message, context: Context) -> Message:
        trained = int(context.node_config["partition-id"])
        if when(holder[0], trained):
            context.state["scratch"] = ConfigRecord({"half": "done"})
            raise RuntimeError(f"partition {trained} is broken")
        return inner(msg, context)

    app = app_of(train)

    def client(msg: Message, context: Context) -> Message:
        holder[0] = int(context.node_config["partition-id"])
        return app(msg, context)

    return client


def test_an_app_that_keeps_state_is_refused_and_its_state_put_back() -> None:
    inner = client_app(mods=[])

    def train(msg: Message, context: Context) -> Message:
        rounds = int(context.state.config_records.get("memory", {"rounds": 0})["rounds"])
        context.state["memory"] = ConfigRecord({"rounds": rounds + 1})
        return inner(msg, context)

    coded = strategy(1)
    with InProcessGrid(app_of(train), 4) as grid:
        with pytest.raises(NoUsableReply):
            fit(coded, MeteredGrid(grid), model(), 1)
        assert all("memory" not in grid.context(p).state for p in range(4))
    assert all("changed the node's state (memory)" in reason for reason in coded.reports[1].refused.values())
    assert len(coded.reports[1].refused.values()) == 4


ROW = FRAME + "row"


def _row(reply: Message) -> np.ndarray:
    return np.frombuffer(bytes(reply.content[NODE_RECORD][ROW])[:-CHECK], "<f8").copy()


def _put(reply: Message, row: np.ndarray) -> None:
    reply.content[NODE_RECORD][ROW] = checked_bytes(row, "float64")


def rewrites(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda reply: _put(reply, change(_row(reply)))


def replaces(name: str, value: Any) -> Change:
    """Put ``value``, or what it makes of the entry that was there."""

    def change(reply: Message) -> None:
        record = reply.content[NODE_RECORD]
        record[name] = value(record[name]) if callable(value) else value

    return change


def _other_form(text: str) -> str:
    return Form("other", Form.from_text(text).names).to_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rewrites(lambda row: row[:-1]), "bytes arrived, expected"),
        (rewrites(lambda row: np.insert(row[:-1], 3, np.nan)), "NaN"),
        (replaces(ROW, lambda frame: frame[:5] + bytes([frame[5] ^ 1]) + frame[6:]), "checksum"),
        (lambda reply: reply.content[NODE_RECORD].pop(ROW), "holds no answer"),
        (replaces("sequence", 1), "stale"),
        (replaces(FORM, "[1, 2]"), "form"),
        (replaces(FORM, '["a", [["x", 1000000000]]]'), "form"),
        (replaces(FORM, 17), "expected a text"),
        (replaces(FORM, _other_form), "not the others'"),
    ],
)
def test_an_answer_that_cannot_be_used_is_left_out_with_the_reason(change: Change, reason: str) -> None:
    coded = strategy(1)
    found = weights(run(5, coded, client=altering(change, [3])))
    assert np.allclose(found, full_batch(1, range(5))[0], rtol=0, atol=1e-12)
    (said,) = coded.reports[1].refused.values()
    assert reason in said


def test_clients_that_compute_different_updates_are_noticed() -> None:
    other = rewrites(lambda row: row + 1e-3 * (np.arange(len(row)) == 0))
    for options in ({}, {"scheme": "cyclic"}):
        coded = strategy(1, **options)
        run(4, coded, client=altering(other, [2]))
        assert any("contradict each other" in note for note in coded.reports[1].notes)
        honest = strategy(1, **options)
        run(4, honest)
        assert not honest.reports[1].notes


def test_an_update_beyond_the_agreed_range_of_a_field_is_refused_not_wrapped() -> None:
    coded = strategy(1, arithmetic="gf31", limit=1e-3)
    with pytest.raises(NoUsableReply):
        run(4, coded)
    assert all("choose a larger limit" in reason for reason in coded.reports[1].refused.values())


def test_weights_of_zero_leave_the_model() -> None:
    coded = strategy(1)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(4, coded, client=altering(rewrites(np.zeros_like), range(4)))
    assert "total weight is 0" in coded.reports[1].notes[-1]


# Bytes, settings, resuming.


@pytest.mark.slow
def test_an_answer_is_as_long_as_an_update_of_its_number_format() -> None:
    sizes = {}
    for arithmetic in ("float64", "gf31", "gf65521"):
        coded = strategy(1, arithmetic=arithmetic)
        with InProcessGrid(client_app(), 5) as grid:
            metered = MeteredGrid(grid)
            fit(coded, metered, model(), 1)
            up = metered.ledger.total("payload", round=1, direction="up")
        assert up == coded.reports[1].coded.payload_bytes["hub_up"]
        sizes[arithmetic] = up // 5
    scalars = 1 + 3 + 1 + 3  # weight, three metric values, counter, mask
    assert sizes["float64"] == 8 * (FEATURES + scalars) + CHECK
    assert sizes["gf31"] == 4 * FEATURES + 4 * scalars * 3 + CHECK
    assert sizes["gf65521"] == 2 * FEATURES + 2 * scalars * 5 + CHECK


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: strategy(1, loses=2), "did you mean 'losses'"),
        (lambda: strategy(1, symbols=3), "symbols=3"),
        (lambda: strategy(1, arithmetic="gf31", limit=-1.0), "limit"),
        (lambda: strategy(1, quorum=3), "allow that with"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_a_resumed_strategy_still_knows_who_belongs_to_the_code() -> None:
    with InProcessGrid(client_app(), 6) as grid:
        metered = MeteredGrid(grid)
        before = strategy(2)
        first = fit(before, metered, model(), 1).arrays
        grid.remove_node(0)
        after = strategy(2)
        after.load_state_dict(before.state_dict())
        fit(after, metered, first, 2, start_round=2)
    assert after.reports[2].coded.planned == 6


@pytest.mark.parametrize(
    "setting", [{"symbols": 3}, {"loss": 0.0}, {"transport": "peers"}, {"share_timeout": 5.0}, {"code": "mds"}]
)
def test_settings_of_other_constructions_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.* has no effect in a gradient code"):
        strategy(1, **setting)
