"""What every path of updates does is what it did: models, memories, bytes, reports, releases, and how a run resumes.

The records are made by ``golden_runs.py``, which also keeps those of rows and experiments: they train with torch, whose
last bits are a processor's own, and are compared by its command.
"""

from __future__ import annotations

from typing import Any

import golden_runs as runs
import pytest
from round_paths import PATHS

LIBRARIES = (
    "private factors",
    "fitted basis",
    "fitted basis, shared grids",
    "latents in a ring",
    "latents of a common node",
)
"""Paths with bases from LAPACK, or weights from torch, whose last bits differ between machines."""

COUNTED = ("used", "refused", "resumed", "up frames", "down frames", "epsilon")
"""What is the same everywhere also there."""

STORED = runs.stored()


def compared(name: str, record: runs.Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record that is kept and the new one, as far as they can be compared."""
    kept = STORED[name]
    if name.removeprefix("path: ").partition(", seed ")[0] in LIBRARIES:
        kept, record = ({key: found[key] for key in COUNTED if key in found} for found in (kept, record))
    return kept, record


QUICK = ("mean", "adaptive", "shared support", "coded sum", "private mean", "median")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in PATHS])
def test_a_path_does_what_it_did(name: str) -> None:
    """With faults and the first seed; the command compares all."""
    run = runs.run_name(f"path: {name}", runs.SEEDS[0], True)
    kept, record = compared(run, runs.record_of(f"path: {name}", runs.SEEDS[0], True))
    assert runs.differing({run: kept}, {run: record}) == []


def test_there_is_a_record_of_everything() -> None:
    assert {run.partition(", seed ")[0] for run in STORED} == {*runs.names()}


GOSSIP = (
    "beer",
    "choco",
    "cold",
    "deepsqueeze",
    "dpsgd",
    "dyna-cold",
    "gradient-tracking",
    "lead",
    "nids",
    "power-gossip",
    "sgp",
    "sparse-push",
)


def test_every_run_that_was_stopped_and_resumed_ended_the_same() -> None:
    other = {run for run, record in STORED.items() if record.get("resumed") is False}
    # Nodes of decentralised runs are greeted once more, so that the plan's faults fall on other messages than in the
    # run that went through.
    assert other <= {f"row: {name}, seed {seed}, faults" for name in GOSSIP for seed in runs.SEEDS}


def test_only_a_strategy_that_does_not_say_what_it_keeps_is_not_resumed() -> None:
    said = {run.partition(", seed ")[0] for run, record in STORED.items() if isinstance(record.get("resumed"), str)}
    assert said <= {"path: a strategy of one's own"}


def test_a_change_is_seen_aspect_by_aspect() -> None:
    old = {"a": {"models": ["1", "2"], "used": [5], "ledger": runs.UNSTEADY}}
    assert runs.differing(old, {"a": {"models": ["1", "2"], "used": [5], "ledger": 7}}) == []
    (line,) = runs.differing(old, {"a": {"models": ["1", "3"], "used": [5], "ledger": 7}})
    assert line.startswith("a: models was")
    assert runs.differing(old, {"b": {}}) == ["b: there is no record of it"]
    assert len(runs.differing(old, {"a": {"used": [5], "more": 1}})) == 2
