"""Part of the experiment ``flare``: rounds between nodes with sensors, some of which see new data halfway.

Every node holds a part of the digits, and a sensor below it infers with the model that the node deployed. All rows are
the same apps; what differs is whether nodes may be quiet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.client import client
from fedcomp.clients.conditional import Sensors, conditional
from fedcomp.codecs import TopK
from fedcomp.drift.edge import Deployments, Edge, SensorEndpoint, local_link
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import SensorSettings, Upload
from fedcomp.drift.statistics import confidence
from fedcomp.experiments.drifting import TICK, joined, loaded, logits, noisy
from fedcomp.experiments.findings import mean
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import models, put_node, round_of
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional, Quietness
from fedcomp.tasks import arrays as torch_arrays
from fedcomp.tasks import get_task
from fedcomp.tasks.base import ClientData, Split

NODES: Final = 4
DRIFTED: Final = 1
"""How many of them see something new."""

WINDOW: Final = 50
TICKS: Final = 5
"""Ticks of every sensor between two rounds."""

ROWS: Final[Mapping[str, str]] = {
    "every round": "all nodes train in every round",
    "every second round": "the same, in half of the rounds: about as many updates as conditional, by the clock alone",
    "conditional, asked first": "nodes say in a few bytes whether they have something to send",
    "conditional, with the model": "nodes are sent the model, and may answer that there is nothing",
}
"""What each row does."""


@dataclass
class WatchedNode:
    """A node's data, and the sensor below it."""

    partition: int
    seed: int
    train: list[Split]
    held: list[Split]
    pool: Split
    new: list[Split] = field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = torch_arrays.to_arrays(the_task().model(0))
        self.edge = Edge(Deployments(shapes, TopK(density=0.1), window=WINDOW, seed=self.seed))
        self.here, there = local_link()
        self.sensor = SensorEndpoint(
            self.partition, shapes, there, codec=TopK(density=0.1), settings=SensorSettings(WINDOW)
        )
        self.rng = Key(self.seed, "flare/node", partition=self.partition).generator()

    def tick(self, drifted: bool, number: int) -> None:
        """Let the sensor infer for a while, where it has a model."""
        self.sensor.heartbeat()
        self.edge.serve(self.here)
        self.sensor.update()
        if not self.sensor.sensor.version:
            return
        model = loaded(the_task(), self.sensor.arrays)
        for tick in range(TICKS):
            rows = self.rng.integers(len(self.pool), size=TICK)
            x, y = self.pool.x[rows], self.pool.y[rows]
            if drifted:
                x, y = noisy(x, y, Key(self.seed, "flare/seen", number, self.partition, tick))
            self.sensor.observe(logits(the_task(), model, x), x, y)
        self.edge.serve(self.here)

    def absorb(self, windows: Sequence[Upload]) -> None:
        """Take windows: every second example is trained on, the others are held out."""
        for window in windows:
            for place, parts in ((0, self.train), (1, self.held)):
                part = Split(window.samples[place::2], window.labels[place::2])
                # In equal parts with what was there: it is what there will be from now on.
                parts.append(part)
            self.new.append(Split(window.samples[1::2], window.labels[1::2]))

    def measure(self, arrays: Mapping[str, Any]) -> Any:
        """Return confidences on held-out data, those of what is new where there is such; None while it is too little.

        What is new replaces what was: the sensor sees the former kind no more.
        """
        held = joined(self.new or self.held)
        return None if len(held) < 2 * WINDOW else confidence(logits(the_task(), loaded(the_task(), arrays), held.x))


def the_task() -> Any:
    """Return the task."""
    return get_task("digits", hidden="64")


