"""Tiers A to F on the code that trainings use: mechanisms, and strategies through Flower's own hooks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fedcomp.experiments.audits import cases, systems
from fedcomp.experiments.audits.subjects import ClientReply, Subject, Worlds, mean, rounds
from fedcomp.experiments.audits.tiers import tier_a, tier_b, tier_c, tier_e, tier_f
from fedcomp.privacy.audit import audit_run, likeness, noise_scale
from fedcomp.privacy.entropy import SystemEntropy
from fedcomp.privacy.optimizers import TopAggOptimizer
from fedcomp.rng import Key
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

pytestmark = pytest.mark.audit

SUMS = ("votes", "clipped vectors")
"""Names of mechanisms without a strategy around them, which are quick, begin so."""


@cache
def subjects() -> dict[str, Subject]:
    return {name: make() for name, make in (*cases.SUBJECTS.items(), *systems.SUBJECTS.items())}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        found = subjects()
        metafunc.parametrize("subject", list(found.values()), ids=list(found))


@pytest.mark.slow
def test_audit_A_no_neighbour_is_farther_than_the_noise_was_drawn_for_and_some_is_as_far(subject: Subject) -> None:
    # Distributed noise is made for the longest integers that rounding may give, which these vectors do not become.
    found = tier_a(subject)
    assert found.ok, found


def test_audit_A_coins_of_votes_are_secret_where_the_order_of_the_records_decides_who_gets_which() -> None:
    """A record at the front shifts the coins of all behind it; whoever knew the coins would see all of them change."""
    subject = systems.topagg_sgd()
    drawn = []
    for _ in range(2):
        run = systems.optimizer_of(TopAggOptimizer, 0.0, SystemEntropy(), k=8, stochastic=True)
        drawn.append(subject.play(run, None, subject.worlds.present, 1))
    assert not np.array_equal(*drawn)


@pytest.mark.slow
def test_audit_B_every_part_has_the_noise_that_was_claimed(subject: Subject) -> None:
    runs = 300 if subject.name.startswith(SUMS) else 30
    found = tier_b(subject, runs=runs)
    assert {verdict.part for verdict in found} == set(subject.parts)
    for verdict in found:
        assert verdict.ok, verdict
        assert verdict.trials >= 480 or verdict.part == "told"


@pytest.mark.long
def test_audit_C_no_attack_on_the_worst_pair_refutes_the_ledger(subject: Subject) -> None:
    quick = subject.name.startswith((*SUMS, "local privacy", "distributed"))
    found = tier_c(subject, runs=1500 if quick else 200)
    assert found.ok, found
    # The attack sees something, or it would refute nothing ever.
    assert found.found > 0.2 * found.claimed


@pytest.mark.slow
def test_audit_E_no_output_lies_beside_the_grid_in_either_world(subject: Subject) -> None:
    assert tier_e(subject, runs=5).ok


@pytest.mark.slow
def test_audit_F_noise_is_drawn_anew_every_round_and_every_run(subject: Subject) -> None:
    assert tier_f(subject).ok


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_audit_B_lost_clients_leave_noise_and_guarantee_as_they_are(lost: int) -> None:
    """n is not the number expected, and errors come instead of replies: the noise on the sum is the same."""
    subject = cases.dp_fedavg(messages=True)
    data = [
        (place, ClientReply(answer.update, lost=place < lost, examples=answer.examples))
        for place, answer in subject.worlds.present
    ]
    outputs = subject.run(data, 60)
    residuals = outputs - subject.run(data, 1, noisy=False)
    assert noise_scale(residuals[..., : cases.WIDTH], subject.scale[0]).ok
    assert subject.ledger(1).epsilon() == cases.dp_fedavg().ledger(1).epsilon()


@pytest.mark.long
def test_audit_C_rounds_add_up_as_the_ledger_says() -> None:
    found = tier_c(cases.votes_sum(z=2.0), runs=1500, rounds=4)
    # A mu of 1, and what integers may cost beyond the continuous curve.
    assert 1.0 < found.claimed < 1.001
    assert found.ok
    assert found.found > 0.8


def test_audit_D_one_round_of_a_strategy_with_a_canary_per_client() -> None:
    count = 96
    model = {"w": np.zeros(count, np.float32)}

    def make(given, seed):
        arguments = cases.promise(2.0 if given is None else given, seed) | {"population": count}
        return DpFedAvg(mean(), clip=cases.CLIP, **arguments)

    rows = [(place, cases.CLIP * np.eye(1, count, place, dtype=np.float32)[0]) for place in range(count)]
    subject = rounds("DP-FedAvg, canaries", make, Worlds(rows, rows), model, count)
    coins = Key(0, "canaries").uniform(count) < 0.5
    # What beside the sum is released (a metric, nothing here) is left out of the score.
    outputs = subject.run([row for row, coin in zip(rows, coins, strict=True) if coin], 1)[0, 0, :count]
    correct, low = audit_run(np.array([outputs @ row for _, row in rows]), coins, guesses=24, delta=1e-5)
    assert correct > 12
    assert low <= subject.ledger(1).epsilon()


def test_audit_F_a_strategy_without_a_seed_draws_from_the_operating_system() -> None:
    def make(given, seed):
        arguments = cases.promise(given, seed) | {"insecure_deterministic": False}
        return DpFedAvg(mean(), clip=cases.CLIP, **arguments)

    subject = cases.dp_fedavg()
    secure = rounds("secure", make, subject.worlds, cases.MODEL, cases.NODES)
    first, second = (secure.run(subject.worlds.present, 1, seed=3)[0, 0, : cases.WIDTH] for _ in range(2))
    exact = secure.run(subject.worlds.present, 1, noisy=False)[0, 0, : cases.WIDTH]
    assert likeness(first - exact, second - exact).ok
    assert not np.array_equal(first, second)
