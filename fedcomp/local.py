"""The in-memory driver: runs a system in this process by reference, for experiments and for tests of all systems."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedcomp.asks import mark_of, read_mark, wait_for
from fedcomp.codecs import State
from fedcomp.errors import FedcompError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.mailbox import Mailbox, PostError, Stamped
from fedcomp.program import (
    EVALUATE,
    HELLO,
    Answer,
    AnswerError,
    Ask,
    Collect,
    KeyPair,
    Me,
    Mean,
    Now,
    Round,
    Rule,
    Step,
    System,
    Wait,
)
from fedcomp.stateful import epoch_of, next_epoch
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
    asked : (int, Ask), optional
        To what, and in which round.
    """

    memory: State
    generation: int = 0
    pending: Frame | None = None
    sent: int = 0
    last: Reply | None = None
    asked: tuple[int, Ask] | None = None


@dataclass
class Local:
    """The in-memory driver: runs a system's rounds in this process.

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
        :attr:`fedcomp.program.Me.data` by node.
    brought : object, optional
        The server app's data: :attr:`fedcomp.program.Now.data`.
    fault : callable
        ``fault(number, node, exchange)``: "" for none, "silent" (the ask is lost), "lost" (the answer is), "late" (the
        answer comes in the next exchange), "stale" (in place of the answer comes that to an earlier exchange), "crash"
        (the client half breaks before it has committed), "twice" (the ask comes twice, and so does the answer), "wiped"
        (the node has forgotten everything).

    Attributes
    ----------
    clients : dict of int to Node
    consumed : dict of int to (int, int)
        Per node, the generation and number of its last frame that is in the model.
    late : list of Reply
        Replies that arrive in the next exchange.
    mailbox : Mailbox
        Messages between clients.
    kept : dict of int to dict of str to bytes
        Data that nodes store besides their memories.
    identities : dict of int to KeyPair
        The nodes' randomly generated key pairs.
    state : dict
        The system's state between rounds.
    told : dict
        The system's report of the last round.
    answers : list of Answer
        Answers received in the last round, in order of arrival.
    bytes_up, bytes_down : int
        Bytes of all frames, posts and blobs in all rounds; blobs only to nodes that lack them.
    refused : dict of int to list of str
        Refused nodes with reasons, by round.
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
    brought: Any = None
    fault: Callable[[int, int, int], str] = lambda number, node, exchange: ""
    state: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, Node] = field(default_factory=dict)
    consumed: dict[int, tuple[int, int]] = field(default_factory=dict)
    late: list[Reply] = field(default_factory=list)
    mailbox: Mailbox = field(default_factory=Mailbox)
    kept: dict[int, dict[str, Frame]] = field(default_factory=dict)
    identities: dict[int, KeyPair] = field(default_factory=dict)
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
        """Return the memory with which a client begins its next round, unacknowledged frames rolled back."""
        client = self.client(node)
        if client.pending is None or self.acknowledged(node):
            return client.memory
        return self.system.rollback(client.memory, client.pending, self.layout)

    def identity(self, node: int) -> KeyPair | None:
        """Return a client's key pair, made at its first use; it survives the loss of the node's memory.

        None where the system has no use for one.
        """
        if node not in self.identities and self.system.KEYS is not None:
            self.identities[node] = self.system.KEYS.generate()
        return self.identities.get(node)

    def step(
        self, number: int, nodes: Sequence[int] | None = None, program: Callable[[Now], Round] | None = None
    ) -> Step | None:
        """Run one round among ``nodes``, by default all; return its step, already applied to the model.

        ``program`` takes the place of the system's ``round``: another method of it.
        """
        carried: dict[int, tuple[int, int]] = {}
        now = self._now(number, nodes, self.mailbox.copy(), carried)
        made = self._play(now, (program or self.system.round)(now), carried)
        self.state, self.told, self.mailbox = now.state, now.told, now.mailbox
        if made is not None:
            self.consumed |= {node: carried[node] for node in made.consumed if node in carried}
            self._move(made, number)
        return made

    def evaluate(self, number: int, nodes: Sequence[int] | None = None) -> list[Answer]:
        """Let clients evaluate the model by the system's own exchanges; return all answers."""
        now = self._now(number, nodes, Mailbox(), {})
        program = self.system.evaluation(now)
        if program is None:
            return []
        self._play(now, program, {})
        return self.answers

    def _now(
        self, number: int, nodes: Sequence[int] | None, mailbox: Mailbox, carried: dict[int, tuple[int, int]]
    ) -> Now:
        """Return a round as the program sees it. ``carried`` has, by node, the generation and number of the frame that
        left its memory."""
        who = tuple(range(self.nodes) if nodes is None else sorted(nodes))
        refused = self.refused.setdefault(number, [])
        start = self.model.view()
        start.setflags(write=False)

        def unpack(node: int, data: bytes) -> Answer:
            answer, mark = _unpacked(node, data)
            credit(node, mark)
            return answer

        def credit(node: int, mark: bytes) -> None:
            sequence, generation = read_mark(mark)
            carried[node] = generation, sequence

        return Now(
            number,
            who,
            self.layout,
            lambda: start,
            self.seed,
            self.rule,
            # A state that a broken round left half made is thrown away.
            dict(self.state),
            lambda n, why: refused.append(f"{n}: {why}"),
            tensors=lambda: self.layout.unflatten(start),
            keys={node: pair.public for node in who if (pair := self.identity(node)) is not None},
            mailbox=mailbox,
            unpack=unpack,
            credit=credit,
            data=self.brought,
        )

    def _play(self, now: Now, program: Round, carried: dict[int, tuple[int, int]]) -> Step | None:
        """Drive a program; record which frames left memories with the answers."""
        exchange, self.answers, again = 0, [], self.system.LOST == "again"
        try:
            wanted = next(program)
            while True:
                self.sequence, exchange = self.sequence + 1, exchange + 1
                wait = wait_for(wanted)
                # All of them before one is delivered: what is posted in an exchange comes with the next.
                sent = [now.mailbox.stamp(self.sequence, now.number, ask, again=again) for ask in wait.asks]
                good = self._exchanged(now, wait, sent, exchange, carried)
                for node, answer in good.items():
                    now.mailbox.answered(node)
                    now.mailbox.put(answer.post)
                if not again:
                    now.mailbox.put_back()
                self.answers += good.values()
                wanted = program.send(list(good.values()))
        except StopIteration as end:
            made: Step | None = end.value
            return made
        except BaseException:
            # The round is made again as by a restarted server.
            self.sequence = next_epoch(self.sequence)
            raise

    def _exchanged(
        self, now: Now, wait: Wait, sent: Sequence[Stamped], exchange: int, carried: dict[int, tuple[int, int]]
    ) -> dict[int, Answer]:
        """Return the usable answers of one exchange, in the order of nodes."""
        came, self.late = self.late, []
        good: dict[int, Answer] = {}
        expected = {stamped.ask.node: stamped for stamped in sent}
        for stamped in (None, *sent):
            # Who is not there is not asked.
            if stamped is not None and stamped.ask.node in now.nodes:
                came = self._deliver(now, stamped, exchange)
            for reply in came:
                node, says = reply.answer.node, reply.answer.say
                # What answers an earlier exchange, or comes again, is of no use.
                if node not in expected or reply.sequence != expected[node].number or node in good:
                    continue
                if wait.enough is not None and wait.enough([good[n] for n in sorted(good)]):
                    now.refuse(node, "late: enough had answered")
                    continue
                kind = expected[node].ask.expects
                if kind is not None and not isinstance(says, kind):
                    now.refuse(node, f"says {type(says).__name__}, expected {kind.__name__}")
                    continue
                try:
                    now.mailbox.require(reply.answer.post, range(self.nodes))
                except PostError as why:
                    now.refuse(node, f"{type(why).__name__}: {why}")
                    continue
                good[node] = reply.answer
                if reply.carries:
                    carried[node] = reply.generation, reply.sequence
            came = []
        return {node: good[node] for node in sorted(good)}

    def _deliver(self, now: Now, stamped: Stamped, exchange: int) -> list[Reply]:
        """Deliver one ask to its client; return the reply."""
        ask = stamped.ask
        what = self.fault(now.number, ask.node, exchange)
        if what == "silent":
            return []
        if what == "wiped":
            self.clients.pop(ask.node, None)
        client = self.client(ask.node)
        if what == "stale":
            return [] if client.last is None else [client.last]
        held = self.held[ask.node]
        self.bytes_down += sum(map(len, ask.frames.values())) + sum(len(post.data) for post in ask.mail)
        self.bytes_down += sum(len(data) for data in ask.blobs.values() if data not in held)
        held.update(ask.blobs.values())
        replies = []
        for _ in range(2 if what == "twice" else 1):
            try:
                reply = self._receive(client, now, stamped, crash=what == "crash")
            except FedcompError as why:
                # A client half that refuses has changed nothing.
                now.refuse(ask.node, f"{type(why).__name__}: {why}")
                return []
            if reply is not None and what != "lost":
                frames = reply.answer.frames
                self.bytes_up += sum(map(len, frames.values())) + sum(len(post.data) for post in reply.answer.post)
                held.update(frames[name] for name in self.system.SHARED if name in frames)
                replies.append(reply)
        if what == "late":
            self.late += replies
            return []
        return replies

    def _receive(self, client: Node, now: Now, stamped: Stamped, *, crash: bool) -> Reply | None:
        """Let a client answer; its memory changes as the last act."""
        ask, sequence, last = stamped.ask, stamped.number, client.last
        if last is not None and last.sequence == sequence:
            return last
        asked = stamped.round, ask
        later = last is not None and epoch_of(sequence) > epoch_of(last.sequence)
        if self.system.LOST == "again" and last is not None and later and client.asked == asked:
            # A restarted server asks for what was answered already.
            client.last = last._replace(sequence=sequence)
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
        me = Me(
            ask.node,
            stamped.round,
            self.seed,
            self.layout,
            lambda: now.model,
            learn,
            self.data.get(ask.node),
            kept=dict(self.kept.get(ask.node, {})),
            run=b"local",
            identity=self.identity(ask.node),
            pack=lambda answer: _packed(answer._replace(weight=self.weight(ask.node)), me.mark()),
            mark=lambda: mark_of(sequence, client.generation),
            weight=lambda metric: self.weight(ask.node),
        )
        memory, answer = self.system.client(dict(memory), ask, me)
        if crash:
            return None
        # Whoever answers is who was asked.
        answer = answer._replace(
            node=ask.node,
            weight=0.0 if answer.bare else self.weight(ask.node),
            post=tuple(post._replace(source=ask.node) for post in answer.post),
        )
        if answer.keep and ask.kind != HELLO:
            self.kept[ask.node] = {**self.kept.get(ask.node, {}), **answer.keep}
        if ask.kind in (HELLO, EVALUATE):
            return Reply(sequence, client.generation, answer, carries=False)
        left = answer.frames.get(self.system.SENT) if answer.sent is None else answer.sent
        if left is not None:
            pending, sent = left, sequence
        reply = Reply(sequence, client.generation, answer, left is not None)
        client.memory, client.pending, client.sent, client.last, client.asked = memory, pending, sent, reply, asked
        return reply

    def _move(self, step: Step, number: int) -> None:
        """Let the model take a step."""
        if step.model is not None:
            self.model = step.model
        elif step.tensors is not None:
            self.model = self.layout.flatten(step.tensors)
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


def _packed(answer: Answer, mark: bytes) -> bytes:
    """Return an answer as bytes: its mark, its weight, its frames. Words belong to an exchange and are not included."""
    sizes = {name: len(frame) for name, frame in answer.frames.items()}
    head = json.dumps([answer.weight, sizes]).encode()
    return b"".join([mark, len(head).to_bytes(4, "little"), head, *answer.frames.values()])


def _unpacked(node: int, data: bytes) -> tuple[Answer, bytes]:
    """Return an answer and its mark; raise AnswerError if the bytes are not an answer."""
    end = 20 + int.from_bytes(data[16:20], "little")
    try:
        weight, sizes = json.loads(data[20:end])
        frames, at = {}, end
        for name, size in sizes.items():
            frames[name], at = bytes(data[at : at + size]), at + size
        if at != len(data) or not isinstance(weight, float):
            raise ValueError("its length is another one")
    except (ValueError, TypeError, AttributeError) as why:
        raise AnswerError(f"not a packed answer: {why}") from why
    return Answer(node, weight, frames=frames), data[:16]
