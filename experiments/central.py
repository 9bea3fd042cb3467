"""Compressed federated averaging without messages: many clients, one process, the same arithmetic.

For grids too large to send as Flower messages, and for methods that cannot be sent at all because they need to see
every client's update at once. Every client trains as :mod:`clients.app` does, encodes as :mod:`clients.compressed`
does, and the frames are added as :class:`strategies.compressed.Compressed` adds them: a system that runs both ways ends
in the same model bit for bit, with the same bytes of frames (``tests/experiments/test_central.py`` and the claims of
the experiment ``sparsifiers``). What is left out is what does not change the model: messages, acknowledgements, lost
replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.spec import RunSpec
from experiments.systems import TASK_PREFIX, TRAINING, get_system
from fedcomp import wire
from fedcomp.codecs import Codec, ErrorFeedback, Identity, State
from fedcomp.codecs.positional import Stretch, stretches
from fedcomp.codecs.scalecom import ScaleCom, support_frame
from fedcomp.codecs.similarity import similarity
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task


@dataclass(frozen=True)
class Exchange:
    """What one round's communication cost and delivered.

    Attributes
    ----------
    mean : float32 vector
        The weighted mean of what the clients' frames decode to; for lossless codecs the mean model itself.
    states : list of State
        The clients' states after it.
    uplink : int
        Bytes of all frames from the clients.
    downlink : int
        Bytes of the frames that would tell every client the mean: on a support all clients know, its values alone; else
        values and the union of all supports, or all values where that is shorter.
    union : int
        Compressible coordinates at which the mean is not zero.
    kept : list of int
        Values of compressible coordinates that each client sent.
    overlap : float
        Share of the true top k of the mean of memory plus update that lies in the shared support: 1 - q/k. NaN where
        there is no shared support or nobody looked.
    """

    mean: Vector
    states: list[State]
    uplink: int
    downlink: int
    union: int
    kept: list[int]
    overlap: float = math.nan


class Scheme(Protocol):
    """How the clients of a round agree on one update."""

    @property
    def lossless(self) -> bool:
        """Whether the updates are the models themselves, not differences."""

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the states of clients that have sent nothing yet."""

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> Exchange:
        """Send ``updates``, one per client in the order of partitions, with the clients' ``weights`` in the mean.

        ``key`` is the round's key for purpose "uplink"; ``look`` asks for the figures that cost extra time.

        Raises
        ------
        NonFiniteUpdate
            When an update holds NaN or infinity.
        """


@dataclass(frozen=True)
class Separate:
    """Every client encodes by itself: what the drop-in pair does."""

    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.phases != 1:
            raise ConfigError(f"{self.codec!r} needs {self.codec.phases} exchanges; use Led for a shared support")

    @property
    def lossless(self) -> bool:
        """Whether the codec is."""
        return self.codec.lossless

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> Exchange:
        """Encode each update with its client's key and state; see :class:`Scheme`."""
        layout = updates[0].layout
        total = sum(weights)
        out = _nothing(layout)
        after: list[State] = []
        kept: list[int] = []
        uplink = 0
        for i, (update, weight, state) in enumerate(zip(updates, weights, states, strict=True)):
            # A codec that does not remember starts every message anew.
            before = state if self.codec.remembers else self.codec.init(layout)
            frame, state = self.codec.encode(update, before, key.at(partition=i))
            uplink += len(frame)
            content = self.codec.open(frame, layout)
            self.codec.accumulate(content, weight / total, out)
            kept.append(sum(t.values.k for t in content.tensors) - layout.dense_size)
            after.append(state)
        self.codec.conclude(out)
        return Exchange(out.vector, after, uplink, self._downlink(out, key) * len(updates), _union(out), kept)

    def _downlink(self, mean: Update, key: Key) -> int:
        inner = self.codec
        while hasattr(inner, "codec"):
            inner = inner.codec
        if inner.linear and getattr(inner, "shared", False):
            # All clients redraw the support from the round's seed: only values travel.
            frame, _ = inner.encode(mean, inner.init(mean.layout), key.at(partition=0))
            return len(frame)
        return len(sum_frame(mean))


