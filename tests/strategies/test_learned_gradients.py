"""LGC over messages. The test list B7 of the transform compressors, by number:

1. stages switch at their rounds, the first is FedAvg and the second top-k with error feedback:
   ``test_stages_switch_...``, ``test_the_first_stage_is_fedavg_...``, ``test_one_client_in_the_second_stage_...``;
2. identities: ``test_a_server_whose_innovations_...``, and of a ring ``tests/systems/test_lgc_program.py``;
3. held-out error, the side channel: ``test_autoencoder_training.py``;
4. scale: ``test_updates_of_another_scale_...``, and ``test_raw_gradients_train_nothing`` there;
5. conservation of mass: ``test_conservation_under_faults``, and ``tests/codecs/test_lgc.py`` for one client;
6. bytes: ``test_bytes_of_latents_...``, ``test_weights_go_once_...``, and ``test_b4_...`` of the codec;
7. similarity, order of nodes: ``test_autoencoder_training.py``, ``test_the_order_in_which_replies_come_...``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, fingerprint, update, with_halves
from waiting_runs import Sent, number_of, owed

from fedcomp.clients.compressed import compression
from fedcomp.clients.lgc import learned_gradients
from fedcomp.clients.programs import programs
from fedcomp.codecs import LGC, ErrorFeedback, ScaleCom, TopK
from fedcomp.codecs.autoencoder import ConvEncoder, latents
from fedcomp.codecs.lgc import NodeEstimate, side_of
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.logs import log
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, has_frame, put_frame, take_frame
from fedcomp.flower.protocol import DECODER, ENCODER, PROBE, UPDATE
from fedcomp.flower.rounds import drive, fit
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import EndsDense, Layout, SmallDense, TensorShape
from fedcomp.rng import Key
from fedcomp.strategies.autoencoder_training import AutoencoderTraining
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.lgc import PUBLISHED, LearnedGradients
from fedcomp.strategies.shared_support import SharedSupport

SHAPES = {"first": (20, 20), "second": (40, 30), "third": (30, 30), "last": (20, 30), "bias": (12,)}
STAGES = {"warmup_rounds": 2, "training_rounds": 3}
"""Rounds 1 and 2 are dense, 3 to 5 train the autoencoder, latents travel from round 6 on."""


def model(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({name: Array(np.full(shape, value, np.float32)) for name, shape in SHAPES.items()})


LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, EndsDense())
SIZE, CODED = LAYOUT.size, 1200 + 900
VARIANTS = [
    {"instance": "ring", "ef": "mask"},
    {"instance": "ring", "ef": "decoded"},
    {"instance": "server", "ef": "mask"},
    {"instance": "server", "ef": "decoded"},
]


def codec(**options) -> LGC:
    return LGC(**{"density": 0.05, "innovation": 0.005, **options})


def app() -> ClientApp:
    return client_app([learned_gradients(), compression()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


def run(strategy, nodes: int = 4, rounds: int = 8, **options):
    grid = metered(nodes, **options)
    return fit(strategy, grid, model(), rounds, timeout=9), grid


def flat(arrays: ArrayRecord) -> np.ndarray:
    """Return a model as updates are laid out: tensors that travel dense come last."""
    return LAYOUT.flatten({name: array.numpy() for name, array in arrays.items()})


def made_by(context: Context) -> np.ndarray:
    """Return the sum of all updates that a client's app made."""
    if "toy.sum" not in context.state:
        return np.zeros(SIZE)
    parts, start = {}, 0
    total = context.state.array_records["toy.sum"]["sum"].numpy()
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        parts[name] = total[start : start + size].reshape(shape).astype(np.float32)
        start += size
    return LAYOUT.flatten(parts).astype(np.float64)


def memories(grid) -> dict[int, np.ndarray]:
    contexts = [grid.inner.context(node) for node in grid.get_node_ids()]
    return {
        int(c.node_config["partition-id"]): c.state.array_records["fedcomp.uplink.memory"]["memory"].numpy()
        for c in contexts
    }


