"""Whole systems under audit: low-rank updates, DataLens, steps of DP-SGD, and messages that are private themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import RandomK
from fedcomp.experiments.audits import cases
from fedcomp.experiments.audits.mutants import NoClip, PrivateSupport
from fedcomp.experiments.audits.rounds import Answer, Rounds
from fedcomp.experiments.audits.subjects import DELTA, POPULATION, Data, Floats, Subject, new_ledger
from fedcomp.flower import datalens
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.payload import put_frame, put_node
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import Push
from fedcomp.layout import Layout, Update
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.bounds import clip_arrays
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import Entropy, SeededEntropy, make_entropy
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.lsg import LowRankPlan
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.privacy.optimizers import MaskedOptimizer, PrivateOptimizer, StepSettings, TopAggOptimizer
from fedcomp.privacy.votes import encode_rows
from fedcomp.rng import Key
from fedcomp.strategies.private.datalens import DataLens
from fedcomp.strategies.private.lsg import KeptIntake, Lsg
from fedcomp.strategies.private.settings import LsgSettings, TeacherSettings, VoteSettings
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.strategies.replies import Arrival
from fedcomp.tasks.teachers import by_hash, wrapping_deal

RANK: Final = 2


# Low-rank updates.


class Steady(Lsg):
    """Lsg whose carriers and mask are the same in every run, while its noise is not; shows the noisy sum."""

    trial: int = 0
    seen: Floats

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Return noise that repeats by trial."""
        return make_entropy(Key(self.trial, f"privacy/{purpose}", server_round), insecure_deterministic=True)

    def released(self, noisy: Floats, layout: Layout, server_round: int) -> Any:
        """Keep what the update is made from."""
        self.seen = noisy.copy()
        return super().released(noisy, layout, server_round)


class TwoClips(KeptIntake):
    """Shortens replies as ever and clips the left products and all the rest each by itself."""

    def update(self, arrival: Arrival) -> Any:
        """Return the kept coordinates, in two parts of norm C at most."""
        loose = {entry.name: getattr(self, entry.name) for entry in fields(self)} | {"clip": 1e6 * self.clip}
        out = np.array(KeptIntake(**loose).update(arrival))
        left = np.zeros(self.plan.short, np.bool_)
        for piece in self.plan.factored:
            left[piece.at : piece.at + piece.matrix[0] * piece.rank] = True
        for part in (left[self.kept], ~left[self.kept]):
            out[part] = clip_arrays([out[part]], self.clip)[0][0]
        return out


class SeparateClips(Steady):
    """Clips the products with the left and with the right carriers each to C: together they have up to sqrt(2) C."""

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return a mechanism that trusts the clips before it."""
        right = super().mechanism(layout, server_round)
        return NoClip(**{name: getattr(right, name) for name in right.__dataclass_fields__})

    def _intake(self, server_round: int, layout: Layout) -> TwoClips:
        return TwoClips(**vars(super()._intake(server_round, layout)))

    def contribution(self, update: Any, layout: Layout, server_round: int) -> Any:
        """Trust it."""
        return update


class PrivateSupportOfLsg(Steady):
    """Keeps the largest coordinates of the exact sum, with noise on those alone."""

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return a mechanism whose support is chosen by the exact sum."""
        right = super().mechanism(layout, server_round)
        return PrivateSupport(**{name: getattr(right, name) for name in right.__dataclass_fields__})


