"""The systems that the contract holds for, one entry each: an instance, and what it declares of itself.

Updates are integers, so that sums of them are exact in float32 and nothing can be lost in a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from datalens_toy import PIXELS, ToyEnsemble, ToyStudent, ToyTeachers
from graph_toys import toy_parts
from numpy.typing import NDArray
from toys import Passing

from fedcomp.asks import Frames
from fedcomp.codecs import (
    DGC,
    EDEN,
    FFT,
    LGC,
    QSGD,
    Auto,
    ErrorFeedback,
    Factors,
    FixedPoint,
    GradiVeQ,
    Identity,
    PowerSGD,
    RandomK,
    ScaleCom,
    ScaledSign,
    TopK,
    chain,
)
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import Upload
from fedcomp.factors.outer import OuterProducts
from fedcomp.gossip.choco import CHOCO
from fedcomp.gossip.topology import Ring
from fedcomp.graphs.base import GraphPart
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.layout import Layout, Update, Vector
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.local import Privatise
from fedcomp.program import Me, System
from fedcomp.rng import Key
from fedcomp.systems.coded.gradients import GradientCode, Part
from fedcomp.systems.coded.linear import CodedLinear, LinearRows
from fedcomp.systems.coded.relay import CodedRelay
from fedcomp.systems.coded.sums import CodedSum
from fedcomp.systems.conditional import ConditionalRounds
from fedcomp.systems.factors import FactorSharing
from fedcomp.systems.forward import Forward
from fedcomp.systems.gossip import Gossip, Learnt
from fedcomp.systems.gradiveq import FittedBasis
from fedcomp.systems.graphs.kept import NodeValues
from fedcomp.systems.graphs.owner import Steps
from fedcomp.systems.graphs.system import Graphs
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.pair import Pair
from fedcomp.systems.power_sgd import SharedBasis
from fedcomp.systems.private.datalens import Teachers
from fedcomp.systems.private.distributed import NoisySum
from fedcomp.systems.private.local import Local
from fedcomp.systems.private.lsg import LowRank
from fedcomp.systems.private.record import Account, DpSgdPlan, Records
from fedcomp.systems.shared_support import SharedSupport

NODES: Final = 5

Updates = Callable[[int, int], NDArray[np.float64]]
"""What a node makes in a round, by their numbers."""

Reference = Callable[[Updates, int, Layout], NDArray[np.float64]]
"""``reference(updates, rounds, layout)``: the model after so many rounds from zero of all nodes, node n with weight
n + 1; in float64, written without the product."""


@dataclass(frozen=True)
class Entry:
    """One system, and what it declares.

    Attributes
    ----------
    system : System
    law : float, optional
        How far delivered plus residual may be from what was made, as a share of the sum of all magnitudes: 0 where
        integers stay integers; None where the system remembers nothing, or what it remembers is no such sum.
    reference : callable, optional
        See :data:`Reference`.
    exchanges : int
        In a round.
    shapes : mapping of str to tuple
        Of the model's tensors.
    frozen : float, optional
        How far a value that no update changes may move: 0 where it stays as it is to the bit; None where it takes part
        in what is rounded at random.
    outer : int
        Of how many outer products each update is the sum, and is known to be; 0 where it is known as a vector.
    data : object, optional
        What the app brings beside training, or in its place (:attr:`fedcomp.program.Me.data`). Of a function the first
        argument is a client; of a mapping each node has its own.
    weighs : bool
        Whether the weights that the driver knows count. Else what the app brings says them.
    early : bool
        Whether a round is over before all have answered.
    least : int
        Clients of which a round can be made.
    posts : bool
        Whether updates travel by way of other clients.
    secret : bool
        Whether what clients say and send holds numbers drawn of the operating system.
    another : bool
        Whether another entry stands for it in the tests of every day, or it is too dear for these.
    brought : object, optional
        What the server's app brings (:attr:`fedcomp.program.Now.data`).
    sums : bool
        Whether its steps are sums of what clients send, by their weights.
    """

    system: System
    law: float | None = None
    reference: Reference | None = None
    exchanges: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"weight": (40, 30), "bias": (12,)})
    frozen: float | None = 0.0
    outer: int = 0
    data: Any = None
    weighs: bool = True
    early: bool = False
    least: int = 1
    posts: bool = False
    secret: bool = False
    another: bool = False
    brought: Any = None
    sums: bool = True

    def arrays(self, dtype: str = "float32") -> dict[str, NDArray[Any]]:
        """Return a model of zeros."""
        return {name: np.zeros(shape, dtype) for name, shape in self.shapes.items()}

    def made(self, number: int, node: int, layout: Layout) -> Update:
        """Return what a node makes in a round."""
        if not self.outer:
            return Update(update(number, node, layout.size), layout)
        vector, outer = np.zeros(layout.size, np.float32), {}
        for t in layout.tensors:
            left, right = (
                (update(number, node + NODES * side, self.outer * t.shape[side]) // 100).reshape(self.outer, -1)
                for side in (0, 1)
            )
            vector[t.slice] = (left.T @ right).reshape(-1)
            outer[t.name] = OuterProducts(left, right)
        return Update(vector, layout, outer)


def update(number: int, node: int, size: int) -> Vector:
    """Return integers in [-1000, 1000], a pure function of the arguments."""
    words = Key(7, "updates", number, node).bits(size)
    return ((words % np.uint64(2001)).astype(np.int64) - 1000).astype(np.float32)


def mean(parts: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean in which node n has weight n + 1."""
    return sum((n + 1) * part for n, part in parts.items()) / sum(n + 1 for n in parts)


