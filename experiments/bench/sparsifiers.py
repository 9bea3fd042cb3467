"""The kernels of the sparsifiers beside top-k: SIDCo's estimate, the arg-max of chunks, AdaComp's rule.

Bounds are figures in read passes that such kernels, one thread on 25 million values of the same distribution, took on a
quiet machine, times a slack: load inflates a kernel by more than the read pass beside it. AdaComp's fused step had no
such figure; its bound is our goal. The plain torch forms of SIDCo and of the chunks run beside ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.sidco import FIRST, estimate_threshold
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import Vector, in_passes
from fedcomp.kernels import adaptive_step, select_above, select_adaptive, select_bins
from fedcomp.measuring import Bound, Case

SLACK: Final = 1.25
# Read passes by density: of the chunks' arg-max, and of the exponential fit with so many stages.
FIGURES: Final = {
    0.001: {"chunk top-1": 2.6, "SIDCo-E, 1 stage": 4.2, "SIDCo-E, 2 stages": 4.2, "SIDCo-E, 4 stages": 6.4},
    0.01: {"chunk top-1": 4.0, "SIDCo-E, 1 stage": 6.0, "SIDCo-E, 2 stages": 5.2, "SIDCo-E, 4 stages": 7.2},
    0.1: {"chunk top-1": 22.0, "SIDCo-E, 1 stage": 8.0, "SIDCo-E, 2 stages": 7.8},
}
# Read passes by bin length: of AdaComp's selection, and what the step may take.
ADAPTIVE: Final = {50: (15.0, 8.0), 500: (8.5, 6.0)}
SOURCE: Final = f"measured on a quiet machine, times {SLACK:g}"
GOAL: Final = "our goal, set from measurements of these kernels on a loaded machine"
_WARM_ROUNDS: Final = 6


def sparsifiers(vector: Vector, repetitions: int) -> Iterator[Case]:
    """Yield all kernels of this module: by density, with the plain torch forms beside ours, and by length of bins."""
    for density in FIGURES:
        yield of_density(vector, repetitions, density)
    for length in ADAPTIVE:
        yield adaptive(vector, repetitions, length)


def of_density(vector: Vector, repetitions: int, density: float) -> Case:
    """Return the arg-max of chunks and SIDCo's estimates at one density; each call does all of its work."""
    # One element of each chunk is sent: its length is the inverse of the density.
    length, missing = round(1 / density), why_missing("torch")
    calls: dict[str, Callable[[], object]] = {}
    for name in FIGURES[density]:
        stages = int(name.split()[1]) if name.startswith("SIDCo") else 0
        calls[name] = partial(sidco, vector, density, stages) if stages else partial(select_bins, vector, length)
        if not missing:
            import torch

            tensor = torch.from_numpy(vector)
            other = partial(sidco_torch, tensor, density, stages) if stages else partial(chunks_torch, tensor, length)
            calls[f"{name}, torch"] = other
    at, figures = f"at density {density:g}", FIGURES[density]
    bounds = [
        Bound(f"{name} {at}: read passes", name, f"<= {SLACK * figure}", SOURCE) for name, figure in figures.items()
    ]
    bounds += [
        Bound(f"{name} {at}: times faster than plain torch", f"{name}, torch / {name}", ">= 1", GOAL, skipped=missing)
        for name in figures
    ]
    text = f"SIDCo and chunks at density {density}"
    return in_passes(text, vector, calls, repetitions, bounds, density=density)


def adaptive(vector: Vector, repetitions: int, length: int) -> Case:
    """Return AdaComp's kernels on a residue that has settled; a column says how many elements a bin sends."""
    size = vector.size
    # A stream of different updates of one distribution: what the residue holds decides how many pass.
    updates = [np.roll(vector, shift) for shift in (0, size // 3, size // 2)]
    residue = np.zeros(size, np.float32)
    held = {"round": 0}

    def step() -> object:
        held["round"] += 1
        return adaptive_step(residue, updates[held["round"] % 3], length, out=residue)

    # From zero the residue grows for some rounds, and with it how many elements pass.
    for _ in range(_WARM_ROUNDS):
        step()
    total = residue + updates[0]
    found = select_adaptive(total, updates[0], length)
    calls = {"AdaComp select": lambda: select_adaptive(total, updates[0], length), "AdaComp step": step}
    at, (figure, goal) = f"with bins of {length}: read passes", ADAPTIVE[length]
    bounds = [
        Bound(f"AdaComp select {at}", "AdaComp select", f"<= {SLACK * figure}", SOURCE),
        Bound(f"AdaComp step {at}", "AdaComp step", f"<= {goal}", GOAL),
    ]
    columns = {"bin length": length, "sent per bin": round(found.indices.size / found.bins, 2)}
    return in_passes(f"AdaComp with bins of {length}", vector, calls, repetitions, bounds, **columns)


def sidco(vector: Vector, density: float, stages: int) -> NDArray[np.int64]:
    """Return the indices of what exceeds SIDCo's threshold, fitted by exponentials."""
    return select_above(vector, estimate_threshold(vector, density, "exponential", stages).threshold)


def sidco_torch(tensor: Any, density: float, stages: int) -> Any:
    """The same in plain torch: one copy of the exceedances per stage."""
    ratios = [density]
    if stages > 1 and density < FIRST:
        ratios = [FIRST] + [(density / FIRST) ** (1 / (stages - 1))] * (stages - 1)
    magnitudes = tail = tensor.abs()
    threshold = 0.0
    for stage, ratio in enumerate(ratios):
        if stage:
            tail = tail[tail > threshold]
        threshold -= (float(tail.mean()) - threshold) * math.log(ratio)
    return (magnitudes > threshold).nonzero().squeeze(1)


def chunks_torch(tensor: Any, length: int) -> Any:
    """The index of the largest magnitude of every chunk of ``length`` elements, in plain torch."""
    import torch

    magnitudes = tensor.abs()
    full = tensor.numel() // length * length
    indices = magnitudes[:full].view(-1, length).argmax(dim=1) + torch.arange(0, full, length)
    if full < tensor.numel():
        indices = torch.cat([indices, magnitudes[full:].argmax().view(1) + full])
    return indices
