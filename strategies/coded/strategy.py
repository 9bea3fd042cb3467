"""Coded rounds: clients drop out, the server still decodes. The server half, common to all constructions.

``CodedFedAvg(Compressed(FedAvg(...), codec), construction="relay")`` stands around the drop-in pair, or around any
Flower strategy with hooks. Compression and coding compose: on the client the mod of ``coded()`` stands outside of
``compression()`` and codes the complete reply; here the decoded replies are handed to ``inner.aggregate_train``, which
checks, orders, sums and acknowledges them as always.

A round
-------
1. *Hello* (``query.coded_hello``), for nodes met for the first time: which partition they hold, their public key, the
   address their peers reach them at.
2. The construction's own exchanges, of which the first is the inner strategy's training messages with a plan added.
3. ``inner.aggregate_train`` on decoded replies, or ``Compressed.aggregate_sum`` on a decoded sum.

What a construction is
----------------------
A class named in :data:`CONSTRUCTIONS`, made once per strategy object as ``Class(settings, inner)``; it satisfies
:class:`Construction`. Its ``round(now)`` is a generator of exchanges over a :class:`CodedRound`, which has the
participants in partition order (``now.members``), their training messages, and the report. Options only one
construction has are keyword arguments of :class:`CodedFedAvg` and arrive in ``settings.options``; the construction
takes them with ``settings.option(name, default)`` and refuses the rest with ``settings.refuse_unknown(...)``. On the
client the same name leads to a class in ``clients/coded/mod.py``. Nothing of a round outlives it, except what
``state_dict`` returns.

Rules all of them keep
----------------------
An absent reply is a loss, never an error. Members are known in a round by their *index* in ``now.members``: plans,
parcels and packets use it as source and destination, node ids never leave the server. What cannot be used is left out
whole, with a reason in ``report.excluded``, and its weight with it. Nothing is added to anything before it is decoded
and checked.
"""

from __future__ import annotations

import importlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.coding.transport import SpoolRoot
from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.coded import HELLO, NO_HANDLER, Header, Hello, Indexed, Introduced, Query, SumShared
from fedcomp.flower.logs import log
from fedcomp.flower.metered import addressed, join, partition_lookup
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import Reports, reports_of, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push, own_loop
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.coded.report import Coding
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.replies import Rejected
from fedcomp.strategies.wrapping import require_inner

CONSTRUCTIONS: Final[Mapping[str, str]] = {
    "relay": "fedcomp.strategies.coded.relay:Relay",
    "sumcode": "fedcomp.strategies.coded.sums:SumCode",
    "gradcode": "fedcomp.strategies.coded.gradients:GradientCode",
    "noisysum": "fedcomp.strategies.private.distributed_dp:NoisySum",
}
"""Where each construction's class stands; imported when it is first used."""

TRANSPORTS: Final = ("hub", "peers")
CODES: Final = ("rlnc", "mds")

MAX_STORE_BYTES: Final = 64 * 1024 * 1024
"""Default of what one client keeps for others."""

Outcome = tuple[ArrayRecord | None, MetricRecord | None]

_HINT: Final = "the client's app answers no coded messages: wrap it in fedcomp.client()"


