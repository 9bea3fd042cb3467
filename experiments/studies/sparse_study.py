"""Which coordinates are sent, chosen where and from what, and whether the rest is remembered: the whole grid."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
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


def study(found: Found) -> Studied:
    """Train every cell of the grid and compare it with dense averaging."""
    config = found.config
    grid, seeds = axes(config), repetitions(config)
    dense = found.sweep(train, {"seed": seeds}, DENSE, config=config)
    known: dict[Any, Records] = found.sweep(train, {**grid, "seed": seeds}, config=config).groups(*grid)
    places, loss, claimed = list(known.values()), mean(dense.each("loss")), _claimed(grid["density"])

    def over(name: str, of: Records) -> float:
        return mean(dense.each(name)) / mean(of.each(name))

    columns: dict[str, Any] = {
        "scheme": lambda runs: f"{_line(runs)}, {runs[0].scope}",
        "memory": lambda runs: runs[0].memory,
        "density": lambda runs: f"{runs[0].density:g}",
        "train loss": lambda runs: mean(runs.each("loss")),
        "loss / dense": lambda runs: round(mean(runs.each("loss")) / loss, 3),
        "accuracy, %": lambda runs: round(100 * mean(runs.each("accuracy")), 2),
        "uplink ratio": lambda runs: round(over("uplink", runs), 1),
        "downlink ratio": lambda runs: round(over("downlink", runs), 1),
    }
    drawn = [dense, *(known[key] for key in known if (key[0], *key[3:]) == ("memory", "layer", claimed))]
    # Each shared cell beside the individual one that differs in nothing else.
    pairs = [(runs, known[(*key[:2], "individual", *key[3:])]) for key, runs in known.items() if key[2] == "shared"]
    without = "train loss without memory over with it, least"
    return Studied(
        {
            ("top-k", without): min(_gain(known, "topk", scope, claimed) for scope in SCOPES),
            ("random-block per layer, as published", without): _gain(known, "randomblock", "layer", claimed),
            ("random-block over the whole model", without): _gain(known, "randomblock", "global", claimed),
            # The most of all rounds, not a mean: a single wrong support would show.
            ("shared", "coordinates that change over those one client sent, most"): max(
                run.build_up for runs, _ in pairs for run in runs
            ),
            ("individual", "coordinates that change over those one client sent, least"): min(
                run.union / run.kept for _, runs in pairs for run in runs.where(density=claimed)
            ),
            ("individual", "downlink bytes over shared, least of all pairs"): min(
                mean(apart.each("downlink")) / mean(together.each("downlink")) for together, apart in pairs
            ),
        },
        tables=[
            table(
                "The whole grid",
                columns,
                places,
                f"Means over seeds. Dense averaging: loss {loss:.4f}. Ratios compare real bytes of frames with dense, "
                "the downlink being what tells every client the mean: its values alone where all clients know the "
                "support, else values and the union of all supports.",
            )
        ],
        figures=[
            curves(
                f"Loss during training, density {claimed:g}",
                drawn,
                lambda runs: over_seeds(runs, 2),
                lambda runs: over_seeds(runs, 1),
                lambda runs: DENSE if runs is dense else _line(runs),
                x_label="uplink, all clients",
                y_label="train loss",
                log_x=True,
                log_y=True,
                x_bytes=True,
                caption="With memory, chosen per layer.",
            )
        ],
        tasks=[_task(config).record()],
    )


def _line(runs: Records) -> str:
    return f"{SELECTORS[runs[0].selector]}, {runs[0].sharing}"


def _claimed(densities: Collection[float]) -> float:
    """Return the density the claims are about: the one nearest to one per cent."""
    # In logarithms, as densities are chosen.
    return min(densities, key=lambda density: abs(math.log(density / 0.01)))


def _gain(known: Mapping[Any, Records], selector: str, scope: str, density: float) -> float:
    """Return train loss without memory over that with it, the least of all seeds, shared and individual."""
    pairs = [[known[memory, selector, sharing, scope, density] for memory in MEMORY] for sharing in SHARING]
    # Seed by seed, and the least: a mean could hide a seed on which memory did nothing.
    return min(off.loss / on.loss for kept, lost in pairs for on, off in zip(kept, lost, strict=True))
