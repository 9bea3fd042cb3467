"""The server's cost per client: checking, decoding and adding its update, for every codec and many clients.

Replies are made beforehand, from ten distinct updates, and handed to ``aggregate_train`` of FedAvg inside
``Compressed``, as the driver would. FedAvg itself, on the same models as plain arrays, is measured in the same run and
is what costs are divided by: both read and add as many values. Memory is what ``aggregate_train`` allocates at its
peak beside the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.codecs import Codec, get_codec
from fedcomp.experiments.bench.readpass import BenchError, layered
from fedcomp.flower import asks
from fedcomp.flower._private import acting_as, set_message_id
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.logs import quiet
from fedcomp.flower.payload import FRAME
from fedcomp.layout import Layout, Update
from fedcomp.measuring import Bound, Case, Found, Row, traced
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.wire import SchemaMismatch

TOP: Final = {"id": "topk", "density": 0.01}
CODECS: Final[Mapping[str, dict[str, Any]]] = {
    "identity": {"id": "identity"},
    "top-k 1 %": TOP,
    "top-k 10 %": {**TOP, "density": 0.1},
    "top-k 1 %, q2": {**TOP, "values": "q2"},
    "top-k 1 %, q8": {**TOP, "values": "q8"},
    "STC 1 %": {"id": "stc", "density": 0.01},
    "random-k 1 %": {"id": "randomk", "density": 0.01},
    "scaled sign": {"id": "scaledsign"},
    "TernGrad": {"id": "terngrad"},
    "QSGD(127)": {"id": "qsgd", "levels": 127},
    "QSGD(7)": {"id": "qsgd", "levels": 7},
    "QSGD(1)": {"id": "qsgd", "levels": 1},
    "natural": {"id": "natural"},
    "EDEN, 1 bit": {"id": "eden", "bits": 1},
    "EDEN, 4 bits": {"id": "eden", "bits": 4},
    "rotation + top-k 1 %": {"id": "domain", "transform": {"id": "rotation"}, "codec": TOP},
    "DCT + top-k 1 %": {"id": "domain", "transform": {"id": "dct"}, "codec": TOP},
}
PLAIN: Final = "FedAvg, plain"
COST, PEAK = "ms per client and million values", "peak in models"

ENTROPY_CODED: Final = ("QSGD(127)", "QSGD(7)", "QSGD(1)", "natural", "EDEN, 1 bit", "EDEN, 4 bits")
"""Codecs of dense values whose decoding alone takes longer than what FedAvg does."""

_UPLINK: Final = Key(0, "uplink", 1)


class Nodes:
    """The nodes of a federation, for what strategies ask of a grid."""

    def __init__(self, count: int) -> None:
        self._nodes = list(range(1, count + 1))

    def get_node_ids(self) -> Iterable[int]:
        """Return them."""
        return self._nodes


def cases(quick: bool) -> Iterator[Case]:
    """Yield every codec with 10, 100 and 1000 clients; what is claimed of it follows its last."""
    size, numbers = (20_000, (2, 12)) if quick else (1_000_000, (10, 100, 1000))
    layout = Layout.flat(size)
    updates = [Update(1e-3 * layered(size, seed), layout) for seed in range(min(10, numbers[-1]))]
    few, some, many = numbers[0], numbers[-2], numbers[-1]
    derived = "one pass for each client, whatever their number (derived)"
    buffer = "one buffer of the model's size (derived), and what is kept of each reply"
    goal = "goal of this project; both read and add as many values"
    missed = "goal of this project; decoding entropy codes takes 1.4 ns a value, twice what FedAvg does in all"

    def growth(found: Found, name: str) -> float:
        of, to = (found.of(PEAK, codec=name, clients=clients) for clients in (many, few))
        return float(of - to)

    for name in (PLAIN, *CODECS):
        codec = get_codec(dict(CODECS[name])) if name in CODECS else None
        frames = cache(partial(frames_of, codec, updates, many)) if codec else lambda: None
        for clients in numbers:
            yield Case(f"{name}, {clients} clients", partial(_row, name, codec, frames, updates, clients))
        if codec is None:
            continue
        at, more = ({"codec": name, "clients": clients} for clients in (some, many))
        over, alike = f"{name}: cost of a client over FedAvg's own", f"{name}: cost of a client, {many} clients"
        grown = f"{name}: memory, {many} clients over {few}, in models"
        yield Case(
            bounds=[
                Bound(
                    f"{over}, {some} clients",
                    (COST, at, {**at, "codec": PLAIN}),
                    "<= 3",
                    missed if name in ENTROPY_CODED else goal,
                    gate=name not in ENTROPY_CODED,
                ),
                Bound(f"{alike} over {some}", (COST, more, at), "<= 1.3", derived),
                Bound(grown, partial(growth, name=name), "<= 1", buffer),
            ]
        )


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
    name: str, codec: Codec | None, made: Callable[[], Any], updates: Sequence[Update], clients: int, _: Any
) -> list[Row]:
    size, frames = updates[0].layout.size, made()
    with quiet(), acting_as(1, 0):
        repetitions = 5 if clients <= 10 else 3 if clients <= 100 else 1
        rounds = [aggregated(codec, frames, updates, clients) for _ in range(repetitions)]
        peak = aggregated(codec, frames, updates, clients, memory=True) / (4 * size)
    payload = len(frames[0]) if frames else 4 * size
    cost = 1e9 * median(rounds) / clients / size
    return [{"codec": name, "clients": clients, "bytes of a reply": payload, COST: cost, PEAK: peak}]


def aggregated(
    codec: Codec | None,
    frames: Sequence[bytes] | None,
    updates: Sequence[Update],
    clients: int,
    kind: type[FedAvg] = FedAvg,
    *,
    memory: bool = False,
) -> float:
    """Return the seconds that a new server's ``aggregate_train`` takes on a round; where ``memory``, the bytes it
    allocates at its peak.

    Parameters
    ----------
    codec : Codec, optional
        None for plain FedAvg, which is sent the updates themselves.
    frames : sequence of bytes, optional
        Of :func:`frames_of`.
    kind : type
        Of the strategy inside ``Compressed``.
    """
    inner = kind(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    server: Any = inner if codec is None else Compressed(inner, codec, feedback=False)
    model = ArrayRecord({"w": Array(np.zeros(updates[0].layout.size, np.float32))})
    plain = [ArrayRecord({"w": Array(update.vector)}) for update in updates] if frames is None else []
    replies = []
    for index, message in enumerate(server.configure_train(1, model, ConfigRecord(), Nodes(clients))):
        # Flower's ids are hashes of the content; any name will do to match a reply with what it answers.
        set_message_id(message, f"{index + 1:064x}")
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        if frames is None:
            content["arrays"] = plain[index % len(plain)]
        else:
            head = AnswerHead(index, server.sequence, record="arrays")
            asks.put(content, head, data={FRAME + "values": frames[index % len(frames)]})
        replies.append(Message(content, reply_to=message))
    start = time.thread_time()
    done = traced(lambda: server.aggregate_train(1, replies)) if memory else None
    arrays, _ = done.result if done else server.aggregate_train(1, replies)
    spent = float(done.peak) if done else time.thread_time() - start
    if arrays is None or (codec is not None and server.reports[1].used != clients):
        raise BenchError(f"{codec!r} did not add all updates of {clients} clients")
    return spent
