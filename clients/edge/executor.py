"""Executor of an edge node: ``python -m fedcomp.clients.edge.executor --runtime 127.0.0.1:PORT``.

Flower starts a program for every message, and most of what a message costs is its imports. This takes the place of
Flower's SuperExec beside ``flower-supernode --isolation process``: it has Flower, the library and torch imported, and
forks. Every message still has a process of its own, in which Flower's own code handles it.

It leaves with whoever started it: ``--until-closed FD`` names a pipe whose other end they hold. Exit status: 0 on
SIGTERM, SIGINT, or when that pipe is closed; 75 when the system has no room for another process; 78 when it cannot work
as it was started.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import re
import select
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from fedcomp.clients.edge.zygote import Zygote, end, fork, require_one_thread
from fedcomp.errors import ConfigError
from fedcomp.flower._private import NodeTask, NodeTasks, abandon_task, node_tasks_unsupported, refuse_task
from fedcomp.heap import keep_freed_memory
from fedcomp.logs import log

OK: Final = 0
TEMPORARY: Final = 75
CONFIGURATION: Final = 78
"""Exit statuses, as sysexits.h has them."""

PRELOAD: Final = ("fedcomp.clients.app", "fedcomp.tasks", "torch")
BUNDLES: Final = 2
"""Warm processes kept: for the run of today, and for the one before it."""

POLL: Final = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Environment variable of Flower's own executor: seconds between two looks for a message."""

LOOK_SECONDS: Final = 5.0
OVERTAKEN_SECONDS: Final = 20.0
"""How often is asked for the next message while one is handled, and how long a message may go on once there is one."""

_THREADS: Final = "OPENBLAS_NUM_THREADS"
"""numpy starts a pool of threads when it is imported, unless this says otherwise. Those of torch come with its first
operation, of which there is none before a fork: OMP_NUM_THREADS is the user's."""

_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT)

_ANSWERED: Final = (0, 1)
"""Exit statuses of Flower's client app: a reply was pushed, be it an error."""


def unsupported() -> str:
    """Return in one line why messages cannot be handled in forks here; empty when they can.

    Flower's own executor does the same for more processor time.
    """
    if sys.platform != "linux" or not hasattr(os, "fork"):
        return f"forks that end with their parent need Linux; this is {sys.platform}"
    return node_tasks_unsupported()


def command(
    runtime: str,
    *,
    secret_file: Path | None = None,
    allow: Path | None = None,
    preload: Sequence[str] | None = None,
    until_closed: int | None = None,
) -> list[str]:
    """Return the command line that starts an executor.

    Parameters
    ----------
    runtime : str
        ``HOST:PORT`` of the SuperNode's runtime API.
    secret_file : Path or None
        What the SuperNode was given as ``--superexec-auth-secret-file``.
    allow : Path or None
        File of the bundles that may run.
    preload : sequence of str or None
        Modules to import before the first message; None for the usual ones.
    until_closed : int or None
        A file descriptor that the executor inherits: a pipe at whose end it leaves.
    """
    words = [sys.executable, "-m", "fedcomp.clients.edge.executor", "--runtime", runtime]
    for option, value in (("--secret-file", secret_file), ("--allow", allow), ("--until-closed", until_closed)):
        words += [] if value is None else [option, str(value)]
    return words if preload is None else [*words, "--preload", ",".join(preload)]


