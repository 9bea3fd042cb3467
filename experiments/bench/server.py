"""What a client costs the server: checking, decoding and adding its update, for every codec and many clients.

Replies are made beforehand, from ten distinct updates, and handed to ``aggregate_train`` of FedAvg inside
``Compressed``, as the driver would. FedAvg itself, on the same models as plain arrays, is measured in the same run and
is what costs are divided by: both read and add as many values. Processor time of one thread. Memory is what
``aggregate_train`` allocates at its peak beside the replies.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.codecs import (
    DCT,
    EDEN,
    QSGD,
    STC,
    Codec,
    Domain,
    Identity,
    NaturalCompression,
    RandomK,
    Rotation,
    ScaledSign,
    TernGrad,
    TopK,
)
from fedcomp.experiments.bench.engine import BenchError
from fedcomp.experiments.bench.readpass import layered
from fedcomp.experiments.kit import claim
from fedcomp.flower import asks
from fedcomp.flower._private import acting_as, set_message_id
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.logs import quiet
from fedcomp.flower.payload import FRAME
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.wire import SchemaMismatch

CODECS: Final[Mapping[str, Codec]] = {
    "identity": Identity(),
    "top-k 1 %": TopK(0.01),
    "top-k 10 %": TopK(0.1),
    "top-k 1 %, q2": TopK(0.01, values="q2"),
    "top-k 1 %, q8": TopK(0.01, values="q8"),
    "STC 1 %": STC(0.01),
    "random-k 1 %": RandomK(0.01),
    "scaled sign": ScaledSign(),
    "TernGrad": TernGrad(),
    "QSGD(127)": QSGD(127),
    "QSGD(7)": QSGD(7),
    "QSGD(1)": QSGD(1),
    "natural": NaturalCompression(),
    "EDEN, 1 bit": EDEN(1),
    "EDEN, 4 bits": EDEN(4),
    "rotation + top-k 1 %": Domain(Rotation(), TopK(0.01)),
    "DCT + top-k 1 %": Domain(DCT(), TopK(0.01)),
}
PLAIN: Final = "FedAvg, plain"
BOUND: Final = 3.0
FLAT: Final = 1.3
_DISTINCT: Final = 10
_UPLINK: Final = Key(0, "uplink", 1)
_MB: Final = 1e6


class Nodes:
    """The nodes of a federation, for what strategies ask of a grid."""

    def __init__(self, count: int) -> None:
        self._nodes = list(range(1, count + 1))

    def get_node_ids(self) -> Iterable[int]:
        """Return them."""
        return self._nodes


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure every codec with 10, 100 and 1000 clients; return rows and claims.

    ``rows``: one per codec and number of clients, with the bytes of a reply. ``claims``: the cost over FedAvg's own,
    that the cost per client does not grow with their number, and that memory does not.
    """
    size, numbers = (20_000, (2, 12)) if quick else (1_000_000, (10, 100, 1000))
    say = progress or (lambda _line: None)
    layout = Layout.flat(size)
    updates = [Update(1e-3 * layered(size, seed), layout) for seed in range(min(_DISTINCT, numbers[-1]))]
    rows: list[dict[str, Any]] = []
    for name, codec in {PLAIN: None, **CODECS}.items():
        frames = None if codec is None else frames_of(codec, updates, numbers[-1])
        for clients in numbers:
            say(f"{name}, {clients} clients")
            with quiet(), acting_as(1, 0):
                rows.append(_row(name, codec, frames, updates, clients))
    return {"rows": rows, "claims": _claims(rows, numbers, gate=not quick)}


def frames_of(codec: Codec, updates: Sequence[Update], clients: int) -> list[bytes]:
    """Return what the first clients send, of whom the others' replies are copies; of all where none can be a copy."""

    def frame(partition: int) -> bytes:
        update = updates[partition % len(updates)]
        return codec.encode(update, codec.init(update.layout), _UPLINK.at(partition=partition))[0]

    frames = [frame(partition) for partition in range(len(updates))]
    try:
        codec.verify(frames[0], updates[0].layout, _UPLINK.at(partition=len(updates)))
    except SchemaMismatch:
        # The codec's draws are the sender's own, and the server looks whether they are.
        frames += [frame(partition) for partition in range(len(updates), clients)]
    return frames


def _row(
    name: str, codec: Codec | None, frames: Sequence[bytes] | None, updates: Sequence[Update], clients: int
) -> dict[str, Any]:
    size = updates[0].layout.size
    seconds = []
    for _ in range(5 if clients <= 10 else 3 if clients <= 100 else 1):
        server, replies, _ = round_of(codec, frames, updates, clients)
        start = time.thread_time()
        arrays, _ = server.aggregate_train(1, replies)
        seconds.append(time.thread_time() - start)
        if arrays is None or (codec is not None and server.reports[1].used != clients):
            raise BenchError(f"{name} did not add all updates of {clients} clients")
    server, replies, reply_bytes = round_of(codec, frames, updates, clients)
    tracemalloc.start()
    server.aggregate_train(1, replies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "codec": name,
        "clients": clients,
        "bytes of a reply": reply_bytes,
        "ms per client and million values": 1e9 * median(seconds) / clients / size,
        "peak in models": peak / (4 * size),
    }


def round_of(
    codec: Codec | None,
    frames: Sequence[bytes] | None,
    updates: Sequence[Update],
    clients: int,
    kind: type[FedAvg] = FedAvg,
) -> tuple[Any, list[Message], int]:
    """Return a server that has sent a round, its replies, and the payload of one."""
    inner = kind(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    server: Any = inner if codec is None else Compressed(inner, codec, feedback=False)
    size = updates[0].layout.size
    model = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    messages = list(server.configure_train(1, model, ConfigRecord(), Nodes(clients)))
    plain = [ArrayRecord({"w": Array(update.vector)}) for update in updates] if frames is None else None
    replies = []
    for index, message in enumerate(messages):
        # Flower's ids are hashes of the content; any name will do to match a reply with what it answers.
        set_message_id(message, f"{index + 1:064x}")
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        if frames is None:
            assert plain is not None
            content["arrays"] = plain[index % len(plain)]
        else:
            head = AnswerHead(index, server.sequence, record="arrays")
            asks.put(content, head, data={FRAME + "values": frames[index % len(frames)]})
        replies.append(Message(content, reply_to=message))
    payload = len(frames[0]) if frames is not None else 4 * size
    return server, replies, payload


def _claims(rows: list[dict[str, Any]], numbers: Sequence[int], *, gate: bool) -> list[Any]:
    cost = {(r["codec"], r["clients"]): r["ms per client and million values"] for r in rows}
    peak = {(r["codec"], r["clients"]): r["peak in models"] for r in rows}
    few, many = numbers[0], numbers[-1]
    claims = []
    for name in CODECS:
        claims += [
            claim(
                f"{name}: cost of a client over FedAvg's own, {numbers[-2]} clients",
                cost[name, numbers[-2]] / cost[PLAIN, numbers[-2]],
                f"<= {BOUND}",
                "goal of this project; both read and add as many values",
                gate=gate,
            ),
            claim(
                f"{name}: cost of a client, {many} clients over {numbers[-2]}",
                cost[name, many] / cost[name, numbers[-2]],
                f"<= {FLAT}",
                "one pass for each client, whatever their number (derived)",
                gate=gate,
            ),
            claim(
                f"{name}: memory, {many} clients over {few}, in models",
                peak[name, many] - peak[name, few],
                "<= 1",
                "one buffer of the model's size (derived), and what is kept of each reply",
                gate=gate,
            ),
        ]
    return claims
