"""The numba tier of :class:`fedcomp.kernels.interface.Ops`. Imported only when a compiled kernel is first needed.

One pass looks at blocks of 64 elements. A 64-lane vector comparison, written in LLVM's own vector types, leaves the
block's hits as one 64-bit word on every instruction set; a block without a hit costs one load and one compare, and a
hit costs one count-trailing-zeros. LLVM does not find this form from a scalar loop: the branch-free scalar
compaction it makes is as fast at density 0.001 and twice as slow at 0.1 (measured).

Kernels are single-threaded, release the GIL and never reorder or contract floating-point operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, njit, types
from numpy.typing import NDArray

from fedcomp.kernels.interface import BIN_SHIFT, BINS, MAGNITUDE, Bits, Floats, Found

# An intrinsic is called without the typing context it is defined with; no checker can know that.
intrinsic: Any = extending.intrinsic

_LANES = 64
# The compaction writes four slots at a time and looks at the capacity once per block.
_SLACK = _LANES + 8


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` on first call, cached on disk where any cache directory can be written."""
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:
        # Neither the package's nor the user's cache directory is writable: compile once per process instead.
        return njit(function, nogil=True)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    """Return ``value`` in every lane of ``vector``'s type."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def _address(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> Any:
    """Return the address of ``array[start]`` as a pointer to ``vector``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def _load(builder: Any, address: Any) -> Any:
    loaded = builder.load(address)
    loaded.align = 4
    return loaded


def _hits(builder: Any, bits: Any, threshold: Any) -> Any:
    """Return the 64-bit word of lanes of ``bits`` whose magnitude is at least ``threshold``."""
    vector = bits.type
    magnitude = builder.and_(bits, ir.Constant(vector, [MAGNITUDE] * _LANES))
    above = builder.icmp_signed(">=", magnitude, _splat(builder, threshold, vector))
    return builder.bitcast(above, ir.IntType(64))


@intrinsic
def _block_hits(typingctx: Any, bits: Any, start: Any, threshold: Any) -> Any:
    """``word[j] = magnitude(bits[start + j]) >= threshold`` for 64 lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), _LANES)
        address = _address(context, builder, signature.args[0], args[0], args[1], vector)
        return _hits(builder, _load(builder, address), args[2])

    return types.uint64(bits, types.intp, types.int32), codegen


@intrinsic
def _block_add_hits(typingctx: Any, memory: Any, update: Any, decay: Any, out: Any, start: Any, threshold: Any) -> Any:
    """``out = decay * memory + update`` on 64 lanes, and the hits of the result.

    Loads stand before the store, so that ``out`` may be ``memory`` itself.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory_t, update_t, _, out_t, _, _ = signature.args
        floats = ir.VectorType(ir.FloatType(), _LANES)
        m = _load(builder, _address(context, builder, memory_t, args[0], args[4], floats))
        g = _load(builder, _address(context, builder, update_t, args[1], args[4], floats))
        p = builder.fadd(builder.fmul(m, _splat(builder, args[2], floats)), g)
        stored = builder.store(p, _address(context, builder, out_t, args[3], args[4], floats))
        stored.align = 4
        bits = builder.bitcast(p, ir.VectorType(ir.IntType(32), _LANES))
        return _hits(builder, bits, args[5])

    return types.uint64(memory, update, types.float32, out, types.intp, types.int32), codegen


