"""A wide perceptron on digits, trained over slow links: seconds, accuracy, and bytes by ledger and by interface.

The training needs no torch: a node imports it for every message otherwise, which would hide the links. One training is
one deployment in namespaces of its own (:mod:`fedcomp.experiments.links`), so that nothing late of another is on them;
the same training in this process, bit for bit, chooses the step size and says how many rounds there are.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from fedcomp.clients.compressed import compression
from fedcomp.clients.messages import partition_of
from fedcomp.experiments.delayed import Weights, accuracy, gradient, perceptron
from fedcomp.experiments.links import COUNTED, HUB, SlowLinks, counted, projected
from fedcomp.files import write
from fedcomp.flower._private import build_bundle
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import RoundOutcome, fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.tasks.partition import iid
from fedcomp.tasks.sources import LabelledExamples, held_out, load

APP: Final = Path(__file__).resolve().parent / "slow_app"
"""The Flower app that is bundled for the nodes: a few lines."""

NODES: Final = 2
NAMES: Final = ("first", "bias", "second", "offset")
BATCH: Final = 32
FILE: Final = "slow.json"


def _compressed(up: Mapping[str, Any], **more: Any) -> Callable[[Strategy], Strategy]:
    return partial(Compressed, codec=dict(up), **more)


_EDEN: Final = {"id": "eden", "bits": 1, "scale": "least"}

ROWS: Final[Mapping[str, Callable[[Strategy], Strategy]]] = {
    "FedAvg": lambda inner: inner,
    "top-k up": _compressed({"id": "topk", "density": 0.01}),
    "top-k both ways": _compressed({"id": "topk", "density": 0.01}, downlink={"id": "topk", "density": 0.02}),
    "EDEN both ways": _compressed(_EDEN, downlink=_EDEN),
    "EDEN, first model at nodes": _compressed(_EDEN, downlink=_EDEN, first_model_at_nodes=True),
}
"""What travels: from a strategy to the one with its codecs. All but the last send the first model whole."""


def first_model(msg: Message, context: Context) -> ArrayRecord:
    """Return the first model of the training that a message belongs to."""
    config = msg.content.config_records["config"]
    return begin(*(int(str(config[name])) for name in ("seed", "hidden")))


def begin(seed: int, hidden: int) -> ArrayRecord:
    """Return the model that a training begins with, at the server and at the nodes."""
    weights = perceptron(seed, (64, hidden, 10))
    return ArrayRecord({name: Array(each) for name, each in zip(NAMES, weights, strict=True)})


client = ClientApp(mods=[compression(first_model=first_model)])
server = ServerApp()


@cache
def examples(tuning: bool) -> tuple[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]:
    """Return what is trained on and what is tested on: pixels and classes each."""
    found, _ = load("digits")
    assert isinstance(found, LabelledExamples)
    x, y = found.x_train, found.y_train
    if not tuning:
        return (x, y), (found.x_test, found.y_test)
    out = held_out(y)
    return (x[~out], y[~out]), (x[out], y[out])


@client.train()
def train(msg: Message, context: Context) -> Message:
    """Take a few steps of gradient descent on this node's half of the digits."""
    (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records["config"]
    seed, number, steps = (int(str(config[key])) for key in ("seed", "server-round", "steps"))
    partition, tuning, rate = partition_of(context), bool(config["tuning"]), float(str(config["rate"]))
    mine = np.flatnonzero(iid(len(examples(tuning)[0][1]), NODES, Key(seed, "slow/split")) == partition)
    found = descended(record, mine, rate, steps, Key(seed, "slow/batch", number, partition), tuning=tuning)
    arrays = ArrayRecord({each: Array(value) for each, value in found.items()})
    metrics = MetricRecord({"num-examples": len(mine)})
    return Message(RecordDict({name: arrays, "metrics": metrics}), reply_to=msg)


def descended(
    model: ArrayRecord, mine: NDArray[Any], rate: float, steps: int, key: Key, *, tuning: bool = False
) -> dict[str, NDArray[Any]]:
    """Return a model after steps of gradient descent, each with a batch of the examples ``mine``."""
    x, y = examples(tuning)[0]
    weights: Weights = [model[each].numpy().copy() for each in NAMES]
    for step in range(steps):
        rows = mine[key.at(layer=step).generator().integers(0, len(mine), BATCH)]
        with np.errstate(all="ignore"):
            for value, change in zip(weights, gradient(weights, x[rows], y[rows]), strict=True):
                value -= np.float32(rate) * change
    return dict(zip(NAMES, weights, strict=True))


class Over(Exception):
    """Ends a training at its target, and a deployment whose time limit is over."""


def trained(asked: Mapping[str, Any], grid: Grid, finished: Callable[[float, MeteredGrid], object]) -> None:
    """Train over ``grid``.

    Parameters
    ----------
    asked : mapping
        ``row``, a key of :data:`ROWS`; ``hidden``, units of the hidden layer, 300 bytes each; ``rate``, the clients'
        step size, and ``steps`` of a client per round; ``seed``; ``rounds``; ``target``, the accuracy in percent that
        ends it; ``tuning``, whether accuracy is that on a validation split, which nobody trains on then (default no).
    finished : callable
        Is told the accuracy after each round, in percent of the test or validation split.
    """
    asked = {"tuning": False, **asked}
    metered, (x, y) = MeteredGrid(grid), examples(asked["tuning"])[1]
    inner = FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0)
    told = ConfigRecord({name: asked[name] for name in ("seed", "hidden", "rate", "steps", "tuning")})

    def note(number: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
        # A round without replies keeps the model and reaches nothing.
        reached = float("nan")
        if outcome.arrays is not None:
            reached = accuracy([arrays[name].numpy() for name in NAMES], x, y)
        finished(reached, metered)
        if reached >= asked["target"]:
            raise Over

    start, strategy = begin(asked["seed"], asked["hidden"]), ROWS[asked["row"]](inner)
    with contextlib.suppress(Over):
        fit(strategy, metered, start, asked["rounds"], timeout=None, train_config=told, on_round=note)


def here(**asked: Any) -> dict[str, Any]:
    """Train in this process as :func:`trained`; return accuracies by round as ``line``, and ``needed``: rounds to the
    target, infinity for never."""
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet

    line: list[float] = []
    with quiet(), InProcessGrid(client, NODES, seed=asked["seed"]) as grid:
        trained(asked, grid, lambda reached, _: line.append(reached))
    reached = bool(line) and line[-1] >= asked["target"]
    return {"line": line, "needed": len(line) if reached else float("inf")}


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the row of the file that the run configuration names; write down each round as it ends."""
    asked = json.loads(Path(str(context.run_config["asked"])).read_text(encoding="utf-8"))
    while len(list(grid.get_node_ids())) < NODES:
        time.sleep(0.2)
    out, began = Path(asked["out"]), time.time()
    found: dict[str, Any] = {"began": began, "line": []}

    def keep() -> None:
        # Whoever reads it while it is written must find a whole one.
        write(out, json.dumps(found).encode(), mode=0o666)

    def finished(reached: float, metered: MeteredGrid) -> None:
        up, down = (metered.ledger.total("wire", direction=way) for way in ("up", "down"))
        found["line"].append([time.time() - began, reached])
        found.update(up=up, down=down, messages=metered.ledger.total("messages", direction="up"))
        found["interface"] = crossed(asked["hub"], asked["before"])
        keep()

    keep()
    trained(asked["training"], grid, finished)


def linked(
    training: Mapping[str, Any],
    *,
    rate: float,
    down: float | None,
    limit: float,
    settings: Mapping[str, str] | None,
    needed: float | None = None,
    idle: float = 0.0,
) -> dict[str, Any]:
    """Train over links of ``rate`` bits per second; return what was seen until the target, or until the limit.

    Parameters
    ----------
    training : mapping
        See :func:`trained`.
    down : float, optional
        Bits per second to the nodes, where that is another rate.
    limit : float
        Seconds from the begin of the first round.
    settings : mapping of str to str, optional
        Environment of server app and nodes, for the link; None for Flower's own nodes with nothing set.
    needed : float, optional
        Rounds that the training needs: it is ended as soon as its pace shows that they end after the limit.
    idle : float
        Seconds to watch the nodes before they have anything to do.

    Returns
    -------
    dict
        ``line`` of (seconds, accuracy) by round; ``seconds`` in all; ``up``, ``down`` of the ledger in bytes and the
        ``messages`` up, of finished rounds; what the interfaces counted of all nodes, see :func:`crossed`: ``quiet`` in
        the idle time, ``interface`` from there to the end of the last finished round, ``everything`` to the very end;
        ``bundle`` bytes; ``error``, empty at the target alone; of Flower's own nodes it may say that one has ended.
    """
    from fedcomp.experiments.engines.linked import LinkedDeployment
    from fedcomp.experiments.engines.processes import DeploymentError

    with (
        SlowLinks(NODES, rate, down=down) as links,
        LinkedDeployment(links, settings=settings, preload=None if settings is None else ()) as deployment,
    ):
        out = deployment.home("out") / FILE
        file = deployment.folder / "asked.json"
        hub = links.name(HUB)
        first = crossed(hub)
        time.sleep(idle)
        quiet, before = crossed(hub, first), crossed(hub)
        asked = {"training": training, "out": str(out), "hub": hub, "before": before}
        file.write_text(json.dumps(asked), encoding="utf-8")

        def watch() -> None:
            found = read(out)
            hopeless = needed is not None and projected(found["line"], needed) > limit
            if hopeless or (found["began"] and time.time() - found["began"] > limit):
                raise Over

        error = ""
        try:
            log = deployment.run_app({"asked": str(file)}, limit=limit + 300.0, project=APP, watch=watch)
            if deployment.runs()[0]["status"] != "finished:completed":
                raise DeploymentError(f"the server app failed; it said last:\n{log[-3000:]}")
        except Over:
            error = f"not in {limit:g} s"
        except DeploymentError as failed:
            # What becomes of Flower's own nodes on such a link is what was asked; ours have to bear it.
            if settings is not None or not read(out)["began"]:
                raise
            error = str(failed).partition(";")[0]
        found = read(out)
        seconds = time.time() - found["began"] if error else found["line"][-1][0]
        # NaN as well: a last round without replies.
        if not error and not found["line"][-1][1] >= training["target"]:
            error = f"not after all {len(found['line'])} rounds"
        return {
            **found,
            "seconds": seconds,
            "everything": crossed(hub, before),
            "quiet": quiet,
            # Each node is sent it once.
            "bundle": NODES * len(build_bundle(APP)),
            "error": error,
        }


def crossed(hub: str, before: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return what crossed the links of all nodes of a server's namespace since ``before``, by :data:`COUNTED`."""
    found = counted(hub).values()
    return {name: sum(each[name] for each in found) - (before or {}).get(name, 0) for name in COUNTED}


def read(out: Path) -> dict[str, Any]:
    """Return what the server app has written so far."""
    nothing: dict[str, Any] = {"began": 0.0, "line": [], "up": 0, "down": 0, "messages": 0}
    nothing["interface"] = dict.fromkeys(COUNTED, 0)
    return {**nothing, **json.loads(out.read_text(encoding="utf-8"))} if out.exists() else nothing
