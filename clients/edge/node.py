"""``fedcomp node``: what a node consists of, and its one entry point."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fedcomp.clients.edge import own_user
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.launch import environment, supernode, with_folders
from fedcomp.clients.edge.options import NodeOptions, parse
from fedcomp.clients.edge.preflight import port_is_free, preflight
from fedcomp.clients.edge.supervisor import CONFIGURATION, SUPERNODE, Service, Supervisor
from fedcomp.errors import ConfigError

YIELDS: Final = 5
"""By how much training gives way to the SuperNode, which on a busy processor would send its heartbeat too late: Flower
takes a node as gone after a minute without one."""

_QUESTION: Final = """
import json, sys
from pathlib import Path
from fedcomp.clients.edge import executor
port, secret, allow, preload = json.loads(sys.argv[1])
words = executor.command(
    f"127.0.0.1:{port}", secret_file=Path(secret), allow=allow and Path(allow), preload=preload, until_closed=0
)
print(json.dumps([executor.unsupported(), words]))
"""
"""Asked in a process of its own: the answer needs Flower, which would stay in the memory of the supervisor."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node until it is told to end.

    Returns
    -------
    int
        0 after SIGTERM or SIGINT; 75 after ``--give-up`` seconds without the SuperLink; 78 when the configuration
        cannot work. A wrong command line leaves by ``SystemExit(2)``.
    """
    options = parse(argv)
    log = EventLog(json=options.log_format == "json")
    if options.preflight:
        return preflight(options, log)
    try:
        options = with_folders(options)
        with _secret_of(options) as secret:
            return Supervisor(options, services(options, secret, log), log).run()
    except ConfigError as error:
        log("configuration", str(error), level="error")
        return CONFIGURATION


@contextlib.contextmanager
def _secret_of(options: NodeOptions) -> Iterator[Path]:
    """Yield where the secret of this start goes: what a killed node leaves in its home, its next start replaces."""
    if options.home is not None:
        yield options.home / f"secret-{options.port}"
        return
    with tempfile.TemporaryDirectory(prefix="fedcomp-node-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "secret"


def services(options: NodeOptions, secret: Path, log: EventLog) -> list[Service]:
    """Return the processes of a node in the order they are started, and say in the log what was chosen.

    Raises
    ------
    ConfigError
        When a port is taken, a program is missing, or ``--allow-bundles`` could not be kept.
    """
    if not port_is_free("127.0.0.1", options.port):
        raise ConfigError(f"port {options.port} is taken; choose another with --port, one per node and machine")
    if options.link is not None:
        link = options.link
        log(
            "link",
            f"{link.rate / 1000:g} kbit/s: replies in pieces of {link.piece_bytes} bytes, {link.at_once} at once; "
            f"the largest that passes within 180 s has {link.reply_bytes} bytes",
        )
    if options.state_dir is None:
        log(
            "state",
            "no --state-dir: what clients remember, such as residuals of compression, is lost when the node restarts",
        )
    env = environment(options)
    if options.peer is None:
        return _workers(options, env, None, secret, log)
    peer = options.peer
    words = [sys.executable, "-m", "fedcomp.coding.listener", "--listen", peer.listen, "--store", str(peer.store)]
    words += [
        "--store-bytes",
        str(peer.store_bytes),
        "--until-closed",
        "0",
        *(["--temporary"] if peer.temporary else []),
        *([] if options.peer_keys is None else ["--key", str(options.key), "--peer-keys", str(options.peer_keys)]),
    ]
    listener = Service(
        "listener",
        words,
        env,
        ready="^listening for parcels on ",
        fatal={1: f"the listener on {peer.listen} did not start; see its message above"},
        # It leaves when its pipe is closed, and removes a store that is not to stay; a signal could interrupt that.
        orphaned=0,
    )
    return [listener, *_workers(options, env, listener, secret, log)]


def _workers(
    options: NodeOptions, env: dict[str, str], after: Service | None, secret: Path, log: EventLog
) -> list[Service]:
    words, reason = _executor(options, env, secret)
    if reason:
        if options.allow_bundles is not None:
            raise ConfigError(f"--allow-bundles needs the executor of this project: {reason}")
        log("executor", f"messages are handled by Flower's own, a new process each: {reason}", level="warning")
        return [Service(SUPERNODE, _for_this_user(supernode(options), log), env, after=after)]
    # The port is open to every user of this machine; whoever has no secret gets no task. That of a former start has no
    # reader any more: its port was found free.
    secret.unlink(missing_ok=True)
    with open(os.open(secret, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    command = supernode(options, "--isolation", "process", "--superexec-auth-secret-file", str(secret))
    fatal = {CONFIGURATION: "the executor cannot work as it was started; see its message above"}
    return [
        Service(SUPERNODE, command, env, after=after),
        Service("executor", words, env, after=after, fatal=fatal, nice=YIELDS),
    ]


def _for_this_user(command: list[str], log: EventLog) -> list[str]:
    """Return the command line of a SuperNode whose port serves this user alone, where the kernel says who connects:
    Flower's own executor has no secret there, and starts its apps with their tokens in the list of processes."""
    try:
        own_user.require_owners()
    except OSError as error:
        log("port", f"every user of this machine can take this node's messages at its port: {error}", level="warning")
        return command
    return own_user.guarded(command)


def _executor(options: NodeOptions, env: dict[str, str], secret: Path) -> tuple[list[str], str]:
    """Return the command line of the executor, and in one line why it cannot be used here, or nothing."""
    allow = None if options.allow_bundles is None else str(options.allow_bundles)
    asked = json.dumps([options.port, str(secret), allow, options.preload])
    done = subprocess.run(
        [sys.executable, "-c", _QUESTION, asked],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    with contextlib.suppress(ValueError, IndexError):
        reason, words = json.loads(done.stdout.splitlines()[-1])
        return words, reason
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return [], f"its module cannot be used ({said[-1]})"
