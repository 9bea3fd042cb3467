"""Row codecs: the bytes of feature rows on their way from their owner to another client.

A frame holds the ids of its rows and the rows, each on its own: ``select`` takes rows out of a frame without decoding
their values and makes the very bytes that encoding these rows alone would have made. Word counts are mostly zeros, and
there the codec matters more than the sampler: of Cora, 5 732 bytes dense are 36 as columns, 18 as one Rice code.

=============  =====================================  ==========================================
name           bytes per row, beside its id           exact for
=============  =====================================  ==========================================
dense-f32      4 d                                    float32
dense-f16      2 d                                    what float16 holds
dense-f64      8 d                                    everything
int8           d + 8                                  constant rows
csr            nnz (w + 4) + 1                        float32
csr-f16        nnz (w + 2) + 1                        what float16 holds
csr-f64        nnz (w + 8) + 1                        everything
binary-csr     nnz w + 1 (+ 0, 4 or 8)                everything, of rows with one value beside 0
binary-rice    about nnz (log2(d / nnz) + 1.6) / 8    the same
auto           the shortest that is exact for these   everything
=============  =====================================  ==========================================

w is 1, 2 or 4 as columns need it; the count of a row's non-zeros is 1 byte below 128 and 2 below 16 384. Exact means
bit for bit, the sign of a zero included.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedcomp.errors import ConfigError, nearest
from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import (
    HEAD,
    MAX_NODES,
    NORMS,
    ROWS,
    ascending,
    finish,
    put_ids,
    seal,
    take_ids,
    take_section,
    unseal,
)
from fedcomp.graphs.rowforms import (
    BITS,
    MAX_BYTES,
    MAX_FEATURES,
    NAMES,
    STRETCH,
    Block,
    DenseF16,
    DenseF32,
    DenseF64,
    Floats,
    Form,
    Int8,
    RowCodec,
    called,
)
from fedcomp.graphs.rowsparse import BinaryCsr, BinaryRice, Csr, CsrF16, CsrF64
from fedcomp.wire.bits import Buffer, put_varint
from fedcomp.wire.errors import Corrupt, NonFinite, Truncated, UnsupportedCodec

__all__ = [
    "MAX_BYTES",
    "MAX_FEATURES",
    "NAMES",
    "ROW_CODECS",
    "RowCodec",
    "codec_of",
    "decode_norms",
    "encode_norms",
    "get_row_codec",
]


class Auto(RowCodec):
    """The shortest of the others that is exact for the rows at hand; the frame says which.

    ``select`` chooses anew: the shortest for all rows need not be it for some.
    """

    name = "auto"

    def exact_for(self, dtype: DTypeLike) -> bool:
        return True

    def _frame(self, ids: Ids, block: Block) -> bytes:
        counts, columns, values = block.sparse
        # What is shortest depends on values alone, not on the dtype they happen to come in.
        dtype = next((narrow for narrow in _NARROW if _holds(values, narrow)), block.dtype)
        rows, d = block.rows, block.features
        # Ids and header are as long in every form, so that what stands after them decides.
        after = HEAD + 1 + len(put_varint(d)) + len(put_ids(ids))
        best: Form = _DENSE[dtype]
        size = rows * d * dtype.itemsize + best.padding(after, rows, d)
        body: list[Buffer] | None = None
        few = Block(d, sparse=(counts, columns, values)).astype(dtype)
        for form in (_CSR[dtype], *(_BINARY if few.single is not None else ())):
            written = form.write(few, ids)
            length = sum(map(len, written))
            if length < size:
                best, size, body = form, length, written
        return best.seal(ids, d, best.write(block.astype(dtype), ids) if body is None else body)

    def _choose(self, form: Form, count: int, d: int, body: memoryview, ids: Ids, keep: Ids) -> bytes:
        block = form.read(body, count, d, np.dtype(np.float64)).take(keep)
        return self._frame(ids, block.astype(np.float32) if block.dtype == np.float16 else block)

    def _form(self, code: int) -> Form:
        form = _FORMS.get(NAMES.get(code, ""))
        if form is None or not form.exact_for(np.float16):
            exact = tuple(f.name for f in _FORMS.values() if f.exact_for(np.float16))
            raise UnsupportedCodec(f"a frame of rows is {called(code)}, expected one of {', '.join(exact)}", exact)
        return form


def _holds(values: Floats, dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds every value exactly, the signs of zeros included."""
    flat, bits = values.reshape(-1), BITS[values.itemsize]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for i in range(0, flat.size, STRETCH):
            part = flat[i : i + STRETCH]
            if not np.array_equal(part.astype(dtype).astype(part.dtype).view(bits), part.view(bits)):
                return False
    return True


_NARROW: Final = (np.dtype(np.float16), np.dtype(np.float32))
_BINARY: Final[tuple[Form, ...]] = (BinaryCsr(), BinaryRice())
_DENSE: Final[Mapping[np.dtype[Any], Form]] = MappingProxyType(
    {form.dtype: form for form in (DenseF16(), DenseF32(), DenseF64())}
)
_CSR: Final[Mapping[np.dtype[Any], Form]] = MappingProxyType({form.dtype: form for form in (CsrF16(), Csr(), CsrF64())})
_FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {f.name: f for f in sorted((*_DENSE.values(), Int8(), *_CSR.values(), *_BINARY), key=lambda f: f.codec_id)}
)

ROW_CODECS: Final[Mapping[str, RowCodec]] = MappingProxyType({**_FORMS, Auto.name: Auto()})
"""By name."""


def get_row_codec(name: str) -> RowCodec:
    """Return a row codec; raise ConfigError, with the nearest name, when there is none of that name."""
    codec = ROW_CODECS.get(name)
    if codec is None:
        raise ConfigError(f"row codec {name!r} is not known{nearest(str(name), ROW_CODECS)}")
    return codec


def codec_of(frame: Buffer) -> str:
    """Return the name of the codec that a frame of rows is in; raise WireError for anything else."""
    buf = unseal(frame, ROWS)
    if len(buf) <= HEAD:
        raise Truncated("a frame of rows ends before its codec")
    if buf[HEAD] not in NAMES:
        raise UnsupportedCodec(f"a frame of rows is {called(buf[HEAD])}", tuple(_FORMS))
    return NAMES[buf[HEAD]]


def encode_norms(ids: ArrayLike, norms: ArrayLike, *, nodes: int = MAX_NODES) -> bytes:
    """Return the frame of one norm per node, 4 bytes each beside its id.

    Parameters
    ----------
    ids : array of integers, (R,)
        Ascending.
    norms : array of floats, (R,)
        Finite and not negative; rounded to float32.

    Raises
    ------
    GraphError
    """
    ids = ascending(ids, nodes)
    return seal(NORMS, (put_ids(ids), put_norms(ids, norms)))


def decode_norms(frame: Buffer, *, nodes: int = MAX_NODES, limit: int | None = None) -> tuple[Ids, NDArray[np.float32]]:
    """Return ids and norms of a frame from anyone; ids are below ``nodes``, and at most ``limit``.

    Raises
    ------
    WireError
    """
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
    norms = np.frombuffer(section, "<f4").astype(np.float32)
    if not np.isfinite(norms).all():
        raise NonFinite("a norm is NaN or infinite")
    if np.signbit(norms).any():
        raise Corrupt("a norm is negative")
    return norms, pos
