"""The client half of coded rounds: drop-in, what it keeps for how long, messages that come twice or too late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded_runs import bits, coded_app, run
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from message_examples import all_damages, fields_of
from toy import client_app, fedavg, model, with_halves

from fedcomp.clients.app import app as generic_app
from fedcomp.clients.coded.mod import KEEPS_ROUNDS, MAX_STORE_BYTES, coded
from fedcomp.clients.compressed import compression
from fedcomp.clients.programs import programs
from fedcomp.codecs import QSGD, TopK
from fedcomp.coding.transport import HEADER_BYTES, MemoryStore, Parcel, SpoolRoot
from fedcomp.errors import ConfigError
from fedcomp.flower._private import acting_as
from fedcomp.flower.coded import (
    CODED,
    COLLECT,
    HELLO,
    MORE,
    NO_HANDLER,
    PROTOCOL,
    PUT,
    SHARD,
    SUM,
    THROUGH_SERVER,
    Collect,
    CollectFresh,
    Indexed,
    Query,
    RelayTraining,
    SumQuestion,
    SumReport,
    SumTraining,
    put_bundle,
    take_bundle,
)
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

RUN = b"run 0001"


def context(**node_config: Any) -> Context:
    return Context(1, 2, {"partition-id": 1, "num-partitions": 3, **node_config}, RecordDict(), {})


def message(kind: str, fields: dict[str, Any], content: RecordDict | None = None) -> Message:
    content = RecordDict() if content is None else content
    given = {"construction": "relay", "run": RUN, "transport": "hub", "max-store": MAX_STORE_BYTES, **fields}
    content[CODED] = ConfigRecord({"protocol": PROTOCOL, **{k: v for k, v in given.items() if v not in ("", b"", [])}})
    return Message(content, 2, kind)


def train(round_: int, **fields: Any) -> Message:
    code = {"code": "mds", "symbols": 2, "shards": 3, "private": 0, "seed": 0, "max-payload": 1 << 20}
    plan = {"index": 1, **code, "source": 1, "relays": [0, 1, 2]}
    content = RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": round_})})
    return message("train", {**plan, "round": round_, **fields}, content)


def put(round_: int, *parcels: Parcel, index: int = 1, **fields: Any) -> Message:
    content = RecordDict()
    put_bundle(content, [parcel.to_bytes() for parcel in parcels])
    return message(PUT, {"round": round_, "index": index, **fields}, content)


def shard(round_: int, source: int, body: bytes = b"shard", **fields: Any) -> Parcel:
    return Parcel(
        **{"run": RUN, "round": round_, "kind": SHARD, "source": source, "destination": 1, "body": body, **fields}
    )


def collect(round_: int, *sources: int, **fields: Any) -> Message:
    return message(COLLECT, {"round": round_, "seal": False, "index": 1, "sources": list(sources), **fields})


@pytest.fixture(autouse=True)
def identity():
    with acting_as(1, 1):
        yield


def say(app: ClientApp, ctx: Context, msg: Message) -> RecordDict:
    """Send a message and return the answer's content."""
    reply = app(msg, ctx)
    assert not reply.has_error(), reply.error.reason
    return reply.content


def refused(app: ClientApp, ctx: Context, msg: Message) -> str:
    """Send a message that has to be refused; return the reason. The state stays what it was."""
    before = dict(ctx.state.items())
    reply = app(msg, ctx)
    assert reply.has_error()
    assert dict(ctx.state.items()) == before
    return str(reply.error.reason)


def packets(content: RecordDict) -> list[bytes]:
    return take_bundle(content, most=100, longest=1 << 20)


def store(ctx: Context) -> MemoryStore:
    record = ctx.state.array_records.get("fedcomp.coded.store")
    return MemoryStore() if record is None else MemoryStore.from_arrays({k: a.numpy() for k, a in record.items()})


@pytest.mark.slow
def test_a_plain_server_sees_no_difference() -> None:
    """Messages, results and counted bytes of an ordinary run are the same with the mod and without it."""
    bare = client_app([compression()])
    for strategy in (lambda: fedavg(), lambda: Compressed(fedavg(), TopK(density=0.1))):
        with_mod, grid = run(strategy(), 4, rounds=2)
        without, other = run(strategy(), 4, rounds=2, app=bare)
        assert bits(with_mod) == bits(without)
        assert grid.ledger == other.ledger


def test_the_generic_app_has_the_mod_first_and_the_handlers() -> None:
    ctx = context()
    found = fields_of(say(generic_app, ctx, message(HELLO, {"round": 1})))
    assert found["partition"] == 1
    assert len(found["public"]) == 32
    again = fields_of(say(generic_app, ctx, message(HELLO, {"round": 2})))
    assert again["public"] == found["public"], "the key is the node's, not the message's"
    other = fields_of(say(generic_app, context(), message(HELLO, {"round": 1})))
    assert other["public"] != found["public"]


