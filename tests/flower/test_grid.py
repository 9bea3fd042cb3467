"""The in-process engine behaves like the real ones, faults included, and repeats exactly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcomp.clients.app import app
from fedcomp.clients.memory import MEMORY
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower import _private, nodes, store
from fedcomp.flower.faults import Delivery, Fault, RandomFaults, ScriptedFaults, late
from fedcomp.flower.grid import EXPIRY, GridError, InProcessGrid, in_process
from fedcomp.flower.ledger import wire_bytes
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import STYPE, put_frame, put_node, take_frame
from fedcomp.rng import Key
from fedcomp.timing.links import Link


def counting_app() -> ClientApp:
    """An app that counts its runs in its state and replies with the count and a frame."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        runs = int(context.state["count"]["runs"]) + 1 if "count" in context.state else 1
        context.state["count"] = ConfigRecord({"runs": runs})
        if message.content.config_records.get("config", {}).get("raise", False):
            raise RuntimeError("as asked")
        content = RecordDict({"metrics": MetricRecord({"runs": runs})})
        put_node(content, int(context.node_config["partition-id"]))
        put_frame(content, "update", Key(0, "frame", runs).bits(50).tobytes())
        return Message(content, reply_to=message)

    return app


def messages(grid: InProcessGrid, round_: int = 1, **config: object) -> list[Message]:
    record = RecordDict({"config": ConfigRecord({"server-round": round_, **config})})
    return [Message(record, node_id, "train") for node_id in grid.get_node_ids()]


def runs_of(grid: InProcessGrid, partition: int) -> int:
    state = grid.context(partition).state
    return int(state["count"]["runs"]) if "count" in state else 0


def partitions(grid: InProcessGrid, replies: list[Message]) -> list[int | None]:
    return [grid.partition_of(reply.metadata.src_node_id) for reply in replies]


def always(fault: Fault | str, partition: int = 1):
    return lambda delivery: fault if delivery.partition == partition else None


def test_replies_answer_their_messages_and_carry_ids_like_a_deployment() -> None:
    with InProcessGrid(counting_app(), 5, {"lr": 0.5}, seed=3) as grid:
        sent = messages(grid)
        replies = grid.send_and_receive(sent)
        ids = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
        assert len(ids) == 5
        assert all(len(i) == 64 for i in ids)
        assert {r.metadata.reply_to_message_id: r.metadata.src_node_id for r in replies} == ids
        context = grid.context(2)
        assert context.node_config == {"partition-id": 2, "num-partitions": 5}
        assert context.run_config == {"lr": 0.5}
        assert context.node_id == grid.node_id_of(2)
        assert context.run_id == grid.run.run_id == sent[0].metadata.run_id
        assert sent[0].object_id == sent[0].metadata.message_id


def test_node_ids_are_seeded_and_too_large_for_a_float() -> None:
    ids = [InProcessGrid(counting_app(), 20, seed=s).get_node_ids() for s in (0, 0, 1)]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])
    assert any(int(float(i)) != i for i in ids[0])
    assert all(2**61 <= i < 2**62 for i in ids[0])


def test_state_lives_in_the_context_between_messages() -> None:
    with InProcessGrid(counting_app(), 3) as grid:
        for expected in (1, 2, 3):
            replies = grid.send_and_receive(messages(grid))
            assert [r.content["metrics"]["runs"] for r in replies] == [expected] * 3
        grid.wipe(1)
        assert [runs_of(grid, p) for p in range(3)] == [3, 0, 3]
        grid.wipe(grid.node_id_of(2))
        assert runs_of(grid, 2) == 0


