"""Entry point of an edge node: ``python -m clients.edge --superlink HOST:PORT --partition I --of N``.

Starts Flower's SuperNode with the node configuration the generic client app reads, and with every switch that keeps it
from talking to anybody but its SuperLink. The app itself arrives over the wire when a run starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcomp.errors import ConfigError
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and become the SuperNode process; returns only by :class:`SystemExit` on an error."""
    command, env = prepare(argv)
    # Replacing this process keeps one process id for whoever supervises the node.
    os.execve(command[0], command, env)


def prepare(argv: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the SuperNode command line and its environment.

    Raises
    ------
    SystemExit
        With status 2 and a message that says what to change, when the arguments cannot work.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    try:
        command = [program("flower-supernode"), "--superlink", args.superlink]
    except ConfigError as error:
        parser.error(str(error))
    command += ["--host", "127.0.0.1", "--port", str(args.port)]
    command += ["--insecure"] if args.insecure else ["--root-certificates", str(args.root_certificates.resolve())]
    if args.key is not None:
        command += ["--auth-supernode-private-key", str(args.key.resolve())]
    if args.max_wait is not None:
        command += ["--max-wait-time", str(args.max_wait)]
    command += ["--node-config", f"partition-id={args.partition} num-partitions={args.of}"]
    env = {**OFFLINE_ENVIRONMENT, **os.environ}
    # SuperNode starts its helpers by name; they must come from the same environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if args.home is not None:
        args.home.mkdir(parents=True, exist_ok=True)
        env["FLWR_HOME"] = str(args.home.resolve())
    return command, env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clients.edge", description="Run one edge node.")
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
    for option, path in (("--root-certificates", args.root_certificates), ("--key", args.key)):
        if path is not None and not path.is_file():
            parser.error(f"{option}: no file {path}")
    if args.key is not None and args.insecure:
        parser.error("--key needs TLS: give --root-certificates instead of --insecure")


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


if __name__ == "__main__":
    main()
