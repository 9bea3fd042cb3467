"""Exact selection: the same result from both tiers, any seed and any guess; sparsification spec 7.1.2 and 7.1.9."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.kernels import feedback_step, select, select_topk, tiers
from fedcomp.kernels.interface import MAGNITUDE

TIERS = ("numba", "numpy", "auto")
SIZES = (1, 2, 63, 64, 65, 1000, 30_011)


def data(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """Vectors of every kind that a selection may meet; test_bins.py and test_tails.py take them, too."""
    rng = np.random.default_rng([n, seed])
    made = {
        "laplace": lambda: rng.laplace(size=n),
        "student": lambda: rng.standard_t(2, size=n),
        "ties": lambda: rng.integers(-3, 4, size=n),
        "equal": lambda: np.full(n, -1.5),
        "sparse": lambda: np.where(rng.random(n) < 0.01, rng.normal(size=n), 0.0),
        "block": lambda: np.where(abs(np.arange(n) - n // 2) < 0.005 * n, rng.normal(size=n), 0.0),
        "signs": lambda: rng.choice([-1.0, 0.0, 1.0], size=n),
        "denormal": lambda: rng.integers(-9, 10, size=n) * 1.4e-45,
        "signed zeros": lambda: np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "sorted": lambda: np.linspace(0.0, 1.0, n),
        "falling": lambda: np.linspace(1.0, 0.0, n),
        "rising steps": lambda: np.exp(np.arange(n) // 64 * min(0.1, 3000 / n)),
        "rising": lambda: np.exp(np.arange(n) % 5000 / 100.0),
        "largest": lambda: rng.uniform(2e38, 3.4e38, size=n),
    }[kind]()
    return made.astype(np.float32)


KINDS = (
    "laplace",
    "student",
    "ties",
    "equal",
    "sparse",
    "block",
    "signs",
    "denormal",
    "signed zeros",
    "sorted",
    "falling",
    "rising steps",
)


def _by_magnitude(x: np.ndarray) -> np.ndarray:
    """Everything by (magnitude falling, index rising): the definition, by another way."""
    return np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))


def _by_full_sort(x: np.ndarray, k: int) -> np.ndarray:
    return np.sort(_by_magnitude(x)[:k])


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_full_sort(kind: str, tier: str) -> None:
    """Spec 7.1.2: multiset of magnitudes, ties by lowest index, strictly ascending, any sampling seed."""
    for n in SIZES:
        x = data(kind, n)
        for k in sorted({1, max(1, n // 100), max(1, n // 3), n - 1, n} - {0}):
            expected = _by_full_sort(x, k)
            for seed in (0, 1, 2**63):
                got = select_topk(x, k, tier=tier, seed=seed)
                assert got.dtype == np.int64
                np.testing.assert_array_equal(got, expected, err_msg=f"{kind} n={n} k={k} seed={seed}")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.integers(0, 200),
    st.integers(0, 2**64 - 1),
)
def test_any_finite_vector(values: list[float], k: int, seed: int) -> None:
    """Spec 7.1.2 for whatever hypothesis finds: mixed zeros, denormals, largest floats, repeats."""
    x = np.array(values, np.float32)
    k = min(k, x.size)
    for tier in ("numba", "numpy"):
        np.testing.assert_array_equal(select_topk(x, k, tier=tier, seed=seed), _by_full_sort(x, k))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["student", "ties", "equal", "denormal", "signed zeros"])
def test_one_million(kind: str) -> None:
    """Spec 7.1.2 at n = 1e6."""
    x = data(kind, 1_000_000)
    order = _by_magnitude(x)
    for k in (1, 1000, 100_000, 999_999, 1_000_000):
        expected = np.sort(order[:k])
        for tier in TIERS[:2]:
            for seed in (0, 2**63):
                np.testing.assert_array_equal(select_topk(x, k, tier=tier, seed=seed), expected)


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_a_sample_that_misleads_costs_only_time(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses far too high, or so low that the candidates overflow, must fall back and still be exact."""
    x = data("laplace", 50_000)
    expected = _by_full_sort(x, 500)
    for guess in (1, int(np.float32(1e30).view(np.int32)), MAGNITUDE):
        monkeypatch.setattr(select, "_guess", lambda *_, guess=guess: guess)
        np.testing.assert_array_equal(select_topk(x, 500, tier=tier), expected)


