"""The suggested lines of the README on three tasks and two cohorts: accuracy after few and many rounds, and bytes on
the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Curves, Table, mean, spread
from fedcomp.experiments.kit import Records, curves, learning_line, over_seeds, repetitions, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.spec import RunSpec, parse_settings
from fedcomp.experiments.tables import TUNING_SEED, Found

FEDAVG: Final = "FedAvg"
SAFE: Final = "safe: EDEN, 1 bit"

_TOPK: Final = "topk feedback=true codec.density=0.03 codec.values=q2"

ROWS: Final[Mapping[str, str]] = {
    FEDAVG: "fedavg",
    SAFE: "eden codec.bits=1",
    "both ways: EDEN, 1 bit": "eden codec.bits=1 downlink=eden downlink.bits=1 downlink.scale=least",
    "smaller: top-k 3 %, q2": _TOPK,
    "smaller: top-k 3 %, q2; 5 %, q4 down": f"{_TOPK} downlink=topk downlink.density=0.05 downlink.values=q4",
    "smallest: top-k 1 %, q2": "topk feedback=true codec.density=0.01 codec.values=q2",
    "smallest: Auto, 0.1 bits": "auto codec.bits=0.1 codec.feedback=true",
    # The obvious rivals: half precision, which needs no codec, and the other unbiased codec with few bits.
    "bfloat16, both ways": (
        "topk codec.density=1.0 codec.values=bf16 feedback=false "
        "downlink=topk downlink.density=1.0 downlink.values=bf16"
    ),
    "QSGD, 7 levels": "qsgd codec.levels=7",
}
"""System and settings by label."""

TASKS: Final[Mapping[str, tuple[float, str]]] = {
    "digits": (0.3, "batch_size=64"),
    "mnist": (0.2, "batch_size=32 max_steps=5 task.model=mlp task.hidden=100"),
    "cifar10-subset": (0.05, "batch_size=32 max_steps=5 task.model=mlp task.hidden=32"),
}
"""By task, the middle of the tried step sizes and the other training settings of a client."""

COHORTS: Final[Mapping[str, tuple[int, str, str]]] = {
    "all": (1, "task.partition=dirichlet:0.5", "all {} clients"),
    "sampled": (3, f"task.partition=shards:2 fraction={1 / 3}", "{} of {} unlike clients"),
}
"""By cohort, the number of clients for each that trains in a round, the settings, and the label."""

SHORT: Final = 3
MIDDLE: Final = 8
EVERY: Final = 4
LAST: Final = 3
"""The final accuracy is the mean of this number of evaluations, one every :data:`EVERY` rounds."""

CHANCE: Final = 1.0
"""Two step sizes count as equal within this difference of accuracy on a validation split, in points."""


def names(text: str, known: Mapping[str, Any]) -> list[str]:
    """Return the names in a comma-separated text.

    Raises
    ------
    ConfigError
        If one is not ``known``.
    """
    found = [word.strip() for word in text.split(",")]
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown name {name!r}{nearest(name, known)}")
    return found


def where(task: str, cohort: str, config: Config) -> str:
    """Return the label of a task and cohort in claims and titles."""
    times, _, called = COHORTS[cohort]
    return f"{task}, {called.format(config.clients, times * config.clients)}"


def moments(config: Config) -> dict[str, int]:
    """Return the rounds after which accuracies are compared, by field in the record of a training."""
    return {"short": min(SHORT, config.rounds), "middle": min(MIDDLE, config.rounds), "settled": config.rounds}


def lost(config: Config) -> str:
    """Return the quantity in the claim."""
    after = ", ".join(map(str, moments(config).values()))
    return f"points that the default loses at most against FedAvg after {after} rounds"


def spec_of(task: str, cohort: str, row: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row, on the validation split if ``tuning``."""
    times, unlike, _ = COHORTS[cohort]
    system, _, own = ROWS[row].partition(" ")
    settings = parse_settings(f"{TASKS[task][1]} {unlike} {own} evaluate_every={EVERY}")
    settings |= {"lr": lr, "task.validation": tuning}
    seed += tuning * TUNING_SEED
    return RunSpec(system, row, task, config.engine, config.rounds, times * config.clients, seed, settings)


