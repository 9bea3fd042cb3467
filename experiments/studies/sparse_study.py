"""Which coordinates are sent, chosen where and from what, and whether the rest is remembered: the whole grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import HeatMap, mean, spread
from fedcomp.experiments.kit import Records, curves, over_seeds, repetitions, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.tables import Found
from fedcomp.rules import Real

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.tasks.base import Task

TASK: Final = "digits"
SELECTORS: Final[Mapping[str, str]] = {
    "topk": "top-k",
    "randomk": "random-k",
    "randomblock": "random-block",
    "chunk": "chunk",
}
"""Codec id and what it is called."""

SHARING: Final = ("shared", "individual")
SCOPES: Final = ("layer", "global")
MEMORY: Final = ("memory", "none")
DENSE: Final = "dense"


densities: Final = partial(numbers, each=Real(above=0.0, most=1.0))
"""Reads shares of the coordinates; raises :class:`~fedcomp.errors.ConfigError`."""


def codec_of(selector: str, sharing: str, scope: str, memory: str, density: float) -> dict[str, Any]:
    """Return the codec's configuration of one cell of the grid."""
    if sharing == "shared" and selector in ("topk", "chunk"):
        # A leader's choice: what one client would send, all send.
        chosen = {"selector": "exact" if selector == "topk" else "chunk", "scope": scope, "memory": memory == "memory"}
        return {"id": "scalecom", "density": density, **chosen}
    plain: dict[str, Any] = {"id": selector, "density": density, "scope": scope}
    if selector in ("randomk", "randomblock"):
        plain["shared"] = sharing == "shared"
    # ScaleCom has its own memory and its own switch; all others get error feedback around them.
    return {"id": "feedback", "codec": plain} if memory == "memory" else plain


def axes(config: Config) -> dict[str, Sequence[Any]]:
    """Return the axes of the grid."""
    return {
        "memory": MEMORY,
        "selector": tuple(SELECTORS),
        "sharing": SHARING,
        "scope": SCOPES,
        "density": densities(str(config.settings["densities"])),
    }


def _task(config: Config) -> Task:
    from fedcomp.tasks import get_task

    options = {name: str(config.settings[f"task.{name}"]) for name in ("hidden", "partition")}
    return get_task(TASK, **options)


