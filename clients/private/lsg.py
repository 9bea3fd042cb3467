"""The client half of low-rank plus sparse private updates: one short clipped vector a round, and nothing else.

What the app learnt is projected onto the server's carriers, the kept coordinates are taken, and one norm over all of
them is clipped: after the mask, or noise would be paid for mass that never leaves.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import reply_arrays
from fedcomp.clients.private.mod import discreet, wants_private
from fedcomp.errors import FedcompError, LayoutError
from fedcomp.flower.lsg import CARRIERS, HEADER, KEPT, UPDATE, LsgRequest, pack, take_carriers, take_kept
from fedcomp.flower.payload import keep_node, models, put_frame
from fedcomp.flower.protocol import refusal
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout
from fedcomp.privacy.bounds import clip_arrays

_OWN = (HEADER, CARRIERS, KEPT)


def lsg() -> ClientHalf:
    """Return the half that shortens the replies to training messages that ask for it; others pass through untouched.

    An update that is not finite is answered with an error, which costs a round that update and nothing else; what was
    wrong, there and in the app, stays on the node.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[lsg(), "private"])
    """

    def lsg_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        try:
            request = LsgRequest.find(msg)
        except FedcompError as error:
            return refusal(msg, str(error))
        if request is None:
            return call_next(msg, context)
        if msg.metadata.message_type.partition(".")[0] != "train" or not wants_private(msg.content):
            return refusal(msg, "a shortened update is part of a private training message, which this is not")
        try:
            found = models(msg.content)
            if len(found) != 1:
                raise LayoutError(f"the message holds {len(found)} ArrayRecords, expected one, the model")
            before = to_arrays(next(iter(found.values())))
            layout = Layout.of(before)
            plan = request.plan(layout)
            pairs = take_carriers(msg.content, plan)
            chosen = take_kept(msg.content, request, plan.short)
        except FedcompError as error:
            return refusal(msg, str(error))
        # The app gets the model and its configuration; the request is between the two halves.
        msg.content = RecordDict({name: record for name, record in msg.content.items() if name not in _OWN})

        def update() -> Message:
            reply = call_next(msg, context)
            if reply.has_error():
                return reply
            _, after = reply_arrays(reply.content, before)
            with np.errstate(over="ignore", invalid="ignore"):
                moved = layout.difference(after, before)
                short = np.concatenate(plan.project(moved, pairs))[chosen]
            # After the mask: noise is then paid for nothing but what leaves.
            (short,), _ = clip_arrays([short], request.clip)
            content = RecordDict()
            keep_node(reply.content, content)
            put_frame(content, UPDATE, pack(short))
            reply.content = content
            return reply

        return discreet(msg, update)

    return ClientHalf("lsg", lsg_mod, outside=("private",))
