"""Compiled kernels of :mod:`fedcomp.kernels.signs`: the additions of the numpy tier in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray

from fedcomp.kernels.lanes import F32, F64, I1, WIDTH, fixed, intrinsic, kernel, load, splat, store


@intrinsic
def _add_word(typingctx: Any, out: Any, start: Any, word: Any, scalar: Any) -> Any:
    """Add ``scalar`` to 64 elements, negated where the word's bit is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(F64, WIDTH)
        held = load(context, builder, signature.args[0], args[0], args[1], vector)
        both = splat(builder, args[3], vector)
        mask = builder.bitcast(args[2], ir.VectorType(I1, WIDTH))
        held = builder.fadd(held, builder.select(mask, builder.fneg(both), both))
        store(context, builder, signature.args[0], args[0], args[1], held)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint64, types.float64), codegen


@intrinsic
def _add_signed(typingctx: Any, sums: Any, row: Any, vector: Any, start: Any, word: Any) -> Any:
    """Add 64 elements of ``vector`` to a row of ``sums``, negated where the word's bit is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(F64, WIDTH)
        held = load(context, builder, signature.args[0], args[0], args[1], wide)
        given = load(context, builder, signature.args[2], args[2], args[3], ir.VectorType(F32, WIDTH))
        given = builder.fpext(given, wide)
        mask = builder.bitcast(args[4], ir.VectorType(I1, WIDTH))
        held = builder.fadd(held, builder.select(mask, builder.fneg(given), given))
        store(context, builder, signature.args[0], args[0], args[1], held)
        return context.get_dummy_value()

    return types.void(sums, types.intp, vector, types.intp, types.uint64), codegen


@kernel
def _sign_products(vector, words, sums):
    whole = vector.size // WIDTH
    # Block by block: 64 elements are read once for all directions.
    for block in range(whole):
        for k in range(words.shape[1]):
            _add_signed(sums, k * WIDTH, vector, block * WIDTH, words[block, k])
    for k in range(words.shape[1]):
        for i in range(whole * WIDTH, vector.size):
            lane = i - whole * WIDTH
            value = np.float64(vector[i])
            sums[k * WIDTH + lane] += -value if words[whole, k] >> lane & 1 else value


@kernel
def _add_signs(out, words, scalars):
    whole = out.size // WIDTH
    # Block by block: all directions are added while 64 elements stay in the first cache.
    for block in range(whole):
        for k in range(scalars.size):
            _add_word(out, block * WIDTH, words[block, k], scalars[k])
    for k in range(scalars.size):
        for i in range(whole * WIDTH, out.size):
            negative = words[whole, k] >> (i - whole * WIDTH) & 1
            out[i] += -scalars[k] if negative else scalars[k]


def add_signs(out: NDArray[Any], words: NDArray[Any], scalars: NDArray[Any]) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_signs`."""
    _add_signs(out, fixed(words), fixed(scalars))


def sign_products(vector: NDArray[Any], words: NDArray[Any]) -> NDArray[Any]:
    """See :meth:`fedcomp.kernels.interface.Ops.sign_products`."""
    sums = np.zeros(words.shape[1] * WIDTH)
    _sign_products(fixed(vector), fixed(words), sums)
    return sums.reshape(-1, WIDTH)
