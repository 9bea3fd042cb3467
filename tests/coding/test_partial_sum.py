"""A group's sum as bytes: exact at any width, parsed with the receiver's own limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import PacketError
from fedcomp.coding.partial import MAX_WEIGHT, GroupPart, PartialSum, empty_sum
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

EDGES = [0, 1, -1, 127, -128, 128, 2**15 - 1, 2**15, -(2**31), 2**31, 2**62, -(2**62)]


ANY = 2**70
"""A bound on integers that none exceeds."""


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(EDGES), max_size=20),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, MAX_WEIGHT - 1), st.binary(max_size=9)),
        min_size=1,
        max_size=4,
        unique_by=lambda p: p[0],
    ),
)
def test_what_is_written_is_read(values, parts) -> None:
    made = PartialSum(np.array(values, np.int64), tuple(GroupPart(i, w, 2**63, 5, note) for i, w, note in parts))
    data = made.to_bytes()
    read = PartialSum.from_bytes(data, len(values), dict.fromkeys(range(10), 2**63), ANY)
    np.testing.assert_array_equal(read.integers, made.integers)
    assert read.parts == made.parts
    assert read.to_bytes() == data
    width = max(((v if v >= 0 else ~v).bit_length() + 1 for v in values), default=0) if any(values) else 0
    assert len(data) == 12 + made.member_bytes + -(-width * len(values) // 8)


def test_the_bytes_are_those_of_the_format() -> None:
    """Three integers of five bits and one member: magic, 5, 0, one part, three integers; the part; 9 | -16 | 3."""
    made = PartialSum(np.array([9, -16, 3], np.int64), (GroupPart(7, 2, 3, 4, b"note"),))
    assert made.to_bytes().hex() == (
        "46505332"
        "0500"
        "0100"
        "03000000"
        "07000000" + "0200000000000000" + "0300000000000000" + "0400000000000000" + "04000000" + "6e6f7465" + "090e"
    )


@pytest.mark.parametrize(("levels", "summands"), [(1, 1), (7, 3), (127, 100), (1024, 210)])
def test_a_sum_of_residues_takes_no_more_bits_than_its_modulus(levels: int, summands: int) -> None:
    """Also one that wrapped: a true sum would take more."""
    modulus, count = 2 * levels * summands + 1, 50
    vectors = SplitMix64(levels).below(2 * levels + 1, count * summands).reshape(summands, count) - levels
    vectors[:, :2] = levels, -levels
    for small in (modulus, 2 * levels + 1):
        total = empty_sum(count)
        for i, vector in enumerate(vectors):
            total = total.merged(empty_sum(count).plus(vector, GroupPart(i, 1, 0, 0))).reduced(small)
        packed = len(total.to_bytes()) - 12 - total.member_bytes
        assert packed <= -(-count * (small - 1).bit_length() // 8)
        np.testing.assert_array_equal((total.integers - vectors.sum(axis=0)) % small, 0)
        assert -(small // 2) <= total.integers.min() <= total.integers.max() < small - small // 2
    assert total.reduced(0) is total


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
            total, start = (
                total.merged(PartialSum.from_bytes(group.to_bytes(), 50, {i: i for i in range(7)}, 1000)),
                start + size,
            )
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


def test_nobody_is_in_a_sum_twice() -> None:
    """A sum that is merged a second time would count its members' weights and integers twice."""
    one, other = (empty_sum(1).plus(np.array([5], np.int64), GroupPart(i, 1, 0, 0)) for i in range(2))
    both = one.merged(other)
    for again in (one, other, both):
        with pytest.raises(ConfigError, match="in both sums"):
            both.merged(again)


@pytest.mark.slow
def test_bytes_of_unknown_senders_raise_typed_errors_only() -> None:
    good = empty_sum(4).plus(np.array([300, -2, 0, 9]), GroupPart(1, 2, 3, 4, b"note")).to_bytes()
    known, levels = {1: 3}, 300
    assert PartialSum.from_bytes(good, 4, known, levels).to_bytes() == good

    def part(place: int, value: int) -> bytes:
        """Return the sum with eight bytes of its part replaced: weight, sequence or generation."""
        return good[: 16 + place] + value.to_bytes(8, "little") + good[24 + place :]

    for data, reason in (
        (b"", "head alone"),
        (b"FPS1" + good[4:], "begins with b'FPS1'"),
        (good[:4] + b"\x41" + good[5:], "65 bits per integer"),
        (good[:5] + b"\x01" + good[6:], "11 bits per integer and 1"),
        (good[:-1], "bytes for 4 integers"),
        (good + b"x", "bytes for 4 integers"),
        (good[:-1] + b"\xf0", "bits behind 4 integers"),
        (good[:20], "before its 1 members"),
        (good[:12] + b"\x07" + good[13:], "member 7 is not of this group"),
        (good[:40] + b"\xff\xff\xff\x7f" + good[44:], "note of member 1"),
        (part(0, MAX_WEIGHT), f"weight {MAX_WEIGHT}"),
        (part(0, 1), "weight 1 holds 600, beyond 300 levels"),
        (part(8, 2), "answers message 2, not 3: a stale update"),
        (part(16, 2**63), "generation 9223372036854775808"),
    ):
        with pytest.raises(PacketError, match=reason):
            PartialSum.from_bytes(data, 4, known, levels)
    with pytest.raises(PacketError, match="expects 5"):
        PartialSum.from_bytes(good, 5, known, levels)
    # The same integers in more bits than they need.
    wide = good[:4] + b"\x10" + good[5:-6] + np.array([600, -4, 0, 18], "<i2").tobytes()
    with pytest.raises(PacketError, match="integers of 11 bits in 16"):
        PartialSum.from_bytes(wide, 4, known, levels)
    twice = PartialSum(np.zeros(1, np.int64), (GroupPart(1, 1, 3, 1), GroupPart(1, 1, 3, 1))).to_bytes()
    with pytest.raises(PacketError, match="twice"):
        PartialSum.from_bytes(twice, 1, known, levels)
    stream = SplitMix64(4)
    for _ in range(2000):
        position, value = (int(x) for x in (stream.below(len(good), 1)[0], stream.below(256, 1)[0]))
        mutant = good[:position] + bytes([value]) + good[position + 1 :]
        try:
            read = PartialSum.from_bytes(mutant, 4, known, levels)
        except PacketError:
            continue
        assert read.to_bytes() == mutant
