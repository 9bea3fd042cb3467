"""Advice of what rounds, nodes, sensors and states are made of."""

from __future__ import annotations

import functools
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from advice import ALL, KEY, LAYOUT, VALUES, Row, ended, quiet, row, trains
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedXgbCyclic
from round_paths import Personal
from toy import client_app, model, stack

import fedcomp as fc
from fedcomp.clients import app as generic
from fedcomp.clients import kept, memory
from fedcomp.clients.edge import STATE_FOLDER, prepare
from fedcomp.clients.private.mod import private
from fedcomp.clients.sensors import SensorServer, StoredEdge, connect
from fedcomp.codecs.base import padded as equally_long
from fedcomp.drift.distance import QuantileSketch, calibrated, ks_distance
from fedcomp.drift.edge import Deployments
from fedcomp.drift.messages import Says, SensorMessage
from fedcomp.drift.statistics import confidence, cross_entropy
from fedcomp.flower import folder, store
from fedcomp.flower.checkpoint import capture_strategy, renumber_strategy, restore_strategy
from fedcomp.flower.folder import StateFolder
from fedcomp.flower.rounds import drive_many
from fedcomp.flower.vanishing import VanishingGrid
from fedcomp.kernels import tiers
from fedcomp.kernels.bins import adaptive_step
from fedcomp.layout import Layout, Update
from fedcomp.strategies.server import Server
from fedcomp.systems.pair import Pair
from fedcomp.timing.dropout import Compute, Presence
from fedcomp.timing.links import Link, simulated_seconds

NODES = 3
LINKS = [Link(1e6, 1e6)] * NODES


def context(**node: Any) -> Context:
    return Context(1, 2, node, RecordDict(), {})


def of_task(name: str) -> tuple[Any, Context]:
    """Return a message for one of two nodes about a task, of which nothing but its content is read, and a context."""
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"clients": 2, "task": name})})
    return SimpleNamespace(content=content), context(**{"partition-id": 0, "num-partitions": 2})


def teachers(task: str) -> bool:
    asked: Any = SimpleNamespace(teachers=3, lr=0.1, decay=0.5, batch=8, seed=0)
    return bool((generic.teachers(*of_task(task), asked).teachers.sizes > 0).all())


class Unmeasured(fc.TopK):
    """A codec of somebody's own, that does not say how long its frames can get."""

    def longest(self, layout: Layout) -> None:  # type: ignore[override]
        return None


def padded(codec: Any) -> bool:
    """Whether frames of two updates of which one is nearly empty are equally long."""
    sparse = np.zeros_like(VALUES)
    sparse[0] = 1.0
    frames = [codec.encode(Update(values, LAYOUT), codec.init(LAYOUT), KEY)[0] for values in (VALUES, sparse)]
    return len({len(equally_long(frame, codec, LAYOUT, KEY)) for frame in frames}) == 1


def unpadded() -> bool:
    promise = {"population": 4, "delta": 1e-3, "insecure_deterministic": True, "noise_multiplier": 0.5}
    strategy = fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, pad=False, **promise), Unmeasured(0.1), feedback=False)
    return trains(strategy, (fc.compression, private))


def listening(path: Path, name: str, *, removed: bool = False) -> bool:
    """Whether a sensor reaches an edge where the socket of a process that is gone was left."""
    path.mkdir()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path / "left"))
    if removed:
        (path / "left").unlink()
    server = SensorServer(StoredEdge(path / "edge"), f"unix:{path / name}")
    server.start()
    try:
        connect(f"unix:{path / name}").close()
    finally:
        server.close()
    return True


START = {"w": np.zeros((60, 40), np.float32)}


def deploys(path: Path, deployments: Deployments | None = None) -> bool:
    """Whether another process serves what this one deploys."""
    StoredEdge(path, deployments).deploy(START, lambda deployed: np.linspace(0.5, 1.0, 100))
    return StoredEdge(path).version == 1


