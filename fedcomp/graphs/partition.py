"""Partitions of a graph among owners: METIS, recursive Kernighan-Lin bisection, greedy streaming, or random.

All of them take edges as undirected, without loops and repeats, give every node exactly one owner, leave no part empty
and keep all sizes within 5 % of the mean (:func:`bounds`). Where a method's own sizes exceed that, nodes are moved,
those that lose fewest edges first. The same arguments give the same owners; METIS's may differ between its versions.

What counts is the cut: an edge between two owners is a feature row that may have to travel.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError, optional
from fedcomp.graphs.adjacency import sorted_entries
from fedcomp.graphs.base import Ids
from fedcomp.rng import Key

SLACK: Final = 0.05
"""How far a part's size may be from the mean, as a share of it."""

KERNIGHAN_LIN_NODES: Final = 5000
"""Up to this many nodes :func:`available` takes Kernighan-Lin where there is no METIS: it is pure Python, and its time
grows faster than the graph."""

PASSES: Final = 5
"""Passes of the greedy stream; later ones gained less than 2 % of the cut on the citation graphs (measured)."""

Owner = NDArray[np.int32]


@dataclass(frozen=True)
class Neighbours:
    """An undirected graph as neighbour lists, compressed sparse row, each edge in both of its ends' lists.

    Attributes
    ----------
    indptr : ndarray of int64, (N + 1,)
    ids : ndarray of int64
        Ascending within a list; no loops, no repeats.

    Examples
    --------
    >>> square = Neighbours.of(np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0]), nodes=4)
    >>> square.edges, cut(square, np.array([0, 0, 1, 1]))
    (4, 0.5)
    """

    indptr: Ids
    ids: Ids

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """Undirected edges."""
        return len(self.ids) // 2

    @classmethod
    def of(cls, sources: NDArray[np.integer], targets: NDArray[np.integer], nodes: int) -> Neighbours:
        """Return the lists of the edges ``sources[i] -- targets[i]``; loops and repeats are dropped.

        Raises
        ------
        GraphError
            For an end out of ``range(nodes)``, or ends that do not pair up.
        """
        indptr, rows, columns = sorted_entries([(sources, targets), (targets, sources)], nodes)
        real = rows != columns
        loops = np.bincount(rows[~real], minlength=nodes)
        # A row ends earlier by the loops that were dropped up to there.
        return cls(indptr - np.concatenate([np.zeros(1, np.int64), np.cumsum(loops)]), columns[real])

    def pairs(self) -> tuple[Ids, Ids]:
        """Return both ends of every undirected edge, the smaller id first."""
        source = np.repeat(np.arange(self.nodes, dtype=np.int64), np.diff(self.indptr))
        once = source < self.ids
        return source[once], self.ids[once]


def bounds(nodes: int, parts: int) -> tuple[int, int]:
    """Return the least and the largest size a part may have: within :data:`SLACK` of the mean, widened to whole
    nodes; never below one."""
    mean = nodes / parts
    # Rounded first, so that 1.05 * 100 is not 105.00000000000001 and then 106.
    return max(1, int(np.floor(round((1 - SLACK) * mean, 9)))), int(np.ceil(round((1 + SLACK) * mean, 9)))


def cut(graph: Neighbours, owner: NDArray[np.integer]) -> float:
    """Return the share of undirected edges whose ends have different owners; 0 without edges."""
    source, target = graph.pairs()
    return float(np.mean(owner[source] != owner[target])) if len(source) else 0.0


def available(nodes: int) -> str:
    """Return the method that "auto" stands for: METIS where pymetis is installed; else Kernighan-Lin, where networkx is
    and for up to :data:`KERNIGHAN_LIN_NODES` nodes; else greedy."""
    if importlib.util.find_spec("pymetis") is not None:
        return "metis"
    if nodes <= KERNIGHAN_LIN_NODES and importlib.util.find_spec("networkx") is not None:
        return "kernighan-lin"
    return "greedy"


