"""GradiVeQ: clients send slices of their updates in a basis that the server fitted to earlier aggregated updates.

After Yu et al., NeurIPS 2018, arXiv 1811.03617; what was read of it, and what is derived, is in
:mod:`fedcomp.codecs.subspace`. This is the mathematics of one client and one basis. How a basis is fitted as training
goes on, and becomes common, is a matter of messages (:mod:`fedcomp.systems.gradiveq`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp import params, wire
from fedcomp.codecs.axes import ORDERS
from fedcomp.codecs.base import Codec, State
from fedcomp.codecs.coefficients import VALUES, SharedCoefficients
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.codecs.forms import FORMS
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.positional import Stretch, expected_dense, without_densities
from fedcomp.codecs.slices import Slices
from fedcomp.codecs.subspace import KINDS, BasisFit, SliceBasis, Subspace, shared_grid
from fedcomp.codecs.waiting import InBasis
from fedcomp.errors import ConfigError, StateError
from fedcomp.kernels import add_scaled
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Inside, Int, Maybe, OneOf, Real, Switch
from fedcomp.wire import Bundle, Frame, Tensor, Values

_STEPS: Final = "steps"

Peaks = Vector
"""The largest magnitude of the coefficients of each part, float32 of shape (parts,)."""


@dataclass(frozen=True, repr=False, eq=False)
class SliceProjection(SharedCoefficients):
    """Send slices as coefficients in ``basis``, and what fills no slice as it is.

    Up to a constant it is linear: the projection of a weighted mean is the weighted mean of what clients send, for any
    weights of sum 1. It is made per round and does not travel itself.

    Parameters
    ----------
    basis : SliceBasis
    values : {"float32", "bf16", "q8", "q4"}
        How coefficients travel: rounded to the nearest on scales of their own. Values that fill no slice are float32.
    grids : tuple of IntegerGrid, optional
        One for each part: the grids of a round on which all clients round their coefficients, without bias.
    """

    codec_id: ClassVar[str] = "slice-projection"

    basis: SliceBasis
    values: str = "float32"
    grids: tuple[IntegerGrid, ...] = ()

    @property
    def basis_id(self) -> int:
        return self.basis.id

    @property
    def linear(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the form
        return not self.grids and super().linear

    def __repr__(self) -> str:
        return f"SliceProjection(dimensions {list(self.basis.dimensions)}, basis {self.basis.id:x})"

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return slices and what fills none, tensor by tensor.

        Raises
        ------
        StateError
            When the basis is that of another layout.
        """
        if self.basis.slices.layout != layout:
            raise StateError("the basis is one of another model; sender and receiver must hold the same model")
        return self.basis.slices.stretches

    def form(self) -> dict[str, int]:
        # All grids have the same number of levels.
        return {"bits": self.grids[0].bits} if self.grids else super().form()

    def count(self, stretch: Stretch) -> int | None:
        part = self._part(stretch)
        return None if part is None else self.basis.slices.parts[part].count * self.basis.subspaces[part].dimension

    def project(self, values: Vector, stretch: Stretch, key: Key) -> Vector:
        return self._subspace(stretch).project(values.reshape(stretch.shape))

    def add(self, out: Vector, values: Vector, stretch: Stretch) -> None:
        out += self._subspace(stretch).reconstruct(values, stretch.shape[0]).reshape(-1)

    def write(self, found: Vector, stretch: Stretch, key: Key) -> Values:
        if not self.grids:
            return super().write(found, stretch, key)
        grid = self.grids[self.basis.slices.part_of[stretch.index]]
        return grid.values(grid.round(found, key.at(purpose=f"{key.purpose}/grid")))

    def value_class(self, stretch: Stretch) -> type[Values]:
        return wire.Uniform if self.grids else super().value_class(stretch)

    def check_values(self, tensor: Tensor, stretch: Stretch) -> None:
        if self.grids:
            self.grids[self.basis.slices.part_of[stretch.index]].check(tensor)
        else:
            super().check_values(tensor, stretch)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode; see :meth:`fedcomp.codecs.base.Codec.encode`. Copies the vector, whose axes are put in order."""
        ordered = self.basis.slices.in_order(update.vector)
        return super().encode(Update(ordered, update.layout), state, key)

    def enter(self, update: Update) -> None:
        """Put axes in order, and the coefficients of every stretch in its place."""
        update.vector[...] = self.basis.slices.in_order(update.vector)
        super().enter(update)

    def conclude(self, total: Update) -> None:
        """Form slices of the summed coefficients, and put the axes back."""
        super().conclude(total)
        self.basis.slices.write_back(total.vector)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        out = super().decode(frame, layout)
        self.basis.slices.write_back(out)
        return out

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        add_scaled(out.vector, self.decode(frame, out.layout), weight)

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the norm of what is decoded, from the coefficients: columns of a basis are orthonormal."""
        energy, bundle = 0.0, self.open(frame, layout)
        for index, tensor in enumerate(bundle.tensors):
            values, part = tensor.values.decoded(keep=True), self.basis.slices.part_of.get(index)
            wide = values.astype(np.float64)
            energy += float(wide @ wide) if part is None else self.basis.subspaces[part].energy(values)
        return math.sqrt(energy)

    def _part(self, stretch: Stretch) -> int | None:
        return self.basis.slices.part_of.get(stretch.index)

    def _subspace(self, stretch: Stretch) -> Subspace:
        return self.basis.subspaces[self.basis.slices.part_of[stretch.index]]


