"""CHOCO-SGD: gossip on estimates of the neighbours' models, updated by compressed differences.

After Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication", ICML 2019, arXiv:1902.00340 (the authors' code was read):

    x_i   <- x_i - lr * v_i
    h_i   <- h_i + C(x_i - h_i)                sent; the same at every neighbour
    x_i   <- x_i + gamma * sum_j W[i, j] (h_j - h_i)

The authors' code for deep networks applies the gossip term of the former iteration first; with one round trip per
iteration that is the same sequence of operations, cut elsewhere. What C leaves out stays in ``x - h`` and goes later.
``gamma`` must be small enough for the compressor and is found by trial (:func:`fedcomp.gossip.tuning.tune_gamma`).
Like D-PSGD it stops, with a constant step, at a distance from the optimum when objectives differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View, real
from fedcomp.gossip.estimates import absorb, broadcast, disagreement, open_estimates, own_key
from fedcomp.gossip.steps import (
    BEGUN,
    AnyCompressor,
    Compressing,
    begun,
    descent,
    finite,
    incoming,
    settled,
    velocity,
)
from fedcomp.layout import Layout
from fedcomp.rules import AboveZero, BelowOne, Int, NotNegative, Switch

_NAME: Final = "h"


@dataclass(frozen=True, repr=False, eq=False)
class CHOCO(Compressing):
    """Compressed decentralised SGD on static undirected graphs.

    Parameters
    ----------
    lr, momentum : float
        Of the local step, heavy ball.
    gamma : float
        Consensus step size in (0, 1]. The authors used 0.45 for signs on the ring of 8; top-k of 2 % needs about 0.1.
    compressor : mapping or Compressor
        Of innovations; any :func:`fedcomp.gossip.compressor.get_compressor` makes.
    digest_every : int
        Messages between two with a digest of the estimate; 0 for never.
    copies : bool
        Whether every neighbour's estimate is kept, or only their weighted sum: one vector instead of one per
        neighbour, which then must never change, nor their weights.

    Notes
    -----
    State: ``"x"``; ``"v"`` with momentum; the estimates ``"h"`` and ``"h/<j>"``.

    Examples
    --------
    >>> algorithm = CHOCO(lr=0.05, gamma=0.45, compressor={"id": "scaledsign"})
    >>> algorithm.to_config()["compressor"]["id"]
    'scaledsign'
    """

    name: ClassVar[str] = "choco"

    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0
    gamma: AboveZero = 0.1
    compressor: AnyCompressor = field(default_factory=lambda: {"id": "topk", "density": 0.02})
    digest_every: Annotated[int, Int()] = 50
    copies: Switch = True

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return a state whose estimates, of all nodes, begin at ``common`` (default: ``model``)."""
        x = real(model)
        start = x if common is None else real(common)
        state = {"x": x, **velocity(x, self.momentum)}
        return open_estimates(state, {_NAME: start}, layout.compressed_size, copies=self.copies)

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def reset(self, state: State, layout: Layout) -> State:
        """Return the model with estimates that restart; momentum is the node's own and stays."""
        # Without momentum there is no buffer.
        return {**super().reset(state, layout), **{key: state[key] for key in ("v",) if key in state}}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the local step, and the compressed innovation to all neighbours."""
        state = settled(state)
        step, moved = descent(state, gradient, state["x"], self.lr, self.momentum)
        x = finite(state["x"] if step is None else state["x"] - step, "the model after the local step")
        state = {**state, **moved, "x": x}
        sent = broadcast(state, {_NAME: x}, self._compressor, view, digest_every=self.digest_every)
        return {**sent.state, **begun(view)}, sent.outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: advance the neighbours' estimates, then move towards them."""
        if BEGUN + "ids" not in state:
            incoming(state, messages)  # none is due
            return state
        absorbed = absorb(state, messages, (_NAME,), self._compressor).state
        # From the own estimate, not from x: only then do both ends of an edge move alike, and the mean stays.
        # float: gamma as a numpy scalar would make float64 of a float32 model.
        return settled({**absorbed, "x": state["x"] + float(self.gamma) * disagreement(absorbed, _NAME)})

    def facts(self, state: State) -> dict[str, float]:
        """Return how far the estimate is behind the model."""
        return {"innovation": float(np.linalg.norm(state["x"] - state[own_key(_NAME)]))}
