"""Layer by layer: a frame arrives in one exchange for each layer of the model, the last layer first.

So the authors of dAD average during back-propagation (Baker, Calhoun, Pearlmutter, Plis, arXiv:2102.09631; from the
title and their code, read). A Flower client answers a message when it is done, so that here every exchange but the
first costs a round trip and hides nothing: :func:`fedcomp.timing.pipeline.layered` says what it costs, and what it
would gain if parts could leave while the rest is still computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.logs import log
from fedcomp.flower.parts import PartAnswer, PartRequest
from fedcomp.flower.payload import put_frame, take_frame
from fedcomp.flower.protocol import UPDATE, app_failure
from fedcomp.flower.report import ReportSection, figure
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.hooked import hooked
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import Rejected, SentMessage, first_replies
from fedcomp.systems.factors import joined, layers
from fedcomp.wire import Frame


@dataclass
class Parts(ReportSection, name="parts"):
    """What a layer-by-layer round adds to a report.

    Attributes
    ----------
    exchanges : int
    whole : int
        Frames that came in one piece: their codec does not send a tensor for each of the model's.
    incomplete : int
        Clients of which some part did not come; what they sent is not used, and a memory puts it back.
    """

    exchanges: int = figure()
    whole: int = figure(unit="nodes")
    incomplete: int = figure(unit="nodes")

    def line(self) -> str:
        """Return the exchanges, and what was whole or incomplete."""
        said = [f"{self.exchanges} exchanges"]
        said += [f"{n} {name}" for n, name in ((self.whole, "whole"), (self.incomplete, "incomplete")) if n]
        return ", ".join(said)


class LayerByLayer(ExchangeStrategy, Receiving, Stateful):
    """Collect what clients send of a round layer by layer, in as many exchanges; what comes of it is the same.

    Parameters
    ----------
    inner : Compressed
        With a codec whose frames have a tensor for each of the model's, such as :class:`fedcomp.codecs.Factors`; frames
        of others come whole, in the first exchange.

    Raises
    ------
    ConfigError
        For another inner strategy.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import Factors
    >>> strategy = LayerByLayer(Compressed(FedAvg(), Factors(rank=4), feedback=False))
    """

    STATE: ClassVar[Mapping[str, Any]] = {"inner": nested("inner")}

    def __init__(self, inner: Compressed) -> None:
        if not isinstance(inner, Compressed):
            raise ConfigError(f"inner is {inner!r}; expected Compressed(strategy, codec), whose frames are divided")
        self.inner = hooked(inner)

    @property
    def reception(self) -> Reception:  # type: ignore[override]
        """That of the inner strategy."""
        return self.inner.reception

    def summary(self) -> None:
        """Log the strategy, then what is inside."""
        super().summary()
        self.inner.summary()

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Train, then ask for one layer after the other; aggregate what is complete.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        sent = self.inner.ask(server_round, arrays, self.inner.chosen(server_round, arrays, config, grid))
        tensors = layers(self.inner.layout)
        for each in sent:
            PartRequest(0, each.sequence, tensors).put(each.message.content)
        replies = yield [each.message for each in sent]
        said = self.reports.join(server_round).section(Parts)
        said.exchanges = 1
        first = first_replies([each.message for each in sent], replies)
        held: dict[int, list[Frame]] = {}
        failed: dict[int, str] = {}
        for each in sent:
            reply = first.get(each.node)
            if reply is None or reply.has_error():
                continue
            try:
                # One that is in one piece stays as it is; a client without the mod sends no frame at all.
                if answer := PartAnswer.find(reply.content):
                    held[each.node] = [_part(reply, answer, 0, each, len(tensors))]
                    said.whole += answer.parts == 1
                    if answer.parts == 1:
                        del held[each.node]
            except FedcompError as error:
                failed[each.node] = str(error)
        for number in range(1, len(tensors)):
            waiting = {each.node: each for each in sent if len(held.get(each.node, [])) == number}
            if not waiting:
                break
            asked = [_question(each, number) for each in waiting.values()]
            answers = first_replies(asked, (yield asked))
            said.exchanges += 1
            for node, each in waiting.items():
                try:
                    reply = answers.get(node)
                    if reply is None:
                        raise Rejected("no answer")
                    if reply.has_error():
                        raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
                    held[node].append(_part(reply, PartAnswer.take(reply.content), number, each, len(tensors)))
                except FedcompError as error:
                    failed[node] = f"part {number + 1} of {len(tensors)}: {error}"
        for each in sent:
            if each.node in held and each.node not in failed:
                limits = self.inner.codec.limits(self.inner.layout)
                try:
                    put_frame(first[each.node].content, UPDATE, joined(held[each.node], limits))
                except FedcompError as error:
                    failed[each.node] = str(error)
        said.incomplete = len(failed)
        complete = [_standing(reply, sent, failed) for reply in replies]
        return self.inner.aggregate_exchange(server_round, sent, complete)

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate as the inner strategy does."""
        replies = yield list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self.inner.aggregate_evaluate(server_round, replies)


def _question(sent: SentMessage, number: int) -> Message:
    content = RecordDict()
    PartRequest(number, sent.sequence).put(content)
    return Message(content, sent.node, "query", group_id=sent.message.metadata.group_id or None)


def _part(reply: Message, answer: PartAnswer, number: int, sent: SentMessage, layers: int) -> Frame:
    frame = take_frame(reply.content, UPDATE)
    if frame is None or answer.part != number or answer.sequence != sent.sequence or answer.parts not in (1, layers):
        raise Rejected(
            f"it is part {answer.part} of {answer.parts} of message {answer.sequence}, expected part {number} of "
            f"{layers} of message {sent.sequence}"
        )
    return frame


def _standing(reply: Message, sent: list[SentMessage], failed: Mapping[int, str]) -> Message:
    """Return a reply, or what stands for one that is not complete."""
    asked = {each.message.metadata.message_id: each for each in sent}.get(reply.metadata.reply_to_message_id)
    if asked is None or asked.node not in failed or reply.has_error():
        return reply
    log.info("node %d: %s", asked.node, failed[asked.node])
    return app_failure(asked.message, failed[asked.node])
