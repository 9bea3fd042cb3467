"""Building blocks for pages of the catalogue: sweeps over axes, tables and curves of records.

A page says what is compared, over which axes, in which columns, what is claimed of it, and what the answer is. What
every experiment needs besides is here, once: cells that run side by side, are kept as they finish and are named on the
way; rows and lines that are made of records.

Examples
--------
>>> def halve(start, steps):
...     return {"loss": start / 2**steps}
>>> records = Sweep(halve, {"start": [1.0, 3.0], "steps": [0, 1]})(Say())
>>> table("Halving", {"start": "start", "loss": "loss"}, records.where(steps=1)).rows
((1.0, 0.5), (3.0, 1.5))
>>> [(line.name, line.y) for line in curves("Loss", records, "steps", "loss", by="start").series]
[('1.0', (1.0, 0.5)), ('3.0', (3.0, 1.5))]
>>> records.one(start=1.0, steps=1).loss
0.5
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fedcomp.clients.edge.processes import end_with
from fedcomp.experiments.findings import Curves, Say, Series, Table, mean
from fedcomp.experiments.options import Config
from fedcomp.plain import from_fields

if TYPE_CHECKING:
    from fedcomp.experiments.spec import RoundRecord, RunResult
    from fedcomp.tasks.base import Task

T = TypeVar("T")

Field = str | Callable[[Any], Any]
"""What of a record is shown in a column or on an axis: a field's name, or a function of the record."""


class Record(dict[str, Any]):
    """One cell of a sweep: what was asked and what came out. ``record.loss`` is ``record["loss"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a record of {sorted(self)} has no {name!r}") from None

    def read(self, kind: type[T]) -> T:
        """Return the fields of the dataclass ``kind`` as one; raises as :func:`fedcomp.plain.from_fields`."""
        return from_fields(kind, {each.name: self[each.name] for each in fields(kind)})  # type: ignore[arg-type]


class Records(list[Record]):
    """The cells of a sweep, in its order."""

    def __getitem__(self, index: Any) -> Any:
        """Return a record, or the records of a slice."""
        found = super().__getitem__(index)
        return Records(found) if isinstance(index, slice) else found

    def where(self, **fields: Any) -> Records:
        """Return the records whose fields have these values."""
        return Records(r for r in self if all(r[name] == value for name, value in fields.items()))

    def one(self, **fields: Any) -> Record:
        """Return the only record whose fields have these values.

        Raises
        ------
        LookupError
            When there is none, or more than one.
        """
        found = self.where(**fields)
        if len(found) != 1:
            raise LookupError(f"{len(found)} of {len(self)} records have {fields}; expected one")
        return found[0]

    def each(self, name: Field) -> list[Any]:
        """Return a field of every record."""
        return [_get(name, record) for record in self]

    def groups(self, *names: str) -> dict[Any, Records]:
        """Return the records by the value of a field, or by the values of several, in the order of their first."""
        found: dict[Any, Records] = {}
        for record in self:
            key = tuple(record[name] for name in names)
            found.setdefault(key[0] if len(names) == 1 else key, Records()).append(record)
        return found


@dataclass(frozen=True)
class Sweep:
    """Cells: every combination of some axes, or those that are listed, each run once and kept.

    What a cell comes to depends on the cell alone: processes change the time and nothing else. After an interruption
    the cells that were finished are not run again; within a run, a name always means the same cell.

    Parameters
    ----------
    run : callable
        From one value of each axis, as keyword arguments, to a mapping of JSON-able fields. With more than one process
        it has to be a function of a module, or a partial of one.
    axes : mapping of str to sequence, or sequence of mappings
        All combinations, the last axis fastest; or the cells themselves.
    title : str
        Goes before the names of the cells: sweeps of one experiment have different ones, or different axes.
    shared : mapping
        Further arguments of ``run``, the same for all cells. They are in no name and in no record.
    """

    run: Callable[..., Mapping[str, Any]]
    axes: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
    title: str = ""
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The cells by name.

        Raises
        ------
        ValueError
            When two cells are the same.
        """
        if isinstance(self.axes, Mapping):
            asked = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        else:
            asked = [dict(cell) for cell in self.axes]
        named = {self._name(cell): cell for cell in asked}
        if len(named) != len(asked):
            raise ValueError(f"the sweep {self.title!r} asks for a cell twice: {len(asked)} cells, {len(named)} names")
        return named

    def __call__(self, say: Say, workers: int = 1) -> Records:
        """Run what is not kept yet, and return a record of every cell: its axes, then what ``run`` returned.

        Parameters
        ----------
        say : Say
            Receives the names of all cells and the content of the finished ones, and keeps those.
        workers : int
            Processes to use; 1 runs the cells in this one.
        """
        cells = self.cells
        say.expect(cells)
        calls = {name: partial(self.run, **cell, **self.shared) for name, cell in cells.items() if not say.has(name)}
        # A generator, so that each cell is kept before the next one runs.
        here = ((name, call()) for name, call in calls.items())
        several = workers > 1 and len(calls) > 1
        for name, found in _in_processes(calls, min(workers, len(calls))) if several else here:
            loss = say.cell(name, partial(dict, found)).get("loss")
            reached = f": loss {loss:.4f}" if isinstance(loss, float) and math.isfinite(loss) else ": diverged"
            say(name + reached * isinstance(loss, float))
        return Records(Record({**cell, **say.cell(name, dict)}) for name, cell in cells.items())

    def _name(self, cell: Mapping[str, Any]) -> str:
        values = ", ".join(
            each if isinstance(each, str) else f"{axis} {each:g}" if isinstance(each, float) else f"{axis} {each}"
            for axis, each in cell.items()
        )
        return f"{self.title}: {values}" if self.title else values


