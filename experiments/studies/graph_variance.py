"""The variance of a sampled layer under skew, computed exactly on a run's batches with all features known.

No client could compute this, because it needs features of other owners. An experiment has the whole graph. It compares
the budget of a sampler with the actual variance (:func:`measured`), and the mean over many draws of a sampler's
operators with the sum that it estimates (:func:`bias_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import mean
from fedcomp.graphs.adjacency import columns_of
from fedcomp.graphs.base import AdjacencyRows, Conditions, GraphPart, Norms, Operator
from fedcomp.graphs.inclusion import base_weight, column_energy, local_mass, waterfill
from fedcomp.graphs.plan import draw_batch, plan_round, plan_step
from fedcomp.graphs.scale import moment_ratio
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.tasks.graph import GraphTask

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Batches:
    """The batches of ``size`` nodes that a run draws in its first rounds."""

    task: GraphTask
    parts: int
    seed: int
    rounds: int
    size: int

    def layers(
        self,
        settings: SamplerSettings,
        conditions: Conditions = Conditions(),  # noqa: B008 - immutable
    ) -> Iterator[tuple[GraphPart, Operator]]:
        """Yield the owner and the input layer of every batch of the run's first rounds."""
        for number in range(1, self.rounds + 1):
            for part in owners(self.task, self.parts):
                (plan,) = plan_round(
                    part, settings, seed=self.seed, round=number, steps=1, batch_size=self.size, conditions=conditions
                )
                yield part, plan.layers[0]


def owners(task: GraphTask, parts: int) -> list[GraphPart]:
    """Return all parts of the task's graph."""
    return [task.shared(parts).part(index) for index in range(parts)]


def measured(batches: Batches, settings: SamplerSettings) -> dict[str, float]:
    """Return exact ratios over some batches: the input layer compared with the unskewed sampler.

    Parameters
    ----------
    settings : SamplerSettings
        With "measured", norms are known everywhere, as in a run after its set-up.

    Returns
    -------
    dict
        Figures for the layers that were sampled, with more candidates than were to be kept and some of them remote; NaN
        if there is none. ``second_moment``: sum of M(s) over sum of M(1), ``M = sum_i a_i / p_i``; ``variance``: sum of
        V(s) over sum of V(1), V the variance of the Poisson estimator. ``predicted``: mean of ``1 + lambda (1 - lambda)
        (s - 1)^2 / s``, the estimate of M(s) / M(1) by the rule "matched". ``candidates``, ``kept``: means of the input
        layer.

    Raises
    ------
    ConfigError
        If the sampler does not have one scale per layer.
    """
    if settings.sampler != "skewed" or settings.keep_self or settings.favour != "owned":
        raise ConfigError(
            f"sampler {settings!r} has no single scale per layer to measure; use sampler='skewed', favour='owned' and "
            "keep_self=False"
        )
    task = batches.task
    norms = np.linalg.norm(all_features(task, batches.parts), axis=1)
    known: Norms | None = None
    if settings.mode == "measured":
        # For hidden layers a run knows no norms, so none are used.
        known = [dict(enumerate(norms.tolist())), *({} for _ in range(settings.layers - 1))]
    sums = np.zeros(4)
    means: list[tuple[float, float, float]] = []
    for part, layer in batches.layers(settings, Conditions(norms=known)):
        rows = task.adjacency.rows(layer.rows)
        candidates, positions = columns_of(rows)
        w = base_weight(rows, positions, len(candidates), settings.weight)
        local = part.owned(candidates)
        # A layer that keeps all candidates has no variance; skew does not change the variance of one without remote
        # candidates.
        if len(candidates) <= settings.draws(0) or local.all():
            continue
        a = column_energy(rows, positions, len(candidates), norms[candidates])
        lam = local_mass(w, local)
        skewed = np.where(local, layer.scale * w, w)
        before, after = waterfill(w, settings.draws(0)), waterfill(skewed, settings.draws(0))
        moments = [float((a / (each / each.sum())).sum()) for each in (w, skewed)]
        sums += (*moments, poisson_variance(a, before), poisson_variance(a, after))
        # The assumption of "matched": energy over probability is spread like the mass.
        predicted = moment_ratio(layer.scale, lam, lam, 1.0 - lam)
        means.append((predicted, float(len(candidates)), float(after.sum())))
    # Ratios of sums, not means of ratios, because a batch with little energy must not count as much as others.
    ratios = (sums[1] / sums[0], sums[3] / sums[2]) if means else (math.nan, math.nan)
    found = zip(*means, strict=True) if means else [()] * 3
    return {
        **dict(zip(("second_moment", "variance"), map(float, ratios), strict=True)),
        **{name: mean(values) for name, values in zip(("predicted", "candidates", "kept"), found, strict=True)},
    }


