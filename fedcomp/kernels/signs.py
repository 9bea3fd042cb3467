"""Random sign directions: their products with a vector, and the weighted sums that rebuild a vector from scalars."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError
from fedcomp.kernels import tiers
from fedcomp.kernels.tiers import Tier


def add_signs(
    out: NDArray[np.float64], words: NDArray[np.uint64], scalars: NDArray[np.float64], *, tier: Tier = "auto"
) -> None:
    """Do ``out += scalars @ directions`` in place, direction by direction, in float64; both tiers agree bit for bit.

    Parameters
    ----------
    out : float64 array, shape (n,), contiguous and writable
    words : uint64 array, shape (ceil(n / 64), m)
        Bit i % 64 of word i // 64 of a column is set where the direction's element i is -1; the others are 1. What is
        read together lies together: rows of directions would be read from as many places, which share few cache lines.
    scalars : float64 array, shape (m,)

    Raises
    ------
    LayoutError
        When shapes or dtypes do not fit.

    Examples
    --------
    >>> out = np.zeros(3)
    >>> add_signs(out, np.array([[0b001, 0b100]], np.uint64), np.array([1.0, 0.5]))
    >>> out
    array([-0.5,  1.5,  0.5])
    """
    wanted = (-(-out.size // 64), scalars.size)
    kinds = (out.dtype, words.dtype, scalars.dtype)
    if kinds != (np.float64, np.uint64, np.float64) or out.ndim != 1 or scalars.ndim != 1 or words.shape != wanted:
        raise LayoutError(
            f"{out.dtype}{out.shape}, {words.dtype}{words.shape} and {scalars.dtype}{scalars.shape} do not fit: "
            f"float64 (n,), uint64 (ceil(n / 64), m) and float64 (m,) are needed"
        )
    if not out.flags.c_contiguous:
        raise LayoutError("out is not contiguous; what is added would be lost")
    # Of few elements there may be many signs, and these are the work.
    tiers.ops(tier, 64 * words.size).add_signs(out, np.ascontiguousarray(words), np.ascontiguousarray(scalars))


def sign_products(
    vector: NDArray[np.float32], words: NDArray[np.uint64], *, tier: Tier = "auto"
) -> NDArray[np.float64]:
    """Return ``directions @ vector``, shape (m,), summed in float64; both tiers agree bit for bit.

    Parameters
    ----------
    vector : float32 array, shape (n,)
    words : uint64 array, shape (ceil(n / 64), m)
        As those of :func:`add_signs`.

    Raises
    ------
    LayoutError
        When shapes or dtypes do not fit.

    Examples
    --------
    >>> sign_products(np.float32([1.0, 2.0, 4.0]), np.array([[0b001, 0b100]], np.uint64))
    array([ 5., -1.])
    """
    kinds = (vector.dtype, words.dtype)
    if kinds != (np.float32, np.uint64) or vector.ndim != 1 or words.shape[:-1] != (-(-vector.size // 64),):
        raise LayoutError(
            f"{vector.dtype}{vector.shape} and {words.dtype}{words.shape} do not fit: float32 (n,) and uint64 "
            "(ceil(n / 64), m) are needed"
        )
    given = np.ascontiguousarray(vector), np.ascontiguousarray(words)
    sums: NDArray[np.float64] = tiers.ops(tier, 64 * words.size).sign_products(*given).sum(axis=1)
    return sums
