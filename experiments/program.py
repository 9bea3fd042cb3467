"""The command ``fedcomp``: ``fedcomp run``, ``fedcomp node``, ``fedcomp link`` and the others of an installation.

Each is a command line of its own, which ``python -m experiments.run``, ``python -m experiments.bench``,
``python -m coding.bench`` and ``python -m fedcomp.clients.edge`` start as well.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

USAGE = """\
usage: fedcomp COMMAND ...

  run [EXPERIMENT]   run an experiment and write its report, or --compare two runs; --list shows them
  advise [FILE]      say which line fits a model and a link, and how many bytes it sends
  bench NAME         measure what something costs; --list shows what, and 'coding' is the codes
  node               start a node that trains for a SuperLink elsewhere, and keep it running
  certificates DIR   make the certificates of a server and the keys of its nodes
  link DIR           start a SuperLink that such nodes can reach, and nobody else can command
  status DIR         show what a running link knows of its nodes
  --version          of fedcomp and of Flower

fedcomp COMMAND --help says what a command takes."""


COMMANDS: Final = {
    "run": "fedcomp.experiments.run",
    "bench": "fedcomp.experiments.bench.__main__",
    "advise": "fedcomp.experiments.advise_command",
    "bench coding": "fedcomp.coding.bench.__main__",
    "node": "fedcomp.clients.edge",
    "edge": "fedcomp.clients.edge",
    **{name: f"fedcomp.experiments.security.{name}" for name in ("certificates", "link", "status")},
}
"""Each is imported when it is asked for: a node has neither the experiments nor what they need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = words[0] if words else "", words[1:]
    if words[:2] == ["bench", "coding"]:
        command, rest = "bench coding", words[2:]
    if command in COMMANDS:
        options = {} if command in ("node", "edge") else {"program": f"fedcomp {command}"}
        return int(importlib.import_module(COMMANDS[command]).main(rest, **options))
    from fedcomp.experiments.commands import OK, WRONG_INPUT, complain, unread

    if command == "--version":
        print(f"fedcomp {version('fedcomp')}, flwr {version('flwr')}")
        return OK
    if command in ("", "-h", "--help"):
        try:
            print(USAGE, flush=True)
        except BrokenPipeError:
            return unread()
        return OK
    return complain(
        f"no command {command!r}; fedcomp has run, advise, bench, node, certificates, link and status", WRONG_INPUT
    )
