"""The mailbox: whatever is lost, repeated or broken on the way, messages count once, and mass stays."""

from __future__ import annotations

import json
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
    Courier,
    D,
    N,
    Quadratic,
    average,
    error,
    learn,
    name_of,
    same_models,
    same_states,
    vectors,
)

from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import store
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Multicast, Real, View
from fedcomp.gossip.central import FaultPlan, Faults, SimulatedNodes
from fedcomp.gossip.errors import Diverged, MessageError, TopologyError
from fedcomp.gossip.estimates import digests
from fedcomp.gossip.mailbox import Mailbox, Pending
from fedcomp.gossip.node import NodeMemory
from fedcomp.gossip.protocol import Instruction, NodeAnswer, largest_message
from fedcomp.gossip.relay import ENDLESS, Relay, RelaySettings
from fedcomp.gossip.topology import topology_of
from fedcomp.plain import PlainError
from fedcomp.rng import Key


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
    for kind, again in (("lost_reply", 0), ("raise_after", 0), ("silent", 0), ("duplicate", 0), ("raise", 5)):
        locals = [Quadratic(centre) for centre in vectors(N, D)]

        def faults(i: int, t: int, kind=kind) -> str:
            return kind if i == 2 and t <= 5 else "none"

        learn(SYNCHRONOUS[7], "ring", 8, "float64", locals=locals, faults=faults, patience=9)
        assert [local.calls for local in locals] == [8 + (again if i == 2 else 0) for i in range(N)], kind


@pytest.mark.slow
@pytest.mark.parametrize("config", [SYNCHRONOUS[0], SYNCHRONOUS[2]], ids=name_of)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_7_15_digests_agree_after_every_fault_and_after_save_and_restore(config: dict[str, Any], dtype: str) -> None:
    seen: set[bytes] = set()

    def compare(relay: Relay, nodes: SimulatedNodes) -> None:
        for node, memory in nodes.memories.items():
            nodes.memories[node] = restored(memory)
        if relay.settled and nodes.memories:
            inbox = {i: asked.inbox for i, asked in relay.observe().items()}
            seen.update(
                both_ends_agree(nodes, inbox, lambda i: (i - 1) % N),
                both_ends_agree(nodes, inbox, lambda i: (i + 1) % N),
            )

    faulty = learn(config, "ring", 12, dtype, faults=FaultPlan(5, FAULTS), patience=40, before=compare)
    assert len(seen) > 10 * N
    assert same_states(faulty.states, learn(config, "ring", 12, dtype).states)


def both_ends_agree(
    nodes: SimulatedNodes, inbox: dict[int, tuple[GossipMessage, ...]], neighbour: Callable[[int], int]
) -> set[bytes]:
    """Check what every node's neighbour holds of it once the messages under way have arrived; return the digests."""
    now = {i: nodes.algorithm.receive(nodes.memories[i].state, inbox[i]) for i in inbox}
    found = {i: digests(now[i], ("h",)) for i in now}
    for i in found:
        j = neighbour(i)
        own = found[i].get("h", found[i].get(f"h>{j}"))
        assert own is not None
        assert own == found[j][f"h/{i}"]
    return {found[i].get("h", b"") for i in found}


def restored(memory: NodeMemory) -> NodeMemory:
    """Return the memory after a journey through bytes."""
    arrays, parts = memory.to_parts()
    loaded = {name: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for name, a in arrays.items()}
    messages = parts.pop("answer.messages")
    return NodeMemory.from_parts(loaded, json.loads(json.dumps(parts)) | {"answer.messages": messages})


