"""What every relayed round does at a client: read the plan, send shards, keep one's own, open what was kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from flwr.app import RecordDict

from fedcomp.clients.coded.mod import Exchange
from fedcomp.coding.errors import CodingError
from fedcomp.coding.relay import RelayPlan, packet_hash
from fedcomp.coding.sealing import KEY_BYTES, seal
from fedcomp.coding.transport import Parcel, deliver
from fedcomp.flower.coded import SHARD, Collect, CollectFresh, Combine, GroupSum, MixTraining, RelayTraining, put_bundle

PAYLOAD: Final = "payload"
SHARED: Final = "shared"
REASON: Final = 300
"""Characters of a reason that travels to the server, which keeps no more."""

MOST_REASONS: Final = 16
"""Reasons that one answer lists."""


@dataclass(frozen=True)
class Terms:
    """A plan as this node has to follow it.

    Attributes
    ----------
    source : int
        This node's index as a contributor.
    relays : list of int
        Members that keep shard 0, 1, ... of this node's: what they are called as destinations of parcels.
    own : int or None
        Which of these shards it keeps itself, None when it keeps none.
    keys, addresses : list
        Of these relays; empty when shards are not sealed, and when they travel through the server.
    """

    plan: RelayPlan
    source: int
    relays: list[int]
    own: int | None
    keys: list[bytes]
    addresses: list[str]


class Shards:
    """A message of a relayed round, and what its answers have in common."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def news(self, terms: Terms) -> dict[str, Any]:
        """Return what the server has to be told anew of this node."""
        known = terms.own is not None and terms.keys
        return self.exchange.news(terms.keys[terms.own]) if known else {}  # type: ignore[index]

    def terms(self, asked: RelayTraining | MixTraining | GroupSum, plan: RelayPlan) -> Terms:
        """Return what the server asks as this node has to follow it."""
        keys = [asked.keys[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in range(len(asked.keys) // KEY_BYTES)]
        own = asked.relays.index(asked.index) if asked.index in asked.relays else None
        return Terms(plan, asked.source, list(asked.relays), own, keys, list(asked.addresses))

    @staticmethod
    def plan(asked: RelayTraining | GroupSum | CollectFresh) -> RelayPlan:
        """Return the code; raise :class:`FedcompError` where there is no such one."""
        code: Literal["rlnc", "mds"] = "mds" if asked.code == "mds" else "rlnc"
        return RelayPlan(code, asked.symbols, asked.shards, asked.round, asked.private, asked.seed, asked.max_payload)

    def send(self, terms: Terms, packets: list[bytes], content: RecordDict, kind: int = SHARD) -> dict[str, Any]:
        """Keep the own shard, send the others; return what the header says of it."""
        exchange = self.exchange
        failed: list[str] = []
        others = []
        for i, body in enumerate(packets):
            try:
                if i != terms.own:
                    others.append(self._parcel(terms, i, body, terms.keys[i] if terms.keys else None, kind))
                    continue
                mine = exchange.identity.public if terms.keys else None
                exchange.store.put(self._parcel(terms, i, body, mine, kind))
            except CodingError as error:
                # A relay whose key is none is a lost relay, for which the others stand.
                whose = "own shard" if i == terms.own else f"relay {terms.relays[i]}"
                failed.append(f"{whose}: {error}"[:REASON])
        if exchange.transport is None:
            put_bundle(content, [parcel.to_bytes() for parcel in others])
            return {"failed": failed}
        reachable = {relay: address for relay, address in zip(terms.relays, terms.addresses, strict=True) if address}
        outgoing = [(reachable[p.destination], p) for p in others if p.destination in reachable]
        sent = [0] * len(packets)
        for delivery in deliver(exchange.transport, outgoing):
            sent[terms.relays.index(delivery.parcel.destination)] = delivery.handed_over
            if delivery.error is not None:
                failed.append(f"relay {delivery.parcel.destination}: {delivery.error}"[:REASON])
        # Anybody may put parcels into the relays' stores; by these the server tells them which are this node's.
        hashes = b"".join(map(packet_hash, packets)) if kind == SHARD else b""
        return {"sent": sent, "failed": failed, "hashes": hashes}

    def _parcel(self, terms: Terms, shard: int, body: bytes, key: bytes | None, kind: int) -> Parcel:
        parcel = Parcel(self.exchange.run, self.exchange.round, kind, terms.source, terms.relays[shard], body)
        return parcel if key is None else replace(parcel, body=seal(body, key, parcel.coordinates))

    def opened(
        self, asked: Collect | Combine, kind: int, wanted: Collection[int] | None = None
    ) -> tuple[list[tuple[int, bytes]], list[int], list[str]]:
        """Return what this relay keeps: (source, body) of what it can open; source and size in turn; what it cannot."""
        exchange = self.exchange
        bodies: list[tuple[int, bytes]] = []
        held: dict[int, int] = {}
        refused: list[str] = []
        for parcel in exchange.store.list(exchange.run, exchange.round):
            if parcel.kind != kind or parcel.destination != asked.index:
                continue
            held.setdefault(parcel.source, len(parcel))
            if wanted is not None and parcel.source not in wanted:
                continue
            try:
                body = exchange.identity.open(parcel.body, parcel.coordinates) if asked.seal else parcel.body
                bodies.append((parcel.source, body))
            except CodingError as error:
                refused.append(f"source {parcel.source}: {error}"[:REASON])
        return bodies, [number for pair in held.items() for number in pair], refused[:MOST_REASONS]

    @staticmethod
    def array_of(source: int) -> str:
        """Return the name under which the sum of a group is kept."""
        return f"sum/{source}"
