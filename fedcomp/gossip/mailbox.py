"""Letters between being posted and being delivered, and which edges need whole estimates. No letter is opened.

A letter is in one place at a time: in its receiver's box, in an open instruction, or with the letters that go back to
its sender. Of one edge letters keep the order they were sent in, on the way there and on the way back; what goes back
are always the last ones of their edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcomp.gossip.base import Letter
from fedcomp.gossip.protocol import Instruction, Parts


@dataclass(frozen=True, slots=True)
class Parcel:
    """A letter under way, and in which of its sender's lives it was sent: a node that lost its memory lives again."""

    letter: Letter
    life: int


class Blobs:
    """Byte strings by number, each distinct one once: what stands for letters in JSON."""

    def __init__(self, blobs: Iterable[bytes] = ()) -> None:
        self.blobs = list(blobs)
        self._numbers = {blob: number for number, blob in enumerate(self.blobs)}

    def put(self, blob: bytes) -> int:
        """Return the number of ``blob``."""
        number = self._numbers.setdefault(blob, len(self.blobs))
        if number == len(self.blobs):
            self.blobs.append(blob)
        return number


def numbered(instruction: Instruction, blobs: Blobs) -> Parts:
    """Return an instruction JSON-able: its parts, with the letters as numbers of ``blobs``."""
    parts = instruction.to_parts()
    return parts | {name: [blobs.put(payload) for payload in parts[name]] for name in ("mail", "returned")}


def lettered(parts: Mapping[str, Any], blobs: Sequence[bytes]) -> Instruction:
    """Recreate an instruction from :func:`numbered`."""
    given = {name: [blobs[number] for number in parts[name]] for name in ("mail", "returned")}
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
        Letters that could go neither to their receivers nor back, since their senders' lives had ended too.
    """

    def __init__(self, n: int, *, returns: bool = True) -> None:
        self.returns = returns
        self.lives = [0] * n
        self.lost = 0
        self._boxes: list[list[Parcel]] = [[] for _ in range(n)]
        self._returned: list[list[Letter]] = [[] for _ in range(n)]
        self._broken: dict[int, set[int]] = {}

    def waits(self, node: int) -> bool:
        """Whether there is anything for ``node``: mail, or own letters that come back."""
        return bool(self._boxes[node] or self._returned[node])

    def comes_back(self, node: int) -> bool:
        """Whether own letters of ``node`` come back."""
        return bool(self._returned[node])

    def letters_of(self, node: int) -> int:
        """Return how many letters of ``node``'s present life are in boxes."""
        life = self.lives[node]
        return sum(p.letter.source == node and p.life == life for box in self._boxes for p in box)

    def put(self, letter: Letter, *, receiving: bool, whole: bool, dense: bool = False) -> bool:
        """Post a letter; return whether it is on its way. Otherwise it goes back at once.

        Parameters
        ----------
        receiving : bool
            Whether the destination takes mail.
        whole : bool
            Whether it carries the whole estimate, so that it mends a broken edge. Along a broken edge nothing else
            goes: the receiver could not use it.
        dense : bool
            Whether it is of a closing iteration. Such a letter concerns no estimate: it goes along a broken edge, and
            mends none.
        """
        broken = self._broken.get(letter.source)
        if broken is not None and letter.destination in broken:
            if whole and receiving and not dense:
                broken.discard(letter.destination)
            receiving = receiving and (whole or dense)
        if receiving:
            self._boxes[letter.destination].append(Parcel(letter, self.lives[letter.source]))
        elif self.returns:
            self._returned[letter.source].append(letter)
        return receiving

    def take(self, node: int) -> tuple[Parcel, ...]:
        """Empty ``node``'s box: by source, of one source in the order sent."""
        parcels = self.look(node)
        self._boxes[node] = []
        return parcels

    def look(self, node: int) -> tuple[Parcel, ...]:
        """Return what :meth:`take` would."""
        return tuple(sorted(self._boxes[node], key=_source))

    def take_returned(self, node: int) -> tuple[Letter, ...]:
        """Return own letters that come back to ``node``, which gets them now."""
        letters = tuple(self._returned[node])
        self._returned[node] = []
        return letters

    def look_returned(self, node: int) -> tuple[Letter, ...]:
        """Return what :meth:`take_returned` would."""
        return tuple(self._returned[node])

    def refuse(self, parcels: Iterable[Parcel], sources: Iterable[int], node: int) -> list[Letter]:
        """Send back what ``node`` could not apply, those of ``parcels`` that are from ``sources``, and whatever else of
        theirs waits for it: it follows the former. Their edges need whole estimates. Return these letters."""
        refused = set(sources)
        for source in refused:
            self._broken.setdefault(source, set()).add(node)
        back = [p for p in (*parcels, *self._boxes[node]) if p.letter.source in refused]
        self._boxes[node] = [p for p in self._boxes[node] if p.letter.source not in refused]
        return self._send_back(back)

    def end(self, node: int, parcels: Iterable[Parcel]) -> list[Letter]:
        """End a life of ``node``: ``parcels``, which it had been given, and its box go back; what comes back to itself
        is lost with it. Return the letters that were not delivered."""
        self.lost += len(self._returned[node])
        self._returned[node] = []
        # After this its own letters to others stay good, but cannot come back.
        self.lives[node] += 1
        back = [*parcels, *self._boxes[node]]
        self._boxes[node] = []
        return self._send_back(back)

    def _send_back(self, parcels: Sequence[Parcel]) -> list[Letter]:
        for parcel in parcels if self.returns else ():
            source = parcel.letter.source
            if parcel.life == self.lives[source]:
                self._returned[source].append(parcel.letter)
            else:
                self.lost += 1
        return [parcel.letter for parcel in parcels]

    def clear(self) -> list[Letter]:
        """Empty all boxes of a run whose nodes all begin anew; return what was in them."""
        letters = [parcel.letter for box in self._boxes for parcel in box]
        self._boxes = [[] for _ in self._boxes]
        return letters

    def break_edges(self, node: int, others: Iterable[int]) -> None:
        """Note that ``node`` and ``others`` know nothing of each other: whole estimates are needed both ways."""
        self._broken[node] = set(others)
        for other in self._broken[node]:
            self._broken.setdefault(other, set()).add(node)

    def broken(self, source: int) -> set[int]:
        """Return to whom ``source`` must send whole estimates."""
        return self._broken.get(source, set())

    def get_state(self, blobs: Blobs) -> dict[str, Any]:
        """Return everything, JSON-able; letters as numbers of ``blobs``."""
        return {
            "lives": list(self.lives),
            "lost": self.lost,
            "boxes": [[[p.letter.source, p.life, blobs.put(p.letter.payload)] for p in box] for box in self._boxes],
            "returned": [
                [[letter.destination, blobs.put(letter.payload)] for letter in letters] for letters in self._returned
            ],
            "broken": [[source, sorted(to)] for source, to in sorted(self._broken.items()) if to],
        }

    def set_state(self, state: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Go on from :meth:`get_state`."""
        self.lives = [int(life) for life in state["lives"]]
        self.lost = int(state["lost"])
        self._boxes = [
            [Parcel(Letter(source, node, blobs[number]), life) for source, life, number in box]
            for node, box in enumerate(state["boxes"])
        ]
        self._returned = [
            [Letter(node, destination, blobs[number]) for destination, number in letters]
            for node, letters in enumerate(state["returned"])
        ]
        self._broken = {source: set(to) for source, to in state["broken"]}


def _source(parcel: Parcel) -> int:
    return parcel.letter.source
