"""Exact vectorised samples of a log-concave distribution on the integers, by rejection from a staircase.

See :mod:`fedcomp.privacy.noise` for why it is exact. Weights are counted in 2^-64 of the whole, so that one random word
draws a stair; a second one draws the place on it and the number that is compared with the density.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.privacy.densities import TOLERANCE, Density
from fedcomp.privacy.entropy import Entropy

_COLUMNS: Final = 11
"""Bits of the alias table's index; 2048 columns are enough for every staircase."""
_CAPACITY: Final = 1 << (64 - _COLUMNS)
_STAIRS: Final = 32
"""Minimum number of stairs in one standard deviation, if it contains as many integers; one draw in a hundred is
rejected."""
_TAIL: Final = 4
"""Weight of one side's tail."""
_BLOCK: Final = 1 << 15
"""Number of draws at a time, so the intermediate arrays stay in the cache."""
_DIGITS: Final = 30
_TINY: Final = 2.0**-900
"""Probabilities below this are decided with exact arithmetic."""


@dataclass(frozen=True, eq=False)
class Staircase:
    """A density and its staircase.

    Attributes
    ----------
    density : Density
    width : int
        log2 of the integers of one stair.
    stairs : int
        Of each side; side 0 holds x >= 0, side 1 holds x < 0 as -1 - x. Entry 2 b + s is stair b of side s.
    scale : int
        Weight that a stair as high as the density at 0 would have.
    weights : ndarray of uint64, (2 stairs,)
        Of the stairs, at least ``scale`` times the relative density at their inner end.
    tail : int
        log2 of the integers of the tail's first piece; all pieces have as many, and every next one half the weight.
    threshold, alias : ndarray, (2048,)
        The alias table: below the threshold the column's own entry, else the alias.
    squeeze : ndarray of uint64, (2 stairs + 3,)
        A number below this is kept without looking at the density.
    """

    density: Density
    width: int
    stairs: int
    scale: int
    weights: NDArray[np.uint64]
    tail: int
    threshold: NDArray[np.uint64]
    alias: NDArray[np.int64]
    squeeze: NDArray[np.uint64]

    @property
    def bits(self) -> int:
        """Bits of the number that is compared with the density; the other bits of its word draw the place."""
        return min(53, 64 - self.width)

    def sample(self, count: int, entropy: Entropy) -> NDArray[np.int64]:
        """Return ``count`` independent draws, (count,)."""
        out = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            # One proposal in a hundred is rejected: three in a hundred more than needed are drawn, so one pass is the
            # rule.
            found = self.propose(min(_BLOCK, count - filled + (count - filled) // 32 + 16), entropy)
            taken = min(found.size, count - filled)
            out[filled : filled + taken] = found[:taken]
            filled += taken
        return out

    def propose(self, count: int, entropy: Entropy) -> NDArray[np.int64]:
        """Return what is kept of ``count`` proposals."""
        # One word draws the column of the alias table and the place within its weight.
        word = entropy.words(count)
        column = (word >> np.uint64(64 - _COLUMNS)).astype(np.int64)
        within = word & np.uint64(_CAPACITY - 1)
        entry = np.where(within < self.threshold[column], column, self.alias[column])
        word = entropy.words(count)
        # High bits and low bits: bits + width <= 64, so the number and the place are independent.
        number = word >> np.uint64(64 - self.bits)
        place = (word & np.uint64((1 << self.width) - 1)).astype(np.int64)
        value = ((entry >> 1) << self.width) + place
        # x ^ -1 is -1 - x: side 1 holds the negative integers, and 0 is on one side only.
        np.bitwise_xor(value, -(entry & 1), out=value)
        kept = number < self.squeeze[entry]
        doubtful = np.flatnonzero(~kept)
        if doubtful.size:
            self.settle(doubtful, entry, value, number, kept, entropy)
        return value[kept]

    def settle(
        self,
        doubtful: NDArray[np.int64],
        entry: NDArray[np.int64],
        value: NDArray[np.int64],
        number: NDArray[np.uint64],
        kept: NDArray[np.bool_],
        entropy: Entropy,
    ) -> None:
        """Decide the proposals that the squeeze did not, in place."""
        # Entries ``end`` and ``end + 1`` are the tails; ``end + 2`` fills up to 2^64 and is never kept.
        end = 2 * self.stairs
        on = doubtful[entry[doubtful] < end]
        weight = self.weights[entry[on]].astype(np.float64)
        chance = float(self.scale) * self.density.relative(value[on]) / weight
        drawn = number[on].astype(np.float64) * 2.0**-self.bits
        # The number drawn stands for an interval of length 2^-bits; the tolerance has room for the conversions.
        sure = drawn + 2.0**-self.bits <= chance * (1.0 - 2.0 * TOLERANCE)
        kept[on[sure]] = True
        # A density that float64 rounds to 0 is not 0.
        for i in on[~sure & (drawn < np.maximum(chance * (1.0 + 2.0 * TOLERANCE), _TINY))].tolist():
            kept[i] = self.keep(int(entry[i]), int(value[i]), int(number[i]), entropy)
        for i in doubtful[(entry[doubtful] == end) | (entry[doubtful] == end + 1)].tolist():
            found = self.beyond(int(entry[i]) - end, entropy)
            if found is not None:
                value[i] = found
                kept[i] = True

    def keep(self, entry: int, value: int, number: int, entropy: Entropy) -> bool:
        factor = Fraction(self.scale, int(self.weights[entry]))
        return below(number, self.bits, lambda digits: self._scaled(value, factor, digits), entropy)

    def beyond(self, side: int, entropy: Entropy) -> int | None:
        """Return a draw from beyond the last stair, or None: it is rejected."""
        piece = 0
        # Each piece has half the weight of the one before: a fair coin says whether to go on.
        while not entropy.bytes(1)[0] & 1:
            piece += 1
        place = int.from_bytes(entropy.bytes(8), "little") & ((1 << self.tail) - 1)
        value = (self.stairs << self.width) + (piece << self.tail) + place
        value = ~value if side else value
        # What one integer should weigh, scale / 2^width, over what it was proposed with, _TAIL / 2^(tail + piece + 1).
        factor = Fraction((self.scale << self.tail) << (piece + 1), _TAIL << self.width)
        return value if below(0, 0, lambda digits: self._scaled(value, factor, digits), entropy) else None

    def _scaled(self, value: int, factor: Fraction, digits: int) -> tuple[Fraction, Fraction]:
        low, high = self.density.bounds(value, digits)
        return low * factor, high * factor


def below(number: int, bits: int, bounds: Callable[[int], tuple[Fraction, Fraction]], entropy: Entropy) -> bool:
    """Return whether a uniform real number of [0, 1) is below another real number, exactly.

    Parameters
    ----------
    number, bits : int
        The first ``bits`` binary digits of the uniform one; more are drawn as they are needed.
    bounds : callable
        Takes a number of decimal digits, returns bounds on the other one about so close together.
    entropy : Entropy
    """
    digits = _DIGITS
    while True:
        low, high = bounds(digits)
        if Fraction(number + 1, 1 << bits) <= low:
            return True
        if Fraction(number, 1 << bits) >= high:
            return False
        number = (number << 64) | int.from_bytes(entropy.bytes(8), "little")
        bits += 64
        digits += _DIGITS


@lru_cache(maxsize=32)
def staircase(density: Density) -> Staircase:
    """Return the staircase of ``density``."""
    # A power of two, so that the place on a stair is the low bits of a word.
    width = max(0, int(density.spread / _STAIRS).bit_length() - 1)
    tail = max(width, int(density.spread).bit_length())
    stairs, scale = _measure(density, width, tail)
    entry = np.arange(2 * stairs)
    inner = (entry >> 1) << width
    sign = -(entry & 1)
    top = density.relative(inner ^ sign) * (1.0 + 2.0 * TOLERANCE)
    # At least 1, also where float64 has no number for the density any more: no integer is out of reach.
    weights = [max(1, int(np.ceil(float(scale) * h))) for h in top.tolist()]
    low = density.relative((inner + (1 << width) - 1) ^ sign) * (1.0 - 4.0 * TOLERANCE)
    bits = min(53, 64 - width)
    ratio = np.array([float(scale) * m / w for m, w in zip(low.tolist(), weights, strict=True)])
    # One less, since the number drawn is the lower end of an interval.
    squeeze = np.maximum(np.floor(ratio * 2.0**bits) - 1.0, 0.0).astype(np.uint64)
    rest = (1 << 64) - sum(weights) - 2 * _TAIL
    threshold, alias = _alias([*weights, _TAIL, _TAIL, rest])
    return Staircase(
        density=density,
        width=width,
        stairs=stairs,
        scale=scale,
        weights=np.array(weights, np.uint64),
        tail=tail,
        threshold=threshold,
        alias=alias,
        squeeze=np.concatenate([squeeze, np.zeros(3, np.uint64)]),
    )


def _measure(density: Density, width: int, tail: int) -> tuple[int, int]:
    """Return the number of stairs on each side, and the scale; the weights of the tails must cover everything
    beyond."""
    most = ((1 << _COLUMNS) - 3) // 2
    entry = np.arange(2 * most)
    side = -(entry & 1)
    heights = density.relative(((entry >> 1) << width) ^ side)
    # A little less than what is there, so that rounding every weight up does not cross 2^64.
    scale = int(2.0**64 * (1.0 - 2.0**-20) / (1.0 + 2.0 * TOLERANCE) / float(heights.sum()))
    factor = float(scale) * 2.0 ** (tail - width) * 2.0
    start = np.arange(1, most + 1)[:, None] << width ^ np.array([0, -1])
    here, following = density.relative(start), density.relative(start + np.array([1 << tail, -(1 << tail)]))
    # Log-concavity: what halves from one piece to the next here halves ever after.
    enough = (here * factor * 1.001 <= _TAIL) & (2.002 * following <= here)
    if not np.any(enough.all(axis=1)):
        raise AssertionError(f"{density} does not fall off fast enough for {most} stairs of 2^{width}")
    return int(np.argmax(enough.all(axis=1))) + 1, scale


def _alias(weights: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return thresholds and other entries of 2048 columns of equal weight (Walker 1974; Vose 1991), exactly."""
    size = 1 << _COLUMNS
    left = weights + [0] * (size - len(weights))
    assert sum(left) == size * _CAPACITY
    assert min(left) >= 0
    # Integers throughout: a threshold that was rounded would be another distribution.
    threshold = np.zeros(size, np.uint64)
    alias = np.arange(size)
    small = [i for i, w in enumerate(left) if w < _CAPACITY]
    large = [i for i, w in enumerate(left) if w >= _CAPACITY]
    while small:
        # The weights fill all columns exactly, so as long as one lacks something there is one that has too much.
        column, giver = small.pop(), large[-1]
        threshold[column] = left[column]
        alias[column] = giver
        left[giver] -= _CAPACITY - left[column]
        if left[giver] < _CAPACITY:
            small.append(large.pop())
    for column in large:
        assert left[column] == _CAPACITY
        threshold[column] = _CAPACITY
    return threshold, alias
