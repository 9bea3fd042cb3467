"""EDEN: a random rotation, then one to four bits per coordinate and one scale; unbiased and stateless.

S. Vargaftik, R. Ben-Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak, M. Mitzenmacher, "EDEN: Communication-Efficient and
Robust Distributed Mean Estimation for Federated Learning", ICML 2022, and "DRIVE: One-bit Distributed Mean Estimation",
NeurIPS 2021 (recalled; formulas checked by derivation).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import all_finite
from fedcomp.codecs.orthonormal import SHORTEST, blocks, rotate
from fedcomp.codecs.positional import (
    SCOPES,
    SeededCodec,
    Stretch,
    expected_dense,
    require_values,
)
from fedcomp.errors import NonFiniteUpdate
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf
from fedcomp.wire import Bundle, Expected, SchemaMismatch, Section, Tensor

CENTROIDS: Final[Mapping[int, tuple[float, ...]]] = MappingProxyType(
    {
        1: (0.79788456080286536,),
        2: (0.45278003463649225, 1.5104176084990968),
        3: (0.24509417894422184, 0.75600528120587784, 1.3439092785050011, 2.1519457045369892),
        4: (
            *(0.12839502985114726, 0.38804829949029185, 0.65675911853246582, 0.94234045648696385),
            *(1.2562311973471783, 1.6180463860218859, 2.0690172265313889, 2.7325895709951724),
        ),
    }
)
"""By bits: the positive numbers to which a standard normal variable is rounded with the least squared error
(Lloyd-Max). Each is the mean of what is nearest to it, to which they were iterated."""

_WORST: Final[Mapping[int, tuple[float, float]]] = MappingProxyType(
    {2: (0.325, 0.59), 3: (0.11, 0.14), 4: (0.041, 0.065)}
)
"""By bits: bounds on the expected squared error of unit vectors, of the least one and of the unbiased form."""

_BLOCK: Final = 1 << 16

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False, eq=False)
class EDEN(SeededCodec):
    """Rotate at random, round every coordinate to one of ``2^bits`` numbers, and send one length per block.

    A vector is split into blocks of powers of two (:func:`~fedcomp.codecs.orthonormal.blocks`), each a vector of its
    own: y is the block after random signs and a Hadamard transform, and z = y √n / ‖y‖ is close to standard normal
    values, whatever the block was. q are the :data:`CENTROIDS` nearest to z, with signs; S q is sent, as codes of
    ``bits`` bits and ``2^(bits-1)`` magnitudes. Up to 63 values at a vector's end are too few to look normal, and
    travel as float32.

    The rotation is drawn from the key, with round and partition: the errors of different clients are independent, and
    that of the mean of N falls as 1/N. Eight bytes of seed travel with the frame.

    Squared error over ‖x‖² for large blocks, 1 to 4 bits: .571, .133, .0358, .00959 unbiased and .363, .117, .0345,
    .00950 with least error (derived, measured). A single spike arrives exactly.

    Parameters
    ----------
    bits : int
        Per coordinate, 1 to 4.
    scale : {"unbiased", "least"}
        "unbiased": S = ‖y‖² / <y, q>, whose mean over uniformly random rotations is the vector. A Hadamard rotation
        is no uniform one, and the mean of a sparse vector stays off: (3, 1, 0, ...) at one bit arrives as
        (3.33, 0, ...). With 5, 10, 30 and 100 normal values among zeros it is off by .27, .08, .05 and .008 of the
        length at one bit, at two by a third of that (measured). In short blocks dense vectors are off, too: normal
        values by 1.5 % in blocks of 64 and .3 % of 256, two magnitudes (3 in a fifth of the places, -.1 elsewhere) by
        7 %, 9 %, 4 % and .3 % in 64, 128, 256 and 1,024 (one bit, measured).
        "least": S = <y, q> / ‖q‖², the smallest error, but shortened: for error feedback.
    scope : {"global", "layer"}
        Split the whole model, or every tensor by itself.

    Examples
    --------
    >>> EDEN(bits=2).preview([0.0] * 60 + [4.0] + [0.0] * 3)[58:62]
    array([0., 0., 4., 0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "eden"
    takes_densities = False

    bits: Annotated[int, Int(1, 4)] = 1
    scale: Annotated[str, OneOf("unbiased", "least")] = "unbiased"
    scope: Annotated[str, OneOf(*SCOPES)] = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, unbiased=self.scale == "unbiased", never_enlarges=self.scale == "least")

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        found: list[Stretch] = []
        for whole in super().stretches(layout):
            parts = blocks(whole.size)
            end = parts[-1].stop if parts else 0
            for part in (*parts, *((slice(end, whole.size),) if end < whole.size else ())):
                start, stop = whole.start + part.start, whole.start + part.stop
                found.append(Stretch(len(found), whole.name, start, stop, shape=(stop - start,)))
        return tuple(found)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        if stretch.size < SHORTEST:
            return wire.dense(values)
        return Tensor(self._coded(values, stretch, rotation_of(self.seed_of(key), stretch.index)), (stretch.size,))

    def _coded(self, values: Vector, stretch: Stretch, rotation: Key) -> wire.Codebook:
        centroids = np.array(CENTROIDS[self.bits])
        codes = np.zeros(values.size, np.uint8)
        # A power of two brings the largest value to [1/2, 1): neither squares nor sums overflow, and no bit is lost.
        _, exponent = math.frexp(float(np.abs(values).max()))
        turned = np.ldexp(values, -exponent)
        square = _product(turned, turned)
        rotate(turned, rotation)
        spread = math.sqrt(square / values.size)
        between = [np.float32(spread * (a + b) / 2.0) for a, b in itertools.pairwise(centroids)]
        totals, counts = np.zeros(centroids.size), np.zeros(centroids.size)
        for start in range(0, values.size, _BLOCK):
            part, code = turned[start : start + _BLOCK], codes[start : start + _BLOCK]
            sizes = np.abs(part)
            for limit in between:
                code += sizes > limit
            totals += np.bincount(code, weights=sizes, minlength=centroids.size)
            counts += np.bincount(code, minlength=centroids.size)
            code += np.uint8(centroids.size) * (part < 0.0)
        product = float(totals @ centroids)
        if not product:
            scale = 0.0
        elif self.scale == "unbiased":
            scale = square / product
        else:
            scale = product / float(counts @ centroids**2)
        with np.errstate(over="ignore", under="ignore"):  # refused below; what underflows is as good as nothing
            magnitudes = np.ldexp(scale * centroids, exponent).astype(np.float32)
        overflow = NonFiniteUpdate(f"{stretch.name}: the values of a rotated block overflow float32")
        if not all_finite(magnitudes):
            raise overflow
        found = wire.Codebook(codes, magnitudes, self.bits)
        # Coordinates of a block that is turned back are as large as its norm at most; below that there is no look.
        if float(counts @ magnitudes.astype(np.float64) ** 2) > _LARGEST**2:
            back = found.decoded()
            with np.errstate(over="ignore", invalid="ignore"):
                rotate(back, rotation, inverse=True)
            if not all_finite(back):
                raise overflow
        return found

    def form(self) -> dict[str, int]:
        return {"bits": self.bits}

    def section(self, stretch: Stretch, dtype: str = "float32") -> Section | None:
        """Return None: the seed is in the frame."""
        return None

    def expect(self, stretch: Stretch) -> Expected:
        return expected_dense(stretch.size, wire.Raw if stretch.size < SHORTEST else wire.Codebook)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        require_values(tensor, wire.Raw if stretch.size < SHORTEST else wire.Codebook, sparse=False)
        if isinstance(tensor.values, wire.Codebook) and tensor.values.bits != self.bits:
            raise SchemaMismatch(f"{stretch.name}: expected codes of {self.bits} bits, got {tensor.values.bits}")

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors with their places, every block turned back by the frame's own rotation."""
        seed = self.seed_in(bundle)
        for index, (tensor, where) in enumerate(super().placed(bundle, layout)):
            if isinstance(tensor.values, wire.Codebook):
                values = tensor.values.decoded()
                with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
                    rotate(values, rotation_of(seed, index), inverse=True, beside=layout.size)
                # Signs make -0.0 of zeros.
                values += np.float32(0.0)
                tensor = replace(tensor, values=wire.Raw(values))
            yield tensor, where

    def contraction(self, layout: Layout) -> float | None:
        """Return δ of ``scale="least"``: ``1 / (3 - 2/n)`` of the longest block at one bit (derived), constants above.

        Over random signs the fourth moment of z is at most 3 - 2/n. At one bit the error is 1 - ‖z‖₁²/n², and
        ‖z‖₁² >= n³ / Σz⁴ (Hölder). At more it is at most the mean square of z - q, of which the largest over all
        distributions of z with these two moments was computed. Over normal values it is what the class says.
        """
        if self.scale == "unbiased":
            return None
        n = _longest_block(self.stretches(layout))
        kept = 1.0 if not n else 1.0 / (3.0 - 2.0 / n) if self.bits == 1 else 1.0 - _WORST[self.bits][0]
        return kept * (1.0 - 2.0**-20)

    def variance(self, layout: Layout) -> float | None:
        """Return ω of ``scale="unbiased"``: ``2 - 2/n`` of the longest block at one bit (derived), constants above.

        As :meth:`contraction`: at one bit the error is n²/‖z‖₁² - 1, reached by a flat vector of four; at more the
        largest of ‖z‖²‖q‖²/<z, q>² - 1 was computed.
        """
        if self.scale != "unbiased":
            return None
        n = _longest_block(self.stretches(layout))
        worst = 0.0 if not n else 2.0 - 2.0 / n if self.bits == 1 else _WORST[self.bits][1]
        return worst * (1.0 + 2.0**-20)


def _longest_block(parts: tuple[Stretch, ...]) -> int:
    return max((s.size for s in parts if s.size >= SHORTEST), default=0)


def rotation_of(seed: int, index: int) -> Key:
    """Return what the signs of the block of that number are drawn from."""
    return Key(seed, "eden", layer=index)


def _product(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the scalar product, summed in float64 by blocks."""
    total = 0.0
    for start in range(0, one.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        total += float((one[part].astype(np.float64) * other[part]).sum())
    return total