def test_clients_and_server_share_no_objects() -> None:
    seen: list[object] = []

    def app(message: Message, context: Context) -> Message:
        seen.append(message)
        array = message.content["arrays"]["w"]
        # A client that works in place on what it was sent must not change the server's model.
        message.content["arrays"]["w"] = Array(array.numpy() * 0)
        message.content["config"]["server-round"] = 99
        context.state["kept"] = message.content["arrays"]
        reply = Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
        seen.append(reply)
        return reply

    with InProcessGrid(app, 2) as grid:
        model = ArrayRecord({"w": Array(np.arange(5.0))})
        record = RecordDict({"arrays": model, "config": ConfigRecord({"server-round": 1})})
        sent = [Message(record, n, "train") for n in grid.get_node_ids()]
        replies = grid.send_and_receive(sent)
        assert np.array_equal(model["w"].numpy(), np.arange(5.0))
        assert record["config"]["server-round"] == 1
        for reply in replies:
            reply.content["arrays"]["w"] = Array(np.ones(5))
        assert all(np.array_equal(grid.context(p).state["kept"]["w"].numpy(), np.zeros(5)) for p in (0, 1))
        mine = {id(m) for m in (*sent, *replies)} | {id(m.content) for m in (*sent, *replies)}
        theirs = {id(m) for m in seen} | {id(m.content) for m in seen}  # type: ignore[attr-defined]
        assert not mine & theirs


def test_shuffling_is_seeded_and_can_be_switched_off() -> None:
    orders = []
    for options in ({}, {}, {"shuffle_replies": False}):
        with InProcessGrid(counting_app(), 12, seed=5, **options) as grid:
            orders.append(partitions(grid, grid.send_and_receive(messages(grid))))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] == list(range(12))
    assert sorted(orders[0]) == list(range(12))


def test_offline_is_error_5_in_the_superlinks_name() -> None:
    with InProcessGrid(counting_app(), 3, fault=always("offline")) as grid:
        sent = messages(grid)
        replies = {r.metadata.reply_to_message_id: r for r in grid.send_and_receive(sent)}
        refusal = replies[sent[1].metadata.message_id]
        assert refusal.error.code == 5
        assert refusal.metadata.src_node_id == 1
        assert runs_of(grid, 1) == 0
        assert runs_of(grid, 0) == 1


@pytest.mark.parametrize(("error_state", "kept"), [("discard", 0), ("keep", 1)])
def test_an_exception_is_error_2_and_its_state_is_discarded_or_kept(error_state: str, kept: int) -> None:
    with InProcessGrid(counting_app(), 2, error_state=error_state) as grid:  # type: ignore[arg-type]
        replies = grid.send_and_receive(messages(grid, **{"raise": True}))
        assert [r.error.code for r in replies] == [2, 2]
        assert "as asked" in replies[0].error.reason
        assert sorted(partitions(grid, replies)) == [0, 1]
        assert runs_of(grid, 0) == kept
        assert _private.current_identity() == (grid.run.run_id, 1, 1)
    with InProcessGrid(counting_app(), 2, error_state=error_state, fault=always("raise")) as grid:  # type: ignore[arg-type]
        replies = grid.send_and_receive(messages(grid))
        assert sorted(r.has_error() for r in replies) == [False, True]
        assert runs_of(grid, 1) == kept


def test_silent_runs_nothing_and_lost_reply_runs_and_commits() -> None:
    for fault, ran in (("silent", 0), ("lost_reply", 1)):
        with InProcessGrid(counting_app(), 3, fault=always(fault)) as grid:
            ids = grid.push_messages(messages(grid))
            assert sorted(partitions(grid, grid.pull_messages(ids))) == [0, 2]
            assert grid.pull_messages([ids[1]]) == []
            assert runs_of(grid, 1) == ran


def test_late_replies_come_exactly_that_many_pushes_later() -> None:
    plan = ScriptedFaults({(1, 1): late(2)})
    with InProcessGrid(counting_app(), 2, fault=plan) as grid:
        ids = grid.push_messages(messages(grid, 1))
        assert partitions(grid, grid.pull_messages(ids)) == [0]
        assert runs_of(grid, 1) == 1
        for round_ in (2, 3):
            assert grid.pull_messages([ids[1]]) == []
            grid.send_and_receive(messages(grid, round_))
        (reply,) = grid.pull_messages([ids[1]])
        assert reply.content["metrics"]["runs"] == 1
        assert reply.metadata.reply_to_message_id == ids[1]


def test_replies_nobody_pulls_are_dropped_in_the_end() -> None:
    plan = ScriptedFaults({(1, 0): late(1), (1, 1): "silent"})
    with InProcessGrid(counting_app(), 2, fault=plan) as grid:
        ids = grid.push_messages(messages(grid, 1))
        kept = len(grid.snapshot())
        for round_ in range(2, EXPIRY + 3):
            grid.send_and_receive(messages(grid, round_))
        assert grid.pull_messages([]) == []
        grid.send_and_receive(messages(grid, EXPIRY + 3))
        assert [r.error.code for r in grid.pull_messages(ids)] == [3, 3]
        assert len(grid.snapshot()) < kept


