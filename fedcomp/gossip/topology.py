"""Families of graphs, and their names in settings. What a graph is: :mod:`fedcomp.gossip.graph`."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from fedcomp import params
from fedcomp.errors import nearest
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.graph import Topology
from fedcomp.gossip.weights import disconnection_bound
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Real, checked

__all__ = [
    "Complete",
    "DirectedRing",
    "Edges",
    "Exponential",
    "OnePeerExponential",
    "RandomDigraph",
    "Ring",
    "Topology",
    "Torus",
    "topology_of",
]

_ROUNDING: Final = 1e-9
"""Tolerance for weights that users write as decimals."""

_CHECKED_WINDOWS: Final = 16
_LONGEST_WINDOW: Final = 10_000


class _Circulant(Topology):
    """Vertex i sends to i + o modulo n for every offset o."""

    @abstractmethod
    def offsets(self, t: int) -> Sequence[int]:
        """Return the offsets of iteration t."""

    def targets(self, t: int) -> Iterable[Iterable[int]]:
        """Return the shifted vertices."""
        offsets = self.offsets(t)
        return ([(i + o) % self.n for o in offsets] for i in range(self.n))


class Ring(_Circulant):
    """Undirected ring: i - 1 and i + 1; of two vertices, a single edge."""

    name = "ring"

    def offsets(self, t: int) -> Sequence[int]:
        """Return one step to either side."""
        return (1, -1)


class DirectedRing(_Circulant):
    """Directed ring: i to i + 1. Dense push-sum contracts by ``cos(pi / n)`` per round."""

    name = "directed-ring"
    directed = True

    def offsets(self, t: int) -> Sequence[int]:
        """Return one step ahead."""
        return (1,)


class Exponential(_Circulant):
    """Static directed exponential graph: i to i + 2^k modulo n for all k with 2^k < n."""

    name = "exponential"
    directed = True

    def offsets(self, t: int) -> Sequence[int]:
        """Return all powers of two below n."""
        return _powers(self.n)


class OnePeerExponential(_Circulant):
    """One out-neighbour per iteration: i to i + 2^(t mod ceil(log2 n)) modulo n.

    For n a power of two, log2 n uncompressed rounds average exactly (measured; Assran et al., ICML 2019, use
    such graphs).
    """

    name = "one-peer"
    directed = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        # Only a whole period has all the edges: in a single iteration every vertex sends to one other.
        self.period = self.window = len(_powers(self.n))

    def offsets(self, t: int) -> Sequence[int]:
        """Return the power of two of iteration t."""
        powers = _powers(self.n)
        return (powers[t % len(powers)],)


def _powers(n: int) -> list[int]:
    # 2**k < n holds for exactly these k; a logarithm could be rounded the wrong way.
    return [1 << k for k in range((n - 1).bit_length())]


class Complete(_Circulant):
    """Complete graph: one uncompressed round averages exactly."""

    name = "complete"

    def offsets(self, t: int) -> Sequence[int]:
        """Return every other vertex."""
        return range(1, self.n)


class Torus(Topology):
    """Undirected a x b grid closed at its edges, as square as n allows: a is the largest divisor up to sqrt(n).

    Vertex i sits in row i // b and column i % b. Where a side has length 2, both ways along it lead to the same vertex.

    Raises
    ------
    TopologyError
        For a prime n, whose only grid is 1 x n.
    """

    name = "torus"

    def __init__(self, n: int) -> None:
        super().__init__(n)
        rows = max(a for a in range(1, math.isqrt(self.n) + 1) if self.n % a == 0)
        if rows == 1:
            raise TopologyError(
                f"torus of n={n} nodes: a prime number of nodes fills no grid but 1 x {n}; use ring, or "
                f"n={max(4, n + 1)}"
            )
        self.sides = rows, self.n // rows

    def targets(self, t: int) -> Iterable[Iterable[int]]:
        """Return the four vertices beside each."""
        a, b = self.sides
        for i in range(self.n):
            r, c = divmod(i, b)
            yield ((r - 1) % a * b + c, (r + 1) % a * b + c, r * b + (c - 1) % b, r * b + (c + 1) % b)


class RandomDigraph(Topology):
    """G(n, p) redrawn in every iteration: each of the n(n-1) directed edges with probability p.

    A vertex may have no out-edge in an iteration; it then keeps everything.

    Parameters
    ----------
    p : float
        In (0, 1].
    seed : int
        Of the graphs; the draw depends on it and on t alone.
    window : int, optional
        By default the smallest for which the union of the drawn graphs, itself a G(n, 1 - (1-p)^window), fails to be
        strongly connected with probability at most 1e-9, by :func:`fedcomp.gossip.weights.disconnection_bound`: once in
        a thousand runs of a million windows. Either way the first 16 windows are drawn and checked here.

    Raises
    ------
    TopologyError
        For a p so small that the window would be longer than 10 000 iterations, or a window that is too short.
    """

    name = "digraph"
    directed = True
    period = None

    def __init__(self, n: int, p: float, seed: int = 0, window: int | None = None) -> None:
        super().__init__(n)
        self.p: float = checked("p", p, Real(above=0.0, most=1.0))
        self.seed = params.integer("seed", seed, low=-(2**63))
        self.window = self._safe_window() if window is None else checked("window", window, Int(1))
        for k in range(_CHECKED_WINDOWS):
            self._require_connected(k * self.window)

    def _safe_window(self) -> int:
        for window in range(1, _LONGEST_WINDOW + 1):
            # 1 - (1 - p)**window without cancellation at small p; log1p(-1) does not exist.
            if disconnection_bound(self.n, -math.expm1(window * math.log1p(-self.p)) if self.p < 1 else 1.0) <= 1e-9:
                return window
        raise TopologyError(
            f"digraph:{self.p:g} with n={self.n}: even {_LONGEST_WINDOW} graphs together may not be connected; "
            "take a larger p"
        )

    @property
    def text(self) -> str:
        """``digraph:p``."""
        return f"{self.name}:{self.p!r}"

    def targets(self, t: int) -> Iterable[Iterable[int]]:
        """Draw iteration t: row i, column j of one stream of n*n numbers decides the edge from i to j."""
        drawn = Key(self.seed, "gossip/digraph", t).uniform(self.n * self.n).reshape(self.n, self.n) < self.p
        return (np.flatnonzero(line).tolist() for line in drawn)


class Edges(Topology):
    """The user's own edges.

    Parameters
    ----------
    edges : iterable of (int, int)
        ``(source, destination)`` if ``directed``, else each edge once (or in both directions).
    weights : iterable of float, optional
        Of every edge: P[destination, source] of a directed graph, W of an undirected one; what is missing to 1 is a
        vertex's own. Own weights may be given by edges ``(i, i)``; then the column has to sum to 1. Default: equal
        shares, or Metropolis weights.
    directed : bool
        Whether the edges are directed.

    Raises
    ------
    TopologyError
        For vertices outside 0..n-1, an edge with two different weights, columns that do not sum to 1, no weight
        left for a vertex itself, or a graph that is not strongly connected.
    """

    name = "edges"

    def __init__(
        self,
        n: int,
        edges: Iterable[Iterable[int]],
        weights: Iterable[float] | None = None,
        *,
        directed: bool = True,
    ) -> None:
        super().__init__(n)
        self.directed: bool = checked("directed", directed, Flag())
        pairs = [self._pair(edge) for edge in edges]
        given = None if weights is None else [self._weight(v) for v in weights]
        if given is not None and len(given) != len(pairs):
            raise TopologyError(f"{len(given)} weights for {len(pairs)} edges; give one weight per edge")
        self._edges: dict[tuple[int, int], float | None] = {}
        for k, (i, j) in enumerate(pairs):
            if i == j and given is None:
                raise TopologyError(
                    f"edge {i}{self._link}{i}: every node keeps its own share; give only edges to others"
                )
            # A set: the own weight (i, i) of an undirected graph is one edge, not two.
            for edge in {(i, j)} if directed else {(i, j), (j, i)}:
                self._add(edge, None if given is None else given[k])
        if given is not None:
            self._own = {i: self._own_weight(i) for i in range(self.n)}
        self.weighted = given is not None
        self.validate()

    @property
    def _link(self) -> str:
        return ">" if self.directed else "-"

    def _pair(self, edge: Iterable[int]) -> tuple[int, int]:
        try:
            i, j = (int(v) for v in edge)
        except (TypeError, ValueError) as error:
            raise TopologyError(f"an edge is {params.shown(edge)}; expected two vertex numbers") from error
        if not (0 <= i < self.n and 0 <= j < self.n):
            raise TopologyError(f"edge {i}{self._link}{j} leaves the vertices 0..{self.n - 1}; number the nodes from 0")
        return i, j

    @staticmethod
    def _weight(value: float) -> float:
        return checked("weight", value, Real(above=0.0, below=1.0))

    def _add(self, edge: tuple[int, int], weight: float | None) -> None:
        if edge in self._edges and self._edges[edge] != weight:
            i, j = edge
            advice = "give it once" if self.directed else "a symmetric W has one; for two, write directed edges"
            raise TopologyError(
                f"edge {i}{self._link}{j} has the weights {self._edges[edge]:g} and {weight:g}; {advice}"
            )
        self._edges[edge] = weight

    def _own_weight(self, i: int) -> float:
        others = math.fsum(v or 0.0 for (a, b), v in self._edges.items() if a == i and b != i)
        own = self._edges.get((i, i))
        rest = 1.0 - others
        if own is not None and abs(own - rest) > _ROUNDING:
            raise TopologyError(
                f"column {i} sums to {others + own:.12g}, not to 1; a node's shares and its own make one whole"
            )
        if rest <= _ROUNDING:
            raise TopologyError(
                f"node {i} pushes {others:.12g} of itself away; its own share must be positive: give less than 1 in all"
            )
        # The rest and not the user's decimals: the column has to sum to 1 in float64.
        return rest

    def targets(self, t: int) -> Iterable[Iterable[int]]:
        """Return the given edges."""
        out: list[list[int]] = [[] for _ in range(self.n)]
        for i, j in self._edges:
            out[i].append(j)
        return out

    def column(self, i: int, t: int = 0, alive: Collection[int] | None = None) -> dict[int, float]:
        """Return ``P[j, i]``: equal shares, or the user's weights over what the living and itself get."""
        if not self.weighted:
            return super().column(i, t, alive)
        shares = {j: self._edges[i, j] or 0.0 for j in self._living_out(i, t, alive)}
        # With everybody there the user's numbers are taken as they are: dividing by their sum would change last bits.
        if len(shares) == len(self.out_neighbours(i, t)):
            return shares
        whole = math.fsum([self._own[i], *shares.values()])
        return {j: share / whole for j, share in shares.items()}

    def row(self, i: int, t: int = 0, alive: Collection[int] | None = None) -> dict[int, float]:
        """Return Metropolis weights, or the user's: a dead neighbour's weight is then added to the own one.

        Over what is left they would not be symmetric any more.
        """
        if not self.weighted:
            return super().row(i, t, alive)
        if alive is not None and i not in alive:
            return {}
        sources = [j for j in self.in_neighbours(i, t) if alive is None or j in alive]
        if self.directed:
            return {j: self.column(j, t, alive)[i] for j in sources}
        return {j: self._edges[i, j] or 0.0 for j in sources}

    def _once(self) -> list[tuple[int, int]]:
        """Return every edge as a user would write it. Undirected edges appear once; own weights follow from the
        others."""
        return sorted((i, j) for i, j in self._edges if (i != j if self.directed else i < j))

    @property
    def text(self) -> str:
        """``edges:0>1,1>2`` or ``edges:0-1=0.25``."""
        # repr, so that reading the text again gives the same float.
        shown = (f"{i}{self._link}{j}" + (f"={self._edges[i, j]!r}" if self.weighted else "") for i, j in self._once())
        return f"{self.name}:{','.join(shown)}"

    def get_config(self) -> dict[str, Any]:
        """Return n, edges, weights and direction."""
        edges = self._once()
        given = [self._edges[e] for e in edges] if self.weighted else None
        return {"n": self.n, "edges": [list(e) for e in edges], "weights": given, "directed": self.directed}


