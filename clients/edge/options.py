"""The command line of ``fedcomp node``, checked: what cannot work is refused before anything is started."""

from __future__ import annotations

import argparse
import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcomp.clients.edge.links import Link
from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.coding.transport import MAX_STORE_BYTES, parse_host_port
from fedcomp.errors import ConfigError


@dataclass(frozen=True)
class PeerOptions:
    """Where a node listens for other clients.

    Attributes
    ----------
    listen, announce : str
        HOST:PORT to listen on, and where others reach it.
    store : Path or None
        What arrives is kept here; None until one is chosen.
    store_bytes : int
    temporary : bool
        The store is removed when the node ends.
    """

    listen: str
    announce: str
    store: Path | None
    store_bytes: int
    temporary: bool = False


@dataclass(frozen=True)
class NodeOptions:
    """What one node was started with. Paths are absolute; None is what was not asked for.

    Attributes
    ----------
    superlink : str
        HOST:PORT.
    partition, of : int
    root_certificates : Path or None
        None is a connection without TLS.
    key, home, state_dir, data : Path or None
    port : int
        Of the node's own helpers, on loopback.
    link : Link or None
    preflight : bool
        Only check, start nothing.
    give_up : float or None
        Seconds without the SuperLink.
    heartbeat : Path or None
    log_format : str
        "text" or "json".
    allow_bundles : Path or None
    preload : tuple of str or None
        Modules; None for the usual ones.
    privacy_budget, privacy_delta : float or None
    privacy_ledger : Path or None
    peer : PeerOptions or None
    peer_keys : Path or None
        List of the nodes' public keys: links are TLS, between these alone.
    """

    superlink: str
    partition: int
    of: int
    root_certificates: Path | None = None
    key: Path | None = None
    port: int = 9094
    home: Path | None = None
    state_dir: Path | None = None
    data: Path | None = None
    link: Link | None = None
    preflight: bool = False
    give_up: float | None = None
    heartbeat: Path | None = None
    log_format: str = "text"
    allow_bundles: Path | None = None
    preload: tuple[str, ...] | None = None
    privacy_budget: float | None = None
    privacy_delta: float | None = None
    privacy_ledger: Path | None = None
    peer: PeerOptions | None = None
    peer_keys: Path | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the SuperLink."""
        host, _, port = self.superlink.rpartition(":")
        return host.strip("[]"), int(port)


def parse(argv: Sequence[str] | None = None) -> NodeOptions:
    """Return the options of a command line.

    Raises
    ------
    SystemExit
        With status 2 and a message that says what to change, when they cannot work.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    return NodeOptions(
        superlink=args.superlink,
        partition=args.partition,
        of=args.of,
        root_certificates=_absolute(args.root_certificates),
        key=_absolute(args.key),
        port=args.port,
        home=_absolute(args.home),
        state_dir=_absolute(args.state_dir),
        data=_absolute(args.data),
        link=_link(parser, args.link),
        preflight=args.preflight,
        give_up=args.give_up,
        heartbeat=_absolute(args.heartbeat),
        log_format=args.log_format,
        allow_bundles=_absolute(args.allow_bundles),
        preload=None if args.preload is None else tuple(name for name in args.preload.split(",") if name),
        privacy_budget=args.privacy_budget,
        privacy_delta=args.privacy_delta,
        privacy_ledger=_absolute(args.privacy_ledger),
        peer=_peer(parser, args),
        peer_keys=_absolute(args.peer_keys),
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedcomp node", description="Run one edge node, and keep it running.")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="address of the SuperLink")
    parser.add_argument("--partition", required=True, type=int, metavar="I", help="this node's data: 0 to N-1")
    parser.add_argument("--of", required=True, type=int, metavar="N", help="number of partitions in the federation")
    trust = parser.add_mutually_exclusive_group(required=True)
    trust.add_argument("--insecure", action="store_true", help="no TLS; for loopback and private networks only")
    trust.add_argument("--root-certificates", type=Path, metavar="F", help="PEM file that verifies the SuperLink")
    parser.add_argument("--key", type=Path, metavar="F", help="private key of a registered SuperNode (needs TLS)")
    parser.add_argument(
        "--port", type=int, default=9094, help="loopback port of the node's own helpers; one per node and machine"
    )
    parser.add_argument(
        "--home", type=Path, metavar="D", help="folder for bundles and keys (FLWR_HOME); one per node and machine"
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="D",
        help="folder for what clients remember across restarts; default: 'state' below --home, else none",
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help="where the app finds this node's data")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="rate of the uplink, e.g. 64kbit, 200kbit, 1mbit: replies travel in fitting pieces",
    )
    running = parser.add_argument_group("supervision")
    running.add_argument("--preflight", action="store_true", help="check what the node needs, start nothing")
    running.add_argument(
        "--give-up", type=float, metavar="S", help="end with status 75 after S seconds without the SuperLink"
    )
    running.add_argument("--heartbeat", type=Path, metavar="F", help="write the node's condition to this file")
    running.add_argument("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    # An option that is known only to say what took its place.
    running.add_argument("--max-wait", help=argparse.SUPPRESS)
    apps = parser.add_argument_group("apps", "how messages of the apps are handled")
    apps.add_argument(
        "--allow-bundles", type=Path, metavar="F", help="run only the bundles whose SHA-256 is in this file, one a line"
    )
    apps.add_argument(
        "--preload",
        metavar="M,M",
        help="modules that are imported once, not for every message; default: torch and ours",
    )
    private = parser.add_argument_group("privacy", "what this node keeps to in record-level private training")
    private.add_argument(
        "--privacy-budget",
        type=float,
        metavar="EPS",
        help="cross no epsilon beyond EPS, whatever the server plans, and never train without noise; over all runs and "
        "restarts: needs --privacy-ledger or a state folder",
    )
    private.add_argument(
        "--privacy-delta",
        type=float,
        metavar="D",
        help="the delta of that budget, whatever the server plans; default: 1e-5",
    )
    private.add_argument(
        "--privacy-ledger",
        type=Path,
        metavar="F",
        help="file that remembers what was spent in all runs; default with --privacy-budget: one in the state folder",
    )
    peers = parser.add_argument_group("peer links", "direct links to other clients, for systems with transport=peers")
    peers.add_argument(
        "--peer",
        metavar="HOST:PORT",
        help="listen here for parcels of other clients; without --peer-keys plain TCP, for a network you trust",
    )
    peers.add_argument(
        "--peer-keys",
        type=Path,
        metavar="F",
        help="partitions and public keys of all nodes: links are mutual TLS with --key, between these alone",
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
    if args.max_wait is not None:
        parser.error("--max-wait is gone: it left a process that never connected again; use --give-up S")
    if args.give_up is not None and not 0.0 < args.give_up < math.inf:
        parser.error(f"--give-up is {args.give_up:g}; expected a positive number of seconds")
    if args.privacy_budget is not None and not 0.0 < args.privacy_budget < math.inf:
        parser.error(f"--privacy-budget is {args.privacy_budget:g}; expected an epsilon above 0")
    if args.privacy_budget is not None and not (args.privacy_ledger or args.state_dir or args.home):
        parser.error(
            "--privacy-budget needs a place that outlives runs and restarts, or each of them could spend it again: add "
            "--privacy-ledger FILE, or --state-dir DIR"
        )
    if args.privacy_delta is not None:
        if args.privacy_budget is None:
            parser.error("--privacy-delta is of no use without --privacy-budget")
        # As SuperNode reads it, a number with a point or an exponent.
        if not 0.0 < args.privacy_delta < 1.0:
            parser.error(f"--privacy-delta is {args.privacy_delta:g}; expected a probability above 0 and below 1")
    for option in ("root_certificates", "key", "allow_bundles", "peer_keys"):
        path = getattr(args, option)
        if path is not None and not path.expanduser().is_file():
            parser.error(f"--{option.replace('_', '-')}: no file {path}")
    if args.data is not None and not args.data.expanduser().exists():
        parser.error(f"--data: there is no {args.data}")
    if args.peer_keys is not None:
        _check_keys(parser, args)
    if args.key is not None and args.insecure:
        parser.error("--key needs TLS: give --root-certificates instead of --insecure")
    for option in ("home", "state_dir", "data", "privacy_ledger", "peer_store", "peer_keys", "key"):
        path = getattr(args, option)
        if path is not None and any(character in str(path.resolve()) for character in "'\n\r"):
            parser.error(
                f"--{option.replace('_', '-')} is {path}, a name with a quote or line break, which a node "
                "configuration cannot hold; choose another"
            )


def _check_keys(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.key is None:
        parser.error("--peer-keys needs --key: this node's own key, which others find in their list")
    try:
        tls = PeerTls(args.key.expanduser(), PeerKeys.read(args.peer_keys.expanduser()))
    except ConfigError as error:
        parser.error(f"--peer-keys: {error}")
    if tls.partition != args.partition:
        parser.error(f"--peer-keys: the key {args.key} is listed for partition {tls.partition}, not {args.partition}")


def _link(parser: argparse.ArgumentParser, text: str | None) -> Link | None:
    try:
        return None if text is None else Link.of(text)
    except ConfigError as error:
        parser.error(str(error))


def _peer(parser: argparse.ArgumentParser, args: argparse.Namespace) -> PeerOptions | None:
    if args.peer is None:
        if args.peer_announce is not None or args.peer_store is not None:
            parser.error("--peer-announce and --peer-store are of no use without --peer")
        return None
    for option, address in (("--peer", args.peer), ("--peer-announce", args.peer_announce)):
        try:
            host = "" if address is None else parse_host_port(address)[0]
        except ConfigError as error:
            parser.error(f"{option}: {error}")
        if _is_wildcard(host) and (option == "--peer-announce" or args.peer_announce is None):
            parser.error(f"{option} is {address}, which others cannot dial; say where they can with --peer-announce")
    return PeerOptions(args.peer, args.peer_announce or args.peer, _absolute(args.peer_store), args.peer_store_bytes)


def _is_wildcard(host: str) -> bool:
    """Whether ``host`` means every address of this machine, however it is spelt."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        # The resolver takes 0 for 0.0.0.0, which is no address by the letter.
        return host == "*" or (bool(host) and set(host) <= {"0", "."})
