"""``fedcomp link``: a SuperLink that remote nodes can reach but not control.

One process that supervises others, as a node does: the SuperLink, on loopback; what registers the keys of the nodes;
and the SuperExec, which starts the server app of a run. The proxy in front of them is a thread of it. What ends is
started again by itself: from its database the SuperLink knows its nodes and runs, and a server app survives the seconds
between.
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
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedcomp import params
from fedcomp.clients import edge
from fedcomp.clients.edge import own_user
from fedcomp.clients.edge.events import EventLog, plain
from fedcomp.clients.edge.node import flower_environment
from fedcomp.clients.edge.supervisor import CONFIGURATION, TEMPORARY, Service, Supervisor
from fedcomp.coding.transport import parse_host_port
from fedcomp.errors import ConfigError
from fedcomp.experiments.commands import complain
from fedcomp.experiments.security.certificates import Folder, private_folder, read, write_new
from fedcomp.experiments.security.proxy import Limits, Proxy, contexts
from fedcomp.experiments.security.status import Rounds, names_of, write_prometheus
from fedcomp.logs import ROUNDS_VARIABLE

CONNECTION: Final = "link"
"""The name under which Flower's command line knows this SuperLink."""
STATUS_SECONDS: Final = 5.0
INSECURE: Final = """\
--insecure: no TLS and no keys. Anybody who reaches {listen} can join as a node and get models and data of runs.
Anybody on the network path can read and change everything. Use it only in your own network."""


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
    log : EventLog
    metrics : Path, optional
        Counters in Prometheus' text format.
    """

    folder: Folder
    listen: tuple[str, int]
    port: int
    database: Path
    insecure: bool
    limits: Limits
    log: EventLog = field(default_factory=EventLog)
    metrics: Path | None = None

    def say(self, line: str) -> None:
        """Write one line of the log."""
        self.log("link", line)

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

    def registration(self) -> list[str]:
        """Return the command line of what registers every public key of the folder that is not known yet."""
        return [sys.executable, "-m", "fedcomp.experiments.security.registration", str(self.folder.path), CONNECTION]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the process called ``name``: offline, with a Flower home of its own."""
        private_folder(self.folder.home(name))
        return {**flower_environment(self.folder.home(name)), ROUNDS_VARIABLE: str(self.folder.rounds)}

    def service(self, name: str, command: list[str], **more: Any) -> Service:
        """Return a process whose Flower home is called ``name``, and which ends when this one is gone."""
        home = self.folder.home(more.pop("home", name))
        env = self.environment(home.name)
        return Service(name, command, env, orphaned=signal.SIGTERM, cwd=home, **more)

    def services(self) -> list[Service]:
        """Return what is kept running, in the order in which it is started."""
        found = [self.service("superlink", self.superlink(), port=self.port, needed=True)]
        if not self.insecure:
            more = {"after": found[0], "once": True, "needed": True}
            found.append(self.service("register", self.registration(), home="cli", **more))
        return [*found, self.service("superexec", self.superexec(), after=found[-1])]


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
            f"this kernel does not say which user opened a connection ({error}), so every local user could control "
            "the SuperLink; use a machine with Linux's sock_diag"
        ) from error
    tls, trust = (None, None) if options.insecure else contexts(folder.server, folder.server_key, folder.ca)
    if tls is not None:
        _warn_of_end(options)
    private_folder(folder.path)
    private_folder(folder.kept)
    if folder.secret.exists():
        _require_secret(folder.secret)
    for option, file in (("--database", options.database), ("--metrics", options.metrics)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option} {file}: {file.parent} is not a folder")
    # Before anything is written that belongs to a SuperLink which runs already. Both at a time: two that overlap fail.
    with contextlib.closing(_bound("127.0.0.1", options.port, "--port")):
        listener = _bound(*options.listen, "--listen")
    _lock(folder.kept / "lock", f"another fedcomp link runs from {folder.path}; a folder has one at a time")
    database = options.database.resolve()
    _lock(
        database.with_name(f"{database.name}.lock"),
        f"--database {options.database}: another fedcomp link uses it; a database has one at a time",
    )
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
        raise ConfigError(
            f"{path} has {size} bytes of 64: it was not completely written; remove it, and a new one is made"
        )


def _warn_of_end(options: LinkOptions) -> None:
    folder = options.folder
    ends = read(folder.server).not_valid_after_utc
    days = (ends.timestamp() - time.time()) / 86400
    if days <= 0:
        raise ConfigError(f"{folder.server} ended on {ends:%Y-%m-%d}; fedcomp certificates DIR --renew issues another")
    if days < 30:
        options.say(f"the server certificate ends on {ends:%Y-%m-%d}: fedcomp certificates {folder.path} --renew")


