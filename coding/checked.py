"""Arrays of numbers as bytes with a checksum, so that damage is detected before decoding."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedcomp.coding.errors import PacketError

CHECK: Final = 4
"""Bytes of the CRC-32 behind the numbers."""


def checked_bytes(array: NDArray[Any], dtype: DTypeLike) -> bytes:
    """Return an array's numbers as ``dtype``, little-endian on every machine, with a CRC-32 behind them."""
    body = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes()
    return body + zlib.crc32(body).to_bytes(CHECK, "little")


def numbers_of(data: bytes, size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return the array of shape ``(size,)`` that :func:`checked_bytes` wrote, as ``dtype``, read-only.

    Raises
    ------
    PacketError
        When the bytes have another length, or were damaged.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) != size * kind.itemsize + CHECK:
        expected = size * kind.itemsize + CHECK
        raise PacketError(f"{len(data)} bytes arrived, expected {expected}: {size} numbers of type {kind.name}")
    body = data[:-CHECK]
    if zlib.crc32(body) != int.from_bytes(data[-CHECK:], "little"):
        raise PacketError("the numbers were damaged on the way: their checksum differs")
    return np.frombuffer(body, kind)


def doubles_of(data: bytes, size: int, dtype: DTypeLike) -> NDArray[np.float64]:
    """Return :func:`numbers_of` as float64; raises :class:`PacketError` also where one is not finite."""
    vector = numbers_of(data, size, dtype).astype(np.float64)
    # Here and not later: a NaN passes comparisons with a largest misfit.
    if not np.isfinite(vector).all():
        raise PacketError("the numbers are not all finite")
    return vector
