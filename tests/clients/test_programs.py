"""The client half of compression, one message at a time: what it remembers, repeats, puts back and refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from message_examples import all_damages
from toy import in_bfloat16

from fedcomp.adapters import nearest
from fedcomp.clients import memory
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.memory import BLOB, Held, Memory
from fedcomp.clients.programs import Brings, Brought, bringing
from fedcomp.codecs import QSGD, Codec, ErrorFeedback, Identity, State, TopK, get_codec
from fedcomp.errors import FedcompError
from fedcomp.exact import decode_exact
from fedcomp.flower import asks
from fedcomp.flower._private import acting_as
from fedcomp.flower.asks import BLOBS_KEPT, AnswerHead, AskHead, digest_of, named
from fedcomp.flower.payload import BLOB as BLOBS
from fedcomp.flower.payload import EXACT, FRAME, NODE_RECORD, STEP
from fedcomp.flower.privacy import PRIVATE
from fedcomp.flower.protocol import RESYNC, STALE
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.schema import OtherVersion, SchemaError
from fedcomp.layout import NONE_DENSE, Layout, Update, Vector, policy_config
from fedcomp.privacy.local import Privatise
from fedcomp.program import HELLO, Answer, Ask, Me, Now, Round, Said, System
from fedcomp.rng import Key
from fedcomp.rules import Int, Made, Text
from fedcomp.stateful import next_epoch
from fedcomp.systems import SYSTEMS
from fedcomp.systems.forward import Forward, Measure
from fedcomp.systems.pair import Pair
from fedcomp.versions import Broadcast
from fedcomp.wire import Frame

SHAPES = {"weight": (40, 30), "bias": (12,)}
LAYOUT = Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
PAIR = Pair(ErrorFeedback(TopK(density=0.05)))


@dataclass(frozen=True, repr=False, eq=False)
class Part(Said):
    """Which part of what waits is asked for."""

    part: Annotated[int, Int(0, 9)] = 0


@dataclass(frozen=True, repr=False, eq=False)
class Later(System, id="later"):
    """Updates wait in the memory; what a query asks for leaves, scaled by a table that everybody has."""

    SAYS: ClassVar[tuple[type[Said], ...]] = (Part,)
    SHARED: ClassVar[tuple[str, ...]] = ("own",)

    codec: Annotated[Codec, Made(get_codec)]

    def start(self, layout: Layout) -> State:
        return {"memory": np.zeros(layout.size, np.float32)}

    def round(self, now: Now) -> Round:
        first = yield [Ask(node) for node in now.nodes]
        answers = yield [Ask(a.node, "query", Part(), blobs={"table": b"table"}) for a in first]
        return now.mean_of(self.codec, answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        held = memory["memory"]
        if ask.kind == "train":
            return {"memory": held + me.update().vector}, Answer(me.node, say=Part(7), frames={"own": b"mine"})
        if ask.blobs.get("table") != b"table":
            raise FedcompError("what waits is read by a table")
        frame, _ = self.codec.encode(Update(held, me.layout), {}, me.key)
        return {"memory": held - self.codec.decode(frame, me.layout)}, Answer(me.node, frames={"values": frame})

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        return {"memory": memory["memory"] + self.codec.decode(frame, layout)}

    def residual(self, memory: State, layout: Layout) -> Vector:
        return memory["memory"]

    def reads(self, blobs: dict[str, Frame], number: int, layout: Layout) -> Codec:
        assert blobs["table"] == b"table"
        return self.codec

    def after(self, frame: Frame, blobs: dict[str, Frame], number: int, seed: int, layout: Layout) -> dict[str, Frame]:
        return {"table": b"after %d" % number}


LATER = Later(TopK(density=0.05))
TABLE = {"table": digest_of(b"table")}


@pytest.fixture(autouse=True)
def a_system_of_two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedcomp.systems.later", sys.modules[__name__])
    monkeypatch.setitem(SYSTEMS, "later", "later:Later")  # type: ignore[arg-type]
    monkeypatch.setitem(SYSTEMS, "greeted", "later:Greeted")  # type: ignore[arg-type]


def model(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({name: Array(np.full(shape, value, np.float32)) for name, shape in SHAPES.items()})


def change(seed: int) -> dict[str, np.ndarray]:
    """Return integers, so that float32 sums are exact."""
    found = {}
    for layer, (name, shape) in enumerate(SHAPES.items()):
        words = Key(seed, "programs", layer).bits(int(np.prod(shape))) % np.uint64(2001)
        found[name] = (words.astype(np.int64) - 1000).astype(np.float32).reshape(shape)
    return found


@dataclass
class Node:
    """A client that is asked by hand, and what its server knows of it."""

    system: System = PAIR
    half: Any = field(default_factory=compression)
    app: Callable[[Message, Context], Message] | None = None
    sequence: int = 0
    consumed: int = 0
    generation: int = 0
    seed: int = 0
    trained: int = 0
    seen: RecordDict = field(default_factory=RecordDict)
    made: Vector = field(default_factory=lambda: np.zeros(LAYOUT.size, np.float32))
    delivered: Vector = field(default_factory=lambda: np.zeros(LAYOUT.size, np.float32))
    context: Context = field(
        default_factory=lambda: Context(1, 2, {"partition-id": 3, "num-partitions": 9}, RecordDict(), {})
    )

    def train(self, msg: Message, context: Context) -> Message:
        """Add the next change to the model."""
        self.trained += 1
        self.seen = msg.content
        if self.app is not None:
            return self.app(msg, context)
        step = change(self.trained)
        self.made += LAYOUT.flatten(step)
        old = to_arrays(msg.content["arrays"])
        arrays = to_record({name: old[name] + step[name] for name in old})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5, "loss": 0.5})}), reply_to=msg
        )

    def head(self, number: int = 1, **fields: Any) -> AskHead:
        """Return the head of the next message."""
        self.sequence += 1
        own = {"model": "arrays", "cast": not self.system.whole} | fields
        own = {"session": b"session!", "sequence": self.sequence, "system": self.system.to_config()} | own
        return AskHead(number=number, seed=5, consumed=self.consumed, generation=self.generation, **own)

    def send(
        self, head: AskHead, kind: str = "train", arrays: ArrayRecord | None = None, say=None, data=None
    ) -> Message:
        """Return the node's reply to a message."""
        content = RecordDict({"config": ConfigRecord({"server-round": head.number, "lr": 0.5})})
        if not kind.startswith("query") and not head.base:
            content = RecordDict({"arrays": model() if arrays is None else arrays, **content})
        asks.put(content, head, say, data or {})
        return self.deliver(content, kind)

    def deliver(self, content: RecordDict, kind: str = "train") -> Message:
        """Return the node's reply to a message with this content."""
        with acting_as(1, 0):
            message = Message(content, 2, kind)
        with acting_as(1, 2):
            return self.half.mod(message, self.context, self.train)

    def ask(self, number: int = 1, kind: str = "train", arrays: ArrayRecord | None = None, **fields: Any) -> Message:
        """Send the next message; one of a query has the table."""
        if kind == "query":
            fields = {"say": "Part", "blobs": named(TABLE)} | fields
            return self.send(self.head(number, **fields), kind, None, Part(), {BLOBS + TABLE["table"]: b"table"})
        return self.send(self.head(number, **fields), kind, arrays)

    def consume(self, reply: Message) -> AnswerHead:
        """Use the frame of a reply."""
        found = answer(reply)
        self.delivered += self.system.codec.decode(frames(reply)["values"], LAYOUT)
        self.consumed, self.generation = found.sequence, found.generation
        return found

    def conserves(self) -> bool:
        """Whether what was made is what was delivered and what is remembered, as the next message finds it."""
        head = self.head(99)
        self.sequence -= 1
        held = Memory.begin(self.context, head, self.system, LAYOUT, bytes(16))
        owed = self.system.residual(held.state, LAYOUT)
        return np.array_equal(self.made, self.delivered + owed)

    def copy(self) -> Node:
        """Return the node as it is now."""
        state = RecordDict(dict(self.context.state.items()))
        context = Context(1, self.context.node_id, self.context.node_config, state, {})
        return replace(self, context=context, made=self.made.copy(), delivered=self.delivered.copy())


