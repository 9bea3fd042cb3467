"""Four registered nodes with links of their own: mutual TLS with the keys that ``fedcomp certificates`` listed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from link_site import Site
from peer_key_files import make_key
from quick_nodes import quicken

from fedcomp.experiments.program import main as fedcomp

APP = Path(__file__).parents[1] / "strategies" / "peers_app"
NODES = 4


@pytest.mark.slow
def test_gossip_over_mutual_tls_and_a_pair_that_does_not_trust_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has another key in its list for node 3: neither of them uses the link between them."""
    quicken(monkeypatch)
    with contextlib.closing(Site(tmp_path)) as site:
        folder = site.folder
        assert fedcomp(["certificates", str(folder.path), "--host", "127.0.0.1", "--nodes", str(NODES)]) == 0
        wrong = tmp_path / "wrong"
        other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
        listed = folder.peers.read_text().splitlines()
        wrong.write_text("\n".join([*listed[:3], f"3 {other}"]))
        site.link()
        for node in range(NODES):
            options = ["--peer", f"127.0.0.1:{site.node_ports.pop()}", "--peer-store", str(tmp_path / f"store-{node}")]
            options += ["--peer-keys", str(wrong if node == 0 else folder.peers)]
            site.until(site.peer_node(f"node-{node}", node, NODES, *options), "listening for parcels on")
        runs = [["hub", "hub", "ring", NODES, 10], ["links", "peers", "ring", NODES, 10]]
        given = tmp_path / "run.toml"
        given.write_text(f"out = '{tmp_path}'\nruns = '{json.dumps(runs)}'\n")
        printed = site.flwr("run", str(APP), "link", "--stream", "--run-config", str(given))
        assert (tmp_path / "found.json").exists(), printed
        logs = {node: (tmp_path / f"node-{node}.log").read_text() for node in range(NODES)}
    found = json.loads((tmp_path / "found.json").read_text())
    hub, links = found["hub"], found["links"]
    assert links["models"] == hub["models"]
    direct = {"0>1", "1>0", "1>2", "2>1", "2>3", "3>2"}
    for taken, reasons in zip(links["links"], links["mailbox"], strict=True):
        assert set(taken) - {"3>0"} == direct
        assert sorted(reason[:8] for reason in reasons) == ["edge 0>3", "edge 3>0"]
    first = {reason[5:8]: reason for reason in links["mailbox"][0]}
    assert "a key that is not in the list of peer keys, not that of partition 3; nothing was sent" in first["0>3"]
    assert "is this node's key in its list of peer keys?" in first["3>0"]
    assert "unlisted key" in logs[0]
    assert all("Traceback" not in log for log in logs.values())
