"""Common steps of several algorithms: the local step, weighted sums of received messages, uncompressed models.

What :meth:`~fedcomp.gossip.base.Algorithm.receive` must know of an iteration that was begun is in the state under
keys that begin with ``"begun."``; it is gone when the iteration is finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np

from fedcomp import rules
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import MessageFlag, pack, put_real, require_finite, take_real, unpack

BEGUN: Final = "begun."


GammaOrAuto = Annotated[float | str, rules.Maybe(rules.Real(above=0.0, most=1.0), "auto")]
"""A consensus step size; "auto": what the compressor bears."""

AnyCompressor = Annotated[Mapping[str, Any] | Compressor, rules.Made(get_compressor)]


def falling(lr: float, over: int, iteration: int) -> float:
    """Return the step size of an iteration that falls from ``lr`` to zero along half a cosine; ``over`` 0 keeps it."""
    # min: a run that goes on longer stays at zero; the cosine alone would rise again.
    return lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, iteration / over))) if over else lr


def velocity(model: Real, momentum: float) -> State:
    """Return the momentum buffer of a node that has made no step: none without momentum."""
    return {"v": np.zeros_like(model)} if momentum else {}


def descent(state: State, gradient: Gradient | None, at: Real, lr: float, momentum: float) -> tuple[Real | None, State]:
    """Return the local step ``lr * v`` with ``v = momentum * v + g`` (heavy ball), and what of the state it changes.

    Parameters
    ----------
    at : ndarray, shape (d,)
        Where the gradient is taken.

    Returns
    -------
    step : ndarray, shape (d,), or None
        To be subtracted from the model; None without a gradient, and the buffer then rests.
    changed : State

    Raises
    ------
    NonFiniteUpdate
        When the gradient is not finite.
    ConfigError
        When it has not the model's shape.
    """
    if gradient is None:
        return None, {}
    lr, momentum = float(lr), float(momentum)  # a numpy scalar would make float64 of a float32 model
    # In the model's dtype: a float64 gradient would widen a float32 model, and what it sends.
    g = np.asarray(gradient(at), at.dtype)
    if g.shape != at.shape:
        raise ConfigError(f"the gradient has shape {g.shape}, the model {at.shape}")
    with np.errstate(over="ignore", invalid="ignore"):  # an error says it
        if not momentum:
            return finite(lr * g, "the gradient"), {}
        v = finite(momentum * state["v"] + g, "the gradient")
        return finite(lr * v, "the local step"), {"v": v}


def finite(vector: Real, what: str) -> Real:
    """Return ``vector``, or raise :class:`NonFiniteUpdate` that names ``what`` it is."""
    require_finite(vector, what)
    return vector


def begun(view: View, **more: Any) -> State:
    """Return what must be known of the iteration ``view`` when its messages come, and whatever ``more`` there is."""
    known = {
        "node": np.int64(view.node),
        "iteration": np.int64(view.iteration),
        "ids": np.array(list(view.row), np.int64),
        "weights": np.array(list(view.row.values()), np.float64),
        **more,
    }
    return {BEGUN + name: np.asarray(value) for name, value in known.items()}


def settled(state: State) -> State:
    """Return the state without what belonged to the iteration that is now finished."""
    return {key: value for key, value in state.items() if not key.startswith(BEGUN)}


class Compressing(Algorithm):
    """Has a ``compressor``, given as one or as its configuration."""

    compressor: AnyCompressor

    @property
    def _compressor(self) -> Compressor:
        return get_compressor(self.compressor)


class Incoming(NamedTuple):
    """One neighbour's message and the weight ``W[node, source]`` of what it says."""

    source: int
    weight: float
    payload: bytes


def incoming(state: State, messages: Sequence[GossipMessage]) -> list[Incoming]:
    """Return the messages of the iteration begun with ``state``, ascending by source, exactly one of each neighbour.

    Raises
    ------
    MessageError
        When one is missing, superfluous, or there twice.
    """
    expected = [int(j) for j in state[BEGUN + "ids"]] if BEGUN + "ids" in state else []
    sources = sorted(message.source for message in messages)
    if sources != sorted(expected):
        raise MessageError(
            f"messages of nodes {sources} arrived, expected exactly one from each of {sorted(expected)}; an "
            "iteration is "
            "finished when all of them are there"
        )
    if not expected:
        return []
    # The weights of the iteration that was begun: the graph may have changed since.
    weight = dict(zip(expected, state[BEGUN + "weights"].tolist(), strict=True))
    return [Incoming(m.source, weight[m.source], m.payload) for m in sorted(messages, key=lambda m: m.source)]


def whole(model: Real, view: View) -> Outbox:
    """Return ``model`` as it is, in its own dtype, to every out-neighbour.

    Raises
    ------
    NonFiniteUpdate
        When the model is not finite.
    """
    if not view.column:
        return ()
    # Number 0 in every message: whole models form no stream in which one could be missing.
    return (Multicast(tuple(view.column), pack(view.iteration, 0, MessageFlag.DENSE, model.dtype, put_real(model))),)


def pull(state: State, announced: Real, messages: Sequence[GossipMessage]) -> Real:
    """Return ``sum_j W[i, j] (x_j - announced)`` over whole models x_j, added up by ascending j.

    Both ends of an edge compute the same difference with opposite sign, so that the mean of all models stays.

    Raises
    ------
    MessageError
        When a message is missing, superfluous, or no whole model of the iteration that was begun.
    """
    moved = np.zeros_like(announced)
    for source, weight, payload in incoming(state, messages):
        moved += weight * (whole_of(payload, announced, int(state[BEGUN + "iteration"]), source) - announced)
    return moved


def whole_of(payload: bytes, like: Real, iteration: int, source: int) -> Real:
    """Return the model that :func:`whole` wrote.

    Raises
    ------
    MessageError
        When it is not one of this iteration, of ``like``'s dtype and size, or not finite.
    """
    header, body = unpack(payload, most=like.nbytes, dtype=like.dtype)
    if header.flags != MessageFlag.DENSE or header.iteration != iteration:
        raise MessageError(f"node {source} sent {header}, expected a whole model of iteration {iteration}")
    return take_real(body, like.size, like.dtype)
