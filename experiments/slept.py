"""Least squares in a real deployment with sleeping clients: wall-clock time saved by overlapping exchanges.

Each SuperNode runs one message at a time, in a process of its own; the server works, too, for a while each round. The
problem is small and needs no torch, so that what costs time is the sleeping, and Flower itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp.clients.compressed import compression
from fedcomp.clients.messages import partition_of
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.overlap import Buffered, Overlap, Overlapping, PipelinedStrategy
from fedcomp.timing.pipeline import log_normal

APP: Final = Path(__file__).resolve().parent / "slept_app"
"""The Flower app that is bundled for the nodes: a few lines."""

SIZE: Final = 20
RATE: Final = 0.3
EXAMPLES: Final = 40
FILE: Final = "slept.json"

client = ClientApp(mods=[compression()])
server = ServerApp()


def problem(seed: int, partition: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a client's matrix of shape (EXAMPLES, SIZE), and its right-hand side."""
    truth = Key(seed, "slept/truth").generator().standard_normal(SIZE)
    drawn = Key(seed, "slept/client", partition=partition).generator()
    matrix = drawn.standard_normal((EXAMPLES, SIZE)) / np.sqrt(EXAMPLES)
    right = matrix @ truth + 0.05 * drawn.standard_normal(EXAMPLES)
    return matrix.astype(np.float32), right.astype(np.float32)


def loss(weights: NDArray[np.float32], seed: int, nodes: int) -> float:
    """Return the mean squared residual over all clients."""
    parts = [problem(seed, partition) for partition in range(nodes)]
    return float(np.mean([np.mean((matrix @ weights - right) ** 2) for matrix, right in parts]))


@client.train()
def train(msg: Message, context: Context) -> Message:
    """Sleep, then take one step of gradient descent."""
    (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records["config"]
    seed, number = (int(str(config[name])) for name in ("seed", "server-round"))
    partition = partition_of(context)
    # The pace of a client, and how it varies from message to message.
    pace = log_normal(float(str(config["sleep"])), float(str(config["variation"])), 64, Key(seed, "slept/pace"))
    jitter = log_normal(1.0, 0.2, 1, Key(seed, "slept/jitter", number, partition))
    time.sleep(float(pace[partition] * jitter[0]))
    weights, (matrix, right) = record["w"].numpy(), problem(seed, partition)
    moved = weights - np.float32(RATE) * (matrix.T @ (matrix @ weights - right))
    metrics = MetricRecord({"num-examples": EXAMPLES})
    return Message(RecordDict({name: ArrayRecord({"w": Array(moved)}), "metrics": metrics}), reply_to=msg)


def build(kind: str, options: Mapping[str, Any]) -> Overlapping:
    """Return a strategy by its name, with options; "quantile" is that of an adaptive deadline."""
    inner = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    given = dict(options)
    if kind == "buffered":
        return Buffered(inner, **given)
    quantile = given.pop("quantile", None)
    deadline = None if quantile is None else Deadline(quantile, slack=1.2)
    return PipelinedStrategy(inner, deadline=deadline, **given)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rows of the file that the run configuration names, one after the other; write what they came to."""
    asked = json.loads(Path(str(context.run_config["asked"])).read_text(encoding="utf-8"))
    metered = MeteredGrid(grid)
    while len(list(metered.get_node_ids())) < asked["nodes"]:
        time.sleep(0.2)
    found = {}
    for name, row in asked["rows"].items():
        found[name] = _trained(metered, row, asked)
        Path(asked["out"]).joinpath(FILE).write_text(json.dumps(found), encoding="utf-8")


def _trained(grid: Grid, row: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    strategy = build(row["kind"], row["options"])
    seed, nodes = int(asked["seed"]), int(asked["nodes"])
    began, line = time.monotonic(), []

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        line.append((time.monotonic() - began, loss(arrays["w"].numpy(), seed, nodes)))
        if number:
            time.sleep(float(asked["work"]))

    config = ConfigRecord({"seed": seed, "sleep": float(asked["sleep"]), "variation": float(asked["variation"])})
    start = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    result = fit(strategy, grid, start, int(row["rounds"]), train_config=config, evaluate_fn=evaluate)
    reports = [strategy.reports[r] for r in sorted(strategy.reports)]
    return {
        "seconds": time.monotonic() - began,
        "line": [*line, (time.monotonic() - began, loss(result.arrays["w"].numpy(), seed, nodes))],
        "weights": result.arrays["w"].numpy().astype(float).tolist(),
        "steps": strategy.steps,
        # Of the first step nobody knows how long it took since the one before.
        "idle": float(np.mean([report.section(Overlap).idle for report in reports[1:]])),
        "period": float(np.mean([report.section(Overlap).period for report in reports[1:]])),
        "used": sum(report.used for report in reports),
        "late": sum(report.section(Overlap).late + report.lost for report in reports),
    }


def recursion(seed: int, nodes: Sequence[int], rounds: int, width: int) -> NDArray[np.float64]:
    """Return the weights of training in one process with updates that are ``width - 1`` steps old.

    ``nodes`` are partitions in the order in which they join the cohorts, which take turns.
    """
    weights, sent = np.zeros(SIZE), list[NDArray[np.float64]]()
    parts = [problem(seed, partition) for partition in nodes]

    def step(number: int) -> NDArray[np.float64]:
        at, members = sent[number], parts[number % width :: width]
        gradients = [m.T.astype(float) @ (m.astype(float) @ at - r) for m, r in members]
        return RATE * np.mean(gradients, axis=0)

    for number in range(rounds + width - 1):
        if number < rounds:
            sent.append(weights)
        if number >= width - 1:
            weights = weights - step(number - width + 1)
    return weights


def deployed(
    rows: Mapping[str, Mapping[str, Any]],
    *,
    nodes: int,
    seed: int,
    sleep: float,
    variation: float,
    work: float,
    limit: float = 280.0,
) -> dict[str, dict[str, Any]]:
    """Return what rows come to in one deployment on loopback, by name.

    Parameters
    ----------
    rows : mapping of str to mapping
        "kind" and "options" as of :func:`build`, and "rounds".
    sleep, variation : float
        Mean seconds that clients sleep, and its coefficient of variation over clients.
    work : float
        Seconds that the server works in each round.
    limit : float
        Seconds after which it is given up.

    Raises
    ------
    DeploymentError
        When it does not come to its end.
    """
    from fedcomp.experiments.engines.superlink import Deployment

    with Deployment(nodes) as deployment:
        out = deployment.home("out")
        asked = {"rows": rows, "nodes": nodes, "seed": seed, "sleep": sleep, "variation": variation, "work": work}
        file = deployment.folder / "asked.json"
        file.write_text(json.dumps({**asked, "out": str(out)}), encoding="utf-8")
        deployment.run_app({"asked": str(file)}, limit=limit, project=APP)
        found: dict[str, dict[str, Any]] = json.loads((out / FILE).read_text(encoding="utf-8"))
        return found


def seconds_below(line: Sequence[Sequence[float]], target: float) -> float:
    """Return when the loss is first at ``target`` or below; infinity when never."""
    return next((float(second) for second, value in line if value <= target), float("inf"))
