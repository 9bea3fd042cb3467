"""All votes there are, where there are few enough to try them all."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


def every_vote(d: int, k: int, least: int = 0) -> list[NDArray[np.int8]]:
    """Return all vectors in {-1, 0, 1}^d with ``least`` to ``k`` entries that are not zero."""
    found = []
    for count in range(least, k + 1):
        for support in itertools.combinations(range(d), count):
            for signs in itertools.product((-1, 1), repeat=count):
                vote = np.zeros(d, np.int8)
                vote[list(support)] = signs
                found.append(vote)
    return found
