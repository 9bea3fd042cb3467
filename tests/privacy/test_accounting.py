"""Epsilons: the exact curve, Rényi, PRV, and which of them is charged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp.privacy import accounting
from fedcomp.privacy.__main__ import DATALENS, asymptotic_epsilon, main
from fedcomp.privacy.accounting import (
    Unaccountable,
    classical_epsilon,
    compose,
    gaussian_delta,
    gaussian_epsilon,
    noise_multiplier_for,
    prv_epsilon,
    rdp_epsilon,
    releases_for,
)
from fedcomp.privacy.errors import PrivacyError
from fedcomp.privacy.events import FINE, Event
from fedcomp.privacy.gaussian import gaussian_mu, lattice_excess
from fedcomp.privacy.mechanism import GridGaussian, Votes

DELTA = 1e-5


def gaussian(z: float, *, releases: int = 1, rate: float = 1.0, delta: float = 0.0) -> Event:
    return Event("gaussian", z, releases=releases, rate=rate, delta=delta)


def exact(events: list[Event], delta: float) -> float:
    return compose(events, delta).epsilon


# Columns: classical rule, Opacus RDP, Opacus PRV, exact.
SETTINGS = {
    "mnist-1": (200, 5000, 1290, (0.9957, 0.8081, 0.7482, 0.7381)),
    "gender-1": (700, 9000, 1188, (0.9930, 0.8058, 0.7461, 0.7360)),
    "hair-1": (700, 9000, 1200, (0.9982, 0.8102, 0.7502, 0.7401)),
    "mnist-10": (300, 800, 1635, (9.9689, 9.1281, 8.5067, 8.4963)),
    "fashion-10": (350, 1000, 2190, (9.9696, 9.1288, 8.5073, 8.4969)),
    "gender-10": (500, 700, 729, (9.7887, 8.9659, 8.3542, 8.3438)),
    "hair-10": (500, 700, 750, (9.9601, 9.1201, 8.4993, 8.4889)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("column", range(4), ids=["classical", "rdp", "prv", "exact"])
def test_1_11_e_epsilon_of_the_released_settings(name: str, column: int) -> None:
    k, sigma, releases, expected = SETTINGS[name]
    event = gaussian(sigma / (2.0 * math.sqrt(k)), releases=releases)
    accountant = (classical_epsilon, rdp_epsilon, prv_epsilon, exact)[column]
    assert accountant([event], DELTA) == pytest.approx(expected[column], abs=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_our_orders_are_never_worse_than_opacus_own(name: str) -> None:
    from opacus.accountants import RDPAccountant

    k, sigma, releases, _ = SETTINGS[name]
    z = sigma / (2.0 * math.sqrt(k))
    theirs = RDPAccountant()
    theirs.history = [(z, 1.0, releases)]
    epsilon = rdp_epsilon([gaussian(z, releases=releases)], DELTA)
    assert theirs.get_epsilon(DELTA) - 1e-3 < epsilon <= theirs.get_epsilon(DELTA) + 1e-12


@pytest.mark.parametrize(
    ("rate", "z", "rounds", "prv", "plain", "capped"),
    [
        (0.01, 1.0, 1000, 1.838, 633.9, 17.86),
        (0.1, 1.0, 100, 7.06, 91.8, 17.86),
        (0.1, 2.0, 100, 2.35, 33.1, 7.51),
        (0.5, 2.0, 50, 9.48, 20.7, 13.2),
    ],
)
def test_5_2_sampling_and_caps(rate: float, z: float, rounds: int, prv: float, plain: float, capped: float) -> None:
    sampled = compose([gaussian(z, rate=rate)] * rounds, DELTA)
    assert sampled.epsilon == pytest.approx(prv, rel=2e-3)
    assert sampled.accountant.startswith("PRV (Opacus ")
    assert sampled.error == 0.01
    every = [gaussian(z)] * rounds
    assert exact(every, DELTA) == pytest.approx(plain, rel=3e-3)
    assert compose(every, DELTA, cap=round(rate * rounds)).epsilon == pytest.approx(capped, rel=2e-3)


def test_replace_and_add_remove_differ_by_the_factor_2() -> None:
    noise = 12.0  # on a sum of contributions of norm 1
    there_or_not, exchanged = gaussian(noise), gaussian(noise / 2.0)
    for delta in (1e-3, 1e-5, 1e-8):
        assert exact([exchanged], delta) == exact([there_or_not] * 4, delta)
    assert noise_multiplier_for(1.0, DELTA, releases=4) == pytest.approx(
        2.0 * noise_multiplier_for(1.0, DELTA, releases=1)
    )


def test_1_11_d_every_image_of_a_batch_is_a_release() -> None:
    k, sigma, batch, steps = 200, 5000, 15, 86
    event = gaussian(sigma / (2.0 * math.sqrt(k)), releases=batch)
    orders = accounting.CLASSICAL_ORDERS
    charged = orders * (2.0 * k / sigma**2) * batch * steps
    expected = float(np.min(charged + math.log(1.0 / DELTA) / (orders - 1.0)))
    assert classical_epsilon([event] * steps, DELTA) == pytest.approx(expected, rel=1e-12)
    assert classical_epsilon([gaussian(event.noise_multiplier)] * steps, DELTA) < 0.3 * expected


def test_section_4_the_asymptotic_accountant_reports_too_little() -> None:
    """Why Opacus' gdp is used for nothing: it is below what the other accountants find, and below the truth."""
    from opacus.accountants import GaussianAccountant

    with pytest.warns(UserWarning, match="experimental"):
        theirs = GaussianAccountant()
    theirs.history = [(1.0, 0.01, 1000)]
    reported = theirs.get_epsilon(DELTA)
    assert reported == pytest.approx(1.618, abs=1e-3)
    assert asymptotic_epsilon(0.01, 1.0, 1000) == pytest.approx(reported, abs=1e-3)
    events = [gaussian(1.0, rate=0.01)] * 1000
    rdp, prv = rdp_epsilon(events, DELTA), prv_epsilon(events, DELTA)
    assert (rdp, prv) == pytest.approx((2.101, 1.838), abs=1e-3)
    assert reported < prv - 2 * accounting.PRV_ERROR, "the lower end of PRV's interval is above it"


