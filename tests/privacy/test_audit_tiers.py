"""Tiers A to F on the code that trainings use: mechanisms, and strategies through Flower's own hooks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from every_vote import every_vote, neighbours

from fedcomp.experiments.audits import cases, systems
from fedcomp.experiments.audits.subjects import ClientReply, Subject, Worlds, mean, rounds, sums
from fedcomp.experiments.audits.tiers import tier_a, tier_b, tier_c, tier_e, tier_f
from fedcomp.privacy.audit import audit_run, likeness, noise_scale
from fedcomp.privacy.entropy import SystemEntropy
from fedcomp.privacy.mechanism import Votes
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
@pytest.mark.parametrize(("adjacency", "factor"), [("zero_out", 1.0), ("add_remove", 1.0), ("replace", 2.0)])
def test_audit_A_exhaustive_search_of_votes_reaches_the_claim_under_every_adjacency(adjacency, factor) -> None:
    """All 51 votes of five coordinates and k = 2, against all others where they are exchanged."""
    mechanism = Votes(noise_multiplier=1.0, adjacency=adjacency, k=2, shape=(5,))
    votes = every_vote(5, 2)
    base = [(0, votes[3]), (1, votes[40])]
    pairs = list(neighbours(base, [(9, vote) for vote in votes], adjacency))
    subject = sums("all votes", mechanism, (5,), Worlds(base, base, pairs))
    found = tier_a(subject)
    assert found.ok
    assert found.found == pytest.approx(1.0, rel=1e-12)
    # And in votes: sqrt(2), twice that for replace.
    assert found.found * mechanism.sigma == pytest.approx(factor * math.sqrt(2.0), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_audit_A_what_is_not_finite_moves_nothing(bad: float) -> None:
    grid, round_ = cases.grid_sum(), cases.dp_fedavg()
    for subject, width in ((grid, 50), (round_, cases.WIDTH)):
        update = np.ones(width, np.float32)
        update[3] = bad
        base = list(subject.worlds.absent)
        with_bad = subject.run([*base, (3, update)], 1, noisy=False)
        np.testing.assert_array_equal(with_bad, subject.run(base, 1, noisy=False))


def test_audit_A_a_client_that_answers_twice_moves_the_sum_once() -> None:
    subject = cases.grid_sum()
    once = subject.worlds.present
    both = (subject.run(data, 1, noisy=False) for data in (once, [*once, once[-1]]))
    np.testing.assert_array_equal(*both)


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


@pytest.mark.slow
def test_audit_B_an_empty_round_releases_the_same_noise_and_costs_the_same() -> None:
    subject = cases.dp_fedavg()
    empty = replace(subject, worlds=Worlds([], []))
    outputs = empty.run([], 60)[..., : cases.WIDTH]
    assert noise_scale(outputs, subject.scale[0]).ok
    assert empty.ledger(1).epsilon() == subject.ledger(1).epsilon() > 0.0


@pytest.mark.long
def test_audit_C_rounds_add_up_as_the_ledger_says() -> None:
    found = tier_c(cases.votes_sum(z=2.0), runs=1500, rounds=4)
    # A mu of 1, and what integers may cost beyond the continuous curve.
    assert 1.0 < found.claimed < 1.001
    assert found.ok
    assert found.found > 0.8


def test_audit_C_integer_buffers_weights_and_losses_of_replies_tell_nothing() -> None:
    """The canary differs in nothing but what beside its update is in a reply: there is no direction to look in."""
    subject = cases.dp_fedavg(messages=True)
    update = subject.worlds.present[-1][1].update
    said = [
        ClientReply(update, examples=1, loss=0.0, buffers=0),
        ClientReply(update, examples=10**6, loss=1e9, buffers=10**6),
    ]
    base = list(subject.worlds.absent)
    one, other = (subject.run([*base, (cases.NODES - 1, answer)], 3, seed=1) for answer in said)
    np.testing.assert_array_equal(one, other)


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


def test_audit_F_global_seeds_do_not_touch_secure_noise() -> None:
    mechanism = Votes(noise_multiplier=4.0, k=16, shape=(400,))
    drawn = []
    for _ in range(2):
        np.random.seed(7)  # noqa: NPY002  # exactly what must not matter
        torch.manual_seed(7)
        drawn.append(mechanism.perturb(np.zeros(400, np.int64), SystemEntropy()))
    assert likeness(*drawn).ok
    assert not np.array_equal(*drawn)


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
