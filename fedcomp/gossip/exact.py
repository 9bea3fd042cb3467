"""Common parts of the exact algorithms: checks, the consensus step for a compressor, gradient tracking."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedcomp.codecs import Dithering, NormSign, ScaledSign, TopK
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import Gradient, Real, State
from fedcomp.gossip.compressor import Compressor
from fedcomp.gossip.steps import descent, finite


def consensus_step(gamma: float | str, compressor: Compressor, size: int) -> float:
    """Return γ of a primal-dual method for ``size`` elements: the number given, or of "auto" what ``compressor`` bears.

    ============================================  ======
    nothing is lost                               1
    two bits and more; ‖v‖∞/2 times sign          0.5
    top-k, mean magnitude times sign              δ² / 4
    any other with a known contraction δ          δ² / 32
    ============================================  ======

    Measured with COLD on rings of 8: logistic regression on sorted digits, 65 up to L/µ = 56, and least
    squares; these held at step sizes from 1/L down to a quarter of it (at L/µ = 330 half as much was needed there).
    Derived: the dual gathers ``γ / (2 η)`` of the disagreement per iteration and moves the model by η times that, so
    that γ alone is the gain of the loop between duals and models. Its damping is γ and the descent, ``η µ``; what the
    compressor leaves out feeds it, in proportion to γ^1.5 / δ. Too large a γ therefore diverges at any step size, and
    sooner at a smaller one. Much larger ones may work in places: top-20 % bore 0.5 at L/µ = 34 and 1/L, where 0.4 to
    0.1 diverged, and at 56 it did not.

    Raises
    ------
    ConfigError
        When "auto" is asked for a compressor without a known contraction.
    """
    if not isinstance(gamma, str):
        return gamma
    delta = compressor.contraction(size)
    # Of size 0 when every tensor is small enough to travel whole.
    if size == 0 or (delta is not None and delta >= 1.0):
        return 1.0
    codec = compressor.codec
    # Before δ is looked at: what these two bear was measured, whatever their worst case is.
    if isinstance(codec, NormSign) or (isinstance(codec, Dithering) and codec.bits >= 2):
        return 0.5
    if not delta or delta < 0.0:
        raise ConfigError(
            f"gamma='auto' needs a compressor with a known contraction; {compressor!r} has {delta} for {size} "
            "elements. Give a number in (0, 1]: begin with 0.001 and double it while runs converge"
        )
    return delta**2 / (4.0 if isinstance(codec, TopK | ScaledSign) else 32.0)


def tracked(y: Real, last: Real, gradient: Gradient | None, at: Real) -> tuple[Real, Real]:
    """Return ``y + ∇f(at) - last``, and ``∇f(at)``; without a gradient ``y`` and ``last`` themselves.

    Raises
    ------
    NonFiniteUpdate
        When the gradient, or y, is not finite.
    """
    # A step of length 1 without momentum: the gradient itself, checked for shape and finiteness.
    g, _ = descent({}, gradient, at, 1.0, 0.0)
    # The difference first: successive gradients are close, and in (y + g) - last its low digits would be rounded away.
    return (y, last) if g is None else (finite(y + (g - last), "the tracked gradient"), g)


def untracked(states: Iterable[State], name: str) -> float:
    """Return the Euclidean norm of the sum over nodes of ``name``, which tracks gradients, minus the last gradient."""
    total = sum((s[name].astype(np.float64) - s["gradient"] for s in states), np.zeros(1))
    return float(np.linalg.norm(total))
