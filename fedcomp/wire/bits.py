"""Bit packing with numpy: fixed-width fields, unary streams, varints. Bit order is LSB-first everywhere.

Nothing here loops over elements in Python. Fixed-width fields have two layouts, both part of the format: above
:data:`VERTICAL_THRESHOLD` fields the first ``64 * (count // 64)`` are packed *vertically* (64 long contiguous vector
operations), the rest, and everything below the threshold, as one contiguous bit string.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import tiers
from fedcomp.wire.errors import Corrupt, Truncated

VERTICAL_THRESHOLD: Final = 8192
"""Number of fields from which the vertical layout is used. Part of the format: it may never change."""

_SUM_CHUNK = 1 << 18

_WORD = np.dtype("<u8")

Buffer = bytes | bytearray | memoryview
Bytes = NDArray[np.uint8]


def put_varint(value: int) -> bytes:
    """Return ``value`` as LEB128: seven bits per byte, least significant first."""
    out = bytearray()
    append_varint(out, value)
    return bytes(out)


def append_varint(out: bytearray, value: int) -> None:
    """Append :func:`put_varint` of ``value`` to ``out``."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def take_varint(buf: Buffer, pos: int, end: int) -> tuple[int, int]:
    """Read one varint of ``buf[pos:end]``; return it and the position after it.

    Raises
    ------
    Truncated
        When the bytes end inside it.
    Corrupt
        When it is longer than ten bytes, exceeds 2**63 - 1, or is not the shortest form.
    """
    if pos >= end:
        raise Truncated(f"a variable-length integer was expected at byte {pos}, where the section ends")
    value: int = buf[pos]
    pos += 1
    if value < 0x80:
        return value, pos
    shift = 7
    while pos < end:
        byte = buf[pos]
        pos += 1
        # The bit by which the byte before said that this one follows has the weight of this one's lowest bit.
        value += byte - 1 << shift
        if byte < 0x80:
            # A last byte of zero adds nothing: it would give every number further encodings. What is above 2**63 - 1
            # would not fit the int64 in which sizes and offsets are worked out.
            if byte == 0 or value >> 63:
                raise Corrupt(
                    f"variable-length integer before byte {pos} exceeds 2**63 - 1 or is not in its shortest form"
                )
            return value, pos
        shift += 7
        # Refused while reading: a long run of continuation bytes would otherwise build an integer as long as itself.
        if shift > 63:
            raise Corrupt(f"variable-length integer before byte {pos} is longer than ten bytes")
    raise Truncated(f"the section ends at byte {end}, inside a variable-length integer")


def packed_size(count: int, width: int) -> int:
    """Return the bytes :func:`pack` needs for ``count`` fields of ``width`` bits."""
    # In both layouts: 64 fields of w bits fill exactly w words, so that the vertical part has no padding.
    return (count * width + 7) // 8


def pack(fields: NDArray[Any], width: int) -> bytes:
    """Pack the low ``width`` bits of every field (integers, shape ``(count,)``); higher bits are dropped."""
    count = fields.size
    if width == 0 or count == 0:
        return b""
    if count < VERTICAL_THRESHOLD:
        return _pack_string(fields, width)
    whole = count & ~63
    return _pack_vertical(fields[:whole], width) + _pack_string(fields[whole:], width)


def unpack(buf: Buffer, count: int, width: int, dtype: type[Any] = np.uint64) -> NDArray[Any]:
    """Undo :func:`pack`; return ``count`` fields in an integer dtype of at least ``width`` bits.

    Raises
    ------
    Corrupt
        When the length is not :func:`packed_size` or a padding bit is set.
    """
    if len(buf) != packed_size(count, width):
        raise Corrupt(f"{count} fields of {width} bits need {packed_size(count, width)} bytes, found {len(buf)}")
    if width == 0 or count == 0:
        return np.zeros(count, dtype)
    if count < VERTICAL_THRESHOLD:
        return _unpack_string(buf, count, width, dtype)
    whole = count & ~63
    split = whole * width // 8
    out = np.empty(count, dtype)
    _unpack_vertical(buf[:split], width, out[:whole])
    out[whole:] = _unpack_string(buf[split:], count - whole, width, dtype)
    return out


def _container(width: int) -> int:
    return 1 if width <= 8 else 2 if width <= 16 else 4 if width <= 32 else 8


