"""Matrix products over GF(2^8), polynomial 0x11D: the core operation of erasure and network codes.

Several tiers give identical bytes, from GFNI and byte shuffles over plain 64-bit arithmetic down to numpy; the choice
is made at first use from checked CPU features and never aborts on an old CPU. Kernels are single-threaded, release the
GIL and are compiled into numba's disk cache. Importing this package compiles nothing and does not import numba;
:func:`warm` makes everything ready ahead of time, as does ``python -m fedcomp.coding.kernels``.
"""

from fedcomp.coding.kernels.dispatch import TIERS, best_tier, tiers, why_not
from fedcomp.coding.kernels.product import matmul, reduce
from fedcomp.coding.kernels.rows import Rows
from fedcomp.coding.kernels.warming import warm

__all__ = ["TIERS", "Rows", "best_tier", "matmul", "reduce", "tiers", "warm", "why_not"]
