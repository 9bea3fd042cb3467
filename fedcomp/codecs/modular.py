"""Modular sums: dithered integers modulo M, which relays add without decoding and which never overflow.

The code is the lattice of multiples of a step, nested in that of M steps. Zhang, Tao, Wang, Shao ("Coded Over-the-Air
Computation for Model Aggregation in Federated Learning", IEEE Communications Letters 2023) add such codewords in the
air; of that the abstract was read, and the scheme here is derived: a radio adds what it receives, a relay what it is
sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.base import Codec
from fedcomp.codecs.fixedpoint import FixedPoint, IntegerGrid
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.logs import log
from fedcomp.rng import Key
from fedcomp.rules import Int, Switch
from fedcomp.wire import SEED, Bundle, Frame, Residues, SchemaMismatch, Tensor
from fedcomp.wire.residues import MAX_MODULUS


@dataclass(frozen=True, slots=True)
class ResidueGrid(IntegerGrid):
    """The integers from ``-levels`` to ``levels`` as residues modulo ``modulus``, in which sums of them travel, too."""

    modulus: int = 2

    @property
    def bits(self) -> int:
        """Bits of one residue: ceil(log2 M)."""
        return (self.modulus - 1).bit_length()

    def values(self, integers: NDArray[Any]) -> wire.Values:
        """Return integers, of one client or sums, as what a tensor of a frame holds."""
        return Residues(np.asarray(integers, np.int64) % self.modulus, self.modulus, self.step)

    def summand(self, tensor: Tensor) -> Residues:
        """Return the values of a tensor, of one client or of a sum.

        Raises
        ------
        SchemaMismatch
            When they have another modulus or step.
        """
        values = tensor.values
        wanted = (self.modulus, self.step if values.k else 0.0)
        # Compared exactly: integers of another step must not be added to these.
        if not isinstance(values, Residues) or (values.modulus, values.step) != wanted:
            raise SchemaMismatch(
                f"the bundle holds {type(values).__name__} where residues modulo {self.modulus} in steps of "
                f"{self.step:g} belong"
            )
        return values

    def check(self, tensor: Tensor) -> Residues:  # type: ignore[override]
        """Return the values of one client's tensor.

        Raises
        ------
        SchemaMismatch
            Also when an integer is beyond the levels, with which one client would exceed its share of the sum.
        """
        values = self.summand(tensor)
        if (largest := int(np.abs(values.centred()).max(initial=0))) > self.levels:
            raise SchemaMismatch(f"the frame holds an integer of {largest}, beyond {self.levels}")
        return values

    def integers(self, bundle: Bundle) -> NDArray[np.int64]:
        """Return the integers of all tensors of one client's frame, shape (k,)."""
        parts = [self.check(tensor).centred() for tensor in bundle.tensors]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, repr=False, eq=False)
