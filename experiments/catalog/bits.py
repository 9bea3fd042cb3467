"""How few bits an update needs: top-k with low-bit values, and EDEN without memory, beside federated averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.catalog.quickstart import points
from fedcomp.experiments.experiment import TEXT, Config, Experiment, Option, no_rows
from fedcomp.experiments.findings import Findings, Say, mean, spread
from fedcomp.experiments.kit import (
    Records,
    Sweep,
    claim,
    curves,
    learning_line,
    numbers,
    over_seeds,
    repetitions,
    table,
    workers,
)
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rules import Int

if TYPE_CHECKING:
    from fedcomp.experiments.central import Outcome

TASK: Final = "digits"
FEDAVG: Final = "FedAvg"
LAST: Final = 5
"""Rounds over which accuracies are the mean."""

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings by which step sizes are chosen."""

OPTIONS = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": workers(),
    "task.partition": Option("dirichlet:0.5", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("256,256", TEXT, "widths of the model's hidden layers"),
    "steps": Option(
        "0.2,0.3,0.5,0.8",
        TEXT,
        "step sizes of the clients' SGD; each row takes the one that does best on a validation split",
        check=numbers,
    ),
    "batch_size": Option(64, Int(1), "examples per step; a client makes one pass over its data a round"),
}

_SHARED = ("task.", "batch_size")


def _topk(density: float, values: str) -> tuple[str, dict[str, Any]]:
    return "topk", {"feedback": True, "codec.density": density, "codec.values": values}


ROWS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    FEDAVG: ("fedavg", {}),
    **{
        f"top-k {100 * density:g} %, {values}": _topk(density, values)
        for density in (0.01, 0.03)
        for values in ("float32", "bf16", "q8", "q4", "q2")
    },
    "STC 1 %": ("stc", {"feedback": True, "codec.density": 0.01}),
    "STC 1 %, the rest in 8 bits": ("stc", {"feedback": True, "codec.density": 0.01, "codec.rest": "q8"}),
    **{
        f"EDEN, {bits} bit{'s' if bits > 1 else ''}": ("eden", {"feedback": False, "codec.bits": bits})
        for bits in (1, 2, 3, 4)
    },
    # What a sceptic would name: the other one-bit codec, with memory, and the other unbiased one of few bits.
    "EF-signSGD": ("efsignsgd", {"feedback": True}),
    "QSGD, 1 level": ("qsgd", {"feedback": False, "codec.levels": 1}),
    "QSGD, 7 levels": ("qsgd", {"feedback": False, "codec.levels": 7}),
}
"""System and settings by label, in order."""

ROTATED: Final[Mapping[str, tuple[float, int]]] = {
    "EDEN of top-k 1 %, 2 bits": (0.01, 2),
    "EDEN of top-k 1 %, 4 bits": (0.01, 4),
    "EDEN of top-k 3 %, 2 bits": (0.03, 2),
}
"""Density and bits by label, of rows that are trained without messages: see :mod:`fedcomp.experiments.eden_topk`."""

FEW: Final = "top-k 1 %, q2"
"""The row that the first claim is about."""

ONE_BIT: Final = "EDEN, 1 bit"
CURVES: Final = (
    FEDAVG,
    "top-k 1 %, float32",
    FEW,
    "top-k 3 %, q2",
    "STC 1 %",
    ONE_BIT,
    "EDEN, 4 bits",
    "QSGD, 1 level",
)


