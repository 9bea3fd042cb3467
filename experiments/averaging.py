"""Averaging without gradients: how fast nodes that begin with different vectors come to their mean, and what they sent.

:func:`average` runs an algorithm as a training would, messages, mailbox and all, only without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteUpdate
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import State
from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.topology import Topology
from fedcomp.gossip_simulation import SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.rng import Key

Real = NDArray[np.float64]

FLOOR: Final = 1e-12
"""Relative errors below it are not fitted: rounding is near."""

GROWN: Final = 1e3
"""A relative error above it is called divergence."""


@dataclass(frozen=True)
class Track:
    """How one run came to the mean; JSON-able by :func:`dataclasses.asdict`.

    Attributes
    ----------
    rounds, errors : list
        ``‖z - mean‖`` over all nodes after so many rounds, relative to what it was before the first; the mean is that
        of the vectors the nodes began with.
    rate, r2 : float
        Factor per round and coefficient of determination of the straight line through the logarithms; NaN when there
        are too few points between the first rounds and rounding.
    message : float
        Bytes of a message, header included: what an active directed edge carries in a round, on average.
    sent : float
        Bytes that all messages of a node have in a round, on average.
    moved : float
        Largest coordinate by which the sum over all nodes has changed.
    weights : float
        By how much the sum of push-sum's weights has changed; 0 for algorithms without.
    least, most : float
        Smallest and largest weight at the end; 1 for algorithms without.
    biased : float
        Relative error of the numerators x taken for models, without dividing by the weights.
    """

    rounds: Sequence[int]
    errors: Sequence[float]
    rate: float = math.nan
    r2: float = math.nan
    message: float = math.nan
    sent: float = math.nan
    moved: float = math.nan
    weights: float = math.nan
    least: float = math.nan
    most: float = math.nan
    biased: float = math.nan

    @property
    def final(self) -> float:
        """The last relative error; infinite when the run diverged."""
        return math.inf if self.diverged else self.errors[-1]

    @property
    def diverged(self) -> bool:
        """Whether the run was ended because the error grew; nothing but the errors is known of it."""
        return math.isnan(self.sent)

    @property
    def digits(self) -> float:
        """Decimal digits of the error removed per kB a node sends, by the fitted rate; 0 when it removes none."""
        return max(0.0, -math.log10(self.rate) * 1e3 / self.sent) if self.rate > 0.0 else math.nan

    def joules(self, per_byte: float | None) -> float | None:
        """Return what a digit costs a node, which receives as much as it sends; None where there is no figure."""
        return 1e3 * per_byte / self.digits if per_byte is not None and self.digits > 0.0 else None

    @property
    def spent(self) -> list[float]:
        """Bytes a node has sent at each of ``rounds``."""
        return [k * self.sent for k in self.rounds]


def starts(key: Key, nodes: int, size: int) -> Real:
    """Return standard normal vectors, shape ``(nodes, size)``."""
    return key.generator().standard_normal((nodes, size))


def fitted(rounds: Sequence[int], errors: Sequence[float], *, late: float) -> tuple[float, float]:
    """Return rate per round and R^2 of ``log error`` over rounds.

    Parameters
    ----------
    late : float
        Which share of the points above :data:`FLOOR`, from the end, counts: the first rounds remove what every graph
        removes quickly.
    """
    points = [(k, math.log(e)) for k, e in zip(rounds, errors, strict=True) if FLOOR < e < math.inf]
    # At least three points: a line through two has no residual to judge it by.
    points = points[len(points) - max(3, math.ceil(late * len(points))) :] if len(points) >= 3 else []
    if not points:
        return math.nan, math.nan
    x, y = np.array(points).T
    slope, offset = np.polyfit(x, y, 1)
    rest, total = float(((y - slope * x - offset) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return math.exp(slope), 1.0 - rest / total if total else 1.0


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
) -> Track:
    """Average ``values`` (one row per node) by an algorithm; estimates begin at zero, which all nodes know.

    Parameters
    ----------
    config : mapping
        Of the algorithm.
    every : int
        Rounds between two looks at the models.
    late : float
        See :func:`fitted`.

    Raises
    ------
    TopologyError
        When the graph cannot carry the algorithm.
    """
    algorithm = get_algorithm(config)
    graph.check(algorithm)
    mean = values.mean(axis=0)
    first = float(np.linalg.norm(values - mean))
    seen: list[tuple[int, float]] = []

    def look(done: int, models: Mapping[int, Real]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.linalg.norm(np.stack([models[i] for i in sorted(models)]) - mean)) / first
        seen.append((done, error))
        # ``not <``: NaN ends the run, too.
        if not error < GROWN:
            raise Diverged(f"the relative error is {error:.3g} after {done} rounds")

    try:
        with np.errstate(over="ignore", invalid="ignore"):
            outcome = simulate(
                algorithm,
                graph,
                None,
                list(values),
                rounds,
                layout=layout,
                seed=seed,
                # No watcher: without gradients innovations fall by many orders, and ``look`` judges the error itself.
                settings=SimulationSettings(every=every, observe=look, watch=False),
            )
    except (Diverged, NonFiniteUpdate):
        return Track([k for k, _ in seen], [e for _, e in seen])
    states = [outcome.states[i] for i in sorted(outcome.states)]
    numerators = np.stack([state["x"] for state in states])
    shares = np.stack([_weights(state) for state in states])
    ks, errors = [k for k, _ in seen], [e for _, e in seen]
    rate, r2 = fitted(ks, errors, late=late)
    bytes_, messages = outcome.traffic.edge_bytes, outcome.traffic.messages
    return Track(
        ks,
        errors,
        # At the floor with too few points for a line: it averaged exactly within a few rounds.
        rate=0.0 if math.isnan(rate) and errors[-1] <= FLOOR else rate,
        r2=r2,
        message=bytes_ / max(1, messages),
        sent=bytes_ / (graph.n * rounds),
        moved=float(np.abs(numerators.sum(axis=0) - values.sum(axis=0)).max()),
        weights=float(np.abs(shares.sum(axis=0) - graph.n).max()),
        least=float(shares.min()),
        most=float(shares.max()),
        biased=float(np.linalg.norm(numerators - mean)) / first,
    )


def _weights(state: State) -> Real:
    """Return push-sum's weights: one, or one per coordinate; 1 where there are none."""
    if "weights" in state:
        return np.asarray(state["weights"], np.float64)
    return np.array([float(state.get("w", 1.0))])


def by_matrices(graph: Topology, values: Real, rounds: int, *, symmetric: bool) -> list[float]:
    """Return the relative errors of uncompressed averaging after 0, 1, ... rounds, from the products of matrices."""
    # With weights also where W needs none: they then stay 1, and the division changes nothing.
    mean, x, w = values.mean(axis=0), values, np.ones(graph.n)
    errors = []
    for t in range(rounds + 1):
        errors.append(float(np.linalg.norm(x / w[:, None] - mean)))
        p = graph.mixing_matrix(t, symmetric=symmetric)
        x, w = p @ x, p @ w
    return [error / errors[0] for error in errors]
