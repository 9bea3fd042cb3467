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
takes them with ``settings.own(Kind)``, a dataclass in :mod:`fedcomp.strategies.coded.settings`. On the client the same
name leads to a class in ``clients/coded/mod.py``. Nothing of a round outlives it, except what
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
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.coding.transport import Parcel
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.coded import (
    HELLO,
    NO_HANDLER,
    THROUGH_SERVER,
    Header,
    Hello,
    Indexed,
    Query,
    Shared,
    SumShared,
)
from fedcomp.flower.logs import log
from fedcomp.flower.metered import addressed, join, partition_lookup
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import Reports, reports_of, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push, own_loop
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.coded.links import RestingLinks, SimulatedLinks, record_peer
from fedcomp.strategies.coded.report import CodingReport
from fedcomp.strategies.coded.settings import CONSTRUCTIONS, GRADIENT_CODE, CodedSettings
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.hooked import hooked
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.replies import Rejected, first_replies
from fedcomp.strategies.wrapping import require_inner

Outcome = tuple[ArrayRecord | None, MetricRecord | None]

_HINT: Final = "the client's app answers no coded messages: wrap it in fedcomp.client()"


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
    signature : bytes
        Its node's, over its key; empty where it has none.
    """

    index: int
    node: int
    partition: int
    message: Message
    public: bytes
    address: str
    signature: bytes = b""


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
    uncoded : list of Message
        Training messages for clients without the half, or that did not answer the hello in time: they are pushed as
        they are, with the members', and what they answer is an ordinary reply.
    report : CodingReport
    resting : RestingLinks
        Links of the run that failed lately.
    """

    number: int
    common: Mapping[str, Any]
    settings: CodedSettings
    inner: Strategy
    grid: Grid
    arrays: ArrayRecord
    messages: list[Message]
    members: list[Member]
    uncoded: list[Message]
    report: CodingReport
    resting: RestingLinks
    _learn: Callable[[int, Shared | SumShared], None]

    def plan(self, member: Member, schema: type[Indexed], fields: Mapping[str, Any]) -> Message:
        """Return the member's training message with the plan in it."""
        # A copy of the record: several members' messages may share one content.
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

    def ask(self, messages: Iterable[Message], timeout: float | None) -> Exchanges[dict[int, Message]]:
        """Send ``messages``, wait for ``timeout`` seconds at most; return each node's first reply."""
        batch = list(messages)
        return first_replies(batch, (yield Push(batch, timeout)))

    def parcel(self, data: bytes, kind: int, source: int, destinations: Container[int], longest: int) -> Parcel:
        """Read a parcel that came through the server, which knows who sent it.

        Raises
        ------
        FedcompError
            When it is damaged, or says anything else of its sender, or is for none of ``destinations``.
        """
        parcel = Parcel.from_bytes(data, longest)
        if (parcel.run, parcel.round, parcel.kind, parcel.source) != (self.common["run"], self.number, kind, source):
            raise Rejected("the parcel claims another run, round, kind or source than its sender's")
        if parcel.destination not in destinations:
            raise Rejected(f"the parcel is the second for relay {parcel.destination}, or that one keeps none of it")
        return parcel

    def peers(self, source: Member, relays: Sequence[Member], *, seal: bool) -> dict[str, Any]:
        """Return the fields of a plan that say where the relays of a source are, and how they prove who they are."""
        fields: dict[str, Any] = {}
        if seal:
            fields["keys"] = b"".join(relay.public for relay in relays)
        if self.settings.transport == "peers":
            fields["addresses"] = tuple("" if self._why(source, relay) else relay.address for relay in relays)
        if any(relay.signature for relay in relays):
            fields["partitions"] = tuple(relay.partition for relay in relays)
            fields["signatures"] = tuple(relay.signature for relay in relays)
        return fields

    def take_missed(
        self, source: Member, said: Shared | SumShared, relays: Mapping[int, Member], *, seal: bool
    ) -> set[int]:
        """Take what a member says of the parcels that no link took; return for whom they may come through the server.

        Parameters
        ----------
        relays : mapping of int to Member
            The member's relays, by what they are called as destinations.

        Raises
        ------
        Rejected
            When it names others.
        """
        if strange := sorted(set(said.missed) - {name for name, relay in relays.items() if relay is not source}):
            raise Rejected(f"it names links to {strange[:20]}, which are none of its own")
        for name, cause in zip(said.missed, said.causes, strict=True):
            relay = relays[name]
            why = self._why(source, relay)
            # Of what is not sealed nothing stands in for the link, so that this one does not rest.
            if seal and not why:
                self.resting.fail(*_link(source, relay), self.number, cause)
            lost = "" if seal else "lost, as shards that are not sealed do not go through the server: "
            self.report.link_failed(f"{source.partition}>{relay.partition}", lost + (why or cause))
        return set(said.missed) if seal else set()

    def _why(self, source: Member, relay: Member) -> str:
        """Return why a link is not tried; empty when it is."""
        if not relay.address:
            return f"partition {relay.partition} has no listener"
        return self.resting.why(*_link(source, relay), self.number)

    def count_peer(self, member: Member, sizes: Iterable[int]) -> None:
        """Count what a member handed to its peers, by its own word or by that of who holds it."""
        message_type = member.message.metadata.message_type
        self.report.count("peer", record_peer(self.grid, self.number, member.node, message_type, sizes))

    def exclude_uncoded(self, why: str) -> None:
        """Leave the clients without the half out of a round in which single replies have no place."""
        for message in self.uncoded:
            node = message.metadata.dst_node_id
            self.report.exclude(node, f"{why}: {self.report.direct.pop(node, 'it is not known')}")

    def skip(self, reason: str) -> None:
        """Report that the round comes to nothing, and nobody's update is in the model."""
        self.report.note(f"the round is skipped, the model is unchanged: {reason}")
        self.report.included = []
        for member in self.members:
            # A reason of its own says more, where a member has one.
            self.report.excluded.setdefault(member.node, shorten(f"round skipped: {reason}"))

    def header(self, member: Member, reply: Message, schema: type[H]) -> H:
        """Return the header of a member's reply, and take note of what it says of the member; see :meth:`answer`."""
        found = self.answer(reply, schema)
        # A restarted client has a new key; shards sealed for the old one are lost, later ones must not be.
        if isinstance(found, Shared | SumShared):
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


