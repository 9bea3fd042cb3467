"""The client half of TopAgg: one vote per round.

The vote itself is cast by ``compression()`` with the codec that the server announces; ``private()`` keeps metrics and
statistics on the node. What is added here is a guard: a client made for private votes answers nothing else.
"""

from __future__ import annotations

from flwr.app import Context, Message

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import asked_config
from fedcomp.clients.private.mod import wants_private
from fedcomp.errors import FedcompError
from fedcomp.flower.asks import system_asked
from fedcomp.flower.protocol import refusal
from fedcomp.systems.pair import Pair

BALLOT = "topagg"
"""Id of the codec of votes."""


def votes_only() -> ClientHalf:
    """Return a half for clients that take part in private votes only.

    It refuses every message that does not announce a private vote: training without privacy or with another codec, and
    evaluation, whose metrics would leave without noise. The refusal is an error reply, sent before the app sees the
    message, and costs a private round only that vote. Queries of no system pass to the app (the generic app answers
    with its partition). Without this half the server decides which messages the app answers.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), votes_only(), only=["compression", "private"])
    """
    inner = ("local_privacy", "record_dp", "compression", "private")
    return ClientHalf("votes_only", _guard, outside=inner, needs=("compression", "private"))


def _guard(msg: Message, context: Context, call_next: CallNext) -> Message:
    if msg.metadata.message_type.partition(".")[0] == "query" and not system_asked(msg.content):
        return call_next(msg, context)
    reason = _why_not(msg)
    if reason:
        text = f"this client only answers requests for private votes (codec {BALLOT!r}): {reason}"
        return refusal(msg, text)
    return call_next(msg, context)


def _why_not(msg: Message) -> str:
    """Return why ``msg`` asks for anything but a private vote, empty when it does not."""
    kind = msg.metadata.message_type
    if kind != "train":
        return f"a message of type {kind!r} came"
    try:
        # What cannot be read is refused: without it the app would send its whole update.
        codec = asked_config(msg.content)
    except FedcompError as error:
        return f"the request cannot be read ({error})"
    if codec is not None and codec.get("id") == Pair.ID:
        codec = codec.get("codec", {})
    if codec is None:
        return "no codec is announced, so the message asks for a dense update"
    if codec.get("id") != BALLOT:
        return f"the codec announced is {codec.get('id')!r}"
    if not wants_private(msg.content):
        return "the round is not private"
    return ""
