"""The numba tier's kernels of AdaComp's rule; see :mod:`fedcomp.kernels.compiled`.

Bins of up to 64 elements are one or two overlapping vectors, as in :mod:`fedcomp.kernels.compiled_bins`: sum,
look-ahead, comparison and the words of hits happen in registers. A longer bin takes two passes over blocks of 64, the
second out of the cache and only where something passes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fedcomp.kernels.interface import INFINITY, MAGNITUDE, Floats
from fedcomp.kernels.lanes import (
    AHEAD_INDICES,
    F32,
    I32,
    I64,
    SLACK,
    TINY,
    WIDTH,
    Pieces,
    append,
    fetch,
    first_lanes,
    fixed,
    intrinsic,
    kernel,
    largest,
    largest_lane,
    load,
    magnitudes,
    part,
    prefetch,
    splat,
    store,
    word_of,
)

_CHUNK: Final = 2048
"""Elements between two checks of the room for indices; their sums stay in the first-level cache."""


@intrinsic
def _as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def _add_block(typingctx: Any, one: Any, other: Any, out: Any, start: Any) -> Any:
    """``out = one + other`` on 64 lanes. Loads come before the store, so that ``out`` may be one of the two."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats = ir.VectorType(F32, WIDTH)
        a, b = (load(context, builder, signature.args[j], args[j], args[3], floats) for j in range(2))
        store(context, builder, signature.args[2], args[2], args[3], builder.fadd(a, b))
        return context.get_dummy_value()

    return types.void(one, other, out, types.int64), codegen


def _fetch(context: Any, builder: Any, signature: Any, args: Any, arrays: int, at: Any, lanes: int) -> None:
    """Prefetch for the first ``arrays`` arguments."""
    for j in range(arrays):
        prefetch(context, builder, signature.args[j], args[j], at, lanes)


def _ahead(
    context: Any, builder: Any, signature: Any, args: Any, at: Any, lanes: int, *, add: bool = False
) -> tuple[Any, Any]:
    """Return total and magnitudes of ``total + soft * gradient`` from ``at`` on.

    The arguments start with total, gradient and soft; with ``add`` with a residue in the place of the total, which is
    the sum of the first two then.
    """
    floats = ir.VectorType(F32, lanes)
    total, gradient = (load(context, builder, signature.args[j], args[j], at, floats) for j in range(2))
    if add:
        total = builder.fadd(total, gradient)
    ahead = builder.fadd(total, builder.fmul(splat(builder, args[2], floats), gradient))
    return total, magnitudes(builder, ahead)


def _passing(builder: Any, found: Any, ahead: Any, peak: Any) -> list[Any]:
    """Return the words of elements that pass and of elements whose look-ahead is not finite."""
    vector = found.type
    enough = builder.icmp_signed(">=", ahead, splat(builder, peak, vector))
    # A bin of zeros has peak 0, which every element reaches.
    nonzero = builder.icmp_signed("!=", found, ir.Constant(vector, [0] * vector.count))
    bad = builder.icmp_signed(">=", ahead, ir.Constant(vector, [INFINITY] * vector.count))
    return [word_of(builder, builder.and_(enough, nonzero)), word_of(builder, bad)]


_FOUND: Final = types.Tuple((types.uint64, types.int32, types.uint64))


def _adaptive(lanes: int, *, add: bool) -> Any:
    """Make the kernel part for bins of ``lanes`` to ``2 * lanes`` elements; with ``add`` it writes the sum to out."""

    @intrinsic
    def whole(typingctx: Any, total: Any, gradient: Any, soft: Any, start: Any, length: Any, out: Any) -> Any:
        """Return the word of elements that pass, the largest magnitude, and a word that is zero if all is finite."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            start, length, out = args[3:]
            second = builder.sub(length, ir.Constant(I64, lanes))
            _fetch(context, builder, signature, args, 2, start, 2 * lanes)
            places = (start, builder.add(start, second))
            # Both loads come before both stores, so that ``out`` may be the residue.
            parts = [_ahead(context, builder, signature, args, at, lanes, add=add) for at in places]
            if add:
                for at, (total, _) in zip(places, parts, strict=True):
                    store(context, builder, signature.args[5], out, at, total)
            parts = [(magnitudes(builder, total), ahead) for total, ahead in parts]
            peak = largest_lane(builder, largest(builder, parts[0][0], parts[1][0]))
            (low, bad), (high, worse) = (_passing(builder, found, ahead, peak) for found, ahead in parts)
            # Lanes in the overlap set the same bit twice.
            word = builder.or_(low, builder.shl(high, second))
            return context.make_tuple(builder, signature.return_type, [word, peak, builder.or_(bad, worse)])

        return _FOUND(total, gradient, types.float32, types.int64, types.int64, out), codegen

    return whole


_adaptive_16 = _adaptive(16, add=False)
_adaptive_32 = _adaptive(32, add=False)
_add_adaptive_16 = _adaptive(16, add=True)
_add_adaptive_32 = _adaptive(32, add=True)


@intrinsic
def _adaptive_tiny(typingctx: Any, total: Any, gradient: Any, soft: Any, start: Any, length: Any) -> Any:
    """The same for bins of at most 16 elements; reads 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, ahead = _ahead(context, builder, signature, args, args[3], TINY)
        found, ahead = (
            builder.and_(part, first_lanes(builder, args[4])) for part in (magnitudes(builder, total), ahead)
        )
        peak = largest_lane(builder, found)
        word, bad = _passing(builder, found, ahead, peak)
        return context.make_tuple(builder, signature.return_type, [word, peak, bad])

    return _FOUND(total, gradient, types.float32, types.int64, types.int64), codegen


