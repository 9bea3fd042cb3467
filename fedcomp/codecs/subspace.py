"""GradiVeQ: slices of an update in a basis that one party fits to earlier aggregated updates.

After Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS 2018, arXiv 1811.03617 (abstract and beginning of the introduction read, the body recalled).
Derived here: the mean convention, held-out choice of the dimension, running covariances, the drift measure.

A client sends ``Uᵀ (g - mu)`` with ``mu`` the mean of the *mean* update; of coefficients averaged with weights of sum 1
the server makes ``U c + mu`` once. That is the projection of the weighted mean for any set of clients: with ``mu / N``
in a sum, as in a ring of fixed size, a client that is lost would leave an error of ``mu / N``.

Eigenvectors differ between builds of linear algebra in sign and rotation. One party fits; the others receive what it
found, under an id made of its bytes, and coefficients under another id are refused: their sum would be noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.coefficients import ID_BYTES
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.codecs.slices import Slices
from fedcomp.errors import ConfigError, LayoutError, StateError
from fedcomp.layout import Layout, Vector
from fedcomp.rules import Configured, Inside, Int, Maybe, OneOf, Switch, checked
from fedcomp.stateful import Stateful
from fedcomp.wire import DENSE, Expected, Frame, SchemaMismatch
from fedcomp.wire.quantised import round_up

KINDS: Final = ("pooled", "per_slice", "shared_first")
"""Which slices of a tensor a basis is fitted to: all together, each by itself, or the first for all."""

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Subspace:
    """The basis of one part.

    Attributes
    ----------
    carriers : ndarray of float32, (1 or M, K, d)
        Orthonormal columns (U): one set for all slices, or one for each.
    mean : ndarray of float32, (M, K), or None
        Of the aggregated slices; None without centring.
    """

    carriers: Float32
    mean: Float32 | None

    @property
    def dimension(self) -> int:
        """Coefficients of a slice (d)."""
        return self.carriers.shape[2]

    def project(self, values: Float32) -> Vector:
        """Return the coefficients of slices (M, K), flat."""
        return (self._centred(values) @ self.carriers).reshape(-1)

    def reconstruct(self, coefficients: Vector, count: int) -> Float32:
        """Return the slices, (count, K), for which a weighted mean of coefficients stands; the weights sum to 1."""
        groups, width, d = self.carriers.shape
        each = coefficients.astype(np.float32, copy=False).reshape(groups, count // groups, d)
        values = (each @ self._back).reshape(count, width)
        return values if self.mean is None else values + self.mean

    def missed(self, values: Float32) -> float:
        """Return the energy of slices (M, K) that the subspace leaves out."""
        centred = self._centred(values)
        left = centred - (centred @ self.carriers) @ self._back
        return float(np.square(left, dtype=np.float64).sum())

    def energy(self, coefficients: Vector) -> float:
        """Return the energy of what :meth:`reconstruct` makes of coefficients, without making it."""
        found = coefficients.astype(np.float64)
        energy = float(found @ found)
        if self.mean is not None:
            # |U c + mu|² = |c|² + 2 <U'mu, c> + |mu|²
            along = self._in_groups(self.mean) @ self.carriers
            energy += 2.0 * float(along.reshape(-1).astype(np.float64) @ found)
            energy += float(np.square(self.mean, dtype=np.float64).sum())
        return max(0.0, energy)

    @property
    def _back(self) -> Float32:
        return self.carriers.transpose(0, 2, 1)

    def _centred(self, values: Float32) -> Float32:
        return self._in_groups(values if self.mean is None else values - self.mean)

    def _in_groups(self, values: Float32) -> Float32:
        """Return slices grouped by the carriers that multiply them, (groups, M / groups, K)."""
        # One product of matrices where all slices share their carriers, not one of a vector for each slice.
        return values.reshape(len(self.carriers), -1, values.shape[1])


@dataclass(frozen=True, eq=False)
class SliceBasis:
    """The subspaces of a model, with the linear map into them and back.

    Attributes
    ----------
    slices : Slices
    subspaces : tuple of Subspace
        One for each part.

    Examples
    --------
    >>> from fedcomp.layout import Layout
    >>> slices = Slices.of(Layout.of({"w": np.zeros((64, 64), np.float32)}), width=64)
    >>> basis = SliceBasis(slices, (Subspace(np.eye(64, 8, dtype=np.float32)[None], None),))
    >>> basis.size
    512
    >>> basis.reconstruct(basis.project(np.ones(4096, np.float32))).sum()
    np.float32(512.0)
    """

    slices: Slices
    subspaces: tuple[Subspace, ...]

    @classmethod
    def nothing(cls, layout: Layout) -> SliceBasis:
        """Return the basis of a round in which everything travels as it is."""
        return cls(Slices.of(layout, width=max(1, layout.size + 1)), ())

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Coefficients of a slice (d), for each part."""
        return tuple(subspace.dimension for subspace in self.subspaces)

    @cached_property
    def size(self) -> int:
        """Numbers a client sends: coefficients, then the rest."""
        counts = (part.count for part in self.slices.parts)
        return sum(m * d for m, d in zip(counts, self.dimensions, strict=True)) + self.slices.rest_size

    def frame(self) -> Frame:
        """Return the basis as it travels: for each part the carriers, then the mean where there is one."""
        return self._frame

    @cached_property
    def _frame(self) -> Frame:
        arrays = [a for s in self.subspaces for a in (s.carriers, s.mean) if a is not None]
        return bytes(wire.encode([wire.dense(array) for array in arrays]))

    @cached_property
    def id(self) -> int:
        """63 bits of a SHA-256: equal for equal bytes and axes, whoever made them."""
        # The order of axes is not in the frame's shapes, and coefficients of two orders must not be added either.
        digest = hashlib.sha256(self.slices.order.encode() + self._frame).digest()
        return int.from_bytes(digest[:ID_BYTES], "little") >> 1

    @classmethod
    def read(cls, frame: Frame, slices: Slices, *, per_slice: bool, center: bool) -> SliceBasis:
        """Return the basis of a frame; the receiver compares its :attr:`id`.

        Raises
        ------
        WireError
            When the frame is no basis of these slices. Only dimensions are taken from it.
        """
        width, tensors_of = slices.width, (False, True) if center else (False,)
        shapes = [
            (part.count, width) if of_mean else (part.count if per_slice else 1, width, width)
            for part in slices.parts
            for of_mean in tensors_of
        ]
        # Of full dimension: the largest there can be.
        largest = [Expected("", shape, kinds=frozenset({DENSE})) for shape in shapes]
        tensors = wire.decode(frame, limits=wire.Limits.for_schema(largest)).tensors
        if len(tensors) != len(shapes):
            raise SchemaMismatch(
                f"a basis of {len(slices.parts)} parts has {len(shapes)} tensors, the frame {len(tensors)}"
            )
        found = []
        for tensor, shape in zip(tensors, shapes, strict=True):
            # The last dimension of carriers is the one that only the frame knows.
            fits = len(tensor.shape) == len(shape) and tensor.shape[:2] == shape[:2] and tensor.shape[-1] <= shape[-1]
            if not fits or tensor.kind is not DENSE or tensor.dtype != "float32":
                raise SchemaMismatch(f"a tensor of shape {tensor.shape} is not part of a basis, which has {shape}")
            found.append(np.asarray(tensor.values.decode()).reshape(tensor.shape))
        step = 2 if center else 1
        means: Sequence[Float32 | None] = found[1::2] if center else [None] * len(slices.parts)
        return cls(slices, tuple(Subspace(u, m) for u, m in zip(found[::step], means, strict=True)))

    def project(self, vector: Vector) -> Vector:
        """Return what a client sends of an update, float32 of shape (size,)."""
        slices, rest = self.slices.cut(vector)
        coefficients = [subspace.project(values) for values, subspace in zip(slices, self.subspaces, strict=True)]
        return np.concatenate([*coefficients, rest]).astype(np.float32, copy=False)

    def reconstruct(self, mean: Vector) -> Vector:
        """Return the update that a weighted mean of :meth:`project` stands for, whose weights sum to 1.

        Raises
        ------
        LayoutError
            When there are not ``size`` numbers.
        """
        if mean.shape != (self.size,):
            raise LayoutError(f"expected {self.size} coefficients and uncompressed values, got shape {mean.shape}")
        slices, start = [], 0
        for part, subspace in zip(self.slices.parts, self.subspaces, strict=True):
            stop = start + part.count * subspace.dimension
            slices.append(subspace.reconstruct(mean[start:stop], part.count))
            start = stop
        return self.slices.join(slices, mean[start:].astype(np.float32, copy=False))

    def drift(self, vector: Vector) -> float:
        """Return the share of an update's energy in its slices that the basis misses; 0 for an update of zeros."""
        slices = self.slices.cut(vector)[0]
        missed = sum(subspace.missed(values) for values, subspace in zip(slices, self.subspaces, strict=True))
        total = sum(float(np.square(values, dtype=np.float64).sum()) for values in slices)
        return missed / total if total else 0.0


