"""Common base of NIDS, COLD, Dyna-COLD and LEAD: a decision vector and a dual of accumulated disagreement.

With step size η (``lr``) and a dual D that begins at 0, iteration k of node i is

    z = x - η ∇f(x) - η D               what neighbours are told of
    u = (γ/2) Σ_j W[i,j] (z'_i - z'_j)   from the messages; z' is z itself (NIDS), or the estimates of it
    D = D + u / η
    x = z - u

The u of the two ends of an edge cancel, so that Σ_i D_i = 0 for ever, and at a fixed point the mean of the gradients
vanishes although no single one does: the optimum is exact with a constant step size, which plain gossip's is not. A D_0
with another sum, or an own term that is not the one neighbours subtract, moves the fixed point, and nothing else shows
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from fedcomp.gossip.base import Algorithm, Gradient, Real, State, View, opened
from fedcomp.gossip.steps import BEGUN, descent, finite, settled
from fedcomp.layout import Layout

DECISION: Final = BEGUN + "z"
"""Where the state keeps the decision vector between :meth:`Algorithm.send` and :meth:`Algorithm.receive`."""

_MOVED: Final = BEGUN + "moved"


class PrimalDual(Algorithm):
    """Keeps ``"x"``, ``"dual"`` and, while an iteration is begun, its decision vector; all of shape (d,)."""

    lr: float

    def _opened(self, model: Real, layout: Layout) -> State:
        """Return the model and a dual of zero."""
        x = opened(model, layout)
        return {"x": x, "dual": np.zeros_like(x)}

    def _decision(self, state: State, gradient: Gradient | None, view: View) -> Real:
        """Return z = x - η ∇f(x) - η D; without a gradient that term is 0.

        Raises
        ------
        NonFiniteUpdate
            If the result is not finite.
        ConfigError
            In a closing phase of whole models, which only push-sum has.
        """
        step, _ = descent(state, gradient, state["x"], self.lr, 0.0)
        z = state["x"] - self.lr * state["dual"]
        return finite(z if step is None else z - step, "the decision vector")

    def _finished(self, state: State, u: Real) -> State:
        """Return the state after D = D + u / η and x = z - u, without the data of the pending iteration."""
        x = state[DECISION] - u
        moved = state.get(_MOVED)
        # Divided by η, since the next z takes off η D: so it takes off the sum of all u.
        return {**settled(state), "dual": state["dual"] + u / self.lr, "x": x if moved is None else x + moved}

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return the Euclidean norm of the sum of all duals: 0 up to rounding."""
        # In float64: in float32 the sum would show its own rounding instead of the duals'.
        total = sum((state["dual"].astype(np.float64) for state in states), np.zeros(1))
        return {"sum_D": float(np.linalg.norm(total))}

    def shift(self, state: State, change: Real) -> State:
        """Move x; in a begun iteration also what x becomes, but not what the neighbours were told."""
        moved = {**state, "x": state["x"] + change}
        if DECISION in state:
            moved[_MOVED] = change + state.get(_MOVED, np.zeros_like(change))
        return moved
