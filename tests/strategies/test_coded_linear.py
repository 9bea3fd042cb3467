"""Coded gradient descent over messages: losses in both phases, forgetful devices, resuming."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import linear_toy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from linear_toy import (
    FEATURES,
    PHASE1,
    PHASE2,
    ROWS,
    SETUP,
    client,
    data,
    frame,
    metered,
    model,
    moves,
    run,
    set_frame,
    set_words,
    tampered,
    uncoded,
    vector,
    with_vector,
)
from toy import with_halves

from fedcomp.clients.app import app as generic_app
from fedcomp.clients.coded.linear import linear_device
from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import PEER_ADDRESS, PEER_STORE
from fedcomp.coding.listener import Listener, ListenerLimits
from fedcomp.coding.spool import Spool
from fedcomp.errors import ConfigError, FedcompError, NoUsableReply
from fedcomp.flower import asks
from fedcomp.flower.faults import Delivery, Fault, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.coded.linear import CodedLinearGD
from fedcomp.systems.coded.linear import LinearModel, LinearRows
from fedcomp.tasks import get_task
from fedcomp.tasks.linear import linear_rows


def failing(phase: str, *partitions: int, rounds: tuple[int, ...] = (), kind: str = "silent") -> Callable:
    """Return the plan by which messages of a phase come to nothing at some devices, in these rounds or in all."""
    meant = lambda d: d.message_type == phase and d.partition in partitions and (not rounds or d.round in rounds)  # noqa: E731
    return lambda delivery: kind if meant(delivery) else "none"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "loss"), [("balanced", "logistic"), ("mds", "squares"), ("general", "hinge")])
def test_equals_uncoded_descent_with_random_losses_in_both_phases(code: str, loss: str) -> None:
    faults = RandomFaults(Key(2, "losses"), {"silent": 0.05, "lost_reply": 0.05}, message_types=["query"])
    lr = 0.1 if loss == "squares" else 0.5
    density = 1.0 if code == "general" else 0.5
    strategy = CodedLinearGD(partitions=6, parities=6, code=code, density=density, loss=loss, lr=lr, l2=0.01)
    result = run(strategy, metered(12, fault=faults, app=client(loss)), 40)
    reports = strategy.reports.sections("linear").values()
    assert sum(moves(strategy)) > 25
    assert sum(report.retries for report in reports) > 10
    assert any(report.answered < 12 for report in reports)
    assert np.abs(vector(result.arrays) - uncoded(6, moves(strategy), loss, lr, 0.01)).max() < 1e-10
    assert np.abs(vector(result.arrays)).max() > 0.05
    skipped = [number for number, report in strategy.reports.sections("linear").items() if report.skipped]
    assert all(result.train_metrics_clientapp[number]["linear.skipped"] == 1 for number in skipped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "lost_reply", "offline", "raise"])
def test_a_device_lost_between_the_phases_is_made_up_for(kind: str) -> None:
    strategy = CodedLinearGD(partitions=5, parities=5, code="gaussian", density=0.8, lr=0.5)
    grid = metered(10, fault=failing(PHASE2, 0, 3, kind=kind))
    result = run(strategy, grid, 4)
    assert moves(strategy) == [True] * 4
    for report in strategy.reports.sections("linear").values():
        assert (report.answered, report.retries, sorted(report.lost)) == (10, 1, [0, 3])
        assert not {0, 3} & set(report.used)
    assert np.abs(vector(result.arrays) - uncoded(5, [True] * 4)).max() < 1e-10
    # Phase 1 was not asked again.
    assert grid.ledger.by("round", "messages", message_type=PHASE1, direction="down") == dict.fromkeys(range(1, 5), 10)


def test_a_message_that_gets_lost_is_repeated_when_nobody_can_make_up_for_it() -> None:
    seen: dict[int, int] = {}

    def fault(delivery: Delivery) -> str:
        if delivery.message_type == PHASE2 and delivery.partition == 1:
            seen[delivery.round] = seen.get(delivery.round, 0) + 1
            return "lost_reply" if seen[delivery.round] == 1 else "none"
        return "none"

    strategy = CodedLinearGD(partitions=3, parities=0, code="mds", lr=0.5)
    result = run(strategy, metered(3, fault=fault), 3)
    assert [report.retries for report in strategy.reports.sections("linear").values()] == [1, 1, 1]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 3)).max() < 1e-10


def test_what_does_not_decode_is_skipped_and_the_model_stays() -> None:
    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5)
    result = run(strategy, metered(6, fault=failing(PHASE1, 2, 5, rounds=(2,))), 3)
    assert moves(strategy) == [True, False, True]
    assert "rank 2, 3 partitions need rank 3" in strategy.reports[2].linear.skipped
    assert np.abs(vector(result.arrays) - uncoded(3, [True, False, True])).max() < 1e-10
    assert np.abs(uncoded(3, [True] * 3) - uncoded(3, [True] * 2)).max() > 1e-3


def test_approximate_says_what_is_missing() -> None:
    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5, approximate=True)
    result = run(strategy, metered(6, fault=failing(PHASE1, 2, 5)), 3)
    assert [report.missing for report in strategy.reports.sections("linear").values()] == [len(data(2).x)] * 3
    assert all("lacks 14 examples" in strategy.reports[number].notes[0] for number in (1, 2, 3))
    assert result.train_metrics_clientapp[1]["linear.missing"] == 14
    # It is the exact gradient of the other partitions.
    assert np.abs(vector(result.arrays) - uncoded(2, [True] * 3)).max() < 1e-10


def test_a_round_that_only_an_owner_of_nothing_answers_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An approximate step is the mean over the examples in it, of which there are none."""
    whole = linear_toy.data
    nothing = LinearRows(np.zeros((0, FEATURES)), np.zeros(0), "logistic")
    monkeypatch.setattr(linear_toy, "data", lambda p, loss="logistic": whole(p, loss) if p else nothing)
    strategy = CodedLinearGD(partitions=2, parities=2, code="replication", lr=0.5, approximate=True)
    run(strategy, metered(4, fault=failing(PHASE1, 1, 3, rounds=(2,))), 3)
    assert moves(strategy) == [True, False, True]
    assert "partitions [0] are determined, and have no examples" in strategy.reports[2].linear.skipped


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "missing", "retries"), [(1, 0, 3), (2, 0, 4), (99, 14, 5)])
def test_approximate_gives_up_only_what_does_not_come_back(lost: int, missing: int, retries: int) -> None:
    seen: dict[tuple[int, int], int] = {}

    def fault(delivery: Delivery) -> str:
        if delivery.message_type != PHASE2 or delivery.partition not in (2, 5):
            return "none"
        key = delivery.round, delivery.partition
        seen[key] = seen.get(key, 0) + 1
        # The copy is gone for good; the owner's messages are lost so many times.
        return "silent" if delivery.partition == 5 or seen[key] <= lost else "none"

    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5, approximate=True)
    result = run(strategy, metered(6, fault=fault), 2)
    assert moves(strategy) == [True] * 2
    assert [report.missing for report in strategy.reports.sections("linear").values()] == [missing] * 2
    assert np.abs(vector(result.arrays) - uncoded(2 if missing else 3, [True] * 2)).max() < 1e-10
    assert all(report.retries == retries for report in strategy.reports.sections("linear").values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_a_device_that_lost_its_state_is_set_up_again(transport: str) -> None:
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5, transport=transport)
    grid = metered(7)

    def forget(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 2:
            grid.inner.wipe(1)
            grid.inner.wipe(5)

    result = fit(strategy, grid, model(), 5, on_round=forget)
    assert moves(strategy) == [True] * 5
    assert [report.built for report in strategy.reports.sections("linear").values()] == [
        list(range(7)),
        [],
        [],
        [1, 5],
        [],
    ]
    assert [report.transfers for report in strategy.reports.sections("linear").values()] == [12, 0, 0, 4, 0]
    assert "set up again" in strategy.reports[3].linear.refused[5]
    assert strategy.reports[3].linear.answered == 5
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 5)).max() < 1e-10


