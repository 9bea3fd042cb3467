"""The frame: layout constants and the encoder. docs/formats/wire.md describes every byte."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

from fedcomp.errors import ConfigError
from fedcomp.wire.backends import BACKEND_IDS, compress, require_backend
from fedcomp.wire.bits import Buffer, append_varint
from fedcomp.wire.choose import encode_support
from fedcomp.wire.index import Support
from fedcomp.wire.limits import DENSE, DTYPE_IDS, SPARSE
from fedcomp.wire.support import Seeded, SharedSupport
from fedcomp.wire.tensor import Tensor
from fedcomp.wire.values import Values

Frame = bytes
"""An encoded bundle. Its size is ``len(frame)``; there is no other notion of size."""

MAGIC: Final = b"FCW1"
MAJOR: Final = 1
MINOR: Final = 0
HEADER: Final = struct.Struct("<4sBBHII")
"""Magic, major, minor, flags, number of tensors, offset of the payload."""

FLAG_DELTA: Final = 0x0001
FLAG_NEEDS_BASIS: Final = 0x0002
MUST_UNDERSTAND: Final = 0xFF00

TLV_END: Final = 0
BASIS_ID: Final = 1
BASE_ROUND: Final = 2
BASE_DIGEST: Final = 3
SEED: Final = 4
MASK_ID: Final = 5
USER_TAG: Final = 6
FILLER: Final = 7
PADDING: Final = 127
MAX_TLVS: Final = 64
_OWN_TLVS: Final = MAX_TLVS - 3
"""Optional fields that a sender may write itself: alignment adds one, and :func:`~fedcomp.wire.pad` up to two more."""

_ALIGN = 8
ALIGN_FROM: Final = 1024
"""Bytes from which the largest dense section is aligned."""


def encode(tensors: Sequence[Tensor], *, flags: int = 0, tlvs: Iterable[tuple[int, bytes]] = ()) -> Frame:
    """Return the frame of ``tensors``: the same input gives the same bytes, with one version of the back-ends.

    Parameters
    ----------
    tensors : sequence of Tensor
    flags : int
        Bits 0..7, see :class:`~fedcomp.wire.Bundle`.
    tlvs : iterable of (type, bytes)
        Optional fields, at most 61, ``1 <= type < 127`` and not 7, which :func:`~fedcomp.wire.pad` writes.

    Raises
    ------
    ConfigError
        For anything that cannot be encoded: unsorted indices, duplicate names, a back-end that is not installed.
    """
    if flags & ~0xFF:
        raise ConfigError(f"flags {flags:#x}: senders of version 1 may set bits 0..7 only")
    table = bytearray()
    payload: list[Buffer] = []
    names: set[str] = set()
    aligned = (0, -1)
    offset = 0
    for tensor in tensors:
        if tensor.name and tensor.name in names:
            raise ConfigError(f"two tensors are named {tensor.name!r}; names are unique or empty")
        names.add(tensor.name)
        index, values = _entry(tensor, table)
        # The largest dense section starts at a multiple of eight bytes, so that a receiver can use it in place.
        if tensor.kind is DENSE and len(values) >= ALIGN_FROM and len(values) > aligned[0]:
            aligned = (len(values), offset + len(index))
        payload += (index, values)
        offset += len(index) + len(values)
    fields = _fields(tlvs)
    start = HEADER.size + len(fields) + 1 + len(table)
    if aligned[1] >= 0 and (slack := -(start + aligned[1]) % _ALIGN):
        # The padding field itself takes two bytes.
        fields += bytes((PADDING, (slack - 2) % _ALIGN)) + bytes((slack - 2) % _ALIGN)
        # Again, since the padding has moved the payload.
        start = HEADER.size + len(fields) + 1 + len(table)
    head = HEADER.pack(MAGIC, MAJOR, MINOR, flags, len(tensors), start) + fields + bytes((TLV_END,))
    # Part by part: joined once for the checksum and once for the frame, a model would be in memory a third time.
    crc = zlib.crc32(table, zlib.crc32(head))
    for part in payload:
        crc = zlib.crc32(part, crc)
    return b"".join((head, table, *payload, crc.to_bytes(4, "little")))


def _fields(tlvs: Iterable[tuple[int, bytes]]) -> bytes:
    out = bytearray()
    for count, (kind, content) in enumerate(tlvs, 1):
        if not TLV_END < kind < PADDING or kind == FILLER or count > _OWN_TLVS:
            raise ConfigError(
                f"optional field of type {kind}: types are 1..126 but 7, and at most {_OWN_TLVS} fields fit"
            )
        out.append(kind)
        append_varint(out, len(content))
        out += content
    return bytes(out)


def _entry(tensor: Tensor, table: bytearray) -> tuple[Buffer, Buffer]:
    """Append the tensor's entry to ``table``; return its index and value sections as they are stored."""
    compress_values = tensor.backend != "none"
    backend = require_backend(tensor.backend)
    index_code, index_params, index_raw, backend, index = _index(tensor, backend)
    value_params, value_raw, values = _values(tensor.values, backend if compress_values else "none")
    # Neither section got shorter: naming the back-end would cost two raw lengths, and every receiver would need it.
    if len(index) == len(index_raw) and len(values) == value_raw:
        backend = "none"
    name = tensor.name.encode()
    append_varint(table, len(name))
    table += name
    table.append(DTYPE_IDS[tensor.dtype])
    table.append(len(tensor.shape))
    for dim in tensor.shape:
        append_varint(table, dim)
    table.append(tensor.kind)
    append_varint(table, tensor.values.k)
    table.append(index_code)
    table.append(len(index_params))
    table += index_params
    table.append(tensor.values.codec_id)
    table.append(len(value_params))
    table += value_params
    table.append(BACKEND_IDS[backend])
    append_varint(table, len(index))
    append_varint(table, len(values))
    if backend != "none":
        append_varint(table, len(index_raw))
        append_varint(table, value_raw)
    return index, values


