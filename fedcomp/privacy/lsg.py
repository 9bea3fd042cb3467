"""Low-rank plus sparse private updates: a matrix is sent as some coordinates of its products with two carriers.

Clipped to the same norm, a vector of fewer coordinates receives less noise. Two steps make an update shorter before it
is clipped, and both look at public data only:

1. A matrix G (p, q) becomes ``a = G Rᵀ`` (p, r) and ``b = Lᵀ G`` (r, q), with carriers L and R of orthonormal columns
   and rows. They come from the model itself, which is private already, by one step of power iteration from a seeded
   start.
2. Of all the coordinates of all tensors together a fraction is kept; which, a public seed says.

What comes back is ``A R + L B - L Lᵀ A R``: the orthogonal projection of G onto {L X + Y R}. Without the last term the
part that both carriers see would count twice.

The low-rank half follows the public code of Yu et al., "Large Scale Private Learning via Low-rank Reparametrization",
ICML 2021 (read: code). Low rank and sparsity together are the idea of Ito et al., arXiv 2207.02699, 2022 (abstract);
how the sparse half is made here is derived, hence "LSG-style".

What must never be done: to keep the largest coordinates of a contribution, or of a sum, and to add noise to those only.
Which ones they are reveals something about the data, and no noise covers that.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.rng import Key
from fedcomp.rules import Real, checked
from fedcomp.wire.support import seeded_support

__all__ = [
    "MASKS",
    "SCHEDULES",
    "Carriers",
    "LowRankPlan",
    "carriers",
    "count_kept",
    "fraction",
    "kept",
    "project",
    "reconstruct",
    "remembered",
]

Float32 = NDArray[np.float32]
Pair = tuple[Float32, Float32]
Carriers = tuple[Pair | None, ...]
"""Per tensor: left (p, r) and right (r, q) carrier, None where the tensor is not factored."""

SCHEDULES: Final = ("constant", "linear", "cosine")
"""How the kept fraction goes from 1 to its last value over the training; "constant" has the last value throughout."""

MASKS: Final = ("random", "noisy_magnitude")
"""How the kept coordinates are chosen: by the seed alone, or half of them where former noisy updates were large."""


# About ten steps of memory.
_DECAY: Final = 0.9


def fraction(schedule: str, step: int, steps: int, keep: float) -> float:
    """Return the fraction of coordinates kept in ``step`` (from 0) of ``steps``.

    Parameters
    ----------
    schedule : {"constant", "linear", "cosine"}
        Fixed before the training: it depends on the step alone.
    step, steps : int
        Steps beyond the last have the last one's fraction.
    keep : float
        The last fraction, in (0, 1].

    Raises
    ------
    ConfigError
        When an argument is out of range.
    """
    check_fraction(schedule, steps, keep)
    if schedule == "constant":
        return keep
    done = min(1.0, max(0, step) / max(1, steps - 1))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return keep + (1.0 - keep) * left


def check_fraction(schedule: str, steps: int, keep: float) -> None:
    """Raise :class:`ConfigError` unless these describe a fraction (:func:`fraction`)."""
    params.choice("schedule", schedule, SCHEDULES)
    checked("keep", keep, Real(above=0.0, most=1.0))
    params.integer(f"steps of a {schedule} schedule", steps, low=0 if schedule == "constant" else 1)


def check_mask(mask: str) -> None:
    """Raise :class:`ConfigError` unless ``mask`` is one of :data:`MASKS`."""
    if mask not in MASKS:
        raise ConfigError(
            f"mask={mask!r} is not known; say one of {', '.join(MASKS)}. Coordinates chosen by looking at the data "
            "cannot be kept with noise on them alone: which ones they are is itself a release"
        )


def count_kept(size: int, share: float) -> int:
    """Return how many of ``size`` coordinates a fraction ``share`` keeps: ``max(1, ceil(share * size))``."""
    return max(1, min(size, math.ceil(share * size)))


def kept(size: int, share: float, key: Key, magnitude: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """Return the coordinates that are kept, ascending.

    Parameters
    ----------
    size : int
    share : float
        In (0, 1].
    key : Key
        Public; a fresh one for every step.
    magnitude : ndarray, (size,), optional
        Former *noisy* updates. Half of the coordinates are then the largest of these; the other half is drawn from the
        rest, for a coordinate that is never kept never grows. What is already released may be looked at freely.

    Returns
    -------
    ndarray of int64
    """
    count = count_kept(size, share)
    # Nothing to choose: the schedule may begin with everything.
    if count == size:
        return np.arange(size, dtype=np.int64)
    if magnitude is None:
        return seeded_support(key.u64(), size, count)
    if magnitude.shape != (size,):
        raise LayoutError(f"magnitudes have shape {magnitude.shape}, expected ({size},)")
    large = np.zeros(size, bool)
    # A stable sort: ties fall the same way everywhere.
    large[np.argsort(-np.abs(magnitude), kind="stable")[: count // 2]] = True
    rest = np.flatnonzero(~large)
    large[rest[seeded_support(key.u64(), rest.size, count - count // 2)]] = True
    return np.flatnonzero(large)


def remembered(former: NDArray[np.float64] | None, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running sum of noisy updates that ``mask="noisy_magnitude"`` looks at, after one more."""
    return noisy if former is None else _DECAY * former + noisy


