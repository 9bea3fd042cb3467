"""Fixtures of the task tests: nothing here may depend on the environment of whoever runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide $FEDCOMP_DATA, so that every test that does not ask for local data gets the offline defaults."""
    if "local_data" not in request.fixturenames:
        monkeypatch.delenv("FEDCOMP_DATA", raising=False)


@pytest.fixture
def local_data() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    candidates = [Path(p) for p in (os.environ.get("FEDCOMP_DATA"),) if p]
    candidates.append(Path(__file__).resolve().parents[3] / "shared" / "data")
    for folder in candidates:
        if folder.is_dir():
            return folder
    pytest.skip("no local data sets: set FEDCOMP_DATA to their folder")
