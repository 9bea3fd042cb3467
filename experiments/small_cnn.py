"""The part of the experiment ``sparsifiers`` about a small CNN whose clients train with momentum: Flower's quickstart.

Two convolutions and three layers, 62,006 parameters; ten clients make one pass a round by SGD with momentum 0.9. Each
row has the step size that did best on a validation split of the training images, over one grid for all: set
``cnn_tune=true`` to choose again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fedcomp.experiments.findings import Claim, Table, mean
from fedcomp.experiments.kit import Say, Sweep, claim, repetitions, table
from fedcomp.experiments.options import Config, Option
from fedcomp.rules import Flag, Int, OneOf

CLIENTS: Final = 10
EXAMPLES: Final[int | None] = None
"""Training images; None for all."""

MOMENTUM: Final = 0.9
"""Of the clients' SGD, as in the quickstart."""

DENSE: Final = "dense"
SPARSE: Final = "top-k 1 % + EF"
CORRECTED: Final = "top-k 1 % + EF, momentum correction"
HALVED: Final = "top-k 2 % in bf16 + EF"
RATIO: Final = 50.0
LOST: Final = 1.5
"""Goal: so many times fewer bytes at a cost of so many points."""

RATES: Final = (0.01, 0.03, 0.06, 0.1, 0.15)
"""Step sizes that every row is tuned over."""

# Far from any usual seed, so that no training that is shown was tuned on.
TUNING_SEED: Final = 2**32

OPTIONS: Final = {
    "cnn_task": Option("digits", OneOf("digits", "cifar10-subset"), "what the CNN learns: digits, or cifar10-subset"),
    "cnn_rounds": Option(30, Int(1), "rounds of the CNN's rows"),
    "cnn_seeds": Option(2, Int(1, 100), "trainings of each of the CNN's rows"),
    "cnn_tune": Option(False, Flag(), "choose the CNN's step sizes again on the validation split, and use those"),
}


@dataclass(frozen=True)
class CnnRow:
    """One way to send the update.

    Attributes
    ----------
    label : str
    codec : mapping
        Its configuration.
    lr : float
        The step size chosen on the validation split.
    """

    label: str
    codec: Mapping[str, Any]
    lr: float


def train(label: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row with a step size; on the validation split if ``tuning``."""
    from fedcomp.experiments.central import Plan, measured
    from fedcomp.tasks import get_task

    task = str(config.settings["cnn_task"])
    plan = Plan(
        get_task(task, model="quickstart", validation=tuning, train_examples=EXAMPLES),
        CLIENTS,
        int(config.settings["cnn_rounds"]),
        seed + tuning * TUNING_SEED,
        {"lr": lr, "momentum": MOMENTUM, "batch_size": 16, "epochs": 1},
        1,
    )
    return measured(plan, next(row.codec for row in ROWS if row.label == label))


def _top_k(density: float, values: str = "float32", **options: Any) -> dict[str, Any]:
    return {"id": "feedback", "codec": {"id": "topk", "density": density, "values": values}, **options}


ROWS: Final = (
    CnnRow(DENSE, {"id": "identity"}, 0.06),
    CnnRow(SPARSE, _top_k(0.01), 0.1),
    CnnRow(HALVED, _top_k(0.02, "bf16"), 0.06),
    CnnRow(CORRECTED, _top_k(0.01, momentum=0.9), 0.03),
)


def measure(config: Config, say: Say) -> tuple[Table, list[Claim]]:
    """Train every row with its step size, chosen again if asked: fifty times fewer bytes, at little cost."""
    processes, shared = int(config.settings["workers"]), {"config": config}
    rates = {row.label: row.lr for row in ROWS}
    if config.settings["cnn_tune"]:
        axes = {"label": list(rates), "lr": RATES, "seed": [config.seed]}
        tried = Sweep(train, axes, "tuning the CNN", {**shared, "tuning": True})(say, processes)
        # By the mean of the last five rounds, since one test image decides a single one.
        rates = {label: max(group, key=lambda r: r.settled).lr for label, group in tried.groups("label").items()}
    seeds = repetitions(config, "cnn_seeds")
    cells = [{"label": label, "lr": lr, "seed": seed} for label, lr in rates.items() for seed in seeds]
    groups = Sweep(train, cells, "CNN", shared)(say, processes).groups("label")

    def lost(label: str) -> float:
        return 100 * (mean(groups[DENSE].each("settled")) - mean(groups[label].each("settled")))

    def ratio(label: str) -> float:
        return mean(groups[DENSE].each("uplink")) / mean(groups[label].each("uplink"))

    frames = CLIENTS * int(config.settings["cnn_rounds"])
    columns: dict[str, Any] = {
        "scheme": str,
        "lr": lambda label: rates[label],
        "test, %": lambda label: round(100 * mean(groups[label].each("settled")), 1),
        "points lost": lambda label: round(lost(label), 1),
        "uplink ratio": lambda label: round(ratio(label), 1),
        "bytes per frame": lambda label: round(mean(groups[label].each("uplink")) / frames),
    }
    goal = "goal for a small CNN"
    return table(
        f"A CNN whose clients train with momentum, on {config.settings['cnn_task']}",
        columns,
        groups,
        f"{CLIENTS} clients, one pass a round in steps of 16 images, momentum {MOMENTUM:g}. Step sizes "
        f"are the best of {', '.join(f'{lr:g}' for lr in RATES)} on a validation split. Test: the mean over the last "
        "five rounds and all seeds.",
    ), [
        claim(f"CNN, {HALVED}: times fewer uplink bytes", ratio(HALVED), f">= {RATIO}", goal),
        claim(f"CNN, {HALVED}: points of accuracy lost against dense", lost(HALVED), f"<= {LOST}", goal),
    ]
