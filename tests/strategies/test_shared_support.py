"""ScaleCom over messages: one support for all, the leader's turn, lost leaders, lost indices, nothing lost for good."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from program_runs import owed
from toy import client_app, fedavg, fingerprint, model, stack, update, with_halves

from fedcomp import wire
from fedcomp.clients.programs import programs
from fedcomp.codecs import ScaleCom, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.scalecom import open_support, support_frame
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, has_frame, put_frame
from fedcomp.flower.rounds import drive, fit
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import Layout, SmallDense
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.shared_support import SharedSupport

SIZE = 1212
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})
K = 24  # of the 1200 compressed coordinates at 2 %


def app() -> ClientApp:
    return client_app([programs()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


def run(strategy: SharedSupport, nodes: int = 4, rounds: int = 6, **options):
    grid = metered(nodes, **options)
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9), grid


class Watched(SharedSupport):
    """Keeps per partition what was delivered, and per round every sender's values and the support."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.delivered: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
        self.values: dict[int, dict[int, np.ndarray]] = {}
        self.supports: dict[int, tuple[np.ndarray, ...]] = {}

    def _take(self, x, now, step):
        out = super()._take(x, now, step)
        if out[0] is not None:
            codec, given = x.given
            self.supports[now.number] = open_support(step.blobs["support"], self.system.at(now.number), LAYOUT)
            self.values[now.number] = {g.node: codec.decode(g.frame, LAYOUT).astype(np.float64) for g in given}
            for partition, vector in self.values[now.number].items():
                self.delivered[partition] += vector
        return out


def mean_of(values: dict[int, np.ndarray]) -> np.ndarray:
    """Return the mean as Flower weighs it: the toy's examples are 10 (partition + 1)."""
    total = sum(10 * (p + 1) for p in values)
    return sum(v * (10 * (p + 1) / total) for p, v in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3, 8])
@pytest.mark.parametrize("selector", ["exact", "chunk"])
def test_mean_of_decoded_has_k_values_whatever_the_number_of_clients(nodes: int, selector: str) -> None:
    """Spec 7.1.5: the union of all supports is one support; the model moves by the mean of what was decoded."""
    strategy = Watched(ScaleCom(0.02, selector=selector))
    result, _ = run(strategy, nodes)
    moved = np.zeros(SIZE)
    for round_ in range(1, 7):
        union = np.any([v[:1200] != 0 for v in strategy.values[round_].values()], axis=0)
        assert np.count_nonzero(union) == K
        np.testing.assert_array_equal(np.flatnonzero(union), strategy.supports[round_][0])
        moved += mean_of(strategy.values[round_])
    np.testing.assert_allclose(stack(result.arrays), moved, rtol=1e-5, atol=1e-2)