def train(
    task: str, cohort: str, row: str, lr: float, seed: int, *, config: Config, tuning: bool = False
) -> dict[str, Any]:
    """Train a row through Flower's messages; return accuracies in percent and the bytes of all serialised messages."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    spec = spec_of(task, cohort, row, lr, seed, config, tuning=tuning)
    with quiet():
        result = inprocess.run(spec)
        # The first rounds of a longer training are the same, and it need not be evaluated in every round.
        short = result if tuning else inprocess.run(replace(spec, rounds=min(SHORT, spec.rounds)))
    points = [(number, accuracy, sent) for number, accuracy, _, _, sent in learning_line(result.rounds)]
    return {
        "short": 100 * short.accuracy,
        "middle": [accuracy for number, accuracy, _ in points if number <= MIDDLE][-1],
        "settled": mean([accuracy for _, accuracy, _ in points][-LAST:]),
        "points": points,
        "up": result.uplink_wire_bytes,
        "down": result.downlink_wire_bytes,
    }


def compare(found: Found) -> Studied:
    """Choose step sizes on a validation split, train every row with several seeds, and compare the rows with FedAvg."""
    from fedcomp.tasks import get_task

    config = found.config
    tasks, cohorts = (
        names(str(config.settings[key]), known) for key, known in (("tasks", TASKS), ("cohorts", COHORTS))
    )
    quantities: dict[Any, Any] = {}
    tables, figures = [], []
    for task in tasks:
        for cohort in cohorts:
            place = where(task, cohort, config)
            table, figure, quantities[place, lost(config)], quantities[place, "times fewer up"] = _at(
                task, cohort, place, found
            )
            tables.append(table)
            figures.append(figure)
    return Studied(quantities, tables, figures, [get_task(task).record() for task in tasks])


def _best(tried: Records) -> float:
    """Return FedAvg's step size, which all rows have: the smallest of those that end alike, for the others may still
    swing in the first rounds, in which rows are compared as well."""
    reached = {r.lr: 0.0 if math.isnan(r.settled) else r.settled for r in tried}
    return min(lr for lr, settled in reached.items() if settled >= max(reached.values()) - CHANCE)


def _at(task: str, cohort: str, place: str, found: Found) -> tuple[Table, Curves, float, float]:
    """Compare the rows of one task and cohort; also return the default's loss of accuracy and its ratio of uplink
    bytes."""
    config = found.config
    here: dict[str, Any] = {"task": [task], "cohort": [cohort]}
    steps = [TASKS[task][0] * times for times in numbers(str(config.settings["steps"]))]
    axes = {**here, "row": [FEDAVG], "lr": steps, "seed": [config.seed]}
    lr = _best(found.sweep(train, axes, "tuning", config=config, tuning=True))
    cells = [
        {"task": task, "cohort": cohort, "row": row, "lr": lr, "seed": seed}
        for row in ROWS
        for seed in repetitions(config)
    ]
    groups: dict[str, Records] = found.sweep(train, cells, config=config).groups("row")

    def of(row: str, field: str) -> float:
        return mean(groups[row].each(field))

    def times(row: str, field: str) -> float:
        return of(FEDAVG, field) / of(row, field)

    def most(row: str) -> float:
        return max(of(FEDAVG, field) - of(row, field) for field in after)

    def percent(row: str, field: str) -> str:
        return f"{of(row, field):.1f}±{spread(groups[row].each(field)):.1f}"

    after = moments(config)
    columns: dict[str, Any] = {
        "row": lambda row: row,
        "up, MB": lambda row: round(of(row, "up") / 1e6, 2),
        "times fewer up": lambda row: round(times(row, "up"), 1),
        "down, MB": lambda row: round(of(row, "down") / 1e6, 2),
        "times fewer down": lambda row: round(times(row, "down"), 1),
        **{f"after {number}, %": partial(percent, field=field) for field, number in after.items()},
        "points lost at most": lambda row: round(most(row), 1),
    }
    caption = (
        "Bytes of all serialised messages, all clients and rounds. Accuracy is on the test split, mean of seeds ± half "
        f"their range; after {config.rounds} rounds is the mean of the last {LAST} evaluations, one every {EVERY} "
        f"rounds. FedAvg's step size, {lr:g}, did best on a validation split of the training examples."
    )
    figure = curves(
        f"Accuracy against bytes: {place}",
        groups.values(),
        lambda group: over_seeds(group, 2)[1:],  # the traffic before round 1 would fill half of the axis
        lambda group: over_seeds(group, 1)[1:],
        lambda group: group[0].row,
        x_label="bytes on the wire so far, both ways (logarithmic)",
        y_label="test accuracy, %",
        log_x=True,
        x_bytes=True,
    )
    return table(place, columns, ROWS, caption), figure, most(SAFE), times(SAFE, "up")
