"""signSGD with majority vote: one bit per coordinate and client, summed as votes (Bernstein et al. 2018; recalled).

J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, ICML 2018, arXiv:1802.04434. Clients send signs, the server
takes the sign of their sum. The paper's clients send signs of stochastic gradients; here they are signs of whole local
updates, and the majority is weighted as the mean would be (both ours).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedcomp import wire
from fedcomp.codecs.positional import SCOPES, PositionalCodec, Stretch
from fedcomp.layout import Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import OneOf, Real
from fedcomp.wire import SchemaMismatch, Tensor

_BLOCK = 1 << 16
_TIE = np.float32(2.0**-13)
_SMALLEST, _LARGEST = 2.0**-149, float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False, eq=False)
class SignSGD(PositionalCodec):
    """Send the sign of every coordinate; the update is ``step`` times the sign of the majority.

    :meth:`decode` returns one client's votes, +1 and -1. :meth:`conclude` turns the weighted sum of all votes into the
    update. A vote has the weight that the client's update would have in the mean: with equal numbers of examples every
    client has one vote.

    The bit is the float's sign bit, so ``vote(-x) = -vote(x)`` holds for every vector. There is no third state: +0.0
    votes +, and a coordinate that no client touches (the weights of a dead unit, an unused embedding) rises by ``step``
    each round. Only a stretch that is zero throughout abstains.

    Ties give 0. The weights sum to 1 and are added in float32, where as many votes for as against need not cancel (six
    clients of weight 1/6 leave up to 3e-8; measured). Sums within 2⁻¹³ therefore are ties: for up to 4000 clients
    rounding stays below that, and a majority of one vote lies above (derived). With unequal weights a majority of less
    than 1/8192 of the total is a tie, too.

    The codec is biased and no contraction: signs forget all magnitudes, small coordinates move as far as large ones.
    Error feedback around it makes no sense, because votes and updates have different units, and is refused;
    :class:`~fedcomp.codecs.ScaledSign` is the form with a magnitude. What the layout sends dense is averaged as always.

    Parameters
    ----------
    step : float
        Change of every coordinate per round, positive: the server's learning rate.
    scope : {"global", "layer"}
        The unit that abstains when it is zero: the whole compressed part, or a tensor. The bits are the same.

    Examples
    --------
    >>> SignSGD(step=0.01).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0.01, -0.01,  0.01,  0.01], dtype=float32)
    """

    codec_id: ClassVar[str] = "signsgd"
    votes = True
    complete = wire.SignScale
    takes_densities = False

    step: Annotated[float, Real(least=_SMALLEST, most=_LARGEST)]
    scope: Annotated[str, OneOf(*SCOPES)] = "global"

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the dense tensor of sign bits; its scale is 1, or 0 for an abstention."""
        scale = np.full(1, values.any(), np.float32)
        return Tensor(wire.SignScale(np.signbit(values), scale), (stretch.size,))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require signs with one scale of 1 or 0: nobody has more than one vote."""
        super().check(tensor, stretch)
        coded = tensor.values
        assert isinstance(coded, wire.SignScale)
        if coded.block or coded.scales[0] not in (0.0, 1.0):
            raise SchemaMismatch(
                f"{stretch.name}: expected votes of weight 1 or an abstention of weight 0, the frame holds "
                f"{coded.scales.size} scale(s), first {coded.scales[0]:g}"
            )

    def conclude(self, total: Update) -> None:
        """Replace the votes in ``total``, summed with weights that sum to 1, by ``step`` times their sign, in place."""
        step = np.float32(self.step)
        # What comes after has travelled dense: it is a mean already, not a sum of votes.
        votes = total.vector[: total.layout.compressed_size]
        for start in range(0, votes.size, _BLOCK):
            block = votes[start : start + _BLOCK]
            block[:] = np.where(np.abs(block) > _TIE, np.copysign(step, block), np.float32(0.0))
