"""The probability that coded data decode: by formula, by enumeration of all losses of a small plan, or by simulation.

A figure for half the traffic means nothing without this one beside it. Every function names its loss model: ``lost``
devices drawn without replacement, or each device lost with probability ``loss`` independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.datacode import MAX_CONDITION, DataPlan
from fedcomp.errors import ConfigError

# Sets of devices whose matrices are stacked at a time, which bounds the memory.
_BATCH: Final = 4096
_SETS: Final = 200_000


class Rate(NamedTuple):
    """A measured frequency: how many of how many trials."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        """The frequency."""
        return self.hits / self.trials

    def sigma(self, probability: float | None = None) -> float:
        """Standard deviation of the frequency at ``probability``, by default at the frequency itself."""
        p = self.value if probability is None else probability
        return math.sqrt(max(p * (1.0 - p), 0.0) / self.trials)


def mds_probability(devices: int, partitions: int, loss: float) -> float:
    """Return the exact P(at least k of n devices answer): every k of them decode."""
    alive = 1.0 - loss
    terms = (math.comb(devices, a) * alive**a * loss ** (devices - a) for a in range(partitions, devices + 1))
    return math.fsum(terms)


def replication_probability(devices: int, partitions: int, loss: float) -> float:
    """Return the exact P(of every partition one copy answers) where the parities are copies dealt in turn."""
    # Dealt in turn, the copies do not come out even: ``more`` partitions have one more than the others.
    spare, more = divmod(devices - partitions, partitions)
    return (1.0 - loss ** (2 + spare)) ** more * (1.0 - loss ** (1 + spare)) ** (partitions - more)


def decodable(matrix: NDArray[np.float64], alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each row of ``alive``, shape ``(t, n)``, whether those devices decode by the rule of the decoder.

    ``matrix`` is G, shape ``(n, k)``, or one per row, shape ``(t, n, k)``.
    """
    count = matrix.shape[-1]
    out = np.empty(len(alive), bool)
    for start in range(0, len(alive), _BATCH):
        part = slice(start, start + _BATCH)
        # A zero row leaves the singular values as they are, so lost devices are zeroed and all sets keep one shape.
        rows = (matrix if matrix.ndim == 2 else matrix[part]) * alive[part, :, None]
        values = np.linalg.svd(rows, compute_uv=False)
        # The decoder's own bound: what it refuses as ill-conditioned is not decodable here, whatever its rank.
        out[part] = values[:, count - 1] > values[:, 0] / MAX_CONDITION
    return out


def decode_rate(
    plan: DataPlan | Callable[..., DataPlan],
    *,
    lost: int | None = None,
    loss: float | None = None,
    trials: int = 2000,
    seed: int = 0,
    per_draw: int = 20,
) -> Rate:
    """Simulate losses and return how often the margins of all partitions are determined.

    Parameters
    ----------
    plan : DataPlan, or callable
        A plan: losses alone are random. A function that draws one from its keyword ``seed``, such as
        ``partial(data_plan, "gaussian", 20, 10)``: matrices are random, too, one for every ``per_draw`` trials; with
        ``per_draw`` 1 the trials are independent.
    lost, loss : int, float
        Exactly one of them; see the module.

    Raises
    ------
    ConfigError
        When not exactly one loss model is given, or it is out of range.
    """
    from fedcomp.coding.stream import SplitMix64, derive

    if (lost is None) == (loss is None):
        raise ConfigError("give either lost (how many devices) or loss (the probability of each)")

    def draw(number: int) -> DataPlan:
        return plan if isinstance(plan, DataPlan) else plan(seed=derive("draw", seed, number))

    n = draw(0).devices
    if (lost is not None and not 0 <= lost <= n) or (loss is not None and not 0.0 <= loss <= 1.0):
        raise ConfigError(f"lost={lost!r}, loss={loss!r}: expected 0 to {n} devices, or a probability")
    stream = SplitMix64(derive("losses", seed))
    draws = stream.uniform(trials * n).reshape(trials, n)
    # The devices with the smallest words are lost: a draw without replacement.
    alive = draws >= loss if loss is not None else np.argsort(np.argsort(draws, axis=1), axis=1) >= (lost or 0)
    if isinstance(plan, DataPlan):
        return Rate(int(decodable(plan.matrix, alive).sum()), trials)
    hits = 0
    for start in range(0, trials, _BATCH):
        part = alive[start : start + _BATCH]
        numbers = (start + np.arange(len(part))) // per_draw
        drawn = {int(i): draw(int(i)).matrix for i in np.unique(numbers)}
        hits += int(decodable(np.stack([drawn[int(i)] for i in numbers]), part).sum())
    return Rate(hits, trials)


def loss_sets(devices: int, lost: int) -> NDArray[np.bool_]:
    """Return who is alive for every way to lose ``lost`` of the devices, shape ``(C(n, f), n)``.

    Raises
    ------
    ConfigError
        When there are more than 200,000 ways.
    """
    ways = math.comb(devices, lost)
    if ways > _SETS:
        raise ConfigError(f"there are {ways} ways to lose {lost} of {devices} devices; use decode_rate() instead")
    alive = np.ones((ways, devices), bool)
    for row, gone in enumerate(combinations(range(devices), lost)):
        alive[row, list(gone)] = False
    return alive


def guaranteed_losses(plan: DataPlan) -> int:
    """Return the largest f such that the plan decodes after *any* f losses; by trying all sets, smallest first.

    Raises
    ------
    ConfigError
        When there are too many to try.
    """
    survived = 0
    while survived < plan.devices - plan.partitions:
        if not decodable(plan.matrix, loss_sets(plan.devices, survived + 1)).all():
            break
        survived += 1
    return survived
