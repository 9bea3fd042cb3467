"""Slow links: how long does a training take when sending the model takes minutes?"""

from __future__ import annotations

from functools import partial

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Option, numbers
from fedcomp.experiments.studies.slow_link import study
from fedcomp.rules import Flag, Int, Real

EXPERIMENT = Experiment(
    name="slow_link",
    question="How long does a training take when sending a model takes half a minute?",
    # Every training is a separate deployment.
    study=study,
    options={
        "rates": Option(
            "64,200,1000,10000",
            TEXT,
            "kbit/s of every node's link, both ways",
            check=partial(numbers, each=Real(least=1.0, most=1e6)),
        ),
        "dense": Option(
            32.0, Real(above=0.0, most=600.0), "seconds to send a model to a node; sets its size, up to 4 MB"
        ),
        "target": Option(95.0, Real(above=0.0, most=100.0), "accuracy to reach, %"),
        "limit": Option(
            240.0,
            Real(least=5.0),
            "seconds after which a row is stopped; after three rounds if it is too slow to finish in time",
        ),
        "local": Option(2, Int(1), "steps of a client per round"),
        "steps": Option(
            "0.1,0.3,1,3",
            TEXT,
            "step sizes of the clients; each row and size uses the one that reaches the target first on a validation "
            "split, over three trainings",
            check=numbers,
        ),
        "stock": Option(True, Flag(), "add 8 MB at 200 kbit/s, with stock Flower and with fedcomp"),
        "stock_limit": Option(420.0, Real(least=5.0), "seconds of that"),
        "workers": 2,
        "links": Option(3, Int(1, 256), "processes that train in parallel; affects only the time", neutral=True),
    },
    claims="""
        1 Mbit/s | seconds of FedAvg over the best of ours | >= 10 | goal: a message is a hundredth of the model, and
            most of a round is waiting for messages
        | share of the bytes at the interfaces without a name | <= 0.15 | gate: chosen, for the largest model: the
            counted bytes must be the sent bytes
        | bytes at the interfaces of FedAvg over the ledger's | <= 1.15 | goal: for bytes with names: headers are 66 of
            1514, and 66 back if each segment is acknowledged; on the slowest link the model is small, so polls and
            Flower's overhead per message weigh more
        | accuracies over links, points off those in this process | <= 0.5 | gate: the same training; float sums may
            differ in the last bit
        8 MB at 200 kbit/s | seconds of stock Flower over ours | >= 2 | goal: a target that stock Flower did not reach
            counts as the time limit, also if one of its nodes ended
    """,
    answer="{said}",
    rounds=40,
    clients=2,
    engines=("superlink",),
    minutes=25.0,
    quick=("rounds=3", "rates=1000", "dense=1", "limit=20", "steps=0.1", "stock=false", "links=5"),
    notes=(
        "The links are token buckets between network namespaces of this machine, which needs Linux, root and "
        "iproute2. Every row is a separate deployment: a SuperLink, two SuperNodes and a process per message.\n\n"
        "The model is a perceptron on digits, wide enough to take half a minute to send. It does not need torch, "
        "whose import time would hide the links. Step sizes are chosen in this process on a validation split, from "
        "the same grid for every row and size.\n\n"
        "All rows send the first model whole, except 'EDEN, first model at nodes', whose nodes make it from the seed. "
        "Top-k up also sends the whole model down. A node asks for work every three seconds, so no round is shorter."
    ),
)
