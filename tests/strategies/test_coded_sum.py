"""Coded sums over messages: the integer sum bit for bit, whoever drops out; nothing counted twice, nothing lost; the
server sees no update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coded_runs import break_links
from coded_sum_runs import (
    CODEC,
    LAYOUT,
    MODES,
    NODES,
    PARCEL,
    ROUNDS,
    SIZE,
    TRANSPORTS,
    Recorder,
    coded_sum,
    grid_of,
    included,
    json_of,
    oracle,
    run,
    train_replies,
)
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedMedian
from message_examples import fields_of
from toy import client_app, fedavg, model, stack

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, FixedPoint, RandomBlock, RandomK, TopK
from fedcomp.codecs import Identity as IdentityCodec
from fedcomp.coding.errors import SealError
from fedcomp.coding.prime import inverse
from fedcomp.coding.sealing import PeerIdentity
from fedcomp.coding.sumcode import SumPlan
from fedcomp.coding.sumshards import Shard
from fedcomp.coding.transport import Parcel
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import (
    MASKED_UPDATE,
    SUM,
    pack_content,
    put_bundle,
    take_bundle,
)
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.payload import take_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.hooked import Hooked

# The sum.


@pytest.mark.slow
@TRANSPORTS
@MODES
@pytest.mark.parametrize("weighted", [True, False])
def test_the_model_is_the_integer_oracles_bit_for_bit(transport: str, mode: str, weighted: bool) -> None:
    recorder = Recorder()
    strategy, grid = coded_sum(transport=transport, mode=mode, weighted=weighted), grid_of(recorder=recorder)
    result = run(strategy, grid)
    np.testing.assert_array_equal(stack(result.arrays), oracle(strategy, grid, recorder, 3, weighted=weighted))
    assert np.count_nonzero(stack(result.arrays)) > 300
    for round_ in (1, 2, 3):
        assert included(strategy, grid, round_) == list(range(NODES))
        assert result.train_metrics_clientapp[round_]["coded.weight"] == (210 if weighted else NODES)
    assert strategy.reports[2].rolled_back == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (FixedPoint(RandomK(1.0), clip=1024.0, levels=1), {"weighted": False}),
        (FixedPoint(RandomBlock(0.2), clip=2048.0, levels=127), {"weighted": False}),
        (FixedPoint(RandomK(0.2, scope="layer"), clip=1024.0, levels=32767), {"max_weight": 60, "symbols": 5}),
    ],
    ids=repr,
)
def test_every_prime_and_every_linear_codec(codec: FixedPoint, options: dict) -> None:
    """Ternary values over GF(251), bytes over GF(65521), 16 bits and weights over GF(2^31 - 1)."""
    recorder = Recorder()
    strategy, grid = coded_sum(codec, **options), grid_of(recorder=recorder)
    result = run(strategy, grid, 2)
    expected = oracle(strategy, grid, recorder, 2, weighted=options.get("weighted", True))
    np.testing.assert_array_equal(stack(result.arrays), expected)
    primes = {1: 251, 127: 65521, 32767: 2**31 - 1}
    plan = strategy.construction.plan(NODES, 1)
    assert plan.field.order == primes[codec.levels]


@pytest.mark.slow
def test_all_orders_of_arrival_and_repeated_messages_give_the_same_model() -> None:
    """Shuffled replies, and every message delivered twice: clients code it twice, relays add one of the two."""
    models = []
    for fault, shuffle in ((None, True), (None, False), (lambda d: "duplicate", True)):
        strategy = coded_sum(transport="peers" if shuffle else "hub")
        result = run(strategy, grid_of(fault=fault, shuffle_replies=shuffle))
        assert all(len(r.coded.included) == NODES for r in strategy.reports.values())
        models.append(stack(result.arrays))
    np.testing.assert_array_equal(models[0], models[1])
    np.testing.assert_array_equal(models[0], models[2])


@pytest.mark.slow
def test_the_mean_is_that_of_the_uncoded_run_up_to_rounding() -> None:
    """The same codec without coding: what clients send is the same, the sums differ in the last bits of float32."""
    plain = Compressed(fedavg(fraction_evaluate=0.0), CODEC)
    uncoded = plain.start(grid_of(), model(), num_rounds=1, timeout=9)
    result = run(coded_sum(), grid_of(), 1)
    np.testing.assert_allclose(stack(result.arrays), stack(uncoded.arrays), rtol=1e-6, atol=1e-3)


@pytest.mark.slow
@TRANSPORTS
def test_fewer_relays_than_clients_take_turns(transport: str) -> None:
    """Four of six relay, others every round; all six are in the sum."""
    recorder = Recorder()
    grid = grid_of(recorder=recorder)
    strategy = coded_sum(shards=4, symbols=2, transport=transport)
    result = run(strategy, grid)
    np.testing.assert_array_equal(stack(result.arrays), oracle(strategy, grid, recorder, 3))
    assert [len(r.coded.included) for r in strategy.reports.values()] == [NODES] * 3
    asked = [grid.partition_of(m.metadata.dst_node_id) for m in grid.sent if m.metadata.message_type == SUM]
    assert len(asked) == 9
    assert len(set(asked)) > 4


@pytest.mark.slow
def test_relays_without_room_are_lost_relays() -> None:
    """A store for two parcels: what does not fit is not held, and nothing is summed that is not held by all."""
    roomy = coded_sum()
    assert stack(run(roomy, grid_of(), 1).arrays).any()
    strategy = coded_sum(max_store_bytes=2 * PARCEL + 2 * roomy.construction.plan(NODES, 1).shard_bytes)
    assert not stack(run(strategy, grid_of(), 1).arrays).any()
    assert any("does not fit" in reason for reason in strategy.reports[1].coded.refused)


# Dropouts.


def at(kind: str, *partitions: int, fault: str = "silent", round_: int = 1):
    """Return the plan in which these partitions fail at messages of one kind."""

    def plan(delivery: Delivery) -> str | None:
        hit = delivery.message_type == kind and delivery.partition in partitions and delivery.round == round_
        return fault if hit else None

    return plan


FAULTS = [
    *(("train", fault) for fault in ("offline", "raise", "silent")),
    *(("report", fault) for fault in ("offline", "silent", "lost_reply")),
    *((SUM, fault) for fault in ("offline", "silent", "lost_reply", "raise")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "mode", "kind", "fault"),
    [("hub", "share", *fault) for fault in FAULTS]
    + [(t, mode, *fault) for t, mode in (("peers", "share"), ("hub", "mask")) for fault in FAULTS[::3]],
)
def test_two_of_six_clients_may_drop_out_at_any_point(transport: str, mode: str, kind: str, fault: str) -> None:
    """K + T = 4 of 6. Who vanished before sharing is not in the sum, who vanished after is."""
    message = kind.replace("report", "query.coded_put" if transport == "hub" else "query.coded_collect")
    recorder = Recorder()
    grid = grid_of(recorder=recorder, fault=at(message, 1, 4, fault=fault))
    strategy = coded_sum(transport=transport, mode=mode)
    result = run(strategy, grid, 2)
    assert strategy.reports[1].coded.excluded.keys() <= {grid.inner.node_id_of(1), grid.inner.node_id_of(4)}
    gone = [1, 4] if kind == "train" else []
    assert included(strategy, grid, 1) == [p for p in range(NODES) if p not in gone]
    assert included(strategy, grid, 2) == list(range(NODES))
    np.testing.assert_array_equal(stack(result.arrays), oracle(strategy, grid, recorder, 2))
    back = {grid.partition_of(node) for node in strategy.reports[1].coded.excluded}
    assert back == set(gone)


@pytest.mark.slow
@TRANSPORTS
def test_a_lost_reply_costs_the_update_only_where_the_shards_rode_in_it(transport: str) -> None:
    recorder = Recorder()
    grid = grid_of(recorder=recorder, fault=at("train", 2, fault="lost_reply"))
    strategy = coded_sum(transport=transport)
    result = run(strategy, grid, 2)
    shared = transport == "peers"
    assert (2 in included(strategy, grid)) == shared
    assert included(strategy, grid, 2) == list(range(NODES))
    np.testing.assert_array_equal(stack(result.arrays), oracle(strategy, grid, recorder, 2))
    node = grid.inner.node_id_of(2)
    # Acknowledged through its shards: the client did not take the update back.
    meta = grid.inner.context(2).state.config_records["fedcomp.uplink"]
    assert strategy.inner.reception.peers[node].acknowledged == meta["pending"]
    if not shared:
        assert "no reply in time" in strategy.reports[1].coded.excluded[node]


@pytest.mark.slow
@TRANSPORTS
@pytest.mark.parametrize(
    ("kind", "gone"),
    [("train", (0, 1, 2)), ("report", (0, 1, 2)), ("query.coded_sum", (0, 1, 2)), ("train", (0, 1, 2, 3, 4))],
)
def test_with_three_of_six_gone_the_round_is_skipped(transport: str, kind: str, gone: tuple[int, ...]) -> None:
    """The model stays, nobody is acknowledged, and what was not used comes with the next round."""
    message = kind.replace("report", "query.coded_put" if transport == "hub" else "query.coded_collect")
    recorder = Recorder()
    grid = grid_of(recorder=recorder, fault=at(message, *gone))
    strategy = coded_sum(transport=transport)
    if transport == "peers" and gone == (0, 1, 2) and kind == "train":
        # Whoever did not train relays all the same: the server needs no answer of it for that.
        run(strategy, grid, 1)
        assert included(strategy, grid) == [3, 4, 5]
        return
    models = []
    strategy.start(
        grid, model(), num_rounds=2, timeout=9, evaluate_fn=lambda r, arrays: models.append(stack(arrays)) or None
    )
    assert strategy.reports[1].coded.included == []
    assert len(strategy.reports[1].coded.excluded) == NODES
    assert "the round is skipped, the model is unchanged" in strategy.reports[1].coded.notes[-1]
    assert not models[1].any()
    np.testing.assert_array_equal(models[2], oracle(strategy, grid, recorder, 2))
    assert models[2].any()


def test_fewer_clients_than_decode_skip_the_round_without_training_for_nothing() -> None:
    strategy, grid = coded_sum(), grid_of(3)
    result = run(strategy, grid, 1)
    assert not stack(result.arrays).any()
    assert "3 clients take part" in strategy.reports[1].coded.notes[0]
    assert {m.metadata.message_type for m in grid.sent} == {"query.coded_hello"}


def test_sums_of_a_single_contributor_are_not_asked_for() -> None:
    """Two relays decode, but the sum over one client would be its update."""
    grid = grid_of(2, fault=at("train", 1, fault="raise"))
    strategy = coded_sum(symbols=1, threshold=1)
    result = run(strategy, grid, 1)
    assert not stack(result.arrays).any()
    assert "at least 2 are needed" in strategy.reports[1].coded.notes[0]
    assert not any(m.metadata.message_type == SUM for m in grid.sent)


@pytest.mark.slow
def test_d5_a_share_that_is_the_update_itself_is_refused_or_said() -> None:
    """One piece and no random one: every relay could read every update."""
    with pytest.raises(ConfigError, match="makes every share the update itself"):
        coded_sum(symbols=1, threshold=0)
    strategy = coded_sum(symbols=0, threshold=0, loss=0.9, target=0.999999)
    run(strategy, grid_of(4), 1)
    assert any("a share is the update itself" in note for note in strategy.reports[1].coded.notes)
    safe = coded_sum(symbols=1, threshold=1)
    run(safe, grid_of(4), 1)
    assert not any("update itself" in note for note in safe.reports[1].coded.notes)


# Nothing twice, nothing lost.


class Still(Hooked):
    """Acknowledges, and leaves the model where it is, so that a client's change of it is the toy's integers."""

    def aggregate_sum(self, server_round, mean, weight, members, contents=()):
        arrays, metrics = super().aggregate_sum(server_round, mean, weight, members, contents)
        return (None if arrays is None else model()), metrics


def owed(context: Context, strategy: CodedFedAvg, node: int) -> np.ndarray:
    """Return what a client still owes: its memory, with the last frame back in it unless that was consumed."""
    meta = context.state.config_records.get("fedcomp.uplink")
    if meta is None:
        return np.zeros(SIZE)
    state = {k: v.numpy() for k, v in context.state.array_records["fedcomp.uplink.memory"].items()}
    peer = strategy.inner.reception.peers[node]
    if (peer.acknowledged, peer.generation) != (meta["pending"], meta["generation"]):
        prefix = "fedcomp.uplink.reply/"
        stored = {k.removeprefix(prefix): v for k, v in context.state.items() if k.startswith(prefix)}
        frame = take_frame(RecordDict(stored), UPDATE)
        state = strategy.inner.codec.rollback(state, frame, LAYOUT)
    return state["memory"].astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "mode"), [("hub", "share"), ("peers", "share"), ("peers", "mask"), ("broken links", "share")]
)
def test_every_update_arrives_once_under_faults(transport: str, mode: str, monkeypatch) -> None:
    """Sum of what was delivered and what is owed equals the sum of what was made, per client, exactly."""
    if transport == "broken links":
        break_links(monkeypatch)
        transport = "peers"
    faults = {"offline": 0.02, "raise": 0.03, "silent": 0.02, "lost_reply": 0.06, "duplicate": 0.06, "late": 0.03}
    recorder = Recorder()
    grid = grid_of(recorder=recorder, fault=RandomFaults(Key(3, "faults"), faults))
    codec = FixedPoint(RandomK(0.3), clip=1024.0, levels=512)  # memory grows beyond the clip: some values are cut
    strategy = coded_sum(inner=Still(fedavg(fraction_evaluate=0.0), codec), transport=transport, mode=mode, symbols=2)
    strategy.start(grid, model(), num_rounds=ROUNDS, timeout=9)
    delivered = {p: np.zeros(SIZE) for p in range(NODES)}
    for round_, report in strategy.reports.items():
        for node in report.coded.included:
            p = grid.partition_of(node)
            frames = set(recorder.frames[round_, p])
            assert len(frames) == 1
            delivered[p] += codec.decode(frames.pop(), LAYOUT)
    used = [len(report.coded.included) for report in strategy.reports.values()]
    assert 0 < min(n for n in used if n) < NODES
    assert sum(used) > 3 * ROUNDS
    for p in range(NODES):
        node = grid.inner.node_id_of(p)
        context = grid.inner.context(p)
        made = context.state.array_records["toy.sum"]["sum"].numpy()
        total = delivered[p] + owed(context, strategy, node)
        by_tensor = LAYOUT.unflatten(total.astype(np.float32))
        np.testing.assert_array_equal(np.concatenate([v.reshape(-1) for v in by_tensor.values()]), made)
        assert made.any()


# Relays that do not do what they should.


def tampered(partition: int, change) -> ClientApp:
    """Return an app of which one client's sums are changed before they leave."""
    app = client_app([coded(), compression()])

    def client(msg: Message, context: Context) -> Message:
        plan = fields_of(msg.content)
        reply = app(msg, context)
        if msg.metadata.message_type == SUM and context.node_config["partition-id"] == partition:
            (data,) = take_bundle(reply.content, most=1, longest=1 << 20)
            sum_plan = SumPlan.from_config(json_of(plan))
            put_bundle(reply.content, [change(Shard.from_bytes(data, sum_plan), sum_plan).to_bytes(sum_plan)])
        return reply

    return client


