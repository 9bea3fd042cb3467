"""A new user's first run: digits on ten non-IID clients, with nine ways to send the update."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment

_TOPK: Final = "topk codec.density={codec.density}"

EXPERIMENT = Experiment(
    name="quickstart",
    question="Can ten clients with different data use a twentieth of the bytes in both directions and still learn as "
    "much as with FedAvg?",
    task="digits",
    rows={
        "FedAvg": "fedavg",
        # Start with this row: it is what fc.Compressed(FedAvg()) sends.
        "EDEN, 1 bit": "eden codec.bits=1",
        "EDEN, 1 bit, both ways": "eden codec.bits=1 downlink=eden downlink.bits=1 downlink.scale=least",
        "identity codec": "identity",
        "top-k with feedback": f"{_TOPK} feedback=true",
        "top-k in two bits": f"{_TOPK} feedback=true codec.values=q2",
        "top-k without feedback": f"{_TOPK} feedback=false",
        "QSGD": "qsgd codec.levels={codec.levels}",
        "top-k both ways": f"{_TOPK} feedback=true downlink=topk downlink.density=0.05",
    },
    options={
        "task.partition": "dirichlet:0.5",
        "task.hidden": "256,256",
        "lr": 0.3,
        "momentum": 0.0,
        "epochs": 1,
        "batch_size": 64,
        "fraction": 1.0,
        "codec.density": 0.01,
        "codec.levels": 127,
        "link": "10mbit",
    },
    curves=[
        Curve(x="messages so far, up and down", title="Accuracy by bytes on the wire"),
        Curve(x="round", title="Accuracy by rounds"),
    ],
    claims="""
        EDEN, 1 bit            | points lost                   | <= 1.0   | gate: goal: within one point; the
            experiment readme measures it on three tasks over three seeds
        EDEN, 1 bit            | times fewer up, as messages   | >= 25.0  | gate: derived: 32 times fewer bits for
            values, and the overhead of a message of 12 kB
        EDEN, 1 bit, both ways | points lost                   | <= 1.0   | gate: goal: within one point, at the end
        EDEN, 1 bit, both ways | times fewer down, as messages | >= 10.0  | gate: derived: the whole model in the first
            round, then one bit per weight
        top-k with feedback    | points lost                   | <= 1.0   | gate: goal: within one point; measured 0.1
            to 0.4 over seeds 0 to 3
        top-k with feedback    | times fewer up                | >= 70.0  | gate: derived: 10 of 1000 coordinates are
            sent, with 4 bytes and about one byte of position each
        top-k in two bits      | points lost                   | <= 1.0   | gate: goal: within one point; the
            experiment bits measures it over three seeds
        top-k in two bits      | times fewer up                | >= 250.0 | gate: derived: two bits and about one byte
            of position for each of 10 values in 1000
        top-k without feedback | points lost against top-k with feedback | >= 1.0 | gate: measured 2.2 to 3.9 over
            seeds 0 to 3; a memory that does nothing gives 0
        identity codec | bytes of the model that differ | == 0.0 | gate: theory: a codec that drops nothing changes
            nothing
    """,
    answer=(
        "{EDEN, 1 bit | times fewer up, as messages:.3g} times fewer bytes on the wire up, "
        "{EDEN, 1 bit | points lost:.1f} points of accuracy lost (EDEN, 1 bit, against FedAvg, mean of the last 5 "
        "rounds); both ways also {EDEN, 1 bit, both ways | times fewer down, as messages:.3g} times fewer down, "
        "{EDEN, 1 bit, both ways | points lost:.1f} points lost."
    ),
    rounds=40,
    clients=10,
    minutes=0.6,
    quick=("rounds=2", "clients=3", "task.hidden=16"),
    notes=(
        "Each client holds its own mixture of the ten digits (Dirichlet, alpha 0.5) and makes one pass over about 144 "
        "images a round. The model has 85 002 parameters. The test split has 355 images, so one image is worth 0.28 "
        "points. Claims about accuracy use the mean of the last 5 rounds.\n\n"
        "EDEN rotates the update at random and sends one bit per weight. It is unbiased and has no memory, so it also "
        "works for few rounds and for clients that seldom return. Start with this row; fc.Compressed(FedAvg()) does "
        "the same. With both ways the server sends its changes in one bit as well.\n\n"
        "Top-k sends the largest 1 % of the changes. With feedback a client remembers what it did not send and adds "
        "it to the next change. Without feedback this part is lost, so small but steady changes never arrive. In two "
        "bits, a value is a sign and one of two magnitudes that are fitted to the values; feedback keeps the error. "
        "The identity codec sends everything along the same path. It shows that the path itself changes no bit, and "
        "what the path costs.\n\n"
        "The last row compresses the downlink as well: nodes get the 5 % of the model that changed most, and the rest "
        "in later rounds. Rows that do not mention the downlink send the whole model down."
    ),
)
