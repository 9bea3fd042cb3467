"""What stays in PowerSGD's memories."""

from __future__ import annotations

import pytest

from fedcomp.experiments.studies.power_sgd import memory_norms


def test_memories_of_few_rounds_are_measured() -> None:
    found = memory_norms(12)
    assert found["rounds"][-1] == 12
    assert found["ratios"]["opposite, two-exchange, aggregated"][-1] == pytest.approx(12.0, rel=1e-3)
    assert all(0 < series[-1] < 13 for series in found["ratios"].values())