class Watched(LearnedGradients):
    """Keeps per round who sent, what the server takes each to have sent, and the mean that it makes of it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **{**STAGES, "fraction_evaluate": 0.0, **options})
        self.taken: dict[int, dict[int, np.ndarray]] = {}
        self.rounds: dict[int, object] = {}
        self.before: dict[int, tuple[np.ndarray, ...]] = {}

    def _gather(self, now, frames):
        yield from super()._gather(now, frames)
        # The support that was sent on: the one that goes down may have grown.
        self.before[now.number] = now.supports

    def _aggregate(self, now):
        # Before the sum, since a support may grow in it.
        supports = now.supports
        out = super()._aggregate(now)
        if out[0] is not None:
            self.rounds[now.number] = now
            self.taken[now.number] = {c.partition: self._found(now, c, supports) for c in now.senders}
        return out

    def _found(self, now, client, supports) -> np.ndarray:
        fixed = now.fixed
        if not now.by_node:
            now.supports, grown = supports, now.supports
            found = now.fixed.decode(client.values, LAYOUT)
            now.supports = grown
            return found.astype(np.float64)
        vector = fixed.decode(client.values, LAYOUT).astype(np.float64)
        where = now.codec.shared_positions(supports, LAYOUT)
        side, sent = side_of(fixed, client.values, where, LAYOUT)
        node = client.sent.node
        found = NodeEstimate(now.latents, now.decoder(node), now.scales[node]).of(side)
        vector[where[~sent]] = found[~sent]
        return vector


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


# Stages.


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_stages_switch_at_their_rounds_and_the_first_two_are_scalecom(instance: str) -> None:
    """Everything travels until R1, values until R1 + R2; bit for bit ScaleCom's models."""
    strategy = Watched(codec(instance=instance))
    grid = metered(3)
    arrays, models = model(), {}
    for number in range(1, 9):
        arrays, _ = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
        models[number] = flat(arrays)
    stages = [
        "dense" if now.codec.dense else "latents" if now.codec.sends_latents else "values"
        for now in strategy.rounds.values()
    ]
    assert stages == ["dense"] * 2 + ["values"] * 3 + ["latents"] * 3
    plain = SharedSupport(ScaleCom(0.05), warmup_rounds=2, policy=EndsDense(), fraction_evaluate=0.0)
    halves = client_app([programs()])
    np.testing.assert_array_equal(models[5], flat(run(plain, 3, rounds=5, client=halves)[0].arrays))
    after = flat(run(SharedSupport(ScaleCom(0.05), warmup_rounds=2, policy=EndsDense()), 3, 6, client=halves)[0].arrays)
    assert not np.array_equal(models[6], after)


def test_one_client_in_the_second_stage_is_top_k_with_error_feedback() -> None:
    strategy = Watched(codec(), warmup_rounds=0, training_rounds=9)
    alone = Compressed(fedavg(fraction_evaluate=0.0), ErrorFeedback(TopK(0.05, scope="layer")), policy=EndsDense())
    np.testing.assert_array_equal(flat(run(strategy, 1)[0].arrays), flat(run(alone, 1)[0].arrays))


def test_a_server_whose_innovations_are_all_of_top_k_is_top_k() -> None:
    """The oracle decodes the innovation to itself: each client's own top-k with error feedback, bit for bit."""
    strategy = Watched(
        codec(instance="server", ef="decoded", innovation=0.05), coder="identity", warmup_rounds=0, training_rounds=0
    )
    plain = Compressed(fedavg(fraction_evaluate=0.0), ErrorFeedback(TopK(0.05, scope="layer")), policy=EndsDense())
    ours, grid = run(strategy)
    theirs, other = run(plain)
    np.testing.assert_array_equal(flat(ours.arrays), flat(theirs.arrays))
    for p in range(4):
        np.testing.assert_array_equal(memories(grid)[p], memories(other)[p])


