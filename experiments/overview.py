"""The page ``index.html`` of all runs in a folder: finished, unfinished, damaged, and folders that are not runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedcomp.errors import FedcompError
from fedcomp.experiments.page import render, state
from fedcomp.experiments.report import duration, shortfalls, verdict
from fedcomp.experiments.store import write_text

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


def write_index(root: Path) -> Path:
    """Write ``index.html`` over all runs in ``root``, newest first; return its path."""
    runs, foreign = list_runs(root)
    write_text(root / "index.html", render("index.html", {}, runs=runs, foreign=foreign))
    return root / "index.html"


def list_runs(root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return an entry for each run in ``root``, newest first, and the names of folders that are not runs.

    An entry is what the list shows: ``name`` of the folder, ``experiment``, ``text`` (the answer in one sentence, or
    what is wrong), ``when`` it was finished, how long it ``took``, the ``link`` to its report, the claims that fell
    ``short``, ``state`` (as :func:`~fedcomp.experiments.page.state`), ``problem`` ("unfinished", "damaged"; empty for a
    finished run), what was ``asked`` that is not the default, and when it ``began``, in seconds since 1970. Texts are
    empty where there is nothing to say.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    runs = [path for path in folders if (path / "config.json").is_file() or (path / "summary.json").is_file()]
    # The name breaks ties: it begins with the time, and file systems may have coarse stamps.
    entries = sorted(map(_entry, runs), key=lambda entry: (entry["began"], entry["name"]), reverse=True)
    return entries, [path.name for path in folders if path not in runs]


def _entry(folder: Path) -> dict[str, Any]:
    """Return the entry of one run, whatever its files hold."""
    found = dict.fromkeys(("when", "took", "link", "asked"), "") | {"name": folder.name, "experiment": folder.name}
    entry: dict[str, Any] = {**found, "short": [], "state": "plain", "problem": "damaged", "began": 0.0}
    try:
        asked, summary = folder / "config.json", folder / "summary.json"
        entry["began"] = next(path.stat().st_mtime for path in (asked, summary) if path.is_file())
        if summary.is_file():
            return entry | _finished(json.loads(summary.read_text(encoding="utf-8")), folder)
        config = json.loads(asked.read_text(encoding="utf-8"))["config"]
        text = f"Not finished: of {config['rounds']} rounds a system, seed {config['seed']}."
        text += f" Continue with --resume {folder.name}."
        return entry | {"experiment": str(config["experiment"]), "text": text, "problem": "unfinished"}
    except UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return entry | {"text": f"Cannot be read: {reason}"}


def _finished(summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the list shows of a finished run."""
    seed, quick = summary["config"]["seed"], summary["config"]["quick"]
    asked = [*summary["changed"], *([f"seed={seed}"] if seed else [])]
    return {
        "name": folder.name,
        "experiment": str(summary["experiment"]),
        "text": verdict(summary),
        "when": str(summary["environment"]["finished"]),
        "took": duration(summary["seconds"]),
        "link": f"./{quote(folder.name)}/report.html" if (folder / "report.html").is_file() else "",
        "short": [] if quick else shortfalls(summary["claims"]),
        "state": state(summary),
        "problem": "",
        "asked": "--quick" if quick else ", ".join(asked),
    }
