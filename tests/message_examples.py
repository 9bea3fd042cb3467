"""An example of every message the two sides exchange, and all that may be wrong with one, made from its schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flwr.app import ConfigRecord, RecordDict

from fedcomp.clients import memory, optimizer
from fedcomp.errors import ConfigError
from fedcomp.flower import asks, folder, state
from fedcomp.flower.payload import put_frame
from fedcomp.flower.schema import Document, Field, Schema, Version
from fedcomp.layout import Layout
from fedcomp.rules import LARGEST, REQUIRED, Data, Int, Many, OneOf, Real, Rule, Text


def plain(message: Any) -> Any:
    """Return a message with nothing in it that may be left out."""
    empty = {e.field: e.rule.missing for e in message.entries() if e.rule.missing is not REQUIRED}
    return replace(message, **empty)


EXAMPLES: dict[str, Schema] = {
    "asks.AskHead": asks.AskHead(
        number=3,
        seed=-5,
        session=b"session!",
        sequence=4,
        consumed=3,
        generation=2,
        system={"id": "pair", "codec": {"id": "topk", "density": 0.1}},
        policy={"b": [1], "a": 2},
        model="arrays",
        downlink={"id": "dense"},
        version=9,
        base=8,
        digest=b"digest..",
        blobs=("basis:" + "0f" * 16,),
        steps=("9 2 basis:" + "0f" * 16,),
        say="Lead",
        cast=False,
    ),
    "asks.AskHead/plain": asks.AskHead(number=1, seed=0, session=b"session!"),
    "asks.AskHead/anybody": asks.AskHead(number=1, seed=0, session=b"session!", needs_model=False, oldest=1),
    "asks.AskHead/adapters": asks.AskHead(
        number=1, seed=0, session=b"session!", drawn={"at": [[0, 8, 64], [4, 8, 256]]}
    ),
    "asks.AnswerHead": asks.AnswerHead(
        partition_id=2,
        sequence=4,
        generation=1,
        version=9,
        say="Waits",
        lacks=("0f" * 16,),
        record="arrays",
        state="rolled back",
        memory=0.5,
        remark="a tensor follows the server's",
        unchanged=(0, 3),
        copies=(3, 1),
        unsupported="no system 'pair'",
    ),
    "asks.AnswerHead/plain": asks.AnswerHead(2),
    "asks.AnswerHead/bare": asks.AnswerHead(2, 4, 1, bare=True, sent=True, key=b"k" * 32),
    "asks.AnswerHead/links": asks.AnswerHead(
        2, 4, 1, key=b"k" * 32, address="tcp://h:1", signature=b"s", handed=9, parcels=1, missed=("3 no key",)
    ),
    "state.ReplicaRecord": state.ReplicaRecord(7),
    "optimizer.OptimizerRecord": optimizer.OptimizerRecord(
        b"session!", 3, bytes(range(16)), {"0.exp_avg": "bfloat16", "1.step": 12.0}
    ),
    "memory.Held": memory.Held(
        session=b"session!",
        sequence=9,
        number=4,
        trained=9,
        generation=3,
        sent=8,
        before=5,
        system={"id": "pair", "codec": {"id": "topk"}},
        layout=Layout.flat(3).text,
        asked=b"a" * 16,
        node=b"\0\0\0\0\0\0\0\7",
        length=0.5,
    ),
    "folder.KeptRecord": folder.KeptRecord("a", 7),
    "folder.KeptRecord/apart": folder.KeptRecord("a", 7, ("fedcomp.memory",)),
}
"""By module and class; after a slash, what is special. The plain ones leave out all that may be left out."""

CONFLICTS: list[Schema] = [
    asks.AskHead(number=1, seed=0, session=b"session!", version=8, base=9),
    asks.AskHead(number=1, seed=0, session=b"session!", sequence=4, consumed=4),
    asks.AnswerHead(2, copies=(3, 1, 2)),
]
"""Messages of which every field is in range, and which mean nothing all the same."""

OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (1, 0.5, "x", b"x", [True]),
    int: (True, 0.5, "x", b"x", [1]),
    float: (True, "x", b"x", [0.5]),
    str: (True, 1, 0.5, b"x", ["x"]),
    bytes: (True, 1, 0.5, "x", [b"x"]),
    dict: (True, 1, 0.5, b"x", ["x"]),
    tuple: (True, 1, 0.5, "x", b"x"),
}
"""Values of other types, by the type of a field."""


def content_of(message: Schema) -> RecordDict:
    """Return a message's content."""
    content = RecordDict()
    content[message.KEY] = ConfigRecord(message.values())
    return content


def taken(schema: type[Schema], content: RecordDict) -> Schema:
    """Return the message in :func:`content_of`'s content."""
    return schema.take(content)


def entries_of(message: Schema) -> dict[str, Any]:
    """Return what a message's record holds."""
    return dict(content_of(message)[message.KEY])


def with_entries(message: Schema, entries: dict[str, Any]) -> RecordDict | None:
    """Return a message's content with these in place of its entries; None where no record can hold them."""
    content = content_of(message)
    try:
        content[message.KEY] = ConfigRecord(entries)
    except TypeError:
        return None
    return content


