"""Several rounds in flight: drivers for programs, which stay unchanged.

:class:`PipelinedStrategy` keeps several rounds open and resumes the oldest; :class:`Buffered` answers one round of a
program with what clients made in several. An update is what a client made of the model it was sent; it is added to the
model that the server has when it arrives. Averaging whole models instead would split a pipeline of width two into two
trainings that never see each other.

Li, Yu, Li, Avestimehr, Kim, Schwing, "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
Training", NeurIPS 2018, arXiv:1811.03619 (abstract read, the body recalled; warm-up and drain as in a production
optimizer whose source was read). Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning
with buffered asynchronous aggregation" (FedBuff), AISTATS 2022 (recalled). The mapping to rounds, cohorts and client
memory, and what becomes of updates that are too old, is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.asks import wait_for
from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower._private import set_message_id
from fedcomp.flower.logs import log, unsampled
from fedcomp.flower.pipeline import Await, Send, arrived, now
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.records import to_record
from fedcomp.flower.report import Reports, ReportSection, figure, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push, own_loop
from fedcomp.flower.wrapper import Enough
from fedcomp.layout import Vector
from fedcomp.plain import Count, from_plain, to_plain
from fedcomp.program import Answer, Ask, Mean, Now, Origin, Round, Single, Step
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, StatePart, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.nodes import MINIMA, NodesShown
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.running import Exchange, Running, Start
from fedcomp.strategies.server import Server
from fedcomp.strategies.wrapping import require_inner

WEIGHTS: Final[Mapping[str, Callable[[int], float]]] = MappingProxyType(
    {"1/sqrt": lambda staleness: 1.0 / math.sqrt(1.0 + staleness), "constant": lambda staleness: 1.0}
)
"""By how much an update counts less that is so many steps old."""

Arrived = tuple["Flight", SentMessage, Message]
"""A reply, with what it answers."""


@dataclass
class Overlap(ReportSection, name="overlap"):
    """What overlapping exchanges add to a report.

    Attributes
    ----------
    staleness : dict of int to int
        Steps that the server's model had made, when an answer was taken, since its client was sent the model.
    step : int
        How many steps the model had made before this one; less the staleness, those it had made when it was sent.
    under_way : int
        Messages that were still waited for when the step was made.
    late : int
        Replies that came after they had been given up; they are dropped, and put back by clients with memory.
    held_back : int
        Messages that were not sent because their node still had another one.
    idle, period : float
        Seconds of the grid's clock that the server waited, and from the last step to this one.
    """

    staleness: dict[int, int] = figure(dict, unit="steps", show="spread")
    step: int = figure(unit="steps")
    under_way: int = figure(unit="messages")
    late: int = figure(unit="messages")
    held_back: int = figure(unit="nodes")
    idle: float = figure(0.0, unit="seconds", show="seconds")
    period: float = figure(0.0, unit="seconds", show="seconds")

    def line(self) -> str:
        """Return staleness, and what is under way, late or held back."""
        said = [f"{self.under_way} under way"]
        if self.staleness:
            said.insert(0, f"staleness up to {max(self.staleness.values())}")
        said += [f"{count} {name}" for name, count in (("late", self.late), ("held back", self.held_back)) if count]
        return ", ".join(said)


@dataclass
class Flight:
    """A round whose first exchange is under way.

    Attributes
    ----------
    x, now, program, exchange
        The round, as the server and the program see it.
    step : int
        How many steps the model had made when it began.
    began, deadline : float
        Seconds of the grid's clock.
    waiting : list of SentMessage
        What was not answered yet.
    """

    x: Running
    now: Now
    program: Round
    exchange: Exchange
    step: int
    began: float
    deadline: float
    waiting: list[SentMessage]

    def ask_of(self, address: int) -> Ask:
        """Return what a node was asked."""
        return self.exchange.asks[next(node for node, known in self.x.addresses.items() if known == address)]


class Overdue(NamedTuple):
    """A message that was given up: when it was sent, and when its reply is not expected any more."""

    sent: SentMessage
    began: float
    until: float


@dataclass(frozen=True)
class SavedFlight:
    """A :class:`Flight` as a checkpoint keeps it: of each message the node, and what a reply is joined by."""

    number: Count
    record: str
    model: dict[str, NDArray[Any]]
    start: Vector
    version: Count
    sequence: Count
    step: Count
    began: float
    deadline: float
    messages: list[tuple[int, str, str]]


def _save(owner: Overlapping) -> Any:
    saved = []
    for each in owner.flights:
        if each.x.own:
            raise StateError("a message under way holds a model of its node's own, which a checkpoint does not keep")
        messages = [(m.node, m.message.metadata.message_id, m.message.metadata.message_type) for m in each.waiting]
        sequence = each.waiting[0].sequence if each.waiting else 0
        x, start, times = each.x, np.asarray(each.now.model), (each.step, each.began, each.deadline)
        version = each.waiting[0].version if each.waiting else 0
        saved.append(SavedFlight(each.now.number, x.record, dict(x.model), start, version, sequence, *times, messages))
    return to_plain(saved)


def _same(vector: Vector) -> Vector:
    return vector


def _start_of(x: Running) -> Vector:
    return x.start.vector


def _load(owner: Overlapping, state: Any) -> None:
    owner.flights, server = [], owner.inner
    for each in from_plain(list[SavedFlight], state, "flights"):
        arrays, sent = to_record(each.model), []
        for node, message_id, kind in each.messages:
            message = Message(RecordDict({each.record: arrays}), node, kind)
            set_message_id(message, message_id)
            sent.append(SentMessage(message, node, each.sequence, version=each.version))
        x = server._opened(each.number, arrays, [s.message for s in sent])
        start = Start(x.layout, x.model, None if np.array_equal(each.start, x.vector) else partial(_same, each.start))
        x = replace(x, start=start)
        seen = server._now(x, partial(_start_of, x))
        program = server.system.round(seen)
        exchange = Exchange({ask.node: ask for ask in wait_for(next(program)).asks} if sent else {}, sent)
        owner.flights.append(Flight(x, seen, program, exchange, each.step, each.began, each.deadline, list(sent)))


class Overlapping(ExchangeStrategy, Stateful):
    """Base of strategies whose exchanges overlap; ``inner`` is the server of the program, made where there is none.

    Attributes
    ----------
    flights : list of Flight
        Rounds under way, the oldest first.
    given_up : list of Overdue
        Messages whose replies came too late, or have not come yet. Their nodes are sent no other message until the
        reply is there or ``timeout`` has passed once more: a node that is slow is not given two at a time.
    steps : int
        Steps that the model has made.

    Raises
    ------
    ConfigError
        For an inner strategy that no server can stand around, one with a loop of its own, and a private one: how often
        a client takes part in what is released is not what its promise assumes. For a system that keeps something from
        round to round, of which rounds in flight would not know.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "inner": nested("inner"),
        "deadline": nested("deadline"),
        "steps": Count,
        "_seen": list[int],
        "_run": int,
        "flights": StatePart(_save, _load),
    }

    def __init__(self, inner: Strategy, *, timeout: float, deadline: Deadline | None) -> None:
        name = type(self).__name__
        if not isinstance(inner, Server):
            require_inner(inner, name)
        if own_loop(inner.inner if isinstance(inner, Server) else inner):
            raise ConfigError(f"{type(inner).__name__} runs its own loop, which {name} would bypass")
        ruled = isinstance(inner, Server) and not issubclass(inner._rule.kind, Mean | Single)
        if ruled or find_private(inner) is not None or promises(inner):
            raise ConfigError(
                f"{type(inner).__name__} promises privacy, and the promise does not cover overlapping rounds; run it "
                f"without {name}"
            )
        if isinstance(inner, Server) and (inner.system.KEEPS or inner.system.KEYS or inner.system.LOST == "again"):
            raise ConfigError(
                f"{inner._name} keeps something from round to round ({inner.system!r}), and rounds in flight do not "
                f"see it; run it without {name}"
            )
        self.inner = inner if isinstance(inner, Server) else Compressed(inner, Identity())
        # A step is made on another model than the one that clients trained from: of no float the mean is a step.
        self.inner.cast = True
        self.timeout = params.positive("timeout", timeout)
        if not isinstance(deadline, Deadline | None):
            raise ConfigError(f"deadline is a Deadline, not {deadline!r}; write deadline=fc.Deadline(0.8)")
        self.deadline = deadline
        self.flights: list[Flight] = []
        self.given_up: list[Overdue] = []
        self.steps = 0
        self._seen: list[int] = []
        self._run = 0
        self._shown: ArrayRecord | None = None
        self._config: dict[str, Any] = {}
        self._late = 0
        self._idle = 0.0
        self._stepped: float | None = None

    @property
    def reports(self) -> Reports:
        """Per training round: who was asked, what arrived in which form, what was refused and why."""
        return self.inner.reports

    @property
    def evaluations(self) -> Reports:
        """The same for client evaluation."""
        return self.inner.evaluations

    @property
    def busy(self) -> set[int]:
        """Nodes that have a message already."""
        return {m.node for each in self.flights for m in each.waiting} | {each.sent.node for each in self.given_up}

    def summary(self) -> None:
        """Log the strategy, then what is inside."""
        super().summary()
        self.inner.summary()

    def finish(self) -> None:
        """Refuse a run in which no step has used an update, as the server inside does; see its ``finish``."""
        self.inner.finish()

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        return {"timeout": self.timeout}

    def restored(self) -> None:
        """Forget what was shown to the inner strategy, and who is late: both are found out again."""
        self.given_up, self._shown, self._stepped = [], None, None

    def renumber(self) -> None:
        """Take the messages under way for another run's: the engine may know them no longer."""
        super().renumber()
        self._run = -1

    def _resumed(self, grid: Grid) -> list[Flight]:
        """Return the rounds that an earlier run had under way: its nodes' replies cannot be had in this one."""
        run, self._run = self._run, grid.run.run_id
        if run in (0, self._run) or not self.flights:
            return []
        lost, self.flights = self.flights, []
        log.warning(
            "%s: %d messages were under way when the run was interrupted, and their replies are lost with it",
            type(self).__name__,
            sum(len(each.waiting) for each in lost),
        )
        return lost

    def _launch(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        view: NodesShown,
        among: Callable[[list[Message]], list[Message]],
    ) -> Exchanges[Flight]:
        """Begin a round in which some of the nodes shown are asked; its messages are under way from now on."""
        server = self.inner
        server.roster.meet(view)
        messages = among(list(server.inner.configure_train(server_round, arrays, config, view)))
        self._seen, self._shown, self._config = view.shown, arrays, dict(config)
        x, seen = server._ask(server_round, arrays, messages)
        if server.system.whole and x.layout.wide:
            names = ", ".join(tensor.name for tensor in x.layout.wide)
            note = f"{shorten(names)}: while rounds overlap whole models travel as float32, which loses small steps"
            # A step of a buffer begins rounds again and again.
            x.report.notes += [] if note in x.report.notes else [note]
        program = server.system.round(seen)
        # Nobody asked: what the program makes of that is found when it is this round's turn.
        exchange = server._send(x, seen, next(program)) if messages else Exchange({}, [])
        sent, began, limit = exchange.sent, now(view), self.timeout
        if self.deadline is not None:
            limit = self.deadline.seconds([each.node for each in sent], self.timeout)
        flight = Flight(x, seen, program, exchange, self.steps, began, began + limit, list(sent))
        self.flights.append(flight)
        yield Send([each.message for each in sent])
        return flight

    def _collect(
        self, flights: Sequence[Flight], until: float, grid: Grid, enough: Enough | None = None
    ) -> Exchanges[list[Arrived]]:
        """Wait for replies; take the messages that were answered off their rounds."""
        began, waited = now(grid), [(flight, each) for flight in flights for each in flight.waiting]
        replies = yield Await([each.message for _, each in waited], until, enough)
        self._idle += now(grid) - began
        by_id = {each.message.metadata.message_id: (flight, each) for flight, each in waited}
        found: list[Arrived] = []
        for reply in replies:
            flight, sent = by_id[reply.metadata.reply_to_message_id]
            flight.waiting = [each for each in flight.waiting if each is not sent]
            self._time(sent.node, flight.began, reply, grid)
            found.append((flight, sent, reply))
        return found

    def _time(self, node: int, began: float, reply: Message, grid: Grid) -> None:
        # An error may come at once, and says nothing of how long training takes.
        if self.deadline is not None and not reply.has_error():
            self.deadline.note(node, arrived(grid, reply) - began)

    def _give_up(self, flight: Flight) -> list[SentMessage]:
        """Wait no longer for what a round still waits for; return it."""
        lost, flight.waiting = flight.waiting, []
        self.given_up += [Overdue(each, flight.began, flight.deadline + self.timeout) for each in lost]
        return lost

    def _drop_late(self, grid: Grid) -> Exchanges[None]:
        """Take the replies to messages that were given up, and drop them; forget those that are long overdue."""
        if not self.given_up:
            return
        by_id = {each.sent.message.metadata.message_id: each for each in self.given_up}
        for reply in (yield Await([each.sent.message for each in self.given_up], until=now(grid))):
            overdue = by_id.pop(reply.metadata.reply_to_message_id)
            self._time(overdue.sent.node, overdue.began, reply, grid)
            self._late += 1
        self.given_up = [each for each in by_id.values() if now(grid) < each.until]

    def _follow(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Show the inner strategy the model that its step is made on, the one way there is: as that of a round."""
        if self._shown is not arrays:
            # The nodes that the strategy saw last: what it makes for them is not sent.
            view = NodesShown(grid, lambda: self._seen)
            with unsampled():
                list(self.inner.inner.configure_train(server_round, arrays, ConfigRecord(self._config), view))
            self._shown = arrays

    def _step(self, x: Running, seen: Now, step: Step | None, ages: Mapping[int, int], grid: Grid) -> Outcome:
        """Let the inner strategy make a step on the model of ``x``; ``ages`` are those of the answers, by address."""
        server, at, said = self.inner, now(grid), x.report.section(Overlap)
        said.staleness, said.step, said.late = dict(ages), self.steps, self._late
        said.under_way = sum(len(each.waiting) for each in self.flights)
        said.idle, said.period = self._idle, 0.0 if self._stepped is None else at - self._stepped
        self._late, self._idle, self._stepped = 0, 0.0, at
        self._follow(seen.number, x.arrays, grid)
        outcome = server._close(x, seen, step)
        self.steps += outcome[0] is not None
        return outcome


class PipelinedStrategy(Overlapping):
    """Keep several rounds in flight; with ``width`` K an update is applied K - 1 steps late, and never lost.

    While one cohort trains, the replies of another are sent and aggregated, and the server evaluates. With nearly
    constant times the gain is at most a factor of two, reached with K = 2 (:class:`fedcomp.timing.pipeline.Pipeline`).
    **The price is the step size**: on a quadratic the largest stable one is halved by one step of delay
    (:func:`fedcomp.timing.pipeline.stable_step`), and momentum narrows the margin further.

    The nodes are split into ``width`` fixed cohorts that take turns, so that no node ever has two messages and clients
    may keep memory. The inner strategy's minimum numbers of nodes then apply to a cohort.

    Parameters
    ----------
    inner : Strategy
        A :class:`~fedcomp.strategies.server.Server` of any system without state between rounds, or any strategy that a
        ``Server`` can wrap.
    width : int
        Rounds in flight; 1 is the inner strategy's own loop, bit for bit.
    warmup_rounds : int
        First rounds that run one at a time.
    timeout : float
        Seconds after which a round continues without the missing replies.
    deadline : Deadline, optional
        Ends rounds earlier, based on the clients' past durations; with ``width=1`` this is synchronous training with an
        adaptive deadline.
    quorum : int
        Usable answers with which a round need not wait for the others; 0 waits for all, or for the deadline. Answers
        that come after the step are late: they are dropped and reported, and clients with memory put them back.
    grace : float
        Seconds for which a round that has its quorum still waits for the others, at least 0.
    evaluate_every : int
        Clients evaluate after every this many rounds, with the pipeline drained first; 0: never.

    Notes
    -----
    Client evaluation stalls the pipeline, hence ``evaluate_every``; evaluation on the server is overlapped
    and costs no time. A round's metrics are those of the exchange that it applied; :attr:`reports` are by the round
    that sent it, with the staleness of each update in ``report.overlap``. Private strategies are refused.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> strategy = PipelinedStrategy(Compressed(FedAvg(), TopK(density=0.01)), width=2, warmup_rounds=5)
    >>> strategy.width
    2
    """

    STATE: ClassVar[Mapping[str, Any]] = {"cohorts": dict[int, int]}

    def __init__(
        self,
        inner: Strategy,
        width: int = 2,
        *,
        warmup_rounds: int = 0,
        timeout: float = 3600.0,
        deadline: Deadline | None = None,
        quorum: int = 0,
        grace: float = 0.0,
        evaluate_every: int = 0,
    ) -> None:
        super().__init__(inner, timeout=timeout, deadline=deadline)
        self.width = params.integer("width", width, low=1)
        self.quorum = params.integer("quorum", quorum, low=0)
        self.grace = params.number(
            "grace", grace, rule="a finite number of seconds >= 0", ok=lambda v: 0.0 <= v < float("inf")
        )
        self.warmup_rounds = params.integer("warmup_rounds", warmup_rounds, low=0)
        self.evaluate_every = params.integer("evaluate_every", evaluate_every, low=0)
        # Of every node its cohort.
        self.cohorts: dict[int, int] = {}

    def summary(self) -> None:
        """Log the pipe, then what is inside."""
        super().summary()
        log.info("\t├──> width %d after %d rounds", self.width, self.warmup_rounds)
        if self.quorum:
            log.info("\t├──> a round ends %g s after its first %d usable answers", self.grace, self.quorum)
        if not self.evaluate_every:
            log.info("\t├──> clients do not evaluate (evaluate_every=0)")

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        own = {"width": self.width, "warmup": self.warmup_rounds, "quorum": self.quorum, "grace": self.grace}
        return {**super().identity(), **own}

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Send a round; where the pipe is full then, apply the oldest one.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        arrays = self.inner.travelling(arrays)
        # The rounds of an interrupted run again, each with the model that it was sent with, as stale as it would be.
        for lost in self._resumed(grid):
            flight = yield from self._send(lost.now.number, lost.x.arrays, config, grid)
            flight.step = lost.step
        yield from self._drop_late(grid)
        yield from self._send(server_round, arrays, config, grid)
        if len(self.flights) < (1 if server_round <= self.warmup_rounds else self.width):
            return None, None
        return (yield from self._apply_oldest(arrays, grid))

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[Outcome]:
        """Drain the pipe after the last round, and before clients evaluate."""
        model, metrics = None, None
        while self.flights and (last or self._evaluates(server_round)):
            stepped, said = yield from self._apply_oldest(arrays if model is None else model, grid)
            model, metrics = (model, metrics) if stepped is None else (stepped, said)
        return model, metrics

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Let all nodes evaluate, every :attr:`evaluate_every` rounds."""
        if not self._evaluates(server_round):
            return None
        return (yield from self.inner.evaluate_round(server_round, arrays, config, grid))

    def _evaluates(self, server_round: int) -> bool:
        return bool(self.evaluate_every) and server_round % self.evaluate_every == 0

    def _send(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Flight]:
        def choose(messages: list[Message]) -> list[Message]:
            kept = [message for message in messages if message.metadata.dst_node_id not in self.busy]
            self.reports.join(server_round).section(Overlap).held_back += len(messages) - len(kept)
            return kept

        there = len(self._turn(server_round, grid))
        # Flower's strategies wait for whichever of the two is larger.
        minima = {name: getattr(self.inner.inner, name, 0) for name in MINIMA}
        if short := [name for name, least in minima.items() if there < least]:
            log.warning(
                "round %d: %d available nodes are online, but %s waits for %d; with width=%d every cohort needs that "
                "many: start more nodes, or lower its %s",
                server_round,
                there,
                type(self.inner.inner).__name__,
                max(minima.values()),
                self.width,
                " and ".join(short),
            )
        view = NodesShown(grid, lambda: self._turn(server_round, grid))
        return (yield from self._launch(server_round, arrays, config, view, choose))

    def _turn(self, server_round: int, grid: Grid) -> list[int]:
        """Return the nodes whose turn it is; newcomers join the cohort that has fewest nodes online."""
        online = list(grid.get_node_ids())
        sizes = [0] * self.width
        for node in online:
            if node in self.cohorts:
                sizes[self.cohorts[node]] += 1
        for node in online:
            if node not in self.cohorts:
                self.cohorts[node] = sizes.index(min(sizes))
                sizes[self.cohorts[node]] += 1
        return [node for node in online if self.cohorts[node] == (server_round - 1) % self.width]

    def _apply_oldest(self, arrays: ArrayRecord, grid: Grid) -> Exchanges[Outcome]:
        """Wait for the oldest round, run what is left of it, and make its step on top of ``arrays``."""
        flight, came, arrays = self.flights.pop(0), list[Arrived](), self.inner.travelling(arrays)
        if flight.waiting:
            came = yield from self._collect([flight], flight.deadline, grid, self._enough)
        if flight.waiting and self.quorum:
            # Those that failed are no part of the quorum, and nobody waits for them.
            came += yield from self._collect([flight], min(flight.deadline, now(grid) + self.grace), grid)
        self._give_up(flight)
        step = yield from self._land(flight, [reply for _, _, reply in came])
        x, ages = flight.x.onto(arrays), {sent.node: self.steps - flight.step for _, sent, _ in came}
        return self._step(x, flight.now, step, ages, grid)

    def _enough(self, replies: Sequence[Message]) -> bool:
        return bool(self.quorum) and sum(not reply.has_error() for reply in replies) >= self.quorum

    def _land(self, flight: Flight, replies: list[Message]) -> Exchanges[Step | None]:
        begun = flight.exchange if flight.exchange.sent else None
        play = self.inner._play(flight.x, flight.now, flight.program, begun)
        try:
            messages = next(play)
            if begun is not None:
                # These are under way, or answered, since the round began.
                messages = play.send(replies)
            while True:
                messages = play.send((yield Push(messages, self.timeout)))
        except StopIteration as end:
            step: Step | None = end.value
            return step


class Buffered(Overlapping):
    """Buffered asynchronous training: keep some clients busy, and step whenever enough updates have arrived.

    ``θ += η mean(s(τ) δ)``, where δ is a client's update, τ its staleness (the steps that the model has made since it
    was sent) and s its weight. A slow client delays no other; its update counts less. A round of this strategy is one
    step.

    Parameters
    ----------
    inner : Strategy
        A :class:`~fedcomp.strategies.server.Server` of a system of one exchange, with any codec that does not vote, or
        any strategy that a ``Server`` can wrap. It weights updates as usual (FedAvg by examples), and its optimiser
        makes the step.
    concurrency : int
        Number of clients kept busy. A client whose update waits in the buffer is not asked again until that update is
        used or refused, so that its memory is correct; with fewer than ``concurrency + buffer - 1`` nodes online, fewer
        are busy.
    buffer : int
        Updates that trigger a step; all others that have arrived by then are included.
    max_staleness : int
        Largest staleness; older updates are refused. The client gets no acknowledgement and puts the update back into
        its memory.
    weight : {"1/sqrt", "constant"}
        s(τ): 1/sqrt(1 + τ), or 1.
    server_lr : float
        η.
    timeout : float
        Seconds after which a message is abandoned and another client is asked.
    seed : int
        Seeds the draw of clients.

    Raises
    ------
    ConfigError
        For values that do not fit, and a codec of votes, which cannot be scaled. At the first step for a system of
        several exchanges.

    Notes
    -----
    The idle ones among the clients that the inner strategy samples are asked; leave ``fraction_train`` at
    1. Clients do not evaluate, since each handles one message at a time. Messages in flight when the run ends are not
    awaited.

    Fast clients contribute more updates than slow ones, so the model leans towards their data. The reports name the
    nodes of every step (``report.overlap.staleness``).

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> strategy = Buffered(Compressed(FedAvg(), TopK(density=0.01)), concurrency=20, buffer=5)
    >>> strategy.max_staleness
    10
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_draws": Count}

    def __init__(
        self,
        inner: Strategy,
        concurrency: int,
        buffer: int,
        *,
        max_staleness: int = 10,
        weight: str = "1/sqrt",
        server_lr: float = 1.0,
        timeout: float = 3600.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner, timeout=timeout, deadline=None)
        self.concurrency = params.integer("concurrency", concurrency, low=1)
        self.buffer = params.integer("buffer", buffer, low=1)
        self.max_staleness = params.integer("max_staleness", max_staleness, low=0)
        self.weight = params.choice("weight", weight, WEIGHTS)
        self.server_lr = params.positive("server_lr", server_lr)
        self.seed = params.seed(seed)
        self._draws = 0
        if self.inner.system.several:
            raise ConfigError(
                f"{self.inner._name} asks several times in a round ({self.inner.system!r}), which a buffer does not "
                "support; use PipelinedStrategy"
            )
        if voting := [codec for codec in self.inner.system.codecs if codec.votes]:
            raise ConfigError(
                f"{voting[0]!r} sends votes, which cannot be weighted by age; use a codec without votes, or "
                "PipelinedStrategy"
            )

    def summary(self) -> None:
        """Log the buffer, then what is inside."""
        super().summary()
        log.info(
            "\t├──> steps of %d updates, %d clients busy, s = %s up to %d steps; clients do not evaluate",
            self.buffer,
            self.concurrency,
            self.weight,
            self.max_staleness,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        own = ("concurrency", "buffer", "max_staleness", "weight", "server_lr", "seed")
        return {**super().identity(), **{name: getattr(self, name) for name in own}}

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Await updates until there are enough, asking another client for every reply; then step.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        arrays, notes = self.inner.travelling(arrays), self.reports.join(server_round).notes
        if lost := sum(len(each.waiting) for each in self._resumed(grid)):
            notes.append(f"{lost} updates were under way when the run stopped")
        yield from self._drop_late(grid)
        filled: dict[int, tuple[Flight, SentMessage, Message | None]] = {}
        updates, short = 0, "a step of {} instead of {} updates: {}"
        while updates < self.buffer:
            yield from self._fill(server_round, arrays, config, grid, set(filled))
            for flight in self.flights:
                # A node that left before it could be sent anything has no message that could be waited for.
                unsent = [each for each in flight.waiting if not each.message.metadata.message_id]
                flight.waiting = [each for each in flight.waiting if each not in unsent]
                filled |= {each.node: (flight, each, None) for each in unsent}
            self.flights = [each for each in self.flights if each.waiting]
            if not self.flights:
                notes.append(short.format(updates, self.buffer, "no other client is available"))
                break
            # One is enough, as another client is asked in its place at once; all that are there are taken.
            until = min(each.deadline for each in self.flights)
            for flight, sent, reply in (yield from self._collect(self.flights, until, grid, lambda replies: True)):
                aged = self._aged(flight, sent, reply)
                filled[sent.node] = flight, sent, aged
                updates += not aged.has_error()
            for flight in [each for each in self.flights if each.deadline <= now(grid)]:
                filled |= {each.node: (flight, each, None) for each in self._give_up(flight)}
            self.flights = [each for each in self.flights if each.waiting]
            # Where everybody fails this would go on for ever.
            if len(filled) - updates >= self.concurrency + self.buffer:
                notes.append(short.format(updates, self.buffer, f"{len(filled) - updates} clients failed"))
                break
        return self._settle(server_round, arrays, grid, filled)

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[Outcome]:
        """Say what is left under way when the run ends."""
        if last and (left := sum(len(each.waiting) for each in self.flights)):
            log.info("%d updates were under way when the run ended; they are dropped", left)
        return None, None
        # Never reached: it makes this function a generator.
        yield Send([])

    def _fill(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, waiting: set[int]
    ) -> Exchanges[None]:
        """Ask idle clients until enough are busy."""
        wanted = self.concurrency - sum(len(each.waiting) for each in self.flights)
        if wanted <= 0:
            return
        taken = self.busy | waiting

        def draw(messages: list[Message]) -> list[Message]:
            idle = [message for message in messages if message.metadata.dst_node_id not in taken]
            self._draws += 1
            key = Key(self.seed, "buffered", self._draws)
            words = {id(m): key.at(purpose=f"buffered/{m.metadata.dst_node_id}").u64() for m in idle}
            return sorted(idle, key=lambda message: words[id(message)])[:wanted]

        # Flower's line would tell of all nodes, of which one or two are asked.
        with unsampled():
            flight = yield from self._launch(server_round, arrays, config, NodesShown(grid, grid.get_node_ids), draw)
        if flight.x.own:
            raise ConfigError(
                f"{type(self.inner.inner).__name__} sends models of their own to some nodes, and a buffer adds to one; "
                "use PipelinedStrategy"
            )

    def _aged(self, flight: Flight, sent: SentMessage, reply: Message) -> Message:
        """Return a reply, or in place of one that is too old what stands for it."""
        staleness = self.steps - flight.step
        if reply.has_error() or staleness <= self.max_staleness:
            return reply
        return app_failure(
            sent.message,
            f"its update is {staleness} steps old, more than max_staleness={self.max_staleness}; a client with memory "
            "puts it back",
        )

    def _settle(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        filled: Mapping[int, tuple[Flight, SentMessage, Message | None]],
    ) -> Outcome:
        """Answer one round of the program with what clients made in several."""
        server, kinds = self.inner, {n: sent.message.metadata.message_type for n, (_, sent, _) in filled.items()}
        record = next((flight.x.record for flight, _, _ in filled.values()), "arrays")
        x = server._opened(
            server_round, arrays, [Message(RecordDict({record: arrays}), node, kind) for node, kind in kinds.items()]
        )
        x.origins.update({node: filled[address][0].x.start for node, address in x.addresses.items()})
        answers: dict[int, Answer] = {}
        asked = {node: filled[address][0] for node, address in x.addresses.items()}
        sent = [filled[address][1] for address in x.addresses.values()]
        replies = [reply for _, _, reply in filled.values() if reply is not None]
        asks = {node: flight.ask_of(x.addresses[node])._replace(node=node) for node, flight in asked.items()}
        server._refuse_lacking(x, server._receive(x, sent, asks, replies, answers))
        server._inbox.agree(x, answers, sent, server._usual["train"])
        flights = {node: filled[x.addresses[node]][0] for node in answers}
        ages = {address: self.steps - flight.step for address, (flight, _, _) in filled.items()}
        weigh = WEIGHTS[self.weight]
        seen = server._now(
            x,
            lambda: x.vector,
            {node: Origin(flight.now.number, flight.now.model) for node, flight in flights.items()},
            scales={node: self.server_lr * weigh(ages[x.addresses[node]]) for node in answers},
        )
        program = server.system.round(seen)
        next(program)
        try:
            program.send([answers[node] for node in sorted(answers)])
        except StopIteration as end:
            came = {address: ages[address] for address, (_, _, reply) in filled.items() if reply is not None}
            return self._step(x, seen, end.value, came, grid)
        raise AssertionError(f"{server.system!r} asks twice, although it declares one exchange")
