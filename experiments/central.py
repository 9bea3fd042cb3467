"""Federated averaging without messages: many clients, one process, the same arithmetic.

For grids too large to send as Flower messages, and for methods that cannot be sent at all because they need to see
every client's update at once. Every client trains as :mod:`fedcomp.clients.app` does and encodes as
:mod:`fedcomp.clients.compressed` does. Then frames are added as :class:`fedcomp.strategies.compressed.Compressed` adds
them (:func:`simulate`); or, of a private system, who is drawn, what is admitted, the ledger, the noise and the step are
the strategy's own, through the methods that the drop-in pair calls (:func:`simulate_private`). A system that runs both
ways ends in the same model bit for bit, with the same bytes of frames and the same statement
(``tests/experiments/test_central.py``, ``test_private_central.py`` and the claims of ``sparsifiers`` and ``topagg``).
What is left out is what does not change the model: messages, acknowledgements, lost replies.

Why the in-process grid does not do this: ``python -m experiments.bench messages`` measures what records alone cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedcomp.codecs import Codec, Identity, get_codec
from fedcomp.codecs.scalecom import ScaleCom
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.findings import Table, different_bytes
from fedcomp.experiments.schemes import Learned, Led, RoundExchange, RoundScheme, run_it_on_an_engine, scheme_of
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.systems import get_system
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.layout import DensityPolicy, EndsDense, Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.strategies.adaptive import has_moments
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.lgc import LearnedGradients
from fedcomp.strategies.means import aggregate_once
from fedcomp.strategies.parts import INNER_PREFIX, TASK_PREFIX, below, make_inner, policy
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.strategies.system import TRAINING
from fedcomp.tasks import get_task
from fedcomp.wire import FILLED

if TYPE_CHECKING:
    from fedcomp.privacy.statement import Statement
    from fedcomp.tasks.base import Task


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
        self.task, self.seed, self.training, self.lossless = task, seed, training, lossless
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

    def update(self, client: int, number: int, vector: Vector) -> Update:
        """Return what ``client`` makes of the shared model in round ``number``: a difference, or the model itself."""
        self.load(vector)
        # The key that a client app makes of its message: same batches, same bits.
        key = Key(self.seed, "batches", number, client)
        self.task.train(self.model, self.data[client], key=key, **self.training)
        return Update(self.vector if self.lossless else self.vector - vector, self.layout)

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
    "server_lr": 1.0,
    "warmup_rounds": 0,
    "common": "turn",
    "coder": "convolutions",
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
        The settings ``inner`` and ``inner.*`` of the server's strategy: empty for FedAvg, or one with moments.
    everywhere : bool
        Leave a strategy's moments to themselves on all coordinates, as Flower does and the drop-in pair does not; see
        :mod:`fedcomp.strategies.adaptive`.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    last : int
        The last so many rounds are all evaluated, whatever ``every`` says.
    held_out : bool
        Report the loss on the held-out test split instead of that on all training examples.
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

    @classmethod
    def of(cls, spec: RunSpec) -> tuple[Plan, RoundScheme]:
        """Return the plan and the scheme of a run of a system, so that it runs here as it would on an engine.

        Raises
        ------
        ConfigError
            When the spec asks for what only messages can do: nodes that are quiet or measure, cohorts, a compressed
            downlink, an inner strategy that is neither FedAvg nor one with moments, a shared support or basis with a
            step size or a warm-up, the support of the round before.
        """
        system = get_system(spec.system)
        settings = system.resolve(spec.settings)
        strategy = system.build(settings, spec.seed)
        if system.needs or isinstance(strategy, Conditional | ForwardGradients):
            run_it_on_an_engine(f"nobody is asked what {system.title} asks")
        stages = isinstance(strategy, LearnedGradients)
        for key, only in _WITHOUT_MESSAGES.items():
            if settings.get(key, only) != only and not (stages and key == "warmup_rounds"):
                run_it_on_an_engine(f"{key} is {only!r}, not {settings[key]!r}")
        server = {key: value for key, value in settings.items() if key.startswith(INNER_PREFIX)}
        if settings["inner"] != "fedavg" or server:
            server = {"inner": settings["inner"], **server}
        codec = getattr(strategy, "codec", Identity())
        every = int(settings["evaluate_every"])
        task = get_task(spec.task, **below(settings, TASK_PREFIX))
        dense = strategy.policy if isinstance(strategy, Compressed) else policy(settings)
        scheme = scheme_of(codec)
        if isinstance(strategy, LearnedGradients):
            until = strategy.warmup_rounds + strategy.training_rounds
            scheme, dense = Learned(strategy.codec, (strategy.warmup_rounds, until), strategy.training), EndsDense()
        plan = cls(task, spec.clients, spec.rounds, spec.seed, _training(settings), every, server, policy=dense)
        return plan, scheme


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
    exchanges : list
        One per round, without vectors and states.
    diverged : int or None
        The round whose updates were not finite: training ended there, and the last loss is infinite.
    steps : list of float
        Per round, the share of the server's step, squared, on coordinates of which nothing arrived.
    """

    arrays: dict[str, NDArray[Any]]
    points: list[Point]
    exchanges: list[RoundExchange]
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


