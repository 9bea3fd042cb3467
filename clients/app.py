"""The generic ClientApp: trains and evaluates any task that the server's messages name, on every engine.

Everything a client must know arrives in the message's ``config`` record, so that the bytes are the same on every
engine; the node itself only knows which partition it holds. Handlers keep nothing between messages but a cache of data
that can be rebuilt at any time: deployments start a fresh process for each message.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcomp.clients.client import client
from fedcomp.clients.coded.linear import LinearRows, linear_device
from fedcomp.clients.compressed import compression
from fedcomp.clients.conditional import conditional
from fedcomp.clients.edge.node_config import OWN_BUDGET
from fedcomp.clients.forward import forward_gradients
from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.clients.gossip import gossip_node
from fedcomp.clients.optimizer import kept
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.clients.private.dpsgd import Trainee, record_dp
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.flower.payload import models, put_node
from fedcomp.flower.records import config_in, to_arrays, to_record
from fedcomp.rng import Key

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedcomp.clients.gossip import GossipSetup
    from fedcomp.forward.evaluate import Objective
    from fedcomp.graphs.base import GraphPart
    from fedcomp.systems.private.datalens import Teachers
    from fedcomp.tasks.base import Task
    from fedcomp.tasks.generator import Ensemble
    from fedcomp.tasks.graph import GraphTask
    from fedcomp.tasks.local import LocalObjective

_app = ClientApp()

TASK_PREFIX = "task."


@_app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the message's model on this node's partition; reply the model, the loss and the number of examples.

    A partition without examples raises :class:`fedcomp.tasks.base.EmptyPartition`: the server gets an error reply with
    its advice, and goes on with the other clients.
    """
    job = NodeJob.read(msg, context)
    task = job.task()
    data = task.client(job.partition, job.clients)
    name, model = job.model(task, msg)
    # torch, which a node that only answers a roll call does without
    from fedcomp.factors.capture import capture

    # A torch optimizer, where a task keeps one.
    optimizer: Any = task.optimizer(model, **job.rates()) if task.options.get("kept") else None
    with capture(model), nullcontext() if optimizer is None else kept(context, optimizer):
        metrics = task.train(model, data, key=job.key("batches"), optimizer=optimizer, **job.training())
    reply = RecordDict({name: _to_record(model), "metrics": _metrics(metrics)})
    put_node(reply, job.partition)
    return Message(reply, reply_to=msg)


@_app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the message's model on this node's share of the held-out examples; reply the metrics."""
    job = NodeJob.read(msg, context)
    task = job.task()
    _, model = job.model(task, msg)
    metrics = task.evaluate(model, task.client_test(job.partition, job.clients))
    reply = RecordDict({"metrics": _metrics(metrics)})
    put_node(reply, job.partition)
    return Message(reply, reply_to=msg)


@_app.query()
def query(msg: Message, context: Context) -> Message:
    """Answer the roll call: which partition this node holds. Loads nothing."""
    reply = RecordDict()
    put_node(reply, NodeJob.read(msg, context).partition)
    return Message(reply, reply_to=msg)


def first_model(msg: Message, context: Context) -> ArrayRecord:
    """Return the model that the run begins with, for a server that sends its digest alone."""
    job = NodeJob.read(msg, context)
    return _to_record(job.task().model(job.seed))


def own_loss(msg: Message, context: Context) -> float:
    """Return the loss of the message's model on this node's own examples, for conditional rounds."""
    job = NodeJob.read(msg, context)
    task = job.task()
    _, model = job.model(task, msg)
    return float(task.evaluate(model, task.client(job.partition, job.clients))["loss"])


def measured(msg: Message, context: Context) -> Objective:
    """Return the loss of the message's model on a batch of this node's examples, for forward gradients."""
    from fedcomp.forward.evaluate import Objective
    from fedcomp.tasks.base import EmptyPartition, single_thread

    job = NodeJob.read(msg, context)
    task = job.task()
    _, model = job.model(task, msg)
    data, size = task.client(job.partition, job.clients), _integer(job.config, "batch_size", 0)
    if not len(data):
        raise EmptyPartition(f"partition {job.partition} holds no example to measure a loss on")
    # As training does: how many threads add something up must not change its bits, and small models gain nothing.
    with single_thread():
        x, y = next(data.batches(batch_size=size, key=job.key("batches"))) if size else data.tensors
    model.train()

    def loss(called: Any) -> Tensor:
        with single_thread():
            # Called as the model is, with other parameters.
            return task.objective(model, task.outputs(called, x), y)

    return Objective(model, loss, len(y))


def rows_of_task(msg: Message, context: Context, partitions: int) -> LinearRows:
    """Return this node's own examples for coded gradient descent: the first ``partitions`` nodes hold the data."""
    from fedcomp.tasks.linear import linear_rows

    job = NodeJob.read(msg, context)
    task = job.task()
    return LinearRows(*linear_rows(task, task.client(job.partition, partitions)), task.linear_loss)


