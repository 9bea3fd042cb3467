"""The decoder: from untrusted bytes to checked tensors or a WireError.

The order of the checks is fixed: header and checksum; the table, against the receiver's schema; section lengths; then,
per tensor, possible lengths, declared raw sizes, decompression, indices, values. Nothing is allocated by the size a
field claims before that size was checked against the receiver's own limits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.backends import backend_name, decompress
from fedcomp.wire.bits import Buffer, take_varint
from fedcomp.wire.choose import Complement, index_codec
from fedcomp.wire.errors import (
    BadMagic,
    ChecksumMismatch,
    Corrupt,
    LimitExceeded,
    NonFinite,
    SchemaMismatch,
    Truncated,
    UnsupportedCodec,
    UnsupportedVersion,
)
from fedcomp.wire.frame import FILLER, HEADER, MAGIC, MAJOR, MAX_TLVS, MUST_UNDERSTAND, PADDING, TLV_END
from fedcomp.wire.index import IndexCodec, Indices
from fedcomp.wire.levels import VALUE_BY_NAME, VALUE_CODECS
from fedcomp.wire.limits import (
    DENSE,
    DTYPES,
    FLOATS,
    MAX_NDIM,
    SPARSE,
    Expected,
    Kind,
    Limits,
    Schema,
    representable,
)
from fedcomp.wire.support import SharedSupport
from fedcomp.wire.tensor import Bundle, FrameSizes, Tensor
from fedcomp.wire.values import RESERVED_VALUES, Raw, Values, chunks, not_finite

_TRAILER = 4
_MAX_INDEX_PARAMS = 32
_MAX_VALUE_PARAMS = 64
_KINDS = {int(kind): kind for kind in Kind}


class _Entry(NamedTuple):
    """One row of the tensor table, checked independently."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n: int
    kind: Kind
    k: int
    index_codec: IndexCodec
    index_params: bytes
    value_codec: type[Values]
    value_params: bytes
    backend: str
    index_stored: int
    value_stored: int
    index_raw: int
    value_raw: int


def decode(
    frame: Buffer,
    expect: Schema | None = None,
    limits: Limits | None = None,
    supports: Mapping[int, Indices] | None = None,
) -> Bundle:
    """Parse and check a frame completely.

    Parameters
    ----------
    frame : bytes-like
        Dense raw tensors of the result are read-only views of it.
    expect : Schema, optional
        The tensors the receiver expects. Names (where the frame gives them), shapes and dtypes must agree; sizes are
        taken from here, never from the frame. None accepts any tensors within the limits.
    limits : Limits, optional
        Default: those of ``expect``, or conservative general ones.
    supports : mapping of int to ndarray of int64, optional
        Supports both ends hold, by id: strictly ascending indices. None leaves shared supports unresolved.

    Raises
    ------
    WireError
        One of its subclasses for every frame that is not accepted; nothing else.
    """
    if limits is None:
        limits = Limits() if expect is None else Limits.for_schema(expect)
    # Dense tensors of the result are views of the frame: nobody who got one may write to it.
    buf = memoryview(frame).toreadonly()
    if buf.ndim != 1 or buf.itemsize != 1 or not buf.contiguous:
        raise ConfigError("a frame is a contiguous one-dimensional buffer of bytes")
    flags, count, head = _check_header(buf, limits)
    tlvs, pos = _take_fields(buf, HEADER.size, head)
    entries, sizes = _take_table(buf, pos, head, count, expect, limits)
    payload = len(buf) - head - _TRAILER
    stored = sum(sizes) - (head - pos)
    # All lengths have to add up exactly: bytes that no section covers would travel unchecked.
    if stored > payload:
        raise Truncated(f"the tensor table announces {stored} bytes of sections, the frame holds {payload}")
    if stored < payload:
        raise Corrupt(f"{payload - stored} bytes follow the last section")
    decoded = 0
    for entry in entries:
        # Summed over all tensors: each of many sections may be within the limit, and all of them are held at once.
        decoded += _possible_work(entry)
        if decoded > limits.max_bytes_out:
            raise LimitExceeded(
                f"decoding the frame takes {decoded} and more bytes of memory; this receiver spends "
                f"{limits.max_bytes_out} (Limits.max_bytes_out)"
            )
    # A loop of its own: nothing is decompressed before the whole table is known to fit the limits.
    tensors = []
    non_finite = 0
    pos = head
    for entry in entries:
        middle = pos + entry.index_stored
        end = middle + entry.value_stored
        tensor, zeroed = _take_tensor(entry, buf[pos:middle], buf[middle:end], limits, supports)
        tensors.append(tensor)
        non_finite += zeroed
        pos = end
    return Bundle(tuple(tensors), flags, tlvs, non_finite, FrameSizes(len(buf), tuple(sizes)))


