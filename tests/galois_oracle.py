"""galois as the oracle of GF(2^8)."""

from __future__ import annotations

import functools
from typing import Any

from numpy.typing import ArrayLike


def gf256(elements: ArrayLike) -> Any:
    """Return ``elements`` as an array of galois over x^8 + x^4 + x^3 + x^2 + 1."""
    return _field()(elements)


@functools.cache
def _field() -> Any:
    # galois compiles for a second when a field is named. Every worker imports all tests, and few workers run these.
    import galois

    return galois.GF(2**8)
