"""Top-k and its error-feedback step on inputs that are hard to rank, against the same calls on layered random values.

A frozen part of a model, a fine-tuned head or embeddings give updates with fewer non-zeros than coordinates to send;
signs and quantised values give ties; sorted values mislead a sample of neighbours. Each such input is measured side by
side with the usual values, so what a shared machine does meanwhile cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from fedcomp.experiments.bench.readpass import Vector
from fedcomp.kernels import feedback_step, select_topk
from fedcomp.measuring import Bound, Case, Found, Row, Times

SOURCE: Final = "our goal: no input takes more than twice as long as a usual one"
WARM_SOURCE: Final = "our goal: the threshold of the round before never costs time, but for noise"
DENSITIES: Final = (0.01, 0.1)
CALLS: Final = ("top-k", "step, cold", "step, warm")


def worst(vector: Vector, repetitions: int) -> Iterator[Case]:
    """Yield the selection on every input, and steps that start with a sample (cold) and with their last threshold.

    A row has a call's time over that on the usual values; the claims are about the slowest input.
    """
    for density in DENSITIES:
        k = math.ceil(density * vector.size)
        for name, make in _inputs(vector, k).items():

            def measure(found: Found, name: Any = name, make: Any = make, k: int = k, at: float = density) -> list[Row]:
                found.times = Times({**_calls(make(), k, ""), **_calls(vector, k, ", usual")}, repetitions)
                usual = {call: round(found.times.ratio(call, f"{call}, usual"), 2) for call in CALLS}
                over = {"warm / cold": round(found.times.ratio("step, warm", "step, cold"), 2)}
                return [{"n": vector.size, "density": at, "input": name, **usual, **over}]

            yield Case(f"density {density}, {name}: {repetitions} interleaved repetitions", measure)

        def slowest(found: Found, column: str, at: float = density) -> float:
            return max(row[column] for row in found.rows if "input" in row and row["density"] == at)

        bounds = [(call, f"{call} at density {density:g}, times {call}, usual", 2.0, SOURCE) for call in CALLS]
        bounds.append(("warm / cold", f"step, warm at density {density:g}, times step, cold", 1.1, WARM_SOURCE))
        yield Case(
            bounds=[
                Bound(f"{text}: slowest input", lambda found, c=column, s=slowest: s(found, c), f"<= {most}", source)  # type: ignore[misc]
                for column, text, most, source in bounds
            ]
        )


def _calls(values: Vector, k: int, of: str) -> dict[str, Callable[[], object]]:
    memory, out = np.zeros_like(values), np.empty_like(values)
    former = feedback_step(memory, values, k, out=out).threshold
    return {
        f"top-k{of}": lambda: select_topk(values, k),
        f"step, cold{of}": lambda: feedback_step(memory, values, k, out=out),
        f"step, warm{of}": lambda: feedback_step(memory, values, k, threshold=former, out=out),
    }


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