def _check_header(buf: memoryview, limits: Limits) -> tuple[int, int, int]:
    """Return flags, number of tensors and the offset of the payload."""
    # The length comes first: even the checksum of a huge frame would cost time.
    size = len(buf)
    if size > limits.max_bytes_in:
        raise LimitExceeded(f"frame of {size} bytes; this receiver takes at most {limits.max_bytes_in}")
    # Compared as far as the bytes go, so that a frame cut within its magic is truncated, not foreign.
    if buf[:4] != MAGIC[:size]:
        raise BadMagic(f"the bytes start with {bytes(buf[:4])!r}, a frame starts with {MAGIC!r}")
    if size < HEADER.size + _TRAILER:
        raise Truncated(f"{size} bytes are less than the {HEADER.size + _TRAILER} of the shortest frame")
    _, major, minor, flags, count, head = HEADER.unpack_from(buf)
    if major != MAJOR:
        raise UnsupportedVersion(
            f"frame of version {major}.{minor}; this receiver speaks {MAJOR}; update the older end",
            major,
            MAJOR,
        )
    if flags & MUST_UNDERSTAND:
        raise UnsupportedVersion(
            f"flags {flags:#06x} set a must-understand bit unknown to version {MAJOR}", major, MAJOR
        )
    if head > size - _TRAILER:
        raise Truncated(f"the header claims {head} bytes of a frame of {size}")
    # One byte more than the fixed part: the end mark of the optional fields.
    if head < HEADER.size + 1:
        raise Corrupt(f"the header claims {head} bytes, less than it needs")
    # After version and flags: a frame of a later version is to be called that, not damaged.
    crc = zlib.crc32(buf[: size - _TRAILER])
    found = int.from_bytes(buf[size - _TRAILER :], "little")
    if crc != found:
        raise ChecksumMismatch(f"CRC-32 is {crc:#010x}, the frame says {found:#010x}; it was damaged or cut on its way")
    return flags, count, head


def _take_fields(buf: memoryview, pos: int, end: int) -> tuple[tuple[tuple[int, bytes], ...], int]:
    """Read the optional fields up to and including their end mark."""
    fields: list[tuple[int, bytes]] = []
    # One round more than there may be fields, for the end mark.
    for _ in range(MAX_TLVS + 1):
        if pos >= end:
            raise Truncated("the header ends before the end mark of its optional fields")
        kind = buf[pos]
        pos += 1
        if kind == TLV_END:
            return tuple(fields), pos
        if kind >= 128:
            raise UnsupportedVersion(f"optional field {kind} must be understood, but is unknown here", MAJOR, MAJOR)
        length, pos = take_varint(buf, pos, end)
        if length > end - pos:
            raise Truncated(f"optional field {kind} claims {length} bytes, the header has {end - pos} left")
        if kind == PADDING:
            if any(buf[pos : pos + length]):
                raise Corrupt("padding bytes of the header are not zero")
        elif kind != FILLER:
            fields.append((kind, bytes(buf[pos : pos + length])))
        pos += length
    raise LimitExceeded(f"more than {MAX_TLVS} optional fields")


