"""Elimination on coefficients: the rank arrival by arrival, and how often random matrices are singular."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from galois_oracle import gf256
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.elimination import Basis, rank
from fedcomp.coding.field import GF256
from fedcomp.coding.plan import failure
from fedcomp.coding.stream import SplitMix64, coefficient_rows, derive
from fedcomp.errors import ConfigError


def batch_failures(rows: np.ndarray) -> int:
    """Return how many of many K x K matrices, shape (trials, K, K), are singular over GF(2^8); all at once."""
    field, rows, trials = GF256(), rows.copy(), np.arange(len(rows))
    singular = np.zeros(len(rows), np.bool_)
    for column in range(rows.shape[2]):
        pivots = column + np.argmax(rows[:, column:, column] != 0, axis=1)
        singular |= rows[trials, pivots, column] == 0
        chosen = rows[trials, pivots].copy()
        rows[trials, pivots] = rows[:, column]
        lead = np.where(singular, 1, chosen[:, column]).astype(np.uint8)
        factors = field.multiply(rows[:, column + 1 :, column], field.reciprocal(lead)[:, None])
        rows[:, column + 1 :] ^= field.multiply(factors[:, :, None], chosen[:, None, :])
    return int(singular.sum())


def within_four_sigma(failures: int, trials: int, expected: float) -> bool:
    """Return whether a count of failures is within four standard deviations of its mean."""
    return abs(failures / trials - expected) <= 4 * np.sqrt(expected * (1 - expected) / trials)


@functools.cache
def drawn_rows(trials: int) -> np.ndarray:
    """Return coefficients of 8 packets as encoders of many rounds draw them, shape (trials, 8, 8)."""
    seeds = [derive(1, trial, 0, shard) for trial in range(trials) for shard in range(8)]
    return coefficient_rows(seeds, 8).reshape(trials, 8, 8)


@pytest.mark.slow
def test_singular_matrices_are_as_frequent_as_they_must_be() -> None:
    trials, expected = 50_000, failure(8, 0, 256)
    rows = drawn_rows(trials)
    failures = sum(rank(one) < 8 for one in rows)
    assert within_four_sigma(failures, trials, expected)
    assert batch_failures(rows) == failures, "two eliminations that share no line agree on every count"
    # Coefficients 0 and 1 are binary network coding: 71 % of all matrices are singular.
    binary = batch_failures(rows[:5000] & 1)
    assert not within_four_sigma(binary, 5000, expected)
    assert within_four_sigma(binary, 5000, failure(8, 0, 2))


@pytest.mark.slow
@given(st.integers(1, 70), st.integers(1, 80), st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 0.98]))
def test_elimination_finds_the_rank_arrival_by_arrival(symbols: int, count: int, seed: int, zeros: float) -> None:
    stream = SplitMix64(seed)
    vectors = stream.bytes(count * symbols).reshape(count, symbols).copy()
    vectors[stream.uniform(count * symbols).reshape(count, symbols) < zeros] = 0
    basis = Basis(symbols)
    kept = np.array([vector for vector in vectors if basis.add(vector)], np.uint8).reshape(-1, symbols)
    assert basis.rank == len(kept) == rank(vectors) == np.linalg.matrix_rank(gf256(vectors))
    assert len(kept) == 0 or np.linalg.matrix_rank(gf256(kept)) == len(kept), (
        "those that were innovative are independent"
    )
    assert not any(basis.add(vector) for vector in vectors), "nothing is new the second time"


@given(st.integers(1, 70), st.integers(0, 2**32))
def test_symbols_as_themselves_count_like_their_vectors_wherever_they_come(symbols: int, seed: int) -> None:
    stream = SplitMix64(seed)
    # Few dense ones, so that symbols come before, between and after them, twice too, and into columns that have a
    # pivot already.
    dense = {place: stream.bytes(symbols) for place in stream.below(3 * symbols, 4).tolist()}
    one, other = Basis(symbols), Basis(symbols)
    for place, symbol in enumerate(stream.below(symbols, 3 * symbols).tolist()):
        if place in dense:
            assert one.add(dense[place]) == other.add(dense[place])
        unit = np.zeros(symbols, np.uint8)
        unit[symbol] = 1
        assert one.add_unit(symbol) == other.add(unit)
        assert one.rank == other.rank
        assert not one.add(unit), "it is held now"


def test_a_vector_of_another_length_or_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="uint8"):
        Basis(4).add(np.zeros(5, np.uint8))
    with pytest.raises(ConfigError, match="uint8"):
        Basis(4).add(np.zeros(4, np.int64))
    with pytest.raises(ConfigError, match="at least one"):
        Basis(0)
