"""The alpha-beta link model: hand-computed times, and the slowest node rules an exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.timing import PRESETS, Link, parse_link, simulated_seconds


def test_a_megabyte_at_ten_megabit() -> None:
    link = Link(10e6, 50e6, 0.02)
    assert link.up_seconds(1_000_000) == pytest.approx(0.82)
    assert link.down_seconds(1_000_000) == pytest.approx(0.18)


@pytest.mark.parametrize("nbytes", [-1, -0.5, float("nan"), float("inf"), pytest.param(10**400, id="huge"), "8"])
def test_impossible_transfers_are_refused(nbytes: float) -> None:
    link = Link(8.0, 8.0)
    for seconds in (link.up_seconds, link.down_seconds):
        with pytest.raises(ConfigError, match="bytes"):
            seconds(nbytes)


def test_numpy_numbers_make_links_and_transfers() -> None:
    link = Link(np.float32(8.0), np.int64(16), np.float64(0.5))
    assert link.down_seconds(np.int64(2)) + link.up_seconds(np.uint32(1)) == pytest.approx(0.5 + 1 + 0.5 + 1)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10mbit", PRESETS["10mbit"]),
        (" LTE ", PRESETS["lte"]),
        ("5mbit", Link(5e6, 5e6)),
        ("10 Mbit/s", Link(10e6, 10e6)),
        ("200kbit/1mbit@80ms", Link(2e5, 1e6, 0.08)),
        ("1.5g/2g@0.5s", Link(1.5e9, 2e9, 0.5)),
        ("1000/2000", Link(1000.0, 2000.0)),
    ],
)
def test_parse_link(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "fast", "10mbit/", "5mbit@soon", "-1mbit", "1mbit/2mbit/3mbit"])
def test_parse_link_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)


@pytest.mark.parametrize("text", ["0mbit", "1mbit/0"])
def test_a_rate_of_zero_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(ConfigError, match=r"'0(mbit)?' in link .* is not a bandwidth"):
        parse_link(text)


def test_parse_error_names_the_nearest_preset() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lte'"):
        parse_link("ltee")


def _row(round_: int, node: int, direction: str, wire: int, kind: str = "train") -> dict[str, Any]:
    return {"round": round_, "node": node, "direction": direction, "message_type": kind, "wire": wire}


def test_the_slowest_node_rules_and_exchanges_add_up() -> None:
    fast, slow = Link(8e6, 8e6), Link(8e3, 8e6, 0.5)
    rows = [
        _row(1, 7, "down", 1_000_000),
        _row(1, 9, "down", 1_000_000),
        _row(1, 7, "up", 2_000_000),
        _row(1, 9, "up", 1_000),
        _row(2, 7, "down", 1_000_000),
        _row(2, 7, "up", 1_000_000),
    ]
    # Round 1: node 7 takes 1 + 2 s, node 9 takes 1 + 1 s and two latencies of 0.5 s: 3 s both.
    # Round 2: 2 s.
    assert simulated_seconds(rows, {7: fast, 9: slow}) == pytest.approx(5.0)
    rows[3] = _row(1, 9, "up", 3_000)
    assert simulated_seconds(rows, {7: fast, 9: slow}) == pytest.approx(7.0)
    assert simulated_seconds(reversed(rows), {7: fast, 9: slow}) == pytest.approx(7.0)


def test_train_and_evaluate_are_separate_exchanges() -> None:
    link = Link(8.0, 8.0)
    rows = [_row(1, 1, "up", 5, "train"), _row(1, 2, "up", 3, "train"), _row(1, 2, "up", 4, "evaluate")]
    assert simulated_seconds(rows, link) == pytest.approx(9.0)
    assert simulated_seconds(rows, link, compute=1.0) == pytest.approx(11.0)


def test_bad_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="sideways"):
        simulated_seconds([_row(1, 1, "sideways", 2)], Link(8.0, 8.0))
    with pytest.raises(ConfigError, match="node 3"):
        simulated_seconds([_row(1, 3, "up", 2)], {1: Link(8.0, 8.0)})
    # A negative count would hide the time of another row.
    rows = [_row(1, 1, "up", 100), _row(1, 1, "up", -99)]
    with pytest.raises(ConfigError, match="-99 bytes"):
        simulated_seconds(rows, Link(8.0, 8.0))
    with pytest.raises(ConfigError, match="beyond 64 bits"):
        simulated_seconds([_row(1, 1, "down", 10**5000)], Link(8.0, 8.0))
    for compute in (float("nan"), -1.0):
        with pytest.raises(ConfigError, match="compute"):
            simulated_seconds([], Link(8.0, 8.0), compute=compute)
    assert simulated_seconds([], Link(8.0, 8.0)) == 0.0
