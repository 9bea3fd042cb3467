"""What the client halves of strategies with two exchanges do alike: train, keep the update, send it when asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedcomp.clients.half import WAITING, CallNext, ClientHalf
from fedcomp.clients.messages import (
    choose,
    find_announcement,
    header_of,
    learnt,
    memory_ratio,
    partition_of,
    plain_content,
    receive,
    require_ids,
)
from fedcomp.clients.personal import Followed, ease, kept_note
from fedcomp.codecs import State
from fedcomp.codecs.waiting import Waiting, waits
from fedcomp.errors import FedcompError
from fedcomp.exact import encode_exact
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, has_frame, put_reply_frame, take_frame
from fedcomp.flower.protocol import EXACT, RESYNC, STALE, SUPPORT, UPDATE, Announcement, refusal
from fedcomp.flower.records import to_arrays
from fedcomp.flower.state import Replica, StaleMessage, Uplink
from fedcomp.layout import Layout, Update, policy_from_config
from fedcomp.rng import Key
from fedcomp.versions import CodecOf
from fedcomp.wire import Frame

C = TypeVar("C", bound=Waiting)

Accepted = Collection[str] | None

_EXACT = "exact"


def waiting_half(
    name: str,
    kind: type[C],
    exchange: Callable[[Message, Context, Announcement, C], Exchange[C]],
    accept: Accepted,
) -> ClientHalf:
    """Return the client half of strategies whose codec is of ``kind``; other messages pass through it untouched.

    Parameters
    ----------
    exchange : callable
        Returns what answers a message.
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.
    """
    accept = require_ids(accept)

    def mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        announcement = find_announcement(msg.content)
        codec = None if announcement is None else _codec(announcement, kind, accept)
        if announcement is None or codec is None:
            return call_next(msg, context)
        try:
            return exchange(msg, context, announcement, codec).answer(call_next)
        except StaleMessage as error:
            return refusal(msg, f"{STALE}: {error}")

    mod.__name__ = f"{name}_mod"
    outside = WAITING[WAITING.index(name) + 1 :]
    return ClientHalf(name, mod, outside=(*outside, "compression", "lsg", "private", "record_dp"))


def _codec(announcement: Announcement, kind: type[C], accept: Accepted) -> C | None:
    """Return the codec when it is of ``kind``, else None: the message is another mod's matter then."""
    # Evaluation announces no uplink codec; its steps are still those of such a strategy.
    for config in (announcement.codec, announcement.downlink):
        codec, _ = choose(announcement, config, accept, phases=2)
        if isinstance(codec, kind):
            return codec
    return None


