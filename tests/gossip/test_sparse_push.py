"""Compressed push-sum: mass is conserved, consensus is exact, and the near misses are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from push_sum_runs import UNBALANCED, audible, by_matrices, disagreement, opened, rounds, starts, views_of

from fedcomp.errors import ConfigError
from fedcomp.gossip.base import View, messages_of
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.estimates import digests
from fedcomp.gossip.packet import HEADER_BYTES
from fedcomp.gossip.sgp import SGP
from fedcomp.gossip.sparse_push import SparsePush, automatic_gamma
from fedcomp.gossip.topology import Complete, DirectedRing, Exponential, RandomDigraph, topology_of
from fedcomp.layout import Layout, TensorSpec
from fedcomp.rng import Key

FLAT = Layout.flat(20)


def total(states):
    return np.sum([s["x"] for s in states.values()], axis=0), sum(float(s["w"]) for s in states.values())


def quadratic(targets):
    """Each node pulls towards a target of its own."""
    return lambda i, t: lambda z: (z - targets[i]).astype(z.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "estimates", "dtype"),
    [
        ({"id": "topk", "density": 0.1}, "edge", "float32"),
        ({"id": "topk", "density": 0.1, "values": "fp16"}, "broadcast", "float32"),
        ({"id": "randomk", "density": 0.2}, "edge", "float64"),
        ({"id": "scaledsign"}, "broadcast", "float64"),
        ({"id": "dithering", "bits": 2}, "edge", "float32"),
    ],
)
def test_7_01_sums_of_x_and_w_are_constant_for_any_compressor(compressor, estimates, dtype):
    graph = RandomDigraph(6, 0.4, seed=3)
    algorithm = SparsePush(compressor=compressor, gamma=0.05, estimates=estimates)
    states = opened(algorithm, starts(6, 20, dtype))
    x, w = total(states)
    drift = []

    def watch(t, now):
        mass = total(now)
        drift.append(max(np.abs(mass[0] - x).max(), abs(mass[1] - w)))

    views = views_of(graph) if estimates == "edge" else audible(graph)
    states = rounds(algorithm, states, views, range(40), watch=watch)
    assert w == 6.0
    assert max(drift) < 1e-12
    assert algorithm.invariants(states.values())["sum_w"] == pytest.approx(6.0, abs=1e-13)
    assert algorithm.invariants(states.values())["sum_x"] == pytest.approx(np.linalg.norm(x), rel=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("estimates", ["edge", "broadcast"])
def test_7_02_without_compression_and_with_gamma_1_it_is_sgp(estimates):
    graph = RandomDigraph(6, 0.4, seed=1) if estimates == "edge" else topology_of(UNBALANCED, 8)
    models = starts(graph.n, 20)
    gradients = quadratic(starts(graph.n, 20, seed=5))
    common = {"lr": 0.05, "momentum": 0.9}
    dense, sparse = (
        SGP(**common),
        SparsePush(compressor={"id": "identity"}, gamma="auto", estimates=estimates, **common),
    )
    there = rounds(dense, opened(dense, models), views_of(graph), range(60), gradients)
    here = rounds(sparse, opened(sparse, models), views_of(graph), range(60), gradients)
    for i in here:
        np.testing.assert_allclose(sparse.model(here[i]), dense.model(there[i]), rtol=0, atol=1e-12)
        assert float(here[i]["w"]) == pytest.approx(float(there[i]["w"]), abs=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimates", "gamma", "iterations"),
    [pytest.param("broadcast", 0.05, 630, marks=pytest.mark.long), ("edge", 0.1, 300)],
)
def test_7_03_consensus_is_exact_on_an_unbalanced_graph_that_changes(estimates, gamma, iterations):
    graph = RandomDigraph(3, 0.6, seed=1)
    models = starts(3, 20)
    algorithm = SparsePush(density=0.1, gamma=gamma, estimates=estimates, digest_every=1)
    views = views_of(graph) if estimates == "edge" else audible(graph)
    states = rounds(algorithm, opened(algorithm, models), views, range(iterations))
    assert disagreement(algorithm, states, np.mean(models, axis=0)) < 1e-10
    weights = [float(s["w"]) for s in states.values()]
    assert max(weights) - min(weights) > 0.1
    for i, j in ((0, 1), (2, 1)):
        own = digests(states[i], ("h",))["h" if estimates == "broadcast" else f"h>{j}"]
        assert own == digests(states[j], ("h",))[f"h/{i}"]


@pytest.mark.slow
def test_the_iteration_is_that_of_the_matrices():
    graph = topology_of(UNBALANCED, 8)
    models = starts(8, 20)
    compressor = {"id": "topk", "density": 0.1, "values": "float64"}
    for estimates in ("broadcast", "edge"):
        algorithm = SparsePush(compressor=compressor, gamma=0.1, estimates=estimates)
        states = rounds(algorithm, opened(algorithm, models), views_of(graph), range(60))
        expected = by_matrices(models, graph, 60, k=2, gamma=0.1)
        np.testing.assert_allclose([algorithm.model(s) for s in states.values()], expected, rtol=0, atol=1e-12)


def test_a_node_of_hardly_any_weight_only_receives():
    algorithm = SparsePush(density=0.1, gamma=1.0)
    view = View(0, 0, {1: 0.999}, {1: 0.5})
    state = algorithm.init(np.ones(20), FLAT)

    def gradient(z):
        raise AssertionError("asked for a gradient")

    state, outbox = algorithm.send(state, None, view)
    assert float(state["w"]) == pytest.approx(1e-3)
    state, outbox = algorithm.send(algorithm.receive(state, ()), None, replace(view, iteration=1))
    state = algorithm.receive(state, ())
    assert float(state["w"]) < algorithm.w_min
    resting_state, outbox = algorithm.send(state, gradient, replace(view, iteration=2))
    assert outbox == ()
    assert resting_state is state
    np.testing.assert_allclose(algorithm.model(state), np.ones(20))
    assert algorithm.facts(state)["weight"] < 1e-3
    _other, messages = algorithm.send(algorithm.init(np.ones(20), FLAT), None, View(1, 0, {0: 0.5}, {}))
    woken = algorithm.receive(state, messages_of(1, messages))
    assert float(woken["w"]) > 0.5
    _, outbox = algorithm.send(woken, None, replace(view, iteration=3))
    assert outbox


def test_messages_without_values_still_move_mass():
    algorithm = SparsePush(compressor={"id": "threshold", "level": 1e9}, gamma=0.5)
    models = starts(4, 20)
    states = opened(algorithm, models)
    x, _ = total(states)
    _, outbox = algorithm.send(states[0], None, views_of(Complete(4))(0, 1))
    assert {len(multicast.payload) for multicast in outbox} <= {HEADER_BYTES + 8 + n for n in range(10)}
    states = rounds(algorithm, states, views_of(topology_of("edges:0>1,1>2,2>3,3>0,0>2", 4)), range(30))
    np.testing.assert_allclose(total(states)[0], x, rtol=0, atol=1e-13)
    assert total(states)[1] == pytest.approx(4.0, abs=1e-14)
    assert abs(float(states[2]["w"]) - 1.0) > 0.1


def test_bytes_of_a_message_are_header_share_indices_and_values():
    algorithm = SparsePush(compressor={"id": "topk", "density": 0.01, "index": "fixed"}, gamma=0.05, digest_every=0)
    layout = Layout.flat(2410)
    state = algorithm.init(np.zeros(2410, np.float32), layout)
    gradient = lambda z: Key(0, "g").generator().standard_normal(2410).astype(np.float32)  # noqa: E731
    _, outbox = algorithm.send(state, gradient, View(0, 0, {1: 0.25, 2: 0.25}, {}))
    # 25 indices of 12 bits. Both edges have told the same so far: one multicast, two messages.
    assert [(multicast.destinations, len(multicast.payload)) for multicast in outbox] == [((1, 2), 8 + 8 + 38 + 100)]


def test_broadcast_sends_the_same_change_with_different_shares():
    algorithm = SparsePush(density=0.15, gamma=0.5, estimates="broadcast", lr=1.0)
    state = algorithm.init(np.zeros(20), FLAT)
    gradient = lambda z: np.arange(20.0)  # noqa: E731
    _, outbox = algorithm.send(state, gradient, View(0, 0, {1: 0.25, 2: 0.5, 3: 0.25}, {}))
    assert [multicast.destinations for multicast in outbox] == [(1, 3), (2,)]
    one, two = (multicast.payload for multicast in outbox)
    assert one != two
    assert len(one) == len(two)
    assert (one[:8], one[16:]) == (two[:8], two[16:])


@pytest.mark.slow
def test_the_closing_phase_leaves_estimates_alone_and_asks_for_no_gradient():
    graph = Exponential(8)
    algorithm = SparsePush(density=0.1, gamma=0.1, momentum=0.9)
    models = starts(8, 20)
    states = rounds(algorithm, opened(algorithm, models), views_of(graph), range(5), quadratic(models))
    before = {i: digests(s, ("h",)) for i, s in states.items()}
    x, w = total(states)

    def never(i, t):
        def gradient(z):
            raise AssertionError("asked for a gradient")

        return gradient

    closed = rounds(algorithm, states, views_of(graph, dense=True), range(5, 60), never)
    assert {i: digests(s, ("h",)) for i, s in closed.items()} == before
    assert disagreement(algorithm, closed, x / w) < 1e-14
    again = rounds(algorithm, closed, views_of(graph), range(60, 65))  # compressed messages go on where they were
    np.testing.assert_allclose(total(again)[0], x, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_adapting_halves_gamma_of_a_node_whose_innovations_grow():
    graph = Complete(3)
    models = starts(3, 40)
    fixed = {"density": 1 / 40, "gamma": 0.9}
    grown, steady = SparsePush(**fixed), SparsePush(adapt=True, **fixed)
    worse = rounds(grown, opened(grown, models), views_of(graph), range(220))
    better = rounds(steady, opened(steady, models), views_of(graph), range(220))
    mean = np.mean(models, axis=0)
    assert disagreement(grown, worse, mean) > 1e3
    assert min(steady.facts(s)["gamma"] for s in better.values()) <= 0.45
    assert disagreement(steady, better, mean) < disagreement(grown, worse, mean) / 100
    assert total(better)[1] == pytest.approx(3.0, abs=1e-13)


def top(density: float) -> Compressor:
    return get_compressor({"id": "topk", "density": density})


def test_gamma_follows_the_contraction():
    assert automatic_gamma(top(24 / 2410), 2410) == pytest.approx(0.04, rel=0.01)
    assert automatic_gamma(top(2 / 2410), 2410) == pytest.approx(0.0115, rel=0.01)
    assert automatic_gamma(top(0.9), 1000) == 0.2
    assert automatic_gamma(get_compressor({"id": "identity"}), 1000) == 1.0
    assert automatic_gamma(top(0.5), 0) == 1.0  # nothing is compressed
    for config in ({"compressor": {"id": "threshold", "level": 1.0}}, {"compressor": {"id": "normsign"}}):
        with pytest.raises(ConfigError, match="gamma"):
            SparsePush(**config).init(np.ones(20), FLAT)
    parts = Layout((TensorSpec("a", (16,), "float32", 0, 16), TensorSpec("b", (4,), "float32", 16, 4, 1.0)), (), "ab")
    state = SparsePush(density=0.25).init(np.ones(20, np.float32), parts)
    assert SparsePush(density=0.25).facts(state)["gamma"] == pytest.approx(automatic_gamma(top(0.25), 16))


def test_broadcast_estimates_need_a_graph_that_stays():
    assert SparsePush().time_varying
    assert not SparsePush(estimates="broadcast").time_varying
    with pytest.raises(ConfigError, match="changes"):
        RandomDigraph(8, 0.3, seed=1).check(SparsePush(estimates="broadcast"))
    DirectedRing(5).check(SparsePush(estimates="broadcast"))
