"""The portable compiled tier: bytes side by side in 64-bit words, with instructions that every 64-bit machine has.

Doubling eight bytes in a word is a shift, and 0x1D in those that overflow. From a source's doubles come its sixteen
multiples by 0 .. 15 and the sixteen by 0, 16 .. 240; a product with any coefficient is the sum of one of each. The
multiples of a few sources' tile fit in the first-level cache, are made once, and serve all outputs: per output, source
and word two loads and two exclusive-ors. Tiles are LLVM's generic vectors, which it makes of what the target has.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from fedcomp.coding.kernels.lanes import (
    I8,
    I64,
    address,
    compiled,
    copy,
    kernel,
    literal_intrinsic,
    load,
    load_word,
    offset,
    store,
    write_places,
)

TILE: Final = 128
"""Bytes of a source that are treated at once."""

GROUP: Final = 8
"""Sources whose multiples are held at once: 32 x TILE x GROUP = 32 KiB."""

WORDS: Final = ir.VectorType(I64, 8)


def scratch_bytes(n: int, k: int) -> int:
    """Return the bytes of working memory a product of shapes (n, k) and (k, any) needs."""
    return n * k + 8 * k + TILE * (32 * GROUP + n + 1) + 192


def _times_two(builder: Any, x: Any) -> Any:
    """Return the doubles of the bytes in 64-bit lanes."""

    def every(byte: int) -> Any:
        return ir.Constant(WORDS, [int.from_bytes(bytes([byte] * 8), "little")] * WORDS.count)

    def constant(value: int) -> Any:
        return ir.Constant(WORDS, [value] * WORDS.count)

    shifted = builder.shl(builder.and_(x, every(0x7F)), constant(1))
    overflow = builder.lshr(builder.and_(x, every(0x80)), constant(7))
    # 255 times 0 or 1 in every byte, without a multiplication: nothing is carried from byte to byte.
    full = builder.sub(builder.shl(overflow, constant(8)), overflow)
    folded = builder.and_(full, every(0x1D))
    return builder.xor(shifted, folded)


@literal_intrinsic
def _multiples(typingctx, held, source, tile):
    """Write the 16 + 16 multiples of the tile at ``source``, one tile each."""
    size = tile.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for start in range(0, size, 64):
            doubled = load(builder, offset(builder, args[1], (start, 1)), WORDS)
            for half in range(2):
                entries = [ir.Constant(WORDS, [0] * WORDS.count)]
                # Every pass adds the next doubling to all entries so far: in the end entry i is i times the source.
                for _ in range(4):
                    entries += [builder.xor(entry, doubled) for entry in entries]
                    doubled = _times_two(builder, doubled)
                for j, entry in enumerate(entries):
                    store(builder, offset(builder, args[0], (16 * half + j, size), (start, 1)), entry)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, tile), codegen


@literal_intrinsic
def _add(typingctx, sums, held, coefficients, count, tile):
    """Add ``count`` products to the tile at ``sums``: coefficients are consecutive bytes."""
    size = tile.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = range(0, size, 64)
        totals = [cgutils.alloca_once(builder, WORDS) for _ in starts]
        for start, total in zip(starts, totals, strict=True):
            builder.store(load(builder, offset(builder, args[0], (start, 1)), WORDS), total)
        with cgutils.for_range(builder, args[3], intp=I64) as loop:
            coefficient = builder.zext(load(builder, offset(builder, args[2], (loop.index, 1)), I8), I64)
            table = offset(builder, args[1], (loop.index, 32 * size))
            low = offset(builder, table, (builder.and_(coefficient, ir.Constant(I64, 15)), size))
            high = offset(builder, table, (builder.lshr(coefficient, ir.Constant(I64, 4)), size), (16, size))
            for start, total in zip(starts, totals, strict=True):
                both = [load(builder, offset(builder, entry, (start, 1)), WORDS) for entry in (low, high)]
                builder.store(builder.xor(builder.load(total), builder.xor(*both)), total)
        for start, total in zip(starts, totals, strict=True):
            store(builder, offset(builder, args[0], (start, 1)), builder.load(total))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, tile), codegen


@kernel
def product(a, b, places, out, words, scratch, accumulate):
    """Write ``a @ b``, or add it to what is in ``out``. Rows of ``b`` and ``out`` must be contiguous.

    ``places`` are the addresses of the sources; when there are none, the sources are the rows of ``b``. ``words`` is
    not used: all tiers are called alike.
    """
    n, k = a.shape
    size = out.shape[1]
    held = (address(scratch) + 63) // 64 * 64
    sums = held + 32 * TILE * GROUP
    padded = sums + TILE * n
    source = padded + TILE
    factors = source + 8 * k
    write_places(source, b, places, k)
    start_of_factors = factors - address(scratch)
    for r in range(n):
        for j in range(k):
            scratch[start_of_factors + r * k + j] = a[r, j]
    start_of_sums = sums - address(scratch)
    start_of_padded = padded - address(scratch)
    target, target_step = address(out), out.strides[0]
    scratch[start_of_padded : start_of_padded + TILE] = 0
    done = 0
    while done < size:
        width = min(TILE, size - done)
        scratch[start_of_sums : start_of_sums + TILE * n] = 0
        if accumulate:
            for r in range(n):
                copy(sums + r * TILE, target + r * target_step + done, width)
        for first in range(0, k, GROUP):
            count = min(GROUP, k - first)
            for j in range(count):
                here = load_word(source + 8 * (first + j)) + done
                # Tiles are read in full; the last one is copied out, since behind a row's end the array may end too.
                if width < TILE:
                    copy(padded, here, width)
                    here = padded
                _multiples(held + j * 32 * TILE, here, TILE)
            for r in range(n):
                _add(sums + r * TILE, held, factors + r * k + first, count, TILE)
        for r in range(n):
            copy(target + r * target_step + done, sums + r * TILE, width)
        done += TILE


LINE: Final = 64
"""Rows of a matrix that is reduced are padded to multiples of this: they are short, a tile would be mostly padding."""

_BYTES = types.Array(types.uint8, 2, "C")
_TABLE = types.Array(types.uint8, 2, "C", readonly=True)


_ROW = types.Array(types.uint8, 1, "C")


def reduce_scratch_bytes(n: int, width: int) -> int:
    """Return the bytes of working memory the reduction of a matrix of shape (n, width) needs."""
    return n + 32 * width + 64


@compiled(types.intp(_BYTES, types.intp, _TABLE, types.Array(types.uint8, 1, "C", readonly=True), _ROW))
def reduce(matrix, columns, products, reciprocals, scratch):
    """Bring ``matrix`` to reduced row echelon form in place, pivots in its first ``columns``; return the rank.

    The number of its columns is a multiple of :data:`LINE`. Every pivot row's multiples are made once, as those of a
    source are, and serve all rows: n ** 2 row steps of a few instructions each.
    """
    n, width = matrix.shape
    # Working memory is the caller's: numba frees an array after its last use by name, and an address is not a name.
    factors = scratch[:n]
    held = (address(scratch) + n + 63) // 64 * 64
    base = address(matrix)
    rank = 0
    for column in range(columns):
        if rank == n:
            break
        pivot = rank
        while pivot < n and matrix[pivot, column] == 0:
            pivot += 1
        if pivot == n:
            continue
        for j in range(width):
            matrix[rank, j], matrix[pivot, j] = matrix[pivot, j], matrix[rank, j]
        # The pivot row becomes 1 / p times itself: it is cleared and gets its share like the others.
        inverse = reciprocals[matrix[rank, column]]
        for r in range(n):
            factors[r] = products[inverse, matrix[r, column]]
        factors[rank] = inverse
        # What is left of the pivot is zero in its row.
        first = column // LINE * LINE
        for start in range(first, width, LINE):
            _multiples(held + 32 * start, base + rank * width + start, LINE)
        matrix[rank, :] = 0
        for r in range(n):
            if factors[r]:
                for start in range(first, width, LINE):
                    _add(base + r * width + start, held + 32 * start, address(factors) + r, 1, LINE)
        rank += 1
    return rank
