"""QSGD: stochastic rounding to a few levels of each bucket's norm (Alistarh et al., NeurIPS 2017; recalled)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.positional import PositionalCodec, Stretch
from fedcomp.errors import NonFiniteUpdate
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int
from fedcomp.wire import SchemaMismatch, Tensor

_BLOCK = 1 << 16


@dataclass(frozen=True, repr=False, eq=False)
class QSGD(PositionalCodec):
    """Round every coordinate at random to ``norm * level / levels`` of its bucket, unbiased.

    The expected squared error is at most ω‖x‖², ``ω = min(B / (4 s²), √B / s)`` for s levels and buckets of B values
    (derived; the paper's first term is four times as large).

    Parameters
    ----------
    levels : int
        s, the number of positive levels; a coordinate costs about log2(2 s + 1) bits.
    bucket : int
        Coordinates that share one Euclidean norm, at least 2: receivers refuse frames with a norm for each, which are
        longer than the values. Large buckets save bytes and cost variance.

    Examples
    --------
    >>> QSGD(levels=4).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0.80282706, -2.4084811 ,  0.80282706,  0.        ], dtype=float32)
    """

    codec_id: ClassVar[str] = "qsgd"
    unbiased = True
    complete = wire.QsgdLevels

    levels: Annotated[int, Int(1, 32767)] = 127
    bucket: Annotated[int, Int(2, 1 << 24)] = 512

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        # Bucket-aligned blocks: draws and quantiser are float64, which is not to be held for the whole vector. One
        # stream serves all blocks, so that their size does not show: together the draws are key.uniform(n).
        stream = key.generator().bit_generator
        step = max(1, _BLOCK // self.bucket) * self.bucket
        levels = np.empty(values.size, np.int32)
        norms = []
        for start in range(0, values.size, step):
            part = slice(start, start + step)
            with np.errstate(over="ignore"):  # refused below
                draws = _uniform(stream, values[part].size)
                block = wire.QsgdLevels.quantise(values[part], self.levels, self.bucket, draws)
            levels[part] = block.levels
            norms.append(block.norms)
        every = np.concatenate(norms)
        if not np.isfinite(every).all():
            raise NonFiniteUpdate(f"the norm of a bucket of {self.bucket} values of {stretch.name} overflows float32")
        return wire.Tensor(wire.QsgdLevels(levels, self.levels, self.bucket, every), (stretch.size,))

    def form(self) -> dict[str, int]:
        return {"levels": self.levels, "bucket": self.bucket}

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        super().check(tensor, stretch)
        coded = tensor.values
        assert isinstance(coded, wire.QsgdLevels)
        if (coded.s, coded.bucket) != (self.levels, self.bucket):
            raise SchemaMismatch(
                f"expected {self.levels} levels in buckets of {self.bucket}, got {coded.s} in {coded.bucket}"
            )

    def variance(self, layout: Layout) -> float:
        """Return ``min(B / (4 s²), sqrt(B) / s)`` for the largest bucket B.

        Sharper than the published min(B/s², sqrt(B)/s) (derived: the variance of a rounded coordinate is f(1-f) <= 1/4
        of a squared level; and f(1-f) <= f sums to the 1-norm, at most sqrt(B) times the norm).
        """
        b = min(self.bucket, max((s.size for s in self.stretches(layout)), default=0))
        return min(b / (4.0 * self.levels**2), math.sqrt(b) / self.levels)


def _uniform(stream: np.random.BitGenerator, count: int) -> NDArray[np.float64]:
    """Return the next ``count`` doubles of :meth:`fedcomp.rng.Key.uniform`'s sequence."""
    return (np.asarray(stream.random_raw(count), np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
