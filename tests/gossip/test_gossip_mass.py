"""Push-sum on a network that loses things: mass is neither made nor lost, whoever is silent, wiped, leaves or joins."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gossip_faults import (
    EDGES,
    FAULTS,
    LAYOUT,
    LOSS,
    SPREAD,
    ZERO,
    Courier,
    D,
    N,
    Poison,
    Quadratic,
    average,
    error,
    learn,
    name_of,
    vectors,
)

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.estimates import digests
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import FaultPlan, Simulation, SimulationSettings, simulate
from fedcomp.mailbox import Post
from fedcomp.systems.gossip import state_of, waiting


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_7_06_a_node_that_leaves_takes_nothing_with_it(config: dict[str, Any]) -> None:
    def leave(run: Simulation) -> None:
        return run.leave(4) if run.report.rounds == 10 else None

    graph = "exponential" if "estimates" in config else "digraph:0.5"
    outcome, mass = average(config, graph, 100, faults=FaultPlan(2, FAULTS), patience=30, before=leave)
    assert outcome.report.left[0][1] == 4
    assert 4 not in outcome.models
    assert max(mass.drift()) < 1e-12
    assert error(outcome, np.mean(vectors(N, D), axis=0)) < (8e-15 if config["name"] == "sgp" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_7_06_what_a_leaving_node_sent_to_one_that_vanished_goes_to_others(config: dict[str, Any]) -> None:
    """Its last messages, and what it had sent before: the vanished node takes no more with it than its own."""
    own: list[float] = []

    def act(run: Simulation) -> None:
        if run.report.rounds == 10:
            run.leave(0)
            own.append(float(state_of(run.local.client(1).memory)["w"]))

    def faults(node: int, attempt: int) -> str:
        return "silent" if node == 1 and attempt > 10 else ""

    outcome, mass = average(config, "complete", 30, faults=faults, patience=4, before=act)
    assert [event[1] for event in outcome.report.left] == [0, 0]
    assert [event[1] for event in outcome.report.gone] == [1]
    assert sorted(outcome.models) == [2, 3, 4, 5]
    assert mass.seen[-1][0] == pytest.approx(N - own[0], abs=1e-12)


@pytest.mark.slow
def test_7_06_who_joins_brings_nothing_and_takes_part() -> None:
    for config, graph in (({"name": "sgp"}, "digraph:0.5"), (EDGES, "digraph:0.5"), (SPREAD, "exponential")):

        def join(run: Simulation) -> None:
            return run.join(5) if run.report.rounds == 20 else None

        starts = vectors(N, D)
        outcome, mass = average(
            config, graph, 100, faults=FaultPlan(2, FAULTS), patience=30, before=join, members=range(5), starts=starts
        )
        assert mass.seen[0][0] == 5.0
        assert max(mass.drift()) < 1e-12
        assert len(outcome.models) == N
        assert float(outcome.states[5]["w"]) > 0.2
        assert error(outcome, np.mean(starts[:5], axis=0)) < 1e-5


@pytest.mark.slow
def test_estimates_agree_after_nodes_were_wiped_left_and_came_back() -> None:
    def act(run: Simulation) -> None:
        if run.report.rounds == 25:
            run.leave(1)
        if run.report.rounds == 35 and 1 not in run.members:
            run.join(1)

    for config, graph in ((EDGES, "digraph:0.6"), (SPREAD, "exponential")):
        faults = FaultPlan(4, {**LOSS, "wiped": 0.02}, until=60)
        outcome, _ = average(config, graph, 90, faults=faults, patience=6, before=act)
        assert len(outcome.report.gone) > 2
        assert outcome.traffic.edge["resync"].messages > 10
        found = {i: digests(state, ("h",)) for i, state in outcome.states.items()}
        edges = topology_of(graph, N, 0).edges(0) if graph == "exponential" else [(i, j) for i in found for j in found]
        compared = [
            (found[i].get("h", found[i].get(f"h>{j}")), found[j].get(f"h/{i}"))
            for i, j in edges
            if i != j and i in found and j in found
        ]
        assert len(compared) > N
        assert all(own is not None and own == copy for own, copy in compared)


@pytest.mark.slow
def test_no_message_counts_twice_or_is_both_delivered_and_returned() -> None:
    """And messages of an edge arrive in their order, whatever happens to the nodes."""

    def act(run: Simulation) -> None:
        if run.report.rounds % 17 == 5 and len(run.members) > 3:
            run.leave(run.members[run.report.rounds % len(run.members)])
        for node in set(range(N)) - set(run.members) - run.course.departing:
            if run.report.rounds % 7 == node:
                run.join(node)

    events: Counter[str] = Counter()
    for seed in range(6):
        plan = FaultPlan(seed, {**FAULTS, "silent": 0.2, "wiped": 0.02})
        outcome = simulate(
            Courier(),
            topology_of("digraph:0.5", N, seed),
            None,
            ZERO,
            80,
            layout=LAYOUT,
            seed=seed,
            settings=SimulationSettings(faults=plan, patience=3, before=act),
        )
        got = {row for state in outcome.states.values() for row in map(tuple, state["got"])}
        back = {row for state in outcome.states.values() for row in map(tuple, state["back"])}
        assert not got & back
        for _i, state in outcome.states.items():
            for rows in (state["got"], state["back"]):
                assert len({tuple(row) for row in rows}) == len(rows)
            for source in range(N):
                numbers = state["got"][state["got"][:, 0] == source][:, 2]
                assert (np.diff(numbers) > 0).all()
            # Of what this life sent, nothing has vanished: receivers that were gone meanwhile took theirs with them.
            sent = {tuple(row) for row in state["sent"]}
            assert {tuple(row) for row in state["back"]} <= sent
            ended = {event[1] for event in (*outcome.report.gone, *outcome.report.left)}
            assert all(to in ended for _, to, _ in sent - got - back)
        events += Counter(gone=len(outcome.report.gone), left=len(outcome.report.left), back=len(back), got=len(got))
    assert min(events.values()) > 10


def test_nan_leaves_a_node_at_rest() -> None:
    locals = [Poison(ZERO, times=(4, 5, 9)) if i == 3 else Quadratic(c) for i, c in enumerate(vectors(N, D))]
    outcome = learn({"name": "sgp"}, "exponential", 20, "float64", locals=locals, patience=3)
    assert [event[:2] for event in outcome.report.failed] == [(5, 3), (6, 3), (10, 3)]
    assert get_algorithm({"name": "sgp"}).invariants(outcome.states.values())["sum_w"] == pytest.approx(N, abs=1e-12)


def test_c1_a_node_that_keeps_failing_is_excluded_from_push_sum_and_its_messages_go_back() -> None:
    """It ended the run. What it holds is lost, what waits for it is its senders': the sum of the weights says it."""
    locals = [Poison(c) if i == 3 else Quadratic(c) for i, c in enumerate(vectors(N, D))]
    outcome = learn({"name": "sgp"}, "exponential", 20, "float64", locals=locals, patience=3)
    assert [event[:2] for event in outcome.report.failed] == [(5, 3), (6, 3), (7, 3)]
    assert [event[:2] for event in outcome.report.gone] == [(7, 3)]
    assert "excluded: node 3, iteration 6 (iteration 3 in a row): " in outcome.report.gone[0][2]
    assert sorted(outcome.models) == [0, 1, 2, 4, 5]
    lost = float(outcome.last[3]["w"])
    assert get_algorithm({"name": "sgp"}).invariants(outcome.states.values())["sum_w"] == pytest.approx(N - lost)


