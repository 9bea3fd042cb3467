"""Gossip over real links of four nodes: one cannot be reached at the address it gives, one has no listener."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from quick_nodes import quicken

from fedcomp.experiments.engines.processes import Child
from fedcomp.experiments.engines.superlink import Deployment

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "peers_app"
UNREACHABLE, WITHOUT = 2, 3
RUNS = [
    ["hub", "hub", "ring", 4, 10],
    ["links", "peers", "ring", 4, 10],
    ["small", "peers", "edges:0-1", 2, 10],
    ["large", "peers", "edges:0-1", 2, 2000],
]


class Mixed(Deployment):
    """Every node with a listener but one; of another the address that it gives is nobody's."""

    def _launch_node(self, node: int) -> Child:
        arguments = ["--insecure", "--superlink", self.address, "--port", str(self._node_ports[node])]
        arguments += ["--partition", str(node), "--of", str(self.nodes)]
        if node != WITHOUT:
            arguments += ["--peer", f"127.0.0.1:{self._peer_ports[node]}", "--peer-store", str(self.peer_store(node))]
        if node == UNREACHABLE:
            # The port of the one that has no listener.
            arguments += ["--peer-announce", f"127.0.0.1:{self._peer_ports[WITHOUT]}"]
        command = [sys.executable, "-m", "fedcomp.clients.edge", *arguments]
        return self._launch(f"SuperNode {node}", f"node-{node}", command)


@pytest.mark.long
def test_a_deployment_gossips_from_node_to_node_and_through_the_server_where_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch)
    with Mixed(4, peers=True) as deployment:
        config = {"out": str(tmp_path), "runs": json.dumps(RUNS)}
        log = deployment.run_app(config, limit=400, project=APP)
        assert (tmp_path / "found.json").exists(), log + deployment.logs(40)
    found = json.loads((tmp_path / "found.json").read_text())
    hub, links, small, large = (found[run[0]] for run in RUNS)

    # The same bits, round by round, whatever way each message took.
    assert links["models"] == hub["models"]
    assert links["edge"] == hub["edge"]
    assert hub["peer"] == 0
    assert hub["events"] == []
    for taken, reasons in zip(links["links"], links["mailbox"], strict=True):
        assert set(taken) == {"0>1", "1>0", "2>1", "3>0"}
        assert sorted(reason[:8] for reason in reasons) == ["edge 0>3", "edge 1>2", "edge 2>3", "edge 3>2"]
    first = {reason[5:8]: reason for reason in links["mailbox"][0]}
    assert "vertex 3 has no listener" in first["0>3"]
    assert "vertex 3 has no listener" in first["2>3"]
    assert "Connection refused" in first["1>2"]
    assert "Connection refused" in first["3>2"]
    assert links["events"] == ["mailbox"]
    assert links["peer"] == sum(sum(taken.values()) for taken in links["links"])

    # What a link takes grows with the model, what passes the server does not.
    assert small["events"] == large["events"] == ["unknown"]
    assert large["peer"] > 20 * small["peer"]
    assert abs(large["hub"] - small["hub"]) < 200
    for run in (small, large):
        by_link = [sum(taken.values()) for taken in run["links"]]
        assert by_link == [edge + n * (36 + 48) for edge, n in zip(run["edge"], run["messages"], strict=True)]
