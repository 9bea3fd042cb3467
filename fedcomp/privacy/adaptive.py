"""Adaptive clipping: the clip norm follows a private estimate of a quantile of the clients' norms.

G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS
2021 (recalled). Each contribution brings one bit: whether its norm was within the clip norm. The noisy share of these
bits moves the clip norm by a factor.

Four things easily go wrong, and each has a test:

- the sign: a bit is 1 when the norm is *within* the clip norm, and too many such bits lower it. With the bit "was
  clipped" in the same rule the norm runs away from the quantile;
- the centre: the bit enters the count as b - 1/2, so that one client moves the count by 1/2 and not by 1. That is for a
  contribution that is left out, with its bit: ``zero_out`` and ``add_remove``. An update that is refused is left out in
  just this way. One of zeros is not: its bit says "within", and as a substitute for a long one it moves the count by 1,
  which is what ``replace`` pays for;
- the divisor is the public number of contributions, not of those that came;
- the price: bits and sum are two releases about the same clients. Noise on the sum is raised so that both together cost
  one event at the noise multiplier that was asked for, ``1/z^2 = 1/z_sum^2 + 1/z_bits^2``.

The bits never travel: the server, which is trusted and clips, sees the norms. So no client can forge its bit, and none
costs a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.mechanism import Mechanism, Votes
from fedcomp.rules import Configured, Inside, NotNegative, Positive

_USUAL: Final = 20.0
"""The published choice of the noise on the count: its standard deviation is the number of clients divided by this."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(Configured):
    """How the clip norm moves.

    Parameters
    ----------
    initial : float
        Clip norm C of the first round.
    quantile : float
        Share of the contributions that should be within the clip norm, in (0, 1).
    rate : float
        ``C = C * exp(-rate * (share within - quantile))`` after each round.
    count_noise : float
        Standard deviation of the noise on the centred count of bits, in clients, where one client may be left out (the
        double under "replace"). 0: a twentieth of the expected number of contributions.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.strategies.private.dp_fedavg import DpFedAvg
    >>> strategy = DpFedAvg(
    ...     FedAvg(fraction_evaluate=0.0), clip=AdaptiveClip(initial=1.0, count_noise=5.0), noise_multiplier=2.0
    ... )
    """

    initial: Positive = 0.1
    quantile: Inside = 0.5
    rate: Positive = 0.2
    count_noise: NotNegative = 0.0

    def multiplier(self, expected: float) -> float:
        """Return the noise multiplier of the bits: standard deviation over the sensitivity 1/2 of the count."""
        return 2.0 * (self.count_noise or expected / _USUAL)

    def sum_multiplier(self, noise_multiplier: float, expected: float) -> float:
        """Return the noise multiplier of the sum, so that sum and bits together have ``noise_multiplier``.

        Raises
        ------
        ConfigError
            When the bits alone would cost as much as both may.
        """
        if noise_multiplier == 0.0:
            return 0.0
        # Known before the first round: the price of a round must not depend on its clients.
        bits = self.multiplier(expected)
        # 1 / z^2 is what may be spent, and the bits alone would spend all of it.
        if noise_multiplier >= bits:
            raise ConfigError(
                f"noise_multiplier={noise_multiplier:g} cannot be met: the count of bits alone has {bits:g}, with a "
                f"noise of {bits / 2.0:g} clients. Set count_noise above {noise_multiplier / 2.0:g}, or have more than "
                f"{expected:g} clients"
            )
        return (noise_multiplier**-2 - bits**-2) ** -0.5

    def move(self, clip: float, share: float) -> float:
        """Return the next round's clip norm.

        Parameters
        ----------
        clip : float
            This round's.
        share : float
            Noisy share of the contributions that were within it, in [0, 1].
        """
        # Geometric: a clip norm that is wrong by orders of magnitude is left within few rounds, and it stays positive.
        return clip * math.exp(-self.rate * (share - self.quantile))


class NormBits:
    """The bits of one round: counted around a half, noised once.

    Parameters
    ----------
    noise_multiplier : float
        Of the count alone: :meth:`AdaptiveClip.multiplier`. 0 adds no noise.
    adjacency, noise
        As of the sum they belong to.

    Notes
    -----
    A bit is a vote, +1 within and -1 beyond, and counts half: the sum of votes is twice the centred count.
    """

    def __init__(self, noise_multiplier: float, adjacency: Adjacency, noise: str) -> None:
        self.mechanism = Votes(noise_multiplier=noise_multiplier, adjacency=adjacency, noise=noise, k=1, shape=(1,))
        self.votes = 0

    def add(self, within: bool) -> None:
        """Count the bit of one contribution that is in the sum; one that is not brings none."""
        # Two votes apart, halved to one: b - 1/2 is +1/2 or -1/2.
        self.votes += 1 if within else -1

    def share(self, expected: float, entropy: Entropy) -> float:
        """Return the noisy share of contributions within the clip norm, in [0, 1]. To be called once, after it is paid.

        Contributions that are missing count as half within: a round without any says nothing about the quantile.
        """
        total = np.array([self.votes * self.mechanism.resolution], np.int64)
        votes = float(self.mechanism.perturb(total, entropy)[0])
        # Noise can carry the share outside; cut, one round moves the clip norm by a factor of exp(rate) at most.
        return min(1.0, max(0.0, 0.5 + 0.5 * votes / expected))


def joint_event(noise_multiplier: float, update: Mechanism, bits: Mechanism, *, size: int, rate: float = 1.0) -> Event:
    """Return the one event that the sum of updates and the count of bits cost together.

    Both are Gaussian, about the same clients, with multipliers that satisfy ``1/z^2 = 1/z_sum^2 + 1/z_bits^2``: their
    joint release is one Gaussian mechanism of multiplier z (for integer noise: in zero-concentrated privacy, whose rho
    add up).

    Raises
    ------
    ConfigError
        For Skellam noise, whose two parts do not join that way.
    """
    if update.noise == "skellam":
        raise ConfigError(
            "adaptive clipping joins two releases into one event, which Skellam noise does not allow; use "
            "noise='discrete_gaussian'"
        )
    one, other = update.event(rate=rate, size=size), bits.event(rate=rate, size=1, label="norm bits")
    return Event(
        noise=update.noise,
        noise_multiplier=noise_multiplier,
        # The coarser of the two grids decides how the pair is accounted.
        grid_sigma=min(one.grid_sigma, other.grid_sigma),
        rate=rate,
        delta=one.delta + other.delta,
        label="update and norm bits",
    )
