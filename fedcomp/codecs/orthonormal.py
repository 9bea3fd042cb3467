"""Orthonormal transforms for :class:`~fedcomp.codecs.Domain`.

Each is linear and keeps every length, so that weighted sums of transformed vectors are transformed sums: a server adds
in the new coordinates and goes back once.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.axes import NATURAL, ORDERS, order_conflict, read_in, write_back
from fedcomp.codecs.positional import SCOPES
from fedcomp.codecs.registry import Registry
from fedcomp.kernels import hadamard, preferred
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, OneOf

SHORTEST: Final = 64
"""Elements of the shortest block that a rotation turns; a tail below that stays as it is."""

_HALF: Final = np.float32(math.sqrt(0.5))
_COLUMNS: Final = 1 << 15


class Orthonormal(Configured, ABC):
    """Base of orthonormal transforms of float32 vectors. Subclasses are frozen dataclasses.

    Both ends run the same floating-point operations in the same order and format, unless a transform's documentation
    says otherwise: server and clients compute the same bits from the same sum.

    Attributes
    ----------
    scope : {"global", "layer"}
        Whether the compressed part of a model is one vector, or each of its tensors.
    order : str
        The order in which the elements of a convolution's tensor are read, the slowest axis first; see
        :mod:`fedcomp.codecs.axes`.
    """

    basis_id: ClassVar[str]

    scope: str
    order: str = NATURAL

    @abstractmethod
    def turn(self, values: Vector, layer: int, *, inverse: bool = False) -> None:
        """Replace ``values``, float32 of shape (n,), n >= 1, by their transform, or undo it, in place.

        ``layer`` is the number of the vector among those of the model.
        """

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": basis_id, **get_config()}``."""
        return {"id": self.basis_id, **self.get_config()}

    def apply(self, vector: Vector, layout: Layout, *, inverse: bool = False) -> None:
        """Transform the compressed part of a model's vector in place, or undo it; the dense rest stays."""
        if self.scope == "layer":
            parts = [(t.slice, t.shape) for t in layout.compressed if t.size]
        else:
            size = layout.compressed_size
            parts = [(slice(0, size), (size,))] if size else []
        for layer, (part, shape) in enumerate(parts):
            values = vector[part]
            if inverse:
                self.turn(values, layer, inverse=True)
                write_back(values, shape, self.order)
            else:
                read_in(values, shape, self.order)
                self.turn(values, layer)


bases: Registry[Orthonormal] = Registry(Orthonormal, "basis_id", "fedcomp.bases")


def blocks(size: int) -> list[slice]:
    """Return how ``size`` elements split into powers of two, the largest first, down to :data:`SHORTEST`.

    Nothing is padded: padding to the next power of two sends up to twice as much. Fewer than :data:`SHORTEST` elements
    at the end are in no block.
    """
    found = []
    start = 0
    while size - start >= SHORTEST:
        length = 1 << (size - start).bit_length() - 1
        found.append(slice(start, start + length))
        start += length
    return found


