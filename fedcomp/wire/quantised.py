"""Value codecs with few bits per value and a scale: uniform, sign, ternary, QSGD levels.

Decoding is integer arithmetic and one correctly rounded product per value, so that every platform decodes the same
floats. Scales, norms and zero points must be finite, whatever the policy for values.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, take_varint, unpack
from fedcomp.wire.errors import Corrupt, NonFinite, WireError
from fedcomp.wire.gamma import gamma_size, pack_gamma, unpack_gamma
from fedcomp.wire.index import Support
from fedcomp.wire.rice import Rice
from fedcomp.wire.values import Bf16, Fp16, Natural, Raw, Values, flat

_F4 = np.dtype("<f4")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_LEVELS: Final = 1 << 24


def _blocks(k: int, block: int) -> int:
    """Return how many scales ``k`` values need; block 0 means one for all."""
    if k == 0:
        return 0
    return 1 if block == 0 else -(-k // block)


def _spread(scales: NDArray[Any], block: int, k: int) -> NDArray[Any]:
    """Return the scale of every value (a broadcastable view when there is only one)."""
    return scales if scales.size == 1 else np.repeat(scales, block)[:k]


def _block_reduce(function: np.ufunc, array: NDArray[Any], block: int) -> NDArray[Any]:
    if array.size == 0:
        return array[:0]
    starts = np.arange(0, array.size, block) if block else np.zeros(1, np.intp)
    return function.reduceat(array, starts)


def _round_up(exact: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the nearest float32 that is not smaller."""
    near = exact.astype(np.float32)
    return np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)


def _scales(section: Buffer, count: int, what: str) -> NDArray[np.float32]:
    """Read ``count`` scales; raise NonFinite or Corrupt unless all are finite and >= 0."""
    scales = np.frombuffer(section[: 4 * count], _F4).astype(np.float32)
    if not np.isfinite(scales).all():
        raise NonFinite(f"a {what} is NaN or infinite")
    if count and (scales < 0).any():
        raise Corrupt(f"a {what} is negative")
    return scales