def brings(system: str, data: Brings) -> ClientHalf:
    """Return a half that brings something to a system, around that of programs."""
    outer, inner = bringing("brings", system, data), compression()
    return ClientHalf("both", lambda msg, context, app: outer.mod(msg, context, lambda m, c: inner.mod(m, c, app)))


def answer(reply: Message) -> AnswerHead:
    assert not reply.has_error(), reply.error
    found = asks.find_answer(reply.content)
    assert found is not None
    return found


def frames(reply: Message) -> dict[str, Frame]:
    return asks.data_in(reply.content, FRAME)


def reason(reply: Message) -> str:
    assert reply.has_error()
    return reply.error.reason


def stored(node: Node) -> dict[str, Any]:
    return dict(node.context.state.items())


# What an answer is.


def test_an_answer_says_who_and_what_and_leaves_the_model_out() -> None:
    node = Node()
    reply = node.ask(3)
    assert answer(reply) == AnswerHead(
        3, sequence=1, generation=1, record="arrays", state="begun", memory=pytest.approx(0.9, abs=0.1)
    )
    assert list(reply.content) == ["metrics", NODE_RECORD]
    frame, state = PAIR.codec.encode(Update(node.made, LAYOUT), PAIR.start(LAYOUT), Key(5, "uplink", 3, 3))
    assert frames(reply) == {"values": frame}
    held = to_arrays(node.context.state[memory.MEMORY])
    assert {name: array.tobytes() for name, array in held.items()} == {k: v.tobytes() for k, v in state.items()}
    # The app was given what a strategy sends, and nothing of the ask.
    assert dict(node.seen["config"]) == {"server-round": 3, "lr": 0.5}
    assert list(node.seen) == ["arrays", "config"]
    node.consume(reply)
    assert node.conserves()


