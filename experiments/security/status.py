"""The state of all nodes known to ``fedcomp link``, and ``fedcomp status``, which shows it on one screen.

The proxy counts what passes it, by the key that a call was signed with: only where the SuperLink took the call, which
checks the signature. Server apps add the end of every training round to a file that the link reads, with the nodes
whose replies are in the new model. A node that is not in ``nodes/`` any more is not shown.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedcomp.clients.edge.events import timestamp
from fedcomp.experiments.commands import OK, WRONG_INPUT, complain
from fedcomp.experiments.security.certificates import Folder

KEY_HEADER: Final = b"flwr-public-key"
VERSION_HEADER: Final = b"flwr-package-version"
"""In which a node's call says its key, in base64, and its Flower's version."""
ONLINE_SECONDS: Final = 60.0
"""A node asks for messages every three seconds, and the SuperLink misses one after a minute."""


@dataclass
class Caller:
    """What came under one key since the link began.

    Attributes
    ----------
    last : float
        When, in seconds since the epoch; 0: never.
    address, version : str
        From where, and which Flower.
    calls, refused, up, down : int
        Calls that the SuperLink took and refused; bytes of bodies from and to the node.
    """

    last: float = 0.0
    address: str = ""
    version: str = ""
    calls: int = 0
    refused: int = 0
    up: int = 0
    down: int = 0


@dataclass
class Rounds:
    """Ends of rounds, as server apps add them to a file.

    Parameters
    ----------
    path : Path
        The file; what is in it when this is made is an earlier link's, and is removed.

    Attributes
    ----------
    last : dict of str to dict
        For each node, by its id, the last round in which its reply was used: ``round``, ``of`` and ``time``.
    ended : int
        Rounds that have ended.
    """

    path: Path
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: int = 0
    _read: int = 0

    def __post_init__(self) -> None:
        self.path.unlink(missing_ok=True)

    def new(self) -> list[str]:
        """Return a line for each round that has ended since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        # The rest is being written.
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [self._take(line) for line in whole.splitlines()]

    def _take(self, line: bytes) -> str:
        try:
            end = json.loads(line)
            shown = {"round": int(end["round"]), "of": int(end["of"]), "time": float(end["time"])}
            self.last |= {str(node): shown for node in end["nodes"]}
            said = f"{end['name']}, {numbered(shown)}: {end['text']}"
            self.ended += 1
        except (ValueError, KeyError, TypeError) as error:
            return f"{self.path}: a line does not describe a round: {error!r}"
        # Clients wrote a part of it.
        return "".join(c if c.isascii() and c.isprintable() else "?" for c in said)


def numbered(end: Mapping[str, Any]) -> str:
    """Return which round it is, and of how many where that is known."""
    return f"round {end['round']}" + (f" of {end['of']}" if end["of"] else "")


@dataclass
class Callers:
    """Whoever has called, by name of a node; only those whose keys are in the folder are counted by name.

    Parameters
    ----------
    names : mapping of str to str
        Names by public key as calls say it.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    nodes: dict[str, Caller] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def note(self, headers: Sequence[tuple[bytes, bytes]], address: str, status: int, up: int, down: int) -> None:
        """Count a call that was answered with ``status``."""
        said = dict(headers)
        name = self.names.get(said.get(KEY_HEADER, b"").decode("latin-1"))
        if name is None:
            return
        caller = self.nodes.setdefault(name, Caller())
        if status != 200:
            # Anybody can write somebody's key into a call: nothing else of it is believed.
            caller.refused += 1
            return
        caller.last, caller.address = time.time(), address
        caller.version = said.get(VERSION_HEADER, b"").decode("latin-1")[:32]
        caller.calls, caller.up, caller.down = caller.calls + 1, caller.up + up, caller.down + down

    def write(self, path: Path, **more: Any) -> None:
        """Replace the file that ``fedcomp status`` reads."""
        document = {"time": time.time(), "nodes": {name: asdict(c) for name, c in self.nodes.items()}, **more}
        _replace(path, json.dumps({**document, "refused": dict(self.refused)}), 0o600)


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace a file at once: whoever reads it sees the former text or this one."""
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        # Whatever this process' mask for new files is.
        os.fchmod(file.fileno(), mode)
        file.write(text)
    fresh.replace(path)


