"""Clocks that are wrong for one process and right for all others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedcomp.experiments.clocks import environment, set_clock

TELLS = """
import datetime, sys, time
from datetime import datetime as named
began = time.monotonic()
for _ in sys.stdin:
    now = datetime.datetime.now(datetime.timezone.utc)
    assert isinstance(now, datetime.datetime) and isinstance(now - datetime.timedelta(1), named)
    time.sleep(0.01)
    print(time.time(), now.timestamp(), named.now().timestamp(), time.monotonic(), flush=True)
"""


def test_a_process_believes_its_clock_and_notices_when_it_is_set(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, -400.0)
    with subprocess.Popen(
        [sys.executable, "-c", TELLS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(clock)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def apart() -> list[float]:
            process.stdin.write("\n")
            process.stdin.flush()
            *wall, monotonic = map(float, process.stdout.readline().split())
            return [*(each - time.time() for each in wall), monotonic - time.monotonic()]

        for wrong in (-400.0, 7.5, 0.0):
            set_clock(clock, wrong)
            assert apart() == pytest.approx([wrong, wrong, wrong, 0.0], abs=2.0)
