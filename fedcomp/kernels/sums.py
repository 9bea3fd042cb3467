"""Sums of many weighted vectors, mostly sparse ones, in the receiver's dense buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError
from fedcomp.kernels import tiers
from fedcomp.kernels.interface import Floats
from fedcomp.kernels.tiers import Tier


def add_scaled(out: Floats, values: Floats, weight: float = 1.0, *, tier: Tier = "auto") -> None:
    """Do ``out += float32(weight) * values`` in place, in float32.

    Parameters
    ----------
    out : float32 array of shape (n,), contiguous and writable
    values : float32 array of shape (n,)
    weight : float

    Raises
    ------
    LayoutError
        When shapes disagree.

    Examples
    --------
    >>> out = np.ones(2, np.float32)
    >>> add_scaled(out, np.float32([2, -4]), weight=0.5)
    >>> out
    array([ 2., -1.], dtype=float32)
    """
    # Compiled code does not check bounds.
    if out.shape != values.shape or out.ndim != 1:
        raise LayoutError(f"{values.shape} values do not fit a vector of shape {out.shape}")
    tiers.of(tier, out).add_scaled(out, np.asarray(values, np.float32), np.float32(weight))


def scatter_add(
    out: Floats, indices: NDArray[np.int64], values: Floats, weight: float = 1.0, *, tier: Tier = "auto"
) -> None:
    """Do ``out[indices] += weight * values`` in place, O(k).

    Parameters
    ----------
    out : float32 array of shape (n,), contiguous and writable
    indices : int64 array of shape (k,)
        Distinct.
    values : float32 array of shape (k,)
    weight : float
        Rounded to float32 first; the product and the sum are float32 operations, so that the result equals
        ``out += float32(weight) * dense`` bit for bit.

    Raises
    ------
    LayoutError
        When shapes disagree or an index lies outside ``out``; nothing is added then.

    Examples
    --------
    >>> out = np.zeros(4, np.float32)
    >>> scatter_add(out, np.array([1, 3]), np.float32([2, -4]), weight=0.5)
    >>> out
    array([ 0.,  1.,  0., -2.], dtype=float32)
    """
    if indices.shape != values.shape or indices.ndim != 1:
        raise LayoutError(f"{indices.shape} indices do not fit {values.shape} values")
    if indices.size == 0:
        return
    # Compiled code does not check bounds, and numpy would take a negative index from the end.
    if indices.min() < 0 or indices.max() >= out.size:
        raise LayoutError(
            f"indices reach from {indices.min()} to {indices.max()}, outside a vector of {out.size} elements"
        )
    (tiers.on_device(out) or tiers.ops(tier, indices.size)).scatter_add(
        out, np.asarray(indices, np.int64), np.asarray(values, np.float32), np.float32(weight)
    )
