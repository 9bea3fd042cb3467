"""Vector code for compiled kernels in LLVM's vector types, which numba's own language lacks.

A comparison of many lanes leaves its hits as one machine word on every instruction set. LLVM does not find this form
from a scalar loop.

numba's disk cache looks at the file of the cached kernel only: whoever changes this file deletes ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, njit, types
from numba.core import cgutils
from numpy.typing import NDArray

from fedcomp.kernels.interface import MAGNITUDE

# An intrinsic is called without the typing context it is defined with; no checker can know that.
intrinsic: Any = extending.intrinsic

WIDTH: Final = 64
"""Lanes of one block."""

AHEAD: Final = 2048
"""Elements by which blocks are asked for before they are needed: 8 KiB."""

AHEAD_INDICES: Final = 64
"""Indices by which scattered elements are asked for before they are needed."""

TINY: Final = 16
"""Lanes of the one vector that a short bin is."""

I1: Final = ir.IntType(1)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first call, cached on disk where any cache directory can be written."""
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:
        # Neither the package's nor the user's cache directory is writable: compile once per process instead.
        return njit(function, nogil=True)


def part(function: Callable[..., Any]) -> Any:
    """Compile ``function`` into the kernels that call it: a call per block would cost as much as the block."""
    return njit(function, forceinline=True)


def fixed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: writable and read-only inputs then share one compiled specialisation."""
    view = array.view()
    view.flags.writeable = False
    return view


@intrinsic
def bit_length(typing: Any, number: Any) -> Any:
    """Return the bits of an int64 that is not negative, of 0 none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(ir.Constant(I64, 64), builder.ctlz(args[0], ir.Constant(I1, 0)))

    return types.int64(types.int64), generate


def splat(builder: Any, value: Any, vector: Any) -> Any:
    """Return ``value`` in every lane of ``vector``'s type."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, lanes)


def load(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> Any:
    """Load ``vector.count`` consecutive elements of a one-dimensional array from ``start`` on."""
    loaded = builder.load(_address(context, builder, array_type, array, start, vector))
    # LLVM otherwise assumes the vector's own alignment, and aligned loads fault on an array of float32.
    loaded.align = _align(vector)
    return loaded


def store(context: Any, builder: Any, array_type: Any, array: Any, start: Any, value: Any) -> None:
    """Store all lanes of ``value`` into a one-dimensional array from ``start`` on."""
    stored = builder.store(value, _address(context, builder, array_type, array, start, value.type))
    stored.align = _align(value.type)


def prefetch(
    context: Any, builder: Any, array_type: Any, array: Any, start: Any, lanes: int, ahead: int = AHEAD
) -> None:
    """Ask for the cache lines ``ahead`` of the ``lanes`` 32-bit elements from ``start`` on, wherever that is.

    Where every block ends in a branch that depends on the data, the processor does not look far enough ahead on its
    own: such kernels are up to twice as fast with it (measured).
    """
    data = context.make_array(array_type)(context, builder, array).data
    pointer = ir.IntType(8).as_pointer()
    declared = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0i8")
    # A cache line holds 16 elements of four bytes.
    for line in range(ahead, ahead + lanes, 16):
        address = builder.gep(data, [builder.add(start, ir.Constant(I64, line))])
        # To be read, kept in all levels, data.
        flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]
        builder.call(function, [builder.bitcast(address, pointer), *flags])


def _address(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def _align(vector: Any) -> int:
    """Return the alignment: arrays are aligned to their elements, and vectors in them no more strictly."""
    return 8 if vector.element in (F64, I64) else 4


def first_lanes(builder: Any, length: Any) -> Any:
    """Return what to mask 16 lanes with: the magnitude bits of the first ``length``.

    The others become zeros, which come after all zeros of the bin. Loads that LLVM would mask by a predicate cost five
    times as much where they cross a cache line (measured).
    """
    vector = ir.VectorType(I32, TINY)
    lane = ir.Constant(vector, list(range(TINY)))
    inside = builder.icmp_signed("<", lane, splat(builder, builder.trunc(length, I32), vector))
    return builder.select(inside, ir.Constant(vector, [MAGNITUDE] * TINY), ir.Constant(vector, [0] * TINY))


def magnitudes(builder: Any, values: Any) -> Any:
    """Return the magnitude bits of float32 or int32 lanes."""
    vector = ir.VectorType(I32, values.type.count)
    return builder.and_(builder.bitcast(values, vector), ir.Constant(vector, [MAGNITUDE] * vector.count))


def word_of(builder: Any, comparison: Any) -> Any:
    """Return the lanes of a comparison as the lowest bits of a 64-bit word, lane 0 lowest."""
    word = builder.bitcast(comparison, ir.IntType(comparison.type.count))
    return word if comparison.type.count == 64 else builder.zext(word, I64)


def largest(builder: Any, one: Any, other: Any) -> Any:
    """Return the larger of two signed integers, lane by lane."""
    return builder.select(builder.icmp_signed(">", one, other), one, other)


def largest_lane(builder: Any, values: Any) -> Any:
    """Return the largest of signed 32-bit lanes."""
    return _across(builder, "smax", values)


def smallest_lane(builder: Any, values: Any) -> Any:
    """Return the smallest of unsigned 32-bit lanes."""
    return _across(builder, "umin", values)


def _across(builder: Any, operation: str, values: Any) -> Any:
    name = f"llvm.vector.reduce.{operation}.v{values.type.count}i32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [values.type]), name), [values]
    )


@intrinsic
def block_hits(typingctx: Any, bits: Any, start: Any, threshold: Any) -> Any:
    """``word[j] = magnitude(bits[start + j]) >= threshold`` for a block."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(I32, WIDTH)
        prefetch(context, builder, signature.args[0], args[0], args[1], WIDTH)
        found = magnitudes(builder, load(context, builder, signature.args[0], args[0], args[1], vector))
        return word_of(builder, builder.icmp_signed(">=", found, splat(builder, args[2], vector)))

    return types.uint64(bits, types.intp, types.int32), codegen


