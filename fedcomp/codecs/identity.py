"""The identity codec: sends the whole update unchanged, the reference for every saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcomp import wire
from fedcomp.codecs.positional import PositionalCodec, Stretch
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.wire import Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Identity(PositionalCodec):
    """Send the whole vector as raw float32. Lossless and linear; contraction 1, variance 0.

    Examples
    --------
    >>> Identity().preview([0.5, -3.0, 1.0, 0.25])
    array([ 0.5 , -3.  ,  1.  ,  0.25], dtype=float32)
    """

    codec_id: ClassVar[str] = "identity"
    lossless = True
    linear = True
    unbiased = True
    never_enlarges = True
    wide = True
    complete = wire.Raw

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return one stretch over everything: nothing is left for the dense rest, whatever the policy asks."""
        return (Stretch(0, "the vector", 0, layout.size),) if layout.size else ()

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        return wire.dense(values)

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype: nothing is rounded."""
        return dtype

    def contraction(self, layout: Layout) -> float:
        """Return 1: nothing is lost."""
        return 1.0

    def variance(self, layout: Layout) -> float:
        """Return 0: nothing is random."""
        return 0.0
