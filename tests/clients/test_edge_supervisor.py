"""The supervisor of a node, with scripts in the place of Flower: what it restarts, when it ends, what is then left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edge_servers import authority, serving
from running_listener import wait_until

from fedcomp.experiments.engines.processes import processes_with

pytestmark = pytest.mark.slow

DRIVER = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from fedcomp.clients.edge import supervisor
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.options import NodeOptions

asked = json.loads(sys.argv[1])
supervisor.LOOK_SECONDS, supervisor.GRACE_SECONDS = 0.05, asked.get("grace", 5.0)
supervisor.FIRST, supervisor.LONGEST, supervisor.HEALTHY = 0.02, asked.get("longest", 0.05), asked.get("healthy", 60.0)
if asked.get("dumb"):
    def dumb(*_):
        raise OSError(93, "no sock_diag")
    supervisor.contact.last_received = dumb
if asked.get("zombie"):
    tells = supervisor.contact.last_received
    def ended(pid, port):
        supervisor.contact.last_received = tells
        os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        raise PermissionError(13, "as for whoever is not root")
    supervisor.contact.last_received = ended
supervisor.probe.behind = lambda *_, **__: asked.get("behind")
classify = supervisor.classify

def hurried(*arguments):
    failure = classify(*arguments)
    return replace(failure, patience=asked.get("patience", failure.patience))

supervisor.classify = hurried
options = NodeOptions(asked.get("superlink", "127.0.0.1:9"), 0, 1, give_up=asked.get("give_up"))
options = replace(options, heartbeat=Path(asked["heartbeat"]) if "heartbeat" in asked else None)
services = {}
for name, code, more in asked["services"]:
    if "after" in more:
        more["after"] = services[more["after"]]
    if "fatal" in more:
        more["fatal"] = {int(status): why for status, why in more["fatal"].items()}
    services[name] = supervisor.Service(name, [sys.executable, "-S", "-c", code], dict(os.environ), **more)
log = EventLog(json=asked.get("json", True))
sys.exit(supervisor.NodeSupervisor(options, list(services.values()), log).run())
"""

BEGIN = """
import os, signal, subprocess, sys, time
def count():
    with open(os.environ["NODE_COUNT"], "a") as file:
        file.write("x")
    return os.path.getsize(os.environ["NODE_COUNT"])
def say(*lines):
    for line in lines:
        print(line, flush=True)
def stay():
    while True:
        time.sleep(60)
JOINED = "\\x1b[92mINFO \\x1b[0m:      SuperNode ID: 77"
FAILED = "\\x1b[93mWARNING \\x1b[0m:   Connection attempt failed, retrying in 1.76 seconds"
"""
REFUSED = "ERROR :     Exit Code: 305", "Failed to initialize the connection to the SuperLink."


class Node:
    """A supervisor of scripts."""

    def __init__(
        self, folder: Path, *services: tuple[str, str] | tuple[str, str, dict[str, Any]], **asked: Any
    ) -> None:
        self.mark = str(folder / "mark")
        self.count = folder / "count"
        whole = [(name, BEGIN + code, *(more or [{}])) for name, code, *more in services]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps({"services": whole, **asked})],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NODE_MARK": self.mark, "NODE_COUNT": str(self.count)},
        )

    def until(self, event: str, **also: object) -> list[dict[str, Any]]:
        """Return the events up to one of that name, inclusive."""
        found = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found.append(json.loads(line))
            if found[-1]["event"] == event and also.items() <= found[-1].items():
                return found
        raise AssertionError(f"no {event}: {found}")

    def end(self, number: int | None = None) -> tuple[int, list[dict[str, Any]]]:
        """Return the exit status and the events that were not read yet."""
        if number is not None:
            self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=300)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()]

    def left(self) -> dict[int, str]:
        return processes_with("NODE_MARK", self.mark)

    def starts(self) -> int:
        return self.count.stat().st_size


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def begin(*services: Any, **asked: Any) -> Node:
        nodes.append(Node(tmp_path, *services, **asked))
        return nodes[-1]

    yield begin
    for node in nodes:
        for pid in node.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.process.communicate()


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events if event["event"] != "output"]


def test_an_end_with_status_0_is_a_failure_until_it_is_asked_for(start) -> None:
    node = start(("supernode", "if count() < 3: sys.exit(0)\nsay(JOINED); stay()"), behind=-7.0)
    events = node.until("joined")
    assert names(events) == ["started", "clock", "restart"] * 2 + ["started", "joined"]
    assert "7 s ahead of the SuperLink's" in events[1]["message"]
    status, rest = node.end(signal.SIGTERM)
    assert status == 0
    assert names(rest)[-2:] == ["stopping", "stopped"]
    assert node.starts() == 3
    assert node.left() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_node_with_status_0(start, number) -> None:
    node = start(("supernode", "say(JOINED); stay()"))
    node.until("joined")
    assert node.end(number)[0] == 0