class _Counting:
    """A tier that counts the elements its passes look at."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.seen = {"collect": 0, "add_collect": 0}

    def __getattr__(self, name: str) -> Any:
        called = getattr(self.kernels, name)
        if name not in self.seen:
            return called

        def counted(*arguments: Any) -> None:
            state = arguments[-1].state
            before = state[1]
            called(*arguments)
            self.seen[name] += int(state[1] - before)

        return counted


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_takes_more_than_two_passes(kind: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few non-zeros, ties, equal or sorted values: at most two passes, with buffers of a few times k.

    A step that starts at the threshold of the one before adds once, and reads nothing again.
    """
    n, k = 200_000, 2000
    kernels = _Counting(tiers.ops(tier, n))
    monkeypatch.setattr(tiers, "ops", lambda *_: kernels)
    x = data(kind, n)
    # Compiling takes memory of its own.
    select_topk(x, k)
    kernels.seen.update(collect=0)
    tracemalloc.start()
    try:
        select_topk(x, k)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kernels.seen["collect"] <= 2 * n
    assert peak < 100 * k + 700_000  # the buffers of a few k candidates, the sample, one step of the numpy tier
    step = feedback_step(np.zeros_like(x), x, k)
    kernels.seen.update(collect=0, add_collect=0)
    feedback_step(np.zeros_like(x), x, k, threshold=step.threshold)
    assert kernels.seen == {"collect": 0, "add_collect": n}


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("kind", ["student", "sorted", "ties", "block"])
def test_a_start_far_too_low_is_given_up_for_a_sample(kind: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in place, where the memory before the pass's position is the sum already: guessed again, no second pass."""
    n, k = 200_000, 2000
    kernels = _Counting(tiers.ops(tier, n))
    monkeypatch.setattr(tiers, "ops", lambda *_: kernels)
    memory, update = data(kind, n), data(kind, n)
    cold = feedback_step(memory, update, k)
    kernels.seen.update(collect=0)
    warm = feedback_step(memory, update, k, threshold=cold.threshold / 1000, out=memory)
    np.testing.assert_array_equal(warm.indices, cold.indices)
    np.testing.assert_array_equal(warm.memory, cold.memory)
    assert kernels.seen["collect"] == 0


@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_raises(bad: float, tier: str) -> None:
    """Spec 7.1.9: NaN is never selected and never ignored, wherever it lies, for every k."""
    for n in (70, 40_000):
        for at in (0, n // 2, n - 1):
            x = data("laplace", n)
            x[at] = bad
            for k in (1, n // 2, n):
                with pytest.raises(NonFiniteUpdate, match=f"first at index {at}"):
                    select_topk(x, k, tier=tier)


def test_arguments_are_checked() -> None:
    x = np.ones(10, np.float32)
    for k in (-1, 11):
        with pytest.raises(ConfigError, match=r"\[0, 10\]"):
            select_topk(x, k)
    with pytest.raises(LayoutError, match="float"):
        select_topk(x.astype(np.float16), 1)
    with pytest.raises(ConfigError, match="tier"):
        select_topk(x, 1, tier="gpu")  # type: ignore[arg-type]
    assert select_topk(x, 0).size == 0


def test_read_only_and_strided_vectors_are_accepted() -> None:
    x = data("laplace", 30_000)
    frozen = np.frombuffer(x.tobytes(), np.float32)
    assert not frozen.flags.writeable
    np.testing.assert_array_equal(select_topk(frozen, 30), select_topk(x, 30))
    np.testing.assert_array_equal(select_topk(x[::2], 30), select_topk(x[::2].copy(), 30))


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("threshold", [None, 0.0, 1e-30, 0.5, 1e30])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_fused_step_is_add_select_clear(decay: float, threshold: float | None, tier: str) -> None:
    """The fused step equals its three parts bit for bit, whatever the warm start."""
    for n in (1, 64, 1000, 30_011):
        memory, update = data("student", n), data("laplace", n)
        before = memory.copy()
        total = memory * np.float32(decay) + update
        for k in {1, max(1, n // 50), n}:
            chosen = _by_full_sort(total, k)
            step = feedback_step(memory, update, k, decay=decay, threshold=threshold, tier=tier)
            np.testing.assert_array_equal(step.indices, chosen)
            np.testing.assert_array_equal(step.values, total[chosen])
            rest = total.copy()
            rest[chosen] = 0.0
            np.testing.assert_array_equal(step.memory, rest)
            np.testing.assert_array_equal(memory, before)
            if k < n:
                assert step.threshold == np.abs(total[chosen]).min()


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_fused_step_in_place(tier: str) -> None:
    memory, update = data("student", 30_011), data("laplace", 30_011)
    apart = feedback_step(memory, update, 300, tier=tier)
    same = feedback_step(memory, update, 300, out=memory, tier=tier)
    assert same.memory is memory
    np.testing.assert_array_equal(memory, apart.memory)
    np.testing.assert_array_equal(same.values, apart.values)


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_fused_step_refuses_what_is_not_finite(tier: str) -> None:
    """An overflow of the sum of two finite vectors is found, too, and inputs stay as they were."""
    memory, update = np.full(100, 3e38, np.float32), np.zeros(100, np.float32)
    update[7] = 3e38
    with pytest.raises(NonFiniteUpdate, match="index 7"):
        feedback_step(memory, update, 3, tier=tier)
    assert (memory == np.float32(3e38)).all()


def test_fused_step_checks_its_arrays() -> None:
    x = np.ones(10, np.float32)
    with pytest.raises(LayoutError, match="agree"):
        feedback_step(x, x[:5], 1)
    with pytest.raises(LayoutError, match="out must be"):
        feedback_step(x, x, 1, out=np.ones(20, np.float32)[::2])


def test_a_vector_shorter_than_a_sample_raises_no_warning() -> None:
    memory = np.zeros(3, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A threshold that is too high by now, as after a large step: what is found is fewer than wanted.
        for threshold in (1e3, 1e-3):
            step = feedback_step(memory, np.array([1.0, -2.0, 0.5], np.float32), 1, threshold=threshold)
            assert step.indices.tolist() == [1]