def partition(graph: Neighbours, parts: int, method: str = "auto", *, seed: int = 0) -> Owner:
    """Return the owner of every node, int32 ``(N,)`` in ``range(parts)``.

    Parameters
    ----------
    method : str
        One of :data:`METHODS`, or "auto" (:func:`available`).
    seed : int
        Names the draw; a method takes its own stream of it.

    Raises
    ------
    ConfigError
        For an unknown method, one whose library is missing, or a number of parts that is not in 1 to N.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= max(graph.nodes, 1):
        raise ConfigError(
            f"{graph.nodes} nodes cannot be shared among {parts!r} parts without an empty one; expected 1 to "
            f"{graph.nodes} parts"
        )
    params.choice("method", method, ("auto", *METHODS))
    if method == "auto":
        method = available(graph.nodes)
    if parts == 1:
        return np.zeros(graph.nodes, np.int32)
    owner = METHODS[method](graph, parts, Key(seed, f"graphs/partition/{method}"))
    return balance(graph, owner, parts)


def balance(graph: Neighbours, owner: NDArray[np.integer], parts: int) -> Owner:
    """Return ``owner`` with as few nodes moved as it takes to bring all sizes within :func:`bounds`.

    From the largest part to the smallest, those first that have most neighbours there and fewest at home. Derived here.
    """
    low, high = bounds(graph.nodes, parts)
    moved: Owner = owner.astype(np.int32)
    sizes = np.bincount(moved, minlength=parts)
    while sizes.max() > high or sizes.min() < low:
        crowded, sparse = int(sizes.argmax()), int(sizes.argmin())
        least, most = graph.nodes // parts, -(-graph.nodes // parts)
        # No further than the mean, else two parts could hand the same nodes back and forth.
        count = max(1, min(int(sizes[crowded]) - most, least - int(sizes[sparse])))
        members = np.flatnonzero(moved == crowded)
        gain = _towards(graph, moved, members, sparse) - _towards(graph, moved, members, crowded)
        moved[members[np.argsort(-gain, kind="stable")[:count]]] = sparse
        sizes = np.bincount(moved, minlength=parts)
    return moved


def _towards(graph: Neighbours, owner: Owner, members: Ids, part: int) -> Ids:
    """Return how many neighbours each of ``members`` has in ``part``, int64 ``(len(members),)``."""
    # Prefix sums over the edges, so that no loop runs over the members.
    inside = np.concatenate([[0], np.cumsum(owner[graph.ids] == part)])
    return np.asarray(inside[graph.indptr[members + 1]] - inside[graph.indptr[members]], np.int64)


def _random(graph: Neighbours, parts: int, key: Key) -> Owner:
    """Assign in random order; sizes differ by at most one."""
    owner = np.empty(graph.nodes, np.int32)
    owner[np.argsort(key.bits(graph.nodes), kind="stable")] = np.arange(graph.nodes) % parts
    return owner


def _metis(graph: Neighbours, parts: int, key: Key) -> Owner:
    """Multilevel partitioning (Karypis and Kumar 1998) as METIS implements it: recursive bisection up to eight parts,
    k-way above."""
    with optional("partition method 'metis'"):
        import pymetis

    # In METIS's own integer type, which saves it copies.
    dtype = pymetis.zero_copy_dtype()
    lists = pymetis.CSRAdjacency(graph.indptr.astype(dtype), graph.ids.astype(dtype))
    # Without a seed of its own METIS always takes the same one, and `partition_seed` would name nothing. ufactor is
    # the excess it allows above the mean in thousandths; it has no bound below.
    options = pymetis.Options(seed=key.u64() & 0x7FFFFFFF, ufactor=30)
    return np.asarray(pymetis.part_graph(parts, lists, options=options).vertex_part, np.int32)


def _kernighan_lin(graph: Neighbours, parts: int, key: Key) -> Owner:
    """Bisect recursively (Kernighan and Lin 1970, as networkx implements it) for any number of parts: a piece that will
    become k parts is split in the proportion of k // 2 to the rest. Each bisection starts from the two halves of a
    breadth-first order; a random start is far worse (measured). All except the bisection is derived here."""
    with optional("partition method 'kernighan-lin'"):
        import networkx as nx

    whole = nx.Graph()
    whole.add_nodes_from(range(graph.nodes))
    source, target = graph.pairs()
    whole.add_edges_from(zip(source.tolist(), target.tolist(), strict=True))
    owner = np.empty(graph.nodes, np.int32)
    lists = np.split(graph.ids, graph.indptr[1:-1])
    pieces = deque([(list(range(graph.nodes)), 0, parts)])
    while pieces:
        members, first, count = pieces.popleft()
        if count == 1:
            owner[members] = first
            continue
        left = count // 2
        # len(members) * left / count, rounded to the nearest in whole numbers.
        size = (2 * len(members) * left + count) // (2 * count)
        # These two name a piece, in whatever order pieces are split.
        draw = key.at(partition=first, layer=count)
        order = _breadth_first(members, lists, draw)
        start = (set(order[:size]), set(order[size:]))
        found = nx.community.kernighan_lin_bisection(whole.subgraph(members), start, seed=draw.u64() & 0x7FFFFFFF)
        # Nodes are swapped in pairs, so the two sizes stay; which of them comes first does not.
        small, large = sorted((sorted(half) for half in found), key=len)
        pieces.append((small, first, left))
        pieces.append((large, first + left, count - left))
    return owner


def _breadth_first(members: list[int], lists: list[Ids], key: Key) -> list[int]:
    """Return ``members`` in breadth-first order, each component from a random node of it."""
    starts = np.asarray(members)[np.argsort(key.bits(len(members)), kind="stable")]
    waiting, order = set(members), []
    for start in starts.tolist():
        if start not in waiting:
            continue
        waiting.remove(start)
        queue = deque([start])
        while queue:
            node = queue.popleft()
            order.append(node)
            found: Iterable[int] = (n for n in lists[node].tolist() if n in waiting)
            for neighbour in found:
                waiting.remove(neighbour)
                queue.append(neighbour)
    return order


def _greedy(graph: Neighbours, parts: int, key: Key) -> Owner:
    """Linear deterministic greedy (Stanton and Kliot 2012, recalled) over several passes, derived here: nodes come in
    random order, and each goes to the part with most of its neighbours; fuller parts weigh less. From the second pass
    on, a node first leaves its part, and all of its neighbours have one."""
    capacity = bounds(graph.nodes, parts)[1]
    order = np.argsort(key.bits(graph.nodes), kind="stable").tolist()
    # Lists: the loops below read single numbers, which is slow from an array.
    indptr, ids = graph.indptr.tolist(), graph.ids.tolist()
    owner, sizes = [-1] * graph.nodes, [0] * parts
    for _ in range(PASSES):
        for node in order:
            if owner[node] >= 0:
                sizes[owner[node]] -= 1
            near = [0] * parts
            for neighbour in ids[indptr[node] : indptr[node + 1]]:
                if owner[neighbour] >= 0:
                    near[owner[neighbour]] += 1
            # Among equals the emptiest: a node without neighbours, or the first of all.
            best = max(range(parts), key=lambda p: (near[p] * (capacity - sizes[p]), capacity - sizes[p]))
            owner[node] = best
            sizes[best] += 1
    return np.asarray(owner, np.int32)


METHODS: Final[dict[str, Callable[[Neighbours, int, Key], Owner]]] = {
    "metis": _metis,
    "kernighan-lin": _kernighan_lin,
    "greedy": _greedy,
    "random": _random,
}
"""The partition methods by name."""
