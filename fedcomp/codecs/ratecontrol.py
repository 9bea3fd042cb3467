"""The step of levels that fit a budget: a guess from a histogram, corrected by what trials cost.

Steps have seven bits of mantissa. What is compared are integers, so that every machine chooses the same one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.contexts import MOST_BITS, Streams, costs, tier_of
from fedcomp.rng import Key
from fedcomp.wire.modelled import LEAST_STEP, MOST_STEP, Shapes, draws

TRIALS: Final = 5
"""Costs that are worked out at most before what fits is taken."""

_OCTAVE: Final = 128
_TENTH: Final = 18
"""Steps of the grid that make a step a tenth longer."""

_GOAL: Final = 98
"""Per cent of the budget that are aimed at, and those from which a search is over."""

_ENOUGH: Final = 96

_LOOSE: Final = 93
"""The same where trials look at a part of the rows."""

_SAMPLED: Final = 1 << 18
"""Values from which trials look at a third of the rows."""

_PIECE: Final = 256


def width(step: int) -> np.float32:
    """Return the float32 of a step."""
    return np.array([step << 16], np.uint32).view(np.float32)[0]


def step_of(value: float) -> int:
    """Return the longest step that is not longer than ``value``, a positive number."""
    return int(np.array([value], np.float32).view(np.uint32)[0] >> 16)


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


def _log2(number: int) -> int:
    """Return 256 log2 of a positive integer, rounded."""
    shift = number.bit_length() - 12
    top = number >> shift if shift > 0 else number << -shift
    return 256 * (shift + 12) - int(costs()[top])


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
        high = largest + 6 * _OCTAVE if dithered else step_of(1.6 * float(np.abs(values).max()))
        self.high = min(max(self.low, high), MOST_STEP)
        self._whole = Streams(shapes)
        self._sample, self._third = self._sampled()
        self._factor = values.size / max(1, self._third.size)
        self._ratio = (95, 100)
        self.decisions = 0

    def levels(self, step: int, *, whole: bool = True, trial: bool = True) -> NDArray[np.int32]:
        """Return the levels of a step: of all values or those that trials look at, for a trial or to be sent."""
        return self._quantised(self.values if whole else self._sample, step, trial)

    def search(self, goal: int) -> tuple[int, int, bool]:
        """Return the shortest step found whose levels cost at most ``goal`` 1/256 bits, the longest known to cost more,
        and whether the first one does not; if it does, it is :attr:`high`.

        Where trials look at a third of the rows, the whole is worked out once or twice to correct them.
        """
        step, over, fits = self._search(goal)
        for _ in range(2 if self._whole is not self._third else 0):
            levels = self.levels(step, whole=True)
            cost = self._whole.cost(levels, bits_of(levels))[0]
            if _LOOSE * goal <= 100 * cost <= 100 * goal or (cost <= goal and step == self.low):
                break
            self._factor = self._factor * cost / max(1, self.cost(step))
            step, over, fits = self._search(goal)
        return step, over, fits

    def _search(self, goal: int) -> tuple[int, int, bool]:
        over, fits = self.low - 1, self.high + 1
        step = self.high
        for _ in range(TRIALS):
            if over + 1 >= fits:
                break
            ratio, order0 = self._ratio
            step = self._known.step(goal * _GOAL * order0 // (100 * ratio), over + 1, min(fits - 1, self.high))
            cost = self.cost(step)
            # What contexts save; it changes little from step to step.
            self._ratio = max(cost, 1), max(self._known.order0(step), 1)
            if cost > goal:
                over = step
                continue
            fits = step
            if 100 * cost >= _ENOUGH * goal:
                break
        while fits > self.high > over:
            step = min(over + _TENTH, self.high)
            if self.cost(step) <= goal:
                fits = step
            else:
                over = step
        return min(fits, self.high), over, fits <= self.high

    def cost(self, step: int) -> int:
        """Return about what the levels of a step cost, in 1/256 bit; :attr:`decisions` are about those it takes."""
        levels = self.levels(step, whole=False)
        found, decisions = self._third.cost(levels, bits_of(levels))
        self.decisions = int(self._factor * decisions)
        return int(self._factor * found)

    def _sampled(self) -> tuple[NDArray[np.float32], Streams]:
        """Return the rows that trials look at."""
        if self.values.size < _SAMPLED:
            return self.values, self._whole
        parts, shapes, at = [], [], 0
        for rows, columns in self.shapes:
            every = 3 if rows >= 12 else 1
            part = self.values[at : at + rows * columns].reshape(rows, columns)[::every]
            parts.append(part.reshape(-1))
            shapes.append(part.shape)
            at += rows * columns
        return np.concatenate(parts), Streams(tuple(shapes))

    def _quantised(self, values: NDArray[np.float32], step: int, trial: bool) -> NDArray[np.int32]:
        kernels = tier_of(values.size)
        if not self._dithered:
            return kernels.quantise(values, np.float32(1.0) / width(step))
        drawn = draws(self._seed, values.size, purpose="trial" if trial else "dither")
        return kernels.dithered(values, 1.0 / float(width(step)), drawn)

    def cut(self, step: int, goal: int, key: Key) -> NDArray[np.int32]:
        """Return levels of a step of which so many of magnitude 1 are left out that they cost ``goal`` at most.

        Where magnitudes are equal, no step sends some of them: rows, or pieces of long ones, stay in an order drawn
        from ``key``, and the largest value stays in any case.
        """
        levels = self.levels(step, trial=False)
        ranks, pieces = self._ranks(key)
        ones = np.flatnonzero(np.abs(levels) == 1)
        ones = ones[ones != int(np.abs(self.values).argmax())]
        place, streams = ranks[ones], self._whole
        kept, more = 0, pieces
        while kept < more:
            middle = (kept + more + 1) // 2
            tried = levels.copy()
            tried[ones[place >= middle]] = 0
            if streams.cost(tried, bits_of(tried))[0] <= goal:
                kept = middle
            else:
                more = middle - 1
        levels[ones[place >= kept]] = 0
        return levels

    def _ranks(self, key: Key) -> tuple[NDArray[np.int64], int]:
        """Return the rank of the piece of a row in which each value lies, and the number of pieces."""
        found, count = [], 0
        for rows, columns in self.shapes:
            pieces = -(-columns // _PIECE)
            row, column = np.divmod(np.arange(rows * columns), columns)
            found.append(count + row * pieces + column // _PIECE)
            count += rows * pieces
        order = np.argsort(key.at(purpose="cut").bits(count), kind="stable")
        ranks = np.empty(count, np.int64)
        ranks[order] = np.arange(count)
        return ranks[np.concatenate(found)], count


def bits_of(levels: NDArray[np.int32]) -> int:
    """Return the bits of the largest magnitude."""
    return max(int(levels.max(initial=0)), -int(levels.min(initial=0))).bit_length()
