"""Samplers: which columns of a layer are kept, and with which weights.

A layer estimates ``Z = U H`` with ``U = P[rows, :]`` from few columns of U. Every sampler is a function of what there
is to choose from (:class:`Layer`), the settings and uniform numbers, and returns one factor per entry of U
(:class:`Draw`), 0 for what was dropped. It is unbiased when every factor has expectation 1; "ladies" and "local" are
not; they are here for comparison.

"skewed" and the favouring in "node" are after Jiang and Rumi (arXiv 2101.07706, abstract) and public code that
continues their work (read); the estimators are those of Horvitz and Thompson and of Hansen and Hurwitz; how much is
favoured is derived here (:mod:`fedcomp.graphs.scale`).

If nothing is kept the output of the layer is zero. That is right: drawing again until something is kept would condition
the draw on that, and bias it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import FullStructure
from fedcomp.graphs.base import AdjacencyRows, GraphPart, Ids, find
from fedcomp.graphs.inclusion import base_weight, column_energy, local_mass, multinomial, poisson, waterfill
from fedcomp.graphs.scale import scale
from fedcomp.graphs.settings import SamplerSettings

Bools = NDArray[np.bool_]
Reals = NDArray[np.float64]
Uniforms = Callable[[int], Reals]
"""Returns that many numbers in [0, 1); called at most once per layer."""

MOST_DRAWS: Final = 1 << 24
"""Draws with replacement of one layer: otherwise whoever sets n decides how much memory a plan takes."""


@dataclass(frozen=True)
class Layer:
    """What a sampler chooses from.

    Attributes
    ----------
    part : GraphPart
        Whose plan it is.
    rows : AdjacencyRows
        U.
    candidates : ndarray of int64, (m,)
        Columns of U with an entry, ascending.
    positions : ndarray of int64, (nnz,)
        Which candidate each entry is of.
    owned, favoured, usable : ndarray of bool, (m,)
        Candidates that the part owns; that the sampler favours; that can be had at all.
    certain : ndarray of bool, (nnz,)
        Entries that are always kept: of an owned row, its own column.
    norms : ndarray of float64, (m,), or None
        L2 norms of the candidates' vectors; only mode "measured" has them.
    """

    part: GraphPart
    rows: AdjacencyRows
    candidates: Ids
    positions: Ids
    owned: Bools
    favoured: Bools
    usable: Bools
    certain: Bools
    norms: Reals | None = None

    @property
    def kept_columns(self) -> Bools:
        """Candidates with a certain entry, ``(m,)``: a layer-wise sampler keeps them, with weight 1 in every row."""
        kept = np.zeros(len(self.candidates), bool)
        kept[self.positions[self.certain]] = True
        return kept

    def weights(self, kind: str) -> Reals:
        """Return the base weight of every candidate, ``(m,)``, whether it can be had or not."""
        return base_weight(self.rows, self.positions, len(self.candidates), kind)


@dataclass(frozen=True)
class Draw:
    """What was chosen.

    Attributes
    ----------
    factors : ndarray of float64, (nnz,)
        By which each entry of U is multiplied; 0: dropped.
    local_mass, scale, expected_remote : float
        As of :class:`~fedcomp.graphs.base.Operator`.
    """

    factors: Reals
    local_mass: float
    scale: float
    expected_remote: float


def draw(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    """Return what the sampler of ``settings`` keeps of a layer.

    Parameters
    ----------
    n : int
        Columns of this layer (see :class:`~fedcomp.graphs.settings.SamplerSettings`).
    uniforms : callable

    Raises
    ------
    ConfigError
        When the sampler cannot work on this structure.
    """
    return _SAMPLERS[settings.sampler](layer, settings, n, uniforms)


def _skewed(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    kept = layer.kept_columns
    weights = np.where(layer.usable & ~kept, layer.weights(settings.weight), 0.0)
    lam = local_mass(weights, layer.favoured)
    s = 1.0
    if not np.isnan(lam):
        near, far = _energies(layer, weights) if settings.mode == "measured" else (np.nan, np.nan)
        s = _scale(settings, lam, near, far)
    weights = np.where(layer.favoured, s * weights, weights)
    if settings.estimator == "poisson":
        pi = waterfill(weights, n)
        factors = np.zeros(len(pi))
        chosen = poisson(pi, uniforms(len(pi)))
        factors[chosen] = 1.0 / pi[chosen]
    else:
        # Never by 0: without any weight there is nothing to draw, and all p are 0.
        p = weights / max(float(weights.sum()), np.finfo(float).tiny)
        factors = _hansen_hurwitz(p, multinomial(p, n, _many(uniforms, n)), n)
        pi = _ever(p, n)
    factors[kept] = 1.0
    return Draw(factors[layer.positions], lam, s, float(pi[~layer.owned].sum()))


def _node(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    del n  # the budget is each row's: fanout
    rows, fanout = len(layer.rows.ids), settings.fanout
    at = np.flatnonzero(layer.usable[layer.positions] & ~layer.certain)
    row = np.repeat(np.arange(rows), np.diff(layer.rows.indptr))[at]
    near = layer.favoured[layer.positions[at]]
    degree, local = np.bincount(row, minlength=rows), np.bincount(row[near], minlength=rows)
    has = degree > 0
    lam = local / np.maximum(degree, 1)
    s = _row_scales(layer, settings, at, row, near, degree, lam)
    # Rows without entries divide by 1 instead of 0.
    total = np.where(has, s * local + (degree - local), 1.0)
    factors = layer.certain.astype(np.float64)
    if settings.estimator == "poisson":
        pi = np.where(near, *(one[row] for one in row_probabilities(degree, local, s, total, fanout)))
        # One number per entry, also of those that cannot be had: others keep theirs when an owner vanishes.
        chosen = uniforms(len(layer.positions))[at] < pi
        factors[at[chosen]] = 1.0 / pi[chosen]
    else:
        p = np.where(near, s[row], 1.0) / total[row]
        mine = _many(uniforms, rows * fanout).reshape(rows, fanout)
        drawn = _row_draws(row, near, degree, local, s * local / total, mine)
        factors[at] = _hansen_hurwitz(p, drawn, fanout)
        pi = _ever(p, fanout)
    # A remote column is fetched unless no row keeps it, and rows draw independently.
    remote = ~layer.owned[layer.positions[at]]
    with np.errstate(divide="ignore"):
        nobody = np.bincount(layer.positions[at][remote], np.log1p(-pi[remote]), len(layer.candidates))
    return Draw(
        factors,
        float(lam[has].mean()) if has.any() else float("nan"),
        float(s[has].mean()) if has.any() else 1.0,
        float(-np.expm1(nobody).sum()),
    )


def _row_scales(
    layer: Layer,
    settings: SamplerSettings,
    at: Ids,
    row: Ids,
    near: Bools,
    degree: Ids,
    lam: Reals,
) -> Reals:
    """Return the scale of every row, ``(R,)``. Rows with equal lambda share one, except in mode "measured"."""
    s = np.ones(len(degree))
    if settings.mode != "measured":
        masses, which = np.unique(lam, return_inverse=True)
        return np.array([_scale(settings, float(one)) for one in masses] + [1.0])[which]
    assert layer.norms is not None
    norms = layer.norms[layer.positions[at]]
    energy = np.square(layer.rows.values[at] * norms) * degree[row]  # a / q with q = 1 / degree
    close = np.bincount(row, np.where(near, energy, 0.0), len(degree))
    far = np.bincount(row, np.where(near, 0.0, energy), len(degree))
    # A row with nothing to favour, or nothing to favour it over, keeps s = 1.
    for one in np.flatnonzero((lam > 0.0) & (lam < 1.0)):
        s[one] = _scale(settings, float(lam[one]), float(close[one]), float(far[one]))
    return s


def row_probabilities(degree: Ids, local: Ids, s: Reals, total: Reals, fanout: int) -> tuple[Reals, Reals]:
    """Return the inclusion probabilities of favoured and of other entries of every row, ``(R,)`` each.

    What :func:`~fedcomp.graphs.inclusion.waterfill` does, for rows with two weights, s and 1: only favoured entries can
    be capped before all are. They are not capped when they alone use up the fanout, which rounding could hide: nothing
    would be left for the others, and an entry that can never be drawn is a bias.
    """
    whole = degree <= fanout
    capped = ~whole & (local < fanout) & (fanout * s >= total)
    near = np.where(whole | capped, 1.0, np.minimum(fanout * s / total, 1.0))
    rest = (fanout - local) / np.maximum(degree - local, 1)
    return near, np.where(whole, 1.0, np.where(capped, rest, fanout / total))


def _row_draws(row: Ids, near: Bools, degree: Ids, local: Ids, share: Reals, uniforms: Reals) -> NDArray[np.int64]:
    """Return the number of draws of each entry. Every row draws once for each of its uniform numbers, ``(R, f)``.

    ``share`` is the probability that a draw of the row falls on a favoured entry, ``(R,)``. All favoured entries are
    equally likely, and so are all others.
    """
    # Favoured entries first within each row: a number below the share then picks among the first ones.
    order = np.lexsort((~near, row))
    start = np.cumsum(degree) - degree
    has = degree > 0
    u, share, near_count, first = uniforms[has], share[has, None], local[has, None], start[has, None]
    far_count = degree[has, None] - near_count
    inside = u < share
    # Where a share is 0 or 1 the quotient by 1e-300 is not the one that is taken.
    within = np.where(inside, u / np.maximum(share, 1e-300), (u - share) / np.maximum(1.0 - share, 1e-300))
    count = np.where(inside, near_count, far_count)
    # Rounding can carry the quotient up to 1, which would be the next row's entry.
    place = np.minimum((within * count).astype(np.int64), count - 1) + np.where(inside, 0, near_count)
    return np.bincount(order[(first + place).ravel()], minlength=len(row))


def _ladies(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    """LADIES as published (Zou et al. 2019, arXiv 1911.07323) and coded by its authors (read).

    Sequential draws without replacement use arrival times: the first n of independent exponential times with rates w
    are such a draw. The factor ``1 / clip(n p, 1e-10, 1)`` in the code is 1 / (n p) for drawn columns here and 1 for a
    node's own column that is kept.
    """
    kept = layer.kept_columns
    weights = np.where(layer.usable & ~kept, layer.weights("l2sq"), 0.0)
    positive = weights > 0.0
    count = min(n, int(positive.sum()))
    times = np.full(len(weights), np.inf)
    # One number per candidate, also for those that cannot be had: the others keep theirs when an owner vanishes.
    times[positive] = -np.log1p(-uniforms(len(weights))[positive]) / weights[positive]
    chosen = np.argsort(times, kind="stable")[:count]
    factors = np.zeros(len(weights))
    factors[chosen] = weights.sum() / (count * weights[chosen])
    factors[kept] = 1.0
    entries = factors[layer.positions]
    if settings.renormalise:
        entries = entries * _row_correction(layer.rows, entries)
    # Inclusion probabilities have no closed form here: the number that was drawn stands for their sum.
    remote = float((~layer.owned[chosen]).sum())
    return Draw(entries, local_mass(weights, layer.owned), 1.0, remote)


def _row_correction(rows: AdjacencyRows, factors: Reals) -> Reals:
    """Return, per entry, the factor that restores the sum of P's row; 1 in an empty row."""
    lengths = np.diff(rows.indptr)
    row = np.repeat(np.arange(len(lengths)), lengths)
    whole = np.bincount(row, rows.values, len(lengths))
    left = np.bincount(row, rows.values * factors, len(lengths))
    return np.where(left > 0.0, whole / np.where(left > 0.0, left, 1.0), 1.0)[row]


