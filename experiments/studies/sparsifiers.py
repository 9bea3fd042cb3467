"""Sending 1 % of an update: a table of schemes, servers with momentum, rules other than the mean, and a CNN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.codecs import ErrorFeedback, ScaleCom, TopK
from fedcomp.experiments.experiment import Rows, Studied
from fedcomp.experiments.findings import Table, mean
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies.scalecom import Oracle
from fedcomp.experiments.tables import Found, Training, of_codec, planned, trained
from fedcomp.rng import Key
from fedcomp.systems.pair import Pair

if TYPE_CHECKING:
    # Listing the experiments needs no Flower, so it is imported when one runs.
    from flwr.app import Context, Message

DENSE: Final = "dense"
TOPK: Final = "top-k + EF"
ORACLE: Final = "true top-k of the mean"
PARTITIONS: Final = ("IID", "label-sorted")
"""How examples are distributed: at random, or one or two digits per client."""

LOOKS: Final = 20
"""Number of evaluations per training."""

WORSE: Final = "train loss over dense, the worse partition"
BETTER: Final = "train loss over dense, the better partition"
FEWER: Final = "times fewer uplink bytes, the worse partition"
LOST: Final = "points of accuracy lost against dense"

_EF: Final = "codec codec.feedback=true codec.id="
_CLT: Final = "codec codec.id=scalecom codec.density={density}"
_DGC: Final = "codec codec.id=dgc codec.density={density} codec.warmup=0"

SCHEMES: Final[Rows] = {
    DENSE: "codec codec.id=identity",
    # A reference that cannot be implemented, because no client knows the mean before sending.
    ORACLE: "oracle codec.density={density} codec.scope=global",
    TOPK: _EF + "topk codec.density={density}",
    "CLT-k": f"{_CLT} codec.scope=global",
    "CLT-k, chunks": f"{_CLT} codec.selector=chunk",
    "CLT-k, beta 0.3": f"{_CLT} codec.scope=global codec.beta=0.3",
    "CLT-k, beta 0.1": f"{_CLT} codec.scope=global codec.beta=0.1",
    "CLT-k, no memory": f"{_CLT} codec.scope=global codec.memory=false",
    "random-k + EF, shared": _EF + "randomk codec.density={density} codec.shared=true",
    # The number of stages is fixed, because the estimate is judged, not the search for that number.
    "SIDCo-E, 3 stages + EF": _EF
    + "sidco codec.density={density} codec.family=exponential codec.stages=3 codec.adapt=off",
    "AdaComp, bins of 50": "codec codec.id=adacomp codec.bin=50",
    "AdaComp, bins of 500": "codec codec.id=adacomp codec.bin=500",
    "AdaComp, bins of 50, factor 1": "codec codec.id=adacomp codec.bin=50 codec.factor=1.0",
}


def baselines(lr: float) -> Rows:
    """Return the lower part of the table, which has its own seeds. Some rows depend on the step size."""
    return {
        "DGC": _DGC,
        "DGC, a tenth of the step": f"{_DGC} lr={0.1 * lr}",
        "random-block + EF, shared": _EF + "randomblock codec.density={density} codec.shared=true",
        # A threshold is in units of the update, which scale with the step size.
        "threshold + EF": f"{_EF}threshold codec.level={0.1 * lr}",
        "STC + EF": _EF + "stc codec.density={density}",
        "key-region + EF": f"{_EF}keyregion",
        "EF-signSGD": f"{_EF}scaledsign",
        # Every coordinate moves by this much in every round for any gradient; the clients' step size itself would be
        # far too large.
        "signSGD, majority vote": f"codec codec.id=signsgd codec.step={0.01 * lr}",
        "TernGrad": "codec codec.id=terngrad",
        "natural compression": "codec codec.id=natural",
        "QSGD": "codec codec.id=qsgd",
    }


def oracle(**options: Any) -> Oracle:
    """Return the program of this reference."""
    return Oracle(ScaleCom(**options))


def corrected(density: float, momentum: float) -> Pair:
    """Return the program of top-k with momentum correction."""
    return Pair(ErrorFeedback(TopK(density), momentum=momentum))


def partition_of(name: str, clients: int) -> str:
    """Return the task's partition for a name of :data:`PARTITIONS`."""
    # With fewer than five clients, two digits each would leave some digits unused.
    return "iid" if name == PARTITIONS[0] else f"shards:{max(2, math.ceil(10 / clients))}"


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row without messages. If the label says so, moments are updated everywhere, as in Flower."""
    from fedcomp.experiments import central

    plan, system = planned(spec, training)
    return central.measured(replace(plan, everywhere=spec.label.endswith(EVERYWHERE)), system)


def trained_rows(
    found: Found, rows: Rows, each: str, seeds: str = "seeds", grids: Mapping[str, Any] = {}
) -> tuple[dict[str, Records], dict[str, Records]]:
    """Train rows without messages; see :func:`fedcomp.experiments.tables.trained`."""
    rivals = {"codec": of_codec, "oracle": oracle, "corrected": corrected}
    # Tuning must use the same training, so it also uses :func:`train`.
    made: dict[str, Any] = {"rows": rows, "each": each, "train": train, "rivals": rivals}
    return trained(
        found, replace(found.experiment, tunes_without_messages=False, **made), repetitions(found.config, seeds), grids
    )


def study(found: Found) -> Studied:
    """Train every scheme on both partitions, and train the systems that ran over messages again without them."""
    from fedcomp.experiments.central import beside

    parts = [schemes(found), small_cnn(found), adaptive_servers(found), robust_rules(found)]
    checked, differ = beside(found.results, "These rows run through Flower on the chosen engine.")
    quantities: dict[Any, Any] = {key: value for part in parts for key, value in part.quantities.items()}
    for label, each in differ.items():
        quantities[label, "bytes of the final model that differ from the run with messages"] = each.model
        quantities[label, "bytes of frames that differ from the ledger's"] = each.frames
    return Studied(quantities, [t for part in parts for t in part.tables] + [checked])


def schemes(found: Found) -> Studied:
    """Train every scheme on both partitions and compare it with dense averaging."""
    config, groups = found.config, dict[str, Records]()
    labels = [*SCHEMES, *(lower := baselines(float(config.settings["lr"])))]
    every = f"max_steps=1 evaluate_every={max(1, config.rounds // LOOKS)}"
    for rows, seeds in ((SCHEMES, "seeds"), (lower, "baseline_seeds")):
        spread = {
            f"{label}, {where}": f"{text} task.partition={partition_of(where, config.clients)}"
            for where in PARTITIONS
            for label, text in rows.items()
        }
        groups |= trained_rows(found, spread, every, seeds)[0]

    def relative(label: str, where: str) -> float:
        group = groups[f"{label}, {where}"]
        # Over the same seeds only, because the loss of dense averaging also varies with the seed.
        return mean(group.each("loss")) / mean(groups[f"{DENSE}, {where}"][: len(group)].each("loss"))

    def ratio(label: str, where: str) -> float:
        return mean(groups[f"{DENSE}, {where}"].each("uplink")) / mean(groups[f"{label}, {where}"].each("uplink"))

    def shown(where: str) -> Table:
        def of(label: str, name: str) -> float:
            return mean(groups[f"{label}, {where}"].each(name))

        columns: dict[str, Any] = {
            "scheme": str,
            "test, %": lambda label: round(100 * of(label, "accuracy"), 1),
            "train loss": lambda label: round(of(label, "loss"), 4),
            "loss / dense": lambda label: round(relative(label, where), 3),
            "uplink ratio": lambda label: round(ratio(label, where), 1),
            "q/k": lambda label: None if label == ORACLE else round(1 - of(label, "overlap"), 3),
        }
        return table(
            f"Schemes on {where} data",
            columns,
            labels,
            "Means over seeds. Test: accuracy on held-out images. The ratio compares real bytes of frames with dense "
            "ones. q/k: fraction of the true top k of the mean that the shared support misses, in the evaluated "
            "rounds.",
        )

    quantities: dict[Any, Any] = {}
    for label in labels:
        both = [relative(label, where) for where in PARTITIONS]
        # A scheme has to work with IID and with non-IID data.
        quantities |= {(label, WORSE): max(both), (label, BETTER): min(both)}
        quantities[label, FEWER] = min(ratio(label, where) for where in PARTITIONS)
    return Studied(quantities, [shown(where) for where in PARTITIONS])


SERVERS: Final = ("FedAvg", "FedAdam", "FedYogi", "FedAdagrad")
EVERYWHERE: Final = "top-k + EF, moments everywhere"

# FedAvg has no moments, and FedAdagrad's do not change where nothing arrived.
SERVER_ROWS: Final[Rows] = {
    f"{server}, {way}": f"{SCHEMES[DENSE if way == DENSE else TOPK]} inner={server.lower()}"
    for server, way in product(SERVERS, (DENSE, TOPK, EVERYWHERE))
    if way != EVERYWHERE or server in ("FedAdam", "FedYogi")
}
GRID: Final[Mapping[str, tuple[float, ...]]] = {"inner.eta": (0.01, 0.03, 0.1, 0.3, 1.0), "inner.tau": (1e-3, 1e-2)}
"""Server step sizes and values of tau over which every row with moments is tuned."""


def adaptive_servers(found: Found) -> Studied:
    """Tune every server with clients that make one pass over the images a round, and train it with the experiment's
    seeds.

    The drop-in pair's rule for a sparse mean (:mod:`fedcomp.strategies.adaptive`) is compared with Flower's own rule,
    which treats a coordinate that did not arrive as one with gradient zero.
    """
    each = f"rounds={found.config.settings['server_rounds']} lr=0.1 batch_size=32 epochs=1 evaluate_every=1"
    moved = {label: text for label, text in SERVER_ROWS.items() if not label.startswith("FedAvg")}
    still = {label: text for label, text in SERVER_ROWS.items() if label not in moved}
    # Each server and rule separately, because one step size for all would favour the one that it fits.
    groups = {**trained_rows(found, still, each)[0], **trained_rows(found, moved, each, grids=GRID)[0]}

    def lost(row: str) -> float:
        return mean(groups[f"{row.partition(',')[0]}, {DENSE}"].each("score")) - mean(groups[row].each("score"))

    columns: dict[str, Any] = {
        "server": str,
        "eta": lambda row: groups[row][0].get("inner.eta"),
        "tau": lambda row: groups[row][0].get("inner.tau"),
        "test, %": lambda row: round(mean(groups[row].each("score")), 1),
        "points lost": lambda row: round(lost(row), 1),
        "stale step, %": lambda row: (
            round(100 * mean(groups[row].each("stale"))) if row in moved and not row.endswith(DENSE) else None
        ),
    }
    shown = table(
        "Server optimisers on sparse updates",
        columns,
        SERVER_ROWS,
        "Clients make one pass over their images a round. Step size eta and tau are the best of the same grid on a "
        "validation split, separately for every row. Test: the mean over the last five rounds and all seeds; points "
        "lost: compared with the same server and dense updates. Stale step: the squared fraction of the server's step "
        "on coordinates that did not arrive in that round.",
    )
    return Studied({(row, LOST): lost(row) for row in SERVER_ROWS}, [shown])


HALVED: Final = "top-k 2 % in bf16 + EF"
CNN: Final[Rows] = {
    DENSE: "codec codec.id=identity lr=0.06",
    "top-k 1 % + EF": f"{_EF}topk codec.density=0.01 lr=0.1",
    HALVED: f"{_EF}topk codec.density=0.02 codec.values=bf16 lr=0.06",
    "top-k 1 % + EF, momentum correction": "corrected codec.density=0.01 codec.momentum=0.9 lr=0.03",
}
"""Step size of the CNN; ``cnn_tune=true`` chooses it again from :data:`RATES`."""

RATES: Final = (0.01, 0.03, 0.06, 0.1, 0.15)
CNN_CLIENTS: Final = 10
CNN_MOMENTUM: Final = 0.9
"""Momentum of the clients' SGD, as in Flower's quickstart."""


def small_cnn(found: Found) -> Studied:
    """Train the CNN of Flower's quickstart, 62,006 parameters, with clients that make one pass per round with
    momentum."""
    said = found.config.settings
    each = (
        f"task.model=quickstart clients={CNN_CLIENTS} rounds={said['cnn_rounds']} evaluate_every=1 "
        f"momentum={CNN_MOMENTUM} batch_size=16 epochs=1"
    )
    groups, _ = trained_rows(found, CNN, each, "cnn_seeds", {"lr": RATES} if said["cnn_tune"] else {})

    def lost(label: str) -> float:
        return mean(groups[DENSE].each("score")) - mean(groups[label].each("score"))

    def ratio(label: str) -> float:
        return mean(groups[DENSE].each("uplink")) / mean(groups[label].each("uplink"))

    columns: dict[str, Any] = {
        "scheme": str,
        "lr": lambda label: groups[label][0].get("lr", float(CNN[label].rpartition("=")[2])),
        "test, %": lambda label: round(mean(groups[label].each("score")), 1),
        "points lost": lambda label: round(lost(label), 1),
        "uplink ratio": lambda label: round(ratio(label), 1),
    }
    shown = table(
        "A CNN whose clients train with momentum",
        columns,
        CNN,
        f"{CNN_CLIENTS} clients, one pass a round in steps of 16 images, momentum {CNN_MOMENTUM:g}. Step sizes are the "
        f"best of {', '.join(f'{lr:g}' for lr in RATES)} on a validation split. Test: the mean over the last five "
        "rounds and all seeds.",
    )
    name = f"CNN, {HALVED}"
    return Studied({(name, "times fewer uplink bytes"): ratio(HALVED), (name, LOST): lost(HALVED)}, [shown])


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
SHARED: Final = "random-k, shared"
OWN: Final = "random-k, own"
RULE_CODECS: Final[Mapping[str, Mapping[str, Any]]] = {
    DENSE: {"id": "identity"},
    "QSGD": {"id": "qsgd", "levels": 7},
    "signs": {"id": "scaledsign"},
    SHARED: {"id": "randomk", "density": 0.1},
    OWN: {"id": "randomk", "density": 0.1, "shared": False},
    "top-k": {"id": "topk", "density": 0.1},
}
RULE_CLIENTS: Final = 10
SIZE: Final = 2000
RATE: Final = 0.1
"""Fraction of the way to its target that a client moves in a round."""

NOISE: Final = 0.1
"""Standard deviation of a client's target from the common one, whose coordinates have standard deviation 1."""