@pytest.mark.slow
def test_a_node_in_the_place_of_another_is_set_up_and_one_that_kept_its_rows_is_not() -> None:
    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    grid = metered(5)

    def exchange(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 1:
            grid.inner.remove_node(4)
        if number == 2:
            grid.inner.add_node(4)

    fit(strategy, grid, model(), 3, on_round=exchange)
    assert moves(strategy) == [True] * 3
    assert strategy.reports[3].linear.joined == strategy.reports[3].linear.built == [4]
    # Another server with the same plan on the same nodes: they join, and have all they need.
    second = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    run(second, grid, 2)
    assert (second.reports[1].linear.joined, second.reports[1].linear.built, second.reports[1].linear.setup_bytes) == (
        [0, 1, 2, 3, 4],
        [],
        {},
    )
    assert moves(second) == [True, True]
    # With another matrix, or rows made from other options of the task, they have nothing.
    third = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=1)
    run(third, grid, 1)
    assert third.reports[1].linear.built == [0, 1, 2, 3, 4]
    fourth = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=1)
    fourth.start(grid, model(), num_rounds=1, train_config=ConfigRecord({"task.partition": "iid"}))
    assert fourth.reports[1].linear.built == [0, 1, 2, 3, 4]


def test_rows_of_another_plan_are_never_multiplied_with() -> None:
    """Two servers take turns on the same nodes; each finds the other's rows and sets the devices up again."""
    grid = metered(5)
    first, second = (CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=seed) for seed in (0, 1))
    arrays = fit(first, grid, model(), 2).arrays
    run(second, grid, 1)
    result = fit(first, grid, arrays, 4, start_round=3)
    assert moves(first) == [True, True, False, True]
    assert "set up again" in first.reports[3].linear.refused[0]
    assert first.reports[4].linear.built == [0, 1, 2, 3, 4]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 3)).max() < 1e-10


