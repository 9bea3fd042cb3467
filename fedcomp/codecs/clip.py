"""Clipping by Euclidean norm, before memory and selection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp.codecs import params
from fedcomp.codecs.base import State, require_finite
from fedcomp.codecs.chain import Transform
from fedcomp.layout import Update
from fedcomp.rng import Key

_BLOCK = 1 << 16


@dataclass(frozen=True, repr=False)
class Clip(Transform):
    """Scale an update down to Euclidean norm ``max_norm`` when it is longer.

    Parameters
    ----------
    max_norm : float
        Positive and finite. Zero vectors and shorter ones pass unchanged, without a copy.
    """

    transform_id: ClassVar[str] = "clip"

    max_norm: float

    def __post_init__(self) -> None:
        params.assign(self, max_norm=params.positive("max_norm", self.max_norm))

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
        return Update(update.vector * np.float32(self.max_norm / length), update.layout), state


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm, summed in float64 by blocks: float32 sums over millions are off in the third digit."""
    total = 0.0
    for start in range(0, vector.size, _BLOCK):
        block = vector[start : start + _BLOCK].astype(np.float64)
        total += float(block @ block)
    return math.sqrt(total)
