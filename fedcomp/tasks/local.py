"""One node's objective as a function of named arrays: value, gradient, Hessian.

For algorithms that do their own steps. Arrays come in and go out; what a call returns depends on its arguments alone.
The torch model inside is scratch memory: every call fills it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fedcomp.errors import LayoutError
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf, checked
from fedcomp.tasks.base import EmptyPartition, Split, Task, single_thread

Arrays = Mapping[str, NDArray[Any]]

_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


class LocalObjective:
    """f_i: the task's mean objective over the examples of one partition.

    Parameters
    ----------
    task : Task
    partition, partitions : int
        Whose examples, of how many.
    seed : int
        Names the initial model, see :meth:`fedcomp.tasks.base.Task.model`.
    batch_size : int
        Examples of a stochastic gradient; 0 takes all of the partition.
    dtype : {"float32", "float64"}
        What is computed in. The data are cast once. With float32 a gradient is that of
        :meth:`fedcomp.tasks.base.Task.gradient`, bit for bit.

    Raises
    ------
    EmptyPartition
        When the partition holds no example.
    ConfigError
        For an impossible partition, batch size or dtype.

    Examples
    --------
    >>> from fedcomp.tasks import get_task
    >>> f = LocalObjective(get_task("digits-zero", l2=0.01), 0, 8, batch_size=0, dtype="float64")
    >>> x = f.start()
    >>> gradient = f.gradient(x, Key(0, "batch"))
    >>> f.loss({name: x[name] - 0.1 * gradient[name] for name in x}) < f.loss(x)
    True
    """

    def __init__(
        self,
        task: Task,
        partition: int,
        partitions: int,
        *,
        seed: int = 0,
        batch_size: int = 32,
        dtype: str = "float32",
    ) -> None:
        batch_size = checked("batch_size", batch_size, Int())
        checked("dtype", dtype, OneOf(*_DTYPES))
        self.task, self.partition, self.partitions = task, partition, partitions
        self.seed, self.batch_size, self.dtype = seed, batch_size, np.dtype(dtype)
        self.data = self._cast(task.client(partition, partitions))
        if not len(self.data):
            raise EmptyPartition(
                f"task {task.name!r}: partition {partition} of {partitions} holds no example; use fewer nodes, or "
                "min_examples >= 1"
            )
        self._model = task.model(seed).to(_DTYPES[dtype])
        # Views of the model's own memory: numpy copies into them cost a tenth of what load_state_dict does.
        self._views = {name: tensor.detach().numpy() for name, tensor in self._model.state_dict().items()}
        # Copies: the views change with every call.
        self._start = {name: view.copy() for name, view in self._views.items()}
        self._named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._buffers = tuple(name for name, _ in self._model.named_buffers() if name in self._views)
        self._after: dict[str, NDArray[Any]] = {name: self._start[name] for name in self._buffers}
        self._test: Split | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what :meth:`gradient` and :meth:`hessian` differentiate by, in the model's order."""
        return tuple(self._named)

    def start(self) -> dict[str, NDArray[Any]]:
        """Return the initial model of ``seed``: parameters and buffers, floats in ``dtype``, in the model's order."""
        return {name: array.copy() for name, array in self._start.items()}

    def gradient(self, arrays: Arrays, key: Key) -> dict[str, NDArray[Any]]:
        """Return the gradient at ``arrays`` by name of the parameter, on the batch that ``key`` names.

        The batch is a pure function of the key: round and partition included, nothing else.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            All parameters; buffers that are left out begin as in :meth:`start`.

        Raises
        ------
        LayoutError
            When a parameter is missing, a name unknown, or a shape or dtype not the model's.
        """
        self._load(arrays)
        x, y = self._batch(key)
        self._model.train()
        with single_thread():
            loss = self.task.objective(self._model, self._model(x), y)
            gradients = torch.autograd.grad(loss, list(self._named.values()))
        # Copied now: the views are the model's memory, which the next call overwrites.
        self._after = {name: self._views[name].copy() for name in self._buffers}
        return {name: g.numpy() for name, g in zip(self._named, gradients, strict=True)}

    def buffers_after(self) -> dict[str, NDArray[Any]]:
        """Return what the last :meth:`gradient`'s forward pass made of the buffers (running statistics, counters);
        those of :meth:`start` before any."""
        return {name: array.copy() for name, array in self._after.items()}

    def loss(self, arrays: Arrays) -> float:
        """Return f_i at ``arrays``, over all examples of the partition, layers in evaluation mode."""
        return self._evaluate(arrays, self.data)["loss"]

    def evaluate(self, arrays: Arrays) -> dict[str, float]:
        """Return ``accuracy`` and ``loss`` of ``arrays`` on the task's whole test split."""
        if self._test is None:
            self._test = self._cast(self.task.test)
        found = self._evaluate(arrays, self._test)
        return {"accuracy": found["accuracy"], "loss": found["loss"]}

    def hessian(self, arrays: Arrays) -> NDArray[Any]:
        """Return the second derivatives of f_i at ``arrays``, shape ``(p, p)``, p parameters in the model's order.

        p backward passes: for small convex problems.
        """
        self._load(arrays)
        x, y = self.data.tensors
        # Evaluation mode: statistics of a batch would couple the examples, and the Hessian is that of f_i.
        parameters = list(self._named.values())
        self._model.eval()
        with single_thread():
            loss = self.task.objective(self._model, self._model(x), y)
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            flat = torch.cat([g.reshape(-1) for g in first])
            rows = []
            for entry in flat:
                # Where an entry does not depend on a parameter, materialize_grads gives zeros instead of None.
                second = torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
                rows.append(torch.cat([g.reshape(-1) for g in second]))
        return torch.stack(rows).numpy()

    def _evaluate(self, arrays: Arrays, split: Split) -> dict[str, float]:
        self._load(arrays)
        return self.task.evaluate(self._model, split)

    def _load(self, arrays: Arrays) -> None:
        missing = [name for name in self._named if name not in arrays]
        extra = [name for name in arrays if name not in self._views]
        if missing or extra:
            raise LayoutError(
                f"arrays do not fit the model of task {self.task.name!r}: missing {missing[:5]}, unexpected "
                f"{extra[:5]}; all nodes must build the same model with the same options"
            )
        for name, view in self._views.items():
            array = np.asarray(arrays[name]) if name in arrays else self._start[name]
            # Widening is exact and allowed; narrowing would silently round what a node has computed.
            if array.shape != view.shape or not np.can_cast(array.dtype, view.dtype):
                raise LayoutError(
                    f"array {name!r} is {array.dtype}{array.shape}, the model needs {view.dtype}{view.shape}; "
                    "all nodes must build the same model, in the same dtype"
                )
            view[...] = array

    def _batch(self, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data.tensors
        if not self.batch_size:
            return x, y
        # The first batch of Split.batches without sorting the rest: its words are the smallest of the permutation's.
        words = key.at(purpose=f"{key.purpose}/0").bits(len(self.data))
        size = min(self.batch_size, len(words))
        # Equal words are all candidates: the stable sort below then breaks ties as the permutation does.
        candidates = np.flatnonzero(words <= np.partition(words, size - 1)[size - 1])
        rows = torch.from_numpy(candidates[np.argsort(words[candidates], kind="stable")[:size]])
        return x[rows], y[rows]

    def _cast(self, split: Split) -> Split:
        # Characters are indices of an embedding and stay whole numbers.
        if split.x.dtype.kind != "f" or split.x.dtype == self.dtype:
            return split
        return Split(split.x.astype(self.dtype), split.y)
