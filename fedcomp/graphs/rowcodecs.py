"""Row codecs: the encoding of feature rows that one client sends to another.

A frame holds rows and their ids; ``select`` takes rows out of a frame and returns the very bytes that encoding these
rows alone would have made. Rows are sections of :mod:`fedcomp.wire`: its index codecs say where values are, its value
codecs what they are. Word counts are mostly zeros, and there the codec matters more than the sampler:
of Cora, 5 732 bytes dense are 18 as one Rice code of where the ones are.

=============  =====================================  ==========================================
name           bytes per row, beside its id           exact for
=============  =====================================  ==========================================
dense-f32      4 d                                    float32
dense-f16      2 d                                    what float16 holds
dense-f64      8 d                                    everything
int8           d + 8                                  constant rows
csr            nnz 4 + places                         float32
csr-f16        nnz 2 + places                         what float16 holds
csr-f64        nnz 8 + places                         everything
binary-rice    places (+ 0, 4 or 8)                   everything, of rows with one value beside 0
auto           the shortest that is exact for these   everything
=============  =====================================  ==========================================

The places of a row take about nnz (log2(d / nnz) + 1.6) / 8 bytes. Exact means bit for bit, the sign of a zero
included.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.graphs.base import MAX_NODES, GraphError, Ids, MissingRows, ascending, find
from fedcomp.graphs.ids import (
    HEAD,
    ROWS,
    finish,
    put_ids,
    seal,
    take_ids,
    take_section,
    unseal,
    widened,
)
from fedcomp.wire import Ones, Raw
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, LimitExceeded, NonFinite, SchemaMismatch, Truncated, UnsupportedCodec
from fedcomp.wire.section import Section

Floats = NDArray[np.floating[Any]]

MAX_BYTES: Final = 1 << 30
"""Most bytes of decoded rows that a receiver takes unless it says otherwise."""

MAX_FEATURES: Final = 1 << 32

BITS: Final = {2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers as wide as a float of so many bytes."""

_F16, _F32, _F64 = (np.dtype(name) for name in ("f2", "f4", "f8"))
_ALIGN: Final = 8
_ALIGN_FROM: Final = 1024
"""The receiver copies shorter bodies, because up to seven bytes of padding would be more than .7 % of them."""


class RowBlock:
    """Rows of one frame, dense or as their non-zeros; the other form is made on demand.

    A non-zero is a value with any bit set, so that the sign of a zero travels.

    Parameters
    ----------
    rows, features : int
    dense : ndarray, (rows, features), optional
    entries : pair of ndarray, optional
        Flat places of the non-zeros, int64 and ascending, and their values.
    """

    def __init__(
        self, rows: int, features: int, *, dense: Floats | None = None, entries: tuple[Ids, Floats] | None = None
    ) -> None:
        self.rows, self.features = rows, features
        self._dense = dense
        if entries is not None:
            self.entries = entries

    @cached_property
    def entries(self) -> tuple[Ids, Floats]:
        """Flat places of the non-zeros, and their values."""
        assert self._dense is not None
        flat = self._dense.reshape(-1)
        # By bits, not by value: -0.0 equals 0, and has to travel.
        places = np.flatnonzero(flat.view(BITS[flat.itemsize]) != 0)
        return places, flat[places]

    @cached_property
    def starts(self) -> Ids:
        """Where the non-zeros of each row begin among all, ``(rows + 1,)``."""
        return np.searchsorted(self.entries[0], self.features * np.arange(self.rows + 1)).astype(np.int64)

    @property
    def values(self) -> Floats:
        """All values, or all that are not 0."""
        return self.entries[1] if self._dense is None else self._dense

    @property
    def dense(self) -> Floats:
        """All values, (rows, features); a new array where the block holds non-zeros."""
        if self._dense is not None:
            return self._dense
        places, values = self.entries
        dense = np.zeros((self.rows, self.features), values.dtype)
        dense.reshape(-1)[places] = values
        return dense

    @cached_property
    def single(self) -> NDArray[np.float64] | None:
        """The one value beside 0 of each row (0 for a row of zeros), or None when some row has more than one."""
        values, starts = self.entries[1], self.starts
        filled = np.flatnonzero(np.diff(starts))
        first = np.zeros(self.rows, values.dtype)
        first[filled] = values[starts[filled]]
        bits = BITS[values.itemsize]
        same = np.array_equal(np.repeat(first.view(bits), np.diff(starts)), values.view(bits))
        return widened(first) if same else None

    def astype(self, dtype: DTypeLike) -> RowBlock:
        """Return the same rows in another dtype; values too large for it become infinite."""
        if np.dtype(dtype) == self.values.dtype:
            return self
        # As in widened().
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self._dense is not None:
                return RowBlock(self.rows, self.features, dense=self._dense.astype(dtype))
            places, values = self.entries
            return RowBlock(self.rows, self.features, entries=(places, values.astype(dtype)))

    def take(self, keep: Ids) -> RowBlock:
        """Return the rows at positions ``keep``, ascending."""
        if self._dense is not None:
            return RowBlock(len(keep), self.features, dense=self._dense[keep])
        places, values = self.entries
        counts = self.starts[keep + 1] - self.starts[keep]
        ends = np.cumsum(counts)
        at = np.repeat(self.starts[keep] - (ends - counts), counts) + np.arange(int(counts.sum()))
        # A kept row moves up by the rows before it that are left out.
        moved = np.repeat((keep - np.arange(len(keep))) * self.features, counts)
        return RowBlock(len(keep), self.features, entries=(places[at] - moved, values[at]))


