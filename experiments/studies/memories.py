"""The growth of error-feedback memories when clients send the same updates in every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedcomp.experiments.findings import mean
from fedcomp.layout import Layout, Vector
from fedcomp.local import Local
from fedcomp.program import System

SEED = 5
"""The seed of all draws, independent of the run's seed, because the bounds on norms hold for these updates."""


def memory_norm(
    system: System,
    layout: Layout,
    updates: Sequence[Vector],
    rounds: int,
    memory_of: Callable[[Local, int], Vector] = lambda local, node: local.client(node).memory["memory"],
) -> float:
    """Return ‖memory‖ / ‖update‖ after all rounds as the mean over clients; each client sends the same update in every
    round."""
    zeros = np.zeros(layout.size, np.float32)
    local = Local(
        system, layout, zeros, lambda number, node, start: updates[node], lambda node: 1.0, len(updates), seed=SEED
    )
    for number in range(1, rounds + 1):
        local.step(number)
        # Training returns the update itself.
        local.model = zeros

    def norm(vector: Vector) -> float:
        return float(np.linalg.norm(vector))

    return mean(norm(memory_of(local, node)) / norm(update) for node, update in enumerate(updates))
