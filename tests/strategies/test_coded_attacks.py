"""One client against all others: what it says in its hello, sends to peers, or claims as relay costs nobody else."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from coded_runs import bits, coded_app, run
from flwr.app import Context, Message
from test_coded_hostile import NODES, attack, bundle, header, parcels, relay, uncoded

from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.relay import Collector, Commitment, RelayPlan, packet_hash
from fedcomp.coding.transport import SpoolTransport
from fedcomp.flower.coded import CODED, SHARD, pack_content
from fedcomp.flower.faults import Delivery

EVIL = 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_a_key_nothing_can_be_sealed_for_loses_one_relay_not_every_contributor(transport: str) -> None:
    """A point of small order has 32 bytes like any key, and sealing for it fails: at everybody else's."""
    strategy, found = attack(header(public=bytes(32)), "query.coded_hello", seal=True, transport=transport)
    assert strategy.reports[1].coded.excluded == {}
    assert found == uncoded()
    assert any("agrees on no secret" in reason for reason in strategy.reports[1].coded.refused)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://host:99999999", "spool:relative", "tcp://[::1"])
def test_an_address_that_is_none_loses_one_relay(address: str) -> None:
    strategy, found = attack(header(address=address), "query.coded_hello", transport="peers")
    assert strategy.reports[1].coded.excluded == {}
    assert found == uncoded()


def reply_of_0_lost(delivery: Delivery) -> str | None:
    return "lost_reply" if delivery.partition == 0 and delivery.message_type == "train" else None


def flooding(monkeypatch, make) -> None:
    """Let client 1 send further parcels with each of its own; ``make(parcel)`` returns them."""
    original = SpoolTransport.send

    def send(self, address, parcel, whose=None):
        if parcel.source == EVIL and parcel.kind == SHARD:
            for more in make(parcel):
                original(self, address, more)
        return original(self, address, parcel)

    monkeypatch.setattr(SpoolTransport, "send", send)


@pytest.mark.slow
def test_a_parcel_too_long_for_the_plan_does_not_spoil_a_relays_answer(monkeypatch) -> None:
    """Relays keep it, since it fits their store; the other sources they hand out with it are used."""
    flooding(monkeypatch, lambda p: [dataclasses.replace(p, body=bytes(2 << 20))])
    strategy = relay(transport="peers")
    assert bits(run(strategy, NODES)[0]) == uncoded()


def forged(plan: RelayPlan, held: Packet, relay_index: int, seed: int) -> bytes:
    """Return a packet as a relay expects it, with the payload digest of ``held`` and a body of its own."""
    shard = plan.holders(held.source, NODES).index(relay_index)
    sound = plan.packets(held.source, bytes([seed]) * held.payload_bytes)[shard]
    return dataclasses.replace(Packet.from_bytes(sound, plan.limits), digest=held.digest, _wire_bytes=None).to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"threshold": 1, "symbols": 2}, {"code": "rlnc"}], ids=repr)
def test_wrong_bodies_under_the_right_digest_cost_their_victims_nothing(monkeypatch, options: dict) -> None:
    """Client 1 keeps a packet of everybody's, so knows their digests. Once all have shared it sends relays others."""
    original, reached, victims = SpoolTransport.send, {}, set()
    plan = RelayPlan(**{"code": "mds", "symbols": 3, "shards": NODES, "round": 1, **options})
    app, lock = coded_app(), threading.Lock()

    def send(self, address, parcel, whose=None):
        if parcel.source == EVIL:
            reached[parcel.destination] = (self, address)
        return original(self, address, parcel)

    def flood(run_id: bytes) -> None:
        for destination, (transport, address) in reached.items():
            for parcel in transport.store.list(run_id, 1):
                if parcel.source != EVIL:
                    victims.add(parcel.source)
                    held = Packet.from_bytes(parcel.body, PacketLimits())
                    for seed in range(1, 9):
                        body = forged(plan, held, destination, seed)
                        original(transport, address, dataclasses.replace(parcel, destination=destination, body=body))

    def waiting(msg: Message, context: Context) -> Message:
        with lock:
            if msg.metadata.message_type == "query.coded_collect" and not victims:
                flood(msg.content[CODED]["run"])
        return app(msg, context)

    monkeypatch.setattr(SpoolTransport, "send", send)
    strategy = relay(transport="peers", **options)
    result, _ = run(strategy, NODES, app=waiting)
    assert victims == set(range(NODES)) - {EVIL}
    assert strategy.reports[1].coded.excluded == {}
    assert bits(result) == uncoded()
    for victim in victims:
        assert any(
            f"not the one source {victim} announced for this" in reason for reason in strategy.reports[1].coded.refused
        )


def test_a_relay_that_sends_wrong_bodies_is_told_from_the_others_at_once() -> None:
    plan = RelayPlan("mds", 3, 6, 1)
    payload = bytes(range(250)) * 4
    packets = plan.packets(0, payload)
    collector = Collector(plan, range(6))
    first = Packet.from_bytes(packets[0], plan.limits)
    collector.expect(0, Commitment.of(first), map(packet_hash, packets))
    for relay_index in (1, 2, 3, 4):
        wrong = Packet.from_bytes(packets[relay_index - 1], plan.limits)
        wrong = dataclasses.replace(wrong, body=wrong.body ^ np.uint8(7), _wire_bytes=None)
        assert collector.add(relay_index, wrong.to_bytes()) is None
    assert collector.arrived(0) == 0
    assert all("not one of the packets that source 0 announced" in reason for reason in collector.refused)
    collector.add(5, packets[4])
    collector.add(0, packets[5])
    assert collector.add(-1, plan.fresh(0, payload, 1)[0]) == 0, "of these nothing was announced; the source sends them"
    assert collector.payload(0) == payload