def test_what_waiting_does_not_mend_ends_the_node(start) -> None:
    node = start(("supernode", f"count(); say(*{REFUSED!r}, '[code: 2001] no'); sys.exit(1)"))
    status, events = node.end()
    assert status == 78
    assert node.starts() == 1
    (final,) = [event for event in events if event["level"] == "error"]
    assert final["event"] == "key-needed"
    assert "--key" in final["message"]
    assert "restart" not in names(events)


def test_a_crashed_node_is_refused_for_a_while_and_then_let_in(start) -> None:
    code = f"if count() < 3: say(*{REFUSED!r}, '[code: 2004] no'); sys.exit(1)\nsay(JOINED); stay()"
    node = start(("supernode", code))
    # On a busy machine a node is also told that it has no contact yet.
    said = [name for name in names(node.until("joined")) if name != "contact"]
    assert said == ["started", "unregistered", "restart"] * 2 + ["started", "joined"]


def test_a_service_gives_way_to_the_others_as_it_is_asked_to(start, tmp_path) -> None:
    codes = {name: f"print(os.nice(0), file=open({str(tmp_path / name)!r}, 'w')); stay()" for name in ("one", "other")}
    start(("supernode", codes["one"]), ("executor", codes["other"], {"nice": 5}))
    wait_until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in codes))
    # Nothing gives way further than 19, which this process may do itself.
    own = os.nice(0)
    assert [int((tmp_path / name).read_text()) for name in codes] == [own, min(own + 5, 19)]


def test_a_node_that_is_refused_for_longer_is_not_registered(start) -> None:
    # Long beside the start of a few scripts, also where the machine is busy.
    node = start(("supernode", f"count(); say(*{REFUSED!r}, '[code: 2004] no'); sys.exit(1)"), patience=4.0)
    status, events = node.end()
    assert status == 78
    assert node.starts() > 2
    assert [event["level"] for event in events if event["event"] == "unregistered"][-2:] == ["warning", "error"]


def test_a_node_gives_up_with_a_status_of_its_own(start) -> None:
    node = start(("supernode", "say(FAILED); stay()"), give_up=0.3)
    status, events = node.end()
    assert status == 75
    assert "gave-up" in names(events)
    assert node.left() == {}


def test_a_node_in_contact_does_not_give_up(start) -> None:
    code = "say(JOINED)\nfor _ in range(60): time.sleep(0.1); say('INFO :      Sent successfully')\nsys.exit(9)"
    node = start(("supernode", code), give_up=5.0)
    events = node.until("failed")
    assert "gave-up" not in names(events)


@pytest.mark.parametrize(("healthy", "grows"), [(0.05, False), (60.0, True)])
def test_a_pause_is_a_first_one_after_a_time_in_contact(start, healthy, grows) -> None:
    node = start(("supernode", "say(JOINED); time.sleep(0.2); sys.exit(1)"), healthy=healthy, longest=10.0)
    pauses = [node.until("restart")[-1]["seconds"] for _ in range(3)]
    assert (pauses[2] > pauses[0]) == grows
    assert grows or len(set(pauses)) == 1