def damages(message: Schema, entry: Field) -> Iterator[tuple[str, RecordDict]]:
    """Yield everything that may be wrong with one field of a message: what it is, and the content with it."""
    for what, change in _changes(type(message), entry, message.values().get(entry.name)):
        entries = {name: value for name, value in entries_of(message).items() if name != entry.name}
        made = with_entries(message, entries if change is REQUIRED else {**entries, entry.name: change})
        if made is not None:
            yield what, made


def wrong_values(message: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the message with one field out of its range, for every field and range."""
    for entry in message.entries():
        if not isinstance(entry.rule, Document | Version):
            for what, value in _beyond(entry.rule):
                found = tuple(value) if isinstance(value, list) else value
                # Some classes refuse a value when they are made.
                with suppress(ConfigError):
                    yield f"{entry.name} {what}", replace(message, **{entry.field: found})  # type: ignore[type-var]


def all_damages(message: Schema) -> Iterator[tuple[str, RecordDict]]:
    """Yield everything that may be wrong with a message: with its fields, and with all of it."""
    for entry in message.entries():
        for what, content in damages(message, entry):
            yield f"{entry.name}: {what}", content
    yield from whole_damages(message)


def whole_damages(message: Schema) -> Iterator[tuple[str, RecordDict]]:
    """Yield what may be wrong with a message as a whole."""
    changes: dict[str, dict[str, Any]] = {"a field too many": {message.PREFIX + "unheard-of": 1}}
    for entry in message.entries():
        if isinstance(entry.rule, Version):
            number = entry.rule.number
            versions = (number + 1, 0, -1, True, str(number), float(number), None)
            changes |= {f"version {version!r}": {entry.name: version} for version in versions}
    for what, change in changes.items():
        entries = {name: value for name, value in {**entries_of(message), **change}.items() if value is not None}
        content = with_entries(message, entries)
        assert content is not None
        yield what, content
    if not message.PREFIX:
        content = content_of(message)
        del content[message.KEY]
        yield "no record", content
        put_frame(content, message.KEY, b"x" * 100_000)
        yield "a record of another kind", content


def _changes(schema: type[Schema], entry: Field, value: Any) -> Iterator[tuple[str, Any]]:
    if entry.rule.missing is REQUIRED:
        yield "missing", REQUIRED
    hint = get_type_hints(schema, include_extras=True)[entry.field]
    kind = get_args(hint)[0]
    for other in OTHERS[{Literal: str, Mapping: dict}.get(get_origin(kind), get_origin(kind) or kind)]:
        yield f"is {other!r}", other
    if isinstance(entry.rule, Many) and value:
        (item, *_) = get_args(kind)
        for other in OTHERS[item]:
            yield f"holds {other!r}", [*value, other]
        for what, other in _beyond(entry.rule.each):
            yield f"holds {what}", [*value[1:], other]
    yield from _beyond(entry.rule)


def _beyond(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield values of the right type that break a rule."""
    if isinstance(rule, Int):
        yield from ((f"is {n}", n) for n in (rule.least - 1, rule.most + 1) if -LARGEST - 1 <= n <= LARGEST)
    elif isinstance(rule, Real) and rule.finite:
        ends = (math.nextafter(rule.least, -math.inf), math.nextafter(rule.most, math.inf), rule.above)
        yield from ((f"is {x}", x) for x in {*ends, math.inf, -math.inf})
        yield "is nan", math.nan
    elif isinstance(rule, OneOf):
        yield from (
            (f"is {text!r}", text) for text in ("", rule.choices[0] + "x", "x" * 10_000) if text not in rule.choices
        )
    elif isinstance(rule, Text):
        yield from ((f"has {n} characters", "x" * n) for n in (rule.least - 1, rule.most + 1) if n >= 0)
    elif isinstance(rule, Data):
        yield from ((f"has {n} bytes", b"x" * n) for n in (rule.least - 1, rule.most + 1) if n >= 0)
    elif isinstance(rule, Document):
        yield from ((f"is {text[:20]!r}", text) for text in ("{", "[]", "1", "null", '"x"', "[" * (rule.most - 1)))
        yield "is too long", json.dumps({"x": "y" * rule.most})
        yield "is too deep", '{"x":' * 40 + "1" + "}" * 40
    elif isinstance(rule, Many):
        item = _valid(rule.each)
        if rule.most <= 1 << 17:
            yield "has too many items", [item] * (rule.most + 1)
        if rule.least:
            yield "has too few items", [item] * (rule.least - 1)
        if rule.ascending:
            yield "holds one item twice", [item, item]
            yield "is in descending order", [item + 1, item]


def _valid(rule: Rule) -> Any:
    if isinstance(rule, Int):
        return rule.least
    if isinstance(rule, Real):
        return min(max(1.0, rule.least), rule.most)
    return "x" * max(1, getattr(rule, "least", 1)) if isinstance(rule, Text) else b"x"