def _index(tensor: Tensor, backend: str) -> tuple[int, bytes, bytes, str, bytes]:
    """Return codec id, parameters, raw section, back-end and stored section of the support."""
    if isinstance(tensor.index, SharedSupport):
        return 11, tensor.index.support_id.to_bytes(8, "little"), b"", backend, b""
    if tensor.kind is not SPARSE:
        return 0, b"", b"", backend, b""
    if isinstance(tensor.index, Seeded):
        return 10, bytes((tensor.index.algorithm,)) + tensor.index.seed.to_bytes(8, "little"), b"", backend, b""
    assert tensor.indices is not None
    support = Support(tensor.indices, tensor.size)
    codec, params, raw, backend, stored = encode_support(support, tensor.index, backend)
    # Gaps as whole bytes are small only behind a compressor: asked for by name, the codec brings one.
    if backend == "none" and tensor.index.endswith("gap-bytes"):
        backend = require_backend("auto")
    if stored is None:
        stored = _shorter(raw, backend)
    return codec.codec_id, params, raw, backend, stored


def _values(values: Values, backend: str) -> tuple[bytes, int, Buffer]:
    """Return parameters, raw length and stored section of the values."""
    if backend != "none" and values.k:
        params, raw = values.pack(shuffled=True)
        stored = _shorter(raw, backend)
        if len(stored) < len(raw):
            return params, len(raw), stored
    # The plain form where compression does not pay: a receiver uses it in place, a shuffled one it has to copy.
    params, plain = values.pack()
    return params, len(plain), plain


def _shorter(raw: Buffer, backend: str) -> bytes:
    """Return ``raw`` compressed, or unchanged if that is not shorter; equal lengths on the wire mean "stored"."""
    if backend != "none" and len(raw):
        small = compress(backend, raw)
        if len(small) < len(raw):
            return small
    return bytes(raw)
