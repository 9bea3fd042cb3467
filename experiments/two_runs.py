"""Two finished runs side by side: differing settings, rows, claims and measurements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedcomp.errors import ConfigError, StateError
from fedcomp.experiments.overview import UNREADABLE
from fedcomp.experiments.report import mark, number, percent, ratio, short_bytes
from fedcomp.experiments.sheets import Sheet
from fedcomp.experiments.store import locate_run

_ROW: dict[str, tuple[str, Callable[[Any], str]]] = {
    "accuracy": ("accuracy", percent),
    "uplink_payload_bytes": ("uplink", short_bytes),
    "downlink_payload_bytes": ("downlink", short_bytes),
    "uplink_ratio": ("ratio", ratio),
}
"""Figures of a row that are compared: heading, and how they are shown."""


class Comparison(NamedTuple):
    """What two runs have and have not in common.

    Attributes
    ----------
    folders : pair of Path
    summaries : pair of mappings
    sheets : sequence of Sheet
        Settings and versions that differ, systems, claims, measured figures; those of the second run that differ are
        marked. Empty ones are left out.
    """

    folders: Sequence[Path]
    summaries: Sequence[Mapping[str, Any]]
    sheets: Sequence[Sheet]

    @property
    def verdict(self) -> str:
        """How much differs, in one sentence."""
        counts = {sheet.title.lower(): len({row for row, _ in sheet.differing}) for sheet in self.sheets}
        return "Different: " + ", ".join(f"{count or 'no'} {what}" for what, count in counts.items()) + "."

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document with the text of every table."""
        tables = [
            {
                **{name: getattr(sheet, name) for name in ("title", "columns", "rows")},
                "differing": sorted({sheet.rows[row][0] for row, _ in sheet.differing}),
            }
            for sheet in self.sheets
        ]
        return {"runs": [str(folder) for folder in self.folders], "verdict": self.verdict, "tables": tables}


def compare(root: Path, first: str, second: str) -> Comparison:
    """Compare two runs by name, path or ``"last"``.

    Raises
    ------
    ConfigError
        When there is no such run, or it is not finished.
    StateError
        When its summary cannot be read.
    """
    folders = [locate_run(root, run) for run in (first, second)]
    summaries = [_summary(folder) for folder in folders]
    try:
        sheets = [sheet for sheet in _sheets(*summaries) if sheet.rows or sheet.caption]
    except UNREADABLE as error:
        raise StateError(
            f"{folders[0].name} and {folders[1].name} cannot be compared: {error!r}; were they made by "
            f"another version? Run them again"
        ) from error
    return Comparison(folders, summaries, sheets)


def _summary(folder: Path) -> Mapping[str, Any]:
    file = folder / "summary.json"
    if not file.is_file():
        raise ConfigError(f"run {folder.name} is not finished; continue it with --resume {folder.name}")
    try:
        document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise StateError(f"{file} cannot be read ({error}); run the experiment again") from error
    return document


def _sheets(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Sheet]:
    names = _paired(a["rows"], b["rows"])
    figures = [head for head, _ in _ROW.values()]
    return [
        _side_by_side("Settings or versions", "name", ["value"], _settings(a), _settings(b), all_rows=False),
        _side_by_side("Systems", "system", figures, _rows(a, names), _rows(b, names)),
        _side_by_side("Claims", "claim", ["measured", "bound", "ended"], _claims(a), _claims(b)),
        _side_by_side("Measured figures", "figure", ["value"], _measured(a), _measured(b), all_rows=False),
    ]


Cells = Mapping[str, Sequence[tuple[str, Any]]]
"""By name, the text of every figure and its value."""


def _paired(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what each label is called: rows of the same system whose labels say another setting are one."""
    only = [
        [row for row in rows if row["label"] not in {r["label"] for r in others}] for rows, others in ((a, b), (b, a))
    ]
    names = {row["label"]: row["label"] for row in (*a, *b)}
    # Otherwise rows were added or removed, and pairing by order would set unlike rows side by side.
    if len(only[0]) == len(only[1]):
        for left, right in zip(*only, strict=True):
            if left["system"] == right["system"]:
                names |= dict.fromkeys((left["label"], right["label"]), f"{left['label']} / {right['label']}")
    return names


def _settings(summary: Mapping[str, Any]) -> Cells:
    known = {**summary["config"], **summary["config"]["settings"], **summary["environment"]}
    return {key: [(str(value), value)] for key, value in known.items() if key not in ("settings", "finished")}


def _rows(summary: Mapping[str, Any], names: Mapping[str, str]) -> Cells:
    return {
        names[row["label"]]: [(show(row[key]), row[key]) for key, (_, show) in _ROW.items()] for row in summary["rows"]
    }


def _claims(summary: Mapping[str, Any]) -> Cells:
    return {
        claim["name"]: [
            (number(claim["value"]), claim["value"]),
            (f"{claim['op']} {number(claim['bound'])}", (claim["op"], claim["bound"])),
            (mark(claim), claim["ok"]),
        ]
        for claim in summary["claims"]
    }


def _measured(summary: Mapping[str, Any]) -> Cells:
    """Return every cell of every table that was measured, by table, row and column."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for table in summary["findings"]["tables"]:
        rows = Counter[Any]()
        for row in table["rows"]:
            # Where several columns together name a row, many begin alike: these are counted.
            rows[row[0]] += 1
            name = f"{row[0]} ({rows[row[0]]})" if rows[row[0]] > 1 else row[0]
            for column, cell in zip(table["columns"][1:], row[1:], strict=True):
                text = cell if isinstance(cell, str) else number(cell)
                found[f"{table['title']}: {name}, {column}"] = [(text, cell)]
    return found


def _side_by_side(title: str, head: str, figures: Sequence[str], a: Cells, b: Cells, *, all_rows: bool = True) -> Sheet:
    """Return each figure of ``a`` beside that of ``b``, dashes for what only one of them has; unless ``all_rows``, only
    what differs, if only in digits that are not shown."""
    missing = [("–", None)] * len(figures)
    names = list(dict.fromkeys([*a, *b]))
    shown = [name for name in names if all_rows or a.get(name) != b.get(name)]
    rows, differing = [], set()
    for place, name in enumerate(shown):
        pairs = list(zip(a.get(name, missing), b.get(name, missing), strict=True))
        differing |= {(place, 2 * i + 2) for i, (left, right) in enumerate(pairs) if left != right}
        rows.append([name, *(text for pair in pairs for text, _ in pair)])
    columns = [head, *(f"{figure} {run}" for figure in figures for run in "AB")]
    same = f"The same in both: {len(names) - len(shown)}." if len(shown) < len(names) else ""
    return Sheet(title, columns, rows, [False, *[True] * (len(columns) - 1)], same, frozenset(differing))
