"""Lists of ids, and norms, as bytes: exact, short, and nothing else comes out of bytes from anyone."""

from __future__ import annotations

import graph_frames as damage
import numpy as np
import pytest

from fedcomp import wire
from fedcomp.graphs.base import MAX_NODES, GraphError
from fedcomp.graphs.ids import decode_ids, decode_norms, encode_ids, encode_norms, put_ids, put_varints, take_varints
from fedcomp.rng import Key
from fedcomp.wire.bits import put_varint

GOLDEN = {
    (): "464347020100001ac16372",
    (0,): "4643470201010100402ecb37",
    (0, 1, 2, 130, 131, 40_000): "464347020106080000007f00bcb7028853cbab",
    (5, (1 << 62) - 1): "4643470201020a05f9ffffffffffffff3f5db2c354",
}
LIST = np.array([0, 1, 2, 130, 131, 40_000])


def drawn(nodes: int, count: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` different ids."""
    return np.unique(Key(seed, "ids").bits(4 * count) % np.uint64(nodes)).astype(np.int64)[:count]


def framed(count: int, section: bytes, tail: bytes = b"") -> bytes:
    """Return the frame that claims ``count`` ids, with this section of gaps."""
    return damage.sealed(b"FCG\x02\x01" + put_varint(count) + put_varint(len(section)) + section + tail)


@pytest.mark.parametrize("ids", GOLDEN)
def test_golden_bytes(ids: tuple[int, ...]) -> None:
    assert encode_ids(ids).hex() == GOLDEN[ids]
    assert decode_ids(bytes.fromhex(GOLDEN[ids])).tolist() == list(ids)


def test_varints_are_leb128_of_every_length() -> None:
    edges = [(1 << 7 * j) + step for j in range(1, 9) for step in (-1, 0, 1)]
    values = np.array([0, *edges, (1 << 63) - 1, 3, 1 << 62])
    section = put_varints(values)
    assert section == b"".join(put_varint(int(v)) for v in values)
    assert take_varints(section, values.size).tolist() == values.tolist()
    mixed = (Key(1, "varints").bits(5000) >> (Key(2, "varints").bits(5000) % np.uint64(63) + np.uint64(1))).astype(
        np.int64
    )
    assert put_varints(mixed) == b"".join(put_varint(int(v)) for v in mixed)
    assert take_varints(put_varints(mixed), mixed.size).tolist() == mixed.tolist()
    assert take_varints(put_varints(np.zeros(0, np.int64)), 0).size == 0


@pytest.mark.parametrize("nodes", [1, 128, 300, 200_000, 1 << 40, MAX_NODES])
def test_round_trip(nodes: int) -> None:
    ids = drawn(nodes, min(nodes, 2000))
    found = decode_ids(encode_ids(ids, nodes=nodes), nodes=nodes, limit=ids.size)
    assert found.dtype == np.int64
    assert found.tolist() == ids.tolist()


def test_an_id_takes_one_to_two_bytes() -> None:
    """As many as its gap needs; beside that a frame has 13 bytes at most, for lists of this length."""
    for nodes, count in ((2708, 400), (20_000, 500), (200_000, 300)):
        ids = drawn(nodes, count)
        gaps = np.diff(ids, prepend=-1) - 1
        assert len(encode_ids(ids)) == 13 + int(np.where(gaps < 128, 1, 2).sum() + (gaps >= 1 << 14).sum())
        assert len(encode_ids(ids)) < 13 + 2.05 * count


@pytest.mark.parametrize(
    "ids",
    [[1, 1], [2, 1], [-1, 3], [0.0, 1.0], [[1, 2]], [5, 10], [3, -(1 << 62), 4], np.array([1 << 63], np.uint64)],
    ids=str,
)
def test_only_ascending_ids_of_the_graph_are_encoded(ids: list) -> None:
    with pytest.raises(GraphError):
        encode_ids(ids, nodes=10)


def test_the_first_wrong_pair_is_named() -> None:
    with pytest.raises(GraphError, match="7 stands before 7"):
        encode_ids([1, 7, 7, 3])


def test_ids_beyond_the_graph_or_the_agreed_number_are_refused() -> None:
    frame = encode_ids(LIST)
    assert decode_ids(frame, nodes=40_001, limit=6).tolist() == LIST.tolist()
    with pytest.raises(wire.Corrupt, match="beyond"):
        decode_ids(frame, nodes=40_000)
    with pytest.raises(wire.LimitExceeded, match="at most 5"):
        decode_ids(frame, limit=5)
    # Each gap is possible, their sum is not: also where it would wrap around 64 bits.
    with pytest.raises(wire.Corrupt, match="beyond"):
        decode_ids(framed(3, put_varints(np.array([4, 4, 4]))), nodes=10)
    with pytest.raises(wire.Corrupt, match="beyond"):
        decode_ids(framed(8, put_varints(np.full(8, MAX_NODES - 1))))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (framed(2, b"\x05\x80\x00"), wire.Corrupt),
        (framed(1, b"\x80" * 9 + b"\x01"), wire.Corrupt),
        (framed(1, b"\xff" * 8 + b"\x7f"), wire.Corrupt),
        (framed(2, b"\xff" * 9 + b"\x01\x05"), wire.Corrupt),
        (framed(2, b"\x05"), wire.Corrupt),
        (framed(1, b"\x05\x06"), wire.Corrupt),
        (framed(1, b"\x85"), wire.Corrupt),
        (framed(0, b"\x05"), wire.Corrupt),
        (framed(1, b"\x05", b"\x00"), wire.Corrupt),
        (damage.sealed(b"FCG\x02\x01\x02\x09\x05"), wire.Truncated),
        (damage.sealed(b"FCG\x02\x02\x00\x00"), wire.Corrupt),
        (damage.sealed(b"FCG\x01\x01\x00\x00"), wire.UnsupportedVersion),
        (damage.sealed(b"FCW\x01\x01\x00\x00"), wire.BadMagic),
        (b"FCG\x02\x01\x00\x00", wire.Truncated),
        (encode_ids([3])[:-1] + b"\x00", wire.ChecksumMismatch),
    ],
)
def test_a_list_has_one_encoding_and_everything_else_an_error(frame: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_ids(frame)


def test_damaged_lists_are_refused() -> None:
    frame = encode_ids(LIST)
    damage.refuses_every_truncation_and_flip(decode_ids, frame)
    damage.refuses_every_sealed_truncation(decode_ids, frame)


@pytest.mark.slow
def test_fuzzed_lists_give_ascending_ids_or_wire_errors() -> None:
    def decode(frame: bytes) -> None:
        ids = decode_ids(frame, nodes=60_000)
        assert (np.diff(ids) > 0).all()
        assert ids.size == 0 or 0 <= ids[0] <= ids[-1] < 60_000
        assert encode_ids(ids) == frame

    frames = [encode_ids(LIST), encode_ids(drawn(50_000, 90)), encode_ids([]), encode_ids([7])]
    damage.survives_mutants(decode, frames, 1200, seed=1, most=60_000)


def test_claimed_numbers_allocate_nothing() -> None:
    claims = damage.sealed(b"FCG\x02\x01" + put_varint(1 << 60) + put_varint(1 << 60) + b"\x01" * 64)
    assert damage.memory_of(lambda: decode_ids(claims)) < 20_000
    # Honest bytes take a bounded multiple of their own length.
    ids = drawn(1 << 30, 20_000)
    frame = encode_ids(ids)
    assert damage.memory_of(lambda: decode_ids(frame)) < 40 * len(frame)


def test_norms_are_four_bytes_beside_their_ids() -> None:
    ids, norms = np.array([2, 3, 200]), np.array([0.5, 0.0, 1.25])
    frame = encode_norms(ids, norms)
    assert frame.hex() == "464347020303040200c4010000003f000000000000a03f91f53f6c"
    assert len(frame) == 9 + len(put_ids(ids)) + 12
    found, values = decode_norms(frame, nodes=201, limit=3)
    assert found.tolist() == ids.tolist()
    assert values.dtype == np.float32
    assert values.tolist() == norms.tolist()
    damage.refuses_every_truncation_and_flip(decode_norms, frame)
    damage.refuses_every_sealed_truncation(decode_norms, frame)
    damage.survives_mutants(lambda f: decode_norms(f, nodes=300), [frame], 300, seed=4, most=30_000)
    for bad in ([1, -1, 1], [1, np.nan, 1], [1, 1e39, 1], [1, 2]):
        with pytest.raises(GraphError):
            encode_norms(ids, bad)
    for bits_, error in ((b"\x00\x00\x80\xbf", wire.Corrupt), (b"\x00\x00\xc0\x7f", wire.NonFinite)):
        with pytest.raises(error):
            decode_norms(damage.sealed(frame[:-8] + bits_))
    with pytest.raises(wire.LimitExceeded):
        decode_norms(frame, limit=2)
    with pytest.raises(wire.Corrupt):
        decode_norms(frame, nodes=200)