def test_every_client_its_own_top_k_is_not_clt_k() -> None:
    """Spec 7.1.5, the wrong variant: with supports of their own the union is several times k."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.02, scope="layer"))
    strategy.start(metered(8), model(), num_rounds=1, timeout=9)
    assert strategy.reports[1].changed > 4 * K


@pytest.mark.slow
def test_the_leader_rotates_over_all_present_clients() -> None:
    strategy = SharedSupport(ScaleCom(0.02))
    run(strategy, 3, rounds=7)
    assert [strategy.leaders[r] for r in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_followers_gradient_never_changes_the_support() -> None:
    """Spec 7.1.5: in round 1 partition 0 leads; other updates of the others leave the support as it is."""

    def changed(msg: Message, context: Context) -> Message:
        return honest(msg, context)

    honest = app()
    first = Watched(ScaleCom(0.02))
    run(first, 4, rounds=1, client=changed)

    loud = with_halves([programs()])

    @loud.train()
    def train(msg: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        factor = 1.0 if partition == 0 else -1000.0
        record = msg.content["arrays"]
        out = {
            name: Array(array.numpy() + np.float32(factor) * update(1, partition, array.numpy().shape, i))
            for i, (name, array) in enumerate(record.items())
        }
        metrics = MetricRecord({"num-examples": 10 * (partition + 1)})
        return Message(RecordDict({"arrays": ArrayRecord(out), "m": metrics}), reply_to=msg)

    second = Watched(ScaleCom(0.02))
    run(second, 4, rounds=1, client=loud)
    np.testing.assert_array_equal(first.supports[1][0], second.supports[1][0])
    np.testing.assert_array_equal(first.values[1][0], second.values[1][0])
    assert not np.array_equal(first.values[1][1], second.values[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_one_client_is_plain_top_k(beta: float, scope: str) -> None:
    """Spec 7.1.7: N = 1 CLT-k equals top-k with the same memory, bit for bit."""
    shared, _ = run(SharedSupport(ScaleCom(0.02, beta=beta, scope=scope)), 1, rounds=8)
    codec = ErrorFeedback(TopK(0.02, scope=scope), beta=beta)
    pair = Compressed(fedavg(fraction_evaluate=0.0), codec, policy=SmallDense())
    alone = pair.start(metered(1), model(), num_rounds=8, timeout=9)
    np.testing.assert_array_equal(stack(shared.arrays), stack(alone.arrays))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_memory_on_the_support_keeps_its_share(beta: float) -> None:
    """Spec 7.1.6: after a round the memory on I is (1 - beta) of what it was; "zero it" fails for beta < 1."""
    strategy = Watched(ScaleCom(0.02, beta=beta))
    grid = metered(2)
    nodes = sorted(grid.get_node_ids())

    def memories():
        return {n: grid.inner.context(n).state.array_records["fedcomp.memory"]["memory"].numpy() for n in nodes}

    result = fit(strategy, grid, model(), 3, timeout=9)
    before = memories()
    fit(strategy, grid, result.arrays, 4, start_round=4, timeout=9)
    support = strategy.supports[4][0]
    for node, after in memories().items():
        np.testing.assert_allclose(after[support], (1 - beta) * before[node][support], rtol=1e-6, atol=1e-3)
        assert np.abs(before[node][support]).max() > 10
        if beta < 1:
            assert np.abs(after[support]).max() > 1, "the variant that zeroes the memory would pass"


@pytest.mark.slow
@pytest.mark.parametrize("error_state", ["discard", "keep"])
def test_conservation_under_faults(error_state: str) -> None:
    """10 clients, 80 rounds, every kind of message lost, duplicated, late, crashed or damaged, nodes wiped: for every
    life of every node, updates made = delivered + owed. The app's updates are whole numbers; the model is not, so that
    the difference it leaves is rounded. A value that was lost or counted twice shows as 1 at least.
    """
    plan = RandomFaults(
        Key(11, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1, "corrupt": 0.02}, pushes=1
    )
    grid = InProcessGrid(app(), 10, seed=5, fault=plan, error_state=error_state)
    strategy = Watched(ScaleCom(0.02))
    arrays = model()
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    left: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    nodes = list(grid.get_node_ids())
    partition = {n: int(grid.context(n).node_config["partition-id"]) for n in nodes}

    def settle(node: int) -> None:
        context = grid.context(node)
        if "toy.sum" in context.state:
            made[partition[node]] += context.state.array_records["toy.sum"]["sum"].numpy()
        left[partition[node]] += owed(strategy, context, node, LAYOUT)

    wipes = 0
    for round_ in range(1, 81):
        new, _ = drive(strategy.round(round_, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = new if new is not None else arrays
        for node in nodes:
            if Key(13, "wipe", round_, partition[node]).uniform(1)[0] < 0.01:
                settle(node)
                grid.wipe(node)
                wipes += 1
    for node in nodes:
        settle(node)
    assert wipes >= 4
    reports = strategy.reports.values()
    assert sum(r.lost for r in reports) > 100
    assert sum(len(r.refused) for r in reports) > 60
    assert sum(len(r.rolled_back) for r in reports) > 60
    assert sum(r.compressed for r in reports) > 300
    for p in range(10):
        assert np.abs(strategy.delivered[p] + left[p] - made[p]).max() < 0.1
        assert np.abs(made[p]).max() > 1000


@pytest.mark.slow
def test_without_rolling_back_mass_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails for a client that forgets what was not acknowledged."""
    monkeypatch.setattr(ScaleCom, "rollback", lambda self, state, frame, layout: state)
    plan = RandomFaults(Key(11, "faults"), {"lost_reply": 0.3})
    grid = InProcessGrid(app(), 3, seed=5, fault=plan)
    strategy = Watched(ScaleCom(0.02))
    fit(strategy, grid, model(), 20, timeout=9)
    missing = 0.0
    for node in grid.get_node_ids():
        context = grid.context(node)
        made = context.state.array_records["toy.sum"]["sum"].numpy()
        p = int(context.node_config["partition-id"])
        missing += float(np.abs(strategy.delivered[p] + owed(strategy, context, node, LAYOUT) - made).max())
    assert missing > 1


