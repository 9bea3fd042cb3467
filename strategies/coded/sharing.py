"""One round of relayed shards: what was shared, what came back of it, and what is handed to the inner strategy.

See :mod:`fedcomp.strategies.coded.relay` for the exchanges. A relay that does not answer a wave is not asked again, one
that does may be: each wave asks for what is still missing. A last one asks silent relays once more, and contributors
that are still there for fresh shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from fedcomp.coding.packet import DIGEST_BYTES
from fedcomp.coding.relay import Collector, Commitment, RelayPlan
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES
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
    """The moving parts of one round. Source i is member i of it.

    Attributes
    ----------
    ordinary : list of Message
        Replies without coding, handed on as they came.
    errors : dict of int to Message
        Error replies to training, by member index.
    reasons : dict of int to str
        Why nothing is expected of a source, where that is known.
    alive : set of int
        Members that answered the last thing they were asked.
    announced : set of int
        Sources that said themselves what they sent.
    hashes : dict of int to list of bytes
        Hashes of packets 0, 1, ... by source that announced them. Between peers only: through the hub the server sees
        who sent a parcel.
    numbers : dict
        Fields by which every plan of the round says how payloads are coded.
    """

    now: CodedRound
    plan: RelayPlan
    seal: bool
    ordinary: list[Message] = field(default_factory=list)
    errors: dict[int, Message] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    announced: set[int] = field(default_factory=set)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hub = self.now.settings.transport == "hub"
        self.timeout = self.now.settings.collect_timeout
        # Checked before parsing: no parcel may cost more memory than the plan has a use for.
        self.longest = self.plan.max_packet + (OVERHEAD if self.seal else 0) + HEADER_BYTES
        names = ("code", "symbols", "shards", "seed", "max_payload")
        self.numbers = {name: getattr(self.plan, name) for name in names} | {"private": self.plan.threshold}
        self.collection = Collection(self)
        report = self.now.report
        report.planned = report.relays = len(self.now.members)
        report.symbols, report.shards, report.threshold = self.plan.symbols, self.plan.shards, self.plan.threshold

    def share(self) -> Exchanges[None]:
        """Let everybody train and share; put into the relays what has to go through the server."""
        now = self.now
        for member in now.members:
            now.plan(member, RelayTraining, self._plan_of(member))
        # Clients without the half train in the same exchange: their replies are ordinary ones.
        got = yield from now.ask(now.messages, now.settings.share_timeout)
        nodes = [message.metadata.dst_node_id for message in now.uncoded]
        self.ordinary = [got[node] for node in nodes if node in got]
        bags: dict[int, list[bytes]] = {}
        for member in now.members:
            try:
                self._take_shared(member, got.get(member.node), bags)
            except FedcompError as error:
                # The source's own answer is of no use; its shards may be at the relays all the same.
                self.reasons[member.index] = str(error)
                if self.hub:
                    self.collection.give_up(member.index)
        if bags:
            yield from self._put(bags)

    def _plan_of(self, member: Member) -> dict[str, Any]:
        """Return the plan for a source: who keeps its shards 0, 1, ..."""
        relays = [self.now.members[i] for i in self.holders(member.index)]
        return {
            **self.numbers,
            "source": member.index,
            "relays": tuple(relay.index for relay in relays),
            **self.now.peers(member, relays, seal=self.seal),
        }

    def holders(self, source: int) -> list[int]:
        """Return the relays that keep shards 0, 1, ... of a source."""
        return self.plan.holders(source, len(self.now.members))

    def _take_shared(self, member: Member, reply: Message | None, bags: dict[int, list[bytes]]) -> None:
        """Take what a source answered."""
        source, report = member.index, self.now.report
        if reply is None:
            raise Rejected("no reply in time")
        if reply.has_error():
            self.errors[source] = reply
            if reply.error.code not in GONE:
                # What a node shared that failed itself must not be counted: its memory may be as it was before.
                self.alive.add(source)
                self.collection.give_up(source)
            raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
        self.alive.add(source)
        # A client may have been updated to an app without the half since its hello.
        if not speaks(reply.content):
            self.ordinary.append(reply)
            report.direct[member.node] = "it answered without coding, although it said hello"
            self.collection.give_up(source)
            return
        header = self.now.header(member, reply, Shared)
        if header.payload > self.plan.max_payload:
            raise Rejected(f"a payload of {header.payload} bytes, at most {self.plan.max_payload} are accepted")
        hashes = []
        if not self.hub:
            hashes = [header.hashes[i : i + DIGEST_BYTES] for i in range(0, len(header.hashes), DIGEST_BYTES)]
            if len(header.hashes) != DIGEST_BYTES * self.plan.shards:
                raise Rejected(
                    f"{len(header.hashes)} bytes of hashes for {self.plan.shards} packets, {DIGEST_BYTES} each"
                )
            self.hashes[source] = hashes
        self.collection.collector.expect(source, Commitment(header.payload, header.digest), hashes)
        holders = {index: self.now.members[index] for index in self.holders(source)}
        if self.hub:
            self._take_parcels(source, reply.content, bags, set(holders))
        else:
            self.announced.add(source)
            self.now.count_peer(member, limited(header.sent, self.plan.shards, "parcels handed over"))
            try:
                missed = self.now.take_missed(member, header, holders, seal=self.seal)
                self._take_parcels(source, reply.content, bags, missed)
            except FedcompError as error:
                # What its links took is at the relays all the same.
                report.refuse(f"source {source}: {error}")
        for reason in limited(header.failed, self.plan.shards, "reasons"):
            report.refuse(f"source {source}: {reason}")

    def _take_parcels(self, source: int, content: RecordDict, bags: dict[int, list[bytes]], free: set[int]) -> None:
        """Sort a source's parcels by relay; each is refused by itself. ``free``: for whom they may be."""
        # Each relay once: a source that sends two shards to one relay wants to fill its store.
        items = take_bundle(content, most=len(free), longest=self.longest)
        self.now.report.count("hub_up", sum(map(len, items)))
        for data in items:
            try:
                parcel = self.now.parcel(data, SHARD, source, free, self.longest)
            except FedcompError as error:
                self.now.report.refuse(f"source {source}: {error}")
                continue
            free.remove(parcel.destination)
            bags.setdefault(parcel.destination, []).append(data)

    def _put(self, bags: Mapping[int, list[bytes]]) -> Exchanges[None]:
        """Forward the parcels to those relays that are there."""
        # A relay that did not answer training would only run into the timeout.
        relays = [self.now.members[index] for index in sorted(bags.keys() & self.alive)]
        messages = []
        for relay in relays:
            content = RecordDict()
            self.now.report.count("hub_down", put_bundle(content, bags[relay.index]))
            messages.append(self.now.query(PUT, relay.node, Indexed, {"index": relay.index}, content))
        got = yield from self.now.ask(messages, self.timeout)
        for relay in relays:
            reply = got.get(relay.node)
            if reply is None or reply.has_error():
                self.alive.discard(relay.index)
            if reply is None:
                continue
            try:
                kept = self.now.answer(reply, Kept)
                for reason in limited(kept.refused, len(self.now.members), "reasons"):
                    self.now.report.refuse(f"relay {relay.index}, put: {reason}")
            except FedcompError as error:
                self.now.report.refuse(f"relay {relay.index}, put: {error}")

    def conclude(self) -> Outcome:
        """Rebuild the replies that were decoded and let the inner strategy aggregate them."""
        report = self.now.report
        replies = list(self.ordinary)
        for member in self.now.members:
            if member.node in report.direct:
                continue
            try:
                content = open_content(self.collection.collector.payload(member.index))
                # Whatever a client calls so is not the app's.
                for name in [k for k in content if k.startswith(CODED)]:
                    del content[name]
                replies.append(Message(content, reply_to=member.message))
                report.included.append(member.node)
            except FedcompError as error:
                known = self.reasons.get(member.index)
                report.exclude(member.node, str(error) if known is None else f"{known}; {error}")
                if member.index in self.errors:
                    # The inner strategy counts failures, as in an uncoded round; a lost client's error is one.
                    replies.append(self.errors[member.index])
        self.collection.account()
        if not report.included and not self.ordinary:
            report.note(
                f"none of {len(self.now.members)} sources could be decoded (K={self.plan.needed} of "
                f"{self.plan.shards}): the model is unchanged"
            )
        return self.now.aggregate(replies)


