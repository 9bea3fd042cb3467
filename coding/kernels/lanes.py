"""Common parts of the compiled products: numba settings, and memory access by address.

A product touches memory as vectors at addresses it computes, which numba's own language has no words for.

numba's disk cache looks at the file of the cached kernel only: whoever changes this file deletes ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, njit, types
from numba.core import cgutils

# An intrinsic is called without the typing context it is defined with; no checker can know that.
intrinsic: Any = extending.intrinsic
literal_intrinsic: Any = extending.intrinsic(prefer_literal=True)

I8: Final = ir.IntType(8)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile for one signature when the module is imported, cached on disk where any cache directory is writable."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:
            # Neither the package's nor the user's cache directory is writable: compile once per process instead.
            return njit(signature, nogil=True)(function)

    return decorate


MATRIX: Final = types.Array(types.uint8, 2, "A", readonly=True)

PLACES: Final = types.Array(types.intp, 1, "C", readonly=True)

kernel: Final = compiled(
    types.void(
        MATRIX,
        MATRIX,
        PLACES,
        types.Array(types.uint8, 2, "A"),
        types.Array(types.uint64, 1, "C", readonly=True),
        types.Array(types.uint8, 1, "C"),
        types.boolean,
    )
)
"""Of every tier's product: coefficients, sources, outputs, words, working memory, whether to add to the outputs.

Sources are a matrix, and behind it the addresses of their rows: none when they are the rows of the matrix.

One signature for contiguous, strided, writable and read-only arrays: they share one compilation.
"""


def pointer(builder: Any, address: Any, target: Any) -> Any:
    return builder.inttoptr(address, target.as_pointer())


def load(builder: Any, address: Any, vector: Any) -> Any:
    loaded = builder.load(pointer(builder, address, vector))
    # Rows begin anywhere: without this LLVM assumes the vector's natural alignment, and an aligned load faults.
    loaded.align = 1
    return loaded


def store(builder: Any, address: Any, value: Any) -> None:
    stored = builder.store(value, pointer(builder, address, value.type))
    stored.align = 1


def offset(builder: Any, base: Any, *offsets: tuple[Any, Any]) -> Any:
    """Return ``base`` plus the products of ``offsets``; Python integers are constants."""
    for index, step in offsets:
        left, right = (ir.Constant(I64, x) if isinstance(x, int) else x for x in (index, step))
        base = builder.add(base, builder.mul(left, right))
    return base


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Return where an array's first element is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.intp(array), codegen


@intrinsic
def copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy ``size`` bytes between addresses that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = (pointer(builder, args[j], I8) for j in range(2))
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def store_word(typingctx: Any, target: Any, word: Any) -> Any:
    """Store one 64-bit word at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64), codegen


@intrinsic
def load_word(typingctx: Any, source: Any) -> Any:
    """Return the 64-bit word at an address, as an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load(builder, args[0], I64)

    return types.intp(types.intp), codegen


HEADER: Final = object.__basicsize__
"""Bytes of what every Python object begins with.

In an array numpy's public ``PyArrayObject_fields`` follows: the data's address, the number of dimensions (an int), the
addresses of shape and strides, base, dtype, flags (an int).
"""


@compiled(types.intp(types.Array(types.intp, 1, "C"), types.Array(types.intp, 1, "C", readonly=True), types.intp))
def find_places(found, arrays, size):
    """Write where the data of arrays is, objects at these addresses; return the first that is not contiguous bytes.

    -1 when all are, and have ``size`` elements. A pass over numpy's own structures: handing one array to a compiled
    function, or asking it for its address, costs longer than everything else that is done with a packet's body.
    """
    for number in range(arrays.size):
        fields = arrays[number] + HEADER
        dimensions = load_word(fields + 8) & 0xFFFFFFFF
        shape, strides = load_word(fields + 16), load_word(fields + 24)
        elements = 1
        for axis in range(dimensions):
            elements *= load_word(shape + 8 * axis)
        last = 8 * (dimensions - 1)
        # The lowest flag says contiguous in C order; a last stride of more than 1 that the elements are no bytes.
        if elements != size or not load_word(fields + 48) & 1:
            return number
        if dimensions and load_word(shape + last) > 1 and load_word(strides + last) != 1:
            return number
        found[number] = load_word(fields)
    return -1


@njit(nogil=True)
def write_places(table, b, places, k):
    """Write the addresses of ``k`` sources to the words at ``table``: ``places``, or else the rows of ``b``."""
    first, step = address(b), b.strides[0]
    for j in range(k):
        store_word(table + 8 * j, np.uint64(places[j] if places.size else first + j * step))
