"""Compiled kernels for packing and unpacking numbers, decoding levels and codes, and sums of squares; bits equal
numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.interface import BLOCK
from fedcomp.kernels.lanes import fixed, kernel

_COLUMNS = 512
"""Columns processed at once; their words, up to 64 rows, stay in the cache while 64 rows of fields are read."""


@kernel
def _pack_columns(fields, words):
    width, columns = words.shape
    # Callers pass whole gaps or indices and want their low bits; the others would run into the next rows.
    mask = np.uint64((1 << width) - 1) if width < 64 else np.uint64(0xFFFFFFFFFFFFFFFF)
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        words[:, start:end] = 0
        for row in range(64):
            word = (row * width) >> 6
            shift = np.uint64((row * width) & 63)
            # Slices begin at 0: LLVM then knows that no index counts from the end, and takes many fields at a time.
            part, low = fields[row, start:end], words[word, start:end]
            for column in range(part.size):
                low[column] |= (np.uint64(part[column]) & mask) << shift
            if shift + np.uint64(width) > np.uint64(64):
                back, high = np.uint64(64) - shift, words[word + 1, start:end]
                for column in range(part.size):
                    high[column] |= (np.uint64(part[column]) & mask) >> back


@kernel
def _unpack_columns(words, out):
    width, columns = words.shape
    mask = np.uint64((1 << width) - 1) if width < 64 else np.uint64(0xFFFFFFFFFFFFFFFF)
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        for row in range(64):
            word = (row * width) >> 6
            shift = np.uint64((row * width) & 63)
            # Slices as above.
            low, fields = words[word, start:end], out[row, start:end]
            if shift + np.uint64(width) <= np.uint64(64):
                for column in range(fields.size):
                    fields[column] = (low[column] >> shift) & mask
            else:
                back, high = np.uint64(64) - shift, words[word + 1, start:end]
                for column in range(fields.size):
                    fields[column] = ((low[column] >> shift) | (high[column] << back)) & mask


@kernel
def _short_levels(levels, norms, bucket, steps, out):
    # A product takes a third of the time of a division and rounds to the same float32. Norm times level is exact, and
    # its product with the inverse is within 2**-51 of the quotient x. Cut to 45 bits by the difference below, that is
    # within 2**-44. No x of fewer than 2**14 steps is nearer than 2**-39 to a number between two float32, unless it is
    # that number: 25 bits, to which the cut returns exactly.
    inverse = 1.0 / steps
    for place in range(norms.size):
        norm = np.float64(norms[place])
        # Slices as above.
        end = min((place + 1) * bucket, levels.size)
        part, values = levels[place * bucket : end], out[place * bucket : end]
        for at in range(part.size):
            near = np.float64(part[at]) * norm * inverse
            above = near * 257.0
            values[at] = np.float32(above - (above - near))


@kernel
def _levels(levels, norms, bucket, steps, out):
    for place in range(norms.size):
        norm = np.float64(norms[place])
        # As above.
        end = min((place + 1) * bucket, levels.size)
        part, values = levels[place * bucket : end], out[place * bucket : end]
        for at in range(part.size):
            values[at] = np.float32(np.float64(part[at]) * norm / steps)


@kernel
def _unary(numbers, out):
    at = np.uint64(0)
    for number in numbers:
        at += np.uint64(number)
        out[at >> np.uint64(3)] |= np.uint8(1) << np.uint8(at & np.uint64(7))
        at += np.uint64(1)


_PLACES = np.zeros((256, 8), np.uint8)
"""Positions of the set bits of a byte, lowest first, followed by zeros."""
_ONES = np.zeros(256, np.uint8)
"""Number of set bits of a byte."""
for _byte in range(256):
    _set = np.flatnonzero(np.unpackbits(np.uint8(_byte), bitorder="little"))
    _PLACES[_byte, : _set.size] = _set
    _ONES[_byte] = _set.size


@kernel
def _ones(stream, count, out):
    at = np.uint64(0)
    base = np.int64(0)
    for byte in stream:
        places = _PLACES[byte]
        # All eight, needed or not, is one store without a branch; the next byte overwrites those that are not set.
        for lane in range(8):
            out[at + np.uint64(lane)] = base + np.int64(places[lane])
        at += np.uint64(_ONES[byte])
        if at > count:
            return False
        base += 8
    return at == count


@kernel
def _join_gaps(ones, low, widths, block):
    last, index = np.int64(-1), np.int64(-1)
    for place in range(widths.size):
        width = np.int64(widths[place])
        end = min((place + 1) * block, ones.size)
        part, rest = ones[place * block : end], low[place * block : end]
        for at in range(part.size):
            one = part[at]
            index += ((one - last - 1) << width) + np.int64(rest[at]) + 1
            last = one
            part[at] = index


@kernel
def _classes(gaps, out):
    for at in range(gaps.size):
        gap = gaps[at]
        # Bits that decide nothing are cleared where a float64 would round them up into the exponent. What is left is
        # the exponent of the float64, and the first two bits of its fraction.
        exact = gap & ~np.uint64(0xFFF) if gap >> np.uint64(52) else gap
        top = (np.float64(np.int64(exact)).view(np.int64) >> 50) - 4096
        out[at] = np.uint16(gap) if gap < 4 else np.uint16(top)


@kernel
def _shifted_sums(rows, shifts, out):
    for place in range(shifts.size):
        row, shift, total = rows[place], np.uint64(shifts[place]), np.uint64(0)
        for at in range(row.size):
            total += np.uint64(row[at]) >> shift
        out[place] = np.int64(total)


@kernel
def _square_sums(vector, origin, step, sums):
    for start in range(0, vector.size, BLOCK):
        part, beside = vector[start : start + BLOCK], origin[start * step : start * step + BLOCK]
        for at in range(part.size):
            value = np.float64(part[at]) - np.float64(beside[at])
            sums[at] += value * value


@kernel
def _look_up(table, codes, out):
    for at in range(codes.size):
        out[at] = table[codes[at]]


def unary(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """See :meth:`fedcomp.kernels.interface.Ops.unary`."""
    out = np.zeros((int(numbers.sum(dtype=np.int64)) + numbers.size + 7) // 8, np.uint8)
    _unary(fixed(numbers), out)
    return out


def ones(stream: NDArray[np.uint8], count: int) -> NDArray[np.int64] | None:
    """See :meth:`fedcomp.kernels.interface.Ops.ones`."""
    out = np.empty(count + 8, np.int64)
    return out[:count] if _ones(fixed(stream), np.uint64(count), out) else None


def join_gaps(ones: NDArray[np.int64], low: NDArray[Any], widths: NDArray[np.uint8], block: int) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.join_gaps`."""
    _join_gaps(ones, fixed(low), fixed(widths), block)


