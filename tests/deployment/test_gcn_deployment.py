"""A graph run on four SuperNodes: an owner is killed, done without for two rounds, and used again when it is back."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick_nodes import quicken

from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "owners_app"


class Fate:
    """Kills the victim and restarts it between two rounds, each once, and lets the server go on."""

    def __init__(self, deployment: Deployment, folder: Path, acts: dict[int, Any]) -> None:
        self.deployment = deployment
        self.folder = folder
        self.acts = acts
        self.killed: list[int] = []

    def __call__(self) -> None:
        for server_round, act in self.acts.items():
            go_on = self.folder / f"go-on-{server_round}"
            if (self.folder / f"round-{server_round}").exists() and not go_on.exists():
                act(self)
                go_on.touch()


@pytest.mark.long
def test_7_14_an_owner_that_is_killed_is_done_without_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    app = importlib.import_module("owners")
    quicken(monkeypatch, "fedcomp.clients.gcn", "fedcomp.strategies.gcn.strategy")

    def kill(fate: Fate) -> None:
        fate.killed = fate.deployment.kill(app.VICTIM)
        assert fate.deployment.processes(app.VICTIM) == {}

    with Deployment(app.OWNERS) as deployment:
        acts = {app.KILLED_AFTER: kill, app.BACK_AFTER: lambda fate: fate.deployment.start(app.VICTIM)}
        fate = Fate(deployment, tmp_path, acts)
        log = deployment.run_app({"out": str(tmp_path)}, limit=500, project=APP, watch=fate)
        assert (tmp_path / "facts.json").exists(), log + deployment.logs(40)
        assert deployment.runs()[0]["status"] == "finished:completed"
    assert len(fate.killed) >= 1

    rounds = json.loads((tmp_path / "facts.json").read_text())
    # In the first round it was found out who is who, and nobody learnt.
    assert [rounds[number]["train"]["clients"] for number in "12345"] == [0, 2, 2, 2, 2]
    for number in "25":
        assert (rounds[number]["absent"], rounds[number]["lost"]) == ({}, {})
        assert rounds[number]["train"]["lost_mass"] == 0.0
        assert sorted(rounds[number]["train"]["rows_sent"]) == ["0", "1", "2", "3"]
    assert rounds["3"]["absent"] == {"3": "its rows did not come"}
    # After a while it is listed no more.
    gone = [{"3": "its node does not answer"}, {"3": "no node of this part is there"}]
    assert rounds["4"]["absent"] in gone
    for number in "34":
        train = rounds[number]["train"]
        assert 0 < train["lost_mass"] < 1
        assert sorted(train["rows_sent"]) == ["0", "1", "2"]
    assert rounds["3"]["train"]["replans"] == 2

    # All else that is reported, and the model, are those of the run in this process, where it is silent and replaced;
    # there it is never listed again, and here as long as it takes.
    here, of = in_process(app)
    expected = app.reported(of)
    rounds["4"]["absent"] = expected["4"]["absent"]
    rounds["4"]["train"]["trips"] = expected["4"]["train"]["trips"]
    assert rounds == expected
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as there:
        assert {name: there[name].tobytes() for name in there.files} == here


def in_process(app: Any) -> tuple[dict[str, bytes], Any]:
    """Return the model and the strategy of the same run in this process: there the victim is silent for two rounds."""

    def plan(delivery: Delivery) -> str:
        return "silent" if delivery.partition == app.VICTIM and delivery.round in (3, 4) else "none"

    over, of = MeteredGrid(InProcessGrid(app.client, app.OWNERS, seed=2, fault=plan)), app.strategy()

    def after(number: int, *_: Any) -> None:
        if number == app.BACK_AFTER:
            over.remove_node(app.VICTIM)
            over.add_node(app.VICTIM)

    config = app.ConfigRecord({"seed": 2})
    found = fit(of, over, app.initial(), app.LAST, timeout=app.TIMEOUT, train_config=config, on_round=after)
    return {name: array.numpy().tobytes() for name, array in found.arrays.items()}, of
