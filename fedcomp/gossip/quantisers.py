"""Quantisers of innovations: a few bits for every coordinate, and at most one scale for all of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import params
from fedcomp.gossip.base import Real
from fedcomp.gossip.delta import Compressor, Delta, everything, narrow
from fedcomp.gossip.errors import LetterError
from fedcomp.gossip.packet import require_finite, take_real
from fedcomp.rng import Key
from fedcomp.wire import WireError
from fedcomp.wire.bits import pack, packed_size, unpack

_SCALE: Final[np.dtype[Any]] = np.dtype("<f4")
_TINY: Final = float(np.finfo(np.float32).tiny)


class _Signs(Compressor):
    """One bit per coordinate and a float32 scale of the stretch: ``scale sign(v)``, with sign(0) = sign(-0.0) = +."""

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        if not v.size:
            return b""
        return narrow(np.array([self.scale_of(v)]), _SCALE).tobytes() + _pack_signs(v)

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        if not n:
            return everything(take_real(data, 0, dtype))
        (scale,) = take_real(data[: _SCALE.itemsize], 1, _SCALE)
        if np.signbit(scale):
            raise LetterError(f"the scale of signs is {scale}; expected a number >= 0")
        return everything(_unpack_signs(data[_SCALE.itemsize :], n, np.dtype(dtype).type(scale)))

    def most(self, n: int, dtype: Any) -> int:
        return _SCALE.itemsize + packed_size(n, 1) if n else 0

    @abstractmethod
    def scale_of(self, v: Real) -> float:
        """Return the magnitude that all coordinates of ``v``, shape ``(n,)``, n >= 1, get."""


@dataclass(frozen=True)
class ScaledSign(_Signs):
    """Signs times the mean magnitude: ``(‖v‖₁ / n) sign(v)``, ``4 + ceil(n / 8)`` bytes.

    The compressor of EF-signSGD (Karimireddy et al., ICML 2019; recalled).
    """

    id: ClassVar[str] = "scaled-sign"

    def scale_of(self, v: Real) -> float:
        largest = float(np.abs(v).max())
        # Relative to the largest, no sum overflows and no mean underflows.
        return largest * float(np.abs(v / v.dtype.type(largest)).mean(dtype=np.float64)) if largest else 0.0

    def contraction(self, n: int) -> float | None:
        """Return 1/n, reached by a spike: the error is ``‖v‖² - ‖v‖₁²/n`` and ``‖v‖₁ >= ‖v‖`` (derived)."""
        return (1.0 - 2.0**-40) / n if n else None


@dataclass(frozen=True)
class NormSign(_Signs):
    """Signs times half the largest magnitude: ``(‖v‖∞ / 2) sign(v)``, ``4 + ceil(n / 8)`` bytes.

    Halves every box around zero, but is no l2 contraction for four or more coordinates: of a spike of length 1 it
    leaves ``n / 4`` (derived). Dyna-COLD's 1-bit quantiser with its scale on the wire.
    """

    id: ClassVar[str] = "norm-sign"

    def scale_of(self, v: Real) -> float:
        return float(np.abs(v).max()) / 2.0

    def contraction(self, n: int) -> float | None:
        """Return ``1 - n/4`` for up to three elements (derived), else None."""
        return (1.0 - n / 4.0) * (1.0 - 2.0**-20) if 0 < n < 4 else None


@dataclass(frozen=True)
class SignHalf(Compressor):
    """``scale`` times one half, with the sign of the coordinate: one bit each, and the scale is known to both ends.

    The 1-bit quantiser of Dyna-COLD, ``Q(v) = ±1/2`` (read in code that cites the paper): within ``[-scale, scale]``
    the error of a coordinate is at most ``scale / 2``. sign(0) = sign(-0.0) = +. ``ceil(n / 8)`` bytes.

    Parameters
    ----------
    scale : float
        Positive. Both ends must hold the same bits.
    """

    id: ClassVar[str] = "sign-half"

    scale: float = 1.0

    def __post_init__(self) -> None:
        params.assign(self, scale=params.positive("scale", self.scale))

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        return _pack_signs(v)

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        return everything(_unpack_signs(data, n, np.dtype(dtype).type(self.scale / 2.0)))

    def most(self, n: int, dtype: Any) -> int:
        return packed_size(n, 1)


@dataclass(frozen=True)
class Dithered(Compressor):
    """Randomly rounded to multiples of a fraction of the largest magnitude, unbiased: LEAD's quantiser.

    ``‖v‖∞ 2^-(b-1) sign(v) floor(2^(b-1) |v| / ‖v‖∞ + u)`` with u uniform in [0, 1) per coordinate, drawn from the key
    (LEAD, ICLR 2021; recalled). The norm is rounded *up* to float32, so that no coordinate lies beyond the last level
    and rounding stays unbiased. ``4 + ceil(n (b + 1) / 8)`` bytes: a level needs b bits, as level ``2^(b-1)`` occurs,
    and its sign one. A vector whose norm is below 1.2e-38 is sent as zeros.

    Parameters
    ----------
    bits : int
        b, from 1 (ternary) to 16.
    """

    id: ClassVar[str] = "dithered"

    bits: int = 2

    def __post_init__(self) -> None:
        params.assign(self, bits=params.integer("bits", self.bits, low=1, high=16))

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        if not v.size:
            return b""
        magnitudes = np.abs(v).astype(np.float64)
        norm = _round_up(float(magnitudes.max()))
        if norm == 0.0:
            fields = np.zeros(v.size, np.uint32)
        else:
            top = 1 << (self.bits - 1)
            levels = np.floor(magnitudes / norm * top + key.uniform(v.size))
            # Beyond the largest float32 a magnitude exceeds the norm.
            fields = np.minimum(levels, top).astype(np.uint32)
            fields |= ((v < 0.0) & (fields > 0)).astype(np.uint32) << np.uint32(self.bits)
        return np.array([norm], _SCALE).tobytes() + pack(fields, self.bits + 1)

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        if len(data) != self.most(n, dtype):
            raise LetterError(f"{n} levels of {self.bits} bits have {self.most(n, dtype)} bytes; found {len(data)}")
        if not n:
            return everything(np.zeros(0, dtype))
        (norm,) = take_real(data[: _SCALE.itemsize], 1, _SCALE)
        fields = _fields(data[_SCALE.itemsize :], n, self.bits + 1)
        levels = fields & ((1 << self.bits) - 1)
        top = 1 << (self.bits - 1)
        negative = (fields >> self.bits).astype(np.bool_)
        if np.signbit(norm) or levels.max() > top or np.any(negative & (levels == 0)) or (norm == 0 and levels.any()):
            raise LetterError(f"a norm of {norm} and levels up to {levels.max()}; expected >= 0 and at most {top}")
        # The quotient is a power of two: both products are exact in float64, and rounded once.
        values = (float(norm) / top * levels).astype(dtype)
        return everything(np.negative(values, out=values, where=negative))

    def most(self, n: int, dtype: Any) -> int:
        return _SCALE.itemsize + packed_size(n, self.bits + 1) if n else 0

    def contraction(self, n: int) -> float | None:
        """Return ``1 - n / 4^b`` where that is positive, else None.

        A step is ``‖v‖∞ / 2^(b-1)``, the variance of rounding at most a quarter of its square, and ``‖v‖∞ <= ‖v‖``
        (derived; the norm's rounding adds 2⁻²³ to the step).
        """
        kept = 1.0 - n * 4.0**-self.bits * (1.0 + 2.0**-20)
        return kept if n and kept > 0.0 else None


def _round_up(norm: float) -> float:
    """Return the least float32 that is not below ``norm``, at most the largest; 0 below the normal numbers."""
    if norm < _TINY:
        return 0.0
    largest = np.finfo(np.float32).max
    rounded = np.float32(min(norm, float(largest)))
    if float(rounded) < norm and rounded < largest:
        rounded = np.nextafter(rounded, largest)
    return float(rounded)


def _pack_signs(v: Real) -> bytes:
    return np.packbits(v < 0.0, bitorder="little").tobytes()


def _unpack_signs(data: memoryview, n: int, magnitude: Any) -> Real:
    """Return ``magnitude`` with the packed signs: a set bit is a minus."""
    out = np.full(n, magnitude)
    return np.negative(out, out=out, where=_fields(data, n, 1).astype(np.bool_))


def _fields(data: memoryview, n: int, width: int) -> NDArray[np.uint32]:
    try:
        return unpack(data, n, width, np.uint32)
    except WireError as error:
        raise LetterError(f"the fields of a letter cannot be read: {error}") from error
