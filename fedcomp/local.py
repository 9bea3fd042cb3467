"""Runs a system in this process, by reference: for experiments, and for the tests that hold for every system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedcomp.codecs import State
from fedcomp.errors import FedcompError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.program import HELLO, Answer, Ask, Collect, Me, Mean, Now, Rule, Step, System
from fedcomp.wire import Frame

Train = Callable[[int, int, Vector], "Vector | Update"]
"""``train(number, node, start)`` returns the trained model; an Update, with ``outer``, where its change is known so."""


class Reply(NamedTuple):
    """An answer on its way.

    Attributes
    ----------
    sequence : int
        Number of the exchange that it answers.
    generation : int
        Of the memory that it came from.
    answer : Answer
    carries : bool
        Whether mass left the memory with it.
    """

    sequence: int
    generation: int
    answer: Answer
    carries: bool


@dataclass
class Node:
    """A client's side of the transaction.

    Attributes
    ----------
    memory : State
    generation : int
        Number of the exchange with which the memory began.
    pending : bytes, optional
        The frame that left last: the client does not know its fate until the server says which one it consumed.
    sent : int
        Number of the exchange in which that was.
    last : Reply, optional
        What was answered last: a message that comes twice is answered twice alike.
    """

    memory: State
    generation: int = 0
    pending: Frame | None = None
    sent: int = 0
    last: Reply | None = None


@dataclass
class Local:
    """The driver in memory.

    Parameters
    ----------
    system : System
    layout : Layout
    model : float32 array, shape (layout size,)
    train : callable
        ``train(number, node, start)``; see :data:`Train`.
    weight : callable
        ``weight(node)``: a client's weight in means.
    nodes : int
        Number of clients.
    seed : int
    rule : Rule
    data : mapping of int to object
        By node: :attr:`fedcomp.program.Me.data`.
    fault : callable
        ``fault(number, node, exchange)``: "" for none, "silent" (the ask is lost), "lost" (the answer is), "late" (the
        answer comes in the next exchange), "stale" (in place of the answer comes that to an earlier exchange), "crash"
        (the client half breaks before it has committed), "twice" (the ask comes twice, and so does the answer), "wiped"
        (the node has forgotten everything).

    Attributes
    ----------
    clients : dict of int to Node
    consumed : dict of int to (int, int)
        What the server knows of a node: generation and number of the last frame that is in the model.
    late : list of Reply
        What comes in the next exchange.
    state : dict
        What the system keeps between rounds.
    told : dict
        What it told of the last one.
    answers : list of Answer
        What the server received in the last round, in the order in which it came.
    bytes_up, bytes_down : int
        Frames and blobs that passed, in all rounds; blobs to nodes that lack them.
    refused : dict of int to list of str
        By round, who was refused and why.
    """

    system: System
    layout: Layout
    model: Vector
    train: Train
    weight: Callable[[int], float]
    nodes: int
    seed: int = 0
    rule: Rule = field(default_factory=Mean)
    data: Mapping[int, Any] = field(default_factory=dict)
    fault: Callable[[int, int, int], str] = lambda number, node, exchange: ""
    state: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, Node] = field(default_factory=dict)
    consumed: dict[int, tuple[int, int]] = field(default_factory=dict)
    late: list[Reply] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sequence: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: dict[int, list[str]] = field(default_factory=dict)
    held: dict[int, set[Frame]] = field(default_factory=dict)

    def client(self, node: int) -> Node:
        """Return a client, made at its first use."""
        client = self.clients.get(node)
        # A memory that knows nothing of what was consumed is an older copy: it would send that mass again.
        if client is None or self.consumed.get(node, (0, 0)) > (client.generation, client.sent):
            client = self.clients[node] = Node(self.system.start(self.layout), self.sequence)
            self.held[node] = set()
        return client

    def acknowledged(self, node: int) -> bool:
        """Whether the last frame that left a client is in the model."""
        client = self.client(node)
        return client.pending is not None and self.consumed.get(node) == (client.generation, client.sent)

    def settled(self, node: int) -> State:
        """Return the memory with which a client begins its next round: with what it sent in vain."""
        client = self.client(node)
        if client.pending is None or self.acknowledged(node):
            return client.memory
        return self.system.rollback(client.memory, client.pending, self.layout)

    def step(self, number: int, nodes: Sequence[int] | None = None) -> Step | None:
        """Run one round among ``nodes``, by default all; return what it came to, already in the model."""
        who = tuple(range(self.nodes) if nodes is None else sorted(nodes))
        refused = self.refused.setdefault(number, [])
        # A state that a broken round left half made is thrown away.
        state = dict(self.state)
        start = self.model.view()
        start.setflags(write=False)
        now = Now(
            number,
            who,
            self.layout,
            lambda: start,
            self.seed,
            self.rule,
            state,
            lambda n, why: refused.append(f"{n}: {why}"),
        )
        program, exchange, self.answers = self.system.round(now), 0, []
        carried: dict[int, tuple[int, int]] = {}
        made: Step | None = None
        try:
            asks = next(program)
            while True:
                self.sequence, exchange = self.sequence + 1, exchange + 1
                came, self.late = self.late, []
                for ask in asks:
                    came += self._deliver(now, ask, exchange)
                expected = {ask.node: ask.expects for ask in asks}
                good: dict[int, Answer] = {}
                for reply in came:
                    node, says = reply.answer.node, reply.answer.say
                    # What answers an earlier exchange, or comes again, is of no use.
                    if reply.sequence != self.sequence or node in good:
                        continue
                    kind = expected[node]
                    if kind is not None and not isinstance(says, kind):
                        now.refuse(node, f"says {type(says).__name__}, expected {kind.__name__}")
                        continue
                    good[node] = reply.answer
                    if reply.carries:
                        carried[node] = reply.generation, reply.sequence
                self.answers += good.values()
                asks = program.send([good[node] for node in sorted(good)])
        except StopIteration as end:
            made = end.value
        self.state, self.told = state, now.told
        if made is not None:
            self.consumed |= {node: carried[node] for node in made.consumed if node in carried}
            self._move(made, number)
        return made

    def _deliver(self, now: Now, ask: Ask, exchange: int) -> list[Reply]:
        """Bring one ask to its client; return what comes back."""
        what = self.fault(now.number, ask.node, exchange)
        if what == "silent":
            return []
        if what == "wiped":
            self.clients.pop(ask.node, None)
        client = self.client(ask.node)
        if what == "stale":
            return [] if client.last is None else [client.last]
        held = self.held[ask.node]
        self.bytes_down += sum(map(len, ask.frames.values()))
        self.bytes_down += sum(len(data) for data in ask.blobs.values() if data not in held)
        held.update(ask.blobs.values())
        replies = []
        for _ in range(2 if what == "twice" else 1):
            try:
                reply = self._receive(client, now, ask, crash=what == "crash")
            except FedcompError as why:
                # A client half that refuses has changed nothing.
                now.refuse(ask.node, f"{type(why).__name__}: {why}")
                return []
            if reply is not None and what != "lost":
                frames = reply.answer.frames
                self.bytes_up += sum(map(len, frames.values()))
                held.update(frames[name] for name in self.system.SHARED if name in frames)
                replies.append(reply)
        if what == "late":
            self.late += replies
            return []
        return replies

    def _receive(self, client: Node, now: Now, ask: Ask, *, crash: bool) -> Reply | None:
        """Let a client answer; its memory changes as the last act."""
        if client.last is not None and client.last.sequence == self.sequence:
            return client.last
        memory, pending, sent = client.memory, client.pending, client.sent
        if ask.kind == "train":
            memory, pending = self.settled(ask.node), None

        def learn(whole: bool, collect: Collect | None) -> Update:
            trained = self.train(now.number, ask.node, now.model)
            vector = trained.vector if isinstance(trained, Update) else trained
            outer = trained.outer if isinstance(trained, Update) and collect is not None else {}
            return Update(vector if whole else vector - now.model, self.layout, outer)

        for array in memory.values():
            # A half that wrote into what it was given would have acted by half where it breaks.
            array.setflags(write=False)
        me = Me(ask.node, now.number, self.seed, self.layout, lambda: now.model, learn, self.data.get(ask.node))
        memory, answer = self.system.client(dict(memory), ask, me)
        if crash:
            return None
        # Whoever answers is who was asked.
        answer = answer._replace(node=ask.node, weight=self.weight(ask.node))
        if ask.kind == HELLO:
            return Reply(self.sequence, client.generation, answer, carries=False)
        left = answer.frames.get(self.system.SENT) if answer.sent is None else answer.sent
        if left is not None:
            pending, sent = left, self.sequence
        reply = Reply(self.sequence, client.generation, answer, left is not None)
        client.memory, client.pending, client.sent, client.last = memory, pending, sent, reply
        return reply

    def _move(self, step: Step, number: int) -> None:
        """Let the model take a step."""
        if step.model is not None:
            self.model = step.model
        elif step.frame is not None:
            # As nodes read it that get the step in place of the model.
            moved = self.model.copy()
            self.system.reads(step.blobs, number, self.layout).accumulate(step.frame, 1.0, Update(moved, self.layout))
            self.model = moved
            derived = self.system.after(step.frame, step.blobs, number, self.seed, self.layout)
            for held in self.held.values():
                held.update(derived.values())
        elif step.change is not None:
            self.model = self.model + step.change
        elif step.single is not None:
            raise NotImplementedError("the step holds single updates, of which no model is made here")
        self.layout.round_to_dtypes(self.model)
