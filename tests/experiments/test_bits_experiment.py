"""The experiment ``bits``: step sizes come from a validation split, and its claims catch what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import fedcomp.experiments.catalog.bits as module
from fedcomp.experiments.catalog.bits import EXPERIMENT, FEDAVG, FEW, ONE_BIT, ROTATED, ROWS, spec_of
from fedcomp.experiments.findings import Say


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=2", "workers=1", *assignments))


def test_rows_remember_where_values_are_rounded_and_not_where_that_is_the_claim() -> None:
    for label in ROWS:
        spec = spec_of(label, 0.25, 7, config())
        assert (spec.rounds, spec.clients) == (40, 10)
        assert spec.settings.get("feedback", False) == (label.startswith(("top-k", "STC", "EF")))


def measured(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Mapping[str, float]]) -> tuple[Any, list[Any]]:
    """Measure with made-up trainings: all alike but for ``changes``; the best step size of a row is its own."""
    steps = {label: (0.2, 0.3, 0.5, 0.8)[i % 4] for i, label in enumerate((*ROWS, *ROTATED))}
    trained = []

    def tune(label: str, lr: float, seed: int, *, config: Any) -> dict[str, Any]:
        return {"settled": 0.9 - abs(lr - steps[label])}

    def train(label: str, lr: float, seed: int, *, config: Any) -> dict[str, Any]:
        trained.append((label, lr, seed))
        made = {"settled": 97.0, "uplink": 1000.0, "downlink": 1e6, "wire": 2e6, "points": [(1.0, 50.0, 10.0)]}
        made["uplink"] = {FEDAVG: 300_000.0, FEW: 1_500.0, ONE_BIT: 10_000.0}.get(label, made["uplink"])
        return {**made, **changes.get(label, {})}

    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setattr(module, "train", train)
    findings = EXPERIMENT.measure(config(), {}, Say())
    assert {(label, lr) for label, lr, _ in trained} == set(steps.items())
    assert len(trained) == 2 * len(steps)
    return findings, [claim.name for claim in findings.claims if not claim.ok]


def test_claims_are_about_points_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, failed = measured(monkeypatch, {})
    assert not failed
    assert [claim.value for claim in findings.claims] == [0.0, 200.0, 0.0, 30.0]
    assert len(findings.tables[0].rows) == len(ROWS) + len(ROTATED)
    assert measured(monkeypatch, {FEW: {"settled": 95.9}})[1] == [f"{FEW}: points of accuracy lost against FedAvg"]
    assert measured(monkeypatch, {FEW: {"uplink": 2001.0}})[1] == [f"{FEW}: times fewer uplink payload bytes"]
    assert measured(monkeypatch, {ONE_BIT: {"settled": 95.9}})[1] == [
        f"{ONE_BIT}: points of accuracy lost against FedAvg"
    ]
    assert measured(monkeypatch, {ONE_BIT: {"uplink": 12_001.0}})[1] == [f"{ONE_BIT}: times fewer uplink payload bytes"]
    # A baseline that does better makes all of them worse.
    assert len(measured(monkeypatch, {FEDAVG: {"settled": 98.1}})[1]) == 2