def prometheus(callers: Callers, rounds: int, connections: int) -> str:
    """Return counters since the link began, in Prometheus' text format."""
    bytes_of, calls, last = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, caller in sorted(callers.nodes.items()):
        node = f'node="{_label(name)}"'
        bytes_of |= {f'{node},direction="up"': caller.up, f'{node},direction="down"': caller.down}
        calls |= {f'{node},result="taken"': caller.calls, f'{node},result="refused"': caller.refused}
        last |= {node: caller.last} if caller.last else {}
    refused: dict[str, float] = {f'reason="{_label(why)}"': n for why, n in sorted(callers.refused.items())}
    online = sum(time.time() - caller.last < ONLINE_SECONDS for caller in callers.nodes.values())
    found: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("node_bytes_total", "counter", "Bytes of bodies from (up) and to (down) a node.", bytes_of),
        ("node_calls_total", "counter", "Calls of a node that the SuperLink took or refused.", calls),
        ("node_last_contact_timestamp_seconds", "gauge", "When a node last called, in seconds since 1970.", last),
        ("refused_total", "counter", "Calls (HTTP status) and connections (reset) that the proxy refused.", refused),
        ("rounds_total", "counter", "Training rounds that have ended.", {"": rounds}),
        ("connections", "gauge", "Connections that are open.", {"": connections}),
        ("nodes_online", "gauge", "Nodes that called within the last minute.", {"": online}),
    ]
    lines = []
    for name, kind, text, values in found:
        lines += [f"# HELP fedcomp_link_{name} {text}", f"# TYPE fedcomp_link_{name} {kind}"]
        lines += [f"fedcomp_link_{name}{f'{{{labels}}}' if labels else ''} {n}" for labels, n in values.items()]
    return "\n".join([*lines, ""])


def _label(text: str) -> str:
    return re.sub(r'[\\"]', r"\\\g<0>", text).replace("\n", r"\n")


def write_prometheus(path: Path, callers: Callers, rounds: int, connections: int) -> None:
    """Replace the file that node_exporter's textfile collector reads, which runs as another user."""
    _replace(path, prometheus(callers, rounds, connections), 0o644)


def names_of(folder: Folder) -> dict[str, str]:
    """Return the nodes' names by their public keys, as a call says them: base64 of the key's PEM."""
    found = {}
    for path in folder.public_keys():
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError):
            # Registering it says what is wrong with it.
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            found[base64.b64encode(pem).decode()] = path.stem
    return found


def rows(folder: Folder, document: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """Return what is known of every node of the folder, in the order of their numbers."""
    ids = folder.registrations()
    found = []
    for path in folder.public_keys():
        caller = Caller(**document["nodes"].get(path.stem, {}))
        state = "never seen" if not caller.last else "online" if now - caller.last < ONLINE_SECONDS else "away"
        partition = path.stem.removeprefix("node-")
        named = {"partition": partition, "name": path.stem, "id": ids.get(path.stem, ("", ""))[0], "state": state}
        found.append({**named, **asdict(caller), "last_round": document["rounds"].get(named["id"])})
    return found


def table(found: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """Return the rows as lines of text."""
    head = ["part", "name", "id", "state", "last seen", "last round", "Flower", "address"]
    head += ["calls", "up MB", "down MB", "refused"]
    lines: list[Sequence[str]] = [head]
    for row in found:
        seen = f"{now - row['last']:.0f} s ago" if row["last"] else "-"
        moved = (f"{row['up'] / 1e6:.2f}", f"{row['down'] / 1e6:.2f}")
        used = numbered(row["last_round"]).removeprefix("round ") if row["last_round"] else "-"
        cells = (row["partition"], row["name"], row["id"] or "-", row["state"], seen, used, row["version"] or "-")
        lines.append((*cells, row["address"] or "-", str(row["calls"]), *moved, str(row["refused"])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main(arguments: Sequence[str] | None = None, program: str = "fedcomp status") -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog=program, description="Show what a running `fedcomp link` knows of its nodes.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder that `fedcomp link` runs from")
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    args = parser.parse_args(arguments)
    folder = Folder(args.folder.absolute())
    try:
        document = json.loads(folder.status.read_text(encoding="utf-8"))
        found, now = rows(folder, document, time.time()), time.time()
    except FileNotFoundError:
        return complain(f"no link has run from {folder.path}: fedcomp link {args.folder}", WRONG_INPUT)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return complain(f"{folder.status} cannot be read: {error}", WRONG_INPUT)
    if args.json:
        print(json.dumps({"time": document["time"], "nodes": found, "refused": document["refused"]}))
        return OK
    print("\n".join(table(found, now)))
    refused = ", ".join(f"{count} with {status}" for status, count in sorted(document["refused"].items())) or "none"
    online = sum(row["state"] == "online" for row in found)
    print(f"{online} of {len(found)} nodes online; refused at the port of the nodes: {refused}")
    if now - document["time"] > ONLINE_SECONDS:
        print(f"as of {timestamp(document['time'])}: the link is no longer running")
    return OK


if __name__ == "__main__":
    sys.exit(main())
