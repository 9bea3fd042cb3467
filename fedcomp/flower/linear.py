"""What coded gradient descent and its clients say to each other: message types, the header, vectors as checked bytes.

Three kinds of messages. ``query.coded_setup`` comes in stages: *join* (who are you, what do you hold, your labels),
*share* (send your partition to these devices), *build* (make and keep your combination). ``train.coded_phase1`` carries
the model down and margins up, ``train.coded_phase2`` the projected residuals down and the parts of the gradient up.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.flower.payload import PayloadError, put_frame, take_frame

SETUP: Final = "coded_setup"
PHASE1: Final = "coded_phase1"
PHASE2: Final = "coded_phase2"
"""Actions of the messages; their types are ``query.coded_setup``, ``train.coded_phase1`` and ``train.coded_phase2``."""

JOIN: Final = "join"
SHARE: Final = "share"
BUILD: Final = "build"
"""Stages of the set-up."""

HEADER: Final = "fedcomp.linear"
"""Name of the ConfigRecord that every message and reply has."""

TARGETS: Final = "fedcomp.linear.targets"
"""Name of the ConfigRecord that says to which devices, and where, a partition goes."""

MODEL: Final = "fedcomp.linear.model"
MARGINS: Final = "fedcomp.linear.margins"
RESIDUALS: Final = "fedcomp.linear.residuals"
GRADIENT: Final = "fedcomp.linear.gradient"
LABELS: Final = "fedcomp.linear.labels"
ROW: Final = "fedcomp.linear.row"
PARTITION: Final = "fedcomp.linear.partition"
"""Names of the frames."""

VECTOR_TYPES: Final = ("float64", "float32")
"""Types in which vectors of the two phases may travel."""

DIGEST: Final = 16
"""Bytes of the digest by which an owner says which examples it has."""

_CHECK: Final = 4


def put_vector(content: RecordDict, name: str, vector: NDArray[np.float64], dtype: str) -> None:
    """Store a vector as ``dtype`` ("float64", "float32" or "int8") with a crc32 behind it."""
    body = np.ascontiguousarray(vector, np.dtype(dtype).newbyteorder("<")).tobytes()
    put_frame(content, name, body + zlib.crc32(body).to_bytes(_CHECK, "little"))


def take_vector(content: RecordDict, name: str, size: int, dtype: str) -> NDArray[np.float64]:
    """Return the vector of ``size`` elements that :func:`put_vector` stored, as float64.

    Raises
    ------
    PayloadError
        When there is none, or it has another size, was damaged, or is not finite.
    """
    data = take_frame(content, name)
    kind = np.dtype(dtype).newbyteorder("<")
    if data is None or len(data) != size * kind.itemsize + _CHECK:
        found = "nothing" if data is None else f"{len(data)} bytes"
        raise PayloadError(f"{found} under {name!r}, expected {size} numbers of type {dtype} and a checksum")
    body = data[:-_CHECK]
    if zlib.crc32(body) != int.from_bytes(data[-_CHECK:], "little"):
        raise PayloadError(f"the numbers under {name!r} were damaged on the way: their checksum differs")
    vector = np.frombuffer(body, kind).astype(np.float64)
    if not np.isfinite(vector).all():
        raise PayloadError(f"the numbers under {name!r} are not all finite")
    return vector


def header_of(message: Message) -> ConfigRecord:
    """Return the header of a message or reply.

    Raises
    ------
    PayloadError
        When it has none: the other side is not one of coded gradient descent.
    """
    found = message.content.get(HEADER) if message.has_content() else None
    if not isinstance(found, ConfigRecord):
        raise PayloadError(f"the message has no header {HEADER!r}: it does not come from coded gradient descent")
    return found


def integer_of(header: ConfigRecord, name: str, low: int, high: int) -> int:
    """Return an integer entry in ``[low, high]``; raise :class:`PayloadError` when it is anything else."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PayloadError(f"header entry {name!r} is {value!r}, expected a whole number from {low} to {high}")
    return value


def integers_of(header: ConfigRecord, name: str) -> list[int]:
    """Return an entry that is a list of integers; raise :class:`PayloadError` when it is anything else."""
    value = header.get(name)
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise PayloadError(f"header entry {name!r} is {value!r}, expected a list of whole numbers")
    return [int(v) for v in value]


def texts_of(header: ConfigRecord, name: str) -> list[str]:
    """Return an entry that is a list of texts; raise :class:`PayloadError` when it is anything else."""
    value = header.get(name)
    if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
        raise PayloadError(f"header entry {name!r} is {value!r}, expected a list of texts")
    return [str(v) for v in value]


def bytes_of(header: ConfigRecord, name: str, size: int) -> bytes:
    """Return an entry of ``size`` bytes; raise :class:`PayloadError` when it is anything else."""
    value = header.get(name)
    if not isinstance(value, bytes) or len(value) != size:
        raise PayloadError(f"header entry {name!r} is {value!r}, expected {size} bytes")
    return value


def text_of(header: ConfigRecord, name: str) -> str:
    """Return an entry that is text, empty when it is missing; raise :class:`PayloadError` when it is anything else."""
    value = header.get(name, "")
    if not isinstance(value, str):
        raise PayloadError(f"header entry {name!r} is {value!r}, expected text")
    return value
