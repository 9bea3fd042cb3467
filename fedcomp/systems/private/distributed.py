"""Distributed noise: every client adds a share of the noise, and the server decodes a sum that is already private.

The coded sum (:mod:`fedcomp.systems.coded.sums`) of integers of a bounded norm. Everybody weighs the same, no metric
and no count of cut values travels, and the sum is divided by the number of clients that are asked, which is public.
With fewer contributors than the noise was dimensioned for relays do not add, and nothing was released. What is
remembered holds what was clipped and rounded off, never noise. Whoever drives the round pays between the freezing of
the set and the first ask for its sum (:class:`~fedcomp.systems.coded.sums.AddUp`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.prime import PrimeField
from fedcomp.coding.sumcode import Summed, SumPlan
from fedcomp.errors import StateError
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.entropy import make_entropy
from fedcomp.program import Frames, Me, Released
from fedcomp.rng import Key
from fedcomp.rules import Int
from fedcomp.systems.coded.sums import CodedSum, ShareUp

NOISED: Final = "noisy-sum"
"""What a node keeps: the integers that it shared last, with their noise, after a name of those without."""

_NAME: Final = 32
"""Bytes of that name."""


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class NoisySum(CodedSum, id="noisy-sum"):
    """The server learns only a noisy sum, once per round.

    Parameters
    ----------
    contributors : int
        Number of clients asked per round: public, and the divisor of sums.
    others
        As of :class:`fedcomp.systems.coded.sums.CodedSum`; the codec is, or holds, a
        :class:`fedcomp.privacy.bounded.BoundedFixedPoint`.

    Raises
    ------
    ConfigError
        For anything that would show more than the noisy sum.
    """

    RULES: ClassVar[tuple[type, ...]] = (Released,)
    hides_zeros: ClassVar[bool] = True

    contributors: Annotated[int, Int(1)]

    def conflict(self) -> str:
        if reason := super().conflict():
            return reason
        if not isinstance(self.fixed, BoundedFixedPoint):
            return f"a noisy sum is of integers of a bounded norm, {self.codec!r} has none; use DistributedDp(...)"
        # All of these would show the server something beside the sum that has no noise.
        if self.weight or self.metrics or self.mode != "share":
            return "a noisy sum has no weights and no metrics, and is not masked"
        if self.threshold < 1:
            return "a noisy sum needs threshold >= 1: one shard must say nothing of its vector"
        return ""

    def extras(self, prime: PrimeField, clients: int) -> tuple[int, ...]:
        """Return nothing: the number of cut values would be released as it is."""
        return ()

    def divisor(self, summed: Summed) -> float:
        """Return the public number of clients."""
        return float(self.contributors)

    def integers(
        self, integers: NDArray[np.int64], plan: SumPlan, say: ShareUp, me: Me
    ) -> tuple[NDArray[np.int64], Frames]:
        """Return the integers with this client's share of the noise, which the node keeps.

        Raises
        ------
        StateError
            When the plan would show more than a noisy sum, or allow sums with less noise than the share is made for.
        Unbounded
            When the integers are longer than the codec allows.
        """
        fixed = self.fixed
        assert isinstance(fixed, BoundedFixedPoint)
        if plan.extras or plan.max_weight != 1 or say.weight:
            raise StateError("the plan asks for weights or counts beside the sum, which have no noise")
        if plan.threshold < 1 or plan.mode != "share":
            raise StateError("a shard of a noisy sum must not reveal its vector; the plan has no random pieces")
        # With fewer contributors than the shares are made for, a sum would have less noise than was promised.
        if plan.least < fixed.least:
            raise StateError(
                f"the share of noise is made for {fixed.least} contributors, the plan allows sums of {plan.least}"
            )
        name = hashlib.sha256(me.run + b"/%d/" % me.number + integers.tobytes()).digest()
        kept = bytes(me.kept.get(NOISED, b""))
        # The same update again, of a round that is made again: a second noise on the same integers would let both be
        # averaged.
        if kept[:_NAME] == name and len(kept) == _NAME + 4 * integers.size:
            return np.frombuffer(kept, np.int32, offset=_NAME).astype(np.int64), {NOISED: kept}
        key = Key(me.seed, "privacy/share", me.number, me.node)
        noised = fixed.noised(integers, make_entropy(key, insecure_deterministic=fixed.insecure_deterministic))
        return noised, {NOISED: name + noised.astype(np.int32).tobytes()}


def shared_only(config: Any) -> bool:
    """Whether a system, as it is announced, would send integers before they get their noise."""
    if not isinstance(config, Mapping) or config.get("id") == NoisySum.ID:
        return False
    # Systems and codecs nest: one that must not leave may stand inside another.
    inside = [value for value in config.values() if isinstance(value, Mapping)]
    return config.get("id") == BoundedFixedPoint.codec_id or any(map(shared_only, inside))
