"""Private strategies under audit: rounds of theirs on replies made by hand, through Flower's own hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.experiments.audits.subjects import Data, Floats, Subject
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.strategies.private.strategy import PrivateStrategy

Make = Callable[[float | None, int], PrivateStrategy]
"""From a noise multiplier (None: the strategy's own) and a seed to a new strategy, with its population declared."""


@dataclass(frozen=True)
class Answer:
    """What a client answers, beside its update.

    Attributes
    ----------
    update : ndarray of float, (size of the model's floats,)
        Difference to the model.
    examples : int
        What it says about its number of examples.
    loss : float
        What it says about its loss.
    buffers : int
        Added to every element of the model's integer buffers.
    lost : bool
        Whether an error comes instead.
    """

    update: NDArray[Any]
    examples: int = 1
    loss: float = 1.0
    buffers: int = 0
    lost: bool = False


class Rounds(Subject):
    """A private strategy: what it released is read off the models it returns.

    Parameters
    ----------
    name : str
    make : callable
    model : mapping of arrays
        Before every round; zeros for the floats, so that the step is not rounded away.
    absent, present : data sets
        Participants are partitions; contributions are updates, or an :class:`Answer` with ``messages``.
    clients : int
        Nodes that are there; those without a contribution do not answer.
    read : callable, optional
        From a strategy after a round and the model's step to the noisy sum; default the step times the public
        denominator.
    width : int, optional
        Coordinates of the noisy sum; default the model's floats.
    pairs : list of pairs of data sets
    tell : callable, optional
        From a strategy after a round to what else was released in it, each figure with noise of its own.
    tell_scale : sequence of float
        The claimed standard deviations of these figures.
    messages : bool
        Whether updates come as ordinary replies through ``aggregate_train``; otherwise through ``aggregate_updates``,
        which is where those and all decoded frames end.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        model: Mapping[str, NDArray[Any]],
        absent: Data,
        present: Data,
        *,
        clients: int,
        read: Callable[[Any, Floats], Floats] = lambda strategy, step: step * strategy.expected,
        width: int = 0,
        pairs: Sequence[tuple[Data, Data]] = (),
        tell: Callable[[PrivateStrategy], Sequence[float]] = lambda strategy: (),
        tell_scale: Sequence[float] = (),
        messages: bool = False,
    ) -> None:
        self.name, self.make, self.model, self.clients = name, make, dict(model), clients
        self.absent, self.present, self.pairs, self.messages = absent, present, list(pairs), messages
        self.layout = Layout.of(self.model)
        self._read, self._tell, self._tell_scale = read, tell, list(tell_scale)
        self._size = width or self.layout.size
        strategy = make(None, 0)
        self.adjacency = strategy.adjacency
        strategy.adopt(_record(self.model))
        mechanism = strategy.mechanism(Layout.flat(width) if width else self.layout, 1)
        self._sigma, self.step = mechanism.sigma, mechanism.step
        self.gridded = slice(0, self._size)
        self._exact = sum(math.prod(t.shape) for t in self.layout.exact)
        self._width = self._size + self._exact + 1 + len(self._tell_scale)
        self.parts = {"sum": self.gridded} if width else {t.name: t.slice for t in self.layout.tensors}
        if self._tell_scale:
            self.parts["told"] = slice(self._width - len(self._tell_scale), self._width)
        if self._exact and self._moved():
            self.parts["buffers"] = slice(self._size, self._size + self._exact)

    def _moved(self) -> bool:
        """Whether anything of the buffers that travel as values is released at all."""
        out = self.run(self.present, 1, noisy=False)[0, 0]
        return bool(np.any(out[self._size : self._size + self._exact]))

    @property
    def scale(self) -> Floats:
        """The mechanism's standard deviation for every float; 1 for buffers and metrics, which are to be nothing."""
        return np.concatenate([np.full(self._size, self._sigma), np.ones(self._exact + 1), self._tell_scale])

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Play every round from the same model, so that the runs' rounds can be compared.

        The output is the noisy sum, then by how much buffers moved, then the sum of all released metrics, then what
        ``tell`` says.
        """
        out = np.empty((runs, rounds, self._width))
        with quiet(), InProcessGrid(nobody, self.clients) as grid:
            for trial in range(runs):
                strategy = self.make(None if noisy else 0.0, seed * 1_000_003 + trial)
                for place in range(rounds):
                    out[trial, place] = self._play(strategy, grid, data, place + 1)
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run."""
        strategy = self.make(None, 0)
        with quiet(), InProcessGrid(nobody, self.clients) as grid:
            for place in range(rounds):
                self._play(strategy, grid, self.present, place + 1)
        return strategy.privacy

    def _play(self, strategy: PrivateStrategy, grid: InProcessGrid, data: Data, server_round: int) -> Floats:
        asked = list(strategy.configure_train(server_round, _record(self.model), ConfigRecord(), grid))
        if self.messages:
            found, told = strategy.aggregate_train(server_round, list(self._replies(asked, grid, dict(data))))
        else:
            ids = grid.get_node_ids()
            updates = ((ids[place], update) for place, update in data)
            found, told = strategy.aggregate_updates(server_round, updates, self.layout)
        if found is None:
            raise AssertionError(f"{self.name}: round {server_round} released nothing")
        arrays = to_arrays(found)
        step = (self.layout.flatten(arrays) - self.layout.flatten(self.model)).astype(np.float64)
        buffers = [np.asarray(arrays[t.name], np.float64) - self.model[t.name] for t in self.layout.exact]
        metrics = math.fsum(float(v) for v in dict(told or {}).values() if isinstance(v, int | float))
        told_so = list(self._tell(strategy))
        return np.concatenate([self._read(strategy, step), *(b.ravel() for b in buffers), [metrics], told_so])

    def _replies(
        self, asked: Sequence[Message], grid: InProcessGrid, answers: Mapping[int, Answer]
    ) -> Iterator[Message]:
        for message in asked:
            answer = answers.get(grid.partition_of(message.metadata.dst_node_id) or 0)
            if answer is None:
                continue
            if answer.lost:
                yield Message(Error(0, "lost"), reply_to=message)
                continue
            vector = (self.layout.flatten(self.model) + answer.update).astype(np.float32)
            exact = {t.name: self.model[t.name] + answer.buffers for t in self.layout.exact}
            content = RecordDict(
                {
                    "arrays": _record(self.layout.unflatten(vector, exact)),
                    "metrics": MetricRecord({"num-examples": answer.examples, "loss": answer.loss}),
                }
            )
            yield Message(content, reply_to=message)


def _record(model: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in model.items()})


def nobody(message: Message, context: Context) -> Message:
    """Answer nothing: the app of nodes whose replies are made by hand."""
    raise AssertionError("replies are made by hand")