@pytest.mark.slow
def test_a_lost_leader_is_replaced_within_the_round() -> None:
    """Partition 1 leads round 2 and is lost in every way: the next client that trained chooses instead."""
    for kind in ("lost_reply", "offline", "raise", "corrupt", "silent"):

        def fault(delivery: Delivery, kind: str = kind):
            return (
                kind if delivery.round == 2 and delivery.partition == 1 and delivery.message_type == "train" else None
            )

        strategy = Watched(ScaleCom(0.02))
        run(strategy, 4, rounds=3, fault=fault)
        # Three clients are left; the turn of round 2 is the second of them.
        assert strategy.leaders == {1: 0, 2: 2, 3: 2}, kind
        assert sorted(strategy.values[2]) == [0, 2, 3], kind
        assert strategy.reports[2].lost + len(strategy.reports[2].refused) == 1, kind
        assert sorted(strategy.values[3]) == [0, 1, 2, 3], kind


def test_several_lost_leaders_and_no_leader_at_all() -> None:
    def queries_of(partitions: set[int]):
        return lambda d: "lost_reply" if d.message_type == "query" and d.partition in partitions else None

    strategy = Watched(ScaleCom(0.02))
    run(strategy, 4, rounds=1, fault=queries_of({0, 1}))
    assert strategy.leaders == {1: 2}
    assert sorted(strategy.values[1]) == [2, 3]
    strategy = Watched(ScaleCom(0.02))
    result, _ = run(strategy, 2, rounds=1, fault=queries_of({0, 1}))
    assert strategy.leaders == {}
    assert "no client could choose" in strategy.reports[1].notes[0]
    np.testing.assert_array_equal(stack(result.arrays), np.zeros(SIZE))


def test_a_client_that_missed_the_index_message_keeps_everything() -> None:
    """Spec 1.3: its memory is (1 - beta) m + beta p, dense tensors included; the others go on."""
    for beta in (1.0, 0.4):
        fault = lambda d: "offline" if d.message_type == "query" and d.partition == 2 and d.round == 1 else None  # noqa: E731
        strategy = Watched(ScaleCom(0.02, beta=beta))
        _, grid = run(strategy, 3, rounds=1, fault=fault)
        assert sorted(strategy.values[1]) == [0, 1]
        node = next(n for n in grid.get_node_ids() if grid.inner.context(n).node_config["partition-id"] == 2)
        state = {k: v.numpy() for k, v in grid.inner.context(node).state.array_records["fedcomp.memory"].items()}
        made = grid.inner.context(node).state.array_records["toy.sum"]["sum"].numpy()
        np.testing.assert_allclose(strategy.codec.settle(state, LAYOUT)["memory"], beta * made, rtol=1e-6)


@pytest.mark.slow
def test_downlink_does_not_grow_with_the_number_of_clients() -> None:
    """Bytes per client and round after the first: the same for 2 and for 16 clients; a union's would grow."""

    def per_client(nodes: int) -> float:
        strategy = SharedSupport(ScaleCom(0.02))
        _, grid = run(strategy, nodes, rounds=6)
        assert all(r.changed == K for r in strategy.reports.values())
        return sum(grid.ledger.total("payload", round=r, direction="down") for r in (4, 5, 6)) / nodes / 3

    few, many = per_client(2), per_client(16)
    # The leader gets no index block: with more clients its share is smaller.
    assert abs(few - many) < 40
    # k and the dense rest in float32, and at most one index block and headers.
    assert many < 4 * (K + 30) + 200


