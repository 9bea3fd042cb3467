"""SIDCo: how well a threshold guessed from a few moments selects, what the search for stages does, what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Final

from fedcomp.experiments.catalog.adacomp import train_loss
from fedcomp.experiments.estimates import (
    CHANGING,
    DENSITIES,
    FITS,
    LAYERED,
    PERIODS,
    SYNTHETIC,
    Source,
    fit_name,
    on_gradients,
    on_synthetic,
    search,
    timing,
)
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, HeatMap, Say, Series, Table, mean
from fedcomp.experiments.kit import judged
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rng import Key

TASK: Final = "digits"
DENSE: Final = "FedAvg"
EXACT: Final = "exact top-k with feedback"
EXPONENTIAL: Final = "SIDCo-E with feedback"
PARETO: Final = "SIDCo-P with feedback"

DEFAULT: Final = ("pareto", 2)
"""What the codec does when it is given nothing but a density."""

OPTIONS = {
    "task.hidden": Option("256", "widths of the hidden layers of the rows' model"),
    "lr": Option(0.2, "step size of the clients' SGD", above=0.0),
    "batch_size": Option(16, "examples per step; a client makes one step a round", least=1),
    "codec.density": Option(0.01, "share of the coordinates sent", above=0.0, most=1.0),
    "mlp_steps": Option(300, "steps over which gradients of the digits model are captured", least=1),
    "cnn_steps": Option(60, "steps over which gradients of the MNIST network are captured", least=1),
    "cnn_examples": Option(2000, "training images of the MNIST network", least=2),
    "size": Option(1_000_000, "elements of the synthetic vectors", least=10_000),
    "timing_size": Option(1_000_000, "elements of the vector selections are timed on", least=10_000),
    "draws": Option(4, "draws of every synthetic vector", least=1),
    "repetitions": Option(9, "interleaved repetitions of the timing, of which the median counts", least=1),
}

_SHARED = ("task.", "lr", "batch_size")
Searches = Mapping[str, Mapping[str, Sequence[float]]]
GOAL: Final = "goal of this package"
SEEDS: Final = "over seeds 0 to 2 with MNIST's files and 0 without"
_EXTREMES: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {"lowest": min, "highest": max}


def rows(config: Config) -> list[RunSpec]:
    """Dense averaging, exact top-k, and two families of SIDCo, all with memory."""

    def spec(system: str, label: str, take: tuple[str, ...] = (), **fixed: Any) -> RunSpec:
        every = max(1, -(-config.rounds // 10))
        return config.spec(system, label, TASK, take=(*_SHARED, *take), max_steps=1, evaluate_every=every, **fixed)

    density = ("codec.density",)
    return [
        spec("fedavg", DENSE),
        spec("topk", EXACT, density, feedback=True),
        spec("sidco", EXPONENTIAL, density, feedback=True, **{"codec.family": "exponential"}),
        spec("sidco", PARETO, density, feedback=True, **{"codec.family": "pareto"}),
    ]


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Estimates on known tails and on captured gradients, the search for stages, time, and train losses."""
    from fedcomp.tasks import get_task

    settings, seed = config.settings, config.seed
    size, timed = int(settings["size"]), int(settings["timing_size"])
    known: list[list[dict[str, float]]] = []
    for draw in range(int(settings["draws"])):
        say(f"estimates on synthetic vectors, draw {draw + 1} of {settings['draws']}")
        known.append(say.cell(f"synthetic/{draw}", partial(on_synthetic, size, Key(seed, "draws", draw))))
    captured: list[dict[str, Any]] = []
    for source, density, scope in product(sources(config), DENSITIES, ("global", "layer")):
        say(f"gradients of the {source.name} on {source.task_name}, density {density:g}, {scope}")
        make = partial(on_gradients, source, density, scope, seed)
        captured += say.cell(f"captured/{source.name}/{density:g}/{scope}", make)
    searches: dict[str, Searches] = {}
    for data in CHANGING:
        say(f"search for the number of stages over {PERIODS} periods, {data}")
        calls = Key(seed, "calls")
        searches[data] = say.cell(f"search/{data}", partial(search, data, max(10_000, size // 5), calls))
    say("time of one selection")
    times = say.cell("times", partial(timing, timed, int(settings["repetitions"]), Key(seed, "timing")))
    say("train losses of the final models")
    task = get_task(TASK, hidden=settings["task.hidden"])
    found = say.cell("losses", lambda: {label: train_loss(task, result) for label, result in results.items()})
    losses = {label: math.nan if value is None else float(value) for label, value in found.items()}
    return Findings(
        tables=[
            _loss_table(results, losses),
            _synthetic_table(known),
            *_captured_tables(captured),
            _search_table(searches),
            _time_table(times),
        ],
        figures=[_heat_map(captured), *_search_figures(searches), _bytes_figure(results)],
        values={
            **{f"loss/{label}": loss for label, loss in losses.items()},
            **_synthetic_values(known),
            **_captured_values(captured),
            **_search_values(searches),
            **{f"time/{name}": value for name, value in times.items()},
        },
        tasks=[source.task().record() for source in sources(config)],
    )


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
    rows: list[list[Any]] = [
        [
            label,
            losses[label],
            losses[label] / losses[DENSE],
            100 * result.accuracy,
            None if label == DENSE else result.uplink_payload_bytes / exact,
        ]
        for label, result in results.items()
    ]
    return Table(
        "Training on digits",
        ("row", "train loss, nats", "times dense", "test accuracy, %", "uplink, times exact top-k's"),
        rows,
        "Loss of the final model on all training examples. SIDCo never sends more than twice what is wanted: such "
        "estimates are cut to the exact top k.",
    )


def _synthetic_table(known: Sequence[Sequence[Mapping[str, float]]]) -> Table:
    names, chosen = [*(fit_name(*fit) for fit in FITS), "E, M = 8"], fit_name(*DEFAULT)
    cases = range(len(SYNTHETIC))
    rows: list[list[Any]] = [[name, *(known[0][i][name] for i in cases)] for name in names]
    for which, of in _EXTREMES.items():
        rows.append(
            [f"{chosen}, {which} of {len(known)} draws", *(of([draw[i][chosen] for draw in known]) for i in cases)]
        )
    return Table(
        "Selected over wanted, known tails",
        ("fit", *(f"{data}, {density:g}" for data, density in SYNTHETIC)),
        rows,
        "By distribution and density wanted. E exponential, P generalised Pareto, GP gamma then Pareto; M stages. One "
        "draw, but for the last two rows. Layers are equally long parts of the vector, their scales log-normal with "
        "sigma 2: what one fit to all of them gives depends on which scales were drawn.",
    )


def _captured_tables(captured: Sequence[Mapping[str, Any]]) -> list[Table]:
    names = [fit_name(*fit) for fit in FITS]
    summary: list[list[Any]] = []
    for name in names:
        row: list[Any] = [name]
        for what in ("alone", "with memory"):
            found = _of(captured, what, name)
            row += [min(found), median(found), max(found), 100 * within(found)]
        summary.append(row)
    columns = ("lowest", "median", "highest", "% within 2x")
    full: list[list[Any]] = [
        [_place(row), row["what"], row["step"], row["density"], *(row["fits"][n] for n in names)] for row in captured
    ]
    return [
        Table(
            "Selected over wanted, captured gradients",
            ("fit", *(f"gradient {c}" for c in columns), *(f"with memory {c}" for c in columns)),
            summary,
            f"Over both networks, three steps, densities {', '.join(f'{d:g}' for d in DENSITIES)}, all layers as one "
            f"vector and each by itself: {len(captured) // 2} vectors each. Within 2x: between half and twice what is "
            "wanted.",
        ),
        Table(
            "Every captured vector",
            ("network, layer", "gradient", "step", "density", *names),
            full,
            "Selected over wanted. The memory is what exact top-k of the same density left, of the whole model or by "
            "layer as the vector.",
        ),
    ]


def _of(captured: Sequence[Mapping[str, Any]], what: str, name: str) -> list[float]:
    return [row["fits"][name] for row in captured if row["what"] == what]


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']} {row['part'].removesuffix('.weight')}"


def _heat_map(captured: Sequence[Mapping[str, Any]]) -> HeatMap:
    names = [fit_name(*fit) for fit in FITS]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in captured:
        if row["what"] == "with memory":
            groups.setdefault(f"{_place(row)}, {row['density']:g}", []).append(row["fits"])
    return HeatMap(
        "Selected over wanted, gradient with memory",
        names,
        list(groups),
        [[median(fits[name] for fits in found) for name in names] for found in groups.values()],
        "median over the steps",
        log=True,
        caption="1 is right, deeper is more than wanted, a gap in colour is nothing selected. By network, layer and "
        "density: the digits MLP of 85 002 parameters and the MNIST CNN.",
    )


def _search_table(searches: Mapping[str, Searches]) -> Table:
    rows: list[list[Any]] = []
    for data, found in searches.items():
        for rule, series in found.items():
            late = _late(series["achieved"])
            stages = " ".join(f"{int(count)}" for count in series["stages"])
            rows.append([data, rule, series["achieved"][0], min(late), median(late), max(late), stages])
    return Table(
        "The search for the number of stages",
        ("data", "rule", "first period", "later: lowest", "median", "highest", f"stages in {PERIODS} periods"),
        rows,
        "Selected over wanted, before any cut to k: in the first period of five calls, and in the second half of the "
        "periods. Density 0.001, a fresh draw for every call. The published rule takes a stage away after "
        "over-selection, so it never leaves one stage where that selects too many; a memory, which holds what was just "
        "below the threshold, makes one stage select too few. The reversing rule goes on where a period lies outside "
        "0.8 to 1.2, and comes by the bad numbers of stages again and again where the best one lies at the edge.",
    )


def _late(series: Sequence[float]) -> Sequence[float]:
    return series[len(series) // 2 :]


def _search_figures(searches: Mapping[str, Searches]) -> list[Curves]:
    periods = list(range(1, PERIODS + 1))
    return [
        Curves(
            f"Search for the number of stages, {data}",
            "period of five calls",
            "selected over wanted",
            [Series(name, periods, series["achieved"]) for name, series in found.items()],
            log_y=True,
        )
        for data, found in searches.items()
    ]


def _time_table(times: Mapping[str, float]) -> Table:
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in times))
    rows: list[list[Any]] = []
    for name in names:
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
    exact = {r.round: r.uplink_payload_bytes for r in results[EXACT].rounds if r.uplink_payload_bytes}
    series = []
    for label in (EXPONENTIAL, PARETO):
        records = [r for r in results[label].rounds if r.round in exact]
        sizes = [r.uplink_payload_bytes / exact[r.round] for r in records]
        width = max(1, len(sizes) // 40)
        x = [float(r.round) for r in records][width - 1 :]
        series.append(Series(label, x, [mean(sizes[i : i + width]) for i in range(len(sizes) - width + 1)]))
    return Curves(
        "Uplink payload over exact top-k's",
        "round",
        "times, running mean",
        series,
        caption="Whole frames, biases included. How many coordinates exceed the guess differs by client and round.",
    )


def _synthetic_values(known: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    chosen, one = fit_name(*DEFAULT), fit_name("exponential", 1)
    exponential = [fit_name("exponential", stages) for stages in (1, 2, 3, 4)]
    cases = [(data, density, draw[i]) for draw in known for i, (data, density) in enumerate(SYNTHETIC)]
    groups = {
        "one scale": [fits[chosen] for data, _, fits in cases if not data.startswith(LAYERED)],
        "layers": [fits[chosen] for data, _, fits in cases if data.startswith(LAYERED)],
        "layers, one stage": [fits[one] for data, _, fits in cases if data.startswith(LAYERED)],
        "Laplace": [
            fits[name] for case in cases if case[:2] == SYNTHETIC[0] for fits in case[2:] for name in exponential
        ],
    }
    return {f"{name}: {which}": of(found) for name, found in groups.items() for which, of in _EXTREMES.items()}


def _captured_values(captured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for what, fit in product(("alone", "with memory"), FITS):
        name = fit_name(*fit)
        found = _of(captured, what, name)
        out |= {f"{which}: {name}, {what}": of(found) for which, of in _EXTREMES.items()}
        out[f"within: {name}, {what}"] = within(found)
    return out


def within(ratios: Sequence[float]) -> float:
    """Return the share of ``ratios`` between one half and two."""
    return mean(float(0.5 <= ratio <= 2.0) for ratio in ratios)


def _search_values(searches: Mapping[str, Searches]) -> dict[str, float]:
    return {
        f"search/{data}/{rule}": median(_late(series["achieved"]))
        for data, found in searches.items()
        for rule, series in found.items()
    }


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """What training loses, where a fit suffices, what memory does to it, what the search finds, and the time."""
    values = findings.values
    chosen, deep, single = fit_name(*DEFAULT), fit_name("pareto", 4), fit_name("exponential", 1)
    ratio, late, unlike = "selected over wanted", "median of the later periods", "layers of unlike scale"
    heavy, layered, remembered = CHANGING[0], CHANGING[2], CHANGING[3]
    published, reversing = (f"{rule}, E from 1" for rule in ("published", "reversing"))
    worst = max(_factor(values[f"search/{data}/{reversing}"]) for data in CHANGING)
    out = [
        Claim(f"{label}: train loss over dense", values[f"loss/{label}"] / values[f"loss/{DENSE}"], "<=", 1.15, GOAL)
        for label in (EXPONENTIAL, PARETO)
    ]
    for name, group, low, high, source in (
        ("Laplace at 0.01, E, M = 1 to 4", "Laplace", 0.95, 1.05, "theory: the right family; chance is 1 % of 10 000"),
        (f"Laplace, normal, t(4), t(2.5), {chosen}", "one scale", 0.6, 1.3, GOAL),
        (f"{unlike}, {chosen}", "layers", 0.6, 1.3, "goal; what one fit to sixty scales gives depends on them"),
    ):
        gate = group != "layers"
        out.append(Claim(f"{ratio}, {name}: lowest", values[f"{group}: lowest"], ">=", low, source, gate))
        out.append(Claim(f"{ratio}, {name}: highest", values[f"{group}: highest"], "<=", high, source, gate))
    for text, name, op, bound, found in (
        (f"{ratio}, {unlike}, {single}: lowest", "layers, one stage: lowest", ">=", 5.0, "20 to 23"),
        (f"gradients, {chosen}: share within 2x", f"within: {chosen}, alone", ">=", 0.9, "0.97 to 0.98"),
        (f"with memory, {deep}: share within 2x", f"within: {deep}, with memory", ">=", 0.95, "1"),
        (f"with memory, {single}: share within 2x", f"within: {single}, with memory", "<=", 0.7, "0.43 to 0.49"),
        (f"search on {heavy}, {published}: {late}", f"search/{heavy}/{published}", ">=", 2.0, "2.3"),
        (f"search on {layered}, {published}: {late}", f"search/{layered}/{published}", ">=", 5.0, "23 to 30"),
        (f"search on {remembered}, {published}: {late}", f"search/{remembered}/{published}", ">=", 0.5, "0.9"),
    ):
        out.append(Claim(text, values[name], op, bound, f"measured {found} {SEEDS}"))
    out.append(
        Claim(f"search, {reversing}: {late}, largest factor off", worst, "<=", 2.5, f"measured 1.2 to 1.9 {SEEDS}")
    )
    share, source = values[f"within: {chosen}, with memory"], f"goal; measured 0.76 to 0.83 {SEEDS}"
    out.append(Claim(f"with memory, {chosen}: share within 2x", share, ">=", 0.9, source, gate=False))
    for density in DENSITIES:
        exact, guessed = (values[f"time/{name}/{density:g}"] for name in ("exact", chosen))
        quotient = exact / guessed if guessed else math.nan
        source = f"goal; measured 0.98 to 2.9 {SEEDS}"
        text = f"time of exact top-k over that of {chosen}, density {density:g}"
        out.append(Claim(text, quotient, "<=", 1.0, source, gate=False))
    return out


def _factor(ratio: float) -> float:
    """Return how far off a ratio is, alike for twice too many and twice too few."""
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    values, name = findings.values, fit_name(*DEFAULT)
    return (
        f"{name} selects {values['one scale: lowest']:.2f} to {values['one scale: highest']:.2f} times what was asked "
        f"for on data of one scale, {values['layers: lowest']:.2f} to {values['layers: highest']:.2f} on layers of "
        f"unlike scale; trained with it, the loss is {values[f'loss/{PARETO}'] / values[f'loss/{DENSE}']:.2f} times "
        "the dense one."
    )


EXPERIMENT = Experiment(
    name="sidco",
    question="Can a threshold guessed from a few moments of a gradient replace the search for its largest coordinates?",
    rows=rows,
    measure=judged(measure, claims, answer),
    options=OPTIONS,
    rounds=250,
    clients=8,
    minutes=3.2,
    quick=(
        "rounds=2",
        "clients=2",
        "task.hidden=20",
        "mlp_steps=3",
        "cnn_steps=2",
        "cnn_examples=8",
        "size=10000",
        "timing_size=10000",
        "draws=2",
        "repetitions=1",
    ),
    notes=(
        "SIDCo fits a distribution to the magnitudes and takes its quantile as the threshold. M stages: the first one "
        "aims at a quarter of the elements, each further one fits what exceeds the threshold so far. Every estimate is "
        "judged by counting what exceeds it. E is the exponential, P the generalised Pareto and GP the gamma fit "
        "followed by Pareto; the codec's default is P with 2 stages and the reversing search.\n\n"
        "Captured gradients are those of a client in trainings with exact top-k and error feedback. Alone they have "
        "heavy tails, as the method supposes. With memory, which is what a codec under error feedback gets, they have "
        "not: what was large has been sent, and what stays piles up below the threshold. There few stages fail in the "
        "other direction, the more so the smaller the density.\n\n"
        "Times depend on the machine, the vector's size and the density; they are goals and decide nothing. The claim "
        "on layers is a goal, too: what one fit to layers of unlike scale gives depends on the scales.\n\n"
        "MNIST where its files are found, otherwise the embedded digits enlarged to 28x28."
    ),
)