def classes(gaps: NDArray[Any]) -> NDArray[np.uint16]:
    """See :meth:`fedcomp.kernels.interface.Ops.classes`."""
    out = np.empty(gaps.size, np.uint16)
    _classes(fixed(gaps), out)
    return out


def shifted_sums(rows: NDArray[Any], shifts: NDArray[np.uint8]) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.shifted_sums`."""
    out = np.empty(shifts.size, np.int64)
    _shifted_sums(fixed(rows), fixed(shifts), out)
    return out


def pack_columns(fields: NDArray[Any], words: NDArray[np.uint64]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.pack_columns`."""
    # Of wider fields than their type the bits above are those of a sign, which an unsigned type has not.
    bits = _unsigned(fields) if len(words) <= 8 * fields.dtype.itemsize else fields.astype(np.uint64)
    _pack_columns(fixed(bits), words)


def unpack_columns(words: NDArray[np.uint64], out: NDArray[Any]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.unpack_columns`."""
    # A section of a frame begins at any byte.
    _unpack_columns(fixed(words if words.flags.aligned else words.copy()), _unsigned(out))


def _unsigned(fields: NDArray[Any]) -> NDArray[Any]:
    """Return an unsigned view of integers, so one compiled form serves both signs of a type."""
    return fields.view(f"u{fields.dtype.itemsize}")


def square_sums(vector: NDArray[Any], origin: NDArray[Any] | None) -> NDArray[np.float64]:
    """See :meth:`fedcomp.kernels.interface.Ops.square_sums`."""
    sums = np.zeros(BLOCK)
    # Without an origin, the same block of zeros is subtracted from all.
    beside = np.zeros(BLOCK, np.float32) if origin is None else np.ascontiguousarray(origin)
    _square_sums(fixed(np.ascontiguousarray(vector)), fixed(beside), 0 if origin is None else 1, sums)
    return sums


def look_up(table: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """See :meth:`fedcomp.kernels.interface.Ops.look_up`."""
    out = np.empty(codes.size, np.float32)
    _look_up(fixed(table), fixed(codes), out)
    return out


def levels(numbers: NDArray[Any], norms: NDArray[np.float32], bucket: int, steps: int) -> NDArray[np.float32]:
    """See :meth:`fedcomp.kernels.interface.Ops.levels`."""
    out = np.empty(numbers.size, np.float32)
    short = steps < 1 << 14
    (_short_levels if short else _levels)(fixed(numbers), fixed(norms), bucket or numbers.size, float(steps), out)
    return out
