"""Rare exchanges whose replies get lost, late or doubled, and bytes without the run's first model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import repetitions
from fedcomp.experiments.tables import Found, Training, fields_of
from fedcomp.rng import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

DENSE: Final = "DiLoCo, whole models"
"""The row that presets of few bytes are compared with."""

PRESETS: Final = ("DiLoCo", "SparseLoCo")

FEWER: Final = "times fewer both ways, after the first model"
LOSSY: Final = "times its own loss with lost, late and doubled replies"


def lossy(training: Training, label: str, seed: int) -> Mapping[str, Any]:
    """Train a row while the fraction ``lost`` of the training messages meets one of three faults, evenly."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.faults import RandomFaults
    from fedcomp.flower.logs import quiet

    each = float(training.config.settings["lost"]) / 3
    faults = RandomFaults(
        Key(seed, "diloco/faults"), dict.fromkeys(("lost_reply", "late", "duplicate"), each), message_types=("train",)
    )
    with quiet():
        return fields_of(inprocess.run(replace(training.spec(label), seed=seed), fault=faults), training.last)


def study(found: Found) -> Studied:
    """Return what faults cost the presets, and every row's bytes once all nodes hold a model."""
    config = found.config
    training = Training.of(found.experiment, config)
    axes = {"label": PRESETS, "seed": list(repetitions(config))}
    faulty = found.sweep(lossy, axes, "with faults", training=training).groups("label")

    def round_bytes(row: str) -> float:
        # The last round's downlink: the first one has the whole model, unless nodes make it themselves.
        return found.mean(row, "uplink") / max(1, config.rounds) + found.mean(row, "late")

    def fewer(row: str) -> float:
        return round_bytes(found.baseline) / round_bytes(row) if round_bytes(row) else math.nan

    return Studied(
        quantities={
            **{(row, FEWER): fewer(row) for row in found.rows},
            **{(row, LOSSY): mean(faulty[row].each("loss")) / found.mean(row, "loss") for row in PRESETS},
        }
    )
