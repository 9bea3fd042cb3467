"""Bounds on one contribution: clipping, and checks of the norm on the values that are summed.

A clip that multiplies by min(1, C / norm) lets NaN through (the minimum of 1 and NaN is 1 in Python), divides by zero
on an update that did nothing, and loses its bound to overflow and to rounding. Here whatever is not finite is refused,
and a bound on integers is checked on the integers, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast, overload

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.privacy.errors import Unbounded

MOST: Final = 1 << 31
"""Largest bound in grid steps: the squared norm of a rounded vector then fits 64 bits, whatever its size."""

_TRIES: Final = 1000
"""Each try of conditional rounding succeeds with probability 0.39 or more, so 1000 failures mean a wrong bound."""


class Draws(Protocol):
    """Uniform numbers, new ones at each call."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` doubles in [0, 1)."""
        ...


def squared_norm(integers: NDArray[np.int64]) -> int:
    """Return the squared L2 norm of ``integers``, exactly.

    Raises
    ------
    Unbounded
        When an integer or the sum is too large for 64 bits.
    """
    flat = integers.reshape(-1)
    # Not abs(): the magnitude of the smallest int64 does not fit into an int64.
    largest = max(int(flat.max(initial=0)), -int(flat.min(initial=0)))
    # Of Python's integers: the product that decides about overflow cannot overflow itself.
    if largest * largest * flat.size < 1 << 63:
        return int(np.dot(flat, flat))
    if largest >= 1 << 32:
        raise Unbounded(f"an integer of magnitude {largest} is beyond what can be summed exactly")
    # Halves of 16 bits: every one of the three sums fits for less than 2^31 coordinates.
    magnitude = np.abs(flat)
    low, high = magnitude & 0xFFFF, magnitude >> 16
    return int(np.dot(low, low)) + (int(np.dot(low, high)) << 17) + (int(np.dot(high, high)) << 32)


def to_grid(vector: NDArray[Any], *, clip: float, step: float, bound: int) -> NDArray[np.int64]:
    """Clip ``vector`` to L2 norm ``clip`` and round it to multiples of ``step``: at most ``bound`` steps long.

    Parameters
    ----------
    vector : ndarray of float, any shape
    clip, step : float
        In the units of the vector.
    bound : int
        In steps. Rounding can raise a norm; a vector that ends above the bound is shrunk a little and rounded again.

    Returns
    -------
    ndarray of int64, of the vector's shape
        Its squared norm is at most ``bound * bound``, in exact arithmetic.

    Raises
    ------
    Unbounded
        When the vector is not of floating point or holds NaN or infinity.
    ConfigError
        When clip or step is not a positive finite number, or the bound is not within 1 to 2^31.
    """
    params.positive("clip", clip)
    params.positive("step", step)
    # An int: the square of a float bound would not be exact.
    bound = params.integer("bound", bound, low=1, high=MOST)
    real, largest = _finite(vector)
    if largest == 0.0:
        return np.zeros(real.shape, np.int64)
    # In units of its largest magnitude, so that neither the squares nor their sum overflow or vanish.
    real = real / largest
    length = math.sqrt(float(np.sum(np.square(real))))
    # As long as it is, as long as the clip norm, or as the bound in steps: whichever is shortest.
    scale = min(largest, clip / length, step * bound / length) / step
    margin = 2.0**-20
    while True:
        # Either operand may be huge or tiny, but no coordinate of the product exceeds the bound.
        out = np.rint(real * scale).astype(np.int64)
        square = squared_norm(out)
        if square <= bound * bound:
            return out
        # The margin doubles, so that this ends: after twenty times at half of what it was.
        scale *= min(bound / math.sqrt(square), 1.0) * (1.0 - margin)
        margin = min(0.5, 2.0 * margin)


@overload
def clip_arrays(arrays: Mapping[str, NDArray[Any]], clip: float) -> tuple[dict[str, NDArray[Any]], float]: ...


@overload
def clip_arrays(arrays: Sequence[NDArray[Any]], clip: float) -> tuple[list[NDArray[Any]], float]: ...


