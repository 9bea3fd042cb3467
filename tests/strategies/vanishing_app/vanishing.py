"""A federation one of whose clients may vanish after it has shared: both apps, and what both engines run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.client import client as around
from fedcomp.clients.half import ClientHalf
from fedcomp.codecs import QSGD
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

SHAPES = {"weight": (300, 40), "bias": (40,)}


def linger(msg, ctx, call_next):
    """Stand outside of the half: its shards are with the others before this node is seen to do nothing more."""
    reply = call_next(msg, ctx)
    if msg.metadata.message_type == "train" and ctx.node_config["partition-id"] == ctx.run_config.get("lingers", -1):
        time.sleep(600)
    return reply


client = around(ClientApp(), only=["compression", ClientHalf("linger", linger, outside=("compression",))])


@client.train()
def train(msg: Message, ctx: Context) -> Message:
    partition = int(ctx.node_config["partition-id"])
    stream = np.random.default_rng(partition)
    name, model = next(iter(msg.content.array_records.items()))
    moved = {
        key: Array(array.numpy() + stream.standard_normal(array.shape).astype(np.float32))
        for key, array in model.items()
    }
    metrics = MetricRecord({"num-examples": 10 + 7 * partition, "loss": 1.0 / (1 + partition)})
    return Message(RecordDict({name: ArrayRecord(moved), "metrics": metrics}), reply_to=msg)


def initial() -> ArrayRecord:
    stream = np.random.default_rng(99)
    return ArrayRecord({key: Array(stream.standard_normal(shape).astype(np.float32)) for key, shape in SHAPES.items()})


def uncoded(clients: int) -> Compressed:
    """Return the strategy that the coded one stands around."""
    return Compressed(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=clients), QSGD(levels=127))


def save(folder: Path, arrays: ArrayRecord, **facts: object) -> None:
    np.savez(folder / "arrays.npz", allow_pickle=False, **{key: array.numpy() for key, array in arrays.items()})
    (folder / "facts.partial").write_text(json.dumps(facts))
    (folder / "facts.partial").rename(folder / "facts.json")


class Told(MeteredGrid):
    """Closes the training exchange when one reply is missing and a file says that it will not come.

    A share timeout would do it as well, but no length of it is right on every machine.
    """

    def __init__(self, inner: Grid, gone: Path) -> None:
        super().__init__(inner)
        self.gone = gone

    def send_and_receive(self, messages, *, timeout=None, enough=None):
        batch = list(messages)
        training = any(message.metadata.message_type == "train" for message in batch)
        missing = set(self.push_messages(batch))
        replies: list[Message] = []
        end = time.monotonic() + timeout
        while missing and time.monotonic() < end and not (training and len(missing) == 1 and self.gone.exists()):
            arrived = self.pull_messages(missing)
            replies += arrived
            missing -= {reply.metadata.reply_to_message_id for reply in arrived}
            time.sleep(0.1)
        return replies


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CodedFedAvg(
        uncoded(int(config["clients"])),
        code="rlnc",
        symbols=int(config["symbols"]),
        transport=str(config["transport"]),
        # Nobody waits for them, and each counts the start of the processes that answer it.
        share_timeout=300.0,
        collect_timeout=300.0,
    )
    metered = Told(grid, Path(str(config["out"])) / "gone")
    result = strategy.start(metered, initial(), num_rounds=1)
    partitions = {str(node): metered.partition_of(node) for node in strategy.reports[1].coded.included}
    save(
        Path(str(config["out"])),
        result.arrays,
        coded=strategy.reports[1].coded.to_json(),
        included=[partitions[str(node)] for node in strategy.reports[1].coded.included],
        peer={str(k): v for k, v in metered.ledger.by("node", "wire", link="peer").items()},
        hub=metered.ledger.total("wire", direction="up", link="hub"),
    )
