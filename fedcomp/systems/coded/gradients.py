"""Gradient coding: the sum of all updates from any n - s of n devices (Tandon et al. 2017).

Every client trains on s + 1 partitions, its own and those of s others, and answers one combination of the weighted
updates (:mod:`fedcomp.coding.gradcode`). As soon as the answers determine the sum over all partitions the round is
over: the slowest s clients are not waited for, and their data are in the sum all the same. No byte is saved, each
client computes s + 1 times, and the data of every client lie with s others: use it inside one trust domain.

What the mean equals: over a prime field, bit for bit, the mean of the updates rounded to a common step; in float64 the
mean computed in float64, up to the order of sums with fractional repetition (bit for bit the same whoever answered) and
to about 1e-12 of the largest update with a cyclic code. Either is rounded to the model's dtype once.

Devices are the round's clients in partition order. A client that went offline stays in the code as a loss, since others
hold its data, as long as there are at most s of these; when there are more, the code is made for those that are left.

R. Tandon, Q. Lei, A. G. Dimakis, N. Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning",
ICML 2017.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import State
from fedcomp.coding.checked import CHECK, checked_bytes, numbers_of
from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.gradcode import SCHEMES, TOLERANCE, Assignment, Cyclic, assignment
from fedcomp.coding.gradvalues import ARITHMETICS, Arithmetic, combine, values_of
from fedcomp.errors import ConfigError, FedcompError, LayoutError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout
from fedcomp.plain import from_plain
from fedcomp.program import HEAVIEST, HELLO, Answer, AnswerError, Ask, Me, Now, Round, Said, Step, System, Wait
from fedcomp.rules import Data, Int, Many, Maybe, OneOf, Real, Switch, Text

Doubles = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]

MAX_DEVICES: Final = 4096
"""Largest number of devices a plan may name."""

MAX_METRICS: Final = 4096
"""Largest number of metric values in an answer."""

_AGREES: Final = 1e-9
"""Redundant float64 answers that differ by more are reported; rounding errors are smaller (measured 1e-12)."""

_LOOSE: Final = 1e6
"""Amplification that is accepted and reported if no code with the usual one is found."""

_FORM: Final = tuple[str, tuple[tuple[str, Annotated[int, Int(0, MAX_METRICS)]], ...]]


class Part(NamedTuple):
    """What training on one partition came to.

    Attributes
    ----------
    before, after : mapping of str to array
        The model's tensors, in their own dtypes.
    record : str
        Name of the app's metrics.
    metrics : mapping of str to number or list of numbers
    """

    before: Tensors
    after: Tensors
    record: str
    metrics: Mapping[str, Any]


Trains = Callable[[Me, int], Part]
"""What an app brings: ``trains(me, partition)`` trains as the client of that partition would. A partition's update has
to be a function of the model, the round and the partition alone: whoever holds it computes the same one."""


@dataclass(frozen=True, repr=False, eq=False)
class Combine(Said):
    """What one device is asked for.

    Attributes
    ----------
    partitions : tuple of int
        Partition ids to train on, in the order of the coefficients.
    coefficients : bytes
        What the rows are multiplied with, in the little-endian number format of the arithmetic.
    parts : int
        Number of rows in the sum of all partitions.
    """

    partitions: Annotated[tuple[int, ...], Many(Int(most=2**31 - 1), MAX_DEVICES, least=1)]
    coefficients: Annotated[bytes, Data(8 * MAX_DEVICES, least=1)]
    parts: Annotated[int, Int(1, MAX_DEVICES)]

    def conflict(self) -> str:
        twice = len(set(self.partitions)) < len(self.partitions)
        return f"it names the partitions {self.partitions[:8]}, one of them twice" if twice else ""


@dataclass(frozen=True, repr=False, eq=False)
class Combined(Said):
    """What a device says of its combined row: a :class:`Form` as text."""

    form: Annotated[str, Text(1 << 16, least=1)]


@dataclass(frozen=True)
class Form:
    """What the scalars of an answer mean; the same on every device.

    Attributes
    ----------
    record : str
        Name of the app's metrics.
    names : tuple of (str, int)
        The metrics in order of name, with the length of a list, 0 for a single number. The weight is not among them.
    """

    record: str
    names: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """Number of metric values."""
        return sum(max(1, length) for _, length in self.names)

    def to_text(self) -> str:
        """Return the form as JSON."""
        return json.dumps([self.record, [list(pair) for pair in self.names]], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Form:
        """Read :meth:`to_text`'s JSON, which may come from anybody.

        Raises
        ------
        StateError
            When it is not a form, or one with more than 4096 values.
        """
        try:
            form = cls(*from_plain(_FORM, json.loads(text)))
        # A few kilobytes of brackets nest deeper than the interpreter follows.
        except (ValueError, RecursionError) as error:
            raise StateError(f"an answer's form {text[:80]!r} cannot be read: {error}") from error
        if not form.record or form.count > MAX_METRICS:
            raise StateError(f"an answer's form is {text[:80]!r}; expected a name and at most {MAX_METRICS} values")
        return form

    @classmethod
    def of(cls, record: str, values: Mapping[str, Any], weight: str) -> tuple[Form, Doubles]:
        """Return the form of a reply's metrics, and their values."""
        # An empty list has no mean.
        kept = {name: value for name, value in sorted(values.items()) if name != weight and value != []}
        names = tuple((name, len(value) if isinstance(value, list) else 0) for name, value in kept.items())
        numbers = [v for value in kept.values() for v in (value if isinstance(value, list) else [value])]
        return cls(record, names), np.array(numbers, np.float64)

    def to_metrics(self, values: Doubles, weight: str, total: float) -> dict[str, Any]:
        """Return mean metric values by name; the weight, if there is one, is the total."""
        # A number of examples stays a whole number, as apps report it.
        out: dict[str, Any] = {weight: int(total) if total.is_integer() else total} if weight else {}
        position = 0
        for name, length in self.names:
            part = values[position : position + max(1, length)].tolist()
            out[name] = part if length else part[0]
            position += max(1, length)
        return out


