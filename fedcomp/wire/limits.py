"""What a receiver expects and how much it is willing to handle: dtypes, schema, resource limits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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
FLOATS = frozenset({"float16", "float32", "float64"})

MAX_NDIM = 8
MAX_SIZE = 1 << 62
"""Elements one tensor may claim; keeps every index sum inside int64."""

NonFinitePolicy = Literal["reject", "zero", "allow"]

_ENTRY_SLACK = 512
_FRAME_SLACK = 1 << 16


def require_dtype(name: str) -> str:
    """Return ``name`` when it is a dtype of the format, else raise :class:`~fedcomp.errors.ConfigError`."""
    if name not in DTYPE_IDS:
        raise ConfigError(f"dtype {name!r} cannot travel in a frame{nearest(name, DTYPE_IDS)}")
    return name


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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    max_k: int | None = None

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if len(self.shape) > MAX_NDIM or any(d < 0 for d in self.shape):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} needs 0..{MAX_NDIM} non-negative dimensions")

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Schema = tuple[Expected, ...]
"""The tensors of a frame, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources a receiver is willing to spend on one frame.

    Parameters
    ----------
    max_bytes_in : int
        Length of the frame.
    max_elements : int
        Sum of the sizes of all tensors, dense or not.
    max_bytes_out : int
        Bytes of decoded values and int64 indices, all tensors together.
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
    max_elements: int = 1 << 28
    max_bytes_out: int = 1 << 31
    max_tensors: int = 10_000
    index_codecs: frozenset[str] | None = None
    value_codecs: frozenset[str] | None = None
    backends: frozenset[str] | None = None
    non_finite: NonFinitePolicy = "reject"
    max_abs: float | None = None

    def __post_init__(self) -> None:
        if self.non_finite not in ("reject", "zero", "allow"):
            raise ConfigError(f"non_finite={self.non_finite!r}{nearest(self.non_finite, ('reject', 'zero', 'allow'))}")
        if self.max_abs is not None and not self.max_abs >= 0.0:
            raise ConfigError(f"max_abs={self.max_abs!r} must be a number >= 0 or None")

    @classmethod
    def for_schema(cls, schema: Iterable[Expected], *, non_finite: NonFinitePolicy = "reject") -> Limits:
        """Return the limits that fit any honest frame for ``schema`` and little more.

        Derived from the receiver's own layout, so that no figure of the frame decides how much memory is used: at most
        every element as a sparse value with its int64 index.
        """
        tensors = tuple(schema)
        elements = sum(t.size for t in tensors)
        values = sum(t.size * max(4, NUMPY_DTYPES[t.dtype].itemsize) for t in tensors)
        sparse = sum(8 * (t.size if t.max_k is None else min(t.size, t.max_k)) for t in tensors)
        return cls(
            max_bytes_in=values + sparse + _ENTRY_SLACK * len(tensors) + _FRAME_SLACK,
            max_elements=elements,
            max_bytes_out=values + sparse,
            max_tensors=len(tensors),
            non_finite=non_finite,
        )
