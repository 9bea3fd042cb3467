"""Push-sum: averages on directed graphs, by pushing shares of a pair (x, w) and reading z = x / w.

A node divides what it has over its out-neighbours and itself. It needs its own out-degree and nothing else: no node has
to know how many send to it. Unequal in-degrees make x and w drift in scale, both alike, and the quotient is right. What
makes it work is that mass is neither made nor lost: every share is taken from the sender by the same two numbers that
are added at the receiver, and a share that was not delivered is the sender's.

The numerator x and the weight w are float64 whatever the model is: with a float32 numerator the debit and the credit of
one share are rounded differently, and the sum over nodes wanders off by some 1e-6 within a thousand iterations. What
travels is the model in its own dtype, and the share of w as float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from fedcomp.gossip.base import (
    Algorithm,
    GossipMessage,
    Gradient,
    KnownGraph,
    Multicast,
    Outbox,
    Real,
    State,
    View,
    opened,
    real,
)
from fedcomp.gossip.errors import MessageError, TopologyError
from fedcomp.gossip.packet import (
    MessageFlag,
    MessageHeader,
    all_finite,
    pack,
    peek,
    put_real,
    put_scalars,
    require_finite,
    take_real,
    take_scalars,
    unpack,
)
from fedcomp.gossip.steps import descent, falling, velocity
from fedcomp.layout import Layout

SHARE_BYTES: Final = 8
"""A share of w travels as float64."""

_NOTHING: Final = 1e-12
"""A share of w up to this size has no effect. An honest share is gamma times a node's share times its weight, and no
node sends with a weight below ``w_min``."""

ROUNDING: Final = 1e-9
"""By how much more than all mass, relative to it, a node may seem to hold: sums in float64, in any order, stay far
below."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What a node holds after its local step.

    Attributes
    ----------
    state : State
        With the new numerator and momentum; nothing of it was sent.
    z : ndarray, shape (d,)
        The de-biased model in the model's own dtype: what travels, whole or compressed.
    w : float
        Of which all shares of this iteration are taken.
    """

    state: State
    z: Real
    w: float


class PushSum(Algorithm):
    """What SGP and Sparse-Push have in common: the pair (x, w), the local step, whole messages, coming and going.

    State: ``"x"`` the numerator, float64 of shape (d,); ``"w"`` the weight, 0-d float64; ``"dtype"`` a 0-d zero of the
    model's dtype; ``"v"`` the momentum buffer, when there is momentum; ``"seen/<j>"`` names the last whole message of
    node j that was counted, which makes one that comes twice harmless. A node whose w is below ``w_min`` has ``"held"``
    too, the model it shows meanwhile, and one that joined and has not begun to learn ``"fresh"``.
    """

    directed: ClassVar[bool] = True
    time_varying: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True

    lr: float
    momentum: float
    decay_over: int
    w_min: float
    w_start: float
    nodes: int

    def conflict(self) -> str:
        """A node that learns is one that sends."""
        lighter = f"w_start={self.w_start} is below w_min={self.w_min}: a node that sends nothing yet would learn"
        return lighter if self.w_start < self.w_min else ""

    def fitted(self, graph: KnownGraph) -> Algorithm:
        """Return this algorithm with ``nodes`` filled in: the total of all weights."""
        return self if self.nodes else self.from_config({**self.get_config(), "nodes": graph.n})

    def odd(self, state: State, messages: Sequence[GossipMessage]) -> dict[int, str]:
        """Return what is odd about messages that are counted nevertheless, by source: they repeat one that was counted,
        or carry no share of w; what such a node takes in never comes back, and the weights of the others fall.

        ``state`` is the one from before they were received. Messages that cannot be read do not matter here.
        """
        found: dict[int, str] = {}
        last: dict[tuple[int, bool], int] = {}
        for message in messages:
            try:
                # Any length: what cannot be a message is refused by receive, with its reason.
                header, body = unpack(message.payload, most=len(message.payload))
                share = share_of(body, message.source)
            except MessageError:
                continue
            kind = message.source, MessageFlag.DENSE in header.flags
            if mark_of(header) <= last.get(kind, self._counted(state, *kind)):
                found[message.source] = f"its message of iteration {header.iteration} arrived again and is ignored"
            elif share <= _NOTHING:
                found[message.source] = f"it sent a share of {share:g}: it takes mass in and passes none on"
            # A message may also repeat an earlier one of the same inbox.
            last[kind] = mark_of(header)
        return found

    def _counted(self, state: State, source: int, dense: bool) -> int:
        """Return the mark of the last counted message of ``source``, whole or compressed; -1 if there is none."""
        return int(state.get(f"seen/{source}", -1)) if dense else -1

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return (x, w) = (model, 1); see :meth:`Algorithm.init`."""
        model = opened(model, layout)
        return {
            "x": model.astype(np.float64),
            "w": np.array(1.0),
            # x is float64, so the model's own dtype has to be kept; a state holds nothing but arrays.
            "dtype": np.zeros((), model.dtype),
            **velocity(model, self.momentum),
        }

    def join(self, model: Real, layout: Layout) -> State:
        """Return (x, w) = (0, 0): a node that enters a run brings no mass, so that the mean of the others stays.

        It mixes from ``w >= w_min`` on and learns from ``w > w_start`` on; until it mixes, its model is ``model``.
        """
        state = self.init(model, layout)
        return {
            **state,
            "x": np.zeros_like(state["x"]),
            "w": np.array(0.0),
            "held": real(model),
            "fresh": np.array(True),
        }

    def model(self, state: State) -> Real:
        """Return z = x / w in the model's dtype.

        Of a node with ``w < w_min`` it is the last model it had before its weight fell so low; of one that joined and
        has received nothing yet, the model it joined with. Such a node does not send and does not learn.
        """
        held = state.get("held")
        return debiased(state) if held is None else held

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return the sum of the weights, and the Euclidean norm of the sum of the numerators.

        Both are constant without gradients, once the messages under way have been received: mass travels in messages.
        """
        held = list(states)
        total = sum((state["x"] for state in held), np.zeros(()))
        return {
            # Exact, so that a sum that is off is lost mass and not the rounding of this line.
            "sum_w": math.fsum(float(state["w"]) for state in held),
            "sum_x": float(np.linalg.norm(np.atleast_1d(total))),
        }

    def facts(self, state: State) -> dict[str, float]:
        """Return the weight."""
        return {"weight": float(state["w"])}

    def shift(self, state: State, change: Real) -> State:
        """Return the state after the model moved by ``change``: the numerator moves by ``w * change``."""
        return {**state, "x": state["x"] + float(state["w"]) * change}

    def _local(self, state: State, gradient: Gradient | None, view: View) -> LocalStep | None:
        """Make the local step. Returns None for a node that may only receive, because its weight is below ``w_min``.

        Raises
        ------
        NonFiniteUpdate
            If the gradient, the model or the weight is no longer finite.
        """
        w = float(state["w"])
        if "held" in state or w < self.w_min:
            return None
        z = debiased(state)
        if gradient is not None and not view.dense and "fresh" not in state:
            step, moved = descent(state, gradient, z, falling(self.lr, self.decay_over, view.iteration), self.momentum)
            if step is not None:
                # On the numerator, as in SGP: z moves by step / w, so that a small weight makes a step too long.
                state = {**state, **moved, "x": state["x"] - step}
                z = debiased(state)
        require_finite(z, f"node {view.node}, iteration {view.iteration}: the de-biased model")
        return LocalStep(state, z, w)

    def _guarded(self, state: State, before: State) -> State:
        """Return a state after counting messages, with the marks that follow from its weight."""
        w = float(state["w"])
        state = {**state}
        if w < self.w_min:
            # Once, with the model from before the weight fell: later inboxes find a state that is too light itself.
            if "held" not in state:
                state["held"] = debiased(before)
            return state
        state.pop("held", None)
        if w > self.w_start:
            state.pop("fresh", None)
        return state

    def _credit_whole(self, state: State, message: GossipMessage) -> State:
        """Credit a message with a whole model or a whole numerator; a duplicate changes nothing.

        Raises
        ------
        MessageError
            If it is not such a message.
        """
        header, share, x = read_whole(message, message.source, state)
        if mark_of(header) <= self._counted(state, message.source, dense=True):
            return state
        seen = {f"seen/{message.source}": np.array(mark_of(header), np.int64)}
        return {**received(state, x, share, message.source, self.nodes), **seen}

    def leave(self, state: State, view: View) -> tuple[State, Outbox]:
        """Return (0, 0), and messages with all of (x, w) to the active out-neighbours, in proportion to their shares.

        The numerator travels as float64, whatever the model is: what rounding left over would have nobody to keep it.

        Raises
        ------
        TopologyError
            When there is mass and no out-neighbour to take it.
        """
        x, w = state["x"], float(state["w"])
        # Without mass nobody has to be there to take it: heirs would raise.
        if not w and not x.any():
            return state, ()
        parts = heirs(view)
        outbox, left, rest = [], w, x
        for j, part in parts.items():
            # The last one takes what is left, so that nothing is made or lost by rounding.
            share, moved = (left, rest) if j == max(parts) else (w * part, x * part)
            left, rest = left - share, rest - moved
            body = put_scalars(share) + put_real(moved)
            outbox.append(
                Multicast((j,), pack(view.iteration, 0, MessageFlag.DENSE | MessageFlag.LEAVING, moved.dtype, body))
            )
        return self._guarded({**state, "x": np.zeros_like(x), "w": np.array(0.0)}, state), tuple(outbox)


def debiased(state: State) -> Real:
    """Return z = x / w in the model's dtype, whatever w is."""
    with np.errstate(over="ignore", invalid="ignore"):  # before it is sent somebody looks
        z: Real = (state["x"] / float(state["w"])).astype(state["dtype"].dtype)
    return z


