"""The fast Walsh-Hadamard transform: against the matrix, its own inverse, and the same bits in both tiers."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fedcomp.errors import LayoutError
from fedcomp.kernels import hadamard
from fedcomp.rng import Key

SIZES = [1 << m for m in (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18)]
# More than one block of the compiled kernel: up to eight, up to 64, and beyond.
SIZES += [pytest.param(1 << m, marks=pytest.mark.slow) for m in (19, 22)]
SIZES += [pytest.param(1 << 25, marks=pytest.mark.long)]


def _words(size: int, seed: int = 3) -> np.ndarray:
    return Key(seed, "signs").bits(-(-size // 64))


def _signs(words: np.ndarray, size: int) -> np.ndarray:
    return np.array([-1.0 if int(words[i // 64]) >> (i % 64) & 1 else 1.0 for i in range(size)])


def _matrix(size: int) -> np.ndarray:
    parity = np.array([[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)])
    return (1.0 - 2.0 * parity) / np.sqrt(size)


@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 4, 32, 64, 128, 512, 1024])
def test_it_is_the_matrix_product(size: int, dtype: type, tier: str) -> None:
    x = np.random.default_rng(size).normal(size=size)
    words = _words(size)
    turned = x.astype(dtype)
    hadamard(turned, words, tier=tier)
    atol = 1e-6 if dtype is np.float32 else 1e-14
    np.testing.assert_allclose(turned, _matrix(size) @ (_signs(words, size) * x), atol=4 * atol)
    hadamard(turned, words, inverse=True, tier=tier)
    np.testing.assert_allclose(turned, x, atol=4 * atol)


@functools.lru_cache(maxsize=1)  # the cases of a size come one after the other
def _extreme(size: int) -> np.ndarray:
    """Return zeros, -0.0, denormals and large numbers; drawn for one block alone, which takes seconds for them all."""
    rng, block = np.random.default_rng(size), min(size, 1 << 16)
    drawn = rng.standard_t(2, block) * 10.0 ** rng.integers(-42, 30, block)
    drawn[rng.random(block) < 0.2] = -0.0
    # No two blocks are alike.
    return np.outer(rng.standard_t(2, size // block), drawn).reshape(-1)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_both_tiers_give_the_same_bits(size: int, dtype: type, inverse: bool) -> None:
    """Spec: blocked, but with the additions of the plain transform."""
    x = _extreme(size).astype(dtype)
    one, other = x.copy(), x.copy()
    hadamard(one, _words(size), inverse=inverse, tier="numba")
    hadamard(other, _words(size), inverse=inverse, tier="numpy")
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_it_is_the_plain_transform_bit_for_bit(tier: str) -> None:
    """The order of the additions is promised: pairs at distance 1 first, then at 2, 4, ..."""
    x = np.random.default_rng(0).normal(size=1 << 12).astype(np.float32)
    plain = x * np.float32(1 / 64)
    width = 1
    while width < x.size:
        pairs = plain.reshape(-1, 2, width)
        plain = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    hadamard(x, np.zeros(64, np.uint64), tier=tier)
    assert x.tobytes() == plain.tobytes()


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_nothing_overflows_that_need_not(tier: str) -> None:
    """A constant vector becomes one coordinate, its norm; unscaled sums would be 256 times as large."""
    x = np.full(1 << 16, 1e36, np.float32)
    hadamard(x, np.zeros(1 << 10, np.uint64), tier=tier)
    assert x[0] == pytest.approx(2.56e38, rel=1e-5)
    assert not x[1:].any()


def test_what_does_not_fit_is_refused() -> None:
    for bad in (np.zeros(3), np.zeros(0), np.zeros((2, 2)), np.zeros(4, np.int32), np.zeros(8)[::2]):
        with pytest.raises(LayoutError, match="cannot be transformed"):
            hadamard(bad, np.zeros(1, np.uint64))
    with pytest.raises(LayoutError, match="signs"):
        hadamard(np.zeros(128), np.zeros(1, np.uint64))
