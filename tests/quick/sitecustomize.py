"""Python runs this before the program of every process of a quickened deployment (:mod:`quick_nodes`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = next((name for word in sys.orig_argv[1:4] if (name := Path(word).name).startswith("flower-")), "")
LESS = {"flower-supernode": {3: 0.3, 0.5: 0.2}}
"""What an idle SuperNode sleeps between two looks for a message, and a busy one between two looks for the reply."""

_sleep, _popen = time.sleep, subprocess.Popen


def sleep(seconds: float) -> None:
    _sleep(LESS.get(PROGRAM, {}).get(seconds, seconds))


def fork_apps(modules: str) -> None:
    """Let SuperExec start its client apps by forking a process in which ``modules`` are imported already."""
    warm: subprocess.Popen | None = None

    def popen(args: list[str], **options: Any) -> subprocess.Popen | None:
        nonlocal warm
        if args[0] != "flwr-clientapp":
            return _popen(args, **options)
        if warm is None:
            # Its arguments have to be at least as long as those of the apps, which stand in their place.
            command = [sys.executable, str(Path(__file__).with_name("warm_apps.py")), *modules.split(","), "-" * 1000]
            warm = _popen(command, stdin=subprocess.PIPE, text=True)
        warm.stdin.write(json.dumps(args) + "\n")
        warm.stdin.flush()
        return None  # which Flower does not look at

    subprocess.Popen = popen


time.sleep = sleep
if PROGRAM == "flower-superexec" and "WARM_APPS" in os.environ:
    fork_apps(os.environ["WARM_APPS"])
