"""Every message the two sides exchange: its bytes never change, and whatever is wrong with it is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from message_examples import CONFLICTS, EXAMPLES, content_of, damages, taken, whole_damages, wrong_values

from fedcomp.codecs import Identity
from fedcomp.errors import FedcompError
from fedcomp.flower import asks
from fedcomp.flower._private import adopt_identity, content_from_bytes, content_to_bytes
from fedcomp.flower.asks import AnswerHead, AskHead, OwnStep
from fedcomp.flower.payload import BLOB, EXACT, FRAME, STEP, PayloadError, payload_bytes
from fedcomp.flower.schema import Document, OtherVersion, Schema, SchemaError
from fedcomp.program import Said
from fedcomp.rules import Int, Many, Real, Text
from fedcomp.systems.pair import Pair

GOLDEN = json.loads(Path(__file__).with_name("messages.json").read_text())
"""Per message: the serialised content of its example, and the rules of its fields. Written once; a change of either is
a change of the protocol, after which the bytes of its former version stay as such."""


def schemas(cls: type[Schema] = Schema) -> set[type[Schema]]:
    """Return all schemas of the library."""
    below = {s for sub in cls.__subclasses__() for s in {sub, *schemas(sub)}}
    return {s for s in below if s.__module__.startswith("fedcomp.") and is_dataclass(s) and s.__name__[0] != "_"}


def name_of(schema: type[Schema]) -> str:
    return f"{schema.__module__.rpartition('.')[2]}.{schema.__name__}"


def test_every_schema_has_an_example_and_every_example_golden_bytes() -> None:
    assert {name_of(s) for s in schemas()} == {name.partition("/")[0] for name in EXAMPLES}
    assert set(EXAMPLES) == set(GOLDEN["bytes"])
    assert {name: {e.name: str(e.rule) for e in m.entries()} for name, m in EXAMPLES.items() if "/" not in name} == (
        GOLDEN["rules"]
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_has_the_bytes_it_always_had_and_is_read_back(name: str) -> None:
    message = EXAMPLES[name]
    content = content_of(message)
    data = bytes.fromhex(GOLDEN["bytes"][name])
    assert content_to_bytes(content) == data
    assert taken(type(message), content_from_bytes(data)) == message
    # Flower cannot measure records with empty values in them, and mods measure every message.
    assert all(record.count_bytes() > 0 for record in content.values())


@pytest.mark.parametrize("name", GOLDEN["former"])
def test_a_message_of_a_former_version_is_known_as_one(name: str) -> None:
    with pytest.raises(OtherVersion) as refused:
        taken(type(EXAMPLES[name]), content_from_bytes(bytes.fromhex(GOLDEN["former"][name])))
    assert refused.value.version == (3 if name.startswith("asks.") else 1)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_damaged_field_is_refused_by_its_name(name: str) -> None:
    message = EXAMPLES[name]
    for entry in message.entries():
        tried = 0
        for what, content in damages(message, entry):
            with pytest.raises(PayloadError) as refused:
                print(f"{entry.name}, {what}: {taken(type(message), content)}")
            assert entry.name in str(refused.value), what
            # It travels back to the sender, and is logged.
            assert len(str(refused.value)) < 400, what
            tried += 1
        assert tried > 1, entry.name


@pytest.mark.parametrize("name", EXAMPLES)
def test_another_version_a_field_too_many_and_another_record_are_refused(name: str) -> None:
    message = EXAMPLES[name]
    for what, content in whole_damages(message):
        with pytest.raises(OtherVersion if "version" in what else SchemaError):
            print(f"{what}: {taken(type(message), content)}")


@pytest.mark.parametrize("message", CONFLICTS, ids=lambda message: f"{name_of(type(message))} {message}"[:80])
def test_fields_that_contradict_each_other_are_refused(message: Schema) -> None:
    with pytest.raises(SchemaError, match=f"not a valid {type(message).__name__}"):
        type(message).take(content_of(message))


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_written_that_would_not_be_read(name: str) -> None:
    for what, wrong in wrong_values(EXAMPLES[name]):
        with pytest.raises(SchemaError) as error:
            print(f"{what}: {wrong.check()}")
        assert error.value.field == what.split()[0]
    for message in CONFLICTS:
        content = RecordDict()
        with pytest.raises(SchemaError, match=f"not a valid {type(message).__name__}"):
            message.put(content)
        assert not content


def test_an_error_reply_says_nothing() -> None:
    adopt_identity((1, 1, 1))
    from flwr.app import Error

    asked = Message(RecordDict(), 2, "query")
    reply = Message(Error(1, "lost"), reply_to=asked)
    schema = type(next(iter(EXAMPLES.values())))
    assert schema.find(reply) is schema.find(asked) is None
    with pytest.raises(SchemaError, match="nothing under 'fedcomp"):
        schema.take(reply)


# The layer itself.


@dataclass(frozen=True)
class Toy(Schema, key="toy", separator="-"):
    most_of: Annotated[int, Int(2, 5)]
    in_: Annotated[tuple[float, ...], Many(Real(above=0.0, most=1.0), 3)] = ()
    spec: Annotated[dict[str, Any], Document(200)] = None  # type: ignore[assignment]
    zero: Annotated[int, Int(absent=0)] = 0
    text: Annotated[str, Text(3)] = ""


def test_names_and_what_is_left_out() -> None:
    assert Toy(3, spec={}).values() == {"most-of": 3}
    assert Toy(3, (0.5, 1.0), {"a": [1]}, 2, "x").values() == {
        "most-of": 3,
        "in": [0.5, 1.0],
        "spec": '{"a":[1]}',
        "zero": 2,
        "text": "x",
    }
    assert Toy.of({"most-of": 3}) == Toy(3, spec={})


def test_an_integer_is_read_as_the_number_it_is() -> None:
    assert Toy.of({"most-of": 2, "in": [1]}).in_ == (1.0,)
    assert type(Toy.of({"most-of": 2, "in": [1]}).in_[0]) is float
    for large in (10**400, 2**63):
        with pytest.raises(SchemaError, match="'in'"):
            Toy.of({"most-of": 2, "in": [large]})


@pytest.mark.parametrize("value", [0.0, math.nextafter(1.0, 2.0), math.nan, math.inf])
def test_numbers_beyond_open_and_closed_ends_are_refused(value: float) -> None:
    with pytest.raises(SchemaError, match=r"field 'in' of record 'toy'.*number in \(0, 1\]"):
        Toy.of({"most-of": 2, "in": [0.5, value]})


def test_an_error_says_field_value_rule_and_remedy() -> None:
    with pytest.raises(SchemaError) as refused:
        Toy.of({"most-of": 6})
    assert refused.value.field == "most-of"
    assert str(refused.value) == (
        "field 'most-of' of record 'toy' is 6, expected an integer in [2, 5]; run the same release on both "
        "sides; if they are the same, the sender or the link is faulty"
    )


def test_what_is_written_replaces_what_was_there() -> None:
    content = RecordDict()
    for toy in (Toy(5, (1.0,), {"a": 1}, 1, "abc"), Toy(2, spec={})):
        toy.put(content)
        assert Toy.take(content) == toy


def test_a_field_without_one_rule_is_a_mistake_of_the_programmer() -> None:
    @dataclass(frozen=True)
    class Bare(Schema, key="bare"):
        x: int

    with pytest.raises(TypeError, match=r"fields \['x'\] of Bare have no rule"):
        Bare.entries()


# Heads, words and frames of programs in messages: what is put in is found again, and the app sees none of it.


@dataclass(frozen=True, repr=False, eq=False)
class Lead(Said):
    """Example of words."""

    support: Annotated[int, Int(0, 9)]
    names: Annotated[tuple[str, ...], Many(Text(5, least=1), 3)] = ()


class Talking(Pair):
    """A system with words."""

    SAYS: ClassVar[tuple[type[Said], ...]] = (Lead,)


SYSTEM = Talking(Identity())
HEAD = AskHead(number=3, seed=-1, session=b"session!", sequence=2, say="Lead")
DATA = {FRAME + "values": b"v" * 9, FRAME + "x": b"", FRAME + "long": b"l" * 70_000, BLOB + "0f": b"b"}
DATA |= {STEP + "4": b"s", STEP + "4.exact": b"se", EXACT: b"exact"}


def content() -> RecordDict:
    arrays = ArrayRecord({"w": Array(np.ones(3, np.float32))})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 3, "lr": 0.5})})


@pytest.mark.parametrize("head", [HEAD, AnswerHead(partition_id=1, sequence=2, say="Lead")])
def test_what_is_put_into_a_message_is_found_after_the_wire(head: AskHead | AnswerHead) -> None:
    adopt_identity((1, 1, 1))
    sent, say = content(), Lead(support=4, names=("a", "b"))
    asks.put(sent, head, say, DATA)
    assert payload_bytes(Message(sent, 1, "train")) == sum(map(len, DATA.values())) + len(content()["arrays"]["w"].data)
    found = content_from_bytes(content_to_bytes(sent))
    read = asks.find_ask(found) if isinstance(head, AskHead) else asks.find_answer(found)
    assert read == head
    assert asks.say_of(found, read, SYSTEM) == say
    assert asks.data_in(found, FRAME) == {"values": b"v" * 9, "x": b"", "long": b"l" * 70_000}
    assert asks.data_in(found, BLOB) == {"0f": b"b"}
    assert asks.data_in(found, STEP) == {"4": b"s", "4.exact": b"se"}
    assert asks.data_in(found, EXACT) == {"": b"exact"}
    # Flower cannot measure records with empty values in them.
    assert all(record.count_bytes() > 0 for record in found.values())


def test_an_ask_adds_no_record_but_for_large_frames_and_the_app_sees_nothing_of_it() -> None:
    shared = content()
    sent = shared.copy()
    asks.put(sent, HEAD, Lead(support=4), {FRAME + "values": b"v"})
    assert list(sent) == ["arrays", "config"]
    # Strategies put one record into all their messages.
    assert dict(shared["config"]) == {"server-round": 3, "lr": 0.5}
    asks.put(sent, HEAD, Lead(support=4), DATA)
    assert asks.without(sent) == content()
    alone = RecordDict()
    asks.put(alone, HEAD)
    assert list(alone) == ["fedcomp"]
    assert not asks.without(alone)


def test_a_head_of_another_version_is_known_as_one_whatever_it_holds() -> None:
    sent = content()
    sent["config"]["fedcomp.protocol"] = 2
    with pytest.raises(OtherVersion) as refused:
        asks.find_ask(sent)
    assert refused.value.version == 2
    assert asks.find_ask(content()) is asks.find_answer(content()) is None


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"support": 10}, "'support' of Lead is 10"),
        ({"support": "4"}, "'support' of Lead"),
        ({}, "'support' of Lead is missing"),
        ({"support": 1, "names": [2]}, "'names' of Lead"),
        ({"support": 1, "more": 1}, "no entries"),
    ],
)
def test_words_that_break_a_rule_are_refused_by_name(entries: dict, what: str) -> None:
    sent = RecordDict({"fedcomp.node": ConfigRecord({asks.SAY + name: value for name, value in entries.items()})})
    with pytest.raises(FedcompError, match=what):
        asks.say_of(sent, AnswerHead(1, say="Lead"), SYSTEM)
    with pytest.raises(FedcompError, match="no words 'Follow'"):
        asks.say_of(sent, AnswerHead(1, say="Follow"), SYSTEM)


@pytest.mark.parametrize("text", ["", "x", "4", "4 x", "4 3 basis", "-4 3", "4 3 :" + "0" * 32, "9" * 30 + " 3"])
def test_a_text_that_is_no_step_is_refused(text: str) -> None:
    step = OwnStep(4, 3, {"basis": "0" * 32, "a:b": "1" * 32})
    assert OwnStep.of(step.to_text()) == step
    assert OwnStep.of(OwnStep(4, 3, {}).to_text()) == OwnStep(4, 3, {})
    with pytest.raises(SchemaError):
        OwnStep.of(text)


def test_digests_by_name_are_unique_and_whole() -> None:
    found = {"a": asks.digest_of(b"x"), "b": asks.digest_of(b"")}
    assert asks.digests_of(asks.named(found)) == found
    for texts in (("a:" + "0" * 31,), ("a:" + "0" * 32, "a:" + "1" * 32), ("0" * 32,)):
        with pytest.raises(SchemaError):
            asks.digests_of(texts)
    assert replace(HEAD, blobs=asks.named(found)).check()["fedcomp.blobs"] == list(asks.named(found))
