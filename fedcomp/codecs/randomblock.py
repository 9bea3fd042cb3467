"""Random block: consecutive coordinates from a uniformly drawn start, wrapping around at the end of the vector.

Proposed in N. Foroutan Eghlidi, M. Jaggi, "Sparse Communication for Training Deep Networks", arXiv:2009.09271 (abstract
read); block length, wrapping and the shared draw as in the public code of the same laboratory's PowerSGD (read).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp.codecs.positional import SCOPES, Stretch
from fedcomp.codecs.randomk import RandomK
from fedcomp.params import to_float
from fedcomp.rules import OneOf
from fedcomp.wire.support import BLOCK


@dataclass(frozen=True, repr=False, eq=False)
class RandomBlock(RandomK):
    """Send ``b = max(1, floor(density * n))`` consecutive coordinates from a uniformly random start.

    The block wraps around at the end, so that every coordinate has the same probability b/n. A seed of eight bytes
    determines its start. The expectations are those of :class:`~fedcomp.codecs.RandomK` with k = b.

    Parameters
    ----------
    density : float
        Fraction of coordinates that travels, in (0, 1]; b is rounded down, where k of other codecs is rounded up.
    unbiased : bool
        Scale the values by n/b, which makes the decoded vector unbiased with ω = n/b - 1, both exact. Unscaled, the
        expected error is exactly (1 - b/n)‖x‖². Scaled values do not belong under error feedback.
    scope : {"global", "layer"}
        One block of the whole model, or one per tensor (the authors').
    shared : bool
        One block for all clients, drawn from (seed, round, layer); else the partition is part of the draw.

    Examples
    --------
    >>> RandomBlock(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([0.5 , 0.  , 0.  , 0.25], dtype=float32)
    """

    codec_id: ClassVar[str] = "randomblock"
    algorithm: ClassVar[int] = BLOCK

    scope: Annotated[str, OneOf(*SCOPES)] = "layer"

    def count(self, stretch: Stretch) -> int:
        """Return b of ``stretch``: the floor of the number the density was meant as, so that 0.29 of 100 is 29."""
        density = to_float(self.density if stretch.density is None else stretch.density)
        numerator, denominator = density.as_integer_ratio()
        b = numerator * stretch.size // denominator
        # The float nearest to 0.29 lies below it, and so does its exact product with 100; but 29 / 100 rounds to that
        # float.
        above = b < stretch.size and (b + 1) / stretch.size <= density
        return max(1, b + 1 if above else b)
