"""Consensus step sizes: how to find one that converges, and how to detect divergence early.

The consensus step size gamma is the one delicate number of methods that compress: too small is slow, too large
diverges, and where the border lies depends on compressor, graph and data. There are rules for some methods, in their
modules (Sparse-Push's ``gamma="auto"``, the recipe of COLD), a proof with a large margin (:func:`safe_gamma`), and
trial (:func:`tune_gamma`). PowerGossip and whole models need none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

import numpy as np

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.compressor import Compressor
from fedcomp.gossip.errors import Diverged, Saturated
from fedcomp.stateful import Stateful

if TYPE_CHECKING:
    from fedcomp.gossip.topology import Topology

ADVICE: Final = (
    "Halve gamma until the run settles (fedcomp.gossip.tuning.tune_gamma). Lower the learning rate only where plain "
    "descent does not bear it, and gamma with it: COLD and LEAD need a smaller gamma at a smaller step"
)

_BLOCKS: Final = 5
"""Number of parts of a window whose medians must all grow, since single iterations of stochastic gradients
fluctuate."""
_STEADY: Final = 1.02
"""Factor by which each must grow; noise around a plateau does not grow five times in a row."""
_GROWTH: Final = 3.0
"""A window that grew all along and ends at this many times the largest level of the first one ends the run."""
_CEILING: Final = 100.0
"""So does a level this many times that one, however slowly it came about."""
_FLOOR: Final = 1e-6
"""Levels up to this do not count: without compression, or where a method has converged, there is nothing but rounding,
which grows with the model."""
_APART: Final = 1e3
"""A node is ignored if its innovation is this many times that of most nodes. Honest nodes with non-IID data stay within
a factor of 3 of the median (measured with three digits per node)."""


class Observer(Protocol):
    """What gets the nodes' figures after every iteration; :class:`DivergenceWatch` is one."""

    def __call__(self, iteration: int, facts: Mapping[int, Mapping[str, float]]) -> Mapping[int, str] | None:
        """Take note; return nodes that are not believed, with the reason, for the report. Raises
        :class:`~fedcomp.gossip.errors.Diverged` when the run has to end."""
        ...


