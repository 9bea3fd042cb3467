"""Coded sums: the server decodes what its clients sent together, and nobody's own update. The server half.

Every client cuts its update, integers on a shared grid, into shards, one for every relay, and the relays, which are the
clients again, add the shards of all; the shard of the sum is the sum of the shards (:mod:`fedcomp.coding.sumcode`).
What the server receives is (K + T) / K updates a round, however many clients take part.

A round
-------
1. *Share*: train; one sealed shard for every relay, through the server or from client to client. The reply itself holds
   no update, no weight and no metric.
2. *Report*: every relay says what it holds: in answer to what the server forwards, or asked on its own.
3. *Freeze*: contributors U and relays R that hold all of U (:func:`fedcomp.coding.sumcode.choose_set`). Who is in
   neither is a loss. Contributors whose reply was lost may be in U: their shards say which message they answer.
4. *Add*: relays of R answer with one sum over U each, as many as are needed, and with no second one in this round.
5. Decode, check, mean; ``Compressed.aggregate_sum`` makes the step and acknowledges U, so that error feedback is exact:
   whoever is not in U keeps its update and sends it in later rounds.

With ``mode="mask"`` the clients upload their update in full, masked, and the relays add shards of the masks.

What it does not protect from: a server that names keys of its own, relays that answer twice, clients that lie, a set U
of which the server owns all but one, and what the sum itself says. See docs/systems/sumcode.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from fedcomp.codecs import ModularSum, fixed_point_of
from fedcomp.coding.errors import CorruptGeneration
from fedcomp.coding.plan import success
from fedcomp.coding.prime import FIELDS, Residues
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.sumcode import Summed, SumPlan, choose_set, decode, prime_for
from fedcomp.coding.sumshards import HEADER_BYTES, MASKED, SUM, TAG_BYTES, HeldTags, Shard, read_tag, set_digest
from fedcomp.coding.transport import HEADER_BYTES as PARCEL_BYTES
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.coded import (
    COLLECT,
    MASKED_UPDATE,
    PUT,
    SUM_SHARD,
    Header,
    SumHeld,
    SumQuestion,
    SumReport,
    SumShared,
    SumTraining,
    put_bundle,
    take_bundle,
)
from fedcomp.flower.coded import SUM as ASK_SUM
from fedcomp.flower.payload import take_frame
from fedcomp.flower.protocol import Announcement
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges
from fedcomp.rng import Key
from fedcomp.stateful import Stateful
from fedcomp.strategies.coded.settings import CodedSettings, SumOptions
from fedcomp.strategies.coded.strategy import CodedRound, Member, Outcome, limited
from fedcomp.strategies.hooked import Hooked
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.replies import GONE, Rejected, agreeing, strip

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy


DEFAULT_LOSS: Final = 0.1
"""Fraction of relays that is expected to vanish, unless ``loss`` is given."""

CUT_STEPS: Final = 1000
"""The share of values at the clip is summed in steps of one in so many, fewer where the field is small."""


class SumCode(Stateful):
    """The construction ``"sumcode"`` of :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`.

    ``inner`` is :class:`fedcomp.strategies.compressed.Compressed` around one of Flower's weighted means, with
    :class:`fedcomp.codecs.FixedPoint` as (or in) its codec. Its own options are
    :class:`fedcomp.strategies.coded.settings.SumOptions`.

    ``symbols`` is K, 0 for as many as ``loss`` and ``target`` allow; ``threshold`` is T; ``shards`` is N, 0 for all.

    Raises
    ------
    ConfigError
        When the inner strategy or the codec cannot be summed, or an option makes no sense.
    """

    def __init__(self, settings: CodedSettings, inner: Strategy) -> None:
        self.options = settings.own(SumOptions)
        if not isinstance(inner, Hooked):
            raise ConfigError(
                f"a coded sum adds integers, {type(inner).__name__} sends floating-point models; wrap it: "
                f"Compressed({type(inner).__name__}(...), FixedPoint(RandomK(1.0), clip=...))"
            )
        mean = inner.summing
        self.settings = settings
        self.inner = inner
        self.codec = fixed_point_of(inner.codec)
        if isinstance(self.codec, ModularSum) and self.options.weighted and weight_key_of(mean) is not None:
            raise ConfigError(
                "of a coded sum the server knows no single weight, by which it would have to take off the dithers of "
                f"{self.codec!r}; set weighted=False, or use FixedPoint, which has none"
            )
        if settings.shards and settings.symbols + settings.threshold > settings.shards:
            raise ConfigError(
                f"shards={settings.shards} are fewer than the {settings.symbols + settings.threshold} that decoding "
                "needs"
            )
        if settings.symbols == 1 and not settings.threshold:
            raise ConfigError(
                "symbols=1 with threshold=0 makes every share the update itself, which each relay could read; set "
                "threshold >= 1, so that T relays together learn nothing, or symbols >= 2"
            )
        if self.options.mode == "mask" and not settings.threshold:
            raise ConfigError("mode='mask' hides updates behind masks that T relays must not know: set threshold >= 1")
        self.weight_key = weight_key_of(mean) if self.options.weighted else None
        self.seal = settings.seal is not False

    def frozen(self, number: int, nodes: list[int]) -> None:
        """Take note of whose sum is about to be asked for."""

    def divisor(self, summed: Summed) -> float:
        """Return what makes the sum a mean."""
        return summed.weight

    def describe(self) -> str:
        """Return one line for the log."""
        s = self.settings
        return (
            f"sum of {'masks' if self.options.mode == 'mask' else 'shares'}, {self.codec!r}, K={s.symbols or 'auto'}, "
            f"N={s.shards or 'all'}, T={s.threshold}, transport {s.transport}, "
            f"{'sealed' if self.seal else 'in the clear'}"
        )

    def round(self, now: CodedRound) -> Exchanges[Outcome]:
        """Share, freeze, add, decode; the inner strategy takes the mean in one step."""
        self._refuse_buffers()
        now.exclude_uncoded("not in the sum")
        try:
            plan = self.plan(len(now.members), now.number)
            odds = success(plan.needed, plan.relays, self._loss, None)
            if not self.settings.symbols and odds < self.settings.target:
                now.report.note(f"{plan.relays} relays decode with probability {odds:.3g}: not even one piece is safer")
            if plan.needed == 1:
                now.report.note(
                    f"{plan.relays} relays leave one piece and no random one: a share is the update itself, which its "
                    "relay could read; set threshold >= 1"
                )
            summing = _Summing(now, self, plan)
            yield from summing.share()
            yield from summing.ask_what_is_held()
            summing.freeze()
            self.frozen(now.number, [now.members[source].node for source in summing.chosen])
            yield from summing.collect()
            return summing.conclude()
        except _Skipped as reason:
            now.skip(str(reason))
            return self.inner.aggregate_sum(now.number, None, 0.0, ())

    def plan(self, clients: int, number: int) -> SumPlan:
        """Return the plan of a round with so many clients.

        Raises
        ------
        _Skipped
            When these are too few: another round may have more.
        ConfigError
            When a sum over them would wrap around.
        """
        s = self.settings
        relays = s.shards or clients
        least = self.options.min_contributors
        if clients < max(least, relays, s.symbols + s.threshold, 1):
            raise _Skipped(
                f"{clients} clients take part; the sum needs {least} contributors and {relays} relays, of which "
                f"{max(1, s.symbols) + s.threshold} decode"
            )
        max_weight = 1
        if self.weight_key is not None:
            # Where nobody sets a limit, the largest weight for which the largest field still has room.
            room = FIELDS[-1].half // (clients * self.codec.levels)
            max_weight = self.options.max_weight or max(1, room)
        prime = prime_for(clients, self.codec.levels, max_weight)
        return SumPlan(
            field=prime,
            size=self.codec.count(self.inner.layout),
            bound=self.codec.levels,
            contributors=clients,
            relays=relays,
            symbols=s.symbols or self._symbols(relays),
            threshold=s.threshold,
            max_weight=max_weight,
            # As fine as the field has room for, since all clients' shares are added in it.
            extras=(min(CUT_STEPS, prime.half // clients),),
            seed=Key(s.seed, "sumcode", number).u64(),
            least=least,
            mode=self.options.mode,
        )

    @property
    def _loss(self) -> float:
        return DEFAULT_LOSS if self.settings.loss is None else self.settings.loss

    def _symbols(self, relays: int) -> int:
        """Return the largest K with which enough relays stay with the wanted probability.

        Raises
        ------
        _Skipped
            When not even one piece is safe.
        """
        s, loss = self.settings, self._loss
        # More pieces mean shorter shards, so the largest K that is safe enough is the cheapest.
        for symbols in range(relays - s.threshold, 0, -1):
            if success(symbols + s.threshold, relays, loss, None) >= s.target:
                return symbols
        # One piece is the most that can be done; the round's report says how likely it is enough.
        if relays > s.threshold:
            return 1
        raise _Skipped(f"{relays} relays leave no piece beside {s.threshold} random ones")

    def _refuse_buffers(self) -> None:
        exact = [t.name for t in self.inner.layout.exact]
        if exact:
            raise ConfigError(
                f"the model has {len(exact)} buffer(s) that travel as values, first {exact[0]!r}; of these a coded sum "
                "shows none. Use a model without running statistics and counters (group or layer normalisation), or "
                "construction='relay'"
            )


class _Skipped(Exception):
    """The round comes to nothing; the message says why."""


@dataclass
class _Summing:
    """The moving parts of one round.

    Attributes
    ----------
    relays : list of Member
        Row i of the code is relay i's.
    expected : dict of int to int
        The sequence number of each member's training message.
    alive, withdrawn : set of int
        Members that answered in their own name, and those of these that answered with an error.
    tags : dict of int to bytes
        By source, of the encodings that are meant.
    held : dict of int to dict
        By relay that reported, the tags it holds by source.
    masked : dict of int to ndarray
        In mode "mask", the uploads by source.
    chosen, qualified : tuple of int
        U and R.
    """

    now: CodedRound
    construction: SumCode
    plan: SumPlan
    expected: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    withdrawn: set[int] = field(default_factory=set)
    tags: dict[int, bytes] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    contents: dict[int, RecordDict] = field(default_factory=dict)
    bags: dict[int, list[bytes]] = field(default_factory=dict)
    held: dict[int, dict[int, tuple[bytes, ...]]] = field(default_factory=dict)
    masked: dict[int, Residues] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()
    qualified: tuple[int, ...] = ()
    name: bytes = b""
    summed: Summed | None = None

    def __post_init__(self) -> None:
        members, plan, report = self.now.members, self.plan, self.now.report
        self.hub = self.now.settings.transport == "hub"
        self.timeout = self.now.settings.collect_timeout
        self.seal = self.construction.seal
        # With fewer relays than clients the work goes round, as do the stores it fills.
        start = (self.now.number - 1) * plan.relays if plan.relays < len(members) else 0
        self.relays = [members[(start + i) % len(members)] for i in range(plan.relays)]
        self.expected = {member.index: _sequence_of(member.message) for member in members}
        self.longest = plan.shard_bytes + HEADER_BYTES + PARCEL_BYTES + (OVERHEAD if self.seal else 0)
        report.planned, report.relays, report.shards = len(members), plan.relays, plan.relays
        report.symbols, report.threshold = plan.symbols, plan.threshold

    # Sharing.

    def share(self) -> Exchanges[None]:
        """Let everybody train and share."""
        fields = self._brief() | {
            "relays": tuple(relay.index for relay in self.relays),
            "weight": self.construction.weight_key or "",
            "metrics": self.construction.options.metrics,
        }
        messages = [
            self.now.plan(member, SumTraining, fields | self.now.peers(member, self.relays, seal=self.seal))
            for member in self.now.members
        ]
        got = yield from self.now.ask(messages, self.now.settings.share_timeout)
        for member in self.now.members:
            reply = got.get(member.node)
            try:
                if reply is None:
                    raise Rejected("no reply in time")
                self._take_shared(member, reply)
            except FedcompError as error:
                self.reasons[member.index] = str(error)

    def _brief(self) -> dict[str, Any]:
        return {"plan": self.plan.config(), "seal": self.seal}

    def _take_shared(self, member: Member, reply: Message) -> None:
        if not reply.has_error() or reply.error.code not in GONE:
            self.alive.add(member.index)
        if reply.has_error() and reply.error.code not in GONE:
            # The app raised, a mod refused, the process crashed: what the client remembers of its shards may be undone.
            # Peers may hold them, but nobody knows whether it would send the same update again.
            self.withdrawn.add(member.index)
        header = self.now.header(member, reply, SumShared)
        tag = header.tag
        self._require_sequence(member.index, tag)
        if self.construction.options.mode == "mask":
            self._take_masked(member, reply.content, tag)
        relays = dict(enumerate(self.relays))
        if self.hub:
            self._take_parcels(member, reply.content, set(relays))
        else:
            self.now.count_peer(member, limited(header.sent, len(self.relays), "parcels handed over"))
            try:
                missed = self.now.take_missed(member, header, relays, seal=self.seal)
                self._take_parcels(member, reply.content, missed)
            except FedcompError as error:
                # What its links took is at the relays all the same.
                self.now.report.refuse(f"source {member.index}: {error}")
        for reason in limited(header.failed, len(self.relays), "reasons"):
            self.now.report.refuse(f"source {member.index}: {reason}")
        self.tags[member.index] = tag
        self.contents[member.index] = strip(reply.content)

    def _require_sequence(self, source: int, tag: bytes) -> None:
        sequence, generation = read_tag(tag)
        if sequence != self.expected[source]:
            raise Rejected(f"the shards answer message {sequence}, expected {self.expected[source]}: stale ones")
        if generation > sequence:
            raise Rejected(f"the shards are of a memory that began with message {generation}, after {sequence}")

    def _take_masked(self, member: Member, content: RecordDict, tag: bytes) -> None:
        data = take_frame(content, MASKED_UPDATE)
        if data is None:
            raise Rejected("the reply holds no masked update")
        shard = Shard.from_bytes(data, self.plan)
        if (shard.kind, shard.source, shard.tag) != (MASKED, member.index, tag):
            raise Rejected("the masked update is another one than the reply's header says")
        self.now.report.count("hub_up", len(data))
        self.masked[member.index] = shard.body

    def _take_parcels(self, member: Member, content: RecordDict, free: set[int]) -> None:
        """Sort a member's parcels by relay; one that is refused costs all of them. ``free``: for whom they may be."""
        items = take_bundle(content, most=len(free), longest=self.longest)
        self.now.report.count("hub_up", sum(map(len, items)))
        mine = {}
        for data in items:
            parcel = self.now.parcel(data, SUM_SHARD, member.index, free, self.longest)
            # A second parcel for the same relay is refused by parcel().
            free.remove(parcel.destination)
            mine[parcel.destination] = data
        for row, data in mine.items():
            self.bags.setdefault(row, []).append(data)

    # What relays hold.

    def ask_what_is_held(self) -> Exchanges[None]:
        """Forward the parcels that came through the server, and ask every relay what it holds."""
        unknown = sorted(set(range(len(self.now.members))) - self.tags.keys())
        messages, rows = [], {}
        for row, relay in enumerate(self.relays):
            # Through the hub a relay holds nothing yet. Between peers one whose reply was lost may hold shards all the
            # same.
            if self.hub and relay.index not in self.alive:
                continue
            content, puts = RecordDict(), self.hub or row in self.bags
            if puts:
                self.now.report.count("hub_down", put_bundle(content, self.bags.get(row, [])))
            fields = {**self._brief(), "row": row, "unknown": tuple(unknown)}
            messages.append(self.now.query(PUT if puts else COLLECT, relay.node, SumReport, fields, content))
            rows[relay.node] = row
        for node, reply in (yield from self.now.ask(messages, self.timeout)).items():
            try:
                self._take_report(rows[node], reply)
            except FedcompError as error:
                self.now.report.refuse(f"relay {rows[node]}, report: {error}")

    def _take_report(self, row: int, reply: Message) -> None:
        header, most = self.now.answer(reply, SumHeld), 4 * len(self.now.members)
        sources = limited(header.sources, most, "encodings")
        if max(sources, default=0) >= self.plan.contributors:
            raise Rejected(f"encodings of contributor {max(sources)} of {self.plan.contributors}")
        details = tuple((s, header.tags[TAG_BYTES * i : TAG_BYTES * (i + 1)]) for i, s in enumerate(sources))
        report = HeldTags(header.bitmap, header.digest, details)
        self.held[row] = report.tags(self.plan, self.tags)
        for reason in limited(header.refused, most, "reasons"):
            self.now.report.refuse(f"relay {row}: {reason}")
        if not self.hub:
            for source, size in dict(zip(sources, header.sizes, strict=False)).items():
                if source not in self.tags:
                    self.now.count_peer(self.now.members[source], [size])

    # The set.

    def freeze(self) -> None:
        """Decide once which encodings are added, by which relays.

        Raises
        ------
        _Skipped
            When too little is held in common.
        """
        report = self.now.report
        matrix = np.zeros((self.plan.relays, self.plan.contributors), np.bool_)
        for source in range(self.plan.contributors):
            found = Counter(tag for tags in self.held.values() for tag in set(tags.get(source, ())))
            if not found or source in self.withdrawn:
                continue
            # The encoding most relays hold; among equals the one its contributor announced.
            tag = max(found, key=lambda tag: (found[tag], tag == self.tags.get(source), tag))
            try:
                self._require_sequence(source, tag)
                unmasked = source not in self.masked or tag != self.tags.get(source)
                if self.construction.options.mode == "mask" and unmasked:
                    raise Rejected("its masked update did not arrive")
            except Rejected as error:
                self.reasons.setdefault(source, str(error))
                continue
            self.tags[source] = tag
            for row, tags in self.held.items():
                matrix[row, source] = tag in tags.get(source, ())
        self.chosen, self.qualified = choose_set(matrix, self.plan.needed)
        for member in self.now.members:
            if member.index not in self.chosen:
                count = int(matrix[:, member.index].sum())
                known = self.reasons.get(member.index)
                short = f"{count} relays hold its shards, {self.plan.needed} that hold everybody's are needed"
                report.exclude(member.node, short if known is None else f"{known}; {short}")
        if len(self.chosen) < self.plan.least:
            raise _Skipped(
                f"{len(self.held)} of {self.plan.relays} relays reported, and {self.plan.needed} of them hold the same "
                f"{len(self.chosen)} contributors; at least {self.plan.least} are needed (min_contributors)"
            )
        # Relays compare this name with what they hold, and answer for one name a round only.
        self.name = set_digest(self.plan, self.now.number, {source: self.tags[source] for source in self.chosen})

    # Adding.

    def collect(self) -> Exchanges[None]:
        """Ask as many relays as are needed for their sums, others for those that stay away, and decode.

        Raises
        ------
        _Skipped
            When too few answer, or what they answer contradicts itself.
        """
        start = self.now.number % len(self.qualified)
        left = [*self.qualified[start:], *self.qualified[:start]]  # the work goes round
        sums: dict[int, Residues] = {}
        contradiction = ""
        while self.summed is None and left:
            # After a contradiction everybody is asked: with enough of them the wrong one can be found.
            wanted = len(left) if contradiction else self.plan.needed - len(sums)
            batch, left = left[:wanted], left[wanted:]
            yield from self._ask(batch, sums)
            if len(sums) < self.plan.needed:
                continue
            try:
                self._decode(sums)
            except CorruptGeneration as error:
                contradiction = str(error)
                self.now.report.note(contradiction)
        if self.summed is None:
            raise _Skipped(
                contradiction
                or f"{len(sums)} of {len(self.qualified)} relays answered with their sums, "
                f"{self.plan.needed} are needed"
            )

    def _ask(self, batch: list[int], sums: dict[int, Residues]) -> Exchanges[None]:
        report = self.now.report
        bits = np.zeros(self.plan.contributors, np.bool_)
        bits[list(self.chosen)] = True
        # A relay that holds one encoding of a source knows which is meant; tags travel for the other sources only.
        ambiguous = [s for s in self.chosen if any(len(tags.get(s, ())) > 1 for tags in self.held.values())]
        fields = self._brief() | {
            "chosen": np.packbits(bits).tobytes(),
            "set": self.name,
            "named": tuple(ambiguous),
            "tags": b"".join(self.tags[s] for s in ambiguous),
        }
        rows = {self.relays[row].node: row for row in batch}
        messages = [self.now.query(ASK_SUM, node, SumQuestion, {**fields, "row": row}) for node, row in rows.items()]
        replies = yield from self.now.ask(messages, self.timeout)
        report.waves += 1
        report.asked += len(batch)
        for node, reply in replies.items():
            row = rows[node]
            try:
                self.now.answer(reply, Header)
                (data,) = take_bundle(reply.content, most=1, longest=self.longest) or [b""]
                shard = Shard.from_bytes(data, self.plan)
                if (shard.kind, shard.relay, shard.source, shard.tag) != (SUM, row, len(self.chosen), self.name):
                    raise Rejected("the sum is of another relay or another set")
            except FedcompError as error:
                report.refuse(f"relay {row}, sum: {error}")
                continue
            report.count("hub_up", len(data))
            report.received += 1
            sums[row] = shard.body

    def _decode(self, sums: Mapping[int, Residues]) -> None:
        began = time.perf_counter()
        masked = None
        if self.construction.options.mode == "mask":
            masked = self.plan.field.sum([self.masked[source] for source in self.chosen])
        try:
            self.summed = decode(self.plan, sums, masked, len(self.chosen))
        finally:
            # Of a failure too: leaving out relay after relay is what takes longest.
            self.now.report.decode_seconds += time.perf_counter() - began
        self.now.report.innovative = self.plan.needed
        self.now.report.dependent = len(sums) - self.plan.needed
        for row in self.summed.left_out:
            self.now.report.note(f"the sum of relay {row} contradicts the others and was left out")

    # The end.

    def conclude(self) -> Outcome:
        """Hand the mean to the inner strategy and acknowledge the contributors."""
        assert self.summed is not None
        construction, report, summed = self.construction, self.now.report, self.summed
        if summed.weight <= 0:
            raise _Skipped("the contributors' weights sum to 0")
        inner, codec = construction.inner, construction.codec
        # The stream of the clients' codecs: a support that they share is drawn again from it.
        key = Key(inner.seed, "uplink", self.now.number)
        members = [self.now.members[source] for source in self.chosen]
        # Of weights the server knows the sum alone: a codec that has to know whose integers these are takes equal ones.
        weights = dict.fromkeys((member.partition for member in members), 1)
        mean = codec.place(summed.integers, construction.divisor(summed), inner.layout, key, weights)
        report.included = [member.node for member in members]
        # The tag says which message a contribution answers, also of a contributor whose own reply was lost.
        consumed = [(m.node, *read_tag(self.tags[m.index])) for m in members]
        arrays, metrics = inner.aggregate_sum(self.now.number, mean, summed.weight, consumed, self._contents())
        own: dict[str, Any] = {"coded.contributors": len(members), "coded.weight": summed.weight}
        if self.plan.extras:
            own["coded.cut"] = summed.extras[0] / (self.plan.extras[0] * len(members))
        return arrays, MetricRecord({**(metrics or {}), **own})

    def _contents(self) -> list[RecordDict]:
        """Return the contributors' metrics where they travel, those of the most frequent form."""
        if not self.construction.options.metrics:
            return []
        held = [(source, "", self.contents[source]) for source in self.chosen if source in self.contents]
        # A report of its own: a contributor whose metrics do not fit is in the sum all the same, and not refused.
        scratch = Report(self.now.number)
        kept = agreeing(held, scratch, lambda source: self.now.members[source].node)
        for node, reason in scratch.refused.items():
            self.now.report.note(f"metrics of node {node} are left out: {reason}")
        return [self.contents[source] for source in kept]


def _sequence_of(message: Message) -> int:
    """Return the sequence number that the inner strategy gave to its message."""
    for config in message.content.config_records.values():
        found = Announcement.read(config)
        if found is not None:
            return found.sequence
    raise ConfigError("the training message announces no codec; is the inner strategy Compressed?")
