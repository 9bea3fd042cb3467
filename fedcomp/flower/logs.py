"""The logger of both halves: a child of Flower's, so that its lines appear beside Flower's without configuration.

Python shows a library's INFO lines only when the application configures logging, which Flower's apps do not: Flower
gives its logger "flwr" a handler at INFO instead. What is logged under that name goes where Flower's lines go (console,
log file, ``flwr log``), follows ``FLWR_LOG_LEVEL``, and can be set apart as ``logging.getLogger("flwr.fedcomp")``.
"""

from __future__ import annotations

import contextlib
import logging
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Final

from fedcomp.logs import log

flowers: Final = logging.getLogger("flwr")
__all__ = ["brief", "flowers", "log", "quiet", "unsampled"]

_FRAMES: Final = 3
"""Frames of the user's code that a short traceback has at most."""

_HERE: Final = Path(__file__).resolve().parents[1]

_OTHERS: Final = tuple(
    f"{folder}/"
    for folder in (
        _HERE,
        # In a checkout they are beside this package, not in it.
        *(_HERE.parent / layer for layer in ("strategies", "clients", "coding", "experiments")),
        *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Folders of code that is not the user's."""

_SAMPLED: Final = "configure_train: Sampled"
"""The start of Flower's log line with the number of sampled nodes."""


def brief(error: BaseException) -> str:
    """Return what an app raised in a few lines: type and text, what caused it, and the last frames of the user's code.

    Where no frame is the user's it is the last one of all. The whole traceback belongs beside it, at DEBUG.
    """
    lines = [f"{type(error).__name__}: {error}"]
    if (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        lines.append(f"caused by {type(cause).__name__}: {cause}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not f"{Path(frame.filename).resolve()}".startswith(_OTHERS)]
    lines += [f"at {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in own[-_FRAMES:] or frames[-1:]]
    return "\n    ".join(lines)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Flower's two lines a round, and its warning that nothing is evaluated, out of the output of many runs."""
    import flwr.serverapp  # noqa: F401  # sets the level of its logger when it is imported

    before = flowers.level
    flowers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        flowers.setLevel(before)


@contextlib.contextmanager
def unsampled() -> Iterator[None]:
    """Keep Flower's line of how many nodes were sampled out of the log, where other nodes are asked than these."""
    # The logger is the whole process's: lines of a strategy in another thread stay.
    thread = get_ident()

    def other(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(_SAMPLED)

    flowers.addFilter(other)
    try:
        yield
    finally:
        flowers.removeFilter(other)
