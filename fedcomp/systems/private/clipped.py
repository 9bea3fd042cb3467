"""Sums of clipped updates: each update is clipped to a norm, summed and noised, around any codec.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially private recurrent language models", ICLR 2018
(recalled): federated averaging with flat clipping of the whole update, Gaussian noise on the sum and a fixed
denominator. Differences: integer noise on a public grid instead of floats, and adaptive clipping as an option
(:mod:`fedcomp.privacy.adaptive`).

The server clips what it decoded, whatever the client did. So clients may use error feedback: the bound is put on what
is released, after the memory was added, and the memory is a function of one client's data and of public models. With a
codec whose support is drawn for all (RandomK, RandomBlock with ``shared=True``), sum, noise and release lie on that
support alone, and an update is clipped after everything else of it is gone.
"""

from __future__ import annotations

from typing import Any

from fedcomp.codecs.base import norm
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.privacy.adaptive import AdaptiveClip, NormBits, joint_event
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.events import Event
from fedcomp.privacy.mechanism import GridGaussian, Mechanism
from fedcomp.rules import Real, checked
from fedcomp.systems.private.rule import Contribution, Private


class Clipped(Private):
    """The noisy mean of clipped updates.

    Parameters
    ----------
    clip : float or AdaptiveClip
        Largest L2 norm of one client's update, all tensors together, in the units of the update; or how it moves.
    **promise
        As :class:`fedcomp.systems.private.rule.Private`.

    Attributes
    ----------
    clip : float
        The clip norm of the next round.
    clips : dict of int to float
        That of every round so far. Public: it follows from what was released.

    Examples
    --------
    >>> rule = Clipped(clip=1.0, noise_multiplier=1.0, population=10)
    >>> rule.expected
    10.0
    """

    def __init__(self, *, clip: float | AdaptiveClip, **promise: Any) -> None:
        self.adaptive = clip if isinstance(clip, AdaptiveClip) else None
        self.clip: float = checked("clip", clip.initial if isinstance(clip, AdaptiveClip) else clip, Real(above=0.0))
        self.clips: dict[int, float] = {}
        self.bits: NormBits | None = None
        super().__init__(**promise)
        if self.adaptive is not None and self.noise == "skellam":
            raise ConfigError("adaptive clipping needs Gaussian noise; use noise='discrete_gaussian'")
        self._check_bits()

    def declare(self, population: int) -> None:
        """Learn the public number of clients; with adaptive clipping it decides how precise the bits are.

        Raises
        ------
        ConfigError
            When the bits alone would cost as much as a round may.
        """
        super().declare(population)
        # The number of clients decides how precise the bits are.
        self._check_bits()

    def _check_bits(self) -> None:
        if self.adaptive is not None and self.population:
            self.adaptive.sum_multiplier(self.noise_multiplier, self.expected)

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return the grid Gaussian for as many coordinates as are released."""
        multiplier = self.noise_multiplier
        if self.adaptive is not None:
            multiplier = self.adaptive.sum_multiplier(multiplier, self.expected)
        return GridGaussian(
            clip=self.clip, size=layout.size, noise_multiplier=multiplier, adjacency=self.adjacency, noise=self.noise
        )

    def begun(self, server_round: int) -> None:
        """Begin the count of bits."""
        # Before the bits move it: a round's report names the clip norm its updates were bounded by.
        self.clips[server_round] = self.clip
        if self.adaptive is not None:
            self.bits = self.new_bits(self.adaptive)

    def new_bits(self, adaptive: AdaptiveClip) -> NormBits:
        # Without noise on the sum there is none on the bits: such a run shows what clipping does by itself.
        multiplier = adaptive.multiplier(self.expected) if self.noise_multiplier else 0.0
        return NormBits(multiplier, self.adjacency, self.noise)

    def added(self, contribution: Contribution) -> None:
        """Count whether the update was within the clip norm."""
        if self.bits is not None:
            # The contribution as it came: the mechanism clips a copy.
            self.bits.add(norm(contribution) <= self.clip)

    def event(self, mechanism: Mechanism, size: int) -> Event:
        """Return the event of the sum; with adaptive clipping that of the sum and the bits together."""
        if self.adaptive is None:
            return super().event(mechanism, size)
        bits = self.new_bits(self.adaptive).mechanism
        return joint_event(self.noise_multiplier, mechanism, bits, size=size, rate=self.sampling.event_rate)

    def concluded(self, server_round: int, entropy: Entropy) -> None:
        """Move the clip norm by the noisy share of the bits, which the round's event has paid for."""
        if self.adaptive is not None and self.bits is not None:
            self.clip = self.adaptive.move(self.clip, self.bits.share(self.expected, entropy))
            self.bits = None

    def describe(self) -> str:
        """Return the clip norm, or how it moves."""
        if self.adaptive is None:
            return f"every update clipped to L2 norm {self.clip:g}"
        return (
            f"every update clipped to an L2 norm that follows the {self.adaptive.quantile:g}-quantile of the norms, "
            f"now {self.clip:g}; the share within it is released with noise, as part of each round's event"
        )

    def said(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return the noise of the sum alone, which is more than what sum and bits together are accounted with."""
        if self.adaptive is None:
            return {}
        together = f"with a count of norm bits, together of noise multiplier {self.noise_multiplier:g}"
        return {"name": f"{type(mechanism).__name__} {together}", "noise_multiplier": mechanism.noise_multiplier}

    def describe_settings(self) -> str:
        """Return the clip norm, or the parameters by which it moves."""
        return repr(self.adaptive or self.clip)
