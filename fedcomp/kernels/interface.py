"""What a kernel tier implements, and the float32-as-integer facts all tiers share."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
Floats = NDArray[np.float32]
Found = tuple[NDArray[np.uint32], Bits]

MAGNITUDE: Final = 0x7FFFFFFF
"""Clears the sign of a float32 seen as int32; what is left orders by magnitude, NaN above infinity above all."""

INFINITY: Final = 0x7F800000
"""The magnitude bits of infinity; every finite number lies below."""

BINS: Final = 2048
"""Histogram bins: the top eleven magnitude bits (eight of the exponent, three of the mantissa)."""

BIN_SHIFT: Final = 20


class Ops(Protocol):
    """What a tier implements. ``bits`` are float32 vectors seen as int32; every threshold is in magnitude bits."""

    def collect(self, bits: Bits, threshold: int, capacity: int) -> Found | None:
        """Return indices (ascending) and magnitudes of all elements >= ``threshold``; None beyond ``capacity``."""

    def add_collect(
        self, memory: Floats, update: Floats, decay: float, out: Floats, threshold: int, capacity: int
    ) -> Found | None:
        """Write ``decay * memory + update`` into ``out`` (always all of it) and collect from the result."""

    def histogram(self, bits: Bits) -> NDArray[np.int64]:
        """Return the counts of the :data:`BINS` top-bit patterns of the magnitudes."""

    def finish(self, found: Found, threshold: int, k: int) -> NDArray[np.int64]:
        """Return the indices of everything above ``threshold`` and of the first ties, ``k`` in all, ascending."""

    def take_clear(self, values: Floats, indices: NDArray[np.int64]) -> Floats:
        """Return ``values[indices]`` and set those elements to zero."""

    def scatter_add(self, out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
        """Do ``out[indices] += weight * values`` in float32, both operations rounded."""
