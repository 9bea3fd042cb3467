"""What happened in a run beside plain iterations."""

from __future__ import annotations

from dataclasses import dataclass, field

# A tuple and not a class: thousands of them may be in a stored state, and each is three plain values there.
Event = tuple[int, int, str]
"""Round (from 1), node, reason."""


@dataclass(slots=True)
class RelayReport:
    """What happened beside plain iterations. Events are ``[round, node, reason]``, rounds counted from 1.

    Attributes
    ----------
    rounds : int
        Calls of :meth:`~fedcomp.gossip.relay.Relay.ask`.
    repeated, ignored : int
        Instructions asked again; answers to nothing that was open (duplicates, late ones).
    undelivered : int
        Messages that no node took in. They went back to their senders, where these were still there.
    gone, joined, left, failed, refused, needed, lost, doubted, noticed : list
        Events. ``refused`` are answers, ``needed`` messages a node could not apply (node: the receiver), ``lost``
        messages that came back and could not be read by their own sender: their mass is gone. ``doubted`` are nodes
        whose figures are left out of the judgement whether the run diverges. ``noticed`` are nodes whose messages
        repeat others or carry no mass, once for every receiver (node: the sender).
    split : list
        ``[round, groups]``: since when living nodes fall into groups that cannot all reach each other.
    """

    rounds: int = 0
    repeated: int = 0
    ignored: int = 0
    undelivered: int = 0
    gone: list[Event] = field(default_factory=list)
    joined: list[Event] = field(default_factory=list)
    left: list[Event] = field(default_factory=list)
    failed: list[Event] = field(default_factory=list)
    refused: list[Event] = field(default_factory=list)
    needed: list[Event] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    doubted: list[Event] = field(default_factory=list)
    noticed: list[Event] = field(default_factory=list)
    split: list[tuple[int, list[list[int]]]] = field(default_factory=list)