@pytest.mark.slow
@pytest.mark.parametrize("config", [EDGES, SPREAD, {"name": "sgp"}], ids=name_of)
def test_a_damaged_message_goes_back_and_the_next_one_carries_the_whole_estimate(config: dict[str, Any]) -> None:
    def damage(run: Simulation) -> None:
        if run.report.rounds == 10:
            # The sender gets the message as it wrote it: it is the receiver that cannot read it.
            received.extend(post for post in waiting(run.local.mailbox, 3) if post.source == 2)
            client = run.local.client(3)
            client.memory = spoilt(client.memory)

    def spoilt(state: dict[str, Any]) -> dict[str, Any]:
        return {k: v + 1.0 if k == "h/2" else v for k, v in state.items()}

    received: list[Post] = []
    outcome, mass = average(config, "exponential", 25, before=damage)
    assert len(received) == 1
    if config["name"] == "sgp":
        assert not outcome.report.needed  # holds no estimate that could be spoilt
        return
    assert [event[:2] for event in outcome.report.needed] == [(11, 3)]
    assert "node 2" in outcome.report.needed[0][2]
    assert outcome.traffic.edge["resync"].messages == 1
    assert outcome.traffic.undelivered.messages == 2
    assert outcome.states[3]["h/2"].tobytes() == outcome.states[2]["h>3" if config is EDGES else "h"].tobytes()
    assert abs(mass.seen[-1][0] - N) < 1e-12
