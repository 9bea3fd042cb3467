"""The command ``fedcomp``: ``fedcomp run``, ``fedcomp node``, ``fedcomp link`` and the others of an installation.

Each is a command line of its own, which ``python -m experiments.run``, ``python -m experiments.bench``,
``python -m coding.bench`` and ``python -m fedcomp.clients.edge`` start as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """\
usage: fedcomp COMMAND ...

  run [EXPERIMENT]   run an experiment and write its report, or --compare two runs; --list shows them
  bench NAME         measure what something costs; --list shows what, and 'coding' is the codes
  node               start a node that trains for a SuperLink elsewhere, and keep it running
  certificates DIR   make the certificates of a server and the keys of its nodes
  link DIR           start a SuperLink that such nodes can reach, and nobody else can command
  status DIR         show what a running link knows of its nodes
  --version          of fedcomp and of Flower

fedcomp COMMAND --help says what a command takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = words[0] if words else "", words[1:]
    # Each is imported when it is asked for: a node has neither the experiments nor what they need.
    if command == "run":
        from fedcomp.experiments.run import main as run

        return run(rest, program="fedcomp run")
    if command == "bench" and rest[:1] == ["coding"]:
        from fedcomp.coding.bench.__main__ import main as coding

        return coding(rest[1:], program="fedcomp bench coding")
    if command == "bench":
        from fedcomp.experiments.bench.__main__ import main as bench

        return bench(rest, program="fedcomp bench")
    if command in ("node", "edge"):
        from fedcomp.clients.edge import main as node

        return node(rest)
    from fedcomp.experiments.commands import OK, WRONG_INPUT, complain, unread

    if command == "certificates":
        from fedcomp.experiments.security.certificates import main as certificates

        return certificates(rest)
    if command == "link":
        from fedcomp.experiments.security.link import main as link

        return link(rest)
    if command == "status":
        from fedcomp.experiments.security.status import main as status

        return status(rest)
    if command == "--version":
        from importlib.metadata import version

        print(f"fedcomp {version('fedcomp')}, flwr {version('flwr')}")
        return OK
    if command in ("", "-h", "--help"):
        try:
            print(USAGE, flush=True)
        except BrokenPipeError:
            return unread()
        return OK
    return complain(f"no command {command!r}; fedcomp has run, bench, node, certificates, link and status", WRONG_INPUT)
