"""The borders of a run: before its first round, in its last one, and after it; and any faults in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gossip_faults import EDGES, FAULTS, LAYOUT, SPREAD, SYNCHRONOUS, ZERO, D, N, Quadratic, name_of, vectors

from fedcomp.errors import StateError
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Real, State
from fedcomp.gossip.central import FaultPlan, Faults, SimulatedNodes
from fedcomp.gossip.mailbox import Pending
from fedcomp.gossip.node import NodeMemory
from fedcomp.gossip.protocol import Instruction, NodeAnswer, largest_message
from fedcomp.gossip.relay import Relay, RelaySettings
from fedcomp.gossip.topology import topology_of
from fedcomp.rng import Key

COLD = SYNCHRONOUS[0]


def start(
    config: dict[str, Any], iterations: int = 4, graph: str = "complete", **options: Any
) -> tuple[Relay, SimulatedNodes]:
    algorithm = get_algorithm(config)
    faults: Faults | None = options.pop("faults", None)
    locals = [Quadratic(centre, noise=0.0) for centre in vectors(N, D)]
    largest = largest_message(algorithm, D, 8)
    relay = Relay(algorithm, topology_of(graph, N, 0), RelaySettings(iterations, "s", 0, largest, **options))
    return relay, SimulatedNodes(algorithm, locals, ZERO, LAYOUT, faults=faults)


def exchange(relay: Relay, nodes: SimulatedNodes) -> None:
    relay.take(*nodes.carry_out(relay.ask(), relay.report.rounds))


def run(relay: Relay, nodes: SimulatedNodes) -> None:
    while not relay.done:
        exchange(relay, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("when", [4, 5], ids=["in the last iteration", "in the last delivery"])
@pytest.mark.parametrize("config", [COLD, SYNCHRONOUS[2], SYNCHRONOUS[4]], ids=name_of)
def test_a_run_that_lost_a_node_at_its_end_goes_on_with_whole_estimates(config: dict[str, Any], when: int) -> None:
    """An epoch that begins when nothing is sent any more tells nobody anything."""
    relay, nodes = start(config, patience=2, faults=lambda i, t: "silent" if i == 2 and t >= when else "none")
    run(relay, nodes)
    assert [event[1] for event in relay.report.gone] == [2]
    assert sorted(nodes.observe(relay)) == [0, 1, 3, 4, 5]
    relay.prolong(60)
    run(relay, nodes)
    assert not relay.report.needed
    assert relay.traffic.edge["resync"].messages == 5 * 4


def test_a_last_message_that_cannot_be_read_leaves_everybody_with_a_model() -> None:
    relay, nodes = start(COLD)
    while not relay.finishing:
        exchange(relay, nodes)
    box = relay.outstanding.mailbox._boxes[0]
    box[0] = Pending(type(box[0].message)(box[0].message.source, 0, b"\xff" * 40), box[0].life)
    run(relay, nodes)
    assert [event[1] for event in relay.report.needed] == [0] * (N - 1)
    assert sorted(nodes.observe(relay)) == list(range(N))
    relay.prolong(8)
    run(relay, nodes)
    assert len(relay.report.needed) == N - 1
    assert not relay.report.gone


@pytest.mark.slow
@pytest.mark.parametrize("config", [EDGES, SPREAD], ids=name_of)
def test_who_joins_in_the_closing_iterations_gets_estimates_when_the_run_goes_on(config: dict[str, Any]) -> None:
    """Models that travel whole tell nobody an estimate."""
    lost = partial(wiped_at, 5)
    relay, nodes = start(config, 4, skew_rounds=4, faults=lost)
    run(relay, nodes)
    assert [event[1] for event in relay.report.joined] == [2]
    assert relay.traffic.edge["resync"].messages == 0
    assert relay.traffic.edge["dense"].messages > 60
    relay.prolong(16)
    run(relay, nodes)
    assert not relay.report.needed
    assert relay.traffic.edge["resync"].messages == 2 * (N - 1)


def wiped_at(attempt: int, node: int, now: int) -> str:
    return "wiped" if (node, now) == (2, attempt) else "none"


def test_a_node_may_leave_before_the_first_round() -> None:
    for config in (COLD, {"name": "sgp"}):
        relay, nodes = start(config)
        relay.leave(1)
        run(relay, nodes)
        assert not relay.report.gone
        assert [event[1] for event in relay.report.left] == [1]
        assert relay.members == (0, 2, 3, 4, 5)


def test_who_is_to_leave_and_loses_its_memory_does_not_come_back() -> None:
    for config in (COLD, {"name": "sgp"}):
        relay, nodes = start(config, 12, faults=lambda i, t: "wiped" if (i, t) == (1, 4) else "none")
        while relay.report.rounds < 3:
            exchange(relay, nodes)
        asked = relay.ask()
        relay.leave(1)  # while its instruction is under way
        relay.take(*nodes.carry_out(asked, relay.report.rounds))
        run(relay, nodes)
        assert [event[1] for event in relay.report.gone] == [1]
        assert not relay.report.joined
        assert relay.members == (0, 2, 3, 4, 5)


@pytest.mark.parametrize("at", [3, 5], ids=["in the middle", "at the end"])
def test_a_run_that_lost_all_mass_or_every_model_ends_with_a_reason(at: int) -> None:
    """Nobody is left who could give those that join anything."""
    relay, nodes = start({"name": "sgp"}, faults=lambda i, t: "wiped" if t == at else "none")
    with pytest.raises(StateError, match=r"no node is left that could go on.*memory is lost"):
        run(relay, nodes)
    relay, nodes = start(COLD, faults=lambda i, t: "wiped" if t == 5 else "none")
    with pytest.raises(StateError, match="no node is left that could go on"):
        run(relay, nodes)


def test_why_a_node_that_says_something_else_was_given_up_stands_in_the_report() -> None:
    class Elsewhere(SimulatedNodes):
        def _deliver(self, node: int, instruction: Instruction, kind: str) -> NodeAnswer | str:
            answer = super()._deliver(node, instruction, kind)
            return NodeAnswer("other", 7) if node == 3 and isinstance(answer, NodeAnswer) else answer

    relay, plain = start({"name": "sgp"}, patience=2)
    run(relay, Elsewhere(plain.algorithm, plain.locals, ZERO, LAYOUT))
    assert "it answered instruction 7, not 1, of its run" in relay.report.gone[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_a_message_damaged_for_good_costs_what_it_carried_and_not_its_sender(config: dict[str, Any]) -> None:
    """Its receiver cannot read it, and when it comes back its sender cannot either."""
    relay, nodes = start(config, 30, graph="exponential")
    nodes.locals = None
    while relay.report.rounds < 8:
        exchange(relay, nodes)
    box = relay.outstanding.mailbox._boxes[3]
    at = next(k for k, item in enumerate(box) if item.message.source == 2)
    whole, message = sum_of(relay, nodes), box[at].message
    box[at] = Pending(type(message)(2, 3, b"\xff" * 40), box[at].life)
    run(relay, nodes)
    assert [event[:2] for event in relay.report.lost] == [(10, 2)]
    assert "message to node 3" in relay.report.lost[0][2]
    assert not relay.report.gone
    (share,) = np.frombuffer(message.payload[8:16], np.float64)
    assert share > 0.01
    assert whole - sum(float(nodes.memories[i].state["w"]) for i in range(N)) == pytest.approx(share, abs=1e-12)


class Chronicle(SimulatedNodes):
    """Remembers every state a node has ever stored, by the number of its instruction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.states: dict[tuple[int, int], State] = {}

    def _handle(self, node: int, instruction: Instruction, *, keep: bool = True) -> NodeAnswer:
        answer = super()._handle(node, instruction, keep=keep)
        memory: NodeMemory | None = self.memories.get(node)
        if keep and memory is not None:
            self.states[node, memory.serial] = memory.state
        return answer

    def mass(self, relay: Relay, node: int, *, inbox: bool) -> tuple[float, Real]:
        """Return (w, x) of a node by its last answer: an instruction that is open has not happened. With what comes
        back to it, and with the messages that wait."""
        entry, algorithm = relay.outstanding.open.get(node), self.algorithm
        begins = relay.nodes.starts.get(node, "") if entry is None else entry.instruction.start
        if begins:
            state = (
                algorithm.join(ZERO, LAYOUT)
                if begins == "empty"
                else algorithm.init(self.start(node), LAYOUT, common=ZERO)
            )
        else:
            state = self.states[node, relay.outstanding.serial(node) - (entry is not None)]
        pending = [*(entry.pending if entry else ()), *relay.outstanding.mailbox.look(node)]
        if inbox:
            state = algorithm.receive(state, sorted((p.message for p in pending), key=lambda one: one.source))
        back = [*(entry.instruction.returned if entry else ()), *relay.outstanding.mailbox.look_returned(node)]
        state = algorithm.take_back(state, back) if back else state
        return float(state["w"]), state["x"]


