"""Shared fixtures: Flower stays offline, keeps its files in a directory per test, and forgets who it was."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fedcomp.flower.offline import go_offline

# Before any test module imports Flower: its telemetry switch is read at import.
go_offline()

# The same examples in every run; HYPOTHESIS_PROFILE=deep looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Take all that was imported so far out of the garbage collector's sight.

    Some of Flower's strategies collect the garbage after every reply, which looks at every object there is: with the
    imports of all tests that took most of their time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def flower_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test its own FLWR_HOME."""
    home = tmp_path_factory.mktemp("flwr")
    monkeypatch.setenv("FLWR_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def fresh_identity() -> Iterator[None]:
    """Start and end every test without a Flower process identity, so that no test leans on a former one's grid."""
    _forget_identity()
    yield
    _forget_identity()


def _forget_identity() -> None:
    private = sys.modules.get("fedcomp.flower._private")
    if private is not None:
        private.adopt_identity((None, None, None))
