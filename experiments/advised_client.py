"""The client of a trial of ``fedcomp advise``: its training is noise, and it answers the systems of all lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key

Arrays = dict[str, NDArray[Any]]


def trial_client(training: Callable[[], AbstractContextManager[None]] = nullcontext) -> Any:
    """Return an app whose training is noise, and which answers the systems of all lines. It trains within the context
    of ``training()``."""
    from flwr.clientapp import ClientApp

    from fedcomp.clients.client import client
    from fedcomp.clients.gossip import gossip_node
    from fedcomp.clients.half import ClientHalf
    from fedcomp.clients.programs import Brought, bring
    from fedcomp.flower.asks import system_asked
    from fedcomp.systems.private.record import Account, Records

    def noised(me: Any, plan: Any, learn: Callable[[], Any]) -> Any:
        update, said = learn(), f"{me.key.round:032x}"
        return update, Account("advise", plan.steps, plan.steps * max(1, me.key.round), said), {}

    def records(msg: Any, context: Any, call_next: Any) -> Any:
        if msg.metadata.message_type != "train" or system_asked(msg.content) != Records.ID:
            return call_next(msg, context)
        return bring(Records.ID, lambda m, c: Brought(noised), lambda: call_next(msg, context))

    def train(msg: Any, context: Any) -> Any:
        with training():
            return _moved(msg, context)

    app = ClientApp()
    app.train()(train)
    half = ClientHalf("record_dp", records, outside=("compression", "private"), needs=("compression",))

    def problem(msg: Any, context: Any, setup: Any) -> _Noise:
        return _Noise(int(context.node_config["partition-id"]), training)

    return client(app, half, gossip_node(problem))


class _Noise:
    """What a gossip node of a trial learns from."""

    def __init__(self, partition: int, training: Callable[[], AbstractContextManager[None]]) -> None:
        self._partition, self._training = partition, training

    def gradient(self, arrays: Mapping[str, Any], key: Key) -> Arrays:
        shapes = [array.shape for array in arrays.values()]
        with self._training():
            return {name: 20.0 * noise(shapes, i, key.round, self._partition) for i, name in enumerate(arrays)}

    def buffers_after(self) -> Arrays:
        return {}

    def evaluate(self, arrays: Mapping[str, Any]) -> dict[str, float]:
        return {"loss": 0.0}


def _moved(msg: Any, context: Any) -> Any:
    """Train: every tensor moves by noise."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    partition, number = int(context.node_config["partition-id"]), int(msg.content["config"].get("server-round", 0))
    moved = {}
    name, record = next(iter(msg.content.array_records.items()))
    shapes = [array.shape for array in record.values()]
    for i, (tensor, array) in enumerate(record.items()):
        values = array.numpy()
        if values.dtype.kind == "f" and values.size:
            moved[tensor] = Array((values + noise(shapes, i, number, partition)).astype(values.dtype))
        else:
            moved[tensor] = array
    metrics = MetricRecord({"train_loss": 1.0, "num-examples": 100 + partition})
    return Message(RecordDict({name: ArrayRecord(moved), "metrics": metrics}), reply_to=msg)


def noise(shapes: Sequence[tuple[int, ...]], tensor: int, number: int, partition: int) -> NDArray[np.float32]:
    """Return a random update of one tensor of a model: scales are the same in all rounds and clients, values are not.

    Normal values of equal scale would cost an index or an entropy coder more than updates do: in these the last layer,
    vectors and single rows are larger. The figures were fitted to two MLPs, three CNNs, an LSTM and three transformers
    in their first rounds of SGD.
    """
    shape = shapes[tensor]
    last = max((i for i, each in enumerate(shapes) if len(each) > 1), default=0)
    rows, columns = (shape[0] if len(shape) > 1 else 1), math.prod(shape[1:] if len(shape) > 1 else shape)
    size = 1e-3 * (rows * columns) ** -0.1 * (8.0 if tensor >= last else 1.0) * (1.0 if len(shape) > 1 else 2.0)
    scales = Key(0, "advise/scales").at(partition=tensor).generator()
    values = Key(0, f"advise/{tensor}", round=number, partition=partition).generator()
    update = values.standard_normal((rows, columns), np.float32)
    update *= np.exp(0.6 * scales.standard_normal((rows, 1))).astype(np.float32)
    update *= np.exp(0.4 * scales.standard_normal((1, columns))).astype(np.float32)
    return (update * np.float32(size)).reshape(shape)
