"""``fedcomp status``: what the proxy saw of each node, believed only where the SuperLink took the call."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import time

import pytest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLWR_PACKAGE_VERSION_METADATA_KEY
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from toy import client_app, fedavg, model

import fedcomp as fc
from fedcomp.clients.compressed import compression
from fedcomp.experiments.engines.processes import free_ports
from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import Folder, create, digest_of
from fedcomp.experiments.security.link import LinkOptions, prepare
from fedcomp.experiments.security.proxy import Limits
from fedcomp.experiments.security.status import (
    KEY_HEADER,
    VERSION_HEADER,
    Callers,
    Rounds,
    names_of,
    rows,
    write_prometheus,
)
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.report import WITHHELD, Report
from fedcomp.logs import ROUNDS_VARIABLE
from fedcomp.strategies.round_log import RoundLog, line


def called(folder: Folder, name: str, version: str = "1.42.0") -> list[tuple[bytes, bytes]]:
    (key,) = (key for key, found in names_of(folder).items() if found == name)
    return [(KEY_HEADER, key.encode()), (VERSION_HEADER, version.encode())]


def test_a_key_is_known_as_flowers_nodes_say_it(tmp_path):
    import base64

    from cryptography.hazmat.primitives import serialization

    folder = create(tmp_path, ["localhost"], 2)
    assert (FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), FLWR_PACKAGE_VERSION_METADATA_KEY.encode()) == (
        KEY_HEADER,
        VERSION_HEADER,
    )
    public = serialization.load_ssh_public_key((folder.nodes / "node-1.pub").read_bytes())
    assert names_of(folder)[base64.b64encode(public_key_to_bytes(public)).decode()] == "node-1"


def test_what_the_superlink_did_not_take_is_counted_and_not_believed(tmp_path):
    """A key is public: whoever writes it into a call must not look like its node."""
    folder = create(tmp_path, ["localhost"], 1)
    callers = Callers(names_of(folder))
    callers.note(called(folder, "node-0", "evil"), "10.9.9.9", 401, 5, 5)
    callers.note([(KEY_HEADER, b"somebody")], "10.9.9.9", 200, 5, 5)
    caller = callers.nodes.pop("node-0")
    assert not callers.nodes
    assert (caller.last, caller.address, caller.version, caller.calls, caller.refused) == (0.0, "", "", 0, 1)


def test_one_screen_shows_every_node_and_one_document_the_same(tmp_path, capsys):
    folder = create(tmp_path, ["localhost"], 3)
    assert fedcomp(["status", str(tmp_path)]) == 2
    assert "no link has run" in capsys.readouterr().err
    folder.kept.mkdir()
    folder.registered.write_text(f"node-0 17\nnode-1 18 {digest_of(folder.nodes / 'node-1.pub')}\nnode-0 19 x\n")
    callers = Callers(names_of(folder))
    callers.note(called(folder, "node-0"), "10.0.0.7", 200, 1_500_000, 20_000_000)
    callers.note(called(folder, "node-1"), "10.0.0.8", 200, 1, 1)
    callers.nodes["node-1"].last -= 3600.0
    callers.refused["403"] += 7
    callers.write(folder.status, rounds={"19": {"round": 3, "of": 5, "time": time.time()}})
    assert fedcomp(["status", str(tmp_path)]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["part", "name", "id"]
    assert [line.split()[:4] for line in lines] == [
        ["0", "node-0", "19", "online"],
        ["1", "node-1", "18", "away"],
        ["2", "node-2", "-", "never"],
    ]
    assert "1.42.0" in lines[0]
    assert ["3 of 5" in line for line in lines] == [True, False, False]
    assert lines[0].split()[-4:] == ["1", "1.50", "20.00", "0"]
    assert last == "1 of 3 nodes online; refused at the port of the nodes: 7 with 403"
    assert fedcomp(["status", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["nodes"]] == ["node-0", "node-1", "node-2"]
    # A lost device that was taken out is not shown.
    (folder.nodes / "node-1.pub").unlink()
    assert len(rows(folder, json.loads(folder.status.read_text()), time.time())) == 2


def test_the_end_of_a_round_is_a_line_of_the_log_and_the_last_round_of_the_nodes_that_were_used(tmp_path, monkeypatch):
    """As a strategy writes it, with a client whose words would be other lines, or colours."""
    path = tmp_path / "rounds.jsonl"
    path.write_text("of an earlier link")
    rounds = Rounds(path)
    monkeypatch.setenv(ROUNDS_VARIABLE, str(path))

    def broken(message, context, forward):
        first = message.content.config_records["config"]["server-round"] == 1
        if first and context.node_config["partition-id"] == 1:
            raise ValueError("\x1b[31mnothing\nround 9: \u00e9")
        return forward(message, context)

    grid = InProcessGrid(client_app([compression(), broken]), 3)
    strategy = fc.Compressed(fedavg(min_train_nodes=3, fraction_evaluate=0.0), fc.QSGD(levels=7))
    assert rounds.new() == []
    strategy.start(grid, model(), num_rounds=2)
    first, second = rounds.new()
    assert first.startswith("Compressed(FedAvg), round 1 of 2: 3 asked, 2 used, 1 refused")
    assert first.isascii()
    assert first.isprintable()
    assert second.startswith("Compressed(FedAvg), round 2 of 2: 3 asked, 3 used, training replies")
    ids = {str(node) for node in grid.get_node_ids()}
    assert {node: end["round"] for node, end in rounds.last.items()} == dict.fromkeys(ids, 2)
    # Whoever was not used has the round before.
    later = Report(3, asked=3, used=1, weights=dict.fromkeys(map(int, ids), 1.0))
    kept = sorted(ids)[0]
    later.refused = {int(node): "an outlier" for node in ids if node != kept}
    RoundLog("Compressed").conclude(later)
    assert rounds.new() == ["Compressed, round 3 of 2: " + line(later)]
    assert {node: end["round"] for node, end in rounds.last.items()} == {**dict.fromkeys(ids, 2), kept: 3}
    # Where nobody may know who took part, nobody is named.
    RoundLog("Private").conclude(Report(4, asked=3, used=3, weights=dict.fromkeys(map(int, ids), 1.0)), withheld=True)
    (said,) = rounds.new()
    assert WITHHELD in said
    assert max(end["round"] for end in rounds.last.values()) == 3
    # A line that is being written is not one yet, and one that is damaged ends nothing.
    with path.open("ab") as file:
        file.write(b'{"round": 3}\n{"rou')
    (said,) = rounds.new()
    assert "does not describe a round" in said
    assert rounds.new() == []


def test_versions_are_one_line(capsys):
    assert fedcomp(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fedcomp ")
    assert ", flwr 1." in printed


def test_counters_are_written_as_prometheus_reads_them(tmp_path):
    folder = create(tmp_path / "keys", ["localhost"], 2)
    callers, path = Callers(names_of(folder)), tmp_path / "fedcomp.prom"
    callers.note(called(folder, "node-0"), "10.0.0.7", 200, 1_500, 20_000)
    callers.note(called(folder, "node-0"), "10.0.0.7", 200, 500, 0)
    callers.note(called(folder, "node-1"), "10.9.9.9", 401, 5, 5)
    callers.refused.update({"403": 7, "reset": 2, 'a "\\\n': 1})
    before = os.umask(0o077)
    try:
        write_prometheus(path, callers, rounds=3, connections=4)
    finally:
        os.umask(before)
    # node_exporter is another user.
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["fedcomp.prom"]
    lines = path.read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(
        re.fullmatch(r'fedcomp_link_\w+(\{\w+="([^"\\\n]|\\.)*"(,\w+="\w+")?\})? [0-9.e+]+', each) for each in samples
    )
    assert {
        'fedcomp_link_node_bytes_total{node="node-0",direction="up"} 2000',
        'fedcomp_link_node_bytes_total{node="node-0",direction="down"} 20000',
        'fedcomp_link_node_calls_total{node="node-0",result="taken"} 2',
        'fedcomp_link_node_calls_total{node="node-1",result="refused"} 1',
        'fedcomp_link_refused_total{reason="403"} 7',
        'fedcomp_link_refused_total{reason="reset"} 2',
        'fedcomp_link_refused_total{reason="a \\"\\\\\\n"} 1',
        "fedcomp_link_rounds_total 3",
        "fedcomp_link_connections 4",
        "fedcomp_link_nodes_online 1",
    } <= set(samples)
    # Of a node that never got in there is no last contact.
    assert sum("last_contact" in each for each in samples) == 1
    names = {each.partition("{")[0].partition(" ")[0] for each in samples}
    assert names == {line.split()[2] for line in lines if line.startswith("# TYPE")}


@pytest.mark.parametrize("option", ["metrics", "database"])
def test_a_file_in_no_folder_is_refused_before_the_start(option, tmp_path):
    public, port = free_ports(2)
    asked = LinkOptions(Folder(tmp_path), ("127.0.0.1", public), port, tmp_path / "state.db", True, Limits())
    with pytest.raises(fc.ConfigError, match="nowhere is not a folder"):
        prepare(dataclasses.replace(asked, **{option: tmp_path / "nowhere" / "file"}))
