"""Products of a matrix with thin factors, and orthonormal bases of the factors.

Two ends agree on a basis bit for bit because :func:`orthonormal` sums exactly and in a fixed order, and on what two
factors stand for because :func:`add_product` adds single products in a fixed order. Projections are left to BLAS, whose
last bits may differ between builds: both ends use what was sent of them.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.factors.outer import ONE_THREAD
from fedcomp.rng import Key

Real = NDArray[Any]

DEAD: Final = 1e-12
"""A column of a factor this short, or shortened this much by the columns before it, is noise and redrawn."""

_LONG: Final = 2048
"""Elements of a block along the contiguous direction of the matrix."""

_CACHED: Final = 1 << 15
"""Elements of a block that stays in the cache while columns are added."""

_LARGE: Final = 1e100
"""Factors with larger entries are scaled down before squaring, which does not change their basis."""


def product(matrix: Real, basis: Real) -> Real:
    """Return ``matrix @ basis`` for a thin basis, summed in float64, in the dtype of ``matrix``, which is read once.

    Blocks are so small that BLAS computes them in one thread: the bits do not depend on the number of threads, and no
    thread waits for a core that another process holds. Summed in float64, builds of BLAS that add in another order
    rarely differ in what is rounded to float32.
    """
    m, p = matrix.shape
    r = basis.shape[1]
    # A column of zeros makes a matrix of a single one: BLAS uses several threads for far smaller vectors.
    wide = np.zeros((p, max(2, r)))
    wide[:, :r] = basis
    # Long in the direction in which memory is: a transposed view has its columns there.
    long, across = min(_LONG, m if matrix.flags.f_contiguous else p), ONE_THREAD // wide.shape[1]
    across = max(1, across // max(1, long))
    rows, columns = (long, across) if matrix.flags.f_contiguous else (across, long)
    out = np.zeros((m, wide.shape[1]))
    for left in range(0, p, columns):
        part = wide[left : left + columns]
        for top in range(0, m, rows):
            out[top : top + rows] += matrix[top : top + rows, left : left + columns] @ part
    return np.ascontiguousarray(out[:, :r].astype(matrix.dtype))


def add_product(matrix: Real, u: Real, v: Real, scale: float = 1.0) -> None:
    """Do ``matrix += scale * u @ v.T`` in place, in the matrix's dtype, the columns of the factors in their order."""
    rows = max(1, _CACHED // v.shape[0])
    dtype = np.result_type(u, v)
    # Columns as rows, so that each is contiguous; buffers made once.
    columns = np.ascontiguousarray(v.T)
    change, one = (np.empty((min(rows, matrix.shape[0]), v.shape[0]), dtype) for _ in range(2))
    for start in range(0, matrix.shape[0], rows):
        part, into = u[start : start + rows], matrix[start : start + rows]
        total, single = change[: len(into)], one[: len(into)]
        # Outer products one by one: u @ v.T would leave the order of additions to BLAS, and the ends could differ.
        np.multiply(part[:, :1], columns[0], out=total)
        for c in range(1, u.shape[1]):
            np.multiply(part[:, c : c + 1], columns[c], out=single)
            total += single
        # A factor of 1 changes no bit; without it there is no product to form.
        if scale != 1.0:
            total *= scale
        into += total


def orthonormal(factor: Real, stream: Key) -> NDArray[np.float64]:
    """Return an orthonormal basis, float64 of ``factor``'s shape, by Gram-Schmidt, twice per column.

    Inner products are summed exactly (``math.fsum``) and columns treated in their order, so that two machines with the
    same bytes have the same basis. A column of which less than 1e-12 is left, in itself or of what it was, is drawn
    from ``stream``: it is zero because both ends agree in it, or it is the rounding error of the columns before it.
    """
    basis = np.empty(factor.shape, np.float64)
    for c in range(factor.shape[1]):
        column = np.ascontiguousarray(factor[:, c], np.float64)
        top = float(np.abs(column).max(initial=0.0))
        if top > _LARGE:
            column = column / top
        draws = 0
        while True:
            length = _norm(column)
            left = _without(column, basis[:, :c])
            remains = _norm(left)
            if remains > max(DEAD, _noise(factor.dtype) * length):
                basis[:, c] = left / remains
                break
            # A stream of its own for every column and every attempt.
            column = normals(stream.at(layer=c + factor.shape[1] * draws), len(column))
            draws += 1
    return basis


def _without(column: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    # One pass leaves a rest along the earlier columns when most of the column cancels; a second removes it.
    for _ in range(2):
        for earlier in basis.T:
            column = column - math.fsum((earlier * column).tolist()) * earlier
    return column


def _norm(column: NDArray[np.float64]) -> float:
    return math.sqrt(math.fsum((column * column).tolist()))


def _noise(dtype: np.dtype[Any]) -> float:
    return 16.0 * float(np.finfo(dtype).eps)


def normals(stream: Key, count: int) -> NDArray[np.float64]:
    """Return ``count`` numbers that are nearly Gaussian: sums of four 16-bit uniforms, mean 0, variance 1.

    Integer arithmetic and one product: the same bits on every machine, which logarithms and cosines are not.
    """
    # Little-endian before each number is cut in four, so that all machines cut alike.
    parts = stream.bits(count).astype("<u8").view("<u2").reshape(count, 4).astype(np.int64)
    # Each 16-bit number u is centred in integers, as 2u - 65535; the sum of four has the variance 4/3 * 2**32.
    return (2 * parts.sum(axis=1) - 4 * (2**16 - 1)).astype(np.float64) * (math.sqrt(0.75) * 2.0**-16)
