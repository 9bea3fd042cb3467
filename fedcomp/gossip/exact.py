"""What the exact methods share: checks, the consensus step a compressor allows, a gradient that is tracked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from fedcomp.errors import ConfigError, StateError
from fedcomp.gossip.base import Gradient, Real, State, real
from fedcomp.gossip.compressors import Compressor, Dithered, NormSign, ScaledSign
from fedcomp.gossip.steps import descent, finite
from fedcomp.layout import Layout

_STEPS: Final = ((0.2, 0.5), (0.1, 0.2), (0.05, 0.05))
_SMALLEST_STEP: Final = 0.02
_ROUNDED: Final = 0.99
"""Values that travel as float32 or float16 take a little off the contraction of top-k."""


def step_size(lr: float) -> float:
    """Return a positive and finite step size as Python's float, which leaves float32 vectors float32.

    Raises
    ------
    ConfigError
    """
    if not 0.0 < lr < math.inf:
        raise ConfigError(
            f"lr={lr!r} is not valid: a step size above 0; begin with 1/L, where L is the largest curvature of any "
            "node's objective"
        )
    return float(lr)


def share(name: str, value: float) -> float:
    """Return a number in (0, 1] as Python's float.

    Raises
    ------
    ConfigError
    """
    if isinstance(value, str) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name}={value!r} is not valid: a number above 0 and at most 1")
    return float(value)


def share_or_auto(name: str, value: float | str) -> float | str:
    """Return "auto", or :func:`share`."""
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is not valid: 'auto', or a number above 0 and at most 1")
    return share(name, value)


def consensus_step(gamma: float | str, compressor: Compressor, size: int) -> float:
    """Return γ for a stretch of ``size`` elements: the number given, or of "auto" what the compressor is good for.

    Measured with COLD on heterogeneous logistic regression and least squares on rings of 8 and 10 nodes; δ is the
    compressor's contraction:

    ============================================  =====
    nothing is lost                               1
    δ >= 0.2; two bits and more; ‖v‖∞/2 sign      0.5
    δ >= 0.1; mean magnitude times sign           0.2
    δ >= 0.05                                     0.05
    any other                                     0.02
    ============================================  =====

    The first two rows held up to L/µ = 46, the others only where L/µ is small: at 34, top-10 % needs 0.01 and mean
    magnitude times sign 0.003. Too large a γ diverges, which is noticed, too small a one is only slow. On divergence
    halve γ first, the step size second.
    """
    if not isinstance(gamma, str):
        return gamma
    delta = compressor.contraction(size) or 0.0
    if size == 0 or delta >= 1.0:
        return 1.0
    if isinstance(compressor, NormSign) or (isinstance(compressor, Dithered) and compressor.bits >= 2):
        return 0.5
    if isinstance(compressor, ScaledSign):
        return 0.2
    return next((step for least, step in _STEPS if delta >= _ROUNDED * least), _SMALLEST_STEP)


def opened(model: Real, layout: Layout) -> Real:
    """Return a copy of ``model``.

    Raises
    ------
    StateError
        When its size is not the layout's.
    """
    x = real(model)
    if x.size != layout.size:
        raise StateError(f"the model has {x.size} elements, its layout {layout.size}; they must be of one model")
    return x


def tracked(y: Real, last: Real, gradient: Gradient | None, at: Real) -> tuple[Real, Real]:
    """Return ``y + ∇f(at) - last``, and ``∇f(at)``; without a gradient ``y`` and ``last`` themselves.

    Raises
    ------
    NonFiniteUpdate
        When the gradient, or y, is not finite.
    """
    g, _ = descent({}, gradient, at, 1.0, 0.0)
    return (y, last) if g is None else (finite(y + (g - last), "the tracked gradient"), g)


def untracked(states: Iterable[State], name: str) -> float:
    """Return the Euclidean norm of the sum over nodes of ``name``, which tracks gradients, minus the last gradient."""
    total = sum((s[name].astype(np.float64) - s["gradient"] for s in states), np.zeros(1))
    return float(np.linalg.norm(total))
