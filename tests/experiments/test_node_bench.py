"""The benchmark of an edge node: what it reads of processes, and what it makes of readings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedcomp.experiments.bench import node
from fedcomp.measuring import Case, run

COSTS = {
    "plain": [[2.0, 2.2, 2.1], [0.1, 0.1, 0.3]],
    "torch": [[4.0, 3.9, 4.1], [0.1, 0.5, 0.1]],
    "topk on digits, in all": [[5.0], [0.6]],
}
QUIET = [{"memory, MB (PSS)": 190.0}, {"memory, MB (PSS)": 240.0}]


@pytest.mark.parametrize(
    ("change", "differ", "failed"),
    [
        ({}, 0, []),
        ({"torch": [[4.0], [0.21]]}, 0, [0]),
        ({"topk on digits, in all": [[5.0], [0.71]]}, 0, [1]),
        ({}, 1, [2]),
    ],
)
def test_claims_are_about_the_node_that_forks(change: dict, differ: int, failed: list[int]) -> None:
    found = run([Case("", lambda _: node.rows_of({**COSTS, **change}, QUIET, differ), node.BOUNDS)], quick=True)
    assert [i for i, claim in enumerate(found.claims) if not claim.ok] == failed
    # Times depend on the machine; equal bytes do not.
    assert [claim.gate for claim in found.claims] == [False, False, True]
    rows = {(row["message"], row["executor"]): row for row in found.rows if "message" in row}
    assert rows["plain", node.WAYS[0]]["CPU s a message"] == 2.1
    assert rows["plain", node.WAYS[1]]["messages"] == 3
    assert [row["quiet node"] for row in found.rows if "quiet node" in row] == list(node.WAYS)


def test_the_time_of_children_counts_while_they_run_and_when_they_have_ended() -> None:
    """A family of one process, its child that is waited for, and one that ended and was not."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        f"left = subprocess.Popen([sys.executable, '-c', {burn!r}], stdout=subprocess.PIPE)\n"
        # Nothing is written: the end of the file says that it has ended, without waiting for it.
        "left.stdout.read()\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert set(node.family([process.pid])) > {process.pid}
        assert node.cpu_seconds([process.pid]) >= 0.55
        assert os.getpid() not in node.family([process.pid])
        assert node.proportional_bytes(process.pid) > 1e5
    finally:
        process.communicate()


def test_a_relay_counts_both_ways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = node.Relay(*server.getsockname())
        host, _, port = relay.address.partition(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"12345")
                assert far.recv(10) == b"12345"
                far.sendall(b"123")
                assert near.recv(10) == b"123"
                near.sendall(b"6")
                assert far.recv(10) == b"6"
                # What was passed on is counted before the next is read.
                assert relay.up >= 5
                assert relay.down == 3
        relay.shutdown()
        relay.server_close()


def test_readings_belong_to_the_line_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([[0.0, 0.0], [1.0, 10.0], [3.0, 20.0]])
    monkeypatch.setattr(node.Meter, "read", lambda self: next(readings))
    file = tmp_path / "lines"
    meter = node.Meter([], file)
    meter()
    for line in ("plain 0\n", "torch 0\n"):
        with file.open("a") as out:
            out.write(line)
        meter()
        meter()
    assert meter.names == ["plain", "torch"]
    assert meter.each() == [[1.0, 2.0], [10.0, 10.0]]
