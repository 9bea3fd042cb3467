"""The study ``async``: its clock, and its rows."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments import slept
from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.paced import Pace, seconds_to
from fedcomp.experiments.studies.asynchronous import ROWS, SINGLE, SYNCHRONOUS, paced
from fedcomp.flower.faults import Delivery


def test_paces_have_the_mean_and_variation_that_were_asked_for() -> None:
    pace = Pace(3, 20_000)
    own = np.array([pace.of(p) for p in (0, 1, 19_999)])
    assert np.all(own > 0)
    from fedcomp.rng import Key
    from fedcomp.timing.pipeline import log_normal

    drawn = log_normal(1.0, 1.0, 20_000, Key(3, "pace/clients"))
    assert drawn.mean() == pytest.approx(1.0, rel=0.05)
    assert drawn.std() == pytest.approx(1.0, rel=0.1)
    # The same message takes the same time again; another one does not, nor does it take another client's.
    first, second = (pace(Delivery(exchange, 1, 4, 0, "train")) for exchange in (0, 1))
    assert pace(Delivery(0, 1, 4, 0, "train")) == first != second
    assert pace(Delivery(0, 1, 4, 0, "evaluate")) == 0.0


def test_seconds_to_a_target_are_those_of_a_running_mean() -> None:
    line = [[1.0, 50.0], [2.0, 99.0], [3.0, 80.0], [4.0, 95.0], [5.0, 96.0]]
    assert seconds_to(line, 90.0) == 4.0
    assert seconds_to(line, 99.0) == float("inf")
    assert slept.seconds_below([[1.0, 3.0], [2.0, 1.0]], 1.0) == 2.0


@pytest.mark.long
def test_rows_train_and_count_whose_updates_they_used() -> None:
    """Small ones, for three simulated seconds; a buffered row must not wait for the slowest of four."""
    made = get_experiment("async").configure(assignments=("seconds=3", "steps=0.3"), clients=4)
    steps = {}
    for row in ROWS:
        found = paced(row, 0.3, 5, config=made)
        assert sum(found["shares"]) == pytest.approx(1.0)
        # Jain's index.
        assert found["even"] == pytest.approx(1 / (4 * sum(share**2 for share in found["shares"])))
        assert found["line"][-1][0] >= 3.0
        assert found["uplink"] > 0
        steps[row] = found["steps"]
    assert steps[SINGLE] > steps[SYNCHRONOUS]
