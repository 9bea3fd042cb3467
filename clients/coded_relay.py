"""The client half of relayed shards: share one's own reply, keep what others share, hand it out when asked.

A message that is delivered again is answered with the same shards, made of the stored reply: training twice could give
other bytes, and shards of two payloads do not fit together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from clients.coded import Exchange
from clients.coded_groups import PAYLOAD, REASON, SHARED, add_up, join
from clients.coded_mixing import combine, mix_in
from clients.messages import CallNext
from coding.code import MAX_SYMBOLS
from coding.errors import CodingError, PacketError
from coding.packet import DIGEST_BYTES, Packet, PacketLimits
from coding.relay import RelayPlan, packet_hash
from coding.sealing import KEY_BYTES, seal
from coding.transport import Parcel, deliver
from fedcomp.errors import FedcompError, StateError
from fedcomp.flower.coded import COLLECT, PER_SOURCE, PUT, SHARD, SUM, pack_content, put_bundle, take_bundle

_MOST_FRESH = 1024
_MOST_REASONS = 16
_UNKNOWN = bytes(DIGEST_BYTES)


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


class RelayClient:
    """Answers the messages of a relayed round."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.fields = exchange.fields

    def answer(self, call_next: CallNext) -> Message:
        """Train and share, keep, or hand out."""
        kind = self.exchange.kind
        self.exchange.enter()
        if kind == PUT:
            return self._keep()
        if kind == COLLECT:
            return combine(self) if "mix-bytes" in self.fields else self._hand_out()
        if kind == SUM:
            return add_up(self)
        if kind.partition(".")[0] == "train":
            if "mix-bytes" in self.fields:
                return mix_in(self, call_next)
            return join(self, call_next) if "aggregator" in self.fields else self._share(call_next)
        raise StateError(f"a relayed round has no messages of type {kind!r}")

    # Sharing.

    def _share(self, call_next: CallNext) -> Message:
        """Train unless that was done already, then share; the plan is checked whole before anything is done."""
        exchange = self.exchange
        terms = self.terms()
        packets = self._stored(terms)
        if packets is None:
            reply = call_next(exchange.plain_message(), exchange.context)
            if reply.has_error():
                return reply
            packets = self._code(terms, pack_content(reply.content))
        content = RecordDict()
        first = Packet.from_bytes(packets[0], terms.plan.limits)
        header: dict[str, Any] = {
            **self.news(terms),
            **self.send(terms, packets, content),
            "payload": first.payload_bytes,
            "digest": first.digest,
        }
        exchange.save()
        return exchange.reply(header, content)

    def news(self, terms: Terms) -> dict[str, Any]:
        """Return what the server has to be told anew of this node."""
        known = terms.own is not None and terms.keys
        return self.exchange.news(terms.keys[terms.own]) if known else {}  # type: ignore[index]

    def terms(self, plan: RelayPlan | None = None) -> Terms:
        """Return the plan of the message; ``plan`` stands for what it says of the code.

        Raises
        ------
        FedcompError
            When it cannot be followed.
        """
        fields, plan = self.fields, self._plan() if plan is None else plan
        member = fields.integer("index", most=2**32 - 1)
        source = fields.integer("source", member, most=2**32 - 1)
        relays = fields.integers("relays", most=2**32 - 1, longest=plan.shards)
        if len(set(relays)) != plan.shards:
            raise StateError(f"the plan names {len(set(relays))} relays for {plan.shards} shards")
        keys: list[bytes] = []
        if "keys" in fields:
            joined = fields.data("keys", length=KEY_BYTES * plan.shards)
            keys = [joined[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in range(plan.shards)]
        addresses: list[str] = []
        if self.exchange.transport is not None:
            addresses = fields.texts("addresses", longest=plan.shards)
            if len(addresses) != plan.shards:
                raise StateError(f"the plan has {len(addresses)} addresses for {plan.shards} relays")
        own = relays.index(member) if member in relays else None
        return Terms(plan, source, relays, own, keys, addresses)

    def _code(self, terms: Terms, payload: bytes) -> list[bytes]:
        """Code ``payload`` and keep what another delivery of the message is answered with."""
        packets = terms.plan.packets(terms.source, payload)
        exchange = self.exchange
        exchange.numbers[SHARED] = exchange.round
        # Private symbols are drawn anew by every encoder: then the shards themselves have to be kept.
        kept = {f"{i}": np.frombuffer(p, np.uint8) for i, p in enumerate(packets)} if terms.plan.private else {}
        exchange.arrays = kept or {PAYLOAD: np.frombuffer(payload, np.uint8)}
        return packets

    def _stored(self, terms: Terms) -> list[bytes] | None:
        """Return the shards this node made in this round already; None when it did not."""
        arrays = self.exchange.arrays
        if self.exchange.numbers.get(SHARED) != self.exchange.round:
            return None
        if PAYLOAD in arrays:
            return terms.plan.packets(terms.source, arrays[PAYLOAD].tobytes())
        return [arrays[f"{i}"].tobytes() for i in range(len(arrays))]

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

    def _plan(self) -> RelayPlan:
        fields = self.fields
        return RelayPlan(
            "mds" if fields.text("code") == "mds" else "rlnc",
            fields.integer("symbols", least=1, most=1024),
            fields.integer("shards", least=1, most=1024),
            self.exchange.round,
            fields.integer("private", 0, most=255),
            fields.integer("seed", 0, least=-(2**63)),
            fields.integer("max-payload", least=1, most=2**32 - 1),
        )

    # Keeping.

    def _keep(self) -> Message:
        """Put the parcels the server forwards into the store; what does not fit or belong is reported and dropped."""
        exchange = self.exchange
        index = self.fields.integer("index", most=2**32 - 1)
        kept, refused = 0, []
        # Each parcel is measured by itself: one that is too long must not cost the others.
        for data in take_bundle(exchange.msg.content, most=1 << 16, longest=1 << 32):
            try:
                parcel = Parcel.from_bytes(data, exchange.max_store_bytes)
                if (parcel.run, parcel.round, parcel.destination) != (exchange.run, exchange.round, index):
                    raise StateError("a parcel of another run, round or destination")
                exchange.store.put(parcel)
                kept += 1
            except FedcompError as error:
                refused.append(str(error)[:REASON])
        exchange.save()
        return exchange.reply({"kept": kept, "refused": refused})

    # Handing out.

    def _hand_out(self) -> Message:
        """Answer with the shards of the sources that are asked for, and with fresh shards of the own payload."""
        exchange = self.exchange
        wanted = set(self.fields.integers("sources", most=2**32 - 1))
        index = self.fields.integer("index", 0, most=2**32 - 1)
        bodies, held, refused = self.opened(index, SHARD, wanted)
        packets = self._sound(bodies, refused)
        fresh = self._fresh()
        content = RecordDict()
        put_bundle(content, [*packets, *fresh])
        header: dict[str, Any] = {"fresh": len(fresh), "refused": refused[:_MOST_REASONS]}
        if exchange.transport is not None:
            header["held"] = held
        return exchange.reply(header, content)

    def _sound(self, bodies: list[tuple[int, bytes]], refused: list[str]) -> list[bytes]:
        """Return those bodies that are the packet their source announced; a few of each source that announced none.

        Anybody may have put parcels in here; a flood of them must not crowd out the others' in one answer. What is left
        out is told in ``refused``.
        """
        sources = self.fields.integers("sources", most=2**32 - 1)
        joined = self.fields.data("hashes", _UNKNOWN * len(sources))
        if len(joined) != DIGEST_BYTES * len(sources):
            raise StateError(f"{len(joined)} bytes of hashes for {len(sources)} sources, {DIGEST_BYTES} each")
        announced = {s: joined[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] for i, s in enumerate(sources)}
        limits = PacketLimits(
            max_symbol_bytes=2**32 - 1, max_payload=2**32 - 1, max_generations=2**16 - 1, max_symbols=MAX_SYMBOLS
        )
        found: dict[int, dict[bytes, None]] = {}
        for source, body in bodies:
            try:
                packet = Packet.from_bytes(body, limits)
                if packet.source != source:
                    raise PacketError(f"a packet of source {packet.source} in its parcel")
                if announced.get(source, _UNKNOWN) not in (_UNKNOWN, packet_hash(body)):
                    raise PacketError(f"a packet that is not the one source {source} announced for this relay")
            except CodingError as error:
                refused.append(f"source {source}: {error}"[:REASON])
                continue
            held = found.setdefault(source, {})
            if len(held) < PER_SOURCE:
                held[body] = None
        return [body for held in found.values() for body in held]

    def opened(
        self, index: int, kind: int, wanted: Collection[int] | None = None
    ) -> tuple[list[tuple[int, bytes]], list[int], list[str]]:
        """Return what this relay keeps: (source, body) of what it can open; source and size in turn; what it cannot."""
        exchange = self.exchange
        sealed = self.fields.flag("seal")
        bodies: list[tuple[int, bytes]] = []
        held: dict[int, int] = {}
        refused: list[str] = []
        for parcel in exchange.store.list(exchange.run, exchange.round):
            if parcel.kind != kind or parcel.destination != index:
                continue
            held.setdefault(parcel.source, len(parcel))
            if wanted is not None and parcel.source not in wanted:
                continue
            try:
                body = exchange.identity.open(parcel.body, parcel.coordinates) if sealed else parcel.body
                bodies.append((parcel.source, body))
            except CodingError as error:
                refused.append(f"source {parcel.source}: {error}"[:REASON])
        return bodies, [number for pair in held.items() for number in pair], refused[:_MOST_REASONS]

    def _fresh(self) -> list[bytes]:
        """Return further shards of what this node shared; none when that was in another round."""
        exchange = self.exchange
        count = self.fields.integer("fresh", 0, most=_MOST_FRESH)
        if not count or exchange.numbers.get(SHARED) != exchange.round:
            return []
        source = self.fields.integer("source", most=2**32 - 1)
        name = self.array_of(source) if self.fields.flag("sum") else PAYLOAD
        if name not in exchange.arrays:
            return []
        return self._plan().fresh(source, exchange.arrays[name].tobytes(), count)

    @staticmethod
    def array_of(source: int) -> str:
        """Return the name under which the sum of a group is kept."""
        return f"sum/{source}"
