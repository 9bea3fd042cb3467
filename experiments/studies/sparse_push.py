"""Sparse-Push: message contents and losses, by graph, data and message size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.decentralised import (
    Energy,
    GossipTraining,
    cost_table,
    honest_ratio,
    ratio,
    run,
    traffic_of,
)
from fedcomp.experiments.findings import largest, mean
from fedcomp.experiments.kit import Record, curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.relayed import beside
from fedcomp.experiments.studies.push_sum_variants import TRAINED, trained
from fedcomp.experiments.tables import Found, Studied
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.gossip.vector import GossipPolicy

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task

SGP: Final = "SGP"
TWO: Final = "2 values"
ONE_PERCENT: Final = "1 %"
LEVELS: Final[Mapping[str, float]] = {
    "10 %": 0.1,
    "2 %": 0.02,
    ONE_PERCENT: 0.01,
    "0.2 %": 0.002,
    # Two of the 2410 parameters of the default model.
    TWO: 2 / 2410,
}
"""The fraction of the model that a message holds."""

SHOWN: Final = ("10 %", ONE_PERCENT, "0.2 %", TWO)
"""The levels that run on every kind of data. The incorrect variants have 2 %."""

STATIC: Final = "exponential"
DIGRAPH: Final = "digraph:0.3"
GRAPHS: Final = (STATIC, "one-peer", DIGRAPH)

IID: Final = "IID"
THREE_DIGITS: Final = "3 digits per node"
TWO_DIGITS: Final = "2 digits per node"
DATA: Final[Mapping[str, int]] = {IID: 0, THREE_DIGITS: 3, TWO_DIGITS: 2}
"""Number of digits that a node sees; 0 means all."""

PIECES: Final = "2 sorted pieces per node"
"""Sorted pieces per node in the long rows (``pieces:2``). They are of equal size, so some contain two digits."""

DROP: Final = 0.1
"""Fraction of instructions, or their answers, that are lost in rows with loss."""

_PAIRS: Final = ((IID, SGP), (IID, TWO), (THREE_DIGITS, SGP), (THREE_DIGITS, ONE_PERCENT))


@dataclass(frozen=True)
class Setting:
    """All settings of a row except the seed."""

    graph: str
    data: str
    level: str
    lossy: bool = False
    long: bool = False
    twice: bool = False

    @property
    def label(self) -> str:
        """The label of the row."""
        place = self.graph + ", twice the nodes" * self.twice
        return f"{place}, {self.data}, {self.level}" + ", twice as long" * self.long + ", with loss" * self.lossy

    def iterations(self, config: Config) -> int:
        """Return the number of iterations with gradients."""
        return config.rounds * (2 if self.long else 1)

    def seeds(self, config: Config) -> range:
        """Return the seeds of the row."""
        # The draw of digits to nodes changes accuracy by a point or more, so a long row has at least three draws.
        return range(config.seed, config.seed + max(int(config.settings["seeds"]), 3 if self.long else 1))

    def algorithm(self, config: Config) -> dict[str, Any]:
        """Return the configuration of the algorithm."""
        own = {"lr": config.settings["lr"], "momentum": config.settings["momentum"]}
        own["decay_over"] = self.iterations(config)
        if self.level == SGP:
            return {"name": "sgp", **own}
        density = LEVELS[self.level]
        # On the random digraph few edges are active at a time, and the given consensus step is stable only at 1 % and
        # above. Below 1 %, and on the other graphs, the rule of the algorithm is used.
        gamma = 0.2 if self.graph == DIGRAPH and density >= LEVELS[ONE_PERCENT] else "auto"
        # One estimate for all is correct if every edge is used in every iteration, and it needs less computing.
        estimates = "broadcast" if self.graph == STATIC and not self.lossy else "edge"
        return {"name": "sparse-push", "density": density, "gamma": gamma, "estimates": estimates, **own}

    def task(self, config: Config, seed: int) -> Task:
        """Return the task of a training. With few nodes each gets more digits, so every digit is held by some node."""
        from fedcomp.tasks import get_task

        # Long rows draw their partition with the seed, because this draw matters most.
        own = {"partition_seed": seed} if self.long else {}
        partition = "pieces:2" if self.data == PIECES else "iid"
        if DATA.get(self.data):
            partition = f"shards:{max(DATA[self.data], math.ceil(10 / self.nodes(config)))}"
        return get_task("digits", hidden=str(config.settings["task.hidden"]), partition=partition, **own)

    def nodes(self, config: Config) -> int:
        """Return the number of nodes."""
        return config.clients * (2 if self.twice else 1)

    def plan(self, config: Config, seed: int) -> GossipTraining:
        """Return one training. A closing phase follows, and the state before it is one of the points."""
        iterations = self.iterations(config)
        return GossipTraining(
            self.task(config, seed),
            get_algorithm(self.algorithm(config)),
            topology_of(self.graph, self.nodes(config), seed),
            iterations,
            seed=seed,
            batch_size=int(config.settings["batch_size"]),
            policy=GossipPolicy(dense_below=0),
            # The baseline sends whole models in every message and needs no closing phase.
            skew_rounds=0 if self.level == SGP else "auto",
            # Ten evaluations or more; the interval is a divisor, so the last iteration is evaluated.
            every=next(n for n in range(max(1, iterations // 10), 0, -1) if iterations % n == 0),
            drop=DROP if self.lossy else 0.0,
        )


def settings_of(config: Config) -> list[Setting]:
    """Return the rows that the claims and the figure need.

    The static graph has every level on every kind of data. The other graphs have the references and one level each,
    with and without loss, on the data for which that level is of interest. Rows with twice the nodes use the static
    graph.
    """
    out = [Setting(STATIC, data, level) for data in (IID, THREE_DIGITS) for level in (SGP, *SHOWN)]
    out += [Setting(STATIC, TWO_DIGITS, level) for level in (SGP, ONE_PERCENT)]
    out += [Setting(graph, data, level) for graph in GRAPHS[1:] for data, level in _PAIRS]
    out += [Setting(DIGRAPH, TWO_DIGITS, level) for level in (SGP, ONE_PERCENT)]
    out += [Setting(graph, THREE_DIGITS, ONE_PERCENT, lossy=True) for graph in GRAPHS]
    out += [Setting(STATIC, IID, TWO, lossy=True), Setting(DIGRAPH, THREE_DIGITS, SGP, lossy=True)]
    out += [Setting(STATIC, data, level, twice=True) for data, level in _PAIRS]
    return [*out, *(Setting(DIGRAPH, PIECES, level, long=True) for level in (SGP, ONE_PERCENT))]


def train(*, config: Config, seed: int, **row: Any) -> dict[str, Any]:
    """Train one row."""
    return run(Setting(**row).plan(config, seed))


def variant(variant: str, data: str, *, config: Config) -> dict[str, float]:
    """Train an incorrect variant on the static graph."""
    # Data, batches and step size are those of the correct row.
    right = Setting(STATIC, data, "2 %", lossy=variant in LOSSY)
    own = {**right.algorithm(config), "gamma": 0.1 if variant == "stateless" else 0.05}
    return trained(variant, replace(right.plan(config, config.seed), algorithm=get_algorithm(own)))


LOSSY: Final = ("kept", "naive debit")
"""Variants about lost messages run on non-IID data only."""


def before(runs: Sequence[Record], iterations: int) -> float:
    """Return the accuracy of the nodes in percent after the last iteration with a gradient, as the mean over seeds."""
    # A diverged run may have stopped before its last iteration.
    return 100 * mean(
        math.nan if run.diverged else next(p["accuracy"] for p in run.points if p["iteration"] == iterations)
        for run in runs
    )


def _row(
    setting: Setting, runs: Sequence[Record], dense: GossipTraffic, known: float, config: Config
) -> dict[str, Any]:
    """Return the results of a row. ``dense`` and ``known`` are traffic and accuracy of SGP on the same graph and data,
    without loss."""
    own, closed = before(runs, setting.iterations(config)), 100 * mean(run.accuracy for run in runs)
    sent = [traffic_of(run) for run in runs]
    sums = [run.invariants.get("sum_w", math.nan) for run in runs]
    return {
        "row": setting.label,
        "nodes, %": own,
        # SGP has no closing phase.
        "closed: nodes, %": None if setting.level == SGP else closed,
        "times smaller, before headers": mean(ratio(each, dense) for each in sent),
        "times smaller, with headers": mean(ratio(each, dense, headers=True) for each in sent),
        "times fewer, whole run": mean(honest_ratio(each, dense) for each in sent),
        "points below SGP": known - own,
        "points below SGP, closed": known - closed,
        "sum of weights": mean(sums),
        "error of the sum": largest(abs(each - setting.nodes(config)) for each in sums),
    }


def study(found: Found) -> Studied:
    """Train every row and every variant, and train the systems that ran over messages again without them."""
    config, settings = found.config, settings_of(found.config)
    cells = [{**asdict(each), "seed": seed} for each in settings for seed in each.seeds(config)]
    groups: dict[Setting, list[Record]] = {}
    for record in found.sweep(train, cells, config=config):
        groups.setdefault(record.read(Setting), []).append(record)
    # The reference of a row with loss is SGP without loss, so the result includes the effect of lost messages.
    dense = {each: groups[replace(each, level=SGP, lossy=False)] for each in groups}
    sent = {each: (traffic_of(runs[0]), traffic_of(dense[each][0])) for each, runs in groups.items()}
    rows = {
        each: _row(each, runs, sent[each][1], before(dense[each], each.iterations(config)), config)
        for each, runs in groups.items()
    }
    asked = [
        {"variant": name, "data": data}
        for name in TRAINED
        for data in ((THREE_DIGITS,) if name in LOSSY else (IID, THREE_DIGITS))
    ]
    variants = found.sweep(variant, asked, "variant", config=config)
    relayed, differ = beside(
        found,
        f"Through Flower, on the engine chosen: {DIGRAPH}, {THREE_DIGITS}. Every message is sent twice, to the server "
        "and from it, and the server fetches models for evaluation.",
    )
    right = rows[Setting(STATIC, THREE_DIGITS, SGP)]["nodes, %"]
    quantities: dict[Any, Any] = {(row["row"], name): row[name] for row in rows.values() for name in row}
    for each in variants.where(data=THREE_DIGITS):
        label = TRAINED[each.variant]
        quantities[label, "points below SGP"] = right - 100 * each.accuracy
        quantities[label, "sum of weights"] = each.sum_w
        quantities[label, "error of the sum"] = abs(each.sum_w - config.clients)
    quantities["half the nodes"] = config.clients / 2
    for what, lossy in (("with loss", True), ("without loss", False)):
        errors = [row["error of the sum"] for each, row in rows.items() if each.lossy == lossy]
        quantities[f"all rows {what}: error of the sum of weights"] = largest(errors)
    tasks = [each.task(config, seed) for each in settings for seed in each.seeds(config)]
    return Studied(
        {**quantities, **differ},
        tables=[
            table(
                "Bytes and accuracy lost",
                {name: name for name in next(iter(rows.values())) if name != "error of the sum"},
                rows.values(),
                "Accuracy is on held-out images, before and after the closing iterations, which average whole models. "
                "Ratios compare with SGP on the same graph and data, without loss and without closing iterations. The "
                "whole run counts headers, digests, the closing iterations and whole estimates. The abstract of the "
                "paper reports 466 times less for 1 point (ResNet-20 and VGG11 on CIFAR-10); it does not say what "
                "that ratio counts.",
            ),
            cost_table(
                "Cost of a run",
                "row",
                {each.label: traffic for each, traffic in sent.items()},
                Energy.of(config.settings),
                "Of the first seed. ",
            ),
            table(
                "Incorrect variants",
                {
                    "variant": lambda group: TRAINED[group[0].variant],
                    f"{IID}, %": lambda group: 100 * group.one(data=IID).accuracy if len(group) > 1 else None,
                    f"{THREE_DIGITS}, %": lambda group: 100 * group.one(data=THREE_DIGITS).accuracy,
                    "sum of weights": lambda group: group.one(data=THREE_DIGITS).sum_w,
                },
                variants.groups("variant").values(),
                "Static exponential graph, before any closing phase. Agreement of the models does not reveal lost "
                "mass, but the sum of the weights does.",
            ),
            relayed,
        ],
        figures=[
            curves(
                f"Accuracy of the nodes against edge bytes, {data}",
                [
                    (each.level, point)
                    for each in groups
                    if each == Setting(STATIC, data, each.level) and not groups[each][0].diverged
                    for point in groups[each][0].points[1:]
                ],
                lambda place: place[1]["edge_bytes"],
                lambda place: 100 * place[1]["accuracy"],
                lambda place: place[0],
                x_label="bytes of all messages so far",
                y_label="nodes, %",
                log_x=True,
                x_bytes=True,
                caption=f"{config.clients} nodes, {STATIC}. The last points are the closing iterations.",
            )
            for data in (IID, THREE_DIGITS)
        ],
        # One record for each partition, for any seeds that drew it.
        tasks=[task.record() for task in {task.options["partition"]: task for task in tasks}.values()],
    )
