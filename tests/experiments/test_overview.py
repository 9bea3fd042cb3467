"""The list of all runs: whatever lies in the folder, it is said on the page and nothing is broken by it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fake_engine import TINY
from pages import Page, make

from fedcomp.experiments.overview import list_runs, write_index
from fedcomp.experiments.store import RunFolder, to_json_text
from fedcomp.experiments.tables import specs_of


def finished(root: Path, name: str, began: float = 0.0, **changed: object) -> Path:
    config = TINY.configure()
    folder = RunFolder.create(root, config, specs_of(TINY, config)).path.rename(root / name)
    (folder / "summary.json").write_text(to_json_text(make()[0] | changed))
    (folder / "report.html").write_text("report")
    os.utime(folder / "config.json", (began, began))
    return folder


def test_runs_are_listed_newest_first_with_their_answer_and_a_link(tmp_path: Path) -> None:
    for name, began in (("b", 10.0), ("a", 30.0), ("c", 20.0)):
        finished(tmp_path, name, began)
    page = Page(write_index(tmp_path).read_text())
    assert [entry["name"] for entry in list_runs(tmp_path)[0]] == ["a", "c", "b"]
    assert page.loads == [f"./{name}/report.html" for name in "acb"]
    for words in ("3 runs", "Sparse sends 80000 bytes <in all>; the one claim holds", "took 47.2 s", "very many fewer"):
        assert words in page.text


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    config = TINY.configure(seed=7)
    folder = RunFolder.create(tmp_path, config, specs_of(TINY, config))
    (entry,) = list_runs(tmp_path)[0]
    assert (entry["problem"], entry["experiment"], entry["link"]) == ("unfinished", "tiny", "")
    assert f"--resume {folder.name}" in Page(write_index(tmp_path).read_text()).text


DAMAGE = {
    "empty": "",
    "cut short": '{"experiment": "tiny"',
    "not JSON": "\0\0",
    "another type": "[]",
    "null": "null",
    "number": "3",
    "keys missing": "{}",
    "keys of other types": json.dumps(dict.fromkeys(("experiment", "config", "claims", "environment", "answer"), 5)),
    "deep": "[" * 100_000,
    "huge number": '{"seconds": 1e999, "experiment": "x", "config": {}, "environment": {"finished": ""}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_damaged_run_is_named_and_the_others_are_listed(tmp_path: Path, name: str, damage: str | bytes) -> None:
    finished(tmp_path, "whole")
    broken = finished(tmp_path, "broken")
    if name == "config.json":
        (broken / "summary.json").unlink()
    (broken / name).write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    page = Page(write_index(tmp_path).read_text())
    assert {entry["name"]: entry["problem"] for entry in list_runs(tmp_path)[0]} == {"whole": "", "broken": "damaged"}
    assert "Cannot be read" in page.text
    assert "./whole/report.html" in page.loads


def test_what_is_no_run_is_left_alone_and_said(tmp_path: Path) -> None:
    finished(tmp_path, "run")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "odd" / "summary.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pictures" / "config.json")  # reading it would wait for ever
    page = Page(write_index(tmp_path).read_text())
    assert list_runs(tmp_path)[1] == ["circle", "odd", "pictures"]
    assert "Not runs" in page.text
    assert page.loads == ["./run/report.html"]


def test_hostile_names_and_summaries_are_text(tmp_path: Path) -> None:
    name = 'javascript:"><script>alert(1)<'
    finished(tmp_path, name, experiment="<script>", answer="</p><img src=x onerror=alert(1)>")
    page = Page(write_index(tmp_path).read_text())
    assert not {"script", "img"} & set(page.tags)
    assert page.loads == ["./javascript%3A%22%3E%3Cscript%3Ealert%281%29%3C/report.html"]
    assert name in page.text


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    assert "No run yet" in write_index(tmp_path).read_text()
