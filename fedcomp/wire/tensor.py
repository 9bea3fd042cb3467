"""The contents of a frame: dense or sparse tensors with their values in wire format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.backends import BACKEND_IDS
from fedcomp.wire.choose import require_index
from fedcomp.wire.index import Indices
from fedcomp.wire.limits import (
    COEFFICIENTS,
    DENSE,
    MAX_NDIM,
    SHARED,
    SPARSE,
    Kind,
    representable,
    require_dtype,
)
from fedcomp.wire.support import SCATTERED, Seeded, SharedSupport
from fedcomp.wire.values import Raw, Values, owned


# No generated __eq__: it would compare arrays, which have no single truth value.
@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a frame, before encoding or after decoding.

    Parameters
    ----------
    values : Values
        The ``k`` values in the form in which they travel.
    shape : tuple of int
        Shape of the tensor they stand for; at most eight dimensions.
    name : str
        At most 255 bytes of UTF-8; empty when both ends know the order.
    dtype : str
        Dtype of the tensor, see :data:`fedcomp.wire.DTYPES`. Lossless values have it; lossy ones decode to float32.
    kind : Kind
    indices : ndarray of int64, shape (k,), optional
        Strictly ascending flat indices of a sparse tensor. None for dense tensors and coefficients, and for seeded and
        shared supports whose indices were not worked out.
    index : str, Seeded or SharedSupport
        The index codec: "auto", a name (see :data:`fedcomp.wire.PLAIN`), ``"complement:<name>"``, ``"bins:<length>"``
        for few indices in every bin of ``length`` consecutive elements, or ``"auto+bins:<length>"`` for the shorter of
        that and auto. After decoding, the one found in the frame.
    backend : {"none", "zlib", "zstd", "auto"}
        Byte compressor tried on both sections and kept where it shortens one. Its output is the same for the same input
        and the same version of the compressor only.
    """

    values: Values
    shape: tuple[int, ...]
    name: str = ""
    dtype: str = "float32"
    kind: Kind = DENSE
    indices: Indices | None = field(default=None, repr=False)
    index: str | Seeded | SharedSupport = "auto"
    backend: str = "none"

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        if len(self.shape) > MAX_NDIM or min(self.shape, default=0) < 0:
            raise self._refusal(f"shape {self.shape} needs 0..{MAX_NDIM} non-negative dimensions")
        size = self.size
        if not representable(self.shape, size):
            raise self._refusal(f"shape {self.shape} is larger than any array; at most 2**62 elements are allowed")
        if len(self.name.encode()) > 255:
            raise self._refusal("a name has at most 255 bytes of UTF-8")
        if not self.values.accepts(self.dtype) or (not self.values.lossy and self.values.dtype != self.dtype):
            raise self._refusal(f"{self.values.name} values of {self.values.dtype} cannot fill a {self.dtype} tensor")
        if self.backend not in BACKEND_IDS and self.backend != "auto":
            raise self._refusal(f"back-end {self.backend!r} is not one of {', '.join(BACKEND_IDS)}, auto")
        self._check_support(size)

    def _check_support(self, size: int) -> None:
        k, kind = self.values.k, self.kind
        if kind is DENSE and k != size:
            raise self._refusal(f"a dense tensor of shape {self.shape} needs {size} values, got {k}")
        if k > size:
            raise self._refusal(f"{k} values do not fit shape {self.shape}")
        if kind is SHARED and not isinstance(self.index, SharedSupport):
            raise self._refusal("a tensor on a shared support needs index=SharedSupport(id)")
        if kind is not SHARED and isinstance(self.index, SharedSupport):
            raise self._refusal("index=SharedSupport(id) needs kind=SHARED")
        if (kind is DENSE or kind is COEFFICIENTS) and self.indices is not None:
            raise self._refusal("only sparse tensors have indices; pass kind=SPARSE")
        if kind is SPARSE and isinstance(self.index, str):
            require_index(self.index)
            if self.indices is None or self.indices.shape != (k,):
                raise self._refusal(f"{k} sparse values need {k} indices")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"tensor {self.name!r}: {why}")

    @property
    def size(self) -> int:
        """Number of elements of the tensor, sent or not."""
        return math.prod(self.shape)

    def dense(self) -> NDArray[Any]:
        """Return the tensor in full, in its own shape and dtype; zeros where nothing was sent.

        A dense raw tensor is returned as a read-only view of the frame. Receivers of many sparse frames should add
        ``values.decode()`` at ``indices`` into one buffer instead.

        Raises
        ------
        ConfigError
            For coefficients, which only their basis turns into a tensor, for an unresolved shared support, and for a
            sparse tensor of more bytes than an array can have.
        """
        if self.kind is COEFFICIENTS:
            raise ConfigError(f"tensor {self.name!r} holds coefficients; expand them with their basis")
        # A few bytes can claim such a tensor, with no values at all; numpy would raise an error of its own.
        if self.size * np.dtype(self.dtype).itemsize >= 1 << 63:
            raise ConfigError(f"tensor {self.name!r} of {self.size} elements is too large to be dense")
        # Lossy values are float32 and may exceed float16. The decoder has refused or zeroed those, unless it was told
        # not to.
        with np.errstate(over="ignore"):
            values = self.values.decode().astype(self.dtype, copy=False)
        if self.kind is DENSE:
            return values.reshape(self.shape)
        indices = self.indices
        if indices is None and isinstance(self.index, Seeded):
            indices = self.index.indices(self.size, self.values.k)
        if indices is None:
            raise ConfigError(f"tensor {self.name!r} lies on a shared support; pass it to decode(supports=...)")
        out = np.zeros(self.size, self.dtype)
        out[indices] = values
        return out.reshape(self.shape)


