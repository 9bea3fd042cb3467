"""Tables for readers: the rows of a run, its claims, its privacy, and its measurements.

A :class:`Sheet` is text in every cell. The terminal and the pages show the same sheets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcomp.experiments.findings import Table
from fedcomp.experiments.report import (
    aligned,
    count,
    duration,
    link_name,
    mark,
    number,
    percent,
    promises,
    ratio,
    short_bytes,
    shown_epsilon,
)


@dataclass(frozen=True)
class Sheet:
    """A table of text.

    Attributes
    ----------
    title : str
    columns : sequence of str
    rows : sequence of sequences of str
        The first cell names the row.
    right : sequence of bool
        Which columns are set to the right, as numbers are; empty for none.
    caption : str
    differing : frozenset of (int, int)
        Row and column of the cells that differ from their neighbour on the left.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool] = ()
    caption: str = ""
    differing: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "right", self.right or [False] * len(self.columns))


def found_sheet(table: Table) -> Sheet:
    """Return a measured table; the numbers of a column have equally many decimals."""
    columns = [aligned(column) for column in zip(*table.rows, strict=True)]
    right = [numeric and i > 0 for i, numeric in enumerate(table.numeric)]
    return Sheet(table.title, table.columns, list(zip(*columns, strict=True)), right, table.caption)


def result_sheet(summary: Mapping[str, Any], *, wide: bool = True) -> Sheet:
    """Return the rows of a run: accuracy, bytes and simulated time; the downlink's payload only when ``wide``.

    Links between clients and lost replies have columns only where there are any.
    """
    rows, link = summary["rows"], link_name(summary["config"]["settings"])
    columns = {
        "accuracy": [percent(row["accuracy"]) for row in rows],
        "uplink payload": [short_bytes(row["uplink_payload_bytes"]) for row in rows],
        "uplink wire": [short_bytes(row["uplink_wire_bytes"]) for row in rows],
        "downlink payload": [short_bytes(row["downlink_payload_bytes"]) for row in rows],
        "downlink wire": [short_bytes(row["downlink_wire_bytes"]) for row in rows],
        "between clients": [short_bytes(row["peer_wire_bytes"]) for row in rows],
        "uplink ratio": [ratio(row["uplink_ratio"]) for row in rows],
        f"time at {link}" if link else "simulated time": [
            duration(row["simulated_seconds"]) if row["simulated_seconds"] else "–" for row in rows
        ],
        "lost replies": [str(row["failures"]) for row in rows],
    }
    left_out = {
        "downlink payload": wide,
        "between clients": any(row["peer_wire_bytes"] for row in rows),
        "lost replies": any(row["failures"] for row in rows),
    }
    shown = {name: cells for name, cells in columns.items() if left_out.get(name, True)}
    spans = " and ".join(_span(name, [row[f"{name}s"] for row in rows]) for name in ("round", "client"))
    caption = f"Totals over {spans}. The ratio compares uplink payload with {summary['baseline']}."
    body = [[row["label"], *cells] for row, cells in zip(rows, zip(*shown.values(), strict=True), strict=True)]
    title = "Runs of whole systems" if summary["findings"]["tables"] else "Result"
    return Sheet(title, ["system", *shown], body, [False, *[True] * len(shown)], caption)


def claims_sheet(claims: Sequence[Mapping[str, Any]], *, wide: bool = True) -> Sheet:
    """Return how every claim ended, what was measured and its bound, and where the bound is from when ``wide``."""
    gated = any(claim["gate"] for claim in claims)  # else there is nothing to tell goals from
    rows = [
        [
            mark(claim),
            claim["name"] + _aside(claim, gated=gated),
            "–" if claim["ok"] is None else number(claim["value"]),
            f"{claim['op']} {number(claim['bound'])}",
            *([claim["source"]] if wide else []),
        ]
        for claim in claims
    ]
    heads = ["", "claim", "measured", "bound", *(["where the bound is from"] if wide else [])]
    return Sheet("Claims", heads, rows, [False, False, True, True, False][: len(heads)])


def _aside(claim: Mapping[str, Any], *, gated: bool) -> str:
    if claim["ok"] is None:
        # Beside the name: a narrow terminal leaves out the last column.
        return f" ({claim['skipped']})"
    return " (goal)" if gated and not claim["gate"] else ""


def privacy_sheet(summary: Mapping[str, Any]) -> Sheet:
    """Return the epsilons of a run; whoever shows them shows the statements as well."""
    rows = [
        [
            promise.label + ("" if promise.statement.secure else " (insecure noise)"),
            shown_epsilon(promise.statement.epsilon),
            shown_epsilon(promise.statement.epsilon_unamplified),
            f"{promise.statement.delta:g}",
            f"one {promise.statement.unit} of {promise.statement.population}, "
            f"{promise.statement.adjacency.replace('_', '-')}",
            str(promise.statement.releases),
        ]
        for promise in promises(summary)
    ]
    heads = ["system", "epsilon", "without sampling or cap", "delta", "what is hidden", "releases"]
    return Sheet("Privacy", heads, rows, [False, True, True, True, False, True])


def _span(name: str, counts: Sequence[int]) -> str:
    least, most = min(counts, default=0), max(counts, default=0)
    return count(least, name) if least == most else f"{least} to {most} {name}s"
