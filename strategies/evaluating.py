"""Client evaluation around a Flower strategy, on the model that nodes hold or by the system's own exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.errors import FedcompError
from fedcomp.flower import asks
from fedcomp.flower.asks import AskHead
from fedcomp.flower.payload import NODE_RECORD, payload_bytes
from fedcomp.flower.protocol import RESYNC, app_failure
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, Reports, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, drive
from fedcomp.layout import DensityPolicy, policy_config
from fedcomp.mailbox import Mailbox
from fedcomp.program import EVALUATE, Answer, Ask, Now, System, Wait
from fedcomp.stateful import Stateful
from fedcomp.strategies.downlink import Downlink
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.replies import Packed, Rejected, SentMessage, Usual, agreeing, match_replies, weight_of
from fedcomp.strategies.roster import Roster
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.running import ALL_WEIGHTLESS, Exchange, Pushes, Running
from fedcomp.wire import Frame


class Evaluating(ExchangeStrategy, Stateful):
    """The part of a server that lets clients evaluate; it trains nobody."""

    inner: Strategy
    system: System
    roster: Roster
    down: Downlink | None
    policy: DensityPolicy | None
    evaluations: Reports
    seed: int
    cast: bool
    packed: bool
    _session: bytes
    _usual: dict[str, Usual]
    _log: RoundLog
    _timeout: float | None
    _evaluating: list[SentMessage]
    _talks: dict[int, tuple[Pushes[MetricRecord | None], Grid]]
    _begun: Callable[[Report, ArrayRecord, Sequence[Message]], Running]
    _now: Callable[..., Now]
    _send: Callable[[Running, Now, Sequence[Ask] | Wait], Exchange]
    _exchanged: Callable[[Running, Now, Exchange, float], Pushes[list[Answer]]]
    _record_of: Callable[..., Any]
    _pack: Callable[[RecordDict, str, int], int]
    travelling: Callable[[ArrayRecord], ArrayRecord]
    drawn_halves: Callable[[], dict[str, Any]]

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