@pytest.mark.slow
def test_the_relay_goes_on_from_its_stored_state_as_if_nothing_had_been() -> None:
    """Stored and restored after every round, in the middle of faults, instructions and messages; and when it was lost
    after it had asked, so that nodes have carried out what it does not know it has issued."""
    for config, graph in ((SYNCHRONOUS[0], "ring"), (EDGES, "digraph:0.5")):

        def replace_relay(relay: Relay, nodes: SimulatedNodes) -> None:
            state = store.loads(store.dumps(relay.state_dict(), "s"), "s")
            if relay.report.rounds % 3 == 1:
                faults, nodes.faults = nodes.faults, None
                nodes.carry_out(relay.ask(), 0)
                nodes.faults = faults
            fresh = Relay(relay.algorithm, relay.topology, relay.settings)
            for name in ("nodes", "outstanding", "epochs", "iteration", "figures", "noticed", "traffic", "report"):
                setattr(relay, name, getattr(fresh, name))  # nothing of the old one is left
            relay.load_state_dict(state)

        plan = FaultPlan(7, FAULTS)
        plain = learn(config, graph, 15, faults=plan, patience=3)
        again = learn(config, graph, 15, faults=plan, patience=3, before=replace_relay)
        assert same_states(plain.states, again.states)
        assert (plain.traffic, plain.report) == (again.traffic, again.report)
        assert plain.report.gone, "the plan must give somebody up"


def test_a_state_of_another_run_is_refused() -> None:
    relay, other = relay_of("sgp"), relay_of("sgp", session="other")
    with pytest.raises(StateError, match="other"):
        relay.load_state_dict(other.state_dict())
    state = relay.state_dict()
    forged = {**state["outstanding"]["messages"], "open": [[{}, [], 0, ""]]}
    with pytest.raises(StateError, match="not the state of a relay"):
        relay.load_state_dict({**state, "outstanding": {**state["outstanding"], "messages": forged}})
    # As relays stored themselves before their state was declared: one level, and the messages beside it.
    with pytest.raises(PlainError, match="of another class"):
        relay.load_state_dict({"session": "s", "rounds": [4, 0], "iteration": 0, "members": []})


def relay_of(name: str, graph: str = "complete", **options: Any) -> Relay:
    algorithm: Algorithm = Courier() if name == "courier" else get_algorithm({"name": name})
    options = {"iterations": 5, "session": "s", "seed": 0, "largest": largest_message(algorithm, D, 8), **options}
    return Relay(algorithm, topology_of(graph, N, 0), RelaySettings(**options))


@pytest.mark.slow
def test_the_others_restart_when_a_node_of_a_synchronous_run_is_gone() -> None:
    """They go on from their models with a smaller graph, whole estimates first, and reach the optimum of the rest."""
    rest = np.mean([centre for i, centre in enumerate(vectors(N, D)) if i != 2], axis=0)
    for config in (
        {"name": "cold", "lr": 0.5, "gamma": 0.5},
        {"name": "nids", "lr": 0.5},
        {"name": "gradient-tracking", "lr": 0.3},
    ):
        locals = [Quadratic(centre, noise=0.0) for centre in vectors(N, D)]

        def faults(i: int, t: int) -> str:
            return "silent" if i == 2 and t > 10 else "none"

        outcome = learn(config, "complete", 80, "float64", locals=locals, faults=faults, patience=3)
        assert outcome.report.gone == [(13, 2, "no answer to 3 requests: no connection")]
        assert sorted(outcome.models) == [0, 1, 3, 4, 5]
        assert error(outcome, rest) < 1e-6
        assert outcome.traffic.edge["resync"].messages == 20


@pytest.mark.slow
def test_a_node_that_lost_its_memory_comes_back_into_a_synchronous_run() -> None:
    mean = np.mean(vectors(N, D), axis=0)
    locals = [Quadratic(centre, noise=0.0) for centre in vectors(N, D)]

    def faults(i: int, t: int) -> str:
        return "wiped" if (i, t) == (4, 10) else "none"

    config = {"name": "cold", "lr": 0.5, "gamma": 0.5, "digest_every": 1}
    outcome = learn(config, "complete", 80, "float64", locals=locals, faults=faults)
    assert [event[:2] for event in outcome.report.gone] == [(10, 4)]
    assert outcome.report.joined[0][:2] == (11, 4)
    assert error(outcome, mean) < 1e-6
    assert len(outcome.models) == N


