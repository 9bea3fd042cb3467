"""Whole systems under audit: low-rank updates, DataLens, DP-SGD steps, and locally private messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import RandomK
from fedcomp.experiments.audits import cases
from fedcomp.experiments.audits.subjects import (
    DELTA,
    POPULATION,
    ClientReply,
    Data,
    Floats,
    Subject,
    Worlds,
    changed,
    mean,
    new_ledger,
    numbered,
    rounds,
    seeded,
)
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME
from fedcomp.flower.records import to_record
from fedcomp.layout import Layout, Update
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.lsg import LowRankPlan
from fedcomp.privacy.mechanism import Votes
from fedcomp.privacy.optimizers import MaskedOptimizer, PrivateOptimizer, StepSettings, TopAggOptimizer
from fedcomp.privacy.votes import encode_rows
from fedcomp.rng import Key
from fedcomp.strategies.private.datalens import DataLens
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.settings import TeacherSettings, VoteSettings
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.private.lsg import LowRank

CLIP, WIDTH = cases.CLIP, cases.WIDTH
FLAT: Final = Layout.flat(WIDTH)
RANK: Final = 2


class Steady(Lsg):
    """Lsg with the same carriers and mask in every run but different noise; it exposes the noisy sum."""

    trial: int = 0
    seen: Floats

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Return noise that repeats by trial."""
        # By trial, because the strategy's seed fixes carriers and mask and only the noise may change between runs.
        return make_entropy(Key(self.trial, f"privacy/{purpose}", server_round), insecure_deterministic=True)

    def released(self, noisy: Floats, layout: Layout, server_round: int) -> Any:
        """Keep the noisy sum from which the update is made."""
        # The model is not enough, because it only shows products of the noisy sum with the carriers.
        self.seen = noisy.copy()
        return super().released(noisy, layout, server_round)


def lsg(*, kind: type[Steady] = Steady, keep: float = 0.75) -> Subject:
    """Return low-rank masked updates: the noisy sum of the kept coordinates, on dense replies of half the clients."""

    def make(given: float | None, seed: int) -> PrivateStrategy:
        strategy = kind(mean(), LowRank(clip=CLIP, rank=RANK, keep=keep), **cases.promise(given, 0))
        strategy.trial = seed
        return strategy

    # Integer buffers have no carriers.
    shapes = {name: array.shape for name, array in cases.MODEL.items() if array.dtype.kind == "f"}
    # For a zero model the carriers depend only on the seed, and every coordinate of the update is in some of them.
    rows = [ClientReply(update) for update in cases.updates(cases.NODES, length=50.0 * CLIP)]
    tried = [ClientReply(one) for one in cases.canaries()]
    # The canary is long (50 clip norms), and only clipping bounds it.
    worlds = cases.worlds("zero_out", list(enumerate(rows[:-1])), cases.NODES - 1, tried, rows[-1], None)
    return rounds(
        f"low rank, {keep:g} kept",
        make,
        worlds,
        cases.MODEL,
        cases.NODES,
        messages=True,
        # Before the noisy sum is multiplied by carriers, since its grid and deviation are claimed there.
        sum_of=lambda strategy, step: strategy.seen,
        width=round(keep * LowRankPlan.of(shapes, RANK).short),
    )


# DataLens.

IMAGES: Final = 3
PIXELS: Final = 40
VOTES: Final = 6
CLIENTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class _Watched(Votes):
    seen: list[Floats]

    def perturb(self, total: NDArray[np.int64], entropy: Entropy) -> Floats:
        self.seen.append(super().perturb(total, entropy))
        return self.seen[-1]


class _Drawn:
    """A generator that always makes the same images; the audit is of the sum of votes on them."""

    def images(self, arrays: Any, key: Key, count: int) -> NDArray[np.float32]:
        return np.zeros((count, PIXELS), np.float32)

    def start(self) -> dict[str, NDArray[Any]]:
        return {}

    def step(self, arrays: Any, moments: Any, key: Key, targets: NDArray[np.float32]) -> tuple[Any, Any]:
        return arrays, moments


class _Shown(DataLens):
    def mechanism(self, layout: Layout, server_round: int = 1) -> Votes:
        # The constructor needs a mechanism before anything else exists.
        self.seen: list[Floats] = self.__dict__.get("seen", [])
        return changed(super().mechanism(layout, server_round), _Watched, seen=self.seen)


def teacher_votes(place: int, teachers: int) -> NDArray[np.int8]:
    """Return the votes of a client's teachers on every image."""
    # One seed for each teacher and image, so no two rows of votes are equal by accident.
    rows = [cases.vote(1000 * place + row, PIXELS, VOTES) for row in range(teachers * IMAGES)]
    return np.stack(rows).reshape(teachers, IMAGES, PIXELS)


