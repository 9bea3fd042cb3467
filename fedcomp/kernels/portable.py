"""The numpy tier of :class:`fedcomp.kernels.interface.Ops`: the meaning of every kernel in a few plain lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.interface import BIN_SHIFT, BINS, MAGNITUDE, Bits, Floats, Found


def collect(bits: Bits, threshold: int, capacity: int) -> Found | None:
    """See :meth:`fedcomp.kernels.interface.Ops.collect`."""
    magnitudes = bits & np.int32(MAGNITUDE)
    hits = np.flatnonzero(magnitudes >= np.int32(threshold))
    if hits.size > capacity:
        return None
    # Positions stay 64 bits wide here: this tier has no limit of 2**32 elements.
    return hits, magnitudes[hits]  # type: ignore[return-value]


def add_collect(
    memory: Floats, update: Floats, decay: float, out: Floats, threshold: int, capacity: int
) -> Found | None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_collect`."""
    with np.errstate(over="ignore", invalid="ignore"):  # reported as what they are once the sum is ranked
        np.add(memory if decay == 1.0 else memory * np.float32(decay), update, out=out)
    return collect(out.view(np.int32), threshold, capacity)


def histogram(bits: Bits) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.histogram`."""
    return np.bincount((bits & np.int32(MAGNITUDE)) >> BIN_SHIFT, minlength=BINS)


def finish(found: Found, threshold: int, k: int) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.finish`."""
    indices, magnitudes = found
    keep = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)[: k - np.count_nonzero(keep)]
    keep[ties] = True
    return indices[keep].astype(np.int64, copy=False)


def take_clear(values: Floats, indices: NDArray[np.int64]) -> Floats:
    """See :meth:`fedcomp.kernels.interface.Ops.take_clear`."""
    taken = values[indices]
    values[indices] = 0.0
    return taken


def scatter_add(out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.scatter_add`. Indices are distinct, so fancy assignment is addition."""
    out[indices] += values if weight == 1.0 else weight * values