def test_a_supernode_that_only_waited_was_not_healthy(start) -> None:
    node = start(("supernode", "say(FAILED); time.sleep(0.2); sys.exit(1)"), healthy=0.05, longest=10.0)
    pauses = [node.until("restart")[-1]["seconds"] for _ in range(3)]
    assert pauses[2] > pauses[0]


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", code])
subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
time.sleep(0.3)
say(JOINED)
"""


@pytest.mark.parametrize(
    "code", [STUBBORN + "stay()", STUBBORN + "signal.signal(signal.SIGTERM, signal.SIG_DFL); stay()"]
)
def test_nothing_is_left_after_sigterm_not_even_what_refuses_it(start, code) -> None:
    node = start(("supernode", code), ("executor", STUBBORN + "stay()"), grace=0.2)
    node.until("joined")
    assert len(node.left()) >= 4
    assert node.end(signal.SIGTERM)[0] == 0
    assert node.left() == {}


def test_nothing_that_it_started_is_left_after_sigkill_of_the_supervisor(start) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(JOINED); stay()"
    node = start(("supernode", deaf), ("executor", deaf))
    node.until("output", source="executor")
    assert len(node.left()) == 3
    node.end(signal.SIGKILL)
    wait_until(lambda: node.left() == {})


def test_helpers_of_a_dead_supernode_do_not_serve_the_next(start) -> None:
    code = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)  # helper'])\n"
    node = start(("supernode", f"if count() == 1:\n    {code}    sys.exit(1)\nsay(JOINED); stay()"))
    node.until("joined")
    assert not [command for command in node.left().values() if command.endswith("# helper")]


def test_ended_orphans_are_not_kept_as_zombies(start) -> None:
    code = "subprocess.Popen(['sh', '-c', 'sleep 0.2 &']).wait(); say(JOINED); time.sleep(0.5); say('later'); stay()"
    node = start(("supernode", code))
    node.until("output", message="later")

    def zombies() -> list[str]:
        stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
        return [stat[0] for stat in stats if stat[1] == str(node.process.pid) and stat[0] == "Z"]

    wait_until(lambda: zombies() == [])


def test_a_service_waits_for_the_one_before_it(start) -> None:
    listener = ("listener", "time.sleep(0.2); say('ready at last'); stay()", {"ready": "^ready"})
    node = start(listener, ("supernode", "say(JOINED); stay()", {"after": "listener"}))
    events = node.until("joined")
    said = [(event["event"], event.get("service") or event.get("source")) for event in events]
    assert said.index(("output", "listener")) < said.index(("started", "supernode"))


def test_an_executor_is_restarted_without_the_supernode(start) -> None:
    executor = ("executor", "if count() < 3: sys.exit(75)\nsay('works'); stay()", {"fatal": {"78": "see above"}})
    node = start(("supernode", "say(JOINED); stay()"), executor)
    events = node.until("output", source="executor")
    assert [event["service"] for event in events if event["event"] == "started"].count("supernode") == 1
    assert names(events).count("executor-ended") == 2


def test_an_executor_that_cannot_work_ends_the_node(start) -> None:
    node = start(("supernode", "say(JOINED); stay()"), ("executor", "sys.exit(78)", {"fatal": {"78": "see above"}}))
    status, events = node.end()
    assert status == 78
    assert [event["message"] for event in events if event["level"] == "error"] == ["see above"]


def test_the_heartbeat_says_what_is_and_then_that_it_is_over(start, tmp_path) -> None:
    beat = tmp_path / "beat"
    seen = tmp_path / "seen"
    code = "if count() == 1: sys.exit(1)\nsay(JOINED)\n"
    code += f"while not os.path.exists({str(seen)!r}): time.sleep(0.02)\nsay(FAILED); stay()"
    node = start(("supernode", code), heartbeat=str(beat))

    def said() -> dict[str, Any]:
        return json.loads(beat.read_text()) if beat.exists() else {}

    node.until("joined")
    wait_until(lambda: said().get("superlink") == "connected")
    assert (said()["state"], said()["node_id"], said()["restarts"]) == ("running", 77, 1)
    assert said()["last_error"].startswith("failed: the SuperNode ended with status 1")
    seen.touch()
    node.until("superlink", level="warning")
    wait_until(lambda: said()["superlink"] == "unreachable")
    assert node.end(signal.SIGTERM)[0] == 0
    assert said()["state"] == "stopped"


def test_a_heartbeat_that_cannot_be_written_ends_nothing(start) -> None:
    node = start(("supernode", "say(JOINED); stay()"), heartbeat="/nowhere/beat")
    node.until("heartbeat", level="warning")
    assert node.end(signal.SIGTERM)[0] == 0


def test_where_the_kernel_does_not_tell_contact_is_in_what_the_supernode_logs(start, tmp_path) -> None:
    beat = tmp_path / "beat"
    node = start(("supernode", "say(JOINED); stay()"), heartbeat=str(beat), dumb=True)
    assert "no sock_diag" in node.until("contact", level="warning")[-1]["message"]
    wait_until(lambda: beat.exists() and json.loads(beat.read_text())["superlink"] == "connected")
    status, rest = node.end(signal.SIGTERM)
    assert status == 0
    assert "contact" not in names(rest), "it is said once"


def test_a_supernode_that_ends_while_the_kernel_is_asked_about_it_does_not_make_it_dumb(start) -> None:
    """Whoever is not root may not look at the files of a process that has ended and was not waited for."""
    node = start(("supernode", "say(JOINED); stay()"), zombie=True)
    seen = [*node.until("restart"), *node.until("joined")]
    assert "contact" not in names(seen + node.end(signal.SIGTERM)[1])


def test_a_superlink_with_tls_is_recognised_by_a_node_without(start, tmp_path) -> None:
    _, context = authority(tmp_path)
    with serving(context) as superlink:
        node = start(("supernode", "say(FAILED); stay()"), superlink=superlink)
        status, events = node.end()
    assert status == 78
    assert [event["event"] for event in events if event["level"] == "error"] == ["needs-tls"]


def test_a_superlink_that_is_down_is_waited_for(start) -> None:
    with serving() as superlink:
        node = start(("supernode", "say(FAILED); time.sleep(0.3); say(JOINED); stay()"), superlink=superlink)
        assert "needs-tls" not in names(node.until("joined"))


def test_json_lines_hold_no_colours_and_every_line_is_json(start) -> None:
    node = start(("supernode", "say(JOINED, '\\x1b[1mbold\\x1b[0m \"quoted\"', '', 'last'); stay()"))
    events = node.until("output", message="last")
    assert [event["message"] for event in events if event["event"] == "output"] == [
        *("INFO : SuperNode ID: 77", 'bold "quoted"', "last")
    ]
    assert all({"time", "level", "event", "message"} <= event.keys() for event in events)
    assert "\x1b" not in json.dumps(events)


def test_text_has_one_line_per_event(start) -> None:
    node = start(("supernode", "say(JOINED); stay()"), json=False)
    assert node.process.stdout is not None
    first, second, third = (node.process.stdout.readline() for _ in range(3))
    assert " INFO    started: supernode has process id " in first
    assert second == "supernode | INFO :      SuperNode ID: 77\n"
    assert third.endswith(" INFO    joined: the SuperLink knows this node as 77\n")