@dataclass(frozen=True)
class Led:
    """All clients send on one support: the choice of the round's leader, or, as an oracle, that of the mean.

    Parameters
    ----------
    codec : ScaleCom
        Selector, memory and filter.
    oracle : bool
        Select from the mean of all clients' memory plus update, which nobody can see before it was sent: the bound that
        no leader beats. Its index block counts as if the leader had sent it.

    Notes
    -----
    In round t, from 1, the client ``(t - 1) mod N`` leads, in the order of partitions. Sending on a fixed support with
    the codec's filter is error feedback around :class:`~fedcomp.codecs.scalecom.FixedSupport`, as in the codec itself.
    """

    codec: ScaleCom
    oracle: bool = False
    lossless: bool = field(default=False, init=False)

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> Exchange:
        """Choose the support, send on it, add up; see :class:`Scheme`."""
        layout = updates[0].layout
        codec, total, clients = self.codec, sum(weights), len(updates)
        leader = (key.round - 1) % clients
        if self.oracle:
            chosen_from = _weighted_mean([_total(s, u) for s, u in zip(states, updates, strict=True)], weights)
        else:
            chosen_from = _total(states[leader], updates[leader])
        supports = codec.choose_from(chosen_from, layout, key.at(partition=leader))
        on_support = codec.on(supports, key.round)
        feedback = ErrorFeedback(on_support, beta=codec.beta if codec.memory else 0.0, norm_guard=codec.norm_guard)
        out = _nothing(layout)
        after: list[State] = []
        block = len(support_frame(supports, codec, layout))
        uplink = block
        for i, (update, weight, state) in enumerate(zip(updates, weights, states, strict=True)):
            frame, sent = feedback.encode(update, state, key.at(partition=i))
            uplink += len(frame)
            on_support.accumulate(frame, weight / total, out)
            after.append(sent)
        answer, _ = codec.mean(supports, key.round).encode(out, {}, key)
        return Exchange(
            out.vector,
            after,
            uplink,
            (clients - 1) * block + clients * len(answer),
            _union(out),
            [sum(s.size for s in supports)] * clients,
            self._overlap(updates, states, weights, supports) if look else math.nan,
        )

    def _overlap(
        self,
        updates: Sequence[Update],
        states: Sequence[State],
        weights: Sequence[float],
        supports: Sequence[NDArray[np.int64]],
    ) -> float:
        layout = updates[0].layout
        parts = self.codec.leader.stretches(layout)
        end = layout.compressed_size
        chosen = np.zeros(end, np.bool_)
        for stretch, indices in zip(parts, supports, strict=True):
            chosen[indices + stretch.start] = True
        totals = [_total(s, u)[:end] for s, u in zip(states, updates, strict=True)]
        memories = [state["memory"][:end] for state in states]
        return similarity(memories, totals, weights, chosen, [s.slice for s in parts]).overlap


@dataclass(frozen=True)
class Plan:
    """What is trained, by whom and for how long.

    Parameters
    ----------
    task : Task
    clients, rounds, seed : int
        As of a run.
    training : mapping
        Arguments of :meth:`fedcomp.tasks.base.Task.train`: lr, batch_size, epochs, max_steps, momentum, weight_decay.
    every : int
        Rounds between evaluations and looks; 0 evaluates the last round only. The last round is always one.
    """

    task: Task
    clients: int
    rounds: int
    seed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> tuple[Plan, Scheme]:
        """Return the plan and the scheme of a run of a system, so that it runs here as it would on an engine.

        Raises
        ------
        ConfigError
            When the spec asks for what only messages can do: cohorts, a compressed downlink, another inner strategy.
        """
        from fedcomp.tasks import get_task

        system = get_system(spec.system)
        settings = system.resolve(spec.settings)
        for key, only in (("fraction", 1.0), ("inner", "fedavg"), ("downlink", "")):
            if settings.get(key, only) != only:
                raise ConfigError(f"without messages {key} is {only!r}, not {settings[key]!r}; run it on an engine")
        inner = [key for key in settings if key.startswith("inner.")]
        if inner:
            raise ConfigError(f"without messages there are no settings {inner}; run it on an engine")
        options = {k.removeprefix(TASK_PREFIX): v for k, v in settings.items() if k.startswith(TASK_PREFIX)}
        # Zero is what training does anyway; the messages leave it out, too.
        training = {key: settings[key] for key in TRAINING if settings[key]}
        codec = getattr(system.make_strategy(settings, spec.seed), "codec", Identity())
        every = int(settings["evaluate_every"])
        plan = cls(get_task(spec.task, **options), spec.clients, spec.rounds, spec.seed, training, every)
        return plan, scheme_of(codec)


