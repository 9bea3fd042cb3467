"""Finite fields: the arithmetic that codes use.

:class:`GF256` is here, the prime fields are in :mod:`fedcomp.coding.prime`. A packet names its field by ``code``.
Note that addition in GF(2^8) is XOR: coded bytes decode to the bytes that were
coded, and the XOR of two clients' bytes is not the sum of their numbers. What adds up is a prime field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding import kernels
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.kernels import tables
from fedcomp.errors import ConfigError

if TYPE_CHECKING:
    from fedcomp.coding.stream import SplitMix64

Bytes = NDArray[np.uint8]


class GF256:
    """GF(2^8) with polynomial 0x11D and generator 2, the usual field of erasure codes (not that of AES).

    Elements are bytes. Products of matrices are :func:`fedcomp.coding.kernels.matmul`.
    """

    name = "GF(2^8)"
    code = 0
    order = 256
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    symbol_bytes = 1

    def __repr__(self) -> str:
        return "GF256()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GF256)

    def __hash__(self) -> int:
        return hash(GF256)

    def add(self, a: Any, b: Any, out: Bytes | None = None) -> Bytes:
        """Return ``a XOR b``, element by element, broadcast; uint8."""
        return np.bitwise_xor(_elements(a), _elements(b), out=out)

    def subtract(self, a: Any, b: Any, out: Bytes | None = None) -> Bytes:
        """Return ``a - b``: the same as ``a + b`` in characteristic 2."""
        return self.add(a, b, out)

    def multiply(self, a: Any, b: Any, out: Bytes | None = None) -> Bytes:
        """Return ``a * b``, element by element, broadcast; uint8."""
        a, b = _elements(a), _elements(b)
        if b.ndim == 0:
            a, b = b, a
        # One factor for all elements is one row of the table: 256 bytes, and no index to compute.
        if a.ndim == 0:
            return np.take(tables.products()[int(a)], b, out=out, mode="clip")
        where = (a.astype(np.uint16) << np.uint16(8)) | b
        # No index can be outside; "clip" lets numpy write into ``out`` without a buffer.
        return np.take(tables.products().ravel(), where, out=out, mode="clip")

    def reciprocal(self, a: Any) -> Bytes:
        """Return ``1 / a``, element by element.

        Raises
        ------
        ConfigError
            When an element is zero.
        """
        a = _elements(a)
        if not np.all(a):
            raise ConfigError("zero has no reciprocal in GF(2^8); check for zeros before dividing")
        return np.asarray(tables.reciprocals()[a])

    def matmul(self, a: Bytes, b: Bytes | kernels.Rows, out: Bytes | None = None) -> Bytes:
        """Return ``a @ b``, shapes (n, k) and (k, s); ``out`` of shape (n, s) may not overlap the others."""
        return kernels.matmul(a, b, out)

    def axpy(self, c: int, x: Bytes, y: Bytes) -> None:
        """Do ``y += c * x`` in place; shapes equal, any number of dimensions."""
        if not 0 <= c < self.order:
            raise ConfigError(f"{c} is not an element of GF(2^8); elements are 0..255")
        if x.shape != y.shape:
            raise ConfigError(f"x has shape {x.shape}, y {y.shape}; they must be equal")
        # One row of the table, 256 bytes: it stays in the cache.
        y ^= tables.products()[c][_elements(x)]

    def random(self, shape: int | tuple[int, ...], stream: SplitMix64) -> Bytes:
        """Return uniform elements: the stream's next bytes, in C order."""
        return np.asarray(stream.bytes(int(np.prod(shape)))).reshape(shape)

    def inverse(self, a: Bytes) -> Bytes:
        """Return the inverse of ``a``, shape (n, n).

        Raises
        ------
        NotDecodable
            When ``a`` is singular.
        ConfigError
            When ``a`` is not square.
        """
        a = _matrix(a)
        n = a.shape[0]
        if a.shape != (n, n):
            raise ConfigError(f"only square matrices have an inverse, not one of shape {a.shape}")
        work = np.concatenate([a, np.eye(n, dtype=np.uint8)], axis=1)
        rank = kernels.reduce(work, n)
        if rank < n:
            raise NotDecodable(f"a {n} x {n} matrix of rank {rank} over GF(2^8) has no inverse; collect other rows")
        return work[:, n:].copy()

    def rank(self, a: Bytes) -> int:
        """Return the rank of ``a``, shape (n, k)."""
        a = _matrix(a)
        return kernels.reduce(a.copy(), a.shape[1])


def _elements(a: Any) -> Bytes:
    """Return ``a`` as uint8; ConfigError where a value is no element."""
    found = np.asarray(a)
    if found.dtype == np.uint8:
        return found
    if found.dtype.kind not in "iu" or (found.size and (found.min() < 0 or found.max() > 255)):
        raise ConfigError(f"elements of GF(2^8) are integers 0..255, not {found.dtype} beyond them")
    return found.astype(np.uint8)


def _matrix(a: Any) -> Bytes:
    found = _elements(a)
    if found.ndim != 2:
        raise ConfigError(f"a matrix has two dimensions, not the shape {found.shape}")
    return found