@dataclass(frozen=True, repr=False, eq=False)
class GradientCode(System, id="gradient-code"):
    """Take the mean of all updates from any n - s of n clients; each trains on s + 1 partitions.

    The client's app brings :data:`Trains`.

    Parameters
    ----------
    losses : int
        s, how many clients of a round may be lost; every client trains on s + 1 partitions.
    scheme : {"auto", "fractional", "cyclic"}
        Fractional repetition needs s + 1 to divide the number of clients; "auto" takes it where it fits.
    arithmetic : {"float64", "gf65521", "gf31"}
        Numbers of the answers: floating point, or fixed point over a prime field.
    limit : float
        In a field, the largest change of one coordinate times its weight (number of examples); it determines the
        quantisation step, together with the number of clients. A client whose update is larger reports this, and its
        answer counts as missing.
    approximate : bool
        If too many clients are lost, use the least-squares combination of the answers, and report its residual. False:
        skip the round.
    quorum : int
        With ``approximate``: the training exchange ends after this many answers, even if they do not determine the sum.
        0 waits for all or for ``seconds``. With ``losses=0`` this is a server that ignores stragglers.
    seconds : float, optional
        Timeout for answers. Default: the driver's.
    weight : str
        The metric that weighs an update; empty when every partition weighs 1.

    Examples
    --------
    >>> GradientCode(losses=2).code(6, seed=0)[0].scheme
    'fractional'
    """

    SAYS: ClassVar[tuple[type[Said], ...]] = (Combine, Combined)
    SENT: ClassVar[str] = ""
    KEEPS: ClassVar[bool] = True

    losses: Annotated[int, Int()] = 1
    scheme: Annotated[str, OneOf(*SCHEMES)] = "auto"
    arithmetic: Annotated[str, OneOf(*ARITHMETICS)] = "float64"
    limit: Annotated[float, Real(finite=False)] = 128.0
    approximate: Switch = False
    quorum: Annotated[int, Int()] = 0
    seconds: Annotated[float | None, Maybe(Real(above=0.0))] = None
    weight: Annotated[str, Text()] = "num-examples"

    def conflict(self) -> str:
        """Answers that do not determine the sum are of use to approximate decoding alone, which not every code has."""
        if self.quorum and not self.approximate:
            return (
                f"quorum={self.quorum} ends a round with answers that may not determine the sum; allow that with "
                "approximate=True, or leave it out"
            )
        # Made for its checks, with the fewest rows there can be: what no field has room for is refused before any
        # round.
        values_of(self.arithmetic, 2, self.limit)
        if self.approximate and self.arithmetic != "float64" and self.scheme != "fractional":
            return (
                "a cyclic code over a field cannot be decoded approximately; use arithmetic='float64', or "
                "scheme='fractional'"
            )
        return ""

    def code(self, n: int, seed: int) -> tuple[Assignment, bool]:
        """Return the code of so many devices, and whether it amplifies rounding by more than usual."""
        return made(n, self.losses, self.scheme, seed, self.arithmetic, self.limit)

    # The server.

    def round(self, now: Now) -> Round:
        members = yield from _met(now)
        devices = self._devices(now, members)
        n, least = len(devices), self.losses + 1
        now.told["coded"] = told = {"planned": n, "asked": len(members), "symbols": n - self.losses}
        if n > MAX_DEVICES:
            _skipped(now, f"{n} clients take part, a gradient code has at most {MAX_DEVICES}", never=True)
            return None
        if n < least:
            why = (
                f"{n} clients take part, a code for {least - 1} losses needs {least}: lower losses, or ask more clients"
            )
            _skipped(now, why, never=len(now.nodes) < least)
            return None
        code, loose = self.code(n, now.seed)
        if loose:
            now.note(f"the cyclic code for {n} clients amplifies rounding by more than usual; a field does not")
        values = values_of(self.arithmetic, n, self.limit)
        rows = _Rows(now.layout, values, {partition: device for device, partition in enumerate(devices)})
        answers = yield Wait(
            [
                Ask(node, say=self._combine(code, values, devices, rows.place[node]), expects=Combined)
                for node in members
            ],
            self.seconds,
            lambda came: self._enough(code, rows, came),
        )
        taken = rows.take(answers, now)
        told |= {"received": len(taken), "bytes": sum(row.nbytes + CHECK for row in taken.values())}
        return self._concluded(now, members, code, rows, taken)

    def _devices(self, now: Now, members: Sequence[int]) -> list[int]:
        """Return the partitions of the round's code in ascending order: those of the members, and of a few that went
        offline."""
        # The driver says who is offline: who is not asked because only a sample is, has not left.
        former, away = now.state.get("devices", []), now.state.get("away", [])
        gone = [p for p in former if p in away and p not in members] if set(members) <= set(former) else []
        if len(gone) > self.losses:
            now.note(f"the clients of partitions {gone} are offline: the code is made without their data")
            gone = []
        now.state["devices"] = sorted([*members, *gone])
        return list(now.state["devices"])

    def _combine(self, code: Assignment, values: Arithmetic, devices: Sequence[int], device: int) -> Combine:
        partitions = tuple(devices[j] for j in code.partitions(device))
        return Combine(partitions, code.coefficients(device).astype(values.dtype).tobytes(), code.n)

    def _enough(self, code: Assignment, rows: _Rows, came: Sequence[Answer]) -> bool:
        """Whether the answers so far determine the sum or reach the quorum."""
        kept = rows.agreeing(came)
        return 0 < self.quorum <= len(kept) or code.can_decode_sum(kept)

    def _concluded(
        self, now: Now, members: Sequence[int], code: Assignment, rows: _Rows, taken: Mapping[int, NDArray[Any]]
    ) -> Step | None:
        """Decode the sum; return the mean as a step."""
        told = now.told["coded"]
        try:
            decoding = code.decoding(taken, approximate=self.approximate)
        except NotDecodable as error:
            _skipped(now, str(error))
            return None
        if not taken:
            _skipped(now, "no client sent a usable answer")
            return None
        told["innovative"] = int(np.count_nonzero(decoding.coefficients))
        # Redundant answers cost nothing more and show clients whose numbers differ.
        contradiction = code.disagreement(taken)
        if contradiction > _AGREES:
            now.note(
                f"redundant answers contradict each other by {contradiction:.1e} of their size: clients compute "
                "different updates of the same partition, by different hardware or on purpose. It is unknown which"
            )
        vector, scalars = rows.values.unpack(code.decode(taken, approximate=self.approximate), now.layout.size)
        # Every device puts its partitions' weights first, so this is the sum of all of them.
        weight, left_out = float(scalars[0]), list[int]()
        if not decoding.exact:
            told["residual"] = decoding.residual
            now.note(f"an approximation: the answers do not determine the sum, residual {decoding.residual:.3g}")
            # The factor of each partition's update in the decoded sum; in an exact one all are 1.
            share = code.matrix.astype(np.float64).T @ decoding.coefficients.astype(np.float64)
            left_out = [node for node in members if abs(share[rows.place[node]]) < TOLERANCE]
        if not weight > 0.0:
            _skipped(now, f"the total weight is {weight:g}: nothing to average")
            return None
        told["included"], told["left_out"] = [node for node in members if node not in left_out], left_out
        form = rows.form
        assert form is not None
        with np.errstate(over="ignore", invalid="ignore"):
            mean = scalars / weight
            tensors = moved(now.tensors(), vector / weight, mean[1 + form.count :], now.layout)
        metrics = form.to_metrics(mean[1 : 1 + form.count], self.weight, weight)
        device_of = {device: node for node, device in rows.place.items()}
        return Step(tuple(device_of[device] for device in sorted(taken)), tensors=tensors, metrics=metrics)

    # A client.

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if ask.kind == HELLO:
            return memory, Answer(me.node)
        plan, trains = ask.say, me.data
        if not isinstance(plan, Combine):
            raise AnswerError("the ask does not say which partitions to train on")
        if trains is None:
            raise AnswerError("this client does not train for others")
        values = values_of(self.arithmetic, plan.parts, self.limit)
        size = len(plan.partitions) * values.dtype.itemsize
        if len(plan.coefficients) != size:
            raise StateError(f"the plan has {len(plan.coefficients)} bytes of coefficients, expected {size}")
        rows, forms = [], []
        for partition in plan.partitions:
            part = trains(me, partition)
            try:
                row, form = self._row(part, me.layout, values)
            except FedcompError as error:
                raise CodingError(f"partition {partition}: {error}") from error
            rows.append(row)
            forms.append(form)
        if len(set(forms)) > 1:
            raise ConfigError(f"the app's replies differ in form from partition to partition: {forms[0]}, {forms[-1]}")
        row = combine(np.frombuffer(plan.coefficients, values.dtype), rows, values.field)
        frame = checked_bytes(row, values.dtype)
        return memory, Answer(me.node, say=Combined(forms[0].to_text()), frames={"row": frame}, bare=True)

    def _row(self, part: Part, layout: Layout, values: Arithmetic) -> tuple[NDArray[Any], Form]:
        """Return a partition's row: the weighted change and, as scalars, weight, metrics and the values outside the
        vector."""
        weight = part.metrics.get(self.weight) if self.weight else 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < HEAVIEST:
            raise ConfigError(
                f"metric {self.weight!r} is {weight!r}, expected a number >= 0 and < 2**63: the update's weight"
            )
        form, numbers = Form.of(part.record, part.metrics, self.weight)
        vector, beside = change_of(part.before, part.after, layout)
        with np.errstate(over="ignore", invalid="ignore"):
            # The 1 in front becomes the weight, and its sum is what the server divides by.
            scalars = np.concatenate([[1.0], numbers, beside]) * float(weight)
            return values.pack(vector * float(weight), scalars), form


