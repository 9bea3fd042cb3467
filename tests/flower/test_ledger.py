"""The ledger adds up, stays small, and survives storage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from plain_grid import PlainGrid
from toy import client_app, fedavg, model

from fedcomp.errors import ConfigError, StateError
from fedcomp.flower._private import acting_as, set_message_id
from fedcomp.flower.faults import ScriptedFaults, late
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger, TrafficLedgerError, wire_bytes
from fedcomp.flower.metered import MeteredGrid, addressed, join
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY, payload_bytes
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


# The meter counts every message once and evens out what differs between engines.


class SimulationLikeGrid(PlainGrid):
    """Behaves as Flower's simulation grid does towards its caller: names messages by UUIDs, refuses unknown nodes by
    returning fewer ids although it has named them, answers only after some polls, knows no partitions and no sizes."""

    def __init__(self, engine: InProcessGrid, polls: int = 2) -> None:
        super().__init__(engine)
        self.polls = polls
        self.names: dict[str, str] = {}
        self.asked: dict[str, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        return reversed(self.engine.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        ids = []
        for message, inner in zip(batch, self.engine.push_messages(batch), strict=True):
            name = str(uuid4())
            set_message_id(message, name)
            if inner:
                self.names[name] = inner
                ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for name in message_ids:
            self.asked[name] = self.asked.get(name, 0) + 1
            if self.asked[name] > self.polls:
                for reply in self.engine.pull_messages([self.names[name]]):
                    reply.metadata.__dict__["_reply_to_message_id"] = name
                    set_message_id(reply, str(uuid4()))
                    replies.append(reply)
        return replies[::-1]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise AssertionError("the meter has to see which messages were accepted")


def batch(grid: Grid, round_: int = 1) -> list[Message]:
    record = RecordDict({"arrays": model(1.0), "config": ConfigRecord({"server-round": round_})})
    return [Message(record, node_id, "train") for node_id in grid.get_node_ids()]


def origin(replies: list[Message]) -> list[float]:
    return [r.content["metrics"]["partition"] for r in replies]


def test_both_directions_are_counted_on_the_bytes_that_travelled() -> None:
    with InProcessGrid(client_app(), 4) as engine:
        grid = MeteredGrid(engine)
        sent = batch(grid)
        replies = grid.send_and_receive(sent)
        ledger = grid.ledger
        assert ledger.total("messages") == 8
        assert ledger.by("node", "messages") == {0: 2, 1: 2, 2: 2, 3: 2}
        assert ledger.total("wire", direction="down") == sum(map(wire_bytes, sent))
        assert ledger.total("wire", direction="up") == sum(map(wire_bytes, replies))
        assert ledger.total("payload", direction="up") == sum(map(payload_bytes, replies)) == 4 * (4848 + 256)
        assert ledger.by("round", "messages") == {1: 8}


def test_replies_come_in_partition_order_whatever_the_order_of_messages() -> None:
    with InProcessGrid(client_app(), 9, seed=1) as engine:
        grid = MeteredGrid(engine)
        assert origin(grid.send_and_receive(batch(grid)[::-1])) == list(range(9))
        ids = grid.push_messages(batch(grid)[::-1])
        assert origin(grid.pull_messages(ids)) == list(range(9))


def test_all_engines_give_the_same_ledger_and_order() -> None:
    ledgers, orders = [], []
    for wrap in (lambda e: e, SimulationLikeGrid):
        with InProcessGrid(client_app(), 5, seed=1) as engine:
            grid = MeteredGrid(wrap(engine), poll_seconds=0.0)
            for round_ in (1, 2):
                grid.round = round_
                orders.append(origin(grid.send_and_receive(batch(grid, round_))))
            ids = grid.push_messages(batch(grid, 3))
            orders.append(origin(pull_until_answered(grid, ids)))
            ledgers.append(grid.ledger)
    assert orders[:3] == orders[3:] == [list(range(5))] * 3
    for column in ("round", "node", "direction", "message_type"):
        for value in ("messages", "payload", "wire"):
            assert ledgers[0].by(column, value) == ledgers[1].by(column, value)


def pull_until_answered(grid: MeteredGrid, ids: list[str]) -> list[Message]:
    while not (replies := grid.pull_messages(ids)):
        pass
    return replies


def test_push_and_pull_count_nothing_twice() -> None:
    with InProcessGrid(client_app(), 3) as engine:
        grid = MeteredGrid(engine)
        ids = grid.push_messages(batch(grid))
        assert grid.ledger.total("messages") == 3
        assert len(grid.pull_messages(ids[:2])) == 2
        assert grid.ledger.total("messages", direction="up") == 2
        again = grid.pull_messages(ids)
        # Two were answered before (error 3), one comes now.
        assert sorted(r.has_error() for r in again) == [False, True, True]
        assert grid.ledger.total("messages") == 6


def test_duplicates_are_dropped_but_a_second_reply_that_travelled_is_counted() -> None:
    for fault, ups in (("duplicate", 4), ("duplicate_reply", 3)):
        with InProcessGrid(client_app(), 3, fault=ScriptedFaults({(1, 1): fault})) as engine:
            grid = MeteredGrid(engine)
            assert origin(grid.send_and_receive(batch(grid))) == [0, 1, 2]
            assert grid.ledger.total("messages", direction="up") == ups


def test_errors_of_the_superlink_go_to_their_node_and_cost_it_nothing() -> None:
    with InProcessGrid(client_app(), 3, fault=ScriptedFaults({(1, 1): "offline"})) as engine:
        grid = MeteredGrid(engine)
        sent = batch(grid)
        replies = grid.send_and_receive(sent)
        assert [r.has_error() for r in replies] == [False, True, False]
        assert replies[1].metadata.src_node_id == sent[1].metadata.dst_node_id
        assert grid.ledger.by("node", "messages", direction="up") == {0: 1, 2: 1}
        assert grid.ledger.by("node", "messages", direction="down") == {0: 1, 1: 1, 2: 1}


def test_a_late_reply_counts_in_the_round_it_answers() -> None:
    with InProcessGrid(client_app(), 2, fault=ScriptedFaults({(1, 0): late(1)})) as engine:
        grid = MeteredGrid(engine)
        first = batch(grid, 1)
        assert origin(grid.send_and_receive(first)) == [1]
        grid.send_and_receive(batch(grid, 2))
        assert origin(grid.pull_messages([first[0].metadata.message_id])) == [0]
        assert grid.ledger.by("round", "messages", direction="up") == {1: 2, 2: 2}


def test_unknown_nodes_are_not_counted_on_any_engine() -> None:
    for wrap in (lambda e: e, SimulationLikeGrid):
        with InProcessGrid(client_app(), 1) as engine:
            grid = MeteredGrid(wrap(engine), poll_seconds=0.0)
            messages = [*batch(grid), Message(RecordDict(), 424242, "train")]
            assert len(grid.send_and_receive(messages)) == 1
            assert grid.ledger.total("messages") == 2


def test_a_timeout_ends_the_wait_on_a_real_engine() -> None:
    with InProcessGrid(client_app(), 2) as engine:
        grid = MeteredGrid(SimulationLikeGrid(engine, polls=10**9), poll_seconds=0.001)
        assert grid.send_and_receive(batch(grid), timeout=0.02) == []
        assert grid.ledger.by("direction", "messages") == {"down": 2}


def test_the_round_is_the_drivers_or_the_messages_own() -> None:
    with InProcessGrid(client_app(), 1) as engine:
        grid = MeteredGrid(engine)
        grid.send_and_receive(batch(grid, 7))
        grid.round = 3
        assert engine.round == 3
        grid.send_and_receive(batch(grid, 7))
        assert grid.ledger.by("round", "messages") == {3: 2, 7: 2}


def test_flowers_own_loop_runs_over_a_meter() -> None:
    with InProcessGrid(client_app(), 3) as engine:
        grid = MeteredGrid(engine)
        fedavg().start(grid, model(), num_rounds=2)
        assert grid.ledger.by("message_type", "messages") == {"evaluate": 12, "train": 12}
        assert grid.ledger.by("round", "messages") == {1: 12, 2: 12}


def test_generators_are_refused_and_empty_batches_are_free() -> None:
    with InProcessGrid(client_app(), 1) as engine:
        grid = MeteredGrid(engine)
        with pytest.raises(ConfigError, match="list"):
            grid.send_and_receive(m for m in batch(grid))
        with pytest.raises(ConfigError, match="list"):
            grid.push_messages(m for m in batch(grid))
        assert grid.send_and_receive([]) == []
        assert len(grid.ledger) == 0


def test_the_engine_stays_reachable_and_only_it_can_be_stored() -> None:
    with InProcessGrid(client_app(), 2) as engine:
        grid = MeteredGrid(engine)
        assert grid.clock == 0.0
        grid.wipe(1)
        with pytest.raises(AttributeError):
            _ = grid.no_such_thing
        with pytest.raises(StateError, match="in-process"):
            MeteredGrid(SimulationLikeGrid(engine)).snapshot()


def claiming_app(*claims: object):
    """Return an app whose replies claim ``claims[partition]`` whatever partition they come from."""

    def app(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        content = RecordDict({"metrics": MetricRecord({"partition": partition})})
        content[NODE_RECORD] = ConfigRecord({PARTITION_KEY: claims[partition]})  # type: ignore[dict-item]
        return Message(content, reply_to=message)

    return app


def rows(grid: MeteredGrid) -> list[tuple[int, ...]]:
    """Return the ledger row by row, nodes by name."""
    columns, names = grid.ledger.columns(), grid.ledger.tables()["nodes"]
    return [
        (int(r), names[n], int(k)) for r, n, k in zip(columns["round"], columns["node"], columns["kind"], strict=True)
    ]


@pytest.mark.parametrize("claim", [-1, -(2**62), 2**31, True])
def test_an_absurd_partition_is_no_partition(claim: object) -> None:
    with InProcessGrid(claiming_app(claim, 0), 2) as engine:
        grid = MeteredGrid(SimulationLikeGrid(engine), poll_seconds=0.0)
        for round_ in (1, 2):
            assert len(grid.send_and_receive(batch(grid, round_))) == 2
        assert grid.ledger.by("node", "messages") == {0: 4, engine.node_id_of(0): 4}


def test_what_the_engine_knows_of_a_node_counts_and_not_what_the_node_claims() -> None:
    with InProcessGrid(claiming_app(2, 2, 0, -5), 4, fault=ScriptedFaults({(1, 3): late(1)})) as engine:
        grid = MeteredGrid(engine)
        first = batch(grid, 1)
        assert origin(grid.send_and_receive(first)) == [0, 1, 2]
        assert [grid.partition_of(n) for n in engine.get_node_ids()] == [0, 1, 2, 3]
        # A node the engine has forgotten since is still the one it was.
        node = engine.node_id_of(3)
        engine.remove_node(node)
        assert origin(grid.send_and_receive(batch(grid, 2))) == [0, 1, 2]
        assert origin(grid.pull_messages([first[3].metadata.message_id])) == [3]
        assert grid.partition_of(node) == 3
        assert grid.ledger.by("node", "messages") == {0: 4, 1: 4, 2: 4, 3: 2}


def test_two_nodes_that_claim_one_partition_are_kept_apart_in_the_order_of_their_messages() -> None:
    seen = []
    for polls in (0, 1):
        with InProcessGrid(claiming_app(1, 1, 0), 3, seed=5) as engine:
            inner = SimulationLikeGrid(engine)
            # Replies arrive in one order and in the opposite one.
            pull = inner.pull_messages
            inner.pull_messages = lambda ids, pull=pull, back=bool(polls): pull(ids)[:: -1 if back else 1]  # type: ignore[method-assign]
            grid = MeteredGrid(inner, poll_seconds=0.0)
            orders = [origin(grid.send_and_receive(batch(grid, round_))) for round_ in (1, 2)]
            first = min(engine.node_id_of(0), engine.node_id_of(1))
            other = max(engine.node_id_of(0), engine.node_id_of(1))
            assert grid.partition_of(first) == 1
            assert grid.partition_of(other) is None
            assert grid.ledger.by("node", "messages") == {0: 4, 1: 4, other: 4}
            assert orders == [[2.0, float(engine.partition_of(first)), float(engine.partition_of(other))]] * 2  # type: ignore[arg-type]
            seen.append((orders, rows(grid)))
    assert seen[0] == seen[1]


def test_a_partition_is_taken_over_only_from_a_node_that_is_gone() -> None:
    with InProcessGrid(claiming_app(0, 0), 1) as engine:
        grid = MeteredGrid(SimulationLikeGrid(engine), poll_seconds=0.0)
        grid.send_and_receive(batch(grid, 1))
        newcomer = engine.add_node(1)
        grid.send_and_receive(batch(grid, 2))
        assert grid.ledger.by("node", "messages") == {0: 4, newcomer: 2}
        engine.remove_node(0)
        grid.send_and_receive(batch(grid, 3))
        assert grid.ledger.by("node", "messages") == {0: 8}


def test_a_node_does_not_move_its_rows_by_claiming_another_partition() -> None:
    claims = [0, 1]
    with InProcessGrid(lambda m, c: claiming_app(*claims)(m, c), 2) as engine:
        grid = MeteredGrid(SimulationLikeGrid(engine), poll_seconds=0.0)
        grid.send_and_receive(batch(grid, 1))
        claims[:] = [7, 1]
        assert origin(grid.send_and_receive(batch(grid, 2))) == [0, 1]
        assert grid.ledger.by("node", "messages") == {0: 4, 1: 4}


def test_replies_are_joined_by_what_is_known_first_and_claimed_second() -> None:
    sent, replies = [], []
    for node, claim in ((11, 5), (12, 5), (13, None), (14, 0), (15, -3)):
        with acting_as(1, 1):
            message = Message(RecordDict(), node, "train")
        set_message_id(message, f"id of {node}")
        content = RecordDict() if claim is None else RecordDict({NODE_RECORD: ConfigRecord({PARTITION_KEY: claim})})
        sent.append(message)
        replies.append(Message(content, reply_to=message))
    for arrived in (replies, replies[::-1]):
        joined = join(addressed(sent), arrived, {14: 9}.get)
        assert [reply.metadata.src_node_id for reply in joined] == [11, 12, 14, 13, 15]
