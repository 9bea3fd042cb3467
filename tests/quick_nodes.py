"""SuperNodes that look for messages more often than Flower's do: three seconds of sleep are most of an exchange."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from page_reading import ROOT

from fedcomp.experiments.engines.superlink import TASK_POLL

_CUSTOM = """
import sys, time

_sleep = time.sleep


def sleep(seconds):
    # An idle SuperNode looks for messages every three seconds.
    _sleep(0.3 if seconds == 3 and sys.argv[0].endswith("flower-supernode") else seconds)


time.sleep = sleep
"""


def quicken(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let no process that is started from now on oversleep, and none look so often that looking is most of its work."""
    (folder / "sitecustomize.py").write_text(_CUSTOM, encoding="utf-8")
    # The checkout that is tested, whatever else is installed.
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    patch.setenv(TASK_POLL, "0.2")
