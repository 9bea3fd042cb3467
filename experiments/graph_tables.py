"""Tables and plots of graph runs: rows against accuracy, bytes, variances, biases, caches and row codecs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.findings import Curves, Series, Table, mean
from fedcomp.experiments.graph_runs import GraphRun

if TYPE_CHECKING:
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

LOOKS: Final = 10
"""Evaluations of a training."""

CACHE_BYTES: Final = 8192
"""Limit of the LRU cache."""

ROW_CODECS: Final = ("dense-f32", "dense-f16", "int8", "csr", "auto")
"""Codecs that trainings are made with."""

FRAME_ROWS: Final = 128
"""Rows of a measured frame."""

Groups = Mapping[str, Sequence[GraphRun]]
"""Runs of all seeds, by :func:`name`."""

Exact = Mapping[str, Mapping[str, float | None]]
"""Figures of :class:`fedcomp.experiments.graph_variance.Ratios`, by :func:`name`."""

Own = Mapping[str, Any]


def name(where: str, label: str) -> str:
    """Return what the runs of a rule on a partition are called."""
    return f"{where}: {label}"


def skewed(budget: float) -> str:
    """Return the label of the sampler whose scale follows from a budget by the rule "matched"."""
    return f"skewed, D = {budget:g}"


def cached(label: str, cache: str) -> str:
    """Return the label of a sampler with a cache."""
    return f"{label}, cache {cache}"


def coded(codec: str) -> str:
    """Return the label of a training whose rows travel in a codec."""
    return f"rows as {codec}"


def fewer(before: float, after: float) -> float:
    """Return how many times fewer; NaN when nothing is left to compare."""
    return before / after if after else math.nan


def per_batch(runs: Sequence[GraphRun]) -> float:
    """Return the mean remote input nodes of a batch."""
    return mean(run.per_batch for run in runs)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN of fewer than two."""
    if len(values) < 2:
        return math.nan
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def _accuracy(runs: Sequence[GraphRun]) -> list[float]:
    found = [100.0 * run.accuracy for run in runs]
    return [round(mean(found), 2), round(deviation(found), 2)]


def _rows(runs: Sequence[GraphRun], unskewed: float) -> list[float]:
    remote = per_batch(runs)
    scale = [round(mean(run.local_mass for run in runs), 3), round(mean(run.scale for run in runs), 2)]
    return [round(remote, 2), round(fewer(unskewed, remote), 2), mean(run.rows_fetched for run in runs), *scale]


_RUN_COLUMNS: Final = (
    "accuracy, %",
    "± sd",
    "remote rows a batch",
    "times fewer",
    "rows fetched",
    "local mass",
    "s",
)


def main_table(groups: Groups, compared: Mapping[str, Own], exact: Exact) -> Table:
    """Return accuracy, remote rows and variance of the comparison."""
    runs = {label: groups[name(CUT, label)] for label in compared}
    seeds, rounds = len(runs[UNSKEWED]), runs[UNSKEWED][0].points[-1][0]
    unskewed = per_batch(runs[UNSKEWED])
    table: list[list[Any]] = [
        [label, *_accuracy(made), *_rows(made, unskewed), *_ratios(exact, CUT, label)] for label, made in runs.items()
    ]
    return Table(
        f"Parts with {CUT}, {seeds} seeds, {rounds:g} rounds",
        ("rule", *_RUN_COLUMNS, *_RATIO_COLUMNS),
        table,
        f"Means over seeds; accuracy with its sample standard deviation. {_CAPTION}",
    )


def rule_table(groups: Groups, rules: Mapping[str, Own], exact: Exact) -> Table:
    """Return the same of every layer-wise rule on both partitions, from the trainings along the axes."""
    table: list[list[Any]] = []
    for where in PARTITIONS:
        unskewed = per_batch(groups[name(SHORT[where], UNSKEWED)])
        for label in rules:
            runs = groups[name(SHORT[where], label)]
            table.append([name(where, label), *_accuracy(runs), *_rows(runs, unskewed), *_ratios(exact, where, label)])
    first = groups[name(SHORT[CUT], UNSKEWED)]
    return Table(
        f"Partitions and budgets, {_size(first)}",
        ("partition: rule", *_RUN_COLUMNS, *_RATIO_COLUMNS),
        table,
        _CAPTION,
    )


def _ratios(exact: Exact, where: str, label: str) -> list[float | None]:
    found = exact.get(name(where, label), {})
    return [_rounded(found.get(key), 3) for key in ("variance", "second_moment")]


