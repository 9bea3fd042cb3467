"""Decentralised learning: every node keeps its own model and exchanges messages with its neighbours in a graph.

What a node computes is an iteration of :mod:`fedcomp.gossip`, a pure function of its state and its messages. The server
knows the graph, says who does what next, and never looks into a message. Asks are repeated verbatim until they are
answered, and answered from memory when they come again, so no message counts twice and none is lost on its way.

Push-sum algorithms go on without nodes that have not answered: edges to them rest, their messages wait, and what nobody
takes in goes back to its sender, whose mass it is. Of all other algorithms everybody waits for every message of an
iteration; when a node goes, comes or leaves, all others begin a new epoch: models stay, what neighbours share restarts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import State
from fedcomp.coding.sealing import PeerIdentity
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Outbox, Real, View, largest_message
from fedcomp.gossip.errors import TOO_FAR, Diverged, MessageError
from fedcomp.gossip.pushsum import PushSum
from fedcomp.gossip.receiving import received, taken_back
from fedcomp.gossip.topology import Topology, topology_of
from fedcomp.gossip.traffic import GossipTraffic, Phase
from fedcomp.mailbox import Mailbox, Post
from fedcomp.plain import Count, from_fields, to_plain
from fedcomp.program import HELLO, SHOW, Answer, AnswerError, Ask, KeyPair, Me, Now, Round, Said, Step, System
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Made, Many, OneOf, Switch, Text
from fedcomp.rules import Real as Number

Arrays = Mapping[str, NDArray[Any]]

RETURNED: Final = "returned/"
"""How the name of a post begins that goes back to its sender. Names of all others are the life of a sender that wrote
it, which of its messages it is, and the bytes of that, which need not pass the server: "0/2/1234"."""

_NAME: Final = re.compile(r"\d{1,9}/\d{1,9}/\d{1,10}")
_MOST: Final = 65_536
_FIGURES: Final = 32
_REASON: Final = 300
_OWN: Final = "node/own/"
_CHANGE: Final = "node/change"
_PLACE: Final = "node/place"
_SHOWN: Final = "own/"

Nodes = Annotated[tuple[int, ...], Many(Int(), _MOST)]
Weights = Annotated[tuple[float, ...], Many(Number(), _MOST)]
Texts = Annotated[tuple[str, ...], Many(Text(1 << 12), _MOST)]
Start = Literal["", "common", "empty", "reset"]


class Learnt(NamedTuple):
    """A gradient, and what the forward pass that made it did to tensors that follow none.

    Attributes
    ----------
    gradient : ndarray, shape (d,)
    change : ndarray, shape (d,), optional
        How running statistics moved.
    own : mapping of str to ndarray
        The tensors that stay at home, as they are now.
    """

    gradient: Real
    change: Real | None = None
    own: Arrays = MappingProxyType({})


class NodeData(Protocol):
    """What an app brings: where its node begins, and what it learns from.

    Attributes
    ----------
    learns : bool
        Whether there is anything to learn from.
    """

    learns: bool

    def start(self, me: Me, dtype: str) -> tuple[Real, Arrays]:
        """Return the model to begin or join with, shape ``(d,)``, and the tensors that stay at home."""
        ...

    def learn(self, me: Me, z: Real, own: Arrays, key: Key) -> Learnt:
        """Return the (stochastic) gradient at ``z``; ``key`` chooses the batch."""
        ...

    def evaluate(self, me: Me, z: Real, own: Arrays) -> Mapping[str, float]:
        """Return figures of a model, on data that all nodes have in common."""
        ...


@dataclass(frozen=True, repr=False, eq=False)
class Turn(Said):
    """What a node does next.

    Attributes
    ----------
    do : {"step", "finish", "leave", "show"}
        Apply what came and begin an iteration; apply what came only; apply it and send away all there is; say what the
        model is after messages that wait, and change nothing.
    turn, epoch, life : int
        How many turns this node has had; how often a synchronous run has restarted; how often the node was given up.
    start : {"", "common", "empty", "reset"}
        How the state is made: go on, begin the run, join it, or go on from the own model in a new epoch.
    iteration, out, shares, into, weights, dense, resync
        See :class:`fedcomp.gossip.base.View`.
    """

    do: Annotated[str, OneOf("step", "finish", "leave", "show")]
    turn: Annotated[int, Int(absent=0)]
    iteration: Annotated[int, Int(absent=0)] = 0
    epoch: Annotated[int, Int(absent=0)] = 0
    life: Annotated[int, Int(absent=0)] = 0
    start: Annotated[str, OneOf("", "common", "empty", "reset")] = ""
    out: Nodes = ()
    shares: Weights = ()
    into: Nodes = ()
    weights: Weights = ()
    resync: Nodes = ()
    dense: Annotated[bool, Flag(absent=False)] = False

    def conflict(self) -> str:
        unequal = len(self.out) != len(self.shares) or len(self.into) != len(self.weights)
        return "lists of unequal length" if unequal else ""

    def view(self, node: int, seed: int) -> View:
        """Return what the node must know of the iteration."""
        column = dict(zip(self.out, self.shares, strict=True))
        row = dict(zip(self.into, self.weights, strict=True))
        return View(node, self.iteration, column, row, seed, self.dense, frozenset(self.resync))


@dataclass(frozen=True, repr=False, eq=False)
class Done(Said):
    """What came of a turn.

    Attributes
    ----------
    fresh : bool
        The node has no memory of what it should go on with; nothing was done.
    needs, reasons : tuple of int, tuple of str
        Sources whose messages, all of them, could not be applied, and why; they want whole estimates.
    lost : tuple of str
        Why own messages that came back could not be taken back: what they carried is gone.
    noticed, remarks : tuple of int, tuple of str
        Sources whose messages were counted, and what is odd about them.
    failed : str
        Why nothing was sent: what would have left is not finite. The messages were applied.
    facts, values : tuple of str, tuple of float
        :meth:`fedcomp.gossip.base.Algorithm.facts`.
    figures, measured : tuple of str, tuple of float
        What the app measured of the model, where that was to be shown: the frame "model" is the vector, the frames
        "own/..." are the tensors that stay at home.
    """

    fresh: Annotated[bool, Flag(absent=False)] = False
    needs: Nodes = ()
    reasons: Texts = ()
    lost: Texts = ()
    noticed: Nodes = ()
    remarks: Texts = ()
    failed: Annotated[str, Text(1 << 12)] = ""
    facts: Annotated[tuple[str, ...], Many(Text(256), _FIGURES)] = ()
    # Not only finite numbers: a node whose figures overflow must be able to say so, for the watcher to judge.
    values: Annotated[tuple[float, ...], Many(Number(finite=False), _FIGURES)] = ()
    figures: Annotated[tuple[str, ...], Many(Text(256), _FIGURES)] = ()
    measured: Annotated[tuple[float, ...], Many(Number(finite=False), _FIGURES)] = ()

    def conflict(self) -> str:
        pairs = ("needs", "reasons"), ("noticed", "remarks"), ("facts", "values"), ("figures", "measured")
        wrong = [a for a, b in pairs if len(getattr(self, a)) != len(getattr(self, b))]
        return f"{wrong[0]} of another length than what belongs to them" if wrong else ""


class Shown(NamedTuple):
    """A node's model as it showed it: the vector, tensors that stay at home, figures of both, facts of the state."""

    model: Real
    own: Mapping[str, NDArray[Any]]
    figures: Mapping[str, float]
    facts: Mapping[str, float]