def spec_of(label: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row; on the validation split if ``tuning``."""
    system, settings = ROWS[label] if label in ROWS else _topk(ROTATED[label][0], "q2")
    every: dict[str, Any] = {"lr": lr, "evaluate_every": 1, "epochs": 1, "task.validation": tuning}
    made = config.spec(system, label, TASK, take=_SHARED, **settings, **every)
    return replace(made, seed=seed + tuning * TUNING_SEED)


def tune(label: str, lr: float, seed: int, *, config: Config) -> dict[str, Any]:
    """Train a row with a step size on the validation split, without messages: the same model, sooner."""
    out = _simulated(label, spec_of(label, lr, seed, config, tuning=True))
    return {"settled": out.settled if out.diverged is None else 0.0}


def _simulated(label: str, spec: RunSpec) -> Outcome:
    from fedcomp.codecs import ErrorFeedback
    from fedcomp.experiments.central import Plan, program_of, simulate
    from fedcomp.experiments.eden_topk import EdenTopK
    from fedcomp.flower.logs import quiet

    plan, system = Plan.of(spec)
    if label in ROTATED:
        density, bits = ROTATED[label]
        system = program_of(ErrorFeedback(EdenTopK(density, bits=bits)))
    with quiet():
        return simulate(plan, system)


def train(label: str, lr: float, seed: int, *, config: Config) -> dict[str, Any]:
    """Train a row through Flower's messages and return its accuracies and real bytes; of a row without, its frames'."""
    if label in ROTATED:
        out = _simulated(label, spec_of(label, lr, seed, config))
        made = [(float(p.round), 100 * p.accuracy, float(p.uplink)) for p in out.points[1:]]
        return {"points": made, "settled": 100 * out.settled, "uplink": out.uplink, "downlink": None, "wire": None}
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        result = inprocess.run(spec_of(label, lr, seed, config))
    return {
        "points": learning_line(result),
        "settled": points(result),
        "uplink": result.uplink_payload_bytes,
        "downlink": result.downlink_payload_bytes,
        "wire": result.uplink_wire_bytes + result.downlink_wire_bytes,
    }


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Choose every row's step size on a validation split, train it with several seeds, and compare with FedAvg."""
    processes, shared = int(config.settings["workers"]), {"config": config}
    every = (*ROWS, *ROTATED)
    steps = numbers(str(config.settings["steps"]))
    tried = Sweep(tune, {"label": list(every), "lr": list(steps), "seed": [config.seed]}, "tuning", shared)(
        say, processes
    )
    best = {label: max(group, key=lambda r: r.settled).lr for label, group in tried.groups("label").items()}
    cells = [{"label": label, "lr": best[label], "seed": seed} for label in every for seed in repetitions(config)]
    groups: dict[str, Records] = Sweep(train, cells, shared=shared)(say, processes).groups("label")
    dense = groups[FEDAVG]

    def lost(label: str) -> float:
        return mean(dense.each("settled")) - mean(groups[label].each("settled"))

    def times(label: str, field: str = "uplink") -> float:
        return mean(dense.each(field)) / mean(groups[label].each(field))

    clients = config.clients * config.rounds
    columns: dict[str, Any] = {
        "row": lambda label: label,
        "step size": lambda label: best[label],
        "test, %": lambda label: round(mean(groups[label].each("settled")), 1),
        "±": lambda label: round(spread(groups[label].each("settled")), 1),
        "points lost": lambda label: round(lost(label), 1),
        "uplink, bytes": lambda label: round(mean(groups[label].each("uplink")) / clients),
        "downlink, bytes": lambda label: (
            None if label in ROTATED else round(mean(groups[label].each("downlink")) / clients)
        ),
        "bits per weight": lambda label: round(32 / times(label), 3),
        "times fewer up": lambda label: round(times(label), 1),
        "both ways, as messages": lambda label: None if label in ROTATED else round(times(label, "wire"), 2),
    }
    found = {
        FEW: ("<= 1.0", ">= 150.0", "goal: a user's first row"),
        ONE_BIT: ("<= 1.0", ">= 25.0", "goal: without memory, so that any client may join a round"),
    }
    return Findings(
        tables=[
            table(
                "Bits and accuracy",
                columns,
                every,
                f"Means over seeds; test accuracy is the mean of the last {LAST} rounds, ± half the range over seeds. "
                "The step size is the one of the grid that did best on a validation split of the training images, for "
                "every row by itself. Bytes of payload are per client and round; bits per weight count everything that "
                "a client sends. The downlink is the whole model in every row; both ways counts serialised messages. "
                "Rows without these figures are trained without messages, with real frames.",
            )
        ],
        figures=[
            curves(
                "Test accuracy against uplink bytes",
                [groups[label] for label in CURVES],
                lambda group: over_seeds(group, 2),
                lambda group: over_seeds(group, 1),
                lambda group: group[0].label,
                x_label="uplink payload so far, all clients",
                y_label="test accuracy, %",
                log_x=True,
                x_bytes=True,
            )
        ],
        claims=[
            made
            for label, (few_points, many_times, source) in found.items()
            for made in (
                claim(f"{label}: points of accuracy lost against FedAvg", lost(label), few_points, source),
                claim(f"{label}: times fewer uplink payload bytes", times(label), many_times, source),
            )
        ],
        answer="; ".join(
            f"{label}: {times(label):.0f} times fewer uplink bytes, {lost(label):.1f} points lost" for label in found
        )
        + f" (against FedAvg, mean of the last {LAST} rounds and of {len(dense)} seeds, both tuned alike).",
    )


EXPERIMENT = Experiment(
    name="bits",
    question="How few bits of an update are enough, with memory and without?",
    # Every training has a step size of its own, which is found first.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=40,
    clients=10,
    minutes=8.0,
    quick=(
        "rounds=2",
        "clients=3",
        "seeds=1",
        "steps=0.3",
        "task.hidden=16",
    ),
    notes=(
        "The task of the quickstart: each client holds its own mixture of the ten digits (Dirichlet, alpha 0.5) and "
        "makes one pass over about 144 images a round. The model has 85 002 parameters. The test split has 355 images, "
        "so that one image makes 0.28 points.\n\n"
        "Top-k with error feedback sends the largest hundredth or three hundredths of the weights' changes: as they "
        "are, in 16 bits, in 127 or 7 levels of the largest magnitude of every 256 values, or as a sign and one of two "
        "magnitudes that are fitted to the values. Biases travel in 8 bits beside values of 8 bits and fewer, else as "
        "float32. STC sends signs and one magnitude.\n\n"
        "EDEN rotates the update at random and sends 1 to 4 bits per coordinate: unbiased, without memory. EF-signSGD "
        "and QSGD are the nearest rivals with and without memory. EDEN of top-k rotates the kept values and codes them "
        "in as many bits, with feedback: a rival that is tried here only."
    ),
)
