"""Compiling kernels ahead of time: at installation, or before many processes start."""

from __future__ import annotations

import time

import numpy as np

from fedcomp.coding.kernels.dispatch import best_tier
from fedcomp.coding.kernels.product import matmul, reduce


def warm() -> tuple[str, float]:
    """Compile what ``tier="auto"`` needs here, or load it from the disk cache; return its tier and the seconds taken.

    From then on ``auto`` is this tier, for small products, too. Doing it again costs microseconds. Call it before
    timing anything, and before many processes start at once.
    """
    start = time.perf_counter()
    tier = best_tier()
    identity = np.eye(3, dtype=np.uint8)
    matmul(identity, identity)
    reduce(identity, 3)
    return tier, time.perf_counter() - start