def sum_of(relay: Relay, nodes: SimulatedNodes) -> float:
    weights = []
    for i, memory in nodes.memories.items():
        weights.append(
            float(relay.algorithm.receive(memory.state, [p.message for p in relay.outstanding.mailbox.look(i)])["w"])
        )
    return sum(weights)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"name": "sgp"}, EDGES, SPREAD], ids=name_of)
def test_7_05_whatever_happens_in_whatever_order_only_a_lost_node_takes_mass_with_it(config: dict[str, Any]) -> None:
    """Its own: what it held by its last answer, and what was on its way back to it. After every single exchange."""
    events = 0
    for seed in range(4):
        plan = FaultPlan(seed, {**FAULTS, "wiped": 0.02})
        graph = "exponential" if config is SPREAD else ("digraph:0.6", "one-peer", "complete", "ring")[seed]
        relay, plain = start(config, 30, graph=graph, patience=3, skew_rounds=2)
        nodes = Chronicle(plain.algorithm, None, vectors(N, D), LAYOUT, common=ZERO, faults=plan)
        nodes.start = vectors(N, D).__getitem__  # type: ignore[method-assign]
        expected = [float(N), sum(vectors(N, D))]
        give_up = relay.settlement.give_up

        def account(node: int, reason: str, relay=relay, nodes=nodes, expected=expected, give_up=give_up) -> None:
            w, x = nodes.mass(relay, node, inbox=False)
            expected[:] = [expected[0] - w, expected[1] - x]
            give_up(node, reason)

        relay.settlement.give_up = account  # type: ignore[method-assign]
        while not relay.done and not relay.outstanding.mailbox.lost:
            drawn = Key(seed, "churn", relay.report.rounds).uniform(2)
            if drawn[0] < 0.1 and len(relay.members) > 3:
                relay.leave(relay.members[int(drawn[1] * len(relay.members))])
            if drawn[0] > 0.7:
                for node in set(range(N)) - set(relay.members):
                    relay.join(node)
            exchange(relay, nodes)
            there = sorted(relay.nodes.members | relay.nodes.departing)
            found = [nodes.mass(relay, node, inbox=True) for node in there]
            assert sum(w for w, _ in found) == pytest.approx(expected[0], abs=1e-11)
            np.testing.assert_allclose(sum(x for _, x in found), expected[1], atol=1e-10)
            assert sum(map(len, relay.outstanding.mailbox._boxes)) <= N * N
        assert not relay.report.needed
        events += len(relay.report.gone) * len(relay.report.left) * len(relay.report.joined)
    assert events > 10
