"""The benchmark of the device tier: it compares bytes on any machine, and times only where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcomp.experiments.bench import device as bench
from fedcomp.kernels import device as tier
from fedcomp.measuring import Found, run

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "QUICK", 30_011)


def found() -> Found:
    return run(bench.cases(True), quick=True)


@pytest.mark.slow
def test_bytes_are_compared_and_times_are_not_claimed_without_a_gpu() -> None:
    result = found()
    compared = [row for row in result.rows if "differ" in row]
    assert [(row["values"], row["differ"]) for row in compared] == [("float32", 0), ("q2", 0)]
    assert all(0 < row["bytes"] < 4 * row["n"] for row in compared)
    assert {row["method"] for row in result.rows if "method" in row} == {bench.COPY, bench.THERE, bench.HERE}
    assert [claim.ok for claim in result.claims] == [True, True, None]
    assert [claim.gate for claim in result.claims] == [True, True, False]
    assert result.claims[-1].skipped == "torch sees no CUDA device"


@pytest.mark.slow
def test_a_tier_that_changes_one_value_of_the_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tier.feedback_step

    def changes(*args: Any) -> Any:
        indices, values, memory, smallest = own(*args)
        memory[np.setdiff1d(np.arange(memory.size), indices)[:1]] = 1e-30
        return indices, values, memory, smallest

    monkeypatch.setattr(tier, "feedback_step", changes)
    assert [claim.ok for claim in found().claims][:2] == [False, False]


def test_without_torch_the_claim_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "why_missing", lambda library: f"{library} is not installed")
    (claim,) = found().claims
    assert claim.ok is None
    assert claim.skipped == "torch is not installed"
