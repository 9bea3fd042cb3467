"""A model's update as matrices of equal slices: what a fitted basis compresses, and what is left over.

A tensor is read in an order of its axes in which neighbours resemble each other, and cut into slices of one width.
What does not fill a slice, and what is too small for two of them, travels as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs.axes import ORDERS, read_in, write_back
from fedcomp.layout import Layout, TensorSpec, Vector


@dataclass(frozen=True)
class Part:
    """One tensor that is cut.

    Attributes
    ----------
    tensor : TensorSpec
        Where it lies in the model's vector.
    count : int
        Its slices (M), at least 2.
    """

    tensor: TensorSpec
    count: int


@dataclass(frozen=True)
class Slices:
    """How the vector of a layout is cut. Use :meth:`of`.

    Attributes
    ----------
    layout : Layout
    width : int
        Elements of a slice (K).
    order : str
        The axes, the slowest first; see :mod:`fedcomp.codecs.axes`.

    Examples
    --------
    >>> layout = Layout.of({"conv": np.zeros((64, 32, 3, 3), np.float32), "bias": np.zeros(64, np.float32)})
    >>> plan = Slices.of(layout, width=500)
    >>> [part.count for part in plan.parts], plan.rest_size
    ([36], 496)
    """

    layout: Layout
    width: int
    order: str

    @classmethod
    def of(cls, layout: Layout, width: int = 512, order: str = "HWFD") -> Slices:
        """Return the slices of ``layout``; raise ConfigError for a width below 1 or an order that is none."""
        return cls(layout, params.integer("width", width, low=1), params.choice("order", order, ORDERS))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that are cut, in the layout's order; one slice alone has nothing to share a basis with."""
        found = (Part(tensor, tensor.size // self.width) for tensor in self.layout.compressed)
        return tuple(part for part in found if part.count >= 2)

    @property
    def rest_size(self) -> int:
        """Elements that travel as they are: tails, and tensors that are not cut."""
        return self.layout.size - self.width * sum(part.count for part in self.parts)

    def cut(self, vector: Vector) -> tuple[list[NDArray[np.float32]], Vector]:
        """Return the slices of every part, each (M, K), and the rest, all copies."""
        ordered = vector.astype(np.float32, copy=True)
        for part in self.parts:
            read_in(ordered[part.tensor.slice], part.tensor.shape, self.order)
        slices = [ordered[start:stop].reshape(-1, self.width) for start, stop in self._cuts]
        return slices, ordered[self._is_rest]

    def join(self, slices: list[NDArray[np.float32]], rest: Vector) -> Vector:
        """Undo :meth:`cut`; float32, shape (layout.size,)."""
        vector = np.empty(self.layout.size, np.float32)
        vector[self._is_rest] = rest
        for values, (start, stop) in zip(slices, self._cuts, strict=True):
            vector[start:stop] = values.reshape(-1)
        for part in self.parts:
            write_back(vector[part.tensor.slice], part.tensor.shape, self.order)
        return vector

    @cached_property
    def _cuts(self) -> list[tuple[int, int]]:
        return [(p.tensor.offset, p.tensor.offset + p.count * self.width) for p in self.parts]

    @cached_property
    def _is_rest(self) -> NDArray[np.bool_]:
        rest = np.ones(self.layout.size, np.bool_)
        for start, stop in self._cuts:
            rest[start:stop] = False
        return rest