def _lock(path: Path, taken: str) -> None:
    """Hold a lock until this process ends; raise :class:`ConfigError` with the text ``taken`` where another has it."""
    try:
        held = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(taken) from None


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


class LinkSupervisor(Supervisor):
    """Runs the processes of a link, and with the SuperExec the proxy.

    Parameters
    ----------
    options : LinkOptions
    listener : socket.socket
        Where nodes connect.
    proxy : Proxy
    """

    def __init__(self, options: LinkOptions, listener: socket.socket, proxy: Proxy) -> None:
        super().__init__(options.services(), options.log)
        self._options, self._listener, self._proxy = options, listener, proxy
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._front, daemon=True)

    def started(self, service: Service) -> None:
        """Let the nodes in when the SuperLink knows their keys and the SuperExec is there."""
        if service.name == "superexec" and self._thread.ident is None:
            self._work = self._loop.create_task(self._serve())
            self._thread.start()
            (host, port), home = self._options.listen, self._options.folder.home("cli")
            self._options.say(f"ready: nodes connect to {host}:{port}; operators use FLWR_HOME={home} flwr ...")

    def look(self, now: float) -> None:
        """See that nodes are still let in."""
        if self._thread.ident is not None and not self._thread.is_alive():
            self._give_up("proxy", "the proxy ended; see above", TEMPORARY)

    def stopping(self) -> None:
        """Let no node in any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join()
        self._listener.close()

    def _front(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._proxy.serve(self._listener))
            group.create_task(_show(self._options, self._proxy))


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
            if options.metrics is not None:
                write_prometheus(options.metrics, proxy.callers, rounds.ended, proxy.connections)
        except OSError as error:
            options.say(f"{error.filename or options.folder.status}: {error.strerror}")
        await asyncio.sleep(STATUS_SECONDS)


def register(options: LinkOptions) -> int:
    """Tell the SuperLink that runs of keys that it does not know; return the exit code."""
    out = subprocess.PIPE if options.log.json else None
    done = subprocess.run(
        options.registration(), env=options.environment("cli"), stdout=out, stderr=out, text=True, check=False
    )
    for line in filter(None, map(plain, f"{done.stdout or ''}{done.stderr or ''}".splitlines())):
        options.log.output("register", line)
    return done.returncode


def main(arguments: Sequence[str] | None = None, program: str = "fedcomp link") -> int:
    """Run the command; return its exit code."""
    parser = _parser(program)
    args = parser.parse_args(arguments)
    folder = Folder(args.folder.absolute())
    try:
        options = LinkOptions(
            folder=folder,
            listen=_address(args.listen),
            port=params.integer("--port", args.port, low=1, high=65_535),
            database=(args.database or folder.kept / "state.db").absolute(),
            insecure=args.insecure,
            limits=Limits(per_address=params.integer("--per-address", args.per_address, low=1)),
            log=EventLog(json=args.log_format == "json"),
            metrics=args.metrics and args.metrics.absolute(),
        )
        if args.register:
            if not (folder.home("cli") / "config.toml").exists():
                raise ConfigError(f"no SuperLink was started from {folder.path}: fedcomp link {args.folder}")
            return register(options)
        # Of the database and of all that the children write.
        os.umask(0o077)
        listener, proxy = prepare(options)
        _raise_descriptors()
        if options.insecure:
            options.say(INSECURE.format(listen=args.listen))
        return LinkSupervisor(options, listener, proxy).run()
    except ConfigError as error:
        return complain(str(error), CONFIGURATION)


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
        prog=program, description="Start a SuperLink that remote nodes can reach and that only this user controls."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder that `fedcomp certificates` made")
    parser.add_argument(
        "--listen", default="0.0.0.0:9092", metavar="HOST:PORT", help="where nodes connect (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="P",
        help="the SuperLink's own port, on loopback (default: %(default)s)",
    )
    parser.add_argument(
        "--database", type=Path, metavar="F", help="database of nodes and runs (default: DIR/link/state.db)"
    )
    parser.add_argument(
        "--per-address",
        type=int,
        default=Limits.per_address,
        metavar="N",
        help="most connections of one address; a node has about four (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of log lines (default: %(default)s)"
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        metavar="F.prom",
        help="write counters in Prometheus' text format into this file, every five seconds",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--insecure", action="store_true", help="no TLS and no keys; only for your own network")
    what.add_argument("--register", action="store_true", help="register new keys with the running SuperLink, then exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
