"""Whoever joins a running federation, and whatever it says of itself, the run goes on."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from plain_grid import PlainGrid

from fedcomp.errors import ConfigError
from fedcomp.experiments.federation import Cohorts
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY


def app(message: Message, context: Context) -> Message:
    """Claim the partition that the node's configuration says, or the node's own."""
    config = context.node_config
    claim = config.get("claim", config["partition-id"])
    if claim == "error":
        return Message(Error(0, "no idea"), reply_to=message)
    return Message(RecordDict({NODE_RECORD: ConfigRecord({PARTITION_KEY: claim})}), reply_to=message)


def federation(nodes: int, claims: dict[int, Any] | None = None) -> InProcessGrid:
    """Return an engine whose node ``p`` claims ``claims[p]``."""
    said = claims or {}
    return InProcessGrid(app, nodes, node_config=lambda p: {"claim": said[p]} if p in said else {})


def view_of(grid: Grid, clients: int, train: float = 1.0) -> Cohorts:
    metered = MeteredGrid(grid, poll_seconds=0.0)
    query = ConfigRecord({"clients": clients})
    return Cohorts(metered, clients=clients, seed=0, train=train, evaluate=0.0, query=query)


@pytest.mark.parametrize("train", [1.0, 0.75])
def test_two_nodes_with_one_partition_are_refused_before_the_run(train: float) -> None:
    with federation(5, {4: 2}) as engine, pytest.raises(ConfigError, match="two nodes hold partition 2"):
        view_of(PlainGrid(engine), 4, train).prepare()


@pytest.mark.parametrize("train", [1.0, 0.75])
def test_a_newcomer_that_claims_a_taken_partition_is_ignored_and_noted(train: float) -> None:
    with federation(4, {4: 2}) as engine:
        view = view_of(PlainGrid(engine), 4, train)
        view.prepare()
        view.round = 1
        before = view.get_node_ids()
        replies = view.send_and_receive([Message(RecordDict(), node, "train") for node in before])
        assert len(list(replies)) == len(before)
        newcomer = engine.add_node(4)
        view.round = 2
        assert set(view.get_node_ids()) <= set(engine.get_node_ids()) - {newcomer}
        assert view.partition_of(newcomer) is None
        assert "a node claims partition 2, which another node holds" in view.reasons
        # The node it imitates leaves: nobody else holds the partition, and it is the same node to the run.
        name = engine.node_id_of(2)
        engine.remove_node(2)
        for server_round in range(3, 12):
            view.round = server_round
            if name in view.get_node_ids():
                break
        assert newcomer not in view.get_node_ids()
        assert view.partition_of(name) == 2
        assert view.reasons == []
        asked = Message(RecordDict(), name, "train")
        (reply,) = view.send_and_receive([asked])
        assert (reply.metadata.src_node_id, asked.metadata.dst_node_id) == (name, name)
        assert reply.content[NODE_RECORD][PARTITION_KEY] == 2


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (-1, "does not say"),
        (2**40, "does not say"),
        (True, "does not say"),
        ("2", "does not say"),
        (77, "partition 77 of a run with 4 clients"),
        ("error", "no idea"),
    ],
)
def test_a_newcomer_that_says_something_absurd_is_ignored_and_noted(claim: Any, reason: str) -> None:
    with federation(4, {4: claim}) as engine:
        view = view_of(PlainGrid(engine), 4, 0.5)
        view.prepare()
        newcomer = engine.add_node(4)
        for server_round in (1, 2):
            view.round = server_round
            assert len(view.get_node_ids()) == 2
            assert newcomer not in view.get_node_ids()
            assert len(view.reasons) == 1
            assert reason in view.reasons[0]


def test_an_engine_that_knows_its_nodes_is_believed_and_not_they() -> None:
    with federation(4, {0: 3, 1: 3, 2: -9, 3: 0}) as engine:
        view = view_of(engine, 4, 0.5)
        view.prepare()
        assert view.known == [(node, partition) for partition, node in enumerate(engine.get_node_ids())]
        assert [view.partition_of(node) for node in engine.get_node_ids()] == [0, 1, 2, 3]
