"""Private federated averaging without messages: the strategy's own round, with vectors in place of replies.

For grids of trainings with hundreds of clients. The clients train and encode as :mod:`fedcomp.experiments.central`
says; who is drawn, what is admitted, the ledger, the noise and the step are the strategy's own, through the methods
that the drop-in pair calls. A run that is also made with messages ends in the same model bit for bit, with the same
bytes of frames and the same statement; ``tests/experiments/test_private_central.py`` and the claims of the experiment
``topagg`` check it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.parts import TASK_PREFIX, below
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import TRAINING, get_system
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import FILLED

if TYPE_CHECKING:
    from flwr.app import Context, Message

    from fedcomp.privacy.statement import Statement

__all__ = ["PrivateCell", "PrivateOutcome", "Trained", "quiet", "simulate"]

Arrays = dict[str, NDArray[Any]]


@dataclass
class PrivateOutcome:
    """What a simulated private run came to.

    Attributes
    ----------
    arrays : dict of str to ndarray
        The final model.
    accuracy, train_accuracy, loss : float
        Of the final model: on the test split, and on all training examples. The loss is infinite where it diverged.
    uplink, bare : int
        Bytes of all clients' frames, as they are sent and without their padding.
    frames, largest : int
        How many frames there were, and the bytes of the longest without padding.
    rounds : int
        Rounds made; fewer than asked where a budget or a cap ended the run.
    statement : Statement
    """

    arrays: Arrays
    accuracy: float
    train_accuracy: float
    loss: float
    uplink: int
    bare: int
    frames: int
    largest: int
    rounds: int
    statement: Statement


def simulate(spec: RunSpec) -> PrivateOutcome:
    """Run ``spec``, whose system is a private row in the drop-in pair, without messages.

    Raises
    ------
    ConfigError
        When the system is not private, has no codec, or asks for what only messages can do: a compressed downlink,
        a codec with memory, buffers beside the vector.
    """
    from flwr.app import ConfigRecord

    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.metered import partition_lookup
    from fedcomp.flower.records import to_arrays, to_record
    from fedcomp.strategies.compressed import Compressed
    from fedcomp.strategies.private.strategy import PrivateStrategy
    from fedcomp.tasks import get_task

    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    pair = system.make_strategy(settings, spec.seed)
    if not isinstance(pair, Compressed) or not isinstance(pair.inner, PrivateStrategy):
        raise ConfigError(f"{spec.system!r} with these settings is no private system in the drop-in pair")
    if settings["downlink"]:
        raise ConfigError(f"without messages there is no downlink={settings['downlink']!r}; run it on an engine")
    strategy, codec = pair.inner, pair.codec
    if codec.remembers:
        raise ConfigError(f"{codec!r} keeps a memory on its client, which is not simulated here; run it on an engine")
    strategy.declare(spec.clients)
    task = get_task(spec.task, **below(settings, TASK_PREFIX))
    model = task.model(spec.seed)
    views = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    layout = Layout.of(views)
    if layout.exact:
        raise ConfigError(f"the model has buffers that are no weights, first {layout.exact[0].name!r}; use an engine")
    training: dict[str, Any] = {key: settings[key] for key in TRAINING if settings[key]}
    data = [task.client(i, spec.clients) for i in range(spec.clients)]
    arrays: Arrays = {name: view.copy() for name, view in views.items()}
    sizes: list[int] = []
    longest = codec.longest(layout) if strategy.pad else None
    padded = None if longest is None else longest + FILLED

    def load() -> None:
        for name, view in views.items():
            view[...] = arrays[name]

    def updates(
        number: int, drawn: list[int], partition: Callable[[int], int | None]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        before = layout.flatten(arrays)
        for node in drawn:
            client = partition(node)
            assert client is not None
            load()
            task.train(model, data[client], key=Key(spec.seed, "batches", number, client), **training)
            vector = layout.flatten(views)
            if not codec.lossless:
                vector -= before
            key = Key(spec.seed, "uplink", number, client)
            try:
                frame, _ = codec.encode(Update(vector, layout), codec.init(layout), key)
            except NonFiniteUpdate:
                continue  # with messages the client answers with an error
            sizes.append(len(frame))
            decoded = codec.decode(codec.verify(frame, layout, key), layout)
            yield node, decoded - before if codec.lossless else decoded

    made = 0
    # Nobody answers on this grid, and nobody is asked: it knows who there is.
    with InProcessGrid(_unheard, spec.clients, seed=spec.seed) as grid:
        partition = partition_lookup(grid)
        for number in range(1, spec.rounds + 1):
            if strategy.over(number):
                break
            record = to_record(arrays)
            strategy.adopt(record, layout)
            messages = strategy.ask(number, record, ConfigRecord({}), grid)
            if not messages:
                break
            drawn = [message.metadata.dst_node_id for message in messages]
            result, _ = strategy.aggregate_updates(number, updates(number, drawn, partition), layout)
            made = number
            if result is not None:
                arrays = to_arrays(result)
    load()
    test, train = task.evaluate(model, task.test), task.evaluate(model, task.train_split)
    return PrivateOutcome(
        {name: array.copy() for name, array in arrays.items()},
        float(test[task.metric]),
        float(train[task.metric]),
        float(train["loss"]) if math.isfinite(train["loss"]) else math.inf,
        sum(sizes) if padded is None else len(sizes) * padded,
        sum(sizes),
        len(sizes),
        max(sizes, default=0),
        made,
        strategy.statement(),
    )


@dataclass(frozen=True)
class PrivateCell:
    """One training of a private system as plain data, for :func:`fedcomp.experiments.grid.run_cells`.

    Attributes
    ----------
    name : str
        Unique within the run.
    system : str
    task : str
    clients, rounds, seed : int
    settings : mapping
        As of a :class:`~fedcomp.experiments.spec.RunSpec`.
    """

    name: str
    system: str
    task: str
    clients: int
    rounds: int
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> RunSpec:
        """Return the run."""
        return RunSpec(
            system=self.system,
            label=self.name,
            task=self.task,
            engine="inprocess",
            rounds=self.rounds,
            clients=self.clients,
            seed=self.seed,
            settings=dict(self.settings),
        )

    def run(self) -> Trained:
        """Train."""
        with quiet():
            if not get_system(self.system).private:
                return _without_privacy(self.spec())
            out = simulate(self.spec())
        return Trained(
            accuracy=out.accuracy,
            train_accuracy=out.train_accuracy,
            loss=out.loss,
            uplink=out.uplink,
            bare=out.bare,
            frames=out.frames,
            largest=out.largest,
            rounds=out.rounds,
            statement=out.statement.to_json(),
        )

    def read(self, document: Mapping[str, Any]) -> Trained:
        """Read what was kept of this cell."""
        return Trained.from_json(document)


@dataclass(frozen=True)
class Trained:
    """What a cell came to; see :class:`PrivateOutcome`. ``statement`` is empty where nothing was promised."""

    accuracy: float
    train_accuracy: float
    loss: float
    uplink: int
    bare: int
    frames: int
    largest: int
    rounds: int
    statement: Mapping[str, Any] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """The guarantee; infinite without one."""
        value = self.statement.get("epsilon", math.inf)
        return math.inf if isinstance(value, str) else float(value)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Trained:
        """Read what ``asdict`` gave and JSON kept."""
        found = cls(**{f.name: document[f.name] for f in fields(cls)})
        missing = {"accuracy": math.nan, "train_accuracy": math.nan, "loss": math.inf}
        gone = {name: value for name, value in missing.items() if getattr(found, name) is None}
        return replace(found, **gone)  # type: ignore[arg-type]


def _without_privacy(spec: RunSpec) -> Trained:
    """Train a row that promises nothing, as :func:`fedcomp.experiments.central.simulate` does."""
    from fedcomp.experiments.central import Plan
    from fedcomp.experiments.central import simulate as ordinary

    plan, scheme = Plan.of(spec)
    out = ordinary(plan, scheme)
    model = plan.task.model(spec.seed)
    for name, tensor in model.state_dict().items():
        tensor.numpy()[...] = out.arrays[name]
    train = plan.task.evaluate(model, plan.task.train_split)
    count = spec.clients * len(out.exchanges)
    final = out.final
    return Trained(
        accuracy=final.accuracy,
        train_accuracy=float(train[plan.task.metric]),
        loss=final.loss,
        uplink=final.uplink,
        bare=final.uplink,
        frames=count,
        largest=max((-(-cost.uplink // spec.clients) for cost in out.exchanges), default=0),
        rounds=len(out.exchanges),
    )


def _unheard(msg: Message, context: Context) -> Message:
    raise AssertionError("no message is sent in a simulation without messages")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Flower's two lines a round, and its warning that nothing is evaluated, out of a grid's output."""
    import flwr.serverapp  # noqa: F401  # sets the level of its logger when it is imported

    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.ERROR)
    try:
        yield
    finally:
        flower.setLevel(before)
