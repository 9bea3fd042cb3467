"""What clients of relayed shards and of coded sums have in common: send shards, keep one's own, open what was kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from flwr.app import Message, RecordDict

from fedcomp.clients.coded.mod import REASON, CodedMessage
from fedcomp.clients.half import CallNext
from fedcomp.coding.errors import CodingError
from fedcomp.coding.relay import packet_hash
from fedcomp.coding.sealing import KEY_BYTES, seal
from fedcomp.coding.sealkeys import require_signed
from fedcomp.coding.transport import Parcel, deliver
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import MOST_REASONS, NO_ADDRESS, SHARD, pack_content, put_bundle
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, has_frame, take_frame
from fedcomp.flower.protocol import EXACT, UPDATE

PAYLOAD: Final = "payload"
SHARED: Final = "shared"


@dataclass(frozen=True)
class Peer:
    """Another client of the round, or this one, as a plan names it.

    Attributes
    ----------
    called : int
        Its name as the destination of parcels.
    key, signature : bytes
        What is sealed for it, and the proof that the key is its own; empty where nothing is sealed or proved.
    address : str
        Empty: nothing but the server reaches it from here.
    partition : int or None
        Whose node it is; None where nodes have no keys by which that could be told.
    """

    called: int
    key: bytes = b""
    address: str = ""
    partition: int | None = None
    signature: bytes = b""

    @classmethod
    def of(cls, asked: Any, called: Sequence[int]) -> list[Peer]:
        """Return the peers that a message describes, by their names."""
        keys = [asked.keys[i : i + KEY_BYTES] for i in range(0, len(asked.keys), KEY_BYTES)]
        count = len(called)
        columns = (
            keys or [b""] * count,
            asked.addresses or [""] * count,
            asked.partitions or [None] * count,
            asked.signatures or [b""] * count,
        )
        return [cls(*each) for each in zip(called, *columns, strict=True)]


@dataclass(frozen=True)
class Terms:
    """Where this node's shards go.

    Attributes
    ----------
    source : int
        This node's index as a contributor.
    relays : list of Peer
        Who keeps shard 0, 1, ... of this node's.
    own : int or None
        Which of these shards it keeps itself, None when it keeps none.
    """

    source: int
    relays: list[Peer]
    own: int | None

    @classmethod
    def of(cls, asked: Any, source: int, destinations: Sequence[int] | None = None) -> Terms:
        """Return the terms of a training message; ``destinations``: what its relays are called, default members."""
        own = asked.relays.index(asked.index) if asked.index in asked.relays else None
        return cls(source, Peer.of(asked, asked.relays if destinations is None else destinations), own)


class Shards:
    """A message of a coded round, and what its answers have in common."""

    def __init__(self, exchange: CodedMessage) -> None:
        self.exchange = exchange

    def news(self, terms: Terms) -> dict[str, Any]:
        """Return what the server has to be told again of this node."""
        own = None if terms.own is None else terms.relays[terms.own]
        return self.exchange.news(own.key, own.signature) if own is not None and own.key else {}

    def trained(self, call_next: CallNext) -> bytes | Message:
        """Return the complete reply of this round as bytes, kept from an earlier delivery of the message or made now.

        An error is returned as the message that it is. Whoever shares keeps the bytes: training twice could give
        others, and shards of two payloads do not fit together.
        """
        exchange = self.exchange
        if exchange.numbers.get(SHARED) == exchange.round and PAYLOAD in exchange.arrays:
            return exchange.arrays[PAYLOAD].tobytes()
        reply = call_next(exchange.plain_message(), exchange.context)
        return reply if reply.has_error() else pack_content(reply.content)

    def remember(self, payload: bytes) -> None:
        """Keep what was shared in this round."""
        self.exchange.numbers[SHARED] = self.exchange.round
        self.exchange.arrays = {PAYLOAD: np.frombuffer(payload, np.uint8)}

    def send(self, terms: Terms, packets: list[bytes], content: RecordDict, kind: int = SHARD) -> dict[str, Any]:
        """Keep the own shard, send the others; return what the header says of it."""
        exchange = self.exchange
        failed: list[str] = []
        others = []
        for i, (to, body) in enumerate(zip(terms.relays, packets, strict=True)):
            parcel = Parcel(exchange.run, exchange.round, kind, terms.source, to.called, body)
            try:
                # Sealed one by one: a relay whose key is wrong costs its own shard, not the round.
                if i != terms.own:
                    others.append((to, self.sealed(parcel, to)))
                else:
                    exchange.store.put(_seal(parcel, exchange.identity.public) if to.key else parcel)
            except CodingError as error:
                # A relay whose key is not valid is a lost relay, for which the others stand.
                whose = "own shard" if i == terms.own else f"relay {to.called}"
                failed.append(f"{whose}: {error}"[:REASON])
        handed, missed = self.post(others, content)
        if exchange.hub:
            return {"failed": failed}
        sent = [handed.get(to.called, 0) for to in terms.relays]
        said: dict[str, Any] = {"sent": sent, "failed": failed, **missed}
        if kind == SHARD:
            # Anybody may put parcels into the relays' stores; by these the server tells them which are this node's.
            said["hashes"] = b"".join(map(packet_hash, packets))
        return said

    def sealed(self, parcel: Parcel, to: Peer) -> Parcel:
        """Return a parcel as it leaves: sealed where its receiver has a key.

        Raises
        ------
        SealError
            When the key is none, or this node has a list of keys and nothing proves that it is that receiver's.
        """
        tls = self.exchange.tls
        if to.key and tls is not None:
            require_signed(tls.keys, to.partition, self.exchange.run, to.key, to.signature)
        return _seal(parcel, to.key) if to.key else parcel

    def post(
        self, outgoing: Sequence[tuple[Peer, Parcel]], content: RecordDict
    ) -> tuple[dict[int, int], dict[str, Any]]:
        """Hand parcels over; return the bytes by receiver, and what the answer says of parcels that no link took.

        These follow in the answer, but only where they are sealed: the server is not to read what was not meant for it.
        """
        if self.exchange.hub:
            put_bundle(content, [parcel.to_bytes() for _, parcel in outgoing])
            return {}, {}
        handed: dict[int, int] = {}
        causes = {to.called: NO_ADDRESS for to, _ in outgoing if not to.address}
        reached = [(to.address, parcel) for to, parcel in outgoing if to.address]
        partitions = {to.called: to.partition for to, _ in outgoing if to.partition is not None}
        for delivery in deliver(self.exchange.sender, reached, partitions=partitions):
            # Of failed deliveries too: their bytes may have crossed the link.
            handed[delivery.parcel.destination] = delivery.handed_over
            if delivery.error is not None:
                causes[delivery.parcel.destination] = str(delivery.error)[:REASON]
        # The very bytes that the link was given: a receiver that has them, and only its acknowledgement was lost, keeps
        # them once.
        if rest := [parcel.to_bytes() for to, parcel in outgoing if to.key and to.called in causes]:
            put_bundle(content, rest)
        return handed, {"missed": list(causes), "causes": list(causes.values())}

    def stored(self, kind: int, destination: int) -> list[Parcel]:
        """Return the parcels of one kind that are kept for ``destination`` in this round."""
        parcels = self.exchange.store.list(self.exchange.run, self.exchange.round)
        return [parcel for parcel in parcels if (parcel.kind, parcel.destination) == (kind, destination)]

    def open(self, parcel: Parcel, sealed: bool) -> bytes:
        """Return what is in a parcel; raise :class:`CodingError` where it is sealed for somebody else."""
        return self.exchange.identity.open(parcel.body, parcel.coordinates) if sealed else parcel.body

    def opened(
        self, asked: Any, kind: int, wanted: Collection[int] | None = None
    ) -> tuple[list[tuple[int, bytes]], list[int], list[str]]:
        """Return what this relay keeps: (source, body) of what it can open; source and size in turn; what it cannot."""
        bodies: list[tuple[int, bytes]] = []
        held: dict[int, int] = {}
        refused: list[str] = []
        for parcel in self.stored(kind, asked.index):
            # Before it is opened: its bytes crossed the link, readable or not.
            held.setdefault(parcel.source, len(parcel))
            if wanted is not None and parcel.source not in wanted:
                continue
            try:
                bodies.append((parcel.source, self.open(parcel, asked.seal)))
            except CodingError as error:
                refused.append(f"source {parcel.source}: {error}"[:REASON])
        return bodies, [number for pair in held.items() for number in pair], refused[:MOST_REASONS]


def _seal(parcel: Parcel, key: bytes) -> Parcel:
    return replace(parcel, body=seal(parcel.body, key, parcel.coordinates))


def summable_frame(content: RecordDict) -> bytes:
    """Return the frame of integers in a reply.

    Raises
    ------
    ConfigError
        When there is none, or the reply holds buffers, which are no integers on the codec's grid.
    """
    frame = take_frame(content, UPDATE)
    if frame is None:
        header = content.config_records.get(NODE_RECORD)
        said = None if header is None else header.get("unsupported")
        why = said if isinstance(said, str) else "is compression() among its mods, behind coded()?"
        raise ConfigError(f"the app's reply holds no frame that could be added to others' ({why})")
    if has_frame(content, EXACT):
        raise ConfigError("the model has buffers that travel as values; of these there is no coded sum")
    return frame


def whole_weight(content: RecordDict, key: str) -> int:
    """Return the metric that weighs an update in a sum of integers; 1 without a key.

    Raises
    ------
    ConfigError
        When it is not a whole number >= 0. The number itself is only logged here: the server is to learn of weights no
        more than their sum.
    """
    if not key:
        return 1
    found = [record[key] for record in content.metric_records.values() if key in record]
    # Where two records have such a metric, which of them weighs the update cannot be told.
    value = found[0] if len(found) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer() or value < 0:
        log.warning("metric %r is %r: it cannot be the weight in a sum", key, value)
        raise ConfigError(f"metric {key!r} is no whole number >= 0, as the weight in a sum must be")
    return int(value)