@pytest.mark.slow
def test_replicas_are_the_servers_model_also_after_wipes() -> None:
    plan = RandomFaults(Key(17, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1})
    seen: list[float] = []

    class Seeing(GridWrapper):
        """Compares what each client says it trained from with the server's model."""

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            model_now = LAYOUT.unflatten(strategy.down.broadcast.reference, {})
            now = fingerprint(ArrayRecord({k: Array(v) for k, v in model_now.items()}))
            answers = [r.content["metrics"]["seen"] for r in replies if r.has_content() and "metrics" in r.content]
            seen.extend(answer - now for answer in answers)
            return replies

    engine = InProcessGrid(app(), 6, seed=6, fault=plan)
    strategy, grid = SharedSupport(ScaleCom(0.02)), Seeing(engine)
    arrays, nodes = model(), list(grid.get_node_ids())
    for round_ in range(1, 61):
        new, _ = drive(strategy.round(round_, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = new if new is not None else arrays
        for i, node in enumerate(nodes):
            if Key(19, "wipe", round_, i).uniform(1)[0] < 0.03:
                grid.wipe(node)
    assert len(seen) > 200
    assert not any(seen)
    resyncs = [r for report in strategy.reports.values() for r in report.refused.values() if "resync" in r]
    assert resyncs, "no wiped node ever asked for a full model"


@pytest.mark.slow
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    def build():
        faults = RandomFaults(Key(3, "resume"), {"lost_reply": 0.2, "raise": 0.1})
        return SharedSupport(ScaleCom(0.02, beta=0.5)), metered(4, fault=faults)

    strategy, grid = build()
    whole = fit(strategy, grid, model(), 8, timeout=9)
    path = tmp_path / "run.ckpt"
    strategy_a, grid_a = build()

    def keep(server_round, arrays, outcome) -> None:
        if server_round == 4:
            checkpoint.save(path, server_round=4, arrays=arrays, strategy=strategy_a, grid=grid_a)

    fit(strategy_a, grid_a, model(), 4, timeout=9, on_round=keep)
    strategy_b, grid_b = build()
    held = checkpoint.load(path)
    held.apply(strategy_b, grid_b)
    resumed = fit(strategy_b, grid_b, held.arrays, 8, start_round=5, timeout=9)
    np.testing.assert_array_equal(stack(resumed.arrays), stack(whole.arrays))
    assert strategy_b.leaders == strategy.leaders
    assert grid_b.ledger.total("wire") == grid.ledger.total("wire")
    other = SharedSupport(ScaleCom(0.05))
    with pytest.raises(StateError, match="resume with the same"):
        other.load_state_dict(strategy.state_dict())


@pytest.mark.slow
def test_warm_up_is_dense_and_leaves_no_memory() -> None:
    """The first rounds equal plain FedAvg on the same updates; compression starts after them without a resync."""
    strategy = Watched(ScaleCom(0.02), warmup_rounds=2)
    run(strategy, 3, rounds=4)
    assert [len(r.refused) for r in strategy.reports.values()] == [0, 0, 0, 0]
    for round_ in (1, 2):
        for partition, values in strategy.values[round_].items():
            made = np.concatenate([update(round_, partition, s, i).ravel() for i, s in enumerate([(40, 30), (12,)])])
            np.testing.assert_allclose(values, made, atol=1e-3)
    assert strategy.reports[3].changed == K
    assert all(ratio == 0.0 for ratio in strategy.reports[2].memory.values())


@pytest.mark.slow
def test_evaluation_uses_the_new_model() -> None:
    strategy = SharedSupport(ScaleCom(0.02), fraction_evaluate=1.0)
    result, grid = run(strategy, 3, rounds=3)
    seen = result.evaluate_metrics_clientapp[3]["seen"]
    assert seen == fingerprint(result.arrays)
    # Evaluation brought the replicas up to date; the next training message needs no bytes of the model.
    before = grid.ledger.total("payload", direction="down", message_type="train", round=3)
    assert before == 0


@pytest.mark.slow
def test_frames_too_large_to_ride_in_a_config_record() -> None:
    """Frames above 64 KiB travel as Arrays; neither side takes one for a model."""
    size = 60_000
    big = with_halves([programs()])

    @big.train()
    def train(msg: Message, context: Context) -> Message:
        (record,) = msg.content.array_records.values()
        partition = int(context.node_config["partition-id"])
        step = Key(1, "big", int(msg.content["config"]["server-round"]), partition).generator().standard_normal(size)
        out = ArrayRecord({"w": Array(record["w"].numpy() + step.astype(np.float32))})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": out, "m": metrics}), reply_to=msg)

    strategy = SharedSupport(ScaleCom(0.5))
    grid = metered(2, client=big)
    initial = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    strategy.start(grid, initial, num_rounds=4, timeout=9)
    assert [(r.compressed, r.changed, len(r.refused)) for r in strategy.reports.values()] == [(2, 30_000, 0)] * 4
    # The last round's downlink is values, not models.
    assert grid.ledger.total("payload", round=4, direction="down", message_type="train") < 2 * 200_000

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.5), TopK(0.5))
    strategy.start(metered(2, client=big), initial, num_rounds=4, timeout=9)
    assert [r.compressed for r in strategy.reports.values()] == [2, 2, 2, 2]


