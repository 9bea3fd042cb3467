"""How similar the clients' memories are: the premise of a shared support, measured instead of assumed.

ScaleCom's argument is that memories of different workers resemble each other, so that one worker's top k is nearly the
top k of the mean. These are the figures the paper reports (partly recalled): pairwise cosine distance of the memories,
and the share of the true top k that the chosen support missed; and the energy of the mean that the support keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.base import norm
from fedcomp.layout import Vector


@dataclass(frozen=True)
class Similarity:
    """Figures of one round, each in [0, 1] but the distance, which is in [0, 2].

    Attributes
    ----------
    memory_distance : float
        Mean over pairs of clients of 1 - cosine of their memories before the round; NaN when fewer than two are
        non-zero.
    overlap : float
        Share of the true top k of the mean of memory plus update that the support contains: 1 - q/k.
    energy_kept : float
        ‖mean on the support‖² / ‖mean‖².
    energy_best : float
        The same for the true top k: the most that any support of this size keeps.
    """

    memory_distance: float
    overlap: float
    energy_kept: float
    energy_best: float

    def to_metrics(self) -> dict[str, float]:
        """Return the finite figures by name."""
        return {f"similarity.{name}": value for name, value in asdict(self).items() if np.isfinite(value)}


def similarity(
    memories: Sequence[Vector],
    totals: Sequence[Vector],
    weights: Sequence[float],
    chosen: NDArray[np.bool_],
    parts: Sequence[slice],
) -> Similarity:
    """Compare the clients on the coordinates they were sampled at.

    Parameters
    ----------
    memories, totals : sequences of float32 arrays of shape (s,)
        Every client's memory, and its memory plus update, at the same s coordinates. With a sample of all coordinates
        the figures are exact, otherwise estimates.
    weights : sequence of float
        Of the clients in the mean.
    chosen : bool array of shape (s,)
        Which of the sampled coordinates the support contains.
    parts : sequence of slice
        The samples of each stretch the selector ranks by itself; the true top k is taken per stretch, as many as
        ``chosen`` has there.
    """
    share = np.asarray(weights, np.float64) / max(float(np.sum(weights)), np.finfo(np.float64).tiny)
    mean = np.zeros(chosen.size)
    for weight, total in zip(share, totals, strict=True):
        mean += weight * total
    energy = mean**2
    best = np.zeros(chosen.size, np.bool_)
    for part in parts:
        k = int(np.count_nonzero(chosen[part]))
        if k:
            # Stable, so that ties go to the lowest index, as they do when a leader selects.
            best[np.argsort(-energy[part], kind="stable")[:k] + part.start] = True
    everything = float(energy.sum())
    return Similarity(
        memory_distance=_mean_distance(memories),
        overlap=float(np.count_nonzero(best & chosen)) / max(1, int(np.count_nonzero(best))),
        energy_kept=float(energy[chosen].sum()) / everything if everything else np.nan,
        energy_best=float(energy[best].sum()) / everything if everything else np.nan,
    )


def _mean_distance(memories: Sequence[Vector]) -> float:
    """Return the mean of 1 - cosine over all pairs of non-zero vectors, in time linear in their number."""
    total, count = np.zeros(memories[0].size if memories else 0), 0
    for memory in memories:
        vector = memory.astype(np.float64)
        length = norm(memory)
        if length > 0.0:
            total += vector / length
            count += 1
    if count < 2:
        return float("nan")
    # The squared length of a sum of unit vectors is their number plus twice the sum of all pairs' cosines.
    return 1.0 - (float(np.square(total).sum()) - count) / (count * (count - 1))