def positions(have: Ids, ids: Ids) -> Ids:
    """Return the positions of ascending ``ids`` in ascending ``have``; MissingRows names those that are not there."""
    found, at = find(have, ids)
    if not found.all():
        absent = ids[~found]
        raise MissingRows(f"{absent.size} of {ids.size} rows are not here, the first of node {int(absent[0])}", absent)
    return at


class RowCodec(ABC):
    """One way to write feature rows; see the table of the module.

    Attributes
    ----------
    name : str
    codec_id : int
        The codec byte of its frames; 0 for a codec that writes frames of others.
    dtype : numpy.dtype or None
        What rows are rounded to before they are written; None: they are not rounded.
    """

    name: str
    codec_id: int = 0
    dtype: np.dtype[Any] | None = None

    def exact_for(self, dtype: DTypeLike) -> bool:
        """Whether every row of float32 or float64 comes out bit for bit as it went in."""
        return self.dtype is None or np.can_cast(np.dtype(dtype), self.dtype, "safe")

    def encode(self, ids: ArrayLike, rows: Floats) -> bytes:
        """Return the frame of some rows.

        Parameters
        ----------
        ids : array of integers, (R,)
            Which rows, ascending.
        rows : ndarray of float32 or float64, (R, d)
            R may be 0.

        Raises
        ------
        GraphError
            For other shapes or dtypes, values that are not finite or that the codec cannot hold; names the row.
        """
        ids, rows = ascending(ids), np.asarray(rows)
        if rows.ndim != 2 or rows.shape[0] != ids.size or not 0 < rows.shape[1] < MAX_FEATURES:
            raise GraphError(f"rows have shape {rows.shape}; expected {ids.size} of them, with at least one feature")
        if rows.dtype not in (_F32, _F64):
            raise GraphError(f"rows are {rows.dtype}; expected float32 or float64")
        dense = np.ascontiguousarray(rows)
        if Raw(dense).count_non_finite():
            row = int(np.argmin(np.isfinite(dense).all(axis=1)))
            raise GraphError(f"the row of node {int(ids[row])} holds NaN or infinity; nothing was encoded")
        return self._frame(ids, RowBlock(*rows.shape, dense=dense))

    def decode(
        self,
        frame: Buffer,
        *,
        features: int,
        dtype: DTypeLike = np.float32,
        nodes: int = MAX_NODES,
        limit: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> tuple[Ids, Floats]:
        """Return ids and rows of a frame from anyone.

        Parameters
        ----------
        frame : bytes
        features : int
            Columns of the receiver's own features.
        dtype : dtype-like
            Of the rows to return: float32 or float64, that of the receiver's own.
        nodes : int
            Ids are below it.
        limit : int, optional
            Most rows that the receiver takes: as many as it asked for.
        max_bytes : int
            Most bytes of decoded rows.

        Returns
        -------
        ids : ndarray of int64, (R,)
            Ascending.
        rows : ndarray, (R, features)
            Maybe a read-only view of the frame.

        Raises
        ------
        WireError
            For anything that is not a frame of this codec with such rows.
        """
        dtype = np.dtype(dtype)
        if dtype not in (_F32, _F64):
            raise ConfigError(f"rows cannot be decoded to {dtype}; take float32 or float64, as the features are")
        form, ids, d, body = self._open(frame, nodes, limit)
        if d != features:
            raise SchemaMismatch(f"a frame holds rows of {d} features, expected {features}")
        # Before anything is decoded: a few bytes of a sparse frame may stand for rows of any size.
        if ids.size * d * dtype.itemsize > max_bytes:
            raise LimitExceeded(f"{ids.size} rows of {d} features take more than {max_bytes} bytes")
        block = form.read(body, ids.size, d, dtype).astype(dtype)
        if bad := Raw(block.values).count_non_finite():
            raise NonFinite(f"{bad} values of a frame of rows are NaN or infinite, or too large for {dtype}")
        return ids, block.dense

    def select(self, frame: Buffer, ids: ArrayLike) -> bytes:
        """Return the frame of some rows of a frame: the same bytes as if these alone had been encoded.

        Invalid values are left for the receiver to find.

        Parameters
        ----------
        frame : bytes
        ids : array of integers
            Ascending, all of them in the frame.

        Raises
        ------
        WireError
            When the frame is damaged or of another codec.
        MissingRows
            When it lacks some of the rows; names them.
        """
        form, have, d, body = self._open(frame, MAX_NODES, None)
        ids = ascending(ids)
        keep = positions(have, ids)
        return self._frame(ids, form.read(body, have.size, d, _F64).take(keep))

    def write(self, block: RowBlock, ids: Ids) -> list[Buffer]:
        """Return the body of finite rows; raise GraphError, naming the row, when this codec cannot hold one."""
        raise NotImplementedError

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> RowBlock:
        """Return ``count`` rows of ``d`` features; raise WireError. Their values may be NaN or infinite."""
        raise NotImplementedError

    def padding(self, pos: int, count: int, d: int) -> int:
        """Return how many zero bytes precede the body of ``count`` rows that would otherwise begin at ``pos``."""
        return 0

    def _frame(self, ids: Ids, block: RowBlock) -> bytes:
        return self._seal(ids, block.features, self.write(block, ids))

    def _seal(self, ids: Ids, d: int, body: list[Buffer]) -> bytes:
        head = bytes((self.codec_id,)) + put_varint(d) + put_ids(ids)
        return seal(ROWS, (head, bytes(self.padding(HEAD + len(head), ids.size, d)), *body))

    def _open(self, frame: Buffer, nodes: int, limit: int | None) -> tuple[RowCodec, Ids, int, memoryview]:
        """Return the codec of a frame from an untrusted sender, its ids, number of features and body."""
        buf = unseal(frame, ROWS)
        form = self._form(_code_of(buf))
        d, pos = take_varint(buf, HEAD + 1, len(buf))
        if not 0 < d < MAX_FEATURES:
            raise Corrupt(f"rows of {d} features are not possible")
        ids, pos = take_ids(buf, pos, nodes, limit)
        pad, pos = take_section(buf, pos, form.padding(pos, ids.size, d), "padding")
        if any(pad):
            raise Corrupt("padding before a body of rows is not zero")
        return form, ids, d, buf[pos:]

    def _form(self, code: int) -> RowCodec:
        if code != self.codec_id:
            raise UnsupportedCodec(f"a frame of rows is {_called(code)}, expected {self.name!r}", (self.name,))
        return self


class _OneDtype(RowCodec):
    """Values in one floating-point dtype, rounded to nearest even; values that it cannot hold are refused."""

    dtype: np.dtype[Any]

    def __init__(self, codec_id: int, name: str, dtype: np.dtype[Any]) -> None:
        self.codec_id, self.name, self.dtype = codec_id, name, dtype

    def _rounded(self, values: Floats, ids: Ids, row_of: Callable[[int], int]) -> Floats:
        """Return finite values in :attr:`dtype`; raise GraphError with the row if it cannot hold one of them."""
        if values.dtype == self.dtype:
            return values
        with np.errstate(over="ignore", under="ignore"):
            rounded = values.astype(self.dtype)
        # Only a narrower dtype can overflow.
        if self.dtype.itemsize < values.itemsize and Raw(rounded).count_non_finite():
            place = int(np.argmin(np.isfinite(rounded)))
            raise GraphError(
                f"the row of node {int(ids[row_of(place)])} holds {float(values.reshape(-1)[place]):g}, which "
                f"{self.dtype.name} cannot; scale the features or take another codec than {self.name!r}"
            )
        return rounded


class Dense(_OneDtype):
    """Every value. Long bodies begin at a multiple of eight bytes, so that receivers can use them in place."""

    def padding(self, pos: int, count: int, d: int) -> int:
        return -pos % _ALIGN if count * d * self.dtype.itemsize >= _ALIGN_FROM else 0

    def write(self, block: RowBlock, ids: Ids) -> list[Buffer]:
        return [Raw(self._rounded(block.dense, ids, lambda place: place // block.features)).pack()[1]]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> RowBlock:
        section, pos = take_section(body, 0, count * d * self.dtype.itemsize, "rows")
        finish(body, pos)
        values = Raw.unpack(b"", section, count * d, self.dtype.name).array
        return RowBlock(count, d, dense=values.reshape(count, d))


class Int8(RowCodec):
    """One of 256 levels between the least and the largest value of its row: ``offset + scale * level``.

    A row is its scale and offset, float32, then a level per value, the nearest one (ties to even). The error is at most
    ``range / 510``, beside the rounding of scale and offset to float32 and of the result to the receiver's dtype.
    """

    codec_id = 4
    name = "int8"

    def exact_for(self, dtype: DTypeLike) -> bool:
        return False

    def write(self, block: RowBlock, ids: Ids) -> list[Buffer]:
        rows = block.dense.astype(np.float64)
        # Of no rows there is no least value to take.
        if not rows.size:
            return []
        with np.errstate(over="ignore", under="ignore"):
            offset = rows.min(axis=1).astype(np.float32)
            # In float32 the offset of a constant row may lie above its value.
            spread = np.maximum(rows.max(axis=1) - offset.astype(np.float64), 0.0)
            scale = (spread / 255).astype(np.float32)
        # Level 255 has to reach the largest value; what was rounded down, next to zero above all, goes up again.
        scale = np.where(scale.astype(np.float64) * 255 < spread, np.nextafter(scale, np.float32(np.inf)), scale)
        if not (np.isfinite(offset) & np.isfinite(scale)).all():
            row = int(np.argmin(np.isfinite(offset) & np.isfinite(scale)))
            raise GraphError(
                f"the row of node {int(ids[row])} holds values that float32 cannot, which scale and offset of "
                f"{self.name!r} are; scale the features or take another codec"
            )
        rows -= offset[:, None]
        # Where the scale is 0 nothing is divided, and all levels come out as 0.
        np.divide(rows, scale.astype(np.float64)[:, None], out=rows, where=(scale > 0)[:, None])
        table = np.empty((len(rows), block.features + 8), np.uint8)
        table[:, :8] = np.stack((scale, offset), axis=1).astype("<f4").view(np.uint8)
        table[:, 8:] = np.clip(np.rint(rows, out=rows), 0, 255, out=rows)
        return [Raw(table).pack()[1]]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> RowBlock:
        table = self._table(body, count, d)
        params = widened(np.ascontiguousarray(table[:, :8]).view("<f4"))
        scale, offset = params[:, :1], params[:, 1:]
        if not np.isfinite(params).all():
            raise NonFinite("the scale or offset of a row is NaN or infinite")
        if np.signbit(scale).any() or table[np.flatnonzero(scale == 0), 8:].any():
            raise Corrupt("the scale of a row is negative, or is 0 and levels are not")
        values = table[:, 8:] * scale
        values += offset
        # The topmost level of an honest row is a rounding beyond the largest number; what is further becomes infinite,
        # and is refused.
        largest = float(np.finfo(dtype).max)
        if (np.maximum(np.abs(offset), np.abs(offset + 255 * scale)) > largest).any():
            np.clip(values, -largest, largest, out=values, where=np.abs(values) < largest * (1 + 2.0**-20))
        with np.errstate(over="ignore"):
            return RowBlock(count, d, dense=values.astype(dtype))

    def select(self, frame: Buffer, ids: ArrayLike) -> bytes:
        _, have, d, body = self._open(frame, MAX_NODES, None)
        ids = ascending(ids)
        keep = positions(have, ids)
        # Levels of levels would be others.
        return self._seal(ids, d, [Raw(self._table(body, have.size, d)[keep]).pack()[1]])

    @staticmethod
    def _table(body: memoryview, count: int, d: int) -> NDArray[np.uint8]:
        section, pos = take_section(body, 0, count * (d + 8), "rows")
        finish(body, pos)
        return np.frombuffer(section, np.uint8).reshape(count, d + 8)


class Csr(_OneDtype):
    """Compressed sparse rows: the non-zeros of all rows as one sparse section."""

    def write(self, block: RowBlock, ids: Ids) -> list[Buffer]:
        places, values = block.entries
        rounded = self._rounded(values, ids, lambda place: int(places[place]) // block.features)
        if rounded is not values:
            # What is too small for the dtype has become zero.
            kept = rounded.view(BITS[rounded.itemsize]) != 0
            places, rounded = places[kept], rounded[kept]
        return [self._section(block.rows * block.features).write(Raw(rounded), places)]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> RowBlock:
        found = self._section(count * d).read(body)
        places, values = found.indices, found.values.decode()
        assert places is not None
        if not values.view(BITS[values.itemsize]).all():
            raise Corrupt("a zero is among the non-zeros of a frame of rows")
        return RowBlock(count, d, entries=(places, values))

    def _section(self, size: int) -> Section:
        return Section(size, Raw, "rice", dtype=self.dtype.name)


class Binary(RowCodec):
    """Places of non-zeros, for rows with one value beside 0.

    That value is 1 for word occurrences, and one over the number of words for normalised ones; it travels only when it
    is neither. The mode is that of the whole frame: the first of these that holds for all its rows.

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

    codec_id = 8
    name = "binary-rice"

    def write(self, block: RowBlock, ids: Ids) -> list[Buffer]:
        values = block.single
        if values is None:
            starts, entries = block.starts, block.entries[1]
            # A row without non-zeros begins where the next one does, the last ones at the end.
            first = np.repeat(entries[np.minimum(starts[:-1], entries.size - 1)], np.diff(starts))
            row = int(np.searchsorted(starts, int(np.argmax(entries != first)), side="right")) - 1
            raise GraphError(
                f"the row of node {int(ids[row])} has different values beside 0, which {self.name!r} cannot hold; "
                "take 'csr' or 'auto'"
            )
        places = block.entries[0]
        section = Section(block.rows * block.features, Ones, "rice").write(Ones(places.size), places)
        return [_put_singles(values, np.diff(block.starts)), section]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> RowBlock:
        mode, pos = take_varint(body, 0, len(body))
        if mode > 4:
            raise Corrupt(f"mode {mode} of binary rows is unknown; expected 0 to 4")
        dtype = _F64 if mode in (2, 4) else _F32
        section, pos = take_section(body, pos, count * dtype.itemsize if mode > 2 else 0, "values")
        places = Section(count * d, Ones, "rice").read(body[pos:]).indices
        assert places is not None
        counts = np.bincount(places // d, minlength=count)
        if mode > 2:
            values = Section(count, Raw, dtype=dtype.name).read(section).values.decode()
            if not np.array_equal(values.view(BITS[dtype.itemsize]) != 0, counts > 0):
                raise Corrupt("the value of a row is 0 although it has non-zeros, or is not although it has none")
        else:
            values = np.where(counts == 0, 0.0, _implied(mode, counts)).astype(dtype)
        # The lowest mode that holds is the only one: else one set of rows would have two frames, and select() another
        # one.
        if (least := _put_singles(widened(values), counts)[0]) < mode:
            raise Corrupt(f"binary rows are written in mode {mode}, and mode {least} holds for all of them")
        return RowBlock(count, d, entries=(places, np.repeat(values, counts)))


def _put_singles(values: NDArray[np.float64], counts: Ids) -> bytes:
    """Return the mode, followed by the values that it does not imply."""
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


def _implied(mode: int, counts: Ids) -> NDArray[np.float64]:
    """Return the values of modes 0 to 2 of binary rows."""
    if mode == 0:
        return np.ones(counts.size)
    parts = np.maximum(counts, 1)
    return (1 / parts.astype(np.float32)).astype(np.float64) if mode == 1 else 1 / parts.astype(np.float64)


class ShortestExact(RowCodec):
    """The shortest of the others that is exact for the rows at hand; the frame says which.

    ``select`` chooses again: the shortest for all rows need not be the shortest for some.
    """

    name = "auto"

    def _frame(self, ids: Ids, block: RowBlock) -> bytes:
        block = block.astype(np.float32) if block.values.dtype == np.float16 else block
        places, values = block.entries
        # What is shortest depends on values alone, not on the dtype they happen to come in.
        dtype = next((narrow for narrow in (_F16, _F32) if _holds(values, narrow)), block.values.dtype)
        # Ids and header are as long in every form, so that what stands after them decides.
        after = HEAD + 1 + len(put_varint(block.features)) + len(put_ids(ids))
        best: RowCodec = _DENSE[dtype]
        size = block.rows * block.features * dtype.itemsize + best.padding(after, block.rows, block.features)
        body: list[Buffer] | None = None
        few = RowBlock(block.rows, block.features, entries=(places, values)).astype(dtype)
        for form in (_CSR[dtype], *((Binary(),) if few.single is not None else ())):
            written = form.write(few, ids)
            length = sum(map(len, written))
            # On a tie the earlier form stays: there is one frame of given rows, and select() has to find the same.
            if length < size:
                best, size, body = form, length, written
        return best._seal(ids, block.features, best.write(block.astype(dtype), ids) if body is None else body)

    def _form(self, code: int) -> RowCodec:
        form = _FORMS.get(code)
        # int8 is exact for nothing, so "auto" never writes it, and does not read it.
        if form is None or not form.exact_for(np.float16):
            exact = tuple(f.name for f in _FORMS.values() if f.exact_for(np.float16))
            raise UnsupportedCodec(f"a frame of rows is {_called(code)}, expected one of {', '.join(exact)}", exact)
        return form


def _holds(values: Floats, dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds every value exactly, the signs of zeros included."""
    bits = BITS[values.itemsize]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.array_equal(values.astype(dtype).astype(values.dtype).view(bits), values.view(bits))


_ALL: Final = (
    Dense(1, "dense-f32", _F32),
    Dense(2, "dense-f16", _F16),
    Dense(3, "dense-f64", _F64),
    Int8(),
    Csr(5, "csr", _F32),
    Csr(6, "csr-f16", _F16),
    Csr(7, "csr-f64", _F64),
    Binary(),
)
_DENSE: Final = {form.dtype: form for form in _ALL if isinstance(form, Dense)}
_CSR: Final = {form.dtype: form for form in _ALL if isinstance(form, Csr)}
_FORMS: Final[Mapping[int, RowCodec]] = {form.codec_id: form for form in _ALL}

ROW_CODECS: Final[Mapping[str, RowCodec]] = MappingProxyType({form.name: form for form in (*_ALL, ShortestExact())})
"""By name."""


def get_row_codec(name: str) -> RowCodec:
    """Return a row codec; raise ConfigError, with the nearest name, when there is none of that name."""
    return ROW_CODECS[params.choice("row_codec", name, ROW_CODECS)]


def codec_of(frame: Buffer) -> str:
    """Return the name of the codec that a frame of rows is in; raise WireError for anything else."""
    code = _code_of(unseal(frame, ROWS))
    if code not in _FORMS:
        raise UnsupportedCodec(f"a frame of rows is {_called(code)}", tuple(form.name for form in _ALL))
    return _FORMS[code].name


def _code_of(buf: memoryview) -> int:
    if len(buf) <= HEAD:
        raise Truncated("a frame of rows ends before its codec")
    return buf[HEAD]


def _called(code: int) -> str:
    """Return the name of a codec byte for error messages."""
    return repr(_FORMS[code].name) if code in _FORMS else f"of the unknown codec {code}"
