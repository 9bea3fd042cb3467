"""Natural compression: stochastic rounding to a power of two, nine bits (Horváth et al. 2019; recalled).

S. Horváth, C.-Y. Ho, L. Horváth, A. N. Sahu, M. Canini, P. Richtárik, arXiv:1905.10988.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import wire
from fedcomp.codecs.positional import PositionalCodec, Stretch
from fedcomp.errors import NonFiniteUpdate
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.wire import Tensor

_BLOCK = 1 << 16
_TOP = 2.0**127


@dataclass(frozen=True, repr=False, eq=False)
class NaturalCompression(PositionalCodec):
    """Send the sign and exponent of every coordinate, rounded stochastically so that the mean is exact.

    A magnitude ``a · 2^e`` with a in [1, 2) becomes ``2^(e+1)`` with probability a - 1, else ``2^e``. The relative
    variance is (a - 1)(2 - a)/a², at most 1/8, reached at a = 4/3 (derived). Powers of two and zeros arrive exactly.

    Unbiasedness holds for every value that is accepted, with probabilities that are exact and not merely close:

    - subnormal values go to 0 or to 2⁻¹²⁶, the smallest normal number; their mean is right, but 1/8 does not bound
      their variance, only 2⁻²⁵⁴/4 does;
    - magnitudes above 2¹²⁷ = 1.7e38 would have to become 2¹²⁸ at times, which float32 does not hold: they are refused.

    It has no parameters: each coordinate is rounded independently of its tensor.

    Examples
    --------
    >>> NaturalCompression().preview([0.5, -3.0, 1.0, 0.25])
    array([ 0.5 , -2.  ,  1.  ,  0.25], dtype=float32)
    """

    codec_id: ClassVar[str] = "natural"
    unbiased = True
    complete = wire.Natural

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the dense tensor of signs and exponents.

        Raises
        ------
        NonFiniteUpdate
            For magnitudes above 2¹²⁷.
        """
        # Two reductions instead of an absolute value, which would copy the vector.
        largest = float(max(values.max(), -values.min()))
        if largest > _TOP:
            raise NonFiniteUpdate(
                f"{stretch.name} reaches {largest:g}, but magnitudes above 2**127 cannot be rounded up without bias; "
                "nothing was sent. Lower the learning rate or clip gradients before communicating"
            )
        codes = np.empty(values.size, np.uint16)
        # One stream serves all blocks: together the draws are the top 23 bits of key.bits(n).
        stream = key.generator().bit_generator
        for start in range(0, values.size, _BLOCK):
            word = values[start : start + _BLOCK].view(np.uint32)
            drawn = (np.asarray(stream.random_raw(word.size), np.uint64) >> np.uint64(41)).astype(np.uint32)
            # Mantissa plus 23 random bits carries into the exponent with probability mantissa / 2**23, exactly; from
            # exponent 0, the subnormal numbers, into exponent 1.
            drawn += word & np.uint32(0x7FFFFFFF)
            drawn >>= np.uint32(23)
            drawn |= word >> np.uint32(31) << np.uint32(8)
            codes[start : start + _BLOCK] = drawn
        return Tensor(wire.Natural(codes), (stretch.size,))

    def variance(self, layout: Layout) -> float:
        """Return 1/8, reached by vectors of 4/3 times powers of two. Subnormal values are excepted."""
        return 0.125
