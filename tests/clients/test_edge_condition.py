"""How a node is: from what the SuperNode logs and what the kernel saw arrive, never from its being alive."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from fedcomp.clients.edge import contact
from fedcomp.clients.edge.condition import STALE, Condition, write_whole
from fedcomp.clients.edge.events import plain, timestamp

JOINED = "INFO :      SuperNode ID: 12345"
FAILED = "WARNING :   Connection attempt failed, retrying in 1.76 seconds"
AGAIN = "INFO :      Connection successful after 9.00 seconds and 3 tries."
SENT = "INFO :      Sent successfully"


def after(*steps: tuple[float, str | float]) -> Condition:
    condition = Condition()
    for now, step in steps:
        if isinstance(step, str):
            condition.line(step, now)
        else:
            condition.received(step)
    return condition


@pytest.mark.parametrize(
    ("steps", "now", "superlink", "last"),
    [
        ([], 0.0, "joining", None),
        ([(1.0, FAILED)], 2.0, "unreachable", None),
        ([(1.0, JOINED)], 2.0, "connected", 1.0),
        # Alive, joined once, and nothing has come since: the case that /health gets wrong.
        ([(1.0, JOINED)], 1.0 + STALE + 0.1, "unreachable", 1.0),
        ([(1.0, JOINED), (90.0, 89.0)], 91.0, "connected", 89.0),
        ([(1.0, JOINED), (5.0, FAILED)], 6.0, "unreachable", 1.0),
        # Bytes of a proxy that answers 502 in its place are no contact.
        ([(1.0, JOINED), (5.0, FAILED), (6.0, 6.0)], 6.0, "unreachable", 1.0),
        ([(1.0, JOINED), (5.0, FAILED), (9.0, AGAIN)], 10.0, "connected", 9.0),
        # What an app prints is not what the SuperNode logs.
        ([(1.0, JOINED), (5.0, FAILED), (9.0, "app: Sent successfully")], 10.0, "unreachable", 1.0),
        # Bytes before the node has joined: a SuperLink that refuses it.
        ([(5.0, 5.0)], 6.0, "joining", None),
    ],
)
def test_contact_is_what_evidence_says(steps, now, superlink, last) -> None:
    condition = after(*steps)
    assert condition.superlink(now) == superlink
    assert condition.contact == last


def test_the_file_says_when_on_the_wall_clock(tmp_path: Path) -> None:
    condition = after((100.0, JOINED), (130.0, SENT))
    condition.state, condition.restarts, condition.error = "running", 2, "clock: late"
    write_whole(tmp_path / "beat", condition.to_json(140.0, 1_000_000.0))
    assert json.loads((tmp_path / "beat").read_text()) == {
        "time": timestamp(1_000_000),
        "state": "running",
        "superlink": "connected",
        "node_id": 12345,
        "last_contact": timestamp(999_990),
        "last_message": timestamp(999_990),
        "restarts": 2,
        "last_error": "clock: late",
    }
    assert os.listdir(tmp_path) == ["beat"]


def test_a_new_supernode_has_not_joined() -> None:
    condition = after((1.0, JOINED), (2.0, FAILED))
    condition.started()
    assert (condition.superlink(3.0), condition.contact) == ("joining", 1.0)


def test_colours_are_taken_off() -> None:
    assert plain("\x1b[92mINFO \x1b[0m:      SuperNode ID: 1\n") == "INFO :      SuperNode ID: 1"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_tells_when_data_came(family) -> None:
    place = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((place, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    before = contact.last_received(os.getpid(), 0)
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        accepted, _ = server.accept()
        with accepted:
            own = server.getsockname()[1]
            # Connected, and nothing has come: no contact.
            assert contact.last_received(os.getpid(), own) == before
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"
            age = contact.last_received(os.getpid(), own)
            assert age is not None
            assert age < 60
            # What comes in at the node's own port is from its helpers.
            assert contact.last_received(os.getpid(), client.getsockname()[1]) == before
    assert contact.last_received(2**22 + 1, 0) is None


def test_a_connection_that_the_server_closed_still_tells() -> None:
    """A SuperNode that trains is silent for 20 s; the SuperLink closes after five, and the last answer still counts."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(1000)
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        connection = http.client.HTTPConnection(*server.getsockname())
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        thread.join()
        assert contact.last_received(os.getpid(), server.getsockname()[1]) is not None
        connection.close()
