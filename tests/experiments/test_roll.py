"""Nodes that die, are slow, or come back under another id: who is skipped, who is recognised, how long is waited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from plain_grid import PlainGrid

from fedcomp.errors import ConfigError
from fedcomp.experiments.federation import Cohorts
from fedcomp.flower.faults import Delivery, Fault
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY
from fedcomp.flower.privacy import SECRET
from fedcomp.strategies.deadlines import Deadline

CLIENTS = 3
BEAT = 20.0


def app(message: Message, context: Context) -> Message:
    """Say which partition the node's configuration claims, and which node it is."""
    config = context.node_config
    claim = config.get("claim", config["partition-id"])
    header = ConfigRecord({PARTITION_KEY: claim, "me": config["partition-id"]})
    return Message(RecordDict({NODE_RECORD: header}), reply_to=message)


class Beating(PlainGrid):
    """Lists every node, dead or alive, and says until when each counts as online, as a SuperLink does."""

    def __init__(self, engine: InProcessGrid) -> None:
        super().__init__(engine)
        self.until: dict[int, float] = {}

    def get_nodes(self) -> Any:
        return [
            SimpleNamespace(node_id=node, online_until=self.until.get(node, 60.0), heartbeat_interval=30.0)
            for node in self.engine.get_node_ids()
        ]

    def beat(self, node: int) -> None:
        self.until[node] = self.until.get(node, 60.0) + BEAT


class World:
    """Three nodes, of which those in ``dead`` answer nothing, and the view of a server."""

    def __init__(self, beats: bool = True) -> None:
        self.dead: set[int] = set()
        self.engine = InProcessGrid(
            app, CLIENTS, fault=self.fault, node_config=lambda p: {"claim": 2} if p == CLIENTS else {}
        )
        self.grid = Beating(self.engine) if beats else PlainGrid(self.engine)
        metered = MeteredGrid(self.grid, poll_seconds=0.0)
        query = ConfigRecord({"x": 1})
        self.view = Cohorts(metered, clients=CLIENTS, seed=0, train=1.0, evaluate=0.0, query=query)

    def fault(self, delivery: Delivery) -> Fault:
        return Fault("lost_reply" if delivery.partition in self.dead else "none")

    def round(self, number: int, *, during: Any = None) -> list[int]:
        """Make a round; return who answered, by the partition that the engine gave them."""
        self.view.round = number
        messages = [Message(RecordDict(), node, "train") for node in self.view.get_node_ids()]
        self.asked = [message.metadata.dst_node_id for message in messages]
        if during is not None:
            during()
        replies = self.view.send_and_receive(messages, timeout=0.02)
        assert all(reply.metadata.src_node_id in self.asked for reply in replies)
        return [int(reply.content[NODE_RECORD]["me"]) for reply in replies]  # type: ignore[index, arg-type]


def test_a_dead_node_is_missed_for_one_round_and_asked_again_after_a_heartbeat() -> None:
    world = World()
    nodes = world.engine.get_node_ids()
    assert world.round(1) == [0, 1, 2]
    world.dead = {2}
    assert (world.round(2), world.asked) == ([0, 1], nodes)
    assert world.view.skipped == []
    for number in (3, 4):
        assert (world.round(number), world.asked) == ([0, 1], nodes[:2])
        assert world.view.skipped == [2]
        assert world.view.failures == 0
    world.dead = set()
    world.grid.beat(nodes[2])  # type: ignore[union-attr]
    assert world.round(5) == [0, 1, 2]
    assert world.view.skipped == []


def test_a_node_that_is_slow_and_beats_is_asked_in_every_round() -> None:
    world = World()
    nodes = world.engine.get_node_ids()
    world.round(1)
    world.dead = {2}
    for number in (2, 3, 4):
        # Its heartbeat comes while the round is waited for.
        pull = world.grid.pull_messages

        def beating(ids: Any, pull: Any = pull) -> Any:
            world.grid.beat(nodes[2])  # type: ignore[union-attr]
            return pull(ids)

        world.grid.pull_messages = beating  # type: ignore[method-assign]
        assert (world.round(number), world.asked) == ([0, 1], nodes)
        world.grid.pull_messages = pull  # type: ignore[method-assign]


def test_where_no_hearts_beat_nobody_is_skipped() -> None:
    world = World(beats=False)
    nodes = world.engine.get_node_ids()
    world.round(1)
    world.dead = {2}
    for number in (2, 3):
        assert (world.round(number), world.asked) == ([0, 1], nodes)


