"""Random linear network coding over GF(2^8): encoder, relay and decoder.

| property | test |
|---|---|
| 1. any K independent packets decode, K in 1..64, lengths to 2^20+7, duplicates | test_any_independent_packets_... |
| 2. linearity, and that the XOR is not the sum | test_encoding_is_linear_..., test_the_xor_is_not_the_sum |
| 3. two hops through relays; the rank never exceeds the min cut | test_two_relays_..., test_a_relay_never_... |
| 4. rate of singular matrices; what it does not catch | test_elimination.py |
| 6. mixed payloads, forged packets | test_packets_of_two_payloads_..., test_a_forged_..., test_packet.py |
| 8. seed and dense vector decode identically | test_seeds_and_dense_vectors_decode_identically, test_splitmix.py |

5 (products against galois and ISA-L) and 7 (tiers) belong to the kernels; what an encoder makes is compared with galois
here once more.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from galois_oracle import gf256
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.coding import decoder as decoder_module
from fedcomp.coding.code import shape_of, symbols_for
from fedcomp.coding.encoder import encoder
from fedcomp.coding.errors import CorruptGeneration, NotDecodable, PacketError
from fedcomp.coding.field import GF256
from fedcomp.coding.packet import Mode, Packet, PacketLimits
from fedcomp.coding.rlnc import Decoder, Recoder
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.errors import ConfigError

LENGTHS = (0, 1, 63, 64, 65, 1000, 2**20 + 7)


@functools.cache
def data(length: int, seed: int = 0) -> bytes:
    """Return ``length`` random bytes."""
    return SplitMix64(derive("payload", length, seed)).bytes(length).tobytes()


def packets_of(payload: bytes, symbols: int, count: int, **options: Any) -> list[Packet]:
    """Return the first packets of a payload, each as it arrives: from its bytes."""
    given_options = {"round": 3, "source": 5, "run": 9, **options}
    made = encoder(given_options.pop("code", "rlnc"), payload, symbols=symbols, **given_options).packets(range(count))
    return [Packet.from_bytes(one.to_bytes(), PacketLimits()) for one in made]


def decoded(packets: list[Packet], **options: Any) -> Decoder:
    """Return a decoder that was given the packets."""
    found = Decoder(**options)
    for packet in packets:
        found.add(packet)
    return found


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(1, 64),
    st.sampled_from(LENGTHS),
    st.sampled_from(["systematic", "random"]),
    st.integers(0, 2**32),
    st.sampled_from([1, 64]),
)
def test_any_independent_packets_decode_in_any_order_with_duplicates(
    symbols: int, length: int, mode: str, seed: int, align: int
) -> None:
    payload = data(length)
    count = 2 * symbols + 3
    sent = packets_of(payload, symbols, count, mode=mode, align=align, run=seed)
    receiver = Decoder(expect=(3, 5))
    innovative = 0
    order = SplitMix64(seed).below(count, 4 * count)  # with replacement: duplicates are likely
    for arrived in [*order.tolist(), *range(count)]:
        if receiver.complete:
            break
        before = receiver.rank
        news = receiver.add(sent[arrived])
        innovative += news
        assert receiver.rank == before + news
    assert receiver.complete
    assert innovative == receiver.symbols == symbols_for(length, symbols)
    assert receiver.payload() == payload
    stats = receiver.stats
    assert stats.received == stats.innovative + stats.dependent
    assert stats.innovative == innovative
    assert not stats.repaired


def test_a_receiver_short_of_one_packet_does_not_decode() -> None:
    receiver = decoded(packets_of(data(5000), 8, 20)[10:17], expect=(3, 5))
    assert (receiver.rank, receiver.needed, receiver.complete) == (7, 1, False)
    with pytest.raises(NotDecodable, match="rank 7 of 8"):
        receiver.payload()
    with pytest.raises(NotDecodable):
        receiver.solve()
    with pytest.raises(NotDecodable, match="no packet"):
        Decoder().payload()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["systematic", "random"])
def test_a_thousand_symbols_decode(mode: str) -> None:
    payload = data(70_000)
    sent = packets_of(payload, 1024, 1060, mode=mode)
    receiver = decoded(sent[20:])
    assert receiver.payload() == payload


@pytest.mark.slow
def test_packets_are_products_by_the_oracle() -> None:
    payload = data(3000)
    source = encoder("rlnc", payload, symbols=6, round=1, source=2, run=3, mode="random")
    padded = np.frombuffer(payload.ljust(6 * 512, b"\0"), np.uint8).reshape(6, 512)
    rows = np.stack([source.coefficients(index) for index in range(9)])
    expected = np.asarray(gf256(rows) @ gf256(padded))
    made = source.packets(range(9))
    assert np.array_equal([packet.body[0] for packet in made], expected)
    assert all(np.array_equal(packet.row(), row) for packet, row in zip(made, rows, strict=True))


def test_a_packet_is_a_function_of_its_number() -> None:
    source = encoder("rlnc", data(1000), symbols=4, round=1, source=2, run=3)
    ahead = [packet.to_bytes() for packet in source.packets([9, 3, 4, 0, 9])]
    assert ahead == [source.packet(index).to_bytes() for index in (9, 3, 4, 0, 9)]
    again = encoder("rlnc", data(1000), symbols=4, round=1, source=2, run=3)
    assert again.packet(9).to_bytes() == ahead[0]
    assert source.packet(9).number == derive(3, 1, 2, 9)
    others = [{"round": 2}, {"source": 3}, {"run": 4}]
    rows = [
        encoder("rlnc", data(1000), symbols=4, **{"round": 1, "source": 2, "run": 3, **one}).coefficients(9).tobytes()
        for one in [{}, *others]
    ]
    assert len(set(rows)) == 4, "run, round and source all enter the seed"


@pytest.mark.parametrize(("code", "index"), [("rlnc", 9), ("mds", 5)])
def test_encoding_is_linear_over_the_field(code: Any, index: int) -> None:
    a, b = data(900, 1), data(900, 2)
    both = bytes(x ^ y for x, y in zip(a, b, strict=True))

    def body(payload: bytes) -> np.ndarray:
        return encoder(code, payload, symbols=4, round=1, source=2, run=3).packet(index).body

    assert np.array_equal(body(a) ^ body(b), body(both))


def test_the_xor_is_not_the_sum() -> None:
    """Shards added in GF(2^8) decode, without any error sign, to the XOR of what two clients sent: not to their sum."""
    gradients = [np.frombuffer(data(2048, seed), np.uint8) for seed in (1, 2)]
    encoders = [encoder("rlnc", one.tobytes(), symbols=4, round=1, source=2, run=3, mode="random") for one in gradients]
    digest = encoder("rlnc", (gradients[0] ^ gradients[1]).tobytes(), symbols=4, round=1, source=2, run=3).digest
    receiver = Decoder()
    for index in range(6):
        first, second = (source.packet(index) for source in encoders)
        receiver.add(replace(first, body=first.body ^ second.body, digest=digest))
    result = np.frombuffer(receiver.payload(), np.uint8)
    assert np.array_equal(result, gradients[0] ^ gradients[1])
    carries = (gradients[0] & gradients[1] & 0x7F) != 0
    assert carries.mean() > 0.8, "the test needs values whose bits meet"
    assert not np.any(result[carries] == (gradients[0] + gradients[1])[carries])


def test_two_relays_recode_and_the_receiver_completes() -> None:
    payload = data(4000)
    sent = packets_of(payload, 8, 12)
    receiver, relays = Decoder(), [Recoder(), Recoder()]
    for place, packet in enumerate(sent):
        relays[place % 2].add(packet)
    assert [relay.rank for relay in relays] == [6, 6]
    for number, relay in enumerate(relays):
        before = receiver.rank
        for count in range(10):
            made = relay.recode(derive("relay", number, count))
            read = Packet.from_bytes(made.to_bytes(), PacketLimits())
            assert read.recoded
            assert read.mode in (Mode.DENSE, Mode.SPARSE), "what a relay combined cannot be named by a seed"
            receiver.add(read)
        assert receiver.rank <= before + relay.rank
    assert receiver.payload() == payload
    assert receiver.stats.dependent == 12, "ten packets of a relay that holds six"


def test_a_relay_never_sends_more_rank_than_it_holds() -> None:
    sent = packets_of(data(4000), 8, 12)
    first, second, receiver = Recoder(), Recoder(), Decoder()
    for packet in [*sent[:5], *sent[:3]]:
        first.add(packet)
    assert first.rank == 5
    for count in range(20):
        second.add(first.recode(derive(count)))
    for count in range(20):
        receiver.add(second.recode(derive("second", count)))
    assert second.rank == receiver.rank == 5
    assert not receiver.complete


def test_a_relay_with_one_packet_forwards_it_and_with_none_says_so() -> None:
    relay = Recoder()
    with pytest.raises(NotDecodable, match="holds no packet"):
        relay.recode(0)
    packet = packets_of(data(4000), 8, 12)[11]
    assert relay.add(packet)
    assert not relay.add(packet)
    assert relay.recode(1) is packet
    assert packet.mode is Mode.SEED


def test_a_combination_of_few_symbols_travels_sparsely() -> None:
    sent = packets_of(data(40_000), 32, 40)
    relay = Recoder()
    for packet in sent[3:6]:
        relay.add(packet)
    made = relay.recode(7)
    assert made.mode is Mode.SPARSE
    assert np.flatnonzero(made.row()).tolist() == [3, 4, 5]
    relay.add(sent[39])
    assert relay.recode(8).mode is Mode.DENSE
    receiver = decoded([*sent[:5], *sent[6:32], Packet.from_bytes(made.to_bytes(), PacketLimits())])
    assert receiver.payload() == data(40_000)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("round", {"round": 4}),
        ("source", {"source": 6}),
        ("payload_bytes", {"payload_bytes": 3999}),
        ("digest", {"digest": bytes(8)}),
        ("symbols", {"symbols": 7}),
        ("symbol_bytes", {"body": np.zeros((1, 448), np.uint8)}),
        ("generations", {"body": np.zeros((2, 512), np.uint8)}),
        ("first_generation", {"first_generation": 1}),
    ],
)
def test_packets_of_two_payloads_never_mix(name: str, change: dict[str, Any]) -> None:
    sent = packets_of(data(4000), 8, 12)
    other = replace(sent[9], _wire_bytes=None, **change)
    for collector in (Recoder(), Decoder()):
        collector.add(sent[0])
        with pytest.raises(PacketError, match=name):
            collector.add(other)
        assert collector.rank == 1


def test_a_decoder_refuses_what_it_does_not_expect() -> None:
    sent = packets_of(data(4000), 8, 12)
    for expect in ((3, 4), (4, 5)):
        with pytest.raises(PacketError, match="expects"):
            Decoder(expect=expect).add(sent[0])
    for changes, message in (
        ({"field": 1}, "field 1"),
        ({"first_generation": 1}, "first generation 1"),
        ({"payload_bytes": 5000}, "1 generations of 4096 bytes"),
        ({"payload_bytes": 3000}, "padding"),
    ):
        zero = np.zeros((1, 512), np.uint8)
        with pytest.raises(PacketError, match=message):
            Decoder().add(replace(sent[0], _wire_bytes=None, body=zero, **changes))
    with pytest.raises(PacketError, match="none is left"):
        Decoder(threshold=8).add(sent[0])
    with pytest.raises(PacketError, match="K = 8"):
        Decoder(limits=PacketLimits(max_symbols=7)).add(sent[0])
    with pytest.raises(PacketError, match="K = 8"):
        Recoder(PacketLimits(max_symbols=7)).add(sent[0])
    with pytest.raises(ConfigError, match="threshold"):
        Decoder(threshold=-1)


def test_seeds_and_dense_vectors_decode_identically() -> None:
    payload = data(5000)
    seeded = packets_of(payload, 8, 12, mode="random")
    dense = [replace(packet, mode=Mode.DENSE, number=0, vector=packet.row(), _wire_bytes=None) for packet in seeded]
    assert [packet.mode for packet in seeded] == [Mode.SEED] * 12
    one, two = decoded(seeded[:9]), decoded(dense[:9])
    assert one.payload() == two.payload() == payload
    assert two.stats.bytes == one.stats.bytes == sum(len(packet.to_bytes()) for packet in seeded[:9])


def test_what_arrived_as_itself_is_there_at_once_and_nothing_is_lost() -> None:
    payload = data(2**20 + 7)
    sent = packets_of(payload, 16, 20)
    symbol_bytes, generations = sent[0].symbol_bytes, sent[0].generations
    assert generations == 2
    receiver = decoded([sent[index] for index in (0, 15, 3, 19)])
    found = receiver.partial()
    assert sorted(found) == [0, 3, 15, 16, 19, 31]
    for index, value in found.items():
        assert value == payload[index * symbol_bytes : (index + 1) * symbol_bytes] == receiver.symbol(index)
    assert receiver.states().count("decoded") == 3
    assert receiver.states().count("partial") == 13
    with pytest.raises(NotDecodable, match="symbol 1 "):
        receiver.symbol(1)
    with pytest.raises(ConfigError, match="symbol 32"):
        receiver.symbol(32)
    assert Decoder().partial() == {}
    assert Decoder().states() == []
    with pytest.raises(NotDecodable, match="no packet"):
        Decoder().symbol(0)
    only = decoded([sent[0]])
    assert (only.states()[:2], only.needed) == (["decoded", "missing"], 15)


def test_a_symbol_is_found_before_the_rank_is_full() -> None:
    """Packets that are combinations of symbols 0 and 1 determine both, though six more are missing."""
    payload = data(4096)
    sent = packets_of(payload, 8, 8)
    relay, receiver = Recoder(), Decoder()
    relay.add(sent[0])
    relay.add(sent[1])
    receiver.add(relay.recode(1))
    assert receiver.partial() == {}
    assert receiver.states()[:3] == ["partial", "partial", "missing"]
    receiver.add(relay.recode(2))
    assert receiver.partial() == {0: payload[:512], 1: payload[512:1024]}
    assert receiver.symbol(1) == payload[512:1024]
    assert receiver.rank == 2


def test_all_symbols_together_are_the_payload() -> None:
    for length in (65, 1000, 2**20 + 7):
        receiver = decoded(packets_of(data(length), 7, 12)[3:11])
        found = receiver.partial()
        assert b"".join(found[index] for index in sorted(found)) == receiver.payload() == data(length)


def test_only_the_missing_symbols_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While packets arrive no body is touched; then one product, with as many rows as symbols miss."""
    payload = data(2**20 + 7)
    sent = packets_of(payload, 16, 24)
    products: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Counting(GF256):
        def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
            products.append((a.shape, b.shape))
            return super().matmul(a, b, out)

    monkeypatch.setattr(decoder_module, "FIELD", Counting())
    receiver = decoded([sent[index] for index in [16, 17, 18, *range(13)]])
    assert products == []
    assert receiver.solve() == 3
    assert products == [((3, 16), (16, 2 * sent[0].symbol_bytes))]
    assert receiver.payload() == payload
    assert receiver.solve() == 0
    assert len(products) == 1
    whole = decoded(sent[:16])
    assert whole.payload() == payload
    assert len(products) == 1


