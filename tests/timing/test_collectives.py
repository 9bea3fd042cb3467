"""All-reduce times: the classic formulas against a simulated ring, and what a summable code gains."""

from __future__ import annotations

import pytest

from fedcomp.errors import ConfigError
from fedcomp.timing.collectives import Coding, Network

WIRE = {"latency": 50e-6, "per_byte": 8e-10, "add_per_byte": 1e-10}
SIZE = 244e6


def test_the_figures_of_the_example() -> None:
    network = Network(4, **WIRE)
    assert network.ring(SIZE) == pytest.approx(0.311, abs=1e-3)
    assert network.central(SIZE) == pytest.approx(1.659, abs=1e-3)
    wide = Network(16, **WIRE)
    assert wide.central(SIZE) / wide.ring(SIZE) == pytest.approx(17, abs=1)


def test_without_compression_the_summable_ring_is_the_ring() -> None:
    network = Network(4, **WIRE)
    assert network.summable(SIZE, Coding(1.0)) == network.ring(SIZE)
    assert network.hop_by_hop(SIZE, Coding(1.0)) == pytest.approx(network.ring(SIZE))


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_at_the_same_ratio_a_summable_code_gains_more(workers: int) -> None:
    network, coding = Network(workers, **WIRE), Coding(8.0, 1e-10, 1e-10)
    beside = network.summable(SIZE, coding, segments=16)
    assert beside < network.hop_by_hop(SIZE, coding)
    assert beside < network.gathered(SIZE, coding)
    assert network.summable(SIZE, coding, segments=16) < network.summable(SIZE, coding)
    # Latencies are multiplied: overlap does not pay for a short vector.
    assert network.summable(1e4, coding, segments=16) > network.summable(1e4, coding)


def test_compression_that_costs_more_than_it_saves_is_no_gain() -> None:
    network = Network(4, **WIRE)
    assert network.summable(SIZE, Coding(8.0, 1e-8, 1e-8), segments=16) > network.ring(SIZE)


def test_what_is_refused() -> None:
    for wrong in (
        lambda: Coding(0.5),
        lambda: Coding(2.0, float("nan")),
        lambda: Network(2).ring(-1.0),
        lambda: Network(2).summable(1.0, Coding(1.0), segments=0),
    ):
        with pytest.raises(ConfigError):
            wrong()
