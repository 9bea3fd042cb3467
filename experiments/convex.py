"""Smooth convex objectives of nodes, their optimum to machine precision, and an algorithm's convergence to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.averaging import fit_line
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.errors import Diverged, Saturated
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import Count, GossipTraffic
from fedcomp.gossip.vector import GossipPolicy, unflatten
from fedcomp.gossip_simulation import Simulation, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.rng import Key

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.tasks.base import Task
    from fedcomp.tasks.local import LocalObjective

Real = NDArray[Any]

_NEWTON_STEPS: Final = 100

_TOLERANCE: Final = 1e-14
"""Norm of the mean gradient at the optimum, relative to the largest norm of a single one."""

_FITTED: Final = (1e-1, 1e-9)
"""Errors between which a line is fitted."""


@dataclass(frozen=True)
class Convex:
    """Smooth convex objectives of nodes in float64, the optimum of their mean, and the constants of the theory.

    Attributes
    ----------
    objectives : tuple of LocalObjective
        f_i with all examples of a node at once.
    layout : Layout
        Compressed whole, without dense stretches.
    optimum : ndarray, float64, shape (d,)
        Minimises the mean of f_i, all nodes alike.
    smoothness : float
        L: the largest curvature of any f_i at zero, which is the largest anywhere for the logistic loss.
    """

    objectives: tuple[LocalObjective, ...]
    layout: Layout
    optimum: Real
    smoothness: float

    @classmethod
    def of(cls, task: Task, nodes: int) -> Convex:
        """Return the problem of ``task`` split over ``nodes``.

        Raises
        ------
        ConfigError
            When Newton's method finds no minimum: the objective is not smooth, or not strongly convex.
        """
        from fedcomp.tasks.local import LocalObjective

        # All examples in every gradient: a stochastic one would end at a noise floor far above what is measured here.
        objectives = tuple(LocalObjective(task, i, nodes, batch_size=0, dtype="float64") for i in range(nodes))
        layout = Layout.of(objectives[0].start(), GossipPolicy(dense_below=0))
        zero = np.zeros(layout.size)
        # At zero, where a logistic model is least certain and the loss is most curved.
        largest = max(float(np.linalg.eigvalsh(_hessian(f, zero, layout))[-1]) for f in objectives)
        return cls(objectives, layout, optimum(objectives, layout), largest)

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.objectives)

    def gradients(self, z: Real) -> Real:
        """Return every node's gradient at ``z``, shape ``(nodes, d)``."""
        return _gradients(self.objectives, z, self.layout)

    def distance(self, models: Iterable[Real]) -> float:
        """Return the nodes' root mean square distance to the optimum, relative to its norm."""
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges is at an infinite distance
            squares = [np.sum((model - self.optimum) ** 2) for model in models]
            return float(np.sqrt(np.mean(squares)) / np.linalg.norm(self.optimum))


def optimum(objectives: Sequence[LocalObjective], layout: Layout) -> Real:
    """Return the minimiser of the mean of ``objectives`` by Newton's method, float64, shape ``(layout.size,)``.

    Raises
    ------
    ConfigError
        When the norm of the mean gradient does not fall to :data:`_TOLERANCE`.
    """
    z = np.zeros(layout.size)
    for _ in range(_NEWTON_STEPS):
        gradients = _gradients(objectives, z, layout)
        gradient = gradients.sum(axis=0) / len(gradients)
        scale = float(np.linalg.norm(gradients, axis=1).max())
        size = float(np.linalg.norm(gradient))
        # Relative to single gradients, which cancel at the optimum: rounding of their sum is of their size.
        if size <= _TOLERANCE * scale:
            return z
        curvature = np.sum([_hessian(f, z, layout) for f in objectives], axis=0) / len(objectives)
        try:
            step = np.linalg.solve(curvature, gradient)
        except np.linalg.LinAlgError:
            break
        # Halved while the gradient grows: far from the minimum a full Newton step of the logistic loss can overshoot.
        length = 1.0
        while length > 1e-3:
            moved = _gradients(objectives, z - length * step, layout).sum(axis=0)
            if np.linalg.norm(moved) / len(objectives) <= size:
                break
            length /= 2
        z = z - length * step
    raise ConfigError(
        f"Newton's method finds no minimum (gradient {size:.3g}): the objective is not smooth or not strongly convex "
        "enough; use a logistic task with a larger l2"
    )