def plain_averaging(updates: Updates, rounds: int, layout: Layout) -> NDArray[np.float64]:
    """Return what the mean of whole models comes to."""
    return sum(mean({n: updates(t, n) for n in range(NODES)}) for t in range(1, rounds + 1))


def largest(vector: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return where the largest magnitudes are, of equal ones the first."""
    return np.lexsort((np.arange(vector.size), -np.abs(vector)))[:count]


def feedback(compress: Callable[..., NDArray[np.float64]], momentum: float = 0.0) -> Reference:
    """Return the reference of error feedback: what ``compress(memory + update, layout)`` leaves out is remembered."""

    def run(updates: Updates, rounds: int, layout: Layout) -> NDArray[np.float64]:
        model, memory, speed = np.zeros(layout.size), np.zeros((NODES, layout.size)), np.zeros((NODES, layout.size))
        for t in range(1, rounds + 1):
            sent = {}
            for n in range(NODES):
                speed[n] = momentum * speed[n] + updates(t, n)
                memory[n] += speed[n]
                sent[n] = compress(memory[n], layout)
                memory[n] -= sent[n]
                # Factor masking, of those that were chosen.
                chosen = np.flatnonzero(sent[n][: layout.compressed_size])
                speed[n, chosen] = 0.0
            model += mean(sent)
        return model

    return run


def top(density: float) -> Callable[..., NDArray[np.float64]]:
    """Return the selection of the largest; small tensors travel whole."""

    def compress(vector: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        sent, part = np.zeros_like(vector), layout.compressed_size
        sent[part:] = vector[part:]
        chosen = largest(vector[:part], round(density * part))
        sent[chosen] = vector[chosen]
        return sent

    return compress


def signs(vector: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
    """Return the mean magnitude with every value's sign; small tensors travel whole."""
    part = layout.compressed_size
    scale = np.abs(vector[:part]).mean()
    return np.concatenate([np.where(vector[:part] < 0, -scale, scale), vector[part:]])


def led(density: float) -> Reference:
    """Return the reference of a shared support: in round t node t - 1 chooses by its memory, all send on its choice."""

    def run(updates: Updates, rounds: int, layout: Layout) -> NDArray[np.float64]:
        model, memory, part = np.zeros(layout.size), np.zeros((NODES, layout.size)), layout.compressed_size
        for t in range(1, rounds + 1):
            memory += [updates(t, n) for n in range(NODES)]
            leader = (t - 1) % NODES
            chosen = [*largest(memory[leader, :part], round(density * part)), *range(part, layout.size)]
            model[chosen] += mean({n: memory[n, chosen] for n in range(NODES)})
            memory[:, chosen] = 0.0
        return model

    return run


def slopes(me: Me, directions: Iterable[Vector]) -> NDArray[np.float64]:
    """Return the slopes of a loss that falls along what the node would have made."""
    made = update(me.number, me.node, me.layout.size).astype(np.float64)
    return np.array([-made @ direction for direction in directions])


def partition(me: Me, which: int) -> Part:
    """Return what training on a partition comes to: what its node would have made, with that one's weight."""
    before = me.layout.unflatten(me.start)
    after = me.layout.unflatten(me.start + update(me.number, which, me.layout.size))
    return Part(before, after, "metrics", {"num-examples": which + 1})


class Rows:
    """What the owners of data bring."""

    def rows(self, me: Me, partitions: int) -> LinearRows:
        m = 6 + me.node % 3
        x = update(1, me.node, 4 * m).reshape(m, 4).astype(np.float64) / 1000
        return LinearRows(x, (x.sum(1) > 0).astype(np.float64), "logistic")


def descended(updates: Updates, rounds: int, layout: Layout) -> NDArray[np.float64]:
    """Return gradient descent on the rows of the first three nodes together."""
    owned = [Rows().rows(Me(n, 1, 0, layout, _none, _none), 3) for n in range(3)]
    x = np.concatenate([np.c_[each.x, np.ones(len(each.x))] for each in owned])
    y, w = np.concatenate([each.y for each in owned]), np.zeros(5)
    for _ in range(rounds):
        w -= 500.0 * x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(y)
    return w


def _none(*args: Any) -> Any:
    raise AssertionError("nobody trains")


class Unsettled:
    """A node that has something to send in every round."""

    settings = ScheduleSettings()

    def loss(self, me: Me, update: Update | None = None) -> float:
        return 2.0**-me.number

    def windows(self) -> dict[int, Upload]:
        return {}

    def forget(self, numbers: Iterable[int]) -> None:
        assert not [*numbers]

    def absorb(self, windows: Sequence[Upload]) -> None:
        raise AssertionError("no windows came")

    def deploy(self, me: Me) -> None:
        assert me.start.shape == (me.layout.size,)


class Owning:
    """An owner of a part, whose steps say nothing of what it learns: they have to have all their rows."""

    def __init__(self, part: GraphPart) -> None:
        self.part = part
        self.seen: Sequence[NodeValues] = ()

    def load(self, steps: Steps) -> None:
        had = np.concatenate([self.part.ids, *(ids for ids, _ in steps.rows)])
        for plan in steps.plans:
            assert np.isin(plan.inputs, had).all()
        inputs = [NodeValues(layer.columns, np.ones(len(layer.columns))) for layer in steps.plans[-1].layers[1:]]
        self.seen = inputs if steps.measures else ()


def owning(structure: str = "full") -> dict[int, Owning]:
    """Return the owners of a small graph, by node."""
    return {part.index: Owning(part) for part in toy_parts(30, NODES, structure=structure)}


ROWS: Final = RowSettings(codec="dense-f64")


def noised(me: Me, plan: DpSgdPlan, learn: Callable[[], Update]) -> tuple[Update, Account, Frames]:
    """Train on records that need no noise, and pay for it from what the node keeps."""
    total = int(me.kept.get("spent", b"0")) + plan.steps
    return learn(), Account(f"ledger {me.node}", plan.steps, total), {"spent": b"%d" % total}


def teaching(me: Me, asked: Teachers) -> tuple[ToyEnsemble, Mapping[str, NDArray[Any]]]:
    """Return a node's teachers, and the generator's arrays."""
    arrays = me.layout.unflatten(me.start) if asked.send == "generator" else {}
    return ToyEnsemble(ToyTeachers(me.node, asked.teachers), ToyStudent()), arrays


PLAN: Final = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)


