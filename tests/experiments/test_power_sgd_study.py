"""What stays in PowerSGD's memories."""

from __future__ import annotations

import pytest

from fedcomp.experiments.studies.power_sgd import memory_norms


def test_memories_of_few_rounds_are_measured() -> None:
    found = memory_norms(12)
    assert found["opposite, two-exchange, aggregated"] == pytest.approx(12.0, rel=1e-3)
    assert all(0 < norm < 13 for norm in found.values())
