"""Skewed neighbour sampling: how many feature rows of other owners a GCN needs, and what fewer of them cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from fedcomp.errors import ConfigError
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, largest, mean
from fedcomp.experiments.graph_runs import SYSTEM, after, outcome, train
from fedcomp.experiments.kit import Record, Records, Sweep, claim, curves, repetitions, table, workers
from fedcomp.experiments.spec import RunResult, RunSpec

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
BOUNDARY: Final = "boundary sampling, as many rows"
UNIFORM: Final = "uniform sampling, as many rows"
"""The rivals of skew at equal cost: fewer of the boundary, or fewer nodes at the input layer, with nothing favoured."""
EVALUATED: Final = "evaluated on the clients"
UPDATES: Final = "rows as auto, updates as qsgd"
LADIES: Final = "LADIES"
RENORMALISED: Final = f"{LADIES}, rows renormalised"

GOAL: Final = "goal of this package"
THEORY: Final = "theory"

SCALES: Final = (2.0, 4.0, 8.0, 16.0)
"""Fixed scales whose variance is measured."""

SWEPT: Final = ("matched", "measured", "worst")
"""Rules that the figures over D show."""

SWEEP: Final = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Budgets of these figures; no training is needed for them."""

MEASURED_ROUNDS: Final = 5
"""Rounds whose batches the exact variances are taken from."""

MATCHED_ROUNDS: Final = 20
"""Rounds on whose plans rivals are given as many rows."""

TUNING_SEED: Final = 1000
"""Batch, layer sizes, step size and number of rounds were chosen on seeds from here on: none of them is reported."""

LOOKS: Final = 10
"""Evaluations of a training."""

CACHE_BYTES: Final = 8192
"""Limit of the LRU cache."""

ROW_CODECS: Final = ("dense-f32", "dense-f16", "int8", "csr", "auto")
"""Codecs that trainings are made with."""

FRAME_ROWS: Final = 128
"""Rows of a measured frame."""

Own = Mapping[str, Any]
"""Settings of one rule."""

Groups = Mapping[str, Records]
"""Runs of all seeds, by :func:`name`."""

Exact = Mapping[str, Mapping[str, float]]
"""Figures of :func:`fedcomp.experiments.graph_variance.measured`, by :func:`name`."""


def _budgets(text: str) -> tuple[float, ...]:
    """Return the budgets of the axis."""
    found = tuple(sorted({float(word) for word in text.split(",")}))
    if not all(1.0 <= value < math.inf for value in found):
        raise ValueError("expected finite numbers of at least 1, separated by commas")
    return found


def _layer_sizes(text: str) -> None:
    from fedcomp.strategies.gcn.system import layer_sizes  # brings torch and Flower

    layer_sizes(text)


OPTIONS = {
    "task": Option(
        "digits-graph",
        "the graph; all but digits-graph need files under $FEDCOMP_DATA",
        choices=("digits-graph", "cora", "citeseer", "cora-ml"),
    ),
    "cut": Option(
        "auto",
        "how parts with few cut edges are made; auto: METIS where it is installed",
        choices=("auto", "metis", "kernighan-lin", "greedy"),
    ),
    "seeds": Option(3, "trainings of each kind, with the seeds from --seed on", least=1, most=20),
    "workers": workers(2),
    "full": Option(False, "every axis as long as the rows and with all seeds, instead of short and with the first one"),
    "task.hidden": Option("64", "width of the hidden layer"),
    "k": Option(4, "digits-graph: nearest digits that one is joined to", least=1, most=100),
    "n": Option("256", "nodes kept at a layer, or one number per layer, input layer first", check=_layer_sizes),
    "fanout": Option(5, "neighbours of a row, node-wise", least=1),
    "q": Option(0.1, "share of the boundary that boundary sampling keeps", above=0.0, most=1.0),
    "batch_size": Option(128, "nodes of a batch on each client", least=1),
    "local_steps": Option(1, "steps of a client in a round; more than one is local SGD", least=1),
    "lr": Option(1.0, "step size of the clients' SGD; at 1 and one step the server's Adam sees gradients", above=0.0),
    "rate": Option(0.01, "step size of the server's Adam", above=0.0),
    "budget": Option(1.5, "D of the rows, and of all axes but its own", least=1.0),
    "budgets": Option("1.1,2", "more D along its axis, separated by commas", check=_budgets),
    "scale": Option(4.0, "s of the rule that has a fixed one", least=1.0, most=16.0),
    "short_rounds": Option(20, "rounds of the trainings along the axes, unless full", least=2),
    "cross_rounds": Option(40, "rounds on the cross-partition graph after which rules are compared", least=1),
    "cross_long": Option(120, "rounds after which they are compared once more, and training ends", least=1),
    "cross_rate": Option(0.1, "step size of the server's Adam there", above=0.0),
    "cross_n": Option(200, "nodes kept there", least=1),
    "cross_batch": Option(64, "nodes of a batch there", least=1),
    "draws": Option(400, "draws from which the bias of a sampler is measured", least=2),
    "bias_n": Option(64, "nodes kept of them", least=1),
    "bias_batch": Option(32, "nodes of that batch", least=1),
}

