"""Rows of a graph among all else a client does: no mod takes them for a model, and the generic app hands them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from graph_nodes import FULL, Nodes, asking, client, initial, message, node, ready, values
from graph_toys import toy_parts

from fedcomp.clients.compressed import compression
from fedcomp.clients.messages import receive
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.mod import private
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import gcn
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.gcn import Fetch, GraphHello, put_frames, take_frames
from fedcomp.flower.payload import INLINE_LIMIT, NODE_RECORD, models
from fedcomp.flower.privacy import PRIVATE
from fedcomp.flower.protocol import Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.state import Replica
from fedcomp.graphs.base import GraphPart
from fedcomp.graphs.ids import encode_ids
from fedcomp.privacy.local import LocalPolicy
from fedcomp.strategies.compressed import Compressed


@pytest.fixture(autouse=True)
def identity() -> None:
    adopt_identity((1, 1, 1))


WIDE = 4500


def wide() -> list[GraphPart]:
    """Parts whose rows are frames that ride in ArrayRecords."""
    return toy_parts(features=WIDE, dtype=np.float32)


class Roll:
    """All of a grid that a strategy asks for when it makes messages."""

    def get_node_ids(self) -> list[int]:
        return [100, 101, 102, 103]


def inner() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


def loaded(nodes: Nodes, msg: Message, ask: gcn.PlanRequest) -> Message:
    """Return a strategy's training message with plan and rows in it."""
    ask, rows = ready(nodes, msg.metadata.dst_node_id - 100, ask)
    content = RecordDict(dict(msg.content.items()))
    ask.put(content)
    put_frames(content, gcn.FEATURES, rows)
    msg.content = content
    msg.metadata.message_type = gcn.TRAIN_TYPE
    return msg


@pytest.mark.slow
def test_rows_ride_through_compression_both_ways() -> None:
    parts = wide()
    strategy = Compressed(inner(), TopK(density=1.0), TopK(density=0.4), feedback=False)
    nodes, plain = Nodes(parts, client(parts, [compression()])), Nodes(parts)
    arrays = initial(parts)
    for number in (1, 2):
        ask = asking(FULL, round=number, row_codec="dense-f32", batch_size=3)
        messages = list(strategy.configure_train(number, arrays, ConfigRecord({"lr": 0.5}), Roll()))
        replies, wanted, weights = [], [], []
        for msg in messages:
            index = msg.metadata.dst_node_id - 100
            msg = loaded(nodes, msg, ask)
            sizes = [len(f) for f in take_frames(msg, 4, gcn.FEATURES)[gcn.FEATURES].values()]
            assert max(sizes) > INLINE_LIMIT
            assert min(sizes) < INLINE_LIMIT
            # Nodes that hold the model are sent steps: then no model is in the message at all.
            assert len(models(msg.content)) == (number == 1)
            reply = nodes.tell(index, msg)
            assert not reply.has_error()
            assert "arrays" not in reply.content
            replies.append(reply)
            held = Replica.load(nodes.contexts[index])
            assert held is not None
            trained = values(plain.turn(index, ask, to_record(held.arrays), lr=0.5))
            wanted.append({name: array - held.arrays[name] for name, array in trained.items()})
            weights.append(reply.content["metrics"]["num-examples"])
        before = to_arrays(arrays)
        arrays, _ = strategy.aggregate_train(number, replies)
        assert not strategy.reports[number].refused
        assert strategy.reports[number].compressed == 4
        for name, array in arrays.items():
            mean = np.average([one[name] for one in wanted], axis=0, weights=weights)
            np.testing.assert_allclose(array.numpy(), before[name] + mean, rtol=0, atol=1e-6)


def test_a_server_that_does_not_name_its_model_means_the_only_one_beside_the_rows() -> None:
    arrays = initial(toy_parts())
    content = RecordDict({"arrays": arrays})
    put_frames(content, gcn.FEATURES, {1: bytes(INLINE_LIMIT + 1), 2: bytes(INLINE_LIMIT + 1)})
    assert len(content.array_records) == 3
    found, replica = receive(content, Announcement("", 1, 0, protocol=1), None, node(0))
    assert found == arrays
    assert replica is None


