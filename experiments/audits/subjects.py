"""What is audited: a private system as an attacker drives it, and the mechanisms themselves.

A subject runs the code path that a training uses, as often as it is asked to, and says what was claimed for it: the
standard deviation of every coordinate of its output, what one round costs by the mechanism's own event, and the epsilon
that the ledger gives. The tiers (:mod:`fedcomp.experiments.audits.tiers`) compare both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.flower.logs import quiet
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Adjacency
from fedcomp.privacy.gaussian import gaussian_mu
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import Mechanism, PrivateSum
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key

Floats = NDArray[np.float64]
Data = Sequence[tuple[int, Any]]
"""A data set: who contributes what."""

Changed = TypeVar("Changed", bound=Mechanism)

DELTA: Final = 1e-5
POPULATION: Final = 1000


def new_ledger(adjacency: Adjacency) -> PrivacyLedger:
    """Return an empty ledger in memory, with everybody taking part every time: the audited rounds hide nobody."""
    return PrivacyLedger(delta=DELTA, population=POPULATION, adjacency=adjacency, sampling=Sampling("everyone"))


@dataclass(frozen=True)
class Worlds:
    """Neighbouring data sets.

    Attributes
    ----------
    absent, present : data sets
        As far apart as the author of the audit could bring them.
    pairs : sequence of pairs of data sets
        For the search of tier A; empty to search nothing more.
    """

    absent: Data
    present: Data
    pairs: Sequence[tuple[Data, Data]] = ()


class Subject(ABC):
    """A private system under audit: runs of it, one after the other, each of several rounds.

    Parameters
    ----------
    name : str
    adjacency : str
    worlds : Worlds
    mechanism : Mechanism
        Its standard deviation is what is claimed of every output, its step is the outputs' public grid.
    parts : dict of str to slice
        Stretches of the output whose noise is tested apart: tensors.
    width : int
        Outputs of one round.

    Attributes
    ----------
    scale : ndarray of float, (width,)
        Claimed standard deviation of every output.
    absent, present, pairs : data sets
        Those of the worlds.
    gridded : slice
        Which of the outputs lie on the grid.
    """

    gridded: slice = slice(None)

    def __init__(
        self, name: str, adjacency: Adjacency, worlds: Worlds, mechanism: Mechanism, parts: dict[str, slice], width: int
    ) -> None:
        self.name, self.adjacency, self.parts = name, adjacency, parts
        self.absent, self.present, self.pairs = worlds.absent, worlds.present, worlds.pairs
        self.step, self.scale = mechanism.step, np.full(width, mechanism.sigma)

    @abstractmethod
    def start(self, noisy: bool, seed: int, trial: int) -> Any:
        """Return a new run, whose noise, if it is ``noisy``, is named by ``seed`` and ``trial``; ``privacy`` is its
        ledger."""

    @abstractmethod
    def play(self, run: Any, nodes: Any, data: Data, number: int) -> Floats:
        """Return what round ``number``, from 1, releases, shape (width,)."""

    def nodes(self, data: Data) -> AbstractContextManager[Any]:
        """Return what :meth:`play` meets ``data`` on, such as a grid; None unless a subject has one."""
        return nullcontext()

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return what ``runs`` independent runs of ``rounds`` rounds release, shape (runs, rounds, width)."""
        out = np.empty((runs, rounds, len(self.scale)))
        with quiet(), self.nodes(data) as nodes:
            for trial in range(runs):
                # A new run each time: memory, ledger and clip norms of one must not reach the next.
                run = self.start(noisy, seed, trial)
                for place in range(rounds):
                    out[trial, place] = self.play(run, nodes, data, place + 1)
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run of ``rounds`` rounds over the world with the canary."""
        # With noise: without any there is no event to account for.
        run = self.start(True, 0, 0)
        with quiet(), self.nodes(self.present) as nodes:
            for place in range(rounds):
                self.play(run, nodes, self.present, place + 1)
        ledger: PrivacyLedger = run.privacy
        return ledger

    def release_mu(self) -> float:
        """Return the mu that the events of one round claim: sqrt(sum of releases / z^2)."""
        return math.sqrt(math.fsum(e.releases / e.noise_multiplier**2 for e in self.ledger(1).events))

    def run_mu(self, rounds: int) -> float:
        """Return the mu that the ledger's epsilon claims for a run."""
        # By way of the ledger's epsilon: what a user is told is what has to stand.
        return gaussian_mu(self.ledger(rounds).epsilon(), DELTA)


def numbered(seed: int, trial: int) -> int:
    """Return one seed for a trial of a seeded series."""
    # A prime larger than any number of trials, so that no two pairs give one seed.
    return seed * 1_000_003 + trial


def seeded(key: Key) -> SeededEntropy:
    """Return noise that repeats: an audit has to."""
    return SeededEntropy(key, insecure_deterministic=True)


def changed(mechanism: Mechanism, kind: Callable[..., Changed], **more: Any) -> Changed:
    """Return a mechanism of another kind with the same settings."""
    return kind(**{entry.name: getattr(mechanism, entry.name) for entry in fields(mechanism)}, **more)


class Sums(Subject):
    """A mechanism behind :class:`fedcomp.privacy.mechanism.PrivateSum`, without a strategy around it.

    Parameters
    ----------
    name : str
    mechanism : Mechanism
    shape : tuple of int
        Of the sum.
    worlds : Worlds
    """

    def __init__(self, name: str, mechanism: Mechanism, shape: tuple[int, ...], worlds: Worlds) -> None:
        super().__init__(name, mechanism.adjacency, worlds, mechanism, {"sum": slice(None)}, math.prod(shape))
        self.mechanism, self.shape = mechanism, shape
        # Floating-point noise has no grid to be on.
        if mechanism.noise == "gaussian":
            self.step = 0.0

    def start(self, noisy: bool, seed: int, trial: int) -> Any:
        # The same mechanism without noise: the exact sum goes through the same bounds and rounding.
        mechanism = self.mechanism if noisy else replace(self.mechanism, noise_multiplier=0.0)
        entropy = seeded(Key(seed, "audit", trial))
        return SimpleNamespace(mechanism=mechanism, privacy=new_ledger(self.adjacency), entropy=entropy)

    def play(self, run: Any, nodes: Any, data: Data, number: int) -> Floats:
        held = PrivateSum(run.mechanism, self.shape)
        for participant, contribution in data:
            # What the mechanism refuses is left out, as a strategy does.
            with suppress(Unbounded):
                held.add(participant, contribution)
        return held.release(run.privacy, round=number, entropy=run.entropy).ravel()
