"""A small linear problem with a client for it, for tests of coded gradient descent over messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import with_halves

from fedcomp.clients.coded.linear import linear_device
from fedcomp.clients.compressed import compression
from fedcomp.coding.checked import checked_bytes
from fedcomp.coding.stream import SplitMix64
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD, put_frame
from fedcomp.strategies.coded.linear import CodedLinearGD
from fedcomp.systems.coded.linear import PHASE1, PHASE2, LinearRows

__all__ = ["PHASE1", "PHASE2"]

SETUP = "train"
FEATURES = 5


def data(partition: int, loss: str = "logistic") -> LinearRows:
    stream = SplitMix64(100 + partition)
    m = 12 + partition % 3
    x = stream.normal(m * FEATURES).reshape(m, FEATURES)
    score = x @ np.arange(1.0, FEATURES + 1) + stream.normal(m)
    return LinearRows(x, score if loss == "squares" else (score > 0).astype(float), loss)


def client(loss: str = "logistic") -> ClientApp:
    def rows(msg: Message, context: Context, partitions: int) -> LinearRows:
        return data(int(context.node_config["partition-id"]), loss)

    return with_halves([linear_device(rows), compression()])


def model() -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.zeros((1, FEATURES), np.float32)), "bias": Array(np.zeros(1, np.float32))})


def vector(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def metered(nodes: int, *, fault=None, app: Callable | None = None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(app or client(), nodes, seed=4, fault=fault, **options), TrafficLedger())


def uncoded(partitions: int, moves: list[bool], loss: str = "logistic", lr: float = 0.5, l2: float = 0.0) -> np.ndarray:
    """Gradient descent on all rows at once; one entry of ``moves`` per round, False where the round was skipped."""
    parts = [data(j, loss) for j in range(partitions)]
    x = np.concatenate([np.c_[p.x, np.ones(len(p.x))] for p in parts])
    y = np.concatenate([p.y for p in parts])
    w = np.zeros(FEATURES + 1)
    for moved in moves:
        z = x @ w
        if loss == "logistic":
            slope = 1 / (1 + np.exp(-z)) - y
        elif loss == "squares":
            slope = z - y
        else:
            slope = np.where((2 * y - 1) * z < 1, 1 - 2 * y, 0)
        if moved:
            w = w - lr * (x.T @ slope / len(y) + l2 * np.r_[w[:-1], 0.0])
    return w


def run(strategy: CodedLinearGD, grid: MeteredGrid, rounds: int = 10):
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9)


def moves(strategy: CodedLinearGD) -> list[bool]:
    return [not report.skipped for report in strategy.reports.sections("linear").values()]


def tampered(action: str, partition: int, change: Callable[[Message], None]) -> Callable:
    """A client whose replies to one kind of message are changed."""
    honest = client()

    def call(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if msg.metadata.message_type == action and context.node_config["partition-id"] == partition:
            change(reply)
        return reply

    return call


def frame(reply: Message, name: str) -> bytes:
    """Return a frame of an answer, nothing where there is none."""
    return bytes(asks.data_in(reply.content, FRAME).get(name, b""))


def set_frame(reply: Message, name: str, data: bytes) -> None:
    """Replace a frame of an answer, where there is one."""
    config = reply.content.config_records[NODE_RECORD]
    if FRAME + name in config:
        config[FRAME + name] = data
    elif frame(reply, name):
        put_frame(reply.content, FRAME + name, data)


def with_vector(name: str, values: np.ndarray, dtype: str = "float64") -> Callable[[Message], None]:
    return lambda reply: set_frame(reply, name, checked_bytes(values, dtype))


def set_words(**entries) -> Callable[[Message], None]:
    """Replace what an answer says, where it says such a thing."""

    def change(reply: Message) -> None:
        config = reply.content.config_records[NODE_RECORD]
        config.update({asks.SAY + k: v for k, v in entries.items() if asks.SAY + k in config})

    return change


ROWS = 14
