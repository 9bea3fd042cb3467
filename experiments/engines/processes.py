"""Child processes that are always terminated, for engines that start servers.

Every child leads a process group of its own, so that what it starts in turn (Flower's SuperExec, one process per
message) is reached through it, and so that Ctrl-C in a terminal reaches only us, who then stop the children in order.
Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from fedcomp.clients.edge.processes import below, living, tied
from fedcomp.errors import FedcompError

_LISTENING: Final = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""
_FIRST_PORT: Final = 20_000
_LAST_PORT: Final = 32_767
_BLOCK: Final = 250
"""Ports from first to last are given out in blocks of so many, one block a process."""


class _Block(NamedTuple):
    """Ports that one process hands out: the first of them is held by ``held`` and given to nobody."""

    first: int
    turns: Iterator[int]
    held: socket.socket


_BLOCKS: Final[dict[int, _Block]] = {}
"""The block of each process id, so that a forked child does not go on with its parent's."""


class DeploymentError(FedcompError, RuntimeError):
    """A server, node or command of a deployment failed; the message ends with the tail of its log."""


class Child:
    """One started process and everything below it. It gets SIGTERM when the process that started it is gone.

    Parameters
    ----------
    name : str
        What the process is called in error messages.
    command : sequence of str
    env : mapping of str to str
        The whole environment of the process.
    log : Path, optional
        Receives standard output and standard error; None leaves them this process's own.
    cwd : Path
    """

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], log: Path | None, cwd: Path
    ) -> None:
        self.name = name
        self.log = log
        with contextlib.nullcontext() if log is None else log.open("wb") as out:
            self._process = subprocess.Popen(
                tied(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self._groups = {self._process.pid}

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._process.poll()

    def tail(self, lines: int = 20) -> str:
        """Return the last ``lines`` lines of the process's log."""
        return "(see above)" if self.log is None else tail(self.log, lines)

    def require_running(self) -> None:
        """Raise :class:`DeploymentError` when the process has ended."""
        if self.returncode is not None:
            raise DeploymentError(
                f"{self.name} ended with status {self.returncode} while it was needed; its log says:\n{self.tail()}"
            )

    def wait_until(self, true: Callable[[], bool], late: str, limit: float) -> None:
        """Wait until something is true, for ``limit`` seconds at most.

        Raises
        ------
        DeploymentError
            When the process ends first or it is not true in time, which ``late`` says of it.
        """
        deadline = time.monotonic() + limit
        while not true():
            self.require_running()
            if time.monotonic() > deadline:
                raise DeploymentError(f"{self.name} {late} within {limit:g} s; its log says:\n{self.tail()}")
            time.sleep(0.1)

    def wait_for_port(self, port: int, limit: float) -> None:
        """Wait until TCP ``port`` is open where the process is; see :meth:`wait_until`."""
        self.wait_until(lambda: listens(self.pid, port), f"did not open port {port}", limit)

    def terminate(self) -> None:
        """Ask the leader to end; return at once."""
        # Once the leader is gone its descendants have another parent and cannot be told from strangers, and its id may
        # be a stranger's by now.
        if self.returncode is None:
            self._groups |= groups_below(self.pid)
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the leader alone with SIGKILL and wait until it is gone; what it started is left as it is."""
        self._process.kill()
        self._process.wait()

    def stop(self, grace: float = 10.0) -> None:
        """End the process and all below it: ask the leader, then everybody, then insist."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in self._groups:
                if members(group):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(group, number)
            deadline = time.monotonic() + grace
            while any(members(group) for group in self._groups) and time.monotonic() < deadline:
                self._process.poll()
                time.sleep(0.05)
        self._process.poll()


def tail(path: Path, lines: int = 20) -> str:
    """Return the last ``lines`` lines of a text file, or a remark when there are none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text[-lines:]) or "(the log is empty)"


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports that are free on loopback now, and that no other process asks for here.

    The kernel gives ports from 32768 on to outgoing connections, so one of those may be taken in the moment before
    its owner binds it. These lie below. Each process claims a block of them by holding its first port for as long as
    the process lives, and hands out the rest of the block in turn. Raises :class:`DeploymentError` when fewer than
    ``count`` are free.
    """
    block = _claimed_block()
    found: list[int] = []
    for turn in itertools.islice(block.turns, _BLOCK - 1):
        port = block.first + 1 + turn % (_BLOCK - 1)
        # Another program may listen there.
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise DeploymentError(
        f"{count} free ports were asked for, and {len(found)} of the {_BLOCK - 1} ports after {block.first} are free"
    )


def _claimed_block() -> _Block:
    """Return this process's block of ports; a forked child claims another."""
    pid = os.getpid()
    if pid not in _BLOCKS:
        for first in range(_FIRST_PORT, _LAST_PORT - _BLOCK + 1, _BLOCK):
            held = socket.socket()
            try:
                held.bind(("127.0.0.1", first))
            except OSError:  # claimed by another process
                held.close()
                continue
            _BLOCKS[pid] = _Block(first, itertools.count(), held)
            break
        else:
            raise DeploymentError(f"all blocks of {_BLOCK} ports from {_FIRST_PORT} to {_LAST_PORT} are claimed")
    return _BLOCKS[pid]


def listens(pid: int, port: int) -> bool:
    """Whether a process of the network namespace of ``pid`` listens on TCP ``port``."""
    for table in ("tcp", "tcp6"):
        # Gone meanwhile, or no IPv6 here.
        with contextlib.suppress(OSError):
            for fields in map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]):
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into :class:`SystemExit` inside the block, so that ``finally`` clauses stop the children.

    Only the main thread may set signal handlers; elsewhere the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        # Whoever leaves is not interrupted: the kernel tells of a parent's death once for each of its threads.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The status that a shell reports for a process ended by a signal.
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def members(group: int) -> list[int]:
    """Return the ids of the living processes in process group ``group`` (zombies are dead)."""
    return [pid for pid, (_, pgrp) in living().items() if pgrp == group]


def groups_below(pid: int) -> set[int]:
    """Return the process groups led by ``pid`` or by any of its living descendants.

    Some of Flower's helpers are started in sessions of their own; a group whose leader is no descendant is never ours.
    """
    family, processes = {pid} | below(pid), living()
    return {pid} | {processes[p][1] for p in family if p in processes and processes[p][1] in family}


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Return the command lines of the living processes of this user that were started with ``variable=value``."""
    found = {}
    for pid in living():
        # Somebody else's, or gone meanwhile.
        with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            if f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
