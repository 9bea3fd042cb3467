"""D-PSGD: whole models, the local step beside the averaging."""

from __future__ import annotations

import numpy as np
import pytest
from gossip_problems import gossip, problem, ring_weights, run

from fedcomp.gossip.base import View
from fedcomp.gossip.dpsgd import DPSGD
from fedcomp.layout import Layout
from fedcomp.rng import Key


def draws(n: int, d: int) -> np.ndarray:
    return Key(0, "models").generator().standard_normal((n, d))


@pytest.mark.parametrize(("momentum", "gamma"), [(0.0, 1.0), (0.9, 1.0), (0.5, 0.3)])
def test_the_iteration_is_the_published_one(momentum: float, gamma: float) -> None:
    task, weights = problem(n=6, d=12), ring_weights(6)
    lr = 0.1 / task.smoothness
    x, v = np.zeros((6, 12)), np.zeros((6, 12))
    mixing = (1 - gamma) * np.eye(6) + gamma * weights
    ran = run(DPSGD(lr=lr, momentum=momentum, gamma=gamma), task, 40)
    for _ in range(40):
        v = momentum * v + task.gradients(x)
        x = mixing @ x - lr * v
    assert np.abs(np.stack([state["x"] for state in ran.states]) - x).max() < 1e-13


def test_the_graph_may_change() -> None:
    starts = draws(6, 8)
    algorithm = DPSGD()
    states = [algorithm.init(start, Layout.flat(8)) for start in starts]
    pairings = [((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (0, 5))]

    def views(i: int, k: int) -> View:
        row = {a + b - i: 0.5 for a, b in pairings[k % 2] if i in (a, b)}
        return View(i, k, row, row)

    states = gossip(algorithm, states, views, 60)
    assert np.abs(np.stack([s["x"] for s in states]) - starts.mean(axis=0)).max() < 1e-14
