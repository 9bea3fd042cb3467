"""Benchmark tables: cases that are timed or measured, their limits, and one runner for all.

Absolute times of a shared machine say little: claims are ratios taken in one run, of methods whose calls are
interleaved. Time is the processor time of one thread, so that other processes do not count.
"""

from __future__ import annotations

import json
import math
import operator
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

HISTORY: Final = Path("runs", "bench.jsonl")
"""Where every run of a benchmark leaves a line."""

Row = Mapping[str, Any]

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


@dataclass(frozen=True)
class Claim:
    """``value op bound`` must hold. ``source`` says where the bound comes from: a paper, theory, a measurement.

    ``gate=False`` marks a goal that is reported but does not fail the run (for instance a throughput that depends on
    how busy the machine is); the document still shows whether it held.

    A claim that could not be measured, because a peer is not installed, says in ``skipped`` why and what to install.
    It has no value, neither holds nor fails, and gates nothing. NaN without a reason is a failed measurement: it fails.

    Examples
    --------
    >>> Claim("points of accuracy lost", 0.4, "<=", 1.0, "goal of this package").ok
    True
    >>> Claim("faster than torch", math.nan, ">=", 1.0, "goal", skipped="torch is not installed: pip install torch").ok
    """

    name: str
    value: float
    op: str
    bound: float
    source: str
    gate: bool = True
    skipped: str = ""

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise ValueError(f"claim {self.name!r}: unknown comparison {self.op!r}; use one of {sorted(_OPERATORS)}")
        if self.skipped:
            object.__setattr__(self, "value", math.nan)
            object.__setattr__(self, "gate", False)

    @property
    def ok(self) -> bool | None:
        """Whether the measured value satisfies the bound, None when it was skipped. NaN never does."""
        if self.skipped:
            return None
        return not math.isnan(self.value) and bool(_OPERATORS[self.op](self.value, self.bound))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Claim:
        """Read :meth:`to_json`'s dictionary, also with the value as None that JSON has for NaN."""
        known = {field: document[field] for field in ("name", "value", "op", "bound", "source", "gate")}
        value = math.nan if known["value"] is None else float(known["value"])
        # Documents that were written before claims could be skipped have no reason in them.
        return cls(**{**known, "value": value, "skipped": document.get("skipped", "")})

    def to_json(self) -> dict[str, Any]:
        """Return the claim as a JSON-able dictionary."""
        return {**asdict(self), "ok": self.ok}


UNMEASURED: Final = "not measured"
"""The word for a claim that was skipped, and for a figure that is missing."""


def mark(claim: Mapping[str, Any]) -> str:
    """Return how a claim's document ended: ``"holds"``, ``"FAILED"``, ``"missed"`` for a goal, which decides no exit
    code, or ``"not measured"``."""
    if claim["ok"] is None:
        return UNMEASURED
    return "holds" if claim["ok"] else "FAILED" if claim["gate"] else "missed"


class Prepared(NamedTuple):
    """A call that uses up what it is given: ``call(prepare())``, of which only ``call`` is timed."""

    prepare: Callable[[], Any]
    call: Callable[[Any], object]


Calls = Mapping[str, Callable[[], object] | Prepared]


class Times:
    """Seconds of several methods, their calls interleaved: load that comes and goes meets all of them.

    One repetition more goes before, which warms caches and allocators and is not counted.

    Parameters
    ----------
    calls : mapping
        By method; each does all of its work every time.
    repetitions : int
    limit : callable, optional
        What times are compared with, called before each method.
    sample : float
        Seconds that a sample lasts at least: shorter calls are repeated within it, after one that warms up.

    Attributes
    ----------
    seconds : dict of str to list of float
        By method, one a repetition.
    limits : list of float
        The limit's mean time in each repetition.
    """

    WARM: Final = 0.05
    """Longer calls, in seconds, show nothing of what ran before them, and are not warmed up."""

    def __init__(
        self, calls: Calls, repetitions: int, limit: Callable[[], object] | None = None, sample: float = 0.0
    ) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in calls}
        self.limits: list[float] = []
        lengths: dict[str, float] = {}
        for repetition in range(-1, repetitions):
            limits = []
            for name, call in calls.items():
                if limit is not None:
                    limits.append(_seconds(limit, 1))
                length, count = lengths.get(name, 0.0), 1
                if length and sample:
                    count = max(1, math.ceil(sample / length))
                    if length < self.WARM and not isinstance(call, Prepared):
                        _seconds(call, 1)
                taken = _seconds(call, count)
                if repetition >= 0:
                    self.seconds[name].append(taken)
                elif sample:
                    # Not the first call, which may compile.
                    lengths[name] = max(_seconds(call, 1), 1e-7)
            if limit is not None and repetition >= 0:
                self.limits.append(fmean(limits))

    def median(self, method: str) -> float:
        """Return the median seconds of one call."""
        return median(self.seconds[method])

    def multiple(self, method: str) -> float:
        """Return the method's time in those of the limit."""
        # Ratios first, then the median: a slow repetition slows both and drops out.
        return median(s / limit for s, limit in zip(self.seconds[method], self.limits, strict=True))

    def ratio(self, of: str | Sequence[str], to: str | Sequence[str]) -> float:
        """Return the median over repetitions of one method's time, or the sum of several, over another's."""
        return median(a / b for a, b in zip(self._sums(of), self._sums(to), strict=True))

    def _sums(self, methods: str | Sequence[str]) -> list[float]:
        names = [methods] if isinstance(methods, str) else methods
        return [sum(each) for each in zip(*(self.seconds[name] for name in names), strict=True)]


