"""LGC: values on a shared support are sent as latents of an autoencoder that is trained during the run.

After Abrahamyan, Chen, Bekoulis and Deligiannis, "Learned Gradient Compression for Distributed Deep Learning", IEEE
TNNLS 33(12) 2022, arXiv 2103.08870 (abstract read, the body recalled; the autoencoder and the defaults read in a third
party's implementation). Derived here: what the memory holds, how a scale is agreed on, where an innovation counts.

Gradients of different nodes resemble each other where they are large, so that what they have in common may travel once.
In the *ring* instance all clients send latents of their values on one support, whose mean is decoded. In the *server*
instance one client, the common node, sends its latents; every client sends its innovation, the few values that are
largest, and the server makes of both what the client has on the common node's support.

This is the mathematics of one client and of one support. Who leads, how positions and weights travel, and how the
autoencoder is trained, is a matter of messages (:mod:`fedcomp.systems.lgc`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.autoencoder import IDENTITY, IdentityDecoder, IdentityEncoder, LatentDecoder, LatentEncoder, latents
from fedcomp.codecs.base import State, all_finite, norm
from fedcomp.codecs.coefficients import id_bytes, id_of
from fedcomp.codecs.forms import FORMS
from fedcomp.codecs.positional import PositionalCodec, Stretch, expected_dense, stretches
from fedcomp.codecs.scalecom import FixedSupport, LeaderSelected, Supports
from fedcomp.codecs.topk import TopK
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.kernels import add_scaled, scatter_add, select_topk
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Int, OneOf, Positive
from fedcomp.wire import BASIS_ID, COEFFICIENTS, SPARSE, Bundle, Expected, Frame, SchemaMismatch, Tensor

INSTANCES: Final = ("ring", "server")

EFS: Final = ("mask", "decoded")

_DELIVERED: Final = "delivered"

FEWEST: Final = 16
"""Values below which the autoencoder is left out: it works in steps of 16."""


SCALES: Final = (2.0**-63, 2.0**63)
"""The least and the largest scale: nobody's values overflow where somebody names one that is absurd."""


