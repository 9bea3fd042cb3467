"""Compiled kernels that pack and unpack numbers, turn levels and codes into floats, and sum squares: numpy's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.interface import BLOCK
from fedcomp.kernels.lanes import fixed, kernel

_COLUMNS = 512
"""Columns taken at once: their words, up to 64 rows of them, stay in the cache while 64 rows of fields are taken."""


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


def pack_columns(fields: NDArray[Any], words: NDArray[np.uint64]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.pack_columns`."""
    _pack_columns(fixed(fields), words)


def unpack_columns(words: NDArray[np.uint64], out: NDArray[Any]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.unpack_columns`."""
    # A section of a frame begins at any byte.
    _unpack_columns(fixed(words if words.flags.aligned else words.copy()), out)


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
    _levels(fixed(numbers), fixed(norms), bucket or numbers.size, float(steps), out)
    return out
