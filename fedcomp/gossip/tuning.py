"""Consensus step sizes: how to find one that works, and how to see in time that one does not.

The consensus step size gamma is the one delicate number of methods that compress: too small is slow, too large
diverges, and where the border lies depends on compressor, graph and data. There are rules for some methods, which stand
beside them (Sparse-Push's ``gamma="auto"``, the recipe of COLD), a proof with a large margin (:func:`safe_gamma`), and
trial (:func:`tune_gamma`). PowerGossip and whole models need none.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.compressors import Compressor
from fedcomp.gossip.errors import Diverged, Saturated

if TYPE_CHECKING:
    from fedcomp.gossip.topology import Topology

ADVICE: Final = "Halve gamma first, the learning rate second (fedcomp.gossip.tuning.tune_gamma does the first)"

_BLOCKS: Final = 5
"""Parts of a window whose means must all grow: single iterations of stochastic gradients go up and down."""
_STEADY: Final = 1.02
"""By how much each must: noise around a plateau does not grow five times in a row."""


class Watch:
    """Ends a run whose iterates grow instead of settling. Called once per iteration with every node's figures.

    What is watched is ``"innovation"``, the norm of what a letter did not carry: in a run that works it rises in the
    first iterations and stays or falls, and when gossip is unstable it grows by a factor per iteration.

    Parameters
    ----------
    window : int
        Iterations over which growth is judged; the first ``window`` ones of a node are not.
    growth : float
        A window at whose end the innovation is this many times the one at its beginning, and grew all along, ends the
        run.
    ceiling : float
        So does an innovation this many times the largest one of a node's first ``2 * window`` iterations: growth too
        slow to show in one window.
    floor : float
        Innovations up to this are taken for rounding, which grows with the model: without compression, or where a
        method has converged, there is nothing else.

    Examples
    --------
    >>> watch = Watch(window=10)
    >>> for k in range(100):
    ...     watch(k, {0: {"innovation": 1.0}, 1: {"innovation": 1.2 ** max(0, k - 50)}})
    Traceback (most recent call last):
    ...
    fedcomp.gossip.errors.Diverged: node 1: the innovation grew from 1 to 3.28 within 10 iterations, up to iteration ...
    """

    def __init__(self, window: int = 50, growth: float = 2.0, ceiling: float = 100.0, floor: float = 1e-6) -> None:
        if window < _BLOCKS:
            raise ConfigError(f"window={window!r} is not valid: at least {_BLOCKS} iterations")
        if not growth > 1.0 or not ceiling > 1.0:
            raise ConfigError(f"growth={growth!r} and ceiling={ceiling!r} must be above 1")
        if not 0.0 <= floor < math.inf:
            raise ConfigError(f"floor={floor!r} is not valid: a norm, at least 0")
        self.window, self.growth, self.ceiling, self.floor = window, growth, ceiling, floor
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._seen: dict[int, int] = defaultdict(int)
        self._early: dict[int, float] = defaultdict(lambda: floor)

    def __call__(self, iteration: int, facts: Mapping[int, Mapping[str, float]]) -> None:
        """Take note of what the nodes said of ``iteration``.

        Raises
        ------
        Diverged
            When a figure is not finite or the innovation grows.
        Saturated
            When an innovation left the range of a quantiser whose scale is given in advance.
        """
        for node in sorted(facts):
            figures = facts[node]
            for name, value in figures.items():
                if not math.isfinite(value):
                    raise Diverged(f"node {node}: {name} is {value} in iteration {iteration}. {ADVICE}")
            if figures.get("saturated", 0.0) > 0.0:
                raise Saturated(
                    f"node {node}: in iteration {iteration} the innovation left the scale that was given in advance: "
                    "from here on the error grows. Let the scale fall more slowly (a larger rho), begin with a "
                    "larger one, or let it adapt (scale='zoom')"
                )
            if "innovation" in figures:
                self._judge(node, iteration, figures["innovation"])

    def _judge(self, node: int, iteration: int, innovation: float) -> None:
        recent = self._recent[node]
        recent.append(innovation)
        self._seen[node] += 1
        seen = self._seen[node]
        if seen <= 2 * self.window:
            self._early[node] = max(self._early[node], innovation)
        elif innovation > self.ceiling * self._early[node] > 0.0:
            raise Diverged(
                f"node {node}: the innovation is {innovation:.3g} in iteration {iteration}, and was at most "
                f"{self._early[node]:.3g} in the first {2 * self.window}. {ADVICE}"
            )
        if seen < 2 * self.window:
            return
        blocks = [float(np.mean(block)) for block in np.array_split(np.array(recent), _BLOCKS)]
        grew = all(after > _STEADY * before for before, after in itertools.pairwise(blocks))
        if grew and blocks[-1] > max(self.floor, self.growth * blocks[0]):
            raise Diverged(
                f"node {node}: the innovation grew from {blocks[0]:.3g} to {blocks[-1]:.3g} within {self.window} "
                f"iterations, up to iteration {iteration}. {ADVICE}"
            )


Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Trial(Generic[Outcome]):
    """One pilot run.

    Attributes
    ----------
    gamma : float
    outcome : what the pilot returned, None when it failed
    failure : str
        Why it does not count; empty when it does.
    """

    gamma: float
    outcome: Outcome | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tuned(Generic[Outcome]):
    """What :func:`tune_gamma` found.

    Attributes
    ----------
    gamma : float
    algorithm : Algorithm
        ``make(gamma)``.
    outcome : what its pilot returned
    trials : tuple of Trial
        All pilots in their order.
    """

    gamma: float
    algorithm: Algorithm
    outcome: Outcome | None
    trials: tuple[Trial[Outcome], ...]


def tune_gamma(
    make: Callable[[float], Algorithm],
    pilot: Callable[[Algorithm], Outcome],
    *,
    start: float = 1.0,
    least: float = 1e-4,
) -> Tuned[Outcome]:
    """Halve gamma until a pilot run neither diverges nor grows, then for as long as it gets better.

    Near the border of stability a run need not diverge to be bad, and far below it is slow.

    Parameters
    ----------
    make : callable
        From gamma to the algorithm, everything else as it will be used.
    pilot : callable
        Runs a few hundred iterations of the algorithm on the real graph and data, with a :class:`Watch`. It fails by
        :class:`Diverged` or :class:`~fedcomp.errors.NonFiniteUpdate`, or by returning NaN or infinity. A number it
        returns is a loss, the less the better; after anything else there is nothing to compare, and the first gamma
        that works is taken.
    start, least : float
        First and smallest gamma tried.

    Raises
    ------
    Diverged
        When no gamma down to ``least`` works; the message says what each trial failed of.
    """
    if not 0.0 < least <= start <= 1.0:
        raise ConfigError(f"start={start!r} and least={least!r} are not valid: 0 < least <= start <= 1")
    trials: list[Trial[Outcome]] = []
    best: Trial[Outcome] | None = None
    gamma = start
    while gamma >= least:
        trial = _try(make, pilot, gamma)
        trials.append(trial)
        if best is not None and (trial.failure or not _loss(trial) < _loss(best)):
            break
        if not trial.failure:
            best = trial
            if math.isnan(_loss(trial)):
                break
        gamma /= 2.0
    if best is None:
        raise Diverged(
            f"no gamma from {start:g} down to {least:g} works; reduce the learning rate. "
            + "; ".join(f"{trial.gamma:g}: {trial.failure}" for trial in trials)
        )
    return Tuned(best.gamma, make(best.gamma), best.outcome, tuple(trials))


def _try(make: Callable[[float], Algorithm], pilot: Callable[[Algorithm], Outcome], gamma: float) -> Trial[Outcome]:
    algorithm = make(gamma)
    try:
        outcome = pilot(algorithm)
    except (Diverged, NonFiniteUpdate) as error:
        return Trial(gamma, None, f"{type(error).__name__}: {error}")
    if isinstance(outcome, int | float | np.number) and not np.isfinite(outcome):
        return Trial(gamma, outcome, f"the pilot returned {outcome}")
    return Trial(gamma, outcome)


def _loss(trial: Trial[Outcome]) -> float:
    """Return a pilot's loss, NaN when what it returned is no number."""
    number = isinstance(trial.outcome, int | float | np.number) and not isinstance(trial.outcome, bool)
    return float(trial.outcome) if number else math.nan  # type: ignore[arg-type]


