"""Relayed shards of group sums: an edge aggregator adds its members' updates exactly, and the sum is what is coded.

``CodedFedAvg(Compressed(FedAvg(...), FixedPoint(...)), groups=G)``. The members of a round, in partition order, form G
groups. Everybody trains and hands its reply to the group's aggregator, whose turn goes round in the group; the
aggregator adds integers (:class:`fedcomp.codecs.FixedPoint`), which loses nothing, and shares the sum like a relayed
update. From then on it, too, may vanish. The server decodes sums of groups and adds them; no float is added before the
last step, so how clients are grouped does not change a bit of the result.

With ``groups=(8, 2)`` the aggregators of 8 groups hand their sums to 2 more, which add sums and share what comes out:
a tree of any depth, each level one exchange. Above the lowest level nobody knows what an integer means. A modular sum
(:class:`fedcomp.codecs.ModularSum`) stays within its modulus at every level; the dithers in it are taken off here, at
the root, once it is known whose updates came.

Until it has shared, an aggregator is the one point that everybody below depends on: lost before, all of them are out of
the round, unacknowledged, and their updates come in later rounds. Aggregators of the lowest level see updates, all
others sums of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Message, RecordDict

from fedcomp.codecs import FixedPoint, fixed_point_of
from fedcomp.coding.partial import PartialSum, empty_sum
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.coded import (
    GROUP,
    MEMBER,
    MOST_REASONS,
    SUM,
    GroupForward,
    GroupSum,
    GroupTraining,
    Handed,
    MergedForward,
    MergedSum,
    Query,
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

T = TypeVar("T")

Held = dict[int, list[bytes]]
"""Parcels that came through the server, by the member they are for."""


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


def groups_of(members: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return ``count`` groups of members that follow each other, their sizes as equal as can be; none is empty."""
    count = min(count, len(members))
    # Ends are rounded instead of sizes: these then differ by one at most.
    ends = [round(len(members) * (i + 1) / count) for i in range(count)]
    return [members[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True)
class Group:
    """Who adds what.

    Attributes
    ----------
    owner : Member
        The aggregator.
    members : tuple of Member
        Whose updates are in the sum.
    below : tuple of Group
        Who hands something to the aggregator; empty for a member by itself, whose sum is its reply.
    level : int
        How many levels are below.
    """

    owner: Member
    members: tuple[Member, ...]
    below: tuple[Group, ...] = ()
    level: int = 0


def tree_of(members: Iterable[Member], counts: Iterable[int], turn: int) -> list[list[Group]]:
    """Return the levels of a round's tree, each a list of groups, from the members by themselves upwards.

    Parameters
    ----------
    counts : iterable of int
        Aggregators of each level above the members.
    turn : int
        Whom the others depend on changes with it: a group's aggregator is each of its members in turn.
    """
    levels = [[Group(member, (member,)) for member in members]]
    for count in counts:
        # In a round of few clients a level above the lowest may have nothing to add.
        if len(levels) > 1 and count >= len(levels[-1]):
            continue
        parts = groups_of(levels[-1], count)
        levels.append(
            [
                Group(
                    owner=part[turn % len(part)].owner,
                    members=tuple(member for below in part for member in below.members),
                    below=tuple(part),
                    level=len(levels),
                )
                for part in parts
            ]
        )
        # The next level's turn passes on when this one's has gone round: everybody's comes at every level.
        turn //= max(map(len, parts))
    return levels


@dataclass
class GroupSharing(Sharing):
    """One round in groups: ``owners`` are the aggregators of the highest level.

    Attributes
    ----------
    levels : list of list of Group
        As :func:`tree_of` returns them.
    """

    levels: list[list[Group]] = field(default_factory=list)

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

    @property
    def groups(self) -> list[Group]:
        """The groups whose sums are shared."""
        return self.levels[-1]

    def share(self) -> Exchanges[None]:
        """Level by level, let everybody hand what it has to the aggregator above; let the highest ones share."""
        now = self.now
        now.exclude_uncoded("no part of a group")
        held: Held = {}
        for level, above in itertools.pairwise(self.levels):
            asked = [
                message
                for parent in above
                for child in parent.below
                if (message := self._hand(child, parent.owner, held)) is not None
            ]
            got = yield from now.ask(asked, self.timeout if level[0].level else now.settings.share_timeout)
            held = {}
            for parent in above:
                for child in parent.below:
                    try:
                        self._take_handed(child, parent.owner, got.get(child.owner.node), held)
                    except FedcompError as error:
                        self._lose(child, error)
        sums = (
            self._add(group, self.plan_of(source), held, GroupSum, MergedSum)
            for source, group in enumerate(self.groups)
        )
        yield from self.spread((yield from now.ask(filter(None, sums), self.timeout)))

    def _hand(self, child: Group, to: Member, held: Held) -> Message | None:
        """Return the message that asks for what a member or group has to be handed to an aggregator."""
        fields: dict[str, Any] = {"aggregator": to.index, "max_payload": self.plan.max_payload}
        fields |= self.now.peers(child.owner, [to], seal=self.seal)
        if not child.level:
            return self.now.plan(child.owner, GroupTraining, fields)
        return self._add(child, fields, held, GroupForward, MergedForward)

    def _add(
        self, group: Group, fields: dict[str, Any], held: Held, replies: type[Query], sums: type[Query]
    ) -> Message | None:
        """Return the message that asks an aggregator to add; one schema is for replies, the other for sums."""
        if self.hub and group.owner.index not in self.alive:
            return None  # nothing reaches it, and nothing it holds was shared
        content = RecordDict()
        if self.hub or group.owner.index in held:
            self.now.report.count("hub_down", put_bundle(content, held.get(group.owner.index, [])))
        # Of those that failed nothing may be counted; a sum with one of them in it is of no use.
        below = [child for child in group.below if child.owner.index not in self.failed]
        parts = [[member for member in child.members if member.index not in self.failed] for child in below]
        members = [member for part in parts for member in part]
        fields |= {
            "seal": self.seal,
            "index": group.owner.index,
            "members": tuple(member.index for member in members),
            "sequences": tuple(self.inner.sequences[member.node] for member in members),
        }
        if group.level == 1:
            layout = [asdict(tensor) for tensor in self.inner.layout.tensors]
            spec = {"codec": self.inner.codec.to_config(), "tensors": layout, "seed": self.inner.seed}
            fields |= {"spec": spec, "weight": weight_key_of(self.inner.inner) or ""}
            return self.now.query(SUM, group.owner.node, replies, fields, content)
        fields |= {
            "level": group.level,
            "sources": tuple(child.owner.index for child in below),
            "sizes": tuple(map(len, parts)),
            "count": self.fixed.count(self.inner.layout),
            "levels": self.fixed.levels,
            "modulus": self.fixed.m,
        }
        return self.now.query(SUM, group.owner.node, sums, fields, content)

    def _take_handed(self, child: Group, to: Member, answer: Message | None, held: Held) -> None:
        """Take what a member or aggregator answered: its parcel for the one above where the server carries it."""
        member = child.owner
        reply = self.take_error(member, answer)
        if not speaks(reply.content):
            raise Rejected("it answered without coding, although it said hello")
        header = self.now.header(member, reply, Handed)
        for reason in limited(header.failed, MOST_REASONS if child.level else 1, "reasons"):
            self.now.report.refuse(f"member {member.index}: {reason}")
        # What an aggregator has itself never leaves its node.
        free = set() if member is to else {to.index}
        if not self.hub:
            self.now.count_peer(member, limited(header.sent, 1, "parcels handed over"))
            free = self.now.take_missed(member, header, {to.index: to}, seal=self.seal)
        items = take_bundle(reply.content, most=len(free), longest=self._longest_reply())
        self.now.report.count("hub_up", sum(map(len, items)))
        for data in items:
            kind = GROUP + child.level if child.level else MEMBER
            self.now.parcel(data, kind, member.index, free, self._longest_reply())
            held.setdefault(to.index, []).append(data)

    def _lose(self, child: Group, error: Exception) -> None:
        """Report that nothing came of a member, or of all members of a group and why; a first reason stays."""
        for member in child.members:
            reason = f"its group, of aggregator {child.owner.index}: {error}" if child.level else str(error)
            if member.node not in self.now.report.excluded:
                self.now.report.exclude(member.node, reason)

    def _longest_reply(self) -> int:
        # One symbol of one is the whole payload: the bound of a packet, without the division by K.
        return self.plan.max_payload + (self.longest - self.plan.max_packet)

    def take_ordinary(self, source: int, reply: Message) -> None:
        """Refuse a sum without coding."""
        raise Rejected("the aggregator answered without coding")

    def conclude(self) -> Outcome:
        """Add the groups' sums and let the inner strategy take the mean."""
        now, report = self.now, self.now.report
        total = empty_sum(self.fixed.count(self.inner.layout))
        contents: list[tuple[int, str, RecordDict]] = []
        for source, group in enumerate(self.groups):
            named = {member.index: member for member in group.members if member.index not in self.failed}
            try:
                data = self.payload(source)
                sequences = {index: self.inner.sequences[member.node] for index, member in named.items()}
                partial = PartialSum.from_bytes(data, total.integers.size, sequences, self.fixed.levels)
                notes = [(named[part.index].node, "", _metrics(part.note)) for part in partial.parts]
                total = total.merged(partial)
            except FedcompError as error:
                self._lose(group, Rejected(self.why(source, error)))
                continue
            contents += notes
            report.sum_bytes["members"] = report.sum_bytes.get("members", 0) + partial.member_bytes
            report.sum_bytes["vectors"] = report.sum_bytes.get("vectors", 0) + len(data) - partial.member_bytes
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
            # Weights are the clients' own: a claim of theirs must not end a run that has learnt something. One that
            # would never make a step is an error.
            if not any(earlier.used for earlier in self.inner.reports.values()):
                raise
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


def _metrics(note: bytes) -> RecordDict:
    """Return the metrics of a member, of which the aggregator sent nothing else."""
    return RecordDict(dict(open_content(note).metric_records.items()))