@dataclass(frozen=True)
class Settings:
    """What was asked of :class:`CodedFedAvg`, checked as far as it does not depend on the construction.

    Attributes
    ----------
    options : mapping
        Keyword arguments that belong to the construction.
    """

    construction: str
    code: str
    symbols: int
    shards: int
    loss: float | None
    target: float
    private: int
    transport: str
    seal: bool | None
    groups: int
    mix: bool
    share_timeout: float | None
    collect_timeout: float | None
    max_store_bytes: int
    seed: int
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value, known in (
            ("construction", self.construction, CONSTRUCTIONS),
            ("code", self.code, CODES),
            ("transport", self.transport, TRANSPORTS),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r} is not known{nearest(str(value), known)}")
        for name, count in (
            ("symbols", self.symbols),
            ("shards", self.shards),
            ("private", self.private),
            ("groups", self.groups),
            ("max_store_bytes", self.max_store_bytes),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"{name}={count!r} is not valid: it must be a whole number >= 0")
        if self.loss is not None and not 0.0 <= self.loss < 1.0:
            raise ConfigError(f"loss={self.loss!r} is not valid: it is the share of relays that vanish, in [0, 1)")
        if not 0.0 < self.target < 1.0:
            raise ConfigError(f"target={self.target!r} is not valid: it is a probability of decoding, in (0, 1)")
        for name, seconds in (("share_timeout", self.share_timeout), ("collect_timeout", self.collect_timeout)):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name}={seconds!r} is not valid: give seconds > 0, or None for the run's timeout")

    def option(self, name: str, default: Any) -> Any:
        """Return one of the construction's own options."""
        return self.options.get(name, default)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise :class:`ConfigError` for an option that is none of ``known``."""
        names = list(known)
        for name in self.options:
            if name not in names:
                raise ConfigError(f"construction {self.construction!r} has no option {name!r}{nearest(name, names)}")


@dataclass(frozen=True)
class Member:
    """One participant of a round that has the mod.

    Attributes
    ----------
    index : int
        Its place in the round, in partition order: its name in plans, parcels and packets.
    node, partition : int
    message : Message
        The inner strategy's training message for it. Its content may be replaced, the object may not: the inner
        strategy knows it by its id.
    public : bytes
        Its X25519 public key, 32 bytes.
    address : str
        Where its peers reach it; empty when they do not.
    """

    index: int
    node: int
    partition: int
    message: Message
    public: bytes
    address: str


H = TypeVar("H", bound=Header)
T = TypeVar("T")


def limited(values: tuple[T, ...], most: int, what: str) -> tuple[T, ...]:
    """Return ``values``; raise :class:`Rejected` where there are more than this round has room for."""
    if len(values) > most:
        raise Rejected(f"{len(values)} {what}, at most {most} are accepted")
    return values


@dataclass
class CodedRound:
    """One round as a construction sees it.

    Attributes
    ----------
    number : int
    common : dict
        Fields of every message of the run: ``construction``, ``run`` (eight bytes that name the strategy object, also
        when it is resumed), ``transport``, ``max_store``, and ``spool`` for simulated links.
    inner : Strategy
    grid : Grid
    arrays : ArrayRecord
        The model the round begins with.
    messages : list of Message
        All training messages in the inner strategy's own order.
    members : list of Member
    strangers : list of Message
        Training messages for nodes without the mod, or that did not say hello in time: they are pushed as they are,
        with the members', and what they answer is an ordinary reply.
    report : Coding
    """

    number: int
    common: Mapping[str, Any]
    settings: Settings
    inner: Strategy
    grid: Grid
    arrays: ArrayRecord
    messages: list[Message]
    members: list[Member]
    strangers: list[Message]
    report: Coding
    _learn: Callable[[int, Introduced | SumShared], None]

    def plan(self, member: Member, schema: type[Indexed], fields: Mapping[str, Any]) -> Message:
        """Return the member's training message with the plan in it."""
        content = RecordDict(dict(member.message.content.items()))
        schema(**self._common(), index=member.index, **fields).put(content)
        member.message.content = content
        return member.message

    def query(
        self,
        kind: str,
        node: int,
        schema: type[Query],
        fields: Mapping[str, Any],
        content: RecordDict | None = None,
    ) -> Message:
        """Return a query of one of the kinds in :mod:`fedcomp.flower.coded`; ``content`` holds more records for it."""
        content = RecordDict() if content is None else content
        schema(**self._common(), **fields).put(content)
        return Message(content, node, kind, group_id=str(self.number))

    def push(self, messages: Iterable[Message], timeout: float | None) -> Push:
        """Return the exchange of ``messages`` with its deadline."""
        return Push(list(messages), timeout)

    def by_node(self, messages: Iterable[Message], replies: Iterable[Message]) -> dict[int, Message]:
        """Return the replies by the node that was asked."""
        asked = dict(addressed(messages))
        return {asked[r.metadata.reply_to_message_id]: r for r in replies if r.metadata.reply_to_message_id in asked}

    def header(self, member: Member, reply: Message, schema: type[H]) -> H:
        """Return the header of a member's reply, and take note of what it says of the member; see :meth:`answer`."""
        found = self.answer(reply, schema)
        if isinstance(found, Introduced | SumShared):
            self._learn(member.node, found)
        return found

    def answer(self, reply: Message, schema: type[H]) -> H:
        """Return the header of an answer.

        Raises
        ------
        Rejected, SchemaError
            When the answer is an error, is of another round, or has another header or none.
        """
        if reply.has_error():
            raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
        found = schema.take(reply)
        if found.round != self.number:
            raise Rejected(f"the reply is of round {found.round}, expected {self.number}: a stale reply")
        return found

    def aggregate(self, replies: Iterable[Message]) -> Outcome:
        """Hand replies, decoded and ordinary ones, to the inner strategy in the order in which a driver would."""
        ordered = join(addressed(self.messages), replies, partition_lookup(self.grid))
        return self.inner.aggregate_train(self.number, ordered)

    def _common(self) -> dict[str, Any]:
        return {**self.common, "round": self.number}


