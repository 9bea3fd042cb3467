"""What clients of relayed shards and of coded sums have in common: send shards, keep one's own, open what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import RecordDict

from fedcomp.clients.coded.mod import REASON, CodedMessage
from fedcomp.coding.errors import CodingError
from fedcomp.coding.relay import packet_hash
from fedcomp.coding.sealing import KEY_BYTES, seal
from fedcomp.coding.sealkeys import require_signed
from fedcomp.coding.transport import Parcel, deliver
from fedcomp.flower.coded import NO_ADDRESS, SHARD, put_bundle


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
                    others.append((to, self._sealed(parcel, to)))
                else:
                    exchange.store.put(_seal(parcel, exchange.identity.public) if to.key else parcel)
            except CodingError as error:
                # A relay whose key is not valid is a lost relay, for which the others stand.
                whose = "own shard" if i == terms.own else f"relay {to.called}"
                failed.append(f"{whose}: {error}"[:REASON])
        handed, missed = self._post(others, content)
        if exchange.hub:
            return {"failed": failed}
        sent = [handed.get(to.called, 0) for to in terms.relays]
        said: dict[str, Any] = {"sent": sent, "failed": failed, **missed}
        if kind == SHARD:
            # Anybody may put parcels into the relays' stores; by these the server tells them which are this node's.
            said["hashes"] = b"".join(map(packet_hash, packets))
        return said

    def _sealed(self, parcel: Parcel, to: Peer) -> Parcel:
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

    def _post(
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


def _seal(parcel: Parcel, key: bytes) -> Parcel:
    return replace(parcel, body=seal(parcel.body, key, parcel.coordinates))
