"""The compressed example really saves the bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart_pytorch"


@pytest.fixture(scope="module")
def figures() -> dict[str, dict]:
    command = [sys.executable, str(EXAMPLE / "compare.py"), "--rounds", "3", "--clients", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["app"]: row for row in json.loads(done.stdout)}


@pytest.mark.slow
def test_both_apps_learn_and_the_compressed_one_sends_a_fraction(figures):
    plain, compressed = figures["plain"], figures["compressed"]
    # Three rounds and three clients: 9 models up, 9 down for training and 6 for evaluation (half of three, at least 2).
    assert plain["messages"] == compressed["messages"] == 2 * (9 + 6)
    assert plain["payload_up"] > 20 * compressed["payload_up"]
    assert plain["wire_up"] > 10 * compressed["wire_up"]
    assert compressed["payload_down"] == plain["payload_down"]
    for row in figures.values():
        assert float(row["final"].rpartition("accuracy': ")[2].rstrip("}")) > 0.5
