"""Private strategies under audit: rounds of theirs on replies made by hand, through Flower's own hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp.experiments.audits.subjects import Data, Floats, Subject, Worlds, numbered
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout
from fedcomp.strategies.private.strategy import PrivateStrategy

Make = Callable[[float | None, int], PrivateStrategy]
"""From a noise multiplier (None: the strategy's own) and a seed to a new strategy, with its population declared."""


@cache
def mean() -> FedAvg:
    """Return Flower's mean, which keeps nothing from round to round."""
    with quiet():
        return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0, min_available_nodes=1)


def nobody(message: Message, context: Context) -> Message:
    """Answer nothing: the app of nodes whose replies are made by hand."""
    raise AssertionError("replies are made by hand")


def reply_by_hand(message: Message, arrays: Mapping[str, NDArray[Any]], **metrics: Any) -> Message:
    """Return a reply with a trained model and metrics."""
    content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@dataclass(frozen=True)
class ClientReply:
    """What a client replies: its update, and what else a reply says.

    ``update`` is a difference to the model, float of the size of its floats; ``buffers`` is added to every element of
    its integer buffers; where ``lost``, an error comes instead.
    """

    update: NDArray[Any]
    examples: int = 1
    loss: float = 1.0
    buffers: int = 0
    lost: bool = False


@dataclass(frozen=True)
class RoundReading:
    """Which figures of a round are read, besides the step of the model.

    Attributes
    ----------
    sum_of : callable
        From a strategy after a round and the model's step to the noisy sum.
    width : int
        Coordinates of the noisy sum; 0 for the model's floats.
    further : callable
        From a strategy after a round to what else was released, each figure with noise of its own.
    further_scale : tuple of float
        The claimed standard deviations of these figures.
    """

    sum_of: Callable[[Any, Floats], Floats] = lambda strategy, step: step * strategy.expected
    width: int = 0
    further: Callable[[Any], Sequence[float]] = lambda strategy: ()
    further_scale: tuple[float, ...] = ()


class Rounds(Subject):
    """A private strategy: what it released is read off the models it returns.

    The outputs of a round are the noisy sum, by how much buffers moved, the sum of all released metrics, and what else
    the reading finds.

    Parameters
    ----------
    name : str
    make : callable
    worlds : Worlds
        Participants are partitions; contributions are updates, or a :class:`ClientReply` with ``messages``.
    model : mapping of arrays
        Before every round; zeros for the floats, so that the step is not rounded away.
    clients : int
        Nodes that are there; those without a contribution do not answer.
    reading : RoundReading
    messages : bool
        Whether updates come as ordinary replies through ``aggregate_train``; otherwise through ``aggregate_updates``,
        which is where those and all decoded frames end.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        worlds: Worlds,
        model: Mapping[str, NDArray[Any]],
        clients: int,
        reading: RoundReading = RoundReading(),
        *,
        messages: bool = False,
    ) -> None:
        self.make, self.model, self.clients, self.reading, self.messages = make, dict(model), clients, reading, messages
        self.layout = Layout.of(self.model)
        size = reading.width or self.layout.size
        exact = sum(math.prod(t.shape) for t in self.layout.exact)
        self.gridded, buffers = slice(0, size), slice(size, size + exact)
        parts = {"sum": self.gridded} if reading.width else {t.name: t.slice for t in self.layout.tensors}
        further = slice(exact + size + 1, exact + size + 1 + len(reading.further_scale))
        if reading.further_scale:
            parts["told"] = further
        strategy = make(None, 0)
        # A strategy knows the mechanism of a round only once it knows the model.
        strategy.adopt(to_record(self.model))
        mechanism = strategy.mechanism(Layout.flat(size) if reading.width else self.layout, 1)
        super().__init__(name, strategy.adjacency, worlds, mechanism, parts, further.stop)
        # Buffers and metrics are to be nothing: their deviation only has to be some number.
        self.scale[size : further.start] = 1.0
        self.scale[further] = reading.further_scale
        # Only where a strategy moves its buffers at all: noise is tested of what is released.
        if exact and self.run(worlds.present, 1, noisy=False)[0, 0][buffers].any():
            self.parts["buffers"] = buffers

    def nodes(self, data: Data) -> AbstractContextManager[InProcessGrid]:
        return InProcessGrid(nobody, self.clients)

    def start(self, noisy: bool, seed: int, trial: int) -> PrivateStrategy:
        return self.make(None if noisy else 0.0, numbered(seed, trial))

    def play(self, run: PrivateStrategy, nodes: InProcessGrid, data: Data, number: int) -> Floats:
        """Play every round from the same model, so that rounds can be compared."""
        asked = list(run.configure_train(number, to_record(self.model), ConfigRecord(), nodes))
        if self.messages:
            found, metrics = run.aggregate_train(number, list(self._replies(asked, nodes, dict(data))))
        else:
            ids = nodes.get_node_ids()
            found, metrics = run.aggregate_updates(number, ((ids[at], update) for at, update in data), self.layout)
        if found is None:
            raise AssertionError(f"{self.name}: round {number} released nothing")
        arrays = to_arrays(found)
        step = (self.layout.flatten(arrays) - self.layout.flatten(self.model)).astype(np.float64)
        buffers = [np.asarray(arrays[t.name], np.float64) - self.model[t.name] for t in self.layout.exact]
        # All metrics as one figure: a private round releases none, and any that appears is an output to be audited.
        released = math.fsum(float(v) for v in dict(metrics or {}).values() if isinstance(v, int | float))
        reading = self.reading
        return np.concatenate(
            [reading.sum_of(run, step), *(b.ravel() for b in buffers), [released], list(reading.further(run))]
        )

    def _replies(
        self, asked: Sequence[Message], nodes: InProcessGrid, replies: Mapping[int, ClientReply]
    ) -> Iterator[Message]:
        for message in asked:
            reply = replies.get(nodes.partition_of(message.metadata.dst_node_id) or 0)
            # Nodes without a contribution are simply not there, as in a round with absent clients.
            if reply is None:
                continue
            if reply.lost:
                yield Message(Error(0, "lost"), reply_to=message)
                continue
            # A client returns its model, and the strategy takes the difference: rounding to float32 is part of what is
            # audited.
            vector = (self.layout.flatten(self.model) + reply.update).astype(np.float32)
            exact = {t.name: self.model[t.name] + reply.buffers for t in self.layout.exact}
            arrays = self.layout.unflatten(vector, exact)
            yield reply_by_hand(message, arrays, **{"num-examples": reply.examples, "loss": reply.loss})
