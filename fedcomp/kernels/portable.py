"""The numpy tier of :class:`fedcomp.kernels.interface.Ops`: the reference definition of every kernel in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.interface import (
    BIN_SHIFT,
    BINS,
    BLOCK,
    INFINITY,
    LANES,
    MAGNITUDE,
    RANS_BITS,
    RANS_LEAST,
    Bits,
    Candidates,
    Floats,
    Found,
)

_CHUNK = 64 * BLOCK  # elements whose float64 forms exist at a time
ROOM = 8 * BLOCK
"""Elements of one step of a selection: few enough for its intermediate arrays to stay in the cache."""
_NEAR = 1 << 14  # elements that are transformed among themselves while the cache holds them
_NARROW = 16  # lanes below which numpy's calls cost more than Python's integers
_ONE = np.float64(1.0).view(np.int64)
_FRACTION = np.int64(2**52 - 1)
_BIAS = 1023
_SUMMED = 1 << 16
"""Number of elements whose products are in memory at a time."""

_GAPS = 1 << 14
"""Number of gaps in float64 at a time; they stay in the cache."""

_EXACT = 1 << 53
"""Float64 represents all integers up to this one."""

_COLUMNS = 4096  # columns of packed fields taken at once: temporaries of 2 MiB, few enough calls


def collect(bits: Bits, threshold: int, limit: int, candidates: Candidates) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.collect`."""
    written, at = (int(v) for v in candidates.state)
    while at < bits.size and written < limit:
        magnitudes = bits[at : at + ROOM] & np.int32(MAGNITUDE)
        hits = np.flatnonzero(magnitudes >= np.int32(threshold))
        end = written + hits.size
        np.add(hits, at, out=candidates.indices[written:end], casting="unsafe")
        candidates.magnitudes[written:end] = magnitudes[hits]
        written, at = end, at + magnitudes.size
    candidates.state[:] = written, at


def add_collect(
    memory: Floats,
    update: Floats,
    decay: float,
    out: Floats,
    threshold: int,
    limit: int,
    candidates: Candidates,
) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_collect`."""
    bits = out.view(np.int32)
    while candidates.state[1] < out.size and candidates.state[0] < limit:
        part = slice(candidates.state[1], candidates.state[1] + ROOM)
        old = memory[part]
        with np.errstate(over="ignore", invalid="ignore"):  # reported as what they are once the sum is ranked
            np.add(old if decay == 1.0 else old * np.float32(decay), update[part], out=out[part])
        collect(bits[: part.stop], threshold, limit, candidates)


def histogram(bits: Bits) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.histogram`."""
    return np.bincount((bits & np.int32(MAGNITUDE)) >> BIN_SHIFT, minlength=BINS)


def finish(found: Found, threshold: int, k: int) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.finish`."""
    indices, magnitudes = found
    keep = magnitudes > threshold
    # Ascending, so that the ties that fit are those of the lowest indices.
    ties = np.flatnonzero(magnitudes == threshold)[: k - np.count_nonzero(keep)]
    keep[ties] = True
    return indices[keep].astype(np.int64, copy=False)


def take_clear(values: Floats, indices: NDArray[np.int64]) -> Floats:
    """See :meth:`fedcomp.kernels.interface.Ops.take_clear`."""
    taken = values[indices]
    values[indices] = 0.0
    return taken


