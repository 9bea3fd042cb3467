"""The folder of a run: what survives an interruption at any moment."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from fake_engine import TINY, FakeEngine

from fedcomp.errors import ConfigError, StateError
from fedcomp.experiments import store
from fedcomp.experiments.options import Option
from fedcomp.experiments.spec import RoundRecord
from fedcomp.experiments.store import JsonLines, RunFolder, finite, to_json_text, write_text
from fedcomp.experiments.tables import specs_of
from fedcomp.files import write
from fedcomp.rules import Int, Real


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = TINY.configure(seed=1)
    return RunFolder.create(tmp_path, config, specs_of(TINY, config))


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    config = TINY.configure()
    runs = [RunFolder.create(tmp_path, config, specs_of(TINY, config)) for _ in range(3)]
    assert len({run.path for run in runs}) == 3


def test_a_run_is_found_by_name_path_and_last(folder: RunFolder, tmp_path: Path) -> None:
    for root, run in ((tmp_path, folder.name), (tmp_path / "elsewhere", str(folder.path)), (tmp_path, "last")):
        found = RunFolder.find(root, run)
        assert found.path == folder.path
        assert found.config == folder.config
        assert found.specs == folder.specs
        found.require_same(TINY, folder.config, folder.specs)


def test_last_is_the_run_begun_last_whatever_the_names_say(tmp_path: Path) -> None:
    config = TINY.configure()
    older, newer = (RunFolder.create(tmp_path, config, specs_of(TINY, config)) for _ in range(2))
    renamed = newer.path.rename(tmp_path / "00000000-old-looking-name")
    os.utime(older.path / "config.json", ns=(10**9, 10**9))
    assert RunFolder.find(tmp_path, "last").path == renamed


def test_a_wrong_run_names_the_nearest(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=folder.name):
        RunFolder.find(tmp_path, folder.name + "x")


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', '{"format": 99}', "[]", "null"])
def test_a_damaged_configuration_is_a_typed_error(folder: RunFolder, tmp_path: Path, text: str) -> None:
    (folder.path / "config.json").write_text(text)
    with pytest.raises(StateError, match=r"config\.json"):
        RunFolder.find(tmp_path, folder.name)


def test_rounds_are_on_disk_when_append_returns_and_the_last_line_of_a_round_counts(folder: RunFolder) -> None:
    dense, sparse = folder.specs
    for accuracy in (0.25, 0.75):
        folder.append(dense, RoundRecord(1, accuracy, math.nan, uplink_payload_bytes=7))
    folder.append(sparse, RoundRecord(0, math.nan, 1.0))
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"label": "dense", "rou')
    rounds = folder.rounds()
    assert [record.accuracy for record in rounds["dense"]] == [0.75]
    assert rounds["dense"][0].uplink_payload_bytes == 7
    assert math.isnan(rounds["dense"][0].loss)
    folder.tidy()
    lines = (folder.path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["dense", "sparse"]
    assert "NaN" not in "".join(lines)
    assert str(folder.rounds()) == str(rounds)


def test_a_finished_row_comes_back_and_its_checkpoint_goes(folder: RunFolder) -> None:
    spec = folder.specs[1]
    row = folder.row(spec)
    assert row.load() is None
    result = FakeEngine()(spec, on_round=None, checkpoint=row.checkpoint)
    assert row.checkpoint.exists()
    row.save(result)
    assert not row.checkpoint.exists()
    again = row.load()
    assert again is not None
    assert again.spec == spec
    assert again.rounds == result.rounds
    np.testing.assert_array_equal(again.arrays["weight"], result.arrays["weight"])
    assert folder.row(folder.specs[0]).load() is None


def test_a_checkpoint_is_forgotten_only_when_the_result_is_on_disk(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, sync = folder.row(folder.specs[1]), os.fsync
    result = FakeEngine()(folder.specs[1], on_round=None, checkpoint=row.checkpoint)
    synced: list[str] = []

    def noted(descriptor: int) -> None:
        assert row.checkpoint.exists()
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.strip("."))
        sync(descriptor)

    monkeypatch.setattr(store.os, "fsync", noted)
    row.save(result)
    # Each file, then the folder that has its new name.
    assert [name.rsplit(".", 1)[0] for name in synced] == ["arrays.npz", row.path.name, "result.json", row.path.name]
    assert sorted(path.name for path in row.path.iterdir()) == ["arrays.npz", "result.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new and longer")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    options = {"workers": Option(1, Int(), "", neutral=True), "lr": Option(0.1, Real(), "")}
    experiment = dataclasses.replace(TINY, options=options, rows={"dense": "fedavg"})
    config = experiment.configure()
    folder = RunFolder.create(tmp_path, config, specs_of(experiment, config))
    folder.require_same(experiment, experiment.configure(assignments=["workers=8"]), folder.specs)
    with pytest.raises(ConfigError, match=r"lr=0\.1, not 0\.2"):
        folder.require_same(experiment, experiment.configure(assignments=["lr=0.2"]), folder.specs)


def test_finished_cells_are_on_disk_and_a_line_cut_short_is_none(folder: RunFolder) -> None:
    assert folder.cells() == {}
    folder.keep_cell("a", {"loss": 0.5})
    folder.keep_cell("b", [1, None])
    with (folder.path / "cells.jsonl").open("a") as file:
        file.write('{"cell": "c", "cont')
    assert folder.cells() == {"a": {"loss": 0.5}, "b": [1, None]}
    folder.keep_cell("c", 3)  # a new line, not the end of the broken one
    assert folder.cells() == {"a": {"loss": 0.5}, "b": [1, None], "c": 3}
    assert not folder.discard_if_empty()
    (folder.path / "cells.jsonl").unlink()
    assert folder.discard_if_empty()


def test_what_follows_a_first_line_cut_short_is_kept(folder: RunFolder) -> None:
    (folder.path / "rounds.jsonl").write_text('{"label": "dense", "rou')
    (folder.path / "sessions.jsonl").write_text('{"began": 1')
    folder.tidy()
    folder.append(folder.specs[0], RoundRecord(1, 0.5, 1.0))
    folder.append(folder.specs[0], RoundRecord(2, 0.75, 1.0))
    assert [record.accuracy for record in folder.rounds()["dense"]] == [0.5, 0.75]
    folder.end_session()
    assert len((folder.path / "sessions.jsonl").read_text().splitlines()) == 2


def test_json_text_is_strict() -> None:
    document = {"a": math.nan, "b": [math.inf, np.float32(0.5), np.int64(3)], "c": {"d": (1, -math.inf)}}
    assert finite(document) == {"a": None, "b": [None, 0.5, 3], "c": {"d": [1, None]}}
    assert json.loads(to_json_text(document))["b"] == [None, 0.5, 3]


def test_values_that_are_not_finite_come_back_and_every_line_is_strict_json(folder: RunFolder) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    folder.keep_cell("a", {"loss": math.nan, "each": [math.inf, -math.inf, 1.0]})
    metrics = {"client.loss": math.nan, "report.texts": ["a"]}
    folder.append(folder.specs[0], RoundRecord(1, math.nan, math.inf, metrics=metrics))
    for file in folder.path.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    kept = folder.cells()["a"]
    assert math.isnan(kept["loss"])
    assert kept["each"] == [math.inf, -math.inf, 1.0]


def test_a_text_with_a_folder_s_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"L\xe4ufe")
    write_text(tmp_path / "page", f"in {name}")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "in L\\udce4ufe"


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_text(tmp_path / "page", "before")
    growing = JsonLines(tmp_path / "lines")
    growing.append({"a": 1})
    monkeypatch.setattr(os, "fsync", full)
    writes = {
        "page": lambda: write_text(tmp_path / "page", "after"),
        "lines": lambda: growing.append({"a": 2}),
        "checkpoint": lambda: write(tmp_path / "checkpoint", b"data"),
    }
    for name, attempt in writes.items():
        with pytest.raises(OSError, match=f"{os.strerror(errno.ENOSPC)}: '{tmp_path / name}'"):
            attempt()
    assert (tmp_path / "page").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "page"]
