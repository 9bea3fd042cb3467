"""SIDCo: the accuracy of thresholds estimated from moments, the search for the number of stages, and the time saved."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.sidco import study
from fedcomp.rules import Int

EXPERIMENT = Experiment(
    name="sidco",
    question="Can a threshold estimated from a few moments of a gradient replace the search for its largest "
    "coordinates?",
    task="digits",
    each=lambda config: f"max_steps=1 evaluate_every={max(1, -(-config.rounds // 10))}",
    rows={
        "FedAvg": "fedavg",
        "exact top-k with feedback": "topk feedback=true codec.density={codec.density}",
        "SIDCo-E with feedback": "sidco feedback=true codec.density={codec.density} codec.family=exponential",
        "SIDCo-P with feedback": "sidco feedback=true codec.density={codec.density} codec.family=pareto",
    },
    options={
        "task.hidden": "256",
        "lr": 0.2,
        # A client makes one step a round.
        "batch_size": 16,
        "codec.density": 0.01,
        "mlp_steps": Option(300, Int(1), "steps in which gradients of the digits model are captured"),
        "cnn_steps": Option(60, Int(1), "steps in which gradients of the MNIST network are captured"),
        "cnn_examples": Option(2000, Int(2), "training images of the MNIST network"),
        "size": Option(1_000_000, Int(10_000), "elements of the synthetic vectors"),
        "timing_size": Option(1_000_000, Int(10_000), "elements of the vector on which selections are timed"),
        "draws": Option(4, Int(1), "draws of every synthetic vector"),
        "repetitions": Option(9, Int(1), "interleaved repetitions of the timing; the median counts"),
    },
    study=study,
    title="Training on digits",
    columns={
        "train loss, nats": "train loss, nats",
        "times dense": "train loss over dense",
        "test accuracy, %": "final test, %",
        "uplink, times exact top-k's": "part of the uplink bytes against exact top-k with feedback",
    },
    caption="Loss of the final model on all training examples. SIDCo never sends more than twice the requested "
    "number: larger selections are cut to the exact top k.",
    claims="""
        SIDCo-E with feedback | train loss over dense | <= 1.15 | gate: goal of this package
        SIDCo-P with feedback | train loss over dense | <= 1.15 | gate: goal of this package
        Laplace at 0.01, E, M = 1 to 4 | selected over wanted, lowest | >= 0.95 | gate: theory: the right family; the
            random error is 1 % of 10 000
        Laplace at 0.01, E, M = 1 to 4 | selected over wanted, highest | <= 1.05 | gate: theory: the right family; the
            random error is 1 % of 10 000
        # Laplace, normal, t(4) and t(2.5) values.
        data of one scale, P, M = 2 | selected over wanted, lowest | >= 0.6 | gate: goal of this package
        data of one scale, P, M = 2 | selected over wanted, highest | <= 1.3 | gate: goal of this package
        # Whether one fit to layers of different scale is right depends on the draw of the scales: no bound holds for
        # all draws.
        layers of unlike scale, P, M = 2 | selected over wanted, lowest | >= 0.6 | goal: the result of one fit to sixty
            scales depends on the scales
        layers of unlike scale, P, M = 2 | selected over wanted, highest | <= 1.3 | goal: the result of one fit to sixty
            scales depends on the scales
        # Bounds with a margin from the measurements: they distinguish the published search and single stages from the
        # default.
        layers of unlike scale, E, M = 1 | selected over wanted, lowest | >= 5.0 | gate: measured 20 to 23 over seeds 0
            to 2 with MNIST's files and 0 without
        gradients, P, M = 2 | share within 2x | >= 0.9 | gate: measured 0.97 to 0.98 over seeds 0 to 2 with MNIST's
            files and 0 without
        with memory, P, M = 4 | share within 2x | >= 0.95 | gate: measured 1 over seeds 0 to 2 with MNIST's files and 0
            without
        with memory, E, M = 1 | share within 2x | <= 0.7 | gate: measured 0.43 to 0.49 over seeds 0 to 2 with MNIST's
            files and 0 without
        search on t(4), published, E from 1 | median of the later periods | >= 2.0 | gate: measured 2.3 over seeds 0 to
            2 with MNIST's files and 0 without
        search on 60 layers x t(4), published, E from 1 | median of the later periods | >= 5.0 | gate: measured 23 to 30
            over seeds 0 to 2 with MNIST's files and 0 without
        search on t(4), with memory, published, E from 1 | median of the later periods | >= 0.5 | gate: measured 0.9
            over seeds 0 to 2 with MNIST's files and 0 without
        search, reversing, E from 1 | median of the later periods, largest factor off | <= 2.5 | gate: measured 1.2 to
            1.9 over seeds 0 to 2 with MNIST's files and 0 without
        # Reported as missed: with memory, two stages select too few at the smallest density.
        with memory, P, M = 2 | share within 2x | >= 0.9 | goal: measured 0.76 to 0.83 over seeds 0 to 2 with MNIST's
            files and 0 without
        # Times depend on the machine, so they are only goals.
        density 0.1 & density 0.01 & density 0.001 | time of exact top-k over that of P, M = 2 | <= 1.0 | goal: measured
            0.98 to 2.9 over seeds 0 to 2 with MNIST's files and 0 without
    """,
    answer=(
        "P, M = 2 selects {data of one scale, P, M = 2 | selected over wanted, lowest:.2f} to "
        "{data of one scale, P, M = 2 | selected over wanted, highest:.2f} times what was asked for on data of one "
        "scale, {layers of unlike scale, P, M = 2 | selected over wanted, lowest:.2f} to "
        "{layers of unlike scale, P, M = 2 | selected over wanted, highest:.2f} on layers of unlike scale; trained "
        "with it, the loss is {SIDCo-P with feedback | train loss over dense:.2f} times the dense one."
    ),
    rounds=250,
    clients=8,
    minutes=3.2,
    quick=(
        "rounds=2",
        "clients=2",
        "task.hidden=20",
        "mlp_steps=3",
        "cnn_steps=2",
        "cnn_examples=8",
        "size=10000",
        "timing_size=10000",
        "draws=2",
        "repetitions=1",
    ),
    notes=(
        "SIDCo fits a distribution to the magnitudes and uses its quantile as the threshold. With M stages, the first "
        "one aims at a quarter of the elements, and each further stage fits the elements above the current threshold. "
        "The judge of an estimate is the count of elements above it. E is the exponential fit, P the generalised "
        "Pareto fit, and GP the gamma fit followed by Pareto. The codec's default is P with 2 stages and the "
        "reversing search.\n\n"
        "Captured gradients are those of a client in trainings with exact top-k and error feedback. On their own they "
        "have heavy tails, as the method assumes. A codec under error feedback gets them with the memory added, and "
        "then they do not: large values have been sent, and the rest accumulates below the threshold. In that case "
        "few stages fail in the other direction, and more so at smaller densities.\n\n"
        "Times depend on the machine, the size of the vector and the density, so they are goals and cannot fail a "
        "run. The claim on layers is also a goal, because the result of one fit to layers of different scale depends "
        "on the scales.\n\n"
        "The data are MNIST where its files are found, otherwise the embedded digits enlarged to 28x28."
    ),
)
