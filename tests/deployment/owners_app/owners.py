"""Four owners of one graph: both apps, and a server that waits for the test at the turning points."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.client import client as around
from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.flower.metered import MeteredGrid, partition_lookup
from fedcomp.flower.payload import models
from fedcomp.flower.rounds import RoundOutcome, fit
from fedcomp.graphs.adjacency import FullStructure, normalised
from fedcomp.graphs.base import GraphPart
from fedcomp.rng import Key
from fedcomp.strategies.gcn.strategy import RoundSettings, SamplerSettings, SkewedGCN

OWNERS, NODES, FEATURES, CLASSES, LAST = 4, 40, 6, 3, 5
VICTIM, LEARNERS = 3, (0, 1)
KILLED_AFTER, BACK_AFTER = 2, 4
"""Rounds after which the victim is killed, and after which it is restarted."""

TIMEOUT = 300.0
"""Seconds for each wait. The first exchange counts the start of a process on each node, which on a busy machine takes
most of a minute; no exchange of this run waits for a node that does not answer (:class:`Told`)."""


@functools.cache
def part(index: int) -> GraphPart:
    """Return what an owner has: ten nodes each of a random graph, and of no other node the features."""
    ends = (Key(2, "owners/edges").uniform(240) * NODES).astype(np.int64).reshape(2, 120)
    adjacency = normalised(ends[0], ends[1], NODES)
    owner = (np.arange(NODES) // (NODES // OWNERS)).astype(np.int32)
    ids = np.flatnonzero(owner == index).astype(np.int64)
    features = Key(2, "owners/features", partition=index).uniform(len(ids) * FEATURES).reshape(len(ids), FEATURES)
    return GraphPart(
        index=index,
        parts=OWNERS,
        ids=ids,
        features=features.astype(np.float32),
        labels=ids % CLASSES,
        train=ids[:8],
        test=ids[8:],
        structure=FullStructure(adjacency, owner),
        digest="forty nodes",
        boundary=ids,
    )


def part_of(message: Message, context: Context) -> GraphPart:
    return part(int(context.node_config["partition-id"]))


def learner(message: Message, context: Context) -> Learner:
    import torch
    from torch.nn.functional import cross_entropy

    from fedcomp.graphs.layers import GraphConvolutions

    ((name, record),) = models(message.content).items()
    with torch.device("meta"):
        made = GraphConvolutions(FEATURES, 5, CLASSES)
    made.load_state_dict({key: torch.from_numpy(array.numpy()) for key, array in record.items()}, assign=True)
    made.requires_grad_()
    return Learner(name, made, cross_entropy, lambda outputs, labels: outputs.argmax(1) == labels, {"lr": 0.5})


client = around(ClientApp(), graph_owner(part_of, learner))


def initial() -> ArrayRecord:
    shapes = {"0.weight": (5, FEATURES), "0.bias": (5,), "1.weight": (CLASSES, 5), "1.bias": (CLASSES,)}
    values = {name: Key(2, name).uniform(int(np.prod(shape))).reshape(shape) - 0.5 for name, shape in shapes.items()}
    return ArrayRecord({f"layers.{name}": Array(value.astype(np.float32)) for name, value in values.items()})


class SomeLearn(FedAvg):
    """Lets two of the owners learn, once it is known who is who; the others hand out their rows, and load no torch."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        known = partition_lookup(grid) if server_round > 1 else lambda node: None
        messages = list(super().configure_train(server_round, arrays, config, grid))
        return [m for m in messages if known(m.metadata.dst_node_id) in LEARNERS]


def strategy() -> SkewedGCN:
    inner = SomeLearn(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    return SkewedGCN(inner, SamplerSettings(n=200), rounds=RoundSettings(batch_size=0, timeout=TIMEOUT), seed=2)


class Told(MeteredGrid):
    """Does not wait for a node of which it knows that it cannot answer; no deadline would be right on every machine.

    When the SuperLink has missed that node for a while it answers in its place, with an error. That does not count as
    one of the replies that are waited for, and is not passed on: whether it comes in a round depends on the machine.
    """

    missing = 0

    def send_and_receive(self, messages, *, timeout=None, enough=None):
        batch = list(messages)
        others = [message for message in batch if message.metadata.dst_node_id != self.missing]
        if len(others) == len(batch):
            return super().send_and_receive(batch, timeout=timeout, enough=enough)

        def answers(replies):
            # A message has its id only when it was pushed.
            ids = {message.metadata.message_id for message in others}
            return [reply for reply in replies if reply.metadata.reply_to_message_id in ids]

        def complete(replies):
            return len(answers(replies)) == len(others)

        limit = timeout if others else 0.5
        return answers(super().send_and_receive(batch, timeout=limit, enough=complete))


def reported(of: SkewedGCN) -> dict[str, Any]:
    """Return what each round came to, as it is read from a file."""
    return json.loads(json.dumps({number: report.gcn.to_json() for number, report in of.reports.items()}))


def wait_for(path: Path, limit: float = TIMEOUT) -> None:
    end = time.monotonic() + limit
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody made {path}")
        time.sleep(0.05)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["out"]))
    metered, of = Told(grid), strategy()
    while len(list(metered.get_node_ids())) < OWNERS:
        time.sleep(0.05)

    def after(server_round: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
        (folder / f"round-{server_round}").touch()
        if server_round in (KILLED_AFTER, BACK_AFTER):
            wait_for(folder / f"go-on-{server_round}")
        if server_round == KILLED_AFTER:
            metered.missing = next(n for n in metered.get_node_ids() if metered.partition_of(n) == VICTIM)
        if server_round == BACK_AFTER:
            # The new process is another node to the SuperLink; the dead one is listed as online for a while.
            while not set(metered.get_node_ids()) - known:
                time.sleep(0.05)

    known = set(metered.get_node_ids())
    result = fit(of, metered, initial(), LAST, timeout=TIMEOUT, train_config=ConfigRecord({"seed": 2}), on_round=after)
    np.savez(folder / "arrays.npz", allow_pickle=False, **{name: a.numpy() for name, a in result.arrays.items()})
    (folder / "facts.partial").write_text(json.dumps(reported(of)))
    (folder / "facts.partial").rename(folder / "facts.json")
