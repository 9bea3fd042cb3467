"""Context coding of matrix levels by a range coder with probabilities from rows and columns: the reference.

Plain integers, of any length: no word overflows here, and no carry has to go anywhere. The compiled tiers give the same
bytes. Everything in this file is part of the format and may never change; nothing in it is a floating-point number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_BITS: Final = 17
"""Bits of the largest level."""

CLASSES: Final = 20
"""Classes of a running mean: its bit length."""

SIZES: Final = MOST_BITS + 1
"""Probabilities of a context: that a level has more than 0, 1, ... bits."""

SHIFT: Final = 8
"""Bits of a running mean below those of a level."""

LEAST_ROW: Final = 4
"""The lowest class of the mean of a row."""

LEAST_COLUMN: Final = 2
"""The lowest class of the mean of a column."""

HIGH: Final = 65_512
"""Where probabilities stop, over 65536: above, and below at :data:`LOW`."""

LOW: Final = 24

HALF: Final = 32_768
TOP_BITS: Final = 28_768
"""The probability with which the bits below the leading one begin to be 1."""

FLAGGED: Final = 8
"""Columns from which on a row has a flag that says whether all of it is zero."""

RATES: Final = np.array([655_360 // (10 * count + 16) for count in range(256)], np.int64)
"""By how often a probability was used: how far it moves, over 65536."""

WINDOWS: Final = np.array([0, *(65_536 // length for length in range(1, 65))], np.int64)
"""65536 over the length of a running mean."""

ROW_WINDOW: Final = 32
COLUMN_WINDOW: Final = 16
EARLY: Final = 4
"""How long the first mean of a row is."""

_FRACTION: Final = 96
_BLOCK: Final = 1 << 15

NONE: Final = np.zeros(0, np.uint32)
"""No draws: levels are rounded."""

PATTERNS: Final = 1 << 15
"""Of exponent and seven bits of mantissa, without the sign."""


def _first_probabilities() -> NDArray[np.uint16]:
    """Return the probabilities of all contexts at the start, shape (CLASSES * CLASSES, SIZES).

    Of levels of the geometric law whose mean is m, 2**((c - 1)/2) / 256 where the two classes of a context add up to c,
    a share r = m / (1 + m) is not 0, r of these has two bits and more, r**2 of these three, r**4 of these four, ...
    """
    one = 1 << _FRACTION
    table = []
    for c in range(2 * CLASSES - 1):
        mean = math.isqrt(1 << c - 1 + 2 * _FRACTION) >> SHIFT if c else 3 * one // (10 << SHIFT)
        share = (mean << _FRACTION) // (one + mean)
        row = [share]
        while len(row) < SIZES:
            row.append(share)
            share = share * share >> _FRACTION
        table.append([min(max(p << 16 >> _FRACTION, LOW), HIGH) for p in row])
    return np.array([table[k // CLASSES + k % CLASSES] for k in range(CLASSES * CLASSES)], np.uint16)


FIRST: Final = _first_probabilities()


class Writer:
    """A range coder of 64 bits, whose lower end is one integer of all bits written."""

    def __init__(self) -> None:
        self._low, self._range, self._words = 0, (1 << 64) - 1, 0

    def bit(self, one: int, known: bool) -> bool:
        """Write ``known``, a bit that is 1 with a probability of ``one`` over 65536; return it."""
        bound = (self._range >> 16) * one
        if known:
            self._range = bound
        else:
            self._low += bound
            self._range -= bound
        if self._range < 1 << 32:
            self._low <<= 32
            self._range <<= 32
            self._words += 1
        return known

    def end(self) -> bytes:
        """Return the bytes: those of the number of the last interval that ends in most zero bytes, without these."""
        return last_of(self._low, self._range).to_bytes(4 * self._words + 8, "big").rstrip(b"\0")


def last_of(low: int, span: int) -> int:
    """Return the number from ``low`` on and below ``low + span`` that ends in most zero bytes, of eight at most."""
    for cut in range(64, 0, -8):
        found = -(-low >> cut) << cut
        if found < low + span:
            return found
    return low


class Reader:
    """Reads what :class:`Writer` wrote, and zeros behind it."""

    def __init__(self, coded: bytes) -> None:
        self._coded = coded
        self._at = 8
        self._offset, self._range = int.from_bytes(coded[:8].ljust(8, b"\0"), "big"), (1 << 64) - 1

    def bit(self, one: int, known: bool) -> bool:
        """Read a bit that is 1 with a probability of ``one`` over 65536; ``known`` may be anything."""
        bound = (self._range >> 16) * one
        found = self._offset < bound
        if found:
            self._range = bound
        else:
            self._offset -= bound
            self._range -= bound
        if self._range < 1 << 32:
            word = int.from_bytes(self._coded[self._at : self._at + 4].ljust(4, b"\0"), "big")
            self._at += 4
            self._offset = self._offset << 32 | word
            self._range <<= 32
        return found

    def ended(self) -> bool:
        """Whether the bytes are exactly what a writer would have written."""
        return ended(self._coded, (self._offset, self._range, self._at // 4))


class _Adaptive:
    """Probabilities over 65536 that follow the bits they predicted."""

    def __init__(self, first: Sequence[int]) -> None:
        self.ones = list(first)
        self._counts = [0] * len(self.ones)

    def code(self, coder: Writer | Reader, place: int, known: bool) -> bool:
        one, count = self.ones[place], self._counts[place]
        bit = coder.bit(one, known)
        self.ones[place] = one + (((HIGH if bit else LOW) - one) * _RATES[count] >> 16)
        self._counts[place] = min(count + 1, 255)
        return bit


_RATES: Final = [int(rate) for rate in RATES]
_WINDOWS: Final = [int(window) for window in WINDOWS]


def code(coder: Writer | Reader, levels: list[int], shapes: Sequence[tuple[int, int]], top: int, most: int) -> int:
    """Code ``levels`` of matrices, one after the other by rows; return how many decisions that took.

    Parameters
    ----------
    levels : list of int
        Overwritten by a coder that reads.
    shapes : sequence of (rows, columns)
    top : int
        Bits of the largest level, 1 to 17.
    most : int
        Decisions after which to stop: -1 is returned then, -2 where a row of zeros has no flag.
    """
    sizes = _Adaptive(FIRST.reshape(-1).tolist())
    below = _Adaptive([TOP_BITS] * 3 * SIZES)
    flags = _Adaptive([HALF, HALF])
    mean, flag, at, decisions = 64, False, 0, 0
    for rows, columns in shapes:
        means = [mean] * columns
        for row in range(rows):
            window = _WINDOWS[min(row + 2, COLUMN_WINDOW)]
            if columns >= FLAGGED:
                flag = flags.code(coder, flag, not any(levels[at : at + columns]))
                decisions += 1
                if decisions > most:
                    return -1
                if flag:
                    levels[at : at + columns] = [0] * columns
                    means = [m - (m * window >> 16) for m in means]
                    mean = max(1, mean - (mean >> 4))
                    at += columns
                    continue
            along = mean
            for column in range(columns):
                context = CLASSES * _class(along, LEAST_ROW) + _class(means[column], LEAST_COLUMN)
                level = _level(coder, sizes, below, SIZES * context, levels[at], top)
                levels[at] = level
                size = abs(level).bit_length()
                decisions += min(size + 1, top) + size
                if decisions > most:
                    return -1
                scaled = abs(level) << SHIFT
                along = max(0, along + ((scaled - along) * _WINDOWS[min(column + EARLY, ROW_WINDOW)] >> 16))
                means[column] = max(0, means[column] + ((scaled - means[column]) * window >> 16))
                at += 1
            if columns >= FLAGGED and not any(levels[at - columns : at]):
                return -2
            mean = max(1, mean + (along - mean >> 2))
    return decisions


def _class(mean: int, least: int) -> int:
    return min(max(mean.bit_length(), least), CLASSES - 1)


def _level(coder: Writer | Reader, sizes: _Adaptive, below: _Adaptive, context: int, known: int, top: int) -> int:
    """Code one level: its bits in unary, the bits below the leading one from the highest on, its sign."""
    magnitude, size = abs(known), 0
    while size < top and sizes.code(coder, context + size, magnitude.bit_length() > size):
        size += 1
    if not size:
        return 0
    found = 1
    for place in range(size - 2, -1, -1):
        bit = bool(magnitude >> place & 1)
        # Two bits depend on those above them: 1, then 2 or 3.
        bit = below.code(coder, 3 * size + found - 1, bit) if found < 4 else coder.bit(HALF, bit)
        found = 2 * found + bit
    return -found if coder.bit(HALF, known < 0) else found


def encode(levels: NDArray[np.int32], shapes: Sequence[tuple[int, int]], top: int) -> tuple[bytes, int]:
    """Return the bytes of ``levels``, and in how many decisions they are read."""
    writer = Writer()
    decisions = code(writer, levels.tolist(), shapes, top, 1 << 62)
    return writer.end(), decisions


def decode(coded: bytes, shapes: Sequence[tuple[int, int]], top: int, most: int, out: NDArray[np.int32]) -> int:
    """Write the levels into ``out``; return the decisions, -1 where these were more than ``most``, -2 for bytes that no
    encoder wrote."""
    reader, levels = Reader(coded), [0] * out.size
    decisions = code(reader, levels, shapes, top, most)
    out[:] = levels
    return decisions if decisions < 0 or reader.ended() else -2


def begun(low: int) -> NDArray[np.uint64]:
    """Return the state in which coders of words begin: lower end, range, words written."""
    return np.array([low, (1 << 64) - 1, 0], np.uint64)


def finished(words: NDArray[np.uint32], state: NDArray[np.uint64]) -> bytes:
    """Return the bytes of what a coder has written; ``words`` may be written to."""
    low, span, written = (int(word) for word in state)
    last = last_of(low, span)
    if last >> 64:
        carried = written - 1
        while words[carried] == 0xFFFFFFFF:
            words[carried] = 0
            carried -= 1
        words[carried] += np.uint32(1)
    head = words[:written].astype(">u4").tobytes()
    return (head + (last & (1 << 64) - 1).to_bytes(8, "big")).rstrip(b"\0")


def opened(coded: bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Return the words of ``coded``, and the state in which a reader of them begins."""
    words = np.frombuffer(coded.ljust(-(-len(coded) // 4) * 4 + 8, b"\0"), ">u4").astype(np.uint32)
    state = begun(int(words[0]) << 32 | int(words[1]))
    state[2] = 2
    return words, state


def ended(coded: bytes, state: NDArray[np.uint64] | tuple[int, int, int]) -> bool:
    """Whether ``coded`` is what an encoder would have written, by the state of a reader at the end."""
    offset, span, taken = (int(word) for word in state)
    if len(coded) > 4 * taken or coded[-1:] == b"\0":
        return False
    # Eight bytes of ones are the first number above the range at the start: no decision brings it back inside.
    if coded[:8] == 8 * b"\xff":
        return False
    window = int.from_bytes(coded[4 * taken - 8 : 4 * taken].ljust(8, b"\0"), "big")
    return last_of((window - offset) & (1 << 64) - 1, span) & (1 << 64) - 1 == window


def magnitudes(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return how many of contiguous ``values`` have each pattern of exponent and 7 bits of mantissa, shape (2**15,)."""
    counts = np.zeros(PATTERNS, np.int64)
    for start in range(0, values.size, _BLOCK):
        patterns = values[start : start + _BLOCK].view(np.int32) >> 16 & 0x7FFF
        counts += np.bincount(patterns, minlength=counts.size)
    return counts


def quantise(values: NDArray[np.float32], inverse: float, draws: NDArray[np.uint32] = NONE) -> NDArray[np.int32]:
    """Return the levels of contiguous ``values``, none above :data:`MOST_BITS`; ``inverse`` is that of a step.

    Without draws |value| times ``inverse``, in float32, is rounded, but is 1 from 0.6 on; then the sign. With as many
    as values ``floor(value * inverse + u + 1/2)``, where u = (draw + 1/2) / 2**24 - 1/2, in float64.
    """
    out = np.empty(values.size, np.int32)
    for start in range(0, values.size, _BLOCK):
        part, here = values[start : start + _BLOCK], out[start : start + _BLOCK]
        if draws.size:
            up = (2.0 * draws[start : start + _BLOCK] + 1.0) * 2.0**-25
            up += part.astype(np.float64) * inverse
            here[:] = np.floor(up, out=up)
        else:
            sizes = np.abs(part) * np.float32(inverse)
            levels = np.where(sizes < np.float32(1.0), sizes >= np.float32(0.6), sizes + np.float32(0.5))
            here[:] = np.copysign(levels, part)
    return out
