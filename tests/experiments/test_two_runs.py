"""Two runs side by side: what differs is marked, what does not is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from fake_engine import CATALOG, TINY, FakeEngine

from fedcomp.errors import ConfigError, StateError
from fedcomp.experiments.console import table_of
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.sheets import Sheet
from fedcomp.experiments.two_runs import compare


def run(root: Path, *arguments: str) -> str:
    before = set(root.glob("*/"))
    main([*arguments, "--out", str(root), "--json"], setup=RunnerSetup(CATALOG, FakeEngine(), lambda spec: None))
    (made,) = {path for path in root.glob("*/") if path.is_dir()} - before
    return made.name


def differing(sheet: Sheet) -> set[tuple[str, str]]:
    return {(sheet.rows[row][0], sheet.columns[column]) for row, column in sheet.differing}


@pytest.mark.slow
def test_what_differs_is_marked(tmp_path: Path) -> None:
    first, second = run(tmp_path, "tiny"), run(tmp_path, "tiny", "--set", "codec.density=0.5", "--rounds", "4")
    found = {sheet.title: sheet for sheet in compare(tmp_path, first, second).sheets}
    assert [row[0] for row in found["Settings or versions"].rows] == ["rounds", "codec.density"]
    assert differing(found["Settings or versions"]) == {("rounds", "value B"), ("codec.density", "value B")}
    systems = differing(found["Systems"])
    assert {("sparse", "uplink B"), ("dense", "accuracy B"), ("sparse", "ratio B")} <= systems
    assert ("dense", "ratio B") not in systems, "a baseline is once itself in both"
    assert {column for name, column in differing(found["Claims"]) if name == "fewer bytes"} == {
        "measured B",
        "ended B",
    }


@pytest.mark.slow
def test_rows_whose_labels_name_another_setting_are_one(tmp_path: Path) -> None:
    def relabelled(label: str) -> Experiment:
        rows = {name.replace("sparse", label): text for name, text in TINY.rows.items()}
        return dataclasses.replace(TINY, rows=rows, study=None, claims="", answer="")

    names = []
    for label in ("top 1", "top 2"):
        catalog = {"tiny": relabelled(label)}
        main(["tiny", "--out", str(tmp_path), "--json"], setup=RunnerSetup(catalog, FakeEngine(), lambda spec: None))
        names += [path.name for path in tmp_path.glob("*/") if path.name not in names]
    (systems,) = [sheet for sheet in compare(tmp_path, *names).sheets if sheet.title == "Systems"]
    assert [row[0] for row in systems.rows] == ["dense", "top 1 / top 2"]
    assert systems.differing == frozenset()


@pytest.mark.slow
def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    name = run(tmp_path, "measured")
    found = compare(tmp_path, name, "last")
    assert not any(sheet.differing for sheet in found.sheets)
    assert found.verdict.startswith("Different: no settings or versions")
    assert found.sheets[0].rows == []
    assert found.sheets[0].caption.startswith("The same in both: ")


def test_rows_that_begin_alike_are_compared_one_by_one(tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.7)):
        table = {"title": "Losses", "columns": ["row", "seed", "loss"], "rows": [["top-k", 0, loss], ["top-k", 1, 0.1]]}
        document = {"config": {"settings": {}}, "environment": {}, "rows": [], "claims": []}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "summary.json").write_text(json.dumps({**document, "findings": {"tables": [table]}}))
    (figures,) = [sheet for sheet in compare(tmp_path, "a", "b").sheets if sheet.rows]
    assert figures.rows == [["Losses: top-k, loss", "0.5", "0.7"]]


@pytest.mark.slow
def test_what_only_one_run_has_stands_beside_a_dash(tmp_path: Path) -> None:
    first, second = run(tmp_path, "tiny"), run(tmp_path, "measured")
    found = {sheet.title: sheet for sheet in compare(tmp_path, first, second).sheets}
    assert next(iter(found["Systems"].rows))[2::2] == ["–"] * 4
    assert ["Measured <losses>: 3, loss", "–", "0.5"] in found["Measured figures"].rows
    assert "experiment" in [row[0] for row in found["Settings or versions"].rows]


@pytest.mark.slow
def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path, "tiny"), run(tmp_path, "tiny", "--seed", "1")
    capsys.readouterr()
    assert main(["--compare", first, second, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Different: 1 settings or versions, 2 systems, no claims" in out
    assert main(["--compare", first, second, "--json", "--out", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tables"][0]["differing"] == ["seed"]


def test_what_differs_is_bold_on_a_terminal() -> None:
    table = table_of(Sheet("", ["name", "A", "B"], [["seed", "0", "1"]], differing=frozenset({(0, 2)})))
    assert [str(next(iter(column.cells)).style) for column in table.columns] == ["", "", "bold"]


@pytest.mark.parametrize(
    ("damage", "error"),
    [(None, ConfigError), ("{", StateError), ("{}", StateError), ("[]", StateError), ('{"config": 3}', StateError)],
)
def test_a_run_that_cannot_be_compared_is_one_error(tmp_path: Path, damage: str | None, error: type[Exception]) -> None:
    name = run(tmp_path, "tiny", "--rounds", "1")
    summary = tmp_path / name / "summary.json"
    summary.unlink()
    if damage is not None:
        summary.write_text(damage)
    with pytest.raises(error, match=name):
        compare(tmp_path, name, "last")
    with pytest.raises(ConfigError, match="no run 'nothing'"):
        compare(tmp_path, "nothing", "last")