@dataclass(frozen=True, repr=False, eq=False)
class LatentSupport(FixedSupport):
    """Send the values of the coded tensors as latents, those of the others as they are, all on one support.

    Latents are added up before they are decoded (:meth:`gather`, :meth:`conclude`). An encoder is not linear, so that
    the latents of a mean are not the mean of latents: an autoencoder is trained for it, nothing guarantees it.

    Parameters
    ----------
    supports : tuple of int64 arrays
        Ascending indices: of all coded tensors together, counted from the start of the vector, where any is coded;
        then one array per tensor.
    coded : int
        How many tensors are coded, from the first.
    scale : float
        By which coded values are divided before they are encoded. The same for all clients.
    encoder : LatentEncoder
    decoder : LatentDecoder, optional
        Needed by who reads.
    """

    codec_id: ClassVar[str] = "latent-support"

    coded: int = 0
    scale: float = 1.0
    encoder: LatentEncoder = field(default_factory=IdentityEncoder)
    decoder: LatentDecoder | None = None

    @property
    def linear(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the encoder
        return isinstance(self.encoder, IdentityEncoder) and FORMS[self.values].exact

    def parts(self, layout: Layout) -> tuple[Stretch, ...]:
        parts = stretches(layout, self.scope)
        # Of a smaller model the supports will be refused.
        if not 0 < self.coded <= len(parts):
            return parts
        stop = parts[self.coded - 1].stop
        whole = Stretch(0, "the coded tensors", 0, stop, shape=(stop,))
        return (whole, *(replace(part, index=part.index - self.coded + 1) for part in parts[self.coded :]))

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        """Return the id of the encoder; nothing where values are not encoded."""
        return () if isinstance(self.encoder, IdentityEncoder) else ((BASIS_ID, id_bytes(self.encoder.id)),)

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse and check ``frame``, and require the id of this encoder."""
        bundle = super().open(frame, layout)
        ours = None if isinstance(self.encoder, IdentityEncoder) else self.encoder.id
        if (named := id_of(bundle)) != ours:
            raise SchemaMismatch(
                f"the frame names the encoder {named}, expected {ours}: latents of two encoders do not add"
            )
        return bundle

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        if not self._is_coded(stretch):
            return super().pack(values, stretch, key)
        latents = encoded(self.encoder, values[self.indices(stretch)], self.scale)
        return Tensor(FORMS[self.values].code(latents), (stretch.size,), kind=COEFFICIENTS)

    def expect(self, stretch: Stretch) -> Expected:
        expected = super().expect(stretch)
        if not self._is_coded(stretch):
            return expected
        return replace(expected, max_k=self._latents, kinds=frozenset({COEFFICIENTS}))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        if not self._is_coded(stretch):
            super().check(tensor, stretch)
            return
        form = FORMS[self.values]
        if tensor.kind is not COEFFICIENTS or tensor.values.k != self._latents:
            raise SchemaMismatch(
                f"{stretch.name}: expected {self._latents} latents, the frame holds {tensor.values.k} values of a "
                f"{tensor.kind.name.lower()} tensor"
            )
        if not isinstance(tensor.values, form.values):
            raise SchemaMismatch(f"{stretch.name}: {type(tensor.values).__name__} latents were not agreed on")
        form.check(tensor.values, stretch.name)

    def gather(self, frame: Frame | Bundle, weight: float, total: Update) -> None:
        """Add ``weight`` times the latents from the beginning of the coded tensors on, other values in their places."""
        bundle = self.open(frame, total.layout)
        # Not this class's, whose tensors are decoded.
        for tensor, where in PositionalCodec.placed(self, bundle, total.layout):
            values = tensor.values.decoded()
            if tensor.indices is None:
                add_scaled(total.vector[where][: values.size], values, weight)
            else:
                scatter_add(total.vector[where], tensor.indices, values, weight)

    def enter(self, update: Update) -> None:
        """Put the latents in place of the coded values."""
        if self.coded:
            values = update.vector[self.stretches(update.layout)[0].slice]
            latents = encoded(self.encoder, values[self.supports[0]], self.scale)
            values[: latents.size] = latents
            values[latents.size :] = 0.0

    def conclude(self, total: Update) -> None:
        """Decode the summed latents onto the support."""
        if self.coded:
            values = total.vector[self.stretches(total.layout)[0].slice]
            latents = values[: self._latents].copy()
            values[...] = 0.0
            values[self.supports[0]] = self._decoded(latents)

    def placed(self, bundle: Bundle, layout: Layout) -> list[tuple[Tensor, slice]]:  # type: ignore[override]
        """Return the frame's tensors with their places, the coded one decoded."""
        found = list(super().placed(bundle, layout))
        if self.coded:
            tensor, where = found[0]
            with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
                values = self._decoded(tensor.values.decoded())
            tensor = replace(tensor, values=wire.Raw(values), kind=SPARSE, indices=self.supports[0], index="auto")
            found[0] = tensor, where
        return found

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the norm of latents times their scale and of the other values: nothing is decoded for it."""
        tensors = self.open(frame, layout).tensors
        found = [norm(tensor.values.decoded(keep=True)) for tensor in tensors]
        if self.coded:
            found[0] *= self.scale
        return math.hypot(*found)

    @property
    def _latents(self) -> int:
        return self.encoder.latents(self.supports[0].size)

    def _is_coded(self, stretch: Stretch) -> bool:
        return bool(self.coded) and stretch.index == 0

    def _decoded(self, latents: Vector) -> Vector:
        if self.decoder is None:
            raise StateError("the latents cannot be decoded here: there is no decoder")
        return self.decoder.decode(latents, self.supports[0].size) * np.float32(self.scale)


def scale_of(values: Vector) -> float:
    """Return the root mean square of ``values``, 1 of zeros: what they are divided by before they are encoded.

    Within :data:`SCALES`.
    """
    wide = values.astype(np.float64)
    # Rounded as it is used: the division is one in float32.
    found = float(np.float32(math.sqrt(float(wide @ wide) / max(1, wide.size))))
    return min(max(found, SCALES[0]), SCALES[1]) if found else 1.0


def encoded(encoder: LatentEncoder, values: Vector, scale: float) -> Vector:
    """Return the latents of ``values`` divided by ``scale``.

    Raises
    ------
    NonFiniteUpdate
        When they overflow: values far above the scale.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        latents = encoder.encode(values / np.float32(scale))
    if not all_finite(latents):
        raise NonFiniteUpdate(f"the latents of values up to {np.abs(values).max():.3g} overflow at scale {scale:.3g}")
    return latents


@dataclass(frozen=True, repr=False, eq=False)
class Innovation(TopK):
    """Top-k of every tensor, of the coded ones at a far smaller density. It is made per round and does not travel.

    Parameters
    ----------
    tensors : int
        How many tensors are coded, from the first.
    innovation : float
        Density of the coded ones.
    """

    codec_id: ClassVar[str] = "innovation"

    tensors: int = 0
    innovation: float = 1.0

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the tensors with their densities."""
        return tuple(
            replace(part, density=self.innovation) if part.index < self.tensors else part
            for part in super().stretches(layout)
        )

    def on_support(self, values: Vector, supports: Supports, layout: Layout) -> Vector:
        """Return what would be sent of a node's values on a support: of each coded tensor the largest, zeros elsewhere.

        Parameters
        ----------
        values : float32 array, shape (k,)
            Those of the coded tensors.
        """
        side, start = np.zeros_like(values), 0
        for part, support in zip(self.stretches(layout)[: self.tensors], supports, strict=False):
            own = values[start : start + support.size]
            kept = select_topk(own, min(own.size, self.count(part)))
            side[start + kept] = own[kept]
            start += support.size
        return side


@dataclass(frozen=True, repr=False, eq=False)
class _Delivered(TopK):
    """Writes what the memory gives away, whatever is in the vector: the values of ``given`` on ``supports``."""

    given: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    supports: Supports = ()

    def most(self, stretch: Stretch) -> int:
        """Return the size of ``stretch``: no density bounds what another node and this one chose together."""
        return stretch.size

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        parts = self.stretches(update.layout)
        tensors = [
            wire.sparse((part.size,), indices, wire.Raw(self.given[part.slice][indices]))
            for part, indices in zip(parts, self.supports, strict=True)
        ]
        return self.frame_of(tensors, self.given[update.layout.compressed_size :]), state


@dataclass(frozen=True, repr=False, eq=False)
class LGC(LeaderSelected):
    """Send values on a leader's support as latents of a trained autoencoder.

    There are three stages, and the server's messages name the current one: whole updates; values on the leader's
    support, with which the server trains the autoencoder (both as in :class:`~fedcomp.codecs.ScaleCom`); latents and
    innovations.

    :meth:`encode` is for a single client: error feedback around the selector. In a round: :meth:`begin`, :meth:`choose`
    (the leader), then :meth:`send_latents` or :meth:`send_innovation`.

    Parameters
    ----------
    density : float
        k/n of each tensor, in (0, 1]; the layout's policy may set another one per tensor. Published code has 0.001.
    innovation : float
        The density of an innovation, for the server instance only. Published code has 0.00001.
    instance : {"ring", "server"}
        All clients send latents, whose mean is decoded; or one client does, and the others send innovations.
    ef : {"mask", "decoded"}
        What is subtracted from the memory at delivered positions: all of it, so that coding errors are lost ("mask"),
        or the values that the server decodes, for which clients need the decoder, too ("decoded").
    raw : int
        Number of last compressed tensors that are sent as values, not as latents. The paper excludes the last layer
        (recalled); the policy decides which tensors are sent dense.
    encoder, decoder : int
        Ids of the autoencoder's halves in the last stage; 0 before it. Set by the server, with every message.
    scale : float
        Divisor of values before encoding: the root mean square of the leader's values. Set by the server.
    beta, selector, values, memory, norm_guard, dense
        As of :class:`~fedcomp.codecs.ScaleCom`; latents travel in the form of ``values``, too.

    Raises
    ------
    ConfigError
        For ``scope="global"``, since LGC ranks every tensor by itself.

    Notes
    -----
    After a frame left in the last stage the state holds, beside what ScaleCom's does, the values it delivered: latents
    alone would not bring them back.

    Examples
    --------
    >>> LGC(density=0.5, instance="server").preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "lgc"
    passing = frozenset({*LeaderSelected.passing, _DELIVERED})

    innovation: Density = 0.001
    instance: Annotated[str, OneOf(*INSTANCES)] = "ring"
    ef: Annotated[str, OneOf(*EFS)] = "mask"
    raw: Annotated[int, Int()] = 1
    encoder: Annotated[int, Int()] = 0
    decoder: Annotated[int, Int()] = 0
    scale: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope != "layer":
            raise ConfigError(f"scope={self.scope!r} does not fit: LGC ranks every tensor by itself")

    @property
    def sends_latents(self) -> bool:
        """Whether this is the last stage."""
        return self.encoder != 0

    def coded(self, layout: Layout) -> int:
        """Return how many tensors are coded, from the first."""
        return max(0, len(self.leader.stretches(layout)) - self.raw)

    def coded_support(self, supports: Supports, layout: Layout) -> NDArray[np.int64]:
        """Return where coded values are in the vector, ascending."""
        parts = self.leader.stretches(layout)[: self.coded(layout)]
        found = [indices + part.start for part, indices in zip(parts, supports, strict=False)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def latents_on(
        self, supports: Supports, support_id: int, layout: Layout, encoder: LatentEncoder, decoder: LatentDecoder | None
    ) -> LatentSupport:
        """Return the codec of latents on ``supports``, of the ring instance."""
        coded, where, scale = self.coded(layout), self.coded_support(supports, layout), self.scale
        # Too few to be coded: they travel as they are, and nothing has to be divided.
        if where.size < FEWEST or isinstance(encoder, IdentityEncoder):
            encoder, decoder, scale = IdentityEncoder(), IdentityDecoder(), 1.0
        merged = (where, *supports[coded:]) if coded else supports
        return LatentSupport(merged, support_id, self.scope, self.values, coded, scale, encoder, decoder)

    def innovations(self, layout: Layout) -> Innovation:
        """Return the codec of what every client sends in the server instance."""
        coded = self.coded(layout)
        return Innovation(self.density, "layer", self.values, tensors=coded, innovation=self.innovation)

    def send_latents(
        self,
        state: State,
        supports: Supports,
        support_id: int,
        layout: Layout,
        key: Key,
        encoder: LatentEncoder,
        decoder: LatentDecoder | None = None,
    ) -> tuple[Frame, State]:
        """Return the frame of latents of the waiting update's p on ``supports``, and the state after it was sent.

        Raises
        ------
        StateError
            When no update waits, the supports are not of this layout, or there is no decoder where one is needed.
        """
        update = Update(self.total(state, layout), layout)
        codec = self.latents_on(supports, support_id, layout, encoder, decoder)
        frame, _ = codec.encode(update, {}, key)
        if self.ef == "decoded":
            given = codec.decode(frame, layout)
        else:
            plain = self.on(supports, support_id)
            given = plain.decode(plain.encode(update, {}, key)[0], layout)
            # Whatever latents make of them, and whatever rounding would leave.
            where = self.coded_support(supports, layout)
            given[where] = update.vector[where]
        return frame, self._after(state, given, supports, (supports, support_id), layout, key)

    def send_innovation(
        self,
        state: State,
        supports: Supports,
        support_id: int,
        layout: Layout,
        key: Key,
        latents: Vector | None = None,
        decoder: LatentDecoder | None = None,
    ) -> tuple[Frame, State]:
        """Return the frame of the innovation of the waiting update's p, and the state after it was sent.

        Parameters
        ----------
        supports : tuple of int64 arrays
            The common node's.
        latents : float32 array, optional
            The common node's, as the server read them; with ``decoder`` needed for ``ef="decoded"``.

        Raises
        ------
        StateError
            When no update waits, or what is needed is missing.
        """
        total, codec = self.total(state, layout), self.innovations(layout)
        frame, _ = codec.encode(Update(total, layout), {}, key)
        bundle, where = codec.open(frame, layout), self.shared_positions(supports, layout)
        given = codec.decode(bundle, layout)
        side, sent = side_of(codec, bundle, where, layout)
        if self.ef == "mask":
            found = total[where]
        elif latents is None or decoder is None:
            raise StateError("the common node's values cannot be decoded here: latents or decoder are missing")
        else:
            found = NodeEstimate(latents, decoder, scale_of(total[where])).of(side)
        given[where[~sent]] = found[~sent]
        delivered = []
        for part, common, own in zip(codec.stretches(layout), supports, bundle.tensors, strict=False):
            assert own.indices is not None  # top-k lists them
            shared = part.index < codec.tensors and where.size
            delivered.append(np.union1d(common, own.indices) if shared else own.indices)
        return frame, self._after(state, given, tuple(delivered), (supports, support_id), layout, key)

    def shared_positions(self, supports: Supports, layout: Layout) -> NDArray[np.int64]:
        """Return where in the vector the server instance decodes: nowhere, if there are too few positions."""
        where = self.coded_support(supports, layout)
        return where if where.size >= FEWEST else where[:0]

    def reached(self, supports: Supports, bundles: Iterable[Bundle], layout: Layout) -> Supports:
        """Return where anything arrives in the server instance: the common node's support, and all innovations."""
        number = self.coded(layout) if self.shared_positions(supports, layout).size else 0
        found = [common if index < number else common[:0] for index, common in enumerate(supports)]
        for bundle in bundles:
            for index, tensor in enumerate(bundle.tensors[: len(found)]):
                assert tensor.indices is not None  # top-k lists them
                found[index] = np.union1d(found[index], tensor.indices)
        return tuple(found)

    def latents_frame(self, values: Vector, encoder: LatentEncoder) -> Frame:
        """Return the frame of the common node's latents, of its values on the support.

        Raises
        ------
        NonFiniteUpdate
            When they overflow.
        """
        scale = 1.0 if isinstance(encoder, IdentityEncoder) else scale_of(values)
        form = FORMS[self.values].code(encoded(encoder, values, scale))
        return wire.encode([Tensor(form, (form.k,))], tlvs=((BASIS_ID, id_bytes(encoder.id)),))

    def open_latents(self, frame: Frame, size: int) -> Vector:
        """Return the common node's latents, of ``size`` values.

        Raises
        ------
        fedcomp.wire.WireError
            When they are not as many, or of another encoder than the messages name.
        """
        form = FORMS[self.values]
        count = size if self.encoder == IDENTITY else latents(size)
        bundle = wire.decode(frame, (expected_dense(count, form.values),))
        form.check(bundle.tensors[0].values, "the common node's latents")
        if id_of(bundle) != self.encoder:
            raise SchemaMismatch(f"the latents are not of the encoder {self.encoder:x}")
        return bundle.tensors[0].values.decode()

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` with what the frame delivered back in the memory."""
        if _DELIVERED not in state:
            return super().rollback(state, frame, layout)
        return self.around(_Delivered(1.0, "layer")).rollback(self.lasting(state), state[_DELIVERED].tobytes(), layout)

    def _after(
        self,
        state: State,
        given: Vector,
        positions: Supports,
        common: tuple[Supports, int],
        layout: Layout,
        key: Key,
    ) -> State:
        """Return the state after ``given`` was delivered on ``positions``, and the dense rest."""
        writer = _Delivered(1.0, "layer", given=given, supports=positions)
        delivered, after = self.around(writer).encode(self.waiting(state, layout), self.lasting(state), key)
        block = self.block_of(*common, layout)
        return {**after, **block, _DELIVERED: np.frombuffer(delivered, np.uint8)}


def side_of(
    codec: Innovation, bundle: Bundle, where: NDArray[np.int64], layout: Layout
) -> tuple[Vector, NDArray[np.bool_]]:
    """Return the innovation on the common node's support, and where it has values there; both of shape (k,)."""
    side, sent = np.zeros(where.size, np.float32), np.zeros(where.size, np.bool_)
    for tensor, place in codec.placed(bundle, layout):
        if tensor.indices is None or not where.size:
            continue
        indices = tensor.indices + place.start
        at = np.minimum(np.searchsorted(where, indices), where.size - 1)
        common = where[at] == indices
        side[at[common]] = tensor.values.decoded()[common]
        sent[at[common]] = True
    return side, sent


@dataclass(frozen=True)
class NodeEstimate:
    """What the server takes a node's values to be on the common node's support.

    Parameters
    ----------
    latents : float32 array
        The common node's.
    decoder : LatentDecoder
        The node's own, or the one that all unknown nodes share.
    scale : float
        The root mean square of the node's values on the support.
    """

    latents: Vector
    decoder: LatentDecoder
    scale: float

    def of(self, side: Vector) -> Vector:
        """Return the values, float32 of shape (k,), of the node's innovation on the support."""
        one = np.float32(1.0 if isinstance(self.decoder, IdentityDecoder) else self.scale)
        # Of hostile latents: receivers look at their sums.
        with np.errstate(over="ignore", invalid="ignore"):
            return self.decoder.decode(self.latents, side.size, side / one) * one

    def add(self, codec: Innovation, bundle: Bundle, where: NDArray[np.int64], share: float, total: Update) -> None:
        """Add ``share`` times what is estimated; ``where`` is the support, in the vector, and ``bundle`` was added."""
        side, sent = side_of(codec, bundle, where, total.layout)
        found = self.of(side)
        # What was sent arrives without a decoder.
        found[sent] = 0.0
        total.vector[where] += np.float32(share) * found
