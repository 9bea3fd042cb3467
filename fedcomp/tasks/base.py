"""The interface of a task: data and its partition over clients, a model, a loss, a metric, and plain SGD.

A task is immutable and holds no randomness of its own: models come from a seed, batches from a
:class:`~fedcomp.rng.Key`. Training runs with one intra-op thread, so that the floating-point sums have one
order and two processes on one machine give the same bits.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Made, Maybe, checked
from fedcomp.tasks import models
from fedcomp.tasks.options import TaskOption, plain
from fedcomp.tasks.partition import Assignment, parse_partitioner, permutation
from fedcomp.tasks.sgd import Sgd
from fedcomp.tasks.sources import DataSource

EVALUATION_BATCH = 2048
"""Examples per forward pass of an evaluation; bounds memory, does not change the result beyond rounding."""


class EmptyPartition(FedcompError, ValueError):
    """A client was asked to train on a partition that holds no example."""


@contextmanager
def single_thread() -> Iterator[None]:
    """Run the body with one torch intra-op thread and restore the former number after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body with ``model`` in evaluation mode, without gradients and on one thread; then restore its mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), single_thread():
            yield
    finally:
        model.train(was_training)


class Stepper(Protocol):
    """An optimizer of a model's parameters."""

    def step(self, loss: Tensor) -> Any:
        """Take one step down ``loss``, a scalar."""


@dataclass(frozen=True)
class Split:
    """Examples a model is trained or evaluated on.

    Attributes
    ----------
    x, y : ndarray
        Inputs and targets, first axis the examples; read-only.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    tensors: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)
    """The same memory as torch tensors; not to be written to."""

    def __post_init__(self) -> None:
        # Own copies: tensors can share memory only with arrays that are still writable here.
        x, y = np.array(self.x), np.array(self.y)
        object.__setattr__(self, "tensors", (torch.from_numpy(x), torch.from_numpy(y)))
        for name, array in (("x", x), ("y", y)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.x)

    def batches(
        self, *, batch_size: int, key: Key, epochs: int | None = 1, max_steps: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled batches; epoch e is ordered by ``key`` with ``/e`` appended to its purpose.

        Parameters
        ----------
        batch_size : int
            The last batch of an epoch may be smaller.
        epochs, max_steps : int or None
            Whichever ends first; one of them may be None, and 0 yields nothing.

        Raises
        ------
        ConfigError
            When one of them is not a whole number or negative, ``batch_size`` is below 1, or both are None.
        """
        batch_size, epochs, max_steps = _checked_limits(batch_size, epochs, max_steps)
        x, y = self.tensors
        steps, epoch = 0, 0
        # With epochs=None the loop below would never end on an empty split.
        if not len(self):
            return
        while epochs is None or epoch < epochs:
            # A stream for each epoch: its order does not depend on what earlier epochs drew.
            order = torch.from_numpy(permutation(len(self), key.at(purpose=f"{key.purpose}/{epoch}")))
            for start in range(0, len(self), batch_size):
                if max_steps is not None and steps >= max_steps:
                    return
                rows = order[start : start + batch_size]
                yield x[rows], y[rows]
                steps += 1
            epoch += 1


@dataclass(frozen=True)
class ClientData(Split):
    """The training examples of one partition.

    Attributes
    ----------
    partition, num_partitions : int
        Which partition of how many.
    indices : ndarray of int64
        Positions of the examples in the task's training split, ascending.
    """

    partition: int = 0
    num_partitions: int = 1
    indices: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def _partitioner_text(value: Any) -> str:
    return str(parse_partitioner(value))


def _checked_limits(batch_size: int, epochs: int | None, max_steps: int | None) -> tuple[int, int | None, int | None]:
    batch_size = checked("batch_size", batch_size, Int(1))
    epochs, max_steps = checked("epochs", epochs, Maybe(Int())), checked("max_steps", max_steps, Maybe(Int()))
    if epochs is None and max_steps is None:
        raise ConfigError("epochs=None, max_steps=None: expected a limit on epochs or steps")
    return batch_size, epochs, max_steps