@dataclass
class _Rows:
    """The rows of one round, each checked as it arrives.

    Attributes
    ----------
    place : dict of int to int
        Device by partition.
    form : Form, optional
        That most answers have.
    """

    layout: Layout
    values: Arithmetic
    place: dict[int, int]
    form: Form | None = None
    _seen: dict[int, tuple[Form, NDArray[Any]]] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)

    def agreeing(self, answers: Sequence[Answer]) -> list[int]:
        """Return the devices whose answers have the most frequent form, and store that form; none if two are equally
        frequent."""
        for answer in answers:
            device = self.place[answer.node]
            # What was read before is not read again: this is called after each arrival.
            if device not in self._seen and device not in self._refused:
                try:
                    self._seen[device] = self._open(answer)
                except FedcompError as error:
                    self._refused[device] = str(error)
        forms = Counter(form for form, _ in self._seen.values()).most_common(2)
        if not forms or (len(forms) == 2 and forms[0][1] == forms[1][1]):
            return []
        self.form = forms[0][0]
        return sorted(device for device, (form, _) in self._seen.items() if form == self.form)

    def take(self, answers: Sequence[Answer], now: Now) -> dict[int, NDArray[Any]]:
        """Return the usable rows by device; refuse the others."""
        kept = self.agreeing(answers)
        for answer in answers:
            device = self.place[answer.node]
            if device in self._refused:
                now.refuse(answer.node, self._refused[device])
            elif device not in kept:
                now.refuse(answer.node, "its metrics are not the others'")
        return {device: self._seen[device][1] for device in kept}

    def _open(self, answer: Answer) -> tuple[Form, NDArray[Any]]:
        if not isinstance(answer.say, Combined) or "row" not in answer.frames:
            raise AnswerError("the reply holds no answer")
        form = Form.from_text(answer.say.form)
        scalars = 1 + form.count + sum(spec.size for spec in self.layout.exact)
        row = numbers_of(answer.frames["row"], self.values.size(self.layout.size, scalars), self.values.dtype)
        return form, self.values.require(row)


