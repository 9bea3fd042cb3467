"""How well SIDCo's thresholds select: on values of known distribution, on gradients of real trainings, and in time.

What the experiment ``sidco`` measures; it shows and judges the figures. A figure is always selected over wanted: how
many elements exceed an estimated threshold, over the k that were asked for. 1 is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.findings import mean
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.layout import Vector
    from fedcomp.tasks.base import Task

DENSITIES: Final = (0.1, 0.01, 0.001)
SHORT: Final = {"exponential": "E", "pareto": "P", "gamma-pareto": "GP"}
FITS: Final = (
    *(("exponential", stages) for stages in (1, 2, 3, 4)),
    *(("pareto", stages) for stages in (1, 2, 4)),
    *(("gamma-pareto", stages) for stages in (1, 2)),
)
"""Family and number of stages of every estimate that is judged."""

SYNTHETIC: Final = (
    ("Laplace", 0.01),
    ("Laplace", 0.001),
    ("normal", 0.01),
    ("t(4)", 0.001),
    ("t(2.5)", 0.001),
    ("60 layers x t(4)", 0.001),
    ("60 layers x Laplace", 0.001),
)
"""Distributions whose tails are known, and densities that tell the families apart."""
LAYERS: Final = 60
LAYERED: Final = f"{LAYERS} layers x "

PERIODS: Final = 14
SEARCHES: Final = {
    "published, E from 1": ("exponential", 1, "published"),
    "fixed, E at 1": ("exponential", 1, "off"),
    "reversing, E from 1": ("exponential", 1, "reversing"),
    "reversing, P from 2": ("pareto", 2, "reversing"),
    "fixed, P at 4": ("pareto", 4, "off"),
}
"""Family, first number of stages, rule."""
REMEMBERED: Final = ", with memory"
CHANGING: Final = ("t(4)", "t(2.5)", f"{LAYERED}t(4)", f"t(4){REMEMBERED}")
"""Data the search for stages is watched on."""


def fit_name(family: str, stages: int) -> str:
    """Return a fit's short name, such as ``"P, M = 2"``."""
    return f"{SHORT[family]}, M = {stages}"


def achieved(values: Vector, density: float, family: str, stages: int) -> float:
    """Return how many elements exceed the estimated threshold, over the k that are wanted."""
    from fedcomp.codecs.sidco import estimate_threshold
    from fedcomp.kernels import select_above

    k = max(1, math.ceil(density * values.size))
    threshold = estimate_threshold(values, k / values.size, family, stages).threshold
    return select_above(values, threshold).size / k


def judge(values: Vector, density: float) -> dict[str, float]:
    """Return achieved over wanted for every fit."""
    return {fit_name(*fit): achieved(values, density, *fit) for fit in FITS}


