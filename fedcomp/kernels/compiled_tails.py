"""The numba tier's kernels on the values above a threshold; see :mod:`fedcomp.kernels.compiled`.

Every block of 64 is compared first; only one with a hit is looked at again. Sums are masked, not branched: 32 lanes of
float64 that take two rows of a block one after the other, the order that :class:`fedcomp.kernels.interface.Ops` fixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fedcomp.kernels.interface import BLOCK, INFINITY, LANES, MAGNITUDE, Bits
from fedcomp.kernels.lanes import (
    F32,
    F64,
    I32,
    I64,
    SLACK,
    WIDTH,
    Pieces,
    append,
    block_hits,
    fixed,
    intrinsic,
    kernel,
    load,
    magnitudes,
    prefetch,
    splat,
    store,
    trailing_zeros,
    word_of,
)

_DOUBLES = ir.VectorType(F64, LANES)
_LONGS = ir.VectorType(I64, LANES)
_EXPONENT_BIAS = 1023


def _row(context: Any, builder: Any, signature: Any, args: Any, at: Any) -> tuple[Any, Any]:
    """Return the elements above ``args[2]`` in the row of ``args[0]`` from ``at`` on, and the magnitudes in float64."""
    vector = ir.VectorType(I32, LANES)
    found = magnitudes(builder, load(context, builder, signature.args[0], args[0], at, vector))
    above = builder.icmp_signed(">", found, splat(builder, args[2], vector))
    return above, builder.fpext(builder.bitcast(found, ir.VectorType(F32, LANES)), _DOUBLES)


def _each_hit(context: Any, builder: Any, signature: Any, args: Any) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """Write the loop over ``args[3]`` blocks from ``args[1]`` on; its body only sees blocks with hits.

    Yields the word of hits and both rows.
    """
    with cgutils.for_range(builder, args[3]) as loop:
        at = builder.add(args[1], builder.mul(loop.index, ir.Constant(I64, WIDTH)))
        prefetch(context, builder, signature.args[0], args[0], at, WIDTH)
        second = builder.add(at, ir.Constant(I64, LANES))
        rows = [_row(context, builder, signature, args, place) for place in (at, second)]
        low, high = (word_of(builder, above) for above, _ in rows)
        word = builder.or_(low, builder.shl(high, ir.Constant(I64, LANES)))
        with builder.if_then(builder.icmp_unsigned("!=", word, ir.Constant(I64, 0))):
            yield word, rows


@intrinsic
def _add_tail(typingctx: Any, bits: Any, begin: Any, limit: Any, blocks: Any, about: Any, sums: Any) -> Any:
    """Add the sums of d and d * d over ``blocks`` blocks of 64 to the lanes of ``sums``; return the count."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_DOUBLES, [0.0] * LANES)
        held = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
        count = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))
        for word, rows in _each_hit(context, builder, signature, args):
            builder.store(builder.add(builder.load(count), builder.ctpop(word)), count)
            for above, values in rows:
                d = builder.select(above, builder.fsub(values, splat(builder, args[4], _DOUBLES)), zero)
                for lanes, term in zip(held, (d, builder.fmul(d, d)), strict=True):
                    builder.store(builder.fadd(builder.load(lanes), term), lanes)
        for place, lanes in zip((0, LANES), held, strict=True):
            where = ir.Constant(I64, place)
            total = load(context, builder, signature.args[5], args[5], where, _DOUBLES)
            store(context, builder, signature.args[5], args[5], where, builder.fadd(total, builder.load(lanes)))
        return builder.load(count)

    return types.int64(bits, types.int64, types.int32, types.int64, types.float64, sums), codegen


def _split(builder: Any, values: Any) -> tuple[Any, Any]:
    """Return exponents and mantissas in [1, 2) of positive normal float64 lanes."""
    bits = builder.bitcast(values, _LONGS)
    # Differences of float32 values are at least 2**-149: normal numbers in float64, whatever the input.
    exponents = builder.sub(
        builder.lshr(bits, ir.Constant(_LONGS, [52] * LANES)), ir.Constant(_LONGS, [_EXPONENT_BIAS] * LANES)
    )
    fraction = builder.and_(bits, ir.Constant(_LONGS, [2**52 - 1] * LANES))
    one = ir.Constant(_LONGS, [_EXPONENT_BIAS << 52] * LANES)
    return exponents, builder.bitcast(builder.or_(fraction, one), _DOUBLES)