def _met(now: Now) -> Generator[list[Ask], Sequence[Answer], list[int]]:
    """Return the participants in ascending order. A plan names partitions, which are unknown for nodes that have never
    answered."""
    strangers = [node for node in now.nodes if node in now.strangers]
    met = [node for node in now.nodes if node not in now.strangers]
    if strangers:
        met += [answer.node for answer in (yield [Ask(node, HELLO) for node in strangers])]
    return sorted(met)


def _skipped(now: Now, reason: str, *, never: bool = False) -> None:
    now.told["skipped"] = reason
    now.skip(reason, too_few=never)


@lru_cache(maxsize=8)
def made(n: int, losses: int, scheme: str, seed: int, arithmetic: str, limit: float) -> tuple[Assignment, bool]:
    """Return a code; finding a cyclic one takes many decompositions, and the number of clients rarely changes."""
    numbers = values_of(arithmetic, n, limit).field
    try:
        return assignment(n, losses, scheme=scheme, seed=seed, field=numbers), False
    except ConfigError:
        if scheme == "fractional" or numbers is not None:
            raise
        # With so many losses every draw amplifies; a code that does, and says so, is better than none.
        return Cyclic(n, losses, seed, max_amplification=_LOOSE), True


def change_of(before: Tensors, after: Tensors, layout: Layout) -> tuple[Doubles, Doubles]:
    """Return what training changed, as float64: the layout's tensors as one vector, and what it carries beside them.

    Constants that are not finite (attention masks) have to be the same, and count as not changed.

    Raises
    ------
    LayoutError
        When ``after`` is another model, or an integer is too large for float64.
    NonFiniteUpdate
        When it holds NaN or infinity where ``before`` does not.
    """
    layout.check(after)
    parts: list[list[Doubles]] = [[], []]
    for place, group in enumerate((layout.tensors, layout.exact)):
        for spec in group:
            old, new = np.asarray(before[spec.name]), np.asarray(after[spec.name])
            if not np.can_cast(new.dtype, old.dtype, "same_kind"):
                raise LayoutError(f"tensor {spec.name!r} is {new.dtype} after training, {old.dtype} before")
            if old.dtype.kind in "iu" and new.size and max(_largest(old), _largest(new)) > 2**53:
                raise LayoutError(f"tensor {spec.name!r} holds integers above 2^53, so no exact sum can be coded")
            odd = ~np.isfinite(old)
            if not np.array_equal(odd, ~np.isfinite(new)) or not _same(old[odd], new[odd]):
                raise NonFiniteUpdate(f"tensor {spec.name!r} holds non-finite values that the model does not")
            change = np.zeros(spec.size, np.float64)
            finite = ~odd.reshape(-1)
            # Finite places only: infinity less infinity would be NaN.
            change[finite] = new.reshape(-1)[finite].astype(np.float64) - old.reshape(-1)[finite].astype(np.float64)
            parts[place].append(change)
    vector, beside = (np.concatenate(part) if part else np.zeros(0, np.float64) for part in parts)
    return vector, beside


def moved(before: Tensors, vector: Doubles, beside: Doubles, layout: Layout) -> dict[str, NDArray[Any]]:
    """Return the model after a mean change, in the model's order; floats in their own dtypes, other tensors as float64.

    The reverse of :func:`change_of`; the sum is float64 and rounded once.
    """
    out: dict[str, NDArray[Any]] = {}
    starts = [0, 0]
    for place, (group, change) in enumerate(((layout.tensors, vector), (layout.exact, beside))):
        for spec in group:
            old = np.asarray(before[spec.name])
            part = change[starts[place] : starts[place] + spec.size].reshape(spec.shape)
            starts[place] += spec.size
            new = old.astype(np.float64) + part
            out[spec.name] = new.astype(old.dtype) if old.dtype.kind == "f" else new
    return {name: out[name] for name in layout.order}


def _largest(array: NDArray[Any]) -> int:
    return max(abs(int(array.max())), abs(int(array.min())))


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
