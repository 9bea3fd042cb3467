"""How SIDCo's thresholds select: on known tails, on captured gradients, by the search for stages, and in time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from fedcomp.experiments.estimates import (
    CHANGING,
    DENSITIES,
    FITS,
    LAYERED,
    PERIODS,
    SEARCHES,
    SYNTHETIC,
    Source,
    fit_name,
    on_gradients,
    on_synthetic,
    search,
    timing,
)
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Curves, HeatMap, Series, Table, mean
from fedcomp.experiments.kit import Record, Records, Sweep, curves, running_mean, table, train_losses
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import Found
from fedcomp.rng import Key

DENSE: Final = "FedAvg"
EXACT: Final = "exact top-k with feedback"
EXPONENTIAL: Final = "SIDCo-E with feedback"
PARETO: Final = "SIDCo-P with feedback"

DEFAULT: Final = ("pareto", 2)
"""What the codec does when it is given nothing but a density."""


def study(found: Found) -> Studied:
    """Estimates on known tails and on captured gradients, the search for stages, time, and train losses."""
    from fedcomp.tasks import get_task

    config, results, say = found.config, found.results, found.say
    settings, seed = config.settings, config.seed
    size, timed = int(settings["size"]), int(settings["timing_size"])

    def draw_of(draw: int) -> dict[str, Any]:
        # By draw: distributions, and the scales of the layers, are new in each.
        return {"cases": on_synthetic(size, Key(seed, "draws", draw))}

    def capture(source: str, density: float, scope: str) -> dict[str, Any]:
        return {"vectors": on_gradients(by_name[source], density, scope, seed)}

    by_name = {source.name: source for source in sources(config)}
    draws = Sweep(draw_of, {"draw": range(int(settings["draws"]))}, "estimates on synthetic vectors")(say)
    # The whole model as one vector, whose layers have unlike scales, and each layer by itself.
    axes = {"source": list(by_name), "density": DENSITIES, "scope": ("global", "layer")}
    vectors = [v for r in Sweep(capture, axes, "captured gradients")(say) for v in r.vectors]
    measured = Measurements(
        losses=train_losses(get_task(found.experiment.task, hidden=settings["task.hidden"]), results, say),
        known=[[dict(case) for case in r.cases] for r in draws],
        captured=Records(Record({**v, "place": _place(v)}) for v in vectors),
        searches=Sweep(
            # A fifth of the elements: every call of every rule draws a vector afresh.
            lambda data: {"rules": search(data, max(10_000, size // 5), Key(seed, "calls"))},
            {"data": CHANGING},
            f"search for the number of stages over {PERIODS} periods",
        )(say),
        times=say.cell("times", partial(timing, timed, int(settings["repetitions"]), Key(seed, "timing"))),
    )
    return Studied(
        quantities(measured),
        tables=[
            _loss_table(results, measured.losses),
            _synthetic_table(measured.known),
            *_captured_tables(measured.captured),
            _search_table(measured.searches),
            _time_table(measured.times),
        ],
        figures=[_heat_map(measured.captured), *_search_figures(measured.searches), _bytes_figure(results)],
        tasks=[source.task().record() for source in by_name.values()],
    )


@dataclass(frozen=True)
class Measurements:
    """What the claims are made of. All ratios are selected over wanted.

    Attributes
    ----------
    losses : mapping
        Train loss of the final model by row.
    known : sequence
        By draw and by entry of :data:`~fedcomp.experiments.estimates.SYNTHETIC`, the ratio of every fit.
    captured : Records
        One vector each: where it is from (``place``, ``what``, ``step``, ``density``) and the ratio of every fit.
    searches : Records
        By data, the stages and ratios of every rule's periods.
    times : mapping
        Milliseconds by method and density.
    """

    losses: Mapping[str, float]
    known: Sequence[Sequence[Mapping[str, float]]]
    captured: Records
    searches: Records
    times: Mapping[str, float]

    def extremes(self, *fits: str, layered: bool | None = None, data: str = "") -> tuple[float, float]:
        """Return the lowest and the highest ratio of some fits, by default the codec's own, over all draws.

        Of the data named, of layers of unlike scale, or of all other data.
        """
        ratios = [
            case[fit]
            for draw in self.known
            for at, case in zip(SYNTHETIC, draw, strict=True)
            for fit in fits or (fit_name(*DEFAULT),)
            if (at == (data, 0.01) if data else at[0].startswith(LAYERED) == layered)
        ]
        return min(ratios), max(ratios)

    def within(self, fit: str, what: str) -> float:
        """Return the share of captured vectors of which a fit selects between half and twice what is wanted."""
        return within(r.fits[fit] for r in self.captured.where(what=what))

    def late(self, data: str, rule: str) -> float:
        """Return the median ratio over the later periods of a search."""
        return median(_late(self.searches.one(data=data).rules[rule]["achieved"]))


def sources(config: Config) -> tuple[Source, ...]:
    """Return the fully connected and the convolutional network."""
    settings = config.settings
    cnn = {"train_examples": settings["cnn_examples"]}
    return (
        Source("MLP", "digits", {}, int(settings["mlp_steps"]), 16, 0.2),
        Source("CNN", "mnist", cnn, int(settings["cnn_steps"]), 32, 0.1),
    )


def _loss_table(results: Mapping[str, RunResult], losses: Mapping[str, float]) -> Table:
    exact = results[EXACT].uplink_payload_bytes
    columns: dict[str, Any] = {
        "row": lambda label: label,
        "train loss, nats": lambda label: losses[label],
        "times dense": lambda label: losses[label] / losses[DENSE],
        "test accuracy, %": lambda label: 100 * results[label].accuracy,
        "uplink, times exact top-k's": lambda label: (
            None if label == DENSE else results[label].uplink_payload_bytes / exact
        ),
    }
    return table(
        "Training on digits",
        columns,
        results,
        "Loss of the final model on all training examples. SIDCo never sends more than twice what is wanted: such "
        "estimates are cut to the exact top k.",
    )


def _synthetic_table(known: Sequence[Sequence[Mapping[str, float]]]) -> Table:
    names, chosen = [*(fit_name(*fit) for fit in FITS), "E, M = 8"], fit_name(*DEFAULT)
    rows: list[list[Any]] = [[name, *(case[name] for case in known[0])] for name in names]
    for which, of in (("lowest", min), ("highest", max)):
        found = [of(case[chosen] for case in cases) for cases in zip(*known, strict=True)]
        rows.append([f"{chosen}, {which} of {len(known)} draws", *found])
    return Table(
        "Selected over wanted, known tails",
        ("fit", *(f"{data}, {density:g}" for data, density in SYNTHETIC)),
        rows,
        "By distribution and density wanted. E exponential, P generalised Pareto, GP gamma then Pareto; M stages. One "
        "draw, but for the last two rows. Layers are equally long parts of the vector, their scales log-normal with "
        "sigma 2: what one fit to all of them gives depends on which scales were drawn.",
    )


def _captured_tables(captured: Records) -> list[Table]:
    names = [fit_name(*fit) for fit in FITS]
    summary: dict[str, Any] = {"fit": lambda name: name}
    for what, kind in (("alone", "gradient"), ("with memory", "with memory")):
        fits = captured.where(what=what).each("fits")
        for column, of in (("lowest", min), ("median", median), ("highest", max)):
            # Bound as defaults: closures would see the last gradients and the last function of the loops only.
            summary[f"{kind} {column}"] = lambda name, fits=fits, of=of: of(fit[name] for fit in fits)
        summary[f"{kind} % within 2x"] = lambda name, fits=fits: 100 * within(fit[name] for fit in fits)
    full: dict[str, Any] = {"network, layer": "place", "gradient": "what", "step": "step", "density": "density"}
    full |= {name: (lambda row, name=name: row.fits[name]) for name in names}
    return [
        table(
            "Selected over wanted, captured gradients",
            summary,
            names,
            f"Over both networks, three steps, densities {', '.join(f'{d:g}' for d in DENSITIES)}, all layers as one "
            f"vector and each by itself: {len(captured) // 2} vectors each. Within 2x: between half and twice what is "
            "wanted.",
        ),
        table(
            "Every captured vector",
            full,
            captured,
            "Selected over wanted. The memory is what exact top-k of the same density left, of the whole model or by "
            "layer as the vector.",
        ),
    ]


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']} {row['part'].removesuffix('.weight')}"


def _heat_map(captured: Records) -> HeatMap:
    names = [fit_name(*fit) for fit in FITS]
    groups = captured.where(what="with memory").groups("place", "density")
    return HeatMap(
        "Selected over wanted, gradient with memory",
        names,
        [f"{place}, {density:g}" for place, density in groups],
        # Over the steps only, so that a layer or density at which a fit fails keeps its own line.
        [[median(fits[name] for fits in found.each("fits")) for name in names] for found in groups.values()],
        "median over the steps",
        log=True,
        caption="1 is right, deeper is more than wanted, a gap in colour is nothing selected. By network, layer and "
        "density: the digits MLP of 85 002 parameters and the MNIST CNN.",
    )


def _search_table(searches: Records) -> Table:
    columns: dict[str, Any] = {
        "data": lambda line: line[0],
        "rule": lambda line: line[1],
        "first period": lambda line: line[2]["achieved"][0],
        "later: lowest": lambda line: min(_late(line[2]["achieved"])),
        "median": lambda line: median(_late(line[2]["achieved"])),
        "highest": lambda line: max(_late(line[2]["achieved"])),
        f"stages in {PERIODS} periods": lambda line: " ".join(f"{int(count)}" for count in line[2]["stages"]),
    }
    return table(
        "The search for the number of stages",
        columns,
        [(found.data, rule, series) for found in searches for rule, series in found.rules.items()],
        "Selected over wanted, before any cut to k: in the first period of five calls, and in the second half of the "
        "periods. Density 0.001, a fresh draw for every call. The published rule takes a stage away after "
        "over-selection, so it never leaves one stage where that selects too many; a memory, which holds what was just "
        "below the threshold, makes one stage select too few. The reversing rule goes on where a period lies outside "
        "0.8 to 1.2, and passes through bad numbers of stages again and again where the best one lies at the edge.",
    )


def _late(series: Sequence[float]) -> Sequence[float]:
    # The first half of the periods is the search itself.
    return series[len(series) // 2 :]


def _search_figures(searches: Records) -> list[Curves]:
    return [
        curves(
            f"Search for the number of stages, {found.data}",
            found.rules.items(),
            lambda line: range(1, PERIODS + 1),
            lambda line: line[1]["achieved"],
            lambda line: line[0],
            x_label="period of five calls",
            y_label="selected over wanted",
            log_y=True,
        )
        for found in searches
    ]


def _time_table(times: Mapping[str, float]) -> Table:
    rows: list[list[Any]] = []
    for name in dict.fromkeys(name.rpartition("/")[0] for name in times):
        found = [(times[f"{name}/{d:g}"], times[f"exact/{d:g}"]) for d in DENSITIES]
        rows.append([name, *(cell for own, exact in found for cell in (own, own / exact))])
    return Table(
        "Time of one selection",
        ("method", *(text for d in DENSITIES for text in (f"{d:g}: ms", "times exact"))),
        rows,
        "Processor time of one thread, medians of interleaved repetitions in this run; the milliseconds are this "
        "machine's, the ratios carry over. Layered t(4) values. SIDCo is estimate and selection.",
    )


def _bytes_figure(results: Mapping[str, RunResult]) -> Curves:
    # Rounds without an upload (the evaluation of the initial model) have nothing to divide by.
    exact = {r.round: r.uplink_payload_bytes for r in results[EXACT].rounds if r.uplink_payload_bytes}
    series = []
    for label in (EXPONENTIAL, PARETO):
        sizes = {r.round: r.uplink_payload_bytes / exact[r.round] for r in results[label].rounds if r.round in exact}
        # What is sent varies by round: about forty points show the trend.
        series.append(Series(label, *running_mean(list(sizes), list(sizes.values()), max(1, len(sizes) // 40))))
    return Curves(
        "Uplink payload over exact top-k's",
        "round",
        "times, running mean",
        series,
        caption="Whole frames, biases included. How many coordinates exceed the guess differs by client and round.",
    )


def within(ratios: Iterable[float]) -> float:
    """Return the share of ``ratios`` between one half and two."""
    return mean(float(0.5 <= ratio <= 2.0) for ratio in ratios)


def quantities(found: Measurements) -> dict[Any, float]:
    """Return what training loses, where a fit suffices, what memory does to it, what the search finds, and the time."""
    chosen, single = fit_name(*DEFAULT), fit_name("exponential", 1)
    # On Laplace values the exponential fit is exact, so that stages change nothing and all must be right.
    laplace = found.extremes(*(fit_name("exponential", stages) for stages in (1, 2, 3, 4)), data="Laplace")
    ranges = {
        "Laplace at 0.01, E, M = 1 to 4": laplace,
        f"data of one scale, {chosen}": found.extremes(layered=False),
        f"layers of unlike scale, {chosen}": found.extremes(layered=True),
        f"layers of unlike scale, {single}": found.extremes(single, layered=True),
    }
    reversing = "reversing, E from 1"
    return {
        **{(row, "train loss over dense"): found.losses[row] / found.losses[DENSE] for row in (EXPONENTIAL, PARETO)},
        **{(data, "selected over wanted, lowest"): lowest for data, (lowest, _) in ranges.items()},
        **{(data, "selected over wanted, highest"): highest for data, (_, highest) in ranges.items()},
        **{
            (f"{kind}, {fit_name(*fit)}", "share within 2x"): found.within(fit_name(*fit), what)
            for kind, what in (("gradients", "alone"), ("with memory", "with memory"))
            for fit in FITS
        },
        **{
            (f"search on {data}, {rule}", "median of the later periods"): found.late(data, rule)
            for data in CHANGING
            for rule in SEARCHES
        },
        (f"search, {reversing}", "median of the later periods, largest factor off"): max(
            _factor(found.late(data, reversing)) for data in CHANGING
        ),
        **{
            (f"density {density:g}", f"time of exact top-k over that of {chosen}"): (
                found.times[f"exact/{density:g}"] / found.times[f"{chosen}/{density:g}"]
                if found.times[f"{chosen}/{density:g}"]
                else math.nan
            )
            for density in DENSITIES
        },
    }


def _factor(ratio: float) -> float:
    """Return how far off a ratio is, alike for twice too many and twice too few."""
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf
