"""The experiment on gradient coding, very small: exact figures are exact, and times follow from the draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments.catalog import gradient_coding as module
from fedcomp.experiments.catalog.gradient_coding import (
    DRAWN,
    EXPERIMENT,
    FIXED,
    LOSSES,
    SPEEDS,
    coded,
    expected_seconds,
    replay,
    schemes,
    slowdown,
)
from fedcomp.rng import Key


@pytest.fixture(scope="module")
def small() -> Ran:
    return ran(EXPERIMENT, rounds=2, clients=5)


def test_what_has_to_be_exact_is(small: Ran) -> None:
    claims = small.findings.claims
    exact = [claim for claim in claims if claim.gate and "ignore" not in claim.name]
    assert len(exact) == 4 * len(LOSSES[1:]) + 4
    assert [claim.name for claim in exact if not claim.ok] == []
    assert all(math.isfinite(claim.value) for claim in claims)


def test_stragglers_are_really_lost(small: Ran) -> None:
    config, _, findings, *_ = small
    assert [len(figure.series) for figure in findings.figures] == [5, 5, 3]
    for table in findings.tables[: len(SPEEDS)]:
        answers = {row[0]: row[table.columns.index("answers")] for row in table.rows}
        assert answers["wait for all"] == config.clients
        assert answers[coded(1)] <= config.clients - 1
        assert answers[coded(3)] == config.clients - 3
        times = {row[0]: row[2] for row in table.rows}
        assert times[coded(3)] != times["wait for all"]


@pytest.mark.long
def test_a_wrong_decoder_fails_the_claims(small: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the survivors, added up as if they were plain updates."""
    from fedcomp.coding.gradcode import Cyclic, Decoding
    from fedcomp.systems.coded import gradients

    config, _, findings, *_ = small
    settings = schemes(config)[coded(1)]
    right = module.among_stragglers(config, coded(1), settings, DRAWN)
    assert right["loss"] == pytest.approx([findings.figures[0].series[1].y[0], findings.figures[0].series[1].y[1]])
    solve = Cyclic._solve

    def wrong(self: Cyclic, devices: list[int], approximate: bool) -> Decoding:
        found = solve(self, devices, approximate).coefficients
        return Decoding((found != 0).astype(np.float64))

    monkeypatch.setattr(Cyclic, "_solve", wrong)
    # Codes are kept with what they decode by.
    gradients.made.cache_clear()
    try:
        # Codes are drawn by what they amplify, of which a wrong decoder knows nothing.
        found = module.among_stragglers(config, coded(1), settings, DRAWN)
    finally:
        gradients.made.cache_clear()
    assert abs(found["loss"][-1] / right["loss"][-1] - 1) > 1e-3


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"losses": 0}, [8.0, 8.0]),
        # Three times the work, 3, 6, 12, 24, of which two answers are enough.
        ({"losses": 2}, [6.0, 6.0]),
        # Groups {0, 1} and {2, 3}: the first of each, 2 and 8.
        ({"losses": 1}, [8.0, 8.0]),
        ({"losses": 0, "approximate": True, "quorum": 2}, [2.0, 2.0]),
    ],
)
def test_times_follow_from_the_draws(settings: dict, seconds: list[float]) -> None:
    times = [1.0, 2.0, 4.0, 8.0]
    assert replay(4, 2, settings, lambda _round, partition: times[partition]).tolist() == seconds


def test_backlog_is_what_a_new_beginning_saves() -> None:
    def seconds(server_round: int, partition: int) -> float:
        return 100.0 if (server_round, partition) in {(1, 0), (2, 1)} else 1.0

    settings = {"losses": 1}
    assert replay(3, 2, settings, seconds, restart=True).tolist() == [2.0, 2.0]
    # Device 0 is still busy and device 1 slow: the second round waits for one of them.
    assert replay(3, 2, settings, seconds).tolist() == [2.0, 200.0]


@pytest.mark.long
@pytest.mark.parametrize(("clients", "losses"), [(10, 0), (10, 1), (10, 3), (6, 2)])
def test_the_formula_is_the_mean_of_draws(clients: int, losses: int) -> None:
    tail = 4.0
    draws = (1.0 - Key(3, "check").uniform(20_000 * clients)) ** (-1.0 / tail)
    rounds = draws.reshape(20_000, clients)
    found = np.mean([replay(clients, 1, {"losses": losses}, lambda _r, p, t=t: float(t[p]))[0] for t in rounds[:4000]])
    assert found == pytest.approx(expected_seconds(clients, losses, tail), rel=0.03)


def test_the_tail_decides_whether_coding_pays() -> None:
    heavy, light = 1.05, 10.0
    for losses in LOSSES[1:]:
        assert expected_seconds(10, losses, heavy) < expected_seconds(10, 0, heavy)
        assert expected_seconds(10, losses, light) > expected_seconds(10, 0, light)


def test_speeds_are_redrawn_or_fixed() -> None:
    config = EXPERIMENT.configure()
    drawn, fixed = slowdown(config, DRAWN), slowdown(config, FIXED)
    assert drawn(1, 3) != drawn(2, 3)
    assert fixed(1, 3) == fixed(2, 3) != fixed(1, 4)
    assert min(drawn(r, p) for r in range(20) for p in range(10)) >= 1.0
