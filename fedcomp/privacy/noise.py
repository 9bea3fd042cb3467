"""Exact integer noise for sums: discrete Gaussian and Skellam samplers, vectorised.

Floating-point noise on a sum gives the sum away in its last bits (Mironov 2012): a unit Gaussian in float64, added to 0
and to 1, gives outputs of which a quarter is possible in one case only (measured). Integer noise has no last bits to
betray, provided that it has the distribution its accountant believes in. The samplers here have exactly that one.

How: rejection from a staircase over the density. A stair is a run of integers of one power-of-two length; stairs are
drawn by the alias method with integer weights, an integer within the stair uniformly, and it is kept with the ratio of
density and stair. Nearly always integers decide that, rarely (one in a hundred) float64 with a bound on its error, and
next to never, when a uniform number lies so near the ratio that float64 cannot tell, more digits of both. No table is
truncated; beyond the last stair is a geometric tail. The only assumptions on the density are that it is log-concave
and falls on both sides of 0.

Rejection takes a time that depends on what is drawn, which can be measured (Jin et al. 2021). A whole vector is drawn
before any of it is used, and that is all: nothing here runs in constant time.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError, nearest
from fedcomp.privacy.densities import Gauss, Poisson
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.events import NOISES
from fedcomp.privacy.staircase import staircase

LARGEST: Final = 2.0**40
"""Largest standard deviation, in grid steps: sums of noise then stay far inside 64 bits."""


def draw(noise: str, sigma: float, count: int, entropy: Entropy) -> NDArray[np.int64] | NDArray[np.float64]:
    """Return ``count`` independent draws of standard deviation ``sigma``.

    Parameters
    ----------
    noise : {"discrete_gaussian", "skellam", "gaussian"}
    sigma : float
        In grid steps. For the discrete Gaussian it is the distribution's parameter, from which its standard deviation
        differs by less than 1e-7 where it is 1 step or more.
    count : int
    entropy : Entropy

    Returns
    -------
    ndarray of int64, or float64 for "gaussian"; (count,)

    Raises
    ------
    ConfigError
        For another name, or a standard deviation that is not within 0 (excluded) and 2^40 steps.
    """
    if noise == "discrete_gaussian":
        return discrete_gaussian(sigma, count, entropy)
    if noise == "skellam":
        return skellam(sigma, count, entropy)
    if noise == "gaussian":
        return gaussian(sigma, count, entropy)
    raise ConfigError(f"noise={noise!r} is not known{nearest(str(noise), NOISES)}")


def failure(noise: str, sigma: float, count: int) -> float:
    """Return how far, in total variation, ``count`` draws are from the distribution they claim.

    0 for the integer samplers, which are exact. It is also 0 for "gaussian", which is not exact at all: what its last
    bits reveal is not a small probability that could be added to a delta; a statement calls it insecure instead.
    """
    if noise not in NOISES:
        raise ConfigError(f"noise={noise!r} is not known{nearest(str(noise), NOISES)}")
    _check(sigma, count)
    return 0.0


def discrete_gaussian(sigma: float, count: int, entropy: Entropy, exact: bool = False) -> NDArray[np.int64]:
    """Return draws of the discrete Gaussian: P(x) proportional to exp(-x^2 / (2 sigma^2)) on the integers.

    Parameters
    ----------
    sigma : float
        In grid steps; taken as the rational number that the double is.
    count : int
    entropy : Entropy
    exact : bool
        Decide everything in rational arithmetic, one draw after the other (about 0.1 ms each): the algorithm of
        Canonne, Kamath and Steinke (2020; recalled). The result has the same distribution; there is only less to trust.

    Returns
    -------
    ndarray of int64, (count,)
    """
    _check(sigma, count)
    if not exact:
        return staircase(Gauss(sigma)).sample(count, entropy)
    coins = _Coins(entropy)
    variance = Fraction(sigma) ** 2
    return np.array([_canonne(variance, coins) for _ in range(count)], np.int64)


def skellam(sigma: float, count: int, entropy: Entropy) -> NDArray[np.int64]:
    """Return draws of the symmetric Skellam distribution of variance sigma^2: differences of two Poisson draws.

    Sums of Skellam variables are Skellam variables, which is why shares of noise are drawn from it.

    Returns
    -------
    ndarray of int64, (count,)
    """
    _check(sigma, count)
    # Half the variance each: independent differences add variances up.
    one = staircase(Poisson(Fraction(sigma) ** 2 / 2))
    # Both are drawn as deviations from one integer near the mean, which cancels.
    return one.sample(count, entropy) - one.sample(count, entropy)


def gaussian(sigma: float, count: int, entropy: Entropy) -> NDArray[np.float64]:
    """Return draws of the continuous Gaussian in floating point (Box and Muller 1958). INSECURE: see the module.

    Returns
    -------
    ndarray of float64, (count,)
    """
    _check(sigma, count)
    # Draws come in pairs; of an odd count one is dropped.
    half = -(-count // 2)
    # log1p(-u) with u in [0, 1): the logarithm of u itself is infinite where u is 0.
    radius = np.sqrt(-2.0 * np.log1p(-entropy.uniform(half)))
    angle = 2.0 * math.pi * entropy.uniform(half)
    return sigma * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _check(sigma: float, count: int) -> None:
    params.number("sigma", sigma, rule="above 0 and at most 2^40 grid steps", ok=lambda v: 0.0 < v <= LARGEST)
    params.integer("count", count, low=0)


class _Coins:
    """Random decisions with rational probabilities, and with exp(-x) for rational x, without floating-point numbers."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy

    def below(self, limit: int) -> int:
        """Return a uniform integer of [0, limit)."""
        bits = (limit - 1).bit_length()
        size = -(-bits // 8)
        while True:
            value = int.from_bytes(self._entropy.bytes(size), "little") >> (8 * size - bits)
            # Redrawn, not reduced modulo the limit: that would make small numbers likelier.
            if value < limit:
                return value

    def chance(self, probability: Fraction) -> bool:
        """Return True with a rational probability."""
        return self.below(probability.denominator) < probability.numerator

    def decays(self, rate: Fraction) -> bool:
        """Return True with probability exp(-rate), rate >= 0."""
        # The series below needs chances rate / k of at most 1, so whole units are decided one by one.
        while rate > 1:
            if not self.decays(Fraction(1)):
                return False
            rate -= 1
        # Von Neumann's series: the first k at which a coin of chance rate / k fails is odd with probability exp(-rate).
        k = 1
        while self.chance(rate / k):
            k += 1
        return k % 2 == 1


def _canonne(variance: Fraction, coins: _Coins) -> int:
    """Return one draw of the discrete Gaussian: discrete Laplace noise, accepted with the ratio of the two
    densities."""
    # Laplace noise about as wide as the Gaussian: a proposal is then kept with a chance that hardly depends on sigma.
    scale = math.isqrt(math.floor(variance)) + 1
    while True:
        within = coins.below(scale)
        if not coins.decays(Fraction(within, scale)):
            continue
        steps = 0
        while coins.decays(Fraction(1)):
            steps += 1
        magnitude = within + scale * steps
        negative = coins.below(2) == 1
        # Zero has one sign only; kept with both it would be twice as likely.
        if negative and magnitude == 0:
            continue
        if coins.decays((magnitude - variance / scale) ** 2 / (2 * variance)):
            return -magnitude if negative else magnitude