@pytest.mark.slow
def test_leaving_a_synchronous_run_finishes_the_iteration_for_all() -> None:
    """No message is thrown away: the one that leaves and those that stay have what the iteration gave them."""
    rest = np.mean([centre for i, centre in enumerate(vectors(N, D)) if i != 1], axis=0)
    locals = [Quadratic(centre, noise=0.0) for centre in vectors(N, D)]

    def leave(relay: Relay, nodes: SimulatedNodes) -> None:
        return relay.leave(1) if relay.iteration == 7 and relay.settled else None

    config = {"name": "nids", "lr": 0.5}
    outcome = learn(
        config, "complete", 80, "float64", locals=locals, before=leave, faults=FaultPlan(1, FAULTS), patience=30
    )
    assert outcome.traffic.undelivered.messages == 0
    assert outcome.report.left[0][1] == 1
    assert error(outcome, rest) < 1e-6
    alone = learn(config, "complete", 7, "float64", locals=locals)
    left = get_algorithm(config).model(outcome.memories[1].state)
    assert left.tobytes() == alone.models[1].tobytes()


class Poison(Quadratic):
    """Gradients that are not finite from iteration 4 on."""

    def gradient(self, z: Real, key: Key) -> Real:
        return super().gradient(z, key) * (np.nan if key.round >= 4 else 1.0)


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


def test_c1_a_node_whose_figures_cannot_be_is_named_in_report_and_log(caplog: pytest.LogCaptureFixture) -> None:
    class Liar(SimulatedNodes):
        def _deliver(self, node: int, instruction: Instruction, kind: str) -> NodeAnswer | str:
            answer = super()._deliver(node, instruction, kind)
            lies = node == 3 and instruction.iteration >= 4 and isinstance(answer, NodeAnswer)
            return replace(answer, facts={"weight": np.nan, "saturated": 1.0}) if lies else answer

    relay = relay_of("choco", iterations=12)
    nodes = Liar(relay.algorithm, None, vectors(N, D), LAYOUT, common=ZERO)
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        run(relay, nodes)
    assert [event[1] for event in relay.report.doubted] == [3]
    assert "weight is nan" in relay.report.doubted[0][2]
    assert sum("node 3: left out of the judgement" in line for line in caplog.messages) == 1


@pytest.mark.slow
def test_messages_that_cannot_be_read_begin_a_new_epoch_and_end_a_run_when_that_does_not_help() -> None:
    def damage(relay: Relay, nodes: SimulatedNodes) -> None:
        if relay.iteration == 5 or (always and relay.iteration > 5):
            box = relay.outstanding.mailbox._boxes[0]
            box[0] = Pending(replace(box[0].message, payload=b"\xff" * 40), box[0].life)

    always = False
    mean = np.mean(vectors(N, D), axis=0)
    locals = [Quadratic(centre, noise=0.0) for centre in vectors(N, D)]
    config = {"name": "cold", "lr": 0.5, "gamma": 0.5, "digest_every": 1}
    outcome = learn(config, "complete", 80, "float64", locals=locals, before=damage)
    assert {event[1] for event in outcome.report.needed} == {0}
    assert not outcome.report.gone
    assert error(outcome, mean) < 1e-6

    always = True
    with pytest.raises(MessageError, match="4 epochs in a row; last: node 0: "):
        learn(config, "complete", 80, "float64", locals=locals, before=damage, patience=3)


def forge(answer: NodeAnswer, how: str) -> NodeAnswer:
    first, *rest = answer.multicasts
    if how == "stranger":
        return replace(answer, multicasts=(Multicast((17,), first.payload), *rest))
    if how == "itself":
        return replace(answer, multicasts=(Multicast((3,), first.payload), *rest))
    if how == "twice":
        return replace(answer, multicasts=(*answer.multicasts, first))
    if how == "nobody":
        return replace(answer, multicasts=(*answer.multicasts, Multicast((), b"")))
    if how == "too large":
        return replace(answer, multicasts=(replace(first, payload=first.payload + bytes(10**6)), *rest))
    if how == "failed, but speaks":
        return replace(answer, failed="no")
    if how == "needs a stranger":
        return replace(answer, needs=(17,), reasons=("",))
    if how == "needs without reasons":
        return replace(answer, needs=tuple(range(N)))
    if how == "loses what did not come back":
        return replace(answer, lost=("x",))
    if how == "many figures":
        return replace(answer, facts={str(k): 0.0 for k in range(100)})
    raise AssertionError(how)


