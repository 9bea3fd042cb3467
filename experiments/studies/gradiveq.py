"""GradiVeQ: the error of gradient bases, trainings in cycles of samples and coefficients, and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.codecs import GradiVeQ
from fedcomp.codecs.cycle import Cycle
from fedcomp.codecs.gradiveq import open_steps
from fedcomp.codecs.slices import Slices
from fedcomp.codecs.subspace import KINDS, BasisFit, Moments, SliceBasis
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import repetitions, table
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies import convolutions
from fedcomp.experiments.studies.convolutions import WORKERS, Gradient, gradients, mean_of
from fedcomp.experiments.tables import Found, Training
from fedcomp.gossip.ring import ring_sum
from fedcomp.layout import Layout, SmallDense, Vector
from fedcomp.local import Local
from fedcomp.rng import Key
from fedcomp.systems.gradiveq import FittedBasis
from fedcomp.timing.collectives import Coding, Network

if TYPE_CHECKING:
    from fedcomp.experiments.central import Cost

LAYERS: Final = ("conv2", "conv3")
LAYOUTS: Final = {"FDHW": "as torch stores it", "HWDF": "filters fastest", "HWFD": "depth fastest", "DFHW": "kernels"}
"""By order of axes, the slowest first, its description."""

WIDTH: Final = 512
MOST: Final = 64
"""Dimension of a basis: an eighth of a slice, as published."""

SMALL: Final = 1e-6
"""Allowed loss at which the dimension is always the largest."""

EARLY: Final = 50
LATE: Final = 300
"""Steps before the sampled ones in the comparison of bases: right after the warm-up, and later in the training."""

POOLED: Final = "pooled, 20 + 130"
GRIDS: Final = "pooled, 20 + 130, 4 bits on a shared scale"


def fitted(warmup: int, sampling: int, compression: int, **options: Any) -> FittedBasis:
    """Return the program of a basis. Phases of its cycle are in steps; ``options`` are those of the codec."""
    codec = GradiVeQ(**{"width": WIDTH, "loss": SMALL, **options})
    return FittedBasis(codec, sampling, compression, warmup_rounds=warmup)


def layout_of(tensors: Gradient) -> Layout:
    """Return the layout of the convolutions, all of which may be compressed."""
    return Layout.of({name: tensors[name] for name in ("conv1", "conv2", "conv3")}, SmallDense(min_size=1))


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row. Additional results: ``basis``, bytes of bases, once for each worker; ``cycles``, for each whole
    cycle how many times fewer bytes it took than dense frames, as counted and by the formula from the lengths of a
    dense and a short frame; ``ring is star``, whether sums on grids were the same."""
    frames: list[int] = []
    bases: list[bytes] = []
    agreed = []

    def sent(local: Local, cost: Cost) -> int:
        frames.append(len(local.answers[-1].frames["values"]))
        agreed.append(ring_is_star(local))
        basis = local.state.get("basis")
        if basis is not None and basis not in bases:
            bases.append(basis)
        return cost.uplink

    record, sending = convolutions.train(spec, training, layout_of, sent)
    cycles, system = [], sending.local.system
    if isinstance(system, FittedBasis):
        length = system.sampling + system.compression
        for start in range(system.warmup_rounds, len(frames) - length + 1, length):
            part, cycle = frames[start : start + length], Cycle(0, system.sampling, system.compression)
            cycles.append([length * frames[0] / sum(part), cycle.average_ratio(frames[0] / part[-1])])
    return record | {"basis": WORKERS * sum(map(len, bases)), "cycles": cycles, "ring is star": all(agreed)}


def ring_is_star(local: Local) -> bool:
    """Return whether the workers' values on grids in the last step give the same integer sums around a ring."""
    peaks = [answer.frames["peaks"] for answer in local.answers if "peaks" in answer.frames]
    if not peaks:
        return True
    codec, layout = local.system.codec, local.layout  # type: ignore[attr-defined]
    basis = codec.read_basis(local.state["basis"], layout)
    grids = codec.grids([open_steps(frame, len(basis.subspaces)) for frame in peaks])
    fixed = codec.on(basis, grids)
    bundles = [fixed.open(a.frames["values"], layout) for a in local.answers if "values" in a.frames]
    agree = True
    for part, grid in zip(basis.slices.parts, grids, strict=True):
        each = [grid.check(b.tensors[part.index]).codes.astype(np.int64) - grid.levels for b in bundles]
        star = np.sum(each, axis=0)
        agree &= all(np.array_equal(found, star) for found in ring_sum(each, grid.levels).sums)
    return agree


