"""Base of the one-exchange codecs: how an update becomes tensors of a frame, and how frames are summed.

A frame holds positional tensors only: one per :class:`Stretch` of the compressible part of the vector (a single one
for ``scope="global"``, one per tensor for ``scope="layer"``), then one dense float32 tensor with everything the
layout sends uncompressed. A codec says how one stretch becomes one tensor (:meth:`PositionalCodec.pack`); schema,
checks, accumulation, decoding and the dense rest are here, once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.base import Codec, State, all_finite, norm, require_finite
from fedcomp.codecs.forms import FORMS, ValueForm, rest_form
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.kernels import add_scaled, scatter_add
from fedcomp.layout import Layout, Update, Vector
from fedcomp.params import assign
from fedcomp.rng import Key
from fedcomp.wire import DENSE, SEED, SPARSE, Bundle, Expected, Frame, Schema, SchemaMismatch, Tensor, Values

Scope = Literal["global", "layer"]
SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A contiguous part of the vector that becomes one tensor of the frame.

    Attributes
    ----------
    index : int
        Its position in the frame; the ``layer`` of its random key.
    name : str
        For messages; it does not travel.
    start, stop : int
        Its position in the vector.
    density : float or None
        The density that the layout's policy sets for this tensor.
    shape : tuple of int
        The tensor's own shape; that of the flat stretch when it covers several tensors.
    """

    index: int
    name: str
    start: int
    stop: int
    density: float | None = None
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The stretch of the flat vector."""
        return slice(self.start, self.stop)


def stretches(layout: Layout, scope: str) -> tuple[Stretch, ...]:
    """Return the compressible part of ``layout`` as one stretch ("global") or one per tensor ("layer").

    Empty stretches are left out.

    Raises
    ------
    ConfigError
        When the layout asks for densities of single tensors and the scope is global: one ranking of the whole model
        cannot honour them.
    """
    if scope == "layer":
        tensors = [t for t in layout.compressed if t.size]
        return tuple(Stretch(i, t.name, t.offset, t.offset + t.size, t.density, t.shape) for i, t in enumerate(tensors))
    asked = [t.name for t in layout.compressed if t.density is not None]
    if asked:
        raise ConfigError(
            f"the layout's density policy sets a density for {len(asked)} tensor(s), first {asked[0]!r}, but a codec "
            "with scope='global' treats the model as one vector; use scope='layer', or a policy of only None and 1.0"
        )
    size = layout.compressed_size
    return (Stretch(0, "the compressed part", 0, size, shape=(size,)),) if size else ()


def without_densities(layout: Layout, scope: str, codec: Codec) -> tuple[Stretch, ...]:
    """Return the stretches of ``layout`` for a codec that has no density.

    Raises
    ------
    ConfigError
        When the layout's policy asks for the density of a single tensor, which such a codec cannot honour.
    """
    parts = stretches(layout, scope)
    asked = [s.name for s in parts if s.density is not None]
    if asked:
        raise ConfigError(
            f"the layout's density policy sets a density for {len(asked)} tensor(s), first {asked[0]!r}, but {codec!r} "
            "decides itself how much it sends; use a policy of only None and 1.0"
        )
    return parts


DENSE_REST: Final = "the dense rest"
"""What reports call the tensor of a frame that holds everything the layout sends dense."""


class Packing(ABC):
    """How one stretch of a vector becomes one tensor, and what a receiver takes for it.

    Attributes
    ----------
    finds_non_finite : bool
        :meth:`pack` raises NonFiniteUpdate by itself, which saves a pass over the vector.
    index : str
        How supports are written, as :func:`fedcomp.wire.longest` takes it.
    wide : bool
        :meth:`pack` takes float64 values, too, and ranks or rounds them as they are. Updates are float32.
    complete : type of values, optional
        The form of all values of a stretch, where tensors hold all of them in one form.
    """

    finds_non_finite: bool = False
    index = "auto"
    wide: ClassVar[bool] = False
    complete: ClassVar[type[Values] | None] = None

    @abstractmethod
    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the tensor that stands for ``values``, float32 of shape ``(stretch.size,)``, in the frame."""

    def expect(self, stretch: Stretch) -> Expected:
        """Return what the receiver expects for ``stretch``; what it rules out is refused before it is decoded."""
        if self.complete is None:
            return Expected("", (stretch.size,), "float32")
        return expected_dense(stretch.size, self.complete)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Raise :class:`fedcomp.wire.WireError` when ``tensor`` is not what :meth:`pack` makes of a stretch."""
        if self.complete is not None:
            require_values(tensor, self.complete, sparse=False)

    def section(self, stretch: Stretch, dtype: str = "float32") -> wire.Section | None:
        """Return how a tensor of ``stretch`` travels in a message that needs no frame, None where it needs one.

        Parameters
        ----------
        dtype : str
            Of the values that are packed: "float32", or "float64" for a codec that is :attr:`wide`.
        """
        expected = self.expect(stretch)
        if expected.value_codecs is None or len(expected.value_codecs) != 1:
            return None
        values = wire.VALUE_BY_NAME[next(iter(expected.value_codecs))]
        # Both ends draw a seeded support from the round's key: it is known, and not even the seed has to travel.
        index = "none" if expected.kinds == {DENSE} else "known" if self.index == "seeded" else self.index
        if index not in wire.SECTION_INDEX:
            return None
        params = values.agreed(self.form())
        # Without an agreed length of the values nothing says where a support ends.
        if params is None and index not in ("none", "known"):
            return None
        return wire.Section(stretch.size, values, index, expected.max_k, self.wire_dtype(dtype), params)

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype of the tensor that :meth:`pack` makes of values of ``dtype``."""
        return "float32"

    def positions(self, stretch: Stretch, key: Key) -> NDArray[np.int64] | None:
        """Return the coordinates of ``stretch`` that travel under ``key``, ascending; None unless they are drawn."""
        return None

    def form(self) -> dict[str, int]:
        """Return what the lengths of quantised values depend on, as :func:`fedcomp.wire.longest` takes it."""
        return {}


