"""What the server of a DataLens run and its teachers say to each other, as Flower's records.

One kind of message, ``train.datalens``: a :class:`TrainingRequest` and what there is to look at, either the generated
images themselves (one frame of float32) or the generator's weights, of which a teacher makes as many images as it
wants. The answer is one frame of packed votes and nothing else: no loss, no number of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import StateError
from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.schema import MOST_VALUES, Schema
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Real, Text

ACTION: Final = "datalens"
TYPE: Final = f"train.{ACTION}"
"""Action and type of the messages."""

HEADER: Final = "fedcomp.datalens"
"""Name of the ConfigRecord with the request."""

MODEL: Final = "arrays"
"""Name of the ArrayRecord with the generator's weights."""

IMAGES: Final = "fedcomp.datalens.images"
VOTES: Final = "fedcomp.datalens.votes"
"""Keys of the frames with images, down, and with votes, up."""

SENDS: Final = ("generator", "images")
"""What goes down."""

_STATE: Final = "fedcomp.datalens.state"
_ANSWER: Final = "fedcomp.datalens.answer"

Arrays = Mapping[str, NDArray[Any]]
Name = Annotated[str, Text(256, least=1)]
# A seed has all of 64 bits, and Flower's records hold signed integers.
Word = Annotated[int, Int(least=-(2**63))]
Steps = Annotated[int, Int(most=1 << 20)]

MOST_STEPS: Final = 1 << 24
"""Steps of all teachers of a node together that one message may ask for."""


@dataclass(frozen=True)
class TrainingRequest(Schema, key=HEADER):
    """What every message asks of the teachers of a node.

    Attributes
    ----------
    session : str
        Names the run: another one is another generator, for which teachers start over.
    sequence : int
        Number of the message in its session, from 1.
    draw : int
        The public word noise, labels and batches of this message are drawn from.
    images, pixels : int
        B generated images of d pixels.
    teachers : int
        Of one client.
    k : int
        Votes of one teacher on one image.
    saturation : float
        Magnitudes above it vote with certainty; 0 for none.
    stochastic : bool
    steps, pretrain : int
        Steps of the discriminators before they vote, and as many more before their first votes.
    batch : int
        Records of a step; a teacher with fewer takes all it has.
    lr, decay : float
        Of the discriminators' Adam.
    seed : int
        Names who holds which record, and initial values.
    pad : bool
        Whether answers are padded to the longest that any votes could make.
    """

    session: Name
    sequence: Annotated[int, Int(1)]
    draw: Word
    images: Annotated[int, Int(1, 1 << 20)]
    pixels: Annotated[int, Int(1, 1 << 24)]
    teachers: Annotated[int, Int(1, 1 << 16)]
    k: Annotated[int, Int(1, 1 << 24)]
    saturation: Annotated[float, Real(least=0.0)]
    stochastic: Annotated[bool, Flag()]
    steps: Steps
    pretrain: Steps
    batch: Annotated[int, Int(1, 1 << 31)]
    lr: Annotated[float, Real()]
    decay: Annotated[float, Real()]
    seed: Word
    pad: Annotated[bool, Flag()] = True

    def conflict(self) -> str:
        # Every teacher makes them.
        if self.teachers * (self.steps + self.pretrain) > MOST_STEPS:
            return (
                f"{self.teachers} teachers with {self.steps} + {self.pretrain} steps: more than {MOST_STEPS} together"
            )
        # A step has the images of every teacher in memory, and so has a vote; a batch is as long as it was asked for.
        most = max(self.images, self.batch)
        if self.teachers * self.pixels * most > MOST_VALUES:
            each = f"{self.teachers} teachers with {most} images of {self.pixels} pixels"
            return f"{each}: more than {MOST_VALUES} numbers"
        return ""

    @property
    def rows(self) -> int:
        """Rows of votes in an answer: one per teacher and image, teachers one after the other."""
        return self.teachers * self.images

    @property
    def key(self) -> Key:
        """What everything public of this message is drawn from."""
        return Key(self.draw, "datalens")


def put_images(content: RecordDict, images: NDArray[np.float32]) -> None:
    """Write images as they are in memory: little-endian float32, ``(B, d)``."""
    # Little-endian on every machine: the same bytes have to be the same images to all teachers.
    put_frame(content, IMAGES, np.ascontiguousarray(images, "<f4").tobytes())


def take_images(message: Message, request: TrainingRequest) -> NDArray[np.float32] | None:
    """Return the images of a message, float32 ``(B, d)``; None when it brings the generator instead.

    Raises
    ------
    PayloadError
        When there are as many bytes as for another number of images.
    """
    data = take_frame(message.content, IMAGES)
    if data is None:
        return None
    if len(data) != 4 * request.images * request.pixels:
        raise PayloadError(
            f"{len(data)} bytes of images, expected {request.images} of {request.pixels} pixels of 4 bytes each"
        )
    # astype() copies: a view of the frame would be read-only.
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(request.images, request.pixels)


@dataclass(frozen=True)
class Answered(Schema, key="fedcomp.datalens.kept"):
    """Which request the stored answer is to."""

    session: Name
    sequence: Annotated[int, Int(1)]


@dataclass(frozen=True)
class TeacherMemory:
    """All that a teacher has in its ``context.state``.

    Attributes
    ----------
    session, sequence
        Of the last request it has answered.
    state : dict of str to ndarray
        Discriminators and their optimisers.
    answer : bytes
        The votes it has answered with.
    """

    session: str
    sequence: int
    state: Arrays
    answer: bytes

    @classmethod
    def load(cls, context: Context) -> TeacherMemory | None:
        """Return what this node keeps; None when it keeps nothing. Modifies nothing.

        Raises
        ------
        StateError
            When what is there cannot be read.
        """
        try:
            to = Answered.find(context.state)
            if to is None:
                return None
            answer, held = take_frame(context.state, _ANSWER), context.state.array_records.get(_STATE)
            if held is None or answer is None:
                raise PayloadError("a part is missing")
            return cls(to.session, to.sequence, to_arrays(held), answer)
        # Damaged arrays fail in whatever way numpy comes across them.
        except (PayloadError, ValueError, TypeError) as error:
            raise StateError(f"this node's teachers cannot be read: {error}; restart the node") from error

    def save(self, context: Context) -> None:
        """Write all of it; the last thing a handler does."""
        context.state[_STATE] = to_record(self.state)
        put_frame(context.state, _ANSWER, self.answer)
        Answered(self.session, self.sequence).put(context.state)


def generator_of(message: Message) -> dict[str, NDArray[Any]]:
    """Return the generator's weights.

    Raises
    ------
    PayloadError
        When the message brings none.
    """
    found = message.content.get(MODEL)
    if not isinstance(found, ArrayRecord) or not found:
        raise PayloadError(f"the message brings neither images nor a generator under {MODEL!r}")
    return to_arrays(found)