@dataclass
class Course:
    """How far a run is: who takes part, and what neighbours do not know of each other.

    Attributes
    ----------
    iteration, epoch : int
        Iterations begun; how often a synchronous run has restarted.
    members, joining, leaving, departing, finished : set of int
        Who takes part; who enters next; members that leave with their next turn; who was told to leave and may still
        get own messages back; who has its final model.
    left : set of int
        Who left in good order, and is not let in again by itself.
    starts : dict of int to str
        How the state is made of those whose next turn has to say so.
    turns, lives : dict of int to int
        Of each node.
    broken : dict of int to set of int
        Sources, and who must get whole estimates of them before anything else.
    failures, excluded : dict of int
        How many iterations in a row failed and why; who was given up for it, or for an answer that cannot be one.
    torn, restarted, vain, unread
        An iteration that was begun cannot be finished; the last turns began an epoch; how many epochs in a row messages
        could not be read, and why.
    noticed : set of (int, int)
        Receivers and senders of which an oddity was reported.
    """

    iteration: Count = 0
    epoch: Count = 0
    members: set[int] = field(default_factory=set)
    joining: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    departing: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    starts: dict[int, Start] = field(default_factory=dict)
    turns: dict[int, Count] = field(default_factory=dict)
    lives: dict[int, Count] = field(default_factory=dict)
    broken: dict[int, set[int]] = field(default_factory=dict)
    failures: dict[int, tuple[Count, str]] = field(default_factory=dict)
    excluded: dict[int, str] = field(default_factory=dict)
    torn: bool = False
    restarted: bool = False
    vain: Count = 0
    unread: str = ""
    noticed: set[tuple[int, int]] = field(default_factory=set)

    def drop(self, node: int) -> None:
        """Forget a node that was given up or has left; what it sent stays good, and cannot come back."""
        for group in (self.members, self.departing, self.leaving, self.finished):
            group.discard(node)
        self.starts.pop(node, None)
        self.lives[node] = self.lives.get(node, 0) + 1


Exchange = Generator[Sequence[Ask], Sequence[Answer], None]


@lru_cache(maxsize=8)
def _graph(config: str) -> Topology:
    found = json.loads(config)
    return topology_of(found, found["n"])


def get_graph(given: Any) -> Topology:
    """Return a graph, or the one of its configuration; nodes make it of every ask, and it is checked once."""
    return given if isinstance(given, Topology) else _graph(json.dumps(given, sort_keys=True))


def get_algorithm_of(given: Any) -> Algorithm:
    """Return an algorithm, or the one of its configuration."""
    return given if isinstance(given, Algorithm) else get_algorithm(given)


