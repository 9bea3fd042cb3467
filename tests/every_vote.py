"""All votes there are, where there are few enough to try them all, and all neighbours they make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def every_vote(d: int, k: int) -> list[NDArray[np.int8]]:
    """Return all vectors in {-1, 0, 1}^d with at most ``k`` entries that are not zero."""
    found = []
    for count in range(k + 1):
        for support in itertools.combinations(range(d), count):
            for signs in itertools.product((-1, 1), repeat=count):
                vote = np.zeros(d, np.int8)
                vote[list(support)] = signs
                found.append(vote)
    return found


def neighbours(base: Sequence[Any], units: Sequence[Any], adjacency: str) -> list[tuple[list[Any], list[Any]]]:
    """Return all pairs of neighbouring data sets made of ``base`` and one of ``units``: it is there or not, or with
    ``"replace"`` one against another."""
    if adjacency == "replace":
        return [([*base, a], [*base, b]) for a, b in itertools.combinations(units, 2)]
    return [([*base], [*base, unit]) for unit in units]
