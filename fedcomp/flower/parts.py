"""What both sides of a layer-by-layer round say: how a frame is divided, and which part a message holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fedcomp.flower.schema import Schema
from fedcomp.rules import Int, Many

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
