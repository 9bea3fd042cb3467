"""One round of relayed shards: what was shared, who was asked, what came, and what is handed to the inner strategy.

See :mod:`fedcomp.strategies.coded.relay` for the exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flwr.app import Message, RecordDict

from fedcomp.coding.packet import DIGEST_BYTES
from fedcomp.coding.relay import Collector, Commitment, RelayPlan
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES, Parcel
from fedcomp.errors import FedcompError
from fedcomp.flower.coded import (
    CODED,
    COLLECT,
    PER_SOURCE,
    PUT,
    SHARD,
    Collect,
    Collected,
    CollectFresh,
    Indexed,
    Kept,
    RelayTraining,
    Shared,
    open_content,
    put_bundle,
    speaks,
    take_bundle,
)
from fedcomp.flower.rounds import Exchanges
from fedcomp.strategies.coded.strategy import CodedRound, Member, Outcome, limited
from fedcomp.strategies.replies import GONE, Rejected


@dataclass
class Sharing:
    """The moving parts of one round.

    Attributes
    ----------
    owners : list of Member
        Who shares source 0, 1, ...: everybody its own reply, or a group's aggregator the group's sum.
    ordinary : list of Message
        Replies without coding, handed on as they came.
    errors : dict of int to Message
        Error replies to training, by member index.
    reasons : dict of int to str
        Why nothing is expected of a source, where that is known.
    alive : set of int
        Members that answered the last thing they were asked.
    silent : list of int
        Relays that were asked to collect and did not answer.
    heard : set of int
        Relays that answered a collection.
    spoke : set of int
        Sources whose owner said itself what it sent.
    barred : set of int
        Members that say they failed: their memory may be as it was before, so nothing of them may be counted.
    hashes : dict of int to list of bytes
        Hashes of packets 0, 1, ... by source whose owner announced them. Between peers only: through the hub the server
        sees who sent a parcel.
    kind : int
        Kind of the parcels.
    """

    now: CodedRound
    plan: RelayPlan
    seal: bool
    top_up: bool
    owners: list[Member]
    ordinary: list[Message] = field(default_factory=list)
    errors: dict[int, Message] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    silent: list[int] = field(default_factory=list)
    heard: set[int] = field(default_factory=set)
    spoke: set[int] = field(default_factory=set)
    barred: set[int] = field(default_factory=set)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    kind: int = SHARD
    training: ClassVar[type[Indexed]] = RelayTraining

    def __post_init__(self) -> None:
        self.hub = self.now.settings.transport == "hub"
        self.collector = Collector(self.plan, range(len(self.owners)), len(self.now.members))
        self.timeout = self.now.settings.collect_timeout
        self.longest = self.plan.max_packet + (OVERHEAD if self.seal else 0) + HEADER_BYTES
        self.members = {member.node: member for member in self.now.members}
        report = self.now.report
        report.planned = report.relays = len(self.now.members)
        report.symbols, report.shards, report.private = self.plan.symbols, self.plan.shards, self.plan.private

    # Sharing.

    def share(self) -> Exchanges[None]:
        """Let everybody train and share; put into the relays what has to go through the server."""
        for source, member in enumerate(self.owners):
            self.now.plan(member, self.training, self._plan_of(source))
        replies = yield self.now.push(self.now.messages, self.now.settings.share_timeout)
        got = self.now.by_node(self.now.messages, replies)
        self.ordinary = [got[node] for node in (m.metadata.dst_node_id for m in self.now.strangers) if node in got]
        yield from self._spread(got)

    def _spread(self, got: Mapping[int, Message]) -> Exchanges[None]:
        """Take what every owner shared, and put it into the relays where it came through the server."""
        bags: dict[int, list[bytes]] = {}
        for source, member in enumerate(self.owners):
            reply = got.get(member.node)
            if reply is None:
                self._lost(source, "no reply in time")
                continue
            try:
                self._take_shared(source, reply, bags)
            except FedcompError as error:
                self._lost(source, str(error))
        if self.hub:
            yield from self._put(bags)

    def _plan_of(self, source: int) -> dict[str, Any]:
        """Return the plan for the owner of a source: who keeps its shards 0, 1, ..."""
        relays = [self.now.members[i] for i in self._holders(source)]
        fields: dict[str, Any] = {
            **self._numbers(),
            "source": source,
            "relays": tuple(relay.index for relay in relays),
        }
        if self.seal:
            fields["keys"] = b"".join(relay.public for relay in relays)
        if not self.hub:
            fields["addresses"] = tuple(relay.address for relay in relays)
        return fields

    def _holders(self, source: int) -> list[int]:
        return self.plan.holders(source, len(self.now.members))

    def _numbers(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "code": plan.code,
            "symbols": plan.symbols,
            "shards": plan.shards,
            "private": plan.private,
            "seed": plan.seed,
            "max_payload": plan.max_payload,
        }

    def _take_shared(self, source: int, reply: Message, bags: dict[int, list[bytes]]) -> None:
        """Take what the owner of a source answered."""
        member = self.owners[source]
        if reply.has_error():
            self.errors[member.index] = reply
            # What a node shared that failed itself must not be counted: its memory may be as it was before.
            if reply.error.code not in GONE:
                self.alive.add(member.index)
                self.barred.add(member.index)
                self.collector.give_up(source)
            raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
        self.alive.add(member.index)
        if not speaks(reply.content):
            self._take_ordinary(source, reply)
            return
        header = self.now.header(member, reply, Shared)
        if header.payload > self.plan.max_payload:
            raise Rejected(f"a payload of {header.payload} bytes, at most {self.plan.max_payload} are accepted")
        commitment = Commitment(header.payload, header.digest)
        hashes = [] if self.hub else self._hashes_in(header)
        if hashes:
            self.hashes[source] = hashes
        self.collector.expect(source, commitment, hashes)
        if self.hub:
            self._take_parcels(source, reply.content, bags)
        else:
            self.spoke.add(source)
            self._count_peer(member, limited(header.sent, self.plan.shards, "parcels handed over"))
        for reason in limited(header.failed, self.plan.shards, "reasons"):
            self.now.report.refuse(f"source {source}: {reason}")

    def _hashes_in(self, header: Shared) -> list[bytes]:
        """Return the hash of every packet an owner made, as it announces them."""
        joined = header.hashes
        if len(joined) != DIGEST_BYTES * self.plan.shards:
            raise Rejected(f"{len(joined)} bytes of hashes for {self.plan.shards} packets, {DIGEST_BYTES} each")
        return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]

    def _take_ordinary(self, source: int, reply: Message) -> None:
        """Take a reply without coding as what it is."""
        self.ordinary.append(reply)
        self.now.report.direct[self.owners[source].node] = "it answered without coding, although it said hello"
        self.collector.give_up(source)

    def _take_parcels(self, source: int, content: RecordDict, bags: dict[int, list[bytes]]) -> None:
        """Sort a source's parcels by relay. What they say of it has to be true: the server knows who sent them."""
        relays = self._holders(source)
        items = take_bundle(content, most=len(relays), longest=self.longest)
        self.now.report.count("hub_up", sum(map(len, items)))
        filled: set[int] = set()
        for data in items:
            try:
                parcel = Parcel.from_bytes(data, self.longest)
                place = (parcel.run, parcel.round, parcel.kind, parcel.source)
                if place != (self.now.common["run"], self.now.number, self.kind, source):
                    raise Rejected("the parcel claims another run, round, kind or source than its sender's")
                if parcel.destination not in relays or parcel.destination in filled:
                    raise Rejected(
                        f"the parcel is the second for relay {parcel.destination}, or that one keeps none of it"
                    )
            except FedcompError as error:
                self.now.report.refuse(f"source {source}: {error}")
                continue
            filled.add(parcel.destination)
            bags.setdefault(parcel.destination, []).append(data)

    def _put(self, bags: Mapping[int, list[bytes]]) -> Exchanges[None]:
        """Forward the parcels to those relays that are there."""
        messages = []
        for index, parcels in sorted(bags.items()):
            relay = self.now.members[index]
            if relay.index in self.alive:
                content = RecordDict()
                self.now.report.count("hub_down", put_bundle(content, parcels))
                messages.append(self.now.query(PUT, relay.node, Indexed, {"index": index}, content))
        got = self.now.by_node(messages, (yield self.now.push(messages, self.timeout)))
        for index in sorted(bags):
            relay = self.now.members[index]
            if relay.index not in self.alive:
                continue
            reply = got.get(relay.node)
            if reply is None or reply.has_error():
                self.alive.discard(relay.index)
            self._hear(relay, reply, "put")

    # Collecting.

    def collect(self) -> Exchanges[None]:
        """Ask relays in waves, each for a part; those that were away a moment ago where the others do not suffice.

        A relay that does not answer is not asked again, one that does may be: a wave asks for what is still missing.
        """
        members = self.now.members
        while True:
            able = [m.index for m in members if m.index in self.alive and m.index not in self.silent]
            # Through the hub nothing was put into a relay that was away.
            away = [m.index for m in members if m.index not in self.alive and m.index not in self.silent]
            wanted = self.collector.ask(able, () if self.hub else away)
            if not wanted:
                return
            queries = {
                relay: self.now.query(
                    COLLECT,
                    members[relay].node,
                    Collect,
                    {
                        **self._brief(),
                        "index": relay,
                        "sources": tuple(sources),
                        "hashes": self._hashes_for(relay, sources),
                    },
                )
                for relay, sources in wanted.items()
            }
            batch = list(queries.values())
            got = self.now.by_node(batch, (yield self.now.push(batch, self.timeout)))
            self.now.report.waves += 1
            self.now.report.asked += len(batch)
            for relay, sources in wanted.items():
                reply = got.get(members[relay].node)
                if reply is None or reply.has_error():
                    self.silent.append(relay)
                if reply is not None:
                    self._take_collected(relay, reply, sources)

    def recollect(self) -> Exchanges[None]:
        """Ask once more, where that may still complete a source: silent relays, and the contributor itself."""
        sources = [s for s in self.collector.waiting if s not in self.reasons or not self.hub]
        fresh: dict[int, int] = {}
        hopeful = []
        for source in sources:
            missing = self.collector.missing(source)
            owner = self.owners[source].index
            there = owner in self.alive and owner not in self.errors and not self.plan.private
            # Packets that came but depend on each other are the code's own failure; packets that did not come are not.
            there = there and (self.top_up or self.collector.arrived(source) >= self.plan.needed)
            if there or missing <= len(set(self.silent) & set(self._holders(source))):
                hopeful.append(source)
            if there:
                fresh[source] = missing
        if not hopeful:
            return
        nodes: dict[int, dict[str, Any]] = {}
        for i in self.silent:
            kept = [source for source in hopeful if i in self._holders(source)]
            if kept:
                hashes = self._hashes_for(i, kept)
                nodes[self.now.members[i].node] = {"index": i, "sources": tuple(kept), "hashes": hashes}
        for source, count in fresh.items():
            member = self.owners[source]
            more = {**self._numbers(), **self._fresh_of(source), "fresh": count}
            nodes.setdefault(member.node, {"index": 0, "sources": ()}).update(more)
        queries = [
            self.now.query(COLLECT, node, CollectFresh if "fresh" in asked else Collect, {**self._brief(), **asked})
            for node, asked in nodes.items()
        ]
        self.now.report.recollects += len(hopeful)
        self.now.report.waves += 1
        self.now.report.asked += len(queries)
        got = self.now.by_node(queries, (yield self.now.push(queries, self.timeout)))
        for node, asked in nodes.items():
            reply = got.get(node)
            if reply is None:
                continue
            own = [asked["source"]] if "fresh" in asked else []
            relay = asked["index"] if asked["sources"] else None
            self._take_collected(relay, reply, asked["sources"], own)

    def _fresh_of(self, source: int) -> dict[str, Any]:
        """Return by which name an owner knows what it shared."""
        return {"source": source}

    def _brief(self) -> dict[str, Any]:
        return {"seal": self.seal}

    def _hashes_for(self, relay: int, sources: Iterable[int]) -> bytes:
        """Return the hash of the packet a relay holds of each source, so that it leaves forgeries out.

        Zeros for sources that announced none, nothing where no source did. A relay is told of its own packets only:
        with another's hash it could test guesses of what private symbols hide from it.
        """
        known = [
            self.hashes[source][self._holders(source).index(relay)] if source in self.hashes else bytes(DIGEST_BYTES)
            for source in sources
        ]
        return b"".join(known) if any(map(any, known)) else b""

    def _take_collected(
        self, relay: int | None, reply: Message, sources: Iterable[int], own: Iterable[int] = ()
    ) -> None:
        """Take the packets a relay answered with, and fresh ones a contributor made of its own payload."""
        name = "a contributor" if relay is None else f"relay {relay}"
        report = self.now.report
        try:
            header = self.now.answer(reply, Collected)
            most = PER_SOURCE * len(self.owners) + self.plan.needed
            # Each packet is measured by itself: between peers a relay may have been given one that is too long.
            items = take_bundle(reply.content, most=most, longest=1 << 32)
            report.count("hub_up", sum(map(len, items)))
            added = header.fresh
            if added > len(items):
                raise Rejected(f"{added} of {len(items)} packets are said to be fresh")
            began = time.perf_counter()
            for data in items[: len(items) - added]:
                self.collector.add(0 if relay is None else relay, data, list(sources))
            for data in items[len(items) - added :]:
                self.collector.add(-1, data, list(own))
            report.decode_seconds += time.perf_counter() - began
            if relay is not None:
                self._count_held(relay, header.held)
            for reason in limited(header.refused, most, "reasons"):
                report.refuse(f"{name}: {reason}")
        except FedcompError as error:
            report.refuse(f"{name}: {error}")

    def _count_held(self, relay: int, numbers: tuple[int, ...]) -> None:
        """Take a relay's word of what lies in its own store: whom to ask for, and what those sent who no longer say."""
        if self.hub or relay in self.heard:
            return
        self.heard.add(relay)
        held = dict(zip(numbers[::2], numbers[1::2], strict=False))
        self.collector.holds(relay, held.keys())
        for source, size in held.items():
            # What an owner keeps of its own was never sent, and what no plan makes room for was not sent by it.
            known = source < len(self.owners) and size <= self.longest
            if known and source not in self.spoke and self.owners[source].index != relay:
                self._count_peer(self.owners[source], [size])

    # The end.

    def conclude(self) -> Outcome:
        """Rebuild the replies that were decoded and let the inner strategy aggregate them."""
        report = self.now.report
        replies = list(self.ordinary)
        for source, member in enumerate(self.owners):
            if member.node in report.direct:
                continue
            try:
                content = open_content(self._payload(source))
                # Whatever a client calls so is not the app's.
                for name in [k for k in content if k.startswith(CODED)]:
                    del content[name]
                replies.append(Message(content, reply_to=member.message))
                report.included.append(member.node)
            except FedcompError as error:
                report.exclude(member.node, self._why(source, error))
                if member.index in self.errors:
                    replies.append(self.errors[member.index])
        self._account()
        if not report.included and not self.ordinary:
            self._nobody()
        return self.now.aggregate(replies)

    def _account(self) -> None:
        """Put what the collector counted into the report."""
        report = self.now.report
        report.received, report.innovative, report.dependent, refused = self._counted()
        for reason in refused:
            report.refuse(reason)

    def _counted(self) -> tuple[int, int, int, Iterable[str]]:
        """Return packets received, innovative and dependent, and why others were thrown away."""
        collector = self.collector
        return collector.received, collector.innovative, collector.dependent, collector.refused

    def _payload(self, source: int) -> bytes:
        """Return what a source shared; raise what :meth:`fedcomp.coding.relay.Collector.payload` raises."""
        return self.collector.payload(source)

    def _nobody(self) -> None:
        self.now.report.note(
            f"none of {len(self.owners)} sources could be decoded (K={self.plan.needed} of {self.plan.shards}): the "
            "model is unchanged"
        )

    def _why(self, source: int, error: Exception) -> str:
        known = self.reasons.get(source)
        return str(error) if known is None else f"{known}; {error}"

    def _lost(self, source: int, reason: str) -> None:
        """Take note of why an owner's own answer is of no use; its shards may be at the relays all the same."""
        self.reasons[source] = reason
        if self.hub:
            self.collector.give_up(source)

    def _hear(self, relay: Member, reply: Message | None, what: str) -> None:
        if reply is None:
            return
        try:
            if reply.has_error():
                raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
            kept = Kept.take(reply)
            for reason in limited(kept.refused, len(self.now.members), "reasons"):
                self.now.report.refuse(f"relay {relay.index}, {what}: {reason}")
        except FedcompError as error:
            self.now.report.refuse(f"relay {relay.index}, {what}: {error}")

    def _count_peer(self, member: Member, sizes: Iterable[int]) -> None:
        """Count what a member handed to its peers, by its own word or by that of who holds it."""
        handed = [size for size in sizes if size]
        wire, payload = sum(handed), sum(max(0, size - HEADER_BYTES) for size in handed)
        self.now.report.count("peer", wire)
        record = getattr(self.now.grid, "record_peer", None)
        if record is not None and wire:
            kind = member.message.metadata.message_type
            record(self.now.number, member.node, kind, payload, wire)
