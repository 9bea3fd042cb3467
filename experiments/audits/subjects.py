"""What is audited: a private system as an attacker drives it, and the mechanisms themselves.

A subject runs the code path that a training uses, as often as it is asked to, and says what was claimed for it: the
standard deviation of every coordinate of its output, what one round costs by the mechanism's own event, and the epsilon
that the ledger gives. The tiers (:mod:`fedcomp.experiments.audits.tiers`) compare both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.gaussian import gaussian_mu
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import Mechanism, PrivateSum
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key

Floats = NDArray[np.float64]
Data = Sequence[tuple[int, Any]]
"""A data set: who contributes what."""

DELTA: Final = 1e-5
POPULATION: Final = 1000


def new_ledger(adjacency: Adjacency) -> PrivacyLedger:
    """Return an empty ledger in memory, with everybody taking part every time: the audited rounds hide nobody."""
    return PrivacyLedger(delta=DELTA, population=POPULATION, adjacency=adjacency, sampling=Sampling("everyone"))


def rounds_mu(events: Sequence[Event]) -> float:
    """Return the mu that recorded events claim: sqrt(sum of releases / z^2)."""
    return math.sqrt(math.fsum(e.releases / e.noise_multiplier**2 for e in events))


class Subject(ABC):
    """A private system under audit.

    Attributes
    ----------
    name : str
    adjacency : str
    absent, present : data sets
        Two neighbouring data sets, as far apart as the author of the audit could bring them.
    pairs : list of pairs of data sets
        For the search of tier A; empty to search nothing.
    parts : dict of str to slice
        Stretches of the output whose noise is tested apart: tensors.
    step : float
        The outputs' public grid; 0 where there is none.
    gridded : slice
        Which of the outputs lie on it.
    """

    name: str
    adjacency: Adjacency
    absent: Data
    present: Data
    pairs: list[tuple[Data, Data]]
    parts: dict[str, slice]
    step: float = 0.0
    gridded: slice = slice(None)

    @abstractmethod
    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return what ``runs`` independent runs of ``rounds`` rounds release, shape (runs, rounds, width)."""

    @property
    @abstractmethod
    def scale(self) -> Floats:
        """Claimed standard deviation of every coordinate of the output, shape (width,)."""

    @abstractmethod
    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run of ``rounds`` rounds over ``present``."""

    def release_mu(self) -> float:
        """Return the mu that the events of one round claim."""
        return rounds_mu(self.ledger(1).events)

    def run_mu(self, rounds: int) -> float:
        """Return the mu that the ledger's epsilon claims for a run."""
        return gaussian_mu(self.ledger(rounds).epsilon(), DELTA)


@dataclass
class Sums(Subject):
    """A mechanism behind :class:`fedcomp.privacy.mechanism.PrivateSum`, without a strategy around it.

    Parameters
    ----------
    name : str
    mechanism : Mechanism
    shape : tuple of int
        Of the sum.
    absent, present : data sets
    pairs : list of pairs of data sets
    """

    name: str
    mechanism: Mechanism
    shape: tuple[int, ...]
    absent: Data
    present: Data
    pairs: list[tuple[Data, Data]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.adjacency = self.mechanism.adjacency
        self.step = self.mechanism.step if self.mechanism.noise != "gaussian" else 0.0
        self.parts = {"sum": slice(None)}

    @property
    def scale(self) -> Floats:
        """The mechanism's own standard deviation."""
        return np.full(math.prod(self.shape), self.mechanism.sigma)

    def collect(self, data: Data, *, noisy: bool = True) -> PrivateSum:
        """Return the sum of what the mechanism admits; what it refuses is left out, as a strategy does."""
        held = PrivateSum(self.mechanism if noisy else replace(self.mechanism, noise_multiplier=0.0), self.shape)
        for participant, contribution in data:
            try:
                held.add(participant, contribution)
            except Unbounded:
                continue
        return held

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Release the same sum in every run and round, each time with noise of its own."""
        out = np.empty((runs, rounds, math.prod(self.shape)))
        for trial in range(runs):
            entropy = SeededEntropy(Key(seed, "audit", trial), insecure_deterministic=True)
            ledger = new_ledger(self.adjacency)
            for place in range(rounds):
                held = self.collect(data, noisy=noisy)
                out[trial, place] = held.release(ledger, round=place + 1, entropy=entropy).ravel()
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run."""
        ledger = new_ledger(self.adjacency)
        entropy = SeededEntropy(Key(0, "audit ledger"), insecure_deterministic=True)
        for place in range(rounds):
            self.collect(self.present).release(ledger, round=place + 1, entropy=entropy)
        return ledger
