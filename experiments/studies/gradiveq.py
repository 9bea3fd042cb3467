"""GradiVeQ: what bases of gradients miss, trainings with cycles of samples and coefficients, and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec, GradiVeQ, get_codec
from fedcomp.codecs.cycle import COMPRESSION, SAMPLING, Cycle
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.codecs.slices import Slices
from fedcomp.codecs.subspace import KINDS, BasisFit, Moments, SliceBasis
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean, spread
from fedcomp.experiments.kit import Records, Sweep, repetitions, table
from fedcomp.experiments.options import numbers
from fedcomp.experiments.tables import TUNING_SEED, Found
from fedcomp.gossip.ring import ring_sum
from fedcomp.layout import Layout, SmallDense, Update, Vector
from fedcomp.rng import Key
from fedcomp.timing.collectives import Coding, Network

if TYPE_CHECKING:
    from fedcomp.experiments.conv_gradients import Gradient

CONVOLUTIONS: Final = ("conv1", "conv2", "conv3")
LAYERS: Final = ("conv2", "conv3")
LAYOUTS: Final = {"FDHW": "as torch stores it", "HWDF": "filters fastest", "HWFD": "depth fastest", "DFHW": "kernels"}
"""By order of axes, the slowest first: what it is."""

WIDTH: Final = 512
MOST: Final = 64
WARM_UP: Final = 50
"""Steps before the first sample of a training, a tenth of it at most."""

EARLY: Final = 50
LATE: Final = 300
"""Steps before the sampled ones, where bases are compared: right after the warm-up, and in a training under way."""

DENSE: Final = "dense"
POOLED: Final = "pooled, 20 + 130"
GRIDS: Final = "pooled, 20 + 130, 4 bits on a shared scale"


@dataclass(frozen=True)
class Sender:
    """A row of the trainings: a fitted basis with the phases of its cycle, or a codec with error feedback."""

    codec: Mapping[str, Any]
    sampling: int = 0
    compression: int = 0


def _fitted(sampling: int, compression: int, **more: Any) -> Sender:
    # So small a loss that the dimension is the published eighth of a slice.
    config = {"id": "gradiveq", "width": WIDTH, "most": MOST, "loss": 1e-6, **more}
    return Sender(config, sampling, compression)


def _feedback(**codec: Any) -> Sender:
    return Sender({"id": "feedback", "codec": codec})


ROWS: Final[Mapping[str, Sender]] = {
    DENSE: Sender({"id": "identity"}),
    POOLED: _fitted(20, 130),
    "pooled, 50 + 100": _fitted(50, 100),
    "pooled, 20 + 130, centred": _fitted(20, 130, center=True),
    "pooled, 20 + 130, torch's order": _fitted(20, 130, order="FDHW"),
    "shared-first, 50 + 100": _fitted(50, 100, basis="shared_first", most=40),
    GRIDS: _fitted(20, 130, levels=7),
    "pooled, 20 + 130, 5 % loss": _fitted(20, 130, loss=0.05, most=None),
    "8 bits, a scale for every 256, + EF": _feedback(id="topk", density=1.0, values="q8", scope="layer"),
    "top-k 10 %, q8, + EF": _feedback(id="topk", density=0.1, values="q8", scope="layer"),
    "low rank 4, + EF": _feedback(id="low-rank", rank=4, min_rate=1.0),
}
"""What the workers send of their convolutions, by label, in order."""

RIVALS: Final = ("8 bits, a scale for every 256, + EF", "top-k 10 %, q8, + EF", "low rank 4, + EF")

OFF: Final = "bytes of a cycle off the formula, relative"


def vector_of(gradient: Gradient, layout: Layout) -> Vector:
    """Return a gradient's convolutions as a vector."""
    return layout.flatten({name: gradient[name] for name in CONVOLUTIONS})


def layout_of(gradient: Gradient) -> Layout:
    """Return the layout of the convolutions, all of which may be compressed."""
    return Layout.of({name: gradient[name] for name in CONVOLUTIONS}, SmallDense(min_size=1))


