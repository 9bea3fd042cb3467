"""The cost of an edge node on its device: handling a message beside training, and waiting for one.

Two nodes of one deployment answer the same messages side by side: one with Flower's own executor, which starts a
program for each, one with ours, which forks (:mod:`fedcomp.clients.edge.executor`). Processor time is that of all
processes of a node, from ``/proc``: in steps of 10 ms for each of them.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from fedcomp.clients import edge
from fedcomp.clients.edge import executor
from fedcomp.experiments.engines import run as run_engine
from fedcomp.experiments.engines.processes import Child, sigterm_raises
from fedcomp.experiments.engines.superlink import TASK_POLL, Deployment
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.spec import ROUNDS_FILE, RunResult, RunSpec
from fedcomp.measuring import Bound, Case, Row

APP: Final = Path(__file__).resolve().parents[1] / "node_app"
WAYS: Final = ("Flower's executor", "fork server")
TRAINING: Final = RunSpec(
    "topk", task="digits", engine="superlink", rounds=5, clients=2, settings={"codec.density": 0.05}
)
TRAINED: Final = "topk on digits, in all"
CPU: Final = "CPU s a message"
DIFFER: Final = "bytes of the model that differ from the run in one process"
GOAL: Final = "goal: a node on a battery"


class MixedNodes(Deployment):
    """A deployment of which some nodes have an executor that forks.

    Parameters
    ----------
    nodes : int
    forking : sequence of int
        Which; the others have Flower's own.
    options : mapping
        Of :func:`fedcomp.clients.edge.executor.command`, for all of them.
    """

    def __init__(self, nodes: int, forking: Sequence[int], **options: Any) -> None:
        # Flower's own pause between two looks for a message.
        super().__init__(nodes, settings={TASK_POLL: os.environ.get(TASK_POLL, "1")})
        self.executors: dict[int, Child] = {}
        self.relays: list[Relay] = []
        self._forking = forking
        self._options = options

    def _launch_node(self, node: int) -> Child:
        port = self._node_ports[node]
        host, _, number = self.address.partition(":")
        self.relays.append(Relay(host, int(number)))
        arguments = ["--insecure", "--superlink", self.relays[-1].address, "--port", str(port)]
        command, _ = edge.prepare([*arguments, "--partition", str(node), "--of", str(self.nodes)])
        if node in self._forking:
            command += ["--isolation", "process"]
            if secret := self._options.get("secret_file"):
                command += ["--superexec-auth-secret-file", str(secret)]
            name = f"node-{node}"
            self.executors[node] = Child(
                f"the executor of node {node}",
                executor.command(f"127.0.0.1:{port}", **self._options),
                env=self.env(name),
                log=self.folder / f"executor-{node}.log",
                cwd=self.home(name),
            )
        return self._launch(f"SuperNode {node}", f"node-{node}", command)

    def close(self) -> None:
        """Stop the executors, then all others."""
        for child in self.executors.values():
            child.stop()
        super().close()
        for relay in self.relays:
            relay.shutdown()
            relay.server_close()

    def leaders(self) -> list[list[int]]:
        """Return the processes of each node that all others of it were started by."""
        executors = [[self.executors[i].pid] if i in self.executors else [] for i in range(self.nodes)]
        return [[child.pid, *own] for child, own in zip(self.children[1:], executors, strict=True)]


def cases(quick: bool) -> Iterator[Case]:
    """Yield both nodes: their messages, a training, and a quiet minute."""
    spec = replace(TRAINING, rounds=2) if quick else TRAINING
    text = f"messages, {spec.rounds} rounds of {spec.system} on {spec.task} and quiet, with both executors"
    yield Case(text, partial(_nodes, spec, 1 if quick else 4, 5.0 if quick else 60.0), BOUNDS)


def _nodes(spec: RunSpec, count: int, seconds: float, _: Any) -> list[Row]:
    nodes = MixedNodes(2, [1])
    with sigterm_raises(), nodes:
        costs = messages(nodes, count)
        trained, costs[TRAINED] = training(nodes, spec)
        quiet = idle(nodes, seconds)
    here = run_engine(replace(spec, engine="inprocess"))
    return rows_of(costs, quiet, different_bytes(trained.arrays, here.arrays))


def rows_of(
    costs: Mapping[str, Sequence[Sequence[float]]], quiet: Sequence[Mapping[str, float]], differ: int
) -> list[Row]:
    """Return the rows of what was measured: ``costs`` by kind of message and node, in seconds for each."""
    rows: list[Row] = [
        {
            "message": kind,
            "executor": way,
            CPU: round(median(each), 2),
            "first": round(each[0], 2),
            "messages": len(each),
        }
        for kind, nodes in costs.items()
        for way, each in zip(WAYS, nodes, strict=True)
    ]
    return [*rows, *({"quiet node": way, **found} for way, found in zip(WAYS, quiet, strict=True)), {DIFFER: differ}]


# How busy the machine is shows in processor time as well.
BOUNDS: Final = (
    Bound(
        "CPU seconds of a message beyond training, torch app",
        (CPU, {"message": "torch", "executor": WAYS[-1]}),
        "<= 0.2",
        GOAL,
        gate=False,
    ),
    Bound(
        "CPU seconds of a top-k round of digits in all",
        (CPU, {"message": TRAINED, "executor": WAYS[-1]}),
        "<= 0.7",
        GOAL,
        gate=False,
    ),
    Bound(DIFFER, (DIFFER, {}), "== 0", "theory: the same code", sure=True),
)


class Meter:
    """Reads the processor time of nodes, by the processes that lead them, when made and when a file has a line more."""

    def __init__(self, leaders: Sequence[Sequence[int]], file: Path) -> None:
        self._leaders, self._file = leaders, file
        self._seen = 0
        self.marks = [self.read()]
        self.names: list[str] = []

    def __call__(self) -> None:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        if len(lines) > self._seen:
            self._seen = len(lines)
            self.names.append(lines[-1].partition(" ")[0])
            self.marks.append(self.read())

    def each(self) -> list[list[float]]:
        """Return what lies between two readings, by node."""
        return [
            [after[node] - before[node] for before, after in itertools.pairwise(self.marks)]
            for node in range(len(self.marks[0]))
        ]

    def read(self) -> list[float]:
        """Return the processor seconds of each node so far."""
        return [cpu_seconds(each) for each in self._leaders]


def messages(nodes: MixedNodes, count: int) -> dict[str, list[list[float]]]:
    """Return the processor seconds of each message by kind and node; the first of each kind is left out."""
    file = nodes.folder / "answered"
    meter = Meter(nodes.leaders(), file)
    nodes.run_app({"messages": count + 1, "nodes": len(WAYS), "file": str(file)}, limit=300, project=APP, watch=meter)
    meter()
    return {
        kind: [[c for c, name in zip(each, meter.names, strict=True) if name == kind][1:] for each in meter.each()]
        for kind in dict.fromkeys(meter.names)
    }


def training(nodes: MixedNodes, spec: RunSpec) -> tuple[RunResult, list[list[float]]]:
    """Run ``spec``; return its result and the processor seconds of each round by node, without the first."""
    out = nodes.home("out")
    meter = Meter(nodes.leaders(), out / ROUNDS_FILE)
    nodes.run_app({**spec.to_run_config(), "out": str(out)}, limit=300, watch=meter)
    # Round 0 is the evaluation of the first model, and the process of the last message ends after its reply.
    time.sleep(1.0)
    meter.marks[-1] = meter.read()
    return RunResult.load(out), [each[2:] for each in meter.each()]


def idle(nodes: MixedNodes, seconds: float) -> list[dict[str, float]]:
    """Return what waiting costs each node: memory, and time and bytes extrapolated to an hour."""
    leaders = nodes.leaders()

    def read() -> list[tuple[float, int, int]]:
        return [(cpu_seconds(own), relay.up, relay.down) for own, relay in zip(leaders, nodes.relays, strict=True)]

    before = read()
    time.sleep(seconds)
    spent = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, read(), strict=True)]
    return [
        {
            "memory, MB (PSS)": round(sum(map(proportional_bytes, family(own))) / 1e6, 1),
            "CPU s an hour": round(cpu * 3600 / seconds, 1),
            "MB up an hour": round(up * 3600 / seconds / 1e6, 2),
            "MB down an hour": round(down * 3600 / seconds / 1e6, 2),
            "from seconds": seconds,
        }
        for own, (cpu, up, down) in zip(leaders, spent, strict=True)
    ]


def family(leaders: Sequence[int]) -> dict[int, list[str]]:
    """Return the fields of ``/proc/PID/stat`` of these processes and all below them, those that have ended included."""
    fields = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name of a process, in parentheses, may hold anything.
                fields[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    found = {pid: fields[pid] for pid in leaders if pid in fields}
    while more := {pid: stat for pid, stat in fields.items() if int(stat[1]) in found and pid not in found}:
        found |= more
    return found


def cpu_seconds(leaders: Sequence[int]) -> float:
    """Return the processor time of these processes, of all below them, and of those that they have waited for."""
    ticks = sum(sum(map(int, stat[11:15])) for stat in family(leaders).values())
    return ticks / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Return a process's memory, of which pages that it shares with others count in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


class Relay(socketserver.ThreadingTCPServer):
    """Passes a node's connections on to its SuperLink, and counts the bytes."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = (host, port)
        self.up = self.down = 0
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as link:
            other = {self.request: link, link: self.request}
            while True:
                for end in select.select(list(other), [], [])[0]:
                    try:
                        data = end.recv(1 << 16)
                        other[end].sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if end is link:
                        self.server.down += len(data)
                    else:
                        self.server.up += len(data)
