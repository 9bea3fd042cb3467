"""The numba tier of :class:`fedcomp.kernels.interface.Ops`. Imported only when a compiled kernel is first needed.

One pass looks at blocks of 64 elements. A 64-lane vector comparison, written in LLVM's own vector types, leaves the
block's hits as one 64-bit word on every instruction set; a block without a hit costs one load and one compare, and a
hit costs one count-trailing-zeros. LLVM does not find this form from a scalar loop: the branch-free scalar
compaction it makes is as fast at density 0.001 and twice as slow at 0.1 (measured).

Kernels are single-threaded, release the GIL and never reorder or contract floating-point operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray

from fedcomp.kernels.compiled_adaptive import add_adaptive, select_adaptive, take_scaled
from fedcomp.kernels.compiled_bins import bin_argmax
from fedcomp.kernels.compiled_fields import (
    classes,
    join_gaps,
    levels,
    look_up,
    ones,
    pack_columns,
    shifted_sums,
    square_sums,
    unary,
    unpack_columns,
)
from fedcomp.kernels.compiled_hadamard import hadamard
from fedcomp.kernels.compiled_rans import rans_decode, rans_encode
from fedcomp.kernels.compiled_signs import add_signs, sign_products
from fedcomp.kernels.compiled_tails import find_above, select_above, tail_product, tail_sums
from fedcomp.kernels.interface import BIN_SHIFT, BINS, MAGNITUDE, Bits, Candidates, Floats, Found
from fedcomp.kernels.lanes import (
    AHEAD_INDICES,
    F32,
    SLACK,
    WIDTH,
    block_hits,
    fetch,
    fixed,
    intrinsic,
    kernel,
    load,
    magnitudes,
    part,
    population,
    prefetch,
    splat,
    store,
    trailing_zeros,
    word_of,
)

__all__ = [
    "ROOM",
    "add_adaptive",
    "add_collect",
    "add_scaled",
    "add_signs",
    "bin_argmax",
    "classes",
    "collect",
    "find_above",
    "finish",
    "hadamard",
    "histogram",
    "join_gaps",
    "levels",
    "look_up",
    "ones",
    "pack_columns",
    "rans_decode",
    "rans_encode",
    "scatter_add",
    "select_above",
    "select_adaptive",
    "shifted_sums",
    "sign_products",
    "square_sums",
    "tail_product",
    "tail_sums",
    "take_clear",
    "take_scaled",
    "unary",
    "unpack_columns",
]

ROOM = SLACK


@intrinsic
def _block_add_hits(typingctx: Any, memory: Any, update: Any, decay: Any, out: Any, start: Any, threshold: Any) -> Any:
    """``out = decay * memory + update`` on 64 lanes, and the hits of the result.

    Loads come before the store, so that ``out`` may be ``memory`` itself.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats = ir.VectorType(F32, WIDTH)
        for j in range(2):
            prefetch(context, builder, signature.args[j], args[j], args[4], WIDTH)
        m, g = (load(context, builder, signature.args[j], args[j], args[4], floats) for j in range(2))
        p = builder.fadd(builder.fmul(m, splat(builder, args[2], floats)), g)
        store(context, builder, signature.args[3], args[3], args[4], p)
        found = magnitudes(builder, p)
        return word_of(builder, builder.icmp_signed(">=", found, splat(builder, args[5], found.type)))

    return types.uint64(memory, update, types.float32, out, types.intp, types.int32), codegen


@part
def _compact(word, start, bits, indices, magnitudes, written):
    """Append the positions and magnitudes of ``word``'s hits; return the new count.

    Four slots are always written. The next block overwrites the excess, which leaves one well-predicted branch per four
    hits.
    """
    end = written + population(word)
    while written < end:
        for j in range(4):
            # An exhausted word has 64 trailing zeros; the mask keeps its surplus slots inside the block.
            lane = trailing_zeros(word) & 63
            # A plain 1 is signed, and numba turns the difference of uint64 and int64 into float64.
            word &= word - np.uint64(1)
            indices[written + j] = start + lane
            magnitudes[written + j] = bits[start + lane] & MAGNITUDE
        written += 4
    return end


