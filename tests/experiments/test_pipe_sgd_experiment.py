"""The experiment ``pipe_sgd``: its recursions, its laws, and that claims catch what they are about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedcomp.experiments.catalog.pipe_sgd as module
from fedcomp.experiments import delayed, slept
from fedcomp.experiments.catalog.pipe_sgd import ASYNCHRONOUS, COLUMNS, EXPERIMENT, PIPED, ROWS, SYNCHRONOUS
from fedcomp.experiments.findings import Say


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=1", "workers=1", "steps=0.3", *assignments))


def test_trainings_over_messages_are_their_recursions_and_nothing_else() -> None:
    found = module.recursions(9, 3)
    assert max(found[f"width {w}"] for w in (1, 2, 3)) < 1e-6
    assert min(found["width 2 against no delay"], found["averaged models against width 2"]) > 1e-3


def test_the_recursion_applies_every_update_once_and_late() -> None:
    """By hand: the first rounds of all cohorts, which are as large, use the first model."""
    zero = np.zeros(slept.SIZE)
    first = slept.recursion(3, range(6), 1, 1) - zero
    np.testing.assert_allclose(slept.recursion(3, range(6), 2, 2), 2 * first, rtol=1e-12)
    np.testing.assert_allclose(slept.recursion(3, range(6), 3, 3), 3 * first, rtol=1e-12)


def test_cohorts_step_as_often_as_the_law_says() -> None:
    for width, (found, wanted) in module.periods(3).items():
        assert found == pytest.approx(wanted), width


def test_a_delayed_training_applies_its_gradients_in_the_drain() -> None:
    """With as many steps of delay as there are steps, all gradients are of the first model."""
    whole = delayed.train(0.05, 0.0, 8, 0, "", 1, steps=8)
    assert 10.0 < whole["accuracy"] < 100.0
    plain = delayed.train(0.05, 0.0, 0, 0, "", 1, steps=8)
    warm = delayed.train(0.05, 0.0, 8, 8, "", 1, steps=8)
    assert warm == plain


def test_a_gradient_of_the_perceptron_is_that_of_finite_differences() -> None:
    drawn = np.random.default_rng(3)
    weights = [w.astype(np.float64) for w in delayed.perceptron(3, (5, 4, 3))]
    x, y = drawn.standard_normal((6, 5)), drawn.integers(0, 3, 6)

    def loss(at: Any) -> float:
        scores = np.maximum(x @ at[0] + at[1], 0) @ at[2] + at[3]
        return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(6), y]))

    found = delayed.gradient(weights, x, y)  # type: ignore[arg-type]
    for place, part in enumerate(found):
        for index in np.ndindex(part.shape):
            moved = [w.copy() for w in weights]
            moved[place][index] += 1e-6
            assert part[index] == pytest.approx((loss(moved) - loss(weights)) / 1e-6, abs=1e-4)


def test_the_upper_half_of_a_float_is_nearer_to_zero_and_eight_bits_are_not_biased_that_way() -> None:
    values = np.random.default_rng(3).standard_normal(4000).astype(np.float32)
    half, bits = delayed.coded(values, "upper half"), delayed.coded(values, "8 bits")
    assert np.all(np.abs(half) <= np.abs(values))
    assert abs(np.mean(np.abs(bits) - np.abs(values))) < np.mean(np.abs(values) - np.abs(half))
    assert delayed.coded(values, "") is values


def test_what_diverged_recognises_one_class() -> None:
    found = delayed.train(5.0, 0.9, 4, 0, "upper half", 1, steps=60)
    assert found["accuracy"] < 30.0


def measured(monkeypatch: pytest.MonkeyPatch, *assignments: str, **changes: Any) -> list[str]:
    """Return the claims that fail, gating ones first, when all comes out as it should, but for ``changes``."""
    accuracies = {"no delay": 97.0, "one step": 97.0, "one step, warm-up 40": 97.0}
    bad = {(1.0, 0.0): {"one step": 80.0}, (0.3, 0.9): {"one step": 40.0}}
    seconds = {SYNCHRONOUS: 10.0, PIPED: 9.0, "four cohorts": 9.0, ASYNCHRONOUS: 12.0, **changes.get("seconds", {})}

    def train(rate: float, momentum: float, delay: int, warmup: int, code: str, seed: int, *, steps: int) -> Any:
        heading = next(name for name, column in COLUMNS.items() if column == (delay, warmup, code))
        table = {**accuracies, **bad.get((rate, momentum), {}), **changes.get("accuracy", {}).get((rate, momentum), {})}
        return {"accuracy": table.get(heading, 90.0)}

    def paced(row: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> Any:
        line = [[seconds[row] + i / 1e3, 95.0] for i in range(-2, 3)]
        return {"line": line, "uplink": 1000, "steps": 5, "shares": [1], "settled": 95.0}

    exact = {f"width {w}": 1e-7 for w in (1, 2, 3)}
    exact |= {"width 2 against no delay": 0.1, "averaged models against width 2": 0.1, **changes.get("exact", {})}
    row = {"seconds": 10.0, "off": 1e-7, "line": [[10.0, 0.1]], "steps": 8, "idle": 2.0, "period": 3.0}
    real = {"width 1": row, "width 2": {**row, "seconds": changes.get("real", 6.0)}, ASYNCHRONOUS: row}
    monkeypatch.setattr(delayed, "train", train)
    monkeypatch.setattr(module, "paced", paced)
    monkeypatch.setattr(module, "recursions", lambda rounds, seed: exact)
    monkeypatch.setattr(module, "deployed", lambda rounds, seed: real)
    findings = EXPERIMENT.measure(config(*assignments), {}, Say())
    if "deployment=false" not in assignments:
        # One second of work and two of waiting: in a pipe of two the longer of both.
        assert [row[4] for row in findings.tables[-1].rows] == [3.0, 2.0, None]
    assert [len(t.rows) for t in findings.tables if t.title == "Against the simulated clock"] == [len(ROWS)]
    return [c.name for c in sorted(findings.claims, key=lambda c: not c.gate) if c.ok is False]


@pytest.mark.long
def test_claims_catch_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch) == []
    assert measured(monkeypatch, exact={"width 2": 1e-3})[0] == "width 2: relative distance from its recursion"
    assert measured(monkeypatch, real=9.0) == ["deployment: seconds of width 2 over width 1"]
    assert measured(monkeypatch, seconds={PIPED: 11.0}) == [
        "two cohorts: seconds to the target over those of synchronous rounds"
    ]
    lost = {(0.1, 0.0): {"one step": 90.0}, (1.0, 0.0): {"one step": 97.0}}
    assert [name.split(",")[1] for name in measured(monkeypatch, accuracy=lost)] == [
        " step size .1",
        " step size 1",
        " points that a warm-up of 40 steps brings back",
    ]


def test_without_a_deployment_its_claims_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, "deployment=false", real=99.0) == []
