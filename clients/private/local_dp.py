"""The client's own word in local differential privacy: how much noise at least, how many messages at most.

``client(app, local_privacy(LocalPolicy(noise_multiplier=4.0, releases=20)))`` is an app that needs no trust in its
server: whatever the server announces, nothing leaves but frames of a codec that privatises with that much noise of this
node's own, and no more than twenty of them. The count is kept in ``context.state``, apart from the codec's memory,
which restarts whenever the server says so.

Without a policy the mod enforces what the server announces; :class:`fedcomp.privacy.local.Privatise` names a limit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from flwr.app import ConfigRecord, Context, Message

from fedcomp.clients.half import WAITING, CallNext, ClientHalf
from fedcomp.clients.messages import NOT_WITHOUT_NOISE, choose, find_announcement
from fedcomp.clients.private.mod import discreet
from fedcomp.errors import StateError
from fedcomp.flower.payload import NODE_RECORD, frames, take_frame
from fedcomp.flower.protocol import UPDATE, refusal
from fedcomp.privacy.local import LocalPolicy, asks_for_noise, privatised

_RECORD: Final = "fedcomp.local-privacy"


def local_privacy(policy: LocalPolicy | None = None) -> ClientHalf:
    """Return the half that counts private messages and refuses what a policy does not allow.

    Only the coding mod is outside of it: what another mod made there would not be checked.

    Parameters
    ----------
    policy : LocalPolicy, optional
        With one, every message but a training message with a codec that satisfies it is refused: evaluation, too, whose
        metrics would leave without noise.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), local_privacy(LocalPolicy(noise_multiplier=4.0, releases=20)))
    """

    def local_privacy_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        # What this node will really encode with decides, not what the message says of itself.
        announcement = find_announcement(msg.content)
        codec = None if announcement is None else choose(announcement, announcement.codec, None)[0]
        found = None if codec is None else privatised(codec)
        if policy is not None:
            reason = policy.refuses(codec) if msg.metadata.message_type == "train" else _OTHER
            if reason:
                return refusal(msg, reason)
        if found is None or announcement is None:
            if announcement is not None and asks_for_noise(announcement.codec):
                return refusal(msg, NOT_WITHOUT_NOISE)
            return call_next(msg, context)
        # The server's limit and the node's own, whichever is less; 0 of the server's is none.
        limits = [limit for limit in (found.releases, policy.releases if policy else 0) if limit]
        held = _Sent.read(context)
        this = (announcement.session, announcement.sequence)
        spent = bool(limits) and held.count >= min(limits)
        over = f"this client has sent {held.count} private messages and sends no more"
        # At the limit only a message that is delivered again is answered, with the frame that left before.
        if spent and this != held.message:
            return refusal(msg, over)
        reply = discreet(msg, lambda: call_next(msg, context))
        if reply.has_error():
            return reply
        frame = take_frame(reply.content, UPDATE)
        beside = {*reply.content, *frames(reply.content)} - {UPDATE, NODE_RECORD}
        if frame is None or beside:
            return refusal(msg, "this client sends privatised updates only, and its app's mods made something else")
        digest = hashlib.sha256(frame).digest()
        # Answered from memory: the frame that left before is not a new release.
        if digest == held.frame:
            return reply
        # Another frame for the same message is another release: the memory that held the first one is gone.
        if spent:
            return refusal(msg, over)
        _Sent(held.count + 1, this, digest).write(context)
        return reply

    inner = (*WAITING, "compression", "lsg", "private", "record_dp")
    return ClientHalf("local_privacy", local_privacy_mod, outside=inner, needs=("compression",))


_OTHER: Final = "this client answers private training messages only"


@dataclass(frozen=True)
class _Sent:
    """What left this node: how many messages, and which message the last one answered with which frame."""

    count: int = 0
    message: tuple[bytes, int] = (b"", 0)
    frame: bytes = b""

    @classmethod
    def read(cls, context: Context) -> _Sent:
        record = context.state.config_records.get(_RECORD)
        if record is None:
            return cls()
        count, session, sequence, frame = (record.get(name) for name in ("releases", "session", "sequence", "frame"))
        if not (type(count) is type(sequence) is int and isinstance(session, bytes) and isinstance(frame, bytes)):
            raise StateError("this node's count of private messages is damaged; what it has spent is unknown")
        return cls(count, (session, sequence), frame)

    def write(self, context: Context) -> None:
        session, sequence = self.message
        context.state[_RECORD] = ConfigRecord(
            {"releases": self.count, "session": session, "sequence": sequence, "frame": self.frame}
        )
