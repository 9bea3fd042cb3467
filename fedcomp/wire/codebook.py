"""Codebook values of a few bits: a sign and one of a few magnitudes, which are sent with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import tiers
from fedcomp.wire.bits import Buffer, pack, packed_size, unpack
from fedcomp.wire.entropy import CODED, coded_bounds, shorter
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.quantised import require, take_scales
from fedcomp.wire.rans import unpack_rans
from fedcomp.wire.values import Values, flat

MAX_BITS = 8


class Codebook(Values):
    """A sign and one of ``2**(bits - 1)`` magnitudes per value; the magnitudes are in the section.

    Parameters
    ----------
    codes : ndarray of int, shape (k,)
        ``index of the magnitude + 2**(bits - 1) * negative``.
    magnitudes : ndarray of float32, shape (2**(bits - 1),)
        Finite, >= 0, in ascending order; ignored where there are no codes.
    bits : int
        1..8.

    fixed : bool
        Take ``bits`` bits per value in any case.

    Parameters on the wire: bits u8, then 01 if the codes are entropy-coded. Section: the magnitudes f32, then the codes
    as fields of ``bits`` bits or as a stream of rANS; empty for no values.

    Examples
    --------
    >>> values = Codebook.quantise(np.float32([1.0, -8.0, 2.0, 9.0, -1.5]))
    >>> values.decode()
    array([ 1.5, -8.5,  1.5,  8.5, -1.5], dtype=float32)
    """

    codec_id = 8
    name = "codebook"

    def __init__(self, codes: NDArray[Any], magnitudes: NDArray[np.float32], bits: int, fixed: bool = False) -> None:
        require(1 <= bits <= MAX_BITS, f"a codebook needs bits in 1..{MAX_BITS}, got {bits}")
        codes = np.asarray(codes).reshape(-1)
        require(
            not codes.size or (codes.min() >= 0 and codes.max() < 1 << bits),
            f"codes of {bits} bits are 0..{2**bits - 1}",
        )
        self.codes = codes.astype(np.uint8, copy=False)
        self.bits, self.fixed = bits, fixed
        self.magnitudes = flat(np.atleast_1d(magnitudes), "float32")
        require(
            self.magnitudes.size == 1 << (bits - 1) and bool(np.all(self.magnitudes[1:] >= self.magnitudes[:-1])),
            f"codes of {bits} bits need {1 << (bits - 1)} magnitudes in ascending order",
        )

    @classmethod
    def quantise(cls, array: NDArray[Any]) -> Self:
        """Return signs and the two magnitudes that leave the smallest squared error: exact 2-means, 2 bits a value.

        ``array`` is taken flat, as k finite values. Each magnitude is the mean of those it stands for, rounded to
        float32. 0.0 counts as positive.
        """
        x = np.asarray(array, np.float64).reshape(-1)
        sizes = np.abs(x)
        low, high = two_means(sizes)
        # Nearest magnitude: at the best cut every value is nearer to the mean of its own side.
        codes = (2.0 * sizes > low + high).view(np.uint8) | (np.uint8(2) * (x < 0).view(np.uint8))
        return cls(codes, np.array([low, high], np.float32), 2)

    @property
    def k(self) -> int:
        return int(self.codes.size)

    def decode(self) -> NDArray[Any]:
        table = np.concatenate([self.magnitudes, -self.magnitudes])
        return tiers.ops("auto", self.k).look_up(table, self.codes)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        params = bytes((self.bits,))
        if not self.k:
            return params, b""
        head = self.magnitudes.tobytes()
        if not self.fixed and (stream := shorter(self.codes, packed_size(self.k, self.bits))) is not None:
            return params + CODED, head + stream
        return params, head + pack(self.codes, self.bits)

    def plain(self) -> Values:
        return type(self)(self.codes, self.magnitudes, self.bits, fixed=True)

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        return bytes((form["bits"],))

    @staticmethod
    def _params(params: bytes) -> int:
        if not params or not 1 <= params[0] <= MAX_BITS:
            raise Corrupt(f"a codebook needs bits in 1..{MAX_BITS}; found parameters {params.hex()!r}")
        return params[0]

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        bits = cls._params(params)
        low, high = coded_bounds(cls.name, params[1:], k, packed_size(k, bits))
        head = 4 << (bits - 1) if k else 0
        return head + low, head + high

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        bits = cls._params(params)
        count = 1 << (bits - 1)
        if k == 0:
            return cls(np.zeros(0, np.uint8), np.zeros(count, np.float32), bits)
        magnitudes = take_scales(section, count, "magnitude")
        # Any other order would be another encoding of the same values.
        if (magnitudes[1:] < magnitudes[:-1]).any():
            raise Corrupt("the magnitudes of a codebook are not in ascending order")
        if len(params) == 1:
            return cls(unpack(section[4 * count :], k, bits, np.uint8), magnitudes, bits)
        codes = unpack_rans(section[4 * count :], k)
        if int(codes.max()) >> bits:
            raise Corrupt(f"a code of a codebook has more than {bits} bits")
        return cls(codes, magnitudes, bits)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        # The codes, the same as indices of 64 bits, and what is decoded.
        return 16 * k + 2 * size + (16 << cls._params(params))


def codebook_size(k: int, bits: int) -> int:
    """Return the bytes of the section of ``k`` values."""
    return (4 << (bits - 1)) + packed_size(k, bits) if k else 0


def two_means(sizes: NDArray[np.float64]) -> tuple[float, float]:
    """Return the two numbers, ascending, from which finite ``sizes`` >= 0 of shape (k,) have the least squared
    distance; equal where one number is as good, and 0 for none.

    Cutting the sorted numbers after the i smallest leaves ``sum of squares - S_i²/i - (S - S_i)²/(k - i)``, with S_i
    the sum of these i: all cuts are tried at once.
    """
    if sizes.size == 0:
        return 0.0, 0.0
    ascending = np.sort(sizes)
    # The squares of sums of float32 values overflow nothing: 2**128 times a count below 2**62 is far below 2**512.
    sums = np.cumsum(ascending)
    counts = np.arange(1.0, sizes.size + 1.0)
    kept = sums * sums / counts
    kept[:-1] += (sums[-1] - sums[:-1]) ** 2 / (sizes.size - counts[:-1])
    cut = int(np.argmax(kept))
    low = float(sums[cut] / counts[cut])
    if cut == sizes.size - 1:
        return low, low
    return low, float((sums[-1] - sums[cut]) / (sizes.size - counts[cut]))
