"""A public random rotation, which spreads a vector evenly over its coordinates.

Without it one coordinate can hold the whole norm, and a modulus has to leave room for that. The rotation is a product
of random signs and a Hadamard matrix, as in distributed mean estimation (Suresh et al. 2017; recalled). A Hadamard
matrix wants a power of two; instead of padding, which can double what is sent, two of them overlap: one turns the first
2^k coordinates, the next the last 2^k, with 2^k > d / 2 (derived here). Every step is orthogonal, so norms are kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import hadamard
from fedcomp.rng import Key


def rotate(vector: NDArray[Any], seed: int) -> NDArray[np.float64]:
    """Return the rotation that ``seed`` names of ``vector``, (n,), in float64.

    Parameters
    ----------
    seed : int
        Public, and chosen before the data: both sides draw the signs from it.
    """
    out = vector.astype(np.float64)
    for part, signs in _parts(out.size, seed):
        # Signs first: the matrix alone turns a constant vector into a single large coordinate.
        hadamard(out[part], signs)
    return out


def unrotate(vector: NDArray[Any], seed: int) -> NDArray[np.float64]:
    """Undo :func:`rotate`, up to rounding in float64."""
    out = vector.astype(np.float64)
    for part, signs in reversed(_parts(out.size, seed)):
        hadamard(out[part], signs, inverse=True)
    return out


def largest_coordinate(size: int, probability: float) -> float:
    """Return a magnitude that some coordinate of a rotated unit vector exceeds with ``probability`` at most.

    Each coordinate of a rotated block is a sum of numbers with random signs, whose squares add up to at most 1 / 2^k
    (Hoeffding); of the two overlapping blocks one turned it last. Derived here; never more than 1.
    """
    if size < 2:
        return 1.0
    block = 1 << (size.bit_length() - 1)
    return min(1.0, math.sqrt(2.0 * math.log(4.0 * size / probability) / block))


def _parts(size: int, seed: int) -> list[tuple[slice, NDArray[np.uint64]]]:
    """Return the rotated parts in order: a slice whose length is a power of two, and the signs that are applied
    before."""
    if size < 2:
        return []
    # The largest power of two that fits: two blocks of it, one from each end, reach every coordinate.
    block = 1 << (size.bit_length() - 1)
    starts = [0] if block == size else [0, size - block]
    key = Key(seed, "privacy/rotation")
    return [(slice(start, start + block), _signs(key.at(layer=i), block)) for i, start in enumerate(starts)]


def _signs(key: Key, count: int) -> NDArray[np.uint64]:
    """Return the top bits of this number of words, packed. These signs must not change, because existing frames are
    rotated with them."""
    words = np.zeros(-(-count // 64), "<u8")
    packed = np.packbits((key.bits(count) >> np.uint64(63)).astype(np.bool_), bitorder="little")
    words.view(np.uint8)[: packed.size] = packed
    return words.astype(np.uint64, copy=False)
