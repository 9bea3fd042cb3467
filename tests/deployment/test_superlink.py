"""A real SuperLink with two SuperNodes on loopback: same result, kept state, honest bytes, nothing left behind."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from quick_nodes import quicken
from running_listener import wait_until

from fedcomp.experiments import engines
from fedcomp.experiments.engines import superlink
from fedcomp.experiments.engines.processes import DeploymentError, members, processes_with
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.spec import RunSpec

pytestmark = pytest.mark.engines

SPEC = RunSpec(
    "topk",
    task="digits",
    engine="superlink",
    rounds=2,
    clients=2,
    seed=4,
    settings={"codec.density": 0.05, "momentum": 0.9, "lr": 0.05},
)


@pytest.mark.long
def test_a_deployment_gives_the_result_of_this_process_and_leaves_nothing(monkeypatch):
    """After an app that failed on the same deployment, which is an error with its log and leaves nothing, either."""
    # The bundle holds the two apps only.
    quicken(monkeypatch, "fedcomp.clients.app", "torch")
    here = engines.run(replace(SPEC, engine="inprocess"))
    used: list[Deployment] = []

    class Watched(Deployment):
        def __enter__(self) -> Deployment:
            used.append(self)
            super().__enter__()
            self.run_app({**SPEC.to_run_config(), "system": "topkk"}, limit=120)
            assert "did you mean 'topk'" in (self.folder / "run.log").read_text()
            assert self.runs()[0]["status"] == "finished:failed"
            return self

    monkeypatch.setattr(superlink, "Deployment", Watched)
    seen = []
    there = engines.run(SPEC, on_round=seen.append)

    assert there.spec == SPEC
    assert [record.round for record in seen] == [0, 1, 2]
    assert there.accuracy == here.accuracy > 0.6
    assert {k: v.tobytes() for k, v in there.arrays.items()} == {k: v.tobytes() for k, v in here.arrays.items()}

    # Every message ran in a process of its own; the memory of what was not sent came through SuperNode's state.
    fresh = [record.metrics["report.fresh"] for record in there.rounds[1:]]
    assert fresh == [2, 0]
    assert all(record.metrics["report.rolled_back"] == 0 for record in there.rounds[1:])

    traffic = there.notes["flower_run"]["network-traffic"]
    assert there.notes["flower_run"]["status"] == "finished:completed"
    assert there.uplink_wire_bytes == pytest.approx(traffic["inbound-bytes"], rel=0.01)
    # Flower's downlink counter includes acknowledgements that our ledger leaves out.
    assert traffic["outbound-bytes"] >= there.downlink_wire_bytes > 0.95 * traffic["outbound-bytes"]

    (deployment,) = used
    assert not deployment.folder.exists()
    assert all(members(child.pid) == [] for child in deployment.children)
    homes = [str(deployment.folder / name) for name in ("superlink", "node-0", "node-1", "cli")]
    assert [processes_with("FLWR_HOME", home) for home in homes] == [{}] * 4


@pytest.mark.long
def test_a_node_that_dies_at_once_stops_the_deployment(monkeypatch, tmp_path):
    program = tmp_path / "flower-supernode"
    program.write_text("import sys\nprint('no such partition', file=sys.stderr)\nsys.exit(3)\n")

    def broken(arguments):
        return [str(program)], {}

    monkeypatch.setattr(superlink.edge, "prepare", broken)
    deployment = Deployment(1)
    with pytest.raises(DeploymentError, match=r"(?s)SuperNode 0 ended with status 3.*no such partition"):
        deployment.__enter__()
    assert not deployment.folder.exists()
    assert all(members(child.pid) == [] for child in deployment.children)


def test_every_process_is_offline_and_has_a_home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    deployment = Deployment(2)
    deployment.folder = tmp_path
    homes = {deployment.env(name)["FLWR_HOME"] for name in ("superlink", "node-0", "node-1", "cli")}
    assert len(homes) == 4
    env = deployment.env("superlink")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert float(env[superlink.TASK_POLL]) < 0.2
    monkeypatch.setenv(superlink.TASK_POLL, "0.7")
    assert deployment.env("superlink")[superlink.TASK_POLL] == "0.7"


@pytest.mark.parametrize(("system", "linked"), [("relay-mds", True), ("topk", False)])
def test_nodes_get_links_to_each_other_where_the_system_uses_them(system, linked, monkeypatch):
    asked = []

    class Stop(Exception):
        pass

    def started(nodes, *, peers, states):
        asked.append((nodes, peers))
        raise Stop

    monkeypatch.setattr(superlink, "Deployment", started)
    for transport in ("peers", "hub") if linked else ("",):
        settings = {"transport": transport} if transport else {}
        with pytest.raises(Stop):
            superlink.run(RunSpec(system, engine="superlink", clients=3, settings=settings))
    assert asked == ([(3, True), (3, False)] if linked else [(3, False)])


@pytest.mark.long
def test_a_node_killed_on_purpose_is_not_missed(tmp_path):
    sleeper = [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '60'])"]
    deployment = Deployment(2)
    deployment.folder = tmp_path
    for i, name in enumerate(("superlink", "node-0", "node-1")):
        deployment._launch(name, name, sleeper)
        assert deployment.children[i].returncode is None
    try:
        wait_until(lambda: len(deployment.processes(1)) >= 2)
        there = deployment.processes(1)
        assert set(there) == set(deployment.kill(1))
        assert deployment.processes(1) == {}
        deployment.require_running()
        assert "sleep" in " ".join(deployment.processes(0).values())
        deployment.children[1].kill()
        with pytest.raises(DeploymentError, match="node-0 ended"):
            deployment.require_running()
    finally:
        deployment.close()
    assert not tmp_path.exists()


@pytest.mark.long
def test_what_ends_by_itself_with_its_node_is_among_the_killed(tmp_path, monkeypatch):
    """Flower's helpers look for their parent five times a second: on a busy machine they are gone before SIGKILL."""
    # cat ends when nobody is left to write to it.
    parent = "import subprocess; subprocess.Popen(['cat'], stdin=subprocess.PIPE).wait()"
    deployment = Deployment(1)
    deployment.folder = tmp_path
    deployment._launch("superlink", "superlink", ["sleep", "60"])
    node = deployment._launch("node-0", "node-0", [sys.executable, "-c", parent])
    try:
        wait_until(lambda: len(deployment.processes(0)) >= 2)
        there, kill = deployment.processes(0), node.kill

        def kill_and_wait():
            kill()
            wait_until(lambda: not deployment.processes(0))

        monkeypatch.setattr(node, "kill", kill_and_wait)
        assert set(deployment.kill(0)) == set(there)
    finally:
        deployment.close()
