"""The vector tiers: products by GFNI bit matrices and by byte shuffles, written in LLVM vector types.

One column tile at a time: the sources' tile is copied together, so that it stays in the first-level cache while all
outputs pass over it (rows of a generation lie powers of two apart and would displace each other). Then, for four
outputs and a few vectors, sums are kept in registers over all sources and stored once. With 512 bits two sources are
added at a time: three-operand logic adds two products to a sum in one instruction.

Asking LLVM for an intrinsic that its target lacks aborts the process. :mod:`fedcomp.coding.kernels.dispatch` decides,
and nobody else calls what is made here.

numba's cache holds each kernel once per target CPU name and feature string, so that a cache directory shared by
different machines, or moved, never brings one machine's code to another. It looks at the file of the cached kernel, so
that whatever shapes a kernel stands in this file.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fedcomp.coding.kernels import tables
from fedcomp.coding.kernels.lanes import (
    I8,
    I32,
    I64,
    address,
    copy,
    kernel,
    literal_intrinsic,
    load,
    load_word,
    offset,
    store,
    store_word,
    write_places,
)

ROWS: Final = 4
"""Outputs whose sums are in registers at a time."""

AFFINE: Final = 0
SHUFFLE: Final = 1
TABLE: Final = 2
"""How products are formed: by GFNI's bit matrices, by x86's byte shuffle, by NEON's table instruction."""

NAMES: Final = {
    (AFFINE, 64): "llvm.x86.vgf2p8affineqb.512",
    (AFFINE, 32): "llvm.x86.vgf2p8affineqb.256",
    (SHUFFLE, 64): "llvm.x86.avx512.pshuf.b.512",
    (SHUFFLE, 32): "llvm.x86.avx2.pshuf.b",
    (SHUFFLE, 16): "llvm.x86.ssse3.pshuf.b.128",
    (TABLE, 16): "llvm.aarch64.neon.tbl1.v16i8",
}


class VectorShape(NamedTuple):
    """What distinguishes the vector tiers: bytes of a vector, vectors of a tile, how a product is formed."""

    width: int
    vectors: int
    how: int
    at_once: int


SHAPES: Final = {
    "gfni512": VectorShape(64, 4, AFFINE, 2),
    "gfni256": VectorShape(32, 2, AFFINE, 1),
    "shuffle512": VectorShape(64, 4, SHUFFLE, 1),
    "shuffle256": VectorShape(32, 2, SHUFFLE, 1),
    "shuffle128": VectorShape(16, 2, SHUFFLE, 1),
    "neon": VectorShape(16, 4, TABLE, 1),
}
"""A tile has the vectors that four outputs leave room for in 32 registers (512 bits, NEON) or 16 (the others).

``neon`` has been compiled for aarch64, but never run; :func:`fedcomp.coding.kernels.dispatch.best` checks every product
before a tier is used.
"""

NIBBLES: Final = 8 * 256
"""Bytes from the first word of :func:`words_of` to the nibble tables."""


def words_of(shape: VectorShape) -> NDArray[np.uint64]:
    """Return what a kernel of this shape takes as ``words``: one word per coefficient, then the nibble tables.

    The word is the coefficient's bit matrix, or where its nibble tables begin, in bytes. Shape (256 + 1024,),
    uint64.
    """
    words = tables.matrices() if shape.how == AFFINE else np.arange(256, dtype=np.uint64) * np.uint64(32)
    return np.concatenate([words, tables.nibbles().ravel().view(np.uint64)])


def scratch_bytes(shape: VectorShape, n: int, k: int) -> int:
    """Return the bytes of working memory a product of shapes (n, k) and (k, any) needs."""
    return 8 * n * k + 16 * k + shape.width * (shape.vectors * k + n) + 256


def _repeat(builder: Any, value: Any, width: int) -> Any:
    """Return ``value`` (8 or 16 bytes) in every place of a vector of ``width`` bytes."""
    if isinstance(value.type, ir.VectorType):
        if value.type.count == width:
            return value
        lanes = ir.Constant(ir.VectorType(I32, width), [j % value.type.count for j in range(width)])
        return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)
    count = width // 8
    undefined = ir.Constant(ir.VectorType(I64, count), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    everywhere = ir.Constant(ir.VectorType(I32, count), [0] * count)
    return builder.bitcast(builder.shuffle_vector(first, undefined, everywhere), ir.VectorType(I8, width))


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    declared = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, name), arguments)