def test_a_parity_waits_for_an_owner_that_is_away() -> None:
    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    grid = metered(5)

    def leave(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 1:
            grid.inner.remove_node(0)
            grid.inner.wipe(4)
        if number == 3:
            grid.inner.add_node(0)

    result = fit(strategy, grid, model(), 5, on_round=leave)
    assert strategy.reports[3].notes == ["device 4 waits for partitions [0], whose owners are not there"]
    assert [report.answered for report in strategy.reports.sections("linear").values()] == [5, 3, 3, 5, 5]
    assert strategy.reports[4].linear.built == [0, 4]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 5)).max() < 1e-10


def test_nothing_begins_before_every_owner_has_joined_once() -> None:
    strategy = CodedLinearGD(partitions=3, parities=1, code="mds")
    grid = metered(4)
    grid.inner.remove_node(2)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        fit(strategy, grid, model(), 1)
    assert strategy.plan is None
    assert strategy.reports[1].linear.skipped == "the owners of partitions [2] have not joined yet"
    strategy = CodedLinearGD(partitions=5, parities=1, code="mds")
    with pytest.raises(NoUsableReply, match="4 clients take part, one for each of 5 partitions is needed"):
        run(strategy, metered(4), 3)
    assert list(strategy.reports) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duplicate", "duplicate_reply", "late"])
def test_repeated_and_late_messages_change_nothing(kind: str) -> None:
    def fault(delivery: Delivery) -> Fault:
        return Fault(kind if delivery.partition in (1, 4) else "none")

    broken: list[str] = []
    honest = client()

    def watched(msg: Message, context: Context) -> Message:
        try:
            return honest(msg, context)
        except FedcompError as error:
            broken.append(str(error))
            raise

    strategy = CodedLinearGD(partitions=3, parities=3, code="mds", lr=0.5, transport="peers")
    grid = metered(6, fault=fault, app=watched)
    if kind == "late":
        # Device 1 owns a partition; it never joins.
        with pytest.raises(NoUsableReply, match="learnt nothing"):
            run(strategy, grid, 4)
        assert moves(strategy) == [False] * 4
        assert broken == []
    else:
        result = run(strategy, grid, 4)
        assert broken == []
        assert moves(strategy) == [True] * 4
        assert np.abs(vector(result.arrays) - uncoded(3, [True] * 4)).max() < 1e-10


@pytest.mark.slow
def test_float32_vectors_halve_the_bytes_and_cost_digits() -> None:
    found = {}
    for payload in ("float64", "float32"):
        strategy = CodedLinearGD(partitions=4, parities=4, code="balanced", lr=0.5, payload=payload)
        grid = metered(8)
        error = np.abs(vector(run(strategy, grid, 20).arrays) - uncoded(4, [True] * 20)).max()
        found[payload] = error, grid.ledger.total("payload", round=3) - 4 * grid.ledger.total("messages", round=3)
    assert found["float32"][1] * 2 == found["float64"][1]
    assert found["float64"][0] < 1e-12 < found["float32"][0] < 1e-5


