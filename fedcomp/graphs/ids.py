"""Encoding of id lists and norms, and the envelope of every graph-learning frame.

A list of ids ascends, so that it travels as its gaps: one byte for a gap below 128, two below 16 384. Feature rows,
norms and adjacency rows begin with such a list. docs/formats/graphs.md describes every byte. Frames are read with the
receiver's limits before anything is allocated, and only :class:`~fedcomp.wire.WireError` comes out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.graphs.base import MAX_NODES, GraphError, Ids, ascending
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import (
    BadMagic,
    ChecksumMismatch,
    Corrupt,
    LimitExceeded,
    Truncated,
    UnsupportedVersion,
)
from fedcomp.wire.index import indices_from_gaps
from fedcomp.wire.section import Section
from fedcomp.wire.values import Raw

MAGIC: Final = b"FCG"
VERSION: Final = 2
KINDS: Final = {1: "ids", 2: "rows", 3: "norms", 4: "structure"}
IDS, ROWS, NORMS, STRUCTURE = KINDS

HEAD: Final = 5
_TAIL: Final = 4
_LONGEST: Final = 9
"""Bytes of the longest variable-length integer: 63 bits."""


def widened(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return values in float64, without numpy's warning about signalling NaNs, which a frame may hold."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def put_varints(values: NDArray[np.integer[Any]]) -> bytes:
    """Return non-negative integers as consecutive LEB128: seven bits per byte, least significant first.

    Parameters
    ----------
    values : ndarray of integers below 2**63, (count,)
    """
    if not values.size:
        return b""
    values = values.astype(np.uint64, copy=False)
    largest = int(values.max())
    # Gaps between the ids of a sampled batch are mostly that small: their bytes are then the gaps themselves.
    if largest < 0x80:
        return values.astype(np.uint8).tobytes()
    longest = -(-largest.bit_length() // 7)
    lengths = np.ones(values.size, np.int64)
    for j in range(1, longest):
        lengths += values >= np.uint64(1 << 7 * j)
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(starts[-1] + lengths[-1]), np.uint8)
    # The top bit says that another byte follows.
    out[starts] = (values & np.uint64(0x7F)) | ((lengths > 1).astype(np.uint64) << np.uint64(7))
    for j in range(1, longest):
        # Ever fewer go on, so that all bytes together cost one pass over the bytes.
        more = lengths > j
        starts, values, lengths = starts[more], values[more] >> np.uint64(7), lengths[more]
        out[starts + j] = (values & np.uint64(0x7F)) | ((lengths > j + 1).astype(np.uint64) << np.uint64(7))
    return out.tobytes()


def take_varints(section: Buffer, count: int) -> Ids:
    """Return the ``count`` integers that make up ``section``; the inverse of :func:`put_varints`.

    Returns
    -------
    ndarray of int64, (count,)

    Raises
    ------
    Corrupt
        When there are more or fewer, or one is above 2**63 - 1 or not in its shortest form.
    """
    raw = np.frombuffer(section, np.uint8)
    # Before anything is allocated by it: the count is the sender's.
    if not count <= raw.size <= _LONGEST * count or (count and raw[-1] >= 0x80):
        raise Corrupt(f"{count} variable-length integers cannot be a section of {raw.size} bytes with this end")
    if raw.size == count and (not count or int(raw.max()) < 0x80):
        return raw.astype(np.int64)
    # A byte without its top bit ends an integer.
    ends = np.flatnonzero(raw < 0x80)
    if ends.size != count:
        raise Corrupt(f"a section holds {ends.size} variable-length integers, expected {count}")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts
    longest = int(lengths.max()) + 1
    if longest > _LONGEST or bool(((raw[ends] == 0) & (lengths > 0)).any()):
        raise Corrupt("a variable-length integer exceeds 2**63 - 1 or is not in its shortest form")
    values = (raw[starts] & 0x7F).astype(np.int64)
    which = np.arange(count)
    for j in range(1, longest):
        which = which[lengths[which] >= j]
        values[which] |= (raw[starts[which] + j] & 0x7F).astype(np.int64) << (7 * j)
    return values


def put_ids(ids: Ids) -> bytes:
    """Return the id section of ids that passed :func:`ascending`: their number, its length in bytes, the gaps."""
    gaps = ids.copy()
    gaps[1:] -= ids[:-1]
    # Ids do not repeat: the least gap is 1, and need not be written.
    gaps[1:] -= 1
    section = put_varints(gaps)
    return put_varint(ids.size) + put_varint(len(section)) + section


def take_ids(body: memoryview, pos: int, nodes: int, limit: int | None) -> tuple[Ids, int]:
    """Read an id section at ``pos``; return the ids and the position after it, or raise WireError."""
    count, pos = take_varint(body, pos, len(body))
    size, pos = take_varint(body, pos, len(body))
    if limit is not None and count > limit:
        raise LimitExceeded(f"a frame holds {count} ids; at most {limit} were agreed on")
    section, pos = take_section(body, pos, size, "ids")
    gaps = take_varints(section, count)
    # indices_from_gaps relies on gaps below 4 n.
    if count and int(gaps.max()) >= nodes:
        raise Corrupt(f"a gap between ids reaches beyond the {nodes} nodes of the graph")
    return indices_from_gaps(gaps, nodes), pos


def take_section(body: memoryview, pos: int, size: int, what: str) -> tuple[memoryview, int]:
    """Return ``size`` bytes of ``body`` at ``pos`` and the position after them, or raise Truncated."""
    if size > len(body) - pos:
        raise Truncated(f"a section of {what} has {size} bytes, of which {len(body) - pos} are here")
    return body[pos : pos + size], pos + size


def seal(kind: int, parts: Iterable[Buffer]) -> bytes:
    """Return the frame of ``kind`` with ``parts`` as its body: the envelope and a checksum around them."""
    parts = [MAGIC + bytes((VERSION, kind)), *parts]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((*parts, crc.to_bytes(_TAIL, "little")))


def unseal(frame: Buffer, kind: int) -> memoryview:
    """Return the frame up to its checksum, a view whose body begins at :data:`HEAD`, or raise WireError."""
    view = memoryview(frame).toreadonly().cast("B")
    if len(view) < HEAD + _TAIL:
        raise Truncated(f"a frame has {len(view)} bytes; the shortest has {HEAD + _TAIL}")
    if view[:3] != MAGIC:
        raise BadMagic(f"a frame begins with {bytes(view[:3])!r}; those of graph learning with {MAGIC!r}")
    if view[3] != VERSION:
        raise UnsupportedVersion(f"a frame is of version {view[3]}; this receiver reads {VERSION}", view[3], VERSION)
    # After the version, since another one may end otherwise; before the kind, whose byte may be what is damaged.
    if zlib.crc32(view[:-_TAIL]) != int.from_bytes(view[-_TAIL:], "little"):
        raise ChecksumMismatch("a frame was damaged on its way: its checksum differs")
    if view[4] != kind:
        raise Corrupt(f"a frame holds {KINDS.get(view[4], f'kind {view[4]}')}, expected {KINDS[kind]}")
    return view[:-_TAIL]


def finish(body: memoryview, pos: int) -> None:
    """Raise Corrupt unless ``body`` ends at ``pos``."""
    if pos != len(body):
        raise Corrupt(f"a frame has {len(body) - pos} bytes after its last section")


def encode_ids(ids: ArrayLike, *, nodes: int = MAX_NODES) -> bytes:
    """Return the frame of a list of ids.

    Parameters
    ----------
    ids : array of integers, (count,)
        Ascending, without repeats.
    nodes : int
        Ids are below it.

    Raises
    ------
    GraphError
        For any other list.
    """
    return seal(IDS, (put_ids(ascending(ids, nodes)),))


def decode_ids(frame: Buffer, *, nodes: int = MAX_NODES, limit: int | None = None) -> Ids:
    """Return the ids of a frame, ascending and without repeats.

    Parameters
    ----------
    frame : bytes
    nodes : int
        Of the receiver's graph: ids are below it.
    limit : int, optional
        Most ids that the receiver takes. Without it, memory is at most 40 bytes per byte of the frame.

    Raises
    ------
    WireError
        For anything else.
    """
    body = unseal(frame, IDS)
    ids, pos = take_ids(body, HEAD, nodes, limit)
    finish(body, pos)
    return ids


def encode_norms(ids: ArrayLike, norms: ArrayLike) -> bytes:
    """Return the frame of one norm per node, 4 bytes each beside its id.

    Parameters
    ----------
    ids : array of integers, (R,)
        Ascending.
    norms : array of floats, (R,)
        Finite and not negative, else a GraphError; rounded to float32.
    """
    ids = ascending(ids)
    return seal(NORMS, (put_ids(ids), put_norms(ids, norms)))


def decode_norms(frame: Buffer, *, nodes: int = MAX_NODES, limit: int | None = None) -> tuple[Ids, NDArray[np.float32]]:
    """Return ids and norms of a frame from anyone, at most ``limit`` and below ``nodes``, or raise WireError."""
    body = unseal(frame, NORMS)
    ids, pos = take_ids(body, HEAD, nodes, limit)
    norms, pos = take_norms(body, pos, ids.size)
    finish(body, pos)
    return ids, norms


def put_norms(ids: Ids, norms: ArrayLike) -> bytes:
    """Return a section of norms; raise GraphError when they are not one per id, finite and not negative."""
    given = np.asarray(norms, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        # Adding 0 makes a negative zero a positive one.
        written = given.astype("<f4") + np.float32(0)
    if given.shape != ids.shape or not np.isfinite(written).all() or (written < 0).any():
        raise GraphError(
            f"norms of shape {given.shape} for {ids.size} nodes; expected one each, not negative, finite in float32"
        )
    return written.tobytes()


def take_norms(body: memoryview, pos: int, count: int) -> tuple[NDArray[np.float32], int]:
    """Read a section of ``count`` norms at ``pos``; return them and the position after it, or raise WireError."""
    section, pos = take_section(body, pos, 4 * count, "norms")
    norms = Section(count, Raw).read(section).values.decode()
    # By the sign bit, so that -0.0 is refused too: put_norms never writes it.
    if np.signbit(norms).any():
        raise Corrupt("a norm is negative")
    return norms, pos