def answers(codec: Any, path: Path | None = None, free: int = 0) -> bool:
    """Whether nodes take part in a program whose states hold the toy's model once and a half, beside the last reply;
    those with a state folder at ``path`` on a disk with ``free`` bytes left, 0 for as many as there are."""
    node = {} if path is None else {STATE_FOLDER: str(path)}
    usage = shutil.disk_usage(Path(__file__).parent)
    disk = patch.object(folder.shutil, "disk_usage", lambda _: usage._replace(free=free or usage.free))
    with patch.object(memory, "MOST_BYTES", 9_600), patch.object(kept, "MOST_BYTES", 9_600), disk:
        return trains(Server(Pair(codec), quiet()), node_config=node)


def content(server_round: int = 1) -> RecordDict:
    return RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": server_round})})


def addressed(*shares: slice) -> bool:
    """Whether rounds that go on together, each with its share of four nodes, hear all that they ask."""

    def heard(nodes: list[int]) -> Any:
        replies = yield [Message(content(), node, "train") for node in nodes]
        return len(replies)

    with fc.InProcessGrid(client_app(), 4) as grid:
        nodes = sorted(grid.get_node_ids())
        return drive_many([heard(nodes[share]) for share in shares], grid) == [2, 2]


def joined(links: Any, partition: int = NODES) -> bool:
    """Whether a node of one partition more joins, and answers."""
    with fc.InProcessGrid(client_app(), NODES, links=links) as grid:
        node = grid.add_node(partition)
        return len(list(grid.send_and_receive([Message(content(), node, "train")]))) == 1


def vanishing(how: str) -> bool:
    """Whether three devices that stay answer."""
    always = Presence(((0.0, math.inf),))
    with fc.InProcessGrid(client_app(), NODES) as devices:
        grid = VanishingGrid(
            devices, lambda *_: always, Compute(1.0), server=LINKS[0], peer=LINKS[0], deadlines=(50.0, 100.0)
        )
        grid.round = 1
        batch = [Message(content(), node, "train") for node in grid.get_node_ids()]
        if how == "send_and_receive":
            return len(grid.send_and_receive(batch)) == NODES
        asked = list((devices if how == "inside" else grid).push_messages(batch))
        return len(list(devices.pull_messages(asked))) == NODES


def handled(action: str) -> bool:
    """Whether a handler of the app is asked by its name, beside a half that has one."""
    app = client_app([fc.ClientHalf("taken", handlers={"query.taken": print})])

    @app.query(action)
    def own(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"own": 1})}), reply_to=msg)

    with fc.InProcessGrid(app, 1) as grid:
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content(), node, f"query.{action}")])
    return reply.content["metrics"]["own"] == 1


class Counting(FedAvg):
    """A server that keeps something since it was started."""

    def begin(self) -> None:
        self.seen = 3


class Made(Counting):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = 0


