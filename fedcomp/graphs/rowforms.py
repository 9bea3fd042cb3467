"""Feature rows in memory and on the wire: what all row codecs share, and the codecs that write every value.

:mod:`fedcomp.graphs.rowcodecs` has the table of all codecs and is the way in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError, Ids, MissingRows
from fedcomp.graphs.ids import HEAD, MAX_NODES, ROWS, ascending, put_ids, seal, take_ids, take_section, unseal
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, LimitExceeded, NonFinite, SchemaMismatch, Truncated, UnsupportedCodec

Floats = NDArray[np.floating[Any]]

MAX_BYTES: Final = 1 << 30
"""Most bytes of decoded rows that a receiver takes unless it says otherwise."""

MAX_FEATURES: Final = 1 << 32

NAMES: Final = {
    1: "dense-f32",
    2: "dense-f16",
    3: "dense-f64",
    4: "int8",
    5: "csr",
    6: "csr-f16",
    7: "csr-f64",
    8: "binary-csr",
    9: "binary-rice",
}
"""The codec byte of a frame."""

BITS: Final = {2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers as wide as a float of so many bytes."""

_ROW_DTYPES: Final = (np.dtype(np.float32), np.dtype(np.float64))
_ALIGN: Final = 8
_ALIGN_FROM: Final = 1024
STRETCH: Final = 1 << 18
"""Values handled at once where temporaries are wider than the rows: they stay in the cache."""


class Block:
    """Rows of one frame, dense or as their non-zeros; the other form is made when it is asked for.

    A non-zero is a value of which some bit is set, so that the sign of a zero travels.

    Attributes
    ----------
    features : int
    """

    def __init__(
        self,
        features: int,
        *,
        dense: Floats | None = None,
        sparse: tuple[Ids, Ids, Floats] | None = None,
    ) -> None:
        self.features = features
        self._dense = dense
        if sparse is not None:
            self.sparse = sparse

    @cached_property
    def sparse(self) -> tuple[Ids, Ids, Floats]:
        """Number of non-zeros per row, their columns and their values, row by row."""
        assert self._dense is not None
        flat = self._dense.reshape(-1)
        places = np.flatnonzero(flat.view(BITS[flat.itemsize]) != 0)
        counts, columns = split_places(places, self._dense.shape[0], self.features)
        return counts, columns, flat[places]

    @property
    def values(self) -> Floats:
        """All values, or all that are not 0."""
        return self.sparse[2] if self._dense is None else self._dense

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._dense.shape[0] if self._dense is not None else self.sparse[0].size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self.values.dtype

    @property
    def dense(self) -> Floats:
        """All values, (rows, features); made of non-zeros a new array."""
        if self._dense is None:
            counts, columns, values = self.sparse
            dense = np.zeros((counts.size, self.features), values.dtype)
            dense.reshape(-1)[join_places(counts, columns, self.features)] = values
            return dense
        return self._dense

    @cached_property
    def single(self) -> NDArray[np.float64] | None:
        """The one value beside 0 of each row (0 for a row of zeros), or None when some row has more than one."""
        counts, _, values = self.sparse
        filled = np.flatnonzero(counts)
        first = np.zeros(counts.size, values.dtype)
        first[filled] = values[(np.cumsum(counts) - counts)[filled]]
        bits = BITS[values.itemsize]
        same = np.array_equal(np.repeat(first.view(bits), counts), values.view(bits))
        return widened(first) if same else None

    def astype(self, dtype: DTypeLike) -> Block:
        """Return the same rows in another dtype; values too large for it become infinite."""
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        # As in widened().
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self._dense is not None:
                return Block(self.features, dense=self._dense.astype(dtype))
            counts, columns, values = self.sparse
            return Block(self.features, sparse=(counts, columns, values.astype(dtype)))

    def take(self, keep: Ids) -> Block:
        """Return the rows at positions ``keep``."""
        if self._dense is not None:
            return Block(self.features, dense=self._dense[keep])
        counts, columns, values = self.sparse
        entries = entries_of(counts, keep)
        return Block(self.features, sparse=(counts[keep], columns[entries], values[entries]))


