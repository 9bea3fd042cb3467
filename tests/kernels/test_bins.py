"""Selection within bins: the definition by brute force, both tiers alike, the fused step equal to its parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_select_topk import data

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.kernels import adaptive_step, select_adaptive, select_bins, tiers

TIERS = ("numba", "numpy", "auto")
SIZES = (1, 2, 63, 64, 65, 1000, 100_003)
LENGTHS = (1, 2, 7, 15, 16, 17, 50, 63, 64, 65, 100, 128, 500, 1000, 200_000)
KINDS = ("laplace", "student", "ties", "equal", "sparse", "denormal", "signed zeros")


def _by_sorting(x: np.ndarray, length: int) -> np.ndarray:
    """Sort by (bin, magnitude falling, index rising) and take each bin's first: the definition, by another way."""
    bins = np.arange(x.size) // length
    order = np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64)), bins))
    return order[np.flatnonzero(np.diff(bins[order], prepend=-1))]


def _by_rule(total: np.ndarray, gradient: np.ndarray, length: int, factor: float) -> tuple[np.ndarray, float]:
    """AdaComp's rule bin by bin, as the specification writes it."""
    with np.errstate(over="ignore"):
        ahead = total + np.float32(factor - 1.0) * gradient
    sent, peaks = [], []
    for start in range(0, total.size, length):
        g, h = total[start : start + length], ahead[start : start + length]
        peak = np.abs(g).max()
        peaks.append(float(peak))
        if peak > 0:
            sent.append(start + np.flatnonzero((np.abs(h) >= peak) & (g != 0)))
    indices = np.concatenate(sent) if sent else np.zeros(0, np.int64)
    return indices, float(np.float32(math.fsum(peaks) / len(peaks)))


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_arg_max_of_every_bin(kind: str, tier: str) -> None:
    for n in SIZES:
        x = data(kind, n)
        before = x.copy()
        for length in LENGTHS:
            got = select_bins(x, length, tier=tier)
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, _by_sorting(x, length), err_msg=f"{kind} n={n} length={length}")
        np.testing.assert_array_equal(x, before)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
    st.integers(1, 200),
    st.sampled_from([1.0, 1.5, 2.0, 3.0, 0.0]),
)
def test_any_finite_vector(values: list[float], length: int, factor: float) -> None:
    """Largest floats, denormals and mixed zeros; look-aheads that overflow."""
    x = np.array(values, np.float32)
    gradient = np.roll(x, 1)
    indices, scale = _by_rule(x, gradient, length, factor)
    for tier in ("numba", "numpy"):
        np.testing.assert_array_equal(select_bins(x, length, tier=tier), _by_sorting(x, length))
        got = select_adaptive(x, gradient, length, factor, tier=tier)
        np.testing.assert_array_equal(got.indices, indices)
        assert got.scale == scale


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_rule(kind: str, tier: str) -> None:
    for n in SIZES:
        total, gradient = data(kind, n), data(kind, n, seed=1)
        before = total.copy(), gradient.copy()
        for length in (1, 7, 16, 17, 50, 64, 65, 500, 200_000):
            for factor in (1.0, 2.0):
                if n > 1000 and length < 50:
                    continue  # the brute force is a Python loop over bins
                indices, scale = _by_rule(total, gradient, length, factor)
                got = select_adaptive(total, gradient, length, factor, tier=tier)
                assert got.indices.dtype == np.int64
                np.testing.assert_array_equal(got.indices, indices, err_msg=f"{kind} n={n} length={length}")
                assert got.scale == scale
                assert got.bins == math.ceil(n / length)
        np.testing.assert_array_equal(total, before[0])
        np.testing.assert_array_equal(gradient, before[1])


def test_tiers_agree_on_many_short_bins() -> None:
    total, gradient = data("student", 100_003), data("laplace", 100_003)
    for length in range(1, 50):
        one, other = (select_adaptive(total, gradient, length, tier=tier) for tier in ("numba", "numpy"))
        np.testing.assert_array_equal(one.indices, other.indices)
        assert one.scale == other.scale


def test_the_scale_is_summed_in_float64() -> None:
    """Bins of 1e6 and of 0.02: a float32 sum would lose the small ones altogether."""
    x = np.full(200_000, 0.02, np.float32)
    x[0] = 1e6
    expected = np.float32((1e6 + 199_999 * float(np.float32(0.02))) / 200_000)
    wrong = np.float32(np.cumsum(x)[-1] / np.float32(200_000))
    assert wrong != expected
    for tier in ("numba", "numpy"):
        assert select_adaptive(x, x, 1, tier=tier).scale == expected


