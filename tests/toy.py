"""A small Flower app whose updates are integers, so that float32 sums are exact and conservation can be checked."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.client import client
from fedcomp.clients.half import ClientHalf
from fedcomp.flower import asks
from fedcomp.flower.payload import FRAME, NODE_RECORD, round_of
from fedcomp.rng import Key
from fedcomp.wire import Bf16

SHAPES = {"weight": (40, 30), "bias": (12,)}


def model(value: float = 0.0, *, counter: bool = False) -> ArrayRecord:
    """Return a two-tensor model filled with ``value``, with an integer counter if asked."""
    arrays = {k: Array(np.full(s, value, np.float32)) for k, s in SHAPES.items()}
    if counter:
        arrays["num_batches_tracked"] = Array(np.array(0, np.int64))
    return ArrayRecord(arrays)


def update(round_: int, partition: int, shape: tuple[int, ...], layer: int = 0) -> np.ndarray:
    """Return integers in [-1000, 1000], a pure function of the arguments."""
    words = Key(7, "toy-update", round_, partition, layer).bits(int(np.prod(shape, dtype=int)))
    return ((words % np.uint64(2001)).astype(np.int64) - 1000).astype(np.float32).reshape(shape)


def fingerprint(record: ArrayRecord) -> float:
    """Return 48 bits of a hash over a model, exact in a float."""
    h = hashlib.sha256()
    for name in sorted(record):
        h.update(np.ascontiguousarray(record[name].numpy()).tobytes())
    return float(int.from_bytes(h.digest()[:6], "little"))


def with_halves(halves: Iterable) -> ClientApp:
    """Return an empty app inside of client halves; functions among them are mods that stand where they are listed."""
    only = list(halves)
    names = [half.name if isinstance(half, ClientHalf) else f"mod {i}" for i, half in enumerate(only)]
    for i, half in enumerate(only):
        if not isinstance(half, ClientHalf):
            only[i] = ClientHalf(names[i], half, inside=tuple(names[:i]), outside=tuple(names[i + 1 :]))
    return client(ClientApp(), only=only)


Step = Callable[[dict[str, Any], int, int], Mapping[str, Any]]
"""``step(arrays, round, partition)`` returns the arrays that a client has trained."""


def training(
    step: Step, halves: Iterable | None = (), *, examples: Callable[[int], float] = lambda partition: 1
) -> ClientApp:
    """Return an app that trains by ``step``, on so many examples of a partition, and whose evaluations say nothing.

    Without halves (``None``) it is one that nobody has wrapped.
    """
    app = ClientApp() if halves is None else with_halves(halves)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        (name, record), partition = next(iter(msg.content.array_records.items())), context.node_config["partition-id"]
        arrays = step({key: array.numpy() for key, array in record.items()}, round_of(msg), partition)
        out = ArrayRecord({k: a if isinstance(a, Array) else Array(np.asarray(a)) for k, a in arrays.items()})
        content = RecordDict({name: out, "metrics": MetricRecord({"num-examples": examples(partition)})})
        content[NODE_RECORD] = ConfigRecord({"partition-id": partition})
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}), reply_to=msg)

    return app


def by_partition(choose: Callable[[int], ClientApp]) -> Callable[[Message, Context], Message]:
    """Return what has each node run the app that is chosen for its partition."""
    return lambda msg, context: choose(int(context.node_config["partition-id"]))(msg, context)


def client_app(halves: Iterable = (), *, examples: int = 10) -> ClientApp:
    """Return an app that adds :func:`update` to the model, and keeps the exact sum of what it did in its state."""
    app = with_halves(halves)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records
        round_ = int(next(iter(config.values()))["server-round"])
        partition = int(context.node_config["partition-id"])
        out, total = {}, []
        for layer, (k, array) in enumerate(record.items()):
            old = array.numpy()
            if old.dtype.kind == "i":
                out[k] = Array(np.asarray(old + round_ + partition))
                continue
            step = update(round_, partition, old.shape, layer)
            out[k] = Array(np.asarray(old + step))
            total.append(step.astype(np.float64).reshape(-1))
        done = context.state.array_records.get("toy.sum")
        before = done["sum"].numpy() if done else 0.0
        context.state["toy.sum"] = ArrayRecord({"sum": Array(np.concatenate(total) + before)})
        metrics = {"num-examples": examples * (partition + 1), "partition": partition, "seen": fingerprint(record)}
        content = RecordDict({name: ArrayRecord(out), "metrics": MetricRecord(metrics)})
        content["fedcomp.node"] = ConfigRecord({"partition-id": partition})
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        record = next(iter(msg.content.array_records.values()))
        metrics = MetricRecord({"num-examples": 1, "seen": fingerprint(record)})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
"""For a strategy that goes on with whoever is there."""


def fedavg(**options) -> FedAvg:
    """Return plain FedAvg without the noise of its default minimum of two nodes."""
    return FedAvg(**{**ONE, "fraction_evaluate": 1.0, **options})


def bias_of(*rounds: tuple[int, tuple[int, ...]]) -> np.ndarray:
    """Return what these partitions of :func:`client_app`, in these rounds, make of a bias of zeros."""
    total = np.zeros(SHAPES["bias"])
    for round_, parts in rounds:
        updates = [update(round_, p, SHAPES["bias"], 1) for p in parts]
        total += np.average(updates, axis=0, weights=[p + 1 for p in parts])
    return total


def stack(record: ArrayRecord) -> np.ndarray:
    """Return a model's float tensors as one float64 vector, in the record's order."""
    parts = [a.numpy() for a in record.values()]
    return np.concatenate([p.astype(np.float64).reshape(-1) for p in parts if p.dtype.kind == "f"])


def in_bfloat16(values: np.ndarray) -> Array:
    """Return ``Array(values.astype(ml_dtypes.bfloat16))``, as Flower and numpy write it."""
    bits = io.BytesIO()
    np.lib.format.write_array_header_1_0(bits, {"descr": "<V2", "fortran_order": False, "shape": values.shape})
    return Array("bfloat16", values.shape, "numpy.ndarray", bits.getvalue() + Bf16(values).words.tobytes())


def sent_frame(content: RecordDict) -> bytes | None:
    """Return the frame in an answer of the pair."""
    return asks.data_in(content, FRAME).get("values")


def put_sent_frame(content: RecordDict, frame: bytes) -> None:
    """Put another frame in the place of the one in an answer of the pair."""
    content.pop(FRAME + "values", None)
    content[NODE_RECORD][FRAME + "values"] = frame
