"""One round of relayed shards: what was shared, what was decoded, and what is handed to the inner strategy.

See :mod:`fedcomp.strategies.coded.relay` for the exchanges, :mod:`fedcomp.strategies.coded.collecting` for the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flwr.app import Message, RecordDict

from fedcomp.coding.packet import DIGEST_BYTES
from fedcomp.coding.relay import Commitment, RelayPlan
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES
from fedcomp.errors import FedcompError
from fedcomp.flower.coded import (
    CODED,
    PUT,
    SHARD,
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
from fedcomp.strategies.coded.collecting import Collection
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
    announced : set of int
        Sources whose owner itself said what it sent.
    failed : set of int
        Members that say they failed: their memory may be as it was before, so nothing of them may be counted.
    hashes : dict of int to list of bytes
        Hashes of packets 0, 1, ... by source whose owner announced them. Between peers only: through the hub the server
        sees who sent a parcel.
    kind : int
        Kind of the parcels.
    numbers : dict
        Fields by which every plan of the round says how payloads are coded.
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
    announced: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    kind: int = SHARD
    training: ClassVar[type[Indexed]] = RelayTraining
    announces: ClassVar[bool] = True
    """Whether the packets that relays hand out are those that were shared: then their hashes are announced."""

    def __post_init__(self) -> None:
        self.hub = self.now.settings.transport == "hub"
        self.timeout = self.now.settings.collect_timeout
        self.longest = self.plan.max_packet + (OVERHEAD if self.seal else 0) + HEADER_BYTES
        names = ("code", "symbols", "shards", "private", "seed", "max_payload")
        self.numbers = {name: getattr(self.plan, name) for name in names}
        self.collection = Collection(self)
        report = self.now.report
        report.planned = report.relays = len(self.now.members)
        report.symbols, report.shards, report.private = self.plan.symbols, self.plan.shards, self.plan.private

    def share(self) -> Exchanges[None]:
        """Let everybody train and share; put into the relays what has to go through the server."""
        now = self.now
        for source, member in enumerate(self.owners):
            now.plan(member, self.training, self.plan_of(source))
        got = yield from now.ask(now.messages, now.settings.share_timeout)
        nodes = [message.metadata.dst_node_id for message in now.uncoded]
        self.ordinary = [got[node] for node in nodes if node in got]
        yield from self.spread(got)

    def spread(self, got: Mapping[int, Message]) -> Exchanges[None]:
        """Take what every owner shared, and put it into the relays where it came through the server."""
        bags: dict[int, list[bytes]] = {}
        for source, member in enumerate(self.owners):
            try:
                self._take_shared(source, got.get(member.node), bags)
            except FedcompError as error:
                # The owner's own answer is of no use; its shards may be at the relays all the same.
                self.reasons[source] = str(error)
                if self.hub:
                    self.collection.give_up(source)
        if self.hub:
            yield from self._put(bags)

    def plan_of(self, source: int) -> dict[str, Any]:
        """Return the plan for the owner of a source: who keeps its shards 0, 1, ..."""
        relays = [self.now.members[i] for i in self.holders(source)]
        fields: dict[str, Any] = {
            **self.numbers,
            "source": source,
            "relays": tuple(relay.index for relay in relays),
        }
        if self.seal:
            fields["keys"] = b"".join(relay.public for relay in relays)
        if not self.hub:
            fields["addresses"] = tuple(relay.address for relay in relays)
        return fields

    def holders(self, source: int) -> list[int]:
        """Return the relays that keep shards 0, 1, ... of a source."""
        return self.plan.holders(source, len(self.now.members))

    def take_error(self, member: Member, reply: Message | None) -> Message:
        """Return an answer to training that is no error; note what an error says of its sender.

        Raises
        ------
        Rejected
            When there is no answer, or it is an error.
        """
        if reply is None:
            raise Rejected("no reply in time")
        if reply.has_error():
            self.errors[member.index] = reply
            if reply.error.code not in GONE:
                self.failed.add(member.index)
            raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
        self.alive.add(member.index)
        return reply

    def _take_shared(self, source: int, answer: Message | None, bags: dict[int, list[bytes]]) -> None:
        """Take what the owner of a source answered."""
        member, report = self.owners[source], self.now.report
        if answer is not None and answer.has_error() and answer.error.code not in GONE:
            # What a node shared that failed itself must not be counted: its memory may be as it was before.
            self.alive.add(member.index)
            self.collection.give_up(source)
        reply = self.take_error(member, answer)
        if not speaks(reply.content):
            self.take_ordinary(source, reply)
            return
        header = self.now.header(member, reply, Shared)
        if header.payload > self.plan.max_payload:
            raise Rejected(f"a payload of {header.payload} bytes, at most {self.plan.max_payload} are accepted")
        hashes = []
        if self.announces and not self.hub:
            hashes = [header.hashes[i : i + DIGEST_BYTES] for i in range(0, len(header.hashes), DIGEST_BYTES)]
            if len(header.hashes) != DIGEST_BYTES * self.plan.shards:
                raise Rejected(
                    f"{len(header.hashes)} bytes of hashes for {self.plan.shards} packets, {DIGEST_BYTES} each"
                )
            self.hashes[source] = hashes
        self.collection.collector.expect(source, Commitment(header.payload, header.digest), hashes)
        if self.hub:
            self._take_parcels(source, reply.content, bags)
        else:
            self.announced.add(source)
            self.now.count_peer(member, limited(header.sent, self.plan.shards, "parcels handed over"))
        for reason in limited(header.failed, self.plan.shards, "reasons"):
            report.refuse(f"source {source}: {reason}")

    def take_ordinary(self, source: int, reply: Message) -> None:
        """Take a reply without coding as what it is."""
        self.ordinary.append(reply)
        self.now.report.direct[self.owners[source].node] = "it answered without coding, although it said hello"
        self.collection.give_up(source)

    def _take_parcels(self, source: int, content: RecordDict, bags: dict[int, list[bytes]]) -> None:
        """Sort a source's parcels by relay; each is refused by itself."""
        free = set(self.holders(source))
        items = take_bundle(content, most=len(free), longest=self.longest)
        self.now.report.count("hub_up", sum(map(len, items)))
        for data in items:
            try:
                parcel = self.now.parcel(data, self.kind, source, free, self.longest)
            except FedcompError as error:
                self.now.report.refuse(f"source {source}: {error}")
                continue
            free.remove(parcel.destination)
            bags.setdefault(parcel.destination, []).append(data)

    def _put(self, bags: Mapping[int, list[bytes]]) -> Exchanges[None]:
        """Forward the parcels to those relays that are there."""
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
        for source, member in enumerate(self.owners):
            if member.node in report.direct:
                continue
            try:
                content = open_content(self.payload(source))
                # Whatever a client calls so is not the app's.
                for name in [k for k in content if k.startswith(CODED)]:
                    del content[name]
                replies.append(Message(content, reply_to=member.message))
                report.included.append(member.node)
            except FedcompError as error:
                report.exclude(member.node, self.why(source, error))
                if member.index in self.errors:
                    replies.append(self.errors[member.index])
        self.account(nobody=not report.included and not self.ordinary)
        return self.now.aggregate(replies)

    def payload(self, source: int) -> bytes:
        """Return what a source shared; raise a :class:`FedcompError` where it was not decoded."""
        return self.collection.payload(source)

    def account(self, *, nobody: bool) -> None:
        """Put what was counted into the report; ``nobody``: that no update was decoded at all."""
        self.collection.account()
        if nobody:
            self.now.report.note(
                f"none of {len(self.owners)} sources could be decoded (K={self.plan.needed} of {self.plan.shards}): "
                "the model is unchanged"
            )

    def why(self, source: int, error: Exception) -> str:
        """Return why a source is not in the result."""
        known = self.reasons.get(source)
        return str(error) if known is None else f"{known}; {error}"