def fits(before: int, seed: int, *, sampled: int, later: int) -> dict[str, Any]:
    """Return the squared error of later mean gradients over their energy, by order, basis and layer; and the error of
    the mean of coefficients over all subsets of workers with random weights.

    The first ``before`` steps are skipped; the next ``sampled`` steps fit the basis.
    """
    at = list(itertools.product(LAYOUTS, KINDS, LAYERS))
    moments: dict[tuple[str, str, str], Moments] = {}
    bases: dict[tuple[str, str, str], SliceBasis] = {}
    sums = {key: np.zeros(2) for key in at}
    apart, fitted_at = 0.0, before + sampled
    for number, workers in gradients(seed, fitted_at + later):
        gradient = mean_of(workers)
        for order, kind, layer in at if number > before else ():
            key, values = (order, kind, layer), gradient[layer].reshape(-1)
            if key not in moments:
                layout = Layout.of({layer: gradient[layer]}, SmallDense(min_size=1))
                fit = BasisFit(kind, loss=SMALL, most=min(MOST, sampled // 2))
                moments[key] = Moments(Slices.of(layout, WIDTH, order), fit, sampled)
            if number <= fitted_at + 1:
                # The step after the window is held out; it has no effect, because the dimension is given.
                moments[key].add(values)
            elif (number - fitted_at) % 10 == 2 or later < 10:
                if key not in bases:
                    bases[key] = moments[key].basis()
                energy = float(np.square(values, dtype=np.float64).sum())
                sums[key] += bases[key].drift(values) * energy, energy
        if number == fitted_at + min(later, 20):
            apart = off_linear(bases["HWFD", "pooled", "conv3"], [w["conv3"].reshape(-1) for w in workers], seed)
    # Over all later steps together: gradients shrink, and a mean of ratios would give most weight to the smallest.
    return {"missed": {"/".join(key): missed / energy for key, (missed, energy) in sums.items()}, "apart": apart}


def off_linear(basis: SliceBasis, vectors: Sequence[Vector], seed: int) -> float:
    """Return the largest relative distance of decoded means of coefficients from projections of means, over all subsets
    of workers, each with its own weights."""
    worst = 0.0
    for size in range(1, len(vectors) + 1):
        for chosen in itertools.combinations(range(len(vectors)), size):
            drawn = Key(seed, "weights", sum(1 << worker for worker in chosen)).generator().uniform(0.1, 1.0, size)
            weights = drawn / drawn.sum()
            pairs = list(zip(weights, (vectors[worker] for worker in chosen), strict=True))
            summed = np.sum([w * basis.project(v).astype(np.float64) for w, v in pairs], axis=0)
            exact = basis.project(np.sum([w * v.astype(np.float64) for w, v in pairs], axis=0).astype(np.float32))
            found, true = basis.reconstruct(summed.astype(np.float32)), basis.reconstruct(exact)
            worst = max(worst, float(np.linalg.norm(found - true) / np.linalg.norm(true)))
    return worst


RATIO: Final = 8.0
"""Numbers of workers for the times of collectives."""

CODING: Final = Coding(RATIO, encode_per_byte=1e-10, decode_per_byte=1e-10)
"""Seconds per byte of a code as fast as a memory of 10 GB/s, the same for all three ways to use it."""

NBYTES: Final = 244e6
"""61 million float32 parameters."""


def times(count: int) -> dict[str, float]:
    """Return by method the simulated seconds of one exchange among ``count`` workers on links of 10 Gbit/s."""
    network = Network(count, latency=50e-6, per_byte=8e-10, add_per_byte=1e-10)
    return {
        "ring": network.ring(NBYTES),
        "summable": network.summable(NBYTES, CODING, segments=8),
        "hop by hop": network.hop_by_hop(NBYTES, CODING),
        "gathered": network.gathered(NBYTES, CODING),
    }


def study(found: Found) -> Studied:
    """Compare orders and bases on later gradients, count bytes of cycles and bases, and simulate collectives."""
    settings, rows = found.config.settings, found.rows
    window = {"sampled": int(settings["sampled"]), "later": int(settings["later"])}
    axes = {"before": [EARLY, LATE], "seed": list(repetitions(found.config))}
    looked = found.sweep(fits, axes, "bases", **window).groups("before")

    def error(layer: str, order: str, kind: str, before: int = LATE) -> float:
        return mean(r.missed[f"{order}/{kind}/{layer}"] for r in looked[before])

    def gain(layer: str, kind: str, before: int) -> float:
        return error(layer, "FDHW", kind, before) / error(layer, "HWFD", kind, before)

    def off(label: str) -> float:
        """Return the largest relative distance of the saving of a whole cycle from the formula."""
        return max((abs(c / f - 1.0) for cycles in found.each(label, "cycles") for c, f in cycles), default=0.0)

    whole = [counted for cycles in found.each(POOLED, "cycles") for counted, _ in cycles]
    at = {count: times(count) for count in (4, 16)}
    by_fit: dict[str, Any] = {
        "layer, axes": ", ".join,
        "the order is": lambda of: LAYOUTS[of[1]],
        **{k.replace("_", "-"): (lambda of, k=k: round(error(of[0], of[1], k), 4)) for k in KINDS},
    }
    by_way: dict[str, Any] = {
        "workers": lambda count: count,
        **{f"{way}, ms": (lambda count, way=way: round(1e3 * at[count][way], 1)) for way in at[4]},
    }
    gained = "torch over depth fastest, missed"
    return Studied(
        {
            ("all subsets of workers", "decoded mean off the projection of the mean, relative"): max(
                r.apart for group in looked.values() for r in group
            ),
            ("conv3, pooled", f"{gained}, late"): gain("conv3", "pooled", LATE),
            ("conv3, pooled", f"{gained}, early"): gain("conv3", "pooled", EARLY),
            ("conv2, shared-first", f"{gained}, late"): gain("conv2", "shared_first", LATE),
            ("conv3, pooled", "missed, depth fastest"): error("conv3", "HWFD", "pooled"),
            ("conv3, pooled", "missed, torch's order"): error("conv3", "FDHW", "pooled"),
            **{(label, "bytes of a cycle off the formula, relative"): off(label) for label in rows},
            (POOLED, "times fewer bytes over a whole cycle, least"): min(whole, default=1.0),
            **{
                (label, "times fewer bytes"): found.mean(label, "dense")
                / (found.mean(label, "uplink") + found.mean(label, "basis"))
                for label in rows
            },
            (GRIDS, "integer sums that differ between ring and star"): found.each(GRIDS, "ring is star").count(False),
            **{
                (f"{count} workers", f"gain by a code that can be added over that {way}"): taken[way]
                / taken["summable"]
                for count, taken in at.items()
                for way in ("hop by hop", "gathered")
            },
        },
        tables=[
            table(
                "Share of later gradients that a basis misses",
                by_fit,
                list(itertools.product(LAYERS, LAYOUTS)),
                f"Letters are axes, the slowest first. Mean gradients of four workers from step {LATE + 1} on, conv2 "
                f"(32, 16, 3, 3) and conv3 (64, 32, 3, 3), slices of {WIDTH}, {MOST} directions, centred; squared "
                "error over energy of all later steps, means over seeds. A random basis misses .875.",
            ),
            table(
                f"One exchange of {NBYTES / 1e6:.0f} MB, simulated, every code {RATIO:g} times shorter",
                by_way,
                at,
                "A ring without compression; a code that can be added, in 8 segments; codes that cannot be added, "
                "decoded and encoded at every hop, or gathered by all workers. 10 Gbit/s, 50 µs a message, .1 ns to "
                "add, encode or decode a byte.",
            ),
        ],
    )