class Said(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def resumed(kind: Any) -> bool:
    """Whether what was kept is there in a strategy that was built anew."""
    first, second = kind(**ALL), kind(**ALL)
    first.begin()
    restore_strategy(second, capture_strategy(first))
    return second.seen == 3


def locked(path: Path, *, ended: bool = False, other: str = "state") -> bool:
    """Whether a node uses its state folder beside another process, which has ended or goes on."""
    first, second = StateFolder(path / "state", 0), StateFolder(path / other, 0)
    with patch.object(folder, "LOCK_SECONDS", 0.0), first.locked():
        if not ended:
            with second.locked():
                return True
    with second.locked():
        return True


def without_locks(path: Path, *words: str) -> bool:
    """Whether what a node is told lets it answer on a system that has no file locks."""
    with patch.dict(sys.modules, {"fcntl": None}):
        command, _ = prepare(["--superlink", "a.b:9092", "--partition", "0", "--of", "1", "--insecure", *words])
        if "state-dir=" in command[-1]:
            StateFolder(path, 0)
        return trains(fc.Compressed(quiet(), fc.TopK(0.1)))


def stored(newer: bool) -> bool:
    with patch.object(store, "VERSION", store.VERSION + 1):
        data = store.dumps({"x": 3}, "test")
        if not newer:
            return store.loads(data, "test") == {"x": 3}
    return store.loads(data, "test") == {"x": 3}


def late() -> None:
    """Go offline where Flower was imported before, with telemetry on."""
    from fedcomp.flower.offline import go_offline

    unset = {name: value for name, value in os.environ.items() if name != "FLWR_TELEMETRY_ENABLED"}
    imported = SimpleNamespace(FLWR_TELEMETRY_ENABLED="1")
    with patch.dict(os.environ, unset, clear=True), patch.dict(sys.modules, {"flwr.supercore.telemetry": imported}):
        go_offline()


def silent(first: str, **variables: str) -> bool:
    """Whether Flower's telemetry is off, and nothing is warned of, in a process that does something ``first``."""
    code = f"{first}; import flwr.supercore.telemetry as t; from fedcomp.flower.offline import go_offline; go_offline()"
    env = {name: value for name, value in os.environ.items() if name != "FLWR_TELEMETRY_ENABLED"} | variables
    words = [sys.executable, "-c", f"{code}; print(t.FLWR_TELEMETRY_ENABLED)"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split() == ["0"] and "OfflineWarning" not in done.stderr


def worn_out() -> None:
    """Take up a run that was restarted as often as can be."""
    strategy = fc.Compressed(quiet(), fc.TopK(0.1))
    strategy.sequence = (2**31 - 1) << 32
    renumber_strategy(strategy)


ROW = {"round": 1, "node": 7, "direction": "up", "wire": 1000, "message_type": "train"}


def numba(tier: Any) -> bool:
    """Whether a tier works where numba's compiler is off."""
    tiers.has_numba.cache_clear()
    try:
        with patch.dict(os.environ, {"NUMBA_DISABLE_JIT": "1"}):
            residue = np.zeros(100, np.float32)
            return adaptive_step(residue, VALUES[:100], 10, 2.0, tier=tier).indices.size > 0
    finally:
        tiers.has_numba.cache_clear()


def stepped(out: Any) -> bool:
    """Whether what is sent and what stays are the sum, where the new residue goes to ``out``, or into the update."""
    update = VALUES[:100].copy()
    step = adaptive_step(np.zeros(100, np.float32), update, 10, 2.0, out=update if out is None else out)
    sent = np.zeros(100, np.float32)
    sent[step.indices] = np.where(step.negative, -step.scale, step.scale)
    return np.allclose(step.residue + sent, VALUES[:100], atol=1e-6)


def point(frozen: bool, msg: Message, context: Context) -> Any:
    """Return how far the message's model is from ones; a second tensor may be one that is not trained."""
    import torch

    from fedcomp.forward.evaluate import Objective

    module = torch.nn.Module()
    for name, array in msg.content["arrays"].items():
        trained = not (frozen and name == "bias")
        module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array.numpy().copy()), trained))
    module.forward = lambda: torch.cat([p.reshape(-1) for p in module.parameters()])  # type: ignore[method-assign]
    return Objective(module, lambda own: (own() - 1.0).square().sum(), 1)


def slopes(*, names: Any = ("weight", "bias"), directions: int = 8, frozen: bool = False, **options: Any) -> bool:
    """Whether forward gradients bring a model nearer to the ones that it is to become."""
    strategy = fc.ForwardGradients(quiet(), directions, lr=0.5, **options)
    start = ArrayRecord({name: array for name, array in model().items() if name in names})
    app = fc.client(ClientApp(), fc.forward_gradients(functools.partial(point, frozen)))
    with fc.InProcessGrid(app, 2, seed=4) as grid:
        end = stack(strategy.start(grid, start, num_rounds=3).arrays)
    return 0.0 < np.square(end - 1.0).sum() < end.size


def piped(inner: Any, nodes: int = 4, **options: Any) -> bool:
    """Whether a pipe applies what was learnt in four rounds; when it waits for more nodes, one joins."""
    strategy = fc.PipelinedStrategy(inner, **options)
    with (
        fc.InProcessGrid(client_app([fc.compression()]), nodes, seed=3) as grid,
        patch("flwr.serverapp.strategy.strategy_utils.sleep", lambda seconds: grid.add_node(nodes)),
    ):
        after = stack(strategy.start(grid, model(), num_rounds=4).arrays)
    return bool(np.abs(after).max() > 0) and all(strategy.reports[number].used for number in (1, 2, 3, 4))


