"""Relayed shards of group sums: an edge aggregator adds its members' updates exactly, and the sum is what is coded.

``CodedFedAvg(Compressed(FedAvg(...), FixedPoint(...)), groups=G)``. The members of a round, in partition order, form G
groups. Everybody trains and hands its reply to the group's aggregator, whose turn goes round in the group; the
aggregator adds integers (:class:`fedcomp.codecs.FixedPoint`), which loses nothing, and shares the sum like a relayed
update. From then on it, too, may vanish. The server decodes sums of groups and adds them; no float is added before the
last step, so how clients are grouped does not change a bit of the result.

Until it has shared, the aggregator is the one point its group depends on: lost before, the group is out of the round,
its members unacknowledged, and their updates come in later rounds. The aggregator sees its members' updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import Message, RecordDict

from fedcomp.codecs import FixedPoint, fixed_point_of
from fedcomp.coding.partial import PartialSum, empty_sum
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.coded import (
    MEMBER,
    SUM,
    GroupSum,
    GroupTraining,
    Handed,
    open_content,
    put_bundle,
    speaks,
    take_bundle,
)
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges
from fedcomp.rng import Key
from fedcomp.strategies.coded.sharing import Sharing
from fedcomp.strategies.coded.strategy import Member, Outcome, limited
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.replies import Rejected, agreeing

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

MAX_WEIGHT = 2**40
"""Weights at or above it are refused: 64-bit sums have room for many clients below it."""


def require_summable(inner: Strategy) -> tuple[Compressed, FixedPoint]:
    """Return the inner strategy and its integer codec.

    Raises
    ------
    ConfigError
        When updates of it cannot be added as integers.
    """
    if not isinstance(inner, Compressed):
        raise ConfigError(
            f"groups add integers, {type(inner).__name__} sends floating-point models; wrap it: "
            f"Compressed({type(inner).__name__}(...), FixedPoint(RandomK(1.0), clip=...))"
        )
    assert inner.summing is not None
    return inner, fixed_point_of(inner.codec)


def groups_of(members: list[Member], count: int) -> list[list[Member]]:
    """Return ``count`` groups of members that follow each other, their sizes as equal as can be; none is empty."""
    count = min(count, len(members))
    # Ends are rounded instead of sizes: these then differ by one at most.
    ends = [round(len(members) * (i + 1) / count) for i in range(count)]
    return [members[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass
class GroupSharing(Sharing):
    """One round in groups: ``owners`` are the aggregators.

    Attributes
    ----------
    groups : list of list of Member
    """

    groups: list[list[Member]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.now.inner, Compressed)
        self.inner = self.now.inner
        self.fixed = fixed_point_of(self.inner.codec)
        self.collection.fresh = {"sum": True}
        if self.inner.layout.exact:
            names = [spec.name for spec in self.inner.layout.exact][:3]
            raise ConfigError(
                f"the model has buffers that travel as values ({names}...); of these there is no group sum"
            )

    def share(self) -> Exchanges[None]:
        """Let everybody train and hand its reply to the aggregator; let those add and share."""
        now = self.now
        now.exclude_uncoded("no part of a group")
        for group, owner in zip(self.groups, self.owners, strict=True):
            for member in group:
                fields: dict[str, Any] = {"aggregator": owner.index, "max_payload": self.plan.max_payload}
                if self.seal:
                    fields["keys"] = owner.public
                if not self.hub:
                    fields["addresses"] = (owner.address,)
                now.plan(member, GroupTraining, fields)
        got = yield from now.ask((member.message for member in now.members), now.settings.share_timeout)
        bags: dict[int, list[bytes]] = {}
        for source, group in enumerate(self.groups):
            for member in group:
                try:
                    self._take_joined(source, member, got.get(member.node), bags)
                except FedcompError as error:
                    now.report.exclude(member.node, str(error))
        yield from self._add(bags)

    def _take_joined(self, source: int, member: Member, answer: Message | None, bags: dict[int, list[bytes]]) -> None:
        """Take what a member answered to training: its parcel for the aggregator, if that goes through the server."""
        reply = self.take_error(member, answer)
        if not speaks(reply.content):
            raise Rejected("it answered without coding, although it said hello")
        header = self.now.header(member, reply, Handed)
        for reason in limited(header.failed, 1, "reasons"):
            self.now.report.refuse(f"member {member.index}: {reason}")
        if not self.hub:
            self.now.count_peer(member, limited(header.sent, 1, "parcels handed over"))
            return
        owner = self.owners[source]
        # The aggregator's own reply never leaves its node.
        items = take_bundle(reply.content, most=0 if member is owner else 1, longest=self._longest_reply())
        self.now.report.count("hub_up", sum(map(len, items)))
        for data in items:
            self.now.parcel(data, MEMBER, member.index, (owner.index,), self._longest_reply())
            bags.setdefault(source, []).append(data)

    def _longest_reply(self) -> int:
        # One symbol of one is the whole payload: the bound of a packet, without the division by K.
        return self.plan.max_payload + (self.longest - self.plan.max_packet)

    def _add(self, bags: Mapping[int, list[bytes]]) -> Exchanges[None]:
        """Let the aggregators add and share."""
        spec = {
            "codec": self.inner.codec.to_config(),
            "tensors": [asdict(tensor) for tensor in self.inner.layout.tensors],
            "seed": self.inner.seed,
        }
        sequences = self.inner.sequences
        messages = []
        for source, group in enumerate(self.groups):
            owner = self.owners[source]
            if self.hub and owner.index not in self.alive:
                continue  # nothing reaches it, and nothing it holds was shared
            content = RecordDict()
            if self.hub:
                self.now.report.count("hub_down", put_bundle(content, bags.get(source, [])))
            fields = {
                **self.plan_of(source),
                "seal": self.seal,
                "index": owner.index,
                "members": tuple(member.index for member in group if member.index not in self.failed),
                "sequences": tuple(sequences[member.node] for member in group if member.index not in self.failed),
                "spec": spec,
                "weight": weight_key_of(self.inner.inner) or "",
            }
            messages.append(self.now.query(SUM, owner.node, GroupSum, fields, content))
        yield from self.spread((yield from self.now.ask(messages, self.timeout)))

    def take_ordinary(self, source: int, reply: Message) -> None:
        """Refuse a sum without coding."""
        raise Rejected("the aggregator answered without coding")

    def conclude(self) -> Outcome:
        """Add the groups' sums and let the inner strategy take the mean."""
        now, report = self.now, self.now.report
        total = empty_sum(self.fixed.count(self.inner.layout))
        contents: list[tuple[int, str, RecordDict]] = []
        for source, group in enumerate(self.groups):
            named = {member.index: member for member in group if member.index not in self.failed}
            try:
                partial = self._open(source, named)
                notes = [(named[part.index].node, "", _metrics(part.note)) for part in partial.parts]
                total = total.merged(partial)
            except FedcompError as error:
                for member in group:
                    if member.node not in report.excluded:
                        report.exclude(member.node, f"its group: {self.why(source, error)}")
                continue
            contents += notes
            summed = {part.index for part in partial.parts}
            for index, member in named.items():
                if index in summed:
                    report.included.append(member.node)
                    # Its own reply may have been lost, and its parcel have reached the aggregator all the same.
                    report.excluded.pop(member.node, None)
                else:
                    report.excluded.setdefault(member.node, "its aggregator did not get its update")
        self.account(nobody=not total.parts)
        if not total.parts:
            return None, None
        if total.weight <= 0:
            report.note("the contributors' weights sum to 0: the model is unchanged")
            return None, None
        try:
            self.fixed.require_room(total.weight)
        except ConfigError as error:
            # Weights are the clients' own: a claim of theirs must not end the run.
            report.note(f"{error}; the model is unchanged")
            return None, None
        # The stream of the clients' codecs: a support that they share is drawn again from it.
        key = Key(self.inner.seed, "uplink", now.number)
        weights = {now.members[part.index].partition: part.weight for part in total.parts}
        mean = self.fixed.place(total.integers, total.weight, self.inner.layout, key, weights)
        consumed = [(now.members[part.index].node, part.sequence, part.generation) for part in total.parts]
        # A report of its own: a member whose metrics do not fit is in the sum all the same, and not refused.
        scratch = Report(now.number)
        kept = agreeing([((node, content), name, content) for node, name, content in contents], scratch, lambda i: i[0])
        for reason in scratch.refused.values():
            report.note(f"metrics of a client are left out: {reason}")
        return self.inner.aggregate_sum(now.number, mean, total.weight, consumed, [content for _, content in kept])

    def _open(self, source: int, named: Mapping[int, Member]) -> PartialSum:
        """Return a group's sum, checked: nobody is in it who should not be, and no integer is larger than it can be."""
        count = self.fixed.count(self.inner.layout)
        partial = PartialSum.from_bytes(self.payload(source), count, named.keys())
        sequences = self.inner.sequences
        for part in partial.parts:
            if part.sequence != sequences[named[part.index].node]:
                raise Rejected(f"member {part.index} answers message {part.sequence}: a stale update")
            if part.weight >= MAX_WEIGHT or part.generation >= 2**63:
                raise Rejected(f"member {part.index} has weight {part.weight}, generation {part.generation}")
        # Every member's codec clips to its levels, so no honest sum exceeds them times its weight.
        if partial.largest > self.fixed.levels * partial.weight:
            raise Rejected(
                f"a sum of weight {partial.weight} holds {partial.largest}, beyond {self.fixed.levels} levels each"
            )
        return partial


def _metrics(note: bytes) -> RecordDict:
    """Return the metrics of a member, of which the aggregator sent nothing else."""
    return RecordDict(dict(open_content(note).metric_records.items()))