def test_duplicate_runs_twice_and_duplicate_reply_once_and_both_arrive_twice() -> None:
    for fault, counts in (("duplicate", [1, 2]), ("duplicate_reply", [1, 1])):
        with InProcessGrid(counting_app(), 2, fault=always(fault)) as grid:
            sent = messages(grid)
            replies = grid.send_and_receive(sent)
            twice = [r for r in replies if r.metadata.reply_to_message_id == sent[1].metadata.message_id]
            assert sorted(r.content["metrics"]["runs"] for r in twice) == counts
            assert runs_of(grid, 1) == counts[-1]
            assert len(replies) == 3


def test_corrupt_flips_exactly_one_bit_of_the_frame() -> None:
    frames = []
    for _ in range(2):
        with InProcessGrid(counting_app(), 2, seed=9, fault=always("corrupt"), shuffle_replies=False) as grid:
            good, bad = (take_frame(r.content, "update") for r in grid.send_and_receive(messages(grid)))
            assert runs_of(grid, 1) == 1
        frames.append(bad)
        difference = np.bitwise_xor(np.frombuffer(good, np.uint8), np.frombuffer(bad, np.uint8))
        assert int(np.unpackbits(difference).sum()) == 1
    assert frames[0] == frames[1]


def test_corrupt_leaves_records_that_only_look_like_frames_alone() -> None:
    def app(message: Message, context: Context) -> Message:
        return Message(RecordDict({"update": ConfigRecord({STYPE: "no frame"})}), reply_to=message)

    with InProcessGrid(app, 2, fault=always("corrupt")) as grid:
        replies = grid.send_and_receive(messages(grid))
        assert [r.content["update"][STYPE] for r in replies] == ["no frame"] * 2


def test_each_reply_can_be_pulled_once() -> None:
    with InProcessGrid(counting_app(), 2) as grid:
        ids = grid.push_messages(messages(grid))
        assert not any(r.has_error() for r in grid.pull_messages(ids))
        again = grid.pull_messages([ids[0], "never sent"])
        assert [r.error.code for r in again] == [3, 3]
        assert {r.metadata.reply_to_message_id for r in again} == {ids[0], "never sent"}


def test_unknown_nodes_empty_batches_and_generators() -> None:
    with InProcessGrid(counting_app(), 1) as grid:
        known = grid.get_node_ids()[0]
        batch = [Message(RecordDict(), 12345, "train"), Message(RecordDict(), known, "train")]
        ids = grid.push_messages(batch)
        assert ids[0] == ""
        assert len(ids[1]) == 64
        assert len(grid.pull_messages(ids)) == 1
        pushes = grid.exchange
        assert grid.send_and_receive([]) == []
        assert grid.exchange == pushes
        with pytest.raises(ConfigError, match="list"):
            grid.push_messages(m for m in batch)


def test_two_messages_to_one_node_run_one_after_the_other() -> None:
    with InProcessGrid(counting_app(), 1, shuffle_replies=False) as grid:
        node = grid.get_node_ids()[0]
        batch = [Message(RecordDict({"config": ConfigRecord({"i": i})}), node, "train") for i in range(8)]
        assert [r.content["metrics"]["runs"] for r in grid.send_and_receive(batch)] == list(range(1, 9))


def test_identity_is_restored_whatever_happens() -> None:
    def interrupted(message: Message, context: Context) -> Message:
        assert _private.current_identity()[1] == context.node_id
        raise KeyboardInterrupt

    assert _private.current_identity() == (None, None, None)
    with InProcessGrid(interrupted, 1) as grid:
        before = _private.current_identity()
        with pytest.raises(KeyboardInterrupt):
            grid.push_messages(messages(grid))
        assert _private.current_identity() == before
    assert _private.current_identity() == (None, None, None)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_grids_side_by_side_are_closed_in_any_order(seeds: tuple[int, int]) -> None:
    for first_closes_first in (True, False):
        a, b = (InProcessGrid(counting_app(), 1, seed=seed) for seed in seeds)
        left, right = (a, b) if first_closes_first else (b, a)
        left.close()
        assert _private.current_identity() == (right.run.run_id, 1, 1)
        assert len(right.send_and_receive(messages(right))) == 1
        left.close()
        assert len(right.send_and_receive(messages(right))) == 1
        right.close()
        assert _private.current_identity() == (None, None, None)


