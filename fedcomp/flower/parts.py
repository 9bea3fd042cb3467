"""What both sides of a layer-by-layer round say: which layers a frame is divided into, and which part a message holds.

A frame that has one tensor for each of the model's is sent as several, those of one layer together and the last layer
first, as back-propagation makes them. Put together again it is the same frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fedcomp import wire
from fedcomp.flower.schema import Schema
from fedcomp.layout import Layout
from fedcomp.rules import Int, Many
from fedcomp.wire import Frame, Limits

HEADER: Final = "fedcomp.parts"
PART: Final = "fedcomp.part/"
"""Before the number of a part, in a node's state."""

MAX_LAYERS: Final = 1 << 12


@dataclass(frozen=True)
class PartRequest(Schema, key=HEADER):
    """What the server asks for.

    Attributes
    ----------
    part : int
        Number of the part, 0 for the last layer's.
    sequence : int
        Of the training message whose frame is meant.
    tensors : tuple of int
        How many tensors each layer has, in the model's order; empty in all but the first message.
    """

    part: Annotated[int, Int(most=MAX_LAYERS)]
    sequence: Annotated[int, Int()]
    tensors: Annotated[tuple[int, ...], Many(Int(most=MAX_LAYERS), MAX_LAYERS)] = ()

    def conflict(self) -> str:
        """Return what contradicts what: layers beside another part than the first."""
        return f"{len(self.tensors)} tensors beside part={self.part}" if self.part and self.tensors else ""


@dataclass(frozen=True)
class PartAnswer(Schema, key=HEADER):
    """What a client answers beside a part: its number, how many there are, and the sequence number of the frame."""

    part: Annotated[int, Int(most=MAX_LAYERS)]
    parts: Annotated[int, Int(least=1, most=MAX_LAYERS)]
    sequence: Annotated[int, Int()]

    def conflict(self) -> str:
        """Return what contradicts what: a number of a part that there is not."""
        return f"part={self.part} of parts={self.parts}" if self.part >= self.parts else ""


def layers(layout: Layout) -> tuple[int, ...]:
    """Return how many tensors each layer has, in the layout's order: those whose names differ behind the last dot."""
    owners = (t.name.rpartition(".")[0] for t in layout.tensors)
    return tuple(len(list(group)) for _, group in itertools.groupby(owners))


def split(frame: Frame, tensors: Sequence[int]) -> list[Frame]:
    """Return a frame in parts, the last layer's first; the frame alone where it does not have a tensor for each."""
    found = wire.decode(frame).tensors
    if len(tensors) < 2 or len(found) != sum(tensors):
        return [frame]
    ends = list(itertools.accumulate(tensors))
    parts = [wire.encode(found[end - count : end]) for end, count in zip(ends, tensors, strict=True)][::-1]
    # A frame that says more than its tensors do would come out as another one.
    return parts if joined(parts) == frame else [frame]


def joined(parts: Sequence[Frame], limits: Limits | None = None) -> Frame:
    """Return the frame that was :func:`split` into ``parts``.

    Raises
    ------
    fedcomp.wire.WireError
        When one of them is no frame, or exceeds ``limits``.
    """
    found = [wire.decode(part) if limits is None else wire.decode(part, limits=limits) for part in reversed(parts)]
    return wire.encode([tensor for bundle in found for tensor in bundle.tensors])
