"""Compiled kernels of context-coded levels: the decisions of the portable tier, in words of 64 bits.

Encoder and decoder are one text, in which ``mode`` is a constant when it is compiled: what a decision does is
decided by the compiler, and nothing can drift apart.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.lanes import bit_length, fixed, kernel, part
from fedcomp.kernels.portable_contexts import (
    CLASSES,
    COLUMN_WINDOW,
    EARLY,
    FIRST,
    FLAGGED,
    HALF,
    HIGH,
    LEAST_COLUMN,
    LEAST_ROW,
    LOW,
    RATES,
    ROW_WINDOW,
    SHIFT,
    SIZES,
    TOP_BITS,
    WINDOWS,
)

_WRITE, _READ = range(2)
_FIRST = FIRST.reshape(-1)
_WORD = np.uint64(32)
_SIXTEEN = np.uint64(16)
_LEAST = np.uint64(1 << 32)
_HALF = np.uint64(HALF)


@part
def _decide(mode, low, span, at, words, one, known):
    """Return the coder's state after a decision, and the bit. ``low`` is the lower end or, when decoding, the distance
    of the number above it; ``one`` is the probability of a 1."""
    bound = (span >> _SIXTEEN) * one
    if mode == _READ:
        known = low < bound
        if known:
            span = bound
        else:
            low -= bound
            span -= bound
    elif known:
        span = bound
    else:
        raised = low + bound
        if raised < low:
            carried = at - 1
            while words[carried] == np.uint32(0xFFFFFFFF):
                words[carried] = np.uint32(0)
                carried -= 1
            words[carried] += np.uint32(1)
        low = raised
        span -= bound
    if span < _LEAST:
        if mode == _READ:
            low = low << _WORD | np.uint64(words[at] if at < words.size else np.uint32(0))
        else:
            words[at] = np.uint32(low >> _WORD)
            low <<= _WORD
        span <<= _WORD
        at += 1
    return low, span, at, known


@part
def _learn(ones, counts, place, bit):
    one = np.int64(ones[place])
    count = counts[place]
    ones[place] = np.uint16(one + ((((HIGH if bit else LOW) - one) * RATES[count]) >> 16))
    counts[place] = count + np.uint8(count < 255)


@part
def _code(mode, levels, shapes, top, most, words, state):
    """Code ``levels``; ``state`` holds low, span and the position in the words, before and after. Return the number of
    decisions, -1 for more than ``most``, -2 for a row of zeros without a flag, -3 if the words are full."""
    ones, counts = _FIRST.copy(), np.zeros(_FIRST.size, np.uint8)
    below, used = np.full(3 * SIZES, TOP_BITS, np.uint16), np.zeros(3 * SIZES, np.uint8)
    flags, seen = np.full(2, HALF, np.uint16), np.zeros(2, np.uint8)
    low, span, place = state[0], state[1], np.int64(state[2])
    widest = 0
    for t in range(shapes.shape[0]):
        widest = max(widest, shapes[t, 1])
    means = np.empty(widest, np.int32)
    mean, flag, at, decisions = np.int64(64), 0, np.int64(0), np.int64(0)
    for t in range(shapes.shape[0]):
        rows, columns = shapes[t, 0], shapes[t, 1]
        means[:columns] = mean
        for row in range(rows):
            window = WINDOWS[min(row + 2, COLUMN_WINDOW)]
            if columns >= FLAGGED:
                bit = True
                if mode != _READ:
                    for j in range(at, at + columns):
                        if levels[j] != 0:
                            bit = False
                            break
                low, span, place, bit = _decide(mode, low, span, place, words, np.uint64(flags[flag]), bit)
                _learn(flags, seen, flag, bit)
                decisions += 1
                flag = 1 if bit else 0
                if decisions > most:
                    return np.int64(-1)
                if mode == _WRITE and place + 16 > words.size:
                    return np.int64(-3)
                if bit:
                    if mode == _READ:
                        levels[at : at + columns] = 0
                    for j in range(columns):
                        means[j] -= (means[j] * window) >> 16
                    mean = max(np.int64(1), mean - (mean >> 4))
                    at += columns
                    continue
            along = mean
            empty = columns >= FLAGGED
            for column in range(columns):
                over = np.int64(means[column])
                context = SIZES * (
                    CLASSES * min(max(bit_length(along), LEAST_ROW), CLASSES - 1)
                    + min(max(bit_length(over), LEAST_COLUMN), CLASSES - 1)
                )
                known = np.int64(0)
                if mode != _READ:
                    known = np.int64(levels[at])
                magnitude = abs(known)
                length = bit_length(magnitude)
                size = 0
                while size < top:
                    one = np.uint64(ones[context + size])
                    low, span, place, bit = _decide(mode, low, span, place, words, one, length > size)
                    _learn(ones, counts, context + size, bit)
                    if not bit:
                        break
                    size += 1
                decisions += min(size + 1, top) + size
                if size:
                    found = np.int64(1)
                    for shift in range(size - 2, -1, -1):
                        bit = (magnitude >> shift) & 1 == 1
                        if found < 4:
                            i = 3 * size + found - 1
                            low, span, place, bit = _decide(mode, low, span, place, words, np.uint64(below[i]), bit)
                            _learn(below, used, i, bit)
                        else:
                            low, span, place, bit = _decide(mode, low, span, place, words, _HALF, bit)
                        found = 2 * found + (1 if bit else 0)
                    low, span, place, bit = _decide(mode, low, span, place, words, _HALF, known < 0)
                    if mode == _READ:
                        levels[at] = -found if bit else found
                    magnitude = found
                    empty = False
                elif mode == _READ:
                    levels[at] = 0
                scaled = magnitude << SHIFT
                along = max(np.int64(0), along + (((scaled - along) * WINDOWS[min(column + EARLY, ROW_WINDOW)]) >> 16))
                means[column] = max(np.int64(0), over + (((scaled - over) * window) >> 16))
                at += 1
                if decisions > most:
                    return np.int64(-1)
                # A level takes 13 words at most: 35 decisions of 11.5 bits.
                if mode == _WRITE and place + 16 > words.size:
                    return np.int64(-3)
            if empty:
                return np.int64(-2)
            mean = max(np.int64(1), mean + ((along - mean) >> 2))
    state[0], state[1], state[2] = low, span, np.uint64(place)
    return decisions


@kernel
def _encode(levels, shapes, top, most, words, state):
    return _code(_WRITE, levels, shapes, top, most, words, state)


@kernel
def _decode(levels, shapes, top, most, words, state):
    return _code(_READ, levels, shapes, top, most, words, state)


@kernel
def _quantise(values, inverse, out):
    for i in range(values.size):
        size = abs(values[i]) * inverse
        level = np.int32(size + np.float32(0.5))
        if size < np.float32(1.0):
            level = np.int32(size >= np.float32(0.6))
        out[i] = -level if values[i] < np.float32(0.0) else level


@kernel
def _dithered(values, inverse, draws, out):
    for i in range(values.size):
        out[i] = np.int32(math.floor(values[i] * inverse + (2.0 * draws[i] + 1.0) * 2.0**-25))


@kernel
def _magnitudes(bits, counts):
    for i in range(bits.size):
        counts[(bits[i] >> 16) & 0x7FFF] += 1


def code(
    writes: bool,
    levels: NDArray[np.int32],
    shapes: NDArray[np.int64],
    top: int,
    most: int,
    words: NDArray[np.uint32],
    state: NDArray[np.uint64],
    first: NDArray[np.uint16],
) -> int:
    """See :class:`fedcomp.kernels.contexts.Words`; ``first`` is a constant here."""
    return int((_encode if writes else _decode)(levels, fixed(shapes), top, np.int64(most), words, state))


def quantise(values: NDArray[np.float32], inverse: float, draws: NDArray[np.uint32], out: NDArray[np.int32]) -> None:
    """See :class:`fedcomp.kernels.contexts.Words`."""
    if draws.size:
        _dithered(fixed(values), inverse, fixed(draws), out)
    else:
        _quantise(fixed(values), np.float32(inverse), out)


def magnitudes(values: NDArray[np.float32], counts: NDArray[np.int64]) -> None:
    """See :class:`fedcomp.kernels.contexts.Words`."""
    _magnitudes(fixed(values).view(np.int32), counts)