def test_an_app_without_the_half_answers_as_the_server_knows_it() -> None:
    app = client_app([compression()])
    for kind in (HELLO, PUT, COLLECT, SUM, MORE):
        with pytest.raises(ValueError, match=NO_HANDLER):
            app(message(kind, {"round": 1}), context())
    with pytest.raises(ConfigError, match="max_store_bytes"):
        coded(max_store_bytes=-1)


def test_an_app_error_ends_as_it_would_without_the_mod() -> None:
    app = with_halves([coded()])

    @app.train()
    def broken(msg: Message, ctx: Context) -> Message:
        raise ConfigError("the app's own trouble")

    ctx = context()
    with pytest.raises(ConfigError, match="own trouble"):
        app(train(1), ctx)
    assert not dict(ctx.state.items())


def test_the_app_sees_no_plan() -> None:
    app, seen = with_halves([coded()]), []

    @app.train()
    def look(msg: Message, ctx: Context) -> Message:
        seen.append(sorted(msg.content))
        return Message(RecordDict({"arrays": msg.content["arrays"]}), reply_to=msg)

    say(app, context(), train(1))
    assert seen == [["arrays", "config"]]


def test_a_message_delivered_twice_is_answered_with_the_same_shards() -> None:
    """Training again would give other bytes, as this app's does; shards of two payloads do not fit together."""
    app, calls = with_halves([coded()]), []

    @app.train()
    def noisy(msg: Message, ctx: Context) -> Message:
        calls.append(1)
        return Message(RecordDict({"w": ArrayRecord({"x": Array(np.full(64, len(calls), np.float32))})}), reply_to=msg)

    for private in (0, 1):
        ctx, before = context(), len(calls)
        plan = {"private": private, "symbols": 2 - private}
        first = packets(say(app, ctx, train(1, **plan)))
        assert packets(say(app, ctx, train(1, **plan))) == first
        assert len(calls) == before + 1
        held = store(ctx).list(RUN, 1)
        assert [parcel.destination for parcel in held] == [1], "its own shard, once"
        assert packets(say(app, ctx, train(2, **plan))) != first
        assert len(calls) == before + 2


def test_a_message_that_comes_after_a_newer_one_is_refused() -> None:
    app, ctx = coded_app(), context()
    say(app, ctx, train(5))
    for late in (train(4), put(4, shard(4, 0)), collect(4, 0)):
        assert "round 5; a message of round 4 came too late" in refused(app, ctx, late)
    assert refused(app, ctx, train(4)).startswith("fedcomp.stale")
    say(app, ctx, put(6, shard(6, 0)))
    assert "takes part in round 6" in refused(app, ctx, train(5))


def test_parcels_are_dropped_when_the_round_advances_by_two() -> None:
    app, ctx = coded_app(), context()
    for number in (3, 4, 5):
        say(app, ctx, put(number, shard(number, 0), shard(number, 2)))
        kept = sorted({parcel.round for n in range(9) for parcel in store(ctx).list(RUN, n)})
        assert kept == list(range(max(3, number - KEEPS_ROUNDS + 1), number + 1))
    say(app, ctx, put(9, shard(9, 2)))
    assert store(ctx).held == len(shard(9, 2))
    # Another run on the same node begins with nothing.
    say(app, ctx, put(1, shard(1, 0, run=b"run 0002"), run=b"run 0002"))
    assert store(ctx).held == len(shard(1, 0))


def test_what_is_kept_never_exceeds_the_cap() -> None:
    """Neither the client's own nor the server's, of which the smaller counts; what does not fit is told."""
    room = 3 * (HEADER_BYTES + 100)
    for app, fields in ((coded_app(max_store_bytes=room), {}), (coded_app(), {"max-store": room})):
        ctx = context()
        answer = say(app, ctx, put(1, *(shard(1, source, bytes(100)) for source in range(5)), **fields))
        header = fields_of(answer)
        assert header["kept"] == 3
        assert len(header["refused"]) == 2
        assert all("does not fit" in reason for reason in header["refused"])
        assert store(ctx).held == room
        say(app, ctx, put(1, shard(1, 0, bytes(100)), **fields))
        assert store(ctx).held == room, "the same parcel again needs no room"
    tight = coded_app(max_store_bytes=room)
    ctx = context()
    say(coded_app(), ctx, put(1, *(shard(1, source, bytes(100)) for source in range(5))))
    say(tight, ctx, put(1, shard(1, 9, bytes(100))))
    assert store(ctx).held == HEADER_BYTES + 100, "a limit that was lowered holds from the next message on"


