"""A ring that compresses on every hop: equal at all workers, errors that grow with the ring (spec A3.3, A7: 10)."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.errors import LayoutError
from fedcomp.gossip.coded_ring import coded_ring, eight_bits, upper_half
from fedcomp.wire import Raw

CODES = {"upper half": upper_half, "eight bits": eight_bits, "whole": Raw}


def vectors(workers: int, size: int = 4001, seed: int = 0, *, positive: bool = False) -> list[np.ndarray]:
    drawn = np.random.default_rng(seed).normal(size=(workers, size))
    return list((np.abs(drawn) if positive else drawn).astype(np.float32))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_10_all_workers_hold_identical_bytes(code: str, workers: int) -> None:
    given = vectors(workers)
    found = coded_ring(given, CODES[code])
    assert len({sum_.tobytes() for sum_ in found.sums}) == 1
    assert len(set(found.frames)) == 1
    exact = np.sum(given, axis=0, dtype=np.float64)
    relative = np.linalg.norm(found.sums[0] - exact) / np.linalg.norm(exact)
    assert relative <= {"upper half": 0.02, "eight bits": 0.05, "whole": 1e-6}[code]


def test_truncation_shrinks_and_rounding_does_not() -> None:
    given = vectors(8, positive=True)
    exact = np.sum(given, axis=0, dtype=np.float64)
    cut, rounded = (coded_ring(given, code).sums[0] - exact for code in (upper_half, eight_bits))
    assert (cut <= 0.0).all()
    assert cut.mean() / exact.mean() < -2e-3
    assert abs(rounded.mean()) < 0.2 * np.abs(rounded).mean()


@pytest.mark.parametrize("code", ["upper half", "eight bits"])
def test_errors_grow_with_the_ring(code: str) -> None:
    errors = []
    for workers in (2, 8, 32):
        given = vectors(workers, positive=True)
        exact = np.sum(given, axis=0, dtype=np.float64)
        errors.append(np.linalg.norm(coded_ring(given, CODES[code]).sums[0] - exact) / np.linalg.norm(exact))
    assert errors[0] < errors[1] < errors[2]


def test_a_worker_sends_what_a_ring_sends() -> None:
    """Twice (p - 1) / p of the vector, in 4 bytes a value, 2, or at most 1, beside the frames' tables."""
    for code, width in ((Raw, 4), (upper_half, 2), (eight_bits, 1)):
        found = coded_ring(vectors(4, 40_000), code)
        for sent in found.sent:
            extra = sent - 2 * 3 / 4 * 40_000 * width
            # Levels are entropy-coded where that is shorter.
            assert extra < 6 * 80
            assert extra >= 0 or code is eight_bits


def test_vectors_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(LayoutError):
        coded_ring([], upper_half)
    with pytest.raises(LayoutError):
        coded_ring([np.zeros(3, np.float32), np.zeros(4, np.float32)], upper_half)