RATES, MULTIPLIERS, ROUNDS = (0.001, 0.03, 0.3), (0.9, 2.0), (1, 6)


@pytest.mark.slow
def test_prv_is_bit_for_bit_what_opacus_answers_whose_reach_is_not_computed_twice() -> None:
    from opacus.accountants import PRVAccountant

    theirs = PRVAccountant()
    theirs.history = [(1.1, 0.02, 40), (2.5, 0.3, 7)]
    events = [Event("gaussian", noise_multiplier=z, rate=rate) for z, rate, n in theirs.history for _ in range(n)]
    assert prv_epsilon(events, DELTA) == theirs.get_epsilon(DELTA, eps_error=accounting.PRV_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "z"), list(product(RATES, MULTIPLIERS)))
def test_prv_is_never_above_rdp(rate: float, z: float) -> None:
    for rounds in ROUNDS:
        events = [gaussian(z, rate=rate)] * rounds
        prv, rdp = prv_epsilon(events, DELTA), rdp_epsilon(events, DELTA)
        assert prv <= rdp + accounting.PRV_ERROR, "beside the error PRV adds to its own epsilon"
        if rdp > 0.1:
            assert prv <= rdp
        cost = compose(events, DELTA)
        assert cost.epsilon == min(prv, rdp, exact([gaussian(z)] * rounds, DELTA))


def test_prv_contains_the_exact_curve_without_sampling() -> None:
    for z, releases in ((0.3, 1), (1.0, 1), (5.0, 10), (30.0, 200)):
        events = [gaussian(z)] * releases
        upper = prv_epsilon(events, DELTA)
        assert 0.0 < upper - exact(events, DELTA) < 1.1 * accounting.PRV_ERROR


@pytest.mark.slow
def test_sampling_never_costs_more_than_taking_part() -> None:
    for rate, z in ((0.6, 1.2), (0.2, 8.0)):
        assert exact([gaussian(z, rate=rate)] * 3, DELTA) <= exact([gaussian(z)] * 3, DELTA)