def test_a_message_without_an_ask_passes_untouched() -> None:
    node = Node()
    content = RecordDict({"arrays": model(), "config": ConfigRecord({"lr": 0.5})})
    reply = node.deliver(content)
    assert list(reply.content) == ["arrays", "metrics"]
    assert node.seen is content
    assert not node.context.state


def test_a_whole_model_and_exact_buffers_travel_as_values() -> None:
    wide = {"a": np.float64([0.1, 1e300]), "n": np.array(4), "w": np.float32([1, 2, 3])}

    def app(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": to_record({k: v + 1 for k, v in wide.items()})}), reply_to=msg)

    node = Node(Pair(Identity()), app=app)
    reply = node.ask(arrays=to_record(wide))
    layout = Layout.of(wide, cast_floats=False)
    buffers = decode_exact(asks.data_in(reply.content, EXACT)[""], layout)
    assert buffers["n"] == 5
    assert buffers["a"].tobytes() == (wide["a"] + 1).tobytes()
    np.testing.assert_array_equal(node.system.codec.decode(frames(reply)["values"], layout), [2, 3, 4])
    # Nothing is remembered, so nothing is kept of the answer, which is as large as the model.
    assert answer(reply).generation == 0
    assert list(node.context.state) == [Held.KEY]


def test_of_several_records_the_one_called_as_the_models_is_the_model() -> None:
    def app(msg: Message, context: Context) -> Message:
        content = {"first": model(5.0), "arrays": model(2.0), "third": model(6.0)}
        return Message(RecordDict({name: content[name] for name in records}), reply_to=msg)

    node, records = Node(Pair(Identity()), app=app), ["first", "arrays", "third"]
    reply = node.ask(arrays=model(1.0))
    assert answer(reply).record == "arrays"
    assert list(reply.content) == ["first", "third", NODE_RECORD]
    np.testing.assert_array_equal(node.system.codec.decode(frames(reply)["values"], LAYOUT), np.full(LAYOUT.size, 2))
    # A single one may be called as it likes.
    records = ["third"]
    assert answer(node.ask(2, arrays=model(1.0))).record == "third"
    for records in (["first", "third"], []):
        with pytest.raises(FedcompError, match=f"holds {len(records)} ArrayRecords"):
            node.ask(3)


def test_a_reply_of_another_model_changes_nothing() -> None:
    node = Node()
    node.consume(node.ask(1))
    before = stored(node)
    for arrays in ({"weight": np.ones((40, 30), np.float32)}, {"weight": np.ones((4, 3)), "bias": np.ones(12)}):
        node.app = lambda msg, context, arrays=arrays: Message(RecordDict({"a": to_record(arrays)}), reply_to=msg)
        with pytest.raises(FedcompError, match="must hold the same model"):
            node.ask(2)
    assert stored(node) == before


@pytest.mark.parametrize("short", ["bfloat16", "float16"])
def test_a_model_of_sixteen_bits_counts_as_the_change_to_the_nearest_one(short: str) -> None:
    given = {"w": np.float32([1.0, 1.001, -2.0, 3.0, -1e30])}
    rounded = nearest(given["w"], short)
    moved = rounded + np.float32([0, 0.5, 0, -1, 0])
    assert np.abs(given["w"] - rounded).max() > 1e-4

    def app(msg: Message, context: Context) -> Message:
        assert msg.content["arrays"]["w"].dtype == "float32"
        with np.errstate(over="ignore"):
            array = in_bfloat16(moved) if short == "bfloat16" else Array(moved.astype(np.float16))
        return Message(RecordDict({"arrays": ArrayRecord({"w": array})}), reply_to=msg)

    node = Node(Pair(ErrorFeedback(QSGD(levels=32_767))), app=app)
    layout = Layout.of(given)
    reply = node.ask(arrays=to_record(given))
    found = (
        node.system.codec.decode(frames(reply)["values"], layout)
        + to_arrays(node.context.state[memory.MEMORY])["memory"]
    )
    np.testing.assert_allclose(found, [0, 0.5, 0, -1, 0], atol=1e-6)


# The transaction, row by row.


def test_a_lost_answer_comes_back_with_the_options_that_made_it() -> None:
    node = Node()
    node.consume(node.ask(1))
    node.ask(2)
    node.system = Pair(ErrorFeedback(TopK(density=0.5)))
    assert node.conserves(), "before it is used, the memory of the lost frame is whole"
    reply = node.ask(3)
    assert answer(reply).state == "rolled back"
    node.consume(reply)
    assert node.conserves()


@pytest.mark.parametrize("system", [PAIR, Pair(TopK(density=0.05))], ids=["memory", "none"])
def test_an_older_message_is_refused_and_changes_nothing(system: System) -> None:
    node = Node(system)
    old = node.head(1)
    node.ask(2)
    before = stored(node)
    assert reason(node.send(old)).startswith(f"{STALE}: this node already answered message 2; message 1")
    assert stored(node) == before
    assert node.trained == 1


def test_an_error_of_the_app_goes_back_as_it_is_and_changes_nothing() -> None:
    node = Node()
    node.consume(node.ask(1))
    before = stored(node)
    node.app = lambda msg, context: Message(Error(7, "no data today"), reply_to=msg)
    reply = node.ask(2)
    assert (reply.error.code, reply.error.reason) == (7, "no data today")
    node.app = lambda msg, context: 1 / 0
    with pytest.raises(ZeroDivisionError):
        node.ask(3)
    for value in (np.nan, np.inf):
        node.app = lambda msg, context, value=value: Message(RecordDict({"arrays": model(value)}), reply_to=msg)
        for node.system in (PAIR, LATER):
            with pytest.raises(FedcompError, match="non-finite"):
                node.ask(4)
    assert stored(node) == before


def test_a_wiped_node_begins_anew_under_the_messages_number() -> None:
    node = Node()
    first = node.consume(node.ask(1))
    assert (first.generation, first.state) == (1, "begun")
    assert answer(node.ask(2)).generation == 1
    node.context.state = RecordDict()
    node.made[:] = node.delivered[:] = 0
    reply = node.ask(3)
    assert (answer(reply).generation, answer(reply).state) == (3, "begun")
    # What the server last consumed was of the memory before: it says nothing of this one.
    assert answer(node.ask(4)).state == "rolled back"
    assert node.conserves()


def test_an_older_copy_of_the_state_sends_nothing_twice() -> None:
    node = Node()
    node.consume(node.ask(1))
    old = node.copy()
    node.consume(node.ask(2))
    node.context = old.context
    found = Memory.begin(node.context, node.head(3), PAIR, LAYOUT, bytes(16))
    assert found.what == "begun"
    assert not any(array.any() for array in found.state.values())
    # Of a memory that began later; an acknowledgement of an earlier one says nothing about this one.
    node.consumed, node.generation = 2, 2
    assert Memory.begin(node.context, node.head(3), PAIR, LAYOUT, bytes(16)).what == "begun"
    node.consumed, node.generation = 2, 0
    assert Memory.begin(node.context, node.head(3), PAIR, LAYOUT, bytes(16)).what == "rolled back"


@pytest.mark.parametrize(
    "changed",
    [
        {"session": b"another!"},
        {"system": Pair(ErrorFeedback(QSGD(levels=4))).to_config()},
        {"policy": {"patterns": ["bias"]}},
    ],
    ids=["session", "system", "layout"],
)
def test_another_session_system_or_layout_begins_anew(changed: dict) -> None:
    node = Node()
    node.ask(1)
    assert answer(node.ask(2, **changed)).state == "begun"
    assert answer(node.ask(3, **changed)).state == "rolled back"


def test_memory_survives_other_options_of_the_same_system() -> None:
    node = Node()
    node.consume(node.ask(1))
    node.system = Pair(ErrorFeedback(TopK(density=0.5), momentum=0.9, masking=False))
    reply = node.ask(2)
    assert answer(reply).state == ""
    assert "momentum" in to_arrays(node.context.state[memory.MEMORY])


def test_a_node_under_another_id_does_not_send_again_what_may_have_arrived() -> None:
    node = Node()
    reply = node.ask(1)
    node.context.node_id = 77
    other = node.copy()
    again = node.ask(2)
    assert answer(again).state == ""
    assert "whether its last update was used is not known here" in answer(again).remark
    node.delivered += LATER.codec.decode(frames(reply)["values"], LAYOUT)
    node.consume(again)
    assert node.conserves()
    # Where the server knows it, by partition, it goes on as it is told.
    other.consumed, other.generation = 1, 1
    assert answer(other.ask(2)).state == ""
    other.consumed, other.generation = 1, 1
    assert answer(other.ask(3)).state == "rolled back"


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in Held.entries()])
@pytest.mark.parametrize("value", [None, "x", 7, b"x", [1]], ids=repr)
def test_a_damaged_description_begins_the_memory_anew(name: str, value: Any) -> None:
    node = Node()
    node.ask(1)
    record = node.context.state[Held.KEY]
    del record[name]
    if value is not None:
        record[name] = value
    reply = node.ask(2)
    if not (value == 7 and name in ("sequence", "number", "trained", "generation", "sent", "before", "length")):
        assert answer(reply).state == "begun"
        assert not node.ask(3).has_error()


