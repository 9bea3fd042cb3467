"""Whole systems under audit: low-rank updates, DataLens, steps of DP-SGD, and messages that are private themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import RandomK
from fedcomp.experiments.audits import cases
from fedcomp.experiments.audits.rounds import ClientReply, RoundReading, Rounds, mean
from fedcomp.experiments.audits.subjects import (
    DELTA,
    POPULATION,
    Data,
    Floats,
    Subject,
    Worlds,
    changed,
    new_ledger,
    numbered,
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
from fedcomp.tasks.teachers import by_hash, wrapping_deal

RANK: Final = 2


# Low-rank updates.


class Steady(Lsg):
    """Lsg whose carriers and mask are the same in every run, while its noise is not; shows the noisy sum."""

    trial: int = 0
    seen: Floats

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Return noise that repeats by trial."""
        # By trial and not by the strategy's seed, which fixes carriers and mask: only the noise may change from run to
        # run.
        return make_entropy(Key(self.trial, f"privacy/{purpose}", server_round), insecure_deterministic=True)

    def released(self, noisy: Floats, layout: Layout, server_round: int) -> Any:
        """Keep what the update is made from."""
        # The model alone would not do: what is made of the noisy sum is a product of it with the carriers.
        self.seen = noisy.copy()
        return super().released(noisy, layout, server_round)


def lsg(*, kind: type[Steady] = Steady, keep: float = 0.75) -> Rounds:
    """Return low-rank masked updates: the noisy sum of the kept coordinates, on dense replies of half the clients."""

    def make(given: float | None, seed: int) -> PrivateStrategy:
        strategy = kind(mean(), LowRank(clip=cases.CLIP, rank=RANK, keep=keep), **cases.promise(given, 0))
        strategy.trial = seed
        return strategy

    # Integer buffers have no carriers.
    floats = {name: array for name, array in cases.MODEL.items() if array.dtype.kind == "f"}
    short = LowRankPlan.of({name: array.shape for name, array in floats.items()}, RANK).short
    # A zero model has carriers from the seed alone; every coordinate of the update is seen by some of them.
    rows = [ClientReply(update) for update in cases.updates(cases.NODES, cases.WIDTH, length=50.0 * cases.CLIP)]
    tried = [ClientReply(one) for one in cases.canaries()]
    # The canary is long (50 clip norms): clipping, and nothing else, keeps it down.
    worlds = cases.worlds("zero_out", list(enumerate(rows[:-1])), cases.NODES - 1, tried, rows[-1], None)
    # Before the noisy sum is multiplied out: there its grid and its deviation are those that were claimed.
    reading = RoundReading(lambda strategy, step: strategy.seen, width=round(keep * short))
    return Rounds(f"low rank, {keep:g} kept", make, worlds, cases.MODEL, cases.NODES, reading, messages=True)


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
    """A generator that always makes the same images: the sum of votes on them is what is audited."""

    def images(self, arrays: Any, key: Key, count: int) -> NDArray[np.float32]:
        return np.zeros((count, PIXELS), np.float32)

    def start(self) -> dict[str, NDArray[Any]]:
        return {}

    def step(self, arrays: Any, moments: Any, key: Key, targets: NDArray[np.float32]) -> tuple[Any, Any]:
        return arrays, moments


class _Shown(DataLens):
    def mechanism(self, layout: Layout, server_round: int = 1) -> Votes:
        # The constructor asks for a mechanism before anything else is there.
        self.seen: list[Floats] = self.__dict__.get("seen", [])
        return changed(super().mechanism(layout, server_round), _Watched, seen=self.seen)


