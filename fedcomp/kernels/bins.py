"""Selection per bin: the arg-max of every bin, and AdaComp's soft-threshold rule.

A bin is ``length`` consecutive elements; the last one may be shorter. Sparsification within bins needs no threshold for
the whole vector, so one pass decides everything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.kernels import tiers
from fedcomp.kernels.checks import bits_of, check_out, check_vector, require_finite
from fedcomp.kernels.interface import INFINITY, MAGNITUDE, Bits, Floats
from fedcomp.kernels.tiers import Tier

# Elements ranked at once: their magnitudes, ties and counts stay in the cache.
_ELEMENTS = 1 << 16


class AdaptiveBins(NamedTuple):
    """What AdaComp's rule selects.

    Attributes
    ----------
    indices : int64 array of shape (k,)
        Ascending.
    scale : float
        The one magnitude that all selected elements are sent with: the mean over all bins of the bin's largest
        magnitude, empty bins included, summed in float64 and rounded to float32.
    bins : int
        How many bins there are: ceil(n / length).
    """

    indices: NDArray[np.int64]
    scale: float
    bins: int


class AdaptiveStep(NamedTuple):
    """What :func:`adaptive_step` selected, and the residue after it.

    Attributes
    ----------
    indices : int64 array of shape (k,)
        Ascending.
    negative : bool array of shape (k,)
        Whether the selected element is below zero: it is sent as ``-scale``.
    scale : float
    bins : int
        As in :class:`AdaptiveBins`.
    residue : float32 array of shape (n,)
        ``residue + update``, less what was sent.
    """

    indices: NDArray[np.int64]
    negative: NDArray[np.bool_]
    scale: float
    bins: int
    residue: Floats


def select_bins(vector: Floats, length: int, *, tier: Tier = "auto") -> NDArray[np.int64]:
    """Return the index of the largest magnitude of every bin of ``length`` consecutive elements.

    Parameters
    ----------
    vector : float32 array of shape (n,)
    length : int
        At least 1. The last bin is shorter when n is not a multiple of it.
    tier : {"auto", "numba", "numpy"}
        Does not change the result.

    Returns
    -------
    int64 array of shape (ceil(n / length),)
        One index per bin, so strictly ascending; among equal magnitudes the lowest, of a bin of zeros the first.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    ConfigError
        When ``length`` is below 1.

    Examples
    --------
    >>> select_bins(np.float32([0.5, -3.0, 1.0, 0.25, 0.0]), 2)
    array([1, 2, 4])
    """
    check_vector("vector", vector)
    _check_length(length)
    if vector.size == 0:
        return np.zeros(0, np.int64)
    bits = bits_of(vector)
    indices, finite = tiers.ops(tier, bits.size).bin_argmax(bits, min(length, bits.size))
    if not finite:
        require_finite(bits)
    return indices


def select_of_bins(vector: Floats, length: int, k: int, last: int) -> NDArray[np.int64]:
    """Return the indices of the ``k`` largest magnitudes of every bin of ``length`` consecutive elements.

    Parameters
    ----------
    vector : float32 array of shape (n,)
    length : int
        At least 1.
    k : int
        In 1..length.
    last : int
        How many of the last bin, in 1..its elements, when it is shorter than the others; else it has no meaning.

    Returns
    -------
    int64 array
        Strictly ascending; among equal magnitudes of a bin the lowest.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    ConfigError
        When a number is out of its range.

    Examples
    --------
    >>> select_of_bins(np.float32([0.5, -3.0, 1.0, 0.25, 0.0, 2.0, 7.0]), 3, 2, 1)
    array([1, 2, 3, 5, 6])
    """
    check_vector("vector", vector)
    _check_length(length)
    full, left = divmod(vector.size, length)
    if not 1 <= k <= length or (left and not 1 <= last <= left):
        raise ConfigError(f"{k} of every {length} elements and {last} of the last {left} cannot be selected")
    bits = bits_of(vector)
    step = max(1, _ELEMENTS // length)
    found = [
        start * length
        + _largest_of_rows(bits[start * length : min(start + step, full) * length].reshape(-1, length), k)
        for start in range(0, full, step)
    ]
    if left:
        found.append(full * length + _largest_of_rows(bits[full * length :].reshape(1, left), last))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _largest_of_rows(rows: Bits, k: int) -> NDArray[np.int64]:
    """Return the flat positions of the k largest magnitudes of each row, shape (bins, length)."""
    magnitudes = rows & MAGNITUDE
    if magnitudes.max() >= INFINITY:
        require_finite(rows.reshape(-1))
    length = rows.shape[1]
    least = np.partition(magnitudes, length - k, axis=1)[:, length - k, None]
    taken = magnitudes > least
    ties = magnitudes == least
    # The first ties of a row fill up what is larger to k, so that the choice does not depend on the partition.
    taken |= ties & (np.cumsum(ties, axis=1) <= k - taken.sum(axis=1, keepdims=True))
    return np.flatnonzero(taken)


def select_adaptive(
    total: Floats, gradient: Floats, length: int, factor: float = 2.0, *, tier: Tier = "auto"
) -> AdaptiveBins:
    """Select by AdaComp's rule: what the look-ahead lifts to its bin's largest magnitude, or beyond.

    With G the total (residue plus this step's gradient g), H = G + (factor - 1) g in float32 and gmax the largest |G|
    of an element's bin, element j is selected when |H_j| >= gmax and G_j != 0. Where the gradient agrees with the
    residue several elements of a bin pass; a bin whose largest element the gradient opposes may select none (recalled;
    the treatment of zeros is derived).

    Parameters
    ----------
    total, gradient : float32 arrays of shape (n,)
    length : int
        Elements per bin, at least 1.
    factor : float
        Finite; 1 turns the look-ahead off.
    tier : {"auto", "numba", "numpy"}
        Does not change the result.

    Raises
    ------
    NonFiniteUpdate
        When one of the vectors holds NaN or infinity. A look-ahead that overflows is large and passes.
    ConfigError
        When ``length`` is below 1 or ``factor`` not finite.
    """
    _check_pair("total", total, "gradient", gradient)
    soft = _check_rule(length, factor)
    if total.size == 0:
        return AdaptiveBins(np.zeros(0, np.int64), 0.0, 0)
    total = np.require(total, requirements=["C", "A"])
    gradient = np.require(gradient, requirements=["C", "A"])
    bins = -(-total.size // length)
    kernels = tiers.ops(tier, total.size)
    indices, peaks, finite = kernels.select_adaptive(total, gradient, soft, min(length, total.size))
    if not finite:
        require_finite(total.view(np.int32), gradient.view(np.int32))
    return AdaptiveBins(indices, float(np.float32(peaks / bins)), bins)


def adaptive_step(
    residue: Floats,
    update: Floats,
    length: int,
    factor: float = 2.0,
    *,
    out: Floats | None = None,
    tier: Tier = "auto",
) -> AdaptiveStep:
    """Add the update to the residue, select by AdaComp's rule, take what is sent out of the sum: one pass over both.

    The residue afterwards is G = residue + update where nothing was sent, and G - sign(G) * scale where something was:
    it keeps what the common scale gets wrong. Every operation is float32 and rounded on its own.

    Parameters
    ----------
    residue, update : float32 arrays of shape (n,)
    length, factor, tier
        As for :func:`select_adaptive`.
    out : float32 array of shape (n,), optional
        Where the new residue goes; a new array by default. ``out=residue`` works in place; it must not overlap the
        update.

    Raises
    ------
    NonFiniteUpdate
        When the sum holds NaN or infinity. ``out`` then holds the sum; with ``out=residue`` the residue is spoilt, so
        a caller who must survive bad updates gives another array.
    """
    _check_pair("residue", residue, "update", update)
    soft = _check_rule(length, factor)
    if out is None:
        out = np.empty(residue.shape, np.float32)
    else:
        check_out(out, residue.shape)
        if np.may_share_memory(out, update):
            raise LayoutError("out must not overlap the update, which the look-ahead still needs; give another array")
    if residue.size == 0:
        return AdaptiveStep(np.zeros(0, np.int64), np.zeros(0, np.bool_), 0.0, 0, out)
    residue = np.require(residue, requirements=["C", "A"])
    update = np.require(update, requirements=["C", "A"])
    bins = -(-residue.size // length)
    kernels = tiers.ops(tier, residue.size)
    indices, peaks, finite = kernels.add_adaptive(residue, update, soft, min(length, residue.size), out)
    if not finite:
        require_finite(out.view(np.int32))
    scale = np.float32(peaks / bins)
    negative = kernels.take_scaled(out, indices, scale)
    return AdaptiveStep(indices, negative, float(scale), bins, out)


def _check_pair(name: str, vector: Floats, other_name: str, other: Floats) -> None:
    check_vector(name, vector)
    check_vector(other_name, other)
    if vector.shape != other.shape:
        raise LayoutError(f"{name} has shape {vector.shape}, {other_name} {other.shape}; they must agree")


def _check_length(length: int) -> None:
    if length < 1:
        raise ConfigError(f"length = {length}; a bin holds at least one element")


def _check_rule(length: int, factor: float) -> np.float32:
    """Check the rule and return the gradient's factor in the look-ahead."""
    _check_length(length)
    with np.errstate(over="ignore"):
        soft = np.float32(factor - 1.0)
    if not math.isfinite(soft):
        raise ConfigError(f"factor = {factor}; the look-ahead needs a finite float32")
    return soft
