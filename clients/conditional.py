"""The client half of conditional rounds: a node that has nothing new answers in a few bytes, and sends no update.

A node has something to send while the losses of the rounds' models on its own held-out data have not settled, and when
one of its sensors has seen something new (:mod:`fedcomp.drift`). The half stands inside of compression: it sees models
as the app does, and what compression remembers stays as it is while the node is quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from numpy.typing import ArrayLike

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import partition_of
from fedcomp.clients.private.mod import wants_private
from fedcomp.drift.edge import Arrays, Edge
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import Upload
from fedcomp.errors import StateError
from fedcomp.flower.conditional import PRIVATE_REASON, QUERY_TYPE, NodeMemory, Offer, Status
from fedcomp.flower.logs import log
from fedcomp.flower.payload import models
from fedcomp.flower.protocol import refusal
from fedcomp.flower.records import to_arrays
from fedcomp.flower.schema import SchemaError

Watch = Callable[[Message, Context], float]
"""``watch(message, context) -> loss`` of the message's model on this node's own held-out data."""


@dataclass(frozen=True)
class Sensors:
    """A node's sensors, for its half.

    Attributes
    ----------
    edge : callable
        ``edge(context) -> Edge``: where their windows are, and models are deployed to them.
    measure : callable
        ``measure(message, context, arrays) -> figures``: the sensors' statistic of a model on held-out data; None where
        there are too few of them, see :meth:`fedcomp.drift.edge.Deployments.deploy`.
    absorb : callable
        ``absorb(message, context, windows)``: add what sensors sent to the data that is trained on. It may be called
        again with the same windows, when the round failed after it.
    """

    edge: Callable[[Context], Edge]
    measure: Callable[[Message, Context, Arrays], ArrayLike | None]
    absorb: Callable[[Message, Context, Sequence[Upload]], None]


def conditional(
    watch: Watch, *, sensors: Sensors | None = None, settings: ScheduleSettings | None = None
) -> ClientHalf:
    """Return the client half of conditional rounds; other messages pass through it untouched.

    Parameters
    ----------
    watch : callable
        ``watch(message, context) -> loss`` of the message's model on this node's own held-out data.
    sensors : Sensors, optional
        Those below this node; default none.
    settings : ScheduleSettings, optional
        What counts as stable.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), conditional(lambda message, context: 0.5))
    """
    half = _Half(watch, sensors, ScheduleSettings() if settings is None else settings)
    return ClientHalf(
        "conditional",
        half.mod,
        handlers={QUERY_TYPE: half.answer},
        inside=("compression", "lsg", "private", "record_dp"),
    )


@dataclass(frozen=True)
class _Half:
    watch: Watch
    sensors: Sensors | None
    settings: ScheduleSettings

    def memory(self, context: Context, offer: Offer) -> NodeMemory:
        try:
            return NodeMemory.load(context.state, offer.session, self.settings)
        except StateError as error:
            # Settings are the app's, and an app may be replaced between two rounds; the node then starts again.
            log.warning("what this node decided by is of an app with other settings, and starts anew: %s", error)
            return NodeMemory(offer.session, self.settings)

    def answer(self, msg: Message, context: Context) -> Message:
        """Say whether there is something to send; nothing is loaded, and nothing changes."""
        offer = Offer.take(msg.content)
        memory = self.memory(context, offer)
        waits = self.sensors is not None and not self.sensors.edge(context).windows().keys() <= {*memory.used}
        content = RecordDict()
        status = Status(offer.round, memory.scheduler.stable and not waits)
        status.write(content, partition_of(context))
        return Message(content, reply_to=msg)

    def mod(self, msg: Message, context: Context, call_next: CallNext) -> Message:
        """Note the loss of the message's model; train, or say that there is nothing to send."""
        try:
            offer = Offer.find(msg.content)
        except SchemaError as error:
            return refusal(msg, f"the offer to be quiet is damaged: {error}")
        if offer is None or not msg.metadata.message_type.startswith("train"):
            return call_next(msg, context)
        if wants_private(msg.content):
            return refusal(msg, f"a private round offers nodes to be quiet, and this one refuses: {PRIVATE_REASON}")
        del msg.content[Offer.KEY]
        memory = self.memory(context, offer)
        edge = None if self.sensors is None else self.sensors.edge(context)
        if edge is not None:
            edge.forget(memory.used)
        windows = {} if edge is None else edge.windows()
        if windows and self.sensors is not None:
            # Before the loss is measured: held-out data are to include what is new.
            self.sensors.absorb(msg, context, [windows[number] for number in sorted(windows)])
            memory.scheduler.drifted()
        if memory.round != offer.round:
            self.note(memory, offer, msg, context, edge)
        if memory.scheduler.stable and not windows and not offer.must:
            memory.used = []
            memory.save(context.state)
            content = RecordDict()
            Status(offer.round, quiet=True).write(content, partition_of(context))
            return Message(content, reply_to=msg)
        before = copy(msg)
        before.content = RecordDict(dict(msg.content))
        reply = call_next(msg, context)
        if not reply.has_error():
            self.try_out(memory, before, reply, context)
            # As the last act: what failed is done again with the next message.
            memory.used = sorted(windows)
            memory.save(context.state)
        return reply

    def try_out(self, memory: NodeMemory, msg: Message, reply: Message, context: Context) -> None:
        """Note what training has made of the loss of the round's model."""
        trained = models(reply.content)
        if len(trained) != 1 or len(models(msg.content)) != 1:
            return
        before = self.watch(msg, context)
        (name,), (record,) = models(msg.content), trained.values()
        msg.content[name] = record
        memory.scheduler.tried(before, self.watch(msg, context))

    def note(self, memory: NodeMemory, offer: Offer, msg: Message, context: Context, edge: Edge | None) -> None:
        """Take the loss of a round's model into account, and give the model to sensors where it is due."""
        memory.round = offer.round
        deploy = memory.scheduler.note(self.watch(msg, context))
        if not deploy or edge is None or self.sensors is None:
            return
        found, measure = list(models(msg.content).values()), self.sensors.measure
        if len(found) != 1:
            log.warning("round %d: of %d models none is deployed to this node's sensors", offer.round, len(found))
            return
        version = edge.deploy(to_arrays(found[0]), lambda deployed: measure(msg, context, deployed))
        log.info("round %d: the model is deployed to this node's sensors, as version %d", offer.round, version)
