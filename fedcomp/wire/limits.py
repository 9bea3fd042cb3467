"""The receiver's expectations and limits: dtypes, schema, resources."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from fedcomp.errors import ConfigError, nearest

DTYPES: dict[int, str] = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "int8",
    4: "int16",
    5: "int32",
    6: "int64",
    7: "uint8",
    8: "uint16",
    9: "uint32",
    10: "uint64",
    11: "bool",
}
"""Wire id of every dtype a tensor may have. Stored little-endian; bool is one byte, 0 or 1."""

DTYPE_IDS = {name: code for code, name in DTYPES.items()}
NUMPY_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in DTYPES.values()}
# In both byte orders: arrays of either may be given, and travel little-endian.
_NAMES = {order: name for name, dtype in NUMPY_DTYPES.items() for order in (dtype, dtype.newbyteorder())}
FLOATS = frozenset({"float16", "float32", "float64"})

MAX_NDIM = 8
MAX_SIZE = 1 << 62
"""Elements one tensor may claim; keeps every index sum inside int64."""


class Kind(IntEnum):
    """What the values of a tensor are."""

    DENSE = 0
    """Every element, in C order."""
    SPARSE = 1
    """Elements at ascending flat indices; the others are zero."""
    COEFFICIENTS = 2
    """Coefficients of a basis both ends hold; the shape is that of the tensor they stand for."""
    SHARED = 3
    """Elements at the indices of a support both ends hold."""


DENSE: Final = Kind.DENSE
SPARSE: Final = Kind.SPARSE
COEFFICIENTS: Final = Kind.COEFFICIENTS
SHARED: Final = Kind.SHARED

NonFinitePolicy = Literal["reject", "zero", "allow"]

_ALL_KINDS = frozenset(Kind)
_ENTRY_SLACK = 512
_FRAME_SLACK = 1 << 16
_VALUE_WORK = 40
"""Largest ``work_bytes`` per value of a value codec: QSGD and uniform with a scale for every value."""


def require_dtype(name: str) -> str:
    """Return ``name`` when it is a dtype of the format, else raise :class:`~fedcomp.errors.ConfigError`."""
    if name not in DTYPE_IDS:
        raise ConfigError(f"dtype {name!r} cannot travel in a frame{nearest(name, DTYPE_IDS)}")
    return name


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the format's name of ``dtype``; raise :class:`~fedcomp.errors.ConfigError` when it has none."""
    # numpy puts `dtype.name` together on every access, in the time of several operations on a small array.
    return _NAMES.get(dtype) or require_dtype(dtype.name)


def representable(shape: tuple[int, ...], size: int) -> bool:
    """Whether numpy can make an array of this shape, of ``size`` elements, given memory: the dimensions of an empty one
    count, too."""
    return 0 < size <= MAX_SIZE or (size == 0 and math.prod(d for d in shape if d) <= MAX_SIZE >> 3)