def fixed_point(
    problem: Convex,
    weights: Real,
    lr: float,
    *,
    gamma: float = 1.0,
    mixes_last: bool = False,
    start: Real | None = None,
) -> Real:
    """Return where D-PSGD, or CHOCO, comes to rest with a constant step, by Newton's method; shape ``(nodes, d)``.

    With ``M = I + gamma (W - I)`` D-PSGD rests at ``X = M X - lr ∇F(X)``, and CHOCO, which mixes last and whose
    estimates have caught up by then, at ``X = M (X - lr ∇F(X))``. Derived; the runs of ``experiments.run cold`` end
    there. Its distance to the optimum falls with the step, in proportion where it is small, and is positive.

    Parameters
    ----------
    weights : ndarray, shape (nodes, nodes)
        W, symmetric.
    mixes_last : bool
        CHOCO; else D-PSGD.
    start : ndarray, shape (nodes, d), optional
        Where Newton's method begins; default: the optimum at every node.

    Raises
    ------
    ConfigError
        When Newton's method does not arrive.
    """
    n, d = problem.nodes, problem.layout.size
    mixing = np.eye(n) + gamma * (weights - np.eye(n))
    outer = mixing if mixes_last else np.eye(n)
    x = np.tile(problem.optimum, (n, 1)) if start is None else start.copy()
    jacobian: Real = np.zeros((0, 0))
    before = 0.0
    for _ in range(_NEWTON_STEPS):
        slopes = np.stack([_gradient(f, z, problem.layout) for f, z in zip(problem.objectives, x, strict=True)])
        rest = x - mixing @ x + lr * outer @ slopes
        size = float(np.linalg.norm(rest))
        if size <= 1e-12 * max(1.0, float(np.linalg.norm(x))):
            return x
        if size > 0.1 * before:  # second derivatives cost most: the last ones do while they do
            curvature = [_hessian(f, z, problem.layout) for f, z in zip(problem.objectives, x, strict=True)]
            # Rows of X one after the other: M mixes whole rows, and only the gradients couple coordinates.
            jacobian = np.kron(np.eye(n) - mixing, np.eye(d))
            for i, j in np.argwhere(outer):
                jacobian[i * d : (i + 1) * d, j * d : (j + 1) * d] += lr * outer[i, j] * curvature[j]
        before = size
        x = x - np.linalg.solve(jacobian, rest.reshape(-1)).reshape(n, d)
    raise ConfigError(f"no fixed point after {_NEWTON_STEPS} Newton steps at lr={lr:g}; use a smaller step")


def error_curve(
    problem: Convex,
    algorithm: Algorithm,
    topology: Topology,
    iterations: int,
    *,
    seed: int = 0,
    start: Real | None = None,
) -> ErrorCurve:
    """Run an algorithm on a convex problem with the gradients of all examples, in float64.

    Parameters
    ----------
    start : ndarray, shape (d,), optional
        Where all nodes begin; default zero.
    """
    edges = len(topology.edges())
    runs: list[Simulation] = []
    seen: list[tuple[float, int, int]] = []

    def look(_: int, models: Mapping[int, Real]) -> None:
        count = runs[0].traffic.edge["train"] if runs else Count()
        seen.append((problem.distance(models.values()), count.bytes, count.bodies))

    invariants: Mapping[str, float] = {}
    stopped, saturated = "", False
    try:
        # Numbers that leave the range are what ends a run that diverges.
        with np.errstate(over="ignore", invalid="ignore"):
            outcome = simulate(
                algorithm,
                topology,
                [FlatObjective(f, problem.layout) for f in problem.objectives],
                np.zeros(problem.layout.size) if start is None else start,
                iterations,
                layout=problem.layout,
                seed=seed,
                settings=SimulationSettings(every=1, observe=look, before=runs.append),
            )
        invariants = algorithm.invariants(outcome.states.values())
    except (Diverged, NonFiniteUpdate) as error:
        stopped, saturated = f"{type(error).__name__}: {error}", isinstance(error, Saturated)
    errors, sent, bodies = (np.array(column) for column in zip(*seen, strict=True))
    traffic = runs[0].traffic if runs else GossipTraffic()
    return ErrorCurve(errors, 8 * sent / edges, 8 * bodies / edges, traffic, invariants, stopped, saturated)


@dataclass(frozen=True)
class ErrorCurve:
    """How a run came to an optimum.

    Attributes
    ----------
    errors : ndarray, float64, shape (iterations + 1,)
        :meth:`Convex.distance` after every iteration, the initial models first.
    bits, payload_bits : ndarray, shape (iterations + 1,)
        Bits per directed edge so far, mean over edges: of whole messages, and of their bodies without headers.
    traffic : GossipTraffic
    invariants : dict of str to float
        What the algorithm conserves over all nodes, after the last iteration.
    stopped : str
        Why the run was ended before its last iteration; empty when it was not.
    saturated : bool
        Whether it was because innovations left a given scale.
    """

    errors: Real
    bits: Real
    payload_bits: Real
    traffic: GossipTraffic
    invariants: Mapping[str, float]
    stopped: str = ""
    saturated: bool = False

    def first(self, tolerance: float = 1e-6) -> int | None:
        """Return the iterations until the error is below ``tolerance`` and stays there; None when it never does."""
        # ``~(<)`` and not ``>=``, so that NaN counts as above.
        above = np.flatnonzero(~(self.errors < tolerance))
        if len(above) and above[-1] == len(self.errors) - 1:
            return None
        return int(above[-1]) + 1 if len(above) else 0

    def fit(self) -> tuple[float, float]:
        """Return factor per iteration and R² of the straight line through the logarithm of the errors between
        :data:`_FITTED`."""
        high, low = _FITTED
        below = np.flatnonzero(self.errors < high)
        done = np.flatnonzero(self.errors < low)
        return fit_line(self.errors[int(below[0]) if len(below) else 0 : int(done[0]) if len(done) else None])


def _hessian(objective: LocalObjective, z: Real, layout: Layout) -> Real:
    arrays = unflatten(z, layout)
    found = objective.hessian(arrays)
    # The Hessian is in the model's order of parameters, the vector in the layout's.
    slices = [np.arange(layout.size)[layout.by_name[name].slice] for name in objective.parameters]
    place = np.concatenate(slices)
    out = np.zeros((layout.size, layout.size))
    out[np.ix_(place, place)] = found
    return out


def _gradients(objectives: Sequence[LocalObjective], z: Real, layout: Layout) -> Real:
    return np.stack([_gradient(f, z, layout) for f in objectives])


def _gradient(objective: LocalObjective, z: Real, layout: Layout) -> Real:
    # Any key will do: with all examples in a batch there is nothing to draw.
    return FlatObjective(objective, layout).gradient(z, Key(0, "optimum"))
