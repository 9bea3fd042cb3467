"""The bins index codec: supports with a few indices in every bin of ``length`` consecutive elements.

AdaComp and chunk top-1 make such supports. An index costs the bits of its place inside its bin instead of those of its
distance to the one before: exactly one per bin (mode "one") ``ceil(log2 length)`` bits, any number per bin (mode
"many") one bit more, which says whether another index of the same bin follows. The codes are our own; the paper's 8 and
16 bits (6 or 14 of offset, a sign, a last-of-bin mark; recalled) say the same, with the sign among the values here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, unpack
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.index import IndexCodec, Indices, Support, require_ascending
from fedcomp.wire.limits import MAX_SIZE
from fedcomp.wire.quantised import take_param

_ONE = 0
_MANY = 1
_STRETCH = 1 << 14
"""Number of codes read at once; temporaries of half a MiB stay in the cache."""


class Bins(IndexCodec):
    """Offsets inside bins of ``length`` elements; the last bin may be shorter.

    Parameters
    ----------
    length : int, optional
        Elements per bin, 1..2**62; a shorter tensor is one bin. None makes about as many bins as there are indices. It
        concerns the encoder only: the frame carries the length.

    Parameters on the wire: mode u8, length varint, and in mode 1 the number of bins without an index, varint. Section:
    mode 0, for exactly one index per bin, the offsets as fields of ``w = bit_length(length - 1)`` bits. Mode 1: one
    field of ``w + 1`` bits per index, its offset and above it 1 for the last index of its bin; a bin without an index
    is one field of ``w`` ones, which no index can have: its offset would be too large or the last possible one.
    """

    codec_id = 13
    name = "bins"

    def __init__(self, length: int | None = None) -> None:
        if length is not None and not 1 <= length <= MAX_SIZE:
            raise ConfigError(f"bins of {length} elements are not possible; expected 1 <= length <= 2**62")
        self.length = length

    def _length(self, n: int, k: int) -> int:
        length = -(-n // max(k, 1)) if self.length is None else self.length
        # A length beyond n would say the same as n: cut here, so that one bin has one encoding.
        return max(1, min(length, n))

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        length = self._length(support.n, support.k)
        bins = -(-support.n // length)
        width = (length - 1).bit_length()
        which = support.indices // length
        offsets = support.indices - which * length
        ends = np.ones(support.k, np.bool_)
        np.not_equal(which[1:], which[:-1], out=ends[:-1])
        rank = np.cumsum(ends, dtype=np.int64)
        used = int(rank[-1]) if support.k else 0
        # Exactly one index in every bin: no field needs the bit that says whether another one follows.
        if used == support.k == bins:
            return bytes((_ONE,)) + put_varint(length), pack(offsets, width)
        # Every empty bin before an index moves its field one place on.
        rank -= ends
        which -= rank
        which += np.arange(support.k)
        offsets |= ends.astype(np.int64) << width
        # Filled with the code of an empty bin; the indices then overwrite their own places.
        fields = np.full(support.k + bins - used, (1 << width) - 1, np.int64)
        fields[which] = offsets
        return bytes((_MANY,)) + put_varint(length) + put_varint(bins - used), pack(fields, width + 1)

    def source(self, params: bytes) -> str:
        return f"{self.name}:{take_param(params, 1, self.name)[0]}"

    @staticmethod
    def _params(params: bytes, n: int, k: int) -> tuple[int, int, int]:
        """Return bin length, number of fields and their width; raise Corrupt for impossible parameters."""
        if len(params) < 2 or params[0] > _MANY:
            raise Corrupt(f"bins needs a mode 0 or 1 and a length; found {params.hex()!r}")
        length, end = take_param(params, 1, "bins")
        # The number of bins follows from the length, and the length is the sender's: 0 would divide by zero.
        if not 1 <= length <= max(1, n):
            raise Corrupt(f"bins of {length} elements are not possible in a tensor of {n}")
        bins = -(-n // length)
        width = (length - 1).bit_length()
        if params[0] == _ONE:
            if end != len(params) or k != bins:
                raise Corrupt(f"{k} indices cannot be one for each of {bins} bins; parameters {params.hex()!r}")
            return length, bins, width
        empty, end = take_param(params, end, "bins")
        used = bins - empty
        # A bin in use holds 1 to `length` indices. Checked before the section is read, since k + empty fields are
        # allocated.
        if end != len(params) or not 0 <= used <= k <= used * length:
            raise Corrupt(f"{k} indices cannot lie in {bins} bins of {length} of which {empty} are empty")
        return length, k + empty, width + 1

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        _, count, width = self._params(params, n, k)
        return packed_size(count, width), packed_size(count, width)

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        length, count, width = self._params(params, n, k)
        if params[0] == _MANY:
            return _from_codes(unpack(section, count, width, _field(width)), length, width - 1, n, k)
        indices = unpack(section, count, width, np.int64)
        # Fields of w bits can hold offsets up to 2**w - 1; a length that is no power of two ends below that.
        if count and int(indices.max()) >= length:
            raise Corrupt(f"an offset reaches beyond its bin of {length} elements")
        starts = np.arange(count)
        starts *= length
        indices += starts
        # Ascending by construction; only the last bin can be shorter than the others.
        if count and indices[-1] >= n:
            raise Corrupt(f"an offset reaches beyond the last bin of a tensor of {n} elements")
        return indices

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        _, count, width = self._params(params, n, k)
        # Fields in mode "many" stay in the smallest dtype that holds them; indices are made from them a stretch at a
        # time.
        return 16 * k if params[0] == _ONE else np.dtype(_field(width)).itemsize * count + 9 * k

    def size_bits(self, n: int, k: int) -> int:
        length = self._length(n, k)
        bins = -(-n // length)
        # At most: as many indices as fit side by side, all other bins empty.
        return 8 * packed_size(k + bins - -(-k // length), (length - 1).bit_length() + 1)


def _field(width: int) -> type[Any]:
    """Return the smallest dtype of fields this wide."""
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32 if width <= 32 else np.uint64


def _from_codes(codes: NDArray[Any], length: int, width: int, n: int, k: int) -> Indices:
    """Return the indices of mode "many"; raise Corrupt unless the codes are those of ``k`` indices in all bins."""
    bins = -(-n // length)
    mask = codes.dtype.type((1 << width) - 1)
    indices = np.empty(k, np.int64)
    filled = passed = 0
    open_bin = False
    for start in range(0, codes.size, _STRETCH):
        part = codes[start : start + _STRETCH]
        empty = part == mask
        # A last index has the bit above the mask set, an empty bin all bits below it: no other field is as large.
        ends = part >= mask
        if (open_bin and empty[0]) or np.any(empty[1:] & ~ends[:-1]):
            raise Corrupt("the code of an empty bin follows an index that is not the last of its bin")
        # A stretch may end inside a bin; the next one has to know.
        open_bin = not ends[-1]
        places = np.cumsum(ends, dtype=np.int64)
        found = np.flatnonzero(~empty)
        # Before anything is written: a forged stream may hold more indices than the result has places.
        if passed + int(places[-1]) > bins or filled + found.size > k:
            raise Corrupt(f"the codes hold more than {k} indices or more than {bins} bins")
        offsets = (part & mask)[found].astype(np.int64)
        if found.size and int(offsets.max()) >= length:
            raise Corrupt(f"an offset reaches beyond its bin of {length} elements")
        which = places[found]
        which -= ends[found]
        which += passed
        which *= length
        which += offsets
        indices[filled : filled + found.size] = which
        filled += found.size
        passed += int(places[-1])
    if filled != k or passed != bins or open_bin:
        raise Corrupt(f"the codes hold {filled} indices and {passed} bins, expected {k} and {bins}")
    # The bins ascend by construction; the order within one is the sender's.
    return require_ascending(indices, n)
