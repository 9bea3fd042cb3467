"""``fedcomp certificates`` and ``fedcomp link``: a run over TLS through the proxy, and everybody who is turned away."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from link_site import Site
from other_users import NOBODY, as_nobody
from quick_nodes import quicken

from fedcomp.experiments import engines
from fedcomp.experiments.engines.processes import processes_with
from fedcomp.experiments.engines.superlink import APP
from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import create
from fedcomp.experiments.security.status import rows
from fedcomp.experiments.server_app import CHECKPOINT_EVERY_KEY, CHECKPOINT_KEY
from fedcomp.experiments.spec import RESULT_FILE, ROUNDS_FILE, RunSpec

pytestmark = [pytest.mark.engines, pytest.mark.long]

SPEC = RunSpec("topk", task="digits", rounds=2, clients=2, seed=4, settings={"codec.density": 0.05, "lr": 0.05})


@pytest.fixture
def site(tmp_path, monkeypatch):
    # The bundle holds the two apps only.
    quicken(monkeypatch, "fedcomp.clients.app", "torch")
    with contextlib.closing(Site(tmp_path)) as made:
        yield made


def authentication(key: Path, age: float) -> dict[str, str]:
    """Return the headers of a call by the holder of ``key`` whose clock is ``age`` seconds late."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    stamp = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    signature = sign_message(private, stamp.encode("ascii"))
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public_key_to_bytes(private.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        TIMESTAMP_HEADER: stamp,
    }


def command_lines(home: Path) -> list[str]:
    """Return the command lines of all processes whose Flower home is below a folder."""
    names = {path.name for path in home.iterdir() if path.is_dir()}
    return [line for name in names for line in processes_with("FLWR_HOME", str(home / name)).values()]


def log_lines(child, text: str) -> int:
    return sum(text in line for line in child.log.read_text().splitlines())


