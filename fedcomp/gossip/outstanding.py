"""What is on the way: instructions that were issued and not answered, and the messages that wait behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedcomp.errors import StateError
from fedcomp.gossip.base import GossipMessage, View
from fedcomp.gossip.mailbox import Blobs, Mailbox, Pending, numbered, unnumbered
from fedcomp.gossip.protocol import Action, Instruction, Start
from fedcomp.plain import Count, from_plain
from fedcomp.stateful import Stateful, StatePart


@dataclass(slots=True)
class Open:
    """An instruction that has not been answered."""

    instruction: Instruction
    pending: tuple[Pending, ...]
    attempts: int = 0
    error: str = ""


class Outstanding(Stateful):
    """The open instructions of one run, at most one to a node, and the mailbox.

    Parameters
    ----------
    n : int
        Vertices of the graph.
    returns : bool
        Whether senders get back what cannot be delivered: :class:`~fedcomp.gossip.mailbox.Mailbox`.

    Attributes
    ----------
    open : dict of int to Open
        By node.
    mailbox : Mailbox
        What waits to be handed out with the next instructions.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_serials": list[Count],
        # One part: the same bytes may be in an open instruction and in several boxes, and are stored once.
        "messages": StatePart(lambda held: held._save(), lambda held, state: held._load(state)),
    }

    def __init__(self, n: int, *, returns: bool) -> None:
        self.open: dict[int, Open] = {}
        self.mailbox = Mailbox(n, returns=returns)
        self._serials = [0] * n

    def issue(self, session: str, epoch: int, action: Action, view: View, start: Start) -> None:
        """Open an instruction with all that waits for its node."""
        node = view.node
        # Never reused, also after a rejoin: a late copy of an older instruction is then recognised by its number.
        self._serials[node] += 1
        # From here these messages are in the open instruction only: a message is never in two places.
        pending, returned = self.mailbox.take(node)
        inbox = tuple(item.message for item in pending)
        instruction = Instruction(session, self._serials[node], epoch, action, view, inbox, returned, start)
        self.open[node] = Open(instruction, pending)

    def serial(self, node: int) -> int:
        """Return the number of the last instruction to ``node``; 0 before the first."""
        return self._serials[node]

    def awaited(self, node: int) -> bool:
        """Whether messages of a node that has left may still come back to it."""
        mailbox = self.mailbox
        if not mailbox.returns:
            return False
        if mailbox.look_returned(node) or mailbox.messages_of(node):
            return True
        # Messages that were handed out but not acknowledged: they come back if their receiver is given up.
        return any(item.message.source == node for entry in self.open.values() for item in entry.pending)

    def ask(self) -> dict[int, Instruction]:
        """Return the open instructions by node, ascending; counts as an attempt of each."""
        for entry in self.open.values():
            entry.attempts += 1
        return {node: self.open[node].instruction for node in sorted(self.open)}

    def handed_out(self) -> Iterable[GossipMessage]:
        """Return the messages in open instructions, those that come back to their senders included."""
        for entry in self.open.values():
            yield from (*entry.instruction.inbox, *entry.instruction.returned)

    def _save(self) -> dict[str, Any]:
        blobs = Blobs()
        entries = [
            [numbered(entry.instruction, blobs), [p.life for p in entry.pending], entry.attempts, entry.error]
            for _, entry in sorted(self.open.items())
        ]
        return {"open": entries, "mailbox": self.mailbox.get_state(blobs), "blobs": blobs.blobs}

    def _load(self, state: Any) -> None:
        found = from_plain(dict[str, Any], state, "messages")
        try:
            blobs, opened = from_plain(list[bytes], found["blobs"], "blobs"), {}
            for parts, lives, attempts, error in found["open"]:
                instruction = unnumbered(parts, blobs)
                pending = tuple(Pending(message, life) for message, life in zip(instruction.inbox, lives, strict=True))
                opened[instruction.node] = Open(instruction, pending, attempts, error)
            self.mailbox.set_state(found["mailbox"], blobs)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"this is not the state of a relay: {type(error).__name__}: {error}") from error
        self.open = opened