def _affine(builder: Any, width: int, inputs: list[Any], matrix: Any) -> list[Any]:
    """Return the products of vectors with the coefficient of this bit matrix, a 64-bit word."""
    everywhere = _repeat(builder, matrix, width)
    # The last operand is a constant the instruction adds; a multiplication has none.
    return [_call(builder, NAMES[AFFINE, width], x, everywhere, ir.Constant(I8, 0)) for x in inputs]


def _lookup(builder: Any, width: int, inputs: list[Any], entries: Any, how: int) -> list[Any]:
    """Return the products of vectors, given as low and high nibbles, with the coefficient of these tables."""
    half = ir.VectorType(I8, 16)
    low, high = (_repeat(builder, load(builder, offset(builder, entries, (j, 16)), half), width) for j in range(2))
    name = NAMES[how, width]
    return [builder.xor(_call(builder, name, low, lo), _call(builder, name, high, hi)) for lo, hi in inputs]


def _halves(builder: Any, x: Any) -> tuple[Any, Any]:
    mask = ir.Constant(x.type, [15] * x.type.count)
    four = ir.Constant(x.type, [4] * x.type.count)
    return builder.and_(x, mask), builder.lshr(x, four)


def _generate_block(width: int, vectors: int, rows: int, how: int, at_once: int) -> Any:
    """Return the code of :func:`block` for one shape."""
    vector = ir.VectorType(I8, width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, sources, factors, table, target, target_step, accumulate = args[:8]
        places = [[offset(builder, target, (r, target_step), (v, width)) for v in range(vectors)] for r in range(rows)]
        zero = ir.Constant(vector, [0] * width)
        # Stack slots in name only: LLVM promotes them to registers, and no phi nodes need to be written.
        sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)]
        for held in (place for line in sums for place in line):
            builder.store(zero, held)
        with builder.if_then(accumulate):
            for r in range(rows):
                for v in range(vectors):
                    builder.store(load(builder, places[r][v], vector), sums[r][v])

        def add(first: Any, count: int) -> None:
            """Add the products of ``count`` sources from ``first`` on."""
            inputs: list[list[Any]] = []
            for j in range(count):
                row = builder.add(load(builder, offset(builder, source, (first, 8), (j, 8)), I64), at)
                loaded = [load(builder, offset(builder, row, (v, width)), vector) for v in range(vectors)]
                inputs.append(loaded if how == AFFINE else [_halves(builder, x) for x in loaded])
            for r in range(rows):
                found = []
                for j in range(count):
                    factor = load(builder, offset(builder, factors, (first, 8 * rows), (j * rows + r, 8)), I64)
                    if how == AFFINE:
                        found.append(_affine(builder, width, inputs[j], factor))
                    else:
                        found.append(_lookup(builder, width, inputs[j], builder.add(table, factor), how))
                for v in range(vectors):
                    both = functools.reduce(builder.xor, [products[v] for products in found])
                    builder.store(builder.xor(builder.load(sums[r][v]), both), sums[r][v])

        together = ir.Constant(I64, at_once)
        times = builder.udiv(sources, together)
        with cgutils.for_range(builder, times, intp=I64) as loop:
            add(builder.mul(loop.index, together), at_once)
        if at_once == 2:
            even = builder.mul(times, together)
            with builder.if_then(builder.icmp_unsigned("<", even, sources)):
                add(even, 1)
        for r in range(rows):
            for v in range(vectors):
                store(builder, places[r][v], builder.load(sums[r][v]))
        return context.get_dummy_value()

    return generate


@literal_intrinsic
def block(
    typingctx,
    source,
    at,
    sources,
    factors,
    table,
    target,
    target_step,
    accumulate,
    width,
    vectors,
    rows,
    how,
    at_once,
):
    """Form ``rows`` x ``vectors`` sums over all sources and store them (or add them to what is stored).

    ``source`` is where the addresses of the sources are, and ``at`` is added to each; steps are in bytes. ``factors``
    holds, source by source, one 64-bit word per row: the bit matrix, or the offset of the coefficient's nibble table in
    ``table``.
    """
    shape = [x.literal_value for x in (width, vectors, rows, how, at_once)]
    signature = types.void(*[types.intp] * 7, types.boolean, width, vectors, rows, how, at_once)
    return signature, _generate_block(*shape)


