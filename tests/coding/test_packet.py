"""A packet's bytes, its limits, and what comes out of bytes that are no packet.

| property | test |
|---|---|
| bytes of every coefficient mode and field | test_golden_bytes, test_every_field_stands_at_its_offset |
| corrupted, truncated, wrong K, a symbol of 4 GiB: typed errors | test_every_..., test_a_hundred_thousand_... |
| nothing is allocated from a claim | test_claims_..., test_a_decoder_allocates_..., test_mutated_packets_... |
| a seed and its dense vector mean the same | test_a_seed_and_its_dense_vector_are_the_same_row |

Mixed rounds, sources and payloads are refused by what collects packets: test_rlnc.py.
"""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.encoder import encoder
from fedcomp.coding.errors import NotDecodable, PacketError
from fedcomp.coding.packet import FIELDS, HEADER_BYTES, Mode, Packet, PacketLimits, cauchy_rows, shorter_mode
from fedcomp.coding.rlnc import Decoder
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

LIMITS = PacketLimits(max_symbols=64, max_symbol_bytes=4096, max_payload=1 << 16, max_generations=8)
BODY = np.arange(8, dtype=np.uint8).reshape(2, 4)
HEAD = "040302010d0c0b0a"  # round 0x01020304, source 0x0a0b0c0d


def packet(mode: Mode, number: int = 0, vector: list[int] | None = None, **changes: Any) -> Packet:
    """Return a packet with the body and the header of the golden ones."""
    dtype = FIELDS[changes.get("field", 0)].dtype
    parts: dict[str, Any] = {
        "mode": mode,
        "number": number,
        "vector": None if vector is None else np.array(vector, dtype),
        "round": 0x01020304,
        "source": 0x0A0B0C0D,
        "symbols": 4,
        "payload_bytes": 29,
        "digest": bytes(range(0xD0, 0xD8)),
        "body": BODY,
    }
    return Packet(**{**parts, **changes})


GOLDEN = {
    "systematic": (
        packet(Mode.SYSTEMATIC, 3),
        f"524c01000000{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d776e0b22203000001020304050607",
    ),
    "seed": (
        packet(Mode.SEED, 0x0123456789ABCDEF),
        f"524c01000100{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d7d161e524efcdab89674523010001020304050607",
    ),
    "dense, recoded": (
        packet(Mode.DENSE, vector=[1, 2, 3, 255], recoded=True),
        f"524c01000202{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d70b3b85ae010203ff0001020304050607",
    ),
    "sparse, recoded": (
        packet(Mode.SPARSE, vector=[0, 0, 7, 0], recoded=True),
        f"524c01000302{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d79808c0f701000200070001020304050607",
    ),
    "cauchy, later generations": (
        packet(Mode.CAUCHY, 2, first_generation=5),
        f"524c01000400{HEAD}050002000400040000001d000000d0d1d2d3d4d5d6d7b38d55a402000001020304050607",
    ),
    "dense over 251": (
        packet(Mode.DENSE, vector=[0, 1, 250, 7], field=1),
        f"524c01010200{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d70e1204400001fa070001020304050607",
    ),
    "sparse over 65521": (
        packet(Mode.SPARSE, vector=[0, 65520, 0, 7], field=2),
        f"524c01020300{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d77092e36b02000100f0ff030007000001020304050607",
    ),
    "seed over 2^31-1": (
        packet(Mode.SEED, 5, field=3),
        f"524c01030100{HEAD}000002000400040000001d000000d0d1d2d3d4d5d6d7a22a15e905000000000000000001020304050607",
    ),
}


def sealed(header: bytes, rest: bytes) -> bytes:
    """Return a packet with the right checksum over whatever header and rest say."""
    return header[:36] + struct.pack("<I", zlib.crc32(header[:36] + rest)) + rest


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    made, expected = GOLDEN[name]
    assert made.to_bytes().hex() == expected
    read = Packet.from_bytes(bytes.fromhex(expected), LIMITS)
    assert read.to_bytes().hex() == expected
    assert read.wire_bytes == made.wire_bytes == len(expected) // 2
    assert np.array_equal(read.row(), made.row())
    assert np.array_equal(read.body, BODY)


