"""ScaleCom: does one shared support keep the downlink small, and what does the choice of one client miss?"""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.scalecom import study
from fedcomp.rules import Int

# Each number is twice the previous one. A downlink that grows with the clients is then a straight line on log axes.
FEDERATIONS: Final = (2, 4, 8, 16, 32, 64)

# At density 1 the downlink's top-k sends exactly the coordinates that changed: the union of all supports.
_UNION: Final = "downlink=topk downlink.density=1.0 downlink.scope=layer codec.scope=layer"

EXPERIMENT = Experiment(
    name="scalecom",
    question="If one client chooses the support for all, does the downlink stop growing with the number of clients?",
    task="digits",
    each=lambda config: f"task.partition=iid max_steps=1 evaluate_every={max(1, config.rounds)}",
    rows=lambda config: {
        "FedAvg, 8 clients": "fedavg clients=8",
        **{
            f"local top-k, {n} clients": f"topk feedback=true codec.density={{codec.density}} {_UNION} clients={n}"
            for n in FEDERATIONS
        },
        **{f"CLT-k, {n} clients": f"scalecom codec.density={{codec.density}} clients={n}" for n in FEDERATIONS},
    },
    options={
        "task.hidden": "256",
        "lr": 0.2,
        "batch_size": 16,
        "codec.density": 0.01,
        "norm_rounds": Option(2000, Int(20), "rounds of the memory-norm measurement"),
    },
    study=study,
    claims="""
        support of the mean | memory norm after all rounds, in gradients | >= 100.0 | gate: measured 151 after 2000
            rounds: what cancels in the mean is never sent
        CLT-k | downlink grows, times | <= 1.2 | gate: derived: all clients except the leader get the index block, about
            a fifth of the bytes; with 2 clients this is half of them
        local top-k | downlink grows, times | >= 4.0 | gate: the union of different supports grows with the clients;
            without this growth the constant of CLT-k would show nothing
        CLT-k | largest union over k | <= 1.0 | gate: derived: one support for all
        # Bounds on both sides: a union far below k would mean that the mean was not sent.
        CLT-k | smallest union over k | >= 0.99 | gate: derived; a value can be zero by chance
        local top-k | union over k with 8 clients | >= 4.0 | gate: measured 7.1 when the bounds were set, with one
            ranking for the whole model
        CLT-k, rotating leader | memory norm after all rounds, in gradients | <= 15.0 | gate: measured 10.7 after 2000
            rounds (n = 300, k = 15)
    """,
    answer=(
        "With 64 clients instead of 2 a client receives {CLT-k | downlink grows, times:.2f} times the bytes under one "
        "shared support, and {local top-k | downlink grows, times:.1f} times when every client selects for itself."
    ),
    rounds=10,
    clients=8,
    minutes=0.7,
    quick=("rounds=2", "clients=3", "task.hidden=16", "norm_rounds=20"),
    notes=(
        "The number of clients is part of each row; the option --clients changes nothing here. Every client makes one "
        "step of SGD a round. The downlink of local top-k sends values and indices of every coordinate that changed "
        "to nodes that hold the last model. The downlink of CLT-k sends the values of the mean, and the index block "
        "to nodes that do not have it. Layers are ranked separately, and biases are sent whole."
    ),
)
