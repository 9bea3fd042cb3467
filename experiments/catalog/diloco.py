"""Rare exchanges: DiLoCo and SparseLoCo with few bytes in both directions, against FedAvg of the same computation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.rng import Key
from fedcomp.rules import Int, Real

if TYPE_CHECKING:
    from fedcomp.experiments.spec import RunSpec
    from fedcomp.experiments.tables import Training

DENSE: Final = "DiLoCo, whole models"
LOST: Final = "10 % of the replies lost or late"


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row by messages; half of the setting ``lost`` of the training replies are lost, half arrive too late."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.experiments.tables import fields_of
    from fedcomp.flower.faults import RandomFaults
    from fedcomp.flower.logs import quiet

    settings = dict(spec.settings)
    lost = float(settings.pop("lost", 0.0))
    faults = RandomFaults(
        Key(spec.seed, "diloco/lost"), {"lost_reply": lost / 2, "late": lost / 2}, message_types=("train",)
    )
    with quiet():
        return fields_of(inprocess.run(replace(spec, settings=settings), fault=faults if lost else None), training.last)


EXPERIMENT = Experiment(
    name="diloco",
    question="What do rare exchanges of few bytes cost in loss, where clients take many steps between two of them?",
    task="dialects",
    each="task.optimizer=adamw evaluate_every=4",
    rows={
        "FedAvg, Adam reset": "fedavg",
        "FedAvg": "fedavg task.kept=true",
        DENSE: "fedavg task.kept=true inner=nesterov inner.lr={outer.lr} inner.momentum={outer.momentum}",
        "DiLoCo, one bit up": "eden task.kept=true inner=nesterov inner.lr={outer.lr} inner.momentum={outer.momentum}",
        "DiLoCo": "diloco task.kept=true inner.lr={outer.lr} inner.momentum={outer.momentum}",
        "DiLoCo, published outer step": "diloco task.kept=true inner.lr=0.7 inner.momentum=0.9",
        f"DiLoCo, {LOST}": "diloco task.kept=true inner.lr={outer.lr} inner.momentum={outer.momentum} lost={lost}",
        "SparseLoCo": "sparseloco task.kept=true inner.lr={outer.lr} inner.momentum={outer.momentum}",
        "SparseLoCo, no outer step": "sparseloco task.kept=true inner.lr=1.0 inner.momentum=0.0",
        f"SparseLoCo, {LOST}": "sparseloco task.kept=true inner.lr={outer.lr} inner.momentum={outer.momentum} "
        "lost={lost}",
        "FedAvg, top-k 1/64": "topk task.kept=true codec.density=0.015625 codec.values=q2 downlink=topk "
        "downlink.density=0.0625 downlink.values=q2",
        "FedAvg, 8 bits": "qsgd task.kept=true codec.levels=127 downlink=qsgd downlink.levels=127",
    },
    train=train,
    options={
        "seeds": 3,
        "workers": 1,
        "lr": 0.002,
        "batch_size": 4,
        "max_steps": 15,
        "task.speakers": Option(4, Int(1), "speakers"),
        "outer.lr": Option(0.9, Real(above=0.0), "learning rate of the outer step"),
        "outer.momentum": Option(0.5, Real(least=0.0, below=1.0), "momentum of the outer step"),
        "lost": Option(0.1, Real(least=0.0, below=1.0), "fraction of the replies that are lost or late, in two rows"),
    },
    baseline="FedAvg",
    rounds=24,
    clients=4,
)
