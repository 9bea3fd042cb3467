"""Coordinate push: push-sum with one weight per coordinate, so that a message may hold only some coordinates.

Derived and measured here, not published: the variant of push-sum that compression suggests when no node shall remember
another one. Node i holds a numerator x and weights w, both of the model's size, and its model is z = x / w, coordinate
by coordinate:

    c = the k coordinates in which z has moved most since they were last sent
    for every out-neighbour j:   f_c = P[j, i] w_c;   send (f_c, z_c);   x_c <- x_c - f_c z_c;   w_c <- w_c - f_c
    for every message:                                             x_c <- x_c + f_c z_c;   w_c <- w_c + f_c

For the coordinates it sends a node does what plain push-sum does, and with the others it rests. Both ends use the same
two numbers, so the sums of x and of w are constant in every coordinate, whatever is chosen and whatever rests. There is
no consensus step to tune and nothing to get out of step.

It only averages. Weights of single coordinates fall far below 1 (measured: 0.02 with 8 nodes and a density of 0.1, on
the exponential graph and on random digraphs), and a gradient step on the numerator is multiplied by 1 / w: training
diverges (measured). It refuses gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
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
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import MessageFlag, all_finite, pack, peek, require_finite, unpack
from fedcomp.gossip.pushsum import ROUNDING, heirs
from fedcomp.kernels import select_topk
from fedcomp.layout import Layout
from fedcomp.rules import Density, Inside, Int, OneOf
from fedcomp.wire import Section, Values, WireError
from fedcomp.wire.bits import Buffer
from fedcomp.wire.limits import NUMPY_DTYPES

_SHARE: Final = np.dtype("<f4")
"""Shares of weights are rounded to float32 before any use, so rounding loses nothing."""


def _pairs(value: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([("share", _SHARE), ("value", value)])


class _Pairs(Values):
    """A share and a value for every coordinate; the code that adds them checks their values."""

    codec_id = 255
    name = "pairs of a share and a value"

    def __init__(self, entries: NDArray[Any]) -> None:
        self.entries = entries

    @property
    def k(self) -> int:
        return int(self.entries.size)

    def decode(self) -> NDArray[Any]:
        return self.entries

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        return b"", self.entries.tobytes()

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        size = k * _pairs(NUMPY_DTYPES[dtype]).itemsize
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        return cls(np.frombuffer(section, _pairs(NUMPY_DTYPES[dtype])))

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 2 * size


@dataclass(frozen=True, repr=False, eq=False)
class CoordinatePush(Algorithm):
    """Sparse averaging on directed and changing graphs without estimates.

    Parameters
    ----------
    density : float
        Share of the coordinates that a message holds, in (0, 1]; at least one.
    values : {"model", "float32"}
        How z travels: in the model's own dtype, or as float32. No memory holds what rounding leaves out, so that nodes
        with float64 models agree to about 1e-7 only when float32 travels.
    w_min : float
        Coordinates with a smaller weight are not sent and keep the value they showed last.
    nodes : int
        Vertices of the graph, and so the total of each coordinate's weights: a share that would take one above it is
        refused. 0: filled in from the graph when a run begins.

    Notes
    -----
    State: ``"x"`` and ``"weights"``, float64 of shape (d,); ``"announced"``, what was last sent of every coordinate, in
    the model's dtype; ``"split"``, the number of coordinates among which k are chosen, the others travel in every
    message; ``"seen/<j>"`` the last message of node j that was counted, which makes one that comes twice harmless.

    The body of a message: a section (:class:`fedcomp.wire.Section`) with a pair (share of w, z) per chosen coordinate,
    4 bytes and 4 or 8; then the pairs of those that always travel. In the closing phase all travel.

    Examples
    --------
    >>> CoordinatePush(density=0.1).count(1000)
    100
    """

    name: ClassVar[str] = "coordinate-push"
    directed: ClassVar[bool] = True
    time_varying: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True

    density: Density = 0.01
    values: Annotated[Literal["model", "float32"], OneOf("model", "float32")] = "model"
    w_min: Inside = 1e-3
    nodes: Annotated[int, Int()] = 0

    def fitted(self, graph: KnownGraph) -> Algorithm:
        """Return this algorithm with ``nodes`` filled in."""
        return self if self.nodes else self.from_config({**self.get_config(), "nodes": graph.n})

    def count(self, n: int) -> int:
        """Return how many of ``n`` coordinates a message holds at most."""
        return params.count(self.density, n) if n else 0

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return (x, w) = (model, 1); what a coordinate moved counts from ``common``, by default from the model."""
        model = opened(model, layout)
        return {
            "x": model.astype(np.float64),
            "weights": np.ones(model.size),
            "announced": model if common is None else real(common).astype(model.dtype, copy=False),
            "split": np.array(layout.compressed_size, np.int64),
        }

    def join(self, model: Real, layout: Layout) -> State:
        """Return (x, w) = (0, 0): the mean of the others stays; ``model`` is shown until there is weight."""
        state = self.init(model, layout)
        return {**state, "x": np.zeros(layout.size), "weights": np.zeros(layout.size)}

    def model(self, state: State) -> Real:
        """Return z = x / w in the model's dtype; where w is below ``w_min``, what was last sent."""
        enough = state["weights"] >= self.w_min
        z: Real = state["announced"].copy()
        z[enough] = state["x"][enough] / state["weights"][enough]
        return z

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return the sum over nodes of the mean weight, and the norm of the sum of the numerators."""
        held = list(states)
        total = sum((state["x"] for state in held), np.zeros(()))
        return {
            "sum_w": math.fsum(float(state["weights"].mean()) for state in held if state["weights"].size),
            "sum_x": float(np.linalg.norm(np.atleast_1d(total))),
        }

    def facts(self, state: State) -> dict[str, float]:
        """Return the smallest weight, and how far the model has moved since it was sent."""
        moved = self.model(state) - state["announced"]
        return {"weight": float(state["weights"].min(initial=1.0)), "innovation": float(np.linalg.norm(moved))}

    def shift(self, state: State, change: Real) -> State:
        """Return the state after the model moved by ``change``: the numerator moves by ``w * change``."""
        return {**state, "x": state["x"] + state["weights"] * change}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Push shares of the coordinates that moved most to every active out-neighbour.

        Raises
        ------
        ConfigError
            When there is a gradient.
        NonFiniteUpdate
            When the model, a value or a share is not finite as it travels.
        """
        if gradient is not None:
            raise ConfigError(
                f"{self.name} only averages: with weights of single coordinates training diverges; run it without "
                "objectives, or train with sparse-push or sgp"
            )
        z = self.model(state)
        require_finite(z, f"node {view.node}, iteration {view.iteration}: the de-biased model")
        if not view.column:
            return state, ()
        pairs = _pairs(_travels(self.values, z.dtype))
        at = np.arange(z.size) if view.dense else self._chosen(state, z)
        split = z.size if view.dense else int(state["split"])
        # ``at`` ascends: what lies below split goes into the section, the rest travels in any case.
        head = int(np.searchsorted(at, split))
        x, weights, announced = state["x"].copy(), state["weights"].copy(), state["announced"].copy()
        # Below w_min z is what was shown; a share must be of what there is.
        there = np.divide(x, weights, out=z.astype(np.float64), where=weights > 0.0)
        with np.errstate(over="ignore"):
            # Rounded before anybody uses them: debit and credit are of the numbers that travel.
            value = there[at].astype(pairs["value"])
            shares = {j: (view.column[j] * state["weights"][at]).astype(_SHARE) for j in sorted(view.column)}
        # A finite float64 may become infinite in float32.
        for part in (value, *shares.values()):
            require_finite(part, f"node {view.node}, iteration {view.iteration}: what would be sent")
        outbox = []
        for j, share in shares.items():
            entries = np.empty(at.size, pairs)
            entries["share"], entries["value"] = share, value
            if view.dense:
                body = entries.tobytes()
            else:
                body = (
                    _section(split, self.count(split), pairs).write(_Pairs(entries[:head]), at[:head])
                    + entries[head:].tobytes()
                )
            flags = MessageFlag.DENSE if view.dense else MessageFlag(0)
            outbox.append(Multicast((j,), pack(view.iteration, 0, flags, z.dtype, body)))
            taken = share.astype(np.float64)
            x[at] -= taken * value.astype(np.float64)
            weights[at] -= taken
        announced[at] = value
        return {**state, "x": x, "weights": weights, "announced": announced}, tuple(outbox)

    def _chosen(self, state: State, z: Real) -> NDArray[np.int64]:
        """Return the coordinates of a message in ascending order: those that moved most, and those that are always
        sent."""
        split = int(state["split"])
        # Without weight a coordinate shows an old value: it has not moved, whatever x says.
        moved = np.where(state["weights"] >= self.w_min, z - state["announced"], 0.0)[:split]
        at = select_topk(moved, self.count(split))
        # Top-k always finds k coordinates. Those that have not moved would spend bytes for nothing.
        return np.concatenate([at[moved[at] != 0.0], np.arange(split, z.size)])

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Add the shares that came, of whatever iteration they are."""
        now = state
        for message in messages:
            header = peek(message.payload)
            mark, seen = 2 * header.iteration + bool(header.flags & MessageFlag.LEAVING), f"seen/{message.source}"
            if seen in now and mark <= int(now[seen]):
                continue
            credited = _credited(self, now, message)
            most = float(credited["weights"].max(initial=0.0))
            # The bound of push-sum, although shares are float32 here: they are rounded before anybody uses them, and
            # both ends add and subtract them in float64.
            if self.nodes and most > self.nodes * (1.0 + ROUNDING):
                raise MessageError(
                    f"node {message.source} sent shares with which this node would have a weight of {most:g}; all "
                    f"{self.nodes} nodes together have {self.nodes}. They are refused and go back"
                )
            now = {**credited, seen: np.array(mark, np.int64)}
        return now

    def take_back(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Return the state after undelivered messages came back: their shares are the sender's again."""
        now = state
        for message in messages:
            now = _credited(self, now, message)
        return now

    def leave(self, state: State, view: View) -> tuple[State, Outbox]:
        """Return (0, 0), and messages with all of (x, w) to the active out-neighbours, in proportion to their shares.

        Here the pairs hold the numerator in place of z, and both are float64: what rounding left over would have nobody
        to keep it.

        Raises
        ------
        TopologyError
            When there is mass and no out-neighbour to take it.
        """
        x, weights = state["x"], state["weights"]
        if not weights.any() and not x.any():
            return state, ()
        parts = heirs(view)
        # One buffer for all messages: tobytes copies.
        entries = np.empty(x.size, [("share", "<f8"), ("value", "<f8")])
        outbox, left, rest = [], weights, x
        for j, part in parts.items():
            # The last one takes what is left, so that nothing is made or lost by rounding.
            entries["share"], entries["value"] = (left, rest) if j == max(parts) else (weights * part, x * part)
            left, rest = left - entries["share"], rest - entries["value"]
            flags = MessageFlag.DENSE | MessageFlag.LEAVING
            outbox.append(Multicast((j,), pack(view.iteration, 0, flags, state["announced"].dtype, entries.tobytes())))
        # What it shows from now on: without weight there is nothing to divide by.
        shown = self.model(state)
        return {**state, "x": np.zeros_like(x), "weights": np.zeros_like(weights), "announced": shown}, tuple(outbox)