HOSTILE = (
    "stranger", "itself", "twice", "nobody", "too large", "failed, but speaks", "needs a stranger",
    "needs without reasons", "loses what did not come back", "many figures",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "dpsgd"])
@pytest.mark.parametrize("how", HOSTILE)
def test_an_answer_that_cannot_be_one_is_refused_and_harms_nobody(name: str, how: str) -> None:
    class Forger(SimulatedNodes):
        def _deliver(self, node: int, instruction: Instruction, kind: str) -> NodeAnswer | str:
            answer = super()._deliver(node, instruction, kind)
            hostile = node == 3 and instruction.iteration == 4 and instruction.action == "step"
            return forge(answer, how) if hostile and isinstance(answer, NodeAnswer) else answer

    algorithm = get_algorithm({"name": name})
    relay = relay_of(name, iterations=40, patience=3)
    starts = vectors(N, D)
    nodes = Forger(algorithm, None, starts, LAYOUT, common=ZERO)
    run(relay, nodes)
    assert [event[:2] for event in relay.report.refused] == [(5, 3), (6, 3), (7, 3)]
    assert relay.report.gone[0][1] == 3
    assert sorted(relay.members) == [0, 1, 2, 4, 5]
    models = [algorithm.model(nodes.memories[i].state) for i in relay.members]
    assert max(float(np.abs(m - models[0]).max()) for m in models) < 1e-6
    if name == "sgp":
        assert sum(float(nodes.memories[i].state["w"]) for i in relay.members) < N - 0.01


def run(relay: Relay, nodes: SimulatedNodes) -> None:
    while not relay.done:
        relay.take(*nodes.carry_out(relay.ask(), relay.report.rounds))


class Forger(SimulatedNodes):
    """Node 3 writes another share of w into its messages, or sends one of them again and again."""

    share: float | None = None

    def _deliver(self, node: int, instruction: Instruction, kind: str) -> NodeAnswer | str:
        answer = super()._deliver(node, instruction, kind)
        if node != 3 or instruction.action != "step" or not isinstance(answer, NodeAnswer) or not answer.multicasts:
            return answer
        if self.share is not None:
            bodies = [p.payload[:8] + np.float64(self.share).tobytes() + p.payload[16:] for p in answer.multicasts]
            return replace(answer, multicasts=tuple(map(forged, answer.multicasts, bodies)))
        self.kept = getattr(self, "kept", None) or [p.payload for p in answer.multicasts]
        return replace(answer, multicasts=tuple(map(forged, answer.multicasts, self.kept)))


def forged(multicast: Multicast, payload: bytes) -> Multicast:
    return Multicast(multicast.destinations, payload)


def pushed(
    config: dict[str, Any], share: float | None, caplog: pytest.LogCaptureFixture
) -> tuple[Relay, SimulatedNodes]:
    graph = topology_of("exponential", N, 0)
    algorithm = get_algorithm(config).fitted(graph)
    largest = largest_message(algorithm, D, 8)
    relay = Relay(algorithm, graph, RelaySettings(12, "s", 0, largest))
    nodes = Forger(algorithm, None, vectors(N, D), LAYOUT, common=ZERO)
    nodes.share = share
    with caplog.at_level("WARNING", "flwr.fedcomp"):
        run(relay, nodes)
    return relay, nodes


