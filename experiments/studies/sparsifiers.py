"""Ways of sending a hundredth of an update: a table of schemes, servers with moments, rules that are no mean, a CNN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.codecs import State
from fedcomp.codecs.scalecom import support_frame
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Table, mean
from fedcomp.experiments.kit import Records, curves, over_seeds, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import TUNING_SEED, Found
from fedcomp.layout import Vector
from fedcomp.program import Answer, Ask, Me, Now, Round, Said
from fedcomp.rng import Key
from fedcomp.systems.shared_support import Lead, SharedSupport

if TYPE_CHECKING:
    # Listing the experiments needs no Flower and no torch: they are imported when one is run.
    from flwr.app import Context, Message

    from fedcomp.tasks.base import Task

DENSE: Final = "dense"
TOPK: Final = "top-k + EF"
ORACLE: Final = "true top-k of the mean"
PARTITIONS: Final = ("IID", "label-sorted")
"""How the examples are spread: at random, or one or two digits per client."""

LOOKS: Final = 20
"""Evaluations per training."""

WORSE: Final = "train loss over dense, the worse partition"
BETTER: Final = "train loss over dense, the better partition"
FEWER: Final = "times fewer uplink bytes, the worse partition"
LOST: Final = "points of accuracy lost against dense"

Configuration = dict[str, Any]


def _ef(codec_id: str, **options: Any) -> Configuration:
    """Error feedback around a codec."""
    return {"id": "feedback", "codec": {"id": codec_id, **options}}


def _scalecom(density: float, **options: Any) -> Configuration:
    return {"id": "scalecom", "density": density, **options}


def _dgc(density: float, lr: float) -> Configuration:
    return {"id": "dgc", "density": density, "warmup": 0}


SCHEMES: Final[Mapping[str, Callable[[float, float], Configuration]]] = {
    DENSE: lambda d, lr: {"id": "identity"},
    # A reference that no client could send: nobody knows the mean before it was sent.
    ORACLE: lambda d, lr: _scalecom(d, scope="global"),
    TOPK: lambda d, lr: _ef("topk", density=d),
    "CLT-k": lambda d, lr: _scalecom(d, scope="global"),
    "CLT-k, chunks": lambda d, lr: _scalecom(d, selector="chunk"),
    "CLT-k, beta 0.3": lambda d, lr: _scalecom(d, scope="global", beta=0.3),
    "CLT-k, beta 0.1": lambda d, lr: _scalecom(d, scope="global", beta=0.1),
    "CLT-k, no memory": lambda d, lr: _scalecom(d, scope="global", memory=False),
    "random-k + EF, shared": lambda d, lr: _ef("randomk", density=d, shared=True),
    # Stages fixed: what is judged is the estimate and not the search for their number.
    "SIDCo-E, 3 stages + EF": lambda d, lr: _ef("sidco", density=d, family="exponential", stages=3, adapt="off"),
    "AdaComp, bins of 50": lambda d, lr: {"id": "adacomp", "bin": 50},
    "AdaComp, bins of 500": lambda d, lr: {"id": "adacomp", "bin": 500},
    "AdaComp, bins of 50, factor 1": lambda d, lr: {"id": "adacomp", "bin": 50, "factor": 1.0},
}
"""By label, from the density and the step size to a codec's configuration."""

BASELINES: Final[Mapping[str, Callable[[float, float], Configuration]]] = {
    "DGC": _dgc,
    "DGC, a tenth of the step": _dgc,
    "random-block + EF, shared": lambda d, lr: _ef("randomblock", density=d, shared=True),
    # A threshold is in units of the update, which are the step size's.
    "threshold + EF": lambda d, lr: _ef("threshold", level=0.1 * lr),
    "STC + EF": lambda d, lr: _ef("stc", density=d),
    "key-region + EF": lambda d, lr: _ef("keyregion"),
    "EF-signSGD": lambda d, lr: _ef("scaledsign"),
    # Every coordinate moves by this much in every round, whatever its gradient: the clients' step size itself would be
    # far too long.
    "signSGD, majority vote": lambda d, lr: {"id": "signsgd", "step": 0.01 * lr},
    "TernGrad": lambda d, lr: {"id": "terngrad"},
    "natural compression": lambda d, lr: {"id": "natural"},
    "QSGD": lambda d, lr: {"id": "qsgd"},
}
"""The lower part of the table, with seeds of its own."""

