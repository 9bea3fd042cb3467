"""The book of results: ``python -m experiments.run book`` gathers runs, makes missing ones and writes the pages.

::

    docs/results/
        index.md            what is stored, the published systems and what became of their claims
        NAME.md             one page for each experiment: answer, claims, tables
        stored/NAME.json    the summary of a run at default settings, without plots
        benchmarks.jsonl    a line for each run of a benchmark at full size
        benchmarks.md       their claims over commits

A stored run is stale when the experiment has changed since: its rows, sizes, settings or claims, or the code of its
study. Texts for readers do not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fedcomp.errors import ConfigError, StateError
from fedcomp.experiments.catalog import CATALOG, get_experiment
from fedcomp.experiments.commands import INTERRUPTED, OK, command_line, invoke
from fedcomp.experiments.definition import definition
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Table
from fedcomp.experiments.published import MARKS, PUBLISHED, Published
from fedcomp.experiments.report import count, duration, number
from fedcomp.experiments.sheets import Sheet, claims_sheet, found_sheet, privacy_sheet, result_sheet
from fedcomp.experiments.store import RunFolder
from fedcomp.files import write
from fedcomp.measuring import HISTORY

RESULTS: Final = Path("docs", "results")
UNKEPT: Final = frozenset({"compare"})
"""What answers whatever its caller asks, and has no result of its own."""
GOALS: Final[Mapping[str, str]] = {"<=": "at most", ">=": "at least", "<": "below", ">": "above", "==": "exactly"}
"""Relations of claims, in words."""
LONGEST: Final = 60
"""Rows of a table that a page shows; longer ones are in the report of a run."""


@dataclass(frozen=True)
class BookRequest:
    """The arguments of one call. Typer reads the command line from these fields."""

    minutes: Annotated[float, typer.Option(metavar="M", help="Minutes for runs that are missing or stale.")] = 30.0
    full: Annotated[
        bool, typer.Option("--full", help="Make all of these runs; an interrupted call is continued by the next one.")
    ] = False
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are looked for and made.")] = Path("runs")


app = command_line(BookRequest, "Write the book of results from runs at default settings.")


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m experiments.run book") -> int:
    """Run the command line and return its exit code: 0 when the pages were written, whatever claims came to.

    2 is for wrong arguments and a folder without ``docs``, 130 for an interruption; what was finished is stored.
    """
    return invoke(app, program, arguments, write_book)


def write_book(request: BookRequest, results: Path = RESULTS) -> int:
    """Store what is finished, make what is missing within the time that is asked for, write the pages."""
    if not results.parent.is_dir():
        raise ConfigError(f"there is no folder {results.parent} here; the book is written in a checkout of the project")
    known = {name: get_experiment(name) for name in CATALOG}
    store(finished(request.out, known), results)
    left = missing(known, results)
    spent, code = 0.0, OK
    for name in left:
        minutes = known[name].minutes
        if not request.full and spent + minutes > request.minutes:
            print(f"left for --full or --minutes: {name} (about {duration(60 * minutes)})", file=sys.stderr)
            continue
        spent += minutes
        if code != INTERRUPTED:
            code = _made(known[name], request.out)
            store(finished(request.out, known), results)
    keep_benchmarks(HISTORY, results)
    write_pages(known, results)
    return INTERRUPTED if code == INTERRUPTED else OK


def _made(experiment: Experiment, out: Path) -> int:
    """Run one experiment in a process of its own, or go on with the last one that was interrupted."""
    begun = _begun(experiment, out)
    resume = [] if begun is None else ["--resume", begun]
    try:
        return subprocess.run(
            [sys.executable, "-m", "fedcomp.experiments.run", experiment.name, "--out", str(out), *resume], check=False
        ).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def _begun(experiment: Experiment, out: Path) -> str | None:
    """Return the newest unfinished run at default settings, of today's definition: another one would end as a run that
    the book does not take."""
    for path in sorted(out.glob("*/config.json"), reverse=True):
        if (path.parent / "summary.json").exists():
            continue
        try:
            folder = RunFolder.find(out, path.parent.name)
        except StateError:
            continue  # of a version that wrote other files
        same = folder.config.experiment == experiment.name and folder.definition == definition(experiment)
        if same and _usual(experiment, folder.config.to_json()) and not experiment.changed(folder.config):
            return folder.name
    return None


def _usual(experiment: Experiment, asked: Mapping[str, Any]) -> bool:
    """Whether a run is of the size, the engine and the seed of a call without options."""
    return not asked["quick"] and not asked["seed"] and asked["engine"] == experiment.engines[0]


def finished(out: Path, known: Mapping[str, Experiment]) -> dict[str, dict[str, Any]]:
    """Return the summary of the newest finished run at default settings of each experiment, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*/summary.json")):
        summary = json.loads(path.read_text("utf-8"))
        name = summary["experiment"]
        if name not in known.keys() - UNKEPT or "definition" not in summary or summary["changed"]:
            continue
        if _usual(known[name], summary["config"]):
            found[name] = summary
    return found


