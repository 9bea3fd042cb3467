"""The experiment ``power_sgd``: rows are runs of their own settings, and its claims catch what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import fedcomp.experiments.catalog.power_sgd as module
from fedcomp.experiments.catalog.power_sgd import (
    EXPERIMENT,
    FEDAVG,
    NORMS,
    RANK_2,
    RANK_4,
    RIVALS,
    ROWS,
    TWICE,
    memory_norms,
    spec_of,
)
from fedcomp.experiments.findings import Say


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=2", "workers=1", *assignments))


def test_a_rival_compresses_both_directions_as_power_sgd_does() -> None:
    for rival in RIVALS.values():
        spec = spec_of(rival, 0.25, 7, config())
        assert (spec.rounds, spec.clients, spec.settings["downlink"]) == (40, 10, "topk")


def measured(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Mapping[str, float]]) -> tuple[Any, list[str]]:
    """Measure with made-up trainings: all alike but for ``changes``; the best step size of a row is its own."""
    steps = {label: (0.2, 0.3, 0.5, 0.8)[i % 4] for i, label in enumerate(ROWS)}
    trained = []
    ups = {FEDAVG: 600_000.0, RANK_2: 10_000.0, TWICE: 20_000.0, RANK_4: 15_000.0}

    def train(label: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> dict[str, Any]:
        if tuning:
            return {"settled": 90.0 - abs(lr - steps[label])}
        trained.append((label, lr, seed))
        up = ups.get(label, 16_000.0)
        made = {
            "settled": 97.0,
            "uplink": up,
            "downlink": up,
            "late": up / 40,
            "wire": 2 * up,
            "points": [(1.0, 50.0, 1.0)],
        }
        return {**made, **changes.get(label, {})}

    monkeypatch.setattr(module, "train", train)
    norms = {name: [float(bound.split()[1])] for name, (bound, _) in NORMS.items()}
    monkeypatch.setattr(module, "memory_norms", lambda rounds: {"rounds": [rounds], "ratios": norms})
    findings = EXPERIMENT.measure(config(), {}, Say())
    assert {(label, lr) for label, lr, _ in trained} == set(steps.items())
    assert len(trained) == 2 * len(steps)
    return findings, [claim.name for claim in findings.claims if claim.gate and not claim.ok]


def test_claims_are_about_points_bytes_and_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, failed = measured(monkeypatch, {})
    assert not failed
    assert len(findings.tables[0].rows) == len(ROWS)
    for label in (TWICE, RANK_4):
        lost = f"{label}: points of accuracy lost against FedAvg"
        assert measured(monkeypatch, {label: {"settled": 95.9}})[1] == [lost]
    # The goal that was missed gates nothing, and is listed.
    findings, failed = measured(monkeypatch, {RANK_2: {"settled": 93.0}})
    assert not failed
    assert f"{RANK_2}: points of accuracy lost against FedAvg" in [c.name for c in findings.claims if not c.ok]
    _, failed = measured(monkeypatch, {RIVALS[RANK_2]: {"uplink": 1.0, "downlink": 1.0}})
    assert failed == [f"{RANK_2}: its bytes over those of {RIVALS[RANK_2]}, up and down"]
    _, failed = measured(monkeypatch, {RANK_2: {"late": 1e6}})
    assert failed == [f"{RANK_2}: downlink of the last round over its uplink"]


def test_memories_of_few_rounds_are_measured_and_not_judged() -> None:
    found = memory_norms(12)
    assert found["rounds"][-1] == 12
    assert set(NORMS) <= set(found["ratios"])
    assert found["ratios"]["opposite, two-exchange, aggregated"][-1] == pytest.approx(12.0, rel=1e-3)
    assert all(0 < series[-1] < 13 for series in found["ratios"].values())