def test_the_grid_in_the_middle_may_close_first_and_closing_twice_is_harmless() -> None:
    a, b, c = (InProcessGrid(counting_app(), 1, seed=seed) for seed in (1, 2, 1))
    b.close()
    assert _private.current_identity() == (c.run.run_id, 1, 1)
    c.close()
    c.close()
    assert _private.current_identity() == (a.run.run_id, 1, 1)
    a.close()
    assert _private.current_identity() == (None, None, None)


def test_an_identity_that_someone_else_set_since_is_left_alone() -> None:
    before = (5, 6, 7)
    _private.adopt_identity(before)
    a = InProcessGrid(counting_app(), 1, seed=1)
    _private.adopt_identity((9, 9, 9))
    b = InProcessGrid(counting_app(), 1, seed=2)
    a.close()
    b.close()
    assert _private.current_identity() == (9, 9, 9)
    a = InProcessGrid(counting_app(), 1, seed=1)
    _private.adopt_identity(before)
    a.close()
    assert _private.current_identity() == before


@pytest.mark.parametrize("error_state", ["discard", "keep"])
def test_an_app_that_ends_its_process_is_error_8_and_leaves_no_state(error_state: str) -> None:
    def app(message: Message, context: Context) -> Message:
        context.state["half"] = ConfigRecord({"done": True})
        if context.node_config["partition-id"] == 1:
            sys.exit(3)
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(app, 3, error_state=error_state) as grid:  # type: ignore[arg-type]
        sent = messages(grid)
        replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(sent)}
        crashed = replies[grid.node_id_of(1)]
        assert crashed.error.code == 8
        assert "stopped responding" in crashed.error.reason
        assert sum(r.has_error() for r in replies.values()) == 1
        assert [len(grid.context(p).state) for p in range(3)] == [1, 0, 1]
        assert _private.current_identity() == (grid.run.run_id, 1, 1)


@pytest.mark.parametrize("wrong", [lambda m, c: None, lambda m, c: Message(RecordDict(), 1, "train")])
def test_an_app_that_returns_nonsense_is_an_error_reply(wrong) -> None:
    with InProcessGrid(wrong, 1) as grid:
        (reply,) = grid.send_and_receive(messages(grid))
        assert reply.error.code == 2


def test_changing_the_run_config_is_an_error_as_in_the_simulation() -> None:
    def app(message: Message, context: Context) -> Message:
        context.run_config["lr"] = 2.0
        context.state["x"] = ConfigRecord({"y": 1})
        return Message(RecordDict(), reply_to=message)

    with InProcessGrid(app, 1, {"lr": 1.0}) as grid:
        (reply,) = grid.send_and_receive(messages(grid))
        assert reply.error.code == 0
        assert len(grid.context(0).state) == 0


def test_nodes_join_and_leave() -> None:
    with InProcessGrid(counting_app(), 3, node_config=lambda p: {"speed": p * 2}) as grid:
        grid.send_and_receive(messages(grid))
        old = grid.node_id_of(1)
        grid.remove_node(1)
        assert grid.partitions == [0, 2]
        assert grid.push_messages([Message(RecordDict(), old, "train")]) == [""]
        new = grid.add_node()
        assert new != old
        assert grid.partition_of(new) == 1
        assert grid.partition_of(old) is None
        assert runs_of(grid, 1) == 0
        assert grid.context(1).node_config == {"partition-id": 1, "num-partitions": 3, "speed": 2}
        assert grid.partition_of(grid.add_node()) == 3
        with pytest.raises(GridError, match="already"):
            grid.add_node(3)
        with pytest.raises(GridError, match="partition 77"):
            grid.wipe(77)


