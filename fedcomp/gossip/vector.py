"""A model as one float32 or float64 vector, and which part of it is sent uncompressed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import DENSE, EXACT, Density, Layout, SmallDense
from fedcomp.rules import Configured, Int, OneOf

Real = NDArray[Any]
Arrays = Mapping[str, NDArray[Any]]

# Of the default policy only its patterns of running statistics: no tensor has fewer than 0 elements.
_STATISTICS: Final = SmallDense(min_size=0)


@dataclass(frozen=True)
class GossipPolicy(Configured):
    """Which tensors are sent uncompressed: small ones and vectors (biases, normalisation), as PowerGossip's authors do.

    Parameters
    ----------
    dense_below : int
        Tensors with fewer elements, and those of one dimension, travel whole; 0 compresses everything.
    buffers : {"dense", "local"}
        Running statistics of normalisation layers (float): mixed with the neighbours' as they are, or each node's own.
        Integer buffers are always each node's own.

    Raises
    ------
    ConfigError
        For a negative number of elements, or another word.

    Examples
    --------
    >>> policy = GossipPolicy(dense_below=64)
    >>> policy("bias", (128,), "float32"), policy("weight", (128, 10), "float32")
    (1.0, None)
    """

    dense_below: Annotated[int, Int()] = 64
    buffers: Annotated[Literal["dense", "local"], OneOf("dense", "local")] = "dense"

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Density:
        """Return "exact" for what stays at home, 1.0 for what travels whole, else None."""
        # Before the size: running statistics are never compressed, not even with dense_below=0.
        if _STATISTICS(name, shape, dtype) == EXACT:
            return DENSE if self.buffers == "dense" else EXACT
        if not self.dense_below:
            return None
        return DENSE if len(shape) < 2 or math.prod(shape) < self.dense_below else None


def flatten(arrays: Arrays, layout: Layout, dtype: str = "float64") -> Real:
    """Return the float tensors of ``arrays`` as one vector, shape ``(layout.size,)``.

    Raises
    ------
    LayoutError
        When a tensor is missing, unknown, or has another shape.
    """
    layout.check(arrays)
    # Not zeros: the slices of a layout's tensors cover the whole vector.
    vector = np.empty(layout.size, dtype)
    for t in layout.tensors:
        vector[t.slice] = np.asarray(arrays[t.name]).reshape(-1)
    return vector


def unflatten(vector: Real, layout: Layout) -> dict[str, Real]:
    """Return the tensors of ``vector`` by name, in the vector's dtype and the model's order: views.

    Buffers that stay on the node (``layout.exact``) are omitted.
    """
    names = {t.name for t in layout.tensors}
    return {
        name: vector[layout.by_name[name].slice].reshape(layout.by_name[name].shape)
        for name in layout.order
        if name in names
    }
