"""Stochastic gradient push: averages of whole models over directed graphs, with nothing made and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from push_sum_runs import UNBALANCED, disagreement, opened, rounds, starts, views_of

from fedcomp.gossip.base import GossipMessage, View, messages_of
from fedcomp.gossip.errors import MessageError, TopologyError
from fedcomp.gossip.packet import HEADER_BYTES
from fedcomp.gossip.sgp import SGP
from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.gossip.topology import Exponential, OnePeerExponential, RandomDigraph, topology_of
from fedcomp.layout import Layout
from fedcomp.rng import Key

FLAT = Layout.flat(12)


def total(states):
    return np.sum([s["x"] for s in states.values()], axis=0), sum(float(s["w"]) for s in states.values())


def fifth(message: GossipMessage, t: int) -> bool:
    return Key(4, "loss", t, message.source, message.destination).uniform(1)[0] < 0.2


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


def test_7_18_a_one_peer_exponential_graph_averages_exactly_in_log_n_iterations():
    models = starts(8, 12)
    algorithm = SGP()
    states = rounds(algorithm, opened(algorithm, models), views_of(OnePeerExponential(8)), range(3))
    assert disagreement(algorithm, states, np.mean(models, axis=0)) < 1e-14
    before = rounds(algorithm, opened(algorithm, models), views_of(OnePeerExponential(8)), range(2))
    assert disagreement(algorithm, before, np.mean(models, axis=0)) > 0.01


def test_weights_settle_away_from_one_on_an_unbalanced_graph_and_the_quotient_is_the_mean():
    models = starts(8, 12)
    algorithm = SGP()
    states = rounds(algorithm, opened(algorithm, models), views_of(topology_of(UNBALANCED, 8)), range(120))
    mean = np.mean(models, axis=0)
    assert disagreement(algorithm, states, mean) < 1e-12
    assert max(np.linalg.norm(s["x"] - mean) for s in states.values()) > 0.2 * np.linalg.norm(mean)
    assert np.ptp([float(s["w"]) for s in states.values()]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_7_05_shares_that_are_not_delivered_stay_with_their_senders(dtype):
    graph = RandomDigraph(6, 0.4, seed=1)
    algorithm = SGP()
    states = opened(algorithm, starts(6, 12, dtype))
    x, w = total(states)
    states = rounds(algorithm, states, views_of(graph), range(150), lose=fifth)
    states = rounds(algorithm, states, views_of(graph), range(150, 200))
    after, mass = total(states)
    assert mass == pytest.approx(6.0, abs=1e-13)
    np.testing.assert_allclose(after, x, rtol=0, atol=2e-14 * 6)
    assert disagreement(algorithm, states, x / w) < (2e-14 if dtype == "float64" else 1e-6)
    assert algorithm.invariants(states.values())["sum_x"] == pytest.approx(np.linalg.norm(x), rel=1e-14)


@pytest.mark.slow
def test_7_05_mass_that_is_lost_shows_in_the_weights_while_the_models_agree():
    class Both(SGP):
        name = "both"

        def take_back(self, state, messages):
            return state

    class Numerator(SGP):
        name = "numerator"

        def take_back(self, state, messages):
            back = super().take_back(state, messages)
            return {**state, "w": back["w"]}

    models = starts(6, 12)
    mean = np.mean(models, axis=0)
    graph = Exponential(6)
    found = {}
    for algorithm in (Both(), Numerator()):
        states = opened(algorithm, models)
        states = rounds(algorithm, states, views_of(graph), range(30), lose=fifth)
        states = rounds(algorithm, states, views_of(graph), range(30, 90))
        found[algorithm.name] = disagreement(algorithm, states, mean), total(states)[1]
        assert np.ptp([algorithm.model(s) for s in states.values()], axis=0).max() < 1e-9
    assert 0.005 < found["both"][0] < 0.5
    assert found["both"][1] < 0.1
    assert found["numerator"][0] > 0.9
    assert found["numerator"][1] == pytest.approx(6.0, abs=1e-13)


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


def test_7_06_a_node_joins_without_mass():
    graph = Exponential(5)
    models = starts(5, 12)
    algorithm = SGP(w_start=0.5)
    states = opened(algorithm, models[:4])
    states = rounds(algorithm, states, views_of(graph, alive=set(range(4))), range(3))
    states[4] = algorithm.join(models[4], FLAT)
    np.testing.assert_array_equal(algorithm.model(states[4]), models[4])
    weights = []

    def gradients(i, t):
        def gradient(z):
            if i == 4:
                weights.append(float(states[4]["w"]))
            return np.zeros(12)

        return gradient

    for t in range(3, 80):
        states = rounds(algorithm, states, views_of(graph), range(t, t + 1), gradients)
    assert disagreement(algorithm, states, np.mean(models[:4], axis=0)) < 1e-13
    assert total(states)[1] == pytest.approx(4.0, abs=1e-14)
    assert weights
    assert min(weights) > 0.5


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


@pytest.mark.parametrize("algorithm", [SGP(), SparsePush(), SparsePush(estimates="broadcast")], ids=repr)
def test_a_share_no_run_could_have_is_refused_before_it_makes_mass_infinite(algorithm):
    sender, state = (algorithm.init(np.full(12, scale), FLAT, common=np.zeros(12)) for scale in (1e10, 1.0))
    payload = algorithm.send(sender, None, View(1, 0, {0: 0.5}, {}))[1][0].payload
    leaving = algorithm.leave(sender, View(1, 0, {0: 0.5}, {}))[1][0].payload
    huge, half = (np.array(share).tobytes() for share in (1e300, 1.7e308))
    for forged in ([payload[:8] + huge + payload[16:]], [leaving[:8] + half + leaving[16:], half]):
        messages = [GossipMessage(1, 0, forged[0])]
        if len(forged) > 1:  # the weights alone
            messages.append(GossipMessage(2, 0, forged[0]))
        with pytest.raises(MessageError, match="largest number"):
            algorithm.receive(state, messages)
    assert float(state["w"]) == 1.0
