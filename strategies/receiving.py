"""The one way by which replies reach a model: matched, checked, compared, added, concluded, acknowledged.

Every strategy that stands on replies of clients has one :class:`Reception`, which keeps what is known of the clients
from round to round and applies the rules in their order: a node answers a message once; one node holds a partition;
what cannot be read is refused with a reason; forms that differ from the usual one and outliers are refused; what is
left goes into a sink; an aggregate that is not finite is not taken; only what was used is acknowledged; and a run
whose clients send nothing of use ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError, LayoutError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, payload_bytes
from fedcomp.flower.protocol import RESYNC, app_failure
from fedcomp.flower.records import config_in, count_differing, finite_where, restore_dtypes, to_record
from fedcomp.flower.report import Report, Reports, shorten
from fedcomp.layout import Vector
from fedcomp.plain import Keys
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import aggregate_once
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.replies import (
    Arrays,
    Arrival,
    Peer,
    Rejected,
    SentMessage,
    Usual,
    agreeing,
    match_replies,
    note_arrivals,
    ordinary,
    weight_of,
)
from fedcomp.strategies.round_log import RoundLog, require_usable
from fedcomp.strategies.sinks import Sink, UpdateRule
from fedcomp.strategies.statistics import hold_in_record

T = TypeVar("T")

Consumed = tuple[int, int, int]
"""Node, and the sequence number and generation of the memory of what was used of it; generation 0: no memory."""


class Reception(Stateful):
    """What a strategy knows of its clients' replies, and what it does with them.

    Parameters
    ----------
    name : str
        The strategy's, for the log.
    guard : Norms, optional
        Refuses outliers; default nobody does.

    Attributes
    ----------
    reports, evaluations : Reports
        Per round of training, and of client evaluation.
    peers : dict of int to Peer
        By node: what was consumed from it, and which model it holds.

    Raises
    ------
    ConfigError
        When ``guard`` is none.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "holders": nested("holders"),
        "peers": dict[int, Peer],
        "_usual": Annotated[dict[str, Usual], Keys(("train", "evaluate"))],
        "reports": Reports,
        "evaluations": Reports,
    }

    def __init__(self, name: str, *, guard: Norms | None = None) -> None:
        if guard is not None and not isinstance(guard, Norms):
            raise ConfigError(f"guard={guard!r} is not valid: an object, such as Norms(times_median=10)")
        self.guard = guard
        self.reports = Reports()
        self.evaluations = Reports()
        self.peers: dict[int, Peer] = {}
        self.log = RoundLog(name)
        self.holders = Holders()
        self._usual = {"train": Usual(), "evaluate": Usual()}

    def renumber(self) -> None:
        """Forget which model the nodes hold: they may have got later ones. The next message brings it whole."""
        super().renumber()
        for peer in self.peers.values():
            peer.version = 0

    def meet(self, grid: Grid, *, afresh: bool = False) -> None:
        """Learn who is there; ``afresh`` forgets who held which partition before.

        Whom earlier rounds prefer would make one client's part in a private sum depend on another's.
        """
        if afresh:
            self.holders = Holders()
        self.holders.meet(grid)

    def received(
        self,
        sent: Sequence[SentMessage],
        replies: Iterable[Message],
        report: Report,
        read: Callable[[SentMessage, Message], T],
        errors: list[Message] | None = None,
        *,
        role: str = "",
    ) -> Iterator[T]:
        """Yield what ``read`` makes of each reply, in the order of partitions; report what cannot be read.

        Parameters
        ----------
        read : callable
            Raises a :class:`~fedcomp.errors.FedcompError` for what cannot be used.
        errors : list of Message, optional
            Gets a reply with an error for each that was refused here.
        role : str
            What the nodes were asked as, in front of every reason.
        """
        yield from self._readable(match_replies(list(sent), replies, report, self.holders), report, read, errors, role)

    def _readable(
        self,
        pairs: Iterable[tuple[SentMessage, Message]],
        report: Report,
        read: Callable[[SentMessage, Message], T],
        errors: list[Message] | None,
        role: str = "",
    ) -> Iterator[T]:
        for each, reply in pairs:
            try:
                self._refuse_error(each, reply)
                item = read(each, reply)
            except FedcompError as reason:
                report.refuse(each.node, f"{role}{reason}")
                if errors is not None:
                    # For the inner strategy a refused reply is a failed one: Flower's log tells how many failed.
                    errors.append(reply if reply.has_error() else app_failure(each.message, str(reason)))
                continue
            yield item

    def _refuse_error(self, sent: SentMessage, reply: Message) -> None:
        if not reply.has_error():
            return
        reason = f"error {reply.error.code}: {reply.error.reason}"
        # Version 0 is unknown: the next message to this node carries the full model.
        if RESYNC in reason:
            self.peers.setdefault(sent.node, Peer()).version = 0
        raise Rejected(reason)

    def note_version(self, sent: SentMessage, reply: Message, current: int) -> None:
        """Note whether the sender of a reply says that it holds the model of version ``current``."""
        version = config_in(reply.content, NODE_RECORD).get("version", 0)
        # Only the current version is believed: a wrong word would bring steps that lead from nowhere.
        known = isinstance(version, int) and version == current
        self.peers.setdefault(sent.node, Peer()).version = current if known else 0

    def agreeing(
        self, items: list[tuple[T, str, RecordDict]], report: Report, node_of: Callable[[T], int], kind: str
    ) -> list[T]:
        """Return the items whose metrics have the usual form; see :func:`fedcomp.strategies.replies.agreeing`."""
        return agreeing(items, report, node_of, self._usual[kind])

    def ordinary(self, arrivals: list[Any], report: Report) -> list[Any]:
        """Return the arrivals that the guard lets pass; acknowledge the others.

        An outlier is dropped for good: put back into its client's memory, it would come again and again.
        """
        kept = ordinary(arrivals, report, self.guard, self.reports.before(report.round))
        self.acknowledge((a.sent.node, a.sequence, a.generation) for a in arrivals if a.outlier)
        return kept

    def aggregate(self, intake: Intake, replies: Iterable[Message], rule: UpdateRule) -> Outcome:
        """Check the replies of a training exchange and let ``rule``'s strategy aggregate them.

        A reply that cannot be used is reported and left out; its sender is not acknowledged, so that a client with
        memory puts the mass back. Returns ``(None, None)`` when nothing usable came.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        began = time.perf_counter()
        report = self.reports[intake.report.round] = intake.report

        pairs = list(match_replies(list(intake.sent), replies, report, self.holders))
        # A round in which nobody is refused, as almost all are, needs each frame parsed once only.
        ahead = rule.ahead(intake, pairs)

        def read(sent: SentMessage, reply: Message) -> Arrival:
            nonlocal ahead
            arrival = intake.read(sent, reply, measured=rule.measured, takes_plain=rule.takes_plain)
            self.note_version(sent, reply, 0 if sent.origin is None else sent.origin.version)
            if ahead is not None:
                parsed = arrival.parsed
                try:
                    with np.errstate(over="ignore", invalid="ignore"):
                        ahead.add(arrival)
                except FedcompError:
                    # It will be refused, with its reason, when the others are added without it.
                    ahead, arrival.parsed = None, parsed
            intake.keep(arrival)
            return arrival

        arrivals = list(self._readable(pairs, report, read, intake.errors))
        if not intake.updates_only:
            arrivals = self.agreeing(
                [(a, a.record, a.content) for a in arrivals], report, lambda a: a.sent.node, "train"
            )
        # After the majority over forms: what is refused there must not shift what is a usual norm.
        arrivals = self.ordinary(arrivals, report)
        note_arrivals(arrivals, report, models_asked=intake.models_asked)
        sink = ahead if ahead is not None and ahead.holds(arrivals) else None
        # A sum that is not the round's gives its memory back before another one is begun.
        ahead = None
        arrays, metrics = self._added(intake, arrivals, rule, sink)
        report.seconds += time.perf_counter() - began
        return self.conclude(report, arrays, rule), metrics

    def _added(self, intake: Intake, arrivals: list[Arrival], rule: UpdateRule, sink: Sink | None) -> Outcome:
        report = intake.report
        # A private sum is released with its noise even when nobody sent: that nobody did is part of what it hides.
        if not arrivals and not rule.updates_only:
            return None, None
        if not rule.updates_only and sum(arrival.weight for arrival in arrivals) <= 0:
            # Before the strategy sees them: all of Flower's would divide by their weights' sum.
            for arrival in arrivals:
                report.refuse(arrival.sent.node, "weight 0, as all others of the round: nothing to average")
            return None, None
        if not intake.updates_only:
            intake.account(arrivals)
        with np.errstate(over="ignore", invalid="ignore"):
            if sink is None:
                sink = _summed(intake, arrivals, rule)
            # Only when all were added: an aggregate of some of them would acknowledge what it does not hold.
            arrays, metrics = sink.finish()
        if arrays is None:
            if arrivals and len(report.refused) + report.lost < report.asked and not rule.updates_only:
                report.notes.append(f"{type(rule.strategy).__name__} made no model of the replies; the model is kept")
            return None, metrics
        # A sink may refuse, too; what is not in the sum goes back into its client's memory.
        used = [a for a in arrivals if a.sent.node not in report.refused]
        consumed = [(a.sent.node, a.sequence, a.generation) for a in used]
        model = self.accept(intake, rule, arrays, consumed, [a.exact for a in used])
        return model, None if model is None else metrics

    def accept(
        self,
        intake: Intake,
        rule: UpdateRule,
        arrays: ArrayRecord,
        consumed: Sequence[Consumed],
        sent: Sequence[Arrays],
    ) -> ArrayRecord | None:
        """Return an aggregate as the new model, in the model's dtypes; None when it cannot be one.

        What was consumed is acknowledged. Variances that turned negative are held.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            restored = restore_dtypes(arrays, intake.model, sent)
        # A finite float32 may be infinite as float16; NaN may be some integer. What kept its dtype is the same array.
        changed = ArrayRecord({name: array for name, array in restored.items() if array is not arrays[name]})
        if not finite_where(arrays, intake.model) or not finite_where(changed, intake.model):
            intake.report.notes.append(rule.not_finite)
            return None
        intake.report.used += len(consumed)
        # After the check of the aggregate: what is not in the model is not consumed, and is sent again.
        self.acknowledge(consumed)
        if note := hold_in_record(restored, intake.layout, intake.model):
            intake.report.notes.append(note)
        return restored

    def aggregate_mean(
        self,
        intake: Intake,
        mean: Vector | None,
        consumed: Sequence[Consumed],
        contents: Sequence[RecordDict],
        rule: UpdateRule,
    ) -> Outcome:
        """Take an update that was averaged elsewhere: nobody's own is here, and ``rule``'s mean runs once.

        Parameters
        ----------
        mean : float32 array, shape (layout size,), or None
            None when the round was given up, or nothing in it has a weight.

        Raises
        ------
        ConfigError
            When the strategy is no weighted mean: it would need the single updates.
        LayoutError
            When ``mean`` does not have the layout's size and dtype.
        """
        layout, report, strategy = intake.layout, intake.report, rule.mean
        if mean is not None and (mean.shape != (layout.size,) or mean.dtype != np.float32):
            raise LayoutError(f"the mean is {mean.dtype}{mean.shape}, expected float32({layout.size},)")
        self.reports[report.round] = report
        # A coded sum shows no single reply: every node that is not in it counts as lost.
        report.lost = len(intake.sent) - len(consumed)
        report.compressed = len(consumed)
        report.fresh = [node for node, sequence, generation in consumed if generation and generation == sequence]
        if mean is None:
            return self.conclude(report, None, rule), None
        report.changed = count_differing(mean[: layout.compressed_size], 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            moved = to_record(layout.added(intake.model, intake.changes_of(mean), intake.vector + mean, intake.buffers))
            arrays, metrics = aggregate_once(
                strategy,
                report.round,
                (intake.record, moved),
                intake.sent[0].message,
                contents,
                received=None if rule.updates_only else (len(consumed), report.lost),
                sparse=intake.codec.sparse(layout),
            )
        model = None if arrays is None else self.accept(intake, rule, arrays, consumed, [])
        return self.conclude(report, model, rule), None if model is None else metrics

    def conclude(self, report: Report, model: ArrayRecord | None, rule: UpdateRule | None = None) -> ArrayRecord | None:
        """End a training round: log it, and withhold what may not be known; return ``model``.

        Raises
        ------
        NoUsableReply
            When clients replied, no reply of theirs can be used, and no earlier round brought an update either.
        """
        withheld = rule is not None and rule.withholds
        # A private round may have released, and paid for, its noise without a reply.
        # After a round that worked a bad one is only a warning; before it the set-up itself is likely to be wrong.
        if model is None and not withheld and not any(earlier.used for earlier in self.reports.values()):
            require_usable(report)
        if rule is not None and withheld and rule.not_finite in report.notes:
            log.warning("round %d: %s", report.round, rule.not_finite)
        self.log.conclude(report, withheld=withheld)
        return model

    def evaluate(
        self,
        report: Report,
        sent: Sequence[SentMessage],
        replies: Iterable[Message],
        weight_key: str | None,
        current: int,
    ) -> tuple[list[Message], list[Message]]:
        """Return the replies to evaluation whose metrics can be averaged, and errors in place of the others.

        Parameters
        ----------
        weight_key : str or None
            The metric that weighs a reply.
        current : int
            Version of the model in the messages.
        """
        self.evaluations[report.round] = report
        report.asked = len(sent)
        errors: list[Message] = []

        def read(each: SentMessage, reply: Message) -> tuple[SentMessage, Message]:
            # Refused here by itself: Flower's own check ends the whole run over one reply without a weight.
            weight_of(reply.content, weight_key)
            self.note_version(each, reply, current)
            # Ours alone: the inner strategy gets what the app replied.
            if NODE_RECORD in reply.content:
                del reply.content[NODE_RECORD]
            return each, reply

        found = [(pair, "", pair[1].content) for pair in self.received(sent, replies, report, read, errors)]
        kept = self.agreeing(found, report, lambda pair: pair[0].node, "evaluate")
        if weight_key is not None and kept and sum(weight_of(pair[1].content, weight_key)[1] for pair in kept) <= 0:
            for each, _ in kept:
                report.refuse(each.node, "weight 0, as all others of the round: nothing to average")
                errors.append(app_failure(each.message, "weight 0, as all others of the round"))
            kept = []
        report.payload_bytes = sum(payload_bytes(reply) for _, reply in kept)
        if names := sorted({name for _, reply in kept for name in reply.content.array_records}):
            report.notes.append(
                f"replies to evaluation hold the ArrayRecords {shorten(str(names))}, which nobody reads: "
                f"{report.payload_bytes:,} bytes that are in no ratio of training replies"
            )
        self.log.warn(report)
        report.concluded = True
        return [reply for _, reply in kept], errors

    def acknowledge(self, consumed: Iterable[Consumed]) -> None:
        """Note what was consumed: (node, sequence, generation)."""
        for node, sequence, generation in consumed:
            # A reply without memory acknowledges nothing: the last frame of the memory stays the one consumed.
            if generation:
                peer = self.peers.setdefault(node, Peer())
                peer.acknowledged, peer.generation = sequence, generation


class Receiving:
    """A strategy whose rounds are a :class:`Reception`'s."""

    reception: Reception

    @property
    def reports(self) -> Reports:
        """Per training round: who was asked, what arrived in which form, what was refused and why."""
        return self.reception.reports

    @property
    def evaluations(self) -> Reports:
        """The same for client evaluation."""
        return self.reception.evaluations


def _summed(intake: Intake, arrivals: list[Arrival], rule: UpdateRule) -> Sink:
    """Return a sink to which all arrivals were added; report those that it refuses."""
    sink = rule.begin(intake, arrivals)
    for arrival in arrivals:
        try:
            sink.add(arrival)
        except FedcompError as reason:
            intake.report.refuse(arrival.sent.node, str(reason))
    return sink