def spoil(packet: Packet, place: int = 5, value: int = 0x21) -> Packet:
    """Return the packet with one byte of its body changed, and a checksum that fits: as a liar would send it."""
    body = packet.body.copy()
    body[-1, place] ^= value
    return replace(packet, body=body, _wire_bytes=None)


@pytest.mark.parametrize("wrong", [0, 3, 5, 7])
def test_a_forged_packet_among_just_enough_is_noticed(wrong: int) -> None:
    sent = packets_of(data(4000), 8, 12)[2:10]
    sent[wrong] = spoil(sent[wrong])
    receiver = decoded(sent)
    assert receiver.complete
    for _ in range(2):
        with pytest.raises(CorruptGeneration, match="source 5 in round 3"):
            receiver.payload()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", range(8))
@pytest.mark.parametrize("length", [4000, 2**20 + 7])
def test_a_surplus_packet_replaces_a_forged_one(wrong: int, length: int) -> None:
    sent = packets_of(data(length), 8, 12)[2:11]
    sent[wrong] = spoil(sent[wrong])
    receiver = decoded([*sent, sent[1], sent[0]])
    assert receiver.payload() == data(length)
    assert receiver.stats.repaired
    assert receiver.payload() == data(length)


def test_two_surplus_packets_find_a_forged_one_among_many() -> None:
    """With one surplus packet any of 40 may be wrong and eight are tried; a second one tells which it is."""
    sent = packets_of(data(4000), 40, 60, mode="random")
    assert decoded(sent[:40]).complete
    for wrong in (0, 7, 8, 23, 39):
        forged = [*sent[:wrong], spoil(sent[wrong]), *sent[wrong + 1 : 42]]
        assert decoded(forged).payload() == data(4000)
        if wrong > 8:
            with pytest.raises(CorruptGeneration, match="1 surplus"):
                decoded(forged[:41]).payload()


