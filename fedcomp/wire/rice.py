"""Index codecs built from a unary stream and low bits: Rice, block-Rice and Elias-Fano.

All three keep the two parts in separate streams ("split"), so that numpy handles each in a few whole-array operations.
Rice codes the gaps (Rice 1979; Golomb 1966 for power-of-two parameters) and is within 1 % of the entropy of a uniform
support below density 1 %; block-Rice follows clustered supports with one parameter per block of gaps; Elias-Fano
(Elias 1974, Fano 1971) codes the indices themselves and costs about half a bit more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import tiers
from fedcomp.wire.bits import (
    Buffer,
    exact_sum,
    pack,
    pack_unary,
    packed_size,
    unary_size,
    unpack,
    unpack_unary,
)
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.index import IndexCodec, Indices, Support

# The table has five bits per parameter.
MAX_BLOCK_B = 31
DEFAULT_BLOCK_LOG2 = 8


def rice_size(support: Support, b: int) -> int:
    """Return the exact bytes of the Rice section of ``support`` with parameter ``b``."""
    return _size(_quotient_sum(support.gaps, b), support.k, b)


def best_rice(support: Support) -> tuple[int, int]:
    """Return a Rice parameter, and the bytes of its section: the smallest, up to one byte of rounding."""
    if support.k == 0:
        return 0, 0
    # Near the optimum for geometric gaps, b = log2(mean ln 2); the walk from there compares exact sizes.
    # 45426 / 65536 is ln 2: integers, so that every platform starts from the same parameter.
    b = max(0, (support.gap_sum * 45426 // 65536 // support.k).bit_length() - 1)
    quotients = _quotient_sum(support.gaps, b)
    size = _size(quotients, support.k, b)
    # With one bit more every quotient halves, rounded down; with one bit less it at least doubles. So one bit more
    # cannot save anything while the quotients sum to at most k, and one bit less costs at least a byte when they sum to
    # k + 8: most supports need one direction only.
    start = b
    while quotients > support.k and b < support.n.bit_length():
        other = rice_size(support, b + 1)
        if other >= size:
            break
        b, size = b + 1, other
    if b == start and quotients < support.k + 8:
        while b and (other := rice_size(support, b - 1)) <= size:
            b, size = b - 1, other
    return b, size


def _size(quotient_sum: int, k: int, b: int) -> int:
    return unary_size(quotient_sum, k) + packed_size(k, b)


def _quotient_sum(gaps: NDArray[Any], b: int) -> int:
    # The sum of uint32 gaps is below 2**31 by construction, so no wider accumulator is needed.
    return int(np.add.reduce(gaps >> gaps.dtype.type(b), dtype=gaps.dtype))


class Rice(IndexCodec):
    """Gaps in Rice code with one parameter. Parameter on the wire: b. Section: unary quotients, then low bits."""

    codec_id = 4
    name = "rice"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return self.encode_with(support, best_rice(support)[0])

    def encode_with(self, support: Support, b: int) -> tuple[bytes, bytes]:
        """Encode with a given parameter."""
        # A new array even for b = 0: pack_unary overwrites it, and the gaps are kept for other codecs to measure.
        quotients = support.gaps >> support.gaps.dtype.type(b)
        return bytes((b,)), pack_unary(quotients) + pack(support.gaps, b)

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        # More low bits than n has would all be zero, and above 64 no field could hold them.
        if len(params) != 1 or params[0] > n.bit_length():
            raise Corrupt(
                f"rice needs one parameter, at most {n.bit_length()} for {n} elements; found {params.hex()!r}"
            )
        b = params[0]
        # The gaps of k indices below n add up to n - k at most, and so their quotients to at most that much shifted.
        low = packed_size(k, b)
        return unary_size(0, k) + low, (unary_size((n - k) >> b, k) if k else 0) + low

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        b = params[0]
        # The low bits have a known length, so the unary stream needs none: it is what comes before them.
        split = len(section) - packed_size(k, b)
        ones = unpack_unary(section[:split], k)
        low = unpack(section[split:], k, b, np.int64)
        if k == 0:
            return ones
        if (int(ones[-1]) - k + 1) << b >= n:
            raise Corrupt(f"indices run beyond the {n} elements of the tensor")
        return _join_gaps(ones, low, np.array([b], np.uint8), b, k, n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 8 * (size - packed_size(k, params[0])) + 16 * k

    def size_bits(self, n: int, k: int) -> int:
        b = max(0, ((n - k) * 45426 // 65536 // max(k, 1)).bit_length() - 1)
        # A support that ends early is coded with a smaller b, at most 2k/ln 2 quotient units per b.
        return 8 * (unary_size(max((n - k) >> b, 2 * k if b else 0), k) + packed_size(k, b)) if k else 0


def _join_gaps(
    ones: Indices, low: NDArray[Any], widths: NDArray[np.uint8], largest: int, block: int, n: int
) -> Indices:
    """Return indices from the positions in the unary stream and the low bits of the gaps; overwrites both.

    The shifted quotients add up to less than 2**62; no width is above ``largest``.
    """
    k = ones.size
    # In Python integers: with both sums below 2**62 nothing wraps in the end.
    if k << largest >= 1 << 62 and exact_sum(low) >= 1 << 62:
        raise Corrupt(f"indices run beyond the {n} elements of the tensor")
    tiers.ops("auto", k).join_gaps(ones, low, widths, block)
    # No gap is negative, so the last index is the largest.
    if ones[-1] >= n:
        raise Corrupt(f"indices run beyond the {n} elements of the tensor")
    return ones


class BlockRice(IndexCodec):
    """Gaps in Rice code with one parameter per block of gaps.

    Parameter on the wire: log2 of the block. Section: the parameters, five bits each; unary quotients; then for each
    parameter b = 1 .. 31 in turn the low bits of all gaps of its blocks, packed together.
    """

    codec_id = 5
    name = "block-rice"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return self.encode_with(support, best_block_rice(support)[0])

    def encode_with(self, support: Support, table: NDArray[np.uint8]) -> tuple[bytes, bytes]:
        """Encode with a given table of parameters, one per block."""
        if support.k == 0:
            return bytes((DEFAULT_BLOCK_LOG2,)), b""
        k = support.k
        gaps = _in_blocks(support.gaps, DEFAULT_BLOCK_LOG2)
        quotients = (gaps >> table.astype(gaps.dtype)[:, None]).reshape(-1)[:k]
        parts = [pack(table, 5), pack_unary(quotients)]
        members = _members(table, k, DEFAULT_BLOCK_LOG2)
        # Only the last block may be short, and it is the last of its parameter, too.
        parts += [pack(gaps[table == v].reshape(-1)[: members[v]], v) for v in _parameters(table)]
        return bytes((DEFAULT_BLOCK_LOG2,)), b"".join(parts)

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        if len(params) != 1 or not 5 <= params[0] <= 15:
            raise Corrupt(f"block-rice needs one parameter, log2 of the block in 5..15; found {params.hex()!r}")
        table = packed_size(-(-k >> params[0]), 5)
        # At most 31 low bits per gap, and each of the 31 groups of low bits is padded to a whole byte.
        return table + unary_size(0, k), table + (unary_size(n - k, k) + 32 + k * 4 if k else 0)

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        if k == 0:
            return np.zeros(0, np.int64)
        log2 = params[0]
        blocks = -(-k >> log2)
        start = packed_size(blocks, 5)
        table = unpack(section[:start], blocks, 5).astype(np.uint8)
        values = _parameters(table)
        members = _members(table, k, log2)
        low_size = sum(packed_size(members[v], v) for v in values)
        split = len(section) - low_size
        largest = max(values, default=0)
        # `bounds` knew the length alone. What the table says has to fit it before the stream is expanded to a byte per
        # bit.
        if split < start or split - start > unary_size(n - k, k) or largest > n.bit_length():
            raise Corrupt("block-rice parameters do not fit the section")
        ones = unpack_unary(section[start:split], k)
        ends = np.minimum(np.arange(1, blocks + 1) << log2, k) - 1
        quotients = np.diff(ones[ends] - ends, prepend=0)
        # First in float64, because the shift wraps for forged quotients; 1.5 leaves room for rounding.
        wide = float(np.ldexp(quotients.astype(np.float64), table.astype(np.int32)).sum())
        if wide > 1.5 * n or exact_sum(quotients << table) >= n:
            raise Corrupt(f"indices run beyond the {n} elements of the tensor")
        low = np.zeros((blocks, 1 << log2), np.uint32)
        for value in values:
            size = packed_size(members[value], value)
            fields = unpack(section[split : split + size], members[value], value, np.uint32)
            # Only the last block may be short, and it is the last of its parameter, too.
            low[table == value] = _in_blocks(fields, log2)
            split += size
        return _join_gaps(ones, low.reshape(-1)[:k], table, largest, 1 << log2, n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        # Every bit of the section may be one of the unary stream, but that stream has no more than n bits and padding.
        return min(8 * size, n + 8) + 30 * k

    def size_bits(self, n: int, k: int) -> int:
        table = packed_size(-(-k >> DEFAULT_BLOCK_LOG2), 5) if k else 0
        return 8 * (table + 31) + Rice().size_bits(n, k)


def _in_blocks(numbers: NDArray[Any], log2: int) -> NDArray[Any]:
    """Return numbers with one block per row, the last row padded with zeros; a view if it is full."""
    if not numbers.size & (1 << log2) - 1:
        return numbers.reshape(-1, 1 << log2)
    blocks = np.zeros((-(-numbers.size >> log2), 1 << log2), numbers.dtype)
    blocks.reshape(-1)[: numbers.size] = numbers
    return blocks


def _parameters(table: NDArray[np.uint8]) -> list[int]:
    """Return the non-zero parameters that occur, ascending."""
    return [int(v) for v in np.flatnonzero(np.bincount(table, minlength=1)) if v]


def _members(table: NDArray[np.uint8], k: int, log2: int) -> dict[int, int]:
    """Return the number of the ``k`` gaps in blocks of each parameter."""
    counts = np.bincount(table) << log2
    # The last block is usually shorter than the others.
    counts[table[-1]] -= (table.size << log2) - k
    return {value: int(count) for value, count in enumerate(counts)}


def best_block_rice(support: Support) -> tuple[NDArray[np.uint8], int]:
    """Return a good parameter for every block, the best of three neighbours, and the section's exact bytes."""
    k, log2 = support.k, DEFAULT_BLOCK_LOG2
    if k == 0:
        return np.zeros(0, np.uint8), 0
    blocks = -(-k >> log2)
    # Gaps of 0 have quotients of 0, and `used` leaves their bits out.
    gaps = _in_blocks(support.gaps, log2)
    used = np.full(blocks, 1 << log2, np.int64)
    used[-1] = k - ((blocks - 1) << log2)
    sums = tiers.ops("auto", k).shifted_sums
    totals = sums(gaps, np.zeros(blocks, np.uint8))
    # floor(log2(mean ln 2)) in integers, so that every platform starts at the same parameter. The exponent of a float64
    # is exact far beyond the largest parameter.
    _, exponents = np.frexp((totals * 45 // 64 // used).astype(np.float64))
    start = np.clip(exponents - 1, 0, MAX_BLOCK_B)
    best = start.astype(np.uint8)
    best_bits = sums(gaps, best) + used * best
    for step in (1, -1):
        trial = np.clip(start + step, 0, MAX_BLOCK_B).astype(np.uint8)
        bits = sums(gaps, trial) + used * trial
        # On a tie the smaller parameter, so that the table does not depend on the order of the trials.
        better = (bits < best_bits) | ((bits == best_bits) & (trial < best))
        best = np.where(better, trial, best)
        best_bits = np.where(better, bits, best_bits)
    unary = int((best_bits - used * best).sum())
    members = _members(best, k, log2)
    size = packed_size(blocks, 5) + (unary + k + 7) // 8
    return best, size + sum(packed_size(members[v], v) for v in _parameters(best))


class EliasFano(IndexCodec):
    """Indices split into unary high parts and ``l`` low bits.

    Parameter on the wire: l. Section: unary, then low bits.
    """

    codec_id = 6
    name = "elias-fano"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        low = elias_fano_parameter(support.n, support.k)
        if support.k == 0:
            return bytes((low,)), b""
        return bytes((low,)), pack_unary(_high_steps(support, low)) + pack(support.indices, low)

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        if len(params) != 1 or params[0] > n.bit_length():
            raise Corrupt(f"elias-fano needs one parameter, at most {n.bit_length()}; found {params.hex()!r}")
        low = packed_size(k, params[0])
        return unary_size(0, k) + low, (unary_size((n - 1) >> params[0], k) if k else 0) + low

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        low = params[0]
        split = len(section) - packed_size(k, low)
        indices = unpack_unary(section[:split], k)
        # The j-th one bit of the stream is at its high part plus j.
        indices -= np.arange(k)
        # As a Python integer: the shift of the array below would wrap silently.
        if k and int(indices[-1]) << low >= n:
            raise Corrupt(f"indices run beyond the {n} elements of the tensor")
        indices <<= low
        indices |= unpack(section[split:], k, low, np.int64)
        # Within one high part the order rests on the low bits alone, which are the sender's.
        if k and (indices[-1] >= n or np.any(indices[1:] <= indices[:-1])):
            raise Corrupt(f"indices are not strictly ascending numbers below {n}")
        return indices

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 8 * (size - packed_size(k, params[0])) + 17 * k

    def size_bits(self, n: int, k: int) -> int:
        low = elias_fano_parameter(n, k)
        return 8 * (unary_size((n - 1) >> low, k) + packed_size(k, low)) if k else 0


def _high_steps(support: Support, low: int) -> NDArray[np.int64]:
    """Return the increase of the high part from one index to the next."""
    high = support.indices >> low
    high[1:] -= high[:-1].copy()
    return high


def elias_fano_parameter(n: int, k: int) -> int:
    """Return floor(log2(n / k)), the usual number of low bits."""
    return max(0, (n // k).bit_length() - 1) if k else 0


def elias_fano_size(support: Support) -> int:
    """Return the exact bytes of the Elias-Fano section."""
    if support.k == 0:
        return 0
    low = elias_fano_parameter(support.n, support.k)
    return unary_size(support.last >> low, support.k) + packed_size(support.k, low)