def widened(values: Floats) -> NDArray[np.float64]:
    """Return values in float64. Those of a frame may be anything: numpy warns of a NaN that signals, and is not to."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def column_width(d: int) -> np.dtype[Any]:
    """Return the dtype of columns of ``d`` features on the wire."""
    return np.dtype("u1") if d <= 1 << 8 else np.dtype("<u2") if d <= 1 << 16 else np.dtype("<u4")


def join_places(counts: Ids, columns: Ids, features: int) -> Ids:
    """Return flat places in a matrix of ``features`` columns, from the columns of each row in turn."""
    return np.repeat(np.arange(counts.size, dtype=np.int64) * features, counts) + columns


def split_places(places: Ids, rows: int, features: int) -> tuple[Ids, Ids]:
    """Return how many flat places each row has, and their columns."""
    of = places // features
    return np.bincount(of, minlength=rows).astype(np.int64), places - of * features


def entries_of(counts: Ids, keep: Ids) -> Ids:
    """Return where the entries of rows ``keep`` stand, row by row, when row r has ``counts[r]`` of them."""
    kept = counts[keep]
    starts = (np.cumsum(counts) - counts)[keep]
    return np.repeat(starts - (np.cumsum(kept) - kept), kept) + np.arange(int(kept.sum()))


def _all_finite(values: Floats) -> bool:
    flat = values.reshape(-1)
    return all(bool(np.isfinite(flat[i : i + STRETCH]).all()) for i in range(0, flat.size, STRETCH))


class RowCodec(ABC):
    """One way to write feature rows; see the table of the module.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype or None
        What rows are rounded to before they are written; None: they are not.
    """

    name: ClassVar[str]
    dtype: ClassVar[np.dtype[Any] | None] = None

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
        ids = ascending(ids)
        return self._frame(ids, self._prepare(ids, rows))

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
        """Return ids and rows of a frame, of which nothing is taken for granted.

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
        if dtype not in _ROW_DTYPES:
            raise ConfigError(f"rows cannot be decoded to {dtype}; take float32 or float64, as the features are")
        form, ids, d, body = self._open(frame, nodes, limit)
        if d != features:
            raise SchemaMismatch(f"a frame holds rows of {d} features, expected {features}")
        if ids.size * d * dtype.itemsize > max_bytes:
            raise LimitExceeded(f"{ids.size} rows of {d} features take more than {max_bytes} bytes")
        block = form.read(body, ids.size, d, dtype).astype(dtype)
        if not _all_finite(block.values):
            bad = int(np.count_nonzero(~np.isfinite(block.values)))
            raise NonFinite(f"{bad} values of a frame of rows are NaN or infinite, or too large for {dtype}")
        return ids, block.dense

    def select(self, frame: Buffer, ids: ArrayLike) -> bytes:
        """Return the frame of some rows of a frame: the same bytes as if these alone had been encoded.

        Values are not decoded, and what is wrong with them is left for their receiver to find.

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
        return self._choose(form, have.size, d, body, ids, positions(have, ids))

    def _prepare(self, ids: Ids, rows: Floats) -> Block:
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[0] != ids.size or not 0 < rows.shape[1] < MAX_FEATURES:
            raise GraphError(f"rows have shape {rows.shape}; expected {ids.size} of them, with at least one feature")
        if rows.dtype not in _ROW_DTYPES:
            raise GraphError(f"rows are {rows.dtype}; expected float32 or float64")
        dense = np.ascontiguousarray(rows)
        if not _all_finite(dense):
            row = int(np.argmin(np.isfinite(dense).all(axis=1)))
            raise GraphError(f"the row of node {int(ids[row])} holds NaN or infinity; nothing was encoded")
        return Block(rows.shape[1], dense=dense)

    @abstractmethod
    def _frame(self, ids: Ids, block: Block) -> bytes:
        """Return the frame of rows that :meth:`_prepare` made."""

    @abstractmethod
    def _choose(self, form: Form, count: int, d: int, body: memoryview, ids: Ids, keep: Ids) -> bytes:
        """Return the frame of ``ids``, which stand at positions ``keep`` of a body of ``count`` rows."""

    @abstractmethod
    def _form(self, code: int) -> Form:
        """Return what reads a frame with codec byte ``code``, or raise UnsupportedCodec."""

    def _open(self, frame: Buffer, nodes: int, limit: int | None) -> tuple[Form, Ids, int, memoryview]:
        """Return form, ids, number of features and body of a frame, which is from anyone."""
        buf = unseal(frame, ROWS)
        if len(buf) <= HEAD:
            raise Truncated("a frame of rows ends before its codec")
        form = self._form(buf[HEAD])
        d, pos = take_varint(buf, HEAD + 1, len(buf))
        if not 0 < d < MAX_FEATURES:
            raise Corrupt(f"rows of {d} features are not possible")
        ids, pos = take_ids(buf, pos, nodes, limit)
        pad, pos = take_section(buf, pos, form.padding(pos, ids.size, d), "padding")
        if any(pad):
            raise Corrupt("padding before a body of rows is not zero")
        return form, ids, d, buf[pos:]


class Form(RowCodec):
    """A codec whose frames are all of one form: its byte is :attr:`codec_id`."""

    codec_id: ClassVar[int]

    def seal(self, ids: Ids, d: int, body: list[Buffer]) -> bytes:
        """Return the frame of a body."""
        head = bytes((self.codec_id,)) + put_varint(d) + put_ids(ids)
        return seal(ROWS, (head, bytes(self.padding(HEAD + len(head), ids.size, d)), *body))

    def padding(self, pos: int, count: int, d: int) -> int:
        """Return how many zero bytes stand before the body of ``count`` rows that would else begin at ``pos``."""
        return 0

    def _rounded(self, values: Floats, ids: Ids, row_of: Callable[[int], int]) -> Floats:
        """Return finite values in :attr:`dtype`; raise GraphError, naming the row, when it cannot hold one of them.

        Parameters
        ----------
        row_of : callable
            Returns the row of a value's flat place.
        """
        assert self.dtype is not None
        if values.dtype == self.dtype:
            return values
        with np.errstate(over="ignore", under="ignore"):
            rounded = values.astype(self.dtype)
        if self.dtype.itemsize < values.itemsize and not _all_finite(rounded):
            place = int(np.argmin(np.isfinite(rounded)))
            raise GraphError(
                f"the row of node {int(ids[row_of(place)])} holds {float(values.reshape(-1)[place]):g}, which "
                f"{self.dtype.name} cannot; scale the features or take another codec than {self.name!r}"
            )
        return rounded

    @abstractmethod
    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        """Return the body of finite rows; raise GraphError, naming the row, when one has no such form."""

    @abstractmethod
    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        """Return ``count`` rows of ``d`` features; raise WireError. Their values may be NaN or infinite."""

    @abstractmethod
    def slice(self, body: memoryview, count: int, d: int, keep: Ids) -> list[Buffer]:
        """Return the body of the rows at positions ``keep``; raise WireError."""

    def _frame(self, ids: Ids, block: Block) -> bytes:
        return self.seal(ids, block.features, self.write(block, ids))

    def _choose(self, form: Form, count: int, d: int, body: memoryview, ids: Ids, keep: Ids) -> bytes:
        return self.seal(ids, d, self.slice(body, count, d, keep))

    def _form(self, code: int) -> Form:
        if code != self.codec_id:
            raise UnsupportedCodec(f"a frame of rows is {called(code)}, expected {self.name!r}", (self.name,))
        return self


def called(code: int) -> str:
    """Return how a message names codec byte ``code``."""
    return repr(NAMES[code]) if code in NAMES else f"of the unknown codec {code}"


def positions(have: Ids, ids: Ids) -> Ids:
    """Return where ascending ``ids`` stand in ascending ``have``; raise MissingRows naming those that do not."""
    at = np.searchsorted(have, ids)
    found = at < have.size
    found[found] = have[at[found]] == ids[found]
    if not found.all():
        absent = ids[~found]
        raise MissingRows(f"{absent.size} of {ids.size} rows are not here, the first of node {int(absent[0])}", absent)
    return at


class _Strided(Form):
    """Rows of equally many bytes."""

    def _stride(self, d: int) -> int:
        assert self.dtype is not None
        return d * self.dtype.itemsize

    def _table(self, body: memoryview, count: int, d: int) -> NDArray[np.uint8]:
        size = count * self._stride(d)
        if len(body) != size:
            raise (Truncated if len(body) < size else Corrupt)(
                f"{count} rows of {d} features take {size} bytes as {self.name}, found {len(body)}"
            )
        return np.frombuffer(body, np.uint8).reshape(count, self._stride(d))

    def slice(self, body: memoryview, count: int, d: int, keep: Ids) -> list[Buffer]:
        return [as_bytes(self._table(body, count, d)[keep])]


def as_bytes(array: NDArray[Any]) -> Buffer:
    """Return the bytes of a contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8).data if array.size else b""


