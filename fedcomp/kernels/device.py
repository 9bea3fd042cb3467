"""The device tier: selection and the error-feedback step on vectors that are on a device, with the other tiers' bits.

There is no sample and no guess here: torch finds the k-th largest magnitude of the whole vector. What is above it, and
the first of what equals it, is the set that the other tiers find, since guesses decide about time only. Of a vector the
selected indices and values come to the host, and single numbers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.device import DeviceArray, beside
from fedcomp.kernels.checks import not_finite
from fedcomp.kernels.interface import INFINITY, MAGNITUDE
from fedcomp.kernels.portable import add_scaled, scatter_add

__all__ = ["add_scaled", "feedback_step", "scatter_add", "select_topk", "square_sums"]

_PIECE: Final = 1 << 24
"""Elements whose intermediate results exist at a time."""


def select_topk(vector: DeviceArray, k: int) -> NDArray[np.int64]:
    """See :func:`fedcomp.kernels.select_topk`."""
    return DeviceArray(_selected(vector, k)[0]).__array__(copy=True)


def feedback_step(
    memory: Any, update: DeviceArray, k: int, decay: float, out: DeviceArray | None
) -> tuple[NDArray[np.int64], NDArray[np.float32], DeviceArray, float]:
    """See :func:`fedcomp.kernels.feedback_step`."""
    old, out = beside(memory, update), update.copy() if out is None else out
    for start in range(0, update.size, _PIECE):
        part = slice(start, start + _PIECE)
        # Two roundings, as in the other tiers: never one multiply-add.
        np.add(old[part] if decay == 1.0 else old[part] * np.float32(decay), update[part], out=out[part])
    indices, smallest = _selected(out, k)
    values = DeviceArray(out.tensor[indices])
    out.tensor[indices] = 0.0
    return DeviceArray(indices).__array__(copy=True), values.__array__(copy=True), out, smallest


def square_sums(vector: DeviceArray, origin: NDArray[Any] | None) -> NDArray[np.float64]:
    """Return the sum of the squares of ``vector``, or of ``vector - origin``, in float64, as one partial sum.

    The other tiers say in which order they add. A device does not, so that the last digits may differ.
    """
    total = 0.0
    for start in range(0, vector.size, _PIECE):
        part = slice(start, start + _PIECE)
        wide = vector.tensor[part].double()
        if origin is not None:
            wide -= beside(origin[part], vector).tensor
        total += float(wide.square_().sum())
    return np.array([total])


def _selected(vector: DeviceArray, k: int) -> tuple[Any, float]:
    """Return the ascending indices of the k largest magnitudes, ties by lowest index, and the smallest of them.

    Raises
    ------
    NonFiniteUpdate
        When a value is NaN or infinite.
    """
    magnitudes, size = vector.bits.tensor & MAGNITUDE, vector.size
    if size and int(magnitudes.max()) >= INFINITY:
        bad = (magnitudes >= INFINITY).nonzero()
        raise not_finite(len(bad), size, int(bad[0]))
    if k in (0, size):
        return (magnitudes >= 0).nonzero().reshape(-1)[:k], 0.0
    smallest = int(magnitudes.topk(k, sorted=False).values.min())
    chosen = magnitudes > smallest
    missing = k - int(chosen.sum())
    for start in range(0, size, _PIECE):
        # All may be equal: a list of all of them would be twice as long as the vector.
        ties = (magnitudes[start : start + _PIECE] == smallest).nonzero().reshape(-1)[:missing] + start
        chosen[ties] = True
        missing -= len(ties)
        if not missing:
            break
    return chosen.nonzero().reshape(-1), float(np.int32(smallest).view(np.float32))
