"""Mechanisms: one object holds the bound, the sensitivity, the noise and the cost of a release.

Four numbers that live in four places drift apart, and noise that is too small by a factor looks exactly like noise that
is not. So a mechanism takes in contributions (or refuses them), knows by construction how far one of them can move the
sum, draws the noise from that, and writes the event before the noisy sum leaves. Everything is integer arithmetic on a
public grid: float noise on float sums gives its input away in the last bits (Mironov 2012).

Sums, never means: what is released is a sum, and whoever wants a mean divides by a constant that everybody may know.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.privacy.bounds import to_grid
from fedcomp.privacy.entropy import Entropy, SystemEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import ADJACENCIES, FINE, Adjacency, Event, Noise
from fedcomp.privacy.noise import draw, failure
from fedcomp.rules import Configured, Int, Many, NotNegative, Positive, Switch

if TYPE_CHECKING:
    from fedcomp.privacy.ledger import PrivacyLedger

__all__ = ["ADJACENCIES", "Adjacency", "GridGaussian", "Mechanism", "PrivateSum", "Votes"]


@dataclass(frozen=True, kw_only=True)
class Mechanism(Configured, ABC):
    """A noisy sum of bounded integer vectors.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 adds none (and costs an infinite epsilon).
    adjacency : {"zero_out", "add_remove", "replace"}
        What one unit may change.
    noise : {"discrete_gaussian", "skellam", "gaussian"}
        The last one draws floats and is insecure; it is there to be measured against.

    Notes
    -----
    ``bound`` and ``step`` are a subclass's: the largest L2 norm of one contribution in grid steps, and the length of a
    step. Everything else follows from them.
    """

    noise_multiplier: NotNegative
    adjacency: Adjacency = "zero_out"
    noise: Noise = "discrete_gaussian"

    @property
    @abstractmethod
    def bound(self) -> float:
        """Largest L2 norm of one contribution, in grid steps."""

    @property
    @abstractmethod
    def step(self) -> float:
        """Length of a grid step in the units of the update."""

    @property
    @abstractmethod
    def l1_bound(self) -> float:
        """Largest L1 norm of one contribution, in grid steps."""

    @abstractmethod
    def admit(self, contribution: Any) -> NDArray[np.int64]:
        """Return ``contribution`` as an integer vector of L2 norm at most :attr:`bound`.

        Raises
        ------
        Unbounded
            When it cannot be bounded or verified.
        """

    def admit_all(self, contributions: Sequence[Any]) -> NDArray[np.int64]:
        """Return the sum of contributions of several units, each bounded or verified by itself; all of them or none.

        Raises
        ------
        Unbounded
            When one of them is refused, or there are none.
        """
        if not len(contributions):
            raise Unbounded("a sum of no contributions has no shape")
        return np.sum([self.admit(contribution) for contribution in contributions], axis=0)

    @property
    def sensitivity(self) -> float:
        """L2 distance of the sums of two neighbouring data sets, at most, in grid steps."""
        # An exchange takes one bounded contribution away and adds another.
        return self.bound * (2.0 if self.adjacency == "replace" else 1.0)

    @property
    def grid_sigma(self) -> float:
        """Standard deviation of the noise on the sum, in grid steps."""
        return self.noise_multiplier * self.sensitivity

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on the sum, in the units of the update."""
        return self.grid_sigma * self.step

    @property
    def releases(self) -> int:
        """How many releases one sum is: sums whose rows are bounded one by one are as many as they have rows."""
        return 1

    def event(self, *, rate: float = 1.0, size: int = 0, label: str = "update") -> Event:
        """Return what a sum of ``size`` coordinates costs."""
        l1 = self.l1_bound * (2.0 if self.adjacency == "replace" else 1.0)
        return Event(
            noise=self.noise,
            noise_multiplier=self.noise_multiplier,
            # Floats have no grid to be coarse: an infinite one takes nothing off delta.
            grid_sigma=math.inf if self.noise == "gaussian" else self.grid_sigma,
            grid_l1=l1 if self.noise == "skellam" else 0.0,
            releases=self.releases,
            rate=rate,
            # Without noise nothing is drawn, and the samplers refuse a standard deviation of 0.
            delta=failure(self.noise, self.grid_sigma, size) if self.noise_multiplier else 0.0,
            label=label,
        )

    def perturb(self, total: NDArray[np.int64], entropy: Entropy) -> NDArray[np.float64]:
        """Return ``total`` plus noise, in the units of the update. Accounts for nothing: use :class:`PrivateSum`."""
        # Nothing to draw: the samplers refuse a standard deviation of 0.
        if self.noise_multiplier == 0.0:
            return np.multiply(total, self.step, dtype=np.float64)
        noise = draw(self.noise, self.grid_sigma, total.size, entropy).reshape(total.shape)
        # For integer noise the one floating-point operation, after the noise: its rounding tells nothing about the sum.
        return np.multiply(total + noise, self.step, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class GridGaussian(Mechanism):
    """Sum of real vectors, each clipped to L2 norm ``clip`` and rounded to a public grid.

    Parameters
    ----------
    clip : float
        Bound C of one contribution, in the units of the update.
    size : int
        Coordinates d; the grid is chosen from it: a step is C / B with B the smallest power of two >= 50 sqrt(d), so
        that rounding moves a vector by at most 1 % of C.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.privacy.entropy import SystemEntropy
    >>> mechanism = GridGaussian(noise_multiplier=2.0, clip=1.0, size=3)
    >>> total = mechanism.admit(np.array([0.3, 0.0, 0.4])) + mechanism.admit(np.array([30.0, 0.0, 40.0]))
    >>> mechanism.perturb(total, SystemEntropy()).shape
    (3,)
    >>> mechanism.sensitivity * mechanism.step <= 1.001
    True
    """

    clip: Positive
    size: Annotated[int, Int(1)]

    @property
    def bound(self) -> float:
        """Largest L2 norm of one contribution, in grid steps: a power of two."""
        # Rounding moves a vector by sqrt(d) / 2 steps at most, 1 % of this bound; a power of two makes the step exact.
        return float(2 ** math.ceil(math.log2(50.0 * math.sqrt(self.size))))

    @property
    def step(self) -> float:
        """Length of a grid step."""
        return self.clip / self.bound

    @property
    def l1_bound(self) -> float:
        """Largest L1 norm of one contribution: sqrt(d) times the L2 bound."""
        return self.bound * math.sqrt(self.size)

    def admit(self, contribution: NDArray[Any]) -> NDArray[np.int64]:
        """Clip, round, and check the integer norm.

        Parameters
        ----------
        contribution : ndarray of float, (size,)

        Raises
        ------
        Unbounded
            When it has another shape, or holds NaN or infinity.
        """
        if contribution.shape != (self.size,):
            raise Unbounded(f"a contribution has shape {contribution.shape}, expected ({self.size},)")
        return to_grid(contribution, clip=self.clip, step=self.step, bound=int(self.bound))


@dataclass(frozen=True, kw_only=True)
class Votes(Mechanism):
    """Sum of votes in {-1, 0, 1} of which each contribution has at most ``k``: the bound sqrt(k) is structural.

    Parameters
    ----------
    k : int
        Votes of one contribution; of one row of it with ``by_row``.
    shape : tuple of int
        Of a contribution, and of the sum.
    by_row : bool
        Every row (first axis) is a release of its own, with ``k`` votes and a bound of its own: the generated images of
        a batch. The event then stands for as many releases as there are rows.

    Notes
    -----
    The grid is finer than the votes where the noise would be coarse (:data:`FINE`): votes count ``resolution`` steps
    each. That changes no ratio, and lets the noise be accounted as continuous.

    Examples
    --------
    >>> import numpy as np
    >>> ballots = Votes(noise_multiplier=2.0, k=2, shape=(4,))
    >>> ballots.sensitivity * ballots.step  # the square root of k
    1.4142135623730951
    """

    k: Annotated[int, Int(1)]
    shape: Annotated[tuple[int, ...], Many(Int(1), 64)]
    by_row: Switch = False

    def conflict(self) -> str:
        """A vector has no rows."""
        return f"by_row=True needs rows, the shape is {self.shape}" if self.by_row and len(self.shape) < 2 else ""

    @property
    def releases(self) -> int:
        """Rows that are releases of their own, or 1."""
        return self.shape[0] if self.by_row else 1

    @property
    def resolution(self) -> int:
        """Grid steps of one vote."""
        sigma = self.noise_multiplier * math.sqrt(self.k) * (2.0 if self.adjacency == "replace" else 1.0)
        # Noise of fewer than FINE steps would have to be accounted as coarse, which costs more.
        return max(1, math.ceil(FINE / sigma)) if sigma > 0.0 else 1

    @property
    def bound(self) -> float:
        """Largest L2 norm of one contribution, in grid steps: resolution * sqrt(k)."""
        return self.resolution * math.sqrt(self.k)

    @property
    def step(self) -> float:
        """Length of a grid step, in votes."""
        return 1.0 / self.resolution

    @property
    def l1_bound(self) -> float:
        """Largest L1 norm of one contribution, in grid steps."""
        return float(self.resolution * self.k)

    def admit(self, contribution: NDArray[Any]) -> NDArray[np.int64]:
        """Verify votes and return them in grid steps.

        Parameters
        ----------
        contribution : ndarray of int, of :attr:`shape`

        Raises
        ------
        Unbounded
            When the shape or dtype is another, a value is not -1, 0 or 1, or more than ``k`` are not zero.
        """
        if not isinstance(contribution, np.ndarray):
            raise Unbounded(f"votes are signed integers, got {type(contribution)}")
        return self.admit_all(contribution[None])

    def admit_all(self, contributions: Any) -> NDArray[np.int64]:
        """Verify the votes of several units at once and return their sum in grid steps.

        Parameters
        ----------
        contributions : ndarray of int, (units, *shape)

        Raises
        ------
        Unbounded
            As :meth:`admit`, for any of them.
        """
        if not isinstance(contributions, np.ndarray) or contributions.dtype.kind != "i":
            raise Unbounded(f"votes are signed integers, got {getattr(contributions, 'dtype', type(contributions))}")
        if contributions.shape[1:] != self.shape or not contributions.shape[0]:
            raise Unbounded(f"votes have shape {contributions.shape[1:]}, expected {self.shape}")
        # One row for each release: ``by_row`` bounds every image by itself, not the batch.
        rows = contributions.reshape(len(contributions) * self.releases, -1)
        cast = int(np.count_nonzero(rows, axis=1).max())
        if cast > self.k:
            raise Unbounded(f"{cast} votes in one contribution, at most {self.k} are allowed")
        # Both ends and not abs(): the magnitude of -128 does not fit into int8.
        if contributions.max() > 1 or contributions.min() < -1:
            raise Unbounded("a vote is not -1, 0 or 1")
        return contributions.sum(axis=0, dtype=np.int64) * self.resolution


class PrivateSum:
    """One sum: contributions come in, at most one of each participant; one noisy sum comes out, once.

    Parameters
    ----------
    mechanism : Mechanism
    shape : tuple of int
        Of the sum.

    Attributes
    ----------
    participants : list of int
        Whose contributions are in the sum, in the order they came.
    """

    def __init__(self, mechanism: Mechanism, shape: tuple[int, ...]) -> None:
        self.mechanism = mechanism
        self.participants: list[int] = []
        self._inside: set[int] = set()
        self._total = np.zeros(shape, np.int64)
        self._released = False

    def add(self, participant: int, contribution: Any) -> None:
        """Add one contribution.

        Raises
        ------
        Unbounded
            When the mechanism refuses it, the participant is in already, or the sum was released. The sum is unchanged.
        """
        self._add(participant, contribution, self.mechanism.admit)

    def add_all(self, participant: int, contributions: Any) -> None:
        """Add the contributions of several units that one participant speaks for, each bounded by itself; all or none.

        Raises
        ------
        Unbounded
            As :meth:`add`.
        """
        self._add(participant, contributions, self.mechanism.admit_all)

    def _add(self, participant: int, given: Any, admit: Callable[[Any], NDArray[np.int64]]) -> None:
        if self._released:
            raise Unbounded("the sum was released; a late contribution cannot be added to it")
        if participant in self._inside:
            raise Unbounded(f"participant {participant} is in the sum already: one contribution each")
        # Bounded or refused before the sum is touched.
        admitted = admit(given)
        if admitted.shape != self._total.shape:
            raise Unbounded(f"a contribution has shape {admitted.shape}, the sum {self._total.shape}")
        # Only what was admitted whole gets here: a refused contribution leaves the sum as it was.
        self._total += admitted
        self.participants.append(participant)
        self._inside.add(participant)

    def release(
        self,
        ledger: PrivacyLedger,
        *,
        round: int,
        entropy: Entropy | None = None,
        event: Event | None = None,
        participants: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """Record the event, and only then draw the noise and return the noisy sum in the units of the update.

        Parameters
        ----------
        ledger : PrivacyLedger
            Is on disk before this returns, where it has a file.
        round : int
        entropy : Entropy, optional
            Default: the operating system's.
        event : Event, optional
            What is recorded instead of the mechanism's own, where one release is paid for together with others.
        participants : sequence of int, optional
            Who is recorded as having taken part; default: those in the sum.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released.
        """
        if self._released:
            raise Unbounded("the sum was released; a second release would have to be paid for as another sum")
        cost = event or self.mechanism.event(size=self._total.size)
        # On the disk before any noise exists: a crash in between has paid for nothing, never released for nothing.
        ledger.record(cost, round=round, participants=self.participants if participants is None else participants)
        # Before the draw: noise drawn twice on one sum could be averaged away.
        self._released = True
        return self.mechanism.perturb(self._total, SystemEntropy() if entropy is None else entropy)
