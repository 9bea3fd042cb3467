"""Prime fields: addition modulo p, in which shards of integers can be summed.

In GF(2^8) addition is the exclusive or, so shards added in it decode to an exclusive or. In GF(p) it is addition
modulo p: as long as a sum of integers stays within (p-1)/2 in magnitude, its residue tells it exactly. Three primes
cover what travels, in one, two and four bytes a symbol.

Products run through floating-point BLAS in the ranges in which it makes no rounding error; matrices are inverted by
galois, which is imported when the first one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.coding.errors import NotDecodable
from fedcomp.errors import ConfigError, optional

if TYPE_CHECKING:
    from fedcomp.coding.stream import SplitMix64

Residues = NDArray[Any]
"""Elements of a prime field, 0 to p - 1, in the field's own unsigned dtype."""

ReadBytes = Callable[[int], bytes]

MAX_PRIME: Final = 2**31 - 1
"""Two elements, or one and p, fit in 32 bits, and a product and one element more in 64."""

_COLUMNS: Final = 1 << 12
"""Columns of a product worked on at a time: operands and result of a few dozen rows stay in the cache."""

_BLOCK: Final = 1 << 16
_HALF: Final = 16

_ON_THE_WIRE: Final = {251: 1, 65521: 2, 2**31 - 1: 3}
"""Numbers of the fields in headers; 0 is GF(2^8)."""

_EXACT: Final[dict[np.dtype[Any], int]] = {np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53}
"""Every integer up to this magnitude is a number of the format, so sums below it are exact in any order."""


