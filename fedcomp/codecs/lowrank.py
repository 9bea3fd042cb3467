"""Low-rank matrices: a basis and coefficients, as one codec or with a basis that all senders share.

A tensor of two or more dimensions is a matrix of its first dimension times the rest, as the authors of PowerSGD take
kernels of convolutions (read). What has one dimension, and what factors would not shorten, travels whole.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.base import all_finite, norm
from fedcomp.codecs.coefficients import ID_BYTES, Coefficients, SharedCoefficients
from fedcomp.codecs.matrices import add_product, orthonormal, product
from fedcomp.codecs.positional import Stretch, expected_dense, stretches
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, Real
from fedcomp.wire import Bundle, Frame, SchemaMismatch

Part = NDArray[np.float32]
"""A factor of one matrix, float32 of shape (rows, rank); of shape (0, 0) for a tensor that travels whole."""

LEFT: Final = 0
RIGHT: Final = 1
"""On which side of a matrix m x p a basis stands: m rows, which leaves a factor of p rows to send; or p rows."""

_WHOLE: Final = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which tensors are factored, and with how many columns.

    Parameters
    ----------
    rank : int
        Columns of a factor; of a matrix m x p at most ``min(m, p)``.
    min_rate : float
        Matrices m x p are factored when r (m + p), the values of both factors, times this is less than m p.
    """

    rank: int
    min_rate: float

    def matrix(self, stretch: Stretch) -> tuple[int, int, int] | None:
        """Return rows, columns and rank of a tensor; None for one that travels whole."""
        if len(stretch.shape) < 2:
            return None
        m = stretch.shape[0]
        p = stretch.size // m
        r = min(m, p, self.rank)
        return (m, p, r) if r * (m + p) * self.min_rate < m * p else None


def levelled(factor: Part) -> Part:
    """Return a factor times the power of two that takes its largest magnitude to between 1/2 and 1.

    What counts as zero in :func:`orthonormal` is a length of its own, but updates may be of any; the basis is the same.
    """
    _, exponent = math.frexp(float(np.abs(factor).max(initial=0.0)))
    return np.ldexp(factor, -exponent)


@dataclass(frozen=True, slots=True)
class Basis:
    """Orthonormal columns for every factored matrix of a model, on one side of it.

    Attributes
    ----------
    side : int
        :data:`LEFT` or :data:`RIGHT`.
    parts : tuple of Part
        One for every stretch.
    id : int
        Of 63 bits, a digest of all of it. Senders and receivers with one id have one basis, bit for bit.
    """

    side: int
    parts: tuple[Part, ...]
    id: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(repr(part.shape).encode() + part.astype("<f4").tobytes())
        # The lowest bit is the side, which shapes do not tell where a matrix is square.
        number = int.from_bytes(digest.digest()[:ID_BYTES], "little") >> 1
        object.__setattr__(self, "id", number & ~1 | self.side)

    @classmethod
    def of(cls, factor: Sequence[Part] | None, side: int, ranks: Ranks, layout: Layout, key: Key) -> Basis:
        """Return the basis of a factor on ``side``, the same at all ends that hold the same factor.

        Columns that are zero, below 1e-12 times the factor's largest value, or multiples of others, are drawn from
        ``key``; without a factor all are. What is orthonormal in float64 is rounded to float32.
        """
        parts = []
        for stretch in stretches(layout, "layer"):
            matrix = ranks.matrix(stretch)
            if matrix is None:
                parts.append(_WHOLE)
                continue
            rows = matrix[side]
            given = np.zeros((rows, matrix[2]), np.float32) if factor is None else factor[stretch.index]
            parts.append(orthonormal(levelled(given), key.at(layer=stretch.index)).astype(np.float32))
        return cls(side, tuple(parts))

    def frame(self) -> Frame:
        """Return the basis as it travels."""
        return wire.encode([wire.dense(part) for part in self.parts if part.size])

    @classmethod
    def open(cls, frame: Frame, number: int, ranks: Ranks, layout: Layout) -> Basis:
        """Return the basis of a frame, whose id is ``number``.

        Raises
        ------
        fedcomp.wire.WireError
            When it is not a basis of such ranks and layout, or another one.
        """
        basis = cls.read(frame, number & 1, ranks, layout)
        if basis.id != number:
            raise SchemaMismatch(f"the frame holds the basis {basis.id:x}, expected {number:x}")
        return basis

    @classmethod
    def read(cls, frame: Frame, side: int, ranks: Ranks, layout: Layout) -> Basis:
        """Return the basis of a frame, which stands on ``side``.

        Raises
        ------
        fedcomp.wire.WireError
            When it is not a basis of such ranks and layout.
        """
        matrices = [ranks.matrix(stretch) for stretch in stretches(layout, "layer")]
        shapes = [(matrix[side], matrix[2]) for matrix in matrices if matrix is not None]
        bundle = wire.decode(frame, tuple(replace(expected_dense(0, wire.Raw), shape=shape) for shape in shapes))
        values = iter([np.asarray(tensor.values.decode()).reshape(tensor.shape) for tensor in bundle.tensors])
        return cls(side, tuple(_WHOLE if matrix is None else next(values) for matrix in matrices))


