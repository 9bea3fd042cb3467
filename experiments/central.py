"""Federated averaging without messages: many clients in one process, with the same arithmetic.

For grids too large to send as Flower messages, and for methods that cannot be sent at all because they need to see
every client's update at once. Every client trains as :mod:`fedcomp.clients.app` does, and the system itself runs on the
driver in memory (:class:`fedcomp.local.Local`, :func:`simulate`); a private strategy is the rule of its rounds. A
system that runs both ways ends in the same model bit for bit, with the same bytes of frames and the same statement
(``tests/experiments/test_central.py``, ``test_private_central.py`` and the claims of ``sparsifiers`` and ``topagg``).
What is left out is what does not change the model: messages, acknowledgements, lost replies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs import Codec, Identity, State
from fedcomp.codecs.lgc import LGC
from fedcomp.codecs.positional import Stretch, stretches
from fedcomp.codecs.power_sgd import PowerSGD
from fedcomp.codecs.scalecom import ScaleCom, open_support
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.findings import Table, different_bytes
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.systems import get_system
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.layout import DensityPolicy, Layout, Update, Vector
from fedcomp.local import Local, Train
from fedcomp.privacy.local import privatised
from fedcomp.program import Answer, Given, Mean, Now, Rule, Step
from fedcomp.program import System as Program
from fedcomp.rng import Key
from fedcomp.strategies.coded.gradients import GradientCoded
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.means import aggregate_once, is_mean
from fedcomp.strategies.nodes import asked_for
from fedcomp.strategies.parts import INNER_PREFIX, TASK_PREFIX, below, make_inner
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.strategies.server import Server
from fedcomp.strategies.system import TRAINING
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.pair import Pair
from fedcomp.systems.power_sgd import SharedBasis
from fedcomp.systems.private.rule import Private
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.tasks import get_task
from fedcomp.wire import FILLED

if TYPE_CHECKING:
    from fedcomp.privacy.statement import Statement
    from fedcomp.tasks.base import Task


def run_it_on_an_engine(why: str) -> NoReturn:
    """Refuse what only messages can do."""
    raise ConfigError(f"without messages {why}; run it on an engine")


def program_of(codec: Codec) -> Program:
    """Return the system in which ``codec`` is used.

    Raises
    ------
    ConfigError
        For a codec whose exchanges are not those of a system here.
    """
    if isinstance(codec, PowerSGD):
        return SharedBasis(codec)
    if isinstance(codec, ScaleCom):
        return SharedSupport(codec)
    if isinstance(codec, LGC):
        return LearnedGradients(codec)
    if codec.phases != 1:
        run_it_on_an_engine(f"the {codec.phases} exchanges of {codec!r} are not made")
    return Pair(codec)


@dataclass(frozen=True)
class Cost:
    """What one round's communication cost and delivered.

    Attributes
    ----------
    uplink : int
        Bytes of all frames from the clients.
    downlink : int
        Bytes of the frames that would carry the mean to every client: on a support or in a basis that all know, its
        values alone, beside what makes these known; else values and the union of all supports, or all values where
        that is shorter.
    union : int
        Compressible coordinates at which the mean is not zero.
    kept : list of int
        Values of compressible coordinates that each client sent.
    overlap : float
        Share of the true top k of the mean of memory plus update that lies in the shared support: 1 - q/k. NaN where
        there is no shared support or nobody looked.
    seconds : float
        Processor time of encoding, decoding and adding up; that of the downlink's frames is not in it.
    frames : list of int
        Bytes of the frames of every answer, without what fills them up to one length.
    """

    uplink: int
    downlink: int
    union: int
    kept: list[int]
    overlap: float = math.nan
    seconds: float = 0.0
    frames: Sequence[int] = ()


@dataclass(frozen=True)
class Seen:
    """One round, for who looks into it: memories before it and what each client made, by partition."""

    number: int
    memories: Mapping[int, State]
    updates: Mapping[int, Update]
    answers: Sequence[Answer]
    step: Step


class Rounds:
    """Rounds of a system in this process, one by one, and what each of them costs.

    Parameters
    ----------
    system, layout, model, train, weight, nodes, seed, rule
        As of :class:`fedcomp.local.Local`.

    Attributes
    ----------
    local : Local

    Raises
    ------
    ConfigError
        For a codec of what is captured while a client trains, which nobody does here.
    """

    def __init__(
        self,
        system: Program,
        layout: Layout,
        model: Vector,
        train: Train,
        weight: Callable[[int], float],
        nodes: int,
        seed: int,
        rule: Rule | None = None,
    ) -> None:
        for codec in system.codecs:
            if codec.exposes:
                run_it_on_an_engine(f"nothing is captured that {codec!r} could send")
        self._train = train
        self._rule: Rule = Mean() if rule is None else rule
        self.local = Local(system, layout, model, self._trained, weight, nodes, seed, rule=self)
        self._kept: list[int] = []
        self._made: dict[int, Vector] = {}
        self._training = 0.0

    def _trained(self, number: int, node: int, start: Vector) -> Vector | Update:
        began = time.thread_time()
        made = self._train(number, node, start)
        self._made[node] = made.vector if isinstance(made, Update) else made
        self._training += time.thread_time() - began
        return made

    @property
    def adds(self) -> bool:
        """See :class:`fedcomp.program.Rule`."""
        return self._rule.adds

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what the rule makes of contributions, and note how many values came of each client."""
        # A frame carries the dense rest as well, which no codec compresses.
        opened = [codec.open(each.frame, now.layout) for each in given]
        self._kept = [sum(t.values.k for t in bundle.tensors) - now.layout.dense_size for bundle in opened]
        return self._rule.total(now, codec, given, raw=raw)

    def drawn(self, number: int) -> list[int] | None:
        """Return the nodes of a round, which a private rule draws, and opens the round; None when it may make none."""
        local, rule = self.local, self._rule
        nodes = list(range(local.nodes))
        if not isinstance(rule, Private):
            return nodes
        support = local.system.codecs[0].common_support(local.layout, Key(local.seed, "uplink", number))
        released = local.layout if support is None else Layout.flat(int(support.size))
        chosen, over = rule.draw(lambda: nodes, released, number)
        if over:
            return None
        rule.open(number, chosen)
        return chosen

    def step(self, number: int, nodes: Sequence[int] | None = None) -> tuple[Step, Cost]:
        """Make a round among ``nodes``, by default all; return what it came to and what it cost.

        Raises
        ------
        NonFiniteUpdate
            When an update, or what all came to, holds NaN or infinity; the model stays as it was. A private rule leaves
            such an update out.
        """
        local, began, self._training = self.local, time.thread_time(), 0.0
        system, layout, model = local.system, local.layout, local.model
        up, down = local.bytes_up, local.bytes_down
        memories = {node: local.client(node).memory for node in range(local.nodes)}
        step = local.step(number, nodes)
        seconds = time.thread_time() - began - self._training
        refused = [] if isinstance(self._rule, Private) else local.refused[number]
        if refused or step is None or not np.isfinite(local.model).all():
            local.model = model
            raise NonFiniteUpdate(f"round {number}: {(refused or ['the aggregate is not finite'])[0]}")
        if step.frame is None:
            mean = Update(step.change if step.model is None else step.model, layout)  # type: ignore[arg-type]
            downlink = local.nodes * _answer(system.codec, mean, Key(local.seed, "uplink", number))  # type: ignore[attr-defined]
        else:
            assert step.codec is not None
            mean = Update(step.codec.decode(step.frame, layout), layout)
            downlink = local.bytes_down - down + local.nodes * len(step.frame)
        self._last = memories, model, step
        union = int(np.count_nonzero(mean.vector[: layout.compressed_size]))
        frames = [sum(map(len, answer.frames.values())) for answer in local.answers]
        return step, Cost(local.bytes_up - up, downlink, union, self._kept, seconds=seconds, frames=frames)

    def seen(self, number: int) -> Seen:
        """Return round ``number``, the last one, for who looks into it."""
        memories, model, step = self._last
        updates = {node: Update(made - model, self.local.layout) for node, made in self._made.items()}
        return Seen(number, memories, updates, self.local.answers, step)


