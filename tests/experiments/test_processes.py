"""Whatever a child starts is gone when the child is stopped, and a failure shows the tail of its log."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_listener import wait_until

from fedcomp.experiments.engines.processes import (
    Child,
    DeploymentError,
    free_ports,
    members,
    processes_with,
    sigterm_raises,
    tail,
)
from fedcomp.experiments.engines.superlink import Deployment

# A parent that ignores SIGTERM and has a child that ignores it too; both say when they are ready.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("ready", flush=True)
time.sleep(60)
"""


def start(tmp_path, code: str) -> Child:
    return Child(
        "the child",
        [sys.executable, "-c", code],
        env=dict(os.environ),
        log=tmp_path / "child.log",
        cwd=tmp_path,
    )


def test_stop_ends_grandchildren_that_ignore_sigterm(tmp_path):
    child = start(tmp_path, STUBBORN)
    wait_until(lambda: child.tail().count("ready") == 2)
    assert len(members(child.pid)) == 2
    child.stop(grace=0.3)
    assert members(child.pid) == []
    assert child.returncode == -signal.SIGKILL


def test_processes_are_found_by_what_they_were_started_with_whoever_their_parent_is(tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_MARK", str(tmp_path))
    orphans = (
        "import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    child = start(tmp_path, f"{orphans}\nif os.fork() == 0: time.sleep(60)")
    wait_until(lambda: child.returncode is not None)
    wait_until(lambda: len(processes_with("CHILD_MARK", str(tmp_path))) == 2)
    assert child.pid not in processes_with("CHILD_MARK", str(tmp_path))
    assert any("import time" in command for command in processes_with("CHILD_MARK", str(tmp_path)).values())
    assert processes_with("CHILD_MARK", str(tmp_path)[:-1]) == {}
    for pid in processes_with("CHILD_MARK", str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes_with("CHILD_MARK", str(tmp_path)) == {})


def test_kill_asks_nobody_and_ends_the_leader_alone(tmp_path):
    child = start(tmp_path, STUBBORN)
    wait_until(lambda: child.tail().count("ready") == 2)
    child.kill()
    assert child.returncode == -signal.SIGKILL
    assert len(members(child.pid)) == 1
    child.kill()  # a dead child may be killed again
    child.stop(grace=0.3)
    assert members(child.pid) == []


def test_stop_reaches_orphans_of_a_leader_that_already_ended(tmp_path):
    child = start(tmp_path, "import os, time\nif os.fork() == 0:\n    time.sleep(60)")
    wait_until(lambda: child.returncode is not None)
    assert len(members(child.pid)) == 1
    child.stop(grace=1.0)
    assert members(child.pid) == []


def test_stop_reaches_a_descendant_that_moved_into_a_session_of_its_own(tmp_path):
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\ntime.sleep(60)"
    child = start(tmp_path, code)
    wait_until(lambda: child.tail().strip().isdigit())
    moved = int(child.tail())
    assert moved not in members(child.pid)
    child.stop(grace=2.0)
    assert members(moved) == []


def test_a_dead_child_is_reported_with_its_last_words(tmp_path):
    child = start(tmp_path, "print('line one'); raise SystemExit('no such option')")
    wait_until(lambda: child.returncode is not None)
    with pytest.raises(DeploymentError, match=r"(?s)the child ended with status 1.*no such option"):
        child.require_running()
    child.stop()


@pytest.mark.parametrize("name", ["superlink", "node-0"])
def test_a_deployment_ends_the_app_of_a_server_that_was_killed(name, tmp_path):
    """Flower's app processes lead sessions of their own, and ask for their server until they are given up."""
    apart = f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    deployment = Deployment(1)
    deployment.folder = tmp_path
    home = str(deployment.home(name))
    child = deployment._launch(
        "the server", name, [sys.executable, "-c", f"import subprocess, sys, time; {apart}; time.sleep(60)"]
    )
    wait_until(lambda: child.tail().count("ready") == 2)
    child.kill()
    assert len(processes_with("FLWR_HOME", home)) == 2
    deployment.stop()
    wait_until(lambda: not processes_with("FLWR_HOME", home))


def test_a_port_that_never_opens_is_an_error(tmp_path):
    (port,) = free_ports(1)
    child = start(tmp_path, "import time; print('starting', flush=True); time.sleep(60)")
    try:
        wait_until(lambda: "starting" in child.tail())
        with pytest.raises(DeploymentError, match=r"(?s)did not open port.*starting"):
            child.wait_for_port(port, 0.3)
    finally:
        child.stop()


def test_free_ports_are_different_and_no_outgoing_connection_takes_them():
    ports = [port for _ in range(30) for port in free_ports(8)]
    assert len(set(ports)) == len(ports)
    # From here on the kernel gives ports to connections that name none.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < lowest


def test_another_process_gets_other_free_ports():
    code = "from fedcomp.experiments.engines.processes import free_ports; print(*free_ports(200))"
    own = free_ports(200)
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(own) & set(map(int, other.stdout.split()))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    forked = multiprocessing.get_context("fork").Process(target=lambda: sender.send(free_ports(200)))
    forked.start()
    assert not set(own) & set(receiver.recv())
    forked.join()


def test_a_port_that_is_in_use_is_not_free_and_too_many_are_an_error():
    with socket.socket() as held:
        (port,) = free_ports(1)
        held.bind(("127.0.0.1", port))
        # All of the block but the one that is in use.
        assert port not in free_ports(248)
        with pytest.raises(DeploymentError, match="249 free ports were asked for, and 248"):
            free_ports(249)


def test_tail_says_when_there_is_nothing(tmp_path):
    (tmp_path / "empty").write_text("")
    assert tail(tmp_path / "empty") == "(the log is empty)"
    assert "no log" in tail(tmp_path / "missing")
    (tmp_path / "long").write_text("\n".join(map(str, range(100))))
    assert tail(tmp_path / "long", 3) == "97\n98\n99"


def test_sigterm_unwinds_the_stack_and_the_former_handler_returns():
    before = signal.getsignal(signal.SIGTERM)

    def interrupted():
        with sigterm_raises():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as leaving:
        interrupted()
    assert leaving.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_child_that_is_gone_is_not_taken_for_whoever_has_its_id_now(tmp_path, monkeypatch):
    child = start(tmp_path, "pass")
    child.kill()

    def strangers(pid):
        raise AssertionError("asked for the family of an id that is nobody's, or a stranger's")

    monkeypatch.setattr("fedcomp.experiments.engines.processes.groups_below", strangers)
    child.terminate()


STARTS = """
import os, sys
from pathlib import Path
from fedcomp.experiments.engines.processes import Child
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = Child("the child", command, env=dict(os.environ), log=None, cwd=Path())
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_ends_with_whoever_started_it_and_was_killed():
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert len(members(pid)) == 1
        starter.kill()
    wait_until(lambda: members(pid) == [])


CELLS = """
import os, sys, time
from pathlib import Path
from fedcomp.experiments.engines.processes import Child, sigterm_raises
from fedcomp.experiments.findings import Say
from fedcomp.experiments.kit import Sweep

def cell(number):
    with sigterm_raises():
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = Child("the child", command, env=dict(os.environ), log=None, cwd=Path())
        try:
            # In one piece: two cells write to one pipe.
            os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
            time.sleep(60)
        finally:
            # An end that takes its time, as that of a deployment does.
            time.sleep(1.0)
            child.stop()
            Path(f"ended-{number}").touch()

if __name__ == "__main__":
    Sweep(cell, {"number": (1, 2)})(Say(), workers=2)
"""


def test_cells_of_an_experiment_that_was_killed_end_in_order_and_their_processes_with_them(tmp_path):
    (tmp_path / "cells.py").write_text(CELLS)
    with subprocess.Popen([sys.executable, "cells.py"], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as experiment:
        assert experiment.stdout is not None
        found = [int(pid) for _ in range(2) for pid in experiment.stdout.readline().split()]
        experiment.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found), 60.0)
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-1", "ended-2"]
