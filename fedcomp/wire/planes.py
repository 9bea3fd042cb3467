"""Values without loss, in fewer bytes: their exponents are entropy-coded, their other bytes stay as they are.

The weights of a model are of similar magnitude, so that their exponents take two to three bits instead of eight; their
mantissas are noise, which no code shortens. Each byte of a word is a plane of its own, and the sign trades places with
the exponent, so that of bfloat16 and float32 the highest plane is the exponent (derived here; byte planes are those of
:func:`fedcomp.wire.bits.shuffle`).
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.wire.backends import decompress
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, Truncated
from fedcomp.wire.limits import NUMPY_DTYPES
from fedcomp.wire.values import Raw, Values, chunks

_WORTH: Final = 7.5
"""Bits a byte from which a plane is not tried: it would save less than a sixteenth of itself. No part of the format."""

_RUNS: Final = 1.5
"""Bits a byte below which runs are coded, too: a Huffman code alone takes at least one bit. No part of the format."""

_LEAST: Final = 9
"""Bytes of the shortest coded plane with its length."""


class Planes(Raw):
    """The values themselves, any dtype of the format but bool, as byte planes of which each is raw or deflated.

    Parameters
    ----------
    array : ndarray
        Taken flat; not copied when it is contiguous.

    Parameters on the wire: a byte, of which bit i says that plane i is deflated. Section: the planes from the lowest
    byte of a word to the highest, a deflated one as its length (varint) and a zlib stream.

    Examples
    --------
    >>> weights = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    >>> 1.19 < 4 * weights.size / len(Planes(weights).pack()[1]) < 1.21
    True
    """

    codec_id = 16
    name = "planes"
    commutes_with_sum = False

    def plain(self) -> Values:
        return Raw(self.array)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        size = self.array.itemsize
        planes, at = np.empty((size, self.k), np.uint8), 0
        for part in chunks(self.array.view(f"<u{size}")):
            planes[:, at : at + part.size] = _exponent_first(part).view(np.uint8).reshape(-1, size).T
            at += part.size
        coded, found = 0, list[Buffer]()
        for number, plane in enumerate(planes):
            stream = _deflated(plane)
            length = put_varint(len(stream))
            # Never longer than it is, so no tensor is.
            if stream and len(length) + len(stream) < plane.size:
                coded |= 1 << number
                found += [length, stream]
            else:
                found.append(plane.data)
        return bytes((coded,)), b"".join(found) if self.k else b""

    @classmethod
    def _coded(cls, params: bytes, dtype: str) -> list[bool]:
        """Return of each plane whether it is deflated."""
        size = NUMPY_DTYPES[dtype].itemsize
        if len(params) != 1 or params[0] >> size:
            raise Corrupt(f"planes of {dtype} need a byte that names some of {size}, found {params.hex()!r}")
        return [bool(params[0] >> number & 1) for number in range(size)]

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        coded = cls._coded(params, dtype)
        if any(coded) and k <= _LEAST:
            raise Corrupt(f"planes of {k} bytes are never deflated, found {params.hex()!r}")
        # The encoder deflates where that is shorter.
        return sum(_LEAST if each else k for each in coded), sum(k - each for each in coded)

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        coded, at = cls._coded(params, dtype), 0
        words = np.empty(k, f"<u{len(coded)}")
        planes = words.view(np.uint8).reshape(k, len(coded))
        for number, deflated in enumerate(coded):
            length = k
            if deflated:
                length, at = take_varint(section, at, len(section))
            if length > len(section) - at:
                raise Truncated(f"plane {number} has {length} bytes, and {len(section) - at} are left")
            part = section[at : at + length]
            planes[:, number] = np.frombuffer(decompress("zlib", part, k) if deflated else part, np.uint8)
            at += length
        if at != len(section):
            raise Corrupt(f"{len(section) - at} bytes follow the last plane")
        for each in chunks(words):
            _sign_first(each)
        # As a view of a frame is: callers see no difference between the two.
        words.flags.writeable = False
        return cls(words.view(NUMPY_DTYPES[dtype]))

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        # The words, a plane twice while zlib joins its pieces, and what zeroing copies with masks of a byte per value.
        return (2 * NUMPY_DTYPES[dtype].itemsize + 4) * k

    @classmethod
    def accepts(cls, dtype: str) -> bool:
        return super().accepts(dtype) and dtype != "bool"


def _exponent_first(words: NDArray[Any]) -> NDArray[Any]:
    """Return words whose highest bit has traded places with the eight below it; those of one byte as they are."""
    low = 8 * words.itemsize - 9
    if low < 0:
        return words
    rest = words & ((1 << low) - 1)
    rest |= words >> (low + 8) << low
    rest |= words << 1 & (0xFF << low + 1)
    return rest


def _sign_first(words: NDArray[Any]) -> None:
    """Undo :func:`_exponent_first` in place."""
    low = 8 * words.itemsize - 9
    if low < 0:
        return
    sign, exponent = words >> low << (low + 8), words >> (low + 1) << low
    words &= (1 << low) - 1
    exponent &= (1 << low + 8) - 1
    words |= sign
    words |= exponent


def _deflated(plane: NDArray[np.uint8]) -> bytes:
    """Return a plane in Huffman code, empty where that would save next to nothing."""
    if plane.size <= _LEAST:
        return b""
    counts = sum((np.bincount(part, minlength=256) for part in chunks(plane)), np.zeros(256, np.int64))
    shares = counts[counts > 0] / plane.size
    bits = -float(shares @ np.log2(shares))
    if bits > _WORTH:
        return b""
    # Not with the matches of zlib's levels: they find nothing in exponents, and 2.6 bits become 3.4 (measured). Not by
    # the rANS of quantised values either: it saves 0.2 % of a model, and takes 50 times as long where numba is missing.
    strategy = zlib.Z_RLE if bits < _RUNS else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
    return packer.compress(plane.data) + packer.flush()