@dataclass(frozen=True)
class Point:
    """The global model after some round.

    Attributes
    ----------
    round : int
        0 is the initial model.
    loss : float
        Mean objective on all training examples, in nats for classification.
    accuracy : float
        On the held-out test split.
    uplink, downlink : int
        Bytes so far, all clients.
    """

    round: int
    loss: float
    accuracy: float
    uplink: int
    downlink: int


@dataclass
class Outcome:
    """What a simulated run came to.

    Attributes
    ----------
    arrays : dict of str to ndarray
        The final model.
    points : list of Point
        Evaluated rounds, round 0 first.
    exchanges : list
        One per round, without vectors and states.
    diverged : int or None
        The round whose updates were not finite: training ended there, and the last loss is infinite.
    """

    arrays: dict[str, NDArray[Any]]
    points: list[Point]
    exchanges: list[Cost]
    diverged: int | None = None

    @property
    def final(self) -> Point:
        """The last point."""
        return self.points[-1]

    @property
    def uplink(self) -> int:
        """Bytes of all frames from all clients."""
        return sum(e.uplink for e in self.exchanges)

    @property
    def downlink(self) -> int:
        """Bytes of the frames that tell every client every mean."""
        return sum(e.downlink for e in self.exchanges)

    @property
    def union(self) -> float:
        """Mean over rounds of the number of coordinates that changed."""
        return _mean([e.union for e in self.exchanges])

    @property
    def kept(self) -> float:
        """Mean over rounds and clients of the number of compressible values sent."""
        return _mean([k for e in self.exchanges for k in e.kept])

    @property
    def overlap(self) -> float:
        """Mean over the rounds that were looked at of 1 - q/k; NaN without a shared support."""
        return _mean([e.overlap for e in self.exchanges if not math.isnan(e.overlap)])


@dataclass(frozen=True)
class Cost:
    """An :class:`Exchange` without its vectors."""

    uplink: int
    downlink: int
    union: int
    kept: tuple[int, ...]
    overlap: float


def scheme_of(codec: Codec) -> Scheme:
    """Return the scheme in which ``codec`` is used."""
    return Led(codec) if isinstance(codec, ScaleCom) else Separate(codec)


def simulate(plan: Plan, scheme: Scheme, on_point: Callable[[Point], object] | None = None) -> Outcome:
    """Run ``plan`` with ``scheme``.

    Parameters
    ----------
    plan : Plan
    scheme : Scheme
    on_point : callable, optional
        Called with each new point.

    Raises
    ------
    ConfigError
        When the model has buffers that travel beside the vector (statistics, counters): run it on an engine.
    """
    task = plan.task
    model = task.model(plan.seed)
    # Views of the one model's own memory: a client's training begins by copying the shared model into them.
    views = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    layout = Layout.of(views, cast_floats=not scheme.lossless)
    if layout.exact:
        raise ConfigError(
            f"the model has {len(layout.exact)} buffers that are no weights, first {layout.exact[0].name!r}; "
            "without messages only weights are trained: use a model without them, or an engine"
        )
    data = [task.client(i, plan.clients) for i in range(plan.clients)]
    weights = [len(split) for split in data]
    states = scheme.start(layout, plan.clients)
    vector = layout.flatten(views)
    run = _Run(plan, scheme, views, layout, vector)
    run.look(model, 0, on_point)
    for number in range(1, plan.rounds + 1):
        updates = []
        for i, split in enumerate(data):
            run.load()
            task.train(model, split, key=Key(plan.seed, "batches", number, i), **plan.training)
            update = layout.flatten(views)
            if not scheme.lossless:
                update -= run.vector
            updates.append(Update(update, layout))
        due = number == plan.rounds or (plan.every > 0 and number % plan.every == 0)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                done = scheme.round(updates, weights, states, Key(plan.seed, "uplink", number), look=due)
                after = done.mean if scheme.lossless else run.vector + done.mean
            if not np.isfinite(after).all():
                raise NonFiniteUpdate("the aggregate is not finite")
        except NonFiniteUpdate:
            return run.diverge(number, on_point)
        states = done.states
        run.advance(after, done)
        if due:
            run.look(model, number, on_point)
    return run.outcome(None)


