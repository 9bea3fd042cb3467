"""Messages live or die by simulated time: who is away gets nothing, who leaves is not heard, and the clock shows it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import toy
from flwr.app import ConfigRecord, Message, RecordDict

from fedcomp.flower import store
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.nodes import GridError
from fedcomp.flower.rounds import fit
from fedcomp.flower.vanishing import VanishingGrid
from fedcomp.plain import PlainError
from fedcomp.timing import Link
from fedcomp.timing.dropout import Compute, Presence

SLOW = Link(80_000.0, 8e6)  # 10 kB a second up
FAST = Link(8e6, 8e6)


def content(server_round: int = 1) -> RecordDict:
    return RecordDict({"arrays": toy.model(), "config": ConfigRecord({"server-round": server_round})})


def stays(*ends: float):
    return lambda server_round, client: Presence(((0.0, ends[client]),))


@pytest.fixture
def engine():
    with InProcessGrid(toy.client_app(), 3, shuffle_replies=False) as grid:
        yield grid


def made(engine: InProcessGrid, failures, **changed) -> VanishingGrid:
    options = {"server": SLOW, "peer": FAST, "deadlines": (50.0, 100.0), **changed}
    grid = VanishingGrid(engine, failures, Compute(1.0), **options)
    grid.round = 1
    return grid


def ask(grid: VanishingGrid, kind: str = "train", **options) -> list[int | None]:
    batch = [Message(content(grid.round), node, kind) for node in grid.get_node_ids()]
    return [grid.partition_of(r.metadata.src_node_id) for r in grid.send_and_receive(batch, **options)]


def upload_seconds() -> float:
    """Return what one client's reply takes on the slow link."""
    with InProcessGrid(toy.client_app(), 1) as other:
        (reply,) = other.send_and_receive([Message(content(), other.get_node_ids()[0], "train")])
        return SLOW.up_seconds(other.wire_bytes(reply))


def test_a_reply_arrives_when_its_bytes_have_left_a_device_that_stays(engine: InProcessGrid) -> None:
    seconds = upload_seconds()
    assert 0.3 < seconds < 1.0
    grid = made(engine, stays(1.1 + seconds, 0.9 + seconds, 0.0001))
    # Trained after one second and a little for the message: the first gets through, the second dies while it uploads,
    # the third never gets the message.
    assert ask(grid) == [0]
    log = grid.log[1]
    assert (log.trained, log.answered) == ({0, 1}, {0})
    # Somebody is missing: the server waits until the end. What the second had sent is spent.
    assert grid.clock == log.seconds == 100.0
    assert log.last == pytest.approx(1.0 + seconds, abs=0.02)
    assert log.spent["train"] == pytest.approx(10_000 * (seconds - 0.1), abs=150)
    # Who was reached has trained, whether or not it was heard; the other has not.
    assert ["toy.sum" in engine.context(p).state for p in range(3)] == [True, True, False]


def test_a_timeout_ends_an_exchange_and_time_goes_on_from_round_to_round(engine: InProcessGrid) -> None:
    seconds = upload_seconds()
    grid = made(engine, stays(math.inf, math.inf, 0.5))
    assert ask(grid, timeout=3.0) == [0, 1]
    assert grid.clock == 3.0
    assert ask(grid, timeout=1.1 + seconds) == [0, 1]
    assert grid.clock == pytest.approx(4.1 + seconds)
    grid.round = 2
    assert ask(grid, timeout=5.0) == [0, 1]
    assert grid.clock == pytest.approx(9.1 + seconds)
    assert grid.log[2].seconds == 5.0
    # Nothing is sent after the end.
    late = made(engine, stays(math.inf, math.inf, math.inf), deadlines=(0.001, 0.001))
    assert ask(late) == []
    assert late.log[1].trained == set()


def test_enough_replies_end_an_exchange_early(engine: InProcessGrid) -> None:
    seconds = upload_seconds()
    grid = made(engine, stays(math.inf, math.inf, 0.5))
    assert len(ask(grid, enough=lambda replies: len(replies) == 2)) == 2
    assert grid.clock == pytest.approx(1.0 + seconds, abs=0.02)


def test_only_training_computes_and_setting_up_takes_no_time(engine: InProcessGrid) -> None:
    grid = made(engine, stays(0.9, 0.9, 0.9))
    assert ask(grid, "evaluate", timeout=50.0) == [0, 1, 2]
    assert grid.clock < 0.9
    assert ask(grid, "train", timeout=50.0) == []

    def roll_call(msg: Message, context) -> Message:
        return Message(RecordDict({"metrics": msg.content["config"]}), reply_to=msg)

    with InProcessGrid(roll_call, 3) as plain:
        away = made(plain, stays(1e-9, 1e-9, 1e-9))
        assert len(ask(away, "query")) == 3
        assert away.clock == 0.0


def test_chunks_survive_where_whole_replies_do_not(engine: InProcessGrid) -> None:
    seconds = upload_seconds()

    def comes_and_goes(server_round: int, client: int) -> Presence:
        return Presence(((0.0, 1.1 + 0.6 * seconds), (10.0, 10.0 + 0.7 * seconds)))

    assert ask(made(engine, comes_and_goes)) == []
    grid = made(engine, comes_and_goes, chunk=200)
    assert ask(grid) == [0, 1, 2]
    assert 10.0 < grid.clock < 10.0 + 0.7 * seconds


