"""What a node does with an instruction, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gossip_faults import Courier, Quadratic, vectors

from fedcomp.errors import StateError
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import GossipMessage, Multicast, Real, View
from fedcomp.gossip.errors import MessageError, NodeAnswerError, StaleInstruction
from fedcomp.gossip.node import NodeMemory, handle
from fedcomp.gossip.protocol import Action, Instruction, NodeAnswer, Start
from fedcomp.layout import Layout
from fedcomp.rng import Key

D = 12
LAYOUT = Layout.flat(D)
START = vectors(1, D)[0]
SGP = get_algorithm({"name": "sgp"})


def asked(serial: int, start: Start = "", action: Action = "step", **changes: Any) -> Instruction:
    """Return an instruction to node 0, which pushes to node 1."""
    view = View(0, serial, {1: 0.5}, {1: 0.5}, seed=3)
    return replace(Instruction("run", serial, 0, action, view, start=start), **changes)


def begun(algorithm: Any = SGP, **options: Any) -> NodeMemory:
    memory, _ = handle(algorithm, None, asked(1, "common"), options.get("local"), START, LAYOUT)
    assert memory is not None
    return memory


def message_to_0(value: float = 1.0, iteration: int = 1) -> GossipMessage:
    """Return what node 1 would send: half of (value, 1)."""
    state = SGP.init(np.full(D, value), LAYOUT)
    _, outbox = SGP.send(state, None, View(1, iteration, {0: 0.5}))
    return GossipMessage(1, 0, outbox[0].payload)


def test_the_same_instruction_again_gives_the_stored_answer_and_does_nothing() -> None:
    local = Quadratic(START)
    memory, answer = handle(SGP, None, asked(1, "common"), local, START, LAYOUT)
    again, same = handle(SGP, memory, asked(1, "common"), local, START, LAYOUT)
    assert again is memory
    assert same is answer
    assert local.calls == 1


def test_an_older_instruction_is_refused() -> None:
    memory, _ = handle(SGP, begun(), asked(2), None, START, LAYOUT)
    with pytest.raises(StaleInstruction, match=r"carried out instruction 2 .*; instruction 1 came too late"):
        handle(SGP, memory, asked(1, "common"), None, START, LAYOUT)


@pytest.mark.parametrize(
    ("memory", "instruction"),
    [
        (None, asked(2)),
        (None, asked(2, "reset")),
        (begun(), asked(2, session="another")),
        (begun(), asked(3)),  # an old copy that came back: instruction 2 was carried out by what is lost
        (begun(), asked(3, "reset", epoch=1)),
        (begun(), asked(2, epoch=1)),
        (begun(), asked(2, action="observe")),
    ],
)
def test_a_node_that_cannot_go_on_says_so_and_does_nothing(memory: NodeMemory | None, instruction: Instruction) -> None:
    local = Quadratic(START)
    after, answer = handle(SGP, memory, instruction, local, START, LAYOUT)
    assert answer == NodeAnswer(instruction.session, instruction.serial, fresh=True)
    assert after is memory
    assert not local.calls


def test_beginning_and_joining_need_no_memory_and_replace_any() -> None:
    for memory in (None, begun(), replace(begun(), session="another", serial=9)):
        after, answer = handle(SGP, memory, asked(5, "common"), None, START, LAYOUT)
        assert after is not None
        assert not answer.fresh
        assert float(after.state["w"]) == 0.5
        after, answer = handle(SGP, memory, asked(5, "empty"), None, START, LAYOUT)
        assert after is not None
        assert not answer.fresh
        assert float(after.state["w"]) == 0.0


def test_nothing_is_modified_in_place_whatever_happens() -> None:
    memory = begun()
    before = {name: array.copy() for name, array in memory.state.items()}
    back = GossipMessage(0, 1, memory.answer.multicasts[0].payload)
    instruction = asked(2, inbox=(message_to_0(),), returned=(back,))
    first, _ = handle(SGP, memory, instruction, Quadratic(START), START, LAYOUT)
    second, _ = handle(SGP, memory, instruction, Quadratic(START), START, LAYOUT)
    assert first is not None
    assert second is not None
    assert all(memory.state[name].tobytes() == array.tobytes() for name, array in before.items())
    assert {n: a.tobytes() for n, a in first.state.items()} == {n: a.tobytes() for n, a in second.state.items()}

    class Breaks(Quadratic):
        def gradient(self, z: Real, key: Key) -> Real:
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        handle(SGP, memory, instruction, Breaks(START), START, LAYOUT)
    assert all(memory.state[name].tobytes() == array.tobytes() for name, array in before.items())


def test_what_came_back_and_what_arrived_is_counted_before_sending() -> None:
    memory = begun()
    own = GossipMessage(0, 1, memory.answer.multicasts[0].payload)
    after, answer = handle(SGP, memory, asked(2, inbox=(message_to_0(3.0),), returned=(own,)), None, START, LAYOUT)
    assert after is not None
    # 0.5 kept + 0.5 back + 0.5 of node 1, of which one half is pushed again.
    assert float(after.state["w"]) == 0.75
    np.testing.assert_allclose(after.state["x"], (START + 0.5 * 3.0) / 2.0, rtol=1e-14)
    assert answer.multicasts[0].destinations == (1,)


def test_messages_that_cannot_be_read_are_named_and_the_others_count() -> None:
    inbox = (message_to_0(), GossipMessage(2, 0, b"nonsense"), GossipMessage(3, 0, message_to_0().payload))
    memory, answer = handle(SGP, begun(), asked(2, action="finish", inbox=inbox), None, START, LAYOUT)
    assert memory is not None
    assert float(memory.state["w"]) == 1.5
    assert answer.needs == (2,)
    assert "message" in answer.reasons[0]


def test_of_a_synchronous_iteration_nothing_counts_when_one_message_cannot_be_read() -> None:
    algorithm = get_algorithm({"name": "dpsgd"})
    memory = begun(algorithm)
    after, answer = handle(algorithm, memory, asked(2, inbox=(GossipMessage(1, 0, b"nonsense"),)), None, START, LAYOUT)
    assert after is not None
    assert after.state is memory.state
    assert after.serial == 2
    assert answer.needs == (1,)
    assert not answer.multicasts
    # A new epoch without inbox: the iteration is dropped.
    after, answer = handle(algorithm, after, asked(3, "reset", epoch=1), None, START, LAYOUT)
    assert after is not None
    assert after.epoch == 1
    assert answer.multicasts
    assert not answer.needs


@pytest.mark.parametrize("name", ["sgp", "dpsgd"])
def test_what_is_not_finite_stays_at_home(name: str) -> None:
    class Poison(Quadratic):
        def gradient(self, z: Real, key: Key) -> Real:
            return np.full(D, np.nan)

    algorithm = get_algorithm({"name": name})
    inbox = (message_to_0(),) if name == "sgp" else ()
    memory, answer = handle(algorithm, begun(algorithm), asked(2, inbox=inbox), Poison(START), START, LAYOUT)
    if name == "dpsgd":
        memory, answer = handle(algorithm, None, asked(1, "common"), Poison(START), START, LAYOUT)
    assert memory is not None
    assert answer.failed
    assert not answer.multicasts
    assert np.isfinite(memory.state["x"]).all()
    if name == "sgp":
        assert float(memory.state["w"]) == 1.0  # half kept, half of node 1 taken in, nothing sent


def test_the_gradient_is_drawn_by_iteration_and_node_and_rests_in_the_closing_phase() -> None:
    class Keys(Quadratic):
        def gradient(self, z: Real, key: Key) -> Real:
            seen.append((key.seed, key.purpose, key.round, key.partition))
            return super().gradient(z, key)

    seen: list[tuple[int, str, int, int]] = []
    local = Keys(START)
    memory, _ = handle(SGP, None, asked(1, "common"), local, START, LAYOUT)
    view = View(0, 2, {1: 0.5}, {1: 0.5}, seed=3, dense=True)
    memory, _ = handle(SGP, memory, asked(2, view=view), local, START, LAYOUT)
    handle(SGP, memory, asked(3, action="finish"), local, START, LAYOUT)
    assert seen == [(3, "gossip/gradient", 1, 0)]


@pytest.mark.parametrize("name", ["sgp", "dpsgd", "nids"])
def test_running_statistics_move_the_model_once_when_the_iteration_is_finished(name: str) -> None:
    """Of a synchronous algorithm the model is replaced on the way: a change applied earlier would be lost."""
    algorithm = get_algorithm({"name": name})
    drift = np.zeros(D)
    drift[-1] = 0.25
    ends = []
    for local in (Quadratic(START), Quadratic(START, drift=drift)):
        alone = View(0, 1, seed=3)
        memory, _ = handle(algorithm, None, asked(1, "common", view=alone), local, START, LAYOUT)
        _, told = handle(algorithm, memory, asked(1, action="observe"), local, START, LAYOUT)
        memory, _ = handle(algorithm, memory, asked(2, action="finish"), local, START, LAYOUT)
        assert memory is not None
        assert memory.change is None
        assert told.model is not None
        ends.append(algorithm.model(memory.state))
        assert told.model.tobytes() == ends[-1].tobytes()
    np.testing.assert_allclose(ends[1] - ends[0], drift, atol=1e-15)


def test_observing_applies_the_mail_and_keeps_nothing() -> None:
    memory = begun()
    instruction = asked(1, action="observe", inbox=(message_to_0(3.0),))
    after, answer = handle(SGP, memory, instruction, None, START, LAYOUT)
    assert after is memory
    assert answer.model is not None
    np.testing.assert_allclose(answer.model, (START + 3.0) / 2.0, rtol=1e-14)
    finished, _ = handle(SGP, memory, replace(asked(2, action="finish"), inbox=instruction.inbox), None, START, LAYOUT)
    assert finished is not None
    assert SGP.model(finished.state).tobytes() == answer.model.tobytes()


def test_leaving_sends_everything_and_leaves_nothing() -> None:
    memory, answer = handle(SGP, begun(), asked(2, action="leave", inbox=(message_to_0(),)), None, START, LAYOUT)
    assert memory is not None
    assert float(memory.state["w"]) == 0.0
    assert not memory.state["x"].any()
    receiver = SGP.receive(SGP.join(START, LAYOUT), [GossipMessage(0, 1, answer.multicasts[0].payload)])
    assert float(receiver["w"]) == 1.0
    # What could not be delivered comes back, and leaves again.
    back = (GossipMessage(0, 1, answer.multicasts[0].payload),)
    view = View(0, 3, {2: 0.5}, {}, seed=3)
    memory, answer = handle(SGP, memory, asked(3, action="leave", returned=back, view=view), None, START, LAYOUT)
    receiver = SGP.receive(SGP.join(START, LAYOUT), [GossipMessage(0, 2, answer.multicasts[0].payload)])
    assert float(receiver["w"]) == 1.0
    assert answer.multicasts[0].destinations == (2,)


def test_instructions_answers_and_memories_survive_a_journey_as_plain_values() -> None:
    view = View(0, 7, {1: 0.25, 3: 0.5}, {2: 0.125}, seed=2**40, dense=True, resync=frozenset({3}))
    instruction = Instruction(
        "run",
        9,
        2,
        "leave",
        view,
        (GossipMessage(2, 0, b"\x00\xff"), GossipMessage(4, 0, b"")),
        (GossipMessage(0, 3, b"back"),),
        "reset",
    )
    assert Instruction.from_parts(instruction.to_parts()) == instruction
    assert list(Instruction.from_parts(instruction.to_parts()).view.column) == [1, 3]
    answer = NodeAnswer(
        "run", 9, (Multicast((1, 3), b"abc"), Multicast((2,), b"")), (4,), ("because",), "no", {"w": 0.5, "nan": np.inf}
    )
    assert NodeAnswer.from_parts(answer.to_parts()) == answer
    assert NodeAnswer.from_parts(NodeAnswer("run", 1, fresh=True).to_parts()).fresh
    for parts in (instruction.to_parts(), answer.to_parts()):
        for value in parts.values():
            assert isinstance(value, (int, float, str, bool)) or all(type(v) is type(value[0]) for v in value)
        json.dumps({k: v for k, v in parts.items() if not any(isinstance(x, bytes) for x in np.atleast_1d(v).tolist())})
    memory = NodeMemory("run", 9, 2, {"x": np.ones(3, np.float32), "h/2": np.zeros(0)}, answer, np.arange(3.0))
    again = NodeMemory.from_parts(*memory.to_parts())
    assert replace(again, state={}, change=None) == replace(memory, state={}, change=None)
    assert again.state.keys() == memory.state.keys()
    assert again.change is not None
    assert all(again.state[k].dtype == memory.state[k].dtype for k in memory.state)


def broken(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every way to leave one field out, give it another type, or make lists of different lengths."""
    made = [{k: v for k, v in parts.items() if k != name} for name in parts]
    plain = [name for name, value in parts.items() if isinstance(value, int | str) and name != "session"]
    lists = [name for name, value in parts.items() if isinstance(value, list) and value]
    made += [{**parts, name: [1.5]} for name in plain]
    return made + [{**parts, name: [*parts[name], parts[name][0]]} for name in lists]


