"""Entry point of an edge node: ``python -m fedcomp.clients.edge --superlink HOST:PORT --partition I --of N``.

Starts Flower's SuperNode with the node configuration the generic client app reads, and with every switch that keeps it
from talking to anybody but its SuperLink. The app itself arrives over the wire when a run starts.

With ``--peer HOST:PORT`` a listener for other clients' parcels runs beside the SuperNode. It holds one end of a pipe,
the SuperNode the other, without knowing of it: however the SuperNode ends, the pipe closes and the listener leaves.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedcomp.clients.edge.node_config import LEDGER_FILE, OWN_BUDGET, PEER_ADDRESS, PEER_STORE
from fedcomp.coding.transport import MAX_STORE_BYTES, parse_host_port
from fedcomp.errors import ConfigError
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT

_LISTENER_SECONDS: Final = 30.0


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and become the SuperNode process; returns only by :class:`SystemExit` on an error."""
    parser = _parser()
    args = parser.parse_args(argv)
    command, env = _prepare(parser, args)
    if args.peer is not None:
        try:
            start_listener(args.peer, args.peer_store, args.peer_store_bytes, env, temporary=args.peer_temporary)
        except ConfigError as error:
            parser.error(str(error))
    # Replacing this process keeps one process id for whoever supervises the node.
    os.execve(command[0], command, env)


