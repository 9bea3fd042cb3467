"""A contribution that was let in is bounded, whatever it was made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp.privacy.bounds import MOST, clip_arrays, round_conditionally, rounding_bound, squared_norm, to_grid
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.rng import Key

finite = st.floats(allow_nan=False, allow_infinity=False)
vectors = st.lists(finite, min_size=1, max_size=40).map(np.array)


def stream(name: str) -> SeededEntropy:
    return SeededEntropy(Key(3, f"test/bounds/{name}"), insecure_deterministic=True)


def python_norm(integers: np.ndarray) -> int:
    return sum(x * x for x in integers.ravel().tolist())


@pytest.mark.slow
@given(vectors, st.floats(1e-300, 1e300), st.integers(1, MOST))
def test_no_vector_ends_above_the_bound(vector: np.ndarray, clip: float, bound: int) -> None:
    step = max(clip / bound, 5e-324)
    out = to_grid(vector, clip=clip, step=step, bound=bound)
    assert out.dtype == np.int64
    assert python_norm(out) <= bound * bound


@given(st.integers(1, 300), st.integers(1, 40), st.floats(0.5, 1.0, exclude_min=True))
def test_vectors_that_all_round_up_do_not_end_above_the_bound(size: int, bound: int, fraction: float) -> None:
    # Every coordinate lies just above a half, in which case rounding raises the norm the most.
    vector = np.full(size, fraction)
    out = to_grid(vector, clip=1e9, step=1.0, bound=bound)
    assert python_norm(out) <= bound * bound


def test_within_the_bound_it_is_plain_rounding() -> None:
    vector = Key(1).generator().normal(size=1000)
    vector *= 0.9 / np.linalg.norm(vector)
    step = 1.0 / 2048
    out = to_grid(vector, clip=1.0, step=step, bound=2048)
    np.testing.assert_array_equal(out, np.rint(vector / step))


def test_clipping_keeps_the_direction_and_nearly_all_of_the_bound() -> None:
    vector = Key(1).generator().normal(size=1000) * 1e200
    bound = 2048
    out = to_grid(vector, clip=1.0, step=1.0 / bound, bound=bound)
    cosine = float(out @ (vector / 1e200)) / math.sqrt(python_norm(out)) / float(np.linalg.norm(vector / 1e200))
    assert 0.99 * bound < math.sqrt(python_norm(out)) <= bound
    assert cosine > 0.9999


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-160, 1.0, 1e160, 1e308])
def test_extreme_magnitudes_neither_overflow_nor_vanish(scale: float) -> None:
    out = to_grid(np.array([scale, -scale, 0.0]), clip=scale, step=scale / 64 if scale > 1e-300 else scale, bound=64)
    assert out[2] == 0
    assert out[0] == -out[1]
    assert (45 if scale > 1e-300 else 1) == out[0]


def test_zero_and_empty_vectors_are_fine() -> None:
    for shape in ((7,), (0,), (2, 3)):
        out = to_grid(np.zeros(shape, np.float32), clip=1.0, step=0.1, bound=10)
        assert out.shape == shape
        assert not out.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    vector = np.array([1.0, bad, 2.0])
    for dtype in (np.float16, np.float32, np.float64, np.longdouble):
        with pytest.raises(Unbounded, match="1 value"):
            to_grid(vector.astype(dtype), clip=1.0, step=0.1, bound=10)
        with pytest.raises(Unbounded, match="1 value"):
            clip_arrays([np.ones(2), vector.astype(dtype)], 1.0)
    with pytest.raises(Unbounded):
        round_conditionally(vector, 10.0, stream("bad"))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex128, object])
def test_what_is_not_floating_point_is_refused(dtype) -> None:
    with pytest.raises(Unbounded, match="floating point"):
        to_grid(np.ones(3).astype(dtype), clip=1.0, step=0.1, bound=10)


def test_a_longdouble_beyond_float64_is_refused() -> None:
    if np.finfo(np.longdouble).max > np.finfo(np.float64).max:
        with pytest.raises(Unbounded):
            to_grid(np.array([np.longdouble(1e308) * 100]), clip=1.0, step=0.1, bound=10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": math.nan},
        {"clip": math.inf},
        {"step": -1.0},
        {"bound": 0},
        {"bound": MOST + 1},
        {"bound": 2.5},
    ],
)
def test_wrong_parameters_are_named(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        to_grid(np.ones(3), **{"clip": 1.0, "step": 0.1, "bound": 10, **wrong})


@pytest.mark.slow
@given(st.lists(st.integers(-(2**32) + 1, 2**32 - 1), max_size=30), st.booleans())
def test_squared_norm_is_exact(values: list[int], many: bool) -> None:
    array = np.array(values * (7 if many else 1), np.int64)
    assert squared_norm(array) == python_norm(array)


def test_squared_norm_refuses_what_it_cannot_sum() -> None:
    with pytest.raises(Unbounded, match="magnitude"):
        squared_norm(np.array([2**40, 2**40]))
    with pytest.raises(Unbounded, match="magnitude"):
        squared_norm(np.array([-(2**63)]))


def test_joint_norm_over_all_float_arrays() -> None:
    arrays = {"a": np.full(8, 3.0, np.float32), "n": np.arange(4), "flag": np.array([True]), "b": np.full((2, 4), -4.0)}
    out, norm = clip_arrays(arrays, 1.0)
    assert list(out) == list(arrays)
    assert norm == pytest.approx(math.sqrt(8 * 9 + 8 * 16))
    joint = math.sqrt(sum(float(np.sum(out[k].astype(float) ** 2)) for k in ("a", "b")))
    assert 1.0 - 1e-6 < joint <= 1.0
    assert out["n"] is arrays["n"]
    assert out["flag"] is arrays["flag"]
    assert out["a"].dtype == np.float32
    np.testing.assert_allclose(out["a"][0] / out["b"][0, 0], -0.75, rtol=1e-6)


@pytest.mark.slow
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.floats(1e-30, 1e30),
)
def test_clipped_arrays_are_within_the_bound_after_the_cast(values: list[float], clip: float) -> None:
    out, norm = clip_arrays(
        [np.array(values, np.float32), np.array(values, np.float16 if norm_fits(values) else np.float32)], clip
    )
    joint = math.sqrt(sum(math.fsum(float(x) ** 2 for x in a) for a in out))
    assert joint <= clip * (1 + 1e-15)
    assert norm >= 0.0


def norm_fits(values: list[float]) -> bool:
    return all(abs(v) < 6e4 for v in values)


def test_within_the_clip_arrays_come_back_as_they_are() -> None:
    arrays = [np.array([0.3, 0.4]), np.zeros(3), np.zeros(0)]
    out, norm = clip_arrays(arrays, 0.5 + 1e-12)
    assert norm == pytest.approx(0.5)
    assert all(a is b for a, b in zip(out, arrays, strict=True))
    assert clip_arrays([], 1.0) == ([], 0.0)
    assert clip_arrays([np.zeros(4)], 1.0)[1] == 0.0


def test_norms_beyond_float64_are_clipped_all_the_same() -> None:
    out, norm = clip_arrays([np.full(100, 1e308)], 2.0)
    assert norm == math.inf
    assert float(np.linalg.norm(out[0])) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="clip"):
        clip_arrays([np.ones(2)], 0.0)


def test_conditional_rounding_is_always_within_its_bound_and_otherwise_unbiased() -> None:
    size, clip = 400, 30.0
    vector = Key(5).generator().normal(size=size)
    vector *= clip / np.linalg.norm(vector)
    bound = rounding_bound(clip, size)
    source = stream("conditional")
    drawn = [round_conditionally(vector, bound, source) for _ in range(500)]
    assert all(python_norm(out) <= bound * bound for out in drawn)
    assert all(np.all(np.abs(out - vector) < 1.0) for out in drawn)
    # The standard error of the mean is at most 0.5 / sqrt(500) a coordinate; the condition shifts it by far less.
    assert float(np.sqrt(np.mean((np.mean(drawn, axis=0) - vector) ** 2))) < 0.02


def test_the_rounding_bound_is_met_often_enough() -> None:
    # Kairouz et al.: with probability 1 - exp(-1/2) = 0.39 or more, and where it is sure, always.
    for size, clip in ((1000, 10.0), (1000, 300.0), (4, 100.0)):
        vector = Key(6).generator().normal(size=size)
        vector *= clip / np.linalg.norm(vector)
        bound, source = rounding_bound(clip, size), stream("often")
        free = [math.sqrt(python_norm(round_conditionally(vector, 1e9, source))) for _ in range(200)]
        assert np.mean(np.array(free) <= bound) > 0.39
        assert bound <= clip + math.sqrt(size) + 1e-9


def test_a_vector_beyond_its_bound_is_refused() -> None:
    with pytest.raises(Unbounded, match="clip it first"):
        round_conditionally(np.full(3, 10.0), 5.0, stream("beyond"))
    with pytest.raises(Unbounded, match="steps"):
        round_conditionally(np.array([1e12]), 5.0, stream("beyond"))