@dataclass(frozen=True, repr=False, eq=False)
class Gossip(System, id="gossip"):
    """Decentralised learning: every node has its own model; vertex i of the graph is the node with partition i.

    Parameters
    ----------
    algorithm : Algorithm or dict
        The iteration; what follows from the graph is filled in.
    graph : Topology or dict
        Who sends to whom.
    dtype : str
        "float32" or "float64": of the vectors on the nodes.
    unlike : bool
        Nodes begin with different models; estimates then begin with zeros.
    patience : int
        A node is excluded after this many consecutive missing answers, or after this many failed iterations (of a
        synchronous algorithm: once, since nobody can finish the iteration without it). When more than half of the nodes
        have failed, the run has diverged.
    skew_rounds : int
        Closing iterations without gradients, in which models travel whole (push-sum only).
    observe_every : int
        Rounds between two observations of the models; 0: only the final one of :meth:`closing`.

    Raises
    ------
    TopologyError
        When the graph cannot carry the algorithm.
    ConfigError
        For closing iterations of an algorithm that has no use for them.
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.gossip_node(...))"
    KEYS: ClassVar[type[KeyPair] | None] = PeerIdentity
    TRACED: ClassVar[bool] = True
    LOST: ClassVar[Literal["rollback", "again"]] = "again"
    KEEPS: ClassVar[bool] = True
    SEVERAL: ClassVar[bool] = True
    SENT: ClassVar[str] = ""
    SAYS: ClassVar[tuple[type[Said], ...]] = (Turn, Done)

    algorithm: Annotated[Algorithm, Made(get_algorithm_of)]
    graph: Annotated[Topology, Made(get_graph)]
    dtype: Annotated[str, OneOf("float32", "float64")] = "float32"
    unlike: Switch = False
    patience: Annotated[int, Int(1)] = 5
    skew_rounds: Annotated[int, Int()] = 0
    observe_every: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        self.graph.check(self.algorithm)
        object.__setattr__(self, "algorithm", self.algorithm.fitted(self.graph))
        if self.skew_rounds and not self.algorithm.asynchronous:
            return (
                f"skew_rounds={self.skew_rounds} is not valid with {self.algorithm.name}: closing iterations are for "
                "push-sum algorithms; leave it at 0"
            )
        return ""

    # The server's half.

    def round(self, now: Now) -> Round:
        run = self._course(now)
        yield from self._iteration(now, run)
        if self.observe_every and now.number % self.observe_every == 0:
            yield from self._observed(now, run)
        return self._kept(now, run)

    def observing(self, now: Now) -> Round:
        """Look at the models, and change nothing."""
        run = self._course(now)
        yield from self._observed(now, run)
        return self._kept(now, run)

    def closing(self, now: Now) -> Round:
        """Run the closing iterations, deliver all messages and look at the models: what follows the last round."""
        run, synchronous = self._course(now), not self.algorithm.asynchronous
        for _ in range(self.skew_rounds):
            yield from self._iteration(now, run, dense=True)
        while now.open or run.departing or not all(self._finished(now, run, node) for node in run.members):
            asks: list[Ask] = []
            if not (synchronous and now.open):
                if synchronous:
                    self._restart(now, run, finishing=True)
                idle = sorted(run.members - now.open.keys())
                asks = [self._finish(now, run, node) for node in idle if not self._finished(now, run, node)]
                asks += self._see_off(now, run, set(idle))
                run.iteration += bool(run.departing)
            yield from self._exchange(now, run, asks, closing=True)
        yield from self._observed(now, run)
        return self._kept(now, run)

    def course(self, state: Mapping[str, Any]) -> Course:
        """Return how far the run of a state between two rounds is."""
        return from_fields(Course, state["course"])

    def leave(self, state: dict[str, Any], node: int) -> dict[str, Any]:
        """Return the state between two rounds in which a member leaves in good order with its next turn: what it has
        goes to its neighbours. It is not let in again.

        Raises
        ------
        ConfigError
            When it is not a member.
        """
        run = self.course(state)
        if node not in run.members:
            raise ConfigError(f"node {node} cannot leave; members are {sorted(run.members)}")
        run.leaving.add(node)
        run.left.add(node)
        return {**state, "course": to_plain(run)}

    def join(self, state: dict[str, Any], node: int) -> dict[str, Any]:
        """Return the state between two rounds in which a node that is no member enters with the next one, also one that
        has left or was excluded.

        Raises
        ------
        ConfigError
            When it is a member, or no vertex of the graph.
        """
        run = self.course(state)
        if node in run.members or not 0 <= node < self.graph.n:
            members = sorted(run.members)
            raise ConfigError(f"node {node} cannot join; members are {members} of a graph of {self.graph.n}")
        run.joining.add(node)
        run.left.discard(node)
        run.excluded.pop(node, None)
        return {**state, "course": to_plain(run)}

    def _course(self, now: Now) -> Course:
        now.told.update(dict.fromkeys(("exchanges", "repeated", "answers", "started"), 0))
        now.told.update(events=[], figures={}, models={}, traffic=GossipTraffic(), answered=set())
        if "course" in now.state:
            return self.course(now.state)
        # Who has not said which vertex it is has no key.
        members = set(now.nodes) & set(range(self.graph.n)) & now.keys.keys()
        return Course(members=members, starts=dict.fromkeys(members, "common"))

    def _kept(self, now: Now, run: Course) -> Step | None:
        """Store the progress of the run; return the mean of the models that nodes sent."""
        now.state["course"] = to_plain(run)
        now.told["course"] = run
        models = [shown.model for _, shown in sorted(now.told["models"].items())]
        if not models:
            return None
        return Step((), model=np.asarray(np.mean(models, axis=0, dtype=np.float64), np.float32))

    def _iteration(self, now: Now, run: Course, *, dense: bool = False) -> Exchange:
        """Start an iteration on all nodes that can. With a synchronous algorithm, wait until all have started or are
        gone."""
        run.finished.clear()
        # Not those whose iterations failed: they would fail again, and every return costs all others an epoch.
        there = {node for node in now.nodes if node < self.graph.n and node in now.keys}
        away = there - run.members - run.departing - run.joining - run.left - run.excluded.keys() - now.open.keys()
        calls = [Ask(node, HELLO) for node in sorted(away)]
        if self.algorithm.asynchronous:
            self._enter(now, run)
            yield from self._exchange(now, run, self._turns(now, run, dense), calls)
            return
        while now.open:
            yield from self._exchange(now, run, [])
        self._restart(now, run)
        yield from self._exchange(now, run, self._turns(now, run, dense), calls)
        while now.open:
            yield from self._exchange(now, run, [])

    def _observed(self, now: Now, run: Course) -> Exchange:
        """Ask all nodes that have answered for their models, after the messages that wait for them."""
        if now.open and not self.algorithm.asynchronous:
            return
        # Who has yet to begin has no model.
        nodes = [n for n in sorted(run.members - now.open.keys()) if run.starts.get(n, "") in ("", "reset")]
        # Messages of a torn iteration will never be applied: shown is what the coming reset leaves.
        asks = [
            self.question(run, node, () if run.torn else waiting(now.mailbox, node))
            for node in nodes
            if node in now.nodes
        ]
        if not asks:
            return
        answers = yield asks
        for answer in answers:
            self._shown(now, answer)

    def question(self, run: Course, node: int, mail: Sequence[Post]) -> Ask:
        """Return the question what a node's model is after messages."""
        say = Turn("show", run.turns[node], run.iteration, run.epoch, start="reset" if run.torn else "")
        return Ask(node, SHOW, say, mail=tuple(mail), expects=Done, model=False)

    def _restart(self, now: Now, run: Course, *, finishing: bool = False) -> None:
        """Start a new epoch of a synchronous run if the set of nodes has changed or an iteration failed."""
        if run.unread:
            run.vain += 1
        elif not run.restarted:
            run.vain = 0  # messages were read
        # Damage on the way is mended by the next epoch; what can never be read would restart the run for ever.
        if run.vain > self.patience:
            # Numbers too large again and again are those of a step size that is too large.
            kind = Diverged if TOO_FAR in run.unread else MessageError
            raise kind(f"messages could not be read in {run.vain} epochs in a row; last: {run.unread}")
        run.restarted = run.torn or bool(run.leaving) or (bool(run.joining) and not finishing)
        if not run.restarted:
            return
        run.epoch += 1
        # Who has not even begun has nothing to reset.
        run.starts = {node: run.starts.get(node, "reset") for node in run.members}
        if run.torn:
            # Nobody may apply messages of an iteration that others cannot finish.
            for node in list(now.mailbox.waiting):
                self._send_back(now, run, now.mailbox.take(node))
        if not finishing:
            self._enter(now, run)
        # At the end nothing is sent, so nobody learns whole estimates: if the run goes on, another epoch begins.
        run.torn, run.unread = finishing, ""

    def _enter(self, now: Now, run: Course) -> None:
        """Admit nodes that want to join, with new states."""
        for node in sorted(run.joining - run.departing):
            run.joining.discard(node)
            run.members.add(node)
            run.starts[node] = "empty"
            run.failures.pop(node, None)
            _note(now, "joined", node, "with a new state")
            # A synchronous newcomer comes with a new epoch, in which all edges restart.
            if self.algorithm.asynchronous:
                others = run.members - {node}
                # Replaced: what a former life of the node had to mend is covered.
                run.broken[node] = set(others)
                for other in others:
                    run.broken.setdefault(other, set()).add(node)

    def _turns(self, now: Now, run: Course, dense: bool) -> list[Ask]:
        """Return the next turn of all nodes that have answered the last one; edges to the others pause."""
        asks, idle = [], sorted(run.members - now.open.keys())
        # A leaver gets no messages any more: it would only have to pass them on.
        living = set(idle) - run.leaving
        # None spares the views a set lookup for every edge.
        alive = None if len(living) == self.graph.n else frozenset(living)
        gone = sorted(run.departing - now.open.keys())
        for node in idle:
            if node not in run.leaving:
                asks.append(self._turn(run, "step", self._view(now, run, node, alive, dense)))
                continue
            # With itself among the living: the dead have no column.
            view = self._view(now, run, node, frozenset(living | {node}), dense)
            leaves = bool(view.column) or not self.algorithm.asynchronous
            asks.append(self._turn(run, "leave" if leaves else "step", view))
            if leaves:
                run.leaving.discard(node)
                run.members.discard(node)
                run.departing.add(node)
        asks += self._see_off(now, run, living, gone)
        run.iteration += 1
        return asks

    def _see_off(self, now: Now, run: Course, living: set[int], gone: Sequence[int] | None = None) -> list[Ask]:
        """Let nodes that have left take back undelivered messages, and then leave again."""
        asks = []
        for node in sorted(run.departing - now.open.keys()) if gone is None else gone:
            if not now.mailbox.waiting.get(node):
                continue
            view = self._view(now, run, node, frozenset(living | {node}), False)
            if view.column:
                asks.append(self._turn(run, "leave", view))
                continue
            alive = frozenset(run.members | {node})
            # Within a window every edge the graph relies on occurs; who is silent now may take the mass later.
            coming = range(run.iteration, run.iteration + self.graph.window)
            if len(living) == len(run.members) and not any(self.graph.column(node, t, alive) for t in coming):
                self._end(now, run, node)
        return asks

    def _finished(self, now: Now, run: Course, node: int) -> bool:
        return node in run.finished and node not in run.starts and not now.mailbox.waiting.get(node)

    def _finish(self, now: Now, run: Course, node: int) -> Ask:
        return self._turn(run, "finish", View(node, run.iteration, seed=now.seed))

    def _view(self, now: Now, run: Course, node: int, alive: frozenset[int] | None, dense: bool) -> View:
        """Return what a node must know about the new iteration. ``alive`` is None if all nodes are alive."""
        # Of a new epoch's neighbours nothing is known.
        anew = run.starts.get(node) in ("reset", "empty") and not self.algorithm.asynchronous
        return self.graph.view(
            node,
            run.iteration,
            seed=now.seed,
            alive=alive,
            directed_algorithm=self.algorithm.directed,
            dense=dense,
            resync=range(self.graph.n) if anew else run.broken.get(node, ()),
        )

    def _turn(self, run: Course, do: str, view: View) -> Ask:
        node = view.node
        run.turns[node] = run.turns.get(node, 0) + 1
        # In one turn only, which is repeated until it is answered.
        start = run.starts.pop(node, "")
        say = Turn(
            do,
            run.turns[node],
            view.iteration,
            run.epoch,
            run.lives.get(node, 0),
            start,
            tuple(view.column),
            tuple(map(float, view.column.values())),
            tuple(view.row),
            tuple(map(float, view.row.values())),
            tuple(sorted(view.resync)),
            view.dense,
        )
        return Ask(node, say=say, expects=Done, model=start in ("common", "empty"))

    def _exchange(
        self, now: Now, run: Course, asks: Sequence[Ask], calls: Sequence[Ask] = (), *, closing: bool = False
    ) -> Exchange:
        """Send asks and repeat those without an answer; settle the answers, and give up nodes that are silent for too
        long."""
        traffic, asked = now.told["traffic"], {node: stamped.ask for node, stamped in now.mailbox.asked.items()}
        repeated = [Ask(node) for node in asked]
        asked |= {ask.node: ask._replace(mail=waiting(now.mailbox, ask.node)) for ask in asks}
        # In every attempt: what is asked again goes down again.
        for post in itertools.chain.from_iterable(ask.mail for ask in asked.values()):
            traffic.down.add(len(post.data))
        if not (asked or calls):
            return
        now.told["exchanges"] += 1
        now.told["repeated"] += len(repeated)
        answers = yield [*asks, *repeated, *calls]
        now.told["answers"] += len(answers)
        now.told["answered"].update(answer.node for answer in answers)
        now.told["started"] += sum(ask.model for ask in asked.values())
        # Taken back for now: what becomes of a message depends on who is still there when all answers are read.
        for post in itertools.chain.from_iterable(answer.post for answer in answers):
            _withdraw(now.mailbox, post)
        for answer in answers:
            if answer.node in asked:
                self._settle(now, run, asked[answer.node], answer)
            else:
                # A sign of life is enough: it joins with a new state, whatever it remembers.
                run.joining.add(answer.node)
        for call in calls:
            now.mailbox.give_up(call.node)
        for node, times in sorted(now.open.items()):
            if times >= self.patience:
                self._give_up(now, run, node, f"no answer to {times} requests", asked[node])
        for node in sorted(run.departing - now.open.keys()):
            if not self._awaited(now, run, node):
                self._end(now, run, node)
        self._exclude(now, run)
        # Who joins push-sum brings no mass, and nobody joins a run that is over.
        coming = run.joining and not (closing or self.algorithm.asynchronous)
        if not (run.members or run.departing or coming):
            raise StateError(
                f"no node is left to continue; the last events were {now.told['events'][-3:]}. "
                "Look into the nodes' logs, or allow more patience, and restart"
            )

    def _awaited(self, now: Now, run: Course, node: int) -> bool:
        """Whether messages of a node that has left may still come back to it."""
        if not self.algorithm.asynchronous:
            return False
        boxes = (*now.mailbox.waiting.values(), *(stamped.ask.mail for stamped in now.mailbox.asked.values()))
        life = str(run.lives.get(node, 0))
        sent = any(post.source == node and _life(post) == life for box in boxes for post in box)
        return bool(now.mailbox.waiting.get(node)) or sent

    def _settle(self, now: Now, run: Course, ask: Ask, answer: Answer) -> None:
        """Take an answer completely or not at all: its content counts and its messages are sent, or it is refused."""
        node, turn, done = answer.node, ask.say, answer.say
        assert isinstance(turn, Turn)
        assert isinstance(done, Done)
        for _, data in {(post.name, bytes(post.data)) for post in answer.post}:
            now.told["traffic"].up.add(len(data))
        if wrong := self._wrong(now, ask, turn, answer):
            now.refuse(node, wrong)
            _note(now, "refused", node, wrong)
            run.excluded[node] = wrong
            self._give_up(now, run, node, f"its answer cannot be one: {wrong}", ask)
            return
        if done.fresh:
            # Who wanted to leave has lost what it would have handed over.
            if node in run.members - run.leaving:
                run.joining.add(node)
            self._give_up(now, run, node, "its memory is lost", ask)
            return
        self._note_remarks(now, run, node, done)
        if done.needs and not self.algorithm.asynchronous:
            # Neither figures nor messages: a synchronous node that could not finish has begun nothing.
            run.torn, run.unread = True, f"node {node}: {done.reasons[0]}"
            return
        if done.needs:
            self._returned(now, run, node, ask, set(done.needs))
        facts = dict(zip(done.facts, done.values, strict=True))
        if turn.do == "finish":
            run.finished.add(node)
        elif turn.do == "leave":
            _note(now, "left", node, f"sent {len(answer.post)} messages")
        elif done.failed:
            _note(now, "failed", node, done.failed)
            times = run.failures.get(node, (0, ""))[0] + 1
            counted = f" (iteration {times} in a row)" if self.algorithm.asynchronous else ""
            reason = f"node {node}, iteration {turn.iteration}{counted}: {done.failed[:_REASON]}"
            run.failures[node] = times, reason
        else:
            run.failures.pop(node, None)
            now.told["figures"].setdefault(turn.iteration, {})[node] = facts
        self._post(now, run, turn, answer)

    def _wrong(self, now: Now, ask: Ask, turn: Turn, answer: Answer) -> str:
        """Return the reason why an answer does not fit this ask; empty if it does."""
        done, posts = answer.say, answer.post
        assert isinstance(done, Done)
        synchronous = not self.algorithm.asynchronous
        # The other turns begin no iteration, so nothing may come with their answers.
        expected = set(turn.out) if turn.do in ("step", "leave") else set()
        to = [post.to for post in posts]
        # Push-sum takes shares from whoever sends them, so only this keeps a node from writing to strangers.
        named = all(_NAME.fullmatch(post.name) and _life(post) == str(turn.life) for post in posts)
        if not set(to) <= expected or len(set(to)) != len(to) or not named:
            return f"messages to nodes {to[:20]}; expected at most one to each of {sorted(expected)}"
        most = largest_message(self.algorithm, now.layout.size, np.dtype(self.dtype).itemsize)
        if (longest := max((max(_size(post), len(post.data)) for post in posts), default=0)) > most:
            return f"a message of {longest} bytes; the largest this run has is {most}"
        silent = done.fresh or bool(done.failed) or (synchronous and bool(done.needs))
        if silent and to:
            return f"messages to nodes {to[:20]} from a node that reports none"
        # Every neighbour waits for its message: one left out would stop the whole run.
        if synchronous and not silent and turn.do == "step" and len(to) < len(expected):
            return f"messages to nodes {to[:20]} only; expected one to each of {sorted(expected)}"
        came = [post.source for post in ask.mail if not post.name.startswith(RETURNED)]
        # A node may send back only what it was given.
        if not {*done.needs, *done.noticed} <= set(came) or len(done.noticed) > len(set(came)):
            spoken = (*done.needs, *done.noticed)[:20]
            return f"it reports messages of nodes {spoken}; it had some of {sorted(set(came))}"
        if len(done.lost) > len(ask.mail) - len(came):
            return f"{len(done.lost)} messages lost that came back; {len(ask.mail) - len(came)} did"
        if done.fresh and turn.start in ("common", "empty"):
            return "no memory, and none was needed: this turn begins with a new state"
        return "a model that was not to be shown" if answer.frames else ""

    def _note_remarks(self, now: Now, run: Course, node: int, done: Done) -> None:
        for source, reason in zip(done.needs, done.reasons, strict=True):
            _note(now, "needed", node, f"messages of node {source}: {reason}")
        for reason in done.lost:
            _note(now, "lost", node, reason)
        for source, remark in zip(done.noticed, done.remarks, strict=True):
            # Once for a pair: a line for each message would bury the others.
            if (node, source) not in run.noticed:
                run.noticed.add((node, source))
                _note(now, "noticed", source, f"node {node} says: {remark}")

    def _shown(self, now: Now, answer: Answer) -> None:
        """Take a model that a node sent; leave out one that does not belong to the run."""
        node, done, layout, wide = answer.node, answer.say, now.layout, np.dtype(self.dtype)
        assert isinstance(done, Done)
        if done.fresh or done.needs:
            _note(now, "unseen", node, "; ".join(done.reasons) or "it has no memory of the run")
            return
        sizes = {"model": layout.size * wide.itemsize}
        sizes |= {_SHOWN + t.name: t.size * np.dtype(t.dtype).itemsize for t in layout.exact}
        if "model" not in answer.frames or any(sizes.get(name) != len(data) for name, data in answer.frames.items()):
            _note(now, "unseen", node, "its model is not one of the run")
            return
        model = np.frombuffer(answer.frames["model"], wide)
        frames = {t: answer.frames[_SHOWN + t.name] for t in layout.exact if _SHOWN + t.name in answer.frames}
        own = {t.name: np.frombuffer(frame, t.dtype).reshape(t.shape) for t, frame in frames.items()}
        # One such model would make the mean of all of them NaN.
        if not (np.isfinite(model).all() and all(np.isfinite(a).all() for a in own.values() if a.dtype.kind == "f")):
            _note(now, "unseen", node, "its model holds non-finite values")
            return
        facts = dict(zip(done.facts, done.values, strict=True))
        now.told["models"][node] = Shown(model, own, dict(zip(done.figures, done.measured, strict=True)), facts)

    def _post(self, now: Now, run: Course, turn: Turn, answer: Answer) -> None:
        """Count the messages of a node and post them, or return them if no node can take them."""
        node, counted = answer.node, dict[str, dict[Phase, int]]()
        broken = run.broken.get(node, set())
        for post in answer.post:
            whole, receiving = post.to in turn.resync, post.to in run.members
            phase: Phase = "dense" if turn.dense else "resync" if whole else "train"
            # What goes to several neighbours is one message.
            phases = counted.setdefault(post.name, {})
            phases[phase] = phases.get(phase, 0) + 1
            if post.to in broken:
                # Nothing but a whole estimate is of use, and only it mends the edge. A closing one needs no estimate.
                receiving = receiving and (whole or turn.dense)
                if receiving and not turn.dense:
                    broken.discard(post.to)
            if receiving:
                now.mailbox.put([post])
            else:
                self._send_back(now, run, [post])
        for name, phases in counted.items():
            now.told["traffic"].count(_size_in(name), phases)

    def _returned(self, now: Now, run: Course, node: int, ask: Ask, sources: Collection[int]) -> None:
        """Return messages that a node could not apply, and all later messages of the same sources that wait for it."""
        others = now.mailbox.take(node)
        back = [p for p in (*ask.mail, *others) if p.source in sources and not p.name.startswith(RETURNED)]
        now.mailbox.put(p for p in others if p.source not in sources or p.name.startswith(RETURNED))
        for source in sources:
            run.broken.setdefault(source, set()).add(node)
        self._send_back(now, run, back)

    def _send_back(self, now: Now, run: Course, posts: Iterable[Post]) -> None:
        for post in posts:
            now.told["traffic"].undelivered.add(_size(post))
            # A new life never sent them: its counters and estimates know nothing of these messages.
            if self.algorithm.asynchronous and _life(post) == str(run.lives.get(post.source, 0)):
                now.mailbox.put([Post(post.to, post.source, RETURNED + post.name, post.data)])

    def _give_up(self, now: Now, run: Course, node: int, reason: str, ask: Ask) -> None:
        """Declare a node gone. Its state is never used again, even if it carried out its last ask."""
        # Of a node that leaves the others' iteration knows nothing any more.
        run.torn |= not self.algorithm.asynchronous and isinstance(ask.say, Turn) and ask.say.do != "leave"
        _note(now, "gone", node, reason)
        self._end(now, run, node, () if node in now.open else ask.mail)

    def _end(self, now: Now, run: Course, node: int, mail: Sequence[Post] = ()) -> None:
        """End the participation of a node. Messages for it go back; messages that came back to it are lost with it."""
        posts = (*mail, *now.mailbox.give_up(node))
        run.drop(node)
        self._send_back(now, run, (post for post in posts if not post.name.startswith(RETURNED)))
        groups = self.graph.components(run.iteration, frozenset(run.members))
        if len(groups) > 1:
            _note(now, "split", node, f"groups that cannot all reach each other: {[sorted(group) for group in groups]}")

    def _exclude(self, now: Now, run: Course) -> None:
        """Give up nodes whose iterations failed too often.

        Raises
        ------
        Diverged
            If these are more than half of all nodes, since then the run itself has failed.
        """
        most = self.patience if self.algorithm.asynchronous else 1
        failing = sorted(n for n, (times, _) in run.failures.items() if times >= most and n in run.members)
        run.excluded |= {node: run.failures[node][1] for node in failing}
        everybody = run.members | run.excluded.keys()
        # Those excluded earlier count: otherwise a run that diverges would lose its nodes one by one and never end.
        if failing and 2 * len(run.excluded) > len(everybody):
            raise Diverged(f"{len(run.excluded)} of {len(everybody)} nodes failed; {run.excluded[failing[0]]}")
        for node in failing:
            _note(now, "gone", node, f"excluded: {run.excluded[node]}")
            # Without its messages the others cannot finish an iteration of a synchronous run.
            run.torn |= not self.algorithm.asynchronous
            self._end(now, run, node)

    # A node's half.

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if ask.kind == HELLO:
            return memory, Answer(me.node, say=Done(fresh=not memory))
        turn, data = ask.say, me.data
        if not isinstance(turn, Turn):
            raise AnswerError("the ask does not say what this node does next")
        held = _Held.of(memory)
        if turn.do == "show":
            if not memory or (held.turn, held.epoch) != (turn.turn, turn.epoch):
                return memory, Answer(me.node, say=Done(fresh=True), bare=True)
            return memory, self._carried_out(held, turn, ask.mail, me)[1]
        if turn.start in ("common", "empty"):
            if data is None:
                # It would average with its neighbours for the whole run, and learn nothing.
                raise AnswerError("this app has nothing to learn from: write app = fc.client(app, fc.gossip_node(...))")
            start, own = data.start(me, self.dtype)
            common = np.zeros_like(start) if self.unlike else None
            joins = turn.start == "empty"
            state = (
                self.algorithm.join(start, me.layout) if joins else self.algorithm.init(start, me.layout, common=common)
            )
            held = _Held(state, own, None, 0, turn.epoch)
        elif not memory or not held.continues(turn):
            # Of a copy restored after a crash others have newer messages: going on would send a share twice.
            return memory, Answer(me.node, say=Done(fresh=True), bare=True)
        held, answer = self._carried_out(held, turn, ask.mail, me)
        return held.memory(turn), answer

    def _carried_out(self, held: _Held, turn: Turn, mail: Sequence[Post], me: Me) -> tuple[_Held, Answer]:
        """Finish the previous iteration with the received messages, then carry out the turn."""
        algorithm, view, data = self.algorithm, turn.view(me.node, me.seed), me.data
        inbox = tuple(GossipMessage(p.source, me.node, p.data) for p in mail if not p.name.startswith(RETURNED))
        back = tuple(GossipMessage(me.node, p.source, p.data) for p in mail if p.name.startswith(RETURNED))
        # On the state from before: once they are counted, all messages look like repetitions.
        noticed = algorithm.odd(held.state, inbox) if isinstance(algorithm, PushSum) else {}
        # Messages of an iteration that cannot be completed do not come: that iteration is followed by a reset.
        dropped = turn.start == "reset" and not inbox
        state, refused = (held.state, {}) if dropped else received(algorithm, held.state, inbox)
        change, own = held.change, held.own
        lost: tuple[str, ...] = ()
        if algorithm.asynchronous or not refused:
            # Otherwise the change is kept: it belongs to the iteration, which is still open.
            state = state if change is None else algorithm.shift(state, change)
            change = None
            state, lost = taken_back(algorithm, state, back)
        if turn.start == "reset" and not refused:
            state = algorithm.reset(state, me.layout)
        outbox: Outbox = ()
        failed, learnt = "", list[Learnt]()

        def gradient(z: Real) -> Real:
            # Fixed by node and iteration: a turn that is repeated after a crash draws the same batch.
            learnt.append(data.learn(me, z, own, view.key("gradient")))
            return learnt[-1].gradient

        if turn.do == "leave":
            state, outbox = algorithm.leave(state, view)
        elif turn.do == "step" and (algorithm.asynchronous or not refused):
            learns: Gradient | None = None if data is None or not data.learns or view.dense else gradient
            try:
                state, outbox = algorithm.send(state, learns, view)
                if learnt:
                    change, own = learnt[-1].change, {**own, **learnt[-1].own}
            # Answered, not raised: the messages were applied, and only an answer acknowledges them.
            except (NonFiniteUpdate, Diverged) as error:
                # An error without a text is still a failure, and an empty one says that all went well.
                failed = str(error)[:4096] or type(error).__name__
        facts = algorithm.facts(state)
        figures: Mapping[str, float] = {}
        frames: dict[str, bytes] = {}
        if turn.do == "show" and not (refused and not algorithm.asynchronous):
            model = np.asarray(algorithm.model(state), self.dtype)
            figures = {} if data is None else data.evaluate(me, model, own)
            frames = {"model": model.tobytes(), **{_SHOWN + name: array.tobytes() for name, array in own.items()}}
        odd = {source: why for source, why in sorted(noticed.items()) if source not in refused}
        done = Done(
            needs=tuple(refused),
            reasons=tuple(why[:4096] for why in refused.values()),
            lost=tuple(why[:4096] for why in lost),
            noticed=tuple(odd),
            remarks=tuple(why[:4096] for why in odd.values()),
            failed=failed,
            facts=tuple(facts),
            values=tuple(map(float, facts.values())),
            figures=tuple(figures),
            measured=tuple(map(float, figures.values())),
        )
        named = [(f"{turn.life}/{number}/{len(each.payload)}", each) for number, each in enumerate(outbox)]
        posts = tuple(Post(me.node, to, name, each.payload) for name, each in named for to in each.destinations)
        answer = Answer(me.node, say=done, frames=frames, post=posts, bare=True)
        return _Held(state, own, change, held.turn, held.epoch), answer