def test_soft_threshold_follows_the_gradient() -> None:
    """Where the gradient agrees with the residue several pass, where it opposes the largest none does."""
    residue = np.array([4.0, 3.0, 1.0, 0.5], np.float32)
    agreeing = select_adaptive(residue, residue * 0.5, 4)
    np.testing.assert_array_equal(agreeing.indices, [0, 1])
    opposed = select_adaptive(residue, -residue * 0.5, 4)
    assert opposed.indices.size == 0
    assert opposed.scale == 4.0
    # An element that is zero itself is never sent, however far its gradient looks.
    zero = select_adaptive(np.array([1.0, 0.0], np.float32), np.array([0.0, 9.0], np.float32), 2)
    np.testing.assert_array_equal(zero.indices, [0])


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_step_equals_its_parts(kind: str, tier: str) -> None:
    """Add, select, subtract, each in float32: bit for bit, signed zeros included."""
    for n in SIZES:
        residue, update = data(kind, n), data(kind, n, seed=1)
        before = residue.copy(), update.copy()
        total = residue + update
        for length in (1, 16, 50, 64, 500, 200_000):
            for factor in (1.0, 2.0):
                apart = select_adaptive(total, update, length, factor, tier="numpy")
                sent = np.zeros(n, np.float32)
                sent[apart.indices] = np.sign(total[apart.indices]) * np.float32(apart.scale)
                after = total.copy()
                after[apart.indices] -= sent[apart.indices]
                step = adaptive_step(residue, update, length, factor, tier=tier)
                np.testing.assert_array_equal(step.indices, apart.indices)
                np.testing.assert_array_equal(step.negative, total[apart.indices] < 0)
                assert step.negative.dtype == np.bool_
                assert (step.scale, step.bins) == (apart.scale, apart.bins)
                np.testing.assert_array_equal(step.residue.view(np.int32), after.view(np.int32))
                same = residue.copy()
                in_place = adaptive_step(same, update, length, factor, out=same, tier=tier)
                assert in_place.residue is same
                np.testing.assert_array_equal(same.view(np.int32), after.view(np.int32))
                np.testing.assert_array_equal(in_place.indices, apart.indices)
        np.testing.assert_array_equal(residue.view(np.int32), before[0].view(np.int32))
        np.testing.assert_array_equal(update.view(np.int32), before[1].view(np.int32))


def _calls(bad: np.ndarray, good: np.ndarray, length: int, tier: str) -> list[Callable[[], object]]:
    return [
        lambda: select_bins(bad, length, tier=tier),
        lambda: select_adaptive(bad, good, length, tier=tier),
        lambda: select_adaptive(good, bad, length, tier=tier),
        lambda: adaptive_step(bad, good, length, tier=tier),
        lambda: adaptive_step(good, bad, length, tier=tier),
    ]


@pytest.mark.parametrize("length", [1, 30, 50, 500])
def test_tiers_add_the_peaks_in_the_same_order(length: int) -> None:
    """Seen before the rounding to float32, on magnitudes so far apart that the order shows."""
    total = (10.0 ** np.random.default_rng(0).uniform(-12, 0, 100_003)).astype(np.float32)
    sums = [tiers.ops(t, total.size).select_adaptive(total, total, np.float32(1), length)[1] for t in TIERS[:2]]
    peaks = np.maximum.reduceat(total, np.arange(0, total.size, length)).astype(np.float64)
    assert sums == [sum(peaks.tolist())] * 2
    assert length > 1 or sums[0] != peaks.sum()


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_raises(bad: float, tier: str) -> None:
    for n in (1, 70, 40_000):
        good = data("laplace", n)
        for at in {0, n // 2, n - 1}:
            x = good.copy()
            x[at] = bad
            kept = x.copy()
            for length in (1, 10, 50, 64, 500, 50_000):
                for call in _calls(x, good, length, tier):
                    with pytest.raises(NonFiniteUpdate, match=f"first at index {at}"):
                        call()
            np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_a_sum_that_overflows_raises(tier: str) -> None:
    residue, update = np.full(100, 3e38, np.float32), np.zeros(100, np.float32)
    update[7] = 3e38
    with pytest.raises(NonFiniteUpdate, match="index 7"):
        adaptive_step(residue, update, 10, tier=tier)
    assert (residue == np.float32(3e38)).all()
    # The look-ahead alone may overflow: it is larger than every magnitude.
    step = adaptive_step(np.zeros(100, np.float32), residue, 10, tier=tier)
    assert step.indices.size == 100
    assert step.scale == np.float32(3e38)
    assert not step.residue.any()


def test_arguments_are_checked() -> None:
    x = np.ones(10, np.float32)
    for call in (
        lambda: select_bins(x, 0),
        lambda: select_adaptive(x, x, -1),
        lambda: adaptive_step(x, x, 0),
    ):
        with pytest.raises(ConfigError, match="length"):
            call()
    for factor in (math.nan, math.inf, 1e39):
        with pytest.raises(ConfigError, match="factor"):
            select_adaptive(x, x, 5, factor)
    with pytest.raises(LayoutError, match="float32"):
        select_bins(x.astype(np.float64), 5)
    with pytest.raises(LayoutError, match="agree"):
        adaptive_step(x, x[:5], 5)
    with pytest.raises(LayoutError, match="out must be"):
        adaptive_step(x, x, 5, out=np.ones(20, np.float32)[::2])
    update = np.ones(10, np.float32)
    with pytest.raises(LayoutError, match="overlap"):
        adaptive_step(x, update, 5, out=update)


def test_empty_vectors() -> None:
    empty = np.zeros(0, np.float32)
    for tier in TIERS:
        assert select_bins(empty, 5, tier=tier).size == 0
        assert select_adaptive(empty, empty, 5, tier=tier).bins == 0
        step = adaptive_step(empty, empty, 5, tier=tier)
        assert (step.indices.size, step.negative.size, step.residue.size, step.scale) == (0, 0, 0, 0.0)


def test_read_only_and_strided_vectors_are_accepted() -> None:
    x = data("laplace", 30_000)
    frozen = np.frombuffer(x.tobytes(), np.float32)
    np.testing.assert_array_equal(select_bins(frozen, 50), select_bins(x, 50))
    np.testing.assert_array_equal(select_bins(x[::2], 50), select_bins(x[::2].copy(), 50))
    one = adaptive_step(frozen[::2], frozen[1::2], 50)
    other = adaptive_step(x[::2].copy(), x[1::2].copy(), 50)
    np.testing.assert_array_equal(one.residue, other.residue)
