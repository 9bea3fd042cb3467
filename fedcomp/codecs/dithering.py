"""Random dithering: stochastic rounding to a few levels of the largest magnitude, the quantiser of LEAD (recalled).

X. Liu, Y. Li, R. Wang, J. Tang, M. Yan, "Linear Convergent Decentralized Optimization with Compression", ICLR 2021:
the b-bit quantiser with the norm p = ∞. :class:`~fedcomp.codecs.QSGD` is the same with the Euclidean norm of buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.positional import PositionalCodec, Stretch
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import Int
from fedcomp.wire import SchemaMismatch, Tensor
from fedcomp.wire.quantised import round_up

_TINY: Final = float(np.finfo(np.float32).tiny)
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False, eq=False)
class Dithering(PositionalCodec):
    """Send ``‖x‖∞ 2^-(b-1) sign(x) floor(2^(b-1) |x| / ‖x‖∞ + u)`` with u uniform in [0, 1) per coordinate: unbiased.

    u is drawn from the key. The norm is rounded *up* to float32, so that no coordinate lies beyond the last level; what
    arrives is rounded to float32 once. At most ``4 + ceil(n (b + 1) / 8)`` bytes of values: a level needs b bits, as
    level ``2^(b-1)`` occurs, and its sign one; in frames levels are entropy-coded where that is shorter, as QSGD's are.
    Sections without a frame (gossip) have this length in any case. A vector whose norm is below 1.2e-38 is sent as
    zeros.

    Parameters
    ----------
    bits : int
        b, from 1 (ternary) to 16.

    Examples
    --------
    >>> Dithering(bits=2).preview([0.5, -3.0, 1.0, 0.25])
    array([ 1.5, -3. ,  1.5,  0. ], dtype=float32)
    """

    codec_id: ClassVar[str] = "dithering"
    unbiased = True
    wide = True
    complete = wire.QsgdLevels

    bits: Annotated[int, Int(1, 16)] = 2

    @property
    def levels(self) -> int:
        """Positive levels: ``2^(b-1)``."""
        return 1 << (self.bits - 1)

    def pack(self, values: NDArray[Any], stretch: Stretch, key: Key) -> Tensor:
        magnitudes = np.abs(values).astype(np.float64)
        norm = _round_up(float(magnitudes.max()))
        levels = np.zeros(values.size, np.int32)
        if norm:
            # Beyond the largest float32 a magnitude exceeds the norm.
            drawn = np.floor(magnitudes / norm * self.levels + key.uniform(values.size))
            levels = np.minimum(drawn, self.levels).astype(np.int32)
            np.negative(levels, out=levels, where=values < 0.0)
        coded = wire.QsgdLevels(levels, self.levels, 0, np.full(1, norm, np.float32))
        return Tensor(coded, (stretch.size,))

    def form(self) -> dict[str, int]:
        """Return levels, one norm for all, and that without a frame every level has as many bits."""
        return {"levels": self.levels, "bucket": 0, "fixed": 1}

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        super().check(tensor, stretch)
        coded = tensor.values
        assert isinstance(coded, wire.QsgdLevels)
        if (coded.s, coded.bucket) != (self.levels, 0):
            raise SchemaMismatch(
                f"{stretch.name}: expected {self.levels} levels of one norm, got {coded.s} in buckets of {coded.bucket}"
            )

    def contraction(self, layout: Layout) -> float | None:
        """Return ``1 - n / 4^b`` where that is positive, else None.

        A step is ``‖x‖∞ / 2^(b-1)``, the variance of rounding at most a quarter of its square, and ``‖x‖∞ <= ‖x‖``
        (derived; the norm's rounding adds 2⁻²³ to the step).
        """
        kept = 1.0 - self.variance(layout)
        return kept if kept > 0.0 else None

    def variance(self, layout: Layout) -> float:
        """Return ``n / 4^b`` of the longest stretch."""
        n = max((s.size for s in self.stretches(layout)), default=0)
        # The last factor covers what rounding the norm and the decoded values to float32 adds.
        return n * 4.0**-self.bits * (1.0 + 2.0**-20)


def _round_up(norm: float) -> float:
    """Return the smallest float32 that is not below ``norm``, limited to the largest float32; 0 below the normal
    numbers."""
    if norm < _TINY:
        return 0.0
    return min(float(round_up(np.array(min(norm, _LARGEST)))), _LARGEST)
