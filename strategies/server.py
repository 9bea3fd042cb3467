"""Programs over Flower, the server's side: one strategy for every system.

``Server(system, inner)`` asks whom the inner Flower strategy asks, with the content that it sends, and hands it what
the program makes of the answers. The same generator of exchanges is driven by this project's loop
(:meth:`Server.round`), by Flower's hooks (later exchanges then go over the grid of the first), and by an inner
strategy's own ``start``.

What a node acknowledged, holds and lacks is kept in one :class:`~fedcomp.strategies.roster.Roster`; what is wrong with
an answer refuses that answer alone, by name; only what is in the model is acknowledged.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs import Codec, get_codec
from fedcomp.codecs.base import norm
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.exact import check_exact, decode_exact
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead, AskHead, OwnStep, digest_of
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.payload import BLOB, EXACT, FRAME, NODE_RECORD, STEP, payload_bytes
from fedcomp.flower.protocol import OWN_CONFIG, PREFIX, RESYNC, app_failure
from fedcomp.flower.records import count_differing, finite_where, restore_dtypes, same_model, to_arrays, to_record
from fedcomp.flower.report import Report, Reports, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, own_loop
from fedcomp.layout import DensityPolicy, Layout, Update, Vector, policy_config
from fedcomp.plain import Count, Keys
from fedcomp.program import Answer, Ask, Given, Mean, Now, Origin, Round, Rule, Single, Step, System
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested, next_epoch, within_epoch
from fedcomp.strategies.adaptive import Outcome, has_moments, step_on_support
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.means import (
    MEANS,
    aggregate_once,
    copy_names,
    is_mean,
    leave,
    mean_of_constants,
    not_held,
    returns_mean,
    weight_key_of,
)
from fedcomp.strategies.replies import (
    NOT_FINITE,
    Rejected,
    SentMessage,
    Usual,
    agreeing,
    beside,
    match_replies,
    strip,
    weight_of,
)
from fedcomp.strategies.roster import Peer, Roster
from fedcomp.strategies.round_log import RoundLog, require_usable
from fedcomp.strategies.statistics import hold_in_record, warn_of_missing_names
from fedcomp.strategies.wrapping import held, loop_of, require_inner
from fedcomp.versions import Broadcast
from fedcomp.wire import Bundle, Frame, FrameSizes

Arrays = Mapping[str, NDArray[Any]]

MAX_OPEN: Final = 64
"""Rounds that hooks may open without aggregating them."""

ALL_WEIGHTLESS: Final = "weight 0, as all others of the round: nothing to average"


@dataclass
class OwnSteps:
    """What reads a step of the model that the program made.

    Attributes
    ----------
    number : int
        Of the round.
    blobs : dict of str to bytes
    derived : set of str
        Digests of the blobs that follow from the step (:meth:`fedcomp.program.System.after`).
    """

    number: int
    blobs: dict[str, bytes]
    derived: set[str]


@dataclass
class Trained:
    """What came with a client's training beside the system's own.

    Attributes
    ----------
    reply : Message
    head : AnswerHead
    content : RecordDict
        Metrics, and whatever else the app replied beside the model.
    metrics : str
        Name of the MetricRecord that weighs it.
    weight : float
    exact : mapping of str to ndarray
        Its tensors that travel as values.
    """

    reply: Message
    head: AnswerHead
    content: RecordDict
    metrics: str
    weight: float
    exact: Arrays


@dataclass(frozen=True)
class Exchange:
    """Asks on their way as messages.

    Attributes
    ----------
    asks : dict of int to Ask
        By node.
    sent : list of SentMessage
    """

    asks: Mapping[int, Ask]
    sent: list[SentMessage]


@dataclass
class Running:
    """One round under way; clients by their numbers in the program.

    Attributes
    ----------
    report : Report
    arrays : ArrayRecord
        The model.
    model : mapping of str to ndarray
        It as views, not to be written to.
    vector : float32 array
        It as one vector.
    record : str
        Its name in messages.
    base : dict of int to Message
        What the inner strategy sends.
    addresses : dict of int to int
    trained : dict of int to Trained
    sent : dict of int to (int, int)
        Sequence and generation of the answer whose frame is in the memory's past.
    payload, exact_bytes : dict of int to int
    norms, sizes : dict
        Of what was verified last of a client.
    given : (Codec, list of Given)
        What was summed last.
    errors : list of Message
        What stands for replies that could not be used, for the inner strategy.
    """

    report: Report
    arrays: ArrayRecord
    model: Arrays
    vector: Vector
    record: str
    base: dict[int, Message]
    addresses: dict[int, int]
    layout: Layout
    trained: dict[int, Trained] = field(default_factory=dict)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    payload: dict[int, int] = field(default_factory=dict)
    exact_bytes: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, FrameSizes] = field(default_factory=dict)
    given: tuple[Codec | None, Sequence[Given]] = (None, ())
    errors: list[Message] = field(default_factory=list)

    def refuse(self, node: int, reason: str, reply: Message | None = None) -> None:
        """Report why a node's answer is not used; for the inner strategy it is a failed reply."""
        self.report.refuse(self.addresses[node], reason)
        failed = reply is not None and reply.has_error()
        self.errors.append(reply if reply is not None and failed else app_failure(self.base[node], reason))

    def onto(self, arrays: ArrayRecord) -> Running:
        """Return the round as one whose step is made on another model than the one that was sent."""
        if arrays is self.arrays:
            return self
        model = to_arrays(arrays, copy=False)
        return replace(self, arrays=arrays, model=model, vector=self.layout.flatten(model))

    def rename(self, node: int, declared: int) -> None:
        """Let a node go by the partition that it has declared from here on."""
        self.base[declared], self.addresses[declared] = self.base.pop(node), self.addresses.pop(node)

    def seen(self, node: int, codec: Codec, bundle: Bundle, start: Vector) -> None:
        """Note what was verified of a node: a lossless codec's frames hold models, of which the change counts."""
        if bundle.sizes is not None:
            self.sizes[node] = bundle.sizes
        whole = codec.lossless
        self.norms[node] = norm(codec.decode(bundle, self.layout), start) if whole else codec.norm(bundle, self.layout)
        for name, value in codec.figures(bundle, self.layout).items():
            self.report.frames.setdefault(name, {})[self.addresses[node]] = value


