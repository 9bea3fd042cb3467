"""Few bits per update: top-k with low-bit values, and EDEN without memory, against federated averaging."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment

_TOPK: Final = "topk feedback=true codec.density={} codec.values={}"

EXPERIMENT = Experiment(
    name="bits",
    question="How few bits per update are enough, with and without memory?",
    task="digits",
    each="epochs=1 evaluate_every=1",
    rows={
        "FedAvg": "fedavg",
        **{
            f"top-k {100 * density:g} %, {values}": _TOPK.format(density, values)
            for density in (0.01, 0.03)
            for values in ("float32", "bf16", "q8", "q4", "q2")
        },
        "STC 1 %": "stc feedback=true codec.density=0.01",
        "STC 1 %, the rest in 8 bits": "stc feedback=true codec.density=0.01 codec.rest=q8",
        "EDEN, 1 bit": "eden feedback=false codec.bits=1",
        **{f"EDEN, {bits} bits": f"eden feedback=false codec.bits={bits}" for bits in (2, 3, 4)},
        # The obvious rivals: the other one-bit codec, which has a memory, and the other unbiased codec with few bits.
        "EF-signSGD": "efsignsgd feedback=true",
        "QSGD, 1 level": "qsgd feedback=false codec.levels=1",
        "QSGD, 7 levels": "qsgd feedback=false codec.levels=7",
    },
    tune={"lr": "steps"},
    options={
        "seeds": 3,
        "workers": 1,
        "task.partition": "dirichlet:0.5",
        "task.hidden": "256,256",
        "steps": "0.2,0.3,0.5,0.8",
        "batch_size": 64,
    },
    title="Bits and accuracy",
    columns=(
        "step size",
        "test, %",
        "±",
        "points lost",
        "uplink bytes",
        "downlink bytes",
        "bits per weight",
        "times fewer up",
        "times fewer, as messages",
    ),
    curves=[
        Curve(
            rows=(
                "FedAvg",
                "top-k 1 %, float32",
                "top-k 1 %, q2",
                "top-k 3 %, q2",
                "STC 1 %",
                "EDEN, 1 bit",
                "EDEN, 4 bits",
                "QSGD, 1 level",
            )
        )
    ],
    claims="""
        top-k 1 %, q2 | points lost    | <= 1.0   | gate: goal, a user's first row
        top-k 1 %, q2 | times fewer up | >= 150.0 | gate: goal, a user's first row
        EDEN, 1 bit   | points lost    | <= 1.0   | gate: goal, without memory, so any client may join a round
        EDEN, 1 bit   | times fewer up | >= 25.0  | gate: goal, without memory, so any client may join a round
    """,
    answer=(
        "top-k 1 %, q2: {top-k 1 %, q2 | times fewer up:.0f} times fewer uplink bytes, "
        "{top-k 1 %, q2 | points lost:.1f} points lost; EDEN, 1 bit: {EDEN, 1 bit | times fewer up:.0f} times fewer, "
        "{EDEN, 1 bit | points lost:.1f} points lost (against FedAvg, both tuned alike)."
    ),
    rounds=40,
    clients=10,
    minutes=8.0,
    quick=("rounds=2", "clients=3", "seeds=1", "steps=0.3", "task.hidden=16"),
    notes=(
        "The task of the quickstart: each client holds its own mixture of the ten digits (Dirichlet, alpha 0.5) and "
        "makes one pass over about 144 images a round. The model has 85 002 parameters. The test split has 355 "
        "images, so one image is worth 0.28 points.\n\n"
        "Top-k with error feedback sends the largest 1 % or 3 % of the weights' changes. The values are float32, 16 "
        "bits, 127 or 7 levels of the largest magnitude of every 256 values, or a sign and one of two magnitudes that "
        "are fitted to the values. Biases are sent in 8 bits where values have 8 bits or fewer, otherwise as float32. "
        "STC sends signs and one magnitude.\n\n"
        "EDEN rotates the update at random and sends 1 to 4 bits per coordinate: unbiased, without memory. EF-signSGD "
        "and QSGD are the closest rivals with and without memory."
    ),
)
