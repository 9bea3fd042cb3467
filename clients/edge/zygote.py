"""A fork server for one app bundle: imports the app once, and forks for every message.

What a message imports beside, in a handler, is imported here as well, for those that follow.

Modules that are imported in the executor serve every bundle. The app's own must not be among them: the next bundle may
have other code under the same names. So every bundle gets a process between the executor and its messages.

What is forked ends with its parent, by the kernel: a killed executor leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from fedcomp.clients.edge.processes import end_with
from fedcomp.errors import ConfigError
from fedcomp.flower._private import ClientApp, load_bundle, run_task, unpack_bundle
from fedcomp.logs import log

STOP_SECONDS: Final = 5.0
_FORK: Final = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


class Unforkable(ConfigError):
    """This process has threads beside the main one: a fork would never release the locks that they hold."""


def require_one_thread(what: str) -> None:
    """Raise :class:`Unforkable` when this process has more than one thread; ``what`` is what may have started them."""
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise Unforkable(f"{what} started {count - 1} threads, and a process with threads cannot be forked safely")


def fork(work: Callable[[], None]) -> BaseProcess:
    """Run ``work`` in a fork of this process, which ends when this one does, however it does.

    Raises
    ------
    Unforkable
        When this process has threads.
    OSError
        When the system has no room for another process.
    """
    require_one_thread("the executor")
    assert _FORK is not None
    process = _FORK.Process(target=_run, args=(work, os.getpid()))
    process.start()
    return process


def _run(work: Callable[[], None], parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C reaches all processes of a terminal; the executor decides what becomes of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The warm process of a bundle as well: what an app draws while it is imported is not what another bundle draws.
    reseed()
    work()


def end(process: BaseProcess) -> None:
    """End a process and wait for it: first as it is asked to, then in any case."""
    process.terminate()
    process.join(STOP_SECONDS)
    process.kill()
    process.join()


@contextlib.contextmanager
def ending(process: BaseProcess) -> Iterator[int]:
    """Yield a file descriptor that is readable once a process has ended."""
    try:
        watched = os.pidfd_open(process.pid or 0)
    except OSError:
        # Linux before 5.3. This one is also held by what the process has forked itself.
        watched = -1
    try:
        yield process.sentinel if watched < 0 else watched
    finally:
        if watched >= 0:
            os.close(watched)


class Zygote:
    """The executor's side of a bundle's warm process.

    Parameters
    ----------
    runtime : str
        Where messages wait.
    bundle : str
        SHA-256 of the bundle.
    keeps_app : bool
        Import the app here. Otherwise every message imports it, which works for all apps.
    """

    def __init__(self, runtime: str, bundle: str, *, keeps_app: bool) -> None:
        self._connection, there = multiprocessing.Pipe()
        self._process = fork(partial(_live, there, runtime, bundle, keeps_app))
        there.close()

    @property
    def alive(self) -> bool:
        """Whether the process is there: an idle one may have been killed for its memory."""
        return self._process.is_alive()

    def handle(
        self, token: str, stop: int | None, overtaken: Callable[[], bool], every: float
    ) -> tuple[int, bool] | None:
        """Have a message handled in a process of its own, and wait until that has ended.

        Parameters
        ----------
        token : str
            Of the message.
        stop : int or None
            A file descriptor that becomes readable when the executor is to end.
        overtaken : callable
            Asked every ``every`` seconds whether the message is of no use any more: its process is ended then, with
            this one.

        Returns
        -------
        (int, bool) or None
            The exit status, negative for a signal, and whether the app can be kept; None when it is to end.
        """
        self._connection.send_bytes(token.encode())
        with ending(self._process) as ended:
            watched: list[Connection | int] = [self._connection, ended, *([] if stop is None else [stop])]
            while not (ready := wait(watched, every)):
                if overtaken():
                    self.close()
                    return -signal.SIGKILL, True
        if self._connection in ready and (answer := _received(self._connection)) is not None:
            status, fit = json.loads(answer)
            return int(status), bool(fit)
        if stop in ready:
            return None
        # It has died with the message.
        self._process.join()
        return self._process.exitcode or -signal.SIGKILL, False

    def close(self) -> None:
        """End the process, and with it the message that it handles."""
        self._connection.close()
        end(self._process)


def _live(orders: Connection, runtime: str, bundle: str, keeps_app: bool) -> None:
    """Fork for every token that comes; return when the other end is closed."""
    app: ClientApp | None = None
    child: BaseProcess | None = None

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        # Without a word to the SuperNode: it then answers with an error itself, when the token has expired.
        if child is not None:
            child.kill()
            child.join()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    while True:
        try:
            token = orders.recv_bytes().decode()
        except EOFError:
            return
        learnt, tell = multiprocessing.Pipe(duplex=False)
        child = fork(partial(_handle, runtime, token, bundle, app, tell))
        tell.close()
        with ending(child) as ended:
            # First what it says, for which a full pipe would have it wait.
            report = _received(learnt) if learnt in wait([learnt, ended]) else None
        child.join()
        learnt.close()
        status = child.exitcode
        child, fit = None, True
        if keeps_app and status == 0 and report is not None:
            try:
                app = _keep(app, *json.loads(report))
            except Exception as error:
                # The app itself is well; it is what it does while it is imported that cannot be shared.
                log.info("bundle %s is imported for every message: %s", bundle[:8], error)
                fit = False
        orders.send_bytes(json.dumps([status, fit]).encode())


def _received(connection: Connection) -> bytes | None:
    """Return what came, or None from a process that died before it said anything."""
    try:
        return connection.recv_bytes()
    except EOFError:
        return None


def _handle(runtime: str, token: str, bundle: str, app: ClientApp | None, tell: Connection) -> None:
    """Handle one message; the process ends with it."""
    sys.argv = ["flwr-clientapp"]
    known, folder = set(sys.modules), Path()
    ids: Sequence[str] = ()

    def unpack(content: bytes) -> Path:
        nonlocal folder
        found = hashlib.sha256(content).hexdigest()
        if found != bundle:
            raise ConfigError(f"the SuperLink sent bundle {found} under the hash {bundle}; it is not run")
        # Nobody looks into the folder once the app is here.
        if app is None:
            folder = unpack_bundle(content)
        return folder

    def load(*named: str) -> ClientApp:
        nonlocal ids
        ids = named
        return _load(folder, ids) if app is None else app

    try:
        run_task(runtime, token, unpack, load)
    finally:
        # In the order of their imports.
        imported = [name for name in list(sys.modules) if name not in known]
        tell.send_bytes(json.dumps([str(folder), ids, imported]).encode())


def _keep(app: ClientApp | None, folder: str, ids: Sequence[str], imported: Sequence[str]) -> ClientApp:
    """Return the app, imported here, with all that a message has imported: the next ones will need it as well."""
    if app is not None and not imported:
        return app
    kept = _load(Path(folder), ids) if app is None else app
    for name in imported:
        # Some modules make others that cannot be imported by their names.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    require_one_thread("importing the app")
    gc.collect()
    gc.freeze()
    return kept


def _load(folder: Path, ids: Sequence[str]) -> ClientApp:
    """Import the app of an unpacked bundle: its own modules, also where the executor has others of their names."""
    forget(folder)
    return load_bundle(*ids)


def forget(folder: Path) -> None:
    """Forget what was imported under a name that ``folder`` has a module for, so that the next import finds that."""
    own = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


def reseed() -> None:
    """Give the global generators of numpy and torch new states, as a new process has: from the operating system.

    Without it every message would draw what its siblings draw: noise, dropout, order of the data. torch's are those of
    the processor and of every CUDA device. Python's own generator has a new state after every fork. Generators that an
    app or another library made while it was imported are not known here, and repeat.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
    # Only where something has imported it: that takes longer than most messages.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
