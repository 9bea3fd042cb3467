"""Moments and selection of the values above a threshold, for threshold estimators such as SIDCo.

Sums run in float64 in one fixed order (see :class:`fedcomp.kernels.interface.Ops`), so both tiers give the same bits.
The variance is taken about a value from the data itself, the first that exceeds the threshold, and taken again about
the mean when that value proves to be far out: equal magnitudes have variance 0.0 exactly, and a spread that is small
against the mean is not lost.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.kernels import tiers
from fedcomp.kernels.checks import bits_of, check_vector, require_finite
from fedcomp.kernels.interface import INFINITY, LANES, Bits, Floats, Ops
from fedcomp.kernels.tiers import Tier

_FAR_OUT: Final = 256.0
"""Squared distance of origin and mean, in variances, beyond which the sums are computed again about the mean.

Up to this distance cancellation costs at most eight of the 53 bits. One in 1e7 exponential exceedances starts beyond
it.
"""
_LARGEST: Final = INFINITY - 1
"""Magnitude bits of the largest finite number; only NaN and infinity lie above."""


class Exceedances(NamedTuple):
    """Moments of e = |x| - threshold over the elements with |x| > threshold.

    Attributes
    ----------
    count : int
    mean, variance : float
        The variance divides by the count. NaN when the count is 0.
    log_mean : float
        The mean of ln e. NaN when it was not asked for or the count is 0.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    mean: float
    variance: float
    log_mean: float


def exceedances(vector: Floats, threshold: float = 0.0, *, logs: bool = False, tier: Tier = "auto") -> Exceedances:
    """Return count, mean and variance of what exceeds the threshold, in float64.

    Parameters
    ----------
    vector : float32 array of shape (n,)
    threshold : float
        Not negative; rounded to float32 first, the type it is compared in. 0.0 leaves exact zeros out.
    logs : bool
        Whether the mean logarithm is wanted as well: one more pass.
    tier : {"auto", "numba", "numpy"}
        Does not change the result, not even in the last bit.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    ConfigError
        When the threshold is negative or NaN.

    Examples
    --------
    >>> exceedances(np.float32([0.5, -3.0, 2.0, 0.0]), 1.0)
    Exceedances(count=2, mean=1.5, variance=0.25, log_mean=nan)
    """
    check_vector("vector", vector)
    limit = _threshold_bits(threshold)
    origin = float(np.int32(limit).view(np.float32))
    bits = bits_of(vector)
    kernels = tiers.ops(tier, bits.size)
    first = kernels.find_above(bits, limit)
    if first < 0:
        return Exceedances(0, math.nan, math.nan, math.nan)
    # A value from the data itself: about 0 the variance of nearly equal magnitudes would be a difference of large
    # squares.
    about = abs(float(bits[first].view(np.float32)))
    # Everything before the first exceedance adds nothing; whole blocks keep the alignment.
    rest = bits[first // LANES * LANES :]
    count, shift, variance = _moments(kernels, rest, limit, about)
    if not math.isfinite(variance):  # squares of finite float32 values cannot overflow float64
        require_finite(bits)
    if shift * shift > _FAR_OUT * variance:
        about += shift
        count, shift, variance = _moments(kernels, rest, limit, about)
    log_mean = math.nan
    if logs:
        # The logarithm of a product: exponents add up exactly, mantissas multiply, one logarithm is left.
        exponent, mantissas = kernels.tail_product(rest, limit, origin)
        log_mean = (exponent * math.log(2.0) + math.fsum(math.log(m) for m in mantissas.tolist())) / count
    return Exceedances(count, (about - origin) + shift, variance, log_mean)


def select_above(vector: Floats, threshold: float, *, tier: Tier = "auto") -> NDArray[np.int64]:
    """Return the indices of all elements with |x| > threshold.

    Parameters
    ----------
    vector : float32 array of shape (n,)
    threshold : float
        Not negative; rounded to float32 first. 0.0 selects everything that is not zero.
    tier : {"auto", "numba", "numpy"}
        Does not change the result.

    Returns
    -------
    int64 array of shape (k,)
        Ascending.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    ConfigError
        When the threshold is negative or NaN.
    """
    check_vector("vector", vector)
    limit = _threshold_bits(threshold)
    bits = bits_of(vector)
    indices, finite = tiers.ops(tier, bits.size).select_above(bits, limit)
    if not finite:
        require_finite(bits)
    return indices


def _moments(kernels: Ops, bits: Bits, limit: int, about: float) -> tuple[int, float, float]:
    """Return the count, the mean of |x| - about and the variance over all |x| above ``limit``."""
    count, sums = kernels.tail_sums(bits, limit, about)
    if not np.isfinite(sums).all():
        return count, math.nan, math.nan
    shift = math.fsum(sums[0].tolist()) / count
    # Rounding may leave the difference slightly below zero.
    return count, shift, max(0.0, math.fsum(sums[1].tolist()) / count - shift * shift)


def _threshold_bits(threshold: float) -> int:
    """Return the magnitude bits of float32(threshold), at most those of the largest finite number."""
    if not threshold >= 0.0:
        raise ConfigError(f"threshold = {threshold}; magnitudes are compared with a number that is not negative")
    with np.errstate(over="ignore"):
        return min(int(np.float32(abs(threshold)).view(np.int32)), _LARGEST)