# Restarted servers.


def restart(node: Node, saved: Node) -> None:
    """Let the server be what it was when ``saved`` was copied."""
    node.sequence, node.consumed, node.generation = next_epoch(saved.sequence), saved.consumed, saved.generation


def test_a_restarted_server_gets_the_answer_to_the_round_that_it_makes_again() -> None:
    node = Node()
    node.consume(node.ask(1))
    saved = node.copy()
    reply = node.ask(2, arrays=model(1.0))
    for number, arrays, state in ((2, model(2.0), "rolled back"), (3, model(1.0), "rolled back")):
        other = node.copy()
        restart(other, saved)
        assert answer(other.ask(number, arrays=arrays)).state == state
    restart(node, saved)
    again = node.ask(2, arrays=model(1.0))
    assert frames(again) == frames(reply)
    assert again.content["metrics"] == reply.content["metrics"]
    assert answer(again) == replace(answer(reply), sequence=node.sequence, state="repeated")
    assert node.trained == 2
    node.sequence -= 1
    assert node.ask(2, arrays=model(1.0)).content == again.content
    node.consume(again)
    assert node.conserves()
    node.consume(node.ask(3))
    assert node.conserves()


@pytest.mark.parametrize("queried", [False, True])
def test_a_round_of_several_exchanges_is_made_again_from_the_memory_that_it_began_with(queried: bool) -> None:
    node = Node(LATER)
    node.ask(1)
    node.consume(node.ask(1, "query"))
    # A lost round before, so that the memory is rolled back as the round begins.
    node.ask(2)
    node.ask(2, "query")
    saved = node.copy()
    expected = saved.copy()
    wanted = expected.ask(3, arrays=model(1.0)), expected.ask(3, "query")
    node.ask(3, arrays=model(1.0))
    if queried:
        node.ask(3, "query")
    restart(node, saved)
    # The same training again, as a deterministic app does it.
    node.trained, node.made = saved.trained, saved.made.copy()
    trained = node.ask(3, arrays=model(1.0))
    assert answer(trained).state == ""
    last = node.ask(3, "query")
    assert frames(last) == frames(wanted[1])
    node.consume(last)
    assert node.conserves()
    node.ask(4)
    node.consume(node.ask(4, "query"))
    assert node.conserves()


