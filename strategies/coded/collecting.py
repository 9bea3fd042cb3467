"""The second exchange of relayed shards: whom the server asks for what they hold, in waves, until all is decoded.

A relay that does not answer is not asked again in a wave, one that does may be: a wave asks for what is still missing.
A last exchange asks silent relays once more, and contributors that are still there for fresh shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Message

from fedcomp.coding.mixing import Mixture
from fedcomp.coding.packet import DIGEST_BYTES
from fedcomp.coding.relay import Collector
from fedcomp.errors import FedcompError
from fedcomp.flower.coded import COLLECT, PER_SOURCE, Collect, Collected, CollectFresh, Query, take_bundle
from fedcomp.flower.rounds import Exchanges
from fedcomp.strategies.coded.strategy import limited
from fedcomp.strategies.replies import Rejected

if TYPE_CHECKING:
    from fedcomp.strategies.coded.sharing import Sharing


class Collection:
    """What has come back of the shards of one round.

    Attributes
    ----------
    collector : Collector
        Decodes, and checks payloads against what their owners committed themselves to.
    decoder : Collector or Mixture
        What counts packets: the collector, unless payloads are mixed.
    silent : list of int
        Relays that were asked and did not answer.
    reported : set of int
        Relays that said what lies in their store.
    fresh : dict
        How a query for fresh shards names what its owner shared, beside the source.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.now = sharing.now
        self.collector = Collector(sharing.plan, range(len(sharing.owners)), len(sharing.now.members))
        self.decoder: Collector | Mixture = self.collector
        self.silent: list[int] = []
        self.reported: set[int] = set()
        self.fresh: dict[str, Any] = {}

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
            got = yield from self.ask(
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
            owner = sharing.owners[source].index
            there = owner in sharing.alive and owner not in sharing.errors and not sharing.plan.private
            # Packets that came but depend on each other are the code's own failure; packets that did not come are not.
            there = there and (sharing.top_up or self.collector.arrived(source) >= sharing.plan.needed)
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
        for source, count in fresh.items():
            more = {**sharing.numbers, "source": source, **self.fresh, "fresh": count}
            asked.setdefault(sharing.owners[source].node, {"index": 0, "sources": ()}).update(more)
        self.now.report.recollects += len(candidates)
        got = yield from self.ask(asked)
        for node, fields in asked.items():
            if (reply := got.get(node)) is not None:
                relay = fields["index"] if fields["sources"] else None
                self._take(relay, reply, fields["sources"], [fields["source"]] if "fresh" in fields else [])

    def ask(
        self, asked: Mapping[int, Mapping[str, Any]], schema: type[Query] | None = None
    ) -> Exchanges[dict[int, Message]]:
        """Send a query with these fields to each node; return the replies."""
        queries = []
        for node, fields in asked.items():
            kind = schema or (CollectFresh if "fresh" in fields else Collect)
            queries.append(self.now.query(COLLECT, node, kind, {"seal": self.sharing.seal, **fields}))
        self.now.report.waves += 1
        self.now.report.asked += len(queries)
        return (yield from self.now.ask(queries, self.sharing.timeout))

    def _held_of(self, relay: int, sources: Iterable[int]) -> dict[str, Any]:
        """Return the fields that ask a relay for what it holds of some sources, with the hash of each packet.

        By the hashes it leaves forgeries out: zeros for sources that announced none, nothing where no source did. A
        relay is told of its own packets only: with another's hash it could test guesses of what private symbols hide.
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
            most = PER_SOURCE * len(sharing.owners) + sharing.plan.needed
            # Each packet is measured by itself: between peers a relay may have been given one that is too long.
            items = take_bundle(reply.content, most=most, longest=1 << 32)
            report.count("hub_up", sum(map(len, items)))
            if header.fresh > len(items):
                raise Rejected(f"{header.fresh} of {len(items)} packets are said to be fresh")
            began, kept = time.perf_counter(), len(items) - header.fresh
            for data in items[:kept]:
                self.collector.add(0 if relay is None else relay, data, list(sources))
            for data in items[kept:]:
                self.collector.add(-1, data, list(own))
            report.decode_seconds += time.perf_counter() - began
            if relay is not None:
                self.count_held(relay, header.held)
            for reason in limited(header.refused, most, "reasons"):
                report.refuse(f"{name}: {reason}")
        except FedcompError as error:
            report.refuse(f"{name}: {error}")

    def count_held(self, relay: int, numbers: tuple[int, ...]) -> None:
        """Take a relay's word of what lies in its own store: whom to ask for, and what those sent who no longer say."""
        sharing = self.sharing
        if sharing.hub or relay in self.reported:
            return
        self.reported.add(relay)
        held = dict(zip(numbers[::2], numbers[1::2], strict=False))
        self.collector.holds(relay, held.keys())
        for source, size in held.items():
            # What an owner keeps of its own was never sent, and what no plan makes room for was not sent by it.
            known = source < len(sharing.owners) and size <= sharing.longest
            if known and source not in sharing.announced and sharing.owners[source].index != relay:
                self.now.count_peer(sharing.owners[source], [size])

    def payload(self, source: int) -> bytes:
        """Return what a source shared; raise what :meth:`fedcomp.coding.relay.Collector.payload` raises."""
        return self.collector.payload(source)

    def account(self) -> None:
        """Report packets received, innovative and dependent, and why others were thrown away."""
        report, counted = self.now.report, self.decoder
        report.received, report.innovative, report.dependent = counted.received, counted.innovative, counted.dependent
        for reason in counted.refused:
            report.refuse(reason)
