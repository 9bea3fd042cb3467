"""Keys: pure functions of their fields, stable for ever, independent between fields."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.rng import Key, signs_of


def test_same_key_same_stream() -> None:
    np.testing.assert_array_equal(Key(1, "a", 2, 3, 4).bits(100), Key(1, "a", 2, 3, 4).bits(100))
    np.testing.assert_array_equal(Key(1).bits(10), Key(1).bits(100)[:10])


def test_known_values_stay() -> None:
    """Golden values: a change here changes every run and every peer that redraws a support."""
    key = Key(42, "codec", round=3, partition=5, layer=7)
    assert key.u64() == 0xA6E3578043D79DEB
    assert key.bits(3).tolist() == [0x22504EF74655127B, 0xFAD5DE50EA519CA2, 0x24DD334CBE4E8171]
    assert Key(-(2**70)).u64() == 0xFCDDDA30996E7D75


@pytest.mark.parametrize(
    "other",
    [
        {"purpose": "b"},
        {"round": 1},
        {"partition": 1},
        {"layer": 1},
    ],
)
def test_every_field_changes_the_stream(other: dict) -> None:
    key = Key(1, "a")
    assert key.at(**other) != key
    assert key.at(**other).digest() != key.digest()
    assert not np.array_equal(key.at(**other).bits(4), key.bits(4))


def test_fields_do_not_run_together() -> None:
    """(1, 12) and (11, 2) are different streams: the encoding of the fields is unambiguous."""
    assert Key(1, round=1, partition=12).digest() != Key(1, round=11, partition=2).digest()
    assert Key(1, purpose="1").digest() != Key(11, purpose="").digest()


def test_zero_is_a_value_when_replaced() -> None:
    assert Key(1, "a", 2, 3, 4).at(round=0, partition=0, layer=0) == Key(1, "a")


def test_uniform_is_in_the_half_open_interval_and_flat() -> None:
    u = Key(9).uniform(100_000)
    assert u.dtype == np.float64
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = np.histogram(u, bins=100, range=(0.0, 1.0))[0]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 190  # chi-square with 99 degrees of freedom, 1 - 1e-7


def test_neighbouring_rounds_are_uncorrelated() -> None:
    a, b = Key(9, round=1).uniform(100_000), Key(9, round=2).uniform(100_000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(100_000)


def test_the_global_generator_is_not_touched() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - looks at the global generator to prove nobody used it
    Key(1).uniform(1000)
    Key(1).generator().normal(size=10)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_the_words_of_many_partitions_are_those_of_each() -> None:
    key = Key(7, "cohort/train", round=3, partition=9, layer=2)
    partitions = [0, 1, 9, 10_000, 2**31 - 1]
    assert key.u64_of(partitions) == {p: key.at(partition=p).u64() for p in partitions}


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 1000])
def test_a_stream_goes_on_where_it_is_told_to(start: int) -> None:
    key = Key(6, "skip")
    np.testing.assert_array_equal(key.bits(9, start=start), key.bits(start + 9)[start:])


def test_signs_are_the_bits_of_words() -> None:
    words = np.array([[0, 1], [2**63, 2**64 - 1]], np.uint64)
    signs = signs_of(words, 66)
    assert signs.shape == (2, 66)
    assert (signs[0] == [*[1.0] * 64, -1.0, 1.0]).all()
    assert (signs[1] == [*[1.0] * 63, -1.0, -1.0, -1.0]).all()
