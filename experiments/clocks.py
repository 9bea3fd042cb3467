"""Wrong clocks on this machine: what single processes believe the time is.

Linux gives no process a wall clock of its own, and a library that stands between the two (libfaketime) does not get
along with how Python sleeps (measured). So Python's own clocks are put off, by a module that it runs at the start of a
process: that is what Flower's nodes sign with, and what a node compares with its SuperLink's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fedcomp.experiments.files import replacing

_SHIM: Final = Path(__file__).resolve().parent / "wrong_clock"


class WrongClock:
    """The wall clock of all Python processes that are started with :attr:`environment`; monotonic clocks stay right.

    Parameters
    ----------
    path : Path
        A file that the processes read, so that they notice when their clock is set.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0.0)
        others = os.environ.get("PYTHONPATH")
        search = os.pathsep.join([str(_SHIM), *([others] if others else [])])
        self.environment = {"PYTHONPATH": search, "FEDCOMP_WRONG_CLOCK": str(path)}

    def set(self, seconds: float) -> None:
        """Put the clock forward, or back where ``seconds`` are below 0, against the machine's."""
        with replacing(self.path) as file:
            file.write(f"{seconds!r}\n".encode())