COMMON_OPTIONS: Mapping[str, TaskOption] = {
    "partition": TaskOption(
        "iid", Made(_partitioner_text), "iid, dirichlet:ALPHA, shards:COUNT, pieces:COUNT, sorted, natural"
    ),
    "partition_seed": TaskOption(0, Int(0), "names the draw of the partition"),
    "min_examples": TaskOption(1, Int(0), "least examples of any partition; 0 allows empty ones"),
    "root": TaskOption(None, Maybe(Made(partial(plain, "root"))), "folder of local data sets (default: $FEDCOMP_DATA)"),
    "download": TaskOption(False, Flag(), "let a library fetch the set from the network"),
}
"""Options every task has."""


class Task(ABC):
    """One thing to learn. Make tasks with :func:`fedcomp.tasks.get_task`.

    Attributes
    ----------
    name : str
        The registered name.
    metric : str
        Key of the figure of merit in what :meth:`evaluate` returns; larger is better.
    needs : str
        Which systems can learn it: "" any that trains on records, "generator" those that train a generator, which
        :meth:`train` refuses, "graph" those whose clients exchange rows of a graph. A system says the same of itself
        (``needs["task"]``).
    evaluation_batch : int
        Examples per forward pass of :meth:`evaluate`.
    options : dict
        All options in canonical form.
    data : DataSource
        Which data was used.
    train_split, test : Split
        All training examples, and the held-out examples for evaluation on the server.
    """

    name: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    needs: ClassVar[str] = ""
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = COMMON_OPTIONS

    def __init__(
        self,
        options: Mapping[str, Any],
        data: DataSource,
        train: tuple[NDArray[Any], NDArray[Any]],
        test: tuple[NDArray[Any], NDArray[Any]],
        *,
        classes: int,
        ids: NDArray[Any] | None = None,
    ) -> None:
        self.options = dict(options)
        self.data = data
        self.classes = classes
        self.train_split = Split(*train)
        self.test = Split(*test)
        self._ids = ids
        self._assignments: dict[int, Assignment] = {}
        self._clients: dict[tuple[int, int], ClientData] = {}
        self._blank: nn.Module | None = None

    def validating(self, share: float = 0.2) -> Self:
        """Return this task with a part of its training examples in place of the test split, for tuning: nobody trains
        on that part, and the test split is out of reach. The partition is drawn over the other examples.

        Parameters
        ----------
        share : float
            Of the training examples, in (0, 1); the same ones for every seed.

        Raises
        ------
        ConfigError
            When one of the two parts would be empty.
        """
        split = self.train_split
        held = round(share * len(split))
        if not 0 < held < len(split):
            raise ConfigError(f"share={share!r} of {len(split)} training examples leaves one part empty")
        out = np.zeros(len(split), np.bool_)
        out[Key(0, "tasks/validation").uniform(len(split)).argsort()[:held]] = True
        other = copy.copy(self)
        other._test_on(out)
        return other

    def _test_on(self, out: NDArray[np.bool_]) -> None:
        """Replace the test split by these training examples, so choices based on them do not use the test split."""
        x, y = self.train_split.x, self.train_split.y
        self.train_split, self.test = Split(x[~out], y[~out]), Split(x[out], y[out])
        self._ids = None if self._ids is None else self._ids[~out]
        # A shallow copy shares the caches, whose entries are positions in the longer training split.
        self._assignments, self._clients = {}, {}

    @abstractmethod
    def _make_model(self) -> nn.Module:
        """Return the module; :meth:`model` sets its values."""

    @abstractmethod
    def objective(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, regularisation included, as a scalar tensor."""

    @abstractmethod
    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which predictions are right, boolean, one entry per prediction."""

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the model's outputs for inputs ``x``; the first axis is the examples."""
        return model(x)

    def model(self, seed: int) -> nn.Module:
        """Return a new model whose values are a pure function of ``seed``; no global generator is touched."""
        return models.build(self._make_model, seed)

    def blank(self) -> nn.Module:
        """Return a model to load values into: the same object every time, and of one user at a time.

        Every value it has is in its ``state_dict``, so that a model loaded into it is the one that was loaded into a
        new one, bit for bit. Whoever asked for it before finds other values in it.
        """
        # Drawing initial values that are replaced at once takes longer than a small client trains.
        if self._blank is None:
            self._blank = self.model(0)
        return self._blank

    def assignment(self, num_partitions: int) -> Assignment:
        """Return the partition id of every training example, int64, shape ``(N,)``.

        Raises
        ------
        ConfigError
            When the data cannot be split that way (see :mod:`fedcomp.tasks.partition`).
        """
        if num_partitions not in self._assignments:
            partitioner = parse_partitioner(self.options["partition"])
            y = self.train_split.y
            self._assignments[num_partitions] = partitioner.assign(
                num_partitions,
                Key(self.options["partition_seed"], f"partition/{partitioner.kind}"),
                # Windows of text have a target per character, so there is no single class to split by.
                labels=y if y.ndim == 1 else None,
                ids=self._ids,
                n=len(y),
                min_examples=self.options["min_examples"],
            )
        return self._assignments[num_partitions]

    def client(self, partition: int, num_partitions: int) -> ClientData:
        """Return the training examples of ``partition``; the result is kept for the next call.

        Raises
        ------
        ConfigError
            When ``partition`` is not in ``range(num_partitions)``.
        """
        if not 0 <= partition < num_partitions:
            raise ConfigError(f"partition {partition} is not in range({num_partitions})")
        place = (partition, num_partitions)
        if place not in self._clients:
            # Kept: a client app asks for its examples in every message.
            rows = np.flatnonzero(self.assignment(num_partitions) == partition)
            split = self.train_split
            self._clients[place] = ClientData(split.x[rows], split.y[rows], partition, num_partitions, rows)
        return self._clients[place]

    def client_test(self, partition: int, num_partitions: int) -> Split:
        """Return the held-out examples a client evaluates on: every ``num_partitions``-th one from ``partition`` on.

        The weighted mean of the clients' metrics is then the metric on :attr:`test`.
        """
        if not 0 <= partition < num_partitions:
            raise ConfigError(f"partition {partition} is not in range({num_partitions})")
        return Split(self.test.x[partition::num_partitions], self.test.y[partition::num_partitions])

    @property
    def linear_loss(self) -> str:
        """The loss as a function of one linear score per example: "logistic" or "hinge".

        Raises
        ------
        ConfigError
            When the model is not linear in its inputs.
        """
        raise ConfigError(
            f"the model of task {self.name!r} is not linear in its inputs; use a linear task, such as 'digits-zero', "
            "'breast-cancer' or 'a9a'"
        )

    def optimizer(self, model: nn.Module, *, lr: float, **rates: float) -> Stepper:
        """Return what takes the steps of one training: :class:`fedcomp.tasks.sgd.Sgd` with these rates."""
        return Sgd(model.parameters(), lr=lr, **rates)

    def train(
        self,
        model: nn.Module,
        data: Split,
        *,
        lr: float,
        key: Key,
        epochs: int | None = 1,
        batch_size: int = 32,
        max_steps: int | None = None,
        optimizer: Stepper | None = None,
        **rates: float,
    ) -> dict[str, float]:
        """Train ``model`` in place on ``data``, by SGD where the task has no other :meth:`optimizer`.

        Parameters
        ----------
        lr : float
            Step size.
        key : Key
            Names the order of the examples.
        epochs, batch_size, max_steps
            See :meth:`Split.batches`.
        optimizer : Stepper, optional
            Of this model's parameters; default a new one with these rates.
        **rates : float
            ``momentum``, ``weight_decay`` and ``proximal``: see :meth:`optimizer`.

        Returns
        -------
        dict
            ``train_loss`` (mean over the examples seen, before each step's update) and ``num-examples`` (size
            of ``data``, the weight in a federated average).

        Raises
        ------
        EmptyPartition
            When ``data`` has no example.
        ConfigError
            When a hyperparameter is negative, not a number or not finite; the model is then unchanged.
        """
        descent = self.optimizer(model, lr=lr, **rates) if optimizer is None else optimizer
        # Here as well: with an empty partition no batch is drawn that would check them.
        batch_size, epochs, max_steps = _checked_limits(batch_size, epochs, max_steps)
        if len(data) == 0:
            raise EmptyPartition(
                f"task {self.name!r}: this partition holds no example to train on; use fewer partitions, "
                "min_examples >= 1, or skip the client"
            )
        total, seen = 0.0, 0
        model.train()
        with single_thread():
            for x, y in data.batches(batch_size=batch_size, key=key, epochs=epochs, max_steps=max_steps):
                loss = self.objective(model, self.outputs(model, x), y)
                descent.step(loss)
                # Weighted by size: the last batch of an epoch may be smaller.
                total += loss.item() * len(y)
                seen += len(y)
        # Without any step (epochs=0) the loss is 0, not 0 / 0.
        return {"train_loss": total / max(seen, 1), "num-examples": len(data)}

    def gradient(
        self, model: nn.Module, data: Split, *, batch_size: int | None = None, key: Key | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], float]:
        """Return the gradient of the objective by parameter name, and the objective.

        Parameters
        ----------
        batch_size : int, optional
            Size of a random batch named by ``key``; None takes all of ``data``.

        Raises
        ------
        EmptyPartition
            When ``data`` has no example.
        ConfigError
            When a batch is asked for without a key.
        """
        if len(data) == 0:
            raise EmptyPartition(f"task {self.name!r}: this partition holds no example to take a gradient on")
        if batch_size is None:
            x, y = data.tensors
        elif key is None:
            raise ConfigError("a random batch needs a key; pass key=Key(seed, purpose, round, partition)")
        else:
            x, y = next(data.batches(batch_size=batch_size, key=key))
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        model.train()
        with single_thread():
            loss = self.objective(model, self.outputs(model, x), y)
            # Not backward(): the caller's model keeps whatever .grad it has.
            gradients = torch.autograd.grad(loss, list(named.values()))
        return {name: g.numpy() for name, g in zip(named, gradients, strict=True)}, loss.item()

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """Return ``loss`` (mean objective), ``accuracy`` and ``num-examples`` of ``model`` on ``split``.

        An empty split gives zeros, which weigh nothing in an average over clients. The model's training mode
        is restored.
        """
        loss, right, predictions = 0.0, 0, 0
        with evaluating(model):
            for start in range(0, len(split), self.evaluation_batch):
                x, y = (t[start : start + self.evaluation_batch] for t in split.tensors)
                outputs = self.outputs(model, x)
                # The objective is a mean, so each piece counts by its size: the last one may be smaller.
                loss += self.objective(model, outputs, y).item() * len(y)
                hits = self.correct(outputs, y)
                right += int(hits.sum())
                # Not one per example: a window of text has a prediction for each character.
                predictions += hits.numel()
        return {
            "loss": loss / max(len(split), 1),
            "accuracy": right / max(predictions, 1),
            "num-examples": len(split),
        }

    def record(self) -> dict[str, Any]:
        """Return what a result record says about the task: its name, its options, and which data was used."""
        # The root is a path of one machine: the same data elsewhere must give the same record.
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items() if k != "root"}
        return {"task": self.name, "options": options, "data": self.data.record()}


class Classification(Task):
    """A task with one class per example and the cross-entropy loss (nats)."""

    def objective(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets
