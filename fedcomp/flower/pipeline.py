"""Asynchronous sending, so that several exchanges are in flight at a time.

A round (:mod:`fedcomp.flower.rounds`) says ``yield Send(messages)`` and goes on; it, or a later round of the same
strategy, says ``replies = yield Await(messages, ...)``. What nodes, links and server do in between overlaps.
Flower's own loop cannot do that: it waits for every exchange, three seconds at a look.

Seconds are the grid's: simulated ones on the in-process engine, a monotonic clock's elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedcomp.flower.metered import addressed, join, partition_lookup, poll
from fedcomp.flower.wrapper import Enough


@dataclass(frozen=True, slots=True)
class Send:
    """Messages to push; the round goes on at once, and is sent an empty list."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Await:
    """A wait for replies to messages that were pushed, and not answered, before.

    Parameters
    ----------
    messages : sequence of Message
    until : float, optional
        Second of the grid's clock (:func:`now`) at which the wait ends; None waits for all. The driver's own timeout
        holds as well, from now on.
    enough : callable, optional
        ``(replies so far) -> bool``: when true no more replies are waited for. What has arrived by then is returned.
    """

    messages: Sequence[Message]
    until: float | None = None
    enough: Enough | None = None


def now(grid: Grid) -> float:
    """Return the second that it is on a grid's clock."""
    clock = getattr(grid, "clock", None)
    return time.monotonic() if clock is None else float(clock)


def arrived(grid: Grid, reply: Message) -> float:
    """Return the second in which a reply arrived; that of the question where the grid did not note it."""
    known = getattr(grid, "arrived", None)
    return known(reply) if callable(known) else now(grid)


def collect(grid: Grid, wanted: Await, timeout: float | None) -> list[Message]:
    """Return at most one reply for each message, in partition order.

    Parameters
    ----------
    timeout : float, optional
        Seconds from now on; the shorter of it and what ``wanted`` allows counts.
    """
    limit = None if wanted.until is None else max(0.0, wanted.until - now(grid))
    limit = timeout if limit is None else limit if timeout is None else min(limit, timeout)
    ids = [message_id for message_id, _ in addressed(wanted.messages) if message_id]
    receive = getattr(grid, "receive", None)
    if callable(receive):
        replies = receive(ids, timeout=limit, enough=wanted.enough)
    else:
        replies = poll(grid, set(ids), limit, wanted.enough)
    return join(addressed(wanted.messages), replies, partition_lookup(grid))