@literal_intrinsic
def gather(typingctx, target, source, at, sources, width, vectors):
    """Copy the tile of every source together, from ``at`` bytes behind the addresses at ``source``."""
    vector = ir.VectorType(I8, width.literal_value)
    size = width.literal_value * vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with cgutils.for_range(builder, args[3], intp=I64) as loop:
            here = offset(builder, args[0], (loop.index, size))
            there = builder.add(load(builder, offset(builder, args[1], (loop.index, 8)), I64), args[2])
            loaded = [
                load(builder, offset(builder, there, (start, 1)), vector) for start in range(0, size, vector.count)
            ]
            for j, value in enumerate(loaded):
                store(builder, offset(builder, here, (j, vector.count)), value)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, width, vectors), codegen


def make(shape: VectorShape) -> Any:
    """Return the compiled product of one vector tier.

    ``product(a, b, places, out, words, scratch, add)``: ``places`` are the addresses of the sources; when there are
    none, the sources are the rows of ``b``. ``words`` from :func:`words_of`, ``scratch`` with at least
    :func:`scratch_bytes`. Rows of ``b`` and ``out`` must be contiguous.
    """
    # numba takes integers of a closure as constants, and its cache tells kernels apart by them.
    width, vectors, how, at_once = shape
    tile = width * vectors

    def product(a, b, places, out, words, scratch, add):
        n, k = a.shape
        size = out.shape[1]
        base = address(scratch)
        # On cache lines; the roundings are what scratch_bytes has 256 bytes to spare for.
        factors = (base + 63) // 64 * 64
        source = factors + (8 * n * k + 63) // 64 * 64
        tiles = source + (8 * k + 63) // 64 * 64
        held = tiles + (8 * k + 63) // 64 * 64
        results = held + tile * k
        write_places(source, b, places, k)
        for j in range(k):
            store_word(tiles + 8 * j, np.uint64(held + j * tile))
        place = factors
        # In the order in which blocks read them: four outputs at a time, and for these source by source.
        for start in range(0, n, ROWS):
            stop = min(start + ROWS, n)
            for j in range(k):
                for r in range(start, stop):
                    store_word(place, words[a[r, j]])
                    place += 8
        target, target_step = address(out), out.strides[0]
        entries = address(words) + NIBBLES
        at = 0
        while at + tile <= size:
            here, skip = source, at
            # With at most four outputs each source is read once, and a copy would gain nothing.
            if n > ROWS:
                gather(held, source, at, k, width, vectors)
                here, skip = tiles, 0
            place = factors
            r = 0
            while r + ROWS <= n:
                there = target + r * target_step + at
                block(here, skip, k, place, entries, there, target_step, add, width, vectors, 4, how, at_once)
                place += 8 * ROWS * k
                r += ROWS
            there = target + r * target_step + at
            # The number of rows is a literal that shapes the compiled code, so each remainder is a call of its own.
            if n - r == 3:
                block(here, skip, k, place, entries, there, target_step, add, width, vectors, 3, how, at_once)
            elif n - r == 2:
                block(here, skip, k, place, entries, there, target_step, add, width, vectors, 2, how, at_once)
            elif n - r == 1:
                block(here, skip, k, place, entries, there, target_step, add, width, vectors, 1, how, at_once)
            at += tile
        while at < size:
            # Single vectors; the last one is computed in full beside the arrays and copied as far as it reaches.
            here, skip = source, at
            there, there_step = target + at, target_step
            left = min(size - at, width)
            if left < width:
                for j in range(k):
                    copy(held + j * tile, load_word(source + 8 * j) + at, left)
                here, skip, there, there_step = tiles, 0, results, width
                if add:
                    for r in range(n):
                        copy(results + r * width, target + r * target_step + at, left)
            place = factors
            r = 0
            while r + ROWS <= n:
                to = there + r * there_step
                block(here, skip, k, place, entries, to, there_step, add, width, 1, 4, how, at_once)
                place += 8 * ROWS * k
                r += ROWS
            to = there + r * there_step
            if n - r == 3:
                block(here, skip, k, place, entries, to, there_step, add, width, 1, 3, how, at_once)
            elif n - r == 2:
                block(here, skip, k, place, entries, to, there_step, add, width, 1, 2, how, at_once)
            elif n - r == 1:
                block(here, skip, k, place, entries, to, there_step, add, width, 1, 1, how, at_once)
            if left < width:
                for r in range(n):
                    copy(target + r * target_step + at, results + r * width, left)
            at += width

    return kernel(product)
