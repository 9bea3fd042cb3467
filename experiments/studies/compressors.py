"""Every codec on four models at equal uplink bytes, each with its own setting and step size."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.experiment import Rows, Studied
from fedcomp.experiments.findings import Curves, Series, Table, largest, mean, spread
from fedcomp.experiments.kit import Record, Records, Sweep, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import format_settings
from fedcomp.experiments.tables import TUNING_SEED, Found

if TYPE_CHECKING:
    # Listing the experiments needs no torch, so it is imported when one runs.
    from fedcomp.experiments.central import Plan
    from fedcomp.layout import Update
    from fedcomp.program import System
    from fedcomp.tasks.base import Task

FEDAVG: Final = "FedAvg"
MOMENTUM: Final = "FedAvg, momentum 0.9"
HALF: Final = "FedAvg, fp16"
TOPK: Final = "top-k, q8 + EF"
BLOCKS: Final = "levels per block + EF"
POWER: Final = "PowerSGD"
RIVALS: Final = (FEDAVG, HALF, TOPK, BLOCKS)
"""The obvious rivals, drawn in every figure."""

BUDGETS: Final = ("1/100", "1/24", "1/13", "1/7")
"""Uplink bytes as fractions of FedAvg's, in ascending order: one per cent, and one, two and four bits per weight with
room for biases that are sent whole."""

DEFAULT_BUDGETS: Final = BUDGETS[:2]
"""The budgets of a run that is not ``full``."""

OVER: Final = "largest uplink over its budget"
DIFFER: Final = "bytes that differ with messages and without, all models"
LEAST: Final = f"least test loss at {DEFAULT_BUDGETS[1]} over FedAvg's, with momentum where that is less"
POWERS_LOSS: Final = f"test loss of {POWER} at {DEFAULT_BUDGETS[1]} over that of {TOPK}"

OWN: Final = "its own"
"""The budget label of a row for which no budget is large enough; it runs with its cheapest setting."""

POWERS: Final = (-1, 0, 1)
REACH: Final = 3
"""Step sizes are 3^k times the model's usual one for these k. While the best is at an end, further k up to ±REACH are
tried."""

LAST: Final = 5
"""Losses and accuracies are means over this number of rounds, since a single round depends on its last batches."""

LOOKED: Final = 6
SENDERS: Final = 2
"""Numbers of FedAvg rounds, spread over a training, and of clients whose updates measure settings and times. The number
of rounds is even because PowerSGD's sides alternate."""

REPETITIONS: Final = 3

CHECKED: Final = ("fedavg", "topk", "power-sgd")
CHECK_ROUNDS: Final = 3
"""Systems that also run over messages on every model, and the number of rounds."""


class Trained(NamedTuple):
    """A model and how clients train it: its task, the usual step size (the middle of the grid), the examples per step,
    and the steps of a client per round."""

    task: str
    options: Mapping[str, Any]
    lr: float
    batch_size: int
    steps: int = 2


_TEXT: Final = {"seq_len": 16}

MODELS: Final[Mapping[str, Trained]] = {
    "MLP": Trained("digits", {}, 0.3, 16),
    "CNN": Trained("mnist", {}, 0.1, 8, 3),
    "LSTM": Trained("tiny-shakespeare", {"hidden": 96, **_TEXT}, 10.0, 16),
    "transformer": Trained("tiny-shakespeare", {"model": "transformer", "hidden": 48, "layers": 2, **_TEXT}, 1.0, 8),
}


class Contender(NamedTuple):
    """A codec and the setting that controls its size: a function from the setting and the clients' step size to the
    codec's configuration; the possible settings, in ascending order of bytes; and whether the length of a frame follows
    from the setting (up to indices and entropy coding) or from the data, which change during a training."""

    codec: Callable[[Any, float], dict[str, Any]]
    settings: Sequence[Any] = ("",)
    steady: bool = True


def _geometric(first: float, last: float, ratio: float) -> tuple[float, ...]:
    """Return powers of ``ratio`` times ``first``, to three digits, and ``last``."""
    powers = itertools.takewhile(lambda value: value < last, (first * ratio**i for i in itertools.count()))
    return (*(float(f"{value:.3g}") for value in powers), last)


