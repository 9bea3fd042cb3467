"""README's first table: the lines that it offers, in accuracy after few and many rounds and in bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean, spread
from fedcomp.experiments.kit import Records, Sweep, claim, curves, learning_line, over_seeds, repetitions, table
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rules import Int, OneOf

FEDAVG: Final = "FedAvg"
SAFE: Final = "safe: EDEN, 1 bit"
BOTH: Final = "both ways: EDEN, 1 bit"
SMALLER: Final = "smaller: top-k 3 %, q2"

_TOPK: Final = {"feedback": True, "codec.density": 0.03, "codec.values": "q2"}
_HALF: Final = {"codec.density": 1.0, "codec.values": "bf16"}

ROWS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    FEDAVG: ("fedavg", {}),
    SAFE: ("eden", {"codec.bits": 1}),
    BOTH: ("eden", {"codec.bits": 1, "downlink": "eden", "downlink.bits": 1, "downlink.scale": "least"}),
    SMALLER: ("topk", _TOPK),
    f"{SMALLER}; 5 %, q4 down": (
        "topk",
        {**_TOPK, "downlink": "topk", "downlink.density": 0.05, "downlink.values": "q4"},
    ),
    # What a sceptic would name: half precision, which needs no codec of ours, and the other unbiased one of few bits.
    "bfloat16, both ways": (
        "topk",
        {**_HALF, "feedback": False, "downlink": "topk", "downlink.density": 1.0, "downlink.values": "bf16"},
    ),
    "QSGD, 7 levels": ("qsgd", {"codec.levels": 7}),
}
"""System and settings by label."""

TASKS: Final[Mapping[str, tuple[float, dict[str, Any]]]] = {
    "digits": (0.3, {"batch_size": 64}),
    "mnist": (0.2, {"batch_size": 32, "max_steps": 5, "task.model": "mlp", "task.hidden": "100"}),
    "cifar10-subset": (0.05, {"batch_size": 32, "max_steps": 5, "task.model": "mlp", "task.hidden": "32"}),
}
"""The middle one of the step sizes that are tried, and how else a client trains in a round, by task."""

COHORTS: Final[Mapping[str, tuple[int, dict[str, Any], str]]] = {
    "all": (1, {"task.partition": "dirichlet:0.5"}, "all {} clients"),
    "sampled": (3, {"task.partition": "shards:2", "fraction": 1 / 3}, "{} of {} unlike clients"),
}
"""Clients for each that trains in a round, settings, and what it is called, by cohort."""

MISSED: Final = frozenset({("mnist", "sampled")})
"""Tasks and cohorts where the claim about the default is a goal: three seeds missed it."""

SHORT: Final = 3
MIDDLE: Final = 8
EVERY: Final = 4
LAST: Final = 3
"""Evaluations, one every :data:`EVERY` rounds, of which the accuracy at the end is the mean."""

CHANCE: Final = 1.0
"""Points of accuracy on a validation split, within which two step sizes do equally well."""

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings by which step sizes are chosen."""


def _names(text: str, known: Mapping[str, Any]) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown name {name!r}{nearest(name, known)}")
    return names


OPTIONS = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "tasks": Option(",".join(TASKS), TEXT, "what is learnt", check=lambda text: _names(text, TASKS)),
    "cohorts": Option(",".join(COHORTS), TEXT, "who trains in a round", check=lambda text: _names(text, COHORTS)),
    "steps": Option(
        "0.5,1,2,4", TEXT, "step sizes that are tried on a validation split, in multiples of the task's", check=numbers
    ),
    "tune": Option(FEDAVG, OneOf(FEDAVG, "every row"), "whose step size is looked for; FedAvg's is every row's"),
    "workers": 1,
}


