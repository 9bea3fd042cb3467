"""The server half of gradient coding: the sum of all updates from any n - s of n devices.

Every client trains on s + 1 partitions, its own and those of s others, and answers one combination of the weighted
updates (:mod:`fedcomp.coding.gradcode`). As soon as the answers determine the sum over all partitions the round is
over: the slowest s clients are not waited for, and their data are in the sum all the same. The inner strategy, one of
Flower's weighted means, then takes the mean in one step. No byte is saved, each client computes s + 1 times, and the
data of every client lie with s others: use it inside one trust domain.

What the mean equals: over a prime field, bit for bit, the mean of the updates rounded to a common step; in float64 the
mean computed in float64, up to the order of sums with fractional repetition (bit for bit the same whoever answered) and
to about 1e-12 of the largest update with a cyclic code. Either is rounded to the model's dtype once.

Devices are the round's members in partition order. A client that went offline stays in the code as a loss, since others
hold its data, as long as there are at most s of these; when there are more, the code is made for those that are left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.gradcode import TOLERANCE, Assignment, Cyclic, Decoding, assignment
from fedcomp.coding.gradvalues import Arithmetic, values_of
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.gradients import (
    ANSWER,
    MAX_DEVICES,
    Form,
    GradientAnswer,
    GradientPlan,
    beside_size,
    checksum,
    moved,
)
from fedcomp.flower.payload import take_frame
from fedcomp.flower.records import finite_where, restore_dtypes, to_arrays, to_record
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.layout import Layout
from fedcomp.stateful import Stateful
from fedcomp.strategies.coded.settings import CodedSettings, GradientOptions
from fedcomp.strategies.hooked import Hooked
from fedcomp.strategies.means import MEANS, aggregate_once, is_mean, weight_key_of
from fedcomp.strategies.replies import Rejected, first_replies

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.strategies.coded.strategy import CodedRound, Member, Outcome

_FOREIGN: Final = ("symbols", "shards", "threshold", "loss")
"""Settings of other constructions, which mean nothing here."""

_AGREES: Final = 1e-9
"""Redundant float64 answers that contradict each other by more are reported; rounding leaves less (measured 1e-12)."""

_CODES: Final = 8
"""Codes that are kept, by number of clients."""

_LOOSE: Final = 1e6
"""Amplification that is accepted, and reported, where no code of the usual one is found."""


class GradientCode(Stateful):
    """The construction ``"gradcode"``; its options are :class:`fedcomp.strategies.coded.settings.GradientOptions`."""

    STATE: ClassVar[Mapping[str, Any]] = {"_roll": dict[int, int]}

    def __init__(self, settings: CodedSettings, inner: Strategy) -> None:
        self.options = settings.own(GradientOptions)
        for name in _FOREIGN:
            if getattr(settings, name):
                raise ConfigError(f"{name}={getattr(settings, name)!r} means nothing to a gradient code; use losses=")
        if isinstance(inner, Hooked):
            raise ConfigError(
                "gradient coding adds up updates before they are sent, and a combination of compressed updates is as "
                f"long as any: put {type(inner.inner).__name__} itself into CodedFedAvg, without Compressed"
            )
        if not is_mean(inner):
            raise ConfigError(
                f"{type(inner).__name__} looks at single updates, of which a gradient code shows none; use one of "
                f"{', '.join(MEANS)}"
            )
        self.seed = settings.seed
        self.timeout = settings.collect_timeout
        self._weight_key = weight_key_of(inner) or ""
        self._roll: dict[int, int] = {}
        # Finding a cyclic code takes many decompositions; the number of clients rarely changes.
        self._codes: dict[int, Assignment] = {}

    def describe(self) -> str:
        """Return one line for the log."""
        return f"gradient coding, {self.options.losses} losses, {self.options.scheme}, {self.options.arithmetic}"

    def round(self, now: CodedRound) -> Exchanges[Outcome]:
        """Train, take answers until they determine the sum, let the inner strategy take the mean."""
        report = now.report
        now.exclude_uncoded("not in the code of this round")
        devices = self._devices(now)
        n = len(devices)
        least = self.options.losses + 1
        if not least <= n <= MAX_DEVICES:
            return _skipped(now, f"{n} clients take part; a code for {least - 1} losses needs {least} to {MAX_DEVICES}")
        code, values = self._code(n, report.note)
        before = to_arrays(now.arrays)
        collection = _Collection(now, code, values, before, Layout.of(before), devices, self.options.quorum)
        report.planned, report.shards, report.symbols = n, n, n - self.options.losses
        messages = [
            now.plan(member, GradientPlan, self._plan(code, values, devices, collection.place[member.partition]))
            for member in now.members
        ]
        replies = yield Push(messages, self.timeout, collection.enough)
        started = time.perf_counter()
        collection.take(replies)
        outcome = self._conclude(now, collection)
        report.decode_seconds = time.perf_counter() - started
        return outcome

    def _devices(self, now: CodedRound) -> list[int]:
        """Return the partitions of the round's code, ascending: the members', and those of a few that went offline."""
        present = {member.partition: member.node for member in now.members}
        doubles = [partition for partition, count in Counter(m.partition for m in now.members).items() if count > 1]
        if doubles:
            # Both would train the same partitions; the second's answer would be taken for the first's.
            now.report.note(f"several clients hold partition {doubles[0]}; one of them takes part")
            first = {partition: next(m for m in now.members if m.partition == partition) for partition in present}
            for member in now.members:
                if first[member.partition] is not member:
                    now.report.exclude(member.node, f"another client holds partition {member.partition}")
            now.members = list(first.values())
            present = {partition: member.node for partition, member in first.items()}
        online = set(now.grid.get_node_ids())
        # Who is not asked because only a sample is, has not left; where a grid shows no more than the sample, it is
        # known by clients that were not in the former one.
        everybody = online <= {*present.values(), *(m.metadata.dst_node_id for m in now.uncoded)}
        gone = [p for p, node in self._roll.items() if p not in present and node not in online]
        if not everybody or not present.keys() <= self._roll.keys():
            gone = []
        if len(gone) > self.options.losses:
            now.report.note(
                f"the clients of partitions {sorted(gone)} are offline: the code is made without their data"
            )
            gone = []
        self._roll = {**{p: self._roll[p] for p in gone}, **present}
        return sorted(self._roll)

    def _code(self, n: int, note: Callable[[str], None]) -> tuple[Assignment, Arithmetic]:
        values = values_of(self.options.arithmetic, n, self.options.limit)
        if n not in self._codes:
            try:
                code: Assignment = assignment(
                    n, self.options.losses, scheme=self.options.scheme, seed=self.seed, field=values.field
                )
            except ConfigError:
                if self.options.scheme == "fractional" or values.field is not None:
                    raise
                # With so many losses every draw amplifies; a code that does, and says so, is better than none.
                code = Cyclic(n, self.options.losses, self.seed, max_amplification=_LOOSE)
                note(f"the cyclic code for {n} clients amplifies rounding by more than usual; a field does not")
            # Dictionaries keep their order: the code that was made first goes.
            self._codes = {**dict(list(self._codes.items())[-_CODES + 1 :]), n: code}
        return self._codes[n], values

    def _plan(self, code: Assignment, values: Arithmetic, devices: Sequence[int], device: int) -> dict[str, Any]:
        return {
            "partitions": tuple(devices[j] for j in code.partitions(device)),
            "coefficients": code.coefficients(device).astype(values.dtype).tobytes(),
            "arithmetic": self.options.arithmetic,
            "parts": code.n,
            "limit": float(self.options.limit),
            "weight": self._weight_key,
        }

    def _conclude(self, now: CodedRound, collection: _Collection) -> Outcome:
        """Decode the sum and hand the mean to the inner strategy; None and None for a round that is skipped."""
        report, code, answers = now.report, collection.code, collection.answers
        report.received = len(answers)
        try:
            decoding = code.decoding(answers, approximate=self.options.approximate)
        except NotDecodable as error:
            return _skipped(now, str(error))
        if not answers:
            return _skipped(now, "no client sent a usable answer")
        report.innovative = int(np.count_nonzero(decoding.coefficients))
        report.dependent = report.received - report.innovative
        # Redundant answers cost nothing more and show clients whose numbers differ.
        contradiction = code.disagreement(answers)
        if contradiction > _AGREES:
            report.note(
                f"redundant answers contradict each other by {contradiction:.1e} of their size: clients compute "
                "different updates of the same partition, by different hardware or on purpose. It cannot be told who"
            )
        assert collection.form is not None
        total = code.decode(answers, approximate=self.options.approximate)
        vector, scalars = collection.values.unpack(total, collection.layout.size)
        # Every device puts its partitions' weights first, so this is the sum of all of them.
        weight = float(scalars[0])
        if not decoding.exact:
            report.residual = decoding.residual
            report.note(f"an approximation: the answers do not determine the sum, residual {decoding.residual:.3g}")
            self._leave_out(now, collection, decoding)
        if not weight > 0.0:
            return _skipped(now, f"the total weight is {weight:g}: nothing to average")
        report.included = [member.node for member in now.members if member.node not in report.excluded]
        return self._aggregate(now, collection, vector / weight, scalars / weight, weight)

    def _aggregate(
        self,
        now: CodedRound,
        collection: _Collection,
        vector: NDArray[np.float64],
        scalars: NDArray[np.float64],
        weight: float,
    ) -> Outcome:
        form, before = collection.form, collection.before
        assert form is not None
        with np.errstate(over="ignore", invalid="ignore"):
            model = moved(before, vector, scalars[1 + form.count :], collection.layout)
        metrics = form.to_metrics(scalars[1 : 1 + form.count], self._weight_key, weight)
        arrays, aggregated = aggregate_once(
            now.inner,
            now.number,
            (form.record, to_record(model)),
            now.members[0].message,
            [RecordDict({form.metrics: metrics})],
            metrics_name=form.metrics,
            received=(len(now.report.included), len(now.members) - len(now.report.included)),
        )
        if arrays is None:
            return None, aggregated
        if not finite_where(arrays, before):
            return _skipped(now, "the aggregate is not finite: some update was too large to be added")
        return restore_dtypes(arrays, before, []), aggregated

    @staticmethod
    def _leave_out(now: CodedRound, collection: _Collection, decoding: Decoding) -> None:
        """Report whose data are not in an approximation at all."""
        # The factor of each partition's update in the decoded sum; in an exact one all are 1.
        share = collection.code.matrix.astype(np.float64).T @ decoding.coefficients.astype(np.float64)
        for member in now.members:
            if abs(share[collection.place[member.partition]]) < TOLERANCE:
                now.report.exclude(member.node, "nobody who holds its partition answered")


def _skipped(now: CodedRound, reason: str) -> Outcome:
    now.skip(reason)
    return None, None


@dataclass
class _Collection:
    """The answers of one round, checked one by one as they come."""

    now: CodedRound
    code: Assignment
    values: Arithmetic
    before: Mapping[str, NDArray[Any]]
    layout: Layout
    devices: Sequence[int]
    quorum: int = 0
    answers: dict[int, NDArray[Any]] = field(default_factory=dict)
    form: Form | None = None
    _seen: dict[int, tuple[Form, NDArray[Any]]] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {partition: device for device, partition in enumerate(self.devices)}

    def enough(self, replies: Sequence[Message]) -> bool:
        """Whether the answers so far determine the sum, or are as many as were asked for."""
        self._read(replies)
        kept = self._agreeing()
        return 0 < self.quorum <= len(kept) or self.code.can_decode_sum(kept)

    def take(self, replies: Iterable[Message]) -> None:
        """Keep the answers that can be used; report the others, and who is silent."""
        self._read(list(replies))
        report = self.now.report
        kept = self._agreeing()
        for member in self.now.members:
            device = self.place[member.partition]
            if device in self._refused:
                report.refuse(f"client of partition {member.partition}: {self._refused[device]}")
            elif device in self._seen and device not in kept:
                report.refuse(f"client of partition {member.partition}: its metrics are not the others'")
        self.answers = {device: self._seen[device][1] for device in kept}
        report.asked = len(self.now.members)
        report.count("hub_up", sum(row.nbytes for row in self.answers.values()))

    def _agreeing(self) -> list[int]:
        """Return the devices whose answers have the most frequent form, and note it; nobody where two are."""
        forms = Counter(form for form, _ in self._seen.values()).most_common(2)
        if not forms or (len(forms) == 2 and forms[0][1] == forms[1][1]):
            return []
        self.form = forms[0][0]
        return sorted(device for device, (form, _) in self._seen.items() if form == self.form)

    def _read(self, replies: Sequence[Message]) -> None:
        answers = first_replies((member.message for member in self.now.members), replies)
        for member in self.now.members:
            device, reply = self.place[member.partition], answers.get(member.node)
            # enough() comes here after each arrival: what was read before is not read again.
            if reply is None or device in self._seen or device in self._refused:
                continue
            try:
                self._seen[device] = self._open(member, reply)
            except FedcompError as error:
                self._refused[device] = str(error)

    def _open(self, member: Member, reply: Message) -> tuple[Form, NDArray[Any]]:
        header = self.now.header(member, reply, GradientAnswer)
        form = Form.from_text(header.form)
        data = take_frame(reply.content, ANSWER)
        if data is None:
            raise Rejected("the reply holds no answer")
        if header.checksum != checksum(data):
            raise Rejected("the answer was damaged on the way: its checksum differs")
        scalars = 1 + form.count + beside_size(self.layout)
        return form, self.values.from_bytes(data, self.layout.size, scalars)