def test_the_clock_follows_the_slowest_node() -> None:
    links = {0: Link(8e6, 16e6, 0.1), 1: Link(8e3, 8e3, 0.5)}
    with InProcessGrid(counting_app(), 3, links=links, compute_seconds=lambda d: 2.0 + d.partition) as grid:
        sent = messages(grid)
        replies = {grid.partition_of(r.metadata.src_node_id): r for r in grid.send_and_receive(sent)}
        down, up = grid.wire_bytes(sent[1]), grid.wire_bytes(replies[1])
        slowest = 0.5 + down * 8 / 8e3 + 3.0 + up * 8 / 8e3 + 0.5
        assert grid.clock == pytest.approx(slowest, rel=1e-12)
        assert (down, up) == (wire_bytes(sent[1]), wire_bytes(replies[1]))
        # An exchange with the fast node alone starts when the former one ended.
        grid.send_and_receive([m for m in messages(grid) if grid.partition_of(m.metadata.dst_node_id) == 2])
        assert grid.clock == pytest.approx(slowest + 4.0, rel=1e-12)


def test_links_that_do_not_fit_the_nodes_are_refused_before_anything_is_sent() -> None:
    link = Link(8e6, 8e6)
    wrong = {
        "2 entries for 3 nodes": [link, link],
        "str for partition 2": [link, link, "lan"],
        "float for partition 0": {0: 1e6},
        "key '0'": {"0": link},
        "key -1": {-1: link},
        "key True": {True: link},
        "is a float": 8e6,
    }
    for match, links in wrong.items():
        with pytest.raises(ConfigError, match=match):
            InProcessGrid(counting_app(), 3, links=links)  # type: ignore[arg-type]
    assert _private.current_identity() == (None, None, None)


def test_a_node_without_an_entry_in_a_sequence_of_links_cannot_join() -> None:
    link = Link(8e6, 8e6)
    with InProcessGrid(counting_app(), 1) as larger:
        larger.add_node()
        larger.add_node()
        stored = larger.snapshot()
    with InProcessGrid(counting_app(), 1, links=[link, link]) as grid:
        assert grid.partition_of(grid.add_node()) == 1
        before = grid.snapshot()
        for join in (grid.add_node, lambda: grid.add_node(7), lambda: grid.restore(stored)):
            with pytest.raises(GridError, match="links has 2 entries"):
                join()
        assert grid.snapshot() == before
        assert len(grid.send_and_receive(messages(grid))) == 2
        assert grid.clock > 0


def test_nodes_that_a_mapping_of_links_leaves_out_transfer_in_no_time() -> None:
    with InProcessGrid(counting_app(), 2, links={np.int64(1): Link(8e3, 8e3)}) as grid:
        slow, fast = (messages(grid)[p] for p in (1, 0))
        grid.send_and_receive([fast])
        assert grid.clock == 0.0
        grid.send_and_receive([slow])
        assert grid.clock > 0.0


def test_a_timeout_costs_simulated_time_only_and_slow_replies_miss_it() -> None:
    with InProcessGrid(counting_app(), 3, fault=always("silent", 0), compute_seconds=lambda d: 10.0 * d.partition) as g:
        assert len(g.send_and_receive(messages(g))) == 2
        assert g.clock == 20.0
        sent = messages(g)
        replies = g.send_and_receive(sent, timeout=15.0)
        assert partitions(g, replies) == [1]
        assert g.clock == 35.0
        (reply,) = g.pull_messages([sent[2].metadata.message_id])
        assert g.partition_of(reply.metadata.src_node_id) == 2
        assert g.clock == 40.0


def test_a_busy_node_starts_its_next_message_when_it_is_free() -> None:
    with InProcessGrid(counting_app(), 1, compute_seconds=5.0) as grid:
        first = grid.push_messages(messages(grid, 1))
        second = grid.push_messages(messages(grid, 2))
        grid.pull_messages(first)
        assert grid.clock == 5.0
        grid.pull_messages(second)
        assert grid.clock == 10.0


@pytest.mark.slow
def test_random_faults_are_a_pure_function_of_the_delivery() -> None:
    plan = RandomFaults(Key(4, "faults"), {"offline": 0.2, "late": 0.3}, pushes=4, message_types=("train",))
    deliveries = [Delivery(e, 1, p, 0, "train") for e in range(60) for p in range(50)]
    first = [plan(d) for d in deliveries]
    assert first == [plan(d) for d in reversed(deliveries)][::-1]
    kinds = [f.kind for f in first]
    assert abs(kinds.count("offline") / 3000 - 0.2) < 0.03
    assert abs(kinds.count("late") / 3000 - 0.3) < 0.035
    assert {f.pushes for f in first if f.kind == "late"} == {4}
    assert plan(Delivery(0, 1, 0, 0, "evaluate")).kind == "none"


