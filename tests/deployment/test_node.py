"""A node with Flower's own programs: its SuperNode is killed, comes back, and trains; in the end nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_listener import wait_until

from fedcomp.experiments.engines.processes import free_ports, processes_with
from fedcomp.experiments.engines.superlink import TASK_POLL, Deployment
from fedcomp.experiments.spec import RunSpec

pytestmark = [pytest.mark.engines, pytest.mark.long]

SPEC = RunSpec("topk", task="digits", engine="superlink", rounds=1, clients=2, settings={"codec.density": 0.05})


@contextlib.contextmanager
def node(deployment: Deployment, folder: Path, port: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a second node beside the one of the deployment; it has partition 1."""
    home, port = folder / "home", free_ports(1)[0] if port is None else port
    command = [sys.executable, "-m", "fedcomp.clients.edge", "--superlink", deployment.address, "--insecure"]
    command += ["--partition", "1", "--of", "2", "--port", str(port), "--home", str(home)]
    command += ["--heartbeat", str(folder / "beat"), "--log-format", "json"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, TASK_POLL: "0.05"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in processes_with("FLWR_HOME", str(home)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(1) as made:
        yield made


def test_a_supernode_that_is_killed_comes_back_and_trains(deployment: Deployment, tmp_path: Path) -> None:
    home, beat = str(tmp_path / "home"), tmp_path / "beat"

    def said(superlink: str, restarts: int) -> bool:
        document = json.loads(beat.read_text()) if beat.exists() else {}
        return (document.get("superlink"), document.get("restarts")) == (superlink, restarts)

    with node(deployment, tmp_path) as process:
        wait_until(lambda: said("connected", 0), 300)
        (victim,) = [pid for pid, line in processes_with("FLWR_HOME", home).items() if "flower-supernode " in line]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: said("connected", 1), 300)

        deployment.run_app(SPEC.to_run_config(), limit=300)
        assert deployment.runs()[0]["status"] == "finished:completed"
        assert json.loads(beat.read_text())["last_message"] is not None

        # The server is paused, with all its connections: only evidence from outside tells that from a quiet one.
        os.kill(deployment.children[0].pid, signal.SIGSTOP)
        try:
            wait_until(lambda: said("unreachable", 1), 300)
        finally:
            os.kill(deployment.children[0].pid, signal.SIGCONT)
        wait_until(lambda: said("connected", 1), 300)

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert processes_with("FLWR_HOME", home) == {}


def test_no_process_is_left_when_the_supervisor_is_killed_and_the_next_start_has_its_own_secret(
    deployment: Deployment, tmp_path: Path
) -> None:
    home, port, made = str(tmp_path / "home"), free_ports(1)[0], set[bytes]()
    for _ in range(2):
        with node(deployment, tmp_path, port) as process:
            wait_until(lambda: b'"joined"' in (tmp_path / "log").read_bytes(), 300)
            assert len(processes_with("FLWR_HOME", home)) >= 2
            (secret,) = (tmp_path / "home").glob("secret-*")
            assert secret.stat().st_mode & 0o777 == 0o600
            made.add(secret.read_bytes())
            process.kill()
            process.wait()
            wait_until(lambda: processes_with("FLWR_HOME", home) == {}, 300)
    assert len(made) == 2
