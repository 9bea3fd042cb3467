"""Nothing is lost where exchanges overlap: what clients made is delivered or owed, exactly, on integer vectors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from test_conservation import Sum, residual
from toy import client_app, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.buffered import Buffered
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlapping import Overlap, Overlapping
from fedcomp.strategies.pipelined import PipelinedStrategy

NODES, ROUNDS = 8, 120
FAULTS = {"lost_reply": 0.08, "duplicate": 0.08, "late": 0.08, "raise": 0.08, "silent": 0.04, "corrupt": 0.02}

STRATEGIES: dict[str, Callable[[Compressed], Overlapping]] = {
    "width 1": lambda inner: PipelinedStrategy(inner, 1, timeout=20.0),
    "width 2": lambda inner: PipelinedStrategy(inner, 2, timeout=20.0),
    "width 4": lambda inner: PipelinedStrategy(inner, 4, timeout=20.0, warmup_rounds=5),
    "buffered": lambda inner: Buffered(inner, 4, 3, timeout=20.0, max_staleness=2, weight="constant"),
}


@pytest.mark.slow
@pytest.mark.parametrize("downlink", [None, TopK(density=0.3)], ids=["plain", "downlink"])
@pytest.mark.parametrize(
    "name", ["width 2", "buffered", *(pytest.param(f"width {width}", marks=pytest.mark.long) for width in (1, 4))]
)
def test_updates_made_are_delivered_or_owed(name: str, downlink: TopK | None) -> None:
    """Clients of very unlike pace, 40 % of messages with a fault, memories wiped at random."""

    def pace(delivery: Delivery) -> float:
        draw = Key(17, "pace", delivery.exchange, delivery.partition).generator()
        return float((1 + delivery.partition) * draw.exponential())

    inner = Sum()
    strategy = STRATEGIES[name](Compressed(inner, TopK(density=0.05), downlink))
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    owed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    plan = RandomFaults(Key(11, "faults"), FAULTS, pushes=3)  # type: ignore[arg-type]
    app = client_app([compression()])
    with InProcessGrid(app, NODES, seed=5, fault=plan, compute_seconds=pace) as grid:
        nodes = list(grid.get_node_ids())

        def settle(node: int) -> None:
            context = grid.context(node)
            partition = int(context.node_config["partition-id"])
            if "toy.sum" in context.state:
                made[partition] += context.state.array_records["toy.sum"]["sum"].numpy()
            if node in strategy.inner.reception.peers:
                owed[partition] += residual(context, strategy.inner, node)

        def wipe(number: int, arrays: ArrayRecord, _: Any) -> None:
            for node in nodes:
                busy = node in strategy.busy
                if not busy and Key(13, "wipe", number, node % 1000).uniform(1)[0] < 0.02:
                    settle(node)
                    grid.wipe(node)

        end = fit(strategy, MeteredGrid(grid), model(), ROUNDS, on_round=wipe).arrays
        for node in nodes:
            settle(node)
    reports = strategy.reports.values()
    assert sum(report.used for report in reports) > ROUNDS
    assert sum(len(report.refused) for report in reports) > 10
    assert sum(len(report.rolled_back) for report in reports) > 10
    assert sum(report.lost for report in reports) + sum(r.section(Overlap).late for r in reports) > 10
    for p in range(NODES):
        np.testing.assert_array_equal(inner.delivered[p] + owed[p], made[p])
    if downlink is None:
        np.testing.assert_array_equal(stack(end), sum(inner.delivered.values()))
