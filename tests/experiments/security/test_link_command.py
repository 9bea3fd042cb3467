"""``fedcomp link`` without a SuperLink: its command lines, its checks, and that it starts again what ends."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.engines.processes import free_ports
from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import Folder, create
from fedcomp.experiments.security.link import LinkOptions, LinkSupervisor, prepare
from fedcomp.experiments.security.proxy import Limits


def options(path: Path, *, insecure: bool = False) -> LinkOptions:
    public, port = free_ports(2)
    return LinkOptions(Folder(path), ("127.0.0.1", public), port, path / "link" / "state.db", insecure, Limits())


def test_the_superlink_is_on_loopback_with_keys_and_asks_for_its_secret(tmp_path):
    made = options(tmp_path)
    words = made.superlink()
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert {"--enable-supernode-auth", "--ssl-keyfile", "--database"} <= set(words)
    assert words[words.index("--isolation") + 1] == "process"
    for command in (words, made.superexec()):
        assert command[command.index("--superexec-auth-secret-file") + 1] == str(made.folder.secret)
        assert "--insecure" not in command
    # The word takes TLS and keys away; loopback and secret stay.
    words = options(tmp_path, insecure=True).superlink()
    assert "--insecure" in words
    assert "--enable-supernode-auth" not in words
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "--superexec-auth-secret-file" in words


@pytest.mark.slow
def test_the_port_of_the_nodes_takes_no_older_tls(tmp_path):
    """Both ends in memory: a client of 1.3 gets through, one that offers 1.1 at most does not."""
    create(tmp_path, ["localhost"], 0)
    listener, proxy = prepare(options(tmp_path))
    listener.close()

    def version(newest: ssl.TLSVersion) -> str | None:
        theirs = ssl.create_default_context(cafile=str(Folder(tmp_path).ca))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.minimum_version, theirs.maximum_version = ssl.TLSVersion.TLSv1, newest
        theirs.set_ciphers("DEFAULT:@SECLEVEL=0")
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (theirs.wrap_bio(down, up, server_hostname="localhost"), proxy.tls.wrap_bio(up, down, server_side=True))
        for _ in range(4):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return ends[0].version()

    assert version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        version(ssl.TLSVersion.TLSv1_1)


def test_what_is_written_is_the_owners_alone_and_kept(tmp_path):
    create(tmp_path, ["localhost"], 0)
    made = options(tmp_path)
    listener, proxy = prepare(made)
    listener.close()
    assert proxy.tls is not None
    assert proxy.trust is not None
    secret = made.folder.secret.read_bytes()
    assert len(secret) == 64
    assert stat.S_IMODE(made.folder.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.folder.kept.stat().st_mode) == 0o700
    config = (made.folder.home("cli") / "config.toml").read_text()
    assert f'address = "127.0.0.1:{made.port}"' in config
    assert "insecure" not in config
    assert made.folder.secret.read_bytes() == secret


def says(capfd) -> str:
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


def test_wrong_certificates_are_one_line_and_no_restart_mends_them(tmp_path, capfd):
    assert fedcomp(["link", str(tmp_path / "none")]) == 78
    assert "server.crt" in says(capfd)
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=900)
    create(tmp_path / "old", ["localhost"], 0, now=old)
    assert fedcomp(["link", str(tmp_path / "old")]) == 78
    assert "--renew" in says(capfd)
    folder = create(tmp_path / "mixed", ["localhost"], 0)
    folder.server_key.write_bytes(create(tmp_path / "b", ["localhost"], 0).server_key.read_bytes())
    assert fedcomp(["link", str(tmp_path / "mixed")]) == 78
    assert "cannot be used together" in says(capfd)


def test_a_secret_that_was_not_written_whole_is_named_and_no_restart_mends_it(tmp_path, capfd):
    made = options(tmp_path)
    create(tmp_path, ["localhost"], 0)
    made.folder.kept.mkdir()
    asked = [str(tmp_path), "--listen", f"127.0.0.1:{made.listen[1]}", "--port", str(made.port)]
    for content in (b"", b"0123"):
        made.folder.secret.write_bytes(content)
        assert fedcomp(["link", *asked]) == 78
        assert f"{made.folder.secret} has {len(content)} bytes" in says(capfd)


def test_a_port_in_use_is_one_line_and_leaves_the_files_of_the_running_link(tmp_path, capfd):
    folder = create(tmp_path, ["localhost"], 0)
    (public, port) = free_ports(2)
    for taken in (public, port):
        with socket.create_server(("127.0.0.1", taken)):
            asked = [str(tmp_path), "--listen", f"127.0.0.1:{public}", "--port", str(port)]
            assert fedcomp(["link", *asked]) == 78
        assert "Address already in use" in says(capfd)
    assert not folder.home("cli").exists()
    assert fedcomp(["link", str(tmp_path), "--listen", "127.0.0.1:0"]) == 78
    assert fedcomp(["link", str(tmp_path), "--register"]) == 78


@pytest.mark.parametrize(("option", "value"), [("--port", "0"), ("--port", "65536"), ("--per-address", "0")])
def test_numbers_with_which_no_node_would_get_in_are_refused(option, value, tmp_path, capfd, monkeypatch):
    create(tmp_path, ["localhost"], 0)
    monkeypatch.setattr(LinkSupervisor, "run", lambda self: 0)
    public, port = map(str, free_ports(2))
    assert fedcomp(["link", str(tmp_path), "--listen", f"127.0.0.1:{public}", "--port", port, option, value]) == 78
    assert option in says(capfd)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nodes_do_not_get_the_superlinks_own_port(host, tmp_path):
    create(tmp_path, ["localhost"], 0)
    made = options(tmp_path)
    with pytest.raises(ConfigError, match=r"--listen .* cannot be used"):
        prepare(replace(made, listen=(host, made.port)))


def test_a_folder_has_one_link_at_a_time(tmp_path, capfd):
    """On other ports, where nothing else would show it: two SuperLinks would write one database."""
    create(tmp_path, ["localhost"], 0)
    listener, _ = prepare(options(tmp_path))
    public, port = free_ports(2)
    asked = [str(tmp_path), "--listen", f"127.0.0.1:{public}", "--port", str(port)]
    assert fedcomp(["link", *asked]) == 78
    assert "one at a time" in says(capfd)
    listener.close()


def test_a_database_has_one_link_at_a_time(tmp_path, capfd, monkeypatch):
    """Of two folders, on other ports: two SuperLinks would write it."""
    monkeypatch.setattr(LinkSupervisor, "run", lambda self: 0)
    for name in ("one", "nodes.db-two", "link.db-two"):
        create(tmp_path / name, ["localhost"], 0)
    (tmp_path / "link.db").symlink_to(tmp_path / "nodes.db")
    listener, _ = prepare(replace(options(tmp_path / "one"), database=tmp_path / "nodes.db"))
    public, port = free_ports(2)
    ports = ["--listen", f"127.0.0.1:{public}", "--port", str(port)]
    for name in ("nodes.db", "link.db"):
        assert fedcomp(["link", str(tmp_path / f"{name}-two"), *ports, "--database", str(tmp_path / name)]) == 78
        assert f"{name}: another fedcomp link uses it" in says(capfd)
    listener.close()


STAND_IN = """
import os, socket, sys, time
name, port = sys.argv[1], int(sys.argv[2])
if name == "superlink":
    held = socket.create_server(("127.0.0.1", port))
