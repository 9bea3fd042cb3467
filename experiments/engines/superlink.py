"""The deployment engine: a real SuperLink and real SuperNodes, as separate processes on loopback.

The apps are the ones every engine runs; here ``flwr run`` bundles the project and Flower ships it to the nodes. Each
process gets a Flower home of its own, all of them in one temporary folder that is removed with the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fedcomp.clients import edge
from fedcomp.clients.edge import own_user
from fedcomp.errors import ConfigError
from fedcomp.experiments.engines.processes import (
    Child,
    DeploymentError,
    free_ports,
    processes_with,
    sigterm_raises,
    tail,
)
from fedcomp.experiments.serve import read_checkpoint
from fedcomp.experiments.server_app import CHECKPOINT_EVERY_KEY, CHECKPOINT_KEY, OUT_KEY, PRIVACY_KEY
from fedcomp.experiments.spec import (
    RESULT_FILE,
    ROUNDS_FILE,
    RoundRecord,
    RunResult,
    RunSpec,
    Scalar,
    format_value,
)
from fedcomp.experiments.systems import get_system
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT, without_proxy

if TYPE_CHECKING:
    from typing import Self

CONNECTION: Final = "dep"
COMMAND_LIMIT: Final = 60.0
MAX_NODES: Final = 64
TASK_POLL: Final = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Environment variable: seconds between two looks of Flower's SuperExec, which starts a process per message."""


APP: Final = Path(__file__).resolve().parents[1] / "app"
"""The Flower app that ``flwr run`` bundles: a few lines. The library is where its processes run, as on any node."""


def kill_all(processes: Iterable[int]) -> list[int]:
    """Kill processes with SIGKILL, those that are gone already among them; return their ids in order."""
    killed = sorted(processes)
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed


