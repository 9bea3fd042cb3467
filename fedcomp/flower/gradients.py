"""What the two sides of a gradient-coded round say to each other: a device's part of the plan, and its answer.

A device is told which partitions to train on and what to multiply their updates with; it needs to know nothing of the
code. Of every partition it makes two rows of float64: the *vector*, the weighted change of the tensors that are
trained, and the *scalars*, the weight, the weighted metrics, and the weighted change of what a layout carries beside
the vector (counters, statistics). Both are combined alike, so that the decoded sum holds all a weighted mean needs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from fedcomp.errors import LayoutError, NonFiniteUpdate, StateError
from fedcomp.flower.coded import Header, Indexed
from fedcomp.flower.payload import PARTITIONS
from fedcomp.layout import Layout
from fedcomp.plain import from_plain
from fedcomp.rules import Data, Int, Many, Real, Text

ANSWER: Final = "fedcomp.coded.answer"
"""Key of the frame that holds a device's combined row."""

MAX_DEVICES: Final = 4096
"""Largest number of devices a plan may name."""

MAX_METRICS: Final = 4096
"""Largest number of metric values in an answer."""

_FORM: Final = tuple[str, str, tuple[tuple[str, Annotated[int, Int(0, MAX_METRICS)]], ...]]

Doubles = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class GradientPlan(Indexed):
    """What one device is asked for.

    Attributes
    ----------
    partitions : tuple of int
        Partition ids to train on, in the order of the coefficients.
    coefficients : bytes
        What the rows are multiplied with, in the little-endian number format of ``arithmetic``.
    arithmetic : str
        Kind of numbers, a name that :func:`fedcomp.coding.gradvalues.values_of` knows.
    parts : int
        Number of rows in the sum of all partitions.
    limit : float
        Largest magnitude of a weighted change; it means something only in a field.
    weight : str
        The metric that weighs an update; empty when every partition weighs 1.
    """

    partitions: Annotated[tuple[int, ...], Many(Int(most=PARTITIONS - 1), MAX_DEVICES, least=1)]
    coefficients: Annotated[bytes, Data(8 * MAX_DEVICES, least=1)]
    arithmetic: Annotated[str, Text(64, least=1)]
    parts: Annotated[int, Int(1, MAX_DEVICES)]
    limit: Annotated[float, Real(finite=False)]
    weight: Annotated[str, Text()] = ""

    def conflict(self) -> str:
        twice = len(set(self.partitions)) < len(self.partitions)
        return f"it names the partitions {self.partitions[:8]}, one of them twice" if twice else ""


@dataclass(frozen=True, kw_only=True)
class GradientAnswer(Header):
    """What a device says of its combined row: a :class:`Form` as text, and the row's checksum."""

    form: Annotated[str, Text(1 << 16, least=1)]
    checksum: Annotated[int, Int(most=2**32 - 1)]


@dataclass(frozen=True)
class Form:
    """What the scalars of an answer mean, and how the app names its records; the same on every device.

    Attributes
    ----------
    record : str
        Name of the ArrayRecord the app replied.
    metrics : str
        Name of the MetricRecord.
    names : tuple of (str, int)
        The metrics in order of name, with the length of a list, 0 for a single number. The weight is not among them.
    """

    record: str
    metrics: str
    names: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """Number of metric values."""
        return sum(max(1, length) for _, length in self.names)

    def to_text(self) -> str:
        """Return the form as JSON."""
        return json.dumps([self.record, self.metrics, [list(pair) for pair in self.names]], separators=(",", ":"))

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
    def of(cls, record: str, metrics: str, values: Mapping[str, Any], weight: str) -> tuple[Form, Doubles]:
        """Return the form of a reply's metrics, and their values."""
        # An empty list has no mean.
        kept = {name: value for name, value in sorted(values.items()) if name != weight and value != []}
        names = tuple((name, len(value) if isinstance(value, list) else 0) for name, value in kept.items())
        numbers = [v for value in kept.values() for v in (value if isinstance(value, list) else [value])]
        return cls(record, metrics, names), np.array(numbers, np.float64)

    def to_metrics(self, values: Doubles, weight: str, total: float) -> MetricRecord:
        """Return mean metric values as a record; the weight, if there is one, is the total."""
        # A number of examples stays a whole number, as apps report it.
        out: dict[str, Any] = {weight: int(total) if total.is_integer() else total} if weight else {}
        position = 0
        for name, length in self.names:
            part = values[position : position + max(1, length)].tolist()
            out[name] = part if length else part[0]
            position += max(1, length)
        return MetricRecord(out)


def change_of(before: Arrays, after: Arrays, layout: Layout) -> tuple[Doubles, Doubles]:
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
                raise LayoutError(f"tensor {spec.name!r} holds integers above 2^53, of which no exact sum can be coded")
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


def moved(before: Arrays, vector: Doubles, beside: Doubles, layout: Layout) -> dict[str, NDArray[Any]]:
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


def beside_size(layout: Layout) -> int:
    """Return how many numbers a layout carries beside its vector."""
    return sum(spec.size for spec in layout.exact)


def checksum(data: bytes) -> int:
    """Return the CRC-32 of an answer: a damaged one would decode to another sum without anybody noticing."""
    return zlib.crc32(data)


def _largest(array: NDArray[Any]) -> int:
    return max(abs(int(array.max())), abs(int(array.min())))


def _same(a: NDArray[Any], b: Sequence[Any] | NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