def test_a_round_that_the_server_has_consumed_is_not_made_again() -> None:
    node = Node(LATER)
    saved = node.copy()
    node.ask(1, arrays=model(1.0))
    node.consume(node.ask(1, "query"))
    node.sequence = next_epoch(saved.sequence)
    node.ask(1, arrays=model(1.0))
    node.consume(node.ask(1, "query"))
    assert node.conserves()


def test_a_model_is_named_by_its_values_bits_and_shapes_or_by_its_digest() -> None:
    head = AskHead(number=1, seed=0, session=b"session!", sequence=1)
    values = np.arange(100_000, dtype=np.float32)
    other, tail = values.copy(), values.copy()
    # Of a large tensor a part is looked at: a change of a hundredth of it is seen.
    other[Key(3).bits(1000) % np.uint64(values.size)] += 1
    tail[-1] += 1
    models = [values, other, tail, values[::-1], -values, values.reshape(10, -1), values.astype(np.float64)]
    assert len({memory.asked_of(head, {"a": each}) for each in models}) == len(models)
    assert memory.asked_of(head, {"a": values.copy()}) == memory.asked_of(head, {"a": values})
    assert memory.asked_of(head, {"a": values}) != memory.asked_of(replace(head, number=2), {"a": values})
    named = replace(head, digest=b"d" * 16)
    assert memory.asked_of(named, {"a": values}) == memory.asked_of(named, {"a": other})
    assert memory.asked_of(named, {}) != memory.asked_of(replace(head, digest=b"e" * 16), {})


# Queries and blobs.


def test_the_memorys_length_is_reported_with_what_was_sent_of_an_update_alone() -> None:
    node = Node(LATER)
    assert answer(node.ask(1)).memory == -1.0, "nothing was sent"
    reply = node.ask(1, "query")
    owed = to_arrays(node.context.state[memory.MEMORY])["memory"].astype(np.float64)
    made = np.linalg.norm(LAYOUT.flatten(change(1)).astype(np.float64))
    assert answer(reply).memory == pytest.approx(np.linalg.norm(owed) / made, rel=1e-6)
    node = Node(app=lambda msg, context: Message(RecordDict({"arrays": model()}), reply_to=msg))
    found = answer(node.ask(1))
    assert found.memory == -1.0, "nothing changed"
    assert found.unchanged == (0, 1)


