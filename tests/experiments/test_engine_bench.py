"""The benchmark of the engine's floor: its functions at tiny sizes, and claims that wrong figures fail."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest

from fedcomp.errors import why_missing
from fedcomp.experiments.bench import engine
from fedcomp.measuring import run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case in this process: started afresh they take twenty seconds."""
    monkeypatch.setattr(
        engine, "in_a_process", lambda measure, **options: {**_once(measure, **options), "process_s": 2.0}
    )


@cache
def _once(measure: Any, **options: Any) -> dict[str, Any]:
    return {"run_s": 1.0, "rounds": [0.5, 0.1, 0.1]} if measure is engine.run_engine else measure(**options)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_every_case_is_measured_and_every_claim_made() -> None:
    found = run(engine.cases(True), quick=True)
    count = Counter(row["measure"] for row in found.rows)
    both = {"memory": 2, "client-round": 1, "many clients": 3, "client state": 3, "memory, many": 2}
    assert count == {"engine": 4 if not why_missing("ray") else 2, **both}
    assert [row["case"] for row in found.rows if "case" in row] == list(engine.COHORTS) == list(engine.QUICK)
    claims = {claim.name: claim for claim in found.claims}
    assert len(claims) == 11
    if not why_missing("ray"):
        assert [claim.value for claim in found.claims[:3]] == [1.0, 1.0, 1.0]
    # These two do not depend on the machine.
    sure = {"client state, memory as float16 / as float32", "client state in files: of it in memory, kB"}
    assert {claim.name for claim in found.claims if claim.gate} == sure
    assert all(claims[name].ok for name in sure)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_without_ray_what_is_compared_with_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes every import of Ray fail, as it does where Ray is not installed.
    monkeypatch.setitem(sys.modules, "ray", None)
    lines: list[str] = []
    found = run(engine.cases(True), quick=True, say=lines.append)
    assert {row["engine"] for row in found.rows if row["measure"] == "engine"} == {"in-process"}
    skipped = [claim for claim in found.claims if claim.ok is None]
    assert len(skipped) == 3
    assert all("Ray / in process" in claim.name for claim in skipped)
    assert {claim.skipped for claim in skipped} == {"ray is not installed: pip install ray"}
    assert lines[0].startswith("ray is not installed: pip install ray; ")