class PositionalCodec(Packing, Codec):
    """Base of codecs whose frame is one tensor per stretch plus the dense rest. Subclasses are frozen dataclasses.

    Attributes
    ----------
    scope : {"global", "layer"}
        What one tensor of the frame covers.
    takes_densities : bool
        Whether a policy may set the density of a single tensor.
    """

    scope: str = "global"
    takes_densities: ClassVar[bool] = True
    # The layout asked for last and its schema, which every frame of a round asks for again. One pair, replaced at once:
    # threads may share a codec.
    _held: ClassVar[tuple[Layout, Schema] | None] = None

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the parts of the vector that become tensors of their own."""
        if self.takes_densities:
            return stretches(layout, self.scope)
        return without_densities(layout, self.scope, self)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode ``update``; see :meth:`fedcomp.codecs.base.Codec.encode`. Copies nothing of the vector's size."""
        bundle, state = self.packed(update, state, key)
        return wire.encode(bundle.tensors, tlvs=bundle.tlvs), state

    def packed(self, update: Update, state: State, key: Key) -> tuple[Bundle, State]:
        """Return the tensors and fields that :meth:`encode` puts into a frame, and the state after it was sent."""
        parts = self.stretches(update.layout)
        rest = update.vector[_covered(parts) :]
        # A codec that finds NaN by itself sees its stretches only, never the dense rest.
        if not self.finds_non_finite or not all_finite(rest):
            require_finite(update)
        try:
            tensors, state = self.pack_all(update.vector, parts, state, key)
        except NonFiniteUpdate:
            require_finite(update)  # names the tensor
            raise
        return Bundle((*tensors, *self._dense(rest)), tlvs=tuple(self.fields(key))), state

    @property
    def rest_form(self) -> ValueForm:
        """Format of the dense rest: unchanged, unless a codec overrides it."""
        return FORMS["float32"]

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        """Return the optional fields of a frame under ``key``, type and content: none, unless a codec says otherwise.

        How many and how long they are does not depend on the key.
        """
        return ()

    def frame_of(self, tensors: list[Tensor], rest: Vector) -> Frame:
        """Return the frame of ``tensors`` followed by the dense rest, when there is any."""
        return wire.encode([*tensors, *self._dense(rest)])

    def _dense(self, rest: Vector) -> list[Tensor]:
        # Frames are made on the host.
        return [Tensor(self.rest_form.code(np.asarray(rest)), rest.shape)] if rest.size else []

    def pack_all(
        self, vector: Vector, parts: tuple[Stretch, ...], state: State, key: Key
    ) -> tuple[list[Tensor], State]:
        """Return one tensor per stretch of ``vector``, and the state after them."""
        return [self.pack(vector[s.slice], s, key.at(layer=s.index)) for s in parts], state

    def schema(self, layout: Layout) -> Schema:
        held = self._held
        if held is None or held[0] is not layout:
            parts = self.stretches(layout)
            rest = layout.size - _covered(parts)
            held = layout, (*map(self.expect, parts), *((expected_dense(rest, self.rest_form.values),) if rest else ()))
            assign(self, _held=held)
        return held[1]

    def longest(self, layout: Layout) -> int:
        schema = self.schema(layout)
        forms = [self.form() for _ in self.stretches(layout)]
        # A type and a length of one byte each; no field is longer than 127 bytes.
        fields = sum(2 + len(content) for _, content in self.fields(Key(0)))
        return fields + wire.longest(schema, self.index, *forms, *[self.rest_form.form] * (len(schema) - len(forms)))

    def tensor_names(self, layout: Layout) -> tuple[str, ...]:
        parts = self.stretches(layout)
        return (*(s.name for s in parts), *((DENSE_REST,) if _covered(parts) < layout.size else ()))

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        bundle = super().open(frame, layout)
        # Bytes were just decoded against this schema; a bundle may have been opened for another codec or model.
        if isinstance(frame, Bundle):
            _require_schema(bundle, self.schema(layout))
        parts = self.stretches(layout)
        # Not strict: the dense rest follows the stretches' tensors.
        for tensor, stretch in zip(bundle.tensors, parts, strict=False):
            self.check(tensor, stretch)
        for tensor in bundle.tensors[len(parts) :]:
            require_values(tensor, self.rest_form.values, sparse=False)
            self.rest_form.check(tensor.values, DENSE_REST)
        return bundle

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        """Add ``float32(weight) * decode(frame)`` into ``out.vector``; O(k) for sparse tensors."""
        for tensor, where in self.placed(self.open(frame, out.layout), out.layout):
            if tensor.indices is None:
                add_scaled(out.vector[where], tensor.values.decoded(), weight)
            else:
                scatter_add(out.vector[where], tensor.indices, tensor.values.decoded(), weight)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Return the decoded vector; coordinates that did not travel are +0.0."""
        bundle = self.open(frame, layout)
        dense = all(tensor.indices is None for tensor in bundle.tensors)
        # Dense tensors fill their places: no pass over the model to clear it.
        out = np.empty(layout.size, np.float32) if dense else np.zeros(layout.size, np.float32)
        for tensor, where in self.placed(bundle, layout):
            if tensor.indices is None:
                out[where] = tensor.values.decode()
            else:
                # `out[where]` is a view, so that this reaches `out`.
                out[where][tensor.indices] = tensor.values.decode()
        return out

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the Euclidean norm of ``decode(frame)``; O(k) for sparse tensors."""
        return math.hypot(*(norm(tensor.values.decoded(keep=True)) for tensor in self.open(frame, layout).tensors))

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return the coordinates to which sparse tensors deliver something other than zero, ascending."""
        found = [
            # fp16 and bf16 round small values to zero: those were listed, but not delivered.
            tensor.indices[tensor.values.decode() != 0.0] + where.start
            for tensor, where in self.placed(self.open(frame, layout), layout)
            if tensor.indices is not None
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the tensors of an opened frame, with the values and the support that they stand for in the vector, and
        their places in it."""
        parts = self.stretches(layout)
        places = [s.slice for s in parts]
        if _covered(parts) < layout.size:
            places.append(slice(_covered(parts), layout.size))
        yield from zip(bundle.tensors, places, strict=True)


