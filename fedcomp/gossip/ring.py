"""Ring all-reduce of integer vectors: the sum equals the server's bit for bit, and partial sums fit their width.

Integers on a shared grid can be added in any order, which floats cannot: every worker of a ring starts at another part,
so that floating-point sums of a ring and of a server differ in the last place. Here both are one function of the set.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import LayoutError

__all__ = ["RingSum", "ring_sum", "sum_bits"]


def sum_bits(levels: int, workers: int) -> int:
    """Return the bits that hold every sum of ``workers`` integers from ``-levels`` to ``levels``.

    At most ``ceil(log2 workers)`` more than one of them needs (derived).

    Examples
    --------
    >>> sum_bits(7, 1), sum_bits(7, 4), sum_bits(7, 5)
    (4, 6, 7)
    """
    levels = params.integer("levels", levels, low=1)
    return (2 * levels * params.integer("workers", workers, low=1)).bit_length()


@dataclass(frozen=True, slots=True)
class RingSum:
    """What every worker holds after a ring all-reduce.

    Attributes
    ----------
    sums : tuple of ndarray of int64, (n,)
        One for each worker; all are equal.
    bits_sent : tuple of int
        What each worker sent, with every integer in the declared width.
    """

    sums: tuple[NDArray[np.int64], ...]
    bits_sent: tuple[int, ...]


def ring_sum(vectors: Sequence[NDArray[np.integer]], levels: int) -> RingSum:
    """Add the workers' vectors around a ring: reduce-scatter, then all-gather.

    Parameters
    ----------
    vectors : sequence of ndarray of integers, (n,)
        One for each worker, entries from ``-levels`` to ``levels``.
    levels : int
        The largest magnitude of an entry.

    Raises
    ------
    LayoutError
        When there are no vectors, their lengths differ, or an entry is beyond ``levels``.

    Examples
    --------
    >>> ring_sum([np.array([1, -2, 3]), np.array([3, 3, 3])], 3).sums[1]
    array([4, 1, 6])
    """
    workers = len(vectors)
    if not workers or len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
        raise LayoutError("a ring adds one flat vector of the same length for each of its workers")
    width = sum_bits(levels, workers)
    held = [vector.astype(np.int64) for vector in vectors]
    # One that is beyond its levels would make others' partial sums overflow, where nobody could tell whose it was.
    # Both ends are compared: the magnitude of the most negative int64 is negative itself.
    if any(v.size and (int(v.max()) > levels or int(v.min()) < -levels) for v in held):
        raise LayoutError(f"an entry is beyond {levels} levels")
    edges = [held[0].size * part // workers for part in range(workers + 1)]
    parts = [slice(low, high) for low, high in itertools.pairwise(edges)]
    sent = [0] * workers
    for hop in range(2 * (workers - 1)):
        moving = []
        # All send at once: what a worker passes on is what it held before this hop.
        for worker in range(workers):
            part = parts[(worker - hop) % workers]
            moving.append(held[worker][part].copy())
            sent[worker] += moving[-1].size * width
        for worker in range(workers):
            source = (worker - 1) % workers
            part = parts[(source - hop) % workers]
            # In the second half parts are finished sums, and replace what is held.
            if hop < workers - 1:
                held[worker][part] += moving[source]
            else:
                held[worker][part] = moving[source]
    return RingSum(tuple(held), tuple(sent))
