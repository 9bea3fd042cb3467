"""Clients that die within a round: which updates stay in the sum, for how many bytes, with and without coded relays."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.coded_dropout import study
from fedcomp.rules import Int, OneOf, Real

EXPERIMENT = Experiment(
    name="coded_dropout",
    question="When clients die within a round, do coded shards at their peers keep their updates in the sum?",
    task="digits",
    rows={
        "FedAvg, nobody vanishes": "fedavg",
        # Top-1 % is biased and needs its memory; QSGD is unbiased and needs none.
        "QSGD-8, nobody vanishes": "qsgd codec.levels=127",
        "top-1 %, nobody vanishes": "topk codec.density=0.01 feedback=true",
    },
    study=study,
    options={
        "task.partition": "dirichlet:0.5",
        "task.model": Option("mlp", OneOf("mlp", "cnn"), "network"),
        "lr": 0.3,
        "batch_size": 16,
        "max_steps": 20,
        "life": Option(20.0, Real(above=0.0), "mean seconds from the start of a round until a device dies"),
        "share_by": Option(3.6, Real(above=0.0), "seconds until shards have to have landed"),
        "end": Option(40.0, Real(above=0.0), "seconds until the server takes nothing more"),
        "symbols": Option(8, Int(1, 256), "K: shards that make an update"),
        "model_rounds": Option(60, Int(2), "rounds simulated by the model for each point of a curve"),
    },
    claims="""
        QSGD-8, MDS relay & QSGD-8, RLNC relay & top-1 %, MDS relay & top-1 %, RLNC relay | bytes that differ from \
            averaging the same updates uncoded | == 0.0 | gate: theory: decoding returns the exact bytes of the replies
        QSGD-8, MDS relay | fraction more than by plain upload | >= {least expected of an MDS relay} | gate: the model
            on the same failures, less 0.05
        QSGD-8, RLNC relay | fraction more than by plain upload | >= {least expected of an RLNC relay} | gate: the
            model on the same failures, less 0.05
        top-1 %, RLNC relay | fraction more than by plain upload | <= {most expected with top-1 %} | gate: the model
            plus 0.05: an upload that takes only a moment gains little from relays
        | distance of a fraction from the model's | <= 0.1 | gate: the model assumes one size for all updates
        QSGD-8, RLNC relay | bytes to the server per update, over plain upload's | >= 1.0 | gate: derived: K shards of
            1/K and their headers; relays do not lower it
        QSGD-8, RLNC relay | bytes to the server per update, over plain upload's | <= 1.25 | goal: relays add only the
            shards of updates that are never completed; with many deaths this is missed
        QSGD-8, RLNC relay | the same where nobody vanishes | <= 1.1 | gate: derived: 1 + K packet headers, a reply that
            confirms sharing, and a relay's envelope; about 1.03
        QSGD-8, RLNC relay | accuracy in percent, more than with plain upload | >= 0.0 | goal: more updates do not hurt;
            clients vanish at random, and the difference is within a run's noise
        devices that come back | fraction with resume less that of plain upload | >= 0.0 | gate: theory: an upload in
            pieces ends no later than one that must succeed in one go
        devices that come back | fraction of the RLNC relay less that with resume | <= 0.0 | gate: the model: peers that
            come and go miss shards and answer late; where waiting helps, a relay does not
        through the server | more bytes at its link, in updates | >= {least through the server} | gate: derived: N - 1
            shards of 1/K each, up and down; 0.8 of that, because an update's envelope is not coded twice
    """,
    answer=(
        "{QSGD-8, RLNC relay | fraction:.0%} of the updates reach the sum through a coded relay, "
        "{QSGD-8, plain | fraction:.0%} by plain upload (QSGD-8), for "
        "{QSGD-8, RLNC relay | bytes to the server per update, over plain upload's:.2f} times the bytes to the server "
        "per update."
    ),
    rounds=8,
    clients=20,
    minutes=2.5,
    quick=(
        "rounds=1",
        "clients=6",
        "task.model=cnn",
        "max_steps=1",
        "symbols=2",
        "model_rounds=2",
        "life=40",
        "share_by=4",
        "end=30",
    ),
    notes=(
        "Every scheme meets the same failures: when a device can be reached is a function of seed, round and client. A "
        "device that leaves loses what it is sending. Deaths, training and transfers take simulated time, computed "
        "from the real bytes of the real messages and parcels; a shard that would not have landed is taken from the "
        "peer's store before the server asks for it. All schemes have the same end of the round.\n\n"
        "With a relay a contributor is not needed from the K-th shard on that a peer holds. The peers then upload as "
        "much as the contributors would have: over the same slow links, for as long, while they die as well. So a "
        "relay wins where peers are fast and lifetimes are long against one upload, and loses everything at once where "
        "fewer than K relays live to the end; the curves show both. It does not lower what the server receives.\n\n"
        "Clients vanish by chance and are back in the next round: accuracy tells the schemes apart by less than it "
        "moves from round to round, and is a goal that does not gate.\n\n"
        "Replication is the relay with K = 1. The two codes differ only where K random shards happen to be dependent, "
        "four times in a thousand at exactly K."
    ),
)
