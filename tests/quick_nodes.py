"""Deployments whose processes sleep less and import less than Flower's: nearly all that a message costs.

An idle SuperNode looks for messages every three seconds, and for every message SuperExec starts a process that imports
Flower, the library and torch. What these do is in ``tests/quick``; each message still has a process of its own.
"""

from __future__ import annotations

import os

import pytest
from page_reading import ROOT

from fedcomp.experiments.engines.superlink import TASK_POLL


def quicken(patch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let no process that is started from now on oversleep, and none look so often that looking is most of its work.

    With ``modules`` the client apps are forked from a process that has imported them.
    """
    # The checkout that is tested, whatever else is installed.
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "quick"), str(ROOT)]))
    patch.setenv(TASK_POLL, "0.2")
    if modules:
        # numpy's BLAS would start threads, and what is forked must have none.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("WARM_APPS", ",".join(modules))