def grown() -> bool:
    """Whether each client in turn has added to what the former one sent."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        (held,) = (array.numpy() for array in msg.content["arrays"].values())
        more = np.append(held, np.uint8(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord([more]), "metrics": metrics}), reply_to=msg)

    strategy = FedXgbCyclic(fraction_evaluate=0.0)
    with fc.InProcessGrid(app, 2) as grid:
        start = ArrayRecord([np.zeros(0, np.uint8)])
        (end,) = (array.numpy() for array in strategy.start(grid, start, num_rounds=2).arrays.values())
    return sorted(end.tolist()) == [0, 1]


CLIENTS: tuple[Row, ...] = (
    row("use one such as 'digits-generator'", lambda: teachers("digits"), lambda: teachers("digits-generator")),
    row(
        "has no graph, so clients have no rows to exchange; use one such as 'digits-graph'",
        lambda: generic.graph_part(*of_task("digits")),
        lambda: generic.graph_part(*of_task("digits-graph")).features.size > 0,
    ),
    row(
        "use another codec, or pad=False", lambda: padded(Unmeasured(0.1)), lambda: padded(fc.TopK(0.1)) and unpadded()
    ),
    Row(
        "choose a free port or path, and remove the socket of a process that is gone",
        lambda path: listening(path / "a", "left"),
        lambda path: listening(path / "a", "free") and listening(path / "b", "left", removed=True),
    ),
    Row("pass deployments=Deployments(model)", deploys, lambda path: deploys(path, Deployments(START, window=20))),
)


SENSORS: tuple[Row, ...] = (
    row(
        "has no distance; leave out what cannot be measured, or count it as drift",
        lambda: ks_distance([1.0, math.nan], [1.0, 2.0]),
        lambda: ks_distance([1.0], [1.0]) == 0.0 and QuantileSketch.of([1.0, 2.0]).distance([1.0, math.nan]) == 1.0,
    ),
    row(
        "too few for windows of {}: give at least {}, or make the window smaller",
        lambda: calibrated(np.arange(39.0), 20, KEY, splits=2),
        lambda: (
            calibrated(np.arange(40.0), 20, KEY, splits=2) > 0 and calibrated(np.arange(39.0), 19, KEY, splits=2) > 0
        ),
    ),
    row(
        "which is unknown here; run the same release on both",
        lambda: SensorMessage.from_bytes(SensorMessage(3, 1, Says.RESYNC).to_bytes()[:-1] + b"\x63"),
        lambda: SensorMessage.from_bytes(SensorMessage(3, 1, Says.RESYNC).to_bytes()).says is Says.RESYNC,
    ),
    row(
        "statistic='loss' needs labels, and there are none; use 'confidence'",
        lambda: cross_entropy([[0.0, 0.0]]),
        lambda: confidence([[0.0, 0.0]]).tolist() == [0.5],
    ),
)


def tracked(around: Any) -> bool:
    records: list[Any] = []
    with fc.InProcessGrid(client_app(), 2) as engine:
        grid, strategy = around(engine), quiet()
        strategy.start(grid, model(), num_rounds=1, evaluate_fn=fc.track(strategy, grid, records.append))
    return records[0]["uplink_wire_bytes"] > 0


FLOWER: tuple[Row, ...] = (
    row(
        "counts no bytes; make grid = fc.MeteredGrid(grid) and start with it",
        lambda: tracked(lambda engine: engine),
        lambda: tracked(fc.MeteredGrid),
    ),
    row("a half of client(); give the app's handler another name", lambda: handled("taken"), lambda: handled("mine")),
    row(
        "Set what should be restored in the constructor, or give the strategy state_dict() and load_state_dict()",
        lambda: resumed(Counting),
        lambda: resumed(Made) and resumed(Said),
    ),
    Row("node without --state-dir and --home", lambda path: without_locks(path, "--home", str(path)), without_locks),
    Row("each node a folder of its own", locked, lambda path: locked(path, ended=True) and locked(path, other="own")),
    row("reads up to {}; use the release that wrote it", lambda: stored(newer=True), lambda: stored(newer=False)),
    row(
        "none for partitions {}; pass more, or a mapping",
        lambda: joined(LINKS),
        lambda: joined([*LINKS, LINKS[0]]) and joined(dict(enumerate(LINKS))),
    ),
    row(
        "Call go_offline() before the first import of flwr, or start the process with FLWR_TELEMETRY_ENABLED=0",
        late,
        lambda: (
            silent("from fedcomp.flower import offline; offline.go_offline()")
            and silent("import flwr", FLWR_TELEMETRY_ENABLED="0")
        ),
        long=True,
    ),
    row(
        "in the same exchange; give every node to one of them",
        lambda: addressed(slice(0, 2), slice(1, 3)),
        lambda: addressed(slice(0, 2), slice(2, 4)),
    ),
    Row(
        "give the node a state-dir, use memory='float16' where the codec has it, or a codec without memory, EDEN() or "
        "QSGD()",
        lambda _: answers(fc.ErrorFeedback(fc.TopK(0.01))),
        lambda path: (
            answers(fc.ErrorFeedback(fc.TopK(0.01)), path / "state")
            and answers(fc.ErrorFeedback(fc.TopK(0.01), memory="float16"))
            and answers(fc.EDEN())
            and answers(fc.QSGD())
        ),
    ),
    Row(
        "disk has room for {}; free more, or use a codec without memory, EDEN() or QSGD()",
        lambda path: answers(fc.ErrorFeedback(fc.TopK(0.01)), path / "state", 9_600),
        lambda path: (
            answers(fc.ErrorFeedback(fc.TopK(0.01)), path / "state", 30_000)
            and answers(fc.EDEN(), path / "eden", 20_000)
            and answers(fc.QSGD(), path / "qsgd", 20_000)
        ),
    ),
    row(
        "grid inside this one", lambda: vanishing("push"), lambda: vanishing("send_and_receive") and vanishing("inside")
    ),
)


PARTS: tuple[Row, ...] = (
    row("still needs; give another array", lambda: stepped(None), lambda: stepped(np.empty(100, np.float32))),
    row("NUMBA_DISABLE_JIT); use 'auto' or 'numpy'", lambda: numba("numba"), lambda: numba("auto") and numba("numpy")),
    row(
        "are used up after {} restarts; start a new run", worn_out, lambda: trains(fc.Compressed(quiet(), fc.TopK(0.1)))
    ),
    row(
        "has no link; give one Link or a link per node",
        lambda: simulated_seconds([ROW], {1: LINKS[0]}),
        lambda: simulated_seconds([ROW], LINKS[0]) == simulated_seconds([ROW], {7: LINKS[0]}) == 0.008,
    ),
)


STRATEGIES: tuple[Row, ...] = (
    row(
        "write app = fc.client(app, fc.forward_gradients(...))",
        lambda: ended(fc.ForwardGradients(quiet(), 8, lr=0.5), rounds=1),
        slopes,
    ),
    row(
        "only the trained ones", lambda: slopes(frozen=True), lambda: slopes(frozen=True, names=("weight",)), long=True
    ),
    row(
        "with the others. Use a codec without votes",
        lambda: ended(fc.Compressed(Personal(**ALL), fc.SignSGD(step=0.1))),
        lambda: trains(fc.Compressed(Personal(**ALL), fc.QSGD())),
    ),
    row(
        "take fewer directions, or another codec: at this size top-k sends more of the gradient in as many bytes",
        lambda: slopes(most_signs=10_000),
        lambda: slopes(most_signs=10_000, directions=4) and trains(fc.Compressed(quiet(), fc.TopK(0.1))),
        long=True,
    ),
    row(
        "every cohort needs that many: start more nodes, or lower its ",
        lambda: piped(quiet(min_train_nodes=2), 3),
        lambda: piped(quiet(min_train_nodes=2), 4) and piped(quiet(min_train_nodes=1, min_available_nodes=1), 3),
    ),
    row("which cannot be compressed or added; run it without {}", lambda: fc.Compressed(FedXgbCyclic()), grown),
)


ROWS: tuple[Row, ...] = (*CLIENTS, *SENSORS, *FLOWER, *PARTS, *STRATEGIES)
