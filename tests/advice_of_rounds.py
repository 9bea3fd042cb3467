"""Advice of coded rounds that shows while they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from advice import INTEGERS, NODES, Row, coded_sum, quiet, row, shares
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from linear_toy import client as device
from linear_toy import model as weights
from linear_toy import uncoded, vector
from toy import model, stack, with_halves

import fedcomp as fc
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import fit

Step = Callable[[int, np.ndarray], np.ndarray]
"""What partition p adds to a tensor."""


def everywhere(partition: int, tensor: np.ndarray) -> np.ndarray:
    return np.full_like(tensor, partition + 1.0)


def in_one_place(partition: int, tensor: np.ndarray) -> np.ndarray:
    return np.where(np.arange(tensor.size).reshape(tensor.shape) == partition, np.float32(8.0), np.float32(0.0))


def by_little(partition: int, tensor: np.ndarray) -> np.ndarray:
    return np.full_like(tensor, 0.25)


def round_of(strategy: Strategy, step: Step = everywhere, *, keeps: bool = False, examples: int = 1, **own: Any) -> Any:
    """Return what a round adds to a model of zeros; raise what the report says of a node that had no part in it.

    Clients add what ``step`` says, weigh p + 1 times ``examples``, and remember it in their state where one ``keeps``.
    """
    app = with_halves([fc.compression()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        out = {name: (tensor + step(partition, tensor)).astype(np.float32) for name, tensor in arrays.items()}
        if keeps:
            context.state["rounds"] = ConfigRecord({"last": 1})
        metrics = MetricRecord({"num-examples": examples * (partition + 1)})
        return Message(RecordDict({"arrays": to_record(out), "metrics": metrics}), reply_to=message)

    with fc.InProcessGrid(app, NODES, seed=4, **own) as grid:
        after = fit(strategy, grid, model(), 1, timeout=9.0).arrays
    report = strategy.reports[1].coded
    told = [*report.excluded.values(), *report.refused, *report.direct.values()]
    if told:
        raise fc.FedcompError("; ".join(told))
    return stack(after)


def added(*found: Any, what: float) -> bool:
    """Whether rounds have added this to every coordinate, to within a quarter of the grid's step."""
    return all(bool(np.allclose(each, what, atol=0.25)) for each in found)


def summed(codec: Any = INTEGERS, **options: Any) -> fc.CodedFedAvg:
    return coded_sum(fc.Compressed(quiet(), codec), **options)


EIGHTH = fc.FixedPoint(fc.RandomK(1.0), clip=128.0, levels=1024)
MORE = fc.FixedPoint(fc.RandomK(1.0), clip=1024.0, levels=8192)
FINE = fc.FixedPoint(fc.RandomK(1.0), clip=1024.0, levels=32767)


def dense_or_fine_or_noisy(**options: Any) -> bool:
    """Whether all nodes take part in a sum that hides what each of them has changed."""
    return (
        added(round_of(summed(**options)), what=3.0)
        and added(*(round_of(summed(codec, **options), by_little) for codec in (EIGHTH, MORE)), what=0.25)
        and np.count_nonzero(round_of(shares(), in_one_place)) > 600
    )


def gradients(**options: Any) -> Any:
    return round_of(fc.CodedFedAvg(quiet(), construction="gradcode", losses=1), **options)


def descent(given: dict[str, Any], **options: Any) -> bool:
    """Whether a step of coded gradient descent with four nodes is that of all rows of two."""
    strategy = fc.CodedLinearGD(code="mds", lr=0.5, **options)
    with fc.InProcessGrid(device(), NODES, seed=4) as grid:
        after = fit(strategy, grid, weights(), 1, train_config=ConfigRecord(given), timeout=9.0).arrays
    return bool(np.abs(vector(after) - uncoded(strategy.plan.partitions, [True])).max() < 1e-10)


ROWS: tuple[Row, ...] = (
    row(
        "raise max_weight if it is given, lower the codec's levels if not, or use weighted=False",
        lambda: round_of(summed(max_weight=2)),
        lambda: (
            added(round_of(summed(max_weight=4)), what=3.0)
            and added(round_of(summed(INTEGERS), examples=3000), what=3.0)
            and added(round_of(summed(FINE, weighted=False), examples=3000), what=2.5)
        ),
    ),
    row("levels), or add noise (DistributedDp)", lambda: round_of(summed(), in_one_place), dense_or_fine_or_noisy),
    row(
        "are asked for. Train dense layers alone, use a finer grid (a smaller clip, more levels), or add",
        lambda: round_of(summed(min_contributors=3), by_little),
        lambda: dense_or_fine_or_noisy(min_contributors=3),
    ),
    row("hold the same partition would disagree", lambda: gradients(keeps=True), lambda: added(gradients(), what=3.0)),
    row(
        "give partitions, or a configuration with clients=N and fewer parities",
        lambda: descent({}, parities=2),
        lambda: descent({}, partitions=2, parities=2) and descent({"clients": NODES}, parities=2),
    ),
)
