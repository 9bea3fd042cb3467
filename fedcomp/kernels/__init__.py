"""Kernels for model-sized vectors: top-k, tails, error feedback, weighted sums, Walsh-Hadamard, sign directions.

Two tiers give bit-identical results: ``numba`` (compiled on first use, cached on disk, one thread, releases the GIL)
and ``numpy``. ``tier="auto"`` takes numba from :data:`SMALL` elements on when it is installed. Importing this package
compiles nothing and does not import numba; :func:`warm` compiles everything ahead of time, as does
``python -m fedcomp.kernels``.
"""

from fedcomp.kernels.bins import AdaptiveBins, AdaptiveStep, adaptive_step, select_adaptive, select_bins, select_of_bins
from fedcomp.kernels.hadamard import hadamard
from fedcomp.kernels.select import SMALL, FeedbackStep, Tier, feedback_step, select_topk
from fedcomp.kernels.signs import add_signs, sign_products
from fedcomp.kernels.sums import add_scaled, scatter_add
from fedcomp.kernels.tails import Exceedances, exceedances, select_above
from fedcomp.kernels.tiers import preferred
from fedcomp.kernels.warming import warm

__all__ = [
    "SMALL",
    "AdaptiveBins",
    "AdaptiveStep",
    "Exceedances",
    "FeedbackStep",
    "Tier",
    "adaptive_step",
    "add_scaled",
    "add_signs",
    "exceedances",
    "feedback_step",
    "hadamard",
    "preferred",
    "scatter_add",
    "select_above",
    "select_adaptive",
    "select_bins",
    "select_of_bins",
    "select_topk",
    "sign_products",
    "warm",
]
