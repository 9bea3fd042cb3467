"""SIDCo's search for the number of stages and the first density: its decisions, one by one."""

from __future__ import annotations

import pytest
from test_sidco import steps

from fedcomp.codecs import SIDCo
from fedcomp.codecs.sidco import _Search
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(3, "codec", round=1, partition=2)


@pytest.mark.parametrize(
    ("options", "before", "mean", "previous", "stages", "direction", "moved"),
    [
        ({}, (3, 1, 0, 1), 1.1, 3.0, 3, 1, 0),  # within the band: nothing, and the step before is history
        ({}, (3, 1, 0, 0), 3.0, 1.0, 4, 1, 1),  # out of it again without a step: nobody's fault, go on
        ({}, (4, 1, 0, 1), 2.0, 3.0, 5, 1, 1),  # better: go on
        ({}, (4, 1, 0, 1), 3.0, 2.0, 3, -1, 1),  # worse: turn
        ({}, (4, 1, 0, 1), 0.4, 2.2, 3, -1, 1),  # 2.5 times too few are worse than 2.2 times too many
        ({}, (10, 1, 0, 1), 2.0, 3.0, 9, -2, 1),  # the last number of stages: turn, with patience
        ({}, (9, -2, 0, 1), 3.0, 2.0, 8, -1, 1),  # which excuses one step that made things worse
        ({}, (8, -1, 0, 1), 4.0, 3.0, 9, 1, 1),  # and no second one
        ({"adapt": "published"}, (4, 1, 0, 1), 2.0, 3.0, 3, -1, 1),
        ({"adapt": "published"}, (4, 1, 0, 1), 0.5, 3.0, 5, 1, 1),
        ({"adapt": "published"}, (1, 1, 0, 1), 9.0, 3.0, 1, -1, 0),
    ],
)
def test_decisions_about_the_stages(
    options: dict, before: tuple, mean: float, previous: float, stages: int, direction: int, moved: int
) -> None:
    after = SIDCo(0.001, family="exponential", **options)._decide(_Search(*before), mean, previous, 10)
    assert (after.stages, after.direction, after.moved) == (stages, direction, moved)


@pytest.mark.parametrize(
    ("moves", "mean", "previous", "first", "expected"),
    [
        (3, 3.0, 5.0, 5, (5, 1, 4)),  # four of ten steps: not yet
        (4, 3.0, 5.0, 5, (4, 1, 0)),  # the fifth: over-selection lowers the first density
        (4, 0.3, 0.2, 5, (6, 1, 0)),  # under-selection raises it
        (4, 3.0, 2.0, 5, (6, -1, 0)),  # worse since the last step: the other way from now on
        (4, 3.0, 5.0, 1, (5, -1, 0)),  # out of its range: back to the beginning, and turn
    ],
)
def test_decisions_about_the_first_density(
    moves: int, mean: float, previous: float, first: int, expected: tuple
) -> None:
    codec = SIDCo(0.001, family="exponential", adapt_first=True)
    after = codec._decide(_Search(3, 1, moves, 1, 0, first), mean, previous, 10)
    assert (after.first, after.first_direction, after.moves) == expected
    if not after.moves:
        assert (after.stages, after.moved) == (5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("adapt", ["reversing", "published"])
@pytest.mark.parametrize("adapt_first", [False, True])
def test_the_search_stays_within_its_range(adapt: str, adapt_first: bool) -> None:
    codec = SIDCo(0.001, family="exponential", adapt=adapt, adapt_first=adapt_first)
    layout = Layout.flat(4000)
    state = codec.init(layout)
    stages, first = set(), set()
    for r in range(250):
        _, state = codec.encode(Update(steps(), layout), state, KEY.at(round=r))
        stages.add(int(state["0.search"][0]))
        first.add(int(state["0.search"][5]))
    assert min(stages) >= 1
    assert max(stages) <= 10  # ceil(log2(1 / 0.001))
    assert first <= set(range(1, 11))
    if adapt_first and adapt == "reversing":
        assert len(first) > 1
    if not adapt_first:
        assert first == {5}
