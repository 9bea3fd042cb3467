"""Graph convolutions on the operators of a plan, as products of torch sparse matrices and features.

This is the only module here that imports torch. Nothing reads or writes a global
generator: initial values come from whoever builds the module, dropout masks from a generator that is passed in.
Whoever trains sets the number of threads; for a given number, sums always have the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import Adjacency
from fedcomp.graphs.base import GraphError, GraphPart, Ids, MissingRows, Operator, StepPlan, find
from fedcomp.rules import Int, Real, checked

Features = NDArray[np.floating]
Fetched = Mapping[int, tuple[Ids, Features]] | Iterable[tuple[Ids, Features]]
"""Rows of remote nodes: ascending ids and their features, ``(R, d)``; by owner, or in any other grouping."""


class GraphConvolutions(nn.Module):
    """A graph convolutional network (Kipf and Welling 2017, arXiv 1609.02907), one operator per layer.

    ``h <- M[l] @ (h W[l]) + b[l]``, with ReLU between the layers. With M = P in every layer it is the network on the
    whole graph; with the operators of a plan, a mini-batch of it.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, of every hidden layer, and of output.
    layers : int
        At least 1.
    dropout : float
        Share of the inputs of every layer that is zeroed in training, in [0, 1).

    Raises
    ------
    ConfigError
        For a number out of range.

    Examples
    --------
    >>> network = GraphConvolutions(features=64, hidden=16, classes=10)
    >>> [tuple(layer.weight.shape) for layer in network.layers]
    [(16, 64), (10, 16)]

    Notes
    -----
    Built directly, the initial values are torch's and come from its global generator; the tasks build models without it
    (:func:`fedcomp.tasks.models.build`).
    """

    def __init__(self, features: int, hidden: int, classes: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        for name, value in (("features", features), ("hidden", hidden), ("classes", classes), ("layers", layers)):
            checked(name, value, Int(1))
        self.dropout: float = checked("dropout", dropout, Real(least=0.0, below=1.0))
        widths = [features, *[hidden] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(
        self,
        x: Tensor,
        operators: Sequence[Tensor],
        *,
        generator: torch.Generator | None = None,
        visit: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Return logits of the rows of the last operator, ``(B, classes)``.

        Parameters
        ----------
        x : Tensor, (inputs, features)
        operators : sequence of sparse Tensor
            Input layer first; see :func:`to_torch`. The dtype is that of ``x`` and of the module.
        generator : torch.Generator, optional
            Draws the dropout masks; needed in training when there is dropout.
        visit : callable, optional
            Called as ``visit(layer, h)`` with the input of every layer before dropout: one row per column of its
            operator.

        Raises
        ------
        ConfigError
            For another number of operators than layers, shapes that do not chain, or dropout without a generator.
        """
        if len(operators) != len(self.layers):
            raise ConfigError(f"{len(operators)} operators for {len(self.layers)} layers; expected one per layer")
        drops = self.training and self.dropout > 0.0
        if drops and generator is None:
            raise ConfigError(f"dropout={self.dropout:g} in training needs a generator; hand one over, seeded by a key")
        h = x
        for level, (layer, operator) in enumerate(zip(self.layers, operators, strict=True)):
            assert isinstance(layer, nn.Linear)
            if operator.shape[1] != len(h):
                raise ConfigError(f"the operator of layer {level} has {operator.shape[1]} columns for {len(h)} inputs")
            if visit is not None:
                visit(level, h)
            if drops:
                kept = torch.rand(h.shape, generator=generator, dtype=h.dtype) >= self.dropout
                # Scaled up in training, so that evaluation needs no factor.
                h = h * kept / (1.0 - self.dropout)
            # The bias comes after the sum: before it, a sampled row would get a sampled multiple of it.
            h = operator @ nn.functional.linear(h, layer.weight) + layer.bias
            if level < len(self.layers) - 1:
                h = torch.relu(h)
        return h


def to_torch(operator: Operator, dtype: torch.dtype) -> Tensor:
    """Return the operator as a sparse CSR tensor, ``(rows, columns)``; may be empty in either direction."""
    return _csr(
        operator.indptr, operator.positions, operator.values, (len(operator.rows), len(operator.columns)), dtype
    )


def operators_of(plan: StepPlan, dtype: torch.dtype) -> list[Tensor]:
    """Return the operators of a plan as sparse tensors, input layer first."""
    return [to_torch(one, dtype) for one in plan.layers]


def whole(adjacency: Adjacency, layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Return P as the operator of every layer: the network on the whole graph, whose inputs are all features."""
    nodes = adjacency.nodes
    # One tensor for all layers: nothing writes to it.
    return [_csr(adjacency.indptr, adjacency.columns, adjacency.values, (nodes, nodes), dtype)] * layers


def gather(part: GraphPart, plan: StepPlan, fetched: Fetched) -> Tensor:
    """Return the inputs of a plan, ``(len(plan.inputs), d)``, in the dtype of the part's features.

    Parameters
    ----------
    part : GraphPart
        Rows of owned nodes are taken from here, whatever else was sent.
    plan : StepPlan
    fetched : mapping of owner to (ids, rows), or iterable of (ids, rows)
        Rows of remote nodes, cached ones included; ids ascending. There may be nodes that the plan does not use. Of a
        node that occurs twice the first row counts.

    Raises
    ------
    MissingRows
        When a remote input is in none of them; names every such node.
    GraphError
        When rows have another width than the part's features, or there is not one per id.
    """
    ids, width = plan.inputs, part.features.shape[1]
    # Not zeros: a row that stays unset is refused below, and never trained on.
    out = np.empty((len(ids), width), part.features.dtype)
    here = part.owned(ids)
    out[here] = part.features[part.positions(ids[here])]
    open_ = np.flatnonzero(~here)
    for known, rows in fetched.values() if isinstance(fetched, Mapping) else fetched:
        if rows.shape != (len(known), width):
            raise GraphError(f"rows of shape {rows.shape} for {len(known)} nodes with {width} features each")
        found, at = find(known, ids[open_])
        out[open_[found]] = rows[at[found]]
        open_ = open_[~found]
    if len(open_):
        lacking = ids[open_]
        raise MissingRows(
            f"feature rows of {len(lacking)} of {len(plan.remote)} remote inputs are not here, the first of node "
            f"{int(lacking[0])}; fetch them from their owners before training",
            lacking,
        )
    return torch.from_numpy(out)


def _csr(
    indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any], size: tuple[int, int], dtype: Any
) -> Tensor:
    _quiet()
    # Copies: the arrays may be read-only, which torch's shared memory is not. Both index arrays have to be of one type.
    # The invariants hold by construction of operators and adjacencies.
    return torch.sparse_csr_tensor(
        torch.tensor(indptr, dtype=torch.int64),
        torch.tensor(columns, dtype=torch.int64),
        torch.tensor(values, dtype=dtype),
        size=size,
        check_invariants=False,
    )


@cache
def _quiet() -> None:
    """Trigger and hide the warning about beta CSR tensors that torch gives once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0]), size=(1, 1))
