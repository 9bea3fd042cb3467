"""LEAD: COLD with estimates that move only part of the way to the new value.

X. Liu, Y. Li, R. Wang, J. Tang, M. Yan, "Linear Convergent Decentralized Optimization with Compression", ICLR 2021
(recalled, checked numerically). Beside COLD (:mod:`fedcomp.gossip.cold`):

    q_i = C(z_i - h_i)                                  sent
    u_i = (γ/2) Σ_j W[i,j] ((h_i + q_i) - (h_j + q_j))
    h_i = h_i + α q_i                                   the same at every neighbour

α < 1 damps the estimate, which is what unbiased compressors that are not a contraction need. With α = 1 it is COLD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View, real
from fedcomp.gossip.compressor import Delta
from fedcomp.gossip.estimates import absorb, broadcast, open_estimates
from fedcomp.gossip.exact import consensus_step
from fedcomp.gossip.primal_dual import DECISION, PrimalDual
from fedcomp.gossip.steps import BEGUN, AnyCompressor, Compressing, GammaOrAuto, begun, incoming
from fedcomp.layout import Layout
from fedcomp.rules import AboveZero, Int, Positive

_H: Final = "h"
_USED: Final = BEGUN + "used"


@dataclass(frozen=True, repr=False, eq=False)
class LEAD(Compressing, PrimalDual):
    """Undirected static graphs with symmetric weights.

    State: ``"x"``, ``"dual"``, ``"gamma"``, and the estimates ``"h"`` and ``"h/<j>"``.

    Parameters
    ----------
    lr : float
        η.
    alpha : float
        α in (0, 1].
    gamma : float or "auto"
        γ in (0, 1]; "auto" asks the compressor, see :func:`fedcomp.gossip.exact.consensus_step`.
    compressor : mapping or Compressor
        C; the authors' is the dithered quantiser of b bits scaled by the largest magnitude.
    digest_every : int
        Messages between two with a digest of the estimate; 0 for never.

    Examples
    --------
    >>> algorithm = LEAD(lr=0.3, compressor={"id": "dithering", "bits": 2})
    >>> algorithm.alpha, algorithm.gamma
    (0.5, 1.0)
    """

    name: ClassVar[str] = "lead"

    lr: Positive = 0.1
    alpha: AboveZero = 0.5
    gamma: GammaOrAuto = 1.0
    compressor: AnyCompressor = field(default_factory=lambda: {"id": "dithering", "bits": 2})
    digest_every: Annotated[int, Int()] = 50

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return x = ``model``, a dual of zero, and estimates that begin at ``common`` on all nodes."""
        split = layout.compressed_size
        gamma = consensus_step(self.gamma, self._compressor, split)
        # Worked out once: "auto" asks the compressor about the size of what is compressed.
        state = {**self._opened(model, layout), "gamma": np.array(gamma)}
        start = state["x"] if common is None else real(common)
        return open_estimates(state, {_H: start}, split)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Send the compressed innovation of the decision vector."""
        z = self._decision(state, gradient, view)
        sent = broadcast(state, {_H: z}, self._compressor, view, digest_every=self.digest_every, alpha=self.alpha)
        used = self._used(sent.state[_H], sent.deltas[_H])
        # ``used`` is kept: the state's estimate has only α of the change, and u is of all of it.
        return {**sent.state, **begun(view, z=z, used=used)}, sent.outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Advance the neighbours' estimates; move x and D by what h + q disagree on."""
        if DECISION not in state:
            incoming(state, messages)  # none is due
            return state
        absorbed = absorb(state, messages, (_H,), self._compressor, alpha=self.alpha)
        weights = {message.source: message.weight for message in incoming(state, messages)}
        own, apart = state[_USED], np.zeros_like(state[_USED])
        # Ascending, so that the sum has the same bits in every run.
        for message in sorted(absorbed.received, key=lambda one: one.source):
            apart += weights[message.source] * (own - self._used(message.estimates[_H], message.deltas[_H]))
        return self._finished(absorbed.state, (0.5 * float(state["gamma"])) * apart)

    def _used(self, advanced: Real, delta: Delta) -> Real:
        """Return h + q from h + α q, with the same arithmetic at both ends."""
        used = advanced.copy()
        delta.add_to(used, 1.0 - self.alpha)
        return used

    def facts(self, state: State) -> dict[str, float]:
        """Return how far h + q is from the decision vector that was sent last, while messages are under way."""
        if DECISION not in state:
            return {}
        return {"innovation": float(np.linalg.norm(state[DECISION] - state[_USED]))}
