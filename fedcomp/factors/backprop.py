"""What came back to every layer, worked out from the layers' inputs and from what came back to the last one alone.

In a chain of linear maps with pointwise functions between them, back-propagation needs nothing else: the derivative of
each function is taken from its output, which is the next layer's input (edAD; the authors' code was read). Functions
whose derivative does not follow from their output (GELU, SiLU) are not in the list, and residual connections, attention
and dropout are not chains; :func:`explained` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.factors.outer import OuterProducts, Rows

DERIVATIVES: Final[Mapping[str, Callable[[Rows], NDArray[Any]]]] = {
    "identity": lambda a: np.ones_like(a),
    "relu": lambda a: a > 0.0,
    "sigmoid": lambda a: a * (1.0 - a),
    "tanh": lambda a: 1.0 - a * a,
}
"""Of pointwise functions, in terms of what they return."""

ALIKE: Final = 1e-3
"""Relative difference up to which what was worked out is what came back: float32 through a few layers, and no more."""


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer of a chain.

    Attributes
    ----------
    weight : str
        Name of its matrix, outputs x inputs.
    activation : str
        The function after it, one of :data:`DERIVATIVES`; of the last layer it does not matter.
    """

    weight: str
    activation: str

    def __post_init__(self) -> None:
        params.choice("activation", self.activation, DERIVATIVES)


def parse_chain(described: Sequence[str]) -> tuple[ChainLayer, ...]:
    """Return the layers of ``"name:activation"`` each, from the input on; no activation is the identity.

    Raises
    ------
    ConfigError
        For fewer than two layers, an unknown activation, or a layer that stands twice.

    Examples
    --------
    >>> [layer.activation for layer in parse_chain(["0.weight:relu", "2.weight:tanh", "4.weight"])]
    ['relu', 'tanh', 'identity']
    """
    layers = tuple(
        ChainLayer(name, activation or "identity") for name, _, activation in (d.partition(":") for d in described)
    )
    if len(layers) < 2 or len({layer.weight for layer in layers}) < len(layers):
        raise ConfigError(
            f"chain={list(described)!r} is not valid: two layers or more, each once, such as ['0.weight:relu', "
            "'2.weight']"
        )
    return layers


def lefts(
    layers: Sequence[ChainLayer], weights: Mapping[str, NDArray[Any]], inputs: Sequence[Rows], last: Rows
) -> list[Rows]:
    """Return what came back to every layer of a chain, float32 of shape (n, outputs) each.

    Parameters
    ----------
    weights : mapping of name to array, shape (outputs, inputs)
    inputs : sequence of float32 arrays, shape (n, inputs)
        Of every layer.
    last : float32 array, shape (n, outputs of the last layer)
        What came back to the last one.
    """
    found = [last]
    for before, layer, entered in zip(reversed(layers[:-1]), reversed(layers[1:]), reversed(inputs[1:]), strict=True):
        back = found[-1] @ np.asarray(weights[layer.weight], np.float32)
        found.append(back * DERIVATIVES[before.activation](entered))
    return found[::-1]


def explained(
    layers: Sequence[ChainLayer], weights: Mapping[str, NDArray[Any]], given: Mapping[str, OuterProducts]
) -> str:
    """Return why what came back to the layers cannot be worked out by :func:`lefts`; empty where it can."""
    missing = [layer.weight for layer in layers if layer.weight not in given]
    if missing:
        return f"nothing was captured of {missing[0]}"
    chosen = [given[layer.weight] for layer in layers]
    if len({outer.count for outer in chosen}) > 1:
        return f"the layers saw {[outer.count for outer in chosen]} rows"
    for before, after in pairwise(chosen):
        if before.left.shape[1] != after.right.shape[1]:
            return "the layers' sizes do not make a chain"
    found = lefts(layers, weights, [outer.right for outer in chosen], chosen[-1].left)
    for layer, outer, left in zip(layers, chosen, found, strict=True):
        if not np.linalg.norm(left - outer.left) <= ALIKE * np.linalg.norm(outer.left):
            return (
                f"what came back to {layer.weight} does not follow: another function, dropout, several steps, no chain"
            )
    return ""
