"""Random-k: k coordinates drawn uniformly; a seed of eight bytes replaces all their indices.

Sparse random sparsification as in Wangni et al. 2018 and Stich et al. 2018 (recalled). With ``shared=True`` every
client draws the same support, so that the sum of N frames has k non-zeros instead of up to N·k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.forms import FORMS, narrowed
from fedcomp.codecs.positional import (
    SCOPES,
    FormedCodec,
    Stretch,
    expected_sparse,
    require_values,
    with_rest,
)
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, OneOf, Switch
from fedcomp.wire import Bundle, Expected, Frame, SchemaMismatch, Seeded, Tensor
from fedcomp.wire.support import SCATTERED

_VALUES = tuple(name for name in FORMS if name != "float64")


@dataclass(frozen=True, repr=False, eq=False)
class RandomK(FormedCodec):
    """Send ``k = max(1, ceil(density * n))`` coordinates of a uniformly random support.

    Parameters
    ----------
    density : float
        Fraction of coordinates that travels, in (0, 1].
    unbiased : bool
        Scale the values by n/k, which makes the decoded vector unbiased with ω = n/k - 1, both exact. Unscaled, the
        expected error is exactly (1 - k/n)‖x‖². Scaled values do not belong under error feedback: the memory would
        grow by the factor n/k - 1.
    scope : {"global", "layer"}
        Draw over the whole model, or per tensor.
    shared : bool
        One support for all clients, drawn from (seed, round, layer); else the partition is part of the draw.
    values : str
        How the values travel, as for :class:`~fedcomp.codecs.TopK`; anything but "float32" rounds, so that frames no
        longer add up like updates. Beside 8 bits and fewer the dense rest takes 8.

    Examples
    --------
    >>> RandomK(density=0.5, unbiased=True).preview([0.5, -3.0, 1.0, 0.25])
    array([0. , 0. , 2. , 0.5], dtype=float32)
    """

    codec_id: ClassVar[str] = "randomk"
    algorithm: ClassVar[int] = SCATTERED
    wide = True
    index = "seeded"

    density: Density
    unbiased: Switch = False
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    shared: Switch = True
    values: Annotated[str, OneOf(*_VALUES)] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        form = FORMS[self.values]
        if self.unbiased and not form.exact:
            raise ConfigError(
                f"values={self.values!r} round to the nearest, which is biased; unbiased=True needs values='float32'"
            )
        params.assign(
            self,
            linear=form.exact,
            never_enlarges=not self.unbiased and form.never_enlarges and self.rest_form.never_enlarges,
        )

    def count(self, stretch: Stretch) -> int:
        """Return k of ``stretch``."""
        return params.count(self.density if stretch.density is None else stretch.density, stretch.size)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        k = self.count(stretch)
        kept = narrowed(values[self.positions(stretch, key)])
        if self.unbiased:
            with np.errstate(over="ignore"):
                kept = kept * np.float32(stretch.size / k)
            # The factor n/k may carry finite values beyond float32: refused here, while the state is as it was.
            if not np.isfinite(kept).all():
                raise NonFiniteUpdate(f"{stretch.name} scaled by n/k = {stretch.size / k:g} overflows float32")
        coded = FORMS[self.values].code(kept)
        return wire.seeded((stretch.size,), self._seed(stretch, key), k, coded, algorithm=self.algorithm)

    def positions(self, stretch: Stretch, key: Key) -> NDArray[np.int64]:
        return Seeded(self._seed(stretch, key), self.algorithm).indices(stretch.size, self.count(stretch))

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape, how many values it may carry, and that a seed stands for their support."""
        return expected_sparse(stretch.size, FORMS[self.values].values, self.count(stretch), ("seeded",))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require exactly k sparse values of the chosen form on a support that was drawn, not chosen."""
        require_values(tensor, FORMS[self.values].values, sparse=True)
        FORMS[self.values].check(tensor.values, stretch.name)
        if not isinstance(tensor.index, Seeded) or tensor.index.algorithm != self.algorithm:
            raise SchemaMismatch(
                f"{stretch.name}: expected a support drawn by a seed and algorithm {self.algorithm}, the frame has "
                f"{tensor.index}"
            )
        if tensor.values.k != self.count(stretch):
            raise SchemaMismatch(
                f"{stretch.name}: expected {self.count(stretch)} random coordinates, the frame holds {tensor.values.k}"
            )

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require the seeds that ``key`` gives: a sender who picks its seed picks its support.

        With ``shared=True`` the key's partition does not matter, and frames of one round that all pass lie on one
        support.
        """
        bundle = self.open(frame, layout)
        for tensor, stretch in zip(bundle.tensors, self.stretches(layout), strict=False):
            if tensor.index != Seeded(self._seed(stretch, key.at(layer=stretch.index)), self.algorithm):
                raise SchemaMismatch(f"{stretch.name}: the support's seed is not that of this round and sender")
        return bundle

    def common_support(self, layout: Layout, key: Key) -> NDArray[np.int64] | None:
        """Return the drawn coordinates of all stretches, and what travels dense; None unless shared."""
        if not self.shared:
            return None
        drawn = [s.start + self.positions(s, key.at(layer=s.index)) for s in self.stretches(layout)]
        return np.concatenate([*drawn, np.arange(layout.compressed_size, layout.size)])

    def contraction(self, layout: Layout) -> float | None:
        """Return the smallest k/n, reached in expectation by every vector; None when scaled.

        Times what the form of the values keeps; the dense rest keeps what its own form does.
        """
        if self.unbiased:
            return None
        form = FORMS[self.values]
        bounds = [
            None if (kept := form.kept(self.count(s))) is None else kept * self.count(s) / s.size
            for s in self.stretches(layout)
        ]
        return with_rest(self, bounds, layout)

    def variance(self, layout: Layout) -> float | None:
        """Return the largest n/k - 1, reached by every vector; None when not scaled."""
        return 1.0 / min(self._kept(layout), default=1.0) - 1.0 if self.unbiased else None

    def _seed(self, stretch: Stretch, key: Key) -> int:
        """Return the seed of ``stretch`` from the key of its layer."""
        # Without the partition of their own all clients of a round draw the same.
        return (key.at(partition=0) if self.shared else key).u64()

    def _kept(self, layout: Layout) -> list[float]:
        return [self.count(s) / s.size for s in self.stretches(layout)]
