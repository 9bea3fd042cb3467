"""The exact privacy curve of the Gaussian mechanism, in closed form.

Any number of Gaussian releases on the same units is one Gaussian release: only mu counts, the sensitivity over the
standard deviation of the noise, of T equal releases sqrt(T) times that of one.
"""

from __future__ import annotations

import math

from fedcomp.errors import optional
from fedcomp.rules import Real, checked


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the smallest delta of the Gaussian mechanism at ``epsilon``.

    Parameters
    ----------
    mu : float
        Sensitivity over the standard deviation of the noise; of T releases sqrt(T) times as much.
    epsilon : float
        >= 0.

    Notes
    -----
    Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) (Balle and Wang 2018, recalled). As written the difference cancels and
    the exponential overflows, so both terms are written with the scaled complementary error function: the common
    factor exp(-(mu/2 - e/mu)^2 / 2) is taken out. Holds from mu = 1e-6 to 1e3 and beyond (measured against 50 digits).
    """
    checked("epsilon", epsilon, Real(least=0.0, infinite=True))
    checked("mu", mu, Real(least=0.0, infinite=True))
    if mu == 0.0 or epsilon == math.inf:
        return 0.0
    if mu == math.inf:
        return 1.0
    with optional("the exact Gaussian curve"):
        from scipy.special import erfcx

    near, far = mu / 2.0 - epsilon / mu, mu / 2.0 + epsilon / mu
    common = 0.5 * math.exp(-near * near / 2.0)
    # far^2 / 2 - epsilon = near^2 / 2: the factor exp(epsilon) is in ``common`` already and never computed by itself.
    tail = common * float(erfcx(far / math.sqrt(2.0)))
    # Above 0 the scaled function overflows, and is not needed: erfc lies between 1 and 2 there and loses no digits.
    if near <= 0.0:
        return max(0.0, common * float(erfcx(-near / math.sqrt(2.0))) - tail)
    return max(0.0, 0.5 * math.erfc(-near / math.sqrt(2.0)) - tail)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon of the Gaussian mechanism at ``delta``, the last bit on the safe side.

    Parameters
    ----------
    mu : float
        As in :func:`gaussian_delta`.
    delta : float
        In (0, 1).
    """
    check_delta(delta)
    if mu == math.inf:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # A Gaussian tail bound: at this epsilon the first term alone is below delta, so the answer is not above it.
    low, high = 0.0, mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta))
    if not math.isfinite(high):
        return math.inf
    # Until no double lies between the two ends; the end that keeps delta is the answer.
    while low < (middle := (low + high) / 2.0) < high:
        if gaussian_delta(mu, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose curve passes below (epsilon, delta): the inverse that calibrates noise.

    Parameters
    ----------
    epsilon : float
        Above 0; of an infinite one mu is infinite.
    delta : float
        In (0, 1).
    """
    check_delta(delta)
    if epsilon == math.inf:
        return math.inf
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) <= delta:
        high *= 2.0
    # The lower end here: less mu is more noise.
    while low < (middle := (low + high) / 2.0) < high:
        if gaussian_delta(middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    return low


def lattice_excess(mu: float, delta: float, sigma: float) -> float:
    """Return by what fraction of itself delta may be larger for integer noise than for the continuous one, at most.

    Parameters
    ----------
    mu, delta : float
        As in :func:`gaussian_epsilon`.
    sigma : float
        Standard deviation of the noise in grid steps, 10 or more.

    Notes
    -----
    delta(epsilon) is an integral over a function with one kink, and for integers a sum over its values at distance
    1 / sigma. Euler and Maclaurin: the sum exceeds the integral by the jump of the slope over 24 sigma^2 where the kink
    lies worst, which with Mills' ratio is about t (t + mu) / (24 sigma^2) of delta, t = sqrt(2 log(1 / delta)). Here
    (t + 1) (t + 1 + mu) / (16 sigma^2) is returned: 1.7 times or more of what the worst sum is (measured, in tests for
    mu to 100). Derived here, for one coordinate: more of them, and more releases, only make the values lie closer.
    """
    check_delta(delta)
    reach = 1.0 + math.sqrt(2.0 * math.log(1.0 / delta))
    return reach * (reach + mu) / (16.0 * sigma * sigma)


def lattice_delta(mu: float, delta: float, sigma: float) -> float:
    """Return the delta at which the continuous curve is to be read, so that integer noise keeps ``delta``.

    Parameters
    ----------
    mu, delta, sigma : float
        As in :func:`lattice_excess`; sigma is infinite for continuous noise, which gives ``delta`` itself.

    Notes
    -----
    The d with d (1 + excess at d) = ``delta``, on the safe side: the excess is larger for a smaller delta.
    """
    found = delta
    # Every step lowers delta, and the first that fits is taken: an error of the iteration costs a little epsilon only.
    while sigma < math.inf and found * (1.0 + lattice_excess(mu, found, sigma)) > delta:
        found = max(delta / (1.0 + lattice_excess(mu, found, sigma)) * (1.0 - 1e-12), math.ulp(0.0))
        # The smallest double; at 0 the logarithm of 1 / delta would be infinite.
        if found == math.ulp(0.0):
            break
    return found


def check_delta(delta: float) -> float:
    """Return ``delta`` when it is a probability; it should be well below one over the population."""
    return checked("delta", delta, Real(above=0.0, below=1.0))
