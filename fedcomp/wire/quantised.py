"""Value codecs with few bits: uniform and sign with a scale per block, ones, and their common base.

Decoding is integer arithmetic and one correctly rounded product per value, so that every platform decodes the same
floats. Scales, norms and zero points must be finite, whatever the policy for values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, take_varint, unpack
from fedcomp.wire.errors import Corrupt, NonFinite, WireError
from fedcomp.wire.values import Values, flat

_F4 = np.dtype("<f4")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def block_count(k: int, block: int) -> int:
    """Return how many scales ``k`` values need; block 0 means one for all."""
    if k == 0:
        return 0
    return 1 if block == 0 else -(-k // block)


def spread(scales: NDArray[Any], block: int, k: int) -> NDArray[Any]:
    """Return the scale of every value (a broadcastable view when there is only one)."""
    return scales if scales.size == 1 else np.repeat(scales, block)[:k]


def block_reduce(function: np.ufunc, array: NDArray[Any], block: int) -> NDArray[Any]:
    """Return ``function`` reduced over each block of ``array``, shape (block_count(k, block),)."""
    if array.size == 0:
        return array[:0]
    starts = np.arange(0, array.size, block) if block else np.zeros(1, np.intp)
    return function.reduceat(array, starts)


def round_up(exact: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the nearest float32 that is not smaller."""
    near = exact.astype(np.float32)
    with np.errstate(over="ignore"):
        return np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)