@dataclass(frozen=True)
class Expected:
    """One tensor the receiver expects.

    Parameters
    ----------
    name : str
        The tensor's name; a frame may leave it out (positional), but may not give another one.
    shape : tuple of int
        The full shape; sparse tensors, too, are described by the shape of the dense tensor they stand for.
    dtype : str
        One of :data:`DTYPES`.
    max_k : int, optional
        Largest number of values the tensor may carry; None allows as many as it has elements. A receiver that knows
        the density should set it: it bounds the work a hostile frame can cause.
    kinds : frozenset of Kind, optional
        Kinds the tensor may be of; None allows all four. A receiver that goes on to treat every tensor as dense or
        sparse must say so here: ``k`` coefficients, or values on a shared support, are not elements of the tensor.
    index_codecs, value_codecs : frozenset of str, optional
        Names of the codecs this tensor may use, within those of :class:`Limits`; None allows all of them. Index codecs
        concern sparse tensors; a complement needs its own name and that of the codec it wraps.

    Raises
    ------
    ConfigError
        For an impossible shape, an unknown dtype or kind, or an empty set, which no frame could satisfy.

    Examples
    --------
    >>> expected = Expected("w", (1000,), max_k=10, kinds=frozenset({SPARSE}))
    >>> expected.most_values, Limits.for_schema((expected,)).max_bytes_in
    (10, 66293)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    max_k: int | None = None
    kinds: frozenset[Kind] | None = None
    index_codecs: frozenset[str] | None = None
    value_codecs: frozenset[str] | None = None

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if len(self.shape) > MAX_NDIM or any(d < 0 for d in self.shape):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} needs 0..{MAX_NDIM} non-negative dimensions")
        if not representable(self.shape, self.size):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} is larger than any array")
        for what in ("kinds", "index_codecs", "value_codecs"):
            allowed = getattr(self, what)
            # A string is a collection, too: "rice" in place of {"rice"} would allow codecs named by its parts.
            if allowed is not None and (isinstance(allowed, str) or not len(allowed)):
                raise ConfigError(f"tensor {self.name!r}: {what}={allowed!r} needs a non-empty set, or None for all")
        if self.kinds is not None and not self.kinds <= _ALL_KINDS:
            raise ConfigError(f"tensor {self.name!r}: kinds={set(self.kinds)} are not members of Kind")

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def most_values(self) -> int:
        """Largest number of values a frame may carry for the tensor."""
        # `max_k` does not bind dense tensors: they carry all of their elements.
        if self.max_k is None or self.kinds is None or DENSE in self.kinds:
            return self.size
        return min(self.size, self.max_k)

    @property
    def most_indices(self) -> int:
        """Largest number of indices a frame may carry for the tensor."""
        if self.kinds is not None and SPARSE not in self.kinds:
            return 0
        return self.size if self.max_k is None else min(self.size, self.max_k)

    @cached_property
    def most_bytes_in(self) -> int:
        """Bytes of the longest entry and sections: raw values and indices, or a bitmap."""
        # Lossy codecs take up to 26 bits a value, in float16 tensors as well.
        width = max(4, NUMPY_DTYPES[self.dtype].itemsize)
        indices = 8 * self.most_indices + (self.size // 8 if self.most_indices else 0)
        return width * self.most_values + indices + _ENTRY_SLACK

    @cached_property
    def most_bytes_out(self) -> int:
        """Memory of the costliest honest frame, the sum of the costliest values and the costliest support."""
        n, k = self.size, self.most_indices
        # The costliest plain support is block-Rice: 30 bytes per index and the unary stream, at most a byte per element
        # and index. A seeded one draws the smaller side and may turn it into its complement; other complements stay
        # below that.
        few = min(k, n // 2)
        support = 30 * k + 48 * few + 2 * n + _ENTRY_SLACK if k else 0
        # Compressed sections are held besides, twice while zlib joins its pieces; nothing longer than raw is honest.
        return _VALUE_WORK * self.most_values + support + 2 * self.most_bytes_in


Schema = tuple[Expected, ...]
"""The tensors of a frame, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources a receiver is willing to spend on one frame.

    The defaults are for a receiver that knows nothing about the sender's tensors: models of up to 67 million elements,
    within 1 GiB. A receiver that knows the tensors passes a schema instead, whose limits follow from their sizes.

    Parameters
    ----------
    max_bytes_in : int
        Length of the frame.
    max_elements : int
        Sum of the sizes of all tensors, dense or not: what :meth:`~fedcomp.wire.Tensor.dense` of all of them would
        allocate, which a frame of a few bytes may ask for.
    max_bytes_out : int
        Memory that decoding may take, all tensors together: upper bounds, worked out from the table before anything is
        allocated, on values, indices, decompressed sections and whatever the codecs need on the way (see
        ``work_bytes`` of :class:`~fedcomp.wire.IndexCodec` and :class:`~fedcomp.wire.Values`). Not counted are buffers
        of a fixed size, about 8 MiB at most, and as much again inside zstd.
    max_tensors : int
        Entries of the tensor table.
    index_codecs, value_codecs, backends : frozenset of str, optional
        Names that are accepted; None accepts all that are built in (and, for back-ends, installed).
    non_finite : {"reject", "zero", "allow"}
        What happens to NaN and infinite values: raise :class:`~fedcomp.wire.NonFinite`, replace by zero and count
        them in ``Bundle.non_finite``, or pass them on. Parameters of value codecs must be finite in any case.
    max_abs : float, optional
        Cap on ``|value|``; a frame above it raises :class:`~fedcomp.wire.LimitExceeded`.
    """

    max_bytes_in: int = 1 << 28
    max_elements: int = 1 << 26
    max_bytes_out: int = 1 << 30
    max_tensors: int = 10_000
    index_codecs: frozenset[str] | None = None
    value_codecs: frozenset[str] | None = None
    backends: frozenset[str] | None = None
    non_finite: NonFinitePolicy = "reject"
    max_abs: float | None = None

    def __post_init__(self) -> None:
        if self.non_finite not in ("reject", "zero", "allow"):
            raise ConfigError(f"non_finite={self.non_finite!r}{nearest(self.non_finite, ('reject', 'zero', 'allow'))}")
        # Written this way round, so that NaN is refused as well.
        if self.max_abs is not None and not self.max_abs >= 0.0:
            raise ConfigError(f"max_abs={self.max_abs!r} must be a number >= 0 or None")

    @classmethod
    def for_schema(cls, schema: Iterable[Expected], *, non_finite: NonFinitePolicy = "reject") -> Limits:
        """Return the limits that fit any honest frame for ``schema`` and little more.

        Derived from the receiver's own layout, so that no figure of the frame decides how much memory is used. Honest
        is every frame this package's encoder makes for the schema, whatever codecs it is asked for, except two: the
        complement of a support that is not dense (``2 k <= n``), which ``index="auto"`` never takes, costs 16 and more
        bytes for each absent element; and parameters that make the sections longer than raw values and indices.

        Set ``max_k`` and ``kinds`` of the tensors: a receiver of sparse tensors of 1 % spends under 4 bytes per
        element, one that takes anything 120.
        """
        bytes_in, elements, bytes_out, count = _FRAME_SLACK, 0, 0, 0
        for tensor in schema:
            bytes_in += tensor.most_bytes_in
            elements += tensor.size
            bytes_out += tensor.most_bytes_out
            count += 1
        return cls(bytes_in, elements, bytes_out, count, non_finite=non_finite)