def test_every_field_stands_at_its_offset() -> None:
    data = GOLDEN["cauchy, later generations"][0].to_bytes()
    values = struct.unpack_from("<HBBBBIIHHHII8s", data)
    expected = (0x4C52, 1, 0, 4, 0, 0x01020304, 0x0A0B0C0D, 5, 2, 4, 4, 29, bytes(range(0xD0, 0xD8)))
    assert values == expected
    assert HEADER_BYTES == 40
    assert int.from_bytes(data[36:40], "little") == zlib.crc32(data[:36] + data[40:])
    assert data[40:] == b"\x02\x00" + BODY.tobytes()


def test_the_packet_of_a_payload_is_pinned_from_cut_to_checksum() -> None:
    """The example of docs/formats/packets.md: 130 bytes in two symbols of 128, parity 8b f1 ... of row 1/2, 1/3."""
    made = encoder("mds", bytes(range(130)), symbols=2, round=1, source=2, run=3, shards=3).packet(2)
    data = made.to_bytes()
    header = "524c01000400010000000200000000000100020080000000820000000fcf3ac1d5a4d53a74a9b485"
    assert data[:40].hex() == header
    assert data[40:58].hex() == "0000" + "8bf1018f028c038d048a058b06880789"
    assert len(data) == 40 + 2 + 128
    # Symbol 1 is 80 81 and padding, so from byte 2 on the parity is symbol 0 divided by 2 alone: even bytes are halved.
    assert data[42 + 2 : 42 + 128 : 2] == bytes(range(1, 64))
    assert hashlib.sha256(data).hexdigest() == "94a6593b35a6d35bb78d810a93e5eb88787396b510078c5c2f5ce6f8ab859a57"


@pytest.mark.parametrize(
    ("vector", "field", "expected"),
    [([1, 2, 3, 4], 0, Mode.DENSE), ([0] * 9 + [1], 0, Mode.SPARSE), ([0, 0, 0, 9, 1], 0, Mode.DENSE)],
)
def test_the_shorter_form_of_a_vector_is_chosen(vector: list[int], field: int, expected: Mode) -> None:
    row = np.array(vector, FIELDS[field].dtype)
    assert shorter_mode(row) is expected
    lengths = {mode: packet(mode, vector=vector, symbols=len(vector)).wire_bytes for mode in (Mode.DENSE, Mode.SPARSE)}
    assert lengths[expected] == min(lengths.values())


def test_a_seed_and_its_dense_vector_are_the_same_row() -> None:
    for field in range(4):
        seeded = packet(Mode.SEED, 77, field=field)
        dense = packet(Mode.DENSE, vector=seeded.row().tolist(), field=field)
        read = Packet.from_bytes(dense.to_bytes(), LIMITS)
        assert np.array_equal(read.row(), seeded.row())
        assert read.row().dtype == FIELDS[field].dtype
    assert packet(Mode.SEED, 77, field=2).row().tolist() == SplitMix64(77).below(65521, 4).tolist()


@pytest.mark.parametrize("field", [1, 2, 3])
def test_cauchy_rows_over_prime_fields_are_reciprocals(field: int) -> None:
    order = FIELDS[field].order
    row = packet(Mode.CAUCHY, 3, field=field).row()
    assert [int(value) * (4 + 3 - j) % order for j, value in enumerate(row)] == [1] * 4


def test_an_encoded_body_is_its_own_symbols() -> None:
    """The body is a view of the bytes it came in: nothing is copied, nothing can be written."""
    data = GOLDEN["systematic"][0].to_bytes()
    read = Packet.from_bytes(data, LIMITS)
    assert np.shares_memory(read.body, np.frombuffer(data, np.uint8))
    assert not read.body.flags.writeable


