"""A run's report, the list of all runs and the comparison of two, each one HTML page that needs nothing but itself:
no script, nothing loaded from anywhere. What they say is in ``templates``; this is what is put into them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcomp.errors import optional
from fedcomp.experiments import plots
from fedcomp.experiments.findings import LONG, Curves, Findings, HeatMap, Pictures, Series
from fedcomp.experiments.options import show_value
from fedcomp.experiments.report import (
    COUNTED,
    aligned,
    count,
    duration,
    failed_claims,
    promises,
    shortfalls,
    verdict,
)
from fedcomp.experiments.sheets import Sheet, claims_sheet, found_sheet, privacy_sheet, result_sheet
from fedcomp.experiments.spec import RoundRecord

if TYPE_CHECKING:
    from jinja2 import Environment

FEW = 8
"""Up to so many rows their accuracy is plotted also where an experiment has figures of its own."""

_LIGHT = {
    "page": "#fbfbf9",
    "card": "#ffffff",
    "ink": "#1b1d21",
    "muted": "#5c626b",
    "grid": "#e2e3df",
    "accent": "#14507d",
    "heat": "20 80 125",
    "good": "#12703f",
    "good-back": "#e4f3ea",
    "bad": "#a3242b",
    "bad-back": "#fae6e6",
    "differs": "#fff3c4",
}
_DARK = {
    "page": "#15171a",
    "card": "#1d2024",
    "ink": "#e8e9ea",
    "muted": "#a2a8b0",
    "grid": "#34383e",
    "accent": "#8cc4f0",
    "heat": "40 110 170",
    "good": "#6fd39b",
    "good-back": "#17301f",
    "bad": "#f39a9a",
    "bad-back": "#3a1c1e",
    "differs": "#4a3f14",
}


def render_report(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return ``report.html``.

    Parameters
    ----------
    summary : mapping
        As :func:`fedcomp.experiments.report.summarise` makes it.
    rounds : mapping of str to sequence of RoundRecord
        By label.
    """
    found, quick = Findings.from_json(summary["findings"]), summary["config"]["quick"]
    curves = [figure for figure in found.figures if isinstance(figure, Curves)]
    if not found.figures or len(summary["rows"]) <= FEW:
        curves += _accuracy(summary, rounds)
    labels = [row["label"] for row in summary["rows"]]
    known = plots.styles([*labels, *(series.name for figure in curves for series in figure.series)])
    sheets = _sheets(summary, found)
    said = promises(summary)
    return _render(
        "report.html",
        known,
        summary=summary,
        verdict=verdict(summary),
        state=state(summary),
        short=[] if quick else shortfalls(summary["claims"]),
        when=_when(summary),
        sections=[(id, sheet.title) for id, sheet in sheets] + [("privacy", "Privacy")] * bool(said),
        charts=[_chart(figure, known, f"plot-{i}") for i, figure in enumerate(curves)],
        pictures=[figure for figure in found.figures if isinstance(figure, Pictures)],
        maps=[_heat_map(figure) for figure in found.figures if isinstance(figure, HeatMap)],
        bars=None if found.figures or curves else _bars(found),
        sheets=sheets,
        long=LONG,
        privacy=privacy_sheet(summary) if said else None,
        promises=said,
        prose=_prose(summary),
        settings=_settings(summary),
        changed={item.partition("=")[0] for item in summary["changed"]},
        versions=list(summary["environment"].items()),
        name=Path(str(summary["run"])).name,
    )


def render_index(runs: Sequence[Mapping[str, Any]], foreign: Sequence[str]) -> str:
    """Return ``index.html`` over :class:`fedcomp.experiments.overview.Entry` documents, and the names of what is not
    a run."""
    return _render("index.html", {}, runs=runs, foreign=foreign)


def render_comparison(
    names: Sequence[str], runs: Sequence[Mapping[str, Any]], said: str, sheets: Sequence[Sheet]
) -> str:
    """Return the page of two runs side by side."""
    known = plots.styles(row[0] for sheet in sheets if sheet.title == "Systems" for row in sheet.rows)
    return _render("compare.html", known, names=names, runs=runs, verdict=said, sheets=sheets)


def state(summary: Mapping[str, Any]) -> str:
    """Return whether a run's answer is shown as ``"good"``, ``"bad"`` or ``"plain"``."""
    if failed_claims(summary):
        return "bad"
    # A claim that was not measured did not hold: its run is not shown as good, but not as bad either.
    held = all(claim["ok"] for claim in summary["claims"])
    return "good" if summary["claims"] and held and not summary["config"]["quick"] else "plain"


