"""What a round costs beside the app: a client's half, the server's, in read passes and models of memory, and the bytes.

The drop-in pair (FedAvg inside ``Compressed``, top-k 1 % with error feedback) and plain FedAvg in the same run, on
models of 50 tensors. The app is a record that was made before and takes no time: what is measured is delivery.
Time is divided by that of reading the model once (:mod:`fedcomp.experiments.bench.readpass`). Memory is what is
allocated at the peak, in models: at a client beside the message, its state and the app's reply, at the server beside
its own model and the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.experiments.bench.readpass import BenchError, Vector, layered, read_pass
from fedcomp.experiments.bench.server import Nodes
from fedcomp.flower._private import acting_as, content_to_bytes, set_message_id
from fedcomp.flower.logs import quiet
from fedcomp.measuring import Bound, Case, Row, traced
from fedcomp.strategies.compressed import Compressed

TENSORS: Final = 50
CODEC: Final = TopK(0.01)
PLAIN, PAIR, DOWN = "FedAvg, plain", "pair", "pair, downlink top-k 1 %"
SYSTEMS: Final = (PLAIN, PAIR, DOWN)
FEW, MANY = 2, 20

GOALS: Final = (
    ("client", "read passes", 30.0),
    ("client", "models", 3.0),
    ("server", "read passes", 20.0),
    ("server", "models", 3.0),
)


def cases(quick: bool) -> Iterator[Case]:
    """Yield models of 1 and 25 million values with 2 and 20 replies.

    What is claimed are goals of the largest model: they are shown, and fail nothing.
    """
    sizes = (20_000,) if quick else (1_000_000, 25_000_000)
    for size in sizes:
        for name in SYSTEMS:
            for clients in (FEW, MANY):
                yield Case(f"{name}, {size:,} values, {clients} replies", partial(_row, name, size, clients))
    at = {system: {"system": system, "replies": FEW, "values": sizes[-1]} for system in SYSTEMS}
    millions = f"{sizes[-1] / 1e6:g} million values"
    bounds = [
        Bound(
            f"{system}, {side}, {FEW} replies, {millions}: {what}",
            (f"{side}, {what}", at[system]),
            f"<= {bound}",
            "goal of this project",
            gate=False,
        )
        for system in (PAIR, DOWN)
        for side, what, bound in GOALS
    ]
    over = f"pair, server, {FEW} replies, {millions}: over FedAvg's own time"
    times = ("server, read passes", at[PAIR], at[PLAIN])
    yield Case(bounds=[*bounds, Bound(over, times, "<= 2", "goal", gate=False)])


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({f"w{i}": Array(part) for i, part in enumerate(np.array_split(vector, TENSORS))})


def _row(name: str, size: int, clients: int, _: Any) -> list[Row]:
    with quiet(), acting_as(1, 0):
        return [{"system": name, "values": size, "replies": clients, **_rounds(name, size, clients)}]


def _rounds(name: str, size: int, clients: int) -> dict[str, float]:
    """Run rounds of a federation, and return the medians of all but the first."""
    model = layered(size)
    limit, arrays = read_pass(model), _record(model)
    server: Any = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    if name != PLAIN:
        server = Compressed(server, CODEC, CODEC if name == DOWN else None)
    nodes = [
        Context(1, i + 1, {"partition-id": i, "num-partitions": clients}, RecordDict(), {}) for i in range(clients)
    ]
    # Two apps' changes for all: a third would only be a third model in memory.
    changes = [1e-3 * layered(size, seed + 1) for seed in range(2)]
    found: dict[str, list[float]] = {"client": [], "server": [], "client peak": [], "server peak": []}
    down = up = 0
    # The first round warms up, and in the last one memory is traced, which takes time.
    last = 6 if clients == FEW else 3
    for number in range(1, last + 1):
        measure = partial(_measured, limit, trace=number == last)
        sent = measure(partial(server.configure_train, number, arrays, ConfigRecord(), Nodes(clients)))
        replies = []
        # Models that grew from the one that was sent: what does not follow it counts as a client's own.
        current = np.concatenate([array.numpy() for array in arrays.values()])
        trained = [_record(current + change) for change in changes]
        for i, message in enumerate(sent.result):
            # Flower's ids are hashes of the content; any name will do to match a reply with what it answers.
            set_message_id(message, f"{number * clients + i:064x}")
            down = len(content_to_bytes(message.content))
            node = nodes[message.metadata.dst_node_id - 1]
            answered = measure(partial(_answer, name, message, node, trained[i % 2]))
            up = len(content_to_bytes(answered.result.content))
            replies.append(answered.result)
            found["client"].append(answered.passes)
            found["client peak"].append(answered.peak / (4 * size))
        added = measure(partial(server.aggregate_train, number, replies))
        arrays = added.result[0]
        if arrays is None:
            raise BenchError(f"{name} did not use the replies of round {number}")
        found["server"].append(sent.passes + added.passes)
        # What it keeps from the first half is there during the second.
        found["server peak"].append(max(sent.peak, sent.kept + added.peak) / (4 * size))
    timed, traced = slice(clients, -clients), slice(-clients, None)
    return {
        "client, read passes": round(median(found["client"][timed]), 1),
        "client, models": round(median(found["client peak"][traced]), 2),
        "server, read passes": round(median(found["server"][1:-1]), 1),
        "server, models": round(found["server peak"][-1], 2),
        "kB down": round(down / 1e3, 1),
        "kB up": round(up / 1e3, 1),
    }


def _answer(name: str, message: Message, node: Context, trained: ArrayRecord) -> Message:
    def app(msg: Message, context: Context) -> Message:
        content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    mod = compression().mod
    assert mod is not None
    return app(message, node) if name == PLAIN else mod(message, node, app)


@dataclass(frozen=True)
class _Measured:
    """A call: what it returned, took in read passes, allocated at its peak, and kept of that."""

    result: Any
    passes: float = 0.0
    peak: float = 0.0
    kept: float = 0.0


def _measured(limit: Callable[[], object], call: Callable[[], Any], *, trace: bool) -> _Measured:
    """Measure memory where ``trace``, else time: to trace takes time."""
    if trace:
        done = traced(call)
        return _Measured(done.result, peak=done.peak, kept=done.kept)
    start = time.thread_time()
    limit()
    begun = time.thread_time()
    out = call()
    return _Measured(out, passes=(time.thread_time() - begun) / max(begun - start, 1e-9))
