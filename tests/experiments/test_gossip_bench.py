"""The benchmark of decentralised runs, with its smallest sizes."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.bench import BENCHMARKS, gossip
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.central import SimulationSettings, simulate
from fedcomp.gossip.topology import topology_of
from fedcomp.layout import Layout


@pytest.mark.slow
def test_the_quick_benchmark_measures_runs_messages_and_the_protocol() -> None:
    said: list[str] = []
    result = gossip.run(quick=True, progress=said.append)
    runs = [row for row in result["rows"] if "algorithm" in row]
    assert {(row["graph"], row["nodes"], row["edges"]) for row in runs} == {
        ("exponential", 4, 8),
        ("exponential", 8, 24),
        ("ring", 4, 8),
        ("ring", 8, 16),
    }
    assert {row["gradient"] for row in runs} == {"synthetic", "torch"}
    assert all(row["us_per_edge"] > 1.0 for row in runs)
    sizes = {row["compressor"].split("(")[0]: row["bytes"] for row in result["rows"] if "compressor" in row}
    assert sizes["Identity"] == 4 * gossip.SIZE
    assert 32 * sizes["ScaledSign"] < 1.1 * sizes["Identity"]
    assert any("protocol" in row for row in result["rows"])
    assert not any(claim.gate for claim in result["claims"]), "figures of the smallest sizes say nothing"
    assert len(said) == len(result["rows"])
    assert BENCHMARKS["gossip"][0] == gossip.__name__


def test_the_time_of_an_iteration_leaves_out_the_first_and_no_other() -> None:
    clock = gossip.RoundClock()
    simulate(
        get_algorithm({"name": "sgp"}),
        topology_of("ring", 3),
        None,
        np.zeros(4),
        3,
        layout=Layout.flat(4),
        seed=0,
        settings=SimulationSettings(before=clock),
    )
    assert len(clock.ticks) == 4, "one before each iteration, and one before the round that only delivers"
    clock.ticks[:] = [0.0, 50.0, 51.0, 54.0]
    assert clock.median == 2.0
