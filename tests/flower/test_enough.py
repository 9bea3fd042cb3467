"""An exchange that is over when there are enough replies, on simulated time and on an engine that runs by itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest
from flwr.app import Context, Message, RecordDict

from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import Push, drive, drive_many

SECONDS = [4.0, 1.0, 9.0, 2.0]


def answer(msg: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=msg)


def grid_of(**options) -> InProcessGrid:
    return InProcessGrid(answer, 4, compute_seconds=lambda d: SECONDS[d.partition], **options)


def messages(grid: InProcessGrid) -> list[Message]:
    return [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]


def at_least(count: int):
    return lambda replies: len(replies) >= count


def exchange(push: Push) -> Generator[Push, list[Message], list[Message]]:
    return (yield push)


@pytest.mark.parametrize(("count", "clock"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 9.0)])
@pytest.mark.parametrize("metered", [False, True])
def test_an_exchange_ends_with_the_reply_that_is_enough(count: int, clock: float, metered: bool) -> None:
    with grid_of() as grid:
        engine = MeteredGrid(grid) if metered else grid
        replies = drive(exchange(Push(messages(grid), None, at_least(count))), engine, timeout=100.0)
        assert len(replies) == count
        assert grid.clock == clock


def test_what_is_never_enough_waits_for_all_and_then_for_the_deadline() -> None:
    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), None, at_least(5))), grid)) == 4
        assert grid.clock == 9.0
    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), 3.0, at_least(3))), grid)) == 2
        assert grid.clock == 3.0


def test_replies_are_shown_in_the_order_they_arrive_and_lost_ones_never() -> None:
    shown: list[list[int]] = []

    def enough(replies: Sequence[Message]) -> bool:
        shown.append([grid.partition_of(reply.metadata.src_node_id) for reply in replies])
        return False

    lost: dict[int, str] = {1: "lost_reply"}
    with grid_of(fault=lambda d: lost.get(d.partition)) as grid:
        drive(exchange(Push(messages(grid), None, enough)), grid)
    assert shown == [[3], [3, 0], [3, 0, 2]]


def test_a_slow_reply_of_an_exchange_that_is_over_is_not_mixed_into_the_next() -> None:
    with grid_of() as grid:
        first, second = messages(grid), messages(grid)
        drive(exchange(Push(first, None, at_least(1))), grid)
        replies = drive(exchange(Push(second, None, None)), grid)
        wanted = {message.metadata.message_id for message in second}
        assert {reply.metadata.reply_to_message_id for reply in replies} == wanted
        # The slowest node begins its second message when it has finished its first.
        assert grid.clock == 18.0


def test_rounds_that_share_a_push_wait_for_all_of_it() -> None:
    with grid_of() as grid:
        batch = messages(grid)
        pushes = [Push(batch[:2], None, at_least(1)), Push(batch[2:], None, at_least(1))]
        replies = drive_many([exchange(push) for push in pushes], grid)
        assert [len(r) for r in replies] == [2, 2]


def test_an_engine_that_runs_by_itself_is_not_asked_again_once_it_is_enough() -> None:
    class ByItself:
        """Hands out one more reply at every look, as a SuperLink does while nodes work."""

        def __init__(self, inner: InProcessGrid) -> None:
            self.inner, self.waiting, self.looks = inner, [], 0

        def push_messages(self, batch):
            ids = self.inner.push_messages(batch)
            self.waiting = self.inner.pull_messages(ids)
            return ids

        def pull_messages(self, message_ids):
            self.looks += 1
            return [self.waiting.pop()] if self.waiting else []

        def get_node_ids(self):
            return self.inner.get_node_ids()

    with InProcessGrid(answer, 4) as grid:
        engine = ByItself(grid)
        metered = MeteredGrid(engine, poll_seconds=0.001)
        replies = drive(exchange(Push(messages(grid), None, at_least(3))), metered, timeout=5.0)
    assert len(replies) == engine.looks == 3
    assert metered.ledger.columns()["wire"].size == 4 + 3


def test_a_grid_that_cannot_stop_early_waits_for_all() -> None:
    class Flowers:
        def __init__(self, inner: InProcessGrid) -> None:
            self.inner = inner

        def send_and_receive(self, batch, *, timeout=None):
            return self.inner.send_and_receive(batch, timeout=timeout)

    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), None, at_least(1))), Flowers(grid))) == 4
