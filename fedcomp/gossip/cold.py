"""COLD: linear convergence with compressed messages.

J. Zhang, K. You, L. Xie, "Innovation Compression for Communication-Efficient Distributed Optimization With Linear
Convergence", IEEE TAC 68(11), 2023, arXiv:2105.06697 (abstract). Implements the published idea: neighbours are sent the
compressed *innovation*, the decision vector minus what they already know of it. The iteration was derived here; without
compression it is NIDS, which is tested.

    z_i = x_i - η ∇f_i(x_i) - η D_i
    q_i = C(z_i - ẑ_i)                         sent
    ẑ_i = ẑ_i + q_i                            the same at every neighbour
    u_i = (γ/2) Σ_j W[i,j] (ẑ_i - ẑ_j)          own estimate, not own z
    D_i = D_i + u_i / η,   x_i = z_i - u_i

What C left out stays in z - ẑ and goes later. As the iterates settle, innovations vanish, and with them the error of
any compressor that is a contraction: the optimum is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View, real
from fedcomp.gossip.estimates import absorb, broadcast, disagreement, open_estimates
from fedcomp.gossip.exact import consensus_step
from fedcomp.gossip.primal_dual import DECISION, PrimalDual
from fedcomp.gossip.steps import AnyCompressor, Compressing, GammaOrAuto, incoming
from fedcomp.layout import Layout
from fedcomp.rules import Int, Positive, Switch

ESTIMATE: Final = "h"
"""The name of the estimate ẑ in the state."""


@dataclass(frozen=True, repr=False, eq=False)
class COLD(Compressing, PrimalDual):
    """Send compressed innovations of the decision vector; undirected static graphs with symmetric weights.

    The rate of NIDS is kept by mild compression only. With a strong one γ must shrink with the square of the
    compressor's contraction, and consensus becomes the bottleneck: thousands of iterations at top-20 %.

    State: ``"x"``, ``"dual"``, ``"gamma"``, and the estimates ``"h"`` and ``"h/<j>"``.

    Parameters
    ----------
    lr : float
        η, at most 1/L, where L is the largest curvature of a node's objective. A smaller one needs a smaller γ with it:
        the dual gathers γ / (2 η) of the disagreement per iteration.
    gamma : float or "auto"
        γ in (0, 1]; "auto" asks the compressor, see :func:`fedcomp.gossip.exact.consensus_step`.
    compressor : mapping or Compressor
        C, anything :func:`fedcomp.gossip.compressor.get_compressor` takes; a contraction.
    digest_every : int
        Messages between two with a digest of the estimate; 0 for never.
    copies : bool
        False keeps the weighted sum of the neighbours' estimates in place of one vector per neighbour; weights and
        neighbours may then never change.

    Examples
    --------
    ``gamma="auto"`` becomes a number where the model's size is known:

    >>> import numpy as np
    >>> from fedcomp.layout import Layout
    >>> algorithm = COLD(lr=0.1, compressor={"id": "dithering", "bits": 2})
    >>> float(algorithm.init(np.zeros(100), Layout.flat(100))["gamma"])
    0.5
    """

    name: ClassVar[str] = "cold"

    lr: Positive = 0.1
    gamma: GammaOrAuto = "auto"
    compressor: AnyCompressor = field(default_factory=lambda: {"id": "topk", "density": 0.2})
    digest_every: Annotated[int, Int()] = 50
    copies: Switch = True

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return x = ``model``, a dual of zero, and estimates that begin at ``common`` on all nodes."""
        split = layout.compressed_size
        gamma = consensus_step(self.gamma, self._compressor, split)
        # Worked out once: "auto" asks the compressor about the size of what is compressed.
        state = {**self._opened(model, layout), "gamma": np.array(gamma)}
        start = state["x"] if common is None else real(common)
        return open_estimates(state, {ESTIMATE: start}, split, copies=self.copies)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Send the compressed innovation of the decision vector."""
        z = self._decision(state, gradient, view)
        sent = broadcast(state, {ESTIMATE: z}, self._compressor, view, digest_every=self.digest_every)
        return {**sent.state, DECISION: z}, sent.outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Advance the neighbours' estimates; move x and D by what the estimates disagree on."""
        if DECISION not in state:
            incoming(state, messages)  # none is due
            return state
        return self._mixed(absorb(state, messages, (ESTIMATE,), self._compressor).state)

    def _mixed(self, state: State) -> State:
        # disagreement sums ẑ_j - ẑ_i and u sums ẑ_i - ẑ_j: hence the sign.
        return self._finished(state, (-0.5 * float(state["gamma"])) * disagreement(state, ESTIMATE))

    def facts(self, state: State) -> dict[str, float]:
        """Return how far the estimate is behind the decision vector that was sent last, while messages travel."""
        if DECISION not in state:
            return {}
        return {"innovation": float(np.linalg.norm(state[DECISION] - state[ESTIMATE]))}
