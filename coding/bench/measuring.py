"""Interleaved timing, and claims about what it finds."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

MIB: Final = 1 << 20
SAMPLE: Final = 1e-3
"""Seconds a timed sample lasts at least: shorter calls are repeated within it."""
WARM: Final = 0.05
"""Calls up to so many seconds are made once without timing before a sample.

Otherwise a sample would show which method ran before it and what that left in the caches. In longer calls it does not.
"""

_OPERATIONS: Final = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class BenchClaim:
    """``value op bound`` must hold. A claim that could not be measured has no value and says why it was ``skipped``.

    ``gate=False`` marks what is reported but does not fail the run: stretch goals, and what no goal was set for.
    """

    name: str
    value: float | None
    op: str
    bound: float
    source: str
    gate: bool = True
    skipped: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether it holds; None when it was skipped. NaN never does."""
        if self.value is None:
            return None
        return not math.isnan(self.value) and bool(_OPERATIONS[self.op](self.value, self.bound))


@dataclass(frozen=True)
class Size:
    """How much is measured: bytes of a generation and repetitions; quick ones only show that everything runs."""

    generation: int = MIB
    repetitions: int = 15
    quick: bool = False


class Prepared(NamedTuple):
    """A call that uses up what it is given: ``call(prepare())``, of which only ``call`` is timed."""

    prepare: Callable[[], Any]
    call: Callable[[Any], object]


Calls = Mapping[str, Callable[[], object] | Prepared]


class CallTimes:
    """Seconds of several methods, repetition by repetition, their calls interleaved."""

    def __init__(self, calls: Calls, size: Size) -> None:
        lengths = {name: 0.0 if size.quick else _length(call) for name, call in calls.items()}
        self.seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(size.repetitions):
            for name, call in calls.items():
                self.seconds[name].append(_sample(call, lengths[name]))

    def time(self, name: str) -> float:
        """Return the median seconds of one call."""
        return median(self.seconds[name])

    def faster(self, name: str, than: str) -> float:
        """Return how many times as fast a method is: the median ratio within a repetition."""
        # Within a repetition: the machine's speed drifts from one to the next, and cancels in each ratio.
        pairs = zip(self.seconds[than], self.seconds[name], strict=True)
        return median(other / mine for other, mine in pairs)

    def ratio(self, of: Sequence[str], to: Sequence[str]) -> float:
        """Return the median over repetitions of one sum of times over another."""
        sums = ([sum(times) for times in zip(*(self.seconds[n] for n in part), strict=True)] for part in (of, to))
        return median(a / b for a, b in zip(*sums, strict=True))


def _length(call: Callable[[], object] | Prepared) -> float:
    """Return about how many seconds a call takes, 0 never."""
    # Not counted: a first call may compile, and finds cold caches.
    _seconds(call, 1)
    # A length of 0 is how a quick run tells _sample() to make a single call.
    return max(_seconds(call, 1), 1e-7)


def _sample(call: Callable[[], object] | Prepared, length: float) -> float:
    """Return the mean seconds of as many calls as make a sample, when each takes ``length``; of one when it is 0."""
    if not length:
        return _seconds(call, 1)
    if length < WARM and not isinstance(call, Prepared):
        call()
    return _seconds(call, max(1, math.ceil(SAMPLE / length)))


def _seconds(call: Callable[[], object] | Prepared, count: int) -> float:
    """Return the mean seconds of ``count`` calls; the thread's own, so that other processes do not count."""
    if isinstance(call, Prepared):
        total = 0.0
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
