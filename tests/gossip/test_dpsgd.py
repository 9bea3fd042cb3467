"""D-PSGD: whole models, the local step beside the averaging."""

from __future__ import annotations

import numpy as np
import pytest
from gossip_problems import dense_gossip, gossip, problem, ring_weights, run, view_of, views_of

from fedcomp.gossip.base import View
from fedcomp.gossip.dpsgd import DPSGD
from fedcomp.gossip.packet import HEADER_BYTES
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


@pytest.mark.slow
def test_7_13_a_constant_step_leaves_a_floor_in_proportion_to_it() -> None:
    task = problem(n=6, d=20)
    floors = []
    for step in (1.0, 0.3, 0.1):
        errors = run(DPSGD(lr=step / task.smoothness), task, 100).errors
        assert np.abs(errors - dense_gossip(task, ring_weights(task.n), step / task.smoothness, 100)).max() < 1e-12
        floors.append(errors[-1])
    assert floors[0] > floors[1] > floors[2] > 5e-2


def test_the_mean_of_models_moves_by_the_mean_of_gradients_alone() -> None:
    starts = draws(5, 30)
    algorithm = DPSGD(lr=0.1)
    states = [algorithm.init(start, Layout.flat(30)) for start in starts]
    states = gossip(algorithm, states, views_of(ring_weights(5)), 30, np.ones_like)
    assert np.abs(np.mean([s["x"] for s in states], axis=0) - starts.mean(axis=0) + 3.0).max() < 1e-14


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


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8)])
def test_7_17_a_message_is_the_model_and_a_header(dtype: str, itemsize: int) -> None:
    algorithm = DPSGD()
    state = algorithm.init(draws(1, 24)[0].astype(dtype), Layout.flat(24))
    begun, outbox = algorithm.send(state, None, view_of(ring_weights(4), 0, 0))
    assert [multicast.destinations for multicast in outbox] == [(1, 3)]
    assert len(outbox[0].payload) == HEADER_BYTES + 24 * itemsize
    assert begun["x"].dtype == dtype
