"""A SuperLink that nodes elsewhere can reach, and nobody else can command: ``fedcomp link``.

One process that supervises two others: the SuperLink, on loopback, and its SuperExec, which starts the server app of a
run. The proxy in front of them (:mod:`fedcomp.experiments.security.proxy`) runs here. What ends is started again by
itself: from its database the SuperLink knows its nodes and runs, and a server app survives the seconds between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedcomp.clients import edge
from fedcomp.clients.edge import own_user
from fedcomp.clients.edge.events import EventLog, plain
from fedcomp.coding.transport import parse_host_port
from fedcomp.errors import ConfigError
from fedcomp.experiments.commands import OK, complain
from fedcomp.experiments.engines.processes import Child, DeploymentError
from fedcomp.experiments.security.certificates import Folder, private_folder, read, write_new
from fedcomp.experiments.security.proxy import Limits, Proxy, contexts
from fedcomp.experiments.security.registration import TEMPORARY
from fedcomp.experiments.security.status import Rounds, names_of
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT, without_proxy
from fedcomp.logs import ROUNDS_VARIABLE

CONFIGURATION: Final = 78
"""Exit code of what a restart does not mend, EX_CONFIG of sysexits.h."""
CONNECTION: Final = "link"
"""The name under which Flower's command line knows this SuperLink."""
START_SECONDS: Final = 120.0
SHORTEST, LONGEST = 1.0, 30.0
"""Seconds between the end of a process and its next start: doubled each time, and back when it ran for a minute."""
STATUS_SECONDS: Final = 5.0
INSECURE: Final = """\
--insecure: no TLS and no keys. Whoever reaches {listen} can join as a node and get models and data of runs, and whoever
is on the way reads and changes everything. For a network of your own only."""


