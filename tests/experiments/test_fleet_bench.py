"""The benchmark of a fleet: its claims, and a small one for real."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fedcomp.experiments.bench import fleet
from fedcomp.experiments.spec import RoundRecord, RunResult
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.measuring import Case, run

pytestmark = pytest.mark.engines

SPEC = replace(fleet.TRAINING, clients=4, rounds=2)


def trained(*, replies: int = 4, failures: int = 0) -> RunResult:
    first = RoundRecord(0, 10.0, 2.0)
    rounds = [
        RoundRecord(i, 50.0, 1.0, uplink_wire_bytes=8000, wall_seconds=10.0 / i, replies=4, failures=0) for i in (1, 2)
    ]
    rounds[1] = replace(rounds[1], replies=replies, failures=failures)
    return RunResult(SPEC, [first, *rounds], {"weight": np.zeros(3, np.float32)}, TrafficLedger(), 20.0, 0.0)


@pytest.mark.parametrize(
    ("came", "differ", "failed"),
    [({}, 0, []), ({"replies": 3}, 0, [0]), ({"failures": 1}, 0, [1]), ({}, 1, [2])],
)
def test_claims_are_about_every_update_of_every_node(came: dict, differ: int, failed: list[int]) -> None:
    row = fleet.row_of(3.0, [1.0, 2.0, 3.0, 9.0], [100, 200, 300, 10**9], trained(**came), differ)
    found = run([Case("", lambda _: [row], fleet.bounds(SPEC))])
    assert [i for i, claim in enumerate(found.claims) if not claim.ok] == failed
    assert all(claim.gate for claim in found.claims)
    assert (row["nodes"], row["rounds"], row["replies"]) == (4, 2, 8 if "replies" not in came else 7)
    assert (row["first round, s"], row["a later round, s"]) == (10.0, 5.0)
    assert row["CPU s a node and round"] == 2.5
    assert row["of all, GB"] == 1.0
    assert row["KB up a node and round"] == 2.0


@pytest.mark.long
def test_a_small_fleet_trains() -> None:
    spec = replace(fleet.TRAINING, clients=2, rounds=2)
    found = run([Case("", partial(fleet._fleet, spec), fleet.bounds(spec))], quick=True)
    assert [claim.name for claim in found.claims if not claim.ok] == []
    (row,) = found.rows
    assert (row["nodes"], row["replies"]) == (2, 4)
    assert row["CPU s a node and round"] > 0.05
    assert row["memory of a node, MB (PSS)"] > 50.0
