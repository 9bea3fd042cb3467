"""The command line of ``fedcomp node``, with checks that refuse invalid settings before anything starts."""

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
class NodeOptions:
    """What one node was started with: the options of its command line. Paths are absolute; None was not asked for.

    Attributes
    ----------
    superlink : str
        HOST:PORT.
    root_certificates : Path or None
        None is a connection without TLS.
    port : int
        Of the node's own helpers, on loopback.
    give_up : float or None
        Seconds without the SuperLink.
    log_format : str
        "text" or "json".
    allow_bundles : Path or None
        File with the SHA-256 of the bundles that may run.
    preload : tuple of str or None
        Modules; None for the usual ones.
    peer, peer_announce : str or None
        HOST:PORT to listen on for other clients, and where they reach it.
    peer_keys : Path or None
        List of the nodes' public keys: links are TLS, between these alone.
    peer_store : Path or None
        What other clients send is kept here, at most ``peer_store_bytes``; None until a folder is chosen.
    temporary_store : bool
        That folder is removed when the node ends.
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
    peer: str | None = None
    peer_announce: str | None = None
    peer_keys: Path | None = None
    peer_store: Path | None = None
    peer_store_bytes: int = MAX_STORE_BYTES
    temporary_store: bool = False

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
    _check_peer(parser, args)
    args.peer_announce = args.peer_announce or args.peer
    del args.insecure
    return NodeOptions(**vars(args))


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _modules(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _link(text: str) -> Link:
    try:
        return Link.of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedcomp node", description="Run one edge node, and keep it running.")
    add = parser.add_argument
    add("--superlink", required=True, metavar="HOST:PORT", help="address of the SuperLink")
    add("--partition", required=True, type=int, metavar="I", help="this node's data: 0 to N-1")
    add("--of", required=True, type=int, metavar="N", help="number of partitions in the federation")
    trust = parser.add_mutually_exclusive_group(required=True)
    trust.add_argument("--insecure", action="store_true", help="no TLS; for loopback and private networks only")
    trust.add_argument("--root-certificates", type=_path, metavar="F", help="PEM file that verifies the SuperLink")
    add("--key", type=_path, metavar="F", help="private key of a registered SuperNode (needs TLS)")
    add("--port", type=int, default=9094, help="loopback port of the node's own helpers; one per node and machine")
    add("--home", type=_path, metavar="D", help="folder for bundles and keys (FLWR_HOME); one per node and machine")
    add(
        "--state-dir",
        type=_path,
        metavar="D",
        help="folder for client memory; default: 'state' below --home, else none",
    )
    add("--data", type=_path, metavar="PATH", help="where the app finds this node's data")
    add(
        "--link",
        type=_link,
        metavar="RATE",
        help="rate of the uplink, e.g. 64kbit: replies are sent in pieces that fit it",
    )
    add = parser.add_argument_group("supervision").add_argument
    add("--preflight", action="store_true", help="check what the node needs, start nothing")
    add("--give-up", type=float, metavar="S", help="end with status 75 after S seconds without the SuperLink")
    add("--heartbeat", type=_path, metavar="F", help="write the node's condition to this file")
    add("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    add = parser.add_argument_group("apps", "how messages of the apps are handled").add_argument
    add("--allow-bundles", type=_path, metavar="F", help="run only bundles whose SHA-256 is in this file, one a line")
    add("--preload", type=_modules, metavar="M,M", help="modules that are imported once; default: torch and ours")
    group = parser.add_argument_group("privacy", "limits of this node in record-level private training")
    add = group.add_argument
    add(
        "--privacy-budget",
        type=float,
        metavar="EPS",
        help="never exceed epsilon EPS over all runs and restarts, whatever the server plans, and never train "
        "without noise; needs --privacy-ledger or a state folder",
    )
    add("--privacy-delta", type=float, metavar="D", help="the delta of that budget; default: 1e-5")
    add(
        "--privacy-ledger",
        type=_path,
        metavar="F",
        help="file that records what all runs spent; default: in the state folder",
    )
    group = parser.add_argument_group("peer links", "direct links to other clients, for systems with transport=peers")
    add = group.add_argument
    add(
        "--peer",
        metavar="HOST:PORT",
        help="listen here for parcels of other clients; without --peer-keys plain TCP, for a network you trust",
    )
    add(
        "--peer-keys",
        type=_path,
        metavar="F",
        help="partitions and public keys of all nodes: links are mutual TLS with --key, between these alone",
    )
    add("--peer-announce", metavar="HOST:PORT", help="where others reach --peer, when that is another address")
    add("--peer-store", type=_path, metavar="DIR", help="default: below --home, or a temporary folder")
    add("--peer-store-bytes", type=int, default=MAX_STORE_BYTES, metavar="B", help="most bytes (default: %(default)s)")
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
    if args.give_up is not None and not 0.0 < args.give_up < math.inf:
        parser.error(f"--give-up is {args.give_up:g}; expected a positive number of seconds")
    if args.privacy_budget is not None and not 0.0 < args.privacy_budget < math.inf:
        parser.error(f"--privacy-budget is {args.privacy_budget:g}; expected an epsilon above 0")
    if args.privacy_budget is not None and not (args.privacy_ledger or args.state_dir or args.home):
        parser.error(
            "--privacy-budget needs a file that outlives runs and restarts, or each of them could spend the budget "
            "again: add "
            "--privacy-ledger FILE, or --state-dir DIR"
        )
    if args.privacy_delta is not None and args.privacy_budget is None:
        parser.error("--privacy-delta has no effect without --privacy-budget")
    if args.privacy_delta is not None and not 0.0 < args.privacy_delta < 1.0:
        parser.error(f"--privacy-delta is {args.privacy_delta:g}; expected a probability above 0 and below 1")
    paths = {f"--{name.replace('_', '-')}": path for name, path in vars(args).items() if isinstance(path, Path)}
    for option in ("--root-certificates", "--key", "--allow-bundles", "--peer-keys"):
        if option in paths and not paths[option].is_file():
            parser.error(f"{option}: no file {paths[option]}")
    if args.data is not None and not args.data.exists():
        parser.error(f"--data: there is no {args.data}")
    if args.key is not None and args.insecure:
        parser.error("--key needs TLS: give --root-certificates instead of --insecure")
    for option in ("--home", "--state-dir", "--data", "--privacy-ledger", "--peer-store", "--peer-keys", "--key"):
        if any(character in str(paths.get(option, "")) for character in "'\n\r"):
            parser.error(
                f"{option} is {paths[option]}, a name with a quote or line break, which a node "
                "configuration cannot hold; choose another"
            )


def _check_peer(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.peer_keys is not None:
        if args.key is None:
            parser.error("--peer-keys needs --key: this node's own key, which others find in their list")
        try:
            tls = PeerTls(args.key, PeerKeys.read(args.peer_keys))
        except ConfigError as error:
            parser.error(f"--peer-keys: {error}")
        if tls.partition != args.partition:
            parser.error(
                f"--peer-keys: the key {args.key} is listed for partition {tls.partition}, not {args.partition}"
            )
    if args.peer is None and (args.peer_announce is not None or args.peer_store is not None):
        parser.error("--peer-announce and --peer-store have no effect without --peer")
    for option, address in (("--peer", args.peer), ("--peer-announce", args.peer_announce)):
        try:
            host = "" if address is None else parse_host_port(address)[0]
        except ConfigError as error:
            parser.error(f"{option}: {error}")
        if _is_wildcard(host) and (option == "--peer-announce" or args.peer_announce is None):
            parser.error(
                f"{option} is {address}, which others cannot reach; give an address they can reach with --peer-announce"
            )


def _is_wildcard(host: str) -> bool:
    """Whether ``host`` means every address of this machine, however it is spelt."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        # The resolver takes 0 for 0.0.0.0, which is no address by the letter.
        return host == "*" or (bool(host) and set(host) <= {"0", "."})
