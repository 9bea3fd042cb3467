"""The numba tier's arg-max of bins; see :mod:`fedcomp.kernels.compiled`.

A bin of up to 64 elements is one or two vectors and leaves one word, a bit per element; where two vectors are needed
the second overlaps the first, so that nothing is masked and nothing outside the bin is read. A longer bin goes through
64 lanes that remember where they found their largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fedcomp.kernels.interface import INFINITY, MAGNITUDE, Bits
from fedcomp.kernels.lanes import (
    I32,
    I64,
    TINY,
    WIDTH,
    first_lanes,
    fixed,
    intrinsic,
    kernel,
    largest,
    largest_lane,
    load,
    magnitudes,
    prefetch,
    smallest_lane,
    splat,
    trailing_zeros,
    word_of,
)


def _bin(lanes: int) -> Any:
    """Make the kernel part for bins of ``lanes`` to ``2 * lanes`` elements."""
    vector = ir.VectorType(I32, lanes)

    @intrinsic
    def whole(typingctx: Any, bits: Any, start: Any, length: Any) -> Any:
        """Return the word of elements of the largest magnitude, and that magnitude."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, start, length = args
            second = builder.sub(length, ir.Constant(I64, lanes))
            prefetch(context, builder, signature.args[0], array, start, 2 * lanes)
            parts = [
                magnitudes(builder, load(context, builder, signature.args[0], array, at, vector))
                for at in (start, builder.add(start, second))
            ]
            peak = largest_lane(builder, largest(builder, *parts))
            low, high = (
                word_of(builder, builder.icmp_signed("==", part, splat(builder, peak, vector))) for part in parts
            )
            # Lanes in the overlap set the same bit twice.
            word = builder.or_(low, builder.shl(high, second))
            return context.make_tuple(builder, signature.return_type, [word, peak])

        return types.Tuple((types.uint64, types.int32))(bits, types.int64, types.int64), codegen

    return whole


_bin_16 = _bin(16)
_bin_32 = _bin(32)


@intrinsic
def _bin_tiny(typingctx: Any, bits: Any, start: Any, length: Any) -> Any:
    """The same for bins of at most 16 elements; reads 16."""
    vector = ir.VectorType(I32, TINY)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, length = args
        prefetch(context, builder, signature.args[0], array, start, 16)
        found = builder.and_(
            load(context, builder, signature.args[0], array, start, vector), first_lanes(builder, length)
        )
        peak = largest_lane(builder, found)
        word = word_of(builder, builder.icmp_signed("==", found, splat(builder, peak, vector)))
        return context.make_tuple(builder, signature.return_type, [word, peak])

    return types.Tuple((types.uint64, types.int32))(bits, types.int64, types.int64), codegen


@intrinsic
def _bin_long(typingctx: Any, bits: Any, start: Any, length: Any) -> Any:
    """Return the position of the first largest magnitude of a bin of at least 64 elements, and that magnitude.

    Every lane keeps its largest value and its position, so there is no second pass and no data-dependent branch.
    """
    vector = ir.VectorType(I32, WIDTH)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, length = args
        lane = ir.Constant(vector, list(range(WIDTH)))
        # Below every magnitude: the first block always replaces it, zeros included.
        held = cgutils.alloca_once_value(builder, ir.Constant(vector, [-1] * WIDTH))
        where = cgutils.alloca_once_value(builder, lane)

        def look(offset: Any) -> None:
            at = builder.add(start, offset)
            prefetch(context, builder, signature.args[0], array, at, WIDTH)
            block = magnitudes(builder, load(context, builder, signature.args[0], array, at, vector))
            before = builder.load(held)
            more = builder.icmp_signed(">", block, before)
            builder.store(builder.select(more, block, before), held)
            # Positions within a bin fit 32 bits: this tier takes no vector of 2**32 elements.
            here = builder.add(lane, splat(builder, builder.trunc(offset, I32), vector))
            builder.store(builder.select(more, here, builder.load(where)), where)

        width = ir.Constant(I64, WIDTH)
        with cgutils.for_range(builder, builder.udiv(length, width)) as loop:
            look(builder.mul(loop.index, width))
        # The last block overlaps the one before; seen twice, an element is not larger than itself.
        look(builder.sub(length, width))
        peak = largest_lane(builder, builder.load(held))
        top = builder.icmp_signed("==", builder.load(held), splat(builder, peak, vector))
        # Lanes without the largest get a position above all others, and never win the minimum.
        first = smallest_lane(
            builder, builder.select(top, builder.load(where), ir.Constant(vector, [2**32 - 1] * WIDTH))
        )
        return context.make_tuple(builder, signature.return_type, [builder.zext(first, I64), peak])

    return types.Tuple((types.int64, types.int32))(bits, types.int64, types.int64), codegen


@kernel
def _bin_argmax(bits, length, out):
    top = np.int32(0)
    full = bits.size // length
    done = 0
    if length < 16:
        # _bin_tiny reads 16 elements whatever the length, so that the last bins go through the scalar loop below.
        done = max(0, (bits.size - 16) // length)
        for b in range(done):
            word, peak = _bin_tiny(bits, b * length, length)
            out[b] = b * length + trailing_zeros(word)
            top = max(top, peak)
    elif length < 32:
        done = full
        for b in range(full):
            word, peak = _bin_16(bits, b * length, length)
            out[b] = b * length + trailing_zeros(word)
            top = max(top, peak)
    elif length <= 64:
        done = full
        for b in range(full):
            word, peak = _bin_32(bits, b * length, length)
            out[b] = b * length + trailing_zeros(word)
            top = max(top, peak)
    else:
        done = full
        for b in range(full):
            at, peak = _bin_long(bits, b * length, length)
            out[b] = b * length + at
            top = max(top, peak)
    for b in range(done, out.size):
        best = b * length
        for i in range(best + 1, min(best + length, bits.size)):
            if (bits[i] & MAGNITUDE) > (bits[best] & MAGNITUDE):
                best = i
        out[b] = best
        top = max(top, np.int32(bits[best] & MAGNITUDE))
    return top


def bin_argmax(bits: Bits, length: int) -> tuple[NDArray[np.int64], bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.bin_argmax`."""
    indices = np.empty(-(-bits.size // length), np.int64)
    top = _bin_argmax(fixed(bits), length, indices)
    return indices, bool(top < INFINITY)
