"""Messages between being sent and being delivered, and which edges need whole estimates. No message is opened.

A message is in one place at a time: in its receiver's box, in an open instruction, or with the messages that go back to
its sender. Of one edge messages keep the order they were sent in, on the way there and on the way back; what goes back
are always the last ones of their edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcomp.gossip.base import GossipMessage
from fedcomp.gossip.protocol import Instruction, Parts


@dataclass(frozen=True, slots=True)
class Pending:
    """A message under way, and in which of its sender's lives it was sent: a node that lost its memory lives again."""

    message: GossipMessage
    life: int


class Blobs:
    """Byte strings by number, each distinct one once: a state refers to messages by these numbers."""

    def __init__(self, blobs: Iterable[bytes] = ()) -> None:
        self.blobs = list(blobs)
        self._numbers = {blob: number for number, blob in enumerate(self.blobs)}

    def put(self, blob: bytes) -> int:
        """Return the number of ``blob``."""
        # Stored once however many boxes it is in: a broadcast puts the same bytes into every neighbour's.
        number = self._numbers.setdefault(blob, len(self.blobs))
        if number == len(self.blobs):
            self.blobs.append(blob)
        return number


def numbered(instruction: Instruction, blobs: Blobs) -> Parts:
    """Return an instruction as plain data: its parts, with the messages as numbers of ``blobs``."""
    parts = instruction.to_parts()
    return parts | {name: [blobs.put(payload) for payload in parts[name]] for name in ("inbox", "returned")}


def unnumbered(parts: Mapping[str, Any], blobs: Sequence[bytes]) -> Instruction:
    """Recreate an instruction from :func:`numbered`."""
    given = {name: [blobs[number] for number in parts[name]] for name in ("inbox", "returned")}
    return Instruction.from_parts({**parts, **given})