class DivergenceWatch(Stateful):
    """Ends a run whose iterates grow instead of settling. Called once per iteration with every node's figures.

    What is watched is ``"innovation"``, the norm of what a message did not carry: in a run that works it rises in the
    first iterations and stays or falls; when gossip is unstable it grows without end. Judged is the median over the
    nodes, against the level of the run's own first ``window`` iterations: with unlike data single nodes' innovations
    double and fall again in healthy runs, and so does the median once it is far below where it was.

    A node whose figures are not finite, negative, or ``1e3`` times those of most nodes is left out and named; so is a
    minority whose innovations left a given scale. No single node ends a run of several: more than half of them do.

    Parameters
    ----------
    window : int
        Iterations over which growth is judged; judged are those after the first ``2 * window``.

    Examples
    --------
    >>> watch = DivergenceWatch(window=10)
    >>> for k in range(100):
    ...     grown = 1.2 ** max(0, k - 50)
    ...     watch(k, {0: {"innovation": 1.0}, 1: {"innovation": grown}, 2: {"innovation": 0.9 * grown}})
    Traceback (most recent call last):
    ...
    fedcomp.gossip.errors.Diverged: the innovation of most of 3 nodes grew from 1 to 3... within 10 iterations, up ...
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_latest": dict[int, tuple[int, dict[str, float]]],
        "_recent": list[float],
        "_seen": int,
        "_early": float,
        "_named": set[tuple[int, str]],
    }

    def __init__(self, window: int = 50) -> None:
        if window < _BLOCKS:
            raise ConfigError(f"window={window!r} is not valid: at least {_BLOCKS} iterations")
        self.window = window
        self._latest: dict[int, tuple[int, Mapping[str, float]]] = {}
        self._recent: list[float] = []
        self._seen = 0
        self._early = 0.0
        self._named: set[tuple[int, str]] = set()

    def identity(self) -> dict[str, int]:
        """Return the window, which the levels seen so far are of."""
        return {"window": self.window}

    def __call__(self, iteration: int, facts: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
        """Take note of the nodes' figures of ``iteration``.

        Returns
        -------
        dict of int to str
            Nodes that are left out of the judgement, and why; every node once for each reason.

        Raises
        ------
        Diverged
            When the innovation of most nodes grows, or figures of most nodes are not finite.
        Saturated
            When most nodes' innovations left the range of a quantiser whose scale is given in advance.
        """
        now = {node: (iteration, figures) for node, figures in facts.items()}
        # A silent node counts for another ``window`` iterations: figures of asynchronous runs arrive late.
        kept = {node: known for node, known in self._latest.items() if known[0] > iteration - self.window}
        self._latest = {**kept, **now}
        if 2 * len(facts) < len(self._latest):
            return {}  # Figures of asynchronous runs arrive late: what comes alone is not judged alone.
        left_out = self._saturated(iteration) | self._broken(iteration)
        innovations = {
            node: figures["innovation"]
            for node, (_, figures) in sorted(self._latest.items())
            if "innovation" in figures and node not in left_out
        }
        if innovations:
            # The lower median: of two nodes it is the smaller figure, so that one of them alone ends no run.
            level = median_low(innovations.values())
            # At least the floor: near rounding any two nodes may be a thousand times apart.
            far = _APART * max(level, _FLOOR)
            left_out |= {
                node: (
                    "apart",
                    f"its innovation is {value:.3g} in iteration {iteration}, that of most nodes {level:.3g}",
                )
                for node, value in innovations.items()
                if value > far
            }
            self._judge(iteration, level, len(innovations))
        new = {node: text for node, (kind, text) in left_out.items() if (node, kind) not in self._named}
        self._named |= {(node, left_out[node][0]) for node in new}
        return new

    def _broken(self, iteration: int) -> dict[int, tuple[str, str]]:
        """Return the nodes with impossible figures, and these figures."""
        found = {}
        for node, (_, figures) in sorted(self._latest.items()):
            wrong = [f"{name} is {value}" for name, value in figures.items() if not math.isfinite(value)]
            if not wrong and figures.get("innovation", 0.0) < 0.0:
                wrong = [f"innovation is {figures['innovation']}, which is a norm"]
            if wrong:
                found[node] = "figures", f"its {wrong[0]} in iteration {iteration}"
        if 2 * len(found) > len(self._latest):
            node, (_, what) = next(iter(found.items()))
            raise Diverged(f"{len(found)} of {len(self._latest)} nodes: of node {node} {what}. {ADVICE}")
        return found

    def _saturated(self, iteration: int) -> dict[int, tuple[str, str]]:
        """Return the nodes that report an innovation beyond a fixed scale, if they are few."""
        found = [node for node, (_, figures) in sorted(self._latest.items()) if figures.get("saturated", 0.0) > 0.0]
        if 2 * len(found) > len(self._latest):
            # In iteration 0 the scale has not fallen yet.
            cause = "the first scale is too small (raise s0)" if not iteration else "the scale falls faster than errors"
            raise Saturated(
                f"nodes {found[:8]}, {len(found)} of {len(self._latest)}: in iteration {iteration} the innovation had "
                f"left the scale that was given in advance, and from there on errors grow: {cause}. Let the scale fall "
                "more slowly (a larger rho), begin with a larger one, or let it adapt (scale='zoom')"
            )
        text = f"its innovation left the given scale in iteration {iteration}, those of most nodes did not"
        return dict.fromkeys(found, ("saturated", text))

    def _judge(self, iteration: int, level: float, nodes: int) -> None:
        if level <= _FLOOR:
            return
        self._recent = [*self._recent, level][-self.window :]
        self._seen += 1
        if self._seen == self.window:
            # Fixed once: a level that moved along would never see a slow growth.
            self._early = max(self._blocks())
        if self._seen < 2 * self.window:
            return
        blocks = self._blocks()
        if blocks[-1] > _CEILING * self._early:
            raise Diverged(
                f"the innovation of most of {nodes} nodes is {blocks[-1]:.3g} in iteration {iteration}; it was at most "
                f"{self._early:.3g} in the first {self.window}. {ADVICE}"
            )
        grew = all(after > _STEADY * before for before, after in itertools.pairwise(blocks))
        if grew and blocks[-1] > _GROWTH * self._early:
            raise Diverged(
                f"the innovation of most of {nodes} nodes grew from {blocks[0]:.3g} to {blocks[-1]:.3g} within "
                f"{self.window} iterations, up to iteration {iteration}; in the first {self.window} it was at most "
                f"{self._early:.3g}. {ADVICE}"
            )

    def _blocks(self) -> list[float]:
        return [float(np.median(block)) for block in np.array_split(np.array(self._recent), _BLOCKS)]


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
        Runs a few hundred iterations of the algorithm on the real graph and data, with a :class:`DivergenceWatch`.
        It fails by :class:`Diverged` or :class:`~fedcomp.errors.NonFiniteUpdate`, or by returning NaN or infinity. A
        number it returns is a loss, the less the better; after anything else there is nothing to compare, and the first
        gamma that works is taken.
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
    # Only these: any other error is a mistake in the pilot, and no gamma would mend it.
    except (Diverged, NonFiniteUpdate) as error:
        return Trial(gamma, None, f"{type(error).__name__}: {error}")
    if isinstance(outcome, int | float | np.number) and not np.isfinite(outcome):
        return Trial(gamma, outcome, f"the pilot returned {outcome}")
    return Trial(gamma, outcome)


def _loss(trial: Trial[Outcome]) -> float:
    """Return a pilot's loss; NaN if the result is not a number."""
    # A bool is an int to Python, but True is no loss.
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
        raise ConfigError(f"{compressor!r} is not a contraction of {size} elements: the proof does not cover it")
    if topology.time_varying or topology.directed:
        raise ConfigError(f"{topology!r} varies or is directed: the proof does not cover it")
    spectrum = np.sort(np.linalg.eigvalsh(topology.mixing_matrix(0, symmetric=True)))
    # The last eigenvalue is 1, that of the constant vector: the gap is to the next in modulus, from either end.
    rho = 1.0 - max(abs(float(spectrum[0])), abs(float(spectrum[-2])))
    if not rho > 1e-12:
        raise ConfigError(f"{topology!r} has no spectral gap: it is not connected")
    # The largest eigenvalue of I - W belongs to the smallest of W.
    beta = 1.0 - float(spectrum[0])
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
