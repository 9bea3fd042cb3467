"""TernGrad: stochastic rounding to -s, 0 or +s, with s the largest magnitude (Wen et al. 2017; recalled).

W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, NIPS 2017, arXiv:1705.07878.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedcomp import params, wire
from fedcomp.codecs.positional import SCOPES, PositionalCodec, Stretch
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import NotNegative, OneOf
from fedcomp.wire import Tensor

_BLOCK = 1 << 16


@dataclass(frozen=True, repr=False, eq=False)
class TernGrad(PositionalCodec):
    """Send ``s · sign(x)`` with probability ``|x| / s`` and 0 otherwise; s is the stretch's largest magnitude.

    Without clipping it is unbiased. The error's mean is exactly ``s‖x‖₁ - ‖x‖²`` per stretch, at most
    ``(√n - 1)/2 · ‖x‖²``, reached by ``(1, a, ..., a)`` with ``a = 1/(1 + √n)`` (derived). Probabilities hold to 2⁻⁵²,
    which moves the mean of a coordinate by at most 2⁻⁵² s.

    With ``clip = c > 0`` magnitudes above c standard deviations of their stretch are cut to that first, as the paper
    does with c = 2.5. This is **biased**: the mean of what arrives is the clipped vector ``sign(x) · min(|x|, c σ)``,
    not x. It is the large coordinates that lose, for good, however many clients are averaged. ``unbiased`` is then
    False and no variance is declared.

    Neither form declares a contraction: the relative error is about 1 and more. Error feedback still delivers in time
    what is clipped; around either form the memory of a constant update (5000 values, normal or t(4), 2000 rounds)
    levelled off at 24 to 27 times that update (measured).

    Parameters
    ----------
    clip : float
        c, in standard deviations (about the mean, over n); 0 does not clip. Nor is a stretch of equal values clipped,
        whose deviation is 0.
    scope : {"layer", "global"}
        One s per tensor, or for the whole model: the largest value of any tensor then adds variance to all.

    Examples
    --------
    >>> TernGrad().preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  0.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "terngrad"
    complete = wire.Ternary
    takes_densities = False

    clip: NotNegative = 0.0
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, unbiased=self.clip == 0.0)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        # The absolute value is for zeros alone: -0.0 and 0.0 would make two frames of the same vector.
        scale = np.abs(np.maximum(values.max(), -values.min()))
        if self.clip and (deviation := _deviation(values)):
            scale = np.float32(min(float(scale), self.clip * deviation))
        trits = np.zeros(values.size, np.int8)
        if scale > 0.0:
            # One stream serves all blocks: together the draws are key.uniform(n).
            stream = key.generator().bit_generator
            for start in range(0, values.size, _BLOCK):
                part = values[start : start + _BLOCK]
                draws = (np.asarray(stream.random_raw(part.size), np.uint64) >> np.uint64(11)) * 2.0**-53
                # At the scale and beyond the quotient is 1 or more, and every draw lies below 1.
                sent = draws < np.abs(part).astype(np.float64) / float(scale)
                trits[start : start + _BLOCK] = np.where(sent, np.sign(part), 0.0)
        return Tensor(wire.Ternary(trits, float(scale)), (stretch.size,))

    def variance(self, layout: Layout) -> float | None:
        """Return ``(√n - 1)/2`` for the largest stretch; None with clipping, which is biased."""
        if self.clip:
            return None
        return (math.sqrt(max((s.size for s in self.stretches(layout)), default=1)) - 1.0) / 2.0


def _deviation(values: Vector) -> float:
    """Return the standard deviation about the mean, in two passes in float64 by blocks."""
    blocks = [values[i : i + _BLOCK] for i in range(0, values.size, _BLOCK)]
    mean = sum(float(b.sum(dtype=np.float64)) for b in blocks) / values.size
    return math.sqrt(sum(float(np.square(b.astype(np.float64) - mean).sum()) for b in blocks) / values.size)
