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
from fedcomp.coding.transport import Parcel, deliver
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import MOST_REASONS, SHARD, pack_content, put_bundle
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, take_frame
from fedcomp.flower.protocol import EXACT, UPDATE

PAYLOAD: Final = "payload"
SHARED: Final = "shared"


@dataclass(frozen=True)
class Terms:
    """Where this node's shards go.

    Attributes
    ----------
    source : int
        This node's index as a contributor.
    relays : sequence of int
        Who keeps shard 0, 1, ... of this node's: what they are called as destinations of parcels.
    own : int or None
        Which of these shards it keeps itself, None when it keeps none.
    keys, addresses : list
        Of these relays; empty when shards are not sealed, and when they travel through the server.
    """

    source: int
    relays: Sequence[int]
    own: int | None
    keys: list[bytes]
    addresses: Sequence[str]

    @classmethod
    def of(cls, asked: Any, source: int, destinations: Sequence[int] | None = None) -> Terms:
        """Return the terms of a training message; ``destinations``: what its relays are called, default members."""
        keys = [asked.keys[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in range(len(asked.keys) // KEY_BYTES)]
        own = asked.relays.index(asked.index) if asked.index in asked.relays else None
        return cls(source, asked.relays if destinations is None else destinations, own, keys, asked.addresses)


class Shards:
    """A message of a coded round, and what its answers have in common."""

    def __init__(self, exchange: CodedMessage) -> None:
        self.exchange = exchange

    def news(self, terms: Terms) -> dict[str, Any]:
        """Return what the server has to be told again of this node."""
        known = terms.own is not None and terms.keys
        return self.exchange.news(terms.keys[terms.own]) if known else {}  # type: ignore[index]

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
        for i, body in enumerate(packets):
            try:
                if i != terms.own:
                    # Sealed one by one: a relay whose key is wrong costs its own shard, not the round.
                    others.append(self._parcel(terms, i, body, terms.keys[i] if terms.keys else None, kind))
                    continue
                mine = exchange.identity.public if terms.keys else None
                exchange.store.put(self._parcel(terms, i, body, mine, kind))
            except CodingError as error:
                # A relay whose key is not valid is a lost relay, for which the others stand.
                whose = "own shard" if i == terms.own else f"relay {terms.relays[i]}"
                failed.append(f"{whose}: {error}"[:REASON])
        if exchange.transport is None:
            put_bundle(content, [parcel.to_bytes() for parcel in others])
            return {"failed": failed}
        # A relay without an address cannot be reached: its shard is a loss like any other.
        reachable = {relay: address for relay, address in zip(terms.relays, terms.addresses, strict=True) if address}
        outgoing = [(reachable[p.destination], p) for p in others if p.destination in reachable]
        sent = [0] * len(packets)
        for delivery in deliver(exchange.transport, outgoing):
            # Of failed deliveries too: their bytes may have crossed the link.
            sent[terms.relays.index(delivery.parcel.destination)] = delivery.handed_over
            if delivery.error is not None:
                failed.append(f"relay {delivery.parcel.destination}: {delivery.error}"[:REASON])
        said: dict[str, Any] = {"sent": sent, "failed": failed}
        if kind == SHARD:
            # Anybody may put parcels into the relays' stores; by these the server tells them which are this node's.
            said["hashes"] = b"".join(map(packet_hash, packets))
        return said

    def _parcel(self, terms: Terms, shard: int, body: bytes, key: bytes | None, kind: int) -> Parcel:
        parcel = Parcel(self.exchange.run, self.exchange.round, kind, terms.source, terms.relays[shard], body)
        return parcel if key is None else replace(parcel, body=seal(body, key, parcel.coordinates))

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
    if EXACT in content:
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