class FormedCodec(PositionalCodec):
    """Base of codecs whose values travel in one form, and the dense rest in another.

    Attributes
    ----------
    values : str
        How values travel, a name of :data:`~fedcomp.codecs.forms.FORMS`.
    rest : {"auto", "float32", "bf16", "q8"}
        How the dense rest travels; "auto": "q8" beside values of 8 bits and fewer, else "float32".
    """

    values: str
    rest: str = "auto"

    @property
    def value_form(self) -> ValueForm:
        """How values travel."""
        return FORMS[self.values]

    @property
    def rest_form(self) -> ValueForm:
        return rest_form(self.values, self.rest)

    def form(self) -> dict[str, int]:
        return dict(self.value_form.form)


class SeededCodec(PositionalCodec):
    """Base of codecs whose frames name, in eight bytes, the seed of what was drawn for them beside a support."""

    def seed(self, key: Key) -> Key:
        """Return what the draws of a round depend on, of its key: all of it, unless a codec says otherwise."""
        return key

    def seed_of(self, key: Key) -> int:
        """Return the seed of a frame, whichever of its stretches ``key`` is for."""
        return self.seed(key.at(layer=0)).u64()

    def seed_field(self, seed: int) -> tuple[tuple[int, bytes], ...]:
        """Return the fields of a frame of that seed."""
        return ((SEED, seed.to_bytes(8, "little")),)

    def seed_in(self, bundle: Bundle) -> int:
        """Return the seed of an opened frame."""
        return int.from_bytes(bundle.tlv(SEED) or b"", "little")

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        return self.seed_field(self.seed_of(key))

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        bundle = super().open(frame, layout)
        if len(bundle.tlv(SEED) or b"") != 8:
            raise SchemaMismatch("the frame lacks the eight bytes of seed by which it was drawn")
        return bundle

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require the seed that ``key`` gives: a sender who picks its draws picks its error."""
        bundle = self.open(frame, layout)
        if ((SEED, bundle.tlv(SEED)),) != self.fields(key):
            raise SchemaMismatch("the frame's seed is not that of this round and sender")
        return bundle


class AdaptiveCodec(PositionalCodec):
    """Base of positional codecs that adapt to earlier updates: a small state per stretch, but no memory of unsent
    values.

    The state of stretch i has names ``"i.<name>"``. It holds statistics of the client's own vectors, never a part of a
    vector, so error feedback wraps such a codec like any other. A lost frame loses nothing, and
    :meth:`~fedcomp.codecs.base.Codec.rollback` returns the state unchanged: the statistics are valid whether or not the
    server read the frame.
    """

    @abstractmethod
    def start(self, stretch: Stretch) -> State:
        """Return what is known of ``stretch`` before the first update; small arrays."""

    @abstractmethod
    def pack_next(self, values: Vector, stretch: Stretch, state: State, key: Key) -> tuple[Tensor, State]:
        """Return the tensor that stands for ``values`` and the stretch's state after it; modifies neither input.

        ``state`` has the names, dtypes and shapes of :meth:`start`, its numbers are finite.
        """

    def init(self, layout: Layout) -> State:
        parts = self.stretches(layout)
        return {f"{s.index}.{name}": array for s in parts for name, array in self.start(s).items()}

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the tensor of a first round."""
        return self.pack_next(values, stretch, self.start(stretch), key)[0]

    def pack_all(
        self, vector: Vector, parts: tuple[Stretch, ...], state: State, key: Key
    ) -> tuple[list[Tensor], State]:
        """Return one tensor per stretch, and the state after them; arrays that are not this codec's are left out.

        Raises
        ------
        StateError
            When the state lacks an array of a stretch, or one has another dtype or shape or holds NaN or infinity.
        """
        # All are checked before the first is used, so that a damaged state fails before any work is done.
        known = [self._known(stretch, state) for stretch in parts]
        tensors: list[Tensor] = []
        after: State = {}
        for stretch, own in zip(parts, known, strict=True):
            tensor, own = self.pack_next(vector[stretch.slice], stretch, own, key.at(layer=stretch.index))
            tensors.append(tensor)
            after |= {f"{stretch.index}.{name}": array for name, array in own.items()}
        return tensors, after

    def _known(self, stretch: Stretch, state: State) -> State:
        """Return the checked arrays of ``stretch`` under their own names."""
        known: State = {}
        for name, fresh in self.start(stretch).items():
            array = state.get(f"{stretch.index}.{name}")
            if not isinstance(array, np.ndarray) or array.dtype != fresh.dtype or array.shape != fresh.shape:
                found = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else "missing"
                raise StateError(
                    f"{name} of stretch {stretch.index} ({stretch.name}) is {found} in the state; "
                    f"{type(self).__name__} needs {fresh.dtype}{fresh.shape}: a state of another codec or model. Start "
                    "from init(layout)"
                )
            if not np.isfinite(array).all():
                raise StateError(
                    f"{name} of stretch {stretch.index} ({stretch.name}) holds NaN or infinity, which no update can "
                    "cause: the stored state was damaged; start from init(layout)"
                )
            known[name] = array
        return known