def _section(n: int, k: int, pairs: np.dtype[Any]) -> Section:
    return Section(n, _Pairs, "auto", k, pairs["value"].name)


def _travels(values: str, dtype: Any) -> np.dtype[Any]:
    return (np.dtype(np.float32) if values == "float32" else np.dtype(dtype)).newbyteorder("<")


def _credited(algorithm: CoordinatePush, state: State, message: GossipMessage) -> State:
    """Return the state after adding the content of a message."""
    at, share, moved = _read(algorithm, state, message)
    x, weights = state["x"].copy(), state["weights"].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        x[at] += moved
        weights[at] += share
    if not (all_finite(x) and all_finite(weights)):
        raise MessageError(f"a message of node {message.source} takes the node's mass beyond the largest number")
    return {**state, "x": x, "weights": weights}


def _read(algorithm: CoordinatePush, state: State, message: GossipMessage) -> tuple[NDArray[np.int64], Real, Real]:
    """Return coordinates, shares of w and additions to the numerator (float64) from a message.

    Raises
    ------
    MessageError
        If the message is invalid.
    """
    n, split = state["x"].size, int(state["split"])
    dtype = state["announced"].dtype
    # Generous: a pair of a leaving node has 16 bytes, and the indices of a section never take more than a bitmap.
    header, body = unpack(message.payload, most=20 * n + 64 + n // 8, dtype=dtype)
    if header.flags not in (MessageFlag(0), MessageFlag.DENSE, MessageFlag.DENSE | MessageFlag.LEAVING):
        raise MessageError(f"node {message.source} sent flags {header.flags!r}; {algorithm.name} has none like it")
    leaving, dense = bool(header.flags & MessageFlag.LEAVING), bool(header.flags & MessageFlag.DENSE)
    share, value = (np.dtype("<f8"),) * 2 if leaving else (_SHARE, _travels(algorithm.values, dtype))
    pairs = np.dtype([("share", share), ("value", value)])
    # The length of the tail is known; the section in front of it takes what remains.
    end = 0 if dense else len(body) - (n - split) * pairs.itemsize
    if end < 0 or (dense and len(body) != n * pairs.itemsize):
        raise MessageError(
            f"node {message.source} sent {len(body)} bytes after its header; not pairs of {pairs.itemsize} for "
            f"{n if dense else f'up to {algorithm.count(split)} of {split} and all {n - split} other'} coordinates"
        )
    tail = np.frombuffer(body[end:], pairs)
    if dense:
        at, entries = np.arange(n), tail
    else:
        try:
            tensor = _section(split, algorithm.count(split), pairs).read(body[:end])
        except WireError as error:
            raise MessageError(f"node {message.source} sent pairs that cannot be read: {error}") from error
        assert tensor.indices is not None
        at = np.concatenate([tensor.indices, np.arange(split, n)])
        entries = np.concatenate([tensor.values.decode(), tail])
    shares, values = entries["share"].astype(np.float64), entries["value"].astype(np.float64)
    if not (np.isfinite(values).all() and np.isfinite(shares).all() and (shares >= 0.0).all()):
        raise MessageError(f"node {message.source} sent a value that is not finite or a share below 0")
    with np.errstate(over="ignore"):
        return at, shares, values if leaving else shares * values