def one_missing(shard: Shard, plan: SumPlan) -> Shard:
    """What a relay answers that left one contributor out: some other residues, under the right name."""
    other = plan.field.subtract(shard.body, plan.field.residues(np.arange(shard.body.size) * 7 + 5))
    return replace(shard, body=other)


@pytest.mark.slow
@pytest.mark.parametrize("partition", range(NODES))
def test_a_relay_that_added_another_set_is_found_out_and_left_out(partition: int) -> None:
    recorder = Recorder()
    honest, expected = grid_of(), coded_sum()
    wanted = stack(run(expected, honest, 1).arrays)
    strategy, grid = coded_sum(), grid_of(client=tampered(partition, one_missing), recorder=recorder)
    result = run(strategy, grid, 1)
    np.testing.assert_array_equal(stack(result.arrays), wanted)
    asked = {grid.partition_of(m.metadata.dst_node_id) for m in grid.sent if m.metadata.message_type == SUM}
    if partition in asked:
        assert "a check symbol of the sum is violated" in strategy.reports[1].coded.notes[0]
        assert asked == set(range(NODES))
        assert f"the sum of relay {partition} contradicts the others" in strategy.reports[1].coded.notes[-1]
    else:
        assert strategy.reports[1].coded.notes == []


@pytest.mark.slow
def test_without_a_relay_to_spare_the_round_is_skipped_instead_of_wrong() -> None:
    strategy, grid = coded_sum(symbols=5), grid_of(client=tampered(3, one_missing))
    result = run(strategy, grid, 1)
    assert not stack(result.arrays).any()
    assert strategy.reports[1].coded.included == []
    assert "check symbol" in strategy.reports[1].coded.notes[-1]


