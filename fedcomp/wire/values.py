"""Value codecs: the wire format of the values that are sent. This module: the interface and the floating-point ones.

A :class:`Values` object holds values as they travel, already quantised: the codecs above decide how to quantise,
this package writes the result down. Quantising constructors are given where there is one canonical way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.bits import Buffer, pack, packed_size, shuffle, unpack, unshuffle
from fedcomp.wire.entropy import CODED, coded_bounds, shorter
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.limits import DTYPE_IDS, FLOATS, NUMPY_DTYPES, dtype_name
from fedcomp.wire.rans import unpack_rans

# Known to the design and not written by anything yet: an id that is reserved never gets another meaning.
RESERVED_VALUES: Final = {9: "pca-coefficients", 10: "spectrum"}

_CHUNK = 1 << 18
_SHUFFLED = b"\x01"


class Values(ABC):
    """``k`` values in the form in which they travel.

    Attributes
    ----------
    codec_id, name
        The byte on the wire and the name in this library.
    lossy : bool
        Whether the form cannot hold every value of its dtype.
    unbiased : bool
        Whether the canonical quantiser of this form is (with stochastic rounding, where it has it).
    commutes_with_sum : bool
        Whether encoded values of several senders may be added before decoding.
    needs : tuple of str
        State both ends must share.
    """

    codec_id: ClassVar[int]
    name: ClassVar[str]
    lossy: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    commutes_with_sum: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def k(self) -> int:
        """Number of values."""

    @property
    def dtype(self) -> str:
        """The dtype :meth:`decode` returns."""
        return "float32"

    @abstractmethod
    def decode(self) -> NDArray[Any]:
        """Return the values, shape ``(k,)``, in :attr:`dtype`."""

    kept: NDArray[Any] | None = None

    def decoded(self, *, keep: bool = False) -> NDArray[Any]:
        """Return what :meth:`decode` does, or what an earlier call kept of it; ``keep`` it for the next call.

        What is kept is not to be written to; what is not kept any longer is the caller's. :attr:`kept` may be set to
        None to give the memory back.
        """
        values = self.decode() if self.kept is None else self.kept
        self.kept = values if keep else None
        return values

    @abstractmethod
    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        """Return parameters and section; ``shuffled`` asks for a form that suits a byte compressor, if there is one."""

    def plain(self) -> Values:
        """Return the same values in the form whose length and parameters do not depend on what they are, if any is."""
        return self

    @classmethod
    @abstractmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        """Return the least and largest possible length of the section; raise Corrupt for impossible parameters."""

    @classmethod
    @abstractmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        """Read the values back; ``len(section)`` is within :meth:`bounds`, everything else is checked here."""

    @classmethod
    @abstractmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        """Return an upper bound on the bytes allocated for values held and decoded once.

        That is :meth:`unpack` and what it returns, counting or replacing non-finite values, and :meth:`decode`; the
        section itself and buffers of a fixed size are not counted. ``params`` have passed :meth:`bounds`.
        """

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        """Return the parameters of all values of one ``form`` (:func:`fedcomp.wire.longest` says of what); None where
        they follow from the values."""
        return b""

    def held_bytes(self) -> int:
        """Return the bytes of memory that these values hold beside the section they were read from."""
        return sum(owned(array) for array in vars(self).values() if isinstance(array, np.ndarray))

    def count_non_finite(self) -> int:
        """Return how many decoded values are NaN or infinite."""
        return 0

    def zero_non_finite(self) -> Values:
        """Return the same values with 0 in place of NaN and infinity."""
        return self

    def size_bits(self) -> int:
        """Return the exact size of the uncompressed section, in bits."""
        return 8 * len(self.pack()[1])

    @classmethod
    def accepts(cls, dtype: str) -> bool:
        """Whether a tensor of this dtype may carry values of this form."""
        return dtype in FLOATS


def owned(array: NDArray[Any]) -> int:
    """Return the bytes of memory behind ``array`` if it is an array's own, 0 if it is that of a frame."""
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return int(base.nbytes) if base.base is None else 0


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield views of a flat array that are small enough for temporaries not to matter."""
    for start in range(0, array.size, _CHUNK):
        yield array[start : start + _CHUNK]


def not_finite(array: NDArray[Any], dtype: type[Any] | None = None) -> int:
    """Return how many numbers of a flat array are NaN or infinite, as they are or as a ``dtype``."""
    found = 0
    for part in chunks(array):
        found += part.size - int(np.count_nonzero(np.isfinite(part if dtype is None else part.astype(dtype))))
    return found


def flat(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``array`` flat, contiguous and little-endian in ``dtype``, without a copy where it already is."""
    return np.ascontiguousarray(array, NUMPY_DTYPES[dtype]).reshape(-1)


