"""Bundles and serialised content of coded rounds: exact, bounded, typed errors only."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.flower.coded import (
    BUNDLE,
    open_content,
    pack_content,
    put_bundle,
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
        put_frame(record, BUNDLE, frame)
        with pytest.raises(PayloadError, match=reason):
            take_bundle(record, most=9, longest=99)
    record = RecordDict({BUNDLE: ConfigRecord({"other": 1})})
    with pytest.raises(PayloadError, match="not a frame"):
        take_bundle(record, most=9, longest=99)