def push_whole(local: LocalStep, view: View) -> tuple[State, Outbox]:
    """Push P[j, i] of everything to every active out-neighbour j: plain push-sum, models whole."""
    x, left = local.state["x"], local.w
    shares = {j: view.column[j] * local.w for j in sorted(view.column)}
    # The model as it travels, rounded to its own dtype: what is taken here must be what the receivers add.
    z = local.z.astype(np.float64)
    # The debit of each share on its own, in the receivers' arithmetic: one product with their sum rounds differently.
    for share in shares.values():
        x, left = x - share * z, left - share
    body = put_real(local.z)
    outbox = tuple(
        # Sequence number 0: whole messages change no estimate, and mark_of tells them apart by their iteration.
        Multicast(to, pack(view.iteration, 0, MessageFlag.DENSE, local.z.dtype, put_scalars(share) + body))
        for share, to in grouped(shares).items()
    )
    return {**local.state, "x": x, "w": np.array(left)}, outbox


def mark_of(header: MessageHeader) -> int:
    """Return a number that grows from one message of an edge to the next."""
    return 2 * header.iteration + bool(header.flags & MessageFlag.LEAVING)


def part_of(model: Real, share: float) -> Real:
    """Return what ``share`` of a node with this model adds to a numerator: float64 of shape (d,)."""
    with np.errstate(over="ignore"):  # seen by credited
        return share * model.astype(np.float64)


