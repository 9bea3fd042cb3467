"""The server's part in links between nodes: where each is reached, what it is told, and what the links took.

The server sees none of the messages. It knows who is there, hands round addresses and public keys, and has of every
message a reference (:mod:`fedcomp.gossip.reference`). An edge whose link failed goes through the server for some
rounds (:class:`fedcomp.strategies.coded.links.RestingLinks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.coding.errors import CodingError
from fedcomp.coding.sealing import seal
from fedcomp.coding.transport import Parcel
from fedcomp.errors import StateError
from fedcomp.flower.coded import NO_ADDRESS
from fedcomp.flower.gossip import SIMULATED, LinkHello, LinkReport, LinkTerms
from fedcomp.gossip.protocol import Instruction
from fedcomp.gossip.relay import Relay
from fedcomp.plain import from_plain, to_plain
from fedcomp.strategies.coded.links import RestingLinks, SimulatedLinks, record_peer
from fedcomp.strategies.gossip.report import Iterations
from fedcomp.strategies.gossip.settings import GossipSettings


class PeerLinks:
    """The links of one run.

    Parameters
    ----------
    settings : GossipSettings
    """

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        # An empty text asks for no simulated links at all.
        self._simulated = SimulatedLinks(
            "hub" if settings.spool == "" else "peers", settings.spool or None, settings.max_store_bytes
        )
        self._known: dict[int, LinkHello] = {}
        self._node_of: dict[int, int] = {}
        self._resting = RestingLinks()

    def ask(self, content: RecordDict) -> None:
        """Let a hello ask a node for its address and its key."""
        # Before a run has begun it has no name, and an introduction needs none.
        self._terms(bytes(8)).put(content)

    def meet(self, node: int, reply: Message) -> None:
        """Take note of where a node is reached.

        Raises
        ------
        StateError
            When its key is no key: nobody could seal a message for it.
        SchemaError
            When it does not say so in the form expected.
        """
        hello = LinkHello.take(reply)
        try:
            seal(b"", hello.public, b"")
        except CodingError as error:
            raise StateError(f"its public key is of no use: {error}") from error
        self._known[node] = hello

    def put(
        self, content: RecordDict, instruction: Instruction, node_of: Mapping[int, int], oldest: int, server_round: int
    ) -> None:
        """Tell a node where its messages go."""
        # Also of a vertex whose node is offline: its messages wait at the server, sealed for who it was.
        self._node_of |= node_of
        column = [to for to in instruction.view.column if to in self._node_of]
        source = instruction.node
        signatures = tuple(self._hello(to).signature for to in column)
        self._terms(
            bytes.fromhex(instruction.session),
            known=self._known[node_of[source]].public,
            oldest=oldest,
            to=tuple(column),
            addresses=tuple("" if self._why((source, to), server_round) else self._address(to) for to in column),
            keys=b"".join(self._hello(to).public for to in column),
            signatures=signatures if any(signatures) else (),
        ).put(content)

    def take(self, reply: Message, node: int, instruction: Instruction, report: Iterations, grid: Grid) -> None:
        """Take what a node says of itself, and of what it handed to its links.

        Raises
        ------
        StateError, SchemaError
            When it says nothing that can be used.
        """
        if LinkHello.KEY in reply.content:
            self.meet(node, reply)
        said = LinkReport.find(reply) or LinkReport()
        if not set(said.to) <= instruction.view.column.keys() or len(set(said.to)) != len(said.to):
            raise StateError(f"it reports links to {said.to[:20]}, not to its neighbours {[*instruction.view.column]}")
        record_peer(grid, report.round, node, reply.metadata.message_type, said.sent)
        for to, sent, failed in zip(said.to, said.sent, said.failed, strict=True):
            edge = f"{instruction.node}>{to}"
            if sent:
                report.link_bytes[edge] = report.link_bytes.get(edge, 0) + sent
            if not failed:
                continue
            why = self._why((instruction.node, to), report.round)
            if not why:
                self._resting.fail((instruction.node, to), self._ends(instruction.node, to), report.round, failed)
            # A message may have taken neither: nothing is sealed for a node that does not prove its key.
            reasons = [reason for reason in (why, failed) if reason and (reason != NO_ADDRESS or not why)]
            report.note("mailbox", f"edge {edge}: {'; '.join(reasons)}")

    def save(self, relay: Relay) -> dict[str, Any]:
        """Return who is known, and the parcels under way, as plain data.

        Raises
        ------
        StateError
            When parcels are in the stores of other machines.
        """
        for hello in self._known.values():
            if hello.address not in ("", SIMULATED):
                raise StateError(
                    f"a run with nodes at addresses such as {hello.address} cannot be stored: messages under way are "
                    "in their own stores; run with transport='hub' to resume"
                )
        run, rounds = bytes.fromhex(relay.settings.session), range(relay.oldest(), relay.iteration)
        stores = [self._simulated.spool(vertex) for vertex in self._node_of] if self._simulated.root else []
        parcels = [parcel.to_bytes() for store in stores for number in rounds for parcel in store.list(run, number)]
        known = {str(node): [hello.public, hello.address, hello.signature] for node, hello in self._known.items()}
        return {"known": known, "node_of": to_plain(self._node_of), "parcels": parcels}

    def load(self, stored: Any) -> None:
        """Go on from :meth:`save`, with the parcels in this run's own folders."""
        found = from_plain(dict[str, Any], stored, "links")
        known = from_plain(dict[int, tuple[bytes, str, bytes]], found["known"], "known")
        self._known = {node: LinkHello(public=p, address=a, signature=s) for node, (p, a, s) in known.items()}
        self._node_of = from_plain(dict[int, int], found["node_of"], "node_of")
        for data in from_plain(list[bytes], found["parcels"], "parcels"):
            parcel = Parcel.from_bytes(data)
            self._simulated.spool(parcel.destination).put(parcel)

    def _hello(self, vertex: int) -> LinkHello:
        return self._known[self._node_of[vertex]]

    def _ends(self, source: int, to: int) -> tuple[LinkHello, LinkHello]:
        return self._hello(source), self._hello(to)

    def _address(self, vertex: int) -> str:
        address = self._hello(vertex).address
        return self._simulated.address("", vertex) if address == SIMULATED else address

    def _why(self, edge: tuple[int, int], server_round: int) -> str:
        """Return why an edge goes through the server without its link being tried; empty when it is tried."""
        source, to = edge
        if to not in self._node_of:
            return f"vertex {to} has not introduced itself, and nothing can be sealed for it"
        if not self._hello(to).address:
            return f"vertex {to} has no listener"
        return self._resting.why(edge, self._ends(source, to), server_round)

    def _terms(self, run: bytes, **more: object) -> LinkTerms:
        s = self._settings
        terms = {"seal": s.seal, "max_store": s.max_store_bytes, "spool": self._simulated.root}
        return LinkTerms(run=run, **terms, **more)  # type: ignore[arg-type]