def test_only_what_is_meant_for_this_relay_is_kept() -> None:
    app, ctx = coded_app(), context()
    answer = say(
        app,
        ctx,
        put(3, shard(3, 0), shard(2, 0), shard(3, 0, destination=2), shard(3, 0, run=b"run 0009")),
    )
    header = fields_of(answer)
    assert (header["kept"], len(header["refused"])) == (1, 3)
    assert [p.round for p in store(ctx).list(RUN, 3)] == [3]


def test_a_relay_hands_out_what_it_is_asked_for_and_keeps_it() -> None:
    from fedcomp.coding.relay import RelayPlan, packet_hash

    app, ctx = coded_app(), context()
    of = {source: RelayPlan("mds", 2, 3, 1).packets(source, b"of %d" % source)[0] for source in (0, 2, 3)}
    say(app, ctx, put(1, *(shard(1, source, body) for source, body in of.items()), shard(1, 7, b"no packet")))
    state = dict(ctx.state.items())
    assert packets(say(app, ctx, collect(1, 0, 3, 7))) == [of[0], of[3]]
    assert packets(say(app, ctx, collect(1, 0, 3, 7))) == [of[0], of[3]]
    # What their sources announced: only that packet leaves the relay, and all of a source that announced nothing.
    assert packets(say(app, ctx, collect(1, 0, 2, 3, hashes=packet_hash(of[0]) + bytes(8) + b"another!"))) == [
        of[0],
        of[2],
    ]
    assert packets(say(app, ctx, collect(1))) == []
    assert dict(ctx.state.items()) == state
    header = fields_of(say(app, ctx, collect(1, 0, seal=True)))
    assert "sealed parcel" in header["refused"][0], "in the clear, although the plan says sealed"


def test_fresh_shards_are_other_ones_of_the_same_payload() -> None:
    from fedcomp.coding.packet import PacketLimits
    from fedcomp.coding.relay import Collector, Commitment, Packet, RelayPlan

    app, ctx = coded_app(), context()
    shared = say(app, ctx, train(1))
    header = fields_of(shared)
    numbers = {"code": "mds", "symbols": 2, "shards": 3, "private": 0, "seed": 0, "max-payload": 1 << 20}
    fresh = packets(say(app, ctx, collect(1, fresh=2, source=1, **numbers)))
    collector = Collector(RelayPlan("mds", 2, 3, 1), [1])
    collector.expect(1, Commitment(header["payload"], header["digest"]))
    for data in fresh:
        collector.add(-1, data)
    collector.payload(1)
    made = {Packet.from_bytes(Parcel.from_bytes(data).body, PacketLimits()).row().tobytes() for data in packets(shared)}
    assert not made & {Packet.from_bytes(data, PacketLimits()).row().tobytes() for data in fresh}
    # No payload of this round, no fresh shards.
    assert packets(say(app, ctx, collect(2, fresh=2, source=1, **numbers))) == []


def test_messages_that_cannot_be_understood_are_refused_with_the_reason() -> None:
    app, ctx = coded_app(), context()
    for msg, reason in (
        (
            message("train.default", {"round": 1, "construction": "unheard of"}),
            "this client knows noisysum, relay",
        ),
        (message("evaluate", {"round": 1}), "no messages of type 'evaluate'"),
    ):
        assert reason in refused(app, ctx, msg)
    unset = context(**{"peer-address": "tcp://127.0.0.1:9"})
    assert "needs both" in refused(app, unset, message(HELLO, {"round": 1, "transport": "peers"}))


@pytest.mark.parametrize("spool", ["", "/etc"])
def test_a_node_that_nobody_reaches_says_so_and_writes_to_no_folder_a_server_names(spool: str) -> None:
    found = fields_of(say(coded_app(), context(), message(HELLO, {"round": 1, "transport": "peers", "spool": spool})))
    assert found["address"] == THROUGH_SERVER