class TeacherVotes(Subject):
    """DataLens: clients' packed votes through the rounds of the strategy; what is read is the noisy sum.

    Parameters
    ----------
    teachers : int
        Of each client.
    worlds : Worlds
        Participants are partitions, contributions the votes of all their teachers, int8 (teachers, images, pixels).
    """

    def __init__(self, teachers: int, worlds: Worlds) -> None:
        self.teachers = teachers
        name = f"DataLens, {teachers} teacher{'s' * (teachers > 1)} a client"
        parts = {f"image {row}": slice(row * PIXELS, (row + 1) * PIXELS) for row in range(IMAGES)}
        mechanism = self.start(True, 0, 0).mechanism(Layout.flat(IMAGES * PIXELS))
        super().__init__(name, "replace", worlds, mechanism, parts, IMAGES * PIXELS)

    def start(self, noisy: bool, seed: int, trial: int) -> _Shown:
        return _Shown(
            lambda config: _Drawn(),
            VoteSettings(k=VOTES, images=IMAGES),
            TeacherSettings(teachers=self.teachers),
            noise_multiplier=float(noisy),
            population=POPULATION,
            delta=DELTA,
            clients=CLIENTS,
            insecure_deterministic=True,
            seed=numbered(seed, trial),
        )

    def nodes(self, data: Data) -> AbstractContextManager[InProcessGrid]:
        return InProcessGrid(_voters(data), CLIENTS)

    def play(self, run: _Shown, nodes: InProcessGrid, data: Data, number: int) -> Floats:
        asked = run.configure_train(number, to_record({"w": np.zeros(1, np.float32)}), ConfigRecord(), nodes)
        run.aggregate_train(number, nodes.send_and_receive(asked))
        return run.seen[-1].ravel()


