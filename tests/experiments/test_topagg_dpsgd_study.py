"""The experiment on DP-SGD and its compressed forms, very small: settings are read, figures are what trainings say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments.catalog.topagg_dpsgd import EXPERIMENT
from fedcomp.experiments.findings import Say
from fedcomp.experiments.spec import parse_settings
from fedcomp.experiments.studies import topagg_dpsgd as module
from fedcomp.experiments.studies.topagg_dpsgd import (
    CHOSEN,
    DP_SGD,
    LSG,
    MASK,
    METHODS,
    PLAIN,
    STEPS,
    TARGETS,
    TOPAGG,
    grid,
    label,
    train,
)
from fedcomp.experiments.tables import Found, findings, specs_of
from fedcomp.privacy.accounting import noise_multiplier_for
from fedcomp.privacy.statement import Statement

SMALL = ("seeds=1", "workers=1", "task.hidden=6", "rate=1.0", "delta=1e-4")
"""All records in every batch, so that the noise is calibrated in closed form."""


@pytest.fixture(scope="module")
def small() -> Ran:
    return ran(EXPERIMENT, *SMALL, rounds=2)


def test_the_chosen_settings_are_of_what_is_tried() -> None:
    assert set(CHOSEN) == set(METHODS)
    for method, chosen in CHOSEN.items():
        assert len(chosen) == len(TARGETS)
        for target, options in zip(TARGETS, chosen, strict=True):
            assert options in grid(method, target)


def test_a11_plain_signs_are_tried_as_often_as_stochastic_ones_and_with_every_coordinate() -> None:
    for target in TARGETS:
        plain, drawn = ([parse_settings(text) for text in grid(method, target)] for method in (PLAIN, TOPAGG))
        assert len(plain) == len(drawn)
        assert {o["lr"] for o in plain} == {o["lr"] for o in drawn} == set(STEPS[target])
        assert not any(o["stochastic"] for o in plain)
        assert 64 * 32 + 32 + 32 * 10 + 10 in {o["k"] for o in plain}


@pytest.mark.long
def test_a11_a_plain_training_casts_no_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same seed, same noise: stochastic signs come from coins, plain ones from the gradients alone."""
    from fedcomp.privacy import optimizers

    given: list[bool] = []
    real = optimizers.vote_rows

    def noted(*args: Any, **named: Any) -> Any:
        given.append(named["uniforms"] is not None)
        return real(*args, **named)

    monkeypatch.setattr(optimizers, "vote_rows", noted)
    outcomes = [trained(TOPAGG, "lr=0.5 k=460"), trained(PLAIN, "lr=0.5 k=460 stochastic=false")]
    assert given == [True] * 3 + [False] * 3
    assert outcomes[0]["loss"] != outcomes[1]["loss"]
    assert outcomes[0]["spent"] == outcomes[1]["spent"]


def test_every_private_training_has_a_statement_of_its_own_epsilon(small: Ran) -> None:
    said = small.findings.statements
    assert set(said) == {label(m, t) for m in METHODS for t in TARGETS[:-1]}
    settings = {row[0]: row for row in small.findings.tables[2].rows}
    for name, document in said.items():
        statement = Statement.from_json(document)
        assert statement.unit == "record"
        assert statement.epsilon == settings[name][4]
        assert statement.releases == settings[name][3] == 2
        assert statement.noise_multiplier == settings[name][2]
        assert "INSECURE" in statement.prose()


@pytest.mark.long
def test_a_budget_ends_every_training_that_promises_something_before_it_is_crossed(small: Ran) -> None:
    config = EXPERIMENT.configure(rounds=2, assignments=SMALL, budget=2.5)
    assert specs_of(EXPERIMENT, config) == []
    ended = findings(EXPERIMENT, config, {}, Say())
    whole = {row[0]: row for row in small.findings.tables[2].rows}
    rows = {row[0]: row for row in ended.tables[2].rows}
    for method in METHODS:
        assert rows[label(method, 1.0)] == whole[label(method, 1.0)]
        assert [rows[label(method, target)][3] for target in (3.0, 10.0)] == [1, 0]
        assert 1.0 < rows[label(method, 3.0)][4] <= 2.5
        assert rows[label(method, math.inf)][:4] == whole[label(method, math.inf)][:4]
    holds = {claim.name: claim.ok for claim in ended.claims}
    assert holds["releases recorded, over steps made"]
    assert holds["private trainings that have a statement"]


