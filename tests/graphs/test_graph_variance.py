"""The variance of the Poisson estimator: the formula against all subsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.studies.graph_variance import poisson_variance
from fedcomp.graphs.adjacency import columns_of, normalised
from fedcomp.graphs.inclusion import base_weight, column_energy, waterfill
from fedcomp.rng import Key


class Layer:
    """A few rows of a random graph's adjacency, vectors of all candidates, and the sum that is estimated."""

    def __init__(self, nodes: int, edges: int, rows: int, seed: int = 0, width: int = 3) -> None:
        bits = Key(seed, "test/edges").bits(2 * edges) % np.uint64(nodes)
        adjacency = normalised(bits[:edges].astype(np.int64), bits[edges:].astype(np.int64), nodes)
        self.rows = adjacency.rows(np.arange(rows))
        self.candidates, self.positions = columns_of(self.rows)
        self.m = len(self.candidates)
        self.u = np.zeros((rows, self.m))
        self.u[np.repeat(np.arange(rows), np.diff(self.rows.indptr)), self.positions] = self.rows.values
        self.h = 2 * Key(seed, "test/vectors").uniform(self.m * width).reshape(self.m, width) - 1
        self.h *= np.exp(2 * Key(seed, "test/sizes").uniform(self.m))[:, None]
        self.z = self.u @ self.h
        self.local = Key(seed, "test/local").uniform(self.m) < 0.5
        self.a = column_energy(self.rows, self.positions, self.m, np.linalg.norm(self.h, axis=1))

    def weights(self, s: float) -> np.ndarray:
        w = base_weight(self.rows, self.positions, self.m)
        return np.where(self.local, s * w, w)

    def estimate(self, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (self.u[:, columns] * weights) @ self.h[columns]


SMALL = Layer(nodes=11, edges=16, rows=5)


def test_column_energy_is_the_energy_of_each_term() -> None:
    terms = [np.square(np.outer(SMALL.u[:, i], SMALL.h[i])).sum() for i in range(SMALL.m)]
    np.testing.assert_allclose(SMALL.a, terms, rtol=1e-13)
    with pytest.raises(ConfigError, match="one per candidate"):
        column_energy(SMALL.rows, SMALL.positions, SMALL.m, np.ones(SMALL.m + 1))
    with pytest.raises(ConfigError, match="finite norms"):
        column_energy(SMALL.rows, SMALL.positions, SMALL.m, np.full(SMALL.m, np.nan))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1.5, 4, 8])
@pytest.mark.parametrize("s", [1.0, 3.0, 16.0])
def test_7_02_poisson_variance_is_that_of_all_subsets(n: float, s: float) -> None:
    """Every one of the 2^m subsets, with its probability: the mean is the sum itself, the variance the formula."""
    assert n < SMALL.m
    pi = waterfill(SMALL.weights(s), n)
    mean, second, total = np.zeros_like(SMALL.z), 0.0, 0.0
    for bits in itertools.product((False, True), repeat=SMALL.m):
        kept = np.array(bits)
        probability = float(np.where(kept, pi, 1 - pi).prod())
        estimate = SMALL.estimate(np.flatnonzero(kept), 1 / pi[kept])
        total += probability
        mean += probability * estimate
        second += probability * float(np.square(estimate - SMALL.z).sum())
    assert total == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(mean, SMALL.z, atol=1e-10)
    assert second == pytest.approx(poisson_variance(SMALL.a, pi), rel=1e-10)


def test_a_poisson_draw_keeps_the_budget_on_the_second_moment() -> None:
    """Its variance is at most M / n, which is what the scale rule bounds."""
    for seed in range(50):
        layer = Layer(nodes=60, edges=150, rows=12, seed=seed)
        for n in (1, 5, 20, 40):
            for s in (1.0, 8.0):
                w = layer.weights(s)
                assert poisson_variance(layer.a, waterfill(w, n)) <= (layer.a * w.sum() / w).sum() / n


def test_certain_columns_add_no_variance_and_impossible_ones_cannot_be_undone() -> None:
    a = np.array([4.0, 2.0, 0.0])
    assert poisson_variance(a, np.ones(3)) == 0.0
    assert poisson_variance(a, np.array([1.0, 0.5, 0.0])) == 2.0
    assert poisson_variance(a, np.array([0.0, 0.5, 1.0])) == np.inf
    assert poisson_variance(np.zeros(0), np.zeros(0)) == 0.0
