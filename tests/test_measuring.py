"""The runner of benchmarks: what is timed, what ratios are, and what gates when."""

from __future__ import annotations

import math
import time

import pytest

from fedcomp.measuring import Bound, Case, Found, Prepared, Times, run, timed


def recorded(**seconds: list[float]) -> Times:
    times = Times({}, 0)
    times.seconds = seconds
    return times


def test_ratios_are_medians_within_repetitions() -> None:
    times = recorded(a=[1.0, 10.0, 3.0], b=[2.0, 30.0, 3.0], c=[1.0, 0.0, 1.0])
    assert times.median("a") == 3.0
    assert times.ratio("b", "a") == 2.0
    assert times.ratio(["a", "c"], "b") == 1.0
    times.limits = [0.5, 5.0, 1.0]
    assert times.multiple("a") == 2.0


def test_calls_are_interleaved_behind_the_limit_and_the_first_round_is_not_counted() -> None:
    seen: list[str] = []
    calls = {name: (lambda n=name: seen.append(n)) for name in "ab"}  # type: ignore[misc]
    times = Times(calls, 2, lambda: seen.append("limit"))
    assert seen == ["limit", "a", "limit", "b"] * 3
    assert [len(times.seconds["a"]), len(times.seconds["b"]), len(times.limits)] == [2, 2, 2]


@pytest.mark.slow
def test_a_sample_begins_warm_unless_its_call_is_long() -> None:
    """Otherwise a method below a millisecond a call would be timed warm, one just above it cold."""
    seen: list[str] = []

    def busy(name: str, seconds: float) -> None:
        seen.append(name)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    calls = {"short": 0.0004, "medium": 0.003, "long": 0.08}
    times = Times({name: lambda n=name, s=s: busy(n, s) for name, s in calls.items()}, 1, sample=1e-3)  # type: ignore[misc]
    # Two calls each to see how long they take; then a warm one, and as many as make a sample.
    assert seen[:6] == ["short"] * 2 + ["medium"] * 2 + ["long"] * 2
    assert seen[6:].count("short") in (3, 4)
    assert seen[-3:] == ["medium"] * 2 + ["long"]
    assert times.median("short") < 0.001


def test_preparing_is_not_timed() -> None:
    def prepare() -> int:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return 7

    seen: list[int] = []
    times = Times({"use": Prepared(prepare, seen.append)}, 2)
    assert times.median("use") < 0.01
    assert seen == [7, 7, 7]


def test_a_quick_run_gates_what_is_sure_and_nothing_else() -> None:
    bounds = [
        Bound("size", ("bytes", {"what": "a"}), "<= 3", "derived", sure=True),
        Bound("growth", ("bytes", {"what": "b"}, {"what": "a"}), "<= 1", "goal"),
        Bound("aim", lambda found: math.nan, ">= 1", "goal", gate=False),
        Bound("peer", "x / y", ">= 1", "goal", skipped="y is not installed"),
    ]
    rows = [{"what": "a", "bytes": 3}, {"what": "b", "bytes": 6}]
    for quick, gates in ((True, [True, False, False, False]), (False, [True, True, False, False])):
        found = run([Case("case", lambda _: rows, bounds)], quick=quick)
        assert [claim.gate for claim in found.claims] == gates
        assert [claim.ok for claim in found.claims] == [True, False, False, None]


def test_a_row_that_is_not_there_or_there_twice_is_no_value() -> None:
    found = Found()
    found.rows = [{"what": "a", "bytes": 3}, {"what": "a", "bytes": 4}]
    for where in ({"what": "a"}, {"what": "b"}):
        with pytest.raises(ValueError, match="unpack"):
            found.of("bytes", **where)


def test_timed_methods_have_rows_and_bounds_by_name() -> None:
    said: list[str] = []
    calls = {"sum": lambda: sum(range(2000)), "twice": lambda: sum(range(40000))}
    bounds = [Bound("slower", "twice / sum", "> 1", "derived"), Bound("passes", "twice", "> 1", "derived")]
    case = timed("sums", calls, 3, lambda times, m: {"method": m, "s": times.median(m)}, bounds, limit=calls["sum"])
    found = run([case], say=said.append)
    assert said == ["sums: 3 interleaved repetitions"]
    assert [row["method"] for row in found.rows] == ["sum", "twice"]
    assert [claim.ok for claim in found.claims] == [True, True]