def distance(rule: str, codec: Mapping[str, Any], rounds: int, seed: int) -> float:
    """Return ‖model - target‖ / ‖target‖ after ``rounds`` rounds from zero, with error feedback as in the pair."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedcomp.clients.compressed import compression
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.strategies.compressed import Compressed
    from fedcomp.strategies.parts import make_inner

    def drawn(partition: int) -> Any:
        # Uniform with standard deviation 1, so no few coordinates hold most of the norm.
        uniform = Key(seed, "robust-rules/target", partition=partition).uniform(SIZE)
        return (np.sqrt(12.0) * (uniform - 0.5)).astype(np.float32)

    # A target that no client has, since clients draw theirs with smaller partition numbers.
    app, target = ClientApp(mods=[compression()]), drawn(RULE_CLIENTS)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = msg.content.array_records["arrays"]["w"].numpy()
        own = target + np.float32(NOISE) * drawn(int(context.node_config["partition-id"]))
        moved = ArrayRecord({"w": Array(model + np.float32(RATE) * (own - model))})
        return Message(RecordDict({"arrays": moved, "m": MetricRecord({"num-examples": 1})}), reply_to=msg)

    initial = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    with quiet(), InProcessGrid(app, RULE_CLIENTS, seed=seed) as grid:
        strategy = Compressed(make_inner({"fraction_evaluate": 0.0, **RULES[rule]}), dict(codec), seed=seed)
        result = strategy.start(grid, initial, num_rounds=rounds)
    return float(np.linalg.norm(result.arrays["w"].numpy() - target) / np.linalg.norm(target))


def robust_rules(found: Found) -> Studied:
    """Combine codecs with rules other than the mean, on a problem that every reasonable rule solves.

    When clients choose their coordinates individually, a rule on coordinates or on replies sees mostly zeros. The
    values that it discards are lost, since the client was told that its frame arrived.
    """
    rounds, seed = int(found.config.settings["rule_rounds"]), found.config.seed
    reached = {
        (rule, name): found.say.cell(f"{rule}, {name}", partial(distance, rule, codec, rounds, seed))
        for name, codec in RULE_CODECS.items()
        for rule in RULES
    }
    columns: dict[str, Any] = {"rule": str} | {
        name: (lambda rule, name=name: round(reached[rule, name], 3)) for name in RULE_CODECS
    }
    shown = table(
        "Rules other than the mean: distance to the target",
        columns,
        RULES,
        f"{RULE_CLIENTS} clients pull a model of {SIZE} weights from zero towards targets close to a common one; 1 is "
        f"the start, and {(1 - RATE) ** rounds:.3f} is reached without noise. Biased codecs have error feedback. All "
        "clients draw a shared support from the round's key; with their own supports, each sends other coordinates.",
    )
    over = reached[MEDIAN, SHARED] / reached[MEAN, SHARED]
    quantities = {
        (f"{MEDIAN}, {SHARED}", f"distance to the target over that of {MEAN} with it"): over,
        (f"{MEDIAN}, {OWN}", "distance to the target"): reached[MEDIAN, OWN],
    }
    return Studied(quantities, [shown])
