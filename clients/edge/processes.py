"""Child processes that end with their parent, and the descendants of a process, read from ``/proc`` (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedcomp.clients.edge.events import plain

_SHIM: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]): os._exit(0)
os.nice(int(sys.argv[3]))
os.execv(sys.argv[4], sys.argv[4:])
"""
"""Asks for a signal at the death of the parent, then becomes the program; not a preexec_fn, which is unsafe beside
threads. A parent that died before it was asked for is noticed by its id."""

_PDEATHSIG: Final = 1
_SUBREAPER: Final = 36


def tied(command: Sequence[str], orphaned: int, nice: int = 0) -> list[str]:
    """Return ``command``, whose first word is the path of a program, as one that gets a signal when this process is
    gone. The process id is that of the program, and 0 is no signal. ``nice`` is added to what this process has.
    """
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), str(int(orphaned)), str(nice), *command]


def end_with(parent: int, orphaned: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when ``parent``, which started it, is gone; now, if it is."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, int(orphaned))
    # It may have ended before the kernel was asked to watch it.
    if os.getppid() != parent:
        os.kill(os.getpid(), orphaned)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none is lost; Linux only.

    Raises
    ------
    OSError
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Child:
    """One process in a session of its own, so that Ctrl-C in a terminal reaches only the supervisor.

    Its standard input is a pipe that closes when the supervisor is gone; what it prints is read as lines.

    Parameters
    ----------
    command : sequence of str
        Its first word is the path of a program.
    env : mapping of str to str
    orphaned : int
        The signal that it gets when the supervisor is gone; 0 for one that leaves when its pipe is closed.
    nice : int
        By how much it gives way to others.
    cwd : Path or None
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        orphaned: int = signal.SIGKILL,
        nice: int = 0,
        cwd: Path | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            tied(command, orphaned, nice),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._rest = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The pipe that its lines come from."""
        return self._out

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """Return the lines that have come, without colours; the last need not be whole when the process has ended."""
        data, more = self._rest, b"-"
        while more:
            try:
                more = os.read(self._out, 1 << 16)
            except BlockingIOError:
                break
            data += more
        whole, _, self._rest = (data, b"", b"") if not more else data.rpartition(b"\n")
        return [plain(line) for line in whole.decode(errors="replace").split("\n")]

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def below(pid: int) -> set[int]:
    """Return the living descendants of a process."""
    family, processes = {pid}, living()
    # /proc does not list parents before their children: repeat until nothing is added.
    while more := {child for child, (parent, _) in processes.items() if parent in family} - family:
        family |= more
    return family - {pid}


def living() -> dict[int, tuple[int, int]]:
    """Return parent and process group of every living process by its id (zombies are dead)."""
    found = {}
    for entry in Path("/proc").iterdir():
        # What is no number is no process, and one may have ended meanwhile.
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            # The command name, in parentheses, may hold anything: fields count from the last one.
            state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                found[number] = int(parent), int(group)
    return found
