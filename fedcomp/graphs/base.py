"""Core types of graph learning: rows of the normalised adjacency, one owner's part of a graph, a sampled plan.

Nodes are known by their id in the whole graph, 0 to N - 1, everywhere; positions are local to one array and never
travel. Lists of ids are int64, ascending and without repeats unless it is said otherwise. Nothing here knows Flower,
torch or a task, and nothing costs more than what it is asked for: no function allocates an array of all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError

Ids = NDArray[np.int64]


def find(table: Ids, ids: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Return which of ``ids`` are in an ascending ``table``, and where.

    Takes time in proportion to ``ids`` and to the logarithm of the table's length.

    Parameters
    ----------
    table : ndarray of int64, (T,)
        Ascending, without repeats.
    ids : ndarray of int64, (R,)

    Returns
    -------
    found : ndarray of bool, (R,)
    at : ndarray of int64, (R,)
        Positions in the table; of no meaning where ``found`` is False.
    """
    if not len(table):
        return np.zeros(len(ids), bool), np.zeros(len(ids), np.int64)
    # An id above the whole table would be placed one past its end.
    at = np.minimum(np.searchsorted(table, ids), len(table) - 1)
    return np.asarray(table[at] == ids), at


MAX_NODES: Final = 1 << 62
"""Ids are below it, whatever the graph: keeps every sum of gaps inside int64."""


class GraphError(FedcompError, ValueError):
    """A graph, a partition of it or a list of its nodes is invalid."""


def as_ids(ids: Any, nodes: int) -> Ids:
    """Return ``ids`` as int64, checked.

    Raises
    ------
    GraphError
        Unless they are a flat list of integers from 0 to ``nodes - 1``. An empty list of any dtype is one.
    """
    found = np.asarray(ids)
    if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
        raise GraphError(f"ids of nodes are a flat list of integers, not {found.dtype} of shape {found.shape}")
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= nodes):
        wrong = found[(found < 0) | (found >= nodes)]
        raise GraphError(
            f"{len(wrong)} ids are not of the graph's {nodes} nodes 0 to {nodes - 1}, the first {int(wrong[0])}"
        )
    return found.astype(np.int64, copy=False)


def ascending(ids: Any, nodes: int = MAX_NODES) -> Ids:
    """Return ``ids`` as :func:`as_ids` does when they ascend without repeats, else raise GraphError."""
    found = np.ascontiguousarray(as_ids(ids, nodes))
    steps = found[1:] > found[:-1]
    if not steps.all():
        at = int(np.argmin(steps))
        raise GraphError(
            f"ids are not ascending without repeats: {int(found[at])} stands before {int(found[at + 1])}; sort them "
            "and reorder what belongs to them"
        )
    return found


class MissingRows(FedcompError, LookupError):
    """Rows that a plan needs are not here. Never replaced by zeros: that would train another model.

    Attributes
    ----------
    ids : ndarray of int64
        Which ones.
    """

    def __init__(self, message: str, ids: Ids) -> None:
        super().__init__(message)
        self.ids = ids


class UnknownStructure(MissingRows):
    """Adjacency rows of remote nodes that a sampler has to see before it can go on; see :class:`Structure`."""


@dataclass(frozen=True)
class AdjacencyRows:
    """Some rows of the normalised adjacency P, as compressed sparse rows.

    Attributes
    ----------
    ids : ndarray of int64, (R,)
        Which rows, in this order.
    indptr : ndarray of int64, (R + 1,)
    columns : ndarray of int64, (nnz,)
        Node ids, ascending within a row.
    values : ndarray of float64, (nnz,)
    """

    ids: Ids
    indptr: Ids
    columns: Ids
    values: NDArray[np.float64]


class Structure(Protocol):
    """What one client knows of the graph's edges and of who owns what.

    With ``structure="full"`` it is all of P; with "halo" the rows of owned nodes, the owners of their neighbours, and
    what it has been sent since.
    """

    nodes: int

    def rows(self, ids: Ids) -> AdjacencyRows:
        """Return rows of P in the order of ``ids``, in time proportional to what they hold.

        Raises
        ------
        UnknownStructure
            When some are not known here; names all of them.
        GraphError
            For an id out of range.
        """
        ...

    def owner_of(self, ids: Ids) -> NDArray[np.int32]:
        """Return who owns each of ``ids``: the index of a part.

        Raises
        ------
        UnknownStructure, GraphError
            When that is not known here; for an id out of range.
        """
        ...

    def known(self, ids: Ids) -> NDArray[np.bool_]:
        """Return for which of ``ids`` rows are known here, boolean: :meth:`rows` returns them without an error."""
        ...