def carriers(target: NDArray[Any], rank: int, key: Key) -> Pair:
    """Return the left and right carriers of ``target`` by one step of power iteration from a seeded Gaussian start.

    ``R ~ N(0, 1); L = orth(M R); R = orth(Mᵀ L)``. A target of zeros has no directions: the carriers are then those of
    a Gaussian matrix.

    Parameters
    ----------
    target : ndarray, (p, q)
        Public or already private: the model, never a gradient. A power iteration on gradients would be a release.
    rank : int
        ``1 <= rank <= min(p, q)``.
    key : Key
        Public. Floating point differs between machines, so the result travels, not the key.

    Returns
    -------
    left : ndarray of float32, (p, rank)
        Orthonormal columns.
    right : ndarray of float32, (rank, q)
        Orthonormal rows.

    Raises
    ------
    ConfigError, NonFiniteUpdate
        When the rank does not fit, or the target has NaN or infinity.
    """
    if target.ndim != 2 or not 1 <= rank <= min(target.shape):
        raise ConfigError(f"rank={rank!r} does not fit a target of shape {target.shape}: 1 <= rank <= min(p, q)")
    if not np.isfinite(target).all():
        raise NonFiniteUpdate("the model that carriers are made from has NaN or infinity; reduce the step size")
    draws = key.generator()
    start = draws.standard_normal((target.shape[1], rank))
    largest = float(np.abs(target).max())
    # Scaled, so that neither product can overflow or vanish.
    matrix = target.astype(np.float64) / largest if largest > 0.0 else draws.standard_normal(target.shape)
    # Any orthonormal basis will do: the projection depends on the span alone.
    left = np.linalg.qr(matrix @ start)[0]
    right = np.linalg.qr(matrix.T @ left)[0].T
    # In the precision they travel in: both sides project with the same numbers.
    return left.astype(np.float32), np.ascontiguousarray(right.astype(np.float32))


