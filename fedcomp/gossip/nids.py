"""NIDS: exact decentralised descent with a constant step size and one whole vector per iteration.

Z. Li, W. Shi, M. Yan, "A Decentralized Proximal-Gradient Method with Network Independent Step-Sizes and Separated
Convergence Rates", IEEE TSP 67(17), 2019 (recalled; the smooth part). Published as the recursion

    x^{k+2} = W̃ (2 x^{k+1} - x^k - η (∇f(x^{k+1}) - ∇f(x^k))),    W̃ = (I + W)/2,

here in the primal-dual form of :mod:`fedcomp.gossip.primal_dual` with γ = 1, which is the same with the first step
x^1 = W̃ (x^0 - η ∇f(x^0)) (derived, tested). It is what COLD and LEAD are without compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View
from fedcomp.gossip.primal_dual import DECISION, PrimalDual
from fedcomp.gossip.steps import begun, incoming, pull, whole
from fedcomp.layout import Layout
from fedcomp.rules import Positive


@dataclass(frozen=True, repr=False, eq=False)
class NIDS(PrimalDual):
    """Send z = x - η ∇f(x) - η D uncompressed; add half of the disagreement with the neighbours to D and subtract it
    from x.

    Undirected static graphs with symmetric weights. With exact gradients of smooth strongly convex objectives it
    converges linearly for every η < 2/L, whatever the graph.

    Parameters
    ----------
    lr : float
        η.

    Examples
    --------
    Two nodes whose objectives are half the squared distance to 0 and to 2 meet in the middle:

    >>> import numpy as np
    >>> from fedcomp.gossip.base import View, deliver
    >>> from fedcomp.layout import Layout
    >>> algorithm, layout = NIDS(lr=0.5), Layout.flat(1)
    >>> states = {i: algorithm.init(np.array([2.0 * i]), layout) for i in (0, 1)}
    >>> for k in range(60):
    ...     begun = {
    ...         i: algorithm.send(states[i], lambda z, i=i: z - 2.0 * i, View(i, k, {1 - i: 0.5}, {1 - i: 0.5}))
    ...         for i in states
    ...     }
    ...     inboxes = deliver({i: outbox for i, (_, outbox) in begun.items()})
    ...     states = {i: algorithm.receive(begun[i][0], inboxes[i]) for i in states}
    >>> [round(float(algorithm.model(states[i])[0]), 6) for i in (0, 1)]
    [1.0, 1.0]
    """

    name: ClassVar[str] = "nids"

    lr: Positive = 0.1

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return x = ``model`` and a dual of zero; ``common`` does not matter: whole vectors need no estimate."""
        return self._opened(model, layout)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Send the decision vector, whole."""
        z = self._decision(state, gradient, view)
        return {**state, **begun(view, z=z)}, whole(z, view)

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Move x and D by half of what the decision vectors disagree on."""
        if DECISION not in state:
            incoming(state, messages)  # none is due
            return state
        # pull sums z_j - z_i and u sums z_i - z_j: hence the sign.
        return self._finished(state, -0.5 * pull(state, state[DECISION], messages))