def nodes_of(seed: int) -> list[WatchedNode]:
    """Return the nodes: half of a node's examples to train, 3 tenths held out, and 2 tenths that its sensor sees."""
    out = []
    for partition in range(NODES):
        data = the_task().client(partition, NODES)
        order = Key(seed, "flare/node/split", partition=partition).uniform(len(data)).argsort()
        ends = [0, len(data) // 2, len(data) * 4 // 5, len(data)]
        first, second, third = (Split(data.x[order[a:b]], data.y[order[a:b]]) for a, b in itertools.pairwise(ends))
        out.append(WatchedNode(partition, seed, [first], [second], third))
    return out


def app_of(nodes: Sequence[WatchedNode], seed: int) -> ClientApp:
    """Return the app of all rows."""
    app = ClientApp()

    def node(context: Context) -> WatchedNode:
        return nodes[int(context.node_config["partition-id"])]

    def received(msg: Message) -> tuple[str, Any]:
        name, record = next(iter(models(msg.content).items()))
        return name, loaded(the_task(), to_arrays(record))

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        own, (name, model) = node(context), received(msg)
        data = joined(own.train)
        key = Key(seed, "flare/rounds", round_of(msg) or 0, own.partition)
        shard = ClientData(data.x, data.y, own.partition, NODES)
        the_task().train(model, shard, lr=0.1, epochs=1, batch_size=32, key=key)
        metrics = MetricRecord({"num-examples": len(data)})
        reply = RecordDict({name: to_record(torch_arrays.to_arrays(model)), "metrics": metrics})
        put_node(reply, own.partition)
        return Message(reply, reply_to=msg)

    def watch(msg: Message, context: Context) -> float:
        return float(the_task().evaluate(received(msg)[1], joined(node(context).held))["loss"])

    sensors = Sensors(
        lambda context: node(context).edge,
        lambda msg, context, arrays: node(context).measure(arrays),
        lambda msg, context, windows: node(context).absorb(windows),
    )
    settings = ScheduleSettings(window=4, low=0.03, patience=0)
    return client(app, conditional(watch, sensors=sensors, settings=settings), only=["compression"])


def run(row: str, seed: int, *, rounds: int, drift: int) -> dict[str, Any]:
    """Return bytes of a run of some rounds, of which ``drift`` is the first after the drift, and where it led."""
    every = 2 if "second" in row else 1
    nodes = nodes_of(seed)
    inner = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    strategy = Conditional(
        Compressed(inner, TopK(density=0.1), seed=seed),
        max_skip=20 if row.startswith("conditional") else 0,
        query="first" in row,
    )
    judged = the_task().test
    odd = Split(*noisy(judged.x, judged.y, Key(seed, "flare/judged")))
    after: list[float] = []

    def between(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        for step in range(every):
            now = (number - 1) * every + step + 1
            for node in nodes:
                node.tick(node.partition < DRIFTED and now >= drift, now)
            if now >= drift:
                # What each of the nodes' sensors meets, with the model of the rounds.
                model = loaded(the_task(), to_arrays(arrays))
                usual, new = (the_task().evaluate(model, data)["accuracy"] for data in (judged, odd))
                after.append(100 * (DRIFTED * new + (NODES - DRIFTED) * usual) / NODES)

    with InProcessGrid(app_of(nodes, seed), NODES, seed=seed) as inside:
        grid = MeteredGrid(inside)
        start = to_record(torch_arrays.to_arrays(the_task().model(seed)))
        fit(strategy, grid, start, rounds // every, on_round=between, train_config=ConfigRecord())
        up, down = (grid.ledger.total("wire", direction=way) for way in ("up", "down"))
    said = [report.section(Quietness) for report in strategy.reports.values()]
    quiet = sum(len(each.quiet) for each in said)
    return {
        "up": up,
        "down": down,
        "quiet": quiet / (NODES * len(said)),
        "updates": sum(report.used for report in strategy.reports.values()),
        "accuracy": mean(after),
        "last": mean(after[-10:]),
        "sensor_bytes": sum(node.here.traffic.sent + node.here.traffic.received for node in nodes),
        "deployed": sum(node.edge.deployments.version for node in nodes),
    }
