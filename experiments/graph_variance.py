"""What skew does to the variance of a sampled layer, exactly: on the batches a run draws, with all features at hand.

No client could compute this: features of other owners are in it. An experiment has the whole graph, and asks how far
the budget that the sampler was given is from what it came to (:func:`measured`), and whether the mean over many draws
of a sampler's own operators is the sum it is to estimate (:func:`bias_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import columns_of
from fedcomp.graphs.base import Operator, Part, Rows
from fedcomp.graphs.inclusion import base_weight, local_mass, waterfill
from fedcomp.graphs.plan import draw_batch, plan_round, plan_step
from fedcomp.graphs.scale import moment_ratio
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.graphs.variance import column_energy, poisson_variance
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.tasks.graph import GraphTask

Reals = NDArray[np.float64]

_BISECTIONS: Final = 16
"""Of a probability: to 2e-4 of it."""

EXACT: Final = ("skewed",)
"""Samplers whose input layer is one Poisson or multinomial draw from skewed base weights."""


@dataclass(frozen=True)
class Ratios:
    """Means over batches of what the input layer of a run came to against the unskewed sampler on the same rows.

    Attributes
    ----------
    batches : int
        Layers that were sampled at all: more candidates than were to be kept, some of them remote.
    second_moment : float
        sum of M(s) over sum of M(1), ``M = sum_i a_i / p_i``; NaN without batches.
    variance : float
        sum of V(s) over sum of V(1), V the variance of the Poisson estimator.
    predicted : float
        Mean of ``1 + lambda (1 - lambda) (s - 1)^2 / s``, what the rule "matched" takes M(s) / M(1) to be.
    local_mass, scale : float
        Means of lambda and s of the input layer.
    remote, remote_unskewed : float
        Expected remote columns of a batch, with s and with s = 1.
    candidates, kept : float
        Of the input layer, means.
    """

    batches: int
    second_moment: float
    variance: float
    predicted: float
    local_mass: float
    scale: float
    remote: float
    remote_unskewed: float
    candidates: float
    kept: float


def feature_norms(parts: Sequence[Part], nodes: int) -> Reals:
    """Return the L2 norm of every node's features, ``(nodes,)``, from the parts that own them."""
    norms = np.zeros(nodes)
    for part in parts:
        norms[part.ids] = np.linalg.norm(part.features.astype(np.float64), axis=1)
    return norms


def measured(task: GraphTask, settings: SamplerSettings, parts: int, *, seed: int, rounds: int, batch: int) -> Ratios:
    """Return the exact ratios over the batches of ``rounds`` rounds, those that a run with this seed trains on.

    Parameters
    ----------
    settings : SamplerSettings
        With "measured" norms are taken as known everywhere, which is what a run comes to after its set-up.
    parts, seed, rounds, batch
        As of the run.

    Raises
    ------
    ConfigError
        For a sampler without one scale per layer.
    """
    if settings.sampler not in EXACT or settings.keep_self or settings.favour != "owned":
        raise ConfigError(f"sampler {settings!r} has no single scale per layer to measure; use {EXACT} and owned nodes")
    owners = [task.part(index, parts) for index in range(parts)]
    norms = feature_norms(owners, task.adjacency.nodes)
    total: dict[str, float] = dict.fromkeys(("m1", "ms", "v1", "vs"), 0.0)
    means: dict[str, list[float]] = {
        name: [] for name in ("predicted", "lam", "scale", "remote", "before", "candidates", "kept")
    }
    for part, layer in _input_layers(owners, settings, seed, rounds, batch, norms):
        rows = task.adjacency.rows(layer.rows)
        candidates, positions = columns_of(rows)
        w = base_weight(rows, positions, len(candidates), settings.weight)
        local = part.owned(candidates)
        if len(candidates) <= settings.draws(0) or local.all():
            continue
        a = column_energy(rows, positions, len(candidates), norms[candidates])
        lam = local_mass(w, local)
        skewed = np.where(local, layer.scale * w, w)
        before, after = waterfill(w, settings.draws(0)), waterfill(skewed, settings.draws(0))
        total["m1"] += float((a / (w / w.sum())).sum())
        total["ms"] += float((a / (skewed / skewed.sum())).sum())
        total["v1"] += poisson_variance(a, before)
        total["vs"] += poisson_variance(a, after)
        found = {
            # What "matched" assumes: energy over probability is spread like the mass.
            "predicted": moment_ratio(layer.scale, lam, lam, 1.0 - lam),
            "lam": lam,
            "scale": layer.scale,
            "remote": float(after[~local].sum()),
            "before": float(before[~local].sum()),
            "candidates": float(len(candidates)),
            "kept": float(after.sum()),
        }
        for name, value in found.items():
            means[name].append(value)
    mean = {name: math.fsum(values) / len(values) if values else math.nan for name, values in means.items()}
    return Ratios(
        batches=len(means["lam"]),
        second_moment=total["ms"] / total["m1"] if total["m1"] else math.nan,
        variance=total["vs"] / total["v1"] if total["v1"] else math.nan,
        predicted=mean["predicted"],
        local_mass=mean["lam"],
        scale=mean["scale"],
        remote=mean["remote"],
        remote_unskewed=mean["before"],
        candidates=mean["candidates"],
        kept=mean["kept"],
    )