def simulate(plan: Plan, scheme: RoundScheme) -> Outcome:
    """Run ``plan`` with ``scheme``.

    Raises
    ------
    ConfigError
        When the model has buffers that travel outside the vector (statistics, counters): run it on an engine.
    """
    clients = Clients(plan.task, plan.clients, plan.seed, plan.training, dense=plan.policy, lossless=scheme.lossless)
    weights = [len(split) for split in clients.data]
    states, vector = scheme.start(clients.layout, plan.clients), clients.vector
    server = _Server(plan, clients.layout, sparse=scheme.codec.sparse(clients.layout) and not plan.everywhere)
    out = Outcome({}, [], [])

    def look(number: int, loss: float, accuracy: float) -> None:
        out.points.append(Point(number, loss, accuracy, out.uplink, out.downlink))

    look(0, *clients.evaluate(vector, held_out=plan.held_out))
    for number in range(1, plan.rounds + 1):
        updates = [clients.update(i, number, vector) for i in range(plan.clients)]
        due = number > plan.rounds - max(1, plan.last) or (plan.every > 0 and number % plan.every == 0)
        try:
            # A diverging training overflows, which is found below and reported as a result.
            with np.errstate(over="ignore", invalid="ignore"):
                done = scheme.round(updates, weights, states, Key(plan.seed, "uplink", number), look=due)
                after = server.step(number, vector, done.mean if scheme.lossless else vector + done.mean)
            if not np.isfinite(after).all():
                raise NonFiniteUpdate("the aggregate is not finite")
        except NonFiniteUpdate:
            # The last model that was one is kept.
            out.diverged = number
            look(number, math.inf, math.nan)
            break
        vector, states = after, done.states
        # A vector a round, and the states of all clients, would fill the memory.
        out.exchanges.append(replace(done, mean=done.mean[:0], states=[]))
        if due:
            look(number, *clients.evaluate(vector, held_out=plan.held_out))
    else:
        out.steps = server.stale
    out.arrays = clients.arrays(vector)
    return out