class Deployment:
    """A SuperLink and ``nodes`` SuperNodes on loopback, for the duration of a ``with`` block.

    Parameters
    ----------
    nodes : int
        SuperNodes to start; node i holds partition i.
    peers : bool
        Give every node a listener of its own, so that the nodes can send to each other without the server.
    states : Path, optional
        Absolute path of a folder in which every node keeps what its clients remember, in one of its own; it stays when
        the deployment ends, and a later one's nodes go on from there. Default: they forget it.
    data : Path, optional
        A folder: node i is told that its data are in the folder ``node-i`` of it, made where it is missing.
    settings : mapping of str to str
        Environment variables of all processes.
    preload : sequence of str, optional
        Start this project's nodes, as ``peers`` does, in place of Flower's SuperNodes alone; the modules are what they
        import once, before the first message.
    limit : float
        Seconds in which a process has opened its port.

    Raises
    ------
    DeploymentError
        When a process does not start or dies; the message ends with the tail of its log.
    """

    SERVER_PORTS: ClassVar[int] = 1
    """How many ports the server's side listens on; nodes connect to the first."""
    connection: ClassVar[str] = CONNECTION
    """The name under which Flower's command line knows the SuperLink."""

    def __init__(
        self,
        nodes: int,
        *,
        peers: bool = False,
        states: Path | None = None,
        data: Path | None = None,
        settings: Mapping[str, str] | None = None,
        preload: Sequence[str] | None = None,
        limit: float = 60.0,
    ) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(
                f"a loopback deployment starts one operating-system process per client: clients={nodes} is outside "
                f"1 to {MAX_NODES}; use engine=inprocess for more"
            )
        if not Path("/proc/self/stat").exists():
            raise ConfigError(
                "the superlink engine finds its processes in /proc and runs on Linux only; use engine=inprocess"
            )
        self.nodes = nodes
        self.peers = peers
        self.states = states
        self.host = "127.0.0.1"
        self.children: list[Child] = []
        self._killed: set[int] = set()
        self._data = data
        self._settings = dict(settings or {})
        self._preload = preload
        self._limit = limit
        # What the processes need beside their folder, and is given back after them.
        self._beside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="fedcomp-superlink-"))
        try:
            self._start()
        # Python does not call __exit__ when __enter__ fails; processes started so far would be left running.
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Stop every process that was started, nodes first, and what those that were killed left; the folder stays."""
        # All are asked before any is waited for: a node that still talks to its SuperLink leaves at once.
        for child in reversed(self.children):
            child.terminate()
        for child in reversed(self.children):
            child.stop()
        # A server that was killed is nobody's parent any more: the app that it started asks for it for minutes.
        for home in {self.server_app_home, *(self.home(f"node-{node}") for node in range(self.nodes))}:
            kill_all(processes_with("FLWR_HOME", str(home)))

    def close(self) -> None:
        """Stop every process that was started, and remove the folder."""
        self.stop()
        self._beside.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        # One call for all: a second call could be given a port of the first that nobody has bound yet.
        ports = free_ports(self.SERVER_PORTS + self.nodes * (1 + self.peers))
        ports, rest = ports[: self.SERVER_PORTS], ports[self.SERVER_PORTS :]
        self._node_ports, self._peer_ports = rest[: self.nodes], rest[self.nodes :]
        self.address = f"{self.host}:{ports[0]}"
        self._start_server(ports)
        for node in range(self.nodes):
            self._launch_node(node)
        # Only after all are launched, so that the nodes start up side by side.
        for child, node_port in zip(self.children[1:], self._node_ports, strict=True):
            child.wait_for_port(node_port, self._limit)

    def _start_server(self, ports: Sequence[int]) -> None:
        """Start the first child, which nodes and command line connect to, and wait until they can."""
        command = [edge.program("flower-superlink"), "--insecure", "--host", self.host, "--port", str(ports[0])]
        link = self._launch("the SuperLink", "superlink", self.guarded(command))
        link.wait_for_port(ports[0], self._limit)
        (self.home("cli") / "config.toml").write_text(
            f'[superlink]\ndefault = "{self.connection}"\n\n'
            f'[superlink.{self.connection}]\naddress = "{self.address}"\ninsecure = true\n',
            encoding="utf-8",
        )

    def trust(self, node: int) -> list[str]:
        """Return the arguments of a node that say whom it trusts, and as whom it comes."""
        return ["--insecure"]

    def _launch_node(self, node: int) -> Child:
        arguments = [*self.trust(node), "--superlink", self.address, "--port", str(self._node_ports[node])]
        arguments += ["--partition", str(node), "--of", str(self.nodes)]
        if self.states is not None:
            arguments += ["--state-dir", str(self.states / str(node))]
        if self._data is not None:
            own = self._data / f"node-{node}"
            own.mkdir(exist_ok=True)
            arguments += ["--data", str(own)]
        if self._preload is not None:
            arguments += ["--preload", ",".join(self._preload)]
        if self.peers:
            # The entry point itself starts the listener as well.
            arguments += ["--peer", f"127.0.0.1:{self._peer_ports[node]}", "--peer-store", str(self.peer_store(node))]
        command = [sys.executable, "-m", "fedcomp.clients.edge", *arguments]
        if self._preload is None and not self.peers:
            command = self.guarded(edge.prepare(arguments)[0])
        return self._launch(f"SuperNode {node}", f"node-{node}", command)

    def guarded(self, command: list[str]) -> list[str]:
        """Return the command line of a Flower server, here of one whose port serves this user alone."""
        return own_user.guarded(command)

    def peer_store(self, node: int) -> Path:
        """Return the folder in which the listener of ``node`` keeps the parcels of other nodes."""
        return self.home(f"node-{node}") / "peer-store"

    def processes(self, node: int) -> dict[int, str]:
        """Return the command line of every living process of ``node`` by its id.

        The SuperNode, its listener, its helper and the app processes are known by their Flower home, which each of them
        was started with, whoever its parent is by now.
        """
        return processes_with("FLWR_HOME", str(self.home(f"node-{node}")))

    def kill(self, node: int, limit: float = 10.0) -> list[int]:
        """Kill every process of ``node`` with SIGKILL, as a power cut would; return their ids.

        From now on the node is not missed.

        Raises
        ------
        DeploymentError
            When some are still there after ``limit`` seconds.
        """
        self._killed.add(node)
        leader = self.children[1 + node]
        deadline = time.monotonic() + limit
        # Before the first one is killed: Flower's helpers end by themselves soon after their SuperNode, and would be
        # missing from what this returns.
        killed = dict.fromkeys([leader.pid, *self.processes(node)])
        # The SuperNode first: it starts the others. What was started while we looked is found in the next round.
        leader.kill()
        found = set(killed) - {leader.pid}
        while found:
            kill_all(found)
            killed |= dict.fromkeys(found)
            time.sleep(0.02)
            found = set(self.processes(node))
            if found and time.monotonic() > deadline:
                raise DeploymentError(f"processes of node {node} survived SIGKILL for {limit:g} s: {sorted(found)}")
        return list(killed)

    def start(self, node: int, *, wait: bool = True) -> None:
        """Start a killed node again, with the same partition: a new process, with no state but that of its folder, and
        to the SuperLink another node unless it has a key.

        Parameters
        ----------
        wait : bool
            Until it has started; one with a key is refused for up to a minute, as long as its predecessor is missed.

        Raises
        ------
        ConfigError
            When it was not killed.
        DeploymentError
            When it does not start.
        """
        # Two SuperNodes with one partition would both train it.
        if node not in self._killed:
            raise ConfigError(f"node {node} runs already; kill it before it is restarted")
        child = self._launch_node(node)
        # In the place of the dead one.
        self.children[1 + node] = self.children.pop()
        self._killed.discard(node)
        if wait:
            child.wait_for_port(self._node_ports[node], self._limit)

    def kill_server_app(self) -> list[int]:
        """Kill the processes of the server's app with SIGKILL, the SuperLink's alone stay; return their ids.

        :meth:`run_app` with the same configuration, the key ``checkpoint`` among it, continues the run.
        """
        found = processes_with("FLWR_HOME", str(self.server_app_home))
        return kill_all(pid for pid, command in found.items() if "flwr-serverapp" in command)

    @property
    def server_app_home(self) -> Path:
        """The Flower home of what starts server apps; here of the SuperLink itself."""
        return self.home("superlink")

    def home(self, name: str) -> Path:
        """Return the Flower home of the process called ``name``, made on first use."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def env(self, name: str) -> dict[str, str]:
        """Return the environment of the process called ``name``: offline, quiet, its own Flower home."""
        # Flower's helpers start each other by name; they must find the ones of this very environment.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"PATH": path, "FLWR_HOME": str(self.home(name)), "PYTHONUNBUFFERED": "1"}
        # On loopback nobody is spared by looking once a second whether there is something to start.
        # A user's environment may override it, and none of what follows os.environ.
        environment = {TASK_POLL: "0.05", **os.environ, **without_proxy(os.environ), **OFFLINE_ENVIRONMENT}
        return {**environment, **own, **self._settings}

    def placed(self, name: str, command: list[str]) -> list[str]:
        """Return ``command`` as the process called ``name`` runs it; here all run side by side on loopback."""
        return command

    def _launch(self, title: str, name: str, command: list[str]) -> Child:
        log = self.folder / f"{name}.log"
        child = Child(title, self.placed(name, command), env=self.env(name), log=log, cwd=self.home(name))
        self.children.append(child)
        return child

    def require_running(self) -> None:
        """Raise :class:`DeploymentError` when a server or node has ended that was not killed on purpose."""
        for place, child in enumerate(self.children):
            if place - 1 not in self._killed:
                child.require_running()

    def flwr(
        self,
        *arguments: str,
        name: str,
        limit: float,
        watch: Callable[[], object] = lambda: None,
    ) -> str:
        """Run one ``flwr`` command against this SuperLink; return what it printed.

        ``watch`` is called about four times a second while the command runs.

        Raises
        ------
        DeploymentError
            When the command fails or outlasts ``limit`` seconds, or a process of the deployment dies meanwhile.
        """
        log = self.folder / f"{name}.log"
        command = Child(
            f"flwr {arguments[0]}",
            self.placed("cli", [edge.program("flwr"), *arguments]),
            env=self.env("cli"),
            log=log,
            cwd=self.home("cli"),
        )
        deadline = time.monotonic() + limit
        try:
            while command.returncode is None:
                # A lost server or node is reported at once with its own log, not as a command that outlasts its limit.
                self.require_running()
                watch()
                if time.monotonic() > deadline:
                    raise DeploymentError(
                        f"{command.name} did not finish within {limit:.0f} s; it printed last:\n{command.tail()}"
                    )
                time.sleep(0.25)
        finally:
            command.stop()
        if command.returncode != 0:
            raise DeploymentError(
                f"{command.name} failed with status {command.returncode}; it printed last:\n{command.tail()}"
            )
        return log.read_text(encoding="utf-8", errors="replace")

    def run_app(
        self,
        config: Mapping[str, Scalar],
        *,
        limit: float,
        project: Path | None = None,
        watch: Callable[[], object] = lambda: None,
    ) -> str:
        """Submit the app with ``config`` as its run configuration and follow it to its end; return the log."""
        return self.flwr(*self._run(config, project), "--stream", name="run", limit=limit, watch=watch)

    def submit(self, config: Mapping[str, Scalar], *, limit: float, project: Path | None = None) -> int:
        """Submit the app as :meth:`run_app` does, and leave it alone; return the id of its run."""
        printed = self.flwr(*self._run(config, project), name="run", limit=limit)
        found = re.search(r"started run (\d+)", printed)
        if found is None:
            raise DeploymentError(f"flwr run printed no id of a run:\n{printed}")
        return int(found[1])

    def _run(self, config: Mapping[str, Scalar], project: Path | None) -> list[str]:
        overrides = self.folder / "run-config.toml"
        overrides.write_text("".join(f"{k} = {_toml(v)}\n" for k, v in config.items()), encoding="utf-8")
        root = APP if project is None else project.resolve()
        return ["run", str(root), self.connection, "--run-config", str(overrides)]

    def runs(self) -> list[dict[str, Any]]:
        """Return what the SuperLink knows about its runs, newest first, Flower's own traffic counters included."""
        printed = self.flwr("list", self.connection, "--format", "json", name="list", limit=COMMAND_LIMIT)
        try:
            # The command may print remarks before its document.
            document = json.loads(printed[printed.index("{") :])
            return list(document["runs"])
        except (ValueError, KeyError) as error:
            raise DeploymentError(
                f"flwr list printed no run list ({error}):\n{tail(self.folder / 'list.log')}"
            ) from error

    def logs(self, lines: int = 15) -> str:
        """Return the tails of all logs, for error messages."""
        return "\n".join(f"--- {child.name}\n{child.tail(lines)}" for child in self.children)