def test_private_rounds_send_the_update_and_nothing_else() -> None:
    parts = wide()
    nodes = Nodes(parts, client(parts, [local_privacy(), compression(), private()]))
    ask, rows = ready(nodes, 0, asking(FULL, row_codec="dense-f32"))
    assert max(map(len, rows.values())) > INLINE_LIMIT
    bare = nodes.carry_out(0, ask, rows, **{PRIVATE: True})
    assert sorted(bare.content) == ["arrays", NODE_RECORD]
    assert sorted(nodes.carry_out(0, ask, rows).content) == ["arrays", NODE_RECORD, "metrics"]


def test_who_sends_nothing_without_noise_hands_out_no_rows_either() -> None:
    nodes = Nodes(toy_parts())
    nodes.app = client(nodes.parts, [local_privacy(LocalPolicy(noise_multiplier=1.0, releases=3)), compression()])
    ids = {"ids": {1: encode_ids(nodes.parts[0].ids)}}
    for msg in (
        message(gcn.ROWS_TYPE, Fetch("s", "rows", "dense-f64"), ids),
        message(gcn.TRAIN_TYPE, asking(FULL), arrays=initial(nodes.parts)),
    ):
        reply = nodes.tell(0, msg)
        assert reply.has_error()
        assert "private training messages only" in reply.error.reason


OPTIONS = {"nodes": "60", "parts": "3", "hidden": "4", "columns": "1500"}
CONFIG = {"task": "synthetic-graph", "clients": 3, **{f"task.{name}": value for name, value in OPTIONS.items()}}


def generic(**config: Any) -> Nodes:
    from fedcomp.clients.app import app
    from fedcomp.tasks import get_task

    task = get_task("synthetic-graph", **OPTIONS)
    return Nodes([task.shared(3).part(index) for index in range(3)], app, config={**CONFIG, **config})


@pytest.mark.slow
def test_the_generic_app_owns_a_part_of_the_tasks_graph_and_trains_its_model() -> None:
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import to_arrays as arrays_of

    task = get_task("synthetic-graph", **OPTIONS)
    nodes = generic(lr=0.5, weight_decay=0.1, seed=2)
    hello = GraphHello.take(nodes.hello(2))
    assert (hello.digest, hello.index, hello.parts, hello.nodes) == (task.shared(3).digest, 2, 3, 60)
    model = task.model(2)
    ask, rows = ready(nodes, 1, asking(FULL, row_codec="dense-f32"))
    # They ride in ArrayRecords, beside the model.
    assert min(map(len, rows.values())) > INLINE_LIMIT
    reply = nodes.carry_out(1, ask, rows, to_record(arrays_of(model)))
    data = task.client(1, 3)
    loss = task.objective(model, task.outputs(model, data.tensors[0]), data.tensors[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        wanted = (p - 0.5 * (g + 0.1 * p)).detach().numpy()
        np.testing.assert_allclose(values(reply)[name], wanted, rtol=0, atol=1e-6)
    assert reply.content["metrics"]["num-examples"] == len(data)
    assert reply.content["metrics"]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_generic_app_refuses_tasks_without_a_graph_and_rows_of_guarded_nodes() -> None:
    from fedcomp.clients.edge import OWN_BUDGET

    with pytest.raises(ConfigError, match=r"'digits' has no graph.*'digits-graph'"):
        Nodes(generic().parts, generic().app, config={"task": "digits", "clients": 3}).hello(0)
    nodes = generic()
    nodes.contexts[1] = node(1, 3, **{OWN_BUDGET: 1.0})
    asked = {"ids": {0: encode_ids(nodes.parts[1].ids[:1])}}
    with pytest.raises(ConfigError, match="budget of its own"):
        nodes.tell(1, message(gcn.ROWS_TYPE, Fetch("s", "rows", "dense-f32"), asked))