def evil_run(evil, *, kind: str = "train", culprit: int = 1, rounds: int = 2, **options):
    honest = app()

    def client(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if (
            context.node_config["partition-id"] == culprit
            and msg.metadata.message_type == kind
            and not reply.has_error()
        ):
            changed = evil(reply.content)
            reply.content = reply.content if changed is None else changed
        return reply

    strategy = Watched(ScaleCom(0.02), **options)
    result, _ = run(strategy, 4, rounds=rounds, client=client)
    assert np.isfinite(stack(result.arrays)).all()
    return strategy


def block_of(supports) -> bytes:
    return support_frame(supports, ScaleCom(1.0), LAYOUT)


def _put(key: str, frame: bytes):
    def evil(content: RecordDict) -> None:
        if has_frame(content, key):
            put_frame(content, key, frame)

    return evil


SHAPE = (1200,)
REST = wire.dense(np.ones(12, np.float32))
BAD_VALUES = {
    "another support": wire.encode([wire.shared(SHAPE, 77 << 20, np.ones(K, np.float32)), REST]),
    "too few": wire.encode([wire.shared(SHAPE, 2 << 20, np.ones(K - 1, np.float32)), REST]),
    "too many": wire.encode([wire.shared(SHAPE, 2 << 20, np.ones(K + 1, np.float32)), REST]),
    "a support of its own": wire.encode([wire.sparse(SHAPE, np.arange(K), np.ones(K, np.float32)), REST]),
    "not finite": wire.encode([wire.shared(SHAPE, 2 << 20, np.full(K, np.nan, np.float32)), REST]),
    "no rest": wire.encode([wire.shared(SHAPE, 2 << 20, np.ones(K, np.float32))]),
    "half": wire.encode([wire.shared(SHAPE, 2 << 20, wire.Fp16(np.ones(K, np.float32))), REST]),
    "noise": b"\x01" * 100,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_cost_their_senders_update_only(name: str) -> None:
    strategy = evil_run(_put(FRAME + "values", BAD_VALUES[name]), kind="query", culprit=2)
    assert sorted(strategy.values[2]) == [0, 1, 3]
    assert len(strategy.reports[2].refused) == 1


BAD_BLOCKS = {
    "too many": block_of((np.arange(K + 1),)),
    "values": wire.encode([wire.sparse(SHAPE, np.arange(K), np.ones(K, np.float32))]),
    "another model": wire.encode([wire.sparse((1199,), np.arange(K), wire.Ones(K))]),
    "noise": b"FCW1" + b"\x00" * 60,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_a_bad_support_is_refused_and_another_leads(name: str) -> None:
    """Partition 1 leads round 2."""
    strategy = evil_run(_put(FRAME + "support", BAD_BLOCKS[name]))
    assert strategy.leaders[2] != 1
    assert sorted(strategy.values[2]) == [0, 2, 3]
    assert any(reason.startswith("support: ") for reason in strategy.reports[2].refused.values())


def test_a_support_the_leader_did_not_send_on_is_refused() -> None:
    """The block is fine by itself, but has another number of coordinates than the leader's own values."""
    strategy = evil_run(_put(FRAME + "support", block_of((np.arange(K - 3),))))
    assert sorted(strategy.values[2]) == [0, 2, 3]


@pytest.mark.slow
def test_headers_are_not_believed() -> None:
    def header(name: str, value):
        def evil(content: RecordDict) -> None:
            content["fedcomp.node"][name] = value

        return evil

    for name, value in (("sequence", 1), ("sequence", "x"), ("generation", "x"), ("record", 7)):
        strategy = evil_run(header(name, value))
        assert 1 not in strategy.values[2], name
    for name, value in (("sequence", 3), ("generation", 999)):
        strategy = evil_run(header(name, value), kind="query", culprit=2)
        assert 2 not in strategy.values[2], name
    for weight in (-1.0, float("nan"), 1e300):
        strategy = evil_run(lambda content, w=weight: content["metrics"].update({"num-examples": w}))
        assert 1 not in strategy.values[2]
    strategy = evil_run(lambda content: content["metrics"].update({"extra": 1.0}))
    assert 1 not in strategy.values[2]


def test_apps_without_the_mod_are_told_what_they_lack() -> None:
    strategy = Watched(ScaleCom(0.02))
    plain = client_app()
    modded = app()

    def client(msg: Message, context: Context) -> Message:
        return (plain if context.node_config["partition-id"] == 1 else modded)(msg, context)

    run(strategy, 3, rounds=2, client=client)
    assert sorted(strategy.values[2]) == [0, 2]
    assert "its app cannot take part in SharedSupport" in next(iter(strategy.reports[2].refused.values()))


def test_the_mod_leaves_other_servers_alone() -> None:
    """The same app under the drop-in pair, with and without a compressed downlink."""
    for downlink in (None, TopK(0.05)):
        grid = metered(3)
        strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.02), downlink)
        strategy.start(grid, model(), num_rounds=2, timeout=9)
        assert strategy.reports[2].compressed == 3


def test_wrong_parameters() -> None:
    with pytest.raises(ConfigError, match="ScaleCom"):
        SharedSupport(TopK(0.1))
    with pytest.raises(ConfigError, match="exchanges"):
        Compressed(fedavg(), ScaleCom(0.1))
    for options in (
        {"fraction_train": 0.0},
        {"fraction_evaluate": 1.5},
        {"server_lr": 0.0},
        {"server_lr": float("nan")},
        {"warmup_rounds": -1},
        {"min_train_nodes": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            SharedSupport(ScaleCom(0.1), **options)


@pytest.mark.slow
def test_a_share_of_the_nodes_takes_turns() -> None:
    strategy = Watched(ScaleCom(0.02), fraction_train=0.5)
    run(strategy, 6, rounds=8)
    assert all(r.asked == 3 for r in strategy.reports.values())
    assert len({p for values in strategy.values.values() for p in values}) == 6


def test_a_model_changed_in_between_is_sent_whole() -> None:
    """Whoever hands another model to the next round gets it trained from, not the one that was broadcast."""
    strategy = Watched(ScaleCom(0.02))
    grid = metered(2)
    first = fit(strategy, grid, model(), 2, timeout=9)
    changed = ArrayRecord({name: Array(array.numpy() + 1) for name, array in first.arrays.items()})
    second = fit(strategy, grid, changed, 3, start_round=3, timeout=9)
    np.testing.assert_allclose(stack(second.arrays), stack(changed) + mean_of(strategy.values[3]), atol=1e-3)
    assert sorted(strategy.values[3]) == [0, 1]