def project(matrix: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Return ``a = G Rᵀ`` (..., p, r) and ``b = Lᵀ G`` (..., r, q) of ``matrix`` G (..., p, q).

    The arrays may be numpy's or torch's, all three of one kind.
    """
    return matrix @ right.mT, left.mT @ matrix


def reconstruct(a: Any, b: Any, left: Any, right: Any) -> Any:
    """Return ``A R + L B - L Lᵀ A R``, (..., p, q): of :func:`project`'s result the projection onto {L X + Y R}."""
    return a @ right + left @ (b - left.mT @ a @ right)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor: where it lies in the vector, and in the shorter one.

    Attributes
    ----------
    name : str
    shape : tuple of int
    rank : int
        0 where the tensor is not factored.
    start, size : int
        Its stretch of the vector.
    at, short : int
        Its stretch of the shorter vector: a, row by row, then b; or the tensor itself.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    size: int
    at: int
    short: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The matrix the tensor is read as: a convolution is (out, in * height * width)."""
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True)
class LowRankPlan:
    """Which tensors are factored with which rank, and how long a vector is before and after.

    Tensors of one dimension (biases, scales), and matrices whose smaller side is no larger than the rank, stay whole.
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], rank: int, whole: Sequence[str] = ()) -> LowRankPlan:
        """Plan for tensors of these names and shapes, in this order.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
        rank : int
            0 factors nothing.
        whole : sequence of str
            Patterns of names that stay whole (the last layer, for one).

        Raises
        ------
        ConfigError
            When the rank is negative, or there is nothing to plan for.
        """
        rank = params.integer("rank", rank, low=0)
        pieces: list[Piece] = []
        start = at = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            p, q = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (size, 1)
            # With such a rank the two products would be longer than the matrix.
            apart = rank == 0 or len(shape) < 2 or rank >= min(p, q)
            apart = apart or any(fnmatch.fnmatchcase(name, pattern) for pattern in whole)
            short = size if apart else rank * (p + q)
            pieces.append(Piece(name, tuple(shape), 0 if apart else rank, start, size, at, short))
            start, at = start + size, at + short
        if not start:
            raise ConfigError("there are no parameters to train")
        return cls(tuple(pieces))

    @cached_property
    def size(self) -> int:
        """Coordinates of the vector."""
        return sum(piece.size for piece in self.pieces)

    @cached_property
    def short(self) -> int:
        """Coordinates of the shorter vector."""
        return sum(piece.short for piece in self.pieces)

    @property
    def factored(self) -> tuple[Piece, ...]:
        """The tensors that have carriers."""
        return tuple(piece for piece in self.pieces if piece.rank)

    def energy(self, share: float = 1.0) -> float:
        """Return the expected squared norm of what unit noise on the kept coordinates becomes: f r (p + q - r) each."""
        each = [p.rank * (sum(p.matrix) - p.rank) if p.rank else p.size for p in self.pieces]
        return share * sum(each)

    def carriers(self, model: NDArray[Any], key: Key, before: NDArray[Any] | None = None) -> Carriers:
        """Return the carriers of every factored tensor.

        Parameters
        ----------
        model : ndarray, (size,)
            The current model, which is public or already private.
        key : Key
            Public; the tensor's number becomes its layer.
        before : ndarray, (size,), optional
            An earlier model. The carriers then follow the way the training went: each of the two matrices over its own
            Frobenius norm, one minus the other, as the public code of the low-rank method has it.
        """
        self._check(model)
        if before is not None:
            self._check(before)
        found: list[Pair | None] = []
        for number, piece in enumerate(self.pieces):
            if not piece.rank:
                found.append(None)
                continue
            target = _over_norm(self._matrix(model, piece)) if before is not None else self._matrix(model, piece)
            if before is not None:
                # Each over its own norm: else a model that only grew would seem to have moved along itself.
                target = target - _over_norm(self._matrix(before, piece))
            found.append(carriers(target, piece.rank, key.at(layer=number)))
        return tuple(found)

    def project(self, rows: Any, pairs: Sequence[Any]) -> list[Any]:
        """Return the parts of the shorter vectors of ``rows`` (..., size), in order, to be joined along the last axis.

        The rows and the pairs of carriers may be numpy's or torch's.
        """
        parts: list[Any] = []
        for piece, pair in zip(self.pieces, pairs, strict=True):
            stretch = rows[..., piece.start : piece.start + piece.size]
            if pair is None:
                parts.append(stretch)
                continue
            a, b = project(stretch.reshape(*stretch.shape[:-1], *piece.matrix), *pair)
            parts += [part.reshape(*part.shape[:-2], math.prod(part.shape[-2:])) for part in (a, b)]
        return parts

    def reconstruct(self, short: NDArray[Any], pairs: Carriers) -> NDArray[np.float64]:
        """Return the vector, (size,), that ``short``, (short,), stands for."""
        if short.shape != (self.short,):
            raise LayoutError(f"a shortened update has shape {short.shape}, expected ({self.short},)")
        out = np.empty(self.size, np.float64)
        for piece, pair in zip(self.pieces, pairs, strict=True):
            part = short[piece.at : piece.at + piece.short].astype(np.float64)
            if pair is not None:
                left, right = (carrier.astype(np.float64) for carrier in pair)
                p, q = piece.matrix
                a, b = part[: p * piece.rank].reshape(p, -1), part[p * piece.rank :].reshape(-1, q)
                part = reconstruct(a, b, left, right).reshape(-1)
            out[piece.start : piece.start + piece.size] = part
        return out

    def _matrix(self, vector: NDArray[Any], piece: Piece) -> NDArray[np.float64]:
        return vector[piece.start : piece.start + piece.size].astype(np.float64).reshape(piece.matrix)

    def _check(self, vector: NDArray[Any]) -> None:
        if vector.shape != (self.size,):
            raise LayoutError(f"a model has shape {vector.shape}, expected ({self.size},)")


def _over_norm(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = float(np.linalg.norm(matrix))
    return matrix / norm if norm > 0.0 else matrix
