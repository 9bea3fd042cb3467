"""Coded gradient descent with devices that answer wrongly: noticed, left out, said in the report."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Context, Message
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

from fedcomp.clients.coded.linear import linear_device
from fedcomp.clients.compressed import compression
from fedcomp.flower.faults import Delivery
from fedcomp.flower.payload import NODE_RECORD
from fedcomp.flower.rounds import fit
from fedcomp.strategies.coded.linear import CodedLinearGD
from fedcomp.systems.coded.linear import LinearRows


def drop_words(reply: Message) -> None:
    reply.content.config_records[NODE_RECORD].pop("say")


def damage(name: str) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        data = bytearray(frame(reply, name))
        data[3] ^= 16
        set_frame(reply, name, bytes(data))

    return change


WRONG = {
    "another shape": (with_vector("product", np.ones(3)), "expected"),
    "NaN": (with_vector("product", np.full(99, np.nan)), "expected"),
    "another type": (with_vector("product", np.ones(99), "float32"), "expected"),
    "no words": (drop_words, "says NoneType, expected Done"),
    "damaged": (damage("product"), "checksum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_hostile_replies_are_left_out_with_a_reason(phase: int, kind: str) -> None:
    name, size = ("product", ROWS) if phase == 1 else ("product", FEATURES + 1)
    change, said = {
        "another shape": (with_vector(name, np.ones(3)), "expected"),
        "NaN": (with_vector(name, np.r_[np.nan, np.ones(size - 1)]), "not all finite"),
        "another type": (with_vector(name, np.ones(size), "float32"), "expected"),
        "damaged": (damage(name), "checksum"),
    }.get(kind, WRONG[kind])
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
    result = run(strategy, metered(5, app=tampered(PHASE1, 2, change)), 2)
    # What is no number of this world is told from the others all the same.
    assert moves(strategy) == [value > 1] * 2
    assert value > 1 or "contradict each other" in strategy.reports[1].linear.skipped
    assert np.abs(vector(result.arrays) - uncoded(4, moves(strategy))).max() < 1e-10
    # Without surplus it shows in the second phase.
    strategy = CodedLinearGD(partitions=4, parities=0, code="mds", lr=0.5)
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
    assert "came back with other examples" in third.reports[3].linear.refused[1]
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
        run(strategy, metered(5, app=tampered(SETUP, 2, change)), 1)
        assert said in strategy.reports[1].linear.refused[2]
        assert "[2] have not joined" in strategy.reports[1].linear.skipped
