"""The client half of decentralised learning: one iteration of an algorithm per message, its state in ``context.state``.

The message says which algorithm it is, and all that belongs to an iteration; how a node carries it out is in
:mod:`fedcomp.gossip.node`. A handler reads the state, computes, and writes the state as its last act: whatever breaks
before leaves the node as it was, and the server repeats the very same instruction. A node that has carried it out
already answers from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import ClientHalf, Handler
from fedcomp.clients.messages import require_partition
from fedcomp.errors import StateError
from fedcomp.flower import gossip
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_node
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Real
from fedcomp.gossip.local import ArrayObjective, FlatObjective
from fedcomp.gossip.node import handle
from fedcomp.gossip.protocol import Instruction
from fedcomp.gossip.vector import flatten, unflatten
from fedcomp.layout import Layout
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.clients.gossip_links import GossipLinks

Arrays = Mapping[str, NDArray[Any]]

_NOTHING: Final = Layout((), (), ())


class NodeProblem(ArrayObjective, Protocol):
    """What a node learns from, such as :class:`fedcomp.tasks.local.LocalObjective`.

    Arrays come and go by the names of the initial model; its float tensors have the run's dtype.
    """

    def evaluate(self, arrays: Arrays) -> Mapping[str, float]:
        """Return figures of a model for the server's reports, on data that all nodes have in common."""
        ...


ProblemOf = Callable[[Message, Context, gossip.GossipSetup], NodeProblem]
"""``problem(message, context, setup)``: called only where an instruction needs a gradient or figures."""


