"""What the server of a DataLens run and its teachers say to each other, as Flower's records.

One kind of message, ``train.datalens``: a :class:`Lesson` and what there is to look at, either the generated images
themselves (one frame of float32) or the generator's weights, of which a teacher makes as many images as it wants. The
answer is one frame of packed votes and nothing else: no loss, no number of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import StateError
from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.rng import Key

ACTION: Final = "datalens"
TYPE: Final = f"train.{ACTION}"
"""Action and type of the messages."""

HEADER: Final = "fedcomp.datalens"
"""Name of the ConfigRecord with the lesson."""

MODEL: Final = "arrays"
"""Name of the ArrayRecord with the generator's weights."""

IMAGES: Final = "fedcomp.datalens.images"
VOTES: Final = "fedcomp.datalens.votes"
"""Keys of the frames with images, down, and with votes, up."""

SENDS: Final = ("generator", "images")
"""What goes down."""

_KEPT: Final = "fedcomp.datalens.kept"
_STATE: Final = "fedcomp.datalens.state"
_ANSWER: Final = "fedcomp.datalens.answer"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Lesson:
    """What every message says.

    Attributes
    ----------
    session : str
        Names the run: another one is another generator, for which teachers begin anew.
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

    session: str
    sequence: int
    draw: int
    images: int
    pixels: int
    teachers: int
    k: int
    saturation: float
    stochastic: bool
    steps: int
    pretrain: int
    batch: int
    lr: float
    decay: float
    seed: int
    pad: bool = True

    @property
    def rows(self) -> int:
        """Rows of votes in an answer: one per teacher and image, teachers one after the other."""
        return self.teachers * self.images

    @property
    def key(self) -> Key:
        """What everything public of this message is drawn from."""
        return Key(self.draw, "datalens")

    def put(self, content: RecordDict) -> None:
        """Write the lesson."""
        content[HEADER] = ConfigRecord(asdict(self))

    @classmethod
    def of(cls, message: Message) -> Lesson:
        """Return the lesson a message brings.

        Raises
        ------
        PayloadError
            When it brings none, or its entries are of other names or types.
        """
        found = message.content.get(HEADER) if message.has_content() else None
        if not isinstance(found, ConfigRecord):
            raise PayloadError(f"the message has no record {HEADER!r}: it does not come from a DataLens server")
        types = {"str": str, "int": int, "float": float, "bool": bool}
        form = {f.name: types[str(f.type)] for f in fields(cls)}
        # type() and not isinstance(): True is an int.
        wrong = [name for name, kind in form.items() if type(found.get(name)) is not kind]
        if wrong or len(found) != len(form):
            raise PayloadError(
                f"record {HEADER!r} does not describe a lesson: entries {wrong or sorted(set(found) - set(form))} are "
                "missing, unknown or of another type; server and client are of different versions"
            )
        values: dict[str, Any] = dict(found)
        if min(values[n] for n in ("sequence", "images", "pixels", "teachers", "k", "batch")) < 1:
            raise PayloadError(f"record {HEADER!r} asks for nothing: {values}")
        return cls(**values)


def put_images(content: RecordDict, images: NDArray[np.float32]) -> None:
    """Write images as they are in memory: little-endian float32, ``(B, d)``."""
    put_frame(content, IMAGES, np.ascontiguousarray(images, "<f4").tobytes())


def take_images(message: Message, lesson: Lesson) -> NDArray[np.float32] | None:
    """Return the images of a message, float32 ``(B, d)``; None when it brings the generator instead.

    Raises
    ------
    PayloadError
        When there are as many bytes as for another number of images.
    """
    data = take_frame(message.content, IMAGES)
    if data is None:
        return None
    if len(data) != 4 * lesson.images * lesson.pixels:
        raise PayloadError(
            f"{len(data)} bytes of images, expected {lesson.images} of {lesson.pixels} pixels of 4 bytes each"
        )
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(lesson.images, lesson.pixels)


@dataclass(frozen=True)
class Kept:
    """All that a teacher has in its ``context.state``.

    Attributes
    ----------
    session, sequence
        Of the last lesson it has answered.
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
    def load(cls, context: Context) -> Kept | None:
        """Return what this node keeps; None when it keeps nothing. Modifies nothing.

        Raises
        ------
        StateError
            When what is there cannot be read.
        """
        meta, held = context.state.config_records.get(_KEPT), context.state.array_records.get(_STATE)
        if meta is None:
            return None
        try:
            answer = take_frame(context.state, _ANSWER)
            if held is None or answer is None:
                raise PayloadError("a part is missing")
            session, sequence = meta["session"], meta["sequence"]
            if not isinstance(session, str) or not isinstance(sequence, int):
                raise PayloadError(f"it is of session {session!r}, message {sequence!r}")
            return cls(session, sequence, to_arrays(held), answer)
        except (PayloadError, KeyError, ValueError, TypeError) as error:
            raise StateError(f"this node's teachers cannot be read: {error}; restart the node") from error

    def save(self, context: Context) -> None:
        """Write all of it; the last thing a handler does."""
        context.state[_STATE] = to_record(self.state)
        put_frame(context.state, _ANSWER, self.answer)
        context.state[_KEPT] = ConfigRecord({"session": self.session, "sequence": self.sequence})


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
