"""ScaleCom: all clients send the coordinates that one of them chose, so the sum of N frames has k values, not N·k.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
NeurIPS 2020, arXiv:2104.11125. The abstract was read; the formulas are second-hand and agree with an unofficial
implementation; edge cases are derived. The cyclic local top-k (CLT-k) of the paper: in round t the leader t mod N
selects the top k of its own memory plus update, and all clients send their memory plus update on that support. With a
fixed support sending is linear, so it commutes with the mean.

This is the mathematics of one client and of one support; who leads, and how the support travels, is a matter of
messages (:mod:`fedcomp.systems.shared_support`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import Codec, State
from fedcomp.codecs.chunk import ChunkTop1
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.forms import FORMS
from fedcomp.codecs.positional import SCOPES, FormedCodec, PositionalCodec, Stretch, expected_sparse, require_values
from fedcomp.codecs.topk import TopK
from fedcomp.codecs.waiting import Waiting
from fedcomp.errors import ConfigError, StateError
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Maybe, OneOf, Real, Switch
from fedcomp.wire import SHARED, Bundle, Expected, Frame, SchemaMismatch, SharedSupport, Tensor

Supports = tuple[NDArray[np.int64], ...]
"""One array of ascending indices per stretch, relative to its start."""

SELECTORS: Final = ("exact", "chunk")

_BLOCK: Final = "support"
_BLOCK_ID: Final = "support-id"
# An id on the wire has 64 bits: 43 for the round's support, 20 for the stretch.
_STRETCH_BITS: Final = 20
_INDICES: Final = (*wire.PLAIN, "complement", "bins")


@dataclass(frozen=True, repr=False, eq=False)
class FixedSupport(FormedCodec):
    """Send the values on a support both ends hold; not a single index travels.

    For one support it is linear: frames of several clients may be summed before or after decoding. It is made per
    round and does not travel itself.

    Parameters
    ----------
    supports : tuple of int64 arrays
        Ascending indices, one array per stretch.
    support_id : int
        What both ends call it, in [0, 2**43).
    scope : {"global", "layer"}
    values : str
        As for :class:`~fedcomp.codecs.TopK`.
    """

    codec_id: ClassVar[str] = "fixed-support"

    supports: Supports
    support_id: int
    scope: str = "layer"
    values: str = "float32"

    @property
    def linear(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the form
        """Whether values travel as they are, so that what arrives adds up like what was sent."""
        return FORMS[self.values].exact

    def get_config(self) -> dict[str, Any]:
        """Refused: supports travel as index blocks (:func:`support_frame`)."""
        raise ConfigError("a fixed support has no configuration that can be sent; send its index block")

    def __repr__(self) -> str:
        return f"FixedSupport({sum(s.size for s in self.supports)} coordinates, id {self.support_id})"

    def indices(self, stretch: Stretch) -> NDArray[np.int64]:
        """Return the support of ``stretch``."""
        return self.supports[stretch.index]

    def tensor_id(self, stretch: Stretch) -> int:
        """Return the id under which the support of ``stretch`` is referred to in frames."""
        # A frame's supports are looked up by id alone, so every stretch needs one of its own.
        return self.support_id << _STRETCH_BITS | stretch.index

    def parts(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the parts of ``layout`` that have supports."""
        return super().stretches(layout)

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the stretches of ``layout``.

        Raises
        ------
        StateError
            When the supports are those of another layout.
        """
        parts = self.parts(layout)
        fits = len(parts) == len(self.supports)
        if not fits or any(i.size and i[-1] >= s.size for s, i in zip(parts, self.supports, strict=True)):
            raise StateError(
                f"the support of {len(self.supports)} tensors is not one of this model's {len(parts)}; sender and "
                "receiver must hold the same model"
            )
        return parts

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        indices = self.indices(stretch)
        kept = FORMS[self.values].code(values[indices])
        return wire.shared((stretch.size,), self.tensor_id(stretch), kept, indices=indices)

    def expect(self, stretch: Stretch) -> Expected:
        return Expected(
            "",
            (stretch.size,),
            "float32",
            self.indices(stretch).size,
            frozenset({SHARED}),
            value_codecs=frozenset({FORMS[self.values].values.name}),
        )

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse ``frame`` with the supports this codec holds, and check it."""
        if isinstance(frame, Bundle):
            return super().open(frame, layout)
        supports = {self.tensor_id(s): self.indices(s) for s in self.stretches(layout)}
        return super().open(wire.decode(frame, self.schema(layout), self.limits(layout), supports), layout)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require values of the chosen format on exactly this support."""
        ours = self.indices(stretch)
        named = isinstance(tensor.index, SharedSupport) and tensor.index.support_id == self.tensor_id(stretch)
        if tensor.kind is not SHARED or not named or not isinstance(tensor.values, FORMS[self.values].values):
            raise SchemaMismatch(
                f"{stretch.name}: expected {FORMS[self.values].values.__name__} values on the shared support "
                f"{self.tensor_id(stretch)}, the frame holds {type(tensor.values).__name__} on {tensor.index}"
            )
        FORMS[self.values].check(tensor.values, stretch.name)
        # A bundle may have been opened with another support under the same id.
        if tensor.indices is None or tensor.values.k != ours.size or not np.array_equal(tensor.indices, ours):
            raise SchemaMismatch(f"{stretch.name}: {tensor.values.k} values do not fit a support of {ours.size}")


@dataclass(frozen=True, repr=False, eq=False)
class LeaderSelected(Waiting):
    """Base of codecs that send on a support which one client, the leader, selects for all; see :class:`ScaleCom`.

    Parameters
    ----------
    density, beta, selector, scope, values, memory, norm_guard, dense
        As of :class:`ScaleCom`.
    """

    passing = frozenset({_BLOCK, _BLOCK_ID})

    density: Density = 0.01
    beta: Annotated[float, Real(above=0.0, most=1.0)] = 1.0
    selector: Annotated[str, OneOf(*SELECTORS)] = "exact"
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    memory: Switch = True
    norm_guard: Annotated[float | None, Maybe(Real(above=0.0))] = None
    dense: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory and self.beta != 1.0:
            raise ConfigError(f"beta={self.beta} filters a memory, but memory=False keeps none; leave beta at 1")
        leader = TopK if self.selector == "exact" else ChunkTop1
        params.assign(self, codec=leader(1.0 if self.dense else self.density, scope=self.scope, values=self.values))

    @property
    def leader(self) -> PositionalCodec:
        """The selector: what a leader without followers would send its values with."""
        assert isinstance(self.codec, PositionalCodec)
        return self.codec

    def choose(self, state: State, layout: Layout, key: Key) -> Supports:
        """Return the support a leader with ``state`` chooses; coordinates that are zero are left out."""
        total = self.total(state, layout)
        return self.choose_from(total, layout, key)

    def choose_from(self, vector: Vector, layout: Layout, key: Key) -> Supports:
        """Return the selector's support of ``vector``, float32 of the layout's size; of all coordinates if dense."""
        if self.dense:
            return everything(self.leader, layout)
        found = []
        for stretch in self.leader.stretches(layout):
            indices = self.leader.pack(vector[stretch.slice], stretch, key.at(layer=stretch.index)).indices
            assert indices is not None  # selectors list theirs
            found.append(indices)
        return tuple(found)

    def send(self, state: State, supports: Supports, support_id: int, layout: Layout, key: Key) -> tuple[Frame, State]:
        """Return the frame of the waiting update's p on ``supports``, and the state after it was sent.

        Raises
        ------
        StateError
            When no update waits, or the supports are not of this layout.
        """
        update = self.waiting(state, layout)
        frame, after = self.around(self.on(supports, support_id)).encode(update, self.lasting(state), key)
        return frame, {**after, **self.block_of(supports, support_id, layout)}

    def block_of(self, supports: Supports, support_id: int, layout: Layout) -> State:
        """Return what the state holds of the support that the last frame lies on."""
        # Kept as an index block, which takes a byte or two per index where the array takes eight.
        block = np.frombuffer(support_frame(supports, self, layout), np.uint8)
        return {_BLOCK: block, _BLOCK_ID: np.asarray(support_id, np.int64)}

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        # The frame was encoded without an exchange, by a leader without followers.
        if _BLOCK not in state:
            return self.feedback.rollback(state, frame, layout)
        held = held_support(state)
        assert held is not None
        # dense=True lifts the limit on indices: the support may stem from a dense round before compression started.
        supports = open_support(held[1], replace(self, dense=True), layout)
        return self.around(self.on(supports, held[0])).rollback(self.lasting(state), frame, layout)

    def on(self, supports: Supports, support_id: int) -> FixedSupport:
        """Return the codec of the values on ``supports``."""
        return FixedSupport(supports, support_id, self.scope, self.values)

    def mean(self, supports: Supports, support_id: int) -> FixedSupport:
        """Return the codec in which the server sends the mean: the same support, always float32."""
        return FixedSupport(supports, support_id, self.scope)

    @property
    def feedback(self) -> ErrorFeedback:
        return self.around(self.codec)

    def around(self, codec: Codec) -> ErrorFeedback:
        """Return the memory around what encodes."""
        # A filter of 0 freezes the memory at zero, which is how memory=False needs no code of its own.
        return ErrorFeedback(codec, beta=self.beta if self.memory else 0.0, norm_guard=self.norm_guard)


@dataclass(frozen=True, repr=False, eq=False)
class ScaleCom(LeaderSelected):
    """Cyclic local top-k with a low-pass memory. Needs two exchanges: the support first, then the values on it.

    Each round, with update g::

        p = memory + g
        q = the decoded values of p on the leader's support, 0 elsewhere
        memory = (1 - beta) * memory + beta * (p - q)

    A client that does not receive the support in time has q = 0. For every client Σ q + memory / beta = Σ g,
    elementwise (derived). For ``beta < 1`` a sent coordinate keeps (1 - beta) of its memory.

    :meth:`encode` is for a single client: error feedback around the selector. The two exchanges are :meth:`begin`,
    :meth:`choose` (the leader) and :meth:`send`.

    Parameters
    ----------
    density : float
        k/n, in (0, 1]. With ``scope="layer"`` the layout's policy may set another one per tensor, as the paper
        recommends.
    beta : float
        In (0, 1]; 1 is classical error feedback. The paper uses 0.1 for large batches (recalled).
    selector : {"exact", "chunk"}
        How the leader selects: its exact top k, or the largest magnitude of each chunk of 1/density coordinates (the
        paper's chunk-wise quasi-sort).
    scope : {"global", "layer"}
        Rank the whole model, or every tensor by itself.
    values : str
        How values travel, as for :class:`~fedcomp.codecs.TopK`; beside 8 bits and fewer the dense rest takes 8.
    memory : bool
        False keeps no memory at all: what is not sent is lost. For comparison.
    norm_guard : float, optional
        Bound of ‖memory‖ in multiples of ‖g‖; see :class:`~fedcomp.codecs.feedback.ErrorFeedback`.
    dense : bool
        Share the support of all coordinates, whatever ``density`` says: the rounds before compression starts.

    Notes
    -----
    State between rounds: one float32 vector. Between the two exchanges the update is kept as well. After a frame left:
    the index block it lies on, which is needed to roll it back and to read the server's mean.

    Examples
    --------
    >>> ScaleCom(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "scalecom"


def everything(leader: PositionalCodec, layout: Layout) -> Supports:
    """Return the support of all coordinates: coordinates that are zero at one client are not so at another."""
    return tuple(np.arange(stretch.size) for stretch in leader.stretches(layout))


def support_frame(supports: Sequence[NDArray[np.int64]], codec: LeaderSelected, layout: Layout) -> Frame:
    """Return the index block of ``supports``: a frame of ones, whose values take no bytes."""
    parts = codec.leader.stretches(layout)
    return wire.encode(
        [
            wire.sparse((s.size,), i, wire.Ones(i.size), index=_index(codec.leader, s))
            for s, i in zip(parts, supports, strict=True)
        ]
    )


def open_support(frame: Frame, codec: LeaderSelected, layout: Layout) -> Supports:
    """Return the supports of an index block.

    Raises
    ------
    fedcomp.wire.WireError
        When it is not the index block of such a codec and layout.
    """
    leader = codec.leader
    schema = tuple(
        expected_sparse(s.size, wire.Ones, s.size if codec.dense else leader.expect(s).most_indices, _INDICES)
        for s in leader.stretches(layout)
    )
    bundle = wire.decode(frame, schema)
    found = []
    for tensor in bundle.tensors:
        require_values(tensor, wire.Ones, sparse=True)
        assert tensor.indices is not None
        found.append(tensor.indices)
    return tuple(found)


def _index(leader: PositionalCodec, stretch: Stretch) -> str:
    """Return the index codec of a block: one offset per chunk if this is shorter."""
    return f"auto+bins:{leader.chunk(stretch)}" if isinstance(leader, ChunkTop1) else "auto"


def held_support(state: State) -> tuple[int, Frame] | None:
    """Return id and index block of the support the last frame lies on, None when there is none in ``state``."""
    if _BLOCK not in state or _BLOCK_ID not in state:
        return None
    return int(state[_BLOCK_ID]), state[_BLOCK].tobytes()