@intrinsic
def fetch(typingctx: Any, values: Any, index: Any) -> Any:
    """Ask for the cache line of ``values[index]``, 32-bit elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(context, builder, signature.args[0], args[0], args[1], 1, ahead=0)
        return context.get_dummy_value()

    return types.void(values, types.int64), codegen


@intrinsic
def trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Position of the lowest set bit; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(I1, 0))

    return types.int64(types.uint64), codegen


@intrinsic
def population(typingctx: Any, word: Any) -> Any:
    """Number of set bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


SLACK: Final = WIDTH + 8
"""What :func:`append` may write beyond the count it returns, and a block beyond its capacity check."""


@part
def append(word, start, indices, written):
    """Append the positions of ``word``'s hits to the int64 ``indices``; return the new count.

    Four slots are written whatever is left of the word: what is too much is overwritten by the next block, and one
    well-predicted branch per four hits remains.
    """
    end = written + population(word)
    while written < end:
        for j in range(4):
            indices[written + j] = start + (trailing_zeros(word) & 63)
            word &= word - np.uint64(1)
        written += 4
    return end


class Pieces:
    """Room for the indices a kernel finds: memory grows with their number, and what is found is not moved meanwhile.

    Parameters
    ----------
    size : int
        Elements of the vector. A quarter of it is set aside at first; what stays unused is never touched.

    Attributes
    ----------
    state : int64 array of shape (3,)
        The kernel's: how far it came, how much it wrote into the present room, whether it met what is not finite.
    """

    def __init__(self, size: int) -> None:
        self._size = size // 4
        self._full: list[NDArray[np.int64]] = []
        self._room = np.empty(0, np.int64)
        self.state = np.zeros(3, np.int64)

    def room(self, least: int) -> NDArray[np.int64]:
        """Return where to write next; what was written so far is set aside."""
        self._set_aside()
        # Doubling keeps the number of pieces logarithmic.
        self._room = np.empty(self._size + least, np.int64)
        self._size *= 2
        return self._room

    def all(self) -> NDArray[np.int64]:
        """Return all that was written, shape (k,)."""
        if self._full:
            self._set_aside()
            return np.concatenate(self._full)
        # A large array shrinks in place.
        # Kernels had this memory for the length of a call: nobody else refers to it.
        self._room.resize(self.state[1], refcheck=False)
        return self._room

    def _set_aside(self) -> None:
        if self.state[1]:
            self._full.append(self._room[: self.state[1]])
            self.state[1] = 0
