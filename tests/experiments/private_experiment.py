"""A small experiment with private rows, for tests of the command line and of what it writes."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment, Studied
from fedcomp.experiments.options import Option
from fedcomp.rules import Int, Real

COMMON = "task.hidden=16 max_steps=2"

ROWS = {
    "FedAvg": f"fedavg {COMMON}",
    "DP-FedAvg": "dp-fedavg noise_multiplier={noise_multiplier} evaluate_every={evaluate_every} "
    f"insecure_deterministic=true {COMMON}",
}

EXPERIMENT = Experiment(
    name="guarded",
    question="Does the budget hold?",
    task="digits",
    rows=ROWS,
    study=lambda found: Studied({"rounds of FedAvg": found.results["FedAvg"].final.round}),
    claims="| rounds of FedAvg | >= 1 | gate: it is not private",
    options={
        "noise_multiplier": Option(2.0, Real(above=0.0), "noise over sensitivity"),
        "evaluate_every": Option(1, Int(1), "rounds between evaluations"),
    },
    rounds=4,
    clients=3,
)