def store(summaries: Mapping[str, Mapping[str, Any]], results: Path) -> None:
    """Keep runs that are newer than those in the book, in ``results/stored``."""
    (results / "stored").mkdir(parents=True, exist_ok=True)
    for name, summary in summaries.items():
        path = results / "stored" / f"{name}.json"
        # Times in UTC, and written so that their order is that of the texts.
        if path.exists() and _finished(json.loads(path.read_text("utf-8"))) >= _finished(summary):
            continue
        kept = {key: value for key, value in summary.items() if key not in ("run", "notes", "question")}
        kept["findings"] = {**summary["findings"], "figures": []}
        write(path, (json.dumps(kept, ensure_ascii=False) + "\n").encode(), mode=0o666)


def _finished(summary: Mapping[str, Any]) -> str:
    return str(summary["environment"]["finished"])


def stored(results: Path) -> dict[str, dict[str, Any]]:
    """Return what is in the book: summaries by experiment."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((results / "stored").glob("*.json"))}


def missing(known: Mapping[str, Experiment], results: Path) -> list[str]:
    """Return the experiments that have no run in the book, or a stale one, the shortest first."""
    has = stored(results)
    left = [name for name in known if name not in has or has[name]["definition"] != definition(known[name])]
    return sorted(set(left) - UNKEPT, key=lambda name: (known[name].minutes, name))


def keep_benchmarks(history: Path, results: Path) -> None:
    """Add the runs of benchmarks at full size that the book does not have yet to ``benchmarks.jsonl``."""
    book = results / "benchmarks.jsonl"
    lines = book.read_text("utf-8").splitlines() if book.exists() else []
    fresh = history.read_text("utf-8").splitlines() if history.exists() else []
    lines += [line for line in fresh if line not in lines and not json.loads(line)["quick"]]
    book.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def judge(system: Published, claims: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return what became of a paper's claim here, "reproduced", "partly" or "not reproduced", and why.

    Raises
    ------
    ConfigError
        When a pattern of the evidence matches no claim, or none could be measured.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    listed = list(claims)
    for pattern in system.evidence:
        found = {claim["name"]: claim for claim in listed if fnmatchcase(claim["name"], pattern)}
        if not found:
            raise ConfigError(f"{system.name}: no claim of {system.experiment!r} is called like {pattern!r}")
        chosen |= found
    measured = [claim for claim in chosen.values() if claim["ok"] is not None]
    if not measured:
        raise ConfigError(f"{system.name}: nothing of its evidence could be measured")
    missed = [claim for claim in measured if not claim["ok"]]
    shown = [
        f"“{claim['name']}” is {number(claim['value'])}; the goal was {GOALS[claim['op']]} {number(claim['bound'])}"
        for claim in missed or measured
    ]
    more = f". And {len(shown) - 3} more" if len(shown) > 3 else ""
    word = "reproduced" if not missed else "partly" if len(missed) < len(measured) else "not reproduced"
    held = f"{len(measured) - len(missed)} of {count(len(measured), 'claim')} hold"
    return word, f"{held}. {'Missed: ' if missed else ''}{'. '.join(shown[:3])}{more}"


def table(sheet: Sheet) -> str:
    """Return a sheet as a table in Markdown."""
    cells = lambda row: "| " + " | ".join(str(cell).replace("|", "\\|") or " " for cell in row) + " |"  # noqa: E731
    rule = "|" + "|".join("---:" if right else "---" for right in sheet.right) + "|"
    lines = [cells(sheet.columns), rule, *map(cells, sheet.rows[:LONGEST])]
    if len(sheet.rows) > LONGEST:
        lines.append(f"\n{len(sheet.rows) - LONGEST} more rows are in the report of a run.")
    if sheet.caption:
        lines.append(f"\n{sheet.caption}")
    return "\n".join(lines) + "\n"


def machine(environment: Mapping[str, str]) -> str:
    """Return on what something was measured, in short."""
    return f"{environment['system']}, {environment['cores']} cores"


def write_pages(known: Mapping[str, Experiment], results: Path) -> None:
    """Write every page of the book from what is stored."""
    for place, text in pages(known, results).items():
        (results / place).write_text(text, "utf-8")


def pages(known: Mapping[str, Experiment], results: Path) -> dict[str, str]:
    """Return the pages by their place below ``results``."""
    has = stored(results)
    made = {f"{name}.md": experiment_page(known[name], has[name]) for name in has}
    return {"index.md": index_page(known, has), **made, "benchmarks.md": benchmarks_page(results)}


@dataclass(frozen=True)
class Beside:
    """A row of an experiment beside that experiment's FedAvg, with as many clients and rounds.

    Attributes
    ----------
    label, experiment : str
    factor : float
        Times fewer payload bytes that clients sent, to the server and to each other.
    points : float
        Points of test accuracy above FedAvg's; negative below.
    """

    label: str
    experiment: str
    factor: float
    points: float


LEAST_ROWS: Final = 3
"""A task with fewer is left out of the figure."""


def beside_fedavg(has: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Beside]]:
    """Return by task all stored rows that have an accuracy and a FedAvg to stand beside, the fewest bytes first."""

    def sent(row: Mapping[str, Any]) -> float:
        return float(row["uplink_payload_bytes"] + row["peer_payload_bytes"])

    tasks: dict[str, list[Beside]] = {}
    for name, summary in has.items():
        plain = next((row for row in summary["rows"] if row["system"] == "fedavg"), None)
        if plain is None:
            continue
        for row in summary["rows"]:
            alike = row is not plain and all(row[key] == plain[key] for key in ("clients", "rounds"))
            if alike and sent(row) and row["accuracy"] is not None and plain["accuracy"] is not None:
                # The data of the rows' task come first.
                task = summary["data"].partition(":")[0]
                factor, points = sent(plain) / sent(row), 100.0 * (row["accuracy"] - plain["accuracy"])
                tasks.setdefault(task, []).append(Beside(row["label"], name, factor, points))
    return {
        task: sorted(rows, key=lambda row: (-row.factor, row.label))
        for task, rows in sorted(tasks.items())
        if len(rows) >= LEAST_ROWS
    }


def _state(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    stale = summary["definition"] != definition(experiment)
    when = f"{summary['environment']['finished'][:10]}, {machine(summary['environment'])}"
    return when + (" (**stale**: the experiment has changed since)" if stale else "")


def experiment_page(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    """Return the page of one experiment."""
    versions = summary["environment"]
    parts = [
        f"# {experiment.name}\n",
        f"{experiment.question}\n",
        f"**{summary['answer']}**\n",
        f"`python -m experiments.run {experiment.name}` printed this: {_state(experiment, summary)}, "
        f"{duration(summary['seconds'])}, Flower {versions['flwr']}, torch {versions['torch']}. {summary['data']}\n",
    ]
    claims = sorted(summary["claims"], key=lambda claim: claim["ok"] is not False)
    found = [Table(**each) for each in summary["findings"]["tables"]]
    sheets = [
        *([claims_sheet(claims)] if claims else []),
        *([result_sheet(summary)] if summary["rows"] else []),
        *map(found_sheet, found),
        *([privacy_sheet(summary)] if any("privacy" in row for row in summary["rows"]) else []),
    ]
    for sheet in sheets:
        parts += [f"## {sheet.title}\n" if sheet.title else "", table(sheet)]
    return "\n".join(parts)


def index_page(known: Mapping[str, Experiment], has: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first page: the published systems, then all experiments."""
    parts = [
        "# Results\n",
        "Figures on these pages come from stored runs at default settings. Experiments marked *not run yet* have no",
        "stored run; numbers quoted for them elsewhere come from earlier runs. `python -m experiments.run book` writes",
        "the pages: it makes the runs that are missing or stale, as far as they fit into half an hour, or all of them",
        "with `--full`. Every page names its command, date and machine. Claims that were missed come first.\n",
        "## What became of the papers' claims\n",
        "The networks and data here are small, and nothing runs on an accelerator. A claim that is not reproduced here",
        "may hold where the paper measured it. We set or derived our own bounds before measuring; the experiment's",
        "page has all of them. The mark after a paper's claim says how it is known: read in the paper, read in its",
        "abstract, quoted from memory, or second-hand, from another paper.\n",
    ]
    rows = []
    for system in PUBLISHED:
        link = f"[{system.name}](../{system.page})"
        if system.experiment in has:
            word, why = judge(system, has[system.experiment]["claims"])
            run = f"[{system.experiment}]({system.experiment}.md)"
        else:
            word, why, run = "not run yet", "no stored run", f"`python -m experiments.run {system.experiment}`"
        rows.append(
            (
                f"{link}<br>{system.paper}",
                f"**{word}**<br>{run}",
                f"{system.claim} ({MARKS[system.mark]})",
                system.ours,
                why,
            )
        )
    heads = ["system and paper", "verdict and run", "the paper's claim", "our claim", "measured"]
    parts.append(table(Sheet("", heads, rows)))
    if beside := beside_fedavg(has):
        said = ", ".join(f"{task} ({count(len(rows), 'row')})" for task, rows in beside.items())
        alt = "Bytes that clients sent and test accuracy beside FedAvg, for each stored row"
        parts += [
            "\n## Bytes and accuracy\n",
            "All stored rows with a test accuracy, beside FedAvg of the same experiment, clients and rounds.",
            "Bytes are the payload that clients sent, to the server and to each other. Experiments differ in model and",
            f"rounds, so compare a row with its own FedAvg only. Tasks with at least {LEAST_ROWS} rows: {said}.",
            "`python docs/site/figures.py` draws the figure.\n",
            *(f"![{alt}](../figures/systems-{theme}.svg#only-{theme})" for theme in ("light", "dark")),
        ]
    parts.append("\n## All experiments\n")
    listed = []
    for name, experiment in known.items():
        if name in UNKEPT:
            continue
        if name not in has:
            listed.append((f"`{name}`", experiment.question, "not run yet", "", ""))
            continue
        summary = has[name]
        ended = [claim["ok"] for claim in summary["claims"] if claim["ok"] is not None]
        held = f"{sum(ended)} of {len(ended)}"
        listed.append(
            (f"[{name}]({name}.md)", experiment.question, summary["answer"], held, _state(experiment, summary))
        )
    parts.append(table(Sheet("", ["experiment", "question", "answer", "claims that hold", "run"], listed)))
    parts.append("Benchmarks over commits: [benchmarks](benchmarks.md).\n")
    return "\n".join(parts)


