"""The server's part in links between clients: addresses, simulated links, and traffic counts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.coding.parcels import HEADER_BYTES, MAX_STORE_BYTES, Parcel
from fedcomp.coding.spool import SpoolRoot
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead, AskHead, digest_of
from fedcomp.flower.coded import NO_HANDLER, open_content
from fedcomp.flower.links import LINK, SIMULATED, Book, PeerEntry, Reference
from fedcomp.flower.payload import BLOB, EXACT, FRAME
from fedcomp.flower.report import Report
from fedcomp.mailbox import Mailbox
from fedcomp.plain import from_plain
from fedcomp.program import HELLO, Answer
from fedcomp.rules import Flag, Int, checked
from fedcomp.stateful import StatePart
from fedcomp.strategies.replies import Rejected, SentMessage, match_replies
from fedcomp.strategies.roster import Peer, Roster
from fedcomp.strategies.running import Pushes, Running, Trained
from fedcomp.wire import Frame


class Links:
    """Clients bring each other what they post, and the server sees none of it.

    Where it does not trace them (:attr:`fedcomp.program.System.TRACED`), posts are of their round: what a node has not
    taken when the next one begins is dropped.

    Parameters
    ----------
    spool : path, "" or None
        Folder of simulated links, below which each node of this machine has one of its own; None makes one that is
        removed with this object, and "" asks for none: nodes then need addresses
        (``python -m fedcomp.clients.edge --peer HOST:PORT``).
    seal : bool
        Seal posts for their receivers. What no link takes then follows through the server; what is not sealed is lost.
    max_store_bytes : int
        What each node keeps for others at most.
    """

    def __init__(
        self,
        spool: str | os.PathLike[str] | None = None,
        *,
        seal: bool = True,
        max_store_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        self.seal = checked("seal", seal, Flag())
        self.max_store_bytes = checked("max_store_bytes", max_store_bytes, Int(least=1))
        self._spools: SpoolRoot | None = None
        if spool != "":
            if spool is None:
                # Held as an attribute: the folder is removed when this object is.
                self._folder = tempfile.TemporaryDirectory(prefix="fedcomp-peers-")
                spool = self._folder.name
            self._spools = SpoolRoot.create(Path(spool), self.max_store_bytes)

    @property
    def root(self) -> str:
        """The folder of simulated links; empty where there are none."""
        return "" if self._spools is None else str(self._spools.root)

    def book(self, peers: Mapping[int, Peer]) -> bytes:
        """Return what nodes need to reach each other."""
        entries = {node: PeerEntry(self._address(node, peer), peer.key, peer.signature) for node, peer in peers.items()}
        return Book(self.root, self.seal, self.max_store_bytes, entries).to_bytes()

    def _address(self, node: int, peer: Peer) -> str:
        simulated = peer.address.startswith(SIMULATED)
        return peer.address if not simulated or self._spools is None else self._spools.address(node)

    def save(self, run: bytes, mailbox: Mailbox) -> list[bytes]:
        """Return what references in a mailbox stand for, as far as links are simulated."""
        if self._spools is None:
            return []
        wanted: dict[int, set[int]] = {}
        for node, number in _references(mailbox):
            wanted.setdefault(node, set()).add(number)
        return [
            parcel.to_bytes()
            for node, numbers in wanted.items()
            for number in numbers
            for parcel in self._spools.spool(node).list(run, number)
            if parcel.kind == LINK
        ]

    def load(self, parcels: list[bytes]) -> None:
        """Put into simulated links what :meth:`save` returned.

        Raises
        ------
        ConfigError
            Where there are none.
        """
        if parcels and self._spools is None:
            raise ConfigError("the saved run has posts in simulated links, and this one has no spool for them")
        for data in parcels:
            parcel = Parcel.from_bytes(data)
            assert self._spools is not None
            self._spools.spool(parcel.destination).put(parcel)


def _references(mailbox: Mailbox) -> list[tuple[int, int]]:
    """Return receiver and round of the posts in a mailbox that links have brought."""
    posts = [post for posts in mailbox.waiting.values() for post in posts]
    posts += [post for stamped in mailbox.asked.values() for post in stamped.ask.mail]
    return [(post.to, found.number) for post in posts if (found := Reference.find(bytes(post.data))) is not None]


def _save(server: Any) -> dict[str, Any]:
    links = [] if server.links is None else server.links.save(server._session, server.mailbox)
    return {"mailbox": server.mailbox.to_plain(), "links": links}


def _load(server: Any, state: Any) -> None:
    found = from_plain(dict[str, Any], state, "posts")
    mailbox = Mailbox.of(found.get("mailbox"), server.system.SAYS)
    (server.links or Links("")).load(from_plain(list[bytes], found.get("links"), "links"))
    server.mailbox = mailbox


POSTS: Final = StatePart(_save, _load)
"""What is on its way from client to client, as a part of a server's state."""