def test_float32_vectors_are_not_solved_for_what_float64_ones_are() -> None:
    """Without device 0 this matrix has condition number 5e5: float32 would leave one digit."""
    for payload, moved in (("float64", True), ("float32", False)):
        strategy = CodedLinearGD(partitions=2, parities=1, code="mds", seed=2673, payload=payload, lr=0.5)
        grid = metered(3, fault=lambda d: "silent" if d.message_type == PHASE1 and d.partition == 0 else "none")
        with contextlib.nullcontext() if moved else pytest.raises(NoUsableReply, match="learnt nothing"):
            run(strategy, grid, 2)
        assert moves(strategy) == [moved] * 2
    assert "IllConditioned" in strategy.reports[1].linear.skipped


@pytest.mark.parametrize(
    ("options", "said"), [({"code": "msd"}, "did you mean 'mds'"), ({"spool": "/nowhere"}, "needs transport='peers'")]
)
def test_wrong_arguments_are_refused_before_anything_is_sent(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CodedLinearGD(**options)


def test_models_that_are_not_linear_are_refused() -> None:
    two = ArrayRecord({"a": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(2, np.float32))})
    three = ArrayRecord({name: Array(np.zeros(1, np.float32)) for name in "abc"})
    integers = ArrayRecord({"a": Array(np.zeros(3, np.int64))})
    for wrong in (two, three, integers, ArrayRecord({})):
        with pytest.raises(ConfigError, match="exact for linear models only"):
            LinearModel(to_arrays(wrong))
    with pytest.raises(ConfigError, match="of weights and at most one number after it as bias"):
        CodedLinearGD(partitions=2).start(metered(4), two, num_rounds=1)
    assert not LinearModel({"w": np.zeros(3)}).bias


@pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")
def test_tasks_that_are_not_linear_say_so_and_linear_ones_give_their_rows() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1)
    config = ConfigRecord({"task": "wifi", "clients": 3})
    grid = metered(3, app=generic_app)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        strategy.start(grid, model(), num_rounds=1, train_config=config)
    assert "not linear in its inputs" in strategy.reports[1].linear.refused[0]
    task = get_task("digits-zero", model="svm")
    x, y = linear_rows(task, task.client(0, 4))
    assert (x.dtype, y.dtype, set(np.unique(y))) == (np.float64, np.float64, {0.0, 1.0})
    assert task.linear_loss == "hinge"
    digits = get_task("digits")
    np.testing.assert_array_equal(task.train_split.x, digits.train_split.x)
    np.testing.assert_array_equal(task.test.y, (digits.test.y == 0).astype(int))


def test_an_app_without_the_handlers_is_told_what_it_lacks() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1)
    with pytest.raises(NoUsableReply):
        run(strategy, metered(3, app=with_halves([compression()])), 1)
    assert "linear_device(rows)" in strategy.reports[1].linear.refused[0]
    with pytest.raises(NoUsableReply):
        run(strategy, metered(3, app=ClientApp()), 1)
    assert "write app = fc.client(app, fc.linear_device(...))" in strategy.reports[1].linear.refused[0]


def test_partitions_follow_from_the_number_of_clients() -> None:
    strategy = CodedLinearGD(parities=2, lr=0.5)
    strategy.start(metered(5), model(), num_rounds=1, train_config=ConfigRecord({"clients": 5}))
    assert (strategy.plan.partitions, strategy.plan.devices) == (3, 5)
    with pytest.raises(ConfigError, match="clients=2"):
        CodedLinearGD(parities=2).start(metered(2), model(), num_rounds=1, train_config=ConfigRecord({"clients": 2}))


def test_a_step_that_is_not_finite_keeps_the_model() -> None:
    strategy = CodedLinearGD(partitions=3, parities=1, loss="squares", lr=1e308)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(strategy, metered(4, app=client("squares")), 2)
    assert "not finite" in strategy.reports[1].linear.skipped


# Coded gradient descent with devices that answer wrongly: noticed, left out, said in the report.


def drop_words(reply: Message) -> None:
    reply.content.config_records[NODE_RECORD].pop("say")


def damaged(reply: Message) -> None:
    data = bytearray(frame(reply, "product"))
    data[3] ^= 16
    set_frame(reply, "product", bytes(data))


