"""Elias-gamma code in split form: bit lengths in one unary stream, the remaining bits grouped by length.

Gamma (Elias 1975) writes a number x >= 1 as floor(log2 x) in unary and then the bits below its leading one. Keeping the
two parts apart, and the bits of equal length together, lets whole-array operations pack and unpack it; the size is that
of gamma code plus less than one byte per length that occurs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import tiers
from fedcomp.wire.bits import Buffer, pack, pack_unary, packed_size, unary_size, unpack
from fedcomp.wire.errors import Corrupt

_STRETCH = 1 << 15
"""Number of bytes of a unary stream read at once."""


def _lengths(numbers: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return floor(log2(number + 1)), which is exact since float64 represents these integers."""
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
    # A copy, since pack_unary overwrites what it is given.
    parts = [pack_unary(lengths.copy())]
    shifted = numbers.astype(np.uint64) + np.uint64(1)
    parts += [pack(shifted[lengths == width], width) for width in range(1, int(lengths.max()) + 1)]
    return b"".join(parts)


def unpack_gamma(buf: Buffer, count: int, longest: int) -> NDArray[np.uint32]:
    """Undo :func:`pack_gamma`; return ``count`` numbers.

    Parameters
    ----------
    buf : bytes
        Exactly the code; the length of its unary part follows from the content.
    longest : int
        Largest possible floor(log2(number + 1)), at most 31.

    Raises
    ------
    Corrupt
        When the code is not exactly ``count`` numbers of at most that length.
    """
    if count == 0:
        if len(buf):
            raise Corrupt(f"the code of no numbers has {len(buf)} bytes")
        return np.zeros(0, np.uint32)
    lengths, split = _unpack_lengths(buf, count, longest)
    counts = np.bincount(lengths)
    # The leading one of every number; the bits below it follow, one group of equal lengths after the other.
    numbers = np.left_shift(np.uint32(1), lengths, dtype=np.uint32)
    for width in np.flatnonzero(counts)[int(counts[0] > 0) :].tolist():
        size = packed_size(int(counts[width]), width)
        numbers[lengths == width] |= unpack(buf[split : split + size], int(counts[width]), width, np.uint32)
        split += size
    if split != len(buf):
        raise Corrupt("Elias-gamma stream has trailing bytes")
    numbers -= np.uint32(1)
    return numbers


def _unpack_lengths(buf: Buffer, count: int, longest: int) -> tuple[NDArray[np.uint8], int]:
    """Return the first ``count`` numbers of a unary stream and their size in bytes; ``count`` is positive.

    The stream is read in pieces, because its end is unknown and an unpacked bit takes 64 times its packed size.
    """
    lengths = np.empty(count, np.uint8)
    raw = np.frombuffer(buf, np.uint8)
    have, last = 0, -1
    for start in range(0, raw.size, _STRETCH):
        stretch = raw[start : start + _STRETCH]
        found = np.add.accumulate(np.bitwise_count(stretch), dtype=np.int64)
        # The byte in which the last number ends is the last of the stream.
        stretch = stretch[: int(np.searchsorted(found, count - have)) + 1]
        new = int(found[stretch.size - 1])
        if new == 0:
            continue
        if have + new > count:
            raise Corrupt(f"a unary stream holds more than {count} numbers")
        ones = tiers.ops("auto", new).ones(stretch, new)
        assert ones is not None  # they were counted
        ones += 8 * start
        steps = np.diff(ones, prepend=last)
        widest = int(steps.max()) - 1
        # Before the lengths go into eight bits, and before a 1 is shifted by them.
        if widest > longest:
            raise Corrupt(f"Elias-gamma stream holds a number of {widest} bits, at most {longest} are possible")
        lengths[have : have + ones.size] = steps - 1
        have, last = have + ones.size, int(ones[-1])
        if have == count:
            return lengths, (last >> 3) + 1
    raise Corrupt(f"Elias-gamma stream holds fewer than {count} numbers")
