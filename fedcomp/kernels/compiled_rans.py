"""Compiled kernels of interleaved rANS: the steps of the numpy tier, lane by lane.

The lanes do not depend on each other, so that a processor works at several of them at once; only the place in the
stream of words is common to them, and it moves by an addition instead of a branch that nobody could predict.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.interface import RANS_BITS, RANS_LEAST
from fedcomp.kernels.lanes import fixed, kernel

_MASK = (1 << RANS_BITS) - 1


@kernel
def _encode(symbols, table, starts, states, words):
    lanes = states.size
    left = words.size
    lane = (symbols.size - 1) % lanes
    for at in range(symbols.size - 1, -1, -1):
        symbol = symbols[at]
        state = states[lane]
        frequency = table[symbol]
        # Only a frequency of all slots shifts to 2**32, which no state reaches; 64 bits hold it.
        if np.uint64(state) >= np.uint64(frequency) << np.uint64(32 - RANS_BITS):
            left -= 1
            words[left] = state & np.uint32(0xFFFF)
            state >>= np.uint32(16)
        quotient = state // frequency
        states[lane] = np.uint32((quotient << np.uint32(RANS_BITS)) + (state - quotient * frequency) + starts[symbol])
        lane = lane - 1 if lane else lanes - 1
    return left


@kernel
def _decode(states, words, symbols, steps, out):
    # All counters are unsigned: numba would test signed ones for indices from the end, and LLVM then makes a branch of
    # what is a choice of two values here. Nobody can predict whether a lane takes a word (measured: 1.5 to 4 times).
    count = np.uint64(out.size)
    lanes = np.uint64(states.size)
    # Behind the words there is room for a row: a stream that is too short is noticed after it.
    end = np.uint64(words.size) - lanes
    taken = np.uint64(0)
    at = np.uint64(0)
    while at < count:
        if taken > end:
            return -1
        for lane in range(min(lanes, count - at)):
            state = states[lane]
            slot = np.uint64(state & np.uint32(_MASK))
            out[at + lane] = symbols[slot]
            step = steps[slot]
            state = np.uint32((step >> np.uint32(16)) * (state >> np.uint32(RANS_BITS)) + (step & np.uint32(0xFFFF)))
            more = np.uint32((state << np.uint32(16)) | np.uint32(words[taken]))
            low = state < np.uint32(RANS_LEAST)
            states[lane] = more if low else state
            taken += np.uint64(low)
        at += lanes
    return np.int64(taken)


def rans_encode(
    symbols: NDArray[np.uint16], table: NDArray[np.uint32], lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See :meth:`fedcomp.kernels.interface.Ops.rans_encode`."""
    states = np.full(lanes, RANS_LEAST, np.uint32)
    # No number takes more than one word.
    words = np.empty(symbols.size, np.uint16)
    starts = np.cumsum(table, dtype=np.uint32) - table
    left = _encode(fixed(symbols), fixed(table), fixed(starts), states, words)
    return states, words[left:]


def rans_decode(
    states: NDArray[np.uint32],
    words: NDArray[np.uint16],
    symbols: NDArray[np.uint16],
    steps: NDArray[np.uint32],
    count: int,
) -> NDArray[np.uint16] | None:
    """See :meth:`fedcomp.kernels.interface.Ops.rans_decode`."""
    out = np.empty(count, np.uint16)
    room = np.concatenate([words, np.zeros(states.size, np.uint16)])
    taken = _decode(states, fixed(room), fixed(symbols), fixed(steps), out)
    return out if taken == words.size and bool((states == RANS_LEAST).all()) else None
