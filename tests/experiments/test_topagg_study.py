"""The experiment ``topagg``: a tiny run of it, what its claims catch, and the closed form of published thresholds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedcomp.experiments import engines
from fedcomp.experiments.catalog.topagg import EXPERIMENT
from fedcomp.experiments.findings import Say
from fedcomp.experiments.studies import topagg as module
from fedcomp.experiments.studies.datalens import PUBLISHED
from fedcomp.experiments.studies.topagg import (
    EPSILONS,
    METHODS,
    SENT,
    drawn_difference,
    multiplier,
)
from fedcomp.experiments.tables import Found, findings, specs_of
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.events import FINE
from fedcomp.privacy.gaussian import lattice_delta
from fedcomp.rng import Key

SMALL = ("seeds=1", "workers=1", "task.hidden=", "delta=0.01", "epochs=1")


@pytest.mark.long
def test_a_budget_ends_what_is_measured_as_it_ends_rows() -> None:
    config = EXPERIMENT.configure(clients=6, rounds=2, assignments=SMALL, budget=2.0)
    results = {spec.label: engines.run(spec) for spec in specs_of(EXPERIMENT, config)}
    found = findings(EXPERIMENT, config, results, Say())
    for method in METHODS[:3]:
        said = {epsilon: found.statements[method.name(epsilon)] for epsilon in EPSILONS}
        assert [said[epsilon]["rounds"] for epsilon in EPSILONS] == [2, 1, 0, 2]
        assert all(said[epsilon]["epsilon"] <= 2.0 for epsilon in EPSILONS[:-1])
        assert results[method.name(SENT)].notes["privacy"]["epsilon"] == said[SENT]["epsilon"]
    failed = {claim.name for claim in found.claims if claim.gate and not claim.ok}
    assert not any("that messages change" in name or "epsilon of the statement" in name for name in failed)
    assert "uplink of dense over votes, the longest" in failed, "a training without a round has no bytes"


def test_noise_is_calibrated_for_the_runs_own_rounds() -> None:
    for rounds in (1, 20, 50):
        config = EXPERIMENT.configure(rounds=rounds)
        for epsilon in (1.0, 10.0):
            mu = math.sqrt(rounds) / multiplier(config, epsilon)
            # Whatever the grid, it keeps the epsilon; on the coarsest one it is used up.
            assert gaussian_epsilon(mu, 1e-3) < epsilon
            assert 0.999 * epsilon <= gaussian_epsilon(mu, lattice_delta(mu, 1e-3, FINE)) <= epsilon
        assert multiplier(config, math.inf) == 0.0


@pytest.mark.long
def test_tuning_uses_other_seeds_and_takes_the_least_training_loss(monkeypatch) -> None:
    two = replace(METHODS[2], candidates=METHODS[2].candidates[:2], chosen=(0, 0, 1, 1))
    monkeypatch.setattr(module, "METHODS", (two,))
    config = EXPERIMENT.configure(clients=4, rounds=1, assignments=[*SMALL, "tune=true"])
    kept: dict[str, dict] = {}
    say = Say(keep=lambda name, content: kept.update({name: content}))
    chosen, (table,) = module.choose(Found(EXPERIMENT, config, {}, say))
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
    halved = PUBLISHED[0]._replace(sigma=2500.0)
    assert abs(halved.passes[0] - PUBLISHED[0].passes[0]) > 0.2
