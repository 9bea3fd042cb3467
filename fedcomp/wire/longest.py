"""The maximum length of a frame, and padding to it, so that the length reveals nothing about the update.

The length of a frame follows the update: supports cost fewer bytes where they are clustered, zeros do not travel, and a
zero vector is an empty frame. :func:`longest` bounds it by what a receiver knows beforehand (the schema, and the form
of the values), and :func:`pad` fills a frame up to a length with an optional field that every decoder skips.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Final

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import packed_size, put_varint, unary_size
from fedcomp.wire.choose import INDEX_BY_NAME, TRIAL_K
from fedcomp.wire.codebook import codebook_size
from fedcomp.wire.frame import ALIGN_FROM, FILLER, HEADER, PADDING, Frame
from fedcomp.wire.limits import COEFFICIENTS, DENSE, SPARSE, Expected, Schema
from fedcomp.wire.quantised import block_count
from fedcomp.wire.rice import DEFAULT_BLOCK_LOG2, elias_fano_parameter

FILLED: Final = 10
"""Bytes that :func:`pad` adds at least: type, length and eight bytes of filler, by which any two frames differ."""

_CRC: Final = 4
_ALIGNMENT: Final = 9
"""Maximum padding in bytes with which an encoder aligns its largest dense section."""

_ROUNDED: Final = 2
_RANGE: Final = 9
"""Parameters of a range float: bits and mantissa, a lowest magnitude below 2**23 and a number of positive values below
2**16."""
_LEVELS: Final = 7
"""Parameters of levels: form, bits, step and three shifts."""
_BEHIND_BACKEND: Final = 12
"""Additions to the bound of a support: rounding to whole bytes, and the raw lengths of sections if a byte compressor is
tried."""


def longest(schema: Schema, index: str = "auto", *forms: Mapping[str, int]) -> int:
    """Return a length that no frame of ``schema`` exceeds, whatever it holds, in bytes.

    It is reached up to some bytes by the costliest supports with the largest number of values.

    Parameters
    ----------
    schema : tuple of Expected
        Of one kind (dense, sparse or coefficients) and one value codec each.
    index : str
        The index codec of all sparse tensors: a name as :class:`~fedcomp.wire.Tensor` takes, or "seeded".
    *forms : mapping of str to int
        Of each tensor in order, or of all if it is one: what the lengths of quantised values depend on: ``block``
        (values per scale, 0 for all), ``bits``, ``levels``, ``bucket`` (values per norm, 0 for all), ``modulus``,
        ``bytes`` (of a section of levels), ``fixed`` (1: levels in fields of a fixed width in any case).

    Raises
    ------
    ConfigError
        For a tensor of another kind, or with a choice of value codecs.

    Examples
    --------
    >>> longest((Expected("w", (1000,), kinds=frozenset({DENSE}), value_codecs=frozenset({"fp16"})),))
    2047
    """
    size = HEADER.size + 1 + _CRC
    aligned = False
    each = forms if len(forms) > 1 else (forms or ({},)) * len(schema)
    for expected, form in zip(schema, each, strict=True):
        most = expected.most_values
        kind, values = _only(expected)
        value_params, value_section = _VALUES[values](most, form)
        index_params, index_section = _support(expected.size, most, index) if kind is SPARSE else (0, 0)
        # The fields of an entry in the order of the table: name, dtype, dimensions; kind and k; both codecs with the
        # lengths of their parameters, and the back-end; the lengths of both sections, and these.
        size += len(put_varint(len(expected.name.encode()))) + len(expected.name.encode()) + 2
        size += sum(len(put_varint(d)) for d in expected.shape) + 1 + len(put_varint(most))
        size += 2 + index_params + 2 + value_params + 1
        size += len(put_varint(index_section)) + index_section + len(put_varint(value_section)) + value_section
        aligned |= kind is DENSE and value_section >= ALIGN_FROM
    return size + _ALIGNMENT * aligned


def pad(frame: Frame, length: int, salt: bytes) -> Frame:
    """Return ``frame`` filled up to ``length`` bytes; it decodes to the same.

    Parameters
    ----------
    length : int
        At least :data:`FILLED` more than the frame has.
    salt : bytes
        Name of the message, which seeds the padding. Frames of equal content then differ, so that deduplicating storage
        reveals nothing.

    Raises
    ------
    ConfigError
        When the frame is too long for that.
    """
    room = length - len(frame)
    if room < FILLED:
        raise ConfigError(f"a frame of {len(frame)} bytes cannot be padded to {length}: {FILLED} more are needed")
    # A field whose length takes a byte more may be one too long: an empty field of two bytes goes before it.
    empty = b""
    if _content(room) is None:
        empty, room = bytes((PADDING, 0)), room - 2
    count = _content(room)
    assert count is not None
    # In front of all other fields. The payload moves with it, and a dense section that was aligned may have to be
    # copied.
    fields = empty + bytes((FILLER,)) + put_varint(count) + hashlib.shake_128(salt).digest(count)
    magic, major, minor, flags, tensors, start = HEADER.unpack_from(frame)
    head = HEADER.pack(magic, major, minor, flags, tensors, start + len(fields))
    body = b"".join((head, fields, memoryview(frame)[HEADER.size : -_CRC]))
    return body + zlib.crc32(body).to_bytes(_CRC, "little")


def _content(room: int) -> int | None:
    """Return the content bytes of a field of ``room`` bytes; None if no such field exists."""
    # A length of five bytes reaches 2**35 - 1, beyond any frame.
    for width in range(1, 6):
        count = room - 1 - width
        if count >= 0 and len(put_varint(count)) == width:
            return count
    return None


def _only(expected: Expected) -> tuple[int, str]:
    kinds, values = expected.kinds or (), expected.value_codecs or ()
    # A bound over several forms would be that of the longest, and every frame would be filled up to it.
    known = set(kinds) <= {DENSE, SPARSE, COEFFICIENTS} and set(values) <= set(_VALUES)
    if len(kinds) != 1 or len(values) != 1 or not known:
        raise ConfigError(
            f"the length of a frame is bounded for tensors of one form, dense, sparse or coefficients, not {expected}"
        )
    return next(iter(kinds)), next(iter(values))


def _support(n: int, most: int, index: str) -> tuple[int, int]:
    """Return the maximum bytes of parameters and section for any support of up to ``most`` of ``n`` indices.

    Every figure below grows with k, so its value at ``most`` bounds all.
    """
    if index == "seeded":
        return 9, 0
    inner = index.removeprefix("complement:")
    if inner != index:
        # With few values in the tensor, nearly all indices are absent ones.
        params, section = _support(n, n, inner)
        return params + 1, section
    if index == "auto" or index.startswith("auto+"):
        # More than half of the indices are written as the absent ones.
        k = min(most, (n + 1) // 2)
        section = min(_elias_fano(n, k), *(INDEX_BY_NAME[name].size_bits(n, k) // 8 for name in _EXACT))
        return (3, section + _BEHIND_BACKEND) if k >= TRIAL_K else (2, section + _ROUNDED)
    if index in _EXACT or index == "ans-gaps":
        return 0, INDEX_BY_NAME[index].size_bits(n, most) // 8
    if index == "gap-bytes":
        return 2, INDEX_BY_NAME[index].size_bits(n, most) // 8 + _BEHIND_BACKEND
    # Rice with its best parameter is no longer than Elias-Fano, up to rounding: the gaps are smaller than the indices.
    blocks = packed_size(-(-most >> DEFAULT_BLOCK_LOG2), 5) + 31 if index == "block-rice" else 0
    return 1, _elias_fano(n, most) + blocks + _ROUNDED


_EXACT: Final = ("fixed", "bitmap", "raw")


def _elias_fano(n: int, k: int) -> int:
    if k == 0:
        return 0
    low = elias_fano_parameter(n, k)
    return unary_size(max(0, n - 1) >> low, k) + packed_size(k, low)


def _uniform(k: int, form: Mapping[str, int]) -> tuple[int, int]:
    block = form.get("block", 0)
    return 2 + len(put_varint(block)), 6 * block_count(k, block) + packed_size(k, form["bits"])


def _sign(k: int, form: Mapping[str, int]) -> tuple[int, int]:
    block = form.get("block", 0)
    return len(put_varint(block)), 4 * block_count(k, block) + (k + 7) // 8


def _ternary(k: int, form: Mapping[str, int]) -> tuple[int, int]:
    # The layout for many zeros is taken where its section is shorter; its parameters are longer.
    return 2 + len(put_varint(k)), 4 + (k + 4) // 5


def _qsgd(k: int, form: Mapping[str, int]) -> tuple[int, int]:
    bucket, levels = form.get("bucket", 0), form["levels"]
    params = 1 + len(put_varint(levels)) + len(put_varint(bucket))
    return params, 4 * block_count(k, bucket) + packed_size(k, (2 * levels).bit_length())


_VALUES: Final[Mapping[str, Callable[[int, Mapping[str, int]], tuple[int, int]]]] = {
    "raw": lambda k, form: (0, 4 * k),
    "fp16": lambda k, form: (0, 2 * k),
    "bf16": lambda k, form: (0, 2 * k),
    "uniform": _uniform,
    "sign": _sign,
    "ternary": _ternary,
    "qsgd": _qsgd,
    "range-float": lambda k, form: (_RANGE, packed_size(k, form["bits"])),
    "codebook": lambda k, form: (1, codebook_size(k, form["bits"])),
    "natural": lambda k, form: (0, packed_size(k, 9)),
    "ones": lambda k, form: (0, 0),
    "residues": lambda k, form: (
        len(put_varint(form["modulus"])),
        4 * min(1, k) + packed_size(k, (form["modulus"] - 1).bit_length()),
    ),
    "levels": lambda k, form: (_LEVELS, form["bytes"]),
    "unit-sign": lambda k, form: (0, (k + 7) // 8),
}
"""By value codec, the maximum bytes of parameters and section for k values. Raw values are float32."""
