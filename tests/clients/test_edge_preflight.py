"""``fedcomp node --preflight``: each line is ok where it should be, and a remedy where it should not."""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import socketserver
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import flwr
import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from edge_servers import authority, in_a_thread, serving
from running_listener import free_port

from fedcomp.clients.edge import main, preflight, probe
from fedcomp.clients.edge.options import NodeOptions
from fedcomp.clients.edge.preflight import Finding

CHECKS: dict[str, Callable[[NodeOptions], Finding]] = {check.__name__: check for check in preflight.CHECKS}


def found(check: str, superlink: str = "127.0.0.1:9", **options: object) -> tuple[str, str]:
    """Return "ok", "later" or "wrong", and the text."""
    return CHECKS[check](NodeOptions(superlink, 0, 1, **options))  # type: ignore[arg-type]


def private_key(folder: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, mode: int = 0o600) -> Path:
    path = folder / "node"
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(mode)
    return path


def test_address() -> None:
    with serving() as superlink:
        assert found("address", superlink) == ("ok", f"{superlink} is 127.0.0.1 and accepts connections")
    verdict, text = found("address", f"127.0.0.1:{free_port()}")
    assert verdict == "later"
    assert "does not accept connections" in text


def test_a_date_that_is_none_is_as_good_as_no_date() -> None:
    with serving(ahead="soon") as superlink:
        assert "sends no time to compare with" in found("clock", superlink)[1]
        assert found("link", superlink)[0] == "ok"


@pytest.fixture
def proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def set_to(place: str, **more: str) -> None:
        for name, value in {"http_proxy": place, "HTTPS_PROXY": place, **more}.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_what_a_proxy_stands_before_is_asked_through_it_as_the_node_asks(proxies) -> None:
    """httpx, with which Flower's nodes connect, is the judge of which those are."""
    elsewhere = "192.0.2.1:8000"  # an address that nobody has
    with serving() as superlink:
        proxies(f"http://someone:secret@{superlink}")
        verdict, text = found("address", elsewhere)
        assert (verdict, "through the proxy" in text, "secret" in text) == ("ok", True, False)
        assert found("clock", elsewhere)[0] == "ok"
        # Loopback is excepted, as in the node's own processes, and what no_proxy names.
        assert "accepts connections" in found("address", superlink)[1]
        for excepted, through in (("192.0.2.1", False), ("192.0.2.2", True), ("*", False)):
            proxies(f"http://{superlink}", no_proxy=excepted)
            assert (probe.proxy_of(("192.0.2.1", 8000), tls=False) is not None) == through
            with httpx.Client() as client:
                chosen = client._transport_for_url(httpx.URL(f"http://{elsewhere}"))
                assert (chosen is not client._transport) == through
    proxies(f"http://127.0.0.1:{free_port()}", no_proxy="")
    verdict, text = found("address", elsewhere)
    assert verdict == "later"
    assert "add it to no_proxy" in text


@pytest.mark.parametrize("place", ["http://someone:sec#ret@proxy:80", "http://someone:secret@proxy:80x", "http://[::1"])
def test_a_proxy_that_is_no_url_is_said_to_be_none_without_its_password(proxies, place: str) -> None:
    """Each check ended in the error of the parser."""
    proxies(place)
    verdict, text = found("address", "192.0.2.1:8000")
    assert (verdict, "correct http_proxy" in text, "sec" in text) == ("wrong", True, False)
    assert found("clock", "192.0.2.1:8000")[0] != "ok"


def test_a_proxy_is_told_the_name_and_the_password_that_it_asks_for(proxies) -> None:
    seen: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline().strip():
                seen.append(line)
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with in_a_thread(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as proxy:
        proxies(f"http://someone:sec%72et@{proxy}")
        assert probe.ask(("192.0.2.1", 8000), None).status == 200
    assert seen[0] == b"GET http://192.0.2.1:8000/health HTTP/1.1"
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"someone:secret") in seen


def test_tls_through_a_proxy_is_verified_at_its_end(proxies, tmp_path) -> None:
    ca, context = authority(tmp_path)
    with serving(context) as superlink, tunnelling(superlink) as proxy:
        proxies(f"http://{proxy}", no_proxy="nothing")
        # The tunnel ends at the server whatever was asked for; its certificate is for 127.0.0.1 and not for the name.
        assert found("address", "edge.invalid:8000", root_certificates=ca)[0] == "ok"
        verdict, text = found("tls", "edge.invalid:8000", root_certificates=ca)
    assert verdict == "wrong"
    assert "the certificate is refused" in text


