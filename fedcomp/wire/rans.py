"""Interleaved rANS: entropy coding of small integers to within a few per cent of their entropy.

Range asymmetric numeral systems (Duda 2013, arXiv:1311.2540; recalled) with a static table in the stream. Number j
belongs to lane j % lanes. Every lane is a state of 32 bits, never below 2**16 between two numbers, and all lanes share
one stream of 16-bit words: a decoder takes a whole row of lanes in one step. Everything is integer arithmetic, so that
every platform writes the same bytes.

Layout: least number and range, varints; bytes of the table, varint; the frequencies of the range in split Elias-gamma
code, which add up to 4096; the states, u32; the words, u16, in the order in which a decoder needs them.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import tiers
from fedcomp.kernels.interface import RANS_BITS, RANS_LEAST
from fedcomp.kernels.tiers import Tier
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.gamma import pack_gamma, unpack_gamma

TOTAL: Final = 1 << RANS_BITS
MOST_SYMBOLS: Final = 1 << 16
"""Numbers are below this."""

_SLOTS: Final = np.arange(TOTAL, dtype=np.uint32)
_MOST_LANES_LOG2: Final = 8
_FINE: Final = 64
"""Number of steps per bit in the estimate of a stream's size."""


def lanes(count: int) -> int:
    """Return the lanes of ``count`` numbers. Part of the format: it may never change.

    A lane costs about three bytes. With one for every 2048 to 4096 numbers that is below 1 % from 1.2 bits a number on.
    """
    return 1 << min(_MOST_LANES_LOG2, (count >> 12).bit_length())


def least_bytes(count: int) -> int:
    """Return the bytes below which no stream of ``count`` numbers is."""
    return 4 + 4 * lanes(count)


def frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return frequencies that add up to 4096 and are nearly in proportion to ``counts``, of which one is positive.

    Every number that occurs has at least 1, and only those have any. At most 4096 of them occur.
    """
    occurs = counts > 0
    room = TOTAL - int(np.count_nonzero(occurs))
    total = int(counts.sum())
    # Counts stay below 2**47, so that no product wraps.
    shares, left = np.divmod(counts * room, total)
    out = shares + occurs
    # What rounding left over goes to the largest remainders, of equal ones to the lowest number.
    missing = TOTAL - int(out.sum())
    out[np.argsort(-left, kind="stable")[:missing]] += 1
    return out.astype(np.uint32)


@functools.cache
def _cost(frequency: int) -> int:
    """Return the cost of a number in units of 1 / _FINE bits, rounded down, with integer arithmetic only."""
    return RANS_BITS * _FINE - (frequency**_FINE).bit_length()


def pack_rans(
    numbers: NDArray[np.uint16], worth: int, counts: NDArray[np.int64] | None = None, tier: Tier = "auto"
) -> bytes | None:
    """Return ``numbers``, at least one, as a stream of less than ``worth`` bytes; None where there is none.

    ``counts`` may say how often each number from 0 on occurs. Numbers of a range of more than 4096 have no stream.
    """
    if counts is None:
        counts = np.bincount(numbers)
    occurs = np.flatnonzero(counts)
    low, span = int(occurs[0]), int(occurs[-1] - occurs[0]) + 1
    if span > TOTAL:
        return None
    counts = counts[low : low + span]
    table = frequencies(counts)
    # Before anything is coded: the words hold all bits but those that end in the states, and a number of the table has
    # at least one.
    bits = sum(c * _cost(f) for c, f in zip(counts.tolist(), table.tolist(), strict=True) if c) // _FINE
    if (span + bits) // 8 >= worth:
        return None
    packed = pack_gamma(table)
    head = put_varint(low) + put_varint(span) + put_varint(len(packed)) + packed
    symbols = numbers - np.uint16(low) if low else numbers
    states, words = tiers.ops(tier, symbols.size).rans_encode(symbols, table, lanes(symbols.size))
    stream = head + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
    return stream if len(stream) < worth else None


def unpack_rans(buf: Buffer, count: int, tier: Tier = "auto") -> NDArray[np.uint16]:
    """Return the ``count`` numbers, at least one, that exactly ``buf`` holds.

    Raises
    ------
    WireError
        For anything else than a stream of so many numbers. Under one table they have one encoding: the coder's steps
        can be undone one by one, and all lanes have to end where an encoder begins.
    """
    size = len(buf)
    low, pos = take_varint(buf, 0, size)
    span, pos = take_varint(buf, pos, size)
    length, pos = take_varint(buf, pos, size)
    width = lanes(count)
    # The table has a word per number of the range: it is bounded before it is made.
    if not 1 <= span <= TOTAL or low + span > MOST_SYMBOLS:
        raise Corrupt(f"entropy-coded numbers from {low} on cannot have a range of {span}")
    split = pos + length + 4 * width
    if split > size or (size - split) & 1:
        raise Corrupt(f"a stream of {size} bytes does not hold a table of {length} bytes and {width} lanes")
    table = unpack_gamma(buf[pos : pos + length], span, RANS_BITS)
    # Zeros at the ends would be other encodings of the same numbers.
    if int(table.sum(dtype=np.uint64)) != TOTAL or not table[0] or not table[-1]:
        raise Corrupt(f"the frequencies of a stream do not add up to {TOTAL} between two that are not 0")
    states = np.frombuffer(buf[pos + length : split], "<u4").astype(np.uint32)
    words = np.frombuffer(buf[split:], "<u2").astype(np.uint16)
    if int(states.min()) < RANS_LEAST:
        raise Corrupt(f"a state of a stream is below {RANS_LEAST}")
    symbols = tiers.ops(tier, count).rans_decode(states, words, *_slots(table), count)
    if symbols is None:
        raise Corrupt(f"a stream does not end where {count} numbers do")
    if low:
        symbols += np.uint16(low)
    return symbols


def _slots(table: NDArray[np.uint32]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Return the number of each of the 4096 slots, and its frequency << 16 | the slot's position among its slots."""
    numbers = np.repeat(np.arange(table.size, dtype=np.uint16), table)
    # Each slot's place is its own number minus that of its number's first slot; what that borrows, adding gives back.
    before = (table << np.uint32(16)) - (np.cumsum(table, dtype=np.uint32) - table)
    return numbers, np.repeat(before, table) + _SLOTS
