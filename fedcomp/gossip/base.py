"""The interface of a decentralised algorithm: one iteration at one node, from state and messages to state and messages.

An algorithm is immutable configuration. What a node knows is its ``State``, a plain ``dict[str, ndarray]`` that the
caller owns and stores; what it knows of an iteration is its :class:`View`. :meth:`Algorithm.step` is a pure
function of these, of the messages and of the gradient, so that a step may be repeated after a crash and gives the same
bytes, and so that the same code runs in tests, in one process and on nodes far apart.

A step first finishes the former iteration with the messages that came of it, then begins the next one up to the
messages it sends: one round trip through a server per iteration.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import StateError
from fedcomp.gossip.errors import MessageError
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import Configured

Real = NDArray[Any]
"""A float32 or float64 vector of the model's size, shape ``(d,)``."""

State = dict[str, NDArray[Any]]
"""All that a node keeps between two iterations. Arrays only; scalars are 0-d arrays. Never modified in place."""

Gradient = Callable[[Real], Real]
"""``gradient(z)``: the (stochastic) gradient at ``z``, same shape and dtype. Called at most once per step."""


@dataclass(frozen=True, slots=True)
class GossipMessage:
    """A message from one node to another in one iteration, as bytes that only these two interpret."""

    source: int
    destination: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Multicast:
    """The same bytes to one or more nodes; sent once where the medium allows it."""

    destinations: tuple[int, ...]
    payload: bytes


Outbox = tuple[Multicast, ...]


def messages_of(source: int, outbox: Outbox) -> list[GossipMessage]:
    """Return one message per active directed edge, by destination."""
    found = [GossipMessage(source, to, multicast.payload) for multicast in outbox for to in multicast.destinations]
    return sorted(found, key=lambda message: message.destination)


def deliver(outboxes: Mapping[int, Outbox]) -> dict[int, list[GossipMessage]]:
    """Return every node's messages, in order of their sources: a network in which nothing is lost."""
    inboxes: dict[int, list[GossipMessage]] = {node: [] for node in outboxes}
    # receive is promised messages in order of their sources.
    for source in sorted(outboxes):
        for message in messages_of(source, outboxes[source]):
            inboxes.setdefault(message.destination, []).append(message)
    return inboxes


@dataclass(frozen=True)
class View:
    """A node's view of the iteration that it begins.

    Attributes
    ----------
    node : int
        Its own number: a vertex of the graph, which is its partition id.
    iteration : int
        k = 0, 1, ...: of the whole run, not of this node.
    column : mapping of int to float
        Active out-neighbours j, ascending, and the share ``P[j, node]`` pushed to each. What is missing to 1 is the
        node's own share, always positive.
    row : mapping of int to float
        In-neighbours j whose messages of this iteration will come, ascending, and the weight ``W[node, j]`` of each
        (equal to ``W[j, node]`` on undirected graphs). Directed algorithms read the keys only.
    seed : int
        The run's.
    dense : bool
        An iteration of the closing phase: models travel whole, and there is no gradient.
    resync : frozenset of int
        Out-neighbours that hold no estimate of this node, or a wrong one: they get the whole of it.
    """

    node: int
    iteration: int
    column: Mapping[int, float] = field(default_factory=dict)
    row: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    dense: bool = False
    resync: frozenset[int] = frozenset()

    @property
    def own_share(self) -> float:
        """``P[node, node]``."""
        # fsum rounds once, so that this does not depend on the order of the neighbours.
        return 1.0 - math.fsum(self.column.values())

    def key(self, purpose: str) -> Key:
        """Return this node's random stream of this iteration."""
        # By iteration and node: a step that is repeated after a crash draws the same numbers again.
        return Key(self.seed, f"gossip/{purpose}", self.iteration, self.node)


class KnownGraph(Protocol):
    """The properties of a graph that a parameter may depend on; :class:`fedcomp.gossip.graph.Topology` has them."""

    name: ClassVar[str]
    directed: bool
    n: int

    @property
    def time_varying(self) -> bool:
        """Whether it changes from one iteration to the next."""
        ...

    def mixing_matrix(
        self, t: int, alive: Collection[int] | None = None, symmetric: bool | None = None
    ) -> NDArray[np.float64]:
        """Return the weights of iteration t, shape ``(n, n)``; W with ``symmetric``."""
        ...


class Named(Configured):
    """What a name and the constructor's arguments recreate: an algorithm, a graph."""

    name: ClassVar[str]

    def to_config(self) -> dict[str, Any]:
        """Return ``{"name": name, **get_config()}``, JSON-able."""
        return {"name": self.name, **self.get_config()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.get_config().items())})"


