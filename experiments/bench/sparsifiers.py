"""The kernels of the sparsifiers beside top-k: SIDCo's estimate, the arg-max of chunks, AdaComp's rule.

Bounds are figures in read passes that such kernels, one thread on 25 million values of the same distribution, took on a
quiet machine, times a slack: load inflates a kernel by more than the read pass beside it. AdaComp's fused step had no
such figure; its bound is our goal. The plain torch forms of SIDCo and of the chunks run beside ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.sidco import FIRST, estimate_threshold
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import Against, Case, Limit, Vector
from fedcomp.kernels import adaptive_step, select_above, select_adaptive, select_bins

SLACK: Final = 1.25
# Read passes by density: of the exponential fit with so many stages, and of the chunks' arg-max.
SIDCO: Final = {0.001: {1: 4.2, 2: 4.2, 4: 6.4}, 0.01: {1: 6.0, 2: 5.2, 4: 7.2}, 0.1: {1: 8.0, 2: 7.8}}
CHUNKS: Final = {0.001: 2.6, 0.01: 4.0, 0.1: 22.0}
# Read passes by bin length: of AdaComp's selection, and what the step may take.
ADAPTIVE: Final = {50: 15.0, 500: 8.5}
ADAPTIVE_GOALS: Final = {50: 8.0, 500: 6.0}
SOURCE: Final = f"measured on a quiet machine, times {SLACK:g}"
GOAL: Final = "our goal, set from measurements of these kernels on a loaded machine"
_WARM_ROUNDS: Final = 6


def sparsifiers(vector: Vector) -> Iterator[Case]:
    """Yield all kernels of this module: by density, with the plain torch forms beside ours, and by length of bins."""
    for density in SIDCO:
        yield of_density(vector, density)
    for length in ADAPTIVE:
        yield adaptive(vector, length)


def of_density(vector: Vector, density: float) -> Case:
    """Return the arg-max of chunks and SIDCo's estimates at one density."""
    figures = {"chunk top-1": CHUNKS[density], **{_sidco(stages): f for stages, f in SIDCO[density].items()}}
    at = f"at density {density:g}"
    return Case(
        f"SIDCo and chunks at density {density}",
        vector,
        by_density(vector, density),
        [Limit(f"{name} {at}: read passes", name, SLACK * figure, SOURCE) for name, figure in figures.items()],
        [
            Against(f"{name} {at}: times faster than plain torch", f"{name}, torch", name, ">=", 1.0, GOAL)
            for name in figures
        ],
        {"density": density},
    )


def by_density(vector: Vector, density: float) -> dict[str, Callable[[], object]]:
    """Return the calls to be timed at one density; each does all of its work every time."""
    # One element of each chunk is sent: its length is the inverse of the density.
    length = round(1 / density)
    calls: dict[str, Callable[[], object]] = {"chunk top-1": lambda: select_bins(vector, length)}
    for stages in SIDCO[density]:
        calls[_sidco(stages)] = lambda stages=stages: sidco(vector, density, stages)  # type: ignore[misc]
    if not why_missing("torch"):
        import torch

        tensor = torch.from_numpy(vector)
        calls["chunk top-1, torch"] = lambda: chunks_torch(tensor, length)
        for stages in SIDCO[density]:
            calls[f"{_sidco(stages)}, torch"] = lambda stages=stages: sidco_torch(tensor, density, stages)  # type: ignore[misc]
    return calls


def adaptive(vector: Vector, length: int) -> Case:
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
    at = f"with bins of {length}: read passes"
    return Case(
        f"AdaComp with bins of {length}",
        vector,
        {"AdaComp select": lambda: select_adaptive(total, updates[0], length), "AdaComp step": step},
        [
            Limit(f"AdaComp select {at}", "AdaComp select", SLACK * ADAPTIVE[length], SOURCE),
            Limit(f"AdaComp step {at}", "AdaComp step", ADAPTIVE_GOALS[length], GOAL),
        ],
        columns={"bin length": length, "sent per bin": round(found.indices.size / found.bins, 2)},
    )


def _sidco(stages: int) -> str:
    return f"SIDCo-E, {stages} stage{'s' if stages > 1 else ''}"


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