@dataclass(frozen=True)
class _Held:
    """The content of a node's memory: the algorithm's state, tensors that are not sent, changes of running statistics,
    and the last turn and its epoch."""

    state: State
    own: Arrays
    change: Real | None
    turn: int
    epoch: int

    @classmethod
    def of(cls, memory: State) -> _Held:
        own = {name.removeprefix(_OWN): array for name, array in memory.items() if name.startswith(_OWN)}
        state = {name: array for name, array in memory.items() if not name.startswith("node/")}
        turn, epoch = memory.get(_PLACE, (0, 0))
        return cls(state, own, memory.get(_CHANGE), int(turn), int(epoch))

    def continues(self, turn: Turn) -> bool:
        # A reset is the only way into another epoch; without one this node missed the turn that changed it.
        return self.turn == turn.turn - 1 and (self.epoch == turn.epoch or turn.start == "reset")

    def memory(self, turn: Turn) -> State:
        """Return the memory after a turn."""
        out = {**self.state, _PLACE: np.array([turn.turn, turn.epoch], np.int64)}
        out |= {_OWN + name: np.asarray(array) for name, array in self.own.items()}
        return out if self.change is None else {**out, _CHANGE: self.change}


def state_of(memory: State) -> State:
    """Return the algorithm's state in a node's memory."""
    return _Held.of(memory).state


def turns_of(memory: State) -> int:
    """Return how many turns the node of a memory has had."""
    return _Held.of(memory).turn


def own_of(memory: State) -> Arrays:
    """Return the tensors in a node's memory that stay at home."""
    return _Held.of(memory).own


def _note(now: Now, kind: str, node: int, reason: str) -> None:
    # Cut, since the words may be a peer's and go into logs and stored states.
    now.told["events"].append((kind, node, reason[:_REASON]))


def _life(post: Post) -> str:
    return post.name.partition("/")[0]


def _size(post: Post) -> int:
    """Return the size of a message as its sender reported it, because the message here may be a placeholder for one
    delivered over a link."""
    return _size_in(post.name)


def _size_in(name: str) -> int:
    return int(name.rpartition("/")[2])


def waiting(mailbox: Mailbox, node: int) -> tuple[Post, ...]:
    """Return what the next ask of a node will bring."""
    return tuple(sorted(mailbox.waiting.get(node, ()), key=lambda post: post.source))


def _withdraw(mailbox: Mailbox, post: Post) -> None:
    """Withdraw the messages that were just posted."""
    box = mailbox.waiting[post.to]
    del box[max(at for at, each in enumerate(box) if each == post)]
