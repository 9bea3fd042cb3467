"""A small experiment with private rows, for tests of the command line and of what it writes."""

from __future__ import annotations

from collections.abc import Mapping

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.kit import claim
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rules import Int, Real

COMMON = {"task.hidden": "16", "max_steps": 2, "insecure_deterministic": True}


def rows(config: Config) -> list[RunSpec]:
    plain = config.spec("fedavg", "FedAvg", "digits", **{"task.hidden": "16", "max_steps": 2})
    private = config.spec("dp-fedavg", "DP-FedAvg", "digits", take=("noise_multiplier", "evaluate_every"), **COMMON)
    return [plain, private]


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    return Findings(claims=[claim("rounds of FedAvg", results["FedAvg"].final.round, ">= 1", "it is not private")])


EXPERIMENT = Experiment(
    name="guarded",
    question="Does the budget hold?",
    rows=rows,
    measure=measure,
    options={
        "noise_multiplier": Option(2.0, Real(above=0.0), "noise over sensitivity"),
        "evaluate_every": Option(1, Int(1), "rounds between evaluations"),
    },
    rounds=4,
    clients=3,
)