def _take_table(
    buf: memoryview, pos: int, end: int, count: int, expect: Schema | None, limits: Limits
) -> tuple[list[_Entry], list[int]]:
    """Read the table; return its entries and the bytes of each, in the table and in its sections."""
    if expect is not None and count != len(expect):
        raise SchemaMismatch(f"frame of {count} tensors, expected {len(expect)}")
    if count > limits.max_tensors:
        raise LimitExceeded(f"frame of {count} tensors; this receiver takes at most {limits.max_tensors}")
    entries: list[_Entry] = []
    sizes: list[int] = []
    names: set[str] = set()
    elements = 0
    for i in range(count):
        start = pos
        entry, pos = _take_entry(buf, pos, end, None if expect is None else expect[i], limits)
        # With a schema each name was compared with that of its place, so that a search for doubles would find nothing.
        if expect is None and entry.name:
            if entry.name in names:
                raise Corrupt(f"two tensors are named {entry.name!r}")
            names.add(entry.name)
        # Inside the loop: of many claims, each small enough, the table ends at the first that is too much.
        elements += entry.n
        if elements > limits.max_elements:
            raise LimitExceeded(f"tensors of {elements} and more elements; this receiver takes {limits.max_elements}")
        entries.append(entry)
        sizes.append(pos - start + entry.index_stored + entry.value_stored)
    if pos != end:
        raise Corrupt(f"{end - pos} bytes follow the tensor table")
    return entries, sizes


def _take_entry(buf: memoryview, pos: int, end: int, expected: Expected | None, limits: Limits) -> tuple[_Entry, int]:
    size, pos = take_varint(buf, pos, end)
    if size > 255:
        raise Corrupt(f"a tensor's name has {size} bytes, at most 255 are allowed")
    # Two bytes follow the name in any case: dtype and number of dimensions.
    if pos + size + 2 > end:
        raise Truncated("the header ends inside a tensor's entry")
    try:
        name = str(buf[pos : pos + size], "utf-8") if size else ""
    except UnicodeDecodeError:
        raise Corrupt("a tensor's name is not UTF-8") from None
    pos += size
    dtype = DTYPES.get(buf[pos])
    if dtype is None:
        raise UnsupportedCodec(
            f"dtype {buf[pos]} is unknown; this receiver has {', '.join(DTYPES.values())}", DTYPES.values()
        )
    ndim = buf[pos + 1]
    pos += 2
    if ndim > MAX_NDIM:
        raise Corrupt(f"a tensor of {ndim} dimensions; at most {MAX_NDIM} are allowed")
    dims = []
    for _ in range(ndim):
        dim, pos = take_varint(buf, pos, end)
        dims.append(dim)
    shape = tuple(dims)
    if expected is not None:
        if (name and name != expected.name) or shape != expected.shape or dtype != expected.dtype:
            raise SchemaMismatch(
                f"tensor {name!r} is {dtype}{list(shape)}, expected {expected.name!r} as "
                f"{expected.dtype}{list(expected.shape)}; sender and receiver must hold the same model"
            )
        name, n = expected.name, expected.size
    else:
        n = math.prod(shape)
    # The product is one of Python integers and cannot wrap to something small.
    if not representable(shape, n):
        raise LimitExceeded(f"tensor {name!r} of shape {shape} is larger than any array")
    if pos >= end:
        raise Truncated("the header ends inside a tensor's entry")
    kind = _KINDS.get(buf[pos])
    if kind is None:
        raise Corrupt(f"tensor {name!r} is of unknown kind {buf[pos]}")
    if expected is not None and expected.kinds is not None and kind not in expected.kinds:
        raise SchemaMismatch(
            f"tensor {name!r} is {kind.name.lower()}, expected {_kind_names(expected.kinds)}; "
            "sender and receiver must use the same codec"
        )
    k, pos = take_varint(buf, pos + 1, end)
    most = n if expected is None or expected.max_k is None else min(n, expected.max_k)
    if k > n or (kind is DENSE and k != n):
        raise Corrupt(f"tensor {name!r} of {n} elements has {k} values")
    if k > most and kind is not DENSE:
        raise LimitExceeded(f"tensor {name!r} has {k} values; this receiver takes at most {most}")
    index_id, index_params, pos = _take_codec(buf, pos, end, _MAX_INDEX_PARAMS)
    value_id, value_params, pos = _take_codec(buf, pos, end, _MAX_VALUE_PARAMS)
    index = _known_index(index_id, kind, name)
    values = _known_values(value_id, dtype, name)
    _check_allowed(limits, kind, name, index, index_params, values)
    if expected is not None:
        _check_allowed(expected, kind, name, index, index_params, values)
    if pos >= end:
        raise Truncated("the header ends inside a tensor's entry")
    backend = backend_name(buf[pos])
    if limits.backends is not None and backend != "none" and backend not in limits.backends:
        raise UnsupportedCodec(f"back-end {backend!r} is not allowed here", sorted(limits.backends))
    index_raw, pos = take_varint(buf, pos + 1, end)
    value_raw, pos = take_varint(buf, pos, end)
    index_stored, value_stored = index_raw, value_raw
    if backend != "none":
        index_raw, pos = take_varint(buf, pos, end)
        value_raw, pos = take_varint(buf, pos, end)
        # Equal lengths mean that a section was left uncompressed, so that compression never makes one longer.
        if index_stored > index_raw or value_stored > value_raw:
            raise Corrupt(f"tensor {name!r}: a section is longer stored than raw")
    entry = _Entry(
        name, dtype, shape, n, kind, k, index, index_params, values, value_params, backend,
        index_stored, value_stored, index_raw, value_raw,
    )  # fmt: skip
    return entry, pos


