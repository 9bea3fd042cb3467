"""Threshold: send every coordinate above a fixed magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, Stretch
from fedcomp.kernels import select_above
from fedcomp.layout import Vector
from fedcomp.rng import Key
from fedcomp.rules import OneOf, Positive
from fedcomp.wire import Tensor


@dataclass(frozen=True, repr=False, eq=False)
class Threshold(ListedCodec):
    """Send every coordinate x with ``|x| > level``.

    The number sent depends on the data; if it is zero, the frame is empty. The bound on the error is absolute, ``level²
    n`` per stretch of n coordinates, besides what fp16 and bf16 lose: no contraction. The selection is the exact top-k
    for the resulting k.

    Parameters
    ----------
    level : float
        The magnitude, positive. It is compared as a float32: the largest that does not exceed it.
    scope : {"global", "layer"}
        One tensor of the frame for the whole model, or one per tensor. The same coordinates travel.
    values, rest, index : str
        As of :class:`~fedcomp.codecs.TopK`.

    Examples
    --------
    >>> Threshold(level=0.75).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "threshold"
    finds_non_finite = True
    takes_densities = False

    level: Positive
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def most(self, stretch: Stretch) -> int:
        """Return the size of ``stretch``: everything may exceed the level."""
        return stretch.size

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        indices = select_above(values, float32_below(self.level))
        return self.listed(indices, values[indices], stretch)


def float32_below(value: float) -> float:
    """Return the largest finite float32 that does not exceed ``value >= 0``: comparing with it is comparing with
    ``value``."""
    near = np.float32(min(value, float(np.finfo(np.float32).max)))
    # Compared as Python floats: numpy would round the value to float32 first.
    return float(np.nextafter(near, np.float32(0.0)) if float(near) > value else near)
