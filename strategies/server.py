"""Programs over Flower, server side: one strategy for all systems.

``Server(system, inner)`` asks whom the inner Flower strategy asks, with the content that it sends, and hands it what
the program makes of the answers. The same generator of exchanges is driven by this project's loop
(:meth:`Server.round`), by Flower's hooks (later exchanges then go over the grid of the first), and by an inner
strategy's own ``start``.

What a node acknowledged, holds and lacks is kept in one :class:`~fedcomp.strategies.roster.Roster`; what is wrong with
an answer refuses that answer alone, by name; only what is in the model is acknowledged.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.adapters import AdapterNames, Halves
from fedcomp.asks import SHOW, read_mark, wait_for
from fedcomp.codecs import Codec, get_codec
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead, AskHead, digest_of
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.coded import NO_HANDLER
from fedcomp.flower.links import Book
from fedcomp.flower.logs import log
from fedcomp.flower.payload import BLOB, EXACT, FRAME, MAIL, NODE_RECORD, POST, payload_bytes
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import OWN_CONFIG, RESYNC, app_failure
from fedcomp.flower.records import (
    completed,
    count_differing,
    finite_where,
    packed,
    restore_dtypes,
    same_model,
    to_arrays,
    to_record,
    without,
)
from fedcomp.flower.report import Report, Reports, ReportSection, figure, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push, drive, own_loop, planned
from fedcomp.layout import DensityPolicy, Layout, Update, Vector, policy_config
from fedcomp.mailbox import Mailbox
from fedcomp.plain import Count, Keys
from fedcomp.program import EVALUATE, HELLO, Answer, Ask, Now, Origin, Round, Step, System, Wait
from fedcomp.rules import Flag, checked
from fedcomp.stateful import Stateful, nested, next_epoch
from fedcomp.strategies.adaptive import Outcome, before_step, has_moments, step_on_support
from fedcomp.strategies.downlink import Downlink
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.inbox import Inbox
from fedcomp.strategies.links import POSTS, Links, greet, oldest_round, record_peer, unpacked
from fedcomp.strategies.means import (
    MEANS,
    aggregate_once,
    copy_names,
    leave,
    mean_of_constants,
    not_held,
    returns_mean,
    weight_key_of,
)
from fedcomp.strategies.replies import Packed, Rejected, SentMessage, Usual, agreeing, match_replies, weight_of
from fedcomp.strategies.returning import FEW_RETURN, Returning
from fedcomp.strategies.roster import Roster
from fedcomp.strategies.round_log import RoundLog, lacks, require_enough, require_half, require_learnt, require_usable
from fedcomp.strategies.running import ALL_WEIGHTLESS, Exchange, Judged, Pushes, Running, Start, Trained
from fedcomp.strategies.statistics import hold_in_record, warn_of_missing_names
from fedcomp.strategies.update_rules import UpdateRule, rule_of
from fedcomp.strategies.wrapping import loop_of, require_inner, require_uncompressed
from fedcomp.versions import FIRST
from fedcomp.wire import Bundle, Frame

Arrays = Mapping[str, NDArray[Any]]

MAX_OPEN: Final = 64
"""Rounds that hooks may open without aggregating them."""


@dataclass
class Drawn(ReportSection, name="adapters"):
    """What a model of adapters adds to a report.

    Attributes
    ----------
    drawn : int
        Values of the model that both ends draw, and that are in no message.
    """

    drawn: int = figure(unit="values", public=True)


class Server(ExchangeStrategy, Stateful):
    """Run a system's rounds around a Flower strategy.

    Parameters
    ----------
    system : System
    inner : Strategy, optional
        Says who takes part and with what configuration, and takes the mean; default FedAvg without evaluation.
    downlink : Codec or dict, optional
        The model goes down as steps from the version that a node holds, and as the program's own steps where it makes
        such: then these alone, and the codec names the layout. None sends the model as the inner strategy does.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    record : str, optional
        Name of the ArrayRecord that is the model, where messages of the inner strategy hold several.
    guard : Norms, optional
        Refuses what is far longer, or weighs far more, than is usual; default nobody does.
    first_model_at_nodes : bool
        Send the model that the run begins with by its digest alone: the nodes make the same one, by the ``first_model``
        of :func:`~fedcomp.clients.compressed.compression`. A node that cannot, or whose model differs in a bit, is
        refused for the round, by name, and gets the whole model with its next message. Needs a ``downlink``.
    links : Links, optional
        Clients bring each other by themselves what they post; default the server does.
    packed : bool
        Send whole models with entropy-coded exponents, without loss. Clients without this project cannot read them:
        such a node is refused for a round, by name, and gets plain models from then on.
    adapters : AdapterNames, optional
        The model is one of adapters, of which one half each is drawn from the seed and never travels. The inner
        strategy's hooks see what travels; its loop, ``evaluate_fn`` and the result have the whole model.
    seed : int
        Of the random streams of clients and server.

    Attributes
    ----------
    reports, evaluations : Reports
        Per round of training, and of client evaluation.
    roster : Roster
        What is known of the nodes.
    state : dict
        What the system keeps between rounds.
    mailbox : Mailbox
        What clients send each other, and asks that are repeated until they are answered.
    cast : bool
        Whether floats of other sizes than float32 are in the vector, as changes. Where whole models are sent, and each
        step is made on the model that they grew from, they travel as values beside it.

    Raises
    ------
    ConfigError
        When the system has no use for the rule that the inner strategy needs, or the downlink does not fit its steps.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import QSGD
    >>> from fedcomp.systems.pair import Pair
    >>> strategy = Server(Pair(QSGD(levels=7)), FedAvg())  # strategy.start(grid, arrays) trains
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "inner": INNER,
        "roster": nested("roster"),
        "down": nested("down"),
        "_session": bytes,
        "sequence": Count,
        "state": dict,
        "posts": POSTS,
        "_usual": Annotated[dict[str, Usual], Keys(("train", "evaluate"))],
        "reports": Reports,
        "evaluations": Reports,
    }

    def __init__(
        self,
        system: System,
        inner: Strategy | None = None,
        *,
        downlink: Codec | dict[str, Any] | None = None,
        policy: DensityPolicy | None = None,
        record: str | None = None,
        guard: Norms | None = None,
        first_model_at_nodes: bool = False,
        links: Links | None = None,
        packed: bool = False,
        adapters: AdapterNames | None = None,
        seed: int = 0,
    ) -> None:
        self._name = type(self).__name__ if type(self) is not Server else type(system).__name__
        self.inner: Strategy = FedAvg(fraction_evaluate=0.0) if inner is None else inner
        require_uncompressed(self.inner)
        require_inner(self.inner, self._name)
        if policy is not None and not callable(policy):
            raise ConfigError(f"policy={policy!r} is not valid: a DensityPolicy, such as SmallDense(min_size=1000)")
        if record is not None and not (isinstance(record, str) and record):
            raise ConfigError(f"record={record!r} is not valid: the name of an ArrayRecord")
        if guard is not None and not isinstance(guard, Norms):
            raise ConfigError(f"guard={guard!r} is not valid: an object, such as Norms(times_median=10)")
        self.system, self.policy, self.record, self.guard, self.links = system, policy, record, guard, links
        self.adapters = adapters
        self.seed = params.seed(seed)
        self._rule = rule_of(self.inner)
        self._require_served(self._rule)
        self.downlink = None if downlink is None else get_codec(downlink)
        # What is not in the vector is never released in a private round: floats are cast there, not sent beside it.
        self.cast = self._inbox.casts or not system.whole
        if self.downlink is not None and system.makes_steps and self.downlink.lossless:
            raise ConfigError(
                f"downlink={self.downlink!r} sends models, but {self._name} makes steps (changes of the model)"
            )
        self.packed = checked("packed", packed, Flag())
        self.first_model_at_nodes = checked("first_model_at_nodes", first_model_at_nodes, Flag())
        if first_model_at_nodes and self.downlink is None:
            raise ConfigError(
                "first_model_at_nodes needs a downlink: without one, whole models are sent in every round. Set a "
                "downlink (Identity() for models without loss), and give the clients compression(first_model=...)"
            )
        if system.makes_steps and self.downlink is not None and not returns_mean(self.inner):
            log.info("%s: what %s makes is sent as the whole model", self._name, type(self.inner).__name__)
        self._begin()

    def _begin(self) -> None:
        """Know nothing of any client: a session of its own begins, in which clients continue no memory."""
        # Of a node that was never asked; the digest shows whether it is true.
        self.roster = Roster(FIRST if self.first_model_at_nodes else 0)
        self.down = None if self.downlink is None else Downlink(self.downlink, self.system, self.policy, self.seed)
        # Not from the seed: a second run with the same one must not go on with the clients' memory of the first.
        self._session = secrets.token_bytes(8)
        self.sequence = 0
        self.state: dict[str, Any] = {}
        self.mailbox = Mailbox()
        self.reports, self.evaluations = Reports(), Reports()
        self._usual = {"train": Usual(), "evaluate": Usual()}
        self._log = RoundLog(self._name, self.system.APP)
        self._timeout: float | None = None
        self._grid: Grid | None = None
        self._reach, self._oldest_asked = b"", 0
        self.halves: Halves | None = None
        self._travels: list[str] = []
        self._shorter: tuple[ArrayRecord, ArrayRecord] | None = None
        self._returning, self._noted = Returning(), False
        self.layout = Layout(())
        self._open: dict[int, tuple[Exchanges[Outcome], Grid]] = {}
        self._evaluating: list[SentMessage] = []
        self._talks: dict[int, tuple[Pushes[MetricRecord | None], Grid]] = {}

    def __repr__(self) -> str:
        down = "" if self.downlink is None else f", downlink={self.downlink!r}"
        return f"{type(self).__name__}({self.system!r}, {type(self.inner).__name__}(){down})"

    @property
    def _inbox(self) -> Inbox:
        """What is read of replies."""
        return self._rule.inbox(self.inner)

    def _require_served(self, rule: UpdateRule) -> None:
        """Refuse an inner strategy that needs of updates what the system has not."""
        if not issubclass(rule.kind, self.system.RULES):
            raise ConfigError(
                f"{self._name} shows no single updates, but {type(self.inner).__name__} looks at them; use one of "
                f"{', '.join(MEANS)}"
            )

    # A round.

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train once; return the new arrays and the clients' metrics, None where there are none.

        Raises
        ------
        NoUsableReply
            When no reply of the clients that were asked can be used, or they are too few for the system, and no
            earlier round brought an update either.
        ConfigError
            When a message of the inner strategy does not hold the model that it was given, and one model alone.
        """
        self.roster.meet(grid)
        self._grid = grid
        self._inbox.begin(self.roster)
        arrays = self.travelling(arrays)
        messages = self._rule.configure(server_round, arrays, config, grid)
        if self.system.KEYS or self.links is not None:
            yield from self._greet(server_round, messages)
        x, now = self._ask(server_round, arrays, messages)
        step = yield from self._play(x, now, self.system.round(now))
        return self._close(x, now, step)

    def _greet(self, server_round: int, messages: Sequence[Message]) -> Pushes[None]:
        """Learn the public keys of those that are to be asked, and which partition each of them holds."""
        self.sequence += 1
        head = AskHead(server_round, self.seed, self._session, self.sequence)
        yield from greet(self.roster, self.links, messages, head, self.reports.join(server_round))

    def _close(self, x: Running, now: Now, step: Step | None) -> Outcome:
        """Take what the program made, and end the round.

        Raises
        ------
        NoUsableReply
            As :meth:`round`.
        """
        began = time.perf_counter()
        outcome, metrics = self._take(x, now, step)
        x.report.seconds += time.perf_counter() - began
        # After a round that worked a bad one is only a warning; before it the set-up itself is likely to be wrong.
        # Who trained, and was lost in a later exchange, has an update that will be used.
        answered = {*x.trained, *x.heard}
        waiting = any(n in answered and address not in x.report.refused for n, address in x.addresses.items())
        withheld = x.rule.withholds
        # A private round may have released, and paid for, its noise without a reply.
        if outcome is None and not withheld and not any(each.used for each in self.reports.values()):
            require_enough(x.report, now.told.get("too_few", ""))
            if not waiting:
                require_usable(x.report)
        if withheld and x.rule.not_finite in x.report.notes:
            log.warning("round %d: %s", x.report.round, x.rule.not_finite)
        self._log.conclude(x.report, self.roster.claims, withheld=withheld)
        if outcome is not None and self.halves is not None:
            outcome = completed(outcome, self.halves, self.seed)
        return outcome, metrics

    def travelling(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what travels of a model: of adapters all but the halves that are drawn.

        Raises
        ------
        ConfigError
            Naming the tensor that may not travel, or of which nobody knows whether it is drawn.
        """
        if self.adapters is None or list(arrays) == self._travels:
            return arrays
        halves = self.adapters.halves(to_arrays(arrays, copy=False), self.seed)
        travels = without(arrays, halves)
        if halves != self.halves:
            self.halves, self._travels = halves, list(travels)
            log.info(
                "%s: of the adapters %s values are drawn from the seed and never travel, %s travel: train these alone",
                self._name,
                f"{halves.size:,}",
                f"{sum(math.prod(array.shape) for array in travels.values()):,}",
            )
        return travels

    def _ask(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> tuple[Running, Now]:
        """Open the round in which the inner strategy sends ``messages``."""
        x = self._opened(server_round, arrays, messages)
        if self.down is not None:
            # A broadcast has one model; where nodes get models of their own these travel as they are.
            if messages and not x.own:
                self.down.publish(x.model, x.layout if self.cast != self.down.lossless else None)
            self.down.follow(x.start)
        remembers = any(codec.remembers for codec in self.system.codecs)
        # Once per run: memories wait at clients of which few return.
        if remembers and not self._noted and self._returning.few(x.addresses.values()):
            self._noted = True
            # What a report notes is logged when the round ends, and forgotten where who took part is secret.
            x.report.notes.append(FEW_RETURN)
        return x, self._now(x, lambda: x.start.vector)

    def _opened(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> Running:
        """Return a round in which ``messages`` go out."""
        return self._begun(self.reports.join(server_round), arrays, messages)

    def _begun(self, report: Report, arrays: ArrayRecord, messages: Sequence[Message]) -> Running:
        """Return a round that is reported in ``report``."""
        report.asked = len(messages)
        if self.halves is not None:
            report.section(Drawn).drawn = self.halves.size
        model = to_arrays(arrays, copy=False)
        layout = Layout.of(model, self.policy, cast_floats=self.cast)
        # Once per model, not once per round.
        if layout.order != self.layout.order:
            warn_of_missing_names(layout)
        self.layout = layout
        by_address = {message.metadata.dst_node_id: message for message in messages}
        addresses = self.roster.numbered(by_address)
        base = {node: by_address[address] for node, address in addresses.items()}
        record, own = self._record_of(base, arrays)
        rule = self._rule.of_round(own=bool(own))
        self._require_served(rule)
        reference = None if self.down is None or own else partial(self.down.reference, layout)
        start = Start(layout, model, reference)
        x = Running(report, arrays, model, start, record, rule, base, addresses, layout, own)
        x.mailbox, x.began = self.mailbox.copy(), self.sequence
        return x

    def _now(
        self,
        x: Running,
        start: Callable[[], Vector],
        origins: Mapping[int, Origin] = MappingProxyType({}),
        **more: Any,
    ) -> Now:
        """Return a round as the program sees it, in which clients train from what ``start`` returns."""

        def seen(node: int, codec: Codec, came: Bundle | Vector) -> None:
            x.seen(node, codec, came, (lambda: origins[node].model) if node in origins else start)

        return Now(
            x.report.round,
            tuple(x.base),
            x.layout,
            start,
            self.seed,
            Judged(x, self.guard, self.reports, self.acknowledge),
            dict(self.state),
            x.refuse,
            x.report.notes.append,
            origins=origins,
            tensors=lambda: x.model,
            strangers=frozenset(n for n, address in x.addresses.items() if address not in self.roster.declared),
            seen=seen,
            keys={n: key for n, address in x.addresses.items() if (key := self.roster.peer(address).key)},
            mailbox=x.mailbox,
            unpack=partial(unpacked, x, self._inbox.trained),
            credit=lambda node, mark: x.credit(node, *read_mark(mark)),
            **more,
        )

    def _record_of(self, messages: Mapping[int, Message], arrays: ArrayRecord) -> tuple[str, dict[int, Arrays]]:
        """Return the name of the model in messages of the inner strategy, and the models other than the round's."""
        # A strategy may put copies into its messages; one comparison per distinct record.
        distinct = {id(record): (name, record) for name, record in map(self._model_in, messages.values())}
        others = {key for key, (_, record) in distinct.items() if not same_model(record, arrays)}
        own: dict[int, Arrays] = {
            node: to_arrays(record)
            for node, message in messages.items()
            if others and id(record := self._model_in(message)[1]) in others
        }
        return next(iter(distinct.values()))[0] if distinct else "arrays", own

    def _model_in(self, message: Message) -> tuple[str, ArrayRecord]:
        """Return name and arrays of the model in a message of the inner strategy."""
        found = {k: v for k, v in message.content.items() if isinstance(v, ArrayRecord)}
        name = next(iter(found), "") if self.record is None else self.record
        if name not in found or (self.record is None and len(found) > 1):
            wanted = "the only one" if self.record is None else f"one called {self.record!r}"
            raise ConfigError(
                f"the inner strategy put {len(found)} ArrayRecords {sorted(found)} into a message; {self._name} takes "
                f"{wanted} as the model. Name it with record=...; the others pass through untouched"
            )
        return name, found[name]

    def _play(self, x: Running, now: Now, program: Round, begun: Exchange | None = None) -> Pushes[Step | None]:
        """Drive the program: asks to messages, replies to answers; return what it came to.

        ``begun`` are the asks that it has made already.
        """
        began = time.perf_counter()
        try:
            exchange = self._send(x, now, next(program)) if begun is None else begun
            while True:
                answers = yield from self._exchanged(x, now, exchange, began)
                began = time.perf_counter()
                exchange = self._send(x, now, program.send(answers))
        except StopIteration as end:
            x.report.seconds += time.perf_counter() - began
            step: Step | None = end.value
            self._require_half(x)
            return step

    def _require_half(self, x: Running) -> None:
        """Refuse, by name, the nodes whose apps have no half to greet, and that did nothing for the round without it.

        Raises
        ------
        NoUsableReply
            When it is all nodes that replied, and no earlier round brought an update.
        """
        for node, address in x.addresses.items():
            if self.roster.peer(address).greet and node not in {*x.trained, *x.heard}:
                x.refuse(node, self._without_half(x, address))
        if not (x.rule.withholds or any(each.used for each in self.reports.values())):
            require_half(x.report)

    def _without_half(self, x: Running, address: int) -> str:
        """Report that a node's app lacks the client half; return what is said of it."""
        if address not in x.report.without_mod:
            x.report.without_mod.append(address)
        return lacks(self._name, self.system.APP)

    def _exchanged(self, x: Running, now: Now, exchange: Exchange, began: float) -> Pushes[list[Answer]]:
        """Return the answers of one exchange in the order of nodes; ``began``: since when the server has worked."""
        answers: dict[int, Answer] = {}
        asked, sent = exchange.asks, exchange.sent
        x.report.seconds += time.perf_counter() - began
        replies = (yield self._pushed(x, exchange)) if sent else []
        began = time.perf_counter()
        if lacking := self._receive(x, sent, asked, replies, answers):
            # Who lacks a blob that it once had is asked once more, with its bytes. The program does not know.
            asked = {node: asked[node] for node in lacking}
            numbers = {each.node: each.sequence for each in sent}
            again = [
                self._message(x, self._round_of(x, now, ask), ask, numbers[x.addresses[ask.node]])
                for ask in asked.values()
            ]
            x.report.seconds += time.perf_counter() - began
            replies = yield [each.message for each in again]
            began = time.perf_counter()
            self._refuse_lacking(x, self._receive(x, again, asked, replies, answers))
        self._inbox.agree(x, answers, sent, self._usual["train"])
        found = [answers[node] for node in sorted(answers)]
        for answer in found:
            x.mailbox.put(answer.post)
        if self.system.LOST != "again":
            x.mailbox.put_back()
        x.report.seconds += time.perf_counter() - began
        return found

    def _send(self, x: Running, now: Now, wanted: Sequence[Ask] | Wait) -> Exchange:
        """Return asks as messages: under the next number, or repeated under their own."""
        self.sequence += 1
        wait, repeats = wait_for(wanted), self.system.LOST == "again"
        # All of them before one is sent: what is posted in an exchange comes with the next.
        stamped = [x.mailbox.stamp(self.sequence, now.number, ask, again=repeats) for ask in wait.asks]
        if self.links is not None:
            self._reach = self.links.book(self.roster.reached())
            self._oldest_asked = oldest_round(x.mailbox, now.number) if self.system.TRACED else 0
        # Who does not take part in the round is not asked.
        there = [each for each in stamped if each.ask.node in x.addresses]
        sent = [self._message(x, self._round_of(x, now, each.ask), each.ask, each.number) for each in there]
        return Exchange({each.ask.node: each.ask for each in there}, sent, wait if wait is wanted else None)

    def _round_of(self, x: Running, now: Now, ask: Ask) -> Now:
        """Return the round of an ask: a repeated one is of the round in which it was asked first."""
        stamped = x.mailbox.asked.get(ask.node)
        return now if stamped is None or stamped.round == now.number else replace(now, number=stamped.round)

    def _pushed(self, x: Running, exchange: Exchange) -> Iterable[Message]:
        """Return messages, and how long they are waited for."""
        messages, wait = [each.message for each in exchange.sent], exchange.wait
        if wait is None:
            return messages
        enough, aside = wait.enough, x.aside()
        found: dict[int, Answer] = {}
        looked: list[Message] = []

        def decided(replies: Sequence[Message]) -> bool:
            assert enough is not None
            # Who goes by another number since a former look has answered.
            asked = {node: ask for node, ask in exchange.asks.items() if node in aside.addresses}
            waiting = {aside.addresses[node] for node in asked}
            sent = [each for each in exchange.sent if each.node in waiting]
            # Looked at before they are taken, in a round of which nothing is used.
            self._receive(aside, sent, asked, replies[len(looked) :], found)
            looked.extend(replies[len(looked) :])
            return enough([found[node] for node in sorted(found)])

        return Push(messages, wait.seconds, None if enough is None else decided)

    def _refuse_lacking(self, x: Running, nodes: Iterable[int]) -> None:
        for node in nodes:
            x.refuse(node, "says that it lacks the blobs that this message holds")

    def _message(self, x: Running, now: Now, ask: Ask, sequence: int) -> SentMessage:
        """Return an ask as a message."""
        address = x.addresses[ask.node]
        peer, base = self.roster.peer(address), x.base[ask.node]
        content, fields, data = RecordDict(), dict[str, Any](), dict[str, Frame]()
        coming, saved = set[str](), 0
        if ask.kind in ("train", EVALUATE, SHOW):
            # Strategies put the same records into all messages; what is added here is this node's alone.
            content = base.content.copy()
            fields = {"model": x.record}
            if not ask.model:
                del content[x.record]
                fields = {}
            elif self.down is not None and not x.own:
                fields, coming = self.down.fill(content, x.record, peer, data)
            if saved := self._pack(content, x.record, address):
                x.report.section(Packed).saved += saved
            fields["policy"] = policy_config(self.policy, x.layout)
        elif not ask.model:
            # What an app is configured by: it brings what the half answers with.
            content = RecordDict({k: v for k, v in base.content.items() if isinstance(v, ConfigRecord)})
        brought = dict(ask.blobs)
        if self.links is not None:
            # The same for all nodes, so that it travels where it has changed.
            brought[Book.NAME] = self._reach
        blobs = {name: digest_of(blob) for name, blob in brought.items()}
        # What follows from the steps in this message the node has by the time it looks.
        data |= {BLOB + blobs[name]: b for name, b in brought.items() if blobs[name] not in coming.union(peer.blobs)}
        data |= {FRAME + name: frame for name, frame in ask.frames.items()} | asks.named_posts(ask.mail, MAIL)
        head = AskHead(
            number=now.number,
            seed=self.seed,
            session=self._session,
            sequence=sequence,
            needs_model=ask.model,
            oldest=self._oldest_asked,
            consumed=peer.consumed,
            generation=peer.generation,
            system=self.system.to_config(),
            blobs=asks.named(blobs),
            say=asks.id_of(ask.say),
            cast=self.cast,
            drawn=self.drawn_halves() if fields else {},
            **fields,
        )
        asks.put(content, head, ask.say, data)
        meta = base.metadata
        kind = meta.message_type if ask.kind in ("train", EVALUATE) else ask.kind
        message = Message(content, address, kind, ttl=meta.ttl, group_id=meta.group_id or None)
        return SentMessage(message, address, sequence, int(fields.get("version", 0)), saved)

    def _pack(self, content: RecordDict, record: str, address: int) -> int:
        """Put the model of a message, where it holds one, into fewer bytes; return how many fewer."""
        model = content.get(record)
        if not self.packed or not isinstance(model, ArrayRecord) or self.roster.peer(address).plain:
            return 0
        # Once for all nodes that get this very record.
        if self._shorter is None or self._shorter[0] is not model:
            self._shorter = model, packed(model)
        content[record] = short = self._shorter[1]
        return sum(len(array.data) - len(short[name].data) for name, array in model.items())

    # Answers.

    def _receive(
        self,
        x: Running,
        sent: list[SentMessage],
        asked: Mapping[int, Ask],
        replies: Iterable[Message],
        answers: dict[int, Answer],
    ) -> list[int]:
        """Add what replies say to ``answers``; return the nodes that lack a blob. What is wrong refuses one reply."""
        nodes = {x.addresses[node]: node for node in asked}
        lacking = []
        for each, reply in match_replies(sent, replies, x.report, x.holders or self.roster):
            node = nodes[each.node]
            try:
                answer = self._read(x, node, asked[node], each, reply)
            except FedcompError as why:
                text = str(why) if isinstance(why, Rejected) else f"{type(why).__name__}: {why}"
                x.refuse(node, text, reply)
                continue
            if answer is None:
                lacking.append(node)
            else:
                x.mailbox.answered(node)
                answers[answer.node] = answer
                if answer.node != node and node in x.addresses:
                    # The silent node whose number this one has taken.
                    nodes[x.addresses[node]] = node
        return lacking

    def _read(self, x: Running, node: int, ask: Ask, sent: SentMessage, reply: Message) -> Answer | None:
        """Return the answer in a reply, None from a node that lacks a blob.

        Raises
        ------
        FedcompError
            When anything about it is wrong.
        """
        peer, content = self.roster.peer(sent.node), reply.content if reply.has_content() else RecordDict()
        if reply.has_error():
            reason = f"error {reply.error.code}: {reply.error.reason}"
            if RESYNC in reason:
                peer.forget()
            reason += self.roster.unread(sent.node, reply.error.code) if sent.saved else ""
            if NO_HANDLER in reason and ask.kind != "train":
                reason = self._without_half(x, sent.node)
            elif NO_HANDLER in reason:
                reason += f"; register what trains with @app.train(), or write {self.system.APP}"
            raise Rejected(reason)
        head = asks.find_answer(content)
        said = head is not None and (head.record or head.lacks or head.say or head.bare)
        if head is None or not head.sequence or (ask.kind == "train" and not said):
            # An app that was not given the drawn halves has trained others.
            if ask.dense and self.halves is None:
                return self._dense(x, node, sent, reply, head)
            if head is None or not head.unsupported:
                raise Rejected(self._without_half(x, sent.node))
            raise Rejected(
                f"the client answered with a model: its app cannot take part in {self._name} ({head.unsupported})"
            )
        if head.sequence != sent.sequence:
            raise Rejected(f"the reply answers message {head.sequence}, expected {sent.sequence}: a stale reply")
        # What the engine knows, else the node's own first word.
        known = self.roster.known.get(sent.node, self.roster.declared.get(sent.node, head.partition_id))
        if head.partition_id != known:
            raise Rejected(f"the client says that it is partition {head.partition_id}, and it is {known}")
        if head.lacks:
            peer.blobs = [digest for digest in peer.blobs if digest not in head.lacks]
            return None
        say = asks.say_of(content, head, self.system)
        if ask.expects is not None and not isinstance(say, ask.expects):
            raise Rejected(f"says {type(say).__name__}, expected {ask.expects.__name__}")
        frames = asks.data_in(content, FRAME)
        # Who is asked to train may have nothing to do, and says so; then it has nothing to send either.
        has_trained = ask.kind == "train" and bool(head.record)
        if frames and ask.model and not (has_trained or head.bare) and head.partition_id not in x.trained:
            raise Rejected(f"sends {shorten(str(sorted(frames)))}, but its app has not trained")
        posts = asks.posts_in(content, POST, head.partition_id)
        if posts:
            x.mailbox.require(posts, {*x.base, *self.roster.claims.values(), *x.mailbox.asked})
        other = x.addresses.get(head.partition_id, sent.node)
        if other != sent.node and other not in (x.holders or self.roster).silent:
            raise Rejected(
                f"the client says that it is partition {head.partition_id}, as which another node of this round answers"
            )
        if has_trained:
            trained = self._inbox.trained(x, head, reply, asks.data_in(content, EXACT).get(""))
        # From here on nothing is wrong with it.
        self.roster.declared[sent.node] = head.partition_id
        if head.partition_id != node:
            x.rename(node, head.partition_id)
            node = head.partition_id
        if has_trained:
            x.trained[node] = trained
            x.exact_bytes[node] = len(asks.data_in(content, EXACT).get("", b""))
        if ask.kind == "train" and self.down is not None:
            self.down.held(peer, head.version, sent)
        self._note_state(x, sent, head)
        peer.take(digest_of(blob) for blob in ask.blobs.values())
        if self.links is not None:
            peer.take([digest_of(self._reach)])
            self._note_links(x, sent, head)
        peer.take(digest_of(frames[name]) for name in self.system.SHARED if name in frames)
        x.payload[node] = x.payload.get(node, 0) + payload_bytes(reply)
        if ask.kind != HELLO:
            x.heard.add(node)
        if head.key:
            peer.key, peer.address, peer.signature = head.key, head.address, head.signature
        if self.system.SENT in frames or head.sent:
            x.sent[node] = head.sequence, head.generation
        weight = x.trained[node].weight if node in x.trained else 0.0
        return Answer(node, weight, say, frames, post=posts)

    def _dense(self, x: Running, node: int, sent: SentMessage, reply: Message, head: AnswerHead | None) -> Answer:
        """Return the model of an app that stands in no half of this project, or in one that may not use the system.

        Raises
        ------
        FedcompError
            When it is none, or is not finite.
        """
        if not x.rule.takes_plain:
            raise Rejected("its client did not privatise the update; its app lacks the mod")
        trained, update = self._inbox.dense(x, node, reply, sent.sequence, whole=self.system.whole)
        trained.unsupported = "" if head is None else head.unsupported
        x.trained[node] = trained
        x.exact_bytes[node] = 0
        if self.down is not None:
            self.down.held(self.roster.peer(sent.node), 0 if head is None else head.version, sent)
        x.payload[node] = payload_bytes(reply)
        return Answer(node, trained.weight, update=update)

    def _note_links(self, x: Running, sent: SentMessage, head: AnswerHead) -> None:
        """Report what a client says of its links."""
        meta = sent.message.metadata
        record_peer(self._grid, x.report.round, sent.node, meta.message_type, head.handed, head.parcels)
        x.report.notes += [f"link {head.partition_id}>{shorten(missed)}" for missed in head.missed]

    def _note_state(self, x: Running, sent: SentMessage, head: AnswerHead) -> None:
        """Report what a client says of its memory and its update."""
        report = x.report
        if head.state == "rolled back" and sent.node not in report.rolled_back:
            report.rolled_back.append(sent.node)
        # A memory bears the number of the message it began with.
        if head.generation == sent.sequence:
            report.fresh.append(sent.node)
        self._inbox.note(report, sent.node, head)

    def acknowledge(self, x: Running, nodes: Iterable[int]) -> None:
        """Note that what nodes sent is used, or dropped for good."""
        for node in nodes:
            # Without memory there is nothing to acknowledge: the memory's last frame stays the one consumed.
            if (found := x.sent.get(node)) is not None and found[1]:
                peer = self.roster.peer(x.addresses[node])
                peer.consumed, peer.generation = found

    # The model.

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        """Hand what the program made to the inner strategy; acknowledge what is in the model."""
        report = x.report
        if step is None or self.system.LOST == "again":
            self.state, self.mailbox = dict(now.state), x.mailbox
        if step is None:
            return None, None
        used = [x.trained[node] for node in step.consumed if node in x.trained]
        for node in step.consumed:
            trained, address = x.trained.get(node), x.addresses[node]
            if trained is None:
                # Its part came in a sum.
                report.compressed += 1
                continue
            report.plain, report.compressed = report.plain + trained.dense, report.compressed + (not trained.dense)
            if trained.unsupported:
                report.unsupported[address] = shorten(trained.unsupported)
            elif trained.dense:
                report.without_mod.append(address)
        undo = before_step(self.inner)
        with np.errstate(over="ignore", invalid="ignore"):
            if step.single is not None:
                out, metrics = self._single(x, now, step)
            elif step.tensors is not None:
                out, metrics = self._whole(x, now, step)
            else:
                out, metrics = self._mean(x, now, step, self._inbox.shown(used))
            self._inbox.account(x, step.consumed)
            if out is None:
                self._inbox.kept(report)
                return None, metrics
            restored = restore_dtypes(out, x.model, [trained.exact for trained in used])
        # A finite float32 may be infinite as float16; what kept its dtype is the same array, looked at once.
        changed = ArrayRecord({name: array for name, array in restored.items() if array is not out[name]})
        if not finite_where(out, x.model) or not finite_where(changed, x.model):
            report.notes.append(x.rule.not_finite)
            # Its momentum would be infinite for good.
            undo()
            return None, None
        report.used += len(step.consumed)
        self.state, self.mailbox = dict(now.state), x.mailbox
        self.acknowledge(x, step.consumed)
        if self.down is not None and x.given[0] is not None and step.change is not None:
            self.down.note(x.given[0], x.given[1], now.scales, x.layout)
        if step.frame is not None:
            if self.down is not None and returns_mean(self.inner):
                self.down.push(step, to_arrays(restored), now.number, x.layout)
        elif note := hold_in_record(restored, x.layout, x.model):
            report.notes.append(note)
        if step.metrics and step.tensors is None:
            metrics = MetricRecord({**(metrics or {}), **step.metrics})
        return restored, metrics

    def _mean(self, x: Running, now: Now, step: Step, used: Sequence[Trained]) -> Outcome:
        """Let the inner strategy take the model that a step leads to for the mean of the clients' models."""
        report, layout, part = x.report, x.layout, slice(x.layout.compressed_size)
        if len(used) < len(step.consumed):
            # Of a sum there are no single buffers, weights or metrics: those of a few would stand for all.
            used = []
        if unread := sorted(used[0].content.array_records) if used else ():
            report.notes.append(
                f"replies hold the ArrayRecords {shorten(str(unread))} beside the model, which "
                f"{type(self.inner).__name__} does not read: they use bandwidth for nothing, unless its "
                "train_metrics_aggr_fn reads them"
            )
        changes: dict[str, NDArray[Any]] = {}
        if step.model is not None:
            moved = step.model
            x.changed = count_differing(moved[part], now.model[part])
            # Floats of other sizes are in the vector only where models are sent that grew from another one than this.
            changes = {t.name: moved[t.slice] - now.model[t.slice] for t in layout.wide}
            if now.model is not x.vector:
                # Clients sent whole models grown from the reference: add what the reference lacks of the true model.
                np.add(moved, x.vector - now.model, out=moved)
        elif step.frame is not None and step.codec is not None:
            moved = x.vector.copy()
            step.codec.accumulate(step.frame, 1.0, Update(moved, layout))
            layout.round_to_dtypes(moved)
            x.changed = count_differing(moved[part], x.vector[part])
            if layout.wide and (lost := not_held(layout, x.vector, step.codec.decode(step.frame, layout), moved)):
                report.notes.append(lost)
        else:
            assert step.change is not None
            moved = step.change
            if used:
                leave(moved, layout, frozenset.intersection(*(each.unchanged for each in used)))
                self._share(x, now, moved, step.consumed)
            changes = {t.name: moved[t.slice].copy() for t in layout.wide}
            x.changed = layout.add_model(x.model, moved)
        arrays = layout.added(x.model, changes, moved, mean_of_constants(x.weighted(used), x.model))
        if step.frame is not None:
            for t in layout.wide:
                # What did not move keeps the digits that float32, in which nodes hold the model, does not have.
                stood = (moved[t.slice] == x.vector[t.slice]).reshape(t.shape)
                arrays[t.name] = np.where(stood, x.model[t.name], arrays[t.name])
        return aggregate_once(
            x.rule.takes,
            now.number,
            (used[0].record if used else x.record, to_record(arrays)),
            # A round that nobody was drawn for has no message to answer.
            next(iter(x.base.values()), None) or Message(RecordDict(), 1, "train"),
            [each.content for each in used],
            metrics_name=(used[0].metrics if used else "") or "metrics",
            received=self._inbox.received(x, step.consumed),
            sparse=step.support,
        )

    def _whole(self, x: Running, now: Now, step: Step) -> Outcome:
        """Let the inner strategy take a model that the program made in more digits than a vector has."""
        assert step.tensors is not None
        # Metrics are means already; the inner strategy's own aggregation wants a weight beside them.
        metrics: dict[str, Any] = {weight_key_of(self.inner) or "": 1.0, **step.metrics}
        return aggregate_once(
            x.rule.takes,
            now.number,
            (x.record, to_record(step.tensors)),
            next(iter(x.base.values()), None) or Message(RecordDict(), 1, "train"),
            [RecordDict({"metrics": MetricRecord(metrics)})] if step.metrics else [],
            received=None if x.rule.withholds else (len(step.consumed), len(x.base) - len(step.consumed)),
        )

    def _share(self, x: Running, now: Now, change: Vector, consumed: Sequence[int]) -> None:
        """Give tensors that are another name of an earlier one the change of that one, in place."""
        layout, (codec, given) = x.layout, x.given
        copies = {node: x.trained[node].copies for node in consumed}
        everywhere = set.intersection(*(set(each.items()) for each in copies.values()))
        total = sum(each.weight for each in given)
        for each in given:
            # Where others send both names this one's share of the second is added.
            own = dict(set(copies.get(each.node, {}).items()) - everywhere)
            if own and codec is not None and each.update is None:
                alone = codec.decode(each.frame, layout)
                copy_names(alone, now.model, layout, own)
                for second in own:
                    part = layout.tensors[second].slice
                    change[part] += np.float32(each.weight / total * now.scales.get(each.node, 1.0)) * alone[part]
        if everywhere:
            copy_names(change, x.vector, layout, dict(everywhere))

    def _single(self, x: Running, now: Now, step: Step) -> Outcome:
        """Let the inner strategy aggregate ordinary replies."""
        assert step.single is not None
        layout, changed, messages = x.layout, np.zeros(x.layout.size, np.bool_), []
        for node, update in step.single.items():
            trained, own = x.trained[node], x.own.get(node)
            base, model = (x.vector, x.model) if own is None else (layout.flatten(own), own)
            leave(update, layout, trained.unchanged)
            copy_names(update, base, layout, trained.copies)
            if step.whole:
                start = now.model if own is None else base
                changed |= update != start
                # Floats of other sizes are in the vector only where a model grew from another one than this.
                changes = {t.name: update[t.slice] - start[t.slice] for t in layout.wide}
                if own is None and now.model is not x.vector:
                    # Clients trained from another model: what they changed is put on the server's own.
                    update += x.vector - now.model
            else:
                changed |= update != 0.0
                changes = {t.name: update[t.slice].copy() for t in layout.wide}
                update += base
            # Of the message as it came, before the decoded model takes the place of its frame.
            came = ConfigRecord({"payload-bytes": x.payload[node]})
            # First, as in the reply of an app that puts other records beside it.
            decoded = {trained.record: to_record(layout.added(model, changes, update, trained.exact))}
            trained.reply.content = RecordDict({**decoded, **trained.content, OWN_CONFIG: came})
            messages.append(trained.reply)
        x.changed = int(np.count_nonzero(changed[: layout.compressed_size]))

        def aggregate() -> Outcome:
            return self.inner.aggregate_train(now.number, [*messages, *x.errors])

        if has_moments(self.inner) and step.support:
            where = {t.name: changed[t.slice].reshape(t.shape) for t in layout.tensors}
            # Buffers travel whole in every reply.
            where |= {t.name: np.ones(t.shape, np.bool_) for t in layout.exact}
            return step_on_support(self.inner, where, aggregate)
        return aggregate()

    # Evaluation on clients: on the model that nodes hold, or by the system's own exchanges.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure evaluation; nodes that hold the model already get no model bytes."""
        arrays = self.travelling(arrays)
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        if messages and (talk := self._talk(server_round, arrays, messages)) is not None:
            self._talks[server_round] = talk, grid
            return list(next(talk))
        self._evaluating = [SentMessage(message, message.metadata.dst_node_id, 0) for message in messages]
        # Nothing is trained, so without a downlink and with the whole model as it is there is nothing to say.
        if (self.down is None and not self.drawn_halves() and not self.packed) or not messages:
            return messages
        record, own = self._record_of({message.metadata.dst_node_id: message for message in messages}, arrays)
        down = None if own else self.down
        if down is None and not self.drawn_halves() and not self.packed:
            return messages
        if down is not None:
            down.publish(to_arrays(arrays, copy=False))
        self._evaluating = []
        for message in messages:
            meta, content, data = message.metadata, message.content.copy(), dict[str, Frame]()
            fields: dict[str, Any] = {"model": record}
            if down is not None:
                fields, _ = down.fill(content, record, self.roster.peer(meta.dst_node_id), data)
                fields["policy"] = policy_config(self.policy, down.layout)
            saved = self._pack(content, record, meta.dst_node_id)
            if down is None and not self.drawn_halves() and not saved:
                self._evaluating.append(SentMessage(message, meta.dst_node_id, 0))
                continue
            head = AskHead(
                number=server_round,
                seed=self.seed,
                session=self._session,
                system=self.system.to_config() if self.system.makes_steps else {},
                cast=self.cast,
                drawn=self.drawn_halves(),
                **fields,
            )
            asks.put(content, head, data=data)
            made = Message(content, meta.dst_node_id, meta.message_type, ttl=meta.ttl, group_id=meta.group_id or None)
            version = int(fields.get("version", 0))
            self._evaluating.append(SentMessage(made, meta.dst_node_id, 0, version, saved))
        return [each.message for each in self._evaluating]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note which versions the nodes hold, leave out replies that cannot be averaged, and let inner aggregate."""
        if server_round in self._talks:
            talk, grid = self._talks.pop(server_round)
            metrics: MetricRecord | None = self._finished(talk, grid, replies)
            return metrics
        report = self.evaluations.begin(server_round)
        if saved := sum(each.saved for each in self._evaluating):
            report.section(Packed).saved += saved
        return self._evaluated(report, replies)

    def _evaluated(self, report: Report, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy aggregate what replies say."""
        key, server_round = weight_key_of(self.inner), report.round
        sent, self._evaluating = self._evaluating, []
        report.asked, errors = len(sent), list[Message]()
        found: list[tuple[tuple[SentMessage, Message], str, RecordDict]] = []

        def refuse(each: SentMessage, reply: Message, reason: str) -> None:
            report.refuse(each.node, reason)
            errors.append(reply if reply.has_error() else app_failure(each.message, reason))

        for each, reply in match_replies(sent, replies, report, self.roster):
            peer = self.roster.peer(each.node)
            try:
                if reply.has_error():
                    reason = f"error {reply.error.code}: {reply.error.reason}"
                    if RESYNC in reason:
                        peer.forget()
                    raise Rejected(reason + (self.roster.unread(each.node, reply.error.code) if each.saved else ""))
                # Refused here by itself: Flower's own check ends the whole run over one reply without a weight.
                weight_of(reply.content, key)
                if self.down is not None:
                    head = asks.find_answer(reply.content)
                    self.down.held(peer, 0 if head is None else head.version, each)
            except FedcompError as why:
                refuse(each, reply, str(why))
                continue
            # Ours alone: the inner strategy gets what the app replied.
            reply.content.pop(NODE_RECORD, None)
            found.append(((each, reply), "", reply.content))
        kept = agreeing(found, report, lambda pair: pair[0].node, self._usual["evaluate"])
        if key is not None and kept and sum(weight_of(reply.content, key)[1] for _, reply in kept) <= 0:
            for each, reply in kept:
                refuse(each, reply, ALL_WEIGHTLESS)
            kept = []
        report.payload_bytes = sum(payload_bytes(reply) for _, reply in kept)
        if names := sorted({name for _, reply in kept for name in reply.content.array_records}):
            report.notes.append(
                f"replies to evaluation hold the ArrayRecords {shorten(str(names))}, which no code reads: "
                f"{report.payload_bytes:,} bytes that are in no ratio of training replies"
            )
        self._log.warn(report, self.roster.claims)
        report.concluded = True
        return self.inner.aggregate_evaluate(server_round, [*(reply for _, reply in kept), *errors])

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on the clients that the inner strategy asks."""
        messages = list(self.configure_evaluate(server_round, arrays, config, grid))
        if server_round not in self._talks:
            return self.aggregate_evaluate(server_round, (yield messages))
        talk, _ = self._talks.pop(server_round)
        try:
            pushed: Iterable[Message] = messages
            while True:
                pushed = talk.send((yield pushed))
        except StopIteration as end:
            metrics: MetricRecord | None = end.value
            return metrics

    def _talk(
        self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]
    ) -> Pushes[MetricRecord | None] | None:
        """Return the system's own conversation for evaluation, None where it has none."""
        if type(self.system).evaluation is System.evaluation:
            return None
        x = self._begun(self.evaluations.begin(server_round), arrays, messages)
        # Nothing is posted: what waits is for those who train.
        x.mailbox = Mailbox()
        now = self._now(x, lambda: x.start.vector)
        program = self.system.evaluation(now)
        if program is None:
            return None
        if self.down is not None and not x.own:
            self.down.publish(x.model, x.layout if self.cast != self.down.lossless else None)
            self.down.follow(x.start)

        def talk() -> Pushes[MetricRecord | None]:
            try:
                wanted = next(program)
                while True:
                    exchange = self._send(x, now, wanted)
                    if any(ask.kind == EVALUATE for ask in exchange.asks.values()):
                        program.close()
                        self._evaluating = exchange.sent
                        return self._evaluated(x.report, (yield [each.message for each in exchange.sent]))
                    wanted = program.send((yield from self._exchanged(x, now, exchange, time.perf_counter())))
            except StopIteration:
                # Nobody is left to evaluate.
                self._evaluating = []
                return self._evaluated(x.report, [])

        return talk()

    # Flower's hooks: the same generator, driven by Flower.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open the round; return the messages of its first exchange."""
        opened = self.round(server_round, arrays, config, grid)
        try:
            messages = next(opened)
        except StopIteration as end:
            # Nobody was asked: what the round came to all the same is returned in its turn.
            opened, messages = _ended(end.value), []
            next(opened)
        self._open[server_round] = opened, grid
        for former in list(self._open)[:-MAX_OPEN]:
            # Each holds a model; a loop that never aggregates would fill the memory.
            self._open.pop(former)[0].close()
            log.warning(
                "round %d: %d later rounds were configured before it was aggregated; it is abandoned", former, MAX_OPEN
            )
        assert isinstance(messages, Iterable)
        return list(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drive the round to its end: exchanges after the first go over the grid that it was configured for.

        Raises
        ------
        ConfigError
            When the round was not configured, or was aggregated before.
        """
        if server_round not in self._open:
            raise ConfigError(f"round {server_round} was not configured, or was aggregated before")
        opened, grid = self._open.pop(server_round)
        outcome: Outcome = self._finished(opened, grid, replies)
        return outcome

    def _finished(self, opened: Generator[Any, list[Message], Any], grid: Grid, replies: Iterable[Message]) -> Any:
        """Drive what hooks have opened to its end: exchanges after the first go over the grid of that one."""

        def rest() -> Exchanges[Any]:
            try:
                pushed = opened.send(list(replies))
                while True:
                    pushed = opened.send((yield pushed))
            except StopIteration as end:
                return end.value

        return drive(rest(), grid, timeout=self._timeout)

    @property
    def surroundings(self) -> dict[str, Any]:
        """What another server around the same strategy is given, beside its system."""
        return {
            name: getattr(self, name)
            for name in ("downlink", "policy", "record", "guard", "first_model_at_nodes", "packed", "adapters", "seed")
        }

    def drawn_halves(self) -> dict[str, Any]:
        """What messages with a model say of the halves of adapters that are not in it."""
        return {} if self.halves is None else self.halves.to_config()

    @property
    def own_loop(self) -> bool:
        """Whether the inner strategy overrides Flower's ``start``, and with it the rounds of this one."""
        return own_loop(self.inner)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the inner strategy's loop where it has one of its own, else this project's; arguments as Flower's.

        Started again with the arrays that it ended with it continues; with others it starts a new training, in which
        neither clients nor server remember anything of the former one.
        """
        # By Flower's signature: start(grid, initial_arrays, num_rounds, timeout, ...).
        initial = kwargs.get("initial_arrays", args[1] if len(args) > 1 else None)
        if self._started and isinstance(initial, ArrayRecord):
            if self._ended is None or not same_model(initial, self._ended):
                log.info("restarted with another model: the memory of the former training is dropped")
                self._begin()
            self._started = False
        self._timeout = kwargs.get("timeout", args[3] if len(args) > 3 else 3600)
        if not self.own_loop:
            return super().start(*args, **kwargs)
        self._started, self._ended = True, None
        before = self.sequence
        planned.set(int(kwargs.get("num_rounds", args[2] if len(args) > 2 else 3)))
        with np.errstate(under="ignore"):
            result = loop_of(self.inner, self).start(*args, **kwargs)
        # Each exchange takes a number, so an unchanged one shows that none was made.
        if self.sequence == before:
            log.warning(
                "%s.start called none of this strategy's hooks: if it ran rounds, nothing in them was compressed",
                type(self.inner).__name__,
            )
        self._ended = result.arrays
        self.finish()
        return result

    def finish(self) -> None:
        """Refuse to end a run as if it had worked, in which no round has used an update.

        Raises
        ------
        NoUsableReply
        """
        # A private round may have moved the model by its noise alone; repeated messages are not lost for good.
        if find_private(self) is None and self.system.LOST != "again":
            require_learnt(self.reports)

    def summary(self) -> None:
        """Log system and downlink, then the inner strategy's own summary."""
        log.info("\t├──> %r, downlink %r", self.system, self.downlink or "dense")
        self.inner.summary()

    # Between runs.

    def identity(self) -> dict[str, str]:
        """Return what must not change within a run."""
        return {"system": repr(self.system), "downlink": repr(self.downlink)}

    def renumber(self) -> None:
        """Number messages and versions so that none is taken for one that was sent after the state was saved."""
        super().renumber()
        self.sequence = next_epoch(self.sequence)


def _ended(outcome: Outcome) -> Exchanges[Outcome]:
    """Return a round of no exchange that came to ``outcome``."""
    yield []
    return outcome