class Sending(Rounds):
    """Rounds in which clients send given vectors: from a model of zeros what is trained is the vector itself."""

    def __init__(
        self, system: Program, layout: Layout, nodes: int, seed: int, weight: Callable[[int], float] = lambda node: 1.0
    ) -> None:
        self._vectors: Sequence[Vector] = ()
        self._zeros = np.zeros(layout.size, np.float32)
        super().__init__(
            system, layout, self._zeros, lambda number, node, start: self._vectors[node], weight, nodes, seed
        )

    def send(self, number: int, vectors: Sequence[Vector]) -> tuple[Vector, Cost]:
        """Return the mean of vectors, one for each client, as it arrives, and what it costs."""
        self._vectors, self.local.model = vectors, self._zeros
        _, cost = self.step(number)
        return self.local.model, cost


def _answer(codec: Codec, mean: Update, key: Key) -> int:
    """Return the bytes of the frame that would carry the pair's mean to a client."""
    # Wrappers such as error feedback are around the codec that chooses the support.
    while hasattr(codec, "codec"):
        codec = codec.codec
    if codec.linear and getattr(codec, "shared", False):
        # All clients redraw the support from the round's seed: only values travel.
        return len(codec.encode(mean, codec.init(mean.layout), key)[0])
    return len(sum_frame(mean))


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