TAKEN: Final = ("n", "fanout", "q", "batch_size", "local_steps", "lr", "task.hidden")


def name(where: str, label: str) -> str:
    """Return what the runs of a rule on a partition are called."""
    return f"{where}: {label}"


def skewed(budget: float) -> str:
    """Return the label of the sampler whose scale follows from a budget by the rule "matched"."""
    return f"skewed, D = {budget:g}"


def cached(label: str, cache: str) -> str:
    """Return the label of a sampler with a cache."""
    return label if cache == "none" else f"{label}, cache {cache}"


def _budget(config: Config) -> str:
    return skewed(float(config.settings["budget"]))


def rules(config: Config) -> dict[str, Own]:
    """Return the layer-wise samplers that are compared, by label."""
    budget = float(config.settings["budget"])
    fixed = float(config.settings["scale"])
    along = sorted({budget, *_budgets(str(config.settings["budgets"]))})
    return {
        FULL: {"sampler": "full"},
        UNSKEWED: {"mode": "fixed", "scale": 1.0},
        f"s = {fixed:g}": {"mode": "fixed", "scale": fixed},
        **{skewed(value): {"variance_budget": value} for value in along},
        f"measured norms, D = {budget:g}": {"mode": "measured", "variance_budget": budget},
        f"worst case, D = {budget:g}": {"mode": "worst", "variance_budget": budget},
        LOCAL: {"sampler": "local"},
    }


def compared(config: Config) -> dict[str, Own]:
    """Return the rules of the rows, which the claims are about."""
    mine, (measured, _, matched) = rules(config), promising(config)
    return {label: mine[label] for label in (FULL, UNSKEWED, matched, measured, LOCAL)}


def families(config: Config) -> dict[str, Own]:
    """Return other samplers and the other estimator."""
    budget = float(config.settings["budget"])
    return {
        "node-wise, s = 1": {"sampler": "node", "mode": "fixed", "scale": 1.0},
        f"node-wise, D = {budget:g}": {"sampler": "node", "variance_budget": budget},
        "LADIES, biased": {"sampler": "ladies"},
        "FastGCN": {"sampler": "fastgcn"},
        f"boundary, q = {float(config.settings['q']):g}": {"sampler": "boundary"},
        "multinomial, s = 1": {"estimator": "multinomial", "mode": "fixed", "scale": 1.0},
        f"multinomial, D = {budget:g}": {"estimator": "multinomial", "variance_budget": budget},
    }


def caches(config: Config) -> dict[str, Own]:
    """Return the samplers with a cache; without one they are among the rules."""
    mine = rules(config)
    return {
        cached(label, cache): {**mine[label], "cache": cache, **limit}
        for cache, limit in (("lru", {"cache_bytes": CACHE_BYTES}), ("all", {}))
        for label in (UNSKEWED, _budget(config))
    }


def wires(config: Config) -> dict[str, Own]:
    """Return one sampler with other bytes: rows shorter, updates too, and evaluation on the clients."""
    mine = rules(config)[UNSKEWED]
    return {
        **{f"rows as {codec}": {**mine, "row_codec": codec} for codec in ROW_CODECS},
        UPDATES: {**mine, "row_codec": "auto", "codec": "qsgd"},
        EVALUATED: {**mine, "fraction_evaluate": 1.0},
    }


def crossing(config: Config) -> dict[str, Own]:
    """Return what is compared where labels stand in remote neighbours."""
    mine = rules(config)
    return {
        UNSKEWED: mine[UNSKEWED],
        EIGHT: {"mode": "fixed", "scale": 8.0},
        _budget(config): mine[_budget(config)],
        LOCAL: mine[LOCAL],
    }


def rivals(config: Config, found: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Own]]:
    """Return the samplers that fetch as many rows as skew does, by graph: :func:`_equal_rows` says which q and n.

    Only the input layer of uniform sampling is made smaller: rows are fetched there and nowhere else.
    """
    hidden = str(config.settings["n"]).split(",")[-1]
    sizes = {CUT: f"{found[CUT]['n']:.0f},{hidden}", CROSS: f"{found[CROSS]['n']:.0f}"}
    return {
        where: {
            BOUNDARY: {"sampler": "boundary", "q": found[where]["q"]},
            UNIFORM: {"mode": "fixed", "scale": 1.0, "n": sizes[where]},
        }
        for where in (CUT, CROSS)
    }


def adam(rate: float) -> dict[str, Any]:
    """Return the server's Adam, as Flower's FedAdam has it; its tau is Adam's epsilon.

    FedAdam makes float64 of a float32 model; inside the drop-in pair, with the codec that changes nothing, the model
    keeps its type.
    """
    return {"inner": "fedadam", "inner.eta": rate, "inner.tau": 1e-8, "codec": "identity"}


