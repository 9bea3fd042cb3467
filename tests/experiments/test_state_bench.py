"""The benchmark of state folders: rows of what it does, ratios to plain writes, no times."""

from __future__ import annotations

import pytest

from fedcomp.experiments.bench import state


@pytest.mark.slow
def test_a_quick_run_has_a_row_for_each_call_and_a_goal() -> None:
    said: list[str] = []
    found = state.run(quick=True, progress=said.append)
    assert [row["what"] for row in found["rows"]] == ["save", "load", "look at the head", "write and flush"]
    assert {row["state in MB"] for row in found["rows"]} == {state.SIZES[0] / 1e6}
    assert found["rows"][-1]["times write and flush"] == 1.0
    (goal,) = found["claims"]
    assert goal.value == found["rows"][0]["times write and flush"]
    assert not goal.gate
    assert len(said) == 1
