"""Gradient tracking: descent along a local estimate of the mean gradient, updated by gradient differences.

A. Nedić, A. Olshevsky, W. Shi, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying
Graphs", SIAM J. Optim. 27(4), 2017 (recalled): the method DIGing, on undirected graphs, which may change.

    x⁺ = Σ_j W[i,j] x_j - η y
    y⁺ = Σ_j W[i,j] y_j + ∇f(x⁺) - ∇f(x),    y^0 = ∇f(x^0)

Σ_i y_i = Σ_i ∇f_i(x_i) in every iteration: nothing of a gradient is lost, so that the fixed point is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Outbox, Real, State, View, opened
from fedcomp.gossip.exact import tracked, untracked
from fedcomp.gossip.steps import BEGUN, begun, finite, incoming, pull, settled, whole
from fedcomp.layout import Layout
from fedcomp.rules import Positive

_ANNOUNCED: Final = BEGUN + "announced"


@dataclass(frozen=True, repr=False, eq=False)
class GradientTracking(Algorithm):
    """Send x and y uncompressed, in one message.

    Undirected graphs with symmetric weights, which may change from one iteration to the next. Constant step sizes must
    be smaller than those of NIDS; how much smaller depends on the graph.

    State: ``"x"``, ``"y"`` and ``"gradient"``, the last one taken; all of shape (d,).

    Parameters
    ----------
    lr : float
        η.

    Examples
    --------
    >>> algorithm = GradientTracking(lr=0.05)
    >>> algorithm.time_varying, algorithm.vectors_per_message
    (True, 2)
    """

    name: ClassVar[str] = "gradient-tracking"
    time_varying: ClassVar[bool] = True
    vectors_per_message: ClassVar[int] = 2

    lr: Positive = 0.05

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return x = ``model``, y = 0 and a last gradient of 0, of which the first step makes y^0 = ∇f(x^0)."""
        x = opened(model, layout)
        return {"x": x, "y": np.zeros_like(x), "gradient": np.zeros_like(x)}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Add the gradient's change to y; send x and y."""
        y, g = tracked(state["y"], state["gradient"], gradient, state["x"])
        # Here, where the error can name it: whole would only say that a vector is not finite.
        finite(state["x"], "the model")
        # One vector, so that both are mixed by one message and one pass over the neighbours.
        announced = np.concatenate([state["x"], y])
        return {**state, "y": y, "gradient": g, **begun(view, announced=announced)}, whole(announced, view)

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Mix x and y with the neighbours', and descend along the y that was sent."""
        if _ANNOUNCED not in state:
            incoming(state, messages)  # none is due
            return state
        d, y = state["x"].size, state["y"]
        pulled = pull(state, state[_ANNOUNCED], messages)
        return {**settled(state), "x": state["x"] + pulled[:d] - self.lr * y, "y": y + pulled[d:]}

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return the Euclidean norm of Σ y - Σ ∇f: 0 up to rounding."""
        return {"sum_y - sum_g": untracked(states, "y")}