def _graph(config: Config) -> dict[str, int]:
    """Return what makes the graph of digits; those of files are as they are."""
    return {"k": int(config.settings["k"])} if config.settings["task"] == "digits-graph" else {}


def spec(config: Config, where: str, label: str, own: Own, rounds: int) -> RunSpec:
    """Return one run: a partition and a rule, with the first seed."""
    given: dict[str, Any] = {
        **adam(float(config.settings["rate"])),
        "evaluate_every": max(1, -(-rounds // LOOKS)),
        "task.cut": "random" if where == RANDOM else str(config.settings["cut"]),
        **{f"task.{key}": value for key, value in _graph(config).items()},
        **own,
    }
    made = config.spec(SYSTEM, name(where, label), str(config.settings["task"]), take=TAKEN, **given)
    return replace(made, rounds=rounds)


def cross_spec(config: Config, label: str, own: Own) -> RunSpec:
    """Return a run on the cross-partition graph; every seed has a graph of its own."""
    early, rounds = _cross_rounds(config)
    given: dict[str, Any] = {
        **adam(float(config.settings["cross_rate"])),
        "lr": float(config.settings["lr"]),
        "n": str(config.settings["cross_n"]),
        "layers": 1,
        "batch_size": int(config.settings["cross_batch"]),
        "evaluate_every": math.gcd(early, rounds),
        "task.parts": config.clients,
        "task.graph_seed": config.seed,
        **own,
    }
    return replace(config.spec(SYSTEM, name(CROSS, label), CROSS, **given), rounds=rounds)


def _cross_rounds(config: Config) -> tuple[int, int]:
    """Return after how many rounds rules are compared on the cross-partition graph: early, and at the end."""
    early = int(config.settings["cross_rounds"])
    return early, max(early, int(config.settings["cross_long"]))


def rows(config: Config) -> list[RunSpec]:
    """The comparison that the claims are about, with the first seed; these also run on other engines."""
    if config.clients < 2:
        # Else the cross-partition graph would say so, after everything else was trained.
        raise ConfigError(
            f"clients={config.clients} is not valid here: rows are fetched from other owners; give 2 or more"
        )
    return [spec(config, CUT, label, own, config.rounds) for label, own in compared(config).items()]


def trainings(config: Config, equal: Mapping[str, Mapping[str, Own]]) -> dict[str, tuple[RunSpec, range]]:
    """Return every training by what it is called in the tables, with its seeds; the rows are among them."""
    seeds, full = repetitions(config), bool(config.settings["full"])
    few, short = (
        (seeds, config.rounds) if full else (seeds[:1], min(config.rounds, int(config.settings["short_rounds"])))
    )
    most = {**compared(config), **equal[CUT]}
    long = [spec(config, CUT, label, own, config.rounds) for label, own in most.items()]
    axes = (
        (rules(config), PARTITIONS),
        (families(config), PARTITIONS if full else (CUT,)),
        (caches(config), PARTITIONS),
        (wires(config), (RANDOM,)),
    )
    brief = [
        replace(spec(config, where, label, own, short), label=name(SHORT[where], label))
        for axis, wheres in axes
        for where in wheres
        for label, own in axis.items()
    ]
    crossed = [cross_spec(config, label, own) for label, own in (crossing(config) | dict(equal[CROSS])).items()]
    return {made.name: (made, which) for some, which in ((long + crossed, seeds), (brief, few)) for made in some}


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Train on both partitions and the cross-partition graph; measure variances, biases and codecs without training."""
    from fedcomp.tasks import get_task

    cuts = {CUT: config.settings["cut"], RANDOM: "random"}
    graphs = {
        w: cast("GraphTask", get_task(str(config.settings["task"]), cut=cut, **_graph(config)))
        for w, cut in cuts.items()
    }
    say("samplers that fetch as many rows, by plans")
    equal = rivals(config, say.cell("equal rows", partial(_equal_rows, config, graphs[CUT])))
    groups = _trained(config, results, trainings(config, equal), say)
    say("exact variances, on the batches of a run")
    exact: Exact = say.cell("variances", partial(_variances, config, graphs))
    say("biases: means of many draws")
    biases = say.cell("biases", partial(_biases, config, graphs[RANDOM]))
    codecs = say.cell("row codecs", partial(codec_sizes, graphs[RANDOM]))
    made = claims_of(config, groups, exact, biases)
    first, second = made[:2]
    for graph in graphs.values():
        # Its record has the partitions it was asked for.
        graph.shared(config.clients)
    return Findings(
        tables=_tables(config, groups, equal, exact, biases, codecs),
        figures=_figures(config, groups, equal, exact),
        claims=made,
        answer=f"{first.value:.1f} times fewer remote rows a batch than without skew, at {second.value:.2f} points of "
        f"accuracy less ({CUT}, {promising(config)[0]}).",
        tasks=[*(graph.record() for graph in graphs.values()), groups[name(CROSS, UNSKEWED)][0].task],
    )


def _trained(
    config: Config, results: Mapping[str, RunResult], wanted: Mapping[str, tuple[RunSpec, range]], say: Say
) -> Groups:
    """Return the runs of every training; the first seed of a comparison is a row, and trained already."""
    known = {(label, result.spec.seed): outcome(result) for label, result in results.items()}
    cells = [{"label": label, "seed": seed} for label, (_, seeds) in wanted.items() for seed in seeds]
    waiting = [cell for cell in cells if (cell["label"], cell["seed"]) not in known]
    sweep = Sweep(train, waiting, shared={"specs": {label: made for label, (made, _) in wanted.items()}})
    found = {(one.label, one.seed): one for one in sweep(say, int(config.settings["workers"]))}
    found |= {key: Record(fields) for key, fields in known.items()}
    return {label: Records(found[label, seed] for seed in seeds) for label, (_, seeds) in wanted.items()}


def _equal_rows(config: Config, graph: GraphTask) -> dict[str, dict[str, float]]:
    """Return q and n with which the rivals fetch as many rows as skew: on seeds that no training has."""
    from fedcomp.experiments.graph_variance import Batches, as_many_rows, remote_inputs
    from fedcomp.tasks import get_task

    few = {"n": str(config.settings["cross_n"]), "layers": 1}
    crossed = cast("GraphTask", get_task(CROSS, parts=config.clients, graph_seed=TUNING_SEED))
    out = {}
    for where, task, own, size, common in (
        (CUT, graph, rules(config)[_budget(config)], int(config.settings["batch_size"]), {}),
        (CROSS, crossed, crossing(config)[EIGHT], int(config.settings["cross_batch"]), few),
    ):
        batches = Batches(task, config.clients, TUNING_SEED, MATCHED_ROUNDS, size)
        wanted = remote_inputs(batches, _sampler(config, {**common, **own}))
        boundary = _sampler(config, {**common, "sampler": "boundary"})
        uniform = _sampler(config, {**common, **rules(config)[UNSKEWED]})
        q, n = as_many_rows(batches, wanted, boundary, uniform)
        out[where] = {"rows": wanted, "q": q, "n": float(n)}
    return out


def _sampler(config: Config, own: Own) -> SamplerSettings:
    from fedcomp.experiments.systems import get_system
    from fedcomp.strategies.gcn.system import sampler_settings

    taken = {key: config.settings[key] for key in ("n", "fanout", "q")}
    return sampler_settings(get_system(SYSTEM).resolve({**taken, **own}))


def _swept(mode: str, budget: float) -> str:
    """Return the label of a budget along its axis, of which variances are measured and nothing is trained."""
    return f"sweep {mode} {budget:g}"


def _variances(config: Config, graphs: Mapping[str, GraphTask]) -> dict[str, Any]:
    """Return exact ratios of the rules, of fixed scales, and along the budget."""
    from fedcomp.experiments.graph_variance import Batches, measured

    wanted: dict[str, Own] = {label: own for label, own in rules(config).items() if own.get("sampler") is None}
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
    from fedcomp.experiments.graph_variance import bias_of

    mine, few = rules(config), {"n": str(config.settings["bias_n"])}
    wanted: dict[str, Own] = {label: mine[label] for label in (UNSKEWED, _budget(config))}
    wanted |= families(config)
    wanted[RENORMALISED] = {"sampler": "ladies", "renormalise": True}
    wanted[LOCAL] = mine[LOCAL]
    size = {"batch": int(config.settings["bias_batch"]), "draws": int(config.settings["draws"]), "seed": config.seed}
    part = graph.shared(config.clients).part(0)
    return {label: bias_of(graph, part, _sampler(config, {**own, **few}), **size) for label, own in wanted.items()}


def codec_sizes(task: GraphTask) -> list[dict[str, Any]]:
    """Return bytes per row of every codec that can hold the task's features, and of others, on some of them."""
    from fedcomp.experiments.bench.graph_rows import row_table

    part = task.shared(2).part(0)
    lines = row_table(part.ids[:FRAME_ROWS], part.features[:FRAME_ROWS], repeats=1)
    return [{key: line[key] for key in ("what", "per_row", "error", "chosen")} for line in lines]


# Tables and figures.

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
    "plan messages": "plan_wire",
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


def fewer(before: float, now: float) -> float:
    """Return how many times fewer; NaN when nothing is left to compare."""
    return before / now if now else math.nan


def _size(runs: Records) -> str:
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
    return f"{seeds}, {runs[0].points[-1][0]:g} rounds"


def _line(groups: Groups, where: str, label: str, exact: Exact | None = None) -> Record:
    """Return the means over seeds of a rule on a partition, rounded as a table shows them."""
    runs, key = groups[name(where, label)], name(where, label)
    means = {field: mean(runs.each(field)) for field in ("rows_fetched", "local_mass", "scale", "per_batch")}
    total = {field: round(mean(runs.each(field))) for field in {*_BYTES.values(), *_WIRES.values()} - means.keys()}
    accuracy = [100.0 * run.accuracy for run in runs]
    middle = mean(accuracy)
    spread = math.fsum((value - middle) ** 2 for value in accuracy) / (len(runs) - 1) if len(runs) > 1 else math.nan
    # Variances are of a partition, however long the trainings on it are.
    place = next((w for w, short in SHORT.items() if short == where), where)
    ratios = (exact or {}).get(name(place, label), {})
    return Record(
        {
            **means,
            **total,
            "key": key,
            "label": label,
            "partition": name(place, label),
            "accuracy": round(middle, 2),
            "deviation": round(math.sqrt(spread), 2),
            "remote": round(means["per_batch"], 2),
            "fewer": round(fewer(mean(groups[name(where, UNSKEWED)].each("per_batch")), means["per_batch"]), 2),
            "local_mass": round(means["local_mass"], 3),
            "scale": round(means["scale"], 2),
            **{field: round(ratios.get(field, math.nan), 3) for field in _RATIOS.values()},
        }
    )


def _tables(
    config: Config,
    groups: Groups,
    equal: Mapping[str, Mapping[str, Own]],
    exact: Exact,
    biases: Mapping[str, Mapping[str, float]],
    codecs: Iterable[Mapping[str, Any]],
) -> list[Table]:
    main = [_line(groups, CUT, label, exact) for label in (*compared(config), *equal[CUT])]
    plain = groups[name(CUT, UNSKEWED)]
    size = _size(groups[name(SHORT[CUT], UNSKEWED)])
    ruled = [_line(groups, SHORT[where], label, exact) for where in PARTITIONS for label in rules(config)]
    others = [
        _line(groups, SHORT[where], label)
        for where in PARTITIONS
        for label in families(config)
        if name(SHORT[where], label) in groups
    ]
    return [
        table(
            f"Parts with {CUT}, {len(plain)} seeds, {plain[0].points[-1][0]:g} rounds",
            {"rule": "label", **_RUN, **_RATIOS},
            main,
            f"Means over seeds; accuracy with its sample standard deviation. {_CAPTION}",
        ),
        _cross_table(config, groups, [*crossing(config), *equal[CROSS]]),
        table(f"Partitions and budgets, {size}", {"partition: rule": "partition", **_RUN, **_RATIOS}, ruled, _CAPTION),
        table(
            f"Other samplers, {size}",
            {"partition: sampler": "partition", **_RUN},
            others,
            "Times fewer: against layer-wise sampling with s = 1, in the table above. Node-wise sampling draws "
            "neighbours for each row, and boundary sampling keeps all owned ones: their numbers of nodes are others.",
        ),
        _variance_table(exact),
        _bias_table(biases),
        table(
            f"Bytes of a run, parts with {CUT}",
            {"rule": "label", **_BYTES},
            main[: len(compared(config))],
            "All clients, both directions, means over seeds. Rows, ids, norms and models are frames and tensors; "
            "messages are whole, with Flower's envelope. A fetched row crosses two links, from its owner to the server "
            "and from there to whoever asked: logical counts it once, link twice. It stands in a rows message and in a "
            "train message.",
        ),
        _cache_table(config, groups, size),
        _codec_table(codecs),
        table(
            f"Rows and updates in other codecs, {RANDOM}, s = 1",
            {"training": "label", "accuracy, %": "accuracy", **_WIRES},
            [_line(groups, SHORT[RANDOM], label) for label in wires(config)],
            f"{_size(groups[name(SHORT[RANDOM], UNSKEWED)]).capitalize()}; bytes of the run. Clients evaluate with all "
            "neighbours at the end of a round: what they fetch for it is a line of its own.",
        ),
    ]


def _cross_table(config: Config, groups: Groups, labels: Iterable[str]) -> Table:
    early, late = _cross_rounds(config)

    def each(when: int, label: str) -> str:
        return ", ".join(f"{100 * after(run, when):.1f}" for run in groups[name(CROSS, label)])

    def middle(when: int, label: str) -> float:
        return round(100 * mean(after(run, when) for run in groups[name(CROSS, label)]), 2)

    lines = {label: _line(groups, CROSS, label) for label in labels}
    return Table(
        "Where the label stands in neighbours of other owners",
        (
            "rule",
            f"accuracy of each seed after {early} rounds, %",
            "mean, %",
            f"after {late} rounds, %",
            "mean, %",
            "remote rows a batch",
            "times fewer",
            "s",
        ),
        [
            [
                label,
                *(of(when, label) for when in (early, late) for of in (each, middle)),
                round(line.per_batch, 1),
                line.fewer,
                line.scale,
            ]
            for label, line in lines.items()
        ],
        f"A drawn graph of {config.clients} owners, a new one for each seed: features say a node's colour, its label "
        "is the colour of its neighbours in other parts. Chance is 25 %. Sampling that loses remote neighbours learns "
        "nothing. As many rows: boundary sampling keeps each remote candidate, uniform sampling each candidate, with "
        "a probability at which a batch has as many remote rows as with s = 8, found on plans of another seed's graph.",
    )


def _variance_table(exact: Exact) -> Table:
    def shown(field: str, digits: int) -> Any:
        return lambda line: round(line[field], digits)

    return table(
        "What skew does to the variance of the input layer",
        {
            "partition: rule": "key",
            "local mass": shown("local_mass", 3),
            "s": shown("scale", 2),
            "M, model": shown("predicted", 3),
            "M, exact": shown("second_moment", 3),
            "V(s)/V(1)": shown("variance", 3),
            "remote, s = 1": shown("remote_unskewed", 2),
            "remote": shown("remote", 2),
            "times fewer": lambda line: round(fewer(line["remote_unskewed"], line["remote"]), 2),
            "candidates": shown("candidates", 0),
        },
        [{"key": key, **found} for key, found in exact.items() if "sweep" not in key],
        "On batches of a run, for the same rows with s and with s = 1; expected remote columns. M: M(s)/M(1); the "
        "model is the rule matched: 1 + λ(1 - λ)(s - 1)²/s, right where energy per probability is alike for owned and "
        "remote columns. Measured norms keep M at D exactly, as long as s stays below its limit of 16; the worst case "
        "never exceeds it.",
    )


def _bias_table(biases: Mapping[str, Mapping[str, float]]) -> Table:
    shares = {"mean - Z, %": "distance", "noise floor, %": "noise", "bias, %": "bias", "one draw, %": "deviation"}
    return Table(
        "Bias of one layer",
        ("sampler", *shares, "kept", "remote"),
        [
            [
                label,
                *(round(100.0 * found[field], 2) for field in shares.values()),
                *(round(found[field], 1) for field in ("kept", "remote")),
            ]
            for label, found in biases.items()
        ],
        "Of ‖Z‖, Z being the sum over all neighbours of one batch on random parts. The noise floor is what the mean of "
        "as many draws of an unbiased sampler is away from Z; bias is what is beyond it. One draw: root mean square "
        "distance.",
    )


def _cache_table(config: Config, groups: Groups, size: str) -> Table:
    labels, lines = (UNSKEWED, _budget(config)), []
    for where in PARTITIONS:
        for cache in ("none", "lru", "all"):
            pair = [_line(groups, SHORT[where], cached(label, cache)) for label in labels]
            rows_, link = ([one[field] for one in pair] for field in ("rows_fetched", "feature_bytes_link"))
            lines.append([name(where, f"cache {cache}"), *rows_, round(fewer(*rows_), 2), *link])
    return Table(
        f"Rows fetched with a cache, {size}",
        ("partition: cache", *(f"rows, {x}" for x in labels), "times fewer", *(f"link bytes, {x}" for x in labels)),
        lines,
        "Features never change: a client with room for all asks for every row once, and what skew saves then is the "
        f"rows it never meets. lru: {CACHE_BYTES} bytes on each client.",
    )


def _codec_table(lines: Iterable[Mapping[str, Any]]) -> Table:
    found = list(lines)
    dense = next(line["per_row"] for line in found if line["what"] == "dense-f32")
    return table(
        "Bytes of a feature row",
        {
            "row codec": lambda line: f"{line['what']}, here {line['chosen']}" if line["chosen"] else line["what"],
            "bytes a row": lambda line: round(line["per_row"], 1),
            "times shorter": lambda line: round(dense / line["per_row"], 2),
            "exactness": lambda line: "exact" if line["error"] == 0.0 else f"to {line['error']:.2g}",
        },
        found,
        f"A frame of {FRAME_ROWS} rows of this task with their ids, header and checksum; codecs that cannot hold such "
        "rows are left out. Shortening rows and fetching fewer multiply.",
    )


def _figures(config: Config, groups: Groups, equal: Mapping[str, Mapping[str, Own]], exact: Exact) -> list[Curves]:
    crossed = [(label, groups[name(CROSS, label)]) for label in (*crossing(config), *equal[CROSS])]
    swept = [
        {"line": f"{where}, {mode}", "D": budget, **exact[name(where, _swept(mode, budget))]}
        for where in PARTITIONS
        for mode in SWEPT
        for budget in SWEEP
    ]
    return [
        _accuracy_curve(f"parts with {CUT}", groups, CUT, [*compared(config), *equal[CUT]]),
        _accuracy_curve(RANDOM, groups, SHORT[RANDOM], rules(config)),
        curves(
            "Accuracy over rounds where the label stands in neighbours of other owners",
            crossed,
            lambda pair: [x for x, _, _ in pair[1][0].points],
            lambda pair: [100 * mean(run.points[i][1] for run in pair[1]) for i in range(len(pair[1][0].points))],
            by=lambda pair: pair[0],
            x_label="round",
            y_label="%",
            caption="Means over seeds, each with a graph of its own.",
        ),
        curves(
            "Remote rows against the budget",
            swept,
            "D",
            "remote",
            by="line",
            x_label="D, times the unskewed variance",
            y_label="remote rows a batch",
            log_x=True,
            log_y=True,
            caption="Expected, at the input layer, on batches of a run of the first seed. At D = 1 nothing is "
            "favoured.",
        ),
        curves(
            "Second moment against the budget",
            swept,
            "D",
            "second_moment",
            by="line",
            y_label="M(s)/M(1), exact",
            log_x=True,
            log_y=True,
            caption="On the diagonal a budget is spent exactly; below it less is saved than is allowed, above it the "
            "model is wrong. s is at most 16.",
        ),
    ]


def _accuracy_curve(title: str, groups: Groups, where: str, labels: Iterable[str]) -> Curves:
    series = []
    for label in labels:
        runs = groups[name(where, label)]
        places = range(len(runs[0].points))
        sent = [mean(run.points[i][2] for run in runs) for i in places]
        right = [100 * mean(run.points[i][1] for run in runs) for i in places]
        if label != LOCAL:
            start = sum(x <= 0 for x in sent)
            series.append(Series(label, sent[start:], right[start:]))
    reached = [x for one in series for x in one.x] or [1.0]
    local = 100 * mean(groups[name(where, LOCAL)].each("accuracy"))
    series.append(Series(f"{LOCAL}, no bytes", [min(reached), max(reached)], [local, local]))
    return Curves(
        f"Accuracy against bytes of features, {title}",
        "bytes of feature rows so far, both links",
        "%",
        series,
        log_x=True,
        x_bytes=True,
        caption=f"{_size(groups[name(where, UNSKEWED)]).capitalize()}, means. Models and plans are not in it: they "
        "cost all rules the same.",
    )


# Claims.


def promising(config: Config) -> tuple[str, str, str]:
    """Return the rules that follow from a budget: with measured norms, for the worst case, and by the model."""
    measured, worst = (next(label for label in rules(config) if label.startswith(w)) for w in ("measured", "worst"))
    return measured, worst, _budget(config)


def claims_of(config: Config, groups: Groups, exact: Exact, biases: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """Fewer rows at the accuracy of the unskewed sampler; what is remote is learnt from; bytes are those sent."""
    return [
        *_comparison_claims(config, groups, exact),
        *_cross_claims(config, groups),
        *_byte_claims(groups),
        *(one for where in PARTITIONS for one in _budget_claims(config, where, groups, exact)),
        *_bias_claims(biases),
    ]


def _comparison_claims(config: Config, groups: Groups, exact: Exact) -> list[Claim]:
    plain, made = groups[name(CUT, UNSKEWED)], []
    for label in promising(config)[::2]:
        mine = groups[name(CUT, label)]
        times = fewer(mean(plain.each("per_batch")), mean(mine.each("per_batch")))
        points = 100 * (mean(plain.each("accuracy")) - mean(mine.each("accuracy")))
        made += [
            claim(f"{CUT}, {label}: remote rows of a batch, times fewer than with s = 1", times, ">= 4.0", GOAL),
            claim(f"{CUT}, {label}: points of accuracy below s = 1, mean over seeds", points, "<= 1.0", GOAL),
        ]
    unskewed = [exact[name(where, UNSKEWED)] for where in PARTITIONS]
    kept = largest(one["kept"] / one["candidates"] for one in unskewed)
    return [*made, claim("share of the input layer's candidates that s = 1 keeps", kept, "< 1.0", "sampling is real")]


def _cross_claims(config: Config, groups: Groups) -> list[Claim]:
    crossed = {label: groups[name(CROSS, label)] for label in (*crossing(config), BOUNDARY, UNIFORM)}
    (early, late), mine = _cross_rounds(config), _budget(config)
    best = largest(after(run, early) for run in crossed[LOCAL])
    worst = {label: -largest(-after(run, early) for run in crossed[label]) for label in (EIGHT, mine)}
    rows_ = fewer(*(mean(crossed[label].each("per_batch")) for label in (UNSKEWED, EIGHT)))

    def ahead(rival: str, rounds: int) -> float:
        return 100 * (mean(after(r, rounds) for r in crossed[EIGHT]) - mean(after(r, rounds) for r in crossed[rival]))

    return [
        claim(f"{CROSS}, {LOCAL}: accuracy, best seed", best, "<= 0.5", f"{GOAL}; chance 0.25"),
        claim(f"{CROSS}, {EIGHT}: accuracy, worst seed", worst[EIGHT], ">= 0.93", GOAL),
        claim(f"{CROSS}, {mine}: accuracy, worst seed", worst[mine], ">= 0.93", GOAL),
        claim(f"{CROSS}, {EIGHT}: remote rows of a batch, times fewer", rows_, ">= 3.0", GOAL),
        *(
            claim(
                f"{CROSS}, {EIGHT}: points above {rival} after {rounds} rounds, mean over seeds",
                ahead(rival, rounds),
                ">= 0.0",
                "goal: skew is worth its trouble at equal cost",
                gate=False,
            )
            for rival in (UNIFORM, BOUNDARY)
            for rounds in (early, late)
        ),
    ]


def _byte_claims(groups: Groups) -> list[Claim]:
    # Compressed updates are no tensors, which the comparison takes out of the messages.
    runs = [run for label, made in groups.items() for run in made if not label.endswith(UPDATES)]
    gaps = {
        "rows in the ledger's payloads, to the server, less those reported: bytes": [r.gap_rows for r in runs],
        "rows in the ledger's payloads, both links, less those reported: bytes": [r.gap_link for r in runs],
        "lists of ids in the ledger's payloads less those reported: bytes": [r.gap_ids for r in runs],
        "bytes of rows on both links less twice those sent by owners, without deduplication": [
            abs(r.feature_bytes_link - 2 * r.feature_bytes_logical) for r in runs
        ],
    }
    return [claim(f"{text}, largest of all runs", largest(found), "== 0.0", THEORY) for text, found in gaps.items()]


def _budget_claims(config: Config, where: str, groups: Groups, exact: Exact) -> list[Claim]:
    budget, (measured, worst, mine) = float(config.settings["budget"]), promising(config)
    saved = {
        cache: fewer(
            *(mean(groups[name(SHORT[where], cached(label, cache))].each("rows_fetched")) for label in (UNSKEWED, mine))
        )
        for cache in ("none", "all")
    }
    moment = {label: exact[name(where, label)]["second_moment"] for label in (measured, worst, mine)}
    return [
        claim(
            f"{where}, {measured}: exact M(s)/M(1)",
            moment[measured],
            f"<= {budget * (1 + 1e-6)}",
            f"{THEORY}: s solves M(s) = D M(1), or is at its limit",
        ),
        claim(f"{where}, {worst}: exact M(s)/M(1)", moment[worst], f"<= {budget}", f"{THEORY}: holds for any features"),
        claim(
            f"{where}, {mine}: exact M(s)/M(1)",
            moment[mine],
            f"<= {1.25 * budget}",
            f"{GOAL}; the rule rests on a model of the features",
            gate=False,
        ),
        claim(
            f"{where}, all rows cached: times fewer rows than with s = 1, over that without a cache",
            saved["all"] / saved["none"],
            "< 1.0",
            "derived: features never change, so that with time every row is met once",
            gate=False,
        ),
    ]


def _bias_claims(biases: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    # Local-only draws nothing, and has no noise.
    over = {label: found["distance"] / (found["noise"] or math.nan) for label, found in biases.items()}
    unbiased = largest(value for label, value in over.items() if LADIES not in label and label != LOCAL)
    return [
        claim(
            "distance of the mean of draws over its noise floor, largest of the unbiased samplers",
            unbiased,
            "<= 1.5",
            f"{THEORY}: 1 in the mean",
        ),
        claim(
            "the same of LADIES as published, rows renormalised",
            over[RENORMALISED],
            ">= 2.0",
            "measured on other seeds: 4.8",
        ),
    ]


EXPERIMENT = Experiment(
    name="gcn",
    question="How many feature rows of other owners does a GCN need when nodes at hand are drawn more often?",
    rows=rows,
    baseline=name(CUT, UNSKEWED),
    options=OPTIONS,
    rounds=90,
    clients=4,
    minutes=3.4,
    quick=(
        "rounds=2",
        "clients=3",
        "seeds=1",
        "workers=1",
        "n=48",
        "batch_size=16",
        "task.hidden=4",
        "draws=3",
        "cut=greedy",
        "short_rounds=2",
        "cross_rounds=1",
        "cross_long=1",
    ),
    measure=measure,
    notes=(
        "The sampler is after Jiang and Rumi (arXiv 2101.07706, abstract); the rule by which a budget D sets s is "
        "derived here, and nothing is compared with figures of the paper.\n\n"
        "Accuracy on citation graphs and on digits cannot tell a right sampler from one that ignores remote nodes: "
        "local neighbours alone are enough there. The cross-partition graph can.\n\n"
        "One step of SGD on each client and a server that takes Adam steps along the mean update are synchronous "
        "data-parallel Adam. All bytes are those of messages that were really sent, in one process.\n\n"
        "Features leave their owners in clear. Nothing here is private.\n\n"
        "The saving is that of a run whose clients keep no rows: with room for all of them every row travels once, and "
        "what skew saves is the rows that are never met. Features of digits are 64 numbers, so that models are the "
        "larger part of all bytes here; with --set task=cora rows are 1433 numbers.\n\n"
        "Rows, their seeds and the cross-partition graph are trained to the end; the axes are short trainings of the "
        "first seed unless full=true, and their accuracies are to be compared among themselves."
    ),
)
