"""Top-k and its error-feedback step on inputs that are hard to rank, against the same calls on layered random values.

A frozen part of a model, a fine-tuned head or embeddings give updates with fewer non-zeros than coordinates to send;
signs and quantised values give ties; sorted values mislead a sample of neighbours. Each such input is measured side by
side with the usual values, so what a shared machine does meanwhile cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from fedcomp.experiments.bench.readpass import Times, Vector
from fedcomp.experiments.findings import Claim
from fedcomp.kernels import feedback_step, select_topk

BOUND: Final = 2.0
SOURCE: Final = "our goal: no input takes more than twice as long as a usual one"
WARM_BOUND: Final = 1.1
WARM_SOURCE: Final = "our goal: the threshold of the round before never costs time, but for noise"
DENSITIES: Final = (0.01, 0.1)
_CALLS: Final = ("top-k", "step, cold", "step, warm")


def worst(vector: Vector, repetitions: int, say: Callable[[str], None], *, claimed: bool) -> dict[str, list[Any]]:
    """Measure the selection, and steps that start with a sample (cold) and with their last threshold (warm).

    Parameters
    ----------
    vector : float32 array of shape (n,)
        The usual values, on which the others build.
    repetitions : int
    say : callable
        Told what is measured next.
    claimed : bool
        Whether the bounds are claimed.

    Returns
    -------
    dict
        ``rows``: one per density, input and call. ``claims``: of each call, the slowest input's time over that on the
        usual values; and the warm step's over the cold one's.
    """
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for density in DENSITIES:
        found: dict[str, Times] = {}
        for name, make in _inputs(vector, math.ceil(density * vector.size)).items():
            say(f"density {density}, {name}: {repetitions} interleaved repetitions")
            found[name] = _measured(make(), vector, math.ceil(density * vector.size), repetitions)
            rows += [
                {
                    "n": vector.size,
                    "density": density,
                    "input": name,
                    "method": call,
                    "times the usual": round(found[name].ratio(call, f"{call}, usual"), 2),
                }
                for call in _CALLS
            ]
        if claimed:
            claims += [_slowest(found, call, f"{call}, usual", density, BOUND, SOURCE) for call in _CALLS]
            claims.append(_slowest(found, "step, warm", "step, cold", density, WARM_BOUND, WARM_SOURCE))
    return {"rows": rows, "claims": claims}


def _slowest(found: Mapping[str, Times], call: str, to: str, density: float, bound: float, source: str) -> Claim:
    """Return the claim on the input with the largest ratio."""
    ratio, name = max((times.ratio(call, to), name) for name, times in found.items())
    return Claim(f"{call} at density {density:g}, times {to}: slowest input, {name}", ratio, "<=", bound, source)


def _measured(x: Vector, usual: Vector, k: int, repetitions: int) -> Times:
    """Return the times on ``x`` and on the usual values, interleaved."""
    memory, out = np.zeros_like(x), np.empty_like(x)

    def calls(values: Vector, of: str) -> dict[str, Callable[[], object]]:
        former = feedback_step(memory, values, k, out=out).threshold
        return {
            f"top-k{of}": lambda: select_topk(values, k),
            f"step, cold{of}": lambda: feedback_step(memory, values, k, out=out),
            f"step, warm{of}": lambda: feedback_step(memory, values, k, threshold=former, out=out),
        }

    found = Times(x.size)
    found.measure(calls(x, "") | calls(usual, ", usual"), usual, repetitions)
    return found


def _inputs(vector: Vector, k: int) -> dict[str, Callable[[], Vector]]:
    """Return what makes each input; one exists at a time."""
    n = vector.size
    few = int(0.99 * k)

    def sparse(where: Any) -> Vector:
        made = np.zeros(n, np.float32)
        made[where] = vector[where]
        return made

    return {
        "fewer non-zeros than k": lambda: sparse(np.random.default_rng(1).choice(n, few, replace=False)),
        "the same, side by side": lambda: sparse(slice(n // 3, n // 3 + few)),
        "five in a hundred not zero": lambda: sparse(np.random.default_rng(2).random(n) < 0.05),
        "all zeros of both signs": lambda: np.float32(0.0) * vector,
        "all equal": lambda: np.full(n, 0.5, np.float32),
        "signs": lambda: np.sign(vector),
        "17 levels": lambda: np.round(np.clip(vector / np.std(vector) * 4, -8, 8)).astype(np.float32),
        "rising": lambda: np.sort(np.abs(vector)),
        "falling": lambda: np.sort(np.abs(vector))[::-1].copy(),
        "denormal": lambda: vector * np.float32(1e-41),
    }
