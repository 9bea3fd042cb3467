"""What a server may try against coded sums, and what clients may: one answer a round, one round an update, bounds."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from coded_sum_runs import (
    CODEC,
    MODES,
    NODES,
    SIZE,
    TRANSPORTS,
    Tap,
    after_restart,
    coded_sum,
    grid_of,
    included,
    json_of,
    run,
    sender,
    train_replies,
)
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from message_examples import fields_of
from toy import client_app, fedavg, model, stack, with_halves

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import FixedPoint, RandomK
from fedcomp.coding.sumcode import SumPlan, contribution
from fedcomp.coding.sumshards import Shard, make_tag, set_digest
from fedcomp.coding.transport import Parcel
from fedcomp.errors import ConfigError
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.coded import CODED, HELLO, PUT, SUM, Query, put_bundle, take_bundle
from fedcomp.flower.records import to_record
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed


def ask(grid: Tap, asked: Message, sources: list[int], **changes) -> Message:
    """Ask the relay of ``asked`` for the sum over other sources."""
    plan = SumPlan.from_config(json_of(fields_of(asked.content)))
    by_partition = {
        grid.partition_of(sender(r, grid)): fields_of(r.content)["tag"]
        for r in train_replies(grid)
        if fields_of(r.content)["round"] == fields_of(asked.content)["round"]
    }
    bits = np.zeros(NODES, bool)
    bits[sources] = True
    record = dict(asked.content.config_records["fedcomp.coded"])
    record |= {
        "chosen": np.packbits(bits).tobytes(),
        "set": set_digest(plan, record["round"], {s: by_partition[s] for s in sources}),
        **changes,
    }
    return put(grid, asked, SUM, record)


def put(grid: Tap, asked: Message, kind: str, record: dict, content: RecordDict | None = None) -> Message:
    content = RecordDict() if content is None else content
    content[CODED] = ConfigRecord({k: v for k, v in record.items() if v not in ("", b"", [])})
    (reply,) = grid.send_and_receive([Message(content, asked.metadata.dst_node_id, kind)], timeout=9)
    return reply


def first(grid: Tap, kind: str) -> Message:
    return next(m for m in grid.sent if m.metadata.message_type == kind)


@pytest.mark.slow
@TRANSPORTS
def test_a_relay_answers_once_a_round(transport: str) -> None:
    """The server asks again for a set without one contributor: the difference of the two sums would be its shard."""
    grid = grid_of()
    strategy = coded_sum(transport=transport)  # its spool lives as long as it
    run(strategy, grid, 1)
    asked = first(grid, SUM)
    assert not ask(grid, asked, list(range(NODES))).has_error()  # the same question gets the same answer
    assert "another set of contributors" in ask(grid, asked, list(range(NODES - 1))).error.reason
    grid.inner.wipe(grid.partition_of(asked.metadata.dst_node_id))
    assert "another set" not in ask(grid, asked, list(range(NODES))).error.reason  # without its key it can open nothing


@pytest.mark.slow
@TRANSPORTS
def test_naming_another_run_does_not_make_a_relay_forget_its_answer(transport: str) -> None:
    """A message of another run empties what a node keeps of this one; its shards lie in the spool, or are put back."""
    grid = grid_of()
    strategy = coded_sum(transport=transport)  # its spool lives as long as it
    run(strategy, grid, 1)
    asked = first(grid, SUM)
    record = dict(asked.content.config_records["fedcomp.coded"])
    put(grid, asked, HELLO, {**record, "run": b"another."})
    if transport == "hub":
        again = next(
            m
            for m in grid.sent
            if m.metadata.message_type == PUT and m.metadata.dst_node_id == asked.metadata.dst_node_id
        )
        own = sorted(p for p in range(NODES) if p != grid.partition_of(asked.metadata.dst_node_id))
        bundle = RecordDict({"fedcomp.coded.parcels": again.content["fedcomp.coded.parcels"]})
        put(grid, asked, PUT, dict(again.content.config_records["fedcomp.coded"]), bundle)
    else:
        own = list(range(NODES - 1))
    assert "another set of contributors" in ask(grid, asked, own).error.reason


@pytest.mark.slow
def test_a_round_before_the_last_answer_is_over_in_every_run() -> None:
    """Parcels of two rounds are kept: of the older one nothing is added any more, whatever else was said meanwhile."""
    grid, strategy = grid_of(), coded_sum(transport="peers")
    run(strategy, grid, 2)
    asked = {(fields_of(m.content)["round"], m.metadata.dst_node_id): m for m in grid.sent if is_sum(m)}
    node = next(node for round_, node in asked if round_ == 1 and (2, node) in asked)
    before = asked[1, node]
    said = fields_of(before.content) | {"run": b"another."}
    hello = {entry.name: said[entry.name] for entry in Query.entries() if entry.name in said}
    assert not put(grid, before, HELLO, hello).has_error()
    assert "round 1 is over" in ask(grid, before, list(range(NODES))).error.reason


@pytest.mark.slow
def test_a_shard_of_a_contributor_that_there_is_not_is_refused() -> None:
    """Who knows the plan can make one that is whole; the relay's answer has a bit for each contributor and no more."""
    grid = grid_of()
    run(coded_sum(seal=False), grid, 1)
    asked = first(grid, PUT)
    plan = SumPlan.from_config(json_of(fields_of(asked.content)))
    (data, *_) = take_bundle(asked.content, most=NODES, longest=1 << 20)
    parcel, source = Parcel.from_bytes(data), NODES + 1
    forged = replace(Shard.from_bytes(parcel.body, plan), source=source).to_bytes(plan)
    content = RecordDict()
    put_bundle(content, [replace(parcel, source=source, body=forged).to_bytes()])
    reply = put(grid, asked, PUT, dict(asked.content.config_records["fedcomp.coded"]), content)
    assert fields_of(reply.content)["refused"] == [f"source {source}: the shard is of contributor {source} of {NODES}"]


