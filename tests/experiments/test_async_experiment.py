"""The experiment ``async``: its clock, its rows, and that claims catch what they are about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcomp.experiments import slept
from fedcomp.experiments.catalog import asynchronous as module
from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.catalog.asynchronous import (
    BUFFERED,
    DEADLINE,
    DEADLINES,
    EXPERIMENT,
    ROWS,
    SINGLE,
    SPARSE,
    SYNCHRONOUS,
)
from fedcomp.experiments.findings import Say
from fedcomp.experiments.paced import Pace, evenness, seconds_to
from fedcomp.flower.faults import Delivery


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=1", "workers=1", "steps=0.3", *assignments))


def test_it_is_found_by_a_word_of_pythons() -> None:
    assert get_experiment("async") is EXPERIMENT


def test_paces_have_the_mean_and_variation_that_were_asked_for() -> None:
    pace = Pace(3, 20_000)
    own = np.array([pace.of(p) for p in (0, 1, 19_999)])
    assert np.all(own > 0)
    from fedcomp.rng import Key
    from fedcomp.timing.pipeline import log_normal

    drawn = log_normal(1.0, 1.0, 20_000, Key(3, "pace/clients"))
    assert drawn.mean() == pytest.approx(1.0, rel=0.05)
    assert drawn.std() == pytest.approx(1.0, rel=0.1)
    # The same message takes the same time again; another one does not, nor does it take another client's.
    first, second = (pace(Delivery(exchange, 1, 4, 0, "train")) for exchange in (0, 1))
    assert pace(Delivery(0, 1, 4, 0, "train")) == first != second
    assert pace(Delivery(0, 1, 4, 0, "evaluate")) == 0.0


def test_seconds_to_a_target_are_those_of_a_running_mean() -> None:
    line = [[1.0, 50.0], [2.0, 99.0], [3.0, 80.0], [4.0, 95.0], [5.0, 96.0]]
    assert seconds_to(line, 90.0) == 4.0
    assert seconds_to(line, 99.0) == float("inf")
    assert slept.seconds_below([[1.0, 3.0], [2.0, 1.0]], 1.0) == 2.0


def test_evenness_is_jains_index() -> None:
    assert evenness([3, 3, 3]) == 1.0
    assert evenness([9, 0, 0]) == pytest.approx(1 / 3)
    assert evenness([0, 0]) == 0.0


@pytest.mark.long
def test_rows_train_and_count_whose_updates_they_used() -> None:
    """Small ones, for three simulated seconds; a buffered row must not wait for the slowest of four."""
    made = EXPERIMENT.configure(assignments=("seconds=3", "steps=0.3"), clients=4)
    steps = {}
    for row in ROWS:
        found = module.paced(row, 0.3, 5, config=made)
        assert sum(found["shares"]) == pytest.approx(1.0)
        assert found["line"][-1][0] >= 3.0
        assert found["uplink"] > 0
        steps[row] = found["steps"]
    assert steps[SINGLE] > steps[SYNCHRONOUS]


def measured(monkeypatch: pytest.MonkeyPatch, *assignments: str, **changes: Any) -> list[str]:
    """Return the claims that fail when trainings come out as they should, but for ``changes``."""
    seconds = {SYNCHRONOUS: 30.0, **dict.fromkeys(DEADLINES, 20.0), BUFFERED: 10.0, SPARSE: 10.0, SINGLE: 12.0}
    seconds |= changes.get("seconds", {})

    def paced(row: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> Any:
        line = [[seconds.get(row, 10.0) + i / 1e3, 95.0] for i in range(-2, 3)]
        even = {SYNCHRONOUS: 1.0, **dict.fromkeys(DEADLINES, 0.6)}.get(row, 0.8)
        uplink = changes.get("bytes", 100) if row == SPARSE else 1000
        shares = [1 / config.clients] * config.clients
        return {"line": line, "uplink": uplink, "steps": 5, "shares": shares, "even": even, "settled": 95.0}

    real = {
        row: {"line": [[0.0, 9.0], [last, 0.1]], "seconds": last, "used": 9, "late": 0}
        for row, last in {SYNCHRONOUS: 30.0, DEADLINE: 20.0, BUFFERED: changes.get("real", 10.0)}.items()
    }
    monkeypatch.setattr(module, "paced", paced)
    monkeypatch.setattr(module, "deployed", lambda rounds, seed: real)
    findings = EXPERIMENT.measure(config(*assignments), {}, Say())
    assert len(findings.tables[0].rows) == len(ROWS)
    return [claim.name for claim in findings.claims if claim.ok is False]


def test_claims_catch_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch) == []
    slow = measured(monkeypatch, seconds={BUFFERED: 25.0, SPARSE: 25.0})
    assert [name.split(": seconds to the target over ")[1] for name in slow] == [
        "synchronous rounds",
        "rounds with the best deadline",
        "single updates",
    ]
    assert measured(monkeypatch, bytes=900) == ["buffered, top-k: uplink bytes to the target over buffered"]
    assert measured(monkeypatch, real=29.0) == [
        "deployment: buffered, seconds to the common loss over synchronous rounds"
    ]
    assert measured(monkeypatch, "deployment=false", real=99.0) == []
