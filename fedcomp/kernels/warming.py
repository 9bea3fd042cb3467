"""Compiling kernels ahead of time: at installation, or before many processes start."""

from __future__ import annotations

import time

import numpy as np

from fedcomp.kernels import contexts, tiers
from fedcomp.kernels.bins import adaptive_step, select_adaptive, select_bins
from fedcomp.kernels.hadamard import hadamard
from fedcomp.kernels.select import feedback_step, select_topk
from fedcomp.kernels.signs import add_signs, sign_products
from fedcomp.kernels.sums import add_scaled, scatter_add
from fedcomp.kernels.tails import exceedances, select_above


def warm() -> float | None:
    """Compile every kernel, or load it from the disk cache; return the seconds it took, None without numba.

    Doing it again costs microseconds. Call it before timing anything, and before many processes start at once.
    """
    if not tiers.has_numba():
        return None
    start = time.perf_counter()
    vector = np.arange(256, dtype=np.float32)
    indices = select_topk(vector, 3, tier="numba")
    # Selection does without the histogram; a codec asks for it.
    ops = tiers.ops("numba", 256)
    ops.histogram(vector.view(np.int32))
    step = feedback_step(vector, vector, 3, tier="numba")
    add_scaled(step.memory, vector, 1.0, tier="numba")
    scatter_add(step.memory, indices, step.values, 1.0, tier="numba")
    select_bins(vector, 7, tier="numba")
    select_adaptive(vector, vector, 7, tier="numba")
    adaptive_step(vector, vector, 7, tier="numba")
    exceedances(vector, 1.0, logs=True, tier="numba")
    select_above(vector, 1.0, tier="numba")
    for dtype in (np.float32, np.float64):
        hadamard(vector.astype(dtype), np.zeros(4, np.uint64), tier="numba")
    add_signs(np.zeros(256), np.zeros((4, 1), np.uint64), np.zeros(1), tier="numba")
    sign_products(np.zeros(256, np.float32), np.zeros((4, 1), np.uint64), tier="numba")
    table = np.full(2, 2048, np.uint32)
    states, words = ops.rans_encode(np.zeros(64, np.uint16), table, 2)
    slots = np.arange(4096).astype(np.uint32)
    ops.rans_decode(states, words, (slots >> 11).astype(np.uint16), (2048 << 16 | slots % 2048).astype(np.uint32), 64)
    for kind in (np.int16, np.int32):
        for steps in (7, 1 << 14):
            ops.levels(np.zeros(4, kind), vector[:1], 0, steps)
    for name in ("u4", "i8", "u8"):
        ops.unary(np.zeros(4, name))
    for name in ("u4", "u8"):
        ops.classes(np.zeros(4, name))
        ops.shifted_sums(np.zeros((2, 4), name), np.zeros(2, np.uint8))
    ops.ones(np.ones(4, np.uint8), 4)
    for name in ("u4", "i8"):
        ops.join_gaps(np.arange(4), np.zeros(4, name), np.zeros(1, np.uint8), 4)
    ops.look_up(vector, np.zeros(4, np.uint8))
    ops.square_sums(vector, None)
    ops.square_sums(vector, vector)
    # What fields are made of and read into: codes, levels, gaps, indices and the bits below a leading one.
    for name in ("u1", "u2", "u4", "u8"):
        ops.pack_columns(np.zeros((64, 2), name), np.zeros((3, 2), np.uint64))
        ops.unpack_columns(np.zeros((3, 2), np.uint64), np.empty((64, 2), name))
    if not contexts.has_c():
        streams, levels = contexts.Streams(((2, 8),), "numba"), np.ones(16, np.int32)
        streams.decode(streams.encode(levels, 1)[0], 1, 1 << 20, levels)
        coder = contexts.tier_of(16, "numba")
        for draws in (contexts.NONE, np.zeros(256, np.uint32)):
            coder.quantise(vector, 1.0, draws)
        coder.magnitudes(vector)
    return time.perf_counter() - start
