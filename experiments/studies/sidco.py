"""The accuracy of SIDCo's thresholds on known tails and captured gradients, the search for stages, and the time.

Every figure is selected over wanted: the number of elements above an estimated threshold, divided by the requested k. 1
is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Table, mean
from fedcomp.experiments.kit import Record, Records, table, train_losses
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found
from fedcomp.rng import Key
from fedcomp.strategies.parts import TASK_PREFIX, below

if TYPE_CHECKING:
    from fedcomp.layout import Vector

DENSE: Final = "FedAvg"

DENSITIES: Final = (0.1, 0.01, 0.001)
SHORT: Final = {"exponential": "E", "pareto": "P", "gamma-pareto": "GP"}
FITS: Final = (
    *(("exponential", stages) for stages in (1, 2, 3, 4)),
    *(("pareto", stages) for stages in (1, 2, 4)),
    *(("gamma-pareto", stages) for stages in (1, 2)),
)
"""Family and number of stages of every judged estimate."""

SYNTHETIC: Final = (
    ("Laplace", 0.01),
    ("Laplace", 0.001),
    ("normal", 0.01),
    ("t(4)", 0.001),
    ("t(2.5)", 0.001),
    ("60 layers x t(4)", 0.001),
    ("60 layers x Laplace", 0.001),
)
"""Distributions with known tails, and densities that distinguish the families."""
LAYERS: Final = 60
LAYERED: Final = f"{LAYERS} layers x "

PERIODS: Final = 14
"""Number of periods of five calls, each on a fresh draw; the first half of the periods is the search itself."""

SEARCHES: Final = {
    "published, E from 1": ("exponential", 1, "published"),
    "fixed, E at 1": ("exponential", 1, "off"),
    "reversing, E from 1": ("exponential", 1, "reversing"),
    "reversing, P from 2": ("pareto", 2, "reversing"),
    "fixed, P at 4": ("pareto", 4, "off"),
}
"""Family, initial number of stages, and rule."""
REMEMBERED: Final = ", with memory"
CHANGING: Final = ("t(4)", "t(2.5)", f"{LAYERED}t(4)", f"t(4){REMEMBERED}")
"""Data on which the search for stages is observed."""


def fit_name(family: str, stages: int) -> str:
    """Return a fit's short name, such as ``"P, M = 2"``."""
    return f"{SHORT[family]}, M = {stages}"


CHOSEN: Final = fit_name("pareto", 2)
"""The codec's default when only a density is given."""


def achieved(values: Vector, density: float, family: str, stages: int) -> float:
    """Return the number of elements above the estimated threshold over the requested k."""
    from fedcomp.codecs.sidco import estimate_threshold
    from fedcomp.kernels import select_above

    k = max(1, math.ceil(density * values.size))
    threshold = estimate_threshold(values, k / values.size, family, stages).threshold
    return select_above(values, threshold).size / k


def judge(values: Vector, density: float) -> dict[str, float]:
    """Return selected over wanted for every fit."""
    return {fit_name(*fit): achieved(values, density, *fit) for fit in FITS}