@dataclass(frozen=True)
class LinkOptions:
    """What ``fedcomp link`` was asked for.

    Parameters
    ----------
    folder : Folder
        Certificates and keys; below its ``link``, what the SuperLink keeps.
    listen : tuple of str and int
        Where nodes connect.
    port : int
        Where the SuperLink listens, on loopback.
    database : Path
        The SuperLink's memory: keys, nodes, runs, messages.
    insecure : bool
        Neither TLS nor keys.
    limits : Limits
    json : bool
        Every line of the log, those of the processes among them, is an object.
    """

    folder: Folder
    listen: tuple[str, int]
    port: int
    database: Path
    insecure: bool
    limits: Limits
    json: bool = False

    def say(self, line: str) -> None:
        """Print one line at once, or the object of a line."""
        if self.json:
            EventLog(json=True)("link", line)
        else:
            print(line, flush=True)

    @property
    def address(self) -> str:
        """Where the SuperLink is, for what runs on this machine."""
        return f"127.0.0.1:{self.port}"

    def superlink(self) -> list[str]:
        """Return the command line of the SuperLink."""
        folder = self.folder
        command = own_user.guarded([edge.program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)])
        command += ["--database", str(self.database), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(folder.secret)]
        if self.insecure:
            return [*command, "--insecure"]
        command += ["--ssl-ca-certfile", str(folder.ca), "--ssl-certfile", str(folder.server)]
        return [*command, "--ssl-keyfile", str(folder.server_key), "--enable-supernode-auth"]

    def superexec(self) -> list[str]:
        """Return the command line of the SuperExec."""
        command = [edge.program("flower-superexec"), "--runtime-api-address", self.address]
        command += ["--insecure"] if self.insecure else ["--root-certificates", str(self.folder.ca)]
        return [*command, "--superexec-auth-secret-file", str(self.folder.secret)]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the process called ``name``: offline, with a Flower home of its own."""
        # Flower's helpers start each other by name; they must find the ones of this very environment.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        home = self.folder.home(name)
        private_folder(home)
        own = {"PATH": path, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        own |= {ROUNDS_VARIABLE: str(self.folder.rounds)}
        return {**OFFLINE_ENVIRONMENT, **os.environ, **without_proxy(os.environ), **own}

    def start(self, title: str, name: str, command: list[str]) -> Child:
        """Start a process whose output is ours."""
        if not self.json:
            return Child(title, command, env=self.environment(name), log=None, cwd=self.folder.home(name))
        mine, theirs = os.pipe()
        try:
            pipe = Path(f"/proc/self/fd/{theirs}")
            child = Child(title, command, env=self.environment(name), log=pipe, cwd=self.folder.home(name))
        finally:
            os.close(theirs)
        # What was written is here and not in a file.
        child.log = None
        threading.Thread(target=_pass_on, args=(name, mine), daemon=True).start()
        return child


def _pass_on(name: str, pipe: int) -> None:
    """Print as objects what a process and those below it write, until the last of them has ended."""
    log = EventLog(json=True)
    with os.fdopen(pipe, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if text := plain(line):
                log.output(name, text)


def prepare(options: LinkOptions) -> tuple[socket.socket, Proxy]:
    """Check files and ports and write what is kept; return the socket for nodes and what answers there.

    Raises
    ------
    ConfigError
        When a port is in use, a certificate is missing, damaged or past its end, the secret is damaged, or this kernel
        does not say which user opened a connection.
    """
    folder = options.folder
    try:
        own_user.require_owners()
    except OSError as error:
        raise ConfigError(
            f"this kernel does not say which user opened a connection ({error}), and without that every local user "
            "could give orders; use a machine with Linux's sock_diag"
        ) from error
    tls, trust = (None, None) if options.insecure else contexts(folder.server, folder.server_key, folder.ca)
    if tls is not None:
        _warn_of_end(options)
    private_folder(folder.path)
    private_folder(folder.kept)
    if folder.secret.exists():
        _require_secret(folder.secret)
    # Before anything is written that belongs to a SuperLink which runs already.
    _bound("127.0.0.1", options.port, "--port").close()
    listener = _bound(*options.listen, "--listen")
    _lock(folder)
    if not folder.secret.exists():
        write_new(folder.secret, secrets.token_hex(32).encode(), 0o600)
    private_folder(folder.home("cli"))
    trusted = "insecure = true" if options.insecure else f"root-certificates = {json.dumps(str(folder.ca))}"
    config = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    config += f'address = "{options.address}"\n{trusted}\n'
    (folder.home("cli") / "config.toml").write_text(config, encoding="utf-8")
    return listener, Proxy(options.port, tls, trust, options.limits, options.say)


def _require_secret(path: Path) -> None:
    # Flower's processes would end, and be started again, for ever.
    try:
        size = len(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if size < 64:
        raise ConfigError(f"{path} has {size} bytes of 64: it was not written whole; remove it, and another is made")


def _warn_of_end(options: LinkOptions) -> None:
    folder = options.folder
    ends = read(folder.server).not_valid_after_utc
    days = (ends.timestamp() - time.time()) / 86400
    if days <= 0:
        raise ConfigError(f"{folder.server} ended on {ends:%Y-%m-%d}; fedcomp certificates DIR --renew issues another")
    if days < 30:
        options.say(f"the server certificate ends on {ends:%Y-%m-%d}: fedcomp certificates {folder.path} --renew")


def _lock(folder: Folder) -> None:
    """Hold a lock until this process ends: a database has one SuperLink."""
    held = os.open(folder.kept / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"another fedcomp link runs from {folder.path}; a folder has one at a time") from None


def _bound(host: str, port: int, option: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{option} {host}:{port} cannot be used: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Two that only bind would not notice each other.
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ConfigError(f"{option} {host}:{port} cannot be used: {error}") from error
    return bound


async def run(options: LinkOptions, listener: socket.socket, proxy: Proxy) -> int:
    """Start all, keep all running, and stop all on SIGTERM or SIGINT; return the exit code."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    children: list[Child] = []
    work = asyncio.create_task(_keep(options, listener, proxy, children))
    stopping = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        return OK
    finally:
        for task in (work, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeploymentError):
            await work
        # In this order a run's server app can still say that it was stopped.
        for child in reversed(children):
            child.terminate()
        for child in reversed(children):
            child.stop()
        options.say("stopped")


async def _keep(options: LinkOptions, listener: socket.socket, proxy: Proxy, children: list[Child]) -> None:
    """Start the SuperLink, register the keys, start the rest; start again what ends."""
    children.append(options.start("the SuperLink", "superlink", options.superlink()))
    await _answers(options.port, children[0])
    if not options.insecure:
        await register(options)
    children.append(options.start("the SuperExec", "superexec", options.superexec()))
    host, port = options.listen
    options.say(f"ready: nodes connect to {host}:{port}; operators use FLWR_HOME={options.folder.home('cli')} flwr ...")
    commands = (options.superlink, "superlink"), (options.superexec, "superexec")
    async with asyncio.TaskGroup() as group:
        group.create_task(proxy.serve(listener))
        group.create_task(_show(options, proxy))
        for place, (command, name) in enumerate(commands):
            group.create_task(_again(options, children, place, name, command()))


async def _show(options: LinkOptions, proxy: Proxy) -> None:
    """Say which rounds have ended, and write down for ``fedcomp status`` what was seen, every five seconds."""
    rounds = Rounds(options.folder.rounds)
    while True:
        # Anew: keys may have been added while this runs.
        proxy.callers.names = names_of(options.folder)
        try:
            for line in rounds.new():
                options.say(line)
            proxy.callers.write(options.folder.status, rounds=rounds.last)
        except OSError as error:
            options.say(f"{error.filename or options.folder.status}: {error.strerror}")
        await asyncio.sleep(STATUS_SECONDS)


async def _again(options: LinkOptions, children: list[Child], place: int, name: str, command: list[str]) -> None:
    loop = asyncio.get_running_loop()
    wait, started = SHORTEST, loop.time()
    while True:
        await asyncio.sleep(0.5)
        child = children[place]
        if child.returncode is None:
            continue
        wait = SHORTEST if loop.time() - started > 60.0 else min(2 * wait, LONGEST)
        pause = wait * (0.5 + secrets.randbelow(1000) / 2000)
        options.say(f"{child.name} ended with status {child.returncode}; it is started again in {pause:.1f} s")
        await asyncio.sleep(pause)
        started = loop.time()
        children[place] = options.start(child.name, name, command)


async def _answers(port: int, child: Child) -> None:
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        child.require_running()
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        if asyncio.get_running_loop().time() > deadline:
            raise DeploymentError(f"{child.name} did not open port {port} within {START_SECONDS:.0f} s")
        await asyncio.sleep(0.1)


async def register(options: LinkOptions) -> None:
    """Register every public key of the folder; those that are known stay as they are.

    Raises
    ------
    DeploymentError
        When the SuperLink refuses one.
    """
    module = "fedcomp.experiments.security.registration"
    command = [sys.executable, "-m", module, str(options.folder.path), CONNECTION]
    out = asyncio.subprocess.PIPE if options.json else None
    process = await asyncio.create_subprocess_exec(*command, env=options.environment("cli"), stdout=out, stderr=out)
    try:
        printed = b"".join(part or b"" for part in await process.communicate())
        for line in filter(None, map(plain, printed.decode(errors="replace").splitlines())):
            EventLog(json=True).output("register", line)
        status = process.returncode
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if status != OK:
        raise DeploymentError("the keys of the nodes were not registered; see the line above")


def main(arguments: Sequence[str] | None = None, program: str = "fedcomp link") -> int:
    """Run the command; return its exit code."""
    parser = _parser(program)
    args = parser.parse_args(arguments)
    folder = Folder(args.folder.absolute())
    try:
        options = LinkOptions(
            folder=folder,
            listen=_address(args.listen),
            port=args.port,
            database=(args.database or folder.kept / "state.db").absolute(),
            insecure=args.insecure,
            limits=Limits(per_address=args.per_address),
            json=args.log_format == "json",
        )
        if args.register:
            if not (folder.home("cli") / "config.toml").exists():
                raise ConfigError(f"no SuperLink was started from {folder.path}: fedcomp link {args.folder}")
            asyncio.run(register(options))
            return OK
        # Of the database and of all that the children write.
        os.umask(0o077)
        listener, proxy = prepare(options)
        _raise_descriptors()
        if options.insecure:
            options.say(INSECURE.format(listen=args.listen))
        return asyncio.run(run(options, listener, proxy))
    except ConfigError as error:
        return complain(str(error), CONFIGURATION)
    except DeploymentError as error:
        return complain(str(error), TEMPORARY)


def _address(text: str) -> tuple[str, int]:
    host, port = parse_host_port(text)
    if not port:
        raise ConfigError(f"--listen {text}: nodes need a port that does not change")
    return host, port


def _raise_descriptors() -> None:
    """Allow as many open files as this user may have: a connection of a node takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Start a SuperLink that nodes elsewhere can reach, and nobody else can command."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder that `fedcomp certificates` made")
    parser.add_argument(
        "--listen", default="0.0.0.0:9092", metavar="HOST:PORT", help="where nodes connect (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="P", help="the SuperLink's own, on loopback (default: %(default)s)"
    )
    parser.add_argument(
        "--database", type=Path, metavar="F", help="what it knows of nodes and runs (default: DIR/link/state.db)"
    )
    parser.add_argument(
        "--per-address",
        type=int,
        default=Limits.per_address,
        metavar="N",
        help="most connections of one address; a node has about four (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="how lines are written (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--insecure", action="store_true", help="no TLS and no keys; for a network of your own only")
    what.add_argument("--register", action="store_true", help="tell the SuperLink that runs of new keys; then end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
