"""Three registered nodes with links of their own: mutual TLS with the keys that ``fedcomp certificates`` listed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from link_site import Site
from quick_nodes import quicken
from running_listener import free_port

from fedcomp.experiments.program import main as fedcomp

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "peers_app"
NODES = 3


@pytest.mark.long
def test_gossip_over_mutual_tls_and_a_node_that_nobody_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the address that node 2 announces nobody listens: what is for it goes through the server, sealed."""
    quicken(monkeypatch)
    with contextlib.closing(Site(tmp_path)) as site:
        folder = site.folder
        assert fedcomp(["certificates", str(folder.path), "--host", "127.0.0.1", "--nodes", str(NODES)]) == 0
        site.link()
        for node in range(NODES):
            options = ["--peer", f"127.0.0.1:{site.node_ports.pop()}", "--peer-store", str(tmp_path / f"store-{node}")]
            options += ["--peer-keys", str(folder.peers)]
            options += ["--peer-announce", f"127.0.0.1:{free_port()}"] if node == 2 else []
            site.until(site.peer_node(f"node-{node}", node, NODES, *options), "listening for parcels on")
        runs = [["hub", "hub", "ring", NODES, 10], ["links", "peers", "ring", NODES, 10]]
        given = tmp_path / "run.toml"
        given.write_text(f"out = '{tmp_path}'\nruns = '{json.dumps(runs)}'\n")
        printed = site.flwr("run", str(APP), "link", "--stream", "--run-config", str(given))
        assert (tmp_path / "found.json").exists(), printed
        logs = [(tmp_path / f"node-{node}.log").read_text() for node in range(NODES)]
    found = json.loads((tmp_path / "found.json").read_text())
    hub, links = found["hub"], found["links"]
    assert links["models"] == hub["models"]
    assert links["peer"] > sum(links["edge"]) / 2
    for reasons in links["mailbox"]:
        assert sorted(reason[:8] for reason in reasons) == ["link 0>2", "link 1>2"]
        assert all("Connection refused" in reason or "is not retried before round" in reason for reason in reasons)
    assert sum("Connection refused" in reason for reasons in links["mailbox"] for reason in reasons) >= 2
    assert all("Traceback" not in log for log in logs)