class _Dense(_Strided):
    """Every value. Long bodies begin at a multiple of eight bytes, so that receivers can use them in place."""

    dtype: ClassVar[np.dtype[Any]]

    def padding(self, pos: int, count: int, d: int) -> int:
        return -pos % _ALIGN if count * self._stride(d) >= _ALIGN_FROM else 0

    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        values = block.dense
        return [as_bytes(self._rounded(values, ids, lambda place: place // block.features))]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        self._table(body, count, d)
        values = np.frombuffer(body, self.dtype.newbyteorder("<")).reshape(count, d)
        return Block(d, dense=values if values.flags.aligned else values.copy())


class DenseF32(_Dense):
    """float32 values."""

    codec_id = 1
    name = "dense-f32"
    dtype = np.dtype(np.float32)


class DenseF16(_Dense):
    """float16 values, rounded to nearest even; a value that float16 cannot hold is refused."""

    codec_id = 2
    name = "dense-f16"
    dtype = np.dtype(np.float16)


class DenseF64(_Dense):
    """float64 values."""

    codec_id = 3
    name = "dense-f64"
    dtype = np.dtype(np.float64)


class Int8(_Strided):
    """One of 256 levels between the least and the largest value of its row: ``offset + scale * level``.

    A row is its scale and offset, float32, then a level per value, the nearest one (ties to even). The error is at most
    ``range / 510``, beside the rounding of scale and offset to float32 and of the result to the receiver's dtype.
    """

    codec_id = 4
    name = "int8"

    def exact_for(self, dtype: DTypeLike) -> bool:
        return False

    def _stride(self, d: int) -> int:
        return d + 8

    def write(self, block: Block, ids: Ids) -> list[Buffer]:
        rows = block.dense
        table = np.empty((rows.shape[0], self._stride(block.features)), np.uint8)
        step = max(1, STRETCH // block.features)
        for i in range(0, rows.shape[0], step):
            part = rows[i : i + step].astype(np.float64)
            with np.errstate(over="ignore", under="ignore"):
                offset = part.min(axis=1).astype(np.float32)
                spread = np.maximum(part.max(axis=1) - offset.astype(np.float64), 0.0)
                scale = (spread / 255).astype(np.float32)
            # Level 255 has to reach the largest value; what was rounded down, next to zero above all, goes up again.
            scale = np.where(scale.astype(np.float64) * 255 < spread, np.nextafter(scale, np.float32(np.inf)), scale)
            if not _all_finite(offset) or not _all_finite(scale):
                row = int(np.argmin(np.isfinite(offset) & np.isfinite(scale)))
                raise GraphError(
                    f"the row of node {int(ids[i + row])} holds values that float32 cannot, which scale and offset of "
                    f"{self.name!r} are; scale the features or take another codec"
                )
            part -= offset[:, None]
            np.divide(part, scale.astype(np.float64)[:, None], out=part, where=(scale > 0)[:, None])
            np.rint(part, out=part)
            np.clip(part, 0, 255, out=part)
            table[i : i + step, :8] = np.stack((scale, offset), axis=1).astype("<f4").view(np.uint8)
            table[i : i + step, 8:] = part
        return [as_bytes(table)]

    def read(self, body: memoryview, count: int, d: int, dtype: np.dtype[Any]) -> Block:
        table = self._table(body, count, d)
        params = widened(np.ascontiguousarray(table[:, :8]).view("<f4"))
        scale, offset = params[:, :1], params[:, 1:]
        if not np.isfinite(params).all():
            raise NonFinite("the scale or offset of a row is NaN or infinite")
        if (np.signbit(scale)).any() or table[np.flatnonzero(scale == 0), 8:].any():
            raise Corrupt("the scale of a row is negative, or is 0 and levels are not")
        dense = np.empty((count, d), dtype)
        largest = float(np.finfo(dtype).max)
        beyond = bool((np.maximum(np.abs(offset), np.abs(offset + 255 * scale)) > largest).any())
        step = max(1, STRETCH // d)
        for i in range(0, count, step):
            part = table[i : i + step, 8:] * scale[i : i + step]
            part += offset[i : i + step]
            if beyond:
                # The topmost level of an honest row is a rounding beyond the largest number; what is further becomes
                # infinite, and is refused.
                near = np.abs(part) < largest * (1 + 2.0**-20)
                np.clip(part, -largest, largest, out=part, where=near)
            with np.errstate(over="ignore"):
                dense[i : i + step] = part
        return Block(d, dense=dense)
