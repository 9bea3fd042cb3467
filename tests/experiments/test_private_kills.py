"""The ledger survives SIGKILL of the server at any point: what left was paid for, and the budget holds for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

EXPECTED = {
    # Events on disk at the kill, noisy values that existed by then, last round of the resumed run.
    "before the event": (1, 1, 4),
    "within the event's line": (1, 1, 4),
    "between the event's line and the head": (2, 1, 3),
    "after the event": (2, 1, 3),
    "after the noise": (2, 2, 3),
    "before the checkpoint": (2, 2, 3),
    "after the checkpoint": (2, 2, 4),
}


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("kills")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
    done = subprocess.run(
        [sys.executable, str(HERE / "private_kills.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_every_point_was_tried(kills: dict[str, dict]) -> None:
    assert set(kills) == set(EXPECTED)
    assert {found["killed"] for found in kills.values()} == {-signal.SIGKILL}


@pytest.mark.long
@pytest.mark.parametrize("point", EXPECTED)
def test_what_left_was_paid_for_and_the_budget_holds(point: str, kills: dict[str, dict]) -> None:
    at_kill, at_end = kills[point]["at kill"], kills[point]["at end"]
    events, left, last = EXPECTED[point]
    assert (at_kill["events"], at_kill["left"]) == (events, left)
    assert at_end["code"] == 0
    assert at_end["rounds"] == last
    # Four releases are what the budget pays for, however the rounds they were for ended.
    assert at_end["events"] == at_end["privacy.releases"] == 4
    assert at_end["left"] <= at_end["events"]
    assert at_end["privacy.epsilon"] <= 4.5
    assert ("the budget of epsilon 4.5" in at_end["ended"]) == (last < 4)
