"""Sampling of a layer's columns: base weights, inclusion probabilities, and two draws with unbiased estimators.

For a sum over columns ``Z = sum_i U[:, i] h_i``, of which only some can be afforded:

* Poisson: column i is kept with probability pi_i, independently, and weighs 1 / pi_i (Horvitz and Thompson).
* Multinomial: n draws with probabilities p_i, of which m_i fall on i; it weighs m_i / (n p_i) (Hansen and Hurwitz).

Both have expectation Z for any weights that are positive where U is not zero. A rule that gave such a column the
probability 0 would make them biased.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.graphs.base import AdjacencyRows, Ids

WEIGHTS: Final = ("l1", "count", "l2sq")

Reals = NDArray[np.float64]


def base_weight(rows: AdjacencyRows, positions: Ids, m: int, kind: str = "l1") -> Reals:
    """Return the base weight of each candidate column of ``U = P[rows, :]``.

    Parameters
    ----------
    rows : AdjacencyRows
    positions : ndarray of int64, (nnz,)
        Column of each entry, as :func:`~fedcomp.graphs.adjacency.columns_of` returns them.
    m : int
        Number of candidates.
    kind : str
        "l1": sum of absolute values over the rows; "count": number of entries; "l2sq": sum of squares, the weight of
        LADIES (public code, read).

    Returns
    -------
    ndarray of float64, (m,)

    Raises
    ------
    ConfigError
        For an unknown kind.
    """
    params.choice("kind", kind, WEIGHTS)
    if kind == "count":
        return np.bincount(positions, minlength=m).astype(np.float64)
    values = np.abs(rows.values) if kind == "l1" else rows.values * rows.values
    return np.asarray(np.bincount(positions, values, m), np.float64)


def column_energy(rows: AdjacencyRows, positions: Ids, m: int, norms: Reals) -> Reals:
    """Return ``a_i = ||U[:, i]||^2 ||h_i||^2`` of each candidate.

    Parameters
    ----------
    rows : AdjacencyRows
    positions : ndarray of int64, (nnz,)
        Column of each entry among the candidates.
    m : int
        Number of candidates.
    norms : ndarray of float, (m,)
        L2 norm of the vector of each candidate.

    Returns
    -------
    ndarray of float64, (m,)

    Raises
    ------
    ConfigError
        When there is not one finite norm of at least 0 per candidate.
    """
    norms = np.asarray(norms, np.float64)
    if norms.shape != (m,) or not np.isfinite(norms).all() or (norms < 0.0).any():
        raise ConfigError(f"expected {m} finite norms of at least 0, one per candidate; got shape {norms.shape}")
    return np.bincount(positions, rows.values * rows.values, m) * norms * norms


def local_mass(weights: Reals, local: NDArray[np.bool_]) -> float:
    """Return lambda: the share of the weights on local candidates, NaN when there is no weight at all.

    Exactly 0 without local weight, exactly 1 without remote weight.
    """
    largest = float(weights.max(initial=0.0))
    if not largest > 0.0:
        return float("nan")
    # Relative to the largest, or the sum of a few weights near 1e308 would be infinite.
    scaled = weights / largest
    near, far = float(scaled[local].sum()), float(scaled[~local].sum())
    return near / (near + far)


def waterfill(weights: Reals, n: float) -> Reals:
    """Return inclusion probabilities ``pi_i = min(1, c w_i)`` that sum to ``n``.

    Capped candidates take 1 from the budget each, and what is left is shared by the others in proportion to their
    weights, until no other one reaches 1.

    Parameters
    ----------
    weights : ndarray of float, (m,)
        Finite, at least 0, of any magnitude: only their ratios matter.
    n : int or float
        Expected number of kept columns, at least 1; infinite keeps all.

    Returns
    -------
    ndarray of float64, (m,)
        Sums to ``min(n, number of positive weights)``. 0 exactly where the weight is 0, save that a weight below 1e-300
        of the largest that is not capped may round to 0 too.

    Raises
    ------
    ConfigError
        When ``n`` is below 1 or NaN, or a weight is negative or not finite.
    """
    w = _checked(weights, "weights")
    # Written this way round, NaN is refused, too.
    if not n >= 1:
        raise ConfigError(f"n={n!r} is not valid: at least one column has to be expected in a layer")
    positive = w > 0.0
    if n >= np.count_nonzero(positive):
        return positive.astype(np.float64)
    pi = np.zeros(len(w))
    open_ = np.flatnonzero(positive)
    left = float(n)
    while True:
        relative = w[open_]
        relative = relative / relative.max()  # the largest is 1: no sum overflows, and no ratio above 1e-300 is lost
        shares = relative * (left / relative.sum())
        full = shares >= 1.0
        count = int(np.count_nonzero(full))
        # With as many at the cap as the budget holds, the others' shares are real but below its rounding: to cap would
        # leave them nothing, and a column that can never be drawn is a bias.
        if not count or count >= left:
            pi[open_] = np.minimum(shares, 1.0)
            return pi
        pi[open_[full]] = 1.0
        open_, left = open_[~full], left - count


def poisson(pi: Reals, uniforms: Reals) -> Ids:
    """Return the positions that are kept, int64, ascending: those whose uniform number is below their probability.

    Parameters
    ----------
    pi : ndarray of float64, (m,)
        Inclusion probabilities.
    uniforms : ndarray of float64, (m,)
        In [0, 1).

    Raises
    ------
    ConfigError
        When there is not one uniform number per probability.
    """
    if len(pi) != len(uniforms):
        raise ConfigError(f"{len(uniforms)} uniform numbers for {len(pi)} inclusion probabilities")
    return np.flatnonzero(uniforms < pi)


def multinomial(p: Reals, n: int, uniforms: Reals) -> Ids:
    """Return how often each position is drawn in ``n`` draws with replacement.

    Parameters
    ----------
    p : ndarray of float, (m,)
        Proportional to the probabilities; a position with 0 is never drawn.
    n : int
    uniforms : ndarray of float64, (n,)
        In [0, 1), one per draw.

    Returns
    -------
    ndarray of int64, (m,)
        Sums to ``n``; all 0 when nothing has a probability.

    Raises
    ------
    ConfigError
        When there are not ``n`` uniform numbers, ``n`` is below 1, or ``p`` is negative or not finite.
    """
    p = _checked(p, "probabilities")
    if n < 1 or len(uniforms) != n:
        raise ConfigError(f"{len(uniforms)} uniform numbers for n={n!r} draws; expected as many, at least one")
    if not p.any():
        return np.zeros(len(p), np.int64)
    # By the largest first, then by the sum: neither overflows, whatever the unit of p.
    ends = np.cumsum(p / p.max())
    # Side "right" skips intervals of length 0, wherever they are; the last end is 1 exactly, above every uniform.
    return np.bincount(np.searchsorted(ends / ends[-1], uniforms, side="right"), minlength=len(p))


def _checked(values: Any, what: str) -> Reals:
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or not np.isfinite(found).all() or (found < 0.0).any():
        raise ConfigError(f"{what} have to be a flat list of finite numbers of at least 0")
    return found
