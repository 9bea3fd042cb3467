"""A command of the pages as a user's shell starts it: ``flwr run``, its own SuperLink, Flower's simulation."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from page_reading import ROOT, commands

from fedcomp.experiments.engines.processes import free_ports, processes_with

pytestmark = pytest.mark.engines


@pytest.mark.slow
def test_e1_a_documented_run_gets_its_eight_nodes_from_flower(
    monkeypatch: pytest.MonkeyPatch, flower_home: Path
) -> None:
    (command,) = (c for c in commands(ROOT / "docs" / "background" / "gossip.md") if c.words[:2] == ("flwr", "run"))
    words = [re.sub(r"\brounds=\d+", "rounds=1", word) for word in command.words]
    assert words != list(command.words)
    # As in an activated environment: `flwr` starts `flower-superlink` by its bare name.
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]))
    # Flower gives its SuperLink 15 seconds to start, however busy the machine is: then it is started again.
    for _ in range(5):
        # A user who has a local SuperLink of the usual ports keeps it.
        for name, port in zip(("SUPERLINK_HTTP_API", "CONTROL_API"), free_ports(2), strict=True):
            monkeypatch.setenv(f"FLWR_LOCAL_{name}_PORT", str(port))
        try:
            done = subprocess.run(
                [str(programs / words[0]), *words[1:]],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        finally:
            for pid in processes_with("FLWR_HOME", str(flower_home)):
                os.kill(pid, signal.SIGTERM)
        if "Failed to start local SuperLink" not in done.stderr:
            break
    assert "(8 simulated SuperNodes)" in done.stdout, done.stdout + done.stderr
    assert re.search(r"choco: accuracy 0\.\d+, uplink [1-9]\d* payload bytes", done.stdout), done.stdout + done.stderr