def _size(runs: Sequence[GraphRun]) -> str:
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
    return f"{seeds}, {runs[0].points[-1][0]:g} rounds"


_RATIO_COLUMNS: Final = ("V(s)/V(1)", "M(s)/M(1)")
_CAPTION: Final = (
    "Accuracy is on the test nodes, all neighbours used. Remote rows: input nodes of a client's batch that other "
    "owners have; times fewer than with s = 1. Rows fetched: of the whole run, all clients. Local mass and s: means "
    "over layers, batches and clients. V and M: exact variance and second moment of the input layer over those of s = "
    "1 on the same rows, from the first rounds' batches, all features known."
)


def family_table(groups: Groups, families: Mapping[str, Own]) -> Table:
    """Return the same of other samplers."""
    table: list[list[Any]] = []
    for where in PARTITIONS:
        unskewed = per_batch(groups[name(SHORT[where], UNSKEWED)])
        for label in families:
            runs = groups.get(name(SHORT[where], label))
            if runs:
                table.append([name(where, label), *_accuracy(runs), *_rows(runs, unskewed)])
    first = groups[name(SHORT[CUT], UNSKEWED)]
    return Table(
        f"Other samplers, {_size(first)}",
        ("partition: sampler", *_RUN_COLUMNS),
        table,
        "Times fewer: against layer-wise sampling with s = 1, in the table above. Node-wise sampling draws neighbours "
        "for each row, and boundary sampling keeps all owned ones: their numbers of nodes are others.",
    )


def byte_table(groups: Groups, compared: Mapping[str, Own]) -> Table:
    """Return what the comparison cost, by kind of bytes."""
    table: list[list[Any]] = []
    for label in compared:
        runs = groups[name(CUT, label)]
        table.append([label, *(round(mean(getattr(run, kind) for run in runs)) for kind in _BYTES)])
    return Table(
        f"Bytes of a run, parts with {CUT}",
        ("rule", *_BYTES.values()),
        table,
        "All clients, both directions, means over seeds. Rows, ids, norms and models are frames and tensors; messages "
        "are whole, with Flower's envelope. A fetched row crosses two links, from its owner to the server and from "
        "there to whoever asked: logical counts it once, link twice. It stands in a rows message and in a train "
        "message.",
    )


_BYTES: Final = {
    "feature_bytes_logical": "rows, logical",
    "feature_bytes_link": "rows, link",
    "id_bytes": "ids",
    "setup_bytes": "norms",
    "plan_wire": "plan messages",
    "model_bytes": "models",
    "train_wire": "train messages",
    "wire": "all messages",
}


def cross_table(groups: Groups, rules: Mapping[str, Own], clients: int, rounds: tuple[int, int]) -> Table:
    """Return what came of the task whose labels stand in remote neighbours, after few and after many ``rounds``."""
    where, (early, late) = CROSS, rounds
    unskewed = per_batch(groups[name(where, UNSKEWED)])
    table: list[list[Any]] = []
    for label in rules:
        runs = groups[name(where, label)]
        remote = per_batch(runs)
        each = [", ".join(f"{100 * run.after(when):.1f}" for run in runs) for when in rounds]
        means = [round(100 * mean(run.after(when) for run in runs), 2) for when in rounds]
        figures = [round(remote, 1), round(fewer(unskewed, remote), 2), round(mean(run.scale for run in runs), 2)]
        table.append([label, each[0], means[0], each[1], means[1], *figures])
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
        table,
        f"A drawn graph of {clients} owners, a new one for each seed: features say a node's colour, its label is the "
        "colour of its neighbours in other parts. Chance is 25 %. Sampling that loses remote neighbours learns "
        "nothing. As many rows: boundary sampling keeps each remote candidate, uniform sampling each candidate, with a "
        "probability at which a batch has as many remote rows as with s = 8, found on plans of another seed's graph.",
    )


def cross_curves(groups: Groups, rules: Mapping[str, Own]) -> Curves:
    """Return accuracy over rounds where the label stands in neighbours of other owners."""
    series = []
    for label in rules:
        runs = groups[name(CROSS, label)]
        x = [point[0] for point in runs[0].points]
        series.append(Series(label, x, [100 * mean(run.points[i][1] for run in runs) for i in range(len(x))]))
    return Curves(
        "Accuracy over rounds where the label stands in neighbours of other owners",
        "round",
        "%",
        series,
        caption="Means over seeds, each with a graph of its own.",
    )


