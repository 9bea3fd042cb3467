"""Progress of a run: which rows, rounds and parts of the measurement are done, and how long the rest will take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import ProgressColumn as Column
from rich.text import Text

from fedcomp.experiments.report import count, duration, percent
from fedcomp.experiments.spec import RoundRecord, RunSpec

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class Remaining:
    """Estimates how long the rest of a run takes from what its parts have taken in this session.

    A row continues at the pace of its own rounds; rows that have not begun are given the mean pace of the others, and
    parts of the measurement the mean of the finished ones. How many parts it has is known when it announces them.

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
        self._pace: dict[str, float] = {}
        self._expected = expected
        self._clock = clock
        self._began = (clock(), 0)
        self._cells_began: tuple[float, int] | None = None
        self._cells = (0, 0)
        self._estimate: tuple[float, float] | None = (expected, clock()) if expected else None
        self._more = False

    def begin(self, label: str, done: int) -> None:
        """A row begins, or continues after ``done`` rounds."""
        self._began = (self._clock(), done)
        self._done[label] = done

    def round(self, label: str, done: int) -> None:
        """A row has made ``done`` rounds."""
        since, before = self._began
        self._done[label] = done
        if done > before:
            self._pace[label] = (self._clock() - since) / (done - before)
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
        mean = sum(self._pace.values()) / len(self._pace) if self._pace else 0.0
        pace = {label: self._pace.get(label, mean) for label in self._asked}
        rows = sum(pace[label] * (asked - self._done[label]) for label, asked in self._asked.items())
        cells = self._cells_left(sum(pace[label] * asked for label, asked in self._asked.items()))
        self._more = cells is None
        self._estimate = (rows + (cells or 0.0), self._clock()) if rows or cells is not None else None

    def _cells_left(self, rows: float) -> float | None:
        """Return the seconds that the measurement will take when all rows take ``rows``; None when nobody knows."""
        done, known = self._cells
        since, before = self._cells_began or (self._clock(), 0)
        if before < done < known:
            return (self._clock() - since) / (done - before) * (known - done)
        # Nothing is announced, or nothing more: what the whole run is known to take is all there is to go by.
        left = self._expected - rows - (self._clock() - since)
        return left if left > 0.0 else None


class _Accuracy(Column):
    """The accuracy so far, where a progress bar usually shows a percentage."""

    def render(self, task: Task) -> RenderableType:
        return Text(f"{percent(task.fields['accuracy']):>7}")


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
    remaining : Remaining, optional
        Made from ``specs`` by default.
    """

    def __init__(self, console: Console, specs: Sequence[RunSpec], remaining: Remaining | None = None) -> None:
        self._console = console
        self._specs = list(specs)
        self._tasks: dict[str, TaskID] = {}
        self._began = time.perf_counter()
        self.remaining = remaining or Remaining({spec.label: spec.rounds for spec in specs})
        width = max((len(spec.label) for spec in specs), default=0)
        self._width = min(width, max(16, console.width - 44))
        self._progress = _Bars(
            # Labels may hold square brackets, which rich would take for markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            _Accuracy(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._progress.remaining = self.remaining

    def __enter__(self) -> Self:
        for spec in self._specs:
            label = spec.label if len(spec.label) <= self._width else spec.label[: self._width - 1] + "…"
            self._tasks[spec.label] = self._progress.add_task(
                label.ljust(self._width), total=spec.rounds, accuracy=math.nan, start=False
            )
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, spec: RunSpec, done: int) -> None:
        """A row begins, or continues after ``done`` rounds."""
        self._began = time.perf_counter()
        self.remaining.begin(spec.label, done)
        self._progress.start_task(self._tasks[spec.label])
        self._progress.update(self._tasks[spec.label], completed=done)

    def round(self, spec: RunSpec, record: RoundRecord) -> None:
        """A round of the row is finished."""
        self.remaining.round(spec.label, record.round)
        update: dict[str, Any] = {"completed": record.round}
        if not math.isnan(record.accuracy):
            update["accuracy"] = record.accuracy
        self._progress.update(self._tasks[spec.label], **update)

    def say(self, text: str) -> None:
        """A measurement reports its progress."""
        self._line(text)

    def done(self, spec: RunSpec, accuracy: float, *, kept: bool, rounds: int | None = None) -> None:
        """A row is finished after ``rounds`` (default: all); ``kept`` when it was finished by an earlier run."""
        made = spec.rounds if rounds is None else rounds
        if kept:
            self.remaining.begin(spec.label, made)
        self.remaining.finish(spec.label)
        task = self._tasks[spec.label]
        self._progress.start_task(task)
        self._progress.update(task, completed=made, accuracy=accuracy)
        self._progress.stop_task(task)
        if not self._console.is_terminal:
            took = "kept from before" if kept else duration(time.perf_counter() - self._began)
            self._line(f"{spec.label}: {count(made, 'round')}, accuracy {percent(accuracy)}, {took}")

    def _line(self, text: str) -> None:
        state = "" if self._console.is_terminal else f" ({self.remaining})"
        self._console.print(f"  {text}{state.replace(' ()', '')}", soft_wrap=True)
