"""Bases over messages: what is in which, by its digest; what they add up to: tests/systems."""

from __future__ import annotations

import numpy as np
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import LowRank
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.compressed import Compressed


def test_low_rank_serves_the_drop_in_pair_in_both_directions() -> None:
    """Nothing shared: an uplink in error feedback, and a downlink whose replicas are the server's reference."""
    strategy = Compressed(fedavg(), LowRank(3), downlink=LowRank(5))
    assert strategy.codec == ErrorFeedback(LowRank(3))
    grid = MeteredGrid(InProcessGrid(client_app([compression()]), 3, seed=4), TrafficLedger())
    result = strategy.start(grid, model(), num_rounds=5, timeout=9)
    assert [report.used for report in strategy.reports.values()] == [3] * 5
    assert all(not report.refused and not report.notes for report in strategy.evaluations.values())
    assert np.abs(stack(result.arrays)).max() > 100
