"""The client half of ScaleCom: one mod that keeps what was learnt until the server says on which support to send it.

Messages of servers that do not share supports pass on to ``compression()``, so one app serves both kinds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import (
    choose,
    find_announcement,
    header_of,
    learnt,
    memory_ratio,
    partition_of,
    plain_content,
    receive,
)
from fedcomp.codecs import Codec, State
from fedcomp.codecs.scalecom import (
    ScaleCom,
    Supports,
    held_support,
    open_support,
    support_frame,
    support_id_of,
)
from fedcomp.codecs.waiting import waits
from fedcomp.errors import FedcompError, StateError
from fedcomp.exact import encode_exact
from fedcomp.flower.payload import NODE_RECORD, put_frame, take_frame
from fedcomp.flower.protocol import (
    EXACT,
    LEADS,
    LOOKS_AHEAD,
    NEXT_SUPPORT,
    PROBE,
    RESYNC,
    STALE,
    SUPPORT,
    UPDATE,
    Announcement,
    refusal,
)
from fedcomp.flower.records import to_arrays
from fedcomp.flower.state import Replica, StaleMessage, Uplink, remembered
from fedcomp.layout import Layout, Update, policy_from_config
from fedcomp.rng import Key
from fedcomp.versions import CodecOf, Step
from fedcomp.wire import Frame

_EXACT = "exact"


def shared_support(accept: Collection[str] | None = None) -> ClientHalf:
    """Return the client half of ScaleCom. Messages of servers that do not share supports pass through untouched.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[shared_support()])
    """

    def shared_support_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        announcement = find_announcement(msg.content)
        codec = None if announcement is None else _codec(announcement, accept)
        if announcement is None or codec is None:
            return call_next(msg, context)
        try:
            return _Exchange(msg, context, announcement, codec).answer(call_next)
        except StaleMessage as error:
            return refusal(msg, f"{STALE}: {error}")

    return ClientHalf("shared_support", shared_support_mod, outside=("compression", "lsg", "private", "record_dp"))


def _codec(announcement: Announcement, accept: Collection[str] | None) -> ScaleCom | None:
    """Return the codec when the message is one of a shared support, else None: it is another mod's matter then."""
    # Evaluation announces no uplink codec; its steps are still those of a shared support.
    for config in (announcement.codec, announcement.downlink):
        codec, _ = choose(announcement, config, accept, phases=2)
        if isinstance(codec, ScaleCom):
            return codec
    return None


