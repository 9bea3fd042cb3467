"""What Sparse-Push's messages hold and what is lost by it: trainings by graph, data and size of a message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fedcomp.experiments.decentralised import Energy, GossipCell, Trained, cost_table, honest_ratio, ratio
from fedcomp.experiments.findings import largest, mean
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.relayed import beside
from fedcomp.experiments.studies.push_sum_variants import TRAINED, trained
from fedcomp.experiments.tables import Found, Studied

SGP: Final = "SGP"
TWO: Final = "2 values"
ONE_PERCENT: Final = "1 %"
LEVELS: Final[Mapping[str, float]] = {
    "10 %": 0.1,
    "5 %": 0.05,
    "2 %": 0.02,
    ONE_PERCENT: 0.01,
    "0.5 %": 0.005,
    "0.2 %": 0.002,
    # Two of the 2410 parameters of the default model.
    TWO: 2 / 2410,
}
"""What share of the model a message holds."""

SHOWN: Final = ("10 %", ONE_PERCENT, "0.2 %", TWO)
"""The levels that are run on every kind of data without asking for the whole product."""

STATIC: Final = "exponential"
DIGRAPH: Final = "digraph:0.3"
GRAPHS: Final = (STATIC, "one-peer", DIGRAPH)

IID: Final = "IID"
THREE_DIGITS: Final = "3 digits per node"
TWO_DIGITS: Final = "2 digits per node"
DATA: Final[Mapping[str, int]] = {IID: 0, THREE_DIGITS: 3, TWO_DIGITS: 2}
"""How many digits a node sees; 0: all of them."""

PIECES: Final = "2 sorted pieces per node"
"""Of equal size, which straddle digits in places (``pieces:2``): what the long rows are trained on."""

DROP: Final = 0.1
"""Share of instructions lost, or their answers, in rows with loss."""

_PAIRS: Final = ((IID, SGP), (IID, TWO), (THREE_DIGITS, SGP), (THREE_DIGITS, ONE_PERCENT))


@dataclass(frozen=True)
class Setting:
    """What a row was trained with: everything but the seed."""

    graph: str
    data: str
    level: str
    lossy: bool = False
    long: bool = False
    twice: bool = False

    @property
    def label(self) -> str:
        """The row's name."""
        place = self.graph + ", twice the nodes" * self.twice
        return f"{place}, {self.data}, {self.level}" + ", twice as long" * self.long + ", with loss" * self.lossy

    def iterations(self, config: Config) -> int:
        """Return how many iterations have gradients."""
        return config.rounds * (2 if self.long else 1)

    def seeds(self, config: Config) -> range:
        """Return the seeds it is trained with."""
        # Which node gets which digits is a draw that decides over a point and more: three at least of a long row.
        return range(config.seed, config.seed + max(int(config.settings["seeds"]), 3 if self.long else 1))

    def algorithm(self, config: Config) -> dict[str, Any]:
        """Return the configuration of the algorithm."""
        own = {"lr": config.settings["lr"], "momentum": config.settings["momentum"]}
        own["decay_over"] = self.iterations(config)
        if self.level == SGP:
            return {"name": "sgp", **own}
        density = LEVELS[self.level]
        # On the random digraph few edges are active at a time: the given consensus step is stable at 1 % and above
        # only; below it, and on the other graphs, the algorithm's own rule is taken.
        gamma = 0.2 if self.graph == DIGRAPH and density >= LEVELS[ONE_PERCENT] else "auto"
        # One estimate for all is right as long as every edge is used in every iteration, and there is less to compute.
        estimates = "broadcast" if self.graph == STATIC and not self.lossy else "edge"
        return {"name": "sparse-push", "density": density, "gamma": gamma, "estimates": estimates, **own}

    def cell(self, config: Config, seed: int) -> GossipCell:
        """Return one training. A closing phase follows; what the nodes hold before it is one of its points."""
        nodes, iterations = config.clients * (2 if self.twice else 1), self.iterations(config)
        return GossipCell(
            self.algorithm(config),
            self.graph,
            nodes,
            iterations,
            seed,
            "digits",
            {"hidden": str(config.settings["task.hidden"]), "partition": partition(self.data, nodes)}
            # Long rows draw their partition with the seed: who holds what is the draw that decides.
            | ({"partition_seed": seed} if self.long else {}),
            {
                "batch_size": config.settings["batch_size"],
                "dense_below": 0,
                # The baseline has whole models in every message and nothing to close.
                "skew_rounds": 0 if self.level == SGP else "auto",
                # Ten evaluations or more; a divisor, so that one of them falls on the last iteration.
                "every": next(n for n in range(max(1, iterations // 10), 0, -1) if iterations % n == 0),
                "drop": DROP if self.lossy else 0.0,
            },
        )


def partition(data: str, nodes: int) -> str:
    """Return how the examples are dealt; with few nodes each gets more digits, so that every digit has a place."""
    if data == PIECES:
        return "pieces:2"
    return f"shards:{max(DATA[data], math.ceil(10 / nodes))}" if DATA[data] else "iid"


def settings_of(config: Config) -> list[Setting]:
    """Return the rows: what the claims and the picture need, or the whole product.

    The static graph shows every level on every kind of data; the others the references and one level each, with and
    without loss, on the data where that level is of interest. Twice the nodes are run on the static graph.
    """
    out = [Setting(STATIC, data, level) for data in (IID, THREE_DIGITS) for level in (SGP, *SHOWN)]
    out += [Setting(STATIC, TWO_DIGITS, level) for level in (SGP, ONE_PERCENT)]
    out += [Setting(graph, data, level) for graph in GRAPHS[1:] for data, level in _PAIRS]
    out += [Setting(DIGRAPH, TWO_DIGITS, level) for level in (SGP, ONE_PERCENT)]
    out += [Setting(graph, THREE_DIGITS, ONE_PERCENT, lossy=True) for graph in GRAPHS]
    out += [Setting(STATIC, IID, TWO, lossy=True), Setting(DIGRAPH, THREE_DIGITS, SGP, lossy=True)]
    out += [Setting(STATIC, data, level, twice=True) for data, level in _PAIRS]
    if config.settings["full"]:
        every = [
            Setting(graph, data, level, lossy, twice=twice)
            for twice in (False, True)
            for graph in GRAPHS
            for data in DATA
            for level in (SGP, *LEVELS)
            for lossy in (False, True)
        ]
        out = list(dict.fromkeys([*out, *every]))
    return [*out, *(Setting(DIGRAPH, PIECES, level, long=True) for level in (SGP, ONE_PERCENT))]


def train(*, config: Config, seed: int, **row: Any) -> dict[str, Any]:
    """Train one row."""
    return Setting(**row).cell(config, seed).run()


def variant(variant: str, data: str, *, config: Config) -> dict[str, float]:
    """Train an incorrect variant on the static graph."""
    # Everything but what is wrong is that of the right row: data, batches, step size.
    cell = Setting(STATIC, data, "2 %").cell(config, config.seed)
    return trained(
        variant,
        replace(
            cell,
            algorithm={**cell.algorithm, "gamma": 0.1 if variant == "stateless" else 0.05},
            training={**cell.training, "drop": DROP if variant in LOSSY else 0.0},
        ),
    )


LOSSY: Final = ("kept", "naive debit")
"""Variants that are about lost messages: on unlike data only."""


def _row(setting: Setting, runs: Sequence[Trained], dense: Sequence[Trained], config: Config) -> dict[str, Any]:
    """Return what a row came to; ``dense`` are the trainings of SGP on the same graph and data, without loss."""
    end, nodes = setting.iterations(config), setting.cell(config, config.seed).nodes

    def before(runs: Sequence[Trained]) -> float:
        """Return the accuracy of the nodes after the last iteration with a gradient, mean over seeds."""
        # A run that diverged may have stopped before its last iteration.
        ended = (math.nan if r.diverged else next(p.accuracy for p in r.points if p.iteration == end) for r in runs)
        return 100 * mean(ended)

    own, known, closed = before(runs), before(dense), 100 * mean(run.accuracy for run in runs)
    sums = [run.invariants.get("sum_w", math.nan) for run in runs]
    return {
        "row": setting.label,
        "nodes, %": own,
        # SGP has no closing phase.
        "closed: nodes, %": None if setting.level == SGP else closed,
        "times smaller, before headers": mean(ratio(run.traffic, dense[0].traffic) for run in runs),
        "times smaller, with headers": mean(ratio(run.traffic, dense[0].traffic, headers=True) for run in runs),
        "times fewer, whole run": mean(honest_ratio(run.traffic, dense[0].traffic) for run in runs),
        "points below SGP": known - own,
        "points below SGP, closed": known - closed,
        "sum of weights": mean(sums),
        "error of the sum": largest(abs(each - nodes) for each in sums),
    }


def study(found: Found) -> Studied:
    """Train every row and every variant, and the systems that were run as messages once more without them."""
    from fedcomp.tasks import get_task

    config, settings = found.config, settings_of(found.config)
    cells = [{**asdict(each), "seed": seed} for each in settings for seed in each.seeds(config)]
    groups: dict[Setting, list[Trained]] = {}
    for record in found.sweep(train, cells, config=config):
        groups.setdefault(record.read(Setting), []).append(record.read(Trained))
    # The reference of a lossy row is SGP without loss: what is lost by losing messages is part of what it costs.
    dense = {each: groups[replace(each, level=SGP, lossy=False)] for each in groups}
    rows = {each: _row(each, runs, dense[each], config) for each, runs in groups.items()}
    asked = [
        {"variant": name, "data": data}
        for name in TRAINED
        for data in ((THREE_DIGITS,) if name in LOSSY else (IID, THREE_DIGITS))
    ]
    variants = found.sweep(variant, asked, "variant", config=config)
    relayed, differ = beside(
        found,
        f"Through Flower, on the engine chosen: {DIGRAPH}, {THREE_DIGITS}. Every message travels twice there, to the "
        "server and from it, and models are fetched to be looked at.",
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
    used = [each.cell(config, seed).options for each in settings for seed in each.seeds(config)]
    return Studied(
        {**quantities, **differ},
        tables=[
            table(
                "Bytes and accuracy lost",
                {name: name for name in next(iter(rows.values())) if name != "error of the sum"},
                rows.values(),
                "Accuracy on held-out images, before and after the closing iterations, in which whole models are "
                "averaged. Ratios are against SGP on the same graph and data, without loss and without closing "
                "iterations. The whole run counts headers, digests, the closing iterations and whole estimates. The "
                "abstract of the paper has 466 times less at 1 point (ResNet-20 and VGG11 on CIFAR-10); what that "
                "ratio counts is not known.",
            ),
            cost_table(
                "Cost of a run",
                "row",
                {each.label: (runs[0].traffic, dense[each][0].traffic) for each, runs in groups.items()},
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
                "Static exponential graph, before any closing phase. Models that agree do not show that mass is being "
                "lost; the sum of the weights does.",
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
                lambda place: place[1].edge_bytes,
                lambda place: 100 * place[1].accuracy,
                lambda place: place[0],
                x_label="bytes of all messages so far",
                y_label="nodes, %",
                log_x=True,
                x_bytes=True,
                caption=f"{config.clients} nodes, {STATIC}. The last points are those of the closing iterations.",
            )
            for data in (IID, THREE_DIGITS)
        ],
        # One record for each partition, whichever seeds drew it.
        tasks=[get_task("digits", **o).record() for o in {o["partition"]: dict(o) for o in used}.values()],
    )