def variance_table(exact: Exact) -> Table:
    """Return predicted against exact variances."""
    table = [
        [
            label,
            _rounded(found["local_mass"], 3),
            _rounded(found["scale"], 2),
            *(_rounded(found[key], 3) for key in ("predicted", "second_moment", "variance")),
            *(_rounded(found[key], 2) for key in ("remote_unskewed", "remote")),
            _rounded(fewer(found["remote_unskewed"] or math.nan, found["remote"] or math.nan), 2),
            _rounded(found["candidates"], 0),
        ]
        for label, found in exact.items()
        if "sweep" not in label
    ]
    columns = (
        "partition: rule",
        "local mass",
        "s",
        "M, model",
        "M, exact",
        "V(s)/V(1)",
        "remote, s = 1",
        "remote",
        "times fewer",
        "candidates",
    )
    return Table(
        "What skew does to the variance of the input layer",
        columns,
        table,
        "On batches of a run, for the same rows with s and with s = 1; expected remote columns. M: M(s)/M(1); the "
        "model is the rule matched: 1 + λ(1 - λ)(s - 1)²/s, right where energy per probability is alike for owned and "
        "remote columns. Measured norms keep M at D exactly, as long as s stays below its limit of 16; the worst case "
        "never exceeds it.",
    )


def bias_table(biases: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the distance of the mean of many draws from the sum."""
    table: list[list[Any]] = [
        [
            label,
            *(round(100.0 * found[key], 2) for key in ("distance", "noise", "bias", "deviation")),
            *(round(found[key], 1) for key in ("kept", "remote")),
        ]
        for label, found in biases.items()
    ]
    return Table(
        "Bias of one layer",
        ("sampler", "mean - Z, %", "noise floor, %", "bias, %", "one draw, %", "kept", "remote"),
        table,
        "Of ‖Z‖, Z being the sum over all neighbours of one batch on random parts. The noise floor is what the mean of "
        "as many draws of an unbiased sampler is away from Z; bias is what is beyond it. One draw: root mean square "
        "distance.",
    )


def cache_table(groups: Groups, skew: str) -> Table:
    """Return rows fetched with and without a cache, unskewed and ``skew``."""
    table: list[list[Any]] = []
    for where in PARTITIONS:
        for cache in ("none", "lru", "all"):
            names = [label if cache == "none" else cached(label, cache) for label in (UNSKEWED, skew)]
            pair = [groups[name(SHORT[where], label)] for label in names]
            rows = [mean(run.rows_fetched for run in runs) for runs in pair]
            link = [round(mean(run.feature_bytes_link for run in runs)) for runs in pair]
            table.append([name(where, f"cache {cache}"), *rows, round(fewer(*rows), 2), *link])
    labels = (UNSKEWED, skew)
    return Table(
        f"Rows fetched with a cache, {_size(groups[name(SHORT[CUT], UNSKEWED)])}",
        ("partition: cache", *(f"rows, {x}" for x in labels), "times fewer", *(f"link bytes, {x}" for x in labels)),
        table,
        "Features never change: a client with room for all asks for every row once, and what skew saves then is the "
        f"rows it never meets. lru: {CACHE_BYTES} bytes on each client.",
    )


def codec_sizes(task: GraphTask) -> list[dict[str, Any]]:
    """Return bytes per row of every codec that can hold the task's features, and of others, on some of them."""
    from fedcomp.experiments.bench.graph_rows import row_table

    part = task.part(0, 2)
    lines = row_table(part.ids[:FRAME_ROWS], part.features[:FRAME_ROWS], repeats=1)
    return [{key: line[key] for key in ("what", "per_row", "error", "chosen")} for line in lines]


def codec_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the sizes of rows."""
    dense = next(line["per_row"] for line in lines if line["what"] == "dense-f32")
    table: list[list[Any]] = [
        [
            f"{line['what']}, here {line['chosen']}" if line["chosen"] else line["what"],
            round(line["per_row"], 1),
            round(dense / line["per_row"], 2),
            "exact" if line["error"] == 0.0 else f"to {line['error']:.2g}",
        ]
        for line in lines
    ]
    return Table(
        "Bytes of a feature row",
        ("row codec", "bytes a row", "times shorter", "exactness"),
        table,
        f"A frame of {FRAME_ROWS} rows of this task with their ids, header and checksum; codecs that cannot hold such "
        "rows are left out. Shortening rows and fetching fewer multiply.",
    )


def wire_table(groups: Groups, wires: Mapping[str, Own]) -> Table:
    """Return runs that differ in nothing but bytes, and what evaluation on the clients fetches."""
    table: list[list[Any]] = []
    for label in wires:
        runs = groups[name(SHORT[RANDOM], label)]
        table.append([label, _accuracy(runs)[0], *(round(mean(getattr(run, kind) for run in runs)) for kind in _WIRES)])
    return Table(
        f"Rows and updates in other codecs, {RANDOM}, s = 1",
        ("training", "accuracy, %", *_WIRES.values()),
        table,
        f"{_size(groups[name(SHORT[RANDOM], UNSKEWED)]).capitalize()}; bytes of the run. Clients evaluate with all "
        "neighbours at the end of a round: what they fetch for it is a line of its own.",
    )


_WIRES: Final = {
    "rows_fetched": "rows",
    "feature_bytes_logical": "rows, logical",
    "feature_bytes_link": "rows, link",
    "evaluate_feature_bytes_link": "evaluation, link",
    "model_bytes": "models",
    "wire": "all messages",
}


def accuracy_curves(groups: Groups, compared: Mapping[str, Own], rules: Mapping[str, Own]) -> list[Curves]:
    """Return accuracy against the link bytes of features: of the comparison, and along the axes on random parts."""
    return [
        _accuracy_curve(f"parts with {CUT}", {label: groups[name(CUT, label)] for label in compared}),
        _accuracy_curve(RANDOM, {label: groups[name(SHORT[RANDOM], label)] for label in rules}),
    ]


def _accuracy_curve(title: str, runs: Mapping[str, Sequence[GraphRun]]) -> Curves:
    series = []
    for label, made in runs.items():
        points = [
            (mean(run.points[i][2] for run in made), 100 * mean(run.points[i][1] for run in made))
            for i in range(len(made[0].points))
        ]
        series.append(Series(label, [x for x, _ in points if x > 0], [y for x, y in points if x > 0]))
    sent = [x for one in series for x in one.x] or [1.0]
    local = 100 * mean(run.accuracy for run in runs[LOCAL])
    series = [one for one in series if one.name != LOCAL]
    series.append(Series(f"{LOCAL}, no bytes", [min(sent), max(sent)], [local, local]))
    return Curves(
        f"Accuracy against bytes of features, {title}",
        "bytes of feature rows so far, both links",
        "%",
        series,
        log_x=True,
        x_bytes=True,
        caption=f"{_size(runs[UNSKEWED]).capitalize()}, means. Models and plans are not in it: they cost all rules the "
        "same.",
    )


def swept(mode: str, budget: float) -> str:
    """Return the label of a budget along its axis, of which variances are measured and nothing is trained."""
    return f"sweep {mode} {budget:g}"


def _sweep(exact: Exact, where: str, rule: str, key: str) -> Series:
    head = name(where, f"sweep {rule} ")
    points = [(float(label.removeprefix(head)), found[key]) for label, found in exact.items() if label.startswith(head)]
    known = [(x, y) for x, y in points if y is not None]
    return Series(f"{where}, {rule}", [x for x, _ in known], [y for _, y in known])


SWEPT: Final = ("matched", "measured", "worst")
"""Rules that the figures over D show."""


def row_curves(exact: Exact) -> Curves:
    """Return remote rows against the budget."""
    return Curves(
        "Remote rows against the budget",
        "D, times the unskewed variance",
        "remote rows a batch",
        [_sweep(exact, where, rule, "remote") for where in PARTITIONS for rule in SWEPT],
        log_x=True,
        log_y=True,
        caption="Expected, at the input layer, on batches of a run of the first seed. At D = 1 nothing is favoured.",
    )


def variance_curves(exact: Exact) -> Curves:
    """Return the exact second moment against the budget it was to keep."""
    return Curves(
        "Second moment against the budget",
        "D",
        "M(s)/M(1), exact",
        [_sweep(exact, where, rule, "second_moment") for where in PARTITIONS for rule in SWEPT],
        log_x=True,
        log_y=True,
        caption="On the diagonal a budget is spent exactly; below it less is saved than is allowed, above it the model "
        "is wrong. s is at most 16.",
    )


def task_record(task: GraphTask, clients: int) -> dict[str, Any]:
    """Return the task's record with the partition it was used with."""
    task.owner(clients)
    return task.record()


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)