class Factored(Coefficients):
    """Base of codecs whose coefficients are factors of matrices."""

    rank: int
    min_rate: float

    @property
    def ranks(self) -> Ranks:
        """Which tensors are factored."""
        return Ranks(self.rank, self.min_rate)

    @abstractmethod
    def factors(self, values: Vector, stretch: Stretch) -> tuple[Part, Part]:
        """Return U and V, m x r and p x r, for which coefficients stand: U V'."""

    def add(self, out: Vector, values: Vector, stretch: Stretch) -> None:
        add_product(out.reshape(self.matrix(stretch)[:2]), *self.factors(values, stretch))

    def matrix(self, stretch: Stretch) -> tuple[int, int, int]:
        """Return rows, columns and rank of a stretch that is factored."""
        matrix = self.ranks.matrix(stretch)
        assert matrix is not None
        return matrix


@dataclass(frozen=True, repr=False, eq=False)
class LowRank(Factored):
    """Low-rank matrices in each sender's own basis, found by one step of power iteration from a random start.

    Of a matrix M: P = orthonormal(M Q) with Q drawn from the key, and M'P; both factors are sent, r (m + p) values. The
    decoded matrix is P P'M, exact for matrices of rank at most r. It is independent of other senders and rounds. In
    :class:`~fedcomp.codecs.PowerSGD` the basis is shared, is sent one way only, and improves from round to round.

    Parameters
    ----------
    rank : int
        Columns of a factor.
    min_rate : float
        At least 1. Matrices that factors do not shorten to 1/min_rate are sent whole, like all vectors.

    Notes
    -----
    Columns of M Q that are shorter than 1e-12 times its largest value count as zero.

    Examples
    --------
    >>> from fedcomp.layout import TensorSpec, Update
    >>> layout = Layout((TensorSpec("w", (8, 9), "float32", 0, 72),), (), ("w",))
    >>> update = Update(np.outer(np.arange(8), np.arange(9)).astype(np.float32).reshape(-1), layout)
    >>> codec = LowRank(rank=1)
    >>> frame, _ = codec.encode(update, {}, Key(0))
    >>> bool(np.allclose(codec.decode(frame, layout), update.vector, atol=1e-4))
    True
    """

    codec_id: ClassVar[str] = "low-rank"
    never_enlarges = True

    rank: Annotated[int, Int(1)] = 2
    min_rate: Annotated[float, Real(least=1.0)] = 2.0

    def count(self, stretch: Stretch) -> int | None:
        matrix = self.ranks.matrix(stretch)
        return None if matrix is None else matrix[2] * (matrix[0] + matrix[1])

    def project(self, values: Vector, stretch: Stretch, key: Key) -> Vector:
        """Return P and M'P, one after the other."""
        m, p, rank = self.matrix(stretch)
        matrix, start = values.reshape(m, p), np.zeros((p, rank), np.float32)
        drawn = orthonormal(start, key.at(purpose="low-rank"))
        sketch = product(matrix, drawn.astype(np.float32))
        if not all_finite(sketch.reshape(-1)):
            return sketch.reshape(-1)
        basis = orthonormal(levelled(sketch), key.at(purpose="low-rank/redrawn")).astype(np.float32)
        return np.concatenate([basis.reshape(-1), product(matrix.T, basis).reshape(-1)])

    def factors(self, values: Vector, stretch: Stretch) -> tuple[Part, Part]:
        """Return P and M'P."""
        m, p, r = self.matrix(stretch)
        return values[: m * r].reshape(m, r), values[m * r :].reshape(p, r)

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the norm of what is decoded: a sender's basis need not be orthonormal."""
        return norm(self.decode(frame, layout))

    def contraction(self, layout: Layout) -> float | None:
        """Return ``1 / min(m, p)`` of the matrix for which this is smallest, on average over the draw (derived).

        One column: what is kept of M is a mean of its squared singular values, σ², with weights in proportion to σ²g²,
        g normal. They are larger where σ² is, so the mean is at least the plain one, ‖M‖² / min(m, p). More columns
        keep no less.
        """
        found = [matrix for s in self.stretches(layout) if (matrix := self.ranks.matrix(s)) is not None]
        # Below by what float32 rounds of a basis.
        return min((1.0 / min(m, p) for m, p, _ in found), default=1.0) * (1.0 - 2.0**-20)


