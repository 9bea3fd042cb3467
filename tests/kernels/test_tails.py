"""Moments over a threshold: against exactly rounded sums, both tiers bit for bit, and where cancellation bites."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_select_topk import data

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.kernels import Exceedances, exceedances, select_above

TIERS = ("numba", "numpy")
SIZES = (1, 2, 31, 32, 63, 64, 65, 1000, 2048, 2049, 100_003)
KINDS = ("laplace", "student", "ties", "equal", "sparse", "denormal", "signed zeros", "rising", "largest")


def _exactly(x: np.ndarray, threshold: float) -> Exceedances:
    """The moments by exactly rounded summation of the terms."""
    with np.errstate(over="ignore"):
        t = float(np.float32(threshold))
    e = [a - t for a in np.abs(x).astype(np.float64).tolist() if a > t]
    if not e:
        return Exceedances(0, math.nan, math.nan, math.nan)
    mean = math.fsum(e) / len(e)
    variance = math.fsum([(v - mean) ** 2 for v in e]) / len(e)
    return Exceedances(len(e), mean, variance, math.fsum(map(math.log, e)) / len(e))


def _same(one: Exceedances, other: Exceedances) -> bool:
    return np.array_equal(np.array(one), np.array(other), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_moments(kind: str) -> None:
    for n in SIZES:
        x = data(kind, n)
        before = x.copy()
        a = np.abs(x)
        thresholds = {
            0.0,
            float(np.sort(a)[n // 2]),
            float(np.sort(a)[n - 1 - n // 100]),
            float(a.max()),
            1e-45,
            3.5e38,
        }
        for threshold in thresholds:
            found = [exceedances(x, threshold, logs=True, tier=tier) for tier in TIERS]
            assert _same(*found), (kind, n, threshold)
            exact = _exactly(x, threshold)
            assert found[0].count == exact.count
            np.testing.assert_allclose(found[0][1:3], exact[1:3], rtol=1e-12, err_msg=f"{kind} {n} {threshold}")
            np.testing.assert_allclose(found[0].log_mean, exact.log_mean, rtol=1e-12, atol=1e-13)
        np.testing.assert_array_equal(x, before)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.floats(0.0, 4e38),
)
def test_any_finite_vector(values: list[float], threshold: float) -> None:
    """Magnitudes from the smallest denormal to the largest float in one vector; the variance exactly, by fractions."""
    x = np.array(values, np.float32)
    found = [exceedances(x, threshold, logs=True, tier=tier) for tier in TIERS]
    assert _same(*found)
    t = float(np.float32(threshold)) if threshold < float(np.finfo(np.float32).max) else math.inf
    e = [Fraction(a) - Fraction(t) for a in np.abs(x).astype(float).tolist() if a > t]
    assert found[0].count == len(e)
    if e:
        mean = sum(e) / len(e)
        variance = sum((v - mean) ** 2 for v in e) / len(e)
        assert found[0].mean == pytest.approx(float(mean), rel=1e-12)
        assert found[0].variance == pytest.approx(float(variance), rel=1e-12)
        assert found[0].log_mean == pytest.approx(math.fsum(math.log(v) for v in e) / len(e), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("value", [1.1, 0.1, 1e-40, 3.3e38])
@pytest.mark.parametrize("n", [1, 3, 64, 12_347])
def test_equal_magnitudes_have_no_variance(value: float, n: int) -> None:
    x = np.full(n, value, np.float32)
    x[::3] *= -1
    for threshold in (0.0, value / 3, float(np.nextafter(np.float32(value), np.float32(0)))):
        for tier in TIERS:
            found = exceedances(x, threshold, tier=tier)
            assert found.count == n
            assert found.variance == 0.0
            assert found.mean == float(x[1 % n]) * (1 if n > 1 else -1) - float(np.float32(threshold))


@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5])
def test_a_small_spread_about_a_large_mean(spread: float) -> None:
    """The one-pass formula E[e^2] - E[e]^2 loses it; ours does not."""
    rng = np.random.default_rng(3)
    x = (1000.0 + spread * rng.normal(size=50_000)).astype(np.float32)
    exact = _exactly(x, 0.0)
    e = x.astype(np.float64)
    naive = float((e**2).mean() - e.mean() ** 2)
    if exact.variance > 0 and spread < 0.1:
        assert abs(naive - exact.variance) > 1e-8 * exact.variance
    for tier in TIERS:
        found = exceedances(x, 0.0, tier=tier)
        np.testing.assert_allclose(found[:3], exact[:3], rtol=1e-12)


def test_a_first_value_far_out() -> None:
    """The value that the sums are taken about may be the worst in the vector."""
    rng = np.random.default_rng(4)
    x = rng.normal(1.0, 1e-3, size=100_000).astype(np.float32)
    for first in (1e6, 1e30, 3.4e38):
        x[0] = first
        exact = _exactly(x, 0.0)
        for tier in TIERS:
            np.testing.assert_allclose(exceedances(x, 0.0, tier=tier)[:3], exact[:3], rtol=1e-12)


def test_logs_only_when_asked() -> None:
    assert math.isnan(exceedances(np.ones(5, np.float32)).log_mean)
    assert exceedances(np.ones(5, np.float32), logs=True).log_mean == 0.0


def test_the_product_stays_in_range() -> None:
    """Products of 1e5 extreme factors over- and underflow every float; their logarithm is exact all the same."""
    for value in (1e-44, 3e38):
        x = np.full(100_000, value, np.float32)
        for tier in TIERS:
            assert exceedances(x, logs=True, tier=tier).log_mean == pytest.approx(math.log(x[0]), rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["numba", "numpy", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_the_comparison(kind: str, tier: str) -> None:
    for n in SIZES:
        x = data(kind, n)
        a = np.abs(x)
        for threshold in (
            0.0,
            float(np.sort(a)[n // 2]),
            float(np.sort(a)[n - 1 - n // 100]),
            float(a.max()),
            1e39,
            math.inf,
        ):
            with np.errstate(over="ignore"):
                expected = np.flatnonzero(a > np.float32(threshold))
            got = select_above(x, threshold, tier=tier)
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, expected, err_msg=f"{kind} n={n} threshold={threshold}")


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_raises(bad: float, tier: str) -> None:
    """Wherever it lies and however high the threshold: NaN is never below one."""
    for n in (1, 70, 40_000):
        for at in {0, n // 2, n - 1}:
            x = data("laplace", n)
            x[at] = bad
            for threshold in (0.0, 1.0, 3.4028235e38, math.inf):
                with pytest.raises(NonFiniteUpdate, match=f"first at index {at}"):
                    select_above(x, threshold, tier=tier)
                for logs in (False, True):
                    with pytest.raises(NonFiniteUpdate, match=f"first at index {at}"):
                        exceedances(x, threshold, logs=logs, tier=tier)


def test_arguments_are_checked() -> None:
    x = np.ones(10, np.float32)
    for threshold in (-1.0, math.nan, -math.inf):
        with pytest.raises(ConfigError, match="threshold"):
            exceedances(x, threshold)
        with pytest.raises(ConfigError, match="threshold"):
            select_above(x, threshold)
    with pytest.raises(LayoutError, match="float32"):
        exceedances(x.astype(np.float64))
    with pytest.raises(LayoutError, match="float32"):
        select_above(x.reshape(2, 5), 0.0)


def test_nothing_above() -> None:
    for x in (np.zeros(0, np.float32), np.zeros(100, np.float32), np.full(100, -0.0, np.float32)):
        for tier in TIERS:
            found = exceedances(x, logs=True, tier=tier)
            assert found.count == 0
            assert math.isnan(found.mean)
            assert math.isnan(found.variance)
            assert select_above(x, 0.0, tier=tier).size == 0


def test_read_only_and_strided_vectors_are_accepted() -> None:
    x = data("laplace", 30_000)
    frozen = np.frombuffer(x.tobytes(), np.float32)
    assert _same(exceedances(frozen, 0.5), exceedances(x, 0.5))
    assert _same(exceedances(x[::2], 0.5), exceedances(x[::2].copy(), 0.5))
    np.testing.assert_array_equal(select_above(x[::2], 0.5), select_above(x[::2].copy(), 0.5))
