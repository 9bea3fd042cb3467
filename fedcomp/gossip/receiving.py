"""Checks of received gossip messages, including a node's own messages that return to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from fedcomp.gossip.base import Algorithm, GossipMessage, State
from fedcomp.gossip.errors import TOO_FAR, MessageError, OutOfStep

FARTHEST: Final = 1000.0
"""By how many times its own norm the messages of one iteration may move a node's model."""


def received(algorithm: Algorithm, state: State, inbox: Sequence[GossipMessage]) -> tuple[State, dict[int, str]]:
    """Return the state after messages, and the sources whose messages were refused, with the reason."""
    try:
        return _within(algorithm, state, inbox), {}
    except (MessageError, OutOfStep) as error:
        if not algorithm.asynchronous:
            # Without one of its messages an iteration cannot be finished, so none of them is of use.
            return state, {message.source: str(error) for message in inbox}
    refused: dict[int, str] = {}
    # One damaged message spoils what follows it from the same source, but nothing of the others.
    for source, messages in itertools.groupby(inbox, lambda message: message.source):
        try:
            state = _within(algorithm, state, tuple(messages))
        except (MessageError, OutOfStep) as error:
            refused[source] = str(error)
    return state, refused


def _within(algorithm: Algorithm, state: State, inbox: Sequence[GossipMessage]) -> State:
    """Return the state after receiving ``inbox``.

    Raises
    ------
    MessageError
        If a message would move the model absurdly far. Even finite numbers of this size ruin all models that they
        reach.
    """
    after = algorithm.receive(state, inbox)
    if not inbox:
        return after
    old, new = algorithm.model(state), algorithm.model(after)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = float(np.linalg.norm(new.astype(np.float64) - old))
    # Of a model of zeros, as the first one may be, the scale is that of values of 1.
    usual = max(float(np.linalg.norm(old.astype(np.float64))), math.sqrt(old.size))
    if not moved <= FARTHEST * usual:
        sources = sorted({message.source for message in inbox})
        raise MessageError(
            f"{TOO_FAR} {moved:.3g}, {moved / usual:.3g} times its own norm, by messages from nodes "
            f"{sources}; at most {FARTHEST:g} times are accepted"
        )
    return after


def taken_back(algorithm: Algorithm, state: State, messages: Sequence[GossipMessage]) -> tuple[State, tuple[str, ...]]:
    """Take back own messages. Of some that were damaged on their way, those that can be read: to insist on the others
    would cost the node all it has, not only what they carried."""
    if not messages:
        return state, ()
    try:
        return algorithm.take_back(state, messages), ()
    except (MessageError, OutOfStep):
        lost = []
    # Newest first: estimates are wound back from the last message of an edge.
    for message in reversed(messages):
        try:
            state = algorithm.take_back(state, (message,))
        except (MessageError, OutOfStep) as error:
            lost.append(f"message to node {message.destination}: {error}")
    return state, tuple(lost)