@pytest.mark.slow
@given(
    st.sampled_from(list(Mode)),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 2**64 - 1),
)
def test_every_packet_reads_back_as_it_was_written(
    mode: Mode, field: int, symbols: int, generations: int, units: int, seed: int
) -> None:
    order, dtype = FIELDS[field]
    stream = SplitMix64(seed)
    vector = stream.below(order, symbols).astype(dtype) if mode in (Mode.DENSE, Mode.SPARSE) else None
    if mode is Mode.SPARSE and vector is not None:
        vector[::2] = 0
    numbers = {Mode.SYSTEMATIC: seed % symbols, Mode.SEED: seed, Mode.CAUCHY: seed % 200}
    body = stream.below(order, generations * units).astype(dtype).view(np.uint8).reshape(generations, -1)
    made = Packet(
        mode=mode,
        number=numbers.get(mode, 0),
        vector=vector,
        round=seed % 2**32,
        source=7,
        symbols=symbols,
        payload_bytes=generations,
        digest=bytes(8),
        body=body,
        field=field,
        first_generation=seed % 4,
        recoded=vector is not None and seed % 2 == 0,
    )
    data = made.to_bytes()
    read = Packet.from_bytes(data, LIMITS)
    assert read.to_bytes() == data
    for name in ("mode", "number", "round", "source", "symbols", "payload_bytes", "digest", "field"):
        assert getattr(read, name) == getattr(made, name)
    assert (read.first_generation, read.recoded) == (made.first_generation, made.recoded)
    assert np.array_equal(read.row(), made.row())
    assert np.array_equal(read.body, made.body)


OFFSETS = {
    "version": (2, "<B"),
    "field": (3, "<B"),
    "mode": (4, "<B"),
    "flags": (5, "<B"),
    "generations": (16, "<H"),
    "K": (18, "<H"),
    "S": (20, "<I"),
    "payload_len": (24, "<I"),
}


def forged(data: bytes, rest: bytes | None = None, **claims: int) -> bytes:
    """Return the packet with other claims in its header, and its checksum right again."""
    header = bytearray(data[:40])
    for name, value in claims.items():
        offset, kind = OFFSETS[name]
        struct.pack_into(kind, header, offset, value)
    return sealed(bytes(header), data[40:] if rest is None else rest)


BASE = GOLDEN["systematic"][0].to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header alone has 40"),
        (BASE[:39], "header alone has 40"),
        (b"XX" + BASE[2:], "magic"),
        (forged(BASE, version=2), "version 2"),
        (forged(BASE, field=4), "field 4"),
        (forged(BASE, mode=5), "mode 5"),
        (forged(BASE, flags=1), "encrypted"),
        (forged(BASE, flags=4), "flags 0x04"),
        (forged(BASE, flags=2), "no seed and no row"),
        (forged(GOLDEN["seed"][0].to_bytes(), flags=2), "mode SEED"),
        (forged(BASE, K=0), "at least one"),
        (forged(BASE, generations=0), "at least one"),
        (forged(BASE, K=65), "K = 65; this receiver accepts at most 64"),
        (forged(BASE, S=0xFFFFFFFF), "S = 4294967295; this receiver accepts at most 4096"),
        (forged(BASE, payload_len=0xFFFFFFFF), "payload_len = 4294967295"),
        (forged(BASE, generations=9), "generations = 9"),
        (forged(BASE, generations=7), "7 symbols of 4 bytes"),
        (forged(BASE, S=5), "2 symbols of 5 bytes"),
        (forged(BASE, K=3), "systematic index 3 of K = 3"),
        (forged(BASE, b"\x04\x00" + BASE[42:]), "systematic index 4"),
        (forged(BASE, b"\xfc\x00" + BASE[42:], mode=4), "Cauchy row 252"),
        (forged(BASE, BASE[40:42], S=0), "symbols of 0 bytes"),
        (forged(BASE, BASE[40:42] + bytes(6), field=2, S=3), "multiple"),
        (forged(BASE, b"\x05\x00" + BASE[42:], mode=3), "5 sparse coefficients for K = 4"),
        (forged(BASE, b"\x01", mode=3), "before its sparse"),
        (forged(BASE, b"\x02\x00" + b"\x02\x00\x07" * 2 + BASE[42:], mode=3), "ascending"),
        (forged(BASE, b"\x01\x00" + b"\x04\x00\x07" + BASE[42:], mode=3), "ascending"),
        (forged(BASE, b"\x01\x00" + b"\x01\x00\x00" + BASE[42:], mode=3), "none of them zero"),
        (forged(BASE, bytes([1, 2, 3, 251]) + BASE[42:], mode=2, field=1), "coefficient is 251"),
        (forged(BASE, BASE[40:42] + b"\xff" * 8, field=2), "symbol is 65535"),
        (BASE[:-1], "bytes; the header says"),
        (BASE + b"\0", "bytes; the header says"),
        (BASE[:20] + b"\x05" + BASE[21:], "bytes; the header says"),
        (BASE[:-1] + b"\xff", "checksum"),
    ],
)
def test_every_wrong_packet_has_its_error(data: bytes, message: str) -> None:
    with pytest.raises(PacketError, match=message):
        Packet.from_bytes(data, LIMITS)


