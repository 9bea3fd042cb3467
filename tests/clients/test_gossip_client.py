"""The client half of decentralised learning: answers once, keeps its state in one piece, checks what it is told."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from gossip_toy import COUNTER, Pull, bits, client, grid, kept, made, model, strategy
from hypothesis import given, settings
from hypothesis import strategies as st
from message_examples import all_damages
from toy import with_halves

from fedcomp.clients.gossip import gossip_node
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import gossip
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.gossip import InstructionRecord
from fedcomp.flower.payload import PayloadError, put_frame
from fedcomp.flower.schema import Schema
from fedcomp.gossip.base import GossipMessage, Multicast, View
from fedcomp.gossip.errors import MessageError, NodeAnswerError, StaleInstruction
from fedcomp.gossip.node import NodeMemory
from fedcomp.gossip.protocol import Instruction, NodeAnswer
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout

SETUP = gossip.GossipSetup(made("sparse-push").to_config(), dense_below=12)
VIEW = View(1, 0, column={2: 0.5}, row={0: 0.5}, seed=7)


@pytest.fixture(autouse=True)
def identity() -> None:
    adopt_identity((1, 1, 1))


def node(partition: int = 1) -> Context:
    return Context(1, 2, {"partition-id": partition, "num-partitions": 4}, RecordDict(), {})


def message(instruction: Instruction, kind: str = gossip.EXCHANGE_TYPE, setup: gossip.GossipSetup = SETUP) -> Message:
    content = RecordDict()
    setup.put(content)
    gossip.put_instruction(content, instruction)
    if instruction.start in ("common", "empty"):
        content[gossip.MODEL] = model()
    return Message(content, 2, kind)


STARTING = Instruction("s", 1, 0, "step", VIEW, start="common")


def begin(serial: int = 1, start: str = "common", **more) -> Message:
    return message(Instruction("s", serial, 0, "step", VIEW, start=start, **more), gossip.START_TYPE)


def step(serial: int, iteration: int, **more) -> Message:
    view = View(1, iteration, column=VIEW.column, row=VIEW.row, seed=7)
    return message(Instruction("s", serial, 0, "step", view, **more))


def answer(reply: Message) -> NodeAnswer:
    return gossip.take_answer(reply)


def snapshot(context: Context) -> dict[str, object]:
    return {name: dict(record) for name, record in context.state.items()}


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return repr(a) == repr(b)


def test_the_same_instruction_again_gives_the_stored_answer_and_runs_nothing() -> None:
    problems: list[Pull] = []

    def problem(*_: object) -> Pull:
        problems.append(Pull(1))
        return problems[-1]

    app, context = with_halves([gossip_node(problem)]), node()
    first = answer(app(begin(), context))
    state = snapshot(context)
    assert answer(app(begin(), context)) == first
    assert same(snapshot(context), state)
    assert sum(p.calls for p in problems) == 1
    second = answer(app(step(2, 1), context))
    assert second.serial == 2
    assert answer(app(step(2, 1), context)) == second
    assert sum(p.calls for p in problems) == 2
    with pytest.raises(StaleInstruction, match="carried out instruction 2"):
        app(begin(), context)


def test_a_problem_that_raises_leaves_the_state_as_it_was() -> None:
    class Broken(Pull):
        def gradient(self, arrays, key):
            if int(arrays[COUNTER]) == 1:
                raise RuntimeError("out of memory")
            return super().gradient(arrays, key)

    app, context = with_halves([gossip_node(lambda *_: Broken(1))]), node()
    app(begin(), context)
    state = snapshot(context)
    with pytest.raises(RuntimeError, match="out of memory"):
        app(step(2, 1), context)
    assert same(snapshot(context), state)


def test_without_a_state_there_is_nothing_to_go_on_with() -> None:
    app, context = client(), node()
    assert answer(app(step(5, 4), context)).fresh
    assert not context.state
    app(begin(), context)
    # A copy of the state from before the last instruction: going on with it would send a share twice.
    assert answer(app(step(3, 2), context)).fresh
    assert not answer(app(step(2, 1), context)).fresh


def test_an_observation_changes_nothing_and_needs_no_gradient() -> None:
    app, context = client(), node()
    app(begin(), context)
    state = snapshot(context)
    asked = Instruction("s", 1, 0, "observe", View(1, 1, seed=7))
    reply = app(message(asked, gossip.OBSERVE_TYPE), context)
    assert same(snapshot(context), state)
    arrays = {name: array.numpy() for name, array in reply.content[gossip.MODEL].items()}
    assert list(arrays) == list(model())
    assert int(arrays[COUNTER]) == 1
    assert reply.content[gossip.FIGURES]["batches"] == 1.0
    assert set(answer(reply).facts) >= {"weight"}
    with pytest.raises(StateError, match="must not change anything"):
        app(message(Instruction("s", 2, 0, "step", VIEW), gossip.OBSERVE_TYPE), context)
    fresh = app(message(asked, gossip.OBSERVE_TYPE), node())
    assert answer(fresh).fresh
    assert gossip.MODEL not in fresh.content


def test_a_node_refuses_what_is_meant_for_another_vertex() -> None:
    with pytest.raises(StateError, match="vertex 3 of the graph and was told what vertex 1"):
        client()(begin(), node(3))


def test_a_node_without_a_partition_says_how_to_give_it_one() -> None:
    context = Context(1, 2, {}, RecordDict(), {})
    with pytest.raises(ConfigError, match="--node-config"):
        client()(Message(RecordDict(), 2, gossip.HELLO_TYPE), context)


def test_hello_says_the_vertex_and_keeps_nothing() -> None:
    context = node(3)
    reply = client()(Message(RecordDict({"config": ConfigRecord()}), 2, gossip.HELLO_TYPE), context)
    assert reply.content["fedcomp.node"]["partition-id"] == 3
    assert not context.state


def broken(change) -> Message:
    asked = begin()
    change(asked.content)
    return asked


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c[gossip.HEADER].update(shares=[0.5, 0.5]), "not a gossip instruction"),
        (lambda c: c.pop(gossip.MODEL), "no model"),
        (lambda c: put_frame(c, f"{gossip.HEADER}/inbox/0", b"x" * 9), "not a gossip instruction"),
        # What the entries of the inbox were once called: a server of an older checkout.
        (lambda c: c[gossip.HEADER].update({"mail.from": [1]}), "unknown entries"),
        (lambda c: c[gossip.SETUP].update(algorithm='{"name": "spars-push"}'), "did you mean 'sparse-push'"),
    ],
)
def test_what_is_no_instruction_is_refused_with_a_reason(change, said: str) -> None:
    context = node()
    with pytest.raises((PayloadError, MessageError, ConfigError), match=said):
        client()(broken(change), context)
    assert not context.state


@pytest.mark.parametrize("said", [SETUP, InstructionRecord.from_parts(STARTING.to_parts())], ids=["setup", "header"])
def test_a_damaged_instruction_is_refused_and_changes_nothing(said: Schema) -> None:
    context, app = node(), client()
    for what, content in all_damages(said):
        whole = begin().content
        for name in [name for name in whole if name.startswith(said.KEY)]:
            del whole[name]
        whole.update({name: record for name, record in content.items() if name.startswith(said.KEY)})
        with pytest.raises(PayloadError):
            print(what, app(Message(whole, 2, gossip.START_TYPE), context))
    assert not context.state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c[gossip.HEADER].update({"messages.counts": [2]}), "not an answer"),
        (lambda c: c[gossip.HEADER].update({"messages.to": [2, 3]}), "not an answer"),
        (lambda c: c[gossip.HEADER].update({"facts": ["a", "b"]}), "not an answer"),
        (lambda c: c[gossip.HEADER].update({"postings.to": [2]}), "unknown entries"),
    ],
)
def test_what_is_no_answer_is_refused_with_a_reason(change, said: str) -> None:
    reply = client()(begin(), node())
    change(reply.content)
    with pytest.raises((PayloadError, NodeAnswerError), match=said):
        answer(reply)


numbers = st.integers(0, 2**31 - 1)
messages = st.binary(min_size=1, max_size=40)
unit = st.floats(0, 1, exclude_min=True)


@settings(max_examples=25)
@given(
    st.dictionaries(numbers, unit, max_size=4),
    st.dictionaries(numbers, unit, max_size=4),
    st.lists(st.tuples(numbers, messages), max_size=4),
    st.lists(st.tuples(numbers, messages), max_size=3),
    st.sampled_from(["", "common", "empty", "reset"]),
    st.tuples(numbers, numbers, numbers, st.integers(0, 2**63 - 1), st.booleans()),
)
def test_instructions_survive_the_way_through_a_message(column, row, inbox, returned, start, rest) -> None:
    serial, iteration, me, seed, dense = rest
    view = View(me, iteration, column, row, seed, dense, frozenset(column))
    sent = Instruction(
        "session",
        serial,
        0,
        "step",
        view,
        tuple(GossipMessage(j, me, data) for j, data in inbox),
        tuple(GossipMessage(me, j, data) for j, data in returned),
        start,
    )
    content = RecordDict()
    gossip.put_instruction(content, sent)
    assert gossip.take_instruction(Message(content, 1, "train")) == sent


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.lists(numbers, min_size=1, max_size=3), messages), max_size=4),
    st.lists(st.tuples(numbers, st.text(max_size=9)), max_size=3),
    st.dictionaries(st.text(min_size=1, max_size=8), st.floats(allow_nan=False), max_size=3),
    st.booleans(),
)
def test_answers_survive_the_way_through_a_message(multicasts, needs, facts, fresh) -> None:
    said = NodeAnswer(
        "session",
        3,
        tuple(Multicast(tuple(to), data) for to, data in multicasts),
        tuple(j for j, _ in needs),
        tuple(reason for _, reason in needs),
        "",
        facts,
        fresh,
    )
    content = RecordDict()
    gossip.put_answer(content, said)
    assert answer(Message(content, 1, "train")) == said


def test_a_memory_survives_the_context_to_the_bit() -> None:
    arrays = {
        "x": np.array([1.5, -0.0, np.inf], np.float64),
        "flag": np.array(True),
        "none": np.empty(0, np.float32),
        "seq": np.array(7, np.int64),
        "u": np.arange(6, dtype=np.float32).reshape(2, 3),
    }
    said = NodeAnswer("s", 4, (Multicast((2, 3), b"abc"), Multicast((4,), b"d")), (1,), ("",), facts={"a": 0.5})
    named = {name: array.numpy() for name, array in model().items()}
    layout = Layout.of(named, GossipPolicy(12))
    own = {COUNTER: np.array(9, np.int64)}
    context = node()
    gossip.NodeStore(NodeMemory("s", 4, 1, arrays, said, np.ones(3)), layout, own).save(context)
    shorter = NodeAnswer("s", 5, (Multicast((2,), b"z"),))
    for expected in (said, shorter):
        found = gossip.NodeStore.load(context)
        assert found is not None
        assert (found.memory.answer, found.layout, found.memory.epoch) == (expected, layout, 1)
        assert bits(found.memory.state) == bits(arrays)
        assert bits(found.own) == bits(own)
        # A shorter answer leaves nothing of the longer one behind.
        gossip.NodeStore(NodeMemory("s", 4, 1, arrays, shorter, np.ones(3)), layout, own).save(context)
    context.state["fedcomp.gossip.memory.arrays/own"] = ArrayRecord({"[]": next(iter(model().values()))})
    with pytest.raises(StateError, match="cannot be read"):
        gossip.NodeStore.load(context)


def test_closing_iterations_load_no_data() -> None:
    """A deployment starts a process per message; what needs no gradient must not pay for one."""
    loaded: list[int] = []

    def problem(message: Message, context: Context, setup: gossip.GossipSetup) -> Pull:
        loaded.append(int(message.content.config_records["config"]["server-round"]))
        return Pull(int(context.node_config["partition-id"]))

    relay, over = strategy("sgp", skew_rounds=2), grid(with_halves([gossip_node(problem)]))
    with over.inner:
        relay.start(over, model(), num_rounds=2)
    # Two iterations and one observation of every node; the closing ones and the last delivery came without.
    assert len(loaded) == 4 * (2 + 1)
    assert [int(kept(over, p).own[COUNTER]) for p in range(4)] == [2] * 4
