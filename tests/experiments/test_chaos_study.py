"""The study ``chaos``: what it does in which run, and that its claims catch what they are about."""

from __future__ import annotations

from typing import Any

import pytest

from fedcomp.experiments.catalog.chaos import EXPERIMENT
from fedcomp.experiments.chaos import CLOCK, DISK, LINK, NODE, SERVER_APP, SUPERLINK
from fedcomp.experiments.findings import Say
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.studies import chaos as module
from fedcomp.experiments.studies.chaos import faults_of, studied
from fedcomp.experiments.tables import Found, claims_of, findings


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(rounds=16, assignments=("each=1", *assignments))


def ended(number: int, used: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    return {"round": number, "used": list(used), "at": 10.0 * number}


def record(state: bool, **changes: Any) -> Record:
    """A run of which nothing is wrong, with a node killed in round 5 that is back in round 9."""
    rounds = [ended(number, (0, 2, 3) if 5 <= number < 9 else (0, 1, 2, 3)) for number in range(1, 17)]
    done = {"fault": {"round": 5, "kind": NODE, "node": 1, "after": 0.5, "lasts": 1}, "at": 45.0, "processes": 4}
    values: dict[str, Any] = {
        "twice": [],
        "unfinished": [],
        "left": [],
        "abandoned": [[1, 5]],
        "updates": 61,
        "again": 0,
        "noticed": 1,
    }
    values |= {"mass": [] if state else ["node 1: updates, frames and memory do not add up"], "used": 60}
    clock = {"fault": {"round": 12, "kind": CLOCK, "node": 2, "after": 0.0, "lasts": 1}, "at": 111.0, "processes": 4}
    values |= {"lost": 1e-8, "done": [done, clock], "ended": rounds, "seconds": 200.0, "seed": 0, "state": state}
    return Record({**values, **changes})


def claims(*records: Record) -> dict[str, bool | None]:
    found = Found(EXPERIMENT, config(), {}, Say())
    found.studied = studied(config(), Records(records))
    return {each.name: each.ok for each in claims_of(found)}


def test_a_run_that_loses_nothing_keeps_all_claims() -> None:
    assert set(claims(record(True), record(False)).values()) == {True}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ended": [ended(number) for number in range(1, 16)]}, "rounds accounted for"),
        # The same round again is not another one.
        ({"ended": [ended(number) for number in (*range(1, 16), 15)]}, "rounds accounted for"),
        ({"unfinished": ["to the SuperLink the run is running"]}, "runs that did not end by themselves"),
        ({"twice": ["update 3 of node 1 is in the model 2 times"]}, "updates counted twice"),
        ({"mass": ["node 2: updates, frames and memory do not add up"]}, "with a state folder: nodes that lost mass"),
        ({"lost": 1e-3}, "with a state folder: largest share of a node's mass without a place"),
        ({"left": ["flower-supernode"]}, "processes left behind"),
        ({"noticed": 0}, "wrong clocks that the node's log did not name"),
    ],
)
def test_a_run_that_loses_something_fails_the_claim_about_it(wrong: dict[str, Any], named: str) -> None:
    found = claims(record(True), record(True, **wrong), record(False))
    assert [name for name, ok in found.items() if not ok] == [named]


def test_a_judge_that_sees_no_loss_without_a_folder_fails() -> None:
    found = claims(record(True), record(False, mass=[]))
    assert [name for name, ok in found.items() if not ok] == ["without a state folder: nodes that lost mass"]


def test_what_is_lost_without_a_folder_is_named() -> None:
    tables = studied(config(), Records([record(True), record(False)])).tables
    assert [row[0] for row in tables[-1].rows] == ["node 1: updates, frames and memory do not add up"]
    overview = dict(zip(tables[0].columns, tables[0].rows[0], strict=True))
    assert overview["abandoned (node, message)"] == "1: 5"


def test_every_seed_has_all_faults_and_a_run_without_folders_fills_no_disk() -> None:
    asked = EXPERIMENT.configure()
    for seed in range(3):
        kinds = [fault.kind for fault in faults_of(asked, seed, state=True)]
        assert set(kinds) == {NODE, LINK, DISK, CLOCK, SERVER_APP, SUPERLINK}
        assert len(kinds) == 14
        bare = [fault.kind for fault in faults_of(asked, seed, state=False)]
        assert bare == [kind for kind in kinds if kind != DISK]


def test_where_nothing_can_be_done_all_claims_are_skipped_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unavailable", lambda: "slow links need root, for network namespaces")
    said: list[str] = []
    found = findings(EXPERIMENT, config(), {}, Say(said.append))
    assert said == ["slow links need root, for network namespaces"]
    assert {each.skipped for each in found.claims} == {said[0]}
    assert found.answer == said[0]