@pytest.mark.slow
def test_releases_on_one_sample_are_not_releases_on_fresh_samples() -> None:
    """The images of a batch see the same units: one draw of who takes part, not one each."""
    batch = exact([gaussian(4.0, releases=16, rate=0.05)], DELTA)
    assert batch == pytest.approx(exact([gaussian(1.0, rate=0.05)], DELTA))
    assert exact([[gaussian(4.0, rate=0.05)] * 16], DELTA) == pytest.approx(batch)
    assert batch > 1.5 * exact([gaussian(4.0, rate=0.05)] * 16, DELTA)


@pytest.mark.slow
def test_events_of_one_round_are_on_one_sample_whatever_rates_they_claim() -> None:
    """As independent draws they cost 1.93 instead of 3.5: who is in one of them would mostly not be in the other."""
    mixed = [gaussian(1.0, rate=0.1), gaussian(1.0, rate=0.1001)]
    assert 3.5 < exact([mixed], DELTA) < 3.6
    parts, _ = accounting.profile([*mixed, gaussian(2.0)])
    assert [(part.rate, part.inverse) for part in parts] == [(1.0, 0.25), (0.1001, 2.0)]


def test_next_to_no_noise_costs_everything() -> None:
    for z in (1e-200, 5e-324):
        assert compose([gaussian(z)], DELTA).epsilon == math.inf


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.05, 0.7, 3.0, 30.0, 1e3])
def test_the_exact_curve_agrees_with_fifty_digits(mu: float) -> None:
    mpmath = pytest.importorskip("mpmath", reason="mpmath comes with torch")
    with mpmath.workdps(50):
        m = mpmath.mpf(mu)
        for epsilon in [0.0, *(mu * mu / 2.0 + mu * x for x in (-3.0, -0.5, 0.5, 2.0, 4.0, 8.0))]:
            if epsilon < 0.0:
                continue
            e = mpmath.mpf(epsilon)
            true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
            assert gaussian_delta(mu, epsilon) == pytest.approx(float(true), rel=2e-9, abs=1e-16)


@pytest.mark.slow
@given(st.floats(1e-6, 1e3), st.floats(1e-12, 0.5))
def test_epsilon_inverts_delta_on_the_safe_side(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, epsilon) <= delta
    if epsilon > 0.0:
        assert gaussian_delta(mu, epsilon * (1.0 - 1e-9) - 1e-12 if epsilon > 1e-6 else 0.0) > delta


@pytest.mark.parametrize("noise", ["gaussian", "discrete_gaussian"])
def test_no_noise_costs_everything_in_every_accountant(noise: str) -> None:
    events = [Event(noise, 0.0, grid_sigma=0.0 if noise != "gaussian" else math.inf), gaussian(3.0)]
    for accountant in (rdp_epsilon, prv_epsilon, classical_epsilon, exact):
        assert accountant(events, DELTA) == math.inf
    assert "without noise" in compose(events, DELTA).accountant


def test_nothing_released_costs_nothing() -> None:
    assert compose([], DELTA).epsilon == 0.0


def test_failures_of_events_are_taken_off_delta() -> None:
    events = [gaussian(5.0, delta=1e-7)] * 50
    assert exact(events, DELTA) == exact([gaussian(5.0)] * 50, DELTA - 50e-7)
    assert compose(events, DELTA, cap=20).epsilon == exact([gaussian(5.0)] * 20, DELTA - 20e-7)
    assert exact([gaussian(5.0, delta=1e-7)] * 101, DELTA) == math.inf, "nothing of delta is left"


def test_a_cap_charges_the_dearest_rounds() -> None:
    cheap, dear = gaussian(10.0), gaussian(2.0)
    rounds = [cheap, dear, cheap, [cheap, cheap], dear]
    assert compose(rounds, DELTA, cap=2).epsilon == exact([dear, dear], DELTA)
    assert compose(rounds, DELTA, cap=3).epsilon == exact([dear, dear, cheap, cheap], DELTA)
    assert compose(rounds, DELTA, cap=9).epsilon == exact([dear, dear, cheap, cheap, cheap, cheap], DELTA)