def test_every_corrupted_byte_and_every_truncation_is_noticed() -> None:
    for data in (made.to_bytes() for made, _ in GOLDEN.values()):
        for place in range(len(data)):
            with pytest.raises(PacketError):
                Packet.from_bytes(data[:place], LIMITS)
            with pytest.raises(PacketError):
                Packet.from_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :], LIMITS)


def test_claims_of_a_header_allocate_nothing() -> None:
    """4 GiB symbols, 65535 symbols, 65535 generations: refused by limits as wide as the header, without the memory."""
    wide = PacketLimits(max_symbols=1024, max_symbol_bytes=1 << 32, max_payload=1 << 32, max_generations=1 << 17)
    claims = [
        forged(BASE, S=0xFFFFFFFF, payload_len=0xFFFFFFFF),
        forged(BASE, S=0xFFFFFFFF, generations=0xFFFF),
        forged(BASE, K=0xFFFF, mode=2),
        forged(BASE, K=1024, S=0xFFFFFFF0, mode=3),
    ]
    tracemalloc.start()
    try:
        for data in claims:
            with pytest.raises(PacketError):
                Packet.from_bytes(data, wide)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


@pytest.mark.parametrize(
    "claims",
    [
        {"K": 1024, "payload_len": 1},  # 1024 symbols of 1 MiB for a payload of one byte
        {"K": 1024, "payload_len": 1 << 28},
        {"K": 1, "payload_len": 1 << 28},
        {"K": 1024, "payload_len": 0},
    ],
)
def test_a_decoder_allocates_no_more_than_the_payload_it_accepts(claims: dict[str, int]) -> None:
    """A megabyte of real body, whose header makes it one of many: the shape must fit the payload, which is limited."""
    limits = PacketLimits(max_payload=1 << 22)
    body = bytes(1 << 20)
    data = forged(BASE, b"\0\0" + body, S=len(body), generations=1, **claims)
    tracemalloc.start()
    try:
        with pytest.raises(PacketError):
            Decoder(limits=limits).add(Packet.from_bytes(data, limits))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def mutations(count: int, seed: int) -> Any:
    """Yield ``count`` packets, each damaged in one to four places; three in four with the checksum made right again."""
    payload = SplitMix64(1).bytes(700).tobytes()
    sources = [made.to_bytes() for made, _ in GOLDEN.values()]
    for code in ("rlnc", "mds"):
        sources += [
            one.to_bytes() for one in encoder(code, payload, symbols=3, round=1, source=2, run=3).packets(range(5))
        ]
    chosen = SplitMix64(seed).words(8 * count).reshape(count, 8)
    interesting = (0, 1, 0x7F, 0x80, 0xFF)
    for numbers in chosen.tolist():
        data = bytearray(sources[numbers[0] % len(sources)])
        for number in numbers[1 : 2 + numbers[6] % 4]:
            kind, place = number % 5, (number >> 8) % (len(data) if number & 0x80 else min(len(data), 60))
            if kind == 0:
                data[place] ^= 1 << (number >> 40) % 8
            elif kind == 1:
                data[place] = interesting[(number >> 40) % 5]
            elif kind == 2:
                data[place] = number >> 56
            elif kind == 3:
                del data[place:][: (number >> 40) % 9]
                data = data[: max(1, len(data) - (number >> 48) % 5)]
            else:
                data[place:place] = bytes([number >> 56]) * ((number >> 40) % 5)
        if numbers[7] % 4 and len(data) >= 40:
            data[:] = sealed(bytes(data[:40]), bytes(data[40:]))
        yield bytes(data)