def test_a_query_answers_the_round_that_was_trained_for_alone() -> None:
    node = Node(LATER)
    assert "this node has no update" in reason(node.ask(1, "query"))
    node.ask(1)
    before = stored(node)
    assert "this node has no update" in reason(node.ask(2, "query"))
    assert "this node has no update" in reason(node.ask(1, "query", session=b"another!"))
    assert "this node has no update" in reason(node.ask(1, "query", system=PAIR.to_config()))
    node.consumed, node.generation = 3, 2
    assert "this node has no update" in reason(node.ask(1, "query")), "an older copy of the memory"
    assert stored(node) == before
    node.consumed = node.generation = 0
    reply = node.ask(1, "query")
    assert answer(reply).memory > 0
    node.consume(reply)
    assert node.conserves()


def test_a_blob_that_lacks_is_asked_for_in_the_same_exchange() -> None:
    node = Node(LATER)
    node.ask(1)
    before = stored(node)
    head = node.head(1, say="Part", blobs=named(TABLE))
    for data in ({}, {BLOBS + TABLE["table"]: b"tampered"}):
        reply = node.send(head, "query", None, Part(), data)
        assert answer(reply) == AnswerHead(3, sequence=2, lacks=(TABLE["table"],))
    assert stored(node) == before
    reply = node.send(head, "query", None, Part(), {BLOBS + TABLE["table"]: b"table"})
    node.consume(reply)
    # From then on it is there, as is what the node made itself.
    node.ask(2)
    assert frames(node.send(node.head(2, say="Part", blobs=named(TABLE)), "query", None, Part())).keys() == {"values"}
    assert BLOB + digest_of(b"mine") in node.context.state


def test_the_newest_blobs_are_kept() -> None:
    state = RecordDict()
    blobs = [b"%d" % i for i in range(BLOBS_KEPT + 3)]
    memory.keep_blobs(state, {digest_of(data): data for data in blobs})
    memory.keep_blobs(state, {digest_of(blobs[3]): blobs[3]})
    assert [key.removeprefix(BLOB) for key in state] == [digest_of(data) for data in [*blobs[4:], blobs[3]]]


@pytest.mark.parametrize(
    ("fields", "say"),
    [
        ({"say": "Part"}, None),
        ({"say": "Whole"}, Part(1)),
        ({"blobs": ("table",)}, None),
        ({"blobs": ("table:" + "0" * 31,)}, None),
    ],
)
def test_words_and_names_that_break_a_rule_change_nothing(fields: dict, say: Said | None) -> None:
    node = Node(LATER)
    node.ask(1)
    before = stored(node)
    with pytest.raises(FedcompError):
        node.send(node.head(2, **fields), "train", None, say)
    assert stored(node) == before
    assert node.trained == 1


@pytest.mark.slow
def test_heads_that_break_a_rule_are_refused_and_change_nothing() -> None:
    node = Node()
    node.consume(node.ask(1))
    before = stored(node)
    head = replace(
        node.head(2),
        policy={"min_size": 3},
        version=8,
        base=7,
        digest=b"d" * 16,
        steps=("8 1",),
        blobs=("a:" + "0" * 32,),
    )
    head = replace(head, downlink=TopK(density=0.5).to_config(), say="Part")
    broken = 0
    for what, content in all_damages(head):
        content["arrays"] = model()
        try:
            # What does not say of which version it is, or of another one, is no ask of this half.
            asks.find_ask(content)
        except OtherVersion:
            continue
        except SchemaError:
            broken += 1
        else:
            continue
        with pytest.raises(SchemaError):
            print(what, node.deliver(content))
    assert broken > 100
    assert stored(node) == before
    assert node.trained == 1


def test_an_ask_without_a_number_or_a_system_is_refused() -> None:
    node = Node()
    with pytest.raises(SchemaError, match="without a sequence number"):
        node.ask(1, sequence=0)
    assert "does not name the system" in reason(node.ask(1, system={}))
    assert not node.context.state


# The model on its way down.


def published(broadcast: Broadcast, arrays: dict[str, np.ndarray]) -> None:
    layout = Layout.of(arrays)
    broadcast.publish(layout.flatten(arrays), {}, layout, Key(0, "downlink", broadcast.version))


def down(node: Node, broadcast: Broadcast, base: int, kind: str = "train", number: int = 1, **fields: Any) -> Message:
    fields = {"downlink": broadcast.codec.to_config(), "version": broadcast.version, "base": base} | fields
    head = node.head(number, **({"digest": broadcast.digest} | fields))
    steps = broadcast.steps_from(base) or [] if base else []
    layout = LAYOUT
    whole = to_record(layout.unflatten(broadcast.reference, {}))
    return node.send(head, kind, whole, None, {f"{STEP}{step.version}": step.frame for step in steps})


