"""Rare exchanges: DiLoCo and SparseLoCo with few bytes in both directions, against FedAvg and DeMo of as many steps."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.studies.diloco import DENSE, FEWER, LOSSY, study, train
from fedcomp.rules import Int, Real

_OUTER: Final = "task.kept=true inner.lr={outer.lr} inner.momentum={outer.momentum}"


def each(config: Config) -> str:
    """Return what all rows share: the step size falls over the whole run, by the server's round numbers."""
    steps = int(config.settings["max_steps"]) * config.rounds
    return f"task.optimizer=adamw task.falls={steps} epochs=1000 evaluate_every={max(1, config.rounds // 6)}"


def rows(config: Config) -> dict[str, str]:
    """Return the rows; DeMo's rounds are its steps."""
    steps = int(config.settings["max_steps"]) * config.rounds
    sign = f"task.optimizer=sgd task.falls=0 max_steps=1 rounds={steps} evaluate_every={max(1, steps // 6)}"
    return {
        "FedAvg, Adam reset": "fedavg",
        "FedAvg": "fedavg task.kept=true",
        DENSE: f"fedavg inner=nesterov {_OUTER}",
        "DiLoCo": f"diloco {_OUTER}",
        "DiLoCo, published outer step": "diloco task.kept=true inner.lr=0.7 inner.momentum=0.9",
        "SparseLoCo": f"sparseloco {_OUTER}",
        "FedAvg, top-k 1/64": "topk task.kept=true codec.density=0.015625 codec.values=q2 downlink=topk "
        "downlink.density=0.0625 downlink.values=q2",
        "DeMo": f"demo {sign} inner.falls={steps}",
    }


EXPERIMENT = Experiment(
    name="diloco",
    question="Where clients take many steps between two exchanges, what do few bytes in both directions cost in loss?",
    task="dialects",
    each=each,
    rows=rows,
    train=train,
    tune={"lr": "steps"},
    tunes_without_messages=False,
    study=study,
    options={
        "seeds": 3,
        "workers": 2,
        "steps": "0.002,0.004,0.008,0.016",
        "batch_size": 4,
        "max_steps": 15,
        "task.speakers": Option(4, Int(1), "speakers, each with a dialect of its own"),
        "task.layers": Option(2, Int(1), "blocks of the transformer"),
        "outer.lr": Option(0.9, Real(above=0.0), "learning rate of the outer step"),
        "outer.momentum": Option(0.5, Real(least=0.0, below=1.0), "momentum of the outer step"),
        "lost": Option(0.1, Real(least=0.0, below=1.0), "fraction of the messages that meet a fault, in the study"),
    },
    baseline="FedAvg",
    columns={
        "step size": "step size",
        "test loss": "final loss",
        "over that of whole-model DiLoCo": f"times the loss against {DENSE}",
        "uplink bytes": "uplink bytes",
        FEWER: FEWER,
    },
    caption=(
        "Uplink bytes are of payload, per client and round of 15 steps. Each row has the step size that did best on a "
        "validation split."
    ),
    claims=f"""
        DiLoCo | times the loss against {DENSE} | <= 1.005 | goal: one bit both ways costs nothing
        DiLoCo | times the loss against FedAvg | <= 1.0 | goal: not behind whole models without an outer step
        SparseLoCo | times the loss against {DENSE} | <= 1.02 | goal: at 1/64, in few rounds
        SparseLoCo | {FEWER} | >= 90 | goal: two bits of 1/64 up, of 1/16 down
        DiLoCo | {FEWER} | >= 25 | gate: derived: one bit of 32 and the lengths of blocks
        DiLoCo | {LOSSY} | <= 1.01 | goal: memory goes back, moments stay
        SparseLoCo | {LOSSY} | <= 1.01 | goal: memory goes back, moments stay
        FedAvg | times the loss against FedAvg, Adam reset | <= 0.995 | goal: kept moments are worth something
        DiLoCo | times the loss against DiLoCo, published outer step | <= 1.0 | goal: (0.7, 0.9) is for long runs
        SparseLoCo | times the loss against FedAvg, top-k 1/64 | <= 1.0 | goal: the rival with as many bytes
        DeMo | times the loss against {DENSE} | <= 1.0 | goal: an exchange after every step is worth its bytes
    """,
    answer=(
        "One bit in both directions ends at {DiLoCo | times the loss against " + DENSE + ":.3f} times the loss of "
        "whole-model DiLoCo in {DiLoCo | " + FEWER + ":.0f} times fewer bytes, SparseLoCo at "
        "{SparseLoCo | times the loss against " + DENSE + ":.3f} times in {SparseLoCo | " + FEWER + ":.0f} times fewer."
    ),
    rounds=24,
    clients=4,
    minutes=10.0,
    quick=("rounds=2", "clients=2", "seeds=1", "steps=0.002", "max_steps=1", "task.speakers=2", "task.layers=1"),
    notes=(
        "A small GPT (111,937 parameters with the file of Shakespeare) learns from scratch, every client another "
        "speaker in a dialect of its own: plain, upper case, vowels moved, words reversed. All rows take the same "
        "steps of AdamW; DeMo takes as many of plain gradients, and exchanges after each. The step size rises over 20 "
        "steps and falls along half a cosine to a tenth, by the server's round numbers. Every row has the one of the "
        "same grid that ended at the least loss on windows before the held-out ones, with one seed; DeMo's sign moves "
        "by a quarter of it. The outer rates were chosen in a prototype of another size.\n\n"
        "The first model travels whole, as every system sends it where nodes cannot make it themselves; figures after "
        "the first model leave that round's downlink out. The loss is that of the server's model on held-out text of "
        "all speakers; nodes with a compressed downlink hold a replica that lags a little behind it.\n\n"
        "A fault is a reply that is lost, one that arrives after its round, or a message that arrives twice."
    ),
    curves=[Curve(y="test accuracy, %", x="payload so far, up and down")],
)
