"""The tools of the audit on scores without randomness: what they find is known exactly."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from every_vote import every_vote, neighbours
from scipy.special import ndtri

from fedcomp.errors import ConfigError
from fedcomp.privacy.audit import (
    TIGHT,
    Distance,
    adversarial,
    audit_canary,
    audit_run,
    farthest,
    guess_p_value,
    likeness,
    most_errors,
    noise_scale,
    off_grid,
    power,
    project,
)
from fedcomp.rng import Key

pytestmark = pytest.mark.audit


def quantiles(mu: float, count: int) -> np.ndarray:
    """Return ``count`` evenly spaced quantiles of N(mu, 1): scores without randomness."""
    return mu + ndtri((np.arange(count) + 0.5) / count)


def total(units) -> np.ndarray:
    return np.sum([np.asarray(unit, np.int64) for unit in units], axis=0)


def test_audit_A_the_exhaustive_search_finds_both_sensitivities_of_votes() -> None:
    votes = every_vote(5, 2)
    # 1 + 5 * 2 + 10 * 4 vectors with at most two of five votes.
    assert len(votes) == 51
    base = [votes[7], votes[30]]
    there = farthest(total, neighbours(base, votes, "add_remove"), math.sqrt(2))
    other = farthest(total, neighbours(base, votes, "replace"), 2.0 * math.sqrt(2))
    assert there.found == pytest.approx(math.sqrt(2), rel=1e-12)
    assert other.found == pytest.approx(2.0 * math.sqrt(2), rel=1e-12)
    assert (there.pairs, other.pairs) == (51, 51 * 50 // 2)
    assert there.ok
    assert other.ok


def test_audit_A_a_claim_too_small_and_a_claim_too_large_are_both_wrong() -> None:
    found = Distance(1.0, 1.0, 1)
    assert found.ok
    assert not Distance(1.0, 0.999, 1).ok
    assert not Distance(1.0, 1.02, 1).ok
    assert Distance(TIGHT, 1.0, 1).ok
    assert not Distance(math.nan, 1.0, 1).ok
    assert not Distance(math.inf, 1.0, 1).ok


def test_audit_A_a_sum_that_is_no_number_is_never_sound() -> None:
    pairs = [([0.0], [1.0]), ([0.0], [math.nan]), ([0.0], [2.0])]
    assert not farthest(lambda units: np.array(units), pairs, 2.0).ok
    with pytest.raises(ConfigError, match="no pairs"):
        farthest(total, [], 1.0)


def test_audit_A_adversarial_vectors_lie_on_the_boundary_beyond_it_and_opposite_each_other() -> None:
    vectors = adversarial(16, 2.0, Key(0, "adversarial"))
    lengths = np.array([math.sqrt(math.fsum((v / np.abs(v).max()) ** 2)) * np.abs(v).max() for v in vectors])
    assert np.isclose(lengths, 2.0, rtol=1e-9).sum() >= 72
    assert lengths.max() >= 1e199
    assert lengths.min() < 1.0
    assert all(any(np.array_equal(v, -w) for w in vectors) for v in vectors[:8])


def test_audit_B_three_percent_too_little_noise_is_seen_in_100_000_residuals() -> None:
    exact = quantiles(0.0, 100_000)
    assert noise_scale(exact, 1.0).ok
    assert noise_scale(exact, 1.0).value == pytest.approx(1.0, abs=1e-4)
    for sigma in (1.03, 0.97):
        found = noise_scale(exact, sigma)
        assert found.p < 1e-30
        assert not found.ok
    # And none at all.
    assert noise_scale(np.zeros(10), 1.0).p == 0.0
    assert not noise_scale(np.array([1.0, math.nan]), 1.0).ok
    with pytest.raises(ConfigError, match="at least one"):
        noise_scale(exact, 0.0)


def test_audit_B_the_p_value_is_that_of_the_chi_square_distribution() -> None:
    # With two degrees of freedom the survival function is exp(-x / 2).
    x = 4.0
    assert noise_scale(np.array([x**0.5, 0.0]), 1.0).p == pytest.approx(2.0 * math.exp(-x / 2.0), rel=1e-12)


def test_audit_C_clopper_pearson_at_its_known_corners() -> None:
    # No error in n trials: 1 - alpha^(1/n); all errors: 1.
    assert most_errors(0, 1000, 0.995) == pytest.approx(1.0 - 0.005 ** (1 / 1000), rel=1e-9)
    assert most_errors(1000, 1000, 0.995) == 1.0
    # By its definition P[Binomial(20, bound) <= 3] is what is left.
    p = float(most_errors(3, 20, 0.99))
    assert sum(math.comb(20, i) * p**i * (1 - p) ** (20 - i) for i in range(4)) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize(("trials", "bound"), [(2000, 0.85), (5000, 0.90), (20000, 0.95)])
def test_audit_C_the_bound_on_quantiles_of_mu_1(trials: int, bound: float) -> None:
    found = audit_canary(quantiles(0.0, trials), quantiles(1.0, trials), 0.5)
    assert found == pytest.approx(bound, abs=0.005)
    assert found < 1.0


@pytest.mark.parametrize("mu", [1.2, math.sqrt(2), 2.0])
def test_audit_C_a_claim_of_1_is_refuted_when_more_is_true(mu: float) -> None:
    assert audit_canary(quantiles(0.0, 5000), quantiles(mu, 5000), mu / 2.0) > 1.0


@pytest.mark.parametrize(
    ("trials", "mu", "alarms"),
    [
        (2000, 1.0, 0.0),
        (2000, 1.1, 0.098),
        (2000, 1.2, 0.861),
        (2000, math.sqrt(2), 1.0),
        (2000, 2.0, 1.0),
        (5000, 1.0, 0.0),
        (5000, 1.1, 0.547),
        (5000, 1.2, 1.0),
        (20000, 1.0, 0.0),
        (20000, 1.1, 1.0),
    ],
)
def test_audit_C_table_of_power(trials: int, mu: float, alarms: float) -> None:
    found, _ = power(mu, 1.0, trials)
    assert found == pytest.approx(alarms, abs=2e-3)
    if mu == 1.0:
        # Less than the 1 % that the confidence allows.
        assert found < 1e-3


def test_audit_C_power_is_that_of_simulated_audits() -> None:
    mu, trials, runs = 1.1, 500, 400
    draws = Key(0, "power").generator().standard_normal((runs, 2, trials))
    found = [audit_canary(a, b + mu, mu / 2.0) for a, b in draws]
    alarms, mean = power(mu, 0.87, trials)
    assert 0.1 < alarms < 0.6
    seen = float(np.mean(np.array(found) > 0.87))
    assert seen == pytest.approx(alarms, abs=4.0 * math.sqrt(alarms * (1 - alarms) / runs))
    assert float(np.mean(found)) == pytest.approx(mean, abs=0.02)


def test_audit_C_noise_beyond_recognition_gives_zero_and_no_noise_gives_what_the_trials_allow() -> None:
    same = quantiles(0.0, 100)
    assert audit_canary(same, same, 0.0) == 0.0
    assert audit_canary(np.full(5, 9.0), np.full(5, 9.0), 0.0) == 0.0
    certain = audit_canary(np.zeros(3000), np.ones(3000), 0.5)
    bound = 1.0 - 0.005 ** (1 / 3000)
    assert certain == pytest.approx(-2.0 * NormalDist().inv_cdf(bound), rel=1e-9)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="NaN or infinite"):
            audit_canary(np.array([wrong]), np.array([0.0]), 0.5)
    with pytest.raises(ConfigError, match="as many of both"):
        audit_canary(same, same[:1], 0.5)


def test_audit_C_projection_is_the_distance_along_the_canary() -> None:
    without, within = np.array([1.0, 1.0]), np.array([4.0, 5.0])
    scores, threshold = project(np.array([without, within, [1.0, 6.0], [-3.0, 4.0]]), without, within)
    np.testing.assert_allclose(scores, [0.0, 5.0, 4.0, 0.0], atol=1e-12)
    assert threshold == 2.5
    with pytest.raises(ConfigError, match="moves the output by 0"):
        project(np.zeros((1, 2)), without, without)


def test_audit_D_a_hundred_right_guesses_certify_no_more_than_3_49() -> None:
    m, r = 1000, 100
    included = np.arange(m) >= m // 2
    found = audit_run(np.arange(m, dtype=float), included, guesses=r, delta=0.0)
    root = 0.05 ** (1 / r)
    assert found == (r, pytest.approx(math.log(root / (1.0 - root)), rel=1e-9))
    assert found[1] == pytest.approx(3.493, abs=1e-3)
    loose = audit_run(np.arange(m, dtype=float), included, guesses=r, delta=1e-5)
    assert loose == (r, pytest.approx(3.47, abs=0.01))


def test_audit_D_quantiles_of_a_gaussian_canary_certify_less_than_is_true_and_half_right_nothing() -> None:
    m, mu = 1000, 1.0
    included = np.arange(m) % 2 == 0
    scores = np.empty(m)
    scores[included], scores[~included] = quantiles(mu, m // 2), quantiles(0.0, m // 2)
    correct, low = audit_run(scores, included, guesses=100, delta=1e-5)
    assert 85 <= correct < 100
    assert 1.5 < low < 3.4
    blind = np.empty(m)
    blind[included] = blind[~included] = quantiles(0.0, m // 2)
    assert audit_run(blind, included, guesses=100, delta=1e-5)[1] == 0.0


def test_audit_D_the_p_value_is_binomial_and_delta_adds_to_it() -> None:
    r, v, eps = 20, 17, 0.7
    rate = 1.0 / (1.0 + math.exp(-eps))

    def mass(i: int) -> float:
        return math.comb(r, i) * rate**i * (1.0 - rate) ** (r - i)

    tail = sum(mass(i) for i in range(v, r + 1))
    assert guess_p_value(v, r, 50, eps, 0.0) == pytest.approx(tail, rel=1e-12)
    most = max(sum(mass(v - j) for j in range(1, i + 1)) / i for i in range(1, v + 1))
    assert guess_p_value(v, r, 50, eps, 1e-4) == pytest.approx(tail + 2 * 50 * 1e-4 * most, rel=1e-9)
    assert guess_p_value(0, r, 50, eps, 0.0) == 1.0
    with pytest.raises(ConfigError, match="cannot be"):
        guess_p_value(21, 20, 50, eps, 0.0)
    with pytest.raises(ConfigError, match="at least 2"):
        audit_run(np.zeros(3), np.zeros(3, bool), guesses=4, delta=0.0)


def test_audit_E_multiples_of_the_step_are_on_the_grid_and_others_are_not() -> None:
    step = 0.1 / 3.0
    on = np.arange(-5000, 5000) * step
    assert off_grid(on, step) == 0.0
    on[:100] += 1e-9
    assert off_grid(on, step) == pytest.approx(0.01, abs=1e-4)
    assert off_grid(np.float32([0.5, 0.25]), 2.0**-24) == 0.0
    with pytest.raises(ConfigError, match="positive step"):
        off_grid(on, 0.0)


def test_audit_E_float_noise_betrays_which_of_two_values_it_hides() -> None:
    """The attack that the grid is there against: unit noise on 0 and on 1, in float32 and in float64."""
    draws = Key(0, "float").generator().standard_normal(200_000)
    for kind, step in ((np.float32, 2.0**-24), (np.float64, 2.0**-53)):
        noise = draws.astype(kind)
        assert off_grid(kind(0.0) + noise, step) == pytest.approx(0.258, abs=0.01)
        assert off_grid(kind(1.0) + noise, step) == 0.0


def test_audit_F_fresh_noise_is_not_alike_and_repeated_noise_is() -> None:
    draws = Key(0, "fresh").generator().standard_normal((2, 500))
    assert likeness(*draws).ok
    for same in (draws[0], -2.0 * draws[0], draws[0] + 0.5 * draws[1]):
        assert not likeness(draws[0], same).ok
    assert not likeness(np.zeros(50), np.zeros(50)).ok
    with pytest.raises(ConfigError, match="at least 30"):
        likeness(draws[0, :5], draws[1, :5])