def prepare(argv: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the SuperNode command line and its environment; starts nothing, so a listener is not among it.

    Raises
    ------
    SystemExit
        With status 2 and a message that says what to change, when the arguments cannot work.
    """
    parser = _parser()
    return _prepare(parser, parser.parse_args(argv))


def start_listener(listen: str, store: Path, store_bytes: int, env: Mapping[str, str], *, temporary: bool) -> int:
    """Start the listener and return when it accepts connections.

    It leaves when this process ends, or the one this process becomes: both hold the pipe's other end, which Python
    closes in whatever they start.

    Returns
    -------
    int
        Its process id.

    Raises
    ------
    ConfigError
        When it does not start; it has said on standard error why.
    """
    closed, kept = os.pipe()
    answer, ready = os.pipe()
    command = [sys.executable, "-m", "fedcomp.coding.listener", "--listen", listen, "--store", str(store)]
    command += ["--store-bytes", str(store_bytes), "--until-closed", str(closed), "--ready", str(ready)]
    command += ["--temporary"] if temporary else []
    # The listener must not hold the end whose closing it waits for.
    listener = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(closed, ready), env=env)
    os.close(closed)
    # The listener then has the only end: should it die, the read below ends at once, with nothing.
    os.close(ready)
    try:
        answered, _, _ = select.select([answer], [], [], _LISTENER_SECONDS)
        said = os.read(answer, 1024) if answered else b""
    finally:
        os.close(answer)
    if not said:
        listener.kill()
        listener.wait()
        os.close(kept)
        if temporary:
            # It removes the store itself, unless it had to be killed.
            shutil.rmtree(store, ignore_errors=True)
        raise ConfigError(f"the listener on {listen} did not start; see its message above")
    # Not before: the SuperNode that replaces this process must keep this end, the listener must not have it.
    os.set_inheritable(kept, True)
    return listener.pid


def _prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    _check(parser, args)
    try:
        command = [program("flower-supernode"), "--superlink", args.superlink]
    except ConfigError as error:
        parser.error(str(error))
    # The port is for the node's own helpers, which run on this machine: nobody else may reach it.
    command += ["--host", "127.0.0.1", "--port", str(args.port)]
    command += ["--insecure"] if args.insecure else ["--root-certificates", str(args.root_certificates.resolve())]
    if args.key is not None:
        command += ["--auth-supernode-private-key", str(args.key.resolve())]
    if args.max_wait is not None:
        command += ["--max-wait-time", str(args.max_wait)]
    node_config = f"partition-id={args.partition} num-partitions={args.of}"
    if args.peer is not None:
        _place_store(parser, args)
        # Single quotes: what is between them is taken as it stands.
        node_config += f" {PEER_ADDRESS}='tcp://{args.peer_announce}' {PEER_STORE}='{args.peer_store}'"
    if args.privacy_budget is not None:
        node_config += f" {OWN_BUDGET}={args.privacy_budget!r}"
    if args.privacy_ledger is not None:
        node_config += f" {LEDGER_FILE}='{args.privacy_ledger.resolve()}'"
    command += ["--node-config", node_config]
    # What the user has set in the environment wins over the offline defaults.
    env = {**OFFLINE_ENVIRONMENT, **os.environ}
    # SuperNode starts its helpers by name; they must come from the same environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if args.home is not None:
        args.home.mkdir(parents=True, exist_ok=True)
        env["FLWR_HOME"] = str(args.home.resolve())
    return command, env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedcomp.clients.edge", description="Run one edge node.")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="address of the SuperLink")
    parser.add_argument("--partition", required=True, type=int, metavar="I", help="this node's data: 0 to N-1")
    parser.add_argument("--of", required=True, type=int, metavar="N", help="number of partitions in the federation")
    trust = parser.add_mutually_exclusive_group(required=True)
    trust.add_argument("--insecure", action="store_true", help="no TLS; for loopback and private networks only")
    trust.add_argument("--root-certificates", type=Path, metavar="F", help="PEM file that verifies the SuperLink")
    parser.add_argument("--key", type=Path, metavar="F", help="private key of a registered SuperNode (needs TLS)")
    parser.add_argument(
        "--port",
        type=int,
        default=9094,
        help="loopback port of the node's own helpers; one per node and machine",
    )
    parser.add_argument(
        "--home",
        type=Path,
        metavar="D",
        help="folder for bundles and keys (FLWR_HOME); one per node and machine",
    )
    parser.add_argument(
        "--max-wait",
        type=float,
        metavar="S",
        help="give up after S seconds without the SuperLink; default: never",
    )
    private = parser.add_argument_group("privacy", "what this node keeps to in record-level private training")
    private.add_argument(
        "--privacy-budget",
        type=float,
        metavar="EPS",
        help="cross no epsilon beyond EPS, whatever the server plans; train without noise never",
    )
    private.add_argument(
        "--privacy-ledger",
        type=Path,
        metavar="F",
        help="file that remembers what was spent when this node is restarted",
    )
    peers = parser.add_argument_group("peer links", "direct links to other clients, for systems with transport=peers")
    peers.add_argument(
        "--peer",
        metavar="HOST:PORT",
        help="listen here for parcels of other clients; plain TCP, for a network you trust",
    )
    peers.add_argument(
        "--peer-announce",
        metavar="HOST:PORT",
        help="where others reach --peer, when that is another address; default: the same",
    )
    peers.add_argument(
        "--peer-store",
        type=Path,
        metavar="DIR",
        help="where their parcels are kept; default: below --home, or a temporary folder",
    )
    peers.add_argument(
        "--peer-store-bytes",
        type=int,
        default=MAX_STORE_BYTES,
        metavar="B",
        help="most bytes kept there (default: %(default)s)",
    )
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    host, colon, port = args.superlink.rpartition(":")
    if "//" in args.superlink or not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        parser.error(f"--superlink is {args.superlink!r}; expected HOST:PORT without a scheme, e.g. 10.0.0.1:8000")
    if args.of < 1:
        parser.error(f"--of is {args.of}; a federation has at least one partition")
    if not 0 <= args.partition < args.of:
        parser.error(f"--partition is {args.partition}; with --of {args.of} it must be 0 to {args.of - 1}")
    if not 0 < args.port < 65536:
        parser.error(f"--port is {args.port}; expected 1 to 65535")
    if args.max_wait is not None and not args.max_wait > 0:
        parser.error(f"--max-wait is {args.max_wait:g}; expected a positive number of seconds")
    if args.privacy_budget is not None and not 0.0 < args.privacy_budget < math.inf:
        parser.error(f"--privacy-budget is {args.privacy_budget:g}; expected an epsilon above 0")
    if args.privacy_ledger is not None and "'" in str(args.privacy_ledger.resolve()):
        parser.error(
            f"--privacy-ledger {args.privacy_ledger} has a quote in it, which a node configuration cannot hold"
        )
    for option, path in (("--root-certificates", args.root_certificates), ("--key", args.key)):
        if path is not None and not path.is_file():
            parser.error(f"{option}: no file {path}")
    if args.key is not None and args.insecure:
        parser.error("--key needs TLS: give --root-certificates instead of --insecure")
    if args.peer is None:
        if args.peer_announce is not None or args.peer_store is not None:
            parser.error("--peer-announce and --peer-store are of no use without --peer")
        return
    for option, address in (("--peer", args.peer), ("--peer-announce", args.peer_announce)):
        try:
            host = "" if address is None else parse_host_port(address)[0]
        except ConfigError as error:
            parser.error(f"{option}: {error}")
        if _is_wildcard(host) and (option == "--peer-announce" or args.peer_announce is None):
            parser.error(f"{option} is {address}, which others cannot dial; say where they can with --peer-announce")
    args.peer_announce = args.peer_announce or args.peer


def _is_wildcard(host: str) -> bool:
    """Whether ``host`` means every address of this machine, however it is spelt."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        # The resolver takes 0 for 0.0.0.0, which is no address by the letter.
        return host == "*" or (bool(host) and set(host) <= {"0", "."})


def _place_store(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Decide where parcels are kept: a folder that was named, one below the node's home, or one that goes with it."""
    args.peer_temporary = args.peer_store is None and args.home is None
    if args.peer_temporary:
        args.peer_store = Path(tempfile.mkdtemp(prefix="fedcomp-peer-"))
    elif args.peer_store is None:
        args.peer_store = args.home / "peer-store"
    args.peer_store = args.peer_store.resolve()
    if any(character in str(args.peer_store) for character in "'\n\r"):
        parser.error(f"--peer-store {args.peer_store}: the app cannot be told a name with a quote or line break")


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
