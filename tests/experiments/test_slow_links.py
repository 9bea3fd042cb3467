"""Slow links: as slow as they say, counted as they are, and gone afterwards, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import links
from fedcomp.experiments.engines.processes import listens
from fedcomp.experiments.links import COUNTED, FRAME, HEADERS, HUB, MadeError, SlowLinks, sweep, unavailable

pytestmark = pytest.mark.engines

REASON = unavailable()
needs_links = pytest.mark.skipif(bool(REASON), reason=REASON)

RECEIVE = """
import socket
server = socket.create_server(("10.77.0.1", 5000))
print("ready", flush=True)
connection, _ = server.accept()
size = 0
while data := connection.recv(65536):
    size += len(data)
print(size)
"""
SEND = """
import socket, sys
connection = socket.create_connection(("10.77.0.1", 5000), timeout=15)
connection.sendall(b"x" * int(sys.argv[1]))
"""


def namespaces() -> list[str]:
    """Return the namespaces of this process."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.startswith(f"fedcomp-{os.getpid()}-")]


def sent(made: SlowLinks, node: int, size: int) -> float:
    """Send ``size`` bytes from a node to the server; return the seconds until all were there."""
    server = subprocess.Popen([*made.prefix(HUB), sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        began = time.monotonic()
        subprocess.run([*made.prefix(node), sys.executable, "-c", SEND, str(size)], check=True)
        assert server.stdout.readline() == f"{size}\n"
        return time.monotonic() - began
    finally:
        server.kill()
        server.wait()


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "slow links need root, for network namespaces"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda name, path: None)
    assert unavailable() == "slow links need 'ip': install iproute2"


def test_links_of_no_rate_and_no_node_are_refused() -> None:
    for arguments in ((0, 1e6), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ConfigError):
            SlowLinks(*arguments)
    with pytest.raises(ConfigError):
        SlowLinks(1, 1e6, down=-1.0)


def test_a_listening_port_is_seen_from_outside() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens(os.getpid(), port)
    assert not listens(os.getpid(), port)


@needs_links
@pytest.mark.long
def test_a_slow_link_is_as_slow_as_it_says_and_counts_whole_frames() -> None:
    size, rate = 40_000, 64e3
    with SlowLinks(2, rate) as made:
        shaped = subprocess.run(
            ["tc", "-n", made.name(1), "qdisc", "show"], capture_output=True, text=True, check=True
        ).stdout
        before = made.counters()
        seconds = sent(made, 1, size)
        after = made.counters()
        seen = {node: {name: after[node][name] - before[node][name] for name in COUNTED} for node in after}
    # A busy machine may be late, never early; the rate that the kernel was given bounds the other side.
    assert seconds > 0.85 * seen[1]["up_bytes"] * 8 / rate
    assert " rate 64Kbit " in shaped
    # Frames as on a cable: with segments of 64 KB there would be one header for all.
    least = size / (FRAME - HEADERS)
    assert least <= seen[1]["up_packets"] <= 2 * least
    assert size + HEADERS * least <= seen[1]["up_bytes"] <= 1.1 * (size + HEADERS * seen[1]["up_packets"])
    assert seen[0]["up_bytes"] < 500
    assert not namespaces()


@needs_links
@pytest.mark.long
def test_a_pulled_cable_lets_nothing_through_and_a_plugged_one_does() -> None:
    with SlowLinks(1, 1e7) as made:
        made.pull(0)
        with pytest.raises(subprocess.CalledProcessError):
            sent(made, 0, 1000)
        made.plug(0)
        sent(made, 0, 1000)
        with pytest.raises(ConfigError):
            made.pull(1)


@needs_links
def test_nothing_is_left_after_an_exception_and_after_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        with SlowLinks(2, 1e6):
            assert len(namespaces()) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not namespaces()

    def broken(*_: Any) -> None:
        raise MadeError("no bucket")

    monkeypatch.setattr(links, "bucket", broken)
    with pytest.raises(MadeError), SlowLinks(2, 1e6):
        pass
    assert not namespaces()


@needs_links
def test_what_a_killed_process_left_is_swept_and_others_stay() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    left, other = f"fedcomp-{gone.pid}-0-hub", f"other-{os.getpid()}"
    try:
        for name in (left, other):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with SlowLinks(1, 1e6) as mine:
            sweep()
            found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
            assert mine.name(HUB) in found
        assert left not in found
        assert other in found
    finally:
        subprocess.run(["ip", "netns", "del", other], check=False)
