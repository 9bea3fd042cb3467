"""What the server of forward-gradient rounds and its clients say to each other beside the frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from flwr.app import RecordDict

from fedcomp.flower.payload import NODE_RECORD
from fedcomp.flower.records import config_in
from fedcomp.flower.schema import Schema
from fedcomp.rules import Int, Real

MEASURE: Final = "fedcomp.forward"


@dataclass(frozen=True)
class Measure(Schema, key=MEASURE):
    """What the server asks for: slopes along the directions of the announced codec, in place of training.

    Attributes
    ----------
    round : int
    step : float
        Step size by which slopes become an update.
    clip : float
        Largest magnitude of a slope; 0: none.
    """

    round: Annotated[int, Int()]
    step: Annotated[float, Real(above=0.0)]
    clip: Annotated[float, Real(least=0.0, absent=0.0)] = 0.0


@dataclass(frozen=True)
class Measured(Schema, key=NODE_RECORD, prefix="forward-"):
    """What a client says beside its frame, in the record in which it says who it is.

    Attributes
    ----------
    round : int
    left_out : int
        Slopes that are not finite: they are left out of the mean.
    cut : int
        Slopes that the clip made smaller.
    """

    round: Annotated[int, Int()]
    left_out: Annotated[int, Int(absent=0)] = 0
    cut: Annotated[int, Int(absent=0)] = 0

    @classmethod
    def read(cls, content: RecordDict) -> Measured | None:
        """Return what a reply says; None where it was not measured.

        Raises
        ------
        SchemaError
            When it is damaged.
        """
        said = config_in(content, NODE_RECORD)
        return cls.of(said) if any(name.startswith(cls.PREFIX) for name in said) else None