def local_objective(msg: Message, context: Context, setup: GossipSetup) -> LocalObjective:
    """Return this node's own part of the task, for decentralised learning; a batch size of 0 takes all examples."""
    job = NodeJob.read(msg, context)
    return _objective(
        job.task(), job.partition, job.clients, job.seed, _integer(job.config, "batch_size", 0), setup.dtype
    )


@functools.lru_cache(maxsize=64)
def _objective(task: Task, partition: int, clients: int, seed: int, batch_size: int, dtype: str) -> LocalObjective:
    # It holds a cast copy of the data and a model for scratch, which in one process would be made for every message.
    from fedcomp.tasks.local import LocalObjective

    return LocalObjective(task, partition, clients, seed=seed, batch_size=batch_size, dtype=dtype)


def teachers(msg: Message, context: Context, request: Teachers) -> Ensemble:
    """Return this node's teachers, each with its own part of the node's records, for a DataLens run."""
    job = NodeJob.read(msg, context)
    return _ensemble(
        job.task(), job.partition, job.clients, request.teachers, request.lr, request.decay, request.batch, request.seed
    )


@functools.lru_cache(maxsize=64)
def _ensemble(
    task: Task, partition: int, clients: int, count: int, lr: float, decay: float, batch: int, seed: int
) -> Ensemble:
    # Who holds which record is hashed record by record, which in one process would be done for every message.
    from fedcomp.tasks.gan import Adam
    from fedcomp.tasks.generator import GeneratorTask

    if not isinstance(task, GeneratorTask):
        raise ConfigError(
            f"task {task.name!r} has no generator, and so no teachers; use one such as 'digits-generator'"
        )
    return task.ensemble(partition, clients, count, Adam(lr, decay), batch=batch, key=Key(seed, "datalens"))


def graph_part(msg: Message, context: Context) -> GraphPart:
    """Return what this node owns of the task's graph; the task keeps it for the next message."""
    job = NodeJob.read(msg, context)
    return _graph(job.task()).shared(job.clients).part(job.partition)


def graph_learner(msg: Message, context: Context) -> Learner:
    """Return the message's model, and how the task has it learn."""
    job = NodeJob.read(msg, context)
    task = _graph(job.task())
    name, model = job.model(task, msg)
    return Learner(name, model, functools.partial(task.objective, model), task.correct, job.rates())


def _graph(task: Task) -> GraphTask:
    from fedcomp.tasks.graph import GraphTask

    if not isinstance(task, GraphTask):
        raise ConfigError(
            f"task {task.name!r} has no graph, so clients have no rows to exchange; use one such as 'digits-graph'"
        )
    return task


def trainee(msg: Message, context: Context) -> Trainee:
    """Return the message's model and this node's records, for training with noise."""
    job = NodeJob.read(msg, context)
    # The one kind of training that a node with a budget of its own takes part in.
    task = job.task(noised=True)
    data = task.client(job.partition, job.clients)
    name, model = job.model(task, msg)
    # How training without noise would be limited is left out: the plan's steps and rate say it.
    return Trainee(name, model, task, data, job.key("batches"), **job.rates())


app = client(
    _app,
    # What it learns is what a run's settings name.
    compression(i_know_inputs_are_visible=True, first_model=first_model),
    conditional(own_loss),
    forward_gradients(measured, at_once=16),
    record_dp(trainee),
    linear_device(rows_of_task),
    gossip_node(local_objective),
    datalens_teachers(teachers),
    graph_owner(graph_part, graph_learner),
)