@intrinsic
def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Position of the lowest set bit; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def _population(typingctx: Any, word: Any) -> Any:
    """Number of set bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@_kernel
def _compact(word, start, bits, indices, magnitudes, written):
    """Append the positions and magnitudes of ``word``'s hits; return the new count.

    Four slots are written whatever is left of the word: what is too much is overwritten by the next block, and one
    well-predicted branch per four hits remains.
    """
    end = written + _population(word)
    while written < end:
        for j in range(4):
            lane = _trailing_zeros(word) & 63
            word &= word - np.uint64(1)
            indices[written + j] = start + lane
            magnitudes[written + j] = bits[start + lane] & MAGNITUDE
        written += 4
    return end


@_kernel
def _collect(bits, threshold, capacity, indices, magnitudes):
    full = bits.size // _LANES * _LANES
    written = 0
    for start in range(0, full, _LANES):
        word = _block_hits(bits, start, threshold)
        if word:
            if written > capacity:
                return -1
            written = _compact(word, start, bits, indices, magnitudes, written)
    if written > capacity:
        return -1
    for i in range(full, bits.size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >= threshold:
            indices[written] = i
            magnitudes[written] = magnitude
            written += 1
    return written if written <= capacity else -1


@_kernel
def _add_collect(memory, update, decay, out, bits, threshold, capacity, indices, magnitudes):
    full = out.size // _LANES * _LANES
    written = 0
    for start in range(0, full, _LANES):
        word = _block_add_hits(memory, update, decay, out, start, threshold)
        if word and written <= capacity:
            written = _compact(word, start, bits, indices, magnitudes, written)
    for i in range(full, out.size):
        out[i] = decay * memory[i] + update[i]
        magnitude = bits[i] & MAGNITUDE
        if magnitude >= threshold and written <= capacity:
            indices[written] = i
            magnitudes[written] = magnitude
            written += 1
    return written if written <= capacity else -1


@_kernel
def _histogram(bits, counts):
    # Four sub-histograms: neighbours often share a bin, and one counter would wait for its own last store.
    full = bits.size // 4 * 4
    for i in range(0, full, 4):
        for j in range(4):
            counts[j, (bits[i + j] & MAGNITUDE) >> BIN_SHIFT] += 1
    for i in range(full, bits.size):
        counts[0, (bits[i] & MAGNITUDE) >> BIN_SHIFT] += 1


@_kernel
def _finish(indices, magnitudes, threshold, k, out):
    above = 0
    for j in range(magnitudes.size):
        above += magnitudes[j] > threshold
    ties = k - above
    written = 0
    for j in range(magnitudes.size):
        tie = (magnitudes[j] == threshold) & (ties > 0)
        ties -= tie
        out[written] = indices[j]
        written += (magnitudes[j] > threshold) | tie


@_kernel
def _take_clear(values, indices, taken):
    for j in range(indices.size):
        taken[j] = values[indices[j]]
        values[indices[j]] = 0.0


@_kernel
def _scatter_add(out, indices, values, weight):
    for j in range(indices.size):
        out[indices[j]] += weight * values[j]


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: writable and read-only inputs then share one compiled specialisation."""
    view = array.view()
    view.flags.writeable = False
    return view


def _room(size: int, capacity: int) -> tuple[int, NDArray[np.uint32], Bits]:
    """Return the capped capacity and candidate buffers with the slack the kernels need."""
    capacity = min(capacity, size)
    return capacity, np.empty(capacity + _SLACK, np.uint32), np.empty(capacity + _SLACK, np.int32)


def collect(bits: Bits, threshold: int, capacity: int) -> Found | None:
    """See :meth:`fedcomp.kernels.interface.Ops.collect`."""
    capacity, indices, magnitudes = _room(bits.size, capacity)
    count = _collect(_fixed(bits), np.int32(threshold), capacity, indices, magnitudes)
    return None if count < 0 else (indices[:count], magnitudes[:count])


def add_collect(
    memory: Floats, update: Floats, decay: float, out: Floats, threshold: int, capacity: int
) -> Found | None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_collect`."""
    capacity, indices, magnitudes = _room(out.size, capacity)
    count = _add_collect(
        _fixed(memory),
        _fixed(update),
        np.float32(decay),
        out,
        _fixed(out.view(np.int32)),
        np.int32(threshold),
        capacity,
        indices,
        magnitudes,
    )
    return None if count < 0 else (indices[:count], magnitudes[:count])


def histogram(bits: Bits) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.histogram`."""
    counts = np.zeros((4, BINS), np.int64)
    _histogram(_fixed(bits), counts)
    return np.asarray(counts.sum(axis=0))


def finish(found: Found, threshold: int, k: int) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.finish`."""
    out = np.empty(k + 1, np.int64)
    _finish(*found, np.int32(threshold), k, out)
    return out[:k]


def take_clear(values: Floats, indices: NDArray[np.int64]) -> Floats:
    """See :meth:`fedcomp.kernels.interface.Ops.take_clear`."""
    taken = np.empty(indices.size, np.float32)
    _take_clear(values, _fixed(indices), taken)
    return taken


def scatter_add(out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.scatter_add`."""
    _scatter_add(out, _fixed(indices), _fixed(values), weight)