@dataclass
class _Run:
    """The shared model and the records of a simulation."""

    plan: Plan
    scheme: Scheme
    views: dict[str, NDArray[Any]]
    layout: Layout
    vector: Vector
    points: list[Point] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    uplink: int = 0
    downlink: int = 0

    def load(self) -> None:
        """Put the shared model into the one torch model."""
        for t in self.layout.tensors:
            self.views[t.name].reshape(-1)[...] = self.vector[t.slice]

    def advance(self, vector: Vector, done: Exchange) -> None:
        """Take over the round's result."""
        self.vector = vector
        self.uplink += done.uplink
        self.downlink += done.downlink
        self.costs.append(Cost(done.uplink, done.downlink, done.union, tuple(done.kept), done.overlap))

    def look(self, model: Any, number: int, on_point: Callable[[Point], object] | None) -> None:
        """Evaluate the shared model."""
        self.load()
        task = self.plan.task
        loss = task.evaluate(model, task.train_split)["loss"]
        accuracy = task.evaluate(model, task.test)[task.metric]
        self._add(Point(number, loss, accuracy, self.uplink, self.downlink), on_point)

    def diverge(self, number: int, on_point: Callable[[Point], object] | None) -> Outcome:
        """End here: the updates of round ``number`` are no numbers."""
        self._add(Point(number, math.inf, math.nan, self.uplink, self.downlink), on_point)
        return self.outcome(number)

    def outcome(self, diverged: int | None) -> Outcome:
        """Return what there is."""
        arrays = {name: array.copy() for name, array in self.layout.unflatten(self.vector).items()}
        return Outcome(arrays, self.points, self.costs, diverged)

    def _add(self, point: Point, on_point: Callable[[Point], object] | None) -> None:
        self.points.append(point)
        if on_point is not None:
            on_point(point)


def sum_frame(mean: Update) -> wire.Frame:
    """Return the shortest plain frame of a mean: of each compressible tensor its non-zero values and their indices, or
    all values where that is shorter; then the dense rest."""
    layout = mean.layout
    tensors = [_sum_tensor(mean.vector[s.slice], s) for s in stretches(layout, "layer")]
    rest = mean.vector[layout.compressed_size :]
    return wire.encode([*tensors, wire.dense(rest)] if rest.size else tensors)


def _sum_tensor(values: Vector, stretch: Stretch) -> wire.Tensor:
    indices = np.flatnonzero(values)
    # A bitmap, the cheapest list of many indices, takes a bit per element: 1/32 of the values.
    if indices.size > stretch.size * 31 // 32:
        return wire.dense(values)
    return wire.sparse((stretch.size,), indices, values[indices])


def _total(state: State, update: Update) -> Vector:
    """Return p, memory plus update: what a leader selects from."""
    return state["memory"] + update.vector


def _weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return the mean in float64, rounded once."""
    total = np.zeros(vectors[0].size)
    for vector, weight in zip(vectors, weights, strict=True):
        total += weight / sum(weights) * vector
    return total.astype(np.float32)


def _nothing(layout: Layout) -> Update:
    # -0.0 is the exact identity of addition, as in the strategy: the first contribution is stored, not added to +0.0.
    return Update(np.full(layout.size, -0.0, np.float32), layout)


def _union(mean: Update) -> int:
    return int(np.count_nonzero(mean.vector[: mean.layout.compressed_size]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