def lsg(*, kind: type[Steady] = Steady, keep: float = 0.75) -> Rounds:
    """Return low-rank masked updates: the noisy sum of the kept coordinates, on dense replies of half the clients."""

    def make(given: float | None, seed: int) -> PrivateStrategy:
        strategy = kind(mean_, LsgSettings(clip=cases.CLIP, rank=RANK, keep=keep), **cases.promise(given, 0))
        strategy.trial = seed
        return strategy

    mean_ = cases.mean()
    floats = {name: array for name, array in cases.MODEL.items() if array.dtype.kind == "f"}
    short = LowRankPlan.of({name: array.shape for name, array in floats.items()}, RANK).short
    # A zero model has carriers from the seed alone; every coordinate of the update is seen by some of them.
    rows = [Answer(update) for update in cases.updates(cases.NODES, cases.WIDTH, length=50.0 * cases.CLIP)]
    base = list(enumerate(rows[:-1]))
    present = [*base, (cases.NODES - 1, rows[-1])]
    tried = [Answer(one) for one in cases.canaries()]
    search = cases.pairs_of("zero_out", base, cases.NODES - 1, tried)
    return Rounds(
        f"low rank, {keep:g} kept",
        make,
        cases.MODEL,
        base,
        present,
        clients=cases.NODES,
        pairs=search,
        messages=True,
        read=lambda strategy, step: strategy.seen,
        width=round(keep * short),
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
    """A generator that makes the same images for ever: what is audited is the sum of votes on them."""

    def images(self, arrays: Any, key: Key, count: int) -> NDArray[np.float32]:
        return np.zeros((count, PIXELS), np.float32)

    def start(self) -> dict[str, NDArray[Any]]:
        return {}

    def step(self, arrays: Any, moments: Any, key: Key, targets: NDArray[np.float32]) -> tuple[Any, Any]:
        return arrays, moments


class _Shown(DataLens):
    def mechanism(self, shape: tuple[int, int]) -> Votes:
        right = super().mechanism(shape)
        fields = {name: getattr(right, name) for name in right.__dataclass_fields__}
        # The constructor asks for a mechanism before anything else is there.
        self.seen: list[Floats] = self.__dict__.get("seen", [])
        return _Watched(seen=self.seen, **fields)


class Lessons(Subject):
    """DataLens: clients' packed votes through the rounds of the strategy; what is read is the noisy sum.

    Parameters
    ----------
    teachers : int
        Of each client.
    absent, present : data sets
        Participants are partitions, contributions the votes of all their teachers, int8 (teachers, images, pixels).
    """

    def __init__(
        self, teachers: int, absent: Data, present: Data, *, pairs: Sequence[tuple[Data, Data]] = (), z: float = 1.0
    ) -> None:
        self.name, self.adjacency = f"DataLens, {teachers} teacher{'s' * (teachers > 1)} a client", "replace"
        self.teachers, self.absent, self.present, self.pairs, self.z = teachers, absent, present, list(pairs), z
        mechanism = self._make(self.z, 0).mechanism((IMAGES, PIXELS))
        self._sigma, self.step = mechanism.sigma, mechanism.step
        self.parts = {f"image {row}": slice(row * PIXELS, (row + 1) * PIXELS) for row in range(IMAGES)}

    def _make(self, z: float, seed: int) -> _Shown:
        return _Shown(
            lambda config: _Drawn(),
            VoteSettings(k=VOTES, images=IMAGES),
            TeacherSettings(teachers=self.teachers),
            noise_multiplier=z,
            population=POPULATION,
            delta=DELTA,
            clients=CLIENTS,
            insecure_deterministic=True,
            seed=seed,
        )

    @property
    def scale(self) -> Floats:
        """The mechanism's standard deviation."""
        return np.full(IMAGES * PIXELS, self._sigma)

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return the noisy sums of votes."""
        out = np.empty((runs, rounds, IMAGES * PIXELS))
        with quiet(), InProcessGrid(_voters(data), CLIENTS) as grid:
            for trial in range(runs):
                strategy = self._make(self.z if noisy else 0.0, seed * 1_000_003 + trial)
                for place in range(rounds):
                    out[trial, place] = self._play(strategy, grid, place + 1)
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run."""
        strategy = self._make(self.z, 0)
        with quiet(), InProcessGrid(_voters(self.present), CLIENTS) as grid:
            for place in range(rounds):
                self._play(strategy, grid, place + 1)
        return strategy.privacy

    @staticmethod
    def _play(strategy: _Shown, grid: InProcessGrid, server_round: int) -> Floats:
        exchanges = strategy.round(server_round, to_record({"w": np.zeros(1, np.float32)}), ConfigRecord(), grid)
        asked = next(exchanges)
        assert isinstance(asked, Push)
        try:
            exchanges.send(grid.send_and_receive(asked.messages))
        except StopIteration:
            return strategy.seen[-1].ravel()
        raise AssertionError("a lesson has one exchange")


def _voters(data: Data) -> Callable[[Message, Context], Message]:
    """Return an app whose nodes answer with the votes of their partition."""
    frames = {partition: encode_rows(votes.reshape(-1, PIXELS)) for partition, votes in data}

    def answer(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        content = RecordDict()
        put_frame(content, datalens.VOTES, frames[partition])
        put_node(content, partition)
        return Message(content, reply_to=message)

    return answer


def teacher_votes(place: int, teachers: int) -> NDArray[np.int8]:
    """Return the votes of a client's teachers on every image."""
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


def lessons(teachers: int = 1, *, changed: int = 1) -> Lessons:
    """Return DataLens in the two worlds that one exchanged record parts: ``changed`` teachers vote the other way."""
    base = [(place, teacher_votes(place, teachers)) for place in range(CLIENTS - 1)]
    mine = teacher_votes(CLIENTS - 1, teachers)
    other = mine.copy()
    other[:changed] *= -1
    some = mine.copy()
    some[0, 0] = cases.vote(7, PIXELS, VOTES)
    worlds = [[*base, (CLIENTS - 1, votes)] for votes in (mine, other, some)]
    return Lessons(teachers, worlds[0], worlds[1], pairs=[(worlds[0], worlds[2])])


# Steps of DP-SGD.

MakeOptimizer = Callable[..., PrivateOptimizer]


class Steps(Subject):
    """Steps of DP-SGD on gradients made by hand: what is read is the noisy sum that a step divides.

    Parameters
    ----------
    name : str
    make : callable
        From an optimiser and the arguments that every private optimiser has to the one under audit.
    absent, present : data sets
        Records and their gradients, float32 (width,).
    """

    def __init__(
        self,
        name: str,
        make: MakeOptimizer,
        width: int,
        absent: Data,
        present: Data,
        pairs: Sequence[tuple[Data, Data]] = (),
        z: float = 1.0,
    ) -> None:
        self.name, self.make, self.width, self.z, self.adjacency = name, make, width, z, "add_remove"
        self.absent, self.present, self.pairs = absent, present, list(pairs)
        optimizer, _, _ = self.start(z, 0)
        self._sigma, self.step = optimizer.mechanism().sigma, optimizer.mechanism().step
        self.parts = {"gradient": slice(None)}

    def start(
        self, z: float, seed: int, entropy: Entropy | None = None
    ) -> tuple[PrivateOptimizer, torch.nn.Parameter, PrivacyLedger]:
        """Return an optimiser, its parameter and its ledger; noise comes from ``seed`` unless ``entropy`` is given."""
        weights = torch.nn.Parameter(torch.zeros(self.width))
        ledger = new_ledger("add_remove")
        optimizer = self.make(
            torch.optim.SGD([weights], lr=0.0),
            ledger,
            StepSettings(
                noise_multiplier=z,
                rate=1.0,
                max_grad_norm=cases.CLIP,
                entropy=entropy or SeededEntropy(Key(seed, "audit steps"), insecure_deterministic=True),
                key=Key(0, "audit steps"),
            ),
            expected_batch_size=8.0,
        )
        return optimizer, weights, ledger

    @property
    def scale(self) -> Floats:
        """The mechanism's standard deviation."""
        return np.full(self.width, self._sigma)

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return the noisy sums of gradients."""
        out = np.empty((runs, rounds, self.width))
        for trial in range(runs):
            optimizer, weights, _ = self.start(self.z if noisy else 0.0, seed * 1_000_003 + trial)
            for place in range(rounds):
                out[trial, place] = self.play(optimizer, weights, data)
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run."""
        optimizer, weights, ledger = self.start(self.z, 0)
        for _ in range(rounds):
            self.play(optimizer, weights, self.present)
        return ledger

    def play(self, optimizer: PrivateOptimizer, weights: torch.nn.Parameter, data: Data) -> Floats:
        """Return the noisy sum of one step."""
        rows = np.stack([np.asarray(gradient, np.float32) for _, gradient in data])
        optimizer.zero_grad()
        weights.grad_sample = torch.from_numpy(rows.copy())  # type: ignore[attr-defined]
        if not optimizer.pre_step() or weights.grad is None:
            raise AssertionError(f"{self.name}: the step released nothing")
        # The step divides the sum by the expected batch.
        return weights.grad.double().numpy().ravel() * optimizer.batch


def dp_sgd(
    name: str = "DP-SGD", make: MakeOptimizer | None = None, width: int = 64, canary: Any = None, **arguments: Any
) -> Steps:
    """Return DP-SGD, or another optimiser, on few records."""
    base = list(enumerate(cases.updates(3, width, length=1.5 * cases.CLIP)))
    tried = [*([] if canary is None else [canary]), *cases.canaries(width)]
    # The coins of votes are dealt in the order of the records: this one is dealt its own after all others.
    present = [*base, (9, tried[0])]
    pairs: list[tuple[Data, Data]] = [(base, [*base, (9, one)]) for one in tried]
    return Steps(name, make or PrivateOptimizer, width, base, present, pairs, **arguments)


def topagg_sgd(*, stochastic: bool = True) -> Steps:
    """Return DP-SGD on votes."""
    canary = cases.updates(4, 64, length=1.0)[3]
    make = partial(TopAggOptimizer, k=8, stochastic=stochastic)
    return dp_sgd(f"DP-SGD on votes{'' if stochastic else ', plain signs'}", make, canary=canary)


def masked_sgd() -> Steps:
    """Return DP-SGD with a mask that keeps everything it is asked about: the clip comes after it."""
    return dp_sgd("DP-SGD, masked", partial(MaskedOptimizer, keep=1.0))


# Messages that are private themselves.


class Messages(Subject):
    """One client's messages under local privacy: any two of its data sets are neighbours."""

    def __init__(self, z: float = 1.0) -> None:
        self.name, self.adjacency, self.z = "local privacy, a message", "replace", z
        found = cases.canaries()
        self.absent, self.present = [(0, found[1])], [(0, found[0])]
        self.pairs = [([(0, one)], [(0, other)]) for one, other in zip(found[::2], found[1::2], strict=False)]
        mechanism = self._transform(z).mechanism(cases.WIDTH)
        self._sigma, self.step = mechanism.sigma, mechanism.step
        self.parts = {"message": slice(None)}

    @staticmethod
    def _transform(z: float) -> Privatise:
        return Privatise(clip=cases.CLIP, noise_multiplier=z, insecure_deterministic=True)

    @property
    def scale(self) -> Floats:
        """The mechanism's standard deviation."""
        return np.full(cases.WIDTH, self._sigma)

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return the messages."""
        transform = self._transform(self.z if noisy else 0.0)
        layout = Layout.flat(cases.WIDTH)
        out = np.empty((runs, rounds, cases.WIDTH))
        for trial in range(runs):
            state = transform.init(layout)
            for place in range(rounds):
                key = Key(seed * 1_000_003 + trial, "audit message", place)
                update, state = transform.apply(Update(data[0][1], layout), state, key)
                out[trial, place] = update.vector
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return a ledger with an event of the transform's mechanism per message, as the strategy records them."""
        ledger = new_ledger("replace")
        for place in range(rounds):
            ledger.record(self._transform(self.z).mechanism(cases.WIDTH).event(size=cases.WIDTH), round=place + 1)
        return ledger


class Shares(Subject):
    """Distributed noise: every client rounds under a bound and adds its share, as many vanish as may.

    A client of the world without the canary sends zeros and its share of the noise: what is hidden is its update.
    """

    clients: int = 6
    tolerated: int = 2

    def __init__(self, noise: str = "discrete_gaussian", z: float = 1.0) -> None:
        self.name, self.adjacency, self.noise, self.z = f"distributed, {noise.replace('_', ' ')}", "zero_out", noise, z
        mechanism = self._mechanism(z)
        self._sigma, self.step = mechanism.sigma, mechanism.step
        self.parts = {"sum": slice(None)}
        rows = cases.updates(self.clients - self.tolerated, cases.WIDTH, length=1.5 * cases.CLIP)
        base = list(enumerate(rows[:-1]))
        still = np.zeros(cases.WIDTH, np.float32)
        last = len(base)
        self.absent, self.present = [*base, (last, still)], [*base, (last, cases.canaries()[0])]
        self.pairs = [(self.absent, [*base, (last, one)]) for one in cases.canaries()]

    def _mechanism(self, z: float) -> DistributedSum:
        return DistributedSum(
            noise_multiplier=z,
            noise=self.noise,
            clip=cases.CLIP,
            size=cases.WIDTH,
            contributors=self.clients,
            tolerated=self.tolerated,
        )

    @property
    def scale(self) -> Floats:
        """Of as many shares as are counted on."""
        return np.full(cases.WIDTH, self._sigma)

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return the sums of the noised integers, in the units of the update."""
        mechanism = self._mechanism(self.z)
        codec = BoundedFixedPoint.of(mechanism, RandomK(1.0), insecure_deterministic=True)
        whole = [codec.bounded(update, Key(0, "audit rounding", partition=place)) for place, update in data]
        out = np.empty((runs, rounds, cases.WIDTH))
        for trial in range(runs):
            for turn in range(rounds):
                key = Key(seed * 1_000_003 + trial, "audit share", turn)
                parts = [
                    codec.noised(one, SeededEntropy(key.at(partition=place), insecure_deterministic=True))
                    if noisy
                    else one
                    for place, one in enumerate(whole)
                ]
                out[trial, turn] = np.sum(parts, axis=0) * mechanism.step
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return a ledger with the mechanism's event for every sum, as the strategy records them."""
        ledger = new_ledger("zero_out")
        for place in range(rounds):
            ledger.record(self._mechanism(self.z).event(size=cases.WIDTH), round=place + 1)
        return ledger


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    "low rank, 0.75 kept": lsg,
    "low rank, all kept": lambda: lsg(keep=1.0),
    "DataLens": lambda: lessons(1),
    "DataLens, 2 teachers a client": lambda: lessons(2),
    "DP-SGD": dp_sgd,
    "DP-SGD on votes": topagg_sgd,
    "DP-SGD on votes, plain signs": lambda: topagg_sgd(stochastic=False),
    "DP-SGD, masked": masked_sgd,
    "local privacy, a message": Messages,
    "distributed noise": Shares,
    "distributed noise, Skellam": lambda: Shares("skellam"),
}
"""Makers of the subjects at noise multiplier 1."""
