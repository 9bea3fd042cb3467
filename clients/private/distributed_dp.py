"""The client half of distributed noise: a coded sum, to which every client adds its share of the noise.

The compression mod clips and rounds (:class:`fedcomp.privacy.bounded.BoundedFixedPoint`); what it remembers holds no
noise. Here the share is added to the integers, once for each update: a message that is delivered again, or that a
restarted server sends under another number, is answered with the integers that answered it before, since two answers
with different noise would tell more than one.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar, Final

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedcomp.clients.coded.sums import SumCodeClient
from fedcomp.codecs import FixedPoint
from fedcomp.coding.sumcode import SumPlan
from fedcomp.errors import StateError
from fedcomp.flower.coded import SumTraining
from fedcomp.flower.protocol import Announcement
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.entropy import make_entropy
from fedcomp.rng import Key

_NOISED: Final = "noised"
_SAME: Final = "same"


class NoisySumClient(SumCodeClient):
    """Answers the messages of a noisy sum."""

    hides_zeros: ClassVar[bool] = True

    def _integers(
        self, content: RecordDict, announcement: Announcement, asked: SumTraining, plan: SumPlan
    ) -> tuple[FixedPoint, NDArray[np.int64]]:
        """Return the codec, and the integers with this client's share of the noise.

        Raises
        ------
        StateError
            When the plan would show more than a noisy sum, show single shares to the server or to one relay, or allow
            sums with less noise than the share is made for.
        Unbounded
            When the integers are longer than the codec allows.
        """
        codec, integers = super()._integers(content, announcement, asked, plan)
        if not isinstance(codec, BoundedFixedPoint):
            raise StateError(f"a noisy sum is of integers of a bounded norm, the server announces {codec!r}")
        if plan.extras or plan.max_weight != 1 or asked.metrics or asked.weight:
            raise StateError("the plan asks for weights, metrics or counts beside the sum, which have no noise")
        if plan.threshold < 1 or plan.mode != "share" or not asked.keys:
            raise StateError("the shards of a noisy sum are sealed, and one of them says nothing of its vector")
        # With fewer contributors than the shares are made for, a sum would have less noise than was promised.
        if plan.least < codec.least:
            raise StateError(
                f"the share of noise is made for {codec.least} contributors, the plan allows sums of {plan.least}"
            )
        name, numbers, arrays = self._update_name(announcement), self.exchange.numbers, self.exchange.arrays
        same = _same(announcement, integers)
        # The same update again: a second noise on the same integers would let both be averaged. Where no reply is kept
        # it is trained again, and the same where round and integers are.
        if numbers.get(_NOISED) == name or numbers.get(_SAME) == same:
            return codec, arrays[_NOISED].astype(np.int64)
        key = Key(announcement.seed, "privacy/share", announcement.round, self.exchange.partition)
        entropy = make_entropy(key, insecure_deterministic=codec.insecure_deterministic)
        noised = codec.noised(integers, entropy)
        # Kept for the same update asked for again.
        numbers[_NOISED], numbers[_SAME], arrays[_NOISED] = name, same, noised.astype(np.int32)
        return codec, noised


def _same(announcement: Announcement, integers: NDArray[np.int64]) -> bytes:
    """Return a name of these integers in this round."""
    return announcement.session + b"/%d/" % announcement.round + hashlib.sha256(integers.tobytes()).digest()
