"""PowerSGD: all clients send matrices in one low-rank basis, which a power iteration improves from round to round.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, arXiv:1905.13727. The authors' package and the hook of PyTorch were read; the paper's figures are recalled.

In one basis sending is linear, so the factors of N clients add up to the factor of their mean: the server's work per
client, and what goes down, do not grow with N. This is the mathematics of one client and one basis; how a basis becomes
common is a matter of messages (:mod:`fedcomp.systems.power_sgd`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp import params
from fedcomp.codecs.base import Codec, State
from fedcomp.codecs.coefficients import VALUES
from fedcomp.codecs.feedback import ErrorFeedback, shorten
from fedcomp.codecs.lowrank import LEFT, RIGHT, Basis, LowRank, Part, Projection, Ranks
from fedcomp.codecs.memory import number_of, vector_of
from fedcomp.codecs.waiting import InBasis, id_of_basis, too_long
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.rules import Int, Maybe, OneOf, Real, Switch
from fedcomp.stateful import within_epoch
from fedcomp.wire import Frame

FORMS: Final = ("alternating", "two-exchange")
MEMORIES: Final = ("local", "aggregated")

_SENT: Final = "sent"


@dataclass(frozen=True, repr=False, eq=False)
class PowerSGD(InBasis[Basis]):
    """Send low-rank updates in a basis shared by all clients, with error feedback. A tensor m x p is a matrix M; each
    round::

        p = memory + update                                       # of client i: M_i
        alternating:   V of the last round;  C_i = M_i V;  step (Σ a_i C_i) V';  next V = orthonormal(Σ a_i C_i)
        two-exchange:  P = orthonormal(Σ a_i M_i Q);  C_i = M_i'P;  step P (Σ a_i C_i)';  next Q = Σ a_i C_i, scaled
        memory = p - C_i V'                                       # "local"
        memory = p - (Σ a_i C_i) V'                               # "aggregated"

    In the alternating form the basis changes sides every round: half an iteration per exchange, as in the authors'
    package (read). The two-exchange form is the paper's.

    Both memories conserve the sum over the round's clients. The local one holds what a client did not send. The
    aggregated one (PyTorch's hook, read) also holds the client's deviation from the mean, which accumulates: two
    clients that always hold A and -A of rank 1 have memories of t‖A‖ after t rounds (measured, tested), and of a
    bounded length under the local one. Neither is safe if clients differ permanently and ranks are full: components
    that cancel in the mean are in no basis, are never sent and stay in the memories. Monitor their norm, or set
    ``norm_guard``.

    :meth:`encode` is for a single client: error feedback around :class:`~fedcomp.codecs.LowRank`. In a round:
    :meth:`begin`, then :meth:`send` in a basis.

    Parameters
    ----------
    rank : int
        Columns of a factor; of a matrix m x p at most ``min(m, p)``.
    form : {"alternating", "two-exchange"}
    memory : {"local", "aggregated"}
        The product that is subtracted from the memory. "aggregated" first subtracts the local one and corrects it when
        the mean arrives; a client that receives a whole model instead keeps the local memory.
    warm_start : bool
        Whether a round starts from the last round's basis, or from a new random one.
    min_rate : float
        At least 0. A matrix is factored when what a client sends of it, times this, is less than m p: r (m + p) / 2 on
        average over two rounds in the alternating form, as in the authors' package (read: its default is 2, too), and r
        (m + p) in the two-exchange form, as in PyTorch's hook (read). Vectors, and matrices that are too small, are
        sent whole.
    values : {"float32", "bf16", "q8", "q4"}
        Format of the clients' factors; rounding errors stay in their memory. The server always sends float32.
    norm_guard : float, optional
        Bound of ‖memory‖ in multiples of ‖update‖; see :class:`~fedcomp.codecs.feedback.ErrorFeedback`.
    dense : bool
        Do not factor: for the rounds before compression starts.

    Notes
    -----
    State between rounds: one float32 vector; the basis of the last frame, which is needed to roll it back; with
    "aggregated" that frame.

    Examples
    --------
    >>> PowerSGD(rank=1).preview([0.5, -3.0, 1.0])  # a vector is no matrix
    array([ 0.5, -3. ,  1. ], dtype=float32)
    """

    codec_id: ClassVar[str] = "power-sgd"
    passing = InBasis.passing | {_SENT}

    rank: Annotated[int, Int(1)] = 2
    form: Annotated[str, OneOf(*FORMS)] = "alternating"
    memory: Annotated[str, OneOf(*MEMORIES)] = "local"
    warm_start: Switch = True
    min_rate: Annotated[float, Real(least=0.0)] = 2.0
    values: Annotated[str, OneOf(*VALUES)] = "float32"
    norm_guard: Annotated[float | None, Maybe(Real(above=0.0))] = None
    dense: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both factors of a client's own travel, which is no gain below a rate of 1.
        params.assign(self, codec=LowRank(self.rank, max(1.0, self.min_rate)))

    @property
    def ranks(self) -> Ranks:
        """Which tensors are factored."""
        # Of the two factors one travels in a round; both do in a round of two exchanges.
        share = 1.0 if self.form == "two-exchange" else 0.5
        return Ranks(self.rank, math.inf if self.dense else share * self.min_rate)

    @property
    def two_exchanges(self) -> bool:
        """Whether a round asks for projections before it has a basis."""
        return self.form == "two-exchange" and not self.dense

    def start(self, mean: tuple[Basis, Sequence[Part]] | None, layout: Layout, key: Key) -> Basis:
        """Return what a round begins with: its basis, or in the two-exchange form what is multiplied first.

        The same at all ends that hold the same last step.

        Parameters
        ----------
        mean : tuple of Basis and factors, or None
            Basis and factors of the last step; None where there was none.
        key : Key
            What is drawn from: named by the version of the model, which both ends know.
        """
        drawn = mean is None or not self.warm_start or not any(part.size for part in mean[1])
        if drawn or mean is None:
            return Basis.of(None, RIGHT, self.ranks, layout, key)
        basis, factors = mean
        if self.two_exchanges:
            return Basis(RIGHT, tuple(scaled(part) for part in factors))
        return Basis.of(factors, 1 - basis.side, self.ranks, layout, key)

    def between(self, factors: Sequence[Part], layout: Layout, key: Key) -> Basis:
        """Return the basis of the mean of the clients' first projections, for their second."""
        return Basis.of(factors, LEFT, self.ranks, layout, key)

    def on(self, basis: Basis) -> Projection:
        """Return the codec of what clients send in ``basis``."""
        ranks = self._ranks_of(basis)
        return Projection(basis, ranks.rank, ranks.min_rate, self.values)

    def mean(self, basis: Basis) -> Projection:
        """Return the codec in which the server sends the mean, and clients their first projections: float32."""
        ranks = self._ranks_of(basis)
        return Projection(basis, ranks.rank, ranks.min_rate)

    def _ranks_of(self, basis: Basis) -> Ranks:
        # A step of a dense round is read after compression has started.
        return self.ranks if any(part.size for part in basis.parts) else Ranks(self.rank, math.inf)

    def first(self, state: State, basis: Basis, layout: Layout, key: Key) -> Frame:
        """Return the projection of the waiting update's p, by which the basis is found; the state stays as it is."""
        return self.mean(basis).encode(Update(self.total(state, layout), layout), {}, key)[0]

    def send(self, state: State, basis: Basis, layout: Layout, key: Key) -> tuple[Frame, State]:
        """Return the frame of the waiting update's p in ``basis``, and the state after it was sent.

        Raises
        ------
        StateError
            When no update waits.
        """
        frame, after = self.send_with(self.on(basis), basis, state, layout, key)
        if self.memory == "aggregated":
            after[_SENT] = np.frombuffer(frame, np.uint8)
        return frame, after

    def correct(self, state: State, mean: Frame, layout: Layout) -> State:
        """Return ``state`` with the product of ``mean``, the step that the last frame is part of, in place of its own.

        Of what was factored: tensors that travel whole leave nothing. Changes nothing under the local convention, and
        nothing where the other memory would be too long to be sent. A guard cuts again.

        Raises
        ------
        StateError, WireError
            When ``mean`` is not of the basis the frame was sent in.
        """
        basis = self.held(state, layout)
        if _SENT not in state or basis is None:
            return state
        codec, memory = self.on(basis), vector_of(state, "memory", layout).copy()
        own = codec.coefficients(state[_SENT].tobytes(), layout)
        for stretch, sent, came in zip(
            codec.stretches(layout), own, self.mean(basis).coefficients(mean, layout), strict=True
        ):
            if codec.count(stretch) is not None:
                codec.add(memory[stretch.slice], (sent - came).reshape(-1), stretch)
        if too_long(memory, layout) is not None:
            return state
        bound = number_of(state, "bound", "f")
        if self.norm_guard is not None and bound is not None:
            shorten(memory, bound)
        return {**self.lasting(state), "memory": memory}

    def open_basis(self, frame: Frame, number: int, layout: Layout) -> Basis:
        nothing = nothing_factored(self, layout)
        return nothing if number == nothing.id else Basis.open(frame, number, self.ranks, layout)

    def around(self, codec: Codec) -> ErrorFeedback:
        return ErrorFeedback(codec, norm_guard=self.norm_guard)

    def reader(self, basis: Basis, state: State) -> Codec:
        return self.on(basis)


def scaled(factor: Part) -> Part:
    """Return a factor whose columns are at most 1 long: times powers of two, which change no digit of a product.

    The basis of M Q is the same for all lengths of Q's columns, and M Q overflows only where M does.
    """
    if not factor.size:
        return factor
    _, exponents = np.frexp(np.abs(factor).max(axis=0))
    longest = (factor.shape[0] - 1).bit_length() / 2  # sqrt(rows) <= 2**longest
    return np.ldexp(factor, -exponents - math.ceil(longest)).astype(np.float32)


def basis_key(seed: int, version: int) -> Key:
    """Return what columns without a direction are drawn from at both ends, by the model's version."""
    return Key(seed, "power-sgd", within_epoch(version))


def nothing_factored(codec: PowerSGD, layout: Layout) -> Basis:
    """Return the basis of a round in which all travels whole."""
    return Basis.of(None, RIGHT, Ranks(codec.rank, math.inf), layout, Key(0))


def basis_of_last_frame(state: State) -> int | None:
    """Return the id of the basis of a frame whose memory waits for the mean; None where none does."""
    return id_of_basis(state) if _SENT in state else None
