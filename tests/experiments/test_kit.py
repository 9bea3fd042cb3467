"""The kit of the catalogue: cells that are kept and come back as they were, tables and lines of records."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import Say, Series
from fedcomp.experiments.kit import Record, Records, Sweep, curves, over_seeds, table
from fedcomp.experiments.options import numbers
from fedcomp.rules import Real

CALLS: list[tuple[str, float]] = []


def descend(method: str, lr: float, steps: int = 2) -> dict[str, Any]:
    """A training of two steps; a step size above 1 diverges. A function of a module, which another process can call."""
    CALLS.append((method, lr))
    if method == "broken":
        raise ConfigError("none of this name")
    loss = math.inf if lr > 1 else (1 - lr) ** steps
    return {"loss": loss, "accuracy": math.nan if lr > 1 else 1 - loss, "points": [(0, 1.0), (steps, loss)]}


AXES = {"method": ("a", "b"), "lr": (0.5, 2.0)}
SWEEP = Sweep(descend, AXES, shared={"steps": 3})


def test_records_are_axes_and_results_in_the_order_of_the_product() -> None:
    found = SWEEP(Say())
    assert [(r.method, r.lr) for r in found] == [("a", 0.5), ("a", 2.0), ("b", 0.5), ("b", 2.0)]
    assert found[0] == {"method": "a", "lr": 0.5, "loss": 0.125, "accuracy": 0.875, "points": [[0, 1.0], [3, 0.125]]}
    assert found.one(method="b", lr=2.0).loss == math.inf
    assert found.where(lr=0.5).each("method") == ["a", "b"]
    assert {method: len(group) for method, group in found.groups("method").items()} == {"a": 2, "b": 2}
    assert list(found.groups("method", "lr")) == [(r.method, r.lr) for r in found]
    assert len(found[1:] + found[:1]) == 4
    with pytest.raises(LookupError, match="2 of 4 records"):
        found.one(method="a")
    with pytest.raises(AttributeError, match="has no 'los'"):
        _ = found[0].los


def test_finished_cells_are_not_run_again_and_come_back_as_they_were() -> None:
    kept: dict[str, Any] = {}
    lines: list[str] = []
    first = SWEEP(Say(keep=kept.__setitem__))
    stored = json.loads(json.dumps(kept))
    CALLS.clear()
    again = SWEEP(Say(lines.append, stored))
    assert repr(again) == repr(first)  # NaN is not equal to itself
    assert CALLS == []
    assert lines == []
    del stored["b, lr 0.5"]
    SWEEP(Say(lines.append, stored))
    assert CALLS == [("b", 0.5)]
    assert lines == ["b, lr 0.5: loss 0.1250"]


def test_progress_is_told_cell_by_cell() -> None:
    lines: list[str] = []
    progress: list[tuple[int, int]] = []
    SWEEP(Say(lines.append, progress=lambda done, known: progress.append((done, known))))
    assert lines == ["a, lr 0.5: loss 0.1250", "a, lr 2: diverged", "b, lr 0.5: loss 0.1250", "b, lr 2: diverged"]
    assert progress == [(done, 4) for done in range(5)]


def test_listed_cells_need_not_be_a_product_and_no_two_may_be_the_same() -> None:
    cells = [{"method": "a", "lr": 0.1}, {"method": "b", "lr": 0.2}]
    assert list(Sweep(descend, cells, "tuning").cells) == ["tuning: a, lr 0.1", "tuning: b, lr 0.2"]
    with pytest.raises(ValueError, match="a cell twice: 3 cells, 2 names"):
        Sweep(descend, [*cells, cells[0]])(Say())


@pytest.mark.slow
def test_processes_change_nothing_but_the_time() -> None:
    here, there = SWEEP(Say()), SWEEP(Say(), workers=2)
    assert repr(list(there)) == repr(list(here))
    with pytest.raises(ConfigError, match="none of this name"):
        Sweep(descend, {"method": ("a", "broken"), "lr": (0.5,)})(Say(), workers=2)


def wait_for(path: Path) -> None:
    """Return as soon as another process has made the file."""
    deadline = time.monotonic() + 60.0
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.01)


def in_turns(cell: str, folder: str, broken: bool) -> dict[str, Any]:
    """The first cell ends after the second was kept, or breaks once the second has begun."""
    if cell == "second":
        Path(folder, "begun").touch()
    else:
        wait_for(Path(folder, "begun" if broken else "second"))
        if broken:
            raise ConfigError("the first broke")
    return {"loss": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_cells_of_processes_are_kept_as_they_finish(tmp_path: Path, broken: bool) -> None:
    kept: list[str] = []

    def keep(name: str, content: Any) -> None:
        kept.append(name)
        (tmp_path / name).touch()

    sweep = Sweep(in_turns, {"cell": ("first", "second")}, shared={"folder": str(tmp_path), "broken": broken})
    with pytest.raises(ConfigError, match="the first broke") if broken else contextlib.nullcontext():
        assert sweep(Say(keep=keep), workers=2).each("cell") == ["first", "second"]
    assert kept == (["second"] if broken else ["second", "first"])


def test_a_table_has_the_columns_that_were_asked_for() -> None:
    found = SWEEP(Say())
    columns = {
        "method": "method",
        "accuracy, %": lambda r: round(100 * r.accuracy, 1) if math.isfinite(r.loss) else None,
        "joules": lambda r: None,
    }
    made = table("T", columns, found, "c")
    assert made.columns == ("method", "accuracy, %", "joules")
    assert made.rows[:2] == (("a", 87.5, None), ("a", None, None))
    assert table("T", columns, found, optional=("accuracy, %", "joules")).columns == ("method", "accuracy, %")
    assert table("T", {"x": "name"}, [Series("c", [], [])]).rows == (("c",),)


def test_lines_are_points_or_stretches_by_record() -> None:
    found = SWEEP(Say())
    points = curves("C", found, "lr", "loss", "method", log_y=True)
    assert [(s.name, s.x, s.y) for s in points.series] == [(m, (0.5, 2.0), (0.125, math.inf)) for m in ("a", "b")]
    assert (points.x_label, points.y_label, points.log_y) == ("lr", "loss", True)
    whole = curves(
        "C", found.where(lr=0.5), lambda r: [x for x, _ in r.points], lambda r: [y for _, y in r.points], "method",
        x_label="step", y_label="loss",
    )  # fmt: skip
    assert [(s.x, s.y) for s in whole.series] == [((0.0, 3.0), (1.0, 0.125))] * 2


def test_means_over_seeds_end_where_the_shortest_training_does() -> None:
    runs = Records([Record({"points": [(0, 1.0), (5, 0.5)]}), Record({"points": [(0, 3.0)]})])
    assert over_seeds(runs, 1) == [2.0]
    assert over_seeds(runs, 1, 100) == [200.0]


@pytest.mark.parametrize("text", ["", "0", "2", "0.1;0.2", "0.1,", "nan", "inf"])
def test_a_list_of_numbers_is_checked_one_by_one(text: str) -> None:
    each = Real(above=0.0, most=1.0)
    assert numbers("0.1, 0.01,0.1", each=each) == (0.01, 0.1)
    with pytest.raises(ConfigError, match=r"^entry=.* must be a number in \(0, 1\]$"):
        numbers(text, each=each)
