"""Products and elimination of GF(2^8) matrices, with argument checks common to all tiers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.kernels.dispatch import Loaded, auto, load
from fedcomp.coding.kernels.rows import Rows
from fedcomp.errors import ConfigError

Bytes = NDArray[np.uint8]

_BYTE = np.dtype(np.uint8)


def matmul(
    a: Bytes, b: Bytes | Rows, out: Bytes | None = None, *, tier: str = "auto", accumulate: bool = False
) -> Bytes:
    """Return the matrix product ``a @ b`` over GF(2^8), polynomial 0x11D.

    Parameters
    ----------
    a : uint8 array, shape (n, k)
        Coefficients.
    b : uint8 array, shape (k, s)
        Sources, one per row. Rows that are not contiguous are copied first. :class:`Rows` where they are in separate
        arrays.
    out : uint8 array, shape (n, s), optional
        Where the product goes; may be a view with any strides, but overlap neither operand.
    tier : str
        ``"auto"``, or one of :func:`fedcomp.coding.kernels.tiers`. All give the same bytes.
    accumulate : bool
        Add the product to what is in ``out`` instead of replacing it.

    Returns
    -------
    uint8 array, shape (n, s)
        ``out`` when it was given. Dimensions may be zero; an empty sum is zero.

    Raises
    ------
    ConfigError
        When shapes or dtypes do not fit, ``out`` overlaps an operand, or the tier cannot run here.
    """
    _check_matrix("a", a)
    if not isinstance(b, Rows):
        _check_matrix("b", b)
    n, k = a.shape
    rows, size = b.shape
    if rows != k:
        raise ConfigError(f"a has shape {a.shape} and b {b.shape}: a needs as many columns as b has rows")
    if out is None:
        if accumulate:
            raise ConfigError("accumulate adds to the contents of out, but no out was given; pass it")
        out = np.empty((n, size), np.uint8)
    else:
        _check_out(out, (n, size), a, *(b if isinstance(b, Rows) else (b,)))
    # Before the empty cases: a tier that cannot run here is an error for every shape.
    loaded = _loaded(tier, n * k * size)
    if not n or not size:
        return out
    if not k:
        if not accumulate:
            out[...] = 0
        return out
    # Kernels go through a row byte after byte.
    if not isinstance(b, Rows) and b.strides[1] != 1:
        b = np.ascontiguousarray(b)
    if out.strides[1] == 1:
        loaded.product(a, b, out, accumulate)
    else:
        packed = out.copy() if accumulate else np.empty((n, size), np.uint8)
        loaded.product(a, b, packed, accumulate)
        out[...] = packed
    return out


def reduce(matrix: Bytes, columns: int, *, tier: str = "auto") -> int:
    """Bring ``matrix`` to reduced row echelon form in place and return the rank of its first ``columns`` columns.

    Pivots are sought in these columns only; the others go along, so that ``[A | I]`` becomes ``[I | inverse of A]``.

    Raises
    ------
    ConfigError
        When it is not a writable uint8 matrix with that many columns, or the tier cannot run here.
    """
    _check_matrix("matrix", matrix)
    n, width = matrix.shape
    if not matrix.flags.writeable:
        raise ConfigError("the matrix is reduced in place and has to be writable; pass a copy")
    if not 0 <= columns <= width:
        raise ConfigError(f"{columns} columns cannot be reduced in a matrix of shape {matrix.shape}")
    loaded = _loaded(tier, n * min(n, columns) * width)
    return loaded.reduce(matrix, columns) if n and columns else 0


def _loaded(tier: str, work: int) -> Loaded:
    return auto.choose(work) if tier == "auto" else load(tier)


def _check_matrix(name: str, array: Any) -> None:
    # No subclasses: the kernels see the bytes alone, and would ignore a masked array's mask.
    if type(array) is not np.ndarray or array.dtype != _BYTE or array.ndim != 2:
        found = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ConfigError(f"{name} must be a plain uint8 array with two dimensions, not {found}")


def _check_out(out: Any, shape: tuple[int, int], *operands: Bytes) -> None:
    _check_matrix("out", out)
    if out.shape != shape:
        raise ConfigError(f"out has shape {out.shape}; this product has {shape}")
    if not out.flags.writeable:
        raise ConfigError("out is read-only; pass a writable array")
    for operand in operands:
        # The cheap question first; the exact one tells interleaved views from overlapping ones.
        if np.may_share_memory(out, operand) and np.shares_memory(out, operand):
            raise ConfigError("out overlaps an operand and would overwrite it while it is read; pass another array")