def test_messages_are_as_long_as_what_they_hold(small: Ran) -> None:
    rows = {row[0]: row for row in small.findings.tables[1].rows}
    size = 64 * 6 + 6 + 6 * 10 + 10
    for method in METHODS:
        for i, target in enumerate(TARGETS[:-1]):
            _, coordinates, frame, ratio, down = rows[label(method, target)]
            chosen = parse_settings(CHOSEN[method][i])
            if method in (TOPAGG, PLAIN):
                assert coordinates == size
                assert frame < size / 4
            else:
                assert 4 * coordinates < frame < 4 * coordinates + 48
            if method == MASK:
                assert coordinates == math.ceil(chosen["keep"] * size)
            assert ratio == pytest.approx(rows[label(DP_SGD, target)][2] / frame)
            assert (down > 0) == (chosen.get("rank", 99) < 6)
    assert rows[label(LSG, 3.0)][1] < size


@pytest.mark.long
def test_choosing_takes_the_best_on_the_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TARGETS", (3.0, math.inf))
    monkeypatch.setattr(module, "STEPS", {3.0: (1e-9, 0.5), math.inf: (1e-9, 0.5)})
    monkeypatch.setattr(module, "VARIANTS", {DP_SGD: ("",), TOPAGG: ("k=20",)})
    monkeypatch.setattr(module, "METHODS", {DP_SGD: "dp-sgd", TOPAGG: "topagg"})
    # They are of all methods.
    monkeypatch.setattr(module, "quantities", lambda runs: {})
    kept: dict[str, Any] = {}
    config = EXPERIMENT.configure(rounds=4, assignments=(*SMALL, "tune=true", "seeds=1"))
    found = module.study(Found(EXPERIMENT, config, {}, Say(keep=kept.__setitem__)))
    validated = [name for name in kept if name.startswith("validation")]
    assert len(validated) == 2 * 2 * 2 * 2
    assert all("seed 100" in name for name in validated)
    # A step size of 1e-9 learns nothing, and is not chosen.
    assert all("lr=0.5" in row[1] for row in found.tables[2].rows)


def trained(
    method: str = DP_SGD, settings: str = "lr=0.5", seed: int = 0, *, multiplier: float = -1.0, **more: Any
) -> dict[str, Any]:
    config = EXPERIMENT.configure(rounds=3, assignments=[*SMALL, f"secure={more.pop('secure', 'false')}"])
    noise = noise_multiplier_for(3.0, 1e-4, releases=3) if multiplier < 0 else multiplier
    return train(method, 3.0, settings, seed, config=config, multipliers={3.0: noise}, **more)


def test_a_training_repeats_and_its_outcome_comes_back_from_json() -> None:
    one, two = trained(), trained()
    assert one["statement"].pop("run") != two["statement"].pop("run")  # names the ledger, and is never the same
    assert one == two
    assert trained(seed=1)["loss"] != one["loss"]
    free = trained(multiplier=0.0)
    assert free["spent"] == math.inf
    assert not free["statement"]
    assert Say().cell("x", lambda: free) == free


def test_secure_noise_is_another_every_time_and_the_statement_does_not_warn() -> None:
    first, second = trained(secure="true"), trained(secure="true")
    assert first["loss"] != second["loss"]
    assert "INSECURE" not in Statement.from_json(first["statement"]).prose()


def test_validation_holds_out_training_records_and_never_sees_the_test_split() -> None:
    held, reported = trained(validation=True), trained()
    everyone = reported["statement"]["population"]
    assert held["statement"]["population"] == everyone - round(0.2 * everyone)
    assert held["accuracy"] != reported["accuracy"]