def poisson_variance(a: Reals, pi: Reals) -> float:
    """Return ``sum_i a_i (1 / pi_i - 1)``, the variance of Poisson draws with weights 1 / pi_i.

    Infinite if a column with energy has probability 0, because no weight makes its estimator unbiased.
    """
    has = a > 0.0
    with np.errstate(divide="ignore", over="ignore"):
        return float((a[has] * ((1.0 - pi[has]) / pi[has])).sum())


def remote_inputs(batches: Batches, settings: SamplerSettings) -> float:
    """Return the mean number of remote input nodes of a batch, from plans without training."""
    return mean(float(np.count_nonzero(~part.owned(layer.columns))) for part, layer in batches.layers(settings))


def as_many_rows(
    batches: Batches, wanted: float, boundary: SamplerSettings, uniform: SamplerSettings
) -> tuple[float, int]:
    """Return the q of boundary sampling and the n of the input layer of uniform sampling that fetch ``wanted`` rows.

    Both come from bisection on plans and use no label. ``wanted`` is a value of :func:`remote_inputs`; ``boundary`` and
    ``uniform`` are the samplers to adjust.
    """
    low, high = 1e-6, 1.0
    # Sixteen bisections give a relative accuracy of 2e-4.
    for _ in range(16):
        # The middle of the logarithms, because q spans six orders of magnitude.
        q = math.sqrt(low * high)
        more = remote_inputs(batches, replace(boundary, q=q)) > wanted
        low, high = (low, q) if more else (q, high)
    few, many = 1, max(2, uniform.draws(0))
    while many - few > 1:
        n = (few + many) // 2
        more = remote_inputs(batches, with_input_layer(uniform, n)) > wanted
        few, many = (few, n) if more else (n, many)
    return math.sqrt(low * high), few


def with_input_layer(settings: SamplerSettings, n: int) -> SamplerSettings:
    """Return the settings with ``n`` nodes kept at the input layer and the other layers unchanged."""
    return replace(settings, n=(n, *(settings.draws(layer) for layer in range(1, settings.layers))))


def bias_of(
    task: GraphTask, part: GraphPart, settings: SamplerSettings, *, batch: int, draws: int, seed: int
) -> dict[str, float]:
    """Return the distance of the mean of many draws of one layer from the sum it estimates, relative to ``||Z||_F``.

    It uses a batch of ``part``'s training nodes. The operators are those of a client; the sum is over all features.

    Returns
    -------
    dict
        ``distance``: ``||mean - Z|| / ||Z||``, which contains noise even for an unbiased sampler. ``noise``: the
        expected distance without bias, which is the standard error of the mean over ``||Z||``. ``deviation``: root mean
        square of ``||estimate - Z|| / ||Z||`` of one draw, with bias and spread. ``kept``, ``remote``: numbers of
        columns and of remote columns in a draw.
    """
    key = Key(seed, "gcn/bias", partition=part.index)
    nodes = draw_batch(part.train, batch, key.at(purpose="gcn/bias/batch"))
    one = replace(settings, layers=1, n=settings.draws(settings.layers - 1))
    features = all_features(task, part.parts)
    exact = multiply(task.adjacency.rows(nodes), features)
    total, square, spread, kept, remote = np.zeros_like(exact), 0.0, 0.0, 0, 0
    for draw in range(draws):
        plan = plan_step(part, nodes, one, key.at(round=draw))
        (layer,) = plan.layers
        found = AdjacencyRows(layer.rows, layer.indptr, layer.columns[layer.positions], layer.values)
        estimate = multiply(found, features)
        total += estimate
        square += float((estimate * estimate).sum())
        spread += float(((estimate - exact) ** 2).sum())
        kept += len(plan.inputs)
        remote += len(plan.remote)
    centre, size = total / draws, float((exact * exact).sum())
    distance = float(((centre - exact) ** 2).sum()) / size
    # An unbiased estimate of the variance of the mean, from the same draws.
    noise = max(0.0, square / draws - float((centre * centre).sum())) / (draws - 1) / size
    return {
        "distance": math.sqrt(distance),
        "noise": math.sqrt(noise),
        "deviation": math.sqrt(spread / draws / size),
        "kept": kept / draws,
        "remote": remote / draws,
    }


def all_features(task: GraphTask, parts: int) -> Reals:
    """Return the features of all nodes from the parts, float64 ``(nodes, d)``."""
    mine = owners(task, parts)
    out = np.zeros((task.adjacency.nodes, mine[0].features.shape[1]))
    for part in mine:
        out[part.ids] = part.features
    return out


def multiply(rows: AdjacencyRows, features: Reals) -> Reals:
    """Return ``U @ features`` for the rows of U, float64 ``(R, d)``."""
    from scipy.sparse import csr_matrix

    shape = (len(rows.ids), len(features))
    return np.asarray(csr_matrix((rows.values, rows.columns, rows.indptr), shape) @ features)