@cache
def _environment() -> Environment:
    with optional("a report"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # StrictUndefined: a misspelt name in a template is an error and not an empty place.
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _render(template: str, known: Mapping[str, plots.Style], **content: Any) -> str:
    from markupsafe import Markup

    def face(colours: Mapping[str, str], series: Sequence[str]) -> Markup:
        names = {**colours} | {f"series-{i}": colour for i, colour in enumerate(series)}
        # Markup switches escaping off, which is safe here: names and colours are constants of this package.
        return Markup(" ".join(f"--{name}: {colour};" for name, colour in names.items()))

    return (
        _environment()
        .get_template(template)
        .render(
            faces={"light": face(_LIGHT, plots.LIGHT), "dark": face(_DARK, plots.DARK)},
            swatch=lambda name: Markup(known[name].swatch()) if name in known else "",
            sheet_of=plots.picture_sheet,
            **content,
        )
    )


def _when(summary: Mapping[str, Any]) -> str:
    config, versions = summary["config"], summary["environment"]
    parts = [versions["finished"], f"took {duration(summary['seconds'])}", f"engine {config['engine']}"]
    parts.append(f"{count(config['rounds'], 'round')}, {count(config['clients'], 'client')}, seed {config['seed']}")
    return " · ".join([*parts, f"fedcomp {versions['fedcomp']}, Flower {versions['flwr']}"])


def _sheets(summary: Mapping[str, Any], found: Findings) -> list[tuple[str, Sheet]]:
    """Return all tables with the name of their place: the rows, the claims, what was measured, long ones last."""
    # The sort is stable: short tables keep their order, and so do long ones.
    measured = sorted(found.tables, key=lambda table: len(table.rows) > LONG)
    sheets = [result_sheet(summary)] if summary["rows"] else []
    sheets += [claims_sheet(summary["claims"])] if summary["claims"] else []
    return [(f"table-{i}", sheet) for i, sheet in enumerate([*sheets, *map(found_sheet, measured)])]


def _accuracy(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> list[Curves]:
    """Return the accuracy of every row over rounds and over uplink bytes, where any was evaluated."""
    by_round, by_bytes = [], []
    for row in summary["rows"]:
        records, sent = rounds.get(row["label"], ()), 0
        points = []
        for record in records:
            sent += record.uplink_payload_bytes
            points.append((float(record.round), float(sent), 100 * record.accuracy))
        evaluated = [point for point in points if math.isfinite(point[2])]
        by_round.append(Series(row["label"], [at for at, _, _ in evaluated], [y for *_, y in evaluated]))
        by_bytes.append(Series(row["label"], [x for _, x, _ in evaluated], [y for *_, y in evaluated]))
    x, y = "uplink payload so far, all clients (logarithmic)", "test accuracy (%)"
    found = [
        Curves("Accuracy by uplink bytes", x, y, by_bytes, log_x=True, x_bytes=True),
        Curves("Accuracy by rounds", "round", y, by_round),
    ]
    # A plot of single points says less than the table.
    return [curves for curves in found if any(len(plots.points(line, curves)) > 1 for line in curves.series)]


def _chart(curves: Curves, known: Mapping[str, plots.Style], salt: str) -> dict[str, Any]:
    from markupsafe import Markup

    svg = Markup(plots.line_plot(curves, known, salt=salt))
    return {"title": curves.title, "svg": svg, "names": [s.name for s in curves.series], "caption": curves.caption}


def _heat_map(heat: HeatMap) -> dict[str, Any]:
    texts = iter(aligned([value for row in heat.values for value in row]))
    cells = [
        (label, [(next(texts), heat.depth(value)) for value in row])
        for label, row in zip(heat.y_labels, heat.values, strict=True)
    ]
    return {**vars(heat), "cells": cells}


def _bars(found: Findings) -> dict[str, Any] | None:
    """Return the first column of positive numbers as bars, for a report that has nothing else to look at.

    Bars are named by the first column: a table where it names several rows alike has none.
    """
    for table in found.tables:
        for column in range(1, len(table.columns)):
            values = [row[column] for row in table.rows]
            numbers = [value for value in values if isinstance(value, int | float) and value >= 0]
            if 2 <= len(numbers) == len(values) <= LONG and max(numbers) > 0:
                shares = [value / max(numbers) for value in numbers]
                names = [str(row[0]) for row in table.rows]
                if len(set(names)) < len(names):
                    break
                rows = list(zip(names, aligned(values), shares, strict=True))
                return {"title": table.title, "what": table.columns[column], "rows": rows}
    return None


def _prose(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    found = {
        "What to keep in mind": str(summary["notes"]).split("\n\n"),
        "What is counted": list(COUNTED.values()) if summary["rows"] else [],
        "Data": [summary["data"]],
    }
    kept = {title: [text for text in texts if text.strip()] for title, texts in found.items()}
    return [(title, texts) for title, texts in kept.items() if texts]


def _settings(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    config = summary["config"]
    values = {key: config[key] for key in ("engine", "rounds", "clients", "seed")} | config["settings"]
    return [(key, show_value(value) or "none") for key, value in values.items()]
