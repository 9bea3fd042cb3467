"""Levels in contexts by the package's own compiled file: the same bytes as the portable tier."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import _contexts  # type: ignore[attr-defined]  # written in C, and not there without a compiler
from fedcomp.kernels.portable_contexts import FIRST, RATES, WINDOWS, begun, costs, ended, finished, opened
from fedcomp.kernels.portable_contexts import magnitudes as magnitudes

_COST, _WRITE, _READ = range(3)
_ENDLESS: Final = 1 << 62
_NONE: Final = np.zeros(0, np.uint32)


def _code(mode: int, levels: NDArray[np.int32], shapes: NDArray[np.int64], top: int, most: int, *coder: Any) -> int:
    return int(_contexts.code(mode, levels, shapes, top, most, *coder, FIRST, RATES, WINDOWS, costs()))


def cost(levels: NDArray[np.int32], shapes: NDArray[np.int64], top: int) -> tuple[int, int]:
    """See :func:`fedcomp.kernels.portable_contexts.cost`."""
    state = begun(0)
    decisions = _code(_COST, levels, shapes, top, _ENDLESS, _NONE, state)
    return int(state[0]), decisions


def encode(levels: NDArray[np.int32], shapes: NDArray[np.int64], top: int) -> bytes:
    """See :func:`fedcomp.kernels.portable_contexts.encode`."""
    room = levels.size // 8 + 256
    while True:
        state, words = begun(0), np.empty(room, np.uint32)
        if _code(_WRITE, levels, shapes, top, _ENDLESS, words, state) >= 0:
            return finished(words, state)
        room *= 4


def decode(coded: bytes, shapes: NDArray[np.int64], top: int, most: int, out: NDArray[np.int32]) -> int:
    """See :func:`fedcomp.kernels.portable_contexts.decode`."""
    words, state = opened(coded)
    decisions = _code(_READ, out, shapes, top, most, words, state)
    return decisions if decisions < 0 or ended(coded, state) else -2


def quantise(values: NDArray[np.float32], inverse: np.float32) -> NDArray[np.int32]:
    """See :func:`fedcomp.kernels.portable_contexts.quantise`."""
    out = np.empty(values.size, np.int32)
    _contexts.quantise(values, float(inverse), _NONE, out)
    return out


def dithered(values: NDArray[np.float32], inverse: float, draws: NDArray[np.uint32]) -> NDArray[np.int32]:
    """See :func:`fedcomp.kernels.portable_contexts.dithered`."""
    out = np.empty(values.size, np.int32)
    _contexts.quantise(values, inverse, draws, out)
    return out