def synthetic(name: str, size: int, key: Key, scales: Key) -> Vector:
    """Return ``size`` values of the distribution ``name``, float32.

    Layers are equal segments of the vector. Their scales are log-normal with sigma 2 and come from the key ``scales``.
    """
    rng = key.generator()
    base = name.rpartition(" x ")[2]
    if base == "Laplace":
        values = rng.laplace(size=size)
    elif base == "normal":
        values = rng.normal(size=size)
    else:
        values = rng.standard_t(float(base[2:-1]), size)
    if name.startswith(LAYERED):
        values *= np.exp(scales.generator().normal(0.0, 2.0, LAYERS)).repeat(-(-size // LAYERS))[:size]
    return np.asarray(values, np.float32)


def on_synthetic(size: int, key: Key) -> list[dict[str, float]]:
    """Return selected over wanted of every fit, and of eight exponential stages, for each of :data:`SYNTHETIC`."""
    out = []
    for i, (name, density) in enumerate(SYNTHETIC):
        values = synthetic(name, size, key.at(layer=i), key.at(purpose="scales"))
        out.append(judge(values, density) | {"E, M = 8": achieved(values, density, "exponential", 8)})
    return out


class Source(NamedTuple):
    """A training whose gradients are captured."""

    name: str
    task: str
    options: Mapping[str, Any]
    steps: int
    batch_size: int
    lr: float


def sources(config: Config) -> tuple[Source, ...]:
    """Return the fully connected and the convolutional network."""
    said = config.settings
    return (
        Source("MLP", "digits", {}, int(said["mlp_steps"]), 16, 0.2),
        Source("CNN", "mnist", {"train_examples": said["cnn_examples"]}, int(said["cnn_steps"]), 32, 0.1),
    )


def on_gradients(source: Source, density: float, scope: str, seed: int) -> list[dict[str, Any]]:
    """Train with exact top-k and memory; return the fits to the first client's gradient, alone and with memory.

    Gradients are captured in the first step, early in training, and in the last step. The memory is that of exact
    selection at the same density and scope, so it does not depend on any estimate. Gradients are scaled by the step
    size, like updates.
    """
    from fedcomp.codecs import ErrorFeedback, TopK
    from fedcomp.codecs.positional import stretches
    from fedcomp.experiments.central import Plan, Seen, simulate
    from fedcomp.layout import SmallDense
    from fedcomp.systems.pair import Pair
    from fedcomp.tasks import get_task

    out: list[dict[str, Any]] = []

    def look(seen: Seen) -> None:
        if seen.number not in (1, max(1, source.steps // 10), source.steps):
            return
        layout, gradient = seen.updates[0].layout, seen.updates[0].vector
        parts = [p for p in stretches(layout, scope) if p.stop <= layout.compressed_size]
        total = seen.memories[0]["memory"] + gradient
        for part, (what, values) in product(parts, (("alone", gradient), ("with memory", total))):
            name = "all layers" if scope == "global" else part.name.removesuffix(".weight")
            row = {"place": f"{source.name} {name}", "what": what, "step": seen.number, "density": density}
            out.append(row | {"fits": judge(values[part.slice], density)})

    training = {"lr": source.lr, "batch_size": source.batch_size, "max_steps": 1}
    # Layers of a few hundred values are left out, because they have no quantile as fine as the requested densities.
    task, policy = get_task(source.task, **source.options), SmallDense(share=1.0)
    plan = Plan(task, 2, source.steps, seed, training, policy=policy, held_out=True)
    simulate(plan, Pair(ErrorFeedback(TopK(density, scope=scope))), look=look)
    return out


def search(data: str, size: int, key: Key) -> dict[str, dict[str, list[float]]]:
    """Return, by rule, the stages and the mean of selected over wanted in every period, on fresh draws of ``data``."""
    from fedcomp.codecs import SIDCo
    from fedcomp.codecs.feedback import ErrorFeedback
    from fedcomp.codecs.sidco import PERIOD
    from fedcomp.layout import Layout, Update

    density, layout, scales = 0.001, Layout.flat(size), key.at(purpose="scales")
    out: dict[str, dict[str, list[float]]] = {}
    for rule, (family, stages, adapt) in SEARCHES.items():
        sidco = SIDCo(density, family=family, stages=stages, adapt=adapt)
        codec = ErrorFeedback(sidco) if data.endswith(REMEMBERED) else sidco
        state = codec.init(layout)
        counts: list[float] = []
        ratios: list[float] = []
        for call in range(PERIODS * PERIOD):
            now = key.at(round=call + 1)
            update = Update(synthetic(data.removesuffix(REMEMBERED), size, now, scales), layout)
            (count,) = SIDCo.stages_of(state).values()
            # A frame is cut to 2 k values; the estimate is judged before the cut.
            fitted = update.vector + state["memory"] if codec.remembers else update.vector
            counts.append(count)
            ratios.append(achieved(fitted, density, family, count))
            _, state = codec.encode(update, state, now)
        periods = [ratios[i : i + PERIOD] for i in range(0, len(ratios), PERIOD)]
        out[rule] = {"stages": counts[::PERIOD], "achieved": [mean(period) for period in periods]}
    return out


def timing(size: int, repetitions: int, key: Key) -> dict[str, float]:
    """Return median milliseconds of processor time by density and method, with one thread and interleaved
    repetitions."""
    import torch

    from fedcomp.codecs.sidco import estimate_threshold
    from fedcomp.kernels import select_above, select_topk, warm
    from fedcomp.measuring import Times
    from fedcomp.tasks.base import single_thread

    warm()
    values = synthetic("60 layers x t(4)", size, key, key.at(purpose="scales"))

    def guessed(density: float, family: str, stages: int) -> object:
        return select_above(values, estimate_threshold(values, density, family, stages).threshold)

    def usual(k: int) -> object:
        return torch.topk(torch.from_numpy(values).abs(), k, sorted=False)

    out: dict[str, float] = {}
    for density in DENSITIES:
        k = max(1, math.ceil(density * size))
        calls: dict[str, Callable[[], object]] = {"exact": partial(select_topk, values, k)}
        for fit in (*FITS[:2], FITS[3], *FITS[5:7]):
            calls[fit_name(*fit)] = partial(guessed, density, *fit)
        calls["torch.topk"] = partial(usual, k)
        with single_thread():
            times = Times(calls, repetitions)
        out |= {f"{name}/{density:g}": 1000 * times.median(name) for name in calls}
    return out


def study(found: Found) -> Studied:
    """Measure estimates on known tails and on captured gradients, the search for stages, time, and train losses."""
    from fedcomp.tasks import get_task

    config, say = found.config, found.say
    settings, seed = config.settings, config.seed
    by_name = {source.name: source for source in sources(config)}
    task = get_task(found.experiment.task, **below(settings, TASK_PREFIX))
    losses = train_losses(task, found.results, say)
    # In each draw the values and the scales of the layers are new.
    draws = found.sweep(
        lambda draw: {"cases": on_synthetic(int(settings["size"]), Key(seed, "draws", draw))},
        {"draw": range(int(settings["draws"]))},
        "estimates on synthetic vectors",
    )
    known = [record.cases for record in draws]
    # The whole model as one vector, whose layers have different scales, and each layer separately.
    captures = found.sweep(
        lambda source, density, scope: {"vectors": on_gradients(by_name[source], density, scope, seed)},
        {"source": list(by_name), "density": DENSITIES, "scope": ("global", "layer")},
        "captured gradients",
    )
    captured = Records(Record(vector) for record in captures for vector in record.vectors)
    searches = found.sweep(
        # A fifth of the elements, because every call of every rule draws a new vector.
        lambda data: {"rules": search(data, max(10_000, int(settings["size"]) // 5), Key(seed, "calls"))},
        {"data": CHANGING},
        f"search for the number of stages over {PERIODS} periods",
    )
    repeats = int(settings["repetitions"])
    times = say.cell("times", partial(timing, int(settings["timing_size"]), repeats, Key(seed, "timing")))
    return Studied(
        {
            **{(row, "train loss, nats"): loss for row, loss in losses.items()},
            **{(row, "train loss over dense"): loss / losses[DENSE] for row, loss in losses.items()},
            **_on_known(known),
            **{
                (f"{kind}, {fit_name(*fit)}", "share within 2x"): within(
                    fits[fit_name(*fit)] for fits in captured.where(what=what).each("fits")
                )
                for kind, what in (("gradients", "alone"), ("with memory", "with memory"))
                for fit in FITS
            },
            **_of_searches(searches),
            **{
                (f"density {density:g}", f"time of exact top-k over that of {CHOSEN}"): (
                    times[f"exact/{density:g}"] / (times[f"{CHOSEN}/{density:g}"] or math.nan)
                )
                for density in DENSITIES
            },
        },
        tables=[
            _synthetic_table(known),
            _captured_table(captured),
            _search_table(searches),
            _time_table(times),
            _places_table(captured),
        ],
        tasks=[get_task(source.task, **source.options).record() for source in by_name.values()],
    )


Known = Sequence[Sequence[Mapping[str, float]]]
"""Return the ratio of every fit, by draw and by entry of :data:`SYNTHETIC`."""


def _on_known(known: Known) -> dict[Any, float]:
    one = fit_name("exponential", 1)
    # On Laplace values the exponential fit is exact, so stages change nothing and all must be right.
    right = [fit_name("exponential", stages) for stages in (1, 2, 3, 4)]
    found: dict[Any, float] = {}
    for title, fits, of in (
        ("Laplace at 0.01, E, M = 1 to 4", right, SYNTHETIC[:1]),
        (f"data of one scale, {CHOSEN}", [CHOSEN], [at for at in SYNTHETIC if not at[0].startswith(LAYERED)]),
        (f"layers of unlike scale, {CHOSEN}", [CHOSEN], [at for at in SYNTHETIC if at[0].startswith(LAYERED)]),
        (f"layers of unlike scale, {one}", [one], [at for at in SYNTHETIC if at[0].startswith(LAYERED)]),
    ):
        ratios = [cases[SYNTHETIC.index(at)][fit] for cases in known for at in of for fit in fits]
        found[title, "selected over wanted, lowest"] = min(ratios)
        found[title, "selected over wanted, highest"] = max(ratios)
    return found


def _of_searches(searches: Records) -> dict[Any, float]:
    late = {
        (found.data, rule): median(_late(series["achieved"]))
        for found in searches
        for rule, series in found.rules.items()
    }
    wandering = [late[data, "reversing, E from 1"] for data in CHANGING]
    return {
        **{(f"search on {data}, {rule}", "median of the later periods"): value for (data, rule), value in late.items()},
        # Symmetric for twice too many and twice too few.
        ("search, reversing, E from 1", "median of the later periods, largest factor off"): max(
            max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf for ratio in wandering
        ),
    }


def _synthetic_table(known: Known) -> Table:
    names = [*(fit_name(*fit) for fit in FITS), "E, M = 8"]
    rows: list[list[Any]] = [[name, *(case[name] for case in known[0])] for name in names]
    for which, of in (("lowest", min), ("highest", max)):
        found = [of(case[CHOSEN] for case in cases) for cases in zip(*known, strict=True)]
        rows.append([f"{CHOSEN}, {which} of {len(known)} draws", *found])
    return Table(
        "Selected over wanted, known tails",
        ("fit", *(f"{data}, {density:g}" for data, density in SYNTHETIC)),
        rows,
        "By distribution and requested density. E exponential, P generalised Pareto, GP gamma then Pareto; M stages. "
        "One draw, except for the last two rows. Layers are equally long parts of the vector with log-normal scales "
        "of sigma 2; the result of one fit to all layers depends on the drawn scales.",
    )


def _captured_table(captured: Records) -> Table:
    names = [fit_name(*fit) for fit in FITS]
    summary: dict[str, Any] = {"fit": lambda name: name}
    for what, kind in (("alone", "gradient"), ("with memory", "with memory")):
        fits = captured.where(what=what).each("fits")
        for column, of in (("lowest", min), ("median", median), ("highest", max)):
            # Bound as defaults, because closures would see only the last gradients and the last function of the loops.
            summary[f"{kind} {column}"] = lambda name, fits=fits, of=of: of(fit[name] for fit in fits)
        summary[f"{kind} % within 2x"] = lambda name, fits=fits: 100 * within(fit[name] for fit in fits)
    return table(
        "Selected over wanted, captured gradients",
        summary,
        names,
        f"Over both networks, three steps, densities {', '.join(f'{d:g}' for d in DENSITIES)}, all layers as one "
        f"vector and each separately: {len(captured) // 2} vectors each. Within 2x: between half and twice the "
        "requested number. The memory is that of exact top-k at the same density, over the whole model or by layer.",
    )


def _places_table(captured: Records) -> Table:
    groups = captured.where(what="with memory").groups("place", "density")
    # Averaged over steps only, so a layer or density at which a fit fails keeps its own line.
    columns: dict[str, Any] = {"median over the steps": lambda at: f"{at[0]}, {at[1]:g}"} | {
        name: (lambda at, name=name: median(fits[name] for fits in groups[at].each("fits")))
        for name in (fit_name(*fit) for fit in FITS)
    }
    return table(
        "Selected over wanted, gradient with memory",
        columns,
        groups,
        "1 is right, and 0 means that nothing is selected. By network, layer and density, for the digits MLP of 85 002 "
        "parameters and the MNIST CNN.",
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
        "periods. Density 0.001, a fresh draw for every call. The published rule removes a stage after selecting too "
        "many, so it never leaves one stage if that selects too many. A memory holds values just below the threshold "
        "and makes one stage select too few. The reversing rule continues when a period lies outside 0.8 to 1.2. If "
        "the best number of stages is at the edge, it passes through bad numbers again and again.",
    )


def _late(series: Sequence[float]) -> Sequence[float]:
    # The first half of the periods is the search itself.
    return series[len(series) // 2 :]


def _time_table(times: Mapping[str, float]) -> Table:
    rows: list[list[Any]] = []
    for name in dict.fromkeys(name.rpartition("/")[0] for name in times):
        found = [(times[f"{name}/{d:g}"], times[f"exact/{d:g}"]) for d in DENSITIES]
        rows.append([name, *(cell for own, exact in found for cell in (own, own / exact))])
    return Table(
        "Time of one selection",
        ("method", *(text for d in DENSITIES for text in (f"{d:g}: ms", "times exact"))),
        rows,
        "Processor time of one thread, medians of interleaved repetitions in this run. Milliseconds depend on this "
        "machine; ratios carry over. Values are layered t(4). SIDCo includes estimate and selection.",
    )


def within(ratios: Iterable[float]) -> float:
    """Return the fraction of ``ratios`` between one half and two."""
    return mean(float(0.5 <= ratio <= 2.0) for ratio in ratios)
