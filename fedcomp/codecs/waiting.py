"""Codecs of two exchanges: the update stays in the client's state until the second exchange says what to send."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final, Generic, Protocol, TypeVar

import numpy as np

from fedcomp.codecs.base import Codec, State, all_finite, norm, require_finite
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.memory import not_finite, vector_of
from fedcomp.codecs.positional import stretches
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.wire import Frame

LONGEST: Final = float(np.finfo(np.float32).max) / 256.0
"""Euclidean norm of a tensor up to which float32 holds the sum of 65,536 products with orthonormal columns."""

_WAITING: Final = "update"
_BLOCK: Final = "basis"
_BLOCK_ID: Final = "basis-id"


class Waiting(Wrapper):
    """Base of such codecs. An update that has not left when the next one comes joins the memory.

    Attributes
    ----------
    remembers : bool
    phases : int
    passing : frozenset of str
        What of the state does not last to the next round, beside the update that waits.
    """

    remembers = True
    phases = 2
    passing: ClassVar[frozenset[str]] = frozenset()

    @property
    @abstractmethod
    def feedback(self) -> ErrorFeedback:
        """The memory, around what encodes without an exchange."""

    def init(self, layout: Layout) -> State:
        return self.feedback.init(layout)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        return self.feedback.encode(update, self.settle(state, update.layout), key)

    def begin(self, update: Update, state: State, key: Key) -> State:
        """Return ``state`` with ``update`` waiting; an update that still waits joins the memory first.

        Raises
        ------
        NonFiniteUpdate
            When the update, or its sum with the memory, holds NaN or infinity, or cannot be sent.
        """
        require_finite(update)
        settled = self.settle(state, update.layout)
        with np.errstate(over="ignore", invalid="ignore"):
            # Formed only to be checked: a sum that overflows has to fail here, before anything is chosen from it.
            total = settled["memory"] + update.vector
        if not all_finite(total):
            raise not_finite(update, {"memory": settled["memory"]})
        self.require_sendable(total, update.layout)
        # A copy: the update's buffer is the caller's and may change before the update leaves.
        return {**settled, "round": np.asarray(key.round, np.int64), _WAITING: update.vector.copy()}

    def require_sendable(self, total: Vector, layout: Layout) -> None:
        """Refuse a p of which nothing could ever be sent: it would stay in the memory for good."""

    def total(self, state: State, layout: Layout) -> Vector:
        """Return p, memory plus waiting update: what is sent of.

        Raises
        ------
        StateError
            When no update waits.
        """
        return vector_of(state, "memory", layout) + self.waiting(state, layout).vector

    def settle(self, state: State, layout: Layout) -> State:
        """Return ``state`` with a waiting update taken into the memory as one that was not sent."""
        kept = self.lasting(state)
        memory = vector_of(state, "memory", layout)
        if _WAITING not in state:
            return kept
        update = vector_of(state, _WAITING, layout)
        # With an empty support the dense rest would still be delivered, so this is not a frame of nothing.
        return {**kept, "memory": self.feedback.absorb(memory, update)}

    def waiting(self, state: State, layout: Layout) -> Update:
        """Return the update that waits.

        Raises
        ------
        StateError
            When none does.
        """
        if _WAITING not in state:
            raise StateError("no update waits to be sent here; train first")
        return Update(vector_of(state, _WAITING, layout), layout)

    def lasting(self, state: State) -> State:
        """Return what of ``state`` lasts from round to round."""
        return {name: array for name, array in state.items() if name != _WAITING and name not in self.passing}


class NamedBasis(Protocol):
    """A basis that travels as a frame and is called by a number of 63 bits."""

    @property
    def id(self) -> int:
        """A digest of all of it."""
        ...

    def frame(self) -> Frame:
        """Return it as it travels."""
        ...


B = TypeVar("B", bound=NamedBasis)


class InBasis(Waiting, Generic[B]):
    """Base of such codecs whose values are coefficients in a basis that all clients share.

    With the last frame the state keeps the basis it was sent in, by which its mass goes back into the memory.
    """

    passing: ClassVar[frozenset[str]] = frozenset({_BLOCK, _BLOCK_ID})

    @abstractmethod
    def open_basis(self, frame: Frame, number: int, layout: Layout) -> B:
        """Return the basis that is called ``number``, of a frame.

        Raises
        ------
        WireError
            When the frame does not hold it.
        """

    def require_sendable(self, total: Vector, layout: Layout) -> None:
        """Refuse a p that is too long for sums of its products with a basis, whichever that will be.

        Raises
        ------
        NonFiniteUpdate
            With the tensor's name.
        """
        name = too_long(total, layout)
        if name is not None:
            raise NonFiniteUpdate(
                f"{name}: update and memory are longer than {LONGEST:.1e}, and their products with a basis would "
                "overflow float32; nothing of this update is kept"
            )

    @property
    def feedback(self) -> ErrorFeedback:
        return self.around(self.codec)

    @abstractmethod
    def around(self, codec: Codec) -> ErrorFeedback:
        """Return the memory around what encodes."""

    @abstractmethod
    def reader(self, basis: B, state: State) -> Codec:
        """Return what wrote the last frame, which was sent in ``basis`` and left ``state``."""

    def send_with(self, codec: Codec, basis: B, state: State, layout: Layout, key: Key) -> tuple[Frame, State]:
        """Return the frame of the waiting update's p by ``codec``, and the state after it was sent.

        Raises
        ------
        StateError
            When no update waits.
        """
        update = self.waiting(state, layout)
        frame, after = self.around(codec).encode(update, self.lasting(state), key)
        block = np.frombuffer(basis.frame(), np.uint8)
        return frame, {**after, _BLOCK: block, _BLOCK_ID: np.asarray(basis.id, np.int64)}

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        basis = self.held(state, layout)
        # The frame was encoded without an exchange, by a client without others.
        if basis is None:
            return self.feedback.rollback(state, frame, layout)
        return self.around(self.reader(basis, state)).rollback(self.lasting(state), frame, layout)

    def held(self, state: State, layout: Layout) -> B | None:
        """Return the basis that the last frame was sent in; None where there is none in ``state``.

        Raises
        ------
        StateError
            When it is damaged.
        """
        number = id_of_basis(state)
        if _BLOCK not in state or number is None:
            return None
        return self.open_basis(state[_BLOCK].tobytes(), number, layout)


def too_long(vector: Vector, layout: Layout) -> str | None:
    """Return the name of a tensor whose coefficients, or what they stand for, could overflow; None where none is."""
    return next((s.name for s in stretches(layout, "layer") if norm(vector[s.slice]) > LONGEST), None)


def id_of_basis(state: State) -> int | None:
    """Return the id of the basis that the last frame was sent in; None where it was sent in none.

    Raises
    ------
    StateError
        When it is damaged.
    """
    number = state.get(_BLOCK_ID)
    if number is None:
        return None
    if number.shape != () or number.dtype.kind != "i":
        raise StateError("the state's basis id is damaged; start from init(layout)")
    return int(number)
