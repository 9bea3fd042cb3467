"""``fedcomp node``: the parts of a node, how its processes are started, and its entry point."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedcomp.clients.edge import node_config, own_user
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.options import NodeOptions, parse
from fedcomp.clients.edge.preflight import port_is_free, preflight
from fedcomp.clients.edge.supervisor import CONFIGURATION, SUPERNODE, NodeSupervisor, Service
from fedcomp.errors import ConfigError
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT, without_proxy

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
    with contextlib.ExitStack() as ending:
        try:
            options = with_folders(options)
            if options.temporary_store and options.peer_store is not None:
                # The listener removes it itself, unless it had to be killed.
                ending.callback(shutil.rmtree, options.peer_store, ignore_errors=True)
            if options.home is None:
                folder = tempfile.TemporaryDirectory(prefix="fedcomp-node-", ignore_cleanup_errors=True)
                secret = Path(ending.enter_context(folder)) / "secret"
            else:
                # What a killed node leaves here, its next start replaces.
                secret = options.home / f"secret-{options.port}"
            return NodeSupervisor(options, services(options, secret, log), log).run()
        except ConfigError as error:
            log("configuration", str(error), level="error")
            return CONFIGURATION


def prepare(argv: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a SuperNode and its environment, for whoever supervises it; starts nothing.

    Raises
    ------
    SystemExit
        With status 2 and a message that says what to change, when the arguments cannot work.
    ConfigError
        When there is no SuperNode, or a folder cannot be made.
    """
    options = with_folders(parse(argv))
    return supernode(options), environment(options)


def with_folders(options: NodeOptions) -> NodeOptions:
    """Make the folders that a node writes to, and name those that were left to be chosen."""
    home, state, store = options.home, options.state_dir, options.peer_store
    temporary = options.peer is not None and store is None and home is None
    try:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
            state = state or home / "state"
        if state is not None:
            # What clients remember between rounds tells something of their data: the owner's alone.
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            state.chmod(0o700)
        if options.peer is not None and store is None:
            store = Path(tempfile.mkdtemp(prefix="fedcomp-peer-")).resolve() if home is None else home / "peer-store"
    except OSError as error:
        raise ConfigError(f"cannot make {error.filename}: {error.strerror}; name another folder") from error
    return replace(options, state_dir=state, peer_store=store, temporary_store=temporary)


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
        log("state", "no --state-dir: client memory, such as residuals, is lost when the node restarts")
    env = environment(options)
    found: list[Service] = []
    if options.peer is not None:
        words = [sys.executable, "-m", "fedcomp.coding.listener", "--listen", options.peer, "--until-closed", "0"]
        words += ["--store", str(options.peer_store), "--store-bytes", str(options.peer_store_bytes)]
        words += ["--temporary"] if options.temporary_store else []
        words += ["--key", str(options.key), "--peer-keys", str(options.peer_keys)] if options.peer_keys else []
        fatal = {1: f"the listener on {options.peer} did not start; see its message above"}
        # It leaves when its pipe is closed, and removes a store that is not to stay; a signal could interrupt that.
        ready = "^listening for parcels on "
        found.append(Service("listener", words, env, ready=ready, fatal=fatal, orphaned=0))
    listener = found[0] if found else None
    words, reason = _executor(options, env, secret)
    if reason:
        if options.allow_bundles is not None:
            raise ConfigError(f"--allow-bundles needs the executor of this project: {reason}")
        log("executor", f"messages are handled by Flower's own, a new process each: {reason}", level="warning")
        return [*found, Service(SUPERNODE, _for_this_user(supernode(options), log), env, after=listener)]
    # The port is open to every user of this machine; whoever has no secret gets no task. That of a former start has no
    # reader any more: its port was found free.
    secret.unlink(missing_ok=True)
    with open(os.open(secret, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    command = supernode(options, "--isolation", "process", "--superexec-auth-secret-file", str(secret))
    fatal = {CONFIGURATION: "the executor cannot work as it was started; see its message above"}
    found.append(Service(SUPERNODE, command, env, after=listener))
    return [*found, Service("executor", words, env, after=listener, fatal=fatal, nice=YIELDS)]


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
    allow = options.allow_bundles and str(options.allow_bundles)
    asked = json.dumps([options.port, str(secret), allow, options.preload])
    words = [sys.executable, "-c", _QUESTION, asked]
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    with contextlib.suppress(ValueError, IndexError):
        reason, words = json.loads(done.stdout.splitlines()[-1])
        return words, reason
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return [], f"its module cannot be used ({said[-1]})"


def supernode(options: NodeOptions, *more: str) -> list[str]:
    """Return the command line of Flower's SuperNode.

    Raises
    ------
    ConfigError
        When it is not installed, or a path cannot be written in a node configuration.
    """
    command = [program("flower-supernode"), "--superlink", options.superlink]
    # The port is for the node's own helpers, which run on this machine: nobody else may reach it.
    command += ["--host", "127.0.0.1", "--port", str(options.port)]
    trusted = options.root_certificates
    command += ["--insecure"] if trusted is None else ["--root-certificates", str(trusted)]
    command += [] if options.key is None else ["--auth-supernode-private-key", str(options.key)]
    return [*command, *more, "--node-config", _node_config(options)]


def _node_config(options: NodeOptions) -> str:
    """Return what the app is told, as SuperNode takes it."""
    linked = options.peer_keys is not None
    texts = {
        node_config.PEER_ADDRESS: options.peer and f"tcp://{options.peer_announce}",
        node_config.PEER_STORE: options.peer_store,
        node_config.PEER_KEY: options.key if linked else None,
        node_config.PEER_KEYS: options.peer_keys,
        node_config.LEDGER_FILE: options.privacy_ledger,
        node_config.STATE_FOLDER: options.state_dir,
        node_config.DATA_PATH: options.data,
        node_config.UPLINK: options.link and f"{options.link.rate:.0f}",
    }
    numbers = {
        "partition-id": options.partition,
        "num-partitions": options.of,
        # As SuperNode reads them, numbers with a point or an exponent.
        node_config.OWN_BUDGET: options.privacy_budget,
        node_config.OWN_DELTA: options.privacy_delta,
    }
    for key, text in texts.items():
        if any(character in str(text) for character in "'\n\r"):
            raise ConfigError(f"{key} is {str(text)!r}: a name with a quote or line break cannot be passed to the app")
    entries = [f"{key}={number!r}" for key, number in numbers.items() if number is not None]
    # Single quotes: what is between them is taken as it stands.
    return " ".join([*entries, *(f"{key}='{text}'" for key, text in texts.items() if text is not None)])


def environment(options: NodeOptions) -> dict[str, str]:
    """Return the environment of the node's processes."""
    return {**flower_environment(options.home), **({} if options.link is None else options.link.environment)}


def flower_environment(home: Path | None) -> dict[str, str]:
    """Return the environment of a Flower process whose home is ``home``: what the user has set wins over the offline
    defaults."""
    env = {**OFFLINE_ENVIRONMENT, **os.environ, **without_proxy(os.environ)}
    # Flower's programs start each other by name; they must find the ones of this very environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    # Lines are read while they are printed.
    env["PYTHONUNBUFFERED"] = "1"
    return env if home is None else {**env, "FLWR_HOME": str(home)}


def program(name: str) -> str:
    """Return the path of one of Flower's programs, the one of this very Python environment when it has one.

    Raises
    ------
    ConfigError
        When there is none.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(
            f"the program {name} was found neither beside {sys.executable} nor on PATH; it comes with flwr: install "
            "this project into the environment that runs it"
        )
    return found
