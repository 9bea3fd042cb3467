"""The bytes of a training partition on its way from its owner to a device that combines it.

Little endian: magic ``CDX1``, plan id (8 bytes), partition, rows, columns (u32 each), type (u8: 0 float32, 1 float64),
CRC-32 of what comes before and after it, then the rows in C order. 29 bytes and the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError

Real = NDArray[np.float64]

_HEADER: Final = struct.Struct("<4s8sIIIBI")
_MAGIC: Final = b"CDX1"
_DTYPES: Final = (np.dtype("<f4"), np.dtype("<f8"))


def pack_partition(x: Real, partition: int, plan_id: bytes) -> bytes:
    """Return the bytes in which a partition travels: plan, number, shape and rows, float32 if that loses nothing."""
    # Half the bytes for data that were float32 to begin with, as most are.
    narrow = np.array_equal(x.astype(np.float32).astype(np.float64), x)
    code = 0 if narrow else 1
    body = np.ascontiguousarray(x, _DTYPES[code]).tobytes()
    fields = (_MAGIC, plan_id, partition, x.shape[0], x.shape[1], code)
    check = zlib.crc32(body, zlib.crc32(_HEADER.pack(*fields, 0)[:-4]))
    return _HEADER.pack(*fields, check) + body


def unpack_partition(data: bytes, plan_id: bytes, shapes: Mapping[int, tuple[int, int]]) -> tuple[int, Real]:
    """Return number and rows of a packed partition, float64.

    Parameters
    ----------
    shapes : mapping of int to (int, int)
        The partitions this receiver expects and their shapes; nothing else is accepted.

    Raises
    ------
    PacketError
        When the bytes are anything but one of those, whole and finite.
    """
    if len(data) < _HEADER.size:
        raise PacketError(f"{len(data)} bytes are not a partition: its header alone has {_HEADER.size}")
    magic, plan, partition, rows, columns, code, check = _HEADER.unpack_from(data)
    if magic != _MAGIC or plan != plan_id:
        raise PacketError(f"a partition of plan {plan.hex()} ({magic!r}) arrived, expected plan {plan_id.hex()}")
    # Before a size is computed from them: so far rows and columns are only the sender's word.
    if shapes.get(partition) != (rows, columns) or code >= len(_DTYPES):
        raise PacketError(f"partition {partition} of shape {(rows, columns)} arrived, expected one of {dict(shapes)}")
    size = _HEADER.size + rows * columns * _DTYPES[code].itemsize
    if len(data) != size:
        raise PacketError(f"partition {partition} has {len(data)} bytes, its header says {size}")
    if zlib.crc32(data[_HEADER.size :], zlib.crc32(data[: _HEADER.size - 4])) != check:
        raise PacketError(f"partition {partition} was damaged on the way: its checksum differs")
    x = np.frombuffer(data, _DTYPES[code], offset=_HEADER.size).reshape(rows, columns).astype(np.float64)
    if not np.isfinite(x).all():
        raise PacketError(f"partition {partition} holds values that are not finite")
    return int(partition), x