@dataclass(frozen=True, repr=False, eq=False)
class GradiVeQ(InBasis[SliceBasis]):
    """Send slices of convolutions and other tensors in a basis that is refitted during training.

    A tensor is read with its axes in ``order`` and cut into slices of ``width``, and each slice g is sent as Uᵀ(g -
    mu). The server fits U and mu to earlier aggregated updates, and computes U c + mu from the mean coefficients c
    once, for any number of clients. In rounds without a basis, in which the server samples, updates are sent
    uncompressed.

    :meth:`encode` is for a single client: without a fitted basis it sends everything. In a round: :meth:`begin`, then
    :meth:`send` in a basis.

    Parameters
    ----------
    width : int
        Elements of a slice (K). Tensors of fewer than two slices, and remainders, are sent uncompressed.
    order : str
        The axes of a convolution's kernel, the slowest first; see :mod:`fedcomp.codecs.axes`. With the depth fastest,
        neighbouring elements are most alike (measured).
    basis : {"pooled", "per_slice", "shared_first"}
        The slices of a tensor that a basis is fitted to: all together, each by itself, or the first one for all.
    loss : float
        Fraction of the energy of held-out updates that may be lost, in (0, 1).
    most : int, optional
        Largest number of coefficients per slice; None is a whole slice.
    center : bool
        Whether the mean of the sampled updates is subtracted. It is sent with the basis and is as large as the slices.
    refresh_tol : float, optional
        In (0, 1]: sampling restarts early if the basis misses more than this fraction of the updates' energy. Default:
        a basis is used for all of its rounds.
    values : {"float32", "bf16", "q8", "q4"}
        How clients send coefficients. The server always sends float32.
    levels : int, optional
        Round coefficients stochastically, without bias, to integers of at most this magnitude, with one scale per
        tensor for all clients. This needs a second exchange: the first collects all clients' largest coefficients. The
        scale is that of the largest one, so a single client with a huge coefficient makes it too coarse for everybody;
        ``values`` are on scales of each client.
    memory : bool
        Whether what the basis misses is kept in a memory (derived, not part of the paper). It is sent in the next dense
        round, all at once: see ``norm_guard``.
    norm_guard : float, optional
        Bound of ‖memory‖ in multiples of ‖update‖; see :class:`~fedcomp.codecs.feedback.ErrorFeedback`.

    Raises
    ------
    ConfigError
        For parameters out of range, and for ``levels`` beside another form than "float32".

    Examples
    --------
    >>> GradiVeQ(width=256, loss=0.1).preview([0.5, -3.0, 1.0])  # nobody has fitted a basis
    array([ 0.5, -3. ,  1. ], dtype=float32)
    """

    codec_id: ClassVar[str] = "gradiveq"
    # Of a client without others, whose updates travel as they are.
    linear = True
    passing = InBasis.passing | {_STEPS}

    width: Annotated[int, Int(1)] = 512
    order: Annotated[str, OneOf(*ORDERS)] = "HWFD"
    basis: Annotated[str, OneOf(*KINDS)] = "pooled"
    loss: Inside = 0.05
    most: Annotated[int | None, Maybe(Int(1))] = None
    center: Switch = False
    refresh_tol: Annotated[float | None, Maybe(Real(above=0.0, most=1.0))] = None
    values: Annotated[str, OneOf(*VALUES)] = "float32"
    levels: Annotated[int | None, Maybe(Int(1, 32767))] = None
    memory: Switch = False
    norm_guard: Annotated[float | None, Maybe(Real(above=0.0))] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, codec=Identity())
        if self.levels is not None and self.values != "float32":
            raise ConfigError(f"levels={self.levels} already sets the form; leave values={self.values!r} out")

    @property
    def never_enlarges(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the options
        """Whether what a basis makes of an update is never longer: a projection is not. A mean of former updates that
        is added, a memory, and rounding lengthen it."""
        return not (self.center or self.memory or self.levels) and FORMS[self.values].exact

    @property
    def fit(self) -> BasisFit:
        """How the server fits a basis."""
        return BasisFit(self.basis, self.loss, self.most, self.center)

    def around(self, codec: Codec) -> ErrorFeedback:
        # A filter of 0 freezes the memory at zero: no memory, without code of its own.
        return ErrorFeedback(codec, beta=1.0 if self.memory else 0.0, norm_guard=self.norm_guard)

    def slices(self, layout: Layout) -> Slices:
        """Return how updates of ``layout`` are cut; densities of single tensors are refused."""
        without_densities(layout, "layer", self)
        return Slices.of(layout, self.width, self.order)

    def read_basis(self, frame: Frame, layout: Layout) -> SliceBasis:
        """Return the basis of a frame, whatever it is called.

        Raises
        ------
        WireError
            When the frame holds none of such a codec and layout.
        """
        per_slice = self.basis == "per_slice"
        return SliceBasis.read(frame, self.slices(layout), per_slice=per_slice, center=self.center)

    def open_basis(self, frame: Frame, number: int, layout: Layout) -> SliceBasis:
        nothing = SliceBasis.nothing(layout)
        if number == nothing.id:
            return nothing
        basis = self.read_basis(frame, layout)
        if basis.id != number:
            raise wire.SchemaMismatch(f"the frame holds the basis {basis.id:x}, expected {number:x}")
        return basis

    def rounds(self, basis: SliceBasis) -> bool:
        """Whether clients that send in ``basis`` need grids."""
        return self.levels is not None and bool(basis.subspaces)

    def grids(self, peaks: Sequence[Peaks]) -> tuple[IntegerGrid, ...]:
        """Return the grids of a round, one for each part, of the clients' peaks.

        Raises
        ------
        ConfigError
            When a peak is negative or not finite, or there is none.
        """
        assert self.levels is not None
        if not peaks:
            raise ConfigError("there are no peaks to make a grid of")
        return tuple(shared_grid([float(peak) for peak in part], self.levels) for part in np.stack(peaks).T)

    def grids_of(self, steps: Vector) -> tuple[IntegerGrid, ...]:
        """Return the grids of given steps, float32 of shape (parts,)."""
        return tuple(IntegerGrid(float(step), self.levels or 0) for step in steps)

    def on(self, basis: SliceBasis, grids: tuple[IntegerGrid, ...] = ()) -> SliceProjection:
        """Return the codec of what clients send in ``basis``."""
        return SliceProjection(basis, self.values, grids)

    def mean(self, basis: SliceBasis) -> SliceProjection:
        """Return the codec in which the server sends the mean: float32."""
        return SliceProjection(basis)

    def reader(self, basis: SliceBasis, state: State) -> Codec:
        return self.on(basis, self.grids_of(state[_STEPS]) if _STEPS in state else ())

    def peaks(self, state: State, basis: SliceBasis, layout: Layout) -> Peaks:
        """Return the largest magnitudes of what the waiting update's p is in ``basis``."""
        slices, _ = basis.slices.cut(self.total(state, layout))
        found = [s.project(values) for values, s in zip(slices, basis.subspaces, strict=True)]
        return np.array([np.abs(c).max(initial=0.0) for c in found], np.float32)

    def send(
        self, state: State, basis: SliceBasis, layout: Layout, key: Key, grids: tuple[IntegerGrid, ...] = ()
    ) -> tuple[Frame, State]:
        """Return the frame of the waiting update's p in ``basis``, and the state after it was sent.

        Raises
        ------
        StateError
            When no update waits, or grids are missing.
        """
        if bool(grids) != self.rounds(basis):
            raise StateError(f"{self!r} sends in {basis.dimensions} dimensions on {len(grids)} grids")
        frame, after = self.send_with(self.on(basis, grids), basis, state, layout, key)
        if grids:
            after[_STEPS] = np.array([grid.step for grid in grids], np.float32)
        return frame, after

    def drift(self, state: State, basis: SliceBasis, layout: Layout) -> float:
        """Return the share of the waiting update's p, in its slices, that ``basis`` misses."""
        return basis.drift(self.total(state, layout))


def steps_frame(numbers: Vector) -> Frame:
    """Return peaks, or steps of grids, as they travel."""
    return wire.encode([wire.dense(numbers)])


def open_steps(frame: Frame, count: int) -> Vector:
    """Return ``count`` peaks or steps of a frame.

    Raises
    ------
    fedcomp.wire.WireError
        When it holds anything else, or a number that is negative.
    """
    (tensor,) = wire.decode(frame, (expected_dense(count, wire.Raw),)).tensors
    numbers = np.asarray(tensor.values.decode(), np.float32)
    if numbers.size and float(numbers.min()) < 0.0:
        raise wire.SchemaMismatch("magnitudes are not negative")
    return numbers
