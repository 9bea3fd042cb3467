"""Shared fixtures: Flower stays offline, keeps its files in a directory per test, and forgets who it was."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from fedcomp.flower.offline import go_offline

# Before any test module imports Flower: its telemetry switch is read at import.
go_offline()

# A shell that starts the tests in the background has them ignore SIGINT, and every process they start inherits that;
# what tests say of an interruption holds for a process that can be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; HYPOTHESIS_PROFILE=deep looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Hypothesis also tries constants that it finds in the sources of all modules loaded so far, which are others on every
# worker and in every order of files: the same examples come only without them.
assert callable(providers._get_local_constants)
assert not providers._local_constants.integers
providers._get_local_constants = lambda: providers._local_constants  # empty, as nobody adds to them any more


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector, which would look at all of them again and again: 8 s of 34."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@functools.cache
def _place(file: Path) -> int:
    """Return when a file is handed to a worker: 0 for what starts Ray or deployments, 1 for other slow ones, or 2."""
    text = file.read_text(encoding="utf-8")
    if "mark.engines" in text:
        return 0
    return 1 if re.search(r"mark\.(slow|long)", text) else 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist the long files come first, so that no worker is left with one when the others are done."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` keep the tests of deployments on one worker, and all else that starts engines on one.

    Each has more processes than a small machine has processors, but waits often: with two at once the processors have
    something to do, with more of them they would only wait for each other.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class EnginesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if _place(config.rootpath / file) > 0:
                return file
            return "deployments" if file.startswith("tests/deployment/") else "engines"

    # The order of the workers stands.
    config.option.loadscopereorder = False
    return EnginesTogether(config, log)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Take all that was imported so far out of the garbage collector's sight.

    Some of Flower's strategies collect the garbage after every reply, which looks at every object there is: with the
    imports of all tests that took most of their time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def flower_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Name new folders; ``mktemp`` would look at those of all former tests each time: a millisecond for a thousand."""
    base = tmp_path_factory.mktemp("flwr")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def flower_home(flower_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test its own FLWR_HOME; Flower makes the folder where it writes to it, which few tests come to."""
    home = next(flower_homes)
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
