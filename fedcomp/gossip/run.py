"""All that a relay knows of its run between two exchanges: settings, who takes part, what is on the way, what happened.

Both halves of :class:`fedcomp.gossip.relay.Relay` work on it: :mod:`fedcomp.gossip.dispatch`, which decides what every
node does next, and :mod:`fedcomp.gossip.settlement`, which takes the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from fedcomp.errors import ConfigError
from fedcomp.gossip.base import Algorithm, GossipMessage, View
from fedcomp.gossip.errors import TOO_FAR, Diverged, MessageError
from fedcomp.gossip.events import RelayReport
from fedcomp.gossip.mailbox import Pending
from fedcomp.gossip.membership import Membership
from fedcomp.gossip.outstanding import Outstanding
from fedcomp.gossip.reference import Reference
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.logs import log
from fedcomp.plain import Count
from fedcomp.rules import Configured, Int, Maybe, Switch, Text
from fedcomp.stateful import Stateful, nested

REASON_CHARACTERS: Final = 300
"""Characters of a node's own words that are kept."""


class Observer(Protocol):
    """What gets the nodes' figures after every iteration; :class:`fedcomp.gossip.tuning.DivergenceWatch` is one."""

    def __call__(self, iteration: int, facts: Mapping[int, Mapping[str, float]]) -> Mapping[int, str] | None:
        """Take note; return nodes that are not believed, with the reason, for the report. Raises
        :class:`~fedcomp.gossip.errors.Diverged` when the run has to end."""
        ...


@dataclass(frozen=True)
class RelaySettings(Configured):
    """How a relay runs.

    Parameters
    ----------
    iterations : int
        Iterations with gradients.
    session : str
        Names the run, unlike any other of the same nodes.
    seed : int
        The run's.
    largest : int
        Bytes of the largest message that is accepted: :func:`~fedcomp.gossip.protocol.largest_message`.
    patience : int
        A node that does not answer this many times in a row is gone, and so is one whose iterations fail this many
        times in a row (of a synchronous run: once, since nobody can finish the iteration without it). When more than
        half of the nodes have failed, the run has diverged.
    skew_rounds : int or "auto"
        Closing iterations without gradients, in which models travel whole (push-sum only). ``"auto"``: as many as the
        graph needs to average.
    rejoin : bool
        A node that has lost its memory joins again in the next round.
    members : collection of int, optional
        Who takes part from the beginning; default: every vertex.
    watch : Observer or bool
        Gets the nodes' figures of every iteration and ends the run by raising Diverged; True: a
        :class:`~fedcomp.gossip.tuning.DivergenceWatch`, False: nobody.
    by_reference : bool
        Messages go from node to node, and the relay has references to them: :mod:`fedcomp.gossip.reference`.

    Raises
    ------
    ConfigError
        For a number out of range.
    """

    iterations: Annotated[int, Int()]
    session: Annotated[str, Text()]
    seed: int
    largest: Annotated[int, Int(1)]
    patience: Annotated[int, Int(1)] = 5
    skew_rounds: Annotated[int | Literal["auto"], Maybe(Int(), "auto")] = 0
    rejoin: Switch = True
    members: Collection[int] | None = None
    watch: Observer | bool = True
    by_reference: Switch = False


@dataclass(slots=True)
class Epochs:
    """When a synchronous run restarts everything that neighbours share.

    Attributes
    ----------
    number : int
        Epochs begun after the first.
    torn : bool
        An iteration that was begun cannot be finished.
    unread : str
        Why, when it is because of messages that cannot be read.
    in_vain : int
        How many epochs in a row that was so.
    restarted : bool
        Whether the last instructions began an epoch.
    """

    number: Count = 0
    torn: bool = False
    unread: str = ""
    in_vain: Count = 0
    restarted: bool = False

    def turn(self, *, changed: bool, patience: int) -> bool:
        """Return whether a new epoch begins: an iteration is torn, or the set of nodes has ``changed``.

        Raises
        ------
        Diverged, MessageError
            When messages could not be read in more than ``patience`` epochs in a row.
        """
        if self.unread:
            self.in_vain += 1
        elif not self.restarted:
            self.in_vain = 0  # messages were read
        # Damage on the way is mended by the next epoch; what can never be read would restart the run for ever.
        if self.in_vain > patience:
            # Numbers too large again and again are those of a step size that is too large.
            kind = Diverged if TOO_FAR in self.unread else MessageError
            raise kind(f"messages could not be read in {self.in_vain} epochs in a row; last: {self.unread}")
        self.restarted = self.torn or changed
        self.number += self.restarted
        return self.restarted