CURVES: Final = (
    DENSE,
    TOPK,
    "CLT-k",
    "CLT-k, beta 0.1",
    "CLT-k, no memory",
    "random-k + EF, shared",
    "AdaComp, bins of 50",
    "EF-signSGD",
)
"""What is drawn."""


class Totals(Said):
    """What no message could say: all that a client would have to send."""

    def __init__(self, vector: Vector) -> None:
        self.vector = vector


@dataclass(frozen=True, repr=False, eq=False)
class Oracle(SharedSupport, id="oracle"):
    """A shared support that is the true top k of the mean of all clients' memory plus update: no leader beats it.

    Its index block travels as if the leader had chosen it.
    """

    def round(self, now: Now) -> Round:
        """Let all train; choose; let all send."""
        leader = (now.number - 1) % len(now.nodes)
        trained = yield [Ask(node) for node in now.nodes]
        total, weight = np.zeros(now.layout.size), sum(answer.weight for answer in trained)
        for answer in trained:
            assert isinstance(answer.say, Totals)
            total += answer.weight / weight * answer.say.vector
        supports = self.codec.choose_from(total.astype(np.float32), now.layout, now.key("uplink", leader))
        blobs = {"support": support_frame(supports, self.codec, now.layout)}
        answers = yield [Ask(node, "query", Lead(lead=node == leader), blobs=blobs) for node in now.nodes]
        return self.stepped(now, supports, blobs["support"], answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        """Show everything, or send on the support; the leader sends that, too."""
        leads = isinstance(ask.say, Lead) and ask.say.lead
        memory, answer = super().client(memory, ask._replace(say=None), me)
        if ask.kind == "train":
            return memory, answer._replace(say=Totals(self.codec.total(memory, me.layout)))
        return memory, answer._replace(frames={**ask.blobs, **answer.frames}) if leads else answer


def partition_of(name: str, clients: int) -> str:
    """Return the task's partition for a name of :data:`PARTITIONS`."""
    # With fewer than five clients two digits each would leave some digits to nobody.
    return "iid" if name == PARTITIONS[0] else f"shards:{max(2, math.ceil(10 / clients))}"


def _task(partition: str, config: Config) -> Task:
    from fedcomp.tasks import get_task

    return get_task(
        "digits", hidden=str(config.settings["task.hidden"]), partition=partition_of(partition, config.clients)
    )


def train(partition: str, label: str, seed: int, *, config: Config) -> dict[str, Any]:
    """Train with one scheme on one partition."""
    from fedcomp.codecs import ScaleCom
    from fedcomp.experiments.central import Plan, measured

    settings = config.settings
    lr = float(settings["lr"]) * (0.1 if label == "DGC, a tenth of the step" else 1.0)
    plan = Plan(
        _task(partition, config),
        config.clients,
        config.rounds,
        seed,
        {"lr": lr, "batch_size": int(settings["batch_size"]), "max_steps": 1},
        max(1, config.rounds // LOOKS),
    )
    codec = {**SCHEMES, **BASELINES}[label](float(settings["density"]), lr)
    if label != ORACLE:
        return measured(plan, codec)
    del codec["id"]
    return measured(plan, Oracle(ScaleCom(**codec)))


def study(found: Found) -> Studied:
    """Train every scheme on both partitions, and the systems that were run as messages once more without them."""
    from fedcomp.experiments.central import beside

    parts = [schemes(found), small_cnn(found), adaptive_servers(found), robust_rules(found)]
    checked, differ = beside(found.results, "With messages: through Flower, on the engine chosen.")
    quantities: dict[Any, Any] = {key: value for part in parts for key, value in part.quantities.items()}
    for label, each in differ.items():
        quantities[label, "bytes of the final model that differ from the run with messages"] = each.model
        quantities[label, "bytes of frames that differ from the ledger's"] = each.frames
    tasks = [_task(partition, found.config).record() for partition in PARTITIONS]
    return Studied(quantities, [t for part in parts for t in part.tables] + [checked], parts[0].figures, tasks)


def schemes(found: Found) -> Studied:
    """Train every scheme on both partitions and compare it with dense averaging."""
    config = found.config
    # No product of axes: baselines have fewer seeds.
    cells = [
        {"partition": partition, "label": label, "seed": seed}
        for partition in PARTITIONS
        for labels, seeds in ((SCHEMES, "seeds"), (BASELINES, "baseline_seeds"))
        for label in labels
        for seed in repetitions(config, seeds)
    ]
    groups: dict[tuple[str, str], Records] = found.sweep(train, cells, config=config).groups("partition", "label")

    def relative(partition: str, label: str) -> float:
        group = groups[partition, label]
        # Over the same seeds only: the loss of dense averaging varies with the seed as well.
        return mean(group.each("loss")) / mean(groups[partition, DENSE][: len(group)].each("loss"))

    def ratio(partition: str, label: str) -> float:
        return mean(groups[partition, DENSE].each("uplink")) / mean(groups[partition, label].each("uplink"))

    def shown(partition: str) -> Table:
        columns: dict[str, Any] = {
            "scheme": str,
            "test, %": lambda label: round(100 * mean(groups[partition, label].each("accuracy")), 1),
            "train loss": lambda label: round(mean(groups[partition, label].each("loss")), 4),
            "loss / dense": lambda label: round(relative(partition, label), 3),
            "uplink ratio": lambda label: round(ratio(partition, label), 1),
            "q/k": lambda label: (
                None if label == ORACLE else round(1 - mean(groups[partition, label].each("overlap")), 3)
            ),
        }
        return table(
            f"Schemes on {partition} data",
            columns,
            (*SCHEMES, *BASELINES),
            "Means over seeds. Test: accuracy on held-out images. The ratio compares real bytes of frames with dense. "
            "q/k: share of the true top k of the mean that the shared support misses, in the rounds that were looked "
            "at.",
        )

    def drawn(partition: str) -> Any:
        return curves(
            f"Train loss against uplink bytes, {partition}",
            [groups[partition, label] for label in CURVES],
            lambda group: over_seeds(group, 2),
            lambda group: over_seeds(group, 1),
            lambda group: group[0].label,
            x_label="uplink so far, all clients",
            y_label="train loss",
            log_x=True,
            log_y=True,
            x_bytes=True,
        )

    quantities: dict[Any, Any] = {}
    for label in (*SCHEMES, *BASELINES):
        both = [relative(partition, label) for partition in PARTITIONS]
        # A scheme has to cope with data that are alike and with data that are not.
        quantities |= {(label, WORSE): max(both), (label, BETTER): min(both)}
        quantities[label, FEWER] = min(ratio(partition, label) for partition in PARTITIONS)
    return Studied(quantities, [shown(p) for p in PARTITIONS], [drawn(p) for p in PARTITIONS])


SERVERS: Final = {"FedAvg": "fedavg", "FedAdam": "fedadam", "FedYogi": "fedyogi", "FedAdagrad": "fedadagrad"}
EVERYWHERE: Final = "top-k + EF, moments everywhere"
WAYS: Final = (DENSE, TOPK, EVERYWHERE)

# FedAvg has no moments; FedAdagrad's do not move where nothing arrived.
SERVER_ROWS: Final = tuple(
    (server, way) for server, way in product(SERVERS, WAYS) if way != EVERYWHERE or server in ("FedAdam", "FedYogi")
)
GRID: Final = tuple(product((0.01, 0.03, 0.1, 0.3, 1.0), (1e-3, 1e-2)))
"""Pairs of the server's step size and tau that every row with moments is tuned over."""


def train_server(
    server: str, way: str, eta: float, tau: float, seed: int, *, config: Config, tuning: bool = False
) -> dict[str, Any]:
    """Train with a server of a step size and tau, one pass over the images a round; on the validation split if
    ``tuning``."""
    from fedcomp.experiments.central import Plan, measured
    from fedcomp.tasks import get_task

    plan = Plan(
        get_task("digits", hidden=str(config.settings["task.hidden"]), validation=tuning),
        config.clients,
        int(config.settings["server_rounds"]),
        seed + tuning * TUNING_SEED,
        {"lr": 0.1, "batch_size": 32, "epochs": 1},
        1,
        {} if server == "FedAvg" else {"inner": SERVERS[server], "inner.eta": eta, "inner.tau": tau},
        way == EVERYWHERE,
    )
    return measured(plan, SCHEMES[DENSE if way == DENSE else TOPK](float(config.settings["density"]), 0.1))


def adaptive_servers(found: Found) -> Studied:
    """Tune every server and train it with the experiment's seeds.

    What the drop-in pair does with a sparse mean (:mod:`fedcomp.strategies.adaptive`) stands beside Flower's own rule,
    which takes a coordinate of which nothing arrived for one without a gradient.
    """
    config = found.config

    def cells(row: tuple[str, str], settings: Sequence[tuple[float, float]], seeds: Sequence[int]) -> list[Any]:
        (server, way), pairs = row, product(settings, seeds)
        return [{"server": server, "way": way, "eta": eta, "tau": tau, "seed": seed} for (eta, tau), seed in pairs]

    asked = [cell for row in SERVER_ROWS if row[0] != "FedAvg" for cell in cells(row, GRID, [config.seed])]
    tried = found.sweep(train_server, asked, "tuning servers", config=config, tuning=True).groups("server", "way")
    # Each server and way by itself: one step size for all would favour the one that it fits.
    best = {row: max(group, key=lambda r: r.settled) for row, group in tried.items()}
    chosen = {row: (best[row].eta, best[row].tau) if row in best else (1.0, 0.0) for row in SERVER_ROWS}
    made = [cell for row in SERVER_ROWS for cell in cells(row, [chosen[row]], repetitions(config))]
    groups = found.sweep(train_server, made, "servers", config=config).groups("server", "way")

    def lost(row: tuple[str, str]) -> float:
        return 100 * (mean(groups[row[0], DENSE].each("settled")) - mean(groups[row].each("settled")))

    columns: dict[str, Any] = {
        "server": ", ".join,
        "eta": lambda row: chosen[row][0] if row in best else None,
        "tau": lambda row: chosen[row][1] if row in best else None,
        "test, %": lambda row: round(100 * mean(groups[row].each("settled")), 1),
        "points lost": lambda row: round(lost(row), 1),
        "stale step, %": lambda row: (
            round(100 * mean(groups[row].each("stale"))) if row in best and row[1] != DENSE else None
        ),
    }
    shown = table(
        "Server optimisers on sparse updates",
        columns,
        SERVER_ROWS,
        "Clients make one pass over their images a round. Step size eta and tau are the best of the same grid on a "
        "validation split, for every row by itself. Test: the mean over the last five rounds and all seeds; points "
        "lost: against the same server with dense updates. Stale step: share of the server's step, squared, on "
        "coordinates of which nothing arrived in that round.",
    )
    return Studied({(", ".join(row), LOST): lost(row) for row in SERVER_ROWS}, [shown])


HALVED: Final = "top-k 2 % in bf16 + EF"
CNN: Final[Mapping[str, tuple[Configuration, float]]] = {
    DENSE: ({"id": "identity"}, 0.06),
    "top-k 1 % + EF": (_ef("topk", density=0.01), 0.1),
    HALVED: (_ef("topk", density=0.02, values="bf16"), 0.06),
    "top-k 1 % + EF, momentum correction": ({**_ef("topk", density=0.01), "momentum": 0.9}, 0.03),
}
"""Codec and step size by label; with ``cnn_tune=true`` the step size is chosen again, of :data:`RATES`."""

RATES: Final = (0.01, 0.03, 0.06, 0.1, 0.15)
CNN_CLIENTS: Final = 10
CNN_MOMENTUM: Final = 0.9
"""Of the clients' SGD, as in Flower's quickstart."""

EXAMPLES: Final[int | None] = None
"""Training images; None for all."""


def train_cnn(label: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train the CNN of Flower's quickstart with a codec and a step size; on the validation split if ``tuning``."""
    from fedcomp.experiments.central import Plan, measured
    from fedcomp.tasks import get_task

    plan = Plan(
        get_task("digits", model="quickstart", validation=tuning, train_examples=EXAMPLES),
        CNN_CLIENTS,
        int(config.settings["cnn_rounds"]),
        seed + tuning * TUNING_SEED,
        {"lr": lr, "momentum": CNN_MOMENTUM, "batch_size": 16, "epochs": 1},
        1,
    )
    return measured(plan, CNN[label][0])


def small_cnn(found: Found) -> Studied:
    """Train a CNN of 62,006 parameters whose clients make a pass a round with momentum."""
    config = found.config
    rates = {label: lr for label, (_, lr) in CNN.items()}
    if config.settings["cnn_tune"]:
        axes = {"label": list(rates), "lr": RATES, "seed": [config.seed]}
        tried = found.sweep(train_cnn, axes, "tuning the CNN", config=config, tuning=True)
        # By the mean of the last five rounds, since one test image decides a single one.
        rates = {label: max(group, key=lambda r: r.settled).lr for label, group in tried.groups("label").items()}
    cells = [
        {"label": label, "lr": lr, "seed": seed}
        for label, lr in rates.items()
        for seed in repetitions(config, "cnn_seeds")
    ]
    groups = found.sweep(train_cnn, cells, "CNN", config=config).groups("label")

    def reached(label: str) -> float:
        return 100 * mean(groups[label].each("settled"))

    def ratio(label: str) -> float:
        return mean(groups[DENSE].each("uplink")) / mean(groups[label].each("uplink"))

    columns: dict[str, Any] = {
        "scheme": str,
        "lr": lambda label: rates[label],
        "test, %": lambda label: round(reached(label), 1),
        "points lost": lambda label: round(reached(DENSE) - reached(label), 1),
        "uplink ratio": lambda label: round(ratio(label), 1),
    }
    shown = table(
        "A CNN whose clients train with momentum",
        columns,
        groups,
        f"{CNN_CLIENTS} clients, one pass a round in steps of 16 images, momentum {CNN_MOMENTUM:g}. Step sizes are the "
        f"best of {', '.join(f'{lr:g}' for lr in RATES)} on a validation split. Test: the mean over the last five "
        "rounds and all seeds.",
    )
    name = f"CNN, {HALVED}"
    return Studied(
        {(name, "times fewer uplink bytes"): ratio(HALVED), (name, LOST): reached(DENSE) - reached(HALVED)}, [shown]
    )


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
RULE_CODECS: Final[Mapping[str, Configuration]] = {
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
"""Share of the way to its target that a client goes in a round."""

NOISE: Final = 0.1
"""Deviation of a client's target from the common one, whose coordinates have deviation 1."""


def distance(rule: str, codec: Mapping[str, Any], rounds: int, seed: int) -> float:
    """Return ‖model - target‖ / ‖target‖ after ``rounds`` rounds from zero; error feedback as the pair adds it."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedcomp.clients.compressed import compression
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.strategies.compressed import Compressed
    from fedcomp.strategies.parts import make_inner

    def drawn(partition: int) -> Any:
        # Uniform and of deviation 1: no few coordinates hold most of it.
        uniform = Key(seed, "robust-rules/target", partition=partition).uniform(SIZE)
        return (np.sqrt(12.0) * (uniform - 0.5)).astype(np.float32)

    # A target that no client has: they draw theirs by partitions below it.
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
    """Let rules other than the mean follow codecs, on a problem that every sensible rule solves.

    A rule that looks at each coordinate, or at each reply, of lists of coordinates that clients chose for themselves
    sees mostly zeros; what it discards is lost, since the client was told that its frame arrived.
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
        f"{RULE_CLIENTS} clients pull a model of {SIZE} weights from zero towards targets close around a common one; 1 "
        f"is where it began, and {(1 - RATE) ** rounds:.3f} is reached without noise. Biased codecs have error "
        "feedback. A shared support is drawn by all clients from the round's key; of their own, each lists other "
        "coordinates.",
    )
    over = reached[MEDIAN, SHARED] / reached[MEAN, SHARED]
    quantities = {
        (f"{MEDIAN}, {SHARED}", f"distance to the target over that of {MEAN} with it"): over,
        (f"{MEDIAN}, {OWN}", "distance to the target"): reached[MEDIAN, OWN],
    }
    return Studied(quantities, [shown])
