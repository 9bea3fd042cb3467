"""Which node is which vertex of the graph: nodes come and go, and say themselves which vertex they are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import FedcompError
from fedcomp.flower import gossip
from fedcomp.flower.logs import log
from fedcomp.flower.metered import addressed
from fedcomp.flower.payload import take_node
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.gossip.relay import Relay
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.gossip.links import PeerLinks
from fedcomp.strategies.gossip.report import Iterations
from fedcomp.strategies.gossip.settings import GossipSettings
from fedcomp.strategies.partitions import Holders

_POLL_SECONDS: Final = 0.2


class Seats(Stateful):
    """The vertices of a run and the nodes that hold them.

    Parameters
    ----------
    settings : GossipSettings
    links : PeerLinks, optional
        Where nodes are reached by others; None when they are not.

    Attributes
    ----------
    node_of : dict of int to int
        The node of every vertex that has one online.
    holders : Holders
        What the nodes say, and who holds a vertex that several declare.
    dismissed : set of int
        Vertices that were let go and are not let in again.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "node_of": dict[int, int],
        "holders": nested("holders"),
        "dismissed": set[int],
        "_met": set[int],
    }

    def __init__(self, settings: GossipSettings, links: PeerLinks | None = None) -> None:
        self._settings = settings
        self._links = links
        self.node_of: dict[int, int] = {}
        self.holders = Holders()
        self.dismissed: set[int] = set()
        # Those online that have answered a hello.
        self._met: set[int] = set()

    def meet(
        self, grid: Grid, config: ConfigRecord, report: Iterations, relay: Relay | None, expected: Collection[int]
    ) -> Exchanges[None]:
        """Ask the nodes that are new which vertex they are, and wait a while for ``expected`` vertices without a node.

        Where another node declares the vertex of one that has left its last message unanswered, that one is asked, too.

        Parameters
        ----------
        relay : Relay, optional
            The run's; None before it has begun. A vertex that had left it and is held again joins it.
        """
        deadline = time.monotonic() + self._settings.wait
        while True:
            self.holders.meet(grid)
            online = list(grid.get_node_ids())
            self._met.intersection_update(online)
            heard = yield from self._introduce([n for n in online if n not in self._met], config, report, relay)
            heard |= yield from self._introduce(self.holders.doubted(self._met), config, report, relay)
            self._seat(online, heard, report, relay)
            if not set(expected) - self.node_of.keys() or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)

    def hello(self, node: int, config: ConfigRecord) -> Message:
        """Return the message that asks a node which vertex it is; any answer to it is a sign of life."""
        content = RecordDict({self._settings.configrecord_key: config})
        if self._links is not None:
            self._links.ask(content)
        return Message(content, node, gossip.HELLO_TYPE)

    def note_outside(self, vertices: int, report: Iterations) -> None:
        """Report the nodes that introduced themselves, before the number of vertices was known, as one beyond it."""
        for node, vertex in self.holders.claims.items():
            if node in self._met and vertex >= vertices:
                report.note("unknown", _outside(vertex, vertices))

    def away(self, relay: Relay) -> list[int]:
        """Return the vertices that were given up and of which a node is online: perhaps it can be reached again. Not
        those whose iterations failed: they would fail again, and every return costs all others an epoch."""
        known = {vertex for vertex in self.node_of if vertex < relay.topology.n}
        return sorted(known - set(relay.members) - self.dismissed - relay.nodes.excluded.keys())

    def _introduce(
        self, nodes: Sequence[int], config: ConfigRecord, report: Iterations, relay: Relay | None
    ) -> Exchanges[set[int]]:
        """Ask ``nodes`` which vertex they are; return those that answered."""
        if not nodes:
            return set()
        messages = [self.hello(node, config) for node in nodes]
        replies = yield Push(messages, self._settings.timeout)
        asked, answers = dict(addressed(messages)), dict[int, int | None]()
        for reply in replies:
            node = asked[reply.metadata.reply_to_message_id]
            # It stays unknown, so that it is asked again in the next round.
            if reply.has_error():
                report.note("unknown", f"a node could not say which vertex it is: {reply.error.reason}")
                continue
            try:
                if self._links is not None:
                    self._links.meet(node, reply)
            except FedcompError as error:
                report.note("unknown", f"a node cannot be reached by others: {error}")
                continue
            answers[node] = take_node(reply)
            self._met.add(node)
        self.holders.settle(nodes, answers)
        for node in answers:
            # The grid's own knowledge goes before what a node claims.
            vertex = self.holders.claims.get(node)
            if vertex is None:
                report.note("unknown", "a node does not say which vertex it is")
            elif relay is not None and vertex >= relay.topology.n:
                report.note("unknown", _outside(vertex, relay.topology.n))
        return set(answers)

    def _seat(self, online: Collection[int], heard: Collection[int], report: Iterations, relay: Relay | None) -> None:
        """Settle which node is which vertex; report who is refused of those just ``heard`` and those that had one.

        A node that does not answer keeps its vertex until another one declares it, and has it back when it answers.
        """
        refused = self.holders.settle((), dict.fromkeys(self._met - self.holders.silent))
        named = {*heard, *self.node_of.values()}
        self.node_of = {vertex: node for vertex, node in self.node_of.items() if node in online}
        for vertex, node in self.holders.held.items():
            if node in self._met and self.node_of.get(vertex) != node:
                self.node_of[vertex] = node
                # It was given up, and its state went with the old node id: it joins with a new one.
                if relay is not None and vertex in self.away(relay):
                    relay.join(vertex)
        reasons = [reason for node, reason in refused.items() if node in named]
        for reason in reasons:
            report.note("unknown", reason)
        for reason in sorted(set(reasons)):
            log.warning("round %d: %s", report.round, reason)


def _outside(vertex: int, nodes: int) -> str:
    return f"a node says it is vertex {vertex} of a graph of {nodes}"