def _fastgcn(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    """FastGCN (Chen et al. 2018, arXiv 1801.10247): n draws with replacement from all nodes, by column norms of P.

    Draws that are not a column of U, or are unavailable, are lost, so rows without any input are common.
    """
    ends = column_ends(layer.part)
    drawn, counts = np.unique(np.searchsorted(ends, _many(uniforms, n), side="right"), return_counts=True)
    kept = layer.kept_columns
    m = len(layer.candidates)
    # Differences of the ends, not norms again: the weight belongs to exactly the interval that was drawn from.
    p = ends[layer.candidates] - np.where(layer.candidates > 0, ends[layer.candidates - 1], 0.0)
    p = np.where(layer.usable & ~kept, p, 0.0)
    here, (found, at) = np.zeros(m, np.int64), find(layer.candidates, drawn)
    here[at[found]] = counts[found]
    factors = _hansen_hurwitz(p, here, n)
    factors[kept] = 1.0
    weights = np.where(layer.usable & ~kept, layer.weights(settings.weight), 0.0)
    expected = float(_ever(p, n)[~layer.owned].sum())
    return Draw(factors[layer.positions], local_mass(weights, layer.owned), 1.0, expected)


def column_ends(part: GraphPart) -> Reals:
    """Return the cumulated probabilities of FastGCN's draw, ``(N,)``, which are in proportion to ||P[:, i]||^2.

    Made once for a part and kept in its memo: the one thing here that takes time in proportion to the graph.

    Raises
    ------
    ConfigError
        When the part does not see all of P.
    """
    if "fastgcn" not in part.memo:
        if not isinstance(part.structure, FullStructure):
            raise ConfigError(
                "sampler 'fastgcn' draws by column norms of all of P, and this part has only its own rows; use "
                "structure 'full', or another sampler"
            )
        adjacency = part.structure.adjacency
        ends = np.cumsum(np.bincount(adjacency.columns, np.square(adjacency.values), adjacency.nodes))
        part.memo["fastgcn"] = ends / ends[-1] if ends[-1] > 0.0 else ends
    found: Reals = part.memo["fastgcn"]
    return found


def _boundary(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    """BNS-GCN (Wan et al. 2022, arXiv 2203.10983): all owned candidates, and each remote candidate with probability
    q."""
    pi = np.where(layer.owned, 1.0, settings.q)
    return _with_probability(layer, settings, np.where(layer.usable, pi, 0.0), uniforms)


def _local(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    return _with_probability(layer, settings, layer.owned.astype(np.float64), uniforms)


def _full(layer: Layer, settings: SamplerSettings, n: int, uniforms: Uniforms) -> Draw:
    return _with_probability(layer, settings, layer.usable.astype(np.float64), uniforms)


def _with_probability(layer: Layer, settings: SamplerSettings, pi: Reals, uniforms: Uniforms) -> Draw:
    factors = np.zeros(len(pi))
    # No number is drawn where nothing is left to chance: a full layer takes none of its stream.
    chosen = poisson(pi, uniforms(len(pi))) if ((pi > 0.0) & (pi < 1.0)).any() else np.flatnonzero(pi)
    factors[chosen] = 1.0 / pi[chosen]
    weights = np.where(layer.usable, layer.weights(settings.weight), 0.0)
    return Draw(factors[layer.positions], local_mass(weights, layer.owned), 1.0, float(pi[~layer.owned].sum()))


_SAMPLERS: Final[Mapping[str, Callable[[Layer, SamplerSettings, int, Uniforms], Draw]]] = {
    "skewed": _skewed,
    "node": _node,
    "ladies": _ladies,
    "fastgcn": _fastgcn,
    "boundary": _boundary,
    "local": _local,
    "full": _full,
}


def _many(uniforms: Uniforms, count: int) -> Reals:
    """Return the uniform numbers of ``count`` draws with replacement. This is the only bound on the count."""
    if count > MOST_DRAWS:
        raise ConfigError(f"{count} draws with replacement in one layer; at most {MOST_DRAWS}. Lower n or fanout")
    return uniforms(count)


def _scale(settings: SamplerSettings, lam: float, near: float = np.nan, far: float = np.nan) -> float:
    return scale(
        settings.mode, lam, settings.budget, s_max=settings.s_max, s=settings.scale, a_local=near, a_remote=far
    )


def _energies(layer: Layer, weights: Reals) -> tuple[float, float]:
    """Return the sums of a / q over favoured and over other candidates, with q in proportion to ``weights``."""
    assert layer.norms is not None
    a = column_energy(layer.rows, layer.positions, len(weights), layer.norms)
    # A column of weight 0 is never drawn: it adds nothing to the second moment.
    has = weights > 0.0
    ratio = np.zeros(len(weights))
    ratio[has] = a[has] * (weights.sum() / weights[has])
    return float(ratio[layer.favoured].sum()), float(ratio[~layer.favoured].sum())


def _hansen_hurwitz(p: Reals, counts: NDArray[np.int64], n: int) -> Reals:
    """Return the weights m / (n p), with 0 for columns that were not drawn."""
    weights = np.zeros(len(p))
    drawn = (counts > 0) & (p > 0.0)
    weights[drawn] = counts[drawn] / (n * p[drawn])
    return weights


def _ever(p: Reals, n: int) -> Reals:
    """Return the probability of being drawn at least once in n draws with replacement."""
    # Through logarithms: 1 - p rounds to 1 for p below 1e-16, however many draws there are. log1p(-1) = -inf is right.
    with np.errstate(divide="ignore"):
        return np.asarray(-np.expm1(n * np.log1p(-np.minimum(p, 1.0))))