def oldest_round(mailbox: Mailbox, number: int) -> int:
    """Return the first of the rounds of which posts may still be asked for; ``number`` is the round's that begins."""
    return min([number, *(posted for _, posted in _references(mailbox))])


def record_peer(grid: Grid | None, server_round: int, node: int, message_type: str, handed: int, parcels: int) -> None:
    """Let a grid that keeps a ledger count what a node handed to links, by its own word."""
    record = getattr(grid, "record_peer", None)
    if callable(record) and handed:
        record(server_round, node, message_type, max(0, handed - HEADER_BYTES * parcels), handed)


GREET_AGAIN: Final = 16
"""Rounds after which a node whose app has no public key is asked for it again."""


def greet(
    roster: Roster, links: Links | None, messages: Sequence[Message], head: AskHead, report: Report
) -> Pushes[None]:
    """Learn the public keys of those that are to be asked, where they are reached, and which partitions they hold."""
    sent = []
    for base in messages:
        address = base.metadata.dst_node_id
        peer = roster.peer(address)
        if peer.key or peer.greet > head.number:
            continue
        content, data = RecordDict(), dict[str, bytes]()
        if links is not None:
            book = links.book({})
            data = {BLOB + digest_of(book): book}
            head = replace(head, blobs=asks.named({Book.NAME: digest_of(book)}))
        asks.put(content, head, data=data)
        greeting = Message(content, address, HELLO, group_id=base.metadata.group_id or None)
        sent.append(SentMessage(greeting, address, head.sequence))
    replies = (yield [each.message for each in sent]) if sent else []
    for each, reply in match_replies(sent, replies, Report(head.number), roster):
        peer = roster.peer(each.node)
        try:
            said = None if reply.has_error() else asks.find_answer(reply.content)
        except FedcompError:
            said = None
        if reply.has_error() and NO_HANDLER not in (reply.error.reason or ""):
            # Lost on its way, or it broke: it is asked again in the next round.
            continue
        if said is None or len(said.key) != 32:
            # Its app has no half of this project.
            peer.greet = head.number + GREET_AGAIN
            continue
        peer.key, peer.address, peer.signature = said.key, said.address, said.signature
        roster.declared.setdefault(each.node, said.partition_id)
    report.missed.update(each.node for each in sent if each.node in roster.silent)


Reads = Callable[[Running, AnswerHead, Message, Frame | None], Trained]
"""What reads that an app replied beside the model, of the head, the reply and its exact buffers."""


def unpacked(x: Running, read: Reads, node: int, data: bytes) -> Answer:
    """Return the answer of a node whose whole reply came another way.

    Raises
    ------
    FedcompError
        When it is none, or of another node or round.
    """
    content = open_content(data)
    head = asks.find_answer(content)
    if head is None or not head.record:
        raise Rejected("the copy that arrived by another route is not a reply of an app that trained")
    if head.partition_id != node:
        raise Rejected(f"the copy that arrived by another route is the reply of partition {head.partition_id}")
    frames, exact = asks.data_in(content, FRAME), asks.data_in(content, EXACT).get("")
    trained = read(x, head, Message(content, reply_to=x.base[node]), exact)
    x.credit(node, head.sequence, head.generation)
    x.trained[node], x.exact_bytes[node], x.payload[node] = trained, len(exact or b""), len(data)
    return Answer(node, trained.weight, frames=frames)
