"""Every ``flwr run`` of the pages starts with the nodes it asks for and finishes its rounds.

What is real: Flower's own command line parses the options, Flower's own merge makes the run configuration and refuses
unknown keys, and the app runs on as many nodes as Flower would simulate (as it asks for, where the page speaks of a
deployment), with every message serialised. What is made tiny: one round, and a node that is missing is waited for one
second. What is left out: the SuperLink and Ray between the command and the app, which are the same for all; one of
these commands goes through them in ``tests/deployment``.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.app import app as command_line
from flwr.common.config import get_fused_config_from_dir, parse_config_args
from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG
from page_reading import PAGES, ROOT, Command, commands

from fedcomp.experiments import server_app
from fedcomp.experiments.engines.superlink import APP
from fedcomp.experiments.spec import RunResult
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid


def folder_of(command: Command, before: list[Command]) -> Path:
    """Return where a command is typed: in the folder that the ``cd`` above it names, in the page's own for an example
    (``inside this folder``), else in the root."""
    for other in reversed(before):
        if other.words[0] == "cd" and other.line == command.line - 1:
            return ROOT / other.words[1]
    page = ROOT / command.page
    return page.parent if (page.parent / "pyproject.toml").exists() else ROOT


def documented() -> list[tuple[Command, Path]]:
    """Return every distinct ``flwr run`` of the pages with the folder it is typed in."""
    found: dict[tuple[tuple[str, ...], Path], Command] = {}
    for page in PAGES:
        listed = commands(page)
        for i, command in enumerate(listed):
            if command.words[:2] == ("flwr", "run") and len(command.words) > 2:
                found.setdefault((command.words, folder_of(command, listed[:i])), command)
    return [(command, folder) for (_, folder), command in found.items()]


RUNS = documented()
flower = importlib.import_module("flwr.cli.run.run")  # the package has a function of the same name


@dataclass(frozen=True)
class Start:
    """What Flower would start."""

    app: Path
    config: dict[str, Any]
    nodes: int


def deployed(command: Command) -> bool:
    """Return whether the fence above the command chooses the connection of a deployment: its nodes are its own."""
    above = (ROOT / command.page).read_text(encoding="utf-8").splitlines()[: command.line - 1]
    fence = "\n".join(above).rpartition("```")[2]
    return "export FLWR_HOME=" in fence


def parsed(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return what Flower's command line makes of ``command``."""
    seen: list[Start] = []

    def start(app: Path, _project: Any, _federation: Any, link: Any, run: Any, federation: Any, *_rest: Any) -> None:
        config = get_fused_config_from_dir(app, parse_config_args(run))
        asked = flower._parse_federation_config_overrides(federation, link)
        simulated = DEFAULT_SIMULATION_CONFIG if asked is None else asked
        nodes = int(config["clients"]) if deployed(command) else simulated.num_supernodes
        seen.append(Start(app, config, nodes))

    monkeypatch.setattr(flower, "_run_with_control_api", start)
    monkeypatch.chdir(folder)
    command_line(list(command.words[1:]), standalone_mode=False)
    (found,) = seen
    return found


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules of an example when its test ends."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("quickstart", "gossip_digits", "template"):
            del sys.modules[name]


def test_e1_the_pages_name_runs() -> None:
    assert len(RUNS) > 12
    assert 0 < sum(deployed(command) for command, _ in RUNS) < 5
    assert {folder for _, folder in RUNS} >= {ROOT, ROOT / "examples" / "gossip_pytorch"}


@pytest.mark.long
@pytest.mark.parametrize(("command", "folder"), RUNS, ids=lambda value: value.at if isinstance(value, Command) else "")
def test_e1_a_documented_run_finishes_on_the_nodes_it_gets(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = parsed(command, folder, monkeypatch)
    if start.app == APP:
        result = run_project(start, tmp_path)
        assert result.spec.clients == start.nodes
        assert result.final.round == 1
        assert not any(record.failures for record in result.rounds)
    else:
        run_example(start)


def run_project(start: Start, out: Path) -> RunResult:
    client_app = importlib.import_module("fedcomp.clients.app").app
    config = {**start.config, "rounds": 1, "settings": f"{start.config['settings']} start_timeout=1"}
    config["out"] = str(out)
    with InProcessGrid(client_app, start.nodes) as grid:
        server_app.app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), config))
    return RunResult.load(out)


def run_example(start: Start) -> None:
    project = tomllib.loads((start.app / "pyproject.toml").read_text(encoding="utf-8"))
    sys.path.insert(0, str(start.app))
    modules = (project["tool"]["flwr"]["app"]["components"][f"{side}app"] for side in ("client", "server"))
    client_app, app = (importlib.import_module(module.removesuffix(":app")).app for module in modules)
    config = {**start.config, "num-server-rounds": 1}
    with InProcessGrid(client_app, start.nodes, run_config=config) as inner:
        grid = MeteredGrid(inner)
        app(grid, Context(inner.run.run_id, 0, {}, RecordDict(), config))
        assert grid.ledger.summary()["messages"] > start.nodes
