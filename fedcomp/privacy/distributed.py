"""Distributed noise: every client adds a share of the noise, so that the sum is private before the server decodes it.

The server need not be trusted with single updates then, only the protocol that sums them (secure aggregation, coded
sums): what it decodes is noisy already. Each client clips, rounds to integers under a bound on their norm, and adds an
integer share of the noise; the sum is exact, modulo a number with room for all of it. Kairouz, Liu and Steinke, "The
distributed discrete Gaussian mechanism for federated learning with secure aggregation", ICML 2021, and Agarwal, Kairouz
and Liu, "The Skellam mechanism for differentially private federated learning", NeurIPS 2021 (both recalled).

What is different from noise at the server: a client that is absent takes its share of the noise with it, so what is
hidden is what a client contributed, not that it took part (no ``add_remove``). Shares of those who vanish, or tell
theirs to the adversary, are missing. So the share is dimensioned for the least number that remains, and a sum of fewer
is void. A sum of discrete Gaussians is not a discrete Gaussian; how far it is from one enters the event, and the shares
must not be too small for that. Sums of Skellam variables are Skellam variables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.privacy.bounds import rounding_bound, squared_norm
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import FINE, Event
from fedcomp.privacy.mechanism import Mechanism
from fedcomp.privacy.noise import draw
from fedcomp.privacy.rotation import largest_coordinate
from fedcomp.rules import AboveZero, Int, OneOf, Positive

LEAST_VARIANCE: Final = 4.0
"""Of one discrete Gaussian share, in squared steps: a sum of a hundred is then within 7e-17 of a discrete Gaussian."""

CUT: Final = 1e-30
"""Probability that any share of a round is larger than there is room for."""

_HEADROOM: Final = 2.0**40
"""Two distributions that are each within CUT of the ideal ones cost (1 + e^epsilon) CUT of delta: for epsilon < 27."""

_FINEST: Final = 4096.0
"""Largest scale to which a grid is refined for the noise, because every bit adds a bit to each coordinate."""

_SPIKE: Final = 1e-6
"""Probability that a public rotation leaves some coordinate of one vector so large that it is cut off."""


def divergence(shares: int, variance: float) -> float:
    """Return tau = 10 sum over k < n of exp(-2 pi^2 sigma_i^2 k / (k + 1)).

    How far the sum of ``shares`` discrete Gaussians of ``variance`` each is from a discrete Gaussian, in every
    coordinate; Kairouz et al. 2021 (recalled).
    """
    return 10.0 * math.fsum(math.exp(-2.0 * math.pi**2 * variance * k / (k + 1)) for k in range(1, shares))


def tail(noise: str, sigma: float, reach: float) -> float:
    """Return a bound on the probability that one draw of integer noise is larger than ``reach``, on either side."""
    if noise == "skellam":
        # Chernoff: the cumulants are those of sigma^2 (cosh(s) - 1).
        u = reach / sigma**2
        return 2.0 * math.exp(-(sigma**2) * (u * math.asinh(u) - math.sqrt(1.0 + u * u) + 1.0))
    # A discrete Gaussian has lighter tails than the continuous one shifted by a step.
    return 2.0 * math.exp(-(max(0.0, reach - 1.0) ** 2) / (2.0 * sigma**2))


def room(noise: str, sigma: float, probability: float) -> int:
    """Return the smallest whole number that one draw of integer noise exceeds with ``probability`` at most."""
    if sigma == 0.0:
        return 0
    high = 1
    while tail(noise, sigma, high) > probability:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tail(noise, sigma, middle) <= probability else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class DistributedSum(Mechanism):
    """A sum of clipped vectors with noise that the contributors added.

    Parameters
    ----------
    clip : float
        Largest L2 norm C of one contribution, in the units of the update.
    size : int
        Coordinates d.
    contributors : int
        Number of clients asked, n: the largest number of contributors to a sum.
    tolerated : int
        How many of them may vanish; a sum of fewer than n - tolerated is void.
    honest : float
        Fraction of the n clients whose noise the adversary does not know.
    scale : int
        Grid steps of the clip norm; 0 takes the smallest power of two >= 4 sqrt(d), at which random rounding lengthens
        a vector of a thousand coordinates or more by about 1 %. A share of noise should have ten steps as well; for
        that the scale is raised, up to 4096.
    rotation : int
        Seed of a public rotation, 0 for none. It makes room: single coordinates of a rotated vector are small.
    noise : {"discrete_gaussian", "skellam"}

    Raises
    ------
    ConfigError
        When no noise would remain, or a discrete Gaussian share would be too small.

    Examples
    --------
    >>> mechanism = DistributedSum(noise_multiplier=1.0, clip=1.0, size=1000, contributors=20, tolerated=4)
    >>> mechanism.counted, mechanism.least
    (16, 16)
    """

    # Integers: shares have to add up exactly, in a field or modulo a number.
    noise: Annotated[str, OneOf("discrete_gaussian", "skellam")] = "discrete_gaussian"
    clip: Positive
    size: Annotated[int, Int(1)]
    contributors: Annotated[int, Int(1)]
    tolerated: Annotated[int, Int()] = 0
    # Of those who are asked; who tells its noise, or adds none, counts as one that vanished.
    honest: AboveZero = 1.0
    scale: Annotated[int, Int()] = 0
    rotation: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        """Somebody's noise has to be there, and nothing may depend on how many brought theirs."""
        if self.adjacency == "add_remove":
            return (
                "a client that is not there brings no noise either, and how much noise there is shows how many brought "
                "it: shares hide what a client contributes, not that it does. Use adjacency='zero_out' or 'replace'"
            )
        if self.counted < 1:
            return (
                f"of {self.contributors} contributors {self.tolerated} may vanish and {1 - self.honest:.0%} may tell "
                "their noise: nobody's is left to count on; lower tolerated, or ask more clients"
            )
        return ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scale:
            factor = self.noise_multiplier * (2.0 if self.adjacency == "replace" else 1.0)
            # A share has z times the sensitivity over sqrt(counted) grid steps, and FINE of them are wanted.
            fine = min(_FINEST, FINE * math.sqrt(self.counted) / factor) if factor else 1.0
            params.assign(self, scale=2 ** math.ceil(math.log2(max(4.0 * math.sqrt(self.size), fine))))
        # After the scale is known, in whose steps a share is measured.
        variance = self.share_sigma**2
        if self.noise == "discrete_gaussian" and 0.0 < variance < LEAST_VARIANCE:
            raise ConfigError(
                f"one share of noise has variance {variance:.3g} in squared grid steps; a sum of discrete Gaussians "
                f"needs {LEAST_VARIANCE:g}. Raise scale (now {self.scale}), or use noise='skellam'"
            )

    @property
    def counted(self) -> int:
        """Shares whose noise is there whoever vanishes and whoever tells: floor(honest n) - tolerated."""
        # 0.7 * 10 is 6.999... in floating point, and means 7.
        return math.floor(self.honest * self.contributors + 1e-9) - self.tolerated

    @property
    def least(self) -> int:
        """Contributors below which a sum is void."""
        return self.contributors - self.tolerated

    @property
    def bound(self) -> float:
        """Largest L2 norm of one rounded contribution, in grid steps."""
        return rounding_bound(float(self.scale), self.size)

    @property
    def step(self) -> float:
        """Length of a grid step: a float32, as frames hold it."""
        return float(np.float32(self.clip / self.scale))

    @property
    def l1_bound(self) -> float:
        """Largest L1 norm of one contribution: sqrt(d) times the L2 bound, and at most its square (integers)."""
        return min(self.bound * math.sqrt(self.size), self.bound**2)

    @property
    def share_sigma(self) -> float:
        """Standard deviation of one share, in grid steps."""
        return self.grid_sigma / math.sqrt(self.counted)

    @property
    def reach(self) -> int:
        """Largest magnitude of one coordinate before noise, in steps; what is beyond is cut off (which shortens)."""
        # After a rotation coordinates are nearly Gaussian, and one as large as the norm is a rare accident.
        if not self.rotation:
            return self.scale
        return min(self.scale, math.ceil(self.scale * largest_coordinate(self.size, _SPIKE)) + 1)

    @property
    def levels(self) -> int:
        """Largest magnitude of one coordinate with its share of noise."""
        # A union bound: no coordinate of any contributor's share is larger, but for a chance of CUT.
        return self.reach + room(self.noise, self.share_sigma, CUT / (self.contributors * self.size))

    def event(self, *, rate: float = 1.0, size: int = 0, label: str = "update") -> Event:
        """Return what a sum costs, with the noise that is there in the worst case.

        The noise multiplier of discrete Gaussian shares is lowered by their divergence, 1 / z' = 1 / z + tau sqrt(d)
        (Kairouz et al. 2021; recalled), and the grid is said to be as coarse as one share.
        """
        plain = super().event(rate=rate, size=size, label=label)
        if self.noise_multiplier == 0.0:
            return plain
        multiplier, sigma = self.noise_multiplier, self.grid_sigma
        if self.noise == "discrete_gaussian":
            tau = divergence(self.contributors, self.share_sigma**2)
            multiplier = 1.0 / (1.0 / multiplier + tau * math.sqrt(self.size))
            # It is the shares that have to be fine: a sum of coarse discrete Gaussians is far from one.
            sigma = self.share_sigma
        return Event(
            noise=self.noise,
            noise_multiplier=multiplier,
            grid_sigma=sigma,
            grid_l1=plain.grid_l1,
            releases=plain.releases,
            rate=rate,
            delta=CUT * _HEADROOM,
            label=label,
        )

    def admit(self, contribution: NDArray[Any]) -> NDArray[np.int64]:
        """Verify a rounded contribution, before its noise.

        Raises
        ------
        Unbounded
            When it is not a vector of integers of this size, or longer than :attr:`bound`.
        """
        if contribution.shape != (self.size,) or contribution.dtype.kind != "i":
            raise Unbounded(f"a contribution is {contribution.dtype}{contribution.shape}, expected int({self.size},)")
        length = squared_norm(contribution.astype(np.int64))
        if length > math.floor(self.bound**2):
            raise Unbounded(f"a contribution of norm {math.sqrt(length):.6g} steps exceeds {self.bound:.6g}")
        return contribution.astype(np.int64)

    def share(self, entropy: Entropy) -> NDArray[np.int64]:
        """Return one share of the noise, (size,)."""
        return share_of_noise(self.noise, self.share_sigma, self.size, entropy)

    def perturb(self, total: NDArray[np.int64], entropy: Entropy) -> NDArray[np.float64]:
        """Return ``total`` plus the shares that are there in the worst case: what a server learns of a run like this.

        For simulations without clients; in a real sum the noise is in the contributions.
        """
        noisy = total.copy()
        # Not one for each contributor: those that may vanish or be known are not counted on.
        for _ in range(self.counted if self.noise_multiplier else 0):
            noisy += self.share(entropy).reshape(total.shape)
        return noisy.astype(np.float64) * self.step


def share_of_noise(noise: str, sigma: float, size: int, entropy: Entropy) -> NDArray[np.int64]:
    """Return ``size`` draws of integer noise; zeros for a standard deviation of 0."""
    if sigma == 0.0:
        return np.zeros(size, np.int64)
    return draw(noise, sigma, size, entropy).astype(np.int64, copy=False)
