"""The generic client: everything it must know is in the message; nothing survives but what Flower keeps."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcomp.clients.app import app, measured
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import take_node
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import to_arrays

CONFIG = {"task": "digits", "clients": 3, "seed": 5, "server-round": 1, "lr": 0.1, "task.hidden": "16"}


def initial() -> ArrayRecord:
    model = get_task("digits", hidden=16).model(5)
    return ArrayRecord({name: Array(array) for name, array in to_arrays(model).items()})


def ask(grid: InProcessGrid, kind: str, arrays: ArrayRecord | None = None, **changes) -> list[Message]:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    records = {"config": ConfigRecord(config)}
    if arrays is not None:
        records["arrays"] = arrays
    messages = [Message(RecordDict(records), node, kind) for node in grid.get_node_ids()]
    replies = {reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(messages)}
    return [replies[message.metadata.message_id] for message in messages]


@pytest.fixture
def grid():
    with InProcessGrid(app, 3) as made:
        yield made


def test_a_loss_is_measured_on_one_thread_as_models_are_trained():
    """With several, the slopes of small models cost many times as much, and their bits depend on how many there are."""
    seen: list[int] = []
    asked = ClientApp()

    @asked.train()
    def train(msg: Message, context: Context) -> Message:
        found = measured(msg, context)

        def model(x):
            seen.append(torch.get_num_threads())
            return found.module(x)

        found.loss(model)
        return Message(RecordDict(), reply_to=msg)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with InProcessGrid(asked, 1) as grid:
            (reply,) = ask(grid, "train", initial(), clients=1)
        assert not reply.has_error()
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_training_changes_the_model_and_says_where_from(grid):
    before = initial()
    replies = ask(grid, "train", before)
    assert [take_node(reply) for reply in replies] == [0, 1, 2]
    task = get_task("digits", hidden=16)
    for partition, reply in enumerate(replies):
        metrics = reply.content["metrics"]
        assert metrics["num-examples"] == len(task.client(partition, 3))
        assert metrics["train_loss"] > 0
        after = reply.content["arrays"]
        assert list(after) == list(before)
        assert any(not np.array_equal(after[k].numpy(), before[k].numpy()) for k in before)
    models = [reply.content["arrays"]["layers.0.weight"].numpy().tobytes() for reply in replies]
    assert len(set(models)) == 3  # each client trained on data of its own


@pytest.mark.slow
def test_the_same_message_gives_the_same_bits_and_another_round_others(grid):
    def model(**changes) -> list[bytes]:
        replies = ask(grid, "train", initial(), **changes)
        return [reply.content["arrays"]["layers.0.weight"].numpy().tobytes() for reply in replies]

    assert model() == model()
    assert model() != model(**{"server-round": 2})
    assert model() != model(seed=6)


def test_evaluation_over_all_clients_is_evaluation_on_the_test_split(grid):
    task = get_task("digits", hidden=16)
    replies = ask(grid, "evaluate", initial())
    counts = [reply.content["metrics"]["num-examples"] for reply in replies]
    right = [reply.content["metrics"]["accuracy"] * n for reply, n in zip(replies, counts, strict=True)]
    assert sum(counts) == len(task.test)
    assert sum(right) / sum(counts) == pytest.approx(task.evaluate(task.model(5), task.test)["accuracy"])
    assert all("arrays" not in reply.content for reply in replies)


def test_the_roll_call_costs_no_model(grid):
    replies = ask(grid, "query")
    assert [take_node(reply) for reply in replies] == [0, 1, 2]
    assert all(len(reply.content) == 1 for reply in replies)


def test_a_client_without_data_answers_with_what_to_do():
    # 60 training examples of ten classes over 30 clients by a very uneven draw leave some with none.
    changes = {"clients": 30, "task.partition": "dirichlet:0.02", "task.min_examples": 0, "task.train_examples": 60}
    with InProcessGrid(app, 30) as many:
        replies = ask(many, "train", initial(), **changes)
    failed = [reply for reply in replies if reply.has_error()]
    assert failed
    assert len(failed) < 30
    assert all("holds no example to train on" in reply.error.reason for reply in failed)
    assert all("min_examples" in reply.error.reason for reply in failed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": 4}, "holds partition 0 of 3, but the run splits the data into 4"),
        ({"task": "digit"}, "did you mean 'digits'"),
        ({"task.hiden": "16", "task.hidden": None}, "did you mean 'hidden'"),
        ({"seed": "x"}, "seed is 'x'; expected a whole number"),
        ({"task.hidden": "17"}, "array 'layers.0.weight' has shape"),
    ],
)
def test_what_cannot_work_is_said_in_the_error_reply(grid, changes, said):
    reply = ask(grid, "train", initial(), **changes)[0]
    assert reply.has_error()
    assert said in reply.error.reason


def test_a_node_without_partition_is_told_how_to_start():
    with InProcessGrid(app, 1, node_config={"partition-id": "zero"}) as odd:
        reply = ask(odd, "query", clients=1)[0]
    assert "--node-config" in reply.error.reason


def test_a_message_without_a_model_is_refused(grid):
    reply = ask(grid, "train")[0]
    assert "0 ArrayRecords" in reply.error.reason


def test_the_app_holds_nothing_that_could_not_travel():
    """Ray sends the app with every message; a fresh copy per message must give the same replies."""
    cloudpickle = pytest.importorskip("cloudpickle")

    def fresh(message, context):
        return pickle.loads(cloudpickle.dumps(app))(message, context)

    def models(client) -> list[bytes]:
        with InProcessGrid(client, 3, shuffle_replies=False) as made:
            replies = ask(made, "train", initial())
        return [reply.content["arrays"]["layers.0.weight"].numpy().tobytes() for reply in replies]

    assert models(fresh) == models(app)
