"""The benchmark of what rounds cost beside updates: rows of two ways each, goals that fail nothing, no times."""

from __future__ import annotations

import pytest

from fedcomp import heap
from fedcomp.experiments.bench import upkeep


@pytest.mark.slow
def test_a_quick_run_has_both_ways_of_all_three() -> None:
    said: list[str] = []
    found = upkeep.run(quick=True, progress=said.append)
    kinds = ["step", "checkpoint", "checkpoint", *(["arrays"] if heap.is_glibc() else [])]
    assert [row["what"] for row in found["rows"]] == kinds
    assert len(said) == len(kinds)
    assert all(row["ratio"] > 0 for row in found["rows"])
    (step,) = (row for row in found["rows"] if row["what"] == "step")
    assert step["peak in models"] < step["run on it, peak"]
    assert not any(claim.gate for claim in found["claims"])
