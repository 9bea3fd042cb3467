"""Runs a private system in processes of its own and kills them with SIGKILL at chosen points; then resumes.

``python private_kills.py FOLDER`` prints what the ledger held and what had left, as JSON. One process imports
everything and forks: a kill costs a run, not a start of Python.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from private_rows import small

from fedcomp.experiments import engines, serve
from fedcomp.privacy import journal
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import Mechanism

BUDGET = 4.5
"""Pays for four rounds at a noise multiplier of 2 and a delta of 1e-5, and not for five."""

SPEC = small("dp-fedavg", rounds=4, budget=BUDGET)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def calls(owner: Any, name: str, nth: int, *, before: Callable[[], None] | None = None, after: bool = False) -> None:
    """Die at the ``nth`` call of ``owner.name``: before it, or after it is done."""
    real, seen = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == nth and not after:
            (before or die)()
            die()
        out = real(*args, **kwargs)
        if seen[0] == nth:
            die()
        return out

    setattr(owner, name, wrapped)


def torn() -> None:
    """Die in the middle of the write of the second event."""
    real, seen = journal.Journal._put, [0]

    def half(self: journal.Journal, data: bytes, at: int) -> None:
        seen[0] += 1
        # Head and header, the event of round 1, the head, the event of round 2.
        if seen[0] == 4:
            real(self, data[: len(data) // 2], at)
            die()
        real(self, data, at)

    journal.Journal._put = half  # type: ignore[method-assign]


POINTS: dict[str, Callable[[], None]] = {
    "before the event": lambda: calls(PrivacyLedger, "record", 2),
    "within the event's line": torn,
    "between the event's line and the head": lambda: calls(journal.Journal, "_put", 4, after=True),
    "after the event": lambda: calls(PrivacyLedger, "record", 2, after=True),
    "after the noise": lambda: calls(Mechanism, "perturb", 2, after=True),
    "before the checkpoint": lambda: calls(serve.checkpoints.CheckpointFile, "save", 2),
    "after the checkpoint": lambda: calls(serve.checkpoints.CheckpointFile, "save", 2, after=True),
}


def tell_what_leaves(folder: Path) -> None:
    """Write one byte, and wait until it is on the disk, as soon as a noisy value exists."""
    real = Mechanism.perturb

    def told(self: Mechanism, *args: Any) -> Any:
        out = real(self, *args)
        handle = os.open(folder / "left", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(handle, b".")
        os.fsync(handle)
        os.close(handle)
        return out

    Mechanism.perturb = told  # type: ignore[method-assign]


def events(folder: Path) -> int:
    """Return how many whole events the ledger's file holds."""
    lines = (folder / "privacy.jsonl").read_bytes().split(b"\n")[2:-1]
    return len([json.loads(line) for line in lines])


def run(folder: Path, point: Callable[[], None] | None) -> int:
    """Run in a process of its own, until ``point`` kills it or to the end; return how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tell_what_leaves(folder)
            if point is not None:
                point()
            result = engines.run(SPEC, checkpoint=folder / "checkpoint")
            document = {"rounds": result.final.round, "ended": result.notes["ended"], **result.final.metrics}
            (folder / "result").write_text(json.dumps(document))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main(root: Path) -> dict[str, dict[str, Any]]:
    engines.run(small("dp-fedavg", rounds=1))  # imports and compiles what every child would
    found = {}
    for number, (name, point) in enumerate(POINTS.items()):
        folder = root / str(number)
        folder.mkdir()
        killed = run(folder, point)
        at_kill = {"events": events(folder), "left": (folder / "left").stat().st_size}
        code = run(folder, None)
        result = json.loads((folder / "result").read_text()) if code == 0 else {}
        at_end = {"events": events(folder), "left": (folder / "left").stat().st_size, "code": code, **result}
        found[name] = {"killed": killed, "at kill": at_kill, "at end": at_end}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
