"""A node's condition, derived from the log of Flower's SuperNode and from received bytes, and written to the heartbeat
file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedcomp.clients.edge.events import timestamp

STALE: Final = 45.0
"""Seconds without a byte from the SuperLink after which it counts as unreachable: the SuperNode sends a heartbeat every
17 to 23 s, and nothing else while it trains."""

_LINE: Final = re.compile(r"(INFO|WARNING|ERROR)\s*: +(.*)")
_JOINED: Final = re.compile(r"SuperNode ID: (\d+)")


@dataclass
class Condition:
    """What is known of a node. Times are monotonic seconds, None for never.

    Attributes
    ----------
    state : str
        "starting", "running", "waiting" (for the next start), "stopped".
    node_id : int or None
    failing : bool
        The SuperNode's last attempt to reach the SuperLink failed.
    contact : float or None
        When the SuperLink last answered.
    message : float or None
        When the last reply was delivered.
    restarts : int
    error : str
    """

    state: str = "starting"
    node_id: int | None = None
    failing: bool = False
    contact: float | None = None
    message: float | None = None
    restarts: int = 0
    error: str = ""

    def line(self, text: str, now: float) -> None:
        """Take a line that the SuperNode printed, without colours."""
        found = _LINE.match(text)
        if found is None:
            return
        said = found[2]
        if said.startswith("Connection attempt failed, retrying"):
            self.failing = True
            return
        joined = _JOINED.match(said)
        if joined is not None:
            self.node_id = int(joined[1])
        if said.startswith("Sent successfully"):
            self.message = now
        if joined or said.startswith(("Connection successful after", "Received successfully", "Sent successfully")):
            self.failing, self.contact = False, now

    def received(self, when: float) -> None:
        """Take that bytes came from the SuperLink at ``when``.

        They do not count while the SuperNode says that it cannot reach it: a proxy may answer in its place.
        """
        if self.node_id is not None and not self.failing:
            self.contact = when if self.contact is None else max(self.contact, when)

    def started(self) -> None:
        """A new SuperNode has not joined yet."""
        self.state, self.node_id, self.failing = "starting", None, False

    def superlink(self, now: float) -> str:
        """Return "connected", "joining" or "unreachable"."""
        if self.failing:
            return "unreachable"
        if self.node_id is None:
            return "joining"
        return "connected" if self.contact is not None and now - self.contact <= STALE else "unreachable"

    def to_json(self, now: float, wall: float) -> dict[str, object]:
        """Return what the heartbeat file says; ``wall`` is the time of ``now`` since the epoch."""

        def said(when: float | None) -> str | None:
            return None if when is None else timestamp(wall - (now - when))

        return {
            "time": timestamp(wall),
            "state": self.state,
            "superlink": self.superlink(now),
            "node_id": self.node_id,
            "last_contact": said(self.contact),
            "last_message": said(self.message),
            "restarts": self.restarts,
            "last_error": self.error or None,
        }


def write_whole(path: Path, document: dict[str, object]) -> None:
    """Replace a file in one step: who reads it sees the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(new, path)