def with_rest(codec: PositionalCodec, bounds: Iterable[float | None], layout: Layout) -> float | None:
    """Return the contraction of the whole vector from those of its stretches; None where one has none."""
    rest = layout.size - sum(s.size for s in codec.stretches(layout))
    every = [*bounds, *((codec.rest_form.kept(rest),) if rest else ())]
    # A model without any values loses nothing.
    return None if None in every else min((b for b in every if b is not None), default=1.0)


def expected_dense(size: int, values: type[Values]) -> Expected:
    """Return the expectation of a dense tensor of ``size`` values of class ``values``."""
    return Expected("", (size,), "float32", kinds=frozenset({DENSE}), value_codecs=frozenset({values.name}))


def expected_sparse(size: int, values: type[Values], max_k: int, index_codecs: Iterable[str]) -> Expected:
    """Return the expectation of a sparse tensor of at most ``max_k`` values whose support is written in one of a few
    index codecs."""
    return Expected(
        "", (size,), "float32", max_k, frozenset({SPARSE}), frozenset(index_codecs), frozenset({values.name})
    )


def require_values(tensor: Tensor, values: type[Values], *, sparse: bool) -> None:
    """Raise :class:`SchemaMismatch` unless ``tensor`` is sparse or dense as asked and holds values of class ``values``.

    Coefficients and values on a shared support are neither, although they, too, come without indices.
    """
    kind = SPARSE if sparse else DENSE
    complete = tensor.indices is not None if sparse else tensor.values.k == tensor.size
    if tensor.kind is not kind or not complete or not isinstance(tensor.values, values):
        raise SchemaMismatch(
            f"the codec expects a {kind.name.lower()} tensor of {values.__name__} values, the frame holds "
            f"{tensor.kind.name.lower()} {type(tensor.values).__name__} ({tensor.values.k} of {tensor.size})"
        )


def _require_schema(bundle: Bundle, schema: Schema) -> None:
    """Raise :class:`SchemaMismatch` unless the tensors of an opened frame match ``schema`` in shape and dtype."""
    found = [(t.shape, t.dtype) for t in bundle.tensors]
    expected = [(e.shape, e.dtype) for e in schema]
    if found != expected:
        raise SchemaMismatch(
            f"the codec expects {len(expected)} tensor(s), first {expected[:1]}, the bundle holds {len(found)}, first "
            f"{found[:1]}; it was opened for another codec or layout"
        )


def _covered(parts: tuple[Stretch, ...]) -> int:
    """Return the start of the dense rest; stretches are contiguous from 0."""
    return parts[-1].stop if parts else 0