class ModularSum(FixedPoint):
    """Fixed point with summable frames: integers modulo M, rounded with a dither that the receiver subtracts.

    A client rounds ``x / step + u``, with a dither u of (-1/2, 1/2] drawn from its own stream, and sends the residue. A
    receiver that knows the stream subtracts u. The remaining error is uniform, within half a step, and independent of
    x; its variance is step²/12, against up to step²/4 with plain stochastic rounding. Sums are exact in any order. To
    decode a sum the receiver must know whose frames are in it, to subtract their dithers.

    Parameters
    ----------
    codec : Codec or config mapping
        As in :class:`FixedPoint`.
    clip : float
        Largest magnitude that can be sent.
    levels : int
        Steps from 0 to ``clip``.
    summands : int
        The largest total weight of a sum, by default 65,536: of all clients' numbers of examples together where these
        are the weights, of clients where all weigh 1. M is 2 * levels * summands + 1, so that no sum can wrap.
    modulus : int
        Another M, 2 * levels + 1 to 2**32; 0 for the default. One that is too small for ``summands`` needs
        ``allow_wrap``.
    allow_wrap : bool
        Allow sums to wrap: if many integers are near their maximum, sums are wrong by multiples of M steps.

    Raises
    ------
    ConfigError
        When M has no room for the sum, or is beyond 2**32.

    Notes
    -----
    A frame takes ceil(log2 M) bits for each value, log2(summands) more than a frame without sums. In return
    a relay sends one frame, however many it receives. Integers modulo M are not elements of GF(2^8), whose addition is
    XOR: what adds in the one does not add in the other.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.codecs.randomk import RandomK
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> codec, layout = ModularSum(RandomK(density=1.0), clip=4.0, levels=8, summands=2), Layout.flat(3)
    >>> def frame(partition, values):
    ...     update = Update(np.float32(values), layout)
    ...     return codec.encode(update, codec.init(layout), Key(0, "uplink", 1, partition))[0]
    >>> relayed = codec.add([frame(0, [1.0, 2.0, -4.0]), frame(1, [0.5, -1.0, -4.0])], layout)
    >>> mean = codec.place(codec.total(relayed, layout), 2, layout, Key(0, "uplink", 1), {0: 1, 1: 1})
    >>> bool(np.abs(mean - [0.75, 0.5, -4.0]).max() <= codec.step / 2)
    True
    """

    codec_id: ClassVar[str] = "modular"
    VALUES: ClassVar[frozenset[str]] = frozenset({Residues.name})

    summands: Annotated[int, Int(1)] = 1 << 16
    modulus: Annotated[int, Int(0, MAX_MODULUS)] = 0
    allow_wrap: Switch = False

    def __post_init__(self) -> None:
        FixedPoint.__post_init__(self)
        room = 2 * self.levels * self.summands + 1
        if room > MAX_MODULUS and not self.modulus:
            raise ConfigError(
                f"summands={self.summands} of {self.levels} levels need a modulus of {room}, beyond 2**32; use fewer "
                "levels, or smaller weights"
            )
        if self.modulus and self.modulus < (2 * self.levels + 1 if self.allow_wrap else room):
            raise ConfigError(
                f"modulus={self.modulus} has no room for {self.summands} summands of {self.levels} levels, which need "
                f"{room}; leave it out, or let sums wrap with allow_wrap=True (from {2 * self.levels + 1} on)"
            )

    @property
    def m(self) -> int:
        """The modulus."""
        return self.modulus or 2 * self.levels * self.summands + 1

    @property
    def grid(self) -> ResidueGrid:
        return ResidueGrid(self.step, self.levels, self.m)

    @property
    def form(self) -> dict[str, int]:
        return {"modulus": self.m}

    def draws(self, key: Key) -> Key:
        """Return the stream of a client's dithers, which its frame names in eight bytes."""
        return _dither(super().draws(key).u64())

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        return ((SEED, super().draws(key).u64().to_bytes(8, "little")),)

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse one client's frame, and require the name of its dithers."""
        bundle = super().open(frame, layout)
        if len(bundle.tlv(SEED) or b"") != 8:
            raise SchemaMismatch(
                "the frame lacks the eight bytes that name its dithers; of a sum, use total() and place()"
            )
        return bundle

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require the dithers of ``key``: a sender who picks its dither picks its error."""
        bundle = super().verify(frame, layout, key)
        if ((SEED, bundle.tlv(SEED)),) != self.fields(key):
            raise SchemaMismatch("the frame's dithers are not those of this round and sender")
        return bundle

    def real(self, bundle: Bundle) -> Bundle:
        """Return one client's bundle with its values as float32, dithers taken off."""
        stream = _dither(int.from_bytes(bundle.tlv(SEED) or b"", "little"))
        parts = []
        for place, tensor in enumerate(bundle.tensors):
            steps = self.grid.summand(tensor).centred() - _dithers(stream.at(layer=place), tensor.values.k)
            parts.append(replace(tensor, values=wire.Raw((steps * self.step).astype(np.float32))))
        return Bundle(tuple(parts))

    def add(self, frames: Sequence[Frame | Bundle], layout: Layout) -> Frame:
        """Return the frame of a sum, of clients' frames or of other sums. Nothing is decoded, and no dither known.

        Raises
        ------
        SchemaMismatch
            When a frame is not of this codec, or of another support than the first one's.
        ConfigError
            Without a frame.
        """
        if not frames:
            raise ConfigError("a sum of no frames has no support; leave it out")
        first, *rest = (self._summand(frame, layout) for frame in frames)
        sums = [self.grid.summand(tensor).residues.astype(np.int64) for tensor in first.tensors]
        for bundle in rest:
            for place, tensor in enumerate(bundle.tensors):
                if not _same_support(tensor, first.tensors[place]):
                    raise SchemaMismatch("frames of different supports cannot be added; they are of different rounds")
                # Below twice the modulus, 2**33: no sum of two leaves int64.
                sums[place] = (sums[place] + self.grid.summand(tensor).residues) % self.m
        tensors = zip(first.tensors, sums, strict=True)
        return wire.encode([replace(t, values=self.grid.values(total), backend="none") for t, total in tensors])

    def total(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return the integers of a sum, centred, shape ``(count(layout),)``; their dithers are still in them."""
        parts = [self.grid.summand(tensor).centred() for tensor in self._summand(frame, layout).tensors]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def require_room(self, weight: int) -> None:
        """Check that a sum of a total weight cannot wrap; one that may is logged where ``allow_wrap`` lets it.

        Raises
        ------
        ConfigError
            When it can, and must not.
        """
        if 2 * self.levels * weight < self.m:
            return
        what = f"a sum of weight {weight} in {self.levels} levels may leave the modulus {self.m}"
        if not self.allow_wrap:
            raise ConfigError(f"{what}; raise summands={self.summands} to {weight}")
        log.warning("%s: where it does, it comes out wrong by multiples of %g", what, self.m * self.step)

    def place(
        self,
        integers: NDArray[Any],
        divisor: float,
        layout: Layout,
        key: Key,
        contributors: Mapping[int, int] | None = None,
    ) -> Vector:
        """Return the update that a sum stands for, the dithers of its contributors taken off.

        Parameters
        ----------
        integers : ndarray of int, (count(layout),)
            As :meth:`total` returns them, or the sum of frames' integers by weight.
        contributors : mapping of int to int
            By partition, whose frames are in the sum: by what weight.

        Raises
        ------
        ConfigError
            Without contributors, or when they weigh more than the modulus has room for.
        """
        if not contributors:
            raise ConfigError("whose frames are in a modular sum has to be known: their dithers are taken off")
        self.require_room(sum(contributors.values()))
        # Of true sums: one that was made elsewhere, in a larger field, is reduced as if it had travelled as residues.
        centred = Residues(np.asarray(integers, np.int64) % self.m, self.m, self.step).centred()
        return super().place(centred - self.dithers(layout, key, contributors), divisor, layout, key)

    def dithers(self, layout: Layout, key: Key, contributors: Mapping[int, int]) -> NDArray[np.float64]:
        """Return the sum of the contributors' dithers in steps, by weight, shape ``(count(layout),)``."""
        sizes = [expected.most_values for expected in self.schema(layout)]
        parts = [np.zeros(size) for size in sizes]
        # In one order: sums of floats depend on it.
        for partition in sorted(contributors):
            stream = self.draws(key.at(partition=partition))
            for place, size in enumerate(sizes):
                parts[place] += contributors[partition] * _dithers(stream.at(layer=place), size)
        return np.concatenate(parts) if parts else np.zeros(0)

    def _summand(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        bundle = Codec.open(self, frame, layout)
        for tensor in bundle.tensors:
            self.grid.summand(tensor)
        return bundle


def _dither(name: int) -> Key:
    return Key(name, "dither")


def _dithers(stream: Key, count: int) -> NDArray[np.float64]:
    """Return the dithers that :meth:`IntegerGrid.round` added to the values before rounding to the nearest integer."""
    return stream.uniform(count) - 0.5


def _same_support(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.kind != other.kind or str(one.index) != str(other.index):
        return False
    return one.indices is None or np.array_equal(one.indices, other.indices)  # type: ignore[arg-type]
