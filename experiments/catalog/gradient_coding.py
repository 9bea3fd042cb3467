"""Gradient coding: how much sooner does a round end without the stragglers, and at what cost?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.gradient_coding import study
from fedcomp.rules import Real

EXPERIMENT = Experiment(
    name="gradient_coding",
    question="Does a round that any n - s devices can end stay exact, and when is it worth s + 1 times the work?",
    task="digits",
    # One step on all data of a partition, so that the weighted mean of all is a step of full-batch gradient descent;
    # no deadline, so that what is waited for is what the scheme needs.
    each="max_steps=1 batch_size=1048576 timeout=1e9",
    rows={
        # Flower's own mean, to show that s = 0 is no other method.
        "FedAvg": "fedavg",
        **{f"gradient code, s = {s}": f"gradient-code losses={s}" for s in (0, 1, 3)},
        **{f"over GF(2^31 - 1), s = {s}": f"gradient-code losses={s} arithmetic=gf31" for s in (0, 3)},
    },
    columns=("uplink bytes", "final loss"),
    title="Bytes per client and round",
    caption="Nobody is slow. An answer is one row of numbers, however many partitions are in it: float64 takes twice "
    "FedAvg's float32, GF(2^31 - 1) as much as it. Coding saves nothing. What has to lie on the devices beforehand, s "
    "partitions of other devices' data each, is not in the table.",
    study=study,
    options={
        "task.partition": "shards:2",
        "task.hidden": "",
        "lr": 0.5,
        "tail": Option(
            1.2, Real(above=1.0, most=100.0), "index of the stragglers' Pareto tail; the smaller, the heavier"
        ),
    },
    claims="""
        # Speeds of the stragglers are redrawn every round, or the same in all of them.
        gradient code, s = 1 | off in weights, redrawn every round | <= 1e-6 | gate: theory: the decoded sum is exact;
            float64 rounds it at 1e-12, float32 models at 6e-8
        gradient code, s = 1 | off in weights, the same in all rounds | <= 1e-6 | gate: theory: the decoded sum is
            exact; float64 rounds it at 1e-12, float32 models at 6e-8
        gradient code, s = 3 | off in weights, redrawn every round | <= 1e-6 | gate: theory: the decoded sum is exact;
            float64 rounds it at 1e-12, float32 models at 6e-8
        gradient code, s = 3 | off in weights, the same in all rounds | <= 1e-6 | gate: theory: the decoded sum is
            exact; float64 rounds it at 1e-12, float32 models at 6e-8
        gradient code, s = 1 | off in a round's loss, redrawn every round | <= 1e-6 | gate: theory: the same curve,
            step by step
        gradient code, s = 1 | off in a round's loss, the same in all rounds | <= 1e-6 | gate: theory: the same curve,
            step by step
        gradient code, s = 3 | off in a round's loss, redrawn every round | <= 1e-6 | gate: theory: the same curve,
            step by step
        gradient code, s = 3 | off in a round's loss, the same in all rounds | <= 1e-6 | gate: theory: the same curve,
            step by step
        over GF(2^31 - 1), s = 3 | bytes of models that differ from those with s = 0 | == 0 | gate: theory: sums in a
            field are exact, whoever answered
        | off Flower's FedAvg | <= 1e-4 | gate: derived: Flower adds in float32, the code in float64
        | clock off the times computed from the draws, seconds | <= 1e-6 | gate: derived: a round lasts until the
            first answers that determine the sum
        gradient code, s = 3 | uplink payload over that with s = 0 | == 1.0 | gate: derived: an answer is as long as
            an update; there is no saving
        gradient code, s = 1 | seconds over waiting for all, redrawn every round | <= 1.0 | goal: the aim of the
            paper; holds for heavy tails only, and depends on the draws
        gradient code, s = 1 | seconds over waiting for all, the same in all rounds | <= 1.0 | goal: the aim of the
            paper; holds for heavy tails only, and depends on the draws
        gradient code, s = 3 | seconds over waiting for all, redrawn every round | <= 1.0 | goal: the aim of the
            paper; holds for heavy tails only, and depends on the draws
        gradient code, s = 3 | seconds over waiting for all, the same in all rounds | <= 1.0 | goal: the aim of the
            paper; holds for heavy tails only, and depends on the draws
        gradient code, s = 1 | seconds over waiting for all, redrawn every round, if they stop | <= 1.0 | goal: as
            above, computed from the same draws
        gradient code, s = 3 | seconds over waiting for all, redrawn every round, if they stop | <= 1.0 | goal: as
            above, computed from the same draws
        ignore the 3 slowest | test loss over that of the code, the same in all rounds | >= 1.1 | gate: label-sorted
            data: what the slow devices hold is never learnt
    """,
    answer=(
        "Rounds that end without 3 devices give the uncoded model to {off}, in {least wait:.2f} to {most wait:.2f} "
        "times the seconds of waiting for all, by how devices straggle."
    ),
    rounds=30,
    clients=10,
    minutes=0.9,
    quick=("rounds=2", "clients=5"),
    notes=(
        "Every client makes one step on all data of a partition, so that the mean is full-batch gradient descent. The "
        "rows of the table are runs without stragglers; the tables and curves of stragglers are runs with real "
        "messages on the engine in this process, whose clock is simulated, whatever engine the rows were run on.\n\n"
        "Fractional repetition (s + 1 divides the number of clients) may end a round before the (n - s)-th answer: one "
        "of each group is enough. A straggler is not told to stop: it finishes its old round first, which is why "
        "rounds can last longer than the order statistics of the last figure say.\n\n"
        "Gradient coding needs every partition on s + 1 devices. Where data may not leave a client it cannot be used."
    ),
)
