"""Registration of nodes' public keys with a SuperLink on loopback, through Flower's own command line.

A process of its own, because the environment (``FLWR_HOME``) says where Flower's settings are, and one for all keys,
because importing Flower takes longer than a hundred calls.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import click

from fedcomp.clients.edge.supervisor import TEMPORARY
from fedcomp.experiments.commands import OK, complain
from fedcomp.experiments.security.certificates import Folder, digest_of

_GONE = ("unregistered", "deleted")
_KNOWN = "[code: 23]"
"""What the SuperLink answers to a key that it has already."""


def flwr(*words: str) -> str:
    """Return what a command of Flower's command line prints.

    Raises
    ------
    click.ClickException
        When the SuperLink does not answer or refuses.
    """
    # What the program ``flwr`` starts with, whatever its module is called.
    (program,) = entry_points(group="console_scripts", name="flwr")
    # Flower writes its JSON to the first standard output, whatever it is now.
    before, printed = sys.__stdout__, io.StringIO()
    sys.__stdout__ = printed  # type: ignore[misc, assignment]
    try:
        with contextlib.redirect_stdout(printed):
            program.load()(list(words), standalone_mode=False)
    finally:
        sys.__stdout__ = before  # type: ignore[misc]
    return printed.getvalue()


def register(key: Path, connection: str) -> str | None:
    """Register one public key; return the node's id, or None when it was registered before; raises as :func:`flwr`."""
    try:
        printed = flwr("supernode", "register", str(key), connection)
    except click.ClickException as error:
        if _KNOWN in error.format_message():
            return None
        raise
    found = re.search(r"SuperNode (\d+) registered", printed)
    if found is None:
        raise click.ClickException(f"flwr supernode register printed {printed!r}")
    return found[1]


def listed(connection: str) -> set[str]:
    """Return the ids of the nodes that are registered at the SuperLink; raises as :func:`flwr`."""
    printed = flwr("supernode", "list", connection, "--format", "json")
    try:
        # Remarks may stand before the document.
        nodes = json.loads(printed[printed.index("{") :])["nodes"]
        return {node["node-id"] for node in nodes if node["status"] not in _GONE}
    except (ValueError, KeyError, TypeError):
        raise click.ClickException(f"flwr supernode list printed {printed!r}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Register the keys in a folder: ``python -m fedcomp.experiments.security.registration DIR CONNECTION``."""
    path, connection = sys.argv[1:] if arguments is None else arguments
    folder = Folder(Path(path))
    known = 0
    try:
        there = listed(connection)
    except click.ClickException as error:
        return complain(f"the SuperLink does not list its nodes: {error.format_message()}", TEMPORARY)
    before = folder.registrations()
    for key in folder.public_keys():
        # Asked first: for a key that it has already the SuperLink logs an error.
        registered, digest = before.get(key.stem, ("", ""))
        if registered in there and digest == digest_of(key):
            known += 1
            continue
        try:
            node = register(key, connection)
        except click.ClickException as error:
            return complain(f"{key} was not registered: {error.format_message()}", TEMPORARY)
        if node is None:
            known += 1
            continue
        # The SuperLink keeps no names: this is how an operator finds the id of a lost device.
        with folder.registered.open("a", encoding="utf-8") as file:
            file.write(f"{key.stem} {node} {digest_of(key)}\n")
        print(f"registered {key.stem} as {node}", flush=True)
    print(f"{known} keys were registered before" if known else "all keys are registered", flush=True)
    return OK


if __name__ == "__main__":
    sys.exit(main())
