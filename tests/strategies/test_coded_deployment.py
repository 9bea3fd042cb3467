"""A node of a real deployment is killed after it has shared; the round completes with its contribution, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from quick_nodes import quicken

from fedcomp.coding.transport import Parcel
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "vanishing_app"
NODES = 3
VICTIM = 2


@pytest.fixture(scope="module")
def vanishing() -> ModuleType:
    """Return the bundle's module, as this process sees it."""
    spec = importlib.util.spec_from_file_location("vanishing", APP / "vanishing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def here(vanishing: ModuleType, lost: bool) -> dict[str, bytes]:
    """Return the uncoded round's model in this process, over all clients or without the victim."""
    fault = ScriptedFaults({(1, VICTIM): "offline"} if lost else {})
    with InProcessGrid(vanishing.client, NODES, fault=fault) as grid:
        result = vanishing.uncoded(NODES).start(grid, vanishing.initial(), num_rounds=1)
    return {key: array.numpy().tobytes() for key, array in result.arrays.items()}


def executors(processes: dict[int, str]) -> int:
    """Return how many processes there are of the executor: itself, a warm one of the bundle, one of each message."""
    return sum("fedcomp.clients.edge.executor" in command for command in processes.values())


class Killer:
    """Kills the victim, with everything that belongs to it, as soon as all others hold its shards."""

    def __init__(self, deployment: Deployment, gone: Path) -> None:
        self.deployment = deployment
        self.gone = gone
        self.processes: dict[int, str] = {}
        self.killed: list[int] = []

    def __call__(self) -> None:
        if not self.killed and all(VICTIM in self.sources(node) for node in range(NODES) if node != VICTIM):
            self.processes = self.deployment.processes(VICTIM)
            if executors(self.processes) > 3:
                return  # the app of the message before is about to end, on its own
            self.killed = self.deployment.kill(VICTIM)
            self.gone.touch()

    def held(self, node: int) -> list[Parcel]:
        """Return the parcels in the store of ``node``."""
        return [Parcel.from_bytes(p.read_bytes()) for p in sorted(self.deployment.peer_store(node).glob("*.parcel"))]

    def sources(self, node: int) -> set[int]:
        return {parcel.source for parcel in self.held(node)}


@pytest.mark.long
def test_a_node_killed_after_sharing_is_in_the_sum_bit_for_bit(
    vanishing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bundle holds the two apps only.
    quicken(monkeypatch, "fedcomp.clients.client", "fedcomp.strategies.coded.strategy")
    with Deployment(NODES, peers=True) as deployment:
        killer = Killer(deployment, tmp_path / "gone")
        config = {"clients": NODES, "symbols": NODES - 1, "lingers": VICTIM, "out": str(tmp_path)}
        log = deployment.run_app(config, limit=400, project=APP, watch=killer)
        assert (tmp_path / "facts.json").exists(), log + deployment.logs(40)
        assert deployment.runs()[0]["status"] == "finished:completed"
        shards = {node: [p for p in killer.held(node) if p.source == VICTIM] for node in range(NODES) if node != VICTIM}

        # Supervisor, SuperNode, listener, and the executor with its warm process and the one the app ran in:
        # all of them, and while it ran.
        commands = " ".join(killer.processes.values())
        for name in ("fedcomp.clients.edge --insecure", "flower-supernode", "fedcomp.coding.listener"):
            assert name in commands
        assert executors(killer.processes) == 3
        assert set(killer.processes) <= set(killer.killed)
        assert deployment.processes(VICTIM) == {}
        assert deployment.children[1 + VICTIM].returncode == -9

    there = dict(np.load(tmp_path / "arrays.npz"))
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["included"] == [0, 1, 2]
    assert facts["coded"]["excluded"] == {}
    assert (facts["coded"]["symbols"], facts["coded"]["shards"]) == (2, 3)

    whole, without = here(vanishing, lost=False), here(vanishing, lost=True)
    assert {key: array.tobytes() for key, array in there.items()} == whole
    assert whole != without

    # What the victim sent it could not report any more.
    assert [len(held) for held in shards.values()] == [1] * 2
    assert set(facts["peer"]) == {"0", "1"}