@dataclass(frozen=True, repr=False, eq=False)
class Projection(Factored, SharedCoefficients):
    """Send every matrix in a basis that both ends hold; only one factor travels, and the id of the basis.

    For one basis it is linear: M V of a weighted sum is the weighted sum of what the clients send.

    Parameters
    ----------
    basis : Basis
    rank, min_rate
        As the basis was made with.
    values : {"float32", "bf16", "q8", "q4"}
        How factors travel.
    """

    codec_id: ClassVar[str] = "projection"

    basis: Basis
    rank: int
    min_rate: float
    values: str = "float32"

    @property
    def basis_id(self) -> int:
        return self.basis.id

    def __repr__(self) -> str:
        return f"Projection(rank {self.rank}, basis {self.basis.id:x})"

    def count(self, stretch: Stretch) -> int | None:
        matrix = self.ranks.matrix(stretch)
        return None if matrix is None else matrix[1 - self.basis.side] * matrix[2]

    def project(self, values: Vector, stretch: Stretch, key: Key) -> Vector:
        """Return M V, or M'U."""
        matrix, basis = values.reshape(self.matrix(stretch)[:2]), self.basis.parts[stretch.index]
        return product(matrix if self.basis.side == RIGHT else matrix.T, basis).reshape(-1)

    def factors(self, values: Vector, stretch: Stretch) -> tuple[Part, Part]:
        basis, sent = self.basis.parts[stretch.index], values.reshape(-1, self.matrix(stretch)[2])
        return (basis, sent) if self.basis.side == LEFT else (sent, basis)

    def coefficients(self, frame: Frame | Bundle, layout: Layout) -> tuple[Part, ...]:
        """Return the factors of a frame, one for every stretch: what the next basis is made of."""
        parts, bundle = self.stretches(layout), self.open(frame, layout)
        found = []
        for tensor, stretch in zip(bundle.tensors, parts, strict=False):
            matrix = self.ranks.matrix(stretch)
            found.append(_WHOLE if matrix is None else np.asarray(tensor.values.decode()).reshape(-1, matrix[2]))
        return tuple(found)