def test_what_clients_send_each_other_delays_their_reply(engine: InProcessGrid) -> None:
    seen = {}

    def shared(situation, trained):
        seen.update({client: (start, message.metadata.message_type) for client, (start, message) in trained.items()})
        return {client: math.inf if client == 1 else start + 5.0 for client, (start, _) in trained.items()}

    grid = made(engine, stays(*[math.inf] * 3), shared=shared)
    assert ask(grid, timeout=20.0) == [0, 2]
    assert seen.keys() == {0, 1, 2}
    assert all(start == pytest.approx(1.0, abs=0.02) and kind == "train" for start, kind in seen.values())
    assert grid.log[1].last == pytest.approx(6.0 + upload_seconds(), abs=0.02)


def test_the_meter_counts_what_was_sent_and_what_got_through(engine: InProcessGrid) -> None:
    metered = MeteredGrid(made(engine, stays(math.inf, 1.05, 0.0001)))
    metered.round = 1
    batch = [Message(content(), node, "train") for node in metered.get_node_ids()]
    assert len(metered.send_and_receive(batch, timeout=30.0)) == 1
    assert metered.ledger.by("node", "messages", direction="down") == {0: 1, 1: 1}
    assert metered.ledger.by("node", "messages", direction="up") == {0: 1}
    assert np.isclose(metered.clock, 30.0)


def test_a_run_over_a_meter_begins_its_rounds_and_no_other(engine: InProcessGrid) -> None:
    metered = MeteredGrid(made(engine, stays(*[math.inf] * 3)))
    fit(toy.fedavg(fraction_evaluate=0.0), metered, toy.model(), 2, timeout=60.0)
    assert (sorted(metered.log), metered.inner.round, engine.round) == ([0, 1, 2], 2, None)


def test_a_node_that_joins_in_the_middle_of_a_round_is_there_as_the_failure_model_says(engine: InProcessGrid) -> None:
    seconds = upload_seconds()
    stay = {5: 2.0 + 1.5 * seconds}  # it trains for a second from 1 + seconds on, and leaves halfway through its reply
    grid = made(engine, lambda server_round, client: Presence(((0.0, stay.get(client, math.inf)),)))
    assert ask(grid, timeout=3.0) == [0, 1, 2]
    grid.add_node()
    # Number 4 leaves a gap: the list of those that are there is by partition.
    grid.add_node(5)
    assert ask(grid, timeout=3.0) == [0, 1, 2, 3]
    assert (grid.log[1].trained, grid.log[1].answered) == ({0, 1, 2, 3, 5}, {0, 1, 2, 3})
    assert grid.clock == pytest.approx(4.0 + seconds, abs=0.02)


def test_a_resumed_grid_goes_on_with_its_clock_round_and_trace() -> None:
    """As one that was never interrupted: stored in the middle of a round, with the engine inside it."""
    ends = (math.inf, math.inf, 2.5)

    def half(grid: VanishingGrid) -> None:
        assert ask(grid, timeout=3.0) == [0, 1, 2]
        grid.round = 2
        assert ask(grid, timeout=2.0) == [0, 1, 2]

    def rest(grid: VanishingGrid) -> tuple[object, ...]:
        assert ask(grid, timeout=4.0) == [0, 1]
        grid.round = 3
        assert ask(grid, timeout=2.0) == [0, 1, 2]
        return grid.clock, grid.round, grid.log, [grid.context(p).state["toy.sum"] for p in range(3)]

    with InProcessGrid(toy.client_app(), 3, shuffle_replies=False) as engine:
        whole = MeteredGrid(made(engine, stays(*ends)))
        half(whole.inner)
        stored, clock = whole.snapshot(), whole.inner.clock
        assert clock > 3.0
        expected = rest(whole.inner)
    with InProcessGrid(toy.client_app(), 3, shuffle_replies=False) as engine:
        again = MeteredGrid(
            VanishingGrid(engine, stays(*ends), Compute(1.0), server=SLOW, peer=FAST, deadlines=(50, 100))
        )
        again.restore(stored)
        assert (again.inner.clock, again.inner.round) == (clock, 2)
        assert rest(again.inner) == expected


def test_the_snapshot_of_another_grid_is_refused_and_changes_nothing(engine: InProcessGrid) -> None:
    grid = made(engine, stays(math.inf, math.inf, math.inf))
    ask(grid, timeout=3.0)
    clock = grid.clock
    with pytest.raises(store.StoreError, match="grid snapshot"):
        grid.restore(engine.snapshot())
    state = store.loads(grid.snapshot(), "vanishing grid snapshot")
    for wrong in ({"now": -1.0}, {"round": "1"}, {"log": {"1": {"seconds": 1.0}}}):
        with pytest.raises((store.StoreError, PlainError)):
            grid.restore(store.dumps(state | wrong, "vanishing grid snapshot"))
    assert (grid.clock, grid.round) == (clock, 1)


def test_single_pushes_are_refused(engine: InProcessGrid) -> None:
    with pytest.raises(GridError, match="whole exchanges"):
        made(engine, stays(1.0, 1.0, 1.0)).push_messages([])
