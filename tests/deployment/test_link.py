"""``fedcomp certificates`` and ``fedcomp link``: a run over TLS through the proxy, and everybody who is turned away."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from quick_nodes import quicken

from fedcomp.clients import edge
from fedcomp.clients.edge.processes import processes_with
from fedcomp.experiments import engines
from fedcomp.experiments.engines.processes import Child, free_ports, tail, wait_for_port
from fedcomp.experiments.engines.superlink import APP
from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import Folder, create
from fedcomp.experiments.spec import RESULT_FILE, RunResult, RunSpec, format_value
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT

pytestmark = pytest.mark.slow

SPEC = RunSpec("topk", task="digits", rounds=2, clients=2, seed=4, settings={"codec.density": 0.05, "lr": 0.05})


class Site:
    """A link and what talks to it, each with a log in ``path``; all is stopped at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = Folder(path / "keys")
        self.public, self.port, *self.node_ports = free_ports(8)
        self.children: list[Child] = []

    def start(self, name: str, command: list[str], home: Path) -> Child:
        home.mkdir(parents=True, exist_ok=True)
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(home), "PATH": search}
        child = Child(name, command, env=env, log=self.path / f"{name}.log", cwd=self.path)
        self.children.append(child)
        return child

    def link(self) -> Child:
        command = [sys.executable, "-m", "fedcomp.experiments.security.link", str(self.folder.path)]
        command += ["--listen", f"127.0.0.1:{self.public}", "--port", str(self.port)]
        child = self.start("link", command, self.path / "unused")
        self.until(child, "ready:")
        return child

    def node(self, name: str, key: Path | None, partition: int, *, ca: Path | None = None) -> Child:
        arguments = ["--superlink", f"127.0.0.1:{self.public}", "--partition", str(partition), "--of", "2"]
        arguments += ["--root-certificates", str(ca or self.folder.ca), "--port", str(self.node_ports.pop())]
        arguments += [] if key is None else ["--key", str(key)]
        command, _ = edge.prepare(arguments)
        return self.start(name, command, self.path / name)

    def until(self, child: Child, text: str, seconds: float = 120.0) -> str:
        deadline = time.monotonic() + seconds
        while text not in (found := child.log.read_text(errors="replace")):
            child.require_running()
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def ended(self, child: Child, seconds: float = 90.0) -> str:
        """Return what ``child`` printed before it ended by itself, with a status that is no success."""
        assert child._process.wait(seconds) not in (0, None)
        return child.tail(40)

    def flwr(self, *arguments: str, home: Path | None = None, status: int = 0) -> str:
        env = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(home or self.folder.home("cli"))}
        done = subprocess.run([edge.program("flwr"), *arguments], env=env, capture_output=True, text=True, timeout=300)
        printed = done.stdout + done.stderr
        assert (done.returncode == 0) == (status == 0), printed
        return printed

    def run(self, spec: RunSpec) -> RunResult:
        out = self.path / "out"
        config = {**spec.to_run_config(), "out": str(out), "privacy": ""}
        words = self.path / "run.toml"
        lines = [f"{k} = {f'{v!r}' if isinstance(v, str) else format_value(v)}" for k, v in config.items()]
        words.write_text("\n".join(lines))
        printed = self.flwr("run", str(APP), "link", "--stream", "--run-config", str(words))
        assert (out / RESULT_FILE).exists(), printed + tail(self.path / "link.log", 60)
        return RunResult.load(out)

    def post(self, path: str, *, port: int | None = None, content: bytes = b"", headers=()) -> httpx.Response:
        trust = ssl.create_default_context(cafile=str(self.folder.ca))
        kind = {"content-type": PROTOBUF_MEDIA_TYPE, **dict(headers)}
        with httpx.Client(verify=trust) as client:
            return client.post(f"https://127.0.0.1:{port or self.public}{path}", content=content, headers=kind)

    def close(self) -> None:
        for child in reversed(self.children):
            child.terminate()
        for child in reversed(self.children):
            child.stop()


@pytest.fixture
def site(tmp_path, monkeypatch):
    quicken(monkeypatch)
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
    refused = "only the calls of nodes pass here"
    assert "403" in site.flwr("supernode", "register", str(other.nodes / "node-0.pub"), home=stranger, status=1)
    assert "403" in site.flwr("run", str(APP), "link", home=stranger, status=1)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/health", "/docs", "/v1/fleet/../control/list"):
        answer = site.post(path)
        assert (answer.status_code, refused in answer.text) == (403, True), path
    log = link.log.read_text()
    assert "proxy: refused 127.0.0.1: 403 '/v1/control/start-run'" in log
    # Nor does the SuperLink's own, to one on this machine without the secret of the SuperExec.
    assert site.post("/v1/runtime/acquire-task", port=site.port).status_code == 401

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

    # Every one of them has come and gone; the run does not notice.
    here, there = engines.run(replace(SPEC, engine="inprocess")), site.run(SPEC)
    assert there.accuracy == here.accuracy
    assert {k: v.tobytes() for k, v in there.arrays.items()} == {k: v.tobytes() for k, v in here.arrays.items()}

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
    site.until(link, "the SuperLink ended with status -9; it is started again")
    wait_for_port(site.port, link, 60.0)
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


def test_a_port_in_use_and_a_second_link_are_one_line(site, capfd):
    create(site.folder.path, ["127.0.0.1"], 0)
    import socket

    with socket.create_server(("127.0.0.1", site.port)):
        asked = [str(site.folder.path), "--listen", f"127.0.0.1:{site.public}", "--port", str(site.port)]
        assert fedcomp(["link", *asked]) == 78
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1
    assert "Address already in use" in printed.err