class Aggregation:
    """What the workers of one training send, by real frames, and what arrives of their mean.

    Attributes
    ----------
    uplink : int
        Bytes of all frames so far.
    basis_bytes : int
        Bytes of bases, once for each worker.
    sent : list of int
        Bytes of a worker's frame, by step.
    """

    def __init__(self, row: Sender, layout: Layout, count: int, seed: int, warm_up: int) -> None:
        self.codec: Codec = get_codec(dict(row.codec))
        self.layout, self.count, self.seed = layout, count, seed
        self.uplink = self.basis_bytes = 0
        self.sent: list[int] = []
        self.grids_agree = True
        self._states = [self.codec.init(layout) for _ in range(count)]
        self._basis = SliceBasis.nothing(layout)
        self._cycle = Cycle(warm_up, row.sampling, row.compression) if row.sampling else None
        self._moments = self._empty()

    def cycles(self) -> list[tuple[float, float]]:
        """Return of each whole cycle how many times fewer bytes it took than dense frames, as counted and as the
        formula has it that knows a dense frame and a short one."""
        if self._cycle is None:
            return []
        length, dense = self._cycle.sampling + self._cycle.compression, self.sent[0]
        starts = range(self._cycle.warm_up, len(self.sent) - length + 1, length)
        parts = [self.sent[start : start + length] for start in starts]
        return [(length * dense / sum(part), self._cycle.average_ratio(dense / part[-1])) for part in parts]

    def _empty(self) -> Moments | None:
        if self._cycle is None or not isinstance(self.codec, GradiVeQ):
            return None
        sampling = self._cycle.sampling
        return Moments(self.codec.slices(self.layout), self.codec.fit, sampling - max(1, sampling // 5))

    def step(self, number: int, vectors: Sequence[Vector]) -> Vector:
        """Let every worker send its vector; return the mean that arrives."""
        keys = [Key(self.seed, "uplink", number, worker) for worker in range(self.count)]
        updates = [Update(vector, self.layout) for vector in vectors]
        if isinstance(self.codec, GradiVeQ):
            codec, frames = self._project(self.codec, updates, keys)
        else:
            codec, made = self.codec, zip(updates, self._states, keys, strict=True)
            sent = [codec.encode(update, state, key) for update, state, key in made]
            frames, self._states = [frame for frame, _ in sent], [state for _, state in sent]
        total = Update(np.zeros(self.layout.size, np.float32), self.layout)
        for frame in frames:
            codec.gather(frame, 1.0 / self.count, total)
        codec.conclude(total)
        self.sent.append(len(frames[0]))
        self.uplink += sum(map(len, frames))
        self._advance(total.vector)
        return total.vector

    def _project(self, codec: GradiVeQ, updates: list[Update], keys: list[Key]) -> tuple[Codec, list[bytes]]:
        pairs = zip(updates, self._states, keys, strict=True)
        waiting = [codec.begin(update, state, key) for update, state, key in pairs]
        grids: tuple[IntegerGrid, ...] = ()
        if codec.rounds(self._basis):
            peaks = [codec.peaks(state, self._basis, self.layout) for state in waiting]
            grids = codec.grids(peaks)
            # Peaks go up and steps come down, four bytes for each part.
            self.uplink += 4 * sum(map(len, peaks))
        each = zip(waiting, keys, strict=True)
        sent = [codec.send(state, self._basis, self.layout, key, grids) for state, key in each]
        self._states = [state for _, state in sent]
        fixed, frames = codec.on(self._basis, grids), [frame for frame, _ in sent]
        for part, grid in enumerate(grids):
            index = self._basis.slices.parts[part].index
            bundles = [fixed.open(frame, self.layout) for frame in frames]
            integers = [grid.check(bundle.tensors[index]).codes.astype(np.int64) - grid.levels for bundle in bundles]
            star = np.sum(integers, axis=0)
            self.grids_agree &= all(np.array_equal(found, star) for found in ring_sum(integers, grid.levels).sums)
        return fixed, frames

    def _advance(self, arrived: Vector) -> None:
        cycle, moments = self._cycle, self._moments
        if cycle is None or moments is None:
            return
        phase = cycle.phase
        if phase == SAMPLING:
            moments.add(arrived)
        cycle.advance()
        if cycle.phase != COMPRESSION:
            self._basis = SliceBasis.nothing(self.layout)
        elif phase != COMPRESSION:
            self._basis, self._moments = moments.basis(), self._empty()
            self.basis_bytes += self.count * len(self._basis.frame())


def train(label: str, rate: float, seed: int, *, steps: int, tuning: bool = False) -> dict[str, Any]:
    """Train a row and return its accuracy, last losses and bytes; on the validation split if ``tuning``."""
    from fedcomp.experiments.conv_gradients import WORKERS, Training, mean_of

    row, held_out = ROWS[label], "validation" if tuning else "test"
    training = Training(seed + tuning * TUNING_SEED, rate=rate, held_out=held_out)
    exchange, dense = None, 0
    for number in range(1, steps + 1):
        gradients = training.workers()
        arrived = mean_of(gradients)
        if exchange is None:
            layout = layout_of(arrived)
            # The first updates resemble none of the later ones.
            exchange = Aggregation(row, layout, WORKERS, seed, min(WARM_UP, steps // 10))
        found = exchange.step(number, [vector_of(gradient, exchange.layout) for gradient in gradients])
        training.move({**arrived, **exchange.layout.unflatten(found)})
        dense += WORKERS * 4 * exchange.layout.size
    assert exchange is not None
    accuracy = training.accuracy()
    short, whole = min(exchange.sent), exchange.cycles()
    return {
        "accuracy": 100.0 * accuracy,
        "loss": mean(training.losses[-50:]),
        "uplink": exchange.uplink,
        "basis": exchange.basis_bytes,
        "dense": dense,
        "first": exchange.sent[0],
        "short": short,
        "compressed": sum(nbytes == short for nbytes in exchange.sent),
        "steps": steps,
        "cycles": [list(pair) for pair in whole],
        "ring is star": exchange.grids_agree,
    }


def fits(before: int, seed: int, *, sampled: int, later: int) -> dict[str, Any]:
    """Return the squared error of later mean gradients over their energy, by order, basis and layer; and how far the
    mean of coefficients is off, over all subsets of workers with random weights.

    The ``before`` first steps are passed over, then ``sampled`` are fitted to.
    """
    from fedcomp.experiments.conv_gradients import Training, mean_of

    training = Training(seed)
    moments: dict[tuple[str, str, str], Moments] = {}
    missed: dict[str, list[tuple[float, float]]] = {}
    bases: dict[tuple[str, str, str], SliceBasis] = {}
    apart = 0.0
    for number in range(1, before + sampled + later + 1):
        gradients = training.workers()
        gradient = mean_of(gradients)
        training.move(gradient)
        if number <= before:
            continue
        for order, kind, layer in itertools.product(LAYOUTS, KINDS, LAYERS):
            at, values = (order, kind, layer), gradient[layer].reshape(-1)
            if at not in moments:
                layout = Layout.of({layer: gradient[layer]}, SmallDense(min_size=1))
                fit = BasisFit(kind, loss=1e-6, most=min(MOST, sampled // 2))
                moments[at] = Moments(Slices.of(layout, WIDTH, order), fit, sampled)
            if number <= before + sampled + 1:
                # The one after the window is held out; the dimension is given, so that it decides nothing.
                moments[at].add(values)
            elif (number - before - sampled) % 10 == 2 or later < 10:
                if at not in bases:
                    bases[at] = moments[at].basis()
                energy = float(np.square(values, dtype=np.float64).sum())
                missed.setdefault("/".join(at), []).append((bases[at].drift(values) * energy, energy))
        if number == before + sampled + min(later, 20):
            basis = bases["HWFD", "pooled", "conv3"]
            apart = off_linear(basis, [each["conv3"].reshape(-1) for each in gradients], seed)
    # Over all later steps together: gradients shrink, and a mean of ratios would look at the smallest most.
    shares = {name: sum(m for m, _ in pairs) / sum(e for _, e in pairs) for name, pairs in missed.items()}
    return {"missed": shares, "apart": apart}


def off_linear(basis: SliceBasis, vectors: Sequence[NDArray[np.float32]], seed: int) -> float:
    """Return how far decoded means of coefficients are from projections of means, relative, at most over all subsets of
    workers, each with weights of its own."""
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
"""At which the times of collectives are compared."""

CODING: Final = Coding(RATIO, encode_per_byte=1e-10, decode_per_byte=1e-10)
"""A code as fast as a memory of 10 GB/s, the same for all three ways to use it."""

NBYTES: Final = 244e6
"""61 million float32 parameters."""


def times(count: int) -> dict[str, float]:
    """Return the simulated seconds of one exchange among ``count`` workers on links of 10 Gbit/s, by way."""
    network = Network(count, latency=50e-6, per_byte=8e-10, add_per_byte=1e-10)
    return {
        "ring": network.ring(NBYTES),
        "server": network.central(NBYTES),
        "summable": network.summable(NBYTES, CODING, segments=8),
        "hop by hop": network.hop_by_hop(NBYTES, CODING),
        "gathered": network.gathered(NBYTES, CODING),
    }


def study(found: Found) -> Studied:
    """Compare orders and bases on later gradients, and trainings with tuned step sizes; simulate collectives."""
    config, say = found.config, found.say
    settings = config.settings
    processes, seeds = int(settings["workers"]), list(repetitions(config))
    window = {"sampled": int(settings["sampled"]), "later": int(settings["later"])}
    looked = Sweep(fits, {"before": [EARLY, LATE], "seed": seeds}, "bases", window)(say, processes).groups("before")
    rates = numbers(str(settings["rates"]))
    shared = {"steps": int(settings["steps"])}
    axes: dict[str, Sequence[Any]] = {"label": list(ROWS), "rate": rates, "seed": [config.seed]}
    tried = Sweep(train, axes, "tuning", {**shared, "tuning": True})(say, processes)
    # Of equal accuracies, which a few hundred images often give, the one with the smaller loss.
    best = {label: max(g, key=lambda r: (r.accuracy, -r.loss)).rate for label, g in tried.groups("label").items()}
    cells = [{"label": label, "rate": best[label], "seed": seed} for label in ROWS for seed in seeds]
    groups: dict[str, Records] = Sweep(train, cells, shared=shared)(say, processes).groups("label")

    def error(layer: str, order: str, kind: str, before: int = LATE) -> float:
        return mean(r.missed[f"{order}/{kind}/{layer}"] for r in looked[before])

    def gain(layer: str, kind: str, before: int) -> float:
        return error(layer, "FDHW", kind, before) / error(layer, "HWFD", kind, before)

    def accuracy(label: str) -> float:
        return mean(groups[label].each("accuracy"))

    def ratio(label: str, *, basis: bool = True) -> float:
        group = groups[label]
        sent = mean(group.each("uplink")) + (mean(group.each("basis")) if basis else 0.0)
        return mean(group.each("dense")) / sent

    def formula(label: str) -> float:
        """Return the largest relative distance of a whole cycle's saving from the formula's."""
        return max((abs(c / f - 1.0) for r in groups[label] for c, f in r.cycles), default=0.0)

    fitted = [label for label, row in ROWS.items() if row.sampling]
    whole = [counted for r in groups[POOLED] for counted, _ in r.cycles]
    by_fit: dict[str, Any] = {
        "layer, axes": lambda at: f"{at[1]}, {at[2]}, from step {at[0] + 1}",
        "the order is": lambda at: LAYOUTS[at[2]],
        **{k.replace("_", "-"): (lambda at, k=k: round(error(at[1], at[2], k, at[0]), 4)) for k in KINDS},
    }
    by_row: dict[str, Any] = {
        "row": str,
        "step size": lambda label: best[label],
        "test, %": lambda label: round(accuracy(label), 1),
        "±": lambda label: round(spread(groups[label].each("accuracy")), 1),
        "training loss": lambda label: round(mean(groups[label].each("loss")), 4),
        "bytes of a frame, least": lambda label: round(mean(groups[label].each("short"))),
        "times fewer": lambda label: round(ratio(label, basis=False), 2),
        "with the basis": lambda label: round(ratio(label), 2),
    }
    at = {count: times(count) for count in (4, 16)}
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
            **{(label, OFF): formula(label) for label in fitted},
            (POOLED, "times fewer bytes over a whole cycle, least"): min(whole, default=1.0),
            **{(label, "times fewer bytes"): ratio(label) for label in ROWS},
            **{(label, "test, %"): accuracy(label) for label in ROWS},
            **{(label, "points of accuracy lost"): accuracy(DENSE) - accuracy(label) for label in ROWS},
            **{(POOLED, f"points of accuracy below {r}"): accuracy(r) - accuracy(POOLED) for r in RIVALS},
            (GRIDS, "integer sums that differ between ring and star"): sum(
                not r["ring is star"] for r in groups[GRIDS]
            ),
            **{
                (f"{count} workers", f"gain by a code that can be added over that {way}"): (
                    at[count][way] / at[count]["summable"]
                )
                for count in at
                for way in ("hop by hop", "gathered")
            },
        },
        tables=[
            table(
                "Share of later gradients that a basis misses",
                by_fit,
                list(itertools.product((EARLY, LATE), LAYERS, LAYOUTS)),
                "Letters: axes, the slowest first. Mean gradients of four workers, conv2 (32, 16, 3, 3) and conv3 "
                f"(64, 32, 3, 3), slices of {WIDTH}, {MOST} directions, centred; squared error over energy of all "
                "later steps, means over seeds. A random basis misses .875.",
            ),
            table(
                "Training",
                by_row,
                ROWS,
                "Means over seeds, ± half the range. Phases: steps sampled + steps compressed, after a warm-up of a "
                f"tenth of the training, {WARM_UP} steps at most. Bytes of whole frames, of convolutions alone; the "
                "rest of the model travels as it is in every row and is not counted. The basis counts once for each "
                "worker. The step size is the one of the grid that did best on a validation split.",
            ),
            table(
                f"One exchange of {NBYTES / 1e6:.0f} MB, simulated, every code {RATIO:g} times shorter",
                by_way,
                list(at),
                "Ring and server without compression; a code that can be added, in 8 segments; codes that cannot, "
                "decoded and encoded at every hop, or gathered by everybody. 10 Gbit/s, 50 µs a message, .1 ns to "
                "add, encode or decode a byte.",
            ),
        ],
    )
