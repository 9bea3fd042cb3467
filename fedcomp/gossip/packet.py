"""The bytes of a gossip message: a header of eight bytes, then the algorithm's content.

Little-endian throughout::

    iteration  u32   of the whole run
    seq        u16   number of this message in its sender's stream, modulo 65536
    flags      u8    :class:`MessageFlag`; unknown bits are refused
    dtype      u8    of the sender's vectors: 1 float32, 2 float64
    body             to the end of the message

Nothing else is in a message: the envelope says who wrote it and to whom. Everything read here comes from a peer:
whatever the bytes are, the outcome is a value or a :class:`~fedcomp.gossip.errors.MessageError`.
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import Any, Final, NamedTuple

import numpy as np

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip.base import Real
from fedcomp.gossip.errors import MessageError

HEADER_BYTES: Final = 8
# "<" also turns off padding: eight bytes on every machine.
_HEADER = struct.Struct("<IHBB")

Dtype = np.dtype[Any]

_DTYPES: Final[dict[int, Dtype]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
_CODES: Final[dict[Dtype, int]] = {dtype: code for code, dtype in _DTYPES.items()}


class MessageFlag(IntFlag):
    """What a message is. Bits of one byte; part of the format."""

    RESYNC = 1
    """The body has the whole estimate, as it was before this message's change, in front of the change."""
    DIGEST = 2
    """The body has eight bytes of digest of the estimate after this message's change."""
    DENSE = 4
    """A message of the closing phase: no estimate is concerned."""
    ZOOM = 8
    """The innovation left its scale, which both ends double first (Dyna-COLD)."""
    LEAVING = 16
    """The sender's last message: all it has."""


_ALL_FLAGS: Final = int(
    MessageFlag.RESYNC | MessageFlag.DIGEST | MessageFlag.DENSE | MessageFlag.ZOOM | MessageFlag.LEAVING
)
# The flags fill the low bits without a gap, so every value up to _ALL_FLAGS is valid and every larger one is not.
_FLAGS: Final = tuple(map(MessageFlag, range(_ALL_FLAGS + 1)))
"""Flags by value. They are looked up several times per message, and making one costs as much as the rest of the
header."""


class MessageHeader(NamedTuple):
    """The first eight bytes.

    Attributes
    ----------
    iteration : int
        In which the message was written; below 2**32, it does not wrap around.
    seq : int
        Modulo 65536.
    flags : MessageFlag
    dtype : numpy.dtype
        float32 or float64, little-endian.
    """

    iteration: int
    seq: int
    flags: MessageFlag
    dtype: Dtype


def pack(iteration: int, seq: int, flags: int, dtype: Any, body: bytes) -> bytes:
    """Return the message.

    Parameters
    ----------
    iteration : int
        Below 2**32.
    seq : int
        Any non-negative integer; it travels modulo 65536.
    flags : MessageFlag
    dtype : dtype-like
        float32 or float64: that of the sender's vectors.
    body : bytes

    Raises
    ------
    ConfigError
        When a field cannot hold its value.
    """
    code = _CODES.get(np.dtype(dtype))
    if code is None or not 0 <= iteration < 1 << 32 or seq < 0 or flags & ~_ALL_FLAGS:
        raise ConfigError(
            f"no message has iteration={iteration}, seq={seq}, flags={int(flags):#x}, dtype={np.dtype(dtype)}; need "
            f"0 <= iteration < 2**32, seq >= 0, flags within {_ALL_FLAGS:#x}, float32 or float64"
        )
    # Modulo 65536: a receiver knows which number comes next and needs no more of it.
    return _HEADER.pack(iteration, seq & 0xFFFF, flags, code) + body


