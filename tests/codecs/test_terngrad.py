"""TernGrad: its worst cases and extremes. What it sends, its mean and variance: test_sparsification_deterministic.py
and test_sparsification_statistical.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_examples import through

from fedcomp.codecs import TernGrad
from fedcomp.layout import Layout

CODEC = TernGrad()
DRAWS = 4000


def _draws(x: np.ndarray, codec: TernGrad) -> np.ndarray:
    """DRAWS independent decodings of ``x``, one per row: copies side by side have the maximum and the deviation of one,
    and draws of their own."""
    return through(codec, np.tile(x, DRAWS)).reshape(DRAWS, x.size).astype(np.float64)


def _heavy_tailed(size: int = 400) -> np.ndarray:
    return np.random.default_rng(4).standard_t(4, size).astype(np.float32).astype(np.float64)


def test_wide_clips_change_nothing() -> None:
    x = _heavy_tailed()
    np.testing.assert_array_equal(through(TernGrad(clip=1e6), x), through(CODEC, x))


def test_equal_values_are_not_clipped_away() -> None:
    """Their standard deviation is 0, and 0 times 2.5 would leave nothing."""
    for size in (1, 50):
        np.testing.assert_array_equal(through(TernGrad(clip=2.5), np.full(size, -0.5)), np.full(size, -0.5))


@pytest.mark.parametrize("n", [2, 9, 100])
def test_the_bound_is_tight(n: int) -> None:
    """Spec 5: (√n - 1)/2, reached by (1, a, ..., a) with a = 1/(1 + √n)."""
    x = np.full(n, 1 / (1 + math.sqrt(n)))
    x[n // 2] = 1.0
    bound = TernGrad().variance(Layout.flat(n))
    assert (np.abs(x).sum() - x @ x) / (x @ x) == pytest.approx(bound, rel=1e-12)
    errors = ((_draws(x, TernGrad()) - x) ** 2).sum(axis=1) / (x @ x)
    assert abs(errors.mean() - bound) <= 5 * errors.std() / math.sqrt(DRAWS)
    for other in (0.9 * x, np.append(x, 0.3), np.random.default_rng(n).normal(size=n)):
        magnitudes = np.abs(other)
        root = math.sqrt(other.size)
        assert magnitudes.max() * magnitudes.sum() / (other @ other) - 1 <= (root - 1) / 2 + 1e-12


def test_extremes_neither_overflow_nor_warn() -> None:
    top = np.float32([3.4e38, -3.4e38, 3.4e38, 0.0])
    for x in (top, np.full(5, np.float32(1e-45)), np.float32([1e-45, 0.0])):
        np.testing.assert_array_equal(through(CODEC, x), x)
        assert (np.abs(through(TernGrad(clip=0.5), x)) <= np.abs(x).max()).all()
    # Squares that float32 has not: the deviation is that of float64, and the largest always travels.
    for x in (top, np.float32([1e-30, 2e-30])):
        assert np.abs(through(TernGrad(clip=0.5), x)).max() == np.float32(0.5 * x.astype(np.float64).std())
