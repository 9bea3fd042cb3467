"""Random projection: an update as its products with a few random sign vectors, which both ends draw from one seed.

Of p coordinates m numbers travel, whatever p is. What arrives is the mean of each product times its direction:
unbiased, and far from the update where m is far below p. So directional derivatives travel in place of gradients:
FedMPDD projects a gradient that was back-propagated (arXiv:2512.20814, abstract), BAFFLE, Spry and FedKSeed measure
the products without one (abstracts and code read), as :mod:`fedcomp.forward` does. The least-squares scale is
derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import State, norm
from fedcomp.codecs.positional import (
    SCOPES,
    SeededCodec,
    Stretch,
    expected_dense,
    require_values,
    with_rest,
)
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.forward.directions import Directions
from fedcomp.kernels import add_scaled
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, Made, OneOf, Real, Switch
from fedcomp.wire import COEFFICIENTS, DENSE, Bundle, Expected, Frame, Limits, SchemaMismatch, Section, Tensor

_LARGEST: Final = float(np.finfo(np.float32).max)

MOST_SIGNS: Final = 1 << 40
"""Signs that all directions of one stretch may have together: some ten minutes. Their number may come from a server."""


def _require_worth(directions: int, size: int, stretch: Stretch) -> None:
    if directions * size > MOST_SIGNS:
        raise ConfigError(
            f"{stretch.name}: {directions} directions of {size} signs: more than {MOST_SIGNS} signs; lower directions"
        )


def _coordinates(size: int) -> Iterator[Vector]:
    """Yield the directions of a stretch that is sent unchanged, one at a time."""
    for at in range(size):
        yield np.eye(1, size, at, np.float32)[0]


@dataclass(frozen=True, repr=False, eq=False)
class RandomProjection(SeededCodec):
    """Send an update's products with random sign vectors: ``directions`` numbers for an update of any size.

    A stretch with at most as many coordinates as directions is sent as it is, exactly.

    Parameters
    ----------
    directions : int
        m, the number of directions per stretch.
    scope : {"global", "layer"}
        One set of directions for the whole update, or one per tensor, which multiplies the bytes and scales errors to
        each tensor.
    scale : {"unbiased", "least"}
        "unbiased": the mean of products times directions. "least": m / (m + n - 1) of it, the smallest expected error:
        for error feedback.
    shared : bool
        Use the same directions for all clients of a round, so that products can be summed. With separate directions,
        the mean of N clients uses N times as many.
    clip : float
        Largest magnitude of a product that is sent or accepted; 0 for no limit. The part cut off is lost.

    Notes
    -----
    Squared error over ‖x‖² of n coordinates: (n - 1) / m unbiased, (n - 1) / (m + n - 1) at least error;
    both hold with equality in expectation for every vector (derived, measured).

    Examples
    --------
    >>> RandomProjection(directions=4).preview([1.0, 2.0, 3.0, 4.0])
    array([1., 2., 3., 4.], dtype=float32)
    >>> RandomProjection(directions=2, scale="least").preview([0.0, 0.0, 4.0, 0.0])
    array([ 0. ,  0. ,  1.6, -1.6], dtype=float32)
    """

    codec_id: ClassVar[str] = "projection"
    takes_densities = False

    directions: Annotated[int, Int(1)] = 32
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    scale: Annotated[str, OneOf("unbiased", "least")] = "unbiased"
    shared: Switch = False
    clip: Annotated[float, Real(least=0.0, most=_LARGEST)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, unbiased=self.scale == "unbiased" and not self.clip, linear=not self.clip)

    def count(self, stretch: Stretch) -> int:
        """Return how many numbers of a stretch travel."""
        return min(self.directions, stretch.size)

    def whole(self, stretch: Stretch) -> bool:
        """Whether a stretch travels as it is."""
        return stretch.size <= self.directions

    def seed(self, key: Key) -> Key:
        return key.at(partition=0) if self.shared else key

    def drawn(self, seed: int, stretch: Stretch) -> Directions:
        """Return the directions of a stretch that is not sent as it is.

        Parameters
        ----------
        seed : int
            That of the frame, :meth:`seed_of` the round's key.
        """
        _require_worth(self.directions, stretch.size, stretch)
        return Directions(Key(seed, f"projection/{stretch.index}"), [stretch.size], self.directions)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        if self.whole(stretch):
            return wire.dense(values)
        return self.cut(self.drawn(self.seed_of(key), stretch).project(values)[0], stretch)

    def tensor_of(self, values: Vector, expected: Expected) -> Tensor:
        """Return what a frame of one client holds where ``expected`` stands, from its values alone."""
        return Tensor(wire.Raw(values), expected.shape, kind=next(iter(expected.kinds or {DENSE})))

    def cut(self, products: NDArray[np.float64], stretch: Stretch) -> Tensor:
        """Return products as they travel, cut at the clip.

        Raises
        ------
        NonFiniteUpdate
            When one is not finite in float32.
        """
        given = np.clip(products, -self.clip, self.clip) if self.clip else products
        with np.errstate(over="ignore"):  # refused below
            narrow = given.astype(np.float32)
        if not np.isfinite(narrow).all():
            raise NonFiniteUpdate(f"{stretch.name}: a product with a direction is not finite in float32")
        return self.tensor_of(narrow, self.expect(stretch))

    def expect(self, stretch: Stretch) -> Expected:
        if self.whole(stretch):
            return expected_dense(stretch.size, wire.Raw)
        kinds, values = frozenset({COEFFICIENTS}), frozenset({wire.Raw.name})
        return Expected("", (stretch.size,), "float32", self.directions, kinds, value_codecs=values)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require plain values, as many as directions, within the clip."""
        if self.whole(stretch):
            require_values(tensor, wire.Raw, sparse=False)
            return
        values = tensor.values
        if tensor.kind is not COEFFICIENTS or values.k != self.directions or not isinstance(values, wire.Raw):
            raise SchemaMismatch(
                f"{stretch.name}: expected {self.directions} products with directions, the frame holds {values.k} "
                f"{type(values).__name__} values"
            )
        if self.clip:
            largest = float(np.abs(tensor.values.decode()).max(initial=0.0))
            # The clip as it travels: float32 may lie above it.
            if largest > float(np.float32(self.clip)):
                raise SchemaMismatch(f"{stretch.name}: a product of {largest:g} is beyond the clip {self.clip:g}")

    def section(self, stretch: Stretch, dtype: str = "float32") -> Section | None:
        """Return None: the seed is in the frame."""
        return None

    def tangents(self, layout: Layout, key: Key) -> Iterator[Vector]:
        """Yield the directions of all stretches, shape (layout size,): signs in the stretch, zeros elsewhere.

        Of a stretch that travels as it is these are its coordinates. The products of an update with them are what
        :meth:`frame_of_products` takes.
        """
        seed = self.seed_of(key)
        for stretch in self.stretches(layout):
            _require_worth(self.count(stretch), layout.size, stretch)
            for part in _coordinates(stretch.size) if self.whole(stretch) else self.drawn(seed, stretch).each(0):
                out = np.zeros(layout.size, np.float32)
                out[stretch.slice] = part
                yield out

    def frame_of_products(self, products: NDArray[np.float64], layout: Layout, key: Key) -> Frame:
        """Return the frame of an update of which the products with all :meth:`tangents` are known.

        Parameters
        ----------
        products : float64 array, shape (tangents,)
            A product that is NaN is not known: its direction is left out, and the mean is over the others.

        Raises
        ------
        LayoutError
            When there are not as many products as tangents, or something of the layout travels dense.
        NonFiniteUpdate
            When no product of a stretch is known, or one is infinite.
        """
        parts = self.stretches(layout)
        ends = np.cumsum([self.count(stretch) for stretch in parts])
        if products.shape != (ends[-1] if len(parts) else 0,) or sum(s.size for s in parts) != layout.size:
            raise LayoutError(
                f"{products.shape} products are not those of {len(parts)} stretches with {self.directions} directions "
                f"each, or {layout.size - sum(s.size for s in parts)} values travel dense"
            )
        tensors = []
        for stretch, found in zip(parts, np.split(products, ends[:-1]), strict=True):
            known = ~np.isnan(found)
            if not known.any():
                raise NonFiniteUpdate(f"{stretch.name}: none of {found.size} products with directions is a number")
            given = np.where(known, found, 0.0)
            if self.whole(stretch):
                tensors.append(wire.dense(given.astype(np.float32)))
            else:
                tensors.append(self.cut(given * (found.size / np.count_nonzero(known)), stretch))
        return wire.encode(tensors, tlvs=self.fields(key))

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors as they are in the vector: products as the sum of their directions."""
        seed = self.seed_in(bundle)
        parts = self.stretches(layout)
        for place, (tensor, where) in enumerate(super().placed(bundle, layout)):
            if place < len(parts) and not self.whole(parts[place]):
                estimate = self.drawn(seed, parts[place]).combine(tensor.values.decode()[None])
                if self.scale == "least":
                    estimate *= self.directions / (self.directions + estimate.size - 1.0)
                with np.errstate(over="ignore"):  # of a hostile frame; receivers look at their sums
                    values = estimate.astype(np.float32)
                tensor = wire.dense(values)
            yield tensor, where

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the Euclidean norm of ``decode(frame)``; products alone do not tell it."""
        return norm(self.decode(frame, layout))

    def contraction(self, layout: Layout) -> float | None:
        """Return m / (m + n - 1) of the longest stretch, reached in expectation by every vector; None when unbiased."""
        if self.scale == "unbiased" or self.clip:
            return None
        bounds = [
            1.0 if self.whole(s) else self.directions / (self.directions + s.size - 1.0) for s in self.stretches(layout)
        ]
        return with_rest(self, bounds, layout)

    def variance(self, layout: Layout) -> float | None:
        """Return (n - 1) / m of the longest stretch, reached in expectation by every vector; None at least error."""
        if not self.unbiased:
            return None
        return max(
            (0.0 if self.whole(s) else (s.size - 1.0) / self.directions for s in self.stretches(layout)), default=0.0
        )

    def signs(self, layout: Layout) -> int:
        """Return how many signs are drawn to encode a frame, and again to decode it."""
        return sum(s.size * self.directions for s in self.stretches(layout) if not self.whole(s))


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Wrapper):
    """A downlink that repeats the uplink: a step is sent as the clients' weighted frames, whose sum it is, not as
    values.

    For :class:`RandomProjection`, whose frames are short and self-contained: with C clients each node receives 4 m C
    bytes, with a seed and a weight of eight bytes for each client. Receivers add in the server's order, bit for bit,
    which a digest checks. A model change that is not exactly this sum, as with server momentum, is sent as the whole
    model.

    Parameters
    ----------
    codec : RandomProjection or config mapping
        The uplink's codec, which also encodes a single update.
    most_signs : int
        Largest number of signs that a node draws to catch up on missed rounds; beyond it, or if the steps are longer
        than the model, the node receives the whole model.

    Raises
    ------
    ConfigError
        For another codec.

    Examples
    --------
    >>> uplink = RandomProjection(directions=2)
    >>> codec, layout = Replay(uplink), Layout.flat(64)
    >>> def frame(partition):
    ...     update = Update(np.full(64, partition + 1.0, np.float32), layout)
    ...     return uplink.encode(update, {}, Key(0, "uplink", 1, partition))[0]
    >>> step = codec.join([(frame(0), 0.25), (frame(1), 0.75)], layout)
    >>> len(step), codec.decode(step, layout).shape
    (109, (64,))
    """

    codec_id: ClassVar[str] = "replay"

    codec: Annotated[RandomProjection, Made(codecs.get)]
    most_signs: Annotated[int, Int(1, MOST_SIGNS)] = 10**10

    def __post_init__(self) -> None:
        super().__post_init__()
        codec: object = self.codec
        if not isinstance(codec, RandomProjection):
            raise ConfigError(f"Replay repeats the frames of RandomProjection, not those of {codec!r}")
        params.assign(self, codec=codec, unbiased=codec.unbiased, linear=codec.linear)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        return self.codec.encode(update, state, key)

    def contraction(self, layout: Layout) -> float | None:
        return self.codec.contraction(layout)

    def variance(self, layout: Layout) -> float | None:
        return self.codec.variance(layout)

    def limits(self, layout: Layout) -> Limits:
        """Return the limits of joined frames."""
        # A step that is longer than the model, or takes more signs than a node draws, is never kept.
        longest = self.room(layout) + (1 << 10)
        tensors = len(self.codec.schema(layout)) + 2
        return Limits(longest, longest, 8 * longest, tensors, value_codecs=frozenset({wire.Raw.name}))

    def room(self, layout: Layout) -> int:
        """Return how many bytes of steps are worth sending in place of the model: not more than it has."""
        signs = self.codec.signs(layout)
        # A contributor's share of a step, and what it costs.
        share = 4 * sum(map(self.codec.count, self.codec.stretches(layout))) + 16
        most = share * self.most_signs // signs if signs else 1 << 62
        return min(layout.nbytes, most)

    def join(self, frames: Sequence[tuple[Frame | Bundle, float]], layout: Layout) -> Frame:
        """Return the frame of a weighted sum.

        Parameters
        ----------
        frames : sequence of (frame, weight)
            In the order in which they are added.

        Raises
        ------
        fedcomp.wire.WireError
            When one is not a frame of the codec.
        """
        opened = [(self.codec.open(frame, layout), weight) for frame, weight in frames]
        seeds = np.array([self.codec.seed_in(bundle) for bundle, _ in opened], np.uint64).view(np.int64)
        weights = np.array([weight for _, weight in opened], np.float64)
        tensors = zip(*(bundle.tensors for bundle, _ in opened), strict=True)
        columns = [np.stack([tensor.values.decode() for tensor in column]) for column in tensors]
        return wire.encode([wire.dense(array) for array in (seeds, weights, *columns)])

    def _joined(self, frame: Frame | Bundle, layout: Layout) -> Bundle | None:
        """Return a joined frame after opening and checks; None for the frame of a single update."""
        bundle = frame if isinstance(frame, Bundle) else wire.decode(frame, limits=self.limits(layout))
        if not bundle.tensors or bundle.tensors[0].dtype != "int64":
            return None
        count = bundle.tensors[0].size
        widths = [expected.most_values for expected in self.codec.schema(layout)]
        wanted = [((count,), "int64"), ((count,), "float64"), *(((count, width), "float32") for width in widths)]
        if [(tensor.shape, tensor.dtype) for tensor in bundle.tensors] != wanted:
            raise SchemaMismatch(f"the frame of a sum holds {len(bundle.tensors)} tensors, not those of this model")
        for tensor in bundle.tensors:
            require_values(tensor, wire.Raw, sparse=False)
        if count * self.codec.signs(layout) > self.most_signs:
            raise SchemaMismatch(f"{count} x {self.codec.signs(layout)} signs of a step are over {self.most_signs}")
        return bundle

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        joined = self._joined(frame, layout)
        return self.codec.open(frame, layout) if joined is None else joined

    def summands(self, joined: Bundle, layout: Layout) -> Iterator[tuple[Bundle, float]]:
        """Yield the frames of a joined one, opened, with their weights."""
        seeds, weights, *columns = (tensor.values.decode().reshape(tensor.shape) for tensor in joined.tensors)
        schema = self.codec.schema(layout)
        for i, (seed, weight) in enumerate(zip(seeds.view(np.uint64), weights, strict=True)):
            tensors = [self.codec.tensor_of(column[i], each) for column, each in zip(columns, schema, strict=True)]
            bundle = Bundle(tuple(tensors), tlvs=self.codec.seed_field(int(seed)))
            yield self.codec.open(bundle, layout), float(weight)

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        add_scaled(out.vector, self.decode(frame, out.layout), weight)

    def gather(self, frame: Frame | Bundle, weight: float, total: Update) -> None:
        self.accumulate(frame, weight, total)

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Return the sum as a server makes it of the frames, to the bit."""
        joined = self._joined(frame, layout)
        if joined is None:
            return self.codec.decode(frame, layout)
        # -0.0 is the exact identity of addition.
        total = Update(np.full(layout.size, -0.0, np.float32), layout)
        for summand, weight in self.summands(joined, layout):
            self.codec.gather(summand, weight, total)
        return total.vector

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the Euclidean norm of ``decode(frame)``."""
        return norm(self.decode(frame, layout))