PUSHES = ({"name": "sgp"}, {**EDGES, "gamma": 0.5}, {**SPREAD, "gamma": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("config", PUSHES, ids=["sgp", "edge", "broadcast"])
@pytest.mark.parametrize("share", [1e10, 6.5])
def test_c4_a_share_above_all_mass_is_refused_and_captures_no_model(
    config: dict[str, Any], share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken: with 1e10 every model became node 3's."""
    relay, nodes = pushed(config, share, caplog)
    refused = [event for event in relay.report.needed if event[1] != 3]  # what it takes back counts at itself
    assert {event[1] for event in refused} == {1, 4, 5}
    assert all("messages of node 3: node 3 sent a share of" in event[2] for event in refused)
    assert "all 6 nodes together have 6. It is refused" in caplog.text
    starts = vectors(N, D)
    honest = np.delete(np.asarray(starts), 3, axis=0)
    for node in (0, 1, 2, 4, 5):
        model = relay.algorithm.model(nodes.memories[node].state)
        assert np.all(model <= np.max(honest, axis=0) + 1e-9)
        assert np.all(model >= np.min(honest, axis=0) - 1e-9)
        assert float(nodes.memories[node].state["w"]) <= N


@pytest.mark.parametrize("weight", [1e10, 2 * float(np.nextafter(np.float32(5), np.float32(6)))])
def test_c4_coordinate_push_refuses_shares_above_all_mass(weight: float) -> None:
    """However little they are above it: half of the second one and the receiver's own 1 are 5e-7 too much."""
    algorithm = get_algorithm({"name": "coordinate-push", "density": 0.5}).fitted(topology_of("exponential", N, 0))
    rich = {**algorithm.init(np.ones(D), LAYOUT), "weights": np.full(D, weight)}
    state = algorithm.init(np.zeros(D), LAYOUT)
    _, outbox = algorithm.send(rich, None, View(3, 1, column={0: 0.5}))
    with pytest.raises(MessageError, match=r"node 3 sent shares .* all 6 nodes together have 6"):
        algorithm.receive(state, [GossipMessage(3, 0, outbox[0].payload)])


@pytest.mark.slow
@pytest.mark.parametrize("config", PUSHES, ids=["sgp", "edge", "broadcast"])
@pytest.mark.parametrize(("share", "remark"), [(0.0, "a share of 0: it takes mass in"), (None, "came again")])
def test_c4_messages_that_drain_mass_are_named_in_report_and_log(
    config: dict[str, Any], share: float | None, remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    relay, nodes = pushed(config, share, caplog)
    honest = sum(float(nodes.memories[i].state["w"]) for i in range(N) if i != 3)
    assert honest < 3.0, "mass must drain: five nodes began with five"
    named = [(event[1], event[2].split(" says: ")[0]) for event in relay.report.noticed]
    assert sorted(named) == [(3, "node 1"), (3, "node 4"), (3, "node 5")]  # once each, not in every round
    assert all(remark in event[2] for event in relay.report.noticed)
    assert caplog.text.count(remark) == 3


def test_a_resumed_relay_does_not_repeat_what_nodes_said_of_messages() -> None:
    """An oddity is reported once for every receiver and sender, also over a restart."""
    relay = relay_of("sgp")
    again = relay_of("sgp")
    nodes = SimulatedNodes(relay.algorithm, None, vectors(N, D), LAYOUT, common=ZERO)

    def take(relay: Relay) -> None:
        answers, _ = nodes.carry_out(relay.ask(), relay.report.rounds)
        relay.take(
            {i: replace(a, noticed=((3, "odd"),) if i == 1 and a.serial > 1 else ()) for i, a in answers.items()}
        )

    for _ in range(2):
        take(relay)
    assert [event[1] for event in relay.report.noticed] == [3]
    again.load_state_dict(relay.state_dict())
    take(again)
    assert [event[1] for event in again.report.noticed] == [3]


@pytest.mark.slow
def test_c4_nothing_is_noticed_in_an_honest_run_with_faults() -> None:
    for config in PUSHES:
        outcome, _ = average(config, "exponential", 20, faults=FaultPlan(3, FAULTS), patience=30)
        assert not outcome.report.noticed


def test_an_answer_to_something_else_counts_as_none() -> None:
    relay = relay_of("sgp")
    nodes = SimulatedNodes(relay.algorithm, None, vectors(N, D), LAYOUT, common=ZERO)
    asked = relay.ask()
    answers, _ = nodes.carry_out(asked, 1)
    wrong = {0: replace(answers[0], serial=2), 1: replace(answers[1], session="other"), 17: answers[2]}
    relay.take({**answers, **wrong})
    assert relay.report.ignored == 3
    assert {node: asked[node] is again for node, again in relay.ask().items() if node in (0, 1)} == {0: True, 1: True}


def test_an_instruction_is_repeated_verbatim_until_it_is_answered_or_its_node_given_up() -> None:
    for name in ("sgp", "dpsgd"):
        relay = relay_of(name, patience=4)
        nodes = SimulatedNodes(relay.algorithm, None, vectors(N, D), LAYOUT, common=ZERO)
        relay.take(nodes.carry_out(relay.ask(), 1)[0])
        seen = []
        for attempt in range(2, 6):
            asked = relay.ask()
            seen.append(asked[3])
            answers, _ = nodes.carry_out({i: one for i, one in asked.items() if i != 3}, attempt)
            relay.take(answers)
        assert all(one is seen[0] for one in seen)
        assert seen[0].serial == 2
        assert len(seen[0].inbox) == N - 1
        assert 3 not in relay.members
        assert 3 not in relay.ask()


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


def test_no_node_left_is_an_error() -> None:
    for name in ("sgp", "dpsgd"):
        with pytest.raises(StateError, match="no node is left"):
            learn({"name": name}, "ring", 6, faults=lambda i, t: "silent", patience=3)


def test_living_nodes_that_cannot_reach_each_other_are_reported() -> None:
    outcome, _ = average(
        {"name": "sgp"}, "ring", 6, faults=lambda i, t: "silent" if i in (1, 4) else "none", patience=2
    )
    assert outcome.report.split[-1] == (2, [[0, 5], [2, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": [0, 9]}, "members"),
        ({"members": []}, "members"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        relay_of("sgp", **options)


def test_what_cannot_be_run_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="push-sum"):
        relay_of("dpsgd", skew_rounds=3)
    with pytest.raises(TopologyError):
        relay_of("dpsgd", graph="exponential")
    relay = relay_of("sgp")
    with pytest.raises(ConfigError, match="cannot join"):
        relay.join(3)
    with pytest.raises(ConfigError, match="cannot leave"):
        relay.leave(7)
    waiting = relay_of("dpsgd")
    waiting.ask()
    with pytest.raises(StateError, match="settled"):
        waiting.observe()


def test_mail_is_in_order_of_source_and_of_one_source_in_the_order_sent() -> None:
    box = Mailbox(4)
    for source, text in ((2, b"first"), (3, b"x"), (1, b"y"), (2, b"second")):
        assert box.put(GossipMessage(source, 0, text), receiving=True, whole=False)
    expected = [b"y", b"first", b"second", b"x"]
    assert [item.message.payload for item in box.look(0)] == expected
    assert [item.message.payload for item in box.take(0)[0]] == expected
    assert not box.waits(0)


def test_what_follows_a_refused_message_goes_back_behind_it() -> None:
    box = Mailbox(4)
    box.put(GossipMessage(2, 0, b"first"), receiving=True, whole=False)
    taken, _ = box.take(0)
    box.put(GossipMessage(2, 0, b"second"), receiving=True, whole=False)
    box.put(GossipMessage(1, 0, b"other"), receiving=True, whole=False)
    box.refuse(taken, [2], 0)
    assert not box.put(GossipMessage(2, 0, b"third"), receiving=True, whole=False), "the edge is broken"
    assert [message.payload for message in box.look_returned(2)] == [b"first", b"second", b"third"]
    assert [item.message.payload for item in box.look(0)] == [b"other"]
    assert box.put(GossipMessage(2, 0, b"whole"), receiving=True, whole=True)
    assert box.put(GossipMessage(2, 0, b"next"), receiving=True, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SYNCHRONOUS[0], EDGES], ids=name_of)
def test_a_finished_run_goes_on_as_if_it_had_never_stopped(config: dict[str, Any]) -> None:
    """Delivering all messages in between changes nothing: neither a bit nor the number of an iteration."""
    algorithm, graph = get_algorithm(config), topology_of("ring", N, 0)
    locals = [Quadratic(centre) for centre in vectors(N, D)]
    states = []
    for stops in ((4, 7, 9), (9,)):
        largest = largest_message(algorithm, D, 8)
        relay = Relay(algorithm, graph, RelaySettings(ENDLESS, "s", 0, largest))
        nodes = SimulatedNodes(algorithm, locals, ZERO, LAYOUT)
        for stop in stops:
            relay.prolong(stop)
            run(relay, nodes)
        states.append({i: memory.state for i, memory in nodes.memories.items()})
    assert same_states(*states)
    with pytest.raises(ConfigError, match="9 have been begun"):
        relay.prolong(8)