# What arrives.


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_model_moves_by_what_is_decoded_and_all_hold_it(options: dict) -> None:
    """Ring: the decoder's of the mean latents, found here from the clients' latents; server: the mean of decoded ones.
    Every replica is the server's model, bit for bit."""
    strategy = Watched(codec(**options), fraction_evaluate=1.0)
    seen: list[set[float]] = []
    average = strategy.cohort.evaluate_metrics_aggr_fn

    def look(replies, weighted_by):
        seen.append({reply["metrics"]["seen"] for reply in replies})
        return average(replies, weighted_by)

    object.__setattr__(strategy.cohort, "evaluate_metrics_aggr_fn", look)
    grid, arrays = metered(4), model()
    models = [flat(arrays)]
    for number in range(1, 9):
        arrays, _ = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
        models.append(flat(arrays))
        drive(strategy.evaluate_round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
    assert all(len(found) == 1 for found in seen)
    assert seen[-1] == {fingerprint(arrays)}
    for report in strategy.reports.values():
        assert (report.used, report.refused, report.notes) == (4, {}, [])
    for number in (6, 7, 8):
        now, moved = strategy.rounds[number], models[number] - models[number - 1]
        weights = {c.partition: c.weight / sum(o.weight for o in now.senders) for c in now.senders}
        supports = strategy.before[number] if now.by_node else now.supports
        mean = sum(weights[p] * vector for p, vector in strategy.taken[number].items())
        if not now.by_node:
            where, scale = now.codec.coded_support(supports, LAYOUT), np.float32(now.codec.scale)
            mixed = sum(np.float32(weights[c.partition]) * c.values.tensors[0].values.decode() for c in now.senders)
            assert mixed.size == latents(where.size)
            mean[where] = now.decoders[0].decode(mixed, where.size) * scale
        np.testing.assert_allclose(moved, mean, rtol=1e-4, atol=0.05)
        assert np.abs(moved).max() > 100


def scaled(factor: float) -> ClientApp:
    """Return an app whose updates are the toy's times ``factor``."""
    learns = with_halves([learned_gradients()])

    @learns.train()
    def train(msg: Message, context: Context) -> Message:
        (record,) = msg.content.array_records.values()
        p, number = partition(context), number_of(msg)
        out = {
            name: Array(array.numpy() + np.float32(factor) * update(number, p, array.numpy().shape, i))
            for i, (name, array) in enumerate(record.items())
        }
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(out), "m": metrics}), reply_to=msg)

    return learns


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_updates_of_another_scale_give_a_model_of_that_scale(options: dict) -> None:
    """Times 2⁻¹³, about 1e-4, every number of a run is 2⁻¹³ of what it was: exactly, since values are divided by their
    root mean square before they are trained with and encoded. Without it nothing would be learnt."""
    large, _ = run(Watched(codec(**options)), client=scaled(1.0))
    small, _ = run(Watched(codec(**options)), client=scaled(2.0**-13))
    # Where a model is about 1000 and an update 1e-4 of it, additions round: from zero on they are equal in every step.
    np.testing.assert_allclose(flat(small.arrays) * 2.0**13, flat(large.arrays), rtol=1e-5, atol=1e-2)
    assert np.abs(flat(large.arrays)).max() > 1000


@pytest.mark.long
def test_the_order_in_which_replies_come_does_not_matter() -> None:
    class Turned(GridWrapper):
        def send_and_receive(self, messages, *, timeout=None):
            return list(super().send_and_receive(messages, timeout=timeout))[::-1]

    result, _ = run(Watched(codec()))
    turned = fit(Watched(codec()), Turned(metered(4)), model(), 8, timeout=9)
    np.testing.assert_array_equal(flat(result.arrays), flat(turned.arrays))


@pytest.mark.long
def test_a_server_step_scales_what_is_decoded() -> None:
    """Not latents: a decoder of half the latents is not half of what is decoded."""
    whole, half = Watched(codec()), Watched(codec(), server_lr=0.5)
    assert np.abs(flat(run(whole)[0].arrays) * 0.5 - flat(run(half)[0].arrays)).max() < 0.05


def test_layers_that_are_not_coded_travel_as_values() -> None:
    """The first tensor and the bias whole, the last one as top-k on the support, two through the autoencoder."""
    strategy = Watched(codec())
    run(strategy, 3, rounds=6)
    now = strategy.rounds[6]
    coded, last = now.fixed.stretches(LAYOUT)
    assert (coded.size, last.size) == (CODED, 600)
    where = now.codec.coded_support(now.supports, LAYOUT)
    assert [t.values.k for t in now.senders[0].values.tensors] == [latents(where.size), 30, 412]
    assert where.size == 60 + 45