class Pulled:
    """A node's part of a decentralised run: it begins at the model it is sent, and is drawn to a point of its own."""

    learns = True

    def start(self, me: Me, dtype: str) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        return me.start.copy(), {}

    def learn(self, me: Me, z: NDArray[Any], own: Mapping[str, NDArray[Any]], key: Key) -> Learnt:
        return Learnt(z - update(0, me.node, z.size))

    def evaluate(self, me: Me, z: NDArray[Any], own: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        return {"size": float(z.size)}


ROUNDED: Final = 1e-6
"""Of float32, with room for a few hundred operations."""

INTEGERS: Final = ErrorFeedback(FixedPoint(RandomK(1.0), clip=4096.0, levels=4096))
"""Sends integers as they are."""

BOUNDED: Final = BoundedFixedPoint(
    RandomK(1.0), clip=1e5, levels=20_000, scale=10_000, sigma=2.0, least=3, insecure_deterministic=True
)
"""Sends integers of a bounded norm, to which noise is added."""

ENTRIES: Final[Mapping[str, Entry]] = {
    "pair-identity": Entry(Pair(Identity()), reference=plain_averaging, frozen=ROUNDED),
    "pair-topk": Entry(Pair(ErrorFeedback(TopK(0.05))), law=0.0, reference=feedback(top(0.05))),
    "pair-layers": Entry(Pair(ErrorFeedback(TopK(0.1, scope="layer", index="bitmap"))), law=0.0, another=True),
    "pair-momentum": Entry(
        Pair(ErrorFeedback(TopK(0.05), momentum=0.9)), reference=feedback(top(0.05), 0.9), another=True
    ),
    "pair-few-bits": Entry(Pair(ErrorFeedback(TopK(0.05, values="q2"))), law=ROUNDED, another=True),
    "pair-signs": Entry(
        Pair(ErrorFeedback(ScaledSign())), law=ROUNDED, reference=feedback(signs), frozen=None, another=True
    ),
    "pair-randomk": Entry(Pair(ErrorFeedback(RandomK(0.1))), law=0.0, another=True),
    "pair-own-randomk": Entry(Pair(RandomK(0.1, unbiased=True, shared=False)), another=True),
    "pair-qsgd": Entry(Pair(QSGD(levels=127)), another=True),
    "pair-fft": Entry(Pair(FFT(density=0.05)), frozen=None),
    "pair-eden": Entry(Pair(EDEN(bits=1)), frozen=None, another=True),
    "pair-auto": Entry(Pair(Auto(bits=1.0)), frozen=None),
    "pair-auto-part": Entry(Pair(Auto(bits=0.3)), frozen=None, another=True),
    "pair-auto-feedback": Entry(Pair(ErrorFeedback(Auto(bits=0.5, feedback=True))), law=ROUNDED),
    "coded-relay": Entry(
        CodedRelay(inner=Pair(ErrorFeedback(TopK(0.05))), code="mds", symbols=2),
        law=0.0,
        reference=feedback(top(0.05)),
        exchanges=2,
        least=2,
        posts=True,
    ),
    "coded-relay-rlnc": Entry(
        CodedRelay(inner=Pair(Identity()), symbols=2),
        reference=plain_averaging,
        exchanges=2,
        frozen=ROUNDED,
        least=2,
        posts=True,
        another=True,
    ),
    "coded-relay-secret": Entry(
        CodedRelay(inner=Pair(ErrorFeedback(TopK(0.05))), code="mds", symbols=1, threshold=1),
        law=0.0,
        reference=feedback(top(0.05)),
        exchanges=2,
        least=2,
        posts=True,
        secret=True,
        another=True,
    ),
    "coded-sum": Entry(
        CodedSum(codec=INTEGERS, symbols=2, threshold=1, weight="num-examples"),
        law=ROUNDED,
        reference=plain_averaging,
        exchanges=3,
        least=3,
        posts=True,
        secret=True,
    ),
    "coded-sum-mask": Entry(
        CodedSum(codec=INTEGERS, symbols=1, threshold=1, weight="num-examples", mode="mask", shards=4),
        law=ROUNDED,
        reference=plain_averaging,
        exchanges=3,
        least=4,
        posts=True,
        secret=True,
        another=True,
    ),
    "noisy-sum": Entry(
        NoisySum(codec=BOUNDED, symbols=2, threshold=1, min_contributors=3, contributors=NODES),
        exchanges=3,
        frozen=None,
        weighs=False,
        least=3,
        posts=True,
        secret=True,
        another=True,
    ),
    "shared-support": Entry(SharedSupport(ScaleCom(0.05)), law=0.0, reference=led(0.05), exchanges=2),
    "shared-support-filtered": Entry(
        SharedSupport(ScaleCom(0.05, beta=0.5, selector="chunk"), warmup_rounds=1, server_lr=0.5),
        exchanges=2,
        another=True,
    ),
    "shared-support-dense": Entry(
        SharedSupport(ScaleCom(0.05), warmup_rounds=9), reference=plain_averaging, exchanges=2, another=True
    ),
    "power-sgd-dense": Entry(SharedBasis(PowerSGD(2), warmup_rounds=9), reference=plain_averaging, another=True),
    "power-sgd": Entry(SharedBasis(PowerSGD(rank=2), warmup_rounds=1), law=ROUNDED, frozen=None, another=True),
    "power-sgd-two": Entry(SharedBasis(PowerSGD(rank=2, form="two-exchange")), law=ROUNDED, exchanges=2, frozen=None),
    "power-sgd-aggregated": Entry(SharedBasis(PowerSGD(rank=2, memory="aggregated")), frozen=None, another=True),
    "gradiveq": Entry(
        FittedBasis(GradiVeQ(width=47, loss=0.3, memory=True), sampling=3, compression=3),
        law=ROUNDED,
        frozen=None,
        another=True,
    ),
    "gradiveq-levels": Entry(
        FittedBasis(GradiVeQ(width=47, loss=0.3, memory=True, levels=15), sampling=3, compression=3),
        law=ROUNDED,
        exchanges=2,
        frozen=None,
    ),
    "low-rank": Entry(LowRank(clip=1e9, rank=3, keep=0.5, mask="noisy_magnitude", history=2), frozen=None),
    "low-rank-none": Entry(LowRank(clip=1e9, rank=0, keep=0.5, mask="noisy_magnitude"), frozen=ROUNDED, another=True),
    "lgc-ring": Entry(LearnedGradients(LGC(0.05, raw=0), 1, 1), exchanges=2, another=True),
    "lgc-server": Entry(
        LearnedGradients(LGC(0.05, instance="server", ef="decoded", raw=0, innovation=0.005), 1, 1),
        law=ROUNDED,
        exchanges=2,
        another=True,
    ),
    "graphs": Entry(
        Graphs(ErrorFeedback(TopK(0.05)), rows=ROWS),
        law=0.0,
        reference=feedback(top(0.05)),
        exchanges=4,
        data=owning(),
    ),
    "graphs-measured": Entry(
        Graphs(
            ErrorFeedback(TopK(0.05)),
            SamplerSettings(n=12, mode="measured"),
            RowSettings(codec="dense-f64", cache="lru", cache_bytes=400),
            RoundSettings(local_steps=2, batch_size=4),
            structure="halo",
        ),
        law=0.0,
        reference=feedback(top(0.05)),
        exchanges=8,
        data=owning("halo"),
        another=True,
    ),
    "conditional": Entry(
        ConditionalRounds(ErrorFeedback(TopK(0.05))),
        law=0.0,
        reference=feedback(top(0.05)),
        exchanges=2,
        data=Unsettled(),
    ),
    "conditional-given": Entry(
        ConditionalRounds(ErrorFeedback(TopK(0.05)), query=False),
        law=0.0,
        reference=feedback(top(0.05)),
        data=Unsettled(),
        another=True,
    ),
    "forward": Entry(Forward(directions=4), shapes={"weight": (40, 30)}, data=slopes, frozen=None),
    "factors": Entry(
        FactorSharing(Factors(mode="dad", i_know_inputs_are_visible=True), down=True),
        reference=plain_averaging,
        shapes={"weight": (40, 30)},
        outer=3,
        frozen=None,
    ),
    "factors-by-layer": Entry(
        FactorSharing(ErrorFeedback(Factors(rank=4)), by_layer=True),
        law=ROUNDED,
        exchanges=2,
        shapes={"one.weight": (30, 20), "two.weight": (20, 30)},
        frozen=None,
    ),
    "record-dp": Entry(Records(PLAN, ErrorFeedback(TopK(0.05))), law=0.0, reference=feedback(top(0.05)), data=noised),
    "record-dp-whole": Entry(Records(PLAN), reference=plain_averaging, frozen=ROUNDED, data=noised, another=True),
    "datalens": Entry(
        Teachers(k=4, images=3, stochastic=True, eta=0.01),
        shapes={"row": (PIXELS,)},
        frozen=None,
        data=teaching,
        brought=ToyStudent(),
        sums=False,
    ),
    "datalens-images": Entry(
        Teachers(k=4, images=3, teachers=2, send="images"),
        shapes={"row": (PIXELS,)},
        frozen=None,
        data=teaching,
        brought=ToyStudent(),
        sums=False,
        another=True,
    ),
    "local-dp": Entry(
        Local(chain(Privatise(1e5, 1e-6, insecure_deterministic=True), ErrorFeedback(TopK(0.05)))), frozen=None
    ),
    "gradient-code": Entry(
        GradientCode(losses=2, scheme="cyclic", arithmetic="gf31", limit=8192.0),
        reference=plain_averaging,
        data=partition,
        frozen=None,
        weighs=False,
        early=True,
        least=3,
    ),
    "coded-linear": Entry(
        CodedLinear(partitions=3, parities=2, code="mds", lr=500.0),
        reference=descended,
        exchanges=5,
        shapes={"weight": (1, 4), "bias": (1,)},
        data=Rows(),
        weighs=False,
        early=True,
        least=3,
        sums=False,
    ),
    "coded-linear-direct": Entry(
        CodedLinear(partitions=3, parities=2, code="mds", lr=500.0, direct=True),
        reference=descended,
        exchanges=5,
        shapes={"weight": (1, 4), "bias": (1,)},
        data=Rows(),
        weighs=False,
        early=True,
        least=3,
        sums=False,
    ),
    "pair-dgc": Entry(Pair(DGC(density=0.05, warmup=2)), another=True),
    "passing": Entry(Passing(ErrorFeedback(TopK(0.05))), law=0.0, reference=feedback(top(0.05)), exchanges=2),
    "gossip": Entry(
        Gossip(CHOCO(lr=0.1, gamma=0.3), Ring(NODES), patience=99, observe_every=1),
        exchanges=2,
        frozen=None,
        data=Pulled(),
        sums=False,
    ),
}