def train(*, seed: int, config: Config, **scheme: Any) -> dict[str, Any]:
    """Train one cell of the grid; without a scheme, dense."""
    from fedcomp.experiments.central import Plan, measured

    training = {"lr": config.settings["lr"], "batch_size": config.settings["batch_size"], "max_steps": 1}
    every = max(1, config.rounds // 10)
    plan = Plan(_task(config), config.clients, config.rounds, seed, training, every)
    return measured(plan, codec_of(**scheme) if scheme else {"id": "identity"})


@dataclass(frozen=True)
class Place:
    """One cell of the grid with all its seeds: its place on the axes, and means over the seeds."""

    memory: str
    selector: str
    sharing: str
    scope: str
    density: float
    runs: Records

    @property
    def axes(self) -> str:
        """Everything but memory and density, in words."""
        return f"{SELECTORS[self.selector]}, {self.sharing}, {self.scope}"

    @property
    def line(self) -> str:
        """The line of a plot it is on."""
        return f"{SELECTORS[self.selector]}, {self.sharing}"

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the seeds."""
        return mean(self.runs.each(name))


def study(found: Found) -> Studied:
    """Train every cell of the grid and compare it with dense averaging."""
    config = found.config
    grid, seeds = axes(config), repetitions(config)
    dense = found.sweep(train, {"seed": seeds}, DENSE, config=config)
    records = found.sweep(train, {**grid, "seed": seeds}, config=config)
    known = {key: Place(**dict(zip(grid, key, strict=True)), runs=runs) for key, runs in records.groups(*grid).items()}
    places = list(known.values())
    loss, claimed = mean(dense.each("loss")), _claimed(grid["density"])

    def times(name: str) -> Callable[[Place], float]:
        return lambda place: round(mean(dense.each(name)) / place.mean(name), 1)

    columns: dict[str, Any] = {
        "scheme": "axes",
        "memory": "memory",
        "density": lambda p: f"{p.density:g}",
        "train loss": lambda p: p.mean("loss"),
        "±": lambda p: spread(p.runs.each("loss")) if len(p.runs) > 1 else None,
        "loss / dense": lambda p: round(p.mean("loss") / loss, 3),
        "accuracy, %": lambda p: round(100 * p.mean("accuracy"), 2),
        "uplink ratio": times("uplink"),
        "downlink ratio": times("downlink"),
        "sent": lambda p: round(p.mean("kept")),
        "union": lambda p: round(p.mean("union")),
    }
    shown = [place for place in places if place.memory == "memory" and place.scope == "layer"]
    plotted: dict[str, Any] = {
        "x_label": "uplink, all clients",
        "y_label": "train loss",
        "log_x": True,
        "log_y": True,
        "x_bytes": True,
        "caption": "With memory, chosen per layer.",
    }
    # Dense averaging as a place of its own, so that one function draws all lines.
    beside = [Place("memory", "", "", "layer", 1.0, dense)]

    def line(place: Place) -> str:
        return place.line if place.selector else DENSE

    trained = [*beside, *(place for place in shown if place.density == claimed)]
    top = min(_gain(known, "topk", scope, claimed) for scope in SCOPES)
    # Each shared cell beside the individual one that differs in nothing else.
    pairs = [
        (p, known[p.memory, p.selector, "individual", p.scope, p.density]) for p in places if p.sharing == "shared"
    ]
    union = min(run.union / run.kept for _, p in pairs if p.density == claimed for run in p.runs)
    downlink = min(apart.mean("downlink") / together.mean("downlink") for together, apart in pairs)
    # The most of all rounds, not a mean: a single wrong support would show.
    most = max(run.build_up for p, _ in pairs for run in p.runs)
    without = "train loss without memory over with it, least"
    return Studied(
        {
            ("top-k", without): top,
            ("random-block per layer, as published", without): _gain(known, "randomblock", "layer", claimed),
            ("random-block over the whole model", without): _gain(known, "randomblock", "global", claimed),
            ("shared", "coordinates that change over those one client sent, most"): most,
            ("individual", "coordinates that change over those one client sent, least"): union,
            ("individual", "downlink bytes over shared, least of all pairs"): downlink,
        },
        tables=[
            table(
                "The whole grid",
                columns,
                places,
                f"Means over seeds; ± is half the range. Dense averaging: loss {loss:.4f}. Ratios compare real bytes "
                "of frames with dense, the downlink being what tells every client the mean: its values alone where all "
                "clients know the support, else values and the union of all supports. Sent: weights per client and "
                "round; union: weights that change per round.",
            )
        ],
        figures=[
            _heat(places, loss),
            curves(
                f"Loss during training, density {claimed:g}",
                trained,
                lambda p: over_seeds(p.runs, 2),
                lambda p: over_seeds(p.runs, 1),
                line,
                **plotted,
            ),
            curves(
                "Loss at the end, one point per density",
                [*beside, *shown],
                lambda p: p.mean("uplink"),
                lambda p: p.mean("loss"),
                line,
                **plotted,
            ),
        ],
        tasks=[_task(config).record()],
    )


def _heat(places: Sequence[Place], dense: float) -> HeatMap:
    columns = list(dict.fromkeys((place.memory, place.density) for place in places))
    rows = list(dict.fromkeys(place.axes for place in places))
    losses = {(place.axes, place.memory, place.density): place.mean("loss") / dense for place in places}
    return HeatMap(
        "Train loss over dense",
        [f"{density:g}, {memory}" for memory, density in columns],
        rows,
        [[_rounded(losses[row, memory, density]) for memory, density in columns] for row in rows],
        "scheme, coordinates, ranked per",
        log=True,
        caption="1 is what dense averaging reaches in the same number of rounds.",
    )


def _rounded(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def _claimed(densities: Collection[float]) -> float:
    """Return the density the claims are about: the one nearest to one per cent."""
    # In logarithms, as densities are chosen.
    return min(densities, key=lambda density: abs(math.log(density / 0.01)))


def _gain(known: Mapping[Any, Place], selector: str, scope: str, density: float) -> float:
    """Return train loss without memory over that with it, the least of all seeds, shared and individual."""
    pairs = [[known[memory, selector, sharing, scope, density].runs for memory in MEMORY] for sharing in SHARING]
    # Seed by seed, and the least: a mean could hide a seed on which memory did nothing.
    return min(off.loss / on.loss for kept, lost in pairs for on, off in zip(kept, lost, strict=True))
