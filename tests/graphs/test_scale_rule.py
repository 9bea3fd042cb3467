"""The scale from a variance budget: every mode does what it promises."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.graphs.inclusion import local_mass
from fedcomp.graphs.scale import moment_ratio, scale
from fedcomp.rng import Key

INSTANCES = 2000


class Instance:
    """Columns with random weights, owners and energies; second moments by summing over columns, not by the formula."""

    def __init__(self, number: int) -> None:
        u = Key(number, "test/scale").uniform(160)
        m = 2 + int(u[0] * 40)
        self.w = np.exp(4 * u[1 : 1 + m] - 2)
        self.local = u[41 : 41 + m] < 0.1 + 0.8 * u[1]
        self.local[:2] = True, False
        self.a = np.exp(12 * u[81 : 81 + m] - 6)
        self.D = 1 + 10 ** (4 * u[159] - 3)
        self.lam = local_mass(self.w, self.local)
        self.q = self.w / self.w.sum()

    def moment(self, s: float, a: np.ndarray | None = None) -> float:
        """M(s) = sum of a_i / p_i(s)."""
        p = np.where(self.local, s * self.w, self.w)
        return float(((self.a if a is None else a) * p.sum() / p).sum())

    def sums(self, a: np.ndarray | None = None) -> dict[str, float]:
        per = (self.a if a is None else a) / self.q
        return {"a_local": float(per[self.local].sum()), "a_remote": float(per[~self.local].sum())}


@pytest.mark.slow
def test_7_04_measured_meets_the_budget_exactly() -> None:
    """|M(s) / M(1) - D| < 1e-9 on 2000 random instances; the root is the largest, and no larger scale is allowed."""
    for number in range(INSTANCES):
        case = Instance(number)
        s = scale("measured", case.lam, case.D, s_max=math.inf, **case.sums())
        before = case.moment(1.0)
        assert s >= 1
        assert abs(case.moment(s) / before - case.D) < 1e-9
        assert abs(moment_ratio(s, case.lam, **case.sums()) - case.D) < 1e-9
        assert case.moment(1.001 * s) / before > case.D


@pytest.mark.slow
def test_7_04_matched_is_exact_when_energy_is_the_square_of_the_weight() -> None:
    for number in range(INSTANCES):
        case = Instance(number)
        a = 3.7 * case.w**2
        s = scale("matched", case.lam, case.D, s_max=math.inf)
        assert abs(case.moment(s, a) / case.moment(1.0, a) - case.D) < 1e-9
        assert s == pytest.approx(scale("measured", case.lam, case.D, s_max=math.inf, **case.sums(a)), rel=1e-6)


@pytest.mark.slow
def test_7_04_worst_never_exceeds_the_budget() -> None:
    """Whatever the energies, all of them on one remote column included, where it is nearly met."""
    tightest = 0.0
    for number in range(INSTANCES):
        case = Instance(number)
        s = scale("worst", case.lam, case.D, s_max=math.inf)
        assert s <= scale("matched", case.lam, case.D, s_max=math.inf)
        assert case.moment(s) <= case.D * case.moment(1.0)
        spike = np.zeros(len(case.a))
        spike[np.flatnonzero(~case.local)[0]] = 1.0
        ratio = case.moment(s, spike) / case.moment(1.0, spike)
        assert ratio <= case.D * (1 + 1e-12)
        tightest = max(tightest, ratio / case.D)
    assert tightest > 1 - 1e-9


MEASURED: dict[str, Any] = {"a_local": 3.0, "a_remote": 1.0}


@pytest.mark.parametrize("mode", ["matched", "measured", "worst"])
@pytest.mark.parametrize("lam", [1e-12, 0.1, 0.5, 0.9, 1 - 1e-12])
def test_7_04_the_scale_starts_at_one_and_grows_with_the_budget(mode: str, lam: float) -> None:
    def at(D: float) -> float:
        return scale(mode, lam, D, s_max=math.inf, **MEASURED)

    assert at(1.0) == 1.0
    scales = [at(D) for D in (1.0, 1 + 1e-9, 1.001, 1.1, 1.5, 2.0, 10.0, 1e6)]
    assert all(a < b for a, b in itertools.pairwise(scales))
    assert all(math.isfinite(s) for s in scales)
    assert scale(mode, lam, 1e30, s_max=16.0, **MEASURED) == 16.0
    assert scale(mode, lam, math.inf, s_max=12.0, **MEASURED) == 12.0


@pytest.mark.parametrize("mode", ["matched", "measured", "worst", "fixed"])
def test_7_04_nothing_to_favour_is_scale_one(mode: str) -> None:
    for lam in (0.0, 1.0):
        for D in (1.0, 1.5, math.inf):
            assert scale(mode, lam, D, s=5.0, **MEASURED) == 1.0
    for lam in (5e-324, 1e-300, 1 - 2.0**-53):
        assert 1.0 <= scale(mode, lam, 2.0, s=5.0, **MEASURED) <= 16.0


def test_7_04_measured_at_its_edges() -> None:
    assert scale("measured", 0.5, 1.5, a_local=1.0, a_remote=0.0) == 16.0  # nothing is lost with remote columns
    assert scale("measured", 0.5, 1.5, a_local=0.0, a_remote=0.0) == 16.0
    assert scale("measured", 0.5, 1.5, a_local=0.0, a_remote=2.0, s_max=99) == pytest.approx(2.0, rel=1e-12)
    for unit in (1e-300, 1e300):
        s = scale("measured", 0.3, 1.5, a_local=2 * unit, a_remote=unit)
        assert s == pytest.approx(scale("measured", 0.3, 1.5, a_local=2.0, a_remote=1.0), rel=1e-12)


def test_7_04_given_scales_are_clamped() -> None:
    assert scale("fixed", 0.5, 1.5, s=4.0) == 4.0
    assert scale("fixed", 0.5, 1.0, s=40.0) == 16.0
    assert scale("fixed", 0.5, 1.0, s=40.0, s_max=math.inf) == 40.0
    assert scale("fixed", 0.5, 1.0) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"D": 0.999}, "budget"),
        ({"D": math.nan}, "budget"),
        ({"s": 0.5}, "scale"),
        ({"s": math.nan}, "scale"),
        ({"s_max": 0.0}, "s_max"),
        ({"s_max": math.nan}, "s_max"),
        ({"lam": -0.1}, "local mass"),
        ({"lam": 1.1}, "local mass"),
        ({"lam": math.nan}, "local mass"),
        ({"mode": "matchd"}, "did you mean 'matched'"),
        ({"mode": "measured"}, "a_local"),
        ({"mode": "measured", "a_local": 1.0}, "a_remote"),
        ({"mode": "measured", "a_local": 1.0, "a_remote": -1.0}, "a_remote"),
        ({"mode": "measured", "a_local": math.inf, "a_remote": 1.0}, "a_local"),
    ],
)
def test_7_04_what_is_no_budget_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scale(**({"mode": "matched", "lam": 0.5, "D": 1.5} | arguments))


def test_the_moment_ratio_is_one_at_one_and_without_energy() -> None:
    assert moment_ratio(1.0, 0.3, 2.0, 5.0) == pytest.approx(1.0, rel=1e-15)
    assert moment_ratio(7.0, 0.3, 0.0, 0.0) == 1.0
    assert moment_ratio(4.0, 0.5, 1e308, 1e308) == pytest.approx(1 + 0.25 * 9 / 4, rel=1e-15)
