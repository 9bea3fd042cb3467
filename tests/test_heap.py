"""Freed memory stays with the process where the C library can be told so, and nothing happens elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedcomp import heap

FAULTS = """
import resource, sys
import numpy as np
from fedcomp.heap import keep_freed_memory
kept = keep_freed_memory()
total = np.zeros(1)
for _ in range(12):
    total += np.full(16_000_000, 1, np.float32)[:1]
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(**environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if name not in heap.ENVIRONMENT}
    out = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    )
    said, count = out.stdout.split()
    return said, int(count)


@pytest.mark.skipif(not heap.is_glibc(), reason="another C library")
def test_pages_are_made_once() -> None:
    """Twelve arrays of 64 MB, one after the other: their pages are those of the first."""
    kept, once = faults()
    # The user's own choice counts.
    left, each = faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072", GLIBC_TUNABLES="")
    assert (kept, left) == ("True", "False")
    assert once < each


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in heap.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for answer in (None, "", "musl"):
        monkeypatch.setattr(heap.os, "confstr", lambda _, answer=answer: answer)
        assert not heap.keep_freed_memory()

    def unknown(_: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(heap.os, "confstr", unknown)
    assert not heap.keep_freed_memory()
