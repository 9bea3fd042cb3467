"""Relayed shards without a network: who can be decoded from whom, who is asked, and what a liar achieves."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from galois_oracle import gf256
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import CorruptGeneration, NotDecodable
from fedcomp.coding.packet import Mode, Packet
from fedcomp.coding.relay import Collector, Commitment, RelayPlan, check, choose
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

C, N, K = 10, 10, 7
DEAD = list(combinations(range(N), 3))


def payload(source: int, length: int | None = None) -> bytes:
    """Return bytes whose length differs from source to source."""
    return SplitMix64(1000 + source).bytes(3000 + 517 * source if length is None else length).tobytes()


def shared(plan: RelayPlan, sources: int = C) -> list[list[bytes]]:
    """Return the packets of every source, by source and relay."""
    return [plan.packets(source, payload(source)) for source in range(sources)]


def collect(plan: RelayPlan, packets: list[list[bytes]], relays) -> Collector:
    collector = Collector(plan, range(len(packets)))
    for relay in relays:
        for each in packets:
            collector.add(relay, each[relay])
    return collector


def decoded(collector: Collector, sources: int = C) -> list[bool]:
    """Return which sources came out; those that did are compared."""
    found = []
    for source in range(sources):
        try:
            assert collector.payload(source) == payload(source)
            found.append(True)
        except NotDecodable:
            found.append(False)
    return found


@pytest.mark.slow
def test_reed_solomon_survives_all_120_ways_to_lose_three() -> None:
    plan = RelayPlan("mds", K, N, 5)
    packets = shared(plan)
    for dead in DEAD:
        assert all(decoded(collect(plan, packets, [i for i in range(N) if i not in dead]))), dead


@pytest.mark.slow
def test_random_codes_fail_exactly_where_their_matrix_is_singular_and_one_packet_more_repairs_it() -> None:
    """Of 1200 decodings from exactly K packets about 0.4 % of those with random rows fail; galois says which."""
    plan = RelayPlan("rlnc", K, N, 5, seed=2)
    packets = shared(plan)
    rows = [[Packet.from_bytes(p, plan.limits).row() for p in each] for each in packets]
    failures = 0
    for dead in DEAD:
        alive = [i for i in range(N) if i not in dead]
        collector = collect(plan, packets, alive)
        regular = [np.linalg.matrix_rank(gf256(np.stack([rows[s][i] for i in alive]))) == K for s in range(C)]
        assert decoded(collector) == regular
        for source in np.flatnonzero(~np.array(regular)):
            failures += 1
            assert collector.missing(int(source)) == 1
            collector.add(dead[0], packets[source][dead[0]])
        assert all(decoded(collector)), dead
    # Three systematic rows lost: a random 3 by 3 matrix, singular with probability 0.0039; fewer lost, smaller ones.
    assert failures, "this seed has singular matrices"
    assert failures <= 1200 * 0.0040 + 4 * (1200 * 0.0040) ** 0.5


def test_four_of_ten_lost_decodes_nobody() -> None:
    for code in ("mds", "rlnc"):
        plan = RelayPlan(code, K, N, 5)
        collector = collect(plan, shared(plan), range(4, N))
        assert not any(decoded(collector))
        assert collector.waiting == list(range(C))
        with pytest.raises(NotDecodable, match="6 independent shards of source 3 came, 7 are needed"):
            collector.payload(3)


def test_who_shared_one_shard_too_few_is_left_out_alone() -> None:
    plan = RelayPlan("mds", K, N, 5)
    collector = Collector(plan, range(C))
    for source, each in enumerate(shared(plan)):
        for relay in range(K - 1 if source == 4 else N):
            collector.add(relay, each[relay])
    assert decoded(collector) == [source != 4 for source in range(C)]


@pytest.mark.parametrize("code", ["mds", "rlnc"])
def test_any_order_with_duplicates_gives_the_same(code) -> None:
    plan = RelayPlan(code, K, N, 5, seed=9)
    packets = shared(plan)
    order = [(relay, source) for relay in range(N) for source in range(C)] * 2
    for seed in range(5):
        collector = Collector(plan, range(C))
        for place in SplitMix64(seed).shuffle(len(order)):
            relay, source = order[int(place)]
            collector.add(relay, packets[source][relay])
        assert all(decoded(collector))
        assert collector.innovative == C * K
        assert collector.received == C * N, "a packet delivered twice counts once"
        assert not collector.refused


@pytest.mark.slow
@given(
    length=st.sampled_from([0, 1, 6, 7, 63, 64, 65, 447, 448, 449, 5000]),
    symbols=st.integers(1, 12),
    code=st.sampled_from(["mds", "rlnc"]),
    threshold=st.integers(0, 3),
)
def test_every_length_passes(length, symbols, code, threshold) -> None:
    threshold = threshold if code == "mds" else 0
    plan = RelayPlan(code, symbols, symbols + threshold + 3, 1, threshold, max_payload=6000)
    collector = Collector(plan, [0])
    packets = plan.packets(0, payload(0, length))
    for relay, packet in enumerate(packets):
        collector.add(relay, packet)
    assert collector.payload(0) == payload(0, length)
    assert not collector.refused


def test_large_payloads_stay_within_the_limits_of_their_plan() -> None:
    for symbols in (1, 3, 16, 128):
        plan = RelayPlan("mds", symbols, symbols + 1, 1, max_payload=(1 << 21) + 5)
        data = payload(0, plan.max_payload)
        packets = plan.packets(0, data)
        collector = Collector(plan, [0])
        for relay in range(1, symbols + 1):
            collector.add(relay, packets[relay])
        assert collector.payload(0) == data
        with pytest.raises(ConfigError, match="more than the"):
            plan.packets(0, data + b"x")


def test_only_as_many_relays_are_asked_as_the_worst_source_lacks() -> None:
    plan = RelayPlan("mds", K, N, 5)
    packets = shared(plan)
    collector = Collector(plan, range(C))
    first = collector.ask(range(N))
    assert list(first) == list(range(N))
    assert {len(sources) for sources in first.values()} == {K}, "everybody sends equally much"
    assert all((relay - source - 1) % C < K for relay, sources in first.items() for source in sources)
    for relay, sources in first.items():
        for source in sources:
            if (relay, source) not in {(5, 4), (6, 4), (7, 6)}:
                collector.add(relay, packets[source][plan.holders(source, C).index(relay)], sources)
    second = collector.ask(range(N))
    assert second == {2: [4], 3: [4], 4: [6]}, "source 4 lacks two, source 6 one; the others are done"
    for relay, sources in second.items():
        for source in sources:
            collector.add(relay, packets[source][plan.holders(source, C).index(relay)], sources)
    assert collector.ask(range(N)) == {}


def test_relays_thought_to_be_away_are_asked_where_the_others_do_not_suffice() -> None:
    collector = Collector(RelayPlan("mds", 2, 4, 5), range(4))
    # Sources 0 and 2 have two able holders; 1 and 3 as well: nobody has to be asked who may be away.
    assert collector.ask([1, 3], [0]) == {1: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
    collector = Collector(RelayPlan("mds", 3, 4, 5), range(4))
    assert collector.ask([1, 3], [0]) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
    assert Collector(RelayPlan("mds", 3, 4, 5), range(4)).ask([1, 3]) == {}


def test_a_source_that_cannot_be_completed_any_more_is_given_up() -> None:
    plan = RelayPlan("mds", K, N, 5)
    packets = shared(plan)
    collector = Collector(plan, range(C))
    for relay in range(K):
        for source in range(C):
            if source != 2:
                collector.add(relay, packets[source][relay])
    assert collector.waiting == [2]
    assert collector.ask([7, 8, 9]) == {}, "three relays are left, seven shards are lacking"
    collector.give_up(2)
    assert collector.waiting == []


def forged(packet: bytes, plan: RelayPlan, **changes) -> bytes:
    """Return a packet with other fields and a right checksum."""
    return dataclasses.replace(Packet.from_bytes(packet, plan.limits), **changes, _wire_bytes=None).to_bytes()


@pytest.mark.parametrize("liar", [0, 3, 9])
def test_one_relay_that_lies_about_a_body_costs_one_more_packet(liar) -> None:
    plan = RelayPlan("mds", K, N, 5)
    packets = shared(plan)
    body = Packet.from_bytes(packets[1][liar], plan.limits).body ^ np.uint8(1)
    packets[1][liar] = forged(packets[1][liar], plan, body=body)
    order = [liar, *(i for i in range(N) if i != liar)]
    collector = collect(plan, packets, order[:K])
    assert 1 in collector.waiting
    with pytest.raises(CorruptGeneration, match="digest"):
        collector.payload(1)
    assert collector.missing(1) == 1, "one packet more may show which is wrong"
    for relay in order[K:]:
        for source in range(C):
            collector.add(relay, packets[source][relay])
    assert all(decoded(collector))


@pytest.mark.parametrize(
    "changes",
    [{"digest": b"forgery!"}, {"payload_bytes": 3516}, {"symbols": 6}, {"round": 4}, {"source": 10}, {"recoded": True}],
    ids=str,
)
def test_lies_in_a_header_stop_nobody(changes) -> None:
    """The first packets that come are the liar's; a decoder that let them fix the payload would refuse all others."""
    plan = RelayPlan("mds", K, N, 5)
    packets = shared(plan)
    wrong = {"mode": Mode.DENSE, "number": 0, "vector": np.ones(changes.get("symbols", K), np.uint8)}
    collector = Collector(plan, range(C))
    believed = collector.add(0, forged(packets[1][0], plan, **wrong, **changes))
    # These two contradict nothing else in the packet: until others come they may be true.
    assert (believed == 1) == bool(changes.keys() & {"digest", "payload_bytes"}), collector.refused
    for relay in range(N):
        for source in range(C):
            collector.add(relay, packets[source][relay])
    assert all(decoded(collector))


