"""Many simulated trainings, one after another or on several cores, with every finished one kept.

A cell is one training as plain data, so that it can be given to another process; :class:`Cell` one of
:mod:`fedcomp.experiments.central`. What it comes to depends on the cell alone: the number of workers changes the time
and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
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


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes
    ----------
    name : str
        Unique within the run.
    codec : mapping
        The codec's configuration, as :func:`fedcomp.codecs.get_codec` takes it.
    task, options : str, mapping
        The task and its options.
    clients, rounds, seed, training, every, server, everywhere :
        See :class:`fedcomp.experiments.central.Plan`.
    oracle : bool
        For ScaleCom: select from the mean of all clients.
    """

    name: str
    codec: Mapping[str, Any]
    task: str
    options: Mapping[str, Any]
    clients: int
    rounds: int
    seed: int
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 0
    oracle: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = False

    def run(self) -> Measured:
        """Train."""
        from fedcomp.codecs import get_codec
        from fedcomp.codecs.scalecom import ScaleCom
        from fedcomp.experiments.central import Led, Plan, Scheme, scheme_of, simulate  # brings torch
        from fedcomp.experiments.private_central import quiet
        from fedcomp.tasks import get_task

        codec = get_codec(dict(self.codec))
        scheme: Scheme = scheme_of(codec)
        if self.oracle and isinstance(codec, ScaleCom):
            scheme = Led(codec, oracle=True)
        task = get_task(self.task, **self.options)
        training, server = dict(self.training), dict(self.server)
        plan = Plan(task, self.clients, self.rounds, self.seed, training, self.every, server, self.everywhere)
        with quiet():
            out = simulate(plan, scheme)
        final = out.final
        return Measured(
            loss=final.loss,
            accuracy=final.accuracy,
            uplink=final.uplink,
            downlink=final.downlink,
            kept=out.kept,
            union=out.union,
            build_up=max((e.union / max(1, *e.kept) for e in out.exchanges), default=math.nan),
            overlap=out.overlap,
            diverged=out.diverged,
            settled=out.settled,
            stale=out.stale,
            points=[(float(p.round), p.loss, float(p.uplink)) for p in out.points],
        )

    def read(self, document: Mapping[str, Any]) -> Measured:
        """Read what was kept."""
        return Measured.from_json(document)


@dataclass(frozen=True)
class Measured:
    """What a cell came to; NaN for what was not measured.

    Attributes
    ----------
    loss, accuracy : float
        Of the final global model, on all training examples and on the test split. Infinite loss: it diverged.
    uplink, downlink : int
        Bytes of all frames of the run, see :class:`fedcomp.experiments.schemes.Exchange`.
    kept, union, overlap : float
        Means over rounds (and clients): compressible values a client sent, coordinates at which the mean is not zero,
        1 - q/k of the shared support.
    build_up : float
        The largest, over rounds, of the coordinates at which the mean is not zero, over the most values one client
        sent. On a shared support it is at most 1.
    diverged : int or None
        The round in which the updates were no longer finite.
    settled : float
        Accuracy on the test split, the mean over the last five evaluated rounds.
    stale : float
        Mean share of the server's step, squared, on coordinates of which nothing arrived in the round; NaN for FedAvg.
    points : list
        Round, loss and uplink bytes so far, of every evaluation.
    """

    loss: float
    accuracy: float
    uplink: int
    downlink: int
    kept: float
    union: float
    build_up: float
    overlap: float
    diverged: int | None
    settled: float
    stale: float
    points: Sequence[tuple[float, float, float]]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Measured:
        """Read what a kept cell holds."""
        values = {f.name: document[f.name] for f in fields(cls)}
        missing = dict.fromkeys(("accuracy", "kept", "union", "build_up", "overlap", "settled", "stale"), math.nan)
        values |= {name: value for name, value in missing.items() if values[name] is None}
        values["loss"] = math.inf if values["loss"] is None else values["loss"]
        values["points"] = [(x, math.inf if loss is None else loss, sent) for x, loss, sent in values["points"]]
        return cls(**values)


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