class Construction(Protocol):
    """What a construction brings. It is made as ``Class(settings, inner)`` and raises :class:`ConfigError` there."""

    def describe(self) -> str:
        """Return one line for the log."""
        ...

    def round(self, now: CodedRound) -> Exchanges[Outcome]:
        """Run one round's exchanges; return the new model and metrics, or None and None for a round that is skipped."""
        ...


@dataclass(frozen=True)
class _Greeted:
    """What a node said of itself."""

    partition: int
    public: bytes
    address: str


class CodedFedAvg(ExchangeStrategy, Stateful):
    """Code what clients send, so that a client may vanish after it has shared.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through hooks, usually :class:`fedcomp.strategies.compressed.Compressed`.
    construction : {"relay", "sumcode", "gradcode"}
        What is coded and who adds; see the modules named in :data:`CONSTRUCTIONS`.
    code : {"rlnc", "mds"}
        Random linear network code, or systematic Cauchy Reed-Solomon code.
    symbols : int
        K: shards that are needed. 0 chooses it.
    shards : int
        N: shards that are made, one per relay. 0: one for every client of the round.
    loss, target : float
        Share of relays that is expected to vanish, and the probability with which decoding must still succeed; K or N
        follows from them where it is not given.
    private : int
        T: so many relays together learn nothing. Needs the code ``mds``.
    transport : {"hub", "peers"}
        Shards travel through the server's messages, or from client to client.
    seal : bool, optional
        Encrypt each shard for its relay. Default: the construction's choice.
    groups : int
        Edge groups whose exact partial sum is coded; 0: every client by itself.
    mix : bool
        One code over several clients; see :mod:`fedcomp.strategies.coded.relay`.
    share_timeout, collect_timeout : float, optional
        Seconds for training and sharing, and for each exchange after it. Default: the run's timeout.
    max_store_bytes : int
        What one client may be asked to keep for others.
    spool : path, optional
        Folder of the simulated links between nodes of one machine that have no address of their own; for the transport
        ``peers``. Default: one that is removed with the strategy.
    seed : int
        Seed of coefficients and samples.
    **options
        What only the chosen construction has.

    Attributes
    ----------
    reports, evaluations : Reports
        Those of the inner strategy, where it keeps any.

    Raises
    ------
    ConfigError
        For anything that cannot work.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_holders": nested("_holders"),
        "construction": nested("construction"),
        "inner": INNER,
        "_run": bytes,
        "_greeted": dict[int, _Greeted],
        "_deaf": dict[int, str],
        "_reports": Reports,
    }

    def __init__(
        self,
        inner: Strategy,
        *,
        construction: str = "relay",
        code: str = "rlnc",
        symbols: int = 0,
        shards: int = 0,
        loss: float | None = None,
        target: float = 0.999,
        private: int = 0,
        transport: str = "hub",
        seal: bool | None = None,
        groups: int = 0,
        mix: bool = False,
        share_timeout: float | None = None,
        collect_timeout: float | None = None,
        max_store_bytes: int = MAX_STORE_BYTES,
        spool: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        require_inner(inner, "CodedFedAvg")
        if own_loop(inner):
            raise ConfigError(
                f"{type(inner).__name__} runs its own loop (it overrides start); CodedFedAvg stands around strategies "
                "that work through configure_train and aggregate_train"
            )
        promise = find_private(inner)
        may_be_coded = getattr(promise, "may_be_coded", lambda construction: True)
        if not may_be_coded(construction):
            raise ConfigError(
                f"{type(promise).__name__} trusts the server with updates, not other clients, which relays of the "
                f"construction {construction!r} are; use distributed_dp() or local_dp()"
            )
        self.inner = inner
        self.settings = Settings(
            construction=construction,
            code=code,
            symbols=symbols,
            shards=shards,
            loss=loss,
            target=target,
            private=private,
            transport=transport,
            seal=seal,
            groups=groups,
            mix=mix,
            share_timeout=share_timeout,
            collect_timeout=collect_timeout,
            max_store_bytes=max_store_bytes,
            seed=seed,
            options=dict(options),
        )
        self._reports = Reports()
        module, _, name = CONSTRUCTIONS[construction].partition(":")
        self.construction: Construction = getattr(importlib.import_module(module), name)(self.settings, inner)
        self._run = secrets.token_bytes(8)
        self._links = self._simulated_links(spool)
        self._greeted: dict[int, _Greeted] = {}
        self._holders = Holders()
        self._deaf: dict[int, str] = {}
        self._refusals: dict[int, str] = {}

    def _simulated_links(self, spool: str | os.PathLike[str] | None) -> SpoolRoot | None:
        if self.settings.transport != "peers":
            if spool is not None:
                raise ConfigError("spool is the folder of links between peers; it needs transport='peers'")
            return None
        if spool is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedcomp-peers-")
            spool = self._folder.name
        return SpoolRoot.create(Path(spool), self.settings.max_store_bytes)

    @property
    def reports(self) -> Reports:
        """Training reports: the inner strategy's where it makes any, with the section ``coded``."""
        return reports_of(self.inner, self._reports)

    @property
    def evaluations(self) -> Reports:
        """Evaluation reports of the inner strategy."""
        return reports_of(self.inner, Reports(), "evaluations")

    def summary(self) -> None:
        """Log the construction, then the inner strategy's own summary."""
        log.info("\t├──> Coded: %s", self.construction.describe())
        self.inner.summary()

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Greet new nodes, then run the construction's exchanges around the inner strategy's training messages."""
        report = self.reports.begin(server_round).section(Coding)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        nodes = [message.metadata.dst_node_id for message in messages]
        if len(set(nodes)) < len(nodes):
            raise ConfigError(f"{type(self.inner).__name__} sends a node two messages in one round; one can be coded")
        yield from self._greet([n for n in nodes if n not in self._greeted and n not in self._deaf], server_round, grid)
        twins = self._twins(nodes, grid)
        for node, rivals in twins.items():
            report.exclude(node, rivals)
        for rivals in sorted(set(twins.values())):
            log.warning("coded round %d: %s", server_round, rivals)
        messages = [message for message in messages if message.metadata.dst_node_id not in report.excluded]
        nodes = [message.metadata.dst_node_id for message in messages]
        met = sorted((self._greeted[node].partition, i, node) for i, node in enumerate(nodes) if node in self._greeted)
        members = [
            Member(index, node, partition, messages[i], self._greeted[node].public, self._address(node))
            for index, (partition, i, node) in enumerate(met)
        ]
        strangers = [m for m, node in zip(messages, nodes, strict=True) if node not in self._greeted]
        for node in nodes:
            if node not in self._greeted:
                reason = self._deaf.get(node) or self._refusals.get(node)
                report.direct[node] = reason or "the node did not answer the hello in time"
        now = CodedRound(
            number=server_round,
            common=self._common(),
            settings=self.settings,
            inner=self.inner,
            grid=grid,
            arrays=arrays,
            messages=messages,
            members=members,
            strangers=strangers,
            report=report,
            _learn=self._learn,
        )
        outcome = yield from self.construction.round(now)
        report.partitions = sorted(member.partition for member in members if member.node in report.included)
        return outcome

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate as the inner strategy does; nothing of it is coded."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        twins = self._twins([message.metadata.dst_node_id for message in messages], grid)
        replies = yield [message for message in messages if message.metadata.dst_node_id not in twins]
        return self.inner.aggregate_evaluate(server_round, replies)

    def _twins(self, nodes: list[int], grid: Grid) -> dict[int, str]:
        """Return which of ``nodes`` are not asked because others declare their partition, and why."""
        self._holders.meet(grid)
        claims = {node: self._greeted[node].partition for node in nodes if node in self._greeted}
        # Whom earlier rounds prefer would make one client's part in a private sum depend on another's.
        holders = self._holders if find_private(self.inner) is None else Holders()
        return holders.settle(claims, claims)

    def _greet(self, nodes: list[int], server_round: int, grid: Grid) -> Exchanges[None]:
        """Ask nodes met for the first time who they are. Those without the mod are remembered, silent ones are not."""
        if not nodes:
            return
        asked_of_all = Query(**self._common(), round=server_round)
        messages = []
        self._refusals = {}
        for node in nodes:
            content = RecordDict()
            asked_of_all.put(content)
            messages.append(Message(content, node, HELLO, group_id=str(server_round)))
        replies = yield Push(messages, self.settings.collect_timeout)
        asked, known = dict(addressed(messages)), partition_lookup(grid)
        for reply in replies:
            if reply.metadata.reply_to_message_id not in asked:
                continue
            node = asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                reason = f"error {reply.error.code}: {reply.error.reason}"
                self._refusals[node] = shorten(reason)
                if NO_HANDLER in reason:
                    self._deaf[node] = shorten(f"{_HINT} ({reason})")
                    log.warning("node %d: %s", node, self._deaf[node])
                continue
            try:
                hello, engine = Hello.take(reply), known(node)
                declared = hello.partition if engine is None else engine
                self._greeted[node] = _Greeted(declared, hello.public, hello.address)
            except FedcompError as error:
                self._deaf[node] = shorten(f"the hello cannot be used: {error}")
                log.warning("node %d: %s", node, self._deaf[node])

    def _common(self) -> dict[str, Any]:
        return {
            "construction": self.settings.construction,
            "run": self._run,
            "transport": self.settings.transport,
            "max_store": self.settings.max_store_bytes,
            "spool": "" if self._links is None else str(self._links.root),
        }

    def _address(self, node: int) -> str:
        """Return where peers reach a node: its own word, or its folder of the simulated links."""
        greeted = self._greeted[node]
        if greeted.address or self._links is None:
            return greeted.address
        return self._links.address(greeted.partition)

    def _learn(self, node: int, header: Introduced | SumShared) -> None:
        """Take over a public key and address that a node says are new: it was restarted with an empty state."""
        if header.public:
            self._greeted[node] = _Greeted(self._greeted[node].partition, header.public, header.address)

    def identity(self) -> str:
        """Return construction and code, which must not change within a run."""
        return f"{self.settings.construction}/{self.settings.code}"