class FrameSizes(NamedTuple):
    """Sizes of the parts of a frame, in bytes.

    Attributes
    ----------
    frame : int
        All of it.
    tensors : tuple of int
        Each tensor's entry in the table and its sections, in order.
    """

    frame: int
    tensors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Bundle:
    """A decoded frame.

    Attributes
    ----------
    tensors : tuple of Tensor
        In the order of the frame.
    flags : int
        Bit 0: values are differences to ``BASE_ROUND``; bit 1: a basis is needed; bits 2..7 are free for applications.
    tlvs : tuple of (int, bytes)
        Type and content of every optional field, in order; unknown types below 128 included, padding not.
    non_finite : int
        Values that were NaN or infinite and are 0 now (policy "zero").
    sizes : FrameSizes or None
        Sizes of the decoded frame; None for a bundle made in another way.
    """

    tensors: tuple[Tensor, ...]
    flags: int = 0
    tlvs: tuple[tuple[int, bytes], ...] = ()
    non_finite: int = 0
    sizes: FrameSizes | None = None

    def forget(self) -> None:
        """Keep no decoded values."""
        for tensor in self.tensors:
            tensor.values.kept = None

    def held_bytes(self) -> int:
        """Return the bytes of memory that the tensors hold beside the frame, of which raw values are views."""
        return sum(t.values.held_bytes() + (0 if t.indices is None else owned(t.indices)) for t in self.tensors)

    def tlv(self, kind: int) -> bytes | None:
        """Return the first optional field of this type, or None."""
        # Types may repeat in a frame: the first one counts, for every receiver.
        return next((content for t, content in self.tlvs if t == kind), None)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, position: int) -> Tensor:
        return self.tensors[position]


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(d) for d in shape)


def dense(array: NDArray[Any], name: str = "", *, backend: str = "none") -> Tensor:
    """Return a dense tensor that carries ``array``, of any shape and dtype of the format, exactly.

    Raises
    ------
    ConfigError
        For a dtype that cannot travel, more than eight dimensions, or a name of more than 255 bytes.

    Examples
    --------
    >>> dense(np.float32([[1, 2], [3, 4]]), "w").shape
    (2, 2)
    """
    array = np.asarray(array)
    values = Raw(array)
    return Tensor(values, tuple(array.shape), name, values.dtype, backend=backend)


def sparse(
    shape: Sequence[int],
    indices: Indices,
    values: Values | NDArray[Any],
    name: str = "",
    index: str = "auto",
    *,
    dtype: str | None = None,
    backend: str = "none",
) -> Tensor:
    """Return a sparse tensor of ``shape``.

    Parameters
    ----------
    indices : ndarray of int64, shape (k,)
        Strictly ascending flat indices.
    values : Values or ndarray, shape (k,)
        An array travels raw.
    index : str
        How the support is written, as for :class:`Tensor`.
    dtype : str, optional
        Of the tensor; default that of the values.

    Raises
    ------
    ConfigError
        When the number of values is not that of the indices, or names are unknown. The order of the indices is checked
        when the tensor is encoded.

    Examples
    --------
    >>> sparse((2, 3), np.array([1, 5]), np.float32([2, -1])).dense()
    array([[ 0.,  2.,  0.],
           [ 0.,  0., -1.]], dtype=float32)
    """
    content = values if isinstance(values, Values) else Raw(values)
    found = np.asarray(indices, np.int64)
    return Tensor(content, _shape(shape), name, dtype or content.dtype, SPARSE, found, index, backend)


def seeded(
    shape: Sequence[int],
    seed: int,
    k: int,
    values: Values | NDArray[Any],
    name: str = "",
    *,
    indices: Indices | None = None,
    backend: str = "none",
    algorithm: int = SCATTERED,
) -> Tensor:
    """Return a sparse tensor whose support is :func:`~fedcomp.wire.seeded_support` of ``seed``; only the seed travels.

    ``values``, k of them, are those at the ascending indices. ``indices`` may be passed when they are known already.
    With ``algorithm=2`` the support is the block :func:`~fedcomp.wire.seeded_block`.

    Raises
    ------
    ConfigError
        When there are not ``k`` values, or more than the tensor has elements.

    Examples
    --------
    >>> seeded((10,), 0, 3, np.float32([1, 2, 3])).dense()
    array([1., 2., 0., 0., 0., 0., 3., 0., 0., 0.], dtype=float32)
    """
    content = values if isinstance(values, Values) else Raw(values)
    if content.k != k:
        raise ConfigError(f"tensor {name!r}: a seeded support of {k} indices got {content.k} values")
    # The draw takes seeds modulo 2**64, and eight bytes of them travel.
    source = Seeded(seed & (1 << 64) - 1, algorithm)
    return Tensor(content, _shape(shape), name, content.dtype, SPARSE, indices, source, backend)


def shared(
    shape: Sequence[int],
    support_id: int,
    values: Values | NDArray[Any],
    name: str = "",
    *,
    indices: Indices | None = None,
    backend: str = "none",
) -> Tensor:
    """Return a tensor on a support both ends hold under ``support_id`` (0 <= id < 2**64).

    ``values`` are those at the support's ascending indices, which the receiver passes to
    :func:`~fedcomp.wire.decode` by their id; ``indices`` may be passed when they are known here.

    Raises
    ------
    ConfigError
        When the id does not fit 64 bits, or there are more values than elements.
    """
    content = values if isinstance(values, Values) else Raw(values)
    source = SharedSupport(support_id)
    return Tensor(content, _shape(shape), name, content.dtype, SHARED, indices, source, backend)
