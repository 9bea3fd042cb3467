"""The experiment ``factors``: what its rows send, that wrong rules fail, and that claims catch what they are about."""

from __future__ import annotations

from typing import Any

import pytest

import fedcomp.experiments.catalog.factors as module
from fedcomp.experiments import pooled
from fedcomp.experiments.catalog.factors import (
    DAD,
    EDAD,
    EXPERIMENT,
    FEDAVG,
    LAYERS,
    POWER,
    RANK_2,
    RANK_4,
    ROWS,
    SPARSE,
    lengths,
    spec_of,
)
from fedcomp.experiments.findings import Say


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=2", "workers=1", *assignments))


def test_every_row_runs_one_batch() -> None:
    for label in ROWS:
        settings = spec_of(label, 0.3, 0, config()).settings
        assert (settings["max_steps"], settings["batch_size"]) == (1, 32)


def test_frames_hold_the_numbers_of_the_formulas() -> None:
    assert lengths(3) == {"whole": 235_146, "dad": 49_984, "edad": 37_696, "rank": 4 * (1040 + 384 + 138) + 394}


@pytest.mark.parametrize("name", pooled.MODELS)
def test_wrong_rules_are_far_from_one_batch_of_all_examples(name: str) -> None:
    from fedcomp.codecs import Identity

    expected = pooled.pooled(name, 2, 5)
    off = {
        rule: pooled.difference(pooled.over_messages(name, Identity(), 2, 5, rule), expected) for rule in pooled.RULES
    }
    assert off["examples"] <= 1e-5
    assert min(off["even"], off["sum"]) > 1e-3


def measured(monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, float]], **other: Any) -> list[str]:
    """Return the gating claims that fail when trainings come out as they should, but for ``changes``."""

    def train(label: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> dict[str, Any]:
        rivals = {**dict.fromkeys(POWER.values(), 900.0), **dict.fromkeys(SPARSE.values(), 900.0)}
        up = {FEDAVG: 9000.0, RANK_2: 800.0, RANK_4: 800.0, **rivals}.get(label, 5000.0)
        return {"settled": 95.0, "uplink": up, "points": [(1.0, 50.0, 1.0)], **changes.get(label, {})}

    right = {"dAD": 1e-7, "rank-dAD, all ranks": 1e-7, "dAD, even": 0.1, "dAD, sum": 0.2}
    whole = {"whole": 235_146, "dad": 49_984, "edad": 37_696, "rank": 6642}
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "equalities", lambda rounds, seed: {"model": right | other.get("equal", {})})
    monkeypatch.setattr(module, "lengths", lambda seed: whole | other.get("lengths", {}))
    monkeypatch.setattr(module, "layer_by_layer", lambda rounds, seed: other.get("parted", 0.0))
    monkeypatch.setattr(module, "ranks", lambda lr, seed, config: {layer: [10.0, 4.0] for layer in LAYERS})
    findings = EXPERIMENT.measure(config("steps=0.3"), {}, Say())
    assert len(findings.tables[2].rows) == len(ROWS)
    return [claim.name for claim in findings.claims if claim.gate and not claim.ok]


def test_claims_catch_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, {}) == []
    assert measured(monkeypatch, {}, equal={"dAD": 1e-3}) == [
        "model, dAD: largest relative difference",
    ]
    assert measured(monkeypatch, {}, equal={"dAD, sum": 5e-7}) == [
        "smallest relative difference of a wrong rule, in those of the right one"
    ]
    assert measured(monkeypatch, {}, lengths={"edad": 49_984}) == ["784-256-128-10, 32 rows: times fewer numbers, edAD"]
    for label in (DAD, EDAD):
        assert measured(monkeypatch, {label: {"settled": 94.0}}) == [f"{label}: points lost against FedAvg"]
    # A rival with fewer bytes would be no rival; one that does better is a goal that was missed, and shown.
    assert measured(monkeypatch, {SPARSE[RANK_2]: {"uplink": 700.0}}) == [
        f"{RANK_2}: its uplink bytes over those of {SPARSE[RANK_2]}"
    ]
    assert measured(monkeypatch, {RANK_4: {"settled": 90.0}}) == []


def test_an_exchange_for_each_layer_changes_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.layer_by_layer(2, 3) == 0.0
    assert measured(monkeypatch, {}, parted=1e-9) == ["layer by layer: relative difference from one exchange"]
    for at_once, by_layer, during in module.prices().values():
        assert by_layer > during > 0
        assert by_layer > at_once
