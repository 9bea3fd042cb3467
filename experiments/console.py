"""The terminal: progress while a run works, the closing table, the claims. Nothing here decides anything."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import ProgressColumn as Column
from rich.table import Table
from rich.text import Text

from fedcomp.experiments.findings import LONG, Findings, HeatMap
from fedcomp.experiments.findings import Table as FoundTable
from fedcomp.experiments.report import (
    aligned,
    duration,
    link_name,
    number,
    percent,
    promises,
    ratio,
    short_bytes,
    shortfalls,
)
from fedcomp.experiments.spec import RoundRecord, RunSpec

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

WIDE = 100
"""From this many columns on the tables show wire bytes beside payload bytes and where a bound is from."""


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets in labels, paths and help texts are no markup."""
    return Console(file=file, stderr=stderr, markup=False, highlight=False)


class _Accuracy(Column):
    """The accuracy so far, where a progress bar usually shows a percentage."""

    def render(self, task: Task) -> RenderableType:
        return Text(f"{percent(task.fields['accuracy']):>7}")


class Watch:
    """Shows rows and their rounds as they go: bars on a terminal, one line per finished row elsewhere.

    Use it as a context manager around the run.
    """

    def __init__(self, console: Console, specs: Sequence[RunSpec]) -> None:
        self._console = console
        self._specs = list(specs)
        self._tasks: dict[str, TaskID] = {}
        self._began = time.perf_counter()
        width = max((len(spec.label) for spec in specs), default=0)
        self._width = min(width, max(16, console.width - 44))
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            _Accuracy(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

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
        self._progress.start_task(self._tasks[spec.label])
        self._progress.update(self._tasks[spec.label], completed=done)

    def round(self, spec: RunSpec, record: RoundRecord) -> None:
        """A round of the row is finished."""
        update: dict[str, Any] = {"completed": record.round}
        if not math.isnan(record.accuracy):
            update["accuracy"] = record.accuracy
        self._progress.update(self._tasks[spec.label], **update)

    def say(self, text: str) -> None:
        """A measurement tells how far it is."""
        self._console.print(f"  {text}", soft_wrap=True)

    def done(self, spec: RunSpec, accuracy: float, *, kept: bool, rounds: int | None = None) -> None:
        """A row is finished after ``rounds`` (default: all); ``kept`` when it was finished by an earlier run."""
        made = spec.rounds if rounds is None else rounds
        task = self._tasks[spec.label]
        self._progress.start_task(task)
        self._progress.update(task, completed=made, accuracy=accuracy)
        self._progress.stop_task(task)
        if not self._console.is_terminal:
            took = "kept from before" if kept else duration(time.perf_counter() - self._began)
            self._console.print(
                f"  {spec.label}: {made} round{'s' * (made != 1)}, accuracy {percent(accuracy)}, {took}",
                soft_wrap=True,
            )


def result_table(summary: Mapping[str, Any], width: int) -> Table:
    """Return the closing table of a run, with wire bytes as well when ``width`` columns are enough."""
    wide = width >= WIDE
    link = link_name(summary["config"]["settings"])
    link = link if wide else link.removesuffix(" uplink")
    table = _table()
    table.add_column("system", ratio=1, no_wrap=not wide, overflow="ellipsis")
    for head in ("accuracy", "uplink\npayload", *(("uplink\nwire",) if wide else ())):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("downlink\npayload", *(("downlink\nwire",) if wide else ())):
        table.add_column(head, justify="right", no_wrap=True)
    linked = any(row.get("peer_wire_bytes") for row in summary["rows"])
    if linked:
        table.add_column("between\nclients", justify="right", no_wrap=True)
    table.add_column("uplink\nratio", justify="right", no_wrap=True)
    table.add_column(f"time at\n{link}" if link else "simulated\ntime", justify="right", no_wrap=True)
    for row in summary["rows"]:
        lost = f" ({row['failures']} lost)" if row["failures"] else ""
        up = [short_bytes(row["uplink_payload_bytes"])]
        down = [short_bytes(row["downlink_payload_bytes"])]
        if wide:
            up.append(short_bytes(row["uplink_wire_bytes"]))
            down.append(short_bytes(row["downlink_wire_bytes"]))
        if linked:
            down.append(short_bytes(row.get("peer_wire_bytes", 0)))
        simulated = duration(row["simulated_seconds"]) if row["simulated_seconds"] else "–"
        table.add_row(row["label"] + lost, percent(row["accuracy"]), *up, *down, ratio(row["uplink_ratio"]), simulated)
    return table


def promise_parts(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a run promises, in full: for each private row and training what is its own, then what all share."""
    found = promises(summary)
    heads, tables = [], []
    for promise in found:
        first, _, lines = promise.statement.prose().partition("\n\n")
        heads.append([line for line in [*first.splitlines(), promise.ended] if line])
        tables.append([line for line in lines.splitlines() if line])
    shared = [line for line in tables[0] if all(line in table for table in tables)] if len(found) > 1 else []
    parts: list[RenderableType] = []
    for promise, head, table in zip(found, heads, tables, strict=True):
        parts += [Text(f"Privacy of {promise.label}", "bold"), *map(Text, head)]
        parts.append(_lines(line for line in table if line not in shared))
    if shared:
        parts += [Text("Privacy of all of these", "bold"), _lines(shared)]
    return parts


def _lines(lines: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, _, text in (line.partition(":") for line in lines):
        table.add_row(name, text.strip())
    table.add_row()
    return table


def findings_tables(findings: Findings) -> list[tuple[str, Table | None]]:
    """Return title and table of everything in ``findings`` that a terminal can show; None for what is too long.

    Heat maps become tables of numbers; curves are for the report.
    """
    maps = [figure.as_table() for figure in findings.figures if isinstance(figure, HeatMap)]
    return [(table.title, _found(table) if len(table.rows) <= LONG else None) for table in (*findings.tables, *maps)]


def _found(found: FoundTable) -> Table:
    table = _table()
    table.padding = (0, 1, 0, 0)  # many columns: every blank counts
    columns = [aligned(column) for column in zip(*found.rows, strict=True)] or [[] for _ in found.columns]
    for i, (name, cells, numeric) in enumerate(zip(found.columns, columns, found.numeric, strict=True)):
        # A name may go on in the next line, a number may not be cut.
        least = max(map(len, [*name.split(), *cells])) if numeric and i else None
        table.add_column(name, justify="right" if numeric and i else "left", min_width=least, overflow="fold")
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def claim_table(claims: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Return the claims with ``ok``, ``FAILED`` or, for a goal that does not decide the exit code, ``missed``."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("claim", ratio=2)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("source", ratio=2)
    for claim in claims:
        if claim["ok"]:
            mark = Text("ok", style="green")
        elif claim["gate"]:
            mark = Text("FAILED", style="bold red")
        else:
            mark = Text("missed", style="yellow")
        cells = [mark, claim["name"], number(claim["value"]), f"{claim['op']} {number(claim['bound'])}"]
        table.add_row(*cells, *([claim["source"]] if width >= WIDE else []))
    return table


def headline(summary: Mapping[str, Any]) -> list[Text]:
    """Return what stands above all tables: the answer, and every claim that failed and goal that was missed."""
    if summary["idle"] or summary["config"]["quick"]:
        return []
    lines = [Text(summary["answer"], "bold")] if summary["answer"] else []
    for mark, text in shortfalls(summary["claims"]):
        lines.append(Text.assemble((f"{mark}: ", "bold red" if mark == "FAILED" else "yellow"), text))
    return lines


def row_groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the rows that have the same columns together, in the order of their first appearance.

    A benchmark measures several things; one table for all of them would be mostly empty and too wide to read.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return list(groups.values())


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return any list of flat rows as a table; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = _table()
    numeric = {column for column in columns if all(_is_number(row.get(column)) or column not in row for row in rows)}
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right" if column in numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def names_table(head: str, entries: Iterable[tuple[str, ...]], *columns: str) -> Table:
    """Return a list of names with what they are."""
    table = _table()
    table.add_column(head, no_wrap=True, style="bold")
    for column in columns:
        table.add_column(column)
    for entry in entries:
        table.add_row(*entry)
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=False)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if _is_number(value):
        return number(value)
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
