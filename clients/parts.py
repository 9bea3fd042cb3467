"""The client half of layer-by-layer rounds: the frame that compression made leaves in parts, one for each question.

It stands outside of compression, whose memory and whose stored reply know nothing of it: what is asked for again is
split again. Parts that were not fetched stay in ``context.state`` until the next training message.
"""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import partition_of
from fedcomp.flower.parts import PART, PartAnswer, PartRequest
from fedcomp.flower.payload import put_frame, put_node, put_reply_frame, take_frame
from fedcomp.flower.protocol import UPDATE, refusal
from fedcomp.flower.schema import SchemaError
from fedcomp.systems.factors import split


def by_layer() -> ClientHalf:
    """Return the client half of layer-by-layer rounds; other messages pass through it untouched."""
    return ClientHalf("by_layer", by_layer_mod, outside=("compression", "lsg", "private", "record_dp"))


def by_layer_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
    """Answer a question for a part; of a training message send the first one, and keep the others."""
    try:
        request = PartRequest.find(msg.content)
    except SchemaError as error:
        return refusal(msg, f"the question for a part is damaged: {error}")
    if request is None:
        return call_next(msg, context)
    if msg.metadata.message_type.startswith("query"):
        return _kept(msg, request, context)
    del msg.content[PartRequest.KEY]
    reply = call_next(msg, context)
    frame = None if reply.has_error() else take_frame(reply.content, UPDATE)
    if frame is None:
        return reply
    parts = split(frame, request.tensors)
    for name in [name for name in context.state if name.startswith(PART)]:
        del context.state[name]
    for number, part in enumerate(parts[1:], start=1):
        put_frame(context.state, f"{PART}{number}", part)
    answer = PartAnswer(0, len(parts), request.sequence)
    # What is kept belongs to this message alone.
    answer.put(context.state)
    put_reply_frame(reply.content, UPDATE, parts[0])
    answer.put(reply.content)
    return reply


def _kept(msg: Message, request: PartRequest, context: Context) -> Message:
    try:
        known = PartAnswer.find(context.state)
    except SchemaError:
        known = None
    part = take_frame(context.state, f"{PART}{request.part}")
    if known is None or known.sequence != request.sequence or part is None:
        return refusal(msg, f"this node has no part {request.part} of message {request.sequence}")
    content = RecordDict()
    put_node(content, partition_of(context))
    put_reply_frame(content, UPDATE, part)
    PartAnswer(request.part, known.parts, known.sequence).put(content)
    return Message(content, reply_to=msg)