def clip_arrays(
    arrays: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], clip: float
) -> tuple[dict[str, NDArray[Any]] | list[NDArray[Any]], float]:
    """Scale the float arrays so that their joint L2 norm is at most ``clip``.

    One norm over all of them: clipping each to C would let the whole have sqrt(number of arrays) times C.

    Parameters
    ----------
    arrays : mapping or sequence of ndarray
        Integer and boolean arrays are handed through as they are: they are not part of the norm, and not private.
    clip : float

    Returns
    -------
    arrays : dict or list
        Of the same dtypes. The norm of these arrays, computed in float64, is at most ``clip``.
    norm : float
        Before clipping; infinite where it exceeds float64.

    Raises
    ------
    Unbounded
        When an array holds NaN or infinity, or is neither float, integer nor boolean.
    ConfigError
        When ``clip`` is not a positive finite number.
    """
    params.positive("clip", clip)
    named = isinstance(arrays, Mapping)
    names = list(cast("Mapping[str, Any]", arrays)) if named else None
    given = [np.asarray(a) for a in (cast("Mapping[str, Any]", arrays).values() if named else arrays)]
    floats = [i for i, a in enumerate(given) if a.dtype.kind not in "iub"]
    checked = [_finite(given[i]) for i in floats]
    largest = max((most for _, most in checked), default=0.0)
    out = list(given)
    norm = 0.0
    if largest > 0.0:
        length = _length([real for real, _ in checked], largest)
        norm = largest * length
        if norm > clip:
            # The margin doubles at each try: a cast to a narrow dtype needs more than a last bit.
            scale, margin = clip / length, 2.0**-52
            kinds = [given[i].dtype for i in floats]
            while True:
                clipped = [(real / largest * scale).astype(t) for (real, _), t in zip(checked, kinds, strict=True)]
                most = max(float(np.max(np.abs(c), initial=0.0)) for c in clipped)
                # Casting to a narrower dtype rounds, and can end above the bound.
                if most == 0.0 or most * _length([c.astype(np.float64) for c in clipped], most) <= clip:
                    break
                scale *= 1.0 - margin
                margin = min(0.5, 2.0 * margin)
            for i, values in zip(floats, clipped, strict=True):
                out[i] = values
    return (dict(zip(names, out, strict=True)) if names is not None else out), norm


def rounding_bound(clip: float, size: int, beta: float = math.exp(-0.5)) -> float:
    """Return the L2 norm, in steps, below which a stochastic rounding stays with probability 1 - ``beta`` or more.

    Parameters
    ----------
    clip : float
        L2 norm of the real vector, in steps, at most.
    size : int
        Coordinates d.
    beta : float

    Notes
    -----
    min{(c + sqrt(d))^2, c^2 + d / 4 + sqrt(2 log(1 / beta)) (c + sqrt(d) / 2)}, square root of it; Kairouz, Liu and
    Steinke, ICML 2021 (recalled). For the release this is a bound by construction, since :func:`round_conditionally`
    draws again until it holds.
    """
    root = math.sqrt(size)
    sure = (clip + root) ** 2
    likely = clip**2 + size / 4.0 + math.sqrt(2.0 * math.log(1.0 / beta)) * (clip + root / 2.0)
    return math.sqrt(min(sure, likely))


def round_conditionally(vector: NDArray[Any], bound: float, draws: Draws) -> NDArray[np.int64]:
    """Round every coordinate up or down at random, without bias, until the integer norm is at most ``bound``.

    The condition makes the result slightly biased; the bound then holds always, not only with high probability.

    Parameters
    ----------
    vector : ndarray of float
        In steps.
    bound : float
        In steps; :func:`rounding_bound` says which is met in 2.6 tries or fewer on average.
    draws : Draws
        For instance an :class:`~fedcomp.privacy.entropy.Entropy`. The rounding hides nothing; the bound holds for every
        outcome of it, so its numbers may be public.

    Raises
    ------
    Unbounded
        When the vector is not finite, or no rounding of it meets the bound.
    """
    real, _ = _finite(vector)
    lower = np.floor(real)
    if float(np.max(np.abs(lower), initial=0.0)) > MOST:
        raise Unbounded(f"a coordinate exceeds {MOST} steps; clip the vector before it is rounded")
    fraction = real - lower
    base = lower.astype(np.int64)
    # Squared norms are integers: below the whole part is the same as below the number.
    most = math.floor(bound * bound)
    for _ in range(_TRIES):
        out = base + (draws.uniform(real.size).reshape(real.shape) < fraction)
        if squared_norm(out) <= most:
            return out
    raise Unbounded(
        f"no rounding of a vector of norm {math.sqrt(float(np.sum(np.square(real)))):.6g} steps met the bound "
        f"{bound:.6g}; clip it first"
    )


def _finite(vector: NDArray[Any]) -> tuple[NDArray[np.float64], float]:
    """Return the array as float64 and its largest magnitude, or refuse it."""
    array = np.asarray(vector)
    if array.dtype.kind != "f":
        raise Unbounded(f"a contribution holds {array.dtype}, expected floating point")
    # A number of extended precision that does not fit becomes infinite, and is refused as such.
    with np.errstate(over="ignore"):
        real = array.astype(np.float64, copy=False)
    # The maximum hands a NaN on, so this one number shows both NaN and infinity.
    largest = float(np.max(np.abs(real), initial=0.0))
    if not math.isfinite(largest):
        bad = int(np.count_nonzero(~np.isfinite(real)))
        raise Unbounded(f"a contribution holds {bad} value(s) of {real.size} that are not finite: it has no bound")
    return real, largest


def _length(parts: Sequence[NDArray[np.float64]], unit: float) -> float:
    """Return the joint L2 norm of ``parts`` in multiples of ``unit``, their largest magnitude."""
    return math.sqrt(sum(float(np.sum(np.square(part / unit))) for part in parts))