def test_a_cap_on_mixed_noise_covers_every_choice_of_rounds() -> None:
    coarse = Event("discrete_gaussian", 3.0, grid_sigma=3.0)
    skellam = Event("skellam", 2.9, grid_sigma=40.0, grid_l1=500.0)
    rounds = [coarse, skellam, coarse, gaussian(3.2)]
    capped = compose(rounds, DELTA, cap=2).epsilon
    for pair in product(range(4), repeat=2):
        if pair[0] < pair[1]:
            assert compose([rounds[i] for i in pair], DELTA).epsilon <= capped + 1e-12
    assert capped < compose(rounds, DELTA).epsilon


def test_coarse_integer_noise_is_charged_by_zcdp_and_not_amplified() -> None:
    coarse = Event("discrete_gaussian", 1.0, grid_sigma=FINE * 0.99)
    cost = compose([coarse], DELTA)
    assert cost.accountant == "zCDP"
    assert cost.epsilon == rdp_epsilon([gaussian(1.0)], DELTA) > exact([gaussian(1.0)], DELTA)
    sampled = Event("discrete_gaussian", 1.0, grid_sigma=FINE * 0.99, rate=0.01)
    assert compose([sampled], DELTA).epsilon == cost.epsilon
    fine = Event("discrete_gaussian", 1.0, grid_sigma=FINE)
    assert exact([gaussian(1.0)], DELTA) < exact([fine], DELTA) < cost.epsilon
    assert exact([replace(fine, grid_sigma=1e5)], DELTA) == pytest.approx(exact([gaussian(1.0)], DELTA), rel=1e-8)


@pytest.mark.parametrize("sigma", [FINE, 30.0])
@pytest.mark.parametrize("delta", [0.1, 1e-3, 1e-5, 1e-8, 1e-15])
def test_what_a_lattice_adds_to_delta_is_below_what_the_statement_says(sigma: float, delta: float) -> None:
    """Sums the curve of integer noise that is accounted as continuous, wherever the integers lie to its kink."""
    worst = 0.0
    for mu in np.geomspace(0.01, 100.0, 13).tolist():
        epsilon = gaussian_epsilon(mu, delta)
        if epsilon == 0.0:
            continue
        kink = epsilon / mu - mu / 2.0
        steps = np.arange(int((12.0 + abs(kink)) * sigma))
        x = kink + (np.linspace(0.0, 1.0, 21)[:, None] + steps) / sigma
        curve = np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi) * -np.expm1(-mu * (x - kink))
        excess = float(curve.sum(axis=1).max()) / sigma / delta - 1.0
        said = lattice_excess(mu, delta, sigma)
        assert excess <= said
        worst = max(worst, excess / said)
    assert worst > 0.2, "a bound far above the truth would pass as well"


def test_the_lattice_of_real_integer_noise_is_found() -> None:
    """One coordinate moved by 500 of ten steps' noise: delta is 6 % larger than that of the continuous curve."""
    shift, delta = 500, 1e-5
    epsilon = gaussian_epsilon(shift / 10.02, delta)
    y = np.arange(-1500, 1501) + 0.0
    density = np.exp(-(y**2) / (2.0 * 10.02**2))
    gain = np.exp(np.minimum(epsilon - (2.0 * y * shift + shift**2) / (2.0 * 10.02**2), 1.0))
    true = float((density * np.maximum(1.0 - gain, 0.0)).sum() / density.sum())
    assert 1.03 * delta < true < (1.0 + lattice_excess(shift / 10.02, delta, 10.02)) * delta


