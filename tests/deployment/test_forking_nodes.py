"""Nodes whose executor forks, in a real deployment: the same bytes, and only what is on their list."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from quick_nodes import quicken

from fedcomp.experiments import engines
from fedcomp.experiments.bench.node import MixedNodes, family
from fedcomp.experiments.spec import RunResult, RunSpec

pytestmark = pytest.mark.engines

DRAWING = Path(__file__).parent / "drawing_app"

SPEC = RunSpec("topk", rounds=2, clients=2, seed=4, settings={"codec.density": 0.05, "momentum": 0.9, "lr": 0.05})


@pytest.mark.long
def test_a_bundle_runs_once_it_is_on_the_list_and_gives_the_bytes_of_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quicken(monkeypatch)
    secret, allowed = tmp_path / "secret", tmp_path / "allowed"
    secret.write_bytes(secrets.token_bytes(32))
    allowed.touch()
    nodes = MixedNodes(2, [0, 1], secret_file=secret, allow=allowed)
    with nodes:
        out = nodes.home("out")
        config = {**SPEC.to_run_config(), "out": str(out)}
        log = nodes.run_app(config, limit=120)
        # The server reads what each node's own log says.
        line = re.search(r"bundle ([0-9a-f]{64}) is not on this node's list", log)
        assert line is not None, log
        assert line[0] in nodes.executors[0].tail()
        assert not (out / "result.json").exists()
        allowed.write_text(f"{line[1]}  # this run\n")
        nodes.run_app(config, limit=120)
        there = RunResult.load(out)
        executor = nodes.executors[1]
        # The warm process of one bundle, and nothing else: all messages have ended, and were waited for.
        below = family([executor.pid])
        assert len(below) == 2
        executor.terminate()
        executor._process.wait(100)
        assert executor.returncode == 0
        assert not family(list(below))
    here = engines.run(replace(SPEC, engine="inprocess"))
    assert {k: v.tobytes() for k, v in there.arrays.items()} == {k: v.tobytes() for k, v in here.arrays.items()}
    assert [record.metrics["report.fresh"] for record in there.rounds[1:]] == [2, 0]


@pytest.mark.long
def test_no_message_of_a_live_node_draws_what_another_one_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second message on all of them are forks of one process, which has torch and the app imported."""
    quicken(monkeypatch)
    nodes = MixedNodes(1, [0])
    with nodes:
        file = nodes.folder / "drawn"
        nodes.run_app({"file": str(file)}, limit=200, project=DRAWING)
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(found) == 3
    for name in ("python", "numpy", "torch", "noise"):
        assert len({str(drawn[name]) for drawn in found}) == 3, name