def rotate(values: NDArray[Any], key: Key, *, inverse: bool = False, beside: int = 0) -> None:
    """Turn ``values``, float32 or float64 of shape (n,), by the rotation that ``key`` names, or back, in place.

    Each of :func:`blocks` gets random signs and then the Hadamard transform; the tail stays.

    Parameters
    ----------
    beside : int
        Elements of the vector of which ``values`` are a part: where compiled code turns its large blocks, it turns the
        small ones, too. No bit depends on it.
    """
    parts = blocks(values.size)
    tier = preferred(max(beside, values.size))
    # One stream: blocks are multiples of 64 elements, and a word holds 64 signs.
    signs = key.bits(parts[-1].stop // 64) if parts else np.zeros(0, np.uint64)
    for part in parts:
        hadamard(values[part], signs[part.start // 64 : part.stop // 64], inverse=inverse, tier=tier)


@bases.register
@dataclass(frozen=True, repr=False, eq=False)
class Rotation(Orthonormal):
    """A random rotation shared by all clients: random signs, then a Hadamard matrix.

    It spreads a vector evenly over its coordinates, which suits quantisers with one scale. A vector whose length is not
    a power of two is rotated in blocks (:func:`blocks`); up to 63 elements at its end are not rotated.

    Parameters
    ----------
    seed : int
        Seed of the rotation. It is public, part of the configuration, and the same in every round.
    scope : {"global", "layer"}
        Rotate the whole model as one vector, or every tensor by itself.

    Examples
    --------
    >>> from fedcomp.layout import Layout
    >>> spike = np.zeros(64, np.float32)
    >>> spike[3] = 8.0
    >>> Rotation(seed=1).apply(spike, Layout.flat(64))
    >>> np.unique(np.abs(spike))
    array([1.], dtype=float32)
    """

    basis_id: ClassVar[str] = "rotation"

    seed: Annotated[int, Int(0, 2**63 - 1)] = 0
    scope: Annotated[str, OneOf(*SCOPES)] = "global"

    def turn(self, values: Vector, layer: int, *, inverse: bool = False) -> None:
        rotate(values, Key(self.seed, "rotation", layer=layer), inverse=inverse)


@bases.register
@dataclass(frozen=True, repr=False, eq=False)
class DCT(Orthonormal):
    """The orthonormal discrete cosine transform (DCT-II) of every ``chunk`` consecutive elements; DeMo's (recalled).

    The remainder at a vector's end is split into powers of two, the largest first, each with a transform of its length.
    Sums of products are formed in float32 and in a fixed order, not by a library's matrix product, whose order depends
    on the machine. About ``chunk / 3`` products per element.

    Parameters
    ----------
    chunk : int
        A power of two, 2 to 1024.
    scope : {"global", "layer"}
        Cut the whole model into chunks, or every tensor by itself, so that no chunk spans two tensors.
    order : str
        A permutation of "FDHW", the order in which a convolution's elements are read, the slowest axis first; see
        :mod:`fedcomp.codecs.axes`. With ``scope="layer"`` only.

    Examples
    --------
    >>> from fedcomp.layout import Layout
    >>> ramp = np.arange(8, dtype=np.float32)
    >>> DCT(chunk=8).apply(ramp, Layout.flat(8))
    >>> ramp.round(2)
    array([ 9.9 , -6.44,  0.  , -0.67,  0.  , -0.2 ,  0.  , -0.05],
          dtype=float32)
    """

    basis_id: ClassVar[str] = "dct"

    chunk: Annotated[int, Int(2, 1024)] = 64
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    order: Annotated[str, OneOf(*ORDERS)] = NATURAL

    def conflict(self) -> str:
        if self.chunk & (self.chunk - 1):
            return f"chunk={self.chunk} is not valid: chunk must be a power of two"
        return order_conflict(self.order, self.scope)

    def turn(self, values: Vector, layer: int, *, inverse: bool = False) -> None:
        """Transform every chunk in place, or back."""
        step = _uncosine if inverse else _cosine
        for start, stop, length in self._runs(values.size):
            # One row per place in the chunk, one column per chunk: every operation below is on whole rows.
            columns = np.ascontiguousarray(values[start:stop].reshape(-1, length).T)
            step(columns)
            values[start:stop].reshape(-1, length)[...] = columns.T

    def _runs(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and chunk length of each part that is transformed at once."""
        whole = size - size % self.chunk
        at_once = max(self.chunk, _COLUMNS)
        for start in range(0, whole, at_once):
            yield start, min(start + at_once, whole), self.chunk
        while whole < size:
            length = 1 << (size - whole).bit_length() - 1
            yield whole, whole + length, length
            whole += length


def _cosine(rows: NDArray[np.float32]) -> None:
    """Transform every column in place: the sums of mirrored elements give the even coefficients by a transform of half
    the length, their differences the odd ones by a DCT-IV."""
    n = len(rows)
    if n == 1:
        return
    low, high = rows[: n // 2], rows[: n // 2 - 1 : -1]
    even, odd = (low + high) * _HALF, (low - high) * _HALF
    _cosine(even)
    rows[0::2] = even
    rows[1::2] = _fourth(odd)


def _uncosine(rows: NDArray[np.float32]) -> None:
    """Undo :func:`_cosine`: a DCT-IV is its own inverse."""
    n = len(rows)
    if n == 1:
        return
    even, odd = rows[0::2].copy(), _fourth(rows[1::2])
    _uncosine(even)
    rows[: n // 2] = (even + odd) * _HALF
    rows[: n // 2 - 1 : -1] = (even - odd) * _HALF


def _fourth(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the orthonormal DCT-IV of every column; products are added in ascending order."""
    matrix = _cosines(len(rows))
    out: NDArray[np.float32] = matrix[0][:, None] * rows[0]
    product = np.empty_like(out)
    for line, row in zip(matrix[1:], rows[1:], strict=True):
        out += np.multiply(line[:, None], row, out=product)
    return out


@functools.lru_cache(maxsize=16)
def _cosines(n: int) -> NDArray[np.float32]:
    """Return the symmetric matrix of the orthonormal DCT-IV, rounded from float64."""
    odd = 2 * np.arange(n) + 1
    matrix = (math.sqrt(2.0 / n) * np.cos(np.outer(odd, odd) * (math.pi / (4 * n)))).astype(np.float32)
    matrix.flags.writeable = False
    return matrix
