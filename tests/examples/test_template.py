"""The template learns, sends a fraction of the bytes, and is what Flower takes for an app."""

from __future__ import annotations

import ast
import importlib
import io
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.utils import validate_project_name

import fedcomp as fc
from fedcomp.flower._private import build_bundle

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "template"
PROJECT = tomllib.loads((TEMPLATE / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(TEMPLATE))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "template"]:
        del sys.modules[name]


def test_flower_takes_it() -> None:
    validate_project_name(TEMPLATE.name, "the folder")  # raises where Flower would not publish it
    assert 0 < len(PROJECT["project"]["description"]) < 200
    with zipfile.ZipFile(io.BytesIO(build_bundle(TEMPLATE))) as bundle:
        names = set(bundle.namelist())
    assert {str(path.relative_to(TEMPLATE)) for path in (TEMPLATE / "template").glob("*.py")} <= names


def test_the_readme_shows_the_two_lines_as_they_are() -> None:
    shown = (TEMPLATE / "README.md").read_text(encoding="utf-8").split("```python fragment\n")[1].split("```")[0]
    apps = [(TEMPLATE / "template" / f"{side}_app.py").read_text(encoding="utf-8") for side in ("client", "server")]
    lines = [ast.unparse(statement) for statement in ast.parse(shown).body]
    assert len(lines) == 2
    assert all(line in app for line, app in zip(lines, apps, strict=True))


def test_the_readme_lists_every_file_as_it_is() -> None:
    text = (TEMPLATE / "README.md").read_text(encoding="utf-8").partition("## The files")[2]
    shown = dict(re.findall(r"^`([\w./]+)`:\n\n```[\w ]+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    files = [TEMPLATE / "pyproject.toml", *(TEMPLATE / "template").glob("*.py")]
    assert shown == {path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8") for path in files}


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
def test_it_learns_and_sends_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    client_app, server_app = (importlib.import_module(f"template.{side}_app").app for side in ("client", "server"))
    config = {**PROJECT["tool"]["flwr"]["app"]["config"], "num-server-rounds": 3}
    with fc.InProcessGrid(client_app, 5, run_config=config) as inner:
        grid = fc.MeteredGrid(inner)
        server_app(grid, Context(inner.run.run_id, 0, {}, RecordDict(), config))
    traffic = grid.ledger.summary()
    # Five models up and ten down (training and evaluation) in each of three rounds.
    assert traffic["messages"] == 3 * 2 * 10
    assert traffic["payload_down"] > 2 * 20 * traffic["payload_up"]
    metrics = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert metrics["eval_acc"] > 0.5  # one of ten classes
