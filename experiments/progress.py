"""Progress of a run: finished rows, rounds and measurements, and the estimated remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from fedcomp.experiments.report import count, duration, percent
from fedcomp.experiments.spec import RoundRecord, RunSpec

if TYPE_CHECKING:
    from typing import Self


class Remaining:
    """Estimates how long the rest of a run takes from what its parts have taken in this session.

    Rounds that are left are given the mean of those that were made, and so are the parts of the measurement. How many
    parts it has is known when it announces them.

    Parameters
    ----------
    rounds : mapping of str to int
        Rounds asked for, by label of the row.
    expected : float
        Seconds the whole run is known to take; 0 where nobody knows. It is used for what has not begun.
    clock : callable
        Returns seconds.

    Examples
    --------
    >>> now = 0.0
    >>> remaining = Remaining({"dense": 10, "sparse": 10}, clock=lambda: now)
    >>> remaining.begin("dense", 0)
    >>> now = 6.0
    >>> remaining.round("dense", 3)
    >>> str(remaining)
    '0 of 2 systems, 3 of 20 rounds, 34.0 s left for the systems'
    """

    def __init__(
        self,
        rounds: Mapping[str, int],
        *,
        expected: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._asked = dict(rounds)
        self._done = dict.fromkeys(rounds, 0)
        self._finished: set[str] = set()
        self._expected, self._clock = expected, clock
        # When the first row of this session began, the rounds that it need not make, and the seconds of one.
        self._began, self._before, self._pace = math.nan, 0, 0.0
        self._cells = (0, 0)
        self._cells_began: tuple[float, int] | None = None
        self._estimate: tuple[float, float] | None = (expected, clock()) if expected else None
        self._more = False

    def begin(self, label: str, done: int) -> None:
        """A row begins, or continues after ``done`` rounds."""
        self._began = self._clock() if math.isnan(self._began) else self._began
        self._before += done
        self._done[label] = done

    def round(self, label: str, done: int) -> None:
        """A row has made ``done`` rounds."""
        self._done[label] = done
        made = sum(self._done.values()) - self._before
        if made > 0:
            self._pace = (self._clock() - self._began) / made
            self._update()

    def finish(self, label: str) -> None:
        """A row is finished, by however many rounds."""
        # A private row may end early, at its budget: rounds it will not make are not left to do.
        self._asked[label] = self._done[label]
        self._finished.add(label)
        self._update()

    def cells(self, done: int, known: int) -> None:
        """``done`` of the ``known`` parts of the measurement are finished."""
        self._cells_began = self._cells_began or (self._clock(), done)
        self._cells = (done, known)
        self._update()

    @property
    def left(self) -> float | None:
        """Seconds until the end of the run, None while nothing can be said."""
        if self._estimate is None:
            return None
        left, at = self._estimate
        return max(0.0, left - (self._clock() - at))

    def __str__(self) -> str:
        parts = []
        if self._asked:
            parts.append(f"{len(self._finished)} of {len(self._asked)} systems")
            parts.append(f"{sum(self._done.values())} of {sum(self._asked.values())} rounds")
        if self._cells[1]:
            parts.append("{} of {} parts".format(*self._cells))
        if self.left:
            parts.append(f"{duration(self.left)} left" + " for the systems" * self._more)
        return ", ".join(parts)

    def _update(self) -> None:
        now, (done, known) = self._clock(), self._cells
        asked = sum(self._asked.values())
        rows = self._pace * (asked - sum(self._done.values()))
        since, before = self._cells_began or (now, 0)
        if before < done < known:
            cells = (now - since) / (done - before) * (known - done)
        else:
            # Nothing is announced, or nothing more: what the whole run is known to take is all there is to go by.
            cells = max(0.0, self._expected - self._pace * asked - (now - since))
        self._more = not cells
        self._estimate = (rows + cells, now) if rows or cells else None


class _Bars(Progress):
    """A bar for each row, and below them one line on the whole run."""

    remaining: Remaining | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(str(self.remaining or ""), style="dim")


class Watch:
    """Shows rows and their rounds as they go: bars on a terminal, one line per finished row elsewhere.

    Use it as a context manager around the run.

    Parameters
    ----------
    console : Console
    specs : sequence of RunSpec
    **remaining
        ``expected`` and ``clock`` of :class:`Remaining`.
    """

    def __init__(self, console: Console, specs: Sequence[RunSpec], **remaining: Any) -> None:
        self._console = console
        self._began = time.perf_counter()
        self.remaining = Remaining({spec.label: spec.rounds for spec in specs}, **remaining)
        width = min(max((len(spec.label) for spec in specs), default=0), max(16, console.width - 44))
        self._bars = _Bars(
            # Labels may hold square brackets, which rich would take for markup.
            TextColumn("{task.description}", markup=False, table_column=Column(width=width, overflow="ellipsis")),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]:>7}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars.remaining = self.remaining
        self._tasks = {
            spec.label: self._bars.add_task(spec.label, total=spec.rounds, accuracy=percent(None), start=False)
            for spec in specs
        }

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, spec: RunSpec, done: int) -> None:
        """A row begins, or continues after ``done`` rounds."""
        self._began = time.perf_counter()
        self.remaining.begin(spec.label, done)
        self._bars.start_task(self._tasks[spec.label])
        self._bars.update(self._tasks[spec.label], completed=done)

    def round(self, spec: RunSpec, record: RoundRecord) -> None:
        """A round of the row is finished."""
        self.remaining.round(spec.label, record.round)
        evaluated: Any = {} if math.isnan(record.accuracy) else {"accuracy": percent(record.accuracy)}
        self._bars.update(self._tasks[spec.label], completed=record.round, **evaluated)

    def done(self, spec: RunSpec, accuracy: float, rounds: int, *, kept: bool) -> None:
        """A row is finished after ``rounds``; ``kept`` when it was finished by an earlier run."""
        if kept:
            self.remaining.begin(spec.label, rounds)
        self.remaining.finish(spec.label)
        task = self._tasks[spec.label]
        self._bars.start_task(task)
        self._bars.update(task, completed=rounds, accuracy=percent(accuracy))
        self._bars.stop_task(task)
        if not self._console.is_terminal:
            took = "kept from before" if kept else duration(time.perf_counter() - self._began)
            self.say(f"{spec.label}: {count(rounds, 'round')}, accuracy {percent(accuracy)}, {took}")

    def say(self, text: str) -> None:
        """Print one line, of a measurement that reports its progress; off a terminal with the state of the run."""
        state = "" if self._console.is_terminal else f" ({self.remaining})"
        self._console.print(f"  {text}{state.replace(' ()', '')}", soft_wrap=True)