def is_sum(message: Message) -> bool:
    return message.metadata.message_type == SUM


@pytest.mark.slow
def test_an_update_is_shared_in_one_round_only() -> None:
    """The server sends the message of round 1 again as one of round 2: with another set the difference would be an
    update. Within its round a repeated message is answered, as networks repeat them."""
    grid = grid_of()
    run(coded_sum(), grid, 1)
    asked = first(grid, "train")
    record = dict(asked.content.config_records["fedcomp.coded"])
    content = RecordDict({k: v for k, v in asked.content.items() if k != "fedcomp.coded"})
    assert "tag" in fields_of(put(grid, asked, "train", record, content).content)
    for later in ({"round": 2}, {"run": b"another."}):
        content = RecordDict({k: v for k, v in asked.content.items() if k != "fedcomp.coded"})
        assert "shared in another round" in put(grid, asked, "train", {**record, **later}, content).error.reason


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [True, False])
def test_an_update_is_shared_in_one_round_only_under_whichever_number_it_is_asked_for(feedback: bool) -> None:
    """A server that says it was restarted gets the update of before again: in that round, and in no other.

    Without a memory the client trains again, which may give the same update.
    """
    grid = grid_of()
    run(coded_sum(inner=Compressed(fedavg(fraction_evaluate=0.0), CODEC, feedback=feedback)), grid, 1)
    asked = first(grid, "train")
    record = dict(asked.content.config_records[CODED])
    for restarts in (1, 2):
        assert "tag" in fields_of(put(grid, asked, "train", record, after_restart(asked, restarts)).content)
    for restarts, later in ((3, {"round": 2}), (4, {"run": b"another."}), (5, {"round": 2, "run": b"another."})):
        reply = put(grid, asked, "train", {**record, **later}, after_restart(asked, restarts))
        assert reply.has_error(), "the update of round 1 is in a second sum"
        assert "of round 1 was shared in another round" in reply.error.reason
    # Nor under its last number, with another round named beside it.
    content = after_restart(asked, 2, round=2)
    assert "was shared in another round" in put(grid, asked, "train", {**record, "round": 2}, content).error.reason


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1, 2, 6, 8])
def test_who_fails_after_sharing_is_not_in_the_sum(code: int) -> None:
    """A process that crashes, or an engine that gives up on it, may have lost the memory of what it shared."""
    app = client_app([coded(), compression()])
    failed: list[int] = []

    def client(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type != "train" or context.node_config["partition-id"] != 2 or failed:
            return app(msg, context)
        failed.append(code)
        app(msg, copy.deepcopy(context))  # its shards are with its peers, its state is lost
        return Message(Error(code, "gone"), reply_to=msg)

    grid = grid_of(client=client)
    strategy = coded_sum(transport="peers")
    run(strategy, grid, 2)
    assert failed
    assert included(strategy, grid, 1) == [0, 1, 3, 4, 5]
    assert included(strategy, grid, 2) == list(range(NODES))


@pytest.mark.slow
def test_a_client_that_shares_what_no_update_holds_spoils_the_round_and_not_the_model(monkeypatch) -> None:
    """Residues of half the field, with true check symbols: the mean would be thousands of clips."""
    seen: list[int] = []

    def lying(plan: SumPlan, integers: np.ndarray, weight: int, extras) -> np.ndarray:
        vector = contribution(plan, integers, weight, extras)
        seen.append(weight)
        if len(seen) == 3:
            data = vector[: plan.length - plan.checks]
            data[:10] = plan.field.half
            vector[plan.length - plan.checks :] = plan.field.dot(plan.challenge(), data)
        return vector

    monkeypatch.setattr("fedcomp.clients.coded.sums.contribution", lying)
    strategy, grid = coded_sum(), grid_of()
    result = run(strategy, grid, 1)
    assert not stack(result.arrays).any()
    assert "did not keep to them" in strategy.reports[1].coded.notes[-1]


@pytest.mark.slow
def test_a_tag_of_a_memory_from_the_future_is_refused(monkeypatch) -> None:
    """Acknowledged, its number would make the client roll back an update that was used."""
    made: list[int] = []

    def lying(sequence: int, generation: int) -> bytes:
        made.append(sequence)
        return make_tag(sequence, 2**64 - 1 if len(made) == 3 else generation)

    monkeypatch.setattr("fedcomp.clients.coded.sums.make_tag", lying)
    strategy, grid = coded_sum(), grid_of()
    run(strategy, grid, 1)
    assert len(included(strategy, grid)) == NODES - 1
    assert any("a memory that began with message" in reason for reason in strategy.reports[1].coded.excluded.values())


@pytest.mark.slow
def test_an_automatic_code_that_cannot_reach_the_target_says_so() -> None:
    """Four clients, T = 1: two of four relays decode even with one piece, which is less safe than 0.999 where 0.3 are
    lost. With ten clients there is room for more pieces."""
    few, many = coded_sum(symbols=0, loss=0.3), coded_sum(symbols=0)
    run(few, grid_of(4), 1)
    assert few.reports[1].coded.symbols == 1
    assert "4 relays decode with probability 0.916" in few.reports[1].coded.notes[0]
    run(many, grid_of(10), 1)
    assert many.reports[1].coded.symbols == 4
    assert many.reports[1].coded.notes == []


WIDE = FixedPoint(RandomK(1.0), clip=2.0**12, levels=2**11)


def trained(change):
    """Return an app whose clients change their arrays by ``change(partition, arrays)``, and weigh 1."""
    app = with_halves([coded(), compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = {name: array.numpy().copy() for name, array in msg.content["arrays"].items()}
        change(int(context.node_config["partition-id"]), arrays)
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": to_record(arrays), "metrics": metrics}), reply_to=msg)

    return app


@pytest.mark.slow
def test_a_sum_shows_what_one_client_alone_has_changed_and_that_client_is_warned(caplog) -> None:
    """As rows of an embedding whose tokens nobody else has; with 6 contributors as with 2."""

    def alone(own: int, arrays: dict) -> None:
        arrays["weight"].reshape(-1)[own] += 100.0 * (own + 1)

    grid, strategy = grid_of(client=trained(alone)), coded_sum(WIDE, weighted=False)
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        result = run(strategy, grid, 2)
    shown = result.arrays["weight"].numpy().reshape(-1)[:NODES] * NODES / 2
    np.testing.assert_allclose(shown, 100.0 * np.arange(1, NODES + 1), atol=WIDE.step)
    warned = [m for m in caplog.messages if "what no other client changes, the sum shows as it is" in m]
    assert len(warned) == NODES, "each once"
    assert all(f"changes 1 of {SIZE} coordinates" in m for m in warned)


def lone(own: int, arrays: dict) -> None:
    """Partition 0 changes one coordinate, the others all of them."""
    for array in arrays.values():
        if own:
            array += 100.0 * (own + 1)
    if not own:
        arrays["weight"].reshape(-1)[0] += 100.0


@pytest.mark.slow
@MODES
def test_with_a_threshold_of_contributors_an_update_of_ones_own_support_is_not_shared(mode) -> None:
    grid, strategy = grid_of(client=trained(lone)), coded_sum(WIDE, weighted=False, min_contributors=4, mode=mode)
    run(strategy, grid, 1)
    assert included(strategy, grid) == [1, 2, 3, 4, 5]
    ((node, reason),) = strategy.reports[1].coded.excluded.items()
    assert grid.partition_of(node) == 0
    assert f"this update changes 1 of {SIZE} coordinates" in reason
    assert "min_contributors=4 are asked for" in reason
    assert "use a finer grid (a smaller clip, more levels), or add noise (DistributedDp)" in reason
    assert [grid.partition_of(sender(m, grid)) for m in grid.received if m.has_error()] == [0]


@pytest.mark.slow
@MODES
def test_a_sum_of_fewer_contributors_than_asked_is_not_released(mode, caplog) -> None:
    """Three of six share: fewer than four, although as many relays as decode are there. No relay is asked for a sum."""

    def few(own: int, arrays: dict) -> None:
        if own < 3:
            raise ValueError("away")
        lone(own, arrays)

    options = {"symbols": 2, "weighted": False, "mode": mode}
    grid, strategy = grid_of(client=trained(few)), coded_sum(WIDE, min_contributors=4, **options)
    start = model()
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        result = run(strategy, grid, 1, start)
    for name, array in start.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy())
    said = "3 contributors; at least 4 are needed (min_contributors)"
    assert any(said in note for note in strategy.reports[1].coded.notes)
    assert any(said in message for message in caplog.messages)
    assert not [m for m in grid.sent if m.metadata.message_type == SUM]
    allowed = coded_sum(WIDE, min_contributors=3, **options)
    run(allowed, grid := grid_of(client=trained(few)), 1)
    assert included(allowed, grid) == [3, 4, 5], "three are enough where three are asked for"


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_inside_a_sum_shares_its_support_or_is_refused(name) -> None:
    """Whatever strategy stands inside: a codec of one grid and one support, or no sum, before any node is asked."""
    system = SYSTEMS[name]
    try:
        inner = system.build(system.resolve({}), 0)
    except ConfigError:
        pytest.skip("cannot be built without a task of its own")
    if isinstance(inner, CodedFedAvg):
        inner = inner.inner
    try:
        outer = CodedFedAvg(inner, construction="sumcode", symbols=3, threshold=1, min_contributors=4, weighted=False)
    except ConfigError:
        return
    assert outer.construction.codec.codec.shared is True
    assert outer.construction.codec.codec.linear
