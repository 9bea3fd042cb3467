"""The quantisation step that meets a byte budget: an estimate from a histogram, corrected by trial encodings.

Steps have seven bits of mantissa. What is compared are integers, so that every machine chooses the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.base import norm
from fedcomp.kernels.contexts import MOST_BITS, NONE, Streams, tier_of
from fedcomp.rng import Key
from fedcomp.wire.modelled import LEAST_STEP, MOST_STEP, Shapes, draws, width

TRIALS: Final = 5
"""Times that all levels are coded at most before what fits is taken."""

_OCTAVE: Final = 128
_TENTH: Final = 18
"""Number of grid steps that make a step a tenth longer."""

_GOAL: Final = 99
"""Target percentage of the budget, and the percentage at which a search ends."""

_ENOUGH: Final = 98

_LOOSE: Final = 95
"""The same for vectors that are long enough to estimate from some rows how much contexts save."""

_SAMPLE: Final = 1 << 17
"""Minimum number of values in these rows."""

_EVERY: Final = 8
_PIECE: Final = 64

Cost = Callable[[int, NDArray[np.int32]], int]
"""What a step and its levels take, in bytes."""


def step_of(value: float) -> int:
    """Return the longest step that is not longer than ``value``, a positive number."""
    return int(np.array([value], np.float32).view(np.uint32)[0] >> 16)


def largest_of(values: NDArray[np.float32]) -> float:
    """Return the largest magnitude; 0 of none."""
    return max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))


class Magnitudes:
    """How many magnitudes lie where, and what their levels cost without contexts.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        Finite, contiguous.
    dithered : bool
        Whether levels are rounded after a draw was added: magnitudes below a step are then levels by chance.
    """

    def __init__(self, values: NDArray[np.float32], dithered: bool) -> None:
        counts = tier_of(values.size).magnitudes(values)
        self.size = values.size
        self.largest = int(np.flatnonzero(counts)[-1])
        self._above = np.append(counts[::-1].cumsum()[::-1], 0)
        first = 1.0 if dithered else 0.6
        self._limits = np.array([first, *(2.0**bits - 0.5 for bits in range(1, MOST_BITS + 1))], np.float32)
        self._sums = None
        if dithered:
            middle = (np.arange(counts.size, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
            middle[255 << 7 :] = 0.0
            # One after the other: the same float64 on every machine.
            self._sums = np.append(0.0, np.cumsum(counts * middle.astype(np.float64)))

    def order0(self, step: int) -> int:
        """Return what levels of this step cost in 1/256 bit, each by its own frequency."""
        with np.errstate(over="ignore"):  # beyond all values
            limits = (self._limits * width(step)).view(np.uint32)
        patterns, parts = (limits >> 16).astype(np.int64), (limits & 0xFFFF).astype(np.int64)
        here, above = self._above[patterns], self._above[patterns + 1]
        found = above + ((here - above) * (65_536 - parts) >> 16)
        if self._sums is not None:
            found[0] += int(self._sums[int(patterns[0])] / float(width(step)))
        counts = [self.size - int(found[0]), *(-np.diff(found)).tolist()]
        whole = _log2(self.size)
        return sum(n * (whole - _log2(n) + 256 * size) for size, n in enumerate(counts) if n > 0)

    def step(self, goal: int, low: int, high: int) -> int:
        """Return the shortest step from ``low`` to ``high`` whose levels cost at most ``goal``; else ``high``."""
        while low < high:
            middle = (low + high) // 2
            if self.order0(middle) <= goal:
                high = middle
            else:
                low = middle + 1
        return low


@functools.cache
def _logs() -> list[int]:
    """Return 256 log2(i) for i up to 4096, half rounded up: the bit length of i**512 is floor(512 log2(i)) + 1."""
    return [0, *((i**512).bit_length() // 2 for i in range(1, 4097))]


def _log2(number: int) -> int:
    """Return 256 log2 of a positive integer, rounded."""
    shift = number.bit_length() - 12
    return 256 * shift + _logs()[number >> shift if shift > 0 else number << -shift]


class RateControl:
    """Finds the step of one vector.

    Parameters
    ----------
    values : ndarray of float32, shape (n,)
        Not all zero, below 2**125.
    shapes : tuple of (rows, columns)
    dithered : bool
    seed : int
        Of the dither that is sent. Trials draw another one: a step that was chosen by the draws it is used with would
        turn the mean of what is decoded away from the vector.
    """

    def __init__(self, values: NDArray[np.float32], shapes: Shapes, dithered: bool, seed: int) -> None:
        self.values, self.shapes, self._dithered, self._seed = values, shapes, dithered, seed
        self._known = Magnitudes(values, dithered)
        largest = self._known.largest
        # Levels of 17 bits at most; and of the longest rounded step the largest magnitude is a level still.
        self.low = min(max(LEAST_STEP, largest - MOST_BITS * _OCTAVE + 4), MOST_STEP)
        high = largest + 6 * _OCTAVE if dithered else step_of(1.6 * largest_of(values))
        self.high = min(max(self.low, high), MOST_STEP)
        self._tried = NONE

    def levels(self, step: int, *, trial: bool = True) -> NDArray[np.int32]:
        """Return the levels of all values at a step, for a trial or to be sent."""
        return self._quantised(self.values, step, trial)

    def search(self, goal: int, cost: Cost) -> tuple[int, int]:
        """Return the longest step known to cost more than ``goal``, and the shortest found that does not.

        Parameters
        ----------
        goal : int
            In bytes.
        cost : callable

        Returns
        -------
        (int, int)
            The first is below :attr:`low` where no step is known to cost more, the second above :attr:`high` where all
            do.
        """
        over, fits = self.low - 1, self.high + 1
        ratio = self._sampled_ratio(goal)
        enough = _ENOUGH if self.values.size < 2 * _SAMPLE else _LOOSE
        for _ in range(TRIALS):
            if over + 1 >= fits:
                break
            step = self._aimed(goal, ratio, over + 1, min(fits - 1, self.high))
            found = cost(step, self.levels(step))
            # What contexts save; it changes little from step to step.
            ratio = max(found, 1), max(self._known.order0(step), 1)
            if found > goal:
                over = step
                continue
            fits = step
            if 100 * found >= enough * goal:
                break
        longer = _TENTH
        while fits > self.high > over:
            step = min(over + longer, self.high)
            longer *= 2
            if cost(step, self.levels(step)) <= goal:
                fits = step
            else:
                over = step
        return over, fits

    def guess(self, goal: int) -> int:
        """Return the shortest step whose levels cost at most ``goal`` bytes without contexts."""
        return self._known.step(2048 * goal, self.low, self.high)

    def error(self, step: int) -> float:
        """Return the square of what dithered levels of a step are off by, as expected, over that of the values."""
        return self.values.size / 12.0 * (float(width(step)) / norm(self.values)) ** 2

    def _aimed(self, goal: int, ratio: tuple[int, int], low: int, high: int) -> int:
        cost, order0 = ratio
        return self._known.step(goal * _GOAL * order0 // (100 * cost), low, high)

    def _sampled_ratio(self, goal: int) -> tuple[int, int]:
        """Return the cost of levels in bytes and, without contexts, in 1/256 bit; only for some rows if there are
        many."""
        ratio, every = (95, 100 * 2048), min(_EVERY, self.values.size // _SAMPLE)
        if every < 2:
            return ratio
        parts, at = [], 0
        for rows, columns in self.shapes:
            whole = self.values[at : at + rows * columns].reshape(rows, columns)
            parts.append(whole[::every] if rows >= 4 * every else whole[:, : -(-columns // every)])
            at += rows * columns
        values, streams = np.concatenate([part.reshape(-1) for part in parts]), Streams(tuple(p.shape for p in parts))
        if not values.any():
            return ratio
        known = Magnitudes(values, self._dithered)
        for _ in range(2):
            step = self._aimed(goal, ratio, self.low, self.high)
            levels = self._quantised(values, step, trial=True)
            coded, _ = streams.encode(levels, max(1, bits_of(levels)))
            ratio = sum(map(len, coded)) + 1, known.order0(step) + 1
        return ratio

    def _quantised(self, values: NDArray[np.float32], step: int, trial: bool) -> NDArray[np.int32]:
        drawn = NONE
        if self._dithered and trial:
            if self._tried.size < values.size:
                self._tried = draws(self._seed, values.size, purpose="trial")
            drawn = self._tried[: values.size]
        elif self._dithered:
            drawn = draws(self._seed, values.size)
        return tier_of(values.size).quantise(values, 1.0 / float(width(step)), drawn)

    def cut(self, step: int, goal: int, key: Key, cost: Cost) -> None:
        """Try levels of a step of which so many of magnitude 1 are left out that they cost ``goal`` at most.

        Where magnitudes are equal, no step sends some of them: pieces of the vector stay in an order drawn from
        ``key``, and the largest value stays in any case.
        """
        levels = self.levels(step)
        drawn = key.at(purpose="cut").bits(-(-levels.size // _PIECE))
        ones = np.flatnonzero(np.abs(levels) == 1)
        ones = ones[ones != int(np.abs(self.values).argmax())]
        place = np.argsort(np.argsort(drawn, kind="stable"))[ones // _PIECE]
        kept, more, found = -1, drawn.size, 0
        while kept < more and not _ENOUGH * goal <= 100 * found <= 100 * goal:
            middle = (kept + more + 1) // 2
            tried = levels.copy()
            tried[ones[place >= middle]] = 0
            found = cost(step, tried)
            if found <= goal:
                kept = middle
            else:
                more = middle - 1


def bits_of(levels: NDArray[np.int32]) -> int:
    """Return the bits of the largest magnitude."""
    return max(int(levels.max(initial=0)), -int(levels.min(initial=0))).bit_length()
