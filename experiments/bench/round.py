"""The overhead of a round without the app: time of both halves in read passes, memory in models, and bytes.

The drop-in pair (FedAvg inside ``Compressed``, top-k 1 % with error feedback; at one size other codecs, too) and plain
FedAvg in the same run, on models of 50 tensors. The app is a record that was made before and takes no time: what is
measured is delivery.
Time is divided by that of reading the model once (:mod:`fedcomp.experiments.bench.readpass`). Memory is what is
allocated at the peak, in models: at a client beside the message, its state and the app's reply, at the server beside
its own model and the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.compressed import compression
from fedcomp.codecs import EDEN, QSGD, Auto, Codec, Identity, ScaledSign, TopK
from fedcomp.experiments.bench.readpass import BenchError, Vector, layered, read_pass
from fedcomp.experiments.bench.server import Nodes
from fedcomp.flower._private import acting_as, content_to_bytes, set_message_id
from fedcomp.flower.logs import quiet
from fedcomp.measuring import Bound, Case, Row, Traced, traced
from fedcomp.strategies.compressed import Compressed

TENSORS: Final = 50
PLAIN, PAIR, DOWN = "FedAvg, plain", "pair", "pair, downlink top-k 1 %"
SYSTEMS: Final = (PLAIN, PAIR, DOWN)
CODECS: Final[Mapping[str, tuple[Codec, Codec | None]]] = {
    PAIR: (TopK(0.01), None),
    DOWN: (TopK(0.01), TopK(0.01)),
    "pair, top-k 5 % of two bits": (TopK(0.05, values="q2"), None),
    "pair, EDEN 1 bit": (EDEN(bits=1), None),
    "pair, EDEN 1 bit both ways": (EDEN(bits=1), EDEN(bits=1, scale="least")),
    "pair, Auto 0.1 bit": (Auto(bits=0.1, feedback=True), None),
    "pair, ScaledSign": (ScaledSign(), None),
    "pair, QSGD 127 levels": (QSGD(levels=127), None),
    "pair, Identity": (Identity(), None),
}
"""Uplink and downlink of each system but plain FedAvg."""
FEW, MANY = 2, 20

GOALS: Final = (
    ("client", "read passes", 30.0),
    ("client", "models", 3.0),
    ("server", "read passes", 20.0),
    ("server", "models", 3.0),
)


def cases(quick: bool) -> Iterator[Case]:
    """Yield models of 1 and 25 million values with 2 and 20 replies, other codecs with the fewest of both.

    What is claimed are goals of the largest model: they are shown, and fail nothing.
    """
    sizes = (20_000,) if quick else (1_000_000, 25_000_000)
    for size in sizes:
        for name in SYSTEMS:
            for clients in (FEW, MANY):
                last = 6 if clients == FEW else 3
                yield Case(f"{name}, {size:,} values, {clients} replies", partial(rounds, name, size, clients, last))
    for name in [name for name in CODECS if name not in SYSTEMS]:
        yield Case(f"{name}, {sizes[0]:,} values, {FEW} replies", partial(rounds, name, sizes[0], FEW, 6))
    at = {system: {"system": system, "replies": FEW, "values": sizes[-1]} for system in SYSTEMS}

    def goal(system: str, side: str, what: str, value: Any, bound: float, source: str) -> Bound:
        name = f"{system}, {side}, {FEW} replies, {sizes[-1] / 1e6:g} million values: {what}"
        return Bound(name, value, f"<= {bound:g}", source, gate=False)

    bounds = [
        goal(system, side, what, (f"{side}, {what}", at[system]), bound, "goal of this project")
        for system in (PAIR, DOWN)
        for side, what, bound in GOALS
    ]
    times = ("server, read passes", at[PAIR], at[PLAIN])
    yield Case(bounds=[*bounds, goal(PAIR, "server", "over FedAvg's own time", times, 2, "goal")])


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({f"w{i}": Array(part) for i, part in enumerate(np.array_split(vector, TENSORS))})


def rounds(name: str, size: int, clients: int, last: int, _: Any) -> list[Row]:
    """Run ``last`` rounds of a federation, and return the medians of all but the first.

    That one warms up, and in the last one memory is traced, which takes time.
    """
    model = layered(size)
    limit, arrays = read_pass(model), _record(model)
    server: Any = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    if name != PLAIN:
        server = Compressed(server, *CODECS[name])
    nodes = [
        Context(1, i + 1, {"partition-id": i, "num-partitions": clients}, RecordDict(), {}) for i in range(clients)
    ]
    # Two apps' changes for all: a third would only be a third model in memory.
    changes = [1e-3 * layered(size, seed + 1) for seed in range(2)]
    passes: dict[str, list[float]] = {"client": [], "server": []}
    peaks: dict[str, list[float]] = {"client": [], "server": []}
    down = up = 0
    with quiet(), acting_as(1, 0):
        for number in range(1, last + 1):
            measure = partial(_measured, limit, trace=number == last)
            ask = partial(server.configure_train, number, arrays, ConfigRecord(), Nodes(clients))
            sent, spent = measure(ask)
            # Models that grew from the one that was sent: what does not follow it counts as a client's own.
            current = np.concatenate([array.numpy() for array in arrays.values()])
            trained, replies = [_record(current + change) for change in changes], []
            for i, message in enumerate(sent.result):
                # Flower's ids are hashes of the content; any name will do to match a reply with what it answers.
                set_message_id(message, f"{number * clients + i:064x}")
                node = nodes[message.metadata.dst_node_id - 1]
                down = len(content_to_bytes(message.content))
                answered, taken = measure(partial(_answer, name, message, node, trained[i % 2]))
                up = len(content_to_bytes(answered.result.content))
                replies.append(answered.result)
                passes["client"].append(taken)
                peaks["client"].append(answered.peak / (4 * size))
            added, taken = measure(partial(server.aggregate_train, number, replies))
            arrays = added.result[0]
            if arrays is None:
                raise BenchError(f"{name} did not use the replies of round {number}")
            passes["server"].append(spent + taken)
            # What it keeps from the first half is there during the second.
            peaks["server"].append(max(sent.peak, sent.kept + added.peak) / (4 * size))
    return [
        {
            "system": name,
            "values": size,
            "replies": clients,
            "client, read passes": round(median(passes["client"][clients:-clients]), 1),
            "client, models": round(median(peaks["client"][-clients:]), 2),
            "server, read passes": round(median(passes["server"][1:-1]), 1),
            "server, models": round(peaks["server"][-1], 2),
            "kB down": round(down / 1e3, 1),
            "kB up": round(up / 1e3, 1),
        }
    ]


def _answer(name: str, message: Message, node: Context, trained: ArrayRecord) -> Message:
    def app(msg: Message, context: Context) -> Message:
        content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    mod = compression().mod
    assert mod is not None
    return app(message, node) if name == PLAIN else mod(message, node, app)


def _measured(limit: Callable[[], object], call: Callable[[], Any], *, trace: bool) -> tuple[Traced, float]:
    """Return a call's result with its memory where ``trace``, else with the read passes it took: to trace takes
    time."""
    if trace:
        return traced(call), 0.0
    start = time.thread_time()
    limit()
    begun = time.thread_time()
    out = call()
    return Traced(out, 0, 0), (time.thread_time() - begun) / max(begun - start, 1e-9)
