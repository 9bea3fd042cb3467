"""Sparse communication: the whole grid of selectors, shared or individual choice, scope, memory and density."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, Final

from fedcomp.experiments.experiment import Rows, Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Records, curves, over_seeds
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.tables import Found
from fedcomp.rules import Real
from fedcomp.strategies.parts import TASK_PREFIX, below

SELECTORS: Final = {"top-k": "topk", "random-k": "randomk", "random-block": "randomblock", "chunk": "chunk"}
"""Labels of codecs, and their ids."""

DENSE: Final = "dense"
densities: Final = partial(numbers, each=Real(above=0.0, most=1.0))
"""Reads densities; raises :class:`~fedcomp.errors.ConfigError`."""


def grid(config: Config) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of the grid: memory, selector, shared or individual choice, scope, density."""
    shares = densities(str(config.settings["densities"]))
    return product(("memory", "none"), SELECTORS, ("shared", "individual"), ("layer", "global"), shares)


def label(memory: str, selector: str, sharing: str, scope: str, density: float) -> str:
    """Return the label of a cell."""
    return f"{selector}, {sharing}, {scope}, {'memory' if memory == 'memory' else 'no memory'}, {density:g}"


def row(memory: str, selector: str, sharing: str, scope: str, density: float) -> str:
    """Return the codec of a cell."""
    same, kept = (str(flag).lower() for flag in (sharing == "shared", memory == "memory"))
    given = f"codec.density={density} codec.scope={scope}"
    if sharing == "shared" and selector in ("top-k", "chunk"):
        # A leader's choice: all clients send the coordinates that one client would send. It has its own memory and
        # option.
        selected = "exact" if selector == "top-k" else "chunk"
        return f"codec codec.id=scalecom codec.selector={selected} codec.memory={kept} {given}"
    drawn = f" codec.shared={same}" if selector.startswith("random") else ""
    return f"codec codec.id={SELECTORS[selector]} codec.feedback={kept} {given}{drawn}"


def rows(config: Config) -> Rows:
    """Return dense averaging and every cell of the grid."""
    return {DENSE: "codec codec.id=identity", **{label(*place): row(*place) for place in grid(config)}}


def study(found: Found) -> Studied:
    """Compare cells that differ in one respect."""
    from fedcomp.tasks import get_task

    places: dict[tuple[Any, ...], Records] = {place: found.groups[label(*place)] for place in grid(found.config)}
    # Logarithmic, as densities are chosen.
    claimed = min((place[-1] for place in places), key=lambda density: abs(math.log(density / 0.01)))
    # Each shared cell with the individual cell that is otherwise equal.
    pairs = [(runs, places[(*at[:2], "individual", *at[3:])]) for at, runs in places.items() if at[2] == "shared"]

    def gain(selector: str, scope: str) -> float:
        # The smallest over seeds, because a mean could hide a seed on which memory did nothing.
        memory, none = (
            [run for sharing in ("shared", "individual") for run in places[kept, selector, sharing, scope, claimed]]
            for kept in ("memory", "none")
        )
        return min(lost.loss / kept.loss for kept, lost in zip(memory, none, strict=True))

    without = "train loss without memory over with it, least"
    drawn = {DENSE: found.groups[DENSE]}
    drawn |= {
        f"{at[1]}, {at[2]}": runs for at, runs in places.items() if (at[0], *at[3:]) == ("memory", "layer", claimed)
    }
    return Studied(
        {
            ("top-k", without): min(gain("top-k", scope) for scope in ("layer", "global")),
            ("random-block per layer, as published", without): gain("random-block", "layer"),
            ("random-block over the whole model", without): gain("random-block", "global"),
            # The largest over all rounds, so a single wrong support shows.
            ("shared", "coordinates that change over those one client sent, most"): max(
                run.build_up for runs, _ in pairs for run in runs
            ),
            ("individual", "coordinates that change over those one client sent, least"): min(
                run.union / run.kept
                for at, runs in places.items()
                if at[2:5:2] == ("individual", claimed)
                for run in runs
            ),
            ("individual", "downlink bytes over shared, least of all pairs"): min(
                mean(apart.each("downlink")) / mean(together.each("downlink")) for together, apart in pairs
            ),
        },
        tasks=[get_task("digits", **below(found.config.settings, TASK_PREFIX)).record()],
        figures=[
            curves(
                f"Loss during training, density {claimed:g}",
                drawn.items(),
                lambda line: over_seeds(line[1], 2),
                lambda line: over_seeds(line[1], 1),
                lambda line: line[0],
                x_label="uplink, all clients",
                y_label="train loss",
                log_x=True,
                log_y=True,
                x_bytes=True,
                caption="With memory, chosen per layer.",
            )
        ],
    )