def test_impossible_faults_and_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match="lost_reply"):
        Fault("lost_replies")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more than 1"):
        RandomFaults(Key(0), {"offline": 0.7, "silent": 0.4})
    with pytest.raises(ConfigError, match="probability"):
        RandomFaults(Key(0), {"offline": -0.1})
    with pytest.raises(ConfigError, match="keep"):
        InProcessGrid(counting_app(), 1, error_state="forget")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_nodes"):
        InProcessGrid(counting_app(), -1)


def plan_of_everything(delivery: Delivery) -> Fault:
    return RandomFaults(Key(1, "x"), dict.fromkeys(("late", "duplicate", "lost_reply", "corrupt"), 0.1), pushes=2)(
        delivery
    )


def trace(grid: InProcessGrid, rounds: range) -> list:
    seen = []
    for round_ in rounds:
        for r in grid.send_and_receive(messages(grid, round_), timeout=3.0):
            frame = None if r.has_error() else take_frame(r.content, "update")
            seen.append((round_, grid.partition_of(r.metadata.src_node_id), frame))
        seen.append((grid.clock, grid.exchange))
    return seen


@pytest.mark.slow
def test_a_restored_grid_continues_exactly() -> None:
    options = {"seed": 2, "fault": plan_of_everything, "compute_seconds": 1.0}
    with InProcessGrid(counting_app(), 8, **options) as whole:
        expected = trace(whole, range(1, 7))
    with InProcessGrid(counting_app(), 8, **options) as first:
        begun = trace(first, range(1, 4))
        ids = first.push_messages(messages(first, 99))
        waiting = first.snapshot()
        first.pull_messages(ids)
    assert begun == expected[: len(begun)]
    with InProcessGrid(counting_app(), 8, **options) as second:
        trace(second, range(1, 4))
        stored = second.snapshot()
        ids_now = second.get_node_ids()
    with InProcessGrid(counting_app(), 8, **options) as third:
        third.restore(stored)
        assert third.snapshot() == stored
        assert third.get_node_ids() == ids_now
        assert trace(third, range(4, 7)) == expected[len(begun) :]
        assert [third.context(p).state for p in range(8)] == [whole.context(p).state for p in range(8)]
        # Replies that were on their way when the snapshot was taken can still be pulled.
        third.restore(waiting)
        assert len(third.pull_messages(ids)) >= 5


