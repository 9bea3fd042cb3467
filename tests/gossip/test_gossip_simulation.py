"""A run in one process is the algorithm and nothing else: the protocol adds no arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gossip_faults import EDGES, LAYOUT, SYNCHRONOUS, ZERO, D, N, Quadratic, learn, name_of, same_states, vectors

from fedcomp.errors import ConfigError
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Real, State, deliver
from fedcomp.gossip.errors import Saturated
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import KINDS, FaultPlan, SimulationSettings, simulate
from fedcomp.rng import Key


@pytest.mark.slow
@pytest.mark.parametrize("config", [*SYNCHRONOUS, {"name": "sgp"}, EDGES], ids=name_of)
def test_7_16_the_protocol_without_faults_is_a_plain_loop_over_the_nodes(config: dict[str, Any]) -> None:
    """Send, deliver, receive, written down again: the same states, bit for bit."""
    algorithm = get_algorithm(config)
    topology = topology_of("ring", N, 0)
    locals = [Quadratic(centre) for centre in vectors(N, D, "float32")]
    start = np.zeros(D, np.float32)
    states: dict[int, State] = {i: algorithm.init(start, LAYOUT) for i in range(N)}
    for t in range(10):
        outboxes = {}
        for i in range(N):
            view = topology.view(i, t, seed=0, directed_algorithm=algorithm.directed)

            def gradient(z: Real, i: int = i, t: int = t) -> Real:
                return locals[i].gradient(z, Key(0, "gossip/gradient", t, i))

            states[i], outboxes[i] = algorithm.send(states[i], gradient, view)
        inboxes = deliver(outboxes)
        states = {i: algorithm.receive(states[i], inboxes[i]) for i in range(N)}
    outcome = learn(config, "ring", 10)
    assert same_states(outcome.states, states)
    assert outcome.traffic.messages == 10 * 2 * N
    assert outcome.report.rounds == 11


@pytest.mark.slow
def test_a_seed_decides_everything() -> None:
    runs = [
        simulate(
            get_algorithm(EDGES),
            topology_of("digraph:0.5", N, seed),
            [Quadratic(centre) for centre in vectors(N, D)],
            ZERO,
            15,
            seed=seed,
            layout=LAYOUT,
            settings=SimulationSettings(faults=FaultPlan(seed, {"silent": 0.2}), patience=20),
        )
        for seed in (1, 1, 2)
    ]
    assert same_states(runs[0].states, runs[1].states)
    assert runs[0].traffic == runs[1].traffic
    assert not same_states(runs[0].states, runs[2].states)


def test_the_curve_begins_before_the_first_iteration_and_ends_with_the_final_models() -> None:
    outcome = learn({"name": "dpsgd"}, "ring", 7, every=3, observe=lambda k, models: float(models[0][0]))
    assert [k for k, _ in outcome.curve] == [0, 3, 6, 7]
    assert outcome.curve[0][1] == 0.0
    assert outcome.curve[-1][1] == float(outcome.models[0][0])
    only_end = learn({"name": "dpsgd"}, "ring", 7, observe=lambda k, models: len(models))
    assert only_end.curve == [(7, N)]
    closing = learn({"name": "sgp"}, "ring", 4, skew_rounds=2, every=2, observe=lambda k, models: len(models))
    assert closing.curve == [(0, N), (2, N), (4, N), (6, N)]


@pytest.mark.slow
def test_nodes_may_begin_anywhere() -> None:
    algorithm, ring = get_algorithm(SYNCHRONOUS[2]), topology_of("ring", N, 0)
    starts = vectors(N, D)
    with pytest.raises(ConfigError, match="2 models"):
        simulate(algorithm, ring, None, starts[:2], 1, layout=LAYOUT, seed=0, settings=SimulationSettings())
    outcome = simulate(algorithm, ring, None, starts, 150, layout=LAYOUT, seed=0, settings=SimulationSettings())
    np.testing.assert_allclose(outcome.models[3], np.mean(starts, axis=0), atol=2e-2)
    same = simulate(algorithm, ring, None, [ZERO] * N, 3, layout=LAYOUT, seed=0)
    assert not same.models[0].any()


@pytest.mark.slow
def test_some_nodes_may_have_no_data() -> None:
    locals = [Quadratic(centre, noise=0.0) if i < 2 else None for i, centre in enumerate(vectors(N, D))]
    outcome = simulate(
        get_algorithm({"name": "sgp", "lr": 0.05}),
        topology_of("complete", N, 0),
        locals,
        ZERO,
        200,
        layout=LAYOUT,
        seed=0,
    )
    np.testing.assert_allclose(outcome.models[5], np.mean(vectors(N, D)[:2], axis=0), atol=0.1)


def test_a_scale_that_falls_too_fast_ends_the_run() -> None:
    config = {"name": "dyna-cold", "lr": 0.3, "scale": "geometric", "rho": 0.5, "s0": 1.0}
    with pytest.raises(Saturated, match="node"):
        learn(config, "ring", 60, "float64")


@pytest.mark.slow
def test_faults_are_drawn_by_seed_node_and_round_at_their_rates() -> None:
    rates = {"silent": 0.3, "crash": 0.1, "wiped": 0.05}
    plan = FaultPlan(4, rates, until=500)
    drawn = [plan(i, t) for i in range(8) for t in range(1, 501)]
    assert drawn == [FaultPlan(4, rates)(i, t) for i in range(8) for t in range(1, 501)]
    counts = Counter(drawn)
    assert set(counts) == {*rates, ""}
    for kind, rate in rates.items():
        assert counts[kind] / len(drawn) == pytest.approx(rate, abs=4 * (rate / len(drawn)) ** 0.5)
    assert {plan(i, t) for i in range(8) for t in range(501, 600)} == {""}
    assert [FaultPlan(5, rates)(i, 1) for i in range(64)] != [plan(i, 1) for i in range(64)]


@pytest.mark.parametrize("rates", [{"silnt": 0.1}, {"silent": -0.1}, {"silent": 0.6, "crash": 0.6}])
def test_rates_that_are_no_probabilities_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=KINDS[0]):
        FaultPlan(0, rates)
