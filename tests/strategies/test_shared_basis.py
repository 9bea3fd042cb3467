"""Bases over messages: what is in which, by its digest; what they add up to: tests/systems."""

from __future__ import annotations

import numpy as np
from toy import client_app, fedavg, model, stack
from waiting_runs import Sent

from fedcomp.clients.compressed import compression
from fedcomp.codecs import GradiVeQ, LowRank, PowerSGD
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.server import Server


def sent(strategy: Server, rounds: int) -> Sent:
    """Run a strategy, and return what was in its messages."""
    grid = Sent(MeteredGrid(InProcessGrid(client_app([compression()]), 3, seed=4), TrafficLedger()))
    strategy.start(grid, model(), num_rounds=rounds, timeout=9)
    assert [report.used for report in strategy.reports.values()] == [3] * rounds
    return grid


def test_one_exchange_is_enough_and_no_basis_travels_where_steps_do() -> None:
    """The alternating form: from round 2 on a message holds one step, and a reply one frame of factors."""
    messages = sent(SharedBasis(PowerSGD(2)), 5).messages
    assert [(number, kind) for number, kind, _, _ in messages] == [(n, "train") for n in range(1, 6) for _ in range(3)]
    for number, _, _, keys in messages:
        # The basis of the first round was drawn, and comes once with the step that is in it.
        assert keys == (
            {"arrays"} if number == 1 else {f"fedcomp.step.{number}"} | ({"blob"} if number == 2 else set())
        )


def test_two_exchanges_send_a_basis_to_each_and_probe_first() -> None:
    messages = sent(SharedBasis(PowerSGD(2, form="two-exchange")), 4).messages
    assert sum(kind == "query" for _, kind, _, _ in messages) == 3 * 4
    for number, kind, _, keys in messages:
        # A step of a basis that the node has just sent in does not bring it again.
        step = {f"fedcomp.step.{number}"} if number > 1 else {"arrays"}
        assert keys == (step if kind == "train" else {"blob"})


def test_a_fitted_basis_travels_once_to_each_node() -> None:
    strategy = FittedBasis(GradiVeQ(width=47, loss=0.3), sampling=4, compression=3)
    assert sent(strategy, 7).holding("blob") == [(5, "train")] * 3


def test_low_rank_serves_the_drop_in_pair_in_both_directions() -> None:
    """Nothing shared: an uplink in error feedback, and a downlink whose replicas are the server's reference."""
    strategy = Compressed(fedavg(), LowRank(3), downlink=LowRank(5))
    assert strategy.codec == ErrorFeedback(LowRank(3))
    grid = MeteredGrid(InProcessGrid(client_app([compression()]), 3, seed=4), TrafficLedger())
    result = strategy.start(grid, model(), num_rounds=5, timeout=9)
    assert [report.used for report in strategy.reports.values()] == [3] * 5
    assert all(not report.refused and not report.notes for report in strategy.evaluations.values())
    assert np.abs(stack(result.arrays)).max() > 100