def _input_layers(
    owners: Sequence[Part], settings: SamplerSettings, seed: int, rounds: int, batch: int, norms: Reals
) -> Iterator[tuple[Part, Operator]]:
    # Of hidden layers only what a run knows: nothing.
    hidden: list[dict[int, float]] = [{} for _ in range(settings.layers - 1)]
    known = [dict(enumerate(norms.tolist())), *hidden] if settings.mode == "measured" else None
    for number in range(1, rounds + 1):
        for part in owners:
            (plan,) = plan_round(part, settings, seed=seed, round=number, steps=1, batch_size=batch, norms=known)
            yield part, plan.layers[0]


def remote_inputs(
    task: GraphTask, settings: SamplerSettings, parts: int, *, seed: int, rounds: int, batch: int
) -> float:
    """Return the remote input nodes of a batch, mean over the batches of ``rounds`` rounds: plans, no training."""
    found = []
    for index in range(parts):
        part = task.part(index, parts)
        for number in range(1, rounds + 1):
            (plan,) = plan_round(part, settings, seed=seed, round=number, steps=1, batch_size=batch)
            found.append(int(np.count_nonzero(~part.owned(plan.layers[0].columns))))
    return math.fsum(found) / len(found)


def as_many_rows(
    task: GraphTask,
    wanted: float,
    boundary: SamplerSettings,
    uniform: SamplerSettings,
    parts: int,
    *,
    seed: int,
    rounds: int,
    batch: int,
) -> tuple[float, int]:
    """Return the q of boundary sampling and the n of the input layer of uniform sampling that fetch ``wanted`` rows.

    Both are found by bisection on plans; neither looks at a label.

    Parameters
    ----------
    wanted : float
        Remote input nodes of a batch, as of :func:`remote_inputs`.
    boundary, uniform : SamplerSettings
        The samplers to be adjusted, the latter with one n per layer or one for all.
    parts, seed, rounds, batch
        As of the runs.
    """
    size: dict[str, int] = {"seed": seed, "rounds": rounds, "batch": batch}
    low, high = 1e-6, 1.0
    for _ in range(_BISECTIONS):
        q = math.sqrt(low * high)
        more = remote_inputs(task, replace(boundary, q=q), parts, **size) > wanted
        low, high = (low, q) if more else (q, high)
    few, many = 1, max(2, uniform.draws(0))
    while many - few > 1:
        n = (few + many) // 2
        more = remote_inputs(task, with_input_layer(uniform, n), parts, **size) > wanted
        few, many = (few, n) if more else (n, many)
    return math.sqrt(low * high), few


def with_input_layer(settings: SamplerSettings, n: int) -> SamplerSettings:
    """Return the settings with ``n`` nodes kept at the input layer, and the other layers as they are."""
    return replace(settings, n=(n, *(settings.draws(layer) for layer in range(1, settings.layers))))


@dataclass(frozen=True)
class Bias:
    """How far the mean of a sampler's estimates is from what it estimates, relative to ``||Z||_F``.

    Attributes
    ----------
    distance : float
        ``||mean - Z|| / ||Z||``; has noise in it, also of an unbiased sampler.
    noise : float
        What distance is expected to be without bias: standard error of the mean over ``||Z||``.
    bias : float
        ``sqrt(max(0, distance^2 - noise^2))``.
    deviation : float
        Root mean square of ``||estimate - Z|| / ||Z||`` of one draw: bias and spread together.
    kept, remote : float
        Columns, and remote ones of them, of a draw.
    """

    distance: float
    noise: float
    bias: float
    deviation: float
    kept: float
    remote: float


def bias_of(task: GraphTask, part: Part, settings: SamplerSettings, *, batch: int, draws: int, seed: int) -> Bias:
    """Return what the mean of many draws of one layer comes to, for a batch of ``part``'s training nodes.

    The operators are those that a client would multiply with; the sum is over all features.
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
        found = Rows(layer.rows, layer.indptr, layer.columns[layer.positions], layer.values)
        estimate = multiply(found, features)
        total += estimate
        square += float((estimate * estimate).sum())
        spread += float(((estimate - exact) ** 2).sum())
        kept += len(plan.inputs)
        remote += len(plan.remote)
    mean, size = total / draws, float((exact * exact).sum())
    distance = float(((mean - exact) ** 2).sum()) / size
    noise = max(0.0, square / draws - float((mean * mean).sum())) / (draws - 1) / size
    return Bias(
        distance=math.sqrt(distance),
        noise=math.sqrt(noise),
        bias=math.sqrt(max(0.0, distance - noise)),
        deviation=math.sqrt(spread / draws / size),
        kept=kept / draws,
        remote=remote / draws,
    )


def all_features(task: GraphTask, parts: int) -> Reals:
    """Return the features of all nodes, float64 ``(nodes, d)``, put together from the parts."""
    owners = [task.part(index, parts) for index in range(parts)]
    out = np.zeros((task.adjacency.nodes, owners[0].features.shape[1]))
    for part in owners:
        out[part.ids] = part.features
    return out


def multiply(rows: Rows, features: Reals) -> Reals:
    """Return ``U @ features`` for the rows of U, float64 ``(R, d)``."""
    from scipy.sparse import csr_matrix

    shape = (len(rows.ids), len(features))
    return np.asarray(csr_matrix((rows.values, rows.columns, rows.indptr), shape) @ features)
