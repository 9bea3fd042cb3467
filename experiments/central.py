"""Compressed federated averaging without messages: many clients, one process, the same arithmetic.

For grids too large to send as Flower messages, and for methods that cannot be sent at all because they need to see
every client's update at once. Every client trains as :mod:`fedcomp.clients.app` does, encodes as
:mod:`fedcomp.clients.compressed` does, and the frames are added as :class:`fedcomp.strategies.compressed.Compressed`
adds them: a system that runs both ways ends in the same model bit for bit, with the same bytes of frames
(``tests/experiments/test_central.py`` and the claims of the experiment ``sparsifiers``). What is left out is what does
not change the model: messages, acknowledgements, lost replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.parts import INNER_PREFIX, TASK_PREFIX, make_inner, policy
from fedcomp.experiments.schemes import Exchange, Led, Scheme, Separate, scheme_of, sum_frame
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import TRAINING, get_system
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.layout import DensityPolicy, Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.strategies.adaptive import has_moments
from fedcomp.strategies.means import aggregate_once

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task

__all__ = [
    "Cost",
    "Exchange",
    "Led",
    "Outcome",
    "Plan",
    "Point",
    "Scheme",
    "Separate",
    "scheme_of",
    "simulate",
    "sum_frame",
]


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
    server : mapping
        The settings ``inner`` and ``inner.*`` of the server's strategy: empty for FedAvg, or one with moments.
    everywhere : bool
        Leave a strategy's moments to themselves on all coordinates, as Flower does and the drop-in pair does not; see
        :mod:`fedcomp.strategies.adaptive`.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    """

    task: Task
    clients: int
    rounds: int
    seed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 0
    server: Mapping[str, Any] = field(default_factory=dict)
    everywhere: bool = False
    policy: DensityPolicy | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> tuple[Plan, Scheme]:
        """Return the plan and the scheme of a run of a system, so that it runs here as it would on an engine.

        Raises
        ------
        ConfigError
            When the spec asks for what only messages can do: cohorts, a compressed downlink, an inner strategy that is
            neither FedAvg nor one with moments.
        """
        from fedcomp.tasks import get_task

        system = get_system(spec.system)
        settings = system.resolve(spec.settings)
        for key, only in (("fraction", 1.0), ("downlink", "")):
            if settings.get(key, only) != only:
                raise ConfigError(f"without messages {key} is {only!r}, not {settings[key]!r}; run it on an engine")
        server = {key: value for key, value in settings.items() if key.startswith(INNER_PREFIX)}
        if settings["inner"] != "fedavg" or server:
            server = {"inner": settings["inner"], **server}
        options = {k.removeprefix(TASK_PREFIX): v for k, v in settings.items() if k.startswith(TASK_PREFIX)}
        # Zero is what training does anyway; the messages leave it out, too.
        training = {key: settings[key] for key in TRAINING if settings[key]}
        codec = getattr(system.make_strategy(settings, spec.seed), "codec", Identity())
        every = int(settings["evaluate_every"])
        task, dense = get_task(spec.task, **options), policy(settings)
        plan = cls(task, spec.clients, spec.rounds, spec.seed, training, every, server, policy=dense)
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
    steps : list of float
        Per round, the share of the server's step, squared, on coordinates of which nothing arrived.
    """

    arrays: dict[str, NDArray[Any]]
    points: list[Point]
    exchanges: list[Cost]
    diverged: int | None = None
    steps: list[float] = field(default_factory=list)

    @property
    def settled(self) -> float:
        """Mean accuracy of the last five evaluated rounds: one test image more or less moves a single one."""
        return _mean([point.accuracy for point in self.points[-5:]])

    @property
    def stale(self) -> float:
        """Mean over rounds of :attr:`steps`; NaN for FedAvg, whose step is what arrived."""
        return _mean(self.steps)

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
    layout = Layout.of(views, plan.policy, cast_floats=not scheme.lossless)
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
    server = _Server(plan, layout, sparse=scheme.codec.sparse(layout) and not plan.everywhere)
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
                after = server.step(number, run.vector, done.mean if scheme.lossless else run.vector + done.mean)
            if not np.isfinite(after).all():
                raise NonFiniteUpdate("the aggregate is not finite")
        except NonFiniteUpdate:
            return run.diverge(number, on_point)
        states = done.states
        run.advance(after, done)
        if due:
            run.look(model, number, on_point)
    return replace(run.outcome(None), steps=server.stale)


class _Server:
    """What the server makes of the mean model: FedAvg takes it as it is, a strategy with moments makes its own step.

    Raises
    ------
    ConfigError
        For another strategy.
    """

    def __init__(self, plan: Plan, layout: Layout, *, sparse: bool) -> None:
        self.layout = layout
        self.sparse = sparse
        self.inner = make_inner({"fraction_evaluate": 0.0, **plan.server}) if plan.server else None
        self.stale: list[float] = []
        if self.inner is not None and not has_moments(self.inner):
            raise ConfigError(
                f"without messages inner is 'fedavg' or one with moments, not {type(self.inner).__name__}, with no "
                "settings of its own; run it on an engine"
            )

    def step(self, number: int, model: Vector, mean: Vector) -> Vector:
        """Return the model after round ``number``."""
        if self.inner is None:
            return mean
        named = {name: array.copy() for name, array in self.layout.unflatten(model).items()}
        self.inner.current_arrays = named  # type: ignore[attr-defined]
        arrived = ("arrays", to_record(self.layout.unflatten(mean)))
        # Flower's messages exist only within a run.
        with InProcessGrid(ClientApp(), 1):
            asked = Message(RecordDict(), 1, "train")
            arrays, _ = aggregate_once(self.inner, number, arrived, asked, (), sparse=self.sparse)
        assert arrays is not None
        after = self.layout.flatten(to_arrays(restore_dtypes(arrays, named, [])))
        step = np.square(after - model, dtype=np.float64)
        self.stale.append(float(step[mean == model].sum() / step.sum()) if step.any() else 0.0)
        return after


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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
