"""Common parts of codecs that select and list coordinates: value formats, index codecs, and the receiver's checks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.positional import (
    FormedCodec,
    Stretch,
    expected_sparse,
    require_values,
    with_rest,
)
from fedcomp.layout import Layout, Vector
from fedcomp.wire import Expected, Limits, SchemaMismatch, Tensor

INDICES = ("auto", *wire.PLAIN, *(f"complement:{name}" for name in wire.PLAIN))
"""How the support travels."""


class ListedCodec(FormedCodec):
    """Base of codecs that choose coordinates and list them: how they are written, and what a receiver takes of them.

    Attributes
    ----------
    index : str
        The wire's index codec; "auto" takes the smallest.
    """

    index: str

    @property
    def never_enlarges(self) -> bool:  # type: ignore[override]  # an attribute of most classes, here of the form
        """Whether neither the chosen values nor the dense rest are rounded up."""
        return self.value_form.never_enlarges and self.rest_form.never_enlarges

    @abstractmethod
    def most(self, stretch: Stretch) -> int:
        """Return the largest number of values a frame may hold of ``stretch``."""

    def listed(self, indices: NDArray[np.int64], chosen: Vector, stretch: Stretch) -> Tensor:
        """Return the sparse tensor of ``chosen``, float32 of shape (k,), at the ascending ``indices``, without zeros.

        What a form without scales rounds to zero does not travel either. Where values share a scale it does: to leave
        it out would give the others new scales, which round more of them to zero.
        """
        # Zeros first: they would count in a mean, and a sign has no zero.
        travels = chosen != 0.0
        if not travels.all():
            indices, chosen = indices[travels], chosen[travels]
        coded = self.coded(chosen)
        if self.value_form.alone and not (travels := coded.decode() != 0.0).all():
            indices, coded = indices[travels], self.coded(chosen[travels])
        return wire.sparse((stretch.size,), indices, coded, index=self.index)

    def coded(self, chosen: NDArray[Any]) -> wire.Values:
        """Return values as they travel; what lies beyond the largest number of their format becomes that number."""
        return self.value_form.code(chosen)

    def wire_dtype(self, dtype: str) -> str:
        """Return the dtype when values travel as they are, else float32; a codec that is not wide is given float32."""
        return dtype if self.wide and self.values == "float64" else "float32"

    def expect(self, stretch: Stretch) -> Expected:
        most = self.most(stretch)
        names = (*wire.PLAIN, "complement") if self.index == "auto" else self.index.split(":")
        # "auto" writes the absent indices only where they are fewer: no reason to expand them for a short list.
        allowed = [n for n in names if n != "complement" or self.index != "auto" or 2 * most > stretch.size]
        return expected_sparse(stretch.size, self.value_form.values, most, allowed)

    def limits(self, layout: Layout) -> Limits:
        """Return the schema's limits; who asks for a complement lists, and pays for, up to all the absent indices."""
        schema = self.schema(layout)
        if self.index.startswith("complement:"):
            schema = tuple(replace(expected, max_k=None) for expected in schema)
        return Limits.for_schema(schema)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require sparse values of the chosen format on a support that is listed."""
        require_values(tensor, self.value_form.values, sparse=True)
        self.value_form.check(tensor.values, stretch.name)
        if not isinstance(tensor.index, str):
            raise SchemaMismatch(f"{stretch.name}: expected a list of indices, the frame holds {tensor.index}")

    def contraction_of_largest(self, layout: Layout) -> float | None:
        """Return the contraction of a codec that always sends the largest coordinate of each stretch: 1/n of the
        longest (derived: the largest square is at least the mean square), reached by equal magnitudes.

        Times what the form of the values keeps of it.
        """
        bounds = [
            None if (kept := self.value_form.kept_of_largest(self.most(s))) is None else kept / s.size
            for s in self.stretches(layout)
        ]
        return with_rest(self, bounds, layout)