def gossip_node(problem: ProblemOf) -> ClientHalf:
    """Return the client half of decentralised learning.

    The node configuration's ``partition-id`` is the node's vertex of the graph.

    Parameters
    ----------
    problem : callable
        Returns what this node learns from. What it keeps between calls is lost in a deployment.

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

    def hello(msg: Message, context: Context) -> Message:
        reply, vertex = RecordDict(), _vertex(context)
        put_node(reply, vertex)
        links = _links(msg, context, vertex)
        if links is not None:
            links.introduce(reply)
        return Message(reply, reply_to=msg)

    carry_out = partial(_carry_out, problem=problem)
    handlers: dict[str, Handler] = {
        gossip.HELLO_TYPE: hello,
        gossip.START_TYPE: carry_out,
        gossip.EXCHANGE_TYPE: carry_out,
        gossip.OBSERVE_TYPE: partial(_observe, problem=problem),
    }
    return ClientHalf("gossip", handlers=handlers)


class _Lazy:
    """A node's own data, loaded when they are first needed: the closing iterations, and answers from memory, are not
    worth an import of torch in a process of their own."""

    def __init__(self, make: Callable[[], NodeProblem], layout: Layout, own: Arrays) -> None:
        self._make = make
        self._layout = layout
        self._own = own
        self._local: FlatObjective | None = None

    @property
    def own(self) -> Arrays:
        """What stays at home, as the last gradient left it."""
        return self._own if self._local is None else self._local.at_home()

    @property
    def untrained(self) -> list[str]:
        """Tensors of which the last gradient had nothing."""
        return [] if self._local is None else self._local.untrained

    def gradient(self, z: Real, key: Key) -> Real:
        if self._local is None:
            self._local = FlatObjective(self._make(), self._layout, self._own)
        return self._local.gradient(z, key)

    def change(self) -> Real | None:
        return None if self._local is None else self._local.change()


def _carry_out(msg: Message, context: Context, problem: ProblemOf) -> Message:
    """Carry out an instruction, keep what came of it, answer."""
    setup, instruction = gossip.GossipSetup.take(msg), _instruction(msg, context)
    algorithm = get_algorithm(setup.algorithm)
    kept = gossip.NodeStore.load(context)
    links = _links(msg, context, instruction.node)
    if links is not None:
        instruction = links.opened(instruction)
    if instruction.start in ("common", "empty"):
        arrays = gossip.take_model(msg)
        # Kept with the memory afterwards: only messages that begin a run or a life carry the model.
        layout = Layout.of(arrays, setup.policy)
        own: Arrays = {t.name: arrays[t.name] for t in layout.exact}
        start = flatten(arrays, layout, setup.dtype)
    else:
        layout, own = (_NOTHING, {}) if kept is None else (kept.layout, kept.own)
        start = flatten({}, _NOTHING, setup.dtype)  # which nothing begins with
    local = _Lazy(lambda: problem(msg, context, setup), layout, own)
    memory, answer = handle(algorithm, None if kept is None else kept.memory, instruction, local, start, layout)
    # Identity: an answer from memory changes nothing, and a state of several models need not be written again.
    changed = memory is not None and (kept is None or memory is not kept.memory)
    if local.untrained and instruction.iteration <= 1:
        # Once a run, and not in every iteration: parts may be frozen on purpose.
        log.warning("node %d has no gradient of %s: these stay as they are", instruction.node, local.untrained[:5])
    if answer.failed:
        log.warning("node %d sent nothing in iteration %d: %s", instruction.node, instruction.iteration, answer.failed)
    reply = RecordDict()
    if links is not None:
        if memory is not None and changed:
            # Sent before it is remembered: a node that breaks in between sends the same again, which is kept once.
            answer = links.sent(instruction, answer, keep=algorithm.asynchronous)
            memory = replace(memory, answer=answer)
        links.introduce(reply)
        # An answer from memory says again what was sent with it: the first one may not have arrived.
        if not answer.fresh:
            gossip.LinkReport.take(context.state).put(reply)
    gossip.put_answer(reply, answer)
    put_node(reply, instruction.node)
    out = Message(reply, reply_to=msg)
    if memory is not None and changed:
        gossip.NodeStore(memory, layout, local.own).save(context)
    return out


def _observe(msg: Message, context: Context, problem: ProblemOf) -> Message:
    """Report the model as it is after the inbox that waits for this node, and its figures; change nothing."""
    setup, instruction = gossip.GossipSetup.take(msg), _instruction(msg, context)
    if instruction.action != "observe":
        raise StateError(f"an observation asks to {instruction.action!r}; it must not change anything")
    kept = gossip.NodeStore.load(context)
    memory, layout = (None, _NOTHING) if kept is None else (kept.memory, kept.layout)
    start = flatten({}, _NOTHING, setup.dtype)
    links = _links(msg, context, instruction.node)
    if links is not None:
        instruction = links.opened(instruction)
    # The memory that comes back is the one that went in: an observation stores nothing.
    _, answer = handle(get_algorithm(setup.algorithm), memory, instruction, None, start, layout)
    reply = RecordDict()
    gossip.put_answer(reply, answer)
    if answer.model is not None and kept is not None:
        # Evaluated is exactly what the server gets.
        named = {**unflatten(answer.model, layout), **kept.own}
        arrays = {name: named[name] for name in layout.order}
        found = problem(msg, context, setup).evaluate(arrays)
        reply[gossip.MODEL] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        reply[gossip.FIGURES] = MetricRecord({name: float(value) for name, value in found.items()})
    put_node(reply, instruction.node)
    return Message(reply, reply_to=msg)


def _instruction(msg: Message, context: Context) -> Instruction:
    """Return the message's instruction.

    Raises
    ------
    StateError
        When it is another vertex's.
    """
    instruction, vertex = gossip.take_instruction(msg), _vertex(context)
    if instruction.node != vertex:
        raise StateError(
            f"this node is vertex {vertex} of the graph and was told what vertex {instruction.node} has to do; give "
            "every node a partition-id of its own"
        )
    return instruction


def _vertex(context: Context) -> int:
    """Return this node's vertex: its partition id."""
    return require_partition(context, "decentralised learning needs to know which vertex of the graph it is")


def _links(msg: Message, context: Context, vertex: int) -> GossipLinks | None:
    """Return the links of a message's run; None where the server carries its messages."""
    terms = gossip.LinkTerms.find(msg)
    if terms is None:
        return None
    from fedcomp.clients.gossip_links import GossipLinks

    return GossipLinks(context, vertex, terms)