WRONG: dict[str, tuple[Callable[[int], Callable[[Message], None]], str]] = {
    "another shape": (lambda size: with_vector("product", np.ones(3)), "expected"),
    "NaN": (lambda size: with_vector("product", np.r_[np.nan, np.ones(size - 1)]), "not all finite"),
    "another type": (lambda size: with_vector("product", np.ones(size), "float32"), "expected"),
    "no words": (lambda size: drop_words, "says NoneType, expected Done"),
    "damaged": (lambda size: damaged, "checksum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_hostile_replies_are_left_out_with_a_reason(phase: int, kind: str) -> None:
    make, said = WRONG[kind]
    change = make(ROWS if phase == 1 else FEATURES + 1)
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5)
    result = run(strategy, metered(7, app=tampered(PHASE1 if phase == 1 else PHASE2, 2, change)), 3)
    assert moves(strategy) == [True] * 3
    for report in strategy.reports.sections("linear").values():
        assert said in report.refused[2]
        assert report.lost == [2]
        assert 2 not in report.used
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 3)).max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0, 1e200, 1e308])
def test_a_wrong_answer_among_two_more_than_needed_is_left_out_and_with_fewer_the_step_stops(value: float) -> None:
    change = with_vector("product", np.full(ROWS, value))
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5)
    result = run(strategy, metered(7, app=tampered(PHASE1, 2, change)), 3)
    assert moves(strategy) == [True] * 3
    assert all(
        "contradict those of all others" in report.refused[2] for report in strategy.reports.sections("linear").values()
    )
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 3)).max() < 1e-10
    strategy = CodedLinearGD(partitions=4, parities=1, code="mds", lr=0.5)
    grid = metered(5, app=tampered(PHASE1, 2, change))
    # What is no number of this world is told from the others all the same.
    if value > 1:
        result = run(strategy, grid, 2)
        assert np.abs(vector(result.arrays) - uncoded(4, [True] * 2)).max() < 1e-10
    else:
        with pytest.raises(NoUsableReply, match="learnt nothing"):
            run(strategy, grid, 2)
        assert "contradict each other" in strategy.reports[1].linear.skipped
    assert moves(strategy) == [value > 1] * 2
    # Without surplus it shows in the second phase.
    strategy = CodedLinearGD(partitions=4, parities=0, code="mds", lr=0.5)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(strategy, metered(4, app=tampered(PHASE1, 2, change)), 2)
    assert moves(strategy) == [False, False]
    # It is not asked once more.
    assert all(report.retries <= 1 for report in strategy.reports.sections("linear").values())


def test_a_device_that_was_wrong_is_not_asked_again_in_the_round() -> None:
    """Its copy is silent, so that every retry looks for somebody else."""
    asked: list[int] = []

    def fault(delivery: Delivery) -> str:
        if delivery.message_type == PHASE2 and delivery.partition == 2:
            asked.append(delivery.round)
        return "silent" if delivery.message_type == PHASE2 and delivery.partition == 5 else "none"

    wrong = tampered(PHASE2, 2, with_vector("product", np.ones(FEATURES + 1)))
    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5)
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(strategy, metered(6, fault=fault, app=wrong), 2)
    assert moves(strategy) == [False, False]
    assert asked == [1, 2]


def replayed(partition: int) -> Callable:
    """A client that sends its first answer to phase 2 again and again."""
    honest, kept = client(), list[bytes]()

    def call(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if msg.metadata.message_type == PHASE2 and context.node_config["partition-id"] == partition:
            kept.append(frame(reply, "product"))
            set_frame(reply, "product", kept[0])
        return reply

    return call


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ones", "huge", "replayed"])
@pytest.mark.parametrize("payload", ["float64", "float32"])
def test_a_wrong_part_of_the_gradient_is_noticed_and_made_up_for(kind: str, payload: str) -> None:
    size = FEATURES + 1
    value = {"ones": 1.0, "huge": 1e308 if payload == "float64" else 3e38}.get(kind, 0.0)
    wrong = tampered(PHASE2, 2, with_vector("product", np.full(size, value), payload))
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5, payload=payload)
    result = run(strategy, metered(7, app=replayed(2) if kind == "replayed" else wrong), 4)
    assert moves(strategy) == [True] * 4
    # The model of the first round is zero, and wrong answers are noticed all the same.
    for number, report in strategy.reports.sections("linear").items():
        honest = kind == "replayed" and number == 1
        assert (2 in report.used, report.retries, report.lost) == (honest, int(not honest), [] if honest else [2])
        assert honest or "does not fit its margins" in report.refused[2]
    tolerance = 1e-10 if payload == "float64" else 1e-5
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 4)).max() < tolerance


