"""Privacy events: the numbers an accountant needs about one release, made by the mechanism that adds the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from fedcomp.plain import OrInfinite
from fedcomp.rules import AboveZero, BelowOne, Configured, Int, NotNegative, OneOf, checked

ADJACENCIES: Final = ("zero_out", "add_remove", "replace")
"""How two neighbouring data sets differ: one unit's contribution is left out of every sum and count and its place stays
empty, a unit is there or is not, a unit is exchanged for another one. The last one doubles the sensitivity of a bounded
sum. Left out is not zero: in a count an update of zeros is a short one, and instead of a long one it is an exchange."""

Adjacency = Annotated[Literal["zero_out", "add_remove", "replace"], OneOf(*ADJACENCIES)]

NOISES: Final = ("discrete_gaussian", "skellam", "gaussian")
"""Integer noise on a public grid, twice; and the continuous Gaussian in floating point, which leaks (insecure)."""

Noise = Annotated[str, OneOf(*NOISES)]

FINE: Final = 10.0
"""Standard deviation in grid steps from which on integer noise is accounted as continuous."""


def check_adjacency(adjacency: str) -> None:
    """Raise :class:`ConfigError` unless ``adjacency`` is one of :data:`ADJACENCIES`."""
    checked("adjacency", adjacency, OneOf(*ADJACENCIES))


@dataclass(frozen=True, slots=True)
class Event(Configured):
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

    noise: Noise
    noise_multiplier: NotNegative
    grid_sigma: OrInfinite = math.inf
    grid_l1: NotNegative = 0.0
    releases: Annotated[int, Int(1)] = 1
    # Above 0: a unit that never takes part has nothing to account for.
    rate: AboveZero = 1.0
    # Below 1: a release that may fail for certain protects nothing, whatever its noise.
    delta: BelowOne = 0.0
    label: str = "update"