@dataclass(frozen=True)
class NodeJob:
    """What one message asks of this node.

    Attributes
    ----------
    config : dict
        The message's configuration over the app's run configuration.
    partition, clients : int
        Which share of the data this node holds, of how many.
    round, seed : int
        Coordinates of the random streams.
    guarded : bool
        The node has a privacy budget of its own: its data is there for training with noise, and for nothing else.
    """

    config: Mapping[str, Any]
    partition: int
    clients: int
    round: int
    seed: int
    guarded: bool = False

    @classmethod
    def read(cls, msg: Message, context: Context) -> NodeJob:
        """Read the message and the node's configuration.

        Raises
        ------
        ConfigError
            When the node has no partition, or holds one of another split than the server's.
        """
        config = {**context.run_config, **config_in(msg.content, "config")}
        node = context.node_config
        partition, held = node.get("partition-id"), node.get("num-partitions")
        if not isinstance(partition, int):
            raise ConfigError(
                f"this node's partition-id is {partition!r}; start the SuperNode with --node-config "
                "'partition-id=0 num-partitions=2', or with python -m fedcomp.clients.edge --partition 0 --of 2"
            )
        clients = _integer(config, "clients", held)
        if isinstance(held, int) and held != clients:
            raise ConfigError(
                f"this node holds partition {partition} of {held}, but the run splits the data into {clients}; "
                f"set clients={held}, or start {clients} nodes"
            )
        if not 0 <= partition < clients:
            raise ConfigError(
                f"this node's partition-id is {partition}; with {clients} clients it is 0 to {clients - 1}"
            )
        server_round, seed = _integer(config, "server-round", 0), _integer(config, "seed", 0)
        return cls(config, partition, clients, server_round, seed, OWN_BUDGET in node)

    def key(self, purpose: str) -> Key:
        """Return the random stream of this node and round for ``purpose``."""
        return Key(self.seed, purpose, self.round, self.partition)

    def task(self, *, noised: bool = False) -> Task:
        """Return the task, from the cache when this process has seen it before.

        Raises
        ------
        ConfigError
            When this node only trains with noise, and it is for something else.
        """
        if self.guarded and not noised:
            raise ConfigError(
                f"this node has a privacy budget of its own ({OWN_BUDGET} in its node configuration): it trains with "
                "noise (record-dp), and uses its records for nothing else"
            )
        from fedcomp.tasks import get_task  # torch: a node that only answers a roll call does without

        options = {k.removeprefix(TASK_PREFIX): v for k, v in self.config.items() if k.startswith(TASK_PREFIX)}
        return get_task(str(self.config.get("task", "digits")), **options)

    def model(self, task: Task, msg: Message) -> tuple[str, nn.Module]:
        """Return the name of the message's ArrayRecord and the model it holds.

        Raises
        ------
        LayoutError
            When the message holds no single model, or one that is not the task's.
        """
        from fedcomp.tasks.arrays import load_arrays

        records = models(msg.content)
        if len(records) != 1:
            raise LayoutError(
                f"the message holds {len(records)} ArrayRecords {sorted(records)}; expected one, the model"
            )
        name, record = next(iter(records.items()))
        # No two messages are worked on at once in one process, and nothing keeps a model for the next one.
        model = task.blank()
        load_arrays(model, to_arrays(record), cast=True)
        return name, model

    def training(self) -> dict[str, Any]:
        """Return the arguments of :meth:`fedcomp.tasks.base.Task.train` that the server decided."""
        keys = ("lr", "momentum", "weight_decay", "epochs", "batch_size", "max_steps")
        chosen = {key: self.config[key] for key in keys if key in self.config}
        # Flower's FedProx announces its term under this name.
        if "proximal-mu" in self.config:
            chosen["proximal"] = self.config["proximal-mu"]
        return {"lr": 0.1, **chosen}

    def rates(self) -> dict[str, float]:
        """Return those of :meth:`training` that every step of SGD has."""
        names = ("lr", "momentum", "weight_decay", "proximal")
        return {name: value for name, value in self.training().items() if name in names}


def _integer(config: Mapping[str, Any], key: str, default: Any) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"the run's {key} is {value!r}; expected a whole number")
    return value


def _to_record(model: nn.Module) -> ArrayRecord:
    from fedcomp.tasks.arrays import to_arrays

    return to_record(to_arrays(model))


def _metrics(metrics: Mapping[str, Any]) -> MetricRecord:
    # MetricRecord refuses numpy's scalars.
    return MetricRecord({key: value if isinstance(value, int) else float(value) for key, value in metrics.items()})
