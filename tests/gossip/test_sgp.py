"""Stochastic gradient push: averages of whole models over directed graphs, with nothing made and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from push_sum_runs import opened, rounds, starts, views_of

from fedcomp.gossip.base import View, messages_of
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.packet import HEADER_BYTES
from fedcomp.gossip.sgp import SGP
from fedcomp.gossip.topology import RandomDigraph
from fedcomp.layout import Layout

FLAT = Layout.flat(12)


def total(states):
    return np.sum([s["x"] for s in states.values()], axis=0), sum(float(s["w"]) for s in states.values())


def test_the_iteration_is_that_of_the_matrices():
    graph = RandomDigraph(6, 0.4, seed=1)
    algorithm = SGP(lr=0.1, momentum=0.5)
    models, targets = starts(6, 12), np.array(starts(6, 12, seed=7))
    states = opened(algorithm, models)
    x, w, v = np.array(models), np.ones(6), np.zeros((6, 12))
    for t in range(40):
        states = rounds(algorithm, states, views_of(graph), range(t, t + 1), lambda i, t: lambda z: z - targets[i])
        mix = graph.mixing_matrix(t, symmetric=False)
        v = 0.5 * v + (x / w[:, None] - targets)
        x, w = mix @ (x - 0.1 * v), mix @ w
        np.testing.assert_allclose([s["x"] for s in states.values()], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose([algorithm.model(s) for s in states.values()], x / w[:, None], rtol=0, atol=1e-12)
    assert np.ptp(w) > 0.1


def test_7_06_leaving_loses_nothing_to_rounding_of_a_float32_model():
    algorithm = SGP(lr=0.3)
    state = algorithm.init(starts(1, 12, "float32")[0], FLAT)
    state, _ = algorithm.send(state, lambda z: z / np.float32(3), View(0, 0, {1: 0.3, 2: 0.2}, {}))
    others = {i: algorithm.init(np.zeros(12, np.float32), FLAT) for i in (1, 2)}
    _, outbox = algorithm.leave(state, View(0, 1, {1: 0.3, 2: 0.2}, {}))
    for message in messages_of(0, outbox):
        others[message.destination] = algorithm.receive(others[message.destination], [message])
    assert total(others)[1] - 2 == pytest.approx(float(state["w"]), abs=1e-15)
    np.testing.assert_allclose(total(others)[0], state["x"], rtol=0, atol=1e-15)
    share = [float(s["w"]) - 1.0 for s in others.values()]
    assert share[0] / share[1] == pytest.approx(1.5)
    returned = algorithm.take_back(algorithm.join(np.zeros(12, np.float32), FLAT), messages_of(0, outbox))
    np.testing.assert_allclose(returned["x"], state["x"], rtol=0, atol=1e-15)
    with pytest.raises(TopologyError, match="no living out-neighbour"):
        algorithm.leave(state, View(0, 1, {}, {}))
    assert algorithm.leave(algorithm.join(np.zeros(12), FLAT), View(0, 1, {1: 0.5}, {}))[1] == ()


def test_a_message_is_a_share_and_the_model_in_its_own_dtype():
    algorithm = SGP(lr=1.0)
    for dtype, size in (("float32", 4), ("float64", 8)):
        state = algorithm.init(np.zeros(12, dtype), FLAT)
        state, outbox = algorithm.send(state, lambda z: np.arange(12.0), View(0, 0, {1: 0.25, 2: 0.25, 3: 0.1}, {}))
        assert [multicast.destinations for multicast in outbox] == [(1, 2), (3,)]
        assert {len(multicast.payload) for multicast in outbox} == {HEADER_BYTES + 8 + 12 * size}
        assert algorithm.model(state).dtype == dtype
        assert float(state["w"]) == pytest.approx(0.4)


def test_the_step_size_falls_to_zero_along_half_a_cosine():
    algorithm = SGP(lr=0.5, decay_over=8)
    moved = []
    for t in (0, 2, 4, 8, 20):
        state, _ = algorithm.send(algorithm.init(np.zeros(12), FLAT), lambda z: np.ones(12), View(0, t, {}, {}))
        moved.append(-float(algorithm.model(state)[0]))
    np.testing.assert_allclose(moved, [0.5, 0.25 * (1 + np.sqrt(0.5)), 0.25, 0.0, 0.0], atol=1e-15)