def shared_grid(peaks: Sequence[float], levels: int) -> IntegerGrid:
    """Return the one grid on which every client rounds what it sends, so that integers can be added.

    Parameters
    ----------
    peaks : sequence of float
        The largest magnitude of each client's numbers: one float that is exchanged before.
    levels : int
        Largest magnitude of an integer.

    Raises
    ------
    ConfigError
        When a peak is negative or not finite, or there is none.

    Examples
    --------
    >>> shared_grid([0.5, 3.5], levels=7)
    IntegerGrid(step=0.5, levels=7)
    """
    if not peaks or not all(0.0 <= peak < float("inf") for peak in peaks):
        raise ConfigError(f"peaks must be finite magnitudes, at least one, got {list(peaks)!r}")
    # Rounded up: rounded down, the largest number would lie beyond the last level and be cut. Zeros alone need a step
    # as well, because they are divided by it.
    step = round_up(np.asarray([max(peaks) / params.integer("levels", levels, low=1)]))[0]
    return IntegerGrid(float(step) or 1.0, levels)


@dataclass(frozen=True)
class BasisFit(Configured):
    """How a basis is fitted.

    Parameters
    ----------
    kind : {"pooled", "per_slice", "shared_first"}
    loss : float
        Share of the held-out energy that may be lost, in (0, 1): the dimension is the smallest that loses no more.
    most : int, optional
        Largest dimension; None is a whole slice.
    center : bool
        Whether the mean of the aggregated slices is subtracted. It travels with the basis, as large as the slices.
    """

    kind: Annotated[str, OneOf(*KINDS)] = "pooled"
    loss: Inside = 0.05
    most: Annotated[int | None, Maybe(Int(1))] = None
    center: Switch = True


