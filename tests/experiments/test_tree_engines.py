"""Modular sums along a tree of relays: the same bits in this process, on Ray and in a deployment, between peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quick_nodes import quicken

from fedcomp.experiments import engines
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.spec import RunResult, RunSpec

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "several_app"
CLIENTS = 4


def spec(engine: str = "inprocess", groups: str = "3,2") -> RunSpec:
    """Two rounds: everybody's turn at adding is another one's in the second."""
    settings = {"codec": "modular", "codec.codec": "randomk", "codec.density": 1.0, "codec.clip": 0.5}
    settings |= {"codec.levels": 31, "codec.summands": 2000, "feedback": True, "groups": groups, "symbols": 2}
    settings |= {"task.hidden": "32", "task.partition": "dirichlet:0.5", "max_steps": 4, "transport": "peers"}
    return RunSpec("relay-mds", rounds=2, clients=CLIENTS, seed=3, engine=engine, settings=settings)


def bits(result: RunResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in result.arrays.items()}


@pytest.fixture(scope="module")
def here() -> RunResult:
    return engines.run(spec())


def same(here: RunResult, there: RunResult) -> None:
    assert bits(here) == bits(there)
    for a, b in zip(here, there, strict=True):
        assert (a.accuracy, a.loss, a.peer_payload_bytes) == (b.accuracy, b.loss, b.peer_payload_bytes)
        assert a.metrics == b.metrics
    for record in there.rounds[1:]:
        assert record.metrics["coded.included"] == CLIENTS
        assert set(record.metrics["coded.sum_bytes"]) == {"vectors", "members"}
    assert there.rounds[0].loss != there.final.loss


@pytest.mark.long
def test_the_tree_of_a_run_changes_no_bit(here: RunResult) -> None:
    same(here, here)
    for groups in (1, "4", "4,3,1"):
        assert bits(engines.run(spec(groups=groups))) == bits(here)  # type: ignore[arg-type]


@pytest.mark.long
def test_ray_gives_the_same_bits(here: RunResult) -> None:
    same(here, engines.run(spec("ray")))


@pytest.mark.long
def test_a_deployment_gives_the_same_bits(here: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process per message: what an aggregator adds lies in its listener's folder."""
    # The bundle holds the two apps only.
    quicken(monkeypatch, "fedcomp.clients.app", "torch")
    asked = spec("superlink")
    with Deployment(CLIENTS, peers=True) as deployment:
        out, specs = deployment.home("out"), tmp_path / "specs.json"
        specs.write_text(json.dumps([asked.to_run_config()]), encoding="utf-8")
        deployment.run_app({"specs": str(specs), "out": str(out)}, limit=400, project=APP)
        assert deployment.runs()[0]["status"] == "finished:completed", deployment.logs(40)
        same(here, RunResult.load(out / asked.system))
