"""Many simulated trainings, one after another or on several cores, with every finished one kept.

A cell is one training as plain data, so that it can be given to another process. What it comes to depends on the cell
alone: the number of workers changes the time and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

from fedcomp.experiments.findings import Say


class Outcome(Protocol):
    """What a cell comes to: a JSON-able dataclass, with the loss that is told while others wait."""

    @property
    def loss(self) -> float:
        """Infinite when the training diverged."""
        ...


Found = TypeVar("Found", bound=Outcome)
Gives = TypeVar("Gives", bound=Outcome, covariant=True)


class Runnable(Protocol[Gives]):
    """A cell."""

    @property
    def name(self) -> str:
        """Unique within the run."""
        ...

    def run(self) -> Gives:
        """Train."""
        ...

    def read(self, document: Mapping[str, Any]) -> Gives:
        """Return what was kept of :meth:`run`'s result, with NaN and infinities as None."""
        ...


def run_cells(cells: Sequence[Runnable[Found]], say: Say, workers: int = 1) -> dict[str, Found]:
    """Return what every cell came to, by name; finished cells are kept as they come.

    Parameters
    ----------
    workers : int
        Processes to use. 1 trains in this one.
    """
    say.expect(cell.name for cell in cells)
    for cell, measured in _run_all([cell for cell in cells if not say.has(cell.name)], workers):
        content = say.cell(cell.name, partial(asdict, measured))
        say(f"{cell.name}: " + (f"loss {content['loss']:.4f}" if math.isfinite(content["loss"]) else "diverged"))
    return {cell.name: cell.read(say.cell(cell.name, dict)) for cell in cells}


def _run_all(cells: Sequence[Runnable[Found]], workers: int) -> Iterable[tuple[Runnable[Found], Found]]:
    if workers <= 1 or len(cells) <= 1:
        return ((cell, cell.run()) for cell in cells)
    return _in_processes(cells, min(workers, len(cells)))


def _in_processes(cells: Sequence[Runnable[Found]], workers: int) -> Iterator[tuple[Runnable[Found], Found]]:
    # Spawned, not forked: a copy of a process that has threads of torch and Flower is not one that can be relied on.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_ignore_interrupt)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        yield from zip(cells, pool.map(_run, cells), strict=True)


def _run(cell: Runnable[Found]) -> Found:
    return cell.run()


def _ignore_interrupt() -> None:
    # Ctrl-C reaches all processes of a terminal; this one's parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
