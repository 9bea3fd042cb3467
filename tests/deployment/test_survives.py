"""Runs that are killed with SIGKILL in the middle of a round and go on to the result of one that nobody touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from quick_nodes import quicken
from running_listener import wait_until

from fedcomp.experiments import engines
from fedcomp.experiments.engines import superlink
from fedcomp.experiments.engines.processes import DeploymentError, processes_with
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.server_app import CHECKPOINT_KEY, OUT_KEY
from fedcomp.experiments.spec import ROUNDS_FILE, RoundRecord, RunResult, RunSpec
from fedcomp.flower.folder import StateFolder

pytestmark = [pytest.mark.engines, pytest.mark.long]

SPEC = RunSpec(
    "topk",
    task="digits",
    engine="superlink",
    rounds=4,
    clients=2,
    seed=4,
    settings={"codec.density": 0.05, "momentum": 0.9, "lr": 0.05, "task.hidden": "16", "start_timeout": 300.0},
)
WARM = ("fedcomp.clients.app", "torch")
KILLED = 3
"""The round in the middle of which something is killed."""


def bits(result: RunResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in result.arrays.items()}


def written(folder: Path, partition: int) -> int:
    """Return how often the state of a node was written."""
    stamps = StateFolder(folder / str(partition), partition).stamps()
    return max((stamp.number for stamp in stamps.values()), default=0)


def in_the_round(deployment: Deployment, states: Path, kill: Callable[[], object], writes: int = KILLED) -> None:
    """Kill when of the two nodes one has answered the round, and the server waits for the other."""
    paused = sorted(deployment.processes(1))
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: written(states, 0) >= writes, 120.0)
    kill()
    for pid in paused:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_run_whose_superlink_is_killed_in_a_round_goes_on_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a server app that is killed: the next test."""
    quicken(monkeypatch, *WARM)
    whole = engines.run(replace(SPEC, engine="inprocess"))
    checkpoint = tmp_path / "checkpoint"
    states = tmp_path / "checkpoint.nodes"
    used: list[Deployment] = []

    class Watched(Deployment):
        def __enter__(self) -> Deployment:
            used.append(self)
            return super().__enter__()

    def kill() -> None:
        os.kill(used[0].children[0].pid, signal.SIGKILL)

    def on_round(record: RoundRecord) -> None:
        if record.round == KILLED - 1:
            in_the_round(used[0], states, kill)

    monkeypatch.setattr(superlink, "Deployment", Watched)
    with pytest.raises(DeploymentError):
        engines.run(SPEC, on_round=on_round, checkpoint=checkpoint)
    # Its server app, too, which would ask for its SuperLink for minutes.
    assert processes_with("FLWR_HOME", str(used[0].folder / "superlink")) == {}
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


DECENTRALISED = replace(
    SPEC,
    system="choco",
    settings={"lr": 0.05, "gamma": 0.3, "task.hidden": "16", "start_timeout": 300.0, "evaluate_every": 100},
)


def test_a_killed_server_app_is_continued_by_another_run_of_the_same_superlink(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quicken(monkeypatch, *WARM)
    whole = engines.run(replace(DECENTRALISED, engine="inprocess"))
    states, out = tmp_path / "states", tmp_path / "out"
    config = {**DECENTRALISED.to_run_config(), CHECKPOINT_KEY: str(tmp_path / "checkpoint"), OUT_KEY: str(out)}
    killed: list[int] = []
    with Deployment(DECENTRALISED.clients, states=states) as deployment:

        def watch() -> None:
            lines = (out / ROUNDS_FILE).read_text().splitlines() if (out / ROUNDS_FILE).exists() else []
            if not killed and lines and json.loads(lines[-1])["round"] == KILLED - 1:
                # Where nodes post to each other they also keep a key from the start.
                in_the_round(deployment, states, lambda: killed.extend(deployment.kill_server_app()), KILLED + 1)

        deployment.run_app(config, limit=300, watch=watch)
        assert killed
        assert deployment.runs()[0]["status"] == "finished:failed"
        assert not (out / "result.json").exists()
        deployment.run_app(config, limit=300)
    resumed = RunResult.load(out)
    assert [record.round for record in resumed] == [0, 1, 2, 3, 4]
    assert [record.metrics["report.fresh"] for record in resumed.rounds[1:]] == [2, 0, 0, 0]
    assert all("nodes.returned" not in record.metrics for record in resumed.rounds)
    assert bits(resumed) == bits(whole)


def test_a_dead_node_is_waited_for_once_and_is_the_same_node_under_another_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Short rounds although there is a timeout that a busy machine keeps: it must end before the SuperLink gives up the
    # dead node by itself.
    quicken(monkeypatch, *WARM)
    timeout = 40.0
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
    rounds = engines.run(spec, on_round=on_round, checkpoint=tmp_path / "checkpoint").rounds
    assert (rounds[KILLED].replies, rounds[KILLED].failures) == (1, 1)
    # Its old id is in the SuperLink's list for up to a minute, and nobody asks it any more.
    assert [record.failures for record in rounds[KILLED + 1 :]] == [0] * 5
    assert max(record.wall_seconds for record in rounds[KILLED + 1 :]) < timeout
    assert [1] in [record.metrics.get("nodes.returned") for record in rounds[KILLED + 1 :]]
    # What it remembered was on disk, and what was acknowledged is under its name.
    assert rounds[-1].replies == 2
    assert [record.metrics["report.fresh"] for record in rounds[1:]] == [2] + [0] * 7