def benchmarks_page(results: Path) -> str:
    """Return the claims of benchmarks, the newest value and those before it."""
    book = results / "benchmarks.jsonl"
    lines = [json.loads(line) for line in book.read_text("utf-8").splitlines()] if book.exists() else []
    parts = [
        "# Benchmarks\n",
        "Ratios taken in one run each, the newest first, then earlier ones; `python -m experiments.bench state` prints",
        "one, and `python -m experiments.run book` adds it here. Compare within one class of machine.\n",
    ]
    for name in sorted({line["benchmark"] for line in lines}):
        runs = [line for line in reversed(lines) if line["benchmark"] == name]
        newest = runs[0]
        when = [f"{run['finished'][:10]} ({run.get('commit', 'none')})" for run in runs]
        parts.append(f"## {name}\n\n{machine(newest['environment'])}; runs: {', '.join(when)}.\n")
        rows = []
        for claim, value in newest["values"].items():
            before = [run["values"][claim] for run in runs[1:] if run["values"].get(claim) is not None]
            failed = "failed" if claim in newest["failed"] else ""
            shown = "–" if value is None else number(value)
            rows.append((claim, shown, ", ".join(map(number, before[:5])), failed))
        parts.append(table(Sheet("", ["claim", "newest", "before", "gate"], rows, [False, True, False, False])))
    return "\n".join(parts)
