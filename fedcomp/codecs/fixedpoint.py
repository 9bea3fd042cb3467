"""Fixed point: values of codecs whose frames share one support, as integers on a grid common to all clients.

Integers can be added exactly, and added by whoever must not know them: in a prime field, behind masks, in coded shards.
That needs one scale for all clients, agreed on beforehand, where other quantisers choose theirs from the update; and
one support, or the sum would add values of different coordinates. Derived here; a shared scale with stochastic rounding
is the usual preparation for secure aggregation (recalled).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.base import Codec, State
from fedcomp.codecs.positional import PositionalCodec
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, Made, Positive
from fedcomp.wire import Bundle, Frame, Schema, SchemaMismatch, Tensor

_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class IntegerGrid:
    """The integers from ``-levels`` to ``levels`` as multiples of one step, and how they travel.

    Attributes
    ----------
    step : float
        The spacing: a float32, as a Python float.
    levels : int
        Largest magnitude of an integer.
    """

    step: float
    levels: int

    @property
    def bits(self) -> int:
        """Bits of one integer in a frame."""
        return (2 * self.levels).bit_length()

    def round(self, values: Vector, key: Key) -> NDArray[np.int32]:
        """Round ``values``, shape (k,), to steps at random and without bias, cut at ``levels`` steps.

        The draws are ``key.uniform(values.size)``.
        """
        stream = key.generator().bit_generator
        out = np.empty(values.size, np.int32)
        # Draws and quotients are float64, which is not to be held for the whole vector.
        for start in range(0, values.size, _BLOCK):
            part = values[start : start + _BLOCK].astype(np.float64)
            part /= self.step
            np.clip(part, -self.levels, self.levels, out=part)
            # floor(x + u) rounds up with the probability of x's fraction; 53 raw bits make u uniform in [0, 1).
            part += (np.asarray(stream.random_raw(part.size), np.uint64) >> np.uint64(11)) * 2.0**-53
            # The sum of the largest integer and the largest draw rounds to the next one, which no receiver takes.
            out[start : start + _BLOCK] = np.minimum(np.floor(part, out=part), self.levels)
        return out

    def saturated(self, integers: NDArray[Any]) -> int:
        """Return how many integers are as large as they can be: an upper bound of how many were cut."""
        return int(np.count_nonzero(np.abs(integers) == self.levels))

    def values(self, integers: NDArray[np.int32]) -> wire.Values:
        """Return integers as what a tensor of a frame holds."""
        scale = np.full(min(1, integers.size), self.step, np.float32)
        zero = np.full(min(1, integers.size), self.levels)
        return wire.Uniform(integers + np.int32(self.levels), self.bits, 0, scale, zero, "stochastic")

    def check(self, tensor: Tensor) -> wire.Uniform:
        """Return the values of a tensor, which :meth:`values` may have made.

        Raises
        ------
        SchemaMismatch
            When they lie on another grid, or beyond the levels of this one.
        """
        values = tensor.values
        if not isinstance(values, wire.Uniform):
            raise SchemaMismatch(f"expected values on a grid, the frame holds {type(values).__name__}")
        found = (values.bits, values.block, values.scales.tolist(), values.zero_points.tolist())
        # Compared exactly: a grid that is off in the last place is another one, and its integers must not be added to
        # these.
        count = min(1, values.k)
        if found != (self.bits, 0, [self.step] * count, [self.levels] * count):
            raise SchemaMismatch(f"the frame's grid {found[:2]} {found[2][:1]} is not {self}")
        # The bit width admits codes past the last level, with which one client would exceed its share of the sum.
        if values.k and int(values.codes.max()) > 2 * self.levels:
            raise SchemaMismatch(f"the frame holds a code of {int(values.codes.max())}, beyond {2 * self.levels}")
        return values

    def integers(self, bundle: Bundle) -> NDArray[np.int64]:
        """Return the integers of all tensors of an opened frame, one after the other, shape (k,).

        Raises
        ------
        SchemaMismatch
            As :meth:`check`.
        """
        parts = [self.check(tensor).codes.astype(np.int64) - self.levels for tensor in bundle.tensors]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, repr=False, eq=False)
class FixedPoint(Wrapper):
    """Round the values that ``codec`` sends to multiples of one step, stochastically and without bias, and clip them at
    ``clip``.

    The frame is the codec's, with ``ceil(log2(2 levels + 1))`` bits for each of its float32 values; tensors sent dense
    are rounded like the others. Under error feedback, which :class:`fedcomp.strategies.compressed.Compressed` adds
    automatically, errors of rounding and clipping stay in the memory and are sent later.

    Parameters
    ----------
    codec : Codec or config mapping
        ``RandomK(...)`` or ``RandomBlock(...)`` with ``shared=True``; ``RandomK(1.0)`` sends everything.
    clip : float
        Largest magnitude that can be sent.
    levels : int
        Steps from 0 to ``clip``, 1 to 32767. The sum of N clients needs integers of magnitude N * levels.

    Raises
    ------
    ConfigError
        When the codec's frames cannot be added: not linear, a support of each client's own, a whole model instead of a
        difference, memory inside, or values scaled by n/k.

    Notes
    -----
    Rounding does not commute with addition, so the codec is not ``linear``; its integers can be added all the same.
    The step is float32(clip / levels). With a power of two for it every multiple is a float32, and sums lose nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.codecs.randomk import RandomK
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> update = Update(np.float32([3, 0, -2, 0, 0.5, 1, 0, -0.1]), Layout.flat(8))
    >>> codec = FixedPoint(RandomK(density=1.0), clip=4.0, levels=8)
    >>> frame, state = codec.encode(update, codec.init(update.layout), Key(0))
    >>> codec.decode(frame, update.layout)
    array([ 3. ,  0. , -2. ,  0. ,  0.5,  1. ,  0. ,  0. ], dtype=float32)
    """

    codec_id: ClassVar[str] = "fixedpoint"
    VALUES: ClassVar[frozenset[str]] = frozenset({wire.Uniform.name})

    codec: Annotated[Codec, Made(codecs.get)]
    clip: Positive
    levels: Annotated[int, Int(1, 32767)] = 127

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_summable(self.codec)
        reach = self.step * max(self.levels, (1 << self.grid.bits) - 1 - self.levels)
        # A receiver refuses scales whose outermost code overflows, used or not.
        if not np.finfo(np.float32).tiny <= self.step <= reach <= float(np.finfo(np.float32).max):
            raise ConfigError(
                f"clip={self.clip:g} in {self.levels} levels gives the step {self.step:g}, which float32 cannot hold "
                "to full precision"
            )

    @property
    def step(self) -> float:
        """The grid's spacing: a float32, as a Python float."""
        with np.errstate(over="ignore", under="ignore"):
            # Rounded here, because the frame's scale is a float32: both ends multiply by the same number.
            return float(np.float32(self.clip / self.levels))

    @property
    def grid(self) -> IntegerGrid:
        """The integers that frames hold."""
        return IntegerGrid(self.step, self.levels)

    def init(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        frame, state = self.codec.encode(update, state, key)
        tensors = self.codec.open(frame, update.layout).tensors
        own, grid = self.draws(key), self.grid
        rounded = [grid.values(grid.round(t.values.decode(), own.at(layer=i))) for i, t in enumerate(tensors)]
        out = [replace(t, values=values, backend="none") for t, values in zip(tensors, rounded, strict=True)]
        return wire.encode(out, tlvs=self.fields(key)), state

    def draws(self, key: Key) -> Key:
        """Return the stream by which values are rounded, tensor by tensor as its layers."""
        # One of its own: the inner codec's choice of the support has used the stream of the key itself.
        return key.at(purpose=f"{key.purpose}/fixedpoint")

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        """Return the optional fields of a frame under ``key``, type and content."""
        return ()

    @property
    def form(self) -> dict[str, int]:
        """What of the values' form a receiver knows beforehand, as :func:`fedcomp.wire.longest` takes it."""
        return {"bits": self.grid.bits}

    def schema(self, layout: Layout) -> Schema:
        return tuple(replace(expected, value_codecs=self.VALUES) for expected in self.codec.schema(layout))

    def longest(self, layout: Layout) -> int:
        fields = sum(2 + len(content) for _, content in self.fields(Key(0)))
        return fields + wire.longest(self.schema(layout), getattr(self.codec, "index", "auto"), self.form)

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse ``frame`` and check that its values lie on this grid, and all that the inner codec checks."""
        bundle = Codec.open(self, frame, layout)
        self.codec.open(self.real(bundle), layout)
        for tensor in bundle.tensors:
            self.grid.check(tensor)
        return bundle

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and let the inner codec check the draw of the support."""
        bundle = self.open(frame, layout)
        self.codec.verify(self.real(bundle), layout, key)
        return bundle

    def unwrapped(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        return self.real(self.open(frame, layout))

    def count(self, layout: Layout) -> int:
        """Return how many integers a frame holds."""
        return sum(expected.most_values for expected in self.schema(layout))

    def place(
        self,
        integers: NDArray[Any],
        divisor: float,
        layout: Layout,
        key: Key,
        contributors: Mapping[int, int] | None = None,
    ) -> Vector:
        """Return the update for a sum of frames' integers: float32 of the layout's size.

        Parameters
        ----------
        integers : ndarray of int, (count(layout),)
            Sum over the clients of weight times the integers of a frame.
        divisor : float
            The sum of the weights.
        key : Key
            That of the round; the partition does not matter, since all clients share the support.
        contributors : mapping of int to int, optional
            By partition, whose integers are in the sum, and by what weight: for codecs that have to know.

        Raises
        ------
        LayoutError
            When there are not as many integers as a frame of this layout holds.
        """
        if integers.shape != (self.count(layout),):
            raise LayoutError(f"a frame of this layout holds {self.count(layout)} integers, not {integers.shape}")
        return self.spread((integers * (self.step / divisor)).astype(np.float32), layout, key)

    def spread(self, values: Vector, layout: Layout, key: Key) -> Vector:
        """Return the update of which a frame of the round of ``key`` would hold ``values``, (count(layout),)."""
        zero = Update(np.zeros(layout.size, np.float32), layout)
        # A frame of zeros has the round's common support; only its values are to be replaced.
        frame, _ = self.codec.encode(zero, self.codec.init(layout), key)
        tensors, start = [], 0
        for tensor in self.codec.open(frame, layout).tensors:
            end = start + tensor.values.k
            tensors.append(replace(tensor, values=wire.Raw(values[start:end])))
            start = end
        return self.codec.decode(Bundle(tuple(tensors)), layout)

    def real(self, bundle: Bundle) -> Bundle:
        """Return the bundle with its values as float32, as the inner codec knows them."""
        return Bundle(tuple(replace(t, values=wire.Raw(t.values.decode())) for t in bundle.tensors))


def fixed_point_of(codec: Codec) -> FixedPoint:
    """Return the :class:`FixedPoint` in ``codec`` or in what it wraps.

    Raises
    ------
    ConfigError
        When there is none, saying whether ``codec`` could be put into one.
    """
    inner: Any = codec
    while not isinstance(inner, FixedPoint):
        if not isinstance(getattr(inner, "codec", None), Codec):
            _require_summable(inner)
            raise ConfigError(
                f"{codec!r} sends floating-point values; what is summed in coded form are integers on one grid. Use "
                f"FixedPoint({inner!r}, clip=...)"
            )
        inner = inner.codec
    return inner


def _require_summable(codec: Codec) -> None:
    """Raise :class:`ConfigError` unless frames of ``codec`` from several clients can be added value by value."""
    usable = "use RandomK or RandomBlock with shared=True (RandomK(1.0) sends everything)"
    if codec.lossless:
        raise ConfigError(f"{codec!r} sends whole models, not changes of one that could be rounded; {usable}")
    if codec.remembers:
        raise ConfigError(f"{codec!r} has memory; put it outside: ErrorFeedback(FixedPoint(...))")
    if isinstance(codec, FixedPoint) or not codec.linear:
        raise ConfigError(
            f"{codec!r} is not linear: its frames cannot be added value by value, since each client chooses "
            f"coordinates or scales of its own, which a sum would show; {usable}"
        )
    if getattr(codec, "shared", False) is not True:
        raise ConfigError(
            f"{codec!r} draws a support for every client: values of different coordinates would be added, and "
            f"what one client alone sent would be shown; {usable}"
        )
    if getattr(codec, "unbiased", False):
        raise ConfigError(f"{codec!r} scales values by n/k, beyond any clip that suits the others; use unbiased=False")
    inmost = codec
    while isinstance(inmost, Wrapper):
        inmost = inmost.codec
    if isinstance(inmost, PositionalCodec) and inmost.fields(Key(0)):
        raise ConfigError(
            f"frames of {codec!r} name what they were drawn by, which a sum of integers does not; {usable}"
        )