class Exchange(ABC, Generic[C]):
    """One message of such a strategy, and what this node answers."""

    def __init__(self, msg: Message, context: Context, announcement: Announcement, codec: C) -> None:
        self.msg = msg
        self.context = context
        self.announcement = announcement
        self.codec = codec
        self.key = Key(announcement.seed, "uplink", announcement.round, partition_of(context))

    @abstractmethod
    def trained(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Write what a training message is answered with beside metrics into ``out``; return the state after it."""

    @abstractmethod
    def queried(self, state: State, layout: Layout, out: RecordDict, block: Frame | None) -> State:
        """The same for a query.

        Raises
        ------
        FedcompError
            When the query cannot be answered.
        """

    @abstractmethod
    def codec_of(self, layout: Layout) -> CodecOf:
        """Return what reads a step of the model."""

    def settled(self, uplink: Uplink, layout: Layout) -> State:
        """Return the memory as the update joins it."""
        return uplink.state

    def prepare(self, layout: Layout, block: Frame | None) -> None:
        """Find in the message what is needed after training; whatever can fail fails before."""

    def keep(self) -> None:
        """Write into the context what this node needs of the message; among the last acts, which cannot fail."""

    def answer(self, call_next: CallNext) -> Message:
        """Train, evaluate, or send the update that waits."""
        kind = self.msg.metadata.message_type.partition(".")[0]
        # A query carries no model: the update that waits was made from the one in the training message.
        if kind == "query":
            return self._send()
        try:
            record, replica = receive(self.msg.content, self.announcement, self.codec, self.context, self.codec_of)
        except FedcompError as error:
            return refusal(self.msg, f"{RESYNC}: {error}")
        # receive() returns a replica whenever it was given a codec.
        assert replica is not None
        before = to_arrays(record)
        layout = self.layout_of(replica)
        uplink: Uplink | None = None
        self.prepare(layout, take_frame(self.msg.content, SUPPORT))
        # An evaluation takes nothing from the memory and leaves nothing in it.
        if kind == "train":
            uplink = Uplink.begin(self.context, self.announcement, self.codec, layout)
            if uplink.redelivery is not None:
                return Message(uplink.redelivery, reply_to=self.msg)
        self.msg.content = plain_content(self.msg.content, self.announcement, record)
        reply = call_next(self.msg, self.context)
        if reply.has_error():
            return reply
        if uplink is None:
            content = RecordDict({k: v for k, v in reply.content.items() if k != NODE_RECORD})
            content[NODE_RECORD] = header_of(reply.content, self.context, replica)
        else:
            content = self._learn(reply.content, before, layout, uplink, replica)
        replica.save(self.context)
        self.keep()
        reply.content = content
        return reply

    def _learn(self, content: RecordDict, before: dict, layout: Layout, uplink: Uplink, replica: Replica) -> RecordDict:
        """Return the reply to a training message: all of it but the model, which waits or leaves as values."""
        name, update, exact = learnt(content, before, layout)
        state = self.settled(uplink, layout)
        followed = Followed.load(self.context.state, layout)
        found = followed.judge(update, before)
        update = ease(update, followed.kept, {}, self.codec.residual(state))
        state = self.codec.begin(update, state, self.key)
        out = RecordDict({k: v for k, v in content.items() if k not in (NODE_RECORD, name)})
        header = out[NODE_RECORD] = header_of(content, self.context, replica)
        header["record"] = name
        if found:
            header["remark"] = kept_note(found, followed)
            log.info("round %d: %s", self.announcement.round, header["remark"])
        frame = encode_exact(exact, layout)
        if frame is not None:
            # Buffers leave together with the values: until these may leave they wait in the state.
            state[_EXACT] = np.frombuffer(frame, np.uint8)
        state = self.trained(state, layout, out)
        self._close(out, state, layout, uplink, update)
        followed.save(self.context.state)
        return out

    def _send(self) -> Message:
        """Answer a query: send the update that waits."""
        replica = Replica.load(self.context)
        if replica is None:
            return refusal(self.msg, "this node holds no model; it did not train")
        layout = self.layout_of(replica)
        uplink = Uplink.begin(self.context, self.announcement, self.codec, layout)
        if uplink.redelivery is not None:
            return Message(uplink.redelivery, reply_to=self.msg)
        # The server acknowledges a training reply before it asks: a rollback means that this is not the state it knows.
        if uplink.fresh or uplink.rolled_back or uplink.unsettled or not waits(uplink.state):
            return refusal(
                self.msg, "no update waits here: this node did not train in this round, or its state was lost"
            )
        state = dict(uplink.state)
        out = RecordDict()
        out[NODE_RECORD] = header_of(out, self.context, replica)
        update = Update(state["update"], layout)
        try:
            state = self.queried(state, layout, out, take_frame(self.msg.content, SUPPORT))
        except FedcompError as error:
            return refusal(self.msg, str(error))
        self._close(out, state, layout, uplink, update)
        return Message(out, reply_to=self.msg)

    def put_values(self, frame: Frame, state: State, out: RecordDict) -> None:
        """Write an update that leaves, and the buffers that waited with it in ``state``, the one before."""
        exact = state.get(_EXACT)
        put_reply_frame(out, UPDATE, frame)
        if exact is not None:
            put_reply_frame(out, EXACT, exact.tobytes())

    def _close(self, out: RecordDict, state: State, layout: Layout, uplink: Uplink, update: Update) -> None:
        """Complete the header and write the state, as the last act."""
        header = out.config_records[NODE_RECORD]
        header["sequence"] = self.announcement.sequence
        header["generation"] = uplink.generation
        header["rolled-back"] = uplink.rolled_back
        ratio = memory_ratio(self.codec, state, update)
        # While the update still waits, the memory is not yet what sending leaves behind.
        if ratio is not None and has_frame(out, UPDATE):
            header["memory"] = ratio
        uplink.commit(self.context, state, self.announcement, self.codec, layout, out)

    def layout_of(self, replica: Replica) -> Layout:
        """Return the layout of updates of the model this node holds."""
        return Layout.of(dict(replica.arrays), policy_from_config(self.announcement.policy))
