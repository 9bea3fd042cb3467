"""``fedcomp status``: what the proxy saw of each node, believed only where the SuperLink took the call."""

from __future__ import annotations

import json
import time

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLWR_PACKAGE_VERSION_METADATA_KEY
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import Folder, create, digest_of
from fedcomp.experiments.security.status import KEY_HEADER, VERSION_HEADER, Callers, names_of, rows


def called(folder: Folder, name: str, version: str = "1.42.0") -> list[tuple[bytes, bytes]]:
    (key,) = (key for key, found in names_of(folder).items() if found == name)
    return [(KEY_HEADER, key.encode()), (VERSION_HEADER, version.encode())]


def test_a_key_is_known_as_flowers_nodes_say_it(tmp_path):
    import base64

    from cryptography.hazmat.primitives import serialization

    folder = create(tmp_path, ["localhost"], 2)
    assert (
        FLEET_HTTP_PUBLIC_KEY_HEADER.encode(),
        FLWR_PACKAGE_VERSION_METADATA_KEY.encode(),
    ) == (KEY_HEADER, VERSION_HEADER)
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
    callers.write(folder.status)
    assert fedcomp(["status", str(tmp_path)]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["part", "name", "id"]
    assert [line.split()[:4] for line in lines] == [
        ["0", "node-0", "19", "online"],
        ["1", "node-1", "18", "away"],
        ["2", "node-2", "-", "never"],
    ]
    assert "1.42.0" in lines[0]
    assert lines[0].split()[-4:] == ["1", "1.50", "20.00", "0"]
    assert last == "1 of 3 nodes online; refused at the port of the nodes: 7 with 403"
    assert fedcomp(["status", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["nodes"]] == ["node-0", "node-1", "node-2"]
    # A lost device that was taken out is not shown.
    (folder.nodes / "node-1.pub").unlink()
    assert len(rows(folder, json.loads(folder.status.read_text()), time.time())) == 2


def test_versions_are_one_line(capsys):
    assert fedcomp(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fedcomp ")
    assert ", flwr 1." in printed