class Moments(Stateful):
    """Running sums over aggregated updates, from which a basis is fitted.

    The first ``fitted`` valid samples give means and covariances, in float64; later ones are held out and choose the
    dimension: chosen on the samples a basis was fitted to, it is far too small (measured). The sums take 16 K² bytes
    for each tensor, and for each slice of it with a basis per slice.

    Parameters
    ----------
    slices : Slices
    fit : BasisFit
    fitted : int
        Samples before the held-out ones, at least 2.

    Attributes
    ----------
    count, held : int
        Valid samples so far: fitted, and held out.
    dropped : int
        Samples that were not finite.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "count": int,
        "held": int,
        "dropped": int,
        "_means": list[NDArray[np.float64]],
        "_spreads": list[NDArray[np.float64]],
        "_tests": list[NDArray[np.float64]],
    }

    def __init__(self, slices: Slices, fit: BasisFit, fitted: int) -> None:
        self.slices, self.fit = slices, fit
        self.fitted: int = checked("fitted", fitted, Int(2))
        self.count = self.held = self.dropped = 0
        width = slices.width
        groups = [part.count if fit.kind == "per_slice" else 1 for part in slices.parts]
        self._means = [np.zeros((part.count, width)) for part in slices.parts]
        self._spreads = [np.zeros((group, width, width)) for group in groups]
        self._tests = [np.zeros((group, width, width)) for group in groups]

    def identity(self) -> Any:
        """Return what the sums depend on: another fit or another cut makes other sums of the same shape."""
        own = self.fit
        tensors = [[part.tensor.name, part.tensor.offset, part.count] for part in self.slices.parts]
        return [own.kind, own.center, self.fitted, self.slices.width, self.slices.order, tensors]

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse sums of other shapes, and counts that are impossible."""
        for name in ("_means", "_spreads", "_tests"):
            if [a.shape for a in values[name]] != [a.shape for a in getattr(self, name)]:
                raise StateError(f"{name.lstrip('_')} have other shapes than this model's slices")
        counts = values["count"], values["held"], values["dropped"]
        if min(counts) < 0 or counts[0] > self.fitted or (counts[1] and counts[0] < self.fitted):
            raise StateError(f"counts {counts} of samples are impossible with {self.fitted} to fit")

    def add(self, update: Vector) -> None:
        """Take in one aggregated update; one that is not finite is dropped whole and counted."""
        if not np.isfinite(update).all():
            self.dropped += 1
            return
        fitting = self.count < self.fitted
        self.count += fitting
        self.held += not fitting
        for index, values in enumerate(self.slices.cut(update)[0]):
            mean = self._means[index]
            moved = values - mean
            weight = 1.0
            # Welford's update: a difference of two large sums would lose what centring is to find. Held-out samples
            # are measured from the mean that travels, which they must not move.
            if fitting and self.fit.center:
                mean += moved / self.count
                weight = (self.count - 1) / self.count
            into = self._spreads[index] if fitting else self._tests[index]
            if self.fit.kind == "per_slice":
                into += weight * moved[:, :, None] * moved[:, None, :]
            else:
                rows = moved[:1] if self.fit.kind == "shared_first" else moved
                into[0] += weight * (rows.T @ rows)

    def basis(self) -> SliceBasis:
        """Return the basis of the samples so far.

        Raises
        ------
        StateError
            When there are fewer fitted samples than asked for, or none held out.
        ConfigError
            When ``most`` directions need more samples than were fitted.
        """
        if self.count < self.fitted or not self.held:
            raise StateError(f"{self.count} of {self.fitted} samples and {self.held} held out are too few for a basis")
        found = zip(self.slices.parts, self._means, self._spreads, self._tests, strict=True)
        return SliceBasis(self.slices, tuple(self._subspace(part.count, *sums) for part, *sums in found))

    def _subspace(self, count: int, mean: Float64, spreads: Float64, tests: Float64) -> Subspace:
        # Ascending eigenvalues; the leading directions are the last columns.
        vectors = np.linalg.eigh(spreads)[1][:, :, ::-1]
        rows = (self.count - self.fit.center) * (count if self.fit.kind == "pooled" else 1)
        # Directions beyond the number of samples are arbitrary: they would cost bytes and mean nothing.
        most = min(self.slices.width, rows)
        if self.fit.most is not None:
            if self.fit.most < self.slices.width and self.fit.most > rows:
                raise ConfigError(
                    f"{rows} samples are too few for {self.fit.most} directions; lower most or fit longer"
                )
            most = min(most, self.fit.most)
        # Energy along each direction of all slices together.
        energy = np.einsum("gkd,gkl,gld->d", vectors, tests, vectors, optimize=True)
        total = float(np.trace(tests, axis1=1, axis2=2).sum())
        varies = total > 0.0 or float(np.trace(spreads, axis1=1, axis2=2).sum()) > 0.0
        enough = np.flatnonzero(total - np.cumsum(energy[:most]) <= self.fit.loss * total)
        d = (int(enough[0]) + 1 if enough.size else most) if varies else 0
        carriers = np.ascontiguousarray(vectors[:, :, :d], np.float32)
        return Subspace(carriers, mean.astype(np.float32) if self.fit.center else None)