DENSITIES: Final = _geometric(1e-4, 1.0, 1.05)
# With two bits or fewer per value, sending all values takes fewer bytes than these with their positions; other rows do
# that.
HALVES: Final = tuple(density for density in DENSITIES if density <= 0.4)
RANKS: Final = tuple(range(1, 65))
LEVELS: Final = (1, 2, 3, 4, 5, 7, 10, 15, 22, 31, 44, 63, 90, 127)


def _memory(codec: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"id": "feedback", "codec": codec, **options}


def _row(
    codec_id: str,
    knob: str = "",
    settings: Sequence[Any] = ("",),
    *,
    memory: bool = True,
    steady: bool = True,
    **options: Any,
) -> Contender:
    """Return a codec with one free parameter and other fixed ones. ``memory`` adds error feedback; unbiased codecs and
    those with their own memory have none."""

    def codec(setting: Any, lr: float) -> dict[str, Any]:
        own = {"id": codec_id, **({knob: setting} if knob else {}), **options}
        return _memory(own) if memory else own

    return Contender(codec, settings, steady)


def _transformed(**transform: Any) -> Contender:
    topk = {"id": "topk", "values": "q8", "scope": "layer"}
    return Contender(
        lambda d, lr: _memory({"id": "domain", "transform": transform, "codec": {**topk, "density": d}}), DENSITIES
    )


_DENSITY: Final = ("density", DENSITIES)