@intrinsic
def _multiply_tail(
    typingctx: Any, bits: Any, begin: Any, limit: Any, blocks: Any, origin: Any, product: Any, exponents: Any
) -> Any:
    """Multiply the product of the differences over ``blocks`` blocks of 64 into ``product`` and ``exponents``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = ir.Constant(_DOUBLES, [1.0] * LANES)
        # A lane multiplies 64 mantissas per call, each below 2: the product stays below 2**64.
        factor = cgutils.alloca_once_value(builder, one)
        added = cgutils.alloca_once_value(builder, ir.Constant(_LONGS, [0] * LANES))
        for _, rows in _each_hit(context, builder, signature, args):
            for above, values in rows:
                d = builder.select(above, builder.fsub(values, splat(builder, args[4], _DOUBLES)), one)
                exponent, mantissa = _split(builder, d)
                builder.store(builder.fmul(builder.load(factor), mantissa), factor)
                builder.store(builder.add(builder.load(added), exponent), added)
        first = ir.Constant(I64, 0)
        held = load(context, builder, signature.args[5], args[5], first, _DOUBLES)
        total = load(context, builder, signature.args[6], args[6], first, _LONGS)
        exponent, mantissa = _split(builder, builder.load(factor))
        more, held = _split(builder, builder.fmul(held, mantissa))
        store(context, builder, signature.args[5], args[5], first, held)
        for term in (builder.load(added), exponent, more):
            total = builder.add(total, term)
        store(context, builder, signature.args[6], args[6], first, total)
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.int32, types.int64, types.float64, product, exponents), codegen


@kernel
def _tail_sums(bits, limit, about, sums):
    """Add to ``sums``, (2 * LANES,), and return the count. The size is a multiple of 64."""
    count = 0
    for begin in range(0, bits.size, BLOCK):
        count += _add_tail(bits, begin, limit, min(BLOCK, bits.size - begin) // WIDTH, about, sums)
    return count


@kernel
def _tail_product(bits, limit, origin, product, exponents):
    """Multiply into ``product`` and ``exponents``, (LANES,) each. The size is a multiple of 64."""
    for begin in range(0, bits.size, BLOCK):
        blocks = min(BLOCK, bits.size - begin) // WIDTH
        _multiply_tail(bits, begin, limit, blocks, origin, product, exponents)


@kernel
def _find_above(bits, limit):
    full = bits.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        # Integers: at least limit + 1 is above limit. The limit is a finite number's bits, so the sum stays in 31 bits.
        word = block_hits(bits, at, limit + 1)
        if word:
            return at + trailing_zeros(word)
    for i in range(full, bits.size):
        if (bits[i] & MAGNITUDE) > limit:
            return i
    return -1


@kernel
def _select_above(bits, limit, state, indices):
    """Append from ``state[0]`` on until the index array might be too small; ``state[2]`` marks non-finite values."""
    at, written, bad = state[0], state[1], np.uint64(state[2])
    full = bits.size // WIDTH * WIDTH
    while at < full and written + SLACK <= indices.size:
        word = block_hits(bits, at, limit + 1)
        if word:
            # Only in blocks with a hit: NaN and infinity are above every limit.
            bad |= block_hits(bits, at, np.int32(INFINITY))
            written = append(word, at, indices, written)
        at += WIDTH
    if at >= full and written + SLACK <= indices.size:
        while at < bits.size:
            if (bits[at] & MAGNITUDE) > limit:
                bad |= np.uint64((bits[at] & MAGNITUDE) >= INFINITY)
                indices[written] = at
                written += 1
            at += 1
    state[0], state[1], state[2] = at, written, np.int64(bad != 0)


def find_above(bits: Bits, limit: int) -> int:
    """See :meth:`fedcomp.kernels.interface.Ops.find_above`."""
    return int(_find_above(fixed(bits), np.int32(limit)))


def select_above(bits: Bits, limit: int) -> tuple[NDArray[np.int64], bool]:
    """See :meth:`fedcomp.kernels.interface.Ops.select_above`."""
    bits = fixed(bits)
    pieces = Pieces(bits.size)
    while pieces.state[0] < bits.size:
        _select_above(bits, np.int32(limit), pieces.state, pieces.room(SLACK))
    return pieces.all(), not pieces.state[2]


def tail_sums(bits: Bits, limit: int, about: float) -> tuple[int, NDArray[np.float64]]:
    """See :meth:`fedcomp.kernels.interface.Ops.tail_sums`."""
    sums = np.zeros(2 * LANES)
    count = 0
    for stretch in _full_and_rest(bits):
        count += _tail_sums(fixed(stretch), np.int32(limit), about, sums)
    return count, sums.reshape(2, LANES)


def tail_product(bits: Bits, limit: int, origin: float) -> tuple[int, NDArray[np.float64]]:
    """See :meth:`fedcomp.kernels.interface.Ops.tail_product`."""
    product, exponents = np.ones(LANES), np.zeros(LANES, np.int64)
    for stretch in _full_and_rest(bits):
        _tail_product(fixed(stretch), np.int32(limit), origin, product, exponents)
    return int(exponents.sum()), product


def _full_and_rest(bits: Bits) -> list[Bits]:
    """Return the full blocks of the sums, and the rest padded with zeros to a multiple of 64."""
    full = bits.size // BLOCK * BLOCK
    # Zeros lie above no limit, so that what is filled up adds nothing.
    rest = np.zeros(-(-(bits.size - full) // WIDTH) * WIDTH, np.int32)
    rest[: bits.size - full] = bits[full:]
    return [bits[:full], rest]
