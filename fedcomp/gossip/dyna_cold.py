"""Dyna-COLD: COLD with a quantiser for a bounded box that shrinks with the innovations.

J. Zhang, K. You, L. Xie, arXiv:2105.06697 (abstract; the one-bit quantiser was read in code of a later paper that cites
it). Implements the published idea: the innovation is divided by a scale that both ends know, so that only the bits of a
quantiser travel, one per coordinate, and no scale. The iteration is that of :mod:`fedcomp.gossip.cold` with

    q_i = s_i Q((z_i - ẑ_i) / s_i),    Q(v)_c = +1/2 if v_c >= 0 else -1/2

and errs by at most s/2 per coordinate as long as ‖z - ẑ‖∞ <= s. Two rules for s:

geometric
    ``s_k = s0 * rho**k``, the published one. The error falls at exactly ``rho``, if that is slower than the algorithm
    itself. If it is not, innovations leave the box for good and errors grow: an innovation of more than ``tolerance``
    times the scale marks the state, which every node reports (``"saturated"``). When most nodes do, a
    :class:`~fedcomp.gossip.tuning.DivergenceWatch` ends the run with :class:`~fedcomp.gossip.errors.Saturated`.
zoom
    One bit more, in the message's header: the innovation left the box. Then both ends multiply s by ``factor`` before
    this message; otherwise by ``rho`` after it. Derived here: neither s0 nor the smoothness need to be known.

Both ends compute s by the same float64 operations from what both know; the receiver keeps one per neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np

from fedcomp import rules
from fedcomp.codecs import Codec, PositionalCodec, Stretch, get_codec
from fedcomp.codecs.positional import expected_dense
from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, Real, State, View
from fedcomp.gossip.cold import COLD, ESTIMATE
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.estimates import absorb, broadcast, copy_key, missed
from fedcomp.gossip.packet import MessageFlag, MessageHeader
from fedcomp.gossip.primal_dual import DECISION
from fedcomp.gossip.steps import AnyCompressor, incoming
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import AboveZero, Inside, Made, Maybe, NotNegative, OneOf, Switch
from fedcomp.wire import Expected, Tensor, UnitSign

_SCALE: Final = "scale"
_SMALLEST: Final = 1e-30
"""The scale never falls below this value, so divisions by s stay finite also in float32."""
_RELATIVE: Final = 1e-12
"""The limit of the zoom in float32, relative to the largest element: far below the resolution of float32, but near
enough to grow back."""
_ROUNDING: Final = 4.0
"""Innovations of fewer units in the last place of the largest element are rounding errors, and a geometric scale stops
there."""


@dataclass(frozen=True, repr=False, eq=False)
class Sign(PositionalCodec):
    """``sign(v)``, +1 or -1, one bit per coordinate; the sign of 0 is +, that of -0.0, too.

    No codec of updates, where zero is to arrive as zero: the scale around it shrinks here.
    """

    codec_id: ClassVar[str] = "sign"
    wide = True

    def pack(self, values: Real, stretch: Stretch, key: Key) -> Tensor:
        """Return the dense tensor of signs."""
        return Tensor(UnitSign(values < 0.0), (stretch.size,))

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape, dense and in signs without a scale."""
        return expected_dense(stretch.size, UnitSign)


