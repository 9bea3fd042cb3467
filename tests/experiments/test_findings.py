"""Findings: what a measurement returns survives JSON, and what is wrong with it is said at once."""

from __future__ import annotations

import base64
import io
import json
import math

import numpy as np
import pytest
from matplotlib.image import imread

from fedcomp.experiments.findings import (
    Claim,
    Curves,
    Findings,
    Pictures,
    Say,
    Series,
    Table,
    different_bytes,
    largest,
    mean,
    spread,
)
from fedcomp.experiments.plots import picture_sheet


def everything() -> Findings:
    return Findings(
        tables=[Table("T", ["name", "value"], [["a", 1.5], ["b", None]], "caption")],
        figures=[
            Curves("C", "x", "y", [Series("s", [1, 2], [3.0, 4.0])], log_x=True, x_bytes=True),
            Pictures.of("P", np.linspace(-1, 2, 48).reshape(2, 3, 2, 4), ["0", "1"], "caption"),
        ],
        claims=[Claim("c", 0.25, "<=", 1.0, "s", gate=False)],
        answer="A quarter.",
        tasks=[{"task": "digits", "data": {"note": "n"}}],
    )


def test_findings_come_back_from_json_as_they_were() -> None:
    found = everything()
    assert Findings.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    assert Findings.from_json(Findings().to_json()) == Findings()
    assert found
    assert not Findings()


def test_what_is_not_finite_becomes_a_gap_and_stays_nan_in_claims_and_lines() -> None:
    found = Findings(
        tables=[Table("T", ["a", "b", "c"], [[math.nan, math.inf, np.float32(0.5)]])],
        figures=[Curves("C", "x", "y", [Series("s", [0.0], [math.nan])])],
        claims=[Claim("c", math.nan, "<=", 1.0, "s")],
    )
    assert found.tables[0].rows == ((None, None, 0.5),)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["claims"][0]["value"] is None
    back = Findings.from_json(document)
    assert math.isnan(back.claims[0].value)
    (curves,) = back.figures
    assert isinstance(curves, Curves)
    assert math.isnan(curves.series[0].y[0])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        Table("T", ["a", "b"], [["only one"]])
    with pytest.raises(ValueError, match="2 x and 1 y"):
        Series("s", [1, 2], [3])
    with pytest.raises(ValueError, match="8 pixels and 1 row labels do not fit"):
        Pictures.of("P", np.zeros((2, 1, 2, 2)), ["0"])
    with pytest.raises(TypeError, match="a list"):
        Table("T", ["a"], [[[1]]])  # type: ignore[list-item]


def test_columns_of_numbers_are_told_from_text() -> None:
    table = Table("T", ["name", "number", "mixed"], [["a", 1, 2], ["b", None, "diverged"], ["c", 0.5, True]])
    assert table.numeric == (False, True, False)
    assert table.rows[2][2] == "yes"
    assert Table("T", ["a", "b"], []).numeric == (True, True)


def test_a_kept_cell_is_not_made_again_and_is_what_json_makes_of_it() -> None:
    said: list[str] = []
    stored: dict[str, object] = {}
    say = Say(said.append, {"old": {"loss": 1.0}}, stored.__setitem__)

    def never() -> None:
        raise AssertionError("a kept cell was made again")

    say("one line")
    assert say.cell("old", never) == {"loss": 1.0}
    assert say.cell("new", lambda: {"pair": (1, math.inf), 3: np.float32(0.5)}) == {"pair": [1, math.inf], "3": 0.5}
    assert say.cell("new", never) == {"pair": [1, math.inf], "3": 0.5}
    assert stored == {"new": {"pair": [1, math.inf], "3": 0.5}}
    assert math.isnan(say.cell("lost", lambda: math.nan))
    with pytest.raises(TypeError, match="a finished cell holds a set"):
        say.cell("odd", lambda: {1})
    assert (say.has("old"), say.has("new"), say.has("other")) == (True, True, False)
    assert said == ["one line"]
    Say()("nobody listens")


def test_announced_cells_count_once_and_kept_ones_are_done() -> None:
    told: list[tuple[int, int]] = []
    say = Say(kept={"a": 1, "of another sweep": 2}, progress=lambda done, known: told.append((done, known)))
    say.expect(["a", "b", "c"])
    assert say.cell("a", lambda: 0) == 1
    say.cell("b", lambda: 0)
    say.expect(["c", "d"])
    say.cell("never announced", lambda: 0)
    assert told == [(1, 3), (2, 3), (2, 4), (3, 5)]


def test_a_mean_with_a_gap_is_no_number() -> None:
    assert mean([1.0, 2.0]) == 1.5
    assert spread([1.0, 4.0, 2.0]) == 1.5
    for nothing in ([], [1.0, math.nan], [math.inf]):
        assert math.isnan(mean(nothing))
        assert math.isnan(spread(nothing))


def test_the_largest_of_numbers_with_a_gap_is_no_number_wherever_the_gap_is() -> None:
    assert largest([1.0, math.inf, 4.0]) == math.inf
    for gap in ([], [math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]):
        assert math.isnan(largest(gap))


def test_different_bytes_sees_what_equality_of_numbers_does_not() -> None:
    base = {"w": np.array([0.0, 1.0, np.nan], np.float32), "n": np.array([3], np.int64)}
    assert different_bytes(base, {key: array.copy() for key, array in base.items()}) == 0
    assert different_bytes(base, base | {"w": np.array([-0.0, 1.0, np.nan], np.float32)}) == 1
    assert different_bytes(base, base | {"w": np.nextafter(base["w"], np.float32(9))}) > 0
    assert different_bytes(base, {"n": base["n"], "w": base["w"]}) == 20  # another order is another model
    assert different_bytes(base, base | {"n": np.array([3], np.int32)}) == 20
    assert different_bytes(base, {"w": base["w"]}) == 20


@pytest.mark.slow
def test_pictures_keep_their_greys_and_become_one_sheet() -> None:
    images = np.array([[[[0.0, 0.5], [1.0, 2.0]], [[np.nan, -1.0], [0.25, 0.75]]]])
    pictures = Pictures.of("P", images, ["0"])
    assert pictures.images.tolist() == [[[[0, 128], [255, 255]], [[0, 0], [64, 191]]]]
    read = imread(io.BytesIO(base64.b64decode(picture_sheet(pictures))))
    assert np.rint(255 * read[:, :, 0]).tolist() == [[0, 128, 128, 0, 0], [255, 255, 128, 64, 191]]
