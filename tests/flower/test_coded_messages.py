"""Fields, bundles and serialised content of coded rounds: exact, bounded, typed errors only."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import StateError
from fedcomp.flower.coded import (
    CODED,
    PARCELS,
    Fields,
    fields_of,
    open_content,
    pack_content,
    put_bundle,
    put_fields,
    take_bundle,
)
from fedcomp.flower.payload import PayloadError, put_frame
from fedcomp.rng import Key


def content() -> RecordDict:
    arrays = {"b": Array(np.arange(5, dtype=np.int64)), "a": Array("uint8", (3,), "fedcomp.fcw1", b"abc")}
    return RecordDict(
        {
            "z": ArrayRecord(arrays),
            "metrics": MetricRecord({"n": 3, "loss": float("nan"), "list": [1.0, -0.0]}),
            "a": ConfigRecord({"empty": b"", "text": "ü", "flag": True, "big": 2**63, "nothing": []}),
        }
    )


def test_content_comes_back_with_its_order_and_every_bit() -> None:
    data = pack_content(content())
    back = open_content(data)
    assert list(back) == ["z", "metrics", "a"]
    assert list(back["z"]) == ["b", "a"]
    assert pack_content(back) == data
    assert pack_content(content()) == data
    assert back["a"] == content()["a"]
    assert np.isnan(back["metrics"]["loss"])
    assert open_content(b"") == RecordDict()


def test_damaged_content_raises_one_error_or_is_content() -> None:
    data, refused = pack_content(content()), 0
    words = Key(1, "mutants").bits(4000).reshape(-1, 2)
    for place, value in words.tolist():
        mutant = bytearray(data)
        mutant[place % len(data)] = value % 256
        mutant = mutant[: value % len(data)] if place % 3 == 0 else mutant
        try:
            open_content(bytes(mutant))
        except PayloadError:
            refused += 1
    assert refused > 1000


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_bundles_come_back(items) -> None:
    record = RecordDict()
    assert put_bundle(record, items) == sum(map(len, items))
    assert take_bundle(record, most=8, longest=40) == items


def test_bundles_beyond_their_limits_are_refused() -> None:
    record = RecordDict()
    assert take_bundle(record, most=0, longest=0) == []
    put_bundle(record, [b"abc", b"de"])
    for most, longest, reason in ((1, 9, "more than 1 items"), (2, 2, "at most 2 are accepted")):
        with pytest.raises(PayloadError, match=reason):
            take_bundle(record, most=most, longest=longest)
    for frame, reason in ((b"\x01\x00", "middle of a length"), (b"\x09\x00\x00\x00abc", "only 3 are left")):
        put_frame(record, PARCELS, frame)
        with pytest.raises(PayloadError, match=reason):
            take_bundle(record, most=9, longest=99)
    record = RecordDict({PARCELS: ConfigRecord({"other": 1})})
    with pytest.raises(PayloadError, match="not a frame"):
        take_bundle(record, most=9, longest=99)


def test_fields_are_typed_and_bounded() -> None:
    record = RecordDict()
    put_fields(record, {"i": 0, "f": False, "x": 1.5, "t": "text", "b": b"12", "l": [1, 2], "s": ["a"], "none": None})
    put_fields(record, {**dict(record[CODED].items()), "e": "", "eb": b"", "el": []})
    fields = fields_of(record)
    assert fields is not None
    assert all(name not in fields for name in ("none", "e", "eb", "el")), "count_bytes() raises on what is empty"
    record[CODED].count_bytes()
    assert (fields.integer("i"), fields.flag("f"), fields.number("x"), fields.text("t")) == (0, False, 1.5, "text")
    assert (fields.data("b"), fields.integers("l"), fields.texts("s")) == (b"12", [1, 2], ["a"])
    assert (fields.integer("no", 7), fields.flag("no"), fields.text("no", ""), fields.integers("no")) == (
        7,
        False,
        "",
        [],
    )
    for wrong in (
        lambda: fields.integer("no"),
        lambda: fields.integer("t"),
        lambda: fields.integer("f"),
        lambda: fields.integer("i", least=1),
        lambda: fields.flag("i"),
        lambda: fields.number("t"),
        lambda: Fields({"x": float("nan")}).number("x"),
        lambda: fields.text("t", longest=3),
        lambda: fields.text("i"),
        lambda: fields.data("b", length=3),
        lambda: fields.data("t"),
        lambda: fields.integers("l", most=1),
        lambda: fields.integers("l", longest=1),
        lambda: fields.integers("s"),
        lambda: fields.texts("l"),
        lambda: fields.texts("t"),
    ):
        with pytest.raises(StateError, match="field"):
            wrong()
    assert fields_of(RecordDict()) is None
    assert fields_of(RecordDict({CODED: ConfigRecord({"protocol": 2})})) is None
