"""What codecs share that choose coordinates and list them: value formats, index codecs, what a receiver takes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.positional import (
    PositionalCodec,
    Stretch,
    expected_sparse,
    narrowed,
    require_values,
    stretches,
)
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.wire import Expected, Limits, SchemaMismatch, Tensor

VALUES: dict[str, type[wire.Raw | wire.Fp16 | wire.Bf16]] = {
    "float32": wire.Raw,
    "fp16": wire.Fp16,
    "bf16": wire.Bf16,
    "float64": wire.Raw,
}
"""How the kept values travel. "float64" is as they are: updates are float32, vectors of gossip nodes may be float64."""

INDICES = ("auto", *wire.PLAIN, *(f"complement:{name}" for name in wire.PLAIN))
"""How the support travels."""


class ListedCodec(PositionalCodec):
    """Base of codecs that choose coordinates and list them: how they are written, and what a receiver takes of them.

    Attributes
    ----------
    values : {"float32", "fp16", "bf16", "float64"}
        How the chosen values travel; what fp16 or bf16 round to zero does not.
    index : str
        The wire's index codec; "auto" takes the smallest.
    """

    values: str
    index: str

    @property
    def never_enlarges(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the format
        """Whether the chosen values travel as they are: fp16 and bf16 round some of them up."""
        return self.values in ("float32", "float64")

    @abstractmethod
    def most(self, stretch: Stretch) -> int:
        """Return the largest number of values a frame may hold of ``stretch``."""

    def listed(self, indices: NDArray[np.int64], chosen: Vector, stretch: Stretch) -> Tensor:
        """Return the sparse tensor of ``chosen``, float32 of shape (k,) and never 0.0, at the ascending ``indices``."""
        coded = self.coded(chosen)
        travels = coded.decode() != 0.0
        if not travels.all():
            indices, coded = indices[travels], self.coded(chosen[travels])
        return wire.sparse((stretch.size,), indices, coded, index=self.index)

    def coded(self, chosen: NDArray[Any]) -> wire.Values:
        """Return values as they travel; what lies beyond the largest number of their format becomes that number."""
        # Fp16 cuts at its own largest number, and float64 values must not lose digits on the way.
        return VALUES[self.values](chosen if self.values in ("fp16", "float64") else narrowed(chosen))

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype when values travel as they are, else float32."""
        return dtype if self.values == "float64" else "float32"

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape, the most values it may carry, and how their support may be written."""
        most = self.most(stretch)
        names = (*wire.PLAIN, "complement") if self.index == "auto" else self.index.split(":")
        # "auto" writes the absent indices only where they are fewer: no reason to expand them for a short list.
        allowed = [n for n in names if n != "complement" or self.index != "auto" or 2 * most > stretch.size]
        return expected_sparse(stretch.size, VALUES[self.values], most, allowed)

    def limits(self, layout: Layout) -> Limits:
        """Return the schema's limits; who asks for a complement lists, and pays for, up to all the absent indices."""
        schema = self.schema(layout)
        if self.index.startswith("complement:"):
            schema = tuple(replace(expected, max_k=None) for expected in schema)
        return Limits.for_schema(schema)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require sparse values of the chosen format on a support that is listed."""
        require_values(tensor, VALUES[self.values], sparse=True)
        if not isinstance(tensor.index, str):
            raise SchemaMismatch(f"{stretch.name}: expected a list of indices, the frame holds {tensor.index}")

    def contraction_of_largest(self, layout: Layout) -> float | None:
        """Return the contraction of a codec that always sends the largest coordinate of each stretch: 1/n of the
        longest (derived: the largest square is at least the mean square), reached by equal magnitudes.

        bf16 and fp16 as for :class:`~fedcomp.codecs.TopK`.
        """
        if self.values == "fp16":
            return None
        # The longest stretch has the weakest bound; a model without stretches loses nothing.
        kept = 1.0 / max((s.size for s in self.stretches(layout)), default=1)
        return kept * (1.0 - 2.0**-16) if self.values == "bf16" else kept


def without_densities(layout: Layout, scope: str, codec: Any) -> tuple[Stretch, ...]:
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
            "decides by itself how much it sends; use a policy of only None and 1.0"
        )
    return parts