def _link(source: Member, relay: Member) -> tuple[tuple[int, int], object]:
    """Return the name of a link, and what tells it from another one of that name."""
    ends = tuple((member.public, member.address, member.signature) for member in (source, relay))
    return (source.partition, relay.partition), ends


class Construction(Protocol):
    """What a construction brings. It is made as ``Class(settings, inner)`` and raises :class:`ConfigError` there."""

    def describe(self) -> str:
        """Return one line for the log."""
        ...

    def round(self, now: CodedRound) -> Exchanges[Outcome]:
        """Run one round's exchanges; return the new model and metrics, or None and None for a round that is skipped."""
        ...


@dataclass(frozen=True)
class KnownClient:
    """What a client's hello says."""

    partition: int
    public: bytes
    address: str
    signature: bytes = b""


class CodedFedAvg(ExchangeStrategy, Stateful):
    """Code what clients send, so that a client may vanish after it has shared.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through hooks, usually :class:`fedcomp.strategies.compressed.Compressed`.
    **settings
        See :class:`fedcomp.strategies.coded.settings.CodedSettings`; and what only the chosen construction has:
        :class:`~fedcomp.strategies.coded.settings.SumOptions`; the construction "gradcode" is
        :class:`~fedcomp.strategies.coded.gradients.GradientCoded`, with settings of its own.

    Attributes
    ----------
    settings : CodedSettings
    reports, evaluations : Reports
        Those of the inner strategy, where it keeps any.

    Raises
    ------
    ConfigError
        For anything that cannot work.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = CodedFedAvg(Compressed(FedAvg(), TopK(density=0.01)), code="mds", symbols=7)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_holders": nested("_holders"),
        "construction": nested("construction"),
        "inner": INNER,
        "_run": bytes,
        "_known": dict[int, KnownClient],
        "_without_half": dict[int, str],
        "_reports": Reports,
    }

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        if settings.get("construction") != GRADIENT_CODE:
            return super().__new__(cls)
        # A program, which needs nothing of this class.
        from fedcomp.strategies.coded.gradients import GradientCoded

        inner = args[0] if args else settings.pop("inner")
        return GradientCoded(inner, CodedSettings.of(settings))

    def __init__(self, inner: Strategy, **settings: Any) -> None:
        require_inner(inner, "CodedFedAvg")
        if own_loop(inner):
            raise ConfigError(
                f"{type(inner).__name__} runs its own loop (it overrides start); CodedFedAvg stands around strategies "
                "that work through configure_train and aggregate_train"
            )
        # Of local privacy the messages are its own.
        if type(inner) is Compressed:
            inner = hooked(inner)
        self.settings = CodedSettings.of(settings)
        construction = self.settings.construction
        promise = find_private(inner)
        # Without a promise there is none that coding could break.
        may_be_coded = getattr(promise, "may_be_coded", lambda construction: True)
        if not may_be_coded(construction) or promises(inner):
            raise ConfigError(
                f"{type(promise or inner).__name__} trusts the server with updates, not other clients, which relays of "
                f"the construction {construction!r} are; use distributed_dp() or local_dp()"
            )
        self.inner = inner
        self._reports = Reports()
        module, _, name = CONSTRUCTIONS[construction].partition(":")
        self.construction: Construction = getattr(importlib.import_module(module), name)(self.settings, inner)
        # Random and kept in the state: shards of another run, also of this strategy, never mix with these.
        self._run = secrets.token_bytes(8)
        self._links = SimulatedLinks(self.settings.transport, self.settings.spool, self.settings.max_store_bytes)
        self._resting = RestingLinks()
        self._known: dict[int, KnownClient] = {}
        self._holders = Holders()
        self._without_half: dict[int, str] = {}
        self._refusals: dict[int, str] = {}

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
        """Say hello to new nodes, then run the construction's exchanges with the inner strategy's messages."""
        report = self.reports.begin(server_round).section(CodingReport)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        nodes = [message.metadata.dst_node_id for message in messages]
        if len(set(nodes)) < len(nodes):
            raise ConfigError(f"{type(self.inner).__name__} sends a node two messages in one round; one can be coded")
        new = [node for node in nodes if node not in self._known and node not in self._without_half]
        yield from self._meet(new, server_round, grid)
        # After the hello, which says who holds what, and before anybody trains.
        twins = self._twins(nodes, grid)
        for node, rivals in twins.items():
            report.exclude(node, rivals)
        for rivals in sorted(set(twins.values())):
            log.warning("coded round %d: %s", server_round, rivals)
        messages = [message for message in messages if message.metadata.dst_node_id not in report.excluded]
        nodes = [message.metadata.dst_node_id for message in messages]
        # By partition: node ids are drawn at random by Flower, and indices are to be the same in every run.
        known = sorted((self._known[node].partition, i, node) for i, node in enumerate(nodes) if node in self._known)
        members = []
        for index, (partition, i, node) in enumerate(known):
            client = self._known[node]
            reached = client.address != THROUGH_SERVER
            address = self._links.address(client.address, partition) if reached else ""
            members.append(Member(index, node, partition, messages[i], client.public, address, client.signature))
        uncoded = [message for message in messages if message.metadata.dst_node_id not in self._known]
        for message in uncoded:
            node = message.metadata.dst_node_id
            reason = self._without_half.get(node) or self._refusals.get(node)
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
            uncoded=uncoded,
            report=report,
            resting=self._resting,
            _learn=self._learn,
        )
        outcome = yield from self.construction.round(now)
        if report.failed_links:
            # Without names: who took part may be secret, and the log of a run is not.
            log.warning(
                "coded round %d: %d links took no shard; report.coded.failed_links names them",
                server_round,
                len(report.failed_links),
            )
        report.partitions = sorted(member.partition for member in members if member.node in report.included)
        return outcome

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate as the inner strategy does; nothing of it is coded."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        # A client that is there twice would count twice here as well.
        twins = self._twins([message.metadata.dst_node_id for message in messages], grid)
        replies = yield [message for message in messages if message.metadata.dst_node_id not in twins]
        return self.inner.aggregate_evaluate(server_round, replies)

    def _twins(self, nodes: list[int], grid: Grid) -> dict[int, str]:
        """Return which of ``nodes`` are not asked because others declare their partition, and why."""
        self._holders.meet(grid)
        claims = {node: self._known[node].partition for node in nodes if node in self._known}
        # Whom earlier rounds prefer would make one client's part in a private sum depend on another's.
        holders = self._holders if find_private(self.inner) is None else Holders()
        return holders.settle(claims, claims)

    def _meet(self, nodes: list[int], server_round: int, grid: Grid) -> Exchanges[None]:
        """Say hello to new nodes. Those without the half are remembered, silent ones are asked again next round."""
        if not nodes:
            return
        # Of the last hello only: who answers the next one must not be reported with an old reason.
        self._refusals = {}
        asked = Query(**self._common(), round=server_round)
        messages = [Message(RecordDict(), node, HELLO, group_id=str(server_round)) for node in nodes]
        for message in messages:
            asked.put(message.content)
        replies, partition_of = (yield Push(messages, self.settings.collect_timeout)), partition_lookup(grid)
        for node, reply in first_replies(messages, replies).items():
            if reply.has_error():
                reason = f"error {reply.error.code}: {reply.error.reason}"
                self._refusals[node] = shorten(reason)
                # Any other error may pass: then the node is asked again next round.
                if NO_HANDLER in reason:
                    self._forgo(node, f"{_HINT} ({reason})")
                continue
            try:
                hello, engine = Hello.take(reply), partition_of(node)
                if hello.address == THROUGH_SERVER and self.settings.seal is False:
                    raise StateError(
                        "it has no peer address, and shards that are not sealed do not go through the server; start it "
                        "with --peer HOST:PORT, or leave out seal=False"
                    )
            # A hello that cannot be read will not read better next round.
            except FedcompError as error:
                self._forgo(node, f"the hello cannot be used: {error}")
                continue
            # A node may claim any partition; where the engine knows better, its word counts.
            partition = hello.partition if engine is None else engine
            self._known[node] = KnownClient(partition, hello.public, hello.address, hello.signature)

    def _forgo(self, node: int, reason: str) -> None:
        """Never ask a node again to code: it cannot."""
        self._without_half[node] = shorten(reason)
        log.warning("node %d: %s", node, self._without_half[node])

    def _common(self) -> dict[str, Any]:
        return {
            "construction": self.settings.construction,
            "run": self._run,
            "transport": self.settings.transport,
            "max_store": self.settings.max_store_bytes,
            "spool": self._links.root,
        }

    def _learn(self, node: int, header: Shared | SumShared) -> None:
        """Take over a public key and address that a node says are new: it was restarted with an empty state."""
        if header.public:
            partition = self._known[node].partition
            self._known[node] = KnownClient(partition, header.public, header.address, header.signature)

    def identity(self) -> str:
        """Return construction and code, which must not change within a run."""
        return f"{self.settings.construction}/{self.settings.code}"
