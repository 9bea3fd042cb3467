"""Top-k: send the k coordinates of largest magnitude, exactly selected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, Stretch, with_rest
from fedcomp.errors import ConfigError
from fedcomp.kernels import select_topk
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Int, Made, OneOf
from fedcomp.wire import Bundle, Frame, LimitExceeded, Tensor

LONGEST_WARMUP = 10**6

Schedule = tuple[tuple[int, float], ...]
"""Pairs of a round and the density from that round on, rounds ascending from 1."""


def diminishing(theta: float, rates: Sequence[float], factor: float) -> Schedule:
    """Return the density schedule by which round t omits a fraction ``min(theta, factor * rates[t - 1])`` of the
    coordinates.

    Without memory, omitted coordinates add a floor to the loss; it vanishes only if the omitted fraction is
    proportional to the learning rate (derived; the theorem of the FFT paper has this form, recalled).

    Parameters
    ----------
    theta : float
        Largest omitted fraction, in [0, 1).
    rates : sequence of float
        The learning rate of each round, from the first on.
    factor : float

    Examples
    --------
    >>> diminishing(0.85, [0.1, 0.1, 0.05, 0.01], factor=10.0)
    ((1, 0.15), (3, 0.5), (4, 0.9))
    """
    theta, factor = params.unit("theta", theta), params.positive("factor", factor)
    params.density(1.0 - theta)
    found: list[tuple[int, float]] = []
    for number, rate in enumerate(rates, 1):
        # Twelve digits: what is no more than rounding is no new density.
        density = float(f"{1.0 - min(theta, factor * params.positive('rate', rate)):.12g}")
        if not found or found[-1][1] != density:
            found.append((number, density))
    return tuple(found)


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
        Rounds W in which the density falls exponentially to ``density`` d: with e = 0 in the first round it is ``max(d,
        d ** ((e + 1) / (W + 1)))`` (deep gradient compression's schedule by epochs, Lin et al. 2018; code read). Rounds
        count from 1, like Flower's, as the key states; round 0 counts as the first.
    schedule : sequence of (int, float)
        Pairs of a round and the density from then on, rounds ascending: ``((1, 0.15), (30, 0.5))``. Before the first
        one, and where the layout's policy sets a density, that one holds. Not together with ``warmup``.
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

    density: Density
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    warmup: Annotated[int, Int(0, LONGEST_WARMUP)] = 0
    rest: Annotated[str, OneOf(*RESTS)] = "auto"
    schedule: Annotated[Schedule, Made(checked_schedule)] = ()

    @property
    def on_device(self) -> bool:  # type: ignore[override]  # an attribute of other classes
        """Whether vectors on a device are ranked there: not by subclasses, which pack in other ways."""
        return type(self) is TopK

    def conflict(self) -> str:
        return "a density has a warm-up or a schedule, not both" if self.warmup and self.schedule else ""

    def count(self, stretch: Stretch, key: Key | None = None) -> int:
        """Return k of ``stretch`` in the round of ``key``; without one, the least k after the warm-up."""
        if key is None:
            return params.count(min(self._densities(stretch)), stretch.size)
        density = self.density if stretch.density is None else stretch.density
        if stretch.density is None:
            density = next((d for start, d in reversed(self.schedule) if start <= max(1, key.round)), density)
        return params.count(self._warm(density, key.round), stretch.size)

    def most(self, stretch: Stretch) -> int:
        return params.count(self._warm(max(self._densities(stretch)), 1), stretch.size)

    def _densities(self, stretch: Stretch) -> list[float]:
        """Return the densities of all rounds after the warm-up."""
        if stretch.density is not None:
            return [stretch.density]
        scheduled = [density for _, density in self.schedule]
        # Of rounds before the schedule.
        return scheduled if self.schedule and self.schedule[0][0] <= 1 else [self.density, *scheduled]

    def _warm(self, density: float, round_: int) -> float:
        """Return the density of a round: ``density`` itself after the warm-up."""
        epoch = max(0, round_ - 1)
        if epoch >= self.warmup:
            return density
        # Twelve digits: two machines whose powers differ in the last place must still agree on k.
        return max(density, float(f"{density ** ((epoch + 1) / (self.warmup + 1)):.12g}"))

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
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


def checked_schedule(schedule: Any) -> Schedule:
    """Return a schedule as it is kept; raise ConfigError where it is none."""
    try:
        pairs = tuple((start, density) for start, density in schedule)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule={params.shown(schedule)} is not valid: give pairs of a round and a density"
        ) from error
    found = tuple((params.integer("round", start, low=1), params.density(density)) for start, density in pairs)
    if any(after <= before for (before, _), (after, _) in itertools.pairwise(found)):
        raise ConfigError(f"schedule={params.shown(schedule)} is not valid: its rounds are not ascending")
    return found