QUERY = {"run": RUN, "transport": "hub", "max_store": 1 << 20, "round": 1}
CODE = {"code": "mds", "symbols": 2, "shards": 3, "private": 0, "seed": 0, "max_payload": 1 << 20}
RELAYS = {"source": 1, "relays": (0, 1, 2)}
RELAY, SUMS, NOISY = ({"construction": name, **QUERY} for name in ("relay", "sumcode", "noisysum"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HELLO, Query(**RELAY)),
        ("train", RelayTraining(**RELAY, **CODE, **RELAYS, index=1)),
        (PUT, Indexed(**RELAY, index=1)),
        (COLLECT, Collect(**RELAY, seal=False, index=1, sources=(0,))),
        (COLLECT, CollectFresh(**RELAY, **CODE, seal=False, index=1, source=1, fresh=2)),
        ("train", SumTraining(**SUMS, index=1, plan={"a": 1}, seal=False, relays=(0, 1), metrics=False)),
        ("train", SumTraining(**NOISY, index=1, plan={"a": 1}, seal=False, relays=(0, 1), metrics=False)),
        (COLLECT, SumReport(**SUMS, plan={"a": 1}, seal=False, row=0)),
        (SUM, SumQuestion(**SUMS, plan={"a": 1}, seal=False, chosen=b"x", set=bytes(24), row=0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_damaged_plan_is_refused_before_the_app_trains(kind: str, said: Query) -> None:
    app, ctx = coded_app(), context()
    for what, content in all_damages(said):
        # Without a record of this version it is an ordinary message.
        if not any(word in what for word in ("version", "protocol", "record")):
            content["arrays"], content["config"] = model(), ConfigRecord({"server-round": 1})
            assert refused(app, ctx, Message(content, 2, kind)), what


def test_another_version_of_the_protocol_is_no_plan_at_all() -> None:
    app, ctx = coded_app(), context()
    msg = train(1)
    msg.content[CODED]["protocol"] = 2
    reply = app(msg, ctx)
    assert CODED not in reply.content
    assert "arrays" in reply.content


def test_parcels_between_peers_lie_in_the_nodes_folder_and_not_in_its_state(tmp_path) -> None:
    root = SpoolRoot.create(tmp_path / "links")
    app, ctx = coded_app(), context()
    addresses = [root.address(p) for p in range(3)]
    link = {"transport": "peers", "spool": str(root.root), "addresses": addresses}
    answer = say(app, ctx, train(1, **link))
    header = fields_of(answer)
    assert packets(answer) == []
    found = {p: root.spool(p).list(RUN, 1) for p in range(3)}
    assert [[parcel.source for parcel in found[p]] for p in range(3)] == [[1], [1], [1]]
    assert header["sent"] == [len(found[0][0]), 0, len(found[2][0])]
    assert "fedcomp.coded.store" not in ctx.state
    (packet,) = packets(say(app, ctx, collect(1, 1, transport="peers", spool=str(root.root))))
    assert packet == found[1][0].body
    say(app, ctx, train(3, **link))
    assert root.spool(1).list(RUN, 1) == [], "two rounds on they are dropped there, too"


def test_a_dead_peer_is_a_counted_loss_and_no_error(tmp_path) -> None:
    root = SpoolRoot.create(tmp_path / "links")
    app, ctx = coded_app(), context()
    addresses = ["tcp://127.0.0.1:9", root.address(1), ""]
    for own in (root.address(1),):
        addresses[1] = own
        header = fields_of(say(app, ctx, train(1, transport="peers", spool=str(root.root), addresses=["", own, ""])))
        assert header["sent"] == [0, 0, 0]
    full = SpoolRoot.create(tmp_path / "full", max_store_bytes=HEADER_BYTES)
    link = {"transport": "peers", "spool": str(full.root), "addresses": [full.address(p) for p in range(3)]}
    content = say(coded_app(max_store_bytes=HEADER_BYTES), context(), train(1, **link))
    header = fields_of(content)
    assert [reason[:9] for reason in header["failed"]] == ["own shard"]
    assert (header["missed"], len(header["causes"])) == ([0, 2], 2)
    assert header["sent"] == [0, 0, 0]
    # Not sealed: the server could read them.
    assert packets(content) == []


@pytest.mark.slow
def test_a_fresh_process_for_every_message_gives_the_same_run() -> None:
    """Nothing is kept outside of the state: a new app object per message gives the same bits and the same bytes."""

    def fresh(msg: Message, ctx: Context) -> Message:
        return client_app([coded(), programs()])(msg, ctx)

    def strategy() -> CodedFedAvg:
        return CodedFedAvg(Compressed(fedavg(), QSGD(levels=4)), symbols=2)

    one, grid = run(strategy(), 4, rounds=3)
    other, second = run(strategy(), 4, rounds=3, app=fresh)
    assert bits(one) == bits(other)
    assert grid.ledger == second.ledger


@pytest.mark.slow
def test_two_servers_in_turn_do_not_mix_what_their_clients_keep() -> None:
    with InProcessGrid(coded_app(), 4, seed=3) as inner:
        grid = MeteredGrid(inner, TrafficLedger())
        for _ in range(2):
            strategy = CodedFedAvg(Compressed(fedavg(), QSGD(levels=4)), symbols=2)
            strategy.start(grid, model(), num_rounds=2, timeout=9)
            assert [len(strategy.reports[r].coded.included) for r in (1, 2)] == [4, 4]
            assert strategy.reports[1].coded.refused == []
