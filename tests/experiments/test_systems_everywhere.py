"""Every compressed system gives the same arrays and the same bytes on Ray as in this process; some on a SuperLink."""

from __future__ import annotations

import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from experiments import engines
from experiments.engines import ray
from experiments.engines.superlink import Deployment
from experiments.serve import serve
from experiments.spec import RunResult, RunSpec
from experiments.systems import SYSTEMS

SETTINGS = {"task.hidden": "32", "task.partition": "dirichlet:0.5", "max_steps": 4}
EARLY = ["gradient-code"]
"""Systems that stop at the first answers that are enough: whose these are, and so the bytes, depends on the engine."""

APART = ("identity", *EARLY, *(name for name, system in SYSTEMS.items() if system.needs))
COMPRESSED = [name for name, system in SYSTEMS.items() if system.defaults and name not in APART]
DEPLOYED = ["adacomp", "scalecom"]


def spec(name: str, engine: str = "inprocess", clients: int = 2) -> RunSpec:
    return RunSpec(name, rounds=2, clients=clients, seed=3, engine=engine, settings=SETTINGS)


def same(here: RunResult, there: RunResult) -> None:
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    for a, b in zip(here, there, strict=True):
        assert (a.accuracy, a.loss) == (b.accuracy, b.loss)
        assert (a.uplink_payload_bytes, a.downlink_payload_bytes) == (b.uplink_payload_bytes, b.downlink_payload_bytes)
        assert a.metrics == b.metrics


@pytest.fixture(scope="module")
def on_ray() -> dict[str, RunResult]:
    """All systems one after the other on one simulation: its start costs more than all of them."""
    results: dict[str, RunResult] = {}

    def build(first, *, on_round, deliver) -> ServerApp:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            for name in (*COMPRESSED, *EARLY):
                results[name] = serve(spec(name, "ray"), grid)
            deliver(results[COMPRESSED[0]])

        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.server_app, "build", build)
        engines.run(spec(COMPRESSED[0], "ray"))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_ray_gives_the_same_bits(name: str, on_ray: dict[str, RunResult]) -> None:
    here = engines.run(spec(name))
    same(here, on_ray[name])
    assert on_ray[name].final.metrics["report.compressed"] == 2
    assert here.rounds[0].loss != here.final.loss


@pytest.mark.slow
@pytest.mark.parametrize("name", EARLY)
def test_whoever_answers_first_on_ray_gives_the_same_bits(name: str, on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(spec(name)), on_ray[name]
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    assert [(r.accuracy, r.loss) for r in here] == [(r.accuracy, r.loss) for r in there]
    assert here.rounds[0].loss != here.final.loss
    assert there.uplink_payload_bytes <= here.uplink_payload_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", EARLY)
def test_whoever_answers_first_in_a_deployment_gives_the_same_bits(name: str) -> None:
    here, there = engines.run(spec(name)), engines.run(spec(name, "superlink"))
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    assert here.rounds[0].loss != there.final.loss
    assert there.final.metrics["coded.received"] >= 1


@pytest.fixture(scope="module")
def deployed() -> dict[str, RunResult]:
    results = {}
    # One node: each message costs a process, and two nodes are what test_superlink.py has.
    with Deployment(1) as deployment:
        for name in DEPLOYED:
            out = deployment.home(f"out-{name}")
            deployment.run_app({**spec(name, "superlink", 1).to_run_config(), "out": str(out)}, limit=180)
            results[name] = RunResult.load(out)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYED)
def test_a_deployment_gives_the_same_bits(name: str, deployed: dict[str, RunResult]) -> None:
    """AdaComp's memory and ScaleCom's waiting update go through a SuperNode's own state, a process per message."""
    there = deployed[name]
    same(engines.run(spec(name, clients=1)), there)
    remembers = SYSTEMS[name].make_strategy(SYSTEMS[name].resolve({}), 0).codec.remembers
    assert [r.metrics["report.fresh"] for r in there.rounds[1:]] == ([1, 0] if remembers else [0, 0])