def test_damaged_or_foreign_snapshots_are_refused() -> None:
    with InProcessGrid(counting_app(), 2, seed=1) as grid:
        data = grid.snapshot()
        with pytest.raises(store.StoreError):
            grid.restore(data[: len(data) // 2])
        with pytest.raises(store.StoreError, match="grid snapshot"):
            grid.restore(store.dumps({}, "something else"))
    with InProcessGrid(counting_app(), 2, seed=2) as other, pytest.raises(GridError, match="seed 1"):
        other.restore(data)


def test_the_engine_is_found_behind_its_wrappers() -> None:
    with InProcessGrid(counting_app(), 1) as grid:
        assert in_process(MeteredGrid(MeteredGrid(grid))) is grid
        assert in_process(object()) is None  # type: ignore[arg-type]


# Clients' states in files: the same runs, one state in memory at a time, nothing left behind.

SPEC = RunSpec("topk", rounds=4, clients=3, settings={"task.hidden": "16", "feedback": True, "codec.density": 0.05})


def counting(message: Message, context: Context) -> Message:
    """Remember how often this node was asked, in a record of some size."""
    held = context.state.get("count")
    count = 0 if held is None else int(held["n"])
    context.state["count"] = ConfigRecord({"n": count + 1})
    context.state["bulk"] = ArrayRecord({"x": Array(np.full(1000, count, np.float32))})
    return Message(RecordDict({"count": ConfigRecord({"n": count + 1})}), reply_to=message)


def ask(grid: InProcessGrid, *asked: int) -> list[int]:
    messages = [Message(RecordDict({"c": ConfigRecord({"x": 1})}), grid.node_id_of(p), "train") for p in asked]
    replies = {r.metadata.reply_to_message_id: r for r in grid.send_and_receive(messages)}
    return [replies[m.metadata.message_id].content["count"]["n"] for m in messages]


def fault(delivery: Delivery) -> Fault | None:
    kinds = {(1, 0): "lost_reply", (2, 1): "raise", (2, 2): "duplicate", (3, 0): "late"}
    kind = kinds.get((delivery.round, delivery.partition))
    return None if kind is None or delivery.message_type != "train" else Fault(kind)


def test_a_run_with_faults_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for states in (None, tmp_path):
        with InProcessGrid(app, 3, fault=fault, states=states) as grid:
            result = serve(SPEC, grid)
            contexts = {node: grid.context(node).state for node in grid.get_node_ids()}
            # Not the contexts' bytes: the session in them is drawn anew for every strategy.
            memories = {n: s[MEMORY]["memory"].data for n, s in contexts.items()}
        found.append(({k: a.tobytes() for k, a in result.arrays.items()}, result.uplink_payload_bytes, memories))
    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == []


def test_only_who_was_asked_has_a_file_and_it_ends_with_the_node_and_the_grid(tmp_path: Path) -> None:
    with InProcessGrid(counting, 5, states=tmp_path) as grid, InProcessGrid(counting, 5, states=tmp_path) as other:
        assert ask(grid, 1, 3) == [1, 1]
        assert ask(grid, 1) == [2]
        # The same ids, since the seed is the same; another folder.
        assert ask(other, 1) == [1]
        folders = sorted(tmp_path.iterdir(), key=lambda folder: -len(list(folder.iterdir())))
        assert [len(list(folder.iterdir())) for folder in folders] == [2, 1]
        assert not grid.node(1).state
        assert grid.context(1).state["count"]["n"] == 2
        grid.wipe(1)
        assert not grid.context(1).state
        grid.remove_node(3)
        assert len(list(folders[0].iterdir())) == 1
        grid.add_node(3)
        assert ask(grid, 3, 1) == [1, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", [None, "files"])
@pytest.mark.parametrize("after", [None, "files"])
def test_a_snapshot_is_the_same_from_files_and_goes_on_in_either(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    def folder(kind: str | None) -> Path | None:
        return None if kind is None else tmp_path

    with InProcessGrid(counting, 3, states=folder(before)) as grid:
        ask(grid, 0, 2)
        data = grid.snapshot()
    with InProcessGrid(counting, 3) as plain:
        ask(plain, 0, 2)
        assert [plain.node(p).stored() for p in range(3)] == _stored(data, after, tmp_path)
    with InProcessGrid(counting, 3, states=folder(after)) as grid:
        grid.restore(data)
        assert ask(grid, 0, 1, 2) == [2, 1, 2]


def _stored(data: bytes, kind: str | None, tmp_path: Path) -> list[bytes]:
    with InProcessGrid(counting, 3, states=None if kind is None else tmp_path) as grid:
        grid.restore(data)
        return [grid.node(p).stored() for p in range(3)]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessGrid(counting, 1, states=tmp_path) as grid:
        assert ask(grid, 0) == [1]

        def full(*_: object) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(nodes.os, "replace", full)
            with pytest.raises(OSError, match="no space"):
                ask(grid, 0)
        assert grid.context(0).state["count"]["n"] == 1
        assert ask(grid, 0) == [2]
    assert os.listdir(tmp_path) == []


def test_an_engine_keeps_states_where_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "states"
    seen = []
    kept = engines.run(SPEC, client_states=folder, on_round=lambda record: seen.append(len(list(folder.rglob("*")))))
    alone = engines.run(SPEC)
    assert {k: a.tobytes() for k, a in kept.arrays.items()} == {k: a.tobytes() for k, a in alone.arrays.items()}
    assert kept.ledger == alone.ledger
    # The folder of the grid, and a file for each client from the first round on.
    assert seen == [1, 4, 4, 4, 4]
    assert list(folder.iterdir()) == []
    for engine in ("ray", "superlink"):
        with pytest.raises(ConfigError, match="client_states is for engine=inprocess"):
            engines.run(RunSpec("topk", engine=engine), client_states=folder)
