"""Runs that are killed with SIGKILL in the middle of a round and go on to the result of one that nobody touched."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from quick_nodes import quicken

from fedcomp.experiments import engines
from fedcomp.experiments.engines import superlink
from fedcomp.experiments.engines.processes import DeploymentError
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.flower.folder import StateFolder

pytestmark = pytest.mark.slow

SPEC = RunSpec(
    "topk",
    task="digits",
    engine="superlink",
    rounds=4,
    clients=2,
    seed=4,
    settings={"codec.density": 0.05, "momentum": 0.9, "lr": 0.05, "task.hidden": "16", "start_timeout": 300.0},
)
KILLED = 3
"""The round in the middle of which something is killed."""


def bits(result: RunResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in result.arrays.items()}


def written(folder: Path, partition: int) -> int:
    """Return how often the state of a node was written."""
    stamps = StateFolder(folder / str(partition), partition).stamps()
    return max((stamp.number for stamp in stamps.values()), default=0)


@pytest.mark.parametrize("victim", ["server app", "SuperLink"])
def test_a_run_whose_server_is_killed_in_a_round_goes_on_to_the_same_bits(
    victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quicken(monkeypatch)
    whole = engines.run(replace(SPEC, engine="inprocess"))
    checkpoint = tmp_path / "checkpoint"
    states = tmp_path / "checkpoint.nodes"
    used: list[Deployment] = []

    class Watched(Deployment):
        def __enter__(self) -> Deployment:
            used.append(self)
            return super().__enter__()

    def kill() -> None:
        if victim == "server app":
            assert used[0].kill_server_app()
        else:
            os.kill(used[0].children[0].pid, signal.SIGKILL)

    def on_round(record: RoundRecord) -> None:
        if record.round != KILLED - 1:
            return
        # Of the two nodes one has answered the round, and the server waits for the other.
        used[0].pause(1)
        deadline = time.monotonic() + 120
        while written(states, 0) < KILLED:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        kill()
        used[0].resume(1)

    monkeypatch.setattr(superlink, "Deployment", Watched)
    with pytest.raises(DeploymentError):
        engines.run(SPEC, on_round=on_round, checkpoint=checkpoint)
    assert not used[0].folder.exists()

    seen: list[RoundRecord] = []
    resumed = engines.run(SPEC, on_round=seen.append, checkpoint=checkpoint)
    assert [record.round for record in seen] == [3, 4]
    assert [record.round for record in resumed] == [0, 1, 2, 3, 4]
    # Nobody began anew, and the node that had answered in vain answered so again.
    assert [record.metrics["report.fresh"] for record in resumed.rounds[1:]] == [2, 0, 0, 0]
    assert [record.metrics["report.rolled_back"] for record in resumed.rounds[1:]] == [0, 0, 0, 0]
    assert [record.replies for record in resumed] == [0, 2, 2, 2, 2]
    assert bits(resumed) == bits(whole)
    uplinks = [result.ledger.by("round", "payload", direction="up") for result in (resumed, whole)]
    assert uplinks[0] == uplinks[1]


def test_a_dead_node_is_waited_for_once_and_is_the_same_node_under_another_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quicken(monkeypatch)
    timeout = 30.0
    used: list[Deployment] = []

    class Watched(Deployment):
        def __enter__(self) -> Deployment:
            used.append(self)
            return super().__enter__()

    def on_round(record: RoundRecord) -> None:
        if record.round == KILLED - 1:
            used[0].kill(1)
            used[0].start(1)

    monkeypatch.setattr(superlink, "Deployment", Watched)
    spec = replace(SPEC, rounds=8, settings={**SPEC.settings, "timeout": timeout})
    result = engines.run(spec, on_round=on_round, checkpoint=tmp_path / "checkpoint")
    rounds = result.rounds
    assert (rounds[KILLED].replies, rounds[KILLED].failures) == (1, 1)
    # Its old id is in the SuperLink's list for up to a minute, and nobody asks it any more.
    assert [record.failures for record in rounds[KILLED + 1 :]] == [0] * 5
    assert max(record.wall_seconds for record in rounds[KILLED + 1 :]) < timeout
    assert [1] in [record.metrics.get("nodes.returned") for record in rounds[KILLED + 1 :]]
    # What it remembered was on disk, and what was acknowledged is under its name.
    assert rounds[-1].replies == 2
    assert [record.metrics["report.fresh"] for record in rounds[1:]] == [2] + [0] * 7