def integer_epsilon(sigma: float, shift: int, delta: float) -> float:
    """Return the exact epsilon of integer Gaussian noise on one coordinate that moves by ``shift``, by its sum."""
    y = np.arange(-int(12 * sigma), int(12 * sigma) + 1) + 0.0
    density = np.exp(-(y**2) / (2.0 * sigma**2))
    loss = (2.0 * y * shift + shift**2) / (2.0 * sigma**2)

    def spent(epsilon: float) -> float:
        return float((density * -np.expm1(np.minimum(epsilon - loss, 0.0))).sum() / density.sum())

    low, high = 0.0, 2.0 * gaussian_epsilon(shift / sigma, delta) + 1.0
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (low, middle) if spent(middle) <= delta else (middle, high)
    return high


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("z", [0.1, 0.3, 0.5, 1.0, 3.0, 10.0])
def test_a6_epsilon_of_integer_noise_is_an_upper_bound(z: float, delta: float) -> None:
    """At z = 0.3 and delta = 1e-5 the continuous curve says 19.1308, and the integers cost 19.1407."""
    mechanism = Votes(noise_multiplier=z, k=1, shape=(1,))
    true = integer_epsilon(mechanism.grid_sigma, round(mechanism.sensitivity), delta)
    stated = exact([mechanism.event(size=0)], delta)
    assert true <= stated <= true + 0.2 * max(1.0, z**-1 / 5.0)
    assert prv_or_rdp(mechanism.event(size=0), delta) >= true
    if (z, delta) == (0.3, 1e-5):
        assert exact([gaussian(0.3)], delta) == pytest.approx(19.1308, abs=5e-5)
        assert true == pytest.approx(19.1407, abs=5e-5)
        assert stated >= 19.1407


def prv_or_rdp(event: Event, delta: float) -> float:
    try:
        return prv_epsilon([event], delta)
    except Unaccountable:
        return rdp_epsilon([event], delta)


def test_a6_a_budget_that_was_planned_is_not_crossed_by_the_integers() -> None:
    """The continuous plan would be over by a millionth, and the last round of a run would be refused."""
    for mechanism in (Votes, GridGaussian):
        shape = {"k": 3, "shape": (9,)} if mechanism is Votes else {"clip": 1.0, "size": 9}
        for grid_sigma, holds in ((FINE, True), (math.inf, False)):
            z = noise_multiplier_for(4.0, DELTA, releases=7, grid_sigma=grid_sigma)
            event = mechanism(noise_multiplier=z, **shape).event(size=0)
            assert (exact([event] * 7, DELTA) <= 4.0) == holds


