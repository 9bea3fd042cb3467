"""Assignments of records to teachers: disjoint ones, and one that overlaps.

A vote is bounded per teacher, so a record that two teachers hold moves the sum twice as far as was paid for. Who gets a
record must also depend on nothing but the record: a deal that goes through the data in turn moves the later records of
its class when one is taken out, and then many teachers change at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.rng import Key

MNIST_CLASSES = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Training images of each class of MNIST."""


def by_hash(ids: Iterable[int], teachers: int, key: Key) -> NDArray[np.int64]:
    """Return the teacher of each record, int64 ``(N,)``: a keyed hash of its id.

    Every record has exactly one teacher, whatever the classes, and keeps it whatever other records there are. Sizes
    differ by chance, and a teacher may be left without records.

    Parameters
    ----------
    ids : iterable of int
        A permanent name of a record; here its position in the training split.
    teachers : int
        At least 1.

    Raises
    ------
    ConfigError
        For any other number of teachers.
    """
    teachers = params.integer("teachers", teachers, low=1)
    listed = [int(i) for i in ids]
    if teachers == 1:
        return np.zeros(len(listed), np.int64)
    return np.array([key.at(layer=i).u64() % teachers for i in listed], np.int64)


def wrapping_deal(labels: NDArray[np.integer], teachers: int, each: int) -> NDArray[np.int64]:
    """Return what DataLens' published code deals out, positions of records, int64 ``(teachers, each)``.

    Records are dealt class by class in turn, and a class that has run out starts over (read): with classes of unequal
    size some records have two teachers and others none. It is here to measure that; nothing learns from it.

    Raises
    ------
    ConfigError
        When there are no records.
    """
    labels = np.asarray(labels)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if not members or any(not len(m) for m in members):
        raise ConfigError("there are no records to deal")
    turn, place = np.divmod(np.arange(teachers * each), len(members))
    sizes = np.array([len(m) for m in members])
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(members)[starts[place] + turn % sizes[place]].reshape(teachers, each)


def shared_records(dealt: NDArray[np.int64], records: int) -> tuple[int, int]:
    """Return how many of ``records`` records have more than one teacher, and how many have none."""
    # A teacher that is dealt the same record twice is still one teacher.
    pairs = np.unique(np.stack([np.repeat(np.arange(len(dealt)), dealt.shape[1]), dealt.reshape(-1)]), axis=1)
    held = np.bincount(pairs[1], minlength=records)
    return int((held > 1).sum()), int((held == 0).sum())
