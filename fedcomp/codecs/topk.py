"""Top-k: send the k coordinates of largest magnitude, exactly selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, Stretch, with_rest
from fedcomp.kernels import select_topk
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.wire import Bundle, Frame, LimitExceeded, Tensor

_LONGEST_WARMUP = 10**6


@dataclass(frozen=True, repr=False, eq=False)
class TopK(ListedCodec):
    """Send the ``k = max(1, ceil(density * n))`` coordinates of largest magnitude.

    Ties go to the lowest index. Coordinates that are exactly +0.0 never travel: a zero vector is an empty frame. Nor do
    those that fp16 or bf16 round to zero.

    Parameters
    ----------
    density : float
        Fraction of coordinates that travels, in (0, 1]; k is rounded up. With ``scope="layer"`` the layout's policy
        may set another one per tensor.
    scope : {"global", "layer"}
        Rank the whole model as one vector, or every tensor by itself.
    values : {"float32", "fp16", "bf16", "q8", "q4", "q2", "range10", "range8", "range6", "range4", "sign", "float64"}
        How the kept values travel; "float64" as they are. fp16 saturates at 65504 and rounds magnitudes below
        3e-8 to zero. "q8" and "q4" round to 127 or 7 levels of the largest magnitude of every 256 values; "q2" sends a
        sign and one of two magnitudes, which are fitted to the values of each tensor; "range8" floats of 8 bits whose
        exponents cover the range of a tensor's values; "sign" a sign, and one magnitude for all. Error feedback keeps
        what is lost.
    index : str
        The wire's index codec; "auto" takes the smallest.
    warmup : int
        Rounds W in which the density falls exponentially to ``density`` d: with e = 0 in the first round it is
        ``max(d, d ** ((e + 1) / (W + 1)))`` (deep gradient compression's schedule by epochs, Lin et al. 2018; code
        read). Rounds count from 1, as Flower's do, by the key; round 0 is taken for the first.

    rest : {"auto", "float32", "bf16", "q8"}
        How the dense rest travels; "auto": "q8" beside values of 8 bits and fewer, else "float32". Error feedback keeps
        what is rounded away.

    Examples
    --------
    >>> TopK(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    >>> TopK(density=0.6, values="q2").preview([0.5, -3.0, 1.0, 0.25, 2.0])
    array([ 0. , -2.5,  1. ,  0. ,  2.5], dtype=float32)
    """

    codec_id: ClassVar[str] = "topk"
    finds_non_finite = True
    wide = True

    density: float
    scope: str = "global"
    values: str = "float32"
    index: str = "auto"
    warmup: int = 0
    rest: str = "auto"

    def __post_init__(self) -> None:
        params.assign(
            self,
            density=params.density(self.density),
            scope=params.choice("scope", self.scope, SCOPES),
            values=params.choice("values", self.values, FORMS),
            index=params.choice("index", self.index, INDICES),
            warmup=params.integer("warmup", self.warmup, low=0, high=_LONGEST_WARMUP),
            rest=params.choice("rest", self.rest, RESTS),
        )

    def count(self, stretch: Stretch, key: Key | None = None) -> int:
        """Return k of ``stretch`` in the round of ``key``; without one, the k after the warm-up."""
        density = self.density if stretch.density is None else stretch.density
        return params.count(density if key is None else self._warm(density, key.round), stretch.size)

    def most(self, stretch: Stretch) -> int:
        """Return the largest k of any round: that of the first."""
        return params.count(self._warm(self.density if stretch.density is None else stretch.density, 1), stretch.size)

    def _warm(self, density: float, round_: int) -> float:
        """Return the density of a round: ``density`` itself after the warm-up."""
        epoch = max(0, round_ - 1)
        if epoch >= self.warmup:
            return density
        # Twelve digits: two machines whose powers differ in the last place must still agree on k.
        return max(density, float(f"{density ** ((epoch + 1) / (self.warmup + 1)):.12g}"))

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the sparse tensor of the largest magnitudes."""
        indices = select_topk(values, self.count(stretch, key))
        return self.pack_selected(indices, values[indices], stretch)

    def pack_selected(self, indices: NDArray[np.int64], kept: Vector, stretch: Stretch) -> Tensor:
        """Return the sparse tensor of coordinates that were selected elsewhere (the fused error-feedback step)."""
        if kept.dtype != np.float32 or not self.value_form.exact:
            return self.listed(indices, kept, stretch)
        # Of what is not rounded every bit counts, that of -0.0 too.
        travels = kept.view(np.int32) != 0
        if not travels.all():
            indices, kept = indices[travels], kept[travels]
        return wire.sparse((stretch.size,), indices, self.coded(kept), index=self.index)

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require at most the values of the round of ``key``: a warm-up allows :meth:`open` more."""
        bundle = self.open(frame, layout)
        for tensor, stretch in zip(bundle.tensors, self.stretches(layout), strict=False):
            # At most: zeros do not travel, so that an honest frame may hold fewer.
            if tensor.values.k > self.count(stretch, key):
                raise LimitExceeded(
                    f"{stretch.name}: {tensor.values.k} values, round {key.round} allows {self.count(stretch, key)}"
                )
        return bundle

    def contraction(self, layout: Layout) -> float | None:
        """Return the smallest k/n of all stretches, after the warm-up: reached by equal magnitudes (derived).

        Times what the form of the values keeps: for bf16, whose relative rounding error is below 2⁻⁸, 1 - 2⁻¹⁶ for
        normal numbers; nothing for fp16, which loses small numbers altogether; see
        :mod:`fedcomp.codecs.forms` for the others (derived). The dense rest keeps what its own form keeps.
        """
        form = self.value_form
        return with_rest(self, [form.kept_of_top(self.count(s), s.size) for s in self.stretches(layout)], layout)