def test_data_that_differ_where_labels_do_not_are_told_apart() -> None:
    scale = {"now": 1.0}

    def rows(msg: Message, context: Context, partitions: int) -> LinearRows:
        own = data(int(context.node_config["partition-id"]))
        return LinearRows(scale["now"] * own.x, own.y, own.loss)

    grid = metered(5, app=with_halves([linear_device(rows), compression()]))
    first = CodedLinearGD(partitions=3, parities=2, code="mds")
    run(first, grid, 1)
    scale["now"] = 2.0
    second = CodedLinearGD(partitions=3, parities=2, code="mds")
    run(second, grid, 1)
    assert second.reports[1].linear.built == [0, 1, 2, 3, 4]
    # Within a run the others have combined the former examples: a node that comes with others stays outside.
    state = second.state_dict()
    third = CodedLinearGD(partitions=3, parities=2, code="mds")
    third.load_state_dict(state)
    grid.inner.remove_node(1)
    third_round = fit(third, grid, model(), 2, start_round=2)
    scale["now"] = 3.0
    grid.inner.add_node(1)
    fit(third, grid, third_round.arrays, 3, start_round=3)
    assert "returned with other examples" in third.reports[3].linear.refused[1]
    assert moves(third)[-1]


def test_wrong_owners_are_not_taken_in() -> None:
    wrong: dict[str, tuple[Callable[[Message], None], str]] = {
        "loss": (set_words(loss="hinge"), "has loss 'hinge', this server has 'logistic'"),
        "features": (set_words(columns=4), "has 4 features, the model has 5"),
        "labels": (with_vector("labels", np.full(14, 2.0), "int8"), "other than 0 and 1"),
        "number": (with_vector("labels", np.ones(3), "int8"), ": 14 numbers of type int8"),
        "no labels": (set_words(label_type=""), "sent no labels"),
    }
    for change, said in wrong.values():
        strategy = CodedLinearGD(partitions=4, parities=1)
        with pytest.raises(NoUsableReply, match="learnt nothing"):
            run(strategy, metered(5, app=tampered(SETUP, 2, change)), 1)
        assert said in strategy.reports[1].linear.refused[2]
        assert "[2] have not joined" in strategy.reports[1].linear.skipped


# How partitions travel ahead of coded gradient descent: through the server, by simulated links, over TCP; counted.


def parcel(partition: int) -> int:
    """Return the bytes of a partition on a link: header, seal, number of the exchange and name, and what is packed."""
    return 36 + 48 + 9 + len("partition") + 29 + 8 * data(partition).x.size


class Weighed(MeteredGrid):
    """Adds up the packed partitions in all messages and replies."""

    weighed: dict[str, int]

    def send_and_receive(self, messages, **options):
        batch = list(messages)
        replies = super().send_and_receive(batch, **options)
        self.weighed = getattr(self, "weighed", {"down": 0, "up": 0})
        for direction, those in (("down", batch), ("up", replies)):
            for message in those:
                frames = asks.data_in(message.content, FRAME) if message.has_content() else {}
                self.weighed[direction] += sum(len(d) for name, d in frames.items() if name.startswith("partition"))
        return replies


@pytest.mark.slow
@pytest.mark.parametrize("code", ["mds", "balanced"])
def test_set_up_bytes_are_those_handed_over_through_the_hub(code: str) -> None:
    strategy = CodedLinearGD(partitions=6, parities=4, code=code)
    grid = Weighed(InProcessGrid(client(), 10, seed=4))
    run(strategy, grid, 3)
    sizes = [29 + 8 * data(j).x.size for j in range(6)]
    transfers = strategy.plan.transfers
    assert len(transfers) == (24 if code == "mds" else 12)
    assert strategy.reports[1].linear.setup_bytes == {"hub-up": grid.weighed["up"], "hub-down": grid.weighed["down"]}
    assert grid.weighed == {"up": sum(sizes), "down": sum(sizes[j] for j, _ in transfers)}
    # The ledger counts them under the set-up's own message type, with labels and rows of the matrix.
    down = grid.ledger.total("payload", message_type=SETUP, direction="down")
    assert down == grid.weighed["down"] + 10 * (6 * 8 + 4)
    up = grid.ledger.total("payload", message_type=SETUP, direction="up")
    # And a digest of each owner's data.
    assert up == grid.weighed["up"] + sum(len(data(j).y) + 4 + 16 for j in range(6))
    assert grid.ledger.total("payload", round=(2, 3), message_type=SETUP) == 0
    # The two phases: one vector and its checksum each way.
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="down") == 10 * (6 * 8 + 4)
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="up") == 10 * (14 * 8 + 4)


