"""A compressed run that is interrupted and resumed gives the bits of one that was not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvgM
from toy import client_app, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, TopK
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def build(inner, codec, downlink):
    faults = RandomFaults(Key(3, "resume"), {"lost_reply": 0.2, "raise": 0.1})
    grid = MeteredGrid(InProcessGrid(client_app([compression()]), 4, seed=3, fault=faults), TrafficLedger())
    return Compressed(inner(), codec, downlink), grid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "codec", "downlink"),
    [
        (lambda: FedAdam(**ONE), TopK(density=0.02), TopK(density=0.05)),
        (lambda: FedAvgM(server_momentum=0.9, **ONE), QSGD(levels=4), None),
    ],
    ids=["adam+downlink", "momentum"],
)
def test_resumed_equals_uninterrupted(tmp_path: Path, inner, codec, downlink) -> None:
    strategy, grid = build(inner, codec, downlink)
    whole = fit(strategy, grid, model(), 8, timeout=9)

    path = tmp_path / "run.ckpt"
    strategy_a, grid_a = build(inner, codec, downlink)

    def keep(server_round, arrays, outcome) -> None:
        if server_round == 4:
            checkpoint.save(path, server_round=4, arrays=arrays, strategy=strategy_a, grid=grid_a)

    fit(strategy_a, grid_a, model(), 4, timeout=9, on_round=keep)

    strategy_b, grid_b = build(inner, codec, downlink)
    held = checkpoint.load(path)
    held.apply(strategy_b, grid_b)
    resumed = fit(strategy_b, grid_b, held.arrays, 8, start_round=5, timeout=9)
    np.testing.assert_array_equal(stack(resumed.arrays), stack(whole.arrays))
    assert strategy_b.reports == strategy.reports
    assert grid_b.ledger.total("wire") == grid.ledger.total("wire")