class Mailbox:
    """The boxes of ``n`` nodes.

    Parameters
    ----------
    n : int
    returns : bool
        Whether senders get back what cannot be delivered; otherwise it is forgotten.

    Attributes
    ----------
    lives : list of int
        How many times each node was given up or has left.
    lost : int
        Messages that could go neither to their receivers nor back, since their senders' lives had ended too.
    """

    def __init__(self, n: int, *, returns: bool = True) -> None:
        self.returns = returns
        self.lives = [0] * n
        self.lost = 0
        self._boxes: list[list[Pending]] = [[] for _ in range(n)]
        self._returned: list[list[GossipMessage]] = [[] for _ in range(n)]
        self._broken: dict[int, set[int]] = {}

    def waits(self, node: int) -> bool:
        """Whether there is anything for ``node``: an inbox, or own messages that come back."""
        return bool(self._boxes[node] or self._returned[node])

    def messages(self) -> Iterator[GossipMessage]:
        """Yield all that is here, on its way there and on its way back."""
        for box, returned in zip(self._boxes, self._returned, strict=True):
            yield from (pending.message for pending in box)
            yield from returned

    def messages_of(self, node: int) -> int:
        """Return how many messages of ``node``'s present life are in boxes."""
        life = self.lives[node]
        return sum(p.message.source == node and p.life == life for box in self._boxes for p in box)

    def put(self, message: GossipMessage, *, receiving: bool, whole: bool, dense: bool = False) -> bool:
        """Accept a message; return whether it is on its way. Otherwise it goes back at once.

        Parameters
        ----------
        receiving : bool
            Whether the destination takes messages.
        whole : bool
            Whether it carries the whole estimate, so that it mends a broken edge. Along a broken edge nothing else
            goes: the receiver could not use it.
        dense : bool
            Whether it is of a closing iteration. Such a message concerns no estimate: it goes along a broken edge, and
            mends none.
        """
        broken = self._broken.get(message.source)
        if broken is not None and message.destination in broken:
            if whole and receiving and not dense:
                broken.discard(message.destination)
            receiving = receiving and (whole or dense)
        if receiving:
            self._boxes[message.destination].append(Pending(message, self.lives[message.source]))
        elif self.returns:
            self._returned[message.source].append(message)
        return receiving

    def look(self, node: int) -> tuple[Pending, ...]:
        """Return what waits for ``node``: by source, of one source in the order sent."""
        # sorted is stable, so messages of one source keep the order they were sent in.
        return tuple(sorted(self._boxes[node], key=_source))

    def look_returned(self, node: int) -> tuple[GossipMessage, ...]:
        """Return own messages that come back to ``node``."""
        return tuple(self._returned[node])

    def take(self, node: int) -> tuple[tuple[Pending, ...], tuple[GossipMessage, ...]]:
        """Return what waits for ``node`` and what comes back to it, which gets both now."""
        found = self.look(node), self.look_returned(node)
        self._boxes[node], self._returned[node] = [], []
        return found

    def refuse(self, pending: Iterable[Pending], sources: Iterable[int], node: int) -> list[GossipMessage]:
        """Send back what ``node`` could not apply, those of ``pending`` that are from ``sources``, and whatever else of
        theirs waits for it: it follows the former. Their edges need whole estimates. Return these messages."""
        # Nothing of these sources can be applied before their whole estimates have come: the edges count as broken.
        refused = set(sources)
        for source in refused:
            self._broken.setdefault(source, set()).add(node)
        # pending first: it was given out before what now waits came in.
        back = [p for p in (*pending, *self._boxes[node]) if p.message.source in refused]
        self._boxes[node] = [p for p in self._boxes[node] if p.message.source not in refused]
        return self._send_back(back)

    def end(self, node: int, pending: Iterable[Pending]) -> list[GossipMessage]:
        """End a life of ``node``: ``pending``, which it had been given, and its box go back; what comes back to itself
        is lost with it. Return the messages that were not delivered."""
        self.lost += len(self._returned[node])
        self._returned[node] = []
        # After this its own messages to others stay good, but cannot come back.
        self.lives[node] += 1
        back = [*pending, *self._boxes[node]]
        self._boxes[node] = []
        return self._send_back(back)

    def _send_back(self, pending: Sequence[Pending]) -> list[GossipMessage]:
        for item in pending if self.returns else ():
            source = item.message.source
            # A new life never sent them: its counters and estimates know nothing of these messages.
            if item.life == self.lives[source]:
                self._returned[source].append(item.message)
            else:
                self.lost += 1
        return [item.message for item in pending]

    def clear(self) -> list[GossipMessage]:
        """Empty all boxes of a run whose nodes all restart; return what was in them."""
        # The boxes are all there is: in a run whose nodes restart nothing goes back to its sender.
        messages = [item.message for box in self._boxes for item in box]
        self._boxes = [[] for _ in self._boxes]
        return messages

    def break_edges(self, node: int, others: Iterable[int]) -> None:
        """Note that ``node`` and ``others`` know nothing of each other: whole estimates are needed both ways."""
        # Replaced: what a former life of the node had to mend is covered, since every member is among the others.
        self._broken[node] = set(others)
        for other in self._broken[node]:
            self._broken.setdefault(other, set()).add(node)

    def broken(self, source: int) -> set[int]:
        """Return to whom ``source`` must send whole estimates."""
        return self._broken.get(source, set())

    def get_state(self, blobs: Blobs) -> dict[str, Any]:
        """Return everything as plain data; messages as numbers of ``blobs``."""
        return {
            "lives": list(self.lives),
            "lost": self.lost,
            "boxes": [[[p.message.source, p.life, blobs.put(p.message.payload)] for p in box] for box in self._boxes],
            "returned": [
                [[message.destination, blobs.put(message.payload)] for message in messages]
                for messages in self._returned
            ],
            "broken": [[source, sorted(to)] for source, to in sorted(self._broken.items()) if to],
        }

    def set_state(self, state: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Go on from :meth:`get_state`."""
        self.lives = [int(life) for life in state["lives"]]
        self.lost = int(state["lost"])
        self._boxes = [
            [Pending(GossipMessage(source, node, blobs[number]), life) for source, life, number in box]
            for node, box in enumerate(state["boxes"])
        ]
        self._returned = [
            [GossipMessage(node, destination, blobs[number]) for destination, number in messages]
            for node, messages in enumerate(state["returned"])
        ]
        self._broken = {source: set(to) for source, to in state["broken"]}


def _source(item: Pending) -> int:
    return item.message.source
