"""The row codecs that write non-zeros only: compressed sparse rows, and positions alone where every row has one value.

:mod:`fedcomp.graphs.rowcodecs` has the table of all codecs and is the way in.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import finish, put_pattern, put_varints, take_pattern, take_section, take_varints
from fedcomp.graphs.rowforms import (
    BITS,
    Block,
    Floats,
    Form,
    as_bytes,
    column_width,
    entries_of,
    join_places,
    split_places,
    widened,
)
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, Truncated


class _Sparse(Form):
    """Non-zeros of each row: their number, then their columns."""

    @staticmethod
    def _put_counts(counts: Ids) -> bytes:
        section = put_varints(counts)
        return put_varint(len(section)) + section

    @staticmethod
    def _take_counts(body: memoryview, pos: int, count: int, d: int) -> tuple[Ids, int]:
        size, pos = take_varint(body, pos, len(body))
        section, pos = take_section(body, pos, size, "counts")
        counts = take_varints(section, count)
        if count and int(counts.max()) > d:
            raise Corrupt(f"a row has {int(counts.max())} non-zeros and {d} features")
        # At least a byte follows for each non-zero; and the sum cannot wrap, with d below 2**32.
        if count and int(counts.sum()) > len(body) - pos:
            raise Truncated(f"{int(counts.sum())} non-zeros are announced, {len(body) - pos} bytes follow")
        return counts, pos

    @staticmethod
    def _columns(section: memoryview, counts: Ids, d: int) -> Ids:
        """Return columns that ascend within each row and are below ``d``; raise Corrupt."""
        columns = np.frombuffer(section, column_width(d)).astype(np.int64)
        rising = columns[1:] > columns[:-1]
        ends = np.cumsum(counts)
        ends = ends[(ends > 0) & (ends < columns.size)]
        rising[ends - 1] = True
        if not rising.all() or (columns.size and int(columns.max()) >= d):
            raise Corrupt(f"columns of a row do not ascend, or reach beyond its {d} features")
        return columns


class _Csr(_Sparse):
    """Compressed sparse rows: counts, columns, values."""

    dtype: ClassVar[np.dtype[Any]]

    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        counts, columns, values = block.sparse
        ends = np.cumsum(counts)
        rounded = self._rounded(values, ids, lambda place: int(np.searchsorted(ends, place, side="right")))
        if rounded is not values and not (kept := rounded.view(BITS[rounded.itemsize]) != 0).all():
            # What is too small for the dtype has become zero.
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(kept)))
            counts = before[ends] - before[ends - counts]
            columns, rounded = columns[kept], rounded[kept]
        return [self._put_counts(counts), as_bytes(columns.astype(column_width(block.features))), as_bytes(rounded)]

    def _sections(self, body: memoryview, count: int, d: int) -> tuple[Ids, memoryview, memoryview]:
        counts, pos = self._take_counts(body, 0, count, d)
        total = int(counts.sum())
        columns, pos = take_section(body, pos, total * column_width(d).itemsize, "columns")
        values, pos = take_section(body, pos, total * self.dtype.itemsize, "values")
        finish(body, pos)
        return counts, columns, values

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        counts, section, content = self._sections(body, count, d)
        values = np.frombuffer(content, self.dtype.newbyteorder("<"))
        if not values.view(BITS[values.itemsize]).all():
            raise Corrupt("a zero is among the non-zeros of a frame of rows")
        return Block(d, sparse=(counts, self._columns(section, counts, d), values))

    def slice(self, body: memoryview, count: int, d: int, keep: Ids) -> list[Buffer]:
        counts, columns, values = self._sections(body, count, d)
        entries = entries_of(counts, keep)
        return [
            self._put_counts(counts[keep]),
            as_bytes(np.frombuffer(columns, column_width(d))[entries]),
            as_bytes(np.frombuffer(values, BITS[self.dtype.itemsize])[entries]),
        ]


class Csr(_Csr):
    """Non-zeros as float32."""

    codec_id = 5
    name = "csr"
    dtype = np.dtype(np.float32)


class CsrF16(_Csr):
    """Non-zeros as float16; a value that float16 cannot hold is refused."""

    codec_id = 6
    name = "csr-f16"
    dtype = np.dtype(np.float16)


class CsrF64(_Csr):
    """Non-zeros as float64."""

    codec_id = 7
    name = "csr-f64"
    dtype = np.dtype(np.float64)


class _Binary(_Sparse):
    """Positions of non-zeros, where each row has one value beside 0.

    That value is 1 for word occurrences, and one over the number of words for normalised ones; it travels only when it
    is neither. The mode holds for the whole frame: the first of these that is true of all its rows.

    ====  ====================================
    mode  the value of a row with c non-zeros
    ====  ====================================
    0     1
    1     1 / c in float32
    2     1 / c in float64
    3     float32, one per row, follows
    4     float64, one per row, follows
    ====  ====================================
    """

    def _single(self, block: Block, ids: Ids) -> NDArray[np.float64]:
        values = block.single
        if values is None:
            counts, _, entries = block.sparse
            starts = np.cumsum(counts) - counts
            first = np.repeat(entries[np.minimum(starts, max(0, entries.size - 1))], counts)
            row = int(np.searchsorted(np.cumsum(counts), int(np.argmax(entries != first)), side="right"))
            raise GraphError(
                f"the row of node {int(ids[row])} has different values beside 0, which {self.name!r} cannot hold; "
                "take 'csr' or 'auto'"
            )
        return values

    @staticmethod
    def _put_values(values: NDArray[np.float64], counts: Ids) -> bytes:
        some = counts > 0
        values = np.where(some, values, 0.0)
        for mode in (0, 1, 2):
            if np.array_equal(_implied(mode, counts)[some], values[some]):
                return bytes((mode,))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = values.astype("<f4")
        if np.array_equal(narrow.astype(np.float64), values):
            return b"\x03" + narrow.tobytes()
        return b"\x04" + values.astype("<f8").tobytes()

    @staticmethod
    def _take_values(body: memoryview, pos: int, counts: Ids, mode: int) -> tuple[Floats, int]:
        """Return the value of each row, float32 or float64, and the position after them."""
        if mode > 4:
            raise Corrupt(f"mode {mode} of binary rows is unknown; expected 0 to 4")
        values: Floats
        if mode < 3:
            values = _implied(mode, counts)
            values[counts == 0] = 0.0
            values = values if mode == 2 else values.astype(np.float32)
        else:
            kind = np.dtype("<f4" if mode == 3 else "<f8")
            section, pos = take_section(body, pos, counts.size * kind.itemsize, "values")
            values = np.frombuffer(section, kind).copy()
            if not np.array_equal(values.view(BITS[kind.itemsize]) != 0, counts > 0):
                raise Corrupt("the value of a row is 0 although it has non-zeros, or is not although it has none")
        if (least := _Binary._put_values(widened(values), counts)[0]) < mode:
            raise Corrupt(f"binary rows are written in mode {mode}, and mode {least} holds for all of them")
        return values, pos

    @staticmethod
    def _block(d: int, counts: Ids, columns: Ids, values: Floats) -> Block:
        return Block(d, sparse=(counts, columns, np.repeat(values, counts)))


def _implied(mode: int, counts: Ids) -> NDArray[np.float64]:
    """Return the values that modes 0 to 2 of binary rows stand for."""
    if mode == 0:
        return np.ones(counts.size)
    parts = np.maximum(counts, 1)
    return (1 / parts.astype(np.float32)).astype(np.float64) if mode == 1 else 1 / parts.astype(np.float64)


class BinaryCsr(_Binary):
    """Columns in whole bytes: mode, counts, values that are not implied, columns."""

    codec_id = 8
    name = "binary-csr"

    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        values = self._single(block, ids)
        counts, columns, _ = block.sparse
        coded = self._put_values(values, counts)
        return [coded[:1], self._put_counts(counts), coded[1:], as_bytes(columns.astype(column_width(block.features)))]

    def _sections(self, body: memoryview, count: int, d: int) -> tuple[Ids, Floats, memoryview]:
        mode, pos = take_varint(body, 0, len(body))
        counts, pos = self._take_counts(body, pos, count, d)
        values, pos = self._take_values(body, pos, counts, mode)
        columns, pos = take_section(body, pos, int(counts.sum()) * column_width(d).itemsize, "columns")
        finish(body, pos)
        return counts, values, columns

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        counts, values, section = self._sections(body, count, d)
        return self._block(d, counts, self._columns(section, counts, d), values)

    def slice(self, body: memoryview, count: int, d: int, keep: Ids) -> list[Buffer]:
        counts, values, section = self._sections(body, count, d)
        coded = self._put_values(widened(values[keep]), counts[keep])
        columns = np.frombuffer(section, column_width(d))[entries_of(counts, keep)]
        return [coded[:1], self._put_counts(counts[keep]), coded[1:], as_bytes(columns)]


class BinaryRice(_Binary):
    """Places of all non-zeros of the frame in one Rice code, about half of binary-csr: no counts, no whole bytes.

    Mode, places, values that are not implied. To select is to read all places and write some again.
    """

    codec_id = 9
    name = "binary-rice"

    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        values = self._single(block, ids)
        counts, columns, _ = block.sparse
        return self._parts(values, counts, columns, block.features)

    def _parts(self, values: NDArray[np.float64], counts: Ids, columns: Ids, d: int) -> list[Buffer]:
        places = join_places(counts, columns, d)
        coded = self._put_values(values, counts)
        return [coded[:1], put_pattern(places, counts.size * d), coded[1:]]

    def _sections(self, body: memoryview, count: int, d: int) -> tuple[Ids, Floats, Ids]:
        mode, pos = take_varint(body, 0, len(body))
        places, pos = take_pattern(body, pos, count * d)
        counts, columns = split_places(places, count, d)
        values, pos = self._take_values(body, pos, counts, mode)
        finish(body, pos)
        return counts, values, columns

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        counts, values, columns = self._sections(body, count, d)
        return self._block(d, counts, columns, values)

    def slice(self, body: memoryview, count: int, d: int, keep: Ids) -> list[Buffer]:
        counts, values, columns = self._sections(body, count, d)
        return self._parts(widened(values[keep]), counts[keep], columns[entries_of(counts, keep)], d)
