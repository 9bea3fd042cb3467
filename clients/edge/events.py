"""The event log of a node, as text or JSON lines, together with the output of its processes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain(line: str) -> str:
    """Return ``line`` without the control sequences that colour it in a terminal."""
    return _COLOURS.sub("", line).rstrip()


def timestamp(seconds: float) -> str:
    """Return a time since the epoch as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class EventLog:
    """Writes events.

    Parameters
    ----------
    json : bool
        One JSON object per line: ``time``, ``level``, ``event``, ``message`` and what else belongs to the event.
    stream : TextIO
    """

    json: bool = False
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    def __call__(self, event: str, message: str, *, level: str = "info", **more: object) -> None:
        """Write one event; a message is one line."""
        message = " ".join(message.split())
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if self.json:
            line = json.dumps({"time": time, "level": level, "event": event, "message": message, **more})
        else:
            line = f"{time} {level.upper():7} {event}: {message}"
        print(line, file=self.stream, flush=True)

    def output(self, source: str, line: str) -> None:
        """Write what the process called ``source`` printed."""
        if self.json:
            self("output", line, source=source)
        else:
            print(f"{source} | {line}", file=self.stream, flush=True)