def datalens(teachers: int = 1, *, changed_teachers: int = 1) -> Subject:
    """Return DataLens in two worlds that differ by one exchanged record: this number of teachers votes the other way.

    Clients' packed votes go through the rounds of the strategy, and the output is the noisy sum. Participants are
    partitions; contributions are the votes of all their teachers, int8 (teachers, images, pixels).
    """

    def start(noisy: bool, seed: int, trial: int) -> _Shown:
        return _Shown(
            lambda config: _Drawn(),
            VoteSettings(k=VOTES, images=IMAGES),
            TeacherSettings(teachers=teachers),
            noise_multiplier=float(noisy),
            population=POPULATION,
            delta=DELTA,
            clients=CLIENTS,
            insecure_deterministic=True,
            seed=numbered(seed, trial),
        )

    def nodes(data: Data) -> AbstractContextManager[InProcessGrid]:
        frames = {partition: encode_rows(votes.reshape(-1, PIXELS)) for partition, votes in data}

        def answer(message: Message, context: Context) -> Message:
            partition = int(context.node_config["partition-id"])
            content, head = RecordDict(), asks.find_ask(message.content)
            assert head is not None
            votes = {f"{FRAME}values": frames[partition]}
            asks.put(content, AnswerHead(partition, head.sequence, bare=True), None, votes)
            return Message(content, reply_to=message)

        return InProcessGrid(answer, CLIENTS)

    def play(run: _Shown, grid: InProcessGrid, data: Data, number: int) -> Floats:
        asked = run.configure_train(number, to_record({"w": np.zeros(1, np.float32)}), ConfigRecord(), grid)
        run.aggregate_train(number, grid.send_and_receive(asked))
        return run.seen[-1].ravel()

    base = [(place, teacher_votes(place, teachers)) for place in range(CLIENTS - 1)]
    mine = teacher_votes(CLIENTS - 1, teachers)
    other, some = mine.copy(), mine.copy()
    # All signs flipped on one support: the largest change that an exchanged record can make to its teacher's votes.
    other[:changed_teachers] *= -1
    # A smaller change for the search: another support on one image of one teacher.
    some[0, 0] = cases.vote(7, PIXELS, VOTES)
    absent, present, third = ([*base, (CLIENTS - 1, votes)] for votes in (mine, other, some))
    size = IMAGES * PIXELS
    return Subject(
        f"DataLens, {teachers} teacher{'s' * (teachers > 1)} a client",
        Worlds(absent, present, [(absent, third)]),
        start(True, 0, 0).mechanism(Layout.flat(size)),
        {f"image {row}": slice(row * PIXELS, (row + 1) * PIXELS) for row in range(IMAGES)},
        size,
        start,
        play,
        nodes,
    )


def optimizer_of(make: Callable[..., PrivateOptimizer], z: float, entropy: Entropy, **options: Any) -> Any:
    """Return an optimiser of DP-SGD with this noise, its parameter and its ledger."""
    weights, ledger = torch.nn.Parameter(torch.zeros(WIDTH)), new_ledger("add_remove")
    # Every record is in every batch, because sampling would hide the canary and the audit is of the sum.
    key = Key(0, "audit steps")
    settings = StepSettings(noise_multiplier=z, rate=1.0, max_grad_norm=CLIP, entropy=entropy, key=key)
    # A step of length 0: the sum is read from the gradient, and the model stays the same.
    optimizer = make(torch.optim.SGD([weights], lr=0.0), ledger, settings, expected_batch_size=8.0, **options)
    return SimpleNamespace(optimizer=optimizer, weights=weights, privacy=ledger)


def dp_sgd(
    name: str = "DP-SGD",
    kind: Callable[..., PrivateOptimizer] = PrivateOptimizer,
    canary: Any = None,
    **options: Any,
) -> Subject:
    """Return DP-SGD, or another optimiser with its options, on a few synthetic gradients, float32 (width,). The output
    is the noisy sum that a step divides."""

    def start(noisy: bool, seed: int, trial: int) -> Any:
        return optimizer_of(kind, float(noisy), seeded(Key(numbered(seed, trial), "audit steps")), **options)

    def play(run: Any, nodes: Any, data: Data, number: int) -> Floats:
        run.optimizer.zero_grad()
        # Stacked as a copy, because the optimiser clips in place and the worlds are used again.
        run.weights.grad_sample = torch.from_numpy(np.stack([np.asarray(row, np.float32) for _, row in data]))
        if not run.optimizer.pre_step() or run.weights.grad is None:
            raise AssertionError(f"{name}: the step released nothing")
        # The step divides the sum by the expected batch.
        found: Floats = run.weights.grad.double().numpy().ravel() * run.optimizer.batch
        return found

    tried = [*([] if canary is None else [canary]), *cases.canaries()]
    # Random draws of votes follow the order of the records, so the draws of this one come after all others.
    worlds = cases.worlds("add_remove", list(enumerate(cases.updates(3))), 9, tried, tried[0], None)
    mechanism = start(True, 0, 0).optimizer.mechanism()
    return Subject(name, worlds, mechanism, {"gradient": slice(None)}, WIDTH, start, play)


