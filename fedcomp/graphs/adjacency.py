"""The normalised adjacency P, and the part of it that one owner knows.

P as a whole is three arrays in compressed sparse rows. A client reads rows of it through a
:class:`~fedcomp.graphs.base.Structure`: :class:`FullStructure` has every row and every owner, :class:`HaloStructure`
the rows of its own nodes, who owns their neighbours, and what it has been sent since. Both take time in proportion to
what is asked for; neither touches all nodes once it has been made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.graphs.base import AdjacencyRows, GraphError, Ids, UnknownStructure, as_ids, ascending, find

KINDS: Final = ("sym", "mean")

MAX_PARTS: Final = 1 << 31
"""Owners are below it: they are held as int32."""

Owners = NDArray[np.int32]
Reals = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Adjacency:
    """P of a whole graph, compressed sparse row.

    Attributes
    ----------
    indptr : ndarray of int64, (N + 1,)
    columns : ndarray of int32 or int64, (nnz,)
        Ascending within a row, without repeats.
    values : ndarray of float64, (nnz,)
        Finite, none of them 0.
    nodes : int
        N.

    Raises
    ------
    GraphError
        When the arrays are not such a matrix.
    """

    indptr: Ids
    columns: NDArray[np.signedinteger[Any]]
    values: Reals
    nodes: int

    def __post_init__(self) -> None:
        if len(self.indptr) != self.nodes + 1:
            raise GraphError(f"indptr has {len(self.indptr)} entries, expected {self.nodes + 1} for {self.nodes} nodes")
        _check_csr(self.indptr, self.columns, self.values, self.nodes)

    def rows(self, ids: Ids) -> AdjacencyRows:
        """Return rows of P in the order of ``ids``, repeats included, in time proportional to what they hold.

        Raises
        ------
        GraphError
            For an id out of range.
        """
        ids = as_ids(ids, self.nodes)
        return _take(ids, ids, self.indptr, self.columns, self.values)


def normalised(edges_src: Ids, edges_dst: Ids, nodes: int, kind: str = "sym", self_loops: bool = True) -> Adjacency:
    """Return P of an unweighted graph.

    Parameters
    ----------
    edges_src, edges_dst : ndarray of int, (E,)
        Edges in any order; parallel ones count once. With "mean", node ``edges_src[e]`` has ``edges_dst[e]`` as its
        neighbour, and not the other way round unless that edge is given too.
    nodes : int
        N.
    kind : str
        "sym": D^-1/2 (A + I) D^-1/2 of the graph with every edge in both directions, D its degrees with the loop.
        "mean": D^-1 (A + I) of the neighbour lists as given, the mean over a node's neighbours and itself.
    self_loops : bool
        Whether I is added. An edge from a node to itself is its loop, not a second one; without I it is an edge.

    Returns
    -------
    Adjacency
        A node without neighbours has the one entry P[i, i] = 1 with self loops, and an empty row without.

    Raises
    ------
    ConfigError
        For an unknown kind or a number of nodes below 1.
    GraphError
        When the lists differ in length or an id is out of range.
    """
    params.choice("kind", kind, KINDS)
    params.integer("nodes", nodes, low=1)
    lists = [(edges_src, edges_dst)]
    if kind == "sym":
        lists.append((edges_dst, edges_src))
    if self_loops:
        every = np.arange(nodes, dtype=np.int64)
        lists.append((every, every))
    indptr, rows, columns = sorted_entries(lists, nodes)
    degrees = np.diff(indptr)
    if kind == "sym":
        # One root of a product, which commutes: P is exactly symmetric.
        values = 1.0 / np.sqrt(degrees[rows].astype(np.float64) * degrees[columns])
    else:
        values = 1.0 / degrees[rows]
    # Half the memory of the columns; :func:`_take` widens the few that are asked for.
    narrow = np.int32 if nodes <= np.iinfo(np.int32).max else np.int64
    return Adjacency(indptr, columns.astype(narrow), values, nodes)


def sorted_entries(
    lists: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]], nodes: int
) -> tuple[Ids, Ids, Ids]:
    """Return the entries that lists of rows and columns name, without repeats, in the order of compressed sparse rows.

    Returns
    -------
    indptr : ndarray of int64, (nodes + 1,)
    rows, columns : ndarray of int64
        Ascending by row, then by column.

    Raises
    ------
    GraphError
        When rows and columns of a list differ in number, or an id is out of range.
    """
    found = []
    for rows, columns in lists:
        if len(rows) != len(columns):
            raise GraphError(f"{len(rows)} first ends and {len(columns)} second ends of edges; expected as many")
        # as_ids makes int64 of them: in int32 the product would wrap.
        found.append(as_ids(rows, nodes) * nodes + as_ids(columns, nodes))
    # One integer per entry: sorting them sorts rows and columns at once, and repeats become neighbours.
    entries = np.sort(np.concatenate(found))
    entries = entries[np.concatenate([np.ones(min(1, len(entries)), bool), entries[1:] != entries[:-1]])]
    rows, columns = np.divmod(entries, max(nodes, 1))
    counts = np.bincount(rows, minlength=nodes)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]), rows, columns


class FullStructure:
    """All of P and the owner of every node: the topology is public, features and labels are not.

    Its methods are those of :class:`~fedcomp.graphs.base.Structure`.

    Parameters
    ----------
    adjacency : Adjacency
    owner : ndarray of int32, (N,)
        Index of the part that owns each node.

    Raises
    ------
    GraphError
        When ``owner`` has not one entry of at least 0 per node.

    Examples
    --------
    >>> path = normalised(np.array([0, 1]), np.array([1, 2]), nodes=3, kind="mean")
    >>> structure = FullStructure(path, np.array([0, 0, 1]))
    >>> structure.rows(np.array([1])).columns.tolist(), structure.owner_of(np.array([2])).tolist()
    ([1, 2], [1])
    """

    def __init__(self, adjacency: Adjacency, owner: Owners) -> None:
        owner = as_owners(owner, adjacency.nodes, "nodes")
        self.adjacency = adjacency
        self.owner = owner
        self.nodes = adjacency.nodes

    def rows(self, ids: Ids) -> AdjacencyRows:
        """Return rows of P; see :meth:`Adjacency.rows`."""
        return self.adjacency.rows(ids)

    def owner_of(self, ids: Ids) -> Owners:
        """Return who owns each of ``ids``."""
        return self.owner[as_ids(ids, self.nodes)]

    def known(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which rows are known here: all of them."""
        return np.ones(len(as_ids(ids, self.nodes)), bool)