def _shuffle_flag(name: str, params: bytes) -> bool:
    if params not in (b"", _SHUFFLED):
        raise Corrupt(f"codec {name!r} knows no parameters but 01 (shuffled), found {params.hex()!r}")
    return len(params) == 1


def _view(params: bytes, section: Buffer, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the section as a read-only array: a view if alignment permits, otherwise an aligned copy."""
    if params:
        array = unshuffle(section, dtype)
    else:
        array = np.frombuffer(section, dtype)
        if not array.flags.aligned:
            array = array.copy()
    # A view of bytes cannot be written to; neither can a copy, so that callers see no difference between the two.
    array.flags.writeable = False
    return array


class Raw(Values):
    """The values themselves, any dtype of the format. Parameters on the wire: none, or 01 when byte-shuffled.

    Parameters
    ----------
    array : ndarray
        Taken flat; not copied when it is contiguous.
    """

    codec_id = 0
    name = "raw"
    lossy = False
    unbiased = True
    commutes_with_sum = True

    def __init__(self, array: NDArray[Any]) -> None:
        array = np.asarray(array)
        self._dtype = dtype_name(array.dtype)
        self.array = flat(array, self._dtype)

    @property
    def k(self) -> int:
        return int(self.array.size)

    @property
    def dtype(self) -> str:
        return self._dtype

    def decode(self) -> NDArray[Any]:
        return self.array

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        if shuffled and self.array.itemsize > 1:
            return _SHUFFLED, shuffle(self.array)
        # A view: a dense model is joined into the frame without a copy in between.
        return b"", self.array.view(np.uint8).data if self.k else b""

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        _shuffle_flag(cls.name, params)
        size = k * NUMPY_DTYPES[dtype].itemsize
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        if dtype == "bool":
            array = _view(params, section, np.dtype(np.uint8))
            # numpy takes any byte for a bool, and but only 0 and 1 behave as one.
            if k and int(array.max()) > 1:
                raise Corrupt("a boolean value is neither 0 nor 1")
            array = array.view(np.bool_)
        else:
            array = _view(params, section, NUMPY_DTYPES[dtype])
        return cls(array)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        # A shuffled or misaligned section is copied, and zeroing copies once more with masks of a byte per value.
        return (2 * NUMPY_DTYPES[dtype].itemsize + 2) * k

    @classmethod
    def accepts(cls, dtype: str) -> bool:
        return dtype in DTYPE_IDS

    def count_non_finite(self) -> int:
        return not_finite(self.array) if self._dtype in FLOATS else 0

    def zero_non_finite(self) -> Values:
        return type(self)(np.nan_to_num(self.array, nan=0.0, posinf=0.0, neginf=0.0))


class _Words(Values):
    """Values of two bytes, as stored. Parameters on the wire: none, or 01 if byte-shuffled."""

    stored: ClassVar[str]
    work: ClassVar[int]
    """Bytes of memory that decoding a value takes."""

    def __init__(self, words: NDArray[Any]) -> None:
        self.words = flat(words, self.stored)

    @property
    def k(self) -> int:
        return int(self.words.size)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        return (_SHUFFLED, shuffle(self.words)) if shuffled else (b"", self.words.tobytes())

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        _shuffle_flag(cls.name, params)
        return 2 * k, 2 * k

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        return cls(_view(params, section, NUMPY_DTYPES[cls.stored]))

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return cls.work * k


class Fp16(_Words):
    """IEEE binary16, rounded to nearest even.

    Parameters
    ----------
    array : ndarray
        float16 is taken as it is; wider floats are rounded, and magnitudes above 65504 become 65504 (an overflow to
        infinity would make the receiver refuse the frame).
    """

    codec_id = 1
    name = "fp16"
    stored = "float16"
    work = 8

    def __init__(self, array: NDArray[Any]) -> None:
        array = np.asarray(array)
        if array.dtype != np.float16:
            # Clipping keeps NaN, and infinity stays infinity: a diverged update must not look finite.
            clipped = np.where(np.isinf(array), array, np.clip(array, -65504.0, 65504.0))
            array = clipped.astype(np.float16)
        super().__init__(array)

    def decode(self) -> NDArray[Any]:
        return self.words.astype(np.float32)

    def count_non_finite(self) -> int:
        return not_finite(self.words)

    def zero_non_finite(self) -> Values:
        return type(self)(np.nan_to_num(self.words, nan=0.0, posinf=0.0, neginf=0.0))


class Bf16(_Words):
    """The upper half of float32, rounded to nearest even.

    Parameters
    ----------
    array : ndarray
        Floats; uint16 is taken as the stored bit patterns.
    """

    codec_id = 2
    name = "bf16"
    stored = "uint16"
    work = 10

    def __init__(self, array: NDArray[Any]) -> None:
        array = np.asarray(array)
        if array.dtype != np.uint16:
            word = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
            # Adding 0x7FFF plus the lowest kept bit and then cutting rounds to nearest, ties to even.
            finite = (word & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
            rounded = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
            # Values that would round to infinity stay the largest finite number; NaN stays NaN.
            overflow = finite & ((rounded & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
            rounded = np.where(finite & ~overflow, rounded, word)
            # A NaN whose payload lies in the lower half only would be cut to infinity; the quiet bit keeps it NaN.
            quiet = np.where(~finite & ((word & np.uint32(0x007FFFFF)) != 0), np.uint32(0x400000), np.uint32(0))
            array = ((rounded | quiet) >> np.uint32(16)).astype(np.uint16)
        super().__init__(array)

    def decode(self) -> NDArray[Any]:
        return (self.words.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def _non_finite(self) -> NDArray[np.bool_]:
        return (self.words & np.uint16(0x7F80)) == np.uint16(0x7F80)

    def count_non_finite(self) -> int:
        return int(np.count_nonzero(self._non_finite()))

    def zero_non_finite(self) -> Values:
        return type(self)(np.where(self._non_finite(), np.uint16(0), self.words))


class Natural(Values):
    """Sign and exponent only, nine bits per value (natural compression: Horváth et al. 2019, arXiv:1905.10988).

    Parameters
    ----------
    codes : ndarray of uint16, shape (k,)
        ``sign << 8 | exponent`` with the biased exponent of float32; exponent 0 is zero.
    fixed : bool
        Take nine bits per value in any case.

    Parameters on the wire: none, or 01 for entropy-coded. Section: the codes as fields, or as a stream of rANS.
    """

    codec_id = 11
    name = "natural"
    unbiased = True

    def __init__(self, codes: NDArray[Any], fixed: bool = False) -> None:
        self.codes = flat(codes, "uint16")
        self.fixed = fixed
        if self.k and int(self.codes.max()) > 0x1FF:
            raise ConfigError("natural codes have nine bits: sign << 8 | exponent")

    @classmethod
    def quantise(cls, array: NDArray[Any], uniforms: NDArray[np.float64] | None = None) -> Self:
        """Round every value to a power of two.

        Parameters
        ----------
        array : ndarray of float32
            Subnormal values become zero, which alone is biased (below 1.2e-38).
        uniforms : ndarray of float64 in [0, 1), shape (k,), optional
            Random numbers of the unbiased rounding: up with probability ``|x| / 2**floor(log2 |x|) - 1``. Without them
            the nearer power is taken (ties up), deterministic and biased.
        """
        word = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
        exponent = (word >> np.uint32(23)) & np.uint32(0xFF)
        fraction = (word & np.uint32(0x7FFFFF)).astype(np.float64) * 2.0**-23
        # Uniforms are below 1, so that a power of two, whose fraction is 0, never moves.
        threshold = np.float64(0.5) if uniforms is None else 1.0 - uniforms
        up = fraction >= threshold
        # Zero and subnormals stay zero, and the largest power of two must not round up to infinity.
        exponent = exponent + (up & (exponent > 0) & (exponent < 254))
        return cls(((word >> np.uint32(31)) << np.uint32(8) | exponent).astype(np.uint16))

    @property
    def k(self) -> int:
        return int(self.codes.size)

    def decode(self) -> NDArray[Any]:
        # Sign and exponent are the upper nine bits of a float32, in this order.
        return np.left_shift(self.codes, 23, dtype=np.uint32).view(np.float32)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        if not self.fixed and (stream := shorter(self.codes, packed_size(self.k, 9))) is not None:
            return CODED, stream
        return b"", pack(self.codes, 9)

    def plain(self) -> Values:
        return type(self)(self.codes, fixed=True)

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        return coded_bounds(cls.name, params, k, packed_size(k, 9))

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        codes = unpack_rans(section, k) if params else unpack(section, k, 9, np.uint16)
        if params and int(codes.max()) > 0x1FF:
            raise Corrupt("a natural code has more than nine bits")
        return cls(codes)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 20 * k + 2 * size

    def count_non_finite(self) -> int:
        exponent = np.uint16(0xFF)
        return sum(int(np.count_nonzero((codes & exponent) == exponent)) for codes in chunks(self.codes))

    def zero_non_finite(self) -> Values:
        return type(self)(np.where((self.codes & np.uint16(0xFF)) == np.uint16(0xFF), np.uint16(0), self.codes))
