"""What a round costs beside the app: a client's half, the server's, in read passes and models of memory, and the bytes.

The drop-in pair (FedAvg inside ``Compressed``, top-k 1 % with error feedback) and plain FedAvg in the same run, on
models of 50 tensors. The app is a record that was made before and takes no time: what is measured
is delivery.
Processor time of one thread, divided by that of reading the model once (:mod:`fedcomp.experiments.bench.readpass`).
Memory is what is allocated at the peak, in models: at a client beside the message, its state and the app's reply, at
the server beside its own model and the replies.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, TopK
from fedcomp.experiments.bench.engine import BenchError
from fedcomp.experiments.bench.readpass import Vector, layered, read_pass
from fedcomp.experiments.bench.server import Nodes
from fedcomp.experiments.kit import claim
from fedcomp.flower._private import acting_as, content_to_bytes, set_message_id
from fedcomp.flower.logs import quiet
from fedcomp.strategies.compressed import Compressed

TENSORS: Final = 50
DENSITY: Final = 0.01
PLAIN: Final = "FedAvg, plain"
PAIR: Final = "pair"
DOWN: Final = "pair, downlink top-k 1 %"
SYSTEMS: Final = (PLAIN, PAIR, DOWN)
FEW, MANY = 2, 20

GOALS: Final = (
    ("client", "read passes", 30.0),
    ("client", "models", 3.0),
    ("server", "read passes", 20.0),
    ("server", "models", 3.0),
)


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure models of 1 and 25 million values with 2 and 20 replies; return rows and claims.

    The claims are goals of the largest model: they are shown, and fail nothing.
    """
    sizes = (20_000,) if quick else (1_000_000, 25_000_000)
    say = progress or (lambda _line: None)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for name in SYSTEMS:
            for clients in (FEW, MANY):
                say(f"{name}, {size:,} values, {clients} replies")
                with quiet(), acting_as(1, 0):
                    rows.append(_row(name, size, clients))
    return {"rows": rows, "claims": _claims(rows)}


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({f"w{i}": Array(part) for i, part in enumerate(np.array_split(vector, TENSORS))})


def _strategy(name: str, clients: int) -> Any:
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    down: Codec | None = TopK(DENSITY) if name == DOWN else None
    return inner if name == PLAIN else Compressed(inner, TopK(DENSITY), down)


def _row(name: str, size: int, clients: int) -> dict[str, Any]:
    """Run rounds of a federation, and return the medians of all but the first."""
    model = layered(size)
    limit = read_pass(model)
    server, arrays = _strategy(name, clients), _record(model)
    contexts = [
        Context(1, i + 1, {"partition-id": i, "num-partitions": clients}, RecordDict(), {}) for i in range(clients)
    ]
    # Two apps' changes for all: a third would only be a third model in memory.
    changes = [1e-3 * layered(size, seed + 1) for seed in range(2)]
    found: dict[str, list[float]] = {"client": [], "server": [], "client peak": [], "server peak": []}
    down = up = 0
    # The first round warms up, and in the last one memory is traced, which takes time.
    last = 6 if clients == FEW else 3
    for number in range(1, last + 1):
        tracing = number == last

        def configure(server_round: int = number, model: ArrayRecord = arrays) -> list[Message]:
            return list(server.configure_train(server_round, model, ConfigRecord(), Nodes(clients)))

        sent = _measured(configure, limit, trace=tracing)
        messages = sent.result
        replies = []
        # Models that grew from the one that was sent: what does not follow it counts as a client's own.
        current = np.concatenate([array.numpy() for array in arrays.values()])
        trained = [_record(current + change) for change in changes]
        for i, message in enumerate(messages):
            # Flower's ids are hashes of the content; any name will do to match a reply with what it answers.
            set_message_id(message, f"{number * clients + i:064x}")
            down = len(content_to_bytes(message.content))
            node = contexts[message.metadata.dst_node_id - 1]
            answered = _client(name, message, node, trained[i % 2], limit, trace=tracing)
            up = len(content_to_bytes(answered.result.content))
            replies.append(answered.result)
            if tracing:
                found["client peak"].append(answered.peak / (4 * size))
            elif number > 1:
                found["client"].append(answered.passes)

        def aggregate(server_round: int = number, given: Sequence[Message] = replies) -> ArrayRecord | None:
            return server.aggregate_train(server_round, given)[0]

        added = _measured(aggregate, limit, trace=tracing)
        arrays = added.result
        if arrays is None:
            raise BenchError(f"{name} did not use the replies of round {number}")
        if tracing:
            # What it keeps from the first half is there during the second.
            found["server peak"].append(max(sent.peak, sent.kept + added.peak) / (4 * size))
        elif number > 1:
            found["server"].append(sent.passes + added.passes)
    return {
        "system": name,
        "values": size,
        "replies": clients,
        "client, read passes": round(median(found["client"]), 1),
        "client, models": round(median(found["client peak"]), 2),
        "server, read passes": round(median(found["server"]), 1),
        "server, models": round(median(found["server peak"]), 2),
        "kB down": round(down / 1e3, 1),
        "kB up": round(up / 1e3, 1),
    }


def _client(
    name: str, message: Message, node: Context, trained: ArrayRecord, limit: Callable[[], object], *, trace: bool
) -> _Measured:
    def app(msg: Message, context: Context) -> Message:
        content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    if name == PLAIN:
        return _Measured(app(message, node))
    mod = compression().mod
    assert mod is not None
    return _measured(lambda: mod(message, node, app), limit, trace=trace)


@dataclass(frozen=True)
class _Measured:
    """A call: what it returned, took in read passes, allocated at its peak, and kept of that."""

    result: Any
    passes: float = 0.0
    peak: float = 0.0
    kept: float = 0.0


def _measured(call: Callable[[], Any], limit: Callable[[], object], *, trace: bool) -> _Measured:
    """Measure memory where ``trace``, else time: to trace takes time."""
    if trace:
        tracemalloc.start()
        out = call()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return _Measured(out, peak=peak, kept=kept)
    start = time.thread_time()
    limit()
    begun = time.thread_time()
    out = call()
    return _Measured(out, passes=(time.thread_time() - begun) / max(begun - start, 1e-9))


def _claims(rows: Sequence[dict[str, Any]]) -> list[Any]:
    size = max(row["values"] for row in rows)
    at = {(row["system"], row["replies"]): row for row in rows if row["values"] == size}
    millions = f"{size / 1e6:g} million values"
    claims = [
        claim(
            f"{system}, {side}, {FEW} replies, {millions}: {what}",
            at[system, FEW][f"{side}, {what}"],
            f"<= {bound}",
            "goal of this project",
            gate=False,
        )
        for system in (PAIR, DOWN)
        for side, what, bound in GOALS
    ]
    over = at[PAIR, FEW]["server, read passes"] / at[PLAIN, FEW]["server, read passes"]
    claims.append(
        claim(f"pair, server, {FEW} replies, {millions}: over FedAvg's own time", over, "<= 2.0", "goal", gate=False)
    )
    return claims