@intrinsic
def _adaptive_block(typingctx: Any, total: Any, gradient: Any, soft: Any, start: Any, peak: Any) -> Any:
    """Return the word of elements of a block that pass."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, ahead = _ahead(context, builder, signature, args, args[3], WIDTH)
        return _passing(builder, magnitudes(builder, total), ahead, args[4])[0]

    return types.uint64(total, gradient, types.float32, types.int64, types.int32), codegen


def _largest_two(*, add: bool) -> Any:
    """Make the kernel part for the first pass over a bin of at least 64 elements."""
    vector = ir.VectorType(I32, WIDTH)

    @intrinsic
    def peaks(typingctx: Any, total: Any, gradient: Any, soft: Any, start: Any, length: Any, out: Any) -> Any:
        """Return the largest magnitudes of total and look-ahead; with ``add`` write the sum to ``out``."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            start, length, out = args[3:]
            held = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * WIDTH)) for _ in range(2)]

            def look(at: Any) -> Any:
                _fetch(context, builder, signature, args, 2, at, WIDTH)
                total, ahead = _ahead(context, builder, signature, args, at, WIDTH, add=add)
                for peak, found in zip(held, (magnitudes(builder, total), ahead), strict=True):
                    builder.store(largest(builder, builder.load(peak), found), peak)
                return total

            width = ir.Constant(I64, WIDTH)
            # The last block overlaps the one before: it is added first and stored last.
            end = builder.add(start, builder.sub(length, width))
            last = look(end)
            with cgutils.for_range(builder, builder.udiv(length, width)) as loop:
                at = builder.add(start, builder.mul(loop.index, width))
                total = look(at)
                if add:
                    store(context, builder, signature.args[5], out, at, total)
            if add:
                store(context, builder, signature.args[5], out, end, last)
            both = [largest_lane(builder, builder.load(peak)) for peak in held]
            return context.make_tuple(builder, signature.return_type, both)

        returned = types.UniTuple(types.int32, 2)
        return returned(total, gradient, types.float32, types.int64, types.int64, out), codegen

    return peaks


_peaks = _largest_two(add=False)
_add_peaks = _largest_two(add=True)


@part
def _search_long(total, gradient, soft, start, length, peak, indices, written):
    """Append the elements that pass in a bin of at least 64 elements with a known largest magnitude."""
    last = start + length - 64
    for at in range(start, start + length, 64):
        word = _adaptive_block(total, gradient, soft, min(at, last), peak)
        if at > last:
            # The last block was moved back to end with the bin; these lanes were the block before's.
            word >>= np.uint64(at - last)
        written = append(word, at, indices, written)
    return written