@dataclass(frozen=True, repr=False, eq=False)
class DynaCOLD(COLD):
    """One bit per coordinate and message; undirected static graphs with symmetric weights.

    State: that of :class:`COLD`; ``"scale"`` and, with zoom, ``"scale/<j>"`` (0-d float64), ``"age"``, the messages
    sent so far, and ``"overshoot"``, ‖z - ẑ‖∞ / s of the last one.

    Parameters
    ----------
    lr : float
        η; 1/L works.
    gamma : float
        γ in (0, 1].
    scale : {"zoom", "geometric"}
    rho : float
        What the scale shrinks by per iteration, in (0, 1). Zoom: 0.95. Geometric: slower than the algorithm without
        compression; what is too fast saturates.
    s0 : float
        The first scale. Geometric: at least η times the largest ‖∇f_i(x^0)‖∞, ten times as much costs few iterations.
        Zoom: any; every factor of 10 costs a few more.
    factor : float
        What zooming out multiplies the scale by, above 1.
    tolerance : float
        Geometric: the largest ‖z - ẑ‖∞ / s that does not yet count as saturated, at least 1. Right schedules went up to
        1.8 for a while and came back, wrong ones passed 2 and never came back (measured).
    s_min : float
        The scale stops here, at most ``s0``. With stochastic gradients innovations do not vanish: use the noise of
        ``lr * gradient``.
    quantiser : mapping or Codec, optional
        Q; by default one bit per coordinate. It gets vectors within ``[-2, 2]``, and errs by at most 1 there.
    digest_every : int
        Messages between two with a digest of the estimate; 0 for never.

    Examples
    --------
    >>> DynaCOLD(lr=0.3).scale
    'zoom'
    >>> DynaCOLD(lr=0.3, scale="geometric", gamma=0.5, rho=0.97, s0=0.05).rho
    0.97
    """

    name: ClassVar[str] = "dyna-cold"

    gamma: AboveZero = 0.3
    scale: Annotated[Literal["zoom", "geometric"], OneOf("zoom", "geometric")] = "zoom"
    rho: Inside = 0.95
    s0: Annotated[float, rules.Real(least=_SMALLEST)] = 1.0
    factor: Annotated[float, rules.Real(above=1.0)] = 2.0
    tolerance: Annotated[float, rules.Real(least=1.0)] = 2.0
    s_min: NotNegative = 0.0
    quantiser: Annotated[Mapping[str, Any] | Codec | None, Maybe(Made(get_codec))] = None
    copies: Switch = field(default=True, init=False)
    compressor: AnyCompressor = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", get_compressor(Sign() if self.quantiser is None else self.quantiser))
        super().__post_init__()

    def conflict(self) -> str:
        """The scale only shrinks from where it begins."""
        return f"s_min={self.s_min:g} is above s0={self.s0:g}" if self.s_min > self.s0 else ""

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return COLD's state, a scale of ``s0``, and an age of 0."""
        own = {_SCALE: np.array(self.s0), "age": np.array(0), "overshoot": np.array(0.0)}
        return {**super().init(model, layout, common=common), **own}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Send the bits of the scaled innovation of the decision vector."""
        z = self._decision(state, gradient, view)
        if view.resync or any(missed(state, ESTIMATE, j) for j in view.column):
            # Who gets a whole estimate has no scale of this node: all neighbours restart, at s0.
            view = replace(view, resync=frozenset(view.column))
            if self.scale == "zoom":
                state = {**state, _SCALE: np.array(self.s0)}
        split, before = int(state["split"]), state[ESTIMATE]
        reach = float(np.max(np.abs(z[:split] - before[:split]), initial=0.0))
        # None as at the receivers: who gets a whole estimate holds none from which it could derive a least scale.
        scale = self._scale_of(state[_SCALE], int(state["age"]), None if view.resync else before)
        outside = reach > scale
        if self.scale == "zoom" and outside:
            scale *= self.factor
        flags = MessageFlag.ZOOM if self.scale == "zoom" and outside else MessageFlag(0)
        # The codec says +1 or -1 where Q says +1/2 or -1/2: s Q(v / s) is s / 2 times the sign.
        q = self._compressor.scaled(scale / 2.0)
        sent = broadcast(state, {ESTIMATE: z}, q, view, flags=flags, digest_every=self.digest_every)
        # Against a scale at its floor, an innovation that is rounding alone would look like one that left the box.
        noise = _ROUNDING * np.finfo(z.dtype).eps * float(np.max(np.abs(z), initial=0.0))
        next_scale = self._next(scale, outside, sent.state[ESTIMATE]) if self.scale == "zoom" else scale
        return {
            **sent.state,
            DECISION: z,
            _SCALE: np.array(next_scale),
            "overshoot": np.array(reach / scale if reach > noise else 0.0),
        }, sent.outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Advance the neighbours' estimates, each by its own scale; move x and D by what the estimates disagree on."""
        if DECISION not in state:
            incoming(state, messages)  # none is due
            return state
        age, used = int(state["age"]), {}

        def scaled(source: int, header: MessageHeader) -> Compressor:
            whole = bool(header.flags & MessageFlag.RESYNC)
            # As the sender does: when it sends one whole estimate, it restarts at s0 for all neighbours.
            known = np.array(self.s0) if whole else state.get(_scale_key(source), np.array(self.s0))
            # The copy before this message; of a neighbour not heard of yet, where all estimates begin.
            before = None if whole else state.get(copy_key(ESTIMATE, source), state[f"{ESTIMATE}.start"])
            used[source] = self._scale_of(known, age, before)
            if header.flags & MessageFlag.ZOOM:
                # In the sender's order of operations: s is never sent, and both ends must find the same float64.
                used[source] *= self.factor
            return self._compressor.scaled(used[source] / 2.0)

        # ``scaled`` is called once per message, with its header: every sender has a scale of its own.
        absorbed = absorb(state, messages, (ESTIMATE,), scaled)
        new = {**absorbed.state, "age": np.array(age + 1)}
        if self.scale == "zoom":
            for message in absorbed.received:
                outside = bool(message.header.flags & MessageFlag.ZOOM)
                scale = self._next(used[message.source], outside, message.estimates[ESTIMATE])
                new[_scale_key(message.source)] = np.array(scale)
        return self._mixed(new)

    def _scale_of(self, kept: np.ndarray, age: int, estimate: Real | None) -> float:
        """Return s of a message before zooming out. ``estimate`` is ẑ before the message; None if the message contains
        it."""
        if self.scale == "zoom":
            return float(kept)
        least = 0.0 if estimate is None else _ROUNDING * np.finfo(estimate.dtype).eps * _largest(estimate)
        return max(self.s0 * self.rho**age, self.s_min, least, _SMALLEST)

    def _next(self, scale: float, outside: bool, estimate: Real) -> float:
        """Return the zoom's s for the message that follows one with s = ``scale``, after which the estimate is
        ``estimate``."""
        if outside:
            return scale
        least = _RELATIVE * _largest(estimate) if estimate.dtype == np.float32 else 0.0
        # min: a scale that is below its floor already stays there and is not raised by it.
        return max(self.rho * scale, min(scale, max(self.s_min, least, _SMALLEST)))

    def facts(self, state: State) -> dict[str, float]:
        """Return COLD's, the scale of the last message (zoom: of the next), what the innovation was relative to it, and
        whether that was too much for a scale that will not grow."""
        overshoot = float(state["overshoot"])
        own = {"scale": float(state[_SCALE]), "overshoot": overshoot}
        saturated = self.scale == "geometric" and overshoot > self.tolerance
        return {**super().facts(state), **own, "saturated": float(saturated)}


def _scale_key(source: int) -> str:
    return f"{_SCALE}/{source}"


def _largest(estimate: Real) -> float:
    return float(np.max(np.abs(estimate), initial=0.0))
