"""Weights of a graph and their properties: shares, Metropolis weights, connectivity, convergence rates.

Everything here is about plain neighbour tables and matrices; :mod:`fedcomp.gossip.graph` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Table = Sequence[Sequence[int]]
"""Neighbours of every vertex, ascending."""


def uniform_column(neighbours: Collection[int]) -> dict[int, float]:
    """Return the share pushed to each of ``neighbours`` when all, the sender included, get the same."""
    share = 1.0 / (len(neighbours) + 1)
    return dict.fromkeys(neighbours, share)


def metropolis_row(degree: int, neighbours: Mapping[int, int]) -> dict[int, float]:
    """Return ``W[i, j] = 1 / (1 + max(deg_i, deg_j))`` for neighbours given with their degrees.

    Symmetric, and the own weight that is left is positive: at least ``1 / (1 + deg_i)``.
    """
    return {j: 1.0 / (1 + max(degree, other)) for j, other in neighbours.items()}


def reached(table: Table, start: int, among: Collection[int]) -> set[int]:
    """Return the vertices of ``among`` that paths inside ``among`` lead to from ``start``."""
    found, front = {start}, [start]
    while front:
        for j in table[front.pop()]:
            if j not in found and j in among:
                found.add(j)
                front.append(j)
    return found


def transposed(table: Table) -> list[tuple[int, ...]]:
    """Return the in-neighbours of every vertex from the out-neighbours."""
    into: list[list[int]] = [[] for _ in table]
    for i, neighbours in enumerate(table):
        for j in neighbours:
            into[j].append(i)
    return [tuple(sources) for sources in into]


def union(tables: Iterable[Table]) -> list[tuple[int, ...]]:
    """Return the out-neighbours in the union of graphs on the same vertices."""
    merged: list[set[int]] = []
    for table in tables:
        merged = merged or [set() for _ in table]
        for targets, neighbours in zip(merged, table, strict=True):
            targets.update(neighbours)
    return [tuple(sorted(targets)) for targets in merged]


def strong_components(table: Table, among: Collection[int]) -> list[set[int]]:
    """Return the strongly connected components of the graph on ``among``, by their smallest vertex."""
    into, left, found = transposed(table), set(among), []
    for root in sorted(left):
        if root in left:
            # Every vertex of the component was left with it, so that both searches may stay inside what is left.
            component = reached(table, root, left) & reached(into, root, left)
            left -= component
            found.append(component)
    return found


def disconnection_bound(n: int, p: float) -> float:
    """Return a bound on P(the random digraph G(n, p) is not strongly connected).

    Derived: it is not exactly when edges leave some proper subset S for nowhere, which for one S has probability
    ``(1 - p) ** (s (n - s))``; summed over all subsets.
    """
    if p >= 1.0:
        return 0.0
    # In logarithms: the binomial coefficients of about a thousand vertices are beyond float64.
    stay = math.log1p(-p)
    logs = [math.lgamma(n + 1) - math.lgamma(s + 1) - math.lgamma(n - s + 1) + s * (n - s) * stay for s in range(1, n)]
    # Each summand capped at 1: with many vertices and a small p exp would overflow.
    return math.fsum(math.exp(min(0.0, each)) for each in logs)


def second_modulus(matrix: Matrix, rounds: int = 1) -> float:
    """Return the rate per round at which ``matrix``, the product of ``rounds`` mixing matrices, removes disagreement.

    The largest modulus of its eigenvalues on vectors of sum zero, which a column-stochastic matrix keeps to themselves:
    that of the second eigenvalue when the graph is connected. Exactly 0 when what is left is rounding.
    """
    n = len(matrix)
    centred = np.eye(n) - 1.0 / n
    left = centred @ matrix @ centred
    # Eigenvalues of a nilpotent rest of rounding are large roots of small errors: ask for its size first.
    if np.abs(left).max() < 8 * n * np.finfo(np.float64).eps:
        return 0.0
    return float(np.abs(np.linalg.eigvals(left)).max() ** (1.0 / rounds))


def measured_rate(matrices: Iterable[Matrix]) -> float:
    """Return the mean rate per round of a sequence without period: the second Lyapunov exponent, measured.

    Disagreement of n independent vectors is mixed and rescaled round by round; the first half is left out as it still
    depends on where they began.
    """
    logs: list[float] = []
    spread: Matrix | None = None
    for matrix in matrices:
        n = len(matrix)
        if spread is None:
            spread = np.eye(n) - 1.0 / n
        spread = matrix @ spread
        # Rounding puts a sum back that no later round would shrink.
        spread -= spread.mean(axis=0)
        size = float(np.linalg.norm(spread))
        if size < np.finfo(np.float64).tiny:
            return 0.0
        logs.append(math.log(size))
        # Every round: the product itself would fall below the smallest float64.
        spread /= size
    late = logs[len(logs) // 2 :]
    return math.exp(math.fsum(late) / len(late)) if late else 1.0


def disagreement(product: Matrix) -> float:
    """Return how far de-biased push-sum is from the mean after ``product``: spectral norm, weights 1 at first."""
    mass = product.sum(axis=1)
    # A vertex that nothing has reached knows its own value only; without any mass it would know nothing.
    ratios = product / np.maximum(mass, np.finfo(np.float64).tiny)[:, None]
    return float(np.linalg.norm(ratios - 1.0 / len(product), 2))