def swallow(data: bytes) -> bool:
    """Parse and decode; return whether the packet was accepted. Anything but PacketError comes out."""
    try:
        read = Packet.from_bytes(data, LIMITS)
    except PacketError:
        return False
    assert read.to_bytes() == data, "an accepted packet has one form only"
    assert read.row().shape == (read.symbols,)
    try:
        Decoder(limits=LIMITS).add(read)
    except PacketError:
        return False
    return True


@pytest.mark.slow
def test_a_hundred_thousand_mutated_packets_give_packet_errors_or_packets() -> None:
    accepted = sum(swallow(data) for data in mutations(100_000, seed=11))
    assert 1_000 < accepted < 50_000, "mutations reach beyond the checksum, and most are refused"


@pytest.mark.slow
def test_mutated_packets_allocate_only_what_the_limits_bound() -> None:
    samples = list(mutations(3_000, seed=12))
    tracemalloc.start()
    try:
        for data in samples:
            swallow(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_limits_and_parts_that_make_no_packet_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_payload"):
        PacketLimits(max_payload=0)
    good = packet(Mode.SYSTEMATIC, 3)
    for changes, message in (
        ({"body": BODY.astype(np.int16)}, "body"),
        ({"body": BODY.ravel()}, "body"),
        ({"field": 9}, "field"),
        ({"vector": np.zeros(4, np.uint8)}, "DENSE and SPARSE have a vector"),
        ({"mode": Mode.DENSE, "number": 0}, "DENSE and SPARSE have a vector"),
        ({"mode": Mode.DENSE, "number": 0, "vector": np.zeros(5, np.uint8)}, "vector is"),
        ({"mode": Mode.DENSE, "number": 0, "vector": np.zeros(4, np.int64)}, "vector is"),
        ({"mode": Mode.DENSE, "vector": np.zeros(4, np.uint8)}, "number 3"),
        ({"number": 4}, "systematic index 4"),
        ({"mode": Mode.SEED, "number": -1}, "64 bits"),
        ({"recoded": True}, "recoded"),
        ({"digest": b"short"}, "digest"),
        ({"round": 1 << 32}, "round"),
        ({"source": -1}, "source"),
        ({"payload_bytes": 1 << 32}, "payload_bytes"),
        ({"first_generation": 1 << 16}, "first_generation"),
        ({"symbols": 0, "number": 0}, "at least one"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(good, **changes)


def test_cauchy_rows_end_where_the_field_does() -> None:
    assert cauchy_rows([255 - 16], 16).shape == (1, 16)
    for rows in ([256 - 16], [-1]):
        with pytest.raises(ConfigError, match="at most 256"):
            cauchy_rows(rows, 16)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_d5_numbers_out_of_an_array_are_numbers(kind: type) -> None:
    """Before, numpy's own integers ended in an AttributeError when the packet was written."""
    for made in (packet(Mode.SYSTEMATIC, 3), packet(Mode.SEED, 5), packet(Mode.CAUCHY, 2)):
        names = ("number", "round", "source", "symbols", "payload_bytes", "first_generation")
        again = replace(made, **{name: kind(getattr(made, name)) for name in names}, _wire_bytes=None)
        assert again.to_bytes() == made.to_bytes()
        assert all(type(getattr(again, name)) is int for name in names)
    given = {"symbols": 3, "round": 7, "source": 2, "run": 99}
    plain = encoder("rlnc", b"payload", shards=6, **given).packets(range(6))
    found = encoder("rlnc", b"payload", shards=6, **{k: kind(v) for k, v in given.items()}).packets(
        np.arange(6, dtype=kind)
    )
    assert [p.to_bytes() for p in found] == [p.to_bytes() for p in plain]
    with pytest.raises(ConfigError, match=r"source = 1\.5"):
        replace(packet(Mode.SYSTEMATIC, 3), source=1.5, _wire_bytes=None)


def test_d5_of_a_packet_of_zeros_nothing_is_determined() -> None:
    """Before, a ValueError of numpy's."""
    decoder = Decoder()
    zeros = Packet(Mode.DENSE, 0, np.zeros(3, np.uint8), 1, 2, 3, 24, bytes(8), np.zeros((1, 8), np.uint8))
    assert decoder.add(zeros) is False
    assert decoder.partial() == {}
    assert decoder.states() == ["missing"] * 3
    with pytest.raises(NotDecodable):
        decoder.payload()
