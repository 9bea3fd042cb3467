"""Compiled kernel of :mod:`fedcomp.kernels.hadamard`: the same additions as the numpy tier, in the same order.

Memory decides at model size. First all short distances within a block that stays in the cache, then the long ones of a
strip of 64 columns, copied side by side: each is one pass over the vector, and two suffice up to 2²⁴ elements. Within
a block up to three distances are taken at once, in registers; which numbers are added does not depend on it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray

from fedcomp.kernels import portable
from fedcomp.kernels.lanes import F32, F64, I1, I32, WIDTH, fixed, intrinsic, kernel, load, part, prefetch, splat, store

_BLOCK: Final = 1 << 15
"""Elements whose short distances are finished before the next are touched."""

_ROWS: Final = 1 << 9
"""Blocks that one strip of columns joins."""

_LANES: Final = 16

_AHEAD: Final = 4
"""Rows of a strip that are asked for before they are needed: no processor foresees strides of this length."""


def _vector(array_type: Any, lanes: int) -> Any:
    return ir.VectorType(F32 if array_type.dtype == types.float32 else F64, lanes)


@intrinsic
def _head(typingctx: Any, values: Any, start: Any, word: Any, scale: Any) -> Any:
    """Scale 64 elements, negate those whose bit is set, and transform them among themselves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, vector = signature.args[0], _vector(signature.args[0], WIDTH)
        v = load(context, builder, array, args[0], args[1], vector)
        v = builder.fmul(v, splat(builder, args[3], vector))
        mask = builder.bitcast(args[2], ir.VectorType(I1, WIDTH))
        v = builder.select(mask, builder.fneg(v), v)
        distance = 1
        while distance < WIDTH:
            partner = ir.Constant(ir.VectorType(I32, WIDTH), [lane ^ distance for lane in range(WIDTH)])
            upper = ir.Constant(ir.VectorType(I1, WIDTH), [bool(lane & distance) for lane in range(WIDTH)])
            other = builder.shuffle_vector(v, v, partner)
            # a - b is a + (-b), bit for bit: one addition serves both halves of a pair.
            v = builder.fadd(other, builder.select(upper, builder.fneg(v), v))
            distance *= 2
        store(context, builder, array, args[0], args[1], v)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.uint64, values.dtype), codegen


def _step(stages: int) -> Any:
    """Return the kernel part that takes ``stages`` distances at once for 16 neighbours.

    Elements that belong together are ``gap`` apart in the source, from ``at`` on, and ``width`` in the target.
    """

    def step(typingctx: Any, source: Any, at: Any, gap: Any, target: Any, to: Any, width: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = _vector(signature.args[0], _LANES)
            places = [[args[1]], [args[4]]]
            for one, distance in zip(places, (args[2], args[5]), strict=True):
                for _ in range((1 << stages) - 1):
                    one.append(builder.add(one[-1], distance))
            held = [load(context, builder, signature.args[0], args[0], place, vector) for place in places[0]]
            for stage in range(stages):
                for i in range(1 << stages):
                    if not i >> stage & 1:
                        j = i | 1 << stage
                        held[i], held[j] = builder.fadd(held[i], held[j]), builder.fsub(held[i], held[j])
            for place, value in zip(places[1], held, strict=True):
                store(context, builder, signature.args[3], args[3], place, value)
            return context.get_dummy_value()

        return types.void(source, types.intp, types.intp, target, types.intp, types.intp), codegen

    return intrinsic(step)


_step1, _step2, _step3 = _step(1), _step(2), _step(3)


@intrinsic
def _ask(typingctx: Any, values: Any, start: Any) -> Any:
    """Ask for 64 elements that will be needed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(context, builder, signature.args[0], args[0], args[1], WIDTH, ahead=0)
        return context.get_dummy_value()

    return types.void(values, types.intp), codegen


@intrinsic
def _move(typingctx: Any, source: Any, at: Any, target: Any, to: Any, word: Any) -> Any:
    """Copy 64 elements, negating those whose bit is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _vector(signature.args[0], WIDTH)
        v = load(context, builder, signature.args[0], args[0], args[1], vector)
        mask = builder.bitcast(args[4], ir.VectorType(I1, WIDTH))
        store(context, builder, signature.args[2], args[2], args[3], builder.select(mask, builder.fneg(v), v))
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp, types.uint64), codegen


@part
def _distances(values, start, width, end):
    """Take all distances from ``width`` to below ``end`` among the ``end`` elements from ``start`` on."""
    while width < end:
        if width * 8 <= end:
            for block in range(start, start + end, width * 8):
                for i in range(block, block + width, _LANES):
                    _step3(values, i, width, values, i, width)
            width *= 8
        elif width * 4 <= end:
            for block in range(start, start + end, width * 4):
                for i in range(block, block + width, _LANES):
                    _step2(values, i, width, values, i, width)
            width *= 4
        else:
            for i in range(start, start + width, _LANES):
                _step1(values, i, width, values, i, width)
            width *= 2


@kernel
def _hadamard(values, before, after, scale, strip):
    n = values.size
    block = min(n, _BLOCK)
    for start in range(0, n, block):
        for i in range(start, start + block, WIDTH):
            _head(values, i, before[i // WIDTH], scale)
        _distances(values, start, WIDTH, block)
    if block == n:
        for i in range(0, n, WIDTH):
            _move(values, i, values, i, after[i // WIDTH])
    stride = block
    nothing = np.uint64(0)
    while stride < n:
        rows = min(_ROWS, n // stride)
        last = stride * rows == n
        for base in range(0, n, stride * rows):
            for column in range(base, base + stride, WIDTH):
                if rows < 8:
                    for row in range(rows):
                        _move(values, column + row * stride, strip, row * WIDTH, nothing)
                    _distances(strip, 0, WIDTH, rows * WIDTH)
                else:
                    for row in range(0, rows, 8):
                        at = column + row * stride
                        for ahead in range(8, 16):
                            _ask(values, at + ahead * stride)
                        for i in range(0, WIDTH, _LANES):
                            _step3(values, at + i, stride, strip, row * WIDTH + i, WIDTH)
                    _distances(strip, 0, 8 * WIDTH, rows * WIDTH)
                for row in range(rows):
                    i = column + row * stride
                    _ask(values, i + _AHEAD * stride)
                    _move(strip, row * WIDTH, values, i, after[i // WIDTH] if last else nothing)
        stride *= rows


def hadamard(values: NDArray[Any], before: NDArray[np.uint64], after: NDArray[np.uint64], scale: float) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.hadamard`."""
    if values.size < WIDTH:
        portable.hadamard(values, before, after, scale)
        return
    _hadamard(values, fixed(before), fixed(after), values.dtype.type(scale), np.empty(_ROWS * WIDTH, values.dtype))