@pytest.mark.parametrize("variance", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_skellams_curve_is_above_the_sum(variance: float, shift: int) -> None:
    from scipy.special import ive

    y = np.arange(-90, 91)
    with np.errstate(divide="ignore"):
        here, there = np.log(ive(np.abs(y), variance)), np.log(ive(np.abs(y - shift), variance))
    sigma = math.sqrt(variance)
    event = Event("skellam", sigma / shift, grid_sigma=sigma, grid_l1=float(shift))
    (part,), _ = accounting.profile(event)
    curve = accounting.renyi_curve(part)
    for order in (2, 3, 5, 9):
        terms = order * here + (1 - order) * there
        known = np.isfinite(terms)
        largest = terms[known].max()
        true = (largest + math.log(np.exp(terms[known] - largest).sum())) / (order - 1)
        bound = float(curve[np.flatnonzero(order == accounting.ORDERS)[0]])
        assert true <= bound
        if variance > 50.0:
            assert true > 0.8 * bound, "a sum over too few terms would pass as well"


@pytest.mark.parametrize(
    ("variance", "l2", "l1", "order", "expected"),
    [(100.0, 3.0, 7.0, 5, 5 * 9 / 200 + (9 * 9 + 6 * 7) / 4e4), (0.5, 2.0, 2.0, 20, 20 * 4 / 1.0 + 3 * 2 / 1.0)],
)
def test_skellams_curve_by_hand(variance: float, l2: float, l1: float, order: int, expected: float) -> None:
    sigma = math.sqrt(variance)
    (part,), _ = accounting.profile(Event("skellam", sigma / l2, grid_sigma=sigma, grid_l1=l1, releases=3))
    curve = accounting.renyi_curve(part)
    assert curve[np.flatnonzero(order == accounting.ORDERS)[0]] == pytest.approx(3.0 * expected)
    assert np.all(np.isinf(curve[np.floor(accounting.ORDERS) != accounting.ORDERS])), "proven for whole orders only"


def test_skellam_without_its_sensitivity_is_refused() -> None:
    with pytest.raises(ConfigError, match="grid_l1"):
        compose([Event("skellam", 1.0, grid_sigma=10.0)], DELTA)


def test_skellam_on_a_fine_grid_costs_what_a_gaussian_does_by_rdp() -> None:
    fine = Event("skellam", 2.0, grid_sigma=1e6, grid_l1=1e6)
    assert exact([fine], DELTA) == pytest.approx(rdp_epsilon([gaussian(2.0)], DELTA), rel=2e-3)


@pytest.mark.slow
def test_where_prv_cannot_answer_rdp_does_and_says_so() -> None:
    history = {accounting.profile(gaussian(0.5, rate=1e-7)): 10**8}
    cost = accounting.compose_rounds(history, DELTA)
    assert cost.accountant.startswith("RDP")
    assert "points" in cost.accountant
    assert math.isfinite(cost.epsilon)
    for events, delta, why in (
        ([gaussian(0.02, rate=0.5)], DELTA, "double precision"),
        ([gaussian(1.0, rate=0.5)], 1e-13, "below"),
        ([gaussian(1.0 + n / 100.0, rate=0.5) for n in range(30)], DELTA, "different"),
        ([Event("discrete_gaussian", 1.0, grid_sigma=1.0)], DELTA, "Gaussian mechanism only"),
    ):
        with pytest.raises(Unaccountable, match=why):
            prv_epsilon(events, delta)
    coarse = compose([gaussian(0.02, rate=0.5)], DELTA)
    assert coarse.epsilon == exact([gaussian(0.02)], DELTA)
    assert "no amplification" in coarse.accountant
    assert "double precision" in coarse.accountant


def test_contradicting_accountants_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_prv_of", lambda history, delta, error: 9.0)
    with pytest.raises(PrivacyError, match="contradict"):
        compose([gaussian(1.0, rate=0.01)] * 7, DELTA)


@pytest.mark.parametrize("grid_sigma", [FINE, 300.0, math.inf])
@pytest.mark.parametrize("cap", [0, 4])
def test_planning_is_tight_and_safe(cap: int, grid_sigma: float) -> None:
    z = noise_multiplier_for(2.0, 1e-6, releases=100, cap=cap, grid_sigma=grid_sigma)
    charged = cap or 100

    def spent(multiplier: float) -> float:
        noise = "gaussian" if grid_sigma == math.inf else "discrete_gaussian"
        return exact([Event(noise, multiplier, grid_sigma=grid_sigma)] * charged, 1e-6)

    assert spent(z) <= 2.0 < spent(z * (1 - 1e-9))
    assert releases_for(2.0, 1e-6, z, grid_sigma=grid_sigma) == charged
    assert releases_for(2.0, 1e-6, z / 20.0) == 0 if cap else True
    assert releases_for(2.0, 1e-6, 0.0) == 0


@pytest.mark.long
def test_planning_with_sampling_is_tight_and_safe() -> None:
    z = noise_multiplier_for(1.0, DELTA, releases=200, rate=0.05, grid_sigma=math.inf)
    assert exact([gaussian(z, rate=0.05)] * 200, DELTA) <= 1.0
    assert exact([gaussian(z * 0.995, rate=0.05)] * 200, DELTA) > 1.0
    rounds = releases_for(1.0, DELTA, z, rate=0.05, grid_sigma=math.inf)
    assert rounds >= 200
    assert (
        exact([gaussian(z, rate=0.05)] * rounds, DELTA) <= 1.0 < exact([gaussian(z, rate=0.05)] * (rounds + 1), DELTA)
    )


def test_a_plan_is_safe_to_the_last_bit_where_sampling_gains_nothing() -> None:
    """The noise without sampling is then the answer; it came out a bit too small."""
    rate, epsilon = 0.999999, 0.3
    z = noise_multiplier_for(epsilon, DELTA, releases=3, rate=rate)
    assert exact([Event("discrete_gaussian", z, grid_sigma=FINE, rate=rate)] * 3, DELTA) <= epsilon


def test_of_an_infinite_epsilon_mu_is_infinite() -> None:
    assert gaussian_mu(math.inf, DELTA) == math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: gaussian_epsilon(1.0, 0.0),
        lambda: gaussian_delta(1.0, -1.0),
        lambda: gaussian_delta(-1.0, 1.0),
        lambda: compose([gaussian(1.0)], 1.0),
        lambda: compose([gaussian(1.0)], DELTA, cap=-1),
        lambda: compose([gaussian(1.0, rate=0.5)], DELTA, cap=3),
        lambda: compose([[]], DELTA),
        lambda: classical_epsilon([gaussian(1.0, rate=0.5)], DELTA),
        lambda: noise_multiplier_for(0.0, DELTA, releases=3),
        lambda: noise_multiplier_for(1.0, DELTA, releases=0),
        lambda: releases_for(1.0, float("nan"), 3.0),
        # Before, neither of them came to an end.
        lambda: noise_multiplier_for(math.inf, DELTA, releases=3),
        lambda: releases_for(math.inf, DELTA, 3.0),
    ],
)
def test_figures_out_of_range_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()


