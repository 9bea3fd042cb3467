"""A node's end of its links to other nodes: messages to send and messages received.

What a link acknowledged is on its receiver's disk. The server hears of it as a reference where the system is traced
(:attr:`fedcomp.program.System.TRACED`), and hands that on in the place of the post; else it hears nothing, and the
receiver takes what others left for it in this round. What no link took follows through the server, sealed for its
receiver; what is not sealed never does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flwr.app import ConfigRecord, Context, RecordDict

from fedcomp.asks import Post
from fedcomp.clients.peers import identity_in, link_tls, own_end, sender_of
from fedcomp.coding.errors import CodingError, SealError
from fedcomp.coding.parcels import MAX_STORE_BYTES, Parcel
from fedcomp.coding.sealing import seal
from fedcomp.coding.sealkeys import NO_RUN, require_signed, sign
from fedcomp.coding.transport import PeerTransport, deliver
from fedcomp.errors import ConfigError
from fedcomp.flower.links import LINK, SIMULATED, Book, Box, Letter, Reference
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame, take_frame

SENT: Final = "fedcomp.links.sent/"
"""Posts of this node's own that may come back, by reference."""

TAKEN: Final = "fedcomp.links.taken"
"""What was taken of a round's posts that the server does not know of."""

RESTING: Final = "fedcomp.links.resting"
REST_ROUNDS: Final = 8
"""Rounds for which a link that failed is not tried again: a node behind a firewall costs its timeout once."""

_REASON: Final = 200


def introduced(context: Context, book: Book, node: int, public: bytes) -> dict[str, Any]:
    """Return where others reach this node, and its signature of its public key; empty for none of it."""
    transport = own_end(context, node, book.spool, min(book.max_store, MAX_STORE_BYTES))
    address, tls = "" if transport is None else transport.address, link_tls(context)
    # The server knows where simulated links lead.
    address = SIMULATED if address.startswith(SIMULATED) else address
    return {"address": address, "signature": b"" if tls is None else sign(tls, NO_RUN, public)}