def main(argv: Sequence[str] | None = None) -> int:
    """Handle messages until told to stop; return the exit status."""
    args = _parser().parse_args(argv)
    for number in _ENDINGS:
        signal.signal(number, _leave)
    try:
        if reason := unsupported():
            raise ConfigError(f"{reason}; start the SuperNode without --isolation process")
        for name in PRELOAD if args.preload is None else filter(None, args.preload.split(",")):
            _preload(name, asked=args.preload is not None)
        if args.allow is not None:
            read_list(args.allow)
        tasks = NodeTasks(args.runtime, _secret(args.secret_file))
        executor = Executor(args.runtime, tasks, args.allow, args.until_closed)
        # Before the first fork: what handles a message is a child, which inherits it.
        keep_freed_memory()
        # The collector would touch, and so copy, every page of what was imported.
        gc.collect()
        gc.freeze()
        with contextlib.closing(executor):
            executor.run(_interval())
    except ConfigError as error:
        log.error("executor: %s", error)
        return CONFIGURATION
    except OSError as error:
        log.error("executor: the system refuses what a message needs: %s", error)
        return TEMPORARY
    return OK


def read_list(path: Path) -> frozenset[str]:
    """Return the bundles that may run on this node, by the SHA-256 of their file.

    Parameters
    ----------
    path : Path
        One hash in hexadecimal a line, alone or as ``sha256sum`` prints it before the file's name; what follows a ``#``
        is a comment.

    Raises
    ------
    ConfigError
        When the file cannot be read, or has something else in it.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the list of bundles {path} cannot be read: {error}") from error
    hashes = set()
    for number, line in enumerate(lines, 1):
        if found := re.fullmatch("([0-9a-f]{64})(?: [ *].+)?", line):
            hashes.add(found[1])
        elif line:
            raise ConfigError(
                f"{path}, line {number}: {line[:80]!r} is not the SHA-256 of a bundle; take what "
                "sha256sum prints of the .fab file"
            )
    return frozenset(hashes)


def refusal(bundle: str, path: Path | None) -> str:
    """Return why ``bundle`` may not run by the list in ``path``, with the remedy; empty when it may, or without a list.

    The list is read again for every message: the last one that was good may be from before a bundle was struck off.
    """
    try:
        if path is None or bundle in read_list(path):
            return ""
    except ConfigError as error:
        return f"bundle {bundle} is not run: {error}"
    return f"bundle {bundle} is not on this node's list; if it is to run here, add its hash to {path}"


class Executor:
    """Takes the messages of a SuperNode one by one, each into a process of its own.

    Parameters
    ----------
    runtime : str
        Where they wait.
    tasks : NodeTasks
        How they are taken.
    allowed : Path or None
        The list of the bundles that may run; None for all.
    stop : int or None
        A file descriptor whose end of file ends the executor.
    """

    def __init__(self, runtime: str, tasks: NodeTasks, allowed: Path | None = None, stop: int | None = None) -> None:
        self._runtime, self._tasks, self._allowed, self._stop = runtime, tasks, allowed, stop
        self._zygotes: OrderedDict[str, Zygote] = OrderedDict()
        self._unfit: set[str] = set()
        self._reached = True
        self._next: NodeTask | None = None
        self._overtaken_since = 0.0

    def run(self, interval: float) -> None:
        """Look for a message every ``interval`` seconds, until told to stop."""
        watched = [] if self._stop is None else [self._stop]
        while not select.select(watched, [], [], interval)[0]:
            task, self._next = self._next or self._acquire(), None
            if task is not None and not self.handle(task):
                return

    def handle(self, task: NodeTask) -> bool:
        """Handle a message to its end; return False when the executor was told to stop meanwhile.

        The SuperNode hands out no other message before: that could be given the state from before this one. When it
        does, it has given this one up, as when the run ended before all of the message was there; its process would
        wait for the rest for ever, and every later message behind it (read in Flower's source, and measured).
        """
        bundle = task.bundle
        if reason := refusal(bundle, self._allowed):
            log.error("%s", reason)
            self._apart(partial(refuse_task, self._runtime, task.token, reason))
            return True
        result = self._zygote(bundle).handle(task.token, self._stop, self._overtaken, LOOK_SECONDS)
        if result is None:
            return False
        status, fit = result
        if not fit:
            self._unfit.add(bundle)
            self._zygotes.pop(bundle).close()
        if status not in _ANSWERED:
            log.error(
                "the process of a message for bundle %s %s; the server gets error 8 within a minute",
                bundle[:8],
                f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}",
            )
            self._apart(partial(abandon_task, self._runtime, task.token))
        return True

    def close(self) -> None:
        """End all processes, and the message that is being handled with them."""
        while self._zygotes:
            self._zygotes.popitem()[1].close()
        self._tasks.close()

    def _overtaken(self) -> bool:
        """Whether the SuperNode has handed out another message for so long that the one under way is given up."""
        if self._next is None:
            self._next, self._overtaken_since = self._acquire(), time.monotonic()
        # Not at once: after its reply a process still hands over what it remembers.
        given_up = self._next is not None and time.monotonic() - self._overtaken_since >= OVERTAKEN_SECONDS
        if given_up:
            log.warning("executor: the SuperNode abandoned the message under way; its process is ended")
        return given_up

    def _acquire(self) -> NodeTask | None:
        task, reached = None, True
        try:
            task = self._tasks.acquire()
        except ConnectionError as error:
            reached = False
            if self._reached:
                log.warning("executor: no answer from the SuperNode at %s (%s); trying again", self._runtime, error)
        if reached and not self._reached:
            log.info("executor: the SuperNode at %s answers again", self._runtime)
        self._reached = reached
        return task

    def _zygote(self, bundle: str) -> Zygote:
        if bundle in self._zygotes and not self._zygotes[bundle].alive:
            self._zygotes.pop(bundle).close()
        if bundle not in self._zygotes:
            while len(self._zygotes) >= BUNDLES:
                self._zygotes.popitem(last=False)[1].close()
            self._zygotes[bundle] = Zygote(self._runtime, bundle, keeps_app=bundle not in self._unfit)
        self._zygotes.move_to_end(bundle)
        return self._zygotes[bundle]

    def _apart(self, work: Callable[[], None]) -> None:
        """Talk to the SuperNode about a message in a process of its own, which Flower's code changes."""
        process = fork(work)
        try:
            process.join()
        finally:
            end(process)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: what is ended from here on is ended whole.
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(OK)


def _preload(name: str, *, asked: bool) -> None:
    """Import a module in this process; of the usual ones those that are installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        if asked:
            raise ConfigError(f"--preload {name}: {error}") from error
        log.info("executor: %s is not preloaded: %s", name, error)
        return
    try:
        require_one_thread(f"importing {name}")
    except ConfigError as error:
        raise ConfigError(f"{error}; leave it out of --preload") from error


def _secret(path: Path | None) -> bytes | None:
    try:
        secret = None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--secret-file: {error}") from error
    if secret == b"":
        raise ConfigError(f"--secret-file {path} is empty; give it and the SuperNode the same secret")
    return secret


def _interval() -> float:
    text = os.environ.get(POLL, "1")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 60.0:
        raise ConfigError(f"{POLL} is {text!r}; expected 0.01 to 60 seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedcomp.clients.edge.executor", description=__doc__)
    parser.add_argument("--runtime", required=True, metavar="HOST:PORT", help="runtime API of the SuperNode")
    parser.add_argument("--secret-file", type=Path, metavar="F", help="the SuperNode's --superexec-auth-secret-file")
    parser.add_argument("--allow", type=Path, metavar="F", help="SHA-256 of the bundles that may run, one a line")
    parser.add_argument("--preload", metavar="M,M", help=f"modules imported once (default: {','.join(PRELOAD)})")
    parser.add_argument("--until-closed", type=int, metavar="FD", help="leave when this pipe is closed")
    return parser


def _one_thread_for_numpy() -> None:
    """Start this program again with a numpy that has no threads; it may be imported already."""
    if os.environ.get(_THREADS) != "1":
        os.environ[_THREADS] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "fedcomp.clients.edge.executor", *sys.argv[1:]])


if __name__ == "__main__":
    _one_thread_for_numpy()
    sys.exit(main())