def test_a_run_over_tls_gives_the_bits_of_this_process_and_strangers_get_nowhere(site, tmp_path):
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    folder = site.folder
    assert fedcomp(["certificates", str(folder.path), "--host", "127.0.0.1", "--nodes", "2"]) == 0
    link = site.link()
    good = [site.node(f"node-{i}", folder.nodes / f"node-{i}", i) for i in range(2)]
    for child in good:
        site.until(child, "Starting Flower SuperExec")

    # A key that nobody registered, no key, and a server that another authority vouches for.
    other = create(tmp_path / "other", ["127.0.0.1"], 1)
    unregistered = site.node("unregistered", other.nodes / "node-0", 0)
    without = site.node("without", None, 0)
    wrong = site.node("wrong", folder.nodes / "node-1", 0, ca=other.ca)
    assert "2004" in site.ended(unregistered)
    assert "2001" in site.ended(without)
    assert "CERTIFICATE_VERIFY_FAILED" in site.ended(wrong)

    # Who has the certificate, but no key: the port of the nodes gives no orders.
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.toml").write_text(
        f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = "127.0.0.1:{site.public}"\n'
        f'root-certificates = "{folder.ca}"\n'
    )
    refused = "this port passes only calls of nodes"
    assert "403" in site.flwr("supernode", "register", str(other.nodes / "node-0.pub"), home=stranger, status=1)
    assert "403" in site.flwr("run", str(APP), "link", home=stranger, status=1)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/health", "/docs", "/v1/fleet/../control/list"):
        answer = site.post(path)
        assert (answer.status_code, refused in answer.text) == (403, True), path
    log = link.log.read_text()
    assert "proxy: refused 127.0.0.1: 403 '/v1/control/start-run'" in log
    # Nor does the SuperLink's own, to one on this machine without the secret of the SuperExec.
    assert site.post("/v1/runtime/acquire-task", port=site.port).status_code == 401

    # Nor to another user of this machine, whatever he has: no order, and no work of an app whose token he has read.
    if os.geteuid() == 0:
        for path in ("control/list-nodes", "control/register-node", "control/start-run", "runtime/acquire-task"):
            assert as_nobody(site.asking(f"/v1/{path}", site.port)) == "closed", path
            # And anybody at the port of the nodes.
            assert as_nobody(site.asking(f"/v1/{path}", site.public)) == "403", path
        assert log_lines(link, f"refused user {NOBODY} at this port") == 1
    assert site.asking("/v1/control/list-nodes", site.port)() == "200"

    # A registered key and the clock: five minutes late pass, six do not, nor do six seconds early.
    key = folder.nodes / "node-0"
    public = public_key_to_bytes(serialization.load_ssh_public_key((folder.nodes / "node-0.pub").read_bytes()))
    wake = ActivateNodeRequest(public_key=public, heartbeat_interval=30.0).SerializeToString()
    codes = [
        site.post("/v1/fleet/activate-node", content=wake, headers=authentication(key, age)).status_code
        for age in (360.0, -10.0)
    ]
    assert codes == [401, 401]
    # Only operators register keys: a node cannot bring its own.
    mine = public_key_to_bytes(serialization.load_ssh_public_key((other.nodes / "node-0.pub").read_bytes()))
    bring = RegisterNodeFleetRequest(public_key=mine).SerializeToString()
    headers = authentication(other.nodes / "node-0", 0.0)
    answer = site.post("/v1/fleet/register-node", content=bring, headers=headers)
    assert (answer.status_code, "must be registered via the CLI" in answer.text) == (412, True)

    # What is secret is in files: no command line shows it, of which every user can read all.
    secrets = [folder.secret.read_text(), *(key.read_text().splitlines()[2] for key in folder.nodes.glob("node-?"))]
    shown = [command for home in (tmp_path, folder.kept) for command in command_lines(home)]
    assert len(shown) >= 4
    assert not [command for command in shown if any(secret in command for secret in secrets)]

    # Every one of them has come and gone; the run does not notice.
    here, there = engines.run(replace(SPEC, engine="inprocess")), site.run(SPEC)
    assert there.accuracy == here.accuracy
    assert {k: v.tobytes() for k, v in there.arrays.items()} == {k: v.tobytes() for k, v in here.arrays.items()}

    # What the proxy has seen of the nodes is on one screen.
    deadline = time.monotonic() + 60.0
    while True:
        document = json.loads(folder.status.read_text())
        seen = {row["name"]: row for row in rows(folder, document, time.time())}
        two = seen["node-0"], seen["node-1"]
        if all(row["up"] > 10_000 and row["state"] == "online" and row["last_round"] for row in two) and (
            {row["last_round"]["round"] for row in two} == {SPEC.rounds}
        ):
            break
        assert time.monotonic() < deadline, seen
        time.sleep(0.5)
    assert folder.registered.read_text().splitlines()[0].split()[1] == seen["node-0"]["id"]
    assert seen["node-0"]["version"] == version("flwr")
    assert seen["node-0"]["refused"] >= 2  # those with the wrong time
    assert document["refused"]["403"] >= 7
    # And how far the run is, in the log of the link.
    assert [row["last_round"]["of"] for row in two] == [SPEC.rounds] * 2
    for number in range(1, SPEC.rounds + 1):
        assert log_lines(link, f", round {number} of {SPEC.rounds}: 2 asked, 2 used") == 1

    # A new key while it runs, and the same database after a restart.
    ids = (folder.registered).read_text()
    assert fedcomp(["certificates", str(folder.path), "--add-nodes", "1"]) == 0
    assert fedcomp(["link", str(folder.path), "--register"]) == 0
    assert folder.registered.read_text().startswith(ids)
    assert folder.registered.read_text().count("\n") == 3

    # What dies is started again by itself.
    (superlink,) = (
        p for p, c in processes_with("FLWR_HOME", str(folder.home("superlink"))).items() if "superlink" in c
    )
    superexec = processes_with("FLWR_HOME", str(folder.home("superexec"))).keys()
    os.kill(superlink, signal.SIGKILL)
    site.until(link, "superlink restarts in")
    link.wait_for_port(site.port, 60.0)
    # The one below which server apps run has not noticed.
    assert superexec <= processes_with("FLWR_HOME", str(folder.home("superexec"))).keys()

    for child in good:
        child.stop()
    link.terminate()
    assert link._process.wait(60) == 0
    for name in ("superlink", "superexec", "cli"):
        assert processes_with("FLWR_HOME", str(folder.home(name))) == {}
    site.children.remove(link)
    shutil.move(link.log, tmp_path / "first.log")
    again = site.link()
    assert "3 keys were registered before" in again.log.read_text()
    # Which the SuperLink was asked for, so that it has nothing to complain of.
    assert log_lines(again, "ERROR") == 0

    # Killed itself, it leaves nobody behind, and whoever starts it again finds its ports free.
    again.kill()
    deadline = time.monotonic() + 60.0
    while any(processes_with("FLWR_HOME", str(folder.home(name))) for name in ("superlink", "superexec")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    site.children.remove(again)
    shutil.move(again.log, tmp_path / "second.log")
    site.link()


@pytest.mark.parametrize("victim", ["link", "SuperExec"])
def test_a_run_whose_link_or_superexec_is_killed_goes_on_by_the_same_command(site, tmp_path, victim):
    """The run has failed, and what it has come to is in its checkpoint: nodes keep their ids, the server its rounds."""
    folder = site.folder
    assert fedcomp(["certificates", str(folder.path), "--host", "127.0.0.1", "--nodes", "2"]) == 0
    link = site.link()
    for number in range(2):
        site.until(site.peer_node(f"node-{number}", number, 2, "--home", str(tmp_path / f"home-{number}")), "joined")
    spec = replace(SPEC, rounds=4)
    rounds, ended = tmp_path / "out" / ROUNDS_FILE, []

    def killed() -> bool:
        if ended or not rounds.exists() or rounds.read_text().count("\n") < 2:
            return bool(ended)
        if victim == "link":
            link.kill()
        else:
            (superexec,) = leaders(folder.home("superexec"), "superexec")
            os.kill(superexec, signal.SIGKILL)
        ended.append(True)
        return True

    where = {CHECKPOINT_KEY: str(tmp_path / "checkpoint"), CHECKPOINT_EVERY_KEY: 1}
    command = site.start("run", site.run_command(spec, **where), folder.home("cli"))
    deadline = time.monotonic() + 200.0
    while not killed():
        assert time.monotonic() < deadline, command.tail(60)
        time.sleep(0.05)
    if victim == "link":
        # The server app of the run waits for a SuperLink to tell that it ends.
        while leaders(folder.home("superlink"), "superlink") or leaders(folder.home("superexec"), "superexec"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        site.children.remove(link)
        shutil.move(link.log, tmp_path / "first.log")
        site.link()
    else:
        site.until(link, "superexec restarts in")
    command.stop()
    while any("flwr-serverapp" in line for line in processes_with("FLWR_HOME", str(folder.home("superexec"))).values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (tmp_path / "out" / RESULT_FILE).exists()
    found = site.run(spec, **where)
    whole = engines.run(replace(spec, engine="inprocess"))
    assert [record.round for record in found] == [0, 1, 2, 3, 4]
    assert found.accuracy == whole.accuracy
    assert {k: v.tobytes() for k, v in found.arrays.items()} == {k: v.tobytes() for k, v in whole.arrays.items()}


def leaders(home: Path, name: str) -> list[int]:
    return [pid for pid, command in processes_with("FLWR_HOME", str(home)).items() if f"flower-{name}" in command]
