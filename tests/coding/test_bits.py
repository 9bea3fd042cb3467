"""Strings of bits: every width and count, against Python's integers; one way to write what is written."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.coding.bits import pack, packed_size, unpack, width_of
from fedcomp.coding.errors import PacketError
from fedcomp.coding.stream import SplitMix64


@pytest.mark.parametrize("count", [0, 1, 7, 63, 64, 65, 200])
def test_fields_of_every_width_are_those_of_one_long_integer(count: int) -> None:
    stream = SplitMix64(7)
    for width in range(65):
        words = stream.words(count)
        # The width's own smallest and largest numbers, and random ones: the low bits of a word, signed.
        values = [int(word) & (1 << width) - 1 for word in words]
        values = [value - (1 << width) * (width > 0 and value >> width - 1) for value in values]
        values[:2] = [-(1 << width - 1) if width else 0, (1 << width - 1) - 1 if width else 0][:count]
        found = np.array(values, np.int64)
        data = pack(found, width)
        assert int.from_bytes(data, "little") == sum((v & (1 << width) - 1) << i * width for i, v in enumerate(values))
        assert len(data) == packed_size(count, width) == -(-count * width // 8)
        np.testing.assert_array_equal(unpack(data, count, width), found)
        assert width_of(found) == (width if count else 0)


@pytest.mark.parametrize(
    ("values", "width"),
    [([0], 0), ([-1], 1), ([0, -1], 1), ([1], 2), ([-2], 2), ([127], 8), ([-128], 8), ([128], 9), ([-(2**63)], 64)],
)
def test_the_width_is_the_least_that_holds_all(values: list[int], width: int) -> None:
    assert width_of(np.array(values, np.int64)) == width


def test_residues_take_no_more_bits_than_their_modulus() -> None:
    for modulus in (2, 3, 4, 5, 255, 256, 257, 2**20 - 1, 2**32):
        ends = np.array([-(modulus // 2), modulus - modulus // 2 - 1], np.int64)
        assert width_of(ends) <= (modulus - 1).bit_length()


def test_other_lengths_and_bits_behind_the_last_field_are_refused() -> None:
    data = pack(np.array([1, -2, 3], np.int64), 3)
    for wrong, reason in ((data + b"\0", "3 bytes for 3"), (data[:-1], "1 bytes for 3"), (b"\xff\xff", "are set")):
        with pytest.raises(PacketError, match=reason):
            unpack(wrong, 3, 3)
