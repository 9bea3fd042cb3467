"""Timing in read passes: what a kernel costs relative to merely reading its vector once.

Absolute times of a shared machine say little. Everything here runs in one thread, as a simulated client does, so the
thread's processor time is taken: it leaves out what other processes did meanwhile. And every time is divided by that of
a read pass, the vectorised sum of |x|: one is taken before each call, the mean over a repetition is the repetition's
limit, and the median of the ratios over interleaved repetitions is reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import why_missing
from fedcomp.experiments.findings import Claim

LAYERS: Final = 60
Vector = NDArray[np.float32]


def layered(size: int, seed: int = 0) -> Vector:
    """Return Student t(4) values in equal layers of log-normal scale, float32 of shape (size,)."""
    rng = np.random.default_rng(seed)
    vector = rng.standard_t(4, size).astype(np.float32)
    # Layers of unlike scale, as models have them: a threshold for all is then decided by a few layers.
    for layer in np.array_split(vector, LAYERS):
        layer *= np.float32(np.exp(rng.normal()))
    return vector


class Times:
    """Times of several methods on one vector, repetition by repetition.

    Parameters
    ----------
    size : int
        Elements of the vector.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seconds: dict[str, list[float]] = {}
        self.limits: list[float] = []

    def add(self, seconds: Mapping[str, float], limit: float) -> None:
        """Record one repetition: every method's time and the mean read pass."""
        for method, taken in seconds.items():
            self.seconds.setdefault(method, []).append(taken)
        self.limits.append(limit)

    def measure(self, methods: Mapping[str, Callable[[], object]], vector: Vector, repetitions: int) -> None:
        """Time every method ``repetitions`` times, interleaved, a read pass over ``vector`` before each."""
        limit = read_pass(vector)
        for repetition in range(-1, repetitions):
            limits, seconds = [], {}
            for name, call in methods.items():
                # Before each method: load that comes and goes meets the limit as well.
                limits.append(_seconds(limit))
                seconds[name] = _seconds(call)
            if repetition >= 0:  # the first repetition warms caches and allocators
                self.add(seconds, fmean(limits))

    def multiple(self, method: str) -> float:
        """Return the method's time in read passes."""
        # Ratios first, then the median: a slow repetition slows both and drops out.
        return median(s / limit for s, limit in zip(self.seconds[method], self.limits, strict=True))

    def ratio(self, method: str, to: str) -> float:
        """Return the median over repetitions of one method's time over another's."""
        return median(a / b for a, b in zip(self.seconds[method], self.seconds[to], strict=True))

    def rows(self, **columns: Any) -> list[dict[str, Any]]:
        """Return one row per method, ``columns`` between the size and the method's name."""
        return [
            {
                "n": self.size,
                **columns,
                "method": method,
                "milliseconds": round(1e3 * median(times), 3),
                "read passes": round(self.multiple(method), 2),
            }
            for method, times in self.seconds.items()
        ]


@dataclass(frozen=True)
class Limit:
    """What a method may take in read passes, claimed at full size only: a vector that fits in the cache reads for next
    to nothing. ``name`` is the claim's."""

    name: str
    method: str
    most: float
    source: str
    gate: bool = True


@dataclass(frozen=True)
class Against:
    """What the time of a method ``of`` over that ``to`` another has to be; a method that is not there needs torch."""

    name: str
    of: str
    to: str
    op: str
    bound: float
    source: str


@dataclass(frozen=True)
class Case:
    """Methods that are timed side by side on one vector, and what is claimed of them.

    Attributes
    ----------
    text : str
        What is told before.
    vector : float32 array of shape (n,)
        Of the read pass.
    calls : mapping of str to callable
        By method; each does all of its work every time.
    limits, against : sequence
    columns : mapping
        Of the rows, before the method.
    """

    text: str
    vector: Vector
    calls: Mapping[str, Callable[[], object]]
    limits: Sequence[Limit] = ()
    against: Sequence[Against] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def claims(self, times: Times, *, against_limit: bool) -> list[Claim]:
        """Return the checks of these times; those of limits only if ``against_limit``."""
        found = []
        for one in self.against:
            missing = "" if {one.of, one.to} <= times.seconds.keys() else why_missing("torch")
            ratio = math.nan if missing else times.ratio(one.of, one.to)
            found.append(Claim(one.name, ratio, one.op, one.bound, one.source, skipped=missing))
        for limit in self.limits if against_limit else ():
            passes = times.multiple(limit.method)
            found.append(Claim(limit.name, passes, "<=", limit.most, limit.source, gate=limit.gate))
        return found


def measured(
    cases: Iterable[Case], repetitions: int, say: Callable[[str], None], *, against_limit: bool
) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Time every case, one after the other, and return the rows and the claims of all."""
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for case in cases:
        say(f"{case.text}: {repetitions} interleaved repetitions")
        times = Times(case.vector.size)
        times.measure(case.calls, case.vector, repetitions)
        rows += times.rows(**case.columns)
        claims += case.claims(times, against_limit=against_limit)
    return rows, claims


def read_pass(vector: Vector) -> Callable[[], object]:
    """Return one vectorised read pass: the sum of |x| in one thread."""
    import numba

    # fastmath lets the compiler vectorise the sum, which is what makes it a limit: memory decides.
    @numba.njit(nogil=True, fastmath=True)
    def total(x: Vector) -> Any:
        s = np.float32(0.0)
        for i in range(x.size):
            s += abs(x[i])
        return s

    # Compiles it.
    total(vector[:1])
    return lambda: total(vector)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread in torch, where it is installed: simulated clients share the cores."""
    if why_missing("torch"):
        yield
        return
    from fedcomp.tasks.base import single_thread

    with single_thread():
        yield


def interleaved(calls: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Return the processor seconds of every call, one a repetition: load that comes and goes meets all of them.

    One repetition more goes before, which warms caches and allocators and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(-1, repetitions):
        for name, call in calls.items():
            taken = _seconds(call)
            if repetition >= 0:
                seconds[name].append(taken)
    return seconds


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time by the clock of ``repeats`` calls, after one that warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
