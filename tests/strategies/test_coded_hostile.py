"""Relays and contributors that lie: what they send is left out with a reason, never raised, never part of a sum."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, coded_app, either, run
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from toy import client_app, fedavg, model

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.coding.packet import Mode, Packet, PacketLimits
from fedcomp.coding.relay import RelayPlan
from fedcomp.coding.transport import Parcel, SpoolTransport
from fedcomp.errors import NoUsableReply
from fedcomp.flower.coded import BUNDLE, CODED, SHARD, pack_content, put_bundle, take_bundle
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

Evil = Callable[[Message, RecordDict, Context], RecordDict | None]
NODES = 6


def relay(**options) -> CodedFedAvg:
    inner = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1))
    return CodedFedAvg(inner, **{"code": "mds", "symbols": 3, "seal": False, "collect_timeout": 5.0, **options})


def attack(evil: Evil, kind: str, *, culprit: int = 1, rounds: int = 1, fault=None, app_options=None, **options):
    """Run with one client whose answers to messages of ``kind`` are changed by ``evil``; return strategy and bits."""
    app = coded_app(**(app_options or {}))

    def dishonest(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == culprit and msg.metadata.message_type == kind:
            changed = evil(msg, reply.content, context)
            if changed is not None:
                reply.content = changed
        return reply

    strategy = relay(**options)
    result, _ = run(strategy, NODES, rounds=rounds, app=dishonest, fault=fault)
    return strategy, bits(result)


def uncoded(*lost: int) -> bytes:
    inner = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1))
    return bits(run(inner, NODES, fault=before_sharing(lost))[0])


def training_told(trained: list[int]):
    """Return the toy app; ``trained`` gets the partition each time the app itself is called to train."""

    def telling(msg: Message, context: Context, call_next) -> Message:
        if msg.metadata.message_type == "train":
            trained.append(int(context.node_config["partition-id"]))
        return call_next(msg, context)

    return client_app([coded(), telling, compression()])


def bundle(content: RecordDict, items: list[bytes]) -> None:
    """Replace the bundle of ``content``."""
    if BUNDLE in content:
        del content[BUNDLE]
    put_bundle(content, items)


def parcels(content: RecordDict) -> list[Parcel]:
    return [Parcel.from_bytes(data) for data in take_bundle(content, most=100, longest=1 << 20)]


def header(**fields) -> Evil:
    """Change fields of the header."""

    def evil(msg, content, context) -> None:
        record = content[CODED]
        for name, value in fields.items():
            if value is None:
                del record[name]
            else:
                record[name] = value

    return evil


def each_parcel(**changes) -> Evil:
    """Change fields of every parcel a contributor sends."""

    def evil(msg, content, context) -> None:
        bundle(content, [dataclasses.replace(p, **changes).to_bytes() for p in parcels(content)])

    return evil


def raw(data: bytes) -> Evil:
    """Replace the frame of the bundle by ``data``."""

    def evil(msg, content, context) -> None:
        from fedcomp.flower.payload import put_frame

        put_frame(content, BUNDLE, data)

    return evil


def each_packet(**changes) -> Evil:
    """Change every packet a relay hands out; checksums are right."""

    def evil(msg, content, context) -> None:
        items = take_bundle(content, most=100, longest=1 << 20)
        packets = [Packet.from_bytes(item, PacketLimits()) for item in items]
        bundle(content, [dataclasses.replace(p, **changes, _wire_bytes=None).to_bytes() for p in packets])

    return evil


def flipped(msg, content, context) -> None:
    items = take_bundle(content, most=100, longest=1 << 20)
    packets = [Packet.from_bytes(item, PacketLimits()) for item in items]
    bundle(
        content, [dataclasses.replace(p, body=p.body ^ np.uint8(0x40), _wire_bytes=None).to_bytes() for p in packets]
    )


RELAY_LIES = {
    "bodies": flipped,
    "digest": each_packet(digest=b"polluted"),
    "length": each_packet(payload_bytes=700),
    "round": each_packet(round=9),
    "one source for all": each_packet(source=0),
    "unknown source": each_packet(source=77),
    "recoded": each_packet(mode=Mode.DENSE, number=0, vector=np.ones(3, np.uint8), recoded=True),
    "nothing": lambda msg, content, context: bundle(content, []),
    "twice": lambda msg, content, context: bundle(content, take_bundle(content, most=99, longest=1 << 20) * 2),
    "too many": lambda msg, content, context: bundle(content, [b"x"] * 1000),
    "too long": lambda msg, content, context: bundle(content, [bytes(3 << 20)]),
    "noise": lambda msg, content, context: bundle(content, [bytes(range(256))] * 4),
    "no bundle": raw(b"\xff\xff\xff\xff\xff"),
    "cut bundle": raw(b"\x05\x00\x00\x00abc"),
    "no header": lambda msg, content, context: content.__delitem__(CODED),
    "header of another round": header(round=5),
    "negative count": header(fresh=-1),
    "huge count": header(fresh=10**6),
    "reasons without end": header(refused=["spam " * 100] * 50),
    "empty content": lambda msg, content, context: RecordDict(),
    "a record of another kind": lambda msg, content, context: RecordDict(
        {CODED: content[CODED], BUNDLE: ConfigRecord()}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", RELAY_LIES)
def test_one_lying_relay_changes_nothing(lie: str) -> None:
    """Relay 1 is among the first that are asked; three others make up for it, so all six updates are in the sum."""
    strategy, found = attack(RELAY_LIES[lie], "query.coded_collect")
    assert found == uncoded()
    report = strategy.reports[1].coded
    assert len(report.included) == NODES
    assert report.excluded == {}
    assert len(report.refused) <= 100
    if lie not in ("bodies", "nothing", "twice", "reasons without end", "length", "digest"):
        assert report.refused, "what was thrown away is reported"
    assert all(len(reason) <= 300 for reason in report.refused)


CONTRIBUTOR_LIES = {
    "another's index": each_parcel(source=2),
    "another run": each_parcel(run=b"another!"),
    "a round replayed": each_parcel(round=0),
    "another kind": each_parcel(kind=SHARD + 1),
    "no such relay": each_parcel(destination=NODES),
    "all for one relay": each_parcel(destination=0),
    "nothing": lambda msg, content, context: bundle(content, []),
    "noise": lambda msg, content, context: bundle(content, [bytes(200)] * 5),
    "too many": lambda msg, content, context: bundle(content, [b"p"] * 50),
    "too long": lambda msg, content, context: bundle(content, [bytes(3 << 20)]),
    "no bundle": raw(b"\x01"),
    "another digest": header(digest=b"not this"),
    "digest of three bytes": header(digest=b"abc"),
    "another length": header(payload=1),
    "endless length": header(payload=2**40),
    "no length": header(payload=None),
    "header of another round": header(round=7),
    "a key that is none": header(public=b"short"),
    "empty bodies": each_parcel(body=b""),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", CONTRIBUTOR_LIES)
def test_one_lying_contributor_costs_its_own_update_only(lie: str) -> None:
    """The five others' updates are in the sum; the liar's is left out with the reason, and its weight with it."""
    strategy, found = attack(CONTRIBUTOR_LIES[lie], "train")
    assert found == uncoded(1)
    report = strategy.reports[1].coded
    assert len(report.included) == NODES - 1
    (reason,) = report.excluded.values()
    assert reason
    assert len(reason) <= 300


@pytest.mark.slow
def test_shards_of_two_payloads_are_no_payload() -> None:
    """A contributor gives each relay a shard of another payload, with the same digest in their headers."""

    def evil(msg, content, context) -> None:
        changed = []
        for p in parcels(content):
            packet = Packet.from_bytes(p.body, PacketLimits())
            packet = dataclasses.replace(packet, body=packet.body ^ np.uint8(p.destination + 1), _wire_bytes=None)
            changed.append(dataclasses.replace(p, body=packet.to_bytes()).to_bytes())
        bundle(content, changed)

    strategy, found = attack(evil, "train")
    assert found == uncoded(1)
    assert "digest" in next(iter(strategy.reports[1].coded.excluded.values()))


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"\xff" * 400, b"\x0a\x05hello", pack_content(RecordDict())], ids=repr)
def test_a_payload_that_is_no_reply_is_refused_by_whoever_reads_it(content: bytes) -> None:
    """Sound shards of unsound bytes: decoded, and then no content, or one the inner strategy refuses."""

    def evil(msg, reply, context) -> None:
        fields = msg.content[CODED]
        plan = RelayPlan("mds", 3, NODES, 1, seed=fields["seed"], max_payload=fields["max-payload"])
        own = fields["index"]
        packets = plan.packets(own, content)
        first = Packet.from_bytes(packets[0], plan.limits)
        made = [Parcel(fields["run"], 1, SHARD, own, i, body) for i, body in enumerate(packets) if i != own]
        bundle(reply, [parcel.to_bytes() for parcel in made])
        reply[CODED]["payload"], reply[CODED]["digest"] = first.payload_bytes, first.digest

    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        # The liar keeps its plan, which the mod removes before the app sees it.
        kept = Message(RecordDict(dict(msg.content.items())), reply_to=msg)
        reply = app(msg, context)
        if context.node_config["partition-id"] == 1 and msg.metadata.message_type == "train":
            evil(kept, reply.content, context)
        return reply

    strategy = relay()
    result, _ = run(strategy, NODES, app=dishonest)
    assert bits(result) == uncoded(1)
    inner = strategy.inner.reports[1]  # type: ignore[attr-defined]
    assert len(strategy.reports[1].coded.excluded) + len(inner.refused) == 1


@pytest.mark.slow
def test_a_peer_that_forges_another_ones_shards_cannot_change_its_update(monkeypatch) -> None:
    """Over peer links nothing says who sent a parcel; the source's own word in its reply does say what it sent."""
    original = SpoolTransport.send

    def send(self, address, parcel, whose=None):
        if parcel.source == 1:
            packet = Packet.from_bytes(parcel.body, PacketLimits())
            other = dataclasses.replace(packet, source=4, digest=b"forgery!", _wire_bytes=None)
            original(self, address, dataclasses.replace(parcel, source=4, body=other.to_bytes()))
        return original(self, address, parcel)

    monkeypatch.setattr(SpoolTransport, "send", send)
    strategy = relay(transport="peers")
    result, _ = run(strategy, NODES)
    assert bits(result) == uncoded()
    assert any("not the one source 4 announced for this relay" in r for r in strategy.reports[1].coded.refused)


