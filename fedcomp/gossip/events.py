"""Events of a run besides its regular iterations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcomp.gossip.tuning import Observer
from fedcomp.logs import log

# A tuple and not a class: thousands of them may be in a stored state, and each is three plain values there.
Event = tuple[int, int, str]
"""Exchange (from 1), node, reason."""


@dataclass(slots=True)
class RunReport:
    """What happened beside plain iterations. Events are ``[exchange, node, reason]``, exchanges counted from 1.

    Attributes
    ----------
    rounds : int
        Exchanges.
    repeated : int
        Asks that went out again.
    gone, joined, left, failed, refused, needed, lost, doubted, noticed, unseen, split : list
        Events. ``refused`` are answers, ``needed`` messages a node could not apply (node: the receiver), ``lost``
        messages that came back and could not be read by their own sender: their mass is gone. ``doubted`` are nodes
        whose figures are left out of the judgement whether the run diverges. ``noticed`` are nodes whose messages
        repeat others or carry no mass, once for every receiver (node: the sender). ``unseen`` are models that could not
        be looked at. ``split`` says, of the node that went, since when the others fall into groups that cannot all
        reach each other.
    """

    rounds: int = 0
    repeated: int = 0
    gone: list[Event] = field(default_factory=list)
    joined: list[Event] = field(default_factory=list)
    left: list[Event] = field(default_factory=list)
    failed: list[Event] = field(default_factory=list)
    refused: list[Event] = field(default_factory=list)
    needed: list[Event] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    doubted: list[Event] = field(default_factory=list)
    noticed: list[Event] = field(default_factory=list)
    unseen: list[Event] = field(default_factory=list)
    split: list[Event] = field(default_factory=list)

    def add(self, told: Mapping[str, Any]) -> None:
        """Add what a program told of a round, and log it."""
        self.rounds += told["exchanges"]
        self.repeated += told["repeated"]
        for kind, node, reason in told["events"]:
            getattr(self, kind).append((self.rounds, node, reason))
            level = logging.INFO if kind in ("joined", "left") else logging.WARNING
            log.log(level, "gossip exchange %d, node %d: %s", self.rounds, node, reason)

    def watched(self, watch: Observer, figures: Mapping[int, Mapping[int, Mapping[str, float]]]) -> None:
        """Show a watcher the figures of iterations; note whom it does not believe.

        Raises
        ------
        Diverged
            When it ends the run.
        """
        for iteration in sorted(figures):
            doubted = watch(iteration, figures[iteration]) or {}
            events = [("doubted", node, f"left out of the judgement: {why}") for node, why in sorted(doubted.items())]
            self.add({"exchanges": 0, "repeated": 0, "events": events})
