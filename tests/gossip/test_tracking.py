"""Gradient tracking, BEER and LEAD: against recursions coded from their formulas, and by what they conserve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gossip_problems import Problem, largest, problem, ring_weights, run, slope

from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.beer import BEER
from fedcomp.gossip.cold import COLD
from fedcomp.gossip.gradient_tracking import GradientTracking
from fedcomp.gossip.lead import LEAD
from fedcomp.gossip.nids import NIDS
from fedcomp.gossip.packet import HEADER_BYTES

TASK = problem(n=6, d=20)
L = TASK.smoothness
RING = ring_weights(TASK.n)
TOP20 = {"id": "topk", "density": 0.2}
EXACT = {"id": "topk", "density": 0.2, "values": "float64"}


def diging(task: Problem, w: np.ndarray, lr: float, iterations: int) -> list[np.ndarray]:
    """x⁺ = W x - η y, y⁺ = W y + g⁺ - g."""
    x = np.zeros((task.n, task.d))
    y = g = task.gradients(x)
    found = []
    for _ in range(iterations):
        x = w @ x - lr * y
        fresh = task.gradients(x)
        y, g = w @ y + fresh - g, fresh
        found.append(x)
    return found


def beer(task: Problem, w: np.ndarray, lr: float, gamma: float, k: int, iterations: int) -> list[np.ndarray]:
    """The matrix form; estimates of x and v are moved before the first step already."""
    laplacian = w - np.eye(task.n)
    x = np.zeros((task.n, task.d))
    v = g = task.gradients(x)
    hx, hv = largest(x, k), largest(v, k)
    found = []
    for _ in range(iterations):
        x = x + gamma * laplacian @ hx - lr * v
        fresh = task.gradients(x)
        v, g = v + gamma * laplacian @ hv + fresh - g, fresh
        hx, hv = hx + largest(x - hx, k), hv + largest(v - hv, k)
        found.append(x)
    return found


def lead(
    task: Problem, w: np.ndarray, lr: float, gamma: float, alpha: float, k: int, iterations: int
) -> list[np.ndarray]:
    """COLD with ẑ = h + q and h += α q, in matrices."""
    x, dual, h = (np.zeros((task.n, task.d)) for _ in range(3))
    found = []
    for _ in range(iterations):
        z = x - lr * task.gradients(x) - lr * dual
        q = largest(z - h, k)
        u = gamma / 2.0 * (np.eye(task.n) - w) @ (h + q)
        h, dual, x = h + alpha * q, dual + u / lr, z - u
        found.append(x)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GradientTracking(lr=0.3 / L), diging(TASK, RING, 0.3 / L, 40)),
        (BEER(lr=0.1 / L, gamma=0.5, compressor=EXACT), beer(TASK, RING, 0.1 / L, 0.5, 4, 40)),
        (LEAD(lr=0.5 / L, gamma=0.5, alpha=0.7, compressor=EXACT), lead(TASK, RING, 0.5 / L, 0.5, 0.7, 4, 40)),
    ],
)
def test_the_trajectory_is_that_of_the_formulas(algorithm: Algorithm, expected: list[np.ndarray]) -> None:
    apart: list[float] = []

    def watch(k: int, states: Any) -> None:
        apart.append(float(np.abs(np.stack([s["x"] for s in states]) - expected[k]).max()))

    run(algorithm, TASK, 40, watch=watch)
    assert max(apart) < 1e-12
    assert np.abs(expected[-1]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "iterations", "level"),
    [
        (GradientTracking(lr=0.2 / L), 190, 1e-8),
        (BEER(lr=0.15 / L, gamma=0.5, compressor=TOP20), 120, 1e-4),
        (LEAD(lr=1.0 / L), 110, 1e-10),
    ],
)
def test_they_converge_linearly_to_the_exact_optimum(algorithm: Algorithm, iterations: int, level: float) -> None:
    errors = run(algorithm, TASK, iterations).errors
    assert errors[-1] < level
    rate, straight = slope(errors, low=max(1e-9, errors[-1]), high=3e-2)
    assert rate < 1.0
    assert straight > 0.99


@pytest.mark.slow
def test_two_bits_keep_the_rate_of_nids() -> None:
    plain = slope(run(NIDS(lr=1.0 / L), TASK, 100).errors)[0]
    coded = slope(run(LEAD(lr=1.0 / L), TASK, 100).errors)[0]
    assert np.log(plain) / np.log(coded) < 1.1


@pytest.mark.slow
def test_lead_with_alpha_one_is_cold() -> None:
    cold, same = (
        run(algorithm, TASK, 30).states
        for algorithm in (
            COLD(lr=0.5 / L, gamma=0.5, compressor=TOP20),
            LEAD(lr=0.5 / L, gamma=0.5, alpha=1.0, compressor=TOP20),
        )
    )
    for a, b in zip(cold, same, strict=True):
        np.testing.assert_allclose(a["x"], b["x"], atol=1e-14)


@pytest.mark.slow
def test_gradient_tracking_is_exact_on_graphs_that_change() -> None:
    even, odd = np.eye(TASK.n), np.eye(TASK.n)
    for i in range(TASK.n):
        even[i, [i, i ^ 1]] = 0.5
        odd[i, [i, (i + 1 if i % 2 else i - 1) % TASK.n]] = 0.5
    algorithm = GradientTracking(lr=0.15 / L)
    states = [algorithm.init(np.zeros(TASK.d), TASK.layout) for _ in range(TASK.n)]
    for k in range(260):
        states = run(algorithm, TASK, 1, weights=(even, odd)[k % 2], states=states, begin=k).states
    assert TASK.error(state["x"] for state in states) < 1e-6
    assert algorithm.invariants(states)["sum_y - sum_g"] < 1e-10
    assert GradientTracking.time_varying
    assert not BEER.time_varying


def test_two_vectors_travel_in_one_message() -> None:
    assert set(run(GradientTracking(), TASK, 2).payloads[0, 1]) == {HEADER_BYTES + 2 * 8 * TASK.d}
    assert GradientTracking.vectors_per_message == BEER.vectors_per_message == 2
    identity = run(BEER(compressor={"id": "identity"}, digest_every=0), TASK, 2).payloads[0, 1]
    assert set(identity) == {HEADER_BYTES + 2 + 2 * 8 * TASK.d}
    digested = run(BEER(compressor={"id": "identity"}, digest_every=2), TASK, 4).payloads[0, 1]
    assert [size - identity[0] for size in digested] == [8, 0, 8, 0]