def _pack_string(fields: NDArray[Any], width: int) -> bytes:
    size = _container(width)
    bytes_ = fields.astype(f"<u{size}", casting="unsafe").view(np.uint8)
    # Fields of 8, 16, 32 or 64 bits are packed already; a bit matrix would take eight bytes for each of theirs.
    if width == 8 * size:
        return bytes_.tobytes()
    bits = np.unpackbits(bytes_.reshape(-1, size), axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def _unpack_string(buf: Buffer, count: int, width: int, dtype: type[Any]) -> NDArray[Any]:
    if count == 0:
        return np.zeros(0, dtype)
    used = count * width & 7
    # Padding that is not zero would give one section up to 128 encodings, and room for something unseen.
    if used and buf[len(buf) - 1] >> used:
        raise Corrupt(f"padding bits after {count} fields of {width} bits are not zero")
    # The eight bytes from every byte on, as overlapping words: the one at a field's first byte holds 57 bits of it.
    padded = b"".join((buf, bytes(8)))
    words = np.ndarray((len(buf) + 1,), _WORD, padded, strides=(1,))
    bit = np.arange(0, count * width, width)
    byte = bit >> 3
    bit &= 7
    shift = bit.view(np.uint64)
    fields = words.take(byte)
    fields >>= shift
    if width > 57:
        ninth = np.frombuffer(padded, np.uint8)[byte + 8].astype(np.uint64)
        # In two steps: the shift of a field that begins with its byte is by all 64 bits, which C leaves undefined.
        fields |= ninth << (63 - shift) << 1
    fields &= (1 << width) - 1
    return fields.astype(dtype, copy=False)


def _pack_vertical(fields: NDArray[Any], width: int) -> bytes:
    rows = fields.reshape(64, -1)
    words = np.empty((width, rows.shape[1]), np.uint64)
    tiers.ops("auto", fields.size).pack_columns(rows, words)
    return words.astype("<u8", copy=False).tobytes()


def _unpack_vertical(buf: Buffer, width: int, out: NDArray[Any]) -> None:
    words = np.frombuffer(buf, "<u8").reshape(width, -1)
    tiers.ops("auto", out.size).unpack_columns(words.astype(np.uint64, copy=False), out.reshape(64, -1))


def unary_size(total: int, count: int) -> int:
    """Return the bytes of a unary stream of ``count`` numbers whose sum is ``total``."""
    return (total + count + 7) // 8


def pack_unary(numbers: NDArray[Any]) -> bytes:
    """Pack non-negative integers in unary: as many 0 bits as the number says, then a 1 bit.

    ``numbers`` has shape ``(count,)`` and is overwritten.
    """
    if numbers.size == 0:
        return b""
    return tiers.ops("auto", numbers.size).unary(numbers).tobytes()


def unpack_unary(buf: Buffer, count: int) -> NDArray[np.int64]:
    """Return where the 1 bits of a unary stream are; the j-th of them is at the sum of the numbers up to j, plus j.

    The caller bounds ``len(buf)`` first: one byte per bit is allocated here.

    Returns
    -------
    ndarray of int64, shape (count,), strictly ascending

    Raises
    ------
    Corrupt
        When the stream does not hold exactly ``count`` numbers or has trailing bytes.
    """
    if count == 0:
        if len(buf):
            raise Corrupt(f"a unary stream of no numbers has {len(buf)} bytes")
        return np.zeros(0, np.int64)
    # Trailing zero bytes hold no number: the same numbers would have any number of encodings.
    if len(buf) == 0 or buf[len(buf) - 1] == 0:
        raise Corrupt("a unary stream is empty or ends in an unused byte")
    ones = tiers.ops("auto", count).ones(np.frombuffer(buf, np.uint8), count)
    if ones is None:
        raise Corrupt(f"a unary stream does not hold exactly {count} numbers")
    return ones


def exact_sum(numbers: NDArray[Any]) -> int:
    """Return the sum of non-negative integers below 2**63 as a Python integer, which neither wraps nor rounds."""
    total = 0
    for start in range(0, numbers.size, _SUM_CHUNK):
        # Halves of 32 bits, 2**18 at a time: neither sum exceeds 2**50.
        part = numbers[start : start + _SUM_CHUNK].astype(np.uint64)
        total += (int((part >> np.uint64(32)).sum()) << 32) + int((part & np.uint64(0xFFFFFFFF)).sum())
    return total


def shuffle(array: NDArray[Any]) -> bytes:
    """Return all first bytes of the elements, then all second bytes, and so on: what a byte compressor likes."""
    return array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def unshuffle(buf: Buffer, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Undo :func:`shuffle`; ``len(buf)`` is a multiple of the item size."""
    planes = np.frombuffer(buf, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