def test_the_commands_settings_are_the_tested_ones() -> None:
    assert [row[1:] for row in DATALENS] == [tuple(row[:3]) for row in SETTINGS.values()]


def test_the_page_has_the_figures_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    page = (Path(__file__).parents[2] / "docs" / "background" / "privacy.md").read_text()
    *others, sampling, textbook, grid = capsys.readouterr().out.split("\n\n")
    assert [len(table.splitlines()) - 2 for table in others] == [7, 2]  # DataLens' settings, which are on no page
    for table, count in ((sampling, 4), (textbook, 3), (grid, 4)):
        rows = table.strip().splitlines()[2:]
        assert len(rows) == count
        for row in rows:
            assert "| " + " | ".join(re.split(r"  +", row.strip())) + " |" in page


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--epsilon 1 --releases 100", "noise multiplier 37.3553"),
        ("--epsilon 1 --releases 100 --cap 10 --adjacency replace", "standard deviation 23.6256"),
        ("--noise-multiplier 37.36 --releases 100", "epsilon 0.9998"),
        ("--epsilon 1 --noise-multiplier 37.36", "releases 100;"),
    ],
)
def test_the_planner_answers_for_the_third(arguments: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 0
    assert found in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "--epsilon 1",
        "--epsilon 1 --releases 5 --rate 0.1 --adjacency replace",
        "--epsilon 1 --releases 5 --population 100000",
        "--epsilon 0.01 --noise-multiplier 1",
    ],
)
def test_the_planner_refuses_what_cannot_be_claimed(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "z", "rounds"), [(0.01, 1.0, 1000), (0.1, 2.0, 100), (0.5, 2.0, 50)])
def test_5_4_dp_accounting_finds_the_same(rate: float, z: float, rounds: int) -> None:
    dp = pytest.importorskip("dp_accounting", reason="the optional extra 'dp' is not installed")
    from dp_accounting import pld

    theirs = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds)
    epsilon = theirs.get_epsilon(DELTA)
    ours = exact([gaussian(z, rate=rate)] * rounds, DELTA)
    assert epsilon - 1e-3 <= ours <= epsilon + 1.2 * accounting.PRV_ERROR


@pytest.mark.parametrize("z", [1.0, 2.0, 30.0])
def test_dp_accounting_finds_the_factor_2_of_replace(z: float) -> None:
    dp = pytest.importorskip("dp_accounting", reason="the optional extra 'dp' is not installed")
    from dp_accounting import pld

    theirs = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    theirs.compose(dp.GaussianDpEvent(z))
    assert theirs.get_epsilon(DELTA) == pytest.approx(exact([gaussian(z / 2.0)], DELTA), rel=2e-3)


def test_exchanged_units_are_amplified_less() -> None:
    """Why Poisson sampling is refused under replace: the accountants' figure would be far too small."""
    dp = pytest.importorskip("dp_accounting", reason="the optional extra 'dp' is not installed")
    from dp_accounting import pld

    theirs = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    theirs.compose(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)), 1000)
    assert theirs.get_epsilon(DELTA) == pytest.approx(2.84, abs=0.01)
