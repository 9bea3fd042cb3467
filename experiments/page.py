"""HTML pages for a run's report and the list of runs, self-contained and without scripts. What they say is in
``templates``; this is what is put into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcomp.errors import optional
from fedcomp.experiments import plots
from fedcomp.experiments.findings import LONG, Curves, Findings, Pictures, Series
from fedcomp.experiments.kit import learning_line
from fedcomp.experiments.options import show_value
from fedcomp.experiments.report import (
    COUNTED,
    count,
    duration,
    failed_claims,
    promises,
    shortfalls,
    verdict,
)
from fedcomp.experiments.sheets import claims_sheet, found_sheet, privacy_sheet, result_sheet
from fedcomp.experiments.spec import RoundRecord

if TYPE_CHECKING:
    from jinja2 import Environment

FEW = 8
"""Up to so many rows their accuracy is plotted also where an experiment has figures of its own."""


def render_report(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> str:
    """Return ``report.html``.

    Parameters
    ----------
    summary : mapping
        As :func:`fedcomp.experiments.report.summarise` makes it.
    rounds : mapping of str to sequence of RoundRecord
        By label.
    """
    from markupsafe import Markup

    config, versions, claims = summary["config"], summary["environment"], summary["claims"]
    found, said = Findings.from_json(summary["findings"]), promises(summary)
    curves = [figure for figure in found.figures if isinstance(figure, Curves)]
    if not found.figures or len(summary["rows"]) <= FEW:
        curves += _accuracy(summary, rounds)
    labels = [row["label"] for row in summary["rows"]]
    known = plots.styles([*labels, *(series.name for figure in curves for series in figure.series)])
    sheets = [result_sheet(summary)] if summary["rows"] else []
    sheets += [claims_sheet(claims)] if claims else []
    # Long ones last. The sort is stable: short tables keep their order, and so do long ones.
    sheets += map(found_sheet, sorted(found.tables, key=lambda table: len(table.rows) > LONG))
    places = [(f"table-{i}", sheet) for i, sheet in enumerate(sheets)]
    when = (
        versions["finished"],
        f"took {duration(summary['seconds'])}",
        f"engine {config['engine']}",
        f"{count(config['rounds'], 'round')}, {count(config['clients'], 'client')}, seed {config['seed']}",
        f"fedcomp {versions['fedcomp']}, Flower {versions['flwr']}",
    )
    prose = {
        "What to keep in mind": str(summary["notes"]).split("\n\n"),
        "What is counted": COUNTED.values() if summary["rows"] else [],
        "Data": [summary["data"]],
    }
    settings = {key: config[key] for key in ("engine", "rounds", "clients", "seed")} | config["settings"]
    return render(
        "report.html",
        known,
        summary=summary,
        verdict=verdict(summary),
        state=state(summary),
        short=[] if config["quick"] else shortfalls(claims),
        when=" · ".join(when),
        sections=[(id, sheet.title) for id, sheet in places] + [("privacy", "Privacy")] * bool(said),
        charts=[(curve, Markup(plots.line_plot(curve, known, salt=f"plot-{i}"))) for i, curve in enumerate(curves)],
        pictures=[figure for figure in found.figures if isinstance(figure, Pictures)],
        sheets=places,
        long=LONG,
        privacy=privacy_sheet(summary) if said else None,
        promises=said,
        prose={title: texts for title, each in prose.items() if (texts := list(filter(str.strip, each)))},
        settings=[(key, show_value(value) or "none") for key, value in settings.items()],
        changed={item.partition("=")[0] for item in summary["changed"]},
        versions=list(versions.items()),
        name=Path(str(summary["run"])).name,
    )


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


def render(template: str, known: Mapping[str, plots.Style], **content: Any) -> str:
    """Return a page: ``template`` with ``content``, and a swatch beside every name whose style is ``known``."""
    from markupsafe import Markup

    def face(series: Sequence[str]) -> Markup:
        # Markup switches escaping off, which is safe here: colours are constants of this package.
        return Markup(" ".join(f"--series-{i}: {colour};" for i, colour in enumerate(series)))

    return (
        _environment()
        .get_template(template)
        .render(
            faces={"light": face(plots.LIGHT), "dark": face(plots.DARK)},
            swatch=lambda name: Markup(known[name].swatch()) if name in known else "",
            sheet_of=plots.picture_sheet,
            **content,
        )
    )


def _accuracy(summary: Mapping[str, Any], rounds: Mapping[str, Sequence[RoundRecord]]) -> list[Curves]:
    """Return the accuracy of every row over rounds and over uplink bytes, where any was evaluated."""
    lines = {row["label"]: learning_line(rounds.get(row["label"], ())) for row in summary["rows"]}

    def series(x: int) -> list[Series]:
        return [Series(label, [p[x] for p in line], [p[1] for p in line]) for label, line in lines.items()]

    across, up = "uplink payload so far, all clients (logarithmic)", "test accuracy (%)"
    found = [
        Curves("Accuracy by uplink bytes", across, up, series(2), log_x=True, x_bytes=True),
        Curves("Accuracy by rounds", "round", up, series(0)),
    ]
    # A plot of single points says less than the table.
    return [curves for curves in found if any(len(plots.points(line, curves)) > 1 for line in curves.series)]
