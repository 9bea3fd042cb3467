"""Integer noise has the distribution it claims: by statistics, and by what its tables are made of."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedcomp.errors import ConfigError
from fedcomp.privacy import staircase as stairs_module
from fedcomp.privacy.densities import TOLERANCE, Density, Gauss, Poisson
from fedcomp.privacy.entropy import Entropy, SeededEntropy, SystemEntropy
from fedcomp.privacy.noise import discrete_gaussian, draw, failure, skellam
from fedcomp.privacy.staircase import Staircase, below, staircase
from fedcomp.rng import Key

SIGMAS = (0.02, 0.1, 0.7, 1.0, 31.0, 64.0, 1000.5, 2.0**20 + 0.25, 2.0**40)
DENSITIES = [Gauss(s) for s in SIGMAS] + [Poisson(Fraction(s) ** 2 / 2) for s in (*SIGMAS, 90.0, 91.0)]


def stream(name: str, layer: int = 0) -> SeededEntropy:
    return SeededEntropy(Key(7, f"test/noise/{name}", layer=layer), insecure_deterministic=True)


def tail_of_chi_square(value: float, freedom: int) -> float:
    """Return P(chi-square >= value), by the transformation of Wilson and Hilferty."""
    z = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def misfit(draws: np.ndarray, expected: dict[int, float]) -> float:
    """Return the p-value of the draws under the probabilities; cells of fewer than ten are put together."""
    counts = Counter(draws.tolist())
    cells, rest_seen, rest_due = [], len(draws), float(len(draws))
    for x, p in expected.items():
        if p * len(draws) >= 10:
            cells.append((counts[x], p * len(draws)))
            rest_seen -= counts[x]
            rest_due -= p * len(draws)
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    if rest_due > 1.0:
        statistic += (rest_seen - rest_due) ** 2 / rest_due
    else:
        assert rest_seen <= 20
    return tail_of_chi_square(statistic, max(1, len(cells) - 1 + (rest_due > 1.0)))


def gauss_pmf(sigma: float) -> dict[int, float]:
    reach = math.ceil(12 * sigma)
    weights = {x: math.exp(-x * x / (2 * sigma * sigma)) for x in range(-reach, reach + 1)}
    total = math.fsum(weights.values())
    return {x: w / total for x, w in weights.items()}


def skellam_pmf(sigma: float) -> dict[int, float]:
    mean = sigma * sigma / 2
    one = [math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(math.ceil(mean + 40 + 12 * sigma))]
    reach = math.ceil(10 * sigma) + 4
    return {
        x: math.fsum(one[k] * one[k - x] for k in range(max(0, x), len(one) + min(0, x))) for x in range(-reach, reach)
    }


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.7])
def test_draws_fit_their_distribution(sigma: float) -> None:
    assert misfit(discrete_gaussian(sigma, 200_000, stream("pmf")), gauss_pmf(sigma)) > 1e-6
    assert misfit(skellam(sigma, 200_000, stream("skellam")), skellam_pmf(sigma)) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 4.3])
def test_the_rational_sampler_has_the_same_distribution(sigma: float) -> None:
    assert misfit(discrete_gaussian(sigma, 3_000, stream("exact"), exact=True), gauss_pmf(sigma)) > 1e-6


def test_the_fit_notices_another_parameter() -> None:
    assert misfit(discrete_gaussian(3.8, 200_000, stream("pmf")), gauss_pmf(3.7)) < 1e-6
    assert misfit(discrete_gaussian(1.5, 200_000, stream("pmf")), skellam_pmf(1.5)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam", "gaussian"])
@pytest.mark.parametrize("sigma", [1.0, 10.0, 64.0, 1000.5, 2.0**20, 2.0**40])
def test_variance_by_chi_square(noise: str, sigma: float) -> None:
    count = 100_000
    draws = draw(noise, sigma, count, stream(f"variance/{noise}")).astype(np.float64) / sigma
    # Of a standard normal: the sum of squares is chi-square with so many degrees of freedom. A deficit of 3 % fails.
    z = (float(np.sum(draws**2)) - count) / math.sqrt(2 * count)
    assert abs(z) < 4.9
    assert abs(float(draws.mean())) * math.sqrt(count) < 4.9


@pytest.mark.slow
@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_float_density_is_within_its_tolerance(density: Density) -> None:
    rng = Key(1, "points").generator()
    spread = max(1.0, density.spread)
    at = np.unique(np.concatenate([np.arange(-3, 4), (rng.uniform(-9, 9, 40) * spread).astype(np.int64)]))
    for x, value in zip(at.tolist(), density.relative(at).tolist(), strict=True):
        low, high = density.bounds(x, 40)
        assert low <= high
        if high > Fraction(math.exp(-64)):
            assert (1 - Fraction(TOLERANCE)) * high <= Fraction(value) <= (1 + Fraction(TOLERANCE)) * low


@pytest.mark.slow
@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_no_stair_is_below_the_density_and_no_squeeze_above_it(density: Density) -> None:
    made = staircase(density)
    rng = Key(2, "stairs").generator()
    entries = [0, 1, 2 * made.stairs - 1, *rng.integers(0, 2 * made.stairs, 25).tolist()]
    for entry in entries:
        low, high = (entry >> 1) << made.width, (((entry >> 1) + 1) << made.width) - 1
        inner, outer = (~low, ~high) if entry & 1 else (low, high)
        weight = int(made.weights[entry])
        assert made.scale * density.bounds(inner, 40)[1] <= weight
        squeeze = Fraction(int(made.squeeze[entry]), 1 << made.bits)
        assert squeeze * weight <= made.scale * density.bounds(outer, 40)[0]
    for piece in range(4):
        start = (made.stairs << made.width) + (piece << made.tail)
        for x in (start, ~start):
            # The tail's weight 4 is halved from piece to piece and spread over 2^tail integers of a piece.
            reached = Fraction(4, (1 << made.tail) * 2 ** (piece + 1))
            assert Fraction(made.scale, 1 << made.width) * density.bounds(x, 40)[1] <= reached


@pytest.mark.parametrize("density", [Gauss(1000.5), Poisson(Fraction(9, 2)), Poisson(Fraction(10**9))], ids=str)
def test_alias_table_has_exactly_the_weights(density: Density) -> None:
    made = staircase(density)
    capacity = 1 << 53
    weights = [0] * 2048
    for column, (threshold, other) in enumerate(zip(made.threshold.tolist(), made.alias.tolist(), strict=True)):
        weights[column] += threshold
        weights[other] += capacity - threshold
    assert weights[: 2 * made.stairs] == made.weights.tolist()
    assert weights[2 * made.stairs : 2 * made.stairs + 2] == [4, 4]
    assert sum(weights[2 * made.stairs + 3 :]) == 0
    assert weights[2 * made.stairs + 2] < 1 << 48


def test_a_density_that_float64_rounds_to_0_is_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """At sigma = 0.02 the density of -1 is e^-1250: next to never drawn, but no impossible outcome."""
    made = staircase(Gauss(0.02))
    assert float(made.density.relative(np.array([-1]))[0]) == 0.0
    asked = []
    monkeypatch.setattr(Staircase, "keep", lambda self, *args: bool(asked.append(args[:3])) or True)
    for number in (0, 1):
        kept = np.array([False])
        place = [np.array([n]) for n in (0, 1, -1)]
        made.settle(*place, np.array([number], np.uint64), kept, Listed(b""))
        assert bool(kept[0]) is (number == 0)
    assert asked == [(1, -1, 0)]


def test_most_proposals_are_kept() -> None:
    for sigma in (31.0, 1e6):
        made = staircase(Gauss(sigma))
        kept = made.propose(20_000, stream("kept")).size
        assert kept > 0.98 * 20_000


@pytest.mark.slow
@pytest.mark.parametrize("make", [Gauss, lambda s: Poisson(Fraction(s) ** 2)], ids=["gauss", "poisson"])
def test_what_float64_cannot_decide_is_settled_with_more_digits(make, monkeypatch: pytest.MonkeyPatch) -> None:
    # So wide a tolerance leaves most draws to the exact comparison; the distribution may not change.
    monkeypatch.setattr(stairs_module, "TOLERANCE", 0.2)
    settled = []
    keep = Staircase.keep
    monkeypatch.setattr(Staircase, "keep", lambda *args: settled.append(1) or keep(*args))
    density = make(2.5)
    draws = staircase.__wrapped__(density).sample(8_000, stream("settled"))
    values = {x: float(density.bounds(x, 20)[0]) for x in range(-40, 41)}
    total = math.fsum(values.values())
    assert len(settled) > 4_000
    assert misfit(draws, {x: v / total for x, v in values.items()}) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("density", [Gauss(2.0), Gauss(500.0), Poisson(Fraction(40))], ids=str)
def test_beyond_the_last_stair_the_tail_falls_like_the_density(density: Density) -> None:
    made = staircase(density)
    source = stream("tail")
    found = [x for x in (made.beyond(i & 1, source) for i in range(1_500)) if x is not None]
    first = made.stairs << made.width
    assert found
    assert all(x >= first or x <= ~first for x in found)
    # Kept with the ratio of density and hat: the first integer beyond is the likeliest by far.
    right = [x - first for x in found if x > 0]
    due = [float(density.bounds(first + i, 20)[0]) for i in range(max(right, default=0) + 8 * (1 << made.width))]
    mean = sum(i * p for i, p in enumerate(due)) / sum(due)
    spread = math.sqrt(sum((i - mean) ** 2 * p for i, p in enumerate(due)) / sum(due))
    assert abs(sum(right) / len(right) - mean) < 5 * spread / math.sqrt(len(right)) + 1e-9


class Listed(Entropy):
    """Gives the bytes it is made with, and fails beyond them."""

    secure = False
    description = "a list"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def bytes(self, count: int) -> bytes:
        assert len(self.data) >= count
        out, self.data = self.data[:count], self.data[count:]
        return out


def test_an_undecided_comparison_draws_more_digits_of_both() -> None:
    third = Fraction(1, 3)
    asked = []

    def bounds(digits: int) -> tuple[Fraction, Fraction]:
        asked.append(digits)
        return third - Fraction(1, 10**digits), third + Fraction(1, 10**digits)

    # 0.0101... is 1/3: 62 digits of it, then 64 more, and only the third word leaves the pattern.
    start = int("01" * 31, 2)
    same = int("01" * 32, 2).to_bytes(8, "little")
    assert below(start, 62, bounds, Listed(same + bytes(8))) is True
    assert below(start, 62, bounds, Listed(same + b"\xff" * 8)) is False
    assert asked == [30, 60, 90, 30, 60, 90]


def test_exact_ties_need_no_digits() -> None:
    half = Fraction(1, 2)
    assert below(0, 1, lambda _: (half, half), Listed(b"")) is True
    assert below(1, 1, lambda _: (half, half), Listed(b"")) is False


@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
def test_low_bits_are_fair_and_draws_independent(noise: str) -> None:
    draws = draw(noise, 1000.0, 100_000, stream("bits"))
    for bit in range(4):
        assert abs(float(np.mean(draws >> bit & 1)) - 0.5) < 5 * 0.5 / math.sqrt(draws.size)
    for lag in (1, 2, 7):
        product = draws[:-lag].astype(float) * draws[lag:] / 1000.0**2
        assert abs(product.mean()) < 5 / math.sqrt(product.size)


def test_audit_F_global_seeds_change_nothing() -> None:
    def seeded() -> np.ndarray:
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        random.seed(5)
        return discrete_gaussian(100.0, 1000, SystemEntropy())

    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert not np.array_equal(seeded(), seeded())
    np.random.seed(5)  # noqa: NPY002
    untouched = np.random.get_state()[1].copy()  # noqa: NPY002
    seeded()
    np.testing.assert_array_equal(np.random.get_state()[1], untouched)  # noqa: NPY002
    assert before.shape == untouched.shape


@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam", "gaussian"])
def test_shape_and_dtype(noise: str) -> None:
    for count in (0, 1, 5):
        out = draw(noise, 3.0, count, stream("shape"))
        assert out.shape == (count,)
        assert out.dtype == (np.float64 if noise == "gaussian" else np.int64)
    assert failure(noise, 3.0, 5) == 0.0


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**41, True, "1"])
def test_impossible_deviations_are_refused(sigma) -> None:
    for noise in ("discrete_gaussian", "skellam", "gaussian"):
        with pytest.raises(ConfigError, match="sigma"):
            draw(noise, sigma, 3, stream("bad"))


def test_unknown_noise_and_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="laplace"):
        draw("laplace", 1.0, 3, stream("bad"))
    with pytest.raises(ConfigError, match="laplace"):
        failure("laplace", 1.0, 3)
    with pytest.raises(ConfigError, match="count"):
        draw("skellam", 1.0, -1, stream("bad"))


def test_next_to_no_noise_is_no_noise() -> None:
    assert not discrete_gaussian(1e-3, 1000, stream("tiny")).any()
    assert not skellam(1e-9, 1000, stream("tiny")).any()
