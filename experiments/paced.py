"""Trainings on a virtual clock with clients of different speeds: seconds, accuracy, bytes, and whose updates counted.

A client's pace is log-normal over the clients and, less so, over its messages. The seconds are the clock's of the
in-process engine, which the strategies themselves wait by; training and bytes are real.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcomp.experiments.findings import Curves, Table, mean
from fedcomp.experiments.kit import Record, Records, curves, repetitions, table
from fedcomp.experiments.options import numbers
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import TUNING_SEED, Found
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.options import Config
    from fedcomp.flower.faults import Delivery
    from fedcomp.strategies.overlap import Overlapping


@dataclass(frozen=True)
class Pace:
    """Seconds per training message, one on average over clients and messages.

    Attributes
    ----------
    seed : int
    clients : int
    variation, jitter : float
        Coefficients of variation over clients, and over the messages of one client.
    """

    seed: int
    clients: int
    variation: float = 1.0
    jitter: float = 0.3

    def of(self, partition: int) -> float:
        """Return a client's mean seconds."""
        from fedcomp.timing.pipeline import log_normal

        return float(log_normal(1.0, self.variation, self.clients, Key(self.seed, "pace/clients"))[partition])

    def __call__(self, delivery: Delivery) -> float:
        """Return the seconds of one message."""
        from fedcomp.timing.pipeline import log_normal

        if not delivery.message_type.startswith("train"):
            return 0.0
        key = Key(self.seed, "pace/messages", delivery.exchange, delivery.partition)
        return self.of(delivery.partition) * float(log_normal(1.0, self.jitter, 1, key)[0])


class _TimeIsUp(Exception):
    """Ends a training."""


def train(
    strategy: Overlapping, config: Config, lr: float, seed: int, *, tuning: bool, jitter: float, **settings: Any
) -> dict[str, Any]:
    """Train on digits for the ``seconds`` of the configuration, with clients whose paces have its ``variation``.

    Parameters
    ----------
    lr : float
        Step size of the clients.
    tuning : bool
        With other draws, and judged by the validation split.
    jitter : float
        As of :class:`Pace`.
    **settings
        How clients train.

    Returns
    -------
    dict
        ``line`` of (second, test accuracy in percent), about 120 points; ``settled``, the mean of the last five;
        ``uplink`` bytes of payload, ``steps`` of the model, and ``shares``: updates used of each client, from the
        quickest to the slowest.
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

    seconds = float(config.settings["seconds"])
    seed += tuning * TUNING_SEED
    asked = {"task.hidden": "64", "task.validation": tuning, "lr": lr, **settings}
    spec = RunSpec("fedavg", task="digits", clients=config.clients, seed=seed, settings=asked)
    pace = Pace(seed, config.clients, float(config.settings["variation"]), jitter)
    resolved = get_system("fedavg").resolve(spec.settings)
    task = get_task(spec.task, **below(resolved, TASK_PREFIX))
    model = task.model(spec.seed)
    start = ArrayRecord({name: Array(array) for name, array in to_arrays(model).items()})
    line: list[tuple[float, float]] = []
    with quiet(), InProcessGrid(app, spec.clients, seed=spec.seed, compute_seconds=pace) as inner:
        grid = MeteredGrid(inner)

        def keep(server_round: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
            if not line or inner.clock >= line[-1][0] + seconds / 120 or inner.clock >= seconds:
                load_arrays(model, {name: array.numpy() for name, array in arrays.items()}, cast=True)
                line.append((inner.clock, 100.0 * float(task.evaluate(model, task.test)[task.metric])))
            if inner.clock >= seconds:
                raise _TimeIsUp

        with contextlib.suppress(_TimeIsUp):
            # More rounds than any training has: seconds end it.
            fit(strategy, grid, start, 10**6, timeout=None, train_config=client_config(spec, resolved), on_round=keep)
        used: Counter[int] = Counter()
        for report in strategy.reports.values():
            used.update(node for node in report.section(Overlap).staleness if node not in report.refused)
        shares = [used[node] for node in grid.get_node_ids()]
        uplink = grid.ledger.total("payload", direction="up")
    return {
        "line": line,
        "settled": mean(point[1] for point in line[-5:]),
        "uplink": uplink,
        "steps": strategy.steps,
        "shares": [shares[partition] for partition in sorted(range(config.clients), key=pace.of)],
    }


def seconds_to(line: Sequence[Sequence[float]], target: float, width: int = 3) -> float:
    """Return when the running mean of the accuracies of ``width`` points reaches ``target``; infinity when never."""
    for i in range(width - 1, len(line)):
        if sum(point[1] for point in line[i - width + 1 : i + 1]) / width >= target:
            return float(line[i][0])
    return float("inf")


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
        Median seconds of these to the target; infinite where most never get there.
    target : float
    """

    best: dict[str, float]
    groups: dict[str, Records]
    sooner: dict[str, float]
    target: float

    def table(self, columns: Mapping[str, Callable[[str], Any]], caption: str) -> Table:
        """Return what each row came to; ``columns`` are functions of a row that go after those of every such table."""
        shown: dict[str, Callable[[str], Any]] = {
            "row": str,
            "step size": lambda row: self.best[row],
            f"seconds to {self.target:g} %, median": lambda row: shown_seconds(self.sooner[row]),
            "test, %": lambda row: round(mean(self.groups[row].each("settled")), 1),
            "steps of the model": lambda row: round(mean(self.groups[row].each("steps"))),
        }
        chosen = (
            " Means over seeds; test accuracy is the mean of the last five points. The step size is the one of the "
            "grid that is soonest at the target on a validation split, for every row by itself."
        )
        return table("Against the simulated clock", {**shown, **columns}, self.best, caption + chosen)

    def curve(self) -> Curves:
        """Return accuracy against the clock."""
        return curves(
            "Test accuracy against the simulated clock",
            [(row, point) for row, group in self.groups.items() for point in group[0].line],
            lambda pair: pair[1][0],
            lambda pair: pair[1][1],
            lambda pair: pair[0],
            x_label="simulated seconds, first seed",
            y_label="test accuracy, %",
        )


def timed(run: Callable[..., Mapping[str, Any]], rows: Iterable[str], found: Found) -> Timed:
    """Choose each row's step size of the setting ``steps`` on a validation split, and train with it.

    Parameters
    ----------
    run : callable
        ``(row, lr, seed, config=, tuning=)``, a function of a module, returns a training's ``line`` and ``settled``.
    """
    config, target = found.config, float(found.config.settings["target"])
    tuned = {"row": list(rows), "lr": numbers(str(config.settings["steps"])), "seed": [config.seed]}
    tried = found.sweep(run, tuned, "tuning", config=config, tuning=True)

    def merit(record: Record) -> tuple[float, float]:
        # Soonest at the target; among those that never are, the most accurate.
        return seconds_to(record.line, target), -record.settled

    best = {row: min(group, key=merit).lr for row, group in tried.groups("row").items()}
    cells = [{"row": row, "lr": best[row], "seed": seed} for row in best for seed in repetitions(config)]
    groups = found.sweep(run, cells, "clock", config=config).groups("row")
    sooner = {}
    for row, group in groups.items():
        times = sorted(seconds_to(line, target) for line in group.each("line"))
        sooner[row] = times[len(times) // 2]
    return Timed(best, groups, sooner, target)
