"""Serialised content of replies that travel another way: exact, bounded, typed errors only."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedcomp.flower.coded import open_content, pack_content
from fedcomp.flower.payload import PayloadError
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