# What the server sees.


@pytest.mark.slow
@MODES
def test_the_server_holds_nothing_it_can_read(mode: str) -> None:
    """Through the hub every shard crosses the server: as a box that only its relay opens. No frame, no weight."""
    recorder = Recorder()
    strategy, grid = coded_sum(mode=mode), grid_of(recorder=recorder)
    run(strategy, grid, 1)
    replies = train_replies(grid)
    assert len(replies) == NODES
    seen = 0
    for reply in replies:
        assert set(reply.content) - {"fedcomp.coded", "fedcomp.node", "fedcomp.coded.parcels", MASKED_UPDATE} == set()
        assert (MASKED_UPDATE in reply.content) == (mode == "mask")
        packed = pack_content(reply.content)
        assert not any(frame[40:80] in packed for frames in recorder.frames.values() for frame in frames)
        for data in take_bundle(reply.content, most=NODES, longest=1 << 20):
            parcel = Parcel.from_bytes(data)
            with pytest.raises(SealError):
                PeerIdentity.generate().open(parcel.body, parcel.coordinates)
            assert b"FS" not in parcel.body[:2]
            seen += 1
    assert seen == NODES * (NODES - 1)


@pytest.mark.slow
def test_in_the_clear_the_server_could_decode_everybody() -> None:
    """The reason for seals on the hub: without them all shards of a client pass the server."""
    strategy, grid = coded_sum(seal=False, threshold=0), grid_of(recorder=(recorder := Recorder()))
    run(strategy, grid, 1)
    plan = SumPlan.from_config(json_of(fields_of(next(m for m in grid.sent if m.metadata.message_type == SUM).content)))
    reply = train_replies(grid)[0]
    parcels = [Parcel.from_bytes(d) for d in take_bundle(reply.content, most=NODES, longest=1 << 20)]
    shards = [Shard.from_bytes(p.body, plan) for p in parcels][: plan.needed]
    rows = plan.matrix()[[s.relay for s in shards]]
    pieces = plan.field.matmul(inverse(plan.field, rows), np.stack([s.body for s in shards])).reshape(-1)
    vector = plan.field.lift(pieces[: plan.size]) // int(pieces[plan.size])
    partition = int(reply.content["fedcomp.node"]["partition-id"])
    np.testing.assert_array_equal(vector, CODEC.grid.integers(CODEC.open(recorder.frames[1, partition][0], LAYOUT)))


