"""Nodes whose executor forks, in a real deployment: the same bytes, and only what is on their list."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quick_nodes import quicken

from fedcomp.experiments import engines
from fedcomp.experiments.bench.node import MixedNodes, family
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.flower._private import build_bundle

pytestmark = pytest.mark.engines

DRAWING = Path(__file__).parent / "drawing_app"

SPEC = RunSpec("topk", rounds=2, clients=2, seed=4, settings={"codec.density": 0.05, "momentum": 0.9, "lr": 0.05})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two nodes come to that first have nothing on their list, then a bundle of training and one that draws."""
    folder = tmp_path_factory.mktemp("forking")
    secret, allowed, drawn = folder / "secret", folder / "allowed", folder / "drawn"
    secret.write_bytes(secrets.token_bytes(32))
    allowed.touch()
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        nodes = MixedNodes(2, [0, 1], secret_file=secret, allow=allowed)
        with nodes:
            out = nodes.home("out")
            config = {**SPEC.to_run_config(), "out": str(out)}
            seen["refused"] = nodes.run_app(config, limit=120)
            # The server reads what each node's own log says.
            line = re.search(r"bundle ([0-9a-f]{64}) is not on this node's list", seen["refused"])
            assert line is not None, seen["refused"]
            assert line[0] in nodes.executors[0].tail()
            assert not (out / "result.json").exists()
            allowed.write_text(f"{line[1]}  # this run\n")
            nodes.run_app(config, limit=120)
            seen["trained"] = RunResult.load(out)
            # The warm process of one bundle, and nothing else: all messages have ended, and were waited for.
            executor = nodes.executors[1]
            seen["below"] = family([executor.pid])
            allowed.write_text(hashlib.sha256(build_bundle(DRAWING)).hexdigest())
            nodes.run_app({"file": str(drawn)}, limit=200, project=DRAWING)
            seen["drawn"] = [json.loads(line) for line in drawn.read_text(encoding="utf-8").splitlines()]
            below = family([executor.pid])
            executor.terminate()
            executor._process.wait(100)
            seen["status"], seen["left"] = executor.returncode, family(list(below))
    return seen


@pytest.mark.long
def test_a_bundle_runs_once_it_is_on_the_list_and_gives_the_bytes_of_one_process(found: dict[str, Any]) -> None:
    assert len(found["below"]) == 2
    assert (found["status"], list(found["left"])) == (0, [])
    here, there = engines.run(replace(SPEC, engine="inprocess")), found["trained"]
    assert {k: v.tobytes() for k, v in there.arrays.items()} == {k: v.tobytes() for k, v in here.arrays.items()}
    assert [record.metrics["report.fresh"] for record in there.rounds[1:]] == [2, 0]


@pytest.mark.long
def test_no_message_of_a_live_node_draws_what_another_one_drew(found: dict[str, Any]) -> None:
    """From the second message on all of them are forks of one process, which has torch and the app imported."""
    assert len(found["drawn"]) == 3
    for name in ("python", "numpy", "torch", "noise"):
        assert len({str(drawn[name]) for drawn in found["drawn"]}) == 3, name
