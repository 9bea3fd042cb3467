"""Progress: the time left for the whole run, and what is shown of it."""

from __future__ import annotations

import io
from functools import partial

import pytest
from fake_engine import TINY, FakeEngine
from rich.console import Console

from fedcomp.experiments.console import make_console
from fedcomp.experiments.progress import Remaining, Watch
from fedcomp.experiments.spec import RoundRecord, RunSpec
from fedcomp.experiments.tables import specs_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_row(remaining: Remaining, clock: Clock, label: str, rounds: int, pace: float) -> None:
    remaining.begin(label, 0)
    for index in range(rounds + 1):
        clock.now += pace if index else 0.0
        remaining.round(label, index)
    remaining.finish(label)


def test_nothing_is_estimated_before_anything_was_measured(clock: Clock) -> None:
    remaining = Remaining({"a": 10}, clock=clock)
    remaining.begin("a", 0)
    remaining.round("a", 0)
    assert remaining.left is None
    assert str(remaining) == "0 of 1 systems, 0 of 10 rounds"


def test_rounds_that_are_left_take_the_mean_of_those_made(clock: Clock) -> None:
    remaining = Remaining({"fast": 10, "slow": 10, "waiting": 10}, clock=clock)
    run_row(remaining, clock, "fast", 10, 1.0)
    assert remaining.left == pytest.approx(20.0)
    remaining.begin("slow", 0)
    clock.now += 8.0
    remaining.round("slow", 2)
    assert remaining.left == pytest.approx(18 * 1.5)
    clock.now += 4.0
    assert remaining.left == pytest.approx(23.0), "it runs down between rounds"
    assert str(remaining) == "1 of 3 systems, 12 of 30 rounds, 23.0 s left for the systems"


def test_a_resumed_row_is_judged_by_this_session_and_one_that_ends_early_is_done(clock: Clock) -> None:
    remaining = Remaining({"kept": 10, "a": 10, "b": 10}, clock=clock)
    remaining.begin("kept", 10)
    remaining.finish("kept")
    assert remaining.left is None
    remaining.begin("a", 6)
    clock.now += 2.0
    remaining.round("a", 7)
    assert remaining.left == pytest.approx(3 * 2.0 + 10 * 2.0)
    remaining.finish("a")  # its budget was spent
    assert remaining.left == pytest.approx(20.0)
    assert str(remaining).startswith("2 of 3 systems, 17 of 27 rounds")


def test_parts_of_the_measurement_count_by_the_finished_ones(clock: Clock) -> None:
    remaining = Remaining({"a": 2}, clock=clock)
    run_row(remaining, clock, "a", 2, 1.0)
    assert remaining.left is None, "how long the measurement takes is not known"
    remaining.cells(3, 10)  # three of them kept from before
    assert remaining.left is None
    clock.now += 8.0
    remaining.cells(5, 10)
    assert remaining.left == pytest.approx(5 * 4.0)
    assert str(remaining).endswith("5 of 10 parts, 20.0 s left")
    remaining.cells(10, 10)
    assert remaining.left is None, "all that were announced are done, others may come"


def test_what_a_run_is_known_to_take_stands_for_what_has_not_begun(clock: Clock) -> None:
    remaining = Remaining({"a": 10}, expected=60.0, clock=clock)
    assert remaining.left == 60.0
    run_row(remaining, clock, "a", 10, 2.0)
    assert remaining.left == pytest.approx(40.0)
    clock.now += 30.0
    remaining.cells(1, 1)
    assert remaining.left == pytest.approx(40.0), "the measurement begins with what it announces"
    clock.now += 100.0
    remaining.cells(2, 2)
    assert remaining.left is None, "it takes longer than was known"


@pytest.mark.slow
def test_without_a_terminal_every_row_and_every_part_is_one_line(clock: Clock) -> None:
    shown = io.StringIO()
    specs = specs_of(TINY, TINY.configure(rounds=2))
    with Watch(make_console(shown), specs, clock=clock) as watch:

        def note(spec: RunSpec, record: RoundRecord) -> None:
            clock.now += 1.0
            watch.round(spec, record)

        for spec in specs:
            watch.start(spec, 0)
            result = FakeEngine()(spec, on_round=partial(note, spec), checkpoint=None)
            watch.done(spec, result.accuracy, 2, kept=False)
        watch.remaining.cells(1, 3)
        watch.say("one part")
    first, second, part = shown.getvalue().splitlines()
    assert first.startswith("  dense: 2 rounds, accuracy 30.0 %, ")
    assert "1 of 2 systems, 2 of 4 rounds, " in first
    assert first.endswith(" left for the systems)")
    assert "2 of 2 systems, 4 of 4 rounds" in second
    assert part.startswith("  one part (2 of 2 systems, 4 of 4 rounds, 1 of 3 parts")


@pytest.mark.slow
def test_a_terminal_shows_a_bar_for_each_row_and_one_line_for_the_run() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True)
    specs = specs_of(TINY, TINY.configure(rounds=2))
    with Watch(console, specs) as watch:
        watch.start(specs[0], 0)
        watch.done(specs[0], 0.5, 2, kept=True)
    assert "1 of 2 systems, 2 of 4 rounds" in shown.getvalue()
    assert "sparse" in shown.getvalue()