@pytest.mark.slow
def test_hello_answers_that_cannot_be_used_make_an_ordinary_client() -> None:
    for fields in ({"public": b"short"}, {"public": None}, {"partition": -4}, {"protocol": 99}, {"address": "x" * 999}):
        strategy, found = attack(header(**fields), "query.coded_hello")
        assert strategy.reports[1].coded.planned == NODES - 1
        assert "hello cannot be used" in next(iter(strategy.reports[1].coded.direct.values()))
        assert found == uncoded()


def test_a_member_that_answers_without_coding_is_an_ordinary_client_for_that_round() -> None:
    app, bare = coded_app(), []

    def changing(msg: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 2 and msg.metadata.message_type == "train":
            del msg.content[CODED]
            bare.append(1)
        return app(msg, context)

    strategy = relay()
    result, _ = run(strategy, NODES, app=changing)
    assert bare
    assert bits(result) == uncoded()
    assert list(strategy.reports[1].coded.direct.values()) == ["it answered without coding, although it said hello"]


@pytest.mark.slow
def test_key_substitution_between_rounds_hurts_only_the_one_who_says_it() -> None:
    """A member that claims another key in its reply gets shards in the next round that it cannot open."""

    def evil(msg, content, context) -> None:
        content[CODED]["public"] = bytes(range(32))

    strategy, _ = attack(evil, "train", rounds=2, seal=True)
    assert len(strategy.reports[2].coded.included) == NODES
    assert any("does not open" in reason for reason in strategy.reports[2].coded.refused)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query.coded_put", "query.coded_collect", "query.coded_hello"])
def test_errors_of_any_code_are_losses(kind: str) -> None:
    app = coded_app()
    for code in (0, 2, 6, 8):

        def failing(msg: Message, context: Context, code=code) -> Message:
            if context.node_config["partition-id"] == 3 and msg.metadata.message_type == kind:
                return Message(Error(code, "no " * 400), reply_to=msg)
            return app(msg, context)

        strategy = relay()
        result, _ = run(strategy, NODES, app=failing)
        assert bits(result) == uncoded()
        assert all(len(reason) <= 300 for reason in strategy.reports[1].coded.refused)


@pytest.mark.slow
def test_several_liars_and_losses_at_once_leave_what_can_be_decoded() -> None:
    """One relay pollutes, one contributor forges, one client vanishes: the other four updates, and no exception."""
    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        partition, kind = context.node_config["partition-id"], msg.metadata.message_type
        if partition == 0 and kind == "query.coded_collect":
            flipped(msg, reply.content, context)
        if partition == 1 and kind == "train":
            each_parcel(source=3)(msg, reply.content, context)
        return reply

    strategy = relay()
    gone = either(after_sharing([5]), before_sharing([4]))
    result, _ = run(strategy, NODES, app=dishonest, fault=gone)
    assert len(strategy.reports[1].coded.included) == 4
    assert sorted(re.sub(r"[;,].*", "", reason) for reason in strategy.reports[1].coded.excluded.values())[
        -1
    ].startswith("no")
    assert bits(result) == uncoded(1, 4)
    assert bits(result) != b"".join(a.numpy().tobytes() for a in model().values())


@pytest.mark.slow
def test_a_plan_from_a_hostile_server_is_refused_by_the_client_without_training() -> None:
    """Fields of the plan are checked before the app is called."""
    trained: list[int] = []
    app, said = training_told(trained), []

    for changes, reason in (
        ({"symbols": 7}, "fewer than"),
        ({"private": 1, "code": "rlnc"}, "needs code='mds'"),
        ({"construction": "exfiltrate"}, "this client knows"),
    ):

        def tampered(msg: Message, context: Context, changes=changes) -> Message:
            if msg.metadata.message_type == "train":
                msg.content[CODED] = ConfigRecord({**dict(msg.content[CODED].items()), **changes})
            reply = app(msg, context)
            if msg.metadata.message_type == "train":
                said.append(reply.error.reason if reply.has_error() else "")
            return reply

        strategy = relay()
        with pytest.raises(NoUsableReply):
            run(strategy, NODES, app=tampered)
        assert strategy.reports[1].coded.included == []
        assert len(said) == NODES
        assert all(reason in text for text in said), said
        assert trained == []
        said.clear()


def test_a_reply_longer_than_the_plan_accepts_is_never_sent() -> None:
    """How long a reply is shows when it is there: this is the one refusal that costs a training."""
    trained: list[int] = []
    app, said = training_told(trained), []

    def tampered(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "train":
            msg.content[CODED]["max-payload"] = 10
        reply = app(msg, context)
        if msg.metadata.message_type == "train":
            said.append(reply)
        return reply

    strategy = relay()
    with pytest.raises(NoUsableReply, match="more than the 10"):
        run(strategy, NODES, app=tampered)
    assert strategy.reports[1].coded.included == []
    assert sorted(trained) == list(range(NODES))
    assert len(said) == NODES
    assert all(reply.has_error() and "more than the 10" in reply.error.reason for reply in said)
