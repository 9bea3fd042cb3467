"""The benchmark of the engine's floor: its functions at tiny sizes, and claims that wrong figures fail."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fedcomp.experiments.bench import engine, many


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case in this process: started afresh they take twenty seconds."""
    measures = {"digits": many.digits, "many": many.rounds_of_many, "state": many.remembered}
    measures["memory"] = engine._aggregation_memory
    monkeypatch.setattr(engine, "_measure", lambda what, **options: {**measures[what](**options), "process_s": 0.0})


@pytest.mark.usefixtures("in_process")
def test_every_case_is_measured_and_every_claim_made() -> None:
    rows = engine._many(lambda _line: None, quick=True)
    by_measure: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_measure.setdefault(row["measure"], []).append(row)
    assert {name: len(found) for name, found in by_measure.items()} == {
        "client-round": 1,
        "many clients": 3,
        "client state": 3,
        "memory, many": 2,
    }
    assert [row["case"] for row in by_measure["many clients"]] == list(many.CASES) == list(many.QUICK)
    claims = {claim.name: claim for claim in [*many.claims(rows, quick=True), engine._flat(rows, quick=True)]}
    assert len(claims) == 7
    # These two do not depend on the machine.
    assert claims["client state, memory as float16 / as float32"].ok
    assert claims["client state in files: of it in memory, kB"].ok
    assert not any(claim.gate for name, claim in claims.items() if "state" not in name)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_without_ray_what_is_compared_with_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, lines = engine._measure, []
    timed = {"run_s": 1.0, "process_s": 2.0, "rounds": [0.5, 0.1, 0.1]}
    monkeypatch.setattr(engine, "_measure", lambda what, **o: dict(timed) if what == "run" else measure(what, **o))
    # None in sys.modules makes every import of Ray fail, as it does where Ray is not installed.
    monkeypatch.setitem(sys.modules, "ray", None)
    found = engine.run(quick=True, progress=lines.append)
    assert {row["engine"] for row in found["rows"] if row["measure"] == "engine"} == {"in-process"}
    skipped = [claim for claim in found["claims"] if claim.ok is None]
    assert len(skipped) == 3
    assert all("Ray / in process" in claim.name for claim in skipped)
    assert {claim.skipped for claim in skipped} == {"ray is not installed: pip install ray"}
    assert lines[0].startswith("ray is not installed: pip install ray; ")
    monkeypatch.undo()
    timed_rows = [
        {**row, "engine": e} for row in found["rows"] if row["measure"] == "engine" for e in ("in-process", "ray")
    ]
    beside = engine._claims(
        timed_rows + [r for r in found["rows"] if r["measure"] != "engine"], 4, 8, 4, 20, quick=True
    )
    assert [claim.value for claim in beside[:3]] == [1.0, 1.0, 1.0]


def rows(**changed: float) -> list[dict[str, Any]]:
    own = {"measure": "client-round", "overhead_ms": 3.9, "training_ms": 1.8}
    cases = [{"measure": "many clients", "case": case, "client_round_ms": 2.0} for case in many.CASES]
    states = [
        {"measure": "client state", "memory": memory, "kept_in": place, "state_kb": kb, "of_it_in_memory_kb": held}
        for memory, place, kb, held in (
            ("float32", "memory", 68.0, 68.0),
            ("float16", "memory", 35.0, 35.0),
            ("float32", "files", 68.0, 0.0),
        )
    ]
    own |= {k: v for k, v in changed.items() if k in own}
    cases[1] |= {k: v for k, v in changed.items() if k in cases[1]}
    states[1] |= {k: v for k, v in changed.items() if k == "state_kb"}
    states[2] |= {k: v for k, v in changed.items() if k == "of_it_in_memory_kb"}
    return [own, *cases, *states]


def test_wrong_figures_fail() -> None:
    assert all(claim.ok for claim in many.claims(rows(), quick=False))
    for name, value in (
        ("overhead_ms", 6.5),
        ("client_round_ms", 2.7),
        ("state_kb", 60.0),
        ("of_it_in_memory_kb", 0.1),
    ):
        failed = [claim for claim in many.claims(rows(**{name: value}), quick=False) if not claim.ok]
        assert failed
        assert any(claim.gate for claim in failed)