def credited(state: State, x: Real, w: float) -> State:
    """Return the state with a share added.

    Raises
    ------
    MessageError
        When the sum is not finite: no run could have such a share, and the state would never recover.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        numerator, weight = state["x"] + x, float(state["w"]) + w
    if not (all_finite(numerator) and math.isfinite(weight)):
        raise MessageError(f"a share of {w:g} takes the node's mass beyond the largest number")
    return {**state, "x": numerator, "w": np.array(weight)}


def received(state: State, x: Real, share: float, source: int, nodes: int) -> State:
    """Return the state with a share that came from ``source``; ``nodes``, if known, is the total of all weights.

    Raises
    ------
    MessageError
        When it takes this node's weight above the total of all weights: no such share exists.
    """
    weight = float(state["w"]) + share
    if nodes and weight > nodes * (1.0 + ROUNDING):
        raise MessageError(
            f"node {source} sent a share of {share:g}, with which this node would have a weight of {weight:g}; all "
            f"{nodes} nodes together have {nodes}. It is refused and goes back"
        )
    return credited(state, x, share)


def heirs(view: View) -> dict[int, float]:
    """Return the part of what a leaving node has that each active out-neighbour takes, ascending; their sum is 1.

    Raises
    ------
    TopologyError
        When there is none.
    """
    shares = {j: view.column[j] for j in sorted(view.column) if view.column[j] > 0.0}
    if not shares:
        raise TopologyError(
            f"node {view.node} cannot leave in good order: no living out-neighbour takes its share; let it leave in an "
            "iteration in which it has one"
        )
    total = math.fsum(shares.values())
    return {j: share / total for j, share in shares.items()}


def grouped(shares: Mapping[int, float]) -> dict[float, tuple[int, ...]]:
    """Return who gets the same share, and so the same message; by first destination."""
    groups: dict[float, tuple[int, ...]] = {}
    for to, share in shares.items():
        # By the float itself: the shares of a uniform column are equal to the bit.
        groups[share] = (*groups.get(share, ()), to)
    return groups


def share_of(data: memoryview | bytes, source: int) -> float:
    """Return the share of w at the beginning of ``data``.

    Raises
    ------
    MessageError
        When it is cut short, negative or not finite.
    """
    (share,) = take_scalars(data[:SHARE_BYTES], 1)
    if share < 0.0:
        raise MessageError(f"node {source} sent a share of {share}; a share is a number from 0 on")
    return share


def is_whole(message: GossipMessage) -> bool:
    """Whether a message carries a whole model or numerator and concerns no estimate."""
    return MessageFlag.DENSE in peek(message.payload).flags


def read_whole(message: GossipMessage, who: int, state: State) -> tuple[MessageHeader, float, Real]:
    """Return header, share of w, and what the message adds to the numerator: float64 of shape (d,).

    Raises
    ------
    MessageError
        When it is not a whole message of ``who`` for a model like this state's.
    """
    size = state["x"].size
    # 8 bytes an element whatever the model's dtype: the numerator of a leaving node is float64.
    header, body = unpack(message.payload, most=SHARE_BYTES + 8 * size)
    leaving = MessageFlag.LEAVING in header.flags
    dtype = np.dtype(np.float64) if leaving else state["dtype"].dtype
    if header.flags not in (MessageFlag.DENSE, MessageFlag.DENSE | MessageFlag.LEAVING) or header.dtype != dtype:
        raise MessageError(
            f"node {who} sent a message with flags {header.flags!r} and {header.dtype} vectors; expected a whole model "
            f"in {dtype}; all nodes must run one algorithm with models of one dtype"
        )
    share = share_of(body, who)
    values = take_real(body[SHARE_BYTES:], size, dtype)
    return header, share, values if leaving else part_of(values, share)
