"""BEER: gradient tracking with compressed messages.

H. Zhao, B. Li, Z. Li, P. Richtárik, Y. Chi, "BEER: Fast O(1/T) Rate for Decentralized Nonconvex Optimization with
Communication Compression", NeurIPS 2022 (the authors' code was read). Two vectors have estimates, the model and the
tracked gradient, and both innovations travel in one message:

    x = x + γ Σ_j W[i,j] (h_j - h_i) - η v
    h = h + C(x - h)                                          sent
    v = v + γ Σ_j W[i,j] (g_j - g_i) + ∇f(x) - ∇f(x_before)
    g = g + C(v - g)                                          sent

Here an iteration begins with the messages, so that the first one already carries C(∇f(x^0)); the authors' begins with
the first line, where nothing is known of the neighbours yet. The rest is the same sequence of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp.codecs import Dithering, NormSign, ScaledSign
from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View, opened, real
from fedcomp.gossip.compressor import Compressor
from fedcomp.gossip.estimates import absorb, broadcast, disagreement, open_estimates
from fedcomp.gossip.exact import tracked, untracked
from fedcomp.gossip.steps import BEGUN, AnyCompressor, Compressing, GammaOrAuto, begun, finite, incoming, settled
from fedcomp.layout import Layout
from fedcomp.rules import Int, Positive

_NAMES: Final = ("h", "g")
# Rows of the least contraction δ and the γ it bears, as measured for tracking_step.
_STEPS: Final = ((0.2, 0.5), (0.1, 0.2), (0.05, 0.05))
_SMALLEST_STEP: Final = 0.02
_ROUNDED: Final = 0.99
"""Sending values as float32 or float16 reduces the contraction of top-k slightly."""


def tracking_step(gamma: float | str, compressor: Compressor, size: int) -> float:
    """Return γ of BEER for ``size`` elements: the number given, or of "auto" what the compressor's contraction δ bears.

    1 when nothing is lost; 0.5 for δ >= 0.2, two bits and more, and ‖v‖∞/2 times sign; 0.2 for δ >= 0.1 and mean
    magnitude times sign; 0.05 for δ >= 0.05; otherwise 0.02. Measured on logistic regression on sorted digits over a
    ring of 8, L/µ = 56, steps of 0.5/L and 0.1/L: top-20 % bears 0.5, top-10 % bears 0.2 and diverges with 0.5. No dual
    gathers disagreement here, so γ may be larger than :func:`fedcomp.gossip.exact.consensus_step` allows COLD and LEAD.
    """
    if not isinstance(gamma, str):
        return gamma
    delta = compressor.contraction(size) or 0.0
    if size == 0 or delta >= 1.0:
        return 1.0
    codec = compressor.codec
    if isinstance(codec, NormSign) or (isinstance(codec, Dithering) and codec.bits >= 2):
        return 0.5
    if isinstance(codec, ScaledSign):
        return 0.2
    return next((step for least, step in _STEPS if delta >= _ROUNDED * least), _SMALLEST_STEP)


@dataclass(frozen=True, repr=False, eq=False)
class BEER(Compressing):
    """Undirected static graphs with symmetric weights; two compressed innovations per message.

    State: ``"x"``, ``"y"`` (the tracked gradient v), ``"gradient"`` (the last one taken), ``"gamma"``, and the
    estimates ``"h"``, ``"g"`` and their copies ``"h/<j>"``, ``"g/<j>"``.

    Parameters
    ----------
    lr : float
        η.
    gamma : float or "auto"
        γ in (0, 1]; "auto" asks the compressor, see :func:`tracking_step`.
    compressor : mapping or Compressor
        C of both; a contraction.
    digest_every : int
        Messages between two with a digest of the estimates; 0 for never.

    Examples
    --------
    >>> from fedcomp.layout import Layout
    >>> algorithm = BEER(lr=0.02, compressor={"id": "topk", "density": 0.1})
    >>> float(algorithm.init(np.zeros(100), Layout.flat(100))["gamma"])
    0.2
    """

    name: ClassVar[str] = "beer"
    vectors_per_message: ClassVar[int] = 2

    lr: Positive = 0.02
    gamma: GammaOrAuto = "auto"
    compressor: AnyCompressor = field(default_factory=lambda: {"id": "topk", "density": 0.2})
    digest_every: Annotated[int, Int()] = 50

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return x = ``model``, v = 0, and estimates: of models from ``common`` on, of v from 0 on."""
        x, split = opened(model, layout), layout.compressed_size
        # One array for three entries: arrays of a state are never written to.
        zero = np.zeros_like(x)
        gamma = tracking_step(self.gamma, self._compressor, split)
        state = {"x": x, "y": zero, "gradient": zero, "gamma": np.array(gamma)}
        return open_estimates(state, {"h": x if common is None else real(common), "g": zero}, split)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Add the gradient's change to v; send the compressed innovations of x and v."""
        x = finite(state["x"], "the model")
        v, last = tracked(state["y"], state["gradient"], gradient, x)
        sent = broadcast(state, {"h": x, "g": v}, self._compressor, view, digest_every=self.digest_every)
        return {**sent.state, "y": v, "gradient": last, **begun(view)}, sent.outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Advance the neighbours' estimates; mix x and v with them, descend along the v that was sent."""
        if BEGUN + "ids" not in state:
            incoming(state, messages)  # none is due
            return state
        new = absorb(state, messages, _NAMES, self._compressor).state
        gamma = float(state["gamma"])
        # Along y as it was sent: it is mixed below.
        x = state["x"] + gamma * disagreement(new, "h") - self.lr * state["y"]
        return {**settled(new), "x": x, "y": state["y"] + gamma * disagreement(new, "g")}

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return the Euclidean norm of Σ v - Σ ∇f: 0 up to rounding."""
        return {"sum_v - sum_g": untracked(states, "y")}

    def facts(self, state: State) -> dict[str, float]:
        """Return how far the estimates are behind what was sent last, while messages are under way."""
        if BEGUN + "ids" not in state:
            return {}
        behind = (np.linalg.norm(state["x"] - state["h"]), np.linalg.norm(state["y"] - state["g"]))
        return {"innovation": float(np.hypot(*behind))}
