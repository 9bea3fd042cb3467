"""Checks of kernel arguments before a kernel runs, and of their values afterwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError, NonFiniteUpdate
from fedcomp.kernels.interface import INFINITY, MAGNITUDE, Bits, Floats


def check_vector(name: str, vector: Floats) -> None:
    """Raise LayoutError unless ``vector`` is one-dimensional float32."""
    if vector.dtype != np.float32 or vector.ndim != 1:
        raise LayoutError(f"{name} must be a float32 array of shape (n,), not {vector.dtype}{vector.shape}")


def check_out(out: Floats, shape: tuple[int, ...]) -> None:
    """Raise LayoutError unless ``out`` is a writable contiguous float32 array of ``shape``."""
    if out.dtype != np.float32 or out.shape != shape or not out.flags.carray:
        raise LayoutError(f"out must be a writable contiguous float32 array of shape {shape}")


def bits_of(vector: Floats) -> Bits:
    """Return the vector, made contiguous and aligned where it is not, seen as int32."""
    # Compiled code addresses memory itself and knows neither strides nor odd addresses.
    return np.require(vector, requirements=["C", "A"]).view(np.int32)


def require_finite(*vectors: NDArray[np.int32]) -> None:
    """Raise NonFiniteUpdate when one of the float32 vectors, seen as int32, holds NaN or infinity."""
    for bits in vectors:
        bad = np.flatnonzero((bits & np.int32(MAGNITUDE)) >= INFINITY)
        if bad.size:
            raise not_finite(bad.size, bits.size, int(bad[0]))


def not_finite(bad: int, size: int, first: int) -> NonFiniteUpdate:
    """Return the error for ``bad`` of ``size`` values that are NaN or infinite, the first at an index."""
    return NonFiniteUpdate(
        f"{bad} of {size} values are not finite, the first at index {first}; NaN and infinity cannot be ranked"
    )