# Bytes.


@pytest.mark.long
def test_bytes_of_latents_innovations_and_weights() -> None:
    """A quarter of the values' floats in the ring; in the server instance one client sends latents and positions."""
    ring, server = Watched(codec(raw=0)), Watched(codec(raw=0, instance="server"), common="first")
    for strategy in (ring, server):
        _, grid = run(strategy, 4, rounds=9)
        ledger = grid.ledger
        values = ledger.total("payload", round=5, direction="up")
        coded = ledger.total("payload", round=9, direction="up")
        assert coded < values
    now = ring.rounds[9]
    k = sum(s.size for s in now.supports)
    assert now.senders[0].values.tensors[0].values.k == 4 * -(-k // 16)
    other = server.rounds[9]
    assert [c.values.tensors[0].values.k for c in other.senders] == [6] * 4
    assert other.latents.size == 4 * -(-sum(s.size for s in server.before[9]) // 16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "common", "encoders", "decoders"),
    [
        ({"instance": "ring"}, "turn", 4, 0),
        ({"instance": "ring", "ef": "decoded"}, "turn", 4, 4),
        ({"instance": "server"}, "turn", 3, 0),
        ({"instance": "server"}, "first", 1, 0),
        ({"instance": "server", "ef": "decoded"}, "first", 1, 4),
    ],
)
def test_weights_go_once_to_each_node_that_needs_them_and_are_counted(
    options: dict, common: str, encoders: int, decoders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    monkeypatch.setattr(
        log, "info", lambda text, *values: said.append(values[1]) if "weights went out" in text else None
    )
    strategy = Watched(codec(**options), common=common)
    grid = Sent(metered(4))
    result = fit(strategy, grid, model(), 8, timeout=9)
    monkeypatch.undo()
    assert [len(grid.holding(key)) for key in (ENCODER, DECODER)] == [encoders, decoders]
    assert all(number >= 6 for number, _ in grid.holding(ENCODER) + grid.holding(DECODER))
    e, d = 692_172, 174_908
    sent = sum(metrics.get("autoencoder-bytes", 0.0) for metrics in result.train_metrics_clientapp.values())
    assert sent == sum(said) == encoders * e + decoders * d
    ledger = grid.inner.ledger
    down = [ledger.total("payload", round=n, direction="down") for n in range(1, 9)]
    assert sum(down[5:]) > encoders * e + decoders * d
    assert max(down[2:5]) < e


@pytest.mark.long
def test_per_node_decoders_are_of_their_nodes() -> None:
    strategy = Watched(codec(instance="server", ef="decoded"), training=AutoencoderTraining(decoders=2))
    _, grid = run(strategy, 4, rounds=8)
    assert len(strategy.training.known) == 2
    now = strategy.rounds[8]
    ids = {node: now.decoder(node).id for node in grid.get_node_ids()}
    assert len(set(ids.values())) == 3
    assert sum(number == now.decoders[0].id for number in ids.values()) == 2


# Who is lost, and what.


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kind"),
    [*((options, "lost_reply") for options in VARIANTS), *((VARIANTS[-1], k) for k in ("offline", "raise", "corrupt"))],
    ids=str,
)
def test_another_client_stands_by_for_a_lost_leader(options: dict, kind: str) -> None:
    """Round 7 is led by the third of four; a lost one is replaced by the next, which is sent the encoder if it must."""

    def fault(delivery: Delivery):
        lost = delivery.round == 7 and delivery.partition == 2 and delivery.message_type == "train"
        return kind if lost else None

    strategy = Watched(codec(**options))
    run(strategy, 4, rounds=8, fault=fault)
    assert sorted(strategy.taken[7]) == [0, 1, 3]
    assert strategy.leaders[7] != 2
    assert sorted(strategy.taken[8]) == [0, 1, 2, 3]


class Accounted(Watched):
    """Keeps per partition what clients gave away from their memories, by their own account."""

    def __init__(self, grid: InProcessGrid, *args, **options) -> None:
        super().__init__(*args, **options)
        self.grid = grid
        self.given: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))

    def _aggregate(self, now):
        out = super()._aggregate(now)
        for client in now.senders if out[0] is not None else ():
            taken = self.taken[now.number][client.partition]
            state = self.grid.context(client.sent.node).state.array_records["fedcomp.uplink.memory"]
            given = taken
            if "delivered" in state:
                given = TopK(1.0, "layer").decode(state["delivered"].numpy().tobytes(), LAYOUT).astype(np.float64)
                if now.codec.ef == "decoded":
                    # What the server adds is what the client subtracts.
                    np.testing.assert_allclose(given, taken, rtol=1e-4, atol=0.01)
            self.given[client.partition] += given
        return out