print("\\x1b[92mINFO\\x1b[0m : begins", flush=True)
print("oops", file=sys.stderr, flush=True)
time.sleep(600)
"""

LINK = """
import sys
from fedcomp.clients.edge import supervisor
from fedcomp.experiments.security.link import LinkOptions, main
from fedcomp.experiments.security.proxy import Proxy
supervisor.FIRST, supervisor.LOOK_SECONDS = 0.01, 0.1
stand_in, port, change = sys.argv[1:4]
exec(change)
LinkOptions.superlink = lambda self: [sys.executable, "-c", stand_in, "superlink", port]
LinkOptions.superexec = lambda self: [sys.executable, "-c", stand_in, "superexec", port]
sys.exit(main(sys.argv[4:]))
"""


def start(path: Path, *more: str, stand_in: str = STAND_IN, change: str = "") -> subprocess.Popen[str]:
    """Start a link with stand-ins for Flower's programs: all that is ours is the real thing."""
    public, port = map(str, free_ports(2))
    asked = [str(path), "--insecure", "--listen", f"127.0.0.1:{public}", "--port", port, *more]
    command = [sys.executable, "-c", LINK, stand_in, port, change, *asked]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_what_ends_is_started_again_and_sigterm_leaves_nothing(tmp_path):
    process = start(tmp_path, "--log-format", "json")
    events = (json.loads(line) for line in process.stdout)
    started: list[tuple[str, int]] = []

    def until_started() -> None:
        event = next(event for event in events if event["event"] == "started")
        started.append((event["service"], int(event["message"].split()[-1])))

    for victim in (1, 0, None):
        while len(started) < 2 + (victim != 1) + (victim is None):
            until_started()
        if victim is not None:
            os.kill(started[victim][1], signal.SIGKILL)
    # Only what ended: the server app of a run lives below the SuperExec, and survives its SuperLink.
    assert [name for name, _ in started] == ["superlink", "superexec", "superexec", "superlink"]
    process.send_signal(signal.SIGTERM)
    # A process may still print while it is stopped.
    rest = [event["event"] for event in events if event["event"] != "output"]
    assert process.wait(60) == 0
    assert rest[-2:] == ["stopping", "stopped"]
    assert not any(Path(f"/proc/{pid}").exists() for _, pid in started)


def test_with_a_log_of_json_every_line_is_an_object_also_those_of_processes(tmp_path):
    process = start(tmp_path, "--log-format", "json")
    wanted = {(name, line) for name in ("superlink", "superexec") for line in ("INFO : begins", "oops")}
    while wanted:
        event = json.loads(process.stdout.readline())
        assert {"time", "level", "event", "message"} <= event.keys()
        wanted.discard((event.get("source"), event["message"]))
    process.terminate()
    assert all(json.loads(line)["level"] == "info" for line in process.stdout)
    assert process.wait(60) == 0


def test_a_running_link_writes_its_counters(tmp_path):
    path = tmp_path / "link.prom"
    process = start(tmp_path / "keys", "--metrics", str(path))
    try:
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert "fedcomp_link_connections 0" in path.read_text().splitlines()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        # The word is explicit, and what it means is said.
        ({"stand_in": "import sys; sys.exit(3)"}, ("superlink ended with status 3", "Anybody who reaches")),
        # It would be alive, and no node could reach it.
        ({"change": "Proxy.serve = lambda *_: 1 / 0"}, ("ZeroDivisionError", "the proxy ended")),
    ],
)
def test_a_link_without_its_superlink_or_proxy_ends_as_a_temporary_failure(tmp_path, broken, said):
    process = start(tmp_path, **broken)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert all(words in printed for words in said), printed


def test_neither_command_needs_more_than_the_library_itself():
    code = """
import sys
import fedcomp.experiments.security.link
print([m for m in ("torch", "numba", "sklearn", "jinja2", "rich", "matplotlib", "scipy", "flwr") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