ROWS: Final[Mapping[str, Contender]] = {
    FEDAVG: _row("identity", memory=False),
    # Nothing is left out, so only the clients' momentum acts, which equals server momentum.
    MOMENTUM: _row("feedback", codec={"id": "identity"}, momentum=0.9, memory=False),
    HALF: _row("randomk", density=1.0, values="fp16", memory=False),
    # All coordinates in levels of the largest of every 256, down to signs with one magnitude; "random" with density 1
    # selects all.
    BLOCKS: _row("randomk", "values", ("sign", "q2", "q4", "q8"), density=1.0, scope="layer"),
    TOPK: _row("topk", *_DENSITY, values="q8"),
    "top-k + EF": _row("topk", *_DENSITY, values="float32"),
    "top-k, q2 + EF": _row("topk", "density", HALVES, values="q2"),
    "random-k + EF": _row("randomk", *_DENSITY, values="q8"),
    "random block + EF": _row("randomblock", *_DENSITY, values="q8"),
    "chunk top-1 + EF": _row("chunk", *_DENSITY, values="q8"),
    "chunk top-k + EF": _row("chunk-topk", *_DENSITY, values="q8"),
    # A level is in units of the update, which scale with the step size.
    "threshold + EF": Contender(
        lambda level, lr: _memory({"id": "threshold", "level": level * lr, "values": "q8"}),
        _geometric(1e-4, 10.0, 1.1)[::-1],
        steady=False,
    ),
    "SIDCo + EF": _row("sidco", *_DENSITY, values="q8", steady=False),
    "key regions + EF": Contender(
        # The ratio of the two densities is the codec's default.
        lambda d, lr: _memory({"id": "keyregion", "key_density": d, "sparse_density": d / 20, "values": "q8"}),
        DENSITIES,
        steady=False,
    ),
    "AdaComp": Contender(
        lambda b, lr: {"id": "adacomp", "bin": b, "conv_bin": max(1, b // 10), "rest": "q8"},
        tuple(dict.fromkeys(int(b) for b in _geometric(2, 16_383, 1.1)))[::-1],
        steady=False,
    ),
    "top-k, momentum 0.9 + EF": Contender(
        lambda d, lr: _memory({"id": "topk", "density": d, "values": "q8"}, momentum=0.9, masking=False), DENSITIES
    ),
    "DGC": _row("dgc", *_DENSITY, warmup=0, values="q8", memory=False),
    "ScaleCom": _row("scalecom", *_DENSITY, values="q8", memory=False),
    "STC + EF": _row("stc", "density", HALVES, rest="q8"),
    "EF-signSGD": _row("scaledsign"),
    "norm-scaled signs + EF": _row("normsign"),
    # Every weight moves by this much in every round; the clients' step size itself would be far too large.
    "signSGD, majority vote": Contender(lambda s, lr: {"id": "signsgd", "step": 0.01 * lr}),
    "TernGrad": _row("terngrad", memory=False),
    "natural compression": _row("natural", memory=False),
    "QSGD": _row("qsgd", "levels", LEVELS, memory=False),
    "dithering": _row("dithering", "bits", tuple(range(1, 9)), memory=False),
    "EDEN": _row("eden", "bits", (1, 2, 3, 4), memory=False),
    "Auto": _row("auto", "bits", (0.25, 0.5, 1.0, 2.0, 4.0), memory=False),
    "fixed point + EF": Contender(
        lambda d, lr: _memory({"id": "fixedpoint", "codec": {"id": "randomk", "density": d}, "clip": 0.5}), DENSITIES
    ),
    "rotation, top-k + EF": _transformed(id="rotation"),
    "DCT, top-k + EF": _transformed(id="dct", chunk=256),
    "FFT, top-k + EF": _row("fft", *_DENSITY, values="range8", order="HWDF"),
    "low rank + EF": _row("low-rank", "rank", RANKS),
    POWER: _row("power-sgd", "rank", RANKS, memory=False),
    "PowerSGD, two exchanges": _row("power-sgd", "rank", RANKS, form="two-exchange", memory=False),
}
"""The rows of the table by label, in order. A new codec of the package needs a row here."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "chain": "adds clipping or noise before another codec and sends the frames of that codec",
    "topagg": "sends votes, which only a private strategy can turn into a step; see the experiment 'topagg'",
    "gradiveq": "samples dense rounds: with four of 24, a cycle takes at least a sixth of FedAvg's bytes, more than "
    "any budget; see the experiment 'gradiveq'",
    "lgc": "trains its autoencoder for hundreds of rounds before it sends latents, and these runs have 24 rounds; see "
    "the experiment 'lgc'",
    "factors": "is for one batch a round, whose gradient consists of few outer products; it reduces the changes of "
    "whole epochs as 'low-rank' does, with more iterations",
    "modular": "sends fixed-point integers with room for sums on the way: the same updates in more bits",
    "projection": "has the error of random-k with the same number of values, (n - 1)/m against n/k - 1, for many "
    "times the computing; it is for updates of which only few numbers can be measured, see the experiment 'forward'",
    "replay": "is a downlink of 'projection' and repeats its frames",
    "bounded": "clips and rounds the updates of a private sum; see the experiment 'topagg'",
}
"""Registered codecs without a row, and the reason."""


def models_of(text: str) -> tuple[str, ...]:
    """Return the models in a comma-separated text; raise :class:`ConfigError` if there is none."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in MODELS:
            raise ConfigError(f"no model {name!r}{nearest(name, MODELS)}")
    return names


@functools.cache
def task_of(model: str, *, tuning: bool = False) -> Task:
    """Return a model's task. If ``tuning``, a part of the training examples replaces the test split."""
    from fedcomp.tasks import get_task

    task = get_task(MODELS[model].task, **MODELS[model].options)
    return task.validating() if tuning else task


def plan_of(model: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> Plan:
    """Return the training of a model with a step size. If ``tuning``, it uses the validation split and other random
    draws."""
    from fedcomp.experiments.central import Plan

    task, drawn = task_of(model, tuning=tuning), seed + tuning * TUNING_SEED
    training = {"lr": lr, "batch_size": MODELS[model].batch_size, "max_steps": MODELS[model].steps}
    return Plan(task, config.clients, config.rounds, drawn, training, last=LAST, held_out=True)


def system_for(row: str, setting: Any, lr: float) -> System:
    """Return the system and settings of a row."""
    from fedcomp.codecs import get_codec
    from fedcomp.experiments.central import program_of

    return program_of(get_codec(ROWS[row].codec(setting, lr)))


def train(
    model: str, row: str, budget: str, setting: Any, lr: float, seed: int, *, config: Config, tuning: bool = False
) -> dict[str, Any]:
    """Train one cell; return bytes, and loss and accuracy on the test split, or on the validation split if ``tuning``.

    Loss and accuracy are means over the last rounds; the loss is infinite if the training diverged. ``budget`` only
    names the cell. Bytes are per client and round.
    """
    from fedcomp.experiments.central import simulate
    from fedcomp.flower.logs import quiet

    with quiet():
        out = simulate(plan_of(model, lr, seed, config, tuning=tuning), system_for(row, setting, lr))
    # A training that diverged in its first round sent nothing.
    parts = len(out.exchanges) * config.clients or math.nan
    sent = {"uplink": out.uplink / parts, "downlink": out.downlink / parts}
    if out.diverged is not None:
        return {"loss": math.inf, "accuracy": math.nan, **sent}
    # Without the initial model, which is also a point.
    last = out.points[1:][-LAST:]
    return {"loss": mean(p.loss for p in last), "accuracy": mean(p.accuracy for p in last), **sent}


def tune(model: str, row: str, budget: str, setting: Any, *, config: Config) -> dict[str, Any]:
    """Choose a cell's step size by the loss on the validation split; also return the step sizes that were tried."""
    losses: dict[int, float] = {}

    def at(power: int) -> float:
        if power not in losses:
            lr = step_size(model, power)
            found = train(model, row, budget, setting, lr, config.seed, config=config, tuning=True)
            losses[power] = found["loss"]
        return losses[power]

    best = min(POWERS, key=at)
    # If the best is at an end, the next one is tried; the rule is the same for all rows.
    while best in (min(losses), max(losses)) and abs(best) < REACH:
        at(best + (1 if best == max(losses) else -1))
        best = min(losses, key=at)
    tried = [(step_size(model, power), losses[power]) for power in sorted(losses)]
    return {"lr": step_size(model, best), "end": best in (min(losses), max(losses)), "tried": tried}


def step_size(model: str, power: int) -> float:
    """Return 3^power times a model's usual step size."""
    return float(f"{MODELS[model].lr * 3.0**power:.3g}")


@functools.cache
def captured(model: str, clients: int, rounds: int, seed: int) -> list[list[Update]]:
    """Return the updates of some clients in some rounds of FedAvg on the data of tuning."""
    from fedcomp.codecs import Identity
    from fedcomp.experiments.central import Plan, Seen, simulate
    from fedcomp.systems.pair import Pair

    # The middles of equal parts of the training. In a very short training some rounds count twice.
    looked = [1 + (2 * part + 1) * rounds // (2 * LOOKED) for part in range(LOOKED)]
    found: dict[int, list[Update]] = {}

    def look(seen: Seen) -> None:
        found[seen.number] = [seen.updates[client] for client in range(min(SENDERS, clients))]

    usual = MODELS[model]
    training = {"lr": usual.lr, "batch_size": usual.batch_size, "max_steps": usual.steps}
    plan = Plan(task_of(model, tuning=True), clients, max(looked), seed + TUNING_SEED, training)
    simulate(plan, Pair(Identity()), look=look)
    return [found[number] for number in looked]


def exchanged(system: System, rounds: Sequence[Sequence[Update]], seed: int) -> tuple[int, float]:
    """Return uplink bytes and processor time of a system whose clients send these updates, for each round."""
    from fedcomp.experiments.central import Sending

    sending = Sending(system, rounds[0][0].layout, len(rounds[0]), seed + TUNING_SEED)
    sent, seconds = 0, 0.0
    for number, updates in enumerate(rounds, start=1):
        _, cost = sending.send(number, [update.vector for update in updates])
        sent, seconds = sent + cost.uplink, seconds + cost.seconds
    return sent, seconds


def fit(model: str, row: str, *, config: Config) -> dict[str, Any]:
    """Find a row's settings by the bytes of frames: for every budget the largest that fits, or None.

    ``least`` is the cheapest setting. Every setting comes with its bytes as a fraction of FedAvg's.
    """
    rounds, lr = captured(model, config.clients, config.rounds, config.seed), MODELS[model].lr
    settings = ROWS[row].settings
    dense, _ = exchanged(system_for(FEDAVG, "", lr), rounds, config.seed)

    @functools.cache
    def share(place: int) -> float:
        return exchanged(system_for(row, settings[place], lr), rounds, config.seed)[0] / dense

    found: dict[str, Any] = {"least": (settings[0], share(0))}
    for budget in BUDGETS:
        place = bisect_right(range(len(settings)), float(Fraction(budget)), key=share) - 1
        found[budget] = (settings[place], share(place)) if place >= 0 else None
    return found


def cost(model: str, row: str, budget: str, setting: Any, *, config: Config) -> dict[str, Any]:
    """Return the processor time of encoding, decoding and adding, in multiples of FedAvg's."""
    rounds, lr = captured(model, config.clients, config.rounds, config.seed), MODELS[model].lr
    ratios = []
    for repetition in range(-1, REPETITIONS):
        # Alternating, so varying load affects both.
        pair = system_for(row, setting, lr), system_for(FEDAVG, "", lr)
        own, dense = (exchanged(system, rounds, config.seed)[1] for system in pair)
        if repetition >= 0:  # the first one warms caches
            ratios.append(own / dense)
    return {"times": median(ratios)}


def rows(config: Config) -> Rows:
    """Return the systems that also run over messages, on every model, for a few rounds."""
    rounds, found = min(CHECK_ROUNDS, config.rounds), {}
    for system, model in product(CHECKED, models_of(str(config.settings["models"]))):
        task, options, lr, batch_size, steps = MODELS[model]
        own = {f"task.{name}": value for name, value in options.items()} | {"lr": lr, "batch_size": batch_size}
        own |= {"task": task, "max_steps": steps, "rounds": rounds, "evaluate_every": max(1, rounds)}
        found[f"{system}, {model}"] = f"{system} {format_settings(own)}"
    return found


def cells(fits: Iterable[Record], budgets: Sequence[str]) -> list[dict[str, Any]]:
    """Return the cells of the table: each row at every budget for which it has a setting of its own.

    A setting is listed at the smallest budget into which it fits. A row that fits none of ``budgets`` is trained at the
    smallest of all budgets that it fits, or otherwise with its cheapest setting. So every row has a cell.
    """
    made: list[dict[str, Any]] = []
    for found in fits:
        kept = [(budget, found[budget]) for budget in BUDGETS if found[budget] is not None]
        asked = [(budget, pair) for budget, pair in kept if budget in budgets]
        chosen: dict[Any, str] = {}
        for budget, (setting, _) in asked or kept[:1] or [(OWN, found["least"])]:
            chosen.setdefault(setting, budget)
        made += [
            {"model": found.model, "row": found.row, "budget": budget, "setting": setting}
            for setting, budget in chosen.items()
        ]
    return made


def front(places: Iterable[Record], by: str) -> list[Record]:
    """Return the cells that no other beats in both loss and ``by``, in ascending order of ``by``."""
    found: list[Record] = []
    for place in sorted(filter(_converged, places), key=lambda p: (p[by], p.loss)):
        if not found or place.loss < found[-1].loss:
            found.append(place)
    return found


def _converged(place: Record) -> bool:
    return math.isfinite(place.loss)


def study(found: Found) -> Studied:
    """Find settings by bytes and step sizes on a validation split, then train every cell and compare."""
    from fedcomp.experiments.central import beside

    config, sweep = found.config, functools.partial(found.sweep, config=found.config)
    models = models_of(str(config.settings["models"]))
    budgets = BUDGETS if config.settings["full"] else DEFAULT_BUDGETS
    fits = sweep(fit, {"model": models, "row": list(ROWS)}, "settings")
    made = cells(fits, budgets)
    tuned = sweep(tune, made, "tuning")
    asked = [{**c, "lr": t.lr, "seed": s} for c, t in zip(made, tuned, strict=True) for s in repetitions(config)]
    groups: dict[Any, Records] = sweep(train, asked).groups("model", "row", "budget")
    # One after the other, because a parallel process would use the caches of a measurement.
    costs = Sweep(cost, made, "time", {"config": config})(found.say)
    checked, compared = beside(found.results, "These rows run through Flower on the chosen engine, for a few rounds.")
    differ = {system: [each for label, each in compared.items() if label.startswith(system)] for system in CHECKED}
    repeated = next(c for c in asked if c["row"] == TOPK)
    again = found.say.cell("a training again", lambda: train(**repeated, config=config))
    same = groups[repeated["model"], TOPK, repeated["budget"]].one(seed=repeated["seed"])
    by_model: dict[str, list[Record]] = {model: [] for model in models}
    for cell, chosen, taken in zip(made, tuned, costs, strict=True):
        model, row, budget = (str(cell[axis]) for axis in ("model", "row", "budget"))
        runs, whole = groups[model, row, budget], groups[model, FEDAVG, OWN]
        up, down = (_mean_known(runs.each(way)) for way in ("uplink", "downlink"))
        figures = {"loss": mean(runs.each("loss")), "uplink": up, "downlink": down, "times": taken.times}
        figures["share"] = up / mean(whole.each("uplink"))
        by_model[model].append(Record({**cell, "lr": chosen.lr, "end": chosen.end, "runs": runs, **figures}))
    fitted: dict[str, Any] = {"model": "model", "row": "row"}
    fitted |= {at: lambda found, at=at: _fitted(found[at]) for at in ("least", *BUDGETS)}
    return Studied(
        quantities={
            "figures of a training that is made again that differ": sum(same[name] != again[name] for name in again),
            "the least of every model": _answer(by_model),
            **{(system, f"model {DIFFER}"): sum(each.model for each in differ[system]) for system in CHECKED},
            **{(system, f"frame {DIFFER}"): sum(each.frames for each in differ[system]) for system in CHECKED},
            **_of_all(by_model),
            **_of_models(by_model),
        },
        tables=[
            _best(by_model, budgets),
            *(_table(model, places) for model, places in by_model.items()),
            table(
                "Settings that keep a budget",
                fitted,
                fits,
                "The largest setting within each budget, and its uplink bytes as a fraction of FedAvg's; least: the "
                "fraction of the cheapest setting. A setting is trained at the smallest budget into which it fits.",
            ),
            checked,
        ],
        figures=[figure for model, places in by_model.items() for figure in _figures(model, places)],
        tasks=[task_of(model).record() for model in models],
    )


def _mean_known(values: Iterable[float]) -> float:
    return mean(value for value in values if not math.isnan(value))


def _fitted(pair: Sequence[Any] | None) -> str:
    return "" if pair is None else f"{pair[0]}: 1/{1 / pair[1]:.3g}".removeprefix(": ")


def _at(places: Iterable[Record], row: str, budget: str) -> Record | None:
    return next((p for p in places if (p.row, p.budget) == (row, budget)), None)


def _least(places: Iterable[Record], budget: str) -> list[Record]:
    """Return the cells within a budget, sorted by loss."""
    limit = float(Fraction(budget))
    # The size of indices changes during a training, so a cell belongs to the budget for which it was fitted.
    kept = (p for p in filter(_converged, places) if p.budget == budget or p.share <= limit)
    return sorted(kept, key=lambda p: p.loss)


def _table(model: str, places: Sequence[Record]) -> Table:
    fronts = {"bytes": front(places, "uplink"), "time": front(places, "times")}
    columns: dict[str, Any] = {
        "row": "row",
        "budget": "budget",
        "setting": lambda p: str(p.setting),
        "step size": "lr",
        "test loss": lambda p: round(p.loss, 3),
        "±": lambda p: round(spread(p.runs.each("loss")), 3),
        "accuracy, %": lambda p: round(100 * mean(p.runs.each("accuracy")), 1),
        "± points": lambda p: round(100 * spread(p.runs.each("accuracy")), 1),
        "uplink, bytes": lambda p: _whole(p.uplink),
        "times fewer": lambda p: round(1 / p.share, 1),
        "downlink, bytes": lambda p: _whole(p.downlink),
        "time, FedAvg's": lambda p: round(p.times, 1),
        "Pareto set by": lambda p: ", ".join(name for name, found in fronts.items() if p in found),
    }
    return table(
        f"{model}: every codec at every budget",
        columns,
        places,
        f"Means over the last {LAST} rounds and all seeds, ± half the range over seeds; a cell without a loss "
        "diverged. Uplink: bytes of frames per client and round. Downlink: bytes of the frames that would carry the "
        "mean to a client. Time: processor time of encoding, decoding and adding, in multiples of FedAvg's. Pareto "
        "set: no other cell has both less loss and fewer bytes (or less time).",
    )


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None


def _best(by_model: Mapping[str, Sequence[Record]], budgets: Sequence[str]) -> Table:
    def loss(place: Record | None) -> float | None:
        return None if place is None else round(place.loss, 3)

    rows = []
    for model, budget in product(by_model, reversed(budgets)):
        places = by_model[model]
        kept = _least(places, budget)
        own = [_at(places, FEDAVG, OWN), _at(places, MOMENTUM, OWN), _at(places, TOPK, budget)]
        names = [place.row for place in kept[:3]] + [""] * (3 - len(kept))
        rows.append([f"{model}, {budget}", *map(loss, own), loss(kept[0] if kept else None), *names])
    return Table(
        "Least test loss within a budget",
        ("model, budget", FEDAVG, MOMENTUM, TOPK, "least loss", "by", "second", "third"),
        rows,
        "Means over seeds. The lowest of many values is partly luck, so differences below the ± in the tables below "
        "mean nothing.",
    )


def _figures(model: str, places: Sequence[Record]) -> list[Curves]:
    made = []
    for name, by, label in (
        ("uplink bytes", "uplink", "uplink, bytes per reply"),
        ("time", "times", "encoding and decoding, in multiples of FedAvg's time"),
    ):
        best = front(places, by)
        lines = [("Pareto set", best)]
        for row in ROWS:
            if row in {*RIVALS, *(p.row for p in best)}:
                lines.append((row, sorted((p for p in places if p.row == row), key=lambda p: float(p[by]))))
        made.append(
            Curves(
                f"{model}: test loss against {name}",
                label,
                "test loss",
                [Series(row, [p[by] for p in line], [p.loss for p in line]) for row, line in lines],
                log_x=True,
                x_bytes=by == "uplink",
                caption="One point per budget. The figure has rows in the Pareto set and simple rivals; the table has "
                "all rows.",
            )
        )
    return made


def _of_all(by_model: Mapping[str, Sequence[Record]]) -> dict[Any, float]:
    """Return the quantities about all models together."""
    every = [p for places in by_model.values() for p in places]
    # A training that diverged in its first round sent nothing.
    fitted = [p for p in every if p.budget != OWN and math.isfinite(p.share)]

    def over(steady: bool) -> float:
        return largest(p.share / Fraction(p.budget) for p in fitted if ROWS[p.row].steady is steady)

    few, beaten = DEFAULT_BUDGETS[0], set(ROWS)
    for places in by_model.values():
        rival = _at(places, TOPK, few)
        beaten &= {p.row for p in _least(places, few) if rival is not None and p.loss < rival.loss}
    return {
        "rows without a cell on some model": sum(
            not any(p.row == row for p in places) for row in ROWS for places in by_model.values()
        ),
        f"{OVER}, codecs whose setting decides the length": over(True),
        f"{OVER}, codecs whose setting decides the length, as was aimed at": over(True),
        f"{OVER}, codecs whose data decide the length": over(False),
        f"rows with less test loss than {TOPK} at {few} on every model": len(beaten),
        "cells whose best step size is at an end of those tried": sum(p.end for p in every),
        "cells of which a training diverged": sum(not _converged(p) for p in every),
    }


def _of_models(by_model: Mapping[str, Sequence[Record]]) -> dict[Any, float]:
    """Return the quantities about each model."""
    some, found = DEFAULT_BUDGETS[1], {}
    for model, places in by_model.items():
        rival, power = _at(places, TOPK, some), _at(places, POWER, some)
        best = _least(places, some)
        # Some rows have momentum. Compared with FedAvg without momentum, they would only show its effect.
        dense = [place.loss for row in (FEDAVG, MOMENTUM) if (place := _at(places, row, OWN)) is not None]
        found[model, LEAST] = best[0].loss / min(dense) if best else math.nan
        if power is not None and rival is not None:
            found[model, POWERS_LOSS] = power.loss / rival.loss
    return found


def _answer(by_model: Mapping[str, Sequence[Record]]) -> str:
    said = []
    for model, places in by_model.items():
        dense = _at(places, FEDAVG, OWN)
        kept = [(budget, found[0]) for budget in DEFAULT_BUDGETS if (found := _least(places, budget))]
        best = ", ".join(f"{place.loss:.2f} at {budget} ({place.row})" for budget, place in kept)
        said.append(f"{model} {best}, against {dense.loss:.2f} of FedAvg" if dense is not None else model)
    return "; ".join(said)
