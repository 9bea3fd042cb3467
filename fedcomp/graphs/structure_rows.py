"""Encoding of adjacency rows together with the owners of their columns.

An owner that knows its own rows of P only (structure "halo") is sent those of other nodes when a plan reaches them. A
frame lists each column once, with its owner. The places of the non-zeros are one section of :mod:`fedcomp.wire`. A
symmetric normalisation has few different values, which are then a table and indices into it, where that is shorter. All
is exact: a plan on rows that were sent is the plan on rows that were always there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.graphs.adjacency import MAX_PARTS, Owners, as_owners, check_rows
from fedcomp.graphs.base import MAX_NODES, AdjacencyRows, GraphError, ascending
from fedcomp.graphs.ids import (
    HEAD,
    STRUCTURE,
    finish,
    put_ids,
    put_norms,
    seal,
    take_ids,
    take_norms,
    take_section,
    unseal,
)
from fedcomp.wire import Ones, Raw
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, take_varint, unpack
from fedcomp.wire.errors import Corrupt, LimitExceeded
from fedcomp.wire.section import Section, put_block, take_block

MAX_ENTRIES: Final = 1 << 24
"""Most non-zeros of a frame that a receiver takes unless it says otherwise: 20 bytes each once decoded."""

_WIDE, _NARROW, _TABLE = 0, 1, 2


def encode_structure(rows: AdjacencyRows, owners: ArrayLike, norms: ArrayLike | None = None) -> bytes:
    """Return the frame of adjacency rows.

    Parameters
    ----------
    rows : AdjacencyRows
        ``ids`` ascending, columns ascending within each row.
    owners : array of integers, (nnz,)
        Who owns each of ``rows.columns``; the same node always the same.
    norms : array of floats, (R,), optional
        Feature norms of ``rows.ids``; rounded to float32.

    Raises
    ------
    GraphError
        When these are not adjacency rows, or owners contradict each other.
    """
    ids = ascending(rows.ids)
    check_rows(rows, MAX_NODES)
    owners = as_owners(owners, rows.columns.size, "entries")
    values = np.ascontiguousarray(rows.values, "<f8")
    columns, first, at = np.unique(rows.columns, return_index=True, return_inverse=True)
    # Row-major places in a matrix with a column for each listed node, not for each node of the graph.
    places = np.repeat(np.arange(ids.size), np.diff(rows.indptr)) * columns.size + at.reshape(-1)
    whose = owners[first]
    if not np.array_equal(whose[at.reshape(-1)], owners):
        raise GraphError("a node stands in two columns with different owners")
    width = int(whose.max()).bit_length() if whose.size else 0
    return seal(
        STRUCTURE,
        (
            put_ids(ids),
            put_ids(columns),
            bytes((width,)),
            pack(whose.astype(np.uint32), width),
            put_block(Section(ids.size * columns.size, Ones, "rice").write(Ones(places.size), places)),
            _put_values(values),
            b"\x00" if norms is None else b"\x01" + put_norms(ids, norms),
        ),
    )


def decode_structure(
    frame: Buffer,
    *,
    nodes: int = MAX_NODES,
    parts: int = MAX_PARTS,
    limit: int | None = None,
    max_entries: int = MAX_ENTRIES,
) -> tuple[AdjacencyRows, Owners, NDArray[np.float32] | None]:
    """Return adjacency rows, the owner of each entry's column and, where they were sent, the norms of the rows' nodes.

    Parameters
    ----------
    frame : bytes
        From anyone.
    nodes, parts : int
        Ids and owners are below them.
    limit : int, optional
        Most rows that the receiver takes: as many as it asked for.
    max_entries : int
        Most non-zeros. More, and anything that is not such a frame, is a WireError.
    """
    body = unseal(frame, STRUCTURE)
    ids, pos = take_ids(body, HEAD, nodes, limit)
    columns, pos = take_ids(body, pos, nodes, max_entries)
    head, pos = take_section(body, pos, 1, "owners")
    width = head[0]
    if width > 31:
        raise Corrupt(f"owners of {width} bits are not possible; at most 31")
    section, pos = take_section(body, pos, packed_size(columns.size, width), "owners")
    whose = unpack(section, columns.size, width, np.int64)
    largest = int(whose.max()) if whose.size else 0
    if largest >= parts:
        raise Corrupt(f"owner {largest} is not one of {parts} parts")
    # Wider fields would make a second frame of the same rows.
    if largest.bit_length() != width:
        raise Corrupt(f"owners up to {largest} stand in {width} bits each; expected {largest.bit_length()}")
    section, pos = take_block(body, pos)
    size = ids.size * columns.size
    # The size, a product of two counts, is no bound on what a receiver should hold: max_entries is.
    places = Section(size, Ones, "rice", max_k=min(size, max_entries)).read(section).indices
    assert places is not None
    row, at = np.divmod(places, max(1, columns.size))
    if not np.bincount(at, minlength=columns.size).all():
        raise Corrupt("a frame of adjacency rows lists a column that is in none of them")
    values, pos = _take_values(body, pos, places.size)
    head, pos = take_section(body, pos, 1, "norms")
    if head[0] > 1:
        raise Corrupt(f"norms are there (1) or not (0), found {head[0]}")
    norms = None
    if head[0]:
        norms, pos = take_norms(body, pos, ids.size)
    finish(body, pos)
    indptr = np.zeros(ids.size + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=ids.size), out=indptr[1:])
    return AdjacencyRows(ids, indptr, columns[at], values), whose.astype(np.int32)[at], norms


def _put_values(values: NDArray[np.float64]) -> bytes:
    """Return the shortest of: all as float64; all as float32, if this is exact; a table of the distinct values."""
    # By bits: a plan on rows that were sent has to be the plan on rows that were always here.
    distinct, which = np.unique(values.view(np.uint64), return_inverse=True)
    width = max(0, distinct.size - 1).bit_length()
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype("<f4")
    exact = np.array_equal(narrow.astype(np.float64).view(np.uint64), values.view(np.uint64))
    plain = 4 * values.size if exact else 8 * values.size
    size = put_varint(distinct.size)
    if len(size) + 8 * distinct.size + packed_size(values.size, width) < plain:
        return bytes((_TABLE,)) + size + distinct.astype("<u8").tobytes() + pack(which.reshape(-1), width)
    return bytes((_NARROW,)) + narrow.tobytes() if exact else bytes((_WIDE,)) + values.tobytes()


def _take_values(body: memoryview, pos: int, count: int) -> tuple[NDArray[np.float64], int]:
    head, pos = take_section(body, pos, 1, "values")
    if head[0] > _TABLE:
        raise Corrupt(f"values of adjacency rows in form {head[0]}; expected 0, 1 or 2")
    if head[0] != _TABLE:
        kind = np.dtype("f8" if head[0] == _WIDE else "f4")
        section, pos = take_section(body, pos, count * kind.itemsize, "values")
        values = Section(count, Raw, dtype=kind.name).read(section).values.decode().astype(np.float64)
    else:
        size, pos = take_varint(body, pos, len(body))
        if size > count:
            raise LimitExceeded(f"a table of {size} values for {count} entries")
        section, pos = take_section(body, pos, 8 * size, "values")
        table = Section(size, Raw, dtype="float64").read(section).values.decode()
        width = max(0, size - 1).bit_length()
        bits = table.view(np.uint64)
        # In order of the bits, as np.unique wrote them: negative values stand last.
        if not (bits[1:] > bits[:-1]).all():
            raise Corrupt("the table of values of adjacency rows does not ascend")
        section, pos = take_section(body, pos, packed_size(count, width), "values")
        which = unpack(section, count, width, np.int64)
        if count and int(which.max()) >= size:
            raise Corrupt(f"an entry refers to value {int(which.max())} of {size}")
        if not np.bincount(which, minlength=size).all():
            raise Corrupt("the table of values of adjacency rows has one that no entry has")
        values = table[which]
    if not values.all():
        raise Corrupt("a zero is among the entries of adjacency rows")
    return values, pos
