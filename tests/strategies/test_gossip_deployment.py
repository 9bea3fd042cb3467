"""Sparse-Push on four SuperNodes: one is paused, then it is killed and comes back, and the others go on meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from quick_nodes import quicken

from fedcomp.errors import ConfigError
from fedcomp.experiments.engines.superlink import Deployment

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "gossip_app"
VICTIM = 3


class Fate:
    """Does to the victim what belongs between two rounds, each once, and lets the server go on."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment = deployment
        self.folder = folder
        self.acts = {1: self.pause, 2: self.resume, 3: self.replace}
        self.paused: list[int] = []
        self.killed: list[int] = []

    def __call__(self) -> None:
        for server_round, act in self.acts.items():
            go_on = self.folder / f"go-on-{server_round}"
            if (self.folder / f"round-{server_round}").exists() and not go_on.exists():
                act()
                go_on.touch()

    def pause(self) -> None:
        self.paused = self.deployment.pause(VICTIM)

    def resume(self) -> None:
        assert self.deployment.resume(VICTIM) == self.paused

    def replace(self) -> None:
        self.killed = self.deployment.kill(VICTIM)
        assert self.deployment.processes(VICTIM) == {}
        self.deployment.start(VICTIM)


@pytest.mark.long
def test_a_node_that_was_paused_loses_nothing_and_one_that_was_killed_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch, "fedcomp.clients.gossip", "fedcomp.strategies.gossip.strategy")
    with Deployment(4) as deployment:
        with pytest.raises(ConfigError, match="node 0 runs already"):
            deployment.start(0)
        fate = Fate(deployment, tmp_path)
        log = deployment.run_app({"out": str(tmp_path)}, limit=300, project=APP, watch=fate)
        assert (tmp_path / "facts.json").exists(), log + deployment.logs(40)
        assert deployment.runs()[0]["status"] == "finished:completed"
    assert fate.paused
    assert len(fate.killed) >= 1

    facts = json.loads((tmp_path / "facts.json").read_text())
    rounds, figures = facts["rounds"], facts["figures"]
    # Paused: the others went on, its instruction was said again, and nobody was given up.
    assert rounds["2"]["events"] == {"unanswered": [f"vertex {VICTIM}: nothing came back in time"]}
    assert [rounds[r]["members"] for r in "123"] == [[0, 1, 2, 3]] * 3
    assert "events" not in rounds["3"] or rounds["3"]["events"] == {}
    assert facts["repeated"] == 2
    # Killed: its successor is believed when the dead process has not answered, and says that it knows nothing. What was
    # under way to it goes back to the senders.
    assert rounds["4"]["members"] == [0, 1, 2, 3]
    assert rounds["4"]["events"]["unanswered"] == [f"vertex {VICTIM}: nothing came back in time"]
    assert "memory is lost" in rounds["5"]["events"]["gone"][0]
    assert rounds["6"]["events"]["joined"] == [f"vertex {VICTIM}: with a new state"]
    assert rounds["6"]["traffic"]["edge.resync"] > 0
    # All mass is there but that of the dead process, and all four have the same model.
    (lost,) = facts["lost"]
    assert 0.1 < lost < 2.0
    assert figures["observed"] == 4
    assert figures["sum_w"] == pytest.approx(4.0 - lost, abs=1e-12)
    assert figures["distance"] < 1e-5
    assert figures["first_max"] - figures["first_min"] < 1e-6
    assert figures["first_mean"] > 0.1
    assert np.load(tmp_path / "arrays.npz")["weight"].shape == (20, 10)