def test_a_node_that_comes_back_under_another_id_takes_its_name_while_the_dead_id_is_still_listed() -> None:
    world = World()
    names = world.engine.get_node_ids()
    world.round(1)
    world.dead = {2}
    world.round(2)
    # A new id claims the partition of the dead one, which the SuperLink still lists.
    newcomer = world.engine.add_node(CLIENTS)
    assert world.round(3) == [0, 1, CLIENTS]
    assert world.asked == names
    assert world.view.returned == [2]
    assert newcomer not in world.view.get_node_ids()
    assert world.view.known == list(zip(names, range(CLIENTS), strict=True))
    # The dead one wakes up: its partition has a holder, and it is not let in beside it.
    world.dead = set()
    world.grid.beat(names[2])  # type: ignore[union-attr]
    assert world.round(4) == [0, 1, CLIENTS]
    assert world.view.reasons == ["a node claims partition 2, which another node holds"]
    # The newcomer dies in its turn, and the former holder, which is there, has the name again.
    world.dead = {CLIENTS}
    world.round(5)
    assert world.round(6) == [0, 1, 2]
    assert world.asked == names


def test_a_newcomer_does_not_drive_out_a_node_that_is_there() -> None:
    world = World()
    names = world.engine.get_node_ids()
    world.round(1)
    world.engine.add_node(CLIENTS)
    assert (world.round(2), world.asked) == ([0, 1, 2], names)
    assert world.view.returned == []


def test_of_a_round_whose_participants_are_secret_nobody_is_noted() -> None:
    world = World()
    world.round(1)
    world.dead = {2}
    world.view.round = 2
    content = RecordDict({"config": ConfigRecord({SECRET: True})})
    world.view.send_and_receive([Message(content, node, "train") for node in world.view.get_node_ids()], timeout=0.02)
    world.view.round = 3
    assert world.view.get_node_ids() == world.engine.get_node_ids()


def timed(deadline: Any, seconds: dict[int, float]) -> tuple[InProcessGrid, Cohorts]:
    engine = InProcessGrid(app, CLIENTS, compute_seconds=lambda delivery: seconds[delivery.partition])
    made = Cohorts(
        MeteredGrid(engine), clients=CLIENTS, seed=0, train=1.0, evaluate=0.0, query=ConfigRecord(), deadline=deadline
    )
    return engine, made


def one(engine: InProcessGrid, view: Cohorts, number: int, content: RecordDict | None = None) -> tuple[int, float]:
    """Return how many answered, and the seconds that were waited."""
    view.round = number
    before = engine.clock
    messages = [Message(content or RecordDict(), node, "train") for node in view.get_node_ids()]
    return len(view.send_and_receive(messages, timeout=100.0)), engine.clock - before


def test_an_exchange_ends_by_what_clients_took_before_and_never_waits_longer_than_the_timeout() -> None:
    seconds = {0: 2.0, 1: 2.0, 2: 30.0}
    engine, view = timed(lambda: Deadline(0.5, 1.5), seconds)
    with engine:
        assert one(engine, view, 1) == (3, 30.0)
        assert one(engine, view, 2) == (2, 3.0)
        # All get slower than any deadline: once, nobody comes in time, and then the timeout counts.
        seconds |= dict.fromkeys(seconds, 40.0)
        engine.clock += 1000.0
        found = [one(engine, view, number) for number in (3, 4)]
        assert found == [(0, 3.0), (CLIENTS, 77.0)]
        again = timed(lambda: Deadline(0.5, 1.5), seconds)[1]
        again.recall_times(view.times())
        assert again.times() == view.times() != {}


def test_without_a_deadline_and_in_secret_rounds_the_timeout_counts() -> None:
    for deadline, content in (
        (None, RecordDict()),
        (lambda: Deadline(0.5, 1.5), RecordDict({"config": ConfigRecord({SECRET: True})})),
    ):
        engine, view = timed(deadline, {0: 2.0, 1: 2.0, 2: 30.0})
        with engine:
            assert [one(engine, view, number, content) for number in (1, 2)] == [(3, 30.0), (3, 30.0)]


@pytest.mark.parametrize("text", ["", "often", "auto:x", "auto:0.9:2:1", "auto:2", "auto:0.9:0.5"])
def test_a_deadline_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Deadline.parse(text)
