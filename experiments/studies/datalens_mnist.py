"""A generator of MNIST trained on noisy votes, compared with other methods at the same epsilon."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Pictures, Table, largest, mean, spread
from fedcomp.experiments.generator_training import HELD, PROXY, Training, task_of
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import parse_settings
from fedcomp.experiments.tables import Found

TOPAGG: Final = "TopAgg votes"
PLAIN: Final = "plain signs"
DP_SGD: Final = "DP-SGD, same generator"
MEANS: Final = "class means, released once"
DIRECT: Final = "classifier, DP-FedAvg"

METHODS: Final[Mapping[str, str]] = {
    TOPAGG: "votes",
    PLAIN: "votes",
    DP_SGD: "dp-sgd",
    MEANS: "dp-sgd",
    DIRECT: "dp-fedavg",
}
"""By label, the name of the method in :class:`fedcomp.experiments.generator_training.Training`."""

TARGETS: Final = (1.0, 10.0, math.inf)
"""The epsilons. Rows without noise have the settings of the previous epsilon."""

DELTA: Final = 1e-5

# No reported training has this seed, because the choice must not use the reported draws.
TUNING_SEED: Final = 1000

REPORTED: Final[Mapping[float, float]] = {1.0: 0.7123, 10.0: 0.8066}
"""Accuracy on MNIST that the paper reports for DataLens (recalled, not checked)."""

# Few or many steps, some or all pixels. Every row has four candidates, so none wins by being tried more often.
_VOTES: Final = (
    "lr=0.02 steps=20 k=200 beta=0.0",
    "lr=0.02 steps=20 k=784 beta=0.2",
    "lr=0.01 steps=60 k=200 beta=0.2",
    "lr=0.01 steps=60 k=784 beta=0.2",
)

GRIDS: Final[Mapping[str, tuple[str, ...]]] = {
    TOPAGG: tuple(f"{votes} stochastic=1" for votes in _VOTES),
    PLAIN: tuple(f"{votes} stochastic=0" for votes in _VOTES),
    DP_SGD: tuple(
        # Releases and steps of the generator are separate: training on released values costs no privacy.
        f"lr=0.01 steps=60 releases={releases} teacher_lr={rate} clip=1.0"
        for releases in (20, 60)
        for rate in (1.0, 4.0)
    ),
    # A discriminator without steps (teacher_lr 0) stays at zero, where its gradient is the class means. Only the clip
    # norm can be chosen.
    MEANS: tuple(f"lr=0.01 steps=60 releases=1 teacher_lr=0.0 clip={clip}" for clip in (0.5, 1.0, 2.0, 4.0)),
    DIRECT: tuple(f"lr=1.0 local=3 releases={releases} clip={clip}" for releases in (15, 40) for clip in (1.0, 3.0)),
}
"""The settings that ``--set tune=true`` tries; their number is the same for every row and epsilon."""

CHOSEN: Final[Mapping[str, tuple[int, int]]] = {
    TOPAGG: (2, 2),
    PLAIN: (2, 3),
    DP_SGD: (2, 3),
    MEANS: (2, 3),
    DIRECT: (2, 3),
}
"""The result of the tuning: indices into :data:`GRIDS` for epsilon 1 and 10."""


def label(method: str, target: float) -> str:
    """Return the label of a training in tables and claims."""
    return f"{method}, {'no noise' if target == math.inf else f'epsilon {target:g}'}"


def train(
    method: str, target: float, given: str, seed: int, *, config: Config, validation: bool = False
) -> dict[str, Any]:
    """Train with some settings. If ``validation``, train on a part of the training records and evaluate on the rest."""
    said, options = config.settings, dict(parse_settings(given))
    steps = min(config.rounds, int(options.pop("steps", config.rounds)))
    if METHODS[method] == "votes":
        options["teacher_lr"] = float(said["teacher_lr"])
    evaluation = {
        # The choice of settings needs no exact accuracy, so fewer images and passes keep the tuning short.
        "synthetic": 1500 if validation else int(said["synthetic"]),
        "classifier_epochs": 4 if validation else int(said["classifier_epochs"]),
        "classifier_lr": 0.05,
    }
    return Training(
        METHODS[method],
        options,
        target,
        seed,
        clients=config.clients,
        steps=steps,
        images=int(said["images"]),
        delta=DELTA,
        evaluation=evaluation,
        validation=validation,
        # Only the first seed, because one image sheet for each row and epsilon already fills the report.
        pictures=seed == config.seed and not validation,
    ).run()


def study(found: Found) -> Studied:
    """Choose settings if asked, then train everything seed by seed."""
    config, task = found.config, task_of(found.config.clients, {})
    # Infinity takes the settings of the last finite epsilon.
    chosen = {(m, t): GRIDS[m][CHOSEN[m][min(i, 1)]] for m in METHODS for i, t in enumerate(TARGETS)}
    tables: list[Table] = []
    if config.settings["tune"]:
        cells = [
            {"method": method, "target": target, "given": given, "seed": TUNING_SEED}
            for target in TARGETS[:-1]
            for method in METHODS
            for given in GRIDS[method]
        ]
        tried = found.sweep(train, cells, "held out", config=config, validation=True)
        best = {
            at: max(group, key=lambda r: r.accuracy).given for at, group in tried.groups("method", "target").items()
        }
        chosen = {(method, target): best[method, min(target, TARGETS[-2])] for method, target in chosen}
        columns: dict[str, Any] = {
            "training": lambda r: f"{label(r.method, r.target)}, {r.given}",
            "accuracy, %": lambda r: 100.0 * r.accuracy,
            "right signs, %": lambda r: 100.0 * r.right,
        }
        caption = f"On one in {HELD} training images, with {PROXY} times fewer clients and as many times less noise."
        tables = [table("What was tried", columns, tried, caption)]
    # Seed by seed, so an interrupted run has all rows of its first seeds, which can be compared.
    cells = [
        {"method": method, "target": target, "given": chosen[method, target], "seed": seed}
        for seed in repetitions(config)
        for target in TARGETS
        for method in METHODS
    ]
    groups = found.sweep(train, cells, config=config).groups("method", "target")
    outcomes: Outcomes = {at: groups[at] for at in chosen}
    # In the title of the table, so an accuracy on substitute data is not taken for one on MNIST.
    data = "MNIST" if not task.data.substitute else f"NOT MNIST ({task.data.note})"
    noisy = {at: runs for at, runs in outcomes.items() if at[1] != math.inf}
    shown: dict[str, Any] = {
        "row": lambda runs: label(runs[0].method, runs[0].target),
        "settings": lambda runs: runs[0].given,
        "releases": lambda runs: runs[0].releases,
        "z": lambda runs: runs[0].z,
        "sigma": lambda runs: runs[0].sigma,
        "signal over noise": lambda runs: mean(runs.each("signal")),
        "right signs, %": lambda runs: 100.0 * mean(runs.each("right")),
        "epsilon": lambda runs: runs[0].epsilon,
    }
    left = table(
        "How much of a sum is left in its noise",
        shown,
        noisy.values(),
        "Sigma is in votes, or in the units of the clipped vectors. Signal over noise: root mean square over the "
        "coordinates of a sum, divided by that of its noise. Right signs: the part of the used coordinates whose "
        "noisy sum has the sign of the sum; 50 means no information. Means over the releases.",
    )
    return Studied(
        quantities(outcomes),
        tables=[_accuracy_table(outcomes, data), left, *tables],
        figures=_sheets(config, task, outcomes),
        tasks=[task.record()],
        statements={label(*at): runs[0].statement for at, runs in outcomes.items() if runs[0].statement},
    )


Outcomes = Mapping[tuple[str, float], Records]
"""By method and epsilon: the trainings of all seeds."""


def _accuracy_table(outcomes: Outcomes, data: str) -> Table:
    def cells(method: str) -> list[Any]:
        percent = ([100.0 * run.accuracy for run in outcomes[method, target]] for target in TARGETS)
        return [figure for found in percent for figure in (mean(found), spread(found))]

    paper: list[Any] = [figure for t in TARGETS for figure in (100.0 * REPORTED[t] if t in REPORTED else None, None)]
    again = [label(*at) for at, runs in outcomes.items() if any(run.retrained for run in runs)]
    return Table(
        f"Accuracy in % on the test images of {data}",
        ("row", "epsilon 1", "± at 1", "epsilon 10", "± at 10", "no noise", "± without"),
        [[method, *cells(method)] for method in METHODS] + [["the paper's DataLens (recalled)", *paper]],
        f"Means over {len(outcomes[TOPAGG, 1.0])} seed(s), ± half the range. Accuracy of a convolutional network "
        "trained only on generated images, after its last epoch; in the row of the classifier, the accuracy of the "
        "classifier. The paper's figures come from convolutional teachers and generator, the best of 600 epochs on "
        "100 000 images, and a looser accountant. A network that predicts one class for all of its training "
        f"images is trained again with half the step size. This happened in {'; '.join(again) or 'no row'}.",
    )


def _sheets(config: Config, task: Any, outcomes: Outcomes) -> list[Pictures]:
    """Return records and generated images of the first seed."""
    columns, names = 8, [str(c) for c in range(task.classes)]
    split = task.train_split
    real = np.stack([split.x[np.flatnonzero(split.y == c)[:columns]] for c in range(task.classes)])
    shape = (task.classes, columns, task.side, task.side)
    sheets = [Pictures.of("Records", real.reshape(shape), names, task.data.note)]
    for at, runs in outcomes.items():
        if runs[0].pictures:
            grey = np.frombuffer(base64.b64decode(runs[0].pictures), np.uint8).reshape(shape)
            sheets.append(Pictures.of(f"Generated: {label(*at)}, seed {config.seed}", grey / 255.0, names))
    return sheets


def quantities(outcomes: Outcomes) -> dict[Any, float]:
    """Return the quantities of the claims: epsilon used, images in the ledger, and accuracies."""
    noisy = [run for (_, target), runs in outcomes.items() if target != math.inf for run in runs]
    accuracy = {at: mean(runs.each("accuracy")) for at, runs in outcomes.items()}
    return {
        "epsilon that was spent over the epsilon of its row, largest": largest(r.epsilon / r.target for r in noisy),
        "releases that are not in the ledger, or are there without one": largest(
            float(abs(run.releases - run.owed)) for run in noisy
        ),
        (label(TOPAGG, 10.0), "accuracy, lowest of the seeds"): min(outcomes[TOPAGG, 10.0].each("accuracy")),
        **{(label(*at), "accuracy"): value for at, value in accuracy.items()},
        **{(label(*at), "accuracy, %"): 100.0 * value for at, value in accuracy.items()},
        **{(label(TOPAGG, t), f"accuracy over {m}"): accuracy[TOPAGG, t] - accuracy[m, t] for m, t in accuracy},
    }
