"""Floats of N bits without a stored exponent field: the range of the values selects the magnitudes that have codes.

A float32 pattern cut to m bits of mantissa is an integer that grows with the number, so that codes may count these
integers from the smallest magnitude that is needed: within an octave the spacing is constant, and it doubles every
``2**m`` codes. Named in Wang et al., HPDC 2020 (abstract read; construction derived).
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.kernels import tiers
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, unpack
from fedcomp.wire.entropy import CODED, coded_bounds, shorter
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.quantised import require, take_param
from fedcomp.wire.rans import unpack_rans
from fedcomp.wire.values import Values

MAX_BITS: Final = 16
MAX_MANTISSA: Final = 15

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SAMPLE: Final = 4096
"""Maximum number of values for choosing the mantissa."""


class RangeFloat(Values):
    """Zero, and magnitudes of ``mantissa`` bits whose exponents cover the range of the values, as ``bits``-bit codes.

    Code 0 is 0.0, codes 1 to ``positives`` are the magnitudes from ``lowest`` on, and the codes above are the same ones
    with a minus sign. Magnitude q is the float32 whose pattern is ``q << (23 - mantissa)``.

    Parameters
    ----------
    codes : ndarray of int, shape (k,)
        ``0 <= code < 2**bits``; every one that occurs stands for a finite number.
    bits : int
        N, 2..16.
    mantissa : int
        m, 0..15.
    lowest : int
        Pattern of the smallest magnitude, cut; at least 1, and finite.
    positives : int
        Codes of positive numbers, at most ``2**bits - 1``.
    fixed : bool
        Take ``bits`` bits per value in any case.

    Parameters on the wire: bits u8, mantissa u8, lowest varint, positives varint, then 01 if the codes are
    entropy-coded. Section: the codes, as fields of ``bits`` bits or as a stream of rANS.

    Examples
    --------
    >>> values = RangeFloat.quantise(np.float32([1.0, -8.0, 0.013, 9.0]), bits=8, mantissa=4)
    >>> values.decode()
    array([ 1., -8.,  0.,  9.], dtype=float32)
    """

    codec_id = 7
    name = "range-float"
    unbiased = True

    def __init__(
        self, codes: NDArray[Any], bits: int, mantissa: int, lowest: int, positives: int, fixed: bool = False
    ) -> None:
        require(
            2 <= bits <= MAX_BITS and 0 <= mantissa <= MAX_MANTISSA,
            f"a range float needs bits in 2..{MAX_BITS} and a mantissa in 0..{MAX_MANTISSA}, got {bits}, {mantissa}",
        )
        finite = (255 << mantissa) - lowest
        require(
            lowest >= 1 and 0 <= positives <= min((1 << bits) - 1, finite),
            f"{positives} magnitudes from {lowest} on are not finite numbers of {bits} bits",
        )
        codes = np.asarray(codes).reshape(-1)
        require(
            not codes.size or (codes.min() >= 0 and codes.max() <= min((1 << bits) - 1, positives + finite)),
            f"codes of {bits} bits are 0..{min((1 << bits) - 1, positives + finite)}",
        )
        # As the compiled look-up takes them, where they fit.
        self.codes: NDArray[Any] = codes.astype(np.uint8 if bits <= 8 else np.uint16, copy=False)
        self.bits, self.mantissa, self.fixed = bits, mantissa, fixed
        self.lowest, self.positives = int(lowest), int(positives)

    @classmethod
    def quantise(
        cls,
        array: NDArray[Any],
        bits: int,
        mantissa: int | None = None,
        uniforms: NDArray[np.float64] | None = None,
    ) -> Self:
        """Round every value to the nearest number that has a code.

        ``array`` is taken flat, as k finite float32 values. From the smallest magnitude ε on the error is at most
        ``1 / (2**(mantissa + 1) + 1)`` of the value (subnormal numbers excepted), below it at most ε/2 and the value.

        Parameters
        ----------
        mantissa : int, optional
            The default is, of those that give each sign 2 to 16 octaves, what leaves the least squared error of a
            sample of at most 4096 values.
        uniforms : ndarray of float64 in [0, 1), shape (k,), optional
            Makes the rounding stochastic: unbiased, up to the end of float32's range.

        Raises
        ------
        ConfigError
            For NaN and infinity.
        """
        x = np.ascontiguousarray(array, np.float32).reshape(-1)
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ConfigError("a range float holds finite values only")
        # In this order: of equal numbers max() takes the first, and -0.0 has another pattern.
        ends = np.array([max(0.0, high), max(0.0, -low)], np.float32)
        if mantissa is None:
            mantissa = _best_mantissa(x[:: -(-x.size // _SAMPLE)] if x.size else x, ends, bits)
        lowest, positives, negatives = _fit(ends, bits, mantissa, up=uniforms is not None)
        codes = _encode(x, mantissa, lowest, positives, negatives, uniforms)
        return cls(codes, bits, mantissa, lowest, positives)

    @property
    def k(self) -> int:
        return int(self.codes.size)

    def decode(self) -> NDArray[Any]:
        # A table only where it is shorter than the values.
        if self.k < 1 << self.bits:
            return self._numbers(self.codes)
        table = self._numbers(np.arange(1 << self.bits))
        if self.bits <= 8:
            return tiers.ops("auto", self.k).look_up(table, self.codes)
        # Clipping changes no code, as all are in range, and spares the check.
        return table.take(self.codes, mode="clip")

    def _numbers(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """Return the number of every code."""
        cut = codes.astype(np.int32)
        zero, negative = cut == 0, cut > self.positives
        cut += self.lowest - 1
        cut[negative] -= self.positives
        # Codes that no value has may stand for numbers that are not finite.
        np.minimum(cut, (255 << self.mantissa) - 1, out=cut)
        cut <<= 23 - self.mantissa
        word = cut.view(np.uint32)
        word |= negative.astype(np.uint32) << np.uint32(31)
        word[zero] = 0
        return word.view(np.float32)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        params = bytes((self.bits, self.mantissa)) + put_varint(self.lowest) + put_varint(self.positives)
        if not self.fixed and (stream := shorter(self.codes, packed_size(self.k, self.bits))) is not None:
            return params + CODED, stream
        return params, pack(self.codes, self.bits)

    def plain(self) -> Values:
        return type(self)(self.codes, self.bits, self.mantissa, self.lowest, self.positives, fixed=True)

    @classmethod
    def agreed(cls, form: Any) -> bytes | None:
        return None  # the range is that of the values

    @staticmethod
    def _params(params: bytes) -> tuple[int, int, int, int, bytes]:
        if len(params) < 4 or not 2 <= params[0] <= MAX_BITS or params[1] > MAX_MANTISSA:
            raise Corrupt(
                f"a range float needs bits in 2..{MAX_BITS}, a mantissa in 0..{MAX_MANTISSA}, the lowest magnitude and "
                f"the number of positive ones; found {params.hex()!r}"
            )
        lowest, pos = take_param(params, 2, "range-float")
        positives, end = take_param(params, pos, "range-float")
        if lowest < 1 or positives > min((1 << params[0]) - 1, (255 << params[1]) - lowest):
            raise Corrupt(f"a range float has impossible parameters {params.hex()!r}")
        return params[0], params[1], lowest, positives, params[end:]

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        bits, _, _, _, coded = cls._params(params)
        return coded_bounds(cls.name, coded, k, packed_size(k, bits))

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        bits, mantissa, lowest, positives, coded = cls._params(params)
        kind = np.uint8 if bits <= 8 else np.uint16
        codes = unpack_rans(section, k) if coded else unpack(section, k, bits, kind)
        try:
            return cls(codes, bits, mantissa, lowest, positives)
        except ConfigError as error:
            # Of the parameters nothing is left to check.
            raise Corrupt("a code of a range float has too many bits, or stands for no finite number") from error

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 40 * k + 2 * size


def least_mantissa(bits: int) -> int:
    """Return the smallest mantissa that is chosen for codes of ``bits`` bits."""
    return max(0, bits - 5)


def _cut(ends: NDArray[np.float32], mantissa: int, up: bool) -> tuple[int, int]:
    """Return the bit patterns of two magnitudes, cut to the nearest or ``up``, and finite."""
    shift = 23 - mantissa
    whole = ends.view(np.uint32).astype(np.int64)
    more = (1 << shift) - 1 if up else (1 << shift) >> 1
    return tuple(min(int(word + more) >> shift, (255 << mantissa) - 1) for word in whole)  # type: ignore[return-value]


def _fit(ends: NDArray[np.float32], bits: int, mantissa: int, up: bool) -> tuple[int, int, int]:
    """Return the lowest magnitude, and the numbers of positive and of negative ones, for the largest of both signs.

    The sign with the larger magnitude gets more codes, as both end at their own largest magnitude. Rounded ``up`` or
    down at random, the other one keeps a code if it occurs: without, its mean would be 0.
    """
    top, bottom = _cut(ends, mantissa, up)
    total = (1 << bits) - 1
    kept = int(up and bool(ends.all()))
    # Where both signs have codes; but the further side alone has all of them where the other one lies below its range.
    lowest = max(-(-(top + bottom + 2 - total) // 2), max(top, bottom) + 1 - (total - kept), 1)
    return lowest, max(kept, top - lowest + 1), max(kept, bottom - lowest + 1)


def _encode(
    x: NDArray[np.float32],
    mantissa: int,
    lowest: int,
    positives: int,
    negatives: int,
    uniforms: NDArray[np.float64] | None,
) -> NDArray[np.int64]:
    """Return the codes of ``x``."""
    shift = 23 - mantissa
    word = (x.view(np.uint32) & _MAGNITUDE).astype(np.int64)
    smallest = lowest << shift
    if uniforms is None:
        count = ((word + ((1 << shift) >> 1)) >> shift) + (1 - lowest)
        # Between 0 and the smallest magnitude the nearer one, halfway the magnitude.
        half = np.array([smallest], np.uint32).view(np.float32)[0] / np.float32(2.0)
        count = np.where(count < 1, np.abs(x) >= half, count)
    else:
        count = ((word + (uniforms * (1 << shift)).astype(np.int64)) >> shift) + (1 - lowest)
        ratio = np.abs(x) / np.array([smallest], np.uint32).view(np.float32)[0].astype(np.float64)
        count = np.where(word < smallest, uniforms < ratio, count)
    negative = np.signbit(x)
    count = np.minimum(count, np.where(negative, negatives, positives))
    return np.where(negative & (count > 0), count + positives, count)


def _best_mantissa(sample: NDArray[np.float32], ends: NDArray[np.float32], bits: int) -> int:
    """Return the mantissa with the smallest squared error on ``sample``; the smallest of equal ones."""
    best, least = least_mantissa(bits), np.inf
    for mantissa in range(least_mantissa(bits), bits - 1):
        lowest, positives, negatives = _fit(ends, bits, mantissa, up=False)
        codes = _encode(sample, mantissa, lowest, positives, negatives, None)
        error = RangeFloat(codes, bits, mantissa, lowest, positives).decode().astype(np.float64) - sample
        square = float(error @ error)
        if square < least:
            best, least = mantissa, square
    return best