def add_scaled(out: Floats, values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_scaled`."""
    # A factor of 1 changes no bit; without it there is no product to store.
    if weight == 1.0:
        out += values
        return
    # Block by block: no temporary of the vector's size.
    for start in range(0, out.size, _SUMMED):
        out[start : start + _SUMMED] += weight * values[start : start + _SUMMED]


def scatter_add(out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.scatter_add`. Indices are distinct, so fancy assignment is addition."""
    out[indices] += values if weight == 1.0 else weight * values


def bin_argmax(bits: Bits, length: int) -> tuple[NDArray[np.int64], bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.bin_argmax`."""
    magnitudes = bits & np.int32(MAGNITUDE)
    full = bits.size // length * length
    indices = np.arange(0, bits.size, length)
    indices[: full // length] += magnitudes[:full].reshape(-1, length).argmax(axis=1)
    if full < bits.size:
        indices[-1] += magnitudes[full:].argmax()
    return indices, bool((magnitudes[indices] < INFINITY).all())


def select_adaptive(
    total: Floats, gradient: Floats, soft: np.float32, length: int
) -> tuple[NDArray[np.int64], float, bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.select_adaptive`."""
    magnitudes = total.view(np.int32) & np.int32(MAGNITUDE)
    with np.errstate(over="ignore", invalid="ignore"):
        ahead = total + soft * gradient
        starts = np.arange(0, total.size, length)
        # As integers the magnitudes order like floats, with NaN on top; float comparisons would lose it.
        peaks = np.maximum.reduceat(magnitudes, starts)
        hits = (ahead.view(np.int32) & np.int32(MAGNITUDE)) >= np.repeat(peaks, length)[: total.size]
        hits &= magnitudes != 0
        # A running sum, unlike np.sum, promises its order.
        summed = float(np.cumsum(peaks.view(np.float32), dtype=np.float64)[-1])
    # The look-ahead itself may overflow, which is allowed; the vectors must be finite.
    finite = peaks.max() < INFINITY and (gradient.view(np.int32) & np.int32(MAGNITUDE)).max() < INFINITY
    return np.flatnonzero(hits), summed, bool(finite)


def add_adaptive(
    residue: Floats, update: Floats, soft: np.float32, length: int, out: Floats
) -> tuple[NDArray[np.int64], float, bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.add_adaptive`."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(residue, update, out=out)
    return select_adaptive(out, update, soft, length)


def take_scaled(values: Floats, indices: NDArray[np.int64], scale: np.float32) -> NDArray[np.bool_]:
    """See :meth:`fedcomp.kernels.interface.Ops.take_scaled`."""
    taken = values[indices]
    values[indices] = taken - np.copysign(scale, taken)
    return np.signbit(taken)


def find_above(bits: Bits, limit: int) -> int:
    """See :meth:`fedcomp.kernels.interface.Ops.find_above`."""
    # In chunks: the first hit is mostly near the beginning, and what follows need not be compared.
    for start in range(0, bits.size, _CHUNK):
        hits = (bits[start : start + _CHUNK] & np.int32(MAGNITUDE)) > np.int32(limit)
        first = int(hits.argmax())
        if hits[first]:
            return start + first
    return -1


def select_above(bits: Bits, limit: int) -> tuple[NDArray[np.int64], bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.select_above`."""
    magnitudes = bits & np.int32(MAGNITUDE)
    indices = np.flatnonzero(magnitudes > np.int32(limit))
    return indices, bool((magnitudes[indices] < INFINITY).all())


def tail_sums(bits: Bits, limit: int, about: float) -> tuple[int, NDArray[np.float64]]:
    """See :meth:`fedcomp.kernels.interface.Ops.tail_sums`."""
    count = 0
    sums = np.zeros((2, LANES))
    with np.errstate(invalid="ignore"):
        for hits, magnitudes in _tail_chunks(bits, limit):
            count += int(np.count_nonzero(hits))
            d = np.where(hits, magnitudes - about, 0.0)
            for lanes, terms in zip(sums, (d, d * d), strict=True):
                # Along any axis but the last, numpy adds row after row.
                np.add.reduce(np.vstack([lanes, np.add.reduce(terms, axis=1)]), axis=0, out=lanes)
    return count, sums


def tail_product(bits: Bits, limit: int, origin: float) -> tuple[int, NDArray[np.float64]]:
    """See :meth:`fedcomp.kernels.interface.Ops.tail_product`."""
    exponent = 0
    product = np.ones(LANES)
    for hits, magnitudes in _tail_chunks(bits, limit):
        exponents, mantissas = _split(np.where(hits, magnitudes - origin, 1.0))
        exponent += int(exponents.sum())
        for block in np.multiply.reduce(mantissas, axis=1):
            exponents, block = _split(block)
            exponent += int(exponents.sum())
            exponents, product = _split(product * block)
            exponent += int(exponents.sum())
    return exponent, product


def _tail_chunks(bits: Bits, limit: int) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.float64]]]:
    """Yield a mask of the elements above ``limit`` and their magnitudes, shape (blocks, BLOCK // LANES, LANES)."""
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK] & np.int32(MAGNITUDE)
        padded = np.pad(chunk, (0, -chunk.size % BLOCK)).reshape(-1, BLOCK // LANES, LANES)
        yield padded > np.int32(limit), padded.view(np.float32).astype(np.float64)


def _split(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return exponents and mantissas in [1, 2) of positive normal numbers."""
    bits = values.view(np.int64)
    return (bits >> 52) - _BIAS, ((bits & _FRACTION) | _ONE).view(np.float64)


def hadamard(values: NDArray[Any], before: NDArray[np.uint64], after: NDArray[np.uint64], scale: float) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.hadamard`."""
    values *= values.dtype.type(scale)
    _negate(values, before)
    for start in range(0, values.size, _NEAR):
        block = values[start : start + _NEAR]
        width = min(64, block.size)
        # Rows of a transposed copy are long, where a pair at distance 1 would be a slice of every second element.
        columns = np.ascontiguousarray(block.reshape(-1, width).T)
        _distances(columns)
        block.reshape(-1, width)[...] = columns.T
        _distances(block.reshape(-1, width))
    _distances(values.reshape(-1, min(_NEAR, values.size)))
    _negate(values, after)


def add_signs(out: NDArray[np.float64], words: NDArray[np.uint64], scalars: NDArray[np.float64]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_signs`."""
    # Bits as bytes take eight times as much as the words; block by block that stays small.
    step = 1 << 10
    for first in range(0, len(words), step):
        part = out[first * 64 : (first + step) * 64]
        for column, scalar in zip(words[first : first + step].T, scalars, strict=True):
            little = np.ascontiguousarray(column, "<u8").view(np.uint8)
            negative = np.unpackbits(little, count=part.size, bitorder="little").view(np.bool_)
            part += np.where(negative, -scalar, scalar)


def sign_products(vector: NDArray[np.float32], words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """See :meth:`fedcomp.kernels.interface.Ops.sign_products`."""
    lanes = np.zeros((words.shape[1], 64))
    step = 1 << 10
    for first in range(0, len(words), step):
        part = vector[first * 64 : (first + step) * 64].astype(np.float64)
        whole = part.size // 64
        for column, sums in zip(words[first : first + step].T, lanes, strict=True):
            little = np.ascontiguousarray(column, "<u8").view(np.uint8)
            negative = np.unpackbits(little, count=part.size, bitorder="little").view(np.bool_)
            signed = np.where(negative, -part, part)
            for block in signed[: whole * 64].reshape(whole, 64):
                # One after the other: what numpy makes of a sum over an axis is its own affair.
                sums += block
            sums[: part.size - whole * 64] += signed[whole * 64 :]
    return lanes


def _distances(rows: NDArray[Any]) -> None:
    """Transform every column of a contiguous array in place, the number of rows being a power of two."""
    flat = rows.reshape(-1)
    width = rows.shape[1]
    while width < flat.size:
        step = min(width, _NEAR)
        # Below that many elements whole groups of pairs are taken at once; above it, parts of one group.
        for start in range(0, flat.size, max(2 * width, _NEAR)):
            group = flat[start : start + max(2 * width, _NEAR)].reshape(-1, 2, width)
            for part in range(0, width, step):
                low, high = group[:, 0, part : part + step], group[:, 1, part : part + step]
                difference = low - high
                low += high
                high[...] = difference
        width *= 2


def _negate(values: NDArray[Any], words: NDArray[np.uint64]) -> None:
    """Negate the elements whose bit is set."""
    for start in range(0, values.size, _NEAR):
        part = values[start : start + _NEAR]
        bits = words[start // 64 : -(-(start + part.size) // 64)].astype("<u8").view(np.uint8)
        if bits.any():
            negative = np.unpackbits(bits, count=part.size, bitorder="little").view(np.bool_)
            np.negative(part, out=part, where=negative)


def rans_encode(
    symbols: NDArray[np.uint16], table: NDArray[np.uint32], lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """See :meth:`fedcomp.kernels.interface.Ops.rans_encode`."""
    starts = np.cumsum(table, dtype=np.uint32) - table
    if lanes < _NARROW:
        return _encode_singly(symbols.tolist(), table.tolist(), starts.tolist(), lanes)
    every = np.full(lanes, RANS_LEAST, np.uint64)
    frequency, start = table.astype(np.uint64), starts.astype(np.uint64)
    parts = []
    # A decoder undoes the last step first.
    for at in range((symbols.size - 1) // lanes * lanes, -1, -lanes):
        row = symbols[at : at + lanes]
        states, f = every[: row.size], frequency[row]
        full = states >= f << np.uint64(32 - RANS_BITS)
        parts.append(states[full].astype(np.uint16))
        states[full] >>= np.uint64(16)
        quotients, places = np.divmod(states, f)
        states[...] = (quotients << np.uint64(RANS_BITS)) + places + start[row]
    return every.astype(np.uint32), np.concatenate(parts[::-1])


def _encode_singly(
    symbols: list[int], table: list[int], starts: list[int], lanes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    states = [RANS_LEAST] * lanes
    words = []
    for at in range(len(symbols) - 1, -1, -1):
        symbol, lane = symbols[at], at % lanes
        state, f = states[lane], table[symbol]
        if state >= f << (32 - RANS_BITS):
            words.append(state & 0xFFFF)
            state >>= 16
        quotient, place = divmod(state, f)
        states[lane] = (quotient << RANS_BITS) + place + starts[symbol]
    return np.array(states, np.uint32), np.array(words[::-1], np.uint16)


def rans_decode(
    states: NDArray[np.uint32],
    words: NDArray[np.uint16],
    symbols: NDArray[np.uint16],
    steps: NDArray[np.uint32],
    count: int,
) -> NDArray[np.uint16] | None:
    """See :meth:`fedcomp.kernels.interface.Ops.rans_decode`."""
    lanes = states.size
    if lanes < _NARROW:
        # As views: their items are Python integers, and a list of them all would take more than a few numbers do.
        return _decode_singly(states.tolist(), words.data, symbols.data, steps.data, count)
    out = np.empty(count, np.uint16)
    mask = np.uint32((1 << RANS_BITS) - 1)
    taken = 0
    for at in range(0, count, lanes):
        row = states[: count - at]
        slots = row & mask
        out[at : at + lanes] = symbols[slots]
        step = steps[slots]
        row >>= np.uint32(RANS_BITS)
        row *= step >> np.uint32(16)
        row += step & np.uint32(0xFFFF)
        low = np.flatnonzero(row < RANS_LEAST)
        more = words[taken : taken + low.size]
        if more.size < low.size:
            return None
        row[low] = row[low] << np.uint32(16) | more
        taken += low.size
    return out if taken == words.size and bool((states == RANS_LEAST).all()) else None


def _decode_singly(
    states: list[int], words: memoryview, symbols: memoryview, steps: memoryview, count: int
) -> NDArray[np.uint16] | None:
    lanes, mask, taken = len(states), (1 << RANS_BITS) - 1, 0
    out = []
    for at in range(count):
        state = states[at % lanes]
        slot = state & mask
        out.append(symbols[slot])
        step = steps[slot]
        state = (step >> 16) * (state >> RANS_BITS) + (step & 0xFFFF)
        if state < RANS_LEAST:
            if taken == len(words):
                return None
            state = state << 16 | words[taken]
            taken += 1
        states[at % lanes] = state
    return np.array(out, np.uint16) if taken == len(words) and states == [RANS_LEAST] * lanes else None


def unary(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """See :meth:`fedcomp.kernels.interface.Ops.unary`."""
    numbers += numbers.dtype.type(1)
    ends = np.add.accumulate(numbers, dtype=np.int64)
    # The ends count from 1: dropping one bit in front is cheaper than subtracting 1 from every end.
    bits = np.zeros(int(ends[-1]) + 1, np.uint8)
    bits[ends] = 1
    return np.packbits(bits[1:], bitorder="little")


def ones(stream: NDArray[np.uint8], count: int) -> NDArray[np.int64] | None:
    """See :meth:`fedcomp.kernels.interface.Ops.ones`."""
    bits = np.unpackbits(stream, bitorder="little")
    # Counted before they are listed: a listed bit costs eight times what an unpacked one does.
    return bits.view(np.bool_).nonzero()[0] if int(np.count_nonzero(bits)) == count else None


def join_gaps(ones: NDArray[np.int64], low: NDArray[Any], widths: NDArray[np.uint8], block: int) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.join_gaps`."""
    if widths.size == 1:
        # Index j is ((ones_j - j) << b) + (low_0 + ... + low_j) + j. Folding the terms in j into the running sum saves
        # two passes: subtract 2**b - 1 per step.
        b = int(widths[0])
        if b:
            sums = low.astype(np.int64, copy=False)
            sums[1:] -= (1 << b) - 1
            np.add.accumulate(sums, out=sums)
            ones <<= b
            ones += sums
        return
    ones[1:] -= ones[:-1].copy()
    # All but the first are now one more than the number of 0 bits.
    ones[1:] -= 1
    ones <<= np.repeat(widths, block)[: ones.size]
    ones += low
    ones[1:] += 1
    np.add.accumulate(ones, out=ones)


def classes(gaps: NDArray[Any]) -> NDArray[np.uint16]:
    """See :meth:`fedcomp.kernels.interface.Ops.classes`."""
    out = np.empty(gaps.size, np.uint16)
    for start in range(0, gaps.size, _GAPS):
        part = gaps[start : start + _GAPS]
        # Bits that decide nothing are cleared where a float64 would round them up into the exponent.
        exact = part if part.dtype == np.uint32 else np.where(part < _EXACT, part, part & ~np.uint64(0xFFF))
        # The exponent of a float64, and the first two bits of its fraction.
        top = exact.astype(np.float64).view(np.int64) >> 50
        out[start : start + _GAPS] = np.where(part < 4, part, top - 4 * 1024)
    return out


def shifted_sums(rows: NDArray[Any], shifts: NDArray[np.uint8]) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.shifted_sums`."""
    shifted = rows >> shifts.astype(rows.dtype)[:, None]
    return np.add.reduce(shifted, axis=1, dtype=rows.dtype).astype(np.int64)


def _rows(width: int) -> tuple[NDArray[np.intp], NDArray[np.uint64], NDArray[np.intp]]:
    """Return for each of the 64 rows its first word and its shift in it, and the rows that reach into the next word."""
    bit = np.arange(64) * width
    crossing = np.flatnonzero((bit & 63) + width > 64)
    return bit >> 6, (bit & 63).astype(np.uint64), crossing


def pack_columns(fields: NDArray[Any], words: NDArray[np.uint64]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.pack_columns`."""
    # Row j of all columns is shifted by the same number of bits, so that each step below is one operation on contiguous
    # memory, whatever the width.
    width, columns = words.shape
    word, shift, crossing = _rows(width)
    first = np.searchsorted(word, np.arange(width + 1))
    mask = np.uint64((1 << width) - 1)
    for start in range(0, columns, _COLUMNS):
        stretch = slice(start, start + _COLUMNS)
        part = fields[:, stretch].astype(np.uint64)
        part &= mask
        shifted = part << shift[:, None]
        for w in range(width):
            np.bitwise_or.reduce(shifted[first[w] : first[w + 1]], axis=0, out=words[w, stretch])
        # A row that starts at bit 0 never crosses, so no shift here is by 64, which C leaves undefined.
        carried = part[crossing] >> (np.uint64(64) - shift[crossing])[:, None]
        # No two rows cross into the same word, so one fancy assignment reaches every crossing.
        words[word[crossing] + 1, stretch] |= carried


def unpack_columns(words: NDArray[np.uint64], out: NDArray[Any]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.unpack_columns`."""
    width, columns = words.shape
    word, shift, crossing = _rows(width)
    mask = np.uint64((1 << width) - 1)
    for start in range(0, columns, _COLUMNS):
        near = words[:, start : start + _COLUMNS]
        part = near[word]
        part >>= shift[:, None]
        part[crossing] |= near[word[crossing] + 1] << (np.uint64(64) - shift[crossing])[:, None]
        part &= mask
        out[:, start : start + _COLUMNS] = part


def square_sums(vector: NDArray[Any], origin: NDArray[Any] | None) -> NDArray[np.float64]:
    """See :meth:`fedcomp.kernels.interface.Ops.square_sums`."""
    sums = np.zeros(BLOCK)
    for start in range(0, vector.size, ROOM):
        chunk = vector[start : start + ROOM].astype(np.float64)
        if origin is not None:
            chunk -= origin[start : start + ROOM]
        chunk *= chunk
        for at in range(0, chunk.size, BLOCK):
            row = chunk[at : at + BLOCK]
            sums[: row.size] += row
    return sums


def look_up(table: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """See :meth:`fedcomp.kernels.interface.Ops.look_up`."""
    # Clipping changes no code, as all are in range, and spares the check: less than half the time of an index.
    return table.take(codes, mode="clip")


def levels(numbers: NDArray[Any], norms: NDArray[np.float32], bucket: int, steps: int) -> NDArray[np.float32]:
    """See :meth:`fedcomp.kernels.interface.Ops.levels`."""
    wide = norms.astype(np.float64)
    # One exact product in float64 and one division, each correctly rounded: the same float32 everywhere.
    product = numbers * (wide if norms.size == 1 else np.repeat(wide, bucket)[: numbers.size])
    product /= steps
    return product.astype(np.float32)
