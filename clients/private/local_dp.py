"""The client's own limits in local differential privacy: the least noise and the largest number of messages.

``client(app, local_privacy(LocalPolicy(noise_multiplier=4.0, releases=20)))`` is an app that needs no trust in its
server: whatever the server announces, nothing leaves but frames of a codec that privatises with that much noise of this
node's own, and no more than twenty of them. What has left is a file in the node's state folder, on the disk before the
message leaves: Flower's ``context.state`` is a new one in every run, which the server starts.

Without a policy the mod enforces what the server announces, for which the context is good enough;
:class:`fedcomp.privacy.local.Privatise` names a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from flwr.app import ConfigRecord, Context, Message

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import made
from fedcomp.clients.private.mod import discreet
from fedcomp.clients.private.node_ledger import file_of_node
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.asks import AskHead, data_in, find_ask
from fedcomp.flower.folder import FolderError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import FRAME, NODE_RECORD, frames
from fedcomp.flower.protocol import refusal
from fedcomp.flower.schema import OtherVersion
from fedcomp.privacy.errors import PrivacyLedgerError
from fedcomp.privacy.journal import Journal
from fedcomp.privacy.local import LocalPolicy
from fedcomp.systems import get_system
from fedcomp.systems.private.local import Local

_RECORD: Final = "fedcomp.local-privacy"
_HEADER: Final = {"format": "fedcomp.private-messages", "version": 1}


def local_privacy(policy: LocalPolicy | None = None, *, state_dir: Path | None = None) -> ClientHalf:
    """Return the half that counts private messages and refuses what a policy does not allow.

    Only the coding mod may wrap it, because the output of other outer mods would not be checked.

    Parameters
    ----------
    policy : LocalPolicy, optional
        With a policy, only training messages whose codec satisfies it are answered. Evaluation is refused, because its
        metrics would leave without noise. Sent messages are counted in the node's state folder (``state-dir`` in its
        configuration, ``--state-dir`` of ``fedcomp node``), over all runs; without one every message is refused.
    state_dir : Path, optional
        An absolute path, for nodes whose configuration names no folder: those of a simulation. A file for each
        partition.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), local_privacy(LocalPolicy(noise_multiplier=4.0, releases=20)))
    """

    def local_privacy_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        # What this node will really encode with decides, not what the message says of itself.
        head = _asked(msg)
        system = None if head is None else made(head.system, get_system, None)[0]
        local = system if isinstance(system, Local) else None
        if policy is not None:
            codec = None if local is None else local.codec
            reason = policy.refuses(codec) if msg.metadata.message_type == "train" else _OTHER
            if reason:
                return refusal(msg, reason)
        if head is None or local is None:
            # What asks for noise and is no such message is refused within, by whoever would have to make it.
            return call_next(msg, context)
        # The server's limit is for its run, 0 for none; the node's own is for all runs.
        limit = local.privatise.releases
        books: list[tuple[_Book, int]] = [(_InContext(context), limit)] if limit else []
        with contextlib.ExitStack() as stack:
            if policy is not None:
                try:
                    book = stack.enter_context(_InFile.opened(context, state_dir))
                except (ConfigError, FolderError, PrivacyLedgerError) as error:
                    log.error("%s", error)
                    return refusal(msg, str(error))
                books.append((book, policy.releases))
            return _answer(msg, context, call_next, head, books)

    inner = ("record_dp", "compression", "private")
    return ClientHalf("local_privacy", local_privacy_mod, outside=inner, needs=("compression",))


def _asked(msg: Message) -> AskHead | None:
    try:
        return find_ask(msg.content)
    except OtherVersion:
        return None


_OTHER: Final = "this client answers private training messages only"


def _answer(
    msg: Message,
    context: Context,
    call_next: CallNext,
    head: AskHead,
    books: list[tuple[_Book, int]],
) -> Message:
    """Answer a private message where every book has room for it, and write it into all of them."""
    this = (head.session, head.sequence)
    spent = [book.last for book, limit in books if book.last.count >= limit]
    over = "".join(f"this client has sent {last.count} private messages and sends no more" for last in spent[-1:])
    # At the limit only a message that is delivered again is answered, with the frame that left before.
    if any(last.message != this for last in spent):
        return refusal(msg, over)
    reply = discreet(msg, lambda: call_next(msg, context))
    if reply.has_error():
        return reply
    frame = data_in(reply.content, FRAME).get("values")
    beside = {*reply.content, *frames(reply.content)} - {FRAME + "values", NODE_RECORD}
    if frame is None or beside:
        return refusal(msg, "this client sends only privatised updates, but its app's mods produced something else")
    digest = hashlib.sha256(frame).digest()
    # Another frame for the same message is another release: the memory that held the first one is gone.
    if any(last.frame != digest for last in spent):
        return refusal(msg, over)
    for book, _ in books:
        # Answered from memory: the frame that left before is not a new release.
        if book.last.frame != digest:
            try:
                book.add(_Sent(book.last.count + 1, this, digest))
            except PrivacyLedgerError as error:
                log.error("%s", error)
                return refusal(msg, str(error))
    return reply


@dataclass(frozen=True)
class _Sent:
    """What left this node: how many messages, and which message the last one answered with which frame."""

    count: int = 0
    message: tuple[bytes, int] = (b"", 0)
    frame: bytes = b""


class _Book(Protocol):
    """Where it is written down what left."""

    last: _Sent

    def add(self, sent: _Sent) -> None:
        """Write down one more message, before it leaves."""


class _InContext:
    """What left in this run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.last = _Sent()
        record = context.state.config_records.get(_RECORD)
        if record is None:
            return
        count, session, sequence, frame = (record.get(name) for name in ("releases", "session", "sequence", "frame"))
        if not (type(count) is type(sequence) is int and isinstance(session, bytes) and isinstance(frame, bytes)):
            raise StateError("this node's count of private messages is damaged; what it has spent is unknown")
        self.last = _Sent(count, (session, sequence), frame)

    def add(self, sent: _Sent) -> None:
        session, sequence = sent.message
        self._context.state[_RECORD] = ConfigRecord(
            {"releases": sent.count, "session": session, "sequence": sequence, "frame": sent.frame}
        )
        self.last = sent


