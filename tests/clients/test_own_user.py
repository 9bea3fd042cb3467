"""A Flower server whose port serves one user: who is let in, whoever asks, and that nothing listens unguarded."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest
from other_users import NOBODY, as_nobody, needs_root

from fedcomp.clients import edge
from fedcomp.clients.edge.own_user import client_of, guarded, owner
from fedcomp.experiments.engines.processes import free_ports
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def accepted(listener: socket.socket) -> socket.socket:
    listener.settimeout(10)
    return listener.accept()[0]


@pytest.mark.parametrize(
    ("family", "source", "address"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.9", "127.0.0.1"),
        (socket.AF_INET6, "::", "::ffff:127.0.0.1"),
    ],
)
def test_the_user_of_a_connection_is_the_one_who_opened_it(listener, family, source, address):
    with socket.socket(family) as there:
        try:
            there.bind((source, 0))
        except OSError as error:
            pytest.skip(f"no such address here: {error}")
        there.connect((address, listener.getsockname()[1]))
        with accepted(listener) as here:
            assert client_of(here) == os.geteuid()


def test_a_connection_that_is_closed_again_has_no_user(listener):
    """Also where its other end was this user's: the kernel would name root."""
    there = socket.create_connection(listener.getsockname())
    there.sendall(b"POST /v1/control/start-run HTTP/1.1\r\n")
    with accepted(listener) as here:
        there.close()
        assert client_of(here) is None
    assert owner(("127.0.0.1", 1), ("127.0.0.1", 2)) is None


@needs_root
def test_another_user_is_named_also_after_the_descriptor_was_handed_on(listener):
    def connect() -> int:
        there = socket.create_connection(listener.getsockname())
        with contextlib.suppress(PermissionError):
            os.fchown(there.fileno(), 0, 0)
        os.dup(there.fileno())
        with accepted(listener) as here:
            return client_of(here)

    assert as_nobody(connect) == NOBODY


@contextlib.contextmanager
def superlink(tmp_path, wrap):
    (port,) = free_ports(1)
    command = [edge.program("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(tmp_path), "FLWR_INTERNAL_GRPC_CONTROL_API": "1"}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        wrap([*command, "--isolation", "process"]), env=env, stdout=log, stderr=log, cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)
        log.close()


@pytest.mark.long
@pytest.mark.engines
def test_a_guarded_superlink_takes_orders_of_its_own_user_alone(tmp_path):
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    order = ListNodesRequest().SerializeToString()
    client = httpx.Client(headers={"content-type": PROTOBUF_MEDIA_TYPE}, trust_env=False)

    with superlink(tmp_path, guarded) as port:

        def ask() -> str:
            try:
                return str(client.post(f"http://127.0.0.1:{port}/v1/control/list-nodes", content=order).status_code)
            except httpx.TransportError:
                return "closed"

        # Own calls first and last: the refusal is of one connection and leaves nothing behind.
        assert ask() == "200"
        client.close()
        client = httpx.Client(headers={"content-type": PROTOBUF_MEDIA_TYPE}, trust_env=False)
        if os.geteuid() == 0:
            assert as_nobody(ask) == "closed"
            assert as_nobody(ask) == "closed"
        assert ask() == "200"
        client.close()
    printed = (tmp_path / "log").read_text()
    # Once a minute, however often.
    assert printed.count(f"refused user {NOBODY} at this port") == (os.geteuid() == 0)
    # The other kinds of ports that Flower has behind a variable would be for everybody.
    assert "gRPC" not in printed


def test_a_server_that_is_not_the_guarded_one_does_not_listen():
    """Should a later Flower listen in another way, there is no port rather than an open one."""
    code = (
        "import socket, sys; sys.argv = ['x', 'y']; from fedcomp.clients.edge import own_user; own_user._guard()\n"
        "socket.create_server(('127.0.0.1', 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "would not be guarded" in done.stderr


@pytest.mark.parametrize("tells", [True, False])
def test_a_node_with_flowers_executor_is_guarded_where_the_kernel_tells(tells, monkeypatch, tmp_path, capsys):
    """Its apps have their tokens on their command lines; with this project's executor nobody sees one."""
    from fedcomp.clients.edge import node, own_user
    from fedcomp.clients.edge.events import EventLog
    from fedcomp.clients.edge.options import parse

    def refuse() -> None:
        raise OSError("no such kernel")

    monkeypatch.setattr(node, "_executor", lambda *_: ([], "not here"))
    if not tells:
        monkeypatch.setattr(own_user, "require_owners", refuse)
    options = parse(["--superlink", "10.0.0.1:1", "--insecure", "--partition", "0", "--of", "1"])
    (service,) = node.services(options, tmp_path / "secret", EventLog(json=False))
    plain = [edge.program("flower-supernode"), "--superlink"]
    assert list(service.command)[: 5 if tells else 2] == (guarded(plain) if tells else plain)
    printed = capsys.readouterr()
    assert ("every user of this machine can take this node's messages" in printed.out + printed.err) == (not tells)