def overlap(system: SharedSupport, seen: Seen, weights: Sequence[float]) -> float:
    """Return the share of the true top k of the mean of memory plus update that lies in a round's shared support."""
    layout, codec = seen.updates[0].layout, system.at(seen.number)
    parts, end = codec.leader.stretches(layout), layout.compressed_size
    chosen, best, mean = np.zeros(end, np.bool_), np.zeros(end, np.bool_), np.zeros(end)
    for stretch, indices in zip(parts, open_support(seen.step.blobs["support"], codec, layout), strict=True):
        chosen[indices + stretch.start] = True
    for node, share in enumerate(np.asarray(weights, np.float64) / np.sum(weights)):
        mean += share * (codec.settle(seen.memories[node], layout)["memory"] + seen.updates[node].vector)[:end]
    for stretch in parts:
        k = int(np.count_nonzero(chosen[stretch.slice]))
        # Stable, so that ties go to the lowest index, as they do when a leader selects.
        best[np.argsort(-(mean[stretch.slice] ** 2), kind="stable")[:k] + stretch.start] = True
    return float(np.count_nonzero(best & chosen)) / max(1, int(np.count_nonzero(best)))


class Clients:
    """All clients of a task, which train one after the other in one model.

    Parameters
    ----------
    task : Task
    clients, seed : int
    training : mapping
        Arguments of :meth:`fedcomp.tasks.base.Task.train`.
    dense : DensityPolicy, optional
        Decides per tensor what travels dense.
    lossless : bool
        Whether the models themselves are sent, not differences.

    Raises
    ------
    ConfigError
        When the model has buffers that travel outside the vector (statistics, counters): run it on an engine.
    """

    def __init__(
        self,
        task: Task,
        clients: int,
        seed: int,
        training: Mapping[str, Any],
        *,
        dense: DensityPolicy | None = None,
        lossless: bool = False,
    ) -> None:
        self.task, self.seed, self.training = task, seed, training
        self.model = task.model(seed)
        # Views of the one model's own memory: a client's training starts by copying the shared model into them.
        self.views = {name: tensor.detach().numpy() for name, tensor in self.model.state_dict().items()}
        self.layout = Layout.of(self.views, dense, cast_floats=not lossless)
        if self.layout.exact:
            first, count = self.layout.exact[0].name, len(self.layout.exact)
            run_it_on_an_engine(f"only weights are trained, not the model's {count} buffers, first {first!r}")
        self.data = [task.client(i, clients) for i in range(clients)]

    @property
    def vector(self) -> Vector:
        """What the model holds now."""
        return self.layout.flatten(self.views)

    def load(self, vector: Vector) -> None:
        """Put a vector into the model."""
        for t in self.layout.tensors:
            self.views[t.name].reshape(-1)[...] = vector[t.slice]

    def train(self, number: int, client: int, vector: Vector) -> Vector:
        """Return the model that ``client`` makes of the shared one in round ``number``."""
        self.load(vector)
        # The key that a client app makes of its message: same batches, same bits.
        key = Key(self.seed, "batches", number, client)
        self.task.train(self.model, self.data[client], key=key, **self.training)
        return self.vector

    def evaluate(self, vector: Vector, *, held_out: bool = False) -> tuple[float, float]:
        """Return a model's loss on all training examples, or on the held-out test split, and its accuracy on that."""
        self.load(vector)
        found = self.task.evaluate(self.model, self.task.test)
        loss = (found if held_out else self.task.evaluate(self.model, self.task.train_split))["loss"]
        return float(loss), float(found[self.task.metric])

    def arrays(self, vector: Vector) -> dict[str, NDArray[Any]]:
        """Return a vector as named arrays."""
        return {name: array.copy() for name, array in self.layout.unflatten(vector).items()}


