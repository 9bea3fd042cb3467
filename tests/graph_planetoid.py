"""Planetoid files of our own making, written as Python 2 wrote them, opcode by opcode."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def array(values: NDArray[np.generic]) -> bytes:
    """Return the opcodes of an array."""
    kind = values.dtype.str[1:].encode()
    dtype = b"cnumpy\ndtype\n" + _text(kind) + _int(0) + _int(1) + b"\x87R"
    dtype += b"(" + _int(3) + _text(b"<") + b"NNN" + _int(-1) + _int(-1) + _int(0) + b"tb"
    shape = b"(" + b"".join(_int(size) for size in values.shape) + b"t"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + _int(0) + b"\x85" + _text(b"b") + b"\x87R"
    return empty + b"(" + _int(1) + shape + dtype + b"\x89" + _text(values.tobytes()) + b"tb"


def matrix(rows: NDArray[np.float32]) -> bytes:
    """Return the opcodes of a scipy matrix in compressed sparse rows."""
    at = np.nonzero(rows)
    indptr = np.concatenate([[0], np.cumsum((rows != 0).sum(1))]).astype(np.int32)
    entries = {b"data": rows[at], b"indices": at[1].astype(np.int32), b"indptr": indptr}
    state = b"".join(_text(name) + array(values) for name, values in entries.items())
    shape = _text(b"_shape") + _int(rows.shape[0]) + _int(rows.shape[1]) + b"\x86"
    return b"cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + state + shape + b"ub"


def lists(near: Mapping[int, Sequence[int]]) -> bytes:
    """Return the opcodes of a dict of neighbour lists."""
    made = b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R("
    return made + b"".join(_int(node) + b"](" + b"".join(map(_int, ends)) + b"e" for node, ends in near.items()) + b"u"


def file(body: bytes) -> bytes:
    """Return the bytes of a file."""
    return b"\x80\x02" + body + b"."


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _text(data: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(data)) + data