@kernel
def _adaptive_bins(residue, update, out, total, bits, soft, length, add, state, indices, peaks):
    """Go through the bins from ``state`` on until the index array might be too small.

    ``total`` and ``bits`` read the sum: ``out``, or the residue if nothing is added.
    """
    bins = (total.size - 1) // length + 1
    full = total.size // length
    if length < 16:
        # _adaptive_tiny reads 16 elements whatever the length; the last bins go through the scalar loop below.
        full = max(0, (total.size - 16) // length)
    first, written, bad = state[0], state[1], np.uint64(state[2])
    while first < bins:
        last = min(first + max(1, _CHUNK // length), bins)
        start, end = first * length, min(last * length, total.size)
        # Room for all of a chunk: no bin can stop half-way and go on in another piece of memory.
        if indices.size < written + end - start + SLACK:
            break
        whole = max(first, min(last, full))
        if length < 16:
            if add:
                # The sums of bins this short are not vectors of their own; they are searched while in the cache.
                for at in range(start, end - 63, 64):
                    _add_block(residue, update, out, at)
                for i in range(end - (end - start) % 64, end):
                    out[i] = residue[i] + update[i]
            for b in range(first, whole):
                word, peak, worse = _adaptive_tiny(total, update, soft, b * length, length)
                written = append(word, b * length, indices, written)
                # In float64 and in the order of the bins, as the numpy tier's running sum: both tiers give the same
                # bits.
                peaks[0] += np.float64(_as_float(peak))
                bad |= worse
        elif length <= 64:
            for b in range(first, whole):
                at = b * length
                if add:
                    if length < 32:
                        word, peak, worse = _add_adaptive_16(residue, update, soft, at, length, out)
                    else:
                        word, peak, worse = _add_adaptive_32(residue, update, soft, at, length, out)
                elif length < 32:
                    word, peak, worse = _adaptive_16(residue, update, soft, at, length, out)
                else:
                    word, peak, worse = _adaptive_32(residue, update, soft, at, length, out)
                written = append(word, at, indices, written)
                peaks[0] += np.float64(_as_float(peak))
                bad |= worse
        else:
            for b in range(first, whole):
                at = b * length
                if add:
                    peak, most = _add_peaks(residue, update, soft, at, length, out)
                else:
                    peak, most = _peaks(residue, update, soft, at, length, out)
                peaks[0] += np.float64(_as_float(peak))
                bad |= np.uint64(most >= INFINITY)
                # The second look is for bins in which something passes; where the update opposes the residue, nothing
                # may.
                if most >= peak:
                    written = _search_long(total, update, soft, at, length, peak, indices, written)
        for b in range(whole, last):
            start, end = b * length, min((b + 1) * length, total.size)
            # Shorter bins have their sums already, written above for the whole chunk.
            if add and length >= 16:
                for i in range(start, end):
                    out[i] = residue[i] + update[i]
            peak = np.int32(0)
            for i in range(start, end):
                peak = max(peak, np.int32(bits[i] & MAGNITUDE))
            peaks[0] += np.float64(_as_float(peak))
            level = _as_float(peak)
            for i in range(start, end):
                ahead = abs(np.float32(total[i] + soft * update[i]))
                # Negated, so that NaN is caught as well.
                if not ahead < np.inf:
                    bad |= np.uint64(1)
                if ahead >= level and total[i] != 0.0:
                    indices[written] = i
                    written += 1
        first = last
    state[0], state[1], state[2] = first, written, np.int64(bad != 0)


@kernel
def _take_scaled(values, indices, scale, negative):
    last = indices.size - 1
    for j in range(indices.size):
        fetch(values, indices[min(j + AHEAD_INDICES, last)])
        value = values[indices[j]]
        negative[j] = value < 0.0
        values[indices[j]] = value + scale if value < 0.0 else value - scale


def select_adaptive(
    total: Floats, gradient: Floats, soft: np.float32, length: int
) -> tuple[NDArray[np.int64], float, bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.select_adaptive`."""
    return _search(total, gradient, soft, length, None)


def add_adaptive(
    residue: Floats, update: Floats, soft: np.float32, length: int, out: Floats
) -> tuple[NDArray[np.int64], float, bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.add_adaptive`."""
    return _search(residue, update, soft, length, out)


def take_scaled(values: Floats, indices: NDArray[np.int64], scale: np.float32) -> NDArray[np.bool_]:
    """See :meth:`fedcomp.kernels.interface.Ops.take_scaled`."""
    negative = np.empty(indices.size, np.bool_)
    _take_scaled(values, fixed(indices), scale, negative)
    return negative


def _search(
    vector: Floats, gradient: Floats, soft: np.float32, length: int, out: Floats | None
) -> tuple[NDArray[np.int64], float, bool]:
    """Search ``vector`` or, with ``out``, the sum of both; memory for indices grows as they are found."""
    vector, gradient = fixed(vector), fixed(gradient)
    total = vector if out is None else fixed(out)
    # Enough for all of one chunk to pass; and nothing is to be written where nothing is to be added.
    least = max(length, min(_CHUNK, vector.size)) + SLACK
    written = np.empty(0, np.float32) if out is None else out
    bins = -(-vector.size // length)
    pieces, peaks = Pieces(vector.size), np.zeros(1)
    while pieces.state[0] < bins:
        _adaptive_bins(
            vector,
            gradient,
            written,
            total,
            total.view(np.int32),
            soft,
            length,
            out is not None,
            pieces.state,
            pieces.room(least),
            peaks,
        )
    return pieces.all(), float(peaks[0]), not pieces.state[2]