def run(
    spec: RunSpec,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    privacy: Path | None = None,
) -> RunResult:
    """Run ``spec`` on a fresh loopback deployment. See :func:`fedcomp.experiments.engines.run`.

    A run that was killed, or whose SuperLink, server app or nodes were, goes on with the same ``checkpoint``: Flower
    knows neither the run nor the nodes then, but the server has its state in that file, and the nodes have theirs in a
    folder beside it, by the server's session and their partition.
    """
    places: dict[str, Scalar] = {}
    states, before = None, 0.0
    if checkpoint is not None:
        checkpoint = checkpoint.absolute()
        states = checkpoint.with_name(f"{checkpoint.name}.nodes")
        if checkpoint.exists():
            before = float(read_checkpoint(checkpoint, spec).extra["seconds"])
        elif states.exists():
            # Of a run that made no checkpoint, and begins again.
            shutil.rmtree(states)
        places = {CHECKPOINT_KEY: str(checkpoint), CHECKPOINT_EVERY_KEY: checkpoint_every or 1}
    started = time.perf_counter()
    limit = 120.0 + 60.0 * spec.rounds
    # Where clients send to each other they do so over TCP here, and nowhere else.
    peers = get_system(spec.system).resolve(spec.settings).get("transport") == "peers"
    with sigterm_raises(), Deployment(spec.clients, peers=peers, states=states) as deployment:
        out = deployment.home("out")
        rounds, seen = out / ROUNDS_FILE, 0

        def follow() -> None:
            nonlocal seen
            if on_round is None or not rounds.exists():
                return
            # A line without its end is still being written: it is left for the next look.
            data = rounds.read_bytes()
            new, seen = data[seen : data.rfind(b"\n") + 1], data.rfind(b"\n") + 1
            for line in new.splitlines():
                on_round(RoundRecord.from_json(json.loads(line)))

        # The server app runs in a process of its own, on this machine.
        kept = "" if privacy is None else str(privacy.absolute())
        config = {**spec.to_run_config(), OUT_KEY: str(out), PRIVACY_KEY: kept, **places}
        log = deployment.run_app(config, limit=limit, watch=follow)
        # Rounds may have been written since the last look.
        follow()
        if not (out / RESULT_FILE).exists():
            raise DeploymentError(
                "the run ended without a result; the server app said last:\n"
                + "\n".join(log.splitlines()[-25:])
                + f"\n{deployment.logs()}"
            )
        result = RunResult.load(out)
        result.notes["flower_run"] = deployment.runs()[0]
    return replace(result, seconds=before + time.perf_counter() - started)


def _toml(value: Scalar) -> str:
    return json.dumps(value) if isinstance(value, str) else format_value(value)