@pytest.mark.slow
def test_between_peers_the_server_gets_no_shard_at_all() -> None:
    strategy, grid = coded_sum(transport="peers"), grid_of()
    run(strategy, grid, 2)
    for reply in train_replies(grid):
        assert set(reply.content) == {"fedcomp.coded", "fedcomp.node"}
    sent = strategy.reports[2].coded.payload_bytes["peer"]
    plan = strategy.construction.plan(NODES, 2)
    assert sent == NODES * (NODES - 1) * (PARCEL + plan.shard_bytes)
    assert grid.ledger.total("wire", round=2, link="peer") == sent


@pytest.mark.slow
def test_metrics_and_weights_travel_only_when_asked_for() -> None:
    quiet = run(coded_sum(), grid_of(), 1).train_metrics_clientapp[1]
    assert set(quiet) == {"coded.contributors", "coded.weight", "coded.cut"}
    strategy, grid = coded_sum(metrics=True), grid_of()
    told = run(strategy, grid, 1).train_metrics_clientapp[1]
    assert {"partition", "seen"} <= set(told)
    assert all("metrics" in reply.content for reply in train_replies(grid))


@pytest.mark.slow
def test_values_at_the_clip_show_in_the_sum() -> None:
    """The toy's updates reach 1000: with a clip of 100 most of them are cut, and the server is told how many."""
    strategy = coded_sum(FixedPoint(RandomK(1.0), clip=100.0, levels=50))
    cut = run(strategy, grid_of(), 1).train_metrics_clientapp[1]["coded.cut"]
    assert 0.85 < cut < 0.95