class _Exchange:
    """One message of a shared-support server, and what this node answers."""

    def __init__(self, msg: Message, context: Context, announcement: Announcement, codec: ScaleCom) -> None:
        self.msg = msg
        self.context = context
        self.announcement = announcement
        self.codec = codec
        self.key = Key(announcement.seed, "uplink", announcement.round, partition_of(context))

    def answer(self, call_next: CallNext) -> Message:
        """Train, evaluate, or send on the support."""
        kind = self.msg.metadata.message_type.partition(".")[0]
        # A query carries no model: the update that waits was made from the one in the training message.
        if kind == "query":
            return self._send()
        try:
            record, replica = receive(
                self.msg.content, self.announcement, self.codec, self.context, lambda layout: self._codec_of(layout)
            )
        except FedcompError as error:
            return refusal(self.msg, f"{RESYNC}: {error}")
        # receive() returns a replica whenever it was given a codec.
        assert replica is not None
        before = to_arrays(record)
        layout = self._layout(replica)
        uplink: Uplink | None = None
        block = take_frame(self.msg.content, SUPPORT)
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
            content = self._learn(reply.content, before, layout, uplink, block, replica)
        replica.save(self.context)
        reply.content = content
        return reply

    def _learn(
        self, content: RecordDict, before: dict, layout: Layout, uplink: Uplink, block: Frame | None, replica: Replica
    ) -> RecordDict:
        """Return the reply to a training message: all of it but the model, which waits or leaves as values."""
        name, update, exact = learnt(content, before, layout)
        state = self.codec.begin(update, uplink.state, self.key)
        out = RecordDict({k: v for k, v in content.items() if k not in (NODE_RECORD, name)})
        header = out[NODE_RECORD] = header_of(content, self.context, replica)
        header["record"] = name
        self._probe(state, layout, out)
        frame = encode_exact(exact, layout)
        if frame is not None:
            # Buffers leave together with the values: until the support arrives they wait in the state.
            state[_EXACT] = np.frombuffer(frame, np.uint8)
        if block is not None:
            # The support of an earlier leader: values leave at once, and the next support is chosen from what is left.
            supports = open_support(block, self.codec, layout)
            state = self._values(state, supports, layout, out)
        elif self.announcement.leader & LEADS:
            state = self._lead(state, layout, out)
        self._close(out, state, layout, uplink, update)
        return out

    def _send(self) -> Message:
        """Answer a query: the waiting update's values on the support of the message, or on this node's own choice."""
        replica = Replica.load(self.context)
        if replica is None:
            return refusal(self.msg, "this node holds no model; it did not train")
        layout = self._layout(replica)
        uplink = Uplink.begin(self.context, self.announcement, self.codec, layout)
        if uplink.redelivery is not None:
            return Message(uplink.redelivery, reply_to=self.msg)
        # The server acknowledges a training reply before it asks: a rollback means that this is not the state it knows.
        if uplink.fresh or uplink.rolled_back or not waits(uplink.state):
            return refusal(
                self.msg, "no update waits here: this node did not train in this round, or its state was lost"
            )
        state = dict(uplink.state)
        out = RecordDict()
        out[NODE_RECORD] = header_of(out, self.context, replica)
        update = Update(state["update"], layout)
        if self.announcement.leader & LEADS:
            state = self._lead(state, layout, out)
        else:
            block = take_frame(self.msg.content, SUPPORT)
            if block is None:
                return refusal(self.msg, "the query holds no index block")
            state = self._values(state, open_support(block, self.codec, layout), layout, out)
        self._close(out, state, layout, uplink, update)
        return Message(out, reply_to=self.msg)

    def _lead(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Choose the support, send on it; return the state after it."""
        supports = self.codec.choose(state, layout, self.key)
        put_frame(out, SUPPORT, support_frame(supports, self.codec, layout))
        return self._values(state, supports, layout, out)

    def _values(self, state: State, supports: Supports, layout: Layout, out: RecordDict) -> State:
        exact = state.pop(_EXACT, None)
        frame, after = self.codec.send(state, supports, self.announcement.support, layout, self.key)
        put_frame(out, UPDATE, frame)
        if exact is not None:
            put_frame(out, EXACT, exact.tobytes())
        if self.announcement.leader & LOOKS_AHEAD:
            # From what sending leaves in the memory, which is what the next round begins with.
            ahead = self.codec.choose(after, layout, self.key)
            put_frame(out, NEXT_SUPPORT, support_frame(ahead, self.codec, layout))
        return after

    def _close(self, out: RecordDict, state: State, layout: Layout, uplink: Uplink, update: Update) -> None:
        """Complete the header and write the state, as the last act."""
        header = out.config_records[NODE_RECORD]
        header["sequence"] = self.announcement.sequence
        header["generation"] = uplink.generation
        header["rolled-back"] = uplink.rolled_back
        ratio = memory_ratio(self.codec, state, update)
        # While the update still waits, the memory is not yet what sending leaves behind.
        if ratio is not None and UPDATE in out:
            header["memory"] = ratio
        uplink.commit(self.context, state, self.announcement, self.codec, layout, out)

    def _probe(self, state: State, layout: Layout, out: RecordDict) -> None:
        """Add the samples of memory and p from which the server computes similarity figures, if it asks for them."""
        codec = self.codec.sampler
        if codec is None:
            return
        key = self.key.at(purpose="probe")
        for name, vector in (("memory", state["memory"]), ("sum", self.codec.total(state, layout))):
            frame, _ = codec.encode(Update(vector, layout), codec.init(layout), key)
            put_frame(out, f"{PROBE}.{name}", frame)

    def _layout(self, replica: Replica) -> Layout:
        return Layout.of(dict(replica.arrays), policy_from_config(self.announcement.policy))

    def _codec_of(self, layout: Layout) -> CodecOf:
        """Return what reads a step: the mean on the support it came with, or on the one of this node's last frame."""

        def find(step: Step) -> Codec:
            wanted = support_id_of(step.frame, self.codec, layout)
            # A model without compressible tensors: its step is dense, and lies on no support.
            if wanted is None:
                return self.codec.mean((), 0)
            block = step.support
            if block is None:
                stored = {k: a for k in ("support", "support-id") if (a := remembered(self.context, k)) is not None}
                held = held_support(stored)
                if held is None or held[0] != wanted:
                    raise StateError(f"this node does not hold the support {wanted} of step {step.version}")
                block = held[1]
            # The step's own round may have been a dense one.
            return self.codec.mean(open_support(block, replace(self.codec, dense=True), layout), wanted)

        return find