def spec_of(task: str, cohort: str, row: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row; on the validation split if ``tuning``."""
    (times, unlike, _), (system, settings) = COHORTS[cohort], ROWS[row]
    every: dict[str, Any] = {"lr": lr, "evaluate_every": EVERY, "task.validation": tuning}
    made = config.spec(system, row, task, **TASKS[task][1], **unlike, **settings, **every)
    return replace(made, clients=times * config.clients, seed=seed + tuning * TUNING_SEED)


def train(
    task: str, cohort: str, row: str, lr: float, seed: int, *, config: Config, tuning: bool = False
) -> dict[str, Any]:
    """Train a row through Flower's messages; return accuracies in percent and the bytes of all serialised messages."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    spec = spec_of(task, cohort, row, lr, seed, config, tuning=tuning)
    with quiet():
        result = inprocess.run(spec)
        # The first rounds of a longer training are the same, and not every round of it has to be evaluated.
        short = result if tuning else inprocess.run(replace(spec, rounds=min(SHORT, spec.rounds)))
    points = learning_line(result, wire=True)
    return {
        "short": 100 * short.accuracy,
        "middle": [accuracy for number, accuracy, _ in points if number <= MIDDLE][-1],
        "settled": mean([accuracy for _, accuracy, _ in points][-LAST:]),
        "points": points,
        "up": result.uplink_wire_bytes,
        "down": result.downlink_wire_bytes,
    }


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Choose step sizes on a validation split, train every row with several seeds, and compare with FedAvg."""
    from fedcomp.tasks import get_task

    tasks, cohorts = (
        _names(str(config.settings[key]), known) for key, known in (("tasks", TASKS), ("cohorts", COHORTS))
    )
    found = [_compare(task, cohort, config, say) for task in tasks for cohort in cohorts]
    return Findings(
        figures=[figure for each in found for figure in each.figures],
        tables=[table for each in found for table in each.tables],
        claims=[claim for each in found for claim in each.claims],
        answer=f"The default loses at most {', '.join(each.answer for each in found)}.",
        tasks=[get_task(task).record() for task in tasks],
    )


def _best(tried: Records) -> dict[str, float]:
    """Return each row's step size: FedAvg's, unless another one was tried and is better by more than chance."""
    reached = {(r.row, r.lr): 0.0 if math.isnan(r.settled) else r.settled for r in tried}
    steps = {row: max(group, key=lambda r: reached[row, r.lr]).lr for row, group in tried.groups("row").items()}
    usual = steps[FEDAVG]
    return {
        row: steps[row] if row in steps and reached[row, steps[row]] > reached[row, usual] + CHANCE else usual
        for row in ROWS
    }


def _compare(task: str, cohort: str, config: Config, say: Say) -> Findings:
    lr, processes = TASKS[task][0], int(config.settings["workers"])
    steps = [lr * times for times in numbers(str(config.settings["steps"]))]
    tuned = [FEDAVG] if config.settings["tune"] == FEDAVG else list(ROWS)
    axes: dict[str, list[Any]] = {"task": [task], "cohort": [cohort], "row": tuned, "lr": steps, "seed": [config.seed]}
    tried = Sweep(train, axes, "tuning", {"config": config, "tuning": True})(say, processes)
    best = _best(tried)
    cells = [
        {"task": task, "cohort": cohort, "row": row, "lr": best[row], "seed": seed}
        for row in ROWS
        for seed in repetitions(config)
    ]
    groups: dict[str, Records] = Sweep(train, cells, shared={"config": config})(say, processes).groups("row")

    def percent(row: str, field: str) -> str:
        return f"{mean(groups[row].each(field)):.1f}±{spread(groups[row].each(field)):.1f}"

    def validated(row: str, step: float) -> float:
        return round(tried.one(row=row, lr=step).settled, 1)

    def lost(row: str, field: str) -> float:
        return mean(groups[FEDAVG].each(field)) - mean(groups[row].each(field))

    def times(row: str, field: str) -> float:
        return mean(groups[FEDAVG].each(field)) / mean(groups[row].each(field))

    moments = {"short": min(SHORT, config.rounds), "middle": min(MIDDLE, config.rounds), "settled": config.rounds}
    where = f"{task}, {COHORTS[cohort][2].format(config.clients, COHORTS[cohort][0] * config.clients)}"
    columns: dict[str, Any] = {
        "row": lambda row: row,
        "step size": lambda row: best[row] if len(set(best.values())) > 1 else None,
        "up, MB": lambda row: round(mean(groups[row].each("up")) / 1e6, 2),
        "times fewer up": lambda row: round(times(row, "up"), 1),
        "down, MB": lambda row: round(mean(groups[row].each("down")) / 1e6, 2),
        "times fewer down": lambda row: round(times(row, "down"), 1),
        **{f"after {number}, %": partial(percent, field=field) for field, number in moments.items()},
        "points lost at most": lambda row: round(max(lost(row, field) for field in moments), 1),
    }
    worst = max(lost(SAFE, field) for field in moments)
    return Findings(
        tables=[
            table(
                where,
                columns,
                ROWS,
                "Bytes of all serialised messages, all clients and rounds. Accuracy on the test split, mean of seeds ± "
                f"half their range; that after {config.rounds} rounds is the mean of the last {LAST} evaluations, one "
                f"every {EVERY} rounds. FedAvg's step size, {best[FEDAVG]:g}, did best on a validation split of the "
                f"training examples; with tune='every row' a row has another if it does {CHANCE:g} point better.",
                optional=["step size"],
            ),
            table(
                f"{where}: tuning",
                {"row": lambda row: row, **{f"step {step:g}": partial(validated, step=step) for step in steps}},
                tuned,
                "Accuracy on the validation split at the end, %, one seed.",
            ),
        ],
        figures=[
            curves(
                f"Accuracy against bytes: {where}",
                groups.values(),
                lambda group: over_seeds(group, 2)[1:],  # what was sent before round 1 would fill half of the axis
                lambda group: over_seeds(group, 1)[1:],
                lambda group: group[0].row,
                x_label="bytes on the wire so far, both ways (logarithmic)",
                y_label="test accuracy, %",
                log_x=True,
                x_bytes=True,
            )
        ],
        claims=[
            claim(
                f"{where}: points that the default loses at most against FedAvg after "
                f"{', '.join(map(str, moments.values()))} rounds",
                worst,
                "<= 0.5",
                "goal: the line that everybody tries first loses nothing, however long the training",
                gate=(task, cohort) not in MISSED,
            )
        ],
        answer=f"{worst:.1f} points at {times(SAFE, 'up'):.0f} times fewer bytes up ({where})",
    )


EXPERIMENT = Experiment(
    name="readme",
    question="Which line is the right first one, in few rounds and in many, with all clients and with a few of them?",
    # Every task and cohort has a step size of its own, which is found first.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=40,
    clients=10,
    minutes=15.0,
    quick=("rounds=4", "clients=2", "seeds=1", "steps=1", "tasks=digits"),
    notes=(
        "Three lines by situation. Safe: EDEN rotates the update at random and sends one bit a coordinate, unbiased, "
        "without memory. Both ways: the server does the same, scaled for the least squared error. Smaller: the largest "
        "3 % of the changes in two bits a value, with error feedback; the server's 5 % in four bits. bfloat16 both "
        "ways and QSGD are what a sceptic would name. float16 is refused as a downlink: it can overflow.\n\n"
        "All clients: each of ten holds its own mixture of the classes (Dirichlet, alpha 0.5), and all train in every "
        "round. Sampled: each of thirty holds two pieces of the examples sorted by label, and ten train in a round; a "
        "client that is asked in a third of the rounds delivers late what it remembers.\n\n"
        "digits: 1,797 images, an MLP of 85,002 parameters, one pass in batches of 64. mnist: an MLP of 79,510, five "
        "batches of 32. cifar10-subset: an MLP of 98,666, five batches of 32. "
        "Without the files of the last two the embedded digits stand in, enlarged: same bytes, other accuracies."
    ),
)
