"""Many simulated trainings: kept as they finish, the same whatever the number of workers."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import Say
from fedcomp.experiments.grid import Cell, Measured, run_cells

TOPK = {"id": "feedback", "codec": {"id": "topk", "density": 0.05}}


def cell(name: str, codec: dict, **other: object) -> Cell:
    made = Cell(
        name,
        codec,
        "digits",
        {"hidden": "32"},
        clients=2,
        rounds=3,
        seed=0,
        training={"lr": 0.1, "max_steps": 1},
        every=2,
    )
    return dataclasses.replace(made, **other)


CELLS = [
    cell("dense", {"id": "identity"}),
    cell("top-k", TOPK),
    cell("CLT-k", {"id": "scalecom", "density": 0.05}),
    cell("oracle", {"id": "scalecom", "density": 0.05}, oracle=True),
    cell("wild", TOPK, training={"lr": 1e30, "max_steps": 1}, rounds=50),
]


@pytest.mark.long
def test_a_cell_says_what_it_came_to() -> None:
    found = run_cells(CELLS, Say())
    assert list(found) == [c.name for c in CELLS]
    assert [p[0] for p in found["dense"].points] == [0.0, 2.0, 3.0]
    assert found["dense"].kept == found["dense"].union == 64 * 32 + 32 + 10 * 32
    assert found["top-k"].uplink < found["dense"].uplink / 4
    assert found["top-k"].build_up > 1.2
    assert found["CLT-k"].build_up == found["oracle"].build_up == 1.0
    assert found["oracle"].overlap == 1.0 > found["CLT-k"].overlap
    assert math.isnan(found["top-k"].overlap)
    wild = found["wild"]
    assert wild.diverged
    assert wild.loss == math.inf
    assert wild.points[-1][1] == math.inf


@pytest.mark.long
def test_finished_cells_are_not_trained_again_and_read_the_same() -> None:
    kept: dict[str, object] = {}
    lines: list[str] = []
    first = run_cells(CELLS, Say(keep=kept.__setitem__))
    stored = json.loads(json.dumps(kept))
    unusable = dataclasses.replace(CELLS[1], codec={"id": "none of this name"})
    again = run_cells([CELLS[0], unusable, *CELLS[2:]], Say(lines.append, stored))
    assert repr(again) == repr(first)  # NaN is not equal to itself
    assert lines == [], "all were kept"
    with pytest.raises(ConfigError, match="none of this name"):
        run_cells([unusable], Say())


def test_progress_is_told_line_by_line() -> None:
    lines: list[str] = []
    counts: list[tuple[int, int]] = []
    run_cells([CELLS[0], CELLS[4]], Say(lines.append, progress=lambda *count: counts.append(count)))
    assert lines[0].startswith("dense: loss 2.")
    assert lines[1] == "wild: diverged"
    assert counts == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.slow
def test_workers_change_nothing_but_the_time() -> None:
    here, there = run_cells(CELLS, Say()), run_cells(CELLS, Say(), workers=2)
    assert repr(there) == repr(here)
    assert all(isinstance(m, Measured) for m in there.values())
    broken = cell("broken", {"id": "none of this name"})
    with pytest.raises(ConfigError, match="none of this name"):
        run_cells([CELLS[0], broken], Say(), workers=2)