@pytest.mark.parametrize(
    ("base", "fields", "why"),
    [
        (1, {"digest": b"another" * 2}, "digests differ"),
        (1, {"version": 4}, "lacks step 3"),
        (2, {}, "a full model is needed"),
        (0, {"model": "weights"}, "no ArrayRecord 'weights'"),
        (0, {"downlink": {}, "model": "weights"}, "no ArrayRecord 'weights'"),
    ],
)
def test_a_model_that_cannot_be_had_is_asked_for_whole_and_changes_nothing(base: int, fields: dict, why: str) -> None:
    node, broadcast = Node(), Broadcast(TopK(density=0.3))
    arrays = to_arrays(model(1.0))
    published(broadcast, arrays)
    wiped = node.copy()
    down(node, broadcast, 0)
    before, trained = stored(node), node.trained
    published(broadcast, {name: array + change(9)[name] for name, array in arrays.items()})
    if base == 2:
        published(broadcast, {name: array + change(8)[name] for name, array in arrays.items()})
    found = reason(down(node, broadcast, base, number=2, **fields))
    assert found.startswith(RESYNC)
    assert why in found
    assert stored(node) == before
    assert node.trained == trained
    assert "holds no model" in reason(down(wiped, broadcast, 1))


def test_a_step_of_the_system_is_read_by_its_blobs_and_what_follows_from_it_is_kept() -> None:
    node, broadcast = Node(LATER), Broadcast(Identity())
    published(broadcast, to_arrays(model(1.0)))
    down(node, broadcast, 0)
    frame, _ = LATER.codec.encode(Update(LAYOUT.flatten(change(4)), LAYOUT), {}, Key(1))
    broadcast.push(frame, LATER.codec, {}, LAYOUT)
    steps = (asks.OwnStep(2, 6, TABLE).to_text(),)
    fields = {
        "downlink": broadcast.codec.to_config(),
        "version": 2,
        "base": 1,
        "digest": broadcast.digest,
        "steps": steps,
    }
    lost = node.copy()
    head = node.head(2, **fields)
    node.send(head, "train", None, None, {STEP + "2": frame, BLOBS + TABLE["table"]: b"table"})
    np.testing.assert_array_equal(LAYOUT.flatten(to_arrays(node.seen["arrays"])), broadcast.reference)
    assert BLOB + digest_of(b"after 6") in node.context.state
    assert "lacks the table" in reason(lost.send(lost.head(2, **fields), "train", None, None, {STEP + "2": frame}))
    # Whoever may not use the system cannot read its steps either, and is sent the whole model.
    lost.half = compression(["identity", "topk"])
    for kind in ("train", "evaluate"):
        why = reason(lost.send(lost.head(2, **fields), kind, None, None, {STEP + "2": frame}))
        assert why.startswith(RESYNC)
        assert "accepts the codecs ['identity', 'pair', 'topk'], not ['later']" in why


def test_what_an_app_brings_stands_for_its_training() -> None:
    """Buffers stay as they are, metrics are what was brought; a private round, where an update leaves, gets nothing."""
    seen: list[RecordDict] = []

    def data(msg: Message, context: Context) -> Brought:
        def measures(me: Me, directions: Any) -> np.ndarray:
            seen.append(msg.content)
            app.reply["metrics"] = MetricRecord({"num-examples": 5})
            return np.arange(float(len(list(directions))))

        app = Brought(measures)
        return app

    wide = {"n": np.array(4), "w": np.zeros(64, np.float32)}
    layout = Layout.of(wide, NONE_DENSE)
    node = Node(Forward(directions=3), half=brings("forward", data))
    fields = {"say": "Measure", "policy": policy_config(NONE_DENSE, layout)}
    reply = node.send(node.head(**fields), arrays=to_record(wide), say=Measure(0.5))
    assert answer(reply) == AnswerHead(3, sequence=1, record="arrays", say="Measured")
    assert list(reply.content) == ["metrics", NODE_RECORD]
    assert decode_exact(asks.data_in(reply.content, EXACT)[""], layout)["n"] == 4
    products = node.system.codec.frame_of_products(-0.5 * np.arange(3.0), layout, Key(5, "uplink", 1, 3))
    assert frames(reply) == {"values": products}
    assert dict(seen[0]["config"]) == {"server-round": 1, "lr": 0.5}
    assert node.trained == 0
    content = RecordDict({"arrays": to_record(wide), "config": ConfigRecord({PRIVATE: True})})
    asks.put(content, node.head(2, **fields), Measure(0.5))
    assert node.deliver(content).has_error()
    assert len(seen) == 1


@dataclass(frozen=True, repr=False, eq=False)
class Word(Said):
    """How many numbers a node remembers, and what its app brings."""

    known: Annotated[int, Int(absent=0)] = 0
    brought: Annotated[str, Text(4096)] = ""


@dataclass(frozen=True, repr=False, eq=False)
class Greeted(Pair, id="greeted"):
    """A pair that says hello, and of which nodes train in odd rounds alone."""

    SAYS: ClassVar[tuple[type[Said], ...]] = (Word,)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if ask.kind == HELLO:
            assert me.data is None or not me.layout.size or me.layout == LAYOUT
            return {}, Answer(me.node, say=Word(sum(array.size for array in memory.values()), me.data or ""))
        return super().client(memory, ask, me) if me.number % 2 else (memory, Answer(me.node, say=Word()))