def _round_down(exact: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the nearest float32 that is not larger."""
    with np.errstate(over="ignore"):
        near = exact.astype(np.float32)
        return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def take_scales(section: Buffer, count: int, what: str) -> NDArray[np.float32]:
    """Read ``count`` scales; raise NonFinite or Corrupt unless all are finite and >= 0."""
    scales = np.frombuffer(section[: 4 * count], _F4).astype(np.float32)
    if not np.isfinite(scales).all():
        raise NonFinite(f"a {what} is NaN or infinite")
    # A negative scale would be a second encoding of the same values, with all signs turned.
    if count and (scales < 0).any():
        raise Corrupt(f"a {what} is negative")
    return scales


def take_param(params: bytes, pos: int, what: str) -> tuple[int, int]:
    """Read a varint among a codec's parameters; return it and the position after it, or raise Corrupt."""
    try:
        return take_varint(params, pos, len(params))
    except WireError:
        raise Corrupt(f"parameters of {what} are cut short: {params.hex()!r}") from None


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``condition`` holds."""
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
        require(
            1 <= bits <= 16 and 0 <= block < 1 << 32,
            f"uniform needs bits in 1..16 and a block, got {bits}, {block}",
        )
        require(
            rounding in ("nearest", "stochastic"),
            f"rounding={rounding!r} is neither 'nearest' nor 'stochastic'",
        )
        codes = np.asarray(codes).reshape(-1)
        count = block_count(codes.size, block)
        require(
            np.size(scales) == count and np.size(zero_points) == count,
            f"{codes.size} values in blocks of {block} need {count} scales and zero points",
        )
        top = (1 << bits) - 1
        zeros = np.asarray(zero_points).reshape(-1)
        for part in (codes, zeros):
            require(not part.size or (part.min() >= 0 and part.max() <= top), f"codes of {bits} bits are 0..{top}")
        self.codes = codes.astype(np.uint16)
        self.bits, self.block, self.rounding = bits, block, rounding
        self.scales = flat(scales, "float32")
        self.zero_points = zeros.astype(np.uint16)

    @classmethod
    def quantise(
        cls, array: NDArray[Any], bits: int, block: int = 0, uniforms: NDArray[np.float64] | None = None
    ) -> Self:
        """Quantise between each block's minimum and maximum (0 included, so that 0.0 is exact).

        ``array`` is taken flat, as k finite values, in blocks of ``block`` (0: all in one).

        ``uniforms`` (float64 in [0, 1), shape (k,)) makes the rounding stochastic: unbiased from two bits on, as the
        scale is chosen so that both ends of the range are inside the codes. One bit holds one sign only; values of the
        other are cut to 0.

        Raises
        ------
        ConfigError
            For values of both signs so near the largest float32 that a code would overflow.
        """
        x = np.asarray(array, np.float64).reshape(-1)
        low = -np.minimum(block_reduce(np.minimum, x, block), 0.0)
        high = np.maximum(block_reduce(np.maximum, x, block), 0.0)
        top = (1 << bits) - 1
        # A block of zeros has no extent, and nothing may divide by it.
        extent = np.maximum(low + high, np.finfo(np.float64).tiny)
        # Where a block has values of both signs, each keeps at least one code. One bit has no room for that.
        zeros = np.clip(np.rint(low / extent * top), (low > 0) & (bits > 1), top - ((high > 0) & (bits > 1)))
        # The step that the wider side needs: a value beyond the outermost code would be cut, which biases stochastic
        # rounding.
        exact = np.maximum(low / np.maximum(zeros, 1), high / np.maximum(top - zeros, 1))
        scales = round_up(exact)
        # A receiver refuses scales whose outermost code overflows, used or not.
        reach = np.maximum(zeros, top - zeros)
        largest = _round_down(_FLOAT32_MAX / np.maximum(reach, 1))
        # Stepping down to the largest scale that fits moves the ends of the range by at most one step.
        if np.any(
            np.isfinite(exact) & (exact * (1.0 - 1.0 / np.maximum(reach, 1)) > 1.000001 * largest.astype(np.float64))
        ):
            raise ConfigError(
                f"values of both signs up to {np.max(np.abs(x)):.3g} are too large for uniform codes of {bits} bits: "
                "the outermost code would overflow float32; clip the values or send them raw"
            )
        scales = np.where(np.isfinite(exact), np.minimum(scales, largest), scales)
        step = np.where(scales > 0, scales, 1).astype(np.float64)
        y = x / spread(step, block, x.size)
        y = np.rint(y) if uniforms is None else np.floor(y + uniforms)
        y += spread(zeros, block, x.size)
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
        # Signed first: the difference of two unsigned numbers would wrap.
        steps = self.codes.astype(np.int32)
        steps -= spread(self.zero_points.astype(np.int32), self.block, self.k)
        out = steps.astype(np.float32)
        out *= spread(self.scales, self.block, self.k)
        return out

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        params = bytes((self.bits, self.rounding == "stochastic")) + put_varint(self.block)
        zeros = self.zero_points.astype("<u2").tobytes()
        return params, self.scales.tobytes() + zeros + pack(self.codes, self.bits)

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        return None  # how they were rounded is a note for the receiver

    @staticmethod
    def _params(params: bytes) -> tuple[int, int, int]:
        if len(params) < 3 or not 1 <= params[0] <= 16 or params[1] > 1:
            raise Corrupt(f"uniform needs bits 1..16, rounding 0 or 1, and a block; found {params.hex()!r}")
        block, end = take_param(params, 2, "uniform")
        if end != len(params) or block >= 1 << 32:
            raise Corrupt(f"uniform has impossible parameters {params.hex()!r}")
        return params[0], params[1], block

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        bits, _, block = cls._params(params)
        size = 6 * block_count(k, block) + packed_size(k, bits)
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        bits, rounding, block = cls._params(params)
        count = block_count(k, block)
        scales = take_scales(section, count, "scale")
        zeros = np.frombuffer(section[4 * count : 6 * count], "<u2").astype(np.uint16)
        top = (1 << bits) - 1
        if count and int(zeros.max()) > top:
            raise Corrupt(f"a zero point is not a code of {bits} bits")
        # Of the outermost code, used or not: no value of any section with these scales can overflow.
        reach = np.maximum(zeros, top - zeros).astype(np.float64) * scales
        if count and float(reach.max()) > _FLOAT32_MAX:
            raise NonFinite("a scale is so large that its codes overflow float32")
        codes = unpack(section[6 * count :], k, bits, np.uint16)
        return cls(codes, bits, block, scales, zeros, "stochastic" if rounding else "nearest")

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 16 * k + 24 * block_count(k, cls._params(params)[2])


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
        count = block_count(self.k, block)
        require(0 <= block < 1 << 32, f"block={block} is not a number of values")
        require(self.scales.size == count, f"{self.k} signs in blocks of {block} need {count} scales")

    @classmethod
    def quantise(cls, array: NDArray[Any], block: int = 0) -> Self:
        """Keep the sign (0.0 counts as positive) and the mean magnitude of each block, the least-squares scale."""
        x = np.asarray(array, np.float64).reshape(-1)
        sums = block_reduce(np.add, np.abs(x), block)
        members = np.full(sums.size, block or x.size, np.float64)
        if block and x.size:
            # The last block is shorter; divided by `block`, its mean would be too small.
            members[-1] = x.size - (sums.size - 1) * block
        # Of numbers beyond float32 the mean is its largest, as a receiver refuses infinity.
        means = np.minimum(sums / members, _FLOAT32_MAX)
        return cls(np.signbit(x) & (x != 0), means.astype(np.float32), block)

    @property
    def k(self) -> int:
        return int(self.negative.size)

    def decode(self) -> NDArray[Any]:
        out = np.empty(self.k, np.float32)
        out[...] = spread(self.scales, self.block, self.k)
        # The sign bit of a float32 as an integer: one pass, where a choice between two floats takes ten times as long.
        out.view(np.uint32)[...] |= self.negative.view(np.uint8).astype(np.uint32) << np.uint32(31)
        return out

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        bits = np.packbits(self.negative, bitorder="little").tobytes()
        return put_varint(self.block), self.scales.tobytes() + bits

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        return put_varint(form.get("block", 0))

    @classmethod
    def _params(cls, params: bytes) -> int:
        block, end = take_param(params, 0, cls.name)
        if end != len(params) or block >= 1 << 32:
            raise Corrupt(f"sign has impossible parameters {params.hex()!r}")
        return block

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        size = 4 * block_count(k, cls._params(params)) + (k + 7) // 8
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        block = cls._params(params)
        count = block_count(k, block)
        scales = take_scales(section, count, "scale")
        if k & 7 and section[len(section) - 1] >> (k & 7):
            raise Corrupt("padding bits after the signs are not zero")
        bits = np.unpackbits(np.frombuffer(section[4 * count :], np.uint8), count=k, bitorder="little")
        return cls(bits.view(np.bool_), scales, block)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 14 * k + 6 * block_count(k, cls._params(params))


class Ones(Values):
    """Every value is 1.0, so nothing travels but k: a sparse tensor of ones is a set of indices, a block or a vote.

    Parameters
    ----------
    k : int
        Number of values; ``0 <= k < 2**63``.

    Parameters on the wire: none. Section: empty.
    """

    codec_id = 12
    name = "ones"

    def __init__(self, k: int) -> None:
        require(0 <= k < 1 << 63, f"k={k} is not a number of values; expected 0 <= k < 2**63")
        self._k = int(k)

    @property
    def k(self) -> int:
        return self._k

    def decode(self) -> NDArray[Any]:
        return np.ones(self._k, np.float32)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        return b"", b""

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        if len(params):
            raise Corrupt(f"codec {cls.name!r} has no parameters, found {len(params)} bytes")
        return 0, 0

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        return cls(k)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 4 * k


class UnitSign(Values):
    """Every value is -1.0 or +1.0, one bit each: votes, whose length is nobody's choice.

    Parameters
    ----------
    negative : ndarray of bool, shape (k,)

    Parameters on the wire: none. Section: one bit per value, 1 for -1.0.
    """

    codec_id = 13
    name = "unit-sign"

    def __init__(self, negative: NDArray[np.bool_]) -> None:
        self.negative = np.ascontiguousarray(negative, np.bool_).reshape(-1)

    @property
    def k(self) -> int:
        return int(self.negative.size)

    def decode(self) -> NDArray[Any]:
        return np.where(self.negative, np.float32(-1.0), np.float32(1.0))

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        return b"", np.packbits(self.negative, bitorder="little").tobytes()

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        if len(params):
            raise Corrupt(f"codec {cls.name!r} has no parameters, found {len(params)} bytes")
        return (k + 7) // 8, (k + 7) // 8

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        if k & 7 and section[len(section) - 1] >> (k & 7):
            raise Corrupt("padding bits after the signs are not zero")
        return cls(np.unpackbits(np.frombuffer(section, np.uint8), count=k, bitorder="little").view(np.bool_))

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 6 * k
