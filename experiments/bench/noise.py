"""Privacy noise: exact integer samplers against a float Gaussian, and against deciding everything in rationals.

Processor time of one thread. The float Gaussian is numpy's, which is neither exact nor from a source nobody can repeat;
the others take their randomness from ChaCha20 under a key of the operating system.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from fedcomp.experiments.bench.readpass import interleaved
from fedcomp.experiments.findings import Claim
from fedcomp.privacy.entropy import SystemEntropy
from fedcomp.privacy.noise import discrete_gaussian, gaussian, skellam

SIGMAS: Final = (1.0, 100.0, 2.0**20)
# Fewer draws than of the others: in rationals one takes over a hundred times as long.
_RATIONAL: Final = 200
_REPETITIONS: Final = 7


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Time every sampler; return rows and claims."""
    size = 10_000 if quick else 1_000_000
    entropy, numpys = SystemEntropy(), np.random.default_rng()
    rows, ratios = [], []
    for sigma in SIGMAS:
        if progress is not None:
            progress(f"standard deviation {sigma:g}")
        samplers: dict[str, tuple[int, Callable[[], object]]] = {
            "numpy standard_normal (float, for comparison)": (size, partial(numpys.standard_normal, size)),
            "gaussian (float, insecure)": (size, partial(gaussian, sigma, size, entropy)),
            "discrete_gaussian": (size, partial(discrete_gaussian, sigma, size, entropy)),
            "skellam": (size, partial(skellam, sigma, size, entropy)),
            "discrete_gaussian, exact=True": (
                _RATIONAL,
                partial(discrete_gaussian, sigma, _RATIONAL, entropy, exact=True),
            ),
        }
        taken = interleaved({name: call for name, (_, call) in samplers.items()}, 1 if quick else _REPETITIONS)
        seconds = {name: median(times) / samplers[name][0] for name, times in taken.items()}
        for name, each in seconds.items():
            rows.append({"sigma": sigma, "sampler": name, "nanoseconds a draw": round(1e9 * each, 1)})
        plain = seconds["numpy standard_normal (float, for comparison)"]
        rational, fast = seconds["discrete_gaussian, exact=True"], seconds["discrete_gaussian"]
        ratios.append((fast / plain, rational / fast))
    claims = [
        Claim(
            "an exact discrete Gaussian costs at most ten times numpy's float one",
            # The worst deviation decides: a sampler must not be fast for some noise multipliers only.
            max(slower for slower, _ in ratios),
            "<=",
            10.0,
            "goal of this project, on the same machine",
            gate=not quick,
        ),
        Claim(
            "and is at least a hundred times as fast as deciding everything in rationals",
            min(faster for _, faster in ratios),
            ">=",
            100.0,
            "goal of this project, on the same machine",
            gate=not quick,
        ),
    ]
    return {"rows": rows, "claims": claims}