class Server(ExchangeStrategy, Stateful):
    """Run a system's rounds around a Flower strategy.

    Parameters
    ----------
    system : System
    inner : Strategy, optional
        Says who takes part and with what configuration, and takes the mean; default FedAvg without evaluation.
    rule : Rule, optional
        What becomes of contributions. Default: the mean where ``inner`` is one of Flower's weighted means, else every
        update by itself.
    downlink : Codec or dict, optional
        The model goes down as steps from the version that a node holds, and as the program's own steps where it makes
        such: then these alone, and the codec names the layout. None sends the model as the inner strategy does.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    record : str, optional
        Name of the ArrayRecord that is the model, where messages of the inner strategy hold several.
    guard : Norms, optional
        Refuses what is far longer, or weighs far more, than is usual; default nobody does.
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
        "broadcast": nested("broadcast"),
        "_session": bytes,
        "sequence": Count,
        "state": dict,
        "own_steps": dict[int, OwnSteps],
        "_usual": Annotated[dict[str, Usual], Keys(("train", "evaluate"))],
        "reports": Reports,
        "evaluations": Reports,
    }

    def __init__(
        self,
        system: System,
        inner: Strategy | None = None,
        *,
        rule: Rule | None = None,
        downlink: Codec | dict[str, Any] | None = None,
        policy: DensityPolicy | None = None,
        record: str | None = None,
        guard: Norms | None = None,
        seed: int = 0,
    ) -> None:
        self._name = type(system).__name__
        self.inner: Strategy = FedAvg(fraction_evaluate=0.0) if inner is None else inner
        require_inner(self.inner, self._name)
        if any(isinstance(found, Compressed) for found in held(self.inner)):
            raise ConfigError(f"{type(self.inner).__name__} compresses already, and frames are not compressed again")
        if policy is not None and not callable(policy):
            raise ConfigError(f"policy={policy!r} is not valid: a DensityPolicy, such as SmallDense(min_size=1000)")
        if record is not None and not (isinstance(record, str) and record):
            raise ConfigError(f"record={record!r} is not valid: the name of an ArrayRecord")
        if guard is not None and not isinstance(guard, Norms):
            raise ConfigError(f"guard={guard!r} is not valid: an object, such as Norms(times_median=10)")
        self.system, self.policy, self.record, self.guard = system, policy, record, guard
        self.seed = params.seed(seed)
        self.rule: Rule = (Mean() if is_mean(self.inner) else Single()) if rule is None else rule
        if not isinstance(self.rule, system.RULES):
            raise ConfigError(
                f"{self._name} has no single updates, which {type(self.inner).__name__} looks at; use one of "
                f"{', '.join(MEANS)}"
            )
        self.downlink = None if downlink is None else get_codec(downlink)
        self.cast = not system.whole
        # The system reads its steps itself, which are changes in the layout of what clients send.
        self._makes_steps = system.makes_steps
        if self._makes_steps and self.downlink is not None and self.downlink.lossless:
            raise ConfigError(
                f"downlink={self.downlink!r} sends models, and {self._name} makes steps, which are changes"
            )
        if self._makes_steps and self.downlink is not None and not returns_mean(self.inner):
            log.info("%s: what %s makes goes down as the whole model", self._name, type(self.inner).__name__)
        self._begin()

    def _begin(self) -> None:
        """Know nothing of any client: a session of its own begins, in which clients continue no memory."""
        self.roster = Roster()
        self.broadcast = None if self.downlink is None else Broadcast(self.downlink)
        # Not from the seed: a second run with the same one must not go on with the clients' memory of the first.
        self._session = secrets.token_bytes(8)
        self.sequence = 0
        self.state: dict[str, Any] = {}
        self.own_steps: dict[int, OwnSteps] = {}
        self.reports, self.evaluations = Reports(), Reports()
        self._usual = {"train": Usual(), "evaluate": Usual()}
        self._log = RoundLog(self._name)
        self._timeout: float | None = None
        self._whole: tuple[int, ArrayRecord] | None = None
        self._order: tuple[str, ...] = ()
        self._down = Layout(())
        self._open: dict[int, tuple[Exchanges[Outcome], Grid]] = {}
        self._evaluating: list[SentMessage] = []

    def __repr__(self) -> str:
        down = "" if self.downlink is None else f", downlink={self.downlink!r}"
        return f"{type(self).__name__}({self.system!r}, {type(self.inner).__name__}(){down})"

    # A round.

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train once; return the new arrays and the clients' metrics, None where there are none.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        ConfigError
            When a message of the inner strategy does not hold the model that it was given, and one model alone.
        """
        self.roster.meet(grid)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        x, now = self._ask(server_round, arrays, messages)
        step = yield from self._play(x, now, self.system.round(now))
        return self._close(x, now, step)

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
        waiting = any(address not in x.report.refused for node, address in x.addresses.items() if node in x.trained)
        if outcome is None and not waiting and not any(earlier.used for earlier in self.reports.values()):
            require_usable(x.report)
        self._log.conclude(x.report)
        return outcome, metrics

    def _ask(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> tuple[Running, Now]:
        """Open the round in which the inner strategy sends ``messages``."""
        x = self._opened(server_round, arrays, messages)
        if messages:
            self._publish(x.model, x.vector, x.layout)
        start = self._reference(x.layout)
        return x, self._now(x, x.vector if start is None else start)

    def _opened(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> Running:
        """Return a round in which ``messages`` go out."""
        report = self.reports.join(server_round)
        report.asked = len(messages)
        model = to_arrays(arrays, copy=False)
        layout = Layout.of(model, self.policy, cast_floats=self.cast)
        # Once per model, not once per round.
        if layout.order != self._order:
            self._order = layout.order
            warn_of_missing_names(layout)
        by_address = {message.metadata.dst_node_id: message for message in messages}
        addresses = self.roster.numbered(by_address)
        base = {node: by_address[address] for node, address in addresses.items()}
        record = self._record_of(messages, arrays)
        return Running(report, arrays, model, layout.flatten(model), record, base, addresses, layout)

    def _now(self, x: Running, start: Vector, origins: Mapping[int, Origin] = MappingProxyType({}), **more: Any) -> Now:
        """Return a round as the program sees it, in which clients train from ``start``."""
        start = start.view()
        start.setflags(write=False)
        return Now(
            x.report.round,
            tuple(x.base),
            x.layout,
            start,
            self.seed,
            _Judged(self, x),
            dict(self.state),
            x.refuse,
            x.report.notes.append,
            origins=origins,
            strangers=frozenset(n for n, address in x.addresses.items() if address not in self.roster.declared),
            seen=lambda node, codec, bundle: x.seen(
                node, codec, bundle, origins[node].model if node in origins else start
            ),
            **more,
        )

    def _record_of(self, messages: Sequence[Message], arrays: ArrayRecord) -> str:
        """Return the name of the model in messages of the inner strategy."""
        # A strategy may put copies into its messages; one comparison per distinct record.
        distinct = {id(record): (name, record) for name, record in map(self._model_in, messages)}
        if any(not same_model(record, arrays) for _, record in distinct.values()):
            raise ConfigError(f"{type(self.inner).__name__} sends models of their own to some nodes, which have no sum")
        return next(iter(distinct.values()))[0] if distinct else "arrays"

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

    def _play(
        self, x: Running, now: Now, program: Round, begun: Exchange | None = None
    ) -> Generator[list[Message], list[Message], Step | None]:
        """Drive the program: asks to messages, replies to answers; return what it came to.

        ``begun`` are the asks that it has made already.
        """
        began = time.perf_counter()
        try:
            exchange = self._send(x, now, next(program)) if begun is None else begun
            while True:
                answers: dict[int, Answer] = {}
                asked, sent = exchange.asks, exchange.sent
                x.report.seconds += time.perf_counter() - began
                replies = (yield [each.message for each in sent]) if sent else []
                began = time.perf_counter()
                if lacking := self._receive(x, sent, asked, replies, answers):
                    # Who lacks a blob that it once had is asked once more, with its bytes. The program does not know.
                    asked = {node: asked[node] for node in lacking}
                    again = [self._message(x, now, ask, sent[0].sequence) for ask in asked.values()]
                    x.report.seconds += time.perf_counter() - began
                    replies = yield [each.message for each in again]
                    began = time.perf_counter()
                    self._refuse_lacking(x, self._receive(x, again, asked, replies, answers))
                self._agree(x, answers, sent)
                exchange = self._send(x, now, program.send([answers[node] for node in sorted(answers)]))
        except StopIteration as end:
            x.report.seconds += time.perf_counter() - began
            step: Step | None = end.value
            return step

    def _send(self, x: Running, now: Now, wanted: Sequence[Ask]) -> Exchange:
        """Return asks as messages, under the next number."""
        self.sequence += 1
        return Exchange({a.node: a for a in wanted}, [self._message(x, now, a, self.sequence) for a in wanted])

    def _refuse_lacking(self, x: Running, nodes: Iterable[int]) -> None:
        for node in nodes:
            x.refuse(node, "lacks, as it says, the very blobs that it was sent")

    def _message(self, x: Running, now: Now, ask: Ask, sequence: int) -> SentMessage:
        """Return an ask as a message."""
        address = x.addresses[ask.node]
        peer, base = self.roster.peer(address), x.base[ask.node]
        content, fields, data = RecordDict(), dict[str, Any](), dict[str, Frame]()
        coming: set[str] = set()
        if ask.kind == "train":
            # Strategies put the same records into all messages; what is added here is this node's alone.
            content = base.content.copy()
            fields, coming = self._fill_model(content, x.record, peer, data)
            fields["policy"] = policy_config(self.policy, x.layout)
        blobs = {name: digest_of(blob) for name, blob in ask.blobs.items()}
        # What follows from the steps in this message the node has by the time it looks.
        data |= {BLOB + blobs[name]: b for name, b in ask.blobs.items() if blobs[name] not in coming.union(peer.blobs)}
        data |= {FRAME + name: frame for name, frame in ask.frames.items()}
        head = AskHead(
            number=now.number,
            seed=self.seed,
            session=self._session,
            sequence=sequence,
            consumed=peer.consumed,
            generation=peer.generation,
            system=self.system.to_config(),
            blobs=asks.named(blobs),
            say=asks.id_of(ask.say),
            cast=self.cast,
            **fields,
        )
        asks.put(content, head, ask.say, data)
        meta = base.metadata
        kind = meta.message_type if ask.kind == "train" else ask.kind
        message = Message(content, address, kind, ttl=meta.ttl, group_id=meta.group_id or None)
        return SentMessage(message, address, sequence, version=int(fields.get("version", 0)))

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
        for each, reply in match_replies(sent, replies, x.report, self.roster):
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
                answers[answer.node] = answer
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
            raise Rejected(reason)
        head = asks.find_answer(content)
        if head is None or not head.sequence or (ask.kind == "train" and not (head.record or head.lacks)):
            why = "" if head is None else head.unsupported
            raise Rejected(
                f"the client answered with a model: its app cannot take part in {self._name} "
                f"({why or 'wrap it with fedcomp.clients.client.client(app), of the release of this server'})"
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
        if ask.kind == "train":
            trained = self._trained(x, head, reply, asks.data_in(content, EXACT).get(""))
        # From here on nothing is wrong with it.
        self.roster.declared[sent.node] = head.partition_id
        if head.partition_id != node:
            x.rename(node, head.partition_id)
            node = head.partition_id
        if ask.kind == "train":
            x.trained[node] = trained
            x.exact_bytes[node] = len(asks.data_in(content, EXACT).get("", b""))
            if self.broadcast is not None:
                self._note_version(peer, head.version, sent.version)
        self._note_state(x.report, sent, head)
        peer.take(digest_of(blob) for blob in ask.blobs.values())
        peer.take(digest_of(frames[name]) for name in self.system.SHARED if name in frames)
        x.payload[node] = x.payload.get(node, 0) + payload_bytes(reply)
        if self.system.SENT in frames:
            x.sent[node] = head.sequence, head.generation
        weight = x.trained[node].weight if node in x.trained else 0.0
        return Answer(node, weight, say, frames)

    def _trained(self, x: Running, head: AnswerHead, reply: Message, exact: Frame | None) -> Trained:
        """Return what the app replied beside the model.

        Raises
        ------
        FedcompError
            When it has no usable weight, or buffers that the model cannot take.
        """
        metrics, weight = weight_of(reply.content, weight_key_of(self.inner))
        content = strip(reply.content)
        content.update(beside(reply.content, ""))
        # The model will stand under this name in what the inner strategy sees, and must replace nothing.
        if not head.record or head.record in content or head.record.startswith(PREFIX):
            raise Rejected(f"the update's record is named {head.record!r}, like another record of the reply")
        received = decode_exact(exact, x.layout)
        held = {t.name: check_exact(received[t.name], t, x.model[t.name]) for t in x.layout.exact}
        return Trained(reply, head, content, metrics, weight, held)

    def _note_state(self, report: Report, sent: SentMessage, head: AnswerHead) -> None:
        """Report what a client says of its memory and its update."""
        if head.state == "rolled back" and sent.node not in report.rolled_back:
            report.rolled_back.append(sent.node)
        # A memory bears the number of the message it began with.
        if head.generation == sent.sequence:
            report.fresh.append(sent.node)
        if head.memory >= 0.0:
            report.memory[sent.node] = head.memory
        if head.remark:
            report.remarks[sent.node] = shorten(head.remark)

    def _note_version(self, peer: Peer, version: int, sent: int) -> None:
        """Note which model a node says it holds, and the blobs that follow from its steps."""
        # Only the version that it was sent is trusted; with a wrong one it would get steps it cannot apply.
        peer.version = version if version == sent else 0
        if peer.version in self.own_steps:
            peer.take(sorted(self.own_steps[peer.version].derived))

    def _agree(self, x: Running, answers: dict[int, Answer], sent: Sequence[SentMessage]) -> None:
        """Refuse what came of training in another form than most: Flower's own check would end the run over it."""
        numbers = {each.sequence for each in sent}
        new = [n for n in sorted(answers) if n in x.trained and x.trained[n].head.sequence in numbers]
        items = [(node, x.trained[node].head.record, x.trained[node].content) for node in new]
        kept = agreeing(items, x.report, x.addresses.__getitem__, self._usual["train"])
        for node in set(new).difference(kept):
            x.errors.append(app_failure(x.base[node], x.report.refused[x.addresses[node]]))
            del answers[node], x.trained[node]

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
        if step is None:
            self.state = dict(now.state)
            return None, None
        used = [x.trained[node] for node in step.consumed]
        self._account(x, step.consumed)
        with np.errstate(over="ignore", invalid="ignore"):
            if step.single is not None:
                out, metrics = self._single(x, now, step)
            else:
                out, metrics = self._mean(x, now, step, used)
            if out is None:
                report.notes.append(f"{type(self.inner).__name__} made no model of the replies; the model is kept")
                return None, metrics
            restored = restore_dtypes(out, x.model, [trained.exact for trained in used])
        # A finite float32 may be infinite as float16; what kept its dtype is the same array, looked at once.
        changed = ArrayRecord({name: array for name, array in restored.items() if array is not out[name]})
        if not finite_where(out, x.model) or not finite_where(changed, x.model):
            report.notes.append(NOT_FINITE)
            return None, None
        report.used += len(used)
        self.state = dict(now.state)
        self.acknowledge(x, step.consumed)
        if step.frame is not None:
            self._push(x, now, step, restored)
        elif note := hold_in_record(restored, x.layout, x.model):
            report.notes.append(note)
        if step.metrics:
            metrics = MetricRecord({**(metrics or {}), **step.metrics})
        return restored, metrics

    def _account(self, x: Running, consumed: Sequence[int]) -> None:
        """Add up what the answers that are used took, and what as many full models take."""
        report, codec = x.report, x.given[0]
        report.compressed = len(consumed)
        sizes = [x.sizes[node] for node in consumed if node in x.sizes]
        if codec is not None and sizes:
            report.account(codec, x.layout, sizes, exact_bytes=sum(x.exact_bytes[node] for node in consumed))
        report.payload_bytes = sum(x.payload[node] for node in consumed)
        # What apps put beside the model travels with compression and without, so it counts on both sides.
        others = [record for node in consumed for record in x.trained[node].content.array_records.values()]
        report.model_bytes = len(consumed) * sum(array.nbytes for array in x.model.values())
        report.model_bytes += sum(len(array.data) for record in others for array in record.values())

    def _mean(self, x: Running, now: Now, step: Step, used: Sequence[Trained]) -> Outcome:
        """Let the inner strategy take the model that a step leads to for the mean of the clients' models."""
        report, layout, part = x.report, x.layout, slice(x.layout.compressed_size)
        if unread := sorted(used[0].content.array_records):
            report.notes.append(
                f"replies hold the ArrayRecords {shorten(str(unread))} beside the model, which "
                f"{type(self.inner).__name__} does not read: they were sent for nothing, "
                "unless its train_metrics_aggr_fn, which is given them, uses them"
            )
        changes: dict[str, NDArray[Any]] = {}
        if step.model is not None:
            moved = step.model
            report.changed = count_differing(moved[part], now.model[part])
            # Floats of other sizes are in the vector only where models are sent that grew from another one than this.
            changes = {t.name: moved[t.slice] - now.model[t.slice] for t in layout.wide}
            if not np.shares_memory(x.vector, now.model):
                # Clients sent whole models grown from the reference: add what the reference lacks of the true model.
                np.add(moved, x.vector - now.model, out=moved)
        elif step.frame is not None and step.codec is not None:
            moved = x.vector.copy()
            step.codec.accumulate(step.frame, 1.0, Update(moved, layout))
            layout.round_to_dtypes(moved)
            report.changed = count_differing(moved[part], x.vector[part])
            if layout.wide and (lost := not_held(layout, x.vector, step.codec.decode(step.frame, layout), moved)):
                report.notes.append(lost)
        else:
            assert step.change is not None
            moved = step.change
            leave(moved, layout, frozenset.intersection(*(frozenset(each.head.unchanged) for each in used)))
            self._share(x, now, moved, step.consumed)
            # Counted before the model is added, while zero still means that nothing arrived.
            report.changed = count_differing(moved[part], 0.0)
            changes = {t.name: moved[t.slice].copy() for t in layout.wide}
            np.add(x.vector, moved, out=moved)
        arrays = layout.added(x.model, changes, moved, mean_of_constants(_weighted(used), x.model))
        if step.frame is not None:
            for t in layout.wide:
                # What did not move keeps the digits that float32, in which nodes hold the model, does not have.
                stood = (moved[t.slice] == x.vector[t.slice]).reshape(t.shape)
                arrays[t.name] = np.where(stood, x.model[t.name], arrays[t.name])
        return aggregate_once(
            self.inner,
            now.number,
            (used[0].head.record, to_record(arrays)),
            x.base[step.consumed[0]],
            [each.content for each in used],
            metrics_name=used[0].metrics or "metrics",
            received=(len(used), len(report.refused)),
            sparse=step.support,
        )

    def _share(self, x: Running, now: Now, change: Vector, consumed: Sequence[int]) -> None:
        """Give tensors that are another name of an earlier one the change of that one, in place."""
        layout, (codec, given) = x.layout, x.given
        copies = {node: _copies(x.trained[node].head.copies, layout) for node in consumed}
        everywhere = set.intersection(*(set(each.items()) for each in copies.values()))
        total = sum(each.weight for each in given)
        for each in given:
            # Where others send both names this one's share of the second is added.
            own = dict(set(copies.get(each.node, {}).items()) - everywhere)
            if own and codec is not None:
                alone = codec.decode(each.frame, layout)
                copy_names(alone, now.model, layout, own)
                for second in own:
                    part = layout.tensors[second].slice
                    change[part] += np.float32(each.weight / total * now.scales.get(each.node, 1.0)) * alone[part]
        copy_names(change, x.vector, layout, dict(everywhere))

    def _single(self, x: Running, now: Now, step: Step) -> Outcome:
        """Let the inner strategy aggregate ordinary replies."""
        assert step.single is not None
        layout, changed, messages = x.layout, np.zeros(x.layout.size, np.bool_), []
        for node, update in step.single.items():
            trained = x.trained[node]
            leave(update, layout, frozenset(trained.head.unchanged))
            copy_names(update, x.vector, layout, _copies(trained.head.copies, layout))
            changed |= update != 0.0
            changes = {t.name: update[t.slice].copy() for t in layout.wide}
            update += x.vector
            # Of the message as it came, before the decoded model takes the place of its frame.
            came = ConfigRecord({"payload-bytes": x.payload[node]})
            # First, as in the reply of an app that puts other records beside it.
            model = {trained.head.record: to_record(layout.added(x.model, changes, update, trained.exact))}
            trained.reply.content = RecordDict({**model, **trained.content, OWN_CONFIG: came})
            messages.append(trained.reply)
        x.report.changed = int(np.count_nonzero(changed[: layout.compressed_size]))

        def aggregate() -> Outcome:
            return self.inner.aggregate_train(now.number, [*messages, *x.errors])

        if has_moments(self.inner) and step.support:
            where = {t.name: changed[t.slice].reshape(t.shape) for t in layout.tensors}
            # Buffers travel whole in every reply.
            where |= {t.name: np.ones(t.shape, np.bool_) for t in layout.exact}
            return step_on_support(self.inner, where, aggregate)
        return aggregate()

    # The model on its way down.

    def _down_layout(self, model: Arrays) -> Layout:
        assert self.downlink is not None
        return Layout.of(model, self.policy, cast_floats=not self.downlink.lossless)

    def _publish(self, model: Arrays, vector: Vector, layout: Layout) -> None:
        """Make ``model`` the current one of the downlink."""
        broadcast = self.broadcast
        if broadcast is None:
            return
        # By the downlink's codec: its layout need not be the uplink's.
        down = self._down = self._down_layout(model)
        vector = vector if down == layout else down.flatten(model)
        exact = {t.name: model[t.name] for t in down.exact}
        if self._makes_steps:
            if not broadcast.is_current(vector, exact):
                broadcast.adopt(vector, exact, down)
            return
        # By version, not by round: evaluation publishes a model too, and an unchanged one not at all.
        broadcast.publish(vector, exact, down, Key(self.seed, "downlink", within_epoch(broadcast.version) + 1))

    def _push(self, x: Running, now: Now, step: Step, model: ArrayRecord) -> None:
        """Let the step go down as the program has it, in place of a difference that would be encoded again."""
        broadcast = self.broadcast
        if broadcast is None or not returns_mean(self.inner):
            return
        assert step.frame is not None
        assert step.codec is not None
        exact = to_arrays(ArrayRecord({t.name: model[t.name] for t in x.layout.exact}))
        version = broadcast.push(step.frame, step.codec, exact, x.layout)
        derived = self.system.after(step.frame, step.blobs, now.number, self.seed, x.layout)
        self.own_steps[version] = OwnSteps(now.number, dict(step.blobs), set(map(digest_of, derived.values())))
        # As many as there are steps: what no step needs any more nobody is sent.
        for old in [v for v in self.own_steps if broadcast.steps_from(v - 1) is None]:
            del self.own_steps[old]

    def _reference(self, layout: Layout) -> Vector | None:
        """Return what clients train from where the downlink brings them something else than the model."""
        broadcast = self.broadcast
        if broadcast is None or broadcast.version == 0 or broadcast.codec.lossless or self._makes_steps:
            return None
        # By way of the tensors: the two layouts may differ in which of them are in the vector.
        return layout.flatten(self._down.unflatten(broadcast.reference, broadcast.exact))

    def _fill_model(
        self, content: RecordDict, record: str, peer: Peer, data: dict[str, Frame]
    ) -> tuple[dict[str, Any], set[str]]:
        """Put the model into a message as the steps that a node lacks, or whole.

        Returns
        -------
        dict
            What the head says of it.
        set of str
            Digests of the blobs that follow from the steps in the message.
        """
        broadcast = self.broadcast
        if broadcast is None:
            return {"model": record}, set()
        # The model leaves the message: steps take its place, or the reference does, which is what replicas hold.
        content.pop(record, None)
        steps = broadcast.steps_from(peer.version)
        if steps is None:
            # One full model for all nodes that need it: copies would cost a model for each.
            if self._whole is None or self._whole[0] != broadcast.version:
                self._whole = broadcast.version, to_record(self._down.unflatten(broadcast.reference, broadcast.exact))
            content[record] = self._whole[1]
        named: list[str] = []
        for each in steps or ():
            data[f"{STEP}{each.version}"] = each.frame
            if each.exact is not None:
                data[f"{STEP}{each.version}.exact"] = each.exact
            if (own := self.own_steps.get(each.version)) is not None:
                digests = {name: digest_of(blob) for name, blob in own.blobs.items()}
                data |= {BLOB + digests[name]: b for name, b in own.blobs.items() if digests[name] not in peer.blobs}
                named.append(OwnStep(each.version, own.number, digests).to_text())
        fields = {
            "model": record,
            "steps": tuple(named),
            "downlink": broadcast.codec.to_config(),
            "version": broadcast.version,
            "base": 0 if steps is None else peer.version,
            "digest": broadcast.digest,
        }
        last = self.own_steps.get(broadcast.version) if steps else None
        return fields, set() if last is None else last.derived

    # Evaluation.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure evaluation; nodes that hold the model already get no model bytes."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        self._evaluating = [SentMessage(message, message.metadata.dst_node_id, 0) for message in messages]
        # Nothing is trained, so without a downlink there is nothing to say.
        if self.broadcast is None or not messages:
            return messages
        model, record = to_arrays(arrays, copy=False), self._record_of(messages, arrays)
        down = self._down_layout(model)
        self._publish(model, down.flatten(model), down)
        self._evaluating = []
        for message in messages:
            meta, content, data = message.metadata, message.content.copy(), dict[str, Frame]()
            fields, _ = self._fill_model(content, record, self.roster.peer(meta.dst_node_id), data)
            head = AskHead(
                number=server_round,
                seed=self.seed,
                session=self._session,
                system=self.system.to_config() if self._makes_steps else {},
                policy=policy_config(self.policy, down),
                cast=self.cast,
                **fields,
            )
            asks.put(content, head, data=data)
            made = Message(content, meta.dst_node_id, meta.message_type, ttl=meta.ttl, group_id=meta.group_id or None)
            self._evaluating.append(SentMessage(made, meta.dst_node_id, 0, version=self.broadcast.version))
        return [each.message for each in self._evaluating]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note which versions the nodes hold, leave out replies that cannot be averaged, and let inner aggregate."""
        report, key = self.evaluations.begin(server_round), weight_key_of(self.inner)
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
                    raise Rejected(reason)
                # Refused here by itself: Flower's own check ends the whole run over one reply without a weight.
                weight_of(reply.content, key)
                if self.broadcast is not None:
                    head = asks.find_answer(reply.content)
                    self._note_version(peer, 0 if head is None else head.version, each.version)
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
                f"replies to evaluation hold the ArrayRecords {shorten(str(names))}, which nobody reads: "
                f"{report.payload_bytes:,} bytes that are in no ratio of training replies"
            )
        self._log.warn(report)
        report.concluded = True
        return self.inner.aggregate_evaluate(server_round, [*(reply for _, reply in kept), *errors])

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on the clients that the inner strategy asks."""
        replies = yield list(self.configure_evaluate(server_round, arrays, config, grid))
        return self.aggregate_evaluate(server_round, replies)

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
                "round %d: %d later rounds were configured before it was aggregated: it is given up", former, MAX_OPEN
            )
        assert isinstance(messages, list)
        return messages

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
        try:
            messages = opened.send(list(replies))
            while True:
                assert isinstance(messages, list)
                answers = list(grid.send_and_receive(messages, timeout=self._timeout)) if messages else []
                messages = opened.send(answers)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome

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
                log.info("started again, with another model: what was remembered of the former training is dropped")
                self._begin()
            self._started = False
        self._timeout = kwargs.get("timeout", args[3] if len(args) > 3 else 3600)
        if not self.own_loop:
            return super().start(*args, **kwargs)
        self._started, self._ended = True, None
        result = loop_of(self.inner, self).start(*args, **kwargs)
        self._ended = result.arrays
        return result

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
        # No step leads to the renumbered version.
        self.own_steps = {}


class _Judged:
    """A round's rule behind what the server looks at of contributions: norms, weights, outliers."""

    def __init__(self, server: Server, x: Running) -> None:
        self._server, self._x = server, x

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what the rule makes of contributions that are in the ordinary."""
        server, x, report = self._server, self._x, self._x.report
        for each in given:
            report.norms[x.addresses[each.node]] = x.norms[each.node]
            report.weights[x.addresses[each.node]] = each.weight
        if server.guard is not None:
            found = server.guard.outliers(report, server.reports.before(now.number))
            refused = [each.node for each in given if x.addresses[each.node] in found]
            for node in refused:
                x.refuse(node, found[x.addresses[node]])
            # An outlier is dropped for good: put back into its client's memory, it would come again and again. Where
            # all of several are refused nobody can tell which is one.
            if not 1 < len(refused) == len(given):
                server.acknowledge(x, refused)
            given = [each for each in given if each.node not in refused]
        if given and sum(each.weight for each in given) <= 0:
            for each in given:
                x.refuse(each.node, ALL_WEIGHTLESS)
            return None
        x.given = codec, given
        with np.errstate(over="ignore", invalid="ignore"):
            return server.rule.total(now, codec, given, raw=raw)


def _weighted(used: Sequence[Trained]) -> dict[str, NDArray[Any]]:
    """Return the weighted mean of tensors that travel as values."""
    total = sum(each.weight for each in used)
    found: dict[str, NDArray[Any]] = {}
    for each in used:
        for name, array in each.exact.items():
            # numpy's promotion here is Flower's: int64 buffers become float64 means.
            part = array * (each.weight / total)
            found[name] = found[name] + part if name in found else part
    return found


def _copies(numbers: Sequence[int], layout: Layout) -> dict[int, int]:
    """Return which tensors a client says to be another name of an earlier one; what cannot be is left out."""
    found: dict[int, int] = {}
    for second, first in zip(numbers[::2], numbers[1::2], strict=True):
        if first < second < len(layout.tensors) and first not in found:
            one, other = layout.tensors[first], layout.tensors[second]
            if (one.shape, one.dtype) == (other.shape, other.dtype):
                found[second] = first
    return found


def _ended(outcome: Outcome) -> Exchanges[Outcome]:
    """Return a round of no exchange that came to ``outcome``."""
    yield []
    return outcome
