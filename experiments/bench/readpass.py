"""Timing in read passes: a kernel's time relative to reading its vector once.

Everything runs in one thread, as a simulated client does. Every time is divided by that of a read pass, the vectorised
sum of |x|: one is taken before each call, the mean over a repetition is the repetition's limit, and the median of the
ratios over interleaved repetitions is reported (:class:`fedcomp.measuring.Times`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError, why_missing
from fedcomp.measuring import Bound, Calls, Case, Row, Times, timed

LAYERS: Final = 60
Vector = NDArray[np.float32]


class BenchError(FedcompError, RuntimeError):
    """A measurement has no result: its process ended without one, or left out what was to be measured."""


def layered(size: int, seed: int = 0) -> Vector:
    """Return Student t(4) values in equal layers of log-normal scale, float32 of shape (size,)."""
    rng = np.random.default_rng(seed)
    vector = rng.standard_t(4, size).astype(np.float32)
    # Layers of unlike scale, as models have them: a threshold for all is then decided by a few layers.
    for layer in np.array_split(vector, LAYERS):
        layer *= np.float32(np.exp(rng.normal()))
    return vector


@cache
def _sum() -> Callable[[Vector], Any]:
    import numba

    # fastmath lets the compiler vectorise the sum, which is what makes it a limit: memory decides.
    @numba.njit(nogil=True, fastmath=True)
    def total(x: Vector) -> Any:
        s = np.float32(0.0)
        for i in range(x.size):
            s += abs(x[i])
        return s

    # Compiles it.
    total(np.zeros(1, np.float32))
    return total


def read_pass(vector: Vector) -> Callable[[], object]:
    """Return one vectorised read pass: the sum of |x| in one thread."""
    total = _sum()
    return lambda: total(vector)


def in_passes(
    name: str, vector: Vector, calls: Calls, repetitions: int, bounds: Sequence[Bound] = (), **columns: Any
) -> Case:
    """Return the case of methods that are timed beside a read pass of ``vector``; ``columns`` are for every row."""

    def row(times: Times, method: str) -> Row:
        taken = {"milliseconds": round(1e3 * times.median(method), 3), "read passes": round(times.multiple(method), 2)}
        return {"n": vector.size, **columns, "method": method, **taken}

    return timed(name, calls, repetitions, row, bounds, limit=read_pass(vector))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread in torch, where it is installed: simulated clients share the cores."""
    if why_missing("torch"):
        yield
        return
    from fedcomp.tasks.base import single_thread

    with single_thread():
        yield