@contextlib.contextmanager
def tunnelling(to: str) -> Iterator[str]:
    """A proxy that answers CONNECT and passes bytes to one place."""
    host, _, port = to.rpartition(":")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            with socket.create_connection((host, int(port))) as there:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                pairs = {self.connection: there, there: self.connection}
                while True:
                    for ready in select.select(list(pairs), [], [])[0]:
                        data = ready.recv(65536)
                        if not data:
                            return
                        pairs[ready].sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with in_a_thread(Server(("127.0.0.1", 0), Handler)) as address:
        yield address


def test_an_address_without_a_place(monkeypatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    verdict, text = found("address", "edge.invalid:8000")
    assert verdict == "later"
    assert "check --superlink and DNS" in text


def test_tls_that_is_verified_and_its_days(tmp_path) -> None:
    ca, context = authority(tmp_path)
    with serving(context) as superlink:
        assert found("tls", superlink, root_certificates=ca) == ("ok", "verified, the certificate ends in 365 days")
    ca, context = authority(tmp_path, "soon", days=(-1, 3))
    with serving(context) as superlink:
        assert found("tls", superlink, root_certificates=ca)[1].endswith("ends in 3 days: renew it soon")


@pytest.mark.parametrize(("days", "said"), [((-9, -1), "has expired"), ((1, 9), "not yet valid")])
def test_a_certificate_of_another_time(tmp_path, days, said) -> None:
    ca, context = authority(tmp_path, days=days)
    with serving(context) as superlink:
        verdict, text = found("tls", superlink, root_certificates=ca)
    assert verdict == "later"
    assert said in text
    assert "set this clock" in text


def test_a_certificate_of_another_authority(tmp_path) -> None:
    _, context = authority(tmp_path)
    other, _ = authority(tmp_path, "other")
    with serving(context) as superlink:
        verdict, text = found("tls", superlink, root_certificates=other)
    assert verdict == "wrong"
    assert "give the CA of the SuperLink" in text


def test_tls_on_one_side_alone(tmp_path) -> None:
    ca, context = authority(tmp_path)
    with serving(context) as superlink:
        assert found("tls", superlink) == (
            "wrong",
            "the SuperLink speaks TLS: give --root-certificates, not --insecure",
        )
    with serving() as superlink:
        assert found("tls", superlink, root_certificates=ca)[0] == "wrong"
        assert found("tls", superlink)[0] == "ok"


def test_a_file_that_holds_no_certificate(tmp_path) -> None:
    (tmp_path / "ca.crt").write_text("nothing")
    with serving() as superlink:
        assert found("tls", superlink, root_certificates=tmp_path / "ca.crt")[0] == "wrong"


@pytest.mark.parametrize(
    ("ahead", "verdict", "said"),
    [
        (0.0, "ok", "of 5 s ahead to 305 s behind that are accepted"),
        (290.0, "ok", "290 s behind"),
        (-7.0, "later", "7 s ahead of the SuperLink's"),
        (312.0, "later", "312 s behind the SuperLink's"),
        (None, "later", "sends no time"),
    ],
)
def test_clock(tmp_path, ahead, verdict, said) -> None:
    ca, context = authority(tmp_path)
    # The offset is known to half a second: 311.6 s are said as 312.
    with serving(context, ahead=ahead) as superlink:
        got, text = found("clock", superlink, root_certificates=ca)
    assert got == verdict
    nearly = [said.replace(number, str(int(number) + more)) for number in ("7", "290", "312") for more in (-1, 0, 1)]
    assert any(sentence in text for sentence in nearly)


def test_key(tmp_path) -> None:
    good = private_key(tmp_path, ec.generate_private_key(ec.SECP384R1()))
    verdict, text = found("key", key=good)
    assert verdict == "ok"
    assert "whether it is registered shows when the node joins" in text
    good.chmod(0o640)
    assert found("key", key=good) == ("wrong", f"others can read {good}: chmod 600 {good}")
    assert "no ECDSA key" in found("key", key=private_key(tmp_path, ed25519.Ed25519PrivateKey.generate()))[1]
    good.write_text("nonsense")
    verdict, text = found("key", key=good)
    assert verdict == "wrong"
    assert "ssh-keygen -t ecdsa" in text
    assert found("key")[0] == "ok"


@pytest.mark.parametrize(
    ("rate", "asked", "said"),
    [
        (None, None, "too fast for an estimate"),
        (64e3, None, "give --link 64kbit"),
        (64e3, "64kbit", "uplink about 64 kbit/s (an estimate from 16 kB)"),
        (64e3, "1mbit", "less than half of --link"),
        (5e6, None, "uplink about 5000 kbit/s"),
    ],
)
def test_link(monkeypatch, rate, asked, said) -> None:
    monkeypatch.setattr(probe, "uplink", lambda *_: rate)
    with serving() as superlink:
        link = None if asked is None else preflight.Link.of(asked)
        verdict, text = found("link", superlink, link=link)
    assert verdict == "ok"
    assert text.startswith("round trip ")
    assert said in text


def test_the_uplink_is_timed_by_what_is_sent(monkeypatch) -> None:
    # The only clock it reads: half a second for the short request, two and a half for 16384 bytes more.
    times = iter([0.0, 0.5, 1.0, 3.5])
    with serving() as superlink:
        host, port = superlink.split(":")
        real = probe.time.monotonic
        monkeypatch.setattr(probe.time, "monotonic", lambda: next(times, real()))
        assert probe.uplink((host, int(port)), None) == 16384 * 8 / 2.0


def test_no_server_no_link() -> None:
    assert found("link", f"127.0.0.1:{free_port()}")[0] == "later"


def test_disk(tmp_path, monkeypatch) -> None:
    assert found("disk", state_dir=tmp_path / "not" / "yet")[0] == "ok"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 5 << 20))
    verdict, text = found("disk", home=tmp_path)
    assert verdict == "wrong"
    assert text == f"5 MB free at {tmp_path}, 256 MB are needed: free some space"


def test_memory(monkeypatch) -> None:
    assert found("memory")[0] in ("ok", "later")
    monkeypatch.setattr(Path, "read_text", lambda _: "MemTotal: 900000 kB\nMemAvailable:     102400 kB\n")
    verdict, text = found("memory")
    assert verdict == "later"
    assert text == "100 MB free, a node with torch takes about 512 MB"


def test_versions(monkeypatch) -> None:
    verdict, text = found("versions")
    assert verdict == "ok"
    assert f"flwr {flwr.__version__}" in text
    for other, wanted in {"1.40.9": "wrong", "0.99": "wrong", "1.41.0": "ok", "1.107.3": "ok", "2.0": "ok"}.items():
        monkeypatch.setattr(preflight.importlib.metadata, "version", lambda _, other=other: other)
        verdict, text = found("versions")
        assert verdict == wanted
        assert ("pip install 'flwr" in text) == (wanted == "wrong")


def test_ports() -> None:
    assert found("ports", port=free_port())[0] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        verdict, text = found("ports", port=port)
    assert verdict == "wrong"
    assert f"127.0.0.1:{port} is taken" in text
    assert "change --port" in text


def arguments(superlink: str, *more: str) -> list[str]:
    common = ["--superlink", superlink, "--partition", "0", "--of", "1", "--insecure", "--preflight"]
    return [*common, "--port", str(free_port()), *more]


def test_all_is_well_and_status_0(capsys, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "_MEMORY_BYTES", 0)
    with serving() as superlink:
        assert main(arguments(superlink)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(": " in line and "ok, " in line for line in lines)


def test_waiting_may_help_or_not(capsys, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "_MEMORY_BYTES", 0)
    nobody = f"127.0.0.1:{free_port()}"
    assert main(arguments(nobody, "--log-format", "json")) == 75
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["check"] for event in events if not event["ok"]} == {"address", "clock", "link"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(arguments(nobody, f"--port={taken.getsockname()[1]}")) == 78


@pytest.mark.slow
def test_a_taken_port_ends_a_node_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "fedcomp.clients.edge", "--superlink", "127.0.0.1:9", "--insecure"]
        command += ["--partition", "0", "--of", "1", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (78, "")
    assert f"port {port} is taken; choose another with --port" in done.stdout
    assert "started" not in done.stdout
