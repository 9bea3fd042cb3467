"""Bit packing: order of the bits, both fixed-width layouts against slow references, unary and varints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.wire import Corrupt, Truncated
from fedcomp.wire.bits import (
    VERTICAL_THRESHOLD,
    pack,
    pack_unary,
    packed_size,
    put_varint,
    shuffle,
    take_varint,
    unpack,
    unpack_unary,
    unshuffle,
)
from fedcomp.wire.gamma import gamma_size, pack_gamma, unpack_gamma


def string_reference(fields: list[int], width: int) -> bytes:
    """Pack by one big integer: field j occupies bits j*width and up."""
    number = sum((v & (1 << width) - 1) << j * width for j, v in enumerate(fields))
    return number.to_bytes((len(fields) * width + 7) // 8, "little")


def vertical_reference(fields: list[int], width: int) -> bytes:
    """Pack 64*G fields: word column g holds fields g, G+g, 2G+g, ... as one string of 64*width bits."""
    columns = len(fields) // 64
    words = [[0] * columns for _ in range(width)]
    for g in range(columns):
        number = sum((fields[j * columns + g] & (1 << width) - 1) << j * width for j in range(64))
        for w in range(width):
            words[w][g] = number >> 64 * w & (1 << 64) - 1
    return b"".join(v.to_bytes(8, "little") for row in words for v in row)


@pytest.mark.slow
@given(st.integers(1, 64), st.data())
def test_fixed_width_below_the_threshold_is_one_bit_string(width: int, data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=70))
    packed = pack(np.array(fields, np.uint64), width)
    assert packed == string_reference(fields, width)
    assert len(packed) == packed_size(len(fields), width)
    assert unpack(packed, len(fields), width).tolist() == fields


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3, 6, 8, 13, 32, 33, 61])
@pytest.mark.parametrize("extra", [0, 1, 63, 64])
def test_fixed_width_from_the_threshold_is_vertical_then_string(width: int, extra: int) -> None:
    count = VERTICAL_THRESHOLD + extra
    fields = np.random.default_rng(width).integers(0, 1 << width, count, dtype=np.uint64)
    whole = count // 64 * 64
    expected = vertical_reference(fields[:whole].tolist(), width) + string_reference(fields[whole:].tolist(), width)
    assert pack(fields, width) == expected
    assert len(expected) == packed_size(count, width)
    assert np.array_equal(unpack(expected, count, width), fields)


def test_the_vertical_layout_does_not_depend_on_how_many_columns_are_handled_at_once() -> None:
    fields = np.random.default_rng(0).integers(0, 1 << 7, 64 * 4096 + 64 * 3, dtype=np.uint64)
    assert pack(fields, 7) == vertical_reference(fields.tolist(), 7)
    assert np.array_equal(unpack(pack(fields, 7), fields.size, 7), fields)


def test_higher_bits_are_dropped() -> None:
    assert pack(np.array([0xFF, 0x12], np.uint32), 4) == b"\x2f"


def test_padding_bits_must_be_zero() -> None:
    assert unpack(b"\x15", 2, 3).tolist() == [5, 2]
    with pytest.raises(Corrupt, match="padding"):
        unpack(b"\x55", 2, 3)


@given(st.lists(st.integers(0, 40), max_size=300))
def test_unary_round_trip(numbers: list[int]) -> None:
    packed = pack_unary(np.array(numbers, np.int64))
    assert packed == string_reference([1 << n for n in numbers], 1) if not any(numbers) else True
    assert (np.diff(unpack_unary(packed, len(numbers)), prepend=-1) - 1).tolist() == numbers


def test_unary_bytes_by_hand() -> None:
    # 0 -> 1, 2 -> 001, 1 -> 01; first bit lowest: 1 001 01 -> 0b101001.
    assert pack_unary(np.array([0, 2, 1], np.uint32)) == b"\x29"


@pytest.mark.parametrize("data", [b"", b"\x29\x00", b"\x09", b"\x39"])
def test_a_unary_stream_of_another_count_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_unary(data, 3)


@pytest.mark.slow
@given(st.lists(st.integers(0, (1 << 25) - 1), max_size=200))
def test_split_gamma_round_trip(numbers: list[int]) -> None:
    array = np.array(numbers, np.uint32)
    packed = pack_gamma(array)
    assert len(packed) == gamma_size(array)
    assert unpack_gamma(packed, len(numbers), 25).tolist() == numbers
    bits = sum(2 * ((n + 1).bit_length() - 1) + 1 for n in numbers)
    assert bits <= 8 * len(packed) < bits + 8 * 27


def test_split_gamma_rejects_a_longer_code() -> None:
    packed = pack_gamma(np.array([6, 0, 1], np.uint32))
    assert unpack_gamma(packed, 3, 2).tolist() == [6, 0, 1]
    with pytest.raises(Corrupt):
        unpack_gamma(packed, 3, 1)
    with pytest.raises(Corrupt):
        unpack_gamma(packed + b"\x00", 3, 2)
    with pytest.raises(Corrupt):
        unpack_gamma(packed[:-1], 3, 2)


@given(st.integers(0, 2**63 - 1))
def test_varint_round_trip(value: int) -> None:
    data = put_varint(value)
    assert len(data) == max(1, (value.bit_length() + 6) // 7)
    assert take_varint(data, 0, len(data)) == (value, len(data))


def test_varint_limits() -> None:
    assert put_varint(300) == b"\xac\x02"
    with pytest.raises(Truncated):
        take_varint(b"\x80", 0, 1)
    with pytest.raises(Truncated):
        take_varint(b"", 0, 0)
    with pytest.raises(Corrupt, match=r"2\*\*63"):
        take_varint(b"\xff" * 9 + b"\x01", 0, 10)
    with pytest.raises(Corrupt, match="ten bytes"):
        take_varint(b"\xff" * 10 + b"\x01", 0, 11)
    with pytest.raises(Corrupt, match="shortest"):
        take_varint(b"\x80\x00", 0, 2)


def test_shuffle_groups_bytes_by_significance() -> None:
    array = np.array([0x0102, 0x0304], "<u2")
    assert shuffle(array) == b"\x02\x04\x01\x03"
    assert unshuffle(shuffle(array), array.dtype).tolist() == array.tolist()
