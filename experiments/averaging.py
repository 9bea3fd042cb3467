"""Averaging without gradients: the convergence of nodes with different vectors to their mean, and the bytes sent.

:func:`average` runs an algorithm as a training would, messages, mailbox and all, only without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteUpdate
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.topology import Topology
from fedcomp.gossip_simulation import SimulationSettings, simulate
from fedcomp.layout import Layout

Real = NDArray[np.float64]

FLOOR: Final = 1e-12
"""Relative errors below it are not fitted: rounding is near."""

GROWN: Final = 1e3
"""A relative error above it is called divergence."""


def fit_line(errors: Sequence[float] | Real, at: Sequence[float] | None = None) -> tuple[float, float]:
    """Fit ``log errors`` by least squares over ``at`` (default: their indices).

    Returns
    -------
    tuple of float
        Factor by which the error changes per step, and the share of the variance that the line explains; NaN with
        fewer than three errors, or where one is not positive and finite.
    """
    values = np.asarray(errors, np.float64)
    if len(values) < 3 or not (np.isfinite(values).all() and (values > 0).all()):
        return math.nan, math.nan
    y, x = np.log(values), np.arange(len(values)) if at is None else np.asarray(at, np.float64)
    # Centred, which makes slope and offset independent of each other.
    x, around = x - x.mean(), y - y.mean()
    slope = float(x @ around / (x @ x))
    rest, total = around - slope * x, float(around @ around)
    return math.exp(slope), 1.0 - float(rest @ rest) / total if total else math.nan


def fit_late(rounds: Sequence[int], errors: Sequence[float], late: float) -> tuple[float, float]:
    """Fit the last share ``late`` of the errors above :data:`FLOOR`, at least three of them: the first rounds remove
    what every graph removes quickly."""
    points = [(k, e) for k, e in zip(rounds, errors, strict=True) if FLOOR < e < math.inf]
    points = points[max(0, len(points) - max(3, math.ceil(late * len(points)))) :]
    return fit_line([e for _, e in points], [k for k, _ in points])


def average(
    config: Mapping[str, Any],
    graph: Topology,
    values: Real,
    rounds: int,
    *,
    layout: Layout,
    seed: int,
    every: int = 20,
    late: float = 0.75,
) -> dict[str, Any]:
    """Average ``values`` (one row per node) by an algorithm; estimates begin at zero, which all nodes know.

    Parameters
    ----------
    config : mapping
        Of the algorithm.
    every : int
        Rounds between two looks at the models.
    late : float
        See :func:`fit_late`.

    Returns
    -------
    dict
        ``rounds`` and ``errors``: ``‖z - mean‖`` over all nodes after so many rounds, relative to what it was before
        the first; ``last`` of them, infinite when the run diverged, of which nothing but the errors is known.
        ``rate`` and ``r2`` of :func:`fit_late`, a rate of 0 where nodes agree in too few rounds for a line. Mean bytes,
        headers included, of a ``message`` and of all that a node has ``sent`` in a round; ``digits`` of the error
        removed per kB of these, by the rate. ``moved``: largest coordinate by which the sum over all nodes has changed;
        ``weights``: the same of push-sum's weights, the ``least`` of which is 1 where there are none. ``biased``:
        error of the numerators x taken for models.

    Raises
    ------
    TopologyError
        When the graph cannot carry the algorithm.
    """
    algorithm = get_algorithm(config)
    graph.check(algorithm)
    mean = values.mean(axis=0)
    first = float(np.linalg.norm(values - mean))
    seen: dict[int, float] = {}

    def look(done: int, models: Mapping[int, Real]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            seen[done] = float(np.linalg.norm(np.stack([models[i] for i in sorted(models)]) - mean)) / first
        # ``not <``: NaN ends the run, too.
        if not seen[done] < GROWN:
            raise Diverged(f"the relative error is {seen[done]:.3g} after {done} rounds")

    # No watcher: without gradients innovations fall by many orders, and ``look`` judges the error itself.
    settings = SimulationSettings(every=every, observe=look, watch=False)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            outcome = simulate(
                algorithm, graph, None, list(values), rounds, layout=layout, seed=seed, settings=settings
            )
    except (Diverged, NonFiniteUpdate):
        unknown = ("rate", "r2", "message", "sent", "digits", "moved", "weights", "least", "biased")
        return {"rounds": [*seen], "errors": [*seen.values()], "last": math.inf, **dict.fromkeys(unknown, math.nan)}
    states = [outcome.states[i] for i in sorted(outcome.states)]
    numerators = np.stack([state["x"] for state in states])
    # One, or one per coordinate; 1 where there are none.
    shares = np.stack([np.atleast_1d(state.get("weights", state.get("w", 1.0))).astype(np.float64) for state in states])
    ks, errors = [*seen], [*seen.values()]
    rate, r2 = fit_late(ks, errors, late)
    if math.isnan(rate) and errors[-1] <= FLOOR:
        rate = 0.0
    sent = outcome.traffic.edge_bytes / (graph.n * rounds)
    return {
        "rounds": ks,
        "errors": errors,
        "last": errors[-1],
        "rate": rate,
        "r2": r2,
        "message": outcome.traffic.edge_bytes / max(1, outcome.traffic.messages),
        "sent": sent,
        "digits": max(0.0, -math.log10(rate) * 1e3 / sent) if rate > 0.0 else math.nan,
        "moved": float(np.abs(numerators.sum(axis=0) - values.sum(axis=0)).max()),
        "weights": float(np.abs(shares.sum(axis=0) - graph.n).max()),
        "least": float(shares.min()),
        "biased": float(np.linalg.norm(numerators - mean)) / first,
    }
