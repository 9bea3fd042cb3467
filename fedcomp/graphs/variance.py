"""Exact variances of the two estimators of a layer's sum, given the vectors that are summed.

``E ||Z^ - Z||_F^2`` for ``Z = sum_i U[:, i] h_i``. Terms of different columns are never compared: only
``a_i = ||U[:, i]||^2 ||h_i||^2`` enters, and of the multinomial draw ``||Z||_F^2``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import Ids, Rows

Reals = NDArray[np.float64]


def column_energy(rows: Rows, positions: Ids, m: int, norms: Reals) -> Reals:
    """Return ``a_i = ||U[:, i]||^2 ||h_i||^2`` of each candidate.

    Parameters
    ----------
    rows : Rows
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


def poisson_variance(a: Reals, pi: Reals) -> float:
    """Return ``sum_i a_i (1 / pi_i - 1)``: Poisson draws with weights 1 / pi_i.

    Infinite when a column with energy has probability 0: no weight makes its estimator unbiased.
    """
    has = a > 0.0
    with np.errstate(divide="ignore", over="ignore"):
        return float((a[has] * ((1.0 - pi[has]) / pi[has])).sum())


def hansen_hurwitz_variance(a: Reals, p: Reals, n: float, z2: float) -> float:
    """Return ``(sum_i a_i / p_i - z2) / n``: n draws with replacement, with weights m_i / (n p_i).

    Parameters
    ----------
    p : ndarray of float, (m,)
        Probabilities of one draw; they sum to 1.
    z2 : float
        ``||Z||_F^2``, at most ``sum_i a_i / p_i``.

    Raises
    ------
    ConfigError
        When ``p`` does not sum to 1 or ``n`` is below 1.
    """
    if not n >= 1 or abs(float(p.sum()) - 1.0) > 1e-9:
        raise ConfigError(
            f"n={n!r} draws with probabilities that sum to {float(p.sum())!r}; expected n >= 1 and a sum of 1"
        )
    has = a > 0.0
    with np.errstate(divide="ignore", over="ignore"):
        second = float((a[has] / p[has]).sum())
    return max(0.0, second - z2) / n