GREETED = Greeted(ErrorFeedback(TopK(density=0.1)))


def test_a_hello_is_answered_in_words_and_changes_nothing() -> None:
    """Also before any training; it shows the memory of the last round, and what the app brings."""
    node = Node(GREETED, half=brings("greeted", lambda msg, context: Brought(str(sorted(msg.content)))))

    def hello() -> Word:
        before = stored(node)
        reply = node.send(node.head(1, model="", say="Word"), HELLO, say=Word())
        assert answer(reply) == AnswerHead(3, sequence=node.sequence, say="Word")
        assert stored(node) == before
        found = asks.say_of(reply.content, answer(reply), GREETED)
        assert isinstance(found, Word)
        return found

    first = hello()
    assert (first.known, first.brought) == (0, "['config']")
    node.consume(node.ask(1))
    known = hello().known
    assert known >= LAYOUT.size
    other = node.send(node.head(1, session=b"another!", model="", say="Word"), HELLO, say=Word())
    assert asks.say_of(other.content, answer(other), GREETED) == first


def test_who_is_asked_to_train_and_does_not_says_so_and_keeps_what_it_has() -> None:
    node = Node(GREETED)
    node.consume(node.ask(1))
    quiet = node.ask(2)
    assert answer(quiet) == AnswerHead(3, sequence=2, generation=1, say="Word")
    assert [*quiet.content] == [NODE_RECORD]
    assert node.trained == 1
    assert node.conserves()
    again = node.ask(2, sequence=2)
    assert again.content == quiet.content
    node.ask(3)
    assert node.conserves()


# What a client agrees to.


@pytest.mark.parametrize(
    ("accept", "system", "why"),
    [
        (["topk"], PAIR, "accepts the codecs ['pair', 'topk'], not ['feedback']"),
        (None, {"id": "pear"}, "no system 'pear'"),
        (None, {"id": "pair", "codec": {"id": "topk", "density": 7}}, "density"),
    ],
)
def test_what_a_client_cannot_or_may_not_do_is_answered_by_the_app_alone(accept, system, why: str) -> None:
    node = Node(half=compression(accept))
    config = system if isinstance(system, dict) else system.to_config()
    reply = node.ask(1, system=config)
    assert why in answer(reply).unsupported
    assert list(reply.content) == ["arrays", "metrics", NODE_RECORD]
    assert why in reason(node.ask(1, "query", system=config))
    assert Held.KEY not in node.context.state


def test_noise_on_this_node_is_another_halfs() -> None:
    node = Node()
    config = {"id": "pair", "codec": {"id": "chain", "transforms": [{"id": Privatise.transform_id}]}}
    assert "privatises updates" in reason(node.ask(1, system=config))
    assert node.trained == 0


def test_a_memory_larger_than_a_state_can_be_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_BYTES", 4 * LAYOUT.size - 1)
    node = Node()
    with pytest.raises(FedcompError, match="would keep"):
        node.ask(1)
    assert node.trained == 0
    monkeypatch.setattr(memory, "MOST_BYTES", 4 * LAYOUT.size + 10)
    with pytest.raises(FedcompError, match="would keep"):
        node.ask(1)
    assert not node.context.state


# One assignment.

WRITING = {
    "answer",
    "_answered",
    "_content",
    "_prepared",
    "_app_alone",
    "_store",
    "repeat",
    "commit",
    "keep_blobs",
    "hold_model",
}
"""What runs after the app, and writes."""


class Broken(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "query", "repeated", "evaluate"])
def test_an_exception_in_any_line_leaves_the_state_as_it_was_or_as_it_is_to_be(what: str) -> None:
    start = Node(PAIR if what == "repeated" else LATER)
    broadcast = Broadcast(TopK(density=0.3))
    published(broadcast, to_arrays(model(1.0)))
    if what in ("query", "repeated"):
        down(start, broadcast, 0)
    if what == "repeated":
        start.sequence = next_epoch(start.sequence)

    def act(node: Node) -> dict[str, Any]:
        if what == "query":
            node.ask(1, "query")
        else:
            down(node, broadcast, 0, "evaluate" if what == "evaluate" else "train")
        return stored(node)

    before, after = stored(start), act(start.copy())
    assert before != after
    files, kept = ("clients/memory.py", "clients/programs.py"), 0
    for last in range(1000):
        node, lines = start.copy(), 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_name not in WRITING or not frame.f_code.co_filename.endswith(files):
                return None
            lines += event == "line"
            if lines > last:  # noqa: B023
                raise Broken
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            act(node)
        except Broken:
            kept += stored(node) == before
            assert stored(node) in (before, after)
        else:
            break
        finally:
            sys.settrace(former)
    assert kept > 10
    assert lines - kept < 10, "after the assignment hardly anything is left to do"