class Collection:
    """What has come back of the shards of one round.

    Attributes
    ----------
    collector : Collector
        Decodes, and checks payloads against what their sources committed themselves to.
    silent : list of int
        Relays that were asked and did not answer.
    reported : set of int
        Relays that said what lies in their store.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.now = sharing.now
        self.collector = Collector(sharing.plan, range(len(self.now.members)))
        self.silent: list[int] = []
        self.reported: set[int] = set()

    def give_up(self, source: int) -> None:
        """Expect nothing more of a source."""
        self.collector.give_up(source)

    def collect(self) -> Exchanges[None]:
        """Ask relays in waves, each for a part; those that were away a moment ago where the others do not suffice."""
        sharing, members = self.sharing, self.now.members
        while True:
            left = [member.index for member in members if member.index not in self.silent]
            able = [i for i in left if i in sharing.alive]
            # Through the hub nothing was put into a relay that was away.
            away = [] if sharing.hub else [i for i in left if i not in sharing.alive]
            wanted = self.collector.ask(able, away)
            if not wanted:
                return
            got = yield from self._ask(
                {members[relay].node: self._held_of(relay, sources) for relay, sources in wanted.items()}
            )
            for relay, sources in wanted.items():
                reply = got.get(members[relay].node)
                if reply is None or reply.has_error():
                    self.silent.append(relay)
                if reply is not None:
                    self._take(relay, reply, sources)

    def recollect(self) -> Exchanges[None]:
        """Ask once more, where that may still complete a source: silent relays, and the contributor itself."""
        sharing, members = self.sharing, self.now.members
        fresh: dict[int, int] = {}
        candidates = []
        for source in self.collector.waiting:
            if sharing.hub and source in sharing.reasons:
                continue
            missing = self.collector.missing(source)
            there = source in sharing.alive and source not in sharing.errors and not sharing.plan.threshold
            # Packets that came but depend on each other are the code's own failure; packets that did not come are not.
            there = there and self.collector.arrived(source) >= sharing.plan.needed
            if there or missing <= len(set(self.silent) & set(sharing.holders(source))):
                candidates.append(source)
            if there:
                fresh[source] = missing
        if not candidates:
            return
        asked: dict[int, dict[str, Any]] = {}
        for silent in self.silent:
            kept = [source for source in candidates if silent in sharing.holders(source)]
            if kept:
                asked[members[silent].node] = self._held_of(silent, kept)
        # A node that is asked as a relay, too, gets both questions in one message.
        for source, count in fresh.items():
            more = {**sharing.numbers, "source": source, "fresh": count}
            asked.setdefault(members[source].node, {"index": 0, "sources": ()}).update(more)
        self.now.report.recollects += len(candidates)
        got = yield from self._ask(asked)
        for node, fields in asked.items():
            if (reply := got.get(node)) is not None:
                relay = fields["index"] if fields["sources"] else None
                self._take(relay, reply, fields["sources"], [fields["source"]] if "fresh" in fields else [])

    def _ask(self, asked: Mapping[int, Mapping[str, Any]]) -> Exchanges[dict[int, Message]]:
        """Send a query with these fields to each node; return the replies."""
        queries = []
        for node, fields in asked.items():
            kind = CollectFresh if "fresh" in fields else Collect
            queries.append(self.now.query(COLLECT, node, kind, {"seal": self.sharing.seal, **fields}))
        self.now.report.waves += 1
        self.now.report.asked += len(queries)
        return (yield from self.now.ask(queries, self.sharing.timeout))

    def _held_of(self, relay: int, sources: Iterable[int]) -> dict[str, Any]:
        """Return the fields that ask a relay for what it holds of some sources, with the hash of each packet.

        By the hashes it leaves forgeries out: zeros for sources that announced none, nothing where no source did. A
        relay is told of its own packets only: with another's hash it could test guesses of what random symbols hide.
        """
        hashes, holders, wanted = self.sharing.hashes, self.sharing.holders, tuple(sources)
        known = [hashes[s][holders(s).index(relay)] if s in hashes else bytes(DIGEST_BYTES) for s in wanted]
        return {"index": relay, "sources": wanted, "hashes": b"".join(known) if any(map(any, known)) else b""}

    def _take(self, relay: int | None, reply: Message, sources: Iterable[int], own: Iterable[int] = ()) -> None:
        """Take the packets a relay answered with, and fresh ones a contributor made of its own payload."""
        name = "a contributor" if relay is None else f"relay {relay}"
        report, sharing = self.now.report, self.sharing
        try:
            header = self.now.answer(reply, Collected)
            # Relays hand out PER_SOURCE packets of a source at most; fresh ones come on top.
            most = PER_SOURCE * len(self.now.members) + sharing.plan.needed
            # Each packet is measured by itself: between peers a relay may have been given one that is too long.
            items = take_bundle(reply.content, most=most, longest=1 << 32)
            report.count("hub_up", sum(map(len, items)))
            if header.fresh > len(items):
                raise Rejected(f"{header.fresh} of {len(items)} packets are said to be fresh")
            began, kept = time.perf_counter(), len(items) - header.fresh
            for data in items[:kept]:
                self.collector.add(0 if relay is None else relay, data, list(sources))
            for data in items[kept:]:
                # -1 is no relay: the announced hashes are of the relays' packets, and fresh ones are not among them.
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
        sharing = self.sharing
        # Once per relay: a second wave would count what its peers sent to it again.
        if sharing.hub or relay in self.reported:
            return
        self.reported.add(relay)
        held = dict(zip(numbers[::2], numbers[1::2], strict=False))
        self.collector.holds(relay, held.keys())
        for source, size in held.items():
            # What a source keeps of its own was never sent, and what no plan makes room for was not sent by it.
            known = source < len(self.now.members) and size <= sharing.longest
            if known and source not in sharing.announced and source != relay:
                self.now.count_peer(self.now.members[source], [size])

    def account(self) -> None:
        """Report packets received, innovative and dependent, and why others were thrown away."""
        report, counted = self.now.report, self.collector
        report.received, report.innovative, report.dependent = counted.received, counted.innovative, counted.dependent
        for reason in counted.refused:
            report.refuse(reason)
