"""Context-coded levels of a vector's matrices: the choice of the tier and of the streams.

A vector of millions of values is cut where its matrices begin, into streams that know nothing of each other and can be
coded at the same time. Where depends on the matrices alone, so that the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import importlib
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
from fedcomp.kernels.portable_contexts import FIRST, NONE, PATTERNS, begun, ended, finished, opened
from fedcomp.kernels.portable_contexts import MOST_BITS as MOST_BITS

T = TypeVar("T")

ContextTier = Literal["auto", "c", "numba", "numpy"]

PORTABLE_MOST: Final = 4096
"""Values that plain Python codes in a tenth of a second; beyond, a compiled tier is worth a second of loading it."""

_ENDLESS: Final = 1 << 62
_STREAM_BITS: Final = 22
"""A vector shorter than two to this power is one stream."""

_MOST_STREAMS: Final = 4
"""The maximum number of streams is two to this power."""


@functools.cache
def has_c() -> bool:
    """Whether the compiled file of this package is there: built with it where a compiler was."""
    return importlib.util.find_spec("fedcomp.kernels._contexts") is not None


def compiled() -> bool:
    """Whether long vectors are coded by compiled code here, a hundred times as fast as without."""
    return has_c() or tiers.has_numba()


@dataclass(frozen=True)
class Words:
    """The functions of :mod:`~fedcomp.kernels.portable_contexts`, by compiled code that reads and writes words.

    Attributes
    ----------
    compiled : module
        ``code(writes, levels, shapes, top, most, words, state, first)`` writes levels to ``words`` or reads them, from
        the ``state`` of a coder on, which it replaces, and returns the decisions; -1 where these were more than
        ``most``, -2 for a row of zeros without a flag, -3 where the words are full. ``quantise(values, inverse, draws,
        out)`` writes levels, rounded where there are no draws, and ``magnitudes(values, counts)`` adds to counts.
    """

    compiled: Any

    def encode(self, levels: NDArray[np.int32], shapes: NDArray[np.int64], top: int) -> tuple[bytes, int]:
        """See :func:`fedcomp.kernels.portable_contexts.encode`."""
        room = levels.size // 8 + 256
        while True:
            state, words = begun(0), np.empty(room, np.uint32)
            decisions = self.compiled.code(True, levels, shapes, top, _ENDLESS, words, state, FIRST)
            if decisions >= 0:
                return finished(words, state), decisions
            room *= 4

    def decode(self, coded: bytes, shapes: NDArray[np.int64], top: int, most: int, out: NDArray[np.int32]) -> int:
        """See :func:`fedcomp.kernels.portable_contexts.decode`."""
        words, state = opened(coded)
        decisions = self.compiled.code(False, out, shapes, top, most, words, state, FIRST)
        return decisions if decisions < 0 or ended(coded, state) else -2

    def quantise(
        self, values: NDArray[np.float32], inverse: float, draws: NDArray[np.uint32] = NONE
    ) -> NDArray[np.int32]:
        """See :func:`fedcomp.kernels.portable_contexts.quantise`."""
        out = np.empty(values.size, np.int32)
        self.compiled.quantise(values, inverse, draws, out)
        return out

    def magnitudes(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """See :func:`fedcomp.kernels.portable_contexts.magnitudes`."""
        counts = np.zeros(PATTERNS, np.int64)
        self.compiled.magnitudes(values, counts)
        return counts


def tier_of(size: int, tier: ContextTier = "auto") -> Any:
    """Return what codes ``size`` values: :mod:`~fedcomp.kernels.portable_contexts`, or :class:`Words`.

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
    # Only now: numba takes a second and more to import, and the compiled file may not be there.
    return Words(importlib.import_module("fedcomp.kernels." + ("_contexts" if tier == "c" else "compiled_contexts")))


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

    def encode(self, levels: NDArray[np.int32], top: int) -> tuple[list[bytes], int]:
        """Return the bytes of each stream of ``levels`` of at most ``top`` bits, and how many decisions all take."""
        found = self._each(lambda kernels, part, shapes, _: kernels.encode(levels[part], shapes, top))
        return [coded for coded, _ in found], sum(decisions for _, decisions in found)

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
