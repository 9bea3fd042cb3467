"""Rare exchanges: one step size a row, replies that get lost, late or doubled, and bytes without the first model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import repetitions
from fedcomp.experiments.tables import Found, Training, by_messages, fields_of
from fedcomp.rng import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedcomp.experiments.spec import RunSpec

DENSE: Final = "DiLoCo, whole models"
"""The row that presets of few bytes are compared with."""

PRESETS: Final = ("DiLoCo", "SparseLoCo")

SIGN_RATE: Final = 0.25
"""By how much of a row's step size a step by the sign moves a value, so that one grid suits DeMo and AdamW."""

FEWER: Final = "times fewer both ways, after the first model"
LOSSY: Final = "times its own loss with lost, late and doubled replies"


def by_step(spec: RunSpec) -> RunSpec:
    """Return the run of a row at its step size, which of DeMo is the server's; its clients' has no length to tell."""
    if spec.system != "demo":
        return spec
    settings = {**spec.settings, "inner.lr": float(spec.settings["lr"]) * SIGN_RATE, "lr": 1.0}
    return replace(spec, settings=settings)


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row by messages, to be judged by its loss."""
    found = by_messages(by_step(spec), training)
    return found | {"score": -found["loss"]}


def lossy(training: Training, label: str, seed: int, lr: float) -> Mapping[str, Any]:
    """Train a row while the fraction ``lost`` of the training messages meets one of three faults, evenly."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.faults import RandomFaults
    from fedcomp.flower.logs import quiet

    each = float(training.config.settings["lost"]) / 3
    faults = RandomFaults(
        Key(seed, "diloco/faults"), dict.fromkeys(("lost_reply", "late", "duplicate"), each), message_types=("train",)
    )
    with quiet():
        return fields_of(inprocess.run(replace(training.spec(label, lr=lr), seed=seed), fault=faults), training.last)


def study(found: Found) -> Studied:
    """Return what faults cost the presets, and every row's bytes once all nodes hold a model."""
    config = found.config
    training = Training.of(found.experiment, config)
    steps = {row: found.chosen[row]["lr"] for row in PRESETS}
    cells = [{"label": row, "seed": seed, "lr": steps[row]} for row in PRESETS for seed in repetitions(config)]
    faulty = found.sweep(lossy, cells, "with faults", training=training).groups("label")

    def all_bytes(row: str) -> float:
        # The last round's downlink in all of them: the first one has the whole model.
        return found.mean(row, "uplink") + found.mean(row, "late") * training.spec(row).rounds

    def fewer(row: str) -> float:
        return all_bytes(found.baseline) / all_bytes(row) if all_bytes(row) else math.nan

    return Studied(
        quantities={
            **{(row, FEWER): fewer(row) for row in found.rows},
            **{(row, LOSSY): mean(faulty[row].each("loss")) / found.mean(row, "loss") for row in PRESETS},
        }
    )
