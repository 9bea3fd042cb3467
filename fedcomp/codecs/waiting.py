"""Codecs of two exchanges: an update waits in the client's state for what all clients send on."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import numpy as np

from fedcomp.codecs.base import State, all_finite, require_finite
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.memory import not_finite, vector_of
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import StateError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key

_WAITING: Final = "update"


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
        """Return a state with empty memory."""
        return self.feedback.init(layout)

    def begin(self, update: Update, state: State, key: Key) -> State:
        """Return ``state`` with ``update`` waiting; an update that still waits joins the memory first.

        Raises
        ------
        NonFiniteUpdate
            When the update, or its sum with the memory, holds NaN or infinity.
        """
        require_finite(update)
        settled = self.settle(state, update.layout)
        with np.errstate(over="ignore", invalid="ignore"):
            # Formed only to be checked: a sum that overflows has to fail here, before anything is chosen from it.
            total = settled["memory"] + update.vector
        if not all_finite(total):
            raise not_finite(update, {"memory": settled["memory"]})
        # A copy: the update's buffer is the caller's and may change before the update leaves.
        return {**settled, "round": np.asarray(key.round, np.int64), _WAITING: update.vector.copy()}

    def total(self, state: State, layout: Layout) -> Vector:
        """Return p, memory plus waiting update: what is sent of; the memory alone when nothing waits."""
        memory = vector_of(state, "memory", layout)
        return memory + vector_of(state, _WAITING, layout) if waits(state) else memory

    def settle(self, state: State, layout: Layout) -> State:
        """Return ``state`` with a waiting update taken into the memory as one that was not sent."""
        kept = self.lasting(state)
        memory = vector_of(state, "memory", layout)
        if not waits(state):
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
        if not waits(state):
            raise StateError("no update waits to be sent here; train first")
        return Update(vector_of(state, _WAITING, layout), layout)

    def lasting(self, state: State) -> State:
        """Return what of ``state`` lasts from round to round."""
        return {name: array for name, array in state.items() if name != _WAITING and name not in self.passing}


def waits(state: State) -> bool:
    """Whether an update waits in ``state`` to be sent."""
    return _WAITING in state
