"""Sections: one tensor inside a message that already states its type, its length and a checksum.

A frame (:mod:`fedcomp.wire.frame`) describes itself: names, shapes, codecs, lengths, a checksum. Short messages cannot
afford that, and need not where the enclosing message has it. A :class:`Section` is what both ends know beforehand; its
bytes are support and values in the index and value codecs of frames, and nothing that is known already.

The end of a section is known to its reader. Where several follow each other, :func:`put_block` and :func:`take_block`
write the length of all but the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from fedcomp.errors import ConfigError, nearest
from fedcomp.wire.bits import Buffer, packed_size, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, LimitExceeded, NonFinite, SchemaMismatch, Truncated
from fedcomp.wire.index import Bitmap, FixedIndex, Indices, Support
from fedcomp.wire.limits import MAX_SIZE, SPARSE, require_dtype
from fedcomp.wire.rice import Rice, best_rice
from fedcomp.wire.tensor import Tensor
from fedcomp.wire.values import Values

SECTION_INDEX: Final = ("none", "known", "fixed", "bitmap", "rice", "auto")
"""How a section may write its support."""

_FIXED, _BITMAP, _RICE = range(3)
_FIXED_CODEC: Final = FixedIndex()
_BITMAP_CODEC: Final = Bitmap()
_RICE_CODEC: Final = Rice()
_LONGEST_PARAMS: Final = 64


@dataclass(frozen=True)
class Section:
    """What both ends know of a tensor before a byte of it travels.

    Parameters
    ----------
    n : int
        Elements of the tensor, which is flat.
    values : type of Values
        How its values travel: a value codec of frames.
    index : {"none", "known", "fixed", "bitmap", "rice", "auto"}
        How the support travels. "none": there is none, all n values do. "known": both ends hold it, it is passed to
        :meth:`read`. "fixed": fields of ``bit_length(n - 1)`` bits, or a bitmap where that is shorter, so that the
        length gives k and nothing else. "rice": gaps in Rice code. "auto": the shortest of the three, and a byte that
        names it.
    max_k : int, optional
        Most values of a sparse tensor that a receiver takes; None: n.
    dtype : str
        Of the tensor; lossless values have it.
    params : bytes or None
        The parameters of the value codec, where both ends know them, as :meth:`Values.pack` returns them; None: they
        travel, with their length in front.

    Raises
    ------
    ConfigError
        For an unknown index or dtype, or for sparse values whose number does not tell their length.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp import wire
    >>> section = wire.Section(1000, wire.Raw, "fixed", max_k=3)
    >>> data = section.write(wire.Raw(np.float32([1.0, -2.0])), np.array([3, 159]))
    >>> len(data), section.read(data).indices
    (11, array([  3, 159]))
    """

    n: int
    values: type[Values]
    index: str = "none"
    max_k: int | None = None
    dtype: str = "float32"
    params: bytes | None = b""

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if self.index not in SECTION_INDEX:
            raise ConfigError(
                f"index={self.index!r} cannot be used in a section{nearest(self.index, SECTION_INDEX)}; expected one "
                f"of {', '.join(SECTION_INDEX)}; frames have more"
            )
        if not 0 <= self.n <= MAX_SIZE or not 0 <= self.most_values <= self.n:
            raise ConfigError(f"a section of n={self.n} elements and max_k={self.max_k}; expected 0 <= max_k <= n")
        if not self.values.accepts(self.dtype):
            raise ConfigError(f"{self.values.name} values cannot fill a {self.dtype} tensor")
        # Nothing says where the support ends: that is found from the end, by the bytes that k values take.
        if self.index not in ("none", "known") and (self.params is None or self._value_bytes(1) is None):
            raise ConfigError(
                f"sparse {self.values.name} values need a length that follows from their number, and known parameters: "
                "put them into a frame"
            )

    @property
    def most_values(self) -> int:
        """Largest number of values."""
        return self.n if self.max_k is None or self.index == "none" else self.max_k

    @cached_property
    def most_bytes(self) -> int:
        """Bytes of the longest section: what a receiver is ready to read."""
        k = self.most_values
        if self.params is None:
            # No value codec's own layouts are longer than raw values and a scale for each.
            return 1 + _LONGEST_PARAMS + 8 * k + 8
        values = self.values.bounds(self.params, k, self.dtype)[1] if k else 0
        if self.index in ("none", "known"):
            return values
        # A byte, a count of at most nine, and indices that never take more than a bitmap: fields only where they are
        # shorter, Rice with its best parameter, whose search may miss by a byte.
        return 11 + -(-self.n // 8) + values

    def write(self, values: Values, indices: Indices | None = None) -> bytes:
        """Return the section of ``values`` at the strictly ascending ``indices`` of ``range(n)``.

        ``indices`` is None for "none" and "known". A section without values has no bytes, but for "bitmap", which has
        all its bits, and a count of 0 where one travels.

        Raises
        ------
        ConfigError
            When the values are of another class, number or parameters than was agreed, or the indices no support.
        """
        # A form whose parameters follow from the values cannot be agreed beforehand.
        form = values if self.params is None else values.plain()
        params, content = form.pack() if values.k else (self.params or b"", b"")
        if type(values) is not self.values or values.k > self.most_values or self.params not in (None, params):
            raise ConfigError(
                f"a section of at most {self.most_values} {self.values.name} values with parameters {self.params!r} "
                f"cannot hold {values.k} {values.name} values with parameters {params!r}"
            )
        if self.index in ("none", "known"):
            if self.index == "none" and values.k != self.n:
                raise ConfigError(f"a dense section of {self.n} elements got {values.k} values")
            head = b"" if self.params is not None or not values.k else bytes((len(params),)) + params
            return head + bytes(content)
        if indices is None or indices.shape != (values.k,):
            raise ConfigError(f"{values.k} sparse values need {values.k} indices")
        return self._put_support(Support(indices, self.n)) + bytes(content)

    def read(self, data: Buffer, known: Indices | None = None) -> Tensor:
        """Return the tensor that exactly ``data`` holds; nothing is allocated beyond n, max_k and the bytes at hand.

        Parameters
        ----------
        data : bytes-like
            From anyone.
        known : ndarray of int64, shape (k,), optional
            The support of a section with ``index="known"``, ascending and below n.

        Raises
        ------
        WireError
            For what is not a section of this form, and for values that are NaN or infinite. As in frames, a support has
            one encoding per layout and parameter. Which layout "auto" takes, and the parameter of the Rice code, are
            the writer's choice: a later version may choose better.
        """
        view = memoryview(data)
        if len(view) > (most := self.most_bytes):
            raise LimitExceeded(f"a section has {len(view)} bytes; one of {self.n} elements has at most {most}")
        if self.index == "none":
            return Tensor(self._take_values(view, self.n), (self.n,), dtype=self.dtype)
        if self.index == "known":
            if known is None or known.size > self.most_values or (known.size and int(known[-1]) >= self.n):
                raise SchemaMismatch("a section lies on a support that its reader does not hold")
            indices, rest = known, view
        else:
            indices, rest = self._take_support(view)
        values = self._take_values(rest, indices.size)
        return Tensor(values, (self.n,), dtype=self.dtype, kind=SPARSE, indices=indices)

    def _value_bytes(self, k: int) -> int | None:
        """Return the bytes of k values; None if this does not follow from k."""
        if self.params is None:
            return None
        low, high = self.values.bounds(self.params, k, self.dtype)
        return low if low == high else None

    @cached_property
    def _stride(self) -> int:
        """Bytes per value if all values have the same size, otherwise 0: then the length does not give k, and a count
        is sent."""
        # Two sizes, since a codec of a few bits per value also takes one byte for a single value.
        one, many = self._value_bytes(1), self._value_bytes(1 << 16)
        return one if one is not None and many == one << 16 else 0

    def _put_support(self, support: Support) -> bytes:
        k = support.k
        count = b"" if self._stride else put_varint(k)
        if self.index == "fixed":
            return count + _plain(support)
        if self.index == "bitmap":
            return count + _BITMAP_CODEC.encode(support)[1]
        if k == 0:
            return b""
        b, size = best_rice(support)
        written = put_varint(k)
        if self.index == "auto" and plain_bytes(self.n, k) + len(count) <= size + len(written):
            return bytes((_BITMAP if bitmap_is_shorter(self.n, k) else _FIXED,)) + count + _plain(support)
        return bytes((_RICE | b << 2,)) + written + _RICE_CODEC.encode_with(support, b)[1]

    def _take_support(self, data: memoryview) -> tuple[Indices, memoryview]:
        if self.index == "fixed":
            return self._take_plain(data)
        if self.index == "bitmap":
            return self._take_bitmap(data)
        if not len(data):
            return np.zeros(0, np.int64), data
        # Two bits name the layout; the other six hold any Rice parameter, since n has 63 bits at most.
        kind, b = data[0] & 3, data[0] >> 2
        if kind == _RICE:
            return self._take_rice(data[1:], b)
        if b or kind > _RICE or self.index != "auto":
            raise Corrupt(f"a section begins with {data[0]}, which names no layout of {self.index!r}")
        indices, rest = (self._take_plain if kind == _FIXED else self._take_bitmap)(data[1:])
        if not indices.size:
            raise Corrupt("a section names a layout and holds nothing")
        # A bitmap has a name of its own: under that of fields it would be a second encoding of the same support.
        if kind == _FIXED and bitmap_is_shorter(self.n, indices.size):
            raise Corrupt("a section names fields and holds a bitmap")
        return indices, rest

    def _take_plain(self, data: memoryview) -> tuple[Indices, memoryview]:
        n, w, stride = self.n, width(self.n), self._stride
        last = n // w if w else n  # the largest k that travels as fields
        if not stride:
            k, start = self._take_count(data)
            if k > last:
                return self._take_bitmap(data)
            data = data[start:]
        else:
            # The length grows with k, so that anything longer than the largest k in fields is a bitmap.
            if len(data) > plain_bytes(n, last) + stride * last:
                indices, rest = self._take_bitmap(data)
                # A bitmap may also be longer than the fields of k = last; only one of the two may hold that k.
                if indices.size <= last:
                    raise Corrupt(f"a bitmap holds {indices.size} of {n} elements, which fields hold in fewer bytes")
                return indices, rest
            # Exact for a valid length: rounding the fields up to bytes adds at most 7 bits, less than one more value.
            k = 8 * len(data) // (w + 8 * stride)
            if -(-k * w // 8) + stride * k != len(data):
                raise Corrupt(f"no number of indices of {w} bits and values of {stride} bytes has {len(data)} bytes")
            self._require_count(k)
        split = _split(data, packed_size(k, w))
        return _FIXED_CODEC.decode(b"", data[:split], n, k), data[split:]

    def _take_bitmap(self, data: memoryview) -> tuple[Indices, memoryview]:
        stride, size = self._stride, -(-self.n // 8)
        if stride:
            k, left = divmod(len(data) - size, stride)
            if k < 0 or left:
                raise Corrupt(
                    f"a bitmap of {self.n} elements and values of {stride} bytes cannot have {len(data)} bytes"
                )
            self._require_count(k)
        else:
            k, start = self._take_count(data)
            data = data[start:]
        split = _split(data, size)
        return _BITMAP_CODEC.decode(b"", data[:split], self.n, k) if split else np.zeros(0, np.int64), data[split:]

    def _take_rice(self, data: memoryview, b: int) -> tuple[Indices, memoryview]:
        k, start = self._take_count(data)
        # The values take what follows from k; between the count and them is the code.
        split = len(data) - (self._value_bytes(k) or 0)
        low, high = _RICE_CODEC.bounds(bytes((b,)), self.n, k)
        if not k or not low <= split - start <= high:
            raise Corrupt(f"{k} Rice-coded indices of {self.n} have {low} to {high} bytes; found {split - start}")
        return _RICE_CODEC.decode(bytes((b,)), data[start:split], self.n, k), data[split:]

    def _take_count(self, data: memoryview) -> tuple[int, int]:
        k, start = take_varint(data, 0, len(data))
        self._require_count(k)
        return k, start

    def _require_count(self, k: int) -> None:
        if k > self.most_values:
            raise LimitExceeded(f"a section holds {k} values; expected at most {self.most_values}")

    def _take_values(self, data: memoryview, k: int) -> Values:
        params = self.params
        if params is None:
            params, data = _take_params(data) if k else (b"", data)
        low, high = self.values.bounds(params, k, self.dtype) if k else (0, 0)
        if not low <= len(data) <= high:
            raise Corrupt(f"{k} {self.values.name} values have {low} to {high} bytes; found {len(data)}")
        values = self.values.unpack(params, data, k, self.dtype)
        if bad := values.count_non_finite():
            raise NonFinite(f"{bad} of {k} values of a section are NaN or infinite")
        return values


def _plain(support: Support) -> bytes:
    codec = _BITMAP_CODEC if bitmap_is_shorter(support.n, support.k) else _FIXED_CODEC
    return codec.encode(support)[1]


def _split(data: memoryview, size: int) -> int:
    if size > len(data):
        raise Truncated(f"indices of {size} bytes in a section of {len(data)}")
    return size


def _take_params(data: memoryview) -> tuple[bytes, memoryview]:
    size = data[0] if len(data) else 0
    if not len(data) or size > _LONGEST_PARAMS or 1 + size > len(data):
        raise Truncated(f"a section of {len(data)} bytes ends in the parameters of its values")
    return bytes(data[1 : 1 + size]), data[1 + size :]


def width(n: int) -> int:
    """Return the bits of an index below ``n``."""
    return max(0, n - 1).bit_length()


def bitmap_is_shorter(n: int, k: int) -> bool:
    """Whether ``k`` indices below ``n`` take more bits as fields than as a bitmap."""
    return k * width(n) > n


def plain_bytes(n: int, k: int) -> int:
    """Return the bytes of ``k`` indices with ``index="fixed"``."""
    return -(-min(k * width(n), n) // 8)


def put_block(section: Buffer) -> bytes:
    """Return ``section`` with its length in front (LEB128), for bodies in which something follows it."""
    return put_varint(len(section)) + bytes(section)


def take_block(body: memoryview, pos: int) -> tuple[memoryview, int]:
    """Read what :func:`put_block` wrote at ``pos`` of ``body``; return it and the position after it.

    Raises
    ------
    WireError
        When the body ends before it.
    """
    size, pos = take_varint(body, pos, len(body))
    if size > len(body) - pos:
        raise Truncated(f"a section of {size} bytes is announced, of which {len(body) - pos} are here")
    return body[pos : pos + size], pos + size
