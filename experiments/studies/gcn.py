"""Skewed neighbour sampling: how many feature rows of other owners a GCN needs, and what using fewer costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import stdev
from typing import TYPE_CHECKING, Any, Final, cast

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import Table, largest, mean
from fedcomp.experiments.kit import Record, Records, curves, over_seeds, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunSpec, format_settings
from fedcomp.experiments.studies.graph_runs import SYSTEM, after, outcome, train
from fedcomp.experiments.tables import Found, Studied

if TYPE_CHECKING:
    # Listing the experiments needs no torch, so it is imported when one runs.
    from fedcomp.graphs.settings import SamplerSettings
    from fedcomp.tasks.graph import GraphTask

CUT, RANDOM, CROSS = "few cut edges", "random parts", "cross-partition"
PARTITIONS: Final = (CUT, RANDOM)

FULL, LOCAL, UNSKEWED, EIGHT = "all neighbours", "local only", "s = 1, unskewed", "s = 8"
SKEWED, MEASURED, WORST = "skewed, D = 1.5", "measured norms, D = 1.5", "worst case, D = 1.5"
BOUNDARY, UNIFORM = "boundary sampling, as many rows", "uniform sampling, as many rows"
"""The rivals of skew at equal cost: fewer boundary nodes, or fewer nodes at the input layer, without preference."""
UPDATES: Final = "rows as auto, updates as qsgd"
RENORMALISED: Final = "LADIES, rows renormalised"

Own = Mapping[str, Any]
"""Settings of one rule."""

_FIXED: Final[Own] = {"mode": "fixed", "scale": 1.0}
_SKEWED: Final[Own] = {"variance_budget": 1.5}

COMPARED: Final[Mapping[str, Own]] = {
    FULL: {"sampler": "full"},
    UNSKEWED: _FIXED,
    SKEWED: _SKEWED,
    MEASURED: {"mode": "measured", **_SKEWED},
    LOCAL: {"sampler": "local"},
}
"""The rules of the rows; claims are about these."""

RULES: Final[Mapping[str, Own]] = {
    **COMPARED,
    "s = 4": {"mode": "fixed", "scale": 4.0},
    "skewed, D = 1.1": {"variance_budget": 1.1},
    "skewed, D = 2": {"variance_budget": 2.0},
    WORST: {"mode": "worst", **_SKEWED},
}

FAMILIES: Final[Mapping[str, Own]] = {
    "node-wise, s = 1": {"sampler": "node", **_FIXED},
    "node-wise, D = 1.5": {"sampler": "node", **_SKEWED},
    "LADIES, biased": {"sampler": "ladies"},
    "FastGCN": {"sampler": "fastgcn"},
    "boundary, q = 0.1": {"sampler": "boundary"},
    "multinomial, s = 1": {"estimator": "multinomial", **_FIXED},
    "multinomial, D = 1.5": {"estimator": "multinomial", **_SKEWED},
}
"""Other samplers and the other estimator."""

# Room for about thirty rows of the digits (64 numbers of four bytes, an id and a length). A client uses far more on
# random parts, so rows have to be evicted. Only the LRU cache has a limit; "all" keeps every row.
CACHES: Final[Mapping[str, Own]] = {
    f"{label}, cache {cache}": {**RULES[label], "cache": cache, **limit}
    for cache, limit in (("lru", {"cache_bytes": 8192}), ("all", {}))
    for label in (UNSKEWED, SKEWED)
}

SHORT: Final[Mapping[str, Mapping[str, Own]]] = {
    CUT: {**{label: RULES[label] for label in (UNSKEWED, SKEWED)}, **FAMILIES, **CACHES},
    RANDOM: {
        **RULES,
        **CACHES,
        # The same sampler with other bytes: shorter rows and updates, or evaluation on the clients. Only if many rows
        # are sent, because between parts with few cut edges nearly all bytes are those of models.
        **{
            f"rows as {codec}": {**_FIXED, "row_codec": codec}
            for codec in ("dense-f32", "dense-f16", "int8", "csr", "auto")
        },
        UPDATES: {**_FIXED, "row_codec": "auto", "codec": "qsgd"},
        "evaluated on the clients": {**_FIXED, "fraction_evaluate": 1.0},
    },
}
"""Rules that are compared with each other, in short trainings of the first seed."""

CROSSING: Final[Mapping[str, Own]] = {
    UNSKEWED: _FIXED,
    EIGHT: {"mode": "fixed", "scale": 8.0},
    SKEWED: _SKEWED,
    LOCAL: RULES[LOCAL],
}
"""Rules that are compared when labels depend on remote neighbours."""

# One layer, because a label depends only on the colours of direct neighbours.
CROSS_SIZE: Final[Own] = {"n": "200", "layers": 1}
CROSS_BATCH: Final = 64

TUNING_SEED: Final = 1000
"""Batch, layer sizes, step size and number of rounds were chosen on seeds from here on, which are not reported."""

_ADAM: Final[Own] = {"inner": "fedadam", "inner.tau": 1e-8, "codec": "identity", "lr": 1.0}
"""The server's Adam, as in Flower's FedAdam, whose tau is Adam's epsilon. FedAdam turns a float32 model into float64;
inside the drop-in pair, with the codec that changes nothing, the model keeps its type."""


def name(where: str, label: str) -> str:
    """Return the label of a rule's runs on a partition."""
    return f"{where}: {label}"


