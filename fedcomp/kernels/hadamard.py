"""The fast Walsh-Hadamard transform with random signs: an orthonormal random rotation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError
from fedcomp.kernels import tiers
from fedcomp.kernels.tiers import Tier


def hadamard(values: NDArray[Any], signs: NDArray[np.uint64], *, inverse: bool = False, tier: Tier = "auto") -> None:
    """Replace ``values`` by ``H D values / sqrt(n)``, or by ``D H values / sqrt(n)``, which undoes it; in place.

    H is the Hadamard matrix in Sylvester's order, with entries 1 and -1; D the diagonal matrix of the signs. Both
    tiers make the same additions in the same order, so that results agree bit for bit.

    Parameters
    ----------
    values : float32 or float64 array, shape (n,), contiguous and writable
        n a power of two.
    signs : uint64 array, shape (ceil(n / 64),)
        Bit i % 64 of word i // 64 is set where element i gets the sign -.
    inverse : bool
        Signs after the transform instead of before it.

    Raises
    ------
    LayoutError
        When shapes or dtypes do not fit.

    Examples
    --------
    >>> values = np.float32([1, 0, 0, 0])
    >>> hadamard(values, np.array([1], np.uint64))
    >>> values
    array([-0.5, -0.5, -0.5, -0.5], dtype=float32)
    >>> hadamard(values, np.array([1], np.uint64), inverse=True)
    >>> values
    array([1., 0., 0., 0.], dtype=float32)
    """
    n = values.size
    if values.ndim != 1 or n & (n - 1) or not n or not values.flags.c_contiguous or values.dtype.char not in "fd":
        raise LayoutError(
            f"{values.dtype}{values.shape} cannot be transformed: a contiguous vector of float32 or float64, whose "
            "length is a power of two, is needed"
        )
    if signs.dtype != np.uint64 or signs.shape != (-(-n // 64),):
        raise LayoutError(f"{n} signs are uint64({-(-n // 64)},), not {signs.dtype}{signs.shape}")
    none = np.zeros_like(signs)
    before, after = (none, signs) if inverse else (signs, none)
    # Scaled first: no sum on the way is then longer than the vector, and none overflows that need not.
    tiers.ops(tier, n).hadamard(values, before, after, 1.0 / math.sqrt(n))
