"""D-PSGD: each node averages its model with the neighbours' and takes a gradient step in parallel.

After Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
Parallel Stochastic Gradient Descent", NeurIPS 2017, arXiv:1705.09056 (recalled):

    x_i <- sum_j W[i, j] x_j - lr * v_i,    v_i <- momentum * v_i + g_i(x_i)

Exact for identical objectives. With a constant step and objectives that differ it stops at a distance from the optimum
in proportion to the step: NIDS and gradient tracking do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Outbox, Real, State, View, real
from fedcomp.gossip.steps import (
    BEGUN,
    begun,
    descent,
    finite,
    incoming,
    pull,
    settled,
    velocity,
    whole,
)
from fedcomp.layout import Layout
from fedcomp.rules import AboveZero, BelowOne, NotNegative


@dataclass(frozen=True, repr=False, eq=False)
class DPSGD(Algorithm):
    """Decentralised parallel SGD on undirected graphs, fixed or time-varying: uncompressed, the usual reference for
    savings.

    Parameters
    ----------
    lr, momentum : float
        Of the local step, heavy ball.
    gamma : float
        Step towards the neighbours' mean, in (0, 1]: W becomes ``I - gamma (I - W)``.

    Notes
    -----
    State: ``"x"``; ``"v"`` with momentum. The message is the model in its own dtype. The gradient is taken at the model
    that was sent, so that computing and sending may overlap.

    Examples
    --------
    >>> algorithm = DPSGD(lr=0.05, momentum=0.9)
    >>> algorithm.to_config()
    {'name': 'dpsgd', 'lr': 0.05, 'momentum': 0.9, 'gamma': 1.0}
    """

    name: ClassVar[str] = "dpsgd"
    time_varying: ClassVar[bool] = True

    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0
    gamma: AboveZero = 1.0

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return the state of a node that has received nothing; there are no estimates that would need ``common``."""
        x = real(model)
        return {"x": x, **velocity(x, self.momentum)}

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def reset(self, state: State, layout: Layout) -> State:
        """Return the state without what was begun; nothing else depends on who the others are."""
        return settled(state)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the model goes out as it is, then makes its step."""
        announced = finite(state["x"], "the model")
        step, moved = descent(state, gradient, announced, self.lr, self.momentum)
        x = announced if step is None else finite(announced - step, "the model after the local step")
        return {**settled(state), **moved, "x": x, **begun(view), BEGUN + "announced": announced}, whole(
            announced, view
        )

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: move by what the neighbours' models differ from the one that was sent."""
        if BEGUN + "announced" not in state:
            incoming(state, messages)  # none is due
            return state
        toward = pull(state, state[BEGUN + "announced"], messages)
        # float: gamma as a numpy scalar would make float64 of a float32 model.
        return settled({**state, "x": state["x"] + float(self.gamma) * toward})