@dataclass(frozen=True)
class GraphPart:
    """One owner's part of the graph: its nodes, their features and labels, and the structure it may see.

    Features are of the owned nodes and of no others: there is no array of all features behind a part.

    Attributes
    ----------
    index, parts : int
        Which part, of how many.
    ids : ndarray of int64, (n,)
        Owned nodes.
    features : ndarray of float32 or float64, (n, d)
        In the order of ``ids``.
    labels : ndarray of int64, (n,)
    train, test : ndarray of int64
        Ids of the owned nodes to learn from, and of those to be tested on.
    structure : Structure
    digest : str
        Names graph, normalisation and partition; parts of one run have the same.
    boundary : ndarray of int64
        Owned nodes that are a neighbour of some node of another owner: of P's column i, a row r of another owner with
        P[r, i] != 0.
    memo : dict
        What samplers have computed once for this part, by name; not part of its value. ``dataclasses.replace`` keeps
        it when the structure changes, so an entry that depends on rows learnt later names the structure it is for.
    """

    index: int
    parts: int
    ids: Ids
    features: NDArray[np.floating]
    labels: Ids
    train: Ids
    test: Ids
    structure: Structure
    digest: str
    boundary: Ids
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def owned(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which of ``ids`` this owner has, boolean, by binary search."""
        return find(self.ids, ids)[0]

    def positions(self, ids: Ids) -> Ids:
        """Return the positions of owned ``ids`` in :attr:`ids`.

        Raises
        ------
        GraphError
            When one of them is not owned here.
        """
        have, at = find(self.ids, ids)
        if not have.all():
            raise GraphError(
                f"{int((~have).sum())} of {len(ids)} nodes are not of part {self.index}, the first "
                f"{int(ids[~have][0])}; ask their owner"
            )
        return at


@dataclass(frozen=True)
class Operator:
    """One layer of a plan: the sparse matrix that estimates the sum over neighbours, and the figures of its draw.

    ``output = M @ input`` with M of shape ``(len(rows), len(columns))``: column i of P's rows times its weight.

    Attributes
    ----------
    rows : ndarray of int64
        Ids of the outputs. Of the last layer the batch in its own order, of the others ascending.
    columns : ndarray of int64
        Ids of the inputs that were kept, ascending: the rows of the layer below.
    indptr, positions : ndarray of int64
    values : ndarray of float64
        M as compressed sparse rows; ``positions`` index ``columns``.
    candidates : int
        Columns with a non-zero in P's rows.
    local_mass : float
        lambda: share of the base weight on favoured candidates (owned, unless the setting ``favour`` says otherwise)
        among those there was a choice of; NaN without any.
    scale : float
        s that favoured candidates were favoured by (of the node-wise sampler the mean over rows).
    expected_remote : float
        Sum of the inclusion probabilities of remote candidates; of "ladies", which has no closed form of them, the
        number that was drawn.
    lost_mass : float
        Share of the base weight on candidates that could not be had (absent owners): the bias of this layer.
    """

    rows: Ids
    columns: Ids
    indptr: Ids
    positions: Ids
    values: NDArray[np.float64]
    candidates: int = 0
    local_mass: float = float("nan")
    scale: float = 1.0
    expected_remote: float = 0.0
    lost_mass: float = 0.0


@dataclass(frozen=True)
class StepPlan:
    """What one training step computes: operators from the input layer to the output layer.

    Attributes
    ----------
    batch : ndarray of int64
        Owned nodes whose outputs are wanted.
    layers : tuple of Operator
        Input layer first; ``layers[-1].rows`` is the batch.
    remote : ndarray of int64
        Inputs that other owners have: exactly the feature rows that this step uses and does not own.
    owners : ndarray of int32
        Who owns each of ``remote``.
    """

    batch: Ids
    layers: tuple[Operator, ...]
    remote: Ids
    owners: NDArray[np.int32]

    @property
    def inputs(self) -> Ids:
        """Ids of the nodes whose features the step uses, ascending."""
        return self.layers[0].columns


Norms = Sequence[Mapping[int, float]]
"""Per layer, input layer first: the L2 norm of the vector that a node contributes there, where it is known."""


@dataclass(frozen=True)
class Conditions:
    """What a plan depends on beside its settings and its key.

    Attributes
    ----------
    absent : frozenset of int
        Owners whose columns have weight 0 at the input layer, unless their rows are in ``held``. At hidden layers,
        where no features travel, their columns can be used as long as their adjacency rows are known. A part is never
        absent from itself.
    held : ndarray of int64
        Remote nodes whose feature rows are here already (the cache), ascending. Matters for absent owners only, so that
        a plan without absent owners does not depend on the cache.
    norms : Norms, optional
        Of mode "measured": what is known of the norms of every layer's inputs. The norms of owned nodes at the input
        layer are taken from the features. A node without a known norm counts with the root mean square of the known
        norms of the layer's candidates; when none is known, all count alike.
    """

    absent: frozenset[int] = frozenset()
    held: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    norms: Norms | None = None
