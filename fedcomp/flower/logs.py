"""The logger of both halves: a child of Flower's, so that its lines appear beside Flower's without configuration.

Python shows a library's INFO lines only when the application configures logging, which Flower's apps do not: Flower
gives its logger "flwr" a handler at INFO instead. What is logged under that name goes where Flower's lines go (console,
log file, ``flwr log``), follows ``FLWR_LOG_LEVEL``, and can be set apart as ``logging.getLogger("flwr.fedcomp")``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from threading import get_ident
from typing import Final

from fedcomp.logs import log

flowers: Final = logging.getLogger("flwr")
__all__ = ["flowers", "log", "quiet", "unsampled"]

_SAMPLED: Final = "configure_train: Sampled"
"""The start of Flower's log line with the number of sampled nodes."""


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