def test_parts_that_are_none_are_refused() -> None:
    view = View(0, 7, {1: 0.25}, {2: 0.125}, resync=frozenset({1}))
    instruction = Instruction("run", 9, 2, "step", view, (GossipMessage(2, 0, b"m"),), (GossipMessage(0, 3, b"back"),))
    answer = NodeAnswer("run", 9, (Multicast((1,), b"abc"),), (4,), ("because",), "no", {"w": 0.5})
    refused = 0
    for parts in broken(instruction.to_parts()):
        try:
            again = Instruction.from_parts(parts)
        except MessageError:
            refused += 1
        else:  # only a repeated entry of a set or a truth value can pass
            assert replace(again, view=replace(again.view, dense=False)) == instruction
    assert refused >= 28
    with pytest.raises(MessageError, match="action 'jump'"):
        Instruction.from_parts({**instruction.to_parts(), "action": "jump"})
    for wrong in ({"messages.counts": [2]}, {"messages.counts": [-1]}, {"messages": ["text"]}, {"facts.values": ["x"]}):
        with pytest.raises(NodeAnswerError):
            NodeAnswer.from_parts({**answer.to_parts(), **wrong})
    for name in answer.to_parts():
        with pytest.raises(NodeAnswerError):
            NodeAnswer.from_parts({k: v for k, v in answer.to_parts().items() if k != name})
    arrays, parts = begun().to_parts()
    for name in parts:
        if name != "answer.session":
            with pytest.raises(StateError):
                NodeMemory.from_parts(arrays, {k: v for k, v in parts.items() if k != name})


def test_a_courier_keeps_count() -> None:
    """The algorithm by which the mailbox is judged: it would show a message that comes twice."""
    memory, _ = handle(Courier(), None, asked(1, "common"), None, START, LAYOUT)
    assert memory is not None
    assert memory.state["sent"].tolist() == [[0, 1, 1]]
    twice = (GossipMessage(1, 0, b"\x05"),) * 2
    memory, _ = handle(Courier(), memory, asked(2, inbox=twice), None, START, LAYOUT)
    assert memory is not None
    assert memory.state["got"].tolist() == [[1, 0, 5], [1, 0, 5]]
