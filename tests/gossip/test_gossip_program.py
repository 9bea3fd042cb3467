"""Decentralised runs as a program: whatever is lost, repeated, damaged or forged on the way, messages count once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gossip_faults import (
    EDGES,
    FAULTS,
    LAYOUT,
    SPREAD,
    SYNCHRONOUS,
    ZERO,
    D,
    Mass,
    N,
    Poison,
    Quadratic,
    average,
    error,
    learn,
    name_of,
    post_of,
    same_models,
    same_states,
    vectors,
)

from fedcomp.errors import ConfigError, StateError
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import State
from fedcomp.gossip.errors import Diverged, MessageError, TopologyError
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import FaultPlan, Faults, Simulation, SimulationSettings
from fedcomp.mailbox import Post
from fedcomp.program import Answer, Ask, Me, Now
from fedcomp.rng import Key
from fedcomp.systems.gossip import RETURNED, Course, Gossip, Turn, state_of, waiting

COLD = SYNCHRONOUS[0]
PUSHES = ({"name": "sgp"}, {**EDGES, "gamma": 0.5}, {**SPREAD, "gamma": 0.5})


def begun(config: dict[str, Any], graph: str = "complete", *, starts: Any = ZERO, **options: Any) -> Simulation:
    locals = options.pop("locals", [Quadratic(centre, noise=0.0) for centre in vectors(N, D)])
    settings = SimulationSettings(**options)
    return Simulation(
        get_algorithm(config), topology_of(graph, N, 0), locals, starts, layout=LAYOUT, seed=0, settings=settings
    )


def go(run: Simulation, rounds: int, *, ends: bool = True) -> Simulation:
    for number in range(run.course.iteration + 1, run.course.iteration + rounds + 1):
        run.step(number)
    if ends:
        run.step(run.course.iteration + 1, last=True)
    return run


def altered(run: Simulation, change: Callable[[int, Ask, Answer], Answer]) -> Simulation:
    """Let ``change(node, ask, answer)`` take the place of what nodes answer."""

    class Altered(Gossip):
        def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
            memory, answer = super().client(memory, ask, me)
            return memory, change(me.node, ask, answer)

    system = run.system
    run.local.system = Altered(
        system.algorithm, system.graph, system.dtype, system.unlike, system.patience, system.skew_rounds
    )
    run.system = run.local.system
    return run


def state(run: Simulation, node: int) -> State:
    return state_of(run.local.client(node).memory)


def stepping(ask: Ask, iteration: int) -> bool:
    return isinstance(ask.say, Turn) and ask.say.do == "step" and ask.say.iteration >= iteration


# Faults.


@pytest.mark.slow
@pytest.mark.parametrize("config", SYNCHRONOUS, ids=name_of)
def test_faults_leave_no_trace_in_a_synchronous_run(config: dict[str, Any]) -> None:
    clean = learn(config, "ring", 12)
    faulty = learn(config, "ring", 12, faults=FaultPlan(3, FAULTS), patience=40)
    assert faulty.report.repeated > 12, "the plan must do something"
    assert same_states(clean.states, faulty.states)
    assert clean.traffic.edge == faulty.traffic.edge
    assert clean.traffic.node == faulty.traffic.node
    assert faulty.traffic.relay_bytes > clean.traffic.relay_bytes


def test_a_gradient_is_taken_again_only_when_it_was_not_kept() -> None:
    """A node that lost its reply has stored it, one that broke before storing has not."""
    for kind, again in (("lost", 0), ("silent", 0), ("twice", 0), ("crash", 5)):
        locals = [Quadratic(centre) for centre in vectors(N, D)]

        def faults(i: int, t: int, kind=kind) -> str:
            return kind if i == 2 and t <= 5 else ""

        learn(SYNCHRONOUS[7], "ring", 8, "float64", locals=locals, faults=faults, patience=9)
        assert [local.calls for local in locals] == [8 + (again if i == 2 else 0) for i in range(N)], kind


@pytest.mark.slow
def test_the_others_restart_when_a_node_of_a_synchronous_run_is_gone() -> None:
    """They go on from their models with a smaller graph, whole estimates first, and reach the optimum of the rest."""
    rest = np.mean([centre for i, centre in enumerate(vectors(N, D)) if i != 2], axis=0)
    for config in (
        {"name": "cold", "lr": 0.5, "gamma": 0.5},
        {"name": "nids", "lr": 0.5},
        {"name": "gradient-tracking", "lr": 0.3},
    ):

        def faults(i: int, t: int) -> str:
            return "silent" if i == 2 and t > 10 else ""

        outcome = learn(config, "complete", 80, "float64", noise=0.0, faults=faults, patience=3)
        assert outcome.report.gone == [(13, 2, "no answer to 3 requests")]
        assert sorted(outcome.models) == [0, 1, 3, 4, 5]
        assert error(outcome, rest) < 1e-6
        assert outcome.traffic.edge["resync"].messages == 20


@pytest.mark.slow
def test_a_node_that_lost_its_memory_comes_back_into_a_synchronous_run() -> None:
    mean = np.mean(vectors(N, D), axis=0)

    def faults(i: int, t: int) -> str:
        return "wiped" if (i, t) == (4, 10) else ""

    config = {"name": "cold", "lr": 0.5, "gamma": 0.5, "digest_every": 1}
    outcome = learn(config, "complete", 80, "float64", noise=0.0, faults=faults)
    assert [event[:2] for event in outcome.report.gone] == [(10, 4)]
    assert outcome.report.joined[0][1] == 4
    assert error(outcome, mean) < 1e-6
    assert len(outcome.models) == N


def test_an_older_copy_of_a_memory_is_not_continued() -> None:
    """Others have newer messages of it: going on would send a share twice."""
    run = go(begun({"name": "sgp"}), 3, ends=False)
    before = run.local.client(2).memory
    run.step(4)
    run.local.client(2).memory = before
    run.step(5)
    assert [event[1:] for event in run.report.gone] == [(2, "its memory is lost")]


@pytest.mark.slow
def test_leaving_a_synchronous_run_finishes_the_iteration_for_all() -> None:
    """No message is thrown away: the one that leaves and those that stay have what the iteration gave them."""
    rest = np.mean([centre for i, centre in enumerate(vectors(N, D)) if i != 1], axis=0)

    def leave(run: Simulation) -> None:
        return run.leave(1) if run.course.iteration == 7 and 1 in run.members else None

    config = {"name": "nids", "lr": 0.5}
    outcome = learn(
        config, "complete", 80, "float64", noise=0.0, before=leave, faults=FaultPlan(1, FAULTS), patience=30
    )
    assert outcome.traffic.undelivered.messages == 0
    assert outcome.report.left[0][1] == 1
    assert error(outcome, rest) < 1e-6
    alone = learn(config, "complete", 7, "float64", noise=0.0)
    left = get_algorithm(config).model(outcome.last[1])
    assert left.tobytes() == alone.models[1].tobytes()


def test_who_is_to_leave_and_loses_its_memory_does_not_come_back() -> None:
    for config in (COLD, {"name": "sgp"}):
        run = begun(config, faults=lambda i, t: "wiped" if (i, t) == (1, 4) else "")
        go(run, 3, ends=False)
        run.leave(1)
        go(run, 6)
        assert [event[1] for event in run.report.gone] == [1]
        assert not run.report.joined
        assert run.members == (0, 2, 3, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [None, FaultPlan(1, FAULTS)])
def test_c1_a_node_that_fails_is_excluded_from_a_synchronous_run_and_named(faults: Faults | None) -> None:
    """It ended the run of everybody."""
    centres = vectors(N, D)
    locals = [Poison(c) if i == 3 else Quadratic(c, noise=0.0) for i, c in enumerate(centres)]
    config = {"name": "cold", "lr": 0.5, "gamma": 0.5, "digest_every": 1}
    outcome = learn(config, "complete", 120, "float64", locals=locals, faults=faults, patience=30)
    assert [event[1] for event in outcome.report.failed] == [3]
    assert [event[1:] for event in outcome.report.gone if "excluded: node 3, iteration 4: " in event[2]]
    assert sorted(outcome.models) == [0, 1, 2, 4, 5]
    assert error(outcome, np.mean([c for i, c in enumerate(centres) if i != 3], axis=0)) < 1e-6


@pytest.mark.parametrize("name", ["dpsgd", "sgp"])
def test_c1_a_run_in_which_most_nodes_fail_has_diverged(name: str) -> None:
    locals = [Poison(c) if i < 4 else Quadratic(c) for i, c in enumerate(vectors(N, D))]
    with pytest.raises(Diverged, match=r"4 of 6 nodes failed; node 0, iteration 4"):
        learn({"name": name}, "exponential" if name == "sgp" else "ring", 10, "float64", locals=locals, patience=1)


@pytest.mark.slow
def test_messages_that_cannot_be_read_begin_a_new_epoch_and_end_a_run_when_that_does_not_help() -> None:
    def damage(run: Simulation) -> None:
        if run.course.iteration == 5 or (always and run.course.iteration > 5):
            box = run.local.mailbox.waiting[0]
            box[0] = box[0]._replace(data=b"\xff" * 40)

    always = False
    mean = np.mean(vectors(N, D), axis=0)
    config = {"name": "cold", "lr": 0.5, "gamma": 0.5, "digest_every": 1}
    outcome = learn(config, "complete", 80, "float64", noise=0.0, before=damage)
    assert {event[1] for event in outcome.report.needed} == {0}
    assert not outcome.report.gone
    assert error(outcome, mean) < 1e-6

    always = True
    with pytest.raises(MessageError, match="4 epochs in a row; last: node 0: "):
        learn(config, "complete", 80, "float64", noise=0.0, before=damage, patience=3)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_a_message_damaged_for_good_costs_what_it_carried_and_not_its_sender(config: dict[str, Any]) -> None:
    """Its receiver cannot read it, and when it comes back its sender cannot either."""
    run = go(begun(config, "exponential", locals=None), 8, ends=False)
    whole = sum(float(after(run, i)["w"]) for i in range(N))
    box = run.local.mailbox.waiting[3]
    at = next(k for k, post in enumerate(box) if post.source == 2)
    (share,) = np.frombuffer(box[at].data[8:16], np.float64)
    box[at] = box[at]._replace(data=b"\xff" * 40)
    go(run, 22)
    assert [event[1] for event in run.report.lost] == [2]
    assert "message to node 3" in run.report.lost[0][2]
    assert not run.report.gone
    assert share > 0.01
    assert whole - sum(float(state(run, i)["w"]) for i in range(N)) == pytest.approx(share, abs=1e-12)


def after(run: Simulation, node: int) -> State:
    """Return a node's state after the messages that wait for it."""
    return run.system.algorithm.receive(
        state(run, node),
        [post_of(p, node) for p in waiting(run.local.mailbox, node) if not p.name.startswith(RETURNED)],
    )


