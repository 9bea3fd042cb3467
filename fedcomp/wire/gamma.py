"""Elias-gamma code in split form: bit lengths in one unary stream, the remaining bits grouped by length.

Gamma (Elias 1975) writes a number x >= 1 as floor(log2 x) in unary and then the bits below its leading one. Keeping the
two parts apart, and the bits of equal length together, lets whole-array operations pack and unpack it; the size is that
of gamma code plus less than one byte per length that occurs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.wire.bits import Buffer, pack, pack_unary, packed_size, unary_numbers, unary_size, unpack, unpack_unary
from fedcomp.wire.errors import Corrupt


def _lengths(numbers: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return floor(log2(number + 1)); exact, since float64 holds these integers."""
    _, exponent = np.frexp(numbers.astype(np.float64) + 1.0)
    return exponent.astype(np.int64) - 1


def gamma_size(numbers: NDArray[np.uint32]) -> int:
    """Return the exact bytes of :func:`pack_gamma`."""
    if numbers.size == 0:
        return 0
    counts = np.bincount(_lengths(numbers))
    total = int(counts @ np.arange(counts.size))
    return unary_size(total, numbers.size) + sum(packed_size(int(c), w) for w, c in enumerate(counts))


def pack_gamma(numbers: NDArray[np.uint32]) -> bytes:
    """Pack numbers >= 0, each as gamma code of ``number + 1``."""
    if numbers.size == 0:
        return b""
    lengths = _lengths(numbers)
    parts = [pack_unary(lengths.copy())]
    shifted = numbers.astype(np.uint64) + np.uint64(1)
    parts += [pack(shifted[lengths == width], width) for width in range(1, int(lengths.max()) + 1)]
    return b"".join(parts)


def unpack_gamma(buf: Buffer, count: int, longest: int) -> NDArray[Any]:
    """Undo :func:`pack_gamma`; return ``count`` numbers as uint64.

    Parameters
    ----------
    buf : bytes
        Exactly the code; the length of its unary part follows from the content.
    longest : int
        Largest possible floor(log2(number + 1)).

    Raises
    ------
    Corrupt
        When the code is not exactly ``count`` numbers of at most that length.
    """
    if count == 0:
        if len(buf):
            raise Corrupt(f"the code of no numbers has {len(buf)} bytes")
        return np.zeros(0, np.uint64)
    # The unary part ends with the count-th set bit; bound the search by the longest possible stream.
    bits = np.unpackbits(np.frombuffer(buf[: unary_size(count * longest, count)], np.uint8), bitorder="little")
    ones = np.flatnonzero(bits.view(np.bool_))
    if ones.size < count:
        raise Corrupt(f"Elias-gamma stream holds fewer than {count} numbers")
    split = int(ones[count - 1]) // 8 + 1
    lengths = unary_numbers(unpack_unary(buf[:split], count))
    widest = int(lengths.max())
    if widest > longest:
        raise Corrupt(f"Elias-gamma stream holds a number of {widest} bits, at most {longest} are possible")
    numbers = np.ones(count, np.uint64) << lengths.astype(np.uint64)
    for width in range(1, widest + 1):
        members = lengths == width
        size = packed_size(int(np.count_nonzero(members)), width)
        numbers[members] |= unpack(buf[split : split + size], int(np.count_nonzero(members)), width)
        split += size
    if split != len(buf):
        raise Corrupt("Elias-gamma stream has trailing bytes")
    return numbers - np.uint64(1)
