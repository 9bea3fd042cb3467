"""The study of gradient coding: times follow from the draws, and a wrong decoder is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.catalog.gradient_coding import EXPERIMENT
from fedcomp.experiments.studies.gradient_coding import (
    DRAWN,
    FIXED,
    LOSSES,
    among_stragglers,
    coded,
    expected_seconds,
    replay,
    slowdown,
)
from fedcomp.experiments.tables import Training
from fedcomp.rng import Key


@pytest.mark.long
def test_a_wrong_decoder_gives_another_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the survivors, added up as if they were plain updates."""
    from fedcomp.coding.gradcode import Cyclic, Decoding
    from fedcomp.systems.coded import gradients

    training = Training.of(EXPERIMENT, EXPERIMENT.configure(rounds=2, clients=5))
    right = among_stragglers(DRAWN, coded(1), training=training)
    # Stragglers are really lost, and the clock is that of the draws.
    assert max(right["answers"]) <= 4
    assert right["off"] <= 1e-6
    solve = Cyclic._solve

    def wrong(self: Cyclic, devices: list[int], approximate: bool) -> Decoding:
        found = solve(self, devices, approximate).coefficients
        return Decoding((found != 0).astype(np.float64))

    monkeypatch.setattr(Cyclic, "_solve", wrong)
    # Codes are kept with what they decode by.
    gradients.made.cache_clear()
    try:
        # Codes are drawn by what they amplify, of which a wrong decoder knows nothing.
        found = among_stragglers(DRAWN, coded(1), training=training)
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
    drawn, fixed = slowdown(0, DRAWN, 1.2), slowdown(0, FIXED, 1.2)
    assert drawn(1, 3) != drawn(2, 3)
    assert fixed(1, 3) == fixed(2, 3) != fixed(1, 4)
    assert min(drawn(r, p) for r in range(20) for p in range(10)) >= 1.0
