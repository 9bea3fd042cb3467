"""Sparse-Push: push-sum with compressed messages, over directed and changing graphs.

Implements the idea published by Aketi, Singh and Rabaey, "Sparse-Push: Communication- & Energy-Efficient Decentralized
Distributed Learning over Directed & Time-Varying Graphs with non-IID Datasets", 2021, arXiv:2102.05715, of which the
abstract could be read; there is no code. The iteration is derived here. Node i, in every iteration:

    z = x / w;   x <- x - lr v(g(z));   z = x / w           the local step, on the numerator
    for every out-neighbour j:
        q = C(z - h_ij);   h_ij <- h_ij + q                 what j knows of z, held by both
        f = gamma P[j, i] w                                 w before any debit
        send (q, f)
    x <- x - f h_ij;   w <- w - f                           for every j
    and for every (q, f) that comes from j:
        h_ji <- h_ji + q;   x <- x + f h_ji;   w <- w + f

What goes from i to j is a share of the *estimate*, and it is taken from i by the same two numbers, so that the sums of
x and of w over the nodes are constant whatever C, gamma and the graphs are. What C leaves out stays in ``z - h`` and
competes again. Without compression and with gamma = 1 this is SGP.

The estimate is one of the de-biased z and not of the numerator: on a graph that changes w never settles, so neither
does x = w z, and an estimate of x would chase it for ever (measured: it stalls at 7e-3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np

from fedcomp import params, rules
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import GossipMessage, Gradient, Multicast, Outbox, Real, State, View, real
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.errors import OutOfStep
from fedcomp.gossip.estimates import absorb, along_edge, broadcast, open_estimates, own_key, retract
from fedcomp.gossip.packet import peek, put_scalars, unpack
from fedcomp.gossip.pushsum import (
    SHARE_BYTES,
    LocalStep,
    PushSum,
    credited,
    is_whole,
    part_of,
    push_whole,
    read_whole,
    received,
    share_of,
)
from fedcomp.gossip.steps import GammaOrAuto
from fedcomp.layout import Layout
from fedcomp.rules import BelowOne, Inside, Int, Made, Maybe, NotNegative, OneOf, Switch

_NAME: Final = "h"
_GROWING: Final = 20
"""Number of consecutive iterations with growing innovations after which ``adapt`` halves gamma."""

_RISING: Final = 40
"""Number of first iterations of a node, in which innovations grow from zero in every run."""

_MEMORY: Final = 0.9
"""Memory factor of the running mean of innovations, since single iterations fluctuate."""


def automatic_gamma(compressor: Compressor, size: int) -> float:
    """Return the consensus step for a compressor of ``size`` elements.

    ``min(0.2, 0.04 sqrt(delta / 0.01))`` with the contraction delta, which is k/d for top-k: measured on a network
    of 2410 parameters over the static exponential graph with out-degree 3, from 10 % down to 2 of 2410. The same rule
    serves other compressors, and is cautious where their contraction is a bound for the worst case. Without loss (delta
    = 1) it gives 1, and the method is SGP. Graphs with one active edge per node and iteration bear more: 0.2 at 2 %.

    Raises
    ------
    ConfigError
        For a compressor without a known contraction: gamma has to be given.
    """
    if not size:
        return 1.0
    delta = compressor.contraction(size)
    if not delta or delta <= 0.0:
        raise ConfigError(
            f"gamma='auto' needs a compressor with a known contraction; {compressor!r} has {delta} for {size} "
            "elements. Give a number in (0, 1], or find one with fedcomp.gossip.tuning"
        )
    return 1.0 if delta >= 1.0 else min(0.2, 0.04 * math.sqrt(delta / 0.01))


@dataclass(frozen=True, repr=False, eq=False)
class SparsePush(PushSum):
    """Compressed push-sum with local gradient steps.

    Parameters
    ----------
    density : float, optional
        Top-k of that density. Default: 0.01.
    compressor : mapping or Compressor, optional
        In place of top-k; any :func:`fedcomp.gossip.compressor.get_compressor` makes.
    gamma : float or "auto"
        Consensus step in (0, 1]; see :func:`automatic_gamma`. Too large diverges, too small only slows.
    estimates : {"edge", "broadcast"}
        Edge: an estimate per out-neighbour, and q differs per edge; an edge may rest, and graphs may change. Broadcast:
        one estimate and one q for all, static graphs only (a share of 0 may still be sent with it); a neighbour that
        missed one gets the whole estimate.
    lr, momentum : float
        Of the local step, heavy ball.
    decay_over : int
        Iterations in which the step size falls to zero, along half a cosine; 0 keeps it. With unlike data and
        compressed messages a constant one leaves the nodes at a distance from each other.
    adapt : bool
        A node halves its own gamma when the running mean of its innovations has grown for 20 iterations in a row (the
        first 40 of a node do not count: there they grow in every run). Nodes may have different ones: f travels.
    w_min : float
        A node with a smaller weight only receives: its quotient x / w is not to be trusted.
    w_start : float
        A node that joined makes no gradient step before its weight is larger.
    digest_every : int
        Messages of a stream between two with a digest of the estimate; 0 for never.
    nodes : int
        Vertices of the graph, and so the total of all weights: a share that would take a node's weight above it is
        refused. 0: filled in from the graph when a run begins.

    Notes
    -----
    State: that of :class:`~fedcomp.gossip.pushsum.PushSum`; ``"h>j"`` or ``"h"`` own estimates and ``"h/j"`` copies of
    neighbours', in the model's dtype; ``"gamma"`` this node's; ``"innovation"``, ``"trend"``, ``"grown"`` 0-d. In
    broadcast mode ``"past/<s>"`` is the own estimate after message s of the stream, as long as that message might come
    back, and ``"last/<j>"`` the numbers of the last two messages to j.

    The share f travels in the first eight bytes of a message's body, also when nothing else does (all is zero).

    In the closing phase (``view.dense``) models travel whole and are averaged by plain push-sum; estimates rest.

    Examples
    --------
    >>> algorithm = SparsePush(density=0.02, lr=0.1, momentum=0.9)
    >>> algorithm.time_varying, SparsePush(estimates="broadcast").time_varying
    (True, False)
    """

    name: ClassVar[str] = "sparse-push"

    density: Annotated[float | None, Maybe(rules.Real(above=0.0, most=1.0))] = None
    compressor: Annotated[Mapping[str, Any] | Compressor | None, Maybe(Made(get_compressor))] = None
    gamma: GammaOrAuto = "auto"
    estimates: Annotated[Literal["edge", "broadcast"], OneOf("edge", "broadcast")] = "edge"
    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0
    decay_over: Annotated[int, Int()] = 0
    adapt: Switch = False
    w_min: Inside = 1e-3
    w_start: Inside = 0.05
    digest_every: Annotated[int, Int()] = 50
    nodes: Annotated[int, Int()] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of the instance: along an edge that rests the one estimate of broadcast mode would get out of step.
        params.assign(self, _compressor=self._chosen(), time_varying=self.estimates == "edge")

    def conflict(self) -> str:
        """Density is top-k's, and so instead of a compressor."""
        if self.density is not None and self.compressor is not None:
            return "density and compressor were given; they exclude each other: give one, or none for 1 %"
        return super().conflict()

    def _chosen(self) -> Compressor:
        if self.compressor is not None:
            return get_compressor(self.compressor)
        return get_compressor(TopK(0.01 if self.density is None else self.density))

    _compressor: ClassVar[Compressor]

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return (x, w) = (model, 1), with estimates that all begin at ``common`` (default: ``model``)."""
        state = super().init(model, layout, common=common)
        start = real(model if common is None else common).astype(state["dtype"].dtype, copy=False)
        gamma = automatic_gamma(self._compressor, layout.compressed_size) if self.gamma == "auto" else self.gamma
        # In the state, since ``adapt`` lowers it at each node by itself.
        state |= {"gamma": np.array(float(gamma)), "innovation": np.array(0.0)}
        if self.adapt:
            # A negative count lets the first iterations pass, in which the innovation grows in any case.
            state |= {"trend": np.array(0.0), "grown": np.array(-_RISING, np.int64)}
        return open_estimates(state, {_NAME: start}, layout.compressed_size, edges=self.estimates == "edge")

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the local step, and an innovation with a share to every active out-neighbour."""
        local = self._local(state, gradient, view)
        if local is None:
            return state, ()
        if view.dense:
            return push_whole(local, view)
        if not view.column:
            # The gradient step counts although nobody is there to be told.
            return local.state, ()
        gamma = float(state["gamma"])
        # All of the weight before any debit, so that the shares do not depend on the order of the neighbours.
        shares = {j: gamma * view.column[j] * local.w for j in sorted(view.column)}
        push = self._push_along_edges if self.estimates == "edge" else self._push_broadcast
        state, outbox, known = push(local, shares, view)
        x, w = state["x"], local.w
        behind = 0.0
        # Of the estimates after this message, which is what the receivers credit.
        for j, share in shares.items():
            x, w = x - share * known[j].astype(np.float64), w - share
            behind += float(np.linalg.norm(local.z - known[j])) ** 2
        state = self._watched(state, math.sqrt(behind / len(shares)))
        return {**state, "x": x, "w": np.array(w)}, outbox

    def _push_along_edges(
        self, local: LocalStep, shares: Mapping[int, float], view: View
    ) -> tuple[State, Outbox, dict[int, Real]]:
        """Write the message of every edge; return the estimates to which the shares refer, by destination.

        Edges that have never rested have the same estimate and, with the same share, the same message: one multicast.
        """
        state, known = local.state, {}
        written: dict[bytes, tuple[int, ...]] = {}
        for j, share in shares.items():
            state, multicast, _ = along_edge(
                state,
                {_NAME: local.z},
                self._compressor,
                view,
                j,
                extra=put_scalars(share),
                digest_every=self.digest_every,
            )
            written[multicast.payload] = (*written.get(multicast.payload, ()), j)
            known[j] = state[own_key(_NAME, j)]
        return state, tuple(Multicast(to, payload) for payload, to in written.items()), known

    def _push_broadcast(
        self, local: LocalStep, shares: Mapping[int, float], view: View
    ) -> tuple[State, Outbox, dict[int, Real]]:
        """Write one message for all; only the first bytes differ if shares differ."""
        sent = broadcast(
            local.state,
            {_NAME: local.z},
            self._compressor,
            view,
            extra={j: put_scalars(share) for j, share in shares.items()},
            digest_every=self.digest_every,
        )
        known = sent.state[own_key(_NAME)]
        return self._remembered(sent.state, shares, known), sent.outbox, dict.fromkeys(shares, known)

    @staticmethod
    def _remembered(state: State, to: Mapping[int, float], known: Real) -> State:
        """Keep the estimates to which shares in transit refer.

        The relay pauses an edge whose receiver does not answer, so at most two messages of an edge can come back, while
        the common estimate continues with the messages of other edges.
        """
        number = int(state[f"{_NAME}.seq"])
        last = {key: kept for key, kept in state.items() if key.startswith("last/")}
        for j in to:
            before = last.get(f"last/{j}", np.zeros(0, np.int64))
            last[f"last/{j}"] = np.array([*before[-1:], number], np.int64)
        wanted = {int(s) for kept in last.values() for s in kept}
        past = {f"past/{s}": known if s == number else state[f"past/{s}"] for s in sorted(wanted)}
        return {**{key: v for key, v in state.items() if not key.startswith("past/")}, **last, **past}

    def _watched(self, state: State, innovation: float) -> State:
        """Return the state with the innovation of this iteration recorded, and gamma halved if necessary."""
        state = {**state, "innovation": np.array(innovation)}
        if not self.adapt:
            return state
        before, grown = float(state["trend"]), int(state["grown"]) + 1
        trend = _MEMORY * before + (1.0 - _MEMORY) * innovation
        # A negative count is not set back: the first iterations of a node are left out as a whole.
        if grown > 0 and trend <= before:
            grown = 0
        if grown >= _GROWING:
            state["gamma"], grown = np.array(float(state["gamma"]) / 2.0), 0
        return {**state, "trend": np.array(trend), "grown": np.array(grown, np.int64)}

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: advance the copies, and add the shares, of whatever iteration they are."""
        small = [message for message in messages if not is_whole(message)]
        # Not ``complete``: messages that are late or missing are usual here.
        absorbed = absorb(state, small, (_NAME,), self._compressor, extra=SHARE_BYTES, complete=False)
        now = absorbed.state
        for one in absorbed.received:
            share = share_of(one.extra, one.source)
            # The copy right after this message, not the latest one: the sender was debited for that estimate.
            now = received(now, part_of(one.estimates[_NAME], share), share, one.source, self.nodes)
        for message in messages:
            if is_whole(message):
                now = self._credit_whole(now, message)
        return self._guarded(now, state)

    def _counted(self, state: State, source: int, dense: bool) -> int:
        if dense:
            return super()._counted(state, source, dense)
        known = state.get(f"{_NAME}.seq/{source}")
        # The iteration of its last message, in the units of mark_of.
        return -1 if known is None else 2 * int(known[1])

    def take_back(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Return the state after undelivered messages came back, the last ones of their edges.

        Their shares, of the estimates as they were then, are the sender's again, and the next message along such an
        edge carries the whole estimate. In edge mode, of several messages of one edge, the estimate before the last is
        found by subtraction: with a float32 model up to the rounding of k coordinates.

        Raises
        ------
        MessageError
            When the bytes are not those of an own message.
        OutOfStep
            When a later message of the same edge is not among them.
        """
        small = [message for message in messages if not is_whole(message)]
        if self.estimates == "edge":
            retracted = retract(state, small, (_NAME,), self._compressor, extra=SHARE_BYTES)
            now = retracted.state
            for one in retracted.received:
                share = share_of(one.extra, one.source)
                now = credited(now, part_of(one.estimates[_NAME], share), share)
        else:
            now = self._retracted(state, small)
        for message in messages:
            if is_whole(message):
                _, share, x = read_whole(message, message.source, state)
                now = credited(now, x, share)
        return self._guarded(now, state)

    @staticmethod
    def _retracted(state: State, messages: Sequence[GossipMessage]) -> State:
        """Take back messages of the broadcast stream, newest first."""
        for message in sorted(messages, key=lambda one: -peek(one.payload).iteration):
            to = message.destination
            last = [int(s) for s in state.get(f"last/{to}", ())]
            seq = peek(message.payload).seq
            # The stream counts from 1 after the first message, whose number is 0.
            if not last or (last[-1] - 1) & 0xFFFF != seq:
                raise OutOfStep(
                    to,
                    f"message {seq} to node {to} came back, but the last that could are {[s - 1 for s in last]}; "
                    "messages come back newest first and at most two of an edge",
                )
            # Only the share is read from it; the estimate it refers to is kept in ``past``.
            _, body = unpack(message.payload, most=len(message.payload))
            share = share_of(body, message.source)
            state = credited(state, part_of(state[f"past/{last[-1]}"], share), share)
            state[f"last/{to}"] = np.array(last[:-1], np.int64)
            # Unknown how much of the stream it knows: the next message to it is the whole estimate.
            state[f"{_NAME}.sent/{to}"] = np.array(-1, np.int64)
        return state

    def facts(self, state: State) -> dict[str, float]:
        """Return weight, gamma, and how far the estimates at the active out-neighbours are behind the model (rms)."""
        return {
            **super().facts(state),
            "innovation": float(state["innovation"]),
            "gamma": float(state["gamma"]),
        }
