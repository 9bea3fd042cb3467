"""The experiment ``topagg``: a tiny run of it, what its claims catch, and the closed forms behind its plots."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import fedcomp.experiments.catalog.topagg as module
from fedcomp.experiments import engines
from fedcomp.experiments.ballots import PUBLISHED, Published, agreement, drawn_difference, passing
from fedcomp.experiments.catalog.topagg import EPSILONS, EXPERIMENT, FEDAVG, METHODS, SENT, multiplier
from fedcomp.experiments.findings import Findings, Say
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.events import FINE
from fedcomp.privacy.gaussian import lattice_delta
from fedcomp.rng import Key

SMALL = ("seeds=1", "workers=1", "task.hidden=", "delta=0.01", "epochs=1", "agreement_size=40")


@pytest.fixture(scope="module")
def tiny():
    """Six clients, one round, three methods: whether everything fits together, not whether anything is learnt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "METHODS", METHODS[:3])
        config = EXPERIMENT.configure(clients=6, rounds=1, assignments=SMALL)
        results = {spec.label: engines.run(spec) for spec in EXPERIMENT.specs(config)}
        yield config, results, EXPERIMENT.measure(config, results, Say())


@pytest.mark.long
def test_a_tiny_run_keeps_every_claim_but_that_it_learns(tiny) -> None:
    config, results, findings = tiny
    again = Findings.from_json(findings.to_json())
    claims = module.claims(config, results, again)
    failed = {claim.name for claim in claims if claim.gate and not claim.ok}
    # Of six clients nobody learns anything, and rounding a frame to bytes weighs more on 650 coordinates.
    assert {name for name in failed if "longest vote" not in name} <= {"TopAgg learns at epsilon 10: accuracy"}
    assert len(claims) > 30
    assert sum("differ from the run with messages" in claim.name for claim in claims) == 2 * len(results) == 8


def test_claims_catch_a_crossed_epsilon_longer_votes_and_other_bits(tiny) -> None:
    config, results, findings = tiny
    label, sent = METHODS[2].name(3.0), METHODS[0].name(SENT)
    wrong = {
        f"{label}: epsilon": 3.01,
        f"{label}: longest over entropy": 1.06,
        f"{sent}: bytes of the model that differ": 1.0,
        f"{sent}: bytes of frames that differ": 1.0,
        f"{sent}: difference in epsilon": 1e-9,
        "closed form against draws": 0.02,
    }
    assert all(c.ok for c in module.claims(config, results, findings) if "epsilon of the statement" in c.name)
    for name, value in wrong.items():
        forged = replace(findings, values={**findings.values, name: value})
        caught = [c for c in module.claims(config, results, forged) if c.gate and not c.ok and c.value == value]
        assert len(caught) == 1, name
        missing = replace(findings, values={**findings.values, name: math.nan})
        assert any(c.gate and math.isnan(c.value) and not c.ok for c in module.claims(config, results, missing))


def test_every_private_training_has_its_statement(tiny) -> None:
    _, _, findings = tiny
    assert set(findings.statements) == {m.name(e) for m in METHODS[:3] for e in EPSILONS}
    for method in METHODS[:3]:
        for epsilon in EPSILONS:
            said = findings.statements[method.name(epsilon)]
            assert "INSECURE" in said["prose"]
            assert said["population"] == 6
            if epsilon == math.inf:
                assert said["epsilon"] == "infinite"
            else:
                assert 0.99 * epsilon <= said["epsilon"] <= epsilon


@pytest.mark.long
def test_a_budget_ends_what_is_measured_as_it_ends_rows(monkeypatch) -> None:
    monkeypatch.setattr(module, "METHODS", METHODS[:3])
    config = EXPERIMENT.configure(clients=6, rounds=2, assignments=SMALL, budget=2.0)
    results = {spec.label: engines.run(spec) for spec in EXPERIMENT.specs(config)}
    findings = EXPERIMENT.measure(config, results, Say())
    for method in METHODS[:3]:
        said = {epsilon: findings.statements[method.name(epsilon)] for epsilon in EPSILONS}
        assert [said[epsilon]["rounds"] for epsilon in EPSILONS] == [2, 1, 0, 2]
        assert all(said[epsilon]["epsilon"] <= 2.0 for epsilon in EPSILONS[:-1])
        assert results[method.name(SENT)].notes["privacy"]["epsilon"] == said[SENT]["epsilon"]
    failed = {claim.name for claim in module.claims(config, results, findings) if claim.gate and not claim.ok}
    assert not any("differ" in name or "epsilon of the statement" in name for name in failed)
    assert "uplink of dense over votes, the longest of all settings" in failed, (
        "a training without a round has no bytes"
    )


