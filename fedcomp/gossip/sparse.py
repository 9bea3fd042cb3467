"""Sections of few values: where they belong in a few bits, then the values. No frame, no count unless it is needed.

``packed``
    ``k`` fields of ``w = ceil(log2 n)`` bits; a bitmap of n bits instead when ``k w > n``, where it is shorter. Then
    the values. No count travels: the length grows strictly with k, across the change to the bitmap as well, so that it
    tells k.
``bitmap``
    Always a bitmap. The length tells k.
``rice``
    One byte, the parameter b and the layout's number; k (LEB128); gaps in Rice code; the values.
``auto``
    One byte that names one of the three, the shortest; nothing at all for k = 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.gossip.errors import LetterError
from fedcomp.kernels import select_topk
from fedcomp.wire.bits import pack, put_varint, take_varint, unpack
from fedcomp.wire.errors import WireError
from fedcomp.wire.index import Bitmap, Support
from fedcomp.wire.rice import Rice, best_rice

Indices = NDArray[np.int64]

LAYOUTS: Final = ("auto", "packed", "bitmap", "rice")

_PACKED, _BITMAP, _RICE = range(3)
_RICE_CODEC: Final = Rice()
_BITMAP_CODEC: Final = Bitmap()
_KERNEL_FROM = 1 << 14
"""Elements from which the sampling selection beats a plain partition (float32, measured)."""


def largest(v: NDArray[Any], k: int) -> Indices:
    """Return the indices of the ``k`` largest magnitudes of finite ``v``, ascending; ties to the lowest index.

    Exact in the dtype of ``v``: nothing is rounded before it is ranked.
    """
    n = v.size
    if k >= n:
        return np.arange(n)
    if k == 0:
        return np.zeros(0, np.int64)
    if v.dtype == np.float32 and n >= _KERNEL_FROM:
        return select_topk(v, k)
    magnitudes = np.abs(v)
    threshold = np.partition(magnitudes, n - k)[n - k]
    keep = magnitudes > threshold
    missing = k - int(np.count_nonzero(keep))
    keep[np.flatnonzero(magnitudes == threshold)[:missing]] = True
    return np.flatnonzero(keep)


def width(n: int) -> int:
    """Return the bits of an index below ``n``: ``ceil(log2 n)``."""
    return max(0, n - 1).bit_length()


def plain_bytes(n: int, k: int) -> int:
    """Return the bytes of ``k`` indices in layout ``packed``."""
    return -(-min(k * width(n), n) // 8)


def most_bytes(n: int, k: int, size: int) -> int:
    """Return an upper bound on the section of ``k`` values of ``size`` bytes in any layout."""
    # A byte, a count of at most nine, and indices that never take more than a bitmap: fields only where they are
    # shorter, Rice with its best parameter, whose search may miss by a byte.
    return 11 + -(-n // 8) + size * k


def write(indices: Indices, values: NDArray[Any], n: int, layout: str) -> bytes:
    """Return the section of ``values`` (in the wire's dtype) at strictly ascending ``indices`` of ``range(n)``."""
    data = values.tobytes()
    k = values.size
    if layout == "packed":
        return _plain(indices, n) + data
    if layout == "bitmap":
        return _bitmap(indices, n) + data
    if k == 0:
        return b""
    support = Support(indices, n)
    b, size = best_rice(support)
    count = put_varint(k)
    if layout == "auto" and plain_bytes(n, k) <= size + len(count):
        dense = k * width(n) > n
        return bytes((_BITMAP if dense else _PACKED,)) + _plain(indices, n) + data
    return bytes((_RICE | b << 2,)) + count + _RICE_CODEC.encode_with(support, b)[1] + data


def read(data: memoryview, n: int, most: int, dtype: np.dtype[Any], layout: str) -> tuple[Indices, NDArray[Any]]:
    """Return indices and values of exactly ``data``: at most ``most`` of each, nothing allocated beyond them and n.

    Raises
    ------
    LetterError
        For everything :func:`write` does not write. Values are not looked at.
    """
    try:
        indices, rest = _read(data, n, min(most, n), dtype.itemsize, layout)
    except WireError as error:
        raise LetterError(f"the indices of a sparse section cannot be read: {error}") from error
    if indices.size and (indices[-1] >= n or np.any(indices[1:] <= indices[:-1])):
        raise LetterError(f"the indices of a sparse section are not strictly ascending numbers below {n}")
    return indices, np.frombuffer(rest, dtype)


def _plain(indices: Indices, n: int) -> bytes:
    return _bitmap(indices, n) if indices.size * width(n) > n else pack(indices, width(n))


def _bitmap(indices: Indices, n: int) -> bytes:
    present = np.zeros(n, np.bool_)
    present[indices] = True
    return np.packbits(present, bitorder="little").tobytes()


def _read(data: memoryview, n: int, most: int, size: int, layout: str) -> tuple[Indices, memoryview]:
    if layout == "packed":
        return _read_plain(data, n, most, size)
    if layout == "bitmap":
        return _read_bitmap(data, n, most, size)
    if not len(data):
        return np.zeros(0, np.int64), data
    kind, b = data[0] & 3, data[0] >> 2
    if kind == _RICE:
        return _read_rice(data[1:], n, most, size, b)
    if b or kind > _RICE or layout != "auto":
        raise LetterError(f"a sparse section begins with {data[0]}, which names no layout of {layout!r}")
    indices, rest = (_read_plain if kind == _PACKED else _read_bitmap)(data[1:], n, most, size)
    if not indices.size:
        raise LetterError("a sparse section names a layout and holds nothing")
    return indices, rest


def _read_plain(data: memoryview, n: int, most: int, size: int) -> tuple[Indices, memoryview]:
    length, w = len(data), width(n)
    last = n // w if w else n  # the largest k that travels as fields
    if length > plain_bytes(n, last) + size * last:
        return _read_bitmap(data, n, most, size)
    k = 8 * length // (w + 8 * size)
    if -(-k * w // 8) + size * k != length:
        raise LetterError(f"no number of indices of {w} bits and values of {size} bytes has {length} bytes")
    _require_count(k, most)
    split = length - size * k
    return unpack(data[:split], k, w, np.int64), data[split:]


def _read_bitmap(data: memoryview, n: int, most: int, size: int) -> tuple[Indices, memoryview]:
    split = -(-n // 8)
    k, left = divmod(len(data) - split, size)
    if k < 0 or left:
        raise LetterError(f"a bitmap of {n} elements and values of {size} bytes cannot have {len(data)} bytes")
    _require_count(k, most)
    return _BITMAP_CODEC.decode(b"", data[:split], n, k) if split else np.zeros(0, np.int64), data[split:]


def _read_rice(data: memoryview, n: int, most: int, size: int, b: int) -> tuple[Indices, memoryview]:
    k, start = take_varint(data, 0, len(data))
    _require_count(k, most)
    split = len(data) - size * k
    low, high = _RICE_CODEC.bounds(bytes((b,)), n, k)
    if not k or not low <= split - start <= high:
        raise LetterError(f"{k} Rice-coded indices of {n} have {low} to {high} bytes; found {split - start}")
    return _RICE_CODEC.decode(bytes((b,)), data[start:split], n, k), data[split:]


def _require_count(k: int, most: int) -> None:
    if k > most:
        raise LetterError(f"a sparse section holds {k} values; expected at most {most}")