def test_parcels_that_came_again_do_not_stay(tmp_path: Path) -> None:
    """The answer to the build gets lost: the next round has everything sent once more to a device that is ready."""
    seen: list[int] = []

    def fault(delivery: Delivery) -> str:
        if delivery.message_type == SETUP and delivery.partition == 4:
            seen.append(delivery.round)
            # Join is the first; a parity is not asked to share.
            return "lost_reply" if len(seen) == 2 else "none"
        return "none"

    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", transport="peers", spool=tmp_path)
    run(strategy, metered(5, fault=fault), 3)
    assert [report.built for report in strategy.reports.sections("linear").values()] == [[0, 1, 2, 3], [4], []]
    assert [report.transfers for report in strategy.reports.sections("linear").values()] == [6, 3, 0]
    assert list(tmp_path.rglob("*.parcel")) == []


class Listeners:
    """TCP listeners in a thread, one for each of some devices; the others have an address where nobody listens."""

    def __init__(self, folder: Path, devices: int, silent: set[int]) -> None:
        self.folder, self.addresses = folder, dict[int, str]()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        for i in silent:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                self.addresses[i] = f"127.0.0.1:{closed.getsockname()[1]}"

        def note(device: int, address: str) -> None:
            self.addresses[device] = address
            if len(self.addresses) == devices:
                ready.set()

        async def serve() -> None:
            self._all = {i: Listener(Spool(folder / str(i)), ListenerLimits()) for i in set(range(devices)) - silent}
            runs = [each.run("127.0.0.1", 0, partial(note, i)) for i, each in self._all.items()]
            await asyncio.gather(*runs)

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),))
        self._thread.start()
        assert ready.wait(100)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *reason: object) -> None:
        for each in self._all.values():
            self._loop.call_soon_threadsafe(each.stop)
        self._thread.join()
        self._loop.close()

    def configuration(self, device: int) -> dict[str, str]:
        return {PEER_ADDRESS: f"tcp://{self.addresses[device]}", PEER_STORE: str(self.folder / str(device))}


@pytest.mark.slow
def test_partitions_go_over_links_and_to_a_device_nobody_reaches_sealed_through_the_server(tmp_path: Path) -> None:
    hub = vector(run(CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5), metered(5)).arrays)
    with Listeners(tmp_path / "all", 5, set()) as listeners:
        strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, transport="peers")
        grid = metered(5, node_config=listeners.configuration)
        assert vector(run(strategy, grid).arrays).tobytes() == hub.tobytes()
        parcels = sum(parcel(j) for j, _ in strategy.plan.transfers)
        assert strategy.reports[1].linear.setup_bytes == {"peer": parcels}
        assert grid.ledger.total("wire", link="peer") == parcels
    with Listeners(tmp_path / "some", 5, {4}) as listeners:
        strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, transport="peers")
        grid = metered(5, node_config=listeners.configuration)
        result = run(strategy, grid)
        assert vector(result.arrays).tobytes() == hub.tobytes()
        report = strategy.reports[1].linear
        assert (report.transfers, report.built) == (6, [0, 1, 2, 3, 4])
        assert report.setup_bytes == {"peer": sum(parcel(j) for j, i in strategy.plan.transfers if i != 4)}
        assert [note.split()[1] for note in strategy.reports[1].notes] == ["0>4", "1>4", "2>4"]
        up = grid.ledger.total("payload", message_type=SETUP, direction="up")
        assert up > sum(8 * data(j).x.size for j in range(3))


def test_half_an_address_is_refused() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1, transport="peers")
    with pytest.raises(NoUsableReply):
        run(strategy, metered(3, node_config=lambda i: {PEER_ADDRESS: "tcp://127.0.0.1:9"}), 1)
    assert "needs both peer-address and peer-store" in strategy.reports[1].linear.refused[0]
