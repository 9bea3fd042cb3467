"""Export to TensorBoard: every finite figure of every round, by an extra that is asked for before the run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_engine import CATALOG, FakeEngine

from fedcomp.experiments.board import export
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.spec import RoundRecord

WRITTEN: dict[str, dict[tuple[str, int], float]] = {}


class Writer:
    """What torch's ``SummaryWriter`` offers and export uses."""

    def __init__(self, folder: Path) -> None:
        self.points = WRITTEN.setdefault(folder.name, {})

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points[tag, step] = value


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[tuple[str, int], float]]:
    fake: Any = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    WRITTEN.clear()
    return WRITTEN


def test_every_finite_figure_is_a_point(written: dict[str, dict[tuple[str, int], float]], tmp_path: Path) -> None:
    metrics = {"train_loss": 0.5, "who": "a", "nested": {"x": 1}, "lost": math.inf}
    record = RoundRecord(3, 0.25, math.nan, uplink_payload_bytes=7, metrics=metrics)
    export(tmp_path, {"top-k <1 %>": [record], "Other": []})
    assert set(written) == {"00-top-k-1", "01-other"}
    points = written["00-top-k-1"]
    assert {step for _, step in points} == {3}
    assert (points["accuracy", 3], points["uplink_payload_bytes", 3], points["metrics/train_loss", 3]) == (0.25, 7, 0.5)
    assert not {"loss", "round", "metrics/who", "metrics/nested", "metrics/lost"} & {tag for tag, _ in points}


@pytest.mark.slow
def test_a_run_exports_all_rounds(written: dict[str, dict[tuple[str, int], float]], tmp_path: Path) -> None:
    arguments = ["tiny", "--json", "--rounds", "2", "--out", str(tmp_path / "runs"), "--tensorboard", str(tmp_path)]
    assert main(arguments, setup=RunnerSetup(CATALOG, FakeEngine(), lambda spec: None)) == 0
    assert set(written) == {"00-dense", "01-sparse"}
    assert [step for tag, step in written["00-dense"] if tag == "accuracy"] == [0, 1, 2]


def test_a_missing_extra_is_one_line_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    engine = FakeEngine()
    arguments = ["tiny", "--out", str(tmp_path / "runs"), "--tensorboard", str(tmp_path)]
    assert main(arguments, setup=RunnerSetup(CATALOG, engine, lambda spec: None)) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ".[tensorboard]" in error
    assert engine.ran == []
    assert not (tmp_path / "runs").exists()


def test_tensorboard_reads_what_was_exported(tmp_path: Path) -> None:
    """The writer and the reader that users have; only where the extra is installed."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export(tmp_path, {"dense": [RoundRecord(0, 0.5, 2.0), RoundRecord(1, 0.75, math.nan)]})
    events = accumulator.EventAccumulator(str(tmp_path / "00-dense"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("accuracy")] == [(0, 0.5), (1, 0.75)]
    assert [point.step for point in events.Scalars("loss")] == [0]
