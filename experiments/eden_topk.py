"""Top-k whose values are rotated and coded as EDEN does: a rival of top-k's own low-bit values, for comparison only.

A rotation makes normal values of the kept ones, whose magnitudes lie close together; see ``docs/systems/eden.md`` for
why that loses. It is no system: it has no name on the wire, and ``experiments.run bits`` trains it without messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.codecs.eden import CENTROIDS
from fedcomp.codecs.forms import ValueForm, narrowed
from fedcomp.codecs.orthonormal import rotate
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.systems.pair import Pair
from fedcomp.wire import Bundle, Tensor, Values

_TURN = Key(0, "experiments/eden-topk")
"""One rotation for all: with error feedback nothing needs fresh draws, and no seed has to travel."""


class RotatedForm(ValueForm):
    """The Lloyd-Max numbers nearest to the rotated values, times the length of least squared error."""

    values = wire.Codebook

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.form: Mapping[str, int] = {"bits": bits}

    def code(self, chosen: NDArray[Any]) -> Values:
        turned = narrowed(chosen).copy()
        rotate(turned, _TURN)
        centroids = np.array(CENTROIDS[self.bits])
        spread = np.sqrt(np.mean(np.square(turned, dtype=np.float64))) if turned.size else 0.0
        sizes = np.abs(turned).astype(np.float64)
        index = np.zeros(turned.size, np.uint8)
        for a, b in itertools.pairwise(centroids):
            index += sizes > spread * (a + b) / 2.0
        length = float(sizes @ centroids[index]) / max(float(np.square(centroids[index]).sum()), 1e-300)
        codes = index + np.uint8(centroids.size) * (turned < 0.0)
        return wire.Codebook(codes, (length * centroids).astype(np.float32), self.bits)

    def kept(self, k: int) -> None:
        """Nothing is declared."""
        return


@dataclass(frozen=True, repr=False, eq=False)
class EdenTopK(TopK):
    """Top-k with values as :class:`RotatedForm` writes them, one length for all.

    Parameters
    ----------
    bits : int
        1 to 4 for each value.

    Examples
    --------
    >>> x = np.zeros(1000)
    >>> x[:64] = 1.0
    >>> arrived = EdenTopK(density=0.064, bits=4).preview(x)
    >>> np.flatnonzero(arrived).size, bool(np.abs(arrived - x).max() < 0.4)
    (64, True)
    """

    codec_id: ClassVar[str] = "eden-topk"

    values: str = "q2"
    bits: int = 2

    @property
    def value_form(self) -> ValueForm:
        """How the chosen values travel."""
        return RotatedForm(self.bits)

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors, their values turned back, with their places."""
        for tensor, where in super().placed(bundle, layout):
            if tensor.indices is None:
                yield tensor, where
            else:
                values = tensor.values.decode().copy()
                rotate(values, _TURN, inverse=True)
                yield replace(tensor, values=wire.Raw(values)), where


def rotated(density: float, bits: int) -> Pair:
    """Return the program whose clients send :class:`EdenTopK` with error feedback."""
    return Pair(ErrorFeedback(EdenTopK(density, bits=bits)))
