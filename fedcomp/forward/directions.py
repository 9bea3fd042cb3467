"""Directions of signs that client and server draw alike, and the estimate of a gradient that their scalars make.

A client that knows ``<gradient, v>`` for some directions v sends these numbers and nothing else; whoever draws the same
directions has the estimate ``mean of <gradient, v> v``. It is unbiased where the signs of v are independent; its
variance, summed over the coordinates, is ``(p - 1) |gradient|² / m`` for m directions of p signs (derived; measured in
the tests), a little less than with normal numbers. Weight directions in a federation: BAFFLE, Spry, FedKSeed
(abstracts and code read); what is drawn here, how and in which order it is added is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp import params
from fedcomp.errors import LayoutError
from fedcomp.kernels import add_signs, sign_products
from fedcomp.kernels.tiers import Tier
from fedcomp.rng import Key

_BLOCK = 1 << 14
"""Words of all directions that are held at a time: the second cache's share."""


@dataclass(frozen=True)
class Directions:
    """Directions in {-1, 1}^p, drawn from a key.

    A direction's signs are the bits of its own stream, as :meth:`fedcomp.rng.Key.bits` gives them on every platform
    and in every process: neither node ids nor any library's normal numbers are in them.

    Parameters
    ----------
    key : Key
        Names them: seed, purpose, round and partition.
    sizes : sequence of int
        Coordinates of each block. Every direction is one for each block, with a scalar of its own; one block of all is
        the plain estimate.
    count : int
        Directions of each block, m.

    Raises
    ------
    ConfigError
        For a number below 1.

    Examples
    --------
    >>> directions = Directions(Key(0, "forward", round=1), sizes=[4], count=2)
    >>> directions.signs(0, 0)
    array([ 1., -1., -1., -1.], dtype=float32)
    >>> gradient = np.float32([1.0, 2.0, 3.0, 4.0])
    >>> scalars = [[directions.signs(0, k) @ gradient for k in range(2)]]
    >>> directions.combine(scalars).shape
    (4,)
    """

    key: Key
    sizes: tuple[int, ...]
    count: int

    def __init__(self, key: Key, sizes: Sequence[int], count: int) -> None:
        params.assign(
            self,
            key=key,
            sizes=tuple(params.integer("sizes", size, low=1) for size in sizes),
            count=params.integer("count", count, low=1),
        )

    @property
    def size(self) -> int:
        """Coordinates of all blocks together, p."""
        return sum(self.sizes)

    def words(self, block: int, direction: int) -> NDArray[np.uint64]:
        """Return the signs of one direction as bits, set for -1: shape (ceil(size of the block / 64),)."""
        return self._stream(block, direction).bits(-(-self.sizes[block] // 64))

    def signs(self, block: int, direction: int) -> NDArray[np.float32]:
        """Return one direction, shape (size of the block,)."""
        little = self.words(block, direction).astype("<u8").view(np.uint8)
        negative = np.unpackbits(little, count=self.sizes[block], bitorder="little")
        return np.float32(1.0) - np.float32(2.0) * negative.astype(np.float32)

    def project(self, vector: NDArray[np.float32], *, tier: Tier = "auto") -> NDArray[np.float64]:
        """Return the products of a vector with all directions, shape (blocks, count), float64.

        Parameters
        ----------
        vector : float32 array, shape (size,)

        Raises
        ------
        LayoutError
            When the vector is not of the directions' size.
        """
        if vector.shape != (self.size,):
            raise LayoutError(f"a vector of shape {vector.shape} has no products with directions of {self.size} signs")
        out = np.empty((len(self.sizes), self.count))
        start = 0
        for block, size in enumerate(self.sizes):
            here, start = vector[start : start + size], start + size
            for some in self._held(np.arange(self.count), size):
                out[block, some] = sign_products(here, self._stack(block, some), tier=tier)
        return out

    def combine(self, scalars: ArrayLike, *, tier: Tier = "auto") -> NDArray[np.float64]:
        """Return the mean over the directions of scalar times direction, shape (size,), float64.

        Both ends add in the same order, in float64, so that what a client would have estimated is what the server
        has, bit for bit.

        Parameters
        ----------
        scalars : array-like, shape (blocks, count)
            ``<gradient, direction>``. A direction whose scalar is NaN was not evaluated: it is left out, and the mean
            is over the others of its block.

        Raises
        ------
        LayoutError
            When there are not as many scalars as directions.
        """
        given = np.asarray(scalars, np.float64)
        if given.shape != (len(self.sizes), self.count):
            raise LayoutError(
                f"{given.shape} scalars are not those of {len(self.sizes)} blocks of {self.count} directions"
            )
        out = np.zeros(self.size)
        start = 0
        for block, size in enumerate(self.sizes):
            here, start = out[start : start + size], start + size
            known = np.flatnonzero(~np.isnan(given[block]))
            for some in self._held(known, size):
                add_signs(here, self._stack(block, some), given[block, some], tier=tier)
            # Divided once, at the end: a product for every sign would round every time.
            here /= max(1, known.size)
        return out

    def _held(self, directions: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
        """Yield directions in their order, as many at a time as may be held."""
        step = max(1, _BLOCK * 64 // size)
        for start in range(0, directions.size, step):
            yield directions[start : start + step]

    def _stack(self, block: int, directions: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.stack([self.words(block, int(k)) for k in directions])

    def _stream(self, block: int, direction: int) -> Key:
        return self.key.at(purpose=f"{self.key.purpose}/{block}", layer=direction)


def variance(sizes: Sequence[int], lengths: ArrayLike, count: int) -> float:
    """Return the expected squared error of an estimate: the sum over blocks of (p - 1) |gradient of the block|² / m.

    Parameters
    ----------
    lengths : array-like, shape (blocks,)
        Euclidean norms of the gradient's blocks.

    Examples
    --------
    >>> variance([64], [1.0], count=1)
    63.0
    """
    return float(np.sum((np.asarray(sizes, np.float64) - 1.0) * np.square(lengths)) / count)


def step_scale(size: int, directions: int) -> float:
    """Return what a step size of exact gradients is to be multiplied by: m / (m + p - 1), for m directions in all.

    The estimate's squared length is (m + p - 1) / m times the gradient's, and the largest stable step of SGD on a
    parabola falls by as much (derived).

    Examples
    --------
    >>> round(step_scale(2410, 32 * 4), 4)
    0.0505
    """
    return directions / (directions + size - 1.0)
