"""The part of the experiment ``sparsifiers`` about a small CNN whose clients train with momentum: Flower's quickstart.

Two convolutions and three layers, 62,006 parameters; ten clients make one pass a round by SGD with momentum 0.9. Each
row has the step size that did best on a validation split of the training images, over one grid for all: set
``cnn_tune=true`` to choose again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedcomp.experiments.experiment import Config, Option
from fedcomp.experiments.findings import Claim, Say, Table, mean
from fedcomp.experiments.grid import Cell, Measured, run_cells

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

TUNING_SEED: Final = 2**32

OPTIONS: Final = {
    "cnn_task": Option(
        "digits", "what the CNN learns: digits, or cifar10-subset", choices=("digits", "cifar10-subset")
    ),
    "cnn_rounds": Option(30, "rounds of the CNN's rows", least=1),
    "cnn_seeds": Option(2, "trainings of each of the CNN's rows", least=1, most=100),
    "cnn_tune": Option(False, "choose the CNN's step sizes anew on the validation split, and use those"),
}


@dataclass(frozen=True)
class Row:
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

    def cell(self, config: Config, lr: float, seed: int, *, tuning: bool = False) -> Cell:
        """Return one training, on the validation split if ``tuning``."""
        task, rounds = str(config.settings["cnn_task"]), int(config.settings["cnn_rounds"])
        return Cell(
            name=f"CNN on {task}, {self.label}, lr {lr:g}, {'tuning ' * tuning}seed {seed}",
            codec=self.codec,
            task=task,
            options={"model": "quickstart", "validation": tuning, "train_examples": EXAMPLES},
            clients=CLIENTS,
            rounds=rounds,
            seed=seed + tuning * TUNING_SEED,
            training={"lr": lr, "momentum": MOMENTUM, "batch_size": 16, "epochs": 1},
            every=1,
        )


def _top_k(density: float, values: str = "float32", **options: Any) -> dict[str, Any]:
    return {"id": "feedback", "codec": {"id": "topk", "density": density, "values": values}, **options}


ROWS: Final = (
    Row(DENSE, {"id": "identity"}, 0.06),
    Row(SPARSE, _top_k(0.01), 0.1),
    Row(HALVED, _top_k(0.02, "bf16"), 0.06),
    Row(CORRECTED, _top_k(0.01, momentum=0.9), 0.03),
)


def measure(config: Config, say: Say) -> tuple[Table, dict[str, float]]:
    """Train every row with its step size, chosen anew if asked; return the table and what the claims read."""
    workers = int(config.settings["workers"])
    rates = {row.label: row.lr for row in ROWS}
    if config.settings["cnn_tune"]:
        tried = {row.label: {lr: row.cell(config, lr, config.seed, tuning=True) for lr in RATES} for row in ROWS}
        found = run_cells([cell for cells in tried.values() for cell in cells.values()], say, workers)
        for label, options in tried.items():
            reached = {lr: found[cell.name].settled for lr, cell in options.items()}
            rates[label] = max(reached, key=reached.__getitem__)
    seeds = range(config.seed, config.seed + int(config.settings["cnn_seeds"]))
    cells = {row.label: [row.cell(config, rates[row.label], seed) for seed in seeds] for row in ROWS}
    done = run_cells([cell for group in cells.values() for cell in group], say, workers)
    groups = {label: [done[cell.name] for cell in group] for label, group in cells.items()}
    values = {f"CNN, {label}: points lost": _lost(label, groups) for label in groups}
    values |= {f"CNN, {label}: uplink ratio": _ratio(label, groups) for label in groups}
    return _table(config, rates, groups), values


def _lost(label: str, groups: Mapping[str, Sequence[Measured]]) -> float:
    return 100 * (mean(m.settled for m in groups[DENSE]) - mean(m.settled for m in groups[label]))


def _ratio(label: str, groups: Mapping[str, Sequence[Measured]]) -> float:
    return mean(m.uplink for m in groups[DENSE]) / mean(m.uplink for m in groups[label])


def _table(config: Config, rates: Mapping[str, float], groups: Mapping[str, Sequence[Measured]]) -> Table:
    rows: list[list[Any]] = [
        [
            label,
            rates[label],
            round(100 * mean(m.settled for m in group), 1),
            round(_lost(label, groups), 1),
            round(_ratio(label, groups), 1),
            round(mean(m.uplink for m in group) / CLIENTS / int(config.settings["cnn_rounds"])),
        ]
        for label, group in groups.items()
    ]
    return Table(
        f"A CNN whose clients train with momentum, on {config.settings['cnn_task']}",
        ("scheme", "lr", "test, %", "points lost", "uplink ratio", "bytes per frame"),
        rows,
        f"{CLIENTS} clients, one pass a round in steps of 16 images, momentum {MOMENTUM:g}. Step sizes "
        f"are the best of {', '.join(f'{lr:g}' for lr in RATES)} on a validation split. Test: the mean over the last "
        "five rounds and all seeds.",
    )


def claims(values: Mapping[str, float]) -> list[Claim]:
    """Fifty times fewer bytes, at little cost."""
    lost, ratio = (values[f"CNN, {HALVED}: {what}"] for what in ("points lost", "uplink ratio"))
    return [
        Claim(f"CNN, {HALVED}: times fewer uplink bytes", ratio, ">=", RATIO, "goal for a small CNN"),
        Claim(f"CNN, {HALVED}: points of accuracy lost against dense", lost, "<=", LOST, "goal for a small CNN"),
    ]