def _voters(data: Data) -> Callable[[Message, Context], Message]:
    """Return an app whose nodes answer with the votes of their partition."""
    frames = {partition: encode_rows(votes.reshape(-1, PIXELS)) for partition, votes in data}

    def answer(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        content, head = RecordDict(), asks.find_ask(message.content)
        assert head is not None
        asks.put(content, AnswerHead(partition, head.sequence, bare=True), None, {f"{FRAME}values": frames[partition]})
        return Message(content, reply_to=message)

    return answer


def teacher_votes(place: int, teachers: int) -> NDArray[np.int8]:
    """Return the votes of a client's teachers on every image."""
    # One seed for each teacher and image, so that no two rows of votes are alike by accident.
    rows = [cases.vote(1000 * place + row, PIXELS, VOTES) for row in range(teachers * IMAGES)]
    return np.stack(rows).reshape(teachers, IMAGES, PIXELS)


def holders(deal: Callable[[NDArray[np.int64], int], list[NDArray[np.int64]]]) -> int:
    """Return how many teachers the record with the most teachers has.

    Parameters
    ----------
    deal : callable
        From the classes of records and a number of teachers to the records of each teacher.
    """
    # Classes of unequal size, as MNIST's are.
    labels = np.repeat(np.arange(4), (12, 16, 10, 14))
    dealt = deal(labels, 4)
    return int(np.bincount(np.concatenate(dealt), minlength=labels.size).max())


def dealt_by_hash(labels: NDArray[np.int64], teachers: int) -> list[NDArray[np.int64]]:
    """Return the records of each teacher, by a keyed hash of their ids."""
    owner = by_hash(range(labels.size), teachers, Key(0, "audit owners"))
    return [np.flatnonzero(owner == teacher) for teacher in range(teachers)]


def dealt_with_a_wrap(labels: NDArray[np.int64], teachers: int) -> list[NDArray[np.int64]]:
    """Return the records of each teacher as DataLens' published code deals them."""
    return list(wrapping_deal(labels, teachers, labels.size // teachers))


def datalens(teachers: int = 1, *, changed_teachers: int = 1) -> TeacherVotes:
    """Return DataLens in the two worlds that one exchanged record parts: so many teachers vote the other way."""
    base = [(place, teacher_votes(place, teachers)) for place in range(CLIENTS - 1)]
    mine = teacher_votes(CLIENTS - 1, teachers)
    other, some = mine.copy(), mine.copy()
    # All signs turned on one support: what an exchanged record may do at most to the votes of the teacher that holds
    # it.
    other[:changed_teachers] *= -1
    # A milder neighbour for the search: another support on one image of one teacher.
    some[0, 0] = cases.vote(7, PIXELS, VOTES)
    absent, present, third = ([*base, (CLIENTS - 1, votes)] for votes in (mine, other, some))
    return TeacherVotes(teachers, Worlds(absent, present, [(absent, third)]))


# Steps of DP-SGD.

MakeOptimizer = Callable[..., PrivateOptimizer]


class Steps(Subject):
    """Steps of DP-SGD on gradients made by hand: what is read is the noisy sum that a step divides.

    Parameters
    ----------
    name : str
    make : callable
        From an optimiser and the arguments that every private optimiser has to the one under audit.
    width : int
        Coordinates of a gradient.
    worlds : Worlds
        Records and their gradients, float32 (width,).
    """

    def __init__(self, name: str, make: MakeOptimizer, width: int, worlds: Worlds) -> None:
        self.make, self.width = make, width
        mechanism = self.start(True, 0, 0).optimizer.mechanism()
        super().__init__(name, "add_remove", worlds, mechanism, {"gradient": slice(None)}, width)

    def start(self, noisy: bool, seed: int, trial: int) -> Any:
        return self.optimizer(float(noisy), seeded(Key(numbered(seed, trial), "audit steps")))

    def optimizer(self, z: float, entropy: Entropy) -> Any:
        """Return an optimiser with this noise, its parameter and its ledger."""
        weights = torch.nn.Parameter(torch.zeros(self.width))
        ledger = new_ledger("add_remove")
        optimizer = self.make(
            # A step of length 0: the sum is read from the gradient, and the model stays what it was.
            torch.optim.SGD([weights], lr=0.0),
            ledger,
            StepSettings(
                # Every record in every batch: sampling would hide the canary, and the audit is of the sum.
                noise_multiplier=z,
                rate=1.0,
                max_grad_norm=cases.CLIP,
                entropy=entropy,
                key=Key(0, "audit steps"),
            ),
            expected_batch_size=8.0,
        )
        return SimpleNamespace(optimizer=optimizer, weights=weights, privacy=ledger)

    def play(self, run: Any, nodes: Any, data: Data, number: int) -> Floats:
        optimizer, weights = run.optimizer, run.weights
        rows = np.stack([np.asarray(gradient, np.float32) for _, gradient in data])
        optimizer.zero_grad()
        # A copy: the optimiser clips in place, and the worlds are used again.
        weights.grad_sample = torch.from_numpy(rows.copy())
        if not optimizer.pre_step() or weights.grad is None:
            raise AssertionError(f"{self.name}: the step released nothing")
        # The step divides the sum by the expected batch.
        return weights.grad.double().numpy().ravel() * optimizer.batch


def dp_sgd(name: str = "DP-SGD", kind: MakeOptimizer = PrivateOptimizer, canary: Any = None, **options: Any) -> Steps:
    """Return DP-SGD, or another optimiser with its options, on few records."""
    width = cases.WIDTH
    # Longer than the clip norm, so that other records are clipped as well.
    base = list(enumerate(cases.updates(3, width, length=1.5 * cases.CLIP)))
    tried = [*([] if canary is None else [canary]), *cases.canaries(width)]
    # The coins of votes are dealt in the order of the records: this one is dealt its own after all others.
    return Steps(name, partial(kind, **options), width, cases.worlds("add_remove", base, 9, tried, tried[0], None))


def topagg_sgd(*, stochastic: bool = True) -> Steps:
    """Return DP-SGD on votes."""
    name = f"DP-SGD on votes{'' if stochastic else ', plain signs'}"
    # Dense: the usual canaries are nearly all zero, and a vote abstains where there is nothing.
    canary = cases.updates(4, cases.WIDTH, length=1.0)[3]
    return dp_sgd(name, TopAggOptimizer, canary, k=8, stochastic=stochastic)


def masked_sgd() -> Steps:
    """Return DP-SGD with a mask that keeps everything it is asked about: the clip comes after it."""
    return dp_sgd("DP-SGD, masked", MaskedOptimizer, keep=1.0)


# Messages that are private themselves.


class PrivateMessages(Subject):
    """One client's messages under local privacy: any two of its data sets are neighbours."""

    def __init__(self) -> None:
        found = cases.canaries()
        self.mechanism = self._transform(1.0).mechanism(cases.WIDTH)
        # One client and no other: under local privacy its message has to hide it alone.
        worlds = cases.worlds("replace", [], 0, found, found[0], found[1])
        super().__init__(
            "local privacy, a message", "replace", worlds, self.mechanism, {"message": slice(None)}, cases.WIDTH
        )

    @staticmethod
    def _transform(z: float) -> Privatise:
        return Privatise(clip=cases.CLIP, noise_multiplier=z, insecure_deterministic=True)

    def start(self, noisy: bool, seed: int, trial: int) -> Any:
        transform, key = self._transform(float(noisy)), Key(numbered(seed, trial), "audit message")
        state = transform.init(Layout.flat(cases.WIDTH))
        return SimpleNamespace(transform=transform, state=state, key=key, privacy=new_ledger("replace"))

    def play(self, run: Any, nodes: Any, data: Data, number: int) -> Floats:
        # The transform writes no ledger: who accounts for local noise is the server, an event for every message.
        run.privacy.record(self.mechanism.event(size=cases.WIDTH), round=number)
        update = Update(data[0][1], Layout.flat(cases.WIDTH))
        sent, run.state = run.transform.apply(update, run.state, run.key.at(round=number - 1))
        return np.asarray(sent.vector, np.float64)


class NoiseShares(Subject):
    """Distributed noise: every client rounds under a bound and adds its share, as many vanish as may.

    A client of the world without the canary sends zeros and its share of the noise: what is hidden is its update.
    """

    clients: int = 6
    tolerated: int = 2

    def __init__(self, noise: str = "discrete_gaussian") -> None:
        self.mechanism = DistributedSum(
            noise_multiplier=1.0,
            noise=noise,
            clip=cases.CLIP,
            size=cases.WIDTH,
            contributors=self.clients,
            tolerated=self.tolerated,
        )
        self.codec = BoundedFixedPoint.of(self.mechanism, RandomK(1.0), insecure_deterministic=True)
        last = self.clients - self.tolerated - 1
        base = list(enumerate(cases.updates(last + 1, cases.WIDTH, length=1.5 * cases.CLIP)[:-1]))
        still, tried = np.zeros(cases.WIDTH, np.float32), cases.canaries()
        absent = [*base, (last, still)]
        worlds = Worlds(absent, [*base, (last, tried[0])], [(absent, [*base, (last, one)]) for one in tried])
        name = f"distributed, {noise.replace('_', ' ')}"
        super().__init__(name, "zero_out", worlds, self.mechanism, {"sum": slice(None)}, cases.WIDTH)

    def nodes(self, data: Data) -> AbstractContextManager[Any]:
        """Return the clients' updates as integers: rounding is the same in every run."""
        rounded = [self.codec.bounded(update, Key(0, "audit rounding", partition=place)) for place, update in data]
        return nullcontext(rounded)

    def start(self, noisy: bool, seed: int, trial: int) -> Any:
        key = Key(numbered(seed, trial), "audit share") if noisy else None
        return SimpleNamespace(key=key, privacy=new_ledger("zero_out"))

    def play(self, run: Any, nodes: Any, data: Data, number: int) -> Floats:
        key = run.key
        # An event for every sum, as the strategy records them.
        run.privacy.record(self.mechanism.event(size=cases.WIDTH), round=number)
        shares = (key.at(round=number - 1, partition=place) if key else None for place in range(len(nodes)))
        parts = [self.codec.noised(one, seeded(own)) if own else one for one, own in zip(nodes, shares, strict=True)]
        return np.asarray(np.sum(parts, axis=0) * self.mechanism.step, np.float64)


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    "low rank, 0.75 kept": lsg,
    "low rank, all kept": lambda: lsg(keep=1.0),
    "DataLens": lambda: datalens(1),
    "DataLens, 2 teachers a client": lambda: datalens(2),
    "DP-SGD": dp_sgd,
    "DP-SGD on votes": topagg_sgd,
    "DP-SGD on votes, plain signs": lambda: topagg_sgd(stochastic=False),
    "DP-SGD, masked": masked_sgd,
    "local privacy, a message": PrivateMessages,
    "distributed noise": NoiseShares,
    "distributed noise, Skellam": lambda: NoiseShares("skellam"),
}
"""Makers of the subjects at noise multiplier 1."""
