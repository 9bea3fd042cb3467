"""Entropy coding of values: whether an rANS stream is shorter than fixed-width fields."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.wire.errors import Corrupt
from fedcomp.wire.rans import TOTAL, least_bytes, pack_rans

CODED: Final = b"\x01"
"""The parameter that says so, behind those of the value codec."""

CODED_FROM: Final = 4096
"""Values from which it is tried: below, the table of frequencies takes what the code saves. No part of the format."""


def shorter(numbers: NDArray[Any], size: int) -> bytes | None:
    """Return non-negative integers as a stream of rANS that is at least a byte shorter than ``size`` with the byte of
    its parameter; None where there is none."""
    if numbers.size < CODED_FROM or int(numbers.max()) >= TOTAL:
        return None
    return pack_rans(numbers.astype(np.uint16, copy=False), size - 1)


def coded_bounds(name: str, params: bytes, k: int, fixed: int) -> tuple[int, int]:
    """Return the least and largest length of k values in ``fixed`` bytes of fields, or entropy-coded.

    Raises
    ------
    Corrupt
        When the parameters say neither.
    """
    if not params:
        return fixed, fixed
    if params != CODED or k == 0:
        raise Corrupt(
            f"codec {name!r} knows no parameters but 01 (entropy-coded), found {params.hex()!r} for {k} values"
        )
    # The encoder takes a stream only where it is shorter.
    return min(least_bytes(k), fixed), fixed