class RelayRun(Stateful):
    """The state of a run, and what both halves of a relay need of it.

    Parameters
    ----------
    algorithm : Algorithm
    topology : Topology
        Checked against the algorithm. Its vertices are the nodes' numbers.
    settings : RelaySettings

    Attributes
    ----------
    iteration : int
        Iterations begun.
    iterations, skew_rounds : int
        With gradients, and closing ones after them.
    nodes : Membership
    outstanding : Outstanding
    epochs : Epochs
    report : RelayReport
    traffic : GossipTraffic

    Raises
    ------
    ConfigError
        For members that are no vertices, or closing iterations of an algorithm that has no use for them.
    TopologyError
        When the graph cannot carry the algorithm.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "nodes": nested("nodes"),
        "outstanding": nested("outstanding"),
        "epochs": Epochs,
        "iteration": Count,
        "figures": dict[int, dict[int, dict[str, float]]],
        "noticed": set[tuple[int, int]],
        "traffic": GossipTraffic,
        "report": RelayReport,
    }

    def __init__(self, algorithm: Algorithm, topology: Topology, settings: RelaySettings) -> None:
        topology.check(algorithm)
        skew_rounds, members = settings.skew_rounds, settings.members
        if skew_rounds == "auto":
            skew_rounds = topology.averaging_rounds()
        if skew_rounds < 0 or (skew_rounds and not algorithm.asynchronous):
            raise ConfigError(
                f"skew_rounds={skew_rounds} is not valid with {algorithm.name}: closing iterations, at least 0, are "
                "for push-sum algorithms, whose estimates may be left as they are"
            )
        present = set(range(topology.n)) if members is None else set(members)
        if not present or not present <= set(range(topology.n)):
            raise ConfigError(f"members {members} are not valid: vertices of a graph of {topology.n}, at least one")
        self.algorithm, self.topology, self.settings = algorithm, topology, settings
        self.iteration, self.iterations, self.skew_rounds = 0, settings.iterations, skew_rounds
        self.nodes = Membership(present)
        # Without push-sum there is no mass that could come back: a new epoch begins instead.
        self.outstanding = Outstanding(topology.n, returns=algorithm.asynchronous)
        self.epochs = Epochs()
        self.report = RelayReport()
        self.traffic = GossipTraffic()
        # By iteration and node: what has come in and the watcher has not seen.
        self.figures: dict[int, dict[int, dict[str, float]]] = {}
        # Pairs (receiver, sender) of which an oddity was reported: a line for each message would bury the others.
        self.noticed: set[tuple[int, int]] = set()

    @property
    def settled(self) -> bool:
        """Whether nothing is open: every node has answered its last instruction."""
        return not self.outstanding.open

    @property
    def finishing(self) -> bool:
        """Whether all iterations have been begun; what follows only delivers."""
        return self.iteration >= self.iterations + self.skew_rounds

    @property
    def done(self) -> bool:
        """Whether every node holds its final model and nothing is under way."""
        if not self.finishing or not self.settled or self.nodes.departing:
            return False
        return all(self.has_finished(node) for node in self.nodes.members)

    def has_finished(self, node: int) -> bool:
        """Whether ``node`` has its final model and nothing waits for it."""
        nodes = self.nodes
        return node in nodes.finished and node not in nodes.starts and not self.outstanding.mailbox.waits(node)

    def view(self, node: int, alive: frozenset[int] | None) -> View:
        """Return what ``node`` must know of the iteration that begins; ``alive`` None: everybody is."""
        algorithm, dense = self.algorithm, self.iteration >= self.iterations
        view = self.topology.view(
            node,
            self.iteration,
            seed=self.settings.seed,
            alive=alive,
            directed_algorithm=algorithm.directed,
            dense=dense,
        )
        if algorithm.asynchronous:
            broken = self.outstanding.mailbox.broken(node)
            return replace(view, resync=frozenset(broken & view.column.keys())) if broken else view
        # Of a new epoch's neighbours nothing is known.
        new = self.nodes.starts.get(node) in ("reset", "empty")
        return replace(view, resync=frozenset(view.column)) if new else view

    def end(self, node: int, pending: Iterable[Pending] = ()) -> None:
        """End the part ``node`` takes in the run; ``pending`` was handed out to it and goes back."""
        self.nodes.remove(node)
        self.undelivered(self.outstanding.mailbox.end(node, pending))
        groups = self.topology.components(self.iteration, frozenset(self.nodes.members))
        if len(groups) > 1:
            self.report.split.append((self.report.rounds, [sorted(group) for group in groups]))

    def size(self, payload: bytes) -> int:
        """Return the bytes of the message that ``payload`` is, or refers to."""
        return Reference.split(payload)[0].length if self.settings.by_reference else len(payload)

    def undelivered(self, messages: Iterable[GossipMessage]) -> None:
        """Count messages that no node took in."""
        for message in messages:
            self.report.undelivered += 1
            self.traffic.undelivered.add(self.size(message.payload))

    def note(self, events: list[tuple[int, int, str]], node: int, reason: str) -> None:
        """Add to one of the report's lists of events, and log it."""
        # Cut, since the words may be a peer's and go into the log and the stored state.
        reason = reason[:REASON_CHARACTERS]
        events.append((self.report.rounds, node, reason))
        usual = events is self.report.joined or events is self.report.left
        level = logging.INFO if usual else logging.WARNING
        log.log(level, "gossip round %d, node %d: %s", self.report.rounds, node, reason)

    def identity(self) -> dict[str, Any]:
        """Return which run this is, and how long."""
        # The lengths as they are now: a relay for the state of a prolonged run is made with its new length.
        return {"session": self.settings.session, "iterations": self.iterations, "skew_rounds": self.skew_rounds}
