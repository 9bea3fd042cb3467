"""Levels of a vector's matrices in the bytes of a range coder: which tier codes them, and in which streams.

A vector of millions of values is cut where its matrices begin, into streams that know nothing of each other and can be
coded at the same time. Where depends on the matrices alone, so that the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.kernels import portable_contexts, tiers
from fedcomp.kernels.portable_contexts import MOST_BITS as MOST_BITS
from fedcomp.kernels.portable_contexts import costs as costs

T = TypeVar("T")

ContextTier = Literal["auto", "c", "numba", "numpy"]

PORTABLE_MOST: Final = 4096
"""Values that plain Python codes in a tenth of a second; beyond, a compiled tier is worth a second of loading it."""

_STREAM_BITS: Final = 22
"""A vector shorter than two to this power is one stream."""

_MOST_STREAMS: Final = 4
"""Two to this power are the most streams."""


@functools.cache
def has_c() -> bool:
    """Whether the compiled file of this package is there: built with it where a compiler was."""
    return importlib.util.find_spec("fedcomp.kernels._contexts") is not None


def compiled() -> bool:
    """Whether long vectors are coded by compiled code here, a hundred times as fast as without."""
    return has_c() or tiers.has_numba()


def tier_of(size: int, tier: ContextTier = "auto") -> Any:
    """Return the module that codes ``size`` values.

    Raises
    ------
    ConfigError
        For a tier that is unknown, or is not installed.
    """
    if tier not in ("auto", "c", "numba", "numpy"):
        raise ConfigError(f"unknown kernel tier {tier!r}; use 'auto', 'c', 'numba' or 'numpy'")
    if tier == "auto":
        loaded = "fedcomp.kernels.compiled_contexts" in sys.modules
        numba = tiers.has_numba() and (loaded or size > PORTABLE_MOST)
        tier = "c" if has_c() else "numba" if numba else "numpy"
    if tier == "numpy":
        return portable_contexts
    if not (has_c() if tier == "c" else tiers.has_numba()):
        raise ConfigError(f"kernel tier {tier!r} was asked for but is not installed, or numba's compiler is off")
    if tier == "c":
        from fedcomp.kernels import native_contexts

        return native_contexts
    # Only now: importing it imports numba, which takes a second and more.
    from fedcomp.kernels import compiled_contexts

    return compiled_contexts


@dataclass(frozen=True)
class Streams:
    """How the levels of matrices are coded.

    Attributes
    ----------
    shapes : tuple of (rows, columns)
        Of the matrices, one after the other; a vector is one row.
    tier : {"auto", "c", "numba", "numpy"}
        All give the same bytes.
    threads : int
        Most that work at the same time; 0: as many as there are processors.
    """

    shapes: tuple[tuple[int, int], ...]
    tier: ContextTier = "auto"
    threads: int = 0

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return sum(rows * columns for rows, columns in self.shapes)

    @cached_property
    def parts(self) -> tuple[tuple[slice, NDArray[np.int64]], ...]:
        """The streams: which values, and the shapes of the matrices among them, int64 of shape (count, 2)."""
        count = 1 << min(_MOST_STREAMS, (self.size >> _STREAM_BITS).bit_length())
        found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        at = 0
        for rows, columns in self.shapes:
            if rows * columns:
                found[at * count // self.size].append((rows, columns))
                at += rows * columns
        parts, at = [], 0
        for shapes in filter(None, found):
            size = sum(rows * columns for rows, columns in shapes)
            parts.append((slice(at, at + size), np.array(shapes, np.int64)))
            at += size
        return tuple(parts)

    def cost(self, levels: NDArray[np.int32], top: int) -> tuple[int, int]:
        """Return what ``levels`` of at most ``top`` bits take, in 1/256 bit, and in how many decisions."""
        found = self._each(lambda kernels, part, shapes, _: kernels.cost(levels[part], shapes, top))
        return sum(cost for cost, _ in found), sum(decisions for _, decisions in found)

    def encode(self, levels: NDArray[np.int32], top: int) -> list[bytes]:
        """Return the bytes of each stream."""
        return self._each(lambda kernels, part, shapes, _: kernels.encode(levels[part], shapes, top))

    def decode(self, coded: Sequence[bytes], top: int, most: int, out: NDArray[np.int32]) -> int:
        """Write the levels into ``out``.

        Parameters
        ----------
        coded : sequence of bytes
            Of each stream.
        most : int
            Decisions after which a stream is given up.

        Returns
        -------
        int
            The decisions of all streams; -1 where one took more than ``most``, -2 where one's bytes are not those of
            an encoder.
        """
        found = self._each(lambda kernels, part, shapes, i: kernels.decode(coded[i], shapes, top, most, out[part]))
        return min(found) if min(found, default=0) < 0 else sum(found)

    def _each(self, work: Callable[[Any, slice, NDArray[np.int64], int], T]) -> list[T]:
        kernels = tier_of(self.size, self.tier)
        jobs = [(part, shapes.tolist() if kernels is portable_contexts else shapes) for part, shapes in self.parts]
        threads = min(len(jobs), self.threads or os.cpu_count() or 1)
        if threads <= 1:
            return [work(kernels, *job, i) for i, job in enumerate(jobs)]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda i: work(kernels, *jobs[i], i), range(len(jobs))))
