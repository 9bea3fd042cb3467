"""The terminal: the closing tables, the claims. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
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

WIDE = 100
"""From this many columns on the tables show wire bytes beside payload bytes and where a bound is from."""


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets in labels, paths and help texts are no markup."""
    return Console(file=file, stderr=stderr, markup=False, highlight=False)


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
