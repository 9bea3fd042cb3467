"""The client half of strategies that announce a codec and are no programs yet: coded rounds, and private ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import CallNext
from fedcomp.clients.messages import (
    NOT_WITHOUT_NOISE,
    choose,
    find_announcement,
    header_of,
    learnt,
    memory_ratio,
    partition_of,
    plain_content,
    receive,
    reply_arrays,
)
from fedcomp.clients.personal import Followed, ease, kept_note, names_note
from fedcomp.clients.private.mod import discreet, only_update, wants_padding, wants_private
from fedcomp.codecs.base import padded as equally_long
from fedcomp.codecs.factors import at_model, wanted_by
from fedcomp.errors import FedcompError
from fedcomp.exact import encode_exact
from fedcomp.factors.collect import Captured, collecting
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, put_reply_frame
from fedcomp.flower.protocol import EXACT, RESYNC, STALE, UPDATE, refusal
from fedcomp.flower.records import to_arrays
from fedcomp.flower.state import UNSETTLED, StaleMessage, Uplink, asked_of
from fedcomp.layout import Layout, Update, Vector, policy_from_config
from fedcomp.privacy.local import asks_for_noise
from fedcomp.rng import Key
from fedcomp.systems.private.local import Local

FirstModel = Callable[[Message, Context], ArrayRecord]


def announced(
    msg: Message,
    context: Context,
    call_next: CallNext,
    accept: Collection[str] | None,
    visible: bool,
    first_model: FirstModel | None,
) -> Message:
    """Answer a message that announces a codec; any other one passes."""
    announcement = find_announcement(msg.content)
    if announcement is None:
        return call_next(msg, context)

    codec, unsupported = choose(announcement, announcement.codec, accept)
    downlink, no_downlink = choose(announcement, announcement.downlink, accept)
    if asks_for_noise(announcement.codec):
        # What was sent from this node is counted for messages of local privacy, which such a one would pass by.
        return refusal(msg, f"{NOT_WITHOUT_NOISE} ({unsupported or f'the system is {Local.ID!r}'})")
    if codec is not None and codec.exposes and not visible:
        unsupported = f"this client has not agreed to show the server {codec.exposes}, as {codec!r} does"
        codec = None
    unsupported = unsupported or no_downlink
    first = None if first_model is None else partial(first_model, msg, context)
    try:
        record, replica = receive(msg.content, announcement, downlink, context, first_model=first)
    except FedcompError as error:
        # The server sends the full model next time; training from a model it does not know would spoil the mean.
        return refusal(msg, f"{RESYNC}: {error}")

    private, padded = wants_private(msg.content), wants_padding(msg.content)
    layout: Layout | None = None
    uplink: Uplink | None = None
    asked = b""
    before: dict[str, NDArray[Any]] = {}
    if codec is not None or private:
        before = to_arrays(record, copy=False)
        # Without a codec, too, statistics stay where they are in a private round.
        cast = private or codec is None or not codec.lossless
        layout = Layout.of(before, policy_from_config(announcement.policy), cast_floats=cast)
    # Whatever starts with a state keeps it: memory of what was not sent, or adaptation to what was seen.
    if codec is not None and layout is not None and codec.init(layout):
        try:
            asked = asked_of(announcement, before, checked=replica is not None)
            uplink = Uplink.begin(context, announcement, codec, layout, asked)
        except StaleMessage as error:
            return refusal(msg, f"{STALE}: {error}")
        if uplink.repeated:
            log.info("round %d: answered before the server was restarted, and answered so again", announcement.round)
            content = uplink.repeat(context, announcement, replica)
            if replica is not None:
                replica.save(context)
            return Message(content, reply_to=msg)
        if uplink.redelivery is not None:
            # Already trained for this message: the frame that may have been consumed is the one to send again.
            return Message(uplink.redelivery, reply_to=msg)

    msg.content = plain_content(msg.content, announcement, record)

    def answer() -> Message:
        # The server makes the same key to verify the frame, so it holds only what both sides know.
        key = Key(announcement.seed, "uplink", announcement.round, partition_of(context))
        with collecting(None if codec is None else wanted_by(codec), key.u64()) as collected:
            reply = call_next(msg, context)
        if reply.has_error():
            return reply
        if private and layout is not None:
            reply.content = only_update(reply.content, before, layout)

        header = header_of(reply.content, context, replica, unsupported)
        content = RecordDict({k: v for k, v in reply.content.items() if k != NODE_RECORD})
        content[NODE_RECORD] = header

        followed: Followed | None = None
        if codec is not None and layout is not None:
            name, update, exact_arrays = learnt(
                content, before, layout, lossless=codec.lossless, record=announcement.record
            )
            given = uplink.state if uplink else codec.init(layout)
            owed = codec.residual(given)
            copies: dict[int, int] = {}
            notes = [UNSETTLED] if uplink is not None and uplink.unsettled else []
            # A lossless codec sends the model as it is; in a private round nothing is said of single tensors.
            if not codec.lossless and not private:
                followed = Followed.load(context.state, layout)
                copies, proven = followed.second_names(reply_arrays(content, before, name)[1], before)
                notes += [names_note(proven, layout)] if proven else []
                found = followed.judge(update, before)
                notes += [kept_note(found, followed)] if found else []
                update = ease(update, followed.kept, copies, owed)
            update = _with_outer(update, collected, before)
            notes += collected.notes
            for note in notes:
                log.info("round %d: %s", announcement.round, note)
            if notes and not private:
                header["remark"] = "; ".join(notes)
            frame, state = at_model(codec, lambda: before).encode(update, given, key)
            if padded:
                frame = equally_long(frame, codec, layout, key)
            header["record"] = name
            header["sequence"] = announcement.sequence
            unchanged = [] if private or codec.lossless or codec.sparse(layout) else _unchanged(update, owed)
            if unchanged:
                header["unchanged"] = unchanged
            if copies:
                header["copies"] = [number for pair in copies.items() for number in pair]
            if uplink is not None:
                header["generation"] = uplink.generation
                header["rolled-back"] = uplink.rolled_back
                # In a private round nothing of the data leaves beside the frame: no ratio, and no statistics below.
                ratio = None if private else memory_ratio(codec, state, update)
                if ratio is not None:
                    header["memory"] = ratio
            del content[name]
            put_reply_frame(content, UPDATE, frame)
            exact = None if private else encode_exact(exact_arrays, layout)
            if exact is not None:
                put_reply_frame(content, EXACT, exact)
            # As the last acts, after everything that can fail: with an exception in between the memory is as it was.
            if followed is not None:
                followed.save(context.state)
            if uplink is not None:
                uplink.commit(context, state, announcement, codec, layout, content, asked)
        if replica is not None:
            replica.save(context)
        reply.content = content
        return reply

    return discreet(msg, answer) if private else answer()


def _unchanged(update: Update, owed: Vector | None) -> list[int]:
    """Return the numbers of the tensors of which nothing is to be sent, as of frozen ones.

    A codec that turns or rounds all coordinates together brings something other than zero of them; the server leaves
    tensors alone that nobody has changed.
    """
    parts = [update.vector] if owed is None else [update.vector, owed]
    return [i for i, t in enumerate(update.layout.tensors) if not any(part[t.slice].any() for part in parts)]


def _with_outer(update: Update, collected: Captured, before: dict[str, NDArray[Any]]) -> Update:
    """Return the update with what training captured of it."""
    if not collected.outer:
        return update
    changes = {t.name: update.vector[t.slice] for t in update.layout.tensors}
    return Update(update.vector, update.layout, collected.explaining(changes, before))
