"""Clipping by Euclidean norm, before error feedback and selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp.codecs.base import State, norm, require_finite
from fedcomp.codecs.chain import Transform
from fedcomp.layout import Update
from fedcomp.rng import Key
from fedcomp.rules import Positive


@dataclass(frozen=True, repr=False)
class Clip(Transform):
    """Scale an update down to Euclidean norm ``max_norm`` when it is longer.

    The bound is strict: the norm of the float32 result, summed in float64, never exceeds ``max_norm``, so that it is a
    sensitivity. The price is at most a few units in the last place of length.

    Parameters
    ----------
    max_norm : float
        Positive and finite. Zero vectors and shorter ones pass unchanged, without a copy.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.codecs import Identity, chain
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> update = Update(np.float32([3, 4]), Layout.flat(2))
    >>> codec = chain(Clip(max_norm=2.5), Identity())
    >>> frame, state = codec.encode(update, codec.init(update.layout), Key(0))
    >>> codec.decode(frame, update.layout).round(3)
    array([1.5, 2. ], dtype=float32)
    """

    transform_id: ClassVar[str] = "clip"
    never_enlarges = True

    max_norm: Positive

    def apply(self, update: Update, state: State, key: Key) -> tuple[Update, State]:
        """Return the clipped update (a new vector only when it was too long).

        Raises
        ------
        NonFiniteUpdate
            Before anything else: a clipped infinity would look harmless.
        """
        require_finite(update)
        length = norm(update.vector)
        if length <= self.max_norm:
            return update, state
        # Rounding a million products can lengthen their sum; the margin covers that of any float64 summation.
        limit = self.max_norm * (1.0 - 2.0**-40)
        scale = np.float32(self.max_norm / length)
        # Half a unit in the last place of the scale, doubled until it suffices: hardly more length is lost than has to
        # be.
        step = 2.0**-24
        while norm(clipped := update.vector * scale) > limit:
            scale = np.float32(float(scale) * (1.0 - step))
            step *= 2.0  # subnormal products need large steps; step 1 ends at zero
        return Update(clipped, update.layout), state
