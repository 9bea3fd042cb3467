"""Push-sum with a weight per coordinate: mass is conserved in each, consensus is exact, gradients are refused."""

from __future__ import annotations

import numpy as np
import pytest
from push_sum_runs import UNBALANCED, by_matrices, opened, rounds, starts, views_of

from fedcomp.errors import NonFiniteUpdate
from fedcomp.gossip.base import GossipMessage, View
from fedcomp.gossip.coordinate_push import CoordinatePush
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import HEADER_BYTES
from fedcomp.gossip.topology import OnePeerExponential, RandomDigraph, topology_of
from fedcomp.layout import Layout, TensorSpec

D = 20
FLAT = Layout.flat(D)
SPLIT = Layout((TensorSpec("w", (16,), "float64", 0, 16), TensorSpec("b", (4,), "float64", 16, 4, 1.0)))


def sums(states):
    return sum(s["x"] for s in states.values()), sum(s["weights"] for s in states.values())


def spread(algorithm, states, mean):
    return max(np.abs(algorithm.model(state) - mean).max() for state in states.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph",
    [OnePeerExponential(8), RandomDigraph(8, 0.3, seed=3), topology_of(UNBALANCED, 8)],
    ids=lambda g: g.text[:12],
)
def test_consensus_is_exact_and_every_coordinate_keeps_its_mass(graph):
    algorithm, models = CoordinatePush(density=0.4), starts(8, 5)
    states, mean, drift = opened(algorithm, models), np.mean(models, axis=0), []

    def watch(t, now):
        x, w = sums(now)
        drift.append(max(np.abs(x - 8 * mean).max(), np.abs(w - 8.0).max()))

    states = rounds(algorithm, states, views_of(graph), range(120), watch=watch)
    assert spread(algorithm, states, mean) < 1e-6
    assert max(drift) < 1e-12
    # The weights do not stay at 1: x itself is no model.
    assert max(np.abs(s["x"] - mean).max() for s in states.values()) > 1e-2


def test_everything_in_every_message_is_push_sum():
    graph, models = topology_of(UNBALANCED, 8), starts(8, D)
    algorithm = CoordinatePush(density=1.0)
    states = rounds(algorithm, opened(algorithm, models), views_of(graph), range(20))
    expected = by_matrices(models, graph, 20, k=D, gamma=1.0)
    for i, state in states.items():
        # Shares of w are rounded to float32 before they are used, at both ends.
        np.testing.assert_allclose(algorithm.model(state), expected[i], rtol=0, atol=1e-6)
    closing = rounds(CoordinatePush(), opened(algorithm, models), views_of(graph, dense=True), range(20))
    for i, state in closing.items():
        assert np.array_equal(algorithm.model(state), algorithm.model(states[i]))


@pytest.mark.parametrize("layout", [FLAT, SPLIT], ids=["flat", "split"])
@pytest.mark.parametrize(("values", "size"), [("model", 8), ("float32", 4)])
def test_message_is_the_formula(layout, values, size):
    algorithm = CoordinatePush(density=3 / D, values=values)
    state = algorithm.init(starts(1, D)[0], layout, common=np.zeros(D))
    _, outbox = algorithm.send(state, None, View(0, 0, {1: 0.25, 2: 0.25}))
    whole = 0 if layout is FLAT else 4
    index = -(-3 * (5 if layout is FLAT else 4) // 8) + 1
    assert [len(p.payload) for p in outbox] == [HEADER_BYTES + index + (3 + whole) * (4 + size)] * 2


def test_the_largest_move_and_what_did_not_move_is_not_sent():
    two = CoordinatePush(density=0.4)
    moved, _ = two.send(two.init(np.arange(1.0, 6.0), Layout.flat(5), common=np.zeros(5)), None, View(0, 0, {1: 0.5}))
    assert np.array_equal(np.flatnonzero(moved["weights"] == 0.5), [3, 4])
    algorithm = CoordinatePush(density=3 / D)
    state = algorithm.init(np.array([0.0, 2.0, 0.0, 0.0]), Layout.flat(4), common=np.zeros(4))
    state, outbox = algorithm.send(state, None, View(0, 0, {1: 0.5}))
    assert len(outbox[0].payload) == HEADER_BYTES + 2 + 12
    _, second = algorithm.send(state, None, View(0, 1, {1: 0.5}))
    assert len(second[0].payload) == HEADER_BYTES


def test_mass_that_would_not_be_finite_is_neither_taken_nor_sent():
    algorithm = CoordinatePush(density=3 / D)
    state = algorithm.init(np.ones(D), FLAT)
    heavy = {**state, "weights": np.full(D, 1e308), "x": np.full(D, 1e308)}
    messages = [algorithm.leave(heavy, View(i, 0, {0: 0.5}))[1][0].payload for i in (1, 2)]
    with pytest.raises(MessageError, match="largest number"):
        algorithm.receive(state, [GossipMessage(i, 0, payload) for i, payload in enumerate(messages, 1)])
    moved = {**heavy, "x": np.arange(D) * 1e305}
    with pytest.raises(NonFiniteUpdate, match="would be sent"):  # the shares, as float32
        algorithm.send(moved, None, View(0, 0, {1: 0.5}))
    far = {**state, "x": np.arange(D) * 1e300}
    with pytest.raises(NonFiniteUpdate, match="would be sent"):  # the values
        CoordinatePush(density=3 / D, values="float32").send(far, None, View(0, 0, {1: 0.5}))