def _kind_names(kinds: frozenset[Kind]) -> str:
    return " or ".join(kind.name.lower() for kind in sorted(kinds))


def _take_codec(buf: memoryview, pos: int, end: int, most: int) -> tuple[int, bytes, int]:
    """Read a codec's id and parameters."""
    if pos + 2 > end:
        raise Truncated("the header ends inside a tensor's entry")
    code, size = buf[pos], buf[pos + 1]
    if size > most:
        raise Corrupt(f"codec {code} has {size} bytes of parameters, at most {most} are allowed")
    pos += 2
    if pos + size > end:
        raise Truncated("the header ends inside a tensor's entry")
    return code, bytes(buf[pos : pos + size]), pos + size


def _known_index(code: int, kind: Kind, name: str) -> IndexCodec:
    codec = index_codec(code)
    if kind not in codec.kinds:
        raise Corrupt(f"tensor {name!r} is {kind.name.lower()}, but its index codec is {codec.name!r}")
    return codec


def _known_values(code: int, dtype: str, name: str) -> type[Values]:
    codec = VALUE_CODECS.get(code)
    if codec is None:
        what = f"({RESERVED_VALUES[code]}) is reserved" if code in RESERVED_VALUES else "is unknown"
        raise UnsupportedCodec(
            f"value codec {code} {what}; this receiver has {', '.join(VALUE_BY_NAME)}", VALUE_BY_NAME
        )
    if not codec.accepts(dtype):
        raise Corrupt(f"tensor {name!r} is {dtype}, which {codec.name!r} values cannot fill")
    return codec


def _check_allowed(
    rule: Limits | Expected, kind: Kind, name: str, index: IndexCodec, params: bytes, values: type[Values]
) -> None:
    """Raise UnsupportedCodec for codecs that the receiver knows but does not accept, in general or for this tensor."""
    allowed = rule.index_codecs
    if allowed is not None and kind is SPARSE:
        # A complement is allowed only together with what it wraps: its cost is that of the codec inside.
        inner = Complement.inner(params).name if isinstance(index, Complement) else index.name
        if index.name not in allowed or inner not in allowed:
            raise UnsupportedCodec(
                f"tensor {name!r}: index codec {index.name!r} of {inner!r} is not allowed here", sorted(allowed)
            )
    allowed = rule.value_codecs
    if allowed is not None and values.name not in allowed:
        raise UnsupportedCodec(f"tensor {name!r}: value codec {values.name!r} is not allowed here", sorted(allowed))


def _possible_work(entry: _Entry) -> int:
    """Check the raw section lengths against the limits from codec, n and k; return an upper bound on the memory for
    opening and decoding both sections, including results."""
    n, k, index, index_params, index_raw = entry.n, entry.k, entry.index_codec, entry.index_params, entry.index_raw
    _require_length(entry.name, "index", index_raw, index.bounds(index_params, n, k))
    values, value_params, value_raw = entry.value_codec, entry.value_params, entry.value_raw
    _require_length(entry.name, "value", value_raw, values.bounds(value_params, k, entry.dtype))
    work = values.work_bytes(value_params, k, value_raw, entry.dtype)
    if entry.kind is SPARSE:
        work += index.work_bytes(index_params, n, k, index_raw)
    # zlib collects its output in pieces and then joins them.
    if entry.index_stored < index_raw:
        work += 2 * index_raw
    if entry.value_stored < value_raw:
        work += 2 * value_raw
    return work


