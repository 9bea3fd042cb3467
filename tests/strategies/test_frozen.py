"""Tensors that no client changes, as in fine-tuning, stay what they are to the last bit, whatever the codec."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedMedian, Strategy
from toy import fedavg, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import EDEN, QSGD, Codec, RandomProjection, ScaledSign, SignSGD, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import NODE_RECORD
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

MODEL = {
    "frozen": np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32),
    "head": np.random.default_rng(1).standard_normal((30, 50)).astype(np.float32),
}


def app(trained: set[tuple[int, int]] | None = None, seen: list[object] | None = None) -> ClientApp:
    """Return an app that trains the head alone, and all in the rounds and partitions of ``trained``."""
    halves = [private(), compression()]

    def look(msg: Message, context, call_next) -> Message:
        reply = call_next(msg, context)
        if seen is not None:
            seen.append(reply.content[NODE_RECORD].get("unchanged"))
        return reply

    made = with_halves([look, *halves] if seen is not None else halves)

    @made.train()
    def train(msg, context):
        name, record = next(iter(msg.content.array_records.items()))
        config = next(iter(msg.content.config_records.values()))
        place = (int(config["server-round"]), int(context.node_config["partition-id"]))
        out = {}
        for key, array in record.items():
            step = np.random.default_rng([*place, len(key)]).standard_normal(array.shape).astype(np.float32)
            moves = key == "head" or (trained is not None and place in trained)
            out[key] = Array(np.asarray(array.numpy() + (np.float32(0.1) * step if moves else 0.0), np.float32))
        metrics = MetricRecord({"num-examples": place[1] + 1})
        return Message(RecordDict({name: ArrayRecord(out), "metrics": metrics}), reply_to=msg)

    return made


def run(strategy: Strategy, client: ClientApp, rounds: int = 3) -> dict[str, np.ndarray]:
    model = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    with InProcessGrid(client, 4, seed=2) as grid:
        result = strategy.start(grid, model, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


CODECS: list[Codec] = [
    EDEN(),
    EDEN(bits=4),
    SignSGD(step=0.01),
    RandomProjection(directions=64),
    QSGD(levels=7),
    ScaledSign(),
    TopK(density=0.1),
]


@pytest.mark.parametrize("rule", ["mean", "median"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_nobody_changes_does_not_move_by_a_bit(codec: Codec, rule: str) -> None:
    if rule == "median" and codec.votes:
        pytest.skip("votes are no single updates")
    keys = {"min_train_nodes": 1, "min_available_nodes": 1, "min_evaluate_nodes": 1, "fraction_evaluate": 0.0}
    inner = FedMedian(**keys) if rule == "median" else fedavg(fraction_evaluate=0.0)  # type: ignore[arg-type]
    found = run(Compressed(inner, codec), app())
    np.testing.assert_array_equal(found["frozen"], MODEL["frozen"])
    assert (found["head"] != MODEL["head"]).any()


def test_one_client_that_changes_it_is_heard() -> None:
    found = run(Compressed(fedavg(fraction_evaluate=0.0), EDEN(bits=4)), app({(2, 3)}))
    assert (found["frozen"] != MODEL["frozen"]).mean() > 0.9


def test_what_a_memory_owes_is_still_sent() -> None:
    """A layer that was trained and then frozen: what error feedback kept of it must arrive, and nothing is lost."""
    codec = ErrorFeedback(RandomProjection(directions=400, scope="layer", scale="least"))
    trained = {(1, partition) for partition in range(4)}
    one = run(Compressed(fedavg(fraction_evaluate=0.0), codec), app(trained), rounds=1)
    many = run(Compressed(fedavg(fraction_evaluate=0.0), codec), app(trained), rounds=60)
    exact = run(fedavg(fraction_evaluate=0.0), app(trained), rounds=1)
    left, first = (np.linalg.norm(found["frozen"] - exact["frozen"]) for found in (many, one))
    assert left < 0.1 * first


def test_a_private_round_says_nothing_of_it() -> None:
    """Which tensors a client has changed follows from its data."""
    seen: list[object] = []
    mean = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=4)
    run(Compressed(mean, QSGD(levels=7)), app(seen=seen), rounds=1)
    assert seen == [None] * 4
    run(Compressed(fedavg(fraction_evaluate=0.0), QSGD(levels=7)), app(seen=seen), rounds=1)
    assert seen[4:] == [[0]] * 4
