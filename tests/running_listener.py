"""Listeners of peer links in processes of their own, as beside a node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedcomp.coding.transport import Spool, TcpTransport
from fedcomp.experiments.engines.processes import free_ports

HERE = Path(__file__).parents[1]


def wait_until(true: Callable[[], object], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    return free_ports(1)[0]


def open_files(process: int) -> list[str]:
    """Return what a process holds open; it may close some of it meanwhile."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


class Running:
    """A listener in a process of its own."""

    def __init__(self, store: Path, *options: str) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.store = store
        closed, self.kept = os.pipe()
        answer, ready = os.pipe()
        command = [
            sys.executable,
            "-m",
            "fedcomp.coding.listener",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--store",
            str(store),
        ]
        command += ["--until-closed", str(closed), "--ready", str(ready), *options]
        self.process = subprocess.Popen(
            command, pass_fds=(closed, ready), cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        os.close(closed)
        os.close(ready)
        with os.fdopen(answer) as pipe:
            assert pipe.read() == f"127.0.0.1:{self.port}\n"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=100)

    def end(self) -> tuple[int, str, str]:
        """Close the pipe; return exit status and what was printed."""
        os.close(self.kept)
        out, err = self.process.communicate(timeout=100)
        return self.process.returncode, out, err

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def transport(self, own: Path, **options: float) -> TcpTransport:
        return TcpTransport(self.address, Spool(own), **options)  # type: ignore[arg-type]