def test_noise_is_calibrated_for_the_runs_own_rounds() -> None:
    for rounds in (1, 20, 50):
        config = EXPERIMENT.configure(rounds=rounds)
        for epsilon in (1.0, 10.0):
            mu = math.sqrt(rounds) / multiplier(config, epsilon)
            # Whatever the grid, it keeps the epsilon; on the coarsest one it is used up.
            assert gaussian_epsilon(mu, 1e-3) < epsilon
            assert 0.999 * epsilon <= gaussian_epsilon(mu, lattice_delta(mu, 1e-3, FINE)) <= epsilon
        assert multiplier(config, math.inf) == 0.0
    assert EXPERIMENT.specs(EXPERIMENT.configure(rounds=0))


@pytest.mark.long
def test_tuning_uses_other_seeds_and_takes_the_least_training_loss(monkeypatch) -> None:
    two = replace(METHODS[2], candidates=METHODS[2].candidates[:2], chosen=(0, 0, 1, 1))
    monkeypatch.setattr(module, "METHODS", (two,))
    config = EXPERIMENT.configure(clients=4, rounds=1, assignments=[*SMALL, "tune=true"])
    kept: dict[str, dict] = {}
    chosen, (table,) = module._choose(config, Say(keep=lambda name, content: kept.update({name: content})))
    assert len(kept) == 2 * len(EPSILONS)
    assert all(name.endswith("seed 1000") for name in kept)
    for row in table.rows:
        losses = [kept[f"tuning: {row[0]}, {i}, seed 1000"]["loss"] for i in range(2)]
        assert row[3] == min(losses)
        assert chosen[row[0]] == METHODS[2].candidates[losses.index(min(losses))]


def test_1_6_4_the_published_thresholds_in_closed_form() -> None:
    """What is known of them, and draws of the integer noise that is really added."""
    noise = [setting.passes[0] for setting in PUBLISHED]
    right = [setting.passes[1] for setting in PUBLISHED]
    assert (round(min(noise[:4]), 2), round(max(noise[:4]), 2)) == (0.42, 0.58)
    assert (round(min(right[:4]), 2), round(max(right[:4]), 1)) == (0.53, 0.6)
    assert (round(min(noise[4:]), 2), round(max(noise[4:]), 2)) == (0.15, 0.32)
    assert min(right[4:]) > 0.99
    assert drawn_difference(PUBLISHED[0], 20_000, Key(3)) < 0.02
    halved = Published("wrong sigma", 4000, 200, 2500.0, 0.7)
    assert abs(halved.passes[0] - PUBLISHED[0].passes[0]) > 0.2


def test_more_epsilon_passes_more_signal_and_less_noise() -> None:
    found = passing(200, 480, 0.1, 20, 1e-3, (0.3, 1.0, 3.0, 10.0))
    assert all(a < b for a, b in zip(found["1"], found["1"][1:], strict=False))
    assert all(a > b for a, b in zip(found["0"], found["0"][1:], strict=False))
    assert found["1"][-1] > 0.99


def test_noise_costs_signs_and_stochastic_signs_cost_more() -> None:
    """Plain signs stand the noise better; without noise the whole clipped sum is nearly always right."""
    found = agreement(100, 400, (0.2,), {"none": 0.0, "much": 5.0}, Key(9))
    assert all(values["none"] > values["much"] for values in found.values())
    assert found["signs, 0.2"]["much"] > found["votes, 0.2"]["much"]
    assert found["clipped sum"]["none"] > 0.97
    assert FEDAVG not in found