_FAMILIES: Final[Mapping[str, type[Topology]]] = {
    cls.name: cls
    for cls in (Ring, DirectedRing, Torus, Exponential, OnePeerExponential, RandomDigraph, Complete, Edges)
}


def topology_of(graph: str | Mapping[str, Any] | Topology, n: int, seed: int = 0) -> Topology:
    """Return the graph that a text or a configuration describes.

    Parameters
    ----------
    graph : str or mapping
        ``"ring"``, ``"directed-ring"``, ``"torus"``, ``"exponential"``, ``"one-peer"``, ``"complete"``,
        ``"digraph:0.3"`` (p), ``"edges:0>1,1>2,2>0"`` (directed) or ``"edges:0-1,1-2"``, each edge with ``=0.25`` for a
        weight; or what :meth:`Topology.to_config` returns.
    n : int
        Vertices.
    seed : int
        Of a random graph whose configuration names none.

    Raises
    ------
    TopologyError
        For an unknown name or parameter, a text that cannot be read, or a graph of another size.

    Examples
    --------
    >>> graph = topology_of("exponential", 8)
    >>> graph.out_neighbours(7)
    (0, 1, 3)
    >>> graph.column(7)
    {0: 0.25, 1: 0.25, 3: 0.25}
    """
    if isinstance(graph, Topology):
        config = graph.to_config()
    elif isinstance(graph, str):
        config = _parsed(graph)
    else:
        config = dict(graph)
    if config.setdefault("n", n) != n:
        raise TopologyError(f"the graph has {config['n']!r} vertices and the run {n} nodes; they must be the same")
    name = config.pop("name", None)
    if not isinstance(name, str) or name not in _FAMILIES:
        raise TopologyError(f"unknown graph {params.shown(name)}{nearest(str(name)[:64], _FAMILIES)}")
    if name == RandomDigraph.name:
        config.setdefault("seed", seed)
    try:
        return _FAMILIES[name](**config)
    except TypeError as error:
        raise TopologyError(f"graph {name!r} refused its parameters {sorted(config)}: {error}") from error


