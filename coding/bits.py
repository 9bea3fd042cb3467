"""Signed integers as a string of bits: fields of one width beside each other, least significant bit first.

64 fields fill whole words of 64 bits, as many as a field has bits. So 64 operations on long vectors, one for each place
in such a group, write or read any number of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError

_PLACES = 64


def width_of(integers: NDArray[np.int64]) -> int:
    """Return the bits that each integer needs in two's complement: 0 where all are 0, at most 64."""
    if not integers.any():
        return 0
    # ~x and x need equally many; of the smallest int64 it is, unlike -x, an int64.
    return max(int(integers.max()), ~int(integers.min())).bit_length() + 1


def packed_size(count: int, width: int) -> int:
    """Return the bytes that ``count`` fields of ``width`` bits take."""
    return (count * width + 7) // 8


def pack(integers: NDArray[np.int64], width: int) -> bytes:
    """Return the low ``width`` bits of each integer, shape (n,); the last byte is filled up with zeros."""
    fields = np.zeros((-(-integers.size // _PLACES) * _PLACES,), np.uint64)
    fields[: integers.size] = integers.view(np.uint64) & np.uint64((1 << width) - 1)
    places = np.ascontiguousarray(fields.reshape(-1, _PLACES).T)
    words = np.zeros((width, places.shape[1]), np.uint64)
    for place, field in enumerate(places if width else ()):
        word, shift = divmod(place * width, _PLACES)
        words[word] |= field << np.uint64(shift)
        if shift + width > _PLACES:
            words[word + 1] |= field >> np.uint64(_PLACES - shift)
    return words.T.astype("<u8").tobytes()[: packed_size(integers.size, width)]


def unpack(data: bytes, count: int, width: int) -> NDArray[np.int64]:
    """Return the ``count`` integers that :func:`pack` wrote.

    Raises
    ------
    PacketError
        When there are fewer or more bytes, or a bit behind the last field is set.
    """
    if len(data) != packed_size(count, width):
        raise PacketError(f"{len(data)} bytes for {count} integers of {width} bits")
    # Bits behind the last field would be a second way to write the same integers.
    if count * width % 8 and data[-1] >> count * width % 8:
        raise PacketError(f"bits behind {count} integers of {width} bits are set")
    if not width:
        return np.zeros(count, np.int64)
    groups = -(-count // _PLACES)
    words = np.frombuffer(data.ljust(8 * width * groups, b"\0"), "<u8").astype(np.uint64).reshape(groups, width).T
    places = np.empty((_PLACES, groups), np.uint64)
    for place, field in enumerate(places):
        word, shift = divmod(place * width, _PLACES)
        np.right_shift(words[word], np.uint64(shift), out=field)
        if shift + width > _PLACES:
            field |= words[word + 1] << np.uint64(_PLACES - shift)
    # Shifted up and, as signed numbers, down again: the bits above a field become copies of its sign.
    unused = np.int64(_PLACES - width)
    found = (places << unused.astype(np.uint64)).view(np.int64) >> unused
    return np.ascontiguousarray(found.T).reshape(-1)[:count]
