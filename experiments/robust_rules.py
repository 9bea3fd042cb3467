"""The part of the experiment ``sparsifiers`` about rules other than the mean: which codecs a median or Krum can follow.

A problem that every sensible rule solves: client i pulls the model towards its own target, and these lie close around a
common one. A rule that looks at each coordinate, or at each reply, of lists of coordinates that clients chose for
themselves sees mostly zeros; what it discards is lost, since the client was told that its frame arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.findings import Claim, Table
from fedcomp.experiments.kit import Say, claim, table
from fedcomp.experiments.options import Config, Option
from fedcomp.flower.logs import quiet
from fedcomp.rng import Key
from fedcomp.rules import Int, Real
from fedcomp.strategies.parts import make_inner

if TYPE_CHECKING:
    # Listing the experiments needs no Flower: it is imported when one is run.
    from flwr.app import Context, Message

CLIENTS: Final = 10
SIZE: Final = 2000
RATE: Final = 0.1
"""Share of the way to its target that a client goes in a round."""

NOISE: Final = 0.1
"""Deviation of a client's target from the common one, whose coordinates have deviation 1."""

MEAN: Final = "FedAvg"
MEDIAN: Final = "FedMedian"
RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    MEAN: {"inner": "fedavg"},
    MEDIAN: {"inner": "fedmedian"},
    "FedTrimmedAvg": {"inner": "fedtrimmedavg", "inner.beta": 0.2},
    "Krum": {"inner": "krum", "inner.num_malicious_nodes": 1},
    "MultiKrum": {"inner": "multikrum", "inner.num_malicious_nodes": 1, "inner.num_nodes_to_select": 5},
    "Bulyan": {"inner": "bulyan", "inner.num_malicious_nodes": 1},
}

DENSE: Final = "dense"
SHARED: Final = "random-k, shared"
CODECS: Final[Mapping[str, Mapping[str, Any]]] = {
    DENSE: {"id": "identity"},
    "QSGD": {"id": "qsgd", "levels": 7},
    "signs": {"id": "scaledsign"},
    SHARED: {"id": "randomk"},
    "random-k, own": {"id": "randomk", "shared": False},
    "top-k": {"id": "topk"},
}

OPTIONS: Final = {
    "rule_rounds": Option(20, Int(1), "rounds of the rows with a rule other than the mean"),
    "rule_density": Option(0.1, Real(above=0.0, most=1.0), "share of the coordinates that their sparse codecs send"),
}


def distance(rule: str, codec: Mapping[str, Any], rounds: int, seed: int) -> float:
    """Return ‖model - target‖ / ‖target‖ after ``rounds`` rounds from zero; error feedback as the pair adds it."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedcomp.clients.compressed import compression
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.strategies.compressed import Compressed

    def drawn(partition: int) -> Any:
        # Uniform and of deviation 1: no few coordinates hold most of it.
        uniform = Key(seed, "robust-rules/target", partition=partition).uniform(SIZE)
        return (np.sqrt(12.0) * (uniform - 0.5)).astype(np.float32)

    # A target that no client has: they draw theirs by partitions below it.
    app, target = ClientApp(mods=[compression()]), drawn(CLIENTS)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = msg.content.array_records["arrays"]["w"].numpy()
        own = target + np.float32(NOISE) * drawn(int(context.node_config["partition-id"]))
        moved = ArrayRecord({"w": Array(model + np.float32(RATE) * (own - model))})
        return Message(RecordDict({"arrays": moved, "m": MetricRecord({"num-examples": 1})}), reply_to=msg)

    initial = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    with quiet(), InProcessGrid(app, CLIENTS, seed=seed) as grid:
        strategy = Compressed(make_inner({"fraction_evaluate": 0.0, **RULES[rule]}), dict(codec), seed=seed)
        result = strategy.start(grid, initial, num_rounds=rounds)
    return float(np.linalg.norm(result.arrays["w"].numpy() - target) / np.linalg.norm(target))


def measure(config: Config, say: Say) -> tuple[Table, list[Claim]]:
    """A median can follow a shared support, and cannot follow supports of the clients' own."""
    rounds, density = int(config.settings["rule_rounds"]), float(config.settings["rule_density"])

    def codec(name: str) -> Mapping[str, Any]:
        listed = {"density": density} if CODECS[name]["id"] in ("topk", "randomk") else {}
        return {**CODECS[name], **listed}

    reached = {
        (rule, name): say.cell(f"{rule}, {name}", partial(distance, rule, codec(name), rounds, config.seed))
        for name in CODECS
        for rule in RULES
    }
    columns: dict[str, Any] = {"rule": str} | {
        name: (lambda rule, name=name: round(reached[rule, name], 3)) for name in CODECS
    }
    return table(
        "Rules other than the mean: distance to the target",
        columns,
        RULES,
        f"{CLIENTS} clients pull a model of {SIZE} weights from zero towards targets close around a common one; 1 is "
        f"where it began, and {(1 - RATE) ** rounds:.3f} is reached without noise. Biased codecs have error feedback. "
        "A shared support is drawn by all clients from the round's key; of their own, each lists other coordinates.",
    ), [
        claim(
            f"{MEDIAN}, {SHARED}: distance to the target over that of {MEAN} with it",
            reached[MEDIAN, SHARED] / reached[MEAN, SHARED],
            "<= 1.25",
            "goal: on a support that all clients share a median sees what a mean sees",
        ),
        claim(
            f"{MEDIAN}, random-k, own: distance to the target",
            reached[MEDIAN, "random-k, own"],
            ">= 0.9",
            "derived: where fewer than half of the clients list a coordinate, the median of its changes is zero",
        ),
    ]
