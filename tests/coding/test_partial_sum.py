"""A group's sum as bytes: exact at any width, parsed with the receiver's own limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import PacketError
from fedcomp.coding.partial import GroupPart, PartialSum, empty_sum
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

EDGES = [0, 1, -1, 127, -128, 128, 2**15 - 1, 2**15, -(2**31), 2**31, 2**62, -(2**62)]


@pytest.mark.long
@given(
    st.lists(st.sampled_from(EDGES), max_size=20),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2**40), st.binary(max_size=9)), max_size=4, unique_by=lambda p: p[0]
    ),
)
def test_what_is_written_is_read(values, parts) -> None:
    made = PartialSum(np.array(values, np.int64), tuple(GroupPart(i, w, 2**63, 5, note) for i, w, note in parts))
    data = made.to_bytes()
    read = PartialSum.from_bytes(data, len(values), range(10))
    np.testing.assert_array_equal(read.integers, made.integers)
    assert read.parts == made.parts
    assert read.to_bytes() == data
    largest = max((abs(v) for v in values), default=0)
    width = (len(data) - PartialSum(np.zeros(0, np.int64), made.parts).to_bytes().__len__()) / max(1, len(values))
    assert not values or 2 ** (8 * width - 9) <= max(largest, 1) * 2


def test_sums_are_exact_whatever_the_grouping() -> None:
    vectors = [SplitMix64(i).below(2001, 50) - 1000 for i in range(7)]
    parts = [GroupPart(i, 3 * i + 1, i, i) for i in range(7)]
    truth = sum(int(p.weight) * v for p, v in zip(parts, vectors, strict=True))
    for cuts in ((7,), (3, 4), (1, 1, 5), (2, 2, 3)):
        start, total = 0, empty_sum(50)
        for size in cuts:
            group = empty_sum(50)
            for i in range(start, start + size):
                group = group.plus(vectors[i], parts[i])
            total, start = total.merged(PartialSum.from_bytes(group.to_bytes(), 50, range(7))), start + size
        np.testing.assert_array_equal(total.integers, truth)
        assert total.weight == sum(p.weight for p in parts)
        assert total.parts == tuple(parts)


def test_a_sum_that_could_wrap_is_refused() -> None:
    big = np.array([2**62], np.int64)
    with pytest.raises(ConfigError, match="64 bits"):
        empty_sum(1).plus(big, GroupPart(0, 2, 0, 0))
    once = empty_sum(1).plus(big, GroupPart(0, 1, 0, 0))
    for wrong in (
        lambda: once.merged(once),
        lambda: once.plus(big, GroupPart(1, 1, 0, 0)),
        lambda: once.merged(empty_sum(2)),
    ):
        with pytest.raises(ConfigError, match="64 bits"):
            wrong()
    with pytest.raises(ConfigError, match="do not fit"):
        empty_sum(2).plus(big, GroupPart(0, 1, 0, 0))
    assert once.merged(empty_sum(1)).largest == 2**62


@pytest.mark.long
def test_bytes_of_unknown_senders_raise_typed_errors_only() -> None:
    good = empty_sum(4).plus(np.array([300, -2, 0, 9]), GroupPart(1, 2, 3, 4, b"note")).to_bytes()
    for data, reason in (
        (b"", "head alone"),
        (b"XXXX" + good[4:], "begins with"),
        (good[:4] + b"\x09" + good[5:], "9 bytes per integer"),
        (good[:-1], "bytes for 4 integers"),
        (good + b"x", "bytes for 4 integers"),
        (good[:20], "before its 1 members"),
        (good[:12] + b"\x07" + good[13:], "member 7 is not of this group"),
        (good[:40] + b"\xff\xff\xff\x7f" + good[44:], "note of member 1"),
    ):
        with pytest.raises(PacketError, match=reason):
            PartialSum.from_bytes(data, 4, {1})
    with pytest.raises(PacketError, match="expects 5"):
        PartialSum.from_bytes(good, 5, {1})
    twice = PartialSum(np.zeros(1, np.int64), (GroupPart(1, 1, 1, 1), GroupPart(1, 1, 1, 1))).to_bytes()
    with pytest.raises(PacketError, match="twice"):
        PartialSum.from_bytes(twice, 1, {1})
    stream = SplitMix64(4)
    for _ in range(2000):
        position, value = (int(x) for x in (stream.below(len(good), 1)[0], stream.below(256, 1)[0]))
        mutant = good[:position] + bytes([value]) + good[position + 1 :]
        try:
            PartialSum.from_bytes(mutant, 4, {1})
        except PacketError:
            continue
