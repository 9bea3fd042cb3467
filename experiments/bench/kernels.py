"""Selection, error feedback, scatter-add, transforms and a basis against merely reading the vector, and the usual ways.

Times are read passes, see :mod:`experiments.bench.readpass`. The kernels of the other sparsifiers, in
:mod:`experiments.bench.sparsifiers`, and inputs that are hard to rank, in :mod:`experiments.bench.worst`, are part of
the same run.

Packing gates for Rice-coded indices. The default, ``index="auto"``, may try a byte compressor on large supports as
well, which costs as much again and pays on clustered ones; its claim is reported and misses the goal at density 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from fedcomp.codecs import FFT, Auto, PowerSGD, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.lowrank import LEFT, Basis
from fedcomp.codecs.orthonormal import rotate
from fedcomp.codecs.ratecontrol import RateControl, bits_of
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import LAYERS, Vector, in_passes, layered, one_thread, read_pass
from fedcomp.experiments.bench.sparsifiers import sparsifiers
from fedcomp.experiments.bench.worst import worst
from fedcomp.forward.directions import Directions
from fedcomp.kernels import feedback_step, scatter_add, select_topk, warm
from fedcomp.kernels.contexts import Streams
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.measuring import Bound, Case
from fedcomp.rng import Key
from fedcomp.systems.forward import SIGNS_A_SECOND

FULL: Final = 25_000_000
QUICK: Final = 4_000_000
SMALL: Final = 1_000_000
PRIME: Final = 999_983
"""A length for which transforms are slowest."""

RANKED: Final = {0.001: (4.0, 8.0), 0.01: (8.0, 15.0), 0.1: (16.0, 30.0)}
"""By density, read passes of a selection and of an error-feedback step. To bytes a selection may take half as much
again."""

LIMITS: Final = {
    "rotation": 6.0,
    "rotation back": 6.0,
    "FFT, 1 %, layers, to bytes": 150.0,
    "FFT, layers, sum of spectra to update": 150.0,
    "PowerSGD, rank 4, to bytes": 6.0,
    "PowerSGD, rank 4, sum to matrix": 8.0,
}
"""Read passes of methods on the whole vector, signs and selection included."""

MODELLED: Final = {0.1: (30.0, 26.0), 0.5: (52.0, 45.0)}
"""By bits a value, read passes of .27 ns of encoding levels in contexts and of decoding them."""

GOAL: Final = "our goal, set from measurements of these kernels on a quiet machine"
COUNT: Final = 32
FORWARD: Final = "what the strategy counts on when it says what a round costs, on one core"
_WARM_ROUNDS: Final = 6
_TURN: Final = Key(0, "bench kernels")


def cases(quick: bool) -> Iterator[Case]:
    """Yield everything that is timed, one at a time: some hold several vectors of that size."""
    warm()
    vector, repetitions = layered(QUICK if quick else FULL), 5 if quick else 9
    with one_thread():
        for density in RANKED:
            yield ranked(vector, repetitions, density)
        held = vector.copy()
        turns = {"rotation": partial(rotate, held, _TURN), "rotation back": partial(rotate, held, _TURN, inverse=True)}
        yield _limited("rotation", vector, turns, repetitions)
        for make in (low_rank, spectra):
            for name, part, calls in make(vector):
                yield _limited(name, part, calls, repetitions, claimed=part.size > SMALL)
        yield from sparsifiers(vector, repetitions)
        # Of a small model opening streams, not memory, is what an estimate costs.
        for size in (2_410, min(SMALL, vector.size)):
            yield directions(vector[:size], repetitions, claimed=size > 2_410)
        for bits in MODELLED:
            yield modelled(vector, repetitions, bits)
        yield from worst(vector, repetitions)


def _limited(name: str, vector: Vector, calls: Any, repetitions: int, *, claimed: bool = True) -> Case:
    limits = [Bound(f"{m}: read passes", m, f"<= {LIMITS[m]}", GOAL) for m in calls if claimed and m in LIMITS]
    return in_passes(name, vector, calls, repetitions, limits)


def ranked(vector: Vector, repetitions: int, density: float) -> Case:
    """Return top-k and error feedback at one density, beside the usual ways; each call does all of its work."""
    size = vector.size
    k, layout, out, memory = math.ceil(density * size), Layout.flat(size), *np.zeros((2, size), np.float32)
    codec, rice = TopK(density), TopK(density, index="rice")
    feedback = ErrorFeedback(codec)
    # A stream of different updates of one distribution, so that warm thresholds are worth what they are in training.
    updates = [np.roll(vector, shift) for shift in (0, size // 3, size // 2)]
    held: dict[str, Any] = {"round": 0, "threshold": None, "state": feedback.init(layout)}

    def step() -> None:
        held["round"] += 1
        done = feedback_step(memory, updates[held["round"] % 3], k, threshold=held["threshold"], out=memory)
        held["threshold"] = done.threshold

    def feedback_bytes() -> None:
        held["round"] += 1
        update = Update(updates[held["round"] % 3], layout)
        _, held["state"] = feedback.encode(update, held["state"], Key(0, round=held["round"]))

    def by_partition() -> object:
        magnitude = np.abs(vector)
        return np.flatnonzero(magnitude >= np.partition(magnitude, size - k)[size - k])

    indices = select_topk(vector, k)
    values = vector[indices]
    for _ in range(_WARM_ROUNDS):
        step()
        feedback_bytes()
    calls: dict[str, Callable[[], object]] = {
        "read pass": read_pass(vector),
        "top-k": lambda: select_topk(vector, k),
        "top-k, numpy tier": lambda: select_topk(vector, k, tier="numpy"),
        "top-k to bytes, Rice": lambda: rice.encode(Update(vector, layout), {}, Key(0)),
        "top-k to bytes, auto": lambda: codec.encode(Update(vector, layout), {}, Key(0)),
        "error feedback": step,
        "error feedback to bytes": feedback_bytes,
        "scatter-add": lambda: scatter_add(out, indices, values, 0.1),
        "np.partition + flatnonzero": by_partition,
    }
    if not (missing := why_missing("torch")):
        import torch

        tensor = torch.from_numpy(vector)
        calls["torch.topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    at, (select, fed) = f"at density {density:g}", RANKED[density]
    packed = f"<= {1.5 * select}"
    bounds = [
        Bound(f"top-k {at}: time relative to np.partition", "top-k / np.partition + flatnonzero", "<= 1", GOAL),
        Bound(f"top-k {at}: read passes", "top-k", f"<= {select}", GOAL),
        Bound(f"error feedback {at}: read passes", "error feedback", f"<= {fed}", GOAL),
        Bound(f"top-k to bytes, Rice, {at}: read passes", "top-k to bytes, Rice", packed, GOAL),
        # What TopK does by default; the zstd trial costs it the goal at density 0.1. Reported, not gating.
        Bound(f"top-k to bytes, auto, {at}: read passes", "top-k to bytes, auto", packed, GOAL, gate=False),
    ]
    if density <= 0.01:
        faster = f"top-k {at}: times faster than torch.topk"
        bounds.append(Bound(faster, "torch.topk / top-k", ">= 20", GOAL, skipped=missing))
    return in_passes(f"density {density}", vector, calls, repetitions, bounds, density=density)


def modelled(vector: Vector, repetitions: int, bits: float) -> Case:
    """Return levels of a matrix of 1000 columns at so many bits a value, coded in contexts by one thread."""
    rows = vector.size // 1000
    values, streams = vector[: rows * 1000], Streams(((rows, 1000),), threads=1)
    control = RateControl(values, streams.shapes, dithered=False, seed=0)
    levels = control.levels(control.search(int(256 * bits * values.size))[0])
    top = bits_of(levels)
    coded, out, k = streams.encode(levels, top), np.empty_like(levels), math.ceil(bits / 10 * values.size)
    codec, layout = Auto(bits, feedback=True), Layout((TensorSpec("w", (rows, 1000), "float32", 0, values.size),))
    calls: dict[str, Callable[[], object]] = {
        "read pass": read_pass(values),
        "cost": lambda: streams.cost(levels, top),
        "encode": lambda: streams.encode(levels, top),
        "decode": lambda: streams.decode(coded, top, 1 << 60, out),
        "Auto to bytes, with its search": lambda: codec.encode(Update(values, layout), {}, Key(0)),
        "top-k of a tenth as many values": lambda: select_topk(values, k),
    }
    encode, decode = MODELLED[bits]
    at = f"levels in contexts at {bits:g} bits"
    bounds = [
        Bound(f"{at}, encode: read passes", "encode", f"<= {encode}", GOAL, gate=False),
        Bound(f"{at}, decode: read passes", "decode", f"<= {decode}", GOAL, gate=False),
    ]
    return in_passes(f"levels in contexts, {bits:g} bits", values, calls, repetitions, bounds)


Made = Iterator[tuple[str, Vector, dict[str, Callable[[], object]]]]
"""Name, vector and calls of a case."""


def spectra(vector: Vector) -> Made:
    """Yield Fourier transforms of layers, there and back, of 1M values and of all.

    Lengths of layers are products of small primes, as shapes are; one more case has a prime length, the worst there is.
    """
    for size, layers, length in (
        (min(SMALL, vector.size), LAYERS, "layers"),
        (vector.size, LAYERS, "layers"),
        (min(PRIME, vector.size), 1, "a prime length"),
    ):
        each = size // layers if layers == 1 else size // layers // 64 * 64
        part = vector[: each * layers]
        tensors = tuple(TensorSpec(f"layer {i}", (each,), "float32", i * each, each) for i in range(layers))
        layout = Layout(tensors, (), tuple(t.name for t in tensors))
        codec, update, total = FFT(0.01), Update(part, layout), Update(part.copy(), layout)
        yield (
            f"FFT, {layers} x {each:,} values",
            part,
            {
                f"FFT, 1 %, {length}, to bytes": partial(codec.encode, update, {}, _TURN),
                # Of an orthonormal transform any vector is as good as any other, however often it was transformed.
                f"FFT, {length}, sum of spectra to update": partial(codec.conclude, total),
            },
        )


def low_rank(vector: Vector) -> Made:
    """Yield square matrices in a common basis of rank 4, there and back, of 1M values and of all."""
    for side in sorted({math.isqrt(min(SMALL, vector.size)), math.isqrt(vector.size)}):
        size = side * side
        layout, codec = Layout((TensorSpec("matrix", (side, side), "float32", 0, size),), (), ("matrix",)), PowerSGD(4)
        # Of the side whose projection reads the matrix across.
        fixed = codec.on(Basis.of(None, LEFT, codec.ranks, layout, _TURN))
        update, total = Update(vector[:size], layout), Update(np.zeros(size, np.float32), layout)
        fixed.gather(fixed.encode(update, {}, _TURN)[0], 1.0, total)
        # What is concluded is overwritten: the factors are put back each time, and nothing else is read.
        factors = total.vector[: 4 * side].copy()

        def back(fixed: Any = fixed, total: Update = total, factors: Vector = factors) -> None:
            total.vector[: factors.size] = factors
            fixed.conclude(total)

        to_bytes = partial(fixed.encode, update, {}, _TURN)
        calls: dict[str, Callable[[], object]] = {
            "PowerSGD, rank 4, to bytes": to_bytes,
            "PowerSGD, rank 4, sum to matrix": back,
        }
        yield f"PowerSGD, {side} x {side}", update.vector, calls


def directions(vector: Vector, repetitions: int, *, claimed: bool) -> Case:
    """Return directions of signs, drawn and added: what every round of forward gradients costs its server and a client.

    The peer adds the same number of directions of numpy's own signs, as they are usually written.
    """
    size, scalars = vector.size, np.random.default_rng(0).normal(size=(1, COUNT))
    drawn = Directions(Key(0, "bench directions"), [size], COUNT)
    estimate, products = f"estimate of {COUNT} directions", f"products with {COUNT} directions"
    plain = f"{COUNT} directions of numpy's signs, added"

    def add() -> object:
        rng, out = np.random.default_rng(0), np.zeros(size)
        for scalar in scalars[0]:
            out += scalar * (2.0 * rng.integers(0, 2, size, dtype=np.int8) - 1.0)
        return out / COUNT

    calls = {estimate: lambda: drawn.combine(scalars), products: lambda: drawn.project(vector), plain: add}
    rates = [
        Bound(
            f"{name}, {size:,} parameters: signs a second",
            lambda found, name=name: COUNT * size / found.times.median(name),  # type: ignore[misc]
            f">= {SIGNS_A_SECOND}",
            FORWARD,
        )
        for name in (estimate, products)
        if claimed
    ]
    faster = f"{estimate}, {size:,} parameters: times as fast as numpy's"
    bounds = [*rates, Bound(faster, f"{plain} / {estimate}", ">= 1", "goal")]
    return in_passes(f"{COUNT} directions of {size:,} signs", vector, calls, repetitions, bounds)
