"""Communication graphs: which node sends to which in an iteration, and with which weights.

``P[j, i]`` is the share vertex i pushes to j: columns sum to 1, and a vertex needs only its own out-degree for its own.
``W[i, j]`` is the weight i gives to what it receives from j: symmetric, with rows and columns that sum to 1, on
undirected graphs only. The diagonal is what is left to 1, and always positive.

Whoever does not answer is left out of ``alive``, and the others' weights are those of the graph without it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, Final

import numpy as np

from fedcomp.gossip import weights as w
from fedcomp.gossip.base import Algorithm, Named, View
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.weights import Matrix

_UNDIRECTED: Final = "ring, torus, complete"
_PUSH_SUM: Final = "sgp, sparse-push"


class Topology(Named, ABC):
    """A graph on the vertices 0..n-1 for every iteration t = 0, 1, ...: shares P, and undirected also weights W.

    Immutable; neighbour tables are made once and kept, those of graphs without a period for the last few iterations.

    Attributes
    ----------
    name : str
        Its family's.
    n : int
        Vertices, at least 2.
    directed : bool
        Some edge has no counterpart of equal weight: symmetric algorithms cannot run.
    period : int or None
        Iterations after which the graph repeats; 1 for a static one, None for one that never does.
    window : int
        The union of any ``window`` consecutive graphs is strongly connected.
    """

    name: ClassVar[str]
    directed: bool = False
    period: int | None = 1
    window: int = 1

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 2:
            raise TopologyError(
                f"a {self.name} graph of n={n!r} nodes: "
                "gossip needs at least 2, a single node has nobody to average with"
            )
        self.n = int(n)
        self._tables: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {}
        self._living: tuple[int, frozenset[int], dict[int, int]] | None = None

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, JSON-able, from the attributes of the same names."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @abstractmethod
    def targets(self, t: int) -> Iterable[Iterable[int]]:
        """Return the out-neighbours of every vertex in iteration t, in any order; itself is left out later."""

    @property
    def time_varying(self) -> bool:
        """Whether the graph changes from one iteration to the next."""
        return self.period != 1

    @property
    def text(self) -> str:
        """What :func:`~fedcomp.gossip.topology.topology_of` makes this graph of again, with the same n and seed."""
        return self.name

    def _neighbours(self, t: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the tables of out-neighbours and of in-neighbours of iteration t."""
        phase = t if self.period is None else t % self.period
        found = self._tables.get(phase)
        if found is None:
            # A set without i: both ways around a ring of two lead to one vertex, and a random graph draws loops.
            out = [tuple(sorted(set(js) - {i})) for i, js in enumerate(self.targets(phase))]
            found = out, w.transposed(out)
            if self.period is None:
                # One node may be a few iterations behind the others; nobody looks further back.
                self._tables = {k: table for k, table in self._tables.items() if abs(k - phase) < 4}
            self._tables[phase] = found
        return found

    def out_neighbours(self, i: int, t: int = 0) -> tuple[int, ...]:
        """Return whom vertex i sends to in iteration t, ascending, without i."""
        return self._neighbours(t)[0][i]

    def in_neighbours(self, i: int, t: int = 0) -> tuple[int, ...]:
        """Return who sends to vertex i in iteration t, ascending, without i."""
        return self._neighbours(t)[1][i]

    def edges(self, t: int = 0, alive: Collection[int] | None = None) -> list[tuple[int, int]]:
        """Return the directed edges ``(source, destination)`` of iteration t between living vertices, ascending."""
        out = self._neighbours(t)[0]
        here = range(self.n) if alive is None else alive
        return [(i, j) for i, js in enumerate(out) if i in here for j in js if j in here]

    def _degrees(self, t: int, alive: frozenset[int]) -> dict[int, int]:
        """Return the out-degree of every living vertex among the living; cached by set, because all nodes ask the
        same."""
        phase = t if self.period is None else t % self.period
        kept = self._living
        # Identity first: the nodes of an iteration ask with one and the same set, and comparing two takes n steps.
        if kept is None or kept[0] != phase or (kept[1] is not alive and kept[1] != alive):
            out = self._neighbours(t)[0]
            degrees = {i: sum(j in alive for j in out[i]) for i in alive if 0 <= i < self.n}
            kept = self._living = phase, alive, degrees
        return kept[2]

    def _living_out(self, i: int, t: int, alive: Collection[int] | None) -> tuple[int, ...]:
        out = self.out_neighbours(i, t)
        if alive is None:
            return out
        return tuple(j for j in out if j in alive) if i in alive else ()

    def components(
        self, t: int = 0, alive: Collection[int] | None = None, *, window: int | None = None
    ) -> list[set[int]]:
        """Return the strongly connected components of the living in the union of ``window`` graphs from iteration t.

        More than one: no consensus among the living. By their smallest vertex.
        """
        spans = self.window if window is None else window
        if self.period is not None:
            # A whole period holds every edge there is.
            spans = min(spans, self.period)
        table = w.union(self._neighbours(t + k)[0] for k in range(max(1, spans)))
        return w.strong_components(table, range(self.n) if alive is None else frozenset(alive))

    def _require_connected(self, start: int) -> None:
        found = self.components(start)
        if len(found) > 1:
            span = f"over iterations {start} to {start + self.window - 1} " if self.time_varying else ""
            shown = "; ".join(", ".join(map(str, sorted(c)[:6])) + (", ..." if len(c) > 6 else "") for c in found[:4])
            raise TopologyError(
                f"{self.text} with n={self.n} is not strongly connected {span}({len(found)} components: {shown}); "
                "every node must reach every other, or the models never agree: add edges"
                + (", a larger p or a longer window" if self.time_varying else "")
            )

    def column(self, i: int, t: int = 0, alive: Collection[int] | None = None) -> dict[int, float]:
        """Return ``P[j, i]`` for the living out-neighbours j, ascending; what is missing to 1 is ``P[i, i] > 0``.

        ``1 / (live out-degree + 1)`` each, or the user's weights over what they and the own one sum to. A dead vertex
        pushes nothing.
        """
        return w.uniform_column(self._living_out(i, t, alive))

    def row(self, i: int, t: int = 0, alive: Collection[int] | None = None) -> dict[int, float]:
        """Return the weight of what vertex i receives from each living in-neighbour, ascending.

        Undirected graphs: ``W[i, j]``, Metropolis weights of the graph of the living. Directed ones: ``P[i, j]``.
        """
        if alive is None:
            degree: Callable[[int], int] = lambda j: len(self.out_neighbours(j, t))  # noqa: E731
            sources = self.in_neighbours(i, t)
        else:
            alive = alive if isinstance(alive, frozenset) else frozenset(alive)
            if i not in alive:
                return {}
            degree = self._degrees(t, alive).__getitem__
            sources = tuple(j for j in self.in_neighbours(i, t) if j in alive)
        if self.directed:
            # P[i, j] is decided by the sender: its out-degree counts, not the receiver's.
            return {j: 1.0 / (1 + degree(j)) for j in sources}
        return w.metropolis_row(len(sources), {j: degree(j) for j in sources})

    def view(
        self,
        i: int,
        t: int,
        *,
        seed: int,
        alive: Collection[int] | None = None,
        directed_algorithm: bool,
        dense: bool = False,
        resync: Iterable[int] = (),
    ) -> View:
        """Return what vertex i must know about iteration t.

        Parameters
        ----------
        alive : collection of int, optional
            Who takes part (a set, best a frozenset: it is asked for every edge); None: everybody.
        directed_algorithm : bool
            ``algorithm.directed``: column-stochastic shares. Otherwise the column is the row: ``W[i, j] = W[j, i]``.
        dense, resync
            As in :class:`~fedcomp.gossip.base.View`; of ``resync`` only out-neighbours are kept.

        Raises
        ------
        TopologyError
            When a symmetric algorithm asks for weights of a directed graph.
        """
        if not directed_algorithm:
            self._require_symmetric("a symmetric algorithm")
        row = self.row(i, t, alive)
        column = self.column(i, t, alive) if directed_algorithm else row
        known = frozenset(j for j in resync if j in column)
        return View(node=i, iteration=t, column=column, row=row, seed=seed, dense=dense, resync=known)

    def mixing_matrix(self, t: int = 0, alive: Collection[int] | None = None, symmetric: bool | None = None) -> Matrix:
        """Return P (its columns sum to 1) or W (symmetric) of iteration t, shape ``(n, n)``; dead vertices keep all.

        Parameters
        ----------
        symmetric : bool, optional
            W or P; the default is W on undirected graphs.
        """
        symmetric = not self.directed if symmetric is None else symmetric
        if symmetric:
            self._require_symmetric("W")
        alive = None if alive is None else frozenset(alive)
        matrix = np.zeros((self.n, self.n))
        for i in range(self.n):
            given = self.row(i, t, alive) if symmetric else self.column(i, t, alive)
            for j, weight in given.items():
                matrix[j, i] = weight
            # As View.own_share has it: the matrix is of the weights that a run uses.
            matrix[i, i] = 1.0 - math.fsum(given.values())
        return matrix

    def mixing_rate(self, symmetric: bool | None = None) -> float:
        """Return the factor by which one uncompressed round shrinks disagreement in the long run.

        The modulus of the second eigenvalue, of the product over a period for graphs that repeat (0.0: exact averaging
        in finitely many rounds). Of a graph that never does it is measured on 50 windows, at least 200 rounds.
        """
        if self.period is None:
            rounds = max(200, 50 * self.window)
            return w.measured_rate(self.mixing_matrix(t, symmetric=symmetric) for t in range(rounds))
        # Of the whole period: the eigenvalues of single graphs say nothing about the rate of their sequence.
        product = np.eye(self.n)
        for t in range(self.period):
            product = self.mixing_matrix(t, symmetric=symmetric) @ product
        return w.second_modulus(product, self.period)

    def averaging_rounds(self, start: int = 0) -> int:
        """Return the number R of uncompressed push-sum rounds of a closing phase.

        The smallest R after which no models, however different, disagree by more than a thousandth of what they did
        (spectral norm, measured on the matrices, weights beginning at 1): log2 n on the one-peer exponential graph when
        n is a power of two, where it is exact. Never more than n: graphs that mix slowly are left with
        ``mixing_rate() ** n`` of their disagreement.

        Parameters
        ----------
        start : int
            First iteration of the phase, for graphs that change.
        """
        product = np.eye(self.n)
        for done in range(self.n):
            if w.disagreement(product) <= 1e-3:
                return done
            product = self.mixing_matrix(start + done, symmetric=False) @ product
        return self.n

    def check(self, algorithm: Algorithm | type[Algorithm]) -> None:
        """Refuse an algorithm this graph cannot carry; call it once before a run.

        Raises
        ------
        TopologyError
            For a directed graph or a W that is not symmetric under a symmetric algorithm, for a graph that changes
            under one that needs a static one, and for weights :meth:`validate` refuses.
        """
        if not algorithm.directed:
            self._require_symmetric(algorithm.name)
        if self.time_varying and not algorithm.time_varying:
            static = f"{_UNDIRECTED}, directed-ring, exponential" if algorithm.directed else _UNDIRECTED
            raise TopologyError(
                f"{algorithm.name} needs the same neighbours in every iteration, and {self.text} changes; use a static "
                f"graph ({static}) or an algorithm for graphs that change: sgp, or sparse-push with estimates='edge'"
            )
        self.validate(symmetric=not algorithm.directed)

    def _require_symmetric(self, who: str) -> None:
        if self.directed:
            raise TopologyError(
                f"{who} needs symmetric weights W, and {self.text} is directed; use an undirected graph "
                f"({_UNDIRECTED}, or edges:0-1,1-2,...) or a push-sum algorithm: {_PUSH_SUM}"
            )

    def validate(self, *, symmetric: bool | None = None) -> None:
        """Check the weights of every iteration of a window, and that its union is strongly connected.

        Raises
        ------
        TopologyError
            For a negative or NaN weight, a column without a positive rest for the vertex itself, a W that is not
            symmetric, or vertices that others never hear of.
        """
        symmetric = not self.directed if symmetric is None else symmetric
        for t in range(self.window if self.period is None else self.period):
            columns = [self.column(i, t) for i in range(self.n)]
            rows = [self.row(i, t) for i in range(self.n)] if symmetric else []
            for kind, vectors in (("column", columns), ("row", rows)):
                for i, given in enumerate(vectors):
                    whole = math.fsum(given.values())
                    # ``not >=`` and not ``<``: NaN must fail, too.
                    if any(not weight >= 0.0 for weight in given.values()):
                        raise TopologyError(f"{self.text}: {kind} {i} has a weight below 0 or not a number: {given}")
                    if 1.0 - whole <= 0.0:
                        raise TopologyError(
                            f"{self.text}: {kind} {i} sums to {whole!r} without the node itself; a node must keep a "
                            "positive share"
                        )
            for i, given in enumerate(rows):
                # To the last bit: what one end adds the other takes off only if both multiply by the same number.
                if any(rows[j].get(i) != weight for j, weight in given.items()):
                    raise TopologyError(f"{self.text}: W is not symmetric in row {i}")
        self._require_connected(0)