def test_two_forged_packets_or_a_wrong_digest_fail_closed() -> None:
    sent = packets_of(data(4000), 8, 12)
    two = [spoil(sent[0]), spoil(sent[1], 9), *sent[2:12]]
    with pytest.raises(CorruptGeneration, match="4 surplus"):
        decoded(two).payload()
    with pytest.raises(CorruptGeneration, match="4 surplus"):
        decoded([replace(packet, digest=bytes(8), _wire_bytes=None) for packet in sent]).payload()


def test_a_packet_with_a_lying_vector_is_replaced_too() -> None:
    sent = packets_of(data(4000), 8, 12)
    liar = replace(sent[9], mode=Mode.SEED, number=1, _wire_bytes=None)
    receiver = decoded([liar, *sent[:7], sent[10]])
    assert receiver.payload() == data(4000)
    assert receiver.stats.repaired


def test_a_second_copy_with_another_body_convicts_the_first() -> None:
    sent = packets_of(data(4000), 8, 12)
    receiver = decoded([spoil(sent[0]), *sent[1:8], *sent[1:8], sent[0]])
    assert receiver.payload() == data(4000)


def test_a_receiver_that_failed_goes_on_and_is_not_misled_by_copies() -> None:
    """Copies of packets it has, the forged one among them, come after the symbols took their place: no evidence."""
    sent = packets_of(data(4000), 8, 16, mode="random")
    forged = [*sent[:3], spoil(sent[3]), *sent[4:8]]
    receiver = decoded(forged)
    with pytest.raises(CorruptGeneration, match="0 surplus"):
        receiver.payload()
    for packet in forged:
        assert not receiver.add(packet)
    with pytest.raises(CorruptGeneration, match="0 surplus"):
        receiver.payload()
    receiver.add(sent[9])
    receiver.add(sent[10])
    assert receiver.payload() == data(4000)
    assert receiver.stats.repaired