@dataclass
class Links:
    """The links of one ask.

    Parameters
    ----------
    context : Context
    node : int
        This node's partition.
    book : Book
        Who is reached where.
    number, sequence : int
        Of the round, and of the exchange.
    traced : bool
        Whether the server knows of each post.
    oldest : int
        Of the rounds of which posts may come back.

    Attributes
    ----------
    handed, parcels : int
        Bytes that links were given, and of how many posts.
    failed : dict of int to str
        Why the link to a node failed.
    """

    context: Context
    node: int
    book: Book
    run: bytes
    number: int
    sequence: int
    traced: bool
    oldest: int
    handed: int = 0
    parcels: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    _kept: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit = min(self.book.max_store, MAX_STORE_BYTES)
        self._transport: PeerTransport | None = own_end(self.context, self.node, self.book.spool, limit)
        self._tls = link_tls(self.context)
        held = self.context.state.config_records.get(RESTING)
        taken = self.context.state.config_records.get(TAKEN)
        again = taken is not None and taken["round"] == self.number
        # What a node took with an answer that it has written: it is not given it again.
        self._taken: set[str] = set(str(taken["parcels"]).split()) if taken is not None and again else set()
        # By node: until which round, and at which address the link failed.
        self._resting: dict[str, list[Any]] = {} if held is None else dict(json.loads(str(held["resting"])))

    def opened(self, mail: Iterable[Post]) -> tuple[Post, ...]:
        """Return mail with posts in the place of references and boxes, as far as they can be read. Where posts are not
        traced, with what others left here before this exchange."""
        # By round: reading the store takes as long as all that others left in it is large.
        listed: dict[int, list[Parcel]] = {}
        found = [self._read(post, listed) for post in mail]
        if not self.traced:
            for parcel in self._parcels(self.number):
                name = hashlib.blake2b(parcel.to_bytes(), digest_size=8).hexdigest()
                letter = None if name in self._taken else self._letter(parcel)
                if letter is not None and letter.sequence < self.sequence:
                    found.append(Post(parcel.source, self.node, letter.name, letter.data))
                    self._taken.add(name)
        return tuple(sorted(found, key=lambda post: post.source))

    def sent(self, posts: Iterable[Post]) -> tuple[Post, ...]:
        """Send posts; return what the server has to know: references, where they are traced, and boxes of what no link
        took. A reference that goes back to whom it came from is all there is of that post."""
        given = list(posts)
        left = [post for post in given if Reference.find(bytes(post.data)) is not None]
        letters = [(post, Letter(self.sequence, post.name, bytes(post.data))) for post in given if post not in left]
        parcels: list[tuple[str, Parcel]] = []
        by_post: list[tuple[Post, Letter, Parcel | None]] = []
        for post, letter in letters:
            peer, parcel = self.book.peers.get(post.to), None
            try:
                parcel = self._parcel(post.to, letter)
            except SealError as error:
                self.failed[post.to] = str(error)[:_REASON]
            if peer is None or not peer.address:
                self.failed.setdefault(post.to, "it has no listener")
            elif (rest := self._resting.get(str(post.to))) and rest[0] > self.number and rest[1] == peer.address:
                self.failed.setdefault(post.to, f"its link failed, and is not retried before round {rest[0]}")
            if parcel is not None and post.to not in self.failed and peer is not None:
                parcels.append((peer.address, parcel))
            by_post.append((post, letter, parcel))
        took: set[int] = set()
        known = {to: to for to in self.book.peers}
        for delivery in deliver(sender_of(self.context, self._transport), parcels, partitions=known):
            self.handed, self.parcels = self.handed + delivery.handed_over, self.parcels + 1
            to = delivery.parcel.destination
            if delivery.error is None:
                took.add(id(delivery.parcel))
                continue
            self.failed[to] = str(delivery.error)[:_REASON]
            self._resting[str(to)] = [self.number + REST_ROUNDS, delivery.address]
        for post, letter, parcel in by_post:
            taken = parcel is not None and id(parcel) in took
            if parcel is not None and not taken and self.book.seal:
                left.append(post._replace(data=Box(self.number, parcel.body).to_bytes()))
            elif self.traced:
                # Also of what could not be sent: its receiver sends the reference back.
                reference = Reference.of(self.number, letter)
                left.append(post._replace(data=reference.to_bytes()))
                self._kept[reference.name] = letter.to_bytes()
        return tuple(left)

    def write(self, store: RecordDict) -> None:
        """Write into a node's new state what was sent and may come back, what was taken, and which links rest."""
        store.pop(TAKEN, None)
        if self._taken:
            store[TAKEN] = ConfigRecord({"round": self.number, "parcels": " ".join(sorted(self._taken))})
        for key in [key for key in store if key.startswith(SENT)]:
            if int(key.removeprefix(SENT).partition("/")[0]) < self.oldest:
                del store[key]
        for name, data in self._kept.items():
            put_frame(store, SENT + name, data)
        resting = {to: rest for to, rest in self._resting.items() if rest[0] > self.number}
        store.pop(RESTING, None)
        if resting:
            store[RESTING] = ConfigRecord({"resting": json.dumps(resting)})

    def forget(self) -> None:
        """Remove what is of rounds gone by."""
        if self._transport is None:
            return
        try:
            self._transport.store.drop_before(self.run, self.oldest if self.traced else self.number)
        except CodingError as error:
            # Until it is full, and then the server carries what it refuses.
            log.warning("node %d cannot clear its store: %s", self.node, error)

    def _coordinates(self, number: int, source: int, to: int) -> Parcel:
        return Parcel(self.run, number, LINK, source, to, b"")

    def _parcel(self, to: int, letter: Letter) -> Parcel:
        """Return a post as it leaves.

        Raises
        ------
        SealError
            When it would have to be sealed for a node that is not known, or does not prove that its key is its own.
        """
        empty = self._coordinates(self.number, self.node, to)
        if not self.book.seal:
            return replace(empty, body=letter.to_bytes())
        peer = self.book.peers.get(to)
        if peer is None:
            raise SealError("no key")
        if self._tls is not None:
            require_signed(self._tls.keys, to, NO_RUN, peer.key, peer.signature)
        return replace(empty, body=seal(letter.to_bytes(), peer.key, empty.coordinates))

    def _read(self, post: Post, listed: dict[int, list[Parcel]]) -> Post:
        """Return a post of the server's mailbox; where it is a reference or a box, what is meant. ``listed`` holds what
        was read of the store, by round."""
        data = bytes(post.data)
        if (box := Box.find(data)) is not None:
            letter = self._letter(replace(self._coordinates(box.number, post.source, self.node), body=box.body))
            return post if letter is None else post._replace(data=letter.data)
        if (reference := Reference.find(data)) is None:
            return post
        # One of its own, which came back.
        own = take_frame(self.context.state, SENT + reference.name)
        if own is not None:
            return post._replace(data=Letter.of(own).data)
        if reference.number not in listed:
            listed[reference.number] = self._parcels(reference.number)
        for parcel in listed[reference.number]:
            letter = self._letter(parcel) if parcel.source == post.source else None
            if letter is not None and Reference.of(reference.number, letter) == reference:
                return post._replace(data=letter.data)
        log.warning("node %d: a message of node %d is not in its store", self.node, post.source)
        return post

    def _parcels(self, number: int) -> list[Parcel]:
        if self._transport is None:
            return []
        found = self._transport.store.list(self.run, number)
        return [parcel for parcel in found if parcel.kind == LINK and parcel.destination == self.node]

    def _letter(self, parcel: Parcel) -> Letter | None:
        """Return what a parcel holds; None where it is not sealed for this node, or no post."""
        try:
            seals = self.book.seal
            body = identity_in(self.context).open(parcel.body, parcel.coordinates) if seals else parcel.body
            return Letter.of(body)
        except (CodingError, ConfigError, ValueError) as error:
            log.warning("node %d cannot read what node %d sent: %s", self.node, parcel.source, error)
            return None
