"""Directions of signs, drawn and added: what every round of forward gradients costs its server."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, Final

import numpy as np

from fedcomp.experiments.bench.readpass import Times, Vector
from fedcomp.experiments.findings import Claim
from fedcomp.forward.directions import Directions
from fedcomp.rng import Key
from fedcomp.systems.forward import SIGNS_A_SECOND

COUNT: Final = 32
SMALL: Final = 2_410
"""Parameters of a small model: there opening streams, not memory, is what an estimate costs."""
WANTED: Final = "what the strategy counts on when it says what a round costs, on one core"


def directions(vector: Vector, repetitions: int, say: Callable[[str], None]) -> dict[str, list[Any]]:
    """Measure an estimate and the products of a client, of a small and of a large model; return rows and claims.

    The peer adds the same number of directions of numpy's own signs, as they are usually written.
    """
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    large = min(1_000_000, vector.size)
    for size in (SMALL, large):
        say(f"{COUNT} directions of {size:,} signs: {repetitions} interleaved repetitions")
        part, drawn = vector[:size], Directions(Key(0, "bench directions"), [size], COUNT)
        scalars = np.random.default_rng(0).normal(size=(1, COUNT))
        calls: dict[str, Callable[[], object]] = {
            f"estimate of {COUNT} directions": lambda d=drawn, s=scalars: d.combine(s),  # type: ignore[misc]
            f"products with {COUNT} directions": lambda d=drawn, p=part: d.project(p),  # type: ignore[misc]
            f"{COUNT} directions of numpy's signs, added": lambda s=scalars[0], n=size: _peer(s, n),  # type: ignore[misc]
        }
        times = Times(size)
        times.measure(calls, part, repetitions)
        rows += times.rows()
        estimate, products, peer = calls
        for name in (estimate, products):
            rate = COUNT * size / median(times.seconds[name])
            rows[-3 + list(calls).index(name)]["giga-signs a second"] = round(rate / 1e9, 2)
            # Of a small model an estimate takes a tenth of a millisecond, most of it before the first sign.
            if size == large:
                claims.append(Claim(f"{name}, {size:,} parameters: signs a second", rate, ">=", SIGNS_A_SECOND, WANTED))
        faster = times.ratio(peer, estimate)
        claims.append(Claim(f"{estimate}, {size:,} parameters: times as fast as numpy's", faster, ">=", 1.0, "goal"))
    return {"rows": rows, "claims": claims}


def _peer(scalars: np.ndarray, size: int) -> np.ndarray:
    rng, out = np.random.default_rng(0), np.zeros(size)
    for scalar in scalars:
        out += scalar * (2.0 * rng.integers(0, 2, size, dtype=np.int8) - 1.0)
    return out / len(scalars)