@pytest.mark.long
@pytest.mark.parametrize("error_state", ["discard", "keep"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_conservation_under_faults(options: dict, error_state: str) -> None:
    """8 clients, 40 rounds, messages lost, doubled, late, crashed or damaged, nodes wiped: for every life of every
    node, updates made = given away + owed, with ``mask`` and with ``decoded``. A value that was lost or counted twice
    shows as 1 at least."""
    plan = RandomFaults(
        Key(11, "faults"), {"lost_reply": 0.08, "duplicate": 0.1, "late": 0.1, "raise": 0.08, "corrupt": 0.02}, pushes=1
    )
    grid = InProcessGrid(app(), 8, seed=5, fault=plan, error_state=error_state)
    strategy = Accounted(grid, codec(**options))
    arrays, made, left = model(), defaultdict(lambda: np.zeros(SIZE)), defaultdict(lambda: np.zeros(SIZE))
    nodes = list(grid.get_node_ids())

    def settle(node: int) -> None:
        context = grid.context(node)
        made[partition(context)] += made_by(context)
        left[partition(context)] += owed(context, strategy, node, LAYOUT)

    wipes = 0
    for number in range(1, 41):
        new, _ = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = new if new is not None else arrays
        for node in nodes:
            if Key(13, "wipe", number, partition(grid.context(node))).uniform(1)[0] < 0.02:
                settle(node)
                grid.wipe(node)
                wipes += 1
    for node in nodes:
        settle(node)
    reports = strategy.reports.values()
    assert wipes >= 3
    assert sum(len(r.rolled_back) for r in reports) > 20
    assert sum(strategy.rounds[n].codec.sends_latents for n in strategy.rounds) > 20
    for p in range(8):
        assert np.abs(strategy.given[p] + left[p] - made[p]).max() < 0.5
        assert np.abs(made[p]).max() > 1000


@pytest.mark.long
def test_without_what_was_delivered_mass_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails for a client that rolls nothing back."""
    monkeypatch.setattr(LGC, "rollback", lambda self, state, frame, layout: state)
    grid = InProcessGrid(app(), 3, seed=5, fault=RandomFaults(Key(11, "faults"), {"lost_reply": 0.3}))
    strategy = Accounted(grid, codec())
    fit(strategy, grid, model(), 16, timeout=9)
    missing = 0.0
    for node in grid.get_node_ids():
        context = grid.context(node)
        made = made_by(context)
        found = strategy.given[partition(context)] + owed(context, strategy, node, LAYOUT)
        missing = max(missing, float(np.abs(found - made).max()))
    assert missing > 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "damage"),
    [*((options, "gone") for options in VARIANTS), *((VARIANTS[1], kind) for kind in ("bytes", "other"))],
    ids=str,
)
def test_a_node_that_lost_its_weights_is_sent_them_in_the_same_round(options: dict, damage: str) -> None:
    def spoil(context: Context) -> None:
        held = context.state.array_records.get("fedcomp.lgc")
        if held is None:
            return
        if damage == "gone":
            del context.state["fedcomp.lgc"]
        elif damage == "bytes":
            context.state["fedcomp.lgc"] = ArrayRecord({k: Array(a.numpy()[:-3].copy()) for k, a in held.items()})
        else:
            other = np.frombuffer(ConvEncoder.draw(Key(9)).frame(), np.uint8)
            context.state["fedcomp.lgc"] = ArrayRecord({ENCODER: Array(other.copy())})

    honest = app()

    def client(msg: Message, context: Context) -> Message:
        if number_of(msg) == 8 and msg.metadata.message_type == "train":
            spoil(context)
        return honest(msg, context)

    strategy = Watched(codec(**options), common="first")
    grid = Sent(metered(4, client=client))
    fit(strategy, grid, model(), 9, timeout=9)
    assert all(sorted(strategy.taken[number]) == [0, 1, 2, 3] for number in (8, 9))
    assert not any(report.refused for report in strategy.reports.values())
    needing = 4 if options["instance"] == "ring" or options["ef"] == "decoded" else 1
    again = [kind for number, kind, _, keys in grid.messages if number > 7 and keys & {ENCODER, DECODER}]
    assert again == ["query"] * needing


def changed(change) -> ClientApp:
    """Return an app whose replies ``change(reply, message, context)`` alters."""
    inner = app()

    def client(msg: Message, context: Context) -> Message:
        asked = Message(RecordDict(dict(msg.content.items())), msg.metadata.dst_node_id, msg.metadata.message_type)
        reply = inner(msg, context)
        if not reply.has_error():
            change(reply, asked, context)
        return reply

    return client


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e39, "large", None])
@pytest.mark.parametrize("instance", ["ring", "server"])
def test_a_leader_that_names_no_scale_is_replaced(instance: str, scale: object) -> None:
    def change(reply, msg, context) -> None:
        header = reply.content.config_records[NODE_RECORD]
        if partition(context) == 2 and "scale" in header:
            del header["scale"]
            if scale is not None:
                header["scale"] = scale

    strategy = Watched(codec(instance=instance))
    result, _ = run(strategy, 4, rounds=8, client=changed(change))
    assert 2 not in strategy.leaders.values()
    assert sorted(strategy.taken) == list(range(1, 9))
    assert any("divided" in reason for r in strategy.reports.values() for reason in r.refused.values())
    assert np.isfinite(flat(result.arrays)).all()


@pytest.mark.long
@pytest.mark.parametrize("loud", [1, 2])
def test_a_guard_sees_the_scale_that_a_client_names(loud: int) -> None:
    """In the server instance a scale multiplies what is decoded: ten times the usual one is an outlier, of the common
    node (2, which leads round 7) as of others. Without a guard it moves the model."""

    def change(reply, msg, context) -> None:
        header = reply.content.config_records[NODE_RECORD]
        if partition(context) == loud and number_of(msg) in (0, 7) and isinstance(header.get("scale"), float):
            header["scale"] *= 1e4

    guarded = Watched(codec(instance="server"), guard=Norms(times_median=10), common="turn")
    run(guarded, 4, rounds=7, client=changed(change))
    outliers = [reason for reason in guarded.reports[7].refused.values() if "norm" in reason]
    assert len(outliers) == 1
    assert np.isfinite(guarded.taken[6][0]).all()


@pytest.mark.long
@pytest.mark.parametrize("forged", ["another encoder", "too few", "none", "bytes", "nan"])
def test_forged_latents_of_a_common_node_are_refused_and_another_stands_by(forged: str) -> None:
    def change(reply, msg, context) -> None:
        if partition(context) != 2 or PROBE not in reply.content:
            return
        lgc = codec(instance="server")
        values = np.full(105, 1.0, np.float32)
        if forged == "none":
            del reply.content[PROBE]
        elif forged == "bytes":
            put_frame(reply.content, PROBE, b"nothing of the kind")
        elif forged == "too few":
            put_frame(reply.content, PROBE, lgc.latents_frame(values[:20], held[0]))
        elif forged == "another encoder":
            put_frame(reply.content, PROBE, lgc.latents_frame(values, ConvEncoder.draw(Key(8))))
        else:
            frame = bytearray(take_frame(reply.content, PROBE))
            frame[-8:-4] = np.float32(np.nan).tobytes()
            put_frame(reply.content, PROBE, bytes(frame))

    held: list = []
    strategy = Watched(codec(instance="server"))
    held.append(strategy.training.encoder)
    run(strategy, 4, rounds=8, client=changed(change))
    assert [strategy.leaders[n] for n in (6, 7, 8)][1] != 2
    assert sorted(strategy.taken[7]) == [0, 1, 3]
    assert any("as leader" in reason for reason in strategy.reports[7].refused.values())


@pytest.mark.long
def test_latents_of_a_client_that_does_not_lead_are_not_looked_at() -> None:
    def change(reply, msg, context) -> None:
        if partition(context) == 3 and number_of(msg) != 8 and has_frame(reply.content, UPDATE):
            put_frame(reply.content, PROBE, b"latents of my own")

    honest, forged = (
        Watched(codec(instance="server"), common="first"),
        Watched(codec(instance="server"), common="first"),
    )
    ours, _ = run(honest)
    theirs, _ = run(forged, client=changed(change))
    np.testing.assert_array_equal(flat(ours.arrays), flat(theirs.arrays))


@pytest.mark.long
def test_latents_of_another_encoder_are_refused_and_go_back_into_the_memory() -> None:
    """A frame names the encoder; one that was made by another is refused, and only its sender is left out."""
    stale = ConvEncoder.draw(Key(8))

    def change(reply, msg, context) -> None:
        if partition(context) != 1 or not has_frame(reply.content, UPDATE):
            return
        frame = take_frame(reply.content, UPDATE)
        # The encoder's id is in the frame's optional field.
        ours = current[0].id.to_bytes(8, "little")
        if ours in frame:
            put_frame(reply.content, UPDATE, _resealed(frame.replace(ours, stale.id.to_bytes(8, "little"))))

    current: list = []

    class Known(Watched):
        def _stage(self, now):
            found = super()._stage(now)
            current[:] = [now.encoder]
            return found

    strategy = Known(codec())
    run(strategy, 4, rounds=8, client=changed(change))
    for number in (6, 7, 8):
        assert 1 not in strategy.taken[number]
        assert any("encoder" in reason for reason in strategy.reports[number].refused.values())


def _resealed(frame: bytes) -> bytes:
    """Return a frame with a checksum that fits its bytes."""
    import zlib

    return frame[:-4] + zlib.crc32(frame[:-4]).to_bytes(4, "little")


# Rounds that go on, and those that do not.


@pytest.mark.long
@pytest.mark.parametrize("at", [2, 4, 5, 6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"instance": "server", "ef": "decoded"},
        {"training": AutoencoderTraining(optimizer="sgd")},
    ],
    ids=["ring", "server", "sgd"],
)
def test_a_resumed_run_goes_on_bit_for_bit_in_every_stage(at: int, options: dict, tmp_path: Path) -> None:
    """Weights, moments, decoders, loans and the last leader's scale are in the checkpoint."""
    own = {k: v for k, v in options.items() if k == "training"}
    made = codec(**{k: v for k, v in options.items() if k not in own})
    result, _ = run(Watched(made, **own), 3)
    first, grid = Watched(made, **own), metered(3)
    half = fit(first, grid, model(), at, timeout=9)
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, server_round=at, arrays=half.arrays, strategy=first, grid=grid)
    held, second = checkpoint.load(path), Watched(made, **own)
    held.apply(second, grid)
    sent = Sent(grid)
    again = fit(second, sent, held.arrays, 8, start_round=at + 1, timeout=9)
    np.testing.assert_array_equal(flat(result.arrays), flat(again.arrays))
    if at == 6 and not options:
        assert sent.holding(ENCODER) == []
    with pytest.raises(StateError):
        Watched(codec(density=0.06)).load_state_dict(first.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_node_that_joins_in_the_last_stage_works_in_its_first_round(options: dict) -> None:
    away = lambda d: "offline" if d.partition == 3 and d.round < 8 else None  # noqa: E731
    strategy = Watched(codec(**options))
    run(strategy, 4, rounds=9, fault=away)
    assert sorted(strategy.taken[7]) == [0, 1, 2]
    assert [sorted(strategy.taken[n]) for n in (8, 9)] == [[0, 1, 2, 3]] * 2


@pytest.mark.long
def test_partial_participation() -> None:
    strategy = Watched(codec(instance="server", ef="decoded"), fraction_train=0.5)
    run(strategy, 6, rounds=12)
    assert {len(found) for found in strategy.taken.values()} == {3}


def test_an_autoencoder_that_was_never_trained_is_not_used() -> None:
    strategy = Watched(codec(), training_rounds=0)
    run(strategy, 2, rounds=4)
    assert [strategy.rounds[n].codec.sends_latents for n in (3, 4)] == [False, True]
    assert any("not trained" in note for note in strategy.reports[3].notes)
    assert strategy.training.steps == 1


def test_too_few_values_are_never_coded_and_it_is_said() -> None:
    strategy = Watched(codec(raw=3))
    run(strategy, 3, rounds=8)
    assert any("too few values" in note for note in strategy.reports[3].notes)
    assert not any(now.codec.sends_latents for now in strategy.rounds.values())


@pytest.mark.long
def test_too_few_values_in_the_last_stage_travel_as_they_are() -> None:
    """A support of fewer than 16 coded values, after training on more."""

    class Thin(Watched):
        def _stage(self, now):
            found = super()._stage(now)
            return found if now.number < 7 else type(found)(**{**_fields(found), "density": 0.004})

    strategy = Thin(codec())
    run(strategy, 3, rounds=8)
    now = strategy.rounds[8]
    assert now.codec.coded_support(now.supports, LAYOUT).size == 9
    assert now.senders[0].values.tensors[0].values.k == 9
    # Of the server's three, no position is decoded: innovations alone arrive.
    server = Thin(codec(instance="server"))
    run(server, 3, rounds=8)
    assert server.rounds[8].latents.size == 0


def _fields(codec: LGC) -> dict:
    return {k: v for k, v in codec.to_config().items() if k != "id"}


@pytest.mark.long
def test_clients_of_other_systems_are_served_beside_it() -> None:
    one = client_app([learned_gradients(), programs(), compression()])
    plain, _ = run(SharedSupport(ScaleCom(0.05), policy=EndsDense()), client=one)
    alone, _ = run(SharedSupport(ScaleCom(0.05), policy=EndsDense()), client=client_app([programs()]))
    np.testing.assert_array_equal(flat(plain.arrays), flat(alone.arrays))
    with pytest.raises(Exception, match="learned_gradients"):
        run(Watched(codec()), client=client_app([programs(), compression()]))


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="class LGC"):
        LearnedGradients(ScaleCom(0.1))
    with pytest.raises(ConfigError, match="set by the server"):
        LearnedGradients(LGC(encoder=5))
    for options in ({"coder": "linear"}, {"common": "last"}, {"training_rounds": -1}):
        with pytest.raises(ConfigError):
            LearnedGradients(**options)
    published = LearnedGradients(**PUBLISHED)
    assert (published.warmup_rounds, published.training_rounds) == (200, 300)
    assert (published.codec.density, published.codec.innovation) == (1e-3, 1e-5)
    assert (published.training.optimizer, published.training.lr) == ("sgd", 1e-3)


def test_the_policy_leaves_the_ends_dense() -> None:
    shapes = {name: TensorShape(shape, "float32") for name, shape in SHAPES.items()}
    found = EndsDense(first=1, last=2, others=SmallDense(share=0.0)).fit(shapes)
    decided = {name: found(name, t.shape, t.dtype) for name, t in shapes.items()}
    assert decided == {"first": 1.0, "second": None, "third": None, "last": 1.0, "bias": 1.0}
    # A first layer that is small anyway is the first one still; statistics are no weights.
    small = {"mean.running_mean": TensorShape((9,), "float32"), "tiny": TensorShape((2, 2), "float32"), **shapes}
    found = EndsDense().fit(small)
    decided = {name: found(name, t.shape, t.dtype) for name, t in small.items()}
    assert decided["mean.running_mean"] == "exact"
    assert [name for name, density in decided.items() if density is None] == ["first", "second", "third", "last"]
    with pytest.raises(ConfigError):
        EndsDense(first=-1)