def test_a_commitment_settles_what_a_source_sent() -> None:
    """K relays conspire on another payload: without the source's own word it would be believed, with it it is not."""
    plan = RelayPlan("mds", K, N, 5)
    true, false = plan.packets(0, payload(0)), plan.packets(0, payload(99, 3000))
    free, bound = Collector(plan, [0]), Collector(plan, [0])
    bound.expect(0, Commitment.of(Packet.from_bytes(true[0], plan.limits)))
    for collector in (free, bound):
        for relay in range(K):
            collector.add(relay, false[relay])
    assert free.payload(0) == payload(99, 3000)
    with pytest.raises(NotDecodable):
        bound.payload(0)
    assert all("another payload than the one source 0 announced" in reason for reason in bound.refused)
    for relay in range(N):
        bound.add(relay, true[relay])
    assert bound.payload(0) == payload(0)


def test_damaged_foreign_and_unasked_packets_are_refused_with_a_reason() -> None:
    plan = RelayPlan("rlnc", 3, 5, 5, max_payload=4000)
    good = plan.packets(0, payload(0, 900))
    collector = Collector(plan, [0, 1])
    for data, reason in (
        (b"", "not a packet"),
        (good[0][:-1], "bytes"),
        (good[0][:50] + bytes([good[0][50] ^ 1]) + good[0][51:], "checksum"),
        (RelayPlan("rlnc", 3, 5, 4, max_payload=4000).packets(0, payload(0, 900))[0], "round 4, expected 5"),
        (plan.packets(1, payload(0, 900))[0], "no request named source 1"),
        (RelayPlan("rlnc", 3, 5, 5).packets(0, payload(0, 90_000))[0], "accepts at most"),
        (RelayPlan("rlnc", 9, 9, 5, max_payload=4000).packets(0, payload(0, 900))[0], "accepts at most"),
    ):
        before = len(collector.refused)
        assert collector.add(2, data, [0]) is None
        assert reason in collector.refused[before]
    assert collector.received == 0
    assert collector.missing(0) == 3


