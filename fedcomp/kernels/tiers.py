"""Which implementation runs: the choice between the compiled and the numpy tier, and compiling ahead of time."""

from __future__ import annotations

import functools
import importlib.util
import time
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError

Tier = Literal["auto", "numba", "numpy"]
Bits = NDArray[np.int32]
Floats = NDArray[np.float32]
Found = tuple[NDArray[np.uint32], Bits]

SMALL: Final = 20_000
"""Below this many elements the overhead of calling compiled code rules and ``tier="auto"`` takes numpy."""

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


@functools.cache
def has_numba() -> bool:
    """Whether numba is installed (found, not imported)."""
    return importlib.util.find_spec("numba") is not None


def ops(tier: Tier, size: int) -> Ops:
    """Return the implementation of ``tier`` for vectors of ``size`` elements.

    Raises
    ------
    ConfigError
        When the tier is unknown, or numba is asked for by name and is missing or cannot index the vector.
    """
    from fedcomp.kernels import portable

    if tier not in ("auto", "numba", "numpy"):
        raise ConfigError(f"unknown kernel tier {tier!r}; use 'auto', 'numba' or 'numpy'")
    # Compiled code keeps candidate positions in 32 bits.
    if tier == "numpy" or (tier == "auto" and (size < SMALL or size >= 2**32 or not has_numba())):
        return portable
    if not has_numba():
        raise ConfigError("kernel tier 'numba' was asked for but numba is not installed; use 'auto' or 'numpy'")
    if size >= 2**32:
        raise ConfigError(f"kernel tier 'numba' reaches to 2**32 elements, not {size}; use 'auto' or 'numpy'")
    from fedcomp.kernels import compiled

    return compiled


def warm() -> float | None:
    """Compile every kernel, or load it from the disk cache; return the seconds it took, None without numba.

    Doing it again costs microseconds. Call it before timing anything, and before many processes start at once.
    """
    if not has_numba():
        return None
    from fedcomp.kernels.select import feedback_step, select_topk
    from fedcomp.kernels.sums import scatter_add

    start = time.perf_counter()
    vector = np.arange(256, dtype=np.float32)
    indices = select_topk(vector, 3, tier="numba")
    ops("numba", 256).histogram(vector.view(np.int32))
    step = feedback_step(vector, vector, 3, tier="numba")
    scatter_add(step.memory, indices, step.values, 1.0, tier="numba")
    return time.perf_counter() - start
