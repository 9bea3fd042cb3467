"""Number formats of gradient coding: from gradients to combinable values, and from their sum back to gradients.

Two kinds. :class:`RealArithmetic` sends float64: sums are rounded as float64 sums are, and a code with large
coefficients rounds more. :class:`PrimeArithmetic` sends elements of a prime field: every number is rounded once, by the
device, to a multiple of a common step, and from then on nothing is; the decoded sum is the sum of the rounded numbers,
bit for bit, whoever answered.

A device's row has two parts: the *vector*, and a few *scalars* (weights, metrics, counters) that need more range than
the vector's common step leaves. In a field scalars are cut into limbs, each of which has room for the sum of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import CodingError
from fedcomp.errors import ConfigError, nearest, optional

if TYPE_CHECKING:
    from fedcomp.coding.prime import PrimeField

Vector = NDArray[Any]
Doubles = NDArray[np.float64]

ARITHMETICS: Final = ("float64", "gf65521", "gf31")
"""Names of the kinds: float64, and fixed point in GF(65521) and GF(2^31 - 1), two and four bytes a number."""

SCALAR_STEP: Final = 2.0**-20
"""Scalars in a field are multiples of it; their sum stays below 2^43 in magnitude."""

_WORD: Final = 64


class Arithmetic(ABC):
    """How rows of numbers travel.

    Attributes
    ----------
    field : PrimeField or None
        Over which they are combined; None for float64.
    dtype : numpy.dtype
        Of a row, little endian.
    """

    field: PrimeField | None
    dtype: np.dtype[Any]

    @abstractmethod
    def size(self, vector: int, scalars: int) -> int:
        """Return the length of a row for so many numbers of either part."""

    @abstractmethod
    def pack(self, vector: Doubles, scalars: Doubles) -> Vector:
        """Return the row of a partition; raises :class:`CodingError` for numbers it cannot hold."""

    @abstractmethod
    def unpack(self, row: Vector, vector: int) -> tuple[Doubles, Doubles]:
        """Return vector and scalars of a decoded sum whose vector has that length."""

    def require(self, row: Vector) -> Vector:
        """Return a row that came; raise :class:`CodingError` where a number is not finite, or no element."""
        if self.field is None:
            if not np.isfinite(row).all():
                raise CodingError("an answer holds NaN or infinity")
        elif not self.field.check(row):
            raise CodingError(f"an answer holds {row.max()}, not an element of {self.field.name}")
        return row


class RealArithmetic(Arithmetic):
    """float64, as they are."""

    field = None
    dtype = np.dtype("<f8")

    def size(self, vector: int, scalars: int) -> int:
        """Return the length of a row: every number is one."""
        return vector + scalars

    def pack(self, vector: Doubles, scalars: Doubles) -> Vector:
        """Return both parts, one after the other."""
        row = np.concatenate([vector, scalars]).astype(self.dtype, copy=False)
        _require_finite(row)
        return row

    def unpack(self, row: Vector, vector: int) -> tuple[Doubles, Doubles]:
        """Return both parts."""
        return row[:vector], row[vector:]


class PrimeArithmetic(Arithmetic):
    """Multiples of a common step as elements of a prime field.

    Parameters
    ----------
    field : PrimeField
    parts : int
        How many rows are added at most.
    limit : float
        Magnitudes the vector's numbers may have, each row's for itself.

    Attributes
    ----------
    step : float
        Distance of two numbers of the vector: the smallest power of two with which ``parts`` numbers of magnitude
        ``limit`` add up to at most (p - 1) / 2. No number is off by more than half of it.

    Raises
    ------
    ConfigError
        When the field is too small for so many rows, or the limit is no positive number.
    """

    def __init__(self, field: PrimeField, parts: int, limit: float) -> None:
        if not 0.0 < limit < math.inf:
            raise ConfigError(f"limit is {limit!r}; expected the largest magnitude a weighted update may have")
        self.field, self.parts, self.limit = field, parts, float(limit)
        self.dtype = field.dtype
        # Half of the field: a sum is read back with its sign.
        self._most = field.half // parts if parts > 0 else 0
        # So many bits that the sum of one limb over all rows stays within the field: parts * 2^bits <= p.
        self._bits = (field.order // parts).bit_length() - 1 if parts > 0 else 0
        # With less, rounding would take most of an update, and a scalar more than 16 limbs.
        if self._most < 1 << 4 or self._bits < 4:
            raise ConfigError(f"{field.name} has no room for the sum of {parts} rows; use a larger prime")
        self._limbs = -(-_WORD // self._bits)
        # A power of two: multiplying by it and dividing by it round nothing.
        self.step = 2.0 ** math.ceil(math.log2(self.limit / self._most))

    def size(self, vector: int, scalars: int) -> int:
        """Return the length of a row: one element per number of the vector, several per scalar."""
        return vector + scalars * self._limbs

    def pack(self, vector: Doubles, scalars: Doubles) -> Vector:
        """Return the row, every number rounded to the nearest multiple of its step."""
        _require_finite(vector)
        _require_finite(scalars)
        largest = float(np.max(np.abs(vector), initial=0.0))
        if largest > self.limit:
            raise CodingError(
                f"a weighted update reaches {largest:.3g}, more than the {self.limit:g} that were agreed on; choose a "
                "larger limit, which makes the step coarser, or a larger prime"
            )
        assert self.field is not None
        head = self.field.residues(np.rint(vector / self.step).astype(np.int64))
        whole = np.rint(scalars / SCALAR_STEP)
        if whole.size and float(np.max(np.abs(whole))) * self.parts >= 2.0 ** (_WORD - 1):
            raise CodingError(
                f"a weight or metric reaches {float(np.max(np.abs(scalars))):.3g}; a field has room for "
                f"{SCALAR_STEP * 2.0 ** (_WORD - 1) / self.parts:.3g}. Use arithmetic='float64'"
            )
        # Seen as unsigned words, negative scalars are cut into the limbs of their two's complement.
        words = whole.astype(np.int64).view(np.uint64)
        shifts = np.arange(self._limbs, dtype=np.uint64) * np.uint64(self._bits)
        mask = np.uint64((1 << self._bits) - 1)
        limbs = (words[:, None] >> shifts[None, :]) & mask
        return np.concatenate([head, limbs.reshape(-1).astype(self.dtype)])

    def unpack(self, row: Vector, vector: int) -> tuple[Doubles, Doubles]:
        """Return both parts; exact multiples of their steps."""
        assert self.field is not None
        head: Doubles = self.field.lift(row[:vector]) * np.float64(self.step)
        limbs = row[vector:].reshape(-1, self._limbs).tolist()
        # A sum of two's complements modulo 2^64 is the two's complement of the sum.
        words = [sum(limb << (k * self._bits) for k, limb in enumerate(of)) % (1 << _WORD) for of in limbs]
        signed = [word - (1 << _WORD) if word >> (_WORD - 1) else word for word in words]
        return head, np.array([word * SCALAR_STEP for word in signed], np.float64)


def values_of(arithmetic: str, parts: int, limit: float) -> Arithmetic:
    """Return the numbers called ``arithmetic``, one of :data:`ARITHMETICS`, for sums of ``parts`` rows.

    ``limit`` is not looked at for float64.

    Raises
    ------
    ConfigError
        For another name, and as :class:`PrimeArithmetic` does.
    """
    if arithmetic == "float64":
        return RealArithmetic()
    if arithmetic not in ARITHMETICS:
        raise ConfigError(f"unknown arithmetic {arithmetic!r}{nearest(arithmetic, ARITHMETICS)}")
    from fedcomp.coding.prime import GF31, GF65521

    return PrimeArithmetic(GF65521 if arithmetic == "gf65521" else GF31, parts, limit)


def combine(coefficients: Vector, vectors: Sequence[Vector], field: PrimeField | None = None) -> Vector:
    """Return sum_k coefficients[k] * vectors[k], in that order: float64, or over ``field``.

    Parameters
    ----------
    coefficients : ndarray, shape (k,)
    vectors : sequence of k ndarrays of shape (d,)

    Raises
    ------
    ConfigError
        When the numbers of coefficients and vectors differ, there are none, or the vectors differ in length or type.
    """
    if len(vectors) != len(coefficients) or not len(vectors):
        raise ConfigError(f"{len(coefficients)} coefficients for {len(vectors)} vectors; expected one each")
    dtype = np.dtype(np.float64) if field is None else field.dtype
    for vector in vectors:
        if vector.ndim != 1 or vector.size != vectors[0].size or vector.dtype != dtype:
            raise ConfigError(f"a vector is {vector.dtype}{vector.shape}; expected {dtype}({vectors[0].size},)")
    if field is not None:
        out = np.zeros_like(vectors[0])
        for coefficient, vector in zip(coefficients.tolist(), vectors, strict=True):
            field.axpy(int(coefficient), vector, out)
        return out
    total: Vector = vectors[0] * float(coefficients[0])
    # One buffer for all products: each is as long as the model.
    scratch = np.empty_like(total)
    for coefficient, vector in zip(coefficients[1:].tolist(), vectors[1:], strict=True):
        np.multiply(vector, coefficient, out=scratch)
        np.add(total, scratch, out=total)
    return total


def solve_consistent(system: Vector, field: PrimeField) -> Vector | None:
    """Return x with A x = b for a system [A | b] over a prime field, shape (rows, unknowns + 1); None without one.

    Of several solutions the one whose free unknowns are zero.
    """
    with optional("solving over a prime field"):
        import galois  # a second of start-up that only whoever solves needs

    reduced = np.asarray(galois.GF(field.order)(system.astype(np.int64)).row_reduce(), np.int64)
    unknowns = system.shape[1] - 1
    out = np.zeros(unknowns, field.dtype)
    for row in reduced:
        pivots = np.flatnonzero(row)
        if not pivots.size:
            continue
        # The row says 0 = 1: no solution.
        if pivots[0] == unknowns:
            return None
        out[pivots[0]] = row[unknowns]
    return out


def _require_finite(numbers: Doubles) -> None:
    if not np.isfinite(numbers).all():
        raise CodingError("an update holds NaN or infinity; nothing is coded")