def _take_block(params: bytes, pos: int, what: str) -> tuple[int, int]:
    try:
        return take_varint(params, pos, len(params))
    except WireError:
        raise Corrupt(f"parameters of {what} are cut short: {params.hex()!r}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class Uniform(Values):
    """``scale * (code - zero_point)`` with ``bits`` bits per value and one scale and zero point per block.

    Parameters
    ----------
    codes : ndarray of int, shape (k,)
        ``0 <= code < 2**bits``.
    bits : int
        1..16.
    block : int
        Values per scale; 0 for one scale.
    scales : ndarray of float32, shape (ceil(k / block),)
    zero_points : ndarray of int, shape (ceil(k / block),)
        The code of 0.0; ``0 <= zero_point < 2**bits``.
    rounding : {"nearest", "stochastic"}
        How the codes were made; a note for the receiver, without influence on decoding.

    Parameters on the wire: bits u8, rounding u8 (0, 1), block varint. Section: scales f32, zero points u16, codes.
    """

    codec_id = 3
    name = "uniform"
    unbiased = True

    def __init__(
        self,
        codes: NDArray[Any],
        bits: int,
        block: int,
        scales: NDArray[np.float32],
        zero_points: NDArray[Any],
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        _require(
            1 <= bits <= 16 and 0 <= block < 1 << 32,
            f"uniform needs bits in 1..16 and a block, got {bits}, {block}",
        )
        _require(
            rounding in ("nearest", "stochastic"),
            f"rounding={rounding!r} is neither 'nearest' nor 'stochastic'",
        )
        codes = np.asarray(codes).reshape(-1)
        count = _blocks(codes.size, block)
        _require(
            np.size(scales) == count and np.size(zero_points) == count,
            f"{codes.size} values in blocks of {block} need {count} scales and zero points",
        )
        top = (1 << bits) - 1
        zeros = np.asarray(zero_points).reshape(-1)
        for part in (codes, zeros):
            _require(not part.size or (part.min() >= 0 and part.max() <= top), f"codes of {bits} bits are 0..{top}")
        self.codes = codes.astype(np.uint16)
        self.bits, self.block, self.rounding = bits, block, rounding
        self.scales = flat(scales, "float32")
        self.zero_points = zeros.astype(np.uint16)

    @classmethod
    def quantise(
        cls, array: NDArray[Any], bits: int, block: int = 0, uniforms: NDArray[np.float64] | None = None
    ) -> Self:
        """Quantise between each block's minimum and maximum (0 included, so that 0.0 is exact).

        ``uniforms`` (float64 in [0, 1), shape (k,)) makes the rounding stochastic: unbiased from two bits on, as the
        scale is chosen so that both ends of the range are inside the codes. One bit holds one sign only; values of the
        other are cut to 0.
        """
        x = np.asarray(array, np.float64).reshape(-1)
        low = -np.minimum(_block_reduce(np.minimum, x, block), 0.0)
        high = np.maximum(_block_reduce(np.maximum, x, block), 0.0)
        top = (1 << bits) - 1
        extent = np.maximum(low + high, np.finfo(np.float64).tiny)
        zeros = np.clip(np.rint(low / extent * top), (low > 0) & (bits > 1), top - ((high > 0) & (bits > 1)))
        exact = np.maximum(low / np.maximum(zeros, 1), high / np.maximum(top - zeros, 1))
        scales = _round_up(exact)
        step = np.where(scales > 0, scales, 1).astype(np.float64)
        y = x / _spread(step, block, x.size)
        y = np.rint(y) if uniforms is None else np.floor(y + uniforms)
        y += _spread(zeros, block, x.size)
        codes = np.clip(y, 0, top).astype(np.int64)
        return cls(
            codes,
            bits,
            block,
            scales,
            zeros.astype(np.int64),
            "nearest" if uniforms is None else "stochastic",
        )

    @property
    def k(self) -> int:
        return int(self.codes.size)

    def decode(self) -> NDArray[Any]:
        steps = self.codes.astype(np.int32)
        steps -= _spread(self.zero_points.astype(np.int32), self.block, self.k)
        out = steps.astype(np.float32)
        out *= _spread(self.scales, self.block, self.k)
        return out

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        params = bytes((self.bits, self.rounding == "stochastic")) + put_varint(self.block)
        zeros = self.zero_points.astype("<u2").tobytes()
        return params, self.scales.tobytes() + zeros + pack(self.codes, self.bits)

    @staticmethod
    def _params(params: bytes) -> tuple[int, int, int]:
        if len(params) < 3 or not 1 <= params[0] <= 16 or params[1] > 1:
            raise Corrupt(f"uniform needs bits 1..16, rounding 0 or 1, and a block; found {params.hex()!r}")
        block, end = _take_block(params, 2, "uniform")
        if end != len(params) or block >= 1 << 32:
            raise Corrupt(f"uniform has impossible parameters {params.hex()!r}")
        return params[0], params[1], block

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        bits, _, block = cls._params(params)
        size = 6 * _blocks(k, block) + packed_size(k, bits)
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        bits, rounding, block = cls._params(params)
        count = _blocks(k, block)
        scales = _scales(section, count, "scale")
        zeros = np.frombuffer(section[4 * count : 6 * count], "<u2").astype(np.uint16)
        top = (1 << bits) - 1
        if count and int(zeros.max()) > top:
            raise Corrupt(f"a zero point is not a code of {bits} bits")
        reach = np.maximum(zeros, top - zeros).astype(np.float64) * scales
        if count and float(reach.max()) > _FLOAT32_MAX:
            raise NonFinite("a scale is so large that its codes overflow float32")
        codes = unpack(section[6 * count :], k, bits, np.uint16)
        return cls(codes, bits, block, scales, zeros, "stochastic" if rounding else "nearest")


class SignScale(Values):
    """One bit per value and one scale per block: ``-scale`` where ``negative``, else ``+scale``.

    Parameters
    ----------
    negative : ndarray of bool, shape (k,)
    scales : ndarray of float32, shape (ceil(k / block),)
    block : int
        Values per scale; 0 for one scale.

    Parameters on the wire: block varint. Section: scales f32, one bit per value.
    """

    codec_id = 4
    name = "sign"

    def __init__(self, negative: NDArray[np.bool_], scales: NDArray[np.float32], block: int = 0) -> None:
        self.negative = np.ascontiguousarray(negative, np.bool_).reshape(-1)
        self.scales = flat(np.atleast_1d(scales), "float32")
        self.block = block
        count = _blocks(self.k, block)
        _require(0 <= block < 1 << 32, f"block={block} is not a number of values")
        _require(self.scales.size == count, f"{self.k} signs in blocks of {block} need {count} scales")

    @classmethod
    def quantise(cls, array: NDArray[Any], block: int = 0) -> Self:
        """Keep the sign (0.0 counts as positive) and the mean magnitude of each block, the least-squares scale."""
        x = np.asarray(array, np.float64).reshape(-1)
        sums = _block_reduce(np.add, np.abs(x), block)
        members = np.full(sums.size, block or x.size, np.float64)
        if block and x.size:
            members[-1] = x.size - (sums.size - 1) * block
        return cls(np.signbit(x) & (x != 0), (sums / members).astype(np.float32), block)

    @property
    def k(self) -> int:
        return int(self.negative.size)

    def decode(self) -> NDArray[Any]:
        scales = np.broadcast_to(_spread(self.scales, self.block, self.k), (self.k,))
        return np.where(self.negative, -scales, scales)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        bits = np.packbits(self.negative, bitorder="little").tobytes()
        return put_varint(self.block), self.scales.tobytes() + bits

    @classmethod
    def _params(cls, params: bytes) -> int:
        block, end = _take_block(params, 0, cls.name)
        if end != len(params) or block >= 1 << 32:
            raise Corrupt(f"sign has impossible parameters {params.hex()!r}")
        return block

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        size = 4 * _blocks(k, cls._params(params)) + (k + 7) // 8
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        block = cls._params(params)
        count = _blocks(k, block)
        scales = _scales(section, count, "scale")
        if k & 7 and section[len(section) - 1] >> (k & 7):
            raise Corrupt("padding bits after the signs are not zero")
        bits = np.unpackbits(np.frombuffer(section[4 * count :], np.uint8), count=k, bitorder="little")
        return cls(bits.view(np.bool_), scales, block)


class Ternary(Values):
    """-1, 0 or +1 times one scale (TernGrad, STC), in whichever of two layouts is shorter.

    Parameters
    ----------
    trits : ndarray of int8, shape (k,)
        -1, 0 or +1.
    scale : float

    Parameters on the wire: layout u8. Layout 0: five trits per byte. Layout 1, for many zeros: b u8 and the number of
    non-zero trits, varint; the section then is their positions in Rice code and one sign bit each. Both sections start
    with the scale, f32.
    """

    codec_id = 5
    name = "ternary"
    unbiased = True

    def __init__(self, trits: NDArray[Any], scale: float) -> None:
        trits = np.asarray(trits).reshape(-1)
        _require(not trits.size or (trits.min() >= -1 and trits.max() <= 1), "trits are -1, 0 or +1")
        self.trits = trits.astype(np.int8)
        self.scale = float(np.float32(scale))

    @classmethod
    def quantise(cls, array: NDArray[Any]) -> Self:
        """Keep the signs and the mean magnitude of the non-zero values (STC: Sattler et al. 2019)."""
        x = np.asarray(array, np.float64).reshape(-1)
        trits = np.sign(x).astype(np.int8)
        kept = int(np.count_nonzero(trits))
        return cls(trits, float(np.abs(x).sum()) / kept if kept else 0.0)

    @property
    def k(self) -> int:
        return int(self.trits.size)

    def decode(self) -> NDArray[Any]:
        return self.trits.astype(np.float32) * np.float32(self.scale)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        if self.k == 0:
            return b"\x00", b""
        scale = np.array([self.scale], _F4).tobytes()
        dense = (self.k + 4) // 5
        positions = np.flatnonzero(self.trits)
        support = Support(positions, self.k)
        coded, stream = Rice().encode(support) if 2 * positions.size <= self.k else (b"", b"")
        signs = np.packbits(self.trits[positions] < 0, bitorder="little").tobytes()
        if coded and len(stream) + len(signs) + 1 < dense:
            return b"\x01" + coded + put_varint(support.k), scale + stream + signs
        digits = np.zeros((dense, 5), np.uint8)
        digits.reshape(-1)[: self.k] = self.trits % 3
        powers = np.array([1, 3, 9, 27, 81], np.uint8)
        return b"\x00", scale + (digits * powers).sum(axis=1, dtype=np.uint8).tobytes()

    @staticmethod
    def _params(params: bytes, k: int) -> tuple[int, bytes, int]:
        if params == b"\x00":
            return 0, b"", 0
        if len(params) < 3 or params[0] != 1:
            raise Corrupt(f"ternary has impossible parameters {params.hex()!r}")
        kept, end = _take_block(params, 2, "ternary")
        if end != len(params) or kept > k or k == 0:
            raise Corrupt(f"ternary has impossible parameters {params.hex()!r} for {k} values")
        return 1, params[1:2], kept

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        layout, rice, kept = cls._params(params, k)
        if layout == 0:
            size = 4 + (k + 4) // 5 if k else 0
            return size, size
        low, high = Rice().bounds(rice, k, kept)
        return 4 + low + (kept + 7) // 8, 4 + high + (kept + 7) // 8

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        layout, rice, kept = cls._params(params, k)
        if k == 0:
            return cls(np.zeros(0, np.int8), 0.0)
        scale = float(_scales(section, 1, "scale")[0])
        if layout == 0:
            packed = np.frombuffer(section[4:], np.uint8)
            if int(packed.max()) > 242:
                raise Corrupt("a byte of five trits is above 242")
            digits = _TRITS[packed].reshape(-1)
            if np.any(digits[k:]):
                raise Corrupt("padding trits are not zero")
            return cls(digits[:k], scale)
        split = len(section) - (kept + 7) // 8
        positions = Rice().decode(rice, section[4:split], k, kept)
        if kept & 7 and section[len(section) - 1] >> (kept & 7):
            raise Corrupt("padding bits after the signs are not zero")
        negative = np.unpackbits(np.frombuffer(section[split:], np.uint8), count=kept, bitorder="little")
        trits = np.zeros(k, np.int8)
        trits[positions] = 1 - 2 * negative.view(np.int8)
        return cls(trits, scale)


def _trit_table() -> NDArray[np.int8]:
    digits = np.arange(243)[:, None] // np.array([1, 3, 9, 27, 81]) % 3
    return np.where(digits == 2, -1, digits).astype(np.int8)


_TRITS = _trit_table()


class QsgdLevels(Values):
    """``norm * level / s`` per bucket (QSGD: Alistarh et al., NIPS 2017), the shorter of b bits and Elias-gamma.

    Parameters
    ----------
    levels : ndarray of int, shape (k,)
        Signed, ``|level| <= s``.
    s : int
        Number of levels, 1 .. 2**24.
    bucket : int
        Values per norm; 0 for one norm.
    norms : ndarray of float32, shape (ceil(k / bucket),)

    Parameters on the wire: packing u8 (0 fixed width, 1 Elias-gamma), s varint, bucket varint. Section: norms f32, then
    ``level + s`` in ``bit_length(2 s)`` bits each, or the zigzag level plus one in split Elias-gamma code.
    """

    codec_id = 6
    name = "qsgd"
    unbiased = True

    def __init__(self, levels: NDArray[Any], s: int, bucket: int, norms: NDArray[np.float32]) -> None:
        _require(
            1 <= s <= MAX_LEVELS and 0 <= bucket < 1 << 32,
            f"QSGD needs s in 1..2**24 and a bucket, got {s}, {bucket}",
        )
        levels = np.asarray(levels).reshape(-1)
        _require(not levels.size or (levels.min() >= -s and levels.max() <= s), f"levels are -{s}..{s}")
        self.levels = levels.astype(np.int32, copy=False)
        self.s, self.bucket = s, bucket
        self.norms = flat(np.atleast_1d(norms), "float32")
        count = _blocks(self.k, bucket)
        _require(self.norms.size == count, f"{self.k} levels in buckets of {bucket} need {count} norms")

    @classmethod
    def quantise(cls, array: NDArray[Any], s: int, bucket: int, uniforms: NDArray[np.float64]) -> Self:
        """Round ``s |x| / ||x||_2`` per bucket up or down at random, unbiased.

        ``uniforms`` are float64 in [0, 1), shape (k,). The norm is rounded up to float32, so that no level exceeds s.
        """
        x = np.asarray(array, np.float64).reshape(-1)
        exact = np.sqrt(_block_reduce(np.add, x * x, bucket))
        norms = _round_up(exact)
        unit = _spread(np.where(norms > 0, norms, 1).astype(np.float64), bucket, x.size)
        levels = np.minimum(np.floor(np.abs(x) / unit * s + uniforms), s).astype(np.int32)
        return cls(np.where(x < 0, -levels, levels), s, bucket, norms)

    @property
    def k(self) -> int:
        return int(self.levels.size)

    def decode(self) -> NDArray[Any]:
        # One exact product in float64 and one division, each correctly rounded: the same float32 everywhere.
        product = self.levels * _spread(self.norms.astype(np.float64), self.bucket, self.k)
        return (product / self.s).astype(np.float32)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        width = (2 * self.s).bit_length()
        zigzag = ((self.levels << 1) ^ (self.levels >> 31)).astype(np.uint32)
        gamma = gamma_size(zigzag) < packed_size(self.k, width)
        params = bytes((gamma,)) + put_varint(self.s) + put_varint(self.bucket)
        packed = pack_gamma(zigzag) if gamma else pack(self.levels + np.int32(self.s), width)
        return params, self.norms.tobytes() + packed

    @staticmethod
    def _params(params: bytes) -> tuple[int, int, int]:
        if len(params) < 3 or params[0] > 1:
            raise Corrupt(f"QSGD needs a packing 0 or 1, s and a bucket; found {params.hex()!r}")
        s, pos = _take_block(params, 1, "QSGD")
        bucket, end = _take_block(params, pos, "QSGD")
        if end != len(params) or not 1 <= s <= MAX_LEVELS or bucket >= 1 << 32:
            raise Corrupt(f"QSGD has impossible parameters {params.hex()!r}")
        return params[0], s, bucket

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        gamma, s, bucket = cls._params(params)
        norms = 4 * _blocks(k, bucket)
        fixed = packed_size(k, (2 * s).bit_length())
        # The encoder takes Elias-gamma only where it is shorter; one bit per value is its minimum.
        return (norms + (k + 7) // 8, norms + max(0, fixed - 1)) if gamma else (norms + fixed, norms + fixed)

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        gamma, s, bucket = cls._params(params)
        count = _blocks(k, bucket)
        norms = _scales(section, count, "norm")
        packed = section[4 * count :]
        if gamma:
            zigzag = unpack_gamma(packed, k, (2 * s + 1).bit_length() - 1).astype(np.int64)
            levels = (zigzag >> 1) ^ -(zigzag & 1)
        else:
            levels = unpack(packed, k, (2 * s).bit_length(), np.int32) - np.int32(s)
        if k and (int(levels.max()) > s or int(levels.min()) < -s):
            raise Corrupt(f"a QSGD level is outside -{s}..{s}")
        return cls(levels, s, bucket, norms)


VALUE_CODECS: Final[dict[int, type[Values]]] = {
    c.codec_id: c for c in (Raw, Fp16, Bf16, Uniform, SignScale, Ternary, QsgdLevels, Natural)
}
VALUE_BY_NAME: Final = {c.name: c for c in VALUE_CODECS.values()}