_EDGE: Final = re.compile(r"\s*(\d{1,9})\s*([>-])\s*(\d{1,9})\s*(?:=\s*([0-9.eE+-]+)\s*)?")


def _parsed(text: str) -> dict[str, Any]:
    """Return the configuration in a text."""
    name, colon, rest = text.strip().partition(":")
    if name == Edges.name:
        return {"name": name, **_parsed_edges(rest)}
    if name == RandomDigraph.name:
        try:
            return {"name": name, "p": float(rest)}
        except ValueError as error:
            raise TopologyError(f"graph {text!r}: expected the probability of an edge, as in 'digraph:0.3'") from error
    if colon and name in _FAMILIES:
        raise TopologyError(f"graph {text!r}: {name} takes no parameter; write {name!r}")
    return {"name": name}


def _parsed_edges(text: str) -> dict[str, Any]:
    example = (
        "expected edges as in 'edges:0>1,1>2,2>0' (directed) or 'edges:0-1,1-2', all with a weight '=0.25' or none"
    )
    edges, given, links = [], [], set()
    for part in text.split(","):
        match = _EDGE.fullmatch(part)
        if match is None:
            raise TopologyError(f"edge {part[:64]!r} cannot be read; {example}")
        edges.append((int(match[1]), int(match[3])))
        links.add(match[2])
        if match[4] is not None:
            try:
                given.append(float(match[4]))
            except ValueError as error:
                raise TopologyError(f"edge {part[:64]!r} has no number for a weight; {example}") from error
    if len(links) > 1 or len(given) not in (0, len(edges)):
        raise TopologyError(f"the edges are written in different ways; {example}")
    return {"edges": edges, "weights": given or None, "directed": links == {">"}}