def _in_processes(
    calls: Mapping[str, Callable[[], Mapping[str, Any]]], workers: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Spawned, not forked: a copy of a process that has threads of torch and Flower is not one that can be relied on.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    with contextlib.ExitStack() as stack:
        # After an error or an interruption only the cells under way are waited for; the others are cancelled.
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        waiting = {pool.submit(_call, call): name for name, call in calls.items()}
        try:
            # As they finish, not in their order: a crash must not lose cells because a slower one comes before them.
            for done in as_completed(list(waiting)):
                found = done.result()
                yield waiting.pop(done), found
        except (Exception, KeyboardInterrupt):
            pool.shutdown(wait=True, cancel_futures=True)
            # What the cells under way came to is kept as well: they were waited for in any case.
            for done, name in waiting.items():
                if not done.cancelled() and done.exception() is None:
                    yield name, done.result()
            raise


def _call(call: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return call()
    except SystemExit as left:
        # The cell was asked to end, and so is the process; the pool would keep it for another one.
        os._exit(left.code if isinstance(left.code, int) else 1)


def _begin(parent: int) -> None:
    # With SIGTERM a cell that has processes of its own ends them.
    end_with(parent, signal.SIGTERM)
    # Ctrl-C reaches all processes of a terminal; this one's parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _get(name: Field, record: Any) -> Any:
    if callable(name):
        return name(record)
    return record[name] if isinstance(record, Mapping) else getattr(record, name)


def table(
    title: str, columns: Mapping[str, Field], records: Iterable[Any], caption: str = "", *, optional: Iterable[str] = ()
) -> Table:
    """Return a table with one row per record.

    Parameters
    ----------
    columns : mapping of str to str or callable
        What is shown below each heading: a field of the record, or a function of it.
    records : iterable
        Records, or anything that the functions take.
    optional : iterable of str
        Headings of columns that are left out when nothing is in them.
    """
    found = [[_get(name, record) for name in columns.values()] for record in records]
    shown = [
        i for i, heading in enumerate(columns) if heading not in optional or any(row[i] is not None for row in found)
    ]
    headings = list(columns)
    return Table(title, [headings[i] for i in shown], [[row[i] for i in shown] for row in found], caption)


def curves(
    title: str,
    records: Iterable[Any],
    x: Field,
    y: Field,
    by: Field,
    *,
    x_label: str = "",
    y_label: str = "",
    **options: Any,
) -> Curves:
    """Return a plot with one line for each value of ``by``, in the order of their first records.

    Parameters
    ----------
    x, y : str or callable
        A field of the record or a function of it: one number, so that every record is a point of its line; or a
        sequence, so that a record is a stretch of it.
    x_label, y_label : str
        Default: the names of the fields.
    **options
        ``log_x``, ``log_y``, ``x_bytes`` and ``caption`` of :class:`~fedcomp.experiments.findings.Curves`.
    """
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        line = lines.setdefault(str(_get(by, record)), ([], []))
        for values, name in zip(line, (x, y), strict=True):
            found = _get(name, record)
            values.extend(found if isinstance(found, Iterable) else [found])
    series = [Series(name, *line) for name, line in lines.items()]
    across, up = (label or (name if isinstance(name, str) else "") for label, name in ((x_label, x), (y_label, y)))
    return Curves(title, across, up, series, **options)


def train_losses(task: Task, results: Mapping[str, RunResult], say: Say) -> dict[str, float]:
    """Return by label the mean objective of the final models on all training examples, in nats."""

    def loss(result: RunResult) -> float:
        from fedcomp.tasks.arrays import load_arrays

        model = task.model(result.spec.seed)
        load_arrays(model, result.arrays, cast=True)
        return float(task.evaluate(model, task.train_split)["loss"])

    say("train losses of the final models")
    found: dict[str, float] = say.cell("losses", lambda: {label: loss(result) for label, result in results.items()})
    return found


def running_mean(x: Sequence[float], y: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """Return the means of ``width`` points of a line, each at the last of them; points whose y is NaN are left out.

    Of a line with fewer points it is the mean of all.
    """
    known = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if not math.isnan(b)]
    width = min(width, len(known))
    means = [mean(b for _, b in known[i : i + width]) for i in range(len(known) - width + 1)] if known else []
    return [a for a, _ in known[max(0, width - 1) :]], means


def learning_line(rounds: Iterable[RoundRecord]) -> list[list[float]]:
    """Return for every evaluated round its number, the test accuracy in percent, and the bytes of all clients so far:
    payload of the uplinks, payload both ways, serialised messages both ways."""
    line, so_far = [], [0, 0, 0]
    for r in rounds:
        up, down = r.uplink_payload_bytes, r.downlink_payload_bytes
        parts = (up, up + down, r.uplink_wire_bytes + r.downlink_wire_bytes)
        so_far = [before + part for before, part in zip(so_far, parts, strict=True)]
        if not math.isnan(r.accuracy):
            line.append([float(r.round), 100 * r.accuracy, *map(float, so_far)])
    return line


def over_seeds(runs: Records, column: int, factor: float = 1.0) -> list[float]:
    """Return a column of the rows that the records hold as ``points``, times ``factor``: row by row the mean.

    Examples
    --------
    >>> runs = Records(Record({"points": [(0, loss), (1, loss / 2)]}) for loss in (1.0, 3.0))
    >>> over_seeds(runs, 0), over_seeds(runs, 1)
    ([0.0, 1.0], [2.0, 1.0])
    """
    # A training that diverged has fewer rows: the mean goes as far as all of them went.
    return [factor * mean(row[column] for row in rows) for rows in zip(*runs.each("points"), strict=False)]


def repetitions(config: Config, setting: str = "seeds") -> range:
    """Return the seeds of repeated trainings: as many as ``setting`` says, from the run's own on."""
    return range(config.seed, config.seed + int(config.settings[setting]))