@kernel
def _collect(bits, threshold, limit, candidates):
    indices, magnitudes, state = candidates
    written = state[0]
    at = state[1]
    full = bits.size // WIDTH * WIDTH
    while at < full and written < limit:
        word = block_hits(bits, at, threshold)
        if word:
            written = _compact(word, at, bits, indices, magnitudes, written)
        at += WIDTH
    if at >= full and written < limit:
        for i in range(full, bits.size):
            magnitude = bits[i] & MAGNITUDE
            if magnitude >= threshold:
                indices[written] = i
                magnitudes[written] = magnitude
                written += 1
        at = bits.size
    state[0] = written
    state[1] = at


@kernel
def _add_collect(memory, update, decay, out, threshold, limit, candidates):
    indices, magnitudes, state = candidates
    written = state[0]
    at = state[1]
    bits = out.view(np.int32)
    full = out.size // WIDTH * WIDTH
    while at < full and written < limit:
        word = _block_add_hits(memory, update, decay, out, at, threshold)
        if word:
            written = _compact(word, at, bits, indices, magnitudes, written)
        at += WIDTH
    if at >= full and written < limit:
        for i in range(full, out.size):
            out[i] = decay * memory[i] + update[i]
            magnitude = bits[i] & MAGNITUDE
            if magnitude >= threshold:
                indices[written] = i
                magnitudes[written] = magnitude
                written += 1
        at = out.size
    state[0] = written
    state[1] = at


@kernel
def _histogram(bits, counts):
    # Four sub-histograms: neighbours often share a bin, and one counter would wait for its own last store.
    full = bits.size // 4 * 4
    for i in range(0, full, 4):
        for j in range(4):
            counts[j, (bits[i + j] & MAGNITUDE) >> BIN_SHIFT] += 1
    for i in range(full, bits.size):
        counts[0, (bits[i] & MAGNITUDE) >> BIN_SHIFT] += 1


@kernel
def _finish(indices, magnitudes, threshold, k, out):
    # Ties at the threshold go to the lowest indices, so how many of them fit must be known before the first is taken.
    above = 0
    for j in range(magnitudes.size):
        above += magnitudes[j] > threshold
    ties = k - above
    written = 0
    for j in range(magnitudes.size):
        tie = (magnitudes[j] == threshold) & (ties > 0)
        # Arithmetic in place of branches, which a processor could not predict here.
        ties -= tie
        out[written] = indices[j]
        written += (magnitudes[j] > threshold) | tie


@kernel
def _take_clear(values, indices, taken):
    last = indices.size - 1
    for j in range(indices.size):
        # The index list itself is read ahead here, so the look-ahead must stop at its end.
        fetch(values, indices[min(j + AHEAD_INDICES, last)])
        taken[j] = values[indices[j]]
        values[indices[j]] = 0.0


@kernel
def _add_scaled(out, values, weight):
    for j in range(out.size):
        out[j] += weight * values[j]


@kernel
def _scatter_add(out, indices, values, weight):
    last = indices.size - 1
    for j in range(indices.size):
        fetch(out, indices[min(j + AHEAD_INDICES, last)])
        out[indices[j]] += weight * values[j]


def collect(bits: Bits, threshold: int, limit: int, candidates: Candidates) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.collect`."""
    _collect(fixed(bits), np.int32(threshold), limit, candidates)


def add_collect(
    memory: Floats,
    update: Floats,
    decay: float,
    out: Floats,
    threshold: int,
    limit: int,
    candidates: Candidates,
) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_collect`."""
    _add_collect(fixed(memory), fixed(update), np.float32(decay), out, np.int32(threshold), limit, candidates)


def histogram(bits: Bits) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.histogram`."""
    counts = np.zeros((4, BINS), np.int64)
    _histogram(fixed(bits), counts)
    return np.asarray(counts.sum(axis=0))


def finish(found: Found, threshold: int, k: int) -> NDArray[np.int64]:
    """See :meth:`fedcomp.kernels.interface.Ops.finish`."""
    # One slot more: the loop stores every candidate and advances only past those it keeps.
    out = np.empty(k + 1, np.int64)
    _finish(*found, np.int32(threshold), k, out)
    return out[:k]


def take_clear(values: Floats, indices: NDArray[np.int64]) -> Floats:
    """See :meth:`fedcomp.kernels.interface.Ops.take_clear`."""
    taken = np.empty(indices.size, np.float32)
    _take_clear(values, fixed(indices), taken)
    return taken


def add_scaled(out: Floats, values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.add_scaled`."""
    _add_scaled(out, fixed(values), weight)


def scatter_add(out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
    """See :meth:`fedcomp.kernels.interface.Ops.scatter_add`."""
    _scatter_add(out, fixed(indices), fixed(values), weight)