class Algorithm(Named, ABC):
    """A decentralised algorithm, created by its class or from a configuration by :func:`fedcomp.gossip.get_algorithm`.

    Attributes
    ----------
    name : str
        As in the table of systems; it travels to the nodes.
    directed : bool
        Needs column-stochastic weights only, so that it runs on directed graphs. Otherwise W must be symmetric.
    time_varying : bool
        The graph may change from one iteration to the next.
    asynchronous : bool
        Messages may arrive iterations late, and edges may pause, without effect on the limit (push-sum). In the other
        algorithms every node waits for all messages of an iteration before it begins the next.
    vectors_per_message : int
        Vectors per message (BEER and gradient tracking send two in one message): a relay works out from it how large
        a message may be.
    """

    name: ClassVar[str]
    directed: ClassVar[bool] = False
    time_varying: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    vectors_per_message: ClassVar[int] = 1

    def fitted(self, graph: KnownGraph) -> Algorithm:
        """Return this algorithm with the options that depend on the graph filled in, unless they are set.

        Called once, before a run, where the graph is known: nodes know their neighbours only.
        """
        return self

    @abstractmethod
    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return the state of a node that has sent and received nothing.

        Parameters
        ----------
        model : ndarray, shape (d,), float32 or float64
            Where this node begins; its dtype is the dtype of all vectors of the state.
        layout : Layout
            The compressed part of the vector (``[:layout.compressed_size]``), the dense part, and the tensors' shapes.
            The state must hold everything that later steps need of it.
        common : ndarray, shape (d,), optional
            Initial value of all estimates, known to every node without communication. Default: ``model``, for nodes
            that begin with the same model; otherwise zeros, or any other common value.
        """

    @abstractmethod
    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration begun in ``state`` with its messages; if none was begun, return ``state``.

        Parameters
        ----------
        messages : sequence of GossipMessage
            In order of source, of one source in the order they were sent. Asynchronous algorithms take any number of
            them; the others exactly one of every in-neighbour of the iteration's view.

        Raises
        ------
        MessageError
            When bytes cannot be a message of this algorithm, or one is missing or superfluous. Nothing is changed.
        OutOfStep
            When a message changes an estimate that is not in step with its sender's.
        """

    @abstractmethod
    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the local step, where there is a gradient, and the messages.

        Raises
        ------
        NonFiniteUpdate
            If a message would not be finite; nothing is sent and the state is unchanged.
        """

    def step(
        self, state: State, inbox: Sequence[GossipMessage], gradient: Gradient | None, view: View
    ) -> tuple[State, Outbox]:
        """Finish the previous iteration and begin the next: :meth:`receive`, then :meth:`send`. Pure."""
        return self.send(self.receive(state, inbox), gradient, view)

    @abstractmethod
    def model(self, state: State) -> Real:
        """Return the node's model z, de-biased where the algorithm needs it; shape ``(d,)``, not to be written to."""

    def invariants(self, states: Iterable[State]) -> dict[str, float]:
        """Return what is conserved over all nodes between iterations, e.g. ``{"sum_w": 8.0}``; {} when nothing is."""
        return {}

    def facts(self, state: State) -> dict[str, float]:
        """Return small figures of one node for reports and watchers.

        ``"innovation"`` (Euclidean norm of what the last message did not carry, ``‖z - ẑ‖``) feeds the detection of
        divergence; ``"saturated"`` is 1.0 when the last innovation left a given scale; ``"weight"`` is push-sum's w.
        """
        return {}

    def shift(self, state: State, change: Real) -> State:
        """Return the state after the node's model moved by ``change`` on its own: running statistics of a forward pass,
        which follow no gradient. Push-sum moves its numerator by ``w * change``."""
        return {**state, "x": state["x"] + change}

    def reset(self, state: State, layout: Layout) -> State:
        """Return the state of a node after the set of nodes has changed.

        The model stays; duals, tracked gradients and estimates restart (the first messages carry whole estimates, by
        the views' ``resync``).

        Raises
        ------
        StateError
            For an asynchronous algorithm, which needs no reset: resetting one weight to 1 while others keep theirs
            would create mass.
        """
        if self.asynchronous:
            raise StateError(f"{self.name} is never reset: mass would be made out of nothing")
        return self.init(self.model(state), layout)

    def take_back(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Return the state after own messages that were sent and could not be delivered came back: their mass belongs
        to the sender. They are the last ones of their edges, in the order they were sent. Only asynchronous algorithms
        are asked."""
        raise MessageError(f"{self.name} keeps no mass that could come back")

    def leave(self, state: State, view: View) -> tuple[State, Outbox]:
        """Return the state of a node that leaves in good order, and its last messages: all it has, to out-neighbours.

        The state is without mass, but can still :meth:`take_back` messages whose receivers vanish; then it leaves
        again.
        """
        return state, ()

    def join(self, model: Real, layout: Layout) -> State:
        """Return the state of a node that enters a run under way, with the run's initial model for a start."""
        return self.init(model, layout)


def real(model: Real) -> Real:
    """Return ``model`` as a contiguous copy in float32 or float64.

    Raises
    ------
    MessageError
        When it has another dtype or is not a vector.
    """
    if model.ndim != 1 or model.dtype not in (np.float32, np.float64):
        raise MessageError(f"a model is {model.dtype}{model.shape}; expected a float32 or float64 vector")
    # A copy in any case: the caller may go on writing to its model.
    return np.ascontiguousarray(model).copy()


def opened(model: Real, layout: Layout) -> Real:
    """Return a copy of ``model``, as :func:`real` does.

    Raises
    ------
    StateError
        When its size is not the layout's.
    """
    x = real(model)
    if x.size != layout.size:
        raise StateError(f"the model has {x.size} elements, its layout {layout.size}; they must be of one model")
    return x


def largest_message(algorithm: Algorithm, size: int, itemsize: int) -> int:
    """Return the bytes that no message of an honest node exceeds, of a model of ``size`` numbers of ``itemsize`` bytes.

    Per vector a whole estimate, and a change of it with a float64 and an index for every element.
    """
    # 12: a float64 value and a 32-bit index. 1024: what does not grow with the model (header, digest, lengths, seal).
    return algorithm.vectors_per_message * size * (itemsize + 12) + 1024
