"""Four counters of bytes, each of them ``len(message)`` of real messages, and none mixed with another."""

from __future__ import annotations

import pytest
from gossip_faults import FAULTS, D, N, learn

from fedcomp.errors import ConfigError
from fedcomp.gossip_simulation import FaultPlan

K = 10
"""Iterations of every run."""


def test_7_17_edge_bytes_are_the_formula_of_the_messages_and_independent_of_the_relay() -> None:
    """Whole float32 models on an undirected ring: both directions of n edges, one message of each sender to both."""
    message = 8 + 4 * D
    clean = learn({"name": "dpsgd"}, "ring", K).traffic
    assert clean.edge["train"].messages == clean.messages == K * 2 * N
    assert clean.edge_bytes == K * 2 * N * message
    assert clean.node_bytes == K * N * message
    assert (clean.up.bytes, clean.down.bytes) == (K * N * message, K * 2 * N * message)
    assert clean.relay_bytes == clean.up.bytes + clean.down.bytes
    faulty = learn({"name": "dpsgd"}, "ring", K, faults=FaultPlan(1, FAULTS), patience=40).traffic
    assert (faulty.edge, faulty.node) == (clean.edge, clean.node)
    assert faulty.up.bytes >= clean.up.bytes
    assert faulty.down.bytes > clean.down.bytes


@pytest.mark.slow
def test_phases_are_counted_apart() -> None:
    faults = FaultPlan(1, {"wiped": 0.03})
    outcome = learn(
        {"name": "sparse-push", "density": 0.25, "gamma": 0.2}, "exponential", 30, skew_rounds=4, faults=faults
    )
    edge = outcome.traffic.edge
    assert edge["dense"].bytes == (8 + 8 + 4 * D) * edge["dense"].messages > 0
    # A whole estimate travels beside the change of it.
    mean = {phase: count.bodies / count.messages for phase, count in edge.items()}
    assert 4 * D < mean["resync"] - mean["train"] + 8 < 4 * D + 16
    assert outcome.traffic.undelivered.messages > 0


def test_energy_is_bits_times_what_a_bit_costs() -> None:
    traffic = learn({"name": "dpsgd"}, "ring", K).traffic
    message = 8 + 4 * D
    sent, received = K * 2 * N * message, K * 2 * N * message
    assert traffic.energy(2.0, 0.5) == 8 * (2.0 * sent + 0.5 * received)
    traffic.undelivered.add(message, 3)
    assert traffic.energy(0.0, 1.0) == 8 * (received - 3 * message)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="joules per bit"):
            traffic.energy(wrong, 0.0)