@pytest.mark.parametrize("threshold", [0, 2])
def test_a_plan_with_a_threshold_sends_random_symbols(threshold: int) -> None:
    """Without them a relay sees the payload. That any T of the shards say nothing: test_mds.py."""
    plan = RelayPlan("mds", 3, 8, 1, threshold, max_payload=1 << 20)
    bodies = [Packet.from_bytes(data, plan.limits).body for data in plan.packets(0, b"\0" * 60_000)]
    assert [bool(body.any()) for body in bodies] == [threshold > 0] * 8


def test_numbers_follow_from_the_relays_there_are() -> None:
    assert choose(10, code="mds", symbols=7) == (7, 10)
    assert choose(10, code="rlnc", symbols=7, shards=9) == (7, 9)
    assert choose(20, code="rlnc", symbols=4, loss=0.3, target=0.999) == (4, 13)
    assert choose(24, code="rlnc", loss=0.1, target=0.999) == (16, 24)
    assert choose(23, code="rlnc", loss=0.1, target=0.999) == (15, 23)
    assert choose(13, code="mds", loss=0.1, threshold=2) == (6, 13)
    assert choose(1, code="mds") == (1, 1)
    # As many shards as a Reed-Solomon code has, which are fewer where it has random symbols.
    assert choose(300, code="mds") == (16, 256)
    assert choose(300, code="rlnc") == (16, 300)
    for options in ({}, {"symbols": 100}, {"shards": 250}, {"shards": 254}, {"threshold": 120}, {"threshold": 127}):
        given = {"threshold": 1, **options}
        symbols, shards = choose(300, code="mds", **given)
        assert shards == options.get("shards", 256 - symbols - given["threshold"])
        assert symbols == options.get("symbols", min(16, 256 - shards - given["threshold"], 128 - given["threshold"]))
        plan = RelayPlan("mds", symbols, shards, 1, threshold=given["threshold"])
        assert len(plan.packets(0, bytes(999))) == shards
    for options, reason in (
        ({"symbols": 7}, "6 clients take part, the code needs 7"),
        ({"symbols": 2, "shards": 8}, "6 clients take part, the code needs 8, one for each shard"),
        ({"symbols": 4, "loss": 0.3}, "6 clients take part, the code needs"),
        ({"threshold": 6, "code": "mds"}, "6 clients take part, the code needs"),
    ):
        with pytest.raises(NotDecodable, match=reason):
            choose(6, **{"code": "rlnc", **options})


def test_impossible_numbers_are_refused_at_once() -> None:
    for options, reason in (
        ({"threshold": 1}, "needs code='mds'"),
        ({"symbols": 8, "shards": 7}, "fewer than the 8"),
        ({"code": "mds", "symbols": 120, "threshold": 9}, "at most 128: set fewer symbols"),
        ({"code": "mds", "shards": 257}, "at most 256"),
        ({"code": "mds", "shards": 255, "threshold": 1}, "at most 254"),
        ({"code": "mds", "shards": 240, "symbols": 16, "threshold": 1}, "at most 239"),
        ({"code": "mds", "threshold": 128}, "symbols \\+ threshold = 129"),
        ({"symbols": 129}, "whose time grows with K, and codes at most 128: set fewer symbols"),
        ({"code": "mds", "shards": 2, "threshold": 2}, "leave no symbol"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(**{"code": "rlnc", "symbols": 0, "shards": 0, "threshold": 0, **options})
    with pytest.raises(ConfigError):
        RelayPlan("mds", 0, 3, 1)
    with pytest.raises(ConfigError, match="max_payload"):
        RelayPlan("mds", 2, 3, 1, max_payload=0)
