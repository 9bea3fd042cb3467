"""Privacy noise: exact integer samplers against a float Gaussian and against rational arithmetic.

The float Gaussian is numpy's, which is neither exact nor from a source nobody can repeat; the others take their
randomness from ChaCha20 under a key of the operating system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from fedcomp.measuring import Bound, Case, Found, Row, Times, timed
from fedcomp.privacy.entropy import SystemEntropy
from fedcomp.privacy.noise import discrete_gaussian, gaussian, skellam

SIGMAS: Final = (1.0, 100.0, 2.0**20)
PLAIN: Final = "numpy standard_normal (float, for comparison)"
EXACT: Final = "discrete_gaussian"
RATIONAL: Final = "discrete_gaussian, exact=True"
# Fewer draws than of the others: in rationals one takes over a hundred times as long.
FEW: Final = 200
GOAL: Final = "goal of this project, on the same machine"
EACH: Final = "nanoseconds a draw"


def cases(quick: bool) -> Iterator[Case]:
    """Yield every sampler at every deviation."""
    size, entropy = 10_000 if quick else 1_000_000, SystemEntropy()
    for sigma in SIGMAS:
        calls: dict[str, Callable[[], object]] = {
            PLAIN: partial(np.random.default_rng().standard_normal, size),
            "gaussian (float, insecure)": partial(gaussian, sigma, size, entropy),
            EXACT: partial(discrete_gaussian, sigma, size, entropy),
            "skellam": partial(skellam, sigma, size, entropy),
            RATIONAL: partial(discrete_gaussian, sigma, FEW, entropy, exact=True),
        }

        def row(times: Times, method: str, sigma: float = sigma) -> Row:
            draws = FEW if method == RATIONAL else size
            return {"sigma": sigma, "sampler": method, EACH: round(1e9 * times.median(method) / draws, 1)}

        yield timed(f"standard deviation {sigma:g}", calls, 1 if quick else 7, row)

    def ratios(found: Found, of: str, to: str) -> list[float]:
        return [found.of(EACH, sigma=s, sampler=of) / found.of(EACH, sigma=s, sampler=to) for s in SIGMAS]

    # The worst deviation decides: a sampler must not be fast for some noise multipliers only.
    slower = "an exact discrete Gaussian costs at most ten times numpy's float one"
    faster = "and is at least a hundred times as fast as deciding everything in rationals"
    yield Case(
        bounds=[
            Bound(slower, lambda found: max(ratios(found, EXACT, PLAIN)), "<= 10", GOAL),
            Bound(faster, lambda found: min(ratios(found, RATIONAL, EXACT)), ">= 100", GOAL),
        ]
    )
