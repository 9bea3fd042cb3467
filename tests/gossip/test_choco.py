"""CHOCO-SGD and DeepSqueeze against naive code, their floors, and what each remembers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gossip_problems import Problem, gossip, largest, problem, ring_weights, run, view_of, views_of

from fedcomp.codecs import TopK
from fedcomp.gossip.base import State
from fedcomp.gossip.choco import CHOCO
from fedcomp.gossip.cold import COLD
from fedcomp.gossip.compressor import get_compressor
from fedcomp.gossip.deepsqueeze import DeepSqueeze
from fedcomp.gossip.dpsgd import DPSGD
from fedcomp.layout import Layout
from fedcomp.rng import Key

TOP = {"id": "topk", "density": 0.2}


def naive_choco(
    task: Problem, weights: np.ndarray, lr: float, momentum: float, gamma: float, k: int, steps: int
) -> np.ndarray:
    x, h, v = (np.zeros((task.n, task.d)) for _ in range(3))
    for _ in range(steps):
        v = momentum * v + task.gradients(x)
        x = x - lr * v
        h = h + largest(x - h, k, "float32")
        x = x + gamma * (weights @ h - h)
    return x


def naive_deepsqueeze(task: Problem, weights: np.ndarray, lr: float, gamma: float, k: int, steps: int) -> np.ndarray:
    x, e = np.zeros((task.n, task.d)), np.zeros((task.n, task.d))
    for _ in range(steps):
        x = x - lr * task.gradients(x)
        q = largest(x + e, k, "float32")
        e = x + e - q
        x = x + gamma * (weights @ q - q)
    return x


def compressible(d: int) -> Layout:
    return Layout.of({"w": np.zeros((d // 2, 2), np.float32)}, lambda *_: None)


def models(states: Sequence[State]) -> np.ndarray:
    return np.stack([state["x"] for state in states])


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_choco_is_the_published_iteration(momentum: float) -> None:
    task, weights = problem(n=6, d=20), ring_weights(6)
    lr = 0.1 / task.smoothness
    ran = run(CHOCO(lr=lr, momentum=momentum, gamma=0.4, compressor=TOP), task, 60)
    assert np.abs(models(ran.states) - naive_choco(task, weights, lr, momentum, 0.4, 4, 60)).max() < 1e-12


@pytest.mark.slow
def test_deepsqueeze_is_the_published_iteration() -> None:
    task, weights = problem(n=6, d=20), ring_weights(6)
    lr = 0.1 / task.smoothness
    ran = run(DeepSqueeze(lr=lr, gamma=0.1, compressor=TOP), task, 60)
    assert np.abs(models(ran.states) - naive_deepsqueeze(task, weights, lr, 0.1, 4, 60)).max() < 1e-12


@pytest.mark.slow
def test_7_13_inexact_methods_have_a_floor_and_cold_has_none() -> None:
    task = problem(n=6, d=20)
    lr = 0.1 / task.smoothness
    for algorithm in (
        DPSGD(lr=lr),
        CHOCO(lr=lr, gamma=0.5, compressor=TOP),
        DeepSqueeze(lr=lr, gamma=0.1, compressor=TOP),
    ):
        errors = run(algorithm, task, 150).errors
        assert errors[-1] > 5e-2
        assert errors[-1] == pytest.approx(errors[99], rel=0.1)
    assert run(COLD(lr=1.0 / task.smoothness, gamma=0.5, compressor=TOP), task, 150).errors[-1] < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor", [TOP, {"id": "scaledsign"}, {"id": "dithering", "bits": 2}, {"id": "randomk", "density": 0.3}]
)
def test_seeded_and_dithered_compressors_reach_all_ends_alike(compressor: dict) -> None:
    """The mean of models stays only if all neighbours decode what the sender did."""
    starts, weights, layout = Key(1, "m").generator().standard_normal((4, 20)), ring_weights(4), compressible(20)
    for algorithm in (CHOCO(gamma=0.1, compressor=compressor), DeepSqueeze(gamma=0.05, compressor=compressor)):
        states = gossip(
            algorithm, [algorithm.init(s, layout, common=np.zeros(20)) for s in starts], views_of(weights), 40
        )
        assert np.abs(models(states).mean(axis=0) - starts.mean(axis=0)).max() < 1e-14


def test_deepsqueeze_keeps_nothing_of_its_neighbours() -> None:
    task = problem(n=5, d=20)
    state = run(DeepSqueeze(lr=0.01, compressor=TOP), task, 5).states[0]
    assert set(state) == {"x", "error", "split"}


def test_facts_say_what_was_left_out() -> None:
    for algorithm in (CHOCO(compressor=TopK(0.05)), DeepSqueeze(compressor=TopK(0.05))):
        state = algorithm.init(np.zeros(20), compressible(20), common=np.zeros(20))
        steep = np.eye(20)[0] * 20 + np.eye(20)[5] * 10
        moved, _ = algorithm.send(state, lambda z, steep=steep: steep, view_of(ring_weights(3), 0, 0))
        assert algorithm.facts(moved)["innovation"] == pytest.approx(1.0)  # lr * 10 on coordinate 5
    assert CHOCO(compressor=get_compressor(TOP)) == CHOCO(compressor=TOP)
