"""What one release costs: the plain figures an accountant needs, made by the mechanism that adds the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from fedcomp import params
from fedcomp.plain import OrInfinite

Adjacency = Literal["zero_out", "add_remove", "replace"]

ADJACENCIES: Final = ("zero_out", "add_remove", "replace")
"""How two neighbouring data sets differ: one unit's contribution is left out of every sum and count and its place stays
empty, a unit is there or is not, a unit is exchanged for another one. The last one doubles the sensitivity of a bounded
sum. Left out is not zero: in a count an update of zeros is a short one, and instead of a long one it is an exchange."""

NOISES: Final = ("discrete_gaussian", "skellam", "gaussian")
"""Integer noise on a public grid, twice; and the continuous Gaussian in floating point, which leaks (insecure)."""

FINE: Final = 10.0
"""Standard deviation in grid steps from which on integer noise is accounted as continuous."""


def check_adjacency(adjacency: str) -> None:
    """Raise :class:`ConfigError` unless ``adjacency`` is one of :data:`ADJACENCIES`."""
    params.choice("adjacency", adjacency, ADJACENCIES)


@dataclass(frozen=True, slots=True)
class Event:
    """One release of a noisy sum, or several equal ones.

    Attributes
    ----------
    noise : str
        One of :data:`NOISES`.
    noise_multiplier : float
        Standard deviation of the noise over the L2 sensitivity of the sum; 0 releases the sum itself.
    grid_sigma : float
        Standard deviation of the noise in grid steps; infinite for continuous noise.
    grid_l1 : float
        L1 sensitivity of the sum in grid steps, which Skellam noise needs; 0 where it is not used.
    releases : int
        How many such releases this stands for, on the same units: the images of one batch are one release each.
    rate : float
        Probability with which a unit took part, independently of all others (Poisson sampling); 1 for no sampling.
    delta : float
        Failure probability beside the noise (sampling tables, conditional rounding), added to the run's delta.
    label : str
        What was released.

    Examples
    --------
    >>> from fedcomp.privacy.accounting import compose
    >>> event = Event("gaussian", noise_multiplier=4.0)
    >>> round(compose([event] * 10, 1e-5).epsilon, 2)
    3.34
    """

    noise: str
    noise_multiplier: float
    grid_sigma: OrInfinite = math.inf
    grid_l1: float = 0.0
    releases: int = 1
    rate: float = 1.0
    delta: float = 0.0
    label: str = "update"

    def __post_init__(self) -> None:
        params.choice("noise", self.noise, NOISES)
        params.number("noise_multiplier", self.noise_multiplier, rule="a finite number >= 0", ok=_finite_from_0)
        # Above 0: a unit that never takes part has nothing to account for.
        params.number("rate", self.rate, rule="a probability in (0, 1]", ok=lambda v: 0.0 < v <= 1.0)
        # A Python integer: it is written into the ledger's file.
        params.assign(self, releases=params.integer("releases", self.releases, low=1))
        # Below 1: a release that may fail for certain protects nothing, whatever its noise.
        params.number("delta", self.delta, rule="a probability in [0, 1)", ok=lambda v: 0.0 <= v < 1.0)


def _finite_from_0(value: float) -> bool:
    return 0.0 <= value < math.inf
