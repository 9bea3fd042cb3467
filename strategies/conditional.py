"""Conditional rounds: nodes that have nothing new are not averaged, and cost a few bytes instead of an update.

FLARE (Chow, Raza, Mavromatis, Khan, arXiv:2305.08504) has an edge send when its training is not settled, or its sensors
saw something new, and not by the clock. Here the same decision stands one tier up, between nodes and server. The
exchange, ``max_skip`` and the query are derived; see :mod:`fedcomp.drift` for what nodes decide by.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.conditional import PRIVATE_REASON, QUERY_TYPE, Offer, Status
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.report import ReportSection, figure, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, own_loop
from fedcomp.flower.schema import SchemaError
from fedcomp.plain import Count
from fedcomp.privacy.local import privatised
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.strategies.hooked import hooked
from fedcomp.strategies.pair_systems import build_pair
from fedcomp.strategies.parts import PAIR_PREFIXES, Settings
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import SentMessage, first_replies
from fedcomp.strategies.system import System, settings_of
from fedcomp.strategies.wrapping import require_inner


@dataclass
class Quietness(ReportSection, name="conditional"):
    """What a conditional round adds to a report.

    Attributes
    ----------
    quiet : list of int
        Nodes that had nothing to send. They are not among those that the round asked for an update.
    queried : int
        Nodes that were asked whether they have something to send.
    due : list of int
        Nodes that had to send, because they were quiet for as many rounds as is allowed.
    unanswered : dict of int to str
        Nodes whose answer to the query did not come or could not be used, and why. They are sent no model.
    unaware : dict of int to str
        Nodes that do not know the query, and why: their apps lack the half. They train in every round.
    """

    quiet: list[int] = figure(list, unit="nodes", show="count")
    queried: int = figure(unit="nodes")
    due: list[int] = figure(list, unit="nodes", show="count")
    unanswered: dict[int, str] = figure(dict, unit="nodes", show="reasons")
    unaware: dict[int, str] = figure(dict, unit="nodes", show="reasons")

    def line(self) -> str:
        """Return who was quiet, had to send, or did not answer."""
        counts = {
            "quiet": len(self.quiet),
            "had to send": len(self.due),
            "did not answer the query": len(self.unanswered),
            "do not know the query": len(self.unaware),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "quiet")


class Conditional(ExchangeStrategy, Receiving, Stateful):
    """Let nodes be quiet that have nothing new; the others are averaged without them.

    The clients need the half :func:`fedcomp.clients.conditional.conditional`; others train in every round.

    Parameters
    ----------
    inner : Strategy
        A :class:`Compressed`, or any strategy that one can stand around: its clients then send whole models.
    max_skip : int
        Rounds in a row that a node may be quiet; then it has to send. 0: never.
    query : bool
        Ask first, in a message without a model, and send the model to those that have something to send. Without it
        nodes are sent the model, look at it, and may answer that there is nothing.

    Raises
    ------
    ConfigError
        For private strategies and codecs: whether a node answers would follow from its data. For gossip: neighbours
        wait for a node that is quiet, and take it for one that vanished. For forward gradients, whose clients would
        never be quiet. For other strategies that write their rounds
        as exchanges of their own, and such with a loop of their own.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = Conditional(Compressed(FedAvg(), TopK(density=0.01)), max_skip=10)
    """

    STATE: ClassVar[Mapping[str, Any]] = {"inner": nested("inner"), "_skipped": dict[int, Count], "_session": bytes}

    def __init__(self, inner: Strategy, max_skip: int = 10, query: bool = True) -> None:
        if isinstance(inner, GossipRelay):
            raise ConfigError(
                "GossipRelay has no conditional rounds: a node that is quiet for an iteration keeps its neighbours "
                "waiting, and is taken for one that vanished; let it send small differences instead, with a sparse "
                "compressor"
            )
        require_inner(inner, "Conditional")
        if own_loop(inner):
            raise ConfigError(f"{type(inner).__name__} runs a loop of its own, which Conditional would pass by")
        if find_private(inner) is not None or promises(inner):
            raise ConfigError(f"{type(inner).__name__} keeps a promise of privacy: {PRIVATE_REASON}")
        # Whole models in the format's frames, where clients have the mod; as they are, where they do not.
        self.inner = hooked(inner)
        if privatised(self.inner.codec) is not None:
            raise ConfigError(f"{self.inner.codec!r} keeps a promise of privacy: {PRIVATE_REASON}")
        self.max_skip = params.integer("max_skip", max_skip, low=0)
        self.query = params.boolean("query", query)
        self._skipped: dict[int, int] = {}
        # Not from the seed: a second run with the same one must not go on with the nodes' losses of the first.
        self._session = secrets.token_bytes(8)

    @property
    def reception(self) -> Reception:  # type: ignore[override]
        """That of the inner strategy."""
        return self.inner.reception

    def summary(self) -> None:
        """Log the settings, then what is inside."""
        log.info("\t├──> Conditional: quiet for %d rounds at most, query=%s", self.max_skip, self.query)
        self.inner.summary()

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        return {"max_skip": self.max_skip, "query": self.query}

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Ask who has something to send, and aggregate what those send.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        messages = self.inner.chosen(server_round, arrays, config, grid)
        said = self.reports.join(server_round).section(Quietness)
        nodes = [message.metadata.dst_node_id for message in messages]
        said.due = [node for node in nodes if self._skipped.get(node, 0) >= self.max_skip]
        if self.query:
            asked = [self._question(message, server_round) for message in messages]
            asked = [query for query in asked if query.metadata.dst_node_id not in said.due]
            # An exchange of no messages would wait for nothing.
            replies = (yield asked) if asked else []
            said.queried = len(asked)
            self._sort(asked, replies, server_round, said)
            away = {*said.quiet, *said.unanswered}
            messages = [message for message in messages if message.metadata.dst_node_id not in away]
        sent = self.inner.ask(server_round, arrays, messages)
        for each in sent:
            # An app without the half sees an ordinary message.
            if each.node not in said.unaware:
                must = self.query or each.node in said.due
                Offer(self._session, server_round, must).put(each.message.content)
        replies = (yield [each.message for each in sent]) if sent else []
        if not self.query:
            sent, replies = self._without_quiet(sent, replies, server_round, said)
        outcome = self.inner.aggregate_exchange(server_round, sent, replies)
        quiet = set(said.quiet)
        for node in nodes:
            # One that sent nothing because something failed has not been heard either.
            heard = node not in quiet and node not in said.unanswered
            self._skipped[node] = 0 if heard else self._skipped.get(node, 0) + 1
        return outcome

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate as the inner strategy does."""
        replies = yield list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self.inner.aggregate_evaluate(server_round, replies)

    def _question(self, message: Message, server_round: int) -> Message:
        content, node = RecordDict(), message.metadata.dst_node_id
        Offer(self._session, server_round).put(content)
        return Message(content, node, QUERY_TYPE, group_id=message.metadata.group_id or None)

    def _sort(self, asked: list[Message], replies: list[Message], server_round: int, said: Quietness) -> None:
        """Note who is quiet, did not answer, or does not know what was asked."""
        first = first_replies(asked, replies)
        for message in asked:
            node = message.metadata.dst_node_id
            reply = first.get(node)
            try:
                if reply is None:
                    said.unanswered[node] = "no answer"
                elif reply.has_error():
                    # Its app has no handler of that name: it trains as ever.
                    said.unaware[node] = shorten(f"error {reply.error.code}: {reply.error.reason}")
                elif (found := Status.read(reply.content)) is None:
                    said.unanswered[node] = "its answer says nothing"
                elif _of_round(found, server_round).quiet:
                    said.quiet.append(node)
            except SchemaError as error:
                said.unanswered[node] = shorten(str(error))

    def _without_quiet(
        self, sent: Sequence[SentMessage], replies: list[Message], server_round: int, said: Quietness
    ) -> tuple[list[SentMessage], list[Message]]:
        """Return the messages and replies of those that were not quiet."""
        first = first_replies([each.message for each in sent], replies)
        quiet: dict[str, SentMessage] = {}
        refused: dict[str, Message] = {}
        for each in sent:
            reply = first.get(each.node)
            if reply is None or reply.has_error():
                continue
            name = each.message.metadata.message_id
            try:
                if (found := Status.read(reply.content)) is None or not _of_round(found, server_round).quiet:
                    continue
                if each.node in said.due:
                    refused[name] = app_failure(each.message, "it has nothing to send, and was told to send")
                    continue
            except SchemaError as error:
                refused[name] = app_failure(each.message, str(error))
                continue
            quiet[name] = each
            said.quiet.append(each.node)
            # It was sent the model, and keeps it.
            self.reception.note_version(each, reply, 0 if each.origin is None else each.origin.version)
        rest = [each for each in sent if each.message.metadata.message_id not in quiet]
        left = []
        for reply in replies:
            name = reply.metadata.reply_to_message_id
            if name not in quiet:
                left.append(refused.get(name, reply))
        return rest, left


def _of_round(found: Status, server_round: int) -> Status:
    """Return an answer of this round; raise :class:`SchemaError` for one of another."""
    if found.round != server_round:
        raise SchemaError(f"the node's answer is of round {found.round}, asked was for round {server_round}", "round")
    return found


def _build(settings: Settings, seed: int) -> Strategy:
    pair = build_pair(settings, seed, codec="topk")
    return Conditional(pair, int(settings["max_skip"]), bool(settings["query"]))


SYSTEM: Final = System(
    "conditional",
    "FLARE (conditional rounds)",
    "Chow, Raza, Mavromatis, Khan 2023, FLARE: detection and mitigation of concept drift for federated learning based "
    "IoT deployments",
    "the largest entries of the update, in rounds in which the losses of the node's own examples have not settled; "
    "otherwise a few bytes",
    _build,
    {"downlink": "", "feedback": True, "codec.density": 0.01, **settings_of(Conditional, "max_skip", "query")},
    PAIR_PREFIXES,
)
