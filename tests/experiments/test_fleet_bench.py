"""The benchmark of a fleet: a small one for real."""

from __future__ import annotations

import pytest

from fedcomp.experiments.bench import fleet
from fedcomp.measuring import run

pytestmark = pytest.mark.engines


@pytest.mark.long
def test_a_small_fleet_trains() -> None:
    found = run(fleet.cases(True), quick=True)
    assert [claim.name for claim in found.claims if not claim.ok] == []
    assert all(claim.gate for claim in found.claims)
    (row,) = found.rows
    assert (row["nodes"], row["rounds"], row["replies"]) == (3, 2, 6)
    assert min(row["first round, s"], row["a later round, s"]) > 0.0
    assert row["CPU s a node and round"] > 0.05
    assert row["memory of a node, MB (PSS)"] > 50.0
    assert row["KB up a node and round"] > 1.0
