"""All runs of a folder on one page, ``index.html``: the finished, the unfinished, and what is damaged or not a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedcomp.errors import FedcompError
from fedcomp.experiments.page import render_index, state
from fedcomp.experiments.report import duration, shortfalls, verdict
from fedcomp.experiments.store import write_text

INDEX = "index.html"

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    FedcompError,
)
"""What reading a document raises that holds anything but a summary."""


@dataclass(frozen=True)
class Entry:
    """One run of the list.

    Attributes
    ----------
    name : str
        Of its folder.
    experiment : str
    text : str
        Its answer in one sentence, or what is wrong with it.
    when, took : str
        When it was finished, and its duration; empty where nobody knows.
    link : str
        Of its report, relative to the list; empty without one.
    short : tuple of (str, str)
        The claims that failed, the goals that were missed and what was not measured, as
        :func:`fedcomp.experiments.report.shortfalls` says.
    state : str
        ``"good"``, ``"bad"`` or ``"plain"``.
    problem : str
        ``"unfinished"`` or ``"damaged"``; empty for a finished run.
    asked : str
        What was changed from the defaults; empty where nothing was.
    began : float
        What runs are ordered by: when its configuration was written, seconds since 1970.
    """

    name: str
    experiment: str
    text: str
    when: str = ""
    took: str = ""
    link: str = ""
    short: tuple[tuple[str, str], ...] = field(default=())
    state: str = "plain"
    problem: str = ""
    asked: str = ""
    began: float = 0.0


def write_index(root: Path) -> Path:
    """Write ``index.html`` over all runs in ``root``, newest first; return its path."""
    runs, foreign = list_runs(root)
    write_text(root / INDEX, render_index([vars(run) for run in runs], foreign))
    return root / INDEX


def list_runs(root: Path) -> tuple[list[Entry], list[str]]:
    """Return an entry for each run in ``root``, newest first, and the names of folders that are not runs."""
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    runs = [path for path in folders if (path / "config.json").is_file() or (path / "summary.json").is_file()]
    # The name breaks ties: it begins with the time, and file systems may have coarse stamps.
    entries = sorted(map(read_entry, runs), key=lambda entry: (entry.began, entry.name), reverse=True)
    return entries, [path.name for path in folders if path not in runs]


def read_entry(folder: Path) -> Entry:
    """Return the entry of one run, whatever its files hold."""
    began = 0.0
    try:
        file = folder / "summary.json"
        began = next(path.stat().st_mtime for path in (folder / "config.json", file) if path.is_file())
        if file.is_file():
            return summary_entry(json.loads(file.read_text(encoding="utf-8")), folder, began)
        asked = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
        text = f"Not finished: of {asked['rounds']} rounds a system, seed {asked['seed']}."
        text += f" Continue with --resume {folder.name}."
        return Entry(folder.name, str(asked["experiment"]), text, problem="unfinished", began=began)
    except UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Entry(folder.name, folder.name, f"Cannot be read: {reason}", problem="damaged", began=began)


def summary_entry(summary: Mapping[str, Any], folder: Path, began: float = 0.0) -> Entry:
    """Return the entry of a finished run."""
    report = folder / "report.html"
    return Entry(
        name=folder.name,
        experiment=str(summary["experiment"]),
        text=verdict(summary),
        when=str(summary["environment"]["finished"]),
        # Summaries of earlier versions do not say how long the run took.
        took=duration(summary["seconds"]) if "seconds" in summary else "",
        link=f"./{quote(folder.name)}/report.html" if report.is_file() else "",
        short=() if summary["config"]["quick"] else tuple(shortfalls(summary["claims"])),
        state=state(summary),
        asked="--quick" if summary["config"]["quick"] else ", ".join(_asked(summary)),
        began=began,
    )


def _asked(summary: Mapping[str, Any]) -> list[str]:
    seed = summary["config"]["seed"]
    return [*summary["changed"], *([f"seed={seed}"] if seed else [])]
