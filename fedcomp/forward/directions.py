"""Random sign directions that client and server draw from one seed, and the gradient estimate from their scalars.

A client that knows ``<gradient, v>`` for some directions v sends these numbers and nothing else; whoever draws the same
directions has the estimate ``mean of <gradient, v> v``. It is unbiased where the signs of v are independent; its
variance, summed over the coordinates, is ``(p - 1) |gradient|² / m`` for m directions of p signs (derived; measured in
the tests), a little less than with normal numbers. Weight directions in a federation: BAFFLE, Spry, FedKSeed
(abstracts and code read); what is drawn here, how and in which order it is added is derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.errors import LayoutError
from fedcomp.kernels import add_signs, sign_products
from fedcomp.kernels.tiers import Tier
from fedcomp.rng import Key, signs_of
from fedcomp.rules import LARGEST, Configured, Int, Many

GROUP: Final = 64
"""Directions that share a stream, word by word: what both ends have to agree on."""

_WORDS: Final = 256
"""Number of words of a direction drawn at a time, so that the elements of the sum stay in the second-level cache."""


@dataclass(frozen=True)
class Directions(Configured):
    """Directions in {-1, 1}^p, drawn from a key.

    Signs are the bits of a stream of each block's own, as :meth:`fedcomp.rng.Key.bits` gives them on every platform and
    in every process, one direction after the other: neither node ids nor any library's normal numbers are in them.

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
    sizes: Annotated[Sequence[int], Many(Int(1), LARGEST)]
    count: Annotated[int, Int(1)]

    @property
    def size(self) -> int:
        """Coordinates of all blocks together, p."""
        return sum(self.sizes)

    def words(self, block: int, direction: int) -> NDArray[np.uint64]:
        """Return the signs of one direction as bits, set for -1: shape (ceil(size of the block / 64),)."""
        group, place = divmod(direction, GROUP)
        return np.concatenate([words[:, place] for _, words in self._drawn(block, group)])

    def signs(self, block: int, direction: int) -> NDArray[np.float32]:
        """Return one direction, shape (size of the block,)."""
        return signs_of(self.words(block, direction), self.sizes[block])

    def each(self, block: int) -> Iterator[NDArray[np.float32]]:
        """Yield the directions of a block, as :meth:`signs` returns them; at the memory of 64 in bits."""
        for group in range(len(self._groups)):
            words = np.concatenate([words for _, words in self._drawn(block, group)])
            yield from (signs_of(column, self.sizes[block]) for column in words.T)

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
        out = np.zeros((len(self.sizes), self.count))
        start = 0
        for block, size in enumerate(self.sizes):
            here, start = vector[start : start + size], start + size
            for group, some in enumerate(self._groups):
                for part, words in self._drawn(block, group):
                    out[block, some] += sign_products(here[part], words, tier=tier)
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
            known = ~np.isnan(given[block])
            for group, some in enumerate(self._groups):
                # All of them, where nothing is missing: what is picked out is copied.
                picked = slice(None) if known[some].all() else known[some]
                for part, words in self._drawn(block, group):
                    add_signs(here[part], words[:, picked], given[block, some][picked], tier=tier)
            # Divided once, at the end: a product for every sign would round every time.
            here /= max(1, int(known.sum()))
        return out

    @property
    def _groups(self) -> list[slice]:
        return [slice(first, min(first + GROUP, self.count)) for first in range(0, self.count, GROUP)]

    def _drawn(self, block: int, group: int) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
        """Yield the signs of a group in parts of the block: the part, and words of shape (words, directions)."""
        key = self.key.at(purpose=f"{self.key.purpose}/{block}", layer=group)
        size, some = self.sizes[block], self._groups[group]
        count, total = some.stop - some.start, -(-size // 64)
        for first in range(0, total, _WORDS):
            last = min(first + _WORDS, total)
            words = key.bits((last - first) * count, first * count)
            yield slice(first * 64, min(last * 64, size)), words.reshape(last - first, count)


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
