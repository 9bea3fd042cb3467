"""Runs a system in this process, by reference: for experiments, and for the tests that hold for every system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcomp.codecs import State
from fedcomp.errors import FedcompError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.program import Answer, Ask, Collect, Me, Mean, Now, Rule, Step, System
from fedcomp.wire import Frame

Train = Callable[[int, int, Vector], "Vector | Update"]
"""``train(number, node, start)`` returns the trained model; an Update, with ``outer``, where its change is known so."""


@dataclass
class Node:
    """A client's side of the transaction.

    Attributes
    ----------
    memory : State
    pending : bytes, optional
        The frame whose fate the client does not know until the server says that it was consumed.
    told : bool
        Whether the server has said so.
    last : (int, Answer), optional
        Number of the message answered last, and the answer: one that comes twice is answered twice alike.
    """

    memory: State
    pending: Frame | None = None
    told: bool = True
    last: tuple[int, Answer] | None = None


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
    fault : callable
        ``fault(number, node, exchange)``: "" for none, "silent" (the ask is lost), "lost" (the answer is), "crash"
        (the client half breaks before it has committed), "twice" (the ask comes twice), "wiped" (the node has forgotten
        everything).

    Attributes
    ----------
    clients : dict of int to Node
    state : dict
        What the system keeps between rounds.
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
    fault: Callable[[int, int, int], str] = lambda number, node, exchange: ""
    state: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, Node] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    sequence: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: dict[int, list[str]] = field(default_factory=dict)
    held: dict[int, set[Frame]] = field(default_factory=dict)

    def client(self, node: int) -> Node:
        """Return a client, made at its first use."""
        if node not in self.clients:
            self.clients[node] = Node(self.system.start(self.layout))
            self.held[node] = set()
        return self.clients[node]

    def step(self, number: int, nodes: Sequence[int] | None = None) -> Step | None:
        """Run one round among ``nodes``, by default all; return what it came to, already in the model."""
        who = tuple(range(self.nodes) if nodes is None else sorted(nodes))
        refused = self.refused.setdefault(number, [])
        # A state that a broken round left half made is thrown away.
        state = dict(self.state)
        start = self.model.view()
        start.setflags(write=False)
        now = Now(
            number, who, self.layout, start, self.seed, self.rule, state, lambda n, why: refused.append(f"{n}: {why}")
        )
        program, exchange, self.answers = self.system.round(now), 0, []
        made: Step | None = None
        try:
            asks = next(program)
            while True:
                self.sequence, exchange = self.sequence + 1, exchange + 1
                answers = [self._deliver(now, ask, exchange) for ask in asks]
                good = [a for a in answers if a is not None]
                self.answers += good
                asks = program.send(sorted(good, key=lambda a: a.node))
        except StopIteration as end:
            made = end.value
        self.state = state
        if made is not None:
            for node in made.consumed:
                self.client(node).told = True
            self._move(made, number)
        return made

    def _deliver(self, now: Now, ask: Ask, exchange: int) -> Answer | None:
        """Bring one ask to its client and the answer back, or not."""
        what = self.fault(now.number, ask.node, exchange)
        if what == "silent":
            return None
        if what == "wiped":
            self.clients.pop(ask.node, None)
        client, held = self.client(ask.node), self.held[ask.node]
        self.bytes_down += sum(map(len, ask.frames.values()))
        self.bytes_down += sum(len(data) for data in ask.blobs.values() if data not in held)
        held.update(ask.blobs.values())
        answer = None
        for _ in range(2 if what == "twice" else 1):
            try:
                answer = self._receive(client, now, ask, crash=what == "crash")
            except FedcompError as why:
                # A client half that refuses has changed nothing.
                now.refuse(ask.node, f"{type(why).__name__}: {why}")
                return None
        if answer is None or what == "lost":
            return None
        self.bytes_up += sum(map(len, answer.frames.values()))
        held.update(answer.frames[name] for name in self.system.SHARED if name in answer.frames)
        if ask.expects is not None and not isinstance(answer.say, ask.expects):
            now.refuse(ask.node, f"says {type(answer.say).__name__}, expected {ask.expects.__name__}")
            return None
        return answer

    def _receive(self, client: Node, now: Now, ask: Ask, *, crash: bool) -> Answer | None:
        """Let a client answer; its memory changes as the last act."""
        if client.last is not None and client.last[0] == self.sequence:
            return client.last[1]
        memory, pending, told = client.memory, client.pending, client.told
        if ask.kind == "train" and pending is not None and not told:
            memory, pending = self.system.rollback(memory, pending, self.layout), None

        def learn(whole: bool, collect: Collect | None) -> Update:
            trained = self.train(now.number, ask.node, now.model)
            vector = trained.vector if isinstance(trained, Update) else trained
            outer = trained.outer if isinstance(trained, Update) and collect is not None else {}
            return Update(vector if whole else vector - now.model, self.layout, outer)

        for array in memory.values():
            # A half that wrote into what it was given would have acted by half where it breaks.
            array.setflags(write=False)
        me = Me(ask.node, now.number, self.seed, self.layout, lambda: now.model, learn)
        memory, answer = self.system.client(dict(memory), ask, me)
        if crash:
            return None
        answer = answer._replace(weight=self.weight(ask.node))
        sent = answer.frames.get(self.system.SENT) if answer.sent is None else answer.sent
        if sent is not None:
            pending, told = sent, False
        client.memory, client.pending, client.told, client.last = memory, pending, told, (self.sequence, answer)
        return answer

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
            raise NotImplementedError("single updates need a strategy that makes one of them; take them from the step")
        self.layout.round_to_dtypes(self.model)
