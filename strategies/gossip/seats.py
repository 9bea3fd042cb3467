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
from fedcomp.flower.metered import addressed, partition_lookup
from fedcomp.flower.payload import take_node
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.gossip.relay import Relay
from fedcomp.stateful import Stateful
from fedcomp.strategies.gossip.links import PeerLinks
from fedcomp.strategies.gossip.report import Iterations
from fedcomp.strategies.gossip.settings import GossipSettings
from fedcomp.strategies.partitions import contest

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
    silent : set of int
        Nodes that left their last message unanswered.
    dismissed : set of int
        Vertices that were let go and are not let in again.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "node_of": dict[int, int],
        "silent": set[int],
        "dismissed": set[int],
        "_vertex_of": dict[int, int | None],
    }

    def __init__(self, settings: GossipSettings, links: PeerLinks | None = None) -> None:
        self._settings = settings
        self._links = links
        self.node_of: dict[int, int] = {}
        self.silent: set[int] = set()
        self.dismissed: set[int] = set()
        # What each node said it is; None: it does not know.
        self._vertex_of: dict[int, int | None] = {}

    def meet(
        self, grid: Grid, config: ConfigRecord, report: Iterations, relay: Relay | None, expected: Collection[int]
    ) -> Exchanges[None]:
        """Ask the nodes that are new which vertex they are, and wait a while for ``expected`` vertices without a node.

        Parameters
        ----------
        relay : Relay, optional
            The run's; None before it has begun. A vertex that had left it and is held again joins it.
        """
        deadline = time.monotonic() + self._settings.wait
        while True:
            online = list(grid.get_node_ids())
            new_nodes = [node for node in online if node not in self._vertex_of]
            if new_nodes:
                yield from self._introduce(new_nodes, grid, config, report, relay)
            self._seat(online, new_nodes, report, relay)
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
        for vertex in self._vertex_of.values():
            if vertex is not None and vertex >= vertices:
                report.note("unknown", _outside(vertex, vertices))

    def away(self, relay: Relay) -> list[int]:
        """Return the vertices that were given up and of which a node is online: perhaps it can be reached again. Not
        those whose iterations failed: they would fail again, and every return costs all others an epoch."""
        known = {vertex for vertex in self.node_of if vertex < relay.topology.n}
        return sorted(known - set(relay.members) - self.dismissed - relay.nodes.excluded.keys())

    def _introduce(
        self,
        new_nodes: Sequence[int],
        grid: Grid,
        config: ConfigRecord,
        report: Iterations,
        relay: Relay | None,
    ) -> Exchanges[None]:
        messages = [self.hello(node, config) for node in new_nodes]
        replies = yield Push(messages, self._settings.timeout)
        asked, known = dict(addressed(messages)), partition_lookup(grid)
        for reply in replies:
            node = asked[reply.metadata.reply_to_message_id]
            vertex = known(node)
            # The grid's own knowledge goes before what a node claims.
            vertex = take_node(reply) if vertex is None else vertex
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
            self._vertex_of[node] = vertex
            if vertex is None:
                report.note("unknown", "a node does not say which vertex it is")
            elif relay is not None and vertex >= relay.topology.n:
                report.note("unknown", _outside(vertex, relay.topology.n))

    def _seat(
        self, online: Collection[int], new_nodes: Collection[int], report: Iterations, relay: Relay | None
    ) -> None:
        """Settle which node is which vertex, and report the ``new_nodes`` that are refused.

        A newcomer takes the place of one that is offline or has left its last message unanswered: a process that was
        killed is listed as online for a while. One that answers is not driven out by a claim, and of several newcomers
        that claim one vertex none is seated.
        """
        self.node_of = {vertex: node for vertex, node in self.node_of.items() if node in online}
        there = [(node, vertex) for node, vertex in self._vertex_of.items() if node in online]
        claims = {node: vertex for node, vertex in there if vertex is not None and node not in self.silent}
        held, refused = contest(claims, self.node_of)
        for vertex, node in held.items():
            if self.node_of.get(vertex) != node:
                self.node_of[vertex] = node
                # It was given up, and its state went with the old node id: it joins with a new one.
                if relay is not None and vertex in self.away(relay):
                    relay.join(vertex)
        for node in new_nodes:
            if node in refused:
                report.note("unknown", refused[node])
        for reason in sorted({refused[node] for node in new_nodes if node in refused}):
            log.warning("round %d: %s", report.round, reason)


def _outside(vertex: int, nodes: int) -> str:
    return f"a node says it is vertex {vertex} of a graph of {nodes}"