def unpack(payload: bytes, *, most: int, dtype: Any = None) -> tuple[MessageHeader, memoryview]:
    """Return the header and the body (a view) of a message.

    Parameters
    ----------
    payload : bytes
    most : int
        Largest body the receiver can use, worked out from its own model: a longer one is refused unread.
    dtype : dtype-like, optional
        What the receiver's own vectors are; a message of another one is refused.

    Raises
    ------
    MessageError
    """
    header = peek(payload)
    if len(payload) - HEADER_BYTES > most:
        raise MessageError(
            f"a message has {len(payload) - HEADER_BYTES} bytes after its header; this model's have at most {most}"
        )
    if dtype is not None and header.dtype != np.dtype(dtype):
        raise MessageError(
            f"a message holds {header.dtype} vectors, this node's are {np.dtype(dtype)}; all nodes must use one dtype"
        )
    # A view: a body can be as large as the model, and readers cut it several times.
    return header, memoryview(payload)[HEADER_BYTES:]


def peek(payload: bytes) -> MessageHeader:
    """Return the header of a message, to see which kind it is.

    Raises
    ------
    MessageError
        When the bytes are too few, or hold an unknown flag or dtype.
    """
    if len(payload) < HEADER_BYTES:
        raise MessageError(f"a message has {len(payload)} bytes; its header alone has {HEADER_BYTES}")
    iteration, seq, flags, code = _HEADER.unpack_from(payload)
    if flags > _ALL_FLAGS or code not in _DTYPES:
        raise MessageError(f"a message has flags {flags:#x} and dtype {code}; known: within {_ALL_FLAGS:#x}, 1 or 2")
    return MessageHeader(iteration, seq, _FLAGS[flags], _DTYPES[code])


def put_real(vector: Real) -> bytes:
    """Return a float32 or float64 vector as it is, little-endian.

    Raises
    ------
    NonFiniteUpdate
        When it holds NaN or infinity.
    """
    require_finite(vector)
    return vector.astype(vector.dtype.newbyteorder("<"), copy=False).tobytes()


def take_real(data: memoryview | bytes, n: int, dtype: Any) -> Real:
    """Return ``n`` finite values of ``dtype`` that are exactly ``data``: a fresh array.

    Raises
    ------
    MessageError
        When the length is another, or a value is NaN or infinite.
    """
    dtype = np.dtype(dtype)
    if len(data) != n * dtype.itemsize:
        raise MessageError(f"{n} values of {dtype} have {n * dtype.itemsize} bytes; found {len(data)}")
    # astype copies: an array from frombuffer is read-only and keeps the whole message alive.
    values = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
    if not all_finite(values):
        raise MessageError(f"{int(np.count_nonzero(~np.isfinite(values)))} of {n} values are NaN or infinite")
    return values


def put_scalars(*values: float) -> bytes:
    """Return numbers as float64, eight bytes each: push-sum's shares.

    Raises
    ------
    NonFiniteUpdate
        When one is NaN or infinite.
    """
    if not all(map(np.isfinite, values)):
        raise NonFiniteUpdate(f"scalars {values} are not finite; nothing was sent")
    return struct.pack(f"<{len(values)}d", *values)


def take_scalars(data: memoryview | bytes, count: int) -> tuple[float, ...]:
    """Return ``count`` finite float64 numbers that are exactly ``data``.

    Raises
    ------
    MessageError
    """
    if len(data) != 8 * count:
        raise MessageError(f"{count} scalars have {8 * count} bytes; found {len(data)}")
    values = struct.unpack(f"<{count}d", data)
    if not all(map(np.isfinite, values)):
        raise MessageError(f"scalars {values} are not finite")
    return values


def all_finite(vector: Real) -> bool:
    """Whether ``vector`` holds neither NaN nor infinity."""
    # ``all`` says the same and takes, of short vectors, more than twice as long.
    return int(np.count_nonzero(np.isfinite(vector))) == vector.size


def require_finite(vector: Real, what: str = "a vector to be sent") -> None:
    """Raise :class:`~fedcomp.errors.NonFiniteUpdate` when ``vector`` holds NaN or infinity."""
    if not all_finite(vector):
        bad = int(np.count_nonzero(~np.isfinite(vector)))
        raise NonFiniteUpdate(
            f"{what} holds {bad} non-finite value(s) of {vector.size}; nothing was sent and no state was changed. "
            "Lower the learning rate or the consensus step gamma"
        )