class _InFile:
    """What left this node in its life: a line of a file for each message."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        if journal.header is None:
            journal.begin(_HEADER)
        try:
            if journal.header != _HEADER:
                raise ValueError(f"its header is {journal.header}")
            self.last = _Sent(len(journal.entries), *self._read(journal.entries[-1])) if journal.entries else _Sent()
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyLedgerError(
                f"{journal.path} holds no private messages of this release ({error!r}); what was sent is unknown"
            ) from error

    @classmethod
    @contextlib.contextmanager
    def opened(cls, context: Context, state_dir: Path | None) -> Iterator[_InFile]:
        """Hold the node's file, which a second process of the node cannot open meanwhile.

        Raises
        ------
        ConfigError, FolderError, PrivacyLedgerError
            When there is no folder, or the file cannot be used.
        """
        path = file_of_node(context, "messages", state_dir)
        if path is None:
            raise ConfigError(
                "this node limits its private messages but has no place to count them over runs and restarts, so it "
                "sends none: start it with --state-dir DIR (state-dir='/absolute/folder' in its node configuration); "
                "in a simulation write local_privacy(policy, state_dir=Path('/absolute/folder'))"
            )
        with contextlib.closing(Journal(path)) as journal:
            yield cls(journal)

    @staticmethod
    def _read(entry: dict[str, Any]) -> tuple[tuple[bytes, int], bytes]:
        return (bytes.fromhex(entry["session"]), int(entry["sequence"])), bytes.fromhex(entry["frame"])

    def add(self, sent: _Sent) -> None:
        session, sequence = sent.message
        self._journal.append({"session": session.hex(), "sequence": sequence, "frame": sent.frame.hex()})
        self.last = sent
