"""Skewed neighbour sampling: how many feature rows of other owners a GCN needs, and what fewer of them cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import stdev
from typing import TYPE_CHECKING, Any, Final, cast

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import Curves, Series, Table, largest, mean
from fedcomp.experiments.kit import Record, Records, curves, over_seeds, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunSpec, format_settings
from fedcomp.experiments.studies.graph_runs import SYSTEM, after, outcome, train
from fedcomp.experiments.tables import Found, Studied

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.graphs.settings import SamplerSettings
    from fedcomp.tasks.graph import GraphTask

CUT: Final = "few cut edges"
RANDOM: Final = "random parts"
PARTITIONS: Final = (CUT, RANDOM)
SHORT: Final = {CUT: "axes, few cut edges", RANDOM: "axes, random parts"}
"""What trainings along the axes are called, which may be shorter than those of the comparison."""

CROSS: Final = "cross-partition"

FULL: Final = "all neighbours"
UNSKEWED: Final = "s = 1, unskewed"
LOCAL: Final = "local only"
EIGHT: Final = "s = 8"
SKEWED: Final = "skewed, D = 1.5"
MEASURED: Final = "measured norms, D = 1.5"
WORST: Final = "worst case, D = 1.5"
BOUNDARY: Final = "boundary sampling, as many rows"
UNIFORM: Final = "uniform sampling, as many rows"
"""The rivals of skew at equal cost: fewer of the boundary, or fewer nodes at the input layer, with nothing favoured."""
UPDATES: Final = "rows as auto, updates as qsgd"
LADIES: Final = "LADIES"
RENORMALISED: Final = f"{LADIES}, rows renormalised"

BUDGET: Final = 1.5
"""D of the rows, and of all axes but its own."""

Own = Mapping[str, Any]
"""Settings of one rule."""

_FIXED: Final[Own] = {"mode": "fixed", "scale": 1.0}

RULES: Final[Mapping[str, Own]] = {
    FULL: {"sampler": "full"},
    UNSKEWED: _FIXED,
    "s = 4": {"mode": "fixed", "scale": 4.0},
    **{f"skewed, D = {value:g}": {"variance_budget": value} for value in (1.1, BUDGET, 2.0)},
    MEASURED: {"mode": "measured", "variance_budget": BUDGET},
    WORST: {"mode": "worst", "variance_budget": BUDGET},
    LOCAL: {"sampler": "local"},
}
"""The layer-wise samplers that are compared."""

# The worst-case rule stays on the short axes: it holds for any features, and saves little.
COMPARED: Final = (FULL, UNSKEWED, SKEWED, MEASURED, LOCAL)
"""The rules of the rows, which the claims are about."""

FAMILIES: Final[Mapping[str, Own]] = {
    "node-wise, s = 1": {"sampler": "node", **_FIXED},
    "node-wise, D = 1.5": {"sampler": "node", "variance_budget": BUDGET},
    "LADIES, biased": {"sampler": "ladies"},
    "FastGCN": {"sampler": "fastgcn"},
    "boundary, q = 0.1": {"sampler": "boundary"},
    "multinomial, s = 1": {"estimator": "multinomial", **_FIXED},
    "multinomial, D = 1.5": {"estimator": "multinomial", "variance_budget": BUDGET},
}
"""Other samplers and the other estimator."""

# About thirty rows of the digits (64 numbers of four bytes, an id and a length): far fewer than a client meets on
# random parts, so that rows have to be evicted. Only the LRU cache has a limit; "all" keeps every row.
CACHE_BYTES: Final = 8192
CACHES: Final[Mapping[str, Own]] = {
    f"{label}, cache {cache}": {**RULES[label], "cache": cache, **limit}
    for cache, limit in (("lru", {"cache_bytes": CACHE_BYTES}), ("all", {}))
    for label in (UNSKEWED, SKEWED)
}
"""Samplers with a cache; without one they are among the rules."""

WIRES: Final[Mapping[str, Own]] = {
    **{
        f"rows as {codec}": {**_FIXED, "row_codec": codec}
        for codec in ("dense-f32", "dense-f16", "int8", "csr", "auto")
    },
    UPDATES: {**_FIXED, "row_codec": "auto", "codec": "qsgd"},
    "evaluated on the clients": {**_FIXED, "fraction_evaluate": 1.0},
}
"""One sampler with other bytes: rows shorter, updates too, and evaluation on the clients."""

CROSSING: Final[Mapping[str, Own]] = {
    UNSKEWED: _FIXED,
    EIGHT: {"mode": "fixed", "scale": 8.0},
    SKEWED: RULES[SKEWED],
    LOCAL: RULES[LOCAL],
}
"""What is compared where labels depend on remote neighbours."""

CROSS_NODES: Final = 200
CROSS_BATCH: Final = 64
"""Nodes kept and nodes of a batch there."""

SCALES: Final = (2.0, 4.0, 8.0, 16.0)
"""Fixed scales whose variance is measured."""

SWEPT: Final = ("matched", "measured", "worst")
SWEEP: Final = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Rules and budgets of the figures over D; no training is needed for them."""