_WITHOUT_MESSAGES: Final[Mapping[str, Any]] = {
    "fraction": 1.0,
    "downlink": "",
    "coder": "convolutions",
    "adapters": False,
    "first_model_at_nodes": False,
}
"""The one value that settings of a system may have here."""


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
        The settings ``inner`` and ``inner.*`` of the server's strategy: empty for FedAvg, or another weighted mean.
    everywhere : bool
        Leave a strategy's moments to themselves on all coordinates, as Flower does and the drop-in pair does not; see
        :mod:`fedcomp.strategies.adaptive`.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    last : int
        The last so many rounds are all evaluated, whatever ``every`` says.
    held_out : bool
        Report the loss on the held-out test split instead of that on all training examples.
    private : callable, optional
        Makes the private strategy whose rule the rounds are made by, with a ledger of its own.
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
    last: int = 1
    held_out: bool = False
    private: Callable[[], PrivateStrategy] | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> tuple[Plan, Program]:
        """Return the plan and the program of a run of a system, so that it runs here as it would on an engine.

        Raises
        ------
        ConfigError
            When the spec asks for what only messages can do: nodes that are quiet or measure, cohorts, a compressed
            downlink, an inner strategy that is no weighted mean; and for a coded system, and a private one that is not
            in the drop-in pair: a plain mean would be all that is left of them.
        """
        system = get_system(spec.system)
        settings = system.resolve(spec.settings)
        strategy = system.build(settings, spec.seed)
        if system.needs or isinstance(strategy, Conditional | ForwardGradients):
            run_it_on_an_engine(f"nobody is asked what {system.title} asks")
        private = isinstance(strategy, Compressed) and isinstance(strategy.inner, PrivateStrategy)
        if (system.private and not private) or isinstance(strategy, CodedFedAvg | GradientCoded):
            run_it_on_an_engine(f"{system.title} would be a plain mean")
        for key, only in _WITHOUT_MESSAGES.items():
            if settings.get(key, only) != only:
                run_it_on_an_engine(f"{key} is {only!r}, not {settings[key]!r}")
        server = {key: value for key, value in settings.items() if key.startswith(INNER_PREFIX)}
        if settings["inner"] != "fedavg" or server:
            server = {"inner": settings["inner"], **server}
        # FedAvg alone is the one row whose strategy drives no program: clients send their models.
        program = strategy.system if isinstance(strategy, Server) else Pair(Identity())
        plan = cls(
            get_task(spec.task, **below(settings, TASK_PREFIX)),
            spec.clients,
            spec.rounds,
            spec.seed,
            # Zero is what training does anyway; the messages leave it out, too.
            {key: settings[key] for key in TRAINING if settings[key]},
            int(settings["evaluate_every"]),
            server,
            policy=getattr(strategy, "policy", None),
            private=(lambda: system.build(settings, spec.seed).inner) if private else None,  # type: ignore[attr-defined]
        )
        return plan, program


