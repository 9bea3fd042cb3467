"""Value codecs with a few integer levels, ternary and QSGD, and the table of all value codecs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.kernels import tiers
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, unpack
from fedcomp.wire.codebook import Codebook
from fedcomp.wire.entropy import shorter
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.gamma import gamma_size, pack_gamma, unpack_gamma
from fedcomp.wire.index import Support
from fedcomp.wire.modelled import Levels
from fedcomp.wire.planes import Planes
from fedcomp.wire.quantised import (
    Ones,
    SignScale,
    Uniform,
    UnitSign,
    block_count,
    block_reduce,
    require,
    round_up,
    spread,
    take_param,
    take_scales,
)
from fedcomp.wire.rangefloat import RangeFloat
from fedcomp.wire.rans import TOTAL, least_bytes, unpack_rans
from fedcomp.wire.residues import Residues
from fedcomp.wire.rice import Rice
from fedcomp.wire.values import Bf16, Fp16, Natural, Raw, Values, flat

# A float32 norm has 24 bits and a level 25 at most, so that their product is exact in float64.
MAX_LEVELS: Final = 1 << 24


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
        require(not trits.size or (trits.min() >= -1 and trits.max() <= 1), "trits are -1, 0 or +1")
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
        scale = np.array([self.scale], "<f4").tobytes()
        dense = (self.k + 4) // 5
        positions = np.flatnonzero(self.trits)
        support = Support(positions, self.k)
        # Where about half are sent, positions take a bit per element (Rice with b = 0 is a bitmap): with signs for more
        # than 0.6 of them, that is above the 1.6 bits of a packed trit.
        coded, stream = Rice().encode(support) if 5 * positions.size <= 3 * self.k else (b"", b"")
        signs = np.packbits(self.trits[positions] < 0, bitorder="little").tobytes()
        if coded and len(stream) + len(signs) + 1 < dense:
            return b"\x01" + coded + put_varint(support.k), scale + stream + signs
        # Five trits are 243 of the 256 values of a byte: 1 % above log2(3) bits each. numpy's remainder makes 2 of -1.
        digits = np.zeros((dense, 5), np.uint8)
        digits.reshape(-1)[: self.k] = self.trits % 3
        powers = np.array([1, 3, 9, 27, 81], np.uint8)
        return b"\x00", scale + (digits * powers).sum(axis=1, dtype=np.uint8).tobytes()

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        return None

    @staticmethod
    def _params(params: bytes, k: int) -> tuple[int, bytes, int]:
        if params == b"\x00":
            return 0, b"", 0
        if len(params) < 3 or params[0] != 1:
            raise Corrupt(f"ternary has impossible parameters {params.hex()!r}")
        kept, end = take_param(params, 2, "ternary")
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
        scale = float(take_scales(section, 1, "scale")[0])
        if layout == 0:
            packed = np.frombuffer(section[4:], np.uint8)
            # Such a byte is no group of five trits, and would be looked up beyond the end of the table.
            if int(packed.max()) > 242:
                raise Corrupt("a byte of five trits is above 242")
            digits = _TRITS[packed].reshape(-1)
            # The last byte holds up to four trits that nobody reads.
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

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        layout, rice, kept = cls._params(params, k)
        if layout == 0:
            return 12 * k
        stream = size - 4 - (kept + 7) // 8
        return 12 * k + 3 * kept + Rice().work_bytes(rice, k, kept, stream)


_TRITS = ((np.arange(243)[:, None] // np.array([1, 3, 9, 27, 81]) % 3 + 1) % 3 - 1).astype(np.int8)


class QsgdLevels(Values):
    """``norm * level / s`` per bucket (QSGD: Alistarh et al., NIPS 2017), in b bits, Elias-gamma code or entropy-coded.

    Parameters
    ----------
    levels : ndarray of int, shape (k,)
        Signed, ``|level| <= s``.
    s : int
        Number of levels, 1 .. 2**24.
    bucket : int
        Values per norm; 0 for one norm.
    norms : ndarray of float32, shape (ceil(k / bucket),)
    fixed : bool
        Take b bits per value in any case: a length that reveals nothing of the levels, and parameters known beforehand.

    Parameters on the wire: packing u8 (0 fixed width, 1 Elias-gamma, 2 rANS), s varint, bucket varint. Section: norms
    f32, then ``level + s`` in ``bit_length(2 s)`` bits each or as a stream of rANS, or the zigzag level plus one in
    split Elias-gamma code.
    """

    codec_id = 6
    name = "qsgd"
    unbiased = True

    def __init__(
        self, levels: NDArray[Any], s: int, bucket: int, norms: NDArray[np.float32], fixed: bool = False
    ) -> None:
        require(
            1 <= s <= MAX_LEVELS and 0 <= bucket < 1 << 32,
            f"QSGD needs s in 1..2**24 and a bucket, got {s}, {bucket}",
        )
        levels = np.asarray(levels).reshape(-1)
        require(not levels.size or (levels.min() >= -s and levels.max() <= s), f"levels are -{s}..{s}")
        self.levels = levels.astype(_level_type(s), copy=False)
        self.s, self.bucket, self.fixed = s, bucket, fixed
        self.norms = flat(np.atleast_1d(norms), "float32")
        count = block_count(self.k, bucket)
        require(self.norms.size == count, f"{self.k} levels in buckets of {bucket} need {count} norms")

    @classmethod
    def quantise(cls, array: NDArray[Any], s: int, bucket: int, uniforms: NDArray[np.float64]) -> Self:
        """Round ``s |x| / ||x||_2`` per bucket up or down at random, unbiased.

        ``uniforms`` are float64 in [0, 1), shape (k,). The norm is rounded up to float32, so that no level exceeds s.
        """
        x = np.asarray(array, np.float64).reshape(-1)
        exact = np.sqrt(block_reduce(np.add, x * x, bucket))
        norms = round_up(exact)
        # A bucket of zeros has norm 0: divided by 1, its levels are 0.
        unit = spread(np.where(norms > 0, norms, 1).astype(np.float64), bucket, x.size)
        # The norm is no smaller than any value and uniforms are below 1: only float64's rounding of the sum can reach s
        # + 1.
        levels = np.minimum(np.floor(np.abs(x) / unit * s + uniforms), s).astype(np.int32)
        return cls(np.where(x < 0, -levels, levels), s, bucket, norms)

    @classmethod
    def nearest(cls, array: NDArray[Any], s: int, bucket: int) -> Self:
        """Round ``s |x| / max |x|`` per bucket to the nearest integer, halves to the even one.

        ``array`` is taken flat, as k finite float32 values. The largest magnitude of a bucket stands for its norm and
        arrives exactly.
        """
        x = np.asarray(array, np.float32).reshape(-1)
        norms = block_reduce(np.maximum, np.abs(x), bucket)
        unit = spread(np.where(norms > 0, norms, 1).astype(np.float64), bucket, x.size)
        return cls(np.rint(x / unit * s).astype(np.int32), s, bucket, norms)

    @property
    def k(self) -> int:
        return int(self.levels.size)

    def decode(self) -> NDArray[Any]:
        return tiers.ops("auto", self.k).levels(self.levels, self.norms, self.bucket, self.s)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        width = (2 * self.s).bit_length()
        fixed = packed_size(self.k, width)
        packing, packed = _FIELDS, None
        # Gamma code suits one distribution of the levels; where there are enough to learn theirs, a stream of rANS is
        # within some per cent of what they need.
        raised = np.add(self.levels, self.s, dtype=self.levels.dtype)
        if not self.fixed and 2 * self.s < TOTAL and (packed := shorter(raised, fixed)):
            packing = _RANS
        elif not self.fixed and gamma_size(zigzag := _zigzag(self.levels)) < fixed:
            packing, packed = _GAMMA, pack_gamma(zigzag)
        params = bytes((packing,)) + put_varint(self.s) + put_varint(self.bucket)
        return params, self.norms.tobytes() + (packed or pack(raised, width))

    def plain(self) -> Values:
        return type(self)(self.levels, self.s, self.bucket, self.norms, fixed=True)

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        fixed = b"\x00" + put_varint(form["levels"]) + put_varint(form["bucket"])
        return fixed if form.get("fixed") else None

    @staticmethod
    def _params(params: bytes) -> tuple[int, int, int]:
        if len(params) < 3 or params[0] > _RANS:
            raise Corrupt(f"QSGD needs a packing 0 to 2, s and a bucket; found {params.hex()!r}")
        s, pos = take_param(params, 1, "QSGD")
        bucket, end = take_param(params, pos, "QSGD")
        if end != len(params) or not 1 <= s <= MAX_LEVELS or bucket >= 1 << 32:
            raise Corrupt(f"QSGD has impossible parameters {params.hex()!r}")
        return params[0], s, bucket

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        packing, s, bucket = cls._params(params)
        norms = 4 * block_count(k, bucket)
        fixed = packed_size(k, (2 * s).bit_length())
        if packing == _FIELDS:
            return norms + fixed, norms + fixed
        if packing == _RANS and (k == 0 or 2 * s >= TOTAL):
            raise Corrupt(f"{k} QSGD levels of {s} cannot be entropy-coded")
        # The encoder takes the others only where they are shorter; one bit per value is the minimum of Elias-gamma.
        least, most = (k + 7) // 8 if packing == _GAMMA else least_bytes(k), max(0, fixed - 1)
        return norms + min(least, most), norms + most

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        packing, s, bucket = cls._params(params)
        count = block_count(k, bucket)
        norms = take_scales(section, count, "norm")
        packed = section[4 * count :]
        if packing == _RANS:
            # Numbers below 4096, which are the same as int16.
            levels: NDArray[Any] = unpack_rans(packed, k).view(np.int16)
            levels -= np.int16(s)
        elif packing == _GAMMA:
            levels = _from_zigzag(unpack_gamma(packed, k, (2 * s + 1).bit_length() - 1).view(np.int32))
        else:
            levels = unpack(packed, k, (2 * s).bit_length(), _level_type(s))
            levels -= _level_type(s)(s)
        try:
            return cls(levels, s, bucket, norms)
        except ConfigError as error:
            # Of the parameters and norms nothing is left to check: a level is not in its range.
            raise Corrupt(f"a QSGD level is outside -{s}..{s}") from error

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 24 * k + 2 * size + 16 * block_count(k, cls._params(params)[2])


_FIELDS, _GAMMA, _RANS = range(3)


def _level_type(s: int) -> type[np.int16] | type[np.int32]:
    """Return the type of levels up to ``s``. Unsigned fields fit twice as many levels, which can halve the memory."""
    return np.int16 if s < 1 << 14 else np.int32


def _zigzag(levels: NDArray[Any]) -> NDArray[np.uint32]:
    """Return 0, 1, 2, 3, ... for 0, -1, 1, -2, ...: Elias-gamma takes numbers >= 0 and is short for small ones."""
    return ((levels << 1) ^ (levels >> 31)).astype(np.uint32)


def _from_zigzag(zigzag: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return 0, -1, 1, -2, ... for 0, 1, 2, 3, ...; overwrites its argument."""
    levels = zigzag >> 1
    zigzag &= 1
    np.negative(zigzag, out=zigzag)
    levels ^= zigzag
    return levels


VALUE_CODECS: Final[dict[int, type[Values]]] = {
    c.codec_id: c
    for c in (
        Raw,
        Fp16,
        Bf16,
        Uniform,
        SignScale,
        Ternary,
        QsgdLevels,
        RangeFloat,
        Codebook,
        Natural,
        Ones,
        UnitSign,
        Residues,
        Levels,
        Planes,
    )
}
VALUE_BY_NAME: Final = {c.name: c for c in VALUE_CODECS.values()}