@dataclass(frozen=True)
class PrimeField:
    """GF(p) on numpy arrays.

    Parameters
    ----------
    order : int
        p, a prime, 3 to 2^31 - 1. Elements take one byte below 2^8, two below 2^16, four above.

    Attributes
    ----------
    name : str
    code : int
        The field's number in headers: 1 for GF(251), 2 for GF(65521), 3 for GF(2^31 - 1), -1 for others, which only
        compute.
    dtype : numpy.dtype
        uint8, uint16 or uint32.
    symbol_bytes : int
        Bytes of one element on the wire.
    half : int
        (p - 1) / 2: the largest magnitude of an integer that :meth:`lift` gives back.

    Raises
    ------
    ConfigError
        When p is not a prime in that range.

    Examples
    --------
    >>> GF251.lift(GF251.sum([GF251.residues(np.array([-3, 7])), GF251.residues(np.array([1, 1]))]))
    array([-2,  8])
    """

    order: int
    name: str = field(init=False, compare=False, repr=False)
    code: int = field(init=False, compare=False, repr=False)
    symbol_bytes: int = field(init=False, compare=False, repr=False)
    dtype: np.dtype[Any] = field(init=False, compare=False, repr=False)
    half: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        p = self.order
        if isinstance(p, bool) or not isinstance(p, int) or not 3 <= p <= MAX_PRIME or not _is_prime(p):
            raise ConfigError(f"p={p!r} is not an odd prime of at most 2^31 - 1; 251, 65521 and 2147483647 are usual")
        size = 1 if p < 1 << 8 else 2 if p < 1 << 16 else 4
        facts = {"name": f"GF({p})", "code": _ON_THE_WIRE.get(p, -1), "symbol_bytes": size, "half": (p - 1) // 2}
        # Little-endian by name: the bytes of an array are what travels.
        for name, value in {**facts, "dtype": np.dtype(f"<u{size}")}.items():
            object.__setattr__(self, name, value)

    def add(self, a: ArrayLike, b: ArrayLike, out: Residues | None = None) -> Residues:
        """Return a + b elementwise, broadcast."""
        return self._reduced(np.add(a, b, dtype=np.uint32), out)

    def subtract(self, a: ArrayLike, b: ArrayLike, out: Residues | None = None) -> Residues:
        """Return a - b elementwise, broadcast."""
        # p first, so that the unsigned difference never goes below zero.
        total = np.add(a, np.uint32(self.order), dtype=np.uint32)
        return self._reduced(np.subtract(total, b, dtype=np.uint32), out)

    def multiply(self, a: ArrayLike, b: ArrayLike, out: Residues | None = None) -> Residues:
        """Return a * b elementwise, broadcast."""
        return self._reduced(np.multiply(a, b, dtype=np.uint64), out)

    def reciprocal(self, a: ArrayLike) -> Residues:
        """Return 1 / a elementwise, by Fermat's little theorem.

        Raises
        ------
        ConfigError
            When an element is 0.
        """
        base = np.asarray(a, np.uint64)
        if not base.all():
            raise ConfigError(f"0 has no reciprocal in {self.name}")
        result = np.ones_like(base)
        # a^(p - 2) by squaring; factors are below 2^31, so no product leaves 64 bits.
        for bit in bin(self.order - 2)[2:]:
            result = result * result % np.uint64(self.order)
            if bit == "1":
                result = result * base % np.uint64(self.order)
        return result.astype(self.dtype)

    def sum(self, rows: Sequence[Residues]) -> Residues:
        """Return the sum of arrays of one shape; reduced once, which 2^33 arrays still allow.

        Raises
        ------
        ConfigError
            When there is none.
        """
        if not rows:
            raise ConfigError("a sum of no arrays has no shape")
        total = np.zeros(np.shape(rows[0]), np.uint64)
        for row in rows:
            total += row
        return self._reduced(total, None)

    def matmul(self, a: Residues, b: Residues, out: Residues | None = None) -> Residues:
        """Return the product of ``a`` (n, k) and ``b`` (k, s), both of the field's dtype; exact for every k.

        Products are summed in float32 where k (p-1)^2 <= 2^24, else in float64 up to 2^53. A prime whose square leaves
        no room for that has ``a`` cut into halves of 16 bits, and k into stretches.

        Raises
        ------
        ConfigError
            When shapes do not fit, or ``out`` shares memory with an operand.
        """
        a, b = np.asarray(a), np.asarray(b)
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise ConfigError(f"a product needs matrices (n, k) and (k, s), got {a.shape} and {b.shape}")
        shape = (a.shape[0], b.shape[1])
        if out is None:
            out = np.empty(shape, self.dtype)
        elif out.shape != shape or out.dtype != self.dtype:
            raise ConfigError(f"out is {out.dtype}{out.shape}, the product is {self.dtype}{shape}")
        elif np.shares_memory(out, a) or np.shares_memory(out, b):
            raise ConfigError("out shares memory with an operand of the product; give it memory of its own")
        parts, kind, length = _split(self.order, a)
        for start in range(0, shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            out[:, columns] = _product(self.order, parts, b[:, columns], kind, length)
        return out

    def dot(self, a: Residues, b: Residues) -> Residues:
        """Return the products of the rows of ``a`` (n, k) with the one vector ``b`` (k,): long rows, few of them."""
        total = np.zeros(a.shape[0], np.uint64)
        p = np.uint64(self.order)
        for start in range(0, b.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            products = np.multiply(a[:, block], b[block], dtype=np.uint64)
            # Of a prime below 2^16 a block of products sums below 2^48.
            total += (products if self.order < 1 << 16 else products % p).sum(axis=1) % p
        return self._reduced(total, None)

    def axpy(self, c: int, x: Residues, y: Residues) -> None:
        """Do ``y += c * x`` in place."""
        products = np.multiply(x, np.uint64(c % self.order), dtype=np.uint64)
        # c x + y is at most p (p - 1), below 2^62: one reduction serves both steps.
        products += y
        self._reduced(products, y)

    def random(self, shape: int | tuple[int, ...], stream: SplitMix64) -> Residues:
        """Return uniform elements from the portable stream: everyone with its seed draws the same."""
        return stream.below(self.order, int(np.prod(shape))).astype(self.dtype).reshape(shape)

    def secret(self, shape: int | tuple[int, ...], read: ReadBytes) -> Residues:
        """Return uniform elements from ``read(count) -> bytes``, the operating system's randomness for secrets.

        Numbers of p and more are drawn again, which leaves the others exactly uniform.
        """
        wanted = int(np.prod(shape))
        # Cut to the bits of p - 1, at least half of the numbers drawn are elements, whatever the prime.
        mask = (1 << (self.order - 1).bit_length()) - 1
        found: list[Residues] = []
        missing = wanted
        while missing:
            # One draw in a while is not enough; a few more than needed usually are.
            count = missing * (mask + 1) // self.order + 16
            drawn = np.frombuffer(read(count * self.symbol_bytes), self.dtype) & self.dtype.type(mask)
            found.append(drawn[drawn < self.order][:missing])
            missing -= found[-1].size
        return np.concatenate(found).reshape(shape) if found else np.zeros(shape, self.dtype)

    def residues(self, integers: NDArray[Any]) -> Residues:
        """Return signed integers modulo p."""
        # np.remainder takes the sign of the divisor, so a negative integer gets its residue too.
        return np.remainder(integers, np.int64(self.order), dtype=np.int64).astype(self.dtype)

    def lift(self, residues: Residues) -> NDArray[np.int64]:
        """Return the integers of least magnitude with these residues, -(p-1)/2 to (p-1)/2."""
        integers = residues.astype(np.int64)
        integers[integers > self.half] -= self.order
        return integers

    def check(self, residues: Residues) -> bool:
        """Whether all numbers are elements of the field."""
        return residues.size == 0 or int(residues.max()) < self.order

    def _reduced(self, values: NDArray[Any], out: Residues | None) -> Residues:
        # p in the values' own dtype: together with a signed one uint64 would become float64, which is not exact.
        reduced = np.remainder(values, values.dtype.type(self.order))
        if out is None:
            return reduced.astype(self.dtype)
        # Nothing is lost by this cast: residues fit the field's dtype.
        np.copyto(out, reduced, casting="unsafe")
        return out


def inverse(prime: PrimeField, a: Residues) -> Residues:
    """Return the inverse of a square matrix over GF(p).

    Raises
    ------
    NotDecodable
        When it is singular.
    """
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ConfigError(f"only square matrices have inverses, this one is {a.shape}")
    with optional("inverting matrices over a prime field"):
        import galois  # a second of start-up that only decoders need

    try:
        return np.asarray(np.linalg.inv(galois.GF(prime.order)(np.asarray(a, np.int64)))).astype(prime.dtype)
    except np.linalg.LinAlgError as error:
        raise NotDecodable(f"a {a.shape[0]} x {a.shape[1]} matrix over {prime.name} is singular") from error


def _split(p: int, a: Residues) -> tuple[list[NDArray[Any]], np.dtype[Any], int]:
    """Return ``a`` as one or two floating-point matrices (high halves first), their dtype, and how many terms of
    their products sum exactly."""
    top = p - 1
    for dtype, limit in _EXACT.items():
        if a.shape[1] * top * top <= limit:
            return [a.astype(dtype)], dtype, a.shape[1]
    double, limit = np.dtype(np.float64), _EXACT[np.dtype(np.float64)]
    if limit // (top * top) >= 64:
        return [a.astype(double)], double, limit // (top * top)
    low = a & a.dtype.type((1 << _HALF) - 1)
    # A half is below 2^16, so each term is below 2^16 (p - 1).
    return [(a >> _HALF).astype(double), low.astype(double)], double, limit // (top << _HALF)


def _product(order: int, parts: list[NDArray[Any]], b: Residues, kind: np.dtype[Any], length: int) -> NDArray[Any]:
    """Return the product of the matrix in ``parts`` with a few columns, reduced."""
    # Exact sums are at most 2^24 in float32 and 2^53 in float64: these integers hold them.
    wide = np.int32 if kind == np.float32 else np.int64
    p = wide(order)
    columns = b.astype(kind)
    total: NDArray[Any] = np.zeros((parts[0].shape[0], b.shape[1]), wide)
    for start in range(0, b.shape[0], max(1, length)):
        terms = slice(start, start + length)
        value = (parts[0][:, terms] @ columns[terms]).astype(wide)
        value %= p
        if len(parts) == 2:
            # Reduced before, the high half stays below 2^47 when it is shifted, and with the low half's sum far below
            # 2^63.
            value <<= wide(_HALF)
            value += (parts[1][:, terms] @ columns[terms]).astype(wide)
            value %= p
        if start:
            value += total
            value %= p
        total = value
    return total


def _is_prime(n: int) -> bool:
    """Whether n < 2^32 is prime: Miller and Rabin's test with bases that leave no exception there (recalled)."""
    if n % 2 == 0 or n < 3:
        return n == 2
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 7, 61):
        x = pow(base, odd, n)
        if base % n == 0 or x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


GF251: Final = PrimeField(251)
"""One byte a symbol: the largest prime below 2^8."""

GF65521: Final = PrimeField(65521)
"""Two bytes a symbol: the largest prime below 2^16."""

GF31: Final = PrimeField(2**31 - 1)
"""Four bytes a symbol: a Mersenne prime."""

FIELDS: Final = (GF251, GF65521, GF31)
"""The fields that travel, smallest first."""