@dataclass(frozen=True)
class Point:
    """The global model after some round.

    Attributes
    ----------
    round : int
        0 is the initial model.
    loss : float
        Mean objective on all training examples, in nats for classification; on the test split where the plan says so.
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
    exchanges : list of Cost
        One per round.
    diverged : int or None
        The round whose updates were not finite: training ended there, and the last loss is infinite.
    steps : list of float
        Per round, the share of the server's step, squared, on coordinates of which nothing arrived.
    statement : Statement, optional
        Of a private run: what may be said about it. A budget or a cap may have ended it before its last round.
    """

    arrays: dict[str, NDArray[Any]]
    points: list[Point]
    exchanges: list[Cost]
    diverged: int | None = None
    steps: list[float] = field(default_factory=list)
    statement: Statement | None = None

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
        """Bytes of all frames from all clients, as they are sent."""
        return sum(e.uplink for e in self.exchanges)

    @property
    def downlink(self) -> int:
        """Bytes of the frames that carry every mean to every client."""
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


def simulate(plan: Plan, system: Program, *, look: Callable[[Seen], None] | None = None) -> Outcome:
    """Run ``plan`` with ``system``; ``look`` is shown every round.

    Raises
    ------
    ConfigError
        When the model has buffers that travel outside the vector (statistics, counters): run it on an engine.
    """
    clients = Clients(plan.task, plan.clients, plan.seed, plan.training, dense=plan.policy, lossless=system.whole)
    weights = [len(split) for split in clients.data]
    start = clients.vector
    rule, longest = None if plan.private is None else plan.private(), None
    if rule is not None:
        rule.declare(plan.clients)
        # Messages fill frames up to one length, but those that were noised before they were encoded.
        if rule.pad and privatised(system.codecs[0]) is None:
            longest = system.codecs[0].longest(clients.layout)
    rounds = Rounds(system, clients.layout, start, clients.train, weights.__getitem__, plan.clients, plan.seed, rule)
    server, local, out = _Server(plan, clients.layout), rounds.local, Outcome({}, [], [])

    def point(number: int, loss: float, accuracy: float) -> None:
        out.points.append(Point(number, loss, accuracy, out.uplink, out.downlink))

    point(0, *clients.evaluate(start, held_out=plan.held_out))
    for number in range(1, plan.rounds + 1):
        due = number > plan.rounds - max(1, plan.last) or (plan.every > 0 and number % plan.every == 0)
        before, drawn = local.model, rounds.drawn(number)
        if drawn is None:
            if out.final.round < number - 1:
                point(number - 1, *clients.evaluate(before, held_out=plan.held_out))
            break
        try:
            # A diverging training overflows, which is found here and reported as a result.
            with np.errstate(over="ignore", invalid="ignore"):
                step, cost = rounds.step(number, drawn)
                local.model = server.step(number, before, local.model, sparse=step.support and not plan.everywhere)
            if not np.isfinite(local.model).all():
                raise NonFiniteUpdate("the aggregate is not finite")
        except NonFiniteUpdate:
            # The last model that was one is kept.
            local.model, out.diverged = before, number
            point(number, math.inf, math.nan)
            break
        if look is not None:
            look(rounds.seen(number))
        if due and isinstance(system, SharedSupport):
            cost = replace(cost, overlap=overlap(system, rounds.seen(number), weights))
        if longest is not None:
            cost = replace(cost, uplink=len(cost.frames) * (longest + FILLED))
        out.exchanges.append(cost)
        if due:
            point(number, *clients.evaluate(local.model, held_out=plan.held_out))
    if out.diverged is None:
        out.steps = server.stale
    if rule is not None:
        out.statement = rule.statement()
    out.arrays = clients.arrays(local.model)
    return out


