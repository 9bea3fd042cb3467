"""The study of SIDCo: estimates are judged by what they select, on data and memories of the kind they are said."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.codecs.sidco import estimate_threshold
from fedcomp.experiments.studies import sidco
from fedcomp.rng import Key

pytestmark = pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")

KEY, SCALES = Key(3, "draws"), Key(3, "scales")


def test_selected_over_wanted_is_counted_and_not_estimated() -> None:
    values = sidco.synthetic("t(4)", 20_000, KEY, SCALES)
    for family, stages in sidco.FITS:
        threshold = estimate_threshold(values, 0.01, family, stages).threshold
        expected = np.count_nonzero(np.abs(values) > np.float32(threshold)) / 200
        assert sidco.achieved(values, 0.01, family, stages) == expected
    assert set(sidco.judge(values, 0.01)) == {sidco.fit_name(*fit) for fit in sidco.FITS}


def test_a_family_that_fits_selects_what_is_wanted_and_another_does_not() -> None:
    laplace = sidco.judge(sidco.synthetic("Laplace", 200_000, KEY, SCALES), 0.01)
    assert all(0.93 <= laplace[f"E, M = {stages}"] <= 1.07 for stages in (1, 2, 3, 4))
    heavy = sidco.judge(sidco.synthetic("t(2.5)", 200_000, KEY, SCALES), 0.001)
    assert heavy["E, M = 1"] > 5.0
    assert 0.6 <= heavy["P, M = 2"] <= 1.5


def test_draws_differ_and_the_scales_of_layers_stay() -> None:
    def layered(key: Key, scales: Key = SCALES) -> np.ndarray:
        return sidco.synthetic("60 layers x t(4)", 60_000, key, scales).reshape(60, 1000)

    first, again, other = layered(KEY), layered(KEY), layered(KEY.at(round=1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    widths = [np.median(np.abs(x), axis=1) for x in (first, other, layered(KEY, Key(4, "scales")))]
    assert np.log(widths[0]).std() == pytest.approx(2.0, abs=0.6)
    assert np.abs(np.log(widths[0] / widths[1])).max() < 0.3
    assert np.abs(np.log(widths[0] / widths[2])).max() > 2.0


@pytest.mark.long
def test_a_captured_memory_is_that_of_exact_selection_and_spoils_one_stage() -> None:
    source = sidco.Source("MLP", "digits", {"hidden": "64"}, 30, 16, 0.2)
    rows = sidco.on_gradients(source, 0.01, "global", 0)
    assert [(r["place"], r["what"], r["step"]) for r in rows] == [
        ("MLP all layers", what, step) for step in (1, 3, 30) for what in ("alone", "with memory")
    ]
    # There is no memory yet in the first step.
    assert rows[0]["fits"] == rows[1]["fits"]
    # Later all that is larger than the threshold has been sent, so that the tail the fit expects is not there.
    alone, remembered = rows[-2]["fits"], rows[-1]["fits"]
    assert alone["E, M = 1"] > 1.0
    assert remembered["E, M = 1"] < 0.5
    assert 0.5 <= remembered["P, M = 4"] <= 2.0
    by_layer = sidco.on_gradients(source._replace(steps=1), 0.01, "layer", 0)
    assert [r["place"] for r in by_layer[::2]] == ["MLP layers.0"]  # the output layer has less than 1024 weights


@pytest.mark.long
def test_the_search_changes_stages_only_where_it_is_allowed_to() -> None:
    found = sidco.search("t(4)", 10_000, KEY)
    assert set(found) == set(sidco.SEARCHES)
    assert all(len(s["stages"]) == len(s["achieved"]) == sidco.PERIODS for s in found.values())
    assert set(found["fixed, E at 1"]["stages"]) == {1}
    assert set(found["fixed, P at 4"]["stages"]) == {4}
    # Fewer stages after too many selected: the fewest is one.
    assert set(found["published, E from 1"]["stages"]) == {1}
    assert found["published, E from 1"]["achieved"] == found["fixed, E at 1"]["achieved"]
    assert max(found["reversing, E from 1"]["stages"]) >= 3


@pytest.mark.long
def test_with_memory_one_stage_selects_ever_less_and_the_search_helps() -> None:
    found = sidco.search(f"t(4){sidco.REMEMBERED}", 10_000, KEY)
    assert found["fixed, E at 1"]["achieved"][-1] < 0.3
    assert found["published, E from 1"]["stages"][-1] > 1
    assert found["published, E from 1"]["achieved"][-1] > 0.4


def test_exact_selection_and_estimates_are_timed_at_every_density() -> None:
    times = sidco.timing(10_000, 1, KEY)
    assert {name.rpartition("/")[2] for name in times} == {f"{d:g}" for d in sidco.DENSITIES}
    assert {"exact", "torch.topk", "P, M = 2"} <= {name.rpartition("/")[0] for name in times}
    assert all(value >= 0.0 for value in times.values())


def test_a_share_counts_what_lies_within_a_factor_of_two() -> None:
    assert sidco.within([0.5, 1.0, 2.0, 0.49, 2.01, 0.0]) == 0.5
