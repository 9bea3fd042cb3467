"""Output gradients of every layer, computed from the layers' inputs and the last layer's output gradient.

In a chain of linear maps with pointwise functions between them, back-propagation needs nothing else: the derivative of
each function is taken from its output, which is the next layer's input (edAD; the authors' code was read). Where it
does not follow from the output (GELU, SiLU) it is taken from the sum before it, which the layer's own inputs, weights
and biases give: nothing more has to travel (derived). Residual connections, attention and dropout are not chains;
:func:`explained` finds out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.factors.outer import OuterProducts, Rows
from fedcomp.rules import Configured, OneOf

DERIVATIVES: Final[Mapping[str, Callable[[Rows], NDArray[Any]]]] = {
    "identity": lambda a: np.ones_like(a),
    "relu": lambda a: a > 0.0,
    "sigmoid": lambda a: a * (1.0 - a),
    "tanh": lambda a: 1.0 - a * a,
}
"""Of pointwise functions, in terms of what they return."""


def _gelu(z: NDArray[Any]) -> NDArray[Any]:
    wide = np.asarray(z, np.float64)
    below = 0.5 * (1.0 + np.asarray(_erf(wide / math.sqrt(2.0)), np.float64))
    return below + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)


def _gelu_tanh(z: NDArray[Any]) -> NDArray[Any]:
    wide = np.asarray(z, np.float64)
    scale = math.sqrt(2.0 / math.pi)
    bent = np.tanh(scale * (wide + 0.044715 * wide**3))
    return 0.5 * (1.0 + bent) + 0.5 * wide * (1.0 - bent * bent) * scale * (1.0 + 3 * 0.044715 * wide * wide)


def _silu(z: NDArray[Any]) -> NDArray[Any]:
    wide = np.asarray(z, np.float64)
    gate = 0.5 * (1.0 + np.tanh(0.5 * wide))
    return gate * (1.0 + wide * (1.0 - gate))


_erf: Final = np.frompyfunc(math.erf, 1, 1)

OF_SUMS: Final[Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "gelu": _gelu,
    "gelu-tanh": _gelu_tanh,
    "silu": _silu,
}
"""Of pointwise functions, in terms of what they are given."""

ACTIVATIONS: Final = (*DERIVATIVES, *OF_SUMS)

ALIKE: Final = 1e-3
"""Relative difference up to which what was worked out is what came back: float32 through a few layers, and no more."""


@dataclass(frozen=True, slots=True)
class ChainLayer(Configured):
    """One layer of a chain.

    Attributes
    ----------
    weight : str
        Name of its matrix, outputs x inputs.
    activation : str
        The function after it, one of :data:`ACTIVATIONS`; of the last layer it does not matter.
    """

    weight: str
    activation: Annotated[str, OneOf(*ACTIVATIONS)]

    @property
    def bias(self) -> str:
        """Name of its bias, which a layer need not have."""
        return f"{self.weight.removesuffix('weight')}bias"


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
    weights : mapping of name to array
        Matrices of shape (outputs, inputs), and biases where layers have them.
    inputs : sequence of float32 arrays, shape (n, inputs)
        Of every layer.
    last : float32 array, shape (n, outputs of the last layer)
        What came back to the last one.
    """
    found = [last]
    for place in range(len(layers) - 1, 0, -1):
        before, layer = layers[place - 1], layers[place]
        back = found[-1] @ np.asarray(weights[layer.weight], np.float32)
        if before.activation in DERIVATIVES:
            slope = DERIVATIVES[before.activation](inputs[place])
        else:
            sums = inputs[place - 1] @ np.asarray(weights[before.weight], np.float32).T + weights.get(before.bias, 0.0)
            slope = np.asarray(OF_SUMS[before.activation](sums), np.float32)
        found.append(back * slope)
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
