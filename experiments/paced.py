"""Trainings on the virtual clock whose clients have a pace each: seconds, accuracy, bytes, and whose updates were used.

A client's pace is log-normal over the clients and, less so, over its messages. The seconds are the clock's of the
in-process engine, which the strategies themselves wait by; training and bytes are real.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.findings import Say
from fedcomp.experiments.kit import Record, Records, Sweep, repetitions
from fedcomp.experiments.options import Config, numbers
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.spec import RunSpec
    from fedcomp.flower.faults import Delivery
    from fedcomp.strategies.overlap import Overlapping

POINTS: Final = 120
"""Evaluations of a training, spread evenly over its seconds."""

ROUNDS: Final = 1_000_000
"""More than any training has: seconds end it."""


@dataclass(frozen=True)
class Pace:
    """Seconds per training message.

    Attributes
    ----------
    seed : int
    clients : int
    mean : float
        Over clients and messages.
    variation, jitter : float
        Coefficients of variation over clients, and over the messages of one client.
    """

    seed: int
    clients: int
    mean: float = 1.0
    variation: float = 1.0
    jitter: float = 0.3

    def of(self, partition: int) -> float:
        """Return a client's mean seconds."""
        from fedcomp.timing.pipeline import log_normal

        drawn = log_normal(self.mean, self.variation, self.clients, Key(self.seed, "pace/clients"))
        return float(drawn[partition])

    def __call__(self, delivery: Delivery) -> float:
        """Return the seconds of one message."""
        from fedcomp.timing.pipeline import log_normal

        if not delivery.message_type.startswith("train"):
            return 0.0
        key = Key(self.seed, "pace/messages", delivery.exchange, delivery.partition)
        return self.of(delivery.partition) * float(log_normal(1.0, self.jitter, 1, key)[0])


class _TimeIsUp(Exception):
    """Ends a training."""


def train(strategy: Overlapping, spec: RunSpec, pace: Callable[[Delivery], float], seconds: float) -> dict[str, Any]:
    """Train for so many simulated seconds.

    Parameters
    ----------
    strategy : Overlapping
    spec : RunSpec
        Task, clients, seed and how clients train; its system and rounds count for nothing.
    pace : callable
        Seconds of a message.
    seconds : float

    Returns
    -------
    dict
        ``line`` of (second, test accuracy in percent), ``uplink`` bytes of payload, ``steps`` of the model, and
        ``shares``: updates used of each client, by partition.
    """
    from flwr.app import Array, ArrayRecord

    from fedcomp.clients.app import app
    from fedcomp.experiments.serve import client_config
    from fedcomp.experiments.systems import get_system
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import RoundOutcome, fit
    from fedcomp.strategies.overlap import Overlap
    from fedcomp.strategies.parts import TASK_PREFIX, below
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import load_arrays, to_arrays

    settings = get_system("fedavg").resolve(spec.settings)
    task = get_task(spec.task, **below(settings, TASK_PREFIX))
    model = task.model(spec.seed)
    start = ArrayRecord({name: Array(array) for name, array in to_arrays(model).items()})
    line: list[tuple[float, float]] = []
    with quiet(), InProcessGrid(app, spec.clients, seed=spec.seed, compute_seconds=pace) as inner:
        grid = MeteredGrid(inner)

        def keep(server_round: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
            if not line or inner.clock >= line[-1][0] + seconds / POINTS or inner.clock >= seconds:
                load_arrays(model, {name: array.numpy() for name, array in arrays.items()}, cast=True)
                line.append((inner.clock, 100.0 * float(task.evaluate(model, task.test)[task.metric])))
            if inner.clock >= seconds:
                raise _TimeIsUp

        config = client_config(spec, settings)
        with contextlib.suppress(_TimeIsUp):
            fit(strategy, grid, start, ROUNDS, timeout=None, train_config=config, on_round=keep)
        used: Counter[int] = Counter()
        for report in strategy.reports.values():
            used.update(node for node in report.section(Overlap).staleness if node not in report.refused)
        shares = [used[node] for node in grid.get_node_ids()]
        uplink = grid.ledger.total("payload", direction="up")
    return {"line": line, "uplink": uplink, "steps": strategy.steps, "shares": shares}


def seconds_to(line: Sequence[Sequence[float]], target: float, width: int = 3) -> float:
    """Return when the running mean of the accuracies of ``width`` points reaches ``target``; infinity when never."""
    for i in range(width - 1, len(line)):
        if sum(point[1] for point in line[i - width + 1 : i + 1]) / width >= target:
            return float(line[i][0])
    return float("inf")


def median_seconds(lines: Sequence[Sequence[Sequence[float]]], target: float) -> float:
    """Return the median over trainings of :func:`seconds_to`: infinity where most never get there."""
    return sorted(seconds_to(line, target) for line in lines)[len(lines) // 2]


def shown_seconds(value: float) -> str | float:
    """Return seconds as a table shows them."""
    return "never" if value == float("inf") else round(value, 1)


@dataclass(frozen=True)
class Timed:
    """Trainings of some rows against the clock, by row.

    Attributes
    ----------
    best : dict of str to float
        The step size with which a row was soonest at the target on the validation split.
    groups : dict of str to Records
        Its trainings at that one.
    sooner : dict of str to float
        Median seconds of these to the target.
    """

    best: dict[str, float]
    groups: dict[str, Records]
    sooner: dict[str, float]


def timed(run: Callable[..., Mapping[str, Any]], rows: Iterable[str], config: Config, say: Say) -> Timed:
    """Choose each row's step size of the setting ``steps`` on a validation split, and train with it.

    Parameters
    ----------
    run : callable
        ``(row, lr, seed, config=, tuning=)``, a function of a module, returns a training's ``line`` and ``settled``.
    """
    processes, target = int(config.settings["workers"]), float(config.settings["target"])
    steps = numbers(str(config.settings["steps"]))
    tuned: dict[str, Any] = {"row": list(rows), "lr": list(steps), "seed": [config.seed]}
    tried = Sweep(run, tuned, "tuning", {"config": config, "tuning": True})(say, processes)

    def merit(record: Record) -> tuple[float, float]:
        # Soonest at the target; among those that never are, the most accurate.
        return seconds_to(record.line, target), -record.settled

    best = {row: min(group, key=merit).lr for row, group in tried.groups("row").items()}
    cells = [{"row": row, "lr": best[row], "seed": seed} for row in best for seed in repetitions(config)]
    groups: dict[str, Records] = Sweep(run, cells, "clock", {"config": config})(say, processes).groups("row")
    return Timed(best, groups, {row: median_seconds(group.each("line"), target) for row, group in groups.items()})


def evenness(shares: Sequence[int]) -> float:
    """Return Jain's index of what clients contribute: 1 where all contribute alike, 1/n where one does alone."""
    total = sum(shares)
    return total**2 / (len(shares) * sum(share**2 for share in shares)) if total else 0.0
