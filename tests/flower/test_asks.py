"""Heads, words and frames of programs in messages: what is put in is found again, and the app sees none of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcomp.codecs import Identity
from fedcomp.errors import FedcompError
from fedcomp.flower import asks
from fedcomp.flower._private import adopt_identity, content_from_bytes, content_to_bytes
from fedcomp.flower.asks import AnswerHead, AskHead, OwnStep
from fedcomp.flower.payload import BLOB, EXACT, FRAME, STEP, payload_bytes
from fedcomp.flower.schema import OtherVersion, SchemaError
from fedcomp.program import Said
from fedcomp.rules import Int, Many, Text
from fedcomp.systems.pair import Pair


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