def short(where: str, label: str) -> str:
    """Return the label of a short training."""
    return f"short, {name(where, label)}"


def _graph(config: Config, where: str) -> dict[str, Any]:
    cut = {"cut": "random" if where == RANDOM else str(config.settings["cut"])}
    # Settings of the graph of digits; graphs from files have none.
    return cut | ({"k": int(config.settings["k"])} if config.settings["task"] == "digits-graph" else {})


def spec(config: Config, where: str, called: str, own: Own, rounds: int = 0) -> RunSpec:
    """Return one run with the first seed on a partition, or on the cross-partition graph with its number of rounds."""
    if where == CROSS:
        early, rounds = cross_rounds(config)
        # The graph of the first seed; for every other seed a graph is drawn from that seed.
        graph = {"parts": config.clients, "graph_seed": config.seed}
        # Both rounds after which the rules are compared need an evaluation.
        given = {"inner.eta": 0.1, **CROSS_SIZE, "batch_size": CROSS_BATCH, "evaluate_every": math.gcd(early, rounds)}
    else:
        graph = _graph(config, where)
        # Rounded up, so there are at most ten evaluations for any number of rounds.
        given = {"inner.eta": 0.01, "evaluate_every": max(1, -(-rounds // 10))}
    task, taken = (CROSS, ()) if where == CROSS else (str(config.settings["task"]), ("n", "batch_size", "task.hidden"))
    fixed: dict[str, Any] = {**_ADAM, **given, **{f"task.{key}": value for key, value in graph.items()}, **own}
    settings = {**{key: config.settings[key] for key in taken}, **fixed}
    return RunSpec(SYSTEM, called, task, config.engine, rounds, config.clients, config.seed, settings)


def cross_rounds(config: Config) -> tuple[int, int]:
    """Return the rounds after which rules are compared on the cross-partition graph: early, and at the end."""
    early = int(config.settings["cross_rounds"])
    return early, max(early, int(config.settings["cross_long"]))


def rows(config: Config) -> Mapping[str, str]:
    """Return the rows of the claims with the first seed, which also run on other engines.

    Raises
    ------
    ConfigError
        With one client; raised before any training.
    """
    if config.clients < 2:
        raise ConfigError(
            f"clients={config.clients} is not valid here: rows are fetched from other owners; give 2 or more"
        )
    made = [spec(config, CUT, name(CUT, label), own, config.rounds) for label, own in COMPARED.items()]
    return {one.label: f"{SYSTEM} task={one.task} {format_settings(one.settings)}" for one in made}


def trainings(config: Config, equal: Mapping[str, Mapping[str, Own]]) -> dict[str, tuple[RunSpec, range]]:
    """Return every training by name, with its seeds; this includes the rows."""
    seeds, few = repetitions(config), min(config.rounds, int(config.settings["short_rounds"]))
    long = {CUT: {**COMPARED, **equal[CUT]}, CROSS: {**CROSSING, **equal[CROSS]}}
    made = [
        (spec(config, where, name(where, label), own, config.rounds), seeds)
        for where, rules in long.items()
        for label, own in rules.items()
    ]
    made += [
        (spec(config, where, short(where, label), own, few), seeds[:1])
        for where, rules in SHORT.items()
        for label, own in rules.items()
    ]
    return {one.label: (one, which) for one, which in made}


def study(found: Found) -> Studied:
    """Train on both partitions and on the cross-partition graph; measure variances and biases without training."""
    from fedcomp.tasks import get_task

    config, say = found.config, found.say
    graphs = {
        where: cast("GraphTask", get_task(str(config.settings["task"]), **_graph(config, where)))
        for where in PARTITIONS
    }
    say("samplers that fetch as many rows, by plans")
    # Before the trainings, because their rivals use the q and n found here; no label is used.
    equal = rivals(config, say.cell("equal rows", partial(_equal_rows, config, graphs[CUT])))
    wanted = trainings(config, equal)
    # The first seed of a comparison is a row and already trained.
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
    for graph in graphs.values():
        # The record of the task has the requested partitions.
        graph.shared(config.clients)
    longs = [label for label in groups if label.startswith(CUT)]
    return Studied(
        quantities(config, groups, exact, biases),
        tables=_tables(config, groups, exact, biases),
        figures=[
            curves(
                f"Accuracy against bytes of features, parts with {CUT}",
                # Local training fetches nothing, so it cannot appear on an axis of bytes. On a logarithmic axis neither
                # can an evaluation before the first byte.
                [(label, [p for p in _points(groups[label]) if p[0] > 0]) for label in longs],
                lambda line: [sent for sent, _ in line[1]],
                lambda line: [right for _, right in line[1]],
                lambda line: line[0],
                x_label="bytes of feature rows so far, both links",
                y_label="%",
                log_x=True,
                x_bytes=True,
                caption="Means over seeds. Models and plans are left out, because they cost the same for all rules.",
            )
        ],
        tasks=[*(graph.record() for graph in graphs.values()), groups[name(CROSS, UNSKEWED)][0].task],
    )


def _points(runs: Records) -> list[tuple[float, float]]:
    return list(zip(over_seeds(runs, 2), over_seeds(runs, 1, 100), strict=True))


def rivals(config: Config, equal: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Own]]:
    """Return, by graph, the samplers that fetch as many rows as skew does; :func:`_equal_rows` finds q and n.

    Uniform sampling is reduced only at the input layer, the only layer that fetches rows.
    """
    hidden = str(config.settings["n"]).split(",")[-1]
    sizes = {CUT: f"{equal[CUT]['n']:.0f},{hidden}", CROSS: f"{equal[CROSS]['n']:.0f}"}
    return {
        where: {BOUNDARY: {"sampler": "boundary", "q": equal[where]["q"]}, UNIFORM: {**_FIXED, "n": size}}
        for where, size in sizes.items()
    }


def _equal_rows(config: Config, graph: GraphTask) -> dict[str, dict[str, float]]:
    """Return q and n with which the rivals fetch as many rows as skew, found on seeds that no training uses."""
    from fedcomp.experiments.studies.graph_variance import Batches, as_many_rows, remote_inputs
    from fedcomp.tasks import get_task

    # The graph of the tuning seed, because rivals must not be fitted to a graph of the results.
    crossed = cast("GraphTask", get_task(CROSS, parts=config.clients, graph_seed=TUNING_SEED))
    out = {}
    for where, task, own, size, common in (
        (CUT, graph, _SKEWED, int(config.settings["batch_size"]), {}),
        (CROSS, crossed, CROSSING[EIGHT], CROSS_BATCH, CROSS_SIZE),
    ):
        batches = Batches(task, config.clients, TUNING_SEED, 20, size)
        skewed, boundary, uniform = (
            _sampler(config, {**common, **each}) for each in (own, {"sampler": "boundary"}, _FIXED)
        )
        q, n = as_many_rows(batches, remote_inputs(batches, skewed), boundary, uniform)
        out[where] = {"q": q, "n": float(n)}
    return out


def _sampler(config: Config, own: Own) -> SamplerSettings:
    from fedcomp.experiments.systems import get_system
    from fedcomp.strategies.gcn.system import sampler_settings

    return sampler_settings(get_system(SYSTEM).resolve({"n": config.settings["n"], **own}))


def _variances(config: Config, graphs: Mapping[str, GraphTask]) -> dict[str, Any]:
    """Return exact ratios of the rules with one s per layer, on the batches of five rounds."""
    from fedcomp.experiments.studies.graph_variance import Batches, measured

    size = int(config.settings["batch_size"])
    return {
        name(where, label): measured(Batches(graph, config.clients, config.seed, 5, size), _sampler(config, own))
        for where, graph in graphs.items()
        for label, own in RULES.items()
        if "sampler" not in own
    }


def _biases(config: Config, graph: GraphTask) -> dict[str, Any]:
    """Return the bias of every sampler on one batch of random parts."""
    from fedcomp.experiments.studies.graph_variance import bias_of

    wanted: dict[str, Own] = {label: RULES[label] for label in (UNSKEWED, SKEWED, LOCAL)}
    # As published: row sums are restored, which increases the bias.
    wanted |= {**FAMILIES, RENORMALISED: {"sampler": "ladies", "renormalise": True}}
    size = {"batch": 32, "draws": int(config.settings["draws"]), "seed": config.seed}
    part = graph.shared(config.clients).part(0)
    # One layer of few nodes and the same batch for all, so the bias exceeds the noise of the draws.
    return {label: bias_of(graph, part, _sampler(config, {**own, "n": "64"}), **size) for label, own in wanted.items()}


Groups = Mapping[str, Records]
"""The runs of all seeds, by the name of the training."""


def _fewer(groups: Groups, label: str, other: str, figure: str = "per_batch") -> float:
    """Return how many times smaller a figure is than in another training; NaN if the figure is zero."""
    before, now = (mean(groups[each].each(figure)) for each in (other, label))
    return before / now if now else math.nan


def quantities(
    config: Config, groups: Groups, exact: Mapping[str, Mapping[str, float]], biases: Mapping[str, Mapping[str, float]]
) -> dict[Any, float]:
    """Return the quantities of the claims: rows at the accuracy of the unskewed sampler, learning from remote rows, and
    bytes that equal those sent."""

    def reached(label: str, rounds: int) -> list[float]:
        return [after(run, rounds) for run in groups[name(CROSS, label)]]

    def percent(label: str) -> float:
        return 100 * mean(groups[name(CUT, label)].each("accuracy"))

    out: dict[Any, float] = {}
    for where, label in ((CUT, MEASURED), (CUT, SKEWED), (CROSS, EIGHT)):
        many = _fewer(groups, name(where, label), name(where, UNSKEWED))
        out[name(where, label), "times fewer remote rows than with s = 1"] = many
    for label in (MEASURED, SKEWED):
        out[name(CUT, label), "points of accuracy below s = 1"] = percent(UNSKEWED) - percent(label)
    # If n reached the number of candidates, every sampler would keep all of them and the comparison would be empty.
    kept = [one["kept"] / one["candidates"] for one in (exact[name(where, UNSKEWED)] for where in PARTITIONS)]
    out["share of the input layer's candidates that s = 1 keeps"] = largest(kept)
    early, late = cross_rounds(config)
    # Local training must stay near chance; otherwise accuracy on this graph would not show that remote rows matter.
    out[name(CROSS, LOCAL), "accuracy, best seed"] = largest(reached(LOCAL, early))
    for label in (EIGHT, SKEWED):
        # The smallest, computed with largest(), which does not skip NaN as min() might.
        out[name(CROSS, label), "accuracy, worst seed"] = -largest(-x for x in reached(label, early))
    for rival in (UNIFORM, BOUNDARY):
        for when, rounds in (("early", early), ("at the end", late)):
            points = 100 * (mean(reached(EIGHT, rounds)) - mean(reached(rival, rounds)))
            out[name(CROSS, EIGHT), f"points above {rival}, {when}"] = points
    # The comparison subtracts tensors from the messages, and compressed updates are not tensors.
    runs = [run for label, made in groups.items() for run in made if not label.endswith(UPDATES)]
    gaps: dict[str, Callable[[Record], float]] = {
        "bytes of rows, norms and ids in the ledger's payloads less those reported": lambda r: r.gap_asked,
        "bytes of rows in the ledger's payloads, both links, less those reported": lambda r: r.gap_link,
        "bytes of rows on both links less twice those sent by owners, without deduplication": lambda r: abs(
            r.feature_bytes_link - 2 * r.feature_bytes_logical
        ),
    }
    out |= {text: largest(map(gap, runs)) for text, gap in gaps.items()}
    for where in PARTITIONS:
        for label in (MEASURED, WORST, SKEWED):
            out[name(where, label), "exact M(s)/M(1)"] = exact[name(where, label)]["second_moment"]
        cached, plain = (
            _fewer(groups, short(where, SKEWED + ends), short(where, UNSKEWED + ends), "rows_fetched")
            for ends in (", cache all", "")
        )
        out[where, "times fewer rows where all are cached, over that without a cache"] = cached / plain
    # Local-only draws nothing and has no noise.
    over = {label: one["distance"] / (one["noise"] or math.nan) for label, one in biases.items()}
    # LADIES is biased by construction, with or without renormalised rows.
    unbiased = [value for label, value in over.items() if "LADIES" not in label and label != LOCAL]
    out["distance of the mean of draws over its noise floor, largest of the unbiased samplers"] = largest(unbiased)
    out["the same of LADIES as published, rows renormalised"] = over[RENORMALISED]
    return out


_RUN: Final = {
    "remote rows a batch": "per_batch",
    "rows fetched": "rows_fetched",
    "local mass": "local_mass",
    "s": "scale",
}
_RATIOS: Final = {"V(s)/V(1)": "variance", "M(s)/M(1)": "second_moment", "M, model": "predicted"}
_BYTES: Final = {
    "rows, logical": "feature_bytes_logical",
    "rows, link": "feature_bytes_link",
    "evaluation, link": "evaluate_feature_bytes_link",
    "ids": "id_bytes",
    "norms": "setup_bytes",
    "plan and row messages": "query_wire",
    "models": "model_bytes",
    "train messages": "train_wire",
    "all messages": "wire",
}


def _tables(
    config: Config, groups: Groups, exact: Mapping[str, Mapping[str, float]], biases: Mapping[str, Mapping[str, float]]
) -> list[Table]:
    early, late = cross_rounds(config)

    def line(label: str) -> dict[str, Any]:
        runs, rule = groups[label], label.partition(": ")[0]
        accuracy = [100 * run.accuracy for run in runs]
        reached = [[100 * after(run, rounds) for run in runs] for rounds in (early, late)]
        return {
            **{figure: mean(runs.each(figure)) for figure in (*_RUN.values(), *_BYTES.values())},
            # Variances belong to a partition; they do not depend on the length of trainings.
            **{ratio: exact.get(label.removeprefix("short, "), {}).get(ratio) for ratio in _RATIOS.values()},
            "label": label,
            "accuracy": mean(accuracy),
            "deviation": stdev(accuracy) if len(accuracy) > 1 else None,
            "fewer": _fewer(groups, label, name(rule, UNSKEWED)),
            "each": [", ".join(f"{x:.1f}" for x in some) for some in reached],
            "means": list(map(mean, reached)),
        }

    def both(title: str, start: str) -> list[Table]:
        lines = [line(label) for label in groups if label.startswith(start)]
        run: dict[str, Any] = {"training": "label", "accuracy, %": "accuracy", "± sd": "deviation", **_RUN}
        run |= {"times fewer": "fewer", **_RATIOS}
        return [
            table(
                title,
                run,
                lines,
                "Accuracy is on the test nodes, all neighbours used, with its sample standard deviation over seeds. "
                "Remote rows: input nodes of a client's batch that other owners have; times fewer than with s = 1. "
                "Rows fetched: of the whole run, all clients. Local mass and s: means over layers, batches and "
                "clients. V and M: exact variance and second moment of the input layer over those of s = 1 on the same "
                "rows, all features known; the model is the rule matched: 1 + λ(1 - λ)(s - 1)²/s.",
                optional=["± sd"],
            ),
            table(
                f"Bytes: {title}",
                {"training": "label", **_BYTES},
                lines,
                "All clients, both directions, means over seeds. Rows, ids, norms and models are frames and tensors; "
                "messages are whole, with Flower's envelope. A fetched row crosses two links, from its owner to the "
                "server and from there to the client that needs it: logical counts it once, link twice. It is part of "
                "a rows message and of a train message. Rows that clients fetch for evaluation have a separate column.",
            ),
        ]

    return [
        *both(f"Parts with {CUT}, {len(repetitions(config))} seeds, {config.rounds} rounds", CUT),
        table(
            "Where the label stands in neighbours of other owners",
            {
                "rule": "label",
                f"accuracy of each seed after {early} rounds, %": lambda found: found["each"][0],
                "mean, %": lambda found: found["means"][0],
                f"after {late} rounds, %": lambda found: found["each"][1],
                "mean at the end, %": lambda found: found["means"][1],
                "remote rows a batch": "per_batch",
                "times fewer": "fewer",
                "s": "scale",
            },
            [line(label) for label in groups if label.startswith(CROSS)],
            f"A drawn graph of {config.clients} owners, a new one for each seed: features say a node's colour, its "
            "label is the colour of its neighbours in other parts. Chance is 25 %. Sampling that loses remote "
            "neighbours learns nothing. As many rows: boundary sampling keeps each remote candidate, uniform sampling "
            "each candidate, with a probability at which a batch has as many remote rows as with s = 8, found on plans "
            "of another seed's graph.",
        ),
        *both(f"Short trainings, one seed, {min(config.rounds, int(config.settings['short_rounds']))} rounds", "short"),
        table(
            "Bias of one layer",
            {
                "sampler": "label",
                "mean - Z, %": lambda found: 100 * found["distance"],
                "noise floor, %": lambda found: 100 * found["noise"],
                "one draw, %": lambda found: 100 * found["deviation"],
                "kept": "kept",
                "remote": "remote",
            },
            [{"label": label, **found} for label, found in biases.items()],
            "Distances are relative to ‖Z‖, where Z is the sum over all neighbours of one batch on random parts. The "
            "noise floor is the expected distance from Z of the mean of as many draws of an unbiased sampler. One "
            "draw: root mean square distance.",
        ),
    ]