def topagg_sgd(*, stochastic: bool = True) -> Subject:
    """Return DP-SGD on votes."""
    name = f"DP-SGD on votes{'' if stochastic else ', plain signs'}"
    # Dense, because the usual canaries are nearly all zero and a vote abstains at zero.
    return dp_sgd(name, TopAggOptimizer, cases.updates(4, length=1.0)[3], k=8, stochastic=stochastic)


def message() -> Subject:
    """Return one client's messages under local privacy, where any two of its data sets are neighbours."""

    def transform(z: float) -> Privatise:
        return Privatise(clip=CLIP, noise_multiplier=z, insecure_deterministic=True)

    def start(noisy: bool, seed: int, trial: int) -> Any:
        made, key = transform(float(noisy)), Key(numbered(seed, trial), "audit message")
        return SimpleNamespace(transform=made, state=made.init(FLAT), key=key, privacy=new_ledger("replace"))

    def play(run: Any, nodes: Any, data: Data, number: int) -> Floats:
        # The transform writes no ledger: the server accounts for local noise, with an event for every message.
        run.privacy.record(mechanism.event(size=WIDTH), round=number)
        sent, run.state = run.transform.apply(Update(data[0][1], FLAT), run.state, run.key.at(round=number - 1))
        return np.asarray(sent.vector, np.float64)

    found, mechanism = cases.canaries(), transform(1.0).mechanism(WIDTH)
    # A single client, because under local privacy its message alone must protect it.
    worlds = cases.worlds("replace", [], 0, found, found[0], found[1])
    return Subject("local privacy, a message", worlds, mechanism, {"message": slice(None)}, WIDTH, start, play)


def noise_shares(noise: str = "discrete_gaussian") -> Subject:
    """Return distributed noise: every client rounds under a bound and adds its share, and the allowed number of clients
    vanishes.

    In the world without the canary the client sends zeros and its share of the noise; its update is protected.
    """
    clients, tolerated = 6, 2
    mechanism = DistributedSum(
        noise_multiplier=1.0, noise=noise, clip=CLIP, size=WIDTH, contributors=clients, tolerated=tolerated
    )
    codec = BoundedFixedPoint.of(mechanism, RandomK(1.0), insecure_deterministic=True)

    def nodes(data: Data) -> AbstractContextManager[Any]:
        # The clients' updates as integers, so rounding is the same in every run.
        rounded = [codec.bounded(update, Key(0, "audit rounding", partition=place)) for place, update in data]
        return nullcontext(rounded)

    def start(noisy: bool, seed: int, trial: int) -> Any:
        key = Key(numbered(seed, trial), "audit share") if noisy else None
        return SimpleNamespace(key=key, privacy=new_ledger("zero_out"))

    def play(run: Any, rounded: Any, data: Data, number: int) -> Floats:
        # An event for every sum, as the strategy records them.
        run.privacy.record(mechanism.event(size=WIDTH), round=number)
        parts = [
            codec.noised(one, seeded(run.key.at(round=number - 1, partition=place))) if run.key else one
            for place, one in enumerate(rounded)
        ]
        return np.asarray(np.sum(parts, axis=0) * mechanism.step, np.float64)

    last = clients - tolerated - 1
    base = list(enumerate(cases.updates(last + 1)[:-1]))
    absent, *present = ([*base, (last, one)] for one in (np.zeros(WIDTH, np.float32), *cases.canaries()))
    worlds = Worlds(absent, present[0], [(absent, one) for one in present])
    name = f"distributed, {noise.replace('_', ' ')}"
    return Subject(name, worlds, mechanism, {"sum": slice(None)}, WIDTH, start, play, nodes)


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    "low rank, 0.75 kept": lsg,
    "low rank, all kept": lambda: lsg(keep=1.0),
    "DataLens": datalens,
    "DataLens, 2 teachers a client": lambda: datalens(2),
    "DP-SGD": dp_sgd,
    "DP-SGD on votes": topagg_sgd,
    "DP-SGD on votes, plain signs": lambda: topagg_sgd(stochastic=False),
    # A mask that keeps all coordinates; the clip comes after it.
    "DP-SGD, masked": lambda: dp_sgd("DP-SGD, masked", MaskedOptimizer, keep=1.0),
    "local privacy, a message": message,
    "distributed noise": noise_shares,
    "distributed noise, Skellam": lambda: noise_shares("skellam"),
}
"""Functions that make the subjects at noise multiplier 1."""