def safe_gamma(topology: Topology, compressor: Compressor, size: int) -> float:
    """Return the gamma with which CHOCO's gossip is proved to converge: some hundred times smaller than what works.

    ``ρ² δ / (16 ρ + ρ² + 4 β² + 2 ρ β² - 8 ρ δ)`` with the spectral gap ρ, ``β = ‖I - W‖`` and the contraction δ of
    the compressor (Koloskova et al. 2019, theorem 2; recalled).

    Parameters
    ----------
    topology : Topology
        Static and undirected.
    compressor : Compressor
    size : int
        Elements it compresses.

    Raises
    ------
    ConfigError
        For a graph or a compressor the proof does not cover.
    """
    delta = compressor.contraction(size)
    if delta is None or not delta > 0.0:
        raise ConfigError(f"{compressor!r} is no contraction of {size} elements: the proof does not cover it")
    if topology.time_varying or topology.directed:
        raise ConfigError(f"{topology!r} varies or is directed: the proof does not cover it")
    spectrum = np.sort(np.linalg.eigvalsh(topology.mixing_matrix(0, symmetric=True)))
    rho = 1.0 - max(abs(float(spectrum[0])), abs(float(spectrum[-2])))
    if not rho > 1e-12:
        raise ConfigError(f"{topology!r} has no spectral gap: it is not connected")
    beta = 1.0 - float(spectrum[0])
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
