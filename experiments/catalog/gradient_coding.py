"""Gradient coding: how much sooner does a round end without stragglers, and at what cost?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.gradient_coding import study
from fedcomp.rules import Real

EXPERIMENT = Experiment(
    name="gradient_coding",
    question="Does a round stay exact when any n - s devices can end it, and when is it worth s + 1 times the work?",
    task="digits",
    # One step on all data of a partition makes the weighted mean a step of full-batch gradient descent. Without a
    # deadline, the server waits exactly for the answers that the scheme needs.
    each="max_steps=1 batch_size=1048576 timeout=1e9",
    rows={
        # Flower's own mean, to show that s = 0 is the same method.
        "FedAvg": "fedavg",
        **{f"gradient code, s = {s}": f"gradient-code losses={s}" for s in (0, 1, 3)},
        **{f"over GF(2^31 - 1), s = {s}": f"gradient-code losses={s} arithmetic=gf31" for s in (0, 3)},
    },
    columns=("uplink bytes", "final loss"),
    title="Bytes per client and round",
    caption="No device is slow here. An answer is one row of numbers for any number of partitions: float64 takes "
    "twice the bytes of FedAvg's float32, GF(2^31 - 1) the same. Coding saves no traffic. The table leaves out the "
    "data that each device must hold in advance, s partitions of other devices.",
    study=study,
    options={
        "task.partition": "shards:2",
        "task.hidden": "",
        "lr": 0.5,
        "tail": Option(1.2, Real(above=1.0, most=100.0), "index of the stragglers' Pareto tail; smaller is heavier"),
    },
    claims="""
        # Speeds of the stragglers are redrawn every round, or are the same in all rounds.
        gradient code, s = 1 & gradient code, s = 3 | off in weights, redrawn every round & off in weights, the same \
            in all rounds | <= 1e-6 | gate: theory: the decoded sum is exact; float64 rounds at 1e-12, float32 models at
            6e-8
        gradient code, s = 1 & gradient code, s = 3 | off in a round's loss, redrawn every round & off in a round's \
            loss, the same in all rounds | <= 1e-6 | gate: theory: the same curve, step by step
        over GF(2^31 - 1), s = 3 | bytes of models that differ from those with s = 0 | == 0 | gate: theory: sums in a
            field are exact whichever devices answer
        | off Flower's FedAvg | <= 1e-4 | gate: derived: Flower adds in float32, the code in float64
        | clock off the times computed from the draws, seconds | <= 1e-6 | gate: derived: a round ends with the first
            answers that determine the sum
        gradient code, s = 3 | uplink payload over that with s = 0 | == 1.0 | gate: derived: an answer is as long as an
            update, so nothing is saved
        gradient code, s = 1 & gradient code, s = 3 | seconds over waiting for all, redrawn every round & seconds over \
            waiting for all, the same in all rounds | <= 1.0 | goal: the paper's aim; it holds for heavy tails only \
            and depends on the draws
        gradient code, s = 1 & gradient code, s = 3 | seconds over waiting for all, redrawn every round, if they stop \
            | <= 1.0 | goal: as above, computed from the same draws
        ignore the 3 slowest | test loss over that of the code, the same in all rounds | >= 1.1 | gate: data are sorted
            by label, so the labels of the slow devices are never learnt
    """,
    answer=(
        "Rounds that end without 3 devices give the uncoded model up to {off}, in {least wait:.2f} to {most wait:.2f} "
        "times the seconds of waiting for all, depending on how devices straggle."
    ),
    rounds=30,
    clients=10,
    minutes=0.9,
    quick=("rounds=2", "clients=5"),
    notes=(
        "Every client makes one step on all data of a partition, so the mean is full-batch gradient descent. The rows "
        "of the table are runs without stragglers. Tables and curves about stragglers always use real messages on the "
        "in-process engine with a simulated clock, also when the rows ran on another engine.\n\n"
        "Fractional repetition (s + 1 divides the number of clients) may end a round before the (n - s)-th answer, "
        "because one answer of each group is enough. A straggler is not told to stop and finishes its old round "
        "first. Rounds can therefore last longer than the order statistics in the last figure.\n\n"
        "Gradient coding needs every partition on s + 1 devices. It cannot be used where data may not leave a client."
    ),
)