# What is refused.


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (fedavg(), {}, "wrap it: Compressed"),
        (Compressed(FedMedian(), CODEC), {}, "FedMedian looks at single updates"),
        (Compressed(fedavg(), TopK(0.1)), {}, "is not linear"),
        (Compressed(fedavg(), QSGD(7)), {}, "is not linear"),
        (Compressed(fedavg(), IdentityCodec()), {}, "sends whole models"),
        (Compressed(fedavg(), RandomK(0.1, shared=False)), {}, "draws a support for every client"),
        (Compressed(fedavg(), RandomK(0.1)), {}, r"Use FixedPoint\(RandomK"),
        (None, {"mode": "mask", "threshold": 0}, "set threshold >= 1"),
        (None, {"min_contributor": 3}, "did you mean 'min_contributors'"),
        (None, {"shards": 3}, "shards=3 are fewer than the 4"),
    ],
)
def test_what_cannot_be_summed_is_refused_with_the_reason(inner, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        coded_sum(inner=inner, **options)


def test_a_sum_that_could_wrap_around_is_refused_before_anybody_trains() -> None:
    grid = grid_of()
    with pytest.raises(ConfigError, match="would wrap around"):
        run(coded_sum(max_weight=10**6), grid, 1)
    assert not any(m.metadata.message_type == "train" for m in grid.sent)


def test_buffers_of_which_there_is_no_sum_are_refused() -> None:
    with pytest.raises(ConfigError, match="'num_batches_tracked'"):
        run(coded_sum(), grid_of(), 1, start=model(counter=True))


@pytest.mark.slow
def test_a_client_beyond_the_largest_weight_is_left_out_with_the_reason() -> None:
    recorder = Recorder()
    strategy, grid = coded_sum(max_weight=55), grid_of(recorder=recorder)
    result = run(strategy, grid, 1)
    assert included(strategy, grid) == [0, 1, 2, 3, 4]
    assert "more than the 55" in strategy.reports[1].coded.excluded[grid.inner.node_id_of(5)]
    assert not any("60" in str(m.error.reason) for m in grid.received if m.has_error())  # the weight stays with it
    np.testing.assert_array_equal(stack(result.arrays), oracle(strategy, grid, recorder, 1))


@pytest.mark.slow
def test_clients_without_the_mods_are_left_out_with_the_reason() -> None:
    usual = client_app([coded(), compression()])
    odd = {1: client_app([compression()]), 2: client_app([coded()])}
    grid = grid_of(client=lambda msg, ctx: odd.get(int(ctx.node_config["partition-id"]), usual)(msg, ctx))
    strategy = coded_sum()
    run(strategy, grid, 1)
    excluded = {grid.partition_of(n): reason for n, reason in strategy.reports[1].coded.excluded.items()}
    assert "wrap it in fedcomp.client()" in excluded[1]
    assert "holds no frame that could be added" in excluded[2]
    assert included(strategy, grid) == [0, 3, 4, 5]


@pytest.mark.slow
def test_a_run_goes_on_from_its_saved_state() -> None:
    recorder = Recorder()
    strategy, grid = coded_sum(), grid_of(recorder=recorder)
    first = run(strategy, grid, 2)
    again = coded_sum()
    again.load_state_dict(strategy.state_dict())
    result = fit(again, grid, first.arrays, 4, start_round=3, timeout=9)
    np.testing.assert_array_equal(stack(result.arrays), oracle(again, grid, recorder, 4))
    assert again.reports[3].rolled_back == []
    assert again.reports[3].fresh == []
