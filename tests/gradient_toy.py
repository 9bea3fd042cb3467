"""A Flower app that makes one gradient step of least squares on its partition, in float64: what gradient codes add up.

The weighted mean of all clients' steps is one full-batch step, so that a coded run can be compared with gradient
descent itself. The model has a counter and an attention mask beside its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.rng import Key

FEATURES = 12
RATE = 0.3
MASK = np.array([0.0, -np.inf, 1.0], np.float32)


def data(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return X and y of a partition; sizes differ, so that weights do."""
    rows = 5 + 3 * partition
    draws = Key(11, "gradients", partition=partition).generator().standard_normal((rows, FEATURES + 1))
    return draws[:, :FEATURES] + 0.2 * partition, draws[:, FEATURES]


def model() -> ArrayRecord:
    """Return the zero model."""
    arrays = {"weight": np.zeros(FEATURES), "num_batches_tracked": np.array(7, np.int64), "mask": MASK}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def gradient(weight: np.ndarray, partition: int) -> np.ndarray:
    """Return the mean gradient of a partition."""
    x, y = data(partition)
    return x.T @ (x @ weight - y) / len(y)


def full_batch(rounds: int, partitions: Iterable[int]) -> list[np.ndarray]:
    """Return the weights after each round of gradient descent on all partitions together."""
    weight, out = np.zeros(FEATURES), []
    chosen = list(partitions)
    sizes = np.array([len(data(p)[1]) for p in chosen], np.float64)
    for _ in range(rounds):
        gradients = np.array([gradient(weight, p) for p in chosen])
        weight = weight - RATE * (sizes @ gradients) / sizes.sum()
        out.append(weight)
    return out


Train = Callable[[Message, Context], Message]


def app_of(train: Train, mods: Iterable | None = None) -> ClientApp:
    """Return an app with a training handler and the half :func:`programs`, unless others are given."""
    app = with_halves([compression()] if mods is None else mods)
    app.train()(train)
    return app


def float32_step(msg: Message, context: Context) -> Message:
    """Train a model of float32 weights alone, whose weight is partition + 1."""
    partition = int(context.node_config["partition-id"])
    weight = msg.content["arrays"]["weight"].numpy()
    trained = ArrayRecord({"weight": Array((weight - RATE * gradient(weight, partition)).astype(np.float32))})
    content = {"arrays": trained, "metrics": MetricRecord({"num-examples": partition + 1})}
    return Message(RecordDict(content), reply_to=msg)


def client_app(mods: Iterable | None = None) -> ClientApp:
    """Return the app, with the half :func:`programs` unless others are given."""

    def train(msg: Message, context: Context) -> Message:
        record = msg.content["arrays"]
        partition = int(context.node_config["partition-id"])
        weight = record["weight"].numpy()
        x, y = data(partition)
        trained = {
            "weight": Array(weight - RATE * gradient(weight, partition)),
            "num_batches_tracked": Array(np.array(record["num_batches_tracked"].numpy() + 1)),
            "mask": record["mask"],
        }
        # An app may do this to its message; the next partition must not notice.
        assert "seen" not in msg.content["config"]
        msg.content["config"]["seen"] = partition
        metrics = {
            "num-examples": len(y),
            "loss": float(np.mean((x @ weight - y) ** 2)),
            "twice": [1.0, float(partition)],
        }
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord(metrics)})
        content["fedcomp.node"] = ConfigRecord({"partition-id": partition})
        return Message(content, reply_to=msg)

    return app_of(train, mods)
