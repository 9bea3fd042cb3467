"""The coefficient stream is part of the wire format: its bytes are pinned, whatever numpy does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.stream import GAMMA, MASK, SplitMix64, coefficient_rows, coefficients, derive
from fedcomp.errors import ConfigError

WORDS = st.integers(0, MASK)


def reference(seed: int, count: int) -> list[int]:
    """Return the first words by the recurrence, one by one in Python integers."""
    state, words = seed, []
    for _ in range(count):
        state = (state + GAMMA) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        words.append(z ^ (z >> 31))
    return words


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, "afcd1d7b39a820e2f465b9a16a9e786e"),
        (0x0123456789ABCDEF, "9daa8fa407387a1593d0a1349b5273d5"),
    ],
)
def test_byte_vectors_of_the_stream(seed: int, expected: str) -> None:
    assert SplitMix64(seed).bytes(16).tobytes().hex() == expected


@pytest.mark.parametrize(("seed", "expected"), [(0, "afcd1d7b"), (1, "c15c0289"), (2, "ce56971c")])
def test_coefficient_vectors_of_four_symbols(seed: int, expected: str) -> None:
    assert coefficients(seed, 4).tobytes().hex() == expected


@given(WORDS, st.lists(st.integers(0, 9), max_size=5))
def test_words_are_those_of_the_recurrence_however_they_are_asked_for(seed: int, counts: list[int]) -> None:
    stream = SplitMix64(seed)
    drawn = [int(word) for count in counts for word in stream.words(count)]
    assert drawn == reference(seed, sum(counts))


def test_every_call_begins_at_a_word() -> None:
    stream = SplitMix64(7)
    first, second = stream.bytes(3), stream.bytes(9)
    whole = SplitMix64(7).bytes(24)
    assert first.tobytes() == whole[:3].tobytes()
    assert second.tobytes() == whole[8:17].tobytes()
    assert int(stream.words(1)[0]) == reference(7, 4)[3]


@pytest.mark.parametrize(
    ("bound", "width"), [(251, 1), (256, 1), (257, 2), (65521, 2), (65536, 2), (65537, 4), (2**31 - 1, 4), (2**32, 4)]
)
def test_numbers_below_a_bound_are_the_stream_with_rejected_words_left_out(bound: int, width: int) -> None:
    seed, count = 99, 700
    data = b"".join(word.to_bytes(8, "little") for word in reference(seed, 4 * count))
    accepted, expected, place = 2 ** (8 * width) // bound * bound, [], 0
    while len(expected) < count:
        word = int.from_bytes(data[place : place + width], "little")
        place += width
        if word < accepted:
            expected.append(word % bound)
    stream = SplitMix64(seed)
    assert stream.below(bound, count).tolist() == expected
    # The stream stands behind the word that held the last number, not behind what was looked at ahead.
    assert int(stream.words(1)[0]) == reference(seed, -(-place // 8) + 1)[-1]


def test_numbers_of_the_prime_fields_are_pinned() -> None:
    assert SplitMix64(5).below(65521, 5).tolist() == [50010, 41865, 15116, 25347, 14072]
    assert SplitMix64(5).below(251, 5).tolist() == [90, 195, 137, 163, 12]
    assert SplitMix64(5).below(2**31 - 1, 3).tolist() == [596231003, 1661156108, 328677113]


def test_numbers_below_a_bound_are_uniform_where_a_plain_remainder_is_not() -> None:
    drawn = SplitMix64(3).below(192, 60_000)  # 256 = 192 + 64: the remainder of a byte prefers numbers below 64
    biased = SplitMix64(3).bytes(60_000) % 192

    def chi_square(numbers: np.ndarray) -> float:
        counts = np.bincount(numbers, minlength=192)
        return float(((counts - 312.5) ** 2 / 312.5).sum())

    assert chi_square(drawn) < 191 + 5 * np.sqrt(2 * 191)
    assert chi_square(biased) > 191 + 5 * np.sqrt(2 * 191)


def test_uniform_normal_and_shuffle_have_their_shapes_and_moments() -> None:
    flat = SplitMix64(1).uniform(100_000)
    assert flat.min() >= 0.0
    assert flat.max() < 1.0
    assert abs(flat.mean() - 0.5) < 5 / np.sqrt(12 * 100_000)
    bell = SplitMix64(2).normal(100_001)
    assert bell.shape == (100_001,)
    assert abs(bell.mean()) < 5 / np.sqrt(100_000)
    assert abs(bell.std() - 1.0) < 5 / np.sqrt(200_000)
    assert abs(np.mean(bell[0:-1:2] * bell[1::2])) < 5 / np.sqrt(50_000)  # the two of one pair are uncorrelated
    order = SplitMix64(3).shuffle(1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert SplitMix64(5).shuffle(6).tolist() == [3, 4, 2, 5, 0, 1]


def test_an_all_zero_vector_is_replaced_by_that_of_the_next_seed() -> None:
    seed = next(seed for seed in range(10_000) if not SplitMix64(seed).bytes(1).any())
    assert coefficients(seed, 1).tolist() == SplitMix64(seed + 1).bytes(1).tolist()
    assert coefficients(seed, 2).any()
    last = np.array([MASK, 5, seed, seed + 1], np.uint64).tolist()
    assert np.array_equal(coefficient_rows(last, 1), [coefficients(one, 1) for one in last])
    with pytest.raises(ConfigError, match="at least one entry"):
        coefficients(seed, 0)


@pytest.mark.slow
@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(1, 40))
def test_many_vectors_at_once_are_the_single_ones(seeds: list[int], count: int) -> None:
    rows = coefficient_rows(seeds, count)
    for seed, row in zip(seeds, rows, strict=True):
        data = b"".join(word.to_bytes(8, "little") for word in reference(seed, 5))[:count]
        assert row.tobytes() == data or not any(data)


def test_derived_seeds_are_pinned_and_tell_their_parts_apart() -> None:
    assert derive(0) == 0xE220A8397B1DCDAF
    assert derive(1, 2, 3, 4) == 0xD55CCD4AEB3CCAFB
    assert derive(b"abc") == 0x7926BD7DB82B5852
    assert derive("abc") == 0x85FAC3E12AFD7414
    assert derive(-1) == 0x73B11940DEC0A8B4
    assert derive(17) == reference(17, 1)[0]
    different = [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (b"\x01", 2), ("\x01", 2), (b"",), ("",), (), (-1,), (MASK,)]
    assert len({derive(*parts) for parts in different}) == len(different)


def test_what_is_no_seed_or_count_is_refused() -> None:
    for seed in (-1, 1 << 64):
        with pytest.raises(ConfigError, match="64 bits"):
            SplitMix64(seed)
    with pytest.raises(ConfigError, match="forwards"):
        SplitMix64(0).words(-1)
    for bound in (0, 2**32 + 1):
        with pytest.raises(ConfigError, match="bound"):
            SplitMix64(0).below(bound, 1)