@pytest.mark.slow
@pytest.mark.parametrize("hashes", [None, b"eight by", bytes(8 * NODES + 1)], ids=repr)
def test_hashes_of_another_length_are_no_announcement(hashes: bytes | None) -> None:
    """What the client says is then refused whole, and its shards are those of one whose reply was lost."""
    app = coded_app()

    def lying(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == EVIL and msg.metadata.message_type == "train":
            del reply.content[CODED]["hashes"]
            if hashes is not None:
                reply.content[CODED]["hashes"] = hashes
        return reply

    strategy = relay(transport="peers")
    assert bits(run(strategy, NODES, app=lying)[0]) == uncoded()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_hashes_travel_only_where_they_serve_something(transport: str) -> None:
    """Through the hub nobody can put a parcel in another's name."""
    app, seen = coded_app(), []

    def watching(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "query.coded_collect":
            fields = msg.content[CODED]
            seen.append((len(fields.get("hashes", b"")), len(fields["sources"])))
        reply = app(msg, context)
        if msg.metadata.message_type == "train":
            assert len(reply.content[CODED].get("hashes", b"")) == (8 * NODES if transport == "peers" else 0)
        return reply

    run(relay(transport=transport), NODES, app=watching)
    assert seen
    assert all(size == (8 * count if transport == "peers" else 0) for size, count in seen)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [EVIL, 4])
def test_a_flood_of_parcels_does_not_spoil_a_relays_answer(monkeypatch, victim: int) -> None:
    flooding(monkeypatch, lambda p: [dataclasses.replace(p, source=victim, body=bytes([i]) * 90) for i in range(60)])
    strategy = relay(transport="peers")
    run_bits = bits(run(strategy, NODES)[0])
    assert run_bits == uncoded()


@pytest.mark.slow
def test_one_relay_alone_cannot_speak_for_a_client_whose_reply_was_lost() -> None:
    """A payload said to be of one symbol would be decoded from a single packet, whoever sends it."""
    app = coded_app()

    def lying(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == EVIL and msg.metadata.message_type == "query.coded_collect":
            forged = RelayPlan("mds", 1, NODES, 1).packets(0, pack_content(reply.content) * 9)
            bundle(reply.content, [forged[0]])
        return reply

    strategy = relay(transport="peers")
    result, _ = run(strategy, NODES, app=lying, fault=reply_of_0_lost)
    assert bits(result) == uncoded()
    assert strategy.reports[1].coded.excluded == {}


@pytest.mark.parametrize("size", [10, 65, 130, 5000])
def test_without_an_announcement_no_fewer_than_k_relays_decide(size: int) -> None:
    plan = RelayPlan("mds", 3, 6, 1)
    real, forged = bytes(range(250)) * 40, b"f" * size
    for symbols in (1, 2, 3):
        collector = Collector(plan, range(6))
        fake = RelayPlan("mds", symbols, 6, 1).packets(0, forged)
        packets = plan.packets(0, real)
        collector.add(1, fake[0])
        collector.add(1, fake[1])
        collector.add(2, fake[1])
        assert collector.waiting == [0, 1, 2, 3, 4, 5]
        for relay_index in (3, 4, 5):
            collector.add(relay_index, packets[relay_index - 1])
        assert collector.payload(0) == real


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [0, 1, 63, 65, 130, 5000])
def test_short_payloads_are_still_decoded_from_any_k(size: int, announced: bool) -> None:
    plan = RelayPlan("mds", 3, 6, 1)
    payload = b"p" * size
    packets = plan.packets(0, payload)
    collector = Collector(plan, range(6))
    if announced:
        collector.expect(0, Commitment.of(Packet.from_bytes(packets[0], plan.limits)))
    for relay_index in (2, 4, 5):
        collector.add(relay_index, packets[relay_index - 1])
    assert collector.payload(0) == payload


@pytest.mark.slow
def test_a_parcel_longer_than_a_relays_store_costs_only_itself() -> None:
    """Through the hub: the relays refuse one parcel, not the whole forwarded bundle."""

    def evil(msg, content, context) -> None:
        bundle(content, [dataclasses.replace(p, body=bytes(30_000)).to_bytes() for p in parcels(content)])

    strategy, found = attack(evil, "train", app_options={"max_store_bytes": 20_000})
    assert any("accepts at most 20000" in reason for reason in strategy.reports[1].coded.refused)
    assert found == uncoded(EVIL)


@pytest.mark.slow
def test_a_relays_tale_of_what_it_holds_is_no_number_the_ledger_cannot_hold() -> None:
    strategy = relay(transport="peers")
    app = coded_app()

    def lying(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == EVIL and msg.metadata.message_type == "query.coded_collect":
            reply.content[CODED]["held"] = [0, 2**63 - 1] * 3
        return reply

    result, grid = run(strategy, NODES, app=lying, fault=reply_of_0_lost)
    assert bits(result) == uncoded()
    assert strategy.reports[1].coded.payload_bytes["peer"] < 1 << 30
    assert 0 < grid.ledger.total(link="peer") < 1 << 30
