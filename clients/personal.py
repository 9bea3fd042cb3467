"""Tensors that stay on the client, and tensors with two names.

In personalised learning (FedPer, FedRep, FedBN) a client sends the whole model back, but takes some of its layers from
its own last round, not from the message. The difference between reply and message then never shrinks: error feedback
adds it up round after round, and a codec that looks at the whole model has bits for little else. The same holds for one
of two names of one tensor (tied embeddings): an app trains the tensor it loaded last.

What a client keeps to itself is noticed by what the reply follows. Where the server has moved a tensor and the reply
has moved by less than a quarter of that, several times in succession, the reply does not depend on what was received.
Judged are at most :data:`SAMPLE` values of each tensor, so that little has to be remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.report import shorten
from fedcomp.layout import Layout, Update, Vector

SAMPLE: Final = 256
"""The most values of a tensor that are followed."""

_RECORD: Final = "fedcomp.followed"

_KEPT: Final = -1
"""In place of evidence: known to be kept. It stays so for as long as the node has its state."""

# One value alone agrees by chance in one round of five: many have to, and in three messages at least.
_ENOUGH: Final = 72
_MOST_AT_ONCE: Final = 24
_FEWEST: Final = 8

_FOLLOWS: Final = 0.25
"""A reply that moved by less than this part of what the server moved does not follow it."""


@dataclass
class Followed:
    """What a node remembers of its last training messages, to see which tensors follow the server's.

    Attributes
    ----------
    layout : Layout
        Of the updates.
    evidence : ndarray of int64, shape (tensors,)
        How many values, in successive messages, did not follow; :data:`_KEPT` once there were enough.
    received, returned : ndarray of float64, shape (followed values,)
        The values that a former message brought and that its reply held. One that moved too little to judge by since is
        compared with the same message again.
    proven : dict of int to int
        Tensors that are another name of an earlier one, and that one: they came unlike and were returned alike.
    """

    layout: Layout
    evidence: NDArray[np.int64]
    received: NDArray[np.float64]
    returned: NDArray[np.float64]
    proven: dict[int, int] = field(default_factory=dict)

    @classmethod
    def load(cls, state: RecordDict, layout: Layout) -> Followed:
        """Return what the node remembers in its state; nothing for another model than it followed."""
        record = state.get(_RECORD)
        held = to_arrays(record) if isinstance(record, ArrayRecord) else {}
        wanted = {"evidence": (len(layout.tensors),), "received": (_total(layout),), "returned": (_total(layout),)}
        digest, pairs = held.pop("layout", None), held.pop("names", np.zeros((0, 2), np.int64))
        shapes = {name: array.shape for name, array in held.items()}
        if digest is not None and digest.tobytes() == layout.digest and shapes == wanted:
            return cls(layout, **held, proven={int(second): int(first) for second, first in pairs})
        # NaN differs from everything and moves nowhere: there is nothing to compare the first message with.
        nothing = np.full(_total(layout), np.nan)
        return cls(layout, np.zeros(len(layout.tensors), np.int64), nothing, nothing.copy())

    def save(self, state: RecordDict) -> None:
        """Write it into the node's state."""
        digest = np.frombuffer(self.layout.digest, np.uint8)
        held = {"evidence": self.evidence, "received": self.received, "returned": self.returned}
        if self.proven:
            held["names"] = np.array(sorted(self.proven.items()), np.int64)
        state[_RECORD] = to_record({"layout": digest, **held})

    def second_names(
        self, returned: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return which tensors of a reply are another name of an earlier one, and which of them are newly known.

        Tensors that always were equal may be trained each by itself, as the two biases of a recurrent layer are that
        begin at zero. Two names of one tensor come back alike also where they came unlike.
        """
        tensors = self.layout.tensors
        alike = equal_tensors(returned, self.layout)
        found = {
            second: first
            for second, first in alike.items()
            if self.proven.get(second) != first
            and not np.array_equal(before[tensors[second].name], before[tensors[first].name])
        }
        self.proven |= found
        return {second: first for second, first in alike.items() if self.proven.get(second) == first}, found

    @property
    def kept(self) -> list[int]:
        """The numbers of the tensors that the client keeps to itself."""
        return np.flatnonzero(self.evidence == _KEPT).tolist()

    def judge(self, update: Update, before: Mapping[str, NDArray[Any]]) -> list[str]:
        """Compare one more message and its reply; return the names of tensors that are known as kept from now on."""
        names, end = [], 0
        for number, t in enumerate(self.layout.tensors):
            places = _places(t.size)
            start, end = end, end + places.size
            if self.evidence[number] == _KEPT:
                continue
            received = before[t.name].reshape(-1)[places].astype(np.float64)
            returned = received + update.vector[t.slice][places]
            old, answer = self.received[start:end], self.returned[start:end]
            moved = np.isfinite(old) & (received != old)
            count = int(np.count_nonzero(moved))
            if count < min(_FEWEST, t.size) and np.isfinite(old).all():
                continue
            if count:
                far, followed = received[moved] - old[moved], returned[moved] - answer[moved]
                independent = _length(followed) < _FOLLOWS * _length(far)
                self.evidence[number] = self.evidence[number] + min(count, _MOST_AT_ONCE) if independent else 0
                if self.evidence[number] >= _ENOUGH:
                    self.evidence[number] = _KEPT
                    names.append(t.name)
            self.received[start:end], self.returned[start:end] = received, returned
        return names


def ease(update: Update, kept: list[int], copies: Mapping[int, int], owed: Vector | None) -> Update:
    """Return the update in which what a client keeps to itself crowds out nothing else, and is not added up.

    A tensor that is kept loses what the memory holds of it, and its difference counts for no more, value by value, than
    what the other tensors have to send. Of two names of one tensor the second has nothing to send.

    Parameters
    ----------
    kept : list of int
        Numbers of tensors.
    copies : mapping of int to int
        Numbers of tensors that are another one's second name, and that one's.
    owed : ndarray, optional
        The codec's memory, to which it adds the update.
    """
    if not kept and not copies:
        return update
    vector, tensors = update.vector.copy(), update.layout.tensors
    set_apart = {*kept, *copies}
    total = vector if owed is None else vector + owed
    others = [t.slice for number, t in enumerate(tensors) if number not in set_apart]
    values = sum(part.stop - part.start for part in others)
    # Nothing is crowded out where nothing else is to be sent.
    usual = _length(*(total[part] for part in others)) / np.sqrt(max(values, 1))
    for number in set_apart:
        part = tensors[number].slice
        own = _length(vector[part]) / np.sqrt(max(tensors[number].size, 1))
        if number in copies:
            vector[part] = 0.0
        elif 0.0 < usual < own:
            vector[part] *= np.float32(usual / own)
        if owed is not None:
            vector[part] -= owed[part]
    return Update(vector, update.layout)


def equal_tensors(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> dict[int, int]:
    """Return which tensors equal an earlier one in every bit, and are not constant."""
    first: dict[tuple[Any, ...], list[int]] = {}
    found = {}
    for number, t in enumerate(layout.tensors):
        array = arrays[t.name].reshape(-1)
        sample = array[_places(t.size)[:16]]
        if t.size < 2 or (sample == sample[0]).all():
            continue
        same = first.setdefault((t.shape, t.dtype, sample.tobytes()), [])
        for other in same:
            if np.array_equal(arrays[layout.tensors[other].name].reshape(-1), array):
                found[number] = other
                break
        else:
            same.append(number)
    return found


def kept_note(names: list[str], followed: Followed) -> str:
    """Return what a report says of tensors that were found to be kept, and what to do."""
    if len(followed.kept) == len(followed.evidence):
        return (
            "no tensor of this node's replies depends on the model it received, so nothing is learnt together: train "
            "the model in the message"
        )
    return (
        f"this node does not train {shorten(', '.join(names))} from the model it receives. Error feedback skips "
        "these tensors from now on; do not send them, or send them exactly (policy=)"
    )


def names_note(copies: Mapping[int, int], layout: Layout) -> str:
    """Return what a report says of tensors with two names."""
    pairs = ", ".join(f"{layout.tensors[a].name} is {layout.tensors[b].name}" for a, b in copies.items())
    return f"tensors have two names ({shorten(pairs)}): each is sent once, under the first"


def _length(*parts: NDArray[Any]) -> float:
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(np.square(part, dtype=np.float64).sum() for part in parts)))


def _total(layout: Layout) -> int:
    return sum(_places(t.size).size for t in layout.tensors)


# Spread without a period, so that no structure of a matrix is met again and again; the same at every message.
@lru_cache(4096)
def _places(size: int) -> NDArray[np.int64]:
    if size <= SAMPLE:
        return np.arange(size)
    fractions = np.arange(1, SAMPLE + 1) * 0.6180339887498949 % 1.0
    return np.unique((fractions * size).astype(np.int64))
