"""Index codecs: the positions of a sparse tensor's values. This module: the interface and the plain codecs.

A codec writes strictly ascending indices of ``range(n)``; the receiver knows ``n`` and ``k``. ``bounds`` says which
section lengths are possible before anything is decompressed or allocated, ``decode`` accepts only canonical bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import Buffer, exact_sum, pack, packed_size, shuffle, unpack, unshuffle
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.limits import COEFFICIENTS, DENSE, SPARSE, Kind
from fedcomp.wire.support import Seeded, SharedSupport, complement

Indices = NDArray[np.int64]


class Support:
    """Strictly ascending indices of ``range(n)``, with what several codecs derive from them computed once.

    Raises
    ------
    ConfigError
        When the indices are not strictly ascending or not below ``n``.
    """

    def __init__(self, indices: Indices, n: int) -> None:
        self.indices = np.ascontiguousarray(indices, np.int64)
        self.n = n
        self.k = int(self.indices.size)
        self.gaps = _gaps(self.indices, n)
        """``i_0, i_1 - i_0 - 1, ...`` as uint32 (uint64 when ``n >= 2**31``)."""
        if self.k == 0:
            self.gap_sum = 0
            return
        first, self.last = int(self.indices[0]), int(self.indices[-1])
        self.gap_sum = self.last + 1 - self.k
        if first < 0 or self.last >= n or self.k > n:
            raise ConfigError(f"indices run from {first} to {self.last}; expected 0 <= index < {n}")
        # No index may lose bits or its sign in the unsigned form the gaps are worked out in: [0, 2**32 + 5, 10] would
        # pass for [0, 5, 10]. The OR of all is the cheapest test of every one of them. Then a step of zero or backwards
        # wraps to a huge unsigned gap, so that the largest gap is enough to check.
        bits = 31 if n < 1 << 31 else 63
        if int(np.bitwise_or.reduce(self.indices)) >> bits or int(np.maximum.reduce(self.gaps)) >= n:
            raise ConfigError("indices must be strictly ascending; sort them and reorder the values with them")

    def complement(self) -> Support:
        """Return the support of the absent indices."""
        return Support(complement(self.indices, self.n), self.n)


def _gaps(indices: Indices, n: int) -> NDArray[Any]:
    dtype = np.uint32 if n < 1 << 31 else np.uint64
    positions = indices.astype(dtype)
    gaps = np.empty_like(positions)
    gaps[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= dtype(1)
    return gaps


class IndexCodec(ABC):
    """One way to write a support.

    Attributes
    ----------
    codec_id, name
        The byte on the wire and the name in this library.
    lossy, unbiased, commutes_with_sum : bool
        The common declarations of all codecs of the format. Index codecs are exact; frames of several senders can be
        summed without decoding only when both ends hold the support already.
    needs : tuple of str
        State both ends must share.
    kinds : frozenset of Kind
        The tensors whose support it may write.
    """

    codec_id: ClassVar[int]
    name: ClassVar[str]
    lossy: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True
    commutes_with_sum: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[frozenset[Kind]] = frozenset({SPARSE})

    @abstractmethod
    def encode(self, support: Support) -> tuple[bytes, bytes]:
        """Return the codec's parameters and its section."""

    @abstractmethod
    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        """Return the least and largest possible length of the section; raise Corrupt for impossible parameters."""

    def source(self, params: bytes) -> str | Seeded | SharedSupport:
        """Return what a :class:`~fedcomp.wire.Tensor` has as ``index`` for ``params``, which have passed
        :meth:`bounds`: an encoder told so writes the same parameters."""
        return self.name

    @abstractmethod
    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        """Return the indices, strictly ascending and below ``n``; ``len(section)`` is within :meth:`bounds`."""

    @abstractmethod
    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        """Return an upper bound on the bytes :meth:`decode` allocates, its result included.

        ``params`` have passed :meth:`bounds`, and ``size``, the length of the section, is within them. Buffers of a
        fixed size are not counted (see :class:`~fedcomp.wire.Limits`).
        """

    @abstractmethod
    def size_bits(self, n: int, k: int) -> int:
        """Return the section's size in bits for any support of ``k`` out of ``n``: exact, or an upper bound."""


def no_params(name: str, params: bytes) -> None:
    """Raise Corrupt unless ``params`` is empty."""
    if len(params):
        raise Corrupt(f"codec {name!r} has no parameters, found {len(params)} bytes")


def require_ascending(indices: Indices, n: int) -> Indices:
    """Return ``indices`` when they are strictly ascending and below ``n``, else raise Corrupt."""
    if indices.size and (indices[0] < 0 or indices[-1] >= n or np.any(indices[1:] <= indices[:-1])):
        raise Corrupt(f"indices are not strictly ascending numbers below {n}")
    return indices


class NoIndex(IndexCodec):
    """No index section: dense tensors and coefficients."""

    codec_id = 0
    name = "none"
    commutes_with_sum = True
    kinds = frozenset({DENSE, COEFFICIENTS})

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return b"", b""

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        no_params(self.name, params)
        return 0, 0

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        return np.arange(k, dtype=np.int64)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 8 * k

    def size_bits(self, n: int, k: int) -> int:
        return 0