def _seconds(call: Callable[[], object] | Prepared, count: int) -> float:
    """Return the mean seconds of ``count`` calls."""
    total = 0.0
    if isinstance(call, Prepared):
        for _ in range(count):
            given = call.prepare()
            start = time.thread_time()
            call.call(given)
            total += time.thread_time() - start
        return total / count
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


class Traced(NamedTuple):
    """A call's result, the bytes that it allocated at its peak, and those it kept, as Python and numpy count them."""

    result: Any
    peak: int
    kept: int


def traced(call: Callable[[], Any]) -> Traced:
    """Call and count memory, which takes time: a traced call is not timed."""
    tracemalloc.start()
    try:
        result = call()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Traced(result, peak, kept)


class Found:
    """What a benchmark found so far.

    Attributes
    ----------
    rows : list of mappings
    claims : list of Claim
    times : Times
        Of the last case that was timed.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.claims: list[Claim] = []
        self.times = Times({}, 0)

    def of(self, column: str, **where: Any) -> Any:
        """Return a column of the one row that has these values in others."""
        (row,) = (row for row in self.rows if column in row and all(row.get(k) == v for k, v in where.items()))
        return row[column]


@dataclass(frozen=True)
class Bound:
    """What a case must keep.

    Attributes
    ----------
    name : str
        Of the claim.
    value : str, tuple or callable
        A method, whose time is divided by the limit's; ``"A / B"``, the time of one method over another's; a column of
        the row that has certain values in others, ``("ms", {"clients": 10})``, or over that of another row,
        ``("ms", {"clients": 10}, {"clients": 1})``; or a function of what was found.
    bound : str
        ``"<= 1.2"``.
    source : str
        Where the bound comes from.
    gate : bool
        Whether the run fails with it; a goal is reported and fails nothing.
    sure : bool
        Whether it holds at the smallest sizes as well: a quick run gates nothing else.
    skipped : str
        Why it cannot be measured, and what to install.
    """

    name: str
    value: str | tuple[Any, ...] | Callable[[Found], float]
    bound: str
    source: str
    gate: bool = True
    sure: bool = False
    skipped: str = ""

    def claim(self, found: Found, quick: bool) -> Claim:
        """Return whether it was kept."""
        op, _, bound = self.bound.partition(" ")
        gate = self.gate and (self.sure or not quick)
        value = math.nan if self.skipped else float(self._value(found))
        return Claim(self.name, value, op, float(bound), self.source, gate, self.skipped)

    def _value(self, found: Found) -> float:
        if isinstance(self.value, tuple):
            column, *rows = self.value
            of, *to = [found.of(column, **where) for where in rows]
            return float(of / to[0] if to else of)
        if not isinstance(self.value, str):
            return self.value(found)
        method, _, other = self.value.partition(" / ")
        return found.times.ratio(method, other) if other else found.times.multiple(method)


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes
    ----------
    name : str
        What is told before; nothing is told where it is empty.
    measure : callable
        From what was found to the rows it adds.
    bounds : sequence of Bound
        Checked as soon as it is measured.
    """

    name: str = ""
    measure: Callable[[Found], Iterable[Row]] = lambda found: ()
    bounds: Sequence[Bound] = ()


def timed(
    name: str,
    calls: Calls,
    repetitions: int,
    row: Callable[[Times, str], Row],
    bounds: Sequence[Bound] = (),
    **how: Any,
) -> Case:
    """Return the case of methods that are timed side by side: ``row`` makes each one's row, ``how`` is for
    :class:`Times`."""

    def measure(found: Found) -> list[Row]:
        found.times = Times(calls, repetitions, **how)
        return [row(found.times, method) for method in calls]

    return Case(f"{name}: {repetitions} interleaved repetitions", measure, bounds)


def run(cases: Iterable[Case], *, quick: bool = False, say: Callable[[str], object] = lambda _line: None) -> Found:
    """Measure the cases, one after the other; ``say`` is told what comes next."""
    found = Found()
    for case in cases:
        if case.name:
            say(case.name)
        found.rows += case.measure(found)
        found.claims += [bound.claim(found, quick) for bound in case.bounds]
    return found


def conclude(
    name: str, found: Found, show: Callable[[dict[str, Any]], None], *, quick: bool, environment: Mapping[str, Any]
) -> int:
    """Show what a benchmark found, add a line to :data:`HISTORY`, and return 1 where a claim that gates failed, else 0.

    ``show`` receives ``benchmark``, ``quick``, ``rows``, ``claims`` (as :meth:`Claim.to_json` has them, with None for
    NaN) and ``environment``.
    """
    claims = [claim.to_json() for claim in found.claims]
    claims = [{**claim, "value": None if math.isnan(claim["value"]) else claim["value"]} for claim in claims]
    head = {"benchmark": name, "quick": quick}
    show({**head, "rows": found.rows, "claims": claims, "environment": environment})
    failed = [claim.name for claim in found.claims if claim.gate and not claim.ok]
    line = {**head, "commit": _commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds"), "failed": failed}
    line |= {"values": {claim["name"]: claim["value"] for claim in claims}, "environment": environment}
    try:
        HISTORY.parent.mkdir(exist_ok=True)
        with HISTORY.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"the history of benchmarks could not be written: {error}", file=sys.stderr)
    return int(bool(failed))


def _commit() -> str:
    """Return the commit of the checkout with this file, or "none" outside a checkout."""
    here = Path(__file__).resolve()
    if not (here.parents[1] / ".git").exists():
        return "none"
    asked = ["git", "-C", str(here.parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
