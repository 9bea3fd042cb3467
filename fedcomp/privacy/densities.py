"""Densities of integer noise relative to their value at 0: in float64 with a known error, and to any precision.

Both are log-concave and largest at 0, which is all that :mod:`fedcomp.privacy.staircase` takes as given.
"""

from __future__ import annotations

import decimal
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

TOLERANCE: Final = 2.0**-40
"""Relative error of :meth:`Density.relative`, at most, down to densities of e^-64; the real one is near 2^-46."""

_NEAR: Final = 1 << 16
"""Quotients of factorials below this are computed as products; above, Stirling's series has more digits than needed."""

_LOOKED_UP: Final = 1 << 12
"""Poisson densities with a mean below this are stored in an array."""


class Density(ABC):
    """A distribution on the integers, up to a factor."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """About one standard deviation."""

    @abstractmethod
    def relative(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return f(x) / f(0) with a relative error of :data:`TOLERANCE` at most, 0 where f is."""

    @abstractmethod
    def bounds(self, at: int, digits: int) -> tuple[Fraction, Fraction]:
        """Return two numbers between which f(at) / f(0) lies, about ``digits`` decimal digits apart."""


@dataclass(frozen=True)
class Gauss(Density):
    """exp(-x^2 / (2 sigma^2)).

    Parameters
    ----------
    sigma : float
    """

    sigma: float

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return self.sigma

    def relative(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the density relative to that at 0."""
        # A square that overflows has a density of 0, which is what comes out.
        with np.errstate(over="ignore", under="ignore"):
            return np.exp(-0.5 * np.square(at / self.sigma))

    def bounds(self, at: int, digits: int) -> tuple[Fraction, Fraction]:
        """Return bounds on the density relative to that at 0."""
        if at == 0:
            return Fraction(1), Fraction(1)
        return _exponential(-(Fraction(at) ** 2) / (2 * Fraction(self.sigma) ** 2), digits)


@dataclass(frozen=True)
class Poisson(Density):
    """lambda^k exp(-lambda) / k! at k = floor(lambda) + x.

    Parameters
    ----------
    mean : Fraction
        lambda > 0.
    """

    mean: Fraction

    @property
    def mode(self) -> int:
        """The k that x = 0 stands for."""
        return math.floor(self.mean)

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.mean)

    def relative(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the density relative to that at the mode."""
        if self.mean < _LOOKED_UP:
            return self._looked_up(at)
        # ln f(k) = -mean * phi((k - mean) / mean) - ln(2 pi k) / 2 - (Stirling's error of k), phi(u) as below.
        mode = float(self.mode)
        with np.errstate(under="ignore"):
            exponent = self._deviance(at.astype(np.float64)) - self._deviance(np.zeros(1))
            ratio = at / mode
            exponent += 0.5 * np.log1p(ratio)
            exponent += _stirling_error(mode * (1.0 + ratio)) - _stirling_error(np.array([mode]))
            return np.exp(-exponent)

    def bounds(self, at: int, digits: int) -> tuple[Fraction, Fraction]:
        """Return bounds on the density relative to that at the mode; equal ones near small modes."""
        mode, count = self.mode, self.mode + at
        # Fewer than no events do not happen: the density ends there.
        if count < 0:
            return Fraction(0), Fraction(0)
        if min(mode, count) < _NEAR:
            low, high = sorted((mode, count))
            factors = Fraction(math.prod(range(low + 1, high + 1)))
            ratio = self.mean ** (high - low) / factors
            exact = ratio if at >= 0 else 1 / ratio
            return exact, exact
        context = _context(digits + 2 * len(str(count)))
        mean = _decimal(self.mean, context)
        exponent = context.multiply(decimal.Decimal(at), context.ln(mean))
        exponent = context.subtract(exponent, _log_factorial(count, context))
        exponent = context.add(exponent, _log_factorial(mode, context))
        # Every operation is correctly rounded, of at most 4 numbers below (count + 1) ln(count) each.
        error = Fraction(10) ** -digits
        value = Fraction(exponent)
        return _exponential(value - error, digits)[0], _exponential(value + error, digits)[1]

    def _looked_up(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        left, right = _ratios(self.mean)
        out = np.zeros(at.shape)
        up = (at >= 0) & (at < right.size)
        out[up] = right[at[up]]
        down = (at < 0) & (-at < left.size)
        out[down] = left[-at[down]]
        return out

    def _deviance(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return mean * phi(u), phi(u) = (1 + u) ln(1 + u) - u, at k = mode + at, u = (k - mean) / mean.

        As a series, since the closed form cancels: |u| < 0.2 wherever the density is not negligible.
        """
        apart = at - float(self.mean - self.mode)
        u = apart / float(self.mean)
        total = np.zeros_like(u)
        # Horner's rule: with |u| < 0.2 what follows the 27 terms is below 1e-18.
        for n in range(26, -1, -1):
            total = total * -u + 1.0 / ((n + 1) * (n + 2))
        return apart * u * total


@lru_cache(maxsize=32)
def _ratios(mean: Fraction) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return f(mode - i) / f(mode) and f(mode + i) / f(mode) for i = 0, 1, ...: products of ratios of neighbours."""
    mode, value = math.floor(mean), float(mean)
    # Where these arrays end the density is below e^-64, down to which alone :data:`TOLERANCE` is promised.
    reach = 64 + math.ceil(16.0 * math.sqrt(mean))
    with np.errstate(under="ignore"):
        right = np.cumprod(np.concatenate([[1.0], value / np.arange(mode + 1.0, mode + 1.0 + reach)]))
        left = np.cumprod(np.concatenate([[1.0], np.arange(mode, max(0, mode - reach), -1.0) / value]))
    return left, right


def _stirling_error(count: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln k! - (k + 1/2) ln k + k - ln(2 pi) / 2 for large k."""
    inverse = 1.0 / count
    square = inverse * inverse
    return inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square / 1260.0))


def _log_factorial(count: int, context: decimal.Context) -> decimal.Decimal:
    """Return ln k! without ln(2 pi) / 2, by Stirling's series, whose error is below the first omitted term."""
    k = decimal.Decimal(count)
    total = context.multiply(context.add(k, decimal.Decimal("0.5")), context.ln(k))
    total = context.subtract(total, k)
    for n in range(1, 4 + context.prec // 6):
        coefficient = _bernoulli(2 * n) / (2 * n * (2 * n - 1))
        total = context.add(total, _decimal(coefficient / Fraction(count) ** (2 * n - 1), context))
    return total


@lru_cache(maxsize=256)
def _bernoulli(n: int) -> Fraction:
    """Return the n-th Bernoulli number."""
    if n == 0:
        return Fraction(1)
    return -sum((math.comb(n + 1, j) * _bernoulli(j) for j in range(n)), Fraction(0)) / (n + 1)


def _exponential(exponent: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return bounds on exp(exponent) whose ratio is 1 up to about ``digits`` decimal digits."""
    context = _context(digits + 5 + len(str(int(abs(exponent)))))
    value = Fraction(context.exp(_decimal(exponent, context)))
    error = value * Fraction(10) ** -digits
    return value - error, value + error


def _decimal(value: Fraction, context: decimal.Context) -> decimal.Decimal:
    return context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))


def _context(digits: int) -> decimal.Context:
    """Return a context of ``digits`` correct digits, with the widest range of exponents."""
    # Exponents far below float64's are common here; only an invalid operation is an error.
    return decimal.Context(digits + 5, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.InvalidOperation])