def test_packets_after_the_payload_is_known_change_nothing() -> None:
    sent = packets_of(data(4000), 8, 12)
    receiver = decoded(sent[:8])
    assert receiver.payload() == data(4000)
    assert not receiver.add(spoil(sent[10]))
    assert receiver.payload() == data(4000)
    assert (receiver.stats.received, receiver.stats.dependent) == (9, 1)


@pytest.mark.parametrize(
    ("length", "wanted", "shape"),
    [
        (0, 16, (1, 0, 1)),
        (1, 16, (1, 64, 1)),
        (15, 16, (1, 64, 1)),
        (16, 16, (16, 64, 1)),
        (300, 512, (5, 64, 1)),
        (61_706, 16, (16, 3904, 1)),
        (2**20, 16, (16, 65536, 1)),
        (2**20 + 7, 16, (16, 32832, 2)),
        (5 * 2**20, 1, (1, 2**20, 5)),
        (40 * 2**20, 1024, (1024, 1024, 40)),
        (40 * 2**20 - 2**19, 1023, (1023, 1024, 40)),
    ],
)
def test_how_a_payload_is_cut(length: int, wanted: int, shape: tuple[int, int, int]) -> None:
    cut = shape_of(length, wanted)
    assert (cut.symbols, cut.symbol_bytes, cut.generations) == shape
    room = cut.symbols * cut.symbol_bytes
    assert room * cut.generations >= length > room * (cut.generations - 1) or length == 0


