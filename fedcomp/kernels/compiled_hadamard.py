"""Compiled kernel of :mod:`fedcomp.kernels.hadamard`: the additions of the numpy tier in the same order.

Memory decides at model size. First all short distances within a block that stays in the cache, then the long ones among
64 blocks, in a strip of 64 columns that are brought side by side: each is one pass over the vector, and two suffice up
to 2²⁴ elements. Up to three distances are taken at once, in registers: three on the way into a strip, three on the way
back. Which numbers are added does not depend on it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray

from fedcomp.kernels import portable
from fedcomp.kernels.lanes import F32, F64, I1, I32, I64, WIDTH, fixed, intrinsic, kernel, load, part, splat, store

_NEAR: Final = 1 << 12
"""Elements that stay in the first-level cache while their distances are processed."""

_BLOCK: Final = 1 << 18
"""Elements whose short distances are finished before the next ones are read: a MiB of float32 in the second-level
cache."""

_ROWS: Final = 1 << 6
"""Number of blocks that one strip of columns combines: eight times eight."""

_LANES: Final = 16


def _vector(array_type: Any, lanes: int) -> Any:
    return ir.VectorType(F32 if array_type.dtype == types.float32 else F64, lanes)


@intrinsic
def _head(typingctx: Any, values: Any, start: Any, word: Any, scale: Any) -> Any:
    """Scale 64 elements, negate those whose bit is set, and transform them."""

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
    """Return the kernel part that processes ``stages`` distances at once for 16 neighbours.

    Elements that belong together are ``gap`` apart in the source, from ``at`` on, and ``width`` in the target. With
    words of signs, elements are negated if the bit of their position in the target is set; None changes no sign.
    """

    def step(typingctx: Any, source: Any, at: Any, gap: Any, target: Any, to: Any, width: Any, signs: Any) -> Any:
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
                if isinstance(signature.args[6], types.Array):
                    value = _signed(context, builder, signature.args[6], args[6], place, value)
                store(context, builder, signature.args[3], args[3], place, value)
            return context.get_dummy_value()

        return types.void(source, types.intp, types.intp, target, types.intp, types.intp, signs), codegen

    return intrinsic(step)


def _signed(context: Any, builder: Any, array_type: Any, array: Any, place: Any, value: Any) -> Any:
    """Negate the lanes of ``value``, destined for ``place``, whose bit is set."""
    data = context.make_array(array_type)(context, builder, array).data
    word = builder.load(builder.gep(data, [builder.lshr(place, ir.Constant(I64, 6))]))
    bits = builder.lshr(word, builder.and_(place, ir.Constant(I64, 63)))
    mask = builder.bitcast(builder.trunc(bits, ir.IntType(_LANES)), ir.VectorType(I1, _LANES))
    return builder.select(mask, builder.fneg(value), value)


_step0, _step1, _step2, _step3 = _step(0), _step(1), _step(2), _step(3)


@part
def _distances(values, start, width, end):
    """Process all distances from ``width`` to below ``end`` among the ``end`` elements from ``start`` on."""
    while width < end:
        if width * 8 <= end:
            for block in range(start, start + end, width * 8):
                for i in range(block, block + width, _LANES):
                    _step3(values, i, width, values, i, width, None)
            width *= 8
        elif width * 4 <= end:
            for block in range(start, start + end, width * 4):
                for i in range(block, block + width, _LANES):
                    _step2(values, i, width, values, i, width, None)
            width *= 4
        else:
            for i in range(start, start + width, _LANES):
                _step1(values, i, width, values, i, width, None)
            width *= 2


@part
def _back(source, at, gap, rows, target, to, width, signs):
    """Process the distances among eight rows of 64 elements, or 4, 2 or 1, while moving them to their target."""
    for i in range(0, WIDTH, _LANES):
        if rows == 8:
            _step3(source, at + i, gap, target, to + i, width, signs)
        elif rows == 4:
            _step2(source, at + i, gap, target, to + i, width, signs)
        elif rows == 2:
            _step1(source, at + i, gap, target, to + i, width, signs)
        else:
            _step0(source, at + i, gap, target, to + i, width, signs)


@kernel
def _hadamard(values, before, after, scale, strip):
    n = values.size
    block, near = min(n, _BLOCK), min(n, _NEAR)
    for start in range(0, n, block):
        for first in range(start, start + block, near):
            for i in range(first, first + near, WIDTH):
                _head(values, i, before[i // WIDTH], scale)
            _distances(values, first, WIDTH, near)
        _distances(values, start, near, block)
    stride = block
    last = False
    # Once at least: a vector that is one block has a single row, which only gets its signs.
    while not last:
        rows = min(_ROWS, n // stride)
        last = stride * rows == n
        # Few rows go straight back; of more, three distances are taken on the way into the strip.
        lines = 1 if rows <= 8 else 8
        source, gap = (values, stride) if rows <= 8 else (strip, 8 * WIDTH)
        for base in range(0, n, stride * rows):
            for column in range(base, base + stride, WIDTH):
                if lines == 8:
                    for row in range(0, rows, 8):
                        for i in range(0, WIDTH, _LANES):
                            _step3(values, column + row * stride + i, stride, strip, row * WIDTH + i, WIDTH, None)
                for line in range(lines):
                    at, to = line * WIDTH if lines == 8 else column, column + line * stride
                    if last:
                        _back(source, at, gap, rows // lines, values, to, lines * stride, after)
                    else:
                        _back(source, at, gap, rows // lines, values, to, lines * stride, None)
        stride *= rows


def hadamard(values: NDArray[Any], before: NDArray[np.uint64], after: NDArray[np.uint64], scale: float) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.hadamard`."""
    if values.size < WIDTH:
        portable.hadamard(values, before, after, scale)
        return
    strip = np.empty(_ROWS * WIDTH, values.dtype)
    _hadamard(values, fixed(before), fixed(after), values.dtype.type(scale), strip)