def measured(plan: Plan, system: Program) -> dict[str, Any]:
    """Run ``plan`` with ``system`` and return figures as plain data, for a sweep.

    Returns
    -------
    dict
        ``loss`` (infinite when it diverged) and ``accuracy`` of the final model, the loss on all training examples
        unless the plan says otherwise, the accuracy on the test split; ``score``, the mean accuracy in percent over the
        last five evaluations; ``uplink``, ``downlink``: bytes of all frames; ``kept``, ``union``, ``overlap``: means
        over rounds (and clients) of the compressible values a client sent, of the coordinates at which the mean is not
        zero, and of 1 - q/k of the shared support; ``build_up``: the largest, over rounds, of those coordinates over
        the most values one client sent, at most 1 on a shared support; ``stale``: mean share of the server's step,
        squared, on coordinates of which nothing arrived; ``diverged``: the round in which updates were not finite, or
        None; ``points``: round, loss and uplink bytes so far of every evaluation; ``rounds`` made; ``frames``, how many
        there were, and ``bare`` and ``largest``, the bytes of all and of the longest before they are filled up to one
        length; ``epsilon``, infinite without a promise, and the ``statement``.
    """
    with quiet():
        out = simulate(plan, system)
    sizes = [size for cost in out.exchanges for size in cost.frames]
    return {
        "loss": out.final.loss,
        "accuracy": out.final.accuracy,
        "score": _mean([100 * point.accuracy for point in out.points[-5:]]),
        **{
            name: getattr(out, name) for name in ("uplink", "downlink", "kept", "union", "overlap", "diverged", "stale")
        },
        "build_up": max((e.union / max(1, *e.kept) for e in out.exchanges), default=math.nan),
        "points": [(float(p.round), p.loss, float(p.uplink)) for p in out.points],
        "rounds": len(out.exchanges),
        "frames": len(sizes),
        "bare": sum(sizes),
        "largest": max(sizes, default=0),
        "epsilon": math.inf if out.statement is None else out.statement.epsilon,
        "statement": {} if out.statement is None else out.statement.to_json(),
    }


class _Server:
    """What the server makes of the mean model: FedAvg takes it as it is, another weighted mean makes its own step.

    Raises
    ------
    ConfigError
        For another strategy.
    """

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.layout = layout
        self.inner = make_inner({"fraction_evaluate": 0.0, **plan.server}) if plan.server else None
        self.stale: list[float] = []
        if self.inner is not None and not is_mean(self.inner):
            run_it_on_an_engine(f"inner is a weighted mean, not {type(self.inner).__name__}")

    def step(self, number: int, model: Vector, mean: Vector, *, sparse: bool) -> Vector:
        """Return the model after round ``number``; of a ``sparse`` mean moments move where something arrived."""
        if self.inner is None:
            return mean
        named = self.layout.unflatten(model)
        arrived = ("arrays", to_record(self.layout.unflatten(mean)))
        # Asked for a message that nobody is sent: so it learns the model that it steps from.
        with InProcessGrid(ClientApp(), 1) as grid, asked_for(self.inner, 1):
            (asked,) = self.inner.configure_train(number, to_record(named), ConfigRecord(), grid)
            arrays, _ = aggregate_once(self.inner, number, arrived, asked, (), sparse=sparse)
        assert arrays is not None
        after = self.layout.flatten(to_arrays(restore_dtypes(arrays, named, [])))
        # In float64: the squares of small float32 steps would underflow.
        step = np.square(after - model, dtype=np.float64)
        # Where no update arrived, the mean is the model before.
        self.stale.append(float(step[mean == model].sum() / step.sum()) if step.any() else 0.0)
        return after


@dataclass(frozen=True)
class Beside:
    """How a run with messages differs from the same run without.

    Attributes
    ----------
    model, frames : int
        Bytes of the final models that differ, and the difference of the bytes of all frames.
    epsilon : float
        The difference of what is promised; 0 where nothing is.
    """

    model: int
    frames: int
    epsilon: float


def beside(results: Mapping[str, RunResult], caption: str) -> tuple[Table, dict[str, Beside]]:
    """Repeat runs that were made with messages without them; return the table of both sides, and how they differ."""
    rows: list[list[Any]] = []
    found: dict[str, Beside] = {}
    for label, result in results.items():
        out, sent, said = simulate(*Plan.of(result.spec)), result.uplink_payload_bytes, 0.0
        if out.statement is not None:
            said = abs(out.statement.epsilon - float(result.notes["privacy"]["epsilon"]))
        found[label] = Beside(different_bytes(result.arrays, out.arrays), abs(sent - out.uplink), said)
        rows.append([label, result.spec.rounds, sent, out.uplink, result.uplink_wire_bytes, found[label].model])
    columns = (
        "system",
        "rounds",
        "frames in the ledger, bytes",
        "frames simulated, bytes",
        "whole messages, bytes",
        "model bytes that differ",
    )
    return Table("The same runs with messages and without", columns, rows, caption), found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
