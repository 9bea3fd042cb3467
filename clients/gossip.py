"""What an app provides for decentralised learning: the initial model, gradients, and metrics of a model.

How a node carries out an iteration is in :mod:`fedcomp.systems.gossip`; the half of all systems delivers
(:mod:`fedcomp.clients.programs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from flwr.app import Context, Message
from numpy.typing import NDArray

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.messages import require_partition
from fedcomp.clients.programs import Brought, bringing
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays
from fedcomp.gossip.base import Real
from fedcomp.gossip.local import ArrayObjective, FlatObjective
from fedcomp.gossip.vector import flatten, unflatten
from fedcomp.program import Me
from fedcomp.rng import Key
from fedcomp.systems.gossip import Learnt

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class GossipSetup:
    """What a node is to know of the run before it makes its problem.

    Attributes
    ----------
    dtype : str
        Of the vectors: "float32" or "float64".
    """

    dtype: str


class NodeProblem(ArrayObjective, Protocol):
    """What a node learns from, such as :class:`fedcomp.tasks.local.LocalObjective`.

    Arrays come and go by the names of the initial model; its float tensors have the run's dtype.
    """

    def evaluate(self, arrays: Arrays) -> Mapping[str, float]:
        """Return figures of a model for the server's reports, on data that all nodes have in common."""
        ...


ProblemOf = Callable[[Message, Context, GossipSetup], NodeProblem]
"""``problem(message, context, setup)``: called only where a turn needs a gradient or figures."""


def gossip_node(problem: ProblemOf) -> ClientHalf:
    """Return the client half of decentralised learning.

    The node configuration's ``partition-id`` is the node's vertex of the graph.

    Parameters
    ----------
    problem : callable
        Returns the node's learning problem. In a deployment it must not rely on state between calls.

    Examples
    --------
    Every node pulls towards the number of its own vertex; together they settle on the mean:

    >>> import numpy as np
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> class Pull:
    ...     def __init__(self, target):
    ...         self.target = target
    ...
    ...     def gradient(self, arrays, key):
    ...         return {name: array - self.target for name, array in arrays.items()}
    ...
    ...     def buffers_after(self):
    ...         return {}
    ...
    ...     def evaluate(self, arrays):
    ...         return {"loss": float(sum(np.square(a - self.target).sum() for a in arrays.values()))}
    >>> app = client(ClientApp(), gossip_node(lambda msg, context, setup: Pull(context.node_config["partition-id"])))
    """
    return bringing("gossip", "gossip", partial(_bring, problem=problem))


def _bring(msg: Message, context: Context, problem: ProblemOf) -> Brought:
    require_partition(context, "decentralised learning needs to know which vertex of the graph it is")
    return Brought(_Node(msg, context, problem))


@dataclass(frozen=True)
class _Node:
    """A node's own data, loaded when they are first needed: the closing iterations, and answers from memory, are not
    worth an import of torch in a process of their own."""

    msg: Message
    context: Context
    problem: ProblemOf
    learns: bool = True

    def start(self, me: Me, dtype: str) -> tuple[Real, Arrays]:
        named = to_arrays(next(iter(self.msg.content.array_records.values())))
        return flatten(named, me.layout, dtype), {t.name: named[t.name] for t in me.layout.exact}

    def learn(self, me: Me, z: Real, own: Arrays, key: Key) -> Learnt:
        local = FlatObjective(self._made(z), me.layout, own)
        gradient = local.gradient(z, key)
        if local.untrained and key.round <= 1:
            # Once a run, and not in every iteration: parts may be frozen on purpose.
            log.warning("node %d has no gradient of %s: they are not changed", me.node, local.untrained[:5])
        return Learnt(gradient, local.change(), local.at_home())

    def evaluate(self, me: Me, z: Real, own: Arrays) -> Mapping[str, float]:
        # Evaluated is exactly what the server gets.
        named = {**unflatten(z, me.layout), **own}
        return self._made(z).evaluate({name: named[name] for name in me.layout.order})

    def _made(self, z: Real) -> NodeProblem:
        return self.problem(self.msg, self.context, GossipSetup(z.dtype.name))