class RawIndex(IndexCodec):
    """u32 per index, u64 from ``n > 2**32`` on."""

    codec_id = 1
    name = "raw"

    @staticmethod
    def _dtype(n: int) -> np.dtype[Any]:
        # The largest index is n - 1, so that 2**32 elements still fit 32 bits.
        return np.dtype("<u4" if n <= 1 << 32 else "<u8")

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return b"", support.indices.astype(self._dtype(support.n)).tobytes()

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        no_params(self.name, params)
        size = k * self._dtype(n).itemsize
        return size, size

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        return require_ascending(np.frombuffer(section, self._dtype(n)).astype(np.int64), n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 9 * k

    def size_bits(self, n: int, k: int) -> int:
        return 8 * k * self._dtype(n).itemsize


class FixedIndex(IndexCodec):
    """``bit_length(n - 1)`` bits per index: the length reveals nothing but k."""

    codec_id = 2
    name = "fixed"

    @staticmethod
    def _width(n: int) -> int:
        return max(0, n - 1).bit_length()

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return b"", pack(support.indices, self._width(support.n))

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        no_params(self.name, params)
        size = packed_size(k, self._width(n))
        return size, size

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        return require_ascending(unpack(section, k, self._width(n), np.int64), n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 9 * k

    def size_bits(self, n: int, k: int) -> int:
        return 8 * packed_size(k, self._width(n))


class Bitmap(IndexCodec):
    """One bit per element of the tensor."""

    codec_id = 3
    name = "bitmap"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        present = np.zeros(support.n, np.uint8)
        present[support.indices] = 1
        return b"", np.packbits(present, bitorder="little").tobytes()

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        no_params(self.name, params)
        return (n + 7) // 8, (n + 7) // 8

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        # A bit beyond n would be an index outside of the tensor.
        if n & 7 and section[len(section) - 1] >> (n & 7):
            raise Corrupt("padding bits of a bitmap are not zero")
        # Counted before any index is made: k has passed the receiver's limits, the number of set bits has not.
        bits = np.unpackbits(np.frombuffer(section, np.uint8), bitorder="little")
        present = int(np.count_nonzero(bits))
        if present != k:
            raise Corrupt(f"bitmap has {present} bits set, expected {k}")
        return np.flatnonzero(bits.view(np.bool_))

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 8 * size + 8 * k

    def size_bits(self, n: int, k: int) -> int:
        return (n + 7) // 8 * 8


class GapBytes(IndexCodec):
    """Gaps as whole bytes, shuffled; only a back-end makes this small, and then it adapts to clustered supports.

    Parameters on the wire: width of a gap in bytes (1, 2, 4, 8), shuffled (0 or 1).
    """

    codec_id = 7
    name = "gap-bytes"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        largest = int(support.gaps.max()) if support.k else 0
        width = next(w for w in (1, 2, 4, 8) if largest < 1 << 8 * w)
        # Always shuffled: high bytes of gaps are mostly zero, and a compressor gains from them only where they are
        # adjacent.
        return bytes((width, 1)), shuffle(support.gaps.astype(f"<u{width}"))

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        if len(params) != 2 or params[0] not in (1, 2, 4, 8) or params[1] > 1:
            raise Corrupt("gap-bytes needs two parameters: width 1, 2, 4 or 8, shuffled 0 or 1")
        return k * params[0], k * params[0]

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        dtype = np.dtype(f"<u{params[0]}")
        gaps = unshuffle(section, dtype) if params[1] else np.frombuffer(section, dtype)
        # Before they are summed: a gap of eight bytes above 2**63 would turn negative as int64 and be taken back by
        # others.
        if k and int(gaps.max()) >= n:
            raise Corrupt(f"a gap reaches beyond the {n} elements of the tensor")
        return indices_from_gaps(gaps, n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return size + 16 * k

    def size_bits(self, n: int, k: int) -> int:
        return 8 * k * next(w for w in (1, 2, 4, 8) if n <= 1 << 8 * w)


def indices_from_gaps(gaps: NDArray[Any], n: int) -> Indices:
    """Return the indices of ``gaps``, each from 0 to ``4 n - 1``; raise Corrupt when they leave ``range(n)``.

    Gaps of type int64 are overwritten.
    """
    if gaps.size == 0:
        return np.zeros(0, np.int64)
    # The exact sum is taken only where the int64 running sum could wrap and come out below n again.
    if gaps.size * 4 * n >= 1 << 62 and exact_sum(gaps) >= 1 << 62:
        raise Corrupt(f"indices run beyond the {n} elements of the tensor")
    # In place: what a new array of this size costs is the memory pages that nobody has touched before.
    indices = gaps.astype(np.int64, copy=False)
    indices += 1
    np.add.accumulate(indices, out=indices)
    indices -= 1
    # No gap is negative, so the last index is the largest.
    if indices[-1] >= n:
        raise Corrupt(f"indices run beyond the {n} elements of the tensor")
    return indices


# Known to the design and not written by anything yet: an id that is reserved never gets another meaning.
RESERVED_INDEX: Final = {8: "elias-gamma"}
