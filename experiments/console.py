"""Terminal output: the final tables and the claims. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fedcomp.experiments.findings import LONG, Findings
from fedcomp.experiments.findings import Table as FoundTable
from fedcomp.experiments.report import UNMEASURED, failed_claims, promises, shortfalls, verdict
from fedcomp.experiments.sheets import Sheet, claims_sheet, found_sheet, result_sheet

WIDE = 100
"""From this many columns on the tables show the downlink's payload beside its wire bytes and where a bound is from."""

MANY = 8
"""Tables with more columns are set closer."""

LONGEST = 28
"""Words of more letters may be broken."""

STYLES = {"holds": "green", "FAILED": "bold red", "missed": "yellow", UNMEASURED: "dim"}
"""How the words for the end of a claim are written."""


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets in labels, paths and help texts are not markup."""
    return Console(file=file, stderr=stderr, markup=False, highlight=False)


def table_of(sheet: Sheet) -> Table:
    """Return a table; text may go on in the next line, numbers and short names are never cut."""
    padding = (0, 1 if len(sheet.columns) > MANY else 2, 0, 0)
    table = Table(box=None, padding=padding, header_style="dim", pad_edge=False)
    for i, (name, right) in enumerate(zip(sheet.columns, sheet.right, strict=True)):
        cells = [row[i] for row in sheet.rows]
        if right:
            table.add_column(name, justify="right", width=max(map(len, [*name.split(), *cells]), default=0))
        else:
            words = [word for cell in (name, *cells) for word in cell.split() if len(word) <= LONGEST]
            table.add_column(name, min_width=max(map(len, words), default=0), overflow="fold")
    for place, row in enumerate(sheet.rows):
        marked = ("bold" if (place, i) in sheet.differing else "" for i in range(len(row)))
        table.add_row(*(Text(cell, STYLES.get(cell, style)) for cell, style in zip(row, marked, strict=True)))
    return table


def promise_parts(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a run promises, in full: for each private row and training what is its own, then what all share."""
    found = promises(summary)
    shared = [line for line in found[0].lines if all(line in p.lines for p in found)] if len(found) > 1 else []
    parts: list[RenderableType] = []
    for promise in found:
        parts += [Text(f"Privacy of {promise.label}", "bold"), *map(Text, promise.head)]
        parts.append(_lines(line for line in promise.lines if line not in shared))
    if shared:
        parts += [Text("Privacy of all of these", "bold"), _lines(shared)]
    return parts


def _lines(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    table.add_row()
    return table


def close(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the end of a run: its answer and every claim that did not hold, all tables that a terminal can show (curves
    are for the report), what is promised, the claims, and the verdict."""
    wide, claims = console.width >= WIDE, summary["claims"]
    found = Findings.from_json(summary["findings"])
    console.print()
    if not summary["config"]["quick"]:
        if summary["answer"]:
            console.print(summary["answer"], style="bold")
        for mark, text in shortfalls(claims):
            console.print(Text.assemble((f"{mark}: ", STYLES[mark]), text))
    console.print()
    for table in found.tables:
        long = len(table.rows) > LONG
        console.print(table.title, style="bold", soft_wrap=True)
        console.print("  in the report: too long to be shown here" if long else table_of(found_sheet(table)))
        console.print()
    if summary["rows"]:
        console.print(table_of(result_sheet(summary, wide=wide)))
        console.print()
    for part in promise_parts(summary):
        console.print(part)
    if claims:
        console.print(table_of(claims_sheet(claims, wide=wide)))
        console.print()
    if failed_claims(summary) and summary["changed"]:
        console.print(f"Changed from the defaults the bounds were set for: {', '.join(summary['changed'])}.")
    console.print(verdict(summary), style="bold")


def rows_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return flat rows as tables: those that have the same columns together, in the order of their first appearance.

    A benchmark measures several things; one table for all of them would be mostly empty and too wide to read.
    """
    groups: dict[tuple[str, ...], list[list[Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(list(row.values()))
    heads = {columns: [column.replace("_", " ") for column in columns] for columns in groups}
    return [table_of(found_sheet(FoundTable("", heads[columns], group))) for columns, group in groups.items()]