MEASURED_ROUNDS: Final = 5
"""Rounds whose batches the exact variances are taken from."""

MATCHED_ROUNDS: Final = 20
"""Rounds on whose plans rivals are given as many rows."""

TUNING_SEED: Final = 1000
"""Batch, layer sizes, step size and number of rounds were chosen on seeds from here on: none of them is reported."""

LOOKS: Final = 10
"""Evaluations of a training."""

FRAME_ROWS: Final = 128
"""Rows of a measured frame."""


def name(where: str, label: str) -> str:
    """Return what the runs of a rule on a partition are called."""
    return f"{where}: {label}"


def adam(rate: float) -> dict[str, Any]:
    """Return the server's Adam, as Flower's FedAdam has it; its tau is Adam's epsilon.

    FedAdam makes float64 of a float32 model; inside the drop-in pair, with the codec that changes nothing, the model
    keeps its type.
    """
    return {"inner": "fedadam", "inner.eta": rate, "inner.tau": 1e-8, "codec": "identity", "lr": 1.0}


def _graph(config: Config) -> dict[str, int]:
    """Return what makes the graph of digits; those of files are as they are."""
    return {"k": int(config.settings["k"])} if config.settings["task"] == "digits-graph" else {}


def spec(config: Config, where: str, label: str, own: Own, rounds: int) -> RunSpec:
    """Return one run: a partition and a rule, with the first seed."""
    given: dict[str, Any] = {
        **adam(0.01),
        # Rounded up: at most LOOKS evaluations, however many rounds there are.
        "evaluate_every": max(1, -(-rounds // LOOKS)),
        "task.cut": "random" if where == RANDOM else str(config.settings["cut"]),
        **{f"task.{key}": value for key, value in _graph(config).items()},
        **own,
    }
    taken = ("n", "batch_size", "task.hidden")
    made = config.spec(SYSTEM, name(where, label), str(config.settings["task"]), take=taken, **given)
    return replace(made, rounds=rounds)


def cross_spec(config: Config, label: str, own: Own) -> RunSpec:
    """Return a run on the cross-partition graph; every seed has a graph of its own."""
    early, rounds = cross_rounds(config)
    given: dict[str, Any] = {
        **adam(0.1),
        "n": str(CROSS_NODES),
        # One layer: a label depends on the colours of direct neighbours and on nothing further away.
        "layers": 1,
        "batch_size": CROSS_BATCH,
        # An evaluation has to fall on both of the rounds after which the rules are compared.
        "evaluate_every": math.gcd(early, rounds),
        "task.parts": config.clients,
        # The graph of the first seed; every further seed is trained on one drawn from that seed.
        "task.graph_seed": config.seed,
        **own,
    }
    return replace(config.spec(SYSTEM, name(CROSS, label), CROSS, **given), rounds=rounds)


def cross_rounds(config: Config) -> tuple[int, int]:
    """Return after how many rounds rules are compared on the cross-partition graph: early, and at the end."""
    early = int(config.settings["cross_rounds"])
    return early, max(early, int(config.settings["cross_long"]))


def rows(config: Config) -> Mapping[str, str]:
    """Return the comparison that the claims are about, with the first seed; it also runs on other engines.

    Raises
    ------
    ConfigError
        With one client, before anything is trained.
    """
    if config.clients < 2:
        raise ConfigError(
            f"clients={config.clients} is not valid here: rows are fetched from other owners; give 2 or more"
        )
    made = [spec(config, CUT, label, RULES[label], config.rounds) for label in COMPARED]
    return {one.name: f"{SYSTEM} task={one.task} {format_settings(one.settings)}" for one in made}


def trainings(config: Config, equal: Mapping[str, Mapping[str, Own]]) -> dict[str, tuple[RunSpec, range]]:
    """Return every training by what it is called in the tables, with its seeds; the rows are among them."""
    # The claims rest on the long trainings; the axes are compared among themselves, for which short ones do.
    seeds, full = repetitions(config), bool(config.settings["full"])
    few, short = (
        (seeds, config.rounds) if full else (seeds[:1], min(config.rounds, int(config.settings["short_rounds"])))
    )
    most = {**{label: RULES[label] for label in COMPARED}, **equal[CUT]}
    long = [spec(config, CUT, label, own, config.rounds) for label, own in most.items()]
    axes: tuple[tuple[Mapping[str, Own], Sequence[str]], ...] = (
        (RULES, PARTITIONS),
        (FAMILIES, PARTITIONS if full else (CUT,)),
        (CACHES, PARTITIONS),
        # Only where many rows travel: between parts with few cut edges nearly all bytes are those of models.
        (WIRES, (RANDOM,)),
    )
    brief = [
        replace(spec(config, where, label, own, short), label=name(SHORT[where], label))
        for axis, wheres in axes
        for where in wheres
        for label, own in axis.items()
    ]
    crossed = [cross_spec(config, label, own) for label, own in {**CROSSING, **equal[CROSS]}.items()]
    return {made.name: (made, which) for some, which in ((long + crossed, seeds), (brief, few)) for made in some}


def study(found: Found) -> Studied:
    """Train on both partitions and the cross-partition graph; measure variances, biases and codecs without training."""
    from fedcomp.tasks import get_task

    config, say = found.config, found.say
    graphs = {
        where: cast("GraphTask", get_task(str(config.settings["task"]), cut=cut, **_graph(config)))
        for where, cut in {CUT: str(config.settings["cut"]), RANDOM: "random"}.items()
    }
    say("samplers that fetch as many rows, by plans")
    # Before the trainings, whose rivals are made of the q and n that are found here, and without looking at a label.
    equal = rivals(config, say.cell("equal rows", partial(_equal_rows, config, graphs[CUT])))
    wanted = trainings(config, equal)
    # The first seed of a comparison is a row, and trained already. Specs are shared and not part of a cell: a cell is
    # named by label and seed alone, as the rows are.
    known = {(label, result.spec.seed): Record(outcome(result)) for label, result in found.results.items()}
    cells = [{"label": label, "seed": seed} for label, (_, seeds) in wanted.items() for seed in seeds]
    waiting = [cell for cell in cells if (cell["label"], cell["seed"]) not in known]
    done = found.sweep(train, waiting, specs={label: made for label, (made, _) in wanted.items()})
    known |= {(one.label, one.seed): one for one in done}
    groups = {label: Records(known[label, seed] for seed in seeds) for label, (_, seeds) in wanted.items()}
    say("exact variances, on the batches of a run")
    exact = say.cell("variances", partial(_variances, config, graphs))
    say("biases: means of many draws")
    biases = say.cell("biases", partial(_biases, config, graphs[RANDOM]))
    codecs = say.cell("row codecs", partial(codec_sizes, graphs[RANDOM]))
    came = Came(config, groups, exact, biases, {where: list(labels) for where, labels in equal.items()})
    for graph in graphs.values():
        # Its record has the partitions it was asked for.
        graph.shared(config.clients)
    return Studied(
        quantities(came),
        tables=_tables(came, codecs),
        figures=_figures(came),
        tasks=[*(graph.record() for graph in graphs.values()), groups[name(CROSS, UNSKEWED)][0].task],
    )


def rivals(config: Config, equal: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Own]]:
    """Return the samplers that fetch as many rows as skew does, by graph: :func:`_equal_rows` says which q and n.

    Only the input layer of uniform sampling is made smaller: rows are fetched there and nowhere else.
    """
    hidden = str(config.settings["n"]).split(",")[-1]
    sizes = {CUT: f"{equal[CUT]['n']:.0f},{hidden}", CROSS: f"{equal[CROSS]['n']:.0f}"}
    return {
        where: {BOUNDARY: {"sampler": "boundary", "q": equal[where]["q"]}, UNIFORM: {**_FIXED, "n": sizes[where]}}
        for where in (CUT, CROSS)
    }


def _equal_rows(config: Config, graph: GraphTask) -> dict[str, dict[str, float]]:
    """Return q and n with which the rivals fetch as many rows as skew: on seeds that no training has."""
    from fedcomp.experiments.studies.graph_variance import Batches, as_many_rows, remote_inputs
    from fedcomp.tasks import get_task

    few = {"n": str(CROSS_NODES), "layers": 1}
    # The graph of the tuning seed: the rivals must not be fitted to a graph that results are taken from.
    crossed = cast("GraphTask", get_task(CROSS, parts=config.clients, graph_seed=TUNING_SEED))
    out = {}
    for where, task, own, size, common in (
        (CUT, graph, RULES[SKEWED], int(config.settings["batch_size"]), {}),
        (CROSS, crossed, CROSSING[EIGHT], CROSS_BATCH, few),
    ):
        batches = Batches(task, config.clients, TUNING_SEED, MATCHED_ROUNDS, size)
        wanted = remote_inputs(batches, _sampler(config, {**common, **own}))
        boundary, uniform = (_sampler(config, {**common, **own}) for own in ({"sampler": "boundary"}, _FIXED))
        q, n = as_many_rows(batches, wanted, boundary, uniform)
        out[where] = {"rows": wanted, "q": q, "n": float(n)}
    return out


def _sampler(config: Config, own: Own) -> SamplerSettings:
    from fedcomp.experiments.systems import get_system
    from fedcomp.strategies.gcn.system import sampler_settings

    return sampler_settings(get_system(SYSTEM).resolve({"n": config.settings["n"], **own}))


def _swept(mode: str, budget: float) -> str:
    """Return the label of a budget along its axis, of which variances are measured and nothing is trained."""
    return f"sweep {mode} {budget:g}"


def _variances(config: Config, graphs: Mapping[str, GraphTask]) -> dict[str, Any]:
    """Return exact ratios of the rules, of fixed scales, and along the budget."""
    from fedcomp.experiments.studies.graph_variance import Batches, measured

    # Samplers that draw in another way have no single s per layer, and no M(s) to measure.
    wanted: dict[str, Own] = {label: own for label, own in RULES.items() if own.get("sampler") is None}
    # The fixed scale of the rules has the same label, and stays one entry.
    wanted |= {f"s = {s:g}": {"mode": "fixed", "scale": s} for s in SCALES}
    wanted |= {_swept(mode, value): {"mode": mode, "variance_budget": value} for mode in SWEPT for value in SWEEP}
    size = int(config.settings["batch_size"])
    return {
        name(where, label): measured(
            Batches(graph, config.clients, config.seed, MEASURED_ROUNDS, size), _sampler(config, own)
        )
        for where, graph in graphs.items()
        for label, own in wanted.items()
    }


def _biases(config: Config, graph: GraphTask) -> dict[str, Any]:
    """Return the bias of every sampler on one batch of random parts."""
    from fedcomp.experiments.studies.graph_variance import bias_of

    wanted: dict[str, Own] = {label: RULES[label] for label in (UNSKEWED, SKEWED)}
    # As published: the rows' sums are restored, and the bias grows with it.
    wanted |= {**FAMILIES, RENORMALISED: {"sampler": "ladies", "renormalise": True}, LOCAL: RULES[LOCAL]}
    size = {"batch": 32, "draws": int(config.settings["draws"]), "seed": config.seed}
    part = graph.shared(config.clients).part(0)
    # One layer of few nodes and the same batch for all: bias has to stand out from the noise of the draws.
    return {label: bias_of(graph, part, _sampler(config, {**own, "n": "64"}), **size) for label, own in wanted.items()}


def codec_sizes(task: GraphTask) -> list[dict[str, Any]]:
    """Return bytes per row of every codec that can hold the task's features, and of others, on some of them."""
    from fedcomp.experiments.bench.graph_rows import row_table

    # Two owners whatever the run has: the bytes of a row do not depend on how many share the graph.
    part = task.shared(2).part(0)
    lines = row_table(part.ids[:FRAME_ROWS], part.features[:FRAME_ROWS], repeats=1)
    return [{key: line[key] for key in ("what", "per_row", "error", "chosen")} for line in lines]


def fewer(before: float, now: float) -> float:
    """Return how many times fewer; NaN when nothing is left to compare."""
    return before / now if now else math.nan


_RUN: Final = {
    "accuracy, %": "accuracy",
    "± sd": "deviation",
    "remote rows a batch": "remote",
    "times fewer": "fewer",
    "rows fetched": "rows_fetched",
    "local mass": "local_mass",
    "s": "scale",
}
_RATIOS: Final = {"V(s)/V(1)": "variance", "M(s)/M(1)": "second_moment"}
_BYTES: Final = {
    "rows, logical": "feature_bytes_logical",
    "rows, link": "feature_bytes_link",
    "ids": "id_bytes",
    "norms": "setup_bytes",
    "plan and row messages": "query_wire",
    "models": "model_bytes",
    "train messages": "train_wire",
    "all messages": "wire",
}
_WIRES: Final = {
    "rows": "rows_fetched",
    "rows, logical": "feature_bytes_logical",
    "rows, link": "feature_bytes_link",
    "evaluation, link": "evaluate_feature_bytes_link",
    "models": "model_bytes",
    "all messages": "wire",
}
_CAPTION: Final = (
    "Accuracy is on the test nodes, all neighbours used. Remote rows: input nodes of a client's batch that other "
    "owners have; times fewer than with s = 1. Rows fetched: of the whole run, all clients. Local mass and s: means "
    "over layers, batches and clients. V and M: exact variance and second moment of the input layer over those of s = "
    "1 on the same rows, from the first rounds' batches, all features known."
)


@dataclass(frozen=True)
class Came:
    """What everything came to: runs of all seeds and exact variances by :func:`name`, biases by sampler, and the labels
    of the rivals at equal cost by graph."""

    config: Config
    groups: Mapping[str, Records]
    exact: Mapping[str, Mapping[str, float]]
    biases: Mapping[str, Mapping[str, float]]
    rivals: Mapping[str, Sequence[str]]

    def runs(self, where: str, label: str) -> Records:
        """Return the runs of a rule on a partition, one per seed."""
        return self.groups[name(where, label)]

    def mean(self, where: str, label: str, figure: str) -> float:
        """Return the mean over seeds of a figure."""
        return mean(self.runs(where, label).each(figure))

    def after(self, label: str, rounds: int) -> list[float]:
        """Return the accuracy of each seed on the cross-partition graph after so many rounds."""
        return [after(run, rounds) for run in self.runs(CROSS, label)]

    def fewer(self, where: str, label: str, figure: str = "per_batch", other: str = UNSKEWED) -> float:
        """Return how many times fewer of a figure there are than of another rule."""
        return fewer(self.mean(where, other, figure), self.mean(where, label, figure))

    def size(self, where: str) -> str:
        """Return how many seeds and rounds the trainings on a partition have."""
        runs = self.runs(where, UNSKEWED)
        return f"{f'{len(runs)} seeds' if len(runs) > 1 else 'one seed'}, {runs[0].points[-1][0]:g} rounds"

    def line(self, where: str, label: str) -> dict[str, Any]:
        """Return the means over seeds of a rule on a partition."""
        runs = self.runs(where, label)
        accuracy = [100.0 * run.accuracy for run in runs]
        # Variances are of a partition, however long the trainings on it are.
        place = name(next((w for w, short in SHORT.items() if short == where), where), label)
        ratios = self.exact.get(place, {})
        return {
            **{each: mean(runs.each(each)) for each in {*_BYTES.values(), *_WIRES.values(), "local_mass", "scale"}},
            "label": label,
            "partition": place,
            "accuracy": mean(accuracy),
            # A single training has no deviation; NaN becomes a dash in the table.
            "deviation": stdev(accuracy) if len(runs) > 1 else math.nan,
            "remote": self.mean(where, label, "per_batch"),
            "fewer": self.fewer(where, label),
            **{each: ratios.get(each, math.nan) for each in _RATIOS.values()},
        }


def quantities(came: Came) -> dict[Any, float]:
    """Return what is claimed: fewer rows at the accuracy of the unskewed sampler; what is remote is learnt from; bytes
    are those sent."""
    out: dict[Any, float] = {}
    for label in (MEASURED, SKEWED):
        out[name(CUT, label), "times fewer remote rows than with s = 1"] = came.fewer(CUT, label)
        points = 100 * (came.mean(CUT, UNSKEWED, "accuracy") - came.mean(CUT, label, "accuracy"))
        out[name(CUT, label), "points of accuracy below s = 1"] = points
    # If n reached the number of candidates, every sampler would keep all of them and nothing would be compared.
    kept = [one["kept"] / one["candidates"] for one in (came.exact[name(where, UNSKEWED)] for where in PARTITIONS)]
    out["share of the input layer's candidates that s = 1 keeps"] = largest(kept)
    early, late = cross_rounds(came.config)
    # Local training has to stay near chance, or accuracy on this graph would not show that remote rows matter.
    out[name(CROSS, LOCAL), "accuracy, best seed"] = largest(came.after(LOCAL, early))
    for label in (EIGHT, SKEWED):
        # The smallest by way of largest(), which does not pass over a NaN as min() would.
        out[name(CROSS, label), "accuracy, worst seed"] = -largest(-x for x in came.after(label, early))
    out[name(CROSS, EIGHT), "times fewer remote rows than with s = 1"] = came.fewer(CROSS, EIGHT)
    for rival in (UNIFORM, BOUNDARY):
        for when, rounds in (("early", early), ("at the end", late)):
            points = 100 * (mean(came.after(EIGHT, rounds)) - mean(came.after(rival, rounds)))
            out[name(CROSS, EIGHT), f"points above {rival}, {when}"] = points
    # Compressed updates are no tensors, which the comparison takes out of the messages.
    runs = [run for label, made in came.groups.items() for run in made if not label.endswith(UPDATES)]
    out["bytes of rows, norms and ids in the ledger's payloads less those reported"] = largest(
        r.gap_asked for r in runs
    )
    out["bytes of rows in the ledger's payloads, both links, less those reported"] = largest(r.gap_link for r in runs)
    out["bytes of rows on both links less twice those sent by owners, without deduplication"] = largest(
        abs(r.feature_bytes_link - 2 * r.feature_bytes_logical) for r in runs
    )
    for where in PARTITIONS:
        for label in (MEASURED, WORST, SKEWED):
            out[name(where, label), "exact M(s)/M(1)"] = came.exact[name(where, label)]["second_moment"]
        cached = came.fewer(SHORT[where], f"{SKEWED}, cache all", "rows_fetched", f"{UNSKEWED}, cache all")
        saved = cached / came.fewer(SHORT[where], SKEWED, "rows_fetched")
        out[where, "times fewer rows where all are cached, over that without a cache"] = saved
    # Local-only draws nothing, and has no noise.
    over = {label: one["distance"] / (one["noise"] or math.nan) for label, one in came.biases.items()}
    # LADIES is biased by construction, with rows renormalised or without.
    unbiased = [value for label, value in over.items() if LADIES not in label and label != LOCAL]
    out["distance of the mean of draws over its noise floor, largest of the unbiased samplers"] = largest(unbiased)
    out["the same of LADIES as published, rows renormalised"] = over[RENORMALISED]
    return out


def _percent(field: str) -> Callable[[Mapping[str, float]], float]:
    return lambda line: 100.0 * line[field]


def _tables(came: Came, codecs: Sequence[Mapping[str, Any]]) -> list[Table]:
    size, plain = came.size(SHORT[CUT]), came.runs(CUT, UNSKEWED)
    main = [came.line(CUT, label) for label in (*COMPARED, *came.rivals[CUT])]

    def short(labels: Iterable[str]) -> list[dict[str, Any]]:
        places = [(SHORT[where], label) for where in PARTITIONS for label in labels]
        return [came.line(where, label) for where, label in places if name(where, label) in came.groups]

    dense = next(line["per_row"] for line in codecs if line["what"] == "dense-f32")
    return [
        table(
            f"Parts with {CUT}, {len(plain)} seeds, {plain[0].points[-1][0]:g} rounds",
            {"rule": "label", **_RUN, **_RATIOS},
            main,
            f"Means over seeds; accuracy with its sample standard deviation. {_CAPTION}",
        ),
        _cross_table(came),
        table(
            f"Partitions and budgets, {size}",
            {"partition: rule": "partition", **_RUN, **_RATIOS},
            short(RULES),
            _CAPTION,
        ),
        table(
            f"Other samplers, {size}",
            {"partition: sampler": "partition", **_RUN},
            short(FAMILIES),
            "Times fewer: against layer-wise sampling with s = 1, in the table above. Node-wise sampling draws "
            "neighbours for each row, and boundary sampling keeps all owned ones: their numbers of nodes are others.",
        ),
        table(
            "What skew does to the variance of the input layer",
            {
                "partition: rule": "key",
                "local mass": "local_mass",
                "s": "scale",
                "M, model": "predicted",
                "M, exact": "second_moment",
                "V(s)/V(1)": "variance",
                "remote, s = 1": "remote_unskewed",
                "remote": "remote",
                "times fewer": lambda line: fewer(line["remote_unskewed"], line["remote"]),
                "candidates": "candidates",
            },
            # Budgets along the axis are for the figures: nobody trains with them, and the table would be three times as
            # long.
            [{"key": key, **line} for key, line in came.exact.items() if "sweep" not in key],
            "On batches of a run, for the same rows with s and with s = 1; expected remote columns. M: M(s)/M(1); the "
            "model is the rule matched: 1 + λ(1 - λ)(s - 1)²/s, right where energy per probability is alike for owned "
            "and remote columns. Measured norms keep M at D exactly, as long as s stays below its limit of 16; the "
            "worst case never exceeds it.",
        ),
        table(
            "Bias of one layer",
            {
                "sampler": "label",
                "mean - Z, %": _percent("distance"),
                "noise floor, %": _percent("noise"),
                "bias, %": _percent("bias"),
                "one draw, %": _percent("deviation"),
                "kept": "kept",
                "remote": "remote",
            },
            [{"label": label, **line} for label, line in came.biases.items()],
            "Of ‖Z‖, Z being the sum over all neighbours of one batch on random parts. The noise floor is what the "
            "mean of as many draws of an unbiased sampler is away from Z; bias is what is beyond it. One draw: root "
            "mean square distance.",
        ),
        table(
            f"Bytes of a run, parts with {CUT}",
            {"rule": "label", **_BYTES},
            # Without the rivals, which come last: they were given as many rows as skew has, so that their bytes say
            # nothing new.
            main[: len(COMPARED)],
            "All clients, both directions, means over seeds. Rows, ids, norms and models are frames and tensors; "
            "messages are whole, with Flower's envelope. A fetched row crosses two links, from its owner to the server "
            "and from there to whoever asked: logical counts it once, link twice. It is part of a rows message and of "
            "a train message.",
        ),
        _cache_table(came, size),
        table(
            "Bytes of a feature row",
            {
                "row codec": lambda line: f"{line['what']}, here {line['chosen']}" if line["chosen"] else line["what"],
                "bytes a row": "per_row",
                "times shorter": lambda line: dense / line["per_row"],
                "exactness": lambda line: "exact" if line["error"] == 0.0 else f"to {line['error']:.2g}",
            },
            codecs,
            f"A frame of {FRAME_ROWS} rows of this task with their ids, header and checksum; codecs that cannot hold "
            "such rows are left out. Shortening rows and fetching fewer multiply.",
        ),
        table(
            f"Rows and updates in other codecs, {RANDOM}, s = 1",
            {"training": "label", "accuracy, %": "accuracy", **_WIRES},
            short(WIRES),
            f"{came.size(SHORT[RANDOM]).capitalize()}; bytes of the run. Clients evaluate with all neighbours at the "
            "end of a round: what they fetch for it is a line of its own.",
        ),
    ]


def _cross_table(came: Came) -> Table:
    early, late = cross_rounds(came.config)
    columns: dict[str, Any] = {"rule": "label"}
    for heading, rounds in (
        (f"accuracy of each seed after {early} rounds, %", early),
        (f"after {late} rounds, %", late),
    ):
        # Bound as defaults: a closure would see the last round of the loop only.
        columns[heading] = lambda line, rounds=rounds: ", ".join(
            f"{100 * x:.1f}" for x in came.after(line["label"], rounds)
        )
        columns[f"mean{' at the end' * ('seed' not in heading)}, %"] = lambda line, rounds=rounds: (
            100 * mean(came.after(line["label"], rounds))
        )
    return table(
        "Where the label stands in neighbours of other owners",
        {**columns, "remote rows a batch": "remote", "times fewer": "fewer", "s": "scale"},
        [came.line(CROSS, label) for label in (*CROSSING, *came.rivals[CROSS])],
        f"A drawn graph of {came.config.clients} owners, a new one for each seed: features say a node's colour, its "
        "label is the colour of its neighbours in other parts. Chance is 25 %. Sampling that loses remote neighbours "
        "learns nothing. As many rows: boundary sampling keeps each remote candidate, uniform sampling each candidate, "
        "with a probability at which a batch has as many remote rows as with s = 8, found on plans of another seed's "
        "graph.",
    )


def _cache_table(came: Came, size: str) -> Table:
    labels, lines = (UNSKEWED, SKEWED), []
    for where in PARTITIONS:
        for cache in ("none", "lru", "all"):
            ends = "" if cache == "none" else f", cache {cache}"
            pair = [came.line(SHORT[where], label + ends) for label in labels]
            # Both of the same pair: unskewed first, as fewer() takes them.
            fetched, link = ([one[figure] for one in pair] for figure in ("rows_fetched", "feature_bytes_link"))
            lines.append([name(where, f"cache {cache}"), *fetched, fewer(*fetched), *link])
    return Table(
        f"Rows fetched with a cache, {size}",
        ("partition: cache", *(f"rows, {x}" for x in labels), "times fewer", *(f"link bytes, {x}" for x in labels)),
        lines,
        "Features never change: a client with room for all asks for every row once, and what skew saves then is the "
        f"rows it never meets. lru: {CACHE_BYTES} bytes on each client.",
    )


def _figures(came: Came) -> list[Curves]:
    swept = [
        {"line": f"{where}, {mode}", "D": budget, **came.exact[name(where, _swept(mode, budget))]}
        for where in PARTITIONS
        for mode in SWEPT
        for budget in SWEEP
    ]
    over_budget = partial(
        curves,
        records=swept,
        x="D",
        by="line",
        x_label="D, times the unskewed variance",
        log_x=True,
        log_y=True,
    )
    return [
        _accuracy_curve(came, f"parts with {CUT}", CUT, [*COMPARED, *came.rivals[CUT]]),
        _accuracy_curve(came, RANDOM, SHORT[RANDOM], RULES),
        curves(
            "Accuracy over rounds where the label stands in neighbours of other owners",
            [(label, came.runs(CROSS, label)) for label in (*CROSSING, *came.rivals[CROSS])],
            lambda pair: over_seeds(pair[1], 0),
            lambda pair: over_seeds(pair[1], 1, 100),
            by=lambda pair: pair[0],
            x_label="round",
            y_label="%",
            caption="Means over seeds, each with a graph of its own.",
        ),
        over_budget(
            "Remote rows against the budget",
            y="remote",
            y_label="remote rows a batch",
            caption="Expected, at the input layer, on batches of a run of the first seed. At D = 1 nothing is "
            "favoured.",
        ),
        over_budget(
            "Second moment against the budget",
            y="second_moment",
            y_label="M(s)/M(1), exact",
            caption="On the diagonal a budget is spent exactly; below it less is saved than is allowed, above it the "
            "model is wrong. s is at most 16.",
        ),
    ]


def _accuracy_curve(came: Came, title: str, where: str, labels: Iterable[str]) -> Curves:
    series = []
    for label in labels:
        # Local training fetches nothing and has no place on an axis of bytes: it becomes a level line below.
        if label != LOCAL:
            sent, right = (over_seeds(came.runs(where, label), i, f) for i, f in ((2, 1), (1, 100)))
            # The axis is logarithmic: evaluations before the first byte have no place on it.
            start = sum(x <= 0 for x in sent)
            series.append(Series(label, sent[start:], right[start:]))
    reached = [x for one in series for x in one.x] or [1.0]
    local = 100 * came.mean(where, LOCAL, "accuracy")
    series.append(Series(f"{LOCAL}, no bytes", [min(reached), max(reached)], [local, local]))
    return Curves(
        f"Accuracy against bytes of features, {title}",
        "bytes of feature rows so far, both links",
        "%",
        series,
        log_x=True,
        x_bytes=True,
        caption=f"{came.size(where).capitalize()}, means. Models and plans are not in it: they cost all rules the "
        "same.",
    )