def measured(plan: Plan, codec: Mapping[str, Any], *, oracle: bool = False) -> dict[str, Any]:
    """Run ``plan`` with a codec and return figures as plain data, for a sweep.

    Parameters
    ----------
    codec : mapping
        The codec's configuration, as :func:`fedcomp.codecs.get_codec` takes it.
    oracle : bool
        For ScaleCom: select from the mean of all clients.

    Returns
    -------
    dict
        ``loss`` (infinite when it diverged) and ``accuracy`` of the final model, the loss on all training examples
        unless the plan says otherwise, the accuracy on the test split; ``settled``, the mean accuracy over the last
        five evaluations; ``uplink``, ``downlink``: bytes of all frames; ``kept``, ``union``, ``overlap``: means over
        rounds (and clients) of the compressible values a client sent, of the coordinates at which the mean is not zero,
        and of 1 - q/k of the shared support; ``build_up``: the largest, over rounds, of those coordinates over the most
        values one client sent, at most 1 on a shared support; ``stale``: mean share of the server's step, squared, on
        coordinates of which nothing arrived; ``diverged``: the round in which updates were not finite, or None;
        ``points``: round, loss and uplink bytes so far of every evaluation.
    """
    made = get_codec(dict(codec))
    scheme = Led(made, oracle=True) if oracle and isinstance(made, ScaleCom) else scheme_of(made)
    with quiet():
        out = simulate(plan, scheme)
    names = ("uplink", "downlink", "kept", "union", "overlap", "diverged", "settled", "stale")
    return {
        "loss": out.final.loss,
        "accuracy": out.final.accuracy,
        **{name: getattr(out, name) for name in names},
        "build_up": max((e.union / max(1, *e.kept) for e in out.exchanges), default=math.nan),
        "points": [(float(p.round), p.loss, float(p.uplink)) for p in out.points],
    }


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
            run_it_on_an_engine(
                f"inner is 'fedavg' without settings of its own or one with moments, not {type(self.inner).__name__}"
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
        # In float64: the squares of small float32 steps would underflow.
        step = np.square(after - model, dtype=np.float64)
        # Where no update arrived, the mean is the model before.
        self.stale.append(float(step[mean == model].sum() / step.sum()) if step.any() else 0.0)
        return after


@dataclass
class PrivateOutcome:
    """What a simulated private run came to.

    Attributes
    ----------
    arrays : dict of str to ndarray
        The final model.
    loss, accuracy : float
        Of the final model: on all training examples, infinite where it diverged, and on the test split.
    frames : list of int
        Bytes of every frame without its padding.
    padded : int or None
        Bytes of every frame as it is sent, where all are padded to one length.
    rounds : int
        Rounds made; fewer than asked where a budget or a cap ended the run.
    statement : Statement
    """

    arrays: dict[str, NDArray[Any]]
    loss: float
    accuracy: float
    frames: list[int]
    padded: int | None
    rounds: int
    statement: Statement

    @property
    def uplink(self) -> int:
        """Bytes of all frames as they are sent."""
        return sum(self.frames) if self.padded is None else len(self.frames) * self.padded


def simulate_private(spec: RunSpec) -> PrivateOutcome:
    """Run ``spec``, whose system is a private row in the drop-in pair, without messages.

    Raises
    ------
    ConfigError
        When the system is not private, has no codec, or asks for what only messages can do: a compressed downlink,
        a codec with memory, buffers outside the vector.
    """
    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    pair = system.build(settings, spec.seed)
    if not isinstance(pair, Compressed) or not isinstance(pair.inner, PrivateStrategy):
        raise ConfigError(f"{spec.system!r} with these settings is not a private system in the drop-in pair")
    if settings["downlink"]:
        run_it_on_an_engine(f"downlink is '', not {settings['downlink']!r}")
    strategy, codec = pair.inner, pair.codec
    if codec.remembers:
        run_it_on_an_engine(f"private clients have no memory, as {codec!r} needs")
    strategy.declare(spec.clients)
    # A closure, since the layout exists only once the clients below are made.
    strategy.within(lambda arrays, number: layout)
    task = get_task(spec.task, **below(settings, TASK_PREFIX))
    clients = Clients(task, spec.clients, spec.seed, _training(settings), lossless=codec.lossless)
    layout, vector = clients.layout, clients.vector
    frames: list[int] = []
    longest = codec.longest(layout) if strategy.pad else None
    made = 0
    # Nobody answers on this grid, and nobody is asked: it knows who there is.
    with InProcessGrid(_unheard, spec.clients, seed=spec.seed) as grid:
        partition = {grid.node_id_of(p): p for p in grid.partitions}
        for number in range(1, spec.rounds + 1):
            if strategy.over(number):
                break
            record = to_record(layout.unflatten(vector))
            asked = strategy.configure_train(number, record, ConfigRecord({}), grid)
            drawn = [message.metadata.dst_node_id for message in asked]
            trained = ((node, clients.update(partition[node], number, vector)) for node in drawn)
            keys = {node: Key(spec.seed, "uplink", number, partition[node]) for node in drawn}
            result, _ = strategy.aggregate_updates(number, _decoded(trained, keys, codec, vector, frames), layout)
            # Not merely because nobody was drawn: such a round releases its noise, and is paid for, like any other.
            if result is None and not drawn:
                break
            made = number
            if result is not None:
                vector = layout.flatten(to_arrays(result))
    loss, accuracy = clients.evaluate(vector)
    return PrivateOutcome(
        clients.arrays(vector),
        loss if math.isfinite(loss) else math.inf,
        accuracy,
        frames,
        None if longest is None else longest + FILLED,
        made,
        strategy.statement(),
    )


def _decoded(
    trained: Iterator[tuple[int, Update]], keys: Mapping[int, Key], codec: Codec, before: Vector, frames: list[int]
) -> Iterator[tuple[int, Vector]]:
    """Yield by node what the server decodes of each update, one at a time; the frames' lengths go into ``frames``."""
    for node, update in trained:
        try:
            # Codecs with a memory were refused: every message starts from the initial state.
            frame, _ = codec.encode(update, codec.init(update.layout), keys[node])
        except NonFiniteUpdate:
            continue  # with messages the client answers with an error
        frames.append(len(frame))
        decoded = codec.decode(codec.verify(frame, update.layout, keys[node]), update.layout)
        yield node, decoded - before if codec.lossless else decoded


def run(spec: RunSpec) -> dict[str, Any]:
    """Run ``spec`` without messages and return figures as plain data, for a sweep.

    Returns
    -------
    dict
        ``loss`` (infinite when it diverged) and ``accuracy`` of the final model; ``uplink`` and ``bare``: bytes of all
        frames, as sent and without padding; ``frames`` and ``largest``: how many there were, and the bytes of the
        longest without padding; ``rounds`` made; ``epsilon``, infinite without a promise, and the ``statement``.
    """
    with quiet():
        if get_system(spec.system).private:
            found = simulate_private(spec)
            statement = found.statement.to_json()
            epsilon = found.statement.epsilon
            sizes, uplink, loss, accuracy, rounds = found.frames, found.uplink, found.loss, found.accuracy, found.rounds
        else:
            out = simulate(*Plan.of(spec))
            statement, epsilon = {}, math.inf
            # Only the sum over the clients is known here: each is given an equal share, rounded up.
            sizes = [-(-cost.uplink // spec.clients) for cost in out.exchanges for _ in range(spec.clients)]
            uplink, loss, accuracy, rounds = out.uplink, out.final.loss, out.final.accuracy, len(out.exchanges)
    return {
        "loss": loss,
        "accuracy": accuracy,
        "uplink": uplink,
        "bare": sum(sizes) if statement else uplink,
        "frames": len(sizes),
        "largest": max(sizes, default=0),
        "rounds": rounds,
        "epsilon": epsilon,
        "statement": statement,
    }


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
        said, sent = 0.0, result.uplink_payload_bytes
        out: Outcome | PrivateOutcome
        if "privacy" in result.notes:
            out = simulate_private(result.spec)
            said = abs(out.statement.epsilon - float(result.notes["privacy"]["epsilon"]))
        else:
            out = simulate(*Plan.of(result.spec))
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


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Zero is what training does anyway; the messages leave it out, too.
    return {key: settings[key] for key in TRAINING if settings[key]}


def _unheard(message: Message, context: Context) -> Message:
    raise AssertionError("no message is sent in a simulation without messages")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
