"""Wrong clocks on this machine: single processes with a shifted wall clock.

Linux gives no process a wall clock of its own, and a library that stands between the two (libfaketime) does not get
along with how Python sleeps (measured). So Python's own clocks are put off, by a module that it runs at the start of a
process: that is what Flower's nodes sign with, and what a node compares with its SuperLink's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fedcomp.files import write

_SHIM: Final = Path(__file__).resolve().parent / "wrong_clock"


def set_clock(path: Path, seconds: float) -> None:
    """Put a clock forward, or back where ``seconds`` are below 0, against the machine's.

    Parameters
    ----------
    path : Path
        A file that processes with the :func:`environment` of it read, so that they notice when their clock is set.
    """
    write(path, f"{seconds!r}\n".encode(), mode=0o666)


def environment(path: Path) -> dict[str, str]:
    """Return the environment of Python processes whose wall clock is that of a file; monotonic clocks stay right."""
    search = filter(None, [str(_SHIM), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(search), "FEDCOMP_WRONG_CLOCK": str(path)}