# Answers that cannot be.


def reposted(answer: Answer, **changes: Any) -> Answer:
    """Return the answer with another first post."""
    first, *rest = answer.post
    return answer._replace(post=(first._replace(**changes), *rest))


FORGED: dict[str, Callable[[Answer], Answer]] = {
    "stranger": lambda a: reposted(a, to=3),
    "twice": lambda a: a._replace(post=(*a.post, a.post[0])),
    "another life": lambda a: reposted(a, name="7/0/9"),
    "returned": lambda a: reposted(a, name=RETURNED + "0/0/9"),
    "too large": lambda a: reposted(a, data=a.post[0].data + bytes(10**6)),
    "failed, but speaks": lambda a: a._replace(say=replace(a.say, failed="no")),
    "needs a stranger": lambda a: a._replace(say=replace(a.say, needs=(17,), reasons=("",))),
    "loses what did not come back": lambda a: a._replace(say=replace(a.say, lost=("x",))),
    "shows unasked": lambda a: a._replace(frames={"model": b"x"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "dpsgd"])
@pytest.mark.parametrize("how", FORGED)
def test_an_answer_that_cannot_be_one_is_refused_and_harms_nobody(name: str, how: str) -> None:
    def change(node: int, ask: Ask, answer: Answer) -> Answer:
        return FORGED[how](answer) if node == 3 and stepping(ask, 4) and ask.say.out else answer

    run = go(altered(begun({"name": name}, locals=None, starts=vectors(N, D), patience=3), change), 40)
    assert [event[:2] for event in run.report.refused] == [(5, 3)]
    assert run.report.gone[0][1] == 3
    assert run.members == (0, 1, 2, 4, 5)
    models = [run.system.algorithm.model(state(run, i)) for i in run.members]
    assert max(float(np.abs(m - models[0]).max()) for m in models) < 1e-6
    if name == "sgp":
        assert sum(float(state(run, i)["w"]) for i in run.members) < N - 0.01


def test_c1_a_node_whose_figures_cannot_be_is_named_in_report_and_log(caplog: pytest.LogCaptureFixture) -> None:
    def lie(node: int, ask: Ask, answer: Answer) -> Answer:
        if node != 3 or not stepping(ask, 4):
            return answer
        return answer._replace(say=replace(answer.say, facts=("weight", "saturated"), values=(np.nan, 1.0)))

    run = altered(begun({"name": "choco"}, locals=None, starts=vectors(N, D)), lie)
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        go(run, 12)
    assert [event[1] for event in run.report.doubted] == [3]
    assert "weight is nan" in run.report.doubted[0][2]
    assert sum("node 3: left out of the judgement" in line for line in caplog.messages) == 1


def pushed(config: dict[str, Any], share: float | None, caplog: pytest.LogCaptureFixture) -> Simulation:
    """Run with a node 3 that writes another share of w into its messages, or sends the first ones again and again."""
    kept: list[Post] = []

    def change(node: int, ask: Ask, answer: Answer) -> Answer:
        if node != 3 or not stepping(ask, 0) or not answer.post:
            return answer
        if share is not None:
            bodies = [p.data[:8] + np.float64(share).tobytes() + p.data[16:] for p in answer.post]
        else:
            kept.extend(() if kept else answer.post)
            bodies = [post.data for post in kept]
        return answer._replace(post=tuple(p._replace(data=b) for p, b in zip(answer.post, bodies, strict=True)))

    run = altered(begun(config, "exponential", locals=None, starts=vectors(N, D)), change)
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        return go(run, 12)


@pytest.mark.slow
@pytest.mark.parametrize("config", PUSHES, ids=["sgp", "edge", "broadcast"])
@pytest.mark.parametrize("share", [1e10, 6.5])
def test_c4_a_share_above_all_mass_is_refused_and_captures_no_model(
    config: dict[str, Any], share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken: with 1e10 every model became node 3's."""
    run = pushed(config, share, caplog)
    refused = [event for event in run.report.needed if event[1] != 3]  # what it takes back counts at itself
    assert {event[1] for event in refused} == {1, 4, 5}
    assert all("messages of node 3: node 3 sent a share of" in event[2] for event in refused)
    assert "all 6 nodes together have 6. It is refused" in caplog.text
    honest = np.delete(np.asarray(vectors(N, D)), 3, axis=0)
    for node in (0, 1, 2, 4, 5):
        model = run.system.algorithm.model(state(run, node))
        assert np.all(model <= np.max(honest, axis=0) + 1e-9)
        assert np.all(model >= np.min(honest, axis=0) - 1e-9)
        assert float(state(run, node)["w"]) <= N


@pytest.mark.slow
@pytest.mark.parametrize("config", PUSHES, ids=["sgp", "edge", "broadcast"])
@pytest.mark.parametrize(("share", "remark"), [(0.0, "a share of 0: it takes mass in"), (None, "arrived again")])
def test_c4_messages_that_drain_mass_are_named_in_report_and_log(
    config: dict[str, Any], share: float | None, remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = pushed(config, share, caplog)
    honest = sum(float(state(run, i)["w"]) for i in range(N) if i != 3)
    assert honest < 3.0, "mass must drain: five nodes began with five"
    named = [(event[1], event[2].split(" says: ")[0]) for event in run.report.noticed]
    assert sorted(named) == [(3, "node 1"), (3, "node 4"), (3, "node 5")]  # once each, not in every round
    assert all(remark in event[2] for event in run.report.noticed)
    assert caplog.text.count(remark) == 3


@pytest.mark.slow
def test_c4_nothing_is_noticed_in_an_honest_run_with_faults() -> None:
    for config in PUSHES:
        outcome, _ = average(config, "exponential", 20, faults=FaultPlan(3, FAULTS), patience=30)
        assert not outcome.report.noticed


# Looking, closing, going on.


@pytest.mark.slow
@pytest.mark.parametrize("config", [SYNCHRONOUS[0], SYNCHRONOUS[2], {"name": "sgp"}, EDGES], ids=name_of)
def test_observing_changes_nothing_and_sees_what_the_end_would_be(config: dict[str, Any]) -> None:
    graph = "ring" if config in SYNCHRONOUS else "exponential"
    plan = FaultPlan(3, FAULTS)
    plain = learn(config, graph, 12, faults=plan, patience=30)
    watched = learn(
        config,
        graph,
        12,
        faults=plan,
        patience=30,
        every=1,
        observe=lambda k, models: {i: m.copy() for i, m in models.items()},
    )
    assert same_states(plain.states, watched.states)
    assert plain.traffic == watched.traffic
    assert [k for k, _ in watched.curve] == list(range(13))
    clean = learn(config, graph, 12, every=1, observe=lambda k, models: {i: m.copy() for i, m in models.items()})
    for k, models in (clean.curve[1], clean.curve[7], clean.curve[12]):
        assert same_models(models, learn(config, graph, k).models)
    if config in SYNCHRONOUS:
        assert all(same_models(a[1], b[1]) for a, b in zip(clean.curve, watched.curve, strict=True))
    else:
        assert min(len(models) for _, models in watched.curve) < N, "who does not answer is not observed"


@pytest.mark.parametrize("config", [SYNCHRONOUS[0], SYNCHRONOUS[8], {"name": "sgp"}, EDGES], ids=name_of)
def test_models_that_are_asked_for_are_those_that_are_seen_and_change_no_run(config: dict[str, Any]) -> None:
    graph, runs = "ring" if config in SYNCHRONOUS else "exponential", []
    for every in (0, 2):
        run = begun(config, graph)
        run.system = run.local.system = replace(run.system, observe_every=every)
        for number in range(1, 7):
            run.step(number)
            if every and number % every == 0:
                shown = {node: each.model for node, each in run.local.told["models"].items()}
                assert same_models(shown, run.models())
                mean = np.mean([shown[i] for i in range(N)], axis=0)
                assert run.local.model.tobytes() == mean.astype(np.float32).tobytes()
        runs.append({i: after(run, i) for i in range(N)})
    assert same_states(*runs)


def test_the_closing_phase_averages_without_gradients_and_is_counted_apart() -> None:
    outcome, mass = average(EDGES, "one-peer", 20, n=8, starts=vectors(8, D), skew_rounds="auto", faults=None)
    assert error(outcome, np.mean(vectors(8, D), axis=0)) < 1e-14  # log2(8) = 3 rounds, exact
    assert outcome.traffic.edge["dense"].messages == 3 * 8
    assert outcome.traffic.edge["train"].messages == 20 * 8
    assert max(mass.drift()) < 1e-12
    locals = [Quadratic(centre) for centre in vectors(N, D)]
    learn(EDGES, "exponential", 4, "float64", locals=locals, skew_rounds=5)
    assert [local.calls for local in locals] == [4] * N


def test_the_watcher_sees_every_node_of_every_iteration_once() -> None:
    for name in ("sgp", "dpsgd"):
        seen: list[tuple[int, int]] = []
        note = partial(extend, seen)
        learn({"name": name}, "ring", 6, faults=FaultPlan(3, FAULTS), patience=30, watch=note)
        assert len(set(seen)) == len(seen)
        wanted = sorted((k, i) for k in range(6) for i in range(N))
        assert sorted(seen) == wanted if name == "dpsgd" else set(seen) < set(wanted)
    with pytest.raises(Diverged, match="enough"):
        learn({"name": "dpsgd"}, "ring", 6, watch=stop)


def extend(seen: list[tuple[int, int]], iteration: int, facts: Any) -> None:
    seen.extend((iteration, node) for node in facts)


def stop(iteration: int, facts: Any) -> None:
    if iteration == 3:
        raise Diverged("enough")


@pytest.mark.slow
@pytest.mark.parametrize("config", [COLD, EDGES], ids=name_of)
def test_a_finished_run_goes_on_as_if_it_had_never_stopped(config: dict[str, Any]) -> None:
    """Delivering all messages in between changes nothing: neither a bit nor the number of an iteration."""
    states = []
    for parts in ((4, 3, 2), (9,)):
        run = begun(config, "ring", locals=[Quadratic(centre) for centre in vectors(N, D)])
        for rounds in parts:
            go(run, rounds)
        states.append({i: state(run, i) for i in range(N)})
    assert same_states(*states)


@pytest.mark.slow
@pytest.mark.parametrize("when", [4, 5], ids=["in the last iteration", "in the last delivery"])
@pytest.mark.parametrize("config", [COLD, SYNCHRONOUS[2], SYNCHRONOUS[4]], ids=name_of)
def test_a_run_that_lost_a_node_at_its_end_goes_on_with_whole_estimates(config: dict[str, Any], when: int) -> None:
    """An epoch that begins when nothing is sent any more tells nobody anything."""
    run = go(begun(config, patience=2, faults=lambda i, t: "silent" if i == 2 and t >= when else ""), 4)
    assert [event[1] for event in run.report.gone] == [2]
    assert sorted(run.models()) == [0, 1, 3, 4, 5]
    go(run, 20)
    assert not run.report.needed
    assert run.traffic.edge["resync"].messages == 5 * 4


def test_a_last_message_that_cannot_be_read_leaves_everybody_with_a_model() -> None:
    run = go(begun(COLD), 4, ends=False)
    box = run.local.mailbox.waiting[0]
    box[0] = box[0]._replace(data=b"\xff" * 40)
    run.step(5, last=True)
    assert [event[1] for event in run.report.needed] == [0] * (N - 1)
    assert sorted(run.models()) == list(range(N))
    go(run, 4)
    assert len(run.report.needed) == N - 1
    assert not run.report.gone


@pytest.mark.parametrize("at", [3, 5], ids=["in the middle", "at the end"])
def test_a_run_that_lost_all_mass_or_every_model_ends_with_a_reason(at: int) -> None:
    """Nobody is left who could give those that join anything."""
    with pytest.raises(StateError, match=r"no node is left to continue.*memory is lost"):
        go(begun({"name": "sgp"}, faults=lambda i, t: "wiped" if t == at else ""), 4)
    with pytest.raises(StateError, match="no node is left to continue"):
        go(begun(COLD, faults=lambda i, t: "wiped" if t == 5 else ""), 4)
    for name in ("sgp", "dpsgd"):
        with pytest.raises(StateError, match="no node is left"):
            learn({"name": name}, "ring", 6, faults=lambda i, t: "silent", patience=3)


def test_living_nodes_that_cannot_reach_each_other_are_reported() -> None:
    outcome, _ = average({"name": "sgp"}, "ring", 6, faults=lambda i, t: "silent" if i in (1, 4) else "", patience=2)
    exchange, _, groups = outcome.report.split[0]
    assert (exchange, groups) == (2, "groups that cannot all reach each other: [[0, 5], [2, 3]]")


def test_what_cannot_be_run_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="push-sum"):
        begun({"name": "dpsgd"}, skew_rounds=3)
    with pytest.raises(TopologyError):
        begun({"name": "dpsgd"}, "exponential")
    with pytest.raises(TopologyError, match="reach"):
        begun({"name": "sgp"}, "edges:0>1,1>0,2>3,3>2,4>5,5>4")
    for members in ([0, 9], []):
        with pytest.raises(ConfigError, match="members"):
            begun({"name": "sgp"}, members=members)
    run = go(begun({"name": "sgp"}), 1, ends=False)
    with pytest.raises(ConfigError, match="cannot join"):
        run.join(3)
    with pytest.raises(ConfigError, match="cannot leave"):
        run.leave(7)


# What happens in whatever order.


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_7_05_whatever_happens_in_whatever_order_only_a_lost_node_takes_mass_with_it(config: dict[str, Any]) -> None:
    """Its own: what it held by its last answer, and what was on its way back to it. After every single exchange."""
    events = 0
    for seed in range(4):
        graph = "exponential" if config is SPREAD else ("digraph:0.6", "one-peer", "complete", "ring")[seed]
        run = churned(config, graph, seed)
        assert not run.report.needed
        events += len(run.report.gone) * len(run.report.left) * len(run.report.joined)
    assert events > 10


def churned(config: dict[str, Any], graph: str, seed: int) -> Simulation:
    """Run with everything that can happen; check the sums after every exchange."""
    plan = FaultPlan(seed, {**FAULTS, "wiped": 0.02})
    run = begun(config, graph, locals=None, starts=vectors(N, D), patience=3, faults=plan)
    account = Mass()
    expected, lost = [float(N), sum(vectors(N, D))], list[Post]()

    class Accounting(Gossip):
        def _give_up(self, now: Now, course: Course, node: int, reason: str, ask: Ask) -> None:
            # What waits for it goes back, and is in no sum of its own.
            w, x = account.of(run, node, ask, course, now.mailbox, inbox=False)
            expected[:] = [expected[0] - w, expected[1] - x]
            # Messages of a former life of somebody cannot come back.
            box = [p for p in (*ask.mail, *now.mailbox.waiting.get(node, ())) if not p.name.startswith(RETURNED)]
            lost.extend(post for post in box if str(course.lives.get(post.source, 0)) != post.name.partition("/")[0])
            super()._give_up(now, course, node, reason, ask)

    given = run.system
    run.system = run.local.system = Accounting(
        given.algorithm, given.graph, given.dtype, given.unlike, given.patience, given.skew_rounds
    )
    for number in range(1, 31):
        drawn = Key(seed, "churn", run.report.rounds).uniform(2)
        if number > 1 and drawn[0] < 0.1 and len(run.members) > 3:
            run.leave(run.members[int(drawn[1] * len(run.members))])
        if number > 1 and drawn[0] > 0.7:
            for node in set(range(N)) - set(run.members):
                run.join(node)
        run.step(number)
        if lost:
            break
        w, x = account.total(run)
        assert w == pytest.approx(expected[0], abs=1e-11)
        np.testing.assert_allclose(x, expected[1], atol=1e-10)
    return run
