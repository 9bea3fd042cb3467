"""A SuperLink behind ``fedcomp link`` and what talks to it, as processes of one test."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedcomp.clients import edge
from fedcomp.experiments.engines.processes import Child, free_ports, tail
from fedcomp.experiments.engines.superlink import APP
from fedcomp.experiments.security.certificates import Folder
from fedcomp.experiments.spec import RESULT_FILE, RunResult, RunSpec, format_value
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT


class Site:
    """A link and what talks to it, each with a log in ``path``; all is stopped at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = Folder(path / "keys")
        self.public, self.port, *self.node_ports = free_ports(12)
        self.children: list[Child] = []

    def start(self, name: str, command: list[str], home: Path) -> Child:
        home.mkdir(parents=True, exist_ok=True)
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(home), "PATH": search}
        child = Child(name, command, env=env, log=self.path / f"{name}.log", cwd=self.path)
        self.children.append(child)
        return child

    def link(self) -> Child:
        command = [sys.executable, "-m", "fedcomp.experiments.security.link", str(self.folder.path)]
        command += ["--listen", f"127.0.0.1:{self.public}", "--port", str(self.port)]
        child = self.start("link", command, self.path / "unused")
        self.until(child, "ready:")
        return child

    def node(self, name: str, key: Path | None, partition: int, *, ca: Path | None = None) -> Child:
        arguments = ["--superlink", f"127.0.0.1:{self.public}", "--partition", str(partition), "--of", "2"]
        arguments += ["--root-certificates", str(ca or self.folder.ca), "--port", str(self.node_ports.pop())]
        arguments += [] if key is None else ["--key", str(key)]
        command, _ = edge.prepare(arguments)
        return self.start(name, command, self.path / name)

    def peer_node(self, name: str, partition: int, of: int, *options: str) -> Child:
        """Start a registered node with whatever belongs to its links."""
        command = [sys.executable, "-m", "fedcomp.clients.edge", "--superlink", f"127.0.0.1:{self.public}"]
        command += ["--partition", str(partition), "--of", str(of), "--root-certificates", str(self.folder.ca)]
        command += ["--port", str(self.node_ports.pop()), "--key", str(self.folder.nodes / f"node-{partition}")]
        return self.start(name, [*command, *options], self.path / name)

    def until(self, child: Child, text: str, seconds: float = 120.0) -> str:
        child.wait_until(lambda: text in child.log.read_text(errors="replace"), f"did not say {text!r}", seconds)
        return child.log.read_text(errors="replace")

    def ended(self, child: Child, seconds: float = 90.0) -> str:
        """Return what ``child`` printed before it ended by itself, with a status that is no success."""
        assert child._process.wait(seconds) not in (0, None)
        return child.tail(40)

    def flwr(self, *arguments: str, home: Path | None = None, status: int = 0) -> str:
        env = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(home or self.folder.home("cli"))}
        done = subprocess.run([edge.program("flwr"), *arguments], env=env, capture_output=True, text=True, timeout=300)
        printed = done.stdout + done.stderr
        assert (done.returncode == 0) == (status == 0), printed
        return printed

    def run_command(self, spec: RunSpec, **more: str | int) -> list[str]:
        config = {**spec.to_run_config(), "out": str(self.path / "out"), "privacy": "", **more}
        words = self.path / "run.toml"
        lines = [f"{k} = {f'{v!r}' if isinstance(v, str) else format_value(v)}" for k, v in config.items()]
        words.write_text("\n".join(lines))
        return [edge.program("flwr"), "run", str(APP), "link", "--stream", "--run-config", str(words)]

    def run(self, spec: RunSpec, **more: str | int) -> RunResult:
        out = self.path / "out"
        printed = self.flwr(*self.run_command(spec, **more)[1:])
        assert (out / RESULT_FILE).exists(), printed + tail(self.path / "link.log", 60)
        return RunResult.load(out)

    def post(self, path: str, *, port: int | None = None, content: bytes = b"", headers=()) -> httpx.Response:
        trust = ssl.create_default_context(cafile=str(self.folder.ca))
        kind = {"content-type": PROTOBUF_MEDIA_TYPE, **dict(headers)}
        with httpx.Client(verify=trust) as client:
            return client.post(f"https://127.0.0.1:{port or self.public}{path}", content=content, headers=kind)

    def asking(self, path: str, port: int) -> Callable[[], str]:
        """Return a function that asks as the user who calls it, and returns the status or "closed"."""
        client = httpx.Client(
            verify=ssl.create_default_context(cafile=str(self.folder.ca)), headers={"content-type": PROTOBUF_MEDIA_TYPE}
        )

        def ask() -> str:
            try:
                return str(client.post(f"https://127.0.0.1:{port}{path}").status_code)
            except httpx.TransportError:
                return "closed"

        return ask

    def close(self) -> None:
        for child in reversed(self.children):
            child.terminate()
        for child in reversed(self.children):
            child.stop()
