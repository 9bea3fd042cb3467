"""The experiment ``topagg``: a tiny run of it, what its claims catch, and the closed forms behind its plots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from experiment_runs import Ran, ran

import fedcomp.experiments.catalog.topagg as module
from fedcomp.experiments import engines
from fedcomp.experiments.ballots import PUBLISHED, agreement, drawn_difference, passing
from fedcomp.experiments.catalog.topagg import EPSILONS, EXPERIMENT, FEDAVG, METHODS, SENT, claims, multiplier
from fedcomp.experiments.findings import Say
from fedcomp.experiments.tables import specs_of
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.events import FINE
from fedcomp.privacy.gaussian import lattice_delta
from fedcomp.rng import Key

SMALL = ("seeds=1", "workers=1", "task.hidden=", "delta=0.01", "epochs=1", "agreement_size=40")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Ran]:
    """Six clients, one round, three methods: whether everything fits together, not whether anything is learnt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "METHODS", METHODS[:3])
        # The one is read for MNIST, the other where step sizes are tuned.
        unread = ("task.model", "tune_seeds")
        yield ran(EXPERIMENT, *SMALL, clients=6, rounds=1, judging=module, unread=unread)


@pytest.mark.long
def test_a_tiny_run_keeps_every_claim_but_that_it_learns(tiny) -> None:
    _, results, again, *_ = tiny
    failed = {claim.name for claim in again.claims if claim.gate and not claim.ok}
    # Of six clients nobody learns anything, and rounding a frame to bytes weighs more on 650 coordinates.
    assert {name for name in failed if "longest vote" not in name} <= {"TopAgg learns at epsilon 10: accuracy"}
    assert len(again.claims) > 30
    assert sum("differ from the run with messages" in claim.name for claim in again.claims) == 2 * len(results) == 8


@pytest.mark.long
def test_claims_catch_a_crossed_epsilon_longer_votes_and_other_bits(tiny) -> None:
    _, _, findings, _, (trained, votes, differ, drawn) = tiny
    label, sent = METHODS[2].name(3.0), METHODS[0].name(SENT)
    assert all(c.ok for c in findings.claims if "epsilon of the statement" in c.name)

    def caught(trained=trained, votes=votes, differ=differ, drawn=drawn) -> list[str]:
        return [c.name for c in claims(trained, votes, differ, drawn) if c.gate and not c.ok]

    def figures(all_of, name, value) -> dict:
        return {**all_of, label: {**all_of[label], name: value}}

    def longest(times: float) -> dict:
        return figures(votes, "longest", votes[label]["header"] + times * votes[label]["entropy"])

    kept = caught(votes={name: {**vote, "longest": vote["header"]} for name, vote in votes.items()})
    assert set(kept) <= {"TopAgg learns at epsilon 10: accuracy"}
    for value in (3.01, math.nan):
        assert f"{label}: epsilon of the statement" in caught(trained=figures(trained, "worst", value))
    assert f"{label}: longest vote without the header, times its entropy" in caught(votes=longest(1.06))
    assert f"{label}: longest vote without the header, times its entropy" not in caught(votes=longest(1.04))
    for name, value in (("model", 1), ("frames", 1), ("epsilon", 1e-9)):
        new = set(caught(differ={**differ, sent: replace(differ[sent], **{name: value})})) - set(caught())
        assert [claim.partition(": ")[0] for claim in new] == [sent], name
    assert set(caught(drawn=0.02)) - set(caught()) == {"pass probability, closed form less draws of the integer noise"}


@pytest.mark.long
def test_every_private_training_has_its_statement(tiny) -> None:
    findings = tiny.findings
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
    results = {spec.label: engines.run(spec) for spec in specs_of(EXPERIMENT, config)}
    findings = EXPERIMENT.measure(config, results, Say())
    for method in METHODS[:3]:
        said = {epsilon: findings.statements[method.name(epsilon)] for epsilon in EPSILONS}
        assert [said[epsilon]["rounds"] for epsilon in EPSILONS] == [2, 1, 0, 2]
        assert all(said[epsilon]["epsilon"] <= 2.0 for epsilon in EPSILONS[:-1])
        assert results[method.name(SENT)].notes["privacy"]["epsilon"] == said[SENT]["epsilon"]
    failed = {claim.name for claim in findings.claims if claim.gate and not claim.ok}
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
    halved = replace(PUBLISHED[0], sigma=2500.0)
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