class HaloStructure:
    """The rows of owned nodes, who owns their neighbours, and rows that were sent since.

    Its methods are those of :class:`~fedcomp.graphs.base.Structure`. Immutable: :meth:`learn` returns another one that
    shares the owner's own rows. That costs time and memory in proportion to all that was learnt, not to the part.

    Parameters
    ----------
    own : AdjacencyRows
        Rows of the owned nodes, ``ids`` ascending and without repeats.
    owners : ndarray of int32, (nnz,)
        Who owns each of ``own.columns``.
    nodes : int
        N.
    index : int
        Who owns ``own.ids``.

    Raises
    ------
    GraphError
        When the rows are not rows of P, or one node is said to have two owners.

    Examples
    --------
    >>> path = normalised(np.array([0, 1]), np.array([1, 2]), nodes=3)
    >>> structure = HaloStructure(path.rows(np.array([0])), np.array([0, 1]), nodes=3, index=0)
    >>> structure.known(np.array([0, 1])).tolist()
    [True, False]
    >>> more = structure.learn(path.rows(np.array([1])), np.array([0, 1, 1]))
    >>> more.rows(np.array([1])).columns.tolist()
    [0, 1, 2]
    """

    def __init__(self, own: AdjacencyRows, owners: Owners, nodes: int, index: int) -> None:
        owners = as_owners(owners, len(own.columns), "entries")
        check_rows(own, nodes)
        ascending(own.ids, nodes)
        self.nodes = nodes
        self.index = index
        self._own = own
        self._learnt = AdjacencyRows(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))
        # The owned nodes as well: one without neighbours is a column of no row and still has an owner.
        self._near = _owner_table(
            np.concatenate([own.ids, own.columns]), np.concatenate([np.full(len(own.ids), index, np.int32), owners])
        )
        self._far = _owner_table(np.zeros(0, np.int64), np.zeros(0, np.int32))

    def rows(self, ids: Ids) -> AdjacencyRows:
        """Return rows of P in the order of ``ids``; UnknownStructure names those that are neither owned nor learnt."""
        ids = as_ids(ids, self.nodes)
        mine, at = find(self._own.ids, ids)
        sent, where = find(self._learnt.ids, ids)
        if not (mine | sent).all():
            raise self._unknown(
                ids[~(mine | sent)], "adjacency rows", "ask their owners for them and learn() what they send"
            )
        if mine.all():
            return _take(ids, at, self._own.indptr, self._own.columns, self._own.values)
        # Two tables, one answer: each gives its rows, which are then put into the order that was asked for.
        near = _take(ids[mine], at[mine], self._own.indptr, self._own.columns, self._own.values)
        far = _take(ids[~mine], where[~mine], self._learnt.indptr, self._learnt.columns, self._learnt.values)
        both = _join(near, far)
        order = np.empty(len(ids), np.int64)
        order[np.concatenate([np.flatnonzero(mine), np.flatnonzero(~mine)])] = np.arange(len(ids))
        return _take(ids, order, both.indptr, both.columns, both.values)

    def owner_of(self, ids: Ids) -> Owners:
        """Return who owns each of ``ids``; UnknownStructure names those that are in no row known here."""
        ids = as_ids(ids, self.nodes)
        near, at = find(self._near[0], ids)
        far, where = find(self._far[0], ids)
        if not (near | far).all():
            raise self._unknown(ids[~(near | far)], "owners", "they are in no row that is known here")
        owners = np.empty(len(ids), np.int32)
        owners[near] = self._near[1][at[near]]
        owners[~near] = self._far[1][where[~near]]
        return owners

    def known(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which rows of P are known here, boolean."""
        ids = as_ids(ids, self.nodes)
        return find(self._own.ids, ids)[0] | find(self._learnt.ids, ids)[0]

    def learn(self, rows: AdjacencyRows, owners: Owners) -> HaloStructure:
        """Return the structure with ``rows`` added, whose columns have these ``owners``.

        Rows that are known already stay as they are.

        Raises
        ------
        GraphError
            When the rows are not rows of P, or an owner contradicts what is known.
        """
        owners = as_owners(owners, len(rows.columns), "entries")
        check_rows(rows, self.nodes)
        # A row that is sent twice is learnt once.
        fresh = np.unique(rows.ids, return_index=True)[1]
        fresh = fresh[~self.known(rows.ids[fresh])]
        joined = _join(self._learnt, _take(rows.ids[fresh], fresh, rows.indptr, rows.columns, rows.values))
        # Tables of known rows have to ascend: find() searches them by bisection.
        order = np.argsort(joined.ids, kind="stable")
        seen, at = find(self._near[0], rows.columns)
        # Contradictions within the message, or with rows that were sent before, are found by _owner_table below.
        _require_same(rows.columns[seen], self._near[1][at[seen]], owners[seen])
        table = _owner_table(
            np.concatenate([self._far[0], rows.columns[~seen]]), np.concatenate([self._far[1], owners[~seen]])
        )
        # Past the constructor, which would check and sort the owner's own rows again: they have not changed.
        other = object.__new__(HaloStructure)
        other.nodes, other.index, other._own, other._near = self.nodes, self.index, self._own, self._near
        other._learnt = _take(joined.ids[order], order, joined.indptr, joined.columns, joined.values)
        other._far = table
        return other

    def _unknown(self, ids: Ids, what: str, then: str) -> UnknownStructure:
        ids = np.unique(ids)
        return UnknownStructure(
            f"part {self.index} does not know the {what} of {len(ids)} nodes, the first {int(ids[0])}; {then}", ids
        )


def columns_of(rows: AdjacencyRows) -> tuple[Ids, Ids]:
    """Return the candidates of a layer and the position of each entry of ``rows`` among them.

    Returns
    -------
    candidates : ndarray of int64, (m,)
        Ids of the columns with an entry, ascending.
    positions : ndarray of int64, (nnz,)
        ``candidates[positions]`` are ``rows.columns``.
    """
    candidates, positions = np.unique(rows.columns, return_inverse=True)
    return candidates.astype(np.int64, copy=False), positions.astype(np.int64, copy=False)


def check_rows(rows: AdjacencyRows, nodes: int) -> None:
    """Check that ``rows`` can be rows of the P of a graph.

    Raises
    ------
    GraphError
        For ids out of range, columns that are not ascending within a row, or values that are 0 or not finite.
    """
    ids = as_ids(rows.ids, nodes)
    if len(rows.indptr) != len(ids) + 1:
        raise GraphError(f"indptr has {len(rows.indptr)} entries, expected {len(ids) + 1} for {len(ids)} rows")
    _check_csr(rows.indptr, rows.columns, rows.values, nodes)


def _check_csr(indptr: Ids, columns: NDArray[np.signedinteger[Any]], values: Reals, nodes: int) -> None:
    if len(columns) != len(values) or int(indptr[0]) != 0 or int(indptr[-1]) != len(columns):
        raise GraphError(
            f"rows from {int(indptr[0])} to {int(indptr[-1])} of {len(columns)} columns and {len(values)} values"
        )
    if (indptr[1:] < indptr[:-1]).any():
        raise GraphError("indptr goes down: rows of negative length")
    if len(columns) and (int(columns.min()) < 0 or int(columns.max()) >= nodes):
        raise GraphError(f"columns from {int(columns.min())} to {int(columns.max())} in a graph of {nodes} nodes")
    up = columns[1:] > columns[:-1]
    # Nothing has to ascend from one row to the next; an empty row at either end has no such pair.
    starts = indptr[1:-1]
    up[starts[(starts > 0) & (starts < len(columns))] - 1] = True
    if not up.all():
        raise GraphError("columns have to be ascending within a row, without repeats")
    if not np.isfinite(values).all() or not values.all():
        raise GraphError("values of an adjacency have to be finite and not 0")


def as_owners(owners: Any, count: int, of_what: str) -> Owners:
    """Return ``owners`` as int32, one part for each of ``count`` nodes or entries, or raise GraphError."""
    found = np.asarray(owners)
    # An empty list is float64 to numpy.
    if found.shape != (count,) or (count and not np.issubdtype(found.dtype, np.integer)):
        raise GraphError(f"owners are {found.dtype} of shape {found.shape}, expected one integer per {count} {of_what}")
    if count and not 0 <= int(found.min()) <= int(found.max()) < MAX_PARTS:
        raise GraphError(f"owners run from {int(found.min())} to {int(found.max())}; parts are numbered from 0")
    return found.astype(np.int32, copy=False)


def _take(ids: Ids, at: Ids, indptr: Ids, columns: NDArray[np.signedinteger[Any]], values: Reals) -> AdjacencyRows:
    """Return the rows at positions ``at``, named ``ids``."""
    starts = indptr[at]
    lengths = indptr[at + 1] - starts
    ends = np.cumsum(lengths)
    # Offsets of all entries at once: a loop over rows would cost more than the rows.
    entries = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
    return AdjacencyRows(
        ids,
        np.concatenate([np.zeros(1, np.int64), ends]),
        columns[entries].astype(np.int64, copy=False),
        values[entries],
    )


def _join(first: AdjacencyRows, second: AdjacencyRows) -> AdjacencyRows:
    return AdjacencyRows(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.indptr, second.indptr[1:] + first.indptr[-1]]),
        np.concatenate([first.columns, second.columns]),
        np.concatenate([first.values, second.values]),
    )


def _owner_table(ids: Ids, owners: Owners) -> tuple[Ids, Owners]:
    """Return each id once, ascending, with its owner."""
    order = np.argsort(ids, kind="stable")
    ids, owners = ids[order].astype(np.int64, copy=False), owners[order]
    first = np.ones(len(ids), bool)
    first[1:] = ids[1:] != ids[:-1]
    _require_same(ids[1:][~first[1:]], owners[:-1][~first[1:]], owners[1:][~first[1:]])
    return ids[first], owners[first]


def _require_same(ids: Ids, known: Owners, said: Owners) -> None:
    other = np.flatnonzero(known != said)
    if len(other):
        i = int(other[0])
        raise GraphError(f"node {int(ids[i])} is listed in part {int(said[i])} and in part {int(known[i])}")