@given(st.integers(0, 2**24), st.integers(1, 1024), st.integers(1, 64))
def test_every_cut_holds_the_payload_and_satisfies_the_receiver(length: int, wanted: int, align: int) -> None:
    cut = shape_of(length, wanted, align=align)
    room = cut.symbols * cut.symbol_bytes
    assert room * cut.generations >= length
    assert cut.generations == max(1, -(-length // max(1, room)))
    assert cut.symbol_bytes % align == 0
    assert (cut.symbol_bytes - 64) * cut.symbols * cut.generations < max(length, 1)
    assert room < 2**20 + align * cut.symbols + cut.symbols


def test_parameters_that_make_no_code_are_refused() -> None:
    good: dict[str, Any] = {"symbols": 8, "round": 1, "source": 2, "run": 3}
    for changes, message in (
        ({"shards": 7}, "shards = 7 of 8 symbols"),
        ({"symbols": 0}, "symbols = 0"),
        ({"symbols": 1025}, "symbols = 1025"),
        ({"threshold": 1}, "code 'mds'"),
        ({"threshold": -1}, "threshold"),
        ({"mode": "cauchy"}, "mode = 'cauchy'"),
        ({"align": 65}, "align = 65"),
        ({"round": -1}, "round = -1"),
        ({"source": 1 << 32}, "source"),
    ):
        with pytest.raises(ConfigError, match=message):
            encoder("rlnc", data(1000), **{**good, **changes})
    with pytest.raises(ConfigError, match="rlnc"):
        encoder("rlncc", data(1000), **good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="4294967296 bytes"):
        shape_of(1 << 32, 16)
    bounded = encoder("rlnc", data(1000), shards=10, **good)
    for index in (-1, 10):
        with pytest.raises(ConfigError, match="packets 0 to 9"):
            bounded.packet(index)


def memory_of(body: Any) -> tuple[int, int]:
    """Return where an array is and how many bytes it has."""
    return body.ctypes.data, body.nbytes


def test_bodies_that_came_as_bytes_are_not_copied() -> None:
    sent = packets_of(data(2**20 + 7), 16, 24)
    receiver = decoded(sent[4:20])
    held = receiver._held
    assert held is not None
    assert [memory_of(body) for body in held.bodies] == [memory_of(packet.body) for packet in sent[4:20]]
    assert receiver.payload() == data(2**20 + 7)
    # Symbols that arrived are still the packets' own; the combinations are no longer kept.
    assert [memory_of(body) for body in held.bodies[:12]] == [memory_of(packet.body) for packet in sent[4:16]]
    assert not {memory_of(body) for body in held.bodies[12:]} & {memory_of(packet.body) for packet in sent}


@pytest.mark.parametrize("symbols", [1, 8])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", ["bytearray", "array", "view of a view"])
def test_a_buffer_that_is_used_again_changes_nothing(symbols: int, kind: str, read_only: bool) -> None:
    """A receiver that reads every packet into the same buffer, and one that hands out read-only views of it."""
    payload = data(5000)
    sent = [packet.to_bytes() for packet in packets_of(payload, symbols, 2 * symbols, mode="random")]
    room = bytearray(max(map(len, sent)))
    decoder, recoder = Decoder(), Recoder()
    for one in sent[:symbols]:
        room[: len(one)] = one
        view = memoryview(room)[: len(one)]
        view = view.toreadonly() if read_only else view
        if kind == "array":
            view = memoryview(np.frombuffer(view, np.uint8))
        elif kind == "view of a view":
            view = memoryview(np.frombuffer(memoryview(np.frombuffer(view, np.uint8)), np.uint8))
        given_data: Any = bytearray(view) if kind == "bytearray" and not read_only else view
        packet = Packet.from_bytes(given_data, PacketLimits())
        if isinstance(given_data, bytearray):
            given_data[:] = bytes(len(given_data))
        decoder.add(packet)
        recoder.add(packet)
        room[:] = b"\xff" * len(room)
    again = decoded([recoder.recode(seed) for seed in range(4 * symbols)])
    assert decoder.payload() == again.payload() == payload


@pytest.mark.parametrize("read_only", [False, True])
def test_an_array_its_owner_writes_to_afterwards_is_copied(read_only: bool) -> None:
    payload = data(4096)
    sent = packets_of(payload, 8, 16)
    decoder = Decoder()
    for packet in sent[3:11]:
        owned = packet.body.copy()
        body = owned.view()
        body.flags.writeable = not read_only
        decoder.add(replace(packet, body=body, _wire_bytes=None))
        owned[:] = 0xA5
    assert decoder.payload() == payload


def test_a_view_that_was_writable_before_its_owner_was_read_only_is_copied() -> None:
    payload = data(4096)
    decoder = Decoder()
    for packet in packets_of(payload, 8, 16)[3:11]:
        owner = packet.body.copy()
        body = owner.view()
        owner.flags.writeable = False
        decoder.add(replace(packet, body=body, _wire_bytes=None))
        body[:] = 0xA5
    assert decoder.payload() == payload


def test_an_encoder_over_a_writable_payload_makes_packets_that_stay() -> None:
    payload = bytearray(data(4096))
    made = encoder("rlnc", payload, symbols=8, round=1, source=0, run=7).packets([1, 2, 3, 4, 5, 6, 7, 9])
    payload[:] = bytes(4096)
    assert decoded(made).payload() == data(4096)


def test_a_packet_does_not_keep_the_frame_it_was_a_part_of() -> None:
    """Limits count the packet's own bytes: a view would keep the rest of the frame in memory as well."""
    one = packets_of(data(4096), 8, 9)[8].to_bytes()
    frame = bytes(1 << 20) + one + bytes(1 << 20)
    body = Packet.from_bytes(memoryview(frame)[1 << 20 : (1 << 20) + len(one)], PacketLimits()).body
    start = np.frombuffer(frame, np.uint8).ctypes.data
    assert not start <= body.ctypes.data < start + len(frame)
    alone = Packet.from_bytes(one, PacketLimits()).body
    assert 0 < alone.ctypes.data - np.frombuffer(one, np.uint8).ctypes.data < len(one)
    np.testing.assert_array_equal(body, alone)


@pytest.mark.parametrize("generations", [1, 3])
def test_bodies_with_gaps_between_their_bytes_are_gathered(generations: int) -> None:
    payload = data(generations * 2**20)
    decoder = Decoder()
    for packet in packets_of(payload, 8, 16)[5:13]:
        assert packet.generations == generations
        spread = np.zeros((2 * packet.generations, 3 * packet.symbol_bytes), np.uint8)
        spread[::2, 1::3] = packet.body
        spread.flags.writeable = False
        decoder.add(replace(packet, body=spread[::2, 1::3], _wire_bytes=None))
    assert decoder.payload() == payload


def test_packets_of_an_encoder_are_decoded_without_becoming_bytes() -> None:
    """Their bodies are views of the payload, one symbol of each generation, that lie far apart."""
    payload = data(2**20 + 7)
    made = encoder("rlnc", payload, symbols=16, round=1, source=0, run=7).packets(range(3, 19))
    assert decoded(made).payload() == payload


def test_a_repair_leaves_packets_and_other_decoders_as_they_were() -> None:
    """Bodies are shared with packets: a correction goes into an array of its own."""
    payload = data(4000)
    sent = packets_of(payload, 8, 12)
    forged = [*sent[:3], spoil(sent[3]), *sent[4:7], sent[8]]
    before = [packet.body.tobytes() for packet in forged]
    one, two = decoded(forged), decoded([*forged, sent[9], sent[10]])
    assert two.payload() == payload
    assert two.stats.repaired
    assert [packet.body.tobytes() for packet in forged] == before
    assert one.symbol(3) == forged[3].body.tobytes()[: len(one.symbol(3))]
    with pytest.raises(CorruptGeneration, match="0 surplus"):
        one.payload()


@pytest.mark.parametrize("shape", [(7, 9), (0,), (0, 5), (3, 0, 2), ()])
def test_a_payload_may_be_any_contiguous_array_also_one_without_elements(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    made = encoder("rlnc", array, symbols=4, round=1, source=0, run=7)
    decoder = Decoder(expect=(1, 0))
    for number in range(made.symbols):
        decoder.add(Packet.from_bytes(made.packet(number).to_bytes(), PacketLimits()))
    assert decoder.payload() == array.tobytes()
