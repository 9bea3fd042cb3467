"""The ledger adds up, stays small, and survives storage."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.flower.ledger import TrafficLedger, TrafficLedgerError
from fedcomp.rng import Key


def filled() -> TrafficLedger:
    ledger = TrafficLedger()
    for round_ in (1, 2):
        for node in (0, 1, 2):
            ledger.record(round_, node, "down", "train", payload=100, wire=1000)
            ledger.record(round_, node, "up", "train", payload=10 * (node + 1), wire=70 + node)
        ledger.record(round_, 0, "up", "evaluate", wire=50)
    ledger.record(2, 1, "up", "train.mix", "peer", payload=7, wire=9)
    return ledger


def test_totals_by_every_column() -> None:
    ledger = filled()
    assert len(ledger) == 15
    assert ledger.total("wire", direction="down") == 6000
    assert ledger.total("payload", direction="up", message_type="train") == 120
    assert ledger.total("payload", direction="up", node=2, round=1) == 30
    assert ledger.total("wire", link="peer") == 9
    assert ledger.total("wire", link="hub", direction="up") == 2 * (70 + 71 + 72) + 100
    assert ledger.total("messages", round=[1, 2], node={0}) == 6
    assert ledger.total("wire", round=99) == 0
    assert ledger.by("round", "messages") == {1: 7, 2: 8}
    assert ledger.by("node", "payload", direction="up", link="hub") == {0: 20, 1: 40, 2: 60}
    assert ledger.by("message_type", "messages") == {"evaluate": 2, "train": 12, "train.mix": 1}
    assert ledger.by("direction") == {"down": 6000, "up": 535}
    assert ledger.by("link", "payload", round=2) == {"hub": 360, "peer": 7}
    assert ledger.summary() == {
        "messages": 15,
        "payload_up": 120,
        "wire_up": 526,
        "payload_down": 600,
        "wire_down": 6000,
        "payload_peer": 7,
        "wire_peer": 9,
    }


def test_node_ids_become_partitions_backwards_and_forwards() -> None:
    ledger = TrafficLedger()
    node_id = 2**61 + 12345
    ledger.record(1, node_id, "down", "train", wire=5)
    assert ledger.by("node") == {node_id: 5}
    ledger.identify(node_id, 3)
    ledger.record(1, node_id, "up", "train", wire=7)
    # The node came back under a new id and the same partition.
    ledger.record(2, 2**61 + 99, "down", "train", wire=1)
    ledger.identify(2**61 + 99, 3)
    assert ledger.by("node") == {3: 13}
    assert ledger.total(node=3) == 13


def test_a_node_that_changes_its_partition_takes_no_rows_of_others_along() -> None:
    ledger = TrafficLedger()
    ledger.record(1, 3, "up", "train", wire=100)
    stranger = 2**61 + 7
    ledger.identify(stranger, 3)
    ledger.identify(stranger, 4)
    ledger.record(2, stranger, "up", "train", wire=1)
    ledger.record(2, 3, "up", "train", wire=10)
    assert ledger.by("node") == {3: 110, 4: 1}


def test_large_numbers_are_exact() -> None:
    ledger = TrafficLedger()
    for _ in range(3):
        ledger.record(1, 0, "up", "train", payload=2**53 + 1, wire=2**60)
    assert ledger.total("payload") == 3 * (2**53 + 1)
    assert ledger.by("round", "payload") == {1: 3 * (2**53 + 1)}


def test_json_and_column_round_trips() -> None:
    ledger = filled()
    ledger.identify(2, 42)
    again = TrafficLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again == ledger
    assert again.by("node", "messages") == ledger.by("node", "messages")
    assert TrafficLedger.from_columns(ledger.columns(), ledger.tables()) == ledger
    again.record(3, 42, "up", "train", wire=1)
    assert again.total("wire", node=42) == ledger.total("wire", node=42) + 1
    assert TrafficLedger.from_json(TrafficLedger().to_json()) == TrafficLedger()


def test_a_view_of_a_ledger_does_not_forbid_growing_it() -> None:
    ledger = filled()
    columns = ledger.columns()
    ledger.record(3, 0, "up", "train", wire=1)
    assert len(columns["wire"]) == 15
    assert len(ledger) == 16


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1, 0, "sideways", "train"), "sideways"),
        ((1, 0, "up", "train", "moon"), "moon"),
        ((1, 0, "up", "train", "hub", -1), "negative"),
        ((-1, 0, "up", "train"), "negative"),
    ],
)
def test_wrong_rows_are_refused(arguments: tuple, match: str) -> None:
    ledger = TrafficLedger()
    with pytest.raises(ConfigError, match=match):
        ledger.record(*arguments)
    assert len(ledger) == 0


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="payload"):
        filled().total("payloads")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="round"):
        filled().total("wire", rounds=1)


def test_damaged_ledgers_are_refused() -> None:
    good = filled().to_json()
    for damage in (
        {"format": "other"},
        {"columns": None},
        {"columns": {**good["columns"], "wire": good["columns"]["wire"][:-1]}},
        {"columns": {**good["columns"], "node": [99] * 15}},
        {"columns": {**good["columns"], "kind": [-1] * 15}},
        {"columns": {**good["columns"], "payload": [0.5] * 15}},
        {"columns": {k: v for k, v in good["columns"].items() if k != "round"}},
        {"kinds": [["up", "train"]]},
        {"kinds": [["sideways", "train", "hub"]] * len(good["kinds"])},
        {"kinds": [["up", "train", "road"]] * len(good["kinds"])},
        {"columns": {**good["columns"], "payload": 7}},
        {"columns": {**good["columns"], "payload": [[1, 2]] * 15}},
        {"columns": {name: [[1, 2]] * 15 for name in good["columns"]}},
    ):
        with pytest.raises(TrafficLedgerError):
            TrafficLedger.from_json({**good, **damage})


def test_a_long_run_of_many_nodes_stays_small() -> None:
    rounds, nodes = 200, 200
    ledger = TrafficLedger()
    for round_ in range(rounds):
        for node in range(nodes):
            ledger.record(round_, node, "up", "train", payload=round_ * node, wire=round_ * node + 1000)
    held = sum(column.buffer_info()[1] * column.itemsize for column in ledger._columns.values())
    assert held == 26 * rounds * nodes
    assert ledger.total("payload") == int(np.arange(rounds).sum()) * int(np.arange(nodes).sum())


@pytest.mark.parametrize("stored", [False, True])
def test_totals_are_those_of_the_rows(stored: bool) -> None:
    """Running sums against the rows themselves, with every combination of conditions, and after a restart."""
    ledger, key = TrafficLedger(), Key(3, "ledger")
    words = key.bits(400).tolist()
    for index, word in enumerate(words):
        if stored and index == 300:
            ledger = TrafficLedger.from_columns(ledger.columns(), ledger.tables())
        direction, link = ("up", "down")[word % 2], ("hub", "peer")[word % 3 == 0]
        ledger.record(
            word % 5, word % 7, direction, ("train", "evaluate")[word % 11 > 5], link, word % 1009, word % 2003
        )  # type: ignore[arg-type]
    rounds: list[Any] = [None, 2, 9, [1, 3], np.uint32(4)]
    for round, direction, link in itertools.product(rounds, [None, "up", ["up", "down"]], [None, "hub"]):
        where = {"round": round, "direction": direction, "link": link, "message_type": "train"}
        for value in ("payload", "wire", "messages"):
            assert ledger.total(value, **where) == sum(ledger.by("node", value, **where).values())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="colour"):
        ledger.total(colour="red")