def _require_length(name: str, what: str, size: int, possible: tuple[int, int]) -> None:
    # The raw lengths are the sender's claims, and decompression is cut at them: they must be possible for n and k.
    if not possible[0] <= size <= possible[1]:
        raise Corrupt(f"tensor {name!r}: an {what} section of {size} bytes, possible are {possible[0]}..{possible[1]}")


def _take_tensor(
    entry: _Entry,
    index_section: memoryview,
    value_section: memoryview,
    limits: Limits,
    supports: Mapping[int, Indices] | None,
) -> tuple[Tensor, int]:
    """Return the tensor and the number of replaced non-finite values."""
    index = entry.index_codec.source(entry.index_params)
    indices: Indices | None = None
    if entry.kind is SPARSE:
        section = _open(entry.backend, index_section, entry.index_raw)
        indices = entry.index_codec.decode(entry.index_params, section, entry.n, entry.k)
    elif isinstance(index, SharedSupport) and supports is not None:
        indices = _resolve(entry, index.support_id, supports)
    section = _open(entry.backend, value_section, entry.value_raw)
    values = entry.value_codec.unpack(entry.value_params, section, entry.k, entry.dtype)
    zeroed = 0
    if limits.non_finite != "allow":
        # Lossy values are float32: what is finite there may be infinite in the tensor itself.
        narrow = entry.dtype == "float16" and values.lossy
        bad = _count_overflow(values.decode()) if narrow else values.count_non_finite()
        if bad and limits.non_finite == "reject":
            raise NonFinite(f"tensor {entry.name!r} holds {bad} NaN or infinite value(s) of {entry.k}")
        if bad:
            values, zeroed = _zero_overflow(values) if narrow else values.zero_non_finite(), bad
    if limits.max_abs is not None and entry.dtype in FLOATS:
        _check_cap(entry.name, values.decode(), limits.max_abs)
    # Gap bytes bring their own back-end; it says nothing about the values unless these were compressed, too.
    own = isinstance(index, str) and index.endswith("gap-bytes") and entry.value_stored == entry.value_raw
    backend = "none" if own else entry.backend
    tensor = Tensor(values, entry.shape, entry.name, entry.dtype, entry.kind, indices, index, backend)
    return tensor, zeroed


def _count_overflow(values: NDArray[Any]) -> int:
    """Return the number of values that are NaN or infinite as float16."""
    with np.errstate(over="ignore"):
        return not_finite(values, np.float16)


def _zero_overflow(values: Values) -> Values:
    """Return the values as raw float16, with 0 for NaN and infinity."""
    with np.errstate(over="ignore"):
        narrow = values.decode().astype(np.float16)
    return Raw(narrow).zero_non_finite()


def _open(backend: str, section: memoryview, raw: int) -> Buffer:
    """Return the raw section; equal lengths mean that no back-end was used."""
    return section if len(section) == raw else decompress(backend, section, raw)


def _resolve(entry: _Entry, support_id: int, supports: Mapping[int, Indices]) -> Indices:
    # The id is the sender's and may name the support of another tensor: its size and last index are compared below.
    indices = supports.get(support_id)
    if indices is None:
        raise SchemaMismatch(f"tensor {entry.name!r} lies on support {support_id}, which this receiver does not hold")
    if indices.size != entry.k or (entry.k and int(indices[-1]) >= entry.n):
        raise SchemaMismatch(
            f"tensor {entry.name!r} has {entry.k} values of {entry.n} elements on support {support_id}, which has "
            f"{indices.size} indices"
        )
    return indices


def _check_cap(name: str, values: NDArray[Any], cap: float) -> None:
    for part in chunks(values):
        with np.errstate(invalid="ignore"):
            # fmax passes over NaN, which is the policy's matter here and must not hide a value that is too large.
            largest = float(np.fmax.reduce(np.abs(part), initial=0.0))
        if largest > cap:
            raise LimitExceeded(f"tensor {name!r} holds a value of magnitude {largest}; this receiver takes {cap}")