def synthetic(name: str, size: int, key: Key, scales: Key) -> Vector:
    """Return ``size`` values of the distribution ``name``, float32.

    Layers, equal stretches of the vector, have log-normal scales of sigma 2 that are drawn by the key ``scales``.
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
    """Return achieved over wanted of every fit, and of eight exponential stages, for each of :data:`SYNTHETIC`."""
    out = []
    for i, (name, density) in enumerate(SYNTHETIC):
        values = synthetic(name, size, key.at(layer=i), key.at(purpose="scales"))
        out.append(judge(values, density) | {"E, M = 8": achieved(values, density, "exponential", 8)})
    return out


@dataclass(frozen=True)
class Source:
    """A training whose gradients are captured."""

    name: str
    task_name: str
    options: Mapping[str, Any]
    steps: int
    batch_size: int
    lr: float
    clients: int = 2

    def task(self) -> Task:
        """Return the task."""
        from fedcomp.tasks import get_task

        return get_task(self.task_name, **self.options)

    @property
    def marks(self) -> tuple[int, ...]:
        """The steps after which gradients are looked at: the first, one early in training, the last."""
        return tuple(sorted({1, max(1, self.steps // 10), self.steps}))


def on_gradients(source: Source, density: float, scope: str, seed: int) -> list[dict[str, Any]]:
    """Train with exact top-k and memory, and return the fits to the first client's gradient, alone and with memory.

    The memory is that of exact selection at the same density and scope, so that no estimate judges what another one
    left behind. Gradients are scaled by the step size, as updates are.
    """
    from fedcomp.codecs import TopK
    from fedcomp.codecs.feedback import ErrorFeedback
    from fedcomp.codecs.positional import stretches
    from fedcomp.experiments.central import Clients, Rounds, program_of
    from fedcomp.layout import SmallDense

    training = {"lr": source.lr, "batch_size": source.batch_size, "max_steps": 1}
    # Layers of a few hundred values are left out: no quantile of theirs is as fine as the densities asked for.
    clients = Clients(source.task(), source.clients, seed, training, dense=SmallDense(share=1.0))
    layout, system = clients.layout, program_of(ErrorFeedback(TopK(density, scope=scope)))
    weights = [float(len(split)) for split in clients.data]
    rounds = Rounds(system, layout, clients.vector, clients.train, weights.__getitem__, source.clients, seed)
    parts = [p for p in stretches(layout, scope) if p.stop <= layout.compressed_size]
    out = []
    for number in range(1, source.steps + 1):
        rounds.step(number)
        if number not in source.marks:
            continue
        seen = rounds.seen(number)
        gradient = seen.updates[0].vector
        total = seen.memories[0]["memory"] + gradient
        for part, (what, values) in product(parts, (("alone", gradient), ("with memory", total))):
            name = "all layers" if scope == "global" else part.name
            row = {"source": source.name, "part": name, "what": what, "step": number, "density": density}
            out.append(row | {"fits": judge(values[part.slice], density)})
    return out


def search(data: str, size: int, key: Key) -> dict[str, dict[str, list[float]]]:
    """Return by rule the stages and the mean of achieved over wanted of every period, on fresh draws of ``data``."""
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
            # What a frame holds is cut to 2 k; the estimate is judged as it is.
            fitted = update.vector + state["memory"] if codec.remembers else update.vector
            counts.append(count)
            ratios.append(achieved(fitted, density, family, count))
            _, state = codec.encode(update, state, now)
        periods = [ratios[i : i + PERIOD] for i in range(0, len(ratios), PERIOD)]
        out[rule] = {"stages": counts[::PERIOD], "achieved": [mean(period) for period in periods]}
    return out


def timing(size: int, repetitions: int, key: Key) -> dict[str, float]:
    """Return median milliseconds of processor time by density and method, one thread, repetitions interleaved."""
    import torch

    from fedcomp.codecs.sidco import estimate_threshold
    from fedcomp.kernels import select_above, select_topk, warm

    warm()
    values = synthetic("60 layers x t(4)", size, key, key.at(purpose="scales"))

    def guessed(density: float, family: str, stages: int) -> Callable[[], object]:
        return lambda: select_above(values, estimate_threshold(values, density, family, stages).threshold)

    def exact(k: int) -> Callable[[], object]:
        return lambda: select_topk(values, k)

    def usual(k: int) -> Callable[[], object]:
        return lambda: torch.topk(torch.from_numpy(values).abs(), k, sorted=False)

    out: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for density in DENSITIES:
            k = max(1, math.ceil(density * size))
            calls: dict[str, Callable[[], object]] = {"exact": exact(k)}
            for family, stages in (
                ("exponential", 1),
                ("exponential", 2),
                ("exponential", 4),
                ("pareto", 2),
                ("pareto", 4),
            ):
                calls[fit_name(family, stages)] = guessed(density, family, stages)
            calls["torch.topk"] = usual(k)
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(repetitions + 1):
                for name, call in calls.items():
                    start = time.thread_time()
                    call()
                    taken[name].append(time.thread_time() - start)
            # The first repetition brings the data into the cache and anything lazy into memory.
            out |= {f"{name}/{density:g}": 1000 * median(series[1:]) for name, series in taken.items()}
    finally:
        torch.set_num_threads(threads)
    return out
