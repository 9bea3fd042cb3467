"""The study ``flare``: its drifts, and its rivals."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.drift.distance import QuantileSketch
from fedcomp.experiments import drifting, drifting_rounds
from fedcomp.experiments.drifting import TICK, Means, Site, change_of, mean_threshold, nominal_threshold, run
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.studies.flare import IMAGES, OURS, SLOW, SWAPPED, latency
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import to_arrays
from fedcomp.tasks.base import Split


def test_drifts_are_what_they_are_called() -> None:
    digits, wifi = get_task("digits", hidden="64"), get_task("wifi", hidden="64")
    x, y = digits.train_split.x[:200], digits.train_split.y[:200]
    noise, same = change_of(IMAGES, digits)(x, y, Key(1))
    # Half of the distance from white to black.
    assert np.std(noise - x) == pytest.approx(drifting.NOISE * (x.max() - x.min()), rel=0.03)
    assert same is y
    still, swapped = change_of(SWAPPED, digits)(x, y, Key(1))
    assert still is x
    assert {(a, b) for a, b in zip(y, swapped, strict=True) if a != b} == {(0, 1), (1, 0)}
    moved, _ = change_of("Wi-Fi, another antenna", wifi)(wifi.train_split.x, wifi.train_split.y, Key(1))
    shift = (wifi.train_split.x - moved)[0]
    # In steps of whole dBm, every column by the same number of them.
    for column, by in zip(wifi.train_split.x.T.astype(float), shift, strict=True):
        steps = (column - column[0]) * drifting.DBM / by
        assert np.allclose(steps, np.round(steps), atol=1e-2)


def test_the_textbooks_threshold_is_the_inverse_of_its_distribution() -> None:
    from scipy import stats

    n, m = 400, 200
    threshold = nominal_threshold(n, m, 0.01)
    assert stats.kstwobign.sf(threshold * np.sqrt(n * m / (n + m))) == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
def test_of_windows_without_drift_those_count_that_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sensor that has sent a window compares nothing for a while, and was above the threshold when it did last."""
    compared: list[float] = []
    measure = QuantileSketch.distance

    def noted(sketch: QuantileSketch, window: np.ndarray) -> float:
        compared.append(measure(sketch, window))
        return compared[-1]

    monkeypatch.setattr(QuantileSketch, "distance", noted)
    # One sensor never sends a window, the other one often.
    monkeypatch.setattr(drifting, "calibrated", lambda *_: 1.0)
    monkeypatch.setattr(drifting, "nominal_threshold", lambda *_: 0.15)
    found = drifting.quiet(2 * TICK, 0, ticks=60, level=0.01)
    # Two ticks fill the window.
    first, second = compared[:59], np.array(compared[59:])
    assert (found["calibrated_uploads"], found["calibrated_above"]) == (0, 0.0)
    assert found["textbook_uploads"] > 1
    assert len(second) < len(first)
    assert found["textbook_above"] == pytest.approx((second > 0.15).mean())


def test_the_rival_is_calibrated_by_the_same_rule() -> None:
    reference = Key(1).generator().beta(8, 2, 400)
    threshold = mean_threshold(reference, 100, Key(2))
    assert 0 < threshold < 0.1
    assert Means(0.5).distance([0.25, 0.25]) == 0.25


@pytest.mark.parametrize("scheduler", [SLOW, OURS, "conditional, 10 % steps", "conditional, by mean"])
def test_a_sensor_finds_strong_drift_and_every_byte_is_counted(scheduler: str) -> None:
    found = run(scheduler, IMAGES, 3, ticks=60, first=20, last=24)
    assert found["latency"] is not None
    assert found["bytes"] > 19_000  # the first model, at least
    assert found["unadapted"] < found["before"] - 10
    if scheduler == SLOW:
        # After the first full window and fifty ticks on, whatever is seen.
        assert found["uploads"] == 2
        assert found["false"] == 1
    else:
        assert found["false"] == 0


def test_a_reference_after_drift_is_not_made_of_examples_that_the_model_knows() -> None:
    """Cross-fitted figures are less sure than those of the model on its own training examples."""
    site = Site(get_task("digits", hidden="64"), 1)
    for number in range(2):
        x, y = drifting.noisy(site.pool.x[:100], site.pool.y[:100], Key(5, "test", number))
        site.absorb(Split(x, y))
    found = site.measure(to_arrays(site.model))
    assert found is not None
    known = np.concatenate([site.figures(site.model, part) for part in site.absorbed])
    assert found.mean() < known.mean()
    site.absorbed.pop()
    assert site.measure(to_arrays(site.model)) is None


@pytest.mark.long
def test_rounds_have_all_rows_and_quiet_ones_spare_bytes() -> None:
    plain, asked = (
        drifting_rounds.run(row, 0, rounds=50, drift=40) for row in ("every round", "conditional, asked first")
    )
    assert plain["quiet"] == 0.0
    assert plain["updates"] == 200
    assert 0.0 < asked["quiet"] < 1.0
    assert asked["down"] < plain["down"]
    assert asked["deployed"] >= 4


@pytest.mark.long
def test_the_last_ten_rounds_are_those_there_are() -> None:
    short = drifting_rounds.run("every round", 0, rounds=4, drift=2)
    assert short["last"] == pytest.approx(short["accuracy"])


def test_a_latency_counts_runs_that_found_nothing() -> None:
    records = [Records([Record({"latency": value}) for value in values]) for values in ((3, None, None), (3, 4, None))]
    assert [latency(each) for each in records] == [float("inf"), 4.0]
