"""Bytes per tensor of a frame, read from the tensor table without decoding a section."""

from __future__ import annotations

from typing import Final

from fedcomp.wire.bits import Buffer
from fedcomp.wire.decode import _TRAILER, _check_header, _take_entry, _take_fields
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.frame import HEADER
from fedcomp.wire.limits import Limits

_WIDE: Final = Limits(max_bytes_in=1 << 62, max_elements=1 << 62, max_bytes_out=1 << 62, max_tensors=1 << 32)
"""Memory here does not grow with the sizes that a frame claims, so no frame has to be refused for its size."""


def tensor_bytes(frame: Buffer) -> tuple[int, ...]:
    """Return the bytes of each tensor of ``frame``, in order: its entry in the table, its indices and its values.

    What is left of ``len(frame)`` belongs to no tensor: 16 bytes of header, the optional fields with their end mark and
    padding, 4 bytes of checksum. Sections are not decoded.

    Raises
    ------
    WireError
        When the header, the checksum or the table is damaged, or does not account for every byte.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp import wire
    >>> frame = wire.encode([wire.dense(np.zeros(9, np.float32)), wire.dense(np.zeros(5, np.float32))])
    >>> tensor_bytes(frame), len(frame)
    ((49, 33), 103)
    """
    buf = memoryview(frame).toreadonly()
    _, count, head = _check_header(buf, _WIDE)
    _, pos = _take_fields(buf, HEADER.size, head)
    sizes = []
    sections = 0
    for _ in range(count):
        entry, end = _take_entry(buf, pos, head, None, _WIDE)
        stored = entry.index_stored + entry.value_stored
        sizes.append(end - pos + stored)
        sections += stored
        pos = end
    if pos != head or sections != len(buf) - head - _TRAILER:
        raise Corrupt(f"the tensor table does not account for the frame's {len(buf)} bytes")
    return tuple(sizes)
