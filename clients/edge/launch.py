"""The command line and the environment of a node's SuperNode."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedcomp.clients.edge.node_config import (
    DATA_PATH,
    LEDGER_FILE,
    OWN_BUDGET,
    OWN_DELTA,
    PEER_ADDRESS,
    PEER_KEY,
    PEER_KEYS,
    PEER_STORE,
    STATE_FOLDER,
)
from fedcomp.clients.edge.options import NodeOptions, parse
from fedcomp.errors import ConfigError
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT, without_proxy


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
    state = options.state_dir
    peer = options.peer
    try:
        if options.home is not None:
            options.home.mkdir(parents=True, exist_ok=True)
            state = options.home / "state" if state is None else state
        if state is not None:
            # What clients remember between rounds tells something of their data: the owner's alone.
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            state.chmod(0o700)
        if peer is not None and peer.store is None:
            temporary = options.home is None
            store = (
                Path(tempfile.mkdtemp(prefix="fedcomp-peer-")) if options.home is None else options.home / "peer-store"
            )
            peer = replace(peer, store=store.resolve(), temporary=temporary)
    except OSError as error:
        raise ConfigError(f"cannot make {error.filename}: {error.strerror}; name another folder") from error
    return replace(options, state_dir=state, peer=peer)


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
    if options.key is not None:
        command += ["--auth-supernode-private-key", str(options.key)]
    return [*command, *more, "--node-config", _node_config(options)]


def _node_config(options: NodeOptions) -> str:
    """Return what the app is told, as SuperNode takes it."""
    texts: dict[str, object] = {}
    if options.peer is not None:
        texts |= {PEER_ADDRESS: f"tcp://{options.peer.announce}", PEER_STORE: options.peer.store}
    if options.peer_keys is not None:
        texts |= {PEER_KEY: options.key, PEER_KEYS: options.peer_keys}
    if options.privacy_ledger is not None:
        texts[LEDGER_FILE] = options.privacy_ledger
    if options.state_dir is not None:
        texts[STATE_FOLDER] = options.state_dir
    if options.data is not None:
        texts[DATA_PATH] = options.data
    for key, text in texts.items():
        if any(character in str(text) for character in "'\n\r"):
            raise ConfigError(f"{key} is {str(text)!r}: the app cannot be told a name with a quote or line break")
    entries = [f"partition-id={options.partition}", f"num-partitions={options.of}"]
    if options.privacy_budget is not None:
        entries.append(f"{OWN_BUDGET}={options.privacy_budget!r}")
    if options.privacy_delta is not None:
        entries.append(f"{OWN_DELTA}={options.privacy_delta!r}")
    # Single quotes: what is between them is taken as it stands.
    return " ".join([*entries, *(f"{key}='{text}'" for key, text in texts.items())])


def environment(options: NodeOptions) -> dict[str, str]:
    """Return the environment of the node's processes: what the user has set wins over the offline defaults."""
    env = {**OFFLINE_ENVIRONMENT, **os.environ, **without_proxy(os.environ)}
    env |= {} if options.link is None else options.link.environment
    # SuperNode starts its helpers by name; they must come from the same environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    # Lines are read while they are printed.
    env["PYTHONUNBUFFERED"] = "1"
    if options.home is not None:
        env["FLWR_HOME"] = str(options.home)
    return env


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
