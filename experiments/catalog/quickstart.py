"""The first run of a new user: digits on ten non-IID clients, with nine ways of sending the update."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment

_TOPK: Final = "topk codec.density={codec.density}"

EXPERIMENT = Experiment(
    name="quickstart",
    question="Can ten unlike clients send a twentieth of the bytes, both ways, and still learn what FedAvg learns?",
    task="digits",
    rows={
        "FedAvg": "fedavg",
        # The row to take first: what fc.Compressed(FedAvg()) sends.
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
        EDEN, 1 bit            | times fewer up, as messages   | >= 25.0  | gate: derived: 32 times fewer values' bits,
            and what a message of 12 kB costs besides
        EDEN, 1 bit, both ways | points lost                   | <= 1.0   | gate: goal: within one point, at the end
        EDEN, 1 bit, both ways | times fewer down, as messages | >= 10.0  | gate: derived: the whole model in the first
            round, one bit a weight from then on
        top-k with feedback    | points lost                   | <= 1.0   | gate: goal: within one point; measured 0.1
            to 0.4 over seeds 0 to 3
        top-k with feedback    | times fewer up                | >= 70.0  | gate: derived: of 1000 coordinates 10 are
            sent, 4 bytes and about one byte of position each
        top-k in two bits      | points lost                   | <= 1.0   | gate: goal: within one point; the
            experiment bits measures it over three seeds
        top-k in two bits      | times fewer up                | >= 250.0 | gate: derived: two bits and about one byte
            of position for each of ten values of 1000
        top-k without feedback | points lost against top-k with feedback | >= 1.0 | gate: measured 2.2 to 3.9 over
            seeds 0 to 3; a memory that does nothing gives 0
        identity codec | bytes of the model that differ | == 0.0 | gate: theory: what drops nothing changes nothing
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
        "images a round. The model has 85 002 parameters. The test split has 355 images, so that one image makes 0.28 "
        "points; the claims about accuracy take the mean of the last 5 rounds.\n\n"
        "EDEN rotates the update at random and sends one bit a weight, without bias and without memory, so that few "
        "rounds and clients that seldom return do no harm: the row to take first, and what fc.Compressed(FedAvg()) "
        "does. Both ways the server sends its changes in one bit as well.\n\n"
        "Top-k sends the largest hundredth of the changes. With feedback a client remembers "
        "what it did not send and adds it to the next change; without feedback it forgets, so that small but steady "
        "changes never arrive. In two bits every value is a sign and one of two magnitudes that are fitted to the "
        "values; feedback keeps the rest. The identity codec sends "
        "everything by the same path as the others: it shows that the path itself changes no bit, and what it "
        "costs.\n\n"
        "The last row compresses the downlink as well: nodes get the twentieth of the model that changed most, and the "
        "rest in later rounds. In the rows that do not say so the model goes down whole."
    ),
)
