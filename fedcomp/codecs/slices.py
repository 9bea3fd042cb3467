"""A model's update as matrices of equal slices, which a fitted basis compresses, and a remainder.

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
from fedcomp.codecs.positional import Stretch
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
    index : int
        Position of the slices among :attr:`Slices.stretches`.
    """

    tensor: TensorSpec
    count: int
    index: int


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
        return self._cut[0]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The compressible part of a vector :meth:`in_order`: of each tensor the slices, then what fills none."""
        return self._cut[1]

    @cached_property
    def part_of(self) -> dict[int, int]:
        """By position among :attr:`stretches`: which part they are the slices of."""
        return {part.index: number for number, part in enumerate(self.parts)}

    @cached_property
    def _cut(self) -> tuple[tuple[Part, ...], tuple[Stretch, ...]]:
        parts: list[Part] = []
        found: list[Stretch] = []
        for tensor in self.layout.compressed:
            start, stop = tensor.offset, tensor.offset + tensor.size
            count = tensor.size // self.width
            if count >= 2:
                parts.append(Part(tensor, count, len(found)))
                whole = start + count * self.width
                found.append(Stretch(len(found), tensor.name, start, whole, shape=(count, self.width)))
                start = whole
            if start < stop:
                found.append(Stretch(len(found), tensor.name, start, stop, shape=(stop - start,)))
        return tuple(parts), tuple(found)

    @property
    def rest_size(self) -> int:
        """Elements that travel as they are: tails, and tensors that are not cut."""
        return self.layout.size - self.width * sum(part.count for part in self.parts)

    def in_order(self, vector: Vector) -> Vector:
        """Return a float32 copy of ``vector`` with the axes of every tensor that is cut in :attr:`order`."""
        ordered = vector.astype(np.float32, copy=True)
        for part in self.parts:
            read_in(ordered[part.tensor.slice], part.tensor.shape, self.order)
        return ordered

    def write_back(self, ordered: Vector) -> None:
        """Undo :meth:`in_order`, in place."""
        for part in self.parts:
            write_back(ordered[part.tensor.slice], part.tensor.shape, self.order)

    def cut(self, vector: Vector) -> tuple[list[NDArray[np.float32]], Vector]:
        """Return the slices of every part, each (M, K), and the rest, all copies."""
        ordered = self.in_order(vector)
        return [self.slices_in(ordered, part) for part in self.parts], ordered[self._is_rest]

    def slices_in(self, ordered: Vector, part: Part) -> NDArray[np.float32]:
        """Return the slices of a part of a vector :meth:`in_order`, a view of shape (M, K)."""
        return ordered[self.stretches[part.index].slice].reshape(-1, self.width)

    def join(self, slices: list[NDArray[np.float32]], rest: Vector) -> Vector:
        """Undo :meth:`cut`; float32, shape (layout.size,)."""
        vector = np.empty(self.layout.size, np.float32)
        vector[self._is_rest] = rest
        for values, part in zip(slices, self.parts, strict=True):
            self.slices_in(vector, part)[...] = values
        self.write_back(vector)
        return vector

    @cached_property
    def _is_rest(self) -> NDArray[np.bool_]:
        rest = np.ones(self.layout.size, np.bool_)
        for part in self.parts:
            rest[self.stretches[part.index].slice] = False
        return rest
